"""The program's exit codes and error lines, as a script or a person sees them."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engines.profile import Profile
from engines.store import Begun
from export.checkpoint import Checkpoint
from export.checkpoint.summary import summarise
from export.miniature import write_miniature
from h3trt import console
from h3trt.cli import app
from h3trt.doctor import examine
from h3trt.exits import MEANINGS, Exit, exit_code
from runtime.refusal import RequestError
from runtime.request import parse_prompt
from triton_repo.errors import ServerError
from triton_repo.installation import triton_root

COMMANDS = [
    "checkpoint",
    "adapters",
    "export",
    "engines",
    "repo",
    "serve",
    "gateway",
    "generate",
    "verify",
    "inspect",
    "doctor",
    "demo",
]
SMALL = ["--aspect-ratio", "1:1", "--width", "256", "--height", "256", "--seconds", "4", "--forwards", "4"]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def _assert_one_line(result: Result, code: Exit, *parts: str) -> None:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_help_lists_every_command_and_exit_code() -> None:
    text = _run("--help").output
    for command in COMMANDS:
        assert f" {command} " in text
    for code, meaning in MEANINGS.items():
        assert f"{code:d}  {meaning[:40]}" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_options(command: str) -> None:
    result = _run(command, "--help")
    assert result.exit_code == Exit.OK
    options = [line for line in result.output.splitlines() if line.lstrip("│ ").startswith("--")]
    assert options
    for line in options:
        assert len(line.strip("│ ").split("  ")[-1].split()) > 1, f"{line} has no help"


def test_help_needs_no_exporter_and_no_torch() -> None:
    script = "import sys, h3trt.cli; print(sorted({'torch', 'diffusers', 'onnx', 'grpc'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(found) == []


@pytest.mark.parametrize("arguments", [[], ["--aspect-ratio", "1:1", "--seed", "x"], ["--no-such-option", "p"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert _run("generate", *arguments).exit_code == Exit.USAGE


def test_parameters_that_are_no_json_object() -> None:
    _assert_one_line(_run("generate", "p", "--params", "[1]"), Exit.USAGE, "must be a JSON object")


def test_no_server_names_the_command_that_starts_one() -> None:
    result = _run("generate", "p", *SMALL, "--url", "127.0.0.1:1")
    _assert_one_line(result, Exit.SERVER, "no server answers", "h3trt serve")


@pytest.mark.parametrize("command", [["serve"], ["repo"], ["generate", "p", "--local"]])
def test_a_missing_store_names_the_command_that_builds_it(command: list[str], tmp_path: Path) -> None:
    result = _run(*command, "--store", str(tmp_path / "none"))
    _assert_one_line(
        result, Exit.ENGINES, f"h3trt engines build --profile PROFILE --checkpoint CHECKPOINT --store {tmp_path}/none"
    )


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    result = _run("engines", "build", "--checkpoint", str(tmp_path / "none"), "--store", str(tmp_path / "store"))
    _assert_one_line(result, Exit.CHECKPOINT, str(tmp_path / "none"))


def test_an_unknown_profile_names_the_shipped_ones(tmp_path: Path) -> None:
    result = _run("engines", "build", "--profile", "none", "--store", str(tmp_path / "store"))
    _assert_one_line(result, Exit.USAGE, "none", "cpu")


def test_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    _assert_one_line(_run("checkpoint", "tiny", str(tmp_path)), Exit.USAGE, str(tmp_path), "not empty")


def test_released_dimensions_are_only_written_sparse(tmp_path: Path) -> None:
    result = _run("checkpoint", "tiny", str(tmp_path / "new"), "--released-dims")
    _assert_one_line(result, Exit.USAGE, "--sparse")


def test_inspect_of_nothing(tmp_path: Path) -> None:
    _assert_one_line(_run("inspect", str(tmp_path / "none")), Exit.USAGE, str(tmp_path / "none"))


def test_inspect_of_a_store_that_is_not_finished_names_the_command_that_goes_on(tmp_path: Path) -> None:
    Begun(checkpoint="/data/h3", fingerprint="0", sample="0", profile=Profile.load("cpu")).write(tmp_path)
    command = f"h3trt engines build --profile cpu --checkpoint /data/h3 --store {tmp_path} --resume"
    _assert_one_line(_run("inspect", str(tmp_path)), Exit.ENGINES, command)


def test_inspect_of_a_file_that_is_no_clip(tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(b"\0\0\0\x08free")
    _assert_one_line(_run("inspect", str(file)), Exit.VERIFICATION, f"{file}: mp4")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9"])
def test_a_plan_of_an_illegal_duration(seconds: str) -> None:
    result = _run("plan", "--profile", "cpu", f"--seconds={seconds}")
    _assert_one_line(result, Exit.USAGE, f"seconds = {float(seconds):g}: must be from 4 to 15")


def test_a_plan_is_written_into_a_new_folder(tmp_path: Path) -> None:
    file = tmp_path / "new" / "plan.json"
    assert _run("plan", "--profile", "cpu", "--json", str(file)).exit_code == Exit.OK
    assert json.loads(file.read_text())["profile"] == "cpu"


def test_doctor_says_what_mends_a_missing_store(tmp_path: Path) -> None:
    result = _run("doctor", "--store", str(tmp_path / "none"))
    assert result.exit_code == Exit.SERVER
    assert f"h3trt engines build --profile PROFILE --checkpoint CHECKPOINT --store {tmp_path}/none" in result.stderr


def test_doctor_tells_a_missing_package_and_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h3trt.doctor.importlib.metadata.requires", lambda name: ['nonesuch>=1; extra == "serve"'])
    monkeypatch.setattr("triton_repo.installation.LIBPYTHON", "libpython0.0.so")
    checks = {check.name: check for check in examine(tmp_path, Profile.load("cpu"))}
    assert not checks["nonesuch [serve]"].good
    assert "pip install 'nonesuch>=1'" in checks["nonesuch [serve]"].remedy
    assert not checks["tritonserver"].good
    assert "apt-get install libpython" in checks["tritonserver"].remedy


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_in_order(number: signal.Signals, tmp_path: Path) -> None:
    """A command that waits for an answer: the address accepts connections and never says anything."""
    script = (
        "import socket, sys, threading; from h3trt.cli import main\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "url = '127.0.0.1:%d' % listener.getsockname()[1]\n"
        # A connection that nobody keeps is closed.
        "kept = []\n"
        "def say(): kept.append(listener.accept()); print('waiting', flush=True)\n"
        "threading.Thread(target=say, daemon=True).start()\n"
        "sys.argv = ['h3trt', 'generate', 'p', '--url', url]; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == Exit.CANCELLED
    assert errors.startswith("error: ")
    assert "Traceback" not in errors


def test_a_table_shows_its_cells_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.table("the [bold]title", ("[what]",), [("av [serve]",), ("ends with \\",)])
    shown = capsys.readouterr().out
    for text in ("the [bold]title", "[what]", "av [serve]", "ends with \\ "):
        assert text in shown


def test_a_missing_triton_names_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"not installed; run: make setup \(or, .*pip install -e '\.\[serve\]'\)"):
        triton_root()


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        ("export.binding", "BindingError", Exit.CHECKPOINT),
        ("export.graphs.model", "ConsumptionError", Exit.CHECKPOINT),
        ("export.emit", "EmitError", Exit.ENGINES),
        ("export.compare", "CompareError", Exit.ENGINES),
        ("export.bake", "BakeError", Exit.ENGINES),
        ("export.passes.name_tensors", "DeclarationError", Exit.ENGINES),
        ("engines.backends.inductor", "CompileError", Exit.ENGINES),
        ("engines.backends.onnxruntime", "LoweringError", Exit.ENGINES),
        ("engines.build", "BuildError", Exit.ENGINES),
        ("engines.plan", "PlanError", Exit.USAGE),
        ("export.linears", "LinearsError", Exit.ENGINES),
        ("export.sidecar", "SidecarError", Exit.ENGINES),
        ("export.low_rank", "LowRankError", Exit.CHECKPOINT),
        ("engines.switchable", "SwitchableError", Exit.CHECKPOINT),
        ("engines.backends.tensorrt.request", "PlanError", Exit.ENGINES),
        ("engines.backends.tensorrt.request", "CensusError", Exit.ENGINES),
        ("engines.layers", "LayersError", Exit.ENGINES),
        ("engines.tensorrt", "TensorRTMissing", Exit.ENGINES),
        ("engines.sessions.backend", "EngineRunError", Exit.ENGINES),
        ("engines.sessions.gpu", "PinError", Exit.USAGE),
    ],
)
def test_an_error_of_a_build_or_of_its_engines_has_its_code(module: str, name: str, code: Exit) -> None:
    error = getattr(importlib.import_module(module), name)
    assert exit_code(error("graph block: what is wrong")) == code


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directory: Path, layout: str, seed: int, artifacts: bool) -> None:
        raise OSError(28, "No space left on device", str(directory / "model.safetensors"))

    monkeypatch.setattr("export.miniature.write_miniature", full)
    result = _run("checkpoint", "tiny", str(tmp_path))
    _assert_one_line(result, Exit.USAGE, f"{tmp_path}/model.safetensors: No space left on device")


@pytest.mark.parametrize(("out", "rule"), [("", "is a directory"), ("file/a/clip.mp4", "file is not a directory")])
def test_an_impossible_output_is_refused_before_the_work(out: str, rule: str, tmp_path: Path) -> None:
    """The address is nobody's: a command that got as far as asking would end with another code."""
    (tmp_path / "file").touch()
    result = _run("generate", "p", *SMALL, "--url", "127.0.0.1:1", "--out", str(tmp_path / out))
    _assert_one_line(result, Exit.USAGE, f"{tmp_path / out}: ", rule)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = _run("generate", "p", *SMALL, "--url", "127.0.0.1:1", "--out", str(tmp_path / "a" / "clip.mp4"))
    _assert_one_line(result, Exit.USAGE, "is not writable")


def test_the_demonstration_misses_triton_before_it_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_repo.installation.LIBPYTHON", "libpython0.0.so")
    result = _run("demo", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "demo.mp4"))
    assert result.exit_code == Exit.SERVER
    assert "apt-get install libpython" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_is_not_utf_8_is_refused_before_it_is_sent() -> None:
    """The address is nobody's; the text is that of the check on the server."""
    prompt = os.fsdecode(b"a fox \xff")
    with pytest.raises(RequestError) as wanted:
        parse_prompt(prompt)
    _assert_one_line(_run("generate", prompt, *SMALL, "--url", "127.0.0.1:1"), Exit.USAGE, str(wanted.value))


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature checkpoint with a list of the hash of one of its files."""
    root = tmp_path_factory.mktemp("miniature") / "checkpoint"
    write_miniature(root, "native", 0)
    file = next(root.rglob("*.safetensors")).relative_to(root)
    (root / "SHA256SUMS").write_text(f"{hashlib.sha256((root / file).read_bytes()).hexdigest()}  {file}\n")
    return root


def test_inspect_of_a_checkpoint_lists_every_component(miniature: Path) -> None:
    result = _run("inspect", str(miniature))
    assert result.exit_code == Exit.OK, result.output
    for part in summarise(Checkpoint.open(miniature)).components:
        cells = (part.component, part.partition, f"{part.tensors:,}", f"{part.nbytes:,}")
        assert any(all(f" {cell} " in line for cell in cells) for line in result.stdout.splitlines())
        assert all(f"{name} " in result.stdout for name in part.dtypes)


def test_inspect_verifies_the_hashes_of_a_checkpoint(miniature: Path, tmp_path: Path) -> None:
    result = _run("inspect", str(miniature), "--verify-hashes")
    assert result.exit_code == Exit.OK, result.output
    assert "1 files have the SHA-256" in result.stdout
    copy = shutil.copytree(miniature, tmp_path / "copy")
    sums = (copy / "SHA256SUMS").read_text()
    (copy / "SHA256SUMS").write_text("0" * 64 + sums[64:])
    changed = _run("inspect", str(copy), "--verify-hashes")
    assert changed.exit_code == Exit.CHECKPOINT
    assert "sha256" in changed.stderr


def test_only_a_checkpoint_has_hashes_to_verify(tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.touch()
    _assert_one_line(_run("inspect", str(file), "--verify-hashes"), Exit.USAGE, str(file), "not a checkpoint")
