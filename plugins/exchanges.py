"""What graphs that exchange between ranks are told by: names of their inputs and of their operators."""

from __future__ import annotations

GROUP = "group"
"""An input: the handle of the ranks' group (`plugins.ranks.handle_of`), int64 [1], which stays on the host."""

SEQUENCE = "sequence"
"""Another, where they share rows: int64 [S], of which the size alone is read, the rows of the whole sequence."""

ALL_REDUCE = "all_reduce"
TO_HEADS = "ulysses_all_to_all"
TO_HEADS_GATED = "ulysses_all_to_all_gated"
TO_ROWS = "ulysses_all_to_all_back"

OPERATORS = (ALL_REDUCE, TO_HEADS, TO_HEADS_GATED, TO_ROWS)
"""The operators of domain `h3` that need the other ranks of a group."""
