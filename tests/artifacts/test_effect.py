"""The miniature's artifacts change what the model says, by much and not beyond reason.

Fused by the formula, on the file's own tensors, and run by diffusers; nothing of this project computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from safetensors.torch import load_file

from export.miniature import ARTIFACTS, FOLDERS, write_miniature

FIELDS = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
FRAMES, SIDE, SOUND, TEXT = 7, 16, 37, 12
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def diffusers_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("effect") / "diffusers"
    write_miniature(directory, "diffusers", seed=0, artifacts=True)
    return directory


@pytest.fixture(scope="module")
def model(diffusers_root: Path) -> MiniMaxH3Transformer3DModel:
    return MiniMaxH3Transformer3DModel.from_pretrained(diffusers_root / "transformer").float().eval()


@torch.no_grad()
def velocity(model: MiniMaxH3Transformer3DModel, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the model says of one noisy clip with these weights, all rows of video and sound in one vector."""
    generator = torch.Generator().manual_seed(3)
    layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(TEXT, dtype=torch.long), FRAMES, SIDE, SIDE, SOUND, (1, 2, 2), 2, 2, 0
    )
    fields = dict(zip(FIELDS, layout[:5], strict=True))
    slots = torch.full_like(fields["token_tags"], 3)
    slots[fields["video_indices"]], slots[fields["audio_indices"]] = 0, 1
    video = torch.randn(1, FRAMES * SIDE * SIDE // 4, 96, generator=generator)
    sound = torch.randn(1, 2 * SOUND, 32, generator=generator)
    text = torch.randn(1, TEXT, model.config.text_dim, generator=generator)
    model.load_state_dict(dict(state))
    said = model(video, sound, text, torch.tensor([0.2, 0.4, 0.999, 1.0]), slots, return_dict=False, **fields)
    return torch.cat([part.flatten() for part in said[:2]])


def fused(base: State, file: Path, scale: float) -> State:
    """W + scale x B A + difference in float64. FlashGen's file is taken to diffusers' layout by diffusers."""
    tensors = load_file(file)
    if "flashgen" in file.name:
        plain = {key.removeprefix("transformer."): value for key, value in tensors.items()}
        converted = _convert_non_diffusers_minimax_h3_lora_to_diffusers(plain)
        tensors = {key.removeprefix("transformer."): value for key, value in converted.items()}
    tensors = {key.replace(".default.", "."): value.double() for key, value in tensors.items()}
    state = {key: value.double() for key, value in base.items()}
    for key, value in tensors.items():
        module, _, ending = key.rpartition(".")
        if key.endswith(".lora_A.weight"):
            module = key.removesuffix(".lora_A.weight")
            state[f"{module}.weight"] += scale * tensors[f"{module}.lora_B.weight"] @ value
        elif ending in ("diff", "diff_b"):
            state[f"{module}.{'bias' if ending == 'diff_b' else 'weight'}"] += value
    return {key: value.float() for key, value in state.items()}


@pytest.mark.parametrize(
    ("name", "scale"),
    [("fasth3_v1_dense", 1), ("turbo_4step", 1), ("turbo_8step", 8 / 128), ("turbo_ref2v", 8 / 128), ("flashgen", 1)],
)
def test_an_adapter_is_seen(name: str, scale: float, diffusers_root: Path, model: MiniMaxH3Transformer3DModel) -> None:
    source = diffusers_root / ARTIFACTS / FOLDERS[name]
    file = source if source.is_file() else source / "adapter_model.safetensors"
    folder = "transformer_ref" if "ref2v" in name else "transformer"
    base = MiniMaxH3Transformer3DModel.from_pretrained(diffusers_root / folder).float().state_dict()
    plain, changed = (velocity(model, state) for state in (base, fused(base, file, scale)))
    assert changed.isfinite().all()
    assert 0.1 < _rms(changed - plain) / _rms(plain) < 1.0
    assert 0.5 < _rms(changed) / _rms(plain) < 2.0


def test_the_whole_student_is_another_model(diffusers_root: Path, model: MiniMaxH3Transformer3DModel) -> None:
    base = load_file_tree(diffusers_root / "transformer")
    student = load_file_tree(diffusers_root / ARTIFACTS / FOLDERS["fasth3_v2"] / "transformer")
    gates = {key: value for key, value in student.items() if "to_gate_compress" in key}
    assert set(student) - set(gates) == set(base)
    plain = velocity(model, base)
    other = velocity(model, {key: value for key, value in student.items() if key not in gates})
    assert other.isfinite().all()
    assert 0.5 < _rms(other) / _rms(plain) < 2.0
    assert _rms(other - plain) / _rms(plain) > 0.5


def load_file_tree(folder: Path) -> State:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def _rms(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    """Of the artifacts too; another seed gives others."""
    roots = [tmp_path / name for name in ("one", "two", "three")]
    for root, seed in zip(roots, (1, 1, 2), strict=True):
        write_miniature(root, "diffusers", seed, artifacts=True)
    sums = [(root / "SHA256SUMS").read_text().splitlines() for root in roots]
    assert sums[0] == sums[1]
    weights = [{line for line in lines if "artifacts/" in line and line.endswith(".safetensors")} for lines in sums]
    assert len(weights[0]) == 8
    assert weights[0].isdisjoint(weights[2])
