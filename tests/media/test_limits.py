"""Every limit, at it and one past it, with the text that says so."""

from __future__ import annotations

import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from runtime.media import limits
from runtime.media.facts import Facts, ImageFacts, SoundFacts, VideoFacts
from runtime.media.limits import LIMITS, check_bytes, check_rate, check_sides, check_start, check_together
from runtime.media.probe import probe
from runtime.refusal import RequestError
from tests.media.clips import saved

SOUND = SoundFacts(sample_rate=8000, channels=1, samples=40_000)


def clip(seconds: float, sound: float | None = None) -> VideoFacts:
    track = None if sound is None else SoundFacts(sample_rate=8000, channels=2, samples=round(sound * 8000))
    return VideoFacts(width=300, height=300, frames=round(seconds * 24), seconds=seconds, sound=track)


def refused(*facts: ImageFacts | VideoFacts | SoundFacts) -> str:
    with pytest.raises(RequestError) as caught:
        check_together(facts, [f"references[{index}]" for index in range(len(facts))])
    return str(caught.value)


def accepted(*facts: ImageFacts | VideoFacts | SoundFacts) -> None:
    check_together(facts, [f"references[{index}]" for index in range(len(facts))])


@pytest.mark.parametrize("kind", LIMITS)
def test_bytes_of_a_file(kind: str) -> None:
    maximum = {"image": 30, "video": 50, "audio": 15}[kind] * 1024 * 1024
    check_bytes(maximum, kind, "IMAGES[1]")
    with pytest.raises(RequestError, match=rf"IMAGES\[1\]: got '{maximum + 1} bytes'; .* at most {maximum >> 20} MiB"):
        check_bytes(maximum + 1, kind, "IMAGES[1]")


@pytest.mark.parametrize(
    ("size", "nearest"),
    [
        ((256, 256), None),
        ((5760, 2304), None),
        ((2304, 5760), None),
        ((255, 256), "256x256 px"),
        ((300, 255), "300x256 px"),
        ((5761, 2400), "5760x2400 px"),
        ((5760, 2303), "5757x2303 px"),
        ((2303, 5760), "2303x5757 px"),
    ],
)
def test_sides_and_ratio(size: tuple[int, int], nearest: str | None) -> None:
    if nearest is None:
        check_sides(*size, "image", "IMAGES[0]")
        return
    with pytest.raises(RequestError, match=f"got '{size[0]}x{size[1]} px'; .* nearest legal: {nearest}$"):
        check_sides(*size, "image", "IMAGES[0]")
    width, height = (int(side) for side in nearest.removesuffix(" px").split("x"))
    check_sides(width, height, "image", "IMAGES[0]")


def test_sides_of_a_file_are_those_of_its_header() -> None:
    assert probe(saved(Image.new("L", (640, 256)), "PNG"), "image", "IMAGES[0]") == ImageFacts(width=640, height=256)
    with pytest.raises(RequestError, match="641x256 px"):
        probe(saved(Image.new("L", (641, 256)), "PNG"), "image", "IMAGES[0]")


@pytest.mark.parametrize(
    ("rate", "legal"), [(23.976, True), (24000 / 1001, True), (60.0, True), (23.9, False), (60.1, False), (15, False)]
)
def test_frames_a_second(rate: float, legal: bool) -> None:
    if legal:
        check_rate(rate, "VIDEOS[0]")
        return
    nearest = "23.976" if rate < 30 else "60.0"
    with pytest.raises(RequestError, match=rf"VIDEOS\[0\]: got '{rate} frames a second'; .* legal: {nearest}"):
        check_rate(rate, "VIDEOS[0]")


def test_seconds_of_all_videos() -> None:
    accepted(clip(5), clip(5), clip(5))
    accepted(clip(7.5), clip(7.51))
    assert refused(clip(5), clip(5), clip(5.011)) == (
        "references[2]: got '15.011 s in all'; the videos of a request may last at most 15 s in all; "
        "nearest legal: at most 5.000 s here"
    )
    assert "leave this one out" in refused(clip(14), clip(2))


def test_a_start_may_leave_just_two_seconds() -> None:
    """4.1 - 2.1 is a little less than 2 in binary fractions."""
    check_start(2.1, 4.1, "references[0]")
    with pytest.raises(RequestError, match=r"nearest legal: 2\.1"):
        check_start(2.101, 4.1, "references[0]")


def test_seconds_of_all_sounds_and_of_all_soundtracks_are_apart() -> None:
    accepted(clip(10, 10), SoundFacts(sample_rate=8000, channels=1, samples=80_000))
    accepted(SOUND, clip(5), SOUND, SOUND)
    over = SoundFacts(sample_rate=8000, channels=1, samples=40_001)
    assert refused(SOUND, SOUND, clip(5), over).startswith("references[3]: got '15.000 s in all'; the sounds of")
    assert refused(clip(7, 7.6), clip(7, 7.6)).startswith("references[1]: got '15.200 s in all'; the soundtracks of")


def test_numbers_of_references() -> None:
    image = ImageFacts(width=300, height=300)
    accepted(*[image] * 9, clip(2), clip(2), clip(2))
    assert refused(*[image] * 10).startswith("references[9]: got '10 image references'; a request may have at most 9")
    assert refused(*[clip(2)] * 4).startswith("references[3]: got '4 video references'")
    assert refused(*[SOUND] * 4).startswith("references[3]: got '4 audio references'")
    assert refused(*[image] * 9, *[clip(2)] * 3, SOUND).startswith("references[12]: got '13 references'")


@pytest.mark.parametrize("facts", [ImageFacts(width=1, height=2), clip(2.5, 2.25), clip(3), SOUND])
def test_facts_survive_json_exactly(facts: Facts) -> None:
    adapter: TypeAdapter[Facts] = TypeAdapter(Facts)
    assert adapter.validate_json(facts.model_dump_json()) == facts


@pytest.mark.parametrize("change", [{"width": 0}, {"width": 3.0}, {"frames": -1}, {"seconds": float("nan")}, {"x": 1}])
def test_facts_that_no_file_has_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VideoFacts.model_validate(clip(3).model_dump() | change)


def test_the_table_for_people_has_a_cell_for_every_kind() -> None:
    table = limits.rows()
    assert {len(row) for row in table} == {4}
    assert ("Size at most", "30 MiB", "50 MiB", "15 MiB") in table
    assert ("Number at most", "9", "3", "3") in table
