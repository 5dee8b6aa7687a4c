"""How the torch operators of the registry become ONNX nodes of domain `h3` while a graph is exported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from plugins.op import DOMAIN, DOMAIN_VERSION, Op


def translation_table(ops: Iterable[Op]) -> dict[Any, Callable[..., Any]]:
    """The exporter's `custom_translation_table`: torch overload -> a function that records one node."""
    return {op.overload: _translation(op) for op in ops}


def _translation(op: Op) -> Callable[..., Any]:
    from onnxscript.values import Op as Node
    from onnxscript.values import Opset

    # The schema is handed over, not registered with onnx: a process that only loads the file has none either.
    record = Node(Opset(DOMAIN, DOMAIN_VERSION), op.name, op.onnx_schema())

    def translate(*arguments: Any) -> Any:
        named = dict(zip(inspect.signature(op.reference).parameters, arguments, strict=True))
        return record(*(named[n] for n in op.inputs), **{n: named[n] for n in op.attributes})

    return translate
