"""A small byte-level BPE tokenizer with Qwen2's structure: same splitting rules and special tokens, its own merges."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MERGES = 256
"""Merges that are learned; with 256 bytes and the special tokens this gives a vocabulary of a few hundred."""

_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_H3_TOKENS = (
    "<d>",
    "</d>",
    "<|cutoff|>",
    "<|lyrics_start|>",
    "<|lyrics_end|>",
    "<|caption_start|>",
    "<|caption_end|>",
)
SPECIAL_TOKENS = _QWEN_TOKENS + _H3_TOKENS
"""Qwen's control and vision tokens, then the seven of H3, in the release's order."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenisation rule: a contraction, a word, one digit, punctuation, or white space."""

_CORPUS = """
A slow tracking shot follows a red fox through the snow at dawn while the wind moves the pine trees.
The camera tilts up from the river to the bridge, where a woman in a yellow coat is playing the violin.
Close-up of rain on a window at night; a train passes in the distance and its light crosses the room.
Two children run along the beach with a kite, laughing, and the waves break softly behind them.
An old man says: <Picture 1> is the harbour. The boats are leaving, the gulls are calling, the bells ring.
Wide aerial view of a city in the morning fog, warm light, soft music, cinematic, detailed, 24 frames per second.
<Video 1>: the dancer turns and the music stops. <Audio 1>: the crowd is cheering, then there is silence.
<0.5 seconds> the cat jumps onto the table <1.0 seconds> and the glass falls.
"""


@dataclass(frozen=True)
class TokenizerFiles:
    """The trained tokenizer; every file of a Hugging Face tokenizer directory is derived from it."""

    merges: tuple[tuple[str, str], ...]

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id of the byte symbols and merges; the special tokens follow."""
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        return {token: index for index, token in enumerate([*symbols, *(a + b for a, b in self.merges)])}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Special token -> id."""
        return {token: len(self.vocab) + index for index, token in enumerate(SPECIAL_TOKENS)}

    def files(self) -> dict[str, str]:
        """File name -> contents of `tokenizer/`."""
        merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in self.merges)
        return {
            "tokenizer.json": self._tokenizer().to_str(pretty=True) + "\n",
            "tokenizer_config.json": dumps(self._config()),
            "vocab.json": dumps(self.vocab),
            "merges.txt": merges,
        }

    def _tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(vocab=self.vocab, merges=list(self.merges)))
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
        return tokenizer

    def _config(self) -> dict[str, Any]:
        added = {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token, index in self.special_ids.items()
        }
        return {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 262144,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        }


def train() -> TokenizerFiles:
    """Learns merges from the built-in text: most frequent pair first, ties by the pair itself."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"), byte_level])
    words = Counter(tuple(piece) for piece, _ in splitter.pre_tokenize_str(_CORPUS))
    merges: list[tuple[str, str]] = []
    while len(merges) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): count for word, count in words.items()})
    return TokenizerFiles(tuple(merges))


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def dumps(value: Any) -> str:
    """JSON as the files of a checkpoint have it: indented, UTF-8, one final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
