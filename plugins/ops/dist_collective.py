"""TensorRT's own collective, as an ONNX function that other back ends run as identity: what it is for a group of one.

TensorRT's ONNX importer goes by an operator's name alone: it makes `h3::DistCollective` its collective layer, and never
looks at the function. So a file with it is right in TensorRT for any number of ranks, and elsewhere for one rank only.
"""

from __future__ import annotations

from plugins.op import DOMAIN, ONNX_OPSET

NAME = "DistCollective"

FUNCTION = f"""<opset_import: ["" : {ONNX_OPSET}], domain: "{DOMAIN}">
    {NAME} <collective_operation, reduce_op, root, nb_rank> (x) => (result) {{ result = Identity (x) }}"""
"""Blocks of x along its first axis go to ranks, or sums of it come from all; `nb_rank` is the number of ranks."""


def collective(operation: str, x: str, result: str, reduce: str = "none") -> str:
    """The statement, in a body with the attribute `ranks`, that gives `x` to the other ranks: "all_to_all", or
    "all_reduce" with `reduce` "sum".
    """
    attributes = f'collective_operation = "{operation}", reduce_op = "{reduce}", root = -1, nb_rank: int = @ranks'
    return f"    {result} = {DOMAIN}.{NAME} <{attributes}> ({x})\n"
