"""A request from prompt to MP4 on the engines of a store: the stages that Triton's models call, and all in a row."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from engines.adapters import low_rank_name
from engines.profile import PARTITION_OF
from engines.sessions.engine_set import EngineSet
from engines.sessions.modulation import MODULATION
from engines.store import EngineStore, Manifest
from plugins.dimensions import TEXT_TAG, VIDEO_TAG
from plugins.schedule import Schedule
from runtime.admission import MemoryModel
from runtime.block import block_graphs
from runtime.condition_cache import ConditionCache, Entry, prompt_key, reference_key
from runtime.conditioner import CONDITIONING, Conditioner
from runtime.decode import decode_audio, decode_planes
from runtime.denoiser import Denoiser, State
from runtime.encoder import TextEncoder
from runtime.events import Cancellation, Event, Reporter, Units
from runtime.intake import Files, Intake, Taken
from runtime.media.source import MediaPolicy
from runtime.modulation import ModulationCache, stored_tables
from runtime.mux import Deliver, MediaOptions, Mp4Writer
from runtime.packing import Condition, Layout, layout, patchify_video, unpack_audio, unpatchify_video
from runtime.reference_pixels import ReferencePixels
from runtime.refusal import RequestError
from runtime.request import Media, Resolved
from runtime.rng import Noise, augmented, draw_noise
from runtime.tail import encode_behind
from runtime.text import Tokenizer
from runtime.transfer import to_host
from runtime.vision import VISION

PipelineStage = Literal["encode", "denoise", "decode"]

STAGES: tuple[PipelineStage, ...] = get_args(PipelineStage)

Progress = Callable[[Event], None]

Pieces = Callable[[int, bytes], None]
"""Takes the index of an output and the next piece of its MP4, in the thread that encodes."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a request is conditioned on, on the CPU.

    text [L, text_dim] and tags int64 [L], the modality of each row; condition_video [Nc, 96] and condition_audio
    [Na, 32] float32: clean normalised rows of the references in packed order, none for text alone.
    """

    text: torch.Tensor
    tags: torch.Tensor
    condition_video: torch.Tensor
    condition_audio: torch.Tensor


Latents = tuple[torch.Tensor, torch.Tensor]
"""Clean normalised latents of one output, float32 on the CPU: video [1, 24, T, h, w] and audio [1, 2, 32, A]."""


class Pipeline:
    """The stages of all tasks over one opened store. Serves one request at a time."""

    def __init__(
        self,
        engines: EngineSet,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        cache: ConditionCache | None = None,
        policy: MediaPolicy | None = None,
    ) -> None:
        """cache: of encoded prompts and references; None: nothing is kept. policy: where URLs of media may lead to."""
        self._engines = engines
        self._intake = Intake(engines.manifest, tokenizer, policy)
        self._clock = clock
        self._cache = cache or ConditionCache()
        self._dimensions = engines.manifest.dimensions
        self._conditioner = Conditioner(engines)
        self._encoder = TextEncoder(engines)
        cache_of_tables = ModulationCache(MemoryModel.of(engines.manifest).modulation_cache)
        stored = stored_tables(engines.root, engines.manifest)
        self._denoisers = {p: Denoiser(engines, p, cache_of_tables, stored) for p in engines.partitions}

    @classmethod
    def open(
        cls,
        store: str | Path,
        stages: Collection[PipelineStage] = STAGES,
        cache: ConditionCache | None = None,
        policy: MediaPolicy | None = None,
    ) -> Pipeline:
        """Opens the engines of `stages`. Raises StoreError when the store cannot be served from."""
        opened = EngineStore.open(store)
        graphs = [graph for stage in STAGES if stage in stages for graph in stage_graphs(opened.manifest)[stage]]
        return cls(EngineSet.open(opened, graphs=graphs), Tokenizer(opened.tokenizer_file), cache=cache, policy=policy)

    @property
    def manifest(self) -> Manifest:
        """What the store was built from and for."""
        return self._engines.manifest

    def warm(self) -> None:
        """Opens every engine now, so that the first request is as quick as the others."""
        self._engines.warm()

    def take(self, prompt: bytes | str, params: Mapping[str, Any], files: Files | None = None) -> Taken:
        """The request with every choice made, admitted to this machine's memory, and its files. Raises RequestError."""
        return self._intake.take(prompt, params, files)

    def restore(self, raw: bytes | str) -> Resolved:
        """A resolved request that came over the wire. Raises RequestError unless it is one that `take` can make."""
        return self._intake.restore(raw)

    def retake(
        self, resolved: Resolved, tokens: NDArray[np.int64], tags: NDArray[np.int64], media: Sequence[bytes]
    ) -> Taken:
        """A request whose parts came over the wire: tokens and tags [L], and its files. Raises RequestError."""
        return self._intake.retake(resolved, tokens, tags, media)

    def encode(self, taken: Taken, progress: Progress, cancellation: Cancellation) -> Encoded:
        """What the denoiser is conditioned on. Raises Cancelled, and RequestError for files that do not decode."""
        return self._encode(taken, self._reporter(progress), cancellation)

    def denoise(
        self, resolved: Resolved, encoded: Encoded, progress: Progress, cancellation: Cancellation
    ) -> Iterator[Latents]:
        """The latents of each output, one after the other: output i is what seed + i gives.

        Raises RequestError when memory does not admit it, as a request may reach this stage by itself, and Cancelled.
        """
        _check_encoded(resolved, encoded)
        self._intake.admit(resolved, len(encoded.text))
        return self._denoise(resolved, encoded, self._reporter(progress), cancellation)

    def decode(
        self,
        resolved: Resolved,
        video: torch.Tensor,
        audio: torch.Tensor,
        progress: Progress,
        cancellation: Cancellation,
    ) -> bytes:
        """The MP4 of one output's latents; frames are encoded while the next ones are decoded.

        Raises RequestError when memory does not admit it, as a request may reach this stage by itself, and Cancelled.
        """
        self._intake.admit(resolved, 1)
        return self._decode(resolved, (video, audio), self._reporter(progress), cancellation, lambda piece: None)

    def generate(
        self,
        taken: Taken,
        progress: Progress,
        cancellation: Cancellation,
        pieces: Pieces = lambda index, piece: None,
    ) -> Iterator[bytes]:
        """All stages of one request in this process: an MP4 for each output, when it is ready. Raises Cancelled.

        pieces: is given each MP4 also while it is made: a fragmented one fragment by fragment, another in one piece.
        """
        report = self._reporter(progress)
        encoded = self._encode(taken, report, cancellation)
        # All outputs before the first is decoded: where weights are swapped, they change places once.
        clips = list(self._denoise(taken.resolved, encoded, report, cancellation))
        for index, latents in enumerate(clips):
            yield self._decode(taken.resolved, latents, report, cancellation, partial(pieces, index))

    def noise(self, resolved: Resolved, output: int = 0) -> Noise:
        """The noise that the request's seed and seed convention stand for, of one of its outputs."""
        channels = self._dimensions.denoiser.video_channels, self._dimensions.denoiser.audio_channels
        pictures = [
            (one.latent_frames, one.latent_height, one.latent_width) for one in resolved.references if one.latent_frames
        ]
        grid, seed = _latent_grid(resolved), resolved.seed + output
        return draw_noise(seed, resolved.seed_convention, pictures, grid, resolved.audio_latents, channels)

    def layout(self, resolved: Resolved, tags: torch.Tensor) -> Layout:
        """The packed rows of a request whose text rows have these tags, int64 [L]."""
        conditions = [
            Condition(one.kind, one.role, one.latent_frames, one.latent_height, one.latent_width, one.audio_latents)
            for one in resolved.references
        ]
        grid = _latent_grid(resolved)
        return layout(tags, conditions, *grid, resolved.audio_latents, self._dimensions.denoiser.patch)

    def start(self, resolved: Resolved, encoded: Encoded, output: int = 0) -> tuple[State, State]:
        """What one output's denoising begins with: rows that it is conditioned on, pictures slightly noised and sounds
        clean, and the noise that becomes the clip."""
        noise, patch = self.noise(resolved, output), self._dimensions.denoiser.patch
        conditions = State(augmented(encoded.condition_video, noise, patch), encoded.condition_audio)
        return conditions, State(patchify_video(noise.video, patch), noise.audio_rows)

    def trajectory(self, resolved: Resolved, encoded: Encoded, units: Units) -> Iterator[Iterator[State]]:
        """For each output the rows being denoised: the initial noise, then, on the engines' device, each step's.

        An output's states must be taken before the next output is asked for. Raises Cancelled.
        """
        denoiser = self._denoisers[PARTITION_OF[resolved.task]]
        schedule = schedule_of(resolved)
        with self._stage("denoise"):
            sequence = denoiser.sequence(encoded.text, self.layout(resolved, encoded.tags), resolved.adapter)
            for output in range(resolved.outputs):
                conditions, start = self.start(resolved, encoded, output)
                steps = denoiser.sample(sequence, schedule, resolved.quality, conditions, start, units)
                yield itertools.chain((start,), steps)

    def _encode(self, taken: Taken, report: Reporter, cancellation: Cancellation) -> Encoded:
        resolved, presented = taken.resolved, taken.presented
        pixels = [ReferencePixels(resolved, place, data) for place, data in enumerate(taken.media)]
        sizes = [self._conditioner.units(one) for one in resolved.references]
        total = sum(sizes) + len(presented.vision) + self._encoder.layers
        units = Units("encode", total, report, cancellation)
        with self._stage("encode"):
            rows = []
            for place, end in enumerate(itertools.accumulate(sizes)):
                rows.append(self._condition(taken, place, pixels[place], units))
                units.reach(end)
            (text,) = self._cache.get(prompt_key(resolved, presented), partial(self._text, taken, pixels, units))
            units.reach(total)
        return Encoded(text, torch.from_numpy(presented.tags), *self._joined(rows))

    def _condition(self, taken: Taken, place: int, pixels: ReferencePixels, units: Units) -> Entry:
        """The rows of one reference, of its picture and of its sound."""
        resolved, blocks = taken.resolved, taken.presented.vision
        shown = {frame for block in blocks if block.reference == place for frame in block.frames}
        make = partial(
            self._conditioner.rows, resolved.references[place], pixels, shown, resolved.condition_seed, units
        )
        return self._cache.get(reference_key(resolved, place), make)

    def _text(self, taken: Taken, pixels: list[ReferencePixels], units: Units) -> Entry:
        placed = self._conditioner.pictures(taken.presented, pixels, units)
        return (self._encoder.encode(torch.from_numpy(taken.presented.token_ids), placed, units).cpu(),)

    def _joined(self, rows: list[Entry]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of all references, of both streams."""
        video, audio = zip(*rows, strict=True) if rows else ((), ())
        widths = self._dimensions.denoiser.video_row, self._dimensions.denoiser.audio_channels
        return torch.cat([torch.empty(0, widths[0]), *video]), torch.cat([torch.empty(0, widths[1]), *audio])

    def _stage(self, stage: PipelineStage) -> AbstractContextManager[None]:
        return self._engines.stage(stage_graphs(self.manifest)[stage])

    def _reporter(self, progress: Progress) -> Reporter:
        return Reporter(progress, self._clock)

    def _denoise(
        self, resolved: Resolved, encoded: Encoded, report: Reporter, cancellation: Cancellation
    ) -> Iterator[Latents]:
        units = Units("denoise", resolved.outputs * resolved.forwards, report, cancellation)
        for states in self.trajectory(resolved, encoded, units):
            (state,) = deque(states, maxlen=1)
            yield self.latents(resolved, state)

    def latents(self, resolved: Resolved, state: State) -> Latents:
        """The latents that one output's rows are."""
        video = unpatchify_video(state.video, *_latent_grid(resolved), self._dimensions.denoiser.patch)
        return video.cpu(), unpack_audio(state.audio, resolved.audio_latents).unsqueeze(0).cpu()

    def _decode(
        self,
        resolved: Resolved,
        latents: Latents,
        report: Reporter,
        cancellation: Cancellation,
        deliver: Deliver,
    ) -> bytes:
        video, audio = latents
        made: list[bytes] = []

        def hand_on(piece: bytes) -> None:
            made.append(piece)
            deliver(piece)

        size, rate = (resolved.width, resolved.height), self._dimensions.audio_vae.sample_rate
        placed, colour = video.to(self._engines.device), resolved.media.colour
        with self._stage("decode"):
            waveform = self.waveform(audio[0]).numpy()
            planes = decode_planes(placed, self.decode_tile, self._dimensions.video_vae, colour, report, cancellation)
            writer = Mp4Writer(*size, rate, media_options(resolved.media), hand_on)
            encode_behind((to_host(part) for part in planes), waveform, writer, cancellation)
        return b"".join(made)

    def decode_tile(self, latents: torch.Tensor) -> torch.Tensor:
        """One decoder tile: normalised latents [1, 24, 7, 16, 16] to frames [1, 3, 28, 256, 256], float32."""
        return self._engines.run("video_decoder_tile", {"latents": latents})["frames"].to(latents.device)

    def waveform(self, audio: torch.Tensor) -> torch.Tensor:
        """The soundtrack of normalised latents [2, 32, A]: float32 [2, 800 A]."""

        def run(latents: torch.Tensor) -> torch.Tensor:
            return self._engines.run("audio_decoder", {"latents": latents})["waveform"].cpu()

        with self._engines.stage(("audio_decoder",)):
            return decode_audio(audio, run, self._dimensions.audio_vae)


def schedule_of(resolved: Resolved) -> Schedule:
    """Both clocks of a request."""
    return Schedule.of(resolved.forwards, resolved.video_shift, resolved.audio_shift, resolved.positions)


def media_options(media: Media) -> MediaOptions:
    """A request's options of the MP4 as the writer takes them, in bits a second."""
    return MediaOptions(
        preset=media.preset,
        audio_bitrate=1000 * media.audio_bitrate,
        crf=media.crf,
        video_bitrate=None if media.video_bitrate is None else 1000 * media.video_bitrate,
        container=media.container,
        colour=media.colour,
    )


def stage_graphs(manifest: Manifest) -> Mapping[PipelineStage, tuple[str, ...]]:
    """The engines of a store that each stage runs; a process that serves one stage opens only its own."""
    modulation = (graph for graph in MODULATION if graph in manifest.graphs)
    denoise = ("context", *modulation, "prologue", *block_graphs(manifest), "epilogue")
    with_sides = (graph for graph in map(low_rank_name, denoise) if graph in manifest.graphs)
    return {
        "encode": ("text_encoder.embedding", "text_encoder.layer", *VISION, *CONDITIONING),
        "denoise": (*denoise, *with_sides),
        "decode": ("video_decoder_tile", "audio_decoder"),
    }


def _check_encoded(resolved: Resolved, encoded: Encoded) -> None:
    """Raises RequestError unless there are as many rows as a resolved request has."""
    counts = {
        "TAGS": (len(encoded.tags), len(encoded.text)),
        "CONDITION_VIDEO": (len(encoded.condition_video), resolved.condition_video_rows),
        "CONDITION_AUDIO": (len(encoded.condition_audio), resolved.condition_audio_rows),
    }
    for name, (rows, expected) in counts.items():
        if rows != expected:
            raise RequestError(name, f"{rows} rows", "must have the rows of the resolved request", f"{expected} rows")
    if not bool(((encoded.tags == VIDEO_TAG) | (encoded.tags == TEXT_TAG)).all()):
        raise RequestError("TAGS", "another value", f"must be {VIDEO_TAG} or {TEXT_TAG}")


def _latent_grid(resolved: Resolved) -> tuple[int, int, int]:
    return resolved.latent_frames, resolved.latent_height, resolved.latent_width
