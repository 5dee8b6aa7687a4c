"""TensorRT and TensorRT-RTX: a store's plans on one GPU, with weights bound by address.

Everything is queued on one stream: a call returns when its work is queued, and its outputs are tensors on the GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engines import tensorrt
from engines.profile import component_of
from engines.sessions.backend import EngineInputError, EngineKey, EngineRunError, Opening
from engines.sessions.bound_weights import BoundWeight, BoundWeights, bound_groups
from engines.sessions.dtypes import TORCH
from engines.sessions.gpu import CudaGpu, Gpu, RunQueue
from engines.sessions.placement import Placement, place
from engines.sessions.runtime_cache import RuntimeCache
from engines.store import AxisRange, EngineRecord, EngineStore, FileRecord, Partition, StoreError, rebuild_advice
from plugins.exchanges import GROUP
from plugins.op import DOMAIN
from plugins.ranks import Group, ProcessGroup, group_of
from plugins.registry import REGISTRY
from plugins.tensorrt_plugin import Exchange, exchanging, register

if TYPE_CHECKING:
    import tensorrt as trt

_LOG = logging.getLogger(__name__)

Shape = tuple[int, ...]

_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
"""Python's object of an address, which is how TensorRT takes a communicator."""


def open_tensorrt(opening: Opening) -> TensorRTEngines:
    """The engines on this process' first GPU.

    Raises:
        StoreError: the package is missing, there is no GPU, or a plan cannot be opened.
    """
    backend = opening.store.manifest.profile.backend
    assert backend in ("tensorrt", "tensorrt_rtx")  # as `open_backend` chooses
    try:
        flavour = tensorrt.load(backend)
    except tensorrt.TensorRTMissing as error:
        raise StoreError(str(error)) from error
    if not torch.cuda.is_available():
        raise StoreError(f"{opening.store.root}: its engines run on a GPU, and torch finds none; run: h3trt doctor")
    return TensorRTEngines(opening, flavour, CudaGpu(torch.device("cuda", 0)))


class TensorRTEngines:
    """The plans of a store, their weights, and the memory that they share."""

    def __init__(self, opening: Opening, flavour: tensorrt.Flavour, gpu: Gpu) -> None:
        self._manifest = opening.store.manifest
        self._gpu = gpu
        self._plans = _Plans(opening, flavour, gpu)
        self._baked = self._manifest.profile.weights == "baked"
        self._weights = BoundWeights({} if self._baked else bound_groups(opening, gpu), self._manifest)
        self._queued = RunQueue(gpu)

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._gpu.device

    def run(
        self,
        graph: str,
        inputs: Mapping[str, torch.Tensor],
        instance: int,
        partition: Partition,
        outputs: Mapping[str, torch.Tensor],
        adapter: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Queues one run; every output by name, on the GPU.

        Raises:
            EngineInputError: no optimisation profile of the plan has room for the inputs' sizes.
            EngineRunError: TensorRT refuses the run.
        """
        with self._gpu.computing() as stream:
            plan = self._plans.get(graph, instance, partition)
            with self._weights.bound(graph, instance, partition, adapter) as weights:
                results = plan.enqueue(inputs, weights, outputs, stream)
            self._queued.add()
        return results

    def warm(self) -> None:
        """Brings the weights that stay there to the GPU, and opens the plans that stay open."""
        self._plans.open_lasting()
        with self._gpu.computing():
            self._weights.load_lasting()

    def leave(self, graphs: Collection[str]) -> None:
        """Frees swapped weights and plans, slots and activations, and keeps the kernels that were compiled."""
        self._queued.clear()
        self._weights.leave(graphs)
        self._plans.leave(graphs)
        self._gpu.trim()


class _Plans:
    """The opened plans of a store: one a graph, shared by all instances; with baked weights one for each of them."""

    def __init__(self, opening: Opening, flavour: tensorrt.Flavour, gpu: Gpu) -> None:
        self._store, self._manifest = opening.store, opening.store.manifest
        self._opening = opening
        self._gpu = gpu
        self._baked = self._manifest.profile.weights == "baked"
        self._opener = _Opener(opening, flavour, gpu)
        self._activations = Activations(gpu)
        self._plans: dict[EngineKey, Plan] = {}
        self._check_streaming()
        if not self._baked:
            # Read now: the next build may replace the store's files while these plans are in use.
            self.open_lasting()

    def get(self, graph: str, instance: int, partition: Partition) -> Plan:
        """The plan of one instance, opened if it is not."""
        key = EngineKey(graph, partition, instance) if self._baked else EngineKey(graph)
        if key not in self._plans:
            record = self._manifest.graphs[graph]
            file = record.baked[partition][instance] if self._baked else record.file
            context, exchange = self._opener.open(graph, file)
            self._plans[key] = Plan(graph, record, context, self._activations, self._gpu, exchange)
        return self._plans[key]

    def open_lasting(self) -> None:
        """Opens the plans that stay open from one stage to the next."""
        for graph in self._opening.graphs:
            count = self._manifest.graphs[graph].instances
            if self._baked and self._placement(graph, count).swapped:
                continue
            for partition in self._opening.partitions:
                for instance in range(count if self._baked else 1):
                    self.get(graph, instance, partition)

    def leave(self, graphs: Collection[str]) -> None:
        """Closes plans whose baked weights are swapped, frees activations, keeps compiled kernels."""
        for key in [key for key in self._plans if self._baked and key.graph in graphs]:
            if self._placement(key.graph, self._manifest.graphs[key.graph].instances).swapped:
                del self._plans[key]
        self._activations.free()
        self._opener.save_kernels()

    def _placement(self, graph: str, instances: int) -> Placement:
        residency = self._manifest.profile.residency
        assert residency is not None  # a profile on GPUs has one
        return place(residency, graph, instances)

    def _check_streaming(self) -> None:
        for graph in self._opening.graphs if self._baked else ():
            count = self._manifest.graphs[graph].instances
            if len(self._placement(graph, count).resident) < count:
                raise StoreError(
                    f"profile {self._manifest.profile.name}: residency.{component_of(graph)}: baked weights cannot be "
                    f"streamed; must be 'resident' or 'swapped', or weights = 'bound'"
                )


class Activations:
    """One piece of GPU memory for the activations of whichever engine runs: they run one after another."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._memory: torch.Tensor | None = None

    def reserve(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes; what was there before is no longer used by work that is queued from now on."""
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = None  # first, so that the allocator can use it again
            self._memory = self._gpu.allocate(nbytes)
        return self._memory

    def free(self) -> None:
        """Gives it back."""
        self._memory = None


def _register_plugins(opening: Opening, flavour: tensorrt.Flavour) -> None:
    """Has TensorRT find the plugins that are in the plans; TensorRT-RTX has none."""
    operators = {name for graph in opening.graphs for name in opening.store.manifest.graphs[graph].census}
    for op in REGISTRY if flavour.has_plugins else ():
        # Those that exchange are registered with each plan that is opened.
        if op.plugin_shapes is not None and not op.exchanges and f"{DOMAIN}::{op.name}" in operators:
            register(flavour.module, op.name)


class _Opener:
    """Makes execution contexts of plan files, or says why they cannot be."""

    def __init__(self, opening: Opening, flavour: tensorrt.Flavour, gpu: Gpu) -> None:
        self._store: EngineStore = opening.store
        self._flavour = flavour
        self._gpu = gpu
        self._errors: list[str] = []
        self._logger = tensorrt.make_logger(flavour, self._listen)
        _register_plugins(opening, flavour)
        self._runtime: trt.Runtime = flavour.module.Runtime(self._logger)
        self._cache: RuntimeCache | None = None
        if flavour.has_runtime_cache:
            # By what is opened: processes that open other graphs of the store have files of their own.
            name = hashlib.sha256(" ".join(sorted(opening.graphs)).encode()).hexdigest()[:16]
            self._cache = RuntimeCache(opening.store.root / "kernels" / f"{name}.cache")

    def open(self, graph: str, file: FileRecord) -> tuple[trt.IExecutionContext, Exchange]:
        """An execution context without memory of its own, and what it exchanges with other ranks over.

        Raises:
            StoreError: TensorRT does not open the plan here.
        """
        self._errors = []
        serialized = self._store.read(file)
        if self._flavour.tells_validity:
            self._check_validity(graph, file, serialized)
        exchange = Exchange()
        engine = self._deserialize(graph, serialized, exchange)
        if engine is None:
            raise self._refusal(graph, file, self._errors)
        self._check_tensors(graph, file, engine)
        config: trt.IRuntimeConfig = engine.create_runtime_config()
        strategies = self._flavour.module.ExecutionContextAllocationStrategy
        config.set_execution_context_allocation_strategy(strategies.USER_MANAGED)
        if self._cache is not None:
            self._cache.attach(config)
        context: trt.IExecutionContext | None = engine.create_execution_context(config)
        if context is None:
            raise self._refusal(graph, file, self._errors)
        return context, exchange

    def _deserialize(self, graph: str, serialized: bytes, exchange: Exchange) -> trt.ICudaEngine | None:
        """The engine of a plan, whose plugins exchange over what is given, if they exchange."""
        record = self._store.manifest.graphs[graph]
        ops = [op for op in REGISTRY if op.exchanges and f"{DOMAIN}::{op.name}" in record.census]
        if not ops or not self._flavour.has_plugins:
            return self._runtime.deserialize_cuda_engine(serialized)
        with exchanging(self._flavour.module, self._runtime.get_plugin_registry(), ops, exchange):
            return self._runtime.deserialize_cuda_engine(serialized)

    def save_kernels(self) -> None:
        """Keeps what was compiled for the next process."""
        if self._cache is not None:
            self._cache.save()

    def _check_validity(self, graph: str, file: FileRecord, serialized: bytes) -> None:
        validity, diagnostics = self._runtime.get_engine_validity(serialized)
        module = self._flavour.module
        if validity == module.EngineValidity.INVALID:
            flags = module.EngineInvalidityDiagnostics.__members__.items()
            reasons = [name.lower().replace("_", " ") for name, flag in flags if int(diagnostics) & int(flag)]
            raise self._refusal(graph, file, reasons)

    def _check_tensors(self, graph: str, file: FileRecord, engine: trt.ICudaEngine) -> None:
        record, manifest = self._store.manifest.graphs[graph], self._store.manifest
        weights = record.weights if manifest.profile.weights == "bound" else ()
        declared = {tensor.name for tensor in (*record.inputs, *weights, *record.outputs)} - {GROUP}
        found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        if found != declared:
            raise self._refusal(graph, file, [f"tensors {sorted(declared)} expected, {sorted(found)} found"])

    def _refusal(self, graph: str, file: FileRecord, reasons: Sequence[str]) -> StoreError:
        manifest, plan = self._store.manifest, self._store.manifest.graphs[graph].plan
        backend = manifest.profile.backend
        built = f"{backend} {manifest.versions.get(backend, 'of an unknown version')}"
        capabilities = ", ".join(plan.capabilities) if plan else "unknown"
        return StoreError(
            f"{self._store.root / file.path}: the plan of graph {graph} is not opened: "
            f"{'; '.join(reasons) or 'TensorRT gives no reason'}; it was built with {built} for compute capability "
            f"{capabilities}; here is {backend} {self._flavour.version} on {self._gpu.describe()}; "
            f"{rebuild_advice(self._store.root)}"
        )

    def _listen(self, severity: str, text: str) -> None:
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self._errors.append(text)
        tensorrt.forward_to(_LOG)(severity, text)


@dataclass
class Plan:
    """One opened plan. `sizes` of axes decide which of its optimisation profiles a run uses."""

    graph: str
    record: EngineRecord
    context: trt.IExecutionContext
    activations: Activations
    gpu: Gpu
    exchange: Exchange = field(default_factory=Exchange)
    _sizes: dict[int, int] = field(default_factory=dict)

    def enqueue(
        self,
        inputs: Mapping[str, torch.Tensor],
        weights: Mapping[str, BoundWeight],
        outputs: Mapping[str, torch.Tensor],
        stream: int,
    ) -> dict[str, torch.Tensor]:
        """Queues one run; makes the outputs that are not given.

        Raises:
            EngineInputError: no optimisation profile has room for the sizes, or a group that the plan cannot use.
            EngineRunError: TensorRT refuses a shape, an address or the run.
        """
        if GROUP in inputs:
            self._join(group_of(int(inputs[GROUP])))
            inputs = {name: tensor for name, tensor in inputs.items() if name != GROUP}
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        shapes |= {name: tuple(weight.region.shape) for name, weight in weights.items()}
        sizes = self._axis_sizes(shapes)
        self._choose(sizes, stream)
        for name, shape in shapes.items():
            self._check(self.context.set_input_shape(name, shape), f"shape {list(shape)} of {name}", sizes)
        results = {**self._made(sizes, outputs), **outputs}
        addresses = {name: tensor.data_ptr() for name, tensor in (*inputs.items(), *results.items())}
        addresses |= {name: weight.address for name, weight in weights.items()}
        for name, address in addresses.items():
            self._check(self.context.set_tensor_address(name, address), f"the address of {name}", sizes)
        self._check(self.context.execute_async_v3(stream), "the run", sizes)
        return results

    def _join(self, group: Group) -> None:
        """Has the plan exchange over a group from now on: its plugins, or TensorRT's own collectives."""
        if group is self.exchange.group:
            return
        if self._has_collectives:
            if not isinstance(group, ProcessGroup):
                raise EngineInputError(
                    f"graph {self.graph}: its plan exchanges by TensorRT's own collectives, which need a group of "
                    f"NCCL; found {type(group).__name__}"
                )
            communicator = _capsule(group.communicator(), None, None)
            self._check(self.context.set_communicator(communicator), "the ranks' communicator", {})
        self.exchange.group = group

    @property
    def _has_collectives(self) -> bool:
        census = self.record.plan.census if self.record.plan else {}
        return any(kind.startswith("collective.") for kind in census)

    def _axis_sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Sizes of the named axes, those that weights fix included."""
        sizes: dict[str, int] = {}
        for spec in (*self.record.inputs, *self.record.weights):
            for axis, size in zip(spec.shape, shapes.get(spec.name, ()), strict=False):
                if isinstance(axis, str):
                    sizes[axis] = size
        return sizes

    def _choose(self, sizes: Mapping[str, int], stream: int) -> None:
        """Switches to the first optimisation profile that the sizes are within, and gives the context its memory."""
        index = self._profile(sizes)
        if index != self.context.active_optimization_profile:
            switched = self.context.set_optimization_profile_async(index, stream)
            self._check(switched, f"optimisation profile {index}", sizes)
        if index not in self._sizes:
            engine: trt.ICudaEngine = self.context.engine
            self._sizes[index] = engine.get_device_memory_size_for_profile_v2(index)
        memory = self.activations.reserve(self._sizes[index])
        self.context.set_device_memory(memory.data_ptr(), len(memory))

    def _profile(self, sizes: Mapping[str, int]) -> int:
        profiles = self.record.plan.profiles if self.record.plan else ()
        for index, ranges in enumerate(profiles):
            if all(ranges[a].minimum <= n <= ranges[a].maximum for a, n in sizes.items() if a in ranges):
                return index
        if profiles:
            given = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
            ranges_text = "; ".join(_describe(ranges) for ranges in profiles)
            raise EngineInputError(f"graph {self.graph}: {given}: must be within one of: {ranges_text}")
        return 0

    def _made(self, sizes: Mapping[str, int], given: Collection[str]) -> dict[str, torch.Tensor]:
        made = {}
        for spec in self.record.outputs:
            if spec.name not in given:
                shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
                made[spec.name] = torch.empty(shape, dtype=TORCH[spec.dtype], device=self.gpu.device)
        return made

    def _check(self, done: bool, what: str, sizes: Mapping[str, int]) -> None:
        if not done:
            given = ", ".join(f"{axis} = {size}" for axis, size in sizes.items()) or "fixed sizes"
            raise EngineRunError(f"graph {self.graph} at {given}: TensorRT refuses {what}; its log says why")


def _describe(ranges: Mapping[str, AxisRange]) -> str:
    return ", ".join(f"{axis} from {r.minimum} to {r.maximum}" for axis, r in ranges.items())
