"""One thread that writes an MP4 from RGB frames, whole at the end: what the overlapped tail is compared with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.colour import to_i420
from runtime.mux import MediaOptions, Mp4Writer

RATE = 32_000


def planes_of(pixels: torch.Tensor, options: MediaOptions) -> NDArray[np.uint8]:
    """RGB uint8 [n, H, W, 3] as the writer takes it."""
    return to_i420(pixels.permute(3, 0, 1, 2), options.colour).numpy()


def write_pieces(
    pixels: torch.Tensor, waveform: torch.Tensor, options: MediaOptions, chunk: int = 17
) -> list[tuple[bytes, int]]:
    """The pieces of the MP4 of RGB uint8 [n, H, W, 3] and float32 [2, samples], and the frames taken by then."""
    pieces: list[tuple[bytes, int]] = []
    height, width = pixels.shape[1:3]
    planes = planes_of(pixels, options)
    with Mp4Writer(width, height, RATE, options, lambda piece: pieces.append((piece, writer.frames))) as writer:
        writer.write_audio(waveform.numpy())
        for start in range(0, len(planes), chunk):
            writer.write_frames(planes[start : start + chunk])
        writer.finish()
    return pieces


def write_mp4(pixels: torch.Tensor, waveform: torch.Tensor, options: MediaOptions, chunk: int = 17) -> bytes:
    """The pieces as one file."""
    return b"".join(piece for piece, _ in write_pieces(pixels, waveform, options, chunk))
