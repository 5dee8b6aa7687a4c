"""docs/requests.md, written from the contract's table: `python -m runtime.contract_page docs/requests.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from engines.quality import LOSSLESS, QUANTISED, TIERS
from plugins.dimensions import VideoVAEDimensions
from plugins.shape import ASPECT_RATIOS, SIDE_MULTIPLE, canvas, latents, legal_frames
from runtime.contract import (
    EXTRA,
    FIELDS,
    GROUPS,
    MEDIA_BYTES,
    PARAMETERS_BYTES,
    PARAMETERS_DEPTH,
    PROMPT,
    Field,
    Status,
)
from runtime.media import limits
from runtime.refusal import show
from runtime.task import TASKS

_INTRODUCTION = f"""# Requests

A request is a prompt, a parameters object and, for the tasks fl2va and ref2va, media files. Over gRPC they are the
inputs PROMPT (UTF-8), PARAMS (JSON, `{{}}` for all defaults but the required fields), and IMAGES, VIDEOS and AUDIOS
(BYTES of as many elements as there are files, each a whole file; left out where there are none). This page is written
from the tables that check requests (`runtime/contract.py`, `runtime/media/limits.py`); a test fails when they differ.

- The parameters are strict JSON of at most {PARAMETERS_BYTES // 1024} KiB and {PARAMETERS_DEPTH} levels: no key twice,
  no lone surrogates. What `data:` URLs hold does not count here but among the files.
- Types are exact: `true` is not 1, `5.0` is not an integer, `"5"` is not a number, `null` is not "left out", and NaN
  and Infinity are no numbers.
- An unknown key is refused, at every level. A field of a feature that is not offered is refused as 'not offered',
  except for the values that leave the feature off.
- A field may have several paths; the strongest comes first, and a weaker one that says something else gives way.
  `{EXTRA}` is an object whose keys are read as if they stood beside it, and win over the same path there.
  {", ".join(f"`{group}`" for group in GROUPS)} are objects that group fields. Every value given is checked, also one
  that gives way.
- The answer carries the request as it was resolved. What was raised, floored or overridden, or has no effect, is in its
  `notes`.
"""

EXAMPLE = """{
  "aspect_ratio": "1:1",
  "width": 256,
  "height": 256,
  "duration": 4,
  "num_inference_steps": 5,
  "step_convention": "sigma_points",
  "seed": 7,
  "media": {"crf": 20, "preset": "fast"}
}
"""
"""The parameters that the page shows; a test resolves what it finds there."""

_REFUSALS = """## Refusals

A refusal is one line that names the field as it was written, the value, the rule and, where there is one, the nearest
legal value:

```text
duration: got 3.99; must be a number, from 4 to 15 seconds; nearest legal: 4
fps: got 30; must be a number, exactly 24; nearest legal: 24
lora: got 'turbo'; not offered (this server has no adapters)
```

Over gRPC it is the message of an INVALID_ARGUMENT status; on a stream, whose errors have no status, the text alone.
"""


_MEDIA = f"""## Media

fl2va takes 1 or 2 images: the first frame of the clip, its last, or both. ref2va takes at least one image or video, and
sounds beside them; at most {limits.COUNT_IN_ALL} files. All files of a request have at most {MEDIA_BYTES >> 20} MiB
together. A URL is `data:`, `https:` or `http:` of a host that the operator allows, or a path under the operator's media
folder; without either, `data:` only.
"""

_MEDIA_HEAD = ("", "image", "video", "sound")


_QUALITY = f"""## Quality

A tier is named by what it changes, and nothing else differs from a `{LOSSLESS}` request of the same seed: `fp8` and
`nvfp4`, the denoiser's linear layers; `sage`, the blocks' attention, which is computed in 8-bit floats with the mean of
the keys taken out; `skip`, tiles of keys are left out where they weigh less than a threshold in every row. Tiles are
left out only in forwards whose video sigma is at most a gate, 0.97 in the shipped profiles: of the 49 forwards of the
default schedule the first 14 are without it. The text refiner's blocks are dense in all tiers.

A server offers the tiers of its hardware profile ([profiles](profiles.md)); any other is refused with those that are
offered. The answer's `quality` says what the tier is for this request: the linears, and for runs of consecutive
forwards the attention and its threshold. After an output's last forward a progress event has `skipped_tiles`, how many
tiles were left out in all of them.

"""

_DISTILLED = """## Distilled models and adapters

A model that was distilled to a few forwards has one schedule, which its server runs and no other. `task` must be one
that it was distilled for, `num_inference_steps` is left out or is its own number (under `step_convention` sigma_points
one more), `flow_shift` and `audio_flow_shift` are left out or are its own, and `lora` is refused. A server of the
released model may offer adapters, which its operator has built in; a request chooses one with `lora: {"name": NAME}`,
and with it what the adapter was trained for, by the same rules. There is one adapter a request, at the scale that it
was trained at, and no request names a file. What the request then is stands in its answer: `adapter`, `forwards`,
`positions` (of the sigma points before they are shifted; null where they are equally spaced) and the shifts.
"""

_QUALITY_HEAD = ("quality", "linear layers", "attention of the blocks")


def page() -> str:
    """The whole page, Markdown."""
    by_status = {status: [field for field in FIELDS if field.status is status] for status in Status}
    parts = [
        _INTRODUCTION,
        f"## Example\n\n```json\n{EXAMPLE}```\n",
        "## Fields\n\n" + markdown_table(_FIELD_HEAD, map(_field_row, [PROMPT, *by_status[Status.OFFERED]])),
        _MEDIA,
        markdown_table(_MEDIA_HEAD, limits.rows()),
        _QUALITY + markdown_table(_QUALITY_HEAD, _quality_rows()),
        _DISTILLED,
        "## Accepted, no effect\n\n" + markdown_table(_FIELD_HEAD, map(_field_row, by_status[Status.ACCEPTED])),
        "## Not offered\n\n" + markdown_table(_FEATURE_HEAD, map(_feature_row, by_status[Status.NOT_OFFERED])),
        f"## Canvases\n\nWithout width and height; explicit sides are multiples of {SIDE_MULTIPLE} px.\n\n"
        + markdown_table(("aspect_ratio", "canvas"), map(_canvas_row, ASPECT_RATIOS)),
        "## Frames\n\nEvery clip has 17n + 5 frames, at 24 a second.\n\n"
        + markdown_table(("frames", "seconds", "latent frames", "durations that land here"), _frame_rows()),
        _REFUSALS,
    ]
    return "\n".join(parts)


_FIELD_HEAD = ("field", "paths", "type", "values", "default", "tasks", "meaning")
_FEATURE_HEAD = ("field", "feature", "tasks", "values that leave it off")


def _field_row(field: Field) -> tuple[str, ...]:
    values = field.kind.range_text
    if field.only is not None:
        values = f"{', '.join(map(str, field.only))} ({values} are known; the others are not offered)"
    default = field.default_text or ("" if field.default is None else _plain(field.default))
    return f"`{field.name}`", _paths(field), field.kind.type_name, values, default, _tasks(field), field.meaning


def _feature_row(field: Field) -> tuple[str, ...]:
    off = {_plain(value): None for value in field.only or ()}
    return f"`{field.name}`", field.meaning, _tasks(field), ", ".join(off)


def _quality_rows() -> Iterable[tuple[str, ...]]:
    unchanged = "as stored (a CPU computes them in float32)"
    for name, (linears, attention) in TIERS.items():
        yield f"`{name}`", linears if linears in QUANTISED else unchanged, attention


def _paths(field: Field) -> str:
    return ", ".join(f"`{path}`" for path in field.paths)


def _tasks(field: Field) -> str:
    return "all" if field.tasks == TASKS else ", ".join(field.tasks)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def _canvas_row(ratio: str) -> tuple[str, ...]:
    return ratio, "x".join(map(str, canvas(ratio)))


def _frame_rows() -> Iterable[tuple[str, ...]]:
    vae = VideoVAEDimensions(latent_channels=24, latents_mean=(), latents_std=())
    below = 95
    for frames in legal_frames(vae):
        # A request is rounded to frames and raised to the grid; the longest request is 360 frames.
        reach = f"{(below + 1) / 24:.3f} to {min(frames, 360) / 24:.3f}"
        yield str(frames), f"{frames / 24:.3f}", str(latents(frames, vae)), reach
        below = frames


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table as Markdown writes it."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Writes the page to the path given as the first argument."""
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
