"""torch's compiled programs: a store's AOTInductor packages on one GPU or on the CPU, with weights bound by address.

On a GPU everything is queued on one stream: a call returns when its work is queued, and its outputs are tensors there.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from engines.machine import target
from engines.sessions.backend import EngineInputError, EngineRunError, Opening
from engines.sessions.bound_weights import BoundWeights, bound_groups
from engines.sessions.dtypes import TORCH
from engines.sessions.gpu import CudaGpu, Gpu, RunQueue
from engines.sessions.weights import MappedWeights
from engines.store import EngineRecord, EngineStore, FileRecord, Manifest, Partition, StoreError, rebuild_advice
from plugins.registry import REGISTRY

MODEL = "model"
"""The one program of a package, as `aoti_compile_and_package` names it."""


class Weights(Protocol):
    """Where an instance's weights are when a run is queued."""

    def tensors(
        self, graph: str, instance: int, partition: Partition, adapter: str | None = None
    ) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Every weight by name, on the engines' device, for a run that is queued within."""

    def load_lasting(self) -> None:
        """Has what stays on the device from one stage to the next brought there."""

    def leave(self, graphs: Collection[str]) -> None:
        """Frees what those graphs need during their stage alone."""


def open_inductor(opening: Opening) -> InductorEngines:
    """The engines on this process' first GPU, or on the CPU where the profile has none.

    Raises:
        StoreError: there is no GPU, or a package cannot be opened.
    """
    manifest = opening.store.manifest
    if not manifest.profile.on_gpu:
        # torch has one number of threads for the whole process, which serves one store.
        torch.set_num_threads(manifest.profile.thread_count())
        return InductorEngines(opening, MappedTensors(manifest), None)
    if not torch.cuda.is_available():
        raise StoreError(f"{opening.store.root}: its engines run on a GPU, and torch finds none; run: h3trt doctor")
    gpu = CudaGpu(torch.device("cuda", 0))
    return InductorEngines(opening, PlacedTensors(opening, gpu), gpu)


class InductorEngines:
    """The packages of a store and their weights; without a `gpu` they run on the CPU."""

    def __init__(self, opening: Opening, weights: Weights, gpu: Gpu | None) -> None:
        self._gpu, self._weights = gpu, weights
        self._programs = {graph: Program.open(opening.store, graph, self.device) for graph in opening.graphs}
        self._queued = RunQueue(gpu) if gpu else None

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU."""
        return self._gpu.device if self._gpu else torch.device("cpu")

    def run(
        self,
        graph: str,
        inputs: Mapping[str, torch.Tensor],
        instance: int,
        partition: Partition,
        outputs: Mapping[str, torch.Tensor],
        adapter: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Runs, or queues the run on the GPU; every output by name, on the device.

        Raises:
            EngineInputError: a size is outside what the program was compiled for.
            EngineRunError: the program fails.
        """
        program = self._programs[graph]
        with self._computing(), self._weights.tensors(graph, instance, partition, adapter) as weights:
            results = program.run(inputs, weights, outputs)
            if self._queued:
                self._queued.add()
        return results

    def warm(self) -> None:
        """Brings the weights that stay on the device there; programs are open from the start."""
        with self._computing():
            self._weights.load_lasting()

    def leave(self, graphs: Collection[str]) -> None:
        """Frees swapped weights and slots, and gives the memory of activations back."""
        if self._queued:
            self._queued.clear()
        self._weights.leave(graphs)
        if self._gpu:
            self._gpu.trim()

    def _computing(self) -> AbstractContextManager[object]:
        return self._gpu.computing() if self._gpu else nullcontext()


class Program:
    """One opened package."""

    def __init__(self, graph: str, record: EngineRecord, loader: Any) -> None:
        self._graph, self._record, self._loader = graph, record, loader

    @staticmethod
    def open(store: EngineStore, graph: str, device: torch.device) -> Program:
        """Opens a graph's package.

        Raises:
            StoreError: it was compiled for another GPU or processor, or its library does not open.
        """
        record = store.manifest.graphs[graph]
        built, found = record.program.target if record.program else "an unknown device", target(device)
        if built != found:
            raise StoreError(
                f"{store.root / record.file.path}: graph {graph} is compiled for {built}, but here is {found}; "
                f"{rebuild_advice(store.root)}"
            )
        return Program(graph, record, _load(store, record.file, device))

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Outputs by name; those that are given are written in place.

        Raises:
            EngineInputError: a size is outside the compiled range.
            EngineRunError: the program fails.
        """
        self._check_sizes(inputs)
        arguments = [inputs[spec.name] for spec in self._record.inputs]
        arguments += [weights[spec.name] for spec in self._record.weights]
        try:
            made = self._loader.run(arguments)
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            raise EngineRunError(f"graph {self._graph} with {shapes}: {error}") from error
        results = dict(zip((spec.name for spec in self._record.outputs), made, strict=True))
        return results | {name: tensor.copy_(results[name]) for name, tensor in outputs.items()}

    def _check_sizes(self, inputs: Mapping[str, torch.Tensor]) -> None:
        ranges = self._record.program.ranges if self._record.program else {}
        for spec in self._record.inputs:
            for axis, size in zip(spec.shape, inputs[spec.name].shape, strict=True):
                if axis in ranges and size > ranges[axis].maximum:
                    raise EngineInputError(
                        f"graph {self._graph}: {axis} = {size}: must be at most {ranges[axis].maximum}, which it was "
                        f"compiled for (shapes.{axis} of the profile)"
                    )


class MappedTensors:
    """Weights on the CPU: tensors over the mapped bytes of the files, made when they are first bound."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._mapped = MappedWeights(manifest.weight_files)
        self._known: dict[tuple[str, int, Partition, str | None], dict[str, torch.Tensor]] = {}

    @contextmanager
    def tensors(
        self, graph: str, instance: int, partition: Partition, adapter: str | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Every weight of an instance."""
        key = (graph, instance, partition, adapter)
        if key not in self._known:
            self._known[key] = self._made(*key)
        yield self._known[key]

    def load_lasting(self) -> None:
        """The system brings mapped bytes to memory as they are read."""

    def leave(self, graphs: Collection[str]) -> None:
        """Nothing is held for a stage alone."""

    def _made(self, graph: str, instance: int, partition: Partition, adapter: str | None) -> dict[str, torch.Tensor]:
        regions = self._manifest.regions(graph, instance, partition, adapter)
        made = {}
        with warnings.catch_warnings():
            # The map is read-only, which torch has no word for; no program writes its weights.
            warnings.simplefilter("ignore")
            for spec in self._manifest.graphs[graph].weights:
                data = torch.from_numpy(self._mapped.array(regions[spec.name], spec.dtype))
                made[spec.name] = data.view(TORCH[spec.dtype])
        return made


class PlacedTensors:
    """Weights on a GPU: views of the memory that the profile's residency keeps them in."""

    def __init__(self, opening: Opening, gpu: Gpu) -> None:
        self._manifest = opening.store.manifest
        self._bound = BoundWeights(bound_groups(opening, gpu), self._manifest)

    @contextmanager
    def tensors(
        self, graph: str, instance: int, partition: Partition, adapter: str | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Every weight of an instance, on the GPU."""
        dtypes = {spec.name: spec.dtype for spec in self._manifest.graphs[graph].weights}
        with self._bound.bound(graph, instance, partition, adapter) as weights:
            yield {
                name: weight.memory[weight.offset : weight.offset + weight.region.nbytes(dtypes[name])]
                .view(TORCH[dtypes[name]])
                .view(weight.region.shape)
                for name, weight in weights.items()
            }

    def load_lasting(self) -> None:
        """Copies resident weights to the GPU."""
        self._bound.load_lasting()

    def leave(self, graphs: Collection[str]) -> None:
        """Frees the swapped weights and the slots of those graphs."""
        self._bound.leave(graphs)


def _load(store: EngineStore, file: FileRecord, device: torch.device) -> Any:
    """torch's loader over a package whose bytes have been verified.

    It is opened from a copy that no other user can write, so that what is loaded is what was verified.
    """
    content = store.read(file)
    with tempfile.TemporaryDirectory(prefix="h3trt-") as directory:
        package = Path(directory) / "program.pt2"
        package.write_bytes(content)
        try:
            return open_package(package, device)
        except RuntimeError as error:
            raise StoreError(
                f"{store.root / file.path}: is not opened: {error}; {rebuild_advice(store.root)}"
            ) from error


def open_package(package: Path, device: torch.device) -> Any:
    """torch's loader over a package, which it unpacks and needs no more.

    Raises:
        RuntimeError: its library does not open.
    """
    for op in REGISTRY:
        assert op.overload  # programs find operators by their names
    index = -1 if device.index is None else device.index
    # One run at a time: without the loader's own pool, no run waits for the one before it.
    return torch._C._aoti.AOTIModelPackageLoader(str(package), MODEL, True, 1, index)
