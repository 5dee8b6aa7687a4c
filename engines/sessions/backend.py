"""What runs engines: the small interface that each backend's running half implements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engines.store import EngineStore, Partition


class Backend(Protocol):
    """The opened engines of one store. Calls come one at a time, checked, with contiguous tensors on `device`."""

    @property
    def device(self) -> torch.device:
        """Where inputs are read and outputs are made."""

    def run(
        self,
        graph: str,
        inputs: Mapping[str, torch.Tensor],
        instance: int,
        partition: Partition,
        outputs: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Every output by name: those of `outputs` written in place, the others in memory of their own."""

    def warm(self) -> None:
        """Does now what the first run of each engine would otherwise wait for."""


@dataclass(frozen=True)
class Opening:
    """What is opened of a store."""

    store: EngineStore
    graphs: tuple[str, ...]
    partitions: tuple[Partition, ...]


class EngineKey(NamedTuple):
    """What an engine or a set of weights is for; an engine with bound weights is for all partitions and instances."""

    graph: str
    partition: Partition | None = None
    instance: int | None = None


def open_backend(store: EngineStore, graphs: Iterable[str], partitions: Iterable[Partition]) -> Backend:
    """The running half of the backend that the store's profile names.

    Raises:
        StoreError: the engines cannot be run here.
    """
    opening = Opening(store, tuple(graphs), tuple(partitions))
    # Imported when it is needed: a host has the libraries of its own backend only.
    from engines.sessions.onnxruntime import OnnxRuntimeEngines

    return OnnxRuntimeEngines(opening)
