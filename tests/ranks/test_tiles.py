"""Decoder tiles over ranks: the frames of one process, bit for bit, whoever is quick, and one end for all of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.profile import Ranks
from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore
from plugins.dimensions import VideoVAEDimensions
from plugins.tiling import TILES_AHEAD, used_tile
from runtime.decode import DecodeError, DecodeTile, VideoPlan, decode_frames
from runtime.events import Cancellation, Cancelled, Event, Reporter, ignore
from runtime.peers import PeerFailed, Peers
from runtime.pipeline import Pipeline, stage_graphs
from runtime.text import Tokenizer
from runtime.tile_shares import DEALER_THREAD, IN_FLIGHT, DealtTiles, TileFailed, TileGroup
from tests.ranks.spawn import run_ranks
from tests.ranks.stores import ranked_store

DIMENSIONS = VideoVAEDimensions(latent_channels=24, latents_mean=(0.0,) * 24, latents_std=(1.0,) * 24)
CANVASES = [(7, 256, 256), (12, 320, 256), (22, 272, 256), (12, 512, 320)]
"""Latent frames and pixels: of 1 tile, 4, 8 and 12."""
EVERY = 4
SMALL = {"width": 256, "height": 256, "aspect_ratio": "1:1", "duration": 4, "seed": 1}
"""A request for 6 tiles."""
RANKS = Ranks(ulysses=2, text_encoder=2, video_tiles=2)
"""Of a store that the other tests use too."""


def latents_of(frames: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(frames * height)
    return torch.randn(1, 24, frames, height // 16, width // 16, generator=generator)


def tile(latents: torch.Tensor) -> torch.Tensor:
    """A decoder of the right shapes, each of whose pixels depends on its latents."""
    level = latents.mean(dim=1, keepdim=True).repeat_interleave(4, 2).repeat_interleave(16, 3).repeat_interleave(16, 4)
    return torch.cat([level, -level, 2 * level], dim=1)


class Decoder:
    """Counts its tiles, and dawdles before each by chance."""

    def __init__(self, rank: int, slowest: float = 0.0) -> None:
        self.count = 0
        self._random, self._slowest = random.Random(rank), slowest

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        self.count += 1
        time.sleep(self._slowest * self._random.random())
        return tile(latents)


def frames_of(
    tiles: TileGroup,
    latents: torch.Tensor,
    decode: DecodeTile,
    cancellation: Cancellation | None = None,
    before: Callable[[], None] = lambda: None,
    deal: type[DealtTiles] = DealtTiles,
) -> torch.Tensor:
    """One video, on rank 0, which does something else before; the others serve and have no frames."""
    plan = VideoPlan.of_latents(latents, DIMENSIONS)
    if tiles.rank:
        tiles.serve(lambda number: plan.decode(latents, decode, number))
        return torch.empty(0)
    with deal(tiles, plan.tiles, used_tile(DIMENSIONS), latents.device) as order:
        before()
        given = (Reporter.silent(), cancellation or Cancellation(), order)
        return torch.cat([part.clone() for part in decode_frames(latents, decode, DIMENSIONS, *given)], dim=1)


def alone(latents: torch.Tensor) -> torch.Tensor:
    parts = decode_frames(latents, tile, DIMENSIONS, Reporter.silent(), Cancellation())
    return torch.cat([part.clone() for part in parts], dim=1)


def share(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Everything that ranks do with tiles, by 2, 3 and 4 of them."""
    found: dict[str, torch.Tensor] = {}
    for count in (2, 3, 4):
        tiles = Peers.join(Ranks(ulysses=1, text_encoder=1, video_tiles=count)).tiles
        assert (tiles is not None) == (rank < count)
        if tiles is not None:
            for canvas in CANVASES:
                found |= _video(tiles, count, canvas)
    assert tiles is not None
    run_ahead(tiles)
    fail(tiles, ValueError("no such weight"), "rank 2: .*ValueError: no such weight")
    fail(tiles, None, "rank 2: .*DecodeError: decoder tile: .* and finite")
    stop(tiles)
    found |= _video(tiles, size, CANVASES[-1])
    assert DEALER_THREAD not in [thread.name for thread in threading.enumerate()]
    return found


def _video(tiles: TileGroup, count: int, canvas: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Whether it is what one process makes, on rank 0; and how many tiles this one decoded."""
    latents, decoder = latents_of(*canvas), Decoder(tiles.rank, slowest=0.02)
    frames = frames_of(tiles, latents, decoder)
    name = f"{count} {canvas}"
    equal = {f"{name} equal": torch.tensor(torch.equal(frames, alone(latents)))} if tiles.rank == 0 else {}
    return {f"{name} tiles": torch.tensor(decoder.count), **equal}


def run_ahead(tiles: TileGroup) -> None:
    """While rank 0 is busy with something else, the others decode what it may hold, and no more."""
    began: list[float] = []

    def decode(latents: torch.Tensor) -> torch.Tensor:
        began.append(time.monotonic())
        return tile(latents)

    busy_until = 0.0

    def be_busy() -> None:
        nonlocal busy_until
        time.sleep(1)
        busy_until = time.monotonic()

    frames_of(tiles, latents_of(32, 512, 320), decode, before=be_busy)
    until = from_all(busy_until)[0]
    ahead = sum(from_all(sum(one < until for one in began)))
    assert sum(from_all(len(began))) == 36
    # More than they have been asked for at once: they were asked again.
    assert IN_FLIGHT * (tiles.size - 1) < ahead <= TILES_AHEAD * tiles.size


def fail(tiles: TileGroup, error: Exception | None, complaint: str) -> None:
    """A rank that fails, or gives what is not finite, ends the video for all."""

    def decode(latents: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        if tiles.rank != 2:
            return tile(latents)
        if error is not None:
            raise error
        return tile(latents) * torch.nan

    if tiles.rank:
        frames_of(tiles, latents_of(12, 512, 320), decode)
    else:
        with pytest.raises(TileFailed, match=f"(?s){complaint}"):
            frames_of(tiles, latents_of(12, 512, 320), decode)


class Left(DealtTiles):
    """Notes when the last one has been left."""

    at = 0.0

    def __exit__(self, *raised: Any) -> None:
        Left.at = time.monotonic()
        super().__exit__(*raised)


def stop(tiles: TileGroup) -> None:
    """A cancellation reaches ranks that do not hear of it: they are asked for nothing more."""
    cancellation, decoder, began = Cancellation(), Decoder(tiles.rank, slowest=0.01), list[float]()

    def decode(latents: torch.Tensor) -> torch.Tensor:
        if tiles.rank == 0 and decoder.count:
            cancellation.cancel()
        began.append(time.monotonic())
        return decoder(latents)

    latents = latents_of(52, 512, 320)
    if tiles.rank:
        frames_of(tiles, latents, decode)
    else:
        with pytest.raises(Cancelled, match="decoder tile"):
            frames_of(tiles, latents, decode, cancellation, deal=Left)
    left = from_all(Left.at)[0]
    assert sum(from_all(sum(one > left for one in began))) <= IN_FLIGHT * (tiles.size - 1)
    assert sum(from_all(len(began))) < VideoPlan.of_latents(latents, DIMENSIONS).tiles


def from_all(number: float) -> list[float]:
    """Every rank's number, on each of them."""
    numbers = [torch.empty(1, dtype=torch.float64) for _ in range(EVERY)]
    torch.distributed.all_gather(numbers, torch.tensor([number], dtype=torch.float64))
    return [one.item() for one in numbers]


def test_ranks_that_share_tiles_make_the_frames_of_one(tmp_path: Path) -> None:
    results = run_ranks(share, EVERY, tmp_path)
    for count in (2, 3, 4):
        for canvas in CANVASES:
            name, tiles = f"{count} {canvas}", VideoPlan.of_latents(latents_of(*canvas), DIMENSIONS).tiles
            assert results[0][f"{name} equal"], name
            assert sum(int(found.get(f"{name} tiles", 0)) for found in results) == tiles, name
    # Nobody is left without work where there is enough.
    assert all(found[f"{EVERY} {CANVASES[-1]} tiles"] > 0 for found in results)


def clip(rank: int, size: int, store: str) -> dict[str, torch.Tensor]:
    """One output from its latents by two ranks' engines, beside what one process makes; then one that cannot be."""
    engines = EngineSet.open(opened := EngineStore.open(store), graphs=stage_graphs(opened.manifest)["decode"])
    ranks = opened.manifest.profile.ranks.serving(("decode",))
    shared = Pipeline(engines, tokenizer := Tokenizer(opened.tokenizer_file), peers=Peers.join(ranks))
    resolved = shared.take("A red fox.", SMALL).resolved
    generator = torch.Generator().manual_seed(1)
    shape = resolved.latent_frames, resolved.latent_height, resolved.latent_width
    video = torch.randn(1, 24, *shape, generator=generator)
    audio = torch.randn(1, 2, 32, resolved.audio_latents, generator=generator)
    events: list[Event] = []
    mp4 = shared.decode(resolved, video, audio, events.append, Cancellation())
    with pytest.raises(DecodeError if rank == 0 else PeerFailed, match="waveform"):
        shared.decode(resolved, video, audio * torch.nan, ignore, Cancellation())
    cancelled = Cancellation()
    cancelled.cancel()
    with pytest.raises(Cancelled):
        shared.decode(resolved, video, audio, ignore, cancelled if rank == 0 else Cancellation())
    assert shared.decode(resolved, video, audio, ignore, Cancellation()) == mp4
    if rank:
        return {"bytes": torch.tensor(len(mp4))}
    one = Pipeline(engines, tokenizer).decode(resolved, video, audio, ignore, Cancellation())
    assert [event.index for event in events] == list(range(events[0].total + 1))
    return {"bytes": torch.tensor(len(mp4)), "equal": torch.tensor(mp4 == one)}


def test_a_clip_of_two_ranks_is_the_clip_of_one(store: Path, session_folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(clip, 2, tmp_path, str(ranked_store(store, session_folder, **dict(RANKS))))
    assert first["equal"]
    assert first["bytes"] > 0 == second["bytes"]
