"""Repeats work that bookies or the metadata refuse for now, with a log line when the reason changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...proto.errors import MagnetarError
from ...runtime.clock import Clock
from .log_throttle import LogThrottle

T = TypeVar("T")


async def until_done(
    work: Callable[[], Awaitable[T]], clock: Clock, log: logging.Logger, what: str, *,
    ends: Callable[[MagnetarError], bool], pause_s: float,
) -> T:  # fmt: skip
    """The result of the first attempt that succeeds. Raises the first error for which `ends` holds."""
    throttle = LogThrottle(clock)
    while True:
        try:
            return await work()
        except MagnetarError as error:
            if ends(error):
                raise
            if throttle.news(error):
                log.warning("%s: %s", what, error)
        await asyncio.sleep(pause_s)
