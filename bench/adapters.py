"""Adapters that requests choose between: what their blocks cost beside the base's, and what changing them costs.

A block runs on the base's engine, on the engine with low-rank sides, or on the base's over an adapter's merged weights:
on a GPU at released dimensions, where every block has random weights of its own, or on the engines of a store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import host, machine
from bench.block import ROWS, block_inputs
from bench.measuring import Timer, Timing, in_turns, once, once_on_host
from bench.synthetic import PARTITION, RandomWeights, Wanted, open_engines, synthetic_store
from engines.adapters import AdapterMode, low_rank_name, weights_key
from engines.profile import Profile
from engines.sessions.engine_set import EngineSet

GRAPHS = ("block", low_rank_name("block"))

BASE = "base"

MODES: Mapping[str, AdapterMode] = {"low_rank": "low_rank", "another": "low_rank", "merged": "merged"}
"""Of the adapters that are measured at released dimensions, by their names."""

FORWARDS = 4
"""Of a request with a few-step adapter."""

SMALL_ROWS = 2560
"""Rows of the shortest clip on the smallest canvas, in whose requests a change would weigh most."""

ROUNDS = 3
"""In each, every way follows every other one, and itself."""


@dataclass(frozen=True)
class Way:
    """Engines, and the adapter that they run with."""

    engines: EngineSet
    adapter: str | None = None

    def block(self, inputs: Mapping[str, torch.Tensor], index: int = 0) -> torch.Tensor:
        """Rows after one block."""
        return self.engines.run("block", inputs, index, PARTITION, adapter=self.adapter)["hidden_out"]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks' weights that are there for this way alone."""
        manifest = self.engines.manifest
        dtypes = {w.name: w.dtype for w in manifest.graphs[manifest.engine_of("block", self.adapter)].weights}
        instances = manifest.bindings[weights_key(PARTITION, self.adapter)]["block"]
        return sum(region.nbytes(dtypes[name]) for regions in instances for name, region in regions.items())

    def request(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rows after the last block of the last of a request's forwards, which all begin with the same."""
        hidden = inputs["hidden"]
        for index in (i for _ in range(FORWARDS) for i in range(self.engines.manifest.dimensions.denoiser.layers)):
            hidden = self.block({**inputs, "hidden": hidden if index else inputs["hidden"]}, index)
        return hidden


def measure(folder: Path, profile: Profile, rows: int = ROWS) -> dict[str, Any]:
    """Milliseconds of a block in each way, of requests after another adapter's and after the same, and bytes."""
    store = synthetic_store(Wanted(profile, GRAPHS, adapters=tuple(MODES.items())), folder)
    engines = open_engines(store, GRAPHS, RandomWeights(store.manifest, GRAPHS))
    engines.warm()
    return {"host": host.describe(), **_measured(engines, rows, SMALL_ROWS, once)}


def measure_store(store: Path) -> dict[str, Any]:
    """The same of a store's adapters, on rows of the smallest request."""
    engines = EngineSet.open(store, partitions=[PARTITION])
    engines.warm()
    on_gpu = engines.manifest.profile.on_gpu
    about = host.describe() if on_gpu else machine.describe()
    return {"host": about, **_measured(engines, SMALL_ROWS, SMALL_ROWS, once if on_gpu else once_on_host)}


def _measured(engines: EngineSet, rows: int, small: int, timer: Timer) -> dict[str, Any]:
    adapters = [name for name, record in engines.manifest.adapters.items() if record.partition == PARTITION]
    ways = {BASE: Way(engines), **{name: Way(engines, name) for name in adapters}}
    inputs = block_inputs(engines, rows)
    blocks = in_turns({name: _caller(way, inputs) for name, way in ways.items()}, timer=timer)
    changes = changing(ways, block_inputs(engines, small), timer)
    layers, profile = engines.manifest.dimensions.denoiser.layers, engines.manifest.profile.name
    return {
        "what": f"adapters over {profile}, blocks of {rows} rows, random data",
        "profile": profile,
        "rows": rows,
        "block": {name: t.as_json() | {"of_base": t.median / blocks[BASE].median} for name, t in blocks.items()},
        "requests": {"rows": small, "forwards": FORWARDS, "blocks": layers, **changes.as_json()},
        "change, of such a request": changes.share,
        "change, of a request of all rows": changes.cost / (FORWARDS * layers * blocks[BASE].median),
        "same bytes after every change": changes.exact,
        "bytes": {name: way.nbytes for name, way in ways.items()},
    }


def _caller(way: Way, inputs: Mapping[str, torch.Tensor]) -> Callable[[], object]:
    return lambda: way.block(inputs)


@dataclass(frozen=True)
class Changes:
    """Requests in each way that follow one in another way, and that follow one in the same; `exact`: each way's gave
    the same bytes always."""

    changed: Mapping[str, Timing]
    same: Mapping[str, Timing]
    exact: bool

    @property
    def cost(self) -> float:
        """Milliseconds by which a request is longer that follows one in another way, at most."""
        return max(self.changed[name].median - self.same[name].median for name in self.same)

    @property
    def share(self) -> float:
        """The largest of these relative to the request."""
        return max(self.changed[name].median / self.same[name].median - 1 for name in self.same)

    def as_json(self) -> dict[str, Any]:
        """Both in milliseconds."""
        parts = {"after another": self.changed, "after the same": self.same}
        return {part: {name: t.as_json() for name, t in timings.items()} for part, timings in parts.items()}


def changing(ways: Mapping[str, Way], inputs: Mapping[str, torch.Tensor], timer: Timer) -> Changes:
    """Requests one after the other: in each way twice, then in the next, until each has followed each other."""
    first = {name: way.request(inputs).clone() for name, way in ways.items()}
    times: dict[bool, dict[str, list[float]]] = {same: {name: [] for name in ways} for same in (False, True)}
    exact = bool(all(rows.isfinite().all() for rows in first.values()))
    for before, name in ROUNDS * tuple(itertools.permutations(ways, 2)):
        ways[before].request(inputs)
        for same in (False, True):
            found: list[torch.Tensor] = []
            times[same][name].append(timer(_keeping(ways[name], inputs, found)))
            exact = exact and torch.equal(found[0], first[name])
    changed, same_way = ({name: Timing(tuple(each)) for name, each in times[same].items()} for same in (False, True))
    return Changes(changed, same_way, exact)


def _keeping(way: Way, inputs: Mapping[str, torch.Tensor], found: list[torch.Tensor]) -> Callable[[], object]:
    return lambda: found.append(way.request(inputs))
