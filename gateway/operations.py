"""The routes that are about the gateway itself: health, readiness, metrics, the served model, the web page."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel

from gateway.errors import ApiError, Code
from gateway.jobs import Jobs
from gateway.metrics import GatewayMetrics
from gateway.models import Models
from gateway.page import Page
from gateway.schema import refusals
from gateway.settings import SERVED_MODEL


class Model(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    owned_by: str = "MiniMax"


class ModelList(BaseModel):
    """The models that requests may name."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """That the gateway answers."""

    status: Literal["ok", "ready"]


class Operations:
    """The handlers."""

    def __init__(self, jobs: Jobs, models: Models, metrics: GatewayMetrics) -> None:
        self._jobs, self._models, self._metrics = jobs, models, metrics
        self._page = Page.read()

    def add_to(self, app: FastAPI) -> None:
        """Adds all routes."""
        app.add_api_route("/v1/models", self.models, response_model=ModelList, responses=refusals(401, 403))
        app.add_api_route("/healthz", self.healthz, response_model=Health, responses=refusals(403))
        app.add_api_route("/readyz", self.readyz, response_model=Health, responses=refusals(403, 503))
        app.add_api_route("/metrics", self.metrics, response_class=Response, responses=refusals(401, 403))
        app.add_api_route("/", self.page, response_class=Response, include_in_schema=False)

    async def models(self) -> ModelList:
        """The served model."""
        return ModelList(data=[Model(id=SERVED_MODEL)])

    async def healthz(self) -> Health:
        """Whether the gateway itself is alive, whatever the server behind it does."""
        return Health(status="ok")

    async def readyz(self) -> Health:
        """Whether a request for a clip would be accepted now: the models are ready and the gateway does not stop."""
        if self._jobs.draining:
            raise ApiError(Code.DRAINING, "the gateway is stopping")
        if not await self._models.ready():
            raise ApiError(Code.UNAVAILABLE, "the models are not ready; start them with: h3trt serve")
        return Health(status="ready")

    async def metrics(self) -> Response:
        """Prometheus metrics of the gateway."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        """The web page."""
        return self._page.response()
