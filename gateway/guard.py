"""What every request passes before a route sees it: where it comes from, whose it is, and that it is counted."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, Code
from gateway.metrics import GatewayMetrics
from gateway.settings import LOOPBACK_HOSTS, GatewaySettings

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
"""What needs no key: nothing of a job, and nothing that costs anything."""

NOBODY = ""
"""The owner of all jobs where no keys are used."""

_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))


class Guard:
    """ASGI middleware. Sets `state.owner` of a request that may pass; answers the others itself."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = self._counted(scope, send)
        try:
            scope.setdefault("state", {})["owner"] = self._owner(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    def _owner(self, path: str, headers: Headers) -> str:
        """Whose request it is. Raises ApiError."""
        self._check_origin(headers)
        keys = self._settings.keys
        if keys is None:
            self._check_host(headers)
            return NOBODY
        owner = keys.owner(headers.get("authorization"))
        if owner is None and path not in OPEN_PATHS:
            raise ApiError(Code.UNAUTHORIZED, "Authorization: must be Bearer and a key of this gateway")
        return owner or NOBODY

    def _check_origin(self, headers: Headers) -> None:
        """Refuses what the page of another site makes a browser send."""
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise ApiError(Code.FORBIDDEN, "Origin: pages of other sites cannot use this gateway", "Origin")

    def _check_host(self, headers: Headers) -> None:
        """Refuses a name of another site that was made to lead to this machine."""
        if self._settings.any_host or _host_name(headers.get("host", "")) in LOOPBACK_HOSTS:
            return
        rule = f"without keys the gateway answers to {', '.join(sorted(LOOPBACK_HOSTS))} only"
        raise ApiError(Code.FORBIDDEN, f"Host: {rule}; give it keys with: h3trt gateway --keys FILE", "Host")

    def _counted(self, scope: Scope, send: Send) -> Send:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route's pattern and not the path, which anybody can make up.
                route = getattr(scope.get("route"), "path_format", "other")
                self._metrics.requests.labels(route, _method(scope["method"]), message["status"]).inc()
                message["headers"] = [*message["headers"], *_absent(message["headers"])]
            await send(message)

        return counting


def error_response(error: ApiError) -> JSONResponse:
    """The answer that an error is."""
    return JSONResponse(error.body(), error.code.status, error.headers())


def _absent(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    present = {name.lower() for name, _ in headers}
    return [(name, value) for name, value in _HEADERS if name not in present]


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _method(method: str) -> str:
    return method if method in ("GET", "HEAD", "POST", "DELETE") else "other"
