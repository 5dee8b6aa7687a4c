"""A student is its base with another transformer, in a directory that appears whole; what does not fit is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from export.artifacts import open_artifact
from export.artifacts.fuse import fuse
from export.artifacts.fusion import FusionError
from export.checkpoint import Checkpoint, CheckpointError, materialise
from export.checkpoint.outline import Outline
from export.checkpoint.safetensors_file import SAMPLES, read_header, write_tensors
from export.checkpoint.summary import summarise
from export.checkpoint.tree import COMPONENTS
from export.graphs.model import Compute, ConsumptionError, check_consumption, model_graphs
from export.miniature import ARTIFACTS, FOLDERS, write_miniature
from h3trt.cli import app
from h3trt.exits import Exit
from plugins.distilled import Distilled

FP32 = Compute.uniform(torch.float32)
KINDS = ("fasth3_v1_dense", "fasth3_v1_vsa", "fasth3_v2")


@pytest.fixture(scope="module")
def place(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base, students of each kind of it, and those of a base in the diffusers layout."""
    directory = tmp_path_factory.mktemp("students")
    shutil.copytree(root, directory / "native")
    write_miniature(directory / "diffusers", "diffusers", seed=5)
    for layout in ("native", "diffusers"):
        base = Checkpoint.open(directory / layout)
        for kind in KINDS:
            artifact = open_artifact(directory / "native" / ARTIFACTS / FOLDERS[kind], base)
            fuse(artifact, base, directory / f"{layout}.{kind}")
    return directory


@pytest.fixture
def copied(place: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a student that a test may break; its base lies beside it as before."""

    def copy(name: str) -> Path:
        for base in ("native", "diffusers"):
            (tmp_path / base).symlink_to(place / base)
        return Path(shutil.copytree(place / name, tmp_path / name))

    return copy


def edited(root: Path, **changes: Any) -> Path:
    """student.json with values changed, by key or by key.key; None removes one."""
    file = root / "student.json"
    values = json.loads(file.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        table = values
        for part in outer:
            table = table[part]
        table.pop(last) if value is None else table.update({last: value})
    file.write_text(json.dumps(values))
    return root


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_transformer_is_the_base_s(place: Path, layout: str, kind: str) -> None:
    base, student = Checkpoint.open(place / layout), Checkpoint.open(place / f"{layout}.{kind}")
    assert (base.student, base.partitions, student.partitions) == (None, ("fl2va", "ref2va"), ("fl2va",))
    assert student.tokenizer_file == base.tokenizer_file
    for component in COMPONENTS:
        assert student.config(component) == base.config(component)
        assert (student.stored(component) == base.stored(component)) is (component != "denoiser")
    assert student.student is not None
    shift = {"fasth3_v2": 10.0}.get(kind, 12.0)
    assert (student.dimensions.video_shift, student.dimensions.audio_shift) == (shift, 3.0)
    assert student.dimensions.denoiser == base.dimensions.denoiser
    with pytest.raises(CheckpointError, match="partition: expected one of fl2va, found ref2va"):
        student.stored("denoiser", "ref2va")


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_what_a_student_is_bound_to(place: Path, layout: str) -> None:
    dense, sparse, whole = (Checkpoint.open(place / f"{layout}.{kind}").student for kind in KINDS)
    assert dense is not None
    assert sparse is not None
    assert whole is not None
    assert dense.schedule.positions == sparse.schedule.positions == (0.999, 0.749, 0.5, 0.25, 0)
    assert whole.schedule.positions == (0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125, 0)
    sparsities = [each.video_sparse and each.video_sparse.sparsity for each in (dense, sparse, whole)]
    assert sparsities == [None, 0.9, 0.8]
    assert (dense.tasks, sparse.tasks, whole.tasks) == (("t2va",),) * 3
    assert (dense.sha256 is None, whole.sha256 is None) == (False, True)


def test_only_changed_tensors_are_in_a_student_s_own_file(place: Path) -> None:
    for kind in ("fasth3_v1_dense", "fasth3_v1_vsa"):
        base, student = Checkpoint.open(place / "native"), Checkpoint.open(place / f"native.{kind}")
        own = {key: one for key, one in student.stored("denoiser").items() if one.file.parent == student.root}
        gates = {f"blocks.{layer}.attn.to_gate_compress.weight" for layer in range(2)}
        assert set(own) - set(base.stored("denoiser")) == (gates if "vsa" in kind else set())
        assert all(
            not torch.equal(materialise(own[key]), materialise(one))
            for key, one in base.stored("denoiser").items()
            if key in own
        )
        others = {key: one for key, one in student.stored("denoiser").items() if key not in own}
        assert others.items() <= base.stored("denoiser").items()
        assert len(list(student.root.iterdir())) == 3


def test_a_whole_transformer_is_read_where_it_lies(place: Path) -> None:
    student = Checkpoint.open(place / "native.fasth3_v2")
    assert sorted(file.name for file in student.root.iterdir()) == ["SHA256SUMS", "student.json"]
    folder = (place / "native" / ARTIFACTS / FOLDERS["fasth3_v2"] / "transformer").resolve()
    assert {one.file.parent for one in student.stored("denoiser").values()} == {folder}
    assert (student.layout, student.qkv_layout("denoiser")) == ("native", "split")


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_graphs_consume_a_dense_student_exactly(place: Path, layout: str) -> None:
    student = Checkpoint.open(place / f"{layout}.fasth3_v1_dense")
    check_consumption(student, model_graphs(student, "fl2va", FP32), "fl2va")


def test_graphs_of_the_base_do_not_consume_a_student(place: Path) -> None:
    base, student = Checkpoint.open(place / "native"), Checkpoint.open(place / "native.fasth3_v1_dense")
    with pytest.raises(ConsumptionError, match="found no such tensor"):
        check_consumption(student, model_graphs(base, "fl2va", FP32), "fl2va")


def test_identities_tell_students_apart(place: Path, copied: Callable[[str], Path]) -> None:
    names = [f"{layout}.{kind}" for layout in ("native", "diffusers") for kind in KINDS] + ["native", "diffusers"]
    opened = [Checkpoint.open(place / name) for name in names]
    assert len({one.fingerprint for one in opened}) == len(names)
    assert len({one.sample for one in opened}) == len(names)
    moved = Checkpoint.open(copied("native.fasth3_v1_dense"))
    assert (moved.fingerprint, moved.sample) == (opened[0].fingerprint, opened[0].sample)


@pytest.mark.parametrize("kind", KINDS)
def test_hashes_cover_the_student_and_its_base(place: Path, copied: Callable[[str], Path], kind: str) -> None:
    root = copied(f"native.{kind}")
    files = Checkpoint.open(root).verify_hashes()
    own = [file for file in files if file.parent == root]
    assert len(own) == (1 if kind == "fasth3_v2" else 2)
    assert len(files) - len(own) == len(Checkpoint.open(place / "native").listed_files()) > 60
    file = own[-1]
    raw = file.read_bytes()
    is_json = file.suffix == ".json"
    file.write_bytes(raw.replace(b"fasth3-8", b"fasth3-9") if is_json else raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="sha256"):
        Checkpoint.open(root).verify_hashes()


def test_a_summary_names_the_student(place: Path) -> None:
    student = Checkpoint.open(place / "native.fasth3_v1_vsa")
    values = json.loads(json.dumps(summarise(student).as_dict()))
    assert Distilled.model_validate_json(json.dumps(values["student"])) == student.student
    own = next(file.stat().st_size for file in student.root.glob("*.safetensors"))
    base = Checkpoint.open(place / "native" / "FL2VA")
    assert values["nbytes"] == own + summarise(base).nbytes
    assert values["components"][0]["directory"] == str((place / "native" / "FL2VA" / "transformer").resolve())


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_outline_needs_no_tensor_file(place: Path, copied: Callable[[str], Path], layout: str, kind: str) -> None:
    root = copied(f"{layout}.{kind}")
    student = Checkpoint.open(root)
    for file in root.glob("*.safetensors"):
        file.unlink()
    outline = Outline.read(root)
    assert (outline.student, outline.partitions) == (student.student, ("fl2va",))
    assert outline.dimensions == student.dimensions
    assert {name: one.shape for name, one in outline.parameters["denoiser"].items()} == {
        name: weight.shape for name, weight in student.parameters("denoiser").items()
    }
    headers = student.catalogue("denoiser").files.headers
    stored = sum(one.nbytes for header in headers for one in header.tensors.values())
    if kind == "fasth3_v2":
        assert outline.stored_bytes("denoiser") == stored
    else:
        assert 0 <= outline.stored_bytes("denoiser") - stored < 20_000  # the header of the fused file


RULES: dict[str, tuple[dict[str, Any], str]] = {
    "schema_version": ({"schema_version": 2}, "schema_version"),
    "an unknown key": ({"notes": "x"}, "notes: expected Extra inputs are not permitted"),
    "no base": ({"base": None}, "base: expected Field required, found nothing"),
    "a base elsewhere": ({"base__path": "../nowhere"}, "base.path: expected the base checkpoint's directory"),
    "a base that is a student": ({"base__path": "../native.fasth3_v1_dense"}, "no student itself"),
    "a base at no path": ({"base__path": "a\0b"}, "base.path: expected String should match"),
    "a base in a loop of links": ({"base__path": "../loop"}, "path: expected the path of a directory"),
    "another base": ({"base__path": "../diffusers"}, "base.fingerprint: expected .* as it was made from"),
    "a path for a file": ({"transformer__file": "../x.safetensors"}, "must be the name of a .safetensors file"),
    "a pickle": ({"transformer__file": "transformer.pt"}, "must be the name of a .safetensors file"),
    "a size": ({"transformer__bytes": 5}, r"transformer.bytes: expected \d+, as transformer"),
    "another kind": ({"transformer__kind": "merged"}, "transformer: expected Input tag 'merged'"),
    "another family": ({"distilled__family": "turbo"}, "a fused transformer of family turbo"),
    "another task": ({"distilled__tasks": ["t2va", "fl2va"]}, r"a student's must be \['t2va'\]"),
    "a rising schedule": (
        {"distilled__schedule__positions": [0.9, 0.95, 0.5, 0.25, 0.0]},
        "distilled.schedule: expected Value error, positions .* must fall strictly",
    ),
    "a schedule of very many steps": (
        {"distilled__schedule__forwards": 10**30, "distilled__schedule__positions": None},
        "distilled.schedule.forwards: expected Input should be less than or equal to 200",
    ),
    "a shift that leaves float32": ({"distilled__schedule__video_shift": 1e300}, "sigmas that differ in float32"),
    "a short schedule": ({"distilled__schedule__forwards": 3}, "5 positions for 3 forwards"),
    "an infinite shift": ({"distilled__schedule__video_shift": 1e999}, "Infinity is not a JSON number"),
    "a name": ({"distilled__name": "Fast H3"}, "distilled.name"),
    "gates that are not there": (
        {"distilled__video_sparse": {"tile": 64, "sparsity": 0.9}},
        r"blocks.0.attn.to_gate_compress.weight: expected BF16 \[1024, 192\], found no such tensor",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_student_json_is_strict(rule: str, place: Path, copied: Callable[[str], Path]) -> None:
    changes, reason = RULES[rule]
    root = copied("native.fasth3_v1_dense")
    (root.parent / "loop").symlink_to(root.parent / "loop")
    (root.parent / "native.fasth3_v1_dense.again").symlink_to(place / "native.fasth3_v1_dense")
    with pytest.raises(CheckpointError, match=reason) as caught:
        Checkpoint.open(edited(root, **changes))
    assert str(caught.value.file).startswith(str(root))


def test_a_whole_transformer_has_gates(copied: Callable[[str], Path]) -> None:
    """One without would be the base's own, of which nothing could tell the student apart."""
    root = edited(copied("diffusers.fasth3_v2"), transformer__path="../diffusers/transformer")
    with pytest.raises(CheckpointError, match="a whole transformer of no sparse attention"):
        Checkpoint.open(edited(root, distilled__video_sparse=None))


@pytest.mark.parametrize("read", [Checkpoint.open, Outline.read])
def test_a_student_of_itself_is_refused(read: Callable[[Path], object], copied: Callable[[str], Path]) -> None:
    root = edited(copied("native.fasth3_v1_dense"), base__path=".")
    with pytest.raises(CheckpointError, match="no student itself"):
        read(root)


def test_gates_that_the_schedule_does_not_declare_are_refused(copied: Callable[[str], Path]) -> None:
    root = edited(copied("native.fasth3_v1_vsa"), distilled__video_sparse=None)
    with pytest.raises(CheckpointError, match=r"to_gate_compress\.weight: expected only tensors of the configured"):
        Checkpoint.open(root)


def rewritten(root: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The student's file with tensors changed, and student.json right about its size."""
    (file,) = root.glob("*.safetensors")
    tensors = {key: materialise(one).clone() for key, one in read_header(file).tensors.items()}
    change(tensors)
    write_tensors(file, tensors, {})
    return edited(root, transformer__bytes=file.stat().st_size)


def test_a_file_of_other_tensors_is_refused(copied: Callable[[str], Path]) -> None:
    key = "blocks.0.attn.out_proj.weight"
    root = copied("native.fasth3_v1_dense")
    rewritten(root, lambda tensors: tensors.update({key: torch.zeros(192, 192, dtype=torch.bfloat16)}))
    with pytest.raises(CheckpointError, match=rf"{key}: expected BF16 \[192, 1024\], found BF16 \[192, 192\]"):
        Checkpoint.open(root)
    rewritten(root, lambda tensors: tensors.update({key: torch.zeros(192, 1024)}))
    with pytest.raises(CheckpointError, match=rf"{key}: expected BF16 .*, found F32"):
        Checkpoint.open(root)
    rewritten(root, lambda tensors: tensors.update({"surprise": tensors.pop(key)}))
    with pytest.raises(CheckpointError, match="surprise: expected only tensors of the configured model"):
        Checkpoint.open(root)


def test_a_truncated_file_is_refused(copied: Callable[[str], Path]) -> None:
    root = copied("native.fasth3_v1_dense")
    (file,) = root.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 2)
    with pytest.raises(CheckpointError, match=r"\(truncated\)"):
        Checkpoint.open(root)


def test_a_base_with_other_data_is_told_by_its_sample(place: Path, tmp_path: Path) -> None:
    """Its headers are the same: the fingerprint says nothing, and fused tensors would be of other weights."""
    shutil.copytree(place / "native", tmp_path / "native")
    shutil.copytree(place / "native.fasth3_v1_dense", tmp_path / "student")
    file = tmp_path / "native" / "FL2VA" / "transformer" / "model-00002-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[len(raw) * (SAMPLES // 2) // SAMPLES] ^= 1
    file.write_bytes(raw)
    student = Checkpoint.open(tmp_path / "student")
    assert student.fingerprint == Checkpoint.open(place / "native.fasth3_v1_dense").fingerprint
    with pytest.raises(CheckpointError, match=r"base\.sample: expected .* with the data it was made from"):
        student.sample  # noqa: B018


def test_a_transformer_of_other_sizes_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "native", tmp_path / "native")
    shutil.copytree(place / "native.fasth3_v2", tmp_path / "student")
    config = tmp_path / "native" / ARTIFACTS / FOLDERS["fasth3_v2"] / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"norm_eps": 1e-05', '"norm_eps": 1e-06'))
    with pytest.raises(CheckpointError, match="configuration: expected the configuration of the base's transformer"):
        Checkpoint.open(tmp_path / "student")


def test_the_published_folder_alone_is_refused_with_the_command(place: Path) -> None:
    folder = place / "native" / ARTIFACTS / FOLDERS["fasth3_v2"]
    for read in (Checkpoint.open, Outline.read):
        with pytest.raises(CheckpointError, match=rf"h3trt adapters fuse {folder} --checkpoint BASE --out DIRECTORY"):
            read(folder)


def run(*arguments: str | Path) -> Result:
    environment = {"COLUMNS": "200", "TERM": "dumb"}
    return CliRunner().invoke(app, ["adapters", "fuse", *map(str, arguments)], env=environment)


def test_the_command_makes_a_student(place: Path, tmp_path: Path) -> None:
    artifact = place / "native" / ARTIFACTS / FOLDERS["fasth3_v1_dense"]
    result = run(artifact, "--checkpoint", place / "native", "--out", tmp_path / "new" / "student")
    assert result.exit_code == Exit.OK, result.output
    assert "fasth3-4-step-preview-v1-dense-datafree, 8.8 MB beside" in result.stdout
    made, known = Checkpoint.open(tmp_path / "new" / "student"), Checkpoint.open(place / "native.fasth3_v1_dense")
    assert made.fingerprint == known.fingerprint
    again = run(artifact, "--checkpoint", place / "native", "--out", tmp_path / "new" / "student")
    assert (again.exit_code, "not empty; a student is written into" in again.stderr) == (Exit.USAGE, True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["student"]
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / "new" / "student")])
    assert f"of the base {(place / 'native').resolve()}: 4 forwards" in inspected.stdout


@pytest.mark.parametrize("name", ["turbo_4step", "turbo_ref2v", "flashgen"])
def test_what_requests_choose_is_not_fused_for_good(name: str, place: Path, tmp_path: Path) -> None:
    artifact = place / "native" / ARTIFACTS / FOLDERS[name]
    result = run(artifact, "--checkpoint", place / "native", "--out", tmp_path / "student")
    assert result.exit_code == Exit.CHECKPOINT
    assert f"h3trt engines build --checkpoint {place / 'native'} --adapter {artifact}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_student_is_no_base(place: Path, tmp_path: Path) -> None:
    artifact = place / "native" / ARTIFACTS / FOLDERS["fasth3_v1_dense"]
    result = run(artifact, "--checkpoint", place / "native.fasth3_v1_dense", "--out", tmp_path / "student")
    assert result.exit_code == Exit.CHECKPOINT
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_fusion_leaves_nothing(place: Path, tmp_path: Path) -> None:
    base = Checkpoint.open(place / "native")
    artifact = open_artifact(place / "native" / ARTIFACTS / FOLDERS["fasth3_v1_dense"], base)

    def interrupt(key: str, written: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fuse(artifact, base, tmp_path / "student", interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changed", ["base", "artifact"])
def test_what_changes_while_it_is_fused_makes_no_student(changed: str, place: Path, tmp_path: Path) -> None:
    """Its tensors are read by the offsets, and trusted by the hash, that were there before."""
    root = Path(shutil.copytree(place / "native", tmp_path / "native"))
    base = Checkpoint.open(root)
    artifact = open_artifact(root / ARTIFACTS / FOLDERS["fasth3_v1_dense"], base)
    file = next(base.catalogue("denoiser").files.listing.parent.glob("*.safetensors"))

    def change(key: str, written: int, size: int) -> None:
        target = file if changed == "base" else artifact.path
        with target.open("r+b") as opened:
            opened.seek(target.stat().st_size // 2)  # where a sample has a piece
            opened.write(b"\x80\x3f")

    with pytest.raises(FusionError, match="has changed since it was opened"):
        fuse(artifact, base, tmp_path / "student", change)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_only_a_student_s_own_remains_are_cleared_up(place: Path, tmp_path: Path) -> None:
    base = Checkpoint.open(place / "native")
    artifact = open_artifact(place / "native" / ARTIFACTS / FOLDERS["fasth3_v2"], base)
    other = tmp_path / ".student.fusing-running"
    other.mkdir()
    fuse(artifact, base, tmp_path / "s*")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".student.fusing-running", "s*"]


def test_a_link_to_an_empty_directory_is_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "student").symlink_to(tmp_path / "disk")
    base = Checkpoint.open(place / "native")
    artifact = open_artifact(place / "native" / ARTIFACTS / FOLDERS["fasth3_v2"], base)
    made = fuse(artifact, base, tmp_path / "student")
    assert made.fingerprint == Checkpoint.open(tmp_path / "disk").fingerprint


KILLED = """
import os, signal, sys
from pathlib import Path
from export.artifacts import open_artifact
from export.artifacts.fuse import fuse
from export.checkpoint import Checkpoint
base = Checkpoint.open(sys.argv[1])
kill = lambda *event: os.kill(os.getpid(), signal.SIGKILL)
fuse(open_artifact(sys.argv[2], base), base, Path(sys.argv[3]), kill)
"""


def test_a_killed_fusion_makes_no_student_and_the_next_one_clears_up(place: Path, tmp_path: Path) -> None:
    artifact, out = place / "native" / ARTIFACTS / FOLDERS["fasth3_v1_dense"], tmp_path / "student"
    command = [sys.executable, "-c", KILLED, str(place / "native"), str(artifact), str(out)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".student.fusing-")
    assert not (left / "student.json").exists()
    base = Checkpoint.open(place / "native")
    fuse(open_artifact(artifact, base), base, out)
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


def test_a_full_disk_is_told_and_leaves_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Checkpoint.open(place / "native")
    artifact = open_artifact(place / "native" / ARTIFACTS / FOLDERS["fasth3_v1_dense"], base)
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(FusionError, match="bytes needed, 1,000 free on its disk"):
        fuse(artifact, base, tmp_path / "student")
    assert list(tmp_path.iterdir()) == []


def merged(root: Path, tmp_path: Path, **declared: Any) -> Path:
    """The miniature as an export that was merged with an adapter: model_index.json says so."""
    directory = tmp_path / "merged"
    directory.mkdir()
    shutil.copytree(root / "FL2VA", directory / "FL2VA")
    file = directory / "FL2VA" / "model_index.json"
    index = json.loads(file.read_text())
    index["_minimax_h3"] |= {"base_schedule": [1.0, 0.7, 0.4, 0.15, 0.0], "tasks": ["t2va"]} | declared
    file.write_text(json.dumps(index))
    return directory


def test_a_merged_export_pins_its_schedule(root: Path, tmp_path: Path) -> None:
    directory = merged(root, tmp_path)
    checkpoint = Checkpoint.open(directory)
    student = checkpoint.student
    assert student is not None
    assert (student.family, student.name, student.tasks) == ("merged", "merged", ("t2va",))
    assert student.schedule.positions == (1, 0.7, 0.4, 0.15, 0)
    assert (student.schedule.forwards, student.schedule.video_shift, student.schedule.audio_shift) == (4, 12, 3)
    assert checkpoint.base is None
    assert Outline.read(directory).student == student
    shutil.copytree(root / "Ref2VA", directory / "Ref2VA")
    with pytest.raises(CheckpointError, match="base_schedule: expected that of fl2va, or to be opened by its own"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"base_schedule": [1.0, 0.7, 0.7, 0.0]}, "must fall strictly"),
        ({"base_schedule": [1.0, 0.5]}, "must fall strictly from at most 1 to exactly 0"),
        ({"base_schedule": [2.0, 0.0]}, "a list of numbers that fall from at most 1 to 0"),
        ({"base_schedule": [True, 0.0]}, "a list of numbers"),
        ({"base_schedule": "1,0.7,0"}, "a list of numbers"),
        ({"base_schedule": [0.0]}, "a list of numbers"),
        ({"tasks": ["ref2va"]}, r"_minimax_h3.tasks: expected some of \['t2va', 'fl2va'\]"),
        ({"tasks": []}, "_minimax_h3.tasks"),
        ({"base_schedule": [1 - step / 999 for step in range(1000)]}, "base_schedule: expected .* equal to 200"),
        ({"base_schedule": [1.0, 5e-324, 0.0]}, "share a float32 sigma"),
        ({"sigma_shift_scales": {"video": -1, "audio": 3}}, "sigma"),
        ({"sigma_shift_scales": {"video": 10**400, "audio": 3}}, "a positive sigma shift"),
    ],
)
def test_a_merged_export_s_declaration_is_checked(
    declared: dict[str, Any], reason: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(merged(root, tmp_path, **declared))
