"""The diffusion transformer: configuration, tensors and native names (spec/model.md 1a to 1d)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt

from export.checkpoint.components.configuration import Configuration, Layers, Translation, require, take_size, translate
from export.checkpoint.recipes import Projection, Recipe, Swapped, Whole
from export.checkpoint.safetensors_file import Declared
from plugins.dimensions import MODALITIES, DenoiserDimensions

BF16, F32 = torch.bfloat16, torch.float32


class DenoiserConfig(Configuration):
    """Constructor arguments of `diffusers.MiniMaxH3Transformer3DModel`; the defaults are the release."""

    num_attention_heads: PositiveInt = 56
    attention_head_dim: PositiveInt = 128
    hidden_size: PositiveInt = 5376
    num_layers: Layers = 50
    num_refiner_layers: Layers = 2
    ffn_dim: PositiveInt = 14336
    in_channels: PositiveInt = 24
    audio_in_channels: PositiveInt = 32
    patch_size: tuple[PositiveInt, PositiveInt, PositiveInt] = (1, 2, 2)
    text_dim: PositiveInt = 5120
    freq_dim: PositiveInt = 256
    time_embed_hidden_dim: PositiveInt = 5376
    time_embed_dim: PositiveInt = 2688
    rope_freq_dim: PositiveInt = 16
    rope_theta: PositiveFloat = 10000.0
    norm_eps: PositiveFloat = 1e-5
    qk_norm_eps: PositiveFloat = 1e-5
    final_norm_eps: PositiveFloat = 1e-5


NATIVE_KEYS: Mapping[str, str] = {
    "hidden_size": "hidden_size",
    "num_layers": "num_layers",
    "num_refiner_layers": "token_refiner_num_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_head_dim": "attention_head_dim",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "latents_dim",
    "audio_in_channels": "audio_latents_dim",
    "patch_size": "patch_size",
    "text_dim": "text_dim",
    "freq_dim": "timestep_input_dim",
    "time_embed_hidden_dim": "time_embed_hidden_size",
    "time_embed_dim": "time_embed_dim",
    "rope_freq_dim": "rope_inv_freq_len",
    "norm_eps": "norm_eps",
    "qk_norm_eps": "qk_norm_eps",
    "final_norm_eps": "final_norm_eps",
}
"""Constructor argument -> key of the native config.json. The rotary base is not in the file: 10000, the default."""


def from_native(config: Mapping[str, Any], file: Path) -> Translation:
    """Constructor arguments from the native config.json.

    Raises:
        CheckpointError: a key is absent, or a derived size contradicts the others.
    """
    translation = translate(NATIVE_KEYS, config, file)
    hidden = take_size(config, "hidden_size", file)
    require(config, "adaln_out_features", MODALITIES * 6 * hidden, file)
    require(config, "final_adaln_out_features", 2 * hidden, file)
    return translation


def to_native(config: DenoiserConfig) -> dict[str, Any]:
    """The native config.json that describes the same model."""
    values = config.model_dump(mode="json")
    native = {name: values[ours] for ours, name in NATIVE_KEYS.items()}
    native["adaln_out_features"] = MODALITIES * 6 * config.hidden_size
    native["final_adaln_out_features"] = 2 * config.hidden_size
    return native


def dimensions(config: DenoiserConfig) -> DenoiserDimensions:
    """The sizes that the rest of the compiler reads."""
    return DenoiserDimensions(
        hidden=config.hidden_size,
        layers=config.num_layers,
        refiner_layers=config.num_refiner_layers,
        heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        ffn=config.ffn_dim,
        video_channels=config.in_channels,
        audio_channels=config.audio_in_channels,
        patch=config.patch_size,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        time_hidden=config.time_embed_hidden_dim,
        time_dim=config.time_embed_dim,
        rope_frequencies=config.rope_freq_dim,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        qk_norm_eps=config.qk_norm_eps,
        final_norm_eps=config.final_norm_eps,
    )


GATE = "attn.to_gate_compress.weight"
"""Of the blocks of a student with sparse attention of video, in either layout: the gate of its compressed branch."""


def tensors(config: DenoiserConfig, gates: bool = False) -> dict[str, Declared]:
    """Every parameter by its diffusers name. Float32: both patch projections, the time MLP and both heads.

    gates: of a student with sparse attention of video, whose blocks have one parameter more.
    """
    sizes = dimensions(config)
    declared = {
        **_linear("proj_in", sizes.hidden, sizes.video_row, F32),
        **_linear("audio_proj_in", sizes.hidden, sizes.audio_channels, F32),
        **_linear("context_embedder", sizes.hidden, sizes.text_dim, BF16),
        **_linear("time_embedder.linear_1", sizes.time_hidden, sizes.freq_dim, F32),
        **_linear("time_embedder.linear_2", sizes.time_dim, sizes.time_hidden, F32),
        "token_refiner.final_norm.weight": Declared((sizes.hidden,), BF16),
        "norm_out.norm.weight": Declared((sizes.hidden,), BF16),
        **_linear("norm_out.linear", 2 * sizes.hidden, sizes.time_dim, BF16),
        **_linear("proj_out", sizes.video_row, sizes.hidden, F32),
        **_linear("audio_proj_out", sizes.audio_channels, sizes.hidden, F32),
    }
    for layer in range(sizes.refiner_layers):
        declared |= _block(f"token_refiner.refiner_blocks.{layer}", sizes)
    for layer in range(sizes.layers):
        prefix = f"transformer_blocks.{layer}"
        declared |= _block(prefix, sizes)
        declared |= _linear(f"{prefix}.adaln_proj.linear", sizes.adaln_features, sizes.time_dim, BF16)
        if gates:
            declared[f"{prefix}.{GATE}"] = Declared((sizes.inner, sizes.hidden), BF16)
    return declared


def _linear(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> dict[str, Declared]:
    return {f"{name}.weight": Declared((outputs, inputs), dtype), f"{name}.bias": Declared((outputs,), dtype)}


def _block(prefix: str, sizes: DenoiserDimensions) -> dict[str, Declared]:
    shapes = {
        "norm1.weight": (sizes.hidden,),
        "attn.to_q.weight": (sizes.inner, sizes.hidden),
        "attn.to_k.weight": (sizes.inner, sizes.hidden),
        "attn.to_v.weight": (sizes.inner, sizes.hidden),
        "attn.norm_q.weight": (sizes.head_dim,),
        "attn.norm_k.weight": (sizes.head_dim,),
        "attn.to_out.0.weight": (sizes.hidden, sizes.inner),
        "norm2.weight": (sizes.hidden,),
        "ff.net.0.proj.weight": (2 * sizes.ffn, sizes.hidden),
        "ff.net.2.weight": (sizes.hidden, sizes.ffn),
    }
    return {f"{prefix}.{name}": Declared(shape, BF16) for name, shape in shapes.items()}


_MODULES: Mapping[str, str] = {
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.norm": "final_layer.norm",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
}

_BLOCKS: Mapping[str, str] = {
    "transformer_blocks.": "blocks.",
    "token_refiner.refiner_blocks.": "token_refiner.blocks.",
}

_IN_BLOCK: Mapping[str, str] = {
    "attn.norm_q.weight": "attn.q_norm.weight",
    "attn.norm_k.weight": "attn.k_norm.weight",
    "attn.to_out.0.weight": "attn.out_proj.weight",
    "ff.net.2.weight": "mlp.fc2.weight",
}


def recipes(config: DenoiserConfig, gates: bool = False) -> dict[str, Recipe]:
    """Diffusers name -> how it is made from native tensors."""
    return {name: _recipe(name, config.num_attention_heads) for name in tensors(config, gates)}


def native_only(config: DenoiserConfig) -> dict[str, Declared]:
    """Native tensors that have no diffusers parameter: the rotary frequencies, which every implementation computes."""
    return {"rope.inv_freq": Declared((config.rope_freq_dim,), F32)}


def _recipe(name: str, heads: int) -> Recipe:
    for ours, native in _BLOCKS.items():
        if name.startswith(ours):
            layer, inner = name.removeprefix(ours).split(".", 1)
            return _block_recipe(f"{native}{layer}.", inner, heads)
    module, _, kind = name.rpartition(".")
    return Whole(f"{_MODULES.get(module, module)}.{kind}")


def _block_recipe(prefix: str, name: str, heads: int) -> Recipe:
    if name == "ff.net.0.proj.weight":
        return Swapped(f"{prefix}mlp.fc1.weight")
    for index, projection in enumerate(("to_q", "to_k", "to_v")):
        if name == f"attn.{projection}.weight":
            return Projection(f"{prefix}attn.qkv_proj.weight", index, heads)
    return Whole(prefix + _IN_BLOCK.get(name, name))
