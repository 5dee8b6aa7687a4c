"""The process that builds one plan: `python -m engines.backends.tensorrt.worker PLAN PARENT`.

It reads a PlanRequest as JSON from standard input, writes the plan to the file PLAN, and answers on standard output, a
JSON object a line: {"progress": [phase, done, total]}, {"message": [severity, text]}, and at the end {"result": ...} or
{"error": [class, text]}. It ends when the process PARENT does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from engines.backends.tensorrt.builder import build
from engines.backends.tensorrt.request import PlanError, PlanRequest
from engines.layers import LayersError
from engines.machine import DieWith
from engines.tensorrt import TensorRTMissing


def main(plan: str, parent: str) -> None:
    """Builds what standard input asks for."""
    _end_with(int(parent))
    channel = _Channel()
    logging.getLogger().addHandler(_Forward(channel))
    request = PlanRequest.model_validate_json(sys.stdin.read())
    try:
        result = build(
            request,
            Path(plan),
            lambda phase, done, total: channel.send("progress", [phase, done, total]),
            lambda severity, text: channel.send("message", [severity, text]),
        )
    except (PlanError, LayersError, TensorRTMissing, OSError) as error:
        channel.send("error", [type(error).__name__, str(error)])
    else:
        channel.send("result", result.model_dump(mode="json"))


class _Channel:
    """Answers on what standard output was; what libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def send(self, kind: str, value: Any) -> None:
        """Writes one line; TensorRT calls from several threads."""
        with self._lock:
            self._file.write(f"{json.dumps({kind: value})}\n")
            self._file.flush()


class _Forward(logging.Handler):
    """Hands our own warnings to the parent."""

    def __init__(self, channel: _Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record as a message."""
        self._channel.send("message", ["WARNING" if record.levelno < logging.ERROR else "ERROR", record.getMessage()])


def _end_with(parent: int) -> None:
    """Ends this process when the parent ends, and at once on Ctrl-C: TensorRT does not come back to look for it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    DieWith(parent)()


if __name__ == "__main__":
    main(*sys.argv[1:])
