"""One tritonserver process: started on loopback, watched until it is ready, drained and stopped without a trace."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from triton_repo.errors import ServerError
from triton_repo.installation import Installation
from triton_repo.shared_memory import private_prefix

LOOPBACK = "127.0.0.1"
ADMIN_HEADER = "h3trt-admin"
# What only the owner of the server may ask for: with these a client could load code of its own or map our memory.
RESTRICTED = "model-repository,shared-memory,trace,logging"
# Below the range that the kernel hands to outgoing connections, which could take a port before the server binds it.
FREE_PORTS = range(20000, 32000)
POLL_SECONDS = 0.1
LOG_LINES_SHOWN = 12
_PR_SET_PDEATHSIG = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ServerSettings:
    """How to run the server. A port of 0 means any free one; times are in seconds.

    `models` are the ones that clients call; an ensemble brings its steps with it.
    """

    repository: Path
    log_file: Path
    models: tuple[str, ...]
    grpc_port: int = 0
    http_port: int = 0
    metrics_port: int = 0
    ready_timeout: float = 300.0
    exit_timeout: int = 15


@dataclass(frozen=True)
class Endpoints:
    """Where a running server listens, as host:port."""

    grpc: str
    http: str
    metrics: str


class TritonServer:
    """A server process; use it as a context manager. Leaving the block stops it and removes all that it made.

    Start it from the main thread: the kernel kills the server when the thread that started it ends, which is what
    keeps a killed parent from leaving an orphan.
    """

    def __init__(self, settings: ServerSettings, progress: Progress = lambda line: None) -> None:
        self._settings = settings
        self._progress = progress
        self._secret = secrets.token_hex(16)
        self._resources = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoints = Endpoints("", "", "")

    def __enter__(self) -> TritonServer:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        return self._running().pid

    def start(self) -> None:
        """Start the process and wait until every model is ready. Raises ServerError with the reason it cannot."""
        installation = Installation.find()
        ports = _choose_ports(self._settings)
        self.endpoints = Endpoints(*(f"{LOOPBACK}:{port}" for port in ports))
        backends = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="h3trt-backends-")))
        prefix = self._resources.enter_context(private_prefix())
        installation.assemble(backends)
        self._settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        log = self._resources.enter_context(self._settings.log_file.open("wb"))
        self._process = subprocess.Popen(  # noqa: S603 - our own argument list, no shell
            [str(installation.binary), *_arguments(self._settings, ports, backends, prefix, self._secret)],
            env=installation.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Its own group: Ctrl-C in a terminal reaches this process alone, which then drains first.
            start_new_session=True,
            preexec_fn=_DieWithParent(os.getpid()),
        )
        self._wait_until_ready()

    def wait(self) -> None:
        """Block until the server dies on its own, which is a ServerError; a signal handler may raise out of it."""
        while not self._exited():
            time.sleep(POLL_SECONDS)
        raise ServerError(f"tritonserver died\n{self._log_tail()}", f"the whole log is {self._settings.log_file}")

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait at most `timeout` seconds for the running ones; whether all of them ended.

        The public models are unloaded, the steps of the ensemble stay: Triton lets a request that has begun run on
        to its end, while SIGTERM alone would refuse it its next step.
        """
        deadline = time.monotonic() + timeout
        with suppress(OSError, http.client.HTTPException):
            for model in self._settings.models:
                self._control(f"/v2/repository/models/{model}/unload", {})
            while time.monotonic() < deadline and not self._exited():
                index = self._control("/v2/repository/index", {})
                if not any(entry.get("state") == "UNLOADING" for entry in index):
                    return True
                time.sleep(POLL_SECONDS)
        return False

    def stop(self) -> None:
        """End the process and its children and remove its files. Signals that arrive meanwhile only hurry it."""
        with _signals_deferred() as hurry, self._resources:
            if self._process is None:
                return
            if not self._exited():
                self._process.terminate()
            self._wait_for_exit(self._settings.exit_timeout + 5.0, hurry)
            # The dead leader is not reaped yet, so its group cannot be anybody else's.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _wait_for_exit(self, timeout: float, hurry: Hurry) -> None:
        deadline = time.monotonic() + timeout
        while not self._exited() and time.monotonic() < deadline and not hurry.signals:
            time.sleep(POLL_SECONDS)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._settings.ready_timeout
        lines = _LogLines(self._settings.log_file)
        while not self._is_ready():
            for line in lines.new():
                self._progress(line)
            if self._exited():
                raise ServerError(f"tritonserver did not start\n{self._log_tail()}", self._log_hint())
            if time.monotonic() > deadline:
                raise ServerError(
                    f"tritonserver was not ready after {self._settings.ready_timeout:g} s\n{self._log_tail()}",
                    self._log_hint(),
                )
            time.sleep(POLL_SECONDS)
        for line in lines.new():
            self._progress(line)

    def _log_hint(self) -> str:
        return f"the whole log is {self._settings.log_file}"

    def _log_tail(self) -> str:
        return "\n".join(failure_lines(self._settings.log_file.read_text(errors="replace")))

    def _is_ready(self) -> bool:
        try:
            return all(self._get(f"/v2/models/{model}/ready") == 200 for model in self._settings.models)
        except (OSError, http.client.HTTPException):
            return False

    def _get(self, path: str) -> int:
        connection = http.client.HTTPConnection(self.endpoints.http, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def _control(self, path: str, body: dict[str, object]) -> list[dict[str, str]]:
        connection = http.client.HTTPConnection(self.endpoints.http, timeout=30)
        try:
            connection.request("POST", path, json.dumps(body), {ADMIN_HEADER: self._secret})
            text = connection.getresponse().read()
        finally:
            connection.close()
        return json.loads(text) if text else []

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not running", "start it first")
        return self._process

    def _exited(self) -> bool:
        """Whether the process has ended; it is left unreaped so that its group id stays taken."""
        return os.waitid(os.P_PID, self._running().pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def failure_lines(log: str) -> list[str]:
    """The lines of a server log that say why it failed: the models' own errors, or else the last lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    failures = [line.partition("] ")[2] or line for line in lines if "failed to load '" in line]
    return failures or lines[-LOG_LINES_SHOWN:]


class _DieWithParent:
    """Runs in the new process before the server's program: asks the kernel to kill it when its parent dies."""

    def __init__(self, parent: int) -> None:
        # Looked up here, since loading a library between fork and exec may deadlock.
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._parent = parent

    def __call__(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)


@dataclass
class Hurry:
    """Counts the signals that arrived while they were deferred."""

    signals: int = field(default=0)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1


@contextmanager
def _signals_deferred() -> Iterator[Hurry]:
    """Keep signals from cutting a clean-up short; outside the main thread Python has no handlers to change."""
    hurry = Hurry()
    previous = {}
    with suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, hurry)
    try:
        yield hurry
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _LogLines:
    """Follows a growing file line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new(self) -> list[str]:
        """Whole lines that were added since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


def _choose_ports(settings: ServerSettings) -> tuple[int, int, int]:
    """gRPC, HTTP and metrics ports: the configured ones when they are free, else free ones. Raises ServerError."""
    wanted = {"grpc": settings.grpc_port, "http": settings.http_port, "metrics": settings.metrics_port}
    for name, port in wanted.items():
        if port and not port_is_free(port):
            raise ServerError(f"{name} port {port} on {LOOPBACK} is in use", f"give another or 0: --{name}-port 0")
    free = (port for port in random.sample(FREE_PORTS, len(FREE_PORTS)) if port_is_free(port))
    grpc, http_, metrics = (port or next(free) for port in wanted.values())
    return grpc, http_, metrics


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        # As tritonserver does, so that connections in TIME_WAIT do not count as somebody listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _arguments(
    settings: ServerSettings, ports: tuple[int, int, int], backends: Path, shm_prefix: str, secret: str
) -> list[str]:
    grpc, http_, metrics = ports
    return [
        f"--model-repository={settings.repository.resolve()}",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in settings.models),
        *(f"--{service}-address={LOOPBACK}" for service in ("grpc", "http", "metrics")),
        f"--grpc-port={grpc}",
        f"--http-port={http_}",
        f"--metrics-port={metrics}",
        "--allow-gpu-metrics=false",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        "--rate-limit=execution_count",
        f"--grpc-restricted-protocol={RESTRICTED}:{ADMIN_HEADER}={secret}",
        f"--http-restricted-api={RESTRICTED}:{ADMIN_HEADER}={secret}",
        f"--exit-timeout-secs={settings.exit_timeout}",
        "--log-format=ISO8601",
    ]
