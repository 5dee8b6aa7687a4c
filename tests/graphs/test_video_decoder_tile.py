"""The video decoder's tile graph against diffusers' AutoencoderKLMiniMaxH3."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from running import bound_keys, eager, element_types, load, relative

from export.checkpoint import Checkpoint
from export.compare import compare
from export.emit import emit
from export.emitted import Emitted
from export.graphs import video_decoder_tile
from export.trace import build_module

TILE = (1, 24, 7, 16, 16)


def diffusers_tile(checkpoint: Checkpoint, latents: torch.Tensor) -> torch.Tensor:
    """One tile as the reference pipeline decodes it: de-normalised, then its untiled clip decoder."""
    vae = load(AutoencoderKLMiniMaxH3(**checkpoint.config("video_vae")), checkpoint, "video_vae")
    vae.disable_tiling()
    mean, std = (
        torch.tensor(getattr(vae.config, name)).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")
    )
    return vae._decode_clip(latents * std + mean)


def test_a_tile_is_what_diffusers_decodes(checkpoint: Checkpoint) -> None:
    (graph,) = video_decoder_tile.graphs(checkpoint, "fl2va", torch.float32)
    latents = torch.randn(TILE)
    frames = eager(graph, latents)
    assert frames.shape == (1, 3, 28, 256, 256)
    # Float32 sums in another order.
    assert relative(frames, diffusers_tile(checkpoint, latents)) < 1e-5


def test_both_layouts_decode_alike(checkpoints: dict[str, Checkpoint]) -> None:
    latents = torch.randn(TILE)
    both = [eager(video_decoder_tile.graphs(one, "fl2va", torch.float32)[0], latents) for one in checkpoints.values()]
    assert relative(both[0], both[1]) < 1e-5


@pytest.mark.parametrize(("compute", "limit"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_half_precision_stays_within_its_rounding(checkpoint: Checkpoint, compute: torch.dtype, limit: float) -> None:
    # Relative RMS error: a few roundings of 2^-11 or 2^-8 a layer.
    latents = torch.randn(TILE)
    wide, half = (
        eager(video_decoder_tile.graphs(checkpoint, "fl2va", dtype)[0], latents) for dtype in (torch.float32, compute)
    )
    assert half.dtype == torch.float32
    error = ((half - wide).square().mean() / wide.square().mean()).sqrt().item()
    assert 0 < error < limit


def test_only_matrices_inside_attention_and_feed_forward_are_in_half_precision(checkpoint: Checkpoint) -> None:
    (graph,) = video_decoder_tile.graphs(checkpoint, "fl2va", torch.float16)
    halves = {name for name, value in build_module(graph).named_parameters() if value.dtype == torch.float16}
    expected = {name for name in graph.weights[0] if ".attention." in name or ".feed_forward." in name}
    assert halves == expected


@pytest.fixture(
    scope="module",
    params=[("native", torch.float32), ("native", torch.bfloat16), ("diffusers", torch.float32)],
    ids=lambda case: f"{case[0]}-{case[1]}".replace("torch.", ""),
)
def emitted(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Emitted:
    layout, compute = request.param
    return emit(video_decoder_tile.graphs(checkpoints[layout], "fl2va", compute)[0])


def test_onnx_runtime_gives_what_torch_gives(emitted: Emitted) -> None:
    compare(emitted)


def test_no_float64_is_inside(emitted: Emitted) -> None:
    assert "DOUBLE" not in element_types(emitted.model)


def test_exactly_the_decoder_is_bound(emitted: Emitted, checkpoints: dict[str, Checkpoint]) -> None:
    layout = "native" if "decoder.x_embedder.weight" in bound_keys(emitted) else "diffusers"
    stored = checkpoints[layout].stored("video_vae")
    decoder = [
        key for key in stored if key.startswith(("decoder.", "post_quant_conv.")) and key != "decoder.mask_token"
    ]
    assert bound_keys(emitted) == sorted(decoder)


def test_weights_go_to_matrix_products_uncopied(emitted: Emitted) -> None:
    """Undoing a layout costs no copy of a weight: it is cast or transposed at most, never cut or joined."""
    matrices = {weight.name for weight in emitted.binding.inputs if len(weight.shape) == 2}
    users = {node.op_type for node in emitted.model.graph.node if matrices & set(node.input)}
    assert users <= {"Gemm", "MatMul", "Transpose", "Cast"}
