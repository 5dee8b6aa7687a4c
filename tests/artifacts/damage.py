"""Copies of an artifact's header with one thing wrong, in files without data: reading a tensor would find zeros."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from export.checkpoint.safetensors_file import Declared, read_header, write_sparse


@dataclass
class Contents:
    """What a file declares, and what it is called; a change works in place."""

    name: str
    tensors: dict[str, Declared]
    metadata: dict[str, str]

    def count(self) -> None:
        """Has the metadata of a FastH3 file count what there is."""
        endings = {"low_rank_tensors": "lora_", "diff_tensors": ".diff", "set_weight_tensors": ".set_weight"}
        for key, part in endings.items():
            self.metadata[key] = str(sum(part in name for name in self.tensors))


Change = Callable[[Contents], None]


def damaged(source: Path, directory: Path, change: Change) -> Path:
    """A file in `directory` that has the header of `source`, changed."""
    header = read_header(source)
    tensors = {key: Declared(stored.shape, stored.dtype) for key, stored in header.tensors.items()}
    contents = Contents(source.name, tensors, dict(header.metadata))
    change(contents)
    directory.mkdir(exist_ok=True)
    write_sparse(directory / contents.name, contents.tensors, contents.metadata)
    return directory / contents.name


def say(key: str, value: str) -> Change:
    """An entry of the metadata."""
    return lambda contents: contents.metadata.update({key: value})


def hush(key: str) -> Change:
    """An entry of the metadata less."""

    def change(contents: Contents) -> None:
        del contents.metadata[key]

    return change


def call(name: str) -> Change:
    """Another file name."""

    def change(contents: Contents) -> None:
        contents.name = name

    return change


def put(key: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Change:
    """A tensor, new or of another shape; counted."""

    def change(contents: Contents) -> None:
        contents.tensors[key] = Declared(shape, dtype)
        _recount(contents)

    return change


def drop(part: str) -> Change:
    """All tensors less that have `part` in their names, of which there must be one; the rest is counted."""

    def change(contents: Contents) -> None:
        found = [key for key in contents.tensors if part in key]
        assert found, part
        for key in found:
            del contents.tensors[key]
        _recount(contents)

    return change


def rename(old: str, new: str) -> Change:
    """Another spelling of a part of all names."""

    def change(contents: Contents) -> None:
        contents.tensors = {key.replace(old, new): declared for key, declared in contents.tensors.items()}

    return change


def _recount(contents: Contents) -> None:
    if "low_rank_tensors" in contents.metadata:
        contents.count()


def all_of(*changes: Change) -> Change:
    """One change after the other."""

    def change(contents: Contents) -> None:
        for one in changes:
            one(contents)

    return change


def overwrite(file: Path, key: str, element: int, value: float) -> None:
    """Another number in the file's data (BF16)."""
    stored = read_header(file).tensors[key]
    assert stored.dtype == torch.bfloat16
    bits = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    with file.open("r+b") as opened:
        opened.seek(stored.offset + 2 * element)
        opened.write(struct.pack("<H", bits))
