"""The one exception of the serving side that an operator can mend."""

from __future__ import annotations


class ServerError(Exception):
    """The server cannot start, or died. `remedy` is the command or option that mends it, empty where none is known."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy
