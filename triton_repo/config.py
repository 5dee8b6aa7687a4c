"""A Triton model configuration as plain data: what this repository uses of `config.pbtxt`, and nothing more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

DYNAMIC = -1
"""A size that the request decides."""


class DataType(Enum):
    """Element types of Triton tensors; the values are Triton's own names."""

    STRING = "TYPE_STRING"
    INT64 = "TYPE_INT64"
    FP32 = "TYPE_FP32"
    BF16 = "TYPE_BF16"


class Kind(Enum):
    """Where an instance runs. Python models place their own tensors, so Triton need not know of the GPUs."""

    CPU = "KIND_CPU"


@dataclass(frozen=True)
class Tensor:
    """One input or output: its name, element type and shape (`DYNAMIC` for a free size), without a batch axis.

    An `optional` input may be left out of a request; an ensemble then leaves it out of its steps too.
    """

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class Resource:
    """A rate limiter resource that an instance holds while it executes. `shared` resources are one pool per server."""

    name: str
    count: int = 1
    shared: bool = True


@dataclass(frozen=True)
class InstanceGroup:
    """How many copies of a model run, and what each must hold while it runs.

    Of what could run next, Triton's rate limiter takes the one whose executions so far, times its `weight`, are the
    fewest; while that one waits for a resource, all others wait behind it, whether they need the resource or not.
    """

    count: int = 1
    kind: Kind = Kind.CPU
    resources: tuple[Resource, ...] = ()
    weight: int = 1


@dataclass(frozen=True)
class QueuePolicy:
    """The waiting lines of a model: one for each priority, what has HIGH leaving before what has NORMAL, the default.

    A request beyond the `max_queue_size` of its line is refused at once with UNAVAILABLE; 0: none is. So is one that
    has waited for `timeout` microseconds, or for its own timeout if that is shorter. With 0 it may wait for ever, and
    Triton heeds no timeout of its own.
    """

    max_queue_size: int
    timeout: int = 0


@dataclass(frozen=True)
class EnsembleStep:
    """One step of an ensemble; the maps go from the model's tensor names to the ensemble's."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class ModelConfig:
    """One model of the repository: either a Python model or, with `steps`, an ensemble."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    instance_group: InstanceGroup | None = None
    queue: QueuePolicy | None = None
    decoupled: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[EnsembleStep, ...] = ()
