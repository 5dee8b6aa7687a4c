"""Sounds: what files decode to, and resampling against the closed form in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.media.facts import SoundFacts
from runtime.media.probe import probe
from runtime.media.resample import resample
from runtime.media.sound import decode_sound
from runtime.refusal import RequestError
from tests.media.clips import noise, sound, wav

WHERE = "AUDIOS[0]"


def facts_of(data: bytes) -> SoundFacts:
    facts = probe(data, "audio", WHERE)
    assert isinstance(facts, SoundFacts)
    return facts


def closed_form(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """y(t) = sum over the window of x[i] * h(t - i / rate), h a Hann-windowed sinc, all in float64."""
    cutoff = min(rate, target) * 0.99
    out = np.zeros(math.ceil(len(samples) * target / rate))
    positions = np.arange(len(samples)) / rate
    for index in range(len(out)):
        time = np.clip((positions - index / target) * cutoff, -6, 6)
        out[index] = (samples * np.sinc(time) * np.cos(time * np.pi / 12) ** 2).sum() * cutoff / rate
    return out


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 22_050, 44_100, 48_000, 44_101, 96_000, 192_000])
def test_resampling_is_the_windowed_sinc(rate: int) -> None:
    samples = noise(0.02, rate, 1)
    found = resample(torch.from_numpy(samples), rate, 32_000)[0].numpy()
    expected = closed_form(samples[0].astype(np.float64), rate, 32_000)
    # A phase rounded to float32, as torchaudio has it, moves a tap by up to 6e-8 of the reduced lower rate (at most
    # 32,000 for 44,101 Hz, 320 for usual rates); the slope of a tap is at most about 1.5 a crossing.
    reduced = min(rate, 32_000) // math.gcd(rate, 32_000)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-6 + 1e-7 * reduced


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_resampling_is_torchaudios(rate: int) -> None:
    """Where it can be loaded, which its wheels cannot beside a CPU build of torch."""
    try:
        from torchaudio.transforms import Resample
    except (ImportError, OSError) as error:
        pytest.skip(f"torchaudio: {error}")
    samples = torch.from_numpy(noise(0.5, rate, 2))
    # The order of summation is another: some float32 ulps of sums of about thirty products below one.
    torch.testing.assert_close(resample(samples, rate, 32_000), Resample(rate, 32_000)(samples), atol=2e-6, rtol=0)


@given(rate=st.integers(8000, 192_000), samples=st.integers(1, 3000))
@settings(max_examples=8, deadline=None)
def test_any_rate_gives_the_length_that_the_rates_ask_for(rate: int, samples: int) -> None:
    assert resample(torch.ones(2, samples), rate, 32_000).shape == (2, math.ceil(samples * 32_000 / rate))


@pytest.mark.parametrize("channels", [1, 2])
def test_a_wav_at_the_models_rate_comes_through_sample_by_sample(channels: int) -> None:
    samples = noise(2.5, 32_000, channels)
    data = wav(samples, 32_000)
    assert facts_of(data) == SoundFacts(sample_rate=32_000, channels=channels, samples=80_000)
    expected = np.broadcast_to((samples * 32_767).astype(np.int16) / np.float32(32_768), (2, 80_000))
    np.testing.assert_array_equal(decode_sound(data, WHERE, 0.0, 15.0).numpy(), expected)


@pytest.mark.parametrize(
    "codec", ["pcm_u8", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw"]
)
def test_every_pcm_is_read(codec: str) -> None:
    samples = noise(2.5, 32_000, 2)
    found = decode_sound(sound(samples, 32_000, codec, "wav"), WHERE, 0.0, 15.0).numpy()
    # Eight bits, linear or logarithmic, are the coarsest: half a step of the loudest segment.
    np.testing.assert_allclose(found, samples, atol=0.02)


@pytest.mark.parametrize("rate", [22_050, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_an_mp3_has_the_samples_that_its_facts_promise(channels: int, rate: int) -> None:
    data = sound(noise(3, rate, channels), rate, "libmp3lame", "mp3")
    facts = facts_of(data)
    assert (facts.sample_rate, facts.channels) == (rate, channels)
    # The file says how much of its first and last frame is padding.
    assert facts.samples == 3 * rate
    assert decode_sound(data, WHERE, 0.0, 15.0).shape == (2, 96_000)


def test_tags_around_an_mp3_change_nothing() -> None:
    data = sound(noise(3, 44_100, 1), 44_100, "libmp3lame", "mp3")
    picture = b"APIC" + (5000).to_bytes(4, "big") + bytes(5002)
    tag = b"ID3\x03\0\0" + bytes((0, 0, len(picture) >> 7, len(picture) & 0x7F)) + picture
    assert facts_of(tag + data) == facts_of(data)


def test_chunks_around_the_samples_of_a_wav_change_nothing() -> None:
    data = wav(noise(3, 8000, 1), 8000)
    listed = data[:36] + b"LIST" + (7).to_bytes(4, "little") + bytes(8) + data[36:]
    assert facts_of(listed) == facts_of(data)


def test_a_streamed_wav_without_a_length_goes_on_to_its_end() -> None:
    data = wav(noise(3, 8000, 1), 8000)
    assert facts_of(data[:40] + b"\xff\xff\xff\xff" + data[44:]).samples == 24_000


def test_a_sound_is_cut_at_whole_samples_of_its_own_rate() -> None:
    data = wav(noise(3, 44_100, 1), 44_100)
    assert decode_sound(data, WHERE, 0.0, 2.00001).shape[1] == math.ceil(88_200 * 320 / 441)


@pytest.mark.parametrize(("samples", "legal"), [(15_999, False), (16_000, True), (120_000, True), (120_001, False)])
def test_the_time_of_a_sound_at_its_limits(samples: int, legal: bool) -> None:
    data = wav(np.zeros((1, samples), np.float32), 8000)
    if legal:
        assert facts_of(data).samples == samples
    else:
        with pytest.raises(
            RequestError, match=r"AUDIOS\[0\].*a sound must last from 2 to 15 s; nearest legal: (2|15) s"
        ):
            probe(data, "audio", WHERE)


def test_a_sound_has_no_start_time() -> None:
    with pytest.raises(RequestError, match="only videos have a start_time_seconds"):
        probe(wav(noise(3, 8000, 1), 8000), "audio", WHERE, 0.5)
