"""The packed rows of one rank: which rows of each stream it embeds, and where in the sequence they lie.

A sequence of S rows is held in runs of n rows, as many on every rank; behind its last row the last ranks hold padding,
which goes through whatever works row by row, and never leaves its rank (spec/model.md 3 has the streams' order).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from runtime.packing import STREAMS, Layout, Stream


@dataclass(frozen=True, eq=False)
class RowShare:
    """A run of `local` rows from packed row `start` of a sequence of `rows`, some of which may be behind its end.

    streams: which rows of each stream are in it, one run of each. row_order: int64 [local], index of each row here into
    cat(text, audio, video) of those, 0 of padding.
    """

    rows: int
    start: int
    local: int
    streams: Mapping[Stream, slice]
    row_order: torch.Tensor

    @staticmethod
    def of(layout: Layout, local: int, rank: int) -> RowShare:
        """The share of one of the ranks that hold `local` rows each."""
        start = min(rank * local, layout.rows)
        packed = range(start, min(start + local, layout.rows))
        streams = {stream: _run(indices, packed) for stream, indices in _indices(layout).items()}
        order = torch.zeros(local, dtype=torch.int64)
        first = 0
        for stream, indices in _indices(layout).items():
            here = indices[streams[stream]] - start
            order[here] = first + torch.arange(len(here))
            first += max(1, len(here))
        return RowShare(layout.rows, start, local, streams, order)

    def to(self, device: torch.device) -> RowShare:
        """The same on a device."""
        return replace(self, row_order=self.row_order.to(device))

    def of_stream(self, stream: Stream, rows: torch.Tensor) -> torch.Tensor:
        """A stream's rows here, of all of its rows; where it has none, a row of zeros, which is nobody's."""
        here = rows[self.streams[stream]]
        return here if len(here) else rows.new_zeros(1, *rows.shape[1:])

    def of_packed(self, rows: torch.Tensor) -> torch.Tensor:
        """Of a tensor of packed rows [S, ...], those here [local, ...]; zeros in the place of padding."""
        here = rows[self.start : self.start + self.local]
        if len(here) == self.local:
            return here
        return torch.cat([here, rows.new_zeros(self.local - len(here), *rows.shape[1:])])


def _indices(layout: Layout) -> Mapping[Stream, torch.Tensor]:
    """The packed rows of each stream in stream order, in which they ascend."""
    found = {"text": layout.text_indices, "audio": layout.audio_indices, "video": layout.video_indices}
    return {stream: found[stream] for stream in STREAMS}


def _run(indices: torch.Tensor, packed: range) -> slice:
    """The rows of a stream that lie in a run of packed rows."""
    ends = torch.tensor([packed.start, packed.stop])
    first, last = torch.searchsorted(indices, ends).tolist()
    return slice(first, last)
