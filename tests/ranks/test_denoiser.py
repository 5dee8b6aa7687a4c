"""Ranks that share the packed rows, on a store's engines (ONNX Runtime sessions), against one that has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore
from plugins.ranks import Group, ProcessGroup
from plugins.schedule import Schedule
from runtime.denoiser import Denoiser, State
from runtime.events import Cancellation, Event, Reporter, Units
from runtime.modulation import ModulationCache
from runtime.packing import Condition, Layout, layout
from runtime.pipeline import stage_graphs
from runtime.quality import Attending, Quality
from runtime.row_shares import RowShare
from tests.ranks.spawn import run_ranks
from tests.ranks.stores import ranked_store

IMAGE = Condition("image", "reference", latent_frames=1, latent_height=4, latent_width=6)
SOUND = Condition("audio", "reference", audio_latents=3)

LAYOUTS: dict[str, dict[str, Any]] = {
    "divides": {"text": 12, "conditions": (), "frames": 3, "audio": 4},
    "does not divide": {"text": 13, "conditions": (), "frames": 3, "audio": 5},
    "with conditions": {"text": 9, "conditions": (SOUND, IMAGE), "frames": 2, "audio": 2},
    # 5 rows on 4 ranks are 2, 2, 1 and none.
    "a rank of padding": {"text": 2, "conditions": (), "frames": 1, "audio": 1, "side": 2},
    # Several tiles of keys, some of which a tier may leave out.
    "skip": {"text": 11, "conditions": (), "frames": 11, "audio": 7, "side": 12},
}
ROWS = {"divides": 32, "does not divide": 35, "with conditions": 33, "a rank of padding": 5, "skip": 421}

SMALLEST = {"duration": 4, "aspect_ratio": "1:1", "width": 256, "height": 256, "num_inference_steps": 2, "seed": 7}
PROMPT = "A red fox runs over fresh snow"
SCHEDULE = Schedule.of(1, 5.0, 3.0)


def packed(text: int, conditions: tuple[Condition, ...], frames: int, audio: int, side: int = 4) -> Layout:
    return layout(torch.ones(text, dtype=torch.int64), conditions, frames, side, side, audio)


def quality(attention: str, threshold: float) -> Quality:
    attending = (Attending(forwards=1, attention=attention, skip_threshold=threshold),)  # type: ignore[arg-type]
    return Quality(tier="skip", linears="float32", refiner="dense", attending=attending)


def streams(one: Layout, seed: int) -> tuple[State, State]:
    """Condition rows and a state, of a seed."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int, width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=generator)

    video, audio = one.condition_video, one.condition_audio
    targets = rows(len(one.video_indices) - video, 96), rows(len(one.audio_indices) - audio, 32)
    return State(rows(video, 96), rows(audio, 32)), State(*targets)


def velocities(engines: EngineSet, group: Group | None, own: bool) -> dict[str, torch.Tensor]:
    """What one forward changes in the state, for each layout; and how many tiles attention left out.

    own: this rank's state is another than the others' where the rows are not this rank's.
    """
    denoiser = Denoiser(engines, "fl2va", ModulationCache(0), {}, group)
    found: dict[str, torch.Tensor] = {}
    for name, sizes in LAYOUTS.items():
        one = packed(**sizes)
        width = engines.manifest.dimensions.denoiser.text_dim
        text = torch.randn(len(one.text_indices), width, generator=torch.Generator().manual_seed(1))
        conditions, state = streams(one, 2)
        if own and group is not None:
            share = RowShare.of(one, engines.manifest.profile.local_rows(one.rows), group.rank)
            conditions, state = _elsewhere_another(share, one, (conditions, state), seed=100 + group.rank)
        told: list[Event] = []
        units = Units("denoise", 1, Reporter(told.append, lambda: 0.0), Cancellation())
        tier = quality("skip", 0.7) if name == "skip" else quality("dense", 0.0)
        (after,) = denoiser.sample(denoiser.sequence(text, one), SCHEDULE, tier, conditions, state, units)
        found |= {f"{name}: video": after.video - state.video, f"{name}: audio": after.audio - state.audio}
        if tier.skips:
            found[f"{name}: left out"] = torch.tensor([told[-1].skipped_tiles])
    return found


def _elsewhere_another(share: RowShare, one: Layout, rows: tuple[State, State], seed: int) -> tuple[State, State]:
    conditions, state = rows
    others, another = streams(one, seed)

    def mixed(stream: Any, first: torch.Tensor, second: torch.Tensor, *noise: torch.Tensor) -> list[torch.Tensor]:
        whole, here = torch.cat(noise), share.streams[stream]
        whole[here] = torch.cat([first, second])[here]
        return list(whole.split([len(first), len(second)]))

    video = mixed("video", conditions.video, state.video, others.video, another.video)
    audio = mixed("audio", conditions.audio, state.audio, others.audio, another.audio)
    return State(video[0], audio[0]), State(video[1], audio[1])


def denoise(store: Path) -> EngineSet:
    return EngineSet.open(store, stage_graphs(EngineStore.open(store).manifest)["denoise"], ("fl2va",))


def share_rows(rank: int, size: int, store: str) -> dict[str, torch.Tensor]:
    """One forward of each layout, twice: of the same state on every rank, and of states that only together are it."""
    group = ProcessGroup(dist.group.WORLD)  # type: ignore[arg-type]
    engines = denoise(Path(store))
    alike = velocities(engines, group, own=False)
    apart = velocities(engines, group, own=True)
    return alike | {f"apart {name}": tensor for name, tensor in apart.items()}


@pytest.fixture(scope="module")
def unshared(store: Path) -> dict[str, torch.Tensor]:
    return velocities(denoise(store), None, own=False)


@pytest.mark.parametrize("size", [2, 4])
def test_a_forward_of_ranks_is_the_forward_of_one(
    store: Path, session_folder: Path, tmp_path: Path, unshared: dict[str, torch.Tensor], size: int
) -> None:
    assert {name: packed(**sizes).rows for name, sizes in LAYOUTS.items()} == ROWS
    # Two ranks have a store that other tests have too.
    stages = {"ulysses": 4} if size == 4 else {"ulysses": 2, "text_encoder": 2, "video_tiles": 2}
    ranks = run_ranks(share_rows, size, tmp_path, str(ranked_store(store, session_folder, **stages)))
    for name, expected in unshared.items():
        for found in ranks:
            # On every rank the same to the bit, or their states would part.
            assert torch.equal(found[name], ranks[0][name]), name
            assert (found[name] - expected).abs().max() <= 1e-5, name
            # Adding to a state that is another in the other ranks' rows rounds otherwise.
            assert (found[f"apart {name}"] - expected).abs().max() <= 1e-5, name
    assert unshared["skip: left out"] > 0
