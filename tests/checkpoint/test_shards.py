"""An index and its shards must say the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export.checkpoint import CheckpointError
from export.checkpoint.safetensors_file import write_tensors
from export.checkpoint.shards import read_files

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_tensors(tmp_path / FIRST, {"a": torch.ones(3)}, {"format": "pt"})
    write_tensors(tmp_path / SECOND, {"b": torch.zeros(2, 2)}, {"format": "pt"})
    write_index(tmp_path, {"a": FIRST, "b": SECOND}, total_size=28)
    return tmp_path


def write_index(directory: Path, weight_map: Any, **metadata: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def test_shards_are_read_as_one_component(sharded: Path) -> None:
    files = read_files(sharded, "model")
    assert {key: stored.file.name for key, stored in files.tensors.items()} == {"a": FIRST, "b": SECOND}
    assert files.listing == sharded / INDEX


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(3)}, {})
    assert read_files(tmp_path, "model").listing == tmp_path / "model.safetensors"


def lose_shard(directory: Path) -> None:
    (directory / SECOND).unlink()


def truncate_shard(directory: Path) -> None:
    contents = (directory / SECOND).read_bytes()
    (directory / SECOND).write_bytes(contents[:-1])


def add_single_file(directory: Path) -> None:
    write_tensors(directory / "model.safetensors", {"a": torch.ones(3)}, {})


def add_unlisted_shard(directory: Path) -> None:
    write_tensors(directory / "model-00003-of-00003.safetensors", {"c": torch.ones(1)}, {})


def add_unlisted_tensor(directory: Path) -> None:
    write_tensors(directory / SECOND, {"b": torch.zeros(2, 2), "c": torch.ones(1)}, {})


def store_one_tensor_twice(directory: Path) -> None:
    write_tensors(directory / SECOND, {"b": torch.zeros(2, 2), "a": torch.ones(3)}, {})


FAULTS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "missing shard": (lose_shard, SECOND, "file", "no such file"),
    "truncated shard": (truncate_shard, SECOND, "b", "truncated"),
    "both forms": (add_single_file, "", "model", "both"),
    "unlisted shard": (add_unlisted_shard, INDEX, "weight_map", "no mention of model-00003-of-00003"),
    "unlisted tensor": (add_unlisted_tensor, SECOND, "c", "c in no shard"),
    "tensor in two shards": (store_one_tensor_twice, SECOND, "a", f"a in {FIRST}"),
    "tensor in no shard": (lambda d: write_index(d, {"a": FIRST, "b": SECOND, "c": FIRST}), FIRST, "c", "no such"),
    "swapped": (lambda d: write_index(d, {"a": SECOND, "b": FIRST}), FIRST, "a", f"a in {SECOND}"),
    "total": (lambda d: write_index(d, {"a": FIRST, "b": SECOND}, total_size=27), INDEX, "metadata.total_size", "27"),
    "no map": (lambda d: write_index(d, [FIRST]), INDEX, "weight_map", "an object"),
    "escaping name": (lambda d: write_index(d, {"a": "../" + FIRST}), INDEX, "a", r"\.\./"),
    "pickle": (lambda d: write_index(d, {"a": "pytorch_model.bin"}), INDEX, "a", "pytorch_model.bin"),
    "index not JSON": (lambda d: (d / INDEX).write_text("{") and None, INDEX, "contents", "Expecting"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disagreement_is_refused_naming_file_and_key(sharded: Path, fault: str) -> None:
    breaking, file, key, message = FAULTS[fault]
    breaking(sharded)
    with pytest.raises(CheckpointError, match=message) as refused:
        read_files(sharded, "model")
    assert (refused.value.file, refused.value.key) == (sharded / file, key)


def test_pickle_files_are_never_opened(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match=r"safetensors only.*model\.bin"):
        read_files(tmp_path, "model")


def test_a_declaration_must_be_the_same_in_all_files_that_make_it(sharded: Path) -> None:
    write_tensors(sharded / FIRST, {"a": torch.ones(3)}, {"qkv_layout": "stacked"})
    assert read_files(sharded, "model").declared("qkv_layout") == "stacked"
    write_tensors(sharded / SECOND, {"b": torch.zeros(2, 2)}, {"qkv_layout": "interleaved"})
    with pytest.raises(CheckpointError, match=r"stacked.*interleaved"):
        read_files(sharded, "model").declared("qkv_layout")
