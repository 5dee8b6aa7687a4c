"""What is kept of the many messages that TensorRT gives during one build."""

from __future__ import annotations

import re

from engines.layers import LOG_TITLE, Layer, LayersError, read_build_log
from engines.tensorrt import Listener

SHOWN = 5
"""Errors that are told of a build that failed."""

# We always bind int64 tensors to int64 inputs, which is all that the first asks for; the second says that an axis is
# dynamic.
_HARMLESS = re.compile(r"Make sure input \S+ has Int64 binding|minShape is not the same as maxShape")

_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")
_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")


class Messages:
    """A listener that passes on everything but VERBOSE, and keeps layers, memory, warnings and errors."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._layers = ""
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self.activation_bytes = 0
        self.weights_bytes = 0

    def __call__(self, severity: str, text: str) -> None:
        """Takes one message."""
        if severity == "VERBOSE":
            if text.startswith(LOG_TITLE):
                self._layers = text
            return
        if severity == "WARNING" and _HARMLESS.search(text):
            severity = "INFO"
        self._listener(severity, text)
        if severity == "INFO":
            self._measure(text)
        else:
            (self.warnings if severity == "WARNING" else self.errors).append(text)

    @property
    def complaints(self) -> int:
        """How many warnings and errors there were so far."""
        return len(self.warnings) + len(self.errors)

    @property
    def reason(self) -> str:
        """The last errors, one a line."""
        return "\n".join(self.errors[-SHOWN:]) or "TensorRT gives no reason"

    def layers(self) -> tuple[Layer, ...]:
        """The layers of the plan that was built.

        Raises:
            LayersError: the builder has not told them.
        """
        if not self._layers:
            raise LayersError("the builder has not logged the plan's layers, without which it cannot be checked")
        return read_build_log(self._layers)

    def _measure(self, text: str) -> None:
        """Each optimisation profile tells its own memory; a context has to hold the largest."""
        if match := _ACTIVATION.search(text):
            self.activation_bytes = max(self.activation_bytes, int(match[1]))
        if match := _WEIGHTS.search(text):
            self.weights_bytes = max(self.weights_bytes, int(match[1]))
