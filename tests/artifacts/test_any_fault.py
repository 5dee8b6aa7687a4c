"""Whatever single thing is wrong with a file, it is refused, and with the one error that says where."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.artifacts import Artifact, Base, metadata, read_artifact
from export.checkpoint import Checkpoint, CheckpointError
from export.checkpoint.safetensors_file import Declared, Header, read_header
from export.miniature import FOLDERS
from tests.artifacts.damage import Change, Contents, damaged, say

MANY_STEPS = f"fastvideo/{'9' * 5000}-step-fasth3"
STRANGE = ("nan", "inf", "-1", "0", "1e999", "64", "fastvideo/fasth3", "fastvideo/_fasth3", MANY_STEPS)
ADAPTERS = ("fasth3_v1_dense", "fasth3_v1_vsa", "turbo_4step", "turbo_8step", "turbo_ref2v", "flashgen")


def source(artifacts: Path, name: str) -> Path:
    found = artifacts / FOLDERS[name]
    return found if found.is_file() else found / "adapter_model.safetensors"


def without(key: str) -> Change:
    def change(contents: Contents) -> None:
        del contents.tensors[key]

    return change


def reshaped(key: str, shape: tuple[int, ...]) -> Change:
    def change(contents: Contents) -> None:
        contents.tensors[key] = Declared(shape, contents.tensors[key].dtype)

    return change


def renamed(key: str) -> Change:
    def change(contents: Contents) -> None:
        contents.tensors[f"x{key}"] = contents.tensors.pop(key)

    return change


@pytest.mark.parametrize("name", ADAPTERS)
def test_no_tensor_can_be_missing_renamed_or_of_another_shape(
    name: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    file, base = source(artifacts, name), Base.of(checkpoint)
    accepted = []
    for key, stored in read_header(file).tensors.items():
        first, *rest = stored.shape
        shapes = ((first + 1, *rest), tuple(reversed(stored.shape)) if rest else (first, 1), (first * sum(rest, 1),))
        for change in (
            without(key),
            renamed(key),
            *(reshaped(key, shape) for shape in shapes if shape != stored.shape),
        ):
            try:
                read_artifact(damaged(file, tmp_path, change), base)
            except CheckpointError:
                continue
            accepted.append(key)
    assert accepted == []


@pytest.mark.parametrize("name", ADAPTERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_metadata_of_any_text_are_read_or_refused(
    name: str, artifacts: Path, checkpoint: Checkpoint, tmp_path: Path, data: st.DataObject
) -> None:
    file = source(artifacts, name)
    key = data.draw(st.sampled_from(sorted(read_header(file).metadata)))
    value = data.draw(st.text(max_size=30) | st.sampled_from(STRANGE))
    try:
        artifact = read_artifact(damaged(file, tmp_path, say(key, value)), Base.of(checkpoint))
    except CheckpointError:
        return
    assert isinstance(artifact, Artifact)
    assert artifact.metadata[key] == value


def header(value: str) -> Header:
    return Header(Path("file.safetensors"), {}, {"key": value}, 0, "")


@given(st.text(max_size=60) | st.lists(st.floats().map(str), max_size=7).map(",".join))
def test_positions_fall_from_at_most_1_to_0_or_are_refused(text: str) -> None:
    try:
        positions = metadata.take_positions(header(text), "key", 5)
    except CheckpointError:
        return
    assert list(positions) == sorted(set(positions), reverse=True) == [float(part) for part in text.split(",")]
    assert len(positions) == 5
    assert positions[0] <= 1
    assert positions[-1] == 0


@given(st.lists(st.floats(0.001, 1), min_size=4, max_size=4, unique=True))
def test_positions_that_fall_are_taken_as_they_are(numbers: list[float]) -> None:
    positions = (*sorted(numbers, reverse=True), 0.0)
    assert metadata.take_positions(header(",".join(map(repr, positions))), "key", 5) == positions


@given(st.floats() | st.text(max_size=20))
def test_a_scale_is_a_positive_finite_number_or_is_refused(value: float | str) -> None:
    try:
        number = metadata.take_number(header(str(value)), "key", "a number")
    except CheckpointError:
        return
    assert 0 < number < float("inf")
    assert number == float(value)


def test_an_error_shows_strange_names_as_text() -> None:
    """A name may be of any length, and may hold what moves a terminal's cursor."""
    assert "\x1b" not in str(CheckpointError("f", "\x1b[2J", "x", "y"))
    assert len(str(CheckpointError("f", "k" * 10**6, "x", "y"))) < 300
    assert CheckpointError("f", "k" * 10**6, "x", "y").key == "k" * 10**6
    told = CheckpointError("\x1b[2Jf", "k", "\x1b[2J" + "e" * 10**6, "f\u202e" * 10**6)
    assert str(told).isprintable()
    assert len(str(told)) < 8000
    assert told.expected == "\x1b[2J" + "e" * 10**6
