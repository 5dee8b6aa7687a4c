"""A plan's file is there only when its build has ended well, and nothing of a build outlives the one who asked."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from engines.backends.tensorrt.process import build_plan
from engines.backends.tensorrt.request import CensusError, Constant, Expected, PlanError, PlanRequest
from engines.tensorrt import TensorRTMissing
from tests.tensorrt.requests import attention, model, request

BLOCK = model(
    "g (bfloat16[rows, 64] x, bfloat16[64, 64] w) => (bfloat16[rows, 64] y)"
    " { [product] a = MatMul (x, w)  [activation] y = Tanh (a) }"
)


def children() -> list[psutil.Process]:
    """This process' children that have not ended."""
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_build_leaves_the_plan_alone_and_tells_what_it_took(tmp_path: Path) -> None:
    held = bytes(400 << 20)  # a process starts as a copy of the one that starts it
    seen: list[tuple[str, int, int]] = []
    result = build_plan(request(BLOCK, tmp_path), tmp_path / "plan", lambda *event: seen.append(event))
    assert files(tmp_path) == ["model.onnx", "plan"]
    assert (tmp_path / "plan").stat().st_mode & 0o777 == 0o644
    assert result.census["gemm.BFloat16"] == 1
    assert {node for layer in result.layers for node in layer.origins} == {"product", "activation"}
    assert 0 < result.seconds < 600
    assert len(held) > result.peak_host_bytes
    assert 100 << 20 < result.peak_host_bytes < 300 << 20  # its own, whatever this process holds
    phases = {name for name, _, _ in seen}
    assert all(0 <= done <= total for _, done, total in seen)
    assert all((phase, total, total) in seen for phase in phases for total in {t for n, _, t in seen if n == phase})
    assert children() == []


def test_the_messages_of_tensorrt_reach_the_log_but_not_those_without_a_meaning_for_us(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = model("g (float[rows, 8] x, int64[rows] i) => (float[rows, 8] y) { y = Gather (x, i) }")
    with caplog.at_level(logging.INFO, logger="tensorrt"):
        result = build_plan(request(source, tmp_path), tmp_path / "plan")
    assert any("Total Activation Memory" in record.message for record in caplog.records)
    assert any("Int64 binding" in record.message for record in caplog.records)
    assert result.warnings == ()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_weights_inside_come_from_where_they_lie(tmp_path: Path) -> None:
    """At an offset of a larger file, whose other bytes must not matter."""
    source = model("g (float[rows, 64] x) => (float[rows, 64] y) { [product] y = MatMul (x, w) }")
    weight = source.graph.initializer.add(name="w", dims=(64, 64), data_type=1, data_location=1)
    weight.external_data.add(key="location", value="nowhere")
    (tmp_path / "weights").write_bytes(b"\xff" * 4096 + bytes(64 * 64 * 4))
    place = Constant(file=tmp_path / "weights", offset=4096, nbytes=64 * 64 * 4)
    result = build_plan(request(source, tmp_path, constants={"w": place}), tmp_path / "plan")
    assert result.weights_bytes >= 64 * 64 * 4

    too_long = place.model_copy(update={"offset": 8192})
    with pytest.raises(PlanError, match=r"weight w: 16,384 bytes at 8,192 of .*weights cannot be read"):
        build_plan(request(source, tmp_path, constants={"w": too_long}), tmp_path / "other")
    short = place.model_copy(update={"nbytes": 16380})
    with pytest.raises(PlanError, match=r"weight w, 16,380 bytes of .*weights"):
        build_plan(request(source, tmp_path, constants={"w": short}), tmp_path / "other")
    with pytest.raises(PlanError, match=r"constants must say where each external initializer lies.*: w"):
        build_plan(request(source, tmp_path), tmp_path / "other")


def test_a_plan_that_is_not_what_was_asked_for_is_not_kept(tmp_path: Path) -> None:
    wanted = Expected(
        attention_nodes=("attend",), matmul_nodes={"product": "FP8"}, collective_nodes=("swap",), plugins=()
    )
    with pytest.raises(CensusError) as failed:
        build_plan(request(BLOCK, tmp_path, expected=wanted), tmp_path / "plan")
    assert "attention attend: expected one fused kernel, found no layer" in str(failed.value)
    assert "matrix product product: expected FP8, found " in str(failed.value)
    assert "(gemm.BFloat16, BFloat16, BFloat16)" in str(failed.value)
    assert "collective swap: expected one, found no layer" in str(failed.value)
    assert files(tmp_path) == ["model.onnx"]


def test_an_attention_that_fell_apart_is_not_taken_for_a_fused_one(tmp_path: Path) -> None:
    """Float32 attention is built from two products, both named after its node."""
    source = attention("float", 4, 64, decomposable=1)
    wanted = Expected(attention_nodes=("attend",), matmul_nodes={}, collective_nodes=(), plugins=())
    with pytest.raises(CensusError, match=r"attend: expected one fused kernel, found .*gemm\.Float"):
        build_plan(request(source, tmp_path, expected=wanted), tmp_path / "plan")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    asked = request(BLOCK, tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(PlanError, match=r"graph sample: .*the process that builds it ended with exit code 1"):
        build_plan(asked, tmp_path / "plan")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_build_that_dies_is_told_by_its_signal_and_last_messages(tmp_path: Path, number: signal.Signals) -> None:
    """As the kernel ends it when memory is short, and as a library's own check does."""

    def strike(phase: str, done: int, total: int) -> None:
        if running := children():
            os.kill(running[0].pid, number)

    with pytest.raises(PlanError) as died:
        build_plan(request(BLOCK, tmp_path), tmp_path / "plan", strike)
    assert f"graph sample: the process that builds it was ended by {number.name}; it last said:" in str(died.value)
    assert files(tmp_path) == ["model.onnx"]


def test_a_plan_that_was_there_outlives_a_failed_build(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(b"the last one")
    source = attention("float", 4, 64, decomposable=0)
    with pytest.raises(PlanError):
        build_plan(request(source, tmp_path), tmp_path / "plan")
    assert (tmp_path / "plan").read_bytes() == b"the last one"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_who_stops_listening_ends_the_build(tmp_path: Path, error: type[BaseException]) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        raise error

    with pytest.raises(error):
        build_plan(request(BLOCK, tmp_path), tmp_path / "plan", stop)
    assert children() == []
    assert files(tmp_path) == ["model.onnx"]


def test_a_package_that_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(TensorRTMissing, match="run: pip install 'tensorrt-cu13>=11,<12'"):
        build_plan(request(BLOCK, tmp_path, flavour="tensorrt"), tmp_path / "plan")


def run_elsewhere(asked: PlanRequest, plan: Path, before: str = "") -> subprocess.Popen[str]:
    """Builds in another process, which prints a line at the first sign of progress."""
    program = (
        f"import resource, sys\n{before}\n"
        "from pathlib import Path\n"
        "from engines.backends.tensorrt.process import build_plan\n"
        "from engines.backends.tensorrt.request import PlanRequest\n"
        f"build_plan(PlanRequest.model_validate_json(sys.argv[1]), Path({str(plan)!r}),"
        " lambda *event: print(*event, flush=True))\n"
    )
    command = [sys.executable, "-c", program, asked.model_dump_json()]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the write fails in the same place."""
    limit = (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    )
    asked = request(BLOCK, tmp_path)
    (tmp_path / "out").mkdir()
    failed = run_elsewhere(asked, tmp_path / "out" / "plan", limit)
    _, said = failed.communicate(timeout=60)
    assert failed.returncode != 0
    assert "PlanError" in said.splitlines()[-1]
    assert "File too large; the plan takes" in said.splitlines()[-1]
    assert files(tmp_path / "out") == []


def test_a_build_ends_when_the_process_that_asked_for_it_is_killed(tmp_path: Path) -> None:
    asking = run_elsewhere(request(BLOCK, tmp_path), tmp_path / "plan")
    assert asking.stdout is not None
    asking.stdout.readline()
    (building,) = psutil.Process(asking.pid).children()
    building.suspend()  # so that it cannot end by itself first
    asking.kill()
    asking.communicate(timeout=60)
    wait_until(lambda: not building.is_running() or building.status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "plan").exists()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_the_building_process_imports_no_torch() -> None:
    """Its memory is measured, and torch alone takes more than most builds."""
    program = "import sys, engines.backends.tensorrt.worker; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
