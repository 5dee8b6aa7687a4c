"""Programs compiled by inductor: real packages of the small checkpoint, opened and run on this machine's CPU."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.backends import inductor as compiler
from engines.build import build
from engines.inductor_steps import compiled_from
from engines.profile import Partition, Profile, ProfileError
from engines.sessions.engine_set import EngineInputError, EngineSet
from engines.sessions.inductor import open_package
from engines.steps import StepEvent
from engines.store import EngineStore, StoreError
from export.binding import bind
from plugins.ops import all_reduce
from tests.engines import small_checkpoint
from tests.engines.conftest import use_small_graphs
from tests.engines.small_checkpoint import SmallCheckpoint
from tests.engines.workshop import Workshop, write_profile

needs_compiler = pytest.mark.skipif(compiler.missing_compiler() is not None, reason=str(compiler.missing_compiler()))

# float32 against float64: inner products of at most 16 items and a softmax over 40 rows, on values of order 1.
TOLERANCE = 5e-6


def draw(rows: int) -> torch.Tensor:
    return torch.randn(rows, small_checkpoint.WIDTH, generator=torch.Generator().manual_seed(rows))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A workshop with a finished store of compiled programs."""
    made = Workshop(tmp_path_factory.mktemp("inductor"))
    small_checkpoint.write(made.checkpoint, seed=3)
    write_profile(made.profile, backend='"inductor"', partitions='["fl2va", "ref2va"]')
    with pytest.MonkeyPatch.context() as patch:
        use_small_graphs(patch)
        made.build()
        yield made


@pytest.fixture
def store(compiled: Workshop, tmp_path: Path) -> Path:
    """A copy of the store, to be damaged."""
    return shutil.copytree(compiled.store, tmp_path / "store")


@needs_compiler
@pytest.mark.parametrize("partition", ["fl2va", "ref2va"])
def test_each_instance_runs_with_its_own_weights_at_any_size(compiled: Workshop, partition: Partition) -> None:
    engines = EngineSet.open(compiled.store)
    checkpoint = SmallCheckpoint(compiled.checkpoint)
    for instance in (0, 1):
        for rows in (2, 40, 7):
            found = engines.run("attend", {"hidden": draw(rows)}, instance, partition)["mixed"]
            wanted = small_checkpoint.expected(checkpoint, partition, instance, draw(rows))
            assert (found - wanted).abs().max() < TOLERANCE


@needs_compiler
def test_instances_may_have_weights_of_other_sizes(compiled: Workshop) -> None:
    engines = EngineSet.open(compiled.store, graphs=["table"])
    stored = SmallCheckpoint(compiled.checkpoint).stored("denoiser")
    inputs = {"rows": draw(4), "index": torch.tensor([3, 0])}
    for instance in range(len(small_checkpoint.TABLE_FEATURES)):
        weight = small_checkpoint.value(stored[f"tables.{instance}.weight"]).double()
        found = engines.run("table", inputs, instance)["features"]
        assert (found - draw(4).double()[[3, 0]] @ weight.T).abs().max() < TOLERANCE


@needs_compiler
def test_a_given_output_is_written_in_place_and_others_own_their_memory(compiled: Workshop) -> None:
    engines = EngineSet.open(compiled.store, graphs=["attend"])
    target = torch.full((9, small_checkpoint.WIDTH), torch.nan)
    result = engines.run("attend", {"hidden": draw(9)}, outputs={"mixed": target})["mixed"]
    own = engines.run("attend", {"hidden": draw(9)})["mixed"]
    assert result.data_ptr() == target.data_ptr() != own.data_ptr()
    assert torch.equal(target, own)


@needs_compiler
def test_a_second_build_compiles_nothing(compiled: Workshop) -> None:
    assert compiled.build().built == ()


@needs_compiler
def test_a_package_holds_code_and_json_and_nothing_pickled(compiled: Workshop) -> None:
    for record in EngineStore.open(compiled.store).manifest.graphs.values():
        with zipfile.ZipFile(compiled.store / record.file.path) as package:
            suffixes = {Path(name).suffix for name in package.namelist()}
            pickled = [name for name in package.namelist() if package.read(name)[:1] == b"\x80"]
        assert ".so" in suffixes
        assert not suffixes & {".pkl", ".pt", ".pth", ".bin"}
        assert pickled == []


@needs_compiler
def test_a_program_links_the_runtime_of_this_process(compiled: Workshop) -> None:
    """One with a C++ runtime of its own ends the process that loads it (seen with torch 2.11 on a GPU host)."""
    for record in EngineStore.open(compiled.store).manifest.graphs.values():
        with zipfile.ZipFile(compiled.store / record.file.path) as package:
            (library,) = (package.read(name) for name in package.namelist() if name.endswith(".wrapper.so"))
        assert b"libstdc++.so.6\0" in library


@needs_compiler
def test_what_a_program_calls_as_it_is_is_on_record(compiled: Workshop) -> None:
    graphs = EngineStore.open(compiled.store).manifest.graphs
    found = {name: record.program.census for name, record in graphs.items() if record.program}
    assert found == {"attend": {"h3::Attention": 1}, "table": {}}


@needs_compiler
def test_a_changed_package_is_not_loaded(store: Path) -> None:
    path = store / EngineStore.open(store).manifest.graphs["attend"].file.path
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreError, match="is not the file that was built: SHA-256"):
        EngineSet.open(store)


@needs_compiler
def test_a_program_of_another_processor_is_refused_with_the_command_that_rebuilds(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["graphs"]["table"]["program"]["target"] = "Z80"
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"graph table is compiled for Z80, but here is .*h3trt engines build"):
        EngineSet.open(store)


@needs_compiler
def test_a_size_beyond_what_was_compiled_is_refused(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["graphs"]["attend"]["program"]["ranges"]["rows"]["maximum"] = 8
    (store / "manifest.json").write_text(json.dumps(manifest))
    engines = EngineSet.open(store)
    engines.run("attend", {"hidden": draw(8)})
    with pytest.raises(EngineInputError, match="rows = 9: must be at most 8"):
        engines.run("attend", {"hidden": draw(9)})


@pytest.mark.soak
@needs_compiler
def test_weights_of_an_instance_may_be_in_the_package(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "checkpoint", seed=3)
    checkpoint = SmallCheckpoint(tmp_path / "checkpoint")
    graph = next(g for g in small_checkpoint.graphs(checkpoint, None, "fl2va", tmp_path) if g.name == "attend")
    binding = bind(graph)
    stored = [small_checkpoint.value(binding.instances[0][spec.name]) for spec in binding.inputs]
    package = tmp_path / "program.pt2"
    ranges = compiler.ranges(graph, binding, {})
    compiler.compile_graph(graph, binding, ranges, torch.device("cpu"), package, stored)
    (found,) = open_package(package, torch.device("cpu")).run([draw(9)])
    assert (found - small_checkpoint.expected(checkpoint, "fl2va", 0, draw(9))).abs().max() < TOLERANCE


def test_a_handle_of_a_group_stays_on_the_host_of_a_program_for_a_device() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
            return all_reduce.OP(x + 1, group, 2)

    program = torch.export.export(Sum(), (torch.zeros(3), torch.zeros(1, dtype=torch.int64)), strict=False)
    lowered = compiler.lower(program, torch.device("meta"))
    places = {n.name: n.meta["val"].device.type for n in lowered.graph.nodes if n.op == "placeholder"}
    assert places == {"x": "meta", "group": "cpu"}
    assert [tensor.device.type for tensor in lowered.example_inputs[0]] == ["meta", "cpu"]
    assert compiler.census(lowered) == {"h3::all_reduce": 1}


def test_a_program_is_made_anew_with_another_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoint.write(tmp_path / "checkpoint", seed=3)
    profile = Profile.load(write_profile(tmp_path / "inductor.toml", backend='"inductor"'))
    graph, *_ = small_checkpoint.graphs(SmallCheckpoint(tmp_path / "checkpoint"), profile, "fl2va", tmp_path)
    before = compiled_from(graph, bind(graph), profile)
    assert before["toolchain"]["torch"] == torch.__version__
    monkeypatch.setattr(compiler, "_compiler_version", lambda: "g++ 99")
    assert compiled_from(graph, bind(graph), profile) != before


def test_a_host_without_a_compiler_puts_compiling_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Workshop(tmp_path)
    small_checkpoint.write(made.checkpoint, seed=4)
    write_profile(made.profile, backend='"inductor"')
    use_small_graphs(monkeypatch)
    monkeypatch.setattr(compiler, "missing_compiler", lambda: "run: apt-get install g++")
    events: list[StepEvent] = []
    report = build(made.checkpoint, made.profile, made.store, events.append)
    assert {step.name for step in report.deferred} == {"attend.compile", "table.compile", "manifest"}
    assert "table.emit" in report.built


def test_weights_inside_programs_are_refused(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "baked.toml", backend='"inductor"', weights='"baked"')
    with pytest.raises(ProfileError, match="weights = 'baked': must be 'bound' with backend = 'inductor'"):
        Profile.load(profile)
