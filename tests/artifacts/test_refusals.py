"""An artifact that is not what its family is, is refused with the reason, before any of its tensors is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export.artifacts import open_artifact, read
from export.checkpoint import Checkpoint, CheckpointError
from export.checkpoint.safetensors_file import read_header
from export.miniature import FOLDERS
from tests.artifacts.damage import Change, all_of, call, damaged, drop, hush, overwrite, put, rename, say

A, B = ".lora_A.weight", ".lora_B.weight"
QUERY = "transformer_blocks.0.attn.to_q"
TURBO_A = ".lora_A.default.weight"
GATE = "transformer_blocks.1.attn.to_gate_compress"
STUDENT = "FastVideo/FastVideo-FastH3-4-step-Preview-v1"


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tensor, or the file for its hash, ends the test."""

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the payload was read")

    monkeypatch.setattr(read, "check_finite", refuse)
    monkeypatch.setattr(read, "file_hash", refuse)


def refused(path: Path, checkpoint: Checkpoint, key: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        open_artifact(path, checkpoint)
    assert key in error.value.key, error.value


FASTH3: dict[str, tuple[Change, str, str]] = {
    "more pairs declared than there are": (say("low_rank_tensors", "724"), "low_rank_tensors", "expected 52, .* 724"),
    "a count that is no number": (say("diff_tensors", "many"), "diff_tensors", "'many'"),
    "a count that is missing": (hush("set_weight_tensors"), "set_weight_tensors", "expected 0.*found nothing"),
    "a tensor fewer than declared": (
        lambda contents: contents.tensors.__delitem__("proj_in.diff"),
        "diff_tensors",
        "expected 27, .* found 28",
    ),
    "another rank declared": (say("rank", "128"), "rank", "expected 64"),
    "no rank declared": (hush("rank"), "rank", "found nothing"),
    "a pair of another rank": (put(QUERY + A, 32, 192), QUERY + A, r"expected \[64, 192\].*\[32, 192\]"),
    "A without B": (drop(QUERY + B), QUERY, "ends in lora_B, but the other"),
    "B without A": (drop(QUERY + A), QUERY, "ends in lora_A, but the other"),
    "B of another size": (put(QUERY + B, 512, 64), QUERY + B, r"\[1024, 64\].*\[512, 64\]"),
    "an unknown ending": (put("proj_in.diff_m", 192, 96), "proj_in.diff_m", r"\.diff_b"),
    "an unknown module": (put("proj_middle.diff", 192), "proj_middle.diff", "has not"),
    "a block of a deeper model": (put("transformer_blocks.2.norm1.diff", 192), "blocks.2.norm1", "has not"),
    "another spelling of a block": (put("transformer_blocks.00.norm1.diff", 192), "blocks.00.norm1", "has not"),
    "a full difference of a fused projection": (put(QUERY + ".diff", 1024, 192), QUERY + ".diff", "fused"),
    "a pair for a norm": (
        all_of(put("norm_out.norm" + A, 64, 192), put("norm_out.norm" + B, 192, 64)),
        "norm_out.norm",
        "a matrix",
    ),
    "a difference of another shape": (put("proj_in.diff", 192, 95), "proj_in.diff", r"\[192, 96\].*\[192, 95\]"),
    "an untouched block": (drop("transformer_blocks.1."), "transformer_blocks.1", "each of 4 blocks"),
    "an untouched refiner": (drop("refiner_blocks.0."), "token_refiner.refiner_blocks.0", "none of this one"),
    "integers": (put("proj_in.diff_b", 192, dtype=torch.int8), "proj_in.diff_b", "found I8"),
    "an existing parameter set whole": (put("proj_in.set_weight", 192, 96), "proj_in", "the base has"),
    "another model": (say("finetuned_model", "someone/fasth3-like"), "finetuned_model", "student of FastVideo"),
    "another student of FastVideo": (say("finetuned_model", "FastVideo/Wan"), "finetuned_model", "'FastVideo/Wan'"),
    "a student of eight steps": (say("finetuned_model", STUDENT.replace("4-", "8-")), "finetuned_model", "of 4 steps"),
    "another base": (say("base_model", "MiniMaxAI/MiniMax-H2"), "base_model", "MiniMaxAI/MiniMax-H3"),
    "another file name": (call("fasth3.safetensors"), "file name", "adapter_model.safetensors"),
    "another format": (say("format", "fastvideo-lora-v3"), "__metadata__", "fastvideo-lora-v2"),
    "rows in another order": (say("fc1_layout", "gate_up"), "fc1_layout", "orders of rows"),
    "rows in another order, in capitals": (say("FC1_LAYOUT", "gate_up"), "FC1_LAYOUT", "orders of rows"),
    "a name that begins with no letter": (
        all_of(say("finetuned_model", "fastvideo/_fasth3"), drop(QUERY + B)),
        QUERY,
        "ends in lora_B",
    ),
    "a student of more steps than a number may have digits": (
        say("finetuned_model", f"fastvideo/{'9' * 5000}-step-fasth3"),
        "finetuned_model",
        "of 4 steps",
    ),
    "a dense adapter called sparse": (say("finetuned_model", f"{STUDENT}-VSA"), "finetuned_model", "with 0 gates"),
}


@pytest.mark.parametrize("fault", FASTH3)
def test_fasth3(fault: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None) -> None:
    change, key, message = FASTH3[fault]
    source = artifacts / FOLDERS["fasth3_v1_dense"] / "adapter_model.safetensors"
    refused(damaged(source, tmp_path / "adapter", change), checkpoint, key, message)


GATES: dict[str, tuple[Change, str, str]] = {
    "a block without a gate": (drop(GATE), GATE, "gate for each of 2 blocks.*1 gates"),
    "a gate of another shape": (put(f"{GATE}.set_weight", 192, 1024), GATE, r"\[1024, 192\]"),
    "a gate that is changed too": (put(f"{GATE}.diff", 1024, 192), GATE, "set whole"),
    "a gate as a difference": (
        rename("to_gate_compress.set_weight", "to_gate_compress.diff"),
        "diff_tensors",
        "expected 30",
    ),
    "gates in a dense adapter": (say("finetuned_model", f"{STUDENT}-Dense"), "finetuned_model", "with 2 gates"),
}


@pytest.mark.parametrize("fault", GATES)
def test_fasth3_for_sparse_attention(
    fault: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None
) -> None:
    change, key, message = GATES[fault]
    source = artifacts / FOLDERS["fasth3_v1_vsa"] / "adapter_model.safetensors"
    refused(damaged(source, tmp_path / "adapter", change), checkpoint, key, message)


TURBO: dict[str, tuple[Change, str, str]] = {
    "no alpha": (hush("alpha"), "alpha", "fl2v_turbo_4step_v0.1 is known without"),
    "alpha that is no number": (say("alpha", "eight"), "alpha", "'eight'"),
    "alpha that is not finite": (say("alpha", "nan"), "alpha", "positive number"),
    "negative alpha": (say("alpha", "-8"), "alpha", "positive number"),
    "alpha of another release": (say("alpha", "8"), "alpha", "128, with which .* renamed"),
    "the stacked variant": (
        call("minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16.safetensors"),
        "file name",
        "stacked in one projection",
    ),
    "the stacked variant, renamed": (
        rename("transformer_blocks.0.attn.to_q.", "blocks.0.attn.qkv_proj."),
        "transformer_blocks.0.attn.to_q",
        "24 modules, found none; 24 modules",
    ),
    "steps that were never trained": (
        call("minimax_h3_fl2v_turbo_5step_v1.0_768p.safetensors"),
        "file name",
        "4 or 8 steps, found 5 steps",
    ),
    "a name that tells nothing": (call("turbo.safetensors"), "file name", "steps, tasks and shift"),
    "a name too long to be a request's": (
        call(f"minimax_h3_fl2v_turbo_4step_v{'1' * 100}.0.safetensors"),
        "file name",
        "steps, tasks and shift",
    ),
    "names of the native layout": (say("key_format", "minimax-h3-native"), "file name", "flashgen"),
    "another format": (say("key_format", "kohya"), "key_format", "minimax-h3-diffusers"),
    "swapped halves": (say("ff_order", "gate;up"), "ff_order", "orders of rows"),
    "a linear without a pair": (drop("transformer_blocks.1.ff.net.2."), "blocks.1.ff.net.2", "24 modules.*23"),
    "AdaLN too": (
        put("transformer_blocks.0.adaln_proj.linear" + TURBO_A, 128, 64),
        "adaln_proj",
        "one of the 24 modules.*25",
    ),
    "another rank": (put(QUERY + TURBO_A, 64, 192), QUERY + TURBO_A, r"\[128, 192\], of rank 128"),
    "half a pair": (drop(QUERY + TURBO_A), QUERY, "ends in lora_A, but the other"),
    "names without PEFT's infix": (rename(".default", ""), ".lora_A.weight", r"\.lora_A\.default\.weight"),
    "another kind of module": (rename("transformer_blocks.0.", "diffusion_model.blocks.0."), "blocks.0", "none"),
}


@pytest.mark.parametrize("fault", TURBO)
def test_turbo(fault: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None) -> None:
    change, key, message = TURBO[fault]
    refused(damaged(artifacts / FOLDERS["turbo_4step"], tmp_path, change), checkpoint, key, message)


FLASHGEN: dict[str, tuple[Change, str, str]] = {
    "stacked rows": (say("qkv_layout", "stacked"), "qkv_layout", "'grouped', found 'stacked'"),
    "rows of unknown order": (hush("qkv_layout"), "qkv_layout", "found nothing"),
    "swapped halves": (say("fc1_layout", "up_gate"), "fc1_layout", "but qkv_layout"),
    "no alpha": (hush("lora_alpha"), "lora_alpha", "found nothing"),
    "another alpha": (say("lora_alpha", "32"), "lora_alpha", "expected 64"),
    "another rank": (say("lora_rank", "128"), "lora_rank", "expected 64"),
    "another task": (say("tasks", "ref2va"), "tasks", "'t2va'"),
    "no schedule": (hush("base_schedule"), "base_schedule", "found nothing"),
    "a schedule of three steps": (say("base_schedule", "1,0.5,0.2,0"), "base_schedule", "5 numbers"),
    "a schedule that rises": (say("base_schedule", "1,0.4,0.7,0.15,0"), "base_schedule", "fall strictly"),
    "a schedule that does not end": (say("base_schedule", "1,0.7,0.4,0.15,0.1"), "base_schedule", "to 0"),
    "a schedule from above 1": (say("base_schedule", "2,0.7,0.4,0.15,0"), "base_schedule", "at most 1"),
    "a schedule with a hole": (say("base_schedule", "1,0.7,,0.15,0"), "base_schedule", "5 numbers"),
    "a schedule whose end float32 cannot tell from 0": (
        say("base_schedule", "1,0.7,0.4,5e-324,0"),
        "base_schedule",
        "share a float32 sigma",
    ),
    "a schedule with NaN": (say("base_schedule", "1,nan,0.4,0.15,0"), "base_schedule", "5 numbers"),
    "a linear without a pair": (drop("blocks.1.mlp.fc2."), "blocks.1.mlp.fc2", "each of 19 modules"),
    "no AdaLN of the head": (drop("final_layer."), "final_layer.adaln_proj.linear", "each of 19 modules"),
    "no prefix": (rename("transformer.", ""), "", r"a name transformer\.MODULE"),
    "another file name": (call("flashgen.safetensors"), "file name", "as it is published"),
    "another format": (say("key_format", "minimax-h3-diffusers"), "key_format", "'minimax-h3-native'"),
}


@pytest.mark.parametrize("fault", FLASHGEN)
def test_flashgen(fault: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None) -> None:
    change, key, message = FLASHGEN[fault]
    refused(damaged(artifacts / FOLDERS["flashgen"], tmp_path, change), checkpoint, key, message)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", "fasth3-inference-contract-v2"),
        ("model_id", "FastVideo/FastVideo-FastH3-8-Step-V3"),
        ("task", "t2va"),
        ("dmd_denoising_steps", [999, 749, 500, 250]),
        ("transformer_forwards", 9),
        ("transformer_forwards", "8"),
        ("video_scheduler_shift", 12.0),
        ("audio_scheduler_shift", 6.0),
        ("guidance_scale", True),
        ("attention_backend", "FLASH_ATTN"),
        ("vsa_sparsity", 0.9),
        ("vsa_tile_size", 128),
        ("num_inference_steps", 8),
    ],
)
def test_fasth3_v2_is_held_to_every_field_of_its_contract(
    key: str, value: Any, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    root = _student(artifacts, tmp_path)
    _edit(root / "fastvideo_inference.json", lambda contract: contract.update({key: value}))
    refused(root, checkpoint, key, "fastvideo_inference.json.*expected")


STUDENTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a field less": (
        lambda root: _edit(root / "fastvideo_inference.json", lambda contract: contract.pop("guidance_scale")),
        "guidance_scale",
        "found nothing",
    ),
    "another shift in the scheduler's file": (
        lambda root: _edit(root / "scheduler/scheduler_config.json", lambda values: values.update(shift=12.0)),
        "shift",
        r"expected 10\.0, found 12\.0",
    ),
    "a base that is not pinned": (
        lambda root: _edit(
            root / "provenance.json", lambda values: values.update(base_model="hf://MiniMaxAI/MiniMax-H3@")
        ),
        "base_model",
        "@REVISION",
    ),
    "another base": (
        lambda root: _edit(root / "provenance.json", lambda values: values.update(base_model="hf://Other/H3@main")),
        "base_model",
        "hf://MiniMaxAI/MiniMax-H3@",
    ),
    "no provenance": (lambda root: (root / "provenance.json").unlink(), "file", "a JSON file"),
    "no index": (lambda root: (root / "modular_model_index.json").unlink(), "file", "FastVideo's releases"),
    "a transformer of another size": (
        lambda root: _edit(root / "transformer/config.json", lambda values: values.update(num_layers=3)),
        "transformer_blocks.2",
        "no such tensor",
    ),
    "a transformer of more layers than there is memory for": (
        lambda root: _edit(root / "transformer/config.json", lambda values: values.update(num_layers=10**12)),
        "num_layers",
        "less than or equal to 1000",
    ),
    "no transformer": (lambda root: shutil.rmtree(root / "transformer"), "file", "a JSON file, found No such file"),
}


@pytest.mark.parametrize("fault", STUDENTS)
def test_fasth3_v2(fault: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    change, key, message = STUDENTS[fault]
    root = _student(artifacts, tmp_path)
    change(root)
    refused(root, checkpoint, key, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("blocks.1.attn.to_gate_compress"), "no such tensor"),
        (put("transformer_blocks.0.attn.to_gate_compress.weight", 1024, 191), r"BF16 \[1024, 192\]"),
        (put("transformer_blocks.0.attn.to_gate_compress.bias", 1024), "unexpected BF16"),
        (put("norm_out.norm.weight", 192, dtype=torch.float32), "expected BF16"),
    ],
)
def test_fasth3_v2_must_hold_exactly_its_tensors(
    change: Change, message: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = _student(artifacts, tmp_path) / "transformer"
    shards = sorted(folder.glob("*.safetensors"))
    headers = [read_header(shard) for shard in shards]
    whole = all_of(
        *(put(key, *stored.shape, dtype=stored.dtype) for one in headers for key, stored in one.tensors.items()),
        change,
        call("diffusion_pytorch_model.safetensors"),
    )
    damaged(shards[0], folder, whole)
    for file in (*shards, folder / "diffusion_pytorch_model.safetensors.index.json"):
        file.unlink()
    refused(folder.parent, checkpoint, "", message)


def _student(artifacts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifacts / FOLDERS["fasth3_v2"], tmp_path / "student"))


def _edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def test_a_bundle_of_several_variants_is_ambiguous(artifacts: Path, checkpoint: Checkpoint) -> None:
    refused(artifacts / FOLDERS["fasth3_v1"], checkpoint, "variant", "one variant.*several: dense-datafree, vsa-data")


def test_a_bundle_of_one_variant_is_that_one(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    root = Path(shutil.copytree(artifacts / FOLDERS["fasth3_v1"], tmp_path / "bundle"))
    shutil.rmtree(root / "vsa-datafree")
    assert open_artifact(root, checkpoint).path == root / "dense-datafree/adapter_model.safetensors"


def test_a_bundle_of_another_schedule(
    artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(shutil.copytree(artifacts / FOLDERS["fasth3_v1"], tmp_path / "bundle"))
    _edit(root / "adapter_manifest.json", lambda values: values["sampling"].update(base_timesteps=[999, 500]))
    refused(root / "dense-datafree", checkpoint, "sampling.base_timesteps", r"\[999, 749, 500, 250\]")
    monkeypatch.chdir(root / "dense-datafree")
    refused(Path(), checkpoint, "sampling.base_timesteps", r"\[999, 749, 500, 250\]")


def test_a_folder_of_two_files(artifacts: Path, checkpoint: Checkpoint) -> None:
    refused((artifacts / FOLDERS["turbo_4step"]).parent, checkpoint, "file", "one adapter, or the path of one of sev")


def test_an_empty_folder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    refused(tmp_path, checkpoint, "file", "found nothing")


def test_nothing_there(checkpoint: Checkpoint, tmp_path: Path) -> None:
    refused(tmp_path / "missing", checkpoint, "file", "no such file or directory")


def test_a_container_that_could_run_code_is_not_opened(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "minimax_h3_fl2v_turbo_4step_v1.0.bin"
    file.write_bytes(b"\x80\x04")
    refused(file, checkpoint, "file name", r"\.safetensors file; no other is opened")


def test_a_truncated_file(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None) -> None:
    file = _copied(artifacts, tmp_path)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)
    refused(file, checkpoint, "lora", "truncated")


def test_a_tensor_twice(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None) -> None:
    file = _copied(artifacts, tmp_path)
    raw = file.read_bytes()
    one, other = f"{QUERY}{TURBO_A}".encode(), QUERY.replace("to_q", "to_k").encode() + TURBO_A.encode()
    file.write_bytes(raw.replace(other, one, 1))
    refused(file, checkpoint, QUERY, "the key twice")


def test_a_header_of_more_tensors_than_any_adapter_has(
    artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None
) -> None:
    many = all_of(*(put(f"{'x' * 1000}{index}", 1) for index in range(2000)))
    file = damaged(artifacts / FOLDERS["turbo_4step"], tmp_path, many)
    refused(file, checkpoint, "header length", "at most 2097152 bytes")


def test_a_contract_of_gigabytes_is_not_read(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    root = _student(artifacts, tmp_path)
    with (root / "fastvideo_inference.json").open("r+b") as opened:
        opened.truncate(1 << 40)
    refused(root, checkpoint, "contents", "at most 16777216 bytes, found 1099511627776 bytes")


def test_a_contract_that_nobody_writes_is_not_waited_for(
    artifacts: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    contract = _student(artifacts, tmp_path) / "fastvideo_inference.json"
    contract.unlink()
    os.mkfifo(contract)
    refused(contract.parent, checkpoint, "file", "a JSON file, found a pipe")


def test_a_file_of_no_family(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, unread: None) -> None:
    anonymous = all_of(hush("key_format"), call("style.safetensors"))
    file = damaged(artifacts / FOLDERS["turbo_4step"], tmp_path, anonymous)
    refused(file, checkpoint, "__metadata__", "minimax-h3-native.*found none of these")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("turbo_4step", "token_refiner.refiner_blocks.1.ff.net.2.lora_B.default.weight"),
        ("flashgen", "transformer.final_layer.adaln_proj.linear.lora_A.default.weight"),
        ("fasth3_v1_vsa", "proj_in.diff"),
        ("fasth3_v1_vsa", "transformer_blocks.1.attn.to_gate_compress.set_weight"),
    ],
)
def test_a_number_that_is_not_finite(
    name: str, key: str, value: float, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = artifacts / FOLDERS[name]
    source = source if source.is_file() else source / "adapter_model.safetensors"
    file = Path(shutil.copy(source, tmp_path))
    overwrite(file, key, 1234, value)
    refused(file, checkpoint, key, f"expected finite numbers, found {value} at element 1234")


def test_another_file_than_the_pinned_one(artifacts: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = _copied(artifacts, tmp_path)
    pin = open_artifact(file, checkpoint).distilled.sha256
    assert pin is not None
    assert open_artifact(file, checkpoint, sha256=pin.upper()).distilled.sha256 == pin
    overwrite(file, f"{QUERY}{TURBO_A}", 0, 0.5)
    with pytest.raises(CheckpointError, match=f"sha256: expected {pin}"):
        open_artifact(file, checkpoint, sha256=pin)


def _copied(artifacts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(artifacts / FOLDERS["turbo_4step"], tmp_path))


def test_an_adapter_of_a_partition_that_is_missing(artifacts: Path, root: Path, unread: None) -> None:
    alone = Checkpoint.open(root / "FL2VA")
    refused(artifacts / FOLDERS["turbo_ref2v"], alone, "partition", "partition ref2va, for ref2va, found fl2va alone")


def test_an_adapter_of_a_model_of_other_sizes(artifacts: Path, unread: None) -> None:
    with pytest.raises(CheckpointError, match="each of 312 modules, found none; 24 modules"):
        open_artifact(artifacts / FOLDERS["turbo_4step"])


@pytest.mark.parametrize("name", sorted(set(FOLDERS) - {"fasth3_v1", "turbo_ref2v"}))
def test_a_checkpoint_that_was_changed_already(
    name: str, artifacts: Path, root: Path, tmp_path: Path, unread: None
) -> None:
    base = Path(shutil.copytree(root / "FL2VA", tmp_path / "merged"))
    schedule = [1.0, 0.7, 0.4, 0.15, 0.0]
    _edit(base / "model_index.json", lambda values: values["_minimax_h3"].update(base_schedule=schedule))
    refused(artifacts / FOLDERS[name], Checkpoint.open(base), "schedule", "changed twice, found that of merged")


def test_fasth3_on_a_checkpoint_of_other_shifts(artifacts: Path, root: Path, tmp_path: Path, unread: None) -> None:
    base = Path(shutil.copytree(root / "FL2VA", tmp_path / "base"))
    scales = {"video": 10.0, "audio": 3.0}
    _edit(base / "model_index.json", lambda values: values["_minimax_h3"].update(sigma_shift_scales=scales))
    refused(artifacts / FOLDERS["fasth3_v1_dense"], Checkpoint.open(base), "shifts", "12 and 3.*found 10 and 3")
