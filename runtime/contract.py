"""The request contract as one table: validation, error texts, docs/requests.md and tests all read it.

A field is `offered`, `accepted` (checked, and without effect on this model) or `not offered` (refused, except for the
values that leave the feature off). Nothing is ignored in silence: what has no effect is said in the resolved notes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from engines.quality import LOSSLESS, TIERS
from plugins.dimensions import FRAMES_PER_SECOND
from plugins.distilled import MOST_FORWARDS
from plugins.shape import ASPECT_RATIOS, SECONDS_MAXIMUM, SECONDS_MINIMUM, SHORT_EDGE, SIDE_MULTIPLE
from runtime.adapter_kind import AdapterName
from runtime.geometry import KeyframeGeometry
from runtime.kinds import (
    Anything,
    AspectRatio,
    Boolean,
    Choice,
    Integer,
    Kind,
    Number,
    Sides,
    Step,
    Text,
    WholeSeconds,
)
from runtime.media.facts import Kind as MediaKind
from runtime.media.limits import COUNT_IN_ALL, COUNTS
from runtime.reference_kinds import INPUTS, FrameIndices, MediaUrls, NamedReferences, ReferenceOrder, StartTimes
from runtime.refusal import RequestError
from runtime.task import TASKS, Task

DEFAULT_FRAMES: Mapping[Task, int] = {"t2va": 209, "fl2va": 209, "ref2va": 124}
SIDE_MINIMUM, SIDE_MAXIMUM = 256, 4096
"""Pixels: the tile of the video VAE, and the widest H.264 that hardware decoders take."""
SIDE_RATIO_MAXIMUM = 4
PROMPT_CHARACTERS = 7_000
TOKENS_MAXIMUM = 8_192
"""Tokens of a prompt, and so rows of text."""
DEFAULT_FORWARDS = 49
EVALUATIONS = Integer(1, MOST_FORWARDS, "evaluations")
SIGMA_POINTS = Integer(2, MOST_FORWARDS + 1, "sigma points")
PARAMETERS_BYTES = 64 * 1024
"""Of the parameters object, what `data:` URLs hold apart."""
MEDIA_BYTES = 64 << 20
"""Of all files of one request together."""
OUTPUTS_MAXIMUM = 10
DEFAULT_RATIO = "16:9"
"""Of ref2va."""
AUTOMATIC = ("adaptive", "auto")
REFERENCE_EDGES = range(256, 2048 + 1, 32)
"""Short edges, in pixels, that an image reference may be given."""
VIDEO_REFERENCE_EDGES = range(256, SHORT_EDGE + 1, 32)
"""The same of a video reference."""
PARAMETERS_DEPTH = 8
CACHED_TIER = "high"
"""vllm-omni's tier of forwards replaced by cached results, which no server offers."""
CRF_RANGE = (1, 51)
"""Constant rate factors. 0 is left out: it selects the lossless profile, which browsers do not play."""
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow")
"""Presets of libx264, fastest first."""
VIDEO_BITRATE_RANGE = (100, 100_000)
"""Kilobits a second."""
CONTAINERS = ("faststart", "fragmented")
"""Kinds of MP4: one whose index is in front of the media, and one of fragments that leave as they are made."""
Colour = Literal["bt709", "bt601_untagged"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
"""What YCbCr means in the file: ITU-R BT.709, tagged so, or ITU-R BT.601 without a tag, as vllm-omni writes it."""

EXTRA = "extra_params"
"""An object whose keys are read as if they stood beside it, and win over keys of the same name there."""
GROUPS = ("target", "video_params", "media")
"""Objects whose keys are fields under a dotted name."""


class Status(StrEnum):
    """What giving a field does."""

    OFFERED = "offered"
    ACCEPTED = "accepted, no effect"
    NOT_OFFERED = "not offered"


@dataclass(frozen=True)
class Field:
    """One field of the request."""

    name: str
    kind: Kind
    meaning: str
    default: object = None
    default_text: str = ""
    """For a default that is computed."""
    paths: tuple[str, ...] = ()
    """Where the field may be written, the strongest first; empty: only under its name."""
    tasks: tuple[Task, ...] = TASKS
    """The tasks whose requests the field has a meaning in."""
    status: Status = Status.OFFERED
    only: tuple[object, ...] | None = None
    """The values of the kind that are offered; None: all. The others are refused as 'not offered'."""
    lacks: str = ""
    """What the values outside `only` would ask for; empty: what `meaning` says."""

    def check(self, spelling: str, value: object) -> object:
        """The canonical value. `spelling` is the name that the user wrote, and the one that errors carry."""
        checked = self.kind.check(spelling, value)
        if self.only is None or any(type(one) is type(checked) and one == checked for one in self.only):
            return checked
        raise RequestError(spelling, value, f"not offered ({self.lacks or self.meaning})", self.only or None)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every path under which the field is read, the strongest first."""
        return self.paths or (self.name,)


def _feature(
    name: str,
    meaning: str,
    *off: object,
    kind: Kind | None = None,
    paths: tuple[str, ...] = (),
    tasks: tuple[Task, ...] = TASKS,
) -> Field:
    """A field of a feature that is not offered; `off` are the values that leave the feature off."""
    return Field(name, kind or Anything(), meaning, paths=paths, tasks=tasks, status=Status.NOT_OFFERED, only=off)


def _no_effect(name: str, kind: Kind, meaning: str) -> Field:
    return Field(name, kind, meaning, status=Status.ACCEPTED)


def _urls(kind: MediaKind, noun: str, tasks: tuple[Task, ...]) -> Field:
    """A list of URLs as vllm-omni spells it."""
    name = INPUTS[kind]
    meaning = f"more {noun}, after those of {name}; not beside references"
    return Field(f"{kind}_reference", MediaUrls(kind, COUNTS[kind]), meaning, (), "none", tasks=tasks)


_SIDE = Integer(SIDE_MINIMUM, SIDE_MAXIMUM, "px")
_DISTILLED = "the model is guidance-distilled and runs one forward a step"

PROMPT = Field(
    "prompt",
    Text(1, PROMPT_CHARACTERS),
    "the text, passed to the text encoder verbatim: no template, no strip, no special tokens; "
    f"at most {TOKENS_MAXIMUM} tokens. Its own input, never a key of the parameters",
    default_text="required",
)

_SHAPE = (
    Field(
        "task",
        Choice(TASKS, any_case=True),
        "t2va: video and sound from text; fl2va: from text and the first or last frame or both; ref2va: from text and "
        "reference images, videos and sounds",
        default_text="ref2va with a video or a sound, fl2va with images, else t2va; ref2va on a server of it alone",
    ),
    Field(
        "duration",
        Number(SECONDS_MINIMUM, SECONDS_MAXIMUM, "seconds"),
        "checked as given, then round(24 x duration) frames (half to even), raised to the next 17n + 5",
        default_text="209 frames (8.708 s), for ref2va 124 (5.167 s)",
        paths=("target.duration_seconds", "duration_seconds", "duration"),
    ),
    Field(
        "seconds",
        WholeSeconds(SECONDS_MINIMUM, SECONDS_MAXIMUM),
        "read when no duration is given",
        default_text="see duration",
    ),
    Field(
        "num_frames",
        Integer(SECONDS_MINIMUM * FRAMES_PER_SECOND, SECONDS_MAXIMUM * FRAMES_PER_SECOND, "frames", exempt=(1,)),
        "read when neither duration nor seconds is given, raised to the next 17n + 5; 1 counts as not given",
        default_text="see duration",
        paths=("num_frames", "video_params.num_frames"),
    ),
    Field(
        "fps",
        Number(FRAMES_PER_SECOND, FRAMES_PER_SECOND),
        "frames a second of the clip",
        FRAMES_PER_SECOND,
        paths=("fps", "video_params.fps"),
    ),
    Field(
        "aspect_ratio",
        AspectRatio(ASPECT_RATIOS, AUTOMATIC),
        "required for t2va, also when width and height are given; without them it chooses the canvas. fl2va has the "
        f"ratio of its first image instead. {' and '.join(AUTOMATIC)} are {DEFAULT_RATIO}, for ref2va only",
        default_text=f"required; {DEFAULT_RATIO} for ref2va",
        paths=("target.aspect_ratio", "aspect_ratio"),
        tasks=("t2va", "ref2va"),
    ),
    Field(
        "short_edge",
        Integer(1, SIDE_MAXIMUM, "px"),
        f"must be {SHORT_EDGE} when the canvas comes from aspect_ratio; no effect beside width and height",
        SHORT_EDGE,
        paths=("target.short_edge", "short_edge"),
    ),
    Field("size", Sides(SIDE_MINIMUM, SIDE_MAXIMUM), "stands for width and height and wins over them"),
    Field(
        "width",
        _SIDE,
        f"a multiple of {SIDE_MULTIPLE}; given with height or not at all; 1:4 to 4:1",
        default_text="from aspect_ratio",
        paths=("width", "video_params.width"),
    ),
    Field(
        "height",
        _SIDE,
        f"a multiple of {SIDE_MULTIPLE}; given with width or not at all; 1:4 to 4:1",
        default_text="from aspect_ratio",
        paths=("height", "video_params.height"),
    ),
    Field(
        "snap", Boolean(), f"true: a side off the {SIDE_MULTIPLE} px grid is floored to it instead of refused", False
    ),
)

_REFERENCES = (
    Field(
        "references",
        NamedReferences(COUNT_IN_ALL),
        "the order in which the model reads the media; every file of the inputs IMAGES, VIDEOS and AUDIOS once",
        default_text="all files: images, then videos, then sounds",
        tasks=("fl2va", "ref2va"),
    ),
    _urls("image", "images", ("fl2va", "ref2va")),
    _urls("video", "videos", ("ref2va",)),
    _urls("audio", "sounds", ("ref2va",)),
    Field(
        "start_time_seconds",
        StartTimes(COUNTS["video"]),
        "where videos begin to count, in the order in which they are sent; not beside one in references",
        0,
        tasks=("ref2va",),
    ),
    Field(
        "reference_order",
        Choice(get_args(ReferenceOrder)),
        "as_sent, as diffusers does, or by_type: images, then videos, then sounds, as vllm-omni does",
        "as_sent",
        tasks=("ref2va",),
    ),
    Field(
        "reference_short_edge",
        Step(REFERENCE_EDGES, "px"),
        "the short edge that reference images are resized to; rows and time grow with its square",
        REFERENCE_EDGES[-1],
        tasks=("ref2va",),
    ),
    Field(
        "video_reference_short_edge",
        Step(VIDEO_REFERENCE_EDGES, "px"),
        "the short edge that reference videos are resized to; rows and time grow with its square",
        VIDEO_REFERENCE_EDGES[-1],
        tasks=("ref2va",),
    ),
    Field(
        "frame_indices",
        FrameIndices(),
        "which frame each image is: 0 the first, -1 the last",
        default_text="[0], or [0, -1] for two images",
        paths=("target.frame_indices", "target.frame_index", "frame_indices", "frame_index"),
        tasks=("fl2va",),
    ),
    Field(
        "keyframe_geometry",
        Choice(get_args(KeyframeGeometry)),
        "diffusers: the first image is stretched to the canvas, the second covers it and is cropped; vllm-omni: both "
        "are stretched",
        "diffusers",
        tasks=("fl2va",),
    ),
)

_SAMPLING = (
    Field(
        "num_inference_steps",
        Integer(EVALUATIONS.minimum, SIGMA_POINTS.maximum),
        f"{EVALUATIONS.range_text}, or {SIGMA_POINTS.range_text} under step_convention sigma_points",
        DEFAULT_FORWARDS,
        default_text=f"{DEFAULT_FORWARDS} evaluations ({DEFAULT_FORWARDS + 1} sigma points)",
    ),
    Field(
        "step_convention",
        Choice(("evaluations", "sigma_points")),
        "what num_inference_steps counts: forwards of the model, or points of the sigma grid (one more)",
        "evaluations",
    ),
    # Below 0.01 the float32 grid s*u / (1 + (s-1)*u) cancels; above 100 its first steps round to the same sigma.
    Field("flow_shift", Number(0.01, 100), "sigma shift of the video clock", default_text="the checkpoint's (12)"),
    Field("audio_flow_shift", Number(0.01, 100), "sigma shift of the audio clock", default_text="the checkpoint's (3)"),
    Field("seed", Integer(-(2**63), 2**63 - 1), "seed of the initial noise; output i has seed + i", 42),
    Field(
        "num_outputs_per_prompt",
        Integer(1, OUTPUTS_MAXIMUM),
        "clips of one request, of one encoding of its prompt and references",
        1,
    ),
    Field(
        "seed_convention",
        Choice(("diffusers", "vllm-omni")),
        "one generator for conditions, video and audio in turn, or a fresh one with the same seed for each",
        "diffusers",
    ),
    Field(
        "lora",
        AdapterName(),
        "the adapter that the model is changed by, one of those that the server's operator has built in; it binds the "
        "task, the steps and the shifts",
        default_text="none",
    ),
    Field(
        "sampler",
        Choice(("euler", "res_multistep")),
        "how a velocity updates the latents",
        "euler",
        only=("euler",),
        lacks="multistep sampling",
    ),
    Field(
        "quality",
        Choice((*TIERS, CACHED_TIER)),
        "the tier: what the forwards are computed with; which ones a server offers is a matter of its profile; "
        f"none offers {CACHED_TIER}",
        default_text=f"the first tier of the server's profile, {LOSSLESS} unless that names another",
    ),
)

_MEDIA = (
    Field(
        "container",
        Choice(CONTAINERS),
        "faststart: one MP4, its index in front; fragmented: half-second fragments with their sound, which h3_stream "
        "sends as they are made",
        CONTAINERS[0],
        paths=("media.container", "container"),
    ),
    Field(
        "crf",
        Integer(*CRF_RANGE),
        "x264 constant rate factor; lower is finer and larger; not beside video_bitrate",
        18,
        default_text="18; none beside video_bitrate",
        paths=("media.crf", "crf"),
    ),
    Field(
        "video_bitrate",
        Integer(*VIDEO_BITRATE_RANGE, "kb/s"),
        "average bit rate of the H.264 track, in one pass; not beside crf",
        default_text="crf decides",
        paths=("media.video_bitrate", "video_bitrate"),
    ),
    Field("preset", Choice(PRESETS), "x264 speed preset", "veryfast", paths=("media.preset", "preset")),
    Field(
        "audio_bitrate",
        Integer(64, 320, "kb/s"),
        "bit rate of the stereo AAC track",
        128,
        paths=("media.audio_bitrate", "audio_bitrate"),
    ),
    Field(
        "colour",
        Choice(COLOURS),
        "bt709: BT.709, limited range, tagged; bt601_untagged: BT.601 without a tag, as vllm-omni writes: players that "
        "take it for BT.709 show other hues",
        COLOURS[0],
        paths=("media.colour", "colour"),
    ),
)

DEADLINE = Number(0.1, 86_400, "seconds")

_OPERATION = (
    Field(
        "deadline",
        DEADLINE,
        "seconds from arrival until the clip must be there; a request that cannot meet it is refused at once, or when "
        "its turn comes too late; one that has begun is finished",
        default_text="none",
    ),
)

_NO_EFFECT = (
    _no_effect("negative_prompt", Text(0, PROMPT_CHARACTERS), _DISTILLED),
    _no_effect("guidance_scale", Number(0, 20), _DISTILLED),
    _no_effect("guidance_scale_2", Number(0, 20), _DISTILLED),
    _no_effect("true_cfg_scale", Number(0, 20), _DISTILLED),
    _no_effect("boundary_ratio", Number(0, 1), "the model has one denoiser for the whole schedule"),
    _no_effect("preencode_mp4", Boolean(), "frames are always encoded while they are decoded"),
    _no_effect("user", Text(0, 256), "the caller's own label"),
)

_SERVER = (Field("model", Text(1, 256), "must equal the name that this server serves", default_text="the served name"),)

_WINDOWS = "clips longer than 15 s, made in windows"
_FORM = "files of a form: here they are the inputs IMAGES, VIDEOS and AUDIOS"
_CONTROL = "pictures that steer every frame"
_EDITING = "editing under latent masks"
_REFINING = "a second pass at a larger size"
_INTERPOLATION = "frames made between frames after decoding"
_CACHE = "control of a step cache"

_FEATURES = (
    _feature("generate_sound", "a clip without sound", True, kind=Boolean()),
    _feature("sound_duration", "sound of another length than the video"),
    _feature("return_stage_metrics", "timings beside the result", False, kind=Boolean()),
    _feature("audio_mode", "driving sound", "native", kind=Choice(("native", "lock_source"))),
    _feature("long_video", _WINDOWS, False, kind=Boolean()),
    _feature("long_video_mode", _WINDOWS, "full", kind=Choice(("full", "continuation"))),
    _feature("continuation_window_frames", _WINDOWS, tasks=("ref2va",)),
    _feature("continuation_overlap_frames", _WINDOWS, tasks=("ref2va",)),
    _feature("continuation_prompts", _WINDOWS, tasks=("ref2va",)),
    _feature("input_reference", _FORM),
    _feature("input_references", _FORM, []),
    _feature("images", _FORM, []),
    _feature("videos", _FORM, []),
    _feature("audios", _FORM, []),
    _feature("control_reference", _CONTROL),
    _feature("control_type", _CONTROL),
    _feature("source_video", _EDITING),
    _feature("source_audio", _EDITING),
    _feature("video_noise_mask", _EDITING),
    _feature("audio_noise_mask", _EDITING),
    _feature("latent_upscale", _REFINING, False),
    _feature("latent_refine", _REFINING, False),
    _feature("enable_frame_interpolation", _INTERPOLATION, False, kind=Boolean()),
    _feature("frame_interpolation_exp", _INTERPOLATION),
    _feature("frame_interpolation_scale", _INTERPOLATION),
    _feature("frame_interpolation_model_path", _INTERPOLATION),
    _feature("pad_seq_len", "padding of the packed rows"),
    _feature("force_refresh_step_hint", _CACHE),
    _feature("force_refresh_step_policy", _CACHE),
    _feature("preencode_batch_frames", "another encoding chunk than 17 frames", 17),
    _feature("video_codec_options", "free encoder options; those of the group media are offered"),
)

FIELDS: tuple[Field, ...] = (*_SHAPE, *_REFERENCES, *_SAMPLING, *_MEDIA, *_OPERATION, *_SERVER, *_NO_EFFECT, *_FEATURES)
"""Every key of the parameters object, in the order of docs/requests.md."""

FIELD: Mapping[str, Field] = {field.name: field for field in FIELDS}
_BY_PATH: Mapping[str, Field] = {path: field for field in FIELDS for path in field.spellings}


@dataclass(frozen=True)
class Given:
    """A field as the user wrote it: its canonical value and the spelling it came under."""

    field: Field
    spelling: str
    value: object
    rank: tuple[int, bool]
    """Lower wins: place among the field's paths, then extra_params before the plain key."""


def occurrences(parameters: object) -> Iterator[Given]:
    """Checks every key at every level and yields each field given, in order. Raises RequestError."""
    for spelling, path, value in _flatten(parameters):
        field = _BY_PATH.get(path)
        if field is None:
            raise _unknown(spelling, path, value)
        checked = field.check(spelling, value)
        yield Given(field, spelling, checked, (field.spellings.index(path), not spelling.startswith(EXTRA)))


def _flatten(parameters: object) -> Iterator[tuple[str, str, object]]:
    """(spelling, path, value) of every leaf: the path is the spelling without `extra_params.`."""
    for key, value in _entries("parameters", parameters):
        inner = _entries(EXTRA, value) if key == EXTRA else [(key, value)]
        prefix = f"{EXTRA}." if key == EXTRA else ""
        for name, content in inner:
            if name not in GROUPS:
                # A key with a dot in it would reach into a group past its object: no path, so it is unknown.
                yield f"{prefix}{name}", "" if "." in name else name, content
                continue
            for leaf, leaf_value in _entries(f"{prefix}{name}", content):
                yield f"{prefix}{name}.{leaf}", f"{name}.{leaf}", leaf_value


def _entries(spelling: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise RequestError(spelling, value, "must be a JSON object")
    for key, content in value.items():
        if type(key) is not str:
            raise RequestError(spelling, key, "keys must be strings")
        yield key, content


def _unknown(spelling: str, path: str, value: object) -> RequestError:
    if path == PROMPT.name:
        return RequestError(spelling, value, "unknown field: the prompt is an input of its own, beside the parameters")
    close = difflib.get_close_matches(spelling.removeprefix(f"{EXTRA}.")[:64], _BY_PATH, n=1)
    return RequestError(spelling, value, "unknown field", close[0] if close else None)
