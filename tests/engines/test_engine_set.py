"""Engines run on the checkpoint's own bytes, say what does not fit, and hand back tensors of their own."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from engines.build import build
from engines.profile import PARTITIONS
from engines.sessions.engine_set import EngineInputError, EngineSet
from engines.sessions.onnxruntime import mapped_value
from engines.sessions.weights import MappedWeights
from engines.store import EngineStore, Partition
from tests.engines import small_checkpoint
from tests.engines.small_checkpoint import SmallCheckpoint
from tests.engines.workshop import Workshop

# float32 against float64: inner products of at most 16 items and a softmax over 40 rows, on values of order 1.
TOLERANCE = 5e-6


def draw(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, small_checkpoint.WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("partition", ["fl2va", "ref2va"])
@pytest.mark.parametrize("instance", [0, 1])
def test_each_instance_of_each_partition_runs_with_its_own_weights(
    workshop: Workshop, partition: Partition, instance: int
) -> None:
    engines = EngineSet.open(workshop.store)
    checkpoint = SmallCheckpoint(workshop.checkpoint)
    for rows in (40, 7):
        found = engines.run("attend", {"hidden": draw(rows)}, instance, partition)["mixed"]
        wanted = small_checkpoint.expected(checkpoint, partition, instance, draw(rows))
        assert found.dtype == torch.float32
        assert (found - wanted).abs().max() < TOLERANCE


def test_instances_may_have_weights_of_other_sizes(workshop: Workshop) -> None:
    engines = EngineSet.open(workshop.store, graphs=["table"])
    stored = SmallCheckpoint(workshop.checkpoint).stored("denoiser")
    inputs = {"rows": draw(4), "index": torch.tensor([3, 0])}
    for instance, features in enumerate(small_checkpoint.TABLE_FEATURES):
        found = engines.run("table", inputs, instance)["features"]
        weight = small_checkpoint.value(stored[f"tables.{instance}.weight"]).double()
        assert found.shape == (2, features)
        assert (found - draw(4).double()[[3, 0]] @ weight.T).abs().max() < TOLERANCE


def test_baked_engines_compute_what_bound_ones_do(workshop: Workshop) -> None:
    bound = EngineSet.open(workshop.store)
    baked = EngineSet.open(build(workshop.checkpoint, workshop.baked_profile, workshop.store).store)
    inputs: dict[str, dict[str, Any]] = {
        "attend": {"hidden": draw(33)},
        "table": {"rows": draw(4), "index": torch.tensor([1, 2])},
    }
    for graph, values in inputs.items():
        for partition in PARTITIONS:
            for instance in (0, 1):
                wanted = bound.run(graph, values, instance, partition)
                for name, found in baked.run(graph, values, instance, partition).items():
                    # The kernels may differ (constant weights are packed), so rounding may.
                    assert torch.allclose(found, wanted[name], atol=TOLERANCE, rtol=0)


def test_weights_are_mapped_not_copied_where_they_are_aligned(workshop: Workshop) -> None:
    manifest = EngineStore.open(workshop.store).manifest
    mapped = MappedWeights(manifest.weight_files)
    regions = manifest.bindings["fl2va"]["attend"][0]
    weight = regions["qkv.weight"]
    address = mapped.file(weight.file).ctypes.data + weight.offset
    assert mapped_value(mapped, weight, "bfloat16").data_ptr() == address
    bias = regions["out.bias"]
    assert (mapped.file(bias.file).ctypes.data + bias.offset) % 4 == 2
    copy = mapped_value(mapped, bias, "float32")
    assert copy.data_ptr() % 4 == 0
    stored = SmallCheckpoint(workshop.checkpoint).stored("denoiser")["blocks.0.out.bias"]
    assert np.array_equal(copy.numpy(), small_checkpoint.value(stored).numpy())


def test_outputs_outlive_later_runs_and_the_engines(workshop: Workshop) -> None:
    engines = EngineSet.open(workshop.store)
    first = engines.run("attend", {"hidden": draw(40)})["mixed"]
    kept = first.clone()
    for seed in range(1, 4):
        engines.run("attend", {"hidden": draw(40, seed)})
    del engines
    gc.collect()
    assert torch.equal(first, kept)


def test_outputs_can_be_written_into_a_part_of_something_larger(workshop: Workshop) -> None:
    engines = EngineSet.open(workshop.store)
    whole = torch.zeros(30, small_checkpoint.WIDTH)
    place = whole[10:20]
    found = engines.run("attend", {"hidden": draw(10)}, outputs={"mixed": place})["mixed"]
    assert found is place
    assert torch.equal(whole[10:20], engines.run("attend", {"hidden": draw(10)})["mixed"])
    assert not whole[:10].any()
    assert not whole[20:].any()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"hidden": torch.zeros(4, 12)}, "graph attend: outputs missing: [], unknown: ['hidden']"),
        ({"mixed": torch.zeros(5, 12)}, "graph attend: output mixed: rows = 5: is 4 in an earlier input"),
        ({"mixed": torch.zeros(4, 12).half()}, "graph attend: output mixed: float32 expected, found torch.float16"),
        ({"mixed": torch.zeros(12, 4).T}, "graph attend: output mixed: a contiguous tensor expected"),
    ],
)
def test_a_place_that_does_not_fit_an_output_is_refused(
    workshop: Workshop, outputs: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(EngineInputError) as refused:
        EngineSet.open(workshop.store).run("attend", {"hidden": draw(4)}, outputs=outputs)
    assert message in str(refused.value)


def test_an_open_set_survives_a_rebuild(workshop: Workshop) -> None:
    engines = EngineSet.open(workshop.store)
    for file in (workshop.store / "engines").iterdir():
        file.unlink()
    assert engines.run("attend", {"hidden": draw(5)})["mixed"].shape == (5, small_checkpoint.WIDTH)


def test_strided_inputs_are_read_by_their_values(workshop: Workshop) -> None:
    engines = EngineSet.open(workshop.store)
    hidden = draw(10)
    strided = hidden.T.contiguous().T
    assert not strided.is_contiguous()
    assert torch.equal(
        engines.run("attend", {"hidden": strided})["mixed"], engines.run("attend", {"hidden": hidden})["mixed"]
    )


def test_concurrent_callers_take_turns(workshop: Workshop) -> None:
    engines = EngineSet.open(workshop.store)
    wanted = [engines.run("attend", {"hidden": draw(200, seed)})["mixed"] for seed in range(8)]
    found: dict[int, torch.Tensor] = {}

    def call(seed: int) -> None:
        found[seed] = engines.run("attend", {"hidden": draw(200, seed)})["mixed"]

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], wanted[seed]) for seed in range(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": "attic"}, "graph 'attic' is not open; open graphs: attend, table"),
        ({"partition": "ref3va"}, "partition 'ref3va' is not open; open partitions: fl2va, ref2va"),
        ({"instance": 2}, "graph table: instance 2: must be from 0 to 1"),
        ({"instance": -1}, "graph table: instance -1: must be from 0 to 1"),
        ({"inputs": {"rows": draw(4)}}, "graph table: inputs missing: ['index'], unknown: []"),
        ({"hidden": draw(4)}, "graph table: inputs missing: [], unknown: ['hidden']"),
        ({"index": torch.zeros(2)}, "graph table: input index: int64 expected, found torch.float32"),
        ({"rows": draw(5)}, "graph table: input rows: shape [4, 12] expected, found [5, 12]"),
        ({"rows": draw(4)[0]}, "graph table: input rows: shape [4, 12] expected, found [12]"),
        ({"rows": draw(4).to("meta")}, "graph table: input rows: a CPU tensor expected, found one on meta"),
        ({"index": torch.zeros(3, dtype=torch.int64)}, "steps = 3: must be from 2 to 8 in steps of 2"),
        ({"index": torch.zeros(10, dtype=torch.int64)}, "steps = 10: must be from 2 to 8 in steps of 2"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(workshop: Workshop, change: dict[str, Any], message: str) -> None:
    engines = EngineSet.open(workshop.store)
    inputs = {"rows": draw(4), "index": torch.tensor([0, 1])}
    call: dict[str, Any] = {"graph": "table", "instance": 0, "partition": "fl2va", "inputs": inputs}
    call.update({key: value for key, value in change.items() if key in call})
    call["inputs"] = {**call["inputs"], **{key: value for key, value in change.items() if key not in call}}
    with pytest.raises(EngineInputError) as refused:
        engines.run(**call)
    assert message in str(refused.value)


def test_only_what_is_named_is_opened(workshop: Workshop) -> None:
    engines = EngineSet.open(workshop.store, graphs=["attend"], partitions=["ref2va"])
    with pytest.raises(EngineInputError, match="graph 'table' is not open"):
        engines.run("table", {})
    with pytest.raises(EngineInputError, match="partition 'fl2va' is not open"):
        engines.run("attend", {"hidden": draw(4)}, partition="fl2va")
    with pytest.raises(EngineInputError, match=r"graph 'attic' is not in .*; it has: attend, table"):
        EngineSet.open(workshop.store, graphs=["attic"])
