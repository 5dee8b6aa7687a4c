"""The ranks' parts of a stored tensor, against plain slices of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engines.sessions.dtypes import NAMES
from engines.sessions.weights import MappedWeights, PackedUnits, WeightName
from engines.store import Region, weight_file
from export.checkpoint import materialise
from export.checkpoint.expressions import Stored
from export.checkpoint.safetensors_file import read_header

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int]:
    """A tensor, ranks, the axis that they divide, and the groups of it that they divide each."""
    ranks, groups = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] *= ranks * groups
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return (values % 251).to(draw(st.sampled_from(DTYPES))), ranks, axis, groups


def slices(whole: torch.Tensor, ranks: int, axis: int, groups: int) -> list[torch.Tensor]:
    """Each rank's part, by slicing every group."""
    pieces = [group.chunk(ranks, dim=axis) for group in whole.float().chunk(groups, dim=axis)]
    return [torch.cat([piece[rank] for piece in pieces], dim=axis).to(whole.dtype) for rank in range(ranks)]


def file_with(folder: Path, tensor: torch.Tensor) -> tuple[Path, Stored]:
    """A file with the tensor behind one that moves it to an odd place."""
    file = folder / "one.safetensors"
    save_file({"a": torch.zeros(3, dtype=tensor.dtype), "b": tensor, "c": torch.zeros(5, dtype=tensor.dtype)}, file)
    return file, read_header(file).tensors["b"]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


@settings(max_examples=60, deadline=None)
@given(divisions())
def test_every_rank_reads_its_slices_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, division: tuple[torch.Tensor, int, int, int]
) -> None:
    whole, ranks, axis, groups = division
    file, stored = file_with(tmp_path_factory.mktemp("share"), whole)
    share = stored.share(ranks, axis, groups)
    expected = slices(whole, ranks, axis, groups)
    assert (share.shape, share.nbytes * ranks) == (tuple(expected[0].shape), stored.nbytes)
    assert bits(materialise(share)) == bits(expected[0])
    mapped, first = MappedWeights([weight_file(file)]), Region(0, share.offset, share.shape, share.cut)
    assert first.cut is not None
    assert first.cut.ranks == ranks
    with pytest.raises(ValueError, match=rf"rank {ranks}: {ranks} ranks divide the tensors"):
        first.of_rank(ranks)
    name = WeightName("graph", "weight")
    for rank, part in enumerate(expected):
        region = first.of_rank(rank)
        assert bits(torch.from_numpy(mapped.array(region, NAMES[whole.dtype]).copy())) == bits(part)
        units = PackedUnits(mapped, [{name: (region, share.nbytes)}])
        memory = torch.zeros(units.sizes[0], dtype=torch.uint8)
        units.read(0, memory)
        assert memory[: share.nbytes].tolist() == bits(part)


def test_a_tensor_that_ranks_do_not_divide_is_refused(tmp_path: Path) -> None:
    _, stored = file_with(tmp_path, torch.zeros(6, 4))
    with pytest.raises(ValueError, match=r"b \[6, 4\]: 4 ranks do not divide axis 0"):
        stored.share(4, 0)
    with pytest.raises(ValueError, match="2 ranks do not divide axis 0"):
        stored.share(2, 0).share(2, 0)


def test_a_part_outside_its_file_is_not_read(tmp_path: Path) -> None:
    """A file that has become shorter: numpy must say so, and not read what lies behind it."""
    file, stored = file_with(tmp_path, torch.ones(6, 4))
    share = stored.share(2, 1)
    files = [weight_file(file)]
    with file.open("r+b") as opened:
        opened.truncate(stored.offset + stored.nbytes - 17)
    region = Region(0, share.offset, share.shape, share.cut)
    with pytest.raises(ValueError, match="strides is incompatible with shape of requested array and size of buffer"):
        MappedWeights(files).runs(region, share.nbytes)
