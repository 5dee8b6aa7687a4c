"""The sidecar file: known to the byte before it is written, right, written in little memory, whole or not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from export.checkpoint import materialise
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.safetensors_file import Declared, read_header, write_sparse
from export.graphs.graph import Graph
from export.sidecar import Sidecar, SidecarError, plan_sidecar
from plugins.ops import nvfp4_linear

SCHEMES = ("fp8", "nvfp4")


class Layer(nn.Module):
    """The linear layers of `text_encoder.layer`, by whose name graphs here are known."""

    NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
    MLP = ("gate_proj", "up_proj", "down_proj")

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in self.NAMES})
        self.mlp = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in self.MLP})


PARAMETERS = tuple(f"self_attn.{n}.weight" for n in Layer.NAMES) + tuple(f"mlp.{n}.weight" for n in Layer.MLP)


def graph_of(*instances: dict[str, Weight]) -> Graph:
    """A graph whose quantised weights are those given; the others are the first one given, which counts once."""
    weights = tuple({name: i.get(name, next(iter(i.values()))) for name in PARAMETERS} for i in instances)
    return Graph("text_encoder.layer", Layer, (), (), weights)


def stored(directory: Path, tensors: dict[str, torch.Tensor], name: str = "weights") -> dict[str, Stored]:
    file = directory / f"{name}.safetensors"
    save_file(tensors, file)
    return dict(read_header(file).tensors)


def drawn(rows: int, inner: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture
def weight(tmp_path: Path) -> Stored:
    """4000 x 512: more than a slab, with an outlier and a row of zeros."""
    tensor = drawn(4000, 512)
    tensor[5, 7], tensor[11] = 300.0, 0
    return stored(tmp_path, {"w": tensor})["w"]


def plan(directory: Path, *weights: Weight, scheme: str = "fp8") -> Sidecar:
    names = dict(zip(PARAMETERS, weights, strict=False))
    return plan_sidecar([graph_of(names)], scheme, directory / "out", "side")  # type: ignore[arg-type]


def test_fp8_bytes_are_those_of_an_independent_computation(tmp_path: Path, weight: Stored) -> None:
    sidecar = plan(tmp_path, weight)
    sidecar.write()
    found = load_file(sidecar.path)
    source = materialise(weight).double().numpy()
    scale = (np.abs(source).max(1) / 448).astype(np.float32)
    scale[11] = 1e-30
    quotient = (source / scale.astype(np.float64)[:, None]).astype(np.float32)
    assert set(found) == {"w.fp8", "w.scale"}
    np.testing.assert_array_equal(found["w.scale"].numpy(), scale)
    expected = np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found["w.fp8"].view(torch.uint8).numpy(), expected.view(np.uint8))
    assert np.abs(expected.astype(np.float32)).max(1)[[0, 5]].tolist() == [448, 448]


def test_nvfp4_bytes_are_those_of_an_independent_computation(tmp_path: Path, weight: Stored) -> None:
    sidecar = plan(tmp_path, weight, scheme="nvfp4")
    sidecar.write()
    found = load_file(sidecar.path)
    source = materialise(weight).float().numpy()
    scale = np.abs(source).max() / np.float32(6 * 448)
    blocks = (source / scale).reshape(4000, -1, 16)
    block_scale = np.clip(np.abs(blocks).max(2) / np.float32(6), 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    values = (blocks / block_scale.astype(np.float32)[..., None]).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    codes = values.reshape(4000, 512).view(np.uint8)
    assert set(found) == {"w.nvfp4", "w.block_scale", "w.scale"}
    assert found["w.scale"].tolist() == [scale]
    np.testing.assert_array_equal(found["w.block_scale"].view(torch.uint8).numpy(), block_scale.view(np.uint8))
    np.testing.assert_array_equal(found["w.nvfp4"].numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_header_size_and_offsets_are_known_before_the_file_is(tmp_path: Path, weight: Stored, scheme: str) -> None:
    sidecar = plan(tmp_path, weight, scheme=scheme)
    assert not sidecar.path.parent.exists()
    assert plan(tmp_path, weight, scheme=scheme).path == sidecar.path
    sidecar.write()
    header = read_header(sidecar.path)
    assert (header.digest, header.size) == (sidecar.header_sha256, sidecar.size)
    assert {s.key: s for s in sidecar.weights[weight].values()} == header.tensors
    assert header.metadata["scheme"] == scheme
    source = read_header(weight.file)
    assert json.loads(header.metadata["sources"]) == {weight.file.name: [source.digest, source.sample()]}
    with safe_open(sidecar.path, "pt") as opened:
        assert set(opened.keys()) == set(header.tensors)


def test_another_source_gives_another_file_name(tmp_path: Path, weight: Stored) -> None:
    other = stored(tmp_path, {"w": drawn(4000, 512), "more": torch.zeros(1)}, "other")["w"]
    assert plan(tmp_path, weight).path != plan(tmp_path, other).path


def test_other_data_of_the_same_shapes_do_not_replace_the_file(tmp_path: Path) -> None:
    first = plan(tmp_path, stored(tmp_path, {"w": drawn(64, 32, seed=1)})["w"])
    second = plan(tmp_path, stored(tmp_path, {"w": drawn(64, 32, seed=2)})["w"])
    assert (first.size, first.path.parent) == (second.size, second.path.parent)
    assert first.path != second.path


def test_a_weight_that_is_computed_is_quantised_as_it_is_computed(tmp_path: Path) -> None:
    tensors = stored(tmp_path, {"a": drawn(48, 32, 1), "b": drawn(16, 32, 2)})
    swapped = Weight.concat([tensors["a"].rows(24, 48), tensors["a"].rows(0, 24), tensors["b"]])
    sidecar = plan(tmp_path, tensors["a"], swapped)
    sidecar.write()
    found, whole = load_file(sidecar.path), plan(tmp_path / "whole", *_saved(tmp_path / "whole", materialise(swapped)))
    whole.write()
    expected = load_file(whole.path)
    # Named by the first tensor it is made of, numbered, since that one is quantised as well.
    assert set(found) == {"a.fp8", "a.scale", "a.1.fp8", "a.1.scale"}
    assert torch.equal(found["a.1.fp8"].view(torch.uint8), expected["w.fp8"].view(torch.uint8))
    assert torch.equal(found["a.1.scale"], expected["w.scale"])
    assert torch.equal(found["a.1.scale"][:24], found["a.scale"][24:])


def _saved(directory: Path, tensor: torch.Tensor) -> list[Stored]:
    directory.mkdir()
    return [stored(directory, {"w": tensor})["w"]]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path, scheme: str, value: float) -> None:
    broken = drawn(8, 32)
    broken[6, 3] = value
    tensors = stored(tmp_path, {"fine": drawn(8, 32), "broken": broken})
    sidecar = plan(tmp_path, *tensors.values(), scheme=scheme)
    with pytest.raises(SidecarError, match=r"weights\.safetensors: broken: holds values that are not finite"):
        sidecar.write()
    assert list(sidecar.path.parent.iterdir()) == []


def test_an_inner_size_without_whole_blocks_is_refused_by_name(tmp_path: Path) -> None:
    odd = stored(tmp_path, {"odd": drawn(8, 24)})["odd"]
    with pytest.raises(SidecarError, match="odd: inner size 24: must be a multiple of 16 for nvfp4"):
        plan(tmp_path, odd, scheme="nvfp4")


@pytest.mark.parametrize(("scheme", "most"), [("fp8", 60e6), ("nvfp4", 90e6)])
def test_memory_is_bounded_whatever_the_tensor(tmp_path: Path, scheme: str, most: float) -> None:
    file = tmp_path / "large.safetensors"
    write_sparse(file, {"w": Declared((14336, 5376), torch.bfloat16)}, {})
    large = read_header(file).tensors["w"]
    plan(
        tmp_path, stored(tmp_path, {"w": drawn(4000, 512)})["w"], scheme=scheme
    ).write()  # what libraries allocate once
    sidecar = plan(tmp_path, large, scheme=scheme)
    before = _reset_peak()
    sidecar.write()
    # The tensor is 154 MB as stored and 308 MB in float32; a slab of it is 4 MiB.
    assert _status("VmHWM") - before < most
    assert read_header(sidecar.path).size == sidecar.size


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def test_progress_names_weights_and_ends_at_the_file_size(tmp_path: Path) -> None:
    tensors = stored(tmp_path, {"a": drawn(8, 32), "b": drawn(8, 32)})
    sidecar, seen = plan(tmp_path, *tensors.values()), []
    sidecar.write(lambda *event: seen.append(event))
    assert [name for name, _, _ in seen] == ["a", "b"]
    assert 0 < seen[0][1] < seen[1][1] == sidecar.size == seen[1][2]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.export.test_sidecar import plan, read_header
weights = read_header(Path(sys.argv[1]) / "weights.safetensors").tensors
plan(Path(sys.argv[1]), *weights.values()).write(lambda *event: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_write_leaves_no_file_and_the_next_one_clears_up(tmp_path: Path) -> None:
    tensors = stored(tmp_path, {"a": drawn(8, 32), "b": drawn(8, 32)})
    sidecar = plan(tmp_path, *tensors.values())
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    left = [path.name for path in sidecar.path.parent.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(f".{sidecar.path.name}.")
    sidecar.write()
    assert [path.name for path in sidecar.path.parent.iterdir()] == [sidecar.path.name]
    assert read_header(sidecar.path).digest == sidecar.header_sha256


def test_an_interrupted_write_leaves_the_file_that_was_there(tmp_path: Path, weight: Stored) -> None:
    sidecar = plan(tmp_path, weight)
    sidecar.write()
    before = sidecar.path.read_bytes()

    def interrupt(name: str, written: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sidecar.write(interrupt)
    assert [path.name for path in sidecar.path.parent.iterdir()] == [sidecar.path.name]
    assert sidecar.path.read_bytes() == before


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, weight: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = plan(tmp_path, weight)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))
    numbers = rf"{sidecar.size:,} bytes needed, 1,000 free on its disk; free {sidecar.size - 1000:,} bytes"
    with pytest.raises(SidecarError, match=numbers):
        sidecar.write()
    assert list(sidecar.path.parent.iterdir()) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_disk_that_fills_up_meanwhile_is_told_and_nothing_is_left(
    tmp_path: Path, weight: Stored, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sidecar = plan(tmp_path, weight)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(SidecarError, match=f"{sidecar.size:,} bytes needed"):
        sidecar.write()
    assert list(sidecar.path.parent.iterdir()) == []


def test_nvfp4_block_scales_reach_the_top_of_their_range(tmp_path: Path, weight: Stored) -> None:
    """The outlier's block uses all of the two levels: its scale is E4M3's largest and its value E2M1's."""
    sidecar = plan(tmp_path, weight, scheme="nvfp4")
    sidecar.write()
    found = load_file(sidecar.path)
    assert found["w.block_scale"].float()[5, 0] == 448
    assert nvfp4_linear.unpack(found["w.nvfp4"], torch.float32)[5, 7] == 6
