"""Optimisation profiles from the named axes of a graph and the sizes that a hardware profile lists for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engines.store import AxisRange

if TYPE_CHECKING:
    from export.graphs.graph import Axis


def optimisation_profiles(
    axes: Mapping[str, Axis], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, AxisRange], ...]:
    """One profile for each range of the axis that `shapes` cuts into most; the other axes have all their sizes in each.

    `shapes[axis]` lists the upper ends of the ranges, ascending; an axis that it does not name has one range. Range k
    begins one legal size above the end of range k - 1, and its end is also what TensorRT optimises for. Ends are cut to
    the axis' own sizes and to its multiple. An axis that follows it is cut into ranges as it is.
    """
    ends = {name: _ends(axis, shapes.get(name, (axis.maximum,))) for name, axis in axes.items()}
    if not axes:
        return ()
    driving = max((name for name in axes if axes[name].follows not in axes), key=lambda name: len(ends[name]))
    found = {name: [_range(axes[name].minimum, ends[name][-1])] * len(ends[driving]) for name in axes}
    moving = [name for name in axes if driving in (name, axes[name].follows)]
    found |= {name: _ranges(axes[name], ends[name]) for name in moving if len(ends[name]) == len(ends[driving])}
    return tuple(dict(zip(found, each, strict=True)) for each in zip(*found.values(), strict=True))


def _ends(axis: Axis, wanted: tuple[int, ...]) -> list[int]:
    """The upper ends that lie within the axis' sizes, each a legal size; the smallest size where none does."""
    cut = (min(end, axis.maximum) // axis.multiple * axis.multiple for end in wanted)
    return sorted({max(end, axis.minimum) for end in cut})


def _ranges(axis: Axis, ends: Sequence[int]) -> list[AxisRange]:
    """From the smallest size, and from one legal size above each end, to the next end."""
    starts = [axis.minimum, *(end + axis.multiple for end in ends[:-1])]
    return [_range(start, end) for start, end in zip(starts, ends, strict=True)]


def _range(start: int, end: int) -> AxisRange:
    return AxisRange(minimum=start, optimum=end, maximum=end)
