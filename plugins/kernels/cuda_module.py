"""CUDA C++ compiled when first used, by the NVRTC that torch brings along, and launched on torch's current stream.

Neither a CUDA toolkit nor a host compiler is needed. A compiled kernel lives as long as the process.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_MAX_DYNAMIC_SHARED_MEMORY = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


class CudaError(RuntimeError):
    """A call of NVRTC or of the driver failed; says which, and the compiler's log."""


@cache
def load_nvrtc() -> ctypes.CDLL:
    """NVRTC of the CUDA release that torch was built for.

    Raises:
        CudaError: it is not installed.
    """
    name = f"libnvrtc.so.{(torch.version.cuda or '0').partition('.')[0]}"
    for candidate in (name, *map(str, _in_wheels(name))):
        with suppress(OSError):
            return ctypes.CDLL(candidate)
    raise CudaError(f"{name} cannot be loaded; run: pip install nvidia-cuda-nvrtc")


def _in_wheels(name: str) -> Iterator[Path]:
    """The library in NVIDIA's wheels, which put it beside each other's."""
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        yield from sorted(Path(root).glob(f"*/lib/{name}"))


def compile_cubin(source: str, architecture: str) -> bytes:
    """Machine code of CUDA C++ for an architecture such as "sm_90a".

    Raises:
        CudaError: it does not compile; quotes the log.
    """
    nvrtc, program = load_nvrtc(), ctypes.c_void_p()
    _check(
        "nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"h3.cu", 0, None, None)
    )
    options = [b"--std=c++17", f"--gpu-architecture={architecture}".encode(), b"--extra-device-vectorization"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if status:
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        raise CudaError(f"nvrtcCompileProgram failed with {status}:\n{log.decode(errors='replace')}")
    return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)


class CudaModule:
    """Compiled kernels on one device, by name."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # makes torch's context current
            self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        self._functions: dict[tuple[str, int], ctypes.c_void_p] = {}

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, arguments: Sequence[object], shared: int = 0
    ) -> None:
        """Queues a kernel on torch's current stream; `arguments` are ctypes values, `shared` bytes of dynamic memory.

        Raises:
            CudaError: it cannot be launched.
        """
        addresses = [ctypes.addressof(argument) for argument in arguments]  # type: ignore[arg-type]
        values = (ctypes.c_void_p * len(addresses))(*addresses)
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            function = self._function(name, shared)
            self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared, stream, values, None)

    def _function(self, name: str, shared: int) -> ctypes.c_void_p:
        key = name, shared
        if key not in self._functions:
            function = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_MEMORY, shared)
            self._functions[key] = function
        return self._functions[key]

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, getattr(self._driver, name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise CudaError(f"{name} failed with {status}")


def _text(size_of: object, read: object, program: ctypes.c_void_p) -> bytes:
    """What NVRTC has to say or give: it tells the size first."""
    size = ctypes.c_size_t()
    _check("NVRTC", size_of(program, ctypes.byref(size)))  # type: ignore[operator]
    text = ctypes.create_string_buffer(size.value)
    _check("NVRTC", read(program, text))  # type: ignore[operator]
    return text.raw
