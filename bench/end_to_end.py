"""A whole request on one GPU, prompt to MP4, with random weights at released dimensions, stage by stage."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench import denoiser, host
from bench.requests import PROMPT
from bench.synthetic import RandomWeights, Wanted, open_engines, synthetic_store
from engines.plan import Workload, make_plan, released_outline
from engines.profile import Profile
from runtime.events import Cancellation, Event
from runtime.intake import Taken
from runtime.pipeline import Pipeline
from runtime.text import Tokenizer

GRAPHS = (
    *("text_encoder.embedding", "text_encoder.layer"),
    *denoiser.GRAPHS,
    *("video_decoder_tile", "audio_decoder"),
)
"""What a request of text alone needs."""

WARM_PROMPT = "A lighthouse."
"""Another than the measured one, whose encoded text would be kept."""


def measure(folder: Path, profile: Profile, seconds: int = 10, forwards: int = 4) -> dict[str, Any]:
    """Seconds of each stage of a request whose engines are warm; the schedule's tables are made anew."""
    store = synthetic_store(Wanted(profile, GRAPHS), folder)
    weights = RandomWeights(store.manifest, GRAPHS)
    engines = open_engines(store, GRAPHS, weights)
    plan = make_plan(profile, released_outline(), Workload(forwards=forwards))
    pipeline = Pipeline(engines, Tokenizer(store.tokenizer_file))
    pipeline.warm()
    wanted = {"aspect_ratio": "16:9", "seed": 1}
    short = {**wanted, "duration": 4, "num_inference_steps": 1}
    _generate(pipeline, pipeline.take(WARM_PROMPT, short))
    torch.cuda.reset_peak_memory_stats()
    whole = {**wanted, "duration": seconds, "num_inference_steps": forwards}
    taken = pipeline.take(PROMPT, whole)
    stages, size = _generate(pipeline, taken)
    request = taken.resolved
    return {
        "what": f"{request.frames} frames of {request.width}x{request.height}, {forwards} forwards, prompt to MP4",
        "excludes": "start, and the weights' way to the device; random weights: the picture is noise, slow to encode",
        "host": host.describe(),
        "profile": profile.name,
        "stages_s": stages,
        "total_s": sum(stages.values()),
        "mp4_bytes": size,
        "memory": denoiser.memory(plan, weights),
    }


def _generate(pipeline: Pipeline, taken: Taken) -> tuple[dict[str, float], int]:
    """Seconds from the first report of each stage to that of the next, and the size of the MP4."""
    marks: dict[str, float] = {}

    def mark(event: Event) -> None:
        if event.stage not in marks:
            torch.cuda.synchronize()
            marks[event.stage] = time.perf_counter()

    (media,) = pipeline.generate(taken, mark, Cancellation())
    ends = [*list(marks.values())[1:], time.perf_counter()]
    return {stage: end - start for (stage, start), end in zip(marks.items(), ends, strict=True)}, len(media)
