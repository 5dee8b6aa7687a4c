"""docs/metrics.md and the dashboard name the metrics that there are."""

from __future__ import annotations

from pathlib import Path

from h3trt.metrics_page import page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m h3trt.metrics_page docs/metrics.md"
