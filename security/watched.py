"""A value that is made of a secret's source, and made anew when its file changes.

The file is looked at when the value is asked for, at most every CHECK_S: no task, no thread. A change is another inode,
modification time or size. A file that cannot be used keeps the value before in use, and the log says so once; at the
start the error goes to the caller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Generic, TypeVar

from ..proto.errors import MagnetarError
from ..runtime.clock import Clock

T = TypeVar("T")

CHECK_S = 2.0

_LOG = logging.getLogger("magnetar.security")


class Watched(Generic[T]):
    """The value that `load` makes; `source` is as `read_secret` takes it. `version` grows with each new value."""

    def __init__(self, source: str, load: Callable[[], T], clock: Clock) -> None:
        self.version = 0
        self._source = source
        self._load = load
        self._clock = clock
        self._stamp = _stamp(source)
        self._value = load()
        self._look_at = clock.monotonic() + CHECK_S

    def current(self) -> T:
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._look_at = now + CHECK_S
            self._look()
        return self._value

    def _look(self) -> None:
        stamp = _stamp(self._source)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._value = self._load()
        except MagnetarError as error:
            _LOG.error("%s has changed and is not used, what it said before stays: %s", self._source, error)
            return
        self.version += 1
        _LOG.info("%s has changed and is used from now on", self._source)


def _stamp(source: str) -> object:
    try:
        found = os.stat(source.removeprefix("file:").removeprefix("//"))
    except (OSError, ValueError):
        return None  # `env:` and `data:` do not change
    return found.st_ino, found.st_mtime_ns, found.st_size
