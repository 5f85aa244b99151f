"""The metadata tree: the interface that every store keeps, and what its callers may rely on.

The tree maps paths ("/a/b/c") to byte values. Each node has a `version`: 0 when the node is created, then one more with
every write. A node that was deleted and made again starts at 0 again, so records that must not be confused have a token
of their own. The whole tree has a `revision` that grows with every commit.
Parents need not exist: a path is a key, `children` lists the next path segments below it.

- `commit` is a transaction: all operations or none, in order, linearizable. BadVersion (NodeExists, NoNode) is
  definite; ConnectionLost and TimedOut are *unknown*: read again and decide by content (`update_nodes` does).
- Every put decides anew whether its node is ephemeral; the last put counts. An ephemeral lives as long as the session
  of the store that put it. A lost session is reported once, by `wait_session_lost`; after that every call raises
  SessionExpired, and the caller makes a new store.
- A watch returns every change below its prefix after a revision, in order, without a gap, across reconnects. When the
  history no longer contains them it returns `WatchReset`: list again.

Implementations: metadata/sqlite.py (in process), metadata/remote.py (a client of metadata/server.py),
metadata/zookeeper.py, metadata/etcd.py. One conformance suite runs against all: tests/metadata/test_conformance.py.

Also in this file, each below its heading: metadata records that this process cannot read, of a newer version or damaged
(unreadable); safe changes of nodes (update).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from pyroaring import BitMap64

from ..proto.errors import BadVersion, InternalError, MagnetarError, NodeExists, OutcomeUnknown, TimedOut
from . import paths
from .records import (
    CLUSTER_FORMAT,
    BookieRecord,
    BrokerRecord,
    ClusterRecord,
    CounterRecord,
    DamagedRecord,
    MetadataRecord,
    check_cluster_format,
    decode_record,
    encode_record,
    set_written_format,
)  # fmt: skip

NODE_ABSENT = -1
"""As an expected version: the node must not exist."""
ANY_VERSION = -2
"""As an expected version: the node may have any version, or may not exist."""

CHANGES_PAUSE_S, CHANGES_PAUSE_S_MAX = 0.1, 2.0
"""Seconds for which the changes of a folder are collected, at least and at most, while they come one after another."""
READS_SPREAD_ABOVE = 20
"""Processes that watch a folder: fewer read what has changed at once, more do so within a moment (`choose_read_delay`).
"""
READS_SPREAD_EACH_S, READS_SPREAD_S_MAX = 0.001, 2.0
"""The length of that moment: for each of the processes, and at most. So a thousand reads a second are asked for."""
NODES_READ_AT_ONCE = 100
"""Nodes that are asked for together where a store has no request for many."""
NODES_PER_PAGE = 3000
"""Names of one page of a listing: 60 kB of ledgers, and a few milliseconds of a store."""

VALUE_BYTES_MAX = 1 << 20
"""The largest value of a node, in bytes, as in ZooKeeper."""


class VersionedValue(msgspec.Struct, frozen=True, gc=False):
    """The value of a metadata node, and the version of the node."""

    value: bytes
    version: int


class PutNode(msgspec.Struct, frozen=True):
    """Operation of a commit: write a node. `expected`: the version that the node must have, NODE_ABSENT or ANY_VERSION;
    the commit fails if the node does not have it. `ephemeral`: the node is deleted when the session ends."""

    path: str
    value: bytes
    expected: int = ANY_VERSION
    ephemeral: bool = False


class DeleteNode(msgspec.Struct, frozen=True):
    """Operation of a commit: delete a node. `expected`: the version that the node must have, or ANY_VERSION, which also
    allows that there is no node; the commit fails if the node does not have it."""

    path: str
    expected: int = ANY_VERSION  # ANY_VERSION: fine when absent


class CheckNodeVersion(msgspec.Struct, frozen=True):
    """Operation of a commit: change nothing, but let the commit fail if the node does not have the expected version.
    `expected`: a version, or NODE_ABSENT."""

    path: str
    expected: int


CommitOperation = PutNode | DeleteNode | CheckNodeVersion


class NodeChanged(msgspec.Struct, frozen=True):
    """A change of a metadata node: a commit that made the revision `revision` of the tree has written or deleted the
    node at `path`. `version`: its new version; NODE_ABSENT (-1): it was deleted."""

    path: str
    version: int  # -1: deleted
    revision: int


class WatchReset(msgspec.Struct, frozen=True):
    """An item of a watch which says that changes up to `revision` may be missing. The reader must list the nodes again;
    the watch continues after this revision."""

    revision: int


class MetadataDisk(NamedTuple):
    """The disk on which the metadata is stored, as the metadata service reports it. `certificate_ends_ms`: when the
    first of the service's certificates expires, in ms since the epoch; 0: it has none, or does not say.

    `backup_ms`: when the last copy of the metadata was made, in ms since the epoch; 0: none was, or it is not known.
    `backup_every_ms`: how often the service makes a copy by itself; 0: never. `backup_failure`: why its last scheduled
    copy failed; "": it did not. `refusal`: why the store refuses commits at present, as far as this session was told;
    "": it does not. A store may know that and no disk, whose size is 0 then."""

    total_bytes: int
    free_bytes: int
    certificate_ends_ms: int = 0
    backup_ms: int = 0
    backup_every_ms: int = 0
    backup_failure: str = ""
    refusal: str = ""


class NodePage(NamedTuple):
    """A part of the names of the nodes directly below a folder, sorted. `more`: there may be further names after the
    last of `names`; if it is False, `names` has all that were left."""

    names: list[str]
    more: bool


class MetadataStore(Protocol):
    """A client's session with the metadata tree. The module's docstring says what its callers may rely on. Implemented
    by LocalSession, RemoteStore, ZookeeperStore and EtcdStore, and by ReconnectingStore, which uses several in turn.

    A read raises Unavailable, TimedOut or ConnectionLost if it gets no answer in time, and InvalidName for an invalid
    path. Every call raises SessionExpired when the session has ended. Docstrings call the errors of these methods *the
    errors of the metadata*; DamagedRecord is one of them where a record is read."""

    async def get(self, path: str) -> VersionedValue | None:
        """Returns the value and the version of the node at `path`; None if there is no node. Linearizable: the result
        includes every commit that was answered to any client before the call. Raises Unavailable, TimedOut or
        ConnectionLost if there is no answer in time, SessionExpired, or InvalidName for an invalid path."""
        ...

    async def children(self, path: str) -> list[str]:
        """Returns the names of all direct children of a node (segments, not paths), sorted.

        Linearizable, as `get` is: the result includes every commit that was answered to any client before the call. A
        bookie deletes the ledgers that are not listed, so a store that could read an older state (ZooKeeper) syncs
        first. Returns an empty list if there is no node below `path`. Raises the errors of `get`."""
        ...

    async def list_nodes(self, folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        """Returns a page of the names (segments) of the nodes directly below `folder` that sort after the name `after`:
        usually at most `limit`, which must be at least 1. Unlike `children`, leaves out names that have no node of
        their own, only nodes below them.

        Each page is linearizable by itself, as `get` is; two pages may be of different revisions. So of the nodes that
        existed when the first page was asked for, only those that were deleted meanwhile are missing. A store that can
        read a folder only as a whole returns all names that are left at once. Raises the errors of `get`."""
        ...

    async def read_nodes(self, folder: str, names: Collection[str] | None = None) -> dict[str, VersionedValue]:
        """Returns the nodes directly below `folder`, by name, sorted; leaves out names that have no node of their own.
        For folders of some thousand small nodes. `names`: only those; None: all.

        Each node is as `get` returns it; two nodes may be of different revisions. So of the nodes that existed at the
        call, only those that were deleted meanwhile are missing. A store that reads many nodes at once overrides this.
        Raises the errors of `get`."""
        wanted = await self.children(folder) if names is None else sorted(names)
        found = dict[str, VersionedValue]()
        for start in range(0, len(wanted), NODES_READ_AT_ONCE):
            some = wanted[start : start + NODES_READ_AT_ONCE]
            nodes = await asyncio.gather(*[self.get(f"{folder}/{name}") for name in some])
            found |= {name: node for name, node in zip(some, nodes, strict=True) if node is not None}
        return found

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        """Commits all operations or none, in order. Returns the new version of each operation's node (NODE_ABSENT:
        there is no node).

        Raises BadVersion, and changes nothing, if a node does not have the expected version. ConnectionLost, TimedOut
        and OutcomeUnknown mean that it is unknown whether the operations were done; after Unavailable they were not
        done. Raises SessionExpired if the session has ended, Unauthorized if this process may not write one of the
        nodes. Raises InvalidRequest, InvalidName or MessageTooLarge, before anything is sent, if an operation or the
        whole commit breaks a rule (metadata/tree_core.py `check_operations`)."""
        ...

    @property
    def part_operations(self) -> int:
        """Returns how many operations to commit at once when there are many. A store that allows fewer overrides
        this."""
        return OPERATIONS_PER_COMMIT

    async def put(self, path: str, value: bytes, expected: int = ANY_VERSION, *, ephemeral: bool = False) -> int:
        """Writes one node, in a commit of its own; the parameters are those of PutNode. Returns the node's new version.
        Raises the errors of `commit`."""
        return (await self.commit([PutNode(path, value, expected, ephemeral)]))[0]

    async def delete(self, path: str, expected: int = ANY_VERSION) -> None:
        """Deletes one node, in a commit of its own. With ANY_VERSION, does nothing if there is no node. Raises the
        errors of `commit`."""
        await self.commit([DeleteNode(path, expected)])

    async def revision(self) -> int:
        """Returns the revision of the tree: the number of its latest commit. Raises the errors of `get`."""
        ...

    async def measure_disk(self) -> MetadataDisk | None:
        """Returns the size and the free space of the disk with the metadata, and when the service's certificate
        expires, or why the store refuses commits; None if the store knows nothing of that. Raises the errors of `get`;
        a LocalSession raises OSError if the disk cannot be asked."""
        return None

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        """Yields all changes of the node `prefix` and of all nodes below it after the revision `after_revision`, in
        order, until the caller stops. Yields a WatchReset in place of changes that are not known any more. Raises
        SessionExpired when the session ends, and InvalidName for an invalid prefix."""
        ...

    @property
    def session_id(self) -> str:
        """Returns the id of the session, for logs and errors."""
        ...

    async def wait_session_lost(self) -> None:
        """Waits until the session has ended: it was lost or closed."""
        ...

    async def close(self) -> None:
        """Ends the session, and with it deletes its ephemeral nodes. If the service cannot be reached, they are deleted
        when the session expires there. Does nothing if the session has ended already. A LocalSession raises Unavailable
        if the disk is full: its nodes are then deleted later."""
        ...


T = TypeVar("T")
TransformValue = Callable[[VersionedValue | None], bytes | None]
"""A function that gets the current node (None: there is none) and returns its new value; None: no change. If it raises
an error, the update ends. It must recognise a value that an earlier attempt has written."""
UpdateNode = Callable[[MetadataStore, str, TransformValue], Awaitable[VersionedValue | None]]


# ---------------------------------------------------------------------------------------------------- unreadable
# Metadata records that this process cannot read, of a newer version or damaged. One does not stop work on the others.
#
# A caller that reads many records (a listing, a watch, a round over all ledgers) reads each with `get_readable_record`:
# a record that it cannot decode is None, as if it did not exist, and is noted here: logged once, counted, shown
# (`magnetar_unreadable_…`). A caller that depends on one record, and would do wrong without it, uses `get_record`,
# which raises DamagedRecord.
#
# `UNREADABLE_RECORDS` is one for the process: its parts decode records alike. At most UNREADABLE_PATHS_MAX paths are
# kept. Guards: tests/metadata/test_records.py, tests/bookie/maintenance/test_repair.py.


_LOG = logging.getLogger("magnetar.metadata")

R = TypeVar("R", bound=MetadataRecord)

UNREADABLE_PATHS_MAX = 1000
"""The largest number of paths that are kept, at about 300 bytes each."""


class UnreadableRecords:
    """Records which metadata records this process could not read, by path. Logs each path once, and counts every
    attempt (`skipped`). Keeps at most UNREADABLE_PATHS_MAX paths."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}  # path → why
        self.skipped = 0

    def record_unreadable(self, path: str, error: DamagedRecord) -> None:
        """Records that the record at `path` cannot be read, because of `error`. The caller skips it."""
        self.skipped += 1
        if path not in self.paths and len(self.paths) < UNREADABLE_PATHS_MAX:
            _LOG.error("skipped, because it cannot be read here: %s", error)
            self.paths[path] = str(error)

    def remove(self, path: str) -> None:
        """Removes the path, because its record was deleted or can be read again."""
        self.paths.pop(path, None)

    def statistics(self) -> dict[str, int]:
        return {"records": len(self.paths), "skipped": self.skipped}


UNREADABLE_RECORDS = UnreadableRecords()


async def get_readable_record(store: MetadataStore, path: str, cls: type[R]) -> tuple[R, int] | None:
    """Returns (record at `path`, its version). Returns None if there is no record, or if this process cannot decode it.
    A record that cannot be decoded is logged and counted (`UNREADABLE_RECORDS`). Raises the errors of
    `MetadataStore.get`."""
    node = await store.get(path)
    if node is None:
        UNREADABLE_RECORDS.remove(path)
        return None
    record = _decode_readable_record(path, node, cls)
    return None if record is None else (record, node.version)


async def read_readable_records(
    store: MetadataStore, folder: str, cls: type[R], names: Collection[str] | None = None
) -> dict[str, R]:
    """Returns the records directly below `folder`, by name, sorted, without those that this process cannot decode,
    which are logged and counted (`UNREADABLE_RECORDS`). `names`: only those; None: all. Raises the errors of
    `MetadataStore.read_nodes`."""
    nodes = await store.read_nodes(folder, names)
    found = {name: _decode_readable_record(f"{folder}/{name}", node, cls) for name, node in nodes.items()}
    return {name: record for name, record in found.items() if record is not None}


def _decode_readable_record(path: str, node: VersionedValue, cls: type[R]) -> R | None:
    try:
        record = decode_record(node.value, cls, path)
    except DamagedRecord as error:
        UNREADABLE_RECORDS.record_unreadable(path, error)
        return None
    UNREADABLE_RECORDS.remove(path)
    return record


def choose_read_delay(processes: int, rng: random.Random) -> float:
    """Returns the seconds that one of so many `processes`, which all watch a folder, waits before it reads what has
    changed there. Each of them hears of the change at the same moment, and chooses at random. 0 for up to
    READS_SPREAD_ABOVE processes."""
    if processes <= READS_SPREAD_ABOVE:
        return 0.0
    return rng.random() * min(READS_SPREAD_S_MAX, READS_SPREAD_EACH_S * processes)


async def group_changes(
    watch: AsyncIterator[NodeChanged | WatchReset], choose_delay: Callable[[], float] = lambda: 0.0
) -> AsyncGenerator[set[str]]:
    """Yields the paths that `watch` reports: the first at once, and while others come those of a pause together. The
    pause is CHANGES_PAUSE_S, and twice as long after each pause with a change, up to CHANGES_PAUSE_S_MAX. So a watcher
    of a folder in which a thousand processes register asks some times, and not for each of them. Before it yields,
    waits for as many seconds as `choose_delay` returns, and takes what is reported meanwhile, too. Ends at a
    WatchReset. Raises the errors of the watch."""
    found, news = set[str](), asyncio.Event()

    async def collect() -> None:
        async for change in watch:
            if isinstance(change, WatchReset):
                return
            found.add(change.path)
            news.set()

    collecting = asyncio.create_task(collect(), name="metadata-changes")
    collecting.add_done_callback(lambda _: news.set())
    pause_s = CHANGES_PAUSE_S
    try:
        while True:
            await news.wait()
            news.clear()
            if found:
                if (delay_s := choose_delay()) > 0:
                    await asyncio.wait([collecting], timeout=delay_s)
                some, found = found, set()
                yield some
            if collecting.done():
                collecting.result()
                return
            await asyncio.wait([collecting], timeout=pause_s)
            pause_s = min(2 * pause_s, CHANGES_PAUSE_S_MAX) if found else CHANGES_PAUSE_S
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


def ledger_id_of(path: str) -> int | None:
    """Returns the ledger id that is the last segment of a node's path. If that is no ledger id, logs and counts the
    path (`UNREADABLE_RECORDS`) and returns None."""
    try:
        return paths.ledger_id(path.rpartition("/")[2])
    except ValueError as error:
        UNREADABLE_RECORDS.record_unreadable(path, DamagedRecord(f"{path} is no ledger's: {error}"))
        return None


def parse_ledger_ids(folder: str, names: list[str]) -> list[int]:
    """Returns the ledger ids in `names`, the names of the nodes below `folder`. Leaves out names that are no ledger
    ids; they are logged and counted (`UNREADABLE_RECORDS`)."""
    return [ledger for name in names if (ledger := ledger_id_of(f"{folder}/{name}")) is not None]


async def iterate_nodes(
    store: MetadataStore, folder: str, after: str = "", limit: int = NODES_PER_PAGE
) -> AsyncIterator[list[str]]:
    """Yields the names of the nodes directly below `folder` that sort after `after`, sorted, in pages of
    `MetadataStore.list_nodes`. So a folder with a million nodes is never in memory as a whole, unless the store can
    read it only so. Raises the errors of that method; then the names are not complete."""
    more = True
    while more:
        names, more = await store.list_nodes(folder, after, limit)
        if names:
            after = names[-1]
            for start in range(0, len(names), limit):  # of a store that returns all: the caller goes on in parts
                yield names[start : start + limit]
                await asyncio.sleep(0)
        elif more:
            raise InternalError(f"{folder}: the metadata returned an empty page after {after!r} that is not the last")


async def read_ledger_ids(store: MetadataStore, folder: str = paths.LEDGERS) -> BitMap64:
    """Returns the ids of the ledgers that have a node directly below `folder`, read in pages: a million consecutive ids
    take 130 kB. Leaves out names that are no ledger ids; they are logged and counted (`UNREADABLE_RECORDS`). Raises the
    errors of `iterate_nodes`."""
    found = BitMap64()
    async for names in iterate_nodes(store, folder):
        found.update(parse_ledger_ids(folder, names))
    return found


# -------------------------------------------------------------------------------------------------------- update
# Changes nodes safely: read, check, transform, compare-and-set; and the same for typed records.
#
# `update_nodes` is the one loop of every change of records (after BookKeeper's MetadataUpdateLoop); `update_node` is
# its case of one node:
#
#     1. read the nodes, in order
#     2. each `transform(current)`: the new value; None or the same bytes: this node stays; raises: give up
#     3. commit the new values in one commit, each at the version that was read. A node that stays is checked there: it
#        still has the version that was read. When all stay there is no commit: return them
#     4. written: return them
#     5. BadVersion (definite, nothing was written): another process was faster; from 1
#     6. ConnectionLost, TimedOut, … (unknown): all of it may have happened, or nothing; from 1. The attempt leaves no
#        memory: the transforms get the nodes as they are, perhaps with their own write in them, and decide by content.
#
# So a transform must recognise its own earlier write (a token, a state, a set that has the member already), and have no
# effects: it is called at most once per attempt. A change that content cannot recognise (a counter) must be harmless
# when it happens twice: `allocate_ids` then wastes a block of ids, and never allocates an id twice. Attempts and time
# are bounded; the final error is definite only when no attempt was unknown. Guarded by test_update.py.


UPDATE_ATTEMPTS_MAX = 100
UPDATE_DEADLINE_S = 30.0
OPERATIONS_PER_COMMIT = 500
"""The number of operations in one part: half of what a commit may have. Even with the longest names a part stays below
the 1 MiB that ZooKeeper accepts. etcd takes fewer (`MetadataStore.part_operations`)."""
CONFLICT_PAUSE_S_MAX = 0.05
"""The longest pause, in seconds, after a conflict. In a conflict another writer was faster, so the pause begins near
zero, and grows only to spread the writers."""
ERROR_PAUSE_S_MAX = 1.0
NO_SPACE_FIELD = "no_space"
"""The field of an Unavailable with which a store refuses a commit because it is full."""
NO_SPACE_ATTEMPTS_MAX = 10
"""Attempts at a full store: those of 6 seconds, so that the reason reaches a caller before it gives up."""


class NodeUpdate(NamedTuple):
    """A change of the node at `path` for `update_nodes`: `transform` returns the new value. `absent`: the node probably
    does not exist, so the first attempt does not read it. If it exists nevertheless, the second attempt reads it."""

    path: str
    transform: TransformValue
    absent: bool = False


async def update_node(
    store: MetadataStore, path: str, transform: TransformValue, *,
    deadline_s: float = UPDATE_DEADLINE_S, attempts_max: int = UPDATE_ATTEMPTS_MAX,
) -> VersionedValue | None:  # fmt: skip
    """Changes one node by `transform`, as `update_nodes` changes several. Returns the node as it is afterwards (None:
    there is none). Raises the same errors."""
    changes = (NodeUpdate(path, transform),)
    return (await update_nodes(store, changes, deadline_s=deadline_s, attempts_max=attempts_max))[0]


async def update_nodes(
    store: MetadataStore, changes: Sequence[NodeUpdate], *,
    deadline_s: float = UPDATE_DEADLINE_S, attempts_max: int = UPDATE_ATTEMPTS_MAX,
) -> list[VersionedValue | None]:  # fmt: skip
    """Changes several nodes, all or none: reads them, calls the `transform` of each, and commits the new values.
    Repeats that after conflicts and failures, for at most `attempts_max` attempts and `deadline_s` seconds, while the
    store is full for at most NO_SPACE_ATTEMPTS_MAX. Returns the nodes as they are afterwards (None: there is none).

    Raises the errors of a transform, and at once SessionExpired and errors that are the caller's fault. When attempts
    or time run out, raises the last error (BadVersion, Unavailable, TimedOut, ConnectionLost); or OutcomeUnknown if an
    earlier attempt may have been stored."""
    last: MagnetarError | None = None  # what ended the last attempt; None: it is in progress
    unknown = writing = False  # unknown: an attempt that ended may have been written
    try:
        async with asyncio.timeout(deadline_s):
            for attempt in range(attempts_max):
                last, writing = None, False
                try:
                    found: list[VersionedValue | None] = []
                    for each in changes:
                        found.append(await store.get(each.path) if attempt or not each.absent else None)  # noqa: PERF401 - a call less
                    values = _transformed(changes, found)
                    if values is None:
                        return found
                    writing = True
                    versions = await store.commit(_operations(changes, found, values))
                    return [
                        was if value is None else VersionedValue(value, version)
                        for was, value, version in zip(found, values, versions, strict=True)
                    ]
                except MagnetarError as error:
                    last = error
                unknown |= writing and not last.definite
                if not last.retryable or (NO_SPACE_FIELD in last.fields and attempt + 1 >= NO_SPACE_ATTEMPTS_MAX):
                    break
                await asyncio.sleep(_pause_s(attempt, last))
    except _GaveUp as given_up:
        raise given_up.error from None
    except TimeoutError:
        if last is None:
            path = changes[0].path
            last = TimedOut(f"{path}: no answer from the metadata within {deadline_s} s", path=path)
    assert last is not None, "at least one attempt"
    if unknown and last.definite:
        path = changes[0].path
        raise OutcomeUnknown(f"{path}: an earlier attempt may have been written; then: {last}", path=path) from last
    raise last


class _GaveUp(Exception):
    """Carries the error of a transform out of the retries."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _transformed(changes: Sequence[NodeUpdate], found: Sequence[VersionedValue | None]) -> list[bytes | None] | None:
    """Calls the transform of each change. Returns the value to write to each node (None: no change); returns None if no
    node changes."""
    values: list[bytes | None] = []
    stay = True
    try:
        for change, current in zip(changes, found, strict=True):
            value = change.transform(current)
            if current is not None and value == current.value:
                value = None
            values.append(value)
            stay = stay and value is None
    except Exception as error:
        raise _GaveUp(error) from error
    return None if stay else values


def _operations(
    changes: Sequence[NodeUpdate], found: Sequence[VersionedValue | None], values: Sequence[bytes | None]
) -> list[CommitOperation]:
    operations: list[CommitOperation] = []
    for change, current, value in zip(changes, found, values, strict=True):
        version = NODE_ABSENT if current is None else current.version
        operations.append(
            CheckNodeVersion(change.path, version) if value is None else PutNode(change.path, value, version)
        )
    return operations


def _pause_s(attempt: int, error: MagnetarError) -> float:
    if isinstance(error, BadVersion):
        return min(CONFLICT_PAUSE_S_MAX, 0.001 * (2.0**attempt - 1))
    return min(ERROR_PAUSE_S_MAX, 0.05 * 2.0**attempt)


# ------------------------------------------------------------------------------------------ many nodes
async def commit_in_parts(store: MetadataStore, operations: Sequence[CommitOperation]) -> None:
    """Commits the operations in order, in as many commits as necessary, for callers that may have more of them than one
    commit allows (metadata/tree_core.py `OPERATIONS_PER_COMMIT_MAX`). Raises the errors of `MetadataStore.commit`.
    After an error or a crash only the first commits are done."""
    size = store.part_operations
    for at in range(0, len(operations), size):
        await store.commit(operations[at : at + size])


async def create_if_absent(store: MetadataStore, puts: Sequence[PutNode]) -> None:
    """Creates the nodes of `puts`, in several commits if there are many. A node that exists already stays as it is. The
    `expected` of each PutNode must be NODE_ABSENT. Raises the errors of `MetadataStore.commit` except NodeExists; may
    be called again with the same nodes."""
    size = store.part_operations
    for at in range(0, len(puts), size):
        part = puts[at : at + size]
        try:
            await store.commit(part)
        except NodeExists:  # none of them is made
            for each in part:
                with contextlib.suppress(NodeExists):
                    await store.commit([each])


# ------------------------------------------------------------------------------------------ typed records
async def get_record(store: MetadataStore, path: str, cls: type[R]) -> tuple[R, int] | None:
    """Returns (record at `path`, its version); None if there is no record. Raises DamagedRecord if the record cannot be
    decoded, and the errors of `MetadataStore.get`."""
    found = await store.get(path)
    return None if found is None else (decode_record(found.value, cls, path), found.version)


def make_put_operation(path: str, record: MetadataRecord, expected: int = ANY_VERSION) -> PutNode:
    """Returns the operation of a commit that writes `record` at `path` if the node's version is `expected`."""
    return PutNode(path, encode_record(record, path), expected)


async def put_record(store: MetadataStore, path: str, record: MetadataRecord, expected: int = ANY_VERSION) -> int:
    """Writes `record` at `path`, in a commit of its own, if the node's version is `expected` (NODE_ABSENT: if there is
    no node; ANY_VERSION: always). Returns the node's new version. Raises BadVersion if the version is another one, and
    the other errors of `MetadataStore.commit`."""
    return await store.put(path, encode_record(record, path), expected)


async def update_record(
    store: MetadataStore, path: str, cls: type[R], change: Callable[[R | None], R | None]
) -> tuple[R, int] | None:
    """Changes a record, as `update_node` changes a node: `change` gets the current record (None: there is none) and
    returns the new one (None: no change). Returns (record, version) as they are afterwards; None if there is no record.
    Raises the errors of `update_nodes` and of `change`, and DamagedRecord if the record cannot be decoded."""

    def transform(current: VersionedValue | None) -> bytes | None:
        record = change(None if current is None else decode_record(current.value, cls, path))
        return None if record is None else encode_record(record, path)

    found = await update_node(store, path, transform)
    return None if found is None else (decode_record(found.value, cls, path), found.version)


async def allocate_ids(store: MetadataStore, count: int, path: str = paths.LEDGER_IDS) -> range:
    """Allocates `count` consecutive ids (at least 1) that no other caller gets, and returns them. `path`: the path of
    their counter. If the outcome of an attempt is unknown, its ids are wasted: no id is allocated twice. Raises the
    errors of `update_record`.

    Ids begin at 1, so that a 0 on the wire is an unset field."""
    assert count >= 1

    def beyond(counter: CounterRecord | None) -> CounterRecord:
        return CounterRecord(next=(1 if counter is None else counter.next) + count)

    found = await update_record(store, path, CounterRecord, beyond)
    assert found is not None
    return range(found[0].next - count, found[0].next)


async def ensure_id_counter(store: MetadataStore) -> None:
    """Creates the counter of ledger ids if it does not exist. Once it exists, bookies accept a new ledger only if the
    metadata has its record (bookie/service.py). Raises the errors of `update_record`."""
    await update_record(store, paths.LEDGER_IDS, CounterRecord, lambda counter: counter or CounterRecord(next=1))


async def ensure_cluster_record(store: MetadataStore, rng: random.Random) -> ClusterRecord:
    """Returns the cluster's record. Creates it, with a random instance id, if this is the first process of the cluster.
    Raises the errors of `update_record`."""
    instance = rng.randbytes(16).hex()

    def once(cluster: ClusterRecord | None) -> ClusterRecord | None:
        return ClusterRecord(instance=instance, format=CLUSTER_FORMAT) if cluster is None else None

    found = await update_record(store, paths.CLUSTER, ClusterRecord, once)
    assert found is not None
    return found[0]


async def read_cluster_format(store: MetadataStore) -> int:
    """Returns the format of the cluster; if the cluster has no record yet, the format of this Magnetar. Raises the
    errors of `get_record`."""
    found = await get_record(store, paths.CLUSTER, ClusterRecord)
    return CLUSTER_FORMAT if found is None else found[0].format


async def adopt_cluster_format(store: MetadataStore) -> None:
    """Makes this process write in the format of its cluster (metadata/records.py `set_written_format`). Each process
    calls this in each new session, before it writes. Raises NewerFormat if the cluster has a later format than this
    Magnetar knows, and the errors of `read_cluster_format`."""
    set_written_format(await read_cluster_format(store))


async def check_format_after_registration(store: MetadataStore) -> None:
    """Raises NewerFormat if the format of the cluster was raised above that of this Magnetar, and the errors of the
    metadata (DamagedRecord if the cluster's record cannot be decoded). A broker or bookie calls this after it has
    registered, and `finish_upgrade` looks for older processes after it has raised the format: so one of the two sees
    the other."""
    check_cluster_format(await read_cluster_format(store))


async def finish_upgrade(store: MetadataStore, *, dry_run: bool = False) -> tuple[int, int, list[str]]:
    """Raises the format of the cluster to that of this Magnetar, unless a registered broker or bookie is older. Returns
    (format before, format afterwards, names of the older processes). If there are older processes, or with `dry_run`,
    or if the format is as high already, writes nothing. Raises the errors of `get_record` and `update_node`.

    The cluster's record is written in the new format, so that an older bookie cannot start any more. If an older
    process registered at the same moment, the format is raised and the process is named nevertheless: the operator must
    stop it, because it takes records of the new format for damaged. A process of a version without
    `check_format_after_registration` is missed if it registers later, in a session that it opened before."""
    older = await _list_older_processes(store)
    before = await read_cluster_format(store)
    if older or dry_run or before >= CLUSTER_FORMAT:
        return before, before, older

    def raised(current: VersionedValue | None) -> bytes | None:
        if current is None:
            return None
        record = msgspec.structs.replace(
            decode_record(current.value, ClusterRecord, paths.CLUSTER), format=CLUSTER_FORMAT
        )
        return encode_record(record, paths.CLUSTER, cluster_format=CLUSTER_FORMAT)

    await update_node(store, paths.CLUSTER, raised)
    return before, CLUSTER_FORMAT, await _list_older_processes(store)


async def _list_older_processes(store: MetadataStore) -> list[str]:
    """Returns the registered brokers and bookies that do not know the format of this Magnetar, with their versions."""
    unsaid = "of a version that does not say it"
    older: list[str] = []
    for name in await store.children(paths.BROKERS):
        broker = await get_record(store, f"{paths.BROKERS}/{name}", BrokerRecord)
        if broker is not None and broker[0].format < CLUSTER_FORMAT:
            older.append(f"broker {name} ({broker[0].version or unsaid})")
    for name in await store.children(paths.AVAILABLE_BOOKIES):
        bookie = await get_record(store, f"{paths.AVAILABLE_BOOKIES}/{name}", BookieRecord)
        if bookie is not None and bookie[0].format < CLUSTER_FORMAT:
            older.append(f"bookie {name} ({bookie[0].version or unsaid})")
    return older
