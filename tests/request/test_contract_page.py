"""docs/requests.md says what the server does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runtime.contract import FIELDS
from runtime.contract_page import main, page
from runtime.request import RequestError, parse_params, resolve
from tests.request.sizes import RELEASED

PAGE = Path(__file__).parents[2] / "docs" / "requests.md"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m runtime.contract_page docs/requests.md"


def test_every_field_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [field.name for field in FIELDS if f"| `{field.name}` |" not in text] == []


def test_the_example_resolves_as_it_reads() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    resolved = resolve("a cat", parse_params(example), RELEASED)
    assert (resolved.width, resolved.height, resolved.frames, resolved.forwards) == (256, 256, 107, 4)
    assert (resolved.media.crf, resolved.media.preset, resolved.seed) == (20, "fast", 7)


@pytest.mark.parametrize("params", [{"duration": 3.99}, {"fps": 30}, {"lora": {"name": "turbo"}}], ids=json.dumps)
def test_a_refusal_reads_as_on_the_page(params: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        resolve("a cat", {"aspect_ratio": "1:1", **params}, RELEASED)
    assert f"\n{caught.value}\n" in PAGE.read_text(encoding="utf-8")


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["contract_page", str(tmp_path / "page.md")])
    main()
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page()
