"""One transformer block of the denoiser, which runs once for each layer of every step: whole, or as three segments.

The segments are what a block is made of. Two of them work row by row, and may be given the sequence in chunks: their
inner rows, the feed-forward's above all, then take the memory of one chunk. Attention sees the whole sequence. What
passes between the segments is laid out by rows, [rows, heads, head_dim], so that a chunk is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from export.checkpoint import Checkpoint
from export.checkpoint.expressions import Stored
from export.graphs.attention import AttentionInputs, AttentionOutput, GatedInputs, attend, attend_to_tiles
from export.graphs.block_layout import BlockLayout, gated_layout
from export.graphs.feed_forward import FeedForward
from export.graphs.graph import Axis, Graph, TensorSpec
from export.graphs.rows import CHUNK_ROWS, ROWS, TILES
from plugins.block_attention import GATE, ROW_TILES, TILE_COUNTS, TILE_ROWS, VIDEO_SPARSE
from plugins.dimensions import MODALITIES, TIMESTEP_SLOTS, DenoiserDimensions
from plugins.ops.gated_residual import OP as GATED_RESIDUAL
from plugins.ops.modulated_rms_norm import OP as MODULATED_RMS_NORM
from plugins.video_tiles import TILE

TABLE_ROWS = TIMESTEP_SLOTS * MODALITIES
"""Rows of a block's modulation table."""


class Project(nn.Module):
    """Modulated norm, projections, norms of queries and keys, rotation: what attention takes, row by row."""

    def __init__(self, dimensions: DenoiserDimensions, layout: BlockLayout, compute: torch.dtype) -> None:
        super().__init__()
        # Only the norm's weight is its own: the op that runs is the fused one.
        self.norm1 = nn.RMSNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        inputs = GatedInputs if layout.gated else AttentionInputs
        self.attention = inputs(dimensions, layout.qkv, compute)
        self.eps = dimensions.norm_eps

    def forward(
        self,
        hidden: torch.Tensor,
        modulation: torch.Tensor,
        modulation_index: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Hidden [R, D] to query, key, value and, where there is one, gate, each [R, heads, head_dim]."""
        shift, scale = modulation.chunk(6, dim=-1)[:2]
        x = MODULATED_RMS_NORM(hidden, self.norm1.weight, scale, shift, modulation_index, self.eps)
        return self.attention.inputs(x, (cos, sin))


AttendResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Mixed values [S, heads * head_dim]; and how many tiles were left out, int64 [heads], where some may be."""


class Attend(nn.Module):
    """Attention over the whole sequence; has no weights."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttendResult:
        """Three of [S, heads, head_dim] to mixed values [S, heads * head_dim]."""
        return attend(query, key, value)


class TileAttend(nn.Module):
    """Attention to the most relevant video tiles; has no weights."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Query, key, value and gate, each [S, heads, head_dim], and the tiles to mixed values [S, heads * head_dim].

        The tiles are three int64 tensors: the rows of each, the tile of each row, and counts.
        """
        return attend_to_tiles(*inputs)


class Finish(nn.Module):
    """Output projection and feed-forward, each with its gated residual, row by row."""

    def __init__(self, dimensions: DenoiserDimensions, layout: BlockLayout, compute: torch.dtype) -> None:
        super().__init__()
        self.attention = AttentionOutput(dimensions, compute)
        self.norm2 = nn.RMSNorm(dimensions.hidden, eps=dimensions.norm_eps, dtype=compute)
        self.feed_forward = FeedForward(dimensions.hidden, dimensions.ffn, layout.gate_first, compute)
        self.eps = dimensions.norm_eps

    def forward(
        self, hidden: torch.Tensor, mixed: torch.Tensor, modulation: torch.Tensor, modulation_index: torch.Tensor
    ) -> torch.Tensor:
        """Hidden [R, D] and mixed values [R, heads * head_dim] to hidden [R, D]."""
        hidden = self.attended(hidden, self.attention(mixed), modulation, modulation_index)
        return self.fed(hidden, self.update(hidden, modulation, modulation_index), modulation, modulation_index)

    def attended(
        self, hidden: torch.Tensor, update: torch.Tensor, modulation: torch.Tensor, modulation_index: torch.Tensor
    ) -> torch.Tensor:
        """Hidden [R, D] with what attention adds to it, [R, D]."""
        result: torch.Tensor = GATED_RESIDUAL(hidden, update, modulation.chunk(6, dim=-1)[2], modulation_index)
        return result

    def update(self, hidden: torch.Tensor, modulation: torch.Tensor, modulation_index: torch.Tensor) -> torch.Tensor:
        """What the feed-forward adds to hidden [R, D]."""
        shift2, scale2 = modulation.chunk(6, dim=-1)[3:5]
        x = MODULATED_RMS_NORM(hidden, self.norm2.weight, scale2, shift2, modulation_index, self.eps)
        result: torch.Tensor = self.feed_forward(x)
        return result

    def fed(
        self, hidden: torch.Tensor, update: torch.Tensor, modulation: torch.Tensor, modulation_index: torch.Tensor
    ) -> torch.Tensor:
        """Hidden [R, D] with what the feed-forward adds to it, [R, D]."""
        result: torch.Tensor = GATED_RESIDUAL(hidden, update, modulation.chunk(6, dim=-1)[5], modulation_index)
        return result


class Block(nn.Module):
    """Modulated attention and feed-forward with gated residuals (spec/model.md 2.2, step 3).

    One that has a gate attends to the most relevant video tiles (spec/model.md 8.3).
    """

    def __init__(self, dimensions: DenoiserDimensions, layout: BlockLayout, compute: torch.dtype) -> None:
        super().__init__()
        self.project = Project(dimensions, layout, compute)
        self.attend = TileAttend() if layout.gated else Attend()
        self.finish = Finish(dimensions, layout, compute)

    def forward(
        self,
        hidden: torch.Tensor,
        modulation: torch.Tensor,
        modulation_index: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *attending: torch.Tensor,
    ) -> AttendResult:
        """Hidden [S, D] to hidden [S, D]; each row takes its shifts, scales and gates from its row of `modulation`.

        `attending`: what its attention takes beside the rows' heads, a threshold or tiles. Where attention counts the
        tiles that it leaves out, so does the block.
        """
        attended = self.attend(*self.project(hidden, modulation, modulation_index, cos, sin), *attending)
        mixed, *skipped = attended if isinstance(attended, tuple) else (attended,)
        result: torch.Tensor = self.finish(hidden, mixed, modulation, modulation_index)
        return (result, skipped[0]) if skipped else result


def graphs(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The `block` graph; instance i is layer i. Where blocks have a gate, they attend to video tiles."""
    block = _Block(checkpoint, partition, compute)
    graph = Graph(
        name="block",
        module=block.module(Block),
        inputs=(*block.rows(ROWS), *block.angles(ROWS), *block.tiles()),
        outputs=(block.hidden(ROWS, "hidden_out"),),
        weights=tuple(_prefixed("project", p) | _prefixed("finish", f) for p, f in block.weights()),
        compute=compute,
        trials=block.trials(),
        variant=block.variant,
    )
    return (graph,)


def segments(checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> tuple[Graph, ...]:
    """The graphs `block.project`, `block.attend` and `block.finish`, which do what `block` does.

    Instance i of the first and the last is layer i. Their rows are an axis of their own, of chunks of the sequence.
    """
    block = _Block(checkpoint, partition, compute)
    project = Graph(
        name="block.project",
        module=block.module(Project),
        inputs=(*block.rows(CHUNK_ROWS), *block.angles(CHUNK_ROWS)),
        outputs=block.heads(CHUNK_ROWS),
        weights=tuple(weights for weights, _ in block.weights()),
        compute=compute,
        trials=({"chunk_rows": 1}, {"chunk_rows": 7}, {"chunk_rows": 50}),
    )
    attend = Graph(
        name="block.attend",
        module=TileAttend if block.gated else Attend,
        inputs=(*block.heads(ROWS), *block.tiles()),
        outputs=(block.mixed(ROWS),),
        weights=({},),
        compute=compute,
        trials=block.trials(),
        variant=block.variant,
    )
    hidden, *modulation = block.rows(CHUNK_ROWS)
    finish = Graph(
        name="block.finish",
        module=block.module(Finish),
        inputs=(hidden, block.mixed(CHUNK_ROWS), *modulation),
        outputs=(block.hidden(CHUNK_ROWS, "hidden_out"),),
        weights=tuple(weights for _, weights in block.weights()),
        compute=compute,
        trials=({"chunk_rows": 1}, {"chunk_rows": 7}, {"chunk_rows": 50}),
    )
    return project, attend, finish


class _Block:
    """The tensors of one checkpoint's blocks."""

    def __init__(self, checkpoint: Checkpoint, partition: str, compute: torch.dtype) -> None:
        self._dimensions = checkpoint.dimensions.denoiser
        self._layout = gated_layout(checkpoint, partition)
        self._stored = checkpoint.stored("denoiser", partition)
        self._compute = compute

    def module(
        self, segment: Callable[[DenoiserDimensions, BlockLayout, torch.dtype], nn.Module]
    ) -> Callable[[], nn.Module]:
        return lambda: segment(self._dimensions, self._layout, self._compute)

    def weights(self) -> list[tuple[dict[str, Stored], dict[str, Stored]]]:
        """Each layer's weights, those of `Project` and those of `Finish`."""
        prefixes = [f"{self._layout.blocks}.{i}" for i in range(self._dimensions.layers)]
        return [_split(self._layout.weights(self._stored, prefix)) for prefix in prefixes]

    def hidden(self, rows: Axis, name: str = "hidden") -> TensorSpec:
        return TensorSpec(name, self._compute, (rows, self._dimensions.hidden))

    def rows(self, rows: Axis) -> tuple[TensorSpec, ...]:
        return (
            self.hidden(rows),
            TensorSpec("modulation", self._compute, (TABLE_ROWS, 6 * self._dimensions.hidden)),
            TensorSpec("modulation_index", torch.int64, (rows,), below=TABLE_ROWS),
        )

    def angles(self, rows: Axis) -> tuple[TensorSpec, ...]:
        shape = (rows, 3 * self._dimensions.rope_frequencies)
        return tuple(TensorSpec(name, torch.float32, shape) for name in ("cos", "sin"))

    def heads(self, rows: Axis) -> tuple[TensorSpec, ...]:
        shape = (rows, self._dimensions.heads, self._dimensions.head_dim)
        names = ("query", "key", "value", *([GATE] if self.gated else []))
        return tuple(TensorSpec(name, self._compute, shape) for name in names)

    @property
    def gated(self) -> bool:
        """Whether the blocks attend to video tiles."""
        return self._layout.gated

    @property
    def variant(self) -> str:
        """What the attention is, where it is not the released model's."""
        return VIDEO_SPARSE if self.gated else ""

    def tiles(self) -> tuple[TensorSpec, ...]:
        """What attention to video tiles takes beside the rows."""
        if not self.gated:
            return ()
        return (
            TensorSpec(TILE_ROWS, torch.int64, (TILES, TILE), trial=_trial_rows),
            TensorSpec(ROW_TILES, torch.int64, (ROWS,), trial=_trial_tiles),
            TensorSpec(TILE_COUNTS, torch.int64, (2,), trial=_trial_counts),
        )

    def trials(self) -> tuple[dict[str, int], ...]:
        """Sizes of a sequence to compare a whole block, or its attention, at."""
        if not self.gated:
            return {"rows": 1}, {"rows": 7}, {"rows": 50}
        return {"rows": 7, "tiles": 3}, {"rows": 50, "tiles": 6}, {"rows": 150, "tiles": 9}

    def mixed(self, rows: Axis) -> TensorSpec:
        return TensorSpec("mixed", self._compute, (rows, self._dimensions.inner))


def _trial_tiles(sizes: Mapping[str, int]) -> torch.Tensor:
    """The tile of each row: tiles as equal as can be."""
    return torch.arange(sizes["rows"]) * sizes["tiles"] // sizes["rows"]


def _trial_rows(sizes: Mapping[str, int]) -> torch.Tensor:
    """The rows of those tiles."""
    tiles = _trial_tiles(sizes)
    rows = torch.full((sizes["tiles"], TILE), -1)
    for tile in range(sizes["tiles"]):
        (found,) = torch.nonzero(tiles == tile, as_tuple=True)
        rows[tile, : len(found)] = found
    return rows


def _trial_counts(sizes: Mapping[str, int]) -> torch.Tensor:
    """A third of them are a prefix, half of the others are chosen."""
    prefix = sizes["tiles"] // 3
    return torch.tensor([prefix, (sizes["tiles"] - prefix) // 2])


_FINISH = ("attention.out.", "norm2.", "feed_forward.")
"""Beginnings of the names of `Finish`'s parameters."""


def _split(weights: dict[str, Stored]) -> tuple[dict[str, Stored], dict[str, Stored]]:
    finish = {name: stored for name, stored in weights.items() if name.startswith(_FINISH)}
    return {name: stored for name, stored in weights.items() if name not in finish}, finish


def _prefixed(segment: str, weights: dict[str, Stored]) -> dict[str, Stored]:
    return {f"{segment}.{name}": stored for name, stored in weights.items()}
