"""Finds the one file that a path stands for: a file, a folder with one adapter, a bundle with one variant."""

from __future__ import annotations

from pathlib import Path

from export.artifacts import fasth3
from export.checkpoint.errors import CheckpointError
from export.checkpoint.tree import CONTRACT

SUFFIX = ".safetensors"


def find_file(path: Path) -> Path:
    """The adapter's file.

    Raises:
        CheckpointError: there is none, several could be meant, or it is in another container than safetensors.
    """
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        raise CheckpointError(path, "file", "an adapter's file, or a folder with one", "no such file or directory")
    if path.suffix != SUFFIX:
        # Other containers of weights run code when they are opened.
        raise CheckpointError(path, "file name", f"a {SUFFIX} file; no other is opened", path.name)
    return path


def _in_folder(folder: Path) -> Path:
    files = sorted(child for child in folder.iterdir() if child.suffix == SUFFIX and child.is_file())
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(folder, "file", "one adapter, or the path of one of several", _names(files))
    variants = sorted(child for child in folder.iterdir() if (child / fasth3.FILE).is_file())
    if len(variants) == 1:
        return variants[0] / fasth3.FILE
    if variants:
        wanted = f"the path of one variant, such as {variants[0]}"
        raise CheckpointError(folder, "variant", wanted, f"several: {_names(variants)}")
    found = _names(sorted(folder.iterdir())) or "nothing"
    whole = f", or a whole student's {CONTRACT}" if (folder / "transformer").is_dir() else ""
    raise CheckpointError(folder, "file", f"an adapter's {SUFFIX} file{whole}", found)


def _names(paths: list[Path]) -> str:
    shown = ", ".join(path.name for path in paths[:8])
    return f"{shown}, ... ({len(paths)} in all)" if len(paths) > 8 else shown
