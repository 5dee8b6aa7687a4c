"""Reads and writes the safetensors container with absolute byte offsets; nothing here loads tensor data.

The format: an 8-byte little-endian header length, a JSON object (tensor name -> dtype, shape, data_offsets; optional
`__metadata__` of strings), then the data, which the offsets must tile exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored
from export.checkpoint.strict_json import parse_object

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a larger length means that the file is not safetensors."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


MOST_SIZES = 8
"""Of a shape: no tensor of a model has more, and the product of many is a number that takes minutes to make."""

SAMPLES = 256
"""Pieces of a file that `Header.sample` reads."""

SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Header:
    """What one safetensors file declares. `digest` is the SHA-256 of the header, `size` the length of the file."""

    file: Path
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]
    size: int
    digest: str

    def sample(self) -> str:
        """SHA-256 over pieces spread evenly over the file, in which other data under the same header differ."""
        digest = hashlib.sha256()
        with self.file.open("rb") as opened:
            for index in range(SAMPLES):
                opened.seek(self.size * index // SAMPLES)
                digest.update(opened.read(SAMPLE_BYTES))
        return digest.hexdigest()


@dataclass(frozen=True)
class Declared:
    """Shape and dtype of a tensor that a file must hold; a shape of None accepts any."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the data; 0 where any shape is accepted."""
        return 0 if self.shape is None else prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        shape = "any shape" if self.shape is None else list(self.shape)
        return f"{DTYPE_NAMES[self.dtype]} {shape}"


def read_header(file: Path, limit: int = MAX_HEADER_BYTES) -> Header:
    """Parses and checks the header of `file`, of at most `limit` bytes.

    Raises:
        CheckpointError: the file is missing, truncated or oversized; the header is not what the format allows; or the
            tensors overlap, leave holes, or do not have the length that shape and dtype give.
    """
    if not file.is_file():
        raise CheckpointError(file, "file", "a safetensors file", "no such file")
    size = file.stat().st_size
    raw = _header_bytes(file, size, limit)
    table = parse_object(file, "header", raw)
    if not raw.startswith(b"{"):
        raise CheckpointError(file, "header", "a JSON object from its first byte", repr(raw[:16]))
    metadata = _metadata(file, table.pop("__metadata__", {}))
    start = 8 + len(raw)
    tensors = {key: _tensor(file, key, entry, start) for key, entry in table.items()}
    _check_tiling(file, tensors.values(), start, size)
    return Header(file, tensors, metadata, size, hashlib.sha256(raw).hexdigest())


def _header_bytes(file: Path, size: int, limit: int) -> bytes:
    if size < 8:
        raise CheckpointError(file, "header length", "8 bytes", f"a file of {size} bytes")
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > limit:
            raise CheckpointError(file, "header length", f"at most {limit} bytes", length)
        if length > size - 8:
            raise CheckpointError(file, "header", f"{length} bytes", f"a file truncated after {size - 8} of them")
        return stream.read(length)


def _metadata(file: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(file, "__metadata__", "an object of strings", repr(metadata)[:80])
    return metadata


def _tensor(file: Path, key: str, entry: Any, start: int) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(file, key, "dtype, shape and data_offsets", repr(entry)[:80])
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(file, key, f"a dtype of {', '.join(DTYPES)}", repr(entry["dtype"])[:80])
    shape = _sizes(file, key, "shape", entry["shape"])
    offsets = _sizes(file, key, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(file, key, "data_offsets [begin, end] with begin <= end", list(offsets))
    begin, end = offsets
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        wanted = f"{nbytes} bytes for {entry['dtype']} {list(shape)}"
        raise CheckpointError(file, key, wanted, f"data_offsets {list(offsets)}, {end - begin} bytes")
    return Stored(shape, dtype, key, file, start + begin, nbytes)


def _sizes(file: Path, key: str, field: str, value: Any) -> tuple[int, ...]:
    # bool is an int in Python, but not a size.
    sizes = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
    if not sizes or len(value) > MOST_SIZES:
        raise CheckpointError(file, key, f"{field}: a list of at most {MOST_SIZES} sizes", repr(value)[:80])
    return tuple(value)


def _check_tiling(file: Path, tensors: Iterable[Stored], start: int, size: int) -> None:
    position, before = start, "the header"
    for tensor in sorted(tensors, key=lambda item: (item.offset, item.nbytes)):
        if tensor.offset != position:
            fault = "an overlap" if tensor.offset < position else "a hole"
            found = f"{fault}: byte {tensor.offset - start}"
            raise CheckpointError(file, tensor.key, f"data from byte {position - start}, where {before} ends", found)
        position, before = tensor.offset + tensor.nbytes, tensor.key
    if position != size:
        fault = "truncated" if position > size else "trailing bytes"
        raise CheckpointError(file, before, f"the file to end at byte {position}", f"{size} bytes ({fault})")


def encode_header(tensors: Mapping[str, Declared], metadata: Mapping[str, str]) -> tuple[bytes, tuple[str, ...], int]:
    """Lays tensors out and encodes the header.

    Wider dtypes come first, so that every tensor is aligned to its item size; equal widths are in name order.

    Returns: the length-prefixed header bytes, the tensor names in data order, and the number of data bytes.
    """
    order = tuple(sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)))
    table: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in order:
        shape, dtype = tensors[name].shape, tensors[name].dtype
        if shape is None:
            raise ValueError(f"{name}: a tensor to be written needs a shape")
        end = position + prod(shape) * dtype.itemsize
        table[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, order, position


def laid_out(file: Path, tensors: Mapping[str, Declared], order: Iterable[str], start: int) -> dict[str, Stored]:
    """Where each tensor will lie in a file whose header, of `start` bytes with its length, has them in that order."""
    stored: dict[str, Stored] = {}
    for name in order:
        declared = tensors[name]
        assert declared.shape is not None  # encode_header has seen to it
        stored[name] = Stored(declared.shape, declared.dtype, name, file, start, declared.nbytes)
        start += declared.nbytes
    return stored


def source_hashes(files: Iterable[Path]) -> str:
    """For the metadata of a file made of others: the hash of each one's header, and of a sample of its data, as JSON.

    They are named from the directory on that they share.
    """
    ordered = sorted(set(files))
    root = os.path.commonpath([file.parent for file in ordered]) if ordered else "."
    headers = {file.relative_to(root).as_posix(): read_header(file) for file in ordered}
    return json.dumps({name: [header.digest, header.sample()] for name, header in headers.items()}, sort_keys=True)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors (CPU) as one safetensors file; equal arguments give equal bytes."""
    declared = {name: Declared(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    header, order, _ = encode_header(declared, metadata)
    with file.open("wb") as stream:
        stream.write(header)
        for name in order:
            stream.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def write_sparse(file: Path, tensors: Mapping[str, Declared], metadata: Mapping[str, str]) -> None:
    """Writes the header alone and extends the file to its full size; the data is a hole that reads as zeros."""
    header, _, nbytes = encode_header(tensors, metadata)
    with file.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + nbytes)
