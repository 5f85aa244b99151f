"""Why messages are not acknowledged: the last reason, and whether it is time to say it aloud.

A broker that cannot store sends an error and the producer tries again, until the message's time is over; then the user
wants the reason and not only "timeout". Each kind of reason is said at once, and again when SAY_EVERY_S have passed.
An acknowledgement ends it: what was wrong before says nothing about later messages.
"""

from __future__ import annotations

SAY_EVERY_S = 60.0


class ErrorLogThrottle:
    def __init__(self) -> None:
        self.last = ""
        self._said: dict[str, float] = {}  # by kind, which is the name of an error class: bounded

    def note(self, kind: str, text: str, now: float) -> bool:
        """Remembers it; whether it is to be said now."""
        self.last = text
        said = self._said.get(kind)
        if said is not None and now - said < SAY_EVERY_S:
            return False
        self._said[kind] = now
        return True

    def over(self) -> None:
        self.last = ""
