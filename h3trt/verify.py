"""`h3trt verify`: built engines against torch eager, and the whole pipeline against diffusers, on one checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
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
from h3trt.reference import Reference, ReferencePipeline
from runtime.decode import decode_video
from runtime.events import Cancellation, Reporter
from runtime.packing import Layout, patchify_video, unpack_audio, unpatchify_video
from runtime.pipeline import Pipeline
from runtime.request import Resolved

PROMPT = "A red fox trots through fresh snow <d>Listen.</d> while the wind rises"
SECONDS = 5
SIDE = 256
"""The smallest canvas, and the shortest clip that diffusers accepts (124 frames)."""

LATENT_LIMIT = 1e-4
"""Largest |difference| of final latents, whose scale is about 1: float32 sums in another order, through all blocks."""

STEP_LIMIT = LATENT_LIMIT
"""The same for the state after each step: errors do not shrink along the trajectory."""

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
    """All checks of one checkpoint, engine store and request."""

    checkpoint: str
    store: str
    request: Resolved
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks over their limit."""
        return tuple(check for check in self.checks if not check.passed)

    def to_json(self) -> str:
        """The checks, each with `passed`, and what they were made on."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        fields = {"checkpoint": self.checkpoint, "store": self.store, "request": self.request.model_dump()}
        return json.dumps({**fields, "passed": not self.failed, "checks": checks}, indent=2)


def verify(store: Path, forwards: int, seed: int, progress: Callable[[Check], None]) -> Verification:
    """Compares the engines of `store` with eager torch and with diffusers on the checkpoint that they are bound to.

    `progress` receives each check as it is made. Raises StoreError, CheckpointError.
    """
    pipeline = Pipeline.open(store)
    checkpoint = Checkpoint.open(pipeline.manifest.checkpoint.root)
    shape = {"duration": SECONDS, "aspect_ratio": "1:1", "width": SIDE, "height": SIDE}
    request = pipeline.resolve(PROMPT, {**shape, "num_inference_steps": forwards, "seed": seed})
    checks = []
    for check in _all_checks(pipeline, EngineSet.open(store), checkpoint, request):
        progress(check)
        checks.append(check)
    return Verification(str(checkpoint.root), str(store), request, tuple(checks))


def _all_checks(pipeline: Pipeline, engines: EngineSet, checkpoint: Checkpoint, request: Resolved) -> Iterator[Check]:
    yield from engine_checks(engines, checkpoint)
    yield from pipeline_checks(pipeline, checkpoint, request)


def engine_checks(engines: EngineSet, checkpoint: Checkpoint) -> Iterator[Check]:
    """Each engine as it was built, its first and last instance, at the graph's trial sizes, against eager torch.

    What a partition shares with the one before it is checked once.
    """
    profile = engines.manifest.profile
    for partition in profile.partitions:
        for graph in profile_graphs(checkpoint, profile, partition, engines.root / WEIGHTS):
            if _is_repeated(engines.manifest, graph.name, partition):
                continue
            for instance in sorted({0, len(graph.weights) - 1}):
                worst = _worst(*_engine_differences(engines, graph, instance, partition))
                yield Check("engine", f"{partition} {graph.name}[{instance}]", worst, graph.tolerance)


def _is_repeated(manifest: Manifest, graph: str, partition: Partition) -> bool:
    """Whether the first partition's engine is the same one, reading the same bytes of the same files."""
    first = manifest.profile.partitions[0]
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


def pipeline_checks(pipeline: Pipeline, checkpoint: Checkpoint, request: Resolved) -> Iterator[Check]:
    """The request through the engines and through diffusers' modular pipeline, quantity by quantity."""
    reference = ReferencePipeline(checkpoint).run(request)
    quiet, never = Reporter(lambda event: None, lambda: 0.0), Cancellation()
    text = pipeline.encode(pipeline.tokenize(request), lambda event: None, never)
    yield from _layout_checks(pipeline.layout(request, len(text)), reference)
    yield from _noise_checks(pipeline, request, reference)
    yield Check("pipeline", "prompt embeddings, relative", _relative(text, reference.text), 1e-5)
    states = list(pipeline.trajectory(request, text, quiet, never))
    for step, (state, expected) in enumerate(zip(states[1:], reference.steps, strict=True)):
        worst = _worst(_largest(state.video, expected.video), _largest(state.audio, expected.audio))
        yield Check("pipeline", f"latents after step {step + 1}", worst, STEP_LIMIT)
    patch = pipeline.manifest.dimensions.denoiser.patch
    video = unpatchify_video(
        states[-1].video, request.latent_frames, request.latent_height, request.latent_width, patch
    )
    audio = unpack_audio(states[-1].audio, request.audio_latents)
    yield Check("pipeline", "final video latents", _largest(video, reference.video_latents), LATENT_LIMIT)
    yield Check("pipeline", "final audio latents", _largest(audio, reference.audio_latents), LATENT_LIMIT)
    yield from _media_checks(pipeline, video, audio, reference)


def _layout_checks(layout: Layout, reference: Reference) -> Iterator[Check]:
    """Bit equality: the measured number is how many elements differ."""
    for name in ("token_tags", "position_ids", "text_indices", "audio_indices", "video_indices"):
        ours, theirs = getattr(layout, name), getattr(reference, name)
        yield Check("layout", f"{name}, unequal elements", _unequal(ours, theirs), 0)


def _noise_checks(pipeline: Pipeline, request: Resolved, reference: Reference) -> Iterator[Check]:
    noise = pipeline.noise(request)
    rows = patchify_video(noise.video, pipeline.manifest.dimensions.denoiser.patch)
    yield Check("noise", "video rows, unequal elements", _unequal(rows, reference.noise.video), 0)
    yield Check("noise", "audio rows, unequal elements", _unequal(noise.audio_rows, reference.noise.audio), 0)


def _media_checks(
    pipeline: Pipeline, video: torch.Tensor, audio: torch.Tensor, reference: Reference
) -> Iterator[Check]:
    vae, quiet = pipeline.manifest.dimensions.video_vae, Reporter(lambda event: None, lambda: 0.0)
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
