"""A metadata store whose watches break, and whose reads fail, when a test says so."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from magnetar.metadata.store import VersionedValue
from magnetar.proto.errors import Unavailable


class CutStore:
    """Its watches break, and stay broken, once `cut` is set. `failing`: how many calls of a method fail from now."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.cut = asyncio.Event()
        self.failing: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def break_watches(self) -> None:
        """Once; they can be set again."""
        self.cut.set()
        self.cut = asyncio.Event()

    async def revision(self) -> int:
        self._may("revision")
        return int(await self._inner.revision())

    async def get(self, path: str) -> VersionedValue | None:
        self._may("get")
        found: VersionedValue | None = await self._inner.get(path)
        return found

    def _may(self, method: str) -> None:
        if self.failing[method]:
            self.failing[method] -= 1
            raise Unavailable("the metadata does not answer")
        if self.cut.is_set():
            raise Unavailable("the metadata does not answer")

    async def watch(self, path: str, revision: int) -> AsyncIterator[Any]:
        if self.cut.is_set():
            raise Unavailable("the metadata does not answer")
        events, cut = self._inner.watch(path, revision), asyncio.ensure_future(self.cut.wait())
        try:
            while True:
                event = asyncio.ensure_future(anext(events))
                await asyncio.wait((event, cut), return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    event.cancel()
                    raise Unavailable("the metadata does not answer")
                yield event.result()
        finally:
            cut.cancel()
