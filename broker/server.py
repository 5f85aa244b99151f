"""The broker process: owns topics for a while, keeps nothing.

    broker = await Broker.start(world, config, metadata)     serves when this returns
    broker.endpoint                                          where clients reach it
    await broker.close()                                     in order: topics, bundles, streams

A topic is loaded when somebody asks for it and its bundle is ours, once, however many ask. When the metadata session
is lost, all topics are dropped at once (another broker may own them already) and the broker starts over in a new
session if it can have one (`new_session`), else it serves nothing: `wait_stopped` returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..bookie.ledger import LedgerClient, LedgerConfig
from ..metadata.records import BrokerRecord, NamespaceRecord
from ..metadata.store import MetadataStore
from ..proto.errors import MagnetarError, NotOwner, SessionExpired, Unavailable
from ..proto.names import NamespaceName, TopicName
from ..runtime.network import Endpoint, Serving
from ..runtime.world import World
from .cache import TailCache
from .catalog import Catalog
from .cluster_view import brokers
from .config import BrokerConfig
from .ownership import Ownership
from .topic import Topic

_LOG = logging.getLogger("magnetar.broker")

NewSession = Callable[[], Awaitable[MetadataStore]]
RENEW_RETRY_S = 1.0
"""Between two tries to get a new metadata session."""

CLOSED_AT_ONCE = 100
"""Topics that are unloaded at the same time when the broker closes."""


class Broker:
    """Starts with `Broker.start`. Services call `topic`, `lookup`, `catalog`; nothing else loads or ends topics."""

    def __init__(
        self, world: World, config: BrokerConfig, metadata: MetadataStore, new_session: NewSession | None = None
    ) -> None:
        config.validate()
        self.world = world
        self.config = config
        self.metadata = metadata
        self.cache = TailCache(config.cache_bytes)
        self.topics: dict[str, Topic] = {}
        self._new_session = new_session
        self._loading: dict[str, asyncio.Task[Topic]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._serving: Serving | None = None
        self._stopped = asyncio.Event()
        self._closing = False
        self._next_id = 0
        self._name = config.name or f"broker-{world.rng.randbytes(4).hex()}"
        self._begin(metadata)

    def _begin(self, metadata: MetadataStore) -> None:
        """What lasts as long as a metadata session."""
        config = self.config
        self.metadata = metadata
        self.catalog = Catalog(
            self.world, metadata, bundles=config.namespace_bundles, auto_creation=config.auto_topic_creation
        )
        self.ledgers = LedgerClient(
            self.world, metadata,
            LedgerConfig(
                ensemble_size=config.ensemble_size, write_quorum=config.write_quorum, ack_quorum=config.ack_quorum
            ),
        )  # fmt: skip

    @classmethod
    async def start(
        cls, world: World, config: BrokerConfig, metadata: MetadataStore, new_session: NewSession | None = None
    ) -> Broker:
        broker = cls(world, config, metadata, new_session)
        await broker._start()
        return broker

    async def _start(self) -> None:
        from .services.admin import AdminService
        from .services.broker import BrokerService

        services = [("Broker", BrokerService(self)), ("Admin", AdminService(self))]
        self._serving = await self.world.network.serve(self.config.listen, services)
        try:
            await self._enter()
        except BaseException:
            await self._serving.close()
            raise
        self._spawn(self._watch_session(), "broker-session")
        self._spawn(self._trim_all(), "broker-trim")

    async def _enter(self) -> None:
        await self.catalog.ensure_default()
        self.ownership = Ownership(self.metadata, BrokerRecord(name=self._name, endpoint=str(self.endpoint)))
        await self.ownership.register()

    @property
    def name(self) -> str:
        return self._name

    @property
    def endpoint(self) -> Endpoint:
        """Where clients reach it."""
        assert self._serving is not None, "the broker listens"
        listening = self._serving.endpoint
        advertised = self.config.advertised
        if advertised is None:
            return listening
        return advertised if advertised.port else Endpoint(advertised.host, listening.port)

    def next_id(self) -> int:
        """A number for a producer or consumer, never used twice in this process."""
        self._next_id += 1
        return self._next_id

    # ------------------------------------------------------------------ ownership
    async def lookup(self, name: TopicName) -> BrokerRecord:
        """The broker that serves the topic. The topic need not exist."""
        self._check_open()
        policies = await self.catalog.namespace(name.namespace_name)
        return await self.ownership.owner(name, policies)

    def _check_open(self) -> None:
        if self._closing or self.ownership.lost:
            raise Unavailable("this broker is going away; ask another one")

    # ------------------------------------------------------------------ topics
    async def topic(self, name: TopicName, *, create: bool = True) -> Topic:
        """The loaded topic. NotOwner: another broker serves it; TopicNotFound, NotAllowed, DataLost, Unavailable."""
        found = self.topics.get(name.full)
        if found is not None:
            return found
        self._check_open()
        loading = self._loading.get(name.full)
        if loading is None:
            loading = self._loading[name.full] = asyncio.create_task(self._load(name, create))
            loading.add_done_callback(lambda _: self._loading.pop(name.full, None))
        return await asyncio.shield(loading)

    async def _load(self, name: TopicName, create: bool) -> Topic:
        policies = await self.catalog.namespace(name.namespace_name)
        owner = await self.ownership.owner(name, policies)
        if owner.name != self._name:
            raise NotOwner(f"topic {name} is served by {owner.endpoint}; look it up again", owner=owner.endpoint)
        if create:
            await self.catalog.ensure_stored(name)
        ownership = self.ownership
        topic = Topic(
            self.world, self.metadata, self.ledgers, self.cache, self.config, name, policies,
            owned=lambda: ownership.owns(name, policies), on_lost=self._lost,
        )  # fmt: skip
        await topic.open()
        if self._closing or ownership.lost:
            await topic.close()
            self._check_open()
        self.topics[name.full] = topic
        return topic

    def _lost(self, topic: Topic) -> None:
        if self.topics.get(topic.name.full) is topic:
            del self.topics[topic.name.full]
        self._spawn(self._bury(topic), f"end of {topic.name}")

    async def _bury(self, topic: Topic) -> None:
        try:
            await topic.close()
        except MagnetarError as error:
            _LOG.warning("%s: %s", topic.name, error)

    async def unload(self, name: TopicName) -> None:
        """Closes the topic here in order; the next lookup loads it again, here or elsewhere."""
        topic = self.topics.pop(name.full, None)
        if topic is not None:
            await topic.close()

    async def delete(self, name: TopicName, *, force: bool) -> None:
        """Record first, then ledgers: what stays behind after a crash belongs to nobody."""
        topic = await self.topic(name, create=False)
        ledger_ids = await topic.delete(force=force)
        self.topics.pop(name.full, None)
        await self.catalog.forget_topic(name)
        for ledger_id in ledger_ids:
            await self.ledgers.delete(ledger_id)

    def refresh_policies(self, namespace: NamespaceName, policies: NamespaceRecord) -> None:
        """Loaded topics of the namespace take the new policies at once; on other brokers when they are loaded."""
        for topic in self.topics.values():
            if topic.name.namespace_name == namespace:
                topic.policies = policies

    # ------------------------------------------------------------------ upkeep
    def _spawn(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task: asyncio.Task[object] = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _trim_all(self) -> None:
        while True:
            await asyncio.sleep(self.config.trim_interval_s)
            for topic in list(self.topics.values()):
                try:
                    await topic.trim()
                except MagnetarError as error:
                    _LOG.warning("%s: nothing trimmed: %s", topic.name, error)

    async def _watch_session(self) -> None:
        while True:
            await self.metadata.wait_session_lost()
            if self._closing:
                return
            _LOG.error("the metadata session is lost: all topics are dropped")
            self.ownership.lost = True
            error = SessionExpired("the broker's metadata session is lost")
            for topic in list(self.topics.values()):
                topic.lose(error)
            if self._new_session is None:
                self._stopped.set()
                return
            await self._renew(self._new_session)

    async def _renew(self, new_session: NewSession) -> None:
        await self.ledgers.close()
        while True:
            try:
                self._begin(await new_session())
                await self._enter()
                return
            except MagnetarError as error:
                _LOG.warning("no new metadata session yet: %s", error)
            await asyncio.sleep(RENEW_RETRY_S)

    async def wait_stopped(self) -> None:
        """Returns when the broker can serve nothing any more: its process should end and start again."""
        await self._stopped.wait()

    async def close(self) -> None:
        """Idempotent. The metadata session stays the caller's."""
        if self._closing:
            return
        self._closing = True
        if self._loading:
            await asyncio.gather(*self._loading.values(), return_exceptions=True)
        topics = list(self.topics.values())
        for start in range(0, len(topics), CLOSED_AT_ONCE):
            await asyncio.gather(*[self._bury(topic) for topic in topics[start : start + CLOSED_AT_ONCE]])
        self.topics.clear()
        if not self.ownership.lost:
            try:
                await self.ownership.release_all()
            except MagnetarError as error:
                _LOG.warning("bundles are not given back in order: %s", error)
        assert self._serving is not None, "a broker that closes has started"
        await self._serving.close(self.config.close_grace_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.ledgers.close()
        self._stopped.set()

    async def brokers(self) -> list[BrokerRecord]:
        """All that are registered."""
        return await brokers(self.metadata)
