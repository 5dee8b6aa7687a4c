"""The MP4 that the writer makes, taken apart again by PyAV and by an own look at its boxes."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from runtime.contract import COLOURS
from runtime.mux import MediaOptions, Mp4Writer, MuxError
from runtime.probe import inspect_mp4
from tests.mp4.boxes import boxes, fragments, tracks
from tests.mp4.serial import RATE, planes_of, write_mp4, write_pieces

OPTIONS = MediaOptions(crf=18, preset="veryfast", audio_bitrate=128_000)


def picture(frames, height=128, width=96, seed=0):
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


def write(frames=107, options=OPTIONS, chunk=17, height=128, width=96, seed=0):
    return write_mp4(picture(frames, height, width, seed), tones(samples_for(frames)), options, chunk)


def means(frame):
    """Of Y, Cb and Cr."""
    planes = frame.to_ndarray(format="yuv420p")
    luma, chroma = planes[: frame.height], planes[frame.height :].reshape(2, -1)
    return [float(plane.mean()) for plane in (luma, *chroma)]


def open_writer(options=OPTIONS, width=96, height=128, deliver=lambda piece: None):
    return Mp4Writer(width, height, RATE, options, deliver)


def packets_in_file_order(mp4):
    with av.open(io.BytesIO(mp4), "r") as container:
        packets = [packet for packet in container.demux() if packet.size]
        return sorted(
            ((packet.pos, packet.stream.type, Fraction(packet.dts) * packet.time_base) for packet in packets),
        )


@pytest.mark.parametrize("frames", [22, 107, 124, 243, 362])
def test_clip_keeps_every_promise(frames):
    report = inspect_mp4(write(frames))
    assert report.problems(96, 128, frames) == []
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
    planes = planes_of(picture(40), OPTIONS)
    with av.open(io.BytesIO(write(40)), "r") as container:
        decoded = np.stack([frame.to_ndarray(format="yuv420p") for frame in container.decode(video=0)])
    # crf 18 leaves some levels; the neighbouring frame would be tens of levels away.
    assert np.abs(decoded.astype(float) - planes).mean(axis=(1, 2)).max() < 2


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
    pixels = torch.tensor(rgb, dtype=torch.uint8).expand(3, 64, 64, 3)
    mp4 = write_mp4(pixels, tones(4000), replace(OPTIONS, crf=1))
    with av.open(io.BytesIO(mp4), "r") as container:
        frame = next(container.decode(video=0))
    assert means(frame) == pytest.approx(yuv, abs=1)
    assert inspect_mp4(mp4).video.colour == {"primaries": 1, "transfer": 1, "matrix": 1, "range": 1}
    # ISO 14496-12 12.1.5: a player that does not parse the stream reads the same from the container.
    assert b"colrnclx" + bytes([0, 1, 0, 1, 0, 1, 0]) in mp4


def test_the_same_input_gives_the_same_bytes():
    first = write(60)
    assert write(60) == first
    assert write(60, chunk=5) == first
    assert write(60, seed=1) != first


@pytest.mark.parametrize("width", [96, 288])
def test_widths_off_the_grid_of_vectors_repeat_their_bytes(width):
    """What x264's AVX-512 code would not do: see _x264_instructions."""
    assert len({write(24, height=256, width=width) for _ in range(4)}) == 1


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
    write(30)
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
        ({"crf": None}, "crf: None beside video_bitrate None: give one of them"),
        ({"video_bitrate": 500_000}, "crf: 18 beside video_bitrate 500000"),
        ({"crf": None, "video_bitrate": 1_000}, "nearest is 100000"),
        ({"container": "mkv"}, "container: 'mkv' is not one of faststart, fragmented"),
        ({"colour": "bt2020"}, "colour: 'bt2020' is not one of bt709"),
    ],
)
def test_options_out_of_range_are_refused_with_the_nearest(fields, message):
    with pytest.raises(MuxError, match=message):
        replace(OPTIONS, **fields)


@pytest.mark.parametrize("size", [(63, 64), (64, 63), (0, 64)])
def test_odd_sizes_are_refused(size):
    with pytest.raises(MuxError, match=f"{size[0]}x{size[1]}"):
        open_writer(width=size[0], height=size[1])


@pytest.mark.parametrize(
    "planes",
    [
        np.zeros((1, 192, 96), np.float32),
        np.zeros((1, 128, 96), np.uint8),
        np.zeros((192, 96), np.uint8),
        np.zeros((1, 96, 192), np.uint8),
    ],
)
def test_frames_of_another_type_or_shape_are_refused(planes):
    with open_writer() as writer:
        writer.write_audio(tones(800).numpy())
        with pytest.raises(MuxError, match="frames"):
            writer.write_frames(planes)


@pytest.mark.parametrize(
    "waveform",
    [
        np.zeros((2, 800)),
        np.zeros((1, 800), np.float32),
        np.zeros(800, np.float32),
        np.zeros((2, 0), np.float32),
        np.full((2, 800), np.nan, np.float32),
    ],
)
def test_sound_of_another_type_or_shape_is_refused(waveform):
    with open_writer() as writer, pytest.raises(MuxError, match="audio"):
        writer.write_audio(waveform)


def test_incomplete_repeated_and_misplaced_input_is_refused():
    planes = planes_of(picture(5), OPTIONS)
    with open_writer() as writer:
        with pytest.raises(MuxError, match="the soundtrack comes first"):
            writer.write_frames(planes)
        writer.write_audio(tones(8000).numpy())
        with pytest.raises(MuxError, match="0 frames, 8000 samples"):
            writer.finish()
        with pytest.raises(MuxError, match="already"):
            writer.write_audio(tones(8000).numpy())
        writer.write_frames(planes)
        writer.finish()
        with pytest.raises(MuxError, match="closed"):
            writer.write_frames(planes)


@pytest.mark.parametrize("container", ["faststart", "fragmented"])
def test_an_abandoned_clip_leaves_no_file_no_thread_and_no_usable_writer(tmp_path, monkeypatch, container):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    planes = planes_of(picture(60), OPTIONS)
    before = threads()
    with contextlib.suppress(KeyboardInterrupt), open_writer(replace(OPTIONS, container=container)) as writer:
        writer.write_audio(tones(8000).numpy())
        writer.write_frames(planes)
        assert threads() > before, "x264 has its own"
        raise KeyboardInterrupt
    assert threads() == before
    with pytest.raises(MuxError, match="closed"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def threads():
    """Of this process, those of libraries too."""
    return len(list(Path("/proc/self/task").iterdir()))


FRAGMENTED = replace(OPTIONS, container="fragmented")


@pytest.fixture(scope="module")
def pieces():
    return write_pieces(picture(243), tones(samples_for(243)), FRAGMENTED)


def test_a_fragmented_clip_keeps_every_promise(pieces):
    report = inspect_mp4(b"".join(piece for piece, _ in pieces))
    assert report.problems(96, 128, 243) == []
    # 10.125 s in halves of a second, and a last one.
    assert 20 <= report.fragments <= 22
    assert report.boxes[:4] == ("ftyp", "moov", "moof", "mdat")


def test_both_containers_hold_the_same_encoded_samples(pieces):
    ours = tracks(b"".join(piece for piece, _ in pieces))
    whole = tracks(write(243))
    assert [len(whole[handler].samples) for handler in ("vide", "soun")] == [243, -(-samples_for(243) // 1024) + 1]
    for handler in ("vide", "soun"):
        assert ours[handler].samples == whole[handler].samples
        rates = [Fraction(1, track[handler].timescale) for track in (ours, whole)]
        times = [[at * rate for at in track[handler].times] for track, rate in zip((ours, whole), rates, strict=True)]
        assert times[0] == times[1]


def test_every_piece_is_whole_fragments_with_the_sound_of_their_frames(pieces):
    mp4 = b"".join(piece for piece, _ in pieces)
    ends = {"vide": Fraction(0), "soun": Fraction(0)}
    for fragment in fragments(mp4):
        for handler, part in fragment.items():
            assert Fraction(part.times[0], part.timescale) == ends[handler], "a track goes on where it ended"
            ends[handler] = Fraction(part.times[-1] + part.durations[-1], part.timescale)
        assert abs(ends["vide"] - ends["soun"]) < Fraction(1, 4)
    assert len(pieces) >= 20
    for start in range(1, len(pieces)):
        playable = b"".join(piece for piece, _ in pieces[:start])
        assert {kind for kind, _, _ in boxes(playable)} <= {b"ftyp", b"moov", b"moof", b"mdat"}
        assert len(fragments(playable)) == start


def test_a_player_can_decode_what_has_come_so_far(pieces):
    begun = b"".join(piece for piece, _ in pieces[:3])
    report = inspect_mp4(begun)
    assert report.video.constant_rate
    assert report.video.frames >= 34
    assert report.audio.rms > 0.1


def test_pieces_leave_while_frames_come(pieces):
    taken = [frames for _, frames in pieces]
    # Half a second of frames; x264 looks ahead, and four frames are in its threads.
    assert taken[0] <= 45
    assert taken == sorted(taken)
    assert sum(frames < 243 for frames in taken) >= 16, "only the frames that were looked at ahead are left for the end"


def test_fragments_do_not_depend_on_the_chunks_that_frames_come_in(pieces):
    assert write_pieces(picture(243), tones(samples_for(243)), FRAGMENTED, chunk=5) == pieces


def test_an_average_bit_rate_is_kept_and_repeats_its_bytes():
    noise = torch.randint(0, 256, (72, 128, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    rates = [replace(OPTIONS, crf=None, video_bitrate=rate) for rate in (400_000, 1_600_000)]
    files = [write_mp4(noise, tones(samples_for(72)), options) for options in rates]
    assert write_mp4(noise, tones(samples_for(72)), rates[0]) == files[0]
    sizes = [sum(map(len, tracks(file)["vide"].samples)) for file in files]
    # A first pass over three seconds of noise that no rate fits: nearer than half as much again.
    assert sizes[0] * 8 / 3 == pytest.approx(400_000, rel=0.5)
    assert sizes[1] > 2 * sizes[0]


def test_untagged_601_is_what_the_peers_write():
    options = replace(OPTIONS, crf=1, colour="bt601_untagged")
    mp4 = write_mp4(torch.tensor((255, 0, 0), dtype=torch.uint8).expand(3, 64, 64, 3), tones(4000), options)
    with av.open(io.BytesIO(mp4), "r") as container:
        frame = next(container.decode(video=0))
    # vllm-omni's red, as measured on its files.
    assert means(frame) == pytest.approx((81, 90, 240), abs=1)
    report = inspect_mp4(mp4)
    assert report.video.colour == {"primaries": 2, "transfer": 2, "matrix": 2, "range": 0}
    assert b"colrnclx" not in mp4
    assert not any(problem.startswith("colour") for problem in report.problems(64, 64, 3, colour=COLOURS[1]))
    assert any(problem.startswith("colour") for problem in report.problems(64, 64, 3))
