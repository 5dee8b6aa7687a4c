"""Exit codes of every command, and which error ends in which."""

from __future__ import annotations

import sys
from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit code says; scripts may rely on these numbers."""

    OK = 0
    FAULT = 1
    USAGE = 2
    CHECKPOINT = 3
    ENGINES = 4
    SERVER = 5
    VERIFICATION = 6
    INCOMPLETE = 7
    CANCELLED = 130


MEANINGS = {
    Exit.OK: "done",
    Exit.FAULT: "a fault of this program; please report the traceback",
    Exit.USAGE: "wrong usage, a request or profile that is refused, or a file that cannot be read or written",
    Exit.CHECKPOINT: "the checkpoint is incomplete or not what it must be",
    Exit.ENGINES: "engines or their store are missing, stale or damaged, or building them failed",
    Exit.SERVER: "the server or this machine's set-up does not work, or the server is not reachable",
    Exit.VERIFICATION: "a result differs from the reference, or a finished clip is not what was promised",
    Exit.INCOMPLETE: "what this machine can do is done; the rest, which is listed, needs another one",
    Exit.CANCELLED: "cancelled by Ctrl-C, SIGTERM or the server",
}

# Named by module, so that asking for an error's code imports nothing: its module is loaded if it was raised.
_CODES = {
    ("runtime.refusal", "RequestError"): Exit.USAGE,
    ("engines.profile", "ProfileError"): Exit.USAGE,
    ("engines.plan.plan", "PlanError"): Exit.USAGE,
    ("export.checkpoint.errors", "CheckpointError"): Exit.CHECKPOINT,
    ("export.artifacts.fusion", "FusionError"): Exit.CHECKPOINT,
    ("export.binding", "BindingError"): Exit.CHECKPOINT,
    ("export.graphs.model", "ConsumptionError"): Exit.CHECKPOINT,
    ("export.passes.name_tensors", "DeclarationError"): Exit.ENGINES,
    ("export.emit", "EmitError"): Exit.ENGINES,
    ("export.compare", "CompareError"): Exit.ENGINES,
    ("export.bake", "BakeError"): Exit.ENGINES,
    ("export.linears", "LinearsError"): Exit.ENGINES,
    ("export.sidecar", "SidecarError"): Exit.ENGINES,
    ("export.low_rank", "LowRankError"): Exit.CHECKPOINT,
    ("engines.switchable", "SwitchableError"): Exit.CHECKPOINT,
    ("engines.backends.inductor", "CompileError"): Exit.ENGINES,
    ("engines.backends.onnxruntime", "LoweringError"): Exit.ENGINES,
    ("engines.backends.tensorrt.request", "PlanError"): Exit.ENGINES,
    ("engines.layers", "LayersError"): Exit.ENGINES,
    ("engines.tensorrt", "TensorRTMissing"): Exit.ENGINES,
    ("engines.build", "BuildError"): Exit.ENGINES,
    ("engines.store", "StoreError"): Exit.ENGINES,
    ("engines.sessions.backend", "EngineRunError"): Exit.ENGINES,
    ("engines.sessions.gpu", "PinError"): Exit.USAGE,
    ("engines.steps", "StepFailed"): Exit.ENGINES,
    ("runtime.text", "TokenizerError"): Exit.ENGINES,
    ("runtime.rank_errors", "GroupError"): Exit.SERVER,
    ("runtime.rank_errors", "RankLost"): Exit.SERVER,
    ("triton_repo.errors", "ServerError"): Exit.SERVER,
    ("bench.perf.install", "InstallError"): Exit.SERVER,
    ("bench.perf.analyzer", "AnalyzerError"): Exit.SERVER,
    ("bench.perf.aiperf", "AiperfError"): Exit.SERVER,
    ("bench.perf.workload", "WorkloadError"): Exit.USAGE,
    ("bench.perf.clips", "ClipError"): Exit.VERIFICATION,
    ("runtime.probe", "ProbeError"): Exit.VERIFICATION,
    ("runtime.events", "Cancelled"): Exit.CANCELLED,
}


class CommandError(Exception):
    """A command cannot go on for a reason that its user can mend; `code` is the exit code."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


def exit_code(error: BaseException) -> Exit | None:
    """The exit code of an error that has one; None for a fault, whose traceback should be seen."""
    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return Exit.CANCELLED
    # A reader of our output that has gone is no error of a file; click ends the program quietly.
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return Exit.USAGE
    client = sys.modules.get("triton_repo.client")
    if client is not None and isinstance(error, client.ClientError):
        return _client_exit(error.failure.value)
    for (module, name), code in _CODES.items():
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], name)):
            return code
    return None


def message(error: BaseException) -> str:
    """The line that tells an error: its own text; for one of the system, the file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or "cancelled"


def _client_exit(failure: str) -> Exit:
    return {"INVALID_ARGUMENT": Exit.USAGE, "CANCELLED": Exit.CANCELLED}.get(failure, Exit.SERVER)
