"""Decoder tiles from GPU to GPU over NCCL: the frames of one GPU, bit for bit, also after a video that was ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks import together
from engines.profile import Ranks
from runtime.events import Cancellation, Cancelled
from runtime.peers import Peers
from tests.ranks.test_tiles import CANVASES, Decoder, alone, frames_of, latents_of

RANKS = 2

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < RANKS, reason=f"torch finds {torch.cuda.device_count()} CUDA devices, {RANKS} share"
)


def share(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """What one rank finds, and how many tiles of all videos it decoded."""
    tiles = Peers.join(Ranks(ulysses=1, text_encoder=1, video_tiles=RANKS), backend="nccl").tiles
    assert tiles is not None
    decoder, equal = Decoder(rank, slowest=0.01), []
    for canvas in (*CANVASES, None, CANVASES[-1]):
        latents = latents_of(*(canvas or CANVASES[-1])).to(device)
        cancellation = Cancellation()
        if canvas is None and rank == 0:
            cancellation.cancel()
            with pytest.raises(Cancelled):
                frames_of(tiles, latents, decoder, cancellation)
            continue
        frames = frames_of(tiles, latents, decoder)
        equal.append(rank > 0 or torch.equal(frames, alone(latents)))
    return {"equal": equal, "tiles": decoder.count}


def test_two_gpus_make_the_frames_of_one(tmp_path: Path) -> None:
    first, second = together(share, RANKS, tmp_path, limit=120, alone=True)
    assert all(first["equal"])
    assert first["tiles"] > 0
    assert second["tiles"] > 0
