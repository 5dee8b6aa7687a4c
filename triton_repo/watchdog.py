"""Keeps a server running: starts it again when it, or a model's process, dies, and when it hangs.

The whole server is started again and not the one model: a Triton that has lost a model's process reports itself ready,
takes as long to load the model anew as to start, and no longer stops in order afterwards. Requests that were in it end
for their clients with UNAVAILABLE.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType

from triton_repo.control import REQUEST_SECONDS, UNREACHABLE, Activity, Control
from triton_repo.errors import ServerError
from triton_repo.names import DEFAULT_HANG_SECONDS, DEFAULT_RESTARTS, DEVICE_MODELS
from triton_repo.server import Endpoints, ServerSettings, TritonServer
from triton_repo.serving_state import ServingState


@dataclass(frozen=True)
class RestartPolicy:
    """How often to start a lost server again; times are in seconds.

    After `attempts` in a row the watchdog gives up, whatever supervises it deciding what comes next. A server that ran
    for `steady` begins a new row. Each attempt of a row waits twice as long as the one before, from `first_delay` to
    `longest_delay`. `hang`: how long a server may not answer, or have requests and make no progress; 0: for ever.
    """

    attempts: int = DEFAULT_RESTARTS
    steady: float = 600.0
    first_delay: float = 1.0
    longest_delay: float = 60.0
    hang: float = DEFAULT_HANG_SECONDS

    def delay(self, attempt: int) -> float:
        """Seconds before the attempt, the first of a row being 1."""
        return min(self.longest_delay, self.first_delay * 2.0 ** (attempt - 1))


class Watchdog:
    """A server that is started again when it is lost; use it as a context manager, then `run` it.

    Clients find the new one under the same ports.
    """

    def __init__(
        self,
        settings: ServerSettings,
        state: ServingState,
        policy: RestartPolicy | None = None,
        loaded: Callable[[str], None] = lambda model: None,
        told: Callable[[str], None] = lambda text: None,
        logged: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`loaded` hears of each model that becomes ready, `told` of each loss and of each start after it.

        `logged` gets each line of the server's log.
        """
        self._settings = settings
        self._state = state
        self._policy = policy or RestartPolicy()
        self._loaded, self._told, self._logged = loaded, told, logged
        self._running = ExitStack()
        self._server: TritonServer | None = None

    def __enter__(self) -> Watchdog:
        """Start the first server. One that cannot start is no case for starting it again: raises ServerError."""
        self._state.forget_restarts()
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    @property
    def endpoints(self) -> Endpoints:
        """Where the server listens, through all restarts."""
        return self._endpoints

    @property
    def pid(self) -> int | None:
        """Process id of the tritonserver that runs now, if one does."""
        return None if self._server is None else self._server.pid

    def run(self) -> None:
        """Block, starting the server again whenever it is lost. Raises ServerError when it is lost too often."""
        attempt = 0
        while True:
            attempt = self._wait(attempt)

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait at most `timeout` seconds for the others; whether all of them ended."""
        return self._server is None or self._server.drain(timeout)

    def _wait(self, attempt: int) -> int:
        """Until the server is lost and started again; how many attempts there have been in a row."""
        started = time.monotonic()
        try:
            if self._server is None:
                self._start()
                self._told(f"ready again after {time.monotonic() - started:.1f} s")
            server = self._server
            assert server is not None
            server.wait(Heartbeat(server.control, self._policy.hang))
        except ServerError as error:
            attempt = 1 if time.monotonic() - started > self._policy.steady else attempt + 1
            self._lose(error, attempt)
        return attempt

    def _lose(self, error: ServerError, attempt: int) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None
        self._running.close()
        if attempt > self._policy.attempts:
            said = f"given up after {self._policy.attempts} restarts in a row; the last time {error.message}"
            raise ServerError(said, "start it again with: h3trt serve")
        with suppress(OSError):
            # On a full disk the count is lost, not the restart.
            self._state.count_restart()
        delay = self._policy.delay(attempt)
        self._told(f"{error.message}\nrestart {attempt} of at most {self._policy.attempts} in a row, in {delay:g} s")
        time.sleep(delay)

    def _start(self) -> None:
        self._state.clear()
        server = TritonServer(self._settings, self._loaded, self._logged)
        # A port that was any free one is now this one.
        self._settings, self._endpoints = server.settings, server.endpoints
        self._server = self._running.enter_context(server)


class Heartbeat:
    """Tells a server that hangs from one that works; call it again and again.

    A server hangs when it has not answered for `patience` seconds, or has had requests for so long without a unit of
    progress. With a patience of 0 nothing hangs.
    """

    INTERVAL = 5.0

    def __init__(self, control: Control, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._control = control
        self._patience = patience
        self._clock = clock
        self._asked = self._answered = self._moved = clock()
        self._last: Activity | None = None

    def __call__(self) -> str:
        """What is wrong, in words; empty: nothing, or not yet time to ask again."""
        now = self._clock()
        if not self._patience or now - self._asked < min(self.INTERVAL, self._patience / 2):
            return ""
        self._asked = now
        try:
            activity = self._control.activity(DEVICE_MODELS, min(self._patience, REQUEST_SECONDS))
        except UNREACHABLE:
            activity = None
        if activity is None:
            silent = self._clock() - self._answered
            return f"tritonserver has not answered for {silent:.0f} s" if silent > self._patience else ""
        self._answered = self._clock()
        if activity != self._last or not activity.waiting + activity.running:
            self._last, self._moved = activity, self._clock()
        still = self._clock() - self._moved
        return f"requests have made no progress for {still:.0f} s" if still > self._patience else ""
