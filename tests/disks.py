"""File systems of their own size, for what a full disk does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def file_system(folder: Path, size: str) -> Iterator[Path]:
    """A new file system of that size, as mount takes it (64k, 20m), below a folder; skips where nobody may mount."""
    mounted = folder / "disk"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted)], capture_output=True)
    if made.returncode:
        pytest.skip(f"this user cannot mount a file system: {made.stderr.decode().strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)
