"""Tiers of quality: what a server offers, what is refused, and what a tier means for each forward of a request."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.profile import Profile
from engines.quality import LOSSLESS, TIERS, Tier, further_engines, served_by
from plugins.block_attention import ATTENTIONS
from plugins.kernels.hopper_attention import SAGE
from plugins.schedule import Schedule
from runtime.quality import dense_forwards, quality, sigmas
from runtime.refusal import RequestError
from runtime.request import Limits, Resolved, resolve, restore
from tests.request.sizes import RELEASED

GATES = (1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.90, 0.86, 0.80)
DENSE = {49: (0, 6, 10, 14, 17, 19, 28, 33, 37), 50: (0, 6, 10, 14, 17, 20, 29, 34, 38)}
"""How many forwards vllm-omni's gate keeps dense at shift 12, by the number of forwards (spec: contract 4.3)."""

FASTH3 = tuple(map(Fraction, ("0.99992", "0.97283", "0.92308", "0.8")))

SKIP = Tier(linears="bfloat16", attention="skip", skip_threshold=0.05, skip_below=0.97)
SAGE_SKIP = SKIP.model_copy(update={"attention": "sage+skip"})
OFFERED = (Tier(linears="bfloat16", attention="dense"), Tier(linears="bfloat16", attention="sage"), SKIP, SAGE_SKIP)
LIMITS = Limits(tiers=OFFERED)
SMALLEST = {"aspect_ratio": "1:1", "width": 256, "height": 256, "duration": 4}


def take(limits: Limits = LIMITS, **params: Any) -> Resolved:
    return resolve("a cat", {**SMALLEST, **params}, RELEASED, limits)


@pytest.mark.parametrize("forwards", DENSE)
def test_the_gate_keeps_dense_what_the_published_table_says(forwards: int) -> None:
    found = [dense_forwards(sigmas(forwards, 12.0), gate) for gate in GATES]
    assert tuple(found) == DENSE[forwards]


def test_the_gate_of_a_pinned_schedule() -> None:
    assert dense_forwards(FASTH3, 0.97) == 2


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 200), st.floats(1, 24), st.floats(0, 1))
def test_the_gate_is_that_of_the_sigmas_that_the_sampler_has(forwards: int, shift: float, gate: float) -> None:
    exact = sigmas(forwards, shift)
    sampled = Schedule.uniform(forwards, shift, 3.0).video.sigmas[:-1].tolist()
    # float32 may move a sigma across a gate that it lies on; none is moved by more than a few of its roundings.
    assert dense_forwards(exact, gate) in range(
        sum(sigma > gate + 1e-6 for sigma in sampled), sum(sigma > gate - 1e-6 for sigma in sampled) + 1
    )


def test_a_request_without_the_field_has_the_first_tier_and_says_what_that_is() -> None:
    found = json.loads(take().model_dump_json())["quality"]
    attending = [{"forwards": 49, "attention": "dense", "skip_threshold": 0.0}]
    assert found == {"tier": LOSSLESS, "linears": "bfloat16", "refiner": "dense", "attending": attending}


@pytest.mark.parametrize(
    ("tier", "attending"),
    [
        ("lossless", ("49 dense",)),
        ("sage", ("49 sage",)),
        ("skip", ("14 dense", "35 skip below 0.05")),
        ("sage+skip", ("14 sage", "35 sage+skip below 0.05")),
    ],
)
def test_the_answer_says_how_each_forward_attends(tier: str, attending: tuple[str, ...]) -> None:
    resolved = take(quality=tier)
    assert tuple(map(str, resolved.quality.attending)) == attending
    assert restore(resolved.model_dump_json(), RELEASED, LIMITS) == resolved
    each = [resolved.quality.forward(step) for step in range(resolved.forwards)]
    assert sum(one.skip_threshold > 0 for one in each) == (35 if tier.endswith("skip") else 0)


def test_the_gate_follows_the_request_s_own_schedule() -> None:
    assert [one.forwards for one in take(quality="skip", num_inference_steps=4).quality.attending] == [2, 2]
    assert [one.forwards for one in take(quality="skip", flow_shift=3.0).quality.attending] == [5, 44]
    # One forward, at sigma 1, is above every gate.
    assert [str(one) for one in take(quality="skip", num_inference_steps=1).quality.attending] == ["1 dense"]


@pytest.mark.parametrize("tier", [*sorted(set(TIERS) - {tier.name for tier in OFFERED}), "high"])
def test_a_tier_that_the_profile_does_not_have_is_refused_with_those_that_it_has(tier: str) -> None:
    with pytest.raises(RequestError) as caught:
        take(quality=tier)
    assert caught.value.to_dict()["field"] == "quality"
    assert str(caught.value).startswith(f"quality: got {tier!r}; not offered (")
    assert caught.value.nearest == ("lossless", "sage", "skip", "sage+skip")


def test_lossless_is_refused_where_nothing_is() -> None:
    limits = Limits(tiers=Profile.load("h200_inductor_fp8_sage").tiers)
    assert take(limits).quality.tier == "fp8+sage"
    with pytest.raises(RequestError, match=r"'lossless'; not offered .*; nearest legal: fp8\+sage"):
        take(limits, quality="lossless")


def test_a_tier_that_says_something_else_is_not_believed() -> None:
    text = take(quality="skip").model_dump_json()
    for change in ('"skip_threshold":0.05', '"skip_threshold":0.9'), ('"forwards":14', '"forwards":15'):
        assert change[0] in text
        with pytest.raises(RequestError, match=r"resolved\.quality: .*must agree with the rest of the request"):
            restore(text.replace(*change), RELEASED, LIMITS)


def test_no_request_is_too_short_for_quantised_attention() -> None:
    shortest = min(take(aspect_ratio="1:1", duration=duration).video_rows for duration in (4, 5, 15))
    assert shortest > 2 * SAGE.keys, "below a block of keys SAGE is dense, which the answer would have to say"


def test_one_engine_serves_an_attention_and_the_same_with_tiles_left_out() -> None:
    # Dense attention beside skipping has faster kernels of its own, unless skipping is what the profile is built on.
    assert further_engines("dense", ("sage", "skip", "sage+skip")) == ("skip", "sage+skip")
    assert further_engines("skip", ("dense",)) == ()
    assert further_engines("sage", ("dense", "skip", "sage+skip")) == ("dense", "skip", "sage+skip")
    assert served_by("sage", ("dense", "skip", "sage+skip")) == "sage+skip"
    assert served_by("dense", ("skip",)) == "skip"
    assert served_by("dense", ("dense", "skip")) == "dense"


@pytest.mark.parametrize("name", ["cpu", "h200_inductor_fp8", "h200_inductor_sage"])
def test_engines_of_a_shipped_profile_serve_every_forward_of_its_tiers(name: str) -> None:
    profile = Profile.load(name)
    built = profile.attention.blocks, *profile.further_attention
    for tier in profile.tiers:
        for one in quality(tier, 49, 12.0).attending:
            assert served_by(one.attention, built) in built
    assert set(built) <= set(ATTENTIONS)
