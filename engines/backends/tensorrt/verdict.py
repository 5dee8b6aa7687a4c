"""Whether a plan's layers are what its model asked for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from engines.backends.tensorrt.request import CensusError, Expected
from engines.layers import Layer

SHOWN = 10
"""Complaints that an error lists; it counts the rest."""


def check(graph: str, layers: Iterable[Layer], expected: Expected, profiles: int) -> None:
    """Looks for every expected node among the layers, which a plan has once for each of its optimisation profiles.

    Raises:
        CensusError: an attention is not one fused kernel, a matrix product has another data type or is not to be
            found, or a collective or a plugin is missing; names expected, found and the layers concerned.
    """
    complaints = list(_complaints(tuple(layers), expected, profiles))
    if complaints:
        rest = [f"and {len(complaints) - SHOWN} more"] if len(complaints) > SHOWN else []
        raise CensusError("\n".join([f"graph {graph}: not the plan that was asked for", *complaints[:SHOWN], *rest]))


def _complaints(layers: Iterable[Layer], expected: Expected, profiles: int) -> Iterator[str]:
    by_origin: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        for origin in layer.origins:
            by_origin[origin].append(layer)
    times = f" in each of {profiles} profiles" if profiles > 1 else ""
    for node in expected.attention_nodes:
        if sum(layer.is_attention for layer in by_origin[node]) != profiles:
            yield f"attention {node}: expected one fused kernel{times}, found {_show(by_origin[node])}"
    for node, dtype in expected.matmul_nodes.items():
        if not _computes(by_origin[node], dtype, profiles):
            yield f"matrix product {node}: expected {dtype}{times}, found {_show(by_origin[node])}"
    collectives = [layer for layer in layers if layer.is_collective]
    if len(collectives) > profiles * len(expected.collective_nodes):
        yield f"collectives: expected {len(expected.collective_nodes)}{times}, found {_show(collectives)}"
    for node in expected.collective_nodes:
        if sum(layer.is_collective for layer in by_origin[node]) != profiles:
            yield f"collective {node}: expected one{times}, found {_show(by_origin[node])}"
    yield from _missing_plugins(layers, expected, profiles)


def _computes(layers: Iterable[Layer], dtype: str, profiles: int) -> bool:
    """Whether the layers compute a matrix product for every profile, all of it on operands of that type."""
    products = [layer for layer in layers if layer.is_gemm]
    return len(products) >= profiles and all(layer.holds_twice(dtype) for layer in products)


def _missing_plugins(layers: Iterable[Layer], expected: Expected, profiles: int) -> Iterator[str]:
    plugins = [layer for layer in layers if layer.is_plugin]
    for name, wanted in sorted(Counter(expected.plugins).items()):
        # A name may be the beginning of another operator's; what an exporter puts behind it is a number.
        found = [layer for layer in plugins if re.search(rf"{name}(?!_?[a-z])", f"{layer.name} {layer.tactic}")]
        if len(found) != wanted * profiles:
            yield f"plugin {name}: expected {wanted * profiles} layers, found {_show(found)}"


def _show(layers: Iterable[Layer]) -> str:
    shown = [f"{layer.name} ({layer.census_kind}, {', '.join(_dtypes(layer))})" for layer in layers]
    return "; ".join(shown) or "no layer"


def _dtypes(layer: Layer) -> list[str]:
    return [tensor.dtype for tensor in layer.inputs]
