"""A store that cannot be served from is refused with what is wrong and the command that mends it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from engines.store import (
    SCHEMA_VERSION,
    EngineStore,
    FileRecord,
    Manifest,
    StoreError,
    file_sha256,
    rebuild_command,
    write_atomically,
)
from tests.engines.workshop import Workshop


def refusal(workshop: Workshop) -> str:
    """The message with which the store is refused; it must end with the command that rebuilds it."""
    with pytest.raises(StoreError) as refused:
        EngineStore.open(workshop.store)
    message = str(refused.value)
    assert message.endswith(f"run: {rebuild_command(workshop.store, str(workshop.profile), workshop.checkpoint)}")
    return message


def edit_manifest(store: Path, **changes: Any) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_a_finished_store_opens_with_the_checkpoints_tokenizer(workshop: Workshop) -> None:
    store = EngineStore.open(workshop.store)
    assert store.tokenizer_file.read_bytes() == (workshop.checkpoint / "tokenizer.json").read_bytes()
    assert store.manifest.graphs["attend"].instances == 2
    assert store.manifest.graphs["attend"].census["com.microsoft::MultiHeadAttention"] == 1
    assert 0 < store.manifest.graphs["attend"].difference <= store.manifest.graphs["attend"].tolerance


def test_without_a_manifest(workshop: Workshop) -> None:
    (workshop.store / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"manifest.json: cannot be read: No such file") as refused:
        EngineStore.open(workshop.store)
    command = f"h3trt engines build --profile {workshop.profile} --checkpoint {workshop.checkpoint}"
    assert str(refused.value).endswith(f"to go on, run: {command} --store {workshop.store} --resume")


def test_without_anything_to_tell_what_it_was_built_from(workshop: Workshop) -> None:
    (workshop.store / "manifest.json").unlink()
    (workshop.store / "begun.json").unlink()
    command = f"h3trt engines build --profile PROFILE --checkpoint CHECKPOINT --store {workshop.store}"
    with pytest.raises(StoreError) as refused:
        EngineStore.open(workshop.store)
    assert str(refused.value).endswith(f"with the profile and the checkpoint's directory put in: {command}")


def test_a_missing_store_in_the_usual_place_names_its_profile(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"--profile cpu --checkpoint CHECKPOINT --store {tmp_path}/engines/cpu$"):
        EngineStore.open(tmp_path / "engines" / "cpu")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema_version": 1}', b"\xff\xfe\x00"])
def test_a_manifest_that_is_none(workshop: Workshop, content: bytes) -> None:
    (workshop.store / "manifest.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"is not a manifest; nothing here tells what it was built from.*CHECKPOINT"):
        EngineStore.open(workshop.store)


def test_another_schema_version(workshop: Workshop) -> None:
    edit_manifest(workshop.store, schema_version=99, since="tomorrow")
    assert f"schema version {SCHEMA_VERSION} expected, 99 found" in refusal(workshop)


def test_a_manifest_field_of_the_wrong_kind(workshop: Workshop) -> None:
    edit_manifest(workshop.store, weight_files="none")
    assert "manifest.json: weight_files: " in refusal(workshop)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../store/manifest.json", "tokenizer/../../store/manifest.json", "", "a\0"]
)
def test_a_file_outside_the_store_is_not_looked_at(workshop: Workshop, path: str) -> None:
    edit_manifest(workshop.store, tokenizer={"path": path, "sha256": "0" * 64})
    assert f"manifest.json: tokenizer.path: {path!r}: must be the path of a file within the store" in refusal(workshop)


@pytest.mark.parametrize(
    "region", [[99, 0, [1]], [-1, 0, [1]], [0, -4, [1]], [0, 0, [10**30]], [0, 10**30, [1]], [0, 0, [-1]]]
)
def test_a_weight_that_no_file_holds(workshop: Workshop, region: list[Any]) -> None:
    bindings = json.loads((workshop.store / "manifest.json").read_text())["bindings"]
    weight = next(iter(bindings["fl2va"]["attend"][1]))
    bindings["fl2va"]["attend"][1][weight] = region
    edit_manifest(workshop.store, bindings=bindings)
    assert f"manifest.json: bindings.fl2va.attend.1: {weight}: not within the weight files" in refusal(workshop)


def test_weights_that_are_bound_to_nothing(workshop: Workshop) -> None:
    bindings = json.loads((workshop.store / "manifest.json").read_text())["bindings"]
    edit_manifest(workshop.store, bindings={"fl2va": bindings["fl2va"]})
    assert "manifest.json: bindings.ref2va." in refusal(workshop)
    bindings["fl2va"]["attend"][0].clear()
    edit_manifest(workshop.store, bindings=bindings)
    assert "manifest.json: bindings.fl2va.attend.0: " in refusal(workshop)
    bindings["fl2va"]["attend"].pop()
    edit_manifest(workshop.store, bindings=bindings)
    assert "manifest.json: bindings.fl2va.attend: 2 instances expected, 1 found" in refusal(workshop)


def test_a_corrupt_engine(workshop: Workshop) -> None:
    file = workshop.engine_file("table")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert f"{file}: is not the file that was built: SHA-256 " in refusal(workshop)


def test_an_engine_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine"
    file.write_bytes(b"built")
    record = FileRecord(path="engine", sha256=file_sha256(file))
    store = EngineStore(tmp_path, Manifest.model_construct())
    assert store.read(record) == b"built"
    reads = iter([b"another", b"built"])
    monkeypatch.setattr(Path, "read_bytes", lambda path: next(reads) if path == file else Path.open(path, "rb").read())
    # The file on disk is the one that was built, at any other moment than that of the reading.
    with pytest.raises(StoreError, match="is not the file that was built"):
        store.read(record)


def test_a_missing_engine(workshop: Workshop) -> None:
    file = workshop.engine_file("attend")
    file.unlink()
    assert f"{file}: cannot be read: No such file" in refusal(workshop)


def test_a_missing_tokenizer(workshop: Workshop) -> None:
    file = EngineStore.open(workshop.store).tokenizer_file
    file.unlink()
    assert f"{file}: cannot be read" in refusal(workshop)


def test_a_missing_weight_file(workshop: Workshop) -> None:
    file = workshop.checkpoint / "fl2va.safetensors"
    file.unlink()
    assert f"weight file {file}: " in refusal(workshop)


def test_a_truncated_weight_file(workshop: Workshop) -> None:
    file = workshop.checkpoint / "fl2va.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 2)
    assert f"weight file {file}: {size:,} bytes expected, {size - 2:,} found" in refusal(workshop)


def test_a_weight_file_with_tensors_in_other_places(workshop: Workshop) -> None:
    file = workshop.checkpoint / "ref2va.safetensors"
    data = file.read_bytes()
    for old, new in (
        (b"blocks.0.qkv", b"blocks.x.qkv"),
        (b"blocks.1.qkv", b"blocks.0.qkv"),
        (b"blocks.x.", b"blocks.1."),
    ):
        data = data.replace(old, new)
    assert data != file.read_bytes()
    file.write_bytes(data)
    assert f"weight file {file}: its header has changed" in refusal(workshop)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64])
def test_a_weight_file_that_is_no_safetensors_file(workshop: Workshop, content: bytes) -> None:
    file = workshop.checkpoint / "fl2va.safetensors"
    file.write_bytes(content)
    assert f"weight file {file}: a header of " in refusal(workshop)


def test_another_version_of_the_backend(workshop: Workshop) -> None:
    edit_manifest(workshop.store, versions={"onnxruntime": "1.2.3"})
    installed = onnxruntime.__version__
    assert f"built for onnxruntime 1.2.3, but onnxruntime {installed} is installed" in refusal(workshop)


def test_the_command_quotes_what_a_shell_would_split() -> None:
    command = rebuild_command(Path("/data/my store"), "cpu", "/data/my model")
    assert command == "h3trt engines build --profile cpu --checkpoint '/data/my model' --store '/data/my store'"


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "manifest.json"
    write_atomically(file, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
