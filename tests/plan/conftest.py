"""The release's outline, of which every plan here is made."""

from __future__ import annotations

import pytest

from engines.plan import released_outline
from export.checkpoint.outline import Outline


@pytest.fixture(scope="session")
def outline() -> Outline:
    return released_outline()
