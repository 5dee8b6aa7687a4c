"""A request from prompt to MP4 on the engines of a store: the stages that Triton's models call, and all in a row."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from engines.adapters import low_rank_name
from engines.profile import PARTITION_OF
from engines.sessions.engine_set import EngineSet
from engines.sessions.modulation import MODULATION
from engines.store import EngineStore, Manifest, StoreError
from plugins.dimensions import TEXT_TAG, VIDEO_TAG
from plugins.schedule import Schedule
from plugins.tiling import used_tile
from runtime.admission import MemoryModel
from runtime.block import block_graphs
from runtime.condition_cache import ConditionCache, Entry, prompt_key, reference_key
from runtime.conditioner import CONDITIONING, Conditioner
from runtime.decode import TileOrder, VideoPlan, decode_audio, decode_planes, in_turn
from runtime.denoiser import Denoiser, State
from runtime.encoder import Placed, TextEncoder, encoder_graphs
from runtime.events import Cancellation, Event, Reporter, Units
from runtime.intake import Entrance, Intake, Taken
from runtime.media.source import MediaPolicy
from runtime.modulation import ModulationCache, stored_tables
from runtime.mux import Deliver, MediaOptions, Mp4Writer
from runtime.packing import Condition, Layout, layout, patchify_video, unpack_audio, unpatchify_video
from runtime.peers import Peers
from runtime.picture_tensors import from_tensors, to_tensors
from runtime.presentation import Presentation
from runtime.reference_pixels import ReferencePixels
from runtime.refusal import RequestError
from runtime.request import Media, Resolved
from runtime.rng import Noise, augmented, draw_noise
from runtime.tail import encode_behind
from runtime.text import Tokenizer
from runtime.tile_shares import DealtTiles, TileGroup
from runtime.transfer import to_host
from runtime.vision import VISION

PipelineStage = Literal["encode", "denoise", "decode"]

STAGES: tuple[PipelineStage, ...] = get_args(PipelineStage)

Progress = Callable[[Event], None]

TEXT, CONDITION_VIDEO, CONDITION_AUDIO = "text", "condition_video", "condition_audio"
LATENTS = ("video", "audio")
"""By these names ranks hear from the first what it made."""

ALONE = Peers.alone()

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


class Pipeline(Entrance):
    """The stages of all tasks over one opened store. Serves one request at a time.

    Where processes serve together, each opens one and makes the same calls with the same arguments; the results are
    rank 0's. There, what is wrong with a request is raised as what it is; on the others as `PeerFailed`, after which
    they go on like rank 0. Anything else that another rank raises is its own, and must end its process.
    """

    def __init__(
        self,
        engines: EngineSet,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        cache: ConditionCache | None = None,
        policy: MediaPolicy | None = None,
        peers: Peers = ALONE,
    ) -> None:
        """cache: of encoded prompts and references; None: nothing is kept. policy: where URLs of media may lead to.

        peers: the place of this process among those that serve together.
        """
        super().__init__(Intake(engines.manifest, tokenizer, policy))
        self._engines, self._peers = engines, peers
        self._clock = clock
        # Rank 0 alone knows what it has encoded before, and tells the others.
        self._cache = cache if cache is not None and peers.first else ConditionCache()
        self._dimensions = engines.manifest.dimensions
        self._conditioner = Conditioner(engines)
        self._encoder = TextEncoder(engines, peers.tensors)
        cache_of_tables = ModulationCache(MemoryModel.of(engines.manifest).modulation_cache)
        stored = stored_tables(engines.root, engines.manifest)
        self._denoisers = {p: Denoiser(engines, p, cache_of_tables, stored, peers.rows) for p in engines.partitions}

    @classmethod
    def open(
        cls,
        store: str | Path,
        stages: Collection[PipelineStage] = STAGES,
        cache: ConditionCache | None = None,
        policy: MediaPolicy | None = None,
        peers: Peers = ALONE,
    ) -> Pipeline:
        """`of_store`, of the store in a folder. Raises StoreError also when it cannot be served from."""
        return cls.of_store(EngineStore.open(store), stages, cache, policy, peers)

    @classmethod
    def of_store(
        cls,
        opened: EngineStore,
        stages: Collection[PipelineStage] = STAGES,
        cache: ConditionCache | None = None,
        policy: MediaPolicy | None = None,
        peers: Peers = ALONE,
    ) -> Pipeline:
        """Opens the engines of `stages`, those that this rank has a share of.

        Raises StoreError when the store cannot be served from by so many processes.
        """
        _check_peers(opened, stages, peers)
        if peers.tensors is not None:
            opened = opened.of_rank(peers.tensors.rank)
        named = [graph for stage in STAGES if stage in stages for graph in stage_graphs(opened.manifest)[stage]]
        engines = EngineSet.open(opened, graphs=[graph for graph in named if takes_part(peers, graph)])
        return cls(engines, Tokenizer(opened.tokenizer_file), cache=cache, policy=policy, peers=peers)

    @property
    def cache(self) -> ConditionCache:
        """What is kept of what has been encoded."""
        return self._cache

    @property
    def weights(self) -> Sequence[int]:
        """Bytes of weights that the engines of this process are bound to, as those of a group of one rank."""
        return [self._engines.weight_bytes]

    @property
    def restarts(self) -> int:
        """How often ranks have been started again: there are none."""
        return 0

    def warm(self) -> None:
        """Opens every engine now, so that the first request is as quick as the others."""
        self._engines.warm()

    def present(self, resolved: Resolved) -> Presentation:
        """What the text encoder reads of a request. Raises RequestError."""
        return self._intake.present(resolved)

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
        self._admit(resolved, len(encoded.text))
        return self._denoise(resolved, encoded, self._reporter(progress), cancellation)

    def decode(
        self,
        resolved: Resolved,
        video: torch.Tensor,
        audio: torch.Tensor,
        progress: Progress,
        cancellation: Cancellation,
    ) -> bytes:
        """The MP4 of one output's latents, on rank 0; frames are encoded while the next ones are decoded.

        Raises RequestError when memory does not admit it, as a request may reach this stage by itself, and Cancelled.
        """
        self._admit(resolved, 1)
        return self._decode(resolved, (video, audio), self._reporter(progress), cancellation, lambda piece: None)

    def generate(
        self,
        taken: Taken,
        progress: Progress,
        cancellation: Cancellation,
        pieces: Pieces = lambda index, piece: None,
    ) -> Iterator[bytes]:
        """All stages of one request: an MP4 for each output, when it is ready; empty but on rank 0. Raises Cancelled.

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

    def trajectory(self, resolved: Resolved, encoded: Encoded, units: Units) -> Generator[Iterator[State], None, None]:
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

    def _admit(self, resolved: Resolved, text_rows: int) -> None:
        """Raises RequestError when rank 0's memory does not admit a request; other machines' may be another."""

        def admitted() -> dict[str, torch.Tensor]:
            self._intake.admit(resolved, text_rows)
            return {}

        self._peers.from_first(admitted)

    def _encode(self, taken: Taken, report: Reporter, cancellation: Cancellation) -> Encoded:
        total = sum(map(self._conditioner.units, taken.resolved.references))
        total += len(taken.presented.vision) + self._encoder.layers
        units = Units("encode", total, report, cancellation)
        with self._stage("encode"):
            made = self._peers.from_first(partial(self._first_encodes, taken, units))
            text = made.get(TEXT)
            if text is None:
                text = self._encode_together(taken, made, units, cancellation)
            units.reach(total)
        return Encoded(text, torch.from_numpy(taken.presented.tags), made[CONDITION_VIDEO], made[CONDITION_AUDIO])

    def _first_encodes(self, taken: Taken, units: Units) -> dict[str, torch.Tensor]:
        """Rank 0's part: the rows of all references, and the text, unless ranks are to share its encoder's tensors.

        Then instead, where it is not known from before, what the text encoder reads beside the text.
        """
        pixels = [ReferencePixels(taken.resolved, place, data) for place, data in enumerate(taken.media)]
        sizes = [self._conditioner.units(one) for one in taken.resolved.references]
        rows = []
        for place, end in enumerate(itertools.accumulate(sizes)):
            rows.append(self._condition(taken, place, pixels[place], units))
            units.reach(end)
        video, audio = self._joined(rows)
        made = {CONDITION_VIDEO: video, CONDITION_AUDIO: audio}
        if (found := self._cache.find(prompt_key(taken.resolved, taken.presented))) is not None:
            return made | {TEXT: found[0]}
        placed = self._conditioner.pictures(taken.presented, pixels, units)
        if self._peers.tensors is not None:
            return made | to_tensors(placed)
        return made | {TEXT: self._text(taken, placed, units)}

    def _encode_together(
        self, taken: Taken, made: Mapping[str, torch.Tensor], units: Units, cancellation: Cancellation
    ) -> torch.Tensor:
        """The conditioning by the ranks that share the text encoder's tensors, for all ranks."""
        blocks, agreed = taken.presented.vision, self._peers.agreed(cancellation, self._peers.tensor_control)

        def encode() -> dict[str, torch.Tensor]:
            units.reach(units.total - self._encoder.layers)
            with units.asking(agreed):
                return {TEXT: self._text(taken, from_tensors(blocks, made), units)}

        return self._peers.from_first(encode, together=self._peers.tensors is not None)[TEXT]

    def _condition(self, taken: Taken, place: int, pixels: ReferencePixels, units: Units) -> Entry:
        """The rows of one reference, of its picture and of its sound."""
        resolved, blocks = taken.resolved, taken.presented.vision
        shown = {frame for block in blocks if block.reference == place for frame in block.frames}
        make = partial(
            self._conditioner.rows, resolved.references[place], pixels, shown, resolved.condition_seed, units
        )
        return self._cache.get(reference_key(resolved, place), make)

    def _text(self, taken: Taken, placed: Sequence[Placed], units: Units) -> torch.Tensor:
        """The conditioning of a prompt that has not been encoded before, on the CPU."""
        text = self._encoder.encode(torch.from_numpy(taken.presented.token_ids), placed, units).cpu()
        (kept,) = self._cache.keep(prompt_key(taken.resolved, taken.presented), (text,))
        return kept

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
        agreed = self._peers.agreed(cancellation, self._peers.row_control)
        units = Units("denoise", resolved.outputs * resolved.forwards, report, agreed)
        with closing(self.trajectory(resolved, encoded, units)) as outputs:

            def denoise() -> dict[str, torch.Tensor]:
                (state,) = deque(next(outputs), maxlen=1)
                return dict(zip(LATENTS, self.latents(resolved, state), strict=True))

            for _ in range(resolved.outputs):
                made = self._peers.from_first(denoise, together=self._peers.rows is not None)
                yield made[LATENTS[0]], made[LATENTS[1]]

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
        made: list[bytes] = []

        def decode() -> dict[str, torch.Tensor]:
            if self._peers.first:
                made.append(self._clip(resolved, latents, report, cancellation, deliver))
            elif self._peers.tiles is not None:
                self._serve_tiles(self._peers.tiles, latents)
            return {}

        self._peers.from_first(decode, together=self._peers.tiles is not None)
        return b"".join(made)

    def _clip(
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
        colour = resolved.media.colour
        vae = self._dimensions.video_vae
        # The other ranks have begun with the tiles when this one decodes the soundtrack.
        with self._tile_order(video) as order, self._stage("decode"):
            placed = video.to(self._engines.device)
            waveform = self.waveform(audio[0]).numpy()
            planes = decode_planes(placed, self.decode_tile, vae, colour, report, cancellation, order)
            writer = Mp4Writer(*size, rate, media_options(resolved.media), hand_on)
            encode_behind((to_host(part) for part in planes), waveform, writer, cancellation)
        return b"".join(made)

    def _tile_order(self, video: torch.Tensor) -> AbstractContextManager[TileOrder]:
        """Whence this process takes the tiles of one output."""
        if self._peers.tiles is None:
            return nullcontext(in_turn)
        plan = VideoPlan.of_latents(video, self._dimensions.video_vae)
        return DealtTiles(self._peers.tiles, plan.tiles, used_tile(self._dimensions.video_vae), self._engines.device)

    def _serve_tiles(self, tiles: TileGroup, latents: Latents) -> None:
        """Another rank's part: the tiles of one output that rank 0 asks for."""
        video = latents[0].to(self._engines.device)
        plan = VideoPlan.of_latents(video, self._dimensions.video_vae)
        with self._stage("decode"):
            tiles.serve(partial(plan.decode, video, self.decode_tile))

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
        "encode": (*encoder_graphs(manifest), *VISION, *CONDITIONING),
        "denoise": (*denoise, *with_sides),
        "decode": ("video_decoder_tile", "audio_decoder"),
    }


def takes_part(peers: Peers, graph: str) -> bool:
    """Whether a rank has a share of what an engine does, where there are others."""
    if peers.first:
        return True
    if graph.startswith("text_encoder."):
        return peers.tensors is not None
    if graph == "video_decoder_tile":
        return peers.tiles is not None
    alone = (*VISION, *CONDITIONING, "audio_decoder")
    return peers.rows is not None and graph not in alone


def _check_peers(store: EngineStore, stages: Collection[PipelineStage], peers: Peers) -> None:
    """Raises StoreError unless as many processes share each of the stages as the store's engines were built for."""
    profile = store.manifest.profile
    built, found = profile.ranks.serving(stages), peers.ranks.serving(stages)
    for (stage, ranks), (_, processes) in zip(built, found, strict=True):
        if ranks != processes:
            raise StoreError(
                f"{store.root}: profile {profile.name} has ranks.{stage} = {ranks}, and {processes} are here to share "
                f"the stage; a store of several ranks is served by as many processes: h3trt serve starts them"
            )


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
