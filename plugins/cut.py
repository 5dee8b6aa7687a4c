"""Which bytes of a tensor a rank has, where the ranks of a group divide it among themselves."""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """A rank has runs of `run` bytes, one every `pitch` bytes; the other ranks' follow it, in their order.

    So are divided the rows of a matrix (one run), its columns (a run for each row), and the rows of each of several
    matrices that are stacked (a run for each).
    """

    run: int
    pitch: int

    @property
    def ranks(self) -> int:
        """How many ranks divide the tensor."""
        return self.pitch // self.run

    def span(self, nbytes: int) -> int:
        """Bytes from the first to the last of one rank's, which are `nbytes` in all."""
        return nbytes // self.run * self.pitch - self.pitch + self.run
