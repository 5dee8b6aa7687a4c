"""The AdaLN tables of a schedule's steps, by the two engines that make them: for a request, or once at build time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

TIME, ADALN = "modulation.time", "modulation.adaln"

MODULATION = (TIME, ADALN)
"""The graphs that make tables. Each instance of the second is a block's, the last one is the head's."""

Run = Callable[[str, dict[str, torch.Tensor], int], dict[str, torch.Tensor]]
"""Runs one instance of a graph."""


def embeddings(run: Run, steps: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What every projection takes of each step, [M, time_dim], from the timesteps of its slots [M] float32."""
    return [run(TIME, {"timesteps": timesteps}, 0)["embedding"] for timesteps in steps]


def projections(run: Run, embedded: Iterable[torch.Tensor], instance: int) -> list[torch.Tensor]:
    """One layer's part of the table of each step, [M, features], in host memory."""
    return [run(ADALN, {"embedding": each}, instance)["modulation"].cpu() for each in embedded]
