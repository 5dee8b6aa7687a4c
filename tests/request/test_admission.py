"""What memory admission lets in, and what it says fits instead."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.profile import Attention, Precision, Profile
from engines.store import AxisRecord, EngineRecord, Manifest, TensorRecord
from plugins.shape import Shape, legal_frames
from runtime.admission import MARGIN, Estimate, Load, MemoryModel, canvases_like
from runtime.condition_memory import EncoderSizes
from runtime.media.facts import Facts
from runtime.request import Limits, RequestError, Resolved, resolve
from tests.request.media_vectors import IMAGE, SOUND, SOUND_VIDEO, resolve_with
from tests.request.sizes import MINIATURE, RELEASED

GIB = 1 << 30
FRAMES = legal_frames(MINIATURE.video_vae)


def _model(budget: int, rows: int = 262_144) -> MemoryModel:
    return MemoryModel(MINIATURE, budget, rows, tile_features=512)


def _load(width: int, height: int, frames: int, text_rows: int = 100) -> Load:
    return Load(Shape.of(width, height, frames, MINIATURE), text_rows)


def _request(**params: object) -> Resolved:
    return resolve("a cat", {"aspect_ratio": "1:1", "num_inference_steps": 4, **params}, MINIATURE)


_SIDES = st.tuples(st.integers(8, 60), st.integers(8, 60)).filter(lambda s: max(s) <= 4 * min(s))
_LOADS = st.builds(
    lambda sides, frames, text: _load(32 * sides[0], 32 * sides[1], frames, text),
    _SIDES,
    st.sampled_from(FRAMES),
    st.integers(1, 2000),
)


@settings(deadline=None)
@given(_LOADS, st.sampled_from(["width", "height", "frames", "text_rows"]))
def test_more_of_anything_needs_no_less_memory(load: Load, what: str) -> None:
    shape = load.shape
    larger = {
        "width": load.resized(shape.width + 32, shape.height, shape.frames, MINIATURE),
        "height": load.resized(shape.width, shape.height + 32, shape.frames, MINIATURE),
        "frames": load.resized(shape.width, shape.height, shape.frames + 17, MINIATURE),
        "text_rows": dataclasses.replace(load, text_rows=load.text_rows + 1),
    }[what]
    before, after = _model(GIB).estimate(load), _model(GIB).estimate(larger)
    assert after.peak >= before.peak
    assert dataclasses.astuple(after) > dataclasses.astuple(before)


def test_the_table_cache_is_bounded_by_its_share_of_the_budget_and_by_what_is_worth_keeping() -> None:
    small, large = _model(1 << 20), _model(64 * GIB)
    assert small.modulation_cache == (1 << 20) // 8
    # 256 steps of 4 slots in float32, each a table for every block and the head's.
    sizes = MINIATURE.denoiser
    assert large.modulation_cache == 256 * 4 * 4 * (sizes.layers * sizes.adaln_features + 2 * sizes.hidden)


def test_the_demo_fits_two_gibibytes() -> None:
    assert _model(2 * GIB).admit(_request(size="256x256", duration=4), text_rows=500).peak <= 2 * GIB


def test_the_demo_fits_768_square_on_twelve_gibibytes() -> None:
    _model(12 * GIB).admit(_request(size="768x768", duration=4), text_rows=500)


def test_the_model_of_a_store_takes_its_limits_from_the_manifest() -> None:
    weights = [(512, 64), (3072, 128), (128,), (24, 24, 1, 1, 1)]
    tile = EngineRecord.model_construct(
        weights=tuple(TensorRecord(name=str(shape), dtype="float32", shape=shape) for shape in weights)
    )
    axes = {"rows": 5000, "text_rows": 600, "video_rows": 700, "audio_rows": 800, "vision_rows": 900}
    rows = EngineRecord.model_construct(
        axes={name: AxisRecord(minimum=1, maximum=most, multiple=1) for name, most in axes.items()}
    )
    encoders = {
        name: EngineRecord.model_construct(
            weights=(
                TensorRecord(name="first", dtype="float32", shape=first),
                TensorRecord(name="second", dtype="float32", shape=(256, *second)),
            )
        )
        for name, first, second in (
            ("video_encoder_tile", (96, 3, 3, 3, 3), (96, 3, 3, 3)),
            ("audio_encoder", (40, 1, 7), (40, 4)),
        )
    }
    profile = Profile(
        name="p",
        backend="onnxruntime",
        precision=Precision(text_encoder="float32", denoiser="float32", video_decoder="float32"),
        attention=Attention(blocks="dense", refiner="dense"),
        weights="bound",
        partitions=("fl2va",),
        threads=1,
        memory="1 GiB",
        row_chunk=512,
    )
    manifest = Manifest.model_construct(
        profile=profile,
        dimensions=MINIATURE,
        graphs={
            "video_decoder_tile": tile,
            **dict.fromkeys(
                ("prologue", "block.attend", "text_encoder.embedding", "text_encoder.layer", "vision_encoder.block"),
                rows,
            ),
            **encoders,
        },
    )
    del axes["rows"]
    assert MemoryModel.of(manifest) == MemoryModel(
        MINIATURE,
        GIB,
        5000,
        tile_features=3072,
        row_chunk=512,
        encoders=EncoderSizes(96, 40),
        axes=axes,
        scores={"lossless": 0},
    )


def _references(*media: Facts, **params: object) -> Resolved:
    given = {"task": "ref2va", "size": "256x256", "duration": 4, "reference_short_edge": 512, **params}
    return resolve_with("a cat", given, media, MINIATURE)


def test_every_reference_needs_memory_and_rows() -> None:
    model = _model(64 * GIB)
    alone = model.admit(_request(size="256x256", duration=4), text_rows=100)
    image, video, sound = (
        model.admit(_references(*media), text_rows=100)
        for media in ([IMAGE], [IMAGE, SOUND_VIDEO], [IMAGE, SOUND_VIDEO, SOUND])
    )
    assert alone.encode < image.encode < video.encode <= sound.encode
    assert alone.denoise < image.denoise < video.denoise < sound.denoise
    assert alone.held < image.held < video.held < sound.held
    assert alone.decode == sound.decode


def test_a_tier_whose_attention_holds_all_scores_is_refused_with_those_that_do_not() -> None:
    limits = Limits(tiers=Profile.load("cpu").tiers)
    scores = {"lossless": 0.0, "sage": 5.4, "skip": 4.2, "sage+skip": 5.4}

    def admit(width: int, tier: str) -> Estimate:
        params = {"aspect_ratio": "1:1", "width": width, "height": width, "duration": 4, "quality": tier}
        return dataclasses.replace(_model(3 * GIB), scores=scores).admit(
            resolve("a cat", params, MINIATURE, limits), text_rows=100
        )

    dense, skip = (admit(256, tier) for tier in ("lossless", "skip"))
    # Measured at 2,419 rows, about as many as these: 729 MiB more than dense attention.
    assert 729 << 20 < skip.denoise - dense.denoise < 1.5 * (729 << 20)
    with pytest.raises(RequestError) as caught:
        admit(512, "sage")
    assert (caught.value.field, caught.value.value, caught.value.nearest) == ("quality", "sage", ("lossless",))
    assert "GiB of memory" in caught.value.rule
    admit(512, "lossless")


@pytest.mark.parametrize(
    ("axis", "most", "name"),
    [
        ("vision_rows", 1000, "patches in one picture"),
        ("video_rows", 2200, "rows of pictures"),
        ("text_rows", 400, "rows of text and pictures"),
    ],
)
def test_images_beyond_what_the_engines_were_built_for_are_refused_with_the_edge_that_fits(
    axis: str, most: int, name: str
) -> None:
    model, resolved = dataclasses.replace(_model(GIB), axes={axis: most}), _references(IMAGE)

    def text_rows(one: Resolved) -> int:
        return 100 + math.prod(one.references[0].vision_grid) // 4

    with pytest.raises(RequestError) as caught:
        model.admit(resolved, text_rows(resolved))
    assert caught.value.field == "reference_short_edge"
    assert name in caught.value.rule
    edge = caught.value.nearest
    assert isinstance(edge, int)
    largest, next_larger = (_references(IMAGE, reference_short_edge=one) for one in (edge, edge + 32))
    model.admit(largest, text_rows(largest))
    with pytest.raises(RequestError):
        model.admit(next_larger, text_rows(next_larger))


def test_sounds_beyond_what_the_engines_were_built_for_are_refused() -> None:
    model = dataclasses.replace(_model(GIB), axes={"audio_rows": 400})
    model.admit(_references(IMAGE), text_rows=100)
    with pytest.raises(RequestError, match="rows of sound; the engines were built for at most 400"):
        model.admit(_references(IMAGE, SOUND), text_rows=100)


def test_low_rank_sides_take_one_product_more() -> None:
    model, load = _model(GIB), _load(256, 512, 107)
    more = dataclasses.replace(model, sides=True).estimate(load).denoise - model.estimate(load).denoise
    # The miniature is widest in attention; in float32, with the margin of a quarter.
    assert more == pytest.approx(1.25 * 4 * load.rows * MINIATURE.denoiser.inner, abs=2)


def test_the_denoiser_is_linear_in_rows() -> None:
    model = _model(GIB)
    small, double, triple = (model.estimate(_load(256, height, 107, text_rows=1)).denoise for height in (256, 512, 768))
    assert triple - double == pytest.approx(double - small, abs=2)


def test_chunks_of_rows_take_the_feed_forward_of_one_chunk() -> None:
    whole, chunked = _model(GIB), dataclasses.replace(_model(GIB), row_chunk=512)
    small, large = _load(256, 256, 107, text_rows=1), _load(256, 768, 107, text_rows=1)
    size, rows = MINIATURE.denoiser, large.rows - small.rows
    grown = chunked.estimate(large).denoise - chunked.estimate(small).denoise
    # Per row and in float32: three hidden rows, nine of attention, the latents; with the margin of a quarter.
    row = 3 * size.hidden + 9 * size.inner + 4 * (size.video_row + size.audio_channels)
    assert grown == pytest.approx(1.25 * 4 * rows * row, abs=2)
    assert grown < whole.estimate(large).denoise - whole.estimate(small).denoise


def test_ranks_hold_their_own_rows_and_what_they_exchange() -> None:
    size = MINIATURE.denoiser
    grown = {}
    for ranks in (1, 2, 4):
        model = dataclasses.replace(_model(GIB), ranks=ranks)
        small, large = _load(256, 256, 107, text_rows=1), _load(256, 768, 107, text_rows=1)
        assert not (large.rows - small.rows) % 4
        grown[ranks] = model.estimate(large).denoise - model.estimate(small).denoise
    rows, latents = large.rows - small.rows, 4 * (size.video_row + size.audio_channels)
    # In float32, with the margin of a quarter. The state is on every rank.
    row = 3 * size.hidden + 18 * size.inner
    assert grown[2] == pytest.approx(1.25 * 4 * rows * (row / 2 + latents), abs=4000)
    assert grown[4] == pytest.approx(1.25 * 4 * rows * (row / 4 + latents), abs=4000)
    assert grown[4] < grown[2] < grown[1]


def test_ranks_share_the_heads_whose_scores_attention_holds() -> None:
    load = dataclasses.replace(_load(256, 512, 107), scores=5.4)
    more = []
    for ranks in (1, 2):
        model = dataclasses.replace(_model(GIB), ranks=ranks)
        more.append(model.estimate(load).denoise - model.estimate(dataclasses.replace(load, scores=0)).denoise)
    assert more[0] == pytest.approx(2 * more[1], rel=1e-6)


@settings(deadline=None)
@given(_LOADS, st.integers(700, 6000))
def test_what_is_said_to_fit_fits_and_the_next_larger_does_not(load: Load, mebibytes: int) -> None:
    model = _model(mebibytes << 20)
    shape = load.shape
    canvases = sorted(canvases_like(shape.width, shape.height), key=math.prod)
    _check_largest(
        model, [load.resized(*sides, shape.frames, MINIATURE) for sides in canvases], model.largest_canvas(load)
    )
    lengths = [load.resized(shape.width, shape.height, frames, MINIATURE) for frames in FRAMES]
    _check_largest(model, lengths, model.longest(load))


def _check_largest(model: MemoryModel, ascending: list[Load], found: Load | None) -> None:
    fits = [model.estimate(one).peak <= model.budget and one.rows <= model.rows_maximum for one in ascending]
    if found is None:
        assert not any(fits)
        return
    index = ascending.index(found)
    assert fits[index]
    assert not any(fits[index + 1 :])


def test_a_refusal_names_the_need_the_budget_and_what_is_then_admitted() -> None:
    model = _model(3 * GIB)
    with pytest.raises(RequestError) as caught:
        model.admit(_request(size="1024x1024", duration=15), text_rows=100)
    error = caught.value
    assert error.field == "size"
    assert "1024x1024 for 15 s" in str(error)
    assert "this server has 3.00 GiB" in str(error)
    assert isinstance(error.nearest, tuple)
    assert len(error.nearest) == 2
    for option in error.nearest:
        size, _, seconds, _ = option.split()
        model.admit(_request(size=size, duration=float(seconds)), text_rows=100)


def test_each_length_is_named_by_seconds_that_give_it_back() -> None:
    # Rows are the limit here, one length after another.
    for frames in FRAMES[:-1]:
        model = _model(64 * GIB, rows=_load(512, 512, frames).rows)
        with pytest.raises(RequestError, match="the engines were built for at most") as caught:
            model.admit(_request(size="512x512", duration=15), text_rows=100)
        assert isinstance(caught.value.nearest, tuple)
        size, _, seconds, _ = caught.value.nearest[-1].split()
        assert size == "512x512"
        assert _request(size=size, duration=float(seconds)).frames == frames


def test_a_prompt_that_alone_is_too_large_is_named() -> None:
    model, request = _model(2 * GIB), _request(size="256x256", duration=4)
    with pytest.raises(RequestError, match="prompt: got '8000 tokens'; encoding needs about") as caught:
        model.admit(request, text_rows=8000)
    most = int(str(caught.value.nearest).split()[0])
    model.admit(request, text_rows=most)
    with pytest.raises(RequestError, match="prompt"):
        model.admit(request, text_rows=most + 1)


def test_nothing_is_named_when_nothing_fits() -> None:
    with pytest.raises(RequestError, match="no canvas fits") as caught:
        _model(GIB // 2).admit(_request(size="256x256", duration=4), text_rows=10)
    assert caught.value.nearest is None


@settings(deadline=None, max_examples=30)
@given(_SIDES)
def test_canvases_of_a_shape_are_legal_and_keep_its_orientation(sides: tuple[int, int]) -> None:
    for width, height in canvases_like(32 * sides[0], 32 * sides[1]):
        assert resolve("a cat", {"aspect_ratio": "1:1", "width": width, "height": height}, RELEASED).width == width
        assert (width >= height) == (sides[0] >= sides[1]) or width == height


def test_the_first_of_the_ranks_that_share_tiles_holds_those_of_the_others() -> None:
    model, request = _model(64 * GIB), _request(size="256x256", duration=4)
    alone, shared = (dataclasses.replace(model, tile_ranks=ranks).admit(request, text_rows=100) for ranks in (1, 2))
    # Four of each rank, 22 frames of 256 x 256 pixels.
    assert shared.decode - alone.decode == pytest.approx(MARGIN * 2 * 4 * 22 * 3 * 256 * 256 * 4, abs=2)
