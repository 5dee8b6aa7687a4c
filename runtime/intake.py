"""Takes requests in: checks, resolves, admits and tokenises them. Imports no torch, so that it starts at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.store import EngineStore, Manifest
from runtime.admission import MemoryModel
from runtime.contract import TOKENS_MAXIMUM
from runtime.refusal import RequestError
from runtime.request import Resolved, resolve
from runtime.text import Tokenizer


class Intake:
    """The front of a pipeline: everything about a request that needs no engine."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        self._dimensions = manifest.dimensions
        self._memory = MemoryModel.of(manifest)
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, store: str | Path) -> Intake:
        """Reads a store's manifest and tokenizer. Raises StoreError when the store cannot be served from."""
        opened = EngineStore.open(store)
        return cls(opened.manifest, Tokenizer(opened.tokenizer_file))

    def resolve(self, prompt: bytes | str, params: Mapping[str, Any]) -> Resolved:
        """The request with every choice made, admitted to this machine's memory. Raises RequestError."""
        resolved = resolve(prompt, params, self._dimensions)
        self.admit(resolved, len(self.tokenize(resolved)))
        return resolved

    def admit(self, resolved: Resolved, text_rows: int) -> None:
        """Checks a resolved request that came over the wire, with that many text rows. Raises RequestError."""
        if not 1 <= text_rows <= TOKENS_MAXIMUM:
            raise RequestError("TEXT", f"{text_rows} rows", f"must have from 1 to {TOKENS_MAXIMUM} rows")
        self._memory.admit(resolved, text_rows)

    def tokenize(self, resolved: Resolved) -> NDArray[np.int64]:
        """Token ids of the prompt, [L]. Raises RequestError."""
        return self._tokenizer.encode(resolved.prompt)
