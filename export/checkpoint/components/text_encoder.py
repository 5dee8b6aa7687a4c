"""The Qwen3-VL text and vision encoder: configuration and tensors (spec/model.md 1g and 7.1)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from export.checkpoint.components.configuration import Layers, parse
from export.checkpoint.errors import CheckpointError
from export.checkpoint.safetensors_file import Declared
from plugins.dimensions import TextEncoderDimensions, VisionDimensions

BF16 = torch.bfloat16
CONDITIONING_LAYERS = 50
"""The conditioning is the raw output of this many decoder layers; diffusers fixes the number."""


class _Open(BaseModel):
    # Hugging Face configuration files carry keys of many library versions; those not read here are passed on.
    model_config = ConfigDict(frozen=True, extra="allow")


class TextConfig(_Open):
    """The keys of `text_config` that shapes and rotary tables depend on."""

    hidden_size: PositiveInt
    num_hidden_layers: Layers
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    rms_norm_eps: PositiveFloat
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False


class VisionConfig(_Open):
    """The keys of `vision_config` that shapes depend on."""

    depth: Layers
    hidden_size: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    in_channels: PositiveInt = 3
    patch_size: PositiveInt
    temporal_patch_size: PositiveInt
    spatial_merge_size: PositiveInt
    out_hidden_size: PositiveInt
    num_position_embeddings: PositiveInt
    deepstack_visual_indexes: tuple[NonNegativeInt, ...]
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


class TextEncoderConfig(_Open):
    """Arguments of `transformers.Qwen3VLConfig`."""

    text_config: TextConfig
    vision_config: VisionConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tie_word_embeddings: Literal[False] = False


class _Rotary(BaseModel):
    model_config = ConfigDict(frozen=True)

    rope_theta: PositiveFloat
    mrope_section: tuple[PositiveInt, PositiveInt, PositiveInt]
    mrope_interleaved: Literal[True]
    rope_type: Literal["default"] = "default"


def constructor_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without the keys that describe the file rather than the model."""
    described = {"architectures", "model_type", "transformers_version", "torch_dtype", "dtype"}
    return {key: value for key, value in config.items() if key not in described}


def dimensions(config: TextEncoderConfig, file: Path) -> TextEncoderDimensions:
    """The sizes that the rest of the compiler reads.

    Raises:
        CheckpointError: too few layers, or rotary parameters other than interleaved multimodal ones.
    """
    text = config.text_config
    if text.num_hidden_layers <= CONDITIONING_LAYERS:
        wanted = f"more than {CONDITIONING_LAYERS}: the conditioning is taken before the last layer"
        raise CheckpointError(file, "text_config.num_hidden_layers", wanted, text.num_hidden_layers)
    rotary = _rotary(text, file)
    if 2 * sum(rotary.mrope_section) != text.head_dim:
        wanted = f"a sum of {text.head_dim // 2}, half of head_dim"
        raise CheckpointError(file, "text_config.rope_scaling.mrope_section", wanted, rotary.mrope_section)
    return TextEncoderDimensions(
        hidden=text.hidden_size,
        layers=CONDITIONING_LAYERS,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        intermediate=text.intermediate_size,
        vocab=text.vocab_size,
        rope_theta=rotary.rope_theta,
        mrope_section=rotary.mrope_section,
        rms_eps=text.rms_norm_eps,
    )


def vision_dimensions(config: TextEncoderConfig, file: Path) -> VisionDimensions:
    """The sizes of the vision tower.

    Raises:
        CheckpointError: its positions are no square grid, its rows do not fit the language model, or it has no block
            of the given index.
    """
    vision, side = config.vision_config, isqrt(config.vision_config.num_position_embeddings)
    rules = {
        "num_position_embeddings": (vision.num_position_embeddings, side**2, "a square number"),
        "out_hidden_size": (vision.out_hidden_size, config.text_config.hidden_size, "the language model's hidden_size"),
        "hidden_size": (vision.hidden_size % (4 * vision.num_heads), 0, "a multiple of 4 x num_heads"),
    }
    for key, (found, needed, wanted) in rules.items():
        if found != needed:
            raise CheckpointError(file, f"vision_config.{key}", wanted, getattr(vision, key))
    if max(vision.deepstack_visual_indexes, default=0) >= vision.depth:
        wanted = f"blocks of the {vision.depth} there are"
        raise CheckpointError(file, "vision_config.deepstack_visual_indexes", wanted, vision.deepstack_visual_indexes)
    return VisionDimensions(
        depth=vision.depth,
        hidden=vision.hidden_size,
        heads=vision.num_heads,
        intermediate=vision.intermediate_size,
        channels=vision.in_channels,
        patch=vision.patch_size,
        temporal_patch=vision.temporal_patch_size,
        merge=vision.spatial_merge_size,
        position_grid=side,
        deepstack=vision.deepstack_visual_indexes,
        out_hidden=vision.out_hidden_size,
    )


def _rotary(text: TextConfig, file: Path) -> _Rotary:
    """Rotary parameters in either spelling: `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta`."""
    extra = text.model_extra or {}
    values = dict(extra.get("rope_parameters") or extra.get("rope_scaling") or {})
    if "rope_theta" in extra:
        values.setdefault("rope_theta", extra["rope_theta"])
    return parse(_Rotary, values, file)


def tensors(config: TextEncoderConfig) -> dict[str, Declared]:
    """Every parameter by its transformers name, all bfloat16."""
    text = config.text_config
    shapes: Shapes = {
        "model.language_model.embed_tokens.weight": (text.vocab_size, text.hidden_size),
        "model.language_model.norm.weight": (text.hidden_size,),
        "lm_head.weight": (text.vocab_size, text.hidden_size),
        **_vision(config.vision_config),
    }
    for layer in range(text.num_hidden_layers):
        shapes |= _layer(f"model.language_model.layers.{layer}", text)
    return {name: Declared(shape, BF16) for name, shape in shapes.items()}


Shapes = dict[str, tuple[int, ...]]


def _layer(prefix: str, text: TextConfig) -> Shapes:
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    shapes: Shapes = {
        "input_layernorm": (text.hidden_size,),
        "post_attention_layernorm": (text.hidden_size,),
        "self_attn.q_proj": (queries, text.hidden_size),
        "self_attn.k_proj": (keys, text.hidden_size),
        "self_attn.v_proj": (keys, text.hidden_size),
        "self_attn.o_proj": (text.hidden_size, queries),
        "self_attn.q_norm": (text.head_dim,),
        "self_attn.k_norm": (text.head_dim,),
        "mlp.gate_proj": (text.intermediate_size, text.hidden_size),
        "mlp.up_proj": (text.intermediate_size, text.hidden_size),
        "mlp.down_proj": (text.hidden_size, text.intermediate_size),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _affine(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _vision(vision: VisionConfig) -> Shapes:
    width, patch = vision.hidden_size, vision.patch_size
    patches = (width, vision.in_channels, vision.temporal_patch_size, patch, patch)
    shapes: Shapes = {
        **_affine("model.visual.patch_embed.proj", *patches),
        "model.visual.pos_embed.weight": (vision.num_position_embeddings, width),
        **_merger("model.visual.merger", width, vision),
    }
    for block in range(vision.depth):
        prefix = f"model.visual.blocks.{block}"
        shapes |= _affine(f"{prefix}.norm1", width) | _affine(f"{prefix}.norm2", width)
        shapes |= _affine(f"{prefix}.attn.qkv", 3 * width, width) | _affine(f"{prefix}.attn.proj", width, width)
        shapes |= _affine(f"{prefix}.mlp.linear_fc1", vision.intermediate_size, width)
        shapes |= _affine(f"{prefix}.mlp.linear_fc2", width, vision.intermediate_size)
    merged = width * vision.spatial_merge_size**2
    for index in range(len(vision.deepstack_visual_indexes)):
        shapes |= _merger(f"model.visual.deepstack_merger_list.{index}", merged, vision)
    return shapes


def _merger(prefix: str, normed: int, vision: VisionConfig) -> Shapes:
    """A patch merger; the last one normalises before the 2x2 patches are joined, the deepstack ones after."""
    merged = vision.hidden_size * vision.spatial_merge_size**2
    return {
        **_affine(f"{prefix}.norm", normed),
        **_affine(f"{prefix}.linear_fc1", merged, merged),
        **_affine(f"{prefix}.linear_fc2", vision.out_hidden_size, merged),
    }
