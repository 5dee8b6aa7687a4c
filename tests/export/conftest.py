"""Checkpoints and emitted graphs shared by the export tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from denoiser_checkpoint import DenoiserCheckpoint, denoiser_graphs, save, small_denoiser

from export.emit import Emitted, emit

LAYOUTS = {"native": "interleaved", "native-stacked": "stacked", "diffusers": "split"}

Emit = Callable[[str, str, torch.dtype], Emitted]


@pytest.fixture(scope="session")
def denoisers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DenoiserCheckpoint]:
    """The same bfloat16 denoiser in every layout."""
    directory: Path = tmp_path_factory.mktemp("denoisers")
    model = small_denoiser(seed=11, dtype=torch.bfloat16)
    return {name: save(model, name.partition("-")[0], qkv, directory) for name, qkv in LAYOUTS.items()}


@pytest.fixture(scope="session")
def emit_denoiser(denoisers: dict[str, DenoiserCheckpoint]) -> Emit:
    """(layout, graph name, compute) to the emitted graph; each is emitted once a session."""

    @cache
    def emitted(layout: str, name: str, compute: torch.dtype) -> Emitted:
        return emit(denoiser_graphs(denoisers[layout], compute)[name])

    return emitted
