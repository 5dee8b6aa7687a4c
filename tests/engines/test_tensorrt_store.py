"""Stores of TensorRT-RTX plans, really built for a card that is not here: what they say, and when they do not open."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from engines import backend, declaration, machine, tensorrt_steps
from engines.build import BuildError, BuildReport, build
from engines.layers import Layer, census
from engines.plan import PlanError
from engines.sessions.engine_set import EngineSet
from engines.steps import StepFailed
from engines.store import AxisRange, EngineStore, StoreError, rebuild_command
from h3trt.cli import app
from h3trt.exits import Exit
from tests.disks import file_system
from tests.engines import small_checkpoint
from tests.engines.gpu_workshop import build_gpu, use_small_gpu_graphs, write_gpu_profile

MODULE = [sys.executable, "-m", "tests.engines.gpu_workshop"]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store, kept aside; its files name the directory that `workshop` restores it to."""
    root = begin(tmp_path_factory.mktemp("gpu"))
    with pytest.MonkeyPatch.context() as patch:
        use_small_gpu_graphs(patch)
        build_gpu(root)
    shutil.copytree(root, root.with_name("gpu-pristine"))
    return root


@pytest.fixture
def workshop(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.rmtree(pristine)
    shutil.copytree(pristine.with_name("gpu-pristine"), pristine)
    use_small_gpu_graphs(monkeypatch)
    return pristine


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU that the profile is for."""
    monkeypatch.setattr(machine, "gpu_capabilities", lambda: ("8.9",))


def begin(root: Path) -> Path:
    small_checkpoint.write(root / "checkpoint", seed=1)
    write_gpu_profile(root / "gpu.toml")
    return root


def refusal(root: Path) -> str:
    with pytest.raises(StoreError) as refused:
        EngineStore.open(root / "store")
    return str(refused.value)


def rebuild(root: Path) -> str:
    return f"to rebuild, run: {rebuild_command(root / 'store', str(root / 'gpu.toml'), root / 'checkpoint')}"


def test_a_manifest_says_how_each_plan_was_made(workshop: Path) -> None:
    store = EngineStore.open(workshop / "store", to_run=False)
    assert store.manifest.versions["tensorrt_rtx"] == backend.backend_version("tensorrt_rtx")
    plan = store.manifest.graphs["block"].plan
    assert plan is not None
    assert plan.capabilities == ("8.9",)
    end = small_checkpoint.ROWS.maximum
    assert [dict(ranges) for ranges in plan.profiles] == [
        {"rows": AxisRange(minimum=small_checkpoint.ROWS.minimum, optimum=end, maximum=end)}
    ]
    assert plan.driver is None
    assert plan.seconds > 0
    assert plan.peak_host_bytes > 100 << 20
    assert plan.activation_bytes > 0
    layers = [Layer.model_validate(layer) for layer in json.loads(store.read(plan.layers))]
    assert census(layers) == plan.census
    assert plan.reproduce.endswith("--step block.plan")
    assert f"--store {workshop / 'store'}" in plan.reproduce


def test_a_second_build_has_nothing_to_do(workshop: Path) -> None:
    assert build_gpu(workshop).built == ()


def test_a_store_opens_where_its_card_is(workshop: Path, card: None) -> None:
    assert EngineStore.open(workshop / "store")


def test_a_machine_without_a_gpu_is_told_to_look(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_capabilities", lambda: ())
    name = workshop / "gpu.toml"
    assert refusal(workshop) == (
        f"{workshop / 'store'}: profile {name} runs on 1 GPUs, but 0 are found; run: h3trt doctor --profile {name}"
    )


def test_a_gpu_of_another_kind_is_refused_with_both_sides(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_capabilities", lambda: ("9.0",))
    assert refusal(workshop) == (
        f"{workshop / 'store'}: built for compute capability 8.9, but GPU 0 has 9.0; {rebuild(workshop)}"
    )


def test_another_release_of_tensorrt_is_refused_with_both_sides(
    workshop: Path, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = backend.backend_version("tensorrt_rtx")
    monkeypatch.setattr("engines.store.backend_version", lambda name: "1.99.0")
    assert refusal(workshop) == (
        f"{workshop / 'store'}: built for tensorrt_rtx {built}, but tensorrt_rtx 1.99.0 is installed; "
        f"{rebuild(workshop)}"
    )


def test_another_set_of_shapes_is_refused_with_both_sides(workshop: Path, card: None) -> None:
    write_gpu_profile(workshop / "gpu.toml", rows="[2048]")
    message = refusal(workshop)
    assert "built with shapes = {'rows': (40960, 65536, 81920, 110592)" in message
    assert f"but profile {workshop / 'gpu.toml'} has {{'rows': (2048,)" in message
    assert message.endswith(rebuild(workshop))


def test_another_checkpoint_is_refused(workshop: Path, card: None) -> None:
    file = workshop / "checkpoint" / "fl2va.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    message = refusal(workshop)
    assert f"weight file {file}" in message
    assert message.endswith(rebuild(workshop))


def test_ranks_that_exchange_nothing_are_refused(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of such engines would attend to its own rows alone, and nobody would see it."""
    monkeypatch.setattr(machine, "gpu_capabilities", lambda: ("8.9", "8.9"))
    profile = write_gpu_profile(workshop / "gpu.toml", "rtx4090x2")
    profile.write_text(profile.read_text().replace("text_encoder = 2", "text_encoder = 1"))
    build_gpu(workshop)
    assert "has ranks.ulysses = 2, but its engines are those of one rank" in refusal(workshop)


def test_an_engine_that_lacks_an_exchange_of_its_graph_is_refused(workshop: Path) -> None:
    """What its graph asks the other ranks for, it would make up."""
    manifest = json.loads((workshop / "store/manifest.json").read_text())
    manifest["graphs"]["block"]["census"]["h3::ulysses_all_to_all"] = 1
    profiles = len(manifest["graphs"]["block"]["plan"]["profiles"])
    manifest["graphs"]["block"]["plan"]["census"]["collective.all_to_all"] = profiles - 1
    (workshop / "store/manifest.json").write_text(json.dumps(manifest))
    message = f"graph block: its engine must have {profiles} exchanges between ranks, and {profiles - 1} are among"
    assert message in refusal(workshop)


def test_the_engines_do_not_open_either(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_capabilities", lambda: ("12.0",))
    with pytest.raises(StoreError, match=r"built for compute capability 8\.9, but GPU 0 has 12\.0"):
        EngineSet.open(workshop / "store")


def test_baked_plans_hold_the_weights_of_each_instance(workshop: Path) -> None:
    write_gpu_profile(workshop / "gpu.toml", weights='"baked"')
    build_gpu(workshop)
    store = EngineStore.open(workshop / "store", to_run=False)
    block = store.manifest.graphs["block"]
    assert len({store.read(file) for file in (*block.baked["fl2va"], block.file)}) == 3
    weights = {weight.name for weight in block.weights}
    assert weights & inputs_of(workshop, "engines/block.*.layers.json")
    for instance in range(block.instances):
        assert not weights & inputs_of(workshop, f"engines/fl2va/block.*.{instance}.layers.json")


def inputs_of(root: Path, layers: str) -> set[str]:
    (file,) = (root / "store").glob(layers)
    return {tensor["name"] for layer in json.loads(file.read_bytes()) for tensor in layer["inputs"]}


def test_a_profile_that_cannot_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_gpu_graphs(monkeypatch)
    root = begin(tmp_path)
    file = root / "gpu.toml"
    file.write_text(re.sub(r"(?m)^denoiser = \d+$", 'denoiser = "resident"', file.read_text()))
    with pytest.raises(PlanError, match=r"denoise needs [\d.]+ GB of 25\.76 GB on one GPU, [\d.]+ GB too much"):
        build_gpu(root)
    assert not (root / "store").exists()


@pytest.fixture
def put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build that was begun where TensorRT is missing."""
    use_small_gpu_graphs(monkeypatch)
    root = begin(tmp_path)

    def missing(name: str) -> str:
        raise backend.BackendMissing("tensorrt_rtx is not installed; run: pip install tensorrt-rtx-cu13")

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_steps, "backend_version", missing)
        report = build_gpu(root)
    assert {step.name: step.facts["deferred"] for step in report.deferred} == {
        "block.plan": "tensorrt_rtx is not installed; run: pip install tensorrt-rtx-cu13",
        "epilogue.plan": "tensorrt_rtx is not installed; run: pip install tensorrt-rtx-cu13",
        "manifest": "waits for block.plan",
    }
    return root


def test_a_store_whose_plans_were_put_off_does_not_open(put_off: Path, card: None) -> None:
    command = rebuild_command(put_off / "store", str(put_off / "gpu.toml"), put_off / "checkpoint")
    assert refusal(put_off).endswith(f"its build was begun and not finished; to go on, run: {command} --resume")


def test_a_host_without_the_exporter_finishes_what_was_put_off(put_off: Path) -> None:
    result = subprocess.run([*MODULE, str(put_off), "--resume"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ended = dict(reversed(line.split()) for line in result.stdout.splitlines() if line.startswith(("built", "reused")))
    assert {name for name, status in ended.items() if status == "reused"} >= {"block.emit", "block.compare"}
    assert ended["block.plan"] == ended["epilogue.plan"] == ended["manifest"] == "built"
    assert EngineStore.open(put_off / "store", to_run=False)


def test_other_libraries_do_not_do_again_what_is_resumed(put_off: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declaration, "versions", lambda: {"torch": "another"})
    assert "block.emit" not in build_gpu(put_off, resume=True).built
    assert "block.emit" in build_gpu(put_off).built


def test_nothing_is_resumed_with_another_profile_or_checkpoint(put_off: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gpu_profile(put_off / "gpu.toml", rows="[2048]")
    with pytest.raises(
        BuildError, match=r"was begun with profile .*; profile .* now differs from that in shapes; leave out --resume"
    ):
        build_gpu(put_off, resume=True)
    write_gpu_profile(put_off / "gpu.toml")
    other = small_checkpoint.SmallCheckpoint(put_off / "checkpoint", fingerprint="0" * 64)
    monkeypatch.setattr(small_checkpoint.SmallCheckpoint, "open", lambda path: other)
    with pytest.raises(BuildError, match=r"was begun with the checkpoint of fingerprint \w+ .*; leave out --resume"):
        build_gpu(put_off, resume=True)


def test_there_must_be_something_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_gpu_graphs(monkeypatch)
    with pytest.raises(StoreError, match="no build was begun here that could be resumed; leave out --resume"):
        build_gpu(begin(tmp_path), resume=True)


def test_a_build_killed_within_a_plan_leaves_nothing_half_done_and_the_next_one_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = begin(tmp_path)
    children = kill_within_first_plan(root)
    assert children, "the plan is built in a process of its own"
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert "its build was begun and not finished; to go on, run: h3trt engines build" in refusal(root)
    assert not list((root / "store").glob("engines/*.plan"))
    use_small_gpu_graphs(monkeypatch)
    report = build_gpu(root)
    assert "block.emit" not in report.built
    assert "block.plan" in report.built
    assert EngineStore.open(root / "store", to_run=False)
    assert not [path for path in (root / "store").rglob("*") if path.name.startswith(".") and path.name != ".lock"]
    assert not list((root / "store").glob("build/*.work"))


def kill_within_first_plan(root: Path) -> list[psutil.Process]:
    """Ends the building process by SIGKILL once its first plan has a phase; its children by then."""
    with subprocess.Popen([*MODULE, str(root)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("working block.plan"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
    return children


def test_two_builds_at_once_make_one_store(tmp_path: Path) -> None:
    root = begin(tmp_path)
    both = [subprocess.Popen([*MODULE, str(root)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("built block.plan" in text for text in said) == 1
    assert EngineStore.open(root / "store", to_run=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte, which holds the models but not the plans."""
    with file_system(tmp_path, "512k") as mounted:
        yield mounted


def test_a_full_disk_ends_the_build_and_more_room_lets_it_finish(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_gpu_graphs(monkeypatch)
    root = begin(tmp_path)

    def there() -> BuildReport:
        return build(root / "checkpoint", root / "gpu.toml", small_disk / "store")

    with pytest.raises(StepFailed, match="No space left on device"):
        there()
    assert not list((small_disk / "store").glob("engines/*.plan"))
    with pytest.raises(StoreError, match="its build was begun and not finished"):
        EngineStore.open(small_disk / "store")
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    there()
    assert EngineStore.open(small_disk / "store", to_run=False)


def test_the_program_refuses_to_serve_plans_without_their_card(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_capabilities", lambda: ())
    result = CliRunner().invoke(app, ["serve", "--store", str(workshop / "store")])
    assert result.exit_code == Exit.ENGINES
    assert "runs on 1 GPUs, but 0 are found" in result.stderr
