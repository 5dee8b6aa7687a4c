"""Linear layers divided among ranks: exported graphs in processes of their own, against the undivided graphs.

Each rank runs engine sessions on its own parts of the weights. ONNX Runtime's end where a sum is due, and the runtime
takes it; the programs that inductor compiles take it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines.backends import inductor
from engines.build import build
from engines.graphs import profile_graphs
from engines.profile import Partition, Profile
from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore
from export.binding import bind
from export.checkpoint import Checkpoint, materialise
from export.compare import draw
from export.graphs import block, text_encoder
from export.graphs.graph import Graph
from export.miniature import write_miniature
from export.passes.shard_block import shard_block
from export.trace import BoundModule
from tests.engines.conftest import use_graphs
from tests.engines.workshop import write_profile
from tests.ranks.spawn import run_ranks
from tests.ranks.tensor_ranks import LAYER, TOKENS, block_on_rank, compiled_on_rank, encode, encode_on_rank

LIMIT = 1e-5
"""Of |divided - undivided|, of activations of scale 1: float32 sums in another order."""

needs_compiler = pytest.mark.skipif(inductor.missing_compiler() is not None, reason=str(inductor.missing_compiler()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("miniature")
    write_miniature(root / "native", "native", seed=5)
    return Checkpoint.open(root / "native")


def build_store(
    checkpoint: Checkpoint,
    root: Path,
    graphs: Callable[..., Iterable[Graph]],
    backend: str = "onnxruntime",
    ranks: int = 1,
) -> Path:
    """A store of some graphs and no others, of a profile whose text encoder has so many ranks."""
    root.mkdir()
    profile = write_profile(root / "one.toml", partitions='["fl2va"]', backend=f'"{backend}"')
    with profile.open("a") as opened:
        opened.write(f"\n[ranks]\nulysses = 1\ntext_encoder = {ranks}\nvideo_tiles = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        use_graphs(patch, lambda *arguments: tuple(graphs(*arguments)))
        patch.setattr("engines.build.check_consumption", lambda *arguments: None)
        return build(checkpoint.root, profile, root / "store").store


def of_text_encoder(checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path) -> Iterator[Graph]:
    """What a profile has of the text encoder."""
    return (
        graph for graph in profile_graphs(checkpoint, profile, partition, weights) if graph.name.startswith("text_")
    )


@pytest.fixture(scope="module")
def whole(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, int]:
    """The conditioning that one process computes, and the bytes that it is bound to."""
    store = EngineStore.open(build_store(checkpoint, tmp_path_factory.mktemp("whole") / "built", of_text_encoder))
    return encode(EngineSet.open(store), None), store.manifest.bound_bytes(store.manifest.graphs)


def check_ranks(found: list[dict[str, torch.Tensor]], whole: tuple[torch.Tensor, int], norms: int) -> None:
    """All have the conditioning, bit for bit the same, and their parts of the tensors, `norms` bytes on each."""
    expected, nbytes = whole
    for rank in found:
        assert torch.equal(rank["text"], found[0]["text"])
        assert rank["bytes"] - norms == (nbytes - norms) / len(found)
    assert (found[0]["text"] - expected).abs().max() <= LIMIT * expected.abs().max()


def norm_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the encoder's norms, which every rank has whole."""
    _, layer = text_encoder.graphs(checkpoint, "fl2va", torch.float32)
    return sum(bound[n].nbytes for bound in bind(layer).instances for n in bound if "norm" in n)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_text_encoder_on_ranks_is_the_text_encoder(
    checkpoint: Checkpoint, whole: tuple[torch.Tensor, int], ranks: int, tmp_path: Path
) -> None:
    store = build_store(checkpoint, tmp_path / "built", of_text_encoder, ranks=ranks)
    check_ranks(run_ranks(encode_on_rank, ranks, tmp_path, store), whole, norm_bytes(checkpoint))


@needs_compiler
def test_a_compiled_text_encoder_sums_over_its_ranks_itself(
    checkpoint: Checkpoint, whole: tuple[torch.Tensor, int], tmp_path: Path
) -> None:
    """Its token table is left out, which is compiled like any other graph."""

    def layers(*arguments: Any) -> Iterator[Graph]:
        return (graph for graph in of_text_encoder(*arguments) if graph.name == text_encoder.LAYER)

    store = build_store(checkpoint, tmp_path / "built", layers, "inductor", ranks=2)
    program = EngineStore.open(store).manifest.graphs[text_encoder.LAYER].program
    assert program is not None
    assert program.census["h3::all_reduce"] == 2
    (table,) = bind(text_encoder.graphs(checkpoint, "fl2va", torch.float32)[0]).instances[0].values()
    save_file({"rows": materialise(table)[TOKENS].float()}, tmp_path / "rows.safetensors")
    found = run_ranks(compiled_on_rank, 2, tmp_path, store, tmp_path / "rows.safetensors")
    for rank in found:
        assert torch.equal(rank["text"], found[0]["text"])
    assert (found[0]["text"] - whole[0]).abs().max() <= LIMIT * whole[0].abs().max()


def test_a_block_on_two_ranks_is_the_block(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (graph,) = block.graphs(checkpoint, "fl2va", torch.float32)
    generator = torch.Generator().manual_seed(3)
    inputs = {spec.name: draw(spec, {"rows": 21}, generator) for spec in graph.inputs}
    save_file(inputs, tmp_path / "inputs.safetensors")
    heads = checkpoint.dimensions.denoiser.heads
    segments = [g for s in block.segments(checkpoint, "fl2va", torch.float32) for g in shard_block(s, heads, 2)]
    store = build_store(checkpoint, tmp_path / "built", lambda *arguments: segments)
    found = run_ranks(block_on_rank, 2, tmp_path, store, tmp_path / "inputs.safetensors")
    binding = bind(graph)
    weights = tuple(materialise(binding.instances[LAYER][w.name]) for w in binding.inputs)
    expected = BoundModule(graph, binding, LAYER)(tuple(inputs.values()), weights)
    for rank in found:
        assert torch.equal(rank["hidden_out"], found[0]["hidden_out"])
    assert (found[0]["hidden_out"] - expected).abs().max() <= LIMIT * expected.abs().max()
