"""The graphs of all tasks, and the check that together they use the checkpoint exactly once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from export.checkpoint import Checkpoint, Stored
from export.checkpoint.tree import Component
from export.graphs import (
    audio_decoder,
    audio_encoder,
    block,
    context,
    epilogue,
    modulation,
    prologue,
    text_encoder,
    video_decoder_tile,
    video_encoder_tile,
    vision_encoder,
)
from export.graphs.graph import Graph
from plugins.dimensions import Dimensions

SHOWN = 20
"""Problems that an error lists; it counts the rest."""


@dataclass(frozen=True)
class Compute:
    """Dtypes of the components' matrix products; the vision encoder has the text encoder's, the audio VAE and the
    video encoder are float32 always."""

    text_encoder: torch.dtype
    denoiser: torch.dtype
    video_decoder: torch.dtype

    @staticmethod
    def uniform(dtype: torch.dtype) -> Compute:
        """The same dtype everywhere."""
        return Compute(dtype, dtype, dtype)


def component_graphs(
    checkpoint: Checkpoint, partition: str, compute: Compute, segmented: bool = False
) -> dict[str, tuple[Graph, ...]]:
    """The graphs that serve requests from one partition, by component, in the order in which a request meets them.

    `segmented`: the transformer's block is the three graphs of its segments instead of one.
    """
    blocks = block.segments if segmented else block.graphs
    denoiser = (context.graphs, modulation.graphs, prologue.graphs, blocks, epilogue.graphs)
    return {
        "vision_encoder": vision_encoder.graphs(checkpoint, partition, compute.text_encoder),
        "text_encoder": text_encoder.graphs(checkpoint, partition, compute.text_encoder),
        "video_encoder": video_encoder_tile.graphs(checkpoint, partition, torch.float32),
        "audio_encoder": audio_encoder.graphs(checkpoint, partition, torch.float32),
        "denoiser": tuple(g for graphs in denoiser for g in graphs(checkpoint, partition, compute.denoiser)),
        "video_decoder": video_decoder_tile.graphs(checkpoint, partition, compute.video_decoder),
        "audio_decoder": audio_decoder.graphs(checkpoint, partition, torch.float32),
    }


def model_graphs(
    checkpoint: Checkpoint, partition: str, compute: Compute, segmented: bool = False
) -> tuple[Graph, ...]:
    """All graphs that serve requests from one partition, in the order in which a request meets them."""
    return tuple(g for graphs in component_graphs(checkpoint, partition, compute, segmented).values() for g in graphs)


def unused(dimensions: Dimensions) -> dict[Component, re.Pattern[str]]:
    """For each component, the keys that no task has a use for, in either layout (spec/model.md 1a to 1g)."""
    kept = "|".join(str(i) for i in range(dimensions.text_encoder.layers))
    return {
        "denoiser": re.compile(r"rope\.inv_freq"),
        "text_encoder": re.compile(
            rf"model\.language_model\.layers\.(?!(?:{kept})\.).*|model\.language_model\.norm\.weight"
            r"|lm_head\.weight"
        ),
        "video_vae": re.compile(r"decoder\.mask_token"),
        "audio_vae": re.compile(r"logs_proj\..*"),
    }


@dataclass(frozen=True)
class Problem:
    """One tensor that is not consumed as it must be."""

    file: Path
    key: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: expected {self.expected}, found {self.found}"


class ConsumptionError(ValueError):
    """The graphs do not consume the checkpoint exactly; `problems` has one entry for each tensor concerned."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        rest = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        super().__init__("\n".join([*map(str, problems[:SHOWN]), *rest]))


def check_consumption(checkpoint: Checkpoint, graphs: Iterable[Graph], partition: str) -> None:
    """Checks that every tensor of the partition is bound by one instance of one graph, or is declared unused.

    Raises:
        ConsumptionError: a bound tensor is missing or has another shape or dtype, or a tensor is unused or used twice.
    """
    stored = {c: checkpoint.stored(c, partition) for c in unused(checkpoint.dimensions)}
    known = {_identity(tensor): tensor for tensors in stored.values() for tensor in tensors.values()}
    users = _users(graphs)
    problems = (
        *_misread(users, known),
        *_used_twice(users),
        *_never_used(users, stored, unused(checkpoint.dimensions)),
    )
    if problems:
        raise ConsumptionError(problems)


@dataclass(frozen=True)
class _User:
    graph: str
    instance: int
    reads: Stored

    def __str__(self) -> str:
        return f"{self.graph}[{self.instance}]"


_Identity = tuple[Path, str]


def _identity(tensor: Stored) -> _Identity:
    return tensor.file, tensor.key


def _users(graphs: Iterable[Graph]) -> dict[_Identity, list[_User]]:
    """Who binds each tensor; an instance that cuts several parameters from one counts once."""
    users: dict[_Identity, list[_User]] = {}
    for graph in graphs:
        for instance, weights in enumerate(graph.weights):
            leaves = {_identity(leaf): leaf for weight in weights.values() for leaf in weight.leaves()}
            for identity, leaf in leaves.items():
                users.setdefault(identity, []).append(_User(graph.name, instance, leaf))
    return users


def _misread(users: Mapping[_Identity, list[_User]], known: Mapping[_Identity, Stored]) -> Iterator[Problem]:
    for (file, key), readers in users.items():
        found = known.get((file, key))
        for user in readers:
            expected = f"{user.reads.dtype} {list(user.reads.shape)} for {user}"
            if found is None:
                yield Problem(file, key, expected, "no such tensor")
            elif (found.dtype, found.shape) != (user.reads.dtype, user.reads.shape):
                yield Problem(file, key, expected, f"{found.dtype} {list(found.shape)}")


def _used_twice(users: Mapping[_Identity, list[_User]]) -> Iterator[Problem]:
    for (file, key), readers in users.items():
        if len(readers) > 1:
            yield Problem(file, key, "one user", " and ".join(map(str, readers)))


def _never_used(
    users: Mapping[_Identity, list[_User]],
    stored: Mapping[Component, Mapping[str, Stored]],
    declared: Mapping[Component, re.Pattern[str]],
) -> Iterator[Problem]:
    for component, tensors in stored.items():
        for key, tensor in tensors.items():
            if _identity(tensor) not in users and not declared[component].fullmatch(key):
                yield Problem(tensor.file, key, f"a user among the graphs of {component}", "none")
