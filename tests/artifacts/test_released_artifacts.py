"""Artifacts of the released dimensions, in sparse files: the published counts, ranks and sizes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from export.artifacts import Artifact, WholeStudent, read_artifact
from export.artifacts.summary import summarise
from export.checkpoint import CheckpointError
from export.checkpoint.components.denoiser import DenoiserConfig
from export.miniature import FOLDERS, write_artifacts

DENSE_BYTES = 1_485_626_152
"""The published file of FastH3 v1, dense (spec/contract.md 5)."""

FLASHGEN_BYTES = 1_258_539_599
"""The published file of FlashGen."""

HEADER_BYTES = 2_000
"""By how much two headers may differ: metadata are free text."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("released")
    write_artifacts(directory, DenoiserConfig(), seed=None)
    return directory


def adapter(released: Path, name: str) -> Artifact:
    artifact = read_artifact(released / FOLDERS[name])
    assert isinstance(artifact, Artifact)
    return artifact


def test_fasth3_dense_is_362_pairs_and_85_differences(released: Path) -> None:
    artifact = adapter(released, "fasth3_v1_dense")
    pairs = [patch.low_rank for patch in artifact.patches.values() if patch.low_rank is not None]
    assert len(pairs) == 362 == 50 * 7 + 2 * 6
    assert {(pair.down.shape[0], pair.scale) for pair in pairs} == {(64, 1.0)}
    assert sum(patch.difference is not None for patch in artifact.patches.values()) == 85
    declared = {key: artifact.metadata[f"{key}_tensors"] for key in ("low_rank", "diff", "set_weight")}
    assert declared == {"low_rank": "724", "diff": "85", "set_weight": "0"}


@pytest.mark.parametrize(("name", "published"), [("fasth3_v1_dense", DENSE_BYTES), ("flashgen", FLASHGEN_BYTES)])
def test_a_file_is_of_the_published_size(name: str, published: int, released: Path) -> None:
    """So the tensors that FastH3's 85 differences are of, which no document lists, are at least of the right sizes."""
    assert abs(adapter(released, name).path.stat().st_size - published) < HEADER_BYTES


def test_fasth3_patches_343_native_parameters(released: Path) -> None:
    fused = {"attn.to_q": "qkv", "attn.to_k": "qkv", "attn.to_v": "qkv"}
    native = set()
    for name in adapter(released, "fasth3_v1_dense").patches:
        for part, whole in fused.items():
            name = name.replace(part, whole)
        native.add(name)
    assert len(native) == 343


def test_fasth3_for_sparse_attention_adds_a_gate_to_each_block(released: Path) -> None:
    patches = adapter(released, "fasth3_v1_vsa").patches
    gates = {name: patch.injected for name, patch in patches.items() if patch.injected is not None}
    assert set(gates) == {f"transformer_blocks.{n}.attn.to_gate_compress.weight" for n in range(50)}
    assert {gate.shape for gate in gates.values()} == {(7168, 5376)}


@pytest.mark.parametrize(("name", "scale"), [("turbo_4step", 1.0), ("turbo_8step", 0.0625), ("turbo_ref2v", 0.0625)])
def test_turbo_is_312_pairs_of_rank_128(name: str, scale: float, released: Path) -> None:
    pairs = [patch.low_rank for patch in adapter(released, name).patches.values()]
    assert len(pairs) == 312 == 52 * 6
    assert {(pair.down.shape[0], pair.scale) for pair in pairs if pair is not None} == {(128, scale)}


def test_flashgen_is_259_pairs_of_rank_64(released: Path) -> None:
    artifact = adapter(released, "flashgen")
    pairs = [patch.low_rank for patch in artifact.patches.values()]
    assert len({id(leaf) for pair in pairs if pair is not None for leaf in pair.up.leaves()}) == 259 == 250 + 8 + 1
    assert {(pair.down.shape[0], pair.scale) for pair in pairs if pair is not None} == {(64, 1.0)}
    shapes = Counter(pair.up.shape[0] for pair in pairs if pair is not None)
    assert shapes == {7168: 156, 5376: 104, 28672: 52, 96768: 50, 10752: 1}


def test_fasth3_v2_is_the_release_and_50_gates(released: Path) -> None:
    student = read_artifact(released / FOLDERS["fasth3_v2"])
    assert isinstance(student, WholeStudent)
    assert len(student.files.tensors) == 638 + 50
    assert summarise(student).nbytes == 66_280_430_080 + 50 * 7168 * 5376 * 2


@pytest.mark.parametrize("name", sorted(set(FOLDERS) - {"fasth3_v1"}))
def test_a_shallower_model_is_told_by_its_size(name: str, tmp_path: Path) -> None:
    write_artifacts(tmp_path, DenoiserConfig(num_layers=49), seed=None)
    with pytest.raises(CheckpointError, match=r"49|none of this one|each of (312|259) modules"):
        read_artifact(tmp_path / FOLDERS[name])


def test_files_without_data_take_no_room(released: Path) -> None:
    assert sum(file.stat().st_blocks * 512 for file in released.rglob("*")) < 5_000_000
