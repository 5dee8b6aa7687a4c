"""What a plan says: graph by graph, stage by stage and rank by rank. All sizes are bytes, all times seconds."""

from __future__ import annotations

import json
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from engines.profile import Arithmetic, Component
from engines.quality import Tier
from plugins.distilled import Distilled

Stage = Literal["encode", "encode_video", "encode_audio", "modulation", "denoise", "decode_video", "decode_audio"]

STAGES: tuple[Stage, ...] = get_args(Stage)

STAGE_OF: dict[Component, Stage] = {
    "text_encoder": "encode",
    "video_encoder": "encode_video",
    "audio_encoder": "encode_audio",
    "modulation": "modulation",
    "denoiser": "denoise",
    "video_decoder": "decode_video",
    "audio_decoder": "decode_audio",
}


class PlanError(ValueError):
    """A profile that cannot serve a request; says by how much, and what would make it fit."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Workload(_Record):
    """The request that is planned for. `text_rows`: tokens of the prompt. `images`, `videos`, `sounds`: references.

    `adapters`: how many its server offers, of which it may choose one: memory is for that, times for a request without.

    A model that pins its schedule has forwards of its own where none are given.
    """

    seconds: float = 10
    aspect_ratio: str = "16:9"
    forwards: Annotated[int, Field(ge=1)] = 49
    text_rows: Annotated[int, Field(ge=1)] = 512
    images: Annotated[int, Field(ge=0)] = 0
    videos: Annotated[int, Field(ge=0)] = 0
    sounds: Annotated[int, Field(ge=0)] = 0
    adapters: Annotated[int, Field(ge=0)] = 0

    def of(self, student: Distilled | None) -> Workload:
        """The request to a model that may be a student."""
        if student is None or "forwards" in self.model_fields_set:
            return self
        return self.model_copy(update={"forwards": student.schedule.forwards})


class GraphPlan(_Record):
    """One graph on the rank that has most of it.

    `runs`: of all instances, a request. `weights`: of all instances; `instance`: of the largest. `activations`: what
    the builder reports as activation memory, which all graphs share. `workspace`: scratch of libraries. `io`: inputs
    and outputs. `attention`: queries, keys, values and result (part of the two above). `collectives`: buffers of
    exchanges with other ranks. `flops` by arithmetic, `traffic` to and from device memory, `exchanged` with other
    ranks: of all runs.
    """

    graph: str
    component: Component
    instances: int
    runs: int
    weights: int
    instance: int
    activations: int
    workspace: int
    io: int
    attention: int
    collectives: int
    flops: dict[Arithmetic, float]
    traffic: float
    exchanged: float


class StagePlan(_Record):
    """One stage: what the fullest rank's memory is made of, each rank's peak, and lower bounds of the time.

    `weights` are on the GPU all the time, `slots` for this stage: what is swapped in, or two slots of what is
    streamed. `buffers`: inputs, outputs and what outlives a graph. `transferred`: weights that come from the host.
    The time is the longest of `compute`, `memory`, `peer` and `host`, as if they overlapped perfectly.
    """

    name: Stage
    weights: int
    slots: int
    activations: int
    workspace: int
    buffers: int
    collectives: int
    process: int
    peaks: tuple[int, ...]
    flops: float
    traffic: float
    transferred: int
    compute: float
    memory: float
    peer: float
    host: float

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(self.peaks)

    @property
    def seconds(self) -> float:
        """The lower bound of the stage's time."""
        return max(self.compute, self.memory, self.peer, self.host)

    @property
    def bound(self) -> str:
        """What that is given by."""
        times = {"compute": self.compute, "memory": self.memory, "peer": self.peer, "host": self.host}
        return max(times, key=lambda name: times[name])


class Rows(_Record):
    """Rows of the packed sequence; `local`: of one rank; `chunk`: most that go through a block's row-local parts."""

    text: int
    audio: int
    video: int
    total: int
    local: int
    chunk: int


class Plan(_Record):
    """A profile's plan for a request.

    `tiers`: those of quality that requests may choose; times and operations are of the first, memory is for all.
    `student`: what the model is called, if it pins its schedule; then `folded` bytes of its weights are in no memory:
    what they make, the tables, is in a file of the store.
    `limit`: bytes of one GPU, 0 where there is none to fit into. `host`: bytes of the host's memory, `pinned` among
    them. `disk`: the checkpoint, `sidecar` of quantised weights and plans. `tables`: AdaLN parameters of the schedule.
    `adapter`: weights of each adapter that is offered, as the profile's mode has them; they are in the store's files.
    """

    profile: str
    student: str | None
    workload: Workload
    frames: int
    width: int
    height: int
    rows: Rows
    tiles: int
    partitions: tuple[str, ...]
    tiers: tuple[Tier, ...]
    graphs: tuple[GraphPlan, ...]
    stages: tuple[StagePlan, ...]
    limit: int
    tables: int
    adapter: int
    folded: int
    pinned: int
    host: int
    checkpoint: int
    sidecar: int
    engines: int

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank in its fullest stage."""
        return max(stage.peak for stage in self.stages)

    @property
    def disk(self) -> int:
        """Bytes on disk: checkpoint and store, with the files of adapters."""
        return self.checkpoint + self.sidecar + self.engines + self.workload.adapters * self.adapter

    @property
    def flops(self) -> float:
        """Operations of all ranks, less those that they all do."""
        return sum(stage.flops for stage in self.stages)

    @property
    def seconds(self) -> float:
        """The lower bound of a request's time, media aside; weights that come from the host included."""
        return sum(stage.seconds for stage in self.stages)

    def to_json(self) -> str:
        """The plan as a JSON object; totals and bounds of the time are among its keys."""
        stages = {
            s.name: s.model_dump() | {"peak": s.peak, "seconds": s.seconds, "bound": s.bound} for s in self.stages
        }
        totals = {"peak": self.peak, "disk": self.disk, "flops": self.flops, "seconds": self.seconds}
        return json.dumps(self.model_dump() | {"stages": stages} | totals, indent=2)

    def stage(self, name: Stage) -> StagePlan:
        """One of the stages."""
        return next(stage for stage in self.stages if stage.name == name)

    def graph(self, name: str) -> GraphPlan:
        """One of the graphs."""
        return next(graph for graph in self.graphs if graph.graph == name)
