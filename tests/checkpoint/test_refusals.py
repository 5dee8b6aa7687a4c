"""A checkpoint that is not what its configuration says is refused, naming file, key, expected and found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export.checkpoint import Checkpoint, CheckpointError, materialise
from export.checkpoint.safetensors_file import read_header, write_tensors

Copy = Callable[[Path], Path]


def edit_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    header = read_header(file)
    tensors = {key: materialise(stored).clone() for key, stored in header.tensors.items()}
    change(tensors)
    write_tensors(file, tensors, header.metadata)


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.pop(key)


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update({key: value})


AUDIO = "audio_vae/diffusion_pytorch_model.safetensors"
BIAS = "dec_in_proj.bias"


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        (drop(BIAS), BIAS, r"expected F32 \[64\], found no such tensor"),
        (put("decoder.extra", torch.ones(2)), "decoder.extra", r"found an unexpected F32 \[2\]"),
        (put(BIAS, torch.ones(64, dtype=torch.bfloat16)), BIAS, r"expected F32 \[64\], found BF16 \[64\]"),
        (put(BIAS, torch.ones(32)), BIAS, r"expected F32 \[64\], found F32 \[32\]"),
        (put(BIAS, torch.ones(64, 1)), BIAS, r"expected F32 \[64\], found F32 \[64, 1\]"),
    ],
)
def test_tensors_must_be_those_of_the_configuration(
    diffusers_root: Path, copied: Copy, change: Callable[[dict[str, Any]], None], key: str, message: str
) -> None:
    root = copied(diffusers_root)
    edit_tensors(root / AUDIO, change)
    with pytest.raises(CheckpointError, match=message) as refused:
        Checkpoint.open(root)
    assert (refused.value.file, refused.value.key) == (root / AUDIO, key)


def test_a_native_fused_tensor_of_the_wrong_shape_is_refused(native_root: Path, copied: Copy) -> None:
    root = copied(native_root / "FL2VA")
    shard = next((root / "transformer").glob("*-00001-of-*.safetensors"))
    key = "blocks.0.attn.qkv_proj.weight"
    edit_tensors(shard, put(key, torch.zeros(1024, 192, dtype=torch.bfloat16)))
    (shard.parent / "model.safetensors.index.json").write_text(_index_without_total(shard.parent))
    with pytest.raises(CheckpointError, match=r"BF16 \[3072, 192\], found BF16 \[1024, 192\]") as refused:
        Checkpoint.open(root)
    assert (refused.value.file, refused.value.key) == (shard, key)


def _index_without_total(directory: Path) -> str:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return json.dumps({"weight_map": index["weight_map"]})


def test_a_shard_key_missing_from_a_sharded_component_names_the_index(native_root: Path, copied: Copy) -> None:
    root = copied(native_root / "FL2VA")
    directory = root / "transformer"
    index = directory / "model.safetensors.index.json"
    key = "final_layer.norm.weight"
    shard = directory / json.loads(index.read_text())["weight_map"][key]
    edit_tensors(shard, drop(key))
    index.write_text(_index_without_total(directory))
    edit_json(index, lambda values: values["weight_map"].pop(key))
    with pytest.raises(CheckpointError, match="no such tensor") as refused:
        Checkpoint.open(root)
    assert (refused.value.file, refused.value.key) == (index, key)


NATIVE_CONFIGS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("transformer/config.json", drop("latents_dim"), "latents_dim"),
    ("transformer/config.json", put("num_layers", "2"), "num_layers"),
    ("transformer/config.json", put("num_layers", True), "num_layers"),
    ("transformer/config.json", put("ffn_hidden_size", -1), "ffn_hidden_size"),
    ("transformer/config.json", put("hidden_size", None), "hidden_size"),
    ("transformer/config.json", put("adaln_out_features", 1), "adaln_out_features"),
    ("transformer/config.json", put("patch_size", [1, 2]), "patch_size.2"),
    ("video_vae/config.json", drop("vae_clip_length"), "vae_clip_length"),
    ("video_vae/config.json", put("vae_token_drop", 1.5), "vae_token_drop"),
    ("video_vae/config.json", put("latents_mean", [0.0] * 23), "latents_mean"),
    ("video_vae/source/config.json", put("use_vit_decoder", False), "use_vit_decoder"),
    ("video_vae/source/config.json", put("ch_mult", 3), "ch_mult"),
    ("video_vae/source/config.json", put("time_down", [1, 2]), "time_down"),
    ("video_vae/source/config.json", put("vit_decoder_kwargs", []), "vit_decoder_kwargs"),
    (
        "video_vae/source/config.json",
        lambda values: values["vit_decoder_kwargs"].update(heads="2"),
        "vit_decoder_kwargs.heads",
    ),
    ("audio_vae/config.json", put("sample_rate", 44100), "sample_rate"),
    ("audio_vae/config.json", put("latents_std", [1.0] * 31), "latents_std"),
    ("audio_vae/metadata.json", put("metadata", None), "metadata"),
    (
        "audio_vae/metadata.json",
        lambda values: values["metadata"]["kwargs"].update(decoder_rates=[5, 5, 2]),
        "metadata.kwargs.decoder_rates",
    ),
    ("text_encoder/config.json", put("tie_word_embeddings", True), "tie_word_embeddings"),
    (
        "text_encoder/config.json",
        lambda values: values["vision_config"].update(deepstack_visual_indexes=[0, 1, 4]),
        "vision_config.deepstack_visual_indexes",
    ),
    ("processor/preprocessor_config.json", drop("image_mean"), "image_mean"),
    ("processor/preprocessor_config.json", put("patch_size", 14), "patch_size"),
    ("processor/preprocessor_config.json", put("size", {"longest_edge": 9}), "size.shortest_edge"),
    ("processor/preprocessor_config.json", put("min_pixels", 1 << 25), "size.shortest_edge"),
    ("processor/preprocessor_config.json", put("resample", 2), "resample"),
    ("processor/video_preprocessor_config.json", put("image_std", [0.5, 0.5, 0.4]), "image_std"),
    ("processor/video_preprocessor_config.json", put("cap_pixels_per_frame", True), "cap_pixels_per_frame"),
    ("model_index.json", drop("_minimax_h3"), "_minimax_h3"),
    ("model_index.json", lambda values: values["_minimax_h3"].update(partition="t2va"), "_minimax_h3.partition"),
    ("model_index.json", lambda values: values["_minimax_h3"].update(sigma_shift_scales={"video": 12}), "audio"),
    ("model_index.json", lambda values: values["_minimax_h3"]["sigma_shift_scales"].update(video=-1), "video"),
]


@pytest.mark.parametrize(("file", "change", "key"), NATIVE_CONFIGS, ids=[f"{f}:{k}" for f, _, k in NATIVE_CONFIGS])
def test_a_native_configuration_value_is_refused_by_file_and_key(
    native_root: Path, copied: Copy, file: str, change: Callable[[dict[str, Any]], None], key: str
) -> None:
    root = copied(native_root / "FL2VA")
    edit_json(root / file, change)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(root)
    assert (refused.value.file, refused.value.key) == (root / file, key)


def test_a_partition_in_the_wrong_folder_is_refused(native_root: Path, copied: Copy) -> None:
    root = copied(native_root)
    (root / "FL2VA").rename(root / "spare")
    (root / "Ref2VA").rename(root / "FL2VA")
    with pytest.raises(CheckpointError, match=r"_minimax_h3.partition: expected 'fl2va', found 'ref2va'"):
        Checkpoint.open(root)


def test_partitions_of_different_sizes_are_refused(native_root: Path, copied: Copy) -> None:
    root = copied(native_root)
    edit_json(root / "Ref2VA" / "model_index.json", lambda v: v["_minimax_h3"]["sigma_shift_scales"].update(video=6))
    with pytest.raises(CheckpointError, match="the sizes and shifts of fl2va"):
        Checkpoint.open(root)


def test_an_unknown_diffusers_argument_is_refused(diffusers_root: Path, copied: Copy) -> None:
    root = copied(diffusers_root)
    edit_json(root / "transformer" / "config.json", put("use_sliding_window", True))
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        Checkpoint.open(root)


def test_too_few_text_encoder_layers_are_refused(diffusers_root: Path, copied: Copy) -> None:
    root = copied(diffusers_root)
    directory = root / "text_encoder"
    edit_json(directory / "config.json", lambda values: values["text_config"].update(num_hidden_layers=50))
    for shard in directory.glob("*.safetensors"):
        edit_tensors(shard, _drop_layers)
    index = directory / "model.safetensors.index.json"
    kept = {key: name for key, name in json.loads(index.read_text())["weight_map"].items() if not _late(key)}
    index.write_text(json.dumps({"weight_map": kept}))
    with pytest.raises(CheckpointError, match="more than 50"):
        Checkpoint.open(root)


def _late(key: str) -> bool:
    return key.startswith(("model.language_model.layers.50.", "model.language_model.layers.51."))


def _drop_layers(tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if _late(key)]:
        del tensors[key]


@pytest.mark.parametrize(
    ("file", "found"),
    [("tokenizer/tokenizer.json", "no such file"), ("audio_vae/metadata.json", "No such file")],
)
def test_a_missing_file_is_named(native_root: Path, copied: Copy, file: str, found: str) -> None:
    root = copied(native_root / "FL2VA")
    (root / file).unlink()
    with pytest.raises(CheckpointError, match=found) as refused:
        Checkpoint.open(root)
    assert refused.value.file == root / file


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="FL2VA/ or Ref2VA/"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "absent")


def test_a_partition_that_is_not_there_is_refused(native_root: Path) -> None:
    checkpoint = Checkpoint.open(native_root / "FL2VA")
    with pytest.raises(CheckpointError, match="one of fl2va, found ref2va"):
        checkpoint.stored("denoiser", "ref2va")


def test_listed_hashes_are_verified(diffusers_root: Path) -> None:
    seen: list[Path] = []
    files = Checkpoint.open(diffusers_root).verify_hashes(seen.append)
    on_disk = {file for file in diffusers_root.rglob("*") if file.is_file()}
    assert set(files) == set(seen) == on_disk - {diffusers_root / "SHA256SUMS"}


def test_a_changed_byte_of_data_is_found_by_its_hash(diffusers_root: Path, copied: Copy) -> None:
    root = copied(diffusers_root)
    with (root / AUDIO).open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)[0]
        stream.seek(-1, 2)
        stream.write(bytes([last ^ 1]))
    checkpoint = Checkpoint.open(root)
    with pytest.raises(CheckpointError, match=r"sha256: expected [0-9a-f]{64}, found [0-9a-f]{64}") as refused:
        checkpoint.verify_hashes()
    assert refused.value.file == root / AUDIO


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{'0' * 64}  absent.bin\n", "no such file"),
        (f"{'0' * 64}  ../outside\n", "below the root"),
        ("garbage\n", "line 1"),
    ],
)
def test_a_list_of_hashes_must_be_sound(diffusers_root: Path, copied: Copy, line: str, message: str) -> None:
    root = copied(diffusers_root)
    (root / "SHA256SUMS").write_text(line)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(root).verify_hashes()


def test_verifying_needs_a_list(diffusers_root: Path, copied: Copy) -> None:
    root = copied(diffusers_root)
    (root / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="SHA256SUMS"):
        Checkpoint.open(root).verify_hashes()


def test_the_sample_follows_the_data(diffusers_root: Path, copied: Copy) -> None:
    root = copied(diffusers_root)
    original = Checkpoint.open(diffusers_root).sample
    assert Checkpoint.open(root).sample == original
    file = max(root.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert Checkpoint.open(root).sample != original


def test_the_fingerprint_follows_configurations_tokenizer_and_headers(diffusers_root: Path, copied: Copy) -> None:
    root = copied(diffusers_root)
    original = Checkpoint.open(diffusers_root).fingerprint
    assert Checkpoint.open(root).fingerprint == original
    prints = {original}
    edit_json(root / "scheduler" / "scheduler_config.json", put("shift", 6.0))
    prints.add(Checkpoint.open(root).fingerprint)
    edit_json(root / "processor" / "preprocessor_config.json", put("image_mean", [0.4, 0.5, 0.5]))
    edit_json(root / "processor" / "video_preprocessor_config.json", put("image_mean", [0.4, 0.5, 0.5]))
    prints.add(Checkpoint.open(root).fingerprint)
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    prints.add(Checkpoint.open(root).fingerprint)
    file = root / AUDIO
    header = read_header(file)
    write_tensors(file, {key: materialise(one).clone() for key, one in header.tensors.items()}, {"note": "re-saved"})
    prints.add(Checkpoint.open(root).fingerprint)
    assert len(prints) == 5
