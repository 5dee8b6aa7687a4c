"""Prompt to token ids: the checkpoint's own tokenizer, on the prompt verbatim (spec: model 7.2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from engines.store import rebuild_advice
from runtime.contract import PROMPT, TOKENS_MAXIMUM
from runtime.refusal import RequestError


class TokenizerError(RuntimeError):
    """A tokenizer file that cannot be used."""


class Tokenizer:
    """Byte-level BPE read from a tokenizer.json, with its added tokens (`<d>`, `<|lyrics_start|>`, ...)."""

    def __init__(self, file: Path | str) -> None:
        """Reads the file. Raises TokenizerError."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every fault
            # It lies in a folder of its store, whose builder copied it from the checkpoint.
            advice = rebuild_advice(Path(file).absolute().parents[1])
            raise TokenizerError(f"{file}: not a tokenizer ({error}); {advice}") from error
        # The file may carry settings of its training; a prompt is never cut and never filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def size(self) -> int:
        """Tokens that the tokenizer can produce, the added ones included: ids are below this."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, prompt: str) -> NDArray[np.int64]:
        """Token ids [L], no special tokens. Raises RequestError when there are none or more than TOKENS_MAXIMUM."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        if not ids:
            raise RequestError(PROMPT.name, prompt, "must have at least one token")
        if len(ids) > TOKENS_MAXIMUM:
            raise RequestError(
                PROMPT.name, prompt, f"must have at most {TOKENS_MAXIMUM} tokens, this one has {len(ids)}"
            )
        return np.array(ids, dtype=np.int64)
