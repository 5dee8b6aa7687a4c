"""docs/profiles.md says what the planner says."""

from __future__ import annotations

from pathlib import Path

from h3trt.profile_page import page

PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m h3trt.profile_page docs/profiles.md"
