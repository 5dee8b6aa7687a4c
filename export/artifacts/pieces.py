"""Takes an artifact's tensors apart: by the module that they change, and by what they are to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from export.artifacts.artifact import LowRank, Patch
from export.artifacts.base import Base
from export.checkpoint.errors import CheckpointError
from export.checkpoint.expressions import Stored
from export.checkpoint.safetensors_file import DTYPE_NAMES, Header

Role = Literal["down", "up", "difference", "bias_difference", "injected"]
"""Of a module: A and B of its low-rank difference, what is added to weight and bias, a weight that the base lacks."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of an artifact's tensors."""

Pieces = Mapping[Role, Stored]
"""What an artifact holds for one module."""

PEFT_ROLES: Mapping[str, Role] = {".lora_A.default.weight": "down", ".lora_B.default.weight": "up"}
"""Suffixes of adapters that the PEFT library wrote."""


def take_apart(header: Header, roles: Mapping[str, Role], prefix: str = "") -> Mapping[str, Pieces]:
    """The pieces of each module. `roles` are by the suffix of a key, `prefix` is what every key begins with.

    Raises:
        CheckpointError: a key has another suffix or prefix, or a tensor is of a dtype that is no float's.
    """
    modules: dict[str, dict[Role, Stored]] = {}
    for key, stored in header.tensors.items():
        suffix = next((suffix for suffix in roles if key.endswith(suffix)), None)
        if suffix is None or not key.startswith(prefix):
            wanted = f"a name {prefix}MODULE with one of the endings {', '.join(roles)}"
            raise CheckpointError(header.file, key, wanted, "another name")
        if stored.dtype not in FLOATS:
            wanted = f"a dtype of {', '.join(DTYPE_NAMES[dtype] for dtype in FLOATS)}"
            raise CheckpointError(header.file, key, wanted, DTYPE_NAMES[stored.dtype])
        modules.setdefault(key.removeprefix(prefix).removesuffix(suffix), {})[roles[suffix]] = stored
    return modules


@dataclass(frozen=True)
class Pairing:
    """How the low-rank pairs of a file must look: their rank, and what B A is multiplied with."""

    file: Path
    rank: int
    scale: float

    def low_rank(self, module: str, pieces: Pieces, shape: tuple[int, ...]) -> LowRank:
        """The difference of a weight of `shape`, of the pieces "down" and "up".

        Raises:
            CheckpointError: one is missing, or a shape is not that of the rank and the weight.
        """
        names: Mapping[Role, str] = {"down": "A", "up": "B"}
        for role, name in names.items():
            if role not in pieces:
                wanted = "lora_A and lora_B, one of each"
                raise CheckpointError(self.file, module, wanted, f"nothing that ends in lora_{name}, but the other")
        if len(shape) != 2:
            raise CheckpointError(self.file, pieces["down"].key, "a pair for a matrix only", f"a weight {list(shape)}")
        outputs, inputs = shape
        self._check(pieces["down"], (self.rank, inputs))
        self._check(pieces["up"], (outputs, self.rank))
        return LowRank(pieces["down"], pieces["up"], self.scale)

    def _check(self, stored: Stored, shape: tuple[int, int]) -> None:
        if stored.shape != shape:
            wanted = f"{list(shape)}, of rank {self.rank} and the model's sizes"
            raise CheckpointError(self.file, stored.key, wanted, list(stored.shape))


def check_modules(file: Path, found: Iterable[str], expected: Iterable[str]) -> None:
    """Sees that an artifact holds exactly the modules that its family changes.

    Raises:
        CheckpointError: one is missing or unexpected; the counts are named too.
    """
    modules, wanted = set(found), set(expected)
    counts = f"{len(modules)} modules"
    if missing := sorted(wanted - modules):
        raise CheckpointError(file, missing[0], f"a pair for each of {len(wanted)} modules", f"none; {counts} in all")
    if unexpected := sorted(modules - wanted):
        known = f"one of the {len(wanted)} modules that such artifacts change"
        raise CheckpointError(file, unexpected[0], known, f"another; {counts} in all")


def check_touched(file: Path, patches: Mapping[str, Patch], base: Base) -> None:
    """Sees that no block is left as the base has it: it would be a smaller artifact that happens to be sound.

    Raises:
        CheckpointError: for the first block without a patch.
    """
    for block in base.blocks:
        if not any(name.startswith(f"{block}.") for name in patches):
            raise CheckpointError(file, block, f"a change of each of {len(base.blocks)} blocks", "none of this one")
