"""The metadata tree: the interface that every store keeps, and what its callers may rely on.

The tree maps paths ("/a/b/c") to byte values. Each node has a `version`: it starts at 0 when the node is created and
grows by one with every write; a node that was deleted and made again starts at 0 again, so records that must not be
confused carry their own token. The whole tree has a `revision` that grows with every commit.
Parents need not exist: a path is a key, `children` lists the next path segments below it.

- `commit` is a transaction: all operations or none, in order, linearizable. BadVersion (NodeExists, NoNode) is
  definite; ConnectionLost and TimedOut are *unknown*: re-read and decide by content (`metadata/update.py` does).
- A put decides each time whether its node is ephemeral: the last put, and how, counts. An ephemeral lives as
  long as the session of the store that put it. A lost session is reported once, by
  `wait_session_lost`; then every call fails with SessionExpired and the store must be made anew.
- A watch gives every change below its prefix after a revision, in order, without a gap, across reconnects. If history
  is no longer there it says `Reset`: list again.

Implementations: metadata/sqlite.py (in process), metadata/remote.py (a client of metadata/server.py),
metadata/zookeeper/store.py. One conformance suite runs against all: tests/metadata/test_conformance.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

ABSENT = -1
"""Expected version: the node must not exist."""
ANY = -2
"""Expected version: whatever is there, or nothing."""

VALUE_BYTES_MAX = 1 << 20
"""Largest value of a node, as in ZooKeeper."""


class Versioned(NamedTuple):
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Put:
    path: str
    value: bytes
    expected: int = ANY
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    expected: int = ANY  # ANY: fine when absent


@dataclass(frozen=True, slots=True)
class Check:
    path: str
    expected: int


Operation = Put | Delete | Check


@dataclass(frozen=True, slots=True)
class Changed:
    path: str
    version: int  # -1: deleted
    revision: int


@dataclass(frozen=True, slots=True)
class Reset:
    revision: int


class MetadataStore(Protocol):
    async def get(self, path: str) -> Versioned | None: ...
    async def children(self, path: str) -> list[str]:
        """Names of the direct children (segments, not paths), sorted: all of them, or an error.

        Linearizable, as `get` is: every commit that was answered before the call is seen, by any client. A bookie
        deletes what is not listed, so a store that may read an older state (ZooKeeper) must `sync` first.
        """
        ...

    async def commit(self, operations: Sequence[Operation]) -> list[int]:
        """The new version of each operation's node (-1 for a delete)."""
        ...

    async def put(self, path: str, value: bytes, expected: int = ANY, *, ephemeral: bool = False) -> int:
        """A commit of one put; the new version."""
        return (await self.commit([Put(path, value, expected, ephemeral)]))[0]

    async def delete(self, path: str, expected: int = ANY) -> None:
        """A commit of one delete."""
        await self.commit([Delete(path, expected)])

    async def revision(self) -> int: ...

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Changed | Reset]:
        """Changes of `prefix` itself and everything below it."""
        ...

    @property
    def session_id(self) -> str: ...
    async def wait_session_lost(self) -> None: ...
    async def close(self) -> None:
        """Ends the session, and its ephemerals with it, at once."""
        ...


T = TypeVar("T")
Transform = Callable[[Versioned | None], bytes | None]
"""Current node → new value; None: leave it as it is. Raises to give up. Must recognise its own earlier write."""
Update = Callable[[MetadataStore, str, Transform], Awaitable[Versioned | None]]
