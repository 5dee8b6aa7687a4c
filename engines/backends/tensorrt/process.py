"""Builds plans in child processes: `build_plan(request, plan, progress)`."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import engines
from engines.backends.tensorrt.request import CensusError, PlanError, PlanRequest, PlanResult
from engines.layers import LayersError
from engines.tensorrt import LEVELS, TensorRTMissing

SHOWN = 10
"""Messages that are quoted of a process that ended without an answer."""

PRINTED_BYTES = 1 << 16
"""Of what it printed, the last bytes that are read for that."""

_ERRORS = {kind.__name__: kind for kind in (CensusError, LayersError, TensorRTMissing)}

_LOG = logging.getLogger("tensorrt")


def build_plan(
    request: PlanRequest, plan: Path, progress: Callable[[str, int, int], None] = lambda phase, done, total: None
) -> PlanResult:
    """Builds a plan in a process of its own and moves it to `plan` once its layers are what the model asks for.

    `progress` takes a phase of the build, its steps done, and how many it has; an exception of it ends the build, as
    Ctrl-C does. TensorRT's messages go to the logger "tensorrt".

    Raises:
        PlanError: the model is refused, the build fails, the file cannot be written, or the process dies.
        CensusError: the plan is not what the model asks for.
        LayersError: what TensorRT says of the plan's layers is not understood.
        TensorRTMissing: the flavour is not installed.
    """
    with _temporary(plan.absolute()) as temporary, tempfile.TemporaryFile() as printed:
        with _child(temporary, printed, request) as (child, answers):
            answer = _Answer(request.graph, progress)
            for line in answers:
                answer.take(line)
        result = answer.result(child.returncode, printed)
        temporary.chmod(0o644)
        temporary.replace(plan)
    return result


class _Answer:
    """What the child has said so far."""

    def __init__(self, graph: str, progress: Callable[[str, int, int], None]) -> None:
        self._graph = graph
        self._progress = progress
        self._last: deque[str] = deque(maxlen=SHOWN)
        self._final: tuple[str, Any] | None = None

    def take(self, line: str) -> None:
        """Takes one line of the child's, unless the child died while it wrote it."""
        if not line.endswith("\n"):
            return
        ((kind, value),) = json.loads(line).items()
        if kind == "progress":
            self._progress(*value)
        elif kind == "message":
            severity, text = value
            self._last.append(text)
            _LOG.log(LEVELS[severity], "%s: %s", self._graph, text)
        else:
            self._final = (kind, value)

    def result(self, code: int, printed: IO[bytes]) -> PlanResult:
        """The result of a child that has ended with an exit code; raises what it could not do."""
        if self._final is None:
            raise PlanError(self._epitaph(code, printed))
        kind, value = self._final
        if kind == "error":
            raise _ERRORS.get(value[0], PlanError)(value[1])
        return PlanResult.model_validate(value)

    def _epitaph(self, code: int, printed: IO[bytes]) -> str:
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - PRINTED_BYTES))
        said = [*self._last, *printed.read().decode(errors="replace").splitlines()[-SHOWN:]]
        return "\n".join([f"graph {self._graph}: the process that builds it {ended}; it last said:", *said])


@contextmanager
def _child(plan: Path, printed: IO[bytes], request: PlanRequest) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Starts the building process; it has ended when the block is left, however it is left."""
    root = str(Path(engines.__path__[0]).parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "engines.backends.tensorrt.worker", str(plan), str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": path}
    child = subprocess.Popen(  # noqa: S603
        command, stdin=-1, stdout=-1, stderr=printed, env=environment, text=True, encoding="utf-8"
    )
    assert child.stdin is not None  # both are pipes
    assert child.stdout is not None
    try:
        with suppress(BrokenPipeError), child.stdin:  # it died already; its end says why
            child.stdin.write(request.model_dump_json())
        yield child, child.stdout
    except BaseException:
        child.kill()
        raise
    finally:
        child.wait()
        child.stdout.close()


@contextmanager
def _temporary(plan: Path) -> Iterator[Path]:
    """A name next to the plan's, for as long as it is not finished."""
    plan.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=plan.parent, prefix=f".{plan.name}.")
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
