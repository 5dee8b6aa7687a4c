"""One tritonserver process: started on loopback, watched until it is ready, drained and stopped without a trace."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import psutil

from triton_repo.child import POLL_SECONDS, Child
from triton_repo.control import HEADER, HTTP_RESTRICTED, RESTRICTED, UNREACHABLE, Control
from triton_repo.errors import ServerError
from triton_repo.installation import Installation
from triton_repo.names import METRICS_VARIABLE
from triton_repo.ports import LOOPBACK, choose_ports
from triton_repo.server_log import FollowedLog, failure, keep_previous, loaded_model
from triton_repo.shared_memory import private_prefix

EVERYWHERE = "0.0.0.0"  # noqa: S104 - to be told from other addresses


@dataclass(frozen=True)
class ServerSettings:
    """How to run the server. A port of 0 means any free one; times are in seconds.

    `models` are the ones that clients call; an ensemble brings its steps with it. A client that has been silent for
    `keepalive` is asked whether it is still there and has as long to answer, or its requests are cancelled. `trace`:
    URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of every request; empty: none does.
    `metrics_host`: address that metrics are published at, for a Prometheus on another machine.
    """

    repository: Path
    log_file: Path
    models: tuple[str, ...]
    grpc_port: int = 0
    http_port: int = 0
    metrics_port: int = 0
    ready_timeout: float = 300.0
    exit_timeout: int = 5
    keepalive: float = 30.0
    trace: str = ""
    metrics_host: str = LOOPBACK


@dataclass(frozen=True)
class Endpoints:
    """Where a running server listens, as host:port."""

    grpc: str
    http: str
    metrics: str


class TritonServer:
    """A server process; use it as a context manager. Leaving the block stops it and removes all that it made."""

    def __init__(
        self,
        settings: ServerSettings,
        loaded: Callable[[str], None] = lambda model: None,
        logged: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`loaded` is called with the name of each model as it becomes ready, `logged` with each line of the log."""
        ports = choose_ports({name: getattr(settings, f"{name}_port") for name in ("grpc", "http", "metrics")})
        self.settings = replace(
            settings, grpc_port=ports["grpc"], http_port=ports["http"], metrics_port=ports["metrics"]
        )
        """As given, with the ports that were chosen."""
        self._loaded, self._logged = loaded, logged
        self._resources = ExitStack()
        # What listens everywhere is reached over loopback too.
        hosts = {"metrics": settings.metrics_host if settings.metrics_host != EVERYWHERE else LOOPBACK}
        self.endpoints = Endpoints(**{name: f"{hosts.get(name, LOOPBACK)}:{port}" for name, port in ports.items()})
        self._ports = ports
        self._secret = secrets.token_hex(16)
        self._control = Control(self.endpoints.http, self.endpoints.metrics, self._secret)

    def __enter__(self) -> TritonServer:
        """Start the process and wait until every model is ready. Raises ServerError with the reason it cannot."""
        with ExitStack() as resources:
            self._child = self._start(resources)
            self._wait_until_ready()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        return self._child.pid

    @property
    def control(self) -> Control:
        """Calls that only the owner may make."""
        return self._control

    def wait(self, problem: Callable[[], str] = lambda: "") -> None:
        """Block until the server is lost, which is a ServerError; a signal may raise out of it.

        It is lost when it or a model's process dies, or when `problem`, asked all the time, returns one in words.
        Triton does not start a model's process again and stays ready without it.
        """
        models = self._child.children()
        while not self._child.exited():
            self._read_log()
            if not all(map(_is_running, models)):
                raise self._error("a model's process died")
            if found := problem():
                raise self._error(found)
            time.sleep(POLL_SECONDS)
        raise self._error("tritonserver died")

    def kill(self) -> None:
        """End the process without patience: what it was working on is lost, and its clients see the connection end."""
        self._child.stop(0)

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait at most `timeout` seconds for the others; whether all of them ended.

        The public models are unloaded and the ensemble's steps stay: Triton then lets every request that it has taken
        run to its end, where SIGTERM alone would refuse an ensemble its next step.
        """
        deadline = time.monotonic() + timeout
        with suppress(*UNREACHABLE):
            for model in self.settings.models:
                self._control.unload(model)
            quiet = 0
            while time.monotonic() < deadline and not self._child.exited():
                # Twice in a row: a request that leaves the queue is for a moment neither waiting nor running.
                quiet = 0 if any(map(self._is_busy, self.settings.models)) else quiet + 1
                if quiet == 2:
                    return True
                self._read_log()
                time.sleep(POLL_SECONDS)
        return False

    def _is_busy(self, model: str) -> bool:
        # Triton 2.51 never finishes unloading a decoupled model whose queue once overflowed, for it keeps the refused
        # request; the counts stay right. An ensemble has no counts, and does finish unloading.
        return self._control.is_unloading(model) and self._control.requests(model) != 0

    def _start(self, resources: ExitStack) -> Child:
        installation = Installation.find()
        backends = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="h3trt-backends-")))
        installation.assemble(backends)
        shm_prefix = resources.enter_context(private_prefix())
        self.settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        keep_previous(self.settings.log_file)
        self._log = FollowedLog(self.settings.log_file)
        log = resources.enter_context(self.settings.log_file.open("ab"))
        command = [
            str(installation.binary),
            *_arguments(self.settings, self._ports, backends, shm_prefix, self._secret),
        ]
        environment = installation.environment() | {METRICS_VARIABLE: self.endpoints.metrics}
        child = Child(command, environment, log)
        resources.callback(child.stop, self.settings.exit_timeout + 5.0)
        return child

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.settings.ready_timeout
        while not self._is_ready():
            if self._child.exited():
                raise self._error("tritonserver did not start")
            if time.monotonic() > deadline:
                raise self._error(f"tritonserver was not ready after {self.settings.ready_timeout:g} s")
            self._read_log()
            time.sleep(POLL_SECONDS)
        self._read_log()

    def _read_log(self) -> None:
        for line in self._log.new_lines():
            self._logged(line)
            if model := loaded_model(line):
                self._loaded(model)
        self._log.bound()

    def _is_ready(self) -> bool:
        try:
            return all(map(self._control.is_ready, self.settings.models))
        except UNREACHABLE:
            return False

    def _error(self, what: str) -> ServerError:
        self._read_log()
        log = self.settings.log_file
        return ServerError(f"{what}:\n{failure(log.read_text(errors='replace'))}\n(log: {log})")


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _arguments(
    settings: ServerSettings, ports: Mapping[str, int], backends: Path, shm_prefix: str, secret: str
) -> list[str]:
    return [
        f"--model-repository={settings.repository.resolve()}",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in settings.models),
        # All at once: with Triton's 4 the fifth Python model would begin when the others have ended.
        "--model-load-thread-count=8",
        *(f"--{service}-address={LOOPBACK}" for service in ports if service != "metrics"),
        f"--metrics-address={settings.metrics_host}",
        *(f"--{service}-port={port}" for service, port in ports.items()),
        *_keepalive(settings.keepalive),
        "--allow-gpu-metrics=false",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        # Instances that name a resource in their configuration take turns.
        "--rate-limit=execution_count",
        f"--grpc-restricted-protocol={RESTRICTED}:{HEADER}={secret}",
        f"--http-restricted-api={HTTP_RESTRICTED}:{HEADER}={secret}",
        f"--exit-timeout-secs={settings.exit_timeout}",
        "--log-format=ISO8601",
        *_tracing(settings.trace),
    ]


def _tracing(collector: str) -> list[str]:
    """Triton's own spans: of each request, of each model that it goes through, its wait and its work there."""
    if not collector:
        return []
    settings = ("mode=opentelemetry", f"opentelemetry,url={collector}", "rate=1", "level=TIMESTAMPS")
    return [f"--trace-config={setting}" for setting in (*settings, "opentelemetry,resource=service.name=h3trt")]


def _keepalive(seconds: float) -> list[str]:
    """A client whose machine or network goes says no good-bye; Triton would keep its requests for two hours."""
    milliseconds = round(seconds * 1000)
    return [
        f"--grpc-keepalive-time={milliseconds}",
        f"--grpc-keepalive-timeout={milliseconds}",
        # A call without progress has nothing to send meanwhile, and is asked all the same.
        "--grpc-http2-max-pings-without-data=0",
    ]
