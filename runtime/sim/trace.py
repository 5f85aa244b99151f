"""The trace of a simulation: one running hash over everything that happened, and its lines on demand.

Two runs are the same run when their hashes are equal. The trace gets every step of the loop (its virtual time and the
name of what ran), every message of the network, every operation on a file, every fault, and the test's notes.
It must not get anything that differs between processes: no `id()`, no `hash()` of text, no wall time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

_FLUSH_LINES = 512


class Trace:
    """The trace of a simulation. `note`: a line of the story; `detail`: a line of its details; `step`: of the loop,
    hashed and never shown."""

    def __init__(self, show: Callable[[str], None] | None = None, *, details: bool = True) -> None:
        self.show = show
        self.show_details = show if details else None
        self.lines = 0
        self.steps = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._waiting: list[str] = []
        self._frozen = False

    def freeze(self) -> None:
        """Ends the trace: what follows is cleaning up, and no part of it."""
        self._frozen = True

    def step(self, now: float, what: str) -> None:
        if self._frozen:
            return
        self.steps += 1
        self._feed(f"{now:.9f} {what}")

    def note(self, now: float, text: str) -> None:
        if self._frozen:
            return
        self.lines += 1
        line = f"{now:14.6f} {text}"
        self._feed(line)
        if self.show is not None:
            self.show(line)

    def detail(self, now: float, text: str) -> None:
        """Adds one message, or one operation of a disk."""
        if self._frozen:
            return
        self.lines += 1
        line = f"{now:.6f} {text}"
        self._feed(line)
        if self.show_details is not None:
            self.show_details(f"{now:14.6f} {text}")

    def _feed(self, line: str) -> None:
        self._waiting.append(line)
        if len(self._waiting) >= _FLUSH_LINES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._digest.update("\n".join(self._waiting).encode("utf-8", "backslashreplace") + b"\n")
            self._waiting.clear()

    @property
    def hash(self) -> str:
        self._flush()
        return self._digest.hexdigest()
