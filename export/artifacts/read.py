"""Opens artifacts, whichever of the families they are of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from export.artifacts import fasth3, flashgen, turbo
from export.artifacts.artifact import Artifact
from export.artifacts.base import RELEASED, Base
from export.artifacts.fasth3_v2 import WholeStudent, check_sizes, is_fasth3_v2, read_fasth3_v2
from export.artifacts.find import find_file
from export.artifacts.fits import check_fits
from export.artifacts.payload import check_finite
from export.checkpoint import Checkpoint
from export.checkpoint.errors import CheckpointError
from export.checkpoint.hashes import file_hash
from export.checkpoint.safetensors_file import Header, read_header

MAX_HEADER_BYTES = 1 << 21
"""Of an adapter: those that are published have a tenth of a megabyte. A tensor that is named costs far more memory."""


def open_artifact(
    path: Path | str, checkpoint: Checkpoint | None = None, sha256: str | None = None
) -> Artifact | WholeStudent:
    """An artifact that is sound and, where a checkpoint is given, fits it: what may be fused or served.

    Headers and metadata are checked before any tensor is read. Then an adapter's file is read through once for its
    hash, which `sha256` pins, and once for numbers that are not finite. A whole student's tensors are not read.

    Without a checkpoint it must fit the released model.

    Raises:
        CheckpointError: it is of no known family, or is not what its family is; `sha256` is another, or is given for
            a student of several files.
    """
    base = RELEASED if checkpoint is None else Base.of(checkpoint)
    artifact = read_artifact(path, base)
    if checkpoint is not None:
        check_fits(artifact, checkpoint)
    if isinstance(artifact, WholeStudent):
        if sha256 is not None:
            raise CheckpointError(artifact.path, "sha256", "no hash, as it has several files", sha256)
        return artifact
    found = file_hash(artifact.path)
    if sha256 is not None and sha256.lower() != found:
        raise CheckpointError(artifact.path, "sha256", sha256.lower(), found)
    check_finite(artifact)
    distilled = artifact.distilled.model_copy(update={"sha256": found})
    return dataclasses.replace(artifact, distilled=distilled)


def read_artifact(path: Path | str, base: Base = RELEASED) -> Artifact | WholeStudent:
    """What an artifact's headers and metadata say, checked against the sizes of a model; no tensor is read.

    Raises:
        CheckpointError: it is of no known family, or is not what its family is.
    """
    root = Path(path)
    if root.is_dir() and is_fasth3_v2(root):
        student = read_fasth3_v2(root)
        check_sizes(student, base)
        return student
    header = read_header(find_file(root), MAX_HEADER_BYTES)
    return _read_adapter(header, base)


def _read_adapter(header: Header, base: Base) -> Artifact:
    """Takes the family from the metadata, and where these are silent from the file's name."""
    name, key_format = header.file.name, header.metadata.get("key_format")
    if header.metadata.get("format") == fasth3.FORMAT:
        return fasth3.read_fasth3(header, base)
    if "_comfyui" in name:
        wanted = "the same adapter in the diffusers layout; this one has q, k and v stacked in one projection"
        raise CheckpointError(header.file, "file name", wanted, name)
    if key_format == flashgen.KEY_FORMAT or name == flashgen.FILE:
        return flashgen.read_flashgen(header, base)
    if key_format == turbo.KEY_FORMAT or turbo.is_turbo_name(name):
        return turbo.read_turbo(header, base)
    families = f"metadata format {fasth3.FORMAT}, key_format {turbo.KEY_FORMAT} or {flashgen.KEY_FORMAT}"
    found = f"none of these ({', '.join(sorted(header.metadata)[:8]) or 'no metadata'})"
    raise CheckpointError(header.file, "__metadata__", f"{families}, or the name {turbo.NAMES}", found)
