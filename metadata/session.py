"""A session with a metadata service, as its client sees it: what remote.py, zookeeper.py and etcd.py have in common.

    connecting ──connected──▶ connected ──broken──▶ connecting …     the same session
         └───── no sign of life for the timeout, or the service ends it ─────▶ lost   (SessionExpired, for ever)

- A call waits for a connection up to CALL_TIMEOUT_S, then Unavailable: definitely not done. On a lost or closed session
  it raises SessionExpired at once.
- A read is repeated until it is answered or that time has passed; a commit never is (metadata/store.py).
- A loss is final and reported once: `wait_session_lost` returns and every watch ends. Closing a session ends it in the
  same way, without an error.
- *The client gives up first.* Its deadline counts from the *sending* of the last answered sign of life; the service
  counts from the arrival. The client's timeout is also shorter by TIMEOUT_MARGIN_SHARE. An alarm watches the deadline,
  and every call checks it; other replies of the service (a busy watch) do not move it. So the owner of an ephemeral
  node knows that the node may be deleted before another process can create it.
- A fault in the task that keeps the session ends the session: no call waits for a connection that no task makes.

The subclass keeps the session: it sets `_state` and `_settled`, and calls `_end_session`. Guarded by
tests/metadata/test_conformance.py, on each, and tests/metadata/test_outages.py.

Also in this file, each below its heading: consecutive sessions as one `MetadataStore` (reconnecting); the address of
the metadata (address).
"""

from __future__ import annotations

import asyncio
import enum
import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import NamedTuple, Self, TypeVar
from urllib.parse import parse_qsl

from ..proto.errors import ConnectionLost, InternalError, MagnetarError, SessionExpired, TimedOut, Unavailable
from ..proto.names import parse_number
from ..runtime.alarm import AlarmTimer
from ..runtime.clock import Clock
from ..runtime.metrics import DURATION_BOUNDS, Histogram
from ..runtime.network import Endpoint
from ..runtime.tasks import Tasks
from .store import (
    NODES_PER_PAGE,
    CommitOperation,
    MetadataDisk,
    MetadataStore,
    NodeChanged,
    NodePage,
    VersionedValue,
    WatchReset,
)
from .tree_core import check_path

CALL_TIMEOUT_S = 10.0
TIMEOUT_MARGIN_SHARE = 0.05
"""The client gives its session up earlier than the service, by this share of the timeout. So clocks that differ by 2 %,
or a late timer, do not change the order."""
CLOSE_TIMEOUT_S = 2.0
RECONNECT_PAUSE_S_MIN, RECONNECT_PAUSE_S_MAX = 0.02, 0.5
"""The first and the longest pause, in seconds, between two attempts. Each pause is longer than the one before."""
SHORTEST_PAUSE_S = 0.001
"""The shortest pause, in seconds, before a deadline: clocks are rounded, so a pause of exactly the time that is left
may end before the deadline."""
QUEUED_WATCH_EVENTS_MAX = 10_000
"""The largest number of changes that a watch keeps for its reader. More are replaced by one WatchReset."""

T = TypeVar("T")


class SessionState(enum.Enum):
    """The state of a metadata session, as far as its client knows. LOST: the session has expired or was closed; no
    other state follows."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"


class SessionStore(MetadataStore):
    """The base class of a client's session with a metadata service: RemoteStore, ZookeeperStore and EtcdStore make the
    connection. This class decides when the session is lost, and makes calls wait while there is no connection."""

    def __init__(self, service: str, clock: Clock) -> None:
        self._service = service  # which, and where: for errors
        self._clock = clock
        self._state = SessionState.CONNECTING
        self._settled = asyncio.Event()  # connected, or lost
        self._lost = asyncio.Event()
        self._why = SessionExpired("the metadata session was closed")
        self._closing = False
        self._tasks = Tasks()
        self._keeper: asyncio.Task[None] | None = None
        self._timeout_s = 0.0  # as agreed with the service
        self._deadline = math.inf  # by the clock: an open session without a sign of life until then is lost
        self._alarm = AlarmTimer(clock, self._ring)

    @property
    def state(self) -> SessionState:
        return self._state

    async def wait_session_lost(self) -> None:
        await self._lost.wait()

    # -------------------------------------------------------------------------------------------- its deadline
    def _extend_deadline(self, sent: float) -> None:
        """Moves the session's deadline, because the service has answered a request. `sent`: when the request was
        sent."""
        self._deadline = sent + self._timeout_s * (1 - TIMEOUT_MARGIN_SHARE)
        self._alarm.set_if_earlier(self._deadline)

    def _ring(self) -> None:
        """Called at the session's deadline: if the deadline was not moved meanwhile, the session is lost."""
        if self._left_s(self._deadline) > 0:  # a sign of life has moved it meanwhile
            self._alarm.set_if_earlier(self._deadline)
        else:
            self._end_session(TimedOut(f"{self._service}: no sign of life for {self._timeout_s:g} s"))

    # -------------------------------------------------------------------------------------------- its end
    def _end_session(self, failure: MagnetarError) -> None:
        """Ends the session: it is lost because of `failure`, or its owner has closed it. May be called again."""
        if self._state is SessionState.LOST:
            return
        self._state = SessionState.LOST
        self._alarm.cancel()
        if not self._closing:
            session = self.session_id
            self._why = SessionExpired(f"metadata session {session} was lost: {failure}", session=session)
            self._on_lost(failure)
        self._settled.set()
        self._lost.set()
        self._end_watches()

    @abstractmethod
    def _on_lost(self, failure: MagnetarError) -> None:
        """Called when the session was lost because of `failure`, not closed."""

    @abstractmethod
    def _end_watches(self) -> None: ...

    # -------------------------------------------------------------------------------------------- its beginning
    async def start_or_close(self) -> Self:
        """Opens the session and returns this store. If that fails, closes the store and raises the error of `start`."""
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    @abstractmethod
    async def start(self) -> None:
        """Opens the session, and begins to keep it alive in the background. Called once. Raises Unavailable if that
        does not succeed within the session's timeout."""

    def _start_keeper(self) -> None:
        self._keeper = self._tasks.spawn(self._keep(), "metadata-session")
        self._keeper.add_done_callback(self._kept)

    @abstractmethod
    async def _keep(self) -> None:
        """Keeps the session connected and alive until it is lost or closed."""

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """Called when the task of `_keep` has ended. If the session was not closed, it is lost, because nothing keeps
        it alive any more."""
        if keeper.cancelled() and not self._closing:
            self._end_session(InternalError("the task that keeps the metadata session was cancelled"))
        elif not keeper.cancelled() and (fault := keeper.exception()) is not None:
            self._end_session(InternalError(f"the metadata session failed: {fault!r}"))

    # -------------------------------------------------------------------------------------------- calls
    def _deadline_of_call(self) -> float:
        return self._clock.monotonic() + CALL_TIMEOUT_S

    def _left_s(self, end: float) -> float:
        """Returns the seconds until the time `end` of the monotonic clock; negative if it has passed."""
        return end - self._clock.monotonic()

    async def _wait_connected(self, end: float) -> None:
        """Waits until there is a connection. Raises Unavailable if there is none at the time `end`, SessionExpired if
        the session is lost or closed."""
        try:
            async with asyncio.timeout(self._left_s(end)):
                await self._settled.wait()
        except TimeoutError as error:
            raise Unavailable(f"no connection to {self._service}") from error
        self._check_session()

    def _check_session(self) -> None:
        if self._left_s(self._deadline) <= 0:  # the process stood still, and no timer ran in time
            self._ring()
        if self._state is SessionState.LOST or self._closing:
            raise SessionExpired(self._why.message, **self._why.fields)

    async def _repeat_read(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Calls `ask`, which reads, with the deadline of the read. Repeats that until it is answered or the deadline
        has passed. Returns the answer."""
        end = self._deadline_of_call()
        pause_s = RECONNECT_PAUSE_S_MIN
        while True:
            await self._wait_connected(end)
            try:
                return await ask(end)
            except MagnetarError as error:
                if not error.retryable or self._left_s(end) <= pause_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(RECONNECT_PAUSE_S_MAX, 2 * pause_s)


# -------------------------------------------------------------------------------------------------- reconnecting
# Consecutive sessions as one `MetadataStore`: for a process that goes on serving when its session is lost.
#
#     serving ──suspend()──▶ suspended ──set_session(…)──▶ serving … ──stop_reconnecting()──▶ ended (SessionExpired)
#
# The owner of the sessions calls `suspend` when one is lost, and `set_session` with the next one. The ephemerals of the
# lost session are deleted, now or soon; the owner makes them again. The rest of the tree is unchanged.
#
# - *Suspended*, or lost without `suspend`: a call waits for the next session up to CALL_TIMEOUT_S, then Unavailable:
#   definitely not done. So no bundle is claimed, and no ledger is begun (ledger protocol §3.2).
# - A read that was in progress is repeated; a commit is ConnectionLost, *unknown*, and decided by content.
# - A watch breaks with ConnectionLost; its reader lists again, as after any other break.
#
# The owner closes the sessions. Guarded by tests/metadata/test_reconnecting.py.


class MetadataResponsiveness:
    """Records how fast and how reliably the metadata answers this process, over all its sessions, for metrics and
    reports to operators."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answered_s = clock.monotonic()
        self.commit_seconds = Histogram(DURATION_BOUNDS)  # of each commit that was done
        self.failures = 0  # calls that were not answered: no session, no connection, no answer in time
        self.sessions_ended = 0  # lost, not closed

    def on_answer(self) -> None:
        """Called when the metadata has answered a call of this process. A refusal is an answer, too."""
        self._answered_s = self._clock.monotonic()

    def on_failure(self, error: MagnetarError) -> None:
        """Called when a call to the metadata raised `error`. Counts it as a failure if the metadata did not answer. A
        refusal such as BadVersion counts as an answer."""
        if not error.definite or isinstance(error, Unavailable | SessionExpired):
            self.failures += 1
        else:
            self.on_answer()

    def now_s(self) -> float:
        """Returns the present time of the monotonic clock, in seconds."""
        return self._clock.monotonic()

    @property
    def silent_s(self) -> float:
        """Returns the seconds since the metadata last answered a call of this process."""
        return max(0.0, self._clock.monotonic() - self._answered_s)


class ReconnectingStore(MetadataStore):
    """A metadata store that outlives its sessions. `use` records how fast the metadata answers. It uses one session at
    a time. When that is lost, its owner must give it the next one (`set_session`). Meanwhile calls wait for at most
    CALL_TIMEOUT_S seconds; then they raise Unavailable, and nothing was done."""

    def __init__(self, session: MetadataStore, use: MetadataResponsiveness) -> None:
        self._session: MetadataStore = session
        self.use = use
        self._lost: MetadataStore | None = None  # the last session that is known to be lost
        self._ended = False
        self._changed = asyncio.Event()  # there is a next session, or there will be none

    # -------------------------------------------------------------------------------------------- its owner's
    def suspend(self) -> None:
        """Called by the owner when the session is lost: makes all calls wait until `set_session` is called. May be
        called again for the same session."""
        if self._lost is not self._session:
            self.use.sessions_ended += 1
        self._lost = self._session
        self._changed.clear()

    def set_session(self, session: MetadataStore) -> None:
        """Sets the session to use from now on. Calls that wait for a session continue with it."""
        self._session = session
        self._changed.set()

    def stop_reconnecting(self) -> None:
        """Says that there will be no further session. From now on every call raises SessionExpired, including calls
        that wait."""
        self._ended = True
        self._changed.set()

    @property
    def is_suspended(self) -> bool:
        """Returns whether there is no session to use now: the last one is lost, or there will be no further one."""
        return self._session is self._lost or self._ended

    # -------------------------------------------------------------------------------------------- calls
    async def _living(self) -> MetadataStore:
        """Returns the current session; after a loss waits for the next one. Raises Unavailable if none comes in time,
        SessionExpired if none will come."""
        if self.is_suspended and not self._ended:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._changed.wait()
            except TimeoutError:
                self.use.failures += 1
                raise Unavailable(f"no metadata session for {CALL_TIMEOUT_S:g} s; try again") from None
        if self._ended:
            raise SessionExpired("the metadata session was lost, and no other one was made")
        return self._session

    def _on_loss(self, session: MetadataStore) -> None:
        """Called when a call has found the session lost before the owner did: suspends the store."""
        if session is self._session and not self._ended:
            self.suspend()

    async def _read(self, ask: Callable[[MetadataStore], Awaitable[T]]) -> T:
        while True:
            session = self._session if not self.is_suspended else await self._living()
            try:
                found = await ask(session)
            except SessionExpired:
                self._on_loss(session)
            except MagnetarError as error:
                self.use.on_failure(error)
                raise
            else:
                self.use.on_answer()
                return found

    async def get(self, path: str) -> VersionedValue | None:
        session = self._session
        if session is not self._lost and not self._ended:  # most reads of a broker: without a question for the session
            try:
                return await session.get(path)
            except SessionExpired:
                self._on_loss(session)
            except MagnetarError as error:
                self.use.on_failure(error)
                raise
        return await self._read(lambda session: session.get(path))

    @property
    def part_operations(self) -> int:
        return self._session.part_operations

    async def children(self, path: str) -> list[str]:
        return await self._read(lambda session: session.children(path))

    async def list_nodes(self, folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        return await self._read(lambda session: session.list_nodes(folder, after, limit))

    async def read_nodes(self, folder: str, names: Collection[str] | None = None) -> dict[str, VersionedValue]:
        return await self._read(lambda session: session.read_nodes(folder, names))

    async def revision(self) -> int:
        return await self._read(lambda session: session.revision())

    async def measure_disk(self) -> MetadataDisk | None:
        return await self._read(lambda session: session.measure_disk())

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        """Commits, as `MetadataStore.commit` does. Raises ConnectionLost if the session is lost during the call: then
        it is unknown whether the operations were done. Raises Unavailable if there was no session for CALL_TIMEOUT_S
        seconds, SessionExpired after `stop_reconnecting`, and the other errors of `MetadataStore.commit`."""
        session = self._session
        if session is self._lost or self._ended:
            session = await self._living()
        began_s = self.use.now_s()
        try:
            found = await session.commit(operations)
        except SessionExpired as error:
            self.use.on_failure(error)
            self._on_loss(session)
            raise ConnectionLost(f"the metadata session was lost with a write under way: {error}") from error
        except MagnetarError as error:
            self.use.on_failure(error)
            raise
        self.use.on_answer()
        self.use.commit_seconds.observe_value(self.use.now_s() - began_s)
        return found

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        """Yields changes, as `MetadataStore.watch` does. Raises ConnectionLost when the session is lost: the caller
        must list the nodes again and begin another watch. Raises Unavailable and SessionExpired as `commit` does."""
        session = await self._living()
        try:
            async for change in session.watch(prefix, after_revision):
                yield change
        except SessionExpired as error:
            self._on_loss(session)
            raise ConnectionLost(f"the watch on {prefix} broke with the metadata session: {error}") from error

    # -------------------------------------------------------------------------------------------- the session
    @property
    def session_id(self) -> str:
        """Returns the id of the session that is used now, or of the last one."""
        return self._session.session_id

    async def wait_session_lost(self) -> None:
        """Waits until the current session is lost or closed. Returns at once while there is no other session after a
        loss."""
        await self._session.wait_session_lost()

    async def close(self) -> None:
        """Does what `stop_reconnecting` does. Does not close the session, which belongs to the owner."""
        self.stop_reconnecting()


# -------------------------------------------------------------------------------------------------------------- address
# The address of the metadata: HOST:PORT of `magnetar metadata`, `zk://HOST:PORT,HOST:PORT/ROOT` of a ZooKeeper, or
# `etcd://HOST:PORT,HOST:PORT/ROOT` of an etcd.
#
#     address = parse_address("zk://zk1:2181,zk2:2181/magnetar")   ValueError says what is wrong with it
#     store = await connect_metadata_at(world, address, timeout_s)     metadata/remote.py: a store with an open session
#
# `?jute_maxbuffer=BYTES` is the limit that the ZooKeeper servers were started with (ZooKeeper's default is 1 MiB - 1),
# `?max_txn_ops=NUMBER&max_request_bytes=BYTES` are those of the etcd servers.

ZOOKEEPER_SCHEME = "zk://"
ETCD_SCHEME = "etcd://"
ZOOKEEPER_PORT = 2181
ETCD_PORT = 2379
ZOOKEEPER_ROOT = "/magnetar"
DEFAULT_JUTE_MAXBUFFER = (1 << 20) - 1
"""The largest request to ZooKeeper, in bytes, by ZooKeeper's default. A server closes the connection of a client that
sends a larger one."""


MAX_TXN_OPS = 128
"""The most compares or operations of a transaction, by etcd's default."""
MAX_REQUEST_BYTES = 1_572_864
"""The largest request to etcd, in bytes, by etcd's default."""


class MetadataAccess(NamedTuple):
    """The TLS files and the credentials with which a process connects to ZooKeeper or etcd. If it shows an identity to
    ZooKeeper, the nodes that it creates are accessible to this identity only."""

    ca: str = ""  # PEM file of the authority of the servers' certificates; empty: in clear
    certificate: str = ""  # PEM files of the client certificate, where the servers ask for one
    key: str = ""
    credentials: Callable[[], str] | None = None  # "user:password", read at each session

    @property
    def is_authenticated(self) -> bool:
        """Returns whether the process shows an identity: credentials or a client certificate."""
        return self.credentials is not None or bool(self.certificate)


class ZookeeperAddress(NamedTuple):
    """The servers of a ZooKeeper ensemble, and the path (`root`) of the znode below which the metadata tree is stored.
    `jute_maxbuffer`: the largest request, in bytes, that the servers accept."""

    servers: tuple[Endpoint, ...]
    root: str = ZOOKEEPER_ROOT
    jute_maxbuffer: int = DEFAULT_JUTE_MAXBUFFER
    access: MetadataAccess = MetadataAccess()

    @property
    def hosts(self) -> str:
        """Returns the addresses of the servers, separated by commas, as the library kazoo expects them."""
        return ",".join(map(str, self.servers))

    def __str__(self) -> str:
        return f"{ZOOKEEPER_SCHEME}{self.hosts}{self.root}"


class EtcdAddress(NamedTuple):
    """The servers of an etcd cluster, and the beginning (`root`) of all keys of the metadata tree. `max_txn_ops` and
    `max_request_bytes`: the limits with which the servers were started."""

    servers: tuple[Endpoint, ...]
    root: str = ZOOKEEPER_ROOT
    max_txn_ops: int = MAX_TXN_OPS
    max_request_bytes: int = MAX_REQUEST_BYTES
    access: MetadataAccess = MetadataAccess()

    def __str__(self) -> str:
        return f"{ETCD_SCHEME}{','.join(map(str, self.servers))}{self.root}"


MetadataAddress = Endpoint | ZookeeperAddress | EtcdAddress


def get_store_name(address: MetadataAddress) -> str:
    """Returns what the servers at a metadata address are called: "ZooKeeper", "etcd" or "magnetar metadata"."""
    if isinstance(address, Endpoint):
        return "magnetar metadata"
    return "ZooKeeper" if isinstance(address, ZookeeperAddress) else "etcd"


def parse_address(text: str) -> MetadataAddress:
    """Parses a metadata address, as operators write it. Returns the address without access data: a ZookeeperAddress for
    a text that begins with zk://, an EtcdAddress for etcd://, and an Endpoint for HOST:PORT. Raises ValueError, whose
    text describes the mistake."""
    if text.startswith(ZOOKEEPER_SCHEME):
        servers, root, query = _parts(text[len(ZOOKEEPER_SCHEME) :], ZOOKEEPER_PORT, "ZooKeeper")
        if root == "/zookeeper" or root.startswith("/zookeeper/"):
            raise ValueError("/zookeeper is ZooKeeper's own: take another path")
        limits = _limits(query, {"jute_maxbuffer": ("BYTES", 1 << 16)})
        return ZookeeperAddress(servers, root, limits.get("jute_maxbuffer", DEFAULT_JUTE_MAXBUFFER))
    if text.startswith(ETCD_SCHEME):
        servers, root, query = _parts(text[len(ETCD_SCHEME) :], ETCD_PORT, "etcd")
        limits = _limits(query, {"max_txn_ops": ("NUMBER", 16), "max_request_bytes": ("BYTES", 1 << 16)})
        return EtcdAddress(
            servers, root, limits.get("max_txn_ops", MAX_TXN_OPS), limits.get("max_request_bytes", MAX_REQUEST_BYTES)
        )
    return Endpoint.parse(text)


def _parts(text: str, port: int, kind: str) -> tuple[tuple[Endpoint, ...], str, str]:
    """Splits HOST:PORT,HOST:PORT/ROOT?QUERY into servers, root and query."""
    where, _, query = text.partition("?")
    hosts, slash, root = where.partition("/")
    servers = tuple(_server(each, port, kind) for each in hosts.split(","))
    return servers, _root(f"/{root}" if slash and root else ZOOKEEPER_ROOT, kind), query


def _server(text: str, default: int, kind: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(default)
    if not host:
        raise ValueError(f"{text!r} is not HOST or HOST:PORT of a server of {kind}")
    return Endpoint.parse(f"{host}:{port}")


def _root(root: str, kind: str) -> str:
    try:
        check_path(root)
    except Exception as error:
        raise ValueError(f"{root!r} is not a path for {kind}") from error
    return root


def _limits(query: str, known: dict[str, tuple[str, int]]) -> dict[str, int]:
    """Returns the limits in the query of an address. `known`: the unit and the least value of each."""
    found: dict[str, int] = {}
    for name, number in parse_qsl(query, keep_blank_values=True):
        value = parse_number(number) or 0
        if name not in known or value < known[name][1]:
            wanted = " or ".join(f"{each}={unit}, at least {least}" for each, (unit, least) in known.items())
            raise ValueError(f"{name}={number} is not {wanted}")
        found[name] = value
    return found
