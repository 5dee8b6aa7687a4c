"""`h3trt verify`: built engines against torch eager, and the whole pipeline against diffusers, on one checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engines.graphs import profile_graphs
from engines.sessions.engine_set import EngineSet
from engines.store import WEIGHTS, Manifest, Partition
from export.binding import bind
from export.checkpoint import Checkpoint, materialise
from export.compare import draw
from export.graphs.graph import Graph
from export.trace import BoundModule, instance_sizes
from h3trt.reference import Reference, ReferenceMedia, ReferencePipeline
from h3trt.verify_requests import requests
from runtime.decode import decode_video
from runtime.denoiser import State
from runtime.events import Cancellation, Reporter, Units, ignore
from runtime.intake import Taken
from runtime.packing import Layout, patchify_video
from runtime.pipeline import Encoded, Pipeline, schedule_of
from runtime.request import Resolved

LATENT_LIMIT = 1e-4
"""Largest |difference| of final latents, whose scale is about 1: float32 sums in another order, through all blocks."""

STEP_LIMIT = LATENT_LIMIT
"""The same for the state after each step: errors do not shrink along the trajectory."""

TEXT_LIMIT = 1e-5
"""Relative to the largest: float32 sums in another order, through 50 layers."""

CONDITION_LIMIT = 1e-5
"""Relative to the largest, beyond one step of float16, which latents of conditions are rounded to: an encoder's float32
sums in another order move a value by less than this, but may move it across the middle between two float16 numbers."""

ROUNDED_LIMIT = 0.1
"""Share of latents of conditions that are such a step apart; another kind of rounding would move half of them."""

SOUND_LIMIT = 1e-5
"""Relative to the largest: latents of sounds are not rounded."""

PSNR_LIMIT = 50.0
"""Decibels of uint8 frames: 50 is an error of less than one level at most pixels."""

AUDIO_LIMIT = 1e-4
"""Largest |difference| of the waveform, full scale being 1."""


@dataclass(frozen=True)
class Check:
    """One compared quantity: `measured` must be at most `limit`, or at least it if `at_least`."""

    group: str
    name: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def title(self) -> str:
        """Group and name."""
        return f"{self.group}: {self.name}"

    @property
    def rule(self) -> str:
        """The limit, as a table shows it."""
        return f"{'>=' if self.at_least else '<='} {self.limit:.3g}"

    @property
    def passed(self) -> bool:
        """Whether the limit is kept; not a number is not."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass(frozen=True)
class Verification:
    """All checks of one checkpoint, engine store and the requests made of it."""

    checkpoint: str
    store: str
    requests: tuple[Resolved, ...]
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks over their limit."""
        return tuple(check for check in self.checks if not check.passed)

    def to_json(self) -> str:
        """The checks, each with `passed`, and what they were made on."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        requests = [request.model_dump(mode="json") for request in self.requests]
        fields = {"checkpoint": self.checkpoint, "store": self.store, "requests": requests}
        return json.dumps({**fields, "passed": not self.failed, "checks": checks}, indent=2)


def verify(store: Path, forwards: int, seed: int, progress: Callable[[Check], None]) -> Verification:
    """Compares the engines of `store` with eager torch and with diffusers on the checkpoint that they are bound to.

    `progress` receives each check as it is made. Raises StoreError, CheckpointError.
    """
    pipeline = Pipeline.open(store)
    checkpoint = Checkpoint.open(pipeline.manifest.checkpoint.root)
    made = list(requests(pipeline, forwards, seed))
    checks = []
    for check in _all_checks(pipeline, EngineSet.open(store), checkpoint, made):
        progress(check)
        checks.append(check)
    return Verification(str(checkpoint.root), str(store), tuple(taken.resolved for taken in made), tuple(checks))


def _all_checks(
    pipeline: Pipeline, engines: EngineSet, checkpoint: Checkpoint, made: Sequence[Taken]
) -> Iterator[Check]:
    yield from engine_checks(engines, checkpoint)
    reference = ReferencePipeline(checkpoint)
    for taken in made:
        # What decodes latents is the same for every task.
        yield from pipeline_checks(pipeline, reference, taken, decode=taken is made[0])


def engine_checks(engines: EngineSet, checkpoint: Checkpoint) -> Iterator[Check]:
    """Each engine as it was built, its first and last instance, at the graph's trial sizes, against eager torch.

    What a partition shares with the one before it is checked once.
    """
    profile = engines.manifest.serving
    for partition in profile.partitions:
        for graph in profile_graphs(checkpoint, profile, partition, engines.root / WEIGHTS):
            # Those that have made a student's tables are not served.
            if graph.name not in engines.manifest.graphs or _is_repeated(engines.manifest, graph.name, partition):
                continue
            for instance in sorted({0, len(graph.weights) - 1}):
                worst = _worst(*_engine_differences(engines, graph, instance, partition))
                yield Check("engine", f"{partition} {graph.name}[{instance}]", worst, graph.tolerance)


def _is_repeated(manifest: Manifest, graph: str, partition: Partition) -> bool:
    """Whether the first partition's engine is the same one, reading the same bytes of the same files."""
    first = manifest.partitions[0]
    if partition == first or manifest.profile.weights == "baked" or not manifest.graphs[graph].weights:
        return False
    return manifest.bindings[partition][graph] == manifest.bindings[first][graph]


def _engine_differences(engines: EngineSet, graph: Graph, instance: int, partition: Partition) -> Iterator[float]:
    """Largest difference of each output at each trial, relative to the output's largest magnitude."""
    binding = bind(graph)
    module = BoundModule(graph, binding, instance)
    weights = tuple(materialise(binding.instances[instance][weight.name]) for weight in binding.inputs)
    generator = torch.Generator().manual_seed(0)
    for trial in graph.trials:
        sizes = {**trial, **instance_sizes(binding, instance)}
        inputs = tuple(draw(spec, sizes, generator) for spec in graph.inputs)
        with torch.no_grad():
            expected = module(inputs, weights)
        expected = expected if isinstance(expected, tuple) else (expected,)
        named = {spec.name: tensor for spec, tensor in zip(graph.inputs, inputs, strict=True)}
        found = engines.run(graph.name, named, instance=instance, partition=partition)
        for spec, tensor in zip(graph.outputs, expected, strict=True):
            yield _relative(found[spec.name], tensor)


def pipeline_checks(
    pipeline: Pipeline, reference: ReferencePipeline, taken: Taken, decode: bool = False
) -> Iterator[Check]:
    """The request through the engines and through diffusers' modular pipeline, quantity by quantity."""
    request, task = taken.resolved, taken.resolved.task
    theirs = reference.run(request, taken.media, decode)
    ours = pipeline.encode(taken, ignore, Cancellation())
    layout = pipeline.layout(request, ours.tags)
    yield from _layout_checks(task, layout, theirs)
    yield from _timestep_checks(task, request, layout, theirs)
    yield from _noise_checks(task, *pipeline.start(request, ours), theirs)
    yield Check(task, "prompt embeddings, relative", _relative(ours.text, theirs.text), TEXT_LIMIT)
    if theirs.condition_latents:
        yield from _condition_checks(task, pipeline, ours, theirs)
    units = Units("denoise", request.forwards, Reporter.silent(), Cancellation())
    states = list(next(pipeline.trajectory(request, ours, units)))
    for step, (state, expected) in enumerate(zip(states[1:], theirs.steps, strict=True)):
        worst = _worst(_largest(state.video, expected.video), _largest(state.audio, expected.audio))
        yield Check(task, f"latents after step {step + 1}", worst, STEP_LIMIT)
    video, audio = pipeline.latents(request, states[-1])
    yield Check(task, "final video latents", _largest(video, theirs.video_latents), LATENT_LIMIT)
    yield Check(task, "final audio latents", _largest(audio[0], theirs.audio_latents), LATENT_LIMIT)
    if theirs.media is not None:
        yield from _media_checks(pipeline, video, audio[0], theirs.media)


def _layout_checks(task: str, layout: Layout, reference: Reference) -> Iterator[Check]:
    """Bit equality: the measured number is how many elements differ."""
    for name in ("token_tags", "position_ids", "text_indices", "audio_indices", "video_indices"):
        ours, theirs = getattr(layout, name), getattr(reference, name)
        yield Check(f"{task} layout", f"{name}, unequal elements", _unequal(ours, theirs), 0)


def _timestep_checks(task: str, request: Resolved, layout: Layout, reference: Reference) -> Iterator[Check]:
    slots = schedule_of(request).slots()
    pairs = zip(slots, reference.timesteps, strict=True)
    unequal = [_unequal(timesteps[layout.timestep_index], theirs) for timesteps, theirs in pairs]
    yield Check(f"{task} layout", "timesteps, unequal elements", sum(unequal), 0)


def _noise_checks(task: str, conditions: State, noise: State, reference: Reference) -> Iterator[Check]:
    for name in ("video", "audio"):
        ours, theirs = getattr(noise, name), getattr(reference.noise, name)
        yield Check(f"{task} noise", f"{name} rows, unequal elements", _unequal(ours, theirs), 0)
    if len(reference.conditions.audio):
        worst = _relative(conditions.audio, reference.conditions.audio)
        yield Check(f"{task} noise", "rows of reference sounds, relative", worst, SOUND_LIMIT)


def _condition_checks(task: str, pipeline: Pipeline, encoded: Encoded, reference: Reference) -> Iterator[Check]:
    """Latents of conditions before they are normalised, which are float16 numbers on both sides; in rows."""
    patch, vae = pipeline.manifest.dimensions.denoiser.patch, pipeline.manifest.dimensions.video_vae
    # Columns of a row are a channel's patch after the other.
    mean, std = (torch.tensor(v).repeat_interleave(math.prod(patch)) for v in (vae.latents_mean, vae.latents_std))
    theirs = torch.cat([patchify_video(one, patch) for one in reference.condition_latents])
    found, expected = (rows * std + mean for rows in (encoded.condition_video, theirs))
    beyond = ((found - expected).abs() - _float16_spacing(expected)).max() / expected.abs().max()
    yield Check(task, "latents of conditions beyond a float16 step, relative", beyond.item(), CONDITION_LIMIT)
    unequal = (encoded.condition_video != theirs).float().mean().item()
    yield Check(task, "latents of conditions, share not equal", unequal, ROUNDED_LIMIT)


def _float16_spacing(values: torch.Tensor) -> torch.Tensor:
    """How far apart float16 numbers of 11 significant bits lie at these values."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - 11)


def _media_checks(
    pipeline: Pipeline, video: torch.Tensor, audio: torch.Tensor, reference: ReferenceMedia
) -> Iterator[Check]:
    vae, quiet = pipeline.manifest.dimensions.video_vae, Reporter.silent()
    frames = torch.cat(list(decode_video(video, pipeline.decode_tile, vae, quiet, Cancellation())))
    yield Check("media", "frames, PSNR in dB", psnr(frames, reference.frames), PSNR_LIMIT, at_least=True)
    yield Check("media", "waveform", _largest(pipeline.waveform(audio), reference.waveform), AUDIO_LIMIT)


def psnr(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of uint8 frames of one shape; infinite when they are equal."""
    if ours.shape != theirs.shape:
        return -math.inf
    error = (ours.float() - theirs.float()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    return (ours.double() - theirs.double()).abs().max().item()


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the largest magnitude; of an output that is all zeros, the absolute difference."""
    return _largest(ours, theirs) / (theirs.abs().max().item() or 1.0)


def _worst(*differences: float) -> float:
    """The largest; not a number if any is not one, which `max` would drop."""
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _unequal(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    return float((ours != theirs).sum())
