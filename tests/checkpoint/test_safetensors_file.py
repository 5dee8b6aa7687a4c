"""The reader takes what the safetensors library writes, and refuses every file that breaks the format."""

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from export.checkpoint import CheckpointError, materialise
from export.checkpoint.safetensors_file import DTYPES, MAX_HEADER_BYTES, Declared, read_header, write_sparse
from export.checkpoint.safetensors_file import write_tensors as write

Table = dict[str, Any]


def frame(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def two_tensors() -> Table:
    return {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }


def save(file: Path, table: Table, data: bytes = bytes(32)) -> Path:
    file.write_bytes(frame(json.dumps(table).encode(), data))
    return file


def every_dtype() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    floats = {name: torch.randn(3, 5) for name in ("F32", "F64", "F16", "BF16", "F8_E4M3", "F8_E5M2")}
    tensors = {name: value.to(DTYPES[name]) for name, value in floats.items()}
    tensors |= {name: torch.arange(7).to(DTYPES[name]) for name in ("U8", "I8", "I16", "I32", "I64")}
    return tensors | {"BOOL": torch.tensor([True, False]), "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "qkv_layout": "stacked"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt", "qkv_layout": "stacked"}
    assert header.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        read = materialise(header.tensors[name])
        assert (read.shape, read.dtype) == (value.shape, value.dtype)
        assert torch.equal(as_bytes(read), as_bytes(value)), name


def test_offsets_are_absolute_positions_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.arange(6, dtype=torch.float32)}, file)
    stored = read_header(file).tensors["x"]
    assert struct.unpack("<6f", file.read_bytes()[stored.offset : stored.offset + stored.nbytes]) == (0, 1, 2, 3, 4, 5)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = every_dtype()
    write(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(as_bytes(loaded[name]), as_bytes(value)) for name, value in tensors.items())
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_written_tensors_are_aligned_to_their_item_size(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", every_dtype(), {})
    for stored in read_header(tmp_path / "x.safetensors").tensors.values():
        assert stored.offset % stored.dtype.itemsize == 0


def test_a_sparse_file_reads_as_zeros_and_takes_no_room(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_sparse(file, {"x": Declared((1 << 28,), torch.float32)}, {})
    stored = read_header(file).tensors["x"]
    assert file.stat().st_size == stored.offset + (1 << 30)
    assert file.stat().st_blocks * 512 < 1 << 20
    assert materialise(stored)[-1] == 0


def test_a_mapped_tensor_shares_the_file_and_never_writes_to_it(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file, {"x": torch.ones(4)}, {})
    before = file.read_bytes()
    materialise(read_header(file).tensors["x"]).zero_()
    assert file.read_bytes() == before


def test_a_file_that_shrinks_after_opening_is_refused_when_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file, {"x": torch.ones(4)}, {})
    stored = read_header(file).tensors["x"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="x: expected a file of at least"):
        materialise(stored)


def change(key: str, **entry: Any) -> Callable[[Table], Table]:
    return lambda table: table | {key: table[key] | entry}


FAULTS: dict[str, tuple[Callable[[Table], Table], str, str]] = {
    "overlap": (change("b", data_offsets=[20, 28]), "b", "an overlap: byte 20"),
    "hole": (change("b", data_offsets=[28, 36]), "b", "a hole: byte 28"),
    "mis-sized": (change("a", shape=[2, 4]), "a", r"data_offsets \[0, 24\], 24 bytes"),
    "trailing bytes": (lambda table: {"a": table["a"]}, "a", "trailing bytes"),
    "unknown dtype": (change("a", dtype="F4"), "a", "'F4'"),
    "dtype of another type": (change("a", dtype=["F32"]), "a", "F32"),
    "negative size": (change("a", shape=[-2, -3]), "a", r"\[-2, -3\]"),
    "many sizes": (change("a", shape=[2**62] * 300), "a", "at most 8 sizes"),
    "boolean size": (change("b", shape=[True, 4]), "b", "True"),
    "fractional size": (change("b", shape=[4.0]), "b", "4.0"),
    "offsets reversed": (change("b", data_offsets=[32, 24]), "b", r"\[32, 24\]"),
    "three offsets": (change("b", data_offsets=[24, 28, 32]), "b", r"\[24, 28, 32\]"),
    "extra field": (change("b", strides=[1]), "b", "strides"),
    "missing field": (lambda table: table | {"b": {"dtype": "BF16", "shape": [4]}}, "b", "BF16"),
    "entry not an object": (lambda table: table | {"b": 3}, "b", "3"),
    "metadata not strings": (lambda table: table | {"__metadata__": {"n": 1}}, "__metadata__", "1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_header_is_refused_naming_file_key_and_finding(tmp_path: Path, fault: str) -> None:
    breaking, key, found = FAULTS[fault]
    file = save(tmp_path / "broken.safetensors", breaking(two_tensors()))
    with pytest.raises(CheckpointError, match=found) as refused:
        read_header(file)
    assert (refused.value.file, refused.value.key) == (file, key)
    assert str(refused.value).startswith(f"{file}: {key}: expected ")


def test_the_unbroken_table_is_accepted(tmp_path: Path) -> None:
    assert set(read_header(save(tmp_path / "x.safetensors", two_tensors())).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        (b"", "a file of 0 bytes"),
        (b"\x02\0\0\0", "a file of 4 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", str(MAX_HEADER_BYTES + 1)),
        (struct.pack("<Q", 100) + b"{}", "truncated after 2"),
        (frame(b"[]", b""), "list"),
        (frame(b" {}", b""), "b' {}'"),
        (frame(b"{", b""), "Expecting"),
        (frame(b'{"\xff": 1}', b""), "utf-8"),
        (frame(b"[" * 100_000, b""), "recursion|RecursionError"),
        (frame(b'{"a": NaN}', b""), "NaN"),
        (frame(b'{"a": ' + b"1" * 5000 + b"}", b""), "digits"),
        (frame(b'{"a": {}, "a": {}}', b""), "the key twice"),
        (frame(b'{"a": {"dtype": "U8", "dtype": "I8"}}', b""), "the key twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, contents: bytes, found: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(contents)
    with pytest.raises(CheckpointError, match=found):
        read_header(file)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "x.safetensors", two_tensors(), bytes(31))
    with pytest.raises(
        CheckpointError, match=r"b: expected the file to end at byte \d+, found \d+ bytes \(truncated\)"
    ):
        read_header(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_header(tmp_path / "absent.safetensors")


shapes = st.lists(st.integers(0, 5), max_size=3)
layouts = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda key: key != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    min_size=1,
    max_size=6,
)


def encode(layout: dict[str, tuple[str, list[int]]]) -> tuple[Table, int]:
    table: Table = {}
    position = 0
    for key, (dtype, shape) in layout.items():
        end = position + prod(shape) * DTYPES[dtype].itemsize
        table[key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return table, position


@given(layouts)
def test_any_tiling_table_is_accepted(tmp_path_factory: pytest.TempPathFactory, layout: dict) -> None:
    table, size = encode(layout)
    header = read_header(save(tmp_path_factory.getbasetemp() / "tiled.safetensors", table, bytes(size)))
    assert {key: list(stored.shape) for key, stored in header.tensors.items()} == {k: v[1] for k, v in layout.items()}


@given(layouts, st.data())
def test_any_moved_offset_or_changed_length_is_refused(
    tmp_path_factory: pytest.TempPathFactory, layout: dict, data: st.DataObject
) -> None:
    table, size = encode(layout)
    key = data.draw(st.sampled_from(sorted(table)))
    side = data.draw(st.sampled_from([0, 1]))
    table[key]["data_offsets"][side] += data.draw(st.integers(-9, 9).filter(bool))
    file = save(tmp_path_factory.getbasetemp() / "moved.safetensors", table, bytes(size))
    with pytest.raises(CheckpointError):
        read_header(file)


@given(st.data())
def test_corrupted_bytes_never_pass_where_the_library_refuses(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Our reader is at least as strict as the library, and fails only with its own error."""
    contents = bytearray(frame(json.dumps(two_tensors()).encode(), bytes(32)))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(contents) - 1))
        contents[position] = data.draw(st.integers(0, 255))
    del contents[data.draw(st.integers(len(contents) - 3, len(contents))) :]
    file = tmp_path_factory.getbasetemp() / "corrupt.safetensors"
    file.write_bytes(bytes(contents))
    try:
        header = read_header(file)
    except CheckpointError:
        return
    try:
        with safe_open(file, "pt") as opened:
            assert set(opened.keys()) == set(header.tensors)
    except SafetensorError as error:
        pytest.fail(f"accepted what the library refuses: {error}")


@pytest.mark.parametrize("padding", range(8))
def test_data_at_any_byte_is_read(tmp_path: Path, padding: int) -> None:
    """The format does not ask for alignment, and not every writer pads the header."""
    values = torch.arange(6, dtype=torch.float64)
    table = {"x": {"dtype": "F64", "shape": [2, 3], "data_offsets": [0, 48]}}
    file = tmp_path / "x.safetensors"
    file.write_bytes(frame(json.dumps(table).encode() + b" " * padding, values.numpy().tobytes()))
    assert torch.equal(materialise(read_header(file).tensors["x"]), values.view(2, 3))
