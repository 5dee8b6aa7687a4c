"""Every conformance vector against `resolve`."""

from __future__ import annotations

import json

import pytest

from runtime.request import RequestError, Resolved, parse_params, restore
from tests.request.media_vectors import MEDIA_VECTORS, resolve_with
from tests.request.sizes import RELEASED
from tests.request.vectors import VECTORS, Vector

ALL = [*VECTORS, *MEDIA_VECTORS]


def _resolve(vector: Vector) -> Resolved:
    return resolve_with(vector.prompt_bytes, parse_params(vector.params_bytes), vector.media, RELEASED)


def _named(vectors: list[Vector]) -> list[object]:
    return [pytest.param(vector, id=vector.name) for vector in vectors]


@pytest.mark.parametrize("vector", _named([one for one in ALL if one.refused is None]))
def test_a_legal_request_resolves(vector: Vector) -> None:
    text = _resolve(vector).model_dump_json()
    assert restore(text, RELEASED).model_dump_json() == text
    resolved = json.loads(text)
    expected = {**vector.resolves, "prompt": vector.prompt_bytes.decode()}
    assert {name: resolved[name] for name in expected} == expected


@pytest.mark.parametrize("vector", _named([one for one in ALL if one.refused is not None]))
def test_an_illegal_request_is_refused_with_field_value_and_rule(vector: Vector) -> None:
    refused = vector.refused
    assert refused is not None
    with pytest.raises(RequestError) as caught:
        _resolve(vector)
    message = str(caught.value)
    assert message.startswith(refused.opening)
    assert refused.rule in message
    if refused.nearest is not None:
        assert message.endswith(f"; nearest legal: {refused.nearest}")


def test_names_of_vectors_are_distinct() -> None:
    assert len({vector.name for vector in ALL}) == len(ALL)
