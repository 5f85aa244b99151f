"""The metadata tree: the interface that every store keeps, and what its callers may rely on.

The tree maps paths ("/a/b/c") to byte values. Each node has a `version`: 0 when the node is created, then one more with
every write. A node that was deleted and made again starts at 0 again, so records that must not be confused have a token
of their own. The whole tree has a `revision` that grows with every commit.
Parents need not exist: a path is a key, `children` lists the next path segments below it.

- `commit` is a transaction: all operations or none, in order, linearizable. BadVersion (NodeExists, NoNode) is
  definite; ConnectionLost and TimedOut are *unknown*: read again and decide by content (`metadata/update.py` does).
- Every put decides anew whether its node is ephemeral; the last put counts. An ephemeral lives as long as the session
  of the store that put it. A lost session is reported once, by `wait_session_lost`; after that every call raises
  SessionExpired, and the caller makes a new store.
- A watch returns every change below its prefix after a revision, in order, without a gap, across reconnects. When the
  history no longer contains them it returns `Reset`: list again.

Implementations: metadata/sqlite.py (in process), metadata/remote.py (a client of metadata/server.py),
metadata/zookeeper/store.py. One conformance suite runs against all: tests/metadata/test_conformance.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

ABSENT = -1
"""Expected version: the node must not exist."""
ANY = -2
"""Expected version: any, or none."""

VALUE_BYTES_MAX = 1 << 20
"""Largest value of a node, as in ZooKeeper."""


class Versioned(msgspec.Struct, frozen=True, gc=False):
    """A node's value and version."""

    value: bytes
    version: int


class Put(msgspec.Struct, frozen=True):
    """Writes a node, at the expected version."""

    path: str
    value: bytes
    expected: int = ANY
    ephemeral: bool = False


class Delete(msgspec.Struct, frozen=True):
    """Deletes a node, at the expected version."""

    path: str
    expected: int = ANY  # ANY: fine when absent


class Check(msgspec.Struct, frozen=True):
    """Changes nothing; the commit fails unless the node has the expected version."""

    path: str
    expected: int


Operation = Put | Delete | Check


class Changed(msgspec.Struct, frozen=True):
    """A change of a node, in the commit that made `revision`."""

    path: str
    version: int  # -1: deleted
    revision: int


class Reset(msgspec.Struct, frozen=True):
    """Changes up to `revision` were missed: list again, and watch after it."""

    revision: int


class MetadataStore(Protocol):
    """A session with the tree. The head of this module has the guarantees."""

    async def get(self, path: str) -> Versioned | None: ...
    async def children(self, path: str) -> list[str]:
        """Names of the direct children (segments, not paths), sorted: all of them, or an error.

        Linearizable, as `get` is: it sees every commit that was answered to any client before the call. A bookie
        deletes the ledgers that are not listed, so a store that may read an older state (ZooKeeper) syncs first.
        """
        ...

    async def commit(self, operations: Sequence[Operation]) -> list[int]:
        """The new version of each operation's node (-1 for a delete). BadVersion: nothing was done."""
        ...

    async def put(self, path: str, value: bytes, expected: int = ANY, *, ephemeral: bool = False) -> int:
        """Commits one put; returns the new version."""
        return (await self.commit([Put(path, value, expected, ephemeral)]))[0]

    async def delete(self, path: str, expected: int = ANY) -> None:
        """Commits one delete."""
        await self.commit([Delete(path, expected)])

    async def revision(self) -> int: ...

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Changed | Reset]:
        """Changes of `prefix` itself and everything below it."""
        ...

    @property
    def session_id(self) -> str: ...
    async def wait_session_lost(self) -> None: ...
    async def close(self) -> None:
        """Ends the session at once, and its ephemerals with it."""
        ...


T = TypeVar("T")
Transform = Callable[[Versioned | None], bytes | None]
"""Current node → new value; None: no change. An exception ends the update. Must recognise its own earlier write."""
Update = Callable[[MetadataStore, str, Transform], Awaitable[Versioned | None]]
