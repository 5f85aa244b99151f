"""Load through the whole path: producers and consumers of the SDK, and of Pulsar's protocol, on one topic, while things
break.

Each producer sends its numbered values without waiting; each consumer receives and acknowledges. After the faults the
cluster is healed; then every stored value must arrive on every subscription, and every backlog must become empty,
within LIVENESS_S of virtual time, also of a message that a new producer sends. Then the cluster must come to rest.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from magnetar.client.client import Client
from magnetar.client.common.errors import AlreadyClosed, ProducerQueueIsFull, PulsarException, Result, UnknownError
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.message import Message
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.produce.producer import Producer
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import TopicName
from tests.simulation.cluster import CLIENT, Cluster, GaveUp
from tests.simulation.load.names import NamesLoad
from tests.simulation.load.owners import OwnersLoad
from tests.simulation.load.pulsar import PulsarClient
from tests.simulation.load.roles import Roles
from tests.simulation.load.schedules import ScheduleLoad
from tests.simulation.security import ADMIN_ROLE, APP, CHANGING
from tests.simulation.strikes.frames import LATER_S
from tests.simulation.strikes.nemesis import Nemesis
from tests.simulation.strikes.operations import TOPIC
from tests.simulation.verdict.history import History, Sub, check, id_of
from tests.simulation.verdict.rest import LIVENESS_S, at_rest

T = TypeVar("T")

SEND_TIMEOUT_MS = 20_000
NACK_DELAY_MS = 500
FILTERED = "filtered"
REGIONS = ("", "us", "us", "us", "us", "eu")
LAGS_RATE, LAGS_S = 0.1, 8.0
"""How often, and for how long at most, the consumer of the filtered subscription is away."""
SAYS_CLOSED = {"unload", "kill-broker", "pause-broker", "expire-broker"}
"""Strikes after which a broker tells clients that their ids are closed."""
DELAYS_S = (0.1, 1.0, 5.0, 15.0, 40.0)
"""Half of them so long that a broker stores them in a bucket (they are not due within 10 s)."""


class TopicLoad:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._simulation = cluster.simulation
        self._options = cluster.options
        self._rng: random.Random = self._simulation.random_generator("load")
        self._delays: random.Random = self._simulation.random_generator("delays")
        subscriptions = [Sub("exclusive", True), Sub("shared", False)][: self._options.subscriptions]
        security = cluster.security
        self._roles = None if security is None else Roles(cluster, security, self)
        self._owners = None if security is None else OwnersLoad(cluster, security)
        if self._roles is not None:
            subscriptions[1:] = [Sub(CHANGING, False)]
        if self._options.filtered:
            subscriptions.append(Sub(FILTERED, self._options.seed % 3 == 0, filter="eu"))
        self._regions: random.Random = self._simulation.random_generator("regions")
        self._schedules = ScheduleLoad(cluster) if self._options.scheduled else None
        self._names = NamesLoad(cluster) if "anew" in self._options.times else None
        self.history = History(subscriptions, deduplicated=self._options.deduplication)
        self.violations: list[str] = []
        self._doors: random.Random = self._simulation.random_generator("doors")
        self._pulsar: PulsarClient | None = None
        self._producing = 0
        self._closing = False

    @property
    def figures(self) -> dict[str, int]:
        history = self.history
        return {
            "sent": len(history.sent), "stored": len(history.stored), "doubtful": len(history.doubtful),
            "delivered": sum(map(len, history.deliveries.values())),
            **({} if self._schedules is None else {"fires": self._schedules.fires}),
            **({} if self._names is None else self._names.figures),
            **({} if self._owners is None else {"refused": self._owners.refused}),
        }  # fmt: skip

    async def run(self) -> None:
        world = self._simulation.world(CLIENT)
        loops = []
        if self._roles is not None:
            await self._roles.grant()
            loops += await self._roles.begin()
        if self._owners is not None:
            await self._owners.begin()
        if self._names is not None:
            await self._names.begin()
        if self._schedules is not None:
            await self._schedules.begin()
        own = self._cluster.credentials(APP)
        client = Client(self._cluster.service_url, own, world=world, operation_timeout_seconds=15)
        if self._options.pulsar:
            endpoints = self._cluster.pulsar_endpoints
            self._pulsar = PulsarClient(world, endpoints, own, self._simulation.random_generator("pulsar"))
        consumers = [
            await self._subscribe_first(
                client if subscription.filter else self._one_of(client), subscription, number
            )
            for subscription in self.history.subscriptions
            if subscription.name != CHANGING
            for number in range(1 if subscription.exclusive else 2)
        ]
        loops += [self.in_client(loop) for loop in consumers]
        self._producing = self._options.producers
        producers = [
            self.in_client(self._produce(self._one_of(client), f"p{number}")) for number in range(self._producing)
        ]
        await Nemesis(self._cluster).run()
        await self._cluster.heal()
        await self._until_quiet(client, asyncio.gather(*producers), loops)
        if SAYS_CLOSED & set(self._options.times):
            await asyncio.sleep(LATER_S + 1)  # what was begun on a frame that came twice has failed by now
            self._fail_fast(loops)
        self.violations += check(self.history)
        self.violations += [] if self._pulsar is None else self._pulsar.violations
        if not self.violations:
            self.violations += await at_rest(self._cluster)

    def _one_of(self, client: Client) -> Any:
        """The SDK's client, or that of Pulsar's protocol: they have the same faces."""
        return self._pulsar if self._doors.random() < self._options.pulsar else client

    def in_client(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return self._simulation.spawn(CLIENT, coroutine)

    # ------------------------------------------------------------------ producing
    async def _produce(self, client: Client, name: str) -> None:
        """Every value once; a producer that is finished is replaced, the value that it refused goes to the next."""
        producer: Producer | None = None
        number = 0
        while number < self._options.messages:
            if producer is None:
                producer = await self._new_producer(client)
            value = f"{name}:{number}"
            try:
                self.send(producer, value)
                number += 1
            except ProducerQueueIsFull:
                await asyncio.sleep(0.05)
            except PulsarException as error:
                self._simulation.add_line(f"{name}: {error!r}")
                self._look_at(name, error)
                producer = None
            if self._rng.random() < 0.7:
                await asyncio.sleep(self._rng.expovariate(1.0 / self._options.pause_s))
        if producer is not None:
            await self._until_done("flush", producer.flush)
            await self._until_done("close", producer.close)

    async def _until_done(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await self._cluster.call(what, work())
                return
            except GaveUp:
                self._simulation.add_line(f"{what} again")
            except AlreadyClosed:  # whoever gives up a close has closed
                return

    async def _new_producer(self, client: Client) -> Producer:
        while True:
            try:
                return await self._cluster.call("open a producer", client.create_producer(
                    TOPIC, batching_enabled=self._options.batching, send_timeout_millis=SEND_TIMEOUT_MS,
                    max_pending_messages=100, **(self._summarizes() if isinstance(client, Client) else {}),
                ))  # fmt: skip
            except MagnetarError as error:
                self._simulation.add_line(f"no producer yet: {error!r}")
                await asyncio.sleep(0.5)

    def _summarizes(self) -> dict[str, Any]:
        """What a producer of the SDK does for filters. (With `batch_by` values of several regions have no order.)"""
        summarizes = self._options.filtered and self._options.batching and self._regions.random() < 0.6
        return {"filter_properties": ("region",)} if summarizes else {}

    def send(self, producer: Producer, value: str) -> None:
        padding = self._rng.randint(0, self._options.message_bytes_max)

        def answered(result: Result, message_id: MessageId) -> None:
            self._simulation.add_line(f"answer {value} {result.name} {message_id}")
            if result is Result.Ok:
                self.history.store(value, id_of(message_id))
                known = message_id.ledger_id() in self._cluster.observer.listed
                if not known and not (self._options.deduplication and message_id.ledger_id() < 0):
                    self.violations.append(f"28: {value} has a receipt of {message_id}, and no list has that ledger")
            else:
                self.history.doubt(value, result.name)

        due_ms = 0
        if self._delays.random() < self._options.delayed_rate:
            due_ms = self._now_ms + int(1000 * self._delays.choice(DELAYS_S))
        region = self._regions.choice(REGIONS) if self._options.filtered else ""
        more = {"properties": {"region": region}} if region else {}
        producer.send_nowait(f"{value} ".encode() + bytes(padding), answered, deliver_at=due_ms or None, **more)
        self.history.send(value, due_ms, region)

    @property
    def _now_ms(self) -> int:
        return self._simulation.world(CLIENT).clock.wall_ms()

    # ------------------------------------------------------------------ consuming
    async def _subscribe_first(self, client: Client, subscription: Sub, number: int) -> Coroutine[Any, Any, None]:
        """The subscription exists when this returns; its loop is what it returns."""
        consumer = await self._simulation.spawn(CLIENT, self._subscribe(client, subscription))
        return self._consume(
            client, subscription, consumer, self._simulation.random_generator(f"{subscription.name} {number}")
        )

    async def _subscribe(self, client: Client, subscription: Sub) -> Consumer:
        while True:
            try:
                return await self._cluster.call("subscribe", client.subscribe(
                    TOPIC, subscription.name,
                    consumer_type=ConsumerType.Exclusive if subscription.exclusive else ConsumerType.Shared,
                    initial_position=InitialPosition.Earliest, receiver_queue_size=50,
                    negative_ack_redelivery_delay_ms=NACK_DELAY_MS,
                    **({"filter": f"region = '{subscription.filter}'"} if subscription.filter else {}),
                ))  # fmt: skip
            except MagnetarError as error:
                self._simulation.add_line(f"{subscription.name}: no consumer yet: {error!r}")
                await asyncio.sleep(0.5)

    async def _consume(self, client: Client, subscription: Sub, consumer: Consumer, rng: random.Random) -> None:
        while True:
            try:
                message = await self._cluster.call("receive", consumer.receive())
                self.delivered(subscription.name, message)
                if subscription.filter and not self._closing and rng.random() < LAGS_RATE:
                    await self._until_done("close", consumer.close)  # it lags, and ledgers are sealed meanwhile
                    await asyncio.sleep(rng.uniform(0.0, LAGS_S))
                    consumer = await self._subscribe(client, subscription)
                    continue
                if rng.random() < self._options.nack_rate:
                    await consumer.negative_acknowledge(message)
                else:
                    await consumer.acknowledge(message)
            except GaveUp:
                continue
            except MagnetarError as error:
                if self._closing:
                    return
                self._simulation.add_line(f"{subscription.name}: {error!r}")
                self._look_at(subscription.name, error)
                await asyncio.sleep(0.2)
                consumer = await self._subscribe(client, subscription)

    def _look_at(self, whose: str, error: MagnetarError) -> None:
        """An SDK that ends by a fault of its own is replaced, and told of."""
        if isinstance(error, UnknownError) and "dead-task" not in self._options.times:
            self.violations.append(f"the SDK broke: {whose}: {error!r}")

    def delivered(self, subscription: str, message: Message) -> None:
        value = message.data().split(b" ")[0].decode()
        self._simulation.add_line(f"{subscription} gets {value} {message.message_id()}")
        self.history.deliver(
            subscription, value, id_of(message.message_id()), message.redelivery_count(),
            None if {"clock-jump", "clock-skew"} & set(self._options.times) else self._now_ms,
        )  # fmt: skip

    # ------------------------------------------------------------------ the end
    async def _until_quiet(
        self, client: Client, producing: asyncio.Future[Any], loops: list[asyncio.Future[None]]
    ) -> None:
        """Liveness: all sent and answered, all delivered, all backlogs empty. Else says what is missing."""
        begun = self._simulation.loop.time()
        try:
            async with asyncio.timeout(LIVENESS_S) as limit:
                await producing
                await self.in_client(self._probe(client))
                if self._roles is not None:
                    await self._roles.finish()
                if self._owners is not None:
                    self.violations += await self._owners.finish()
                if self._names is not None:
                    self.violations += await self._names.finish()
                if self._schedules is not None:
                    self.violations += await self._schedules.finish()
                while any(self.history.missing(subscription.name) for subscription in self.history.subscriptions):
                    self._fail_fast(loops)
                    await asyncio.sleep(0.5)
                while not await self._simulation.spawn("admin", self._backlog_is_empty()):
                    self._fail_fast(loops)
                    await asyncio.sleep(1.0)
        except TimeoutError:
            if not limit.expired():
                raise
            self.violations.append(f"stuck: not quiet {LIVENESS_S} s after healing; {self._state()}")
        self._simulation.add_line(f"quiet after {self._simulation.loop.time() - begun:.3f} s")

    async def _probe(self, client: Client) -> None:
        """Clients make progress again: a message of a new producer is stored."""
        for number in range(10_000):
            producer = await self._new_producer(client)
            self.send(producer, f"probe:{number}")
            with contextlib.suppress(MagnetarError):
                await producer.flush()
                await producer.close()
            if f"probe:{number}" in self.history.stored:
                return

    @staticmethod
    def _fail_fast(loops: list[asyncio.Future[None]]) -> None:
        for loop in loops:
            if loop.done():
                loop.result()

    def _state(self) -> str:
        history = self.history
        missing = {name.name: history.missing(name.name)[:3] for name in history.subscriptions}
        answered = len(history.stored) + len(history.doubtful)
        return f"{len(history.sent)} sent, {answered} answered, missing {missing}, last statistics {self._statistics!r}"

    _statistics = ""

    async def _backlog_is_empty(self) -> bool:
        own = self._cluster.credentials(ADMIN_ROLE)
        client = Client(self._cluster.service_url, own, world=self._simulation.world("admin"))
        try:
            topic = TopicName.parse(TOPIC)
            reply: wire.TopicStatsReply = await client.connections.ask_owner(
                topic, "TopicStats", wire.Name(name=TOPIC), service="Admin"
            )
        except MagnetarError as error:
            self._statistics = repr(error)
            return False
        finally:
            await client.close()
        self._statistics = " ".join(str(reply).split())
        return all(each.backlog == 0 and each.unacked == 0 for each in reply.subscriptions)
