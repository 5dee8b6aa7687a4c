"""Optimisation profiles cover every legal size once along the driving axis, and wholly along the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.backends.tensorrt.shapes import optimisation_profiles
from engines.store import AxisRange
from export.graphs.graph import Axis

ROWS = Axis("rows", 1, 262_144)


def test_the_axis_with_most_ranges_drives() -> None:
    axes = {"text": Axis("text", 1, 16_384), "rows": ROWS}
    found = optimisation_profiles(axes, {"rows": (100, 1000), "text": (512,)})
    text = AxisRange(minimum=1, optimum=512, maximum=512)
    assert found == (
        {"text": text, "rows": AxisRange(minimum=1, optimum=100, maximum=100)},
        {"text": text, "rows": AxisRange(minimum=101, optimum=1000, maximum=1000)},
    )


def test_an_axis_that_follows_the_driving_one_is_cut_as_it_is() -> None:
    axes = {"local": Axis("local", 1, 262_144, follows="rows"), "rows": ROWS}
    assert optimisation_profiles(axes, {"rows": (128, 1024), "local": (64, 512)}) == (
        {name: AxisRange(minimum=1, optimum=end, maximum=end) for name, end in (("local", 64), ("rows", 128))},
        {
            "local": AxisRange(minimum=65, optimum=512, maximum=512),
            "rows": AxisRange(minimum=129, optimum=1024, maximum=1024),
        },
    )


def test_an_axis_that_follows_none_that_is_there_drives() -> None:
    found = optimisation_profiles({"local": Axis("local", 1, 512, follows="rows")}, {"local": (64, 512)})
    assert [each["local"].minimum for each in found] == [1, 65]


def test_an_axis_that_the_profile_does_not_limit_has_all_its_sizes() -> None:
    assert optimisation_profiles({"f": Axis("f", 384, 3456)}, {}) == (
        {"f": AxisRange(minimum=384, optimum=3456, maximum=3456)},
    )


def test_a_graph_without_axes_has_no_profiles() -> None:
    assert optimisation_profiles({}, {"rows": (1,)}) == ()


@given(
    minimum=st.integers(1, 50),
    span=st.integers(0, 500),
    multiple=st.integers(1, 7),
    ends=st.lists(st.integers(1, 700), min_size=1, max_size=6, unique=True).map(sorted),
)
def test_ranges_follow_each_other_within_the_axis_sizes(
    minimum: int, span: int, multiple: int, ends: list[int]
) -> None:
    axis = Axis("a", minimum * multiple, (minimum + span) * multiple, multiple)
    ranges = [ranges["a"] for ranges in optimisation_profiles({"a": axis}, {"a": tuple(ends)})]
    legal = [size for size in range(axis.minimum, axis.maximum + 1, multiple) if size <= max(ends[-1], axis.minimum)]
    covered = [size for r in ranges for size in range(r.minimum, r.maximum + 1, multiple)]
    assert covered == legal
    assert all(r.optimum == r.maximum for r in ranges)
