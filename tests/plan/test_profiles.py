"""Every shipped profile holds what it is for, and a request that it cannot hold is refused with what would fit."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.plan import PlanError, Workload, make_plan, released_outline
from engines.plan.planner import draft
from engines.plan.refusal import suggestions
from engines.plan.weights import Model
from engines.profile import PROFILES, Profile, Ranks, Residency
from export.checkpoint.outline import Outline

SHIPPED = sorted(path.stem for path in PROFILES.glob("*.toml"))
SHORT = {"rtx5090": 12.25}
"""Profiles that do not hold 15 s, and the seconds that they hold."""

EXPECTED = {
    "b200", "b300", "b300x4", "cpu", "cpu-ranks2", "gb10", "gb200x4", "h100x8", "h200", "h200_inductor",
    "h200_inductor_fp8", "h200_inductor_fp8_sage", "h200_inductor_sage", "h200x2", "h200x2_inductor", "h200x4",
    "h200x8", "rtx4090", "rtx4090x2", "rtx5090", "rtx5090x2", "rtxpro5000x4", "rtxpro6000",
}  # fmt: skip

OUTLINE = released_outline()
MODEL = Model(OUTLINE)


def _resident(profile: Profile, **places: object) -> Profile:
    everything = dict.fromkeys(Residency.model_fields, "resident")
    return profile.model_copy(update={"residency": Residency.model_validate(everything | places)})


def _residency(profile: Profile) -> Residency:
    assert profile.residency is not None
    return profile.residency


def test_all_profiles_are_shipped() -> None:
    assert set(SHIPPED) == EXPECTED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_holds_its_longest_clip_and_is_planned_at_once(outline: Outline, name: str) -> None:
    started = time.process_time()
    plan = make_plan(Profile.load(name), outline, Workload(seconds=SHORT.get(name, 15)))
    assert time.process_time() - started < 2
    assert not plan.limit or plan.peak <= plan.limit
    assert all(peak <= plan.peak for stage in plan.stages for peak in stage.peaks)


def test_a_compiled_block_is_planned_for_what_torchs_allocator_keeps(outline: Outline) -> None:
    """What attention has left is reused, but for the wider products of the feed-forward's first matrix."""
    plan = make_plan(Profile.load("h200_inductor"), outline, Workload())
    # Normed rows; packed projection, queries, keys, result and the kernel's sums of exponentials; both halves.
    row = 2 * 5376 + 2 * 6 * 7168 + 4 * 56 + 2 * 2 * 14336
    assert plan.graph("block").activations == plan.rows.local * row


def test_rtx5090_holds_the_fp8_denoiser_and_swaps_the_rest_in_sequence(outline: Outline) -> None:
    plan = make_plan(Profile.load("rtx5090"), outline, Workload())
    denoiser = sum(g.weights for g in plan.graphs if g.component == "denoiser")
    assert all(stage.weights == denoiser for stage in plan.stages)
    assert denoiser == pytest.approx(19.3e9, rel=0.005)
    assert plan.stage("encode").slots
    assert plan.stage("decode_video").slots == plan.graph("video_decoder_tile").weights
    assert plan.rows.chunk == 16_384 < plan.rows.local
    assert plan.graph("block.finish").runs == 5 * plan.graph("block.attend").runs


def test_rtx5090_says_by_how_much_15_seconds_do_not_fit(outline: Outline) -> None:
    with pytest.raises(PlanError, match=r"denoise needs 37\.\d+ GB of 34\.19 GB on one GPU, 2\.\d+ GB too much") as why:
        make_plan(Profile.load("rtx5090"), outline, Workload(seconds=15))
    assert "would fit: residency.denoiser = 40" in str(why.value)
    assert "would fit: at most 12.25 s" in str(why.value)


def test_rtxpro6000_does_not_fit_without_swapping_and_says_by_how_much(outline: Outline) -> None:
    with pytest.raises(PlanError, match=r"of 102\.64 GB on one GPU, \d+\.\d+ GB too much") as why:
        make_plan(_resident(Profile.load("rtxpro6000")), outline, Workload())
    assert "weights 128" in str(why.value)


def test_b300_holds_both_partitions(outline: Outline) -> None:
    profile = Profile.load("b300")
    plan = make_plan(profile, outline, Workload(seconds=15))
    assert profile.partitions == ("fl2va", "ref2va")
    one = draft(profile.model_copy(update={"partitions": ("fl2va",)}), MODEL, Workload(seconds=15))
    # The second one's transformer less its 64 bytes of rotary frequencies, which are computed.
    assert plan.peak - one.peak == 66_280_430_144 - 64


def test_h200_runs_in_bfloat16_with_the_encoder_resident(outline: Outline) -> None:
    profile = Profile.load("h200")
    plan = make_plan(profile, outline, Workload(seconds=15))
    assert profile.precision.denoiser == "bfloat16"
    assert _residency(profile).text_encoder == "resident"
    assert plan.peak < plan.limit
    with pytest.raises(PlanError, match="would fit: row_chunk = "):
        make_plan(profile.model_copy(update={"row_chunk": 0}), outline, Workload(seconds=15))


@pytest.mark.parametrize("row_chunk", [0, 16_384])
def test_further_tiers_cost_working_memory_and_no_weights(row_chunk: int) -> None:
    tiers = Profile.load("h200_inductor_fp8").model_copy(update={"row_chunk": row_chunk})
    alone, all_four = (draft(p, MODEL, Workload()) for p in (tiers.model_copy(update={"quality": {}}), tiers))
    assert all_four.stage("denoise").weights == alone.stage("denoise").weights
    assert all_four.sidecar == alone.sidecar
    assert all_four.flops == alone.flops
    # The copies that skipping attention works on: queries, keys and values in bfloat16.
    copies = all_four.rows.total * 2 * 3 * OUTLINE.dimensions.denoiser.inner
    grown = all_four.stage("denoise").peak - alone.stage("denoise").peak
    assert grown <= copies + 1
    if not row_chunk:
        assert grown >= copies - 1
    assert {g.graph for g in all_four.graphs} - {g.graph for g in alone.graphs} == {
        f"block{'.attend' if row_chunk else ''}.{kind}" for kind in ("skip", "sage+skip")
    }
    assert [tier.name for tier in all_four.tiers] == ["fp8", "fp8+sage", "fp8+skip", "fp8+sage+skip"]


def test_each_card_of_a_ulysses_pair_holds_the_whole_denoiser(outline: Outline) -> None:
    alone, pair = (Profile.load(name) for name in ("rtx5090", "rtx5090x2"))
    pair = pair.model_copy(update={"residency": _residency(alone)})
    one, two = (draft(profile, MODEL, Workload()) for profile in (alone, pair))
    assert one.stage("denoise").weights == two.stage("denoise").weights
    # A card's rows are a multiple of 64.
    assert one.rows.total / 2 <= two.rows.local < one.rows.total / 2 + 64
    attending = [plan.graph("block.attend").activations / plan.rows.local for plan in (one, two)]
    assert attending[0] == attending[1]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"ulysses": 3}, r"ranks\.ulysses = 3: must divide the 56 attention heads; nearest legal: 2"),
        ({"text_encoder": 3}, r"ranks\.text_encoder = 3: must divide the 8 key and value heads; nearest legal: 2"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(outline: Outline, ranks: dict[str, int], message: str) -> None:
    wrong = Ranks.model_validate({"ulysses": 1, "text_encoder": 1, "video_tiles": 1} | ranks)
    with pytest.raises(PlanError, match=message):
        make_plan(Profile.load("b300").model_copy(update={"ranks": wrong}), outline, Workload())


def test_sizes_beyond_the_engines_are_refused(outline: Outline) -> None:
    with pytest.raises(PlanError, match=r"the request has 33,000 text_rows; its engines take at most 32,768"):
        make_plan(Profile.load("b300"), outline, Workload(text_rows=33_000))
    with pytest.raises(PlanError, match=r"seconds = 16: must be from 4 to 15"):
        make_plan(Profile.load("b300"), outline, Workload(seconds=16))


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(sorted(EXPECTED - {"cpu"})),
    seconds=st.tuples(st.floats(4, 15), st.floats(4, 15)).map(sorted),
)
def test_the_peak_grows_with_the_duration(name: str, seconds: list[float]) -> None:
    short, long = (draft(Profile.load(name), MODEL, Workload(seconds=s)) for s in seconds)
    assert short.peak <= long.peak


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(["rtx4090", "rtx5090", "h200"]), blocks=st.tuples(st.integers(0, 48), st.integers(0, 48)))
def test_the_peak_grows_with_the_resident_blocks(name: str, blocks: tuple[int, int]) -> None:
    profile = Profile.load(name)
    places = _residency(profile).model_dump()
    few, many = (
        draft(profile.model_copy(update={"residency": Residency(**places | {"denoiser": n})}), MODEL, Workload())
        for n in sorted(blocks)
    )
    assert few.peak <= many.peak


@settings(max_examples=8, deadline=None)
@given(
    name=st.sampled_from(["rtx4090", "rtx5090", "rtx5090x2", "rtxpro6000", "h200"]),
    seconds=st.sampled_from([5, 10, 15]),
    chunk=st.sampled_from([0, 8192, 65536]),
    precision=st.sampled_from(["bfloat16", "fp8"]),
)
def test_what_a_refusal_suggests_does_fit(name: str, seconds: int, chunk: int, precision: str) -> None:
    profile = _resident(Profile.load(name)).model_copy(update={"row_chunk": chunk})
    arithmetic = profile.precision.model_copy(update={"denoiser": precision})
    profile, work = profile.model_copy(update={"precision": arithmetic}), Workload(seconds=seconds)
    plan = draft(profile, MODEL, work)
    if plan.peak <= plan.limit:
        assert make_plan(profile, OUTLINE, work) == plan
        return
    with pytest.raises(PlanError) as why:
        make_plan(profile, OUTLINE, work)
    over = re.search(r", (\d+\.\d+) GB too much", str(why.value))
    assert over is not None
    assert float(over[1]) == pytest.approx((plan.peak - plan.limit) / 1e9, abs=0.01)
    found = list(suggestions(plan, profile, MODEL, draft))
    assert found
    for change in found:
        assert f"would fit: {change.words}" in str(why.value)
        made = make_plan(change.profile, OUTLINE, change.workload)
        assert made.peak <= made.limit
