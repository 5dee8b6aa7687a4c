"""`h3trt adapters inspect` says what an artifact is, what it changes and whether it fits, or why it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner, Result

from export.miniature import FOLDERS
from h3trt.cli import app
from h3trt.exits import Exit


def run(*arguments: str | Path) -> Result:
    command = ["adapters", "inspect", *map(str, arguments)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERM": "dumb"})


def test_an_adapter_that_fits(artifacts: Path, root: Path) -> None:
    result = run(artifacts / FOLDERS["flashgen"], "--checkpoint", root)
    assert result.exit_code == Exit.OK, result.output
    for part in (
        "t2va_flashgen_4step_v1.0_768p, of family flashgen: can be chosen by requests",
        "tasks t2va, partition fl2va; 3.8 MB",
        "4 forwards, positions 1, 0.7, 0.4, 0.15, 0; shifts 12 of video, 3 of sound",
        f"fits {root}",
    ):
        assert part in result.stdout
    rows = {line.split()[1]: line.split()[3:8] for line in result.stdout.splitlines() if ".weight" in line}
    assert rows["norm_out.linear.weight"] == ["1", "│", "rank", "64", "x"]
    assert rows["token_refiner.refiner_blocks.*.attn.to_q.weight"] == ["2", "│", "rank", "64", "x"]


def test_a_student_of_sparse_attention(artifacts: Path, root: Path) -> None:
    result = run(artifacts / FOLDERS["fasth3_v1_vsa"], "--checkpoint", root)
    assert result.exit_code == Exit.OK, result.output
    assert "is fused into the checkpoint for good: h3trt adapters fuse" in result.stdout
    assert "sparse attention of video: tiles of 64 rows, sparsity 0.9" in result.stdout


def test_json_says_the_same(artifacts: Path, root: Path, tmp_path: Path) -> None:
    file, source = tmp_path / "out.json", artifacts / FOLDERS["turbo_8step"]
    assert run(source, "--checkpoint", root, "--json", file).exit_code == Exit.OK
    said = json.loads(file.read_text())
    assert json.loads(run(source, "--checkpoint", root, "--json", "-").stdout) == said
    assert said["distilled"]["schedule"] == {
        "forwards": 8,
        "positions": None,
        "video_shift": 12.0,
        "audio_shift": 3.0,
    }
    assert (said["application"], said["partition"]) == ("switchable", "fl2va")
    assert sum(touched["count"] for touched in said["touched"]) == 24
    assert {touched["change"] for touched in said["touched"]} == {"rank 128 x 0.0625"}
    assert said["metadata"] == {"alpha": "8"}


def test_a_whole_student(artifacts: Path, root: Path) -> None:
    result = run(artifacts / FOLDERS["fasth3_v2"], "--checkpoint", root, "--json", "-")
    assert result.exit_code == Exit.OK, result.output
    said = json.loads(result.stdout)
    changes = {touched["parameters"]: (touched["count"], touched["change"]) for touched in said["touched"]}
    assert changes["transformer_blocks.*.attn.to_gate_compress.weight"] == (2, "added")
    assert changes["transformer_blocks.*.attn.to_q.weight"] == (2, "replaced")
    assert (said["application"], said["metadata"]) == ("whole", {"base_revision": "0" * 40})


def test_without_a_checkpoint_the_released_model_is_meant(artifacts: Path) -> None:
    refused = run(artifacts / FOLDERS["turbo_8step"])
    assert refused.exit_code == Exit.CHECKPOINT
    assert "each of 312 modules" in refused.stderr
    assert "compared with the released model; --checkpoint DIRECTORY names another" in refused.stderr


def test_another_hash_than_expected(artifacts: Path, root: Path) -> None:
    refused = run(artifacts / FOLDERS["turbo_8step"], "--checkpoint", root, "--sha256", "0" * 64)
    assert refused.exit_code == Exit.CHECKPOINT
    assert refused.stderr.count("\n") == 1
    assert f"sha256: expected {'0' * 64}, found" in refused.stderr


def test_a_file_for_json_that_cannot_be_written_is_refused_first(artifacts: Path, root: Path, tmp_path: Path) -> None:
    refused = run(artifacts / "missing", "--checkpoint", root, "--json", tmp_path)
    assert refused.exit_code == Exit.USAGE
    assert "is a directory" in refused.stderr


def test_a_whole_student_without_its_contract(artifacts: Path, root: Path, tmp_path: Path) -> None:
    student = shutil.copytree(artifacts / FOLDERS["fasth3_v2"], tmp_path / "student")
    (student / "fastvideo_inference.json").unlink()
    refused = run(student, "--checkpoint", root)
    assert refused.exit_code == Exit.CHECKPOINT
    assert "an adapter's .safetensors file, or a whole student's fastvideo_inference.json, found" in refused.stderr
