"""What the process that builds a plan is asked for, and what it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from engines.layers import Layer
from engines.store import AxisRange
from engines.tensorrt import FlavourName


class PlanError(RuntimeError):
    """A plan that was not built; says graph, place and reason. No file is left."""


class CensusError(PlanError):
    """A plan was built, but is not what its model asks for; names what was expected, what was found, and where."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Constant(_Record):
    """Where a baked weight's bytes lie."""

    file: Path
    offset: int
    nbytes: int


class Expected(_Record):
    """What a plan must hold, by the names that nodes have in the lowered model.

    `attention_nodes` must each be one fused kernel; `matmul_nodes` gives the data type (TensorRT's name) of each
    matrix product; `plugins` are operators that a plugin must do.
    """

    attention_nodes: tuple[str, ...]
    matmul_nodes: dict[str, str]
    collective_nodes: tuple[str, ...]
    plugins: tuple[str, ...]


class PlanRequest(_Record):
    """A plan to be built from an emitted model.

    `capabilities` are compute capabilities such as "8.9"; with TensorRT, which builds for the GPU that is here, the
    one that this must have. `profiles` gives each optimisation profile's range of every named axis of the model's
    inputs. `constants` says where the data of the initializers that are external lie; empty where weights are inputs.
    `workspace_bytes` limits what a layer may use besides its tensors. `timing_cache` is read and written by TensorRT.
    """

    graph: str
    flavour: FlavourName
    model: Path
    capabilities: Annotated[tuple[Annotated[str, Field(pattern=r"^\d+\.\d+$")], ...], Field(min_length=1)]
    profiles: tuple[dict[str, AxisRange], ...]
    constants: dict[str, Constant]
    workspace_bytes: int
    timing_cache: Path | None
    expected: Expected


class PlanResult(_Record):
    """A plan that was built.

    `activation_bytes` is the device memory of an execution context (the largest of the profiles), `weights_bytes` that
    of the weights inside; `peak_host_bytes` the most memory that the building process held. `warnings` are TensorRT's.
    """

    layers: tuple[Layer, ...]
    census: dict[str, int]
    activation_bytes: int
    weights_bytes: int
    seconds: float
    peak_host_bytes: int
    driver: str | None
    warnings: tuple[str, ...]
