"""How the gateway says no: a code for programs, an HTTP status, a text for people, and the field it is about."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Any

from triton_repo.messages import REFUSAL, ClientError, Failure, is_impossible, is_late


class Code(StrEnum):
    """Every code that an answer or a failed job may carry."""

    INVALID = "invalid_request"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    SLOW_BODY = "body_timeout"
    CONFLICT = "conflict"
    REUSED_KEY = "idempotency_key_reused"
    TOO_LARGE = "too_large"
    MEDIA_TYPE = "unsupported_media_type"
    RANGE = "range_not_satisfiable"
    JOB_FAILED = "job_failed"
    QUEUE_FULL = "queue_full"
    IMPOSSIBLE = "deadline"
    LATE = "late"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DRAINING = "draining"
    RESTARTED = "restarted"
    TIMEOUT = "timeout"
    STORAGE = "storage"

    @property
    def status(self) -> int:
        """The HTTP status that goes with it."""
        return _STATUS[self].value


_STATUS = {
    Code.INVALID: HTTPStatus.BAD_REQUEST,
    Code.UNAUTHORIZED: HTTPStatus.UNAUTHORIZED,
    Code.FORBIDDEN: HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.METHOD: HTTPStatus.METHOD_NOT_ALLOWED,
    Code.SLOW_BODY: HTTPStatus.REQUEST_TIMEOUT,
    Code.CONFLICT: HTTPStatus.CONFLICT,
    Code.REUSED_KEY: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Code.MEDIA_TYPE: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    Code.RANGE: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    Code.JOB_FAILED: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.QUEUE_FULL: HTTPStatus.TOO_MANY_REQUESTS,
    Code.IMPOSSIBLE: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.LATE: HTTPStatus.TOO_MANY_REQUESTS,
    Code.CANCELLED: HTTPStatus.CONFLICT,
    Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.DRAINING: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.RESTARTED: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.TIMEOUT: HTTPStatus.GATEWAY_TIMEOUT,
    Code.STORAGE: HTTPStatus.INSUFFICIENT_STORAGE,
}

_FAILURES = {
    Failure.INVALID: Code.INVALID,
    Failure.CANCELLED: Code.CANCELLED,
    Failure.TIMEOUT: Code.TIMEOUT,
    Failure.UNAVAILABLE: Code.UNAVAILABLE,
    Failure.INTERNAL: Code.INTERNAL,
}


RETRY_SECONDS = 5
"""What a client is told to wait for a server that does not say it itself."""


class ApiError(Exception):
    """An answer that is no success. `retry_after` is in whole seconds."""

    def __init__(self, code: Code, message: str, field: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON envelope of every error."""
        return {"error": {"code": str(self.code), "message": self.message, "field": self.field}}

    def headers(self) -> Mapping[str, str]:
        """The headers that go with the status."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.code is Code.UNAUTHORIZED else {})


def of_models(error: ClientError) -> ApiError:
    """What a failure of the models is to a client of the gateway."""
    text = str(error)
    retry = RETRY_SECONDS if error.failure is Failure.UNAVAILABLE else None
    if is_late(error):
        return ApiError(Code.LATE, text, "deadline", retry)
    if is_impossible(error):
        return ApiError(Code.IMPOSSIBLE, text, "deadline")
    named = REFUSAL.match(text) if error.failure is Failure.INVALID else None
    return ApiError(_FAILURES[error.failure], text, named["field"] if named else None, retry)
