"""A `MetadataStore` at the other end of a connection: the client of metadata/server.py.

The states of its session are those of metadata/session.py; watches resume where they were.

*The client gives up first* (metadata/session.py): only an answered ping, or an answered opening, is a sign of life.
After two pings without an answer the client ends the connection, whatever else arrives over it; a third of the timeout
is left for another connection. Fencing protects data in any case.
Reads are repeated until their deadline. A commit is sent once. Before that it waits for a connection (without one it
fails with Unavailable: definitely not done); afterwards its error is raised unchanged: BadVersion is definite,
ConnectionLost and TimedOut are unknown. A server that answers Unavailable has not done it, and is asked again.
A watch keeps at most QUEUED_WATCH_EVENTS_MAX changes that its reader has not taken; more become one WatchReset.

Also in this file, each below its heading: the tree's values as messages of proto/wire.proto, for both ends of the
metadata service (messages); the opening of a session, with a metadata service of any kind (connect).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, NoReturn

from ..proto import wire_pb2 as wire
from ..proto.errors import (
    ConnectionLost,
    CredentialsExpired,
    InternalError,
    InvalidConfiguration,
    InvalidRequest,
    MagnetarError,
    SessionExpired,
    TimedOut,
    Unavailable,
    from_wire,
    is_unknown_operation,
)
from ..runtime.network import EndOfStream, Endpoint, Rpc, Stream, World, find_rpc
from .session import (
    CLOSE_TIMEOUT_S,
    QUEUED_WATCH_EVENTS_MAX,
    RECONNECT_PAUSE_S_MAX,
    RECONNECT_PAUSE_S_MIN,
    SHORTEST_PAUSE_S,
    EtcdAddress,
    MetadataAddress,
    SessionState,
    SessionStore,
)
from .store import (
    NODE_ABSENT,
    NODES_PER_PAGE,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    MetadataDisk,
    MetadataStore,
    NodeChanged,
    NodePage,
    PutNode,
    VersionedValue,
    WatchReset,
)
from .tree_core import check_operations, check_path, check_prefix

# ------------------------------------------------------------------------------------------------------ messages
# The tree's values as messages of proto/wire.proto, for both ends of the metadata service.


GET_RPC = find_rpc("Metadata", "Get")
CHILDREN_RPC = find_rpc("Metadata", "Children")
COMMIT_RPC = find_rpc("Metadata", "Commit")
SESSION_RPC = find_rpc("Metadata", "Session")
BACKUP_RPC = find_rpc("Metadata", "Backup")
DISK_RPC = find_rpc("Metadata", "Disk")


def make_commit_request(operations: Sequence[CommitOperation], session: str) -> wire.CommitRequest:
    return wire.CommitRequest(operations=[_to_wire(operation) for operation in operations], session=session)


def _to_wire(operation: CommitOperation) -> wire.Operation:
    match operation:
        case PutNode(path, value, expected, ephemeral):
            return wire.Operation(
                kind=wire.Operation.PUT, path=path, value=value, expected=expected, ephemeral=ephemeral
            )
        case DeleteNode(path, expected):
            return wire.Operation(kind=wire.Operation.DELETE, path=path, expected=expected)
        case CheckNodeVersion(path, expected):
            return wire.Operation(kind=wire.Operation.CHECK, path=path, expected=expected)


def parse_operations(request: wire.CommitRequest) -> list[CommitOperation]:
    """Returns the operations of a commit request. Raises InvalidRequest if this version does not know the kind of an
    operation."""
    return [_from_wire(operation) for operation in request.operations]


def _from_wire(operation: wire.Operation) -> CommitOperation:
    if operation.kind == wire.Operation.PUT:
        return PutNode(operation.path, operation.value, operation.expected, operation.ephemeral)
    if operation.kind == wire.Operation.DELETE:
        return DeleteNode(operation.path, operation.expected)
    if operation.kind == wire.Operation.CHECK:
        return CheckNodeVersion(operation.path, operation.expected)
    raise InvalidRequest(f"{operation.path}: operation of unknown kind {operation.kind}")


def encode_watch_events(watch_id: int, news: Sequence[NodeChanged] | WatchReset, revision: int) -> wire.SessionReply:
    """Returns the reply that tells a client the changes `news` for its watch with the id `watch_id`, up to and
    including `revision`. By the reply the client knows that the watch has received all changes up to and including
    `revision`."""
    if isinstance(news, WatchReset):
        events = wire.WatchEvents(watch_id=watch_id, revision=revision, reset=True)
    else:
        events = wire.WatchEvents(watch_id=watch_id, revision=revision, events=[_event(change) for change in news])
    return wire.SessionReply(events=events)


def _event(change: NodeChanged) -> wire.TreeEvent:
    kind = wire.TreeEvent.DELETE if change.version == NODE_ABSENT else wire.TreeEvent.PUT
    return wire.TreeEvent(kind=kind, path=change.path, version=change.version, revision=change.revision)


def parse_watch_events(message: wire.WatchEvents) -> list[NodeChanged | WatchReset]:
    """Returns the changes in a message of a watch; a single WatchReset if the watch has missed changes."""
    if message.reset:
        return [WatchReset(message.revision)]
    return [NodeChanged(event.path, event.version, event.revision) for event in message.events]


# -------------------------------------------------------------------------------------------------------- remote


async def connect_metadata(world: World, endpoint: Endpoint, timeout_s: float = 10.0) -> RemoteStore:
    """Connects to the metadata service at `endpoint` and returns a store with an open session, whose timeout is
    `timeout_s` seconds. Tries for `timeout_s` seconds, then raises Unavailable. Raises errors at once if retrying
    cannot help, such as WrongProtocol."""
    return await RemoteStore(world, endpoint, timeout_s).start_or_close()


class _Watch:
    """The changes that a watch has received and its reader has not taken yet."""

    def __init__(self, prefix: str, revision: int) -> None:
        self.prefix = prefix
        self.revision = revision  # received up to here
        self.queue: deque[NodeChanged | WatchReset] = deque()
        self.news = asyncio.Event()

    def on_events(self, events: wire.WatchEvents) -> None:
        self.revision = events.revision
        self.queue.extend(parse_watch_events(events))
        if len(self.queue) > QUEUED_WATCH_EVENTS_MAX:
            self.queue.clear()
            self.queue.append(WatchReset(self.revision))
        if self.queue:
            self.news.set()


class RemoteStore(SessionStore):
    """A client's session with a metadata service, over gRPC. Made by `connect_metadata`."""

    def __init__(self, world: World, endpoint: Endpoint, timeout_s: float) -> None:
        self._world = world
        super().__init__(f"the metadata service at {endpoint}", world.clock)
        self._timeout_s = timeout_s
        self._endpoint = endpoint
        self._channel = world.network.connect(endpoint)
        self._session = ""
        self._stream: Stream[wire.SessionRequest, wire.SessionReply] | None = None
        self._give_up = self._clock.monotonic() + timeout_s  # without a session
        self._answered = 0.0  # when a ping was answered last
        self._pings: deque[tuple[int, float]] = deque(maxlen=64)  # (number, when sent)
        self._ping_number = 0
        self._watches: dict[int, _Watch] = {}
        self._watch_number = 0
        self._failure: MagnetarError | None = None

    # -------------------------------------------------------------------------------------------- the session
    async def start(self) -> None:
        """Opens the session, and begins to keep it alive in the background. Raises Unavailable if that does not succeed
        within the session's timeout, or at once the error that makes retrying useless."""
        self._start_keeper()
        await self._settled.wait()
        if self._state is SessionState.LOST:
            raise self._failure or self._why

    async def _keep(self) -> None:
        """Keeps a stream to the service open, one after the other, until the session is lost or closed."""
        pause_s = RECONNECT_PAUSE_S_MIN
        while True:
            failure = await self._attend()
            if self._state is SessionState.CONNECTED:
                self._state = SessionState.CONNECTING
                self._settled.clear()
                pause_s = RECONNECT_PAUSE_S_MIN
            left_s = self._left_s(self._deadline if self._session else self._give_up)
            if self._is_final(failure) or left_s <= 0:
                self._end_session(failure)
                return
            # the connection loses what is sent, or its certificate has expired: not that one again
            if isinstance(failure, TimedOut | CredentialsExpired):
                await self._channel.close()
                self._channel = self._world.network.connect(self._endpoint)
            await asyncio.sleep(max(SHORTEST_PAUSE_S, min(left_s, pause_s * self._world.rng.uniform(0.5, 1.0))))
            pause_s = min(RECONNECT_PAUSE_S_MAX, 2 * pause_s)

    def _is_final(self, failure: MagnetarError) -> bool:
        return self._closing or isinstance(failure, SessionExpired) or (not self._session and not failure.retryable)

    async def _attend(self) -> MagnetarError:
        """Opens a stream and reads it until it ends. Returns the error that ended it."""
        stream: Stream[wire.SessionRequest, wire.SessionReply] | None = None
        pinging: asyncio.Task[None] | None = None
        try:
            stream = self._channel.stream(SESSION_RPC)
            await self._open(stream)
            pinging = asyncio.get_running_loop().create_task(self._ping(stream), name="metadata-ping")
            return await self._read(stream)
        except MagnetarError as error:
            return error
        except EndOfStream:
            return ConnectionLost(f"{self._endpoint} ended the metadata session's stream")
        except TimeoutError:
            return TimedOut(f"{self._endpoint}: no sign of life from the metadata service")
        finally:
            self._stream = None
            if stream is not None:
                stream.cancel()
            if pinging is not None:
                pinging.cancel()
                await asyncio.gather(pinging, return_exceptions=True)

    async def _open(self, stream: Stream[wire.SessionRequest, wire.SessionReply]) -> None:
        sent = self._clock.monotonic()
        request = wire.OpenSession(session=self._session, timeout_s=self._timeout_s)
        stream.send_nowait(wire.SessionRequest(open=request))
        end = self._deadline if self._session else self._give_up
        async with asyncio.timeout(min(self._left_s(end), self._timeout_s / 3)):
            first, *others = await stream.receive()
        if first.HasField("closed"):
            raise from_wire(first.closed)
        if not first.HasField("opened"):
            raise InternalError(f"{self._endpoint} answered `open` with {first.WhichOneof('kind')}")
        self._session = first.opened.session
        self._timeout_s = first.opened.timeout_s
        self._answered = self._clock.monotonic()
        self._extend_deadline(sent)
        self._pings.clear()
        self._stream = stream
        for watch_id, watch in self._watches.items():
            self._send(_watch_request(watch_id, watch))
        self._state = SessionState.CONNECTED
        self._settled.set()
        self._on_replies(others)

    async def _ping(self, stream: Stream[wire.SessionRequest, wire.SessionReply]) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / 3)
            self._ping_number += 1
            self._pings.append((self._ping_number, self._clock.monotonic()))
            await stream.send(wire.SessionRequest(ping=self._ping_number))

    async def _read(self, stream: Stream[wire.SessionRequest, wire.SessionReply]) -> NoReturn:
        """Reads replies from the stream. Raises TimeoutError if two pings in a row get no answer: then this connection
        is dead, at least in one direction."""
        while True:
            async with asyncio.timeout(self._left_s(self._answered + self._timeout_s * 2 / 3)):
                self._on_replies(await stream.receive())
            if self._left_s(self._answered + self._timeout_s * 2 / 3) <= 0:  # other replies arrived all the time
                raise TimeoutError

    def _on_replies(self, replies: Sequence[wire.SessionReply]) -> None:
        for reply in replies:
            match reply.WhichOneof("kind"):
                case "events":
                    if (watch := self._watches.get(reply.events.watch_id)) is not None:
                        watch.on_events(reply.events)
                case "pong":
                    self._ponged(reply.pong)
                case "closed":
                    raise from_wire(reply.closed)
                case kind:
                    raise InternalError(f"{self._endpoint} sent {kind} in an open session")

    def _ponged(self, number: int) -> None:
        """Called when a ping was answered: extends the session's deadline."""
        while self._pings and self._pings[0][0] <= number:
            self._answered = self._clock.monotonic()
            self._extend_deadline(self._pings.popleft()[1])

    def _send(self, request: wire.SessionRequest) -> None:
        if self._stream is not None:
            with contextlib.suppress(ConnectionLost):  # the next stream opens with the current watches
                self._stream.send_nowait(request)

    def _on_lost(self, failure: MagnetarError) -> None:
        if self._keeper is not None and asyncio.current_task() is not self._keeper:
            self._keeper.cancel()
        self._failure = failure if failure.definite else Unavailable(f"no metadata session: {failure}")

    def _end_watches(self) -> None:
        for watch in self._watches.values():
            watch.news.set()

    @property
    def session_id(self) -> str:
        return self._session

    async def close(self) -> None:
        """Ends the session at the service if it can be reached within CLOSE_TIMEOUT_S seconds; otherwise the session
        expires there. Also closes the connection. May be called again."""
        if self._keeper is None or self._closing:
            await self._channel.close()
            return
        self._closing = True
        if self._stream is not None:
            self._send(wire.SessionRequest(close=wire.Empty()))
            await asyncio.wait([self._keeper], timeout=CLOSE_TIMEOUT_S)
        await self._tasks.close()
        self._end_session(self._why)
        await self._channel.close()

    # -------------------------------------------------------------------------------------------- calls
    async def get(self, path: str) -> VersionedValue | None:
        check_path(path)
        reply: wire.GetReply = await self._ask(GET_RPC, wire.GetRequest(path=path))
        return VersionedValue(reply.value, reply.version) if reply.exists else None

    async def children(self, path: str) -> list[str]:
        check_prefix(path)
        reply: wire.Names = await self._ask(CHILDREN_RPC, wire.GetRequest(path=path))
        return list(reply.names)

    async def list_nodes(self, folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        check_prefix(folder)
        reply: wire.Names = await self._ask(CHILDREN_RPC, wire.GetRequest(path=folder, after=after, limit=limit))
        # a service of an older release returns all names, also those before and those without a node
        return NodePage([name for name in reply.names if name > after], reply.more)

    async def read_nodes(self, folder: str, names: Collection[str] | None = None) -> dict[str, VersionedValue]:
        check_prefix(folder)
        wanted, found, more = sorted(names or ()), dict[str, VersionedValue](), names is None or bool(names)
        after = ""
        while more:
            some, wanted = wanted[:NODES_PER_PAGE], wanted[NODES_PER_PAGE:]
            reply: wire.Names = await self._ask(
                CHILDREN_RPC, wire.GetRequest(path=folder, after=after, limit=NODES_PER_PAGE, values=True, nodes=some)
            )
            if len(reply.nodes) < len(reply.names):
                return await super().read_nodes(folder, names)  # a service of an older release answers names alone
            values = [VersionedValue(node.value, node.version) for node in reply.nodes]
            found |= dict(zip(reply.names, values, strict=True))
            after, more = (reply.names[-1] if reply.names else ""), reply.more or bool(wanted)
        return found

    async def revision(self) -> int:
        reply: wire.GetReply = await self._ask(GET_RPC, wire.GetRequest(path="/cluster"))
        return int(reply.revision)

    async def measure_disk(self) -> MetadataDisk | None:
        """Returns the size and the free space of the disk, and the end of the certificate, as the service reports them;
        None if its tree is in memory alone, or if the service is of an older release. Raises the errors of
        `MetadataStore.get`."""
        try:
            found = await self._ask(DISK_RPC, wire.Empty())
        except MagnetarError as error:
            if is_unknown_operation(error):
                return None
            raise
        if not found.total_bytes:
            return None
        return MetadataDisk(
            found.total_bytes, found.free_bytes, found.certificate_ends_ms, found.backup_ms, found.backup_every_ms,
            found.backup_failure,
        )  # fmt: skip

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        check_operations(operations)
        end = self._deadline_of_call()
        pause_s = RECONNECT_PAUSE_S_MIN
        while True:
            await self._wait_connected(end)
            try:
                reply: wire.CommitReply = await self._call(
                    COMMIT_RPC, make_commit_request(operations, self._session), end
                )
            except Unavailable:
                if self._left_s(end) <= pause_s:
                    raise
            else:
                return list(reply.versions)
            await asyncio.sleep(pause_s)
            pause_s = min(RECONNECT_PAUSE_S_MAX, 2 * pause_s)

    async def _ask(self, rpc: Rpc[Any, Any], request: Any) -> Any:
        return await self._repeat_read(lambda end: self._call(rpc, request, end))

    async def _call(self, rpc: Rpc[Any, Any], request: Any, end: float) -> Any:
        return await self._channel.call(rpc, request, timeout_s=max(0.001, self._left_s(end)))

    # -------------------------------------------------------------------------------------------- watches
    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        check_prefix(prefix)
        return self._watch(prefix, after_revision)

    async def _watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        self._watch_number += 1
        watch_id, watch = self._watch_number, _Watch(prefix, after_revision)
        self._watches[watch_id] = watch
        self._send(_watch_request(watch_id, watch))
        try:
            while True:
                while watch.queue:
                    yield watch.queue.popleft()
                self._check_session()
                watch.news.clear()
                await watch.news.wait()
        finally:
            del self._watches[watch_id]
            self._send(wire.SessionRequest(unwatch=watch_id))


def _watch_request(watch_id: int, watch: _Watch) -> wire.SessionRequest:
    request = wire.WatchRequest(watch_id=watch_id, prefix=watch.prefix, after_revision=watch.revision)
    return wire.SessionRequest(watch=request)


# ------------------------------------------------------------------------------------------------------- connect
# Opens a session with the metadata service, of any kind. Each kind is imported at its first use: kazoo with the first
# session of a ZooKeeper, etcd's messages with the first session of an etcd.


async def connect_metadata_at(world: World, address: MetadataAddress, timeout_s: float = 10.0) -> MetadataStore:
    """Opens a session with the metadata at `address` (a metadata service, ZooKeeper or etcd) and returns the store.
    `timeout_s`: the timeout of the session, in seconds. Tries for the same time, then raises Unavailable. Raises at
    once if retrying cannot help: InvalidConfiguration if kazoo is missing, and the other errors of `connect_metadata`,
    `connect_zookeeper` and `connect_etcd`."""
    if isinstance(address, Endpoint):
        return await connect_metadata(world, address, timeout_s)
    if isinstance(address, EtcdAddress):
        from .etcd import connect_etcd

        return await connect_etcd(world, address, timeout_s)
    try:
        from .zookeeper import connect_zookeeper
    except ModuleNotFoundError as error:
        if error.name != "kazoo":
            raise
        raise InvalidConfiguration(
            f"{address} is a ZooKeeper, and kazoo is not installed: pip install 'magnetar[zookeeper]'"
        ) from error
    return await connect_zookeeper(world, address, timeout_s)
