"""Adds an adapter's low-rank side to the linear layers of blocks: inputs beside the weights, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from export.checkpoint.expressions import Weight
from export.graphs.attention import Projections
from export.graphs.graph import Graph

PROJECTIONS: Mapping[str, str] = {"query": "attn.to_q", "key": "attn.to_k", "value": "attn.to_v"}
"""What a block's `attention.project` makes, and the diffusers names of the linears that make it."""

LINEARS: Mapping[str, str] = {
    "attention.out": "attn.to_out.0",
    "feed_forward.gate_and_up": "ff.net.0.proj",
    "feed_forward.down": "ff.net.2",
}
"""A block's other linear layers, and their diffusers names."""

DOWN, UP = "down", "up"
"""The tensors of a side, after the diffusers name of its linear: [rank, inputs] and [outputs, rank]."""

_PROJECT = "attention.project"


class LowRank(nn.Module):
    """A product through `rank` channels."""

    def __init__(self, down: tuple[int, ...], up: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.down = nn.Linear(down[1], down[0], bias=False, dtype=dtype)
        self.up = nn.Linear(up[1], up[0], bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [S, K] to rows [S, N]."""
        result: torch.Tensor = self.up(self.down(x))
        return result


class LowRankLinear(nn.Module):
    """A linear layer, quantised or not, and its low-rank side."""

    def __init__(self, base: nn.Module, low_rank: LowRank) -> None:
        super().__init__()
        self.base, self.low_rank = base, low_rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [S, K] to rows [S, N]."""
        result: torch.Tensor = self.base(x) + self.low_rank(x)
        return result


class LowRankProjections(nn.Module):
    """Query, key and value projections and their low-rank sides, which are apart however the projections are packed."""

    def __init__(self, base: Projections, low_rank: Mapping[str, LowRank]) -> None:
        super().__init__()
        self.base, self.low_rank = base, nn.ModuleDict(low_rank)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows [S, D] to query, key and value, each [S, heads, head_dim]."""
        projected: tuple[torch.Tensor, ...] = self.base(x)
        sides = zip(projected, self.low_rank.values(), strict=True)
        return tuple(y + side(x).unflatten(-1, y.shape[1:]) for y, side in sides)


def add_low_rank(graph: Graph, tensors: Mapping[str, Weight]) -> Graph:
    """The graph of blocks with a low-rank side at each of their linears; none of its own weights changes.

    It may have been quantised: a side takes the same rows, and is computed in the graph's dtype. `tensors` are by the
    diffusers name of a linear, a dot, and `DOWN` or `UP`, all of one rank; rows of `UP` that make gate and up are in
    the checkpoint's order.
    """
    with torch.device("meta"):
        sides = tuple(_sides(graph.module()))
    return replace(
        graph,
        module=partial(_build, graph, sides, tensors),
        weights=tuple(
            _renamed(weights, sides) | {p: tensors[t] for side in sides for p, t in side.weights(index)}
            for index, weights in enumerate(graph.weights)
        ),
    )


@dataclass(frozen=True)
class _Side:
    """Where a side is: the path of the module that gets it, and the diffusers names of its linears within a block.

    `names` are by the part of the module that each makes, "" where there is one. `refiner`: the refiner's block; the
    other blocks are a graph's instances.
    """

    path: str
    names: Mapping[str, str]
    refiner: int | None

    def linear(self, name: str, instance: int) -> str:
        """The diffusers name of one of its linears."""
        if self.refiner is None:
            return f"transformer_blocks.{instance}.{name}"
        return f"token_refiner.refiner_blocks.{self.refiner}.{name}"

    def weights(self, instance: int) -> Iterator[tuple[str, str]]:
        """The parameters that the side adds to the graph's module, and the tensors that they are."""
        for part, name in self.names.items():
            place = ".".join(filter(None, (self.path, "low_rank", part)))
            for kind in (DOWN, UP):
                yield f"{place}.{kind}.weight", f"{self.linear(name, instance)}.{kind}"

    def wrap(self, base: nn.Module, tensors: Mapping[str, Weight], dtype: torch.dtype) -> nn.Module:
        """The module with its side; all instances have the same shapes."""
        shapes = {
            part: [tensors[f"{self.linear(name, 0)}.{kind}"].shape for kind in (DOWN, UP)]
            for part, name in self.names.items()
        }
        sides = {part: LowRank(down, up, dtype) for part, (down, up) in shapes.items()}
        return LowRankProjections(base, sides) if isinstance(base, Projections) else LowRankLinear(base, sides[""])


def _sides(module: nn.Module) -> Iterator[_Side]:
    for path, _ in module.named_modules():
        first, _, rest = path.partition(".")
        refiner = int(rest.partition(".")[0]) if first == "blocks" and rest else None
        if _ends(path, _PROJECT):
            yield _Side(path, PROJECTIONS, refiner)
        for ending, name in LINEARS.items():
            if _ends(path, ending):
                yield _Side(path, {"": name}, refiner)


def _ends(path: str, names: str) -> bool:
    return f".{path}".endswith(f".{names}")


def _build(graph: Graph, sides: tuple[_Side, ...], tensors: Mapping[str, Weight]) -> nn.Module:
    module = graph.module()
    for side in sides:
        base = module.get_submodule(side.path)
        module.set_submodule(side.path, side.wrap(base, tensors, graph.compute))
    return module


def _renamed(weights: Mapping[str, Weight], sides: tuple[_Side, ...]) -> dict[str, Weight]:
    """A graph's own weights by the names that they have below what wraps them."""
    return {_below(name, sides): weight for name, weight in weights.items()}


def _below(name: str, sides: tuple[_Side, ...]) -> str:
    for side in sides:
        if name.startswith(f"{side.path}."):
            return f"{side.path}.base.{name.removeprefix(f'{side.path}.')}"
    return name
