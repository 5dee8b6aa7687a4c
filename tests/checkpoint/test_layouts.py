"""Both layouts give the same parameters, under the names and shapes of the diffusers and transformers classes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from export.checkpoint import Checkpoint, CheckpointError, Weight, materialise
from export.checkpoint.components import audio_vae, denoiser, text_encoder, video_vae
from export.checkpoint.safetensors_file import Declared, read_header, write_tensors
from export.checkpoint.tree import COMPONENTS, Component
from export.miniature.sizes import Sizes, released
from export.miniature.tokenizer import train

CLASSES: dict[Component, Any] = {
    "denoiser": MiniMaxH3Transformer3DModel,
    "video_vae": AutoencoderKLMiniMaxH3,
    "audio_vae": AutoencoderKLMiniMaxH3Audio,
}
FOLDERS: dict[Component, str] = {"denoiser": "transformer", "video_vae": "vae", "audio_vae": "audio_vae"}


@pytest.fixture(scope="module")
def native(native_root: Path) -> Checkpoint:
    return Checkpoint.open(native_root)


@pytest.fixture(scope="module")
def diffusers(diffusers_root: Path) -> Checkpoint:
    return Checkpoint.open(diffusers_root)


@pytest.fixture(scope="module")
def release() -> Sizes:
    return released(train().special_ids)


def evaluated(weights: Any) -> dict[str, torch.Tensor]:
    return {name: materialise(weight) for name, weight in weights.items()}


def test_layout_and_partitions_are_recognised(native: Checkpoint, diffusers: Checkpoint) -> None:
    assert (native.layout, diffusers.layout) == ("native", "diffusers")
    assert native.partitions == diffusers.partitions == ("fl2va", "ref2va")
    assert native.dimensions == diffusers.dimensions
    assert (native.dimensions.video_shift, native.dimensions.audio_shift) == (12.0, 3.0)


@pytest.mark.parametrize("partition", ["fl2va", "ref2va"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_one_model_in_two_layouts(
    native: Checkpoint, diffusers: Checkpoint, component: Component, partition: str
) -> None:
    assert native.config(component, partition) == diffusers.config(component, partition)
    ours, theirs = (evaluated(one.parameters(component, partition)) for one in (native, diffusers))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_partitions_differ_in_their_transformer_only(native: Checkpoint) -> None:
    for component in COMPONENTS:
        first, second = (evaluated(native.stored(component, partition)) for partition in native.partitions)
        equal = all(torch.equal(first[key], second[key]) for key in first if key != "rope.inv_freq")
        assert equal == (component != "denoiser")


@pytest.mark.parametrize("component", CLASSES)
def test_the_diffusers_class_takes_every_parameter(native: Checkpoint, component: Component) -> None:
    """load_state_dict is strict: names and shapes must be exactly those of the class built from config()."""
    model = CLASSES[component](**native.config(component))
    model.load_state_dict(evaluated(native.parameters(component)), strict=True)


@pytest.mark.parametrize("component", CLASSES)
def test_from_pretrained_loads_the_diffusers_layout(
    diffusers: Checkpoint, diffusers_root: Path, component: Component
) -> None:
    model, report = CLASSES[component].from_pretrained(diffusers_root / FOLDERS[component], output_loading_info=True)
    assert not any(report.values())
    parameters = evaluated(diffusers.parameters(component))
    assert all(torch.equal(value, parameters[name].to(value.dtype)) for name, value in model.state_dict().items())


@pytest.mark.parametrize("folder", ["FL2VA/text_encoder", "Ref2VA/text_encoder"])
def test_from_pretrained_loads_the_native_text_encoder(native: Checkpoint, native_root: Path, folder: str) -> None:
    model, report = Qwen3VLForConditionalGeneration.from_pretrained(native_root / folder, output_loading_info=True)
    assert not any(report.values())
    parameters = evaluated(native.parameters("text_encoder"))
    assert all(torch.equal(value, parameters[name]) for name, value in model.state_dict().items())


def test_transformers_reads_the_text_encoder_configuration(native: Checkpoint) -> None:
    text = Qwen3VLConfig(**native.config("text_encoder")).text_config
    ours = native.dimensions.text_encoder
    assert (text.hidden_size, text.num_attention_heads, text.head_dim) == (ours.hidden, ours.heads, ours.head_dim)
    assert text.rope_parameters["rope_theta"] == ours.rope_theta
    assert tuple(text.rope_parameters["mrope_section"]) == ours.mrope_section
    assert text.num_hidden_layers > ours.layers == 50


def test_a_diffusers_mixed_precision_load_keeps_what_the_checkpoint_stores_in_float32(
    diffusers: Checkpoint, diffusers_root: Path
) -> None:
    model = MiniMaxH3Transformer3DModel.from_pretrained(diffusers_root / "transformer", torch_dtype=torch.bfloat16)
    stored = {name: one.dtype for name, one in diffusers.stored("denoiser").items()}
    assert {name: value.dtype for name, value in model.state_dict().items()} == stored


def shapes(declared: dict[str, Declared]) -> dict[str, tuple[int, ...] | None]:
    return {name: one.shape for name, one in declared.items()}


@pytest.fixture(scope="module")
def released_models(release: Sizes) -> dict[Component, Any]:
    """The classes at released size, without memory."""
    text = Qwen3VLConfig(**release.text_encoder.model_dump())
    with torch.device("meta"):
        models = {component: model() for component, model in CLASSES.items()}
        return models | {"text_encoder": Qwen3VLForConditionalGeneration(text)}


def test_expected_tensors_of_the_release_are_those_of_the_classes(
    release: Sizes, released_models: dict[Component, Any]
) -> None:
    expected = {
        "denoiser": denoiser.tensors(release.denoiser),
        "video_vae": video_vae.tensors(release.video_vae),
        "audio_vae": audio_vae.tensors(release.audio_vae),
        "text_encoder": text_encoder.tensors(release.text_encoder),
    }
    for component, model in released_models.items():
        state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        assert shapes(expected[component]) == state, component


def test_default_configurations_are_those_of_the_classes(release: Sizes, released_models: dict[Component, Any]) -> None:
    ours = {"denoiser": release.denoiser, "video_vae": release.video_vae, "audio_vae": release.audio_vae}
    for component, config in ours.items():
        theirs = dict(released_models[component].config)  # type: ignore[index]
        for key, value in config.model_dump(exclude={"latents_mean", "latents_std"}).items():
            assert json.dumps(theirs[key]) == json.dumps(value), key


def heads_of(fused: torch.Tensor, heads: int, index: int) -> torch.Tensor:
    """Projection `index` of rows that lie as head 0 q, k, v, head 1 q, k, v, ... (spec/model.md 1c)."""
    size = fused.shape[0] // (3 * heads)
    return torch.cat([fused[(3 * head + index) * size :][:size] for head in range(heads)])


def test_native_projections_are_interleaved_by_head(native: Checkpoint) -> None:
    decoder = "decoder.transformer_blocks.1.attn.to_"
    refiner = "token_refiner.refiner_blocks.0.attn.to_"
    cases = [
        ("denoiser", "blocks.1.attn.qkv_proj.weight", "transformer_blocks.1.attn.to_{}.weight", 8),
        ("denoiser", "token_refiner.blocks.0.attn.qkv_proj.weight", refiner + "{}.weight", 8),
        ("video_vae", decoder + "qkv.weight", decoder + "{}.weight", 2),
        ("video_vae", decoder + "qkv.bias", decoder + "{}.bias", 2),
    ]
    for component, key, name, heads in cases:
        fused = materialise(native.stored(component)[key])  # type: ignore[arg-type]
        for index, letter in enumerate("qkv"):
            parameter = materialise(native.parameters(component)[name.format(letter)])  # type: ignore[arg-type]
            assert torch.equal(parameter, heads_of(fused, heads, index)), (key, letter)


def test_native_feed_forwards_have_the_gate_first(native: Checkpoint) -> None:
    cases = [
        ("denoiser", "blocks.0.mlp.fc1.weight", "transformer_blocks.0.ff.net.0.proj.weight"),
        ("denoiser", "token_refiner.blocks.1.mlp.fc1.weight", "token_refiner.refiner_blocks.1.ff.net.0.proj.weight"),
        ("video_vae", "decoder.transformer_blocks.0.ff.w1.weight", "decoder.transformer_blocks.0.ff.net.0.proj.weight"),
        ("video_vae", "decoder.transformer_blocks.0.ff.w1.bias", "decoder.transformer_blocks.0.ff.net.0.proj.bias"),
    ]
    for component, key, name in cases:
        native_rows = materialise(native.stored(component)[key])  # type: ignore[arg-type]
        half = native_rows.shape[0] // 2
        parameter = materialise(native.parameters(component)[name])  # type: ignore[arg-type]
        assert torch.equal(parameter[half:], native_rows[:half])
        assert torch.equal(parameter[:half], native_rows[half:])


def test_native_keys_without_a_parameter_are_dropped(native: Checkpoint) -> None:
    used = {leaf.key for weight in native.parameters("denoiser").values() for leaf in weight.leaves()}
    assert set(native.stored("denoiser")) - used == {"rope.inv_freq"}
    used = {leaf.key for weight in native.parameters("video_vae").values() for leaf in weight.leaves()}
    assert set(native.stored("video_vae")) - used == {"decoder.mask_token"}


def test_stored_rotary_frequencies_are_those_that_diffusers_computes(native: Checkpoint) -> None:
    model = MiniMaxH3Transformer3DModel(**native.config("denoiser"))
    # Two float32 evaluations of the same power may differ in the last place.
    torch.testing.assert_close(
        materialise(native.stored("denoiser")["rope.inv_freq"]), model.rope.inv_freq, rtol=3e-7, atol=0
    )


def merge_shards(directory: Path, metadata: dict[str, str], stem: str = "model") -> dict[str, torch.Tensor]:
    """Makes a sharded component a single file, with `metadata`; returns its tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob(f"{stem}-*.safetensors")):
        tensors |= {key: materialise(stored).clone() for key, stored in read_header(shard).tensors.items()}
        shard.unlink()
    (directory / f"{stem}.safetensors.index.json").unlink()
    write_tensors(directory / f"{stem}.safetensors", tensors, metadata)
    return tensors


def test_a_single_file_transformer_is_the_same_model(
    native: Checkpoint, native_root: Path, copied: Callable[[Path], Path]
) -> None:
    root = copied(native_root)
    merge_shards(root / "FL2VA" / "transformer", {})
    single = Checkpoint.open(root)
    assert single.qkv_layout("denoiser") == "interleaved"
    ours, theirs = evaluated(single.parameters("denoiser")), evaluated(native.parameters("denoiser"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def stack(fused: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.cat([heads_of(fused, heads, index) for index in range(3)])


def test_a_file_that_declares_stacked_projections_is_read_so(
    native: Checkpoint, native_root: Path, copied: Callable[[Path], Path]
) -> None:
    root = copied(native_root)
    directory = root / "FL2VA" / "transformer"
    tensors = merge_shards(directory, {})
    stacked = {key: stack(value, 8) if "qkv_proj" in key else value for key, value in tensors.items()}
    write_tensors(directory / "model.safetensors", stacked, {"qkv_layout": "stacked"})
    opened = Checkpoint.open(root)
    assert opened.qkv_layout("denoiser") == "stacked"
    assert opened.qkv_layout("denoiser", "ref2va") == "interleaved"
    ours, theirs = evaluated(opened.parameters("denoiser")), evaluated(native.parameters("denoiser"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_unknown_projection_layout_is_refused(native_root: Path, copied: Callable[[Path], Path]) -> None:
    root = copied(native_root)
    merge_shards(root / "FL2VA" / "transformer", {"qkv_layout": "transposed"})
    with pytest.raises(CheckpointError, match="interleaved or stacked, found 'transposed'"):
        Checkpoint.open(root)


def test_one_native_partition_opens_by_itself(native_root: Path) -> None:
    assert Checkpoint.open(native_root / "Ref2VA").partitions == ("ref2va",)


def test_a_ref2va_tree_may_hold_its_transformer_alone(
    native: Checkpoint, native_root: Path, copied: Callable[[Path], Path]
) -> None:
    root = copied(native_root)
    for folder in ("text_encoder", "video_vae", "audio_vae", "tokenizer", "processor"):
        shutil.rmtree(root / "Ref2VA" / folder)
    opened = Checkpoint.open(root)
    assert opened.stored("video_vae", "ref2va") == opened.stored("video_vae", "fl2va")
    assert opened.stored("denoiser", "ref2va") != opened.stored("denoiser", "fl2va")


def test_views_of_stored_tensors_are_not_copied(native: Checkpoint) -> None:
    key = "blocks.0.attn.out_proj.weight"
    weight: Weight = native.parameters("denoiser")["transformer_blocks.0.attn.to_out.0.weight"]
    assert weight is native.stored("denoiser")[key]
