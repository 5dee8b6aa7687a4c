"""Tensors whose file has no data at their place: those of a checkpoint that was made for its dimensions alone."""

from __future__ import annotations

import errno
import os

from export.checkpoint.expressions import Stored


def is_hole(stored: Stored) -> bool:
    """Whether all of a tensor lies in a hole of a sparse file, and so reads as zeros.

    Raises:
        OSError: the file cannot be read.
    """
    with stored.file.open("rb") as file:
        try:
            return os.lseek(file.fileno(), stored.offset, os.SEEK_DATA) >= stored.offset + stored.nbytes
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the file's end
                return True
            raise
