"""Loads the arithmetic of vllm-omni's MiniMax H3 from its wheel, without vLLM and without a GPU.

Modules that are compared are the real ones. Whatever else they import is stood in for by empty classes: they come from
packages that need a GPU, and nothing of them runs in a comparison.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

_DIFFUSION = "vllm_omni.diffusion.models.minimax_h3"
_ENCODING = "vllm_omni.model_executor.models.minimax_h3"
_REAL = (
    "vllm_omni.errors",
    "vllm_omni.diffusion.sched.sigma_schedule",
    *(
        f"{_DIFFUSION}.{name}"
        for name in (
            "condition_noise",
            "denoise_loop",
            "fasth3",
            "fasth3_checkpoint",
            "latent_mask",
            "lora",
            "npu.lora",
            "packed_sequence",
            "packed_tokens",
            "pipeline_minimax_h3",
            "scheduling_minimax_h3_euler_ancestral",
            "time_request",
        )
    ),
    *(
        f"{_ENCODING}.{name}"
        for name in ("conditioning", "encoder_processing", "long_video", "preprocessing", "reference_video")
    ),
)


class _Anything(type):
    """A class of which every attribute is such a class again."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)


def _empty(name: str) -> type:
    """A class of which every instance has every attribute; those that it is made with by name, it keeps."""

    def accept(self: object, *arguments: object, **options: object) -> None:
        self.__dict__.update(options)

    def attribute(self: object, name: str) -> type:
        return _empty(name)

    return _Anything(name, (), {"__init__": accept, "__getattr__": attribute})


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)


class _Finder(MetaPathFinder, Loader):
    """Finds an empty module, or a package of which only the place is real, for what is not compared."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = wheel

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in ("vllm", "vllm_omni") or fullname in _REAL:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = [str(self._wheel.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _last(name: str) -> str:
    """What a compared module is called. Its FlashGen lies in a second `lora`, that of another accelerator."""
    return "npu_lora" if name.endswith("npu.lora") else name.split(".")[-1]


@contextmanager
def peer(wheel: Path) -> Iterator[SimpleNamespace]:
    """The compared modules by their last names; nothing of them stays imported afterwards."""
    finder = _Finder(wheel)
    sys.meta_path.insert(0, finder)
    try:
        yield SimpleNamespace(**{_last(name): importlib.import_module(name) for name in _REAL})
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_omni")]:
            del sys.modules[name]
