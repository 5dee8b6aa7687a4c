"""TensorRT and TensorRT-RTX behind one face: which package is it, what only one of them has, and its messages.

Both packages hold the same classes under the same names; everything that differs is a property of `Flavour`. A serving
host imports this module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

FlavourName = Literal["tensorrt", "tensorrt_rtx"]

# Each package's modules in the order in which they are tried: TensorRT-RTX's wheels name theirs after the bindings.
_MODULES: dict[FlavourName, tuple[str, ...]] = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}

REQUIREMENTS: dict[FlavourName, str] = {
    "tensorrt": "tensorrt-cu13>=11,<12",
    "tensorrt_rtx": "tensorrt-rtx-cu13>=1.7,<2",
}
"""What pip installs each package by, in the versions that are called here."""

LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}
"""TensorRT's severities as levels of `logging`."""


class TensorRTMissing(RuntimeError):
    """The package of a flavour cannot be imported; says the command that installs it."""


@dataclass(frozen=True)
class Flavour:
    """One of the two packages: its name, its bindings, and their version."""

    name: FlavourName
    module: ModuleType
    version: str

    @property
    def takes_capabilities(self) -> bool:
        """Whether a plan is built for listed compute capabilities without a GPU; else it is built for the GPU here."""
        return self.name == "tensorrt_rtx"

    @property
    def has_timing_cache(self) -> bool:
        """Whether the builder measures kernels and keeps the times; TensorRT-RTX chooses kernels when it first runs."""
        return self.name == "tensorrt"

    @property
    def has_runtime_cache(self) -> bool:
        """Whether kernels are compiled when an engine first runs, and can be kept for the next time."""
        return self.name == "tensorrt_rtx"

    @property
    def tells_validity(self) -> bool:
        """Whether a runtime can be asked why a plan cannot be opened here, before it is."""
        return self.name == "tensorrt_rtx"

    @property
    def has_plugins(self) -> bool:
        """Whether the parser takes registered plugins; TensorRT-RTX's ends the process at a node that names one."""
        return self.name == "tensorrt"

    @property
    def opens_plans_where_it_builds(self) -> bool:
        """Whether a machine that builds a plan can always run it, so that an inspector can be asked about it."""
        return self.name == "tensorrt"


def load(name: FlavourName) -> Flavour:
    """Imports a package.

    Raises:
        TensorRTMissing: it is not installed, or its libraries do not load.
    """
    failures = []
    for module in _MODULES[name]:
        try:
            bindings = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            failures.append(f"{module}: {error}")
        else:
            return Flavour(name, bindings, str(bindings.__version__))
    command = f"pip install '{REQUIREMENTS[name]}'"
    raise TensorRTMissing(f"{name} cannot be imported ({'; '.join(failures)}); run: {command}")


Listener = Callable[[str, str], None]
"""Takes a severity (a key of `LEVELS`) and a message."""


def forward_to(logger: logging.Logger) -> Listener:
    """A listener that hands messages to `logging`."""
    return lambda severity, text: logger.log(LEVELS[severity], "%s", text)


def make_logger(flavour: Flavour, listener: Listener) -> Any:
    """An ILogger that hands every message to the listener. TensorRT calls it from threads of its own."""
    base: Any = flavour.module.ILogger

    class Logger(base):
        def __init__(self) -> None:
            base.__init__(self)  # pybind11 wants its own __init__ called, not super's

        def log(self, severity: Any, text: str) -> None:
            listener(severity.name, text)

    return Logger()
