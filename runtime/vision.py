"""The vision tower of the text encoder: one picture, or one merged pair of video frames, a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.sessions.engine_set import EngineSet
from plugins.dimensions import VisionDimensions
from runtime.events import Units

VISION = ("vision_encoder.embed", "vision_encoder.block", "vision_encoder.merger", "vision_encoder.deepstack")
"""The graphs that see pictures."""


@dataclass(frozen=True, eq=False)
class Picture:
    """What the text encoder is shown of one picture.

    grid: (rows, columns) of patches. rows [n, text_dim] take the place of its pad tokens; deepstack: as many rows for
    each of the first text encoder layers, added to that layer's output.
    """

    grid: tuple[int, int]
    rows: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]


class VisionEncoder:
    """Runs the vision graphs. Attention is over all patches of a call, so that a call must be one picture."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._dimensions = engines.manifest.dimensions.vision

    def encode(self, patches: torch.Tensor, grid: tuple[int, int], units: Units) -> Picture:
        """The picture of patches float32 [4n, 1536] in merge order, on the engines' device. One unit; Cancelled."""
        size = self._dimensions
        indices, weights = position_interpolation(grid, size)
        inputs = {"patches": patches, "position_indices": indices, "position_weights": weights}
        with units.one(f"vision encoder, picture of {grid[0]} x {grid[1]} patches"):
            hidden = self._run("embed", inputs)["hidden"]
            cos, sin = (angles.to(self._engines.device) for angles in vision_rotary(grid, size))
            deepstack: list[torch.Tensor] = []
            for block in range(size.depth):
                units.check(f"vision encoder block {block + 1} of {size.depth}")
                hidden = self._run("block", {"hidden": hidden, "cos": cos, "sin": sin}, block)["hidden_out"]
                if block in size.deepstack:
                    deepstack.append(self._run("deepstack", {"hidden": hidden}, len(deepstack))["rows"])
            return Picture(grid, self._run("merger", {"hidden": hidden})["rows"], tuple(deepstack))

    def _run(self, part: str, inputs: dict[str, torch.Tensor], instance: int = 0) -> dict[str, torch.Tensor]:
        return self._engines.run(f"vision_encoder.{part}", inputs, instance=instance)


def patch_places(grid: tuple[int, int], merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column, int64 [4n] each, of the patches in the order in which the tower takes them.

    Squares of merge x merge patches follow each other row by row, as each becomes one row of the text encoder.
    """
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    squares = (grid[0] // merge, merge, grid[1] // merge, merge)
    return (
        rows.reshape(squares).transpose(1, 2).flatten(),
        columns.reshape(squares).transpose(1, 2).flatten(),
    )


def position_interpolation(grid: tuple[int, int], dimensions: VisionDimensions) -> tuple[torch.Tensor, torch.Tensor]:
    """How the square of learned positions is resampled to a picture: indices int64 and weights float32, [4, 4n] each.

    Bilinear with the corners aligned: patch k has the sum over i of weights[i, k] * positions[indices[i, k]]. Equal to
    the bit to transformers' get_vision_interpolation_indices_and_weights.
    """
    side = dimensions.position_grid
    (down, down_weights), (across, across_weights) = (_taps(cells, side) for cells in grid)
    rows, columns = patch_places(grid, dimensions.merge)
    indices = down[:, None, rows] * side + across[None, :, columns]
    weights = down_weights[:, None, rows] * across_weights[None, :, columns]
    return indices.flatten(0, 1), weights.flatten(0, 1)


def vision_rotary(grid: tuple[int, int], dimensions: VisionDimensions) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary cos and sin, float32 [4n, head_dim] each: a quarter of the angles from the row, a quarter from the
    column, and both again for the half that they are rotated with."""
    half = dimensions.head_dim // 2
    inverse = 1.0 / dimensions.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    angles = [places.unsqueeze(-1).float() * inverse for places in patch_places(grid, dimensions.merge)]
    full = torch.cat([*angles, *angles], dim=-1)
    return full.cos(), full.sin()


def _taps(cells: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two learned positions around each of `cells` places along a side, and their weights, [2, cells] each."""
    places = torch.arange(cells, dtype=torch.float32) * (side - 1) / max(cells - 1, 1)
    below = places.floor()
    first = 1 - (places - below)
    indices = torch.stack([below, (below + 1).clamp(max=side - 1)]).long()
    # The second weight is 1 - first and not the fraction itself, which differs in the last bits.
    return indices, torch.stack([first, 1 - first])
