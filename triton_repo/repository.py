"""Renders the Triton model repository of one engine store.

Only tokens, the text embedding, latents and the finished MP4 cross model borders; frames are made and encoded inside
one model. Whatever runs engines holds the device while it does, so that memory is needed for one request at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from engines.store import EngineStore, Manifest
from plugins.dimensions import AUDIO_CHANNELS
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
from triton_repo.names import DECODE, DENOISE, ENCODE, ENSEMBLE, PREPARE, STORE_PARAMETER, STREAM

PROMPT = Tensor("PROMPT", DataType.STRING, (1,))
PARAMS = Tensor("PARAMS", DataType.STRING, (1,))
RESOLVED = Tensor("RESOLVED", DataType.STRING, (1,))
EVENT = Tensor("EVENT", DataType.STRING, (1,))
MP4 = Tensor("MP4", DataType.STRING, (1,))
TOKENS = Tensor("TOKENS", DataType.INT64, (DYNAMIC,))

_SOURCES = {PREPARE: "prepare", ENCODE: "encode", DENOISE: "denoise", DECODE: "decode", STREAM: "stream"}
_DEVICE = InstanceGroup(resources=(Resource("H3_DEVICE"),))


@dataclass(frozen=True)
class RepositorySettings:
    """What an operator may choose. `max_queue_size`: requests that wait for a model before more are refused."""

    max_queue_size: int = 8


def model_configs(store: Path, manifest: Manifest, settings: RepositorySettings) -> tuple[ModelConfig, ...]:
    """The configurations of all models, with shapes and element types from the store's manifest."""
    parameters = {STORE_PARAMETER: str(store.resolve())}
    queue = QueuePolicy(settings.max_queue_size)
    text, video, audio = _stage_tensors(manifest)
    return (
        ModelConfig(PREPARE, (PROMPT, PARAMS), (RESOLVED, TOKENS), InstanceGroup(), parameters=parameters),
        ModelConfig(ENCODE, (TOKENS,), (text,), _DEVICE, queue, parameters=parameters),
        ModelConfig(DENOISE, (RESOLVED, text), (video, audio), _DEVICE, queue, parameters=parameters),
        # No limit here: what arrives has been denoised, which is the work that a refusal would throw away.
        ModelConfig(DECODE, (RESOLVED, video, audio), (MP4,), _DEVICE, parameters=parameters),
        ModelConfig(ENSEMBLE, (PROMPT, PARAMS), (MP4, RESOLVED), steps=_steps(text, video, audio)),
        ModelConfig(STREAM, (PROMPT, PARAMS), (EVENT, RESOLVED, MP4), _DEVICE, queue, True, parameters),
    )


def render(store: Path, directory: Path, settings: RepositorySettings) -> tuple[ModelConfig, ...]:
    """Write the repository of the engine store `store` into `directory` and return its models.

    The models' own folders are replaced; anything else in `directory` is left alone. Raises StoreError.
    """
    configs = model_configs(store, EngineStore.open(store).manifest, settings)
    directory.mkdir(parents=True, exist_ok=True)
    for config in configs:
        _write_model(directory / config.name, config)
    return configs


def _stage_tensors(manifest: Manifest) -> tuple[Tensor, Tensor, Tensor]:
    """Text embedding [rows, features], video latents [1, channels, T, h, w] and audio latents [2, channels, A]."""
    dimensions = manifest.dimensions
    hidden = manifest.graphs["text_encoder.layer"].outputs[0].dtype
    compute = {"float32": DataType.FP32, "bfloat16": DataType.BF16}[hidden]
    return (
        Tensor("TEXT", compute, (DYNAMIC, dimensions.text_encoder.hidden)),
        Tensor("VIDEO", DataType.FP32, (1, dimensions.video_vae.latent_channels, DYNAMIC, DYNAMIC, DYNAMIC)),
        Tensor("AUDIO", DataType.FP32, (AUDIO_CHANNELS, dimensions.audio_vae.latent_channels, DYNAMIC)),
    )


def _steps(text: Tensor, video: Tensor, audio: Tensor) -> tuple[EnsembleStep, ...]:
    return (
        _step(PREPARE, (PROMPT, PARAMS), (RESOLVED, TOKENS)),
        _step(ENCODE, (TOKENS,), (text,)),
        _step(DENOISE, (RESOLVED, text), (video, audio)),
        _step(DECODE, (RESOLVED, video, audio), (MP4,)),
    )


def _step(model: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> EnsembleStep:
    """A step whose tensors have the same names in the ensemble."""
    return EnsembleStep(model, {t.name: t.name for t in inputs}, {t.name: t.name for t in outputs})


def _write_model(folder: Path, config: ModelConfig) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    # Triton wants a version folder even for an ensemble, which has nothing to put there.
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(pbtxt.render(config), encoding="utf-8")
    if config.name in _SOURCES:
        source = resources.files("triton_repo.models").joinpath(f"{_SOURCES[config.name]}.py")
        (version / "model.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
