"""The probe must see what is wrong with a file; its reports on good files are in test_mux.py."""

from __future__ import annotations

import io
import json

import av
import pytest
import torch

from runtime.mux import MediaOptions
from runtime.probe import ProbeError, inspect_mp4, top_level_boxes
from tests.mp4.serial import write_mp4

OPTIONS = MediaOptions(crf=18, preset="veryfast", audio_bitrate=192_000, threads=1)


def clip(frames=24, level=None, loudness=0.1, seconds=None):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (frames, 64, 64, 3), dtype=torch.uint8, generator=generator)
    if level is not None:
        pixels = torch.full_like(pixels, level)
    samples = round((seconds or frames / 24) * 32_000)
    return write_mp4(pixels, loudness * torch.randn(2, samples, generator=generator), OPTIONS)


def untagged_30fps_mono():
    """An MP4 by PyAV's defaults, with the index behind the media."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=30)
        video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
        audio = container.add_stream("aac", rate=44_100, layout="mono")
        for index in range(24):
            pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8).numpy()
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index if index < 20 else index + 5
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        sound = av.AudioFrame.from_ndarray(torch.rand(1, 44_100).numpy(), format="fltp", layout="mono")
        sound.sample_rate = 44_100
        container.mux(audio.encode(sound))
        container.mux(audio.encode(None))
    return buffer.getvalue()


def test_a_good_clip_has_no_problem_and_reads_the_same_from_disk(tmp_path):
    mp4 = clip()
    path = tmp_path / "clip.mp4"
    path.write_bytes(mp4)
    report = inspect_mp4(path)
    assert report == inspect_mp4(mp4)
    assert report.problems(64, 64, 24) == []
    assert report.size_bytes == len(mp4)
    assert json.loads(report.to_json())["moov_before_mdat"] is True


@pytest.mark.parametrize(
    ("mp4", "complaint"),
    [
        (clip(frames=25), "frames: 25, expected 24"),
        (clip(level=90), "pixel variance: 0.0"),
        (clip(loudness=0), "audio RMS: 0.0"),
        (clip(seconds=1.2), "audio seconds: 1.200, expected 1.000 within 0.1"),
    ],
)
def test_each_broken_promise_is_named(mp4, complaint):
    assert any(problem.startswith(complaint) for problem in inspect_mp4(mp4).problems(64, 64, 24))


def test_defaults_of_another_writer_are_all_complained_of():
    problems = " ".join(inspect_mp4(untagged_30fps_mono()).problems(96, 64, 24))
    for fact in ("size", "fps", "constant frame rate", "colour", "sample rate", "channels", "moov before mdat"):
        assert fact in problems


def test_levels_are_those_of_the_signal():
    report = inspect_mp4(clip(frames=48, loudness=0.1))
    assert report.audio.rms == pytest.approx(0.1, rel=0.2)
    assert abs(report.audio.mean) < 0.01


def test_a_truncated_or_foreign_file_is_refused():
    mp4 = clip()
    for data in (mp4[: len(mp4) // 2], b"", b"not an mp4 at all, just text", mp4[:100]):
        with pytest.raises(ProbeError, match="mp4"):
            inspect_mp4(data)


def test_large_and_open_ended_boxes_are_walked():
    wide = (1).to_bytes(4, "big") + b"mdat" + (24).to_bytes(8, "big") + bytes(8)
    rest = (0).to_bytes(4, "big") + b"free" + bytes(5)
    assert list(top_level_boxes(wide + rest)) == [("mdat", 24), ("free", 13)]
