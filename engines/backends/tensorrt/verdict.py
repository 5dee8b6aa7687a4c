"""Whether a plan's layers are what its model asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from engines.backends.tensorrt.request import CensusError, Expected
from engines.layers import Layer

SHOWN = 10
"""Complaints that an error lists; it counts the rest."""


def check(graph: str, layers: Iterable[Layer], expected: Expected, profiles: int) -> None:
    """Looks for every expected node among the layers of each optimisation profile.

    Raises:
        CensusError: an attention is not one fused kernel, a matrix product has another data type or is not to be
            found, or a collective or a plugin is missing; names expected, found and the layers concerned.
    """
    complaints = [c for profile in range(profiles) for c in _complaints(layers, expected, profile)]
    if complaints:
        rest = [f"and {len(complaints) - SHOWN} more"] if len(complaints) > SHOWN else []
        raise CensusError("\n".join([f"graph {graph}: not the plan that was asked for", *complaints[:SHOWN], *rest]))


def _complaints(layers: Iterable[Layer], expected: Expected, profile: int) -> Iterator[str]:
    within = [layer for layer in layers if layer.profile == profile]
    by_origin: dict[str, list[Layer]] = defaultdict(list)
    for layer in within:
        for origin in layer.origins:
            by_origin[origin].append(layer)
    for node in expected.attention_nodes:
        if sum(layer.is_attention for layer in by_origin[node]) != 1:
            yield f"attention {node}: expected one fused kernel, found {_show(by_origin[node])}"
    for node, dtype in expected.matmul_nodes.items():
        if not _computes(by_origin[node], dtype):
            yield f"matrix product {node}: expected {dtype}, found {_show(by_origin[node])}"
    for node in expected.collective_nodes:
        if not any(layer.census_kind.startswith("collective.") for layer in by_origin[node]):
            yield f"collective {node}: expected one, found {_show(by_origin[node])}"
    yield from _missing_plugins(within, expected)


def _computes(layers: Iterable[Layer], dtype: str) -> bool:
    """Whether the layers compute a matrix product, all of it on operands of that type."""
    products = [layer for layer in layers if layer.is_gemm]
    return bool(products) and all(layer.holds_twice(dtype) for layer in products)


def _missing_plugins(layers: Iterable[Layer], expected: Expected) -> Iterator[str]:
    kinds = [layer for layer in layers if layer.census_kind.startswith("plugin.")]
    for name in sorted(set(expected.plugins)):
        wanted = expected.plugins.count(name)
        found = [layer for layer in kinds if name in (layer.census_kind, layer.name) or name in layer.census_kind]
        if len(found) != wanted:
            yield f"plugin {name}: expected {wanted} layers, found {_show(found)}"


def _show(layers: Iterable[Layer]) -> str:
    shown = [f"{layer.name} ({layer.census_kind}, {', '.join(_dtypes(layer))})" for layer in layers]
    return "; ".join(shown) or "no layer"


def _dtypes(layer: Layer) -> list[str]:
    return [tensor.dtype for tensor in layer.inputs]
