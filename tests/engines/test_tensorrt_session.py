"""The running half of the TensorRT back ends against recording bindings: what is set, in which order, from where."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.profile import Attention, Precision, Profile, Residency
from engines.sessions import engine_set
from engines.sessions.backend import EngineInputError, EngineRunError, Opening
from engines.sessions.engine_set import EngineSet
from engines.sessions.gpu import QUEUED
from engines.sessions.placement import place
from engines.sessions.tensorrt import TensorRTEngines
from engines.store import (
    AxisRange,
    AxisRecord,
    CheckpointRecord,
    EngineRecord,
    EngineStore,
    FileRecord,
    Manifest,
    PlanRecord,
    Region,
    StoreError,
    TensorRecord,
    WeightFile,
)
from plugins.op import Op
from plugins.ranks import Group, Loopback, ProcessGroup, handle_of
from plugins.tensorrt_plugin import Exchange
from tests.engines.fake_tensorrt import Bindings, HostGpu

LAYERS = 5
SCALES = {"block": [2.0, 3.0, 5.0, 7.0, 11.0], "epilogue": [13.0], "audio_decoder": [17.0]}
ROWS = [(1, 4), (5, 16)]
"""Ranges of the plans' two optimisation profiles."""


def plan(**changes: Any) -> dict[str, Any]:
    return {"inputs": ["hidden", "scale"], "outputs": ["out"], "activations": [100, 1000], **changes}


@dataclass
class Shop:
    """A store of pretended plans, and what opens it."""

    root: Path
    bindings: Bindings
    gpu: HostGpu
    census: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    """The plans' census."""

    def store(self, denoiser: str | int = "resident", weights: str = "bound", **plans: dict[str, Any]) -> EngineStore:
        """Scales lie one after another in the weight file, behind an odd byte."""
        data = b"\0" + b"".join(np.float32(scale).tobytes() for scales in SCALES.values() for scale in scales)
        (self.root / "weights").write_bytes(data)
        profile = Profile.model_construct(
            name="p", backend="tensorrt_rtx", weights=weights, partitions=("fl2va",), threads=1, memory="80%", gpus=1,
            precision=Precision(text_encoder="bfloat16", denoiser="bfloat16", video_decoder="bfloat16"),
            attention=Attention(blocks="dense", refiner="dense"),
            residency=Residency(
                text_encoder="resident", modulation="resident", denoiser=denoiser,  # type: ignore[arg-type]
                video_encoder="swapped", audio_encoder="swapped", video_decoder="resident", audio_decoder="swapped",
            ),
        )  # fmt: skip
        places = iter(range(1, len(data), 4))
        manifest = Manifest.model_construct(
            profile=profile,
            versions={"tensorrt_rtx": "1.7.0"},
            checkpoint=CheckpointRecord(root="c", layout="native", fingerprint="f"),
            graphs={name: self._record(name, weights, plans.get(name, plan())) for name in SCALES},
            weight_files=(WeightFile(path=str(self.root / "weights"), size=len(data), header_sha256="h"),),
            bindings={
                "fl2va": {n: tuple({"scale": Region(0, next(places), (1,))} for _ in s) for n, s in SCALES.items()}
            },
        )
        return EngineStore(self.root, manifest)

    def open(self, store: EngineStore, graphs: tuple[str, ...] = tuple(SCALES)) -> TensorRTEngines:
        return TensorRTEngines(Opening(store, graphs, ("fl2va",)), self.bindings.flavour(), self.gpu)

    def _record(self, name: str, weights: str, content: dict[str, Any]) -> EngineRecord:
        ranges = tuple({"rows": AxisRange(minimum=a, optimum=b, maximum=b)} for a, b in ROWS)
        bare = {**content, "inputs": ["hidden"]}
        baked = [self._file(f"{name}.{i}", {**bare, "scale": scale}) for i, scale in enumerate(SCALES[name])]
        return EngineRecord.model_construct(
            file=self._file(name, content),
            baked={"fl2va": tuple(baked)} if weights == "baked" else {},
            instances=len(SCALES[name]),
            inputs=(TensorRecord(name="hidden", dtype="float32", shape=("rows",)),),
            outputs=(TensorRecord(name="out", dtype="float32", shape=("rows",)),),
            weights=(TensorRecord(name="scale", dtype="float32", shape=(1,)),),
            axes={"rows": AxisRecord(minimum=1, maximum=100, multiple=1)},
            census=self.census,
            plan=PlanRecord.model_construct(capabilities=("8.9",), profiles=ranges, census=self.layers),
        )

    def _file(self, name: str, content: dict[str, Any]) -> FileRecord:
        data = json.dumps(content).encode()
        (self.root / name).write_bytes(data)
        return FileRecord(path=name, sha256=hashlib.sha256(data).hexdigest())


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, Bindings(), HostGpu())


def run(engines: TensorRTEngines, graph: str, instance: int, rows: int = 3) -> torch.Tensor:
    hidden = torch.arange(1.0, rows + 1)
    result = engines.run(graph, {"hidden": hidden}, instance, "fl2va", {})["out"]
    assert torch.equal(result, hidden * SCALES[graph][instance])
    return result


@pytest.mark.parametrize("denoiser", ["resident", "swapped", 0, 2])
@pytest.mark.parametrize("memory", [None, 0])
def test_every_instance_runs_with_its_own_weights_wherever_they_live(
    shop: Shop, denoiser: str | int, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory is not None:
        monkeypatch.setattr("engines.machine.memory_bytes", lambda: memory)
    engines = shop.open(shop.store(denoiser))
    for _ in range(2):
        for _ in range(2):
            for instance in range(LAYERS):
                run(engines, "block", instance)
                run(engines, "epilogue", 0)
        engines.leave(("block", "epilogue"))
    assert shop.gpu.trimmed == 2


@pytest.mark.parametrize("denoiser", ["resident", "swapped", 2])
def test_engines_of_further_tiers_share_the_weights_on_the_device(shop: Shop, denoiser: str | int) -> None:
    store = shop.store(denoiser)
    engines = shop.open(store)
    for instance in range(LAYERS):
        run(engines, "block", instance)
    alone = list(shop.gpu.allocated)
    shop.gpu.allocated.clear()
    manifest = store.manifest
    shared = {**manifest.bindings["fl2va"], "block.skip": manifest.bindings["fl2va"]["block"]}
    graphs = {**manifest.graphs, "block.skip": manifest.graphs["block"]}
    store = EngineStore(shop.root, manifest.model_copy(update={"graphs": graphs, "bindings": {"fl2va": shared}}))
    engines = shop.open(store, tuple(graphs))
    for instance in range(LAYERS):
        hidden = torch.arange(1.0, 4.0)
        for graph in ("block", "block.skip"):
            found = engines.run(graph, {"hidden": hidden}, instance, "fl2va", {})["out"]
            assert torch.equal(found, hidden * SCALES["block"][instance])
    weights = [size for size in shop.gpu.allocated if size not in (100, 1000)]
    assert sorted(weights) == sorted(size for size in alone if size not in (100, 1000))


@pytest.mark.parametrize(("flavour", "expected"), [("tensorrt", ["sage_attention"]), ("tensorrt_rtx", [])])
def test_plugins_are_registered_before_plans_that_have_them_are_opened(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, flavour: str, expected: list[str]
) -> None:
    registered: list[str] = []

    def register(module: object, name: str) -> None:
        assert not shop.bindings.engines
        registered.append(name)

    monkeypatch.setattr("engines.sessions.tensorrt.register", register)
    shop.census.update({"h3::sage_attention": 1, "h3::swiglu": 2, "::MatMul": 4})
    TensorRTEngines(Opening(shop.store(), tuple(SCALES), ("fl2va",)), shop.bindings.flavour(flavour), shop.gpu)
    assert registered == expected


def run_in(engines: TensorRTEngines, group: Group) -> None:
    inputs = {"hidden": torch.arange(1.0, 4.0), "group": torch.tensor([handle_of(group)])}
    found = engines.run("block", inputs, 1, "fl2va", {})["out"]
    assert torch.equal(found, inputs["hidden"] * SCALES["block"][1])


def test_plugins_of_a_plan_exchange_over_the_group_of_its_run(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle is no tensor of the plan. While it is opened, and no longer, its plugins can be made."""
    opened: list[Exchange] = []
    inside: list[bool] = []

    @contextmanager
    def exchanging(module: object, registry: object, ops: list[Op], exchange: Exchange) -> Iterator[None]:
        assert registry is shop.bindings.registry
        assert [op.name for op in ops] == ["ulysses_all_to_all"]
        opened.append(exchange)
        before = len(shop.bindings.engines)
        yield
        inside.append(len(shop.bindings.engines) == before + 1)

    monkeypatch.setattr("engines.sessions.tensorrt.exchanging", exchanging)
    shop.census["h3::ulysses_all_to_all"] = 1
    engines = TensorRTEngines(
        Opening(shop.store(), ("block",), ("fl2va",)), shop.bindings.flavour("tensorrt"), shop.gpu
    )
    assert inside == [True]
    for group in (Loopback(2), Loopback(2)):
        run_in(engines, group)
        assert [exchange.group for exchange in opened] == [group]


class Nccl(ProcessGroup):
    """A group of one rank, whose communicator is a piece of memory."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.memory = ctypes.create_string_buffer(8)

    def communicator(self) -> int:
        return ctypes.addressof(self.memory)


def test_collectives_of_a_plan_are_given_the_communicator_of_the_group_once(shop: Shop) -> None:
    shop.layers["collective.all_to_all"] = 4
    engines = shop.open(shop.store())
    group = Nccl()
    for _ in range(2):
        run_in(engines, group)
    (communicator,) = shop.bindings.engines[0].contexts[0].communicators
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert address(communicator, None) == group.communicator()
    with pytest.raises(EngineInputError, match=r"graph block: .* TensorRT's own collectives.* found Loopback"):
        run_in(engines, Loopback())


def test_one_plan_and_one_context_serve_all_instances(shop: Shop) -> None:
    engines = shop.open(shop.store())
    for instance in range(LAYERS):
        run(engines, "block", instance)
    assert [len(engine.contexts) for engine in shop.bindings.engines] == [1, 1, 1]
    runs = shop.bindings.engines[0].contexts[0].runs
    addresses = [each["scale"] for each in runs]
    assert len(set(addresses)) == LAYERS
    assert all(address % 4 == 0 for address in addresses), "aligned, though they are not in the file"


def test_shapes_are_set_before_the_run_and_the_profile_is_the_first_with_room(shop: Shop) -> None:
    engines = shop.open(shop.store())
    for rows in (3, 16, 5, 4, 4):
        run(engines, "block", 0, rows)
    (context,) = shop.bindings.engines[0].contexts
    assert [each["profile"] for each in context.runs] == [0, 1, 1, 0, 0]
    assert context.calls == ["shape", "shape", "run"] * 5


def test_activations_are_one_buffer_as_large_as_any_run_needs(shop: Shop) -> None:
    engines = shop.open(shop.store("resident", epilogue=plan(activations=[50, 500])))
    before = len(shop.gpu.allocated)
    for graph, rows in (("epilogue", 3), ("block", 4), ("epilogue", 16), ("block", 16), ("epilogue", 3), ("block", 1)):
        run(engines, graph, 0, rows)
    aligned = 256
    assert [n for n in shop.gpu.allocated[before:] if n != aligned] == [50, 100, 500, 1000]


def test_given_outputs_are_written_in_place(shop: Shop) -> None:
    engines = shop.open(shop.store())
    buffer = torch.zeros(8)
    outputs = {"out": buffer[2:5]}
    assert engines.run("block", {"hidden": torch.ones(3)}, 1, "fl2va", outputs)["out"] is outputs["out"]
    assert buffer.tolist() == [0, 0, 3, 3, 3, 0, 0, 0]


def test_the_host_is_never_more_than_a_few_runs_ahead(shop: Shop) -> None:
    engines = shop.open(shop.store())
    for instance in range(LAYERS):
        run(engines, "block", instance)
        assert shop.gpu.finished >= instance + 1 - QUEUED


@pytest.mark.parametrize(
    ("change", "rows", "error", "message"),
    [
        (
            {},
            17,
            EngineInputError,
            "graph block: rows = 17: must be within one of: rows from 1 to 4; rows from 5 to 16",
        ),
        ({"refuses": ["hidden"]}, 3, EngineRunError, "graph block at rows = 3: TensorRT refuses shape [3] of hidden"),
        ({"fails": True}, 3, EngineRunError, "graph block at rows = 3: TensorRT refuses the run"),
    ],
)
def test_a_refused_run_names_graph_sizes_and_ranges(
    shop: Shop, change: dict[str, Any], rows: int, error: type[Exception], message: str
) -> None:
    engines = shop.open(shop.store(block=plan(**change)))
    with pytest.raises(error) as refused:
        engines.run("block", {"hidden": torch.ones(rows)}, 0, "fl2va", {})
    assert message in str(refused.value)
    run(engines, "epilogue", 0)


def damaged(shop: Shop) -> None:
    shop.bindings.validity = ("INVALID", 1 | 2)


@pytest.mark.parametrize(
    ("content", "prepare", "reason"),
    [
        ({"refusal": "Version tag does not match"}, lambda shop: None, "Version tag does not match"),
        (plan(inputs=["hidden"]), lambda shop: None, "expected, ['hidden', 'out'] found"),
        (plan(), damaged, "version mismatch; unsupported cc"),
    ],
)
def test_a_plan_that_is_not_opened_says_both_sides_and_the_command(
    shop: Shop, content: dict[str, Any], prepare: Callable[[Shop], None], reason: str
) -> None:
    store = shop.store(block=content)
    prepare(shop)
    with pytest.raises(StoreError) as refused:
        shop.open(store)
    text = str(refused.value)
    assert reason in text
    assert "graph block" in text
    assert "built with tensorrt_rtx 1.7.0 for compute capability 8.9" in text
    assert "here is tensorrt_rtx 1.7.1 on a pretended GPU with compute capability 8.9" in text
    assert "h3trt engines build" in text


def test_swapped_weights_are_read_again_for_the_next_stage_and_resident_ones_are_not(shop: Shop) -> None:
    engines = shop.open(shop.store())
    for graph in ("block", "audio_decoder"):
        run(engines, graph, 0)
    (shop.root / "weights").write_bytes(bytes(4 * 100))
    engines.leave(("block", "audio_decoder"))
    run(engines, "block", 0)
    # A pinned copy in host memory is what a swapped weight comes back from: the file is not read again either.
    count = len(shop.gpu.allocated)
    run(engines, "audio_decoder", 0)
    assert len(shop.gpu.allocated) > count


def test_partitions_share_what_is_the_same_for_both_on_the_gpu(shop: Shop) -> None:
    store = shop.store()
    blocks = store.manifest.bindings["fl2va"]["block"]
    theirs = {**store.manifest.bindings["fl2va"], "block": tuple(reversed(blocks))}
    bindings = {**store.manifest.bindings, "ref2va": theirs}
    both = EngineStore(shop.root, store.manifest.model_copy(update={"bindings": bindings}))
    graphs = tuple(SCALES)
    alone, together = HostGpu(), HostGpu()
    TensorRTEngines(Opening(store, graphs, ("fl2va",)), shop.bindings.flavour(), alone).warm()
    engines = TensorRTEngines(Opening(both, graphs, ("fl2va", "ref2va")), shop.bindings.flavour(), together)
    engines.warm()
    # The blocks are there twice, the epilogue once.
    assert len(together.allocated) - len(alone.allocated) == LAYERS
    for instance, scale in enumerate(SCALES["block"]):
        for partition, expected in (("fl2va", scale), ("ref2va", SCALES["block"][-1 - instance])):
            result = engines.run("block", {"hidden": torch.ones(3)}, instance, partition, {})["out"]  # type: ignore[arg-type]
            assert result.tolist() == [expected] * 3


def test_baked_plans_are_opened_for_each_instance_and_swapped_ones_closed(shop: Shop) -> None:
    engines = shop.open(shop.store(weights="baked"))
    engines.warm()
    assert len(shop.bindings.engines) == LAYERS + 1, "the audio decoder's is swapped"
    for _ in range(2):
        for instance in range(LAYERS):
            run(engines, "block", instance)
        run(engines, "audio_decoder", 0)
        engines.leave(("block", "audio_decoder"))
    assert len(shop.bindings.engines) == LAYERS + 3


def test_baked_weights_cannot_be_streamed(shop: Shop) -> None:
    with pytest.raises(StoreError, match=r"profile p: residency\.denoiser: baked weights cannot be streamed"):
        shop.open(shop.store(2, weights="baked"))


def test_compiled_kernels_are_kept_from_one_process_to_the_next(shop: Shop) -> None:
    store = shop.store()
    engines = shop.open(store)
    assert not (shop.root / "kernels").exists()
    engines.leave(("block",))
    (file,) = (shop.root / "kernels").iterdir()
    assert file.read_bytes() == b"compiled"
    written = file.stat().st_mtime_ns
    shop.open(store).leave(("block",))
    assert file.stat().st_mtime_ns == written, "nothing new was compiled"
    file.write_bytes(b"of another GPU")
    shop.open(store).leave(("block",))
    assert file.read_bytes() == b"compiled"
    shop.open(store, ("block",)).leave(("block",))
    assert len(list((shop.root / "kernels").iterdir())) == 2, "another process opens other graphs"


def test_an_engine_set_runs_on_it_as_on_any_backend(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.store(1)
    monkeypatch.setattr(engine_set, "open_backend", lambda store, graphs, partitions: shop.open(store, graphs))
    engines = EngineSet(store, list(SCALES), ["fl2va"])
    engines.warm()
    with engines.stage(("block",)):
        for instance in range(LAYERS):
            found = engines.run("block", {"hidden": torch.ones(2)}, instance)["out"]
            assert found.tolist() == [SCALES["block"][instance]] * 2
    assert shop.gpu.trimmed == 1


def test_the_refiner_s_weights_live_where_the_text_encoder_s_do() -> None:
    residency = Residency(
        text_encoder="swapped",
        video_encoder="swapped",
        audio_encoder="swapped",
        modulation="streamed",
        denoiser=2,
        video_decoder="resident",
        audio_decoder="resident",
    )
    assert place(residency, "context", 1) == place(residency, "text_encoder.embedding", 1)
    assert place(residency, "context", 1).swapped
    assert not place(residency, "prologue", 1).swapped
