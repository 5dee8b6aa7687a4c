"""Weight files that have a header and no data: those of a checkpoint that was made for its dimensions alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

BLOCK = 1 << 16
"""A file system keeps data in blocks of at most this size: beside the header's end, some of a hole may be one."""


def lacks_data(file: Path) -> bool:
    """Whether a safetensors file is a hole from the first block after its header on, and so reads as zeros there.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        header = 8 + int.from_bytes(opened.read(8), "little")
        start = -(-header // BLOCK) * BLOCK
        if start >= os.fstat(opened.fileno()).st_size:
            return False
        try:
            os.lseek(opened.fileno(), start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data up to the end
                return True
            raise
    return False
