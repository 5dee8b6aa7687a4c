"""How weights are held in files of ours: quantised, as the parameters of a linear layer's module, or as they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import torch
from torch import nn

from export.checkpoint.safetensors_file import Declared
from plugins.ops import fp8_linear, nvfp4_linear

SchemeName = Literal["fp8", "nvfp4"]


class SchemeError(ValueError):
    """A weight that a scheme cannot hold."""


class Fp8Linear(nn.Module):
    """A linear layer without a bias, of E4M3 weights with a scale for each output channel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        for name, declared in FP8.tensors((outputs, inputs)).items():
            self.register_parameter(name, _parameter(declared))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [.., K] to rows [.., N] in the same dtype."""
        return fp8_linear.OP(x, self.weight, self.weight_scale)


class Nvfp4Linear(nn.Module):
    """A linear layer without a bias, of E2M1 weights with a scale for each block of 16 and one above."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        for name, declared in NVFP4.tensors((outputs, inputs)).items():
            self.register_parameter(name, _parameter(declared))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [.., K] to rows [.., N] in the same dtype."""
        return nvfp4_linear.OP(x, self.weight_packed, self.weight_block_scale, self.weight_scale)


class Encoding(ABC):
    """How a weight [N, K] is held. It is encoded in slabs of rows, after what concerns all of it has been found."""

    name: ClassVar[str]
    suffixes: ClassVar[Mapping[str, str]]
    """The parameters that a weight becomes, and what their names in a file end in after the weight's; may be empty."""

    @abstractmethod
    def tensors(self, shape: tuple[int, ...]) -> dict[str, Declared]:
        """Shape and dtype of each parameter, for a weight of that shape. Raises SchemeError."""

    @abstractmethod
    def whole(self, slabs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters that are one for the whole weight, of slabs of it as it is stored."""

    @abstractmethod
    def rows(self, slab: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters that have a row for each row of the weight, for a slab of it as it is stored."""


class Scheme(Encoding):
    """A scheme of quantisation."""

    name: ClassVar[SchemeName]
    linear: ClassVar[type[nn.Module]]
    """The module that has the parameters."""
    largest_flip: ClassVar[float]
    """How far a rounding that falls to the other side moves an activation, as a share of its row's largest."""


class _Plain(Encoding):
    name = "plain"
    suffixes: ClassVar[Mapping[str, str]] = {"weight": ""}

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Declared]:
        return {"weight": Declared(shape, torch.bfloat16)}

    def whole(self, slabs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}

    def rows(self, slab: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": slab.to(torch.bfloat16)}


class _Fp8(Scheme):
    name = "fp8"
    linear = Fp8Linear
    suffixes: ClassVar[Mapping[str, str]] = {"weight": "fp8", "weight_scale": "scale"}
    largest_flip = 32 / fp8_linear.E4M3_MAX  # the values below 448 are 32 apart

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Declared]:
        channels, inner = _matrix(shape)
        return {
            "weight": Declared((channels, inner), fp8_linear.E4M3),
            "weight_scale": Declared((channels,), torch.float32),
        }

    def whole(self, slabs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}

    def rows(self, slab: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values, scale = fp8_linear.quantise_rows(slab.float())
        return {"weight": values, "weight_scale": scale.squeeze(-1)}


class _Nvfp4(Scheme):
    name = "nvfp4"
    linear = Nvfp4Linear
    suffixes: ClassVar[Mapping[str, str]] = {
        "weight_packed": "nvfp4",
        "weight_block_scale": "block_scale",
        "weight_scale": "scale",
    }
    largest_flip = 2 / nvfp4_linear.E2M1_MAX  # from 4 to 6

    def tensors(self, shape: tuple[int, ...]) -> dict[str, Declared]:
        channels, inner = _matrix(shape)
        if inner % nvfp4_linear.BLOCK:
            raise SchemeError(f"inner size {inner}: must be a multiple of {nvfp4_linear.BLOCK} for nvfp4")
        return {
            "weight_packed": Declared((channels, inner // 2), torch.uint8),
            "weight_block_scale": Declared((channels, inner // nvfp4_linear.BLOCK), fp8_linear.E4M3),
            "weight_scale": Declared((1,), torch.float32),
        }

    def whole(self, slabs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        amax = torch.stack([slab.abs().amax().float() for slab in slabs]).amax().reshape(1)
        return {"weight_scale": nvfp4_linear.upper_scale(amax)}

    def rows(self, slab: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values, block_scale = nvfp4_linear.quantise_blocks(slab.float(), whole["weight_scale"])
        return {"weight_packed": nvfp4_linear.pack(values.flatten(-2)), "weight_block_scale": block_scale}


PLAIN: Encoding = _Plain()
"""In bfloat16, as the transformer's linear layers are released."""

FP8: Scheme = _Fp8()
NVFP4: Scheme = _Nvfp4()

SCHEMES: Mapping[SchemeName, Scheme] = {"fp8": FP8, "nvfp4": NVFP4}


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise SchemeError(f"shape {list(shape)}: must be [channels, inner]")
    return shape[0], shape[1]


def _parameter(declared: Declared) -> nn.Parameter:
    assert declared.shape is not None  # a scheme's tensors all have one
    return nn.Parameter(torch.empty(declared.shape, dtype=declared.dtype), requires_grad=False)
