"""A small random denoiser, made by diffusers and saved in each layout, with what graphs read of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import save_file

from export.checkpoint.expressions import Stored, Weight
from export.checkpoint.safetensors_file import read_header
from export.graphs import block, context, epilogue, modulation, prologue
from export.graphs.graph import Graph
from plugins.dimensions import DenoiserDimensions

CONFIG = {
    "num_attention_heads": 3,
    "attention_head_dim": 128,
    "hidden_size": 80,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "ffn_dim": 112,
    "text_dim": 48,
    "freq_dim": 64,
    "time_embed_hidden_dim": 72,
    "time_embed_dim": 40,
}
"""Not one width is a multiple of another, so that no mistaken reshape fits by chance."""

FLOAT32_PARTS = ("proj_in.", "audio_proj_in.", "time_embedder.", "proj_out.", "audio_proj_out.")


@dataclass(frozen=True)
class DenoiserCheckpoint:
    """The part of `export.checkpoint.Checkpoint` that the denoiser's graphs read, over one safetensors file."""

    layout: str
    qkv: str
    file: Path
    reference: MiniMaxH3Transformer3DModel

    @cached_property
    def dimensions(self) -> SimpleNamespace:
        c = self.reference.config
        denoiser = DenoiserDimensions(
            hidden=c.hidden_size,
            layers=c.num_layers,
            refiner_layers=c.num_refiner_layers,
            heads=c.num_attention_heads,
            head_dim=c.attention_head_dim,
            ffn=c.ffn_dim,
            video_channels=c.in_channels,
            audio_channels=c.audio_in_channels,
            patch=c.patch_size,
            text_dim=c.text_dim,
            freq_dim=c.freq_dim,
            time_hidden=c.time_embed_hidden_dim,
            time_dim=c.time_embed_dim,
            rope_frequencies=c.rope_freq_dim,
            rope_theta=c.rope_theta,
            norm_eps=c.norm_eps,
            qk_norm_eps=c.qk_norm_eps,
            final_norm_eps=c.final_norm_eps,
        )
        return SimpleNamespace(denoiser=denoiser)

    def stored(self, component: str, partition: str = "fl2va") -> Mapping[str, Stored]:
        return read_header(self.file).tensors

    def parameters(self, component: str, partition: str = "fl2va") -> Mapping[str, Weight]:
        """Only parameters that are stored whole, under diffusers' names."""
        names = {native: name for name, native in whole_names(self.reference).items()}
        stored = self.stored(component, partition)
        return stored if self.layout == "diffusers" else {names[k]: v for k, v in stored.items() if k in names}

    def qkv_layout(self, component: str, partition: str = "fl2va") -> str:
        return self.qkv


def small_denoiser(seed: int, dtype: torch.dtype, gated: bool = False, **sizes: int) -> MiniMaxH3Transformer3DModel:
    """Random weights, none of them trivial; `dtype` is that of all but the parts that are always float32.

    They are rounded to bfloat16 in any case, so that both dtypes hold the same values. `gated`: its blocks have the
    gates of attention to video tiles, which diffusers' own processor does not use. `sizes`: others than CONFIG's.
    """
    torch.manual_seed(seed)
    model = MiniMaxH3Transformer3DModel(**CONFIG | sizes).eval().requires_grad_(False)
    for layer in model.transformer_blocks if gated else ():
        gate = torch.nn.Linear(model.config.hidden_size, layer.attn.inner_dim, bias=False)
        layer.attn.to_gate_compress = gate.requires_grad_(False)
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name and name.endswith("weight") and parameter.ndim == 1
        parameter.copy_((1 if is_norm else 0) + torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.08))
        if not name.startswith(FLOAT32_PARTS):
            parameter.copy_(parameter.to(torch.bfloat16))
            parameter.data = parameter.data.to(dtype)
    return model


def save(model: MiniMaxH3Transformer3DModel, layout: str, qkv: str, directory: Path) -> DenoiserCheckpoint:
    """Writes the model's weights in a layout (spec/model.md 1c read backwards)."""
    file = directory / f"{layout}-{qkv}.safetensors"
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    save_file(state if layout == "diffusers" else _native(model, state, qkv), file)
    return DenoiserCheckpoint(layout, qkv, file, model)


GRAPHS = (context.graphs, modulation.graphs, prologue.graphs, block.graphs, block.segments, epilogue.graphs)


def denoiser_graphs(checkpoint: DenoiserCheckpoint, compute: torch.dtype) -> dict[str, Graph]:
    """The denoiser's graphs by name, the block both whole and in segments."""
    return {graph.name: graph for graphs in GRAPHS for graph in graphs(checkpoint, "fl2va", compute)}


def whole_names(model: MiniMaxH3Transformer3DModel) -> dict[str, str]:
    """diffusers name -> native name, of the parameters whose bytes are the same in both layouts."""
    renames = (
        ("token_refiner.refiner_blocks.", "token_refiner.blocks."),
        ("transformer_blocks.", "blocks."),
        ("context_embedder.", "condition_proj."),
        ("time_embedder.linear_1.", "time_embedder.proj_in."),
        ("time_embedder.linear_2.", "time_embedder.proj_out."),
        ("norm_out.norm.", "final_layer.norm."),
        ("norm_out.linear.", "final_layer.adaln_proj.linear."),
        ("audio_proj_in.", "audio_patch_proj."),
        ("proj_in.", "video_patch_proj."),
        ("audio_proj_out.", "final_layer.audio_out."),
        ("proj_out.", "final_layer.video_out."),
    )
    inner = (
        ("attn.norm_q.", "attn.q_norm."),
        ("attn.norm_k.", "attn.k_norm."),
        ("attn.to_out.0.", "attn.out_proj."),
        ("ff.net.2.", "mlp.fc2."),
    )
    names = {}
    for name in model.state_dict():
        if ".to_q." in name or ".to_k." in name or ".to_v." in name or ".net.0." in name:
            continue
        native = next((new + name.removeprefix(old) for old, new in renames if name.startswith(old)), name)
        for old, new in inner:
            native = native.replace(old, new)
        names[name] = native
    return names


def _native(model: MiniMaxH3Transformer3DModel, state: dict[str, torch.Tensor], qkv: str) -> dict[str, torch.Tensor]:
    native = {name: state[ours] for ours, name in whole_names(model).items()}
    blocks = {f"transformer_blocks.{i}": f"blocks.{i}" for i in range(model.config.num_layers)}
    for i in range(model.config.num_refiner_layers):
        blocks[f"token_refiner.refiner_blocks.{i}"] = f"token_refiner.blocks.{i}"
    for ours, theirs in blocks.items():
        heads = [
            state[f"{ours}.attn.to_{x}.weight"].unflatten(0, (model.config.num_attention_heads, -1)) for x in "qkv"
        ]
        packed = torch.stack(heads, 1 if qkv == "interleaved" else 0)
        native[f"{theirs}.attn.qkv_proj.weight"] = packed.flatten(0, 2).contiguous()
        up, gate = state[f"{ours}.ff.net.0.proj.weight"].chunk(2)
        native[f"{theirs}.mlp.fc1.weight"] = torch.cat([gate, up])
    return native
