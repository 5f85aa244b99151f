"""`async with` and `with`: the object is closed at the end of the block, unless the program closed it before."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self

from .errors import AlreadyClosed


class ClosedAfterAsyncWith:
    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        with suppress(AlreadyClosed):
            await self.close()


class ClosedAfterWith:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(AlreadyClosed):
            self.close()
