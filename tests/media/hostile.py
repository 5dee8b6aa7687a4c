"""Files that no request may get through: HOSTILE maps a name to (kind, bytes). All are made here, none is stored."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Callable

import av
import numpy as np
from PIL import Image

from runtime.media.facts import Kind
from tests.media.clips import Track, even, noise, picture, saved, sound, video, wav
from tests.media.heif import box, full, heic

BOMB = zlib.compress(bytes(250 << 20), 1)
"""A megabyte that unpacks to more than may be taken."""

_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"dinf", b"edts", b"mvex", b"moof", b"traf")


def edited(data: bytes, name: bytes, change: Callable[[bytes], bytes], *, first: bool = True) -> bytes:
    """An MP4 with the payload of its first (or of each) box of that type changed, and the boxes around it resized."""
    done = False

    def level(part: bytes) -> bytes:
        nonlocal done
        out, at = [], 0
        while at + 8 <= len(part):
            size, kind = int.from_bytes(part[at : at + 4], "big"), part[at + 4 : at + 8]
            payload = part[at + 8 : at + size]
            if kind == name and not (done and first):
                done, payload = True, change(payload)
            elif kind in _CONTAINERS:
                payload = level(payload)
            out.append(box(kind, payload))
            at += size
        return b"".join(out)

    result = level(data)
    assert done, name
    return result


def set_bytes(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    """A change of some bytes of a payload."""
    return lambda payload: payload[:offset] + value + payload[offset + len(value) :]


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of these chunks, with right checksums."""
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_header(width: int, height: int) -> tuple[bytes, bytes]:
    """The IHDR chunk of an RGB image."""
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


def _images() -> dict[str, bytes]:
    good = saved(picture(), "PNG")
    jpeg = saved(picture(), "JPEG")
    webp = saved(picture(), "WEBP")
    still = heic(np.asarray(picture(256, 256)))
    scan = jpeg[jpeg.index(b"\xff\xda") : -2]
    frames = [picture(), picture().rotate(180)]
    sof = jpeg.index(b"\xff\xc0")
    pixels = zlib.compress(bytes(1000))
    return {
        "png_of_40000_by_40000": png(png_header(40_000, 40_000), (b"IDAT", pixels), (b"IEND", b"")),
        "png_truncated": good[: len(good) // 2],
        "png_whose_chunk_claims_2_gb": good[:33] + b"\x80\0\0\0IDAT" + good[41:],
        "png_without_pixels": png(png_header(300, 300), (b"IEND", b"")),
        "png_of_one_pixel_height": saved(Image.new("RGB", (1000, 1)), "PNG"),
        "png_animated": saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "png_with_too_few_pixels": png(png_header(5000, 5000), (b"IDAT", pixels), (b"IEND", b"")),
        "png_with_a_text_bomb": png(
            png_header(300, 300), (b"zTXt", b"a\0\0" + BOMB), (b"IDAT", pixels), (b"IEND", b"")
        ),
        "gif_named_png": saved(frames[0].quantize(), "GIF", save_all=True, append_images=frames[1:]),
        "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "html": b"<!DOCTYPE html><html></html>",
        "bmp": saved(picture(), "BMP"),
        "empty": b"",
        "noise": np.random.default_rng(0).bytes(100_000),
        "jpeg_truncated": jpeg[: len(jpeg) // 2],
        "jpeg_of_65500_by_65500": jpeg[: sof + 5] + struct.pack(">HH", 65_500, 65_500) + jpeg[sof + 9 :],
        "jpeg_of_1000_scans": jpeg[:-2] + scan * 1000 + jpeg[-2:],
        "webp_truncated": webp[: len(webp) // 2],
        "webp_animated": saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "webp_whose_canvas_lies": _webp_on_a_larger_canvas(webp),
        "heic_truncated": still[: len(still) // 2],
        "heic_that_claims_5000_by_5000": heic(np.asarray(picture(256, 256)), claimed=(5000, 5000)),
        "heic_whose_picture_is_larger_than_it_says": heic(np.zeros((1024, 1024, 3), np.uint8), claimed=(256, 256)),
        "heic_without_items": box(b"ftyp", b"heic", bytes(4), b"mif1heic") + full(b"meta", 0, 0),
    }


def _webp_on_a_larger_canvas(webp: bytes) -> bytes:
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_383).to_bytes(3, "little") * 2
    body = b"WEBP" + extended + webp[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _videos() -> dict[str, bytes]:
    clip = video()
    moov = clip.index(b"moov") - 4
    small = video(even(1.5, 24), encoder={"x264-params": "repeat-headers=1"})
    large = video(even(1.5, 24), size=(512, 512), encoder={"x264-params": "repeat-headers=1"})
    fragments = video(options={"movflags": "frag_keyframe+empty_moov"})
    nested = b""
    for _ in range(2000):
        nested = box(b"udta", nested)
    return {
        "mp4_truncated": clip[: len(clip) // 2],
        "mp4_without_index": clip[:moov],
        "mp4_of_zero_frames": _empty_tables(clip),
        "mp4_of_sound_only": sound(noise(3, 44_100, 2), 44_100, "aac", "mp4"),
        "mp4_that_claims_10_hours": edited(clip, b"mvhd", _ten_hours),
        "mp4_whose_frames_last_10_hours": edited(
            clip, b"stts", set_bytes(12, struct.pack(">I", 36_000 * 90_000 // 60))
        ),
        "mp4_of_2_31_samples_of_one_size": edited(clip, b"stsz", set_bytes(4, struct.pack(">II", 1, 1 << 31))),
        "mp4_of_2_31_times": edited(clip, b"stts", set_bytes(8, struct.pack(">I", 1 << 31))),
        "mp4_whose_table_claims_2_31_entries": edited(clip, b"stts", set_bytes(4, struct.pack(">I", 1 << 31))),
        "mp4_of_2_31_samples_a_chunk": edited(clip, b"stsc", set_bytes(12, struct.pack(">I", 1 << 31))),
        "mp4_of_2_31_samples_a_fragment": edited(fragments, b"trun", set_bytes(4, struct.pack(">I", 1 << 31))),
        "mp4_whose_samples_overlap": _overlapping(clip),
        "mp4_with_data_in_a_file": edited(clip, b"dref", lambda _: _reference(b"file:///etc/passwd\0")),
        "mp4_with_data_on_the_web": edited(clip, b"dref", lambda _: _reference(b"http://169.254.169.254/\0")),
        "mp4_with_a_packed_index": clip[:moov] + box(b"moov", box(b"cmov", bytes(64))),
        "mp4_of_2000_nested_boxes": clip[:moov] + box(b"moov", nested),
        "mp4_of_200000_boxes": clip + box(b"free") * 200_000,
        "mp4_in_motion_jpeg": video(codec="mjpeg", pix_fmt="yuvj420p"),
        "mp4_of_one_frame": video([0, 1]),
        "mp4_of_15_frames_a_second": video(even(3, 15)),
        "mp4_of_120_frames_a_second": video(even(3, 120)),
        "mp4_of_1_second": video(even(1, 24)),
        "mp4_of_16_seconds": video(even(16, 24), encoder={"preset": "ultrafast"}),
        "mp4_with_a_16_second_soundtrack": video(track=Track(16)),
        "mp4_of_64_pixels": video(size=(64, 64)),
        "mp4_of_pixels_a_million_times_as_wide": edited(clip, b"stsd", _wide_pixels),
        "mp4_whose_frames_grow": _joined(small, large),
        "mp4_whose_frames_shrink": _joined(large, small),
        "mp4_whose_frames_are_missing": clip[: clip.index(b"mdat") + 900]
        + bytes(moov - clip.index(b"mdat") - 900)
        + clip[moov:],
        "mov_with_pcm": video(container="mov", track=Track(2.5, "pcm_s16le")),
        "matroska": video(container="matroska"),
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "concat_script": b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        "image_as_video": saved(picture(), "PNG"),
    }


def _joined(first: bytes, second: bytes) -> bytes:
    """The samples of two clips in one track, under the description of the first; each clip repeats its own in band."""
    buffer, offset = io.BytesIO(), 0
    with av.open(buffer, "w", format="mp4") as out:
        stream = None
        for clip in (first, second):
            with av.open(io.BytesIO(clip)) as source:
                stream = stream or out.add_stream_from_template(source.streams.video[0])
                for packet in source.demux(source.streams.video[0]):
                    if packet.size:
                        packet.pts, packet.dts, packet.stream = packet.pts + offset, packet.dts + offset, stream
                        out.mux(packet)
                offset += source.streams.video[0].duration
    return buffer.getvalue()


def _ten_hours(payload: bytes) -> bytes:
    return set_bytes(16, struct.pack(">I", 36_000 * int.from_bytes(payload[12:16], "big")))(payload)


def _reference(url: bytes) -> bytes:
    return bytes(4) + struct.pack(">I", 1) + full(b"url ", 0, 0, url)


def _empty_tables(clip: bytes) -> bytes:
    for name, size in ((b"stts", 8), (b"ctts", 8), (b"stsc", 8), (b"stsz", 12), (b"stco", 8), (b"stss", 8)):
        clip = edited(clip, name, lambda _, size=size: bytes(size))
    return clip


def _overlapping(clip: bytes) -> bytes:
    """200,000 samples of 100 kB each, all of them the same bytes of one chunk after another."""
    count = 200_000
    clip = box(b"mdat", bytes(100_000)).join((clip[:32], clip[32:])) if clip[4:8] == b"ftyp" else clip
    clip = edited(clip, b"stsz", lambda _: bytes(4) + struct.pack(">II", 100_000, count))
    clip = edited(clip, b"stts", lambda _: bytes(4) + struct.pack(">III", 1, count, 1))
    clip = edited(clip, b"stsc", lambda _: bytes(4) + struct.pack(">IIII", 1, 1, 1, 1))
    return edited(clip, b"stco", lambda _: bytes(4) + struct.pack(">I", count) + struct.pack(">I", 40) * count)


def _wide_pixels(payload: bytes) -> bytes:
    entry = payload[8:]
    grown = entry + box(b"pasp", struct.pack(">II", 1_000_000, 1))
    return payload[:8] + struct.pack(">I", len(grown)) + grown[4:]


def _sounds() -> dict[str, bytes]:
    good = wav(noise(3, 8000, 1), 8000)
    frame = b"TIT2" + struct.pack(">I", len(BOMB) + 4) + b"\0\x09" + b"\x7f\x7f\x7f\x7f" + BOMB
    return {
        "wav_truncated": good[: len(good) // 2],
        "wav_that_claims_10_hours": good[:40] + struct.pack("<I", 36_000 * 16_000) + good[44:],
        "wav_of_no_samples": wav(noise(0, 8000, 1), 8000),
        "wav_of_1_second": wav(noise(1, 8000, 1), 8000),
        "wav_of_16_seconds": wav(noise(16, 8000, 1), 8000),
        "wav_of_10_minutes": wav(np.zeros((1, 600 * 8000), np.float32), 8000),
        "wav_of_8_channels": _wave(8, 8000),
        "wav_of_1_hz": good[:24] + struct.pack("<I", 1) + good[28:],
        "wav_of_4_ghz": good[:24] + struct.pack("<I", 0xFFFFFFFF) + good[28:],
        "wav_of_0_hz": good[:24] + struct.pack("<I", 0) + good[28:],
        "wav_in_adpcm": sound(noise(3, 8000, 1), 8000, "adpcm_ms", "wav"),
        "wav_without_format": good[:12] + b"junk" + good[16:],
        "ogg": b"OggS" + bytes(1000),
        "flac": sound(noise(3, 8000, 1), 8000, "flac", "flac"),
        "m4a": sound(noise(3, 44_100, 1), 44_100, "aac", "ipod"),
        "mp3_of_noise": b"\xff\xfb\x90\x44" + np.random.default_rng(1).bytes(100_000),
        "mp3_of_tags_only": b"ID3\x03\0\0\0\0\0\0" * 1000,
        "mp3_with_a_tag_bomb": b"ID3\x04\0\0" + _syncsafe(len(frame)) + frame,
        "video_as_sound": video(track=Track(2.5)),
    }


def _syncsafe(size: int) -> bytes:
    return bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0))


def _wave(channels: int, rate: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setparams((channels, 2, rate, 0, "NONE", ""))
        out.writeframes(bytes(channels * 2 * rate * 3))
    return buffer.getvalue()


def _named() -> dict[str, tuple[Kind, bytes]]:
    kinds: tuple[tuple[Kind, dict[str, bytes]], ...] = (
        ("image", _images()),
        ("video", _videos()),
        ("audio", _sounds()),
    )
    return {name: (kind, data) for kind, files in kinds for name, data in files.items()}


HOSTILE: dict[str, tuple[Kind, bytes]] = _named()
"""Refused by `probe` or, where DECODED names them, as soon as they are decoded."""

DECODED = frozenset(
    (
        "png_with_too_few_pixels",
        "png_with_a_text_bomb",
        "heic_that_claims_5000_by_5000",
        "heic_whose_picture_is_larger_than_it_says",
        "mp4_whose_frames_grow",
        "mp4_whose_frames_shrink",
        "mp4_whose_frames_are_missing",
    )
)
"""Those whose headers are sound and whose pixels are not what the headers promise."""
