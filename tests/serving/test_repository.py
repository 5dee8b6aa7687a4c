"""The rendered repository says what the models are, and can be read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hypothesis.strategies as st
import pytest
from google.protobuf import text_format
from hypothesis import given
from tritonclient.grpc import model_config_pb2

from tests.conftest import Demonstration
from triton_repo import pbtxt
from triton_repo.config import (
    DYNAMIC,
    DataType,
    EnsembleStep,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    Resource,
    Tensor,
)
from triton_repo.repository import RepositorySettings, render

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
TENSORS = st.builds(
    Tensor,
    NAMES,
    st.sampled_from(DataType),
    st.lists(st.integers(1, 99) | st.just(DYNAMIC), min_size=1, max_size=4).map(tuple),
)
INPUTS = st.builds(dataclasses.replace, TENSORS, optional=st.booleans())
PYTHON_MODELS = st.builds(
    ModelConfig,
    NAMES,
    st.lists(INPUTS, max_size=3).map(tuple),
    st.lists(TENSORS, max_size=3).map(tuple),
    instance_group=st.builds(
        InstanceGroup,
        count=st.integers(1, 4),
        resources=st.lists(st.builds(Resource, NAMES, st.integers(1, 9), st.booleans()), max_size=2).map(tuple),
        weight=st.integers(1, 1 << 31),
    ),
    queue=st.none() | st.builds(QueuePolicy, st.integers(0, 99), st.integers(0, 10**9)),
    decoupled=st.booleans(),
    parameters=st.dictionaries(NAMES, NAMES, max_size=3),
)
MAPS = st.dictionaries(NAMES, NAMES, min_size=1, max_size=3)
ENSEMBLES = st.builds(
    ModelConfig,
    NAMES,
    st.lists(TENSORS, max_size=3).map(tuple),
    st.lists(TENSORS, max_size=3).map(tuple),
    steps=st.lists(st.builds(EnsembleStep, NAMES, MAPS, MAPS), min_size=1, max_size=3).map(tuple),
)


@given(PYTHON_MODELS | ENSEMBLES)
def test_a_configuration_survives_the_round_trip(config: ModelConfig) -> None:
    assert pbtxt.parse(pbtxt.render(config)) == config


@given(PYTHON_MODELS)
def test_tritons_own_schema_reads_every_field(config: ModelConfig) -> None:
    message = text_format.Parse(pbtxt.render(config), model_config_pb2.ModelConfig())
    assert (message.name, message.backend, message.max_batch_size) == (config.name, "python", 0)
    assert [tuple(entry.dims) for entry in message.output] == [tensor.dims for tensor in config.outputs]
    assert message.HasField("dynamic_batching") is (config.queue is not None)
    assert message.model_transaction_policy.decoupled is config.decoupled


def test_text_that_is_no_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config.pbtxt: 1:1"):
        pbtxt.parse("nonsense {")


def test_the_repository_of_a_store(demonstration: Demonstration, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "h3" / "2").mkdir(parents=True)
    configs = render(demonstration.store, tmp_path, RepositorySettings(max_queue_size=3, queue_timeout=1.5))
    assert {path.name for path in tmp_path.iterdir()} == {config.name for config in configs} | {"mine"}
    for config in configs:
        folder = tmp_path / config.name
        assert pbtxt.parse((folder / "config.pbtxt").read_text()) == config
        assert [path.name for path in folder.iterdir() if path.is_dir()] == ["1"]
        assert (folder / "1" / "model.py").is_file() is not bool(config.steps)
    by_name = {config.name: config for config in configs}
    assert by_name["h3_stream"].queue == QueuePolicy(3, 1_500_000)
    assert by_name["h3_decode"].queue == QueuePolicy(0)


def test_only_small_tensors_cross_model_borders(demonstration: Demonstration, tmp_path: Path) -> None:
    """Frames do not: of pictures and sounds only the files that were sent, latents and rows, and the MP4."""
    ensemble = next(c for c in render(demonstration.store, tmp_path, RepositorySettings()) if c.steps)
    passed = {name for step in ensemble.steps for name in (*step.inputs.values(), *step.outputs.values())}
    sent, conditions = {"IMAGES", "VIDEOS", "AUDIOS", "MEDIA"}, {"TAGS", "CONDITION_VIDEO", "CONDITION_AUDIO"}
    assert passed == {"PROMPT", "PARAMS", "RESOLVED", "TOKENS", "TEXT", "VIDEO", "AUDIO", "MP4"} | sent | conditions
