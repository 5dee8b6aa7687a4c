"""RMSNorm and rotation of heads of 128 bfloat16 channels: `norm_rotary.cu` says how, here is what launches it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from plugins.kernels.cuda_module import CudaModule, compile_cubin

HEAD = 128
"""Channels of a head; no others are served."""

CAPABILITY = (8, 0)
"""Least compute capability: the first with bfloat16 conversions."""

_BLOCK = 224
_CHANNELS = 8
_SOURCE = Path(__file__).with_suffix(".cu")


class _Problem(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("x", "weight", "cos", "sin", "result")),
        *((n, ctypes.c_longlong) for n in ("row_stride", "head_stride", "cos_stride", "sin_stride")),
        ("heads", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


def serves(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel takes such tensors: bfloat16, float32 angles, and rows that begin at multiples of 16 bytes."""
    return (
        x.numel() > 0
        and x.dtype == weight.dtype == torch.bfloat16
        and cos.dtype == sin.dtype == torch.float32
        and x.shape[-1] == HEAD
        and weight.is_contiguous()
        and cos.shape[-1] % _CHANNELS == 0
        and 0 < 2 * cos.shape[-1] <= HEAD
        and all(tensor.stride(-1) == 1 for tensor in (x, cos, sin))
        and not any(stride % _CHANNELS for stride in (*x.stride()[:-1], x.storage_offset()))
        and not any(t.stride(0) % 4 or t.storage_offset() % 4 for t in (cos, sin))
    )


def norm_rotary(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `plugins.ops.norm_rotary.reference` of twice as many channels as there are angles; [S, H, 128] contiguous."""
    rows, heads, _ = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pointers = (tensor.data_ptr() for tensor in (x, weight, cos, sin, out))
    strides = x.stride(0), x.stride(1), cos.stride(0), sin.stride(0)
    _module(cos.shape[1], x.device).launch(
        "norm_rotary", (rows, 1, 1), _BLOCK, [_Problem(*pointers, *strides, heads, eps)]
    )
    return out


def source(half: int) -> str:
    """The CUDA source for that many angles a row."""
    return f"#define BLOCK {_BLOCK}\n#define HALF {half}\n{_SOURCE.read_text()}"


@cache
def _module(half: int, device: torch.device) -> CudaModule:
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return CudaModule(compile_cubin(source(half), architecture), device)
