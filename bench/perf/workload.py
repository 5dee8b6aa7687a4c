"""What a load generator asks of a server: a data file for each kind of machine, `bench/perf/workloads`."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engines.profile import Profile

WORKLOADS = Path(__file__).parent / "workloads"


class WorkloadError(ValueError):
    """A workload file that cannot be used; the message names the file, the field and the rule."""


class Gates(BaseModel):
    """What the windows of a point must keep for it to count as stable; all in percent.

    stability: perf_analyzer's own rule, the largest over the smallest of the last three windows, of throughput and of
    p95 latency. variation: standard deviation over mean, span: largest less smallest over median, of the throughput.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stability: float = Field(gt=0)
    variation: float = Field(gt=0)
    span: float = Field(gt=0)


class Workload(BaseModel):
    """One sweep: each duration in turn, `visits` times, at every concurrency; the longest is run first, untimed.

    seconds: durations of the clips. forwards: evaluations of the denoiser. requests: the fewest that a window holds, of
    which a point has three.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(min_length=1)
    aspect_ratio: str
    width: int | None = None
    height: int | None = None
    seconds: tuple[int, ...] = Field(min_length=1)
    forwards: int = Field(ge=1)
    seed: int = 0
    concurrency: tuple[int, int] = (1, 4)
    visits: int = Field(default=2, ge=1)
    requests: int = Field(default=4, ge=1)
    gates: Gates

    @model_validator(mode="after")
    def _check(self) -> Workload:
        first, last = self.concurrency
        if not 1 <= first <= last:
            raise ValueError(f"concurrency = {list(self.concurrency)}: must be from at least 1 to no less than that")
        # In a window in which a step of the ensemble ends nothing, perf_analyzer fails.
        if self.requests < last:
            raise ValueError(f"requests = {self.requests}: must be at least the last concurrency, {last}")
        return self

    @classmethod
    def load(cls, profile: Profile, file: Path | None = None) -> Workload:
        """The workload of a file; else that of the profile's name, or of its kind of machine. Raises WorkloadError."""
        own, kind = (WORKLOADS / f"{name}.toml" for name in (profile.name, "gpu" if profile.on_gpu else "cpu"))
        chosen = file or (own if own.exists() else kind)
        try:
            return cls.model_validate(tomllib.loads(chosen.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise WorkloadError(f"{chosen}: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "workload"
            raise WorkloadError(f"{chosen}: {where}: {first['msg']}") from None

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        """Durations as they are visited, each with the number of the visit from 1."""
        return tuple((seconds, visit + 1) for visit in range(self.visits) for seconds in self.seconds)

    @property
    def concurrencies(self) -> range:
        """All of the sweep."""
        first, last = self.concurrency
        return range(first, last + 1)

    @property
    def prompt_sha256(self) -> str:
        """Of its UTF-8 bytes."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()

    def params(self, seconds: int) -> Mapping[str, Any]:
        """The request's parameters object."""
        canvas = {"width": self.width, "height": self.height}
        return {
            "duration": seconds,
            "aspect_ratio": self.aspect_ratio,
            **{name: side for name, side in canvas.items() if side is not None},
            "num_inference_steps": self.forwards,
            "seed": self.seed,
        }
