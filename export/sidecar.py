"""The file of a component's quantised weights, or of an adapter's: planned to the byte, then written in one stream.

The plan holds the file's header, so that its size, its hash and every tensor's offset are known, and may be bound and
declared, before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.materialise import map_stored, materialise
from export.checkpoint.safetensors_file import Declared, encode_header, laid_out, source_hashes
from export.graphs.graph import Graph
from export.linears import quantised_linears
from export.schemes import SCHEMES, Encoding, Scheme, SchemeError, SchemeName
from export.whole_file import Output, raw_bytes, whole_file

SLAB_VALUES = 1 << 20
"""Values that are encoded at a time: 4 MiB in float32, of which a handful are held; larger slabs are slower."""

Progress = Callable[[str, int, int], None]
"""Is told the name of the weight that is done, the bytes that have been written, and those of the whole file."""


class SidecarError(RuntimeError):
    """Weights that cannot be planned or written; says which, and why."""


@dataclass(frozen=True)
class Sidecar:
    """A planned file. `weights` has, for each weight that is in it, its tensors in the file by parameter name.

    `header` are the file's first bytes, with their length before them; `size` is the length of the whole file.
    """

    path: Path
    encoding: Encoding
    header: bytes
    size: int
    weights: Mapping[Weight, Mapping[str, Stored]]

    @property
    def scheme(self) -> Scheme:
        """How its weights are quantised, where it is a component's."""
        assert isinstance(self.encoding, Scheme)
        return self.encoding

    @property
    def header_sha256(self) -> str:
        """SHA-256 of the header, without its length, as readers of safetensors files compute it."""
        return hashlib.sha256(self.header[8:]).hexdigest()

    def sources(self) -> tuple[Stored, ...]:
        """The stored tensors that the weights are made of, each once."""
        return tuple(dict.fromkeys(leaf for weight in self.weights for leaf in weight.leaves()))

    def write(self, progress: Progress = lambda name, written, size: None) -> None:
        """Writes every weight into the file, which appears when it is complete.

        Memory stays below a few hundred megabytes however large the tensors are, except for weights that are computed
        from several: of those each is held whole. What an interrupted write has left behind is removed; one process at
        a time may write a file (a build holds its store's lock).

        Raises:
            SidecarError: the disk is full, or a weight is not finite.
            CheckpointError: a source file has become shorter than its header says.
        """
        with whole_file(self.path, self.size, SidecarError) as output:
            output.write(0, self.header)
            for weight, tensors in self.weights.items():
                self._encode(weight, tensors, output)
                progress(_name(weight), output.written, self.size)

    def _encode(self, weight: Weight, tensors: Mapping[str, Stored], output: Output) -> None:
        rows = _Rows(weight)
        whole = self.encoding.whole(slab for _, slab in rows)
        _check_finite(weight, whole)
        for name, value in whole.items():
            output.write(tensors[name].offset, raw_bytes(value))
        for start, slab in rows:
            parts = self.encoding.rows(slab, whole)
            _check_finite(weight, parts)
            for name, value in parts.items():
                row_bytes = value[0].numel() * value.element_size()
                output.write(tensors[name].offset + start * row_bytes, raw_bytes(value))


def plan_sidecar(graphs: Iterable[Graph], scheme: SchemeName, directory: Path, stem: str) -> Sidecar:
    """Plans the file of all quantised linear layers of those graphs; a weight that several share is in it once.

    Raises:
        LinearsError: a graph's linear layers are not those that are listed.
        SidecarError: a weight does not fit the scheme.
    """
    names = _names(weight for graph in graphs for weight in _quantised_weights(graph))
    return plan_file(names, SCHEMES[scheme], directory, stem)


def plan_file(names: Mapping[Weight, str], encoding: Encoding, directory: Path, stem: str) -> Sidecar:
    """Plans the file of some weights, each by a name of its own.

    The file's name is the stem and a part of the header's hash. Its metadata says how the weights are held, source
    files (below the directory that they share), the hashes of their headers and samples of their data: of other weights
    it is another file, which does not replace one that a finished store reads.

    Raises:
        SidecarError: a weight does not fit the encoding.
    """
    declared = {weight: _declare(encoding, weight) for weight in names}
    full_name = {w: {p: _tensor_name(names[w], encoding.suffixes[p]) for p in parts} for w, parts in declared.items()}
    tensors = {full_name[w][p]: one for w, parts in declared.items() for p, one in parts.items()}
    header, order, nbytes = encode_header(tensors, _metadata(encoding.name, names))
    digest = hashlib.sha256(header[8:]).hexdigest()
    path = directory / f"{stem}.{digest[:16]}.safetensors"
    stored = laid_out(path, tensors, order, len(header))
    weights = {w: {p: stored[name] for p, name in parts.items()} for w, parts in full_name.items()}
    return Sidecar(path, encoding, header, len(header) + nbytes, weights)


def _tensor_name(weight: str, suffix: str) -> str:
    return f"{weight}.{suffix}" if suffix else weight


def _quantised_weights(graph: Graph) -> Iterator[Weight]:
    names = quantised_linears(graph)
    for instance in graph.weights:
        yield from (instance[f"{name}.weight"] for name in names)


def _names(weights: Iterable[Weight]) -> dict[Weight, str]:
    """A name for each different weight: the key of the first tensor it is made of, numbered where that is taken."""
    names: dict[Weight, str] = {}
    users: dict[str, int] = {}
    for weight in weights:
        if weight not in names:
            key = _name(weight)
            number = users.setdefault(key, 0)
            names[weight] = f"{key}.{number}" if number else key
            users[key] += 1
    return names


def _name(weight: Weight) -> str:
    return next(weight.leaves()).key


def _declare(encoding: Encoding, weight: Weight) -> dict[str, Declared]:
    try:
        return encoding.tensors(weight.shape)
    except SchemeError as error:
        source = next(weight.leaves())
        raise SidecarError(f"{source.file}: {source.key}: {error}") from error


def _metadata(scheme: str, weights: Iterable[Weight]) -> dict[str, str]:
    files = {leaf.file for weight in weights for leaf in weight.leaves()}
    return {"scheme": scheme, "sources": source_hashes(files)}


class _Rows:
    """The rows of a weight in slabs, each with the index of its first row. A stored weight is mapped slab by slab."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._value = None if isinstance(weight, Stored) else materialise(weight)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        count, inner = self._weight.shape
        step = max(1, SLAB_VALUES // max(1, inner))
        for start in range(0, count, step):
            yield start, self._slab(start, min(start + step, count))

    def _slab(self, start: int, stop: int) -> torch.Tensor:
        if self._value is not None:
            return self._value[start:stop]
        assert isinstance(self._weight, Stored)  # or there is a value
        return map_stored(self._weight.slab(start, stop))


def _check_finite(weight: Weight, parts: Mapping[str, torch.Tensor]) -> None:
    """A value that is not finite makes its scale so, where there is one."""
    told = [value for value in parts.values() if value.dtype in (torch.float32, torch.bfloat16)]
    if not all(bool(value.isfinite().all()) for value in told):
        source = next(weight.leaves())
        raise SidecarError(f"{source.file}: {source.key}: holds values that are not finite; it cannot be served")
