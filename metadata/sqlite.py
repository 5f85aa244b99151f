"""The metadata store on one SQLite file (or ':memory:'): in process, and served by metadata/server.py for a cluster.

The store is the driver between callers on the event loop and `MetadataTree` (metadata/tree.py) on one worker thread:

- *Group commit*: jobs that arrive while the worker writes are its next batch: one transaction, one fsync, many answers.
  At most WAITING_JOBS_MAX jobs wait; more get BackPressure. No answer and no watch event precedes the fsync.
- *Reads* use the same worker, so each sees every commit that was acknowledged before it was asked. All reads that wait
  are one call of the worker: a change of threads costs more than a read. Nodes that were read lately are cached
  (tree_core.py `NodeCache`) until a commit changes them. The worker returns its results in its order, so a read is
  cached before the commits that it did not see.
- *A session ends* in this order: its further commits are refused; then a job that deletes its ephemerals is queued
  after all accepted commits, and repeated until the disk has room. So no ephemeral outlives its session.
- *Start*: lock, check of the file (tree.py), deletion of the ephemerals whose sessions ended with the former process.
  Sessions of the metadata service are durable and get their whole timeout again after a restart.
- *Disk*: a failed write or sync ends the process (`Files.end_process`); a full disk is Unavailable and definite.

SQLite does its own file I/O outside the Files seam; simulations use ':memory:'.

Also in this file, below its heading: copies of the file of the tree (backup).
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple, Self, TypeVar

from ..proto.errors import (
    BackPressure,
    Busy,
    InternalError,
    InvalidRequest,
    MagnetarError,
    NotFound,
    SessionExpired,
    Unavailable,
)
from ..runtime.alarm import AlarmTimer
from ..runtime.network import World
from ..runtime.tasks import Worker
from . import paths
from .paths import INCARNATIONS
from .records import BookieRecord, CounterRecord, DamagedRecord, LedgerRecord, decode_record
from .store import (
    NODES_PER_PAGE,
    CheckNodeVersion,
    CommitOperation,
    MetadataDisk,
    MetadataStore,
    NodeChanged,
    NodePage,
    PutNode,
    VersionedValue,
    WatchReset,
    make_put_operation,
    parse_ledger_ids,
)
from .tree import (
    ANSWERED_FILE_SUFFIX,
    EndSession,
    MetadataDiskFailed,
    MetadataTree,
    OpenSession,
    StoredNode,
    TreeJob,
    create_private_file,
    sync_file,
)
from .tree_core import (
    ChangeHistory,
    CommitJob,
    MetadataSessions,
    NodeCache,
    TreeJobResult,
    check_operations,
    check_path,
    check_prefix,
)

IN_MEMORY_PATH = ":memory:"
_CLOSED = "the metadata store is closed"
NODES_PAGE_BYTES = 1 << 20
"""Bytes of values in one read of the nodes of a folder."""
WAITING_JOBS_MAX = 10_000
JOBS_PER_BATCH_MAX = 1_000
"""The largest number of jobs in one transaction of SQLite. This takes about 10 ms, for which reads wait."""
CACHED_READS_PER_TURN = 100
"""The number of reads from the cache after which the event loop gets a turn. With what their callers do, they take half
a millisecond."""
SESSION_END_RETRY_S = 1.0
"""Seconds to wait before the ephemeral nodes of an ended session are deleted again, if the disk had no room for the
deletion."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")

R = TypeVar("R")


class _Watch:
    """A watch that waits for a change at or below its prefix. There was none up to the revision `seen`."""

    __slots__ = ("news", "prefix", "seen")

    def __init__(self, prefix: str, seen: int) -> None:
        self.prefix = prefix
        self.seen = seen
        self.news: asyncio.Future[None]


class SqliteStore:
    """Stores the metadata tree in one SQLite file, for the sessions of many clients. Made by `open`. A user in the same
    process opens a session with `new_session`. After `close` every call raises Unavailable or SessionExpired."""

    def __init__(self, world: World, tree: MetadataTree, worker: Worker, sessions: list[tuple[str, float]]) -> None:
        self._world = world
        self._tree = tree
        self._worker = worker
        self._clock = world.clock
        self._loop = asyncio.get_running_loop()
        self.history = ChangeHistory(tree.revision)
        self._sessions = MetadataSessions()
        self.open_sessions = self._sessions.open_ones  # to look at
        self._lost: dict[str, asyncio.Event] = {}
        self._waiting: list[tuple[TreeJob, asyncio.Future[TreeJobResult]]] = []
        self._writing = False
        self._asked: list[tuple[str | Callable[[], Any], asyncio.Future[Any]]] = []  # reads that wait; str: of a node
        self._reading = False
        self._known: NodeCache[StoredNode] = NodeCache()
        self._known_reads = 0
        self._context = contextvars.copy_context()
        self._watches: dict[_Watch, None] = {}  # that wait
        self._alarm = AlarmTimer(world.clock, self._expire)
        self.closed = False
        self._incarnations = b""
        self.last_backup_ms = 0  # since the epoch: when a copy was made last; 0: none was
        self.backup_every_ms = 0  # how often metadata/backups.py makes a copy; 0: never
        self.backup_failure = ""  # why its last copy failed; "": it did not
        self._commits = 0
        self._batches = 0
        for session, timeout_s in sessions:
            self._add_session(session, timeout_s, self._clock.monotonic())

    @classmethod
    async def open(cls, world: World, path: str) -> Self:
        """Opens the metadata file at `path` (IN_MEMORY_PATH: none, the tree is in memory alone) and returns the store.
        Deletes the ephemeral nodes of local sessions that ended with the former process. Raises Busy, DataLost,
        InvalidConfiguration, Unavailable, MetadataDiskFailed, or OSError if the folder of the file cannot be
        created."""
        if path != IN_MEMORY_PATH:
            world.files.make_directories(str(PurePath(path).parent))
        worker = world.workers.start("metadata")
        try:
            tree = await worker.run(MetadataTree, path, world.rng.randbytes(8).hex())
            store = cls(world, tree, worker, await worker.run(tree.sessions))
            store._incarnations = await worker.run(tree.incarnations)
            store.last_backup_ms = await worker.run(tree.last_backup_ms)
            return store
        except BaseException:
            await worker.close()
            raise

    async def close(self) -> None:
        """Waits for the queued jobs and reads, then closes the file. Ends the sessions of this process; their ephemeral
        nodes are deleted, at the latest when the file is opened again. May be called again."""
        if self.closed:
            return
        self.closed = True
        self._alarm.cancel()
        while self._writing:
            await asyncio.wait([self._batch])
        while self._reading:
            await asyncio.wait([self._answers])
        await self._worker.run(self._tree.close)
        await self._worker.close()
        for lost in self._lost.values():
            lost.set()
        self._wake_watches()

    def statistics(self) -> dict[str, int]:
        return {
            "revision": self.history.revision, "sessions": len(self._sessions), "waiting": len(self._waiting),
            "history": len(self.history), "commits": self._commits, "batches": self._batches,
            "known_nodes": len(self._known), "known_bytes": self._known.bytes,
        }  # fmt: skip

    async def measure_disk(self) -> MetadataDisk | None:
        """Returns the size and the free space of the disk with the metadata file, and what is known of its copies; None
        if the tree is in memory alone, or the store is closed. Raises OSError if the disk cannot be asked."""
        if self._tree.path == IN_MEMORY_PATH or self.closed:
            return None
        folder = str(PurePath(self._tree.path).parent)
        total, free = await self._worker.run(self._world.files.disk_usage, folder)
        return MetadataDisk(
            total, free, backup_ms=self.last_backup_ms, backup_every_ms=self.backup_every_ms,
            backup_failure=self.backup_failure,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------- reading
    async def get(self, path: str) -> StoredNode | None:
        """Returns the node at `path`; None if there is none. The result includes every commit that was answered before
        the call. Raises InvalidName, or Unavailable if the store is closed."""
        if path in self._known.nodes:
            self._known_reads += 1
            if not self._known_reads % CACHED_READS_PER_TURN:
                await asyncio.sleep(0)  # a caller that reads many nodes lets others have their turn
        if path in self._known.nodes and not self.closed:
            return self._known.get(path)
        check_path(path)
        if path == INCARNATIONS:
            return StoredNode(self._incarnations, 0, ephemeral=False)
        node: StoredNode | None = await self._ask(path)
        return node

    async def back_up(self, name: str) -> tuple[str, int, int]:
        """Writes a copy of the metadata beside the metadata file. `name` is the name of the copy; "": its revision
        makes the name. Returns (path of the copy, its revision, its size in bytes). Commits wait meanwhile.

        Raises InvalidRequest if `name` is not a valid name or the tree is in memory alone, AlreadyExists if the file
        exists, Unavailable if the disk is full or the store is closed, or OSError if the copy cannot be created, synced
        or renamed."""
        if self._tree.path == IN_MEMORY_PATH:
            raise InvalidRequest("this metadata is in memory alone")
        name = name or f"metadata-{self.history.revision}.backup"
        if _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{name!r} is not the name of a file (letters, digits, '.', '_' and '-'): the metadata service writes "
                "the copy into its own folder, beside its file"
            )
        path = str(PurePath(self._tree.path).parent / name)
        revision, size = await self._ask(partial(self._tree.back_up, path))
        self.last_backup_ms = self._clock.wall_ms()
        return path, revision, size

    async def write_copy(self, path: str) -> int:
        """Writes a complete copy of the metadata to `path`, which is not synced, and returns its revision. Replaces a
        file there. Commits wait meanwhile, so `path` should be on the disk of the metadata. Raises Unavailable or
        OSError if the copy cannot be written."""
        return await self._ask(partial(self._tree.write_copy, path))

    @property
    def is_backup_failing(self) -> bool | None:
        """Returns whether the last scheduled copy failed; None if no copies are scheduled."""
        return bool(self.backup_failure) if self.backup_every_ms else None

    @property
    def path(self) -> str:
        """Returns the path of the metadata file; IN_MEMORY_PATH if there is none."""
        return self._tree.path

    async def children(self, path: str) -> list[str]:
        """Returns the names of the direct children of a node, sorted, as `MetadataStore.children` does. Raises
        InvalidName, or Unavailable if the store is closed."""
        check_prefix(path)
        return await self._ask(partial(self._tree.children, path))

    async def list_nodes(self, folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        """Returns a page of the names of the nodes directly below `folder`, as `MetadataStore.list_nodes` does. Raises
        InvalidName, or Unavailable if the store is closed."""
        check_prefix(folder)
        assert limit >= 1, "a page has a name"
        names = await self._ask(partial(self._tree.list_nodes, folder, after, limit))
        return NodePage(names, len(names) == limit)

    async def read_nodes(
        self, folder: str, after: str = "", names: Sequence[str] = ()
    ) -> tuple[dict[str, StoredNode], bool]:
        """Returns (the nodes directly below `folder` that sort after `after`, by name, sorted; whether there may be
        more), of about NODES_PAGE_BYTES. With `names`: those of these names, all at once. Raises InvalidName;
        InvalidRequest for more than NODES_PER_PAGE names; or Unavailable if the store is closed."""
        check_prefix(folder)
        if names:
            if len(names) > NODES_PER_PAGE:
                raise InvalidRequest(f"{len(names)} nodes in one request; at most {NODES_PER_PAGE} are read")
            found = await asyncio.gather(*[self.get(f"{folder}/{name}") for name in names])  # one read of the worker
            return {name: node for name, node in zip(names, found, strict=True) if node is not None}, False
        return await self._ask(partial(self._tree.read_nodes, folder, after, NODES_PAGE_BYTES))

    def _ask(self, read: str | Callable[[], R]) -> asyncio.Future[R]:
        """Queues a read and returns a future of its result. A text as `read` means: the node at this path."""
        if self.closed:
            raise Unavailable(_CLOSED)
        future: asyncio.Future[R] = self._loop.create_future()
        self._asked.append((read, future))
        if not self._reading:
            self._read()
        return future

    def _read(self) -> None:
        """Gives the waiting reads to the worker, as one batch."""
        asked, self._asked = self._asked[:JOBS_PER_BATCH_MAX], self._asked[JOBS_PER_BATCH_MAX:]
        self._reading = bool(asked)
        if asked:
            self._answers = self._worker.run(_read_all, self._tree, [read for read, _ in asked])
            self._answers.add_done_callback(
                partial(self._answered, asked),
                context=self._context,  # the store's: the caller may be a process that ends now (simulation)
            )

    def _answered(
        self, asked: list[tuple[str | Callable[[], Any], asyncio.Future[Any]]],
        done: asyncio.Future[list[tuple[Any, Exception | None]]],
    ) -> None:  # fmt: skip
        """Called when a batch of reads is done: answers their callers, and starts the next batch."""
        for (read, future), (answer, error) in zip(asked, done.result(), strict=True):
            if isinstance(error, MetadataDiskFailed):
                error = self._die(error)
            if isinstance(read, str) and error is None:
                self._known.add(read, answer)
            if future.done():  # the caller was cancelled
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)
        self._read()

    def _die(self, error: MetadataDiskFailed) -> InternalError:
        """Ends the process, because the content of the disk is unknown. Returns an error for tests, in which the
        process goes on."""
        self._world.files.end_process(str(error))
        return InternalError(str(error))  # where `end_process` returns (tests), the outcome is unknown

    # -------------------------------------------------------------------------------------------- writing
    async def commit(self, operations: Sequence[CommitOperation], session: str) -> TreeJobResult:
        """Commits all operations or none; they are durable when this returns. `session` owns the ephemeral nodes that
        they write; "": none may be ephemeral. Returns the new versions and the new revision.

        Raises BadVersion, SessionExpired, BackPressure if WAITING_JOBS_MAX jobs wait, Unavailable if the disk is full
        or the store is closed, or an error that is the caller's fault (`check_operations`). A failed write or sync ends
        the process."""
        check_operations(operations)
        if session:
            if session not in self._sessions.open_ones:
                self._sessions.get(session)
        elif any(isinstance(operation, PutNode) and operation.ephemeral for operation in operations):
            raise InvalidRequest("an ephemeral needs a session")
        return await self._queue(CommitJob(tuple(operations), session))

    def _queue(self, job: TreeJob) -> asyncio.Future[TreeJobResult]:
        if self.closed:
            raise Unavailable(_CLOSED)
        if len(self._waiting) >= WAITING_JOBS_MAX and not isinstance(job, EndSession):
            raise BackPressure(f"{len(self._waiting)} metadata commits wait for the disk")
        future: asyncio.Future[TreeJobResult] = self._loop.create_future()
        self._waiting.append((job, future))
        if not self._writing:
            self._write()
        return future

    def _write(self) -> None:
        """Gives the waiting jobs to the worker, as one batch."""
        batch, self._waiting = self._waiting[:JOBS_PER_BATCH_MAX], self._waiting[JOBS_PER_BATCH_MAX:]
        self._writing = bool(batch)
        if batch:
            self._batches += 1
            self._batch = self._worker.run(self._tree.apply, [job for job, _ in batch])
            self._batch.add_done_callback(lambda outcomes: self._written(batch, outcomes), context=self._context)

    def _written(
        self,
        batch: list[tuple[TreeJob, asyncio.Future[TreeJobResult]]],
        outcomes: asyncio.Future[list[TreeJobResult | MagnetarError]],
    ) -> None:
        """Called when a batch of jobs is done: notifies watches, answers the callers, and starts the next batch."""
        error = outcomes.exception()
        if isinstance(error, MetadataDiskFailed):
            error = self._die(error)
        results = [error] * len(batch) if error is not None else outcomes.result()
        revision = self.history.revision
        for (job, _), outcome in zip(batch, results, strict=True):
            if isinstance(outcome, TreeJobResult):
                self._apply_done(job, outcome)
        if self.history.revision > revision:
            self._notify_watches()
        for (_, future), outcome in zip(batch, results, strict=True):
            if future.done():  # the caller was cancelled
                continue
            if isinstance(outcome, TreeJobResult):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        self._write()

    def _apply_done(self, job: TreeJob, done: TreeJobResult) -> None:
        if isinstance(job, CommitJob):
            self._refresh_known(job.operations, done.versions)
        else:
            self._known.on_changes(done.changes)
        if done.revision > self.history.revision:
            self.history.append(done.revision, done.changes)
        if isinstance(job, CommitJob):
            self._commits += 1

    def _refresh_known(self, operations: Sequence[CommitOperation], versions: Sequence[int]) -> None:
        """Updates the cache of nodes after a commit, because a caller that changes a node usually reads it before its
        next change. Also caches created nodes: they are usually read soon."""
        for operation, version in zip(operations, versions, strict=True):
            made = version == 0 and isinstance(operation, PutNode)
            if isinstance(operation, CheckNodeVersion) or not (made or operation.path in self._known.nodes):
                continue
            if isinstance(operation, PutNode):
                self._known.add(operation.path, StoredNode(bytes(operation.value), version, operation.ephemeral))
            else:
                self._known.discard(operation.path)

    # -------------------------------------------------------------------------------------------- watching
    async def wait_change(self, after_revision: int, session: str, prefix: str = "/") -> int:
        """Waits until a node at or below `prefix` has changed after the revision `after_revision`. Returns a revision
        up to which there was no such change; `history` has the changes after it. Returns at once if there is a change
        already, or if `history` needs a WatchReset. Raises SessionExpired if the session or the store ends first."""
        watch = _Watch(prefix, after_revision)
        while not self.history.changes_since(prefix, watch.seen):
            watch.seen = self.history.revision
            self.check_session(session)
            watch.news = self._loop.create_future()
            self._watches[watch] = None
            try:
                await watch.news
            finally:
                del self._watches[watch]
        return watch.seen

    def _notify_watches(self) -> None:
        """Wakes the waiting watches for which something has changed. Most commits concern few of them."""
        for watch in self._watches:
            if not self.history.changes_since(watch.prefix, watch.seen):
                watch.seen = self.history.revision
            elif not watch.news.done():
                watch.news.set_result(None)

    def _wake_watches(self) -> None:
        """Wakes all waiting watches, because a session or the store has ended."""
        for watch in self._watches:
            if not watch.news.done():
                watch.news.set_result(None)

    # -------------------------------------------------------------------------------------------- sessions
    def new_session(self, timeout_s: float = 10.0) -> LocalSession:
        """Opens a session for a user in this process and returns it. The session lasts until its `close`; after
        `LocalSession.abandon`, for `timeout_s` seconds more. Raises Unavailable if the store is closed."""
        if self.closed:
            raise Unavailable(_CLOSED)
        session = f"local-{self._world.rng.randbytes(12).hex()}"
        self._add_session(session, timeout_s, None)
        return LocalSession(self, session)

    async def open_session(self, timeout_s: float) -> str:
        """Opens a durable session, which survives a restart of this process, and returns its id. The session expires
        unless `renew_session` is called at least every `timeout_s` seconds. Raises BackPressure or Unavailable as
        `commit` does."""
        session = self._world.rng.randbytes(16).hex()
        await self._queue(OpenSession(session, timeout_s))
        self._add_session(session, timeout_s, self._clock.monotonic())
        return session

    def renew_session(self, session: str) -> float:
        """Extends the session, because its client has shown that it is alive. Returns the session's timeout in seconds.
        Raises SessionExpired if the session has ended."""
        return self._sessions.renew_session(session, self._clock.monotonic())

    def abandon_session(self, session: str) -> None:
        """Makes the session expire after its timeout, because its user is gone and has not ended it. Does nothing if it
        has ended."""
        self._sessions.abandon(session, self._clock.monotonic())
        self._set_alarm()

    async def end_session(self, session: str) -> None:
        """Ends a session; its ephemeral nodes are deleted when this returns. Does nothing if the session has ended
        already. Raises Unavailable if the disk is full: then the nodes are deleted later, in the background."""
        if self._sessions.close(session) and not self.closed:
            await self._on_session_ended(session)

    async def wait_session_ended(self, session: str) -> None:
        """Waits until the session has ended, for any reason. Returns at once if there is no such session."""
        if session in self._sessions and not self.closed:
            await self._lost[session].wait()

    def has_session(self, session: str) -> bool:
        return session in self._sessions

    def check_session(self, session: str) -> None:
        """Raises SessionExpired if the session has ended, or the store is closed."""
        if session not in self._sessions.open_ones:
            self._sessions.get(session)
        if self.closed:
            raise SessionExpired(_CLOSED, session=session)

    def _add_session(self, session: str, timeout_s: float, now: float | None) -> None:
        self._sessions.open(session, timeout_s, now)
        self._lost[session] = asyncio.Event()
        self._set_alarm()

    def _on_session_ended(self, session: str) -> asyncio.Future[TreeJobResult]:
        """Called when a session has ended: wakes the callers that wait for that, and deletes its ephemeral nodes."""
        self._lost.pop(session).set()
        self._wake_watches()  # the session's own watches find that it has ended
        return self._delete_ephemerals(session)

    def _delete_ephemerals(self, session: str) -> asyncio.Future[TreeJobResult]:
        """Deletes the ephemeral nodes of an ended session, and repeats that until it succeeds: a node that outlived its
        session would name a dead owner for ever."""
        ending = self._queue(EndSession(session))
        ending.add_done_callback(lambda ended: self._delete_again(session, ended))
        return ending

    def _delete_again(self, session: str, ended: asyncio.Future[TreeJobResult]) -> None:
        if ended.cancelled():  # its waiter was cancelled; the job stays in the queue
            return
        if isinstance(ended.exception(), Unavailable) and not self.closed:
            self._loop.call_later(SESSION_END_RETRY_S, self._retry_end, session)

    def _retry_end(self, session: str) -> None:
        if not self.closed:
            self._delete_ephemerals(session)

    def _set_alarm(self) -> None:
        deadline = self._sessions.next_deadline()
        if deadline is not None and not self.closed:
            self._alarm.set_if_earlier(deadline)  # an earlier alarm reads the table again when it rings

    def _expire(self) -> None:
        for session in self._sessions.expire(self._clock.monotonic()):
            self._on_session_ended(session)
        self._set_alarm()


def _read_all(tree: MetadataTree, reads: Sequence[str | Callable[[], Any]]) -> list[tuple[Any, Exception | None]]:
    """Does all reads. Returns for each of them (result, error), one of which is None. Reads all nodes together."""
    paths = [read for read in reads if isinstance(read, str)]
    nodes, failed = _outcome(lambda: tree.get_nodes(paths)) if len(paths) > 1 else ({}, None)
    answers: list[tuple[Any, Exception | None]] = []
    for read in reads:
        if not isinstance(read, str):
            answers.append(_outcome(read))
        elif len(paths) > 1:
            answers.append((None, failed) if failed is not None else (nodes.get(read), None))
        else:
            answers.append(_outcome(partial(tree.get, read)))
    return answers


def _outcome(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return read(), None
    except Exception as error:
        return None, error


class LocalSession(MetadataStore):
    """The session of a user in the same process as the metadata store. Made by `SqliteStore.new_session`."""

    def __init__(self, store: SqliteStore, session: str) -> None:
        self._store = store
        self._session = session

    @property
    def session_id(self) -> str:
        return self._session

    async def get(self, path: str) -> VersionedValue | None:
        store = self._store
        if self._session not in store.open_sessions or store.closed:  # most reads of a process: without a call for it
            store.check_session(self._session)
        node = await store.get(path)
        return None if node is None else VersionedValue(node.value, node.version)

    async def children(self, path: str) -> list[str]:
        self._store.check_session(self._session)
        return await self._store.children(path)

    async def list_nodes(self, folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        self._store.check_session(self._session)
        return await self._store.list_nodes(folder, after, limit)

    async def read_nodes(self, folder: str, names: Collection[str] | None = None) -> dict[str, VersionedValue]:
        if names is not None:
            return await super().read_nodes(folder, names)
        found, after, more = dict[str, VersionedValue](), "", True
        while more:
            self._store.check_session(self._session)
            nodes, more = await self._store.read_nodes(folder, after)
            found |= {name: VersionedValue(node.value, node.version) for name, node in nodes.items()}
            after = next(reversed(nodes), "")
        return found

    async def measure_disk(self) -> MetadataDisk | None:
        self._store.check_session(self._session)
        return await self._store.measure_disk()

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        if self._session not in self._store.open_sessions or self._store.closed:
            self._store.check_session(self._session)
        return (await self._store.commit(operations, self._session)).versions

    async def revision(self) -> int:
        self._store.check_session(self._session)
        return self._store.history.revision

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        check_prefix(prefix)
        return self._watch(prefix, after_revision)

    async def _watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        seen = after_revision
        while True:
            self._store.check_session(self._session)
            news = self._store.history.changes_since(prefix, seen)
            seen = self._store.history.revision
            if isinstance(news, WatchReset):
                yield news
            else:
                for change in news:
                    yield change
            seen = await self._store.wait_change(seen, self._session, prefix)

    async def wait_session_lost(self) -> None:
        await self._store.wait_session_ended(self._session)

    def abandon(self) -> None:
        """Stops using the session without ending it, like a user that crashed: the session expires after its
        timeout."""
        self._store.abandon_session(self._session)

    async def close(self) -> None:
        """Ends the session and deletes its ephemeral nodes. Raises Unavailable if the disk is full: then they are
        deleted later, in the background."""
        await self._store.end_session(self._session)


# --------------------------------------------------------------------------------------------------------------- backup
# Copies of the metadata tree's file: what a copy contains, and how a copy replaces a file that is lost or older.
#
#     read_backup_contents(path)                         what bookies can be asked to compare with the copy
#     restore_backup(backup, target, least_id, token)    the copy replaces the file; the service must be stopped
#
# A restore never overwrites: the replaced file is kept beside the new one, numbered. In the new file, before it is
# renamed:
#  1. the counter of ledger ids begins above `least_id`, the highest id that bookies (or the replaced file) saw, so that
#     no id is allocated twice;
#  2. all sessions and ephemerals are deleted: processes that run register again;
#  3. an incarnation begins that is marked `restored`: bookies accept the tree although it is older than the one they
#     saw, and keep the ledgers that it does not contain (bookie/maintenance/seen.py).
# A crash leaves the old file or the new one, because one rename puts the new file in the place of the old one. The file
# with the answered revision follows last: until then the service refuses to start on an older file, and says that it
# must be restored. A partial file beside it is replaced by the next restore.
# Guarded by tests/cli/storage/test_metadata_copies.py and tests/metadata/test_backup.py.

class BackupContents(NamedTuple):
    """What a backup of the metadata contains, as far as bookies can compare it with their own data. `topics` is empty
    if the backup was not compared with another copy. `ledgers`: the ids of the ledgers that have a record."""

    revision: int
    highest: int  # ledger id that was allocated, 0: none
    ledgers: frozenset[int]
    bookies: tuple[BookieRecord, ...]  # that were registered; one whose record is damaged has no endpoint
    topics: dict[str, int]  # topic → how many of its ledgers are not among the `known` ones


def read_backup_contents(path: str, known: frozenset[int] | None = None) -> BackupContents:
    """Reads the backup at `path` and returns its contents. Neither changes nor locks the file: reads a copy, which it
    makes beside the file and deletes at the end. `known`: the ledgers of another copy, with which the backup is
    compared; None: no comparison. Raises NotFound if there is no file; DataLost, InvalidConfiguration, Busy or
    Unavailable if the copy cannot be opened; DamagedRecord if the record of the next ledger id is damaged;
    MetadataDiskFailed if SQLite cannot read the copy; OSError if the copy cannot be made."""
    if not os.path.exists(path):
        raise NotFound(f"{path}: there is no such file", path=path)
    scratch = f"{path}.looked-at"
    _copy(path, scratch)
    try:
        tree = MetadataTree(scratch, keeps_ephemerals=True)
        try:
            return _contents(tree, known)
        finally:
            tree.close()
    finally:
        remove_store_files(scratch)


def _contents(tree: MetadataTree, known: frozenset[int] | None) -> BackupContents:
    bookies = []
    for name in tree.children(paths.AVAILABLE_BOOKIES):
        node = tree.get(paths.bookie(name))
        try:
            if node is not None:
                bookies.append(decode_record(node.value, BookieRecord, paths.bookie(name)))
        except DamagedRecord:  # it cannot be asked
            bookies.append(BookieRecord(bookie=name, endpoint=""))
    ledgers = frozenset(parse_ledger_ids(paths.LEDGERS, tree.children(paths.LEDGERS)))
    topics = _count_by_topic(tree, ledgers - known) if known is not None else {}
    highest = max(_next_id(tree) - 1, max(ledgers, default=0))
    return BackupContents(tree.revision, highest, ledgers, tuple(bookies), topics)


def _count_by_topic(tree: MetadataTree, ledgers: Iterable[int]) -> dict[str, int]:
    """Returns how many of these ledgers belong to each topic, including those of its subscriptions; "" counts the
    ledgers of no topic."""
    found = Counter[str]()
    for path, node in tree.get_nodes([paths.ledger(each) for each in sorted(ledgers)]).items():
        try:
            found[decode_record(node.value, LedgerRecord, path).properties.get("topic", "")] += 1
        except DamagedRecord:
            found[""] += 1
    return dict(sorted(found.items()))


def _next_id(tree: MetadataTree) -> int:
    node = tree.get(paths.LEDGER_IDS)
    return 1 if node is None else decode_record(node.value, CounterRecord, paths.LEDGER_IDS).next


def restore_backup(backup: str, target: str, least_id: int, token: str) -> str:
    """Replaces the metadata file `target` by a copy of the file `backup`. Makes sure that the ids up to and including
    `least_id` are not allocated again, and begins an incarnation named `token`. Returns the name that the old file has
    now; "" if there was none.

    Raises Busy if the metadata service is running, and the errors of MetadataTree if `backup` cannot be opened, or
    DamagedRecord if its record of the next ledger id is damaged; then the old file is unchanged. Raises OSError if a
    file cannot be copied, synced or renamed; the old file is then still there, perhaps under its new name only."""
    check_service_stopped(target)
    scratch = f"{target}.restoring"
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    _copy(backup, scratch)
    tree = MetadataTree(scratch)
    try:
        if _next_id(tree) <= least_id:
            tree.apply([CommitJob([make_put_operation(paths.LEDGER_IDS, CounterRecord(next=least_id + 1))], "")])
        tree.mark_restored(token)
    finally:
        tree.close()
    sync_file(scratch)
    folder = os.path.dirname(target) or "."
    kept = _keep_old_file(target)
    sync_file(folder)
    os.rename(scratch, target)
    sync_file(folder)
    # last: by it a start refuses a file that is gone, or has lost its end
    if os.path.exists(target + ANSWERED_FILE_SUFFIX):
        if kept:
            os.rename(target + ANSWERED_FILE_SUFFIX, kept + ANSWERED_FILE_SUFFIX)
        else:
            os.remove(target + ANSWERED_FILE_SUFFIX)
        sync_file(folder)
    return kept


def check_service_stopped(target: str) -> None:
    """Raises Busy if a metadata service has the file `target` open. Does nothing if there is no such file, or if SQLite
    cannot read it."""
    if not os.path.exists(target):
        return
    sql = sqlite3.connect(target, isolation_level=None, timeout=0)
    try:
        sql.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        sql.execute("BEGIN IMMEDIATE")
        sql.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        raise Busy(f"{target}: the metadata service has it open; stop it first", path=target) from error
    except sqlite3.DatabaseError:  # damaged: a reason to restore
        return
    finally:
        sql.close()


def _keep_old_file(target: str) -> str:
    """Gives the metadata file a second name, and moves its write-ahead log there, which would be read with the new file
    otherwise. The second name is that which a restore that crashed gave to this file, or a new one. Returns it; "" if
    there is no file."""
    there, number = os.path.exists(target), 1
    while os.path.exists(kept := f"{target}.replaced-{number}") and not (there and os.path.samefile(kept, target)):
        number += 1
    for end in ("-wal", "-shm"):  # only of a file that `check_service_stopped` cannot read, or of one that is gone
        if os.path.exists(target + end):
            os.rename(target + end, kept + end)
    if there and not os.path.exists(kept):
        try:
            os.link(target, kept)
        except OSError:  # a file system without hard links
            _copy(target, f"{kept}.partial")
            sync_file(f"{kept}.partial")
            os.rename(f"{kept}.partial", kept)
    return kept if there else ""


def _copy(source: str, to: str) -> None:
    """Copies the metadata file `source` and its write-ahead log to the path `to`."""
    import shutil  # here: it loads compressors

    remove_store_files(to)
    create_private_file(to)
    shutil.copyfile(source, to)
    if os.path.exists(f"{source}-wal"):
        create_private_file(f"{to}-wal")
        shutil.copyfile(f"{source}-wal", f"{to}-wal")


def remove_store_files(path: str) -> None:
    """Deletes the metadata file at `path` and the files that belong to it (the write-ahead log and the file with the
    answered revision), if they exist. Raises OSError."""
    for end in ("", "-wal", "-shm", ANSWERED_FILE_SUFFIX):
        if os.path.exists(path + end):
            os.remove(path + end)
