"""One ONNX Runtime session on the CPU: inputs and weights by address, outputs as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from engines.sessions.dtypes import ONNX_TYPE, TORCH
from engines.store import Dtype

_NAMES: dict[torch.dtype, Dtype] = {kind: name for name, kind in TORCH.items()}


class Session:
    """A loaded engine. `files` are those that its external data lie in, by location; they are read at once."""

    def __init__(
        self, engine: bytes, threads: int, files: Mapping[str, NDArray[np.uint8]] = MappingProxyType({})
    ) -> None:
        options = session_options(threads)
        if files:
            sizes = [data.size for data in files.values()]
            options.add_external_initializers_from_files_in_memory(list(files), list(files.values()), sizes)
        self._session = ort.InferenceSession(engine, options, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, ort.OrtValue]) -> dict[str, torch.Tensor]:
        """Outputs by name, for contiguous CPU tensors; each output owns its memory."""
        binding = ort.IOBinding(self._session)
        for name, value in weights.items():
            binding.bind_ortvalue_input(name, value)
        for name, tensor in inputs.items():
            dtype = ONNX_TYPE[_NAMES[tensor.dtype]]
            binding.bind_input(name, "cpu", 0, dtype, tuple(tensor.shape), tensor.data_ptr())
        for name in self._outputs:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding, _run_options())
        values = binding.get_outputs_as_ortvaluevector()
        return {name: from_dlpack(values.dlpack_at(i)) for i, name in enumerate(self._outputs)}


def session_options(threads: int) -> ort.SessionOptions:
    """Options of every session: a fixed number of threads that sleep when there is no work."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Encoder, denoiser and decoder are processes that share the processors: a spinning thread holds one for nothing.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _run_options() -> ort.RunOptions:
    """Options of one run: what the arena grew by goes back to the system afterwards.

    Sessions run in turn, each with an arena of its own; without this, each would keep its largest run's memory.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options
