"""Writes the files of one component: a configuration, and tensors in one file or in shards with their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from export.checkpoint.safetensors_file import Declared, write_sparse, write_tensors
from export.miniature.tokenizer import dumps


@dataclass(frozen=True)
class Content:
    """What a component's files hold: declarations always, and values unless the files are to be sparse."""

    declared: Mapping[str, Declared]
    values: Mapping[str, torch.Tensor] | None


def diffusers_config(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a diffusers class."""
    return {"_class_name": name, "_diffusers_version": "0.42.1", **arguments}


def write_json(file: Path, value: Any) -> None:
    """A JSON file, and the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dumps(value), encoding="utf-8")


def write_component(directory: Path, stem: str, shards: int, content: Content) -> None:
    """Writes one file, or `shards` of about equal size with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    groups = _split(content.declared, shards)
    names = [f"{stem}-{index:05d}-of-{shards:05d}.safetensors" for index in range(1, shards + 1)]
    for name, group in zip(names if shards > 1 else [f"{stem}.safetensors"], groups, strict=True):
        if content.values is None:
            write_sparse(directory / name, {key: content.declared[key] for key in group}, {"format": "pt"})
        else:
            write_tensors(directory / name, {key: content.values[key] for key in group}, {"format": "pt"})
    if shards > 1:
        total = sum(declared.nbytes for declared in content.declared.values())
        placement = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placement.items()))}
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(declared: Mapping[str, Declared], shards: int) -> list[list[str]]:
    """Consecutive tensors in name order, cut where the running size passes each share."""
    share = sum(one.nbytes for one in declared.values()) / shards
    groups: list[list[str]] = [[] for _ in range(shards)]
    position = 0
    for key in sorted(declared):
        groups[min(int(position / share), shards - 1)].append(key)
        position += declared[key].nbytes
    return groups
