"""Ledgers and metadata in memory that die at a chosen write: what a crash leaves behind is what was written before it.

`Storage` outlives its users; a `Session` is one process on it. `crash_at(n, lands)` lets the session die at its n-th
write from now on, which still lands or does not; from there on nothing of it reaches the storage and nobody answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from magnetar.ledger import LedgerEntry
from magnetar.metadata import paths
from magnetar.metadata.records import OPEN, LedgerRecord, encode_record
from magnetar.metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    NodeUpdate,
    PutNode,
    VersionedValue,
    update_nodes,
)
from magnetar.proto.errors import (
    BadVersion,
    LedgerFenced,
    LedgerNotFound,
    NotEnoughBookies,
    OutcomeUnknown,
    Unavailable,
)


def alone(store: Any) -> Callable[[NodeUpdate], Awaitable[object]]:
    """Commits a record, and nothing with it."""
    return lambda change: update_nodes(store, (change,))


class Stored:
    """One ledger: its entries, and whether a recoverer closed it."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.fenced = False


class Storage:
    def __init__(self) -> None:
        self.ledgers: dict[int, Stored] = {}
        self.nodes: dict[str, VersionedValue] = {}
        self.next_ledger = 0
        self.writes = 0
        self.bytes = 0

    def session(self) -> Session:
        return Session(self)


class Session:
    """One process: as MetadataStore and as LedgerClient. Every write goes through `_written`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.dead = asyncio.Event()
        self.writes_left = -1
        self._lands = False
        self.bookies_away = False  # no ledger is made, written or recovered
        self.late_adds_land = False  # … but what was on its way may be stored, and its writer never hears of it

    def crash_at(self, writes: int, *, lands: bool) -> None:
        self.writes_left, self._lands = writes, lands

    async def _written(self) -> bool:
        """Whether the write that is asked for lands; a dead process never hears of it."""
        if self.dead.is_set():
            return False
        self.storage.writes += 1
        if self.writes_left < 0 or self.writes_left > 0:
            self.writes_left -= self.writes_left > 0
            return True
        self.dead.set()
        return self._lands

    async def _answer(self) -> None:
        if self.dead.is_set():
            await asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------------ metadata
    async def get(self, path: str) -> VersionedValue | None:
        await self._answer()
        return self.storage.nodes.get(path)

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        """One write, of all or nothing."""
        versions: list[int] = []
        for each in operations:
            found = self.storage.nodes.get(each.path)
            version = found.version if found is not None else NODE_ABSENT
            if each.expected not in (ANY_VERSION, version):
                raise BadVersion(f"{each.path} has version {version}")
            versions.append(
                version
                if isinstance(each, CheckNodeVersion)
                else version + 1
                if isinstance(each, PutNode)
                else NODE_ABSENT
            )
        if await self._written():
            for each, version in zip(operations, versions, strict=True):
                if isinstance(each, PutNode):
                    self._make(each.path)
                    self.storage.nodes[each.path] = VersionedValue(each.value, version)
                elif isinstance(each, DeleteNode):
                    self.storage.nodes.pop(each.path, None)
        await self._answer()
        return versions

    def _make(self, path: str) -> None:
        """The record of a ledger is the ledger."""
        if path.startswith(f"{paths.LEDGERS}/"):
            self.storage.ledgers.setdefault(int(path.rpartition("/")[2]), Stored())

    async def put(self, path: str, value: bytes, expected: int = ANY_VERSION, *, ephemeral: bool = False) -> int:
        return (await self.commit([PutNode(path, value, expected, ephemeral)]))[0]

    async def delete_node(self, path: str) -> None:
        if await self._written():
            self.storage.nodes.pop(path, None)
        await self._answer()

    async def delete(self, what: str | int, expected: int = ANY_VERSION) -> None:
        """Of both: a path, or a ledger."""
        if isinstance(what, str):
            await self.delete_node(what)
            return
        if await self._written():
            self.storage.ledgers.pop(what, None)
        await self._answer()

    # ------------------------------------------------------------------ ledgers
    async def create(self, **_options: Any) -> Writer:
        if self.bookies_away:
            raise NotEnoughBookies("none is there")
        ledger_id = self.storage.next_ledger
        self.storage.next_ledger += 1
        if await self._written():
            self.storage.ledgers[ledger_id] = Stored()
        await self._answer()
        return Writer(self, ledger_id)

    async def draft_record(self, **_options: Any) -> LedgerRecord:
        ledger_id = self.storage.next_ledger
        self.storage.next_ledger += 1
        return LedgerRecord(
            ledger_id=ledger_id, state=OPEN, ensemble_size=1, write_quorum=1, ack_quorum=1, key=b"", token="",
            fragments=(),
        )  # fmt: skip

    def make_creation_update(self, draft: LedgerRecord) -> NodeUpdate:
        path = paths.ledger(draft.ledger_id)
        return NodeUpdate(
            path, lambda node: node.value if node is not None else encode_record(draft, path), absent=True
        )

    def make_writer(self, record: LedgerRecord) -> Writer:
        return Writer(self, record.ledger_id)

    async def recover_without_close(self, ledger_id: int) -> tuple[Reader, None]:
        return await self.recover(ledger_id), None

    async def recover(self, ledger_id: int) -> Reader:
        await self._answer()
        if self.bookies_away:
            raise Unavailable("no bookie answers")
        found = self.storage.ledgers.get(ledger_id)
        if found is None:
            raise LedgerNotFound(f"ledger {ledger_id}")
        found.fenced = True
        return Reader(ledger_id, found)


    async def open(self, ledger_id: int) -> Reader:
        await self._answer()
        found = self.storage.ledgers.get(ledger_id)
        if found is None:
            raise LedgerNotFound(f"ledger {ledger_id}")
        return Reader(ledger_id, found)


class Writer:
    def __init__(self, session: Session, ledger_id: int) -> None:
        self._session = session
        self.ledger_id = ledger_id
        self.is_writable = True
        self.has_room = True
        self.listener: Any = None
        self.length = 0
        self.last_confirmed = -1
        self._order = asyncio.Lock()
        self._next = 0

    def append(self, *frames: bytes) -> asyncio.Future[int]:
        entry_id = self._next
        self._next += 1
        return asyncio.ensure_future(self._append(entry_id, b"".join(frames)))

    def append_for_listener(self, payload: bytes, tail: object = None) -> None:
        self.append(payload).add_done_callback(self._tell)

    def _tell(self, outcome: asyncio.Future[int]) -> None:
        if outcome.cancelled() or outcome.exception() is not None:
            self.listener.on_append_failed(self)
        else:
            self.listener.on_appended(self, outcome.result())

    async def _append(self, entry_id: int, payload: bytes) -> int:
        async with self._order:
            stored = self._session.storage.ledgers.get(self.ledger_id)
            if stored is None or stored.fenced:
                self.is_writable = False
                raise LedgerFenced(f"ledger {self.ledger_id}")
            if self._session.bookies_away and not self._session.late_adds_land:
                self.is_writable = False
            if not self.is_writable:
                raise OutcomeUnknown("no bookie answers")
            if await self._session._written():
                assert len(stored.entries) == entry_id, "entries are written in order"
                stored.entries.append(payload)
                self._session.storage.bytes += len(payload)
            await self._session._answer()
            if self._session.bookies_away:
                self.is_writable = False
                raise OutcomeUnknown("no bookie answers")
            self.length += len(payload)
            self.last_confirmed = entry_id
            return entry_id

    async def abandon(self) -> None:
        self.is_writable = False

    async def close(self) -> None:
        self.is_writable = False


class Reader:
    def __init__(self, ledger_id: int, stored: Stored) -> None:
        self.ledger_id = ledger_id
        self._entries = list(stored.entries)
        self.record = SimpleNamespace(length=sum(map(len, stored.entries)))

    @property
    def last_entry(self) -> int:
        return len(self._entries) - 1

    async def read(self, first: int, last: int, bytes_max: int | None = None) -> Sequence[LedgerEntry]:
        return [LedgerEntry(entry_id, self._entries[entry_id]) for entry_id in range(first, last + 1)]
