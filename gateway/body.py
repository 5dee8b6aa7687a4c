"""Reads the body of a request for a clip, within limits of bytes and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from gateway.errors import ApiError, Code
from gateway.form import admit, asked_of_form, asked_of_json
from gateway.models import Asked
from gateway.multipart import MultipartReader
from gateway.settings import BODY_BYTES, BODY_RATE, BODY_SECONDS


async def read_asked(request: Request) -> Asked:
    """The request for a clip in a body of JSON or of multipart/form-data. Raises ApiError."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"application/json":
        body = bytearray()
        async for chunk in _chunks(request):
            body += chunk
        return await asyncio.to_thread(asked_of_json, bytes(body))
    if kind == b"multipart/form-data":
        reader = MultipartReader(options.get(b"boundary", b""), admit)
        async for chunk in _chunks(request):
            reader.feed(chunk)
        return await asyncio.to_thread(asked_of_form, reader.parts())
    shown = kind.decode("latin-1") or "none"
    raise ApiError(Code.MEDIA_TYPE, f"Content-Type: got {shown}; must be multipart/form-data or application/json")


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives, which must neither be too long nor come to a halt. Raises ApiError."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > BODY_BYTES:
        raise _too_large()
    total, stream = 0, request.stream()
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream, None), BODY_SECONDS)
        except TimeoutError:
            raise ApiError(Code.SLOW_BODY, f"the body came to a halt for {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise ApiError(Code.INVALID, "the client has gone before its body had ended") from None
        if chunk is None:
            return
        total += len(chunk)
        if loop.time() - started > BODY_SECONDS + total / BODY_RATE:
            raise ApiError(Code.SLOW_BODY, f"the body must come with at least {BODY_RATE} bytes a second")
        if total > BODY_BYTES:
            raise _too_large()
        yield chunk


def _too_large() -> ApiError:
    return ApiError(Code.TOO_LARGE, f"the body must have at most {BODY_BYTES} bytes")
