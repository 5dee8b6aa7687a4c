"""How a checkpoint layout stores one transformer or refiner block, and which of its keys a block's parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from export.checkpoint import Checkpoint
from export.checkpoint.components.denoiser import GATE
from export.checkpoint.expressions import Stored
from export.checkpoint.recipes import QKVLayout

_SHARED = {"norm1.weight": "norm1.weight", "norm2.weight": "norm2.weight"}


@dataclass(frozen=True)
class BlockLayout:
    """`keys` maps a block's parameter names to the file's, after the block's prefix (spec/model.md 1b, 1c)."""

    qkv: QKVLayout
    gate_first: bool
    blocks: str
    refiner_blocks: str
    keys: Mapping[str, str]
    gated: bool = False
    """Whether the blocks attend to video tiles, and have a gate for it."""

    def weights(self, stored: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
        """The stored tensors of the block at `prefix`, by the block's parameter names."""
        return {name: stored[f"{prefix}.{key}"] for name, key in self.keys.items()}


NATIVE = BlockLayout(
    qkv="interleaved",
    gate_first=True,
    blocks="blocks",
    refiner_blocks="token_refiner.blocks",
    keys=_SHARED
    | {
        "attention.project.qkv.weight": "attn.qkv_proj.weight",
        "attention.query_norm.weight": "attn.q_norm.weight",
        "attention.key_norm.weight": "attn.k_norm.weight",
        "attention.out.weight": "attn.out_proj.weight",
        "feed_forward.gate_and_up.weight": "mlp.fc1.weight",
        "feed_forward.down.weight": "mlp.fc2.weight",
    },
)

DIFFUSERS = BlockLayout(
    qkv="split",
    gate_first=False,
    blocks="transformer_blocks",
    refiner_blocks="token_refiner.refiner_blocks",
    keys=_SHARED
    | {
        "attention.project.query.weight": "attn.to_q.weight",
        "attention.project.key.weight": "attn.to_k.weight",
        "attention.project.value.weight": "attn.to_v.weight",
        "attention.query_norm.weight": "attn.norm_q.weight",
        "attention.key_norm.weight": "attn.norm_k.weight",
        "attention.out.weight": "attn.to_out.0.weight",
        "feed_forward.gate_and_up.weight": "ff.net.0.proj.weight",
        "feed_forward.down.weight": "ff.net.2.weight",
    },
)


def block_layout(checkpoint: Checkpoint, partition: str) -> BlockLayout:
    """The layout of a partition's blocks."""
    qkv = checkpoint.qkv_layout("denoiser", partition)
    # Only diffusers splits the projections; a student's transformer may have another layout than its base.
    return DIFFUSERS if qkv == "split" else replace(NATIVE, qkv=qkv)


def gated_layout(checkpoint: Checkpoint, partition: str) -> BlockLayout:
    """The layout of a partition's blocks other than the refiner's, with their gates if the first one has any."""
    layout = block_layout(checkpoint, partition)
    if f"{layout.blocks}.0.{GATE}" not in checkpoint.stored("denoiser", partition):
        return layout
    return replace(layout, keys={**layout.keys, "attention.gate.weight": GATE}, gated=True)
