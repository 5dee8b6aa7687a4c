"""Reads one component's tensors from its directory: a single safetensors file, or shards listed by an index."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored
from export.checkpoint.safetensors_file import Header, read_header
from export.checkpoint.strict_json import read_object, section


@dataclass(frozen=True)
class ComponentFiles:
    """The safetensors files of one component and the tensors in them, by stored key. `listing` names the keys."""

    listing: Path
    headers: tuple[Header, ...]
    tensors: Mapping[str, Stored]

    def declared(self, name: str) -> str | None:
        """The value of a `__metadata__` entry, which all files that carry it must agree on.

        Raises:
            CheckpointError: two files disagree.
        """
        holders = [header for header in self.headers if name in header.metadata]
        for header in holders:
            if header.metadata[name] != holders[0].metadata[name]:
                wanted = f"{holders[0].metadata[name]!r} as in {holders[0].file.name}"
                raise CheckpointError(header.file, f"__metadata__.{name}", wanted, repr(header.metadata[name]))
        return holders[0].metadata[name] if holders else None


def read_files(directory: Path, stem: str) -> ComponentFiles:
    """Reads `<stem>.safetensors`, or the shards that `<stem>.safetensors.index.json` lists.

    Raises:
        CheckpointError: neither or both are there, a header is bad, or index and shards disagree.
    """
    single, index = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
    if index.exists() and single.exists():
        raise CheckpointError(directory, stem, f"either {single.name} or {index.name}", "both")
    if index.exists():
        return _read_shards(directory, stem, index)
    if not single.exists():
        names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else "no such directory"
        raise CheckpointError(directory, stem, f"{single.name} or {index.name} (safetensors only)", names)
    header = read_header(single)
    return ComponentFiles(single, (header,), header.tensors)


def _read_shards(directory: Path, stem: str, index: Path) -> ComponentFiles:
    contents = read_object(index)
    placement = section(contents, "weight_map", index)
    names = sorted({_shard_name(index, key, name) for key, name in placement.items()})
    _refuse_unlisted_shards(directory, stem, index, names)
    headers = tuple(read_header(directory / name) for name in names)
    tensors: dict[str, Stored] = {}
    for header in headers:
        for key, stored in header.tensors.items():
            if placement.get(key) != header.file.name:
                wanted = f"{key} in {placement.get(key, 'no shard')}, as {index.name} says"
                raise CheckpointError(header.file, key, wanted, f"it in {header.file.name}")
            tensors[key] = stored
    for key, name in placement.items():
        if key not in tensors:
            raise CheckpointError(directory / name, key, f"the tensor, as {index.name} says", "no such tensor")
    _check_total(index, contents, sum(stored.nbytes for stored in tensors.values()))
    return ComponentFiles(index, headers, tensors)


def _shard_name(index: Path, key: str, name: Any) -> str:
    plain = isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
    if not plain:
        raise CheckpointError(index, key, "the name of a .safetensors file in the same directory", repr(name)[:80])
    return str(name)


def _refuse_unlisted_shards(directory: Path, stem: str, index: Path, names: list[str]) -> None:
    pattern = re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}\.safetensors")
    unlisted = {path.name for path in directory.iterdir() if pattern.fullmatch(path.name)} - set(names)
    if unlisted:
        found = f"no mention of {min(unlisted)}"
        raise CheckpointError(index, "weight_map", f"every shard in {directory.name}/", found)


def _check_total(index: Path, contents: Mapping[str, Any], nbytes: int) -> None:
    metadata = contents.get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, dict) else None
    if declared is not None and declared != nbytes:
        raise CheckpointError(index, "metadata.total_size", f"{nbytes} bytes, as in the shards", declared)
