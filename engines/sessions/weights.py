"""The checkpoint's bytes as ONNX Runtime values: memory-mapped, not copied, shared by all sessions that bind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.sessions.dtypes import ONNX_TYPE, STORAGE
from engines.store import Dtype, Region, WeightFile


class MappedWeights:
    """Memory maps of the checkpoint's files, opened when first used."""

    def __init__(self, files: Sequence[WeightFile]) -> None:
        self._files = files
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def value(self, region: Region, dtype: Dtype) -> ort.OrtValue:
        """The weight as a runtime value over the mapped bytes; the value keeps the map alive."""
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(self.array(region, dtype), ONNX_TYPE[dtype])

    def array(self, region: Region, dtype: Dtype) -> NDArray[np.generic]:
        """The weight's bytes in its shape, as the numpy type that stores the dtype (bfloat16 as uint16).

        A tensor that does not start at a multiple of its item size (a file may hold an odd number of 16-bit items
        before 32-bit ones) is copied: kernels may read items whole.
        """
        data = self.file(region.file)[region.offset : region.offset + region.nbytes(dtype)]
        items = data.view(STORAGE[dtype]).reshape(region.shape)
        return items if items.flags.aligned else items.copy()

    def file(self, index: int) -> NDArray[np.uint8]:
        """All bytes of one of the manifest's weight files."""
        if index not in self._maps:
            self._maps[index] = np.memmap(self._files[index].path, dtype=np.uint8, mode="r")
        return self._maps[index]
