"""A `MetadataStore` on an etcd (API v3, at least 3.4), over the gRPC client of this house and proto/etcd.proto.

How nodes, commits, listings and watches become requests is decided by etcd_core.py. The states of the session are those
of metadata/session.py. The store uses one of the servers at a time, and the next one when that fails.

- *Session*: a lease of whole seconds, and a key that exists as long as the lease. A keep-alive each third of the
  timeout asks for a sign of life. *The client gives up first*: a lease that etcd has prolonged (a new leader counts
  anew) ends later than the client thinks, never earlier. `close` revokes the lease.
- *Looks*: every SERVER_CHECK_INTERVAL_S the server answers a read of its own state. No answer, or no leader, is a
  reason to take the next server.
- *One cluster*: each answer names its cluster. A server of another one than that of the first answer is left with
  InvalidConfiguration, before anything is read or written there.
- *Reads* are linearizable, and repeated until their deadline.
- *Commits* are sent once, and hold only while the session's key exists. What etcd answers with UNAVAILABLE,
  DEADLINE_EXCEEDED or CANCELLED, and what it does not answer, is *unknown*. A proposal that was sent to a leader which
  then died gets no answer for 7 s: it is given up as unknown NEW_TERM_GRACE_S after a look sees a new term.
- *Groups*: at most TRANSACTIONS_AT_ONCE_MAX transactions are under way. Commits that begin meanwhile wait, and leave
  together. A group of which one commit is refused did nothing, and each of its commits is sent alone.
- *Watches* resume at the exact revision, on any server, or their reader gets a WatchReset because etcd has compacted
  the history. One that its reader leaves alone costs this process a window of HTTP/2, and nothing more.
- *A full etcd* (alarm NOSPACE) refuses commits that put, and new sessions: Unavailable, and not sent again. The commit
  that filled it may have been stored: OutcomeUnknown (`etcd_core.decide_full`). Reads, deletions and sessions go on.
  `measure_disk` tells the alarm until a commit that puts is taken.
Guarded by test_conformance.py, test_etcd.py and test_etcd_cluster.py, on real servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, NoReturn

from ..proto import etcd_pb2 as etcd
from ..proto.errors import (
    ConnectionLost,
    CredentialsExpired,
    InvalidConfiguration,
    MagnetarError,
    SessionExpired,
    TimedOut,
    Unauthenticated,
    Unavailable,
)
from ..runtime.access import CallerAccess, TlsFiles
from ..runtime.network import Channel, EndOfStream, Rpc, Stream, World, find_rpc
from . import etcd_core as core
from .session import (
    CLOSE_TIMEOUT_S,
    RECONNECT_PAUSE_S_MAX,
    RECONNECT_PAUSE_S_MIN,
    SHORTEST_PAUSE_S,
    EtcdAddress,
    SessionState,
    SessionStore,
)
from .store import (
    NODES_PER_PAGE,
    OPERATIONS_PER_COMMIT,
    CommitOperation,
    MetadataDisk,
    NodeChanged,
    NodePage,
    VersionedValue,
    WatchReset,
)
from .tree_core import check_operations, check_path, check_prefix

RANGE_RPC = find_rpc("etcdserverpb.KV", "Range")
PUT_RPC = find_rpc("etcdserverpb.KV", "Put")
TXN_RPC = find_rpc("etcdserverpb.KV", "Txn")
WATCH_RPC = find_rpc("etcdserverpb.Watch", "Watch")
LEASE_GRANT_RPC = find_rpc("etcdserverpb.Lease", "LeaseGrant")
LEASE_REVOKE_RPC = find_rpc("etcdserverpb.Lease", "LeaseRevoke")
LEASE_KEEP_ALIVE_RPC = find_rpc("etcdserverpb.Lease", "LeaseKeepAlive")
AUTHENTICATE_RPC = find_rpc("etcdserverpb.Auth", "Authenticate")

SERVER_CHECK_INTERVAL_S = 0.5
"""Seconds between two looks at the server: 0.2 ms of its time each."""
SERVER_CHECK_TIMEOUT_S = 2.0
NEW_TERM_GRACE_S = 0.25
"""Seconds for answers that are on their way when a look sees a new term."""
TRANSACTIONS_AT_ONCE_MAX = 4
"""Transactions that are under way at once. etcd syncs those that arrive together in one write. More, and smaller, ones
cost CPU."""
NEEDS_LEADER_HEADER = (b"hasleader", b"true")
"""A header by which a server without a leader refuses at once."""

_LOG = logging.getLogger("magnetar.metadata.etcd")


async def connect_etcd(world: World, address: EtcdAddress, timeout_s: float = 10.0) -> EtcdStore:
    """Opens a session with etcd, whose timeout is `timeout_s` seconds, and returns the store. Tries for `timeout_s`
    seconds, then raises Unavailable. Raises errors at once if retrying cannot help: UntrustedServer, WrongProtocol,
    Unauthenticated, Unauthorized."""
    return await EtcdStore(world, address, timeout_s).start_or_close()


class _Proposal(core.QueuedCommit):
    """A transaction on its way, and the future of its answer. `end`: its deadline."""

    def __init__(self, request: etcd.TxnRequest, paths: frozenset[str], end: float) -> None:
        super().__init__(request, paths)
        self.end = end
        self.answer: asyncio.Future[etcd.TxnResponse] = asyncio.get_running_loop().create_future()

    def fail(self, error: MagnetarError) -> None:
        if not self.answer.done():
            self.answer.set_exception(type(error)(error.message, **error.fields))
            self.answer.exception()  # who waited may be gone

    def succeed(self, answer: etcd.TxnResponse) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class EtcdStore(SessionStore):
    """A session with an etcd cluster in which the metadata tree is stored. Made by `connect_etcd`."""

    def __init__(self, world: World, address: EtcdAddress, timeout_s: float) -> None:
        super().__init__(f"etcd at {address}", world.clock)
        self._world = world
        self._address = address
        self._timeout_s = timeout_s
        self._keys = core.TreeKeys(address.root)
        self._limits = core.EtcdLimits(address.max_txn_ops, address.max_request_bytes)
        self._planner = core.CommitPlanner(self._keys, 0, self._limits)
        self._lease = 0
        self._is_open = False  # the session's key exists
        self._give_up = self._clock.monotonic() + timeout_s  # without a session
        self._answered = 0.0  # when a keep-alive was answered last
        self._renewals: deque[float] = deque()  # when those without an answer were sent
        self._token = ""
        self._authenticating = asyncio.Lock()
        self._term = 0
        self._revision = 0  # the newest of which etcd has told
        self._identity = core.EtcdClusterIdentity()
        self._unused: set[str] = set()  # what was logged of servers that are of another cluster
        self._refusal = ""  # why the last commit that puts was refused: no space; "": it was not
        self._proposals: set[asyncio.Task[etcd.TxnResponse]] = set()  # transactions without an answer
        self._queue = core.CommitQueue[_Proposal](self._limits)
        self._senders = 0
        self._watching: set[Stream[Any, Any]] = set()
        self._failure: MagnetarError | None = None
        self._number = world.rng.randrange(len(address.servers))
        self._channel = self._make_channel()

    @property
    def part_operations(self) -> int:
        return min(OPERATIONS_PER_COMMIT, self._limits.part_operations)

    # -------------------------------------------------------------------------------------------- the session
    async def start(self) -> None:
        """Opens the session, and begins to keep it alive in the background. Raises Unavailable if that does not succeed
        within the session's timeout, or at once the error that makes retrying useless."""
        self._start_keeper()
        await self._settled.wait()
        if self._state is SessionState.LOST:
            raise self._failure or self._why

    def _make_channel(self) -> Channel:
        access = self._address.access
        tls = TlsFiles(access.certificate, access.key, access.ca) if access.ca else None
        token = None if access.credentials is None else lambda: self._token
        server = self._address.servers[self._number % len(self._address.servers)]
        return self._world.network.connect(server, CallerAccess(tls, token, (NEEDS_LEADER_HEADER,)))

    async def _keep(self) -> None:
        """Keeps the session on one server after the other, until it is lost or closed."""
        pause_s = RECONNECT_PAUSE_S_MIN
        said: MagnetarError | None = None  # the last failure that says more than that time ran out
        while True:
            failure = await self._attend()
            if isinstance(failure, InvalidConfiguration):
                self._log_unused_server(failure)
            said = failure if said is None or not isinstance(failure, TimedOut) else said
            if self._state is SessionState.CONNECTED:
                self._state = SessionState.CONNECTING
                self._settled.clear()
                pause_s, said = RECONNECT_PAUSE_S_MIN, failure
                _LOG.warning("no connection to etcd at %s: %s", self._channel.endpoint, failure)
            left_s = self._left_s(self._deadline if self._is_open else self._give_up)
            if self._is_final(failure) or left_s <= 0:
                self._end_session(said)
                return
            await self._channel.close()
            self._number += 1
            self._channel = self._make_channel()
            await asyncio.sleep(max(SHORTEST_PAUSE_S, min(left_s, pause_s * self._world.rng.uniform(0.5, 1.0))))
            pause_s = min(RECONNECT_PAUSE_S_MAX, 2 * pause_s)

    def _is_final(self, failure: MagnetarError) -> bool:
        return self._closing or isinstance(failure, SessionExpired) or (not self._is_open and not failure.retryable)

    async def _attend(self) -> MagnetarError:
        """Opens the session at the server of the channel, or continues it there. Returns the error that ends it."""
        stream: Stream[Any, Any] | None = None
        looking: asyncio.Task[MagnetarError] | None = None
        try:
            async with asyncio.timeout(self._attempt_s()):
                await self._authenticate()
                if self._identity.cluster_id:  # before anything is read or written there
                    await self._call_again_with_token(RANGE_RPC, self._look_request(), self._attempt_s())
                await self._open()
                stream = self._channel.stream(LEASE_KEEP_ALIVE_RPC)
                self._renewals.clear()
                self._renew(stream)
                self._on_renewed(await stream.receive())
            self._state = SessionState.CONNECTED
            self._settled.set()
            looking = asyncio.get_running_loop().create_task(self._look(stream), name="metadata-etcd-looks")
            await self._read(stream)
        except MagnetarError as error:
            if looking is not None and looking.done() and not looking.cancelled():
                return looking.result()
            return core.translate_refusal(error)
        except EndOfStream:
            return ConnectionLost(f"{self._channel.endpoint} ended the keep-alives")
        except TimeoutError:
            return TimedOut(f"{self._channel.endpoint}: no sign of life from etcd")
        finally:
            if stream is not None:
                stream.cancel()
            if looking is not None:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)

    def _log_unused_server(self, error: InvalidConfiguration) -> None:
        """Logs once that a server is not used, because it is of another cluster."""
        if error.message not in self._unused:
            self._unused.add(error.message)
            _LOG.error("this server is not used: %s", error.message)

    def _attempt_s(self) -> float:
        end = self._deadline if self._is_open else self._give_up
        return min(self._left_s(end), self._timeout_s / 3)

    async def _open(self) -> None:
        """Makes the lease and the key of the session, as far as they do not exist."""
        if not self._lease:
            sent = self._clock.monotonic()
            granted = await self._call(LEASE_GRANT_RPC, etcd.LeaseGrantRequest(TTL=core.lease_seconds(self._timeout_s)))
            self._lease, self._timeout_s = granted.ID, float(granted.TTL)
            self._give_up = min(self._give_up, sent + self._timeout_s)
            self._planner = core.CommitPlanner(self._keys, self._lease, self._limits)
        if not self._is_open:
            await self._call(PUT_RPC, etcd.PutRequest(key=self._keys.session_key(self._lease), lease=self._lease))
            self._is_open = True
            _LOG.info("session %s with etcd at %s", self.session_id, self._address)

    def _renew(self, stream: Stream[Any, Any]) -> None:
        self._renewals.append(self._clock.monotonic())
        stream.send_nowait(etcd.LeaseKeepAliveRequest(ID=self._lease))

    def _on_renewed(self, answers: Sequence[etcd.LeaseKeepAliveResponse]) -> None:
        """Called when keep-alives were answered, in the order in which they were sent: extends the deadline."""
        for answer in answers:
            self._check_cluster(answer)
            if answer.TTL <= 0:
                raise SessionExpired(f"etcd ended the lease {self._lease:x}")
            if self._renewals:
                self._answered = self._clock.monotonic()
                self._extend_deadline(self._renewals.popleft())

    async def _read(self, stream: Stream[Any, Any]) -> NoReturn:
        """Reads the answers to keep-alives. Raises TimeoutError if two in a row get none."""
        while True:
            async with asyncio.timeout(self._left_s(self._answered + self._timeout_s * 2 / 3)):
                self._on_renewed(await stream.receive())

    async def _look(self, stream: Stream[Any, Any]) -> MagnetarError:
        """Looks at the server every SERVER_CHECK_INTERVAL_S, and sends a keep-alive each third of the timeout. Returns
        the error of the first look that fails, after it has ended the stream of the keep-alives."""
        look = self._look_request()
        timeout_s = min(SERVER_CHECK_TIMEOUT_S, self._timeout_s / 3)
        renew_at = self._clock.monotonic() + self._timeout_s / 3
        try:
            while True:
                await asyncio.sleep(min(SERVER_CHECK_INTERVAL_S, max(SHORTEST_PAUSE_S, self._left_s(renew_at))))
                if self._left_s(renew_at) <= 0:
                    renew_at += self._timeout_s / 3
                    self._renew(stream)
                self._on_term((await self._call_again_with_token(RANGE_RPC, look, timeout_s)).header.raft_term)
        except MagnetarError as error:
            stream.cancel()
            return error

    def _look_request(self) -> etcd.RangeRequest:
        """Returns a read of the server's own state."""
        return etcd.RangeRequest(key=self._keys.session_key(self._lease), serializable=True, count_only=True)

    def _check_cluster(self, answer: Any) -> None:
        """Raises InvalidConfiguration if an answer is of another etcd cluster than those before."""
        self._identity.check_answer(answer.header.cluster_id, str(self._channel.endpoint))

    def _on_term(self, term: int) -> None:
        """Called with the term of each look. If there was an election, gives up the commits that were sent before:
        answers to them arrive now, or not for a long time."""
        if term > self._term > 0:
            loop = asyncio.get_running_loop()
            for call in self._proposals:
                loop.call_later(NEW_TERM_GRACE_S, call.cancel)
        self._term = term

    def _on_lost(self, failure: MagnetarError) -> None:
        if self._keeper is not None and asyncio.current_task() is not self._keeper:
            self._keeper.cancel()
        self._failure = failure if failure.definite else Unavailable(f"no metadata session: {failure}")

    def _end_watches(self) -> None:
        for stream in list(self._watching):
            stream.cancel()

    @property
    def session_id(self) -> str:
        return f"{self._lease:x}"

    async def close(self) -> None:
        """Ends the session at etcd if a server answers within CLOSE_TIMEOUT_S seconds; otherwise its lease expires
        there. Also closes the connection. May be called again."""
        if self._keeper is None or self._closing:
            await self._channel.close()
            return
        self._closing = True
        await self._tasks.close()
        while self._queue.waiting:
            self._queue.waiting.popleft().fail(self._why)
        if self._lease and self._state is not SessionState.LOST:
            with contextlib.suppress(MagnetarError):
                await self._call(LEASE_REVOKE_RPC, etcd.LeaseRevokeRequest(ID=self._lease), CLOSE_TIMEOUT_S)
        self._end_session(self._why)
        await self._channel.close()

    # -------------------------------------------------------------------------------------------- calls
    async def _authenticate(self) -> None:
        """Gets a token for the user of the credentials, if there are any and no token is known. Raises Unavailable if
        there is no answer, as nothing else was done."""
        credentials = self._address.access.credentials
        if credentials is None or self._token:
            return
        async with self._authenticating:  # etcd takes 0.1 s of CPU for each
            if self._token:
                return
            user, _, password = credentials().partition(":")
            try:
                answer = await self._call(AUTHENTICATE_RPC, etcd.AuthenticateRequest(name=user, password=password))
            except MagnetarError as error:
                if error.definite:
                    raise
                raise Unavailable(f"no token for etcd: {error}") from error
            self._token = answer.token

    async def _call(self, rpc: Rpc[Any, Any], request: Any, timeout_s: float | None = None) -> Any:
        """Calls etcd. Raises the errors of `translate_refusal`. A token that has expired is forgotten, as is the one of
        a call that left while there was none. Then raises Unavailable with the field `token`: nothing was done."""
        token = self._token
        try:
            channel = self._channel
            answer = await channel.call(rpc, request, timeout_s=timeout_s or self._timeout_s)
            self._identity.check_answer(answer.header.cluster_id, str(channel.endpoint))
            self._revision = max(self._revision, answer.header.revision)
            return answer
        except MagnetarError as error:
            refusal = core.translate_refusal(error)
            has_user = self._address.access.credentials is not None and rpc is not AUTHENTICATE_RPC
            left_without = has_user and not token and isinstance(refusal, Unauthenticated)
            if left_without or isinstance(refusal, CredentialsExpired):
                if self._token == token:
                    self._token = ""
                raise Unavailable(refusal.message, token="expired") from error
            if refusal is error:
                raise
            raise refusal from error

    async def _call_again_with_token(self, rpc: Rpc[Any, Any], request: Any, timeout_s: float) -> Any:
        """Calls etcd, and once more if the token had expired."""
        await self._authenticate()
        try:
            return await self._call(rpc, request, timeout_s)
        except Unavailable as error:
            if "token" not in error.fields:
                raise
        await self._authenticate()
        return await self._call(rpc, request, timeout_s)

    async def _ask(self, rpc: Rpc[Any, Any], request: Any) -> Any:
        """Reads from etcd. Repeats that until it is answered or its deadline has passed."""

        async def once(end: float) -> Any:
            await self._authenticate()
            return await self._call(rpc, request, max(0.001, self._left_s(end)))

        return await self._repeat_read(once)

    # -------------------------------------------------------------------------------------------- reading
    async def get(self, path: str) -> VersionedValue | None:
        check_path(path)
        found = core.parse_node(await self._ask(RANGE_RPC, core.node_range(self._keys.main_key(path))))
        return None if found is None else VersionedValue(found[1], found[0].version)

    async def children(self, path: str) -> list[str]:
        check_prefix(path)

        async def list_pages(end: float) -> list[str]:
            await self._authenticate()
            listing = core.ChildrenListing(self._keys, path)
            while listing.request is not None:
                listing.receive(await self._call(RANGE_RPC, listing.request, max(0.001, self._left_s(end))))
            return sorted(listing.names)

        return await self._repeat_read(list_pages)

    async def list_nodes(self, folder: str, after: str = "", limit: int = NODES_PER_PAGE) -> NodePage:
        check_prefix(folder)
        request = core.make_page_range(self._keys, folder, after, min(limit, core.KEYS_PER_PAGE))
        while True:
            page = core.parse_page(self._keys, folder, await self._ask(RANGE_RPC, request))
            if page.nodes or not page.following:
                return NodePage(list(page.nodes), bool(page.following))
            request.key = page.following  # only nodes further below

    async def read_nodes(self, folder: str, names: Collection[str] | None = None) -> dict[str, VersionedValue]:
        if names is not None:
            return await super().read_nodes(folder, names)
        check_prefix(folder)
        request = core.make_page_range(self._keys, folder, "", core.NODES_PER_PAGE, values=True)
        found = dict[str, VersionedValue]()
        while True:
            page = core.parse_page(self._keys, folder, await self._ask(RANGE_RPC, request))
            found |= {name: VersionedValue(value, version) for name, (version, value) in page.nodes.items()}
            if not page.following:
                return found
            request.key = page.following

    async def revision(self) -> int:
        request = etcd.RangeRequest(key=self._keys.session_key(self._lease), count_only=True)
        return int((await self._ask(RANGE_RPC, request)).header.revision)

    async def measure_disk(self) -> MetadataDisk | None:
        """Returns why etcd refuses commits, if it has refused the last one of this session because it is full; else
        None. How large its disks are is not known."""
        return MetadataDisk(0, 0, refusal=self._refusal) if self._refusal else None

    # -------------------------------------------------------------------------------------------- writing
    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        check_operations(operations)
        end = self._deadline_of_call()
        self._check_session()
        try:
            return await self._commit(operations, end)
        except SessionExpired as error:
            self._end_session(error)
            raise

    async def _commit(self, operations: Sequence[CommitOperation], end: float) -> list[int]:
        blind = self._planner.plan_blind_commit(operations)
        if blind is not None:
            self._limits.check(blind.request)
            versions = self._planner.read_blind_answer(operations, blind, await self._propose(operations, blind, end))
            if versions is not None:
                return versions
        while self._left_s(end) > 0:
            plan = self._planner.plan_read_commit(operations, await self._read_versions(operations))
            if self._planner.read_planned_answer(await self._propose(operations, plan, end)):
                return [version for version in plan.versions if version is not None]
        raise Unavailable(f"{operations[0].path}: other writers changed it at every attempt; try again")

    async def _read_versions(self, operations: Sequence[CommitOperation]) -> dict[str, core.StoredVersion | None]:
        """Reads the versions of the nodes of a commit. A node at its second key has its version in the value."""
        found: dict[str, core.StoredVersion | None] = {}
        for paths, request in self._planner.read_requests(operations):
            answer = await self._ask(TXN_RPC, request)
            for path, each in zip(paths, answer.responses, strict=True):
                found[path] = core.parse_stored_version(each.response_range)
        for path, node in found.items():
            if node is not None and node.is_second:
                again = core.parse_node(await self._ask(RANGE_RPC, core.node_range(self._keys.main_key(path))))
                found[path] = None if again is None else again[0]
        return found

    async def _propose(
        self, operations: Sequence[CommitOperation], plan: core.EtcdCommitPlan, end: float
    ) -> etcd.TxnResponse:
        """Sends a transaction. Sends it again only if it was certainly not done (Unavailable), and etcd is not full."""
        pause_s = RECONNECT_PAUSE_S_MIN
        paths = frozenset(operation.path for operation in operations)
        while True:
            await self._wait_connected(end)
            before = self._revision
            try:
                await self._authenticate()
                proposal = _Proposal(plan.request, paths, end)
                self._queue.waiting.append(proposal)
                if self._senders < TRANSACTIONS_AT_ONCE_MAX:
                    self._senders += 1
                    self._tasks.spawn(self._send(), "metadata-etcd-commits")
                answer = await proposal.answer
                if any(each.HasField("request_put") for each in plan.request.success):  # a full etcd takes the others
                    self._refusal = ""
                return answer
            except Unavailable:
                if self._left_s(end) <= pause_s:
                    raise
            except MagnetarError as error:
                if core.is_full(error):
                    raise await self._decide_full(error, before) from error
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(RECONNECT_PAUSE_S_MAX, 2 * pause_s)

    async def _decide_full(self, error: MagnetarError, before: int) -> MagnetarError:
        """Returns the error of a commit that a full etcd has answered. `before`: a revision from before it was sent."""
        if not self._refusal:
            _LOG.error("commits are refused: %s", error.message)
        self._refusal = error.message
        try:
            return core.decide_full(error, before, await self.revision())
        except MagnetarError:
            return error

    async def _send(self) -> None:
        """Sends what waits, one group after the other, until nothing waits."""
        try:
            while self._queue.waiting:
                await self._send_group(self._queue.take())
        finally:
            self._senders -= 1

    async def _send_group(self, group: list[_Proposal]) -> None:
        """Sends these transactions as one, and tells each its answer. If one of them is refused, sends each alone."""
        requests = [each.request for each in group]
        request = requests[0] if len(group) == 1 else core.merge_requests(requests)
        end = min(each.end for each in group)
        try:
            await self._wait_connected(end)
            answer = await self._propose_once(request, end)
            if len(group) == 1:
                group[0].succeed(answer)
            elif answer.succeeded:
                for each, own in zip(group, core.split_answer(requests, answer), strict=True):
                    each.succeed(own)
            else:
                await asyncio.gather(*[self._send_group([each]) for each in group])
        except MagnetarError as error:
            for each in group:
                each.fail(error)
        finally:
            for each in group:  # this task was cancelled, or failed
                each.fail(ConnectionLost(f"{self._service}: the session ended with a commit under way"))

    async def _propose_once(self, request: etcd.TxnRequest, end: float) -> etcd.TxnResponse:
        """Sends a transaction and returns the answer. Raises ConnectionLost if a new leader was elected meanwhile."""
        call = self._call(TXN_RPC, request, max(0.001, self._left_s(end)))
        asking: asyncio.Task[etcd.TxnResponse] = asyncio.ensure_future(call)
        self._proposals.add(asking)
        try:
            await asyncio.wait((asking,))
        finally:
            self._proposals.discard(asking)
            asking.cancel()
        if asking.cancelled():
            raise ConnectionLost(f"{self._service} elected another leader with a commit under way")
        return asking.result()

    # -------------------------------------------------------------------------------------------- watches
    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[NodeChanged | WatchReset]:
        check_prefix(prefix)
        return self._watch(core.TreeWatch(self._keys, prefix, after_revision))

    async def _watch(self, watch: core.TreeWatch) -> AsyncIterator[NodeChanged | WatchReset]:
        pause_s = RECONNECT_PAUSE_S_MIN
        while True:
            await self._settled.wait()
            self._check_session()
            stream: Stream[Any, Any] | None = None
            try:
                newest = await self.revision()
                if watch.is_compacted or watch.seen > newest:
                    watch.skip_to(newest)
                    yield WatchReset(newest)
                stream = self._channel.stream(WATCH_RPC)
                self._watching.add(stream)
                stream.send_nowait(watch.make_request())
                while not watch.is_compacted:
                    for answer in await stream.receive():
                        self._check_cluster(answer)
                        for change in watch.receive(answer):
                            yield change
                    pause_s = RECONNECT_PAUSE_S_MIN
                continue
            except EndOfStream:
                _LOG.debug("etcd ended a watch in order; it goes on")
            except MagnetarError as error:
                self._check_session()
                _LOG.debug("a watch goes on after: %s", error)
                self._token = ""  # a watch without a valid token ends with other errors than a call
            finally:
                if stream is not None:
                    self._watching.discard(stream)
                    stream.cancel()
            await asyncio.sleep(pause_s)
            pause_s = min(RECONNECT_PAUSE_S_MAX, 2 * pause_s)
