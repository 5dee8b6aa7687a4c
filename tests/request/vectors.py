"""Conformance vectors of the contract without media, as data: one table for `resolve` and for a live server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.media.facts import Facts

PROMPT = "A cat plays the piano while rain falls outside."
MEDIA = {
    "container": "faststart",
    "crf": 18,
    "video_bitrate": None,
    "preset": "veryfast",
    "audio_bitrate": 128,
    "colour": "bt709",
}
SMALL = {"aspect_ratio": "1:1", "width": 256, "height": 256, "duration": 4, "num_inference_steps": 4}


@dataclass(frozen=True)
class Refused:
    """What a refusal says: the field, the value as shown ("missing" when absent), and part of the rule."""

    field: str
    value: str
    rule: str
    nearest: str | None = None

    @property
    def opening(self) -> str:
        """The start of the message."""
        shown = self.value if self.value == "missing" else f"got {self.value}"
        return f"{self.field}: {shown}; "


@dataclass(frozen=True)
class Vector:
    """One request and what must come of it: `resolves` (a part of the resolved JSON object) or `refused`.

    A vector that resolves also resolves to its prompt, unchanged.
    """

    name: str
    params: Any
    """An object to be written as JSON, or the very text or bytes to send."""
    resolves: Mapping[str, Any] = field(default_factory=dict)
    refused: Refused | None = None
    prompt: str | bytes = PROMPT
    media: tuple[Facts, ...] = ()
    """What its files are; those of a kind in the order of that kind's input."""

    @property
    def params_bytes(self) -> bytes:
        """The PARAMS bytes of the request."""
        if isinstance(self.params, bytes):
            return self.params
        text = self.params if isinstance(self.params, str) else json.dumps(self.params)
        return text.encode("utf-8")

    @property
    def prompt_bytes(self) -> bytes:
        """The PROMPT bytes of the request."""
        return self.prompt if isinstance(self.prompt, bytes) else self.prompt.encode("utf-8")


def _ok(name: str, params: Any, prompt: str | bytes = PROMPT, **resolves: Any) -> Vector:
    return Vector(name, params, resolves=resolves, prompt=prompt)


def _wide(**params: Any) -> dict[str, Any]:
    return {"aspect_ratio": "16:9", **params}


def _no(name: str, params: Any, spelled: str, value: str, rule: str, nearest: str | None = None, **more: Any) -> Vector:
    return Vector(name, params, refused=Refused(spelled, value, rule, nearest), **more)


_SECONDS = "from 4 to 15 seconds"
_UNLISTED = "one of 21:9, 16:9, 4:3, 1:1, 3:4, 9:16"

RATIOS = (
    _no("sides without ratio", {"width": 256, "height": 256}, "aspect_ratio", "missing", "required for t2va"),
    _no("no ratio and no size", {"duration": 5}, "aspect_ratio", "missing", "required for t2va"),
    _no("ratio adaptive", {"aspect_ratio": "adaptive"}, "aspect_ratio", "'adaptive'", _UNLISTED),
    _no("ratio auto", {"aspect_ratio": "auto"}, "aspect_ratio", "'auto'", _UNLISTED),
    _no("ratio auto beside sides", {**SMALL, "aspect_ratio": "auto"}, "aspect_ratio", "'auto'", _UNLISTED),
    _no("ratio 16:10", {"aspect_ratio": "16:10"}, "aspect_ratio", "'16:10'", _UNLISTED),
    _no("ratio off by 1e-5", {"aspect_ratio": 1.77778777}, "aspect_ratio", "1.77778777", "within 1e-6", "16:9"),
    _no("ratio true", {"aspect_ratio": True}, "aspect_ratio", "true", _UNLISTED),
    _ok("ratio as decimal text", {"aspect_ratio": "1.7777777777"}, aspect_ratio="16:9", width=1344, height=768),
    _ok("ratio as number", {"aspect_ratio": 1.7777777778}, aspect_ratio="16:9"),
    _ok("ratio as integer", {"aspect_ratio": 1}, aspect_ratio="1:1"),
    _ok("ratio in target wins", {"aspect_ratio": "1:1", "target": {"aspect_ratio": "9:16"}}, width=768, height=1344),
)

CANVASES = (
    _ok("canvas 21:9", {"aspect_ratio": "21:9"}, width=1536, height=672, latent_height=42, latent_width=96),
    _ok("canvas 16:9", {"aspect_ratio": "16:9"}, width=1344, height=768, latent_height=48, latent_width=84),
    _ok("canvas 4:3", {"aspect_ratio": "4:3"}, width=1024, height=768),
    _ok("canvas 1:1", {"aspect_ratio": "1:1"}, width=768, height=768),
    _ok("canvas 3:4", {"aspect_ratio": "3:4"}, width=768, height=1024),
    _ok("canvas 9:16", {"aspect_ratio": "9:16"}, width=768, height=1344),
    _ok("explicit sides", SMALL, width=256, height=256, latent_height=16, latent_width=16, video_rows=2048),
    _ok("size wins over sides", {**SMALL, "size": "320x256"}, width=320, height=256),
    _no("width off the grid", _wide(width=1350, height=768), "width", "1350", "multiple of 32", "1344 or 1376"),
    _no("height off the grid", _wide(width=1344, height=770), "height", "770", "multiple of 32", "768 or 800"),
    _no("size off the grid", _wide(size="1344x770"), "size", "770", "multiple of 32", "768 or 800"),
    _ok("snap floors both", _wide(width=1350, height=770, snap=True), width=1344, height=768),
    _no("snap as text", _wide(width=1350, height=770, snap="true"), "snap", "'true'", "true or false"),
    _no("width alone", _wide(width=1344), "height", "missing", "width needs it beside it"),
    _no("height alone", _wide(height=768), "width", "missing", "height needs it beside it"),
    _no("side below the tile", _wide(width=224, height=256), "width", "224", "from 256 to 4096 px", "256"),
    _no("side of zero", _wide(width=0, height=256), "width", "0", "from 256 to 4096 px", "256"),
    _no("side above the most", _wide(width=4128, height=2048), "width", "4128", "from 256 to 4096 px", "4096"),
    _no("wider than 4:1", _wide(width=1056, height=256), "width", "'1056x256'", "1:4 to 4:1", "1024x256"),
    _no("narrower than 1:4", _wide(width=256, height=1056), "width", "'256x1056'", "1:4 to 4:1", "288x1056"),
    _no("size in words", _wide(size="large"), "size", "'large'", "WIDTHxHEIGHT"),
    _no("short edge 1440", _wide(short_edge=1440), "short_edge", "1440", "must be 768 when", "768"),
    _no("short edge in target", _wide(target={"short_edge": 480}), "target.short_edge", "480", "must be 768 when"),
    _no("short edge true", _wide(short_edge=True), "short_edge", "true", "an integer"),
    _ok("short edge beside sides", {**SMALL, "short_edge": 1440}, width=256, height=256),
)

DURATIONS = (
    _ok("4 s", _wide(duration=4), frames=107, latent_frames=32, audio_latents=178, video_rows=32256, audio_rows=356),
    _ok("4.4 s", _wide(duration=4.4), frames=107),
    _ok("5 s", _wide(duration=5), frames=124, latent_frames=37, audio_latents=207),
    _ok("8 s is on the grid", _wide(duration=8), frames=192, seconds=8.0, audio_latents=320),
    _ok("8.7 s", _wide(duration=8.7), frames=209),
    _ok("10 s", _wide(duration=10), frames=243, latent_frames=72, audio_latents=405, video_rows=72576, audio_rows=810),
    _ok("11 s", _wide(duration=11), frames=277),
    _ok("14.4 s", _wide(duration=14.4), frames=362),
    _ok("15 s", _wide(duration=15), frames=362, latent_frames=107, audio_latents=603),
    _ok("no duration", _wide(), frames=209),
    _ok("duration_seconds wins over duration", _wide(duration=4, duration_seconds=5), frames=124),
    _ok("target wins", _wide(duration_seconds=5, target={"duration_seconds": 8}), frames=192),
    _ok("extra_params win", _wide(duration=4, extra_params={"duration": 5}), frames=124),
    _ok("whole seconds as text", _wide(seconds="10"), frames=243),
    _ok("duration wins over seconds", _wide(seconds=10, duration=4), frames=107),
    _ok("num_frames 100", _wide(num_frames=100), frames=107),
    _ok("num_frames 360", _wide(num_frames=360), frames=362),
    _ok("num_frames 1 is not given", _wide(num_frames=1), frames=209),
    _no("3.99 s", _wide(duration=3.99), "duration", "3.99", _SECONDS, "4"),
    _no("15.01 s", _wide(duration=15.01), "duration", "15.01", _SECONDS, "15"),
    _no("30 s", _wide(duration=30), "duration", "30", _SECONDS, "15"),
    _no("duration true", _wide(duration=True), "duration", "true", _SECONDS),
    _no("duration NaN", '{"aspect_ratio": "16:9", "duration": NaN}', "duration", "nan", _SECONDS),
    _no("duration Infinity", '{"aspect_ratio": "16:9", "duration": Infinity}', "duration", "inf", _SECONDS, "15"),
    _no("duration 1e400", '{"aspect_ratio": "16:9", "duration": 1e400}', "duration", "inf", _SECONDS, "15"),
    _no("duration as text", _wide(duration="5"), "duration", "'5'", _SECONDS),
    _no("duration null", _wide(duration=None), "duration", "null", _SECONDS),
    _no("loser out of range", _wide(duration=99, target={"duration_seconds": 5}), "duration", "99", _SECONDS),
    _no("decimal seconds", _wide(seconds="8.7"), "seconds", "'8.7'", "whole seconds from 4 to 15"),
    _no("num_frames 95", _wide(num_frames=95), "num_frames", "95", "from 96 to 360 frames", "96"),
    _no("num_frames 361", _wide(num_frames=361), "num_frames", "361", "from 96 to 360 frames", "360"),
    _no("num_frames 120.0", _wide(num_frames=120.0), "num_frames", "120.0", "an integer", "120"),
    _ok("fps 24", _wide(fps=24.0), fps=24),
    _no("fps 25", _wide(fps=25), "fps", "25", "exactly 24", "24"),
    _no("fps 30", _wide(fps=30), "fps", "30", "exactly 24", "24"),
    _no("fps 24.5", _wide(fps=24.5), "fps", "24.5", "exactly 24", "24"),
)

SAMPLING = (
    _ok("49 forwards by default", _wide(), forwards=49, sigma_points=50, video_shift=12.0, audio_shift=3.0, seed=42),
    _ok("4 evaluations", SMALL, forwards=4, sigma_points=5),
    _ok("1 evaluation", {**SMALL, "num_inference_steps": 1}, forwards=1, sigma_points=2),
    _ok("5 sigma points", {**SMALL, "num_inference_steps": 5, "step_convention": "sigma_points"}, forwards=4),
    _ok("201 sigma points", _wide(num_inference_steps=201, step_convention="sigma_points"), forwards=200),
    _no("no step", _wide(num_inference_steps=0), "num_inference_steps", "0", "from 1 to", "1"),
    _no("201 evaluations", _wide(num_inference_steps=201), "num_inference_steps", "201", "1 to 200 evaluations", "200"),
    _no(
        "1 sigma point",
        _wide(num_inference_steps=1, step_convention="sigma_points"),
        "num_inference_steps",
        "1",
        "2 to 201 sigma points",
        "2",
    ),
    _no("steps true", _wide(num_inference_steps=True), "num_inference_steps", "true", "an integer"),
    _no("steps 4.0", _wide(num_inference_steps=4.0), "num_inference_steps", "4.0", "an integer", "4"),
    _no(
        "unknown convention", _wide(step_convention="steps"), "step_convention", "'steps'", "evaluations, sigma_points"
    ),
    _ok("shifts", _wide(flow_shift=6, audio_flow_shift=2.5), video_shift=6.0, audio_shift=2.5),
    _no("flow shift 0", _wide(flow_shift=0), "flow_shift", "0", "from 0.01 to 100", "0.01"),
    _no("flow shift below 0", _wide(flow_shift=-12), "flow_shift", "-12", "from 0.01 to 100"),
    _no("flow shift in words", _wide(flow_shift="fast"), "flow_shift", "'fast'", "a number"),
    _no("audio flow shift 0", _wide(audio_flow_shift=0), "audio_flow_shift", "0", "from 0.01 to 100", "0.01"),
    _no("audio flow shift 1e9", _wide(audio_flow_shift=1e9), "audio_flow_shift", "1000000000.0", "from 0.01 to 100"),
    _ok("largest seed", _wide(seed=2**63 - 1), seed=2**63 - 1),
    _ok("smallest seed", _wide(seed=-(2**63)), seed=-(2**63)),
    _no("seed of 64 bits", _wide(seed=2**63), "seed", "9223372036854775808", "an integer from -9223372036854775808"),
    _no("seed of 400 digits", _wide(seed=10**400), "seed", "an integer of 1329 bits", "an integer from"),
    _no("seed true", _wide(seed=True), "seed", "true", "an integer"),
    _no("seed as text", _wide(seed="42"), "seed", "'42'", "an integer"),
    _ok("vllm-omni noise", _wide(seed_convention="vllm-omni"), seed_convention="vllm-omni"),
    _no("unknown noise", _wide(seed_convention="comfy"), "seed_convention", "'comfy'", "diffusers, vllm-omni"),
    _ok("euler", _wide(sampler="euler")),
    _ok("lossless", _wide(quality="lossless")),
    _no("a tier of another profile", _wide(quality="fp8+sage"), "quality", "'fp8+sage'", "not offered"),
    _no("no tier at all", _wide(quality="best"), "quality", "'best'", "must be one of"),
    _ok("task in capitals", _wide(task="T2VA"), task="t2va"),
    _ok("guidance without effect", _wide(guidance_scale=5, negative_prompt="blur"), forwards=49),
    _no("guidance 21", _wide(guidance_scale=21), "guidance_scale", "21", "from 0 to 20", "20"),
)

OUTPUT = (
    _ok("media by default", _wide(), media=MEDIA),
    _ok(
        "media as object",
        _wide(media={"crf": 30, "preset": "fast"}),
        media={**MEDIA, "crf": 30, "preset": "fast"},
    ),
    _ok("media flat", _wide(audio_bitrate=192), media={**MEDIA, "audio_bitrate": 192}),
    _ok(
        "media in fragments, in the peers' colours",
        _wide(media={"container": "fragmented", "colour": "bt601_untagged"}),
        media={**MEDIA, "container": "fragmented", "colour": "bt601_untagged"},
    ),
    _ok("video bit rate", _wide(media={"video_bitrate": 4000}), media={**MEDIA, "crf": None, "video_bitrate": 4000}),
    _no(
        "video bit rate and crf",
        _wide(video_bitrate=4000, media={"crf": 18}),
        "video_bitrate",
        "4000",
        "must not stand beside media.crf",
    ),
    _no("video bit rate too low", _wide(video_bitrate=1), "video_bitrate", "1", "from 100 to 100000 kb/s", "100"),
    _no("container", _wide(container="mkv"), "container", "'mkv'", "must be one of faststart, fragmented"),
    _no("colour", _wide(colour="bt2020"), "colour", "'bt2020'", "must be one of bt709, bt601_untagged"),
    _no("crf 52", _wide(crf=52), "crf", "52", "from 1 to 51", "51"),
    _no("crf below 0", _wide(media={"crf": -1}), "media.crf", "-1", "from 1 to 51", "1"),
    _no("unknown preset", _wide(preset="placebo"), "preset", "'placebo'", "one of ultrafast"),
    _no("bit rate 63", _wide(audio_bitrate=63), "audio_bitrate", "63", "from 64 to 320 kb/s", "64"),
    _ok("one output", _wide(num_outputs_per_prompt=1)),
    _no("11 outputs", _wide(num_outputs_per_prompt=11), "num_outputs_per_prompt", "11", "from 1 to 10", "10"),
    _no("outputs true", _wide(num_outputs_per_prompt=True), "num_outputs_per_prompt", "true", "an integer"),
)


def _absent(name: str, value: Any, shown: str, nearest: str | None = None) -> Vector:
    return _no(f"not offered: {name}={shown}", _wide(**{name: value}), name, shown, "not offered", nearest)


NOT_OFFERED = (
    _absent("quality", "high", "'high'"),
    _absent("sampler", "res_multistep", "'res_multistep'", "euler"),
    _absent("audio_mode", "lock_source", "'lock_source'", "native"),
    _absent("generate_sound", False, "false", "true"),
    _absent("long_video", True, "true", "false"),
    _absent("long_video_mode", "continuation", "'continuation'", "full"),
    _absent("continuation_window_frames", 277, "277"),
    _absent("continuation_overlap_frames", 22, "22"),
    _absent("continuation_prompts", ["a", "b"], "['a', 'b']"),
    _absent("input_reference", "data:image/png;base64,AA==", "'data:image/png;base64,AA=='"),
    _absent("source_video", "a.mp4", "'a.mp4'"),
    _absent("audio_noise_mask", 1, "1"),
    _absent("video_noise_mask", [1, 0], "[1, 0]"),
    _absent("latent_upscale", 2, "2", "false"),
    _absent("latent_refine", {"strength": 0.35}, "{'strength': 0.35}", "false"),
    _absent("pad_seq_len", 65, "65"),
    _absent("pad_seq_len", 2**21, "2097152"),
    _absent("force_refresh_step_hint", 3, "3"),
    _absent("force_refresh_step_policy", "once", "'once'"),
    _absent("enable_frame_interpolation", True, "true", "false"),
    _absent("frame_interpolation_exp", 1, "1"),
    _absent("video_codec_options", {"preset": "slow"}, "{'preset': 'slow'}"),
    _ok("left off", _wide(long_video=False, audio_mode="native", generate_sound=True, latent_refine=False, images=[])),
)

PROMPTS = (
    _no("empty prompt", SMALL, "prompt", "''", "1 to 7000 characters", prompt=""),
    _no(
        "7,001 characters",
        SMALL,
        "prompt",
        repr("x" * 37)[:-1] + "..." + repr("x" * 38)[1:],
        "has 7001",
        prompt="x" * 7001,
    ),
    _no("prompt not UTF-8", SMALL, "prompt", repr(b"a cat\xff"), "must be UTF-8, byte 5 is not", prompt=b"a cat\xff"),
    _no("prompt with U+0000", SMALL, "prompt", repr("a\0b"), "without U+0000", prompt="a\0b"),
    _no("prompt as parameter", {**SMALL, "prompt": "x"}, "prompt", "'x'", "beside the parameters"),
    _ok("7,000 characters", SMALL, prompt="猫" * 7000, frames=107),
    _ok("prompt is verbatim", SMALL, prompt="  <d>Hi</d>\r\n\té e\u0301 ", frames=107),
)

SYNTAX = (
    _no("unknown key", _wide(durashun=5), "durashun", "5", "unknown field", "duration"),
    _no("unknown key in target", _wide(target={"seconds": 5}), "target.seconds", "5", "unknown field"),
    _no(
        "unknown key in extra_params", _wide(extra_params={"fsp": 24}), "extra_params.fsp", "24", "unknown field", "fps"
    ),
    _no("unknown key in media", _wide(media={"codec": "av1"}), "media.codec", "'av1'", "unknown field"),
    _no("dotted key", _wide(**{"media.crf": 20}), "media.crf", "20", "unknown field"),
    _no(
        "extra_params in extra_params",
        _wide(extra_params={"extra_params": {}}),
        "extra_params.extra_params",
        "{}",
        "unknown",
    ),
    _no("target not an object", _wide(target=5), "target", "5", "must be a JSON object"),
    _no("parameters not an object", "[1]", "parameters", "[1]", "must be a JSON object"),
    _no("parameters empty", "", "parameters", "''", "must be JSON"),
    _no("parameters cut off", '{"seed": ', "parameters", "'{\"seed\": '", "must be JSON"),
    _no(
        "parameters not UTF-8",
        b'{"seed\xff": 1}',
        "parameters",
        "b'{\"seed\\xff\": 1}'",
        "must be UTF-8, byte 6 is not",
    ),
    _no("key given twice", '{"seed": 1, "seed": 2}', "seed", "2", "given twice"),
    _no("too large", '{"user": "' + "x" * 65536 + '"}', "parameters", "65548", "at most 65536 bytes"),
    _no("too deep", '{"lora": ' + "[" * 8 + "]" * 8 + "}", "parameters", "9", "at most 8 levels"),
    _no("lone surrogate", '{"user": "\\ud800"}', "user", "'\\ud800'", "lone surrogates"),
    _no("another model", _wide(model="wan"), "model", "'wan'", "must be the served model"),
)

VECTORS: tuple[Vector, ...] = (
    *RATIOS,
    *CANVASES,
    *DURATIONS,
    *SAMPLING,
    *OUTPUT,
    *NOT_OFFERED,
    *PROMPTS,
    *SYNTAX,
)
