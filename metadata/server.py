"""The metadata service (`magnetar metadata`): one SqliteStore for a whole cluster, served over gRPC.

A client has one Session stream. Everything that arrives on it is a sign of life; a session without one for its timeout
expires, with its ephemerals. The stream may break and be opened again with the session's id: sessions outlive
connections, and restarts of this process. A second stream with the same id replaces the first.
Watches belong to the stream and read the store's history: the client names the last revision that it has seen, and
misses no change, or receives `reset`. Each pong also sends every watch its revision, so that a watch without changes
does not lag the history.
A commit names its session; once the session has ended its commits are refused (SessionExpired). The service does not
remember commits: a client whose answer was lost reads again (metadata/store.py).

Also in this file, below its heading: the part of a metadata service that may take memory, and how much of
`memory_bytes` it gets (memory_core).
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from ..proto import wire_pb2 as wire
from ..proto.errors import (
    BackPressure,
    ConnectionLost,
    InvalidRequest,
    SessionExpired,
    Unauthorized,
    Unavailable,
    to_wire,
)
from ..runtime.access import ListenerAccess, Principal, PrincipalKind
from ..runtime.budget import CallerMemory
from ..runtime.config import MIB, MemoryShare
from ..runtime.network import CallContext, EndOfStream, Endpoint, RunningServer, Stream, World
from ..runtime.peer.server import is_local
from ..runtime.tcp.listening import PROCESS_CERTIFICATES
from . import paths
from .remote import encode_watch_events, parse_operations
from .sqlite import SqliteStore
from .store import NODES_PER_PAGE, CheckNodeVersion, CommitOperation, MetadataDisk, PutNode
from .tree_core import check_prefix, is_at_or_below, may_role_write

SESSION_TIMEOUT_S_MIN, SESSION_TIMEOUT_S_MAX = 0.1, 600.0
WATCHES_PER_SESSION_MAX = 1024
"""The largest number of watches of one session."""
SESSIONS_OF_ADDRESS_MAX = 1024
"""The largest number of sessions from one address; more get BackPressure. A process has one or two. Sessions are rows
of the metadata file, and last for minutes."""
WATCHES_OF_ADDRESS_MAX = 4096
"""The largest number of watches from one address. Each is checked after every commit, which takes about a
microsecond."""
SESSION_OPEN_TIMEOUT_S = 10.0
"""A stream on which the client has not sent `open` within this many seconds is ended."""

SessionStream = Stream[wire.SessionReply, wire.SessionRequest]


class MetadataServer:
    """A running metadata service: the store of a metadata file, and the listener at which clients connect."""

    def __init__(self, store: SqliteStore, serving: RunningServer, memory: CallerMemory) -> None:
        self._store = store
        self._serving = serving
        self.memory = memory

    @classmethod
    async def start(
        cls, world: World, endpoint: Endpoint, path: str, memory_bytes: int = sys.maxsize,
        service: type[MetadataService] | None = None,
    ) -> MetadataServer:  # fmt: skip
        """Starts a metadata service at `endpoint` and returns it. `path` is the SQLite file. `memory_bytes` bounds the
        memory that clients may use (`CallerMemory`). `service`: the class that handles the requests; None:
        MetadataService. Raises Busy if the port or the file is in use, and the other errors of `SqliteStore.open`."""
        store = await SqliteStore.open(world, path)
        try:
            memory = CallerMemory(memory_bytes)
            access = ListenerAccess(memory=memory)
            serving = await world.network.serve(endpoint, [("Metadata", (service or MetadataService)(store))], access)
        except BaseException:
            await store.close()
            raise
        return cls(store, serving, memory)

    @property
    def endpoint(self) -> Endpoint:
        """Returns the address at which clients connect, with the port that is really used."""
        return self._serving.endpoint

    @property
    def store(self) -> SqliteStore:
        """Returns the store, in which this process can open sessions of its own."""
        return self._store

    def statistics(self) -> dict[str, int]:
        return self._store.statistics()

    @property
    def last_backup_ms(self) -> int:
        """Returns when the last backup was made, in ms since the epoch; 0 if there was none."""
        return self._store.last_backup_ms

    @property
    def is_backup_failing(self) -> bool | None:
        """Returns whether the last scheduled copy failed; None if no copies are scheduled."""
        return self._store.is_backup_failing

    async def measure_disk(self) -> MetadataDisk | None:
        """Returns the size and the free space of the disk with the metadata file, as `SqliteStore.measure_disk` does;
        None if the tree is in memory alone, or the store is closed. Raises the errors of that method."""
        return await self._store.measure_disk()

    async def close(self) -> None:
        """Ends the connections of clients, then closes the store. The sessions of clients do not end: they continue
        after the next start."""
        await self._serving.close()
        await self._store.close()


class MetadataService:
    """Answers the requests of the gRPC service `Metadata` of proto/wire.proto. Each public method is the request of its
    name. The errors of SqliteStore are answered to the client."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._attached: dict[str, _Attachment] = {}
        self._addresses: dict[str, str] = {}  # session → address that opened it
        self._opening: Counter[str] = Counter()  # by address
        self._watching: Counter[str] = Counter()  # by address

    async def get(self, request: wire.GetRequest, context: CallContext) -> wire.GetReply:
        node = await self._store.get(request.path)
        revision = self._store.history.revision
        if node is None:
            return wire.GetReply(exists=False, revision=revision)
        return wire.GetReply(
            exists=True, value=node.value, version=node.version, ephemeral=node.ephemeral, revision=revision
        )

    async def children(self, request: wire.GetRequest, context: CallContext) -> wire.Names:
        """Returns the names of all children of a node; with a `limit` in the request a page of the nodes among them,
        with `values` a page of these nodes, or those of the names that it asks for."""
        if request.values:
            found, more = await self._store.read_nodes(request.path, request.after, tuple(request.nodes))
            nodes = [wire.GetReply(exists=True, value=node.value, version=node.version) for node in found.values()]
            return wire.Names(names=found, nodes=nodes, more=more)
        if not request.limit:
            return wire.Names(names=await self._store.children(request.path))
        page = await self._store.list_nodes(request.path, request.after, min(request.limit, NODES_PER_PAGE))
        return wire.Names(names=page.names, more=page.more)

    async def commit(self, request: wire.CommitRequest, context: CallContext) -> wire.CommitReply:
        """Commits the operations under the session that the request names. Returns the new versions and the new
        revision. Raises InvalidRequest if an operation is invalid; Unauthorized if the caller's role may not write one
        of the nodes (`may_role_write`); and the errors of `SqliteStore.commit`."""
        operations = parse_operations(request)
        _check_rights(context.principal, operations)
        done = await self._store.commit(operations, request.session)
        return wire.CommitReply(versions=done.versions, revision=done.revision)

    async def backup(self, request: wire.BackupRequest, context: CallContext) -> wire.BackupReply:
        """Writes a copy of the metadata into the service's own folder, under the name in the request. Replies with its
        path, revision and size in bytes. Raises Unauthorized if the caller is on another machine, and the errors of
        `SqliteStore.back_up`."""
        if not is_local(context.peer.rpartition(":")[0].strip("[]")):
            raise Unauthorized("a backup is made for the metadata service's own machine only: run the command there")
        path, revision, size = await self._store.back_up(request.name)
        return wire.BackupReply(path=path, revision=revision, bytes=size)

    async def disk(self, request: wire.Empty, context: CallContext) -> wire.MetadataDisk:
        """Returns the size and the free space of the metadata's disk (0: the tree is in memory alone), when the
        service's first certificate expires, in ms since the epoch (0: it has none), and when it made its last copy of
        the metadata. Raises OSError if the disk cannot be asked."""
        found = await self._store.measure_disk() or MetadataDisk(0, 0)
        ends_ms = PROCESS_CERTIFICATES.find_first_end_ms()
        return wire.MetadataDisk(
            total_bytes=found.total_bytes, free_bytes=found.free_bytes, certificate_ends_ms=ends_ms,
            backup_ms=found.backup_ms, backup_every_ms=found.backup_every_ms, backup_failure=found.backup_failure,
        )  # fmt: skip

    async def session(self, stream: SessionStream, context: CallContext) -> None:
        """Serves the stream of one session: opens or resumes the session, renews it with each request, and sends the
        changes of its watches. Returns when the stream ends. The end of the stream does not end the session, unless the
        client has sent `close`. Raises InvalidRequest if the stream does not begin with `open` within
        SESSION_OPEN_TIMEOUT_S seconds, if the timeout in it is out of bounds, or if a later request is invalid;
        BackPressure if the address has as many sessions or watches as it may have; Unavailable if the disk is full. If
        the session to resume has ended, sends `closed` and returns."""
        address = context.peer.rpartition(":")[0] or context.peer.partition("#")[0]
        try:
            async with asyncio.timeout(SESSION_OPEN_TIMEOUT_S):
                first, *others = await stream.receive()
        except (EndOfStream, ConnectionLost):
            return
        except TimeoutError:
            raise InvalidRequest(f"a session stream begins with `open`, within {SESSION_OPEN_TIMEOUT_S:g} s") from None
        try:
            session, timeout_s = await self._open(first, address)
        except SessionExpired as error:
            stream.send_nowait(wire.SessionReply(closed=to_wire(error)))
            return
        attachment = _Attachment(self._store, session, stream, address, self._watching)
        if session in self._attached:
            self._attached[session].finish()
        self._attached[session] = attachment
        opened = wire.SessionOpened(session=session, timeout_s=timeout_s, revision=self._store.history.revision)
        stream.send_nowait(wire.SessionReply(opened=opened))
        try:
            await attachment.run(others)
        finally:
            if self._attached.get(session) is attachment:
                del self._attached[session]

    async def _open(self, first: wire.SessionRequest, address: str) -> tuple[str, float]:
        if first.WhichOneof("kind") != "open":
            raise InvalidRequest("a session stream begins with `open`")
        session, timeout_s = first.open.session, first.open.timeout_s
        if session:
            return session, self._store.renew_session(session)
        if not SESSION_TIMEOUT_S_MIN <= timeout_s <= SESSION_TIMEOUT_S_MAX:
            raise InvalidRequest(
                f"session timeout {timeout_s} s; {SESSION_TIMEOUT_S_MIN} to {SESSION_TIMEOUT_S_MAX} are allowed"
            )
        self._check_room(address)
        self._opening[address] += 1
        try:
            session = await self._store.open_session(timeout_s)
        finally:
            self._opening[address] -= 1
        self._addresses[session] = address
        return session, timeout_s

    def _check_room(self, address: str) -> None:
        """Raises BackPressure if the address has as many sessions as it may have."""
        if self._count(address) >= SESSIONS_OF_ADDRESS_MAX:
            self._addresses = {each: at for each, at in self._addresses.items() if self._store.has_session(each)}
        if self._count(address) >= SESSIONS_OF_ADDRESS_MAX:
            raise BackPressure(f"{address} has {SESSIONS_OF_ADDRESS_MAX} metadata sessions; close some")

    def _count(self, address: str) -> int:
        opened = len(self._addresses)
        if opened >= SESSIONS_OF_ADDRESS_MAX:
            opened = sum(at == address for at in self._addresses.values())
        return opened + self._opening[address]


def _check_rights(principal: Principal, operations: Sequence[CommitOperation]) -> None:
    """Raises Unauthorized if the caller is a member whose role may not write one of the nodes. If the service uses no
    certificates, checks nothing."""
    if principal.kind is PrincipalKind.LOCAL:
        return
    role = principal.name.partition("/")[0] if principal.kind is PrincipalKind.MEMBER else ""
    for each in operations:
        lasting = isinstance(each, PutNode) and not each.ephemeral
        if not isinstance(each, CheckNodeVersion) and not may_role_write(role, each.path, lasting=lasting):
            raise Unauthorized(f"{principal} may not write {each.path}", path=each.path)


class _Attachment:
    """The server's end of a session's stream: reads the client's requests, and has a task for each watch. The stream
    ends when one of its tasks fails."""

    def __init__(
        self, store: SqliteStore, session: str, stream: SessionStream, address: str, watching: Counter[str]
    ) -> None:
        self._address = address
        self._watching = watching  # by address, of the whole service
        self._store = store
        self._session = session
        self._stream = stream
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._seen: dict[int, int] = {}  # watch id → revision

    async def run(self, requests: list[wire.SessionRequest]) -> None:
        self._start(self._read(requests))
        self._start(self._tell_end())
        try:
            await self._over
        finally:
            tasks = [*self._tasks, *self._watches.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self, error: BaseException | None = None) -> None:
        if self._over.done():
            return
        if error is None or isinstance(error, EndOfStream | ConnectionLost):
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(lambda task: None if task.cancelled() else self.finish(task.exception()))

    async def _read(self, requests: list[wire.SessionRequest]) -> None:
        while True:
            for request in requests:
                if request.HasField("close"):
                    await self._store.end_session(self._session)
                    return
                self._store.renew_session(self._session)
                self._handle(request)
            requests = list(await self._stream.receive())

    async def _tell_end(self) -> None:
        await self._store.wait_session_ended(self._session)
        if not self._store.closed:
            error = SessionExpired(f"metadata session {self._session} has ended", session=self._session)
            self._stream.send_nowait(wire.SessionReply(closed=to_wire(error)))

    def _handle(self, request: wire.SessionRequest) -> None:
        match request.WhichOneof("kind"):
            case "watch":
                self._watch(request.watch)
            case "unwatch":
                self._unwatch(request.unwatch)
            case "ping":
                self._pong(request.ping)
            case kind:
                raise InvalidRequest(f"{kind!r} cannot be asked of an open session")

    def _watch(self, request: wire.WatchRequest) -> None:
        check_prefix(request.prefix)
        if request.watch_id in self._watches or len(self._watches) >= WATCHES_PER_SESSION_MAX:
            raise InvalidRequest(
                f"watch id {request.watch_id} is taken, or more than {WATCHES_PER_SESSION_MAX} watches"
            )
        if self._watching[self._address] >= WATCHES_OF_ADDRESS_MAX:
            raise BackPressure(f"{self._address} has {WATCHES_OF_ADDRESS_MAX} watches; end some")
        self._watching[self._address] += 1
        follow = self._follow(request.watch_id, request.prefix, request.after_revision)
        task = asyncio.get_running_loop().create_task(follow)
        self._watches[request.watch_id] = task
        task.add_done_callback(self._watch_ended)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        self._watching[self._address] -= 1
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SessionExpired):  # `_tell_end` reports that
            self.finish(error)

    def _unwatch(self, watch_id: int) -> None:
        task = self._watches.pop(watch_id, None)
        self._seen.pop(watch_id, None)
        if task is not None:
            task.cancel()

    async def _follow(self, watch_id: int, prefix: str, after_revision: int) -> None:
        """Sends the changes for one watch until the task is cancelled. Reading the history and queueing the reply are
        one step, so `_seen` never exceeds what was sent."""
        history = self._store.history
        seen = after_revision
        while True:  # also without news of its own: `_seen` tells the client from where on it may go on elsewhere
            await self._stream.wait_drained()
            news = history.changes_since(prefix, seen)
            self._seen[watch_id] = seen = history.revision
            if news:
                self._stream.send_nowait(encode_watch_events(watch_id, news, seen))
            await self._store.wait_change(seen, self._session)

    def _pong(self, number: int) -> None:
        for watch_id, seen in self._seen.items():
            self._stream.send_nowait(encode_watch_events(watch_id, (), seen))
        self._stream.send_nowait(wire.SessionReply(pong=number))


class MembersOnlyService(MetadataService):
    """The metadata service during a restore (cli/storage/metadata_copies.py): it serves `/members` only.

    A bookie admits an operator's command by the command's key in `/members`. While the metadata is restored, its
    service is stopped. So the command that restores serves a scratch copy at the service's address, until the bookies
    have answered. For the processes of the cluster this service differs from a stopped one in one point: each can write
    its key.

    | request | answer |
    |---|---|
    | read, list or write at `/members` | as usual: a writer has a member's certificate, and writes keys of its role |
    | read `/cluster` | as it is in the copy. A client reads it to learn the tree's revision |
    | any other read or write, a backup | Unavailable, as without a service: the client tries again |
    | a new session | opened; it ends with the command |
    | a session of the stopped service | Unavailable: this service does not know whether the session goes on |
    | a watch | gets the changes of the scratch copy: keys of members |

    So nothing is registered, owned, created or deleted through this service, and no bookie compares the scratch copy
    with the metadata that it has seen. The scratch copy is deleted when the command ends. Guarded by
    tests/metadata/test_members_only.py, tests/security/test_secured_restore.py."""

    async def get(self, request: wire.GetRequest, context: CallContext) -> wire.GetReply:
        _check(request.path, paths.CLUSTER)
        return await super().get(request, context)

    async def children(self, request: wire.GetRequest, context: CallContext) -> wire.Names:
        _check(request.path)
        return await super().children(request, context)

    async def commit(self, request: wire.CommitRequest, context: CallContext) -> wire.CommitReply:
        for each in parse_operations(request):
            _check(each.path)
        return await super().commit(request, context)

    async def backup(self, request: wire.BackupRequest, context: CallContext) -> wire.BackupReply:
        raise _away("a backup")

    async def _open(self, first: wire.SessionRequest, address: str) -> tuple[str, float]:
        session = first.open.session
        if session and not self._store.has_session(session):
            raise _away(f"session {session}")
        return await super()._open(first, address)


def _check(path: str, *others: str) -> None:
    if not is_at_or_below(paths.MEMBERS, path) and path not in others:
        raise _away(path)


def _away(what: str) -> Unavailable:
    """Returns the error for a request that this service does not answer during a restore."""
    return Unavailable(f"{what}: the metadata is being restored, and only its members are known meanwhile")


# --------------------------------------------------------------------------------------------------- memory_core
# The part of a metadata service that may take memory, and how much of `memory_bytes` it gets
# (runtime/config.py).


METADATA_MEMORY_SHARES = (
    MemoryShare("metadata-clients", "metadata.client_memory_bytes", 1, 16, 8 * MIB, 256 * MIB,
          "what arrives, requests of brokers and bookies that are not handled, and answers that have not left"),
)  # fmt: skip
