"""The sum of every rank's partial result, as linear layers split by their inner dimension leave it."""

from __future__ import annotations

import torch

from plugins.exchanges import ALL_REDUCE
from plugins.op import Op
from plugins.ops.dist_collective import FUNCTION, collective
from plugins.ranks import group_of_ranks


def reference(x: torch.Tensor, group: torch.Tensor, ranks: int) -> torch.Tensor:
    """The sum over all ranks of x, any shape, float32; bit-equal on each of them.

    group [1] int64, on the host: the handle of the ranks' group (`plugins.ranks.handle_of`), which has `ranks` ranks.

    Raises:
        LookupError: there is no such group.
        ValueError: it has another size, or x is not of float32: sums of narrower numbers lose what the parts had.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"all_reduce: x is {x.dtype}: must be torch.float32")
    return group_of_ranks(group, ranks).sum(x)


def fake(x: torch.Tensor, group: torch.Tensor, ranks: int) -> torch.Tensor:
    """A result with x's shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


OP = Op(
    ALL_REDUCE,
    reference,
    fake,
    collective("all_reduce", "x", "result", "sum"),
    plugin_shapes=lambda inputs, _: [list(inputs[0])],
    calls=(FUNCTION,),
)
