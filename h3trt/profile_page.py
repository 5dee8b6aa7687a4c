"""docs/profiles.md, written from the profiles and their plans: `python -m h3trt.profile_page docs/profiles.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engines.plan import Plan, PlanError, Workload, make_plan, released_outline
from engines.profile import PROFILES, Profile
from engines.quality import graph_name, served_by
from export.checkpoint.outline import Outline
from runtime.contract import DEFAULT_FORWARDS
from runtime.contract_page import markdown_table
from runtime.quality import quality

_INTRODUCTION = """# Hardware profiles

What `h3trt plan --profile NAME` says of each shipped profile (`engines/profiles`) and the released model, for 1344x768
and 49 forwards of its first tier, in units of 10^9 bytes; where there are further tiers, a peak is that of the fullest.
Nothing here is measured on the hardware: memory is counted from dimensions, with the activation memory that the
TensorRT-RTX builder states, and the time is a lower bound from rated figures. This page is written by
`python -m h3trt.profile_page docs/profiles.md`; a test fails when the two differ.
"""

_TIERS = """## Tiers of quality

What a request may choose with `quality` ([requests](requests.md)); the first is that of requests that choose none. The
others share its weights: each further engine is the block's code alone. Forwards are those of the default schedule.
"""

_TIER_HEAD = ("profile", "quality", "linear layers", "attention of the blocks in 49 forwards", "engine of the block")

_HEAD = (
    "profile",
    "GPUs",
    "denoiser",
    "tiers of quality",
    "residency",
    "GPU memory",
    "peak 10 s",
    "peak 15 s",
    "host",
    "disk",
    "10 s takes",
)


def page() -> str:
    """The whole page, Markdown."""
    outline = released_outline()
    shipped = [Profile.load(path.stem) for path in sorted(PROFILES.glob("*.toml"))]
    rows = [_row(profile, outline) for profile in shipped if profile.on_gpu]
    shift = outline.dimensions.video_shift
    tiers = [row for profile in shipped if profile.quality for row in tier_rows(profile, DEFAULT_FORWARDS, shift)]
    return "\n".join(
        (_INTRODUCTION, markdown_table(_HEAD, rows), _TIERS, markdown_table(_TIER_HEAD, tiers)),
    )


def tier_rows(
    profile: Profile, forwards: int, video_shift: float, positions: Sequence[float] | None = None
) -> Iterator[tuple[str, ...]]:
    """What each tier of a profile is, in words: profile, name, linears, attention by forwards, engine."""
    base, built = profile.attention.blocks, (profile.attention.blocks, *profile.further_attention)
    for tier in profile.tiers:
        made = quality(tier, forwards, video_shift, positions)
        attends = "block.attend" if profile.segmented else "block"
        engines = dict.fromkeys(graph_name(attends, served_by(one.attention, built), base) for one in made.attending)
        attention = ", then ".join(map(str, made.attending))
        yield f"`{profile.name}`", f"`{tier.name}`", tier.linears, attention, ", ".join(f"`{e}`" for e in engines)


def _row(profile: Profile, outline: Outline) -> tuple[str, ...]:
    plan = make_plan(profile, outline, Workload())
    assert profile.device is not None  # as profiles for GPUs are validated
    return (
        f"`{profile.name}`",
        f"{profile.gpus} x {profile.device.title}",
        profile.precision.denoiser,
        ", ".join(f"`{tier.name}`" for tier in profile.tiers),
        _residency(profile),
        _size(plan.limit),
        _size(plan.peak),
        _longest(profile, outline),
        _size(plan.host),
        _size(plan.disk),
        f"{plan.seconds:.0f} s or more",
    )


def _residency(profile: Profile) -> str:
    """What does not stay on the GPU."""
    assert profile.residency is not None  # as profiles for GPUs are validated
    moved = [f"{component} {place}" for component, place in profile.residency if isinstance(place, str)]
    moved = [words for words in moved if not words.endswith("resident")]
    blocks = profile.residency.denoiser
    if isinstance(blocks, int):
        moved.append(f"{blocks} blocks resident")
    return ", ".join(moved).replace("_", " ") or "all resident"


def _longest(profile: Profile, outline: Outline) -> str:
    try:
        plan: Plan = make_plan(profile, outline, Workload(seconds=15))
    except PlanError as refused:
        shorter = [line for line in str(refused).splitlines() if "at most" in line]
        return f"does not fit;{shorter[0].partition('fit:')[2]}" if shorter else "does not fit"
    return _size(plan.peak)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f}"


def main() -> None:
    """Writes the page to the path given as the first argument."""
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
