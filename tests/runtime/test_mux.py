"""The MP4 that the writer makes, taken apart again by PyAV and by an own look at its boxes."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from runtime.mux import MediaOptions, Mp4Writer, MuxError
from runtime.probe import inspect_mp4

RATE = 32_000
OPTIONS = MediaOptions(crf=18, preset="veryfast", audio_bitrate=128_000)


def picture(frames, height=64, width=96, seed=0):
    """Smooth moving colours, so that H.264 can predict and B-frames occur."""
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(3, generator=generator) * 6
    t, y, x = (
        torch.arange(n).view(shape)
        for n, shape in ((frames, (-1, 1, 1, 1)), (height, (1, -1, 1, 1)), (width, (1, 1, -1, 1)))
    )
    return (127.5 + 127.5 * torch.sin(0.05 * x + 0.07 * y + 0.2 * t + phase)).to(torch.uint8)


def tones(samples):
    time = torch.arange(samples) / RATE
    return torch.stack([0.5 * torch.sin(2 * torch.pi * 440 * time), 0.25 * torch.sin(2 * torch.pi * 1000 * time)])


def samples_for(frames):
    return round(frames / 24 * 40) * 800


def write(frames=107, options=None, chunk=17, audio_first=False, height=64, width=96, seed=0):
    pixels, waveform = picture(frames, height, width, seed), tones(samples_for(frames))
    with Mp4Writer(width, height, RATE, options or OPTIONS) as writer:
        if audio_first:
            writer.write_audio(waveform)
        for start in range(0, frames, chunk):
            writer.write_frames(pixels[start : start + chunk])
        if not audio_first:
            writer.write_audio(waveform)
        return writer.finish()


def packets_in_file_order(mp4):
    with av.open(io.BytesIO(mp4), "r") as container:
        packets = [packet for packet in container.demux() if packet.size]
        return sorted(
            ((packet.pos, packet.stream.type, Fraction(packet.dts) * packet.time_base) for packet in packets),
        )


@pytest.mark.parametrize("frames", [22, 107, 124, 243, 362])
def test_clip_keeps_every_promise(frames):
    report = inspect_mp4(write(frames))
    assert report.problems(96, 64, frames) == []
    assert report.boxes[:2] == ("ftyp", "moov")
    assert report.video.seconds == pytest.approx(frames / 24, abs=1e-9)
    # spec/contract.md 1.4: an audio latent is 1/40 s, so sound and picture end within half of that.
    assert abs(report.audio.seconds - frames / 24) <= 1 / 80 + 1e-9
    assert report.audio.seconds == pytest.approx(samples_for(frames) / RATE, abs=1e-9)


def test_decoded_sound_is_the_input_in_both_channels():
    waveform = tones(samples_for(107))
    with av.open(io.BytesIO(write(107)), "r") as container:
        decoded = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    # AAC at 192 kb/s on two pure tones: an error 30 dB below them; a swapped or shifted channel is as loud as they are.
    middle = slice(4096, 100_000)
    error = decoded[:, middle] - waveform.numpy()[:, middle]
    assert np.sqrt((error**2).mean()) < 0.01


def test_decoded_frames_are_the_input_in_order():
    pixels = picture(40)
    with av.open(io.BytesIO(write(40)), "r") as container:
        decoded = [
            frame.reformat(format="rgb24", src_colorspace="ITU709", dst_color_range="JPEG").to_ndarray()
            for frame in container.decode(video=0)
        ]
    error = np.stack(decoded).astype(float) - pixels.numpy()
    # crf 18 and 4:2:0 chroma leave some levels; the neighbouring frame would be tens of levels away.
    assert np.abs(error).mean(axis=(1, 2, 3)).max() < 4


@pytest.mark.parametrize(
    ("rgb", "yuv"),
    [
        # BT.709, limited range: Y = 16 + 219 (0.2126 R + 0.7152 G + 0.0722 B), Cb = 128 + 224 (B - Y') / 1.8556,
        # Cr = 128 + 224 (R - Y') / 1.5748. BT.601 red would be 81, 90, 240.
        ((255, 0, 0), (63, 102, 240)),
        ((0, 255, 0), (173, 42, 26)),
        ((0, 0, 255), (32, 240, 118)),
        ((255, 255, 255), (235, 128, 128)),
        ((0, 0, 0), (16, 128, 128)),
        ((128, 128, 128), (126, 128, 128)),
    ],
)
def test_colours_are_converted_and_tagged_as_bt709_limited(rgb, yuv):
    with Mp4Writer(64, 64, RATE, replace(OPTIONS, crf=1)) as writer:
        writer.write_frames(torch.tensor(rgb, dtype=torch.uint8).expand(3, 64, 64, 3))
        writer.write_audio(tones(4000))
        mp4 = writer.finish()
    with av.open(io.BytesIO(mp4), "r") as container:
        frame = next(container.decode(video=0))
    planes = [np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size) for plane in frame.planes]
    values = [float(plane[:, : plane.shape[1] // 2].mean()) for plane in planes]
    assert values == pytest.approx(yuv, abs=1)
    assert inspect_mp4(mp4).video.colour == {"primaries": 1, "transfer": 1, "matrix": 1, "range": 1}
    # ISO 14496-12 12.1.5: a player that does not parse the stream reads the same from the container.
    assert b"colrnclx" + bytes([0, 1, 0, 1, 0, 1, 0]) in mp4


def test_the_same_input_gives_the_same_bytes():
    first = write(60)
    assert write(60) == first
    assert write(60, chunk=5) == first
    assert write(60, audio_first=True) == first
    assert write(60, seed=1) != first


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_stated_thread_count_is_used_and_repeats_its_bytes(threads):
    options = replace(OPTIONS, threads=threads)
    mp4 = write(60, options, height=320, width=256)
    assert write(60, options, height=320, width=256) == mp4
    # x264 records its settings in the stream.
    assert f" threads={threads} ".encode() in mp4


def test_no_library_version_and_no_date_is_in_the_container():
    mp4 = write(22)
    assert b"Lavf" not in mp4
    assert b"Lavc" not in mp4
    with av.open(io.BytesIO(mp4), "r") as container:
        assert "creation_time" not in container.metadata
        assert "encoder" not in container.metadata


def test_tracks_are_interleaved_for_playback_while_loading():
    last = {"video": Fraction(0), "audio": Fraction(0)}
    # Longer than the ten seconds for which ffmpeg itself holds packets back to order them.
    for _, track, time in packets_in_file_order(write(362)):
        last[track] = time
        assert abs(last["video"] - last["audio"]) < Fraction(1, 4)


def test_the_movie_header_states_the_duration_exactly():
    mp4 = write(107)
    # ISO 14496-12 8.2.2, version 0: after the type 4 bytes of version, two dates, then timescale and duration.
    header = mp4[mp4.index(b"mvhd") + 4 :]
    created, changed, timescale, duration = (int.from_bytes(header[at : at + 4], "big") for at in (4, 8, 12, 16))
    assert (created, changed) == (0, 0)
    assert Fraction(duration, timescale) == Fraction(107, 24)


def test_index_in_front_is_byte_identical_with_the_files_that_ffmpeg_makes(tmp_path, monkeypatch):
    # ffmpeg's own faststart rereads a file from disk; the writer lets it reread memory instead.
    in_memory = write(30)
    path = tmp_path / "faststart.mp4"
    opened = av.open

    def on_disk(buffer, mode, **settings):
        del settings["io_open"]
        return opened(str(path), mode, **settings)

    monkeypatch.setattr("runtime.mux.av.open", on_disk)
    pixels, waveform = picture(30), tones(samples_for(30))
    with Mp4Writer(96, 64, RATE, OPTIONS) as writer:
        writer.write_frames(pixels)
        writer.write_audio(waveform)
        writer.finish()
    assert path.read_bytes() == in_memory


def test_options_reach_the_encoders():
    best, worst = (len(write(40, replace(OPTIONS, crf=crf), height=320, width=256)) for crf in (1, 45))
    assert best > 2 * worst
    low, high = (
        inspect_mp4(write(107, replace(OPTIONS, audio_bitrate=rate))).audio.bit_rate for rate in (64_000, 256_000)
    )
    assert low == pytest.approx(64_000, rel=0.15)
    assert high > 2 * low
    assert inspect_mp4(write(22, replace(OPTIONS, preset="ultrafast"))).video.profile == "Constrained Baseline"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"crf": 0}, "crf: 0 is outside 1..51; the nearest is 1"),
        ({"crf": 52}, "nearest is 51"),
        ({"threads": 0}, "threads: 0"),
        ({"audio_bitrate": 500_000}, "nearest is 384000"),
        ({"preset": "fastest"}, "preset: 'fastest' is not one of ultrafast"),
    ],
)
def test_options_out_of_range_are_refused_with_the_nearest(fields, message):
    with pytest.raises(MuxError, match=message):
        replace(OPTIONS, **fields)


@pytest.mark.parametrize("size", [(63, 64), (64, 63), (0, 64)])
def test_odd_sizes_are_refused(size):
    with pytest.raises(MuxError, match=f"{size[0]}x{size[1]}"):
        Mp4Writer(*size, RATE, OPTIONS)


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(1, 64, 96, 3),
        torch.zeros(1, 96, 64, 3, dtype=torch.uint8),
        torch.zeros(64, 96, 3, dtype=torch.uint8),
        torch.zeros(1, 64, 96, 4, dtype=torch.uint8),
    ],
)
def test_frames_of_another_type_or_shape_are_refused(frames):
    with Mp4Writer(96, 64, RATE, OPTIONS) as writer, pytest.raises(MuxError, match="frames"):
        writer.write_frames(frames)


@pytest.mark.parametrize(
    "waveform",
    [
        torch.zeros(2, 800, dtype=torch.float64),
        torch.zeros(1, 800),
        torch.zeros(800),
        torch.zeros(2, 0),
        torch.full((2, 800), float("nan")),
    ],
)
def test_sound_of_another_type_or_shape_is_refused(waveform):
    with Mp4Writer(96, 64, RATE, OPTIONS) as writer, pytest.raises(MuxError, match="audio"):
        writer.write_audio(waveform)


def test_incomplete_and_repeated_input_is_refused():
    with Mp4Writer(96, 64, RATE, OPTIONS) as writer:
        writer.write_frames(picture(5))
        with pytest.raises(MuxError, match="5 frames, 0 samples"):
            writer.finish()
        writer.write_audio(tones(8000))
        with pytest.raises(MuxError, match="already"):
            writer.write_audio(tones(8000))
        writer.finish()
        with pytest.raises(MuxError, match="closed"):
            writer.write_frames(picture(5))


def test_an_abandoned_clip_leaves_no_file_and_no_usable_writer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with contextlib.suppress(KeyboardInterrupt), Mp4Writer(96, 64, RATE, OPTIONS) as writer:
        writer.write_frames(picture(60))
        raise KeyboardInterrupt
    with pytest.raises(MuxError, match="closed"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []
