"""A whole forward of the transformer, all 50 blocks with weights of their own: time, and memory beside the plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench import host
from bench.measuring import Timing, once
from bench.synthetic import DEVICE, PARTITION, RandomWeights, Wanted, open_engines, synthetic_store
from engines.plan import Workload, make_plan, released_outline
from engines.plan.plan import Plan
from engines.profile import Profile
from plugins.dimensions import TEXT_TAG
from plugins.kernels import flash_attention_3
from plugins.schedule import Schedule
from plugins.shape import Shape, canvas
from runtime.denoiser import Denoiser, State
from runtime.events import Cancellation, Reporter, Units
from runtime.modulation import ModulationCache
from runtime.packing import Layout, layout
from runtime.quality import Quality, quality

GRAPHS = ("context", "modulation.time", "modulation.adaln", "prologue", "block", "epilogue")

VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0

TABLES_BYTES = 4 << 30
"""Host memory for the tables of a schedule."""


def measure(folder: Path, profile: Profile, forwards: int = 3) -> dict[str, Any]:
    """Seconds of each forward of a 10 s clip after the first, and the peak of device memory.

    Only the denoiser's components are there; the plan's figure is less the weights of the others by as much.
    """
    store = synthetic_store(Wanted(profile, GRAPHS), folder)
    workload = Workload(forwards=forwards)
    plan = make_plan(profile, released_outline(), workload)
    weights = RandomWeights(store.manifest, GRAPHS)
    engines = open_engines(store, GRAPHS, weights)
    denoiser = Denoiser(engines, PARTITION, ModulationCache(TABLES_BYTES), {})
    shape = Shape.of(*canvas(workload.aspect_ratio), plan.frames, store.manifest.dimensions)
    packed = _layout(shape, workload.text_rows, store.manifest.dimensions.denoiser.patch)
    engines.warm()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tier = quality(profile.tiers[0], forwards, VIDEO_SHIFT)
    seconds = _run(denoiser, packed, shape, workload, tier, store.manifest.dimensions.denoiser.text_dim)
    timing = Timing(tuple(1e3 * each for each in seconds[1:]))
    return {
        "what": f"forwards of the whole transformer, {plan.rows.total} rows, random weights and data",
        "host": host.describe(),
        "profile": profile.name,
        "rows": plan.rows.total,
        "FlashAttention-3": flash_attention_3.available(),
        "first forward": 1e3 * seconds[0],
        "forward": timing.as_json(),
        "memory": memory(plan, weights),
    }


def memory(plan: Plan, weights: RandomWeights) -> dict[str, float]:
    """Bytes at the height of the denoising, measured and planned, without the components that are not there."""
    absent = sum(g.weights for g in plan.graphs if g.graph not in weights.graphs)
    planned = plan.stage("denoise").peak - absent
    reserved = torch.cuda.max_memory_reserved()
    # What is not torch's: the context, kernels and libraries' own memory, and what the driver keeps of the total.
    other = host.used_memory() - torch.cuda.memory_reserved()
    return {
        "planned": planned,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": reserved,
        "other": other,
        "measured": reserved + other,
        "measured / planned": (reserved + other) / planned,
    }


def _run(
    denoiser: Denoiser, packed: Layout, shape: Shape, workload: Workload, tier: Quality, text_dim: int
) -> list[float]:
    """Seconds of each step."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    text = torch.randn(workload.text_rows, text_dim, device=DEVICE, generator=generator)
    video = torch.randn(shape.video_rows, 96, device=DEVICE, generator=generator)
    audio = torch.randn(shape.audio_rows, 32, device=DEVICE, generator=generator)
    schedule = Schedule.uniform(workload.forwards, VIDEO_SHIFT, AUDIO_SHIFT)
    units = Units("denoise", workload.forwards, Reporter.silent(), Cancellation())
    none = State(video[:0], audio[:0])
    steps = denoiser.sample(denoiser.sequence(text, packed), schedule, tier, none, State(video, audio), units)
    return [once(lambda: next(steps)) / 1e3 for _ in range(workload.forwards)]


def _layout(shape: Shape, text_rows: int, patch: tuple[int, int, int]) -> Layout:
    grid = shape.latent_frames, shape.latent_height, shape.latent_width
    return layout(torch.full((text_rows,), TEXT_TAG), (), *grid, shape.audio_latents, patch)
