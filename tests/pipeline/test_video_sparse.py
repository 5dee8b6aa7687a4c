"""A student that attends to video tiles: its requests are diffusers' transformer with that attention in float64."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file

from engines.build import build
from engines.store import EngineStore
from export.artifacts.fasth3_v2 import TRANSFORMER
from export.artifacts.read import open_artifact
from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import DenoiserConfig
from export.checkpoint.student import STUDENT, Base, Student, Whole
from export.miniature.artifacts import FOLDERS, write_artifacts
from h3trt.reference import ReferencePipeline
from plugins.schedule import Schedule
from runtime.denoiser import State
from runtime.events import Cancellation, Reporter, Units, ignore
from runtime.packing import Layout
from runtime.pipeline import Encoded, Pipeline
from tests.video_sparse import TileProcessor, kept_of, tiles_of

SMALLEST: dict[str, Any] = {"duration": 4, "aspect_ratio": "1:1", "width": 256, "height": 256, "seed": 7}
PROMPT = "A red fox runs over fresh snow"
GRID = 32, 8, 8
"""Latent frames, rows and columns of patches of that clip."""

CHECKED = 3
"""Steps that are compared, of eight; a request is compared whole below."""

POSITIONS = (0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125, 0.0)
SHIFTS = 10.0, 3.0
"""Of FastH3's 8-step model (spec/model.md 4.5)."""


@pytest.fixture(scope="module")
def student(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole student on the demonstration's checkpoint."""
    base = Checkpoint.open(EngineStore.open(store, to_run=False).manifest.checkpoint.root)
    folder = tmp_path_factory.mktemp("student")
    write_artifacts(folder / "artifacts", DenoiserConfig(**base.config("denoiser")), seed=3)
    released = folder / "artifacts" / FOLDERS["fasth3_v2"]
    record = Student(
        schema_version=1,
        base=Base(path=str(base.root), fingerprint=base.fingerprint, sample=base.sample),
        transformer=Whole(kind="whole", path=str(released / TRANSFORMER)),
        distilled=open_artifact(released, base).distilled,
    )
    (folder / STUDENT).write_text(record.model_dump_json())
    return folder


@pytest.fixture(scope="module")
def pipeline(store: Path, student: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The demonstration's store, brought up to date with the student."""
    directory = tmp_path_factory.mktemp("sparse") / "engines"
    shutil.copytree(store, directory)
    build(student, "cpu", directory)
    return Pipeline.open(directory, stages=("encode", "denoise"))


@pytest.fixture(scope="module")
def transformer(student: Path) -> MiniMaxH3Transformer3DModel:
    """The released student in diffusers' own class, which does not know its gates."""
    opened = Checkpoint.open(student)
    model = MiniMaxH3Transformer3DModel(**opened.config("denoiser"))
    for block in model.transformer_blocks:
        block.attn.to_gate_compress = torch.nn.Linear(model.config.hidden_size, block.attn.inner_dim, bias=False)
    folder = student / "artifacts" / FOLDERS["fasth3_v2"] / TRANSFORMER
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    model.load_state_dict({name: tensor.float() for file in files for name, tensor in file.items()})
    return model.eval().requires_grad_(False)


def states(pipeline: Pipeline, encoded: Encoded, taken: Any) -> Iterator[State]:
    resolved, denoiser = taken.resolved, pipeline._denoisers["fl2va"]
    sequence = denoiser.sequence(encoded.text, pipeline.layout(resolved, encoded.tags))
    schedule = Schedule.from_positions(POSITIONS, *SHIFTS)
    units = Units("denoise", len(POSITIONS) - 1, Reporter.silent(), Cancellation())
    yield from denoiser.sample(sequence, schedule, resolved.quality, *pipeline.start(resolved, encoded), units)


def expected(
    model: MiniMaxH3Transformer3DModel, layout: Layout, encoded: Encoded, start: State, tenths: int
) -> Iterator[State]:
    """The states of spec/model.md 4.2: x' = x + (sigma_n - sigma_n+1) v, the sigmas of both clocks from positions."""
    tiles, prefix = tiles_of(layout.token_tags[: layout.target_video.start].tolist(), GRID)
    for block in model.transformer_blocks:
        block.attn.processor = TileProcessor(tiles, prefix, kept_of(len(tiles) - prefix, tenths))
    video, audio = start.video, start.audio
    grids = [torch.tensor([s * u / (1 + (s - 1) * u) for u in POSITIONS], dtype=torch.float64) for s in SHIFTS]
    for step in range(len(POSITIONS) - 1):
        times = [1 - float(grid[step]) for grid in grids]
        velocity = model(
            video[None].float(),
            audio[None].float(),
            encoded.text[None].float(),
            torch.tensor([times[0], times[1], max(times[0], 0.999), 1.0]),
            layout.timestep_index,
            layout.token_tags,
            layout.position_ids,
            video_indices=layout.video_indices,
            audio_indices=layout.audio_indices,
            text_indices=layout.text_indices,
        )
        falls = [float(grid[step] - grid[step + 1]) for grid in grids]
        video = video + falls[0] * velocity.sample[0]
        audio = audio + falls[1] * velocity.audio_sample[0]
        yield State(video, audio)


@pytest.mark.slow
def test_steps_are_those_of_the_students_transformer(
    pipeline: Pipeline, transformer: MiniMaxH3Transformer3DModel
) -> None:
    assert (pipeline.manifest.attention, [tier.name for tier in pipeline.manifest.tiers]) == ("vsa", ["lossless"])
    taken = pipeline.take(PROMPT, SMALLEST)
    encoded = pipeline.encode(taken, ignore, Cancellation())
    layout = pipeline.layout(taken.resolved, encoded.tags)
    _, start = pipeline.start(taken.resolved, encoded)
    reference = expected(transformer, layout, encoded, start, tenths=8)
    ours = list(states(pipeline, encoded, taken))
    for found, exact in zip(ours[:CHECKED], islice(reference, CHECKED), strict=True):
        # float32 here; the reference's attention and steps are float64.
        assert (found.video - exact.video).abs().max() < 1e-4
        assert (found.audio - exact.audio).abs().max() < 1e-4
    (latents,) = pipeline.denoise(taken.resolved, encoded, ignore, Cancellation())
    assert torch.equal(latents[0], pipeline.latents(taken.resolved, ours[-1])[0]), "and so a request runs it"


def test_the_share_of_tiles_is_seen(pipeline: Pipeline, transformer: MiniMaxH3Transformer3DModel) -> None:
    """One step with other tiles left out is another by far more than the tolerance above."""
    taken = pipeline.take(PROMPT, SMALLEST)
    encoded = pipeline.encode(taken, ignore, Cancellation())
    layout, (_, start) = pipeline.layout(taken.resolved, encoded.tags), pipeline.start(taken.resolved, encoded)
    ours = next(states(pipeline, encoded, taken))
    other = next(expected(transformer, layout, encoded, start, tenths=5))
    assert (ours.video - other.video).abs().max() > 1e-3


@pytest.mark.slow
def test_a_request_is_that_of_diffusers_pipeline(pipeline: Pipeline, student: Path) -> None:
    """What `h3trt verify` compares with, from the prompt on; diffusers makes 5 s at least."""
    taken = pipeline.take(PROMPT, {**SMALLEST, "duration": 5})
    encoded = pipeline.encode(taken, ignore, Cancellation())
    (latents,) = pipeline.denoise(taken.resolved, encoded, ignore, Cancellation())
    reference = ReferencePipeline(Checkpoint.open(student)).run(taken.resolved, decode=False)
    assert (latents[0] - reference.video_latents).abs().max() < 1e-4
    assert (latents[1] - reference.audio_latents).abs().max() < 1e-4
