"""The text encoder: token ids and pictures to the conditioning rows, one decoder layer after the other.

Ranks may divide its tensors among themselves. Each then has some columns of the token table, which are gathered, and of
every layer some heads and inner channels: what they add to the rows is summed over the ranks, by the engine, or here
between the two engines of a layer. All ranks hold all rows, bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.sessions.engine_set import EngineSet
from engines.store import Manifest
from plugins.dimensions import TextEncoderDimensions
from plugins.exchanges import GROUP
from plugins.ranks import Group, handle_of
from runtime.events import Units
from runtime.vision import Picture

EMBEDDING, LAYER = "text_encoder.embedding", "text_encoder.layer"
SEGMENTS = ("text_encoder.layer.attend", "text_encoder.layer.feed")


def encoder_graphs(manifest: Manifest) -> tuple[str, ...]:
    """The text encoder's graphs: the embedding, and what a layer consists of."""
    return (EMBEDDING, *(SEGMENTS if SEGMENTS[0] in manifest.graphs else (LAYER,)))


@dataclass(frozen=True, eq=False)
class Placed:
    """A picture and the first of the consecutive token rows whose places it takes."""

    picture: Picture
    first: int

    @property
    def span(self) -> slice:
        """Its token rows."""
        return slice(self.first, self.first + len(self.picture.rows))


def mrope_positions(length: int, placed: Sequence[Placed], merge: int) -> torch.Tensor:
    """Positions int64 [3, length] (time, height, width) of token rows, as Qwen3-VL's get_rope_index gives them.

    Text counts up on all axes. A picture stands still in time and counts its merged rows and columns from there; what
    follows continues after its longer side. Frames of a video are pictures, which timestamps in the text separate.
    """
    pieces, position, row = [], 0, 0
    for one in placed:
        pieces.append(_text_positions(position, one.first - row))
        position += one.first - row
        height, width = (side // merge for side in one.picture.grid)
        pieces.append(_picture_positions(position, height, width))
        position += max(height, width)
        row = one.span.stop
    return torch.cat([*pieces, _text_positions(position, length - row)], dim=1)


def text_rotary(positions: torch.Tensor, dimensions: TextEncoderDimensions) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary cos and sin, float32 [L, head_dim] each, of positions int64 [3, L].

    Interleaved: of every three frequencies the first turns with time, the second with height, the third with width, as
    far as the sections of height and width reach; the others turn with time (spec/model.md 7.1).
    """
    half = torch.arange(0, dimensions.head_dim, 2, dtype=torch.float32) / dimensions.head_dim
    axes = torch.zeros(len(half), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * dimensions.mrope_section[axis] : 3] = axis
    angles = positions[axes].T.float() * (1.0 / dimensions.rope_theta**half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class TextEncoder:
    """Runs the kept decoder layers; the result is the raw, un-normed hidden state of the last one."""

    def __init__(self, engines: EngineSet, tensors: Group | None = None) -> None:
        """tensors: the ranks that divide its tensors, of whose parts the engines are this rank's."""
        self._engines, self._group = engines, tensors
        self._dimensions = engines.manifest.dimensions.text_encoder
        self._merge = engines.manifest.dimensions.vision.merge
        self._segmented = LAYER not in encoder_graphs(engines.manifest)

    @property
    def layers(self) -> int:
        """Units of one encoding."""
        return self._dimensions.layers

    def encode(self, token_ids: torch.Tensor, placed: Sequence[Placed], units: Units) -> torch.Tensor:
        """Conditioning [L, text_dim] on the engines' device in their compute dtype, of token ids [L] int64.

        placed: pictures in the order of their rows. One unit a layer; raises `Cancelled` between layers. Where ranks
        divide the tensors, all of them encode the same at the same time.
        """
        positions = mrope_positions(len(token_ids), placed, self._merge)
        cos, sin = (angles.to(self._engines.device) for angles in text_rotary(positions, self._dimensions))
        hidden = self._embedded(token_ids)
        for one in placed:
            hidden[one.span] = one.picture.rows.to(hidden)
        for layer in range(self.layers):
            with units.one(f"text encoder layer {layer + 1} of {self.layers}"):
                hidden = self._layer(layer, {"hidden": hidden, "cos": cos, "sin": sin})
                _add_deepstack(hidden, placed, layer)
        return hidden

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        columns = self._engines.run(EMBEDDING, {"token_ids": token_ids})["hidden"]
        if self._group is None:
            return columns
        return self._group.gather_rows(columns.T.contiguous(), self._dimensions.hidden).T.contiguous()

    def _layer(self, layer: int, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        if self._segmented:
            attend, feed = SEGMENTS
            hidden = self._add(rows["hidden"], self._engines.run(attend, rows, layer)["part"])
            return self._add(hidden, self._engines.run(feed, {"hidden": hidden}, layer)["part"])
        if self._group is not None:
            rows = {**rows, GROUP: torch.tensor([handle_of(self._group)])}
        return self._engines.run(LAYER, rows, layer)["hidden_out"]

    def _add(self, hidden: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        assert self._group is not None  # a layer is in segments where ranks divide it
        return hidden + self._group.sum(part).to(hidden)


def _add_deepstack(hidden: torch.Tensor, placed: Sequence[Placed], layer: int) -> None:
    """Adds, in place, what the vision tower's early blocks say to the first layers' picture rows."""
    for one in placed:
        if layer < len(one.picture.deepstack):
            hidden[one.span] += one.picture.deepstack[layer].to(hidden)


def _text_positions(start: int, rows: int) -> torch.Tensor:
    return torch.arange(start, start + rows).expand(3, -1)


def _picture_positions(start: int, height: int, width: int) -> torch.Tensor:
    down, across = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return start + torch.stack([torch.zeros_like(down).flatten(), down.flatten(), across.flatten()])
