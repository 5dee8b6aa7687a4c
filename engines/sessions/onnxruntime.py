"""One ONNX Runtime session on the CPU: inputs and weights by address, outputs as torch tensors, interruptible."""

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

_TERMINATED = "terminate flag"
"""Part of ONNX Runtime's message when a run ends because it was told to; the exception has no type of its own."""


class Interrupted(RuntimeError):
    """A run was stopped by `interrupt` before it was done."""


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

    def run(
        self, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, ort.OrtValue], options: ort.RunOptions
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, for contiguous CPU tensors; each output owns its memory.

        Raises:
            Interrupted: `options.terminate` was set before the run was done.
        """
        binding = ort.IOBinding(self._session)
        for name, value in weights.items():
            binding.bind_ortvalue_input(name, value)
        for name, tensor in inputs.items():
            dtype = ONNX_TYPE[_NAMES[tensor.dtype]]
            binding.bind_input(name, "cpu", 0, dtype, tuple(tensor.shape), tensor.data_ptr())
        for name in self._outputs:
            binding.bind_output(name)
        self._execute(binding, options)
        values = binding.get_outputs_as_ortvaluevector()
        return {name: from_dlpack(values.dlpack_at(i)) for i, name in enumerate(self._outputs)}

    def _execute(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            if options.terminate and _TERMINATED in str(error):
                raise Interrupted("the run was stopped before it was done") from error
            raise


def session_options(threads: int) -> ort.SessionOptions:
    """Options of every session: a fixed number of threads that sleep when there is no work."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Encoder, denoiser and decoder are processes that share the processors: a spinning thread holds one for nothing.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def run_options() -> ort.RunOptions:
    """Options of one run: what the arena grew by goes back to the system afterwards.

    Sessions run in turn, each with an arena of its own; without this, each would keep its largest run's memory.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options
