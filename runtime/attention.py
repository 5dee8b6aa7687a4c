"""The attention of a request's blocks, which may change from one forward to the next: its engine, and its threshold."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engines.quality import graph_name, served_by
from engines.sessions.engine_set import EngineSet
from engines.store import Manifest
from plugins.block_attention import ATTENDING, SKIP_THRESHOLD, SKIPPED_TILES, BlockAttention, skips
from plugins.ranks import Group
from runtime.quality import Attending
from runtime.video_tiles import VideoTiles


def variants(manifest: Manifest) -> tuple[str, ...]:
    """The graphs of a store that attend in further tiers."""
    base, further = manifest.attention, manifest.further_attention
    found = (graph_name(graph, kind, base) for graph in ATTENDING for kind in further)
    return tuple(graph for graph in found if graph in manifest.graphs)


class BlocksAttention:
    """How the blocks attend now, and how many tiles they have left out so far."""

    def __init__(self, engines: EngineSet, tiles: VideoTiles | None = None) -> None:
        """Attends as the store does where no tier is chosen, and leaves out nothing. tiles: where it is to tiles."""
        manifest = engines.manifest
        self._base = self._engine = manifest.attention
        self._built: tuple[BlockAttention, ...] = (self._base, *manifest.further_attention)
        self._tiles = tiles.inputs if tiles else {}
        self._threshold = torch.zeros(1, device=engines.device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=engines.device)

    def use(self, attending: Attending) -> None:
        """What the blocks do from now on."""
        self._engine = served_by(attending.attention, self._built)
        self._threshold.fill_(attending.skip_threshold)

    def graph(self, graph: str) -> str:
        """The graph that attends now, for one of ATTENDING."""
        return graph_name(graph, self._engine, self._base)

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """What that graph takes beside the rows."""
        return {SKIP_THRESHOLD: self._threshold} if skips(self._engine) else self._tiles

    def count(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Adds what a run of that graph has left out; waits for nothing."""
        if SKIPPED_TILES in outputs:
            self._skipped += outputs[SKIPPED_TILES].sum()

    def skipped(self, ranks: Group | None = None) -> int:
        """Tiles left out so far, of all heads and blocks; waits for the device. ranks: those that share the heads."""
        if ranks is None:
            return int(self._skipped)
        return int(ranks.gather_rows(self._skipped.reshape(1), ranks.size).sum())
