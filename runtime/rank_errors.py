"""How a group of ranks fails, for whoever asks something of it. Imports no torch."""

from __future__ import annotations

LOST = "lost: "
"""How the text of a RankLost begins, which is all that tells one on a stream."""

NOT_STARTED = "the ranks could not be started"
"""What is told of a RankLost for which no rank is to blame."""


class RankLost(Exception):
    """A rank has died, hangs or could not be started, and with it the request; the same request may be sent again.

    The group is started anew meanwhile. The text says which rank, and what is known of how; `public` is it without what
    the rank itself has said, which may tell of the server's insides.
    """

    def __init__(self, message: str, said: str = "") -> None:
        self.message, self.said = message, said
        self.public = f"{LOST}{message}"
        super().__init__(f"{self.public}: {said}" if said else self.public)


class GroupError(Exception):
    """A group of ranks that cannot be started as it has been set up; the text says what to change."""
