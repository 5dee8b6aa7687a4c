"""What a server says a request will take: a part of the resolved request that it answers with."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

WorkStage = Literal["encode", "denoise", "decode"]

WORK_STAGES: tuple[WorkStage, ...] = get_args(WorkStage)


class Queue(BaseModel):
    """What was before a request when it came."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    waiting: int = Field(description="requests that wait")
    running: int = Field(description="requests that are worked on")
    seconds: float | None = Field(description="what they will still take, about; null: unknown")


class Estimate(BaseModel):
    """What a request is expected to take here; null: nothing is known of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float | None = Field(description="of all stages, without the queue")
    stages: dict[WorkStage, float | None]
    basis: str = Field(description="what the seconds are estimated from, or what is missing")
    queue: Queue | None = Field(description="null where it cannot be seen")
    memory_bytes: int | None = Field(description="at the height of the request; null for GPUs, see h3trt plan")
    arrival: int = Field(description="when the request came, microseconds of the server's own clock")
