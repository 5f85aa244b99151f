"""A `MetadataStore` on a ZooKeeper (at least 3.6; 3.9 or newer is recommended), through the library kazoo.

The states of its session are those of metadata/session.py: SUSPENDED is connecting again, perhaps to another server.

- *Linearizable reads*: `sync`, then the read, on one connection (else both again), sees all that any server answered.
  (A leader that is cut off and has not noticed may still answer a sync, for at most syncLimit ticks: ZooKeeper's own
  bound. No decision depends on a read alone: every write names the versions that were read.)
- *Commits* are planned from a read and sent as one transaction at exact versions (znodes_core.py). The first plan reads
  the connected server's state; a refusal is decided only by a read after a sync. A transaction that ZooKeeper refuses
  did nothing and is planned again. It is sent once: if the connection breaks then it is ConnectionLost, *unknown*.
- *SUSPENDED*: calls wait for a connection up to CALL_TIMEOUT_S, then Unavailable: definitely not done. So no process
  takes ownership, and the owner keeps serving: fencing protects the data (ledger protocol §3.2).
- *LOST*: *the client gives up first* (metadata/session.py). A request every third of the timeout asks for a sign of
  life; a handshake is one, too. When the deadline has passed, or ZooKeeper reports it, all ephemerals are deleted, now
  or soon: every call raises SessionExpired, `wait_session_lost` returns, the connection is closed.
- *Watches*: `revision` is the zxid. ZooKeeper keeps no history: the part `watch` of this file says what follows.
  Servers before 3.9 do not send an event's zxid; a change then has the last zxid that was received, which is not above
  its own, and a watch that resumes after it receives a WatchReset.
- *Size*: a commit that exceeds the servers' `jute.maxbuffer` is refused before it is sent (MessageTooLarge), because
  ZooKeeper would answer it by breaking the connection, again and again.
Guarded by test_conformance.py and test_zookeeper.py, both on a real server.

Also in this file, each below its heading: whether ZooKeeper's certificate is the one that is expected, before a session
is tried (tls); watches on a ZooKeeper, which keeps no history (watch).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from ..proto.errors import (
    BadVersion,
    ConnectionLost,
    InvalidConfiguration,
    MagnetarError,
    MessageTooLarge,
    SessionExpired,
    TimedOut,
    Unavailable,
    UntrustedServer,
    WrongProtocol,
)
from ..runtime.network import World
from . import znodes_core as znodes
from .session import (
    CALL_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    QUEUED_WATCH_EVENTS_MAX,
    RECONNECT_PAUSE_S_MIN,
    SessionState,
    SessionStore,
    ZookeeperAddress,
)
from .store import NODE_ABSENT, NODES_PER_PAGE, CommitOperation, NodeChanged, NodePage, VersionedValue, WatchReset
from .tree_core import check_operations, check_path, check_prefix, is_at_or_below
from .zookeeper_connection import (
    NoZnode,
    TransactionRefused,
    ZnodeEvent,
    ZnodeExists,
    ZookeeperAnswer,
    ZooKeeperConnection,
    ZookeeperConnectionState,
    ZookeeperEventKind,
)

# ----------------------------------------------------------------------------------------------------------- tls
# Whether ZooKeeper's certificate is the one that is expected, before a session is tried.
#
# Kazoo tries again for ever whatever a server shows. So the servers are asked once here, and a certificate of another
# authority or another host, and a server without TLS, are said at once. One that cannot be reached is left to kazoo.
# Guard: tests/metadata/test_secured_zookeeper.py.


TLS_CHECK_TIMEOUT_S = 5.0


async def check_tls_connection(address: ZookeeperAddress) -> None:
    """Tries a TLS connection to the first ZooKeeper server of the address that can be reached within
    TLS_CHECK_TIMEOUT_S seconds, and closes it; does nothing if there is none. Raises UntrustedServer if the server's
    certificate is not trusted, WrongProtocol if the server does not speak TLS at this port, InvalidConfiguration if the
    TLS files cannot be used."""
    access = address.access
    try:
        context = ssl.create_default_context(cafile=access.ca)
        if access.certificate:
            context.load_cert_chain(access.certificate, access.key or None)
    except OSError as error:
        raise InvalidConfiguration(f"the TLS files for ZooKeeper cannot be used: {error}") from error
    for server in address.servers:
        try:
            async with asyncio.timeout(TLS_CHECK_TIMEOUT_S):
                _, writer = await asyncio.open_connection(server.host, server.port, ssl=context)
        except ssl.SSLCertVerificationError as error:
            raise UntrustedServer(
                f"the certificate of ZooKeeper at {server} is not trusted: {error.verify_message}"
            ) from error
        except ssl.SSLError as error:
            raise WrongProtocol(f"ZooKeeper at {server} does not speak TLS at that port: {error.reason}") from error
        except (OSError, TimeoutError):
            continue
        writer.close()
        return


# --------------------------------------------------------------------------------------------------------- watch
# Watches on a ZooKeeper, which keeps no history: a watch gets all changes from a proved beginning, or a WatchReset.
#
# A watch *attaches*: it sets persistent recursive watches (on the folder of its prefix and on the prefix' own value),
# then reads all versions below. The youngest change that this read finds (mzxid of values, pzxid of folders, of the
# nearest folder above when a part of the prefix is missing) is the youngest of all. If it is not above the revision
# that the reader has seen, and no event arrived meanwhile, no change was missed, and the watch continues. Otherwise the
# reader gets one WatchReset. A broken connection ends ZooKeeper's watches; each watch attaches again. While attached,
# every change is one event, and its version is counted from the version before. Answers and events have one order
# (metadata/zookeeper_connection.py), so the read and an event never contradict each other. A watch keeps at most
# QUEUED_WATCH_EVENTS_MAX changes that its reader has not taken; more become one WatchReset.


ZNODES_LISTED_AT_ONCE = 200
"""The number of znodes that are read at the same time. A prefix has a few hundred at most (bookies, damaged or missing
ledgers)."""


class TreeWatch:
    """One watch of the metadata tree. `queue` has the changes that the watch has received and its reader has not taken
    yet; more than QUEUED_WATCH_EVENTS_MAX are replaced by one WatchReset. `news` is set when the reader must look
    again."""

    def __init__(self, prefix: str, seen: int) -> None:
        self.prefix = prefix
        self.seen = seen  # the reader has received all changes up to this revision, or they are in the queue
        self.attached = False  # to the current connection
        self.calm = True  # no event arrived since it began to attach
        self.versions: dict[str, int] = {}
        self.queue: deque[NodeChanged | WatchReset] = deque()
        self.news = asyncio.Event()

    def reset(self) -> None:
        """Called before the watch is attached to the current connection: drops the versions of nodes that it knows."""
        self.attached, self.calm = False, True
        self.versions.clear()

    def on_event(self, path: str, kind: int, revision: int) -> None:
        """Called when the node at `path` has changed. `kind`: a ZookeeperEventKind; `revision`: that of the change.
        Updates the node's version, and queues the change if the watch is attached."""
        self.calm = False
        if kind == ZookeeperEventKind.DELETED:
            self.versions.pop(path, None)
        elif kind == ZookeeperEventKind.CREATED:
            self.versions[path] = 0
        elif path in self.versions:  # otherwise the read sets it
            self.versions[path] += 1
        if self.attached:
            version = NODE_ABSENT if kind == ZookeeperEventKind.DELETED else self.versions.get(path, 0)
            self._queue_change(NodeChanged(path, version, revision))

    def on_watch_attached(self, youngest: int, now: int) -> None:
        """Called when the watch is attached: it receives every change after the revision `now`. `youngest` is the
        revision of the latest change below its prefix. If changes after `seen` may have been missed, queues a
        WatchReset."""
        self.attached = True
        if not (self.calm and youngest <= self.seen <= now):
            self._queue_change(WatchReset(now))

    def on_connection_ended(self, heard: int) -> None:
        """Called when the connection has ended: wakes the reader, which attaches the watch again. `heard` is the
        revision up to which the watch has received all changes."""
        if self.attached:
            self.attached, self.seen = False, heard
        self.news.set()

    def _queue_change(self, change: NodeChanged | WatchReset) -> None:
        self.queue.append(change)
        if len(self.queue) > QUEUED_WATCH_EVENTS_MAX:
            self.queue.clear()
            self.queue.append(WatchReset(change.revision))
        self.news.set()


class SessionWatches:
    """All watches of one ZooKeeper session. Calling `line` returns the session's connection; `root` is the path of the
    tree's root znode. Attaches them to ZooKeeper again after each loss of the connection."""

    def __init__(self, line: Callable[[], ZooKeeperConnection], root: str) -> None:
        self._line = line
        self._root = root
        self._watches: dict[int, TreeWatch] = {}
        self._number = 0
        self._connection = 0

    def on_event(self, event: ZnodeEvent) -> None:
        """Called for each watch event of ZooKeeper, in the order in which events and answers arrive: tells it to the
        watches whose prefix it concerns."""
        if event.kind == ZookeeperEventKind.CHILD or not event.path.startswith(self._root + "/"):
            return
        path = znodes.node_path_of_znode(event.path[len(self._root) :])
        if path is None:
            return
        revision = event.zxid if event.zxid > 0 else self._line().zxid
        for watch in self._watches.values():
            if is_at_or_below(watch.prefix, path):
                watch.on_event(path, event.kind, revision)

    def on_connection_ended(self) -> None:
        """Called when the connection or the session has ended: each watch is attached again, or finds that the session
        is lost."""
        self._connection += 1
        self.notify_connection_ended(self._line().zxid)

    def notify_connection_ended(self, heard: int) -> None:
        """Tells all watches that the connection has ended. `heard` is the revision up to which all changes were
        received."""
        for watch in self._watches.values():
            watch.on_connection_ended(heard)

    async def follow(
        self, prefix: str, after: int, ready: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[NodeChanged | WatchReset]:
        """Yields the changes of the nodes at or below `prefix` after the revision `after`, until the caller stops.
        Awaits `ready` before each attempt to attach the watch; `ready` may raise SessionExpired. Raises the errors of
        `ready`, and those of `ZooKeeperConnection.request` except ConnectionLost, after which it tries again."""
        self._number += 1
        number, watch = self._number, TreeWatch(prefix, after)
        self._watches[number] = watch
        try:
            while True:
                while watch.queue:
                    yield watch.queue.popleft()
                watch.news.clear()
                if not watch.attached:
                    await ready()
                    await self._attach(watch)
                elif not watch.queue:
                    await watch.news.wait()
        finally:
            del self._watches[number]
            if watch.attached and all(other.prefix != prefix for other in self._watches.values()):
                for znode in self._watched(prefix):
                    self._line().unwatch(znode)

    def _watched(self, prefix: str) -> list[str]:
        folder = self._root + znodes.folder_znode_path(prefix)
        return [folder] if prefix == "/" else [folder, self._root + znodes.value_znode_path(prefix)]

    async def _attach(self, watch: TreeWatch) -> None:
        """Attaches a watch to the current connection; `watch.attached` says whether that succeeded. If the connection
        broke, the caller tries again with the next one."""
        connection = self._connection
        watch.reset()
        try:
            line = self._line()
            line.sync(self._root)
            await asyncio.gather(*[line.watch(znode) for znode in self._watched(watch.prefix)])
            youngest = await _VersionReader(line, self._root, watch).find_latest_revision()
        except ConnectionLost:
            return
        if connection == self._connection:
            watch.on_watch_attached(youngest, line.zxid)


class _VersionReader:
    """Reads the versions of all nodes below a prefix into its watch, and finds the revision of the latest change."""

    def __init__(self, line: ZooKeeperConnection, root: str, watch: TreeWatch) -> None:
        self._line = line
        self._root = root
        self._watch = watch
        self._youngest = 0
        self._several = asyncio.Semaphore(ZNODES_LISTED_AT_ONCE)

    async def find_latest_revision(self) -> int:
        prefix = self._watch.prefix
        there = prefix == "/" or await self._value(prefix)
        there &= await self._folder(prefix)
        if not there:
            await self._above(prefix)
        return self._youngest

    async def _value(self, path: str) -> bool:
        def note(answer: ZookeeperAnswer) -> None:
            if answer.value is None:
                self._watch.versions.pop(path, None)
            else:
                self._watch.versions[path] = answer.value.version
                self._youngest = max(self._youngest, answer.value.mzxid)

        async with self._several:
            return (await self._line.exists(self._root + znodes.value_znode_path(path), note)).value is not None

    async def _folder(self, prefix: str) -> bool:
        try:
            async with self._several:
                names, stat = (await self._line.children(self._root + znodes.folder_znode_path(prefix))).value
        except NoZnode:
            return False
        self._youngest = max(self._youngest, stat.pzxid)
        listed = znodes.FolderContent.from_names(names)
        above = "" if prefix == "/" else prefix
        await asyncio.gather(
            *[self._value(f"{above}/{segment}") for segment in listed.values],
            *[self._folder(f"{above}/{segment}") for segment in listed.below],
        )
        return True

    async def _above(self, prefix: str) -> None:
        """Called when a node does not exist: finds the revision of its possible deletion, in the pzxid of the nearest
        folder that exists."""
        for folder in reversed(["", *znodes.folder_znode_paths(prefix)]):
            stat = (await self._line.exists(self._root + folder)).value
            if stat is not None:
                self._youngest = max(self._youngest, stat.pzxid)
                return


# --------------------------------------------------------------------------------------------------------- store


_LOG = logging.getLogger("magnetar.metadata.zookeeper")

ZNODES_READ_AT_ONCE = 200
"""The number of znodes of a listing that are requested at the same time."""

T = TypeVar("T")


async def connect_zookeeper(world: World, address: ZookeeperAddress, timeout_s: float = 10.0) -> ZookeeperStore:
    """Opens a session with ZooKeeper, whose timeout is `timeout_s` seconds, and returns the store. Tries for
    `timeout_s` seconds, then raises Unavailable. Raises at once Unauthorized, and the errors of `check_tls_connection`
    if the address has TLS files."""
    if address.access.ca:
        await check_tls_connection(address)
    return await ZookeeperStore(world, address, timeout_s).start_or_close()


class ZookeeperStore(SessionStore):
    """A session with a ZooKeeper ensemble in which the metadata tree is stored. Made by `connect_zookeeper`."""

    def __init__(self, world: World, address: ZookeeperAddress, timeout_s: float) -> None:
        super().__init__(f"ZooKeeper at {address}", world.clock)
        self._world = world
        self._address = address
        self._timeout_s = timeout_s
        self._line_ended = asyncio.Event()
        self._watches = SessionWatches(lambda: self._line, address.root)
        self._line = ZooKeeperConnection(
            address.hosts, timeout_s, world.clock, address.access, self._on_state, self._watches.on_event
        )

    # -------------------------------------------------------------------------------------------- the session
    async def start(self) -> None:
        """Opens the session, and creates the tree's root znode if it is missing. Raises Unavailable if that does not
        succeed within the session's timeout, Unauthorized if this process may not access the root znode, and
        ConnectionLost, TimedOut or SessionExpired if the connection is lost meanwhile."""
        self._start_keeper()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._settled.wait()
        if self._state is not SessionState.CONNECTED:
            raise Unavailable(f"no ZooKeeper answers at {self._address}: start it, or give another address")
        await self._make_root()
        if self._address.access.is_authenticated:
            await self._check_access_list()

    async def _check_access_list(self) -> None:
        """Checks the access list of a tree that exists already. If others may read or write it, logs the command by
        which an operator changes that."""
        found = (await self._read(partial(self._line.read_acl, self._address.root), fresh=True)).value[0]
        if any(each.id.scheme == "world" for each in found):
            _LOG.warning(
                "every client of ZooKeeper may use %s: it was made without credentials. In zkCli.sh, after addauth: "
                "setAcl -R %s auth::cdrwa", self._address, self._address.root,
            )  # fmt: skip

    async def _make_root(self) -> None:
        parts = self._address.root.split("/")
        for znode in ("/".join(parts[:end]) for end in range(2, len(parts) + 1)):
            if (await self._read(partial(self._line.exists, znode), fresh=True)).value is None:
                with contextlib.suppress(ZnodeExists):
                    await self._read(partial(self._line.create, znode), fresh=False)

    async def _keep(self) -> None:
        """Asks ZooKeeper for signs of life until the session is lost."""
        unanswered = 0
        while self._state is not SessionState.LOST:
            sent = self._clock.monotonic()
            try:
                async with asyncio.timeout(self._timeout_s / 3):
                    await self._settled.wait()
                    await self._line.exists(self._address.root)
            except TimeoutError:
                unanswered += self._state is SessionState.CONNECTED
            except MagnetarError:  # the connection broke: kazoo makes the next
                await asyncio.sleep(min(RECONNECT_PAUSE_S_MIN, self._timeout_s / 10))
                continue
            else:
                unanswered = 0
                self._extend_deadline(sent)
                await asyncio.sleep(max(0.0, self._left_s(sent + self._timeout_s / 3)))
            if unanswered >= 2:  # the connection loses what is sent, and there is time for another
                unanswered = 0
                self._line.reconnect()

    def _on_state(self, state: ZookeeperConnectionState) -> None:
        if state is ZookeeperConnectionState.LOST:
            self._line_ended.set()
            self._end_session(SessionExpired(f"ZooKeeper ended session {self.session_id}"))
        elif self._state is SessionState.LOST:
            return
        elif state is ZookeeperConnectionState.SUSPENDED:
            self._state = SessionState.CONNECTING
            self._settled.clear()
            self._watches.on_connection_ended()
            _LOG.warning("no connection to ZooKeeper: owned topics are served, no new ones are taken")
        else:
            _LOG.info("connected to ZooKeeper at %s, session %s", self._address, self.session_id)
            self._timeout_s = self._line.timeout_s
            self._extend_deadline(self._line.last_handshake_s)
            self._state = SessionState.CONNECTED
            self._settled.set()

    def _on_lost(self, failure: MagnetarError) -> None:
        self._line.disconnect(farewell=False)
        self._line.release_resources()

    def _end_watches(self) -> None:
        self._watches.on_connection_ended()

    @property
    def session_id(self) -> str:
        return f"{self._line.session:#x}"

    async def close(self) -> None:
        """Ends the session at ZooKeeper if a server can be reached; otherwise the session expires there. Waits at most
        CLOSE_TIMEOUT_S seconds. May be called again."""
        if self._closing:
            return
        self._closing = True
        await self._tasks.close()
        if self._state is SessionState.CONNECTED:
            self._line.disconnect(farewell=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._line_ended.wait()
        if not self._line_ended.is_set():
            self._line.disconnect(farewell=False)
        self._end_session(self._why)
        self._line.release_resources()

    # -------------------------------------------------------------------------------------------- reading
    async def get(self, path: str) -> VersionedValue | None:
        check_path(path)
        try:
            value, stat = (await self._read(lambda: self._line.get(self._znode(path)), fresh=True)).value
        except NoZnode:
            return None
        return VersionedValue(value, stat.version)

    async def children(self, path: str) -> list[str]:
        """Returns the names of the direct children that exist, sorted. The children with a value are listed at one
        moment; the others are checked a moment later. Raises InvalidName for an invalid path, and the other errors of
        `MetadataStore.children`."""
        check_prefix(path)
        listed = await self._list(path, fresh=True)
        there = set(listed.values)
        doubtful = [segment for segment in listed.below if segment not in there]
        holds = await _in_turns(doubtful, lambda segment: self._has_values(_below(path, segment)))
        return sorted(listed.values + [segment for segment, any_ in zip(doubtful, holds, strict=True) if any_])

    async def list_nodes(self, folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        """Returns all names after `after`, because ZooKeeper lists a znode as a whole."""
        check_prefix(folder)
        return NodePage([name for name in (await self._list(folder, fresh=True)).values if name > after], more=False)

    async def _has_values(self, prefix: str) -> bool:
        """Returns whether any node below `prefix` has a value. A folder znode may be empty for some time until
        ZooKeeper deletes it."""
        listed = await self._list(prefix, fresh=False)
        if listed.values:
            return True
        for segment in listed.below:
            if await self._has_values(_below(prefix, segment)):
                return True
        return False

    async def _list(self, prefix: str, *, fresh: bool) -> znodes.FolderContent:
        folder = self._address.root + znodes.folder_znode_path(prefix)
        try:
            names, _ = (await self._read(lambda: self._line.children(folder), fresh=fresh)).value
        except NoZnode:
            names = []
        return znodes.FolderContent.from_names(names)

    async def revision(self) -> int:
        return (await self._read(lambda: self._line.exists(self._address.root), fresh=True)).zxid

    def _znode(self, path: str) -> str:
        return self._address.root + znodes.value_znode_path(path)

    async def _read(self, ask: Callable[[], Awaitable[T]], *, fresh: bool) -> T:
        """Repeats the read `ask` until it is answered or its deadline has passed. `fresh`: reads the latest state of
        the tree; otherwise that of the connected server, which may lag."""

        async def once(end: float) -> T:
            return await (self._read_fresh(ask, end) if fresh else self._within(ask(), end))

        return await self._repeat_read(once)

    async def _read_fresh(self, ask: Callable[[], Awaitable[T]], end: float) -> T:
        """Reads the latest state: sends a sync and then the read on the same connection, so that the server handles the
        read after the sync.

        Kazoo's thread may drop the connection between the two; then the read uses the next one, to a server that may
        lag. So the answer counts only if the sync was answered and the connection is still the same."""
        connection, synced = self._line.connection_number, self._line.sync(self._address.root)
        answer: T | NoZnode
        try:
            answer = await self._within(ask(), end)
        except NoZnode as missing:
            answer = missing
        await self._within(synced, end)
        if connection != self._line.connection_number:
            raise ConnectionLost(f"the connection to {self._address} broke between a sync and the read after it")
        if isinstance(answer, NoZnode):
            raise answer
        return answer

    async def _within(self, waiting: Awaitable[T], end: float) -> T:
        try:
            async with asyncio.timeout(self._left_s(end)):
                return await waiting
        except TimeoutError as error:
            raise TimedOut(f"{self._address}: no answer from ZooKeeper within {CALL_TIMEOUT_S:g} s") from error

    # -------------------------------------------------------------------------------------------- writing
    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        check_operations(operations)
        end = self._deadline_of_call()
        fresh = False
        while self._left_s(end) > 0:
            plan = await self._plan(operations, fresh=fresh)
            if not plan.steps:
                return plan.versions
            self._check_size(plan.steps)
            await self._wait_connected(end)
            try:
                await self._within(self._line.commit(self._address.root, plan.steps), end)
            except TransactionRefused as refused:
                if refused.missing:
                    await self._make_folders(plan.steps)
                fresh = True
            else:
                return plan.versions
        raise Unavailable(f"{operations[0].path}: other writers changed it at every attempt; try again")

    async def _plan(self, operations: Sequence[CommitOperation], *, fresh: bool) -> znodes.ZookeeperCommitPlan:
        """Plans a commit by the versions of its nodes. If the plan has no steps, or a version refuses the commit, makes
        it again from the latest state."""
        try:
            plan = znodes.plan_zookeeper_commit(
                operations, await self._found(operations, fresh=fresh), self._line.session
            )
        except BadVersion:
            if fresh:
                raise
        else:
            if plan.steps or fresh:
                return plan
        return await self._plan(operations, fresh=True)

    async def _found(
        self, operations: Sequence[CommitOperation], *, fresh: bool
    ) -> dict[str, znodes.NodeVersionAndOwner | None]:
        paths = list(dict.fromkeys(operation.path for operation in operations))
        ask = lambda: asyncio.gather(*[self._line.exists(self._znode(path)) for path in paths])
        stats = [answer.value for answer in await self._read(ask, fresh=fresh)]
        return {
            path: None if stat is None else znodes.NodeVersionAndOwner(stat.version, stat.ephemeralOwner)
            for path, stat in zip(paths, stats, strict=True)
        }

    async def _make_folders(self, steps: Sequence[znodes.ZnodeStep]) -> None:
        wanted = [step.path for step in steps if isinstance(step, znodes.CreateZnode)]
        for folder in dict.fromkeys(folder for path in wanted for folder in znodes.folder_znode_paths(path)):
            with contextlib.suppress(ZnodeExists):
                await self._read(partial(self._line.create_folder, self._address.root + folder), fresh=False)

    def _check_size(self, steps: Sequence[znodes.ZnodeStep]) -> None:
        root_bytes, limit = len(self._address.root.encode()), self._address.jute_maxbuffer
        size = znodes.request_size_bytes(steps, root_bytes, self._line.access_list_bytes)
        if size > limit:
            raise MessageTooLarge(
                f"a commit of {size} bytes; ZooKeeper takes {limit}: start all its servers with a larger "
                f"-Djute.maxbuffer, then say so in --metadata: {self._address}?jute_maxbuffer=BYTES",
                size=size, limit=limit,
            )  # fmt: skip

    # -------------------------------------------------------------------------------------------- watches
    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        check_prefix(prefix)
        return self._watches.follow(prefix, after_revision, self._ready)

    async def _ready(self) -> None:
        """Waits until there is a connection. Raises SessionExpired if the session is lost."""
        await self._settled.wait()
        self._check_session()


def _below(prefix: str, segment: str) -> str:
    return f"{'' if prefix == '/' else prefix}/{segment}"


async def _in_turns(items: Sequence[str], ask: Callable[[str], Awaitable[bool]]) -> list[bool]:
    """Calls `ask` for each item, for at most ZNODES_READ_AT_ONCE items at a time. Returns the answers in order."""
    answers: list[bool] = []
    for start in range(0, len(items), ZNODES_READ_AT_ONCE):
        answers += await asyncio.gather(*[ask(item) for item in items[start : start + ZNODES_READ_AT_ONCE]])
    return answers
