"""Renders the Triton model repository of one engine store.

Only the request's own files, tokens, embeddings, latents and finished MP4s cross model borders; frames are decoded and
encoded inside one model. Whatever runs engines holds the device while it does, so that memory is needed for one request
at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from engines.store import EngineStore, Manifest
from plugins.dimensions import AUDIO_CHANNELS
from runtime.reference_kinds import INPUTS
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
from triton_repo.names import (
    CACHE_PARAMETER,
    DECODE,
    DEFAULT_CONDITION_CACHE,
    DEFAULT_HANG_SECONDS,
    DEFAULT_QUEUE,
    DEFAULT_QUEUE_SECONDS,
    DENOISE,
    ENCODE,
    ENSEMBLE,
    MEDIA_HOSTS_PARAMETER,
    MEDIA_ROOT_PARAMETER,
    PREPARE,
    STALL_PARAMETER,
    STALL_SHARE,
    STATE_PARAMETER,
    STORE_PARAMETER,
    STREAM,
    WARM,
    WARM_PARAMETER,
)

PROMPT = Tensor("PROMPT", DataType.STRING, (1,))
PARAMS = Tensor("PARAMS", DataType.STRING, (1,))
MEDIA_INPUTS = tuple(Tensor(name, DataType.STRING, (DYNAMIC,), optional=True) for name in INPUTS.values())
"""Files of a request, each element a whole one."""
RESOLVED = Tensor("RESOLVED", DataType.STRING, (1,))
EVENT = Tensor("EVENT", DataType.STRING, (1,))
MP4 = Tensor("MP4", DataType.STRING, (DYNAMIC,))
"""One element for each output."""
TOKENS = Tensor("TOKENS", DataType.INT64, (DYNAMIC,))
TAGS = Tensor("TAGS", DataType.INT64, (DYNAMIC,))
MEDIA = Tensor("MEDIA", DataType.STRING, (DYNAMIC,))
"""The files of the resolved request, in its order."""

INDEX = Tensor("INDEX", DataType.INT64, (1,))
"""Which output an MP4 or a fragment of a stream is of."""
FRAGMENT = Tensor("FRAGMENT", DataType.STRING, (1,))
"""The next piece of a fragmented MP4: all pieces of an output, one behind the other, are the file that `h3` gives."""
REQUEST = (PROMPT, PARAMS, *MEDIA_INPUTS)

FETCHERS = 4
"""Instances of h3_prepare where it may wait for other hosts."""


_SOURCES = {PREPARE: "prepare", ENCODE: "encode", DENOISE: "denoise", DECODE: "decode", STREAM: "stream"}
DEVICE = InstanceGroup(resources=(Resource("H3_DEVICE"),), weight=1 << 20)
"""Of models that take turns on the device: so heavy that what needs none, as a dry run, is never behind one of them."""


@dataclass(frozen=True)
class RepositorySettings:
    """What an operator may choose.

    max_queue_size: requests of one priority that wait for a model before more are refused. queue_timeout: seconds after
    which one that still waits is refused. media_hosts, media_root: where URLs of media may lead to.
    condition_cache: bytes of encoded prompts and references that ranks, or else each of h3_encode and h3_stream, may
    keep. state: the folder of what the server remembers from one start to the next; None: it remembers nothing. warm:
    run requests of each size that the engines are for before the models are ready; None: on GPUs. hang: seconds after
    which a server that does not move is started again; its ranks are earlier, so that they may mend it. 0: never.
    """

    max_queue_size: int = DEFAULT_QUEUE
    queue_timeout: float = DEFAULT_QUEUE_SECONDS
    media_hosts: tuple[str, ...] = ()
    media_root: Path | None = None
    condition_cache: int = DEFAULT_CONDITION_CACHE
    state: Path | None = None
    warm: bool | None = None
    hang: float = DEFAULT_HANG_SECONDS

    def parameters(self, store: Path) -> dict[str, str]:
        """The parameters of every Python model."""
        return {
            STORE_PARAMETER: str(store.resolve()),
            MEDIA_HOSTS_PARAMETER: ",".join(self.media_hosts),
            MEDIA_ROOT_PARAMETER: "" if self.media_root is None else str(self.media_root.resolve()),
            CACHE_PARAMETER: str(self.condition_cache),
            WARM_PARAMETER: WARM if self.warm else "no",
            STALL_PARAMETER: str(self.hang * STALL_SHARE),
            STATE_PARAMETER: "" if self.state is None else str(self.state.resolve()),
        }


def model_configs(store: Path, manifest: Manifest, settings: RepositorySettings) -> tuple[ModelConfig, ...]:
    """The configurations of all models, with shapes and element types from the store's manifest."""
    warm = manifest.profile.on_gpu if settings.warm is None else settings.warm
    parameters = replace(settings, warm=warm).parameters(store)
    queue = QueuePolicy(settings.max_queue_size, round(settings.queue_timeout * 1e6))
    encoded, latents = _stage_tensors(manifest)
    conditions = (RESOLVED, encoded[0], TAGS, *encoded[1:])
    steps = (
        _step(PREPARE, REQUEST, (RESOLVED, TOKENS, TAGS, MEDIA)),
        _step(ENCODE, (RESOLVED, TOKENS, TAGS, MEDIA), encoded),
        _step(DENOISE, conditions, latents),
        _step(DECODE, (RESOLVED, *latents), (MP4,)),
    )
    prepare = InstanceGroup(FETCHERS if settings.media_hosts else 1)
    return (
        ModelConfig(PREPARE, REQUEST, (RESOLVED, TOKENS, TAGS, MEDIA), prepare, parameters=parameters),
        ModelConfig(ENCODE, (RESOLVED, TOKENS, TAGS, MEDIA), encoded, DEVICE, queue, parameters=parameters),
        ModelConfig(DENOISE, conditions, latents, DEVICE, queue, parameters=parameters),
        # No limits here: what arrives has been denoised, which is the work that a refusal would throw away.
        ModelConfig(DECODE, (RESOLVED, *latents), (MP4,), DEVICE, QueuePolicy(0), parameters=parameters),
        ModelConfig(ENSEMBLE, REQUEST, (MP4, RESOLVED), steps=steps),
        ModelConfig(STREAM, REQUEST, (EVENT, RESOLVED, INDEX, MP4, FRAGMENT), DEVICE, queue, True, parameters),
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


def _stage_tensors(manifest: Manifest) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What encoding gives, and what denoising gives.

    Text embedding [rows, features], condition rows of pictures [rows, 96] and of sounds [rows, 32]; latents of each
    output, of the video [outputs, channels, T, h, w] and of the sound [outputs, 2, channels, A].
    """
    dimensions = manifest.dimensions
    hidden = manifest.graphs["text_encoder.embedding"].outputs[0].dtype
    compute = {"float32": DataType.FP32, "bfloat16": DataType.BF16}[hidden]
    sound = dimensions.audio_vae.latent_channels
    encoded = (
        Tensor("TEXT", compute, (DYNAMIC, dimensions.text_encoder.hidden)),
        Tensor("CONDITION_VIDEO", DataType.FP32, (DYNAMIC, dimensions.denoiser.video_row)),
        Tensor("CONDITION_AUDIO", DataType.FP32, (DYNAMIC, sound)),
    )
    latents = (
        Tensor("VIDEO", DataType.FP32, (DYNAMIC, dimensions.video_vae.latent_channels, DYNAMIC, DYNAMIC, DYNAMIC)),
        Tensor("AUDIO", DataType.FP32, (DYNAMIC, AUDIO_CHANNELS, sound, DYNAMIC)),
    )
    return encoded, latents


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
