"""How a group of ranks fails, for whoever asks something of it. Imports no torch."""

from __future__ import annotations

LOST = "lost: "
"""How the text of a RankLost begins, which is all that tells one on a stream."""


class RankLost(Exception):
    """A rank has died, hangs or could not be started, and with it the request; the same request may be sent again.

    The group is started anew meanwhile. The text says which rank, and what is known of how.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"{LOST}{message}")


class GroupError(Exception):
    """A group of ranks that cannot be started as it has been set up; the text says what to change."""
