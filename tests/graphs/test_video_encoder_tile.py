"""The video encoder's tile graph against diffusers' AutoencoderKLMiniMaxH3."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from running import bound_keys, eager, element_types, load, relative

from export.checkpoint import Checkpoint
from export.compare import compare
from export.emit import emit
from export.emitted import Emitted
from export.graphs import video_encoder_tile
from export.graphs.graph import Graph


@pytest.fixture
def graph(checkpoint: Checkpoint) -> Graph:
    return video_encoder_tile.graphs(checkpoint, "fl2va", torch.bfloat16)[0]


@pytest.fixture(scope="module")
def emitted(checkpoints: dict[str, Checkpoint]) -> Emitted:
    return emit(video_encoder_tile.graphs(checkpoints["native"], "fl2va", torch.bfloat16)[0])


@pytest.fixture(scope="module")
def vae(checkpoints: dict[str, Checkpoint]) -> AutoencoderKLMiniMaxH3:
    checkpoint = checkpoints["diffusers"]
    found = load(AutoencoderKLMiniMaxH3(**checkpoint.config("video_vae")), checkpoint, "video_vae")
    found.disable_tiling()
    return found


@pytest.mark.parametrize(("count", "latents", "side"), [(1, 1, 256), (17, 5, 64)])
def test_moments_are_those_of_diffusers(
    graph: Graph, vae: AutoencoderKLMiniMaxH3, count: int, latents: int, side: int
) -> None:
    """A clip in a smaller frame: the module knows no size, and 17 frames of 256x256 take seconds."""
    frames = torch.randn(1, 3, count, side, side)
    moments = eager(graph, frames)
    assert moments.shape == (1, 48, latents, side // 16, side // 16)
    # Float32 sums in another order.
    assert relative(moments, vae.quant_conv(vae.encoder(frames))) < 1e-5


def test_a_frame_does_not_see_later_frames(checkpoints: dict[str, Checkpoint]) -> None:
    graph = video_encoder_tile.graphs(checkpoints["native"], "fl2va", torch.float32)[0]
    frames = torch.randn(1, 3, 17, 32, 32)
    changed = frames.clone()
    changed[:, :, 9:] += 1
    first, second = eager(graph, frames), eager(graph, changed)
    # Latent frame k ends with pixel frame 4 k.
    assert torch.equal(first[:, :, :3], second[:, :, :3])
    assert not torch.isclose(first[:, :, 3:], second[:, :, 3:]).all(dim=1).any()


def test_onnx_runtime_gives_what_torch_gives_for_a_frame_and_for_a_clip(emitted: Emitted) -> None:
    """The shorter clip stands for the whole one, and is what the tracer saw; a pipeline's references are whole."""
    assert {trial["clip_frames"] for trial in emitted.graph.trials} == {1, 5}
    compare(emitted)


@pytest.mark.soak
def test_onnx_runtime_gives_what_torch_gives_for_a_whole_clip(emitted: Emitted) -> None:
    whole = dataclasses.replace(emitted.graph, trials=({"clip_frames": 17, "clip_latents": 5},))
    compare(dataclasses.replace(emitted, graph=whole))


def test_it_is_float32_whatever_is_asked(emitted: Emitted) -> None:
    assert element_types(emitted.model) == {"FLOAT", "INT64"}


def test_exactly_the_encoder_is_bound(emitted: Emitted, checkpoints: dict[str, Checkpoint]) -> None:
    stored = checkpoints["native"].stored("video_vae")
    assert bound_keys(emitted) == sorted(key for key in stored if key.startswith(("encoder.", "quant_conv.")))


def test_a_norm_is_one_node(emitted: Emitted) -> None:
    """What keeps the export short, and the place for a fused kernel."""
    norms = {name.removesuffix(".weight") for name in emitted.weight_names if "norm" in name and "weight" in name}
    assert emitted.census["h3::frame_norm"] == len(norms)
    assert "ai.onnx::Sigmoid" not in emitted.census
