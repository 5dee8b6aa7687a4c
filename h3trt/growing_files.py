"""Files that are written as their pieces come, so that a player can begin before the last one: `generate --stream`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from io import BufferedIOBase
from pathlib import Path
from types import TracebackType
from typing import Any


def in_fragments(request: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request with the container that comes in pieces."""
    media = request.get("media", {})
    # One that is no object is refused where all of the request is checked.
    return {**request, "media": {**media, "container": "fragmented"} if isinstance(media, Mapping) else media}


class GrowingFiles:
    """The files of a request's outputs, each begun with its first piece; removed when the request does not succeed."""

    def __init__(self, path: Callable[[int], Path]) -> None:
        """path: of the output with an index."""
        self._path = path
        self._files: dict[int, BufferedIOBase] = {}
        self._open = ExitStack()

    def __enter__(self) -> GrowingFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if error is not None:
            for index in self._files:
                self._path(index).unlink(missing_ok=True)

    def add(self, index: int, piece: bytes) -> None:
        """Appends the next piece of an output's file, for others to read at once. Raises OSError."""
        if index not in self._files:
            path = self._path(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[index] = self._open.enter_context(path.open("wb"))
        self._files[index].write(piece)
        self._files[index].flush()
