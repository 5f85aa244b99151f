"""`async with` and `with`: the object is closed at the end of the block, unless the program closed it before.

`close_all` closes several at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol, Self

from .errors import AlreadyClosed


class ClosedAfterAsyncWith:
    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        with suppress(AlreadyClosed):
            await self.close()


class Closable(Protocol):
    async def close(self) -> None: ...


async def close_all(parts: Iterable[Closable]) -> None:
    """Returns when all are closed; then raises the first error other than AlreadyClosed."""
    for outcome in await asyncio.gather(*(each.close() for each in parts), return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, AlreadyClosed):
            raise outcome


class ClosedAfterWith:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(AlreadyClosed):
            self.close()
