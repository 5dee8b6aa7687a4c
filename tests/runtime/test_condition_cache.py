"""The cache of encoded prompts and references: what it keeps, what it forgets, what makes a key another one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from runtime.condition_cache import CacheCounts, ConditionCache, Entry, prompt_key, reference_key
from runtime.presentation import Presentation, VisionBlock
from runtime.request import Resolved
from tests.request.media_vectors import IMAGE, SOUND, SOUND_VIDEO, TALL, resolve_with
from tests.request.sizes import RELEASED

KILOBYTE = 256


def _entry(value: float, kilobytes: int = 1) -> Entry:
    return (torch.full((kilobytes * KILOBYTE,), float(value)),)


def _refuse() -> Entry:
    raise AssertionError("made again")


def test_what_is_there_is_not_made_again_and_is_the_same() -> None:
    cache = ConditionCache(4096)
    made = cache.get("a", lambda: _entry(1))
    assert torch.equal(cache.get("a", _refuse)[0], made[0])
    assert cache.counts == CacheCounts(hits=1, misses=1, bytes=1024, entries=1)


def test_the_least_recently_used_goes_first_and_the_bytes_never_exceed_the_capacity() -> None:
    cache = ConditionCache(3 * 1024)
    for key in "abc":
        cache.get(key, lambda: _entry(1))
    cache.get("a", _refuse)
    cache.get("d", lambda: _entry(1))
    assert cache.counts.bytes == 3 * 1024
    for key in "cad":
        cache.get(key, _refuse)
    assert cache.get("b", lambda: _entry(2))[0][0] == 2
    cache.get("large", lambda: _entry(1, kilobytes=3))
    assert cache.counts.bytes <= 3 * 1024
    assert cache.counts.entries == 1


def test_what_is_larger_than_the_cache_is_given_and_not_kept() -> None:
    cache = ConditionCache(1024)
    cache.get("a", lambda: _entry(1))
    assert len(cache.get("b", lambda: _entry(2, kilobytes=2))[0]) == 2 * KILOBYTE
    cache.get("a", _refuse)
    assert cache.counts == CacheCounts(hits=1, misses=2, bytes=1024, entries=1)


def test_switched_off_it_keeps_and_counts_nothing() -> None:
    cache = ConditionCache(0)
    assert [cache.get("a", lambda value=value: _entry(value))[0][0].item() for value in (1, 2)] == [1, 2]
    assert cache.counts == CacheCounts()


def test_a_failure_leaves_nothing_behind() -> None:
    cache = ConditionCache(4096)
    with pytest.raises(AssertionError, match="made again"):
        cache.get("a", _refuse)
    assert cache.get("a", lambda: _entry(1))[0][0] == 1
    assert cache.counts == CacheCounts(misses=2, bytes=1024, entries=1)


def test_threads_that_make_the_same_entry_leave_one_and_right_counts() -> None:
    cache, meeting = ConditionCache(8 * 1024), threading.Barrier(4)

    def make() -> Entry:
        meeting.wait(timeout=30)
        return _entry(1)

    threads = [threading.Thread(target=cache.get, args=("a", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.counts == CacheCounts(hits=0, misses=4, bytes=1024, entries=1)


def _keys(resolved: Resolved) -> list[str]:
    return [reference_key(resolved, place) for place in range(len(resolved.references))]


def _resolved(*media: Any, **params: Any) -> Resolved:
    return resolve_with("a cat", {"task": "ref2va", **params}, media, RELEASED)


def test_the_rest_of_the_request_does_not_change_the_key_of_a_reference() -> None:
    base = _keys(_resolved(IMAGE, SOUND))
    # Seed, steps and canvas are the clip's own; a longer clip cuts a sound of 2 s no later.
    for change in ({"seed": 1}, {"num_inference_steps": 7}, {"aspect_ratio": "1:1"}, {"duration": 15}):
        assert _keys(_resolved(IMAGE, SOUND, **change)) == base
    # In another place it is the same reference.
    assert _keys(_resolved(SOUND, IMAGE)) == base
    assert set(_keys(_resolved(IMAGE, IMAGE, SOUND))) > set(base)


def test_another_fit_another_file_and_another_start_are_other_keys() -> None:
    image, video = _keys(_resolved(IMAGE, SOUND_VIDEO))
    others = {
        *_keys(_resolved(IMAGE, SOUND_VIDEO, reference_short_edge=512))[:1],
        *_keys(_resolved(TALL, SOUND_VIDEO))[:1],
        *_keys(_resolved(IMAGE, SOUND_VIDEO, start_time_seconds=0.5))[1:],
        # As keyframes they are fitted to the canvas: the second cropped, or stretched.
        *_keys(resolve_with("a cat", {}, [IMAGE, IMAGE], RELEASED)),
        *_keys(resolve_with("a cat", {"keyframe_geometry": "vllm-omni"}, [IMAGE, IMAGE], RELEASED))[1:],
    }
    assert len(others) == 6
    assert not others & {image, video}


def _presented(tokens: list[int], references: list[int]) -> Presentation:
    ids = np.array(tokens, np.int64)
    blocks = tuple(VisionBlock(place, row, 1, (1, 2, 2), (0,)) for row, place in enumerate(references))
    return Presentation(ids, np.ones_like(ids), blocks)


def test_the_key_of_a_prompt_is_its_tokens_and_the_pictures_that_it_shows() -> None:
    resolved = _resolved(IMAGE, SOUND)
    base = prompt_key(resolved, _presented([1, 2, 3], [0]))
    assert prompt_key(_resolved(IMAGE, SOUND, seed=9), _presented([1, 2, 3], [0])) == base
    assert prompt_key(resolved, _presented([1, 2, 4], [0])) != base
    assert prompt_key(resolved, _presented([1, 2, 3], [])) != base
    assert prompt_key(_resolved(TALL, SOUND), _presented([1, 2, 3], [0])) != base
    # The text encoder does not hear sounds.
    louder = SOUND.model_copy(update={"samples": 96_000})
    assert prompt_key(_resolved(IMAGE, louder), _presented([1, 2, 3], [0])) == base
