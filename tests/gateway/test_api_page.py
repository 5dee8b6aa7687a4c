"""docs/gateway.md says what the gateway does."""

from __future__ import annotations

from pathlib import Path

from gateway.api_page import page

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"


def test_the_page_is_what_the_gateway_s_tables_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m gateway.api_page docs/gateway.md"
