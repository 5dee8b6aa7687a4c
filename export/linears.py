"""Which linear layers of which graphs are quantised, and which are kept, all by their exact names.

Kept are the float32 islands and what a small share of a step's time goes through. Biases and norms are no linear
layers; they are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from export.graphs.graph import Graph

Quantisable = Literal["text_encoder", "denoiser"]
"""Components whose linear layers may be quantised."""


class LinearsError(ValueError):
    """A graph's linear layers are not those that the lists below name."""


@dataclass(frozen=True)
class Linears:
    """A graph's linear layers by name; `*` stands for every index of a list of modules.

    `alternatives` are ways to hold the same projections: the layers of exactly one of them are there and quantised.
    `optional` layers are those of some models; they are quantised.
    """

    quantised: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    alternatives: tuple[tuple[str, ...], ...] = ()
    optional: tuple[str, ...] = ()


def _project(prefix: str) -> tuple[tuple[str, ...], ...]:
    """The projections into a transformer block's attention, in each way that a checkpoint packs them."""
    packings = (("qkv",), ("query", "key", "value"))
    return tuple(tuple(f"{prefix}attention.project.{name}" for name in packing) for packing in packings)


def _gate(prefix: str) -> tuple[str, ...]:
    """The gate of a block that attends to video tiles."""
    return (f"{prefix}attention.gate",)


def _finish(prefix: str) -> tuple[str, ...]:
    """The projection out of a transformer block's attention, and its feed-forward."""
    return tuple(prefix + name for name in ("attention.out", "feed_forward.gate_and_up", "feed_forward.down"))


LINEARS: Mapping[Quantisable, Mapping[str, Linears]] = {
    "text_encoder": {
        "text_encoder.embedding": Linears(),
        "text_encoder.layer": Linears(
            quantised=(
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        ),
    },
    "denoiser": {
        "context": Linears(_finish("blocks.*."), ("context_embedder",), _project("blocks.*.")),
        "modulation.time": Linears(kept=("linear_1", "linear_2")),
        "modulation.adaln": Linears(kept=("linear",)),
        "prologue": Linears(kept=("proj_in", "audio_proj_in")),
        "block": Linears(_finish("finish."), alternatives=_project("project."), optional=_gate("project.")),
        "block.project": Linears(alternatives=_project(""), optional=_gate("")),
        "block.attend": Linears(),
        "block.finish": Linears(quantised=_finish("")),
        "epilogue": Linears(kept=("proj_out", "audio_proj_out")),
    },
}
"""Every graph of each component, and its linear layers."""


def quantised_linears(graph: Graph) -> tuple[str, ...]:
    """Names of the linear layers of the graph's module that are to be quantised, in the module's order.

    Raises:
        LinearsError: the graph is not listed, a listed layer is not there, or one that is there is not listed.
    """
    with torch.device("meta"):
        module = graph.module()
    listed = _listed(graph)
    found = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    optional = set(_expand(module, listed.optional)) & set(found)
    quantised = {*_expand(module, listed.quantised), *_packing(graph, module, listed, found), *optional}
    kept = set(_expand(module, listed.kept))
    if missing := sorted((quantised | kept) - set(found)):
        raise LinearsError(f"graph {graph.name}: has no linear layer {missing}, which export.linears lists")
    if unlisted := [name for name in found if name not in quantised | kept]:
        raise LinearsError(f"graph {graph.name}: linear layer {unlisted} must be quantised or kept in export.linears")
    return tuple(name for name in found if name in quantised)


def _listed(graph: Graph) -> Linears:
    known = {name: linears for graphs in LINEARS.values() for name, linears in graphs.items()}
    if graph.name not in known:
        raise LinearsError(f"graph {graph.name}: is not listed in export.linears; listed are {', '.join(known)}")
    return known[graph.name]


def _packing(graph: Graph, module: nn.Module, listed: Linears, found: list[str]) -> tuple[str, ...]:
    """The names of the one alternative that the module has."""
    packings = [_expand(module, packing) for packing in listed.alternatives]
    there = [packing for packing in packings if set(packing) & set(found)]
    if packings and len(there) != 1:
        raise LinearsError(f"graph {graph.name}: must have the linear layers of one of {packings}, has {there}")
    return there[0] if there else ()


def _expand(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for pattern in names for name in _indexed(module, pattern))


def _indexed(module: nn.Module, pattern: str) -> list[str]:
    """The pattern's name for each index of the list of modules that it goes through."""
    before, star, after = pattern.partition("*.")
    if not star:
        return [pattern]
    children = module.get_submodule(before.removesuffix(".")).named_children()
    return [f"{before}{index}.{after}" for index, _ in children]
