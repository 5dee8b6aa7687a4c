"""Activation memory against what the TensorRT-RTX builder states for the same graph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from engines.plan import arrays
from export.checkpoint import Checkpoint
from export.checkpoint.outline import Outline
from export.emit import emit
from export.graphs import block, context, epilogue, prologue
from export.miniature import write_sparse_released

trt = pytest.importorskip("tensorrt_rtx_bindings")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("released") / "c"
    write_sparse_released(root, "native")
    return Checkpoint.open(root)


class _Log(trt.ILogger):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        self.lines.append(message)


def _activations(checkpoint: Checkpoint, module: Any, rows: int) -> int:
    """What the builder reports for a graph of so many rows."""
    model = emit(module.graphs(checkpoint, "fl2va", torch.bfloat16)[0]).model
    log = _Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, log).parse(model.SerializeToString())
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if -1 in tensor.shape:
            profile.set_shape(tensor.name, *([n if d < 0 else d for d in tensor.shape] for n in (1, rows // 2, rows)))
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config)
    return max(int(found[1]) for line in log.lines if (found := re.search(r"Total Activation Memory: (\d+)", line)))


def test_a_block_at_the_longest_rows_is_counted_to_the_byte(checkpoint: Checkpoint, outline: Outline) -> None:
    size = outline.dimensions.denoiser
    assert _activations(checkpoint, block, 110_592) == 19_868_073_984 == 110_592 * arrays.block(size, "bfloat16")


def test_the_refiner_is_counted_to_the_byte(checkpoint: Checkpoint, outline: Outline) -> None:
    assert _activations(checkpoint, context, 8192) == 8192 * arrays.context(outline.dimensions.denoiser, "bfloat16")


def test_the_head_is_counted_within_its_workspace(checkpoint: Checkpoint, outline: Outline) -> None:
    counted = 110_592 * arrays.epilogue(outline.dimensions.denoiser)
    assert 0 <= _activations(checkpoint, epilogue, 110_592) - counted <= 10 << 20


def test_the_prologue_needs_no_more_than_is_counted(checkpoint: Checkpoint, outline: Outline) -> None:
    counted = 3 * 16_384 * outline.dimensions.denoiser.hidden * 2
    assert _activations(checkpoint, prologue, 16_384) <= counted + (10 << 20)
