"""Fuses an artifact into the tensors that it changes: one file of them, as the base's own files hold them.

The file is planned to the byte, then written in one stream, rows by rows: what is read of the base is read once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from export.artifacts.artifact import Artifact, Patch
from export.artifacts.patched import Addition, added
from export.checkpoint import Checkpoint, CheckpointError
from export.checkpoint.catalogue import expect
from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.materialise import map_stored
from export.checkpoint.recipes import Run, Whole, runs
from export.checkpoint.safetensors_file import Declared, encode_header, laid_out, source_hashes
from export.whole_file import Output, raw_bytes, whole_file

SLAB_VALUES = 1 << 22
"""Values that are fused at a time: 16 MiB in float32, of which a handful are held."""

Progress = Callable[[str, int, int], None]
"""Is told the key of the tensor that is done, the bytes that have been written, and those of the whole file."""


class FusionError(RuntimeError):
    """An artifact that cannot be fused; says which tensor or file, and why."""


@dataclass(frozen=True)
class Change:
    """What becomes of some rows of a stored tensor: `patch`, None where they stay as they are."""

    run: Run
    patch: Patch | None


@dataclass(frozen=True)
class Target:
    """A tensor of the file: made of the base's, with changes that cover its rows in order, or injected."""

    declared: Declared
    base: Stored | None
    changes: tuple[Change, ...]
    injected: Weight | None


@dataclass(frozen=True)
class Fusion:
    """A planned file. `tensors` has, by stored key, each tensor that takes its place in the base's, or is new there.

    `header` are the file's first bytes, with their length before them; `size` is the length of the whole file.
    """

    path: Path
    header: bytes
    size: int
    tensors: Mapping[str, Stored]
    targets: Mapping[str, Target]

    @property
    def header_sha256(self) -> str:
        """SHA-256 of the header, without its length, as readers of safetensors files compute it."""
        return hashlib.sha256(self.header[8:]).hexdigest()

    def sources(self) -> tuple[Stored, ...]:
        """The stored tensors that the file is made of, each once."""
        return tuple(dict.fromkeys(leaf for target in self.targets.values() for leaf in _leaves(target)))

    def write(
        self,
        progress: Progress = lambda key, written, size: None,
        read: Callable[[Stored], torch.Tensor] = map_stored,
    ) -> str:
        """Writes the file, which appears when it is complete, and returns its SHA-256.

        read: gives the values of a stored tensor, or of some of its rows; of the base every row is asked for once.

        Memory stays at a few slabs and one patch's tensors in float32, however large the base's tensors are.

        Raises:
            FusionError: the disk is full, or a result is not finite.
            CheckpointError: a source file has become shorter than its header says.
        """
        digest = hashlib.sha256(self.header)
        with whole_file(self.path, self.size, FusionError) as output:
            output.write(0, self.header)
            for key, stored in self.tensors.items():
                self._write(key, stored, read, digest.update, output)
                progress(key, output.written, self.size)
        return digest.hexdigest()

    def _write(
        self,
        key: str,
        stored: Stored,
        read: Callable[[Stored], torch.Tensor],
        hashed: Callable[[memoryview], None],
        output: Output,
    ) -> None:
        offset = stored.offset
        for value in _values(self.targets[key], read):
            # A twentieth of the time that isfinite takes over all values; one that is not finite is an extreme.
            if not all(extreme.isfinite() for extreme in torch.aminmax(value)):
                raise FusionError(f"{self.path.name}: {key}: would hold values that are not finite; it is not fused")
            data = raw_bytes(value)
            hashed(data)
            output.write(offset, data)
            offset += len(data)


def plan_fusion(artifact: Artifact, checkpoint: Checkpoint, partition: str, directory: Path, stem: str) -> Fusion:
    """Plans the file of every tensor of a partition's transformer that an artifact changes or adds.

    The file's name is the stem and a part of the header's hash, which differs for other sources.

    Raises:
        CheckpointError: the artifact changes what the transformer has not, adds what it has, or has other shapes.
    """
    targets = _targets(artifact, checkpoint, partition)
    declared = {key: target.declared for key, target in targets.items()}
    files = {leaf.file for target in targets.values() for leaf in _leaves(target)}
    metadata = {"adapter": artifact.distilled.name, "sources": source_hashes(files)}
    header, order, nbytes = encode_header(declared, metadata)
    path = directory / f"{stem}.{hashlib.sha256(header[8:]).hexdigest()[:16]}.safetensors"
    return Fusion(path, header, len(header) + nbytes, laid_out(path, declared, order, len(header)), targets)


def _targets(artifact: Artifact, checkpoint: Checkpoint, partition: str) -> dict[str, Target]:
    catalogue = checkpoint.catalogue("denoiser", partition)
    expectation = expect(catalogue.config, checkpoint.layout, gates=True)
    recipes = expectation.recipes or {}
    changes: dict[str, list[Change]] = {}
    targets: dict[str, Target] = {}
    for name, patch in artifact.patches.items():
        recipe = recipes.get(name, Whole(name))
        base = catalogue.files.tensors.get(recipe.key)
        if patch.injected is not None:
            declared = expectation.stored.get(recipe.key)
            if base is not None or declared is None or declared.shape != patch.injected.shape:
                wanted = "the gate of a block, which the base lacks"
                raise CheckpointError(artifact.path, name, wanted, Declared(patch.injected.shape, patch.injected.dtype))
            targets[recipe.key] = Target(declared, None, (), patch.injected)
            continue
        parameter = catalogue.parameters.get(name)
        if base is None or parameter is None:
            raise CheckpointError(artifact.path, name, f"a parameter of {checkpoint.root}", "one that it lacks")
        _check_shapes(artifact, name, patch, parameter)
        places = runs(recipe, parameter.shape[0], catalogue.qkv_layout)
        changes.setdefault(recipe.key, []).extend(Change(run, patch) for run in places)
    for key, found in changes.items():
        stored = catalogue.files.tensors[key]
        covering = tuple(_covering(found, stored.shape[0]))
        targets[key] = Target(Declared(stored.shape, stored.dtype), stored, covering, None)
    return targets


def _check_shapes(artifact: Artifact, name: str, patch: Patch, parameter: Weight) -> None:
    shapes = [] if patch.difference is None else [patch.difference.shape]
    if patch.low_rank is not None:
        up, down = patch.low_rank.up.shape, patch.low_rank.down.shape
        shapes.append((up[0], down[1]) if len(up) == len(down) == 2 and up[1] == down[0] else (*up, *down))
    for shape in shapes:
        if shape != parameter.shape:
            raise CheckpointError(artifact.path, name, f"a change of {list(parameter.shape)}", list(shape))


def _covering(changes: list[Change], rows: int) -> Iterator[Change]:
    """The changes in the order of their stored rows, and the rows between them that stay."""
    position = 0
    for change in sorted(changes, key=lambda change: change.run.stored):
        if change.run.stored > position:
            yield Change(Run(position, position, change.run.stored - position), None)
        yield change
        position = change.run.stored + change.run.rows
    if position < rows:
        yield Change(Run(position, position, rows - position), None)


def _leaves(target: Target) -> Iterator[Stored]:
    if target.base is not None:
        yield target.base
    patches = dict.fromkeys(change.patch for change in target.changes if change.patch is not None)
    weights = [weight for patch in patches for weight in added(patch)]
    for weight in weights if target.injected is None else [target.injected]:
        yield from weight.leaves()


def _values(target: Target, read: Callable[[Stored], torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensor's rows in order, in pieces."""
    if target.injected is not None:
        yield target.injected.evaluate(read).to(target.declared.dtype)
        return
    assert target.base is not None
    additions: dict[Patch, Addition] = {}
    step = max(1, SLAB_VALUES // max(1, prod(target.base.shape[1:])))
    for change in target.changes:
        for start in range(0, change.run.rows, step):
            first, rows = change.run.stored + start, min(step, change.run.rows - start)
            base = read(target.base.slab(first, first + rows))
            if change.patch is None:
                yield base
                continue
            if change.patch not in additions:
                additions[change.patch] = Addition.of(change.patch, read)
            yield additions[change.patch].to(base, change.run.parameter + start)
