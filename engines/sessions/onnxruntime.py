"""ONNX Runtime on the CPU: inputs, weights and outputs by address, or outputs as torch tensors of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from engines.adapters import has_sides
from engines.sessions.backend import EngineKey, Opening
from engines.sessions.dtypes import NAMES, ONNX_TYPE
from engines.sessions.weights import MappedWeights
from engines.store import Dtype, FileRecord, Partition, Region


class OnnxRuntimeEngines:
    """The engines of a store in this process.

    A session is opened when its graph first runs, and a weight is mapped when it is first bound.
    """

    device = torch.device("cpu")

    def __init__(self, opening: Opening) -> None:
        self._manifest = opening.store.manifest
        self._partitions = opening.partitions
        self._graphs = opening.graphs
        self._baked = self._manifest.profile.weights == "baked"
        # Read now: the next build may replace the store's files while these engines are in use.
        self._engines = {key: opening.store.read(file) for key, file in self._files()}
        self._threads = self._manifest.profile.thread_count()
        self._mapped = MappedWeights(self._manifest.weight_files)
        self._weights: dict[tuple[EngineKey, str | None], dict[str, ort.OrtValue]] = {}
        self._sessions: dict[EngineKey, Session] = {}

    def run(
        self,
        graph: str,
        inputs: Mapping[str, torch.Tensor],
        instance: int,
        partition: Partition,
        outputs: Mapping[str, torch.Tensor],
        adapter: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Every output by name, on the CPU."""
        session = self._session(graph, instance, partition)
        weights = {} if self._baked else self._bound(graph, instance, partition, adapter)
        return session.run(inputs, weights, outputs)

    def warm(self) -> None:
        """Opens every session and maps every weight, adapters' when they are first bound."""
        for partition in self._partitions:
            for graph in self._graphs:
                for instance in range(self._manifest.graphs[graph].instances):
                    self._session(graph, instance, partition)
                    if not self._baked and not has_sides(graph):
                        self._bound(graph, instance, partition, None)

    def leave(self, graphs: Collection[str]) -> None:
        """Weights are mapped and sessions small: nothing is held for a stage alone."""

    def _files(self) -> Iterator[tuple[EngineKey, FileRecord]]:
        for name in self._graphs:
            engine = self._manifest.graphs[name]
            if self._baked:
                yield from ((EngineKey(name, p, i), f) for p in self._partitions for i, f in enumerate(engine.baked[p]))
            else:
                yield EngineKey(name), engine.file

    def _session(self, graph: str, instance: int, partition: Partition) -> Session:
        """One session a graph, shared by all instances; with baked weights one for each of them."""
        key = EngineKey(graph, partition, instance) if self._baked else EngineKey(graph)
        if key not in self._sessions:
            files = self._weight_files(graph, instance, partition) if self._baked else {}
            self._sessions[key] = Session(self._engines[key], self._threads, files)
        return self._sessions[key]

    def _weight_files(self, graph: str, instance: int, partition: Partition) -> dict[str, NDArray[np.uint8]]:
        """The files that a baked engine's weights lie in, by the location it names them with."""
        used = {region.file for region in self._manifest.bindings[partition][graph][instance].values()}
        return {Path(self._manifest.weight_files[i].path).name: self._mapped.file(i) for i in sorted(used)}

    def _bound(self, graph: str, instance: int, partition: Partition, adapter: str | None) -> dict[str, ort.OrtValue]:
        key = EngineKey(graph, partition, instance), adapter
        if key in self._weights:
            return self._weights[key]
        regions: Mapping[str, Region] = self._manifest.regions(graph, instance, partition, adapter)
        weights = self._manifest.graphs[graph].weights
        found = {w.name: mapped_value(self._mapped, regions[w.name], w.dtype) for w in weights}
        # A rank's parts that do not lie together are copies, in memory of their own: for one run.
        if not any(region.cut for region in regions.values()):
            self._weights[key] = found
        return found


class Session:
    """A loaded engine. `files` are those that its external data lie in, by location; they are read at once."""

    def __init__(
        self, engine: bytes, threads: int, files: Mapping[str, NDArray[np.uint8]] = MappingProxyType({})
    ) -> None:
        options = session_options(threads)
        if files:
            sizes = [data.size for data in files.values()]
            options.add_external_initializers_from_files_in_memory(list(files), list(files.values()), sizes)
        self._session = ort.InferenceSession(engine, options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        weights: Mapping[str, ort.OrtValue],
        outputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, for contiguous CPU tensors; what is not given in `outputs` owns its memory."""
        binding = ort.IOBinding(self._session)
        for name, value in weights.items():
            binding.bind_ortvalue_input(name, value)
        for name, tensor in inputs.items():
            binding.bind_input(name, "cpu", 0, *_bound_to(tensor))
        for name in self._outputs:
            if name in outputs:
                binding.bind_output(name, "cpu", 0, *_bound_to(outputs[name]))
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding, _run_options())
        values = binding.get_outputs_as_ortvaluevector()
        made = {n: from_dlpack(values.dlpack_at(i)) for i, n in enumerate(self._outputs) if n not in outputs}
        return {**made, **outputs}


def _bound_to(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], int]:
    """Element type, shape and address, as a binding takes them."""
    return ONNX_TYPE[NAMES[tensor.dtype]], tuple(tensor.shape), tensor.data_ptr()


def mapped_value(mapped: MappedWeights, region: Region, dtype: Dtype) -> ort.OrtValue:
    """A weight as a runtime value over the mapped bytes, for all sessions that bind it; it keeps the map alive."""
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(mapped.array(region, dtype), ONNX_TYPE[dtype])


def session_options(threads: int) -> ort.SessionOptions:
    """Options of every session: a fixed number of threads that sleep when there is no work."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Encoder, denoiser and decoder are processes that share the processors: a spinning thread holds one for nothing.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _run_options() -> ort.RunOptions:
    """Options of one run: what the arena grew by goes back to the system afterwards.

    Sessions run in turn, each with an arena of its own; without this, each would keep its largest run's memory.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options
