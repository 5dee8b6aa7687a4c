"""The dtypes of the manifest, in the terms of torch, numpy and ONNX (whose package a serving host does not have)."""

from __future__ import annotations

import numpy as np
import torch

from engines.store import Dtype

TORCH: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

NAMES: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in TORCH.items()}

ONNX_TYPE: dict[Dtype, int] = {
    "float32": 1,
    "float16": 10,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "int64": 7,
    "int32": 6,
    "uint8": 2,
    "bool": 9,
}
"""Numbers of `onnx.TensorProto.DataType`."""

STORAGE: dict[Dtype, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "int64": np.int64,
    "int32": np.int32,
    "uint8": np.uint8,
    "bool": np.bool_,
}
"""The numpy type with the same bytes; numpy has neither bfloat16 nor 8-bit floats."""
