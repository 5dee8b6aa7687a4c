"""Plans of a student that attends to video tiles: what is computed, what is held, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.plan import PlanError, Workload, make_plan
from engines.plan.plan import GraphPlan
from engines.profile import Profile
from export.checkpoint.outline import Outline
from plugins.distilled import Distilled, PinnedSchedule, VideoSparse
from tests.video_sparse import tiles_of

TEN_SECONDS = Workload(seconds=10, forwards=8, text_rows=512)
SCHEDULE = PinnedSchedule(forwards=8, video_shift=10.0, audio_shift=3.0)
GATES = 7168 * 5376


def student(outline: Outline, sparsity: float = 0.8) -> Outline:
    sparse = VideoSparse(sparsity=sparsity)
    distilled = Distilled(name="fasth3-v2", family="fasth3_v2", tasks=("t2va",), schedule=SCHEDULE, video_sparse=sparse)
    return replace(outline, student=distilled, partitions=("fl2va",))


def plain(row_chunk: int = 0) -> Profile:
    """A profile with room for the gates."""
    loaded = Profile.load("h200_inductor")
    assert loaded.residency is not None
    changes = {"row_chunk": row_chunk, "partitions": ("fl2va",), "quality": {}}
    return loaded.model_copy(
        update={**changes, "residency": loaded.residency.model_copy(update={"text_encoder": "swapped"})}
    )


def profile(row_chunk: int = 0) -> Profile:
    """The same as it serves the student."""
    loaded = plain(row_chunk)
    return loaded.model_copy(update={"attention": loaded.attention.model_copy(update={"blocks": "vsa"})})


def block(outline: Outline, served: Profile) -> GraphPlan:
    return make_plan(served, outline, TEN_SECONDS).graph("block")


def pairs(kept: int) -> int:
    """Queries times keys of 10 s, counted tile by tile: as if all kept tiles were full."""
    tiles, prefix = tiles_of([1] * 512 + [2] * 810, (72, 24, 42))
    rows = sum(map(len, tiles))
    before = sum(map(len, tiles[:prefix]))
    return sum(len(tile) * (rows if i < prefix else before + 64 * kept) for i, tile in enumerate(tiles))


@pytest.mark.parametrize(("sparsity", "kept"), [(0.9, 119), (0.8, 238)])
def test_operations_are_those_of_the_attended_pairs(outline: Outline, sparsity: float, kept: int) -> None:
    sparse, dense = block(student(outline, sparsity), profile()), block(outline, plain())
    rows = 512 + 810 + 72_576
    tiles = 8 + 13 + 1188
    # Every block has a gate more, and every forward has 50 of them.
    attention = sparse.flops["bfloat16"] - 400 * 2 * (4 * 5376 * 7168 + 3 * 5376 * 14336 + GATES) * rows
    assert attention == pytest.approx(400 * 4 * 7168 * (pairs(kept) + tiles**2), rel=1e-12)
    share = attention / (dense.flops["bfloat16"] - 400 * 2 * (4 * 5376 * 7168 + 3 * 5376 * 14336) * rows)
    assert 1 - sparsity < share < 1 - sparsity + 0.06


def test_gates_are_weights_of_the_blocks_alone(outline: Outline) -> None:
    sparse, dense = (make_plan(profile(), student(outline), TEN_SECONDS), make_plan(plain(), outline, TEN_SECONDS))
    more = {graph.graph: graph.weights - dense.graph(graph.graph).weights for graph in sparse.graphs}
    # A student's tables are made by the build, so that some graphs have none.
    assert {name: nbytes for name, nbytes in more.items() if nbytes > 0} == {"block": 50 * 2 * GATES}


def test_memory_is_of_the_tiles_and_not_of_all_scores(outline: Outline) -> None:
    sparse, dense = block(student(outline), profile()), block(outline, plain())
    more = sparse.activations - dense.activations
    laid = 3 * 1209 * 64 * 7168 * 2
    gates = 73_898 * 7168 * 2
    # Their means, their summary and the scratch are some hundred megabytes.
    assert laid + gates < more < laid + gates + 0.5e9


def test_segments_hold_the_gate_between_them(outline: Outline) -> None:
    plan = make_plan(profile(8192), student(outline), TEN_SECONDS)
    dense = make_plan(plain(8192), outline, TEN_SECONDS)
    project = [one.graph("block.project") for one in (plan, dense)]
    assert project[0].weights - project[1].weights == 50 * 2 * GATES
    assert project[0].io - project[1].io == 73_898 * 7168 * 2
    assert plan.graph("block.attend").activations > dense.graph("block.attend").activations


def test_a_backend_without_the_operation_is_refused(outline: Outline) -> None:
    served = Profile.load("rtxpro6000").model_copy(update={"partitions": ("fl2va",)})
    with pytest.raises(PlanError, match="backend = 'tensorrt_rtx': fasth3-v2 attends to video tiles alone"):
        make_plan(served, student(outline), TEN_SECONDS)
