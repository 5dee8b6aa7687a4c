"""Bindings that compute on the CPU and record what they are asked: `out = hidden * scale`, by the given addresses.

A "plan" is JSON: the names of its tensors, and the bytes of activations that each optimisation profile needs. As in
TensorRT, an execution fails unless every tensor has an address, every input a shape, and the context its memory.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from engines.tensorrt import Flavour

STREAM = 77


class HostGpu:
    """A `Gpu` whose memory is the host's and whose queues are done at once."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.finished = 0
        self.trimmed = 0
        self.inside = False

    @contextmanager
    def computing(self) -> Iterator[int]:
        assert not self.inside
        self.inside = True
        try:
            yield STREAM
        finally:
            self.inside = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pin(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: object) -> object:
        destination.copy_(source)
        return object()

    def computed(self) -> object:
        return object()

    def compute_after(self, event: object) -> None:
        assert self.inside

    def finish(self, event: object) -> None:
        self.finished += 1

    def trim(self) -> None:
        self.trimmed += 1

    def describe(self) -> str:
        return "a pretended GPU with compute capability 8.9"


class Context:
    def __init__(self, engine: Engine, config: Config) -> None:
        assert config.strategy == "USER_MANAGED"
        self.engine = engine
        self.active_optimization_profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory = 0
        self.calls: list[str] = []
        self.runs: list[dict[str, Any]] = []
        self.communicators: list[object] = []

    def set_communicator(self, communicator: object) -> bool:
        self.communicators.append(communicator)
        return True

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream == STREAM
        self.active_optimization_profile = index
        self.shapes = {}
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert address
        self.memory = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.calls.append("shape")
        self.shapes[name] = shape
        return name not in self.engine.plan.get("refuses", ())

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        plan = self.engine.plan
        assert stream == STREAM
        assert self.memory >= plan["activations"][self.active_optimization_profile]
        assert set(self.addresses) == {*plan["inputs"], *plan["outputs"]}
        assert set(self.shapes) == set(plan["inputs"])
        self.calls.append("run")
        self.runs.append({"profile": self.active_optimization_profile, **self.addresses})
        (rows,) = self.shapes["hidden"]
        scale = _floats(self.addresses["scale"], 1)[0] if "scale" in plan["inputs"] else plan["scale"]
        hidden, out = (_floats(self.addresses[name], rows) for name in ("hidden", "out"))
        for i in range(rows):
            out[i] = hidden[i] * scale
        # What a later run forgets to set must not be there from this one.
        self.addresses, self.shapes = {}, {}
        return not plan.get("fails", False)


class Config:
    strategy = ""

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        cache.engines += 1
        return True


class Cache:
    def __init__(self) -> None:
        self.engines = 0
        self.content = b"compiled"
        self.given: list[bytes] = []

    def deserialize(self, blob: bytes) -> bool:
        self.given.append(blob)
        return blob.startswith(b"compiled")

    def serialize(self) -> bytes:
        return self.content


class Engine:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.names = [*plan["inputs"], *plan["outputs"]]
        self.num_io_tensors = len(self.names)
        self.contexts: list[Context] = []

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return self.plan["activations"][index]

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, config: Config) -> Context:
        self.contexts.append(Context(self, config))
        return self.contexts[-1]


class Bindings:
    """The module: `engines` has everything that was opened, in order."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.registry = object()
        self.validity: tuple[str, int] = ("VALID", 0)
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
        self.EngineValidity = SimpleNamespace(INVALID="INVALID")
        flags = {"VERSION_MISMATCH": 1, "UNSUPPORTED_CC": 2, "OLD_CUDA_DRIVER": 4}
        self.EngineInvalidityDiagnostics = SimpleNamespace(__members__=flags)
        bindings = self

        class ILogger:
            def __init__(self) -> None:
                pass

        class Runtime:
            def __init__(self, logger: Any) -> None:
                self.logger = logger

            def get_plugin_registry(self) -> object:
                return bindings.registry

            def get_engine_validity(self, plan: bytes) -> tuple[str, int]:
                return bindings.validity

            def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
                content = json.loads(plan)
                if "refusal" in content:
                    self.logger.log(SimpleNamespace(name="ERROR"), content["refusal"])
                    return None
                bindings.engines.append(Engine(content))
                return bindings.engines[-1]

        self.ILogger, self.Runtime = ILogger, Runtime

    def flavour(self, name: str = "tensorrt_rtx") -> Flavour:
        return Flavour(name, self, "1.7.1")  # type: ignore[arg-type]


def _floats(address: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(address)
