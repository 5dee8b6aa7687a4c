"""A refusal is one bounded line, the same for people and for programs."""

from __future__ import annotations

import json
import pickle

import pytest

from runtime.refusal import MISSING, RequestError, show


def test_the_line_names_field_value_rule_and_nearest() -> None:
    error = RequestError("width", 1350, "must be a multiple of 32", (1344, 1376))
    assert str(error) == "width: got 1350; must be a multiple of 32; nearest legal: 1344 or 1376"
    assert error.to_dict() == {
        "field": "width",
        "value": "1350",
        "rule": "must be a multiple of 32",
        "nearest": [1344, 1376],
        "message": str(error),
    }


def test_a_missing_value_is_called_missing() -> None:
    error = RequestError("aspect_ratio", MISSING, "required")
    assert str(error) == "aspect_ratio: missing; required"
    assert error.to_dict()["value"] is None


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 10**4000, 10**5000, [["deep"] * 9] * 9, {"a": {"b": {"c": {"d": 1}}}}], ids=type
)
def test_a_large_value_is_shown_short(value: object) -> None:
    assert len(show(value)) <= 80


@pytest.mark.parametrize("value", ["two\nlines", "\ud800", "\u202e", "\x1b[31m", b"\xff\n", {"\n": "\r"}])
def test_any_value_and_field_stay_printable_on_one_line(value: object) -> None:
    error = RequestError(str(value), value, "is refused")
    assert str(error).isprintable()
    json.dumps(error.to_dict()).encode("utf-8")


def test_json_words_are_shown_as_json() -> None:
    assert [show(value) for value in (True, False, None)] == ["true", "false", "null"]


def test_a_refusal_crosses_processes() -> None:
    for value in (30, MISSING):
        error = RequestError("fps", value, "must be 24", 24)
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert again.to_dict() == error.to_dict()
