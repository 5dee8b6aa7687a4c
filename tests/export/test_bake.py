"""A baked model reads the checkpoint's own bytes and computes what the bound model computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny_graph import graph_of, store
from torch import nn

from export.bake import BakeError, files
from export.checkpoint import materialise
from export.compare import draw, open_session, ort_value
from export.emit import Emitted, bake, emit
from export.trace import instance_sizes

Emit = Callable[[str, str, torch.dtype], Emitted]
PROVIDERS = ["CPUExecutionProvider"]


def inputs(emitted: Emitted, instance: int) -> dict[str, onnxruntime.OrtValue]:
    sizes = {**emitted.graph.trials[-1], **instance_sizes(emitted.binding, instance)}
    generator = torch.Generator().manual_seed(3)
    return {spec.name: ort_value(draw(spec, sizes, generator)) for spec in emitted.graph.inputs}


def run_bound(emitted: Emitted, instance: int) -> list[np.ndarray]:
    weights = {name: ort_value(materialise(stored)) for name, stored in emitted.bindings[instance].items()}
    results = open_session(emitted.model).run_with_ort_values(None, inputs(emitted, instance) | weights)
    return [value.numpy() for value in results]


def run(session: onnxruntime.InferenceSession, emitted: Emitted, instance: int) -> list[np.ndarray]:
    return [value.numpy() for value in session.run_with_ort_values(None, inputs(emitted, instance))]


BAKED = [("block", 0), ("block", 2), ("modulation.adaln", 0), ("modulation.adaln", 3), ("epilogue", 0)]


@pytest.mark.parametrize(("name", "instance"), BAKED)
def test_baked_beside_a_hard_link_equals_bound(emit_denoiser: Emit, tmp_path: Path, name: str, instance: int) -> None:
    emitted = emit_denoiser("native", name, torch.float32)
    model = bake(emitted, instance)
    assert len(model.SerializeToString()) < 30_000
    for file in files(emitted, instance):
        os.link(file, tmp_path / file.name)
    (tmp_path / "baked.onnx").write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(tmp_path / "baked.onnx", providers=PROVIDERS)
    assert [i.name for i in session.get_inputs()] == [spec.name for spec in emitted.graph.inputs]
    for found, expected in zip(run(session, emitted, instance), run_bound(emitted, instance), strict=True):
        # Constant weights may be packed for another matrix kernel: the order of summation, nothing else.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_baked_from_bytes_held_in_memory_equals_bound(emit_denoiser: Emit) -> None:
    emitted = emit_denoiser("native", "block", torch.float32)
    options = onnxruntime.SessionOptions()
    held = {file.name: file.read_bytes() for file in files(emitted, 1)}
    options.add_external_initializers_from_files_in_memory(
        list(held), list(held.values()), [len(data) for data in held.values()]
    )
    session = onnxruntime.InferenceSession(bake(emitted, 1).SerializeToString(), options, providers=PROVIDERS)
    (found,), (expected,) = run(session, emitted, 1), run_bound(emitted, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_instances_differ(emit_denoiser: Emit) -> None:
    emitted = emit_denoiser("native", "block", torch.float32)
    assert not np.allclose(run_bound(emitted, 0)[0], run_bound(emitted, 1)[0], rtol=1e-2)


def test_baked_head_has_a_fixed_width(emit_denoiser: Emit) -> None:
    emitted = emit_denoiser("native", "modulation.adaln", torch.float32)
    widths = [bake(emitted, i).graph.output[0].type.tensor_type.shape.dim[1].dim_value for i in (0, 3)]
    assert widths == [18 * 80, 2 * 80]


def test_baked_model_passes_the_checker_beside_its_file(emit_denoiser: Emit, tmp_path: Path) -> None:
    emitted = emit_denoiser("native", "epilogue", torch.float32)
    for file in files(emitted, 0):
        # A copy: the checker refuses a file with several links, which runtimes accept.
        (tmp_path / file.name).write_bytes(file.read_bytes())
    onnx.save(bake(emitted, 0), tmp_path / "baked.onnx")
    onnx.checker.check_model(str(tmp_path / "baked.onnx"), full_check=True)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    weight = store({"weight": torch.eye(4)}, tmp_path / "one" / "model.safetensors")
    bias = store({"bias": torch.zeros(4)}, tmp_path / "two" / "model.safetensors")
    emitted = emit(graph_of(lambda: nn.Linear(4, 4), weight | bias))
    with pytest.raises(BakeError, match=r"one/model.safetensors and .*two/model.safetensors"):
        bake(emitted, 0)


def test_offsets_are_those_of_the_file(tmp_path: Path) -> None:
    stored = store({"bias": torch.arange(4.0), "weight": torch.eye(4)}, tmp_path / "w.safetensors")
    emitted = emit(graph_of(lambda: nn.Linear(4, 4), stored))
    raw = (tmp_path / "w.safetensors").read_bytes()
    for tensor in bake(emitted, 0).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {e.key: e.value for e in tensor.external_data}
            begin, length = int(entry["offset"]), int(entry["length"])
            expected = materialise(stored[tensor.name]).numpy().tobytes()
            assert raw[begin : begin + length] == expected


def test_a_changed_offset_changes_the_result(tmp_path: Path) -> None:
    stored = store({"bias": torch.arange(4.0), "weight": torch.randn(4, 4)}, tmp_path / "w.safetensors")
    emitted = emit(graph_of(lambda: nn.Linear(4, 4), stored))
    moved = {"weight": replace(stored["weight"], offset=stored["weight"].offset - 4), "bias": stored["bias"]}
    other = replace(emitted, binding=replace(emitted.binding, instances=(moved,)))
    results = []
    for one in (emitted, other):
        (tmp_path / "baked.onnx").write_bytes(bake(one, 0).SerializeToString())
        session = onnxruntime.InferenceSession(tmp_path / "baked.onnx", providers=PROVIDERS)
        results.append(run(session, emitted, 0)[0])
    assert not np.allclose(*results)
