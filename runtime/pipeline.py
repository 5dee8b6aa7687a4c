"""A request from prompt to MP4 on the engines of a store: the stages that Triton's models call, and all in a row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore, Manifest
from plugins.dimensions import TEXT_TAG
from runtime.admission import MemoryModel
from runtime.block import block_graphs
from runtime.decode import decode_audio, decode_video
from runtime.denoiser import Denoiser, ModulationCache, State
from runtime.encoder import TextEncoder
from runtime.events import Cancellation, Event, Reporter
from runtime.intake import Intake
from runtime.mux import MediaOptions, Mp4Writer
from runtime.packing import Layout, layout, patchify_video, unpack_audio, unpatchify_video
from runtime.request import Resolved
from runtime.rng import Noise, draw_noise
from runtime.schedule import Schedule
from runtime.text import Tokenizer

PipelineStage = Literal["encode", "denoise", "decode"]

STAGES: tuple[PipelineStage, ...] = get_args(PipelineStage)

Progress = Callable[[Event], None]


class Pipeline:
    """The stages of text-to-video-and-audio over one opened store. Serves one request at a time."""

    def __init__(self, engines: EngineSet, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = engines
        self._intake = Intake(engines.manifest, tokenizer)
        self._clock = clock
        self._dimensions = engines.manifest.dimensions
        cache = ModulationCache(MemoryModel.of(engines.manifest).modulation_cache)
        self._encoder = TextEncoder(engines)
        self._denoiser = Denoiser(engines, "fl2va", cache)

    @classmethod
    def open(cls, store: str | Path, stages: Collection[PipelineStage] = STAGES) -> Pipeline:
        """Opens the engines of `stages`. Raises StoreError when the store cannot be served from."""
        opened = EngineStore.open(store)
        graphs = [graph for stage in STAGES if stage in stages for graph in stage_graphs(opened.manifest)[stage]]
        return cls(EngineSet.open(opened, graphs=graphs), Tokenizer(opened.tokenizer_file))

    @property
    def manifest(self) -> Manifest:
        """What the store was built from and for."""
        return self._engines.manifest

    def warm(self) -> None:
        """Opens every engine now, so that the first request is as quick as the others."""
        self._engines.warm()

    def resolve(self, prompt: bytes | str, params: Mapping[str, Any]) -> Resolved:
        """The request with every choice made, admitted to this machine's memory. Raises RequestError."""
        return self._intake.resolve(prompt, params)

    def tokenize(self, resolved: Resolved) -> torch.Tensor:
        """Token ids of the prompt, int64 [L]. Raises RequestError."""
        return torch.from_numpy(self._intake.tokenize(resolved))

    def encode(self, tokens: torch.Tensor, progress: Progress, cancellation: Cancellation) -> torch.Tensor:
        """Conditioning [L, text_dim] of token ids [L]. Raises Cancelled."""
        return self._encode(tokens, self._reporter(progress), cancellation).cpu()

    def denoise(
        self, resolved: Resolved, text: torch.Tensor, progress: Progress, cancellation: Cancellation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clean normalised latents, float32: video [1, 24, T, h, w] and audio [2, 32, A].

        Raises RequestError when memory does not admit it, as a request may reach this stage by itself, and Cancelled.
        """
        self._intake.admit(resolved, len(text))
        return self._denoise(resolved, text, self._reporter(progress), cancellation)

    def decode(
        self,
        resolved: Resolved,
        video: torch.Tensor,
        audio: torch.Tensor,
        progress: Progress,
        cancellation: Cancellation,
    ) -> bytes:
        """The MP4 of normalised latents; frames go to the encoder as they become final.

        Raises RequestError when memory does not admit it, as a request may reach this stage by itself, and Cancelled.
        """
        self._intake.admit(resolved, 1)
        return self._decode(resolved, video, audio, self._reporter(progress), cancellation)

    def generate(self, resolved: Resolved, progress: Progress, cancellation: Cancellation) -> bytes:
        """All stages of one request in this process. Raises Cancelled."""
        report = self._reporter(progress)
        text = self._encode(self.tokenize(resolved), report, cancellation)
        video, audio = self._denoise(resolved, text, report, cancellation)
        return self._decode(resolved, video, audio, report, cancellation)

    def _encode(self, tokens: torch.Tensor, report: Reporter, cancellation: Cancellation) -> torch.Tensor:
        with self._stage("encode"):
            return self._encoder.encode(tokens, report, cancellation)

    def _stage(self, stage: PipelineStage) -> AbstractContextManager[None]:
        return self._engines.stage(stage_graphs(self.manifest)[stage])

    def noise(self, resolved: Resolved) -> Noise:
        """The initial state that the request's seed and seed convention stand for."""
        channels = self._dimensions.denoiser.video_channels, self._dimensions.denoiser.audio_channels
        grid = _latent_grid(resolved)
        return draw_noise(resolved.seed, resolved.seed_convention, (), grid, resolved.audio_latents, channels)

    def _reporter(self, progress: Progress) -> Reporter:
        return Reporter(progress, self._clock)

    def trajectory(
        self, resolved: Resolved, text: torch.Tensor, report: Reporter, cancellation: Cancellation
    ) -> Iterator[State]:
        """The rows being denoised: the initial noise, then, on the engines' device, the state after each step.

        Raises Cancelled.
        """
        noise, patch = self.noise(resolved), self._dimensions.denoiser.patch
        start = State(patchify_video(noise.video, patch), noise.audio_rows)
        schedule = Schedule.uniform(resolved.forwards, resolved.video_shift, resolved.audio_shift)
        yield start
        with self._stage("denoise"):
            sequence = self._denoiser.sequence(text, self.layout(resolved, len(text)))
            yield from self._denoiser.sample(sequence, schedule, start, report, cancellation)

    def layout(self, resolved: Resolved, text_rows: int) -> Layout:
        """The packed rows of a request whose prompt has `text_rows` tokens."""
        patch = self._dimensions.denoiser.patch
        tags = torch.full((text_rows,), TEXT_TAG)
        return layout(tags, (), *_latent_grid(resolved), resolved.audio_latents, patch)

    def _denoise(
        self, resolved: Resolved, text: torch.Tensor, report: Reporter, cancellation: Cancellation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (state,) = deque(self.trajectory(resolved, text, report, cancellation), maxlen=1)
        video = unpatchify_video(state.video, *_latent_grid(resolved), self._dimensions.denoiser.patch)
        return video.cpu(), unpack_audio(state.audio, resolved.audio_latents).cpu()

    def _decode(
        self,
        resolved: Resolved,
        video: torch.Tensor,
        audio: torch.Tensor,
        report: Reporter,
        cancellation: Cancellation,
    ) -> bytes:
        media = resolved.media
        options = MediaOptions(crf=media.crf, preset=media.preset, audio_bitrate=1000 * media.audio_bitrate)
        rate = self._dimensions.audio_vae.sample_rate
        placed = video.to(self._engines.device)
        with self._stage("decode"), Mp4Writer(resolved.width, resolved.height, rate, options) as writer:
            writer.write_audio(self.waveform(audio))
            for frames in decode_video(placed, self.decode_tile, self._dimensions.video_vae, report, cancellation):
                writer.write_frames(frames.cpu())
            return writer.finish()

    def decode_tile(self, latents: torch.Tensor) -> torch.Tensor:
        """One decoder tile: normalised latents [1, 24, 7, 16, 16] to frames [1, 3, 28, 256, 256], float32."""
        return self._engines.run("video_decoder_tile", {"latents": latents})["frames"].to(latents.device)

    def waveform(self, audio: torch.Tensor) -> torch.Tensor:
        """The soundtrack of normalised latents [2, 32, A]: float32 [2, 800 A]."""

        def run(latents: torch.Tensor) -> torch.Tensor:
            return self._engines.run("audio_decoder", {"latents": latents})["waveform"].cpu()

        with self._engines.stage(("audio_decoder",)):
            return decode_audio(audio, run, self._dimensions.audio_vae)


def stage_graphs(manifest: Manifest) -> Mapping[PipelineStage, tuple[str, ...]]:
    """The engines of a store that each stage runs; a process that serves one stage opens only its own."""
    blocks = block_graphs(manifest)
    return {
        "encode": ("text_encoder.embedding", "text_encoder.layer"),
        "denoise": ("context", "modulation.time", "modulation.adaln", "prologue", *blocks, "epilogue"),
        "decode": ("video_decoder_tile", "audio_decoder"),
    }


def _latent_grid(resolved: Resolved) -> tuple[int, int, int]:
    return resolved.latent_frames, resolved.latent_height, resolved.latent_width
