"""A job: what the gateway keeps of a request, and the record that clients see of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.errors import Code

Status = Literal["queued", "in_progress", "completed", "failed"]

JOB_ID = re.compile(r"video_gen_[0-9a-f]{32}")
"""Nothing else reaches the database or the file system as the name of a job."""

MEDIA_TYPE = "video/mp4"


def new_id() -> str:
    """An id that cannot be guessed."""
    return f"video_gen_{secrets.token_hex(16)}"


class JobError(BaseModel):
    """Why a job failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: Code
    message: str


class ResolvedSummary(BaseModel):
    """What the request became: sides in pixels, seconds of the clip, evaluations of the denoiser, and of what model.

    adapter: what the model was changed by, null for nothing.
    """

    model_config = ConfigDict(frozen=True)

    task: str
    width: int
    height: int
    frames: int
    fps: int
    seconds: float
    adapter: str | None = None
    forwards: int
    sigma_points: int
    seed: int
    outputs: int
    notes: tuple[str, ...]


class VideoJob(BaseModel):
    """The record of a job. Times are Unix seconds; `progress` is a percentage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=f"^{JOB_ID.pattern}$")
    object: Literal["video"] = "video"
    status: Status
    progress: int = Field(ge=0, le=100)
    model: str
    prompt: str
    size: str = Field(pattern=r"^\d+x\d+$", description="WIDTHxHEIGHT in pixels")
    seconds: str = Field(description="of the clip, as made and not as asked for")
    quality: str
    created_at: int
    completed_at: int | None = Field(default=None, description="when it ended, also when it failed")
    expires_at: int | None = Field(default=None, description="earliest time at which it is removed for its age")
    error: JobError | None = None
    file_name: str | None = None
    media_type: Literal["video/mp4"] | None = None
    inference_time_s: float | None = Field(default=None, description="from the first word of the model to the last")
    fps: int
    num_frames: int
    duration_s: float
    stage_durations: dict[str, float] = Field(default_factory=dict, description="seconds of each stage")
    peak_memory_mb: float | None = Field(default=None, description="null: the server does not report it")
    estimate_s: float | None = Field(default=None, description="what the server expected it to take, without waiting")
    outputs: int = Field(description="clips of the job; /content?index=N gives each, /content?archive=zip all")
    queue_position: int | None = Field(default=None, description="jobs that are before this one; null once it runs")
    resolved: ResolvedSummary

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in ("completed", "failed")

    def failed(self, code: Code, message: str, **changes: Any) -> VideoJob:
        """The same job, ended without a clip."""
        return self.model_copy(update={"status": "failed", "error": JobError(code=code, message=message), **changes})


def queued(job_id: str, prompt: str, model: str, resolved: Mapping[str, Any], created_at: int) -> VideoJob:
    """The record of a job that was just accepted. resolved: the request as `h3_prepare` resolved it."""
    return VideoJob(
        id=job_id,
        status="queued",
        progress=0,
        model=model,
        prompt=prompt,
        size=f"{resolved['width']}x{resolved['height']}",
        seconds=f"{resolved['seconds']:.3f}".rstrip("0").rstrip("."),
        quality=resolved["quality"]["tier"],
        created_at=created_at,
        fps=resolved["fps"],
        num_frames=resolved["frames"],
        duration_s=resolved["seconds"],
        outputs=resolved["outputs"],
        estimate_s=(resolved.get("estimate") or {}).get("seconds"),
        resolved=ResolvedSummary.model_validate(resolved),
    )
