"""One plan, built in this process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from engines.backends.tensorrt.lowering import lower
from engines.backends.tensorrt.messages import Messages
from engines.backends.tensorrt.network import named_inputs, parse
from engines.backends.tensorrt.request import PlanError, PlanRequest, PlanResult
from engines.backends.tensorrt.timing_cache import TimingCache
from engines.backends.tensorrt.verdict import check
from engines.layers import Layer, census, read_inspector
from engines.store import AxisRange
from engines.tensorrt import Flavour, Listener, load, make_logger

if TYPE_CHECKING:
    import tensorrt as trt

Progress = Callable[[str, int, int], None]
"""Takes a phase of the build, its steps done, and how many it has."""

ENDS = ("minimum", "optimum", "maximum")
"""The ends of a range in the order in which TensorRT takes them."""

DRIVER = Path("/sys/module/nvidia/version")
"""Where Linux tells the version of NVIDIA's driver."""


def build(request: PlanRequest, plan: Path, progress: Progress, listener: Listener) -> PlanResult:
    """Builds a plan, checks what it holds, and only then writes it.

    Raises:
        PlanError: the model is refused, the build fails, or the file cannot be written.
        CensusError: the plan is not what the model asks for.
        TensorRTMissing: the flavour is not installed.
    """
    started = time.monotonic()
    flavour = load(request.flavour)
    if request.expected.plugins and not flavour.has_plugins:
        names = ", ".join(sorted(set(request.expected.plugins)))
        raise PlanError(f"graph {request.graph}: {flavour.name} has no plugins, which {names} would need")
    messages = Messages(listener)
    serialized, profiles = _Build(flavour, request, messages, progress).run()
    layers = _inspect(flavour, serialized, messages)
    check(request.graph, layers, request.expected, profiles)
    _write(plan, serialized)
    return PlanResult(
        layers=layers,
        census=census(layers),
        activation_bytes=messages.activation_bytes,
        weights_bytes=messages.weights_bytes,
        seconds=time.monotonic() - started,
        peak_host_bytes=_peak_bytes(),
        driver=DRIVER.read_text().strip() if DRIVER.exists() else None,
        warnings=tuple(messages.warnings),
    )


class _Build:
    """What one build holds on to."""

    def __init__(self, flavour: Flavour, request: PlanRequest, messages: Messages, progress: Progress) -> None:
        self._flavour = flavour
        self._request = request
        self._messages = messages
        self._progress = progress
        self._logger = make_logger(flavour, messages)

    def run(self) -> tuple[trt.IHostMemory, int]:
        """The serialized plan, and how many optimisation profiles it has."""
        trt = self._flavour.module
        model = lower(onnx.load(self._request.model, load_external_data=False), self._request.expected.plugins)
        register_plugins(self._flavour, self._request)
        builder = trt.Builder(self._logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        alive = parse(self._flavour, self._request, model, network, self._logger)
        config = builder.create_builder_config()
        monitor = make_monitor(self._flavour, self._progress)
        self._configure(config, monitor)
        profiles = self._add_profiles(builder, config, network, model)
        cache = self._timing_cache(config)
        serialized = builder.build_serialized_network(network, config)
        del alive
        if serialized is None:
            raise PlanError(f"graph {self._request.graph}: {self._flavour.name} cannot build it: {self._reason()}")
        if cache is not None:
            cache.save()
        return serialized, profiles

    def _configure(self, config: trt.IBuilderConfig, monitor: trt.IProgressMonitor) -> None:
        trt = self._flavour.module
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.progress_monitor = monitor
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self._request.workspace_bytes)
        if not self._flavour.takes_capabilities:
            return
        config.num_compute_capabilities = len(self._request.capabilities)
        for index, capability in enumerate(self._request.capabilities):
            config.set_compute_capability(self._capability(capability), index)

    def _capability(self, capability: str) -> trt.ComputeCapability:
        """TensorRT's name of a compute capability."""
        trt = self._flavour.module
        known: dict[str, Any] = trt.ComputeCapability.__members__
        name = f"SM{capability.replace('.', '')}"
        if name not in known:
            names = ", ".join(sorted(n for n in known if n.startswith("SM")))
            raise PlanError(
                f"graph {self._request.graph}: {self._flavour.name} {self._flavour.version} does not build for compute "
                f"capability {capability}; it builds for {names}"
            )
        return known[name]

    def _add_profiles(
        self,
        builder: trt.Builder,
        config: trt.IBuilderConfig,
        network: trt.INetworkDefinition,
        model: onnx.ModelProto,
    ) -> int:
        """Adds the optimisation profiles; a network without dynamic inputs has one, and needs no ranges."""
        named = named_inputs(model)
        if not any(any(axes) for axes in named.values()):
            return 1
        if not self._request.profiles:
            raise PlanError(f"graph {self._request.graph}: profiles: is empty, but the model has dynamic inputs")
        for ranges in self._request.profiles:
            profile = builder.create_optimization_profile()
            for index in range(network.num_inputs):
                tensor = network.get_input(index)
                sizes = zip(named[tensor.name], tensor.shape, strict=True)
                axes = [self._range(axis, size, ranges) for axis, size in sizes]
                minimum, optimum, maximum = ([getattr(a, end) for a in axes] for end in ENDS)
                profile.set_shape(tensor.name, minimum, optimum, maximum)
            config.add_optimization_profile(profile)
        return len(self._request.profiles)

    def _range(self, axis: str, size: int, ranges: dict[str, AxisRange]) -> AxisRange:
        if not axis:
            return AxisRange(minimum=size, optimum=size, maximum=size)
        if axis not in ranges:
            given = ", ".join(ranges) or "none"
            raise PlanError(f"graph {self._request.graph}: profiles: no range of axis {axis}; ranges of: {given}")
        return ranges[axis]

    def _reason(self) -> str:
        """Why the build failed; the limit on memory is ours, so its name must be told."""
        reason, limit = self._messages.reason, self._request.workspace_bytes
        if "OutOfMemory" not in reason and "workspace limit" not in reason:
            return reason
        return f"{reason}\nworkspace_bytes = {limit:,}: must be at least what the activations of the largest sizes take"

    def _timing_cache(self, config: trt.IBuilderConfig) -> TimingCache | None:
        file = self._request.timing_cache
        if file is None or not self._flavour.has_timing_cache:
            return None
        return TimingCache(config, file, self._messages)


def register_plugins(flavour: Flavour, request: PlanRequest) -> None:
    """Has TensorRT find the plugins that the model needs, if it needs any.

    Raises:
        PlanError: there is no such plugin, or TensorRT does not take it.
    """
    if not request.expected.plugins:
        return
    # Only here, as it needs torch: the builder times a plugin by running it.
    from plugins.tensorrt_plugin import PluginError, register

    for name in sorted(set(request.expected.plugins)):
        try:
            register(flavour.module, name, building=True)
        except (PluginError, KeyError) as error:
            raise PlanError(f"graph {request.graph}: {error}") from error


def make_monitor(flavour: Flavour, progress: Progress) -> Any:
    """An IProgressMonitor that reports each phase with its steps."""
    base: Any = flavour.module.IProgressMonitor

    class Monitor(base):
        def __init__(self) -> None:
            base.__init__(self)
            self._totals: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._totals[name] = steps
            progress(name, 0, steps)

        def step_complete(self, name: str, step: int) -> bool:
            progress(name, step + 1, self._totals[name])
            return True  # go on

        def phase_finish(self, name: str) -> None:
            progress(name, self._totals[name], self._totals[name])

    return Monitor()


def _inspect(flavour: Flavour, serialized: trt.IHostMemory, messages: Messages) -> tuple[Layer, ...]:
    """The plan's layers: asked of the engine itself where it can run here, else as the builder told them."""
    if not flavour.opens_plans_where_it_builds:
        return messages.layers()
    trt = flavour.module
    runtime = trt.Runtime(make_logger(flavour, messages))
    engine = runtime.deserialize_cuda_engine(serialized)
    if engine is None:
        raise PlanError(f"the plan that was built does not open on this machine: {messages.reason}")
    return read_inspector(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))


def _peak_bytes() -> int:
    """The most memory that this process has held. getrusage would count what the parent held when it started this."""
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None  # Linux has it for every process
    return int(match[1]) << 10


def _write(plan: Path, serialized: trt.IHostMemory) -> None:
    try:
        with plan.open("wb") as file:
            file.write(memoryview(serialized))
    except OSError as error:
        raise PlanError(f"{plan}: {error.strerror}; the plan takes {serialized.nbytes:,} bytes") from error
