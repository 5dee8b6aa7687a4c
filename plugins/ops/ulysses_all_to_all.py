"""Rows of all heads for all rows of a rank's heads, and back: what the ranks of a sequence exchange around attention.

Source: DeepSpeed Ulysses (arXiv 2309.14509), section 3. Queries, keys and values go in one exchange, straight into the
layout that attention reads. `plugins.ranks.Group` does the exchange; which way it does is its own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from plugins.exchanges import TO_HEADS, TO_HEADS_GATED, TO_ROWS
from plugins.op import Op
from plugins.ops.dist_collective import FUNCTION, collective
from plugins.ranks import Group, group_of_ranks


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: torch.Tensor, group: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows of all heads, three of [n, H, d], to all rows of its heads, three of [S, H / ranks, d].

    sequence [S]: its size alone is read, at most n * ranks; what rows there are beyond it stay with their rank.
    group [1] int64, on the host: the handle of the ranks' group (`plugins.ranks.handle_of`).

    Raises:
        LookupError: there is no such group.
        ValueError: the group has another size than `ranks`, or the tensors do not fit it.
    """
    query, key, value = _to_heads((query, key, value), sequence, group, ranks)
    return query, key, value


def to_heads_gated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    sequence: torch.Tensor,
    group: torch.Tensor,
    ranks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with the gate of blocks that attend to video tiles."""
    query, key, value, gate = _to_heads((query, key, value, gate), sequence, group, ranks)
    return query, key, value, gate


def to_rows(mixed: torch.Tensor, local: torch.Tensor, group: torch.Tensor, ranks: int) -> torch.Tensor:
    """All rows of this rank's heads [S, H / ranks, d] to its own rows of all heads [n, H, d].

    local [n, ...]: the number of its rows alone is read. Rows that the sequence does not have are zeros.

    Raises:
        LookupError: there is no such group.
        ValueError: the group has another size than `ranks`, or there are more rows than n * ranks.
    """
    exchange = group_of_ranks(group, ranks)
    _check_rows(len(mixed), len(local), ranks)
    return exchange.to_rows(mixed.contiguous(), len(local))


def _to_heads(
    parts: Sequence[torch.Tensor], sequence: torch.Tensor, group: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, ...]:
    exchange: Group = group_of_ranks(group, ranks)
    rows, heads, _ = parts[0].shape
    _check_rows(len(sequence), rows, ranks)
    _check_heads(heads, ranks)
    found = exchange.to_heads(parts, len(sequence))
    # An operator's results share no memory.
    return tuple(part.contiguous() for part in found) if _apart(found) else tuple(part.clone() for part in found)


def _apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two have the same storage."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def _check_heads(heads: int, ranks: int) -> None:
    if ranks < 1 or heads % ranks:
        raise ValueError(f"ulysses_all_to_all: {heads} heads cannot be shared by {ranks} ranks; must be a multiple")


def _check_rows(rows: int, local: int, ranks: int) -> None:
    if rows > local * ranks:
        raise ValueError(
            f"ulysses_all_to_all: {local} rows on each of {ranks} ranks: must be at least {-(-rows // ranks)}, as the "
            f"sequence has {rows}"
        )


def _fake_heads(parts: Sequence[torch.Tensor], sequence: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    _, heads, width = parts[0].shape
    return tuple(part.new_empty((sequence.shape[0], heads // ranks, width)) for part in parts)


def fake_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: torch.Tensor, group: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, ...]:
    """Three of [S, H / ranks, d]."""
    return _fake_heads((query, key, value), sequence, ranks)


def fake_heads_gated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    sequence: torch.Tensor,
    group: torch.Tensor,
    ranks: int,
) -> tuple[torch.Tensor, ...]:
    """Four of [S, H / ranks, d]."""
    return _fake_heads((query, key, value, gate), sequence, ranks)


def fake_rows(mixed: torch.Tensor, local: torch.Tensor, group: torch.Tensor, ranks: int) -> torch.Tensor:
    """[n, H, d]."""
    _, heads, width = mixed.shape
    return mixed.new_empty((local.shape[0], heads * ranks, width))


def _heads_body(parts: Sequence[str]) -> str:
    """To each rank, of each part, its heads of all rows here: [ranks, parts, n, heads, d], exchanged by its blocks."""
    columns = "".join(f"    column_{part} = Unsqueeze ({part}, second)\n" for part in parts)
    results = "".join(f"    my_{part} = Squeeze (turned_{part}, first)\n" for part in parts)
    return f"""
    first = Constant <value_ints = [0]> ()
    second = Constant <value_ints = [1]> ()
{columns}
    packed = Concat <axis = 1> ({", ".join(f"column_{part}" for part in parts)})
    rows_and_parts = Constant <value_ints = [0, 0]> ()
    count = Constant <value_int: int = @ranks> ()
    counted = Unsqueeze (count, first)
    rest = Constant <value_ints = [-1]> ()
    width = Shape <start = 2, end = 3> (query)
    apart = Concat <axis = 0> (rows_and_parts, counted, rest, width)
    by_rank = Reshape (packed, apart)
    sent = Transpose <perm = [2, 1, 0, 3, 4]> (by_rank)
{collective("all_to_all", "sent", "received")}
    gathered = Transpose <perm = [1, 0, 2, 3, 4]> (received)
    number = Constant <value_ints = [{len(parts)}, -1]> ()
    heads_and_width = Shape <start = 3, end = 5> (sent)
    whole = Concat <axis = 0> (number, heads_and_width)
    padded = Reshape (gathered, whole)
    size = Shape <start = 0, end = 1> (sequence)
    all_parts = Slice (padded, first, size, second)
    {", ".join(f"turned_{part}" for part in parts)} = Split <axis = 0, num_outputs = {len(parts)}> (all_parts)
{results}
"""


_ROWS_BODY = f"""
    first = Constant <value_ints = [0]> ()
    count = Constant <value_int: int = @ranks> ()
    counted = Unsqueeze (count, first)
    local_rows = Shape <start = 0, end = 1> (local)
    places = Mul (local_rows, counted)
    size = Shape <start = 0, end = 1> (mixed)
    missing = Sub (places, size)
    heads_and_width = Shape <start = 1, end = 3> (mixed)
    padding_shape = Concat <axis = 0> (missing, heads_and_width)
    zero = Constant <value_float = 0.0> ()
    typed_zero = CastLike (zero, mixed)
    padding = Expand (typed_zero, padding_shape)
    padded = Concat <axis = 0> (mixed, padding)
    apart = Concat <axis = 0> (counted, local_rows, heads_and_width)
    sent = Reshape (padded, apart)
{collective("all_to_all", "sent", "received")}
    gathered = Transpose <perm = [1, 0, 2, 3]> (received)
    rest = Constant <value_ints = [-1]> ()
    width = Shape <start = 2, end = 3> (mixed)
    whole = Concat <axis = 0> (local_rows, rest, width)
    result = Reshape (gathered, whole)
"""

PARTS = ("query", "key", "value")


def _heads_shapes(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[list[Any]]:
    """[S, H / ranks, d] each; H and d are numbers when a plan is built."""
    *parts, sequence = inputs
    heads, ranks = _known(parts[0][1]), attributes["ranks"]
    _check_heads(heads, ranks)
    return [[sequence[0], heads // ranks, part[2]] for part in parts]


def _rows_shapes(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[list[Any]]:
    """[n, H, d]."""
    mixed, local = inputs
    return [[local[0], _known(mixed[1]) * attributes["ranks"], mixed[2]]]


def _known(size: Any) -> int:
    """TensorRT's expression of a size that is fixed, as a number."""
    return int(size.get_constant_value())


HEADS = Op(
    TO_HEADS,
    to_heads,
    fake_heads,
    _heads_body(PARTS),
    results=tuple(f"my_{part}" for part in PARTS),
    result_types=("T_query",) * 3,
    plugin_shapes=_heads_shapes,
    calls=(FUNCTION,),
)

GATED_HEADS = Op(
    TO_HEADS_GATED,
    to_heads_gated,
    fake_heads_gated,
    _heads_body((*PARTS, "gate")),
    results=tuple(f"my_{part}" for part in (*PARTS, "gate")),
    result_types=("T_query",) * 4,
    plugin_shapes=_heads_shapes,
    calls=(FUNCTION,),
)

ROWS = Op(TO_ROWS, to_rows, fake_rows, _ROWS_BODY, plugin_shapes=_rows_shapes, calls=(FUNCTION,))
