"""Fused tensors are those of the formula, in either layout; each of the base is read once, and files appear whole."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers
from safetensors.torch import load_file

from export.artifacts import Artifact, LowRank, Patch, open_artifact, partition_of
from export.artifacts.fusion import Fusion, FusionError, plan_fusion
from export.artifacts.patched import patched_parameters
from export.checkpoint import Checkpoint, CheckpointError, materialise
from export.checkpoint.expressions import Stored
from export.checkpoint.materialise import map_stored
from export.checkpoint.recipes import Projection, QKVLayout, Recipe, Swapped, Whole, expression, runs
from export.checkpoint.safetensors_file import Declared, read_header, write_sparse, write_tensors
from export.checkpoint.tree import LayoutName
from export.miniature import FOLDERS, write_miniature
from plugins.distilled import Distilled, PinnedSchedule

State = dict[str, torch.Tensor]

SCALES = {"fasth3_v1_dense": 1.0, "fasth3_v1_vsa": 1.0, "turbo_4step": 1.0, "turbo_8step": 8 / 128, "flashgen": 1.0}
LAYOUTS: tuple[LayoutName, ...] = ("native", "diffusers")


@pytest.fixture(scope="module")
def checkpoints(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Checkpoint]:
    diffusers = tmp_path_factory.mktemp("fusion") / "diffusers"
    write_miniature(diffusers, "diffusers", seed=5)
    return {"native": Checkpoint.open(root), "diffusers": Checkpoint.open(diffusers)}


def adapter(artifacts: Path, name: str, checkpoint: Checkpoint) -> Artifact:
    artifact = open_artifact(artifacts / FOLDERS[name], checkpoint)
    assert isinstance(artifact, Artifact)
    return artifact


def evaluated(weights: Mapping[str, Stored]) -> State:
    return {key: materialise(weight) for key, weight in weights.items()}


def formula(base: Mapping[str, torch.Tensor], file: Path, scale: float) -> State:
    """W + scale x B A + difference in float64, under diffusers names, of the file's own tensors.

    FlashGen's are brought to diffusers' layout by diffusers.
    """
    tensors = load_file(file if file.is_file() else file / "adapter_model.safetensors")
    if "flashgen" in file.name:
        plain = {key.removeprefix("transformer."): value for key, value in tensors.items()}
        converted = _convert_non_diffusers_minimax_h3_lora_to_diffusers(plain)
        tensors = {key.removeprefix("transformer."): value for key, value in converted.items()}
    tensors = {key.replace(".default.", "."): value for key, value in tensors.items()}
    state: State = {}
    for key, value in tensors.items():
        module, _, ending = key.rpartition(".")
        if key.endswith(".lora_A.weight"):
            module = key.removesuffix(".lora_A.weight")
            product = scale * tensors[f"{module}.lora_B.weight"].double() @ value.double()
            state[f"{module}.weight"] = state.get(f"{module}.weight", base[f"{module}.weight"].double()) + product
        elif ending in ("diff", "diff_b"):
            name = f"{module}.{'bias' if ending == 'diff_b' else 'weight'}"
            state[name] = state.get(name, base[name].double()) + value.double()
        elif ending == "set_weight":
            state[f"{module}.weight"] = value
    return state


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    """The exact values, rounded once from a sum in float32: half a unit in the last place, and what the sum is off.

    Weights here are below 2, and float32 has 2^-24 of that; a product of rank 128 is a few of it off.
    """
    expected = exact.to(found.dtype)
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=0, atol=4e-7, msg=lambda text: f"{name}: {text}")
        return
    differing = found != expected
    assert differing.double().mean() < 2e-3, name
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + 4e-7).all(), name


def fused_parameters(checkpoint: Checkpoint, fusion: Fusion, partition: str) -> State:
    """Every parameter by its diffusers name, made by hand of the written file's tensors and the base's."""
    stored = dict(checkpoint.stored("denoiser", partition)) | dict(read_header(fusion.path).tensors)
    if checkpoint.layout == "diffusers":
        return evaluated(stored)
    heads, native, found = checkpoint.dimensions.denoiser.heads, evaluated(stored), {}
    for name, weight in checkpoint.parameters("denoiser", partition).items():
        key = next(weight.leaves()).key
        value = native[key]
        if "qkv_proj" in key:
            index = "qkv".index(name.removesuffix(".weight")[-1])
            value = value.view(heads, 3, -1, value.shape[1])[:, index].reshape(-1, value.shape[1])
        elif "mlp.fc1" in key:
            gate, up = value.chunk(2)
            value = torch.cat([up, gate])
        found[name] = value
    gates = {key: value for key, value in native.items() if "to_gate_compress" in key}
    return found | {f"transformer_{key}": value for key, value in gates.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCALES)
def test_the_file_holds_what_the_formula_says(
    name: str, layout: str, checkpoints: Mapping[str, Checkpoint], artifacts: Path, tmp_path: Path
) -> None:
    checkpoint = checkpoints[layout]
    artifact = adapter(artifacts, name, checkpoint)
    partition = partition_of(artifact.distilled)
    fusion = plan_fusion(artifact, checkpoint, partition, tmp_path, "fused")
    fusion.write()
    base = {key: materialise(weight) for key, weight in checkpoint.parameters("denoiser", partition).items()}
    expected = formula(base, artifacts / FOLDERS[name], SCALES[name])
    found = fused_parameters(checkpoint, fusion, partition)
    assert set(expected) == set(artifact.patches)
    for key, value in found.items():
        if key in expected:
            assert_rounded(value, expected[key], key)
            assert not torch.equal(value, base.get(key, torch.zeros(1))), key
        else:
            assert torch.equal(value, base[key]), key
    expressions = patched_parameters(artifact, checkpoint.parameters("denoiser", partition))
    assert expressions.keys() == found.keys()
    assert all(torch.equal(materialise(weight), found[key]) for key, weight in expressions.items())


@pytest.mark.parametrize("name", ["turbo_4step", "turbo_8step"])
def test_fused_weights_are_those_of_diffusers_own_loader(
    name: str, checkpoints: Mapping[str, Checkpoint], artifacts: Path, tmp_path: Path
) -> None:
    """diffusers takes alpha as it is told, which it does not read from the file's metadata."""
    pytest.importorskip("peft", reason="diffusers loads adapters with PEFT, which is not installed")
    checkpoint = checkpoints["native"]
    artifact = adapter(artifacts, name, checkpoint)
    fusion = plan_fusion(artifact, checkpoint, "fl2va", tmp_path, "fused")
    fusion.write()
    model: Any = MiniMaxH3Transformer3DModel(**checkpoint.config("denoiser"))
    base = {key: materialise(weight).float() for key, weight in checkpoint.parameters("denoiser").items()}
    model.load_state_dict(base, strict=True)
    tensors = {key.replace(".default.", "."): value.float() for key, value in load_file(artifact.path).items()}
    model.load_lora_adapter(tensors, prefix=None, adapter_name="turbo")
    model.set_adapters(["turbo"], [SCALES[name]])
    model.fuse_lora()
    model.unload_lora()
    theirs = model.state_dict()
    ours = fused_parameters(checkpoint, fusion, "fl2va")
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        # Theirs is in float32, which ours is summed in before it is rounded.
        assert_rounded(value, theirs[key].double(), key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_of_the_base_is_read_once(
    layout: str, checkpoints: Mapping[str, Checkpoint], artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.artifacts.fusion.SLAB_VALUES", 1 << 12)
    checkpoint = checkpoints[layout]
    fusion = plan_fusion(adapter(artifacts, "fasth3_v1_dense", checkpoint), checkpoint, "fl2va", tmp_path, "fused")
    read: list[Stored] = []

    def noted(stored: Stored) -> torch.Tensor:
        read.append(stored)
        return map_stored(stored)

    fusion.write(read=noted)
    base = {target.base for target in fusion.targets.values() if target.base is not None}
    files = {stored.file for stored in base}
    spans = sorted((one.file, one.offset, one.nbytes) for one in read if one.file in files)
    assert len(spans) > 2 * len(base)
    places: dict[tuple[Path, int], int] = {}
    for file, offset, nbytes in spans:
        # Spans that follow each other without a gap are one; none may begin before another ends.
        before = [start for start in places if start[0] == file and start[1] + places[start] > offset >= start[1]]
        assert not before, "read twice"
        places[file, offset] = nbytes
    assert sum(places.values()) == sum(stored.nbytes for stored in base)
    own = [one for one in read if one.file not in files]
    assert len(own) == len(set(own)) == len(load_file(fusion_source(artifacts)))


def fusion_source(artifacts: Path) -> Path:
    return artifacts / FOLDERS["fasth3_v1_dense"] / "adapter_model.safetensors"


@pytest.mark.parametrize("step", [1, 100, 1 << 30])
def test_the_bytes_do_not_depend_on_how_rows_are_cut(
    step: int, checkpoint: Checkpoint, artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of differences at all; of products as far as the matrix library's sums do not."""
    artifact = adapter(artifacts, "fasth3_v1_dense", checkpoint)
    plain = {name: patch for name, patch in artifact.patches.items() if patch.low_rank is None}
    fusion = plan_fusion(replace(artifact, patches=plain), checkpoint, "fl2va", tmp_path, "whole")
    expected = fusion.write()
    monkeypatch.setattr("export.artifacts.fusion.SLAB_VALUES", step)
    assert fusion.write() == expected


def test_the_file_is_known_before_it_is_there(checkpoint: Checkpoint, artifacts: Path, tmp_path: Path) -> None:
    artifact = adapter(artifacts, "flashgen", checkpoint)
    fusion = plan_fusion(artifact, checkpoint, "fl2va", tmp_path / "out", "fused")
    assert not fusion.path.exists()
    seen: list[tuple[str, int, int]] = []
    digest = fusion.write(lambda *event: seen.append(event))
    header = read_header(fusion.path)
    assert (header.digest, header.size) == (fusion.header_sha256, fusion.size)
    assert header.tensors == fusion.tensors
    assert digest == subprocess.check_output(["sha256sum", fusion.path], text=True).split()[0]
    assert [key for key, _, _ in seen] == list(header.tensors)
    assert seen[-1][1:] == (fusion.size, fusion.size)
    ref = plan_fusion(artifact, checkpoint, "ref2va", tmp_path / "out", "fused")
    assert ref.path != fusion.path


def test_runs_say_where_expressions_take_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "fused.safetensors"
    rows = torch.arange(48, dtype=torch.float32).view(48, 1)
    write_tensors(file, {"fused": rows}, {})
    stored = read_header(file).tensors
    layouts: tuple[QKVLayout, ...] = ("interleaved", "stacked")
    cases: list[tuple[Recipe, QKVLayout, int]] = [
        *((Projection("fused", index, 4), layout, 16) for index in range(3) for layout in layouts),
        (Swapped("fused"), "interleaved", 48),
        (Whole("fused"), "interleaved", 48),
    ]
    for recipe, layout, count in cases:
        parameter = materialise(expression(recipe, stored, layout))
        places = runs(recipe, count, layout)
        assert sum(run.rows for run in places) == count
        for run in places:
            assert torch.equal(parameter[run.parameter :][: run.rows], rows[run.stored :][: run.rows])


def test_a_projection_alone_leaves_the_others_in_its_tensor(
    checkpoint: Checkpoint, artifacts: Path, tmp_path: Path
) -> None:
    artifact = adapter(artifacts, "turbo_4step", checkpoint)
    name = "transformer_blocks.1.attn.to_k.weight"
    one = replace(artifact, patches={name: artifact.patches[name]})
    fusion = plan_fusion(one, checkpoint, "fl2va", tmp_path, "fused")
    fusion.write()
    (value,) = evaluated(read_header(fusion.path).tensors).values()
    heads = checkpoint.dimensions.denoiser.heads
    found = value.view(heads, 3, -1, value.shape[1])
    base = materialise(checkpoint.stored("denoiser")["blocks.1.attn.qkv_proj.weight"]).view(found.shape)
    assert torch.equal(found[:, [0, 2]], base[:, [0, 2]])
    assert not torch.equal(found[:, 1], base[:, 1])


def test_a_patch_of_the_wrong_place_is_refused_by_name(checkpoint: Checkpoint, artifacts: Path, tmp_path: Path) -> None:
    artifact = adapter(artifacts, "fasth3_v1_vsa", checkpoint)
    norm, gate = "norm_out.norm.weight", "transformer_blocks.0.attn.to_gate_compress.weight"
    pair = artifact.patches["transformer_blocks.0.attn.to_q.weight"].low_rank
    injected = artifact.patches[gate].injected
    assert pair is not None
    wrong = {
        "one that it lacks": {"transformer_blocks.9.norm1.weight": artifact.patches[norm]},
        r"a change of \[192\]": {norm: Patch(low_rank=pair)},
        "which the base lacks": {norm: Patch(injected=injected)},
        r"change of \[192, 1024\]": {
            "transformer_blocks.0.attn.to_out.0.weight": Patch(low_rank=LowRank(pair.up, pair.down, 1.0))
        },
    }
    for reason, patches in wrong.items():
        with pytest.raises(CheckpointError, match=reason) as caught:
            plan_fusion(replace(artifact, patches=patches), checkpoint, "fl2va", tmp_path, "fused")
        assert next(iter(patches)) in str(caught.value)


def constant(tmp_path: Path, checkpoint: Checkpoint, value: float) -> Artifact:
    """An artifact that adds one number to a norm."""
    file = tmp_path / "difference.safetensors"
    write_tensors(file, {"norm_out.norm.diff": torch.full((192,), value, dtype=torch.float32)}, {})
    schedule = PinnedSchedule(forwards=4, video_shift=12.0, audio_shift=3.0)
    distilled = Distilled(name="constant", family="turbo", tasks=("t2va",), schedule=schedule)
    patch = Patch(difference=read_header(file).tensors["norm_out.norm.diff"])
    return Artifact(file, distilled, {"norm_out.norm.weight": patch}, {})


def test_a_sum_is_rounded_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Half a unit in the last place of numbers below 1 and a little more, which bfloat16 has no room for, rounds up."""
    little = 2.0**-9 * 1.001
    fusion = plan_fusion(constant(tmp_path, checkpoint, little), checkpoint, "fl2va", tmp_path, "fused")
    fusion.write()
    base = materialise(checkpoint.stored("denoiser")["final_layer.norm.weight"])
    (value,) = evaluated(read_header(fusion.path).tensors).values()
    assert torch.equal(value, (base.double() + torch.tensor(little).double()).bfloat16())
    assert not torch.equal(value, base + torch.tensor(little).bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_a_result_that_is_not_finite_is_refused_and_nothing_is_left(
    value: float, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The last is a float32 number that bfloat16 rounds to infinity."""
    fusion = plan_fusion(constant(tmp_path, checkpoint, value), checkpoint, "fl2va", tmp_path / "out", "fused")
    with pytest.raises(FusionError, match=r"final_layer\.norm\.weight: would hold values that are not finite"):
        fusion.write()
    assert list(fusion.path.parent.iterdir()) == []


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_is_told_before_anything_is_written(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion = plan_fusion(constant(tmp_path, checkpoint, 1.0), checkpoint, "fl2va", tmp_path / "out", "fused")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 100, 100))
    with pytest.raises(FusionError, match=f"{fusion.size:,} bytes needed, 100 free on its disk"):
        fusion.write()
    assert list(fusion.path.parent.iterdir()) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_disk_that_fills_up_meanwhile_is_told_and_nothing_is_left(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fusion = plan_fusion(constant(tmp_path, checkpoint, 1.0), checkpoint, "fl2va", tmp_path / "out", "fused")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(FusionError, match=f"{fusion.size:,} bytes needed"):
        fusion.write()
    assert list(fusion.path.parent.iterdir()) == []


def test_memory_is_a_few_slabs_whatever_the_tensor(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The released AdaLN projection, 520 MB as stored and 1 GB in float32, with a pair of rank 64."""
    base, pair = tmp_path / "base.safetensors", tmp_path / "pair.safetensors"
    shape = (96_768, 2_688)
    write_sparse(base, {"w": Declared(shape, torch.bfloat16)}, {})
    halves = {"down": Declared((64, shape[1]), torch.bfloat16), "up": Declared((shape[0], 64), torch.bfloat16)}
    write_sparse(pair, halves, {})
    command = [sys.executable, "-c", MEASURED, str(base), str(pair), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    # up in float32 is 25 MB; a slab is 16 MiB, and a handful are held.
    assert after - before < 200e6


MEASURED = """
import sys
from pathlib import Path
from export.artifacts import LowRank, Patch
from export.artifacts.fusion import Change, Fusion, Target
from export.checkpoint.recipes import Run
from export.checkpoint.safetensors_file import Declared, encode_header, laid_out, read_header
from tests.export.test_sidecar import _reset_peak, _status

base = read_header(Path(sys.argv[1])).tensors["w"]
pair = read_header(Path(sys.argv[2])).tensors
patch = Patch(LowRank(pair["down"], pair["up"], 1.0))

def plan(rows):
    stored = base.slab(0, rows)
    declared = {"w": Declared(stored.shape, stored.dtype)}
    header, order, nbytes = encode_header(declared, {})
    path = Path(sys.argv[3]) / "w.safetensors"
    target = Target(declared["w"], stored, (Change(Run(0, 0, rows), patch),), None)
    placed = laid_out(path, declared, order, len(header))
    return Fusion(path, header, len(header) + nbytes, placed, {"w": target})

plan(64).write()  # what libraries allocate once
before = _reset_peak()
plan(base.shape[0]).write()
print(before, _status("VmHWM"))
"""
