"""The connection to a ZooKeeper: kazoo's connection thread on one side, our event loop on the other. Imports kazoo.

Kazoo keeps the connection and the session: it finds a server, moves the session to the next one, pings, and speaks the
protocol. This module adds what kazoo lacks, or does through threads that would lose the order:

- *One order.* Answers, watch events and changes of state go from kazoo's connection thread straight to the event loop,
  in the order of their arrival. So a client that reads and watches knows which of two was first.
  Kazoo's own callback threads are not started.
- *Requests that kazoo lacks*: the part `requests` of this file.
- *Access lists.* They are not inherited: each node that is made has one, of the process' own identity.
- *No second session.* When ZooKeeper reports that the session has expired, kazoo would open another; here it stops.

No call blocks: requests are futures, and kazoo's thread is asked to end; the loop does not wait for it.
The module uses internals of kazoo (`_call`, `_connection`), so pyproject.toml pins its minor version.
Guarded by the conformance suite against a real server, tests/metadata/test_zookeeper.py.

Also in this file, below its heading: requests that kazoo lacks, in ZooKeeper's bytes (requests).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from kazoo import exceptions as zk
from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import _CONNECTION_DROP, ConnectionHandler
from kazoo.protocol.serialization import (
    CheckVersion,
    CloseInstance,
    Connect,
    Exists,
    GetACL,
    GetChildren2,
    GetData,
    MultiHeader,
    SetData,
    Sync,
    Watch,
    int_struct,
    read_string,
    stat_struct,
    write_string,
)
from kazoo.protocol.serialization import Create as CreateRequest
from kazoo.protocol.serialization import Delete as DeleteRequest
from kazoo.protocol.states import KazooState, ZnodeStat
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, make_digest_acl

from ..proto.errors import BackPressure, ConnectionLost, InternalError, MagnetarError, SessionExpired, Unauthorized
from ..runtime.clock import Clock
from . import znodes_core as znodes
from .session import MetadataAccess

# ------------------------------------------------------------------------------------------------------ requests
# Requests that kazoo lacks, in ZooKeeper's bytes; ZooKeeperConnection sends them.
#
#     AddWatch, RemoveWatches   a persistent recursive watch (ZooKeeper 3.6), and its end
#     CreateFolder              a container: ZooKeeper deletes it some time after its last child (3.5.1)
#     MultiRequest              a transaction whose answer names the step that failed
#
# Each has kazoo's form of a request: its number, its bytes, and how its answer is read.
# Guarded by the conformance suite against a real server, tests/metadata/test_zookeeper.py.


CREATE_EPHEMERAL, CREATE_CONTAINER = 1, 4
WATCH_PERSISTENT_RECURSIVE = 1  # AddWatchMode.PERSISTENT_RECURSIVE
WATCHER_TYPE_ANY = 3  # WatcherType.Any


@dataclass(frozen=True, slots=True)
class AddWatch:
    """Request to ZooKeeper: watch a znode and all znodes below it, until the connection ends."""

    path: str
    type: ClassVar[int] = 106

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(WATCH_PERSISTENT_RECURSIVE))

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class RemoveWatches:
    """Request to ZooKeeper: end this connection's watches on a znode."""

    path: str
    type: ClassVar[int] = 18

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(WATCHER_TYPE_ANY))

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CreateFolder:
    """Request to ZooKeeper: create a folder (a container znode, which ZooKeeper deletes when it stays empty), with an
    access list. `acl`: the access list, in the form of the library kazoo."""

    path: str
    acl: Any
    type: ClassVar[int] = 19  # createContainer

    def serialize(self) -> bytes:
        return bytes(CreateRequest(self.path, b"", self.acl, CREATE_CONTAINER).serialize())

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class MultiRequest:
    """Request to ZooKeeper: do a transaction of several steps, all or none. The answer is the error code of each step
    (0: it succeeded). `requests`: the steps, in the form of the library kazoo."""

    requests: tuple[Any, ...]
    type: ClassVar[int] = 14

    def serialize(self) -> bytes:
        steps = [bytes(MultiHeader(each.type, False, -1).serialize()) + each.serialize() for each in self.requests]
        return b"".join([*steps, bytes(MultiHeader(-1, True, -1).serialize())])

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> list[int]:
        codes: list[int] = []
        header, offset = MultiHeader.deserialize(buffer, offset)
        while not header.done:
            code = 0
            if header.type == CreateRequest.type:
                _, offset = read_string(buffer, offset)
            elif header.type == SetData.type:
                offset += stat_struct.size
            elif header.type == -1:
                code = int_struct.unpack_from(buffer, offset)[0]
                offset += int_struct.size
            codes.append(code)
            header, offset = MultiHeader.deserialize(buffer, offset)
        return codes


# ---------------------------------------------------------------------------------------------------- connection


_KAZOO_LOG = logging.getLogger("magnetar.kazoo")
_KAZOO_LOG.setLevel(logging.ERROR)  # it warns at each attempt to connect; metadata/zookeeper.py logs the outcome

HANDSHAKE_TIMEOUT_S = 5.0
"""The longest time, in seconds, for a handshake. A server that is starting may drop the request that opens a session,
and kazoo would wait for it for a whole session timeout."""
WAITING_REQUESTS_MAX = 10_000
"""The largest number of requests without an answer."""


class ZookeeperConnectionState(enum.Enum):
    """The state of the connection to ZooKeeper, as the library kazoo reports it. SUSPENDED: there is no connection now,
    and kazoo makes another one. LOST: the session has ended; no other state follows."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


class ZookeeperEventKind(enum.IntEnum):
    """The kind of a watch event, with ZooKeeper's numbers. CHILD: the list of a znode's children has changed."""

    CREATED = 1
    DELETED = 2
    CHANGED = 3
    CHILD = 4


class NoZnode(Exception):
    """Raised when the znode of a request does not exist."""


class ZnodeExists(Exception):
    """Raised when the znode that a request creates exists already."""


class TransactionRefused(Exception):
    """Raised when a step of a transaction failed because a znode is not as the step expects. Nothing was done then.
    `missing`: a znode does not exist, perhaps the folder of a znode that a step creates."""

    def __init__(self, *, missing: bool) -> None:
        super().__init__()
        self.missing = missing  # a znode, maybe a folder


@dataclass(frozen=True, slots=True)
class ZnodeEvent:
    """A watch event: ZooKeeper tells that a watched znode has changed. `kind`: a ZookeeperEventKind."""

    kind: int
    path: str
    zxid: int  # of the change; -1 from servers before 3.9


class ZookeeperAnswer(NamedTuple):
    """ZooKeeper's answer to a request. `value` depends on the request (see the methods of ZooKeeperConnection); `zxid`
    is ZooKeeper's number of a transaction."""

    value: Any
    zxid: int  # of the server's tree when it answered


# ------------------------------------------------------------------------------------------ kazoo, adapted
class _Threadless(SequentialThreadingHandler):  # type: ignore[misc]
    """Kazoo's handler without its threads for callbacks, which this program does not use."""

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        self._running = False


class _Connection(ConnectionHandler):  # type: ignore[misc]
    """Kazoo's connection, which also shows what kazoo keeps internal: the session's real timeout, and each event with
    its zxid."""

    on_event: Callable[[ZnodeEvent], None]
    clock: Clock
    timeout_s = 0.0
    number = 0  # of connections so far
    greeted = 0.0  # when the last answered handshake was sent
    _zxid = -1

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        if not isinstance(request, Connect):
            return super()._invoke(timeout, request, xid)
        sent = self.clock.monotonic()
        result = super()._invoke(min(timeout, HANDSHAKE_TIMEOUT_S), request, xid)
        self.timeout_s, self.greeted = result[0].time_out / 1000, sent
        self.number += 1
        return result

    def _read_header(self, timeout: float) -> Any:
        header, buffer, offset = super()._read_header(timeout)
        self._zxid = header.zxid
        return header, buffer, offset

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        watch, _ = Watch.deserialize(buffer, offset)
        self.on_event(ZnodeEvent(watch.type, watch.path, self._zxid))


class _Hidden(str):
    """A secret in a request. Its repr is hidden, because kazoo would log it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"


def _access_list(access: MetadataAccess, credentials: str | None) -> Any:
    """Returns the access list for znodes that are created. With only a certificate it admits the identity of the
    certificate, so all processes of the cluster must share one."""
    if credentials is not None:
        user, _, password = credentials.partition(":")
        return [make_digest_acl(user, password, all=True)]
    return CREATOR_ALL_ACL if access.certificate else OPEN_ACL_UNSAFE


def access_list_size_bytes(acl: Any) -> int:
    """Returns the size of the access list `acl` in a request that creates a znode, in bytes."""
    request = bytes(CreateRequest("", b"", acl, 0).serialize())
    others = 3 * 4  # the lengths of path and value, and the flags
    return len(request) - others


class _Reply:
    """Receives one answer in kazoo's thread, and passes it to the event loop."""

    def __init__(self, line: ZooKeeperConnection, then: Callable[[ZookeeperAnswer], None], fail: Callable[[Exception],
        None]) -> None:
        self._line = line
        self._then = then
        self._fail = fail

    def set(self, value: Any) -> None:
        self._line.call_on_loop(self._then, ZookeeperAnswer(value, self._line.client.last_zxid))

    def set_exception(self, error: Exception) -> None:
        self._line.call_on_loop(self._fail, error)


class ZooKeeperConnection:
    """The connection of one ZooKeeper session, by the library kazoo, which connects in the background as soon as the
    object is made. Calls `on_state` and `on_event` in the event loop, in the order in which events and answers arrive.
    A method that returns a future sends one request; the future fails with the errors of `request`."""

    def __init__(
        self, hosts: str, timeout_s: float, clock: Clock, access: MetadataAccess,
        on_state: Callable[[ZookeeperConnectionState], None], on_event: Callable[[ZnodeEvent], None],
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        retry = KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_jitter=0.5, max_delay=0.5)
        credentials = _Hidden(access.credentials()) if access.credentials is not None else None
        self._acl = _access_list(access, credentials)
        self.access_list_bytes = access_list_size_bytes(self._acl)
        self.client = KazooClient(
            hosts, timeout=timeout_s, handler=_Threadless(), connection_retry=retry, logger=_KAZOO_LOG,
            use_ssl=bool(access.ca), ca=access.ca or None, verify_certs=True, check_hostname=bool(access.ca),
            certfile=access.certificate or None, keyfile=access.key or None,
            auth_data=[("digest", credentials)] if credentials is not None else None,
        )  # fmt: skip
        self._connection = _Connection(self.client, self.client._conn_retry.copy(), logger=_KAZOO_LOG)
        self._connection.on_event = lambda event: self.call_on_loop(self._heard, event)
        self._connection.clock = clock
        self.client._connection = self._connection
        self._on_state = on_state
        self._on_event = on_event
        self._waiting = 0
        self.session = 0
        self.zxid = 0  # the highest received: the events of all changes up to it have arrived
        self.client.add_listener(self._listen)
        self.client.start_async()

    @property
    def timeout_s(self) -> float:
        """Returns the session timeout, in seconds, that the server granted; 0 before the first handshake."""
        return float(self._connection.timeout_s)

    @property
    def connection_number(self) -> int:
        """Returns the number of the present connection; each handshake makes a new one. If a request and its answer saw
        the same number, they used the same connection."""
        return int(self._connection.number)

    @property
    def last_handshake_s(self) -> float:
        """Returns when the last answered handshake was sent, in seconds of the clock."""
        return float(self._connection.greeted)

    def _listen(self, state: str) -> None:
        """Called by kazoo, in its thread, when the state of the connection has changed."""
        if state == KazooState.CONNECTED:
            self.session = self.client._session_id
            self.call_on_loop(self._on_state, ZookeeperConnectionState.CONNECTED)
        elif state == KazooState.SUSPENDED:
            self.call_on_loop(self._on_state, ZookeeperConnectionState.SUSPENDED)
        else:
            self.client._stopped.set()  # no second session
            self.call_on_loop(self._on_state, ZookeeperConnectionState.LOST)

    def call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        """Calls `function` with `args` in the event loop, soon. May be called in any thread. Does nothing if the loop
        is closed."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    def _heard(self, event: ZnodeEvent) -> None:
        """Passes a watch event to `on_event`, and records its zxid as the latest one."""
        self.zxid = max(self.zxid, event.zxid)
        self._on_event(event)

    # -------------------------------------------------------------------------------------------- asking
    def request(
        self, request: Any, then: Callable[[ZookeeperAnswer], None] | None = None
    ) -> asyncio.Future[ZookeeperAnswer]:
        """Sends a request. Returns a future of the answer, which fails with NoZnode, ZnodeExists or a MagnetarError:
        BackPressure if WAITING_REQUESTS_MAX requests wait, ConnectionLost if the connection breaks before the answer,
        SessionExpired, Unauthorized if the access list of the znode does not admit this process, InternalError for any
        other failure. Also calls `then` with the answer, in the order in which answers and watch events arrive."""
        future: asyncio.Future[ZookeeperAnswer] = self._loop.create_future()
        if self._waiting >= WAITING_REQUESTS_MAX:
            future.set_exception(BackPressure(f"{self._waiting} requests wait for ZooKeeper"))
            future.exception()  # the caller may not wait for it
            return future
        self._waiting += 1
        answered = False

        def settle() -> bool:
            nonlocal answered
            first, answered = not answered, True
            self._waiting -= first
            return first

        def succeed(answer: ZookeeperAnswer) -> None:
            if not settle():
                return
            self.zxid = max(self.zxid, answer.zxid)
            if then is not None:
                then(answer)
            if not future.done():
                future.set_result(answer)

        def fail(error: Exception) -> None:
            if settle() and not future.done():
                future.set_exception(_translated(error, request))
                future.exception()  # its waiter may be cancelled, or there is none

        self.client._call(request, _Reply(self, succeed, fail))
        return future

    def get(self, path: str) -> asyncio.Future[ZookeeperAnswer]:
        """Reads a znode. Returns a future of (value, stat); the stat has ZooKeeper's version and times. The future
        fails with NoZnode if the znode does not exist, and with the other errors of `request`."""
        return self.request(GetData(path, None))

    def exists(
        self, path: str, then: Callable[[ZookeeperAnswer], None] | None = None
    ) -> asyncio.Future[ZookeeperAnswer]:
        """Reads the stat of a znode. Returns a future of the answer, whose value is the stat; None if the znode does
        not exist. `then` is called with the answer, as in `request`. The future fails with the errors of `request`."""
        return self.request(Exists(path, None), then)

    def children(self, path: str) -> asyncio.Future[ZookeeperAnswer]:
        """Lists the direct children of a znode. Returns a future of (names, stat of the znode). The future fails with
        NoZnode if the znode does not exist, and with the other errors of `request`."""
        return self.request(GetChildren2(path, None))

    def sync(self, path: str) -> asyncio.Future[ZookeeperAnswer]:
        """Sends ZooKeeper's sync. A read that is sent after it on the same connection sees all that any server answered
        before. Returns a future of the answer. The future fails with the errors of `request`."""
        return self.request(Sync(path))

    def create(self, path: str) -> asyncio.Future[ZookeeperAnswer]:
        """Creates a lasting znode without a value. The future fails with ZnodeExists if the znode exists, with NoZnode
        if its parent does not, and with the other errors of `request`."""
        return self.request(CreateRequest(path, b"", self._acl, 0))

    def create_folder(self, path: str) -> asyncio.Future[ZookeeperAnswer]:
        """Creates a container znode, which ZooKeeper deletes when it stays empty. The future fails with ZnodeExists if
        the znode exists, with NoZnode if its parent does not, and with the other errors of `request`."""
        return self.request(CreateFolder(path, self._acl))

    def read_acl(self, path: str) -> asyncio.Future[ZookeeperAnswer]:
        """Reads the access list of a znode. Returns a future of (access list, stat). The future fails with NoZnode if
        the znode does not exist, and with the other errors of `request`."""
        return self.request(GetACL(path))

    def watch(self, path: str) -> asyncio.Future[ZookeeperAnswer]:
        """Begins to watch a znode and all znodes below it. `on_event` gets their events from the answer to this request
        on, until the connection ends or `unwatch` is called. Returns a future of that answer. The future fails with the
        errors of `request`."""
        return self.request(AddWatch(path))

    def unwatch(self, path: str) -> None:
        """Ends this connection's watches on a znode. Does not wait for the answer, and ignores an error."""
        self.request(RemoveWatches(path))

    async def commit(self, root: str, steps: Sequence[znodes.ZnodeStep]) -> int:
        """Sends a transaction of these steps and waits for its answer. Returns its zxid (ZooKeeper's number of the
        transaction), or a later one. `root`: the path of the tree's root znode.

        Raises TransactionRefused if a step failed, or Unauthorized; nothing was done then. Raises the errors of
        `request`: after BackPressure nothing was sent, after ConnectionLost the outcome is unknown. Raises
        InternalError for any other answer: then the outcome is unknown too."""
        answer = await self.request(MultiRequest(tuple(_request(root, step, self._acl) for step in steps)))
        failed = [code for code in answer.value if code not in (0, zk.RolledBackError.code, _NEVER_TRIED)]
        if zk.NoAuthError.code in failed:
            raise Unauthorized("ZooKeeper refuses the transaction: its nodes have an access list without us")
        if failed and set(failed) <= _STALE:
            raise TransactionRefused(missing=zk.NoNodeError.code in failed)
        if failed or any(answer.value):
            raise InternalError(f"ZooKeeper answers a transaction with the codes {answer.value}")
        return answer.zxid

    # -------------------------------------------------------------------------------------------- ending
    def reconnect(self) -> None:
        """Closes the present connection; kazoo then connects again, perhaps to another server. Does not wait for
        that."""
        self._push(_CONNECTION_DROP)

    def disconnect(self, *, farewell: bool) -> None:
        """Ends the connection for good, in the background; after that the state is LOST. `farewell`: also ends the
        session, if the server can be reached; otherwise the session expires."""
        self.client._stopped.set()
        self._push(CloseInstance if farewell else _CONNECTION_DROP)

    def _push(self, request: Any) -> None:
        self.client._queue.append((request, None))
        with suppress(OSError, AttributeError):
            self._connection._write_sock.send(b"\0")

    def release_resources(self) -> None:
        """Frees kazoo's resources. Must be called in the state LOST. Does nothing while kazoo's thread still uses them
        to connect."""
        if self._connection.connection_stopped.is_set():
            self.client.close()


_NEVER_TRIED = -2  # RUNTIMEINCONSISTENCY: a step after the one that failed
_STALE = {zk.BadVersionError.code, zk.NoNodeError.code, zk.NodeExistsError.code}


def _request(root: str, step: znodes.ZnodeStep, acl: Any) -> Any:
    path = root + znodes.value_znode_path(step.path)
    match step:
        case znodes.CreateZnode():
            return CreateRequest(path, step.value, acl, CREATE_EPHEMERAL if step.ephemeral else 0)
        case znodes.SetZnodeValue():
            return SetData(path, step.value, step.version)
        case znodes.DeleteZnode():
            return DeleteRequest(path, step.version)
        case znodes.CheckZnodeVersion():
            return CheckVersion(path, step.version)


def _translated(error: Exception, request: Any) -> Exception:
    match error:
        case zk.NoNodeError():
            return NoZnode()
        case zk.NodeExistsError():
            return ZnodeExists()
        case zk.SessionExpiredError():
            return SessionExpired("ZooKeeper says that the session has expired")
        case zk.ConnectionLoss() | zk.ConnectionClosedError() | zk.ConnectionDropped():
            return ConnectionLost("the connection to ZooKeeper broke before the answer came")
        case zk.AuthFailedError() | zk.NoAuthError():
            path = getattr(request, "path", "")
            return Unauthorized(f"ZooKeeper refuses {type(request).__name__} of {path}: no access")
        case MagnetarError():
            return error
        case _:
            return InternalError(f"ZooKeeper or kazoo failed at {type(request).__name__}: {error!r}")


__all__ = [
    "NoZnode",
    "TransactionRefused",
    "ZnodeEvent",
    "ZnodeExists",
    "ZnodeStat",
    "ZooKeeperConnection",
    "ZookeeperAnswer",
    "ZookeeperConnectionState",
    "ZookeeperEventKind",
]
