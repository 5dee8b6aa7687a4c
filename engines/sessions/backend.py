"""What runs engines: the small interface that each backend's running half implements."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engines.store import EngineStore, Partition


class EngineInputError(ValueError):
    """A call that does not fit the engine; says graph, name, what was expected and what was found."""


class EngineRunError(RuntimeError):
    """An engine could not be run on inputs that fit it; says graph, sizes, and what the backend said."""


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
        adapter: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Every output by name: those of `outputs` written in place, the others in memory of their own.

        The adapter's weights are in place of the partition's, or beside them, where the graph takes both.
        """

    def warm(self) -> None:
        """Does now what the first run of each engine would otherwise wait for."""

    def leave(self, graphs: Collection[str]) -> None:
        """Frees what those graphs hold only while their stage runs."""


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
    if store.manifest.profile.backend == "inductor":
        from engines.sessions.inductor import open_inductor

        return open_inductor(opening)
    if store.manifest.profile.on_gpu:
        from engines.sessions.tensorrt import open_tensorrt

        return open_tensorrt(opening)
    from engines.sessions.onnxruntime import OnnxRuntimeEngines

    return OnnxRuntimeEngines(opening)
