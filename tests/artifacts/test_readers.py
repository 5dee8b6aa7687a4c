"""What is read of a good artifact: its schedule and the change of each parameter, next to other readers of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers
from safetensors.torch import load_file

from export.artifacts import Artifact, Base, LowRank, Patch, WholeStudent, open_artifact, read_artifact
from export.checkpoint import Checkpoint, materialise
from export.miniature import FOLDERS
from plugins.distilled import VideoSparse
from tests.artifacts.damage import Change, all_of, call, damaged, hush, put, say


def opened(artifacts: Path, name: str, checkpoint: Checkpoint) -> Artifact:
    artifact = open_artifact(artifacts / FOLDERS[name], checkpoint)
    assert isinstance(artifact, Artifact)
    return artifact


def product(low_rank: LowRank | None) -> torch.Tensor:
    assert low_rank is not None
    return low_rank.scale * materialise(low_rank.up).double() @ materialise(low_rank.down).double()


def test_a_fasth3_adapter_adds_products_and_differences(artifacts: Path, checkpoint: Checkpoint) -> None:
    """Every tensor of the file is in exactly one patch, under diffusers' name of the parameter."""
    artifact = opened(artifacts, "fasth3_v1_vsa", checkpoint)
    file = load_file(artifact.path)
    left = set(file)
    for name, patch in artifact.patches.items():
        module, _, kind = name.rpartition(".")
        if patch.low_rank is not None:
            down, up = file[f"{module}.lora_A.weight"], file[f"{module}.lora_B.weight"]
            assert torch.equal(product(patch.low_rank), up.double() @ down.double())
            left -= {f"{module}.lora_A.weight", f"{module}.lora_B.weight"}
        added = "diff_b" if kind == "bias" else "diff"
        for weight, ending in ((patch.difference, added), (patch.injected, "set_weight")):
            if weight is not None:
                assert torch.equal(materialise(weight), file[f"{module}.{ending}"])
                left.discard(f"{module}.{ending}")
    assert left == set()
    assert artifact.patches["norm_out.linear.weight"].difference is not None


def test_a_parameter_may_have_a_product_and_a_difference(
    artifacts: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    both = put("transformer_blocks.0.ff.net.2.diff", 192, 256)
    source = artifacts / FOLDERS["fasth3_v1_dense"] / "adapter_model.safetensors"
    artifact = open_artifact(damaged(source, tmp_path, both), checkpoint)
    assert isinstance(artifact, Artifact)
    patch = artifact.patches["transformer_blocks.0.ff.net.2.weight"]
    assert patch.low_rank is not None
    assert patch.difference is not None


@pytest.mark.parametrize(
    ("name", "called", "gates"),
    [
        ("fasth3_v1_dense", "fasth3-4-step-preview-v1-dense-datafree", 0),
        ("fasth3_v1_vsa", "fasth3-4-step-preview-v1-vsa-datafree", 2),
    ],
)
def test_fasth3_pins_four_forwards(name: str, called: str, gates: int, artifacts: Path, checkpoint: Checkpoint) -> None:
    artifact = opened(artifacts, name, checkpoint)
    distilled, schedule = artifact.distilled, artifact.distilled.schedule
    assert (distilled.name, distilled.family, distilled.tasks) == (called, "fasth3_v1", ("t2va",))
    assert (schedule.forwards, schedule.positions) == (4, (0.999, 0.749, 0.5, 0.25, 0.0))
    assert (schedule.video_shift, schedule.audio_shift) == (12.0, 3.0)
    assert distilled.video_sparse == (VideoSparse(tile=64, sparsity=0.9) if gates else None)
    assert sum(patch.injected is not None for patch in artifact.patches.values()) == gates


def test_a_flashgen_adapter_is_what_diffusers_makes_of_it(artifacts: Path, checkpoint: Checkpoint) -> None:
    """Its converter undoes the interleaving of heads and the order of halves; of AdaLN there is nothing to undo."""
    artifact = opened(artifacts, "flashgen", checkpoint)
    state = {key.removeprefix("transformer."): value for key, value in load_file(artifact.path).items()}
    converted = _convert_non_diffusers_minimax_h3_lora_to_diffusers(state)
    modules = {key.removeprefix("transformer.").split(".lora_")[0] for key in converted}
    assert set(artifact.patches) == {f"{module}.weight" for module in modules}
    for name, patch in artifact.patches.items():
        module = f"transformer.{name.removesuffix('.weight')}"
        theirs = converted[f"{module}.lora_B.weight"].double() @ converted[f"{module}.lora_A.weight"].double()
        assert torch.equal(product(patch.low_rank), theirs), name


def test_flashgen_pins_the_schedule_of_its_file(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = say("base_schedule", " 0.9, 0.6,0.3 ,1e-1,0")
    artifact = open_artifact(damaged(artifacts / FOLDERS["flashgen"], tmp_path, other), checkpoint)
    assert artifact.distilled.schedule.positions == (0.9, 0.6, 0.3, 0.1, 0.0)
    schedule = opened(artifacts, "flashgen", checkpoint).distilled.schedule
    assert schedule.positions == (1.0, 0.7, 0.4, 0.15, 0.0)
    assert (schedule.forwards, schedule.video_shift, schedule.audio_shift) == (4, 12.0, 3.0)


@pytest.mark.parametrize(("name", "alpha"), [("turbo_4step", 128), ("turbo_8step", 8), ("turbo_ref2v", 8)])
def test_a_turbo_adapter_is_scaled_by_its_alpha(
    name: str, alpha: float, artifacts: Path, checkpoint: Checkpoint
) -> None:
    artifact = opened(artifacts, name, checkpoint)
    file = load_file(artifact.path)
    assert len(file) == 2 * len(artifact.patches)
    for parameter, patch in artifact.patches.items():
        module = parameter.removesuffix(".weight")
        down, up = file[f"{module}.lora_A.default.weight"], file[f"{module}.lora_B.default.weight"]
        scaled = alpha / 128 * (up.double() @ down.double())
        torch.testing.assert_close(product(patch.low_rank), scaled, rtol=1e-12, atol=0)


PUBLISHED: dict[str, tuple[str, int, float, float, tuple[str, ...]]] = {
    "minimax_h3_fl2v_turbo_4step_v1.0_768p": ("128", 4, 6.0, 1.0, ("t2va", "fl2va")),
    "minimax_h3_fl2v_turbo_4step_v1.1_768p": ("128", 4, 6.0, 1.0, ("t2va", "fl2va")),
    "minimax_h3_fl2v_turbo_4step_v1.2_768p": ("8", 4, 6.0, 0.0625, ("t2va", "fl2va")),
    "minimax_h3_fl2v_turbo_8step_v1.0": ("8", 8, 12.0, 0.0625, ("t2va", "fl2va")),
    "minimax_h3_fl2v_turbo_8step_v1.0_768p": ("8", 8, 6.0, 0.0625, ("t2va", "fl2va")),
    "minimax_h3_ref2v_turbo_4step_v0.1": ("8", 4, 12.0, 0.0625, ("ref2va",)),
    "minimax_h3_ref2v_turbo_8step_v1.0_768p": ("8", 8, 6.0, 0.0625, ("ref2va",)),
    "minimax_h3_fl2v_turbo_4step_v9.9_768p": ("16", 4, 6.0, 0.125, ("t2va", "fl2va")),
}
"""Name -> alpha in its metadata, forwards, shift of video, scale, tasks (spec/contract.md 5); the last is invented."""


@pytest.mark.parametrize("ending", ["", "_bf16"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_name_of_a_turbo_file_tells_what_requests_are_bound_to(
    name: str, ending: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    alpha, forwards, shift, scale, tasks = PUBLISHED[name]
    _check(artifacts, checkpoint, tmp_path, all_of(call(f"{name}{ending}.safetensors"), say("alpha", alpha)), scale)
    distilled = open_artifact(tmp_path / f"{name}{ending}.safetensors", checkpoint).distilled
    assert (distilled.name, distilled.tasks) == (name.removeprefix("minimax_h3_"), tasks)
    schedule = distilled.schedule
    assert (schedule.forwards, schedule.positions) == (forwards, None)
    assert (schedule.video_shift, schedule.audio_shift) == (shift, 3.0)


def test_the_one_turbo_file_without_alpha_is_known(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    change = all_of(hush("alpha"), call("minimax_h3_fl2v_turbo_4step_v0.1.safetensors"))
    _check(artifacts, checkpoint, tmp_path, change, 8 / 128)


def _check(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, change: Change, scale: float) -> None:
    artifact = open_artifact(damaged(artifacts / FOLDERS["turbo_4step"], tmp_path, change), checkpoint)
    assert isinstance(artifact, Artifact)
    assert {patch.low_rank.scale for patch in artifact.patches.values() if patch.low_rank} == {scale}


def test_fasth3_v2_brings_its_transformer(artifacts: Path, checkpoint: Checkpoint) -> None:
    student = open_artifact(artifacts / FOLDERS["fasth3_v2"], checkpoint)
    assert isinstance(student, WholeStudent)
    distilled, schedule = student.distilled, student.distilled.schedule
    assert (distilled.name, distilled.family, distilled.tasks) == ("fasth3-8-step-v2", "fasth3_v2", ("t2va",))
    assert schedule.positions == (0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125, 0.0)
    assert (schedule.forwards, schedule.video_shift, schedule.audio_shift) == (8, 10.0, 3.0)
    assert distilled.video_sparse == VideoSparse(tile=64, sparsity=0.8)
    assert student.revision == "0" * 40
    # The class in diffusers has no gates, and everything else.
    theirs = set(MiniMaxH3Transformer3DModel(**student.config.model_dump()).state_dict())
    gates = {f"transformer_blocks.{layer}.attn.to_gate_compress.weight" for layer in range(2)}
    assert set(student.files.tensors) == theirs | gates


def test_reading_needs_no_data(artifacts: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "frombuffer", None)
    for name, folder in FOLDERS.items():
        if name != "fasth3_v1":
            read_artifact(artifacts / folder, Base.of(checkpoint))


def test_patches_are_of_the_parameters_of_diffusers(artifacts: Path, checkpoint: Checkpoint) -> None:
    model = MiniMaxH3Transformer3DModel(**checkpoint.config("denoiser"))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in ("fasth3_v1_dense", "turbo_4step", "flashgen"):
        for parameter, patch in opened(artifacts, name, checkpoint).patches.items():
            assert _shape(patch) == shapes[parameter]


def _shape(patch: Patch) -> tuple[int, ...]:
    if patch.low_rank is not None:
        return tuple(product(patch.low_rank).shape)
    assert patch.difference is not None
    return patch.difference.shape
