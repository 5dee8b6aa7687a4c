"""Evaluates weight expressions on memory-mapped checkpoint files."""

from __future__ import annotations

import mmap

import torch

from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored, Weight


def materialise(weight: Weight) -> torch.Tensor:
    """The value of an expression on memory-mapped leaves; a `Stored` and views of it are returned without a copy.

    Raises:
        CheckpointError: a file has become shorter than its header says.
    """
    return weight.evaluate(map_stored)


def map_stored(stored: Stored) -> torch.Tensor:
    """The stored tensor as a view of its file; a part that does not lie together is copied.

    The mapping is private: writes to it never reach the file.

    Raises:
        CheckpointError: the file has become shorter than its header says.
    """
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=stored.dtype)
    size, end = stored.file.stat().st_size, stored.offset + stored.span
    if size < end:
        raise CheckpointError(stored.file, stored.key, f"a file of at least {end} bytes", f"{size} bytes")
    start = stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
    with stored.file.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), end - start, offset=start, access=mmap.ACCESS_COPY)
    count, first = stored.span // stored.dtype.itemsize, stored.offset - start
    flat = torch.frombuffer(pages, dtype=stored.dtype, count=count, offset=first)
    if stored.cut is not None:
        run, pitch = (nbytes // stored.dtype.itemsize for nbytes in stored.cut)
        flat = flat.as_strided((stored.nbytes // stored.cut.run, run), (pitch, 1))
    return flat.reshape(stored.shape)
