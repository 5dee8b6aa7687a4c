"""Weight bytes are those that the real graphs bind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch

from engines.graphs import profile_graphs
from engines.plan.weights import Model, graph_weights
from engines.profile import PROFILES, Profile
from export.binding import bind
from export.checkpoint import Checkpoint, CheckpointError
from export.checkpoint.outline import Outline
from export.miniature import write_miniature, write_sparse_released
from export.miniature.write import LayoutName


def _bound(root: Path, profile: str | Path) -> dict[str, tuple[int, ...]]:
    """Bytes of the stored tensors that each instance of each graph binds, of quantised ones in a file to be written."""
    graphs = profile_graphs(Checkpoint.open(root), Profile.load(profile), "fl2va", root / "weights")
    bindings = {graph.name: bind(graph) for graph in graphs}
    return {
        name: tuple(sum(s.nbytes for s in instance.values()) for instance in binding.instances)
        for name, binding in bindings.items()
    }


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("size", ["miniature", "released"])
def test_bytes_are_those_of_the_graphs_bindings(
    tmp_path: Path, layout: LayoutName, size: Literal["miniature", "released"]
) -> None:
    if size == "miniature":
        write_miniature(tmp_path / "c", layout, 0)
    else:
        write_sparse_released(tmp_path / "c", layout)
    ranks = Profile.load("h200x2").ranks.text_encoder
    planned = {n: w.nbytes("bfloat16", ranks) for n, w in graph_weights(Outline.read(tmp_path / "c")).items()}
    assert planned == _bound(tmp_path / "c", "h200x2")


@pytest.mark.parametrize("arithmetic", ["bfloat16", "fp8"])
def test_bytes_of_the_text_encoder_s_ranks_are_those_of_their_bindings(
    tmp_path: Path, arithmetic: Literal["bfloat16", "fp8"]
) -> None:
    write_sparse_released(tmp_path / "c", "native")
    profile = (PROFILES / "h200x8.toml").read_text()
    text_encoder = 'text_encoder = "bfloat16"'
    assert text_encoder in profile
    (tmp_path / "mine.toml").write_text(profile.replace(text_encoder, f'text_encoder = "{arithmetic}"'))
    ranks = Profile.load(tmp_path / "mine.toml").ranks.text_encoder
    assert ranks == 8
    bound, planned = _bound(tmp_path / "c", tmp_path / "mine.toml"), graph_weights(Outline.read(tmp_path / "c"))
    for name in ("text_encoder.embedding", "text_encoder.layer"):
        assert bound[name] == planned[name].nbytes(arithmetic, ranks)
        assert 7.9 < planned[name].nbytes(arithmetic)[0] / bound[name][0] <= 8


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_bytes_of_fp8_and_of_segments_are_those_of_the_graphs_bindings(tmp_path: Path, layout: LayoutName) -> None:
    """The profile's blocks are in segments, with FP8 linears like the context's; everything else is as stored."""
    write_sparse_released(tmp_path / "c", layout)
    bound = _bound(tmp_path / "c", "rtx5090")
    weights = Model(Outline.read(tmp_path / "c")).weights
    quantised = {"block.project", "block.attend", "block.finish", "context"}
    assert quantised < bound.keys()
    planned = {n: weights[n].nbytes("fp8" if n in quantised else "bfloat16") for n in bound}
    # A graph without weights has one instance in the build.
    assert {n: sizes for n, sizes in planned.items() if any(sizes)} == {n: s for n, s in bound.items() if any(s)}


CONFIGURATIONS = ("config.json", "model_index.json", "metadata.json", "scheduler_config.json")


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_configuration_files_alone_are_enough(tmp_path: Path, layout: LayoutName) -> None:
    write_sparse_released(tmp_path / "whole", layout)
    whole = Checkpoint.open(tmp_path / "whole")
    for file in (tmp_path / "whole").rglob("*.json"):
        if file.name in CONFIGURATIONS or file.parent.name == "processor":
            copy = tmp_path / "bare" / file.relative_to(tmp_path / "whole")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "bare")
    outline = Outline.read(tmp_path / "bare")
    assert outline.dimensions == whole.dimensions
    stored = {c: sum(s.nbytes for s in whole.stored(c).values()) for c in outline.configs}
    mask = whole.stored("video_vae").get("decoder.mask_token")
    stored["video_vae"] -= mask.nbytes if mask else 0
    assert {c: outline.stored_bytes(c) for c in outline.configs} == stored


def test_quantised_linears_take_a_byte_or_half_and_their_scales(outline: Outline) -> None:
    block = graph_weights(outline)["block"]
    shapes = [(3 * 7168, 5376), (5376, 7168), (2 * 14336, 5376), (5376, 14336)]
    kept = 2 * (2 * 5376 + 2 * 128)
    fp8 = sum(n * k + 4 * n for n, k in shapes)
    nvfp4 = sum(n * k // 2 + n * k // 16 for n, k in shapes) + 4 * 6
    assert block.nbytes("fp8")[0] == fp8 + kept
    assert block.nbytes("nvfp4")[0] == nvfp4 + kept
    assert torch.finfo(torch.float8_e4m3fn).bits == 8
