"""Where other implementations lie that tests compare with: `make peers` downloads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.peers.vllm_omni import peer

PEERS = Path(__file__).parents[2] / "build" / "peers"


def wheel(pattern: str) -> Path:
    """The downloaded wheel of a peer, or the end of the test."""
    found = sorted(PEERS.glob(pattern))
    if not found:
        pytest.skip(f"{PEERS.relative_to(PEERS.parents[1])}/{pattern} is absent: make peers downloads it")
    return found[-1]


@pytest.fixture(scope="session")
def torchvision_wheel() -> Path:
    """torchvision, from which no binary is loaded."""
    return wheel("torchvision-*.whl")


@pytest.fixture(scope="module")
def theirs() -> Iterator[SimpleNamespace]:
    """vllm-omni's modules for MiniMax H3."""
    with peer(wheel("vllm_omni-*.whl")) as modules:
        yield modules
