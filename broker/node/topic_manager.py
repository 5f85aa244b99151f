"""The topics that this broker owns (`TopicManager`): a topic is loaded on request if this broker owns its bundle.
Concurrent requests for a topic share one load.

The services of the broker call the TopicManager. `start_owning_bundles` begins an ownership session; `close` ends it in
order, `abandon_all_topics` at once. Outside of an ownership session most calls raise Unavailable. A lost metadata
session does not end the ownership session (ledger protocol §3.2):

    suspend_ownership   the broker continues to serve its topics. Calls that need the metadata wait
                        (metadata/session.py), so no bundle is claimed
    resume_ownership    in the next session: registers, takes each bundle again that no other broker has, and checks in
                        each topic's list whether another broker took the topic over in between. Such a topic is
                        abandoned, and its clients are notified

If another broker has taken a topic over, this broker can confirm no publish even before it knows that: the ledger is
fenced. Until it knows, it does not report the end of a topic (`Topic.check_may_answer_end_of_topic`); otherwise a
reader would stop before messages that the other broker confirmed.
Guards: tests/broker/node/test_session_lost.py.

`BrokerReadinessCheck` checks whether the broker is ready: registered, certain of what it owns, and able to create a
ledger, as far as is known.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from ...ledger import LedgerClient, LedgerConfig
from ...ledger.writer_core import Striping
from ...metadata import paths
from ...metadata.records import (
    CLUSTER_FORMAT,
    BookieRecord,
    BrokerRecord,
    Feature,
    LostRange,
    NamespaceRecord,
    OwnerRecord,
    may_write_feature,
)
from ...metadata.session import MetadataResponsiveness, ReconnectingStore
from ...metadata.store import MetadataStore
from ...proto.errors import BadVersion, Busy, InvalidRequest, MagnetarError, NotEnoughBookies, NotOwner, Unavailable
from ...proto.names import NamespaceName, TopicName
from ...proto.policies import Policies, parse_labels
from ...proto.versions import PRODUCT
from ...runtime import logs
from ...runtime.alarm import ALARM_RESOLUTION_S, EventLoopSlices
from ...runtime.budget import CallerMemory
from ...runtime.clock import Clock
from ...runtime.config import measure_machine_memory
from ...runtime.metrics import DURATION_BOUNDS, Histogram, MetricsPage
from ...runtime.network import World
from ...runtime.tasks import Tasks, run_to_end, run_together
from ..access.authorizer import AccessGrants, Authorizer
from ..cluster.balance_core import BalancingState
from ..cluster.bundles_core import BundleTraffic, list_bundle_parts, make_bundle_name
from ..cluster.catalog import Catalog, CatalogLimits, TopicLimits
from ..cluster.isolation_core import BrokerIsolation, read_isolation
from ..cluster.orphans import Orphan, OrphanSearchResult, delete_orphans, find_orphans
from ..cluster.ownership import (
    BundlesChanged,
    LastReadServerLists,
    Ownership,
    RegisteredServers,
    list_bookies,
    list_brokers,
    list_bundle_owners,
    list_drain_orders,
    make_random_broker_name,
)
from ..cluster.policy_cache import PolicyCache, TopicWatcher
from ..cluster.schema_registry import SchemaRegistry
from ..cluster.shares_core import SharingState
from ..common.config import BrokerConfig, MetricsLevel, OnOff, RuntimeSettings
from ..common.refusals import check_incarnation
from ..common.retry import METADATA_WAIT_S, LogThrottle, SharedCallsByKey
from ..log.appender import SlowPublishLog
from ..log.cache import TailCache
from ..log.compaction import CompactedLedger
from ..log.log_shape_core import get_allowed_striping_reduction
from ..log.managed_ledger import ManagedLedgerRecord, SkipLostRequest, TopicFenced
from ..log.reader import ReadMemoryBudget
from ..topic.maintenance import run_maintenance
from ..topic.nonpersistent import NonPersistentStorage
from ..topic.statistics import BrokerRateLimits, SharedRates
from ..topic.storage import DurableTopicStorage, TopicStorage
from ..topic.topic import Topic
from ..transaction.coordinators import TransactionCoordinators
from .internal_producer import CommittedHalfPublisher, InternalProducer, TopicTransactionSettler
from .load_turns import BrokerStateMemory, TopicLoadQueue
from .survey import TOPICS_WALKED_ON_REQUEST, TopicGroupTotals, TopicSurveyRunner

if TYPE_CHECKING:
    from ...ledger.bookies import Bookies
    from ..transaction.coordinator import RunningCoordinator


LEDGER_CREATABLE_CACHE_S = 1.0
"""Seconds for which the answer whether a ledger can be created is cached, and the longest wait for it."""


class BrokerReadinessCheck:
    """Checks whether this broker can serve clients. `ledgers`: a function that returns the client of the bookies; it
    returns None while the broker has no metadata session, or does not know which topics it owns."""

    def __init__(self, config: BrokerConfig, clock: Clock, ledgers: Callable[[], LedgerClient | None]) -> None:
        self._config = config
        self._clock = clock
        self._ledgers = ledgers
        # when it was checked, and why not
        self._placed = -LEDGER_CREATABLE_CACHE_S, "which bookies there are is not known yet"

    async def why_not_ready(self) -> str:
        """Returns the reason why the broker is not ready to serve clients; "" if it is ready. Asks the bookies at most
        once every LEDGER_CREATABLE_CACHE_S seconds, because callers without authentication may call this method. If the
        bookies cannot be listed within LEDGER_CREATABLE_CACHE_S seconds, the broker counts as ready."""
        ledgers, now_s = self._ledgers(), self._clock.monotonic()
        if ledgers is None:
            return "the broker is not registered now"
        if now_s - self._placed[0] >= LEDGER_CREATABLE_CACHE_S:
            self._placed = now_s, self._placed[1]  # others take the answer before
            self._placed = now_s, await self._why_no_place(ledgers)
        return self._placed[1]

    async def _why_no_place(self, ledgers: LedgerClient) -> str:
        config = self._config
        shape = Striping(config.ensemble_size, config.write_quorum, config.ack_quorum)
        try:
            async with asyncio.timeout(LEDGER_CREATABLE_CACHE_S):
                await ledgers.check_enough_bookies(
                    shape, shrink=get_allowed_striping_reduction(degraded_writes=config.degraded_writes)
                )
        except NotEnoughBookies as error:
            return f"no new ledger can be made: {error.message}; ledgers that are open go on while their bookies answer"
        except (MagnetarError, TimeoutError) as error:
            _LOG.debug("whether a ledger could be made is not known: %r", error)
        return ""


_LOG = logging.getLogger("magnetar.broker")

TOPICS_PER_BUCKET = 1000
"""Topics that are maintained together; then there is a pause, so that a broker with very many is evenly busy."""

BLOCKED_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of the topics whose backlog quota blocks producers: they learn that late that there is
room."""

TOPICS_MAINTAINED_AT_ONCE = 16
"""Topics that are maintained at a time: a few that wait for bookies must not delay the others."""

TOPICS_LOADED_AT_ONCE = 64
"""Topics that are loaded at a time (load_turns.py): so many share a sync of the metadata and of a journal."""

TOPICS_CHECKED_AT_ONCE = 100
"""Topics that are unloaded at a time when the broker closes, or checked at a time in a new session."""

BUNDLES_MOVED_AT_ONCE = 4
"""Bundles that are given away at a time: more would share the processor and the disk, and each pause would be longer.
"""

EVICTION_WAIT_S = 30.0
"""Seconds for which a broker leaves a bundle that it may not own to the leader of the balance: three of its checks."""

ORDER_CHECK_INTERVAL_S = 1.0
"""Seconds after which a drain looks whether its order still stands: a read of the metadata."""

SKIP_LOST_ATTEMPTS = 5
"""Attempts of a call that skips lost entries: it fails if a load that had begun before, or another broker, changes the
topic's list of ledgers."""
_UNSETTLED = "this broker has no metadata session at the moment; ask another one, or try again"


def _served_by(name: TopicName, owner: BrokerRecord) -> NotOwner:
    return NotOwner(f"topic {name} is served by {owner.endpoint}; look it up again", owner=owner.endpoint)


async def _write_no_metrics(page: MetricsPage) -> None:
    """The page of a broker that no process serves."""


class _OwnershipSession:
    """The objects of one ownership session: they exist as long as this broker owns topics."""

    __slots__ = (
        "catalog", "grants", "is_settled", "ledgers", "metadata", "ownership", "participants", "policies", "schemas",
        "settled", "storage", "tasks", "transactions",
    )  # fmt: skip

    def __init__(
        self, world: World, config: BrokerConfig, metadata: MetadataStore, me: BrokerRecord,
        policies_changed: Callable[[NamespaceName], None], runtime_changed: Callable[[RuntimeSettings], None],
        grants_changed: Callable[[str, str], None],
        topic: Callable[[TopicName], Awaitable[Topic]], endpoint: Callable[[TopicName], Awaitable[str]],
        halves: CommittedHalfPublisher, storage: Callable[[MetadataStore, LedgerClient], TopicStorage],
        use: MetadataResponsiveness,
    ) -> None:  # fmt: skip
        metadata = self.metadata = ReconnectingStore(metadata, use)
        # whether it is known what is owned: False from the loss of a session until `resume_ownership` ends
        self.settled = True
        self.is_settled = lambda: self.settled
        self.policies = PolicyCache(metadata, config, policies_changed, runtime_changed)
        self.grants = AccessGrants(metadata, world.clock, grants_changed)
        self.schemas = SchemaRegistry(world, metadata)
        self.ownership = Ownership(metadata, me, world.rng, world.clock, self._find_isolation)
        limits = CatalogLimits(config.max_tenants, config.max_namespaces_per_tenant, self._topics_max)
        self.catalog = Catalog(
            world, metadata, bundles=config.namespace_bundles, auto_creation=config.auto_topic_creation, limits=limits,
            cluster=config.cluster,
        )  # fmt: skip
        quorums = LedgerConfig(
            ensemble_size=config.ensemble_size, write_quorum=config.write_quorum, ack_quorum=config.ack_quorum,
            min_racks_per_write_quorum=config.min_racks_per_write_quorum, enforce_min_racks=config.enforce_min_racks,
            memory_bytes_max=config.append_memory_bytes, late_s=config.slow_publish_s,
        )  # fmt: skip
        self.ledgers = LedgerClient(world, metadata, quorums)
        self.participants = TopicTransactionSettler(metadata, topic, endpoint, lambda: self.transactions.peers)
        self.transactions = TransactionCoordinators(
            world, config, metadata, self.ledgers, self.ownership, self.participants, halves.publish,
            self.is_settled,
        )  # fmt: skip
        self.storage = storage(metadata, self.ledgers)  # of persistent topics
        self.tasks = Tasks()

    async def answers(self) -> bool:
        """Returns True if the metadata answers a read within METADATA_WAIT_S."""
        try:
            async with asyncio.timeout(METADATA_WAIT_S):
                await self.metadata.revision()
        except (TimeoutError, MagnetarError):
            return False
        return True

    async def stop_waiting_for_metadata(self) -> None:
        """Called at the end of the process. If the metadata does not answer now, makes each call to it that waits for
        the next session, and each later one, fail at once: nothing can be stored, and no caller waits for it."""
        if not self.settled or not await self.answers():
            self.metadata.stop_reconnecting()

    async def close(self) -> None:
        await self.tasks.close()
        await self.grants.close()
        await self.policies.close()
        await self.ledgers.close()

    async def _find_isolation(self, namespace: NamespaceName) -> BrokerIsolation | None:
        return read_isolation(await self.policies.get_applied_namespace_policies(namespace))

    async def _topics_max(self, namespace: NamespaceName) -> TopicLimits:
        applied = await self.policies.get_applied_namespace_policies(namespace)
        return TopicLimits(applied.max_topics, applied.max_tenant_topics)


class TopicManager:
    """Manages the topics of a broker: loads a topic on request if this broker owns it, unloads topics and deletes
    topics. Also gives access to the catalog, the policies, the access rights and the schemas of the cluster. `loaded`:
    the loaded topics by full name; `endpoint`: the address at which clients reach this broker. A method that needs the
    ownership session raises Unavailable if this broker has none; a method that reads or changes the metadata also
    raises the errors of the metadata."""

    def __init__(self, world: World, config: BrokerConfig) -> None:
        self.world = world
        self.config = config
        self._runtime = RuntimeSettings()  # what is changed for all brokers while they run
        # the process that serves has its own
        self.measure: Callable[[MetricsPage], Awaitable[None]] = _write_no_metrics
        self.memory = CallerMemory(config.client_memory_bytes or measure_machine_memory() // 4)
        self.cache = TailCache(config.cache_bytes, TailCache(config.catch_up_cache_bytes))
        self.reads = ReadMemoryBudget(config.read_memory_bytes)
        self.state = BrokerStateMemory(config, world.clock, self.cache, self.memory)
        self.publish_seconds = Histogram(DURATION_BOUNDS)  # of each entry of any topic: from arrival to confirmation
        self.slow_publishes = SlowPublishLog(world.clock, config.slow_publish_s)
        self.name = config.name or make_random_broker_name(world.rng)
        self.endpoint = ""  # where clients reach this broker
        self.internal_producer = InternalProducer(world, lambda: self.endpoint)
        self.loaded: dict[str, Topic] = {}
        self.load_seconds = Histogram(DURATION_BOUNDS)  # of each topic that was loaded, without its wait for a turn
        self.lookups = 0  # questions for the owner of a topic
        self.started_ms = world.clock.wall_ms()  # since the epoch
        self.balancing = BalancingState(world.clock.monotonic())
        self.sharing = SharingState(self.name, str(self.started_ms), world.clock.monotonic())
        self._rates = BrokerRateLimits(config, self.sharing.held.get_share, self._get_resource_group)
        self.survey = TopicSurveyRunner(world.clock, lambda: self.loaded.values())
        self.metadata_use = MetadataResponsiveness(world.clock)
        self.members = LastReadServerLists(world.clock, self.metadata_use)
        self.searched: set[str] = set()  # topics in which a search runs (session/finding.py)
        self.heirs: dict[str, BrokerRecord] = {}  # brokers that got bundles of this one, by endpoint
        self.idle_unloads = 0  # topics that were unloaded because they were idle
        self._unloading: dict[str, asyncio.Task[None]] = {}  # idle topics that are being closed, by full name
        self._releases: list[tuple[float, str]] = []  # a heap: when to load an unloaded topic for its retention
        self._blocking: dict[Topic, None] = {}  # topics whose quota blocks producers, as maintenance found
        self._moved: dict[str, BrokerRecord] = {}  # who got the topics that were loaded here, by full name
        self._ordered_to_drain = False
        self._misplaced_since_s: dict[str, float] = {}  # by path of the owner record
        self._orphans_since_s: dict[int, float] = {}  # when this process first saw each as an orphan
        self._session: _OwnershipSession | None = None
        self.access = Authorizer(
            world.clock, lambda name: self._open().grants.get_grants_and_administrators(name),
            lambda tenant: self._open().grants.read_administrators(tenant), lambda: self.loaded.values(),
            wildcards=config.authorization_allow_wildcards_matching,
        )  # fmt: skip
        self._loading: SharedCallsByKey[str, Topic] = SharedCallsByKey()
        self._opening: set[Topic] = set()
        self._skipping: Counter[str] = Counter()  # running `skip_lost` calls by topic; it is not loaded meanwhile
        self.readiness = BrokerReadinessCheck(
            config, world.clock, lambda: self._session.ledgers if self._session and self._session.settled else None
        )
        self._turns = TopicLoadQueue(TOPICS_LOADED_AT_ONCE, world.clock)
        self._ending = Tasks()
        self._next_id = 0
        self._throttle = LogThrottle(world.clock)  # one for all topics: an error of one load is usually that of many

    # ------------------------------------------------------------------ a time of ownership
    async def start_owning_bundles(
        self, metadata: MetadataStore, endpoint: str, pulsar: dict[str, tuple[str, ...]] | None = None, http: str = ""
    ) -> None:
        """Begins an ownership session: creates the default namespace if it is missing, and registers this broker, with
        its addresses, in the metadata. From then on clients find this broker, and it can own topics. `endpoint`: its
        address (HOST:PORT) for gRPC; `pulsar`: the URLs for Pulsar clients, by listener; `http`: the URL for HTTP, ""
        if there is none. Raises the errors of the metadata; no session has begun then."""
        self.endpoint = endpoint
        self._moved.clear()
        self._ordered_to_drain = await self._is_ordered_to_drain(metadata)
        me = BrokerRecord(
            name=self.name, endpoint=endpoint, pulsar=pulsar or {}, http=http, group=self.config.share_group,
            draining=self._ordered_to_drain, labels=parse_labels(self.config.labels),
            version=PRODUCT, format=CLUSTER_FORMAT,
        )  # fmt: skip
        changed = (self._policies_changed, self._apply_runtime, self.access.on_grants_changed)
        others = (self._existing, self._elsewhere)
        halves = CommittedHalfPublisher(self.internal_producer, self.world.clock)
        session = _OwnershipSession(
            self.world, self.config, metadata, me, *changed, *others, halves, self._durable, self.metadata_use
        )
        try:
            await session.catalog.create_default_namespace()
            await session.policies.open()
            await session.grants.open()
            await session.ownership.register_broker()
        except BaseException:
            await session.close()
            raise
        session.catalog.auto_creation = self.auto_topic_creation
        session.ownership.on_divided = partial(self._divide_topics, session.ownership)
        self._session = session
        if self.config.share_group:
            session.tasks.spawn(self._connect_bookies(session), "broker-connects")

    async def _connect_bookies(self, session: _OwnershipSession) -> None:
        """Connects to the bookies before this broker owns a topic: a bundle may be given to it at any moment, and its
        clients wait for the first ledger."""
        try:
            await session.ledgers.connect()
        except MagnetarError as error:
            _LOG.info("the bookies are not listed yet: %s", error)

    def _durable(self, metadata: MetadataStore, ledgers: LedgerClient) -> TopicStorage:
        return DurableTopicStorage(
            self.world, metadata, ledgers, self.cache, self.config, self.internal_producer.publish_copies, self.reads,
            self.publish_seconds, self.slow_publishes,
        )  # fmt: skip

    def _open(self) -> _OwnershipSession:
        if self._session is None:
            raise Unavailable("this broker does not serve at the moment; ask another one, or try again")
        return self._session

    @property
    def bookies(self) -> Bookies:
        """Returns the connections to the bookies. Raises Unavailable if this broker has no ownership session."""
        return self._open().ledgers.bookies

    @property
    def bytes_in_flight(self) -> int:
        """Returns the number of bytes of entries that were sent to bookies but are not confirmed yet."""
        return self._session.ledgers.bookies.memory.held if self._session is not None else 0

    @property
    def owned_object_count(self) -> int:
        """Returns the number of bundles and transaction coordinators that this broker owns. Includes those that it is
        giving up, while their topics are closing."""
        if self._session is None:
            return 0
        ownership = self._session.ownership
        return len(ownership.owner_record_paths) + ownership.leaving

    @property
    def has_session(self) -> bool:
        """Returns True if this broker has an ownership session: only then may it claim topics."""
        return self._session is not None

    def suspend_ownership(self) -> None:
        """Called when the metadata session is lost. This broker continues to serve its topics, but claims no new ones
        until `resume_ownership` ends. Raises Unavailable without an ownership session."""
        session = self._open()
        session.settled = False
        session.metadata.suspend()

    async def resume_ownership(self, metadata: MetadataStore) -> None:
        """Continues with a new metadata session: claims the bundles of this broker again, and abandons the topics that
        another broker has taken over. If this method raises an error (NewerFormat or one of the metadata), the caller
        must call `suspend_ownership`, and then `resume_ownership` with another session."""
        session = self._open()
        session.metadata.set_session(metadata)
        await session.ownership.register_broker()
        await session.ownership.reclaim_bundles()
        await session.transactions.abandon_coordinators_taken_over()
        topics = list(self.loaded.values())
        for start in range(0, len(topics), TOPICS_CHECKED_AT_ONCE):
            await run_together(
                [self._validate(session, topic) for topic in topics[start : start + TOPICS_CHECKED_AT_ONCE]],
                "topic-check",
            )
        session.settled = True

    async def _validate(self, session: _OwnershipSession, topic: Topic) -> None:
        if not topic.owned() or not await topic.log.is_still_owned():
            topic.log.abandon(NotOwner(f"topic {topic.name} was taken over while this broker had no session"))

    async def abandon_all_topics(self, error: MagnetarError) -> None:
        """Ends the ownership session and abandons all topics at once, because other brokers may own the topics already.
        Returns when the topics have ended. Raises Unavailable if there is no ownership session."""
        session = self._leave()
        session.metadata.stop_reconnecting()
        for topic in list(self.loaded.values()):
            topic.abandon(error)
        await session.transactions.abandon_all_coordinators(error)
        await self._ending.drain()
        await session.close()

    async def close(self) -> None:
        """Ends the ownership session in order: unloads all topics, then releases the bundles to other brokers. Only
        logs an error of the metadata. Does nothing more if there is no ownership session."""
        self.survey.close()
        if self._session is None:
            return
        session = self._leave(keep_bundles=True)
        await session.stop_waiting_for_metadata()
        await self._loading.wait_idle()
        await session.transactions.close()
        topics = list(self.loaded.values())
        for start in range(0, len(topics), TOPICS_CHECKED_AT_ONCE):
            await run_together(
                [self._close_topic(topic) for topic in topics[start : start + TOPICS_CHECKED_AT_ONCE]], "topic-end"
            )
        self.loaded.clear()
        await self._ending.drain()
        try:
            await session.ownership.close()
        except MagnetarError as error:
            _LOG.warning("bundles are not given back in order: %s", error)
        await session.close()

    async def stop_waiting_for_metadata(self) -> None:
        """Called when the time for a drain is over. If the metadata does not answer now, makes the moves that wait for
        it fail at once."""
        if self._session is not None:
            await self._session.stop_waiting_for_metadata()

    # ------------------------------------------------------------------ drain
    async def drain_broker(self, *, ordered: bool = False) -> int:
        """Registers this broker as draining, and moves its bundles to the other brokers of its group,
        BUNDLES_MOVED_AT_ONCE at a time; waits until all moves have ended. Returns the number of bundles and
        coordinators that this broker still owns. If the group has no other broker, this broker keeps all of its
        bundles. May be called again. `ordered`: the drain was ordered by an operator, and stops within
        ORDER_CHECK_INTERVAL_S seconds after the order was removed. Raises Unavailable without a metadata session; only
        logs errors of single moves."""
        session = self._open()
        if not session.settled:
            raise Unavailable(_UNSETTLED)
        ownership = session.ownership
        await ownership.store_draining(True)
        if not await ownership.has_other_brokers_in_group():
            return len(ownership.owner_record_paths)
        clock = self.world.clock
        looked_s, stands = clock.monotonic(), True

        async def move(path: str) -> None:
            nonlocal looked_s, stands
            if ordered and stands and clock.monotonic() - looked_s >= ORDER_CHECK_INTERVAL_S:
                looked_s = clock.monotonic()
                stands = await self._is_ordered_to_drain(session.metadata)
            if stands:
                await self._move(session, path)

        await self._give_away(ownership.owner_record_paths, move, "drain")
        return len(ownership.owner_record_paths)

    async def _give_away(self, paths_: Sequence[str], move: Callable[[str], Awaitable[None]], why: str) -> None:
        """Calls `move` for each bundle, for BUNDLES_MOVED_AT_ONCE at a time; logs their errors."""
        turns = asyncio.Semaphore(BUNDLES_MOVED_AT_ONCE)

        async def take_turn(path: str) -> None:
            async with turns:
                try:
                    await move(path)
                except MagnetarError as error:
                    if self._throttle.should_log(error):
                        _LOG.warning("%s is not given away: %s", path, error)

        await run_together([take_turn(path) for path in paths_], why)

    async def list_misplaced_bundles(self) -> list[str]:
        """Returns the paths of the owner records of the bundles that must leave this broker, as
        `Ownership.list_misplaced_bundles` does. Raises Unavailable without an ownership session."""
        return await self._open().ownership.list_misplaced_bundles()

    async def evict_misplaced_bundles(self) -> None:
        """Called periodically. Gives away the bundles that must leave this broker, because the policy of isolation of
        their namespaces does not let this broker own them. Where brokers balance their load, leaves that to the leader
        for EVICTION_WAIT_S seconds. Does nothing without a metadata session. Logs errors of single moves; raises the
        errors of the metadata."""
        session = self._session
        if session is None or not session.settled or session.ownership.me.draining:
            return
        now_s, since_s = self.world.clock.monotonic(), self._misplaced_since_s
        found = await session.ownership.list_misplaced_bundles()
        since_s = self._misplaced_since_s = {path: since_s.get(path, now_s) for path in found}
        is_balanced = self.config.share_group and self.balance == "on" and may_write_feature(Feature.BALANCER)
        wait_s = EVICTION_WAIT_S if is_balanced else 0.0
        due = [path for path in found if now_s - since_s[path] >= wait_s]
        await self._give_away(due, partial(self._move, session), "isolation")

    async def apply_drain_order(self) -> None:
        """Called periodically. If the metadata contains an operator's order to drain this broker, drains this broker,
        and tries again to move bundles that could not be moved before. Ends the drain if the order was removed. An
        order also applies after a restart. Raises the errors of the metadata."""
        session = self._session
        if session is None or not session.settled:
            return
        if await self._is_ordered_to_drain(session.metadata):
            if not self._ordered_to_drain:
                _LOG.info("ordered to drain: bundles are given to other brokers until 'magnetar brokers undrain'")
            self._ordered_to_drain = True
            await self.drain_broker(ordered=True)
        elif self._ordered_to_drain:
            await self.end_drain()
            self._ordered_to_drain = False
            _LOG.info("not ordered to drain any more: this broker gets bundles again")

    async def _is_ordered_to_drain(self, metadata: MetadataStore) -> bool:
        is_named = bool(self.config.name)
        return any(
            each.broker == self.name or (not is_named and each.endpoint == self.endpoint)
            for each in await list_drain_orders(metadata)
        )

    async def can_release_bundles(self) -> bool:
        """Returns True if this broker can give bundles to other brokers now: it owns bundles, and the metadata
        answers."""
        session = self._session
        return (
            session is not None and session.settled and bool(session.ownership.owner_record_paths)
            and await session.answers()
        )

    async def end_drain(self) -> None:
        """Registers this broker as not draining, so that it may get bundles again. Raises Unavailable without an
        ownership session, and the errors of the metadata."""
        await self._open().ownership.store_draining(False)
        self._moved.clear()

    async def _move(self, session: _OwnershipSession, path: str) -> None:
        heir = await session.ownership.choose_next_owner(path, others=True)
        if heir is not None and session.settled:
            await self._move_to(session, path, heir)

    async def _move_to(self, session: _OwnershipSession, path: str, heir: BrokerRecord) -> int | None:
        """Gives one bundle to the broker `heir`. Returns how many topics were loaded; None if this broker has given the
        bundle away meanwhile."""
        self.heirs[heir.endpoint] = heir
        going: list[Topic] = []
        is_of_bundle = session.ownership.make_owner_check(path)

        async def unload() -> None:
            await self._wait_idle_unloaded()
            going.extend(topic for topic in self.loaded.values() if topic.owned is is_of_bundle)
            for topic in going:
                topic.moves_to, self._moved[topic.name.full] = heir.endpoint, heir
            for start in range(0, len(going), TOPICS_CHECKED_AT_ONCE):
                await run_together([
                    self._unload(topic, NotOwner(f"topic {topic.name} moves to {heir.endpoint}", owner=heir.endpoint))
                    for topic in going[start : start + TOPICS_CHECKED_AT_ONCE]
                ], "topic-move")  # fmt: skip
            await session.transactions.unload_coordinator(path)

        if not await session.ownership.move_bundle(path, heir, unload):
            return None
        _LOG.info("%s, with %d topics, is given to %s", path, len(going), heir.name)
        return len(going)

    async def _wait_idle_unloaded(self) -> None:
        """Waits until the idle topics that are being unloaded now are closed: before their bundle is another's."""
        if self._unloading:
            await asyncio.wait(list(self._unloading.values()))

    def _leave(self, *, keep_bundles: bool = False) -> _OwnershipSession:
        session, self._session = self._open(), None
        session.ownership.lost = not keep_bundles
        return session

    # ------------------------------------------------------------------ the cluster
    @property
    def catalog(self) -> Catalog:
        """Returns the catalog of the tenants, namespaces and topics of the cluster. Raises Unavailable if this broker
        has no ownership session."""
        return self._open().catalog

    @property
    def policies(self) -> PolicyCache:
        """Returns the cache of the policies of the cluster. Raises Unavailable if this broker has no ownership
        session."""
        return self._open().policies

    @property
    def grants(self) -> AccessGrants:
        """Returns the access rights that the metadata stores. Raises Unavailable if this broker has no ownership
        session."""
        return self._open().grants

    @property
    def schemas(self) -> SchemaRegistry:
        """Returns the registry of the topics' schemas. Raises Unavailable if this broker has no ownership session."""
        return self._open().schemas

    @property
    def transactions(self) -> TransactionCoordinators:
        """Returns the transaction coordinators of the cluster. Raises Unavailable if this broker has no ownership
        session."""
        return self._open().transactions

    @property
    def topic_transaction_settler(self) -> TopicTransactionSettler:
        """Returns the object that applies outcomes of transactions to topics of this broker and of others. Raises
        Unavailable if this broker has no ownership session."""
        return self._open().participants

    async def _existing(self, name: TopicName) -> Topic:
        return await self.load_topic(name, create=False)

    async def _elsewhere(self, name: TopicName) -> str:
        """Returns the endpoint of the broker that serves the topic; "": this broker."""
        if name.full in self.loaded:
            return ""
        owner = await self.find_owner(name)
        return "" if owner.name == self.name else owner.endpoint

    def make_topic_watcher(self) -> TopicWatcher:
        """Returns a new watcher of the topics of namespaces. Raises Unavailable if this broker has no ownership
        session."""
        session = self._open()
        return TopicWatcher(session.metadata, session.catalog)

    async def find_owner(self, name: TopicName) -> BrokerRecord:
        """Returns the record of the broker that serves the topic. The topic need not exist. If the topic has no owner,
        this broker may become the owner. While this broker has no metadata session, raises Unavailable, unless the
        topic is loaded here, or this broker moved the topic to another broker before it closed. Raises TenantNotFound
        or NamespaceNotFound if the namespace does not exist, and the errors of `Ownership.find_owner`."""
        self.lookups += 1
        if self._session is None and (heir := self._moved.get(name.full)) is not None:
            return heir
        session, here = self._open(), self.loaded.get(name.full)
        if here is not None and (here.owned() or not session.settled):
            return session.ownership.me
        if not session.settled:
            raise Unavailable(_UNSETTLED)
        return (await self._find_bundle(session, name))[1]

    async def _find_bundle(
        self, session: _OwnershipSession, name: TopicName, *, opens: bool = False
    ) -> tuple[str, BrokerRecord]:
        """Returns (the path of the owner record of the topic's bundle, its owner), as `Ownership.find_owner` does."""
        namespace = await session.catalog.get_cached_namespace(name.namespace_name)
        path = session.ownership.owner_record_path(name, namespace)
        if session.ownership.is_owned(path):
            return path, session.ownership.me
        try:
            return path, await session.ownership.find_owner(name, namespace, opens=opens)
        except BundlesChanged:
            namespace = await session.catalog.get_cached_namespace(name.namespace_name, reload=True)
            path = session.ownership.owner_record_path(name, namespace)
            return path, await session.ownership.find_owner(name, namespace, opens=opens)

    def _divide_topics(self, ownership: Ownership, path: str, bundles: int) -> None:
        """Lets the topics of a bundle that was divided belong to its parts."""
        before, divided = ownership.make_owner_check(path), NamespaceRecord(bundles=bundles)
        for topic in (*self.loaded.values(), *self._opening):
            if topic.owned is before:
                topic.owned = ownership.make_owner_check(ownership.owner_record_path(topic.name, divided))
        _LOG.info("%s is divided: its namespace has %d bundles", path, bundles)

    async def report_load(self, busy_percent: int) -> None:
        """Stores the current load of this broker in the metadata, if it has changed enough. Bundles are distributed
        over the brokers by these loads (broker/cluster/bundles_core.py). `busy_percent`: the share of one processor
        core that the broker uses. Does nothing without a session or a group. Raises the errors of the metadata."""
        session = self._session
        if session is not None and session.settled and self.config.share_group:
            await session.ownership.report_load(busy_percent)

    @property
    def own_broker_record(self) -> BrokerRecord | None:
        """Returns the record of this broker with its addresses; None if this broker has no ownership session."""
        return self._session.ownership.me if self._session is not None else None

    async def list_brokers(self) -> list[BrokerRecord]:
        """Returns the records of the registered brokers. Raises Unavailable without an ownership session, and the
        errors of the metadata."""
        return await list_brokers(self._open().metadata)

    async def read_brokers_and_bookies(self) -> RegisteredServers:
        """Returns the registered brokers and bookies. If the metadata does not answer in time, returns the last known
        lists (broker/cluster/ownership.py)."""
        session = self._session
        return await self.members.read_lists(None if session is None or not session.settled else session.metadata)

    async def update_dead_broker_records(self) -> None:
        """Called periodically, if there is a session: stores when this broker last saw brokers that have died, and
        deletes old records of them (`LastReadServerLists.update_last_seen_records`). Raises the errors of the metadata.
        """
        session = self._session
        if session is not None and session.settled:
            await self.members.update_last_seen_records(session.metadata)

    @property
    def metadata(self) -> MetadataStore:
        """Returns the metadata store, whose calls wait while there is no metadata session. Raises Unavailable if this
        broker has no ownership session."""
        return self._open().metadata

    async def find_allowed_brokers(
        self, name: NamespaceName, registered: Sequence[BrokerRecord], group: str
    ) -> frozenset[str] | None:
        """Returns the names of those registered brokers of the group that may get a bundle of the namespace now, as
        `Ownership.find_allowed_brokers` does. Raises Unavailable without an ownership session."""
        return await self._open().ownership.find_allowed_brokers(name, registered, group)

    async def check_may_own(self, name: NamespaceName, broker: BrokerRecord) -> None:
        """Raises NotAllowed if the policy of isolation of the namespace does not let the broker get a bundle now;
        Unavailable without an ownership session; and the errors of the metadata."""
        await self._open().ownership.check_may_own(name, broker)

    async def list_bookies(self) -> list[BookieRecord]:
        """Returns the records of the registered bookies. Raises Unavailable without an ownership session, and the
        errors of the metadata."""
        return await list_bookies(self._open().metadata)

    @property
    def coordinators(self) -> Sequence[RunningCoordinator]:
        """Returns the transaction coordinators that this broker runs now; () if it has no ownership session."""
        return self._session.transactions.loaded_coordinators if self._session is not None else ()

    def bookie_statistics(self) -> dict[str, dict[str, int]]:
        """Returns the statistics of the connection to each bookie, by the id of the bookie. Returns {} if this broker
        has no ownership session."""
        return self._session.ledgers.statistics() if self._session is not None else {}

    def allocate_client_id(self) -> int:
        """Returns a new id for a producer or consumer. An id is never used twice in this process."""
        self._next_id += 1
        return self._next_id

    # ------------------------------------------------------------------ topics
    async def load_topic(self, name: TopicName, *, create: bool = True, publishes: bool = False) -> Topic:
        """Returns the topic, after loading it if necessary. `create`: whether a missing topic is created, if its
        namespace allows that. `publishes`: the caller is a producer: the load has priority over loads for consumers,
        and the first ledger may be created early. Raises NotOwner if another broker serves the topic (its field `owner`
        is the endpoint); TenantNotFound or NamespaceNotFound if its namespace does not exist; TopicNotFound,
        NotAllowed, DataLost or Unavailable if the topic cannot be loaded. Raises the errors of the metadata, too."""
        found = self.loaded.get(name.full)
        if found is not None:
            found.maintenance.asked_s = self.world.clock.monotonic()
            return found
        if self._session is None and (heir := self._moved.get(name.full)) is not None:
            raise _served_by(name, heir)
        session = self._open()
        if publishes:
            self._turns.prioritize_topic_load(name.full)
        try:
            topic = await self._loading.run(name.full, lambda: self._load(session, name, create))
        finally:
            if publishes:
                self._turns.withdraw_load_priority(name.full)
        if publishes:
            topic.log.create_first_ledger_early()
        return topic

    async def _load(self, session: _OwnershipSession, name: TopicName, create: bool) -> Topic:
        if not session.settled:
            raise Unavailable(_UNSETTLED)  # or it would fence the broker that took the topic over
        if (ending := self._unloading.get(name.full)) is not None:
            await asyncio.wait([ending])
        if name.full in self._skipping:
            raise Unavailable(f"lost entries of topic {name} are being passed over; try again", topic=name)
        ownership, applied = session.ownership, await session.policies.get_applied_policies(name)
        path, owner = await self._find_bundle(session, name, opens=True)
        if owner.name != self.name:
            raise _served_by(name, owner)
        topic = Topic(
            self.world, session.ledgers, self.config, name, applied,
            session.storage if name.persistent else NonPersistentStorage(self.world, self.config), rates=self._rates,
            owned=ownership.make_owner_check(path), settled=session.is_settled, on_lost=self._lost,
            coordinators=session.transactions,
        )  # fmt: skip
        self._opening.add(topic)  # its bundle may be divided meanwhile
        try:
            async with self._turns.make_load_turn(name.full):
                begun_s = self.world.clock.monotonic()
                await topic.open(partial(session.catalog.ensure_topic_exists, name) if create else None)
        except MagnetarError as error:
            if self._throttle.should_log(error):
                _LOG.warning("topic %s does not open: %s", name, error)
            raise
        finally:
            self._opening.discard(topic)
        if self._session is not session or not topic.owned():
            await topic.close()
            if self._session is session and session.settled:  # if it moves: once the next owner is decided
                _, owner = await self._find_bundle(session, name)
                if owner.name != self.name:
                    raise _served_by(name, owner)
            raise Unavailable("this broker gave the topic up while it was loaded; look it up again")
        self.loaded[name.full] = topic
        if name.persistent:
            self.sharing.stored.on_loaded(name.full, topic)
        took_s = self.world.clock.monotonic() - begun_s
        self.load_seconds.observe_value(took_s)
        _LOG.debug("topic %s is loaded, in %.3f s", name, took_s)
        applied = session.policies.get_applied_policies_nowait(name)
        if applied is not topic.applied:  # they have changed while it was opened, perhaps
            topic.apply(applied)
        return topic

    def _lost(self, topic: Topic) -> None:
        if self.loaded.get(topic.name.full) is topic:
            del self.loaded[topic.name.full]
        self._ending.spawn(self._close_topic(topic), f"end of {topic.name}")

    async def _close_topic(self, topic: Topic, error: MagnetarError | None = None) -> None:
        try:
            await topic.close(error)
        except MagnetarError as error:
            _LOG.warning("%s: %s", topic.name, error)
        except Exception:  # a fault of one topic must not keep the others from being closed
            _LOG.exception("%s: the topic was not closed in order", topic.name)

    async def unload_topic(self, name: TopicName) -> None:
        """Closes the topic if it is loaded at this broker. The next use loads the topic again, at this broker or
        another one. If the caller is cancelled, the topic is closed nevertheless. Raises the errors of `Topic.close`.
        """
        topic = self.loaded.pop(name.full, None)
        if topic is not None:
            await run_to_end(topic.close())

    async def move_bundles(self, name: NamespaceName, bundle: str, heir: BrokerRecord) -> tuple[int, int]:
        """Gives one bundle of a namespace that this broker owns (all of its bundles if `bundle` is empty) to the broker
        `heir`. Returns (number of unloaded topics, number of bundles that were given away). Raises InvalidRequest if
        the namespace has no such bundle; NotAllowed if its policy of isolation does not let the broker get it;
        Unavailable without a metadata session; and the errors of `Catalog.get_namespace`."""
        session = self._open()
        if not session.settled:
            raise Unavailable(_UNSETTLED)
        await self._get_namespace_with_bundle(name, bundle)
        await session.ownership.check_may_own(name, heir)
        moved = [
            await self._move_to(session, path, heir)
            for path in session.ownership.list_owned_bundle_paths(name) if path.endswith(bundle)
        ]  # fmt: skip
        return sum(each or 0 for each in moved), sum(each is not None for each in moved)

    async def unload_namespace(self, name: NamespaceName, bundle: str = "") -> tuple[int, int]:
        """Unloads the topics of one bundle of a namespace at this broker (of all bundles if `bundle` is empty), and
        releases the bundles. The next broker that is asked for one of the topics becomes the owner. Returns (number of
        unloaded topics, number of released bundles). Raises InvalidRequest if the namespace has no such bundle;
        Unavailable without a metadata session; and the errors of `Catalog.get_namespace`."""
        session = self._open()
        if not session.settled:
            raise Unavailable(_UNSETTLED)
        await self._get_namespace_with_bundle(name, bundle)
        ownership = session.ownership
        topics = bundles = 0
        for path in ownership.list_owned_bundle_paths(name):
            if not path.endswith(bundle):
                continue
            going: list[Topic] = []

            async def unload(path: str = path, going: list[Topic] = going) -> None:
                await self._wait_idle_unloaded()
                is_of_bundle = ownership.make_owner_check(path)
                going += [topic for topic in self.loaded.values() if topic.owned is is_of_bundle]
                for start in range(0, len(going), TOPICS_CHECKED_AT_ONCE):
                    await run_together(
                        [self._unload(topic) for topic in going[start : start + TOPICS_CHECKED_AT_ONCE]], "topic-unload"
                    )

            await ownership.release_bundle(path, unload)
            topics, bundles = topics + len(going), bundles + 1
        return topics, bundles

    async def sum_traffic_by_bundle(self) -> dict[str, TopicGroupTotals]:
        """Returns the number, the producers and consumers, and the rates of the loaded topics of each bundle that this
        broker owns, by the path of its owner record. All other fields of the totals are 0. The rates are those of the
        last survey. Raises Unavailable without an ownership session."""
        turns = EventLoopSlices(self.world.clock)
        ownership = self._open().ownership
        found = {path: TopicGroupTotals() for path in ownership.owner_record_paths if paths.parse_bundle_owner(path)}
        sums = {ownership.make_owner_check(path): total for path, total in found.items()}
        for topic in list(self.loaded.values()):
            if (total := sums.get(topic.owned)) is not None:
                rates = topic.traffic.walked_rates
                total.topics += 1
                total.producers += len(topic.producers)
                total.consumers += sum(len(each.consumers) for each in topic.subscriptions.values())
                total.rate_in += rates.messages_in
                total.rate_out += rates.messages_out
                total.throughput_in += rates.bytes_in
                total.throughput_out += rates.bytes_out
            if turns.is_slice_used_up:
                await turns.begin_slice()
        return found

    def list_owned_bundles(self) -> list[tuple[str, str]]:
        """Returns the namespace (tenant/namespace) and the name of each bundle that this broker owns. Raises
        Unavailable without an ownership session."""
        found = map(paths.parse_bundle_owner, self._open().ownership.owner_record_paths)
        return [each for each in found if each is not None]

    def list_topic_traffic(self, path: str) -> dict[str, BundleTraffic]:
        """Returns what each loaded topic of the bundle with the owner record at `path` carries, by its full name. The
        rates are those of the last survey. Raises Unavailable without an ownership session."""
        is_of_bundle = self._open().ownership.make_owner_check(path)
        return {
            topic.name.full: BundleTraffic(
                1, len(topic.producers) + sum(len(each.consumers) for each in topic.subscriptions.values()),
                (rates := topic.traffic.walked_rates).messages_in + rates.messages_out,
                rates.bytes_in + rates.bytes_out,
            )
            for topic in self.loaded.values() if topic.owned is is_of_bundle
        }  # fmt: skip

    def measure_owned_s(self, path: str) -> float:
        """Returns for how many seconds this broker has owned the bundle whose owner record is at `path`. Returns 0.0 if
        it does not own it. Raises Unavailable without an ownership session."""
        return self._open().ownership.measure_owned_s(path)

    async def list_bundle_owners(self, name: NamespaceName, bundle: str = "") -> dict[str, OwnerRecord]:
        """Returns the owner records of the bundles of a namespace that have an owner, by bundle; parts of a bundle that
        its owner has not divided yet have its record. If `bundle` is not empty, returns only the record of this bundle.
        Raises InvalidRequest if the namespace has no such bundle, and the errors of `Catalog.get_namespace`."""
        record = await self._get_namespace_with_bundle(name, bundle)
        found = await list_bundle_owners(self._open().metadata, name)
        parts = {part: owner for each, owner in found.items() for part in list_bundle_parts(each, record.bundles)}
        return {each: owner for each, owner in parts.items() if bundle in ("", each)}

    async def divide_bundles(self, name: NamespaceName, bundle: str = "") -> int:
        """Divides the bundles of a namespace that this broker has owned since before the namespace was split. Returns
        the number of bundles of the namespace. Raises InvalidRequest if it has no bundle `bundle`; Unavailable without
        a metadata session; and the errors of `Catalog.get_namespace`."""
        if not self._open().settled:
            raise Unavailable(_UNSETTLED)
        return (await self._get_namespace_with_bundle(name, bundle)).bundles

    async def _get_namespace_with_bundle(self, name: NamespaceName, bundle: str) -> NamespaceRecord:
        """Reads and returns the record of a namespace. Divides the bundles of this broker if it was split. Raises
        InvalidRequest if it has no such bundle; "": any."""
        session = self._open()
        record = await session.catalog.get_cached_namespace(name, reload=True)
        known = [make_bundle_name(number, record.bundles) for number in range(record.bundles)]
        if bundle and bundle not in known:
            raise InvalidRequest(f"namespace {name} has no bundle {bundle!r}; it has {', '.join(known)}")
        if record.splits:
            await session.ownership.divide_bundles(name, record)
        return record

    async def _unload(self, topic: Topic, error: MagnetarError | None = None) -> None:
        if self.loaded.get(topic.name.full) is topic:
            del self.loaded[topic.name.full]
        await self._close_topic(topic, error)

    async def skip_lost(self, name: TopicName, *, only: int, force: bool) -> list[LostRange]:
        """Marks the lost entries of a topic as skipped (broker/log/managed_ledger.py), and returns their ranges; none
        if no entry is lost. `only`: the id of the ledger whose lost entries are marked; -1: all ledgers. `force`:
        entries that a bookie may still have count as lost, too. Unloads the topic before and afterwards, so that the
        topic is loaded with the new list of ledgers; clients cannot load the topic in between. Raises Busy if the list
        of ledgers keeps changing; Unavailable before the cluster's upgrade is finished; the errors of
        `SkipLostRequest.run`."""
        session = self._open()
        if not may_write_feature(Feature.SKIPPED_LOSSES):
            raise Unavailable("not before the upgrade is finished: run 'magnetar cluster finish-upgrade', then restart")
        return await run_to_end(self._skip_lost(session, name, only, force=force))

    async def _skip_lost(
        self, session: _OwnershipSession, name: TopicName, only: int, *, force: bool
    ) -> list[LostRange]:
        self._skipping[name.full] += 1
        try:
            for _ in range(SKIP_LOST_ATTEMPTS):
                await self.unload_topic(name)
                listed = ManagedLedgerRecord(session.metadata, name)
                skip = SkipLostRequest(
                    session.ledgers, listed, self.world, only=only, force=force,
                    open_compacted=partial(CompactedLedger.open, session.ledgers),
                )
                try:
                    found = await skip.run()
                except TopicFenced:
                    continue
                await self.unload_topic(name)  # a load that had begun before may have the former list
                return found
        finally:
            self._skipping -= Counter([name.full])
        raise Busy(f"topic {name} changed {SKIP_LOST_ATTEMPTS} times while it was looked at; try again", topic=name)

    async def check_topic_deletable(self, name: TopicName, *, force: bool) -> int:
        """Raises the error that `delete_topic` would raise now, such as Busy, TransactionsOpen, NotOwner or
        TopicNotFound. Otherwise returns the incarnation of the topic that `delete_topic` would delete. Changes nothing,
        but loads the topic."""
        topic = await self.load_topic(name, create=False)
        await topic.check_delete(force=force)
        return topic.incarnation

    async def delete_topic(
        self, name: TopicName, *, force: bool, abort: bool | None = None, incarnation: int = 0, inactive: bool = False
    ) -> None:
        """Deletes a topic: first its record, then its ledgers. So no record names a deleted ledger, even after a crash
        between the two steps. `abort`: whether open transactions of the topic are aborted (True) or make the deletion
        fail (False); None: the same as `force`. `incarnation`: the topic that is meant, 0 for any of this name;
        `inactive`: deletes the topic only if it is still inactive. Raises the errors of `Topic.delete` and
        `load_topic`.

        Until its record is deleted, the ended topic stays loaded and refuses every client. If it could be loaded again
        before, it would confirm publishes into a ledger that no record names. If the caller is cancelled, the deletion
        still runs to its end.
        """
        session = self._open()
        topic = await self.load_topic(name, create=False)
        check_incarnation(name, topic.incarnation, incarnation)
        abort = force if abort is None else abort
        await run_to_end(self._delete(session, topic, force=force, abort=abort, inactive=inactive))

    async def _delete(
        self, session: _OwnershipSession, topic: Topic, *, force: bool, abort: bool, inactive: bool
    ) -> None:
        name = topic.name
        try:
            ledger_ids = await topic.delete(force=force, abort=abort, inactive=inactive)
            if name.persistent:
                still = await session.catalog.make_topic_unchanged_check(name, topic.log.record)
                if still is None:
                    return  # another call has deleted it, with all that was its
                forget = partial(session.catalog.delete_topic_record, name, ledger_ids, still)
                if name.is_partition:
                    await forget()
                else:
                    await session.grants.delete_topic_grants(name, still)
                    await session.schemas.delete_schemas_with_topic(name, forget)
            elif not name.is_partition:
                await session.grants.delete_topic_grants(name)
        except BadVersion as error:
            raise NotOwner(f"topic {name} was taken over or made anew while it was deleted", topic=name) from error
        finally:
            if topic.is_ended and self.loaded.get(name.full) is topic:
                del self.loaded[name.full]
        await session.ledgers.delete(*ledger_ids)

    def _get_resource_group(self, name: str) -> Policies:
        """Returns the rates of a resource group, as policies of a namespace."""
        return self._session.policies.get_resource_group_nowait(name) if self._session is not None else Policies()

    def _policies_changed(self, namespace: NamespaceName) -> None:
        """Applies the new policies to the loaded topics of the namespace."""
        if self._session is not None:
            for topic in self.loaded.values():
                if topic.name.namespace_name == namespace:
                    topic.apply(self._session.policies.get_applied_policies_nowait(topic.name))

    def _apply_runtime(self, changed: RuntimeSettings) -> None:
        """Applies the settings that are changed for all brokers while they run."""
        if changed.log_level != self._runtime.log_level:
            source = "the dynamic setting log_level" + ("" if changed.log_level else " was deleted")
            logs.set_level(changed.log_level, source)
        self._runtime = changed
        if self._session is not None:
            self._session.catalog.auto_creation = self.auto_topic_creation

    @property
    def shared_rates(self) -> list[SharedRates]:
        """Returns the rates of the namespaces and tenants that have a limit in sum over brokers and topics here."""
        return list(self._rates.shared.values())

    @property
    def balance(self) -> OnOff:
        """Returns whether brokers balance their load ("on" or "off"): the value that an operator set while the broker
        runs, otherwise the configured one."""
        return self._runtime.balance or self.config.balance

    @property
    def metrics_topics(self) -> MetricsLevel:
        """Returns which topics have metrics of their own: the value that an operator set while the broker runs,
        otherwise the configured one."""
        return self._runtime.metrics_topics or self.config.metrics_topics

    @property
    def auto_topic_creation(self) -> bool:
        """Returns True if a client's first use of a topic creates it, unless the namespace's policy says otherwise.
        This is the value that an operator set while the broker runs, otherwise the configured one."""
        changed = self._runtime.auto_topic_creation
        return self.config.auto_topic_creation if changed is None else changed

    async def maintain_topics(self) -> None:
        """Runs the maintenance of each loaded topic once (such as expiry and trimming), deletes unused topics if their
        policies say so, and unloads idle ones. Only logs errors of single topics."""
        await self._load_released_topics()
        await self._maintain(list(self.loaded.values()))

    async def maintain_topics_in_buckets(self, interval_s: float) -> None:
        """Runs the maintenance of each loaded topic once, as `maintain_topics`, within about `interval_s` seconds: of
        TOPICS_PER_BUCKET topics, then of the next ones, with pauses of equal lengths. While backlog quotas block the
        producers of topics, these topics are maintained every BLOCKED_CHECK_INTERVAL_S, too. The broker calls this
        again and again. Must not be called twice at a time."""
        await self._load_released_topics()
        topics = list(self.loaded.values())
        buckets = max(1, -(-len(topics) // TOPICS_PER_BUCKET))
        if is_measured := len(topics) > TOPICS_WALKED_ON_REQUEST:
            self.survey.begin_round()
        else:
            self.survey.stop_rounds()
        for bucket in range(buckets):
            await self._pause_maintenance(interval_s / buckets)
            if buckets == 1:
                topics = list(self.loaded.values())
            part = topics[bucket * TOPICS_PER_BUCKET : (bucket + 1) * TOPICS_PER_BUCKET]
            await self._maintain(part)
            if is_measured:
                await self.survey.add_to_round([each for each in part if not each.is_ended])
        if is_measured:
            self.survey.end_round()

    async def _pause_maintenance(self, seconds: float) -> None:
        clock = self.world.clock
        until = clock.monotonic() + seconds
        while (left := until - clock.monotonic()) > 0:
            is_blocking = self.is_blocking_producers
            # no shorter wait: of a difference that is rounded away no time passes
            await asyncio.sleep(max(min(left, BLOCKED_CHECK_INTERVAL_S) if is_blocking else left, ALARM_RESOLUTION_S))
            if is_blocking and clock.monotonic() < until:
                await self._maintain(list(self._blocking))

    async def _maintain(self, topics: Sequence[Topic]) -> None:
        await run_maintenance([topic.maintenance for topic in topics], TOPICS_MAINTAINED_AT_ONCE, self.world.clock)
        inactive, idle, turns = list[Topic](), list[Topic](), EventLoopSlices(self.world.clock)
        for topic in topics:
            if topic.is_ended:
                continue
            if topic.maintenance.holds_for_backlog:
                self._blocking[topic] = None
            if topic.maintenance.is_inactive():
                inactive.append(topic)
            elif topic.maintenance.why_stays_loaded(self.config.unload_idle_s) is None:
                idle.append(topic)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        if self._blocking:
            self._blocking = {each: None for each in self._blocking if self._is_blocking(each)}
        for start in range(0, len(idle), TOPICS_MAINTAINED_AT_ONCE):
            await run_together(
                [self._unload_idle(topic) for topic in idle[start : start + TOPICS_MAINTAINED_AT_ONCE]], "topic-idle"
            )
        await self._delete_inactive(inactive)

    async def _unload_idle(self, topic: Topic) -> None:
        """Unloads a topic if it is still idle. Whoever asks for it meanwhile waits until it is closed, and loads it
        again."""
        name = topic.name.full
        if (
            self.loaded.get(name) is not topic or self._session is None or not self._session.settled
            or name in self.searched or topic.registry.changing.locked()
            or topic.maintenance.why_stays_loaded(self.config.unload_idle_s) is not None
        ):  # fmt: skip
            return
        del self.loaded[name]
        self.idle_unloads += 1
        if (release_s := topic.maintenance.find_release_time_s()) < math.inf:
            heappush(self._releases, (release_s, name))
        _LOG.debug("topic %s is idle: it is unloaded", name)
        ending = self._unloading[name] = self._ending.spawn(self._close_topic(topic), f"unload of {name}")
        ending.add_done_callback(lambda _: self._unloading.pop(name, None))
        await asyncio.wait([ending])

    async def _load_released_topics(self) -> None:
        """Loads the idle topics that were unloaded with messages whose retention has ended since, so that maintenance
        deletes them. Leaves out topics of bundles that this broker does not own any more."""
        session, now, due = self._session, self.world.clock.monotonic(), list[str]()
        if session is None or not session.settled:
            return
        while self._releases and self._releases[0][0] <= now and len(due) < TOPICS_PER_BUCKET:
            due.append(heappop(self._releases)[1])

        async def load(name: TopicName) -> None:
            try:
                namespace = await session.catalog.get_cached_namespace(name.namespace_name)
                if session.ownership.is_owned(session.ownership.owner_record_path(name, namespace)):
                    await self.load_topic(name, create=False)
            except MagnetarError as error:
                _LOG.debug("%s is not loaded for its retention: %s", name, error)

        for start in range(0, len(due), TOPICS_MAINTAINED_AT_ONCE):
            part = [TopicName.parse(each) for each in due[start : start + TOPICS_MAINTAINED_AT_ONCE]]
            await run_together([load(each) for each in part if each.full not in self.loaded], "topic-release")

    async def _delete_inactive(self, inactive: Sequence[Topic]) -> None:
        for topic in inactive:
            _LOG.info("%s: unused for %d s: it is deleted", topic.name, topic.applied.inactive_s)
            by_force = topic.applied.inactive_mode != "delete_when_no_subscriptions"
            try:
                await self.delete_topic(topic.name, force=by_force, abort=False, inactive=True)
            except MagnetarError as error:
                _LOG.warning("%s is inactive and not deleted: %s", topic.name, error)

    async def find_orphans(self, *, remove: bool, unexplained: bool = False) -> tuple[OrphanSearchResult, list[Orphan]]:
        """Searches the cluster for orphaned ledgers (broker/cluster/orphans.py). With `remove`, deletes the orphans;
        with `unexplained`, also deletes orphans whose owner has no record. Returns (the result of the search, the
        deleted orphans). Raises the errors of `delete_orphans`."""
        session = self._open()
        found = await find_orphans(session.metadata, self.world.clock.wall_ms(), self.config.orphan_age_s)
        for missing in found.missing:
            _LOG.error("%s lists ledger %d, which does not exist: its data is lost", missing.topic, missing.ledger_id)
        left = [each for each in found.orphans if each.unexplained]
        if left and not unexplained:
            _LOG.warning(
                "%d ledgers (%s) are of topics or subscriptions without a record, or with a younger one: they stay; "
                "`magnetar ledgers orphans` shows them", len(left), ", ".join(str(each.ledger_id) for each in left[:5]),
            )  # fmt: skip
        if not remove:
            return found, []
        return found, await delete_orphans(session.metadata, session.ledgers, found.orphans, unexplained=unexplained)

    async def delete_orphans_if_first_broker(self) -> None:
        """Deletes the orphaned ledgers of the cluster, if this broker is the first of all brokers by name; so only one
        broker of the cluster does it. Deletes only ledgers that this process saw as orphans `orphan_age_s` ago, because
        the age of a ledger is measured by the clocks of two brokers, which may be wrong. Raises the errors of
        `find_orphans`."""
        names = sorted(each.name for each in await self.list_brokers())
        if names[:1] != [self.name]:
            self._orphans_since_s.clear()  # what it saw as an orphan then may have been named meanwhile
            return
        found, _ = await self.find_orphans(remove=False)
        session, now_s = self._open(), self.world.clock.monotonic()
        self._orphans_since_s = {o.ledger_id: self._orphans_since_s.get(o.ledger_id, now_s) for o in found.orphans}
        old_s = now_s - self.config.orphan_age_s
        old = [each for each in found.orphans if self._orphans_since_s[each.ledger_id] <= old_s]
        await delete_orphans(session.metadata, session.ledgers, old)

    @property
    def is_blocking_producers(self) -> bool:
        """Returns True if the backlog quota of any loaded topic blocks its producers, as the last maintenance of the
        topic found."""
        return any(map(self._is_blocking, self._blocking))

    def _is_blocking(self, topic: Topic) -> bool:
        return topic.maintenance.holds_for_backlog and self.loaded.get(topic.name.full) is topic
