"""Few-step artifacts as vllm-omni reads and fuses them, and as they are read here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from export.artifacts import RELEASED, Artifact, Patch, WholeStudent, open_artifact, read_artifact, turbo
from export.artifacts.fasth3_v2 import REQUIRED
from export.checkpoint import Checkpoint, materialise
from export.checkpoint.components import denoiser
from export.checkpoint.components.denoiser import DenoiserConfig
from export.checkpoint.recipes import to_native
from export.miniature import ARTIFACTS, FOLDERS, write_artifacts, write_miniature
from tests.artifacts.damage import all_of, call, damaged, say


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("peers") / "native"
    write_miniature(directory, "native", seed=9, artifacts=True)
    return directory


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("released")
    write_artifacts(directory, DenoiserConfig(), seed=None)
    return directory


def fused(patch: Patch, weight: torch.Tensor) -> torch.Tensor:
    """As the formula says: float32, and one cast."""
    value = weight.float()
    if patch.low_rank is not None:
        value = value + materialise(patch.low_rank.up).float() @ materialise(patch.low_rank.down).float()
    if patch.difference is not None:
        value = value + materialise(patch.difference).float()
    return value.to(weight.dtype)


@pytest.mark.parametrize("name", ["fasth3_v1_dense", "fasth3_v1_vsa"])
def test_fasth3_changes_the_weights_that_it_changes_there(name: str, root: Path, theirs: SimpleNamespace) -> None:
    checkpoint = Checkpoint.open(root)
    sizes = checkpoint.dimensions.denoiser
    fusion = theirs.fasth3.FastH3WeightFusion.from_path(
        root / ARTIFACTS / FOLDERS[name],
        head_dim=sizes.head_dim,
        num_blocks=sizes.layers,
        num_refiner_blocks=sizes.refiner_layers,
    )
    fusion._device = torch.device("cpu")
    stored = {key: materialise(tensor) for key, tensor in checkpoint.stored("denoiser").items()}
    expected = dict(fusion.apply(stored.items()))
    fusion.validate_fully_applied()
    artifact = open_artifact(root / ARTIFACTS / FOLDERS[name], checkpoint)
    assert isinstance(artifact, Artifact)
    assert fusion.requires_vsa == (artifact.distilled.video_sparse is not None)
    assert fusion.base_schedule == artifact.distilled.schedule.positions
    for key, value in _native(checkpoint, artifact).items():
        # A product of another order of additions may round to the next bfloat16.
        torch.testing.assert_close(value, expected[key], rtol=2**-7, atol=2**-9, msg=key)
        assert (value == expected[key]).double().mean() > 0.99, key


def _native(checkpoint: Checkpoint, artifact: Artifact) -> dict[str, torch.Tensor]:
    """All parameters, changed, under native names."""
    config = DenoiserConfig.model_validate(checkpoint.config("denoiser"))
    values = {}
    for parameter, weight in checkpoint.parameters("denoiser").items():
        patch = artifact.patches.get(parameter)
        values[parameter] = materialise(weight) if patch is None else fused(patch, materialise(weight))
    injected = {name: patch.injected for name, patch in artifact.patches.items() if patch.injected is not None}
    gates = {name: materialise(weight) for name, weight in injected.items()}
    recipes = denoiser.recipes(config, gates=bool(gates))
    return to_native(values | gates, recipes)


@pytest.mark.parametrize("ending", ["", "_bf16"])
@pytest.mark.parametrize("name", sorted(turbo.RELEASED_ALPHA))
def test_turbo_is_bound_to_the_schedule_that_it_is_bound_to_there(
    name: str, ending: str, released: Path, tmp_path: Path, theirs: SimpleNamespace
) -> None:
    spec = theirs.lora.parse_turbo_filename(f"minimax_h3_{name}{ending}.safetensors")
    file = _turbo(released, tmp_path, name, ending)
    artifact = read_artifact(file)
    assert isinstance(artifact, Artifact)
    schedule = artifact.distilled.schedule
    assert (schedule.forwards, schedule.video_shift, schedule.audio_shift) == (
        spec.denoise_steps,
        spec.video_shift,
        spec.audio_shift,
    )
    assert set(artifact.distilled.tasks) == spec.supported_tasks
    assert spec.rank == turbo.RANK
    assert turbo.RELEASED_ALPHA[turbo.WITHOUT_ALPHA] == spec.alpha


def _turbo(released: Path, tmp_path: Path, name: str, ending: str) -> Path:
    alpha = f"{turbo.RELEASED_ALPHA[name]:g}"
    change = all_of(call(f"minimax_h3_{name}{ending}.safetensors"), say("alpha", alpha))
    return damaged(released / FOLDERS["turbo_8step"], tmp_path, change)


def test_turbo_and_flashgen_change_what_they_change_there(theirs: SimpleNamespace) -> None:
    assert set(RELEASED.block_linears) == theirs.lora._TURBO_EXPECTED_RAW_TARGETS
    recipes = denoiser.recipes(RELEASED.config)
    modules = (*RELEASED.block_linears, *RELEASED.adaln_linears)
    native = {recipes[f"{module}.weight"].key.removesuffix(".weight") for module in modules}
    assert native == theirs.npu_lora._NATIVE_EXPECTED_TARGETS
    for module in RELEASED.block_linears:
        outputs, inputs = RELEASED.parameters[f"{module}.weight"].shape or ()
        suffix = next(one for one in theirs.lora._TURBO_TARGET_DIMS if module.endswith(one))
        assert (inputs, outputs) == theirs.lora._TURBO_TARGET_DIMS[suffix]


def test_flashgen_is_called_and_described_as_there(released: Path, theirs: SimpleNamespace) -> None:
    artifact = read_artifact(released / FOLDERS["flashgen"])
    assert artifact.path.name == theirs.npu_lora._NATIVE_FILENAME
    assert isinstance(artifact, Artifact)
    assert artifact.metadata["qkv_layout"] == theirs.npu_lora._NATIVE_QKV_LAYOUT
    assert artifact.metadata["key_format"] == theirs.npu_lora._NATIVE_KEY_FORMAT
    assert artifact.distilled.schedule.forwards == theirs.npu_lora.MINIMAX_H3_NATIVE_INFERENCE_STEPS


def test_fasth3_v2_has_the_contract_that_it_has_there(root: Path, theirs: SimpleNamespace) -> None:
    """Each accepts the miniature's, and refuses it with any one field changed."""
    folder = root / ARTIFACTS / FOLDERS["fasth3_v2"]
    contract = json.loads((folder / "fastvideo_inference.json").read_text())
    spec = theirs.fasth3_checkpoint.FastH3CheckpointSpec.from_metadata(contract)
    student = open_artifact(folder, Checkpoint.open(root))
    assert isinstance(student, WholeStudent)
    schedule, sparse = student.distilled.schedule, student.distilled.video_sparse
    assert theirs.fasth3_checkpoint.FASTH3_V2_BASE_SCHEDULE.base_schedule == schedule.positions
    said = spec.release_metadata()
    assert said["tasks"] == list(student.distilled.tasks)
    assert said["sigma_shift_scales"] == {"video": schedule.video_shift, "audio": schedule.audio_shift}
    assert sparse is not None
    assert spec.vsa_sparsity == sparse.sparsity
    for key in REQUIRED:
        with pytest.raises(ValueError, match=key):
            theirs.fasth3_checkpoint.FastH3CheckpointSpec.from_metadata({**contract, key: "other"})
