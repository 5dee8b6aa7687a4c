"""Whether a request fits the memory of this machine, before any of it is computed, and what would fit instead.

The model is for the CPU back end: float32 activations; bfloat16 weights mapped from files (not counted: the system can
drop their pages) and widened to float32 one instance at a time; attention of the denoiser streaming over rows, so that
memory is linear in rows; each stage's working memory given back before the next one starts. The counts below are of
arrays alive at the same time, read off the graphs; `MARGIN` covers what the allocator rounds up. Beside them stands
what the miniature's engines took on top of an idle process (ONNX Runtime 1.32, two threads).

Whole process, miniature, 4 s, measured and estimated MiB: 256x256 558 and 705, 512x512 828 and 967, 768x768 (preset
slow) 1,273 and 1,482; 256x256 with a prompt of 4,000 tokens 1,433 and 1,785.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from engines import machine
from engines.profile import Profile
from engines.quality import served_by
from engines.store import EngineRecord, Manifest
from plugins.block_attention import ATTENDING, BlockAttention
from plugins.dimensions import AUDIO_CHANNELS, FRAMES_PER_SECOND, Dimensions
from plugins.shape import SECONDS_MAXIMUM, SIDE_MULTIPLE, Shape, legal_frames
from plugins.tiling import tiles_ahead
from runtime.condition_memory import (
    NO_CONDITIONS,
    NO_ENCODERS,
    Conditions,
    EncoderSizes,
    encoding_bytes,
    held_bytes,
    reencoded,
)
from runtime.contract import REFERENCE_EDGES, SIDE_MAXIMUM, SIDE_MINIMUM, SIDE_RATIO_MAXIMUM
from runtime.refusal import RequestError
from runtime.request import Resolved

FLOAT = 4
"""Bytes of an activation."""

_AXES = {
    "text_rows": "text_encoder.embedding",
    "vision_rows": "vision_encoder.block",
    "video_rows": "prologue",
    "audio_rows": "prologue",
}
"""Axes besides `rows` that a request can be too large for, and a graph that has each."""

_AXIS_NAMES = {
    "text_rows": "rows of text and pictures in the text encoder",
    "vision_rows": "patches in one picture",
    "video_rows": "rows of pictures",
    "audio_rows": "rows of sound",
}

PROCESS = 512 << 20
"""A process with torch, ONNX Runtime and PyAV loaded and all sessions of a store open."""

MARGIN = 1.25

CACHED_TABLES = 256
"""AdaLN tables, of one step each, that are worth keeping: the longest schedule, or five of the default length."""

CACHE_SHARE = 8
"""The cache of tables never has more than this part of the budget."""

ROW_HIDDEN = 5
"""Arrays [S, hidden] of a block alive at once: input, normed, modulation gathered by row, product, output."""

ROW_ATTENTION = 9
"""Arrays [S, heads x head_dim]: query, key, value; the same normed and rotated; the same as the kernel wants them.

Measured for a block: 10,940 floats a row at 8,000 rows, 10,730 at 18,788; counted: 10,690.
"""

SEGMENTS_HIDDEN = 3
"""Arrays [S, hidden] beside a block in segments: what the prologue made, and two that blocks read and write in turn."""

EXCHANGED_ATTENTION = 18
"""Arrays [rows of a rank, heads x head_dim] where ranks exchange before and after attention: heads as they are made, as
they are sent, received and laid out, and the same of what attention returns.

Measured for a block of two ranks: 18,230 floats a rank's row at 8,000 rows, 17,890 at 16,000; counted: 19,010.
"""

KEPT_ATTENTION = 5
"""The same between them: queries, keys, values, and mixed values before and after their exchange."""

SCORES: Mapping[BlockAttention, float] = {"dense": 0, "sage": 5.4, "skip": 4.2, "sage+skip": 5.4, "vsa": 5}
"""Arrays [heads, S, S] of attention where a CPU computes it by its definition; dense is done in chunks of rows there.

Measured beside dense attention with the miniature's 8 heads: 729 and 957 MiB at 2,419 rows, 1,512 and 1,945 MiB at
3,443; counted: 750 and 964, 1,519 and 1,954. Of attention to video tiles with 3 heads: 644 MiB at 3,470 rows, 1,398 MiB
at 5,170; counted: 689, 1,530.
"""

ROW_SIDES = 1
"""One product more, of attention's width or the feed-forward's twice, where linears have low-rank sides.

Measured for the miniature's block at 4,000 rows: 9,440 floats a row without, 10,530 with; counted: 1,024 more.
"""

ROW_FEED_FORWARD = 5
"""Arrays [S, ffn]: both halves as one product, each half apart, activated, multiplied."""

TEXT_HIDDEN, TEXT_ATTENTION, TEXT_FEED_FORWARD = 5, 9, 5
"""The same counts for a text encoder layer, whose attention also keeps TEXT_SCORES arrays [heads, L, L]."""

TEXT_SCORES = 1
"""Measured for a layer: 22 MiB at 500 tokens, 289 MiB at 2,000, 1,127 MiB at 4,000; counted: 20, 264, 1,017."""

TILE_FEATURES, TILE_FRAMES = 4, 4
"""Arrays [tokens, widest layer] of a video decoder tile, or else arrays of the frames that it returns.

Measured: 75 MiB; counted: 84.
"""

PIXEL_BYTES = 440
"""A pixel of the canvas: 22 float32 RGB frames being stitched, the 5 faded into them twice, two chunks of 17 frames as
planes."""

ENCODER_PIXEL_BYTES = 450
"""A pixel in x264: the frames of look-ahead and reference, of the slower presets.

Measured with the canvas, 107 frames of 768x768: 850 bytes a pixel (veryfast), 1,160 (slow), 1,200 (veryslow);
counted: 1,110.
"""

PACKET_PIXEL_BYTES = 1.5
"""A pixel of every frame in the finished MP4, held as packets, as a file and as its copy.

Measured for one of them at crf 18: 0.002 bytes for a smooth picture, 0.47 for the noise that the
miniature makes.
"""

AUDIO_SAMPLE_FLOATS = 8 * 8
"""Floats a sample in the audio decoder: 8 channels at full rate, 8 arrays of them (twice the rate inside a filter)."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that a request needs at the height of each stage, and `held` through all of them."""

    held: int
    encode: int
    denoise: int
    decode: int

    @property
    def peak(self) -> int:
        """Bytes at the height of the request."""
        return self.held + max(self.encode, self.denoise, self.decode)


@dataclass(frozen=True)
class Load:
    """What the memory of a request depends on. `scores`: arrays [heads, S, S] that its attention holds."""

    shape: Shape
    text_rows: int
    conditions: Conditions = NO_CONDITIONS
    scores: float = 0

    def resized(self, width: int, height: int, frames: int, dimensions: Dimensions) -> Load:
        """The same request at another canvas or length."""
        return dataclasses.replace(self, shape=Shape.of(width, height, frames, dimensions))

    @property
    def rows(self) -> int:
        """Packed rows S of the denoiser."""
        return self.text_rows + self.video_rows + self.audio_rows

    @property
    def video_rows(self) -> int:
        """Rows of pictures: conditions and target."""
        return self.conditions.video_rows + self.shape.video_rows

    @property
    def audio_rows(self) -> int:
        """Rows of sound: conditions and target."""
        return self.conditions.audio_rows + self.shape.audio_rows

    def along(self, axis: str) -> int:
        """Size of one of the engines' axes."""
        return self.conditions.patches if axis == "vision_rows" else int(getattr(self, axis))


@dataclass(frozen=True)
class MemoryModel:
    """What requests cost at one checkpoint's sizes, and what this server lets one cost.

    budget: bytes. rows_maximum: packed rows that the engines were built for. tile_features: the widest layer of the
    video decoder. row_chunk: the most rows that a block's row-local parts see at once, 0 where a block runs whole.
    encoders: widths of the references' encoders. axes: the largest size of each further axis that the engines have.
    scores: arrays [heads, S, S] that attention holds, by tier; a tier that is not there holds none. sides: requests may
    choose adapters whose linears have low-rank sides, and each counts as if it did. folded: the one
    schedule's AdaLN tables are mapped from the store, and no request makes any. ranks: processes of one CPU that share
    the packed rows; budget, like the estimate, is that of each. tile_ranks: how many share the decoder's tiles.
    """

    dimensions: Dimensions
    budget: int
    rows_maximum: int
    tile_features: int
    row_chunk: int = 0
    encoders: EncoderSizes = NO_ENCODERS
    axes: Mapping[str, int] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    sides: bool = False
    folded: bool = False
    ranks: int = 1
    tile_ranks: int = 1

    @staticmethod
    def of(manifest: Manifest) -> MemoryModel:
        """The model of a store's engines under its profile's memory budget on this machine."""
        graphs = manifest.graphs
        decoder = graphs["video_decoder_tile"].weights
        return MemoryModel(
            manifest.dimensions,
            manifest.profile.memory_budget(machine.memory_bytes()),
            rows_maximum=min(_most(graphs[name], "rows") for name in ATTENDING if name in graphs),
            tile_features=max(int(weight.shape[0]) for weight in decoder if len(weight.shape) > 1),
            row_chunk=manifest.profile.row_chunk,
            encoders=EncoderSizes(
                _outputs_of(graphs["video_encoder_tile"], inputs=3), _outputs_of(graphs["audio_encoder"], inputs=1)
            ),
            axes={axis: _most(graphs[graph], axis) for axis, graph in _AXES.items()},
            scores={} if manifest.profile.on_gpu else _scores(manifest.serving),
            sides=any(adapter.mode == "low_rank" for adapter in manifest.adapters.values()),
            folded=manifest.student is not None,
            ranks=1 if manifest.profile.on_gpu else manifest.profile.ranks.ulysses,
            tile_ranks=manifest.profile.ranks.video_tiles,
        )

    def estimate(self, load: Load) -> Estimate:
        """Peak bytes of a request, stage by stage."""
        stages = (self._encode(load), self._denoise(load), self._decode(load))
        return Estimate(PROCESS + self._held(load), *(math.ceil(MARGIN * stage) for stage in stages))

    def admit(self, resolved: Resolved, text_rows: int) -> Estimate:
        """The request's estimate. Raises RequestError, naming what would fit, when it is too large for this server."""
        shape = Shape.of(resolved.width, resolved.height, resolved.frames, self.dimensions)
        scores = self.scores.get(resolved.quality.tier, 0)
        load = Load(shape, text_rows, Conditions.of(resolved.references, self.dimensions), scores)
        if not self._fits(load):
            raise self._tier_refusal(resolved, load) or self._edge_refusal(resolved, load) or self._refusal(load)
        return self.estimate(load)

    def largest_canvas(self, load: Load) -> Load | None:
        """The request at the largest canvas of its aspect ratio that fits at its length, or None."""
        shape = load.shape
        canvases = sorted(canvases_like(shape.width, shape.height), key=math.prod, reverse=True)
        resized = (load.resized(*canvas, shape.frames, self.dimensions) for canvas in canvases)
        return next(filter(self._fits, resized), None)

    def longest(self, load: Load) -> Load | None:
        """The request at the largest number of frames that fits at its canvas, or None."""
        width, height = load.shape.width, load.shape.height
        lengths = reversed(legal_frames(self.dimensions.video_vae))
        resized = (load.resized(width, height, frames, self.dimensions) for frames in lengths)
        return next(filter(self._fits, resized), None)

    def _fits(self, load: Load) -> bool:
        return not self._beyond(load) and self.estimate(load).peak <= self.budget

    def _beyond(self, load: Load) -> str:
        """Which size the engines were not built for, in words; empty: none."""
        for axis, most in {"rows": self.rows_maximum, **self.axes}.items():
            if load.along(axis) > most:
                name = _AXIS_NAMES.get(axis, "rows")
                return f"has {load.along(axis)} {name}; the engines were built for at most {most}"
        return ""

    def _tier_refusal(self, resolved: Resolved, load: Load) -> RequestError | None:
        """Names the tiers whose attention takes no memory of its own, where the request fits with these."""
        lean = tuple(tier for tier, arrays in self.scores.items() if not arrays)
        if not lean or not load.scores or not self._fits(dataclasses.replace(load, scores=0)):
            return None
        return RequestError("quality", resolved.quality.tier, self._memory_rule(load), lean)

    def _edge_refusal(self, resolved: Resolved, load: Load) -> RequestError | None:
        """Names the short edge at which the reference images fit, where there is one."""
        for edge in reversed(REFERENCE_EDGES):
            if edge >= resolved.reference_short_edge or resolved.task != "ref2va":
                continue
            smaller = Conditions.of(reencoded(resolved, edge, self.dimensions), self.dimensions)
            saved = load.conditions.vision_rows - smaller.vision_rows
            if self._fits(Load(load.shape, load.text_rows - saved, smaller, load.scores)):
                rule = self._beyond(load) or self._memory_rule(load)
                return RequestError("reference_short_edge", resolved.reference_short_edge, rule, edge)
        return None

    def _memory_rule(self, load: Load) -> str:
        needed = _gibibytes(self.estimate(load).peak)
        return f"needs about {needed} of memory; this server has {_gibibytes(self.budget)} for a request"

    def _refusal(self, load: Load) -> RequestError:
        server = f"this server has {_gibibytes(self.budget)} for a request"
        if not load.conditions.vision_rows and self._encoding(load, 1) <= self.budget < self._encoding(
            load, load.text_rows
        ):
            rule = f"encoding needs about {_gibibytes(self._encoding(load, load.text_rows))}; {server}"
            most = bisect.bisect_right(range(load.text_rows), self.budget, key=partial(self._encoding, load)) - 1
            return RequestError("prompt", f"{load.text_rows} tokens", rule, f"{most} tokens")
        rule = self._beyond(load) or self._memory_rule(load)
        options = tuple(_describe(option) for option in (self.largest_canvas(load), self.longest(load)) if option)
        return RequestError(
            "size", _describe(load), rule if options else f"{rule}, which no canvas fits", options or None
        )

    def _encoding(self, load: Load, text_rows: int) -> int:
        """Peak bytes up to the end of the encoding, for a prompt of that many tokens."""
        estimate = self.estimate(dataclasses.replace(load, text_rows=text_rows))
        return estimate.held + estimate.encode

    def _held(self, load: Load) -> int:
        """The cached AdaLN tables and the one in use, and the text and latents that pass between stages."""
        denoiser = self.dimensions.denoiser
        latents = load.shape.video_rows * denoiser.video_row + load.shape.audio_rows * denoiser.audio_channels
        rows = FLOAT * (load.text_rows * denoiser.text_dim + latents)
        return self.modulation_cache + self._table + rows + held_bytes(load.conditions, self.dimensions)

    @property
    def modulation_cache(self) -> int:
        """Bytes that tables of past schedules may keep, which every request has to do without."""
        if self.folded:
            return 0
        return min(CACHED_TABLES * self._table, self.budget // CACHE_SHARE)

    @property
    def _table(self) -> int:
        """Bytes of the AdaLN parameters of one step."""
        return FLOAT * self.dimensions.denoiser.table_elements

    def _encode(self, load: Load) -> int:
        text, rows = self.dimensions.text_encoder, load.text_rows
        inner = text.heads * text.head_dim
        row = TEXT_HIDDEN * text.hidden + max(TEXT_ATTENTION * inner, TEXT_FEED_FORWARD * text.intermediate)
        projections = 2 * text.hidden * (text.heads + text.kv_heads) * text.head_dim
        weights = projections + 3 * text.hidden * text.intermediate
        layer = FLOAT * (rows * row + TEXT_SCORES * text.heads * rows * rows + weights)
        return max(layer, encoding_bytes(load.conditions, self.encoders, self.dimensions))

    def _denoise(self, load: Load) -> int:
        size = self.dimensions.denoiser
        attention = (ROW_ATTENTION + ROW_SIDES * self.sides) * size.inner
        feed_forward = (ROW_FEED_FORWARD + 2 * ROW_SIDES * self.sides) * size.ffn
        local = ROW_HIDDEN * size.hidden + max(attention, feed_forward)
        here, kept = math.ceil(load.rows / self.ranks), KEPT_ATTENTION * size.inner
        if self.ranks > 1:
            attention = max(attention, EXCHANGED_ATTENTION * size.inner)
        if self.row_chunk:
            row, chunk = SEGMENTS_HIDDEN * size.hidden + attention, local * self.row_chunk
        elif self.ranks > 1:
            row, chunk = SEGMENTS_HIDDEN * size.hidden + max(attention, kept + local), 0
        else:
            row, chunk = local, 0
        # State, velocity and their rows' copies around a step.
        latents = 4 * (size.video_row + size.audio_channels)
        block = 4 * size.hidden * size.inner + 3 * size.hidden * size.ffn
        scores = load.scores * size.heads / self.ranks * load.rows**2
        widened = block if self.folded else max(block, size.time_dim * size.adaln_features)
        return math.ceil(FLOAT * (here * row + load.rows * latents + scores + chunk + widened))

    def _decode(self, load: Load) -> int:
        video, shape = self.dimensions.video_vae, load.shape
        tokens = video.chunk_latents * video.tile_latents**2
        tile = max(TILE_FEATURES * tokens * self.tile_features, TILE_FRAMES * 3 * video.chunk_frames * video.tile**2)
        samples = AUDIO_CHANNELS * self.dimensions.audio_vae.hop * shape.audio_latents
        pixel = PIXEL_BYTES + ENCODER_PIXEL_BYTES + PACKET_PIXEL_BYTES * shape.frames
        pixels = math.ceil(pixel * shape.width * shape.height)
        # The soundtrack is decoded before the picture, and its memory is given back; other ranks' tiles come meanwhile.
        return FLOAT * tiles_ahead(video, self.tile_ranks) + max(
            FLOAT * tile + pixels, FLOAT * AUDIO_SAMPLE_FLOATS * samples
        )


def _scores(profile: Profile) -> dict[str, float]:
    """Arrays that the attention of each tier holds on a CPU."""
    built = profile.attention.blocks, *profile.further_attention
    return {tier.name: SCORES[served_by(tier.attention, built)] for tier in profile.tiers}


def _most(engine: EngineRecord, axis: str) -> int:
    """The largest legal size of an axis; an engine may have been built for less than its graph allows."""
    built = [ranges[axis].maximum for ranges in engine.plan.profiles if axis in ranges] if engine.plan else []
    built += [engine.program.ranges[axis].maximum] if engine.program and axis in engine.program.ranges else []
    return max(built, default=engine.axes[axis].maximum)


def _outputs_of(engine: EngineRecord, inputs: int) -> int:
    """Channels that an engine's first convolution makes of so many."""
    shapes = [weight.shape for weight in engine.weights if len(weight.shape) > 2]
    return max((int(shape[0]) for shape in shapes if shape[1] == inputs), default=0)


def canvases_like(width: int, height: int) -> Iterator[tuple[int, int]]:
    """Legal canvases of about the aspect ratio of the given one: each short side, and the nearest long side to it."""
    ratio = max(width, height) / min(width, height)
    for short in range(SIDE_MINIMUM, SIDE_MAXIMUM + 1, SIDE_MULTIPLE):
        long = min(round(short * ratio / SIDE_MULTIPLE) * SIDE_MULTIPLE, SIDE_RATIO_MAXIMUM * short)
        if long <= SIDE_MAXIMUM:
            yield (long, short) if width >= height else (short, long)


def _describe(load: Load) -> str:
    """As a user asks for it; the seconds are rounded down, so that asking for them gives these frames again."""
    seconds = min(float(SECONDS_MAXIMUM), math.floor(load.shape.frames / FRAMES_PER_SECOND * 1000) / 1000)
    return f"{load.shape.width}x{load.shape.height} for {seconds:g} s"


def _gibibytes(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
