"""The input of graphs that exchange between ranks: which group they exchange over."""

from __future__ import annotations

import torch

from export.graphs.graph import TensorSpec
from plugins.exchanges import GROUP
from plugins.ranks import Loopback, handle_of


def group_input(ranks: int) -> TensorSpec:
    """The handle of a group, int64 [1]; in trials, of one in which exchanges are what their ONNX functions say."""
    group = Loopback(ranks)
    return TensorSpec(GROUP, torch.int64, (1,), trial=lambda _: torch.tensor([handle_of(group)]))
