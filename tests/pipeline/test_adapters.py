"""Requests that choose adapters, one after another, and beside diffusers' pipeline over weights of the formula."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.build import build
from engines.profile import PROFILES
from engines.store import EngineStore
from export.artifacts.artifact import Artifact
from export.artifacts.read import open_artifact
from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import DenoiserConfig
from export.miniature.artifacts import FOLDERS, write_artifacts
from h3trt.reference import ReferencePipeline
from runtime.events import Cancellation
from runtime.intake import Taken
from runtime.pipeline import Latents, Pipeline
from tests.conftest import report_figure

SMALLEST: dict[str, Any] = {"duration": 5, "aspect_ratio": "1:1", "width": 256, "height": 256, "seed": 7}
TURBO, FLASHGEN, REF2V = ("turbo_4step", "flashgen", "turbo_ref2v")
MODES = ("low_rank", "merged")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def checkpoint(store: Path) -> Checkpoint:
    return Checkpoint.open(EngineStore.open(store).manifest.checkpoint.root)


@pytest.fixture(scope="module")
def artifacts(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("artifacts")
    write_artifacts(folder, DenoiserConfig.model_validate(checkpoint.config("denoiser")), seed=3)
    found = {name: open_artifact(folder / FOLDERS[name], checkpoint) for name in (TURBO, FLASHGEN, REF2V)}
    return {name: artifact for name, artifact in found.items() if isinstance(artifact, Artifact)}


@pytest.fixture(scope="module")
def offering(
    store: Path, checkpoint: Checkpoint, artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pipeline]:
    """The demonstration's store with adapters in each mode."""
    made = {}
    for mode in MODES:
        root = tmp_path_factory.mktemp(mode)
        text = (PROFILES / "cpu.toml").read_text().partition("[quality")[0]
        (root / "cpu.toml").write_text(f'{text}\n[adapters]\nmode = "{mode}"\n')
        shutil.copytree(store, root / "engines")
        report = build(checkpoint.root, root / "cpu.toml", root / "engines", adapters=list(artifacts.values()))
        # What is not an adapter's is taken from the store as it was.
        assert not [n for n in report.built if n.endswith((".emit", ".compare")) and "low_rank" not in n]
        made[mode] = Pipeline.open(report.store, stages=("encode", "denoise"))
    return made


def take(pipeline: Pipeline, name: str | None = None, **params: Any) -> Taken:
    chosen = {} if name is None else {"lora": {"name": name}}
    return pipeline.take("A red fox runs over fresh snow", {**SMALLEST, **chosen, **params})


def ours(pipeline: Pipeline, taken: Taken) -> Latents:
    encoded = pipeline.encode(taken, lambda event: None, Cancellation())
    (found,) = pipeline.denoise(taken.resolved, encoded, lambda event: None, Cancellation())
    return found


def merged(checkpoint: Checkpoint, taken: Taken, artifact: Artifact) -> Latents:
    """diffusers over the weights that fusing makes, which tests/artifacts compares with the formula in float64."""
    found = ReferencePipeline(checkpoint, artifact).run(taken.resolved, decode=False)
    return found.video_latents, found.audio_latents.unsqueeze(0)


def beside(checkpoint: Checkpoint, taken: Taken, artifact: Artifact) -> Latents:
    """diffusers over W + alpha / rank B A as a side of its own computes it: not rounded, but for AdaLN's."""
    reference = ReferencePipeline(checkpoint, artifact)
    base = dict(ReferencePipeline(checkpoint)._fl2va.named_parameters())
    change = changes(artifact, checkpoint.dimensions.denoiser.heads)
    for name, parameter in reference._fl2va.named_parameters():
        if name in change and "adaln" not in name and "norm_out" not in name:
            parameter.data = base[name].data + change[name]
    found = reference.run(taken.resolved, decode=False)
    return found.video_latents, found.audio_latents.unsqueeze(0)


def changes(artifact: Artifact, heads: int) -> Mapping[str, torch.Tensor]:
    """What the file adds to each diffusers parameter (spec/model.md 8.4 and 8.5), read by another library."""
    tensors = {key: tensor.float() for key, tensor in load_file(artifact.path).items()}
    found: dict[str, torch.Tensor] = {}
    for key in [key for key in tensors if ".lora_A." in key]:
        down, up = tensors[key], tensors[key.replace(".lora_A.", ".lora_B.")]
        alpha = float(artifact.metadata.get("alpha") or artifact.metadata["lora_alpha"])
        module = key.removesuffix(".lora_A.default.weight").removeprefix("transformer.")
        change = alpha / down.shape[0] * (up @ down)
        if artifact.distilled.family == "flashgen":
            found |= diffusers_names(module, change, heads)
        else:
            found[f"{module}.weight"] = change
    return found


def diffusers_names(module: str, change: torch.Tensor, heads: int) -> dict[str, torch.Tensor]:
    """A change of a native tensor as changes of diffusers' (spec/model.md 1c)."""
    for native, name in (
        ("token_refiner.blocks.", "token_refiner.refiner_blocks."),
        ("blocks.", "transformer_blocks."),
    ):
        if module.startswith(native):
            module = name + module.removeprefix(native)
            break
    prefix, _, last = module.rpartition(".")
    if last == "qkv_proj":
        parts = change.view(heads, 3, -1, change.shape[1])
        return {f"{prefix}.to_{x}.weight": parts[:, i].flatten(0, 1) for i, x in enumerate("qkv")}
    if last == "fc1":
        gate, up = change.chunk(2)
        return {f"{prefix.removesuffix('.mlp')}.ff.net.0.proj.weight": torch.cat([up, gate])}
    renamed = {
        "attn.out_proj": "attn.to_out.0",
        "mlp.fc2": "ff.net.2",
        "final_layer.adaln_proj.linear": "norm_out.linear",
    }
    for native, name in renamed.items():
        if module.endswith(native):
            module = module.removesuffix(native) + name
    return {f"{module}.weight": change}


def distance(one: Latents, other: Latents) -> float:
    """The larger of both streams' relative errors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", [TURBO, FLASHGEN])
def test_a_request_with_an_adapter_is_that_of_changed_weights_in_diffusers(
    offering: dict[str, Pipeline],
    checkpoint: Checkpoint,
    artifacts: dict[str, Artifact],
    mode: str,
    which: str,
    request: pytest.FixtureRequest,
) -> None:
    pipeline, artifact = offering[mode], artifacts[which]
    taken = take(pipeline, artifact.distilled.name)
    assert (taken.resolved.adapter, taken.resolved.forwards) == (artifact.distilled.name, 4)
    found = ours(pipeline, taken)
    theirs = (beside if mode == "low_rank" else merged)(checkpoint, taken, artifact)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, theirs, strict=True))
    report_figure(request.config, f"{which}, {mode}: latents within {worst:.1e} of diffusers'")
    assert worst < 1e-4  # the limit of `h3trt verify`, for latents of scale 1
    assert distance(found, ours(pipeline, take(pipeline, num_inference_steps=4))) > 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_one_after_another_each_request_is_what_it_is_alone(
    offering: dict[str, Pipeline], store: Path, artifacts: dict[str, Artifact], mode: str
) -> None:
    pipeline = offering[mode]
    first, second = (artifacts[name].distilled.name for name in (TURBO, FLASHGEN))
    alone = ours(Pipeline.open(store, stages=("encode", "denoise")), take(pipeline, num_inference_steps=2))
    found = [ours(pipeline, take(pipeline, name)) for name in (first, second, first)]
    found.append(ours(pipeline, take(pipeline, num_inference_steps=2)))
    for one, other in ((found[0], found[2]), (found[3], alone)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert distance(found[0], found[1]) > 1e-2


def test_only_what_changes_adaln_has_tables_of_its_own(
    offering: dict[str, Pipeline], artifacts: dict[str, Artifact]
) -> None:
    for pipeline in offering.values():
        assert pipeline.manifest.tables.keys() == {f"fl2va+{artifacts[FLASHGEN].distilled.name}"}
        changed = {name for name, record in pipeline.manifest.adapters.items() if record.modulates}
        assert changed == {artifacts[FLASHGEN].distilled.name}
