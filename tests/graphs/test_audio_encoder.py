"""The audio encoder's graph against diffusers' AutoencoderKLMiniMaxH3Audio."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from running import bound_keys, eager, element_types, load

from export.checkpoint import Checkpoint
from export.compare import compare
from export.emit import emit
from export.emitted import Emitted
from export.graphs import audio_encoder
from export.graphs.graph import Graph


@pytest.fixture(scope="module")
def graph(checkpoints: dict[str, Checkpoint]) -> Graph:
    """The graph; both layouts store the audio VAE alike."""
    return audio_encoder.graphs(checkpoints["native"], "fl2va", torch.bfloat16)[0]


@pytest.fixture(scope="module")
def emitted(graph: Graph) -> Emitted:
    return emit(graph)


@pytest.mark.parametrize("latents", [1, 3, 40])
def test_means_are_those_of_diffusers(graph: Graph, checkpoints: dict[str, Checkpoint], latents: int) -> None:
    checkpoint = checkpoints["diffusers"]
    vae = load(AutoencoderKLMiniMaxH3Audio(**checkpoint.config("audio_vae")), checkpoint, "audio_vae")
    waveform = 0.3 * torch.randn(2, 1, 800 * latents)
    expected = vae.encode(waveform).latent_dist.mode()
    found = eager(graph, waveform)
    assert found.shape == expected.shape == (2, 32, latents)
    # Both are float32 sums in different orders through 37 convolutions.
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("width", "heads"), [(64, 2), (64, 8), (96, 2)])
def test_channels_are_pooled_as_torch_does_where_they_are_more_or_fewer(width: int, heads: int) -> None:
    attention = audio_encoder.PooledAttention(
        {"latent_dim": width, "num_attention_heads": heads, "latent_channels": 32}
    )
    rows = torch.randn(2, 5, width // heads)
    found = rows @ attention._pooling(width // heads)
    torch.testing.assert_close(found, torch.nn.functional.adaptive_avg_pool1d(rows, 32))


def test_it_is_float32_whatever_is_asked(emitted: Emitted) -> None:
    assert element_types(emitted.model) <= {"FLOAT", "INT64", "BOOL"}


def test_onnx_runtime_gives_what_torch_gives_at_any_length(emitted: Emitted) -> None:
    trials = (*emitted.graph.trials, {"audio_latents": 1, "audio_samples": 800})
    compare(dataclasses.replace(emitted, graph=dataclasses.replace(emitted.graph, trials=trials)))


def test_exactly_what_makes_means_is_bound(emitted: Emitted, checkpoints: dict[str, Checkpoint]) -> None:
    stored = checkpoints["native"].stored("audio_vae")
    assert bound_keys(emitted) == sorted(k for k in stored if k.startswith(("encoder.", "pre_block.", "mean_proj.")))


def test_an_activation_is_one_node(emitted: Emitted) -> None:
    snakes = sum(name.endswith(".alpha") for name in emitted.weight_names)
    assert emitted.census["h3::snake"] == snakes == 36
