"""Conformance vectors of fl2va and ref2va (contract 1.3 to 1.5 and 1.17), with what their files say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugins.dimensions import Dimensions
from runtime.given import GivenFields
from runtime.media.facts import Facts, ImageFacts, Kind, SoundFacts, VideoFacts
from runtime.references import KnownFile, sha256_of
from runtime.request import Limits, Resolved, resolve
from runtime.selection import select
from tests.request.vectors import PROMPT, Refused, Vector

SOUND = SoundFacts(sample_rate=32000, channels=2, samples=64000)
IMAGE = ImageFacts(width=640, height=480)
TALL = ImageFacts(width=300, height=600)
VIDEO = VideoFacts(width=640, height=480, frames=72, seconds=3.0)
SOUND_VIDEO = VideoFacts(width=480, height=640, frames=72, seconds=3.0, sound=SOUND)

SMALL = {"width": 256, "height": 256, "duration": 4, "num_inference_steps": 4}
REF = {**SMALL, "task": "ref2va"}


def counts(media: Sequence[Facts]) -> dict[Kind, int]:
    """How many files each input has."""
    kinds: tuple[Kind, ...] = ("image", "video", "audio")
    return {kind: sum(one.kind == kind for one in media) for kind in kinds}


def resolve_with(
    prompt: bytes | str,
    params: Mapping[str, Any],
    media: Sequence[Facts],
    dimensions: Dimensions,
    limits: Limits | None = None,
) -> Resolved:
    """`resolve` after `select`, as the server does it, where the n-th file of a kind has the n-th facts of that kind.

    What a URL leads to is an IMAGE, a VIDEO or a SOUND.
    """
    limits = limits or Limits()
    files = []
    for one in select(GivenFields(params), counts(media), limits.tasks):
        if one.index is None:
            facts: Facts = {"image": IMAGE, "video": VIDEO, "audio": SOUND}[one.kind]
        else:
            facts = [each for each in media if each.kind == one.kind][one.index]
        digest = sha256_of(f"{one.kind}{one.index}{one.url}".encode())
        files.append(KnownFile(one.where, digest, 1000, one.start_time_seconds, facts))
    return resolve(prompt, params, dimensions, limits, files)


def _ok(name: str, params: Any, *media: Facts, **resolves: Any) -> Vector:
    return Vector(name, params, resolves=resolves, media=media)


def _no(
    name: str, params: Any, media: Sequence[Facts], spelled: str, value: str, rule: str, nearest: str | None = None
) -> Vector:
    return Vector(name, params, refused=Refused(spelled, value, rule, nearest), media=tuple(media))


def _item(kind: str, index: int, **more: Any) -> dict[str, Any]:
    return {"type": kind, "index": index, **more}


_URL = {"image_url": "data:image/png;base64,AA=="}
_ELEMENT = "counted from 0"

INFERENCE = (
    _ok("nothing is t2va", {**SMALL, "aspect_ratio": "1:1"}, task="t2va", references=[]),
    _ok("an image is fl2va", SMALL, IMAGE, task="fl2va"),
    _ok("images of ref2va", REF, IMAGE, IMAGE, IMAGE, task="ref2va"),
    _ok("a video is ref2va", SMALL, VIDEO, task="ref2va"),
    _ok("a sound beside an image is ref2va", SMALL, IMAGE, SOUND, task="ref2va"),
    _ok("task in capitals with an image", {**SMALL, "task": "FL2VA"}, IMAGE, task="fl2va"),
    _no(
        "t2va with an image",
        {**REF, "task": "t2va"},
        [IMAGE],
        "task",
        "'t2va'",
        "this request has 1 image",
        "fl2va or ref2va",
    ),
    _no("t2va with a video", {**REF, "task": "t2va"}, [VIDEO], "task", "'t2va'", "this request has 1 video", "ref2va"),
    _no("t2va with 3 images", {**REF, "task": "t2va"}, [IMAGE] * 3, "task", "'t2va'", "has 3 images", "ref2va"),
    _no("unknown task", {**SMALL, "task": "i2va"}, [IMAGE], "task", "'i2va'", "one of t2va, fl2va, ref2va"),
)

KEYFRAMES = (
    _ok("first keyframe", {"duration": 5}, IMAGE, width=1024, height=768, aspect_ratio="640:480", frames=124),
    _ok("tall keyframe", {"duration": 5}, TALL, width=704, height=1440, aspect_ratio="300:600"),
    _ok("fl2va has 209 frames", {}, IMAGE, frames=209),
    _ok("last keyframe", {**SMALL, "frame_indices": [-1]}, IMAGE, task="fl2va"),
    _ok("one index for one image", {**SMALL, "frame_index": -1}, IMAGE, task="fl2va"),
    _ok("indices in target", {**SMALL, "target": {"frame_indices": [0, -1]}}, IMAGE, TALL, task="fl2va"),
    _ok("both keyframes", SMALL, IMAGE, TALL, width=256, keyframe_geometry="diffusers"),
    _ok("stretched keyframes", {**SMALL, "keyframe_geometry": "vllm-omni"}, IMAGE, keyframe_geometry="vllm-omni"),
    _ok("a ratio beside a keyframe", {"aspect_ratio": "21:9", "duration": 5}, IMAGE, width=1024, height=768),
    _ok("adaptive beside a keyframe", {"aspect_ratio": "adaptive", "duration": 5}, IMAGE, width=1024, height=768),
    _no("fl2va without an image", {**SMALL, "task": "fl2va"}, [], "IMAGES", "missing", "needs 1 or 2 images"),
    _no("3 keyframes", SMALL, [IMAGE] * 3, "IMAGES", "'3 images'", "takes 1 or 2 images", "2 images"),
    _no(
        "fl2va with a video", {**SMALL, "task": "fl2va"}, [IMAGE, VIDEO], "VIDEOS", "'1 video'", "fl2va takes no video"
    ),
    _no(
        "fl2va with a sound", {**SMALL, "task": "fl2va"}, [IMAGE, SOUND], "AUDIOS", "'1 sound'", "fl2va takes no sound"
    ),
    _no(
        "2 indices for 1 image",
        {**SMALL, "frame_indices": [0, -1]},
        [IMAGE],
        "frame_indices",
        "[0, -1]",
        "one entry for each image",
        "[0] or [-1]",
    ),
    _no(
        "1 index for 2 images",
        {**SMALL, "frame_indices": [-1]},
        [IMAGE, TALL],
        "frame_indices",
        "[-1]",
        "there are 2 images",
        "[0, -1]",
    ),
    _no(
        "indices reversed",
        {**SMALL, "frame_indices": [-1, 0]},
        [IMAGE, TALL],
        "frame_indices",
        "[-1, 0]",
        "one of 0, -1",
    ),
    _no("index 1", {**SMALL, "frame_indices": [1]}, [IMAGE], "frame_indices", "[1]", "one of 0, -1"),
    _no("no index", {**SMALL, "frame_indices": []}, [IMAGE], "frame_indices", "[]", "one of 0, -1"),
    _no("index true", {**SMALL, "frame_indices": [False]}, [IMAGE], "frame_indices", "[False]", "one of 0, -1"),
    _no(
        "unknown geometry",
        {**SMALL, "keyframe_geometry": "crop"},
        [IMAGE],
        "keyframe_geometry",
        "'crop'",
        "diffusers, vllm-omni",
    ),
    _no("short edge of a keyframe", {"short_edge": 480}, [IMAGE], "short_edge", "480", "must be 768 when", "768"),
)

REFERENCES = (
    _ok("ref2va is 16:9", {"task": "ref2va"}, IMAGE, aspect_ratio="16:9", width=1344, height=768, frames=124),
    _ok("ref2va adaptive", {"task": "ref2va", "aspect_ratio": "adaptive"}, IMAGE, aspect_ratio="16:9", width=1344),
    _ok("ref2va auto", {"task": "ref2va", "aspect_ratio": "auto"}, IMAGE, aspect_ratio="16:9"),
    _ok("ref2va 9:16", {"task": "ref2va", "aspect_ratio": "9:16"}, VIDEO, width=768, height=1344),
    _ok("9 images", REF, *[IMAGE] * 9, task="ref2va"),
    _ok("3 videos", REF, *[VIDEO] * 3, task="ref2va"),
    _ok("3 sounds beside an image", REF, IMAGE, *[SOUND] * 3, task="ref2va"),
    _ok("12 references", REF, *[IMAGE] * 8, *[VIDEO] * 2, *[SOUND] * 2, task="ref2va"),
    _ok(
        "rows of an image",
        {**REF, "reference_short_edge": 256},
        IMAGE,
        condition_video_rows=8 * 11,
        condition_audio_rows=0,
    ),
    # 3 s of 24 frames, cut to 56 = 17 x 3 + 5: 17 latents of 1024x768; 2 s of sound: 80 latents a channel.
    _ok("rows of a video", REF, SOUND_VIDEO, condition_video_rows=17 * 768, condition_audio_rows=160),
    # 352 x 256 of 1.33:1.
    _ok(
        "rows of a small video",
        {**REF, "video_reference_short_edge": 256},
        SOUND_VIDEO,
        condition_video_rows=17 * 8 * 11,
        condition_audio_rows=160,
        video_reference_short_edge=256,
    ),
    _ok("a reference edge of 2048", {**REF, "reference_short_edge": 2048}, IMAGE, reference_short_edge=2048),
    _no("10 images", REF, [IMAGE] * 10, "IMAGES", "'10 images'", "at most 9 images", "9 images"),
    _no("4 videos", REF, [VIDEO] * 4, "VIDEOS", "'4 videos'", "at most 3 videos", "3 videos"),
    _no("4 sounds", REF, [IMAGE, *[SOUND] * 4], "AUDIOS", "'4 sounds'", "at most 3 sounds", "3 sounds"),
    _no(
        "13 references",
        REF,
        [*[IMAGE] * 9, *[VIDEO] * 3, SOUND],
        "references",
        "'13 references'",
        "at most 12",
        "12 references",
    ),
    _no("a sound alone", REF, [SOUND], "references", "'1 sound'", "at least one image or video"),
    _no("ref2va without references", REF, [], "references", "missing", "at least one image or video"),
    _no(
        "reference edge 255",
        {**REF, "reference_short_edge": 255},
        [IMAGE],
        "reference_short_edge",
        "255",
        "steps of 32",
        "256",
    ),
    _no(
        "reference edge 2049",
        {**REF, "reference_short_edge": 2049},
        [IMAGE],
        "reference_short_edge",
        "2049",
        "steps of 32",
        "2048",
    ),
    _no(
        "video edge 800",
        {**REF, "video_reference_short_edge": 800},
        [VIDEO],
        "video_reference_short_edge",
        "800",
        "steps of 32",
        "768",
    ),
    _no(
        "reference edge 300",
        {**REF, "reference_short_edge": 300},
        [IMAGE],
        "reference_short_edge",
        "300",
        "steps of 32",
        "288",
    ),
    _no("ref2va 16:10", {**REF, "aspect_ratio": "16:10"}, [IMAGE], "aspect_ratio", "'16:10'", "one of 21:9"),
    _no(
        "a video of one latent",
        REF,
        [VideoFacts(width=640, height=480, frames=21, seconds=0.9)],
        "VIDEOS[0]",
        "'21 frames'",
        "too short",
    ),
)

ORDERS = (
    _ok("listed", {**REF, "references": [_item("audio", 0), _item("image", 0)]}, IMAGE, SOUND, task="ref2va"),
    _ok(
        "listed URL",
        {**REF, "references": [{"type": "image", "url": "data:,x"}, _item("image", 0)]},
        IMAGE,
        task="ref2va",
    ),
    _ok("by type", {**REF, "reference_order": "by_type"}, IMAGE, SOUND, reference_order="by_type"),
    _ok("image_reference", {**REF, "image_reference": _URL}, task="ref2va"),
    _ok("image_reference list", {**REF, "image_reference": [_URL, _URL]}, IMAGE, task="ref2va"),
    _ok("image_reference of fl2va", {**SMALL, "image_reference": _URL}, task="fl2va"),
    _ok("video_reference", {**SMALL, "video_reference": {"video_url": "https://example.com/a.mp4"}}, task="ref2va"),
    _ok("one start for all", {**REF, "start_time_seconds": 1}, VIDEO, VIDEO, task="ref2va"),
    _ok("a start for each", {**REF, "start_time_seconds": [0, 0.5]}, VIDEO, VIDEO, task="ref2va"),
    _ok("a start in the list", {**REF, "references": [_item("video", 0, start_time_seconds=1)]}, VIDEO, task="ref2va"),
    _ok("no start without a video", {**REF, "start_time_seconds": 0}, IMAGE, task="ref2va"),
    _no(
        "unknown order",
        {**REF, "reference_order": "random"},
        [IMAGE],
        "reference_order",
        "'random'",
        "as_sent, by_type",
    ),
    _no(
        "a file not listed",
        {**REF, "references": [_item("image", 0)]},
        [IMAGE, IMAGE],
        "references",
        "missing",
        "IMAGES[1] is not in it",
    ),
    _no(
        "a file listed twice",
        {**REF, "references": [_item("image", 0)] * 2},
        [IMAGE],
        "references[1].index",
        "0",
        "named twice",
    ),
    _no("a file beyond", {**REF, "references": [_item("image", 1)]}, [IMAGE], "references[0].index", "1", _ELEMENT),
    _no("index -1", {**REF, "references": [_item("image", -1)]}, [IMAGE], "references[0].index", "-1", _ELEMENT),
    _no(
        "index true in the list",
        {**REF, "references": [_item("image", True)]},
        [IMAGE],
        "references[0].index",
        "true",
        _ELEMENT,
    ),
    _no(
        "unknown type",
        {**REF, "references": [_item("text", 0)]},
        [IMAGE],
        "references[0].type",
        "'text'",
        "image, video, audio",
    ),
    _no(
        "no type",
        {**REF, "references": [{"index": 0}]},
        [IMAGE],
        "references[0].type",
        "missing",
        "image, video, audio",
    ),
    _no(
        "index and url",
        {**REF, "references": [_item("image", 0, url="data:,x")]},
        [IMAGE],
        "references[0]",
        "{'index': 0, 'type': 'image', 'url': 'data:,x'}",
        "exactly one",
    ),
    _no(
        "unknown key of a reference",
        {**REF, "references": [_item("image", 0, weight=2)]},
        [IMAGE],
        "references[0].weight",
        "2",
        "unknown key",
    ),
    _no(
        "start of an image",
        {**REF, "references": [_item("image", 0, start_time_seconds=1)]},
        [IMAGE],
        "references[0].start_time_seconds",
        "1",
        "unknown key",
    ),
    _no(
        "negative start in the list",
        {**REF, "references": [_item("video", 0, start_time_seconds=-1)]},
        [VIDEO],
        "references[0].start_time_seconds",
        "-1",
        "from 0 to 86400 seconds",
        "0",
    ),
    _no(
        "13 listed",
        {**REF, "references": [_item("image", 0)] * 13},
        [IMAGE],
        "references",
        "[{'index': 0, 'type': 'image'}, {'index': 0, 'type': 'image'}, {'index': 0, '...",
        "at most 12 objects",
    ),
    _no(
        "references no list",
        {**REF, "references": _item("image", 0)},
        [IMAGE],
        "references",
        "{'index': 0, 'type': 'image'}",
        "must be a list",
    ),
    _no(
        "references beside image_reference",
        {**REF, "references": [_item("image", 0)], "image_reference": _URL},
        [IMAGE],
        "image_reference",
        "'1 of them'",
        "not beside references",
    ),
    _no("file_id", {**REF, "image_reference": {"file_id": "f"}}, [], "image_reference.file_id", "'f'", "not offered"),
    _no(
        "audio_reference of texts",
        {**REF, "audio_reference": ["a.wav"]},
        [IMAGE],
        "audio_reference[0]",
        "'a.wav'",
        "the key audio_url",
    ),
    _no(
        "URL empty",
        {**REF, "image_reference": {"image_url": ""}},
        [],
        "image_reference.image_url",
        "''",
        "must be a URL",
    ),
    _no(
        "10 image_references",
        {**REF, "image_reference": [_URL] * 10},
        [],
        "image_reference",
        "[{'image_url': 'data:image/png;base64,AA=='}, {'image_url': 'data:image/png;b...",
        "at most 9",
    ),
    _no(
        "2 starts for 1 video",
        {**REF, "start_time_seconds": [0, 1]},
        [VIDEO],
        "start_time_seconds",
        "(0.0, 1.0)",
        "one for each video",
    ),
    _no(
        "a start without a video",
        {**REF, "start_time_seconds": 1},
        [IMAGE],
        "start_time_seconds",
        "1.0",
        "there are 0 videos",
    ),
    _no(
        "negative start",
        {**REF, "start_time_seconds": -0.5},
        [VIDEO],
        "start_time_seconds",
        "-0.5",
        "from 0 to 86400 seconds",
        "0",
    ),
    _no("start in words", {**REF, "start_time_seconds": "1"}, [VIDEO], "start_time_seconds", "'1'", "must be a number"),
    _no("start true", {**REF, "start_time_seconds": True}, [VIDEO], "start_time_seconds", "true", "must be a number"),
    _no(
        "start in both places",
        {**REF, "start_time_seconds": 1, "references": [_item("video", 0, start_time_seconds=1)]},
        [VIDEO],
        "start_time_seconds",
        "1.0",
        "give one of the two",
    ),
    _no("input_reference", {**REF, "input_reference": "a.png"}, [IMAGE], "input_reference", "'a.png'", "not offered"),
    _no(
        "images as a field",
        {**REF, "images": ["a.png"]},
        [IMAGE],
        "images",
        "['a.png']",
        "inputs IMAGES, VIDEOS and AUDIOS",
        "[]",
    ),
)

OUTPUTS = (
    _ok("10 outputs", {**SMALL, "num_outputs_per_prompt": 10}, IMAGE, outputs=10),
    _no(
        "11 outputs of a keyframe",
        {**SMALL, "num_outputs_per_prompt": 11},
        [IMAGE],
        "num_outputs_per_prompt",
        "11",
        "from 1 to 10",
        "10",
    ),
    _no(
        "no seed left",
        {**SMALL, "num_outputs_per_prompt": 2, "seed": 2**63 - 1},
        [IMAGE],
        "seed",
        str(2**63 - 1),
        "room for seed + i",
        str(2**63 - 2),
    ),
    _ok("the last seed", {**SMALL, "num_outputs_per_prompt": 2, "seed": 2**63 - 2}, IMAGE, seed=2**63 - 2),
)

FEATURES = tuple(
    _no(f"{name}={value} with references", {**REF, name: value}, [VIDEO], name, shown, "not offered")
    for name, value, shown in (
        ("audio_mode", "lock_source", "'lock_source'"),
        ("long_video_mode", "continuation", "'continuation'"),
        ("quality", "high", "'high'"),
        ("audio_noise_mask", 1, "1"),
    )
)

MEDIA_VECTORS: tuple[Vector, ...] = (*INFERENCE, *KEYFRAMES, *REFERENCES, *ORDERS, *OUTPUTS, *FEATURES)

__all__ = ["MEDIA_VECTORS", "PROMPT"]
