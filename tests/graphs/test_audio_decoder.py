"""The audio decoder's graph against diffusers' AutoencoderKLMiniMaxH3Audio."""

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
from export.graphs import audio_decoder
from export.graphs.graph import Graph


@pytest.fixture(scope="module")
def graph(checkpoints: dict[str, Checkpoint]) -> Graph:
    """The graph; both layouts store the audio VAE alike."""
    return audio_decoder.graphs(checkpoints["native"], "fl2va", torch.bfloat16)[0]


@pytest.fixture(scope="module")
def emitted(graph: Graph) -> Emitted:
    return emit(graph)


@pytest.mark.parametrize("latents", [1, 2, 40])
def test_a_waveform_is_what_diffusers_decodes(graph: Graph, checkpoints: dict[str, Checkpoint], latents: int) -> None:
    vae = load(
        AutoencoderKLMiniMaxH3Audio(**checkpoints["diffusers"].config("audio_vae")),
        checkpoints["diffusers"],
        "audio_vae",
    )
    normalised = torch.randn(2, 32, latents)
    mean, std = (torch.tensor(getattr(vae.config, name)).view(1, -1, 1) for name in ("latents_mean", "latents_std"))
    expected = vae.decode(normalised * std + mean).sample
    found = eager(graph, normalised)
    assert found.shape == expected.shape == (2, 1, 800 * latents)
    # Full scale is 1. Both are float32 sums in different orders through 130 convolutions.
    assert (found - expected).abs().max() < 1e-5
    assert expected.abs().max() > 0.01


def test_it_is_float32_whatever_is_asked(emitted: Emitted) -> None:
    assert element_types(emitted.model) == {"FLOAT", "INT64"}


def test_onnx_runtime_gives_what_torch_gives_at_any_length(emitted: Emitted) -> None:
    trials = (*emitted.graph.trials, {"audio_latents": 1, "samples": 800})
    compare(dataclasses.replace(emitted, graph=dataclasses.replace(emitted.graph, trials=trials)))


def test_exactly_the_decoder_is_bound(emitted: Emitted, checkpoints: dict[str, Checkpoint]) -> None:
    stored = checkpoints["native"].stored("audio_vae")
    assert bound_keys(emitted) == sorted(key for key in stored if key.startswith(("decoder.", "dec_in_proj.")))


def test_an_activation_is_one_node(emitted: Emitted) -> None:
    """What keeps the export of 127 of them in seconds, and the place for a fused kernel."""
    activations = sum(name.endswith(".act.alpha") for name in emitted.weight_names)
    assert emitted.census["h3::alias_free_snake"] == activations == 127
