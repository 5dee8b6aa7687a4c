"""A whole request, prompt to MP4, as a server's ranks do it, with random weights at released dimensions.

Of a profile of several ranks, the same on one GPU as well, and how far apart the results are.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench import host
from bench.requests import PROMPT
from bench.served import GRAPHS, memory_of_first, serving
from bench.synthetic import Wanted, compile_packages, shared_by
from engines.profile import ONE_RANK, Profile
from runtime.events import Cancellation, Event, ignore
from runtime.intake import Taken
from runtime.pipeline import Encoded, Latents
from runtime.ranked_pipeline import RankedPipeline

WARM_PROMPT = "A lighthouse."
"""Another than the measured one, whose encoded text would be kept."""

WANTED = {"aspect_ratio": "16:9", "seed": 1}
SHORT = WANTED | {"duration": 4, "num_inference_steps": 2}


def measure(folder: Path, profile: Profile, seconds: int = 10, forwards: int = 4) -> dict[str, Any]:
    """Seconds of each stage of a request whose engines are warm; the schedule's tables are made anew.

    Raises RankLost when a rank fails.
    """
    sides = {_name(each): each for each in (shared_by(profile, ONE_RANK), shared_by(profile, profile.ranks))}
    compile_packages(folder, [Wanted(each, GRAPHS) for each in sides.values()])
    request = WANTED | {"duration": seconds, "num_inference_steps": forwards}
    found: dict[str, dict[str, Any]] = {}
    clips: list[tuple[Latents, bytes]] = []
    for name, each in sides.items():
        with serving(folder, each) as (pipeline, group):
            # What another has made is decoded again: each side's own latents may differ.
            clips.append(_clip(pipeline, clips[0][0] if clips else None))
            taken = pipeline.take(PROMPT, request)
            stages, size = _generate(pipeline, taken)
            found[name] = {"stages_s": stages, "total_s": sum(stages.values()), "mp4_bytes": size}
            found[name]["memory"] = memory_of_first(group, forwards)
    resolved, several = taken.resolved, len(sides) > 1
    return {
        "what": f"{resolved.frames} frames of {resolved.width}x{resolved.height}, {forwards} forwards, prompt to MP4",
        "excludes": "start, and the weights' way to the device; random weights: the picture is noise, slow to encode",
        "host": host.describe(),
        "profile": profile.name,
        "stages_s": {
            f"{name}, {stage}" if several else stage: seconds
            for name, each in found.items()
            for stage, seconds in each.pop("stages_s").items()
        },
        "sides": found,
        "memory": found[_name(profile)]["memory"],
        **({"from one GPU": _apart(*clips)} if several else {}),
    }


def _name(profile: Profile) -> str:
    return "one GPU" if profile.gpus == 1 else f"{profile.gpus} GPUs"


def _clip(pipeline: RankedPipeline, latents: Latents | None) -> tuple[Latents, bytes]:
    """The latents of a short request whose conditioning is drawn, and the MP4 of the given ones, else of these.

    Not the text encoder's: the parts that ranks have of its random weights are no parts of the whole ones.
    """
    taken = pipeline.take(WARM_PROMPT, SHORT)
    for _ in pipeline.generate(taken, ignore, Cancellation()):
        pass
    tags = torch.from_numpy(taken.presented.tags)
    size = pipeline.manifest.dimensions.denoiser
    text = torch.randn(len(tags), size.text_dim, generator=torch.Generator().manual_seed(1))
    encoded = Encoded(text, tags, torch.empty(0, size.video_row), torch.empty(0, size.audio_channels))
    (made,) = pipeline.denoise(taken.resolved, encoded, ignore, Cancellation())
    return made, pipeline.decode(taken.resolved, *(latents or made), ignore, Cancellation())


def _apart(one: tuple[Latents, bytes], shared: tuple[Latents, bytes]) -> dict[str, Any]:
    """Relative norms of the differences of a short clip's latents, and whether equal latents make equal MP4."""
    video, audio = (float((b - a).norm() / a.norm()) for a, b in zip(one[0], shared[0], strict=True))
    return {"video latents": video, "audio latents": audio, "equal MP4 of equal latents": one[1] == shared[1]}


def _generate(pipeline: RankedPipeline, taken: Taken) -> tuple[dict[str, float], int]:
    """Seconds from the first report of each stage to that of the next, and the size of the MP4."""
    marks: dict[str, float] = {}

    def mark(event: Event) -> None:
        # A stage's results are on the host before the next one reports.
        marks.setdefault(event.stage, time.perf_counter())

    (media,) = pipeline.generate(taken, mark, Cancellation())
    ends = [*list(marks.values())[1:], time.perf_counter()]
    return {stage: end - start for (stage, start), end in zip(marks.items(), ends, strict=True)}, len(media)
