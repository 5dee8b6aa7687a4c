"""The field that names an adapter, as vllm-omni spells it, without what only the server's operator may say."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.kinds import Text
from runtime.refusal import RequestError

NAMES = ("name", "lora_name", "adapter")
SCALES = ("scale", "lora_scale")
FILES = ("path", "local_path", "lora_path", "lora_local_path", "int_id", "lora_int_id")
"""Keys by which other servers are told which file to load."""

NAME = Text(1, 64)


@dataclass(frozen=True)
class AdapterName:
    """An object that names an adapter; returns the name."""

    type_name = "object"
    range_text = '{"name": NAME}'
    rule = 'must be an object such as {"name": NAME}'

    def check(self, spelling: str, value: object) -> str:
        if not isinstance(value, Mapping):
            raise RequestError(spelling, value, self.rule)
        for key, content in value.items():
            self._check_key(spelling, key, content)
        given = [key for key in NAMES if key in value]
        if not given:
            raise RequestError(spelling, value, self.rule)
        if len(given) > 1:
            raise RequestError(f"{spelling}.{given[1]}", value[given[1]], f"not beside {given[0]}: give one of the two")
        return NAME.check(f"{spelling}.{given[0]}", value[given[0]])

    def _check_key(self, spelling: str, key: object, content: object) -> None:
        if type(key) is not str:
            raise RequestError(spelling, key, "keys must be strings")
        if key in FILES:
            rule = "not offered (the server's operator chooses which adapters it has; a request names one of these)"
            raise RequestError(f"{spelling}.{key}", content, rule)
        if key in SCALES and not (type(content) in (int, float) and content == 1):
            rule = "must be 1: an adapter is at the scale that it was trained at"
            raise RequestError(f"{spelling}.{key}", content, rule, 1)
        if key not in (*NAMES, *SCALES):
            close = difflib.get_close_matches(key[:64], (*NAMES, *SCALES), n=1)
            raise RequestError(f"{spelling}.{key}", content, "unknown field", close[0] if close else None)
