"""Encoded prompts and references by the content that they come from, so that a repeated one is not encoded again.

The text encoder and the VAEs' encoders are deterministic and the same for all tasks, so that what they make of the same
bytes, fitted to the same sizes, is the same whatever the rest of the request says.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.presentation import Presentation
from runtime.references import Reference
from runtime.request import Resolved

Entry = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class CacheCounts:
    """What a cache did, and holds now."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    entries: int = 0


class ConditionCache:
    """Tensors on the host under keys, at most `capacity` bytes of them; the least recently used go first.

    With a capacity of 0 nothing is kept and nothing is counted. Threads may share it. What it returns is shared with
    later callers, and must not be written to.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._hits = self._misses = self._bytes = 0
        self._lock = threading.Lock()

    @property
    def counts(self) -> CacheCounts:
        """The counts by now."""
        with self._lock:
            return CacheCounts(self._hits, self._misses, self._bytes, len(self._entries))

    def get(self, key: str, make: Callable[[], Entry]) -> Entry:
        """The entry of a key, made if it is not there; what `make` raises leaves nothing behind."""
        found = self.find(key)
        return self.keep(key, make()) if found is None else found

    def find(self, key: str) -> Entry | None:
        """The entry of a key, counted as a hit, or None, as a miss."""
        if not self.capacity:
            return None
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
                self._entries.move_to_end(key)
            return found

    def keep(self, key: str, made: Entry) -> Entry:
        """Keeps an entry under a key if it is not larger than everything; returns it as it is kept."""
        if not self.capacity:
            return made
        entry = tuple(tensor.detach().cpu().contiguous() for tensor in made)
        size = _bytes(entry)
        if size > self.capacity:
            return entry
        with self._lock:
            if (other := self._entries.pop(key, None)) is not None:
                self._bytes -= _bytes(other)
            self._entries[key] = entry
            self._bytes += size
            while self._bytes > self.capacity:
                self._bytes -= _bytes(self._entries.popitem(last=False)[1])
        return entry


def reference_key(resolved: Resolved, place: int) -> str:
    """What the rows of reference `place` depend on: the file, how it is cut and fitted, and the posterior's seed."""
    return _digest("reference", _picture(resolved, place), str(resolved.condition_seed))


def prompt_key(resolved: Resolved, presented: Presentation) -> str:
    """What the text embedding depends on: the tokens, and the pictures of the vision blocks."""
    shown = [_picture(resolved, place) for place in sorted({block.reference for block in presented.vision})]
    return _digest("prompt", _array(presented.token_ids), _array(presented.tags), *shown)


def _picture(resolved: Resolved, place: int) -> str:
    one: Reference = resolved.references[place]
    # The first keyframe is stretched to the canvas, a second may be cropped.
    fitted = f"{resolved.keyframe_geometry} {place}" if one.role != "reference" else ""
    return _digest(one.model_dump_json(), fitted)


def _array(values: NDArray[np.int64]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def _digest(*parts: str) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{len(part)}:{part}".encode())
    return whole.hexdigest()


def _bytes(entry: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in entry)
