"""Tokenization: verbatim, without special tokens, added tokens recognised, bounded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from export.miniature.tokenizer import SPECIAL_TOKENS, train
from runtime.contract import TOKENS_MAXIMUM
from runtime.request import RequestError
from runtime.text import Tokenizer, TokenizerError

MARKUP = "<d>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of the released one's make, which also carries what must be overruled: a post-processor that
    adds a token, truncation and padding."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a cat plays the piano while the rain falls"] * 4, trainer)
    tokenizer.add_tokens([AddedToken(MARKUP, normalized=False)])
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.token_to_id("<|end|>"))]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def _text_of(file: Path, ids: np.ndarray) -> str:
    return tokenizers.Tokenizer.from_file(str(file)).decode(ids.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(
    "prompt", ["a", "  two spaces ", "line\r\nline\n", "猫がピアノを弾く 🎹", "<d>Hello</d>", "x" * 500]
)
def test_the_ids_say_the_prompt_and_nothing_else(file: Path, prompt: str) -> None:
    ids = Tokenizer(file).encode(prompt)
    assert ids.dtype == np.int64
    assert ids.ndim == 1
    assert _text_of(file, ids) == prompt


def test_an_added_token_is_one_token(file: Path) -> None:
    tokenizer = Tokenizer(file)
    (markup,) = tokenizer.encode(MARKUP).tolist()
    assert tokenizer.encode(f"a{MARKUP}b").tolist().count(markup) == 1
    assert markup < tokenizer.size


def test_a_prompt_without_tokens_is_refused(file: Path, tmp_path: Path) -> None:
    stripping = json.loads(file.read_text())
    stripping["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    changed = tmp_path / "tokenizer.json"
    changed.write_text(json.dumps(stripping))
    assert len(Tokenizer(file).encode(" ")) == 1
    with pytest.raises(RequestError, match="prompt: got ' '; must have at least one token"):
        Tokenizer(changed).encode(" ")


def test_a_prompt_of_too_many_tokens_is_refused(file: Path) -> None:
    tokenizer = Tokenizer(file)
    # Repeated with a space between, each word costs the same number of tokens.
    each = len(tokenizer.encode(" zq zq")) - len(tokenizer.encode(" zq"))
    fitting = " zq" * (TOKENS_MAXIMUM // each)
    assert len(tokenizer.encode(fitting)) <= TOKENS_MAXIMUM
    with pytest.raises(RequestError, match=f"at most {TOKENS_MAXIMUM} tokens, this one has"):
        tokenizer.encode(fitting + " zq" * each)


@pytest.fixture(scope="module")
def checkpoint_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer files of the miniature checkpoint, as they lie in its directory."""
    directory = tmp_path_factory.mktemp("checkpoint_tokenizer")
    for name, content in train().files().items():
        (directory / name).write_text(content, encoding="utf-8")
    return directory


@settings(deadline=None)
@given(st.lists(st.sampled_from(SPECIAL_TOKENS) | st.text(), min_size=1).map("".join).filter(bool))
def test_ids_equal_those_of_transformers(checkpoint_tokenizer: Path, prompt: str) -> None:
    expected = _upstream(checkpoint_tokenizer)(prompt, add_special_tokens=False)["input_ids"]
    assert type(_upstream(checkpoint_tokenizer)).__name__.startswith("Qwen2Tokenizer")
    assert Tokenizer(checkpoint_tokenizer / "tokenizer.json").encode(prompt).tolist() == expected


@cache
def _upstream(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("content", [None, "", "{}", "not JSON"])
def test_a_file_that_is_no_tokenizer_is_named_with_the_command_that_mends_it(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*h3trt engines"):
        Tokenizer(path)
