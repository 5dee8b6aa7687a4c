"""The miniature is the release in small: same tree, same classes; equal seeds give equal bytes."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import kaiser_sinc_filter1d
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2TokenizerFast

from export.checkpoint import Checkpoint, materialise
from export.checkpoint.tree import LayoutName
from export.miniature import write_miniature
from export.miniature.tokenizer import SPECIAL_TOKENS, train
from export.miniature.values import resampling_filter

H3_TOKENS = ["<d>", "</d>", "<|cutoff|>", "<|lyrics_start|>", "<|lyrics_end|>", "<|caption_start|>", "<|caption_end|>"]

TEXTS = [
    "A red fox runs through the snow at dawn, 24 frames.",
    "<d>Où est la gare ?</d> <|lyrics_start|>ララ\r\n  la<|lyrics_end|>",
    "e\u0301 é \u00a0 it's 3.14 — 日本語 🦊\n\n\tend  ",
    "<Picture 1>: <|vision_start|><|image_pad|><|video_pad|><|vision_end|>",
    "",
]


def hashes(root: Path) -> dict[str, str]:
    files = (file for file in root.rglob("*") if file.is_file())
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def root_of(layout: str, native_root: Path, diffusers_root: Path) -> Path:
    return native_root if layout == "native" else diffusers_root


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_equal_seeds_give_equal_bytes(
    tmp_path: Path, native_root: Path, diffusers_root: Path, layout: LayoutName
) -> None:
    write_miniature(tmp_path / "again", layout, 7)
    assert hashes(tmp_path / "again") == hashes(root_of(layout, native_root, diffusers_root))


def test_another_seed_changes_every_component_and_nothing_else(tmp_path: Path, diffusers_root: Path) -> None:
    write_miniature(tmp_path / "other", "diffusers", 8)
    ours, theirs = hashes(tmp_path / "other"), hashes(diffusers_root)
    assert ours.keys() == theirs.keys()
    changed = {name for name in ours if ours[name] != theirs[name]}
    assert changed == {name for name in ours if name.endswith(".safetensors")} | {"SHA256SUMS"}


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_a_checkpoint_is_under_60_megabytes(native_root: Path, diffusers_root: Path, layout: str) -> None:
    root = root_of(layout, native_root, diffusers_root)
    assert sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) < 60_000_000


def test_native_tree(native_root: Path) -> None:
    tokenizer = {"merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
    processor = {"chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json"}
    two = {"model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    expected = {
        "tokenizer": tokenizer,
        "processor": tokenizer | processor,
        "text_encoder": tokenizer | two | {"config.json"},
        "transformer": two | {"config.json"},
        "video_vae": {"config.json"},
        "video_vae/source": {"config.json", "model.safetensors"},
        "audio_vae": {"config.json", "config.yaml", "metadata.json", "model.safetensors"},
        ".": {"model_index.json"},
    }
    for partition in ("FL2VA", "Ref2VA"):
        for folder, names in expected.items():
            found = {path.name for path in (native_root / partition / folder).iterdir() if path.is_file()}
            assert found == names, (partition, folder)


def test_native_partitions_share_all_but_the_transformer(native_root: Path) -> None:
    files = hashes(native_root)
    fl2va = {name.removeprefix("FL2VA/"): value for name, value in files.items() if name.startswith("FL2VA/")}
    ref2va = {name.removeprefix("Ref2VA/"): value for name, value in files.items() if name.startswith("Ref2VA/")}
    assert fl2va.keys() == ref2va.keys()
    differing = {name for name in fl2va if fl2va[name] != ref2va[name]}
    shards = {name for name in fl2va if name.startswith("transformer/") and name.endswith(".safetensors")}
    assert differing == shards | {"model_index.json"}


def test_model_indices_name_the_released_classes(native_root: Path, diffusers_root: Path) -> None:
    native = json.loads((native_root / "Ref2VA/model_index.json").read_text())
    assert native["transformer"] == ["diffusers", "MiniMaxH3DiTModel"]
    assert native["_minimax_h3"]["tasks"] == ["ref2va"]
    modular = json.loads((diffusers_root / "modular_model_index.json").read_text())
    assert modular["_class_name"] == "MiniMaxH3ModularPipeline"
    assert modular["transformer_ref"][:2] == ["diffusers", "MiniMaxH3Transformer3DModel"]
    assert modular["transformer_ref"][2]["subfolder"] == "transformer_ref"


def test_a_directory_in_use_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"):
        write_miniature(tmp_path, "native", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="native or diffusers, found 'comfy'"):
        write_miniature(tmp_path / "out", "comfy", 0)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_dimensions_that_algorithms_depend_on_are_the_release_s(native_root: Path) -> None:
    sizes = Checkpoint.open(native_root).dimensions
    denoiser, video, audio = sizes.denoiser, sizes.video_vae, sizes.audio_vae
    assert (denoiser.head_dim, denoiser.heads, denoiser.rope_frequencies) == (128, 8, 16)
    assert (denoiser.video_row, denoiser.audio_channels, denoiser.refiner_layers) == (96, 32, 2)
    assert (video.tile, video.tile_overlap, video.chunk_latents, video.chunk_frames) == (256, 64, 7, 28)
    assert (video.clip_frames, video.spatial_ratio, audio.hop, audio.sample_rate) == (17, 16, 800, 32000)
    assert (sizes.text_encoder.layers, sizes.text_encoder.kv_heads) == (50, 8)


def test_tokenizer_ids_are_dense_and_cover_bytes_merges_and_special_tokens() -> None:
    tokenizer = train()
    ids = sorted(tokenizer.vocab.values()) + [tokenizer.special_ids[token] for token in SPECIAL_TOKENS]
    assert ids == list(range(256 + len(tokenizer.merges) + len(SPECIAL_TOKENS)))
    assert list(SPECIAL_TOKENS[-7:]) == H3_TOKENS


def test_special_tokens_are_single_ids_inside_the_embedding_table(native_root: Path) -> None:
    checkpoint = Checkpoint.open(native_root)
    tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
    vision = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    for token in H3_TOKENS + vision:
        (index,) = tokenizer.encode(token, add_special_tokens=False).ids
        assert index < checkpoint.dimensions.text_encoder.vocab
    config = checkpoint.config("text_encoder")
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    assert [config[key] for key in keys] == [tokenizer.token_to_id(token) for token in vision]


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_tokenises_as_the_tokenizer_file_does(diffusers_root: Path, text: str) -> None:
    file = Tokenizer.from_file(str(diffusers_root / "tokenizer" / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(diffusers_root / "tokenizer")
    assert isinstance(theirs, Qwen2TokenizerFast)
    assert theirs(text, add_special_tokens=False)["input_ids"] == file.encode(text, add_special_tokens=False).ids


def test_merges_shorten_english_and_lose_nothing(diffusers_root: Path) -> None:
    tokenizer = Tokenizer.from_file(str(diffusers_root / "tokenizer" / "tokenizer.json"))
    text = "the camera follows a woman through the rain"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) < len(text) / 2
    assert tokenizer.decode(ids) == text


def test_stored_resampling_filters_are_those_of_diffusers(native_root: Path) -> None:
    theirs = kaiser_sinc_filter1d(cutoff=0.25, half_width=0.3, kernel_size=12)
    # Ours is float64 rounded once, theirs float32 throughout: a few last places of the largest tap, 0.4.
    torch.testing.assert_close(torch.from_numpy(resampling_filter()), theirs, rtol=0, atol=2e-7)
    stored = Checkpoint.open(native_root).stored("audio_vae")
    for key, one in stored.items():
        if key.endswith("filter"):
            torch.testing.assert_close(materialise(one), theirs, rtol=0, atol=2e-7)


def test_norms_biases_and_gates_are_not_neutral(native_root: Path) -> None:
    """A value of 0 or 1 everywhere would hide an implementation that leaves the parameter out."""
    checkpoint = Checkpoint.open(native_root)
    neutral = {"rope.inv_freq", "decoder.mask_token", "pre_block.attn.zero_k_bias"}
    for component in ("denoiser", "text_encoder", "video_vae", "audio_vae"):
        for key, stored in checkpoint.stored(component).items():  # type: ignore[arg-type]
            values = materialise(stored).float()
            assert key in neutral or not ((values == 0) | (values == 1)).all(), (component, key)
