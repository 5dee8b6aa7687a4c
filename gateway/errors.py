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
    JOB_FAILED = "job_failed"
    IMPOSSIBLE = "deadline"
    LATE = "late"
    QUEUE_FULL = "queue_full"
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
        return _CODES[self][0].value

    @property
    def meaning(self) -> str:
        """What it says, for people."""
        return _CODES[self][1]


_CODES = {
    Code.INVALID: (HTTPStatus.BAD_REQUEST, "a field, header or body is not what it must be"),
    Code.UNAUTHORIZED: (HTTPStatus.UNAUTHORIZED, "no key of this gateway came with the request"),
    Code.FORBIDDEN: (HTTPStatus.FORBIDDEN, "another site's page, or a host name that is not this gateway's"),
    Code.NOT_FOUND: (HTTPStatus.NOT_FOUND, "no such job or path, or a clip that is not there yet"),
    Code.METHOD: (HTTPStatus.METHOD_NOT_ALLOWED, "the path has other methods; `Allow` lists them"),
    Code.SLOW_BODY: (HTTPStatus.REQUEST_TIMEOUT, "the body came to a halt"),
    Code.CONFLICT: (HTTPStatus.CONFLICT, "the job is being cancelled, or that of the idempotency key was deleted"),
    Code.REUSED_KEY: (HTTPStatus.UNPROCESSABLE_ENTITY, "the idempotency key stands for another request"),
    Code.TOO_LARGE: (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body, or one part of it, is too large"),
    Code.MEDIA_TYPE: (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body is neither JSON nor a multipart form"),
    Code.JOB_FAILED: (HTTPStatus.UNPROCESSABLE_ENTITY, "the job whose clip was asked for failed"),
    Code.IMPOSSIBLE: (HTTPStatus.UNPROCESSABLE_ENTITY, "this server could never meet the deadline"),
    Code.LATE: (HTTPStatus.TOO_MANY_REQUESTS, "what is before the request makes it too late for its deadline"),
    Code.QUEUE_FULL: (HTTPStatus.TOO_MANY_REQUESTS, "too many jobs wait, or too many bodies are being read"),
    Code.CANCELLED: (HTTPStatus.CONFLICT, "the job was cancelled"),
    Code.INTERNAL: (HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the server or the gateway; its log says which"),
    Code.UNAVAILABLE: (HTTPStatus.SERVICE_UNAVAILABLE, "the server does not answer or was lost"),
    Code.DRAINING: (HTTPStatus.SERVICE_UNAVAILABLE, "the gateway is stopping"),
    Code.RESTARTED: (HTTPStatus.SERVICE_UNAVAILABLE, "the gateway ended before the job did"),
    Code.TIMEOUT: (HTTPStatus.GATEWAY_TIMEOUT, "the clip or the server's check took too long"),
    Code.STORAGE: (HTTPStatus.INSUFFICIENT_STORAGE, "the job or its clip could not be stored: the disk is full, say"),
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
