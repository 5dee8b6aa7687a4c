"""A multipart body, taken apart while it arrives, with a limit on every part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import ApiError, Code

PARTS_MAXIMUM = 128
NAME_MAXIMUM = 256


@dataclass
class Part:
    """One part: a field's text, or a file when it came with a file name. Types and names are the client's words."""

    name: str
    file_name: str | None
    content_type: str
    data: bytearray = field(default_factory=bytearray, repr=False)
    limit: int = 0

    @property
    def is_file(self) -> bool:
        """Whether it came as a file."""
        return self.file_name is not None


class MultipartReader:
    """Feed it the body chunk by chunk, then ask for the parts.

    admit: called as soon as a part's headers are known; it says how many bytes the part may have, or raises ApiError.
    """

    def __init__(self, boundary: bytes, admit: Callable[[Part, int], int]) -> None:
        self._admit = admit
        self._parts: list[Part] = []
        self._headers: dict[str, bytes] = {}
        self._name, self._value = bytearray(), bytearray()
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                    "on_header_end": self._header,
                    "on_headers_finished": self._start,
                    "on_part_data": self._take,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes. Raises ApiError."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed(error) from None

    def parts(self) -> list[Part]:
        """All parts of a body that has ended. Raises ApiError when it broke off."""
        if not self._ended:
            raise ApiError(Code.INVALID, "the multipart body ends before its last boundary")
        return self._parts

    def _begin(self) -> None:
        self._headers = {}

    def _header(self) -> None:
        self._headers[self._name.decode("latin-1").lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _start(self) -> None:
        kind, options = parse_options_header(self._headers.get("content-disposition"))
        name = options.get(b"name", b"")
        if kind != b"form-data" or not name or len(name) > NAME_MAXIMUM:
            raise ApiError(Code.INVALID, f"a part needs a form-data name of 1 to {NAME_MAXIMUM} bytes")
        if len(self._parts) == PARTS_MAXIMUM:
            raise ApiError(Code.TOO_LARGE, f"the body must have at most {PARTS_MAXIMUM} parts")
        file_name = options.get(b"filename")
        content_type = self._headers.get("content-type", b"").decode("latin-1")
        part = Part(
            name.decode("utf-8", "backslashreplace"),
            None if file_name is None else file_name.decode("utf-8", "backslashreplace"),
            content_type.partition(";")[0].strip().lower(),
        )
        same = sum(one.name == part.name for one in self._parts)
        part.limit = self._admit(part, same)
        self._parts.append(part)

    def _take(self, data: bytes, start: int, end: int) -> None:
        part = self._parts[-1]
        if len(part.data) + end - start > part.limit:
            raise ApiError(Code.TOO_LARGE, f"{part.name}: must have at most {part.limit} bytes", part.name)
        part.data += data[start:end]

    def _end(self) -> None:
        self._ended = True


def _malformed(error: Exception) -> ApiError:
    return ApiError(Code.INVALID, f"the multipart body is malformed: {error}")
