"""Structured logs: one JSON object a line, with the time, the level, who says it, what happened, and further fields.

`request` is the id that the client gave its request; it is the same in all models that work on it.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_FIELDS = "fields"
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {_FIELDS, "message", "asctime", "taskName"}
"""What every record has; all else was given with it."""
_NAMES = {"request_id": "request"}


class JsonLines(logging.Formatter):
    """A record as one line of JSON; a traceback is a field of it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "source": record.name,
            "event": record.getMessage(),
            **{_NAMES.get(name, name): value for name, value in vars(record).items() if name not in _OWN},
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Log:
    """A source of log lines, with fields that all of them have."""

    def __init__(self, source: str, **fields: Any) -> None:
        self._logger = logging.getLogger(source)
        self._fields = fields

    def of(self, **fields: Any) -> Log:
        """The same source with further fields."""
        return Log(self._logger.name, **self._fields, **fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something that happened in order."""
        self._logger.info(event, extra={_FIELDS: self._fields | fields})

    def warning(self, event: str, **fields: Any) -> None:
        """Something that an operator may want to know."""
        self._logger.warning(event, extra={_FIELDS: self._fields | fields})

    def error(self, event: str, error: BaseException | None = None, **fields: Any) -> None:
        """A fault; `error` is written with its traceback."""
        self._logger.error(event, exc_info=error, extra={_FIELDS: self._fields | fields})


def set_up(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send everything that this process logs to `stream` (standard error) as JSON lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
