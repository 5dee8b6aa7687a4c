"""docs/profiles.md, written from the profiles and their plans: `python -m h3trt.profile_page docs/profiles.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from engines.plan import Plan, PlanError, Workload, make_plan, released_outline
from engines.profile import PROFILES, Profile
from export.checkpoint.outline import Outline
from runtime.contract_page import markdown_table

_INTRODUCTION = """# Hardware profiles

What `h3trt plan --profile NAME` says of each shipped profile (`engines/profiles`) and the released model, for 1344x768
and 49 forwards, in units of 10^9 bytes. Nothing here is measured on the hardware: memory is counted from dimensions,
with the activation memory that the TensorRT-RTX builder states, and the time is a lower bound from rated figures.
This page is written by `python -m h3trt.profile_page docs/profiles.md`; a test fails when the two differ.
"""

_HEAD = (
    "profile",
    "GPUs",
    "denoiser",
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
    return f"{_INTRODUCTION}\n{markdown_table(_HEAD, rows)}"


def _row(profile: Profile, outline: Outline) -> tuple[str, ...]:
    plan = make_plan(profile, outline, Workload())
    assert profile.device is not None  # as profiles for GPUs are validated
    return (
        f"`{profile.name}`",
        f"{profile.gpus} x {profile.device.title}",
        profile.precision.denoiser,
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
