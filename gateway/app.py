"""The application: its parts, which live as long as it does, its routes, and how its errors are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gateway.clips import Clips
from gateway.clock import Clock
from gateway.database import Database
from gateway.errors import ApiError, Code
from gateway.guard import Guard, error_response
from gateway.jobs import Jobs
from gateway.metrics import GatewayMetrics
from gateway.models import Models, TritonModels
from gateway.operations import Operations
from gateway.schema import without_defaults
from gateway.settings import GatewaySettings
from gateway.store import JobStore
from gateway.videos import Videos
from runtime.refusal import show
from triton_repo.logs import Log

_log = Log("gateway")


class _Application(FastAPI):
    """With an OpenAPI document that says what there is and nothing else."""

    def openapi(self) -> dict[str, Any]:
        """The document."""
        return without_defaults(super().openapi())


class Gateway:
    """One gateway: `app` is its ASGI application, `jobs` what it works on."""

    def __init__(self, settings: GatewaySettings, models: Models | None = None, clock: Clock | None = None) -> None:
        """models: None for those of the server that the settings name. Raises OSError for an impossible folder."""
        self.settings = settings
        clock = clock or Clock()
        settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        clips = Clips(settings.folder / "clips")
        self._models = models or TritonModels(settings.triton)
        self._database = Database(lambda: JobStore(settings.folder / JobStore.FILE, clock))
        metrics = GatewayMetrics()
        self.jobs = Jobs(self._models, self._database, clips, settings, clock, metrics)
        self.app = _Application(
            title="MiniMax H3",
            description="Video with sound from text and reference media.",
            version="1",
            lifespan=self._running,
            # Their pages would load scripts from elsewhere.
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        Videos(self.jobs, clips, settings, metrics).add_to(self.app)
        Operations(self.jobs, self._models, metrics).add_to(self.app)
        self.app.add_middleware(Guard, settings=settings, metrics=metrics)
        for error, answer in (
            (ApiError, _api_error),
            (RequestValidationError, _invalid),
            (HTTPException, _http_error),
            (Exception, _fault),
        ):
            self.app.add_exception_handler(error, answer)

    @asynccontextmanager
    async def _running(self, app: FastAPI) -> AsyncIterator[None]:
        """Opens everything, and closes it in the end. Raises ServerError."""
        await self._database.open()
        await self._models.open()
        interrupted = await self.jobs.recover()
        _log.info("ready", interrupted_jobs=interrupted)
        sweeping = asyncio.create_task(self.jobs.sweep_for_ever())
        try:
            yield
        finally:
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
            await self.jobs.close()
            await self._models.close()
            await self._database.close()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _invalid(request: Request, error: Exception) -> Response:
    """A header or a query parameter that is not what the OpenAPI document says."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = str(first["loc"][-1])
    return error_response(ApiError(Code.INVALID, f"{field}: got {show(first.get('input'))}; {first['msg']}", field))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: Code.NOT_FOUND, 405: Code.METHOD}.get(error.status_code, Code.INVALID)
    answer = error_response(ApiError(code, f"{request.method} {show(request.url.path)}: {error.detail}"))
    if code is Code.METHOD:
        answer.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return answer


def _methods(request: Request) -> set[str]:
    """What may be done to the path; Starlette itself tells only what the first route that matches it does."""
    routes: list[Any] = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in routes for method in getattr(route, "methods", None) or ()}


async def _fault(request: Request, error: Exception) -> Response:
    """The server logs it with its traceback."""
    return error_response(ApiError(Code.INTERNAL, "the gateway failed; its log says why"))
