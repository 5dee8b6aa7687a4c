"""Blocks that exchange inside their engine: one program compiled by inductor, run by two processes as by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engines import build as building
from engines.backends import inductor as compiler
from engines.build import build
from engines.graphs import profile_graphs
from engines.profile import Partition, Profile
from engines.sessions.engine_set import EngineSet
from engines.store import EngineStore
from export.binding import bind
from export.checkpoint import Checkpoint, materialise
from export.graphs import block
from export.graphs.graph import Graph
from export.miniature import write_miniature
from export.trace import BoundModule
from plugins.kernels.symmetric_exchange import _FREE, _holders
from plugins.ranks import Loopback, ProcessGroup
from runtime.attention import BlocksAttention
from runtime.block import Sharing, open_blocks
from tests.engines.conftest import use_graphs
from tests.engines.workshop import write_profile
from tests.ranks.spawn import run_ranks

RANKS = 2
ROW_COUNTS = (1, 8, 37)
LAYERS = 2
ALONE = "alone"

pytestmark = pytest.mark.skipif(compiler.missing_compiler() is not None, reason=str(compiler.missing_compiler()))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The miniature's blocks for two ranks, in `store`, beside their checkpoint."""
    root = tmp_path_factory.mktemp("whole")
    write_miniature(root / "checkpoint", "native", seed=5)
    profile = write_profile(root / "ranks.toml", backend='"inductor"', partitions='["fl2va"]')
    profile.write_text(f"{profile.read_text()}\n[ranks]\nulysses = {RANKS}\ntext_encoder = 1\nvideo_tiles = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        use_graphs(patch, _block_alone)
        patch.setattr(building, "check_consumption", lambda checkpoint, graphs, partition: None)
        build(root / "checkpoint", profile, root / "store")
        yield root


def _block_alone(checkpoint: Checkpoint, profile: Profile, partition: Partition, weights: Path) -> tuple[Graph, ...]:
    return tuple(graph for graph in profile_graphs(checkpoint, profile, partition, weights) if graph.name == "block")


def inputs(rows: int, hidden: int) -> dict[str, torch.Tensor]:
    """What a block takes of all rows, and its table."""
    generator = torch.Generator().manual_seed(rows)
    angles = torch.rand(rows, 48, generator=generator)
    return {
        "hidden": torch.randn(rows, hidden, generator=generator),
        # Shifts, scales and gates that keep the values of order 1.
        "modulation": 0.3 * torch.randn(block.TABLE_ROWS, 6 * hidden, generator=generator),
        "modulation_index": torch.randint(block.TABLE_ROWS, (rows,), generator=generator),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def two_layers(rank: int, size: int, store: str) -> Mapping[str, torch.Tensor]:
    """This rank's rows behind the first layers, for each number of rows."""
    engines = EngineSet.open(store)
    everybody = ProcessGroup(dist.new_group(range(size)))
    (width,) = (spec.shape[1] for spec in engines.manifest.graphs["block"].inputs if spec.name == "hidden")
    found = {}
    for rows in ROW_COUNTS:
        local = engines.manifest.profile.local_rows(rows)
        given = inputs(rows, int(width))
        table = given.pop("modulation")
        mine = {name: _share(x, rank, local) for name, x in given.items()}
        hidden = mine.pop("hidden")
        for name, group in (("both", everybody), (ALONE, Loopback(size))):
            sharing = Sharing(group, rows)
            blocks = open_blocks(engines, "fl2va", mine, BlocksAttention(engines), sharing=sharing)
            result = hidden
            for layer in range(LAYERS):
                result = blocks.run(layer, result, table)
            found[f"{name}.{rows}"] = result.clone()
    return found


def _share(rows: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    mine = rows[rank * local : (rank + 1) * local]
    return torch.cat([mine, mine.new_zeros(local - len(mine), *mine.shape[1:])])


def test_two_processes_are_one_that_has_all_rows(root: Path, tmp_path: Path) -> None:
    found = run_ranks(two_layers, RANKS, tmp_path / "ranks", str(root / "store"), timeout=120)
    (graph,) = block.graphs(Checkpoint.open(root / "checkpoint"), "fl2va", torch.float32)
    binding = bind(graph)
    for rows in ROW_COUNTS:
        given = inputs(rows, graph.inputs[0].shape[1])  # type: ignore[arg-type]
        expected = given.pop("hidden")
        for layer in range(LAYERS):
            weights = tuple(materialise(binding.instances[layer][weight.name]) for weight in binding.inputs)
            with torch.no_grad():
                expected = BoundModule(graph, binding, layer)((expected, *given.values()), weights)
        together = torch.cat([each[f"both.{rows}"] for each in found])[:rows]
        assert (together - expected).abs().max() <= 1e-5
        if rows > 1:  # a rank that had heard nothing from the other would be elsewhere
            apart = torch.cat([each[f"{ALONE}.{rows}"] for each in found])[:rows]
            assert (apart - expected).abs().max() > 1e-3


class Placed(Loopback):
    """A group whose results lie where those of the last exchange but one were, as between GPUs."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._places = {key: torch.empty(1 << 20) for key in product(range(2), range(4))}
        self._exchanges = [0, 0]

    def to_heads(self, parts: Sequence[torch.Tensor], rows: int) -> tuple[torch.Tensor, ...]:
        self._exchanges[0] += 1
        found = super().to_heads(parts, rows)
        return tuple(self._placed(part, self._exchanges[0] % 2, i) for i, part in enumerate(found))

    def to_rows(self, part: torch.Tensor, local_rows: int) -> torch.Tensor:
        self._exchanges[1] += 1
        return self._placed(super().to_rows(part, local_rows), self._exchanges[1] % 2, 3)

    def _placed(self, part: torch.Tensor, turn: int, number: int) -> torch.Tensor:
        place = self._places[turn, number]
        assert _holders(place) == _FREE, "a result of the last exchange but one is still held"
        return place[: part.numel()].view(part.shape).copy_(part)


def test_blocks_let_go_of_what_an_exchange_brought_before_the_next_but_one(root: Path) -> None:
    engines, group, rows = EngineSet.open(root / "store"), Placed(RANKS), 37
    (width,) = (spec.shape[1] for spec in engines.manifest.graphs["block"].inputs if spec.name == "hidden")
    given = inputs(engines.manifest.profile.local_rows(rows), int(width))
    hidden, table = given.pop("hidden"), given.pop("modulation")
    results = []
    for each in (group, Loopback(RANKS)):
        blocks = open_blocks(engines, "fl2va", given, BlocksAttention(engines), sharing=Sharing(each, rows))
        result = hidden
        for layer in range(2 * LAYERS):
            result = blocks.run(layer % LAYERS, result, table)
        results.append(result.clone())
    assert torch.equal(*results)


def test_what_the_program_exchanges_is_on_record(root: Path) -> None:
    record = EngineStore.open(root / "store", to_run=False).manifest.graphs["block"]
    assert record.program is not None
    exchanges = {"h3::ulysses_all_to_all": 1, "h3::ulysses_all_to_all_back": 1}
    assert record.program.census.items() >= exchanges.items()
    assert record.exchanges == (2, 2)
