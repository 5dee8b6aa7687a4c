"""Checkpoints shared by the export tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from denoiser_checkpoint import DenoiserCheckpoint, save, small_denoiser

LAYOUTS = {"native": "interleaved", "native-stacked": "stacked", "diffusers": "split"}


@pytest.fixture(scope="session")
def denoisers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DenoiserCheckpoint]:
    """The same bfloat16 denoiser in every layout."""
    directory: Path = tmp_path_factory.mktemp("denoisers")
    model = small_denoiser(seed=11, dtype=torch.bfloat16)
    return {name: save(model, name.partition("-")[0], qkv, directory) for name, qkv in LAYOUTS.items()}
