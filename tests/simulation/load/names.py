"""Names that come back, beside the other load of a simulation: a topic that strikes delete and make anew (`anew`).

One topic, deduplicated, which keeps everything. All the while, under the names that they always have,

    writer      sends values with one of two schemas (the same fields in another order), some sessions few, some many
    teller      sends values in transactions, which are open when the topic goes
    s           an exclusive subscription
    readers     one from the beginning that stays, others from ids of earlier messages, mostly of an earlier life

A strike deletes the topic, or the subscription, or the topic's schemas, or opens a producer under the name of another
one; some deletions are late (strikes/late.py). Clients go on, and often make the topic anew before the operator does.
In the end, when all is healed, half of the seeds do so once more. What is judged: verdict/lives.py.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.common.errors import Result, Timeout
from magnetar.client.model.message import Message
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.record import Integer, Record, String
from magnetar.client.model.schema import AvroSchema
from magnetar.client.model.settings import InitialPosition
from magnetar.client.produce.producer import Producer
from magnetar.metadata import paths
from magnetar.proto.errors import AlreadyExists, MagnetarError, NotFound
from magnetar.proto.policies import Policies
from tests.simulation.cluster import ADMIN, CLIENT, Cluster, GaveUp
from tests.simulation.security import ADMIN_ROLE
from tests.simulation.verdict.history import Id, id_of
from tests.simulation.verdict.lives import Group, Lives, Spoken, Stream

T = TypeVar("T")

NAMESPACE = "public/anew"
TOPIC = f"persistent://{NAMESPACE}/named"
SUBSCRIPTION = "s"
PATH, CURSOR_PATH = paths.topic("public", "anew", "named"), paths.cursor("public", "anew", "named", SUBSCRIPTION)
RETRY_S = 0.3
SESSIONS = (1, 5, 40)
"""Messages of a producer's life: so a later life of the topic has more or fewer than the one before."""
PAUSES_S = (0.02, 0.2, 0.6)
READS_S = 1.5
STILL_S = 3.0
"""A reader that is silent for so long has shown everything."""
AGAIN = ("topic", "topic", "subscription", "schemas", "producer")
LATE = 0.4
"""Of the deletions of a topic or a subscription, where another broker can take it over meanwhile."""


def _record(*fields: str) -> Any:
    kinds = {"value": String, "x": Integer, "y": Integer}
    return type("Named", (Record,), {name: kinds[name](required=True) for name in fields})


SCHEMAS = (_record("value", "x", "y"), _record("value", "y", "x"))
"""One name and the same fields: read with the other's definition, x is y."""


class NamesLoad:
    """`begin` and `finish` frame the other load; `anew` is a strike."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._simulation = cluster.simulation
        self._rng: random.Random = cluster.simulation.random_generator("names")
        self.lives = Lives(PATH, cluster.simulation.add_line, CURSOR_PATH)
        cluster.observer.on_record.append(self.lives.recorded)
        cluster.observer.on_topic.append(self.lives.committed)
        cluster.on_anew.append(self.anew)
        self._over = False
        self._numbers: dict[str, int] = {}
        self._known: list[MessageId] = []
        self._writer: Producer | None = None
        self._working: list[asyncio.Future[None]] = []
        self._watching: list[asyncio.Future[None]] = []
        self._ends = asyncio.Event()

    @property
    def figures(self) -> dict[str, int]:
        return {
            "lives": self.lives.life + 1, "lived": sum(self.lives.entries), "late": self._cluster.late_deletions
        }  # fmt: skip

    # ------------------------------------------------------------------ the beginning and the end
    async def begin(self) -> None:
        await self._operate("make the namespace", self._make_namespace)
        programs = (self._write(), self._tell())
        self._working = [self._simulation.spawn(CLIENT, program) for program in programs]
        watchers = (self._consume(), self._follow(), self._look_back())
        self._watching = [self._simulation.spawn(CLIENT, watcher) for watcher in watchers]

    async def finish(self) -> list[str]:
        """After healing; what was violated."""
        if self._rng.random() < 0.5:
            await self._topic_anew(self._rng)
            await asyncio.sleep(self._rng.choice((0.1, 3.0)))
        await self._operate("make a schema", partial(self._make_schema, SCHEMAS[0]))  # a late deletion took it
        self._over = True
        await asyncio.gather(*self._working)
        while self.lives.missing() and not self.lives.violations:
            for watcher in self._watching:
                if watcher.done():
                    watcher.result()
            await asyncio.sleep(0.5)
        shown = await self._simulation.spawn(CLIENT, self._read_all())
        self.lives.end(shown, self.lives.missing())
        for watcher in self._watching:
            watcher.cancel()
        return self.lives.violations

    async def _make_namespace(self, admin: AdminClient) -> None:
        with contextlib.suppress(AlreadyExists):
            await admin.create_namespace(NAMESPACE)
        await admin.set_namespace_policies(
            NAMESPACE, Policies(deduplication=True, retention_minutes=-1, retention_mib=-1)
        )

    def _client(self) -> Client:
        own = self._cluster.credentials(ADMIN_ROLE)
        return Client(self._cluster.service_url, own, 5, world=self._simulation.world(CLIENT))

    # ------------------------------------------------------------------ strikes
    def anew(self, rng: random.Random) -> None:
        what = rng.choice(AGAIN)
        if what in ("topic", "subscription") and len(self._cluster.broker_names) > 1:
            self._cluster.late = (what, TOPIC) if rng.random() < LATE else ("", "")
        acts: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "topic": self._topic_anew, "subscription": self._subscription_anew, "schemas": self._schemas_anew,
            "producer": self._producer_anew,
        }  # fmt: skip
        self._cluster.background(_awaited(acts[what](rng)))

    async def _topic_anew(self, rng: random.Random) -> None:
        """Until its life is over; who makes it again first, makes it."""
        life = self.lives.life
        pause_s = rng.choice((0.0, 0.0, 0.3))

        async def delete(admin: AdminClient) -> None:
            if self.lives.life == life and not self.lives.over:
                with contextlib.suppress(NotFound), self.lives.deleting("topic"):
                    await admin.delete_topic(TOPIC, force=True)

        async def create(admin: AdminClient) -> None:
            with contextlib.suppress(AlreadyExists):
                await admin.create_topic(TOPIC)

        await self._operate("delete the topic", delete)
        await asyncio.sleep(pause_s)
        await self._operate("make the topic", create)

    async def _subscription_anew(self, rng: random.Random) -> None:
        async def delete(admin: AdminClient) -> None:
            with contextlib.suppress(NotFound), self.lives.deleting("subscription"):
                await admin.delete_subscription(TOPIC, SUBSCRIPTION, force=True)

        await self._operate("delete the subscription", delete)

    async def _schemas_anew(self, rng: random.Random) -> None:
        async def delete(admin: AdminClient) -> None:
            with contextlib.suppress(NotFound):
                await admin.delete_schemas(TOPIC)

        await self._operate("delete the schemas", delete)
        await self._operate("make a schema", partial(self._make_schema, rng.choice(SCHEMAS)))

    @staticmethod
    async def _make_schema(kind: Any, admin: AdminClient) -> None:
        with contextlib.suppress(NotFound):  # the topic has gone meanwhile
            await admin.put_schema(TOPIC, AvroSchema(kind).info())

    async def _producer_anew(self, rng: random.Random) -> None:
        """The writer's session ends where it is, and another one has its name at once."""
        if self._writer is not None:
            self._simulation.add_line("the writer begins anew")
            self._simulation.spawn(CLIENT, self._writer.close()).add_done_callback(_heard)
            self._writer = None

    async def _operate(self, what: str, work: Callable[[AdminClient], Awaitable[None]]) -> None:
        """An operator's work, again until it has an outcome."""

        async def operate() -> None:
            own = self._cluster.credentials(ADMIN_ROLE)
            world = self._simulation.world(ADMIN)
            async with AdminClient(self._cluster.service_url, timeout_s=5.0, world=world, authentication=own) as admin:
                await work(admin)

        while True:
            try:
                await self._simulation.spawn(ADMIN, operate())
            except MagnetarError as error:
                self._simulation.add_line(f"names: cannot {what}: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)
            else:
                self._simulation.add_line(f"names: {what}")
                return

    # ------------------------------------------------------------------ producing
    def _next(self, program: str) -> str:
        self._numbers[program] = number = self._numbers.get(program, -1) + 1
        return f"{program}:{number}"

    async def _write(self) -> None:
        client, rng = self._client(), self._simulation.random_generator("names writer")
        while not self._over:
            kind = rng.choice(SCHEMAS)
            producer = await self._again("open a producer", lambda kind=kind: client.create_producer(
                TOPIC, "writer", AvroSchema(kind), send_timeout_millis=20_000, batching_enabled=rng.random() < 0.5,
                max_pending_messages=100,
            ))  # fmt: skip
            self._writer = producer
            pause_s = rng.choice(PAUSES_S)
            with contextlib.suppress(MagnetarError):  # it is closed, by a strike or for good
                for _ in range(rng.choice(SESSIONS)):
                    self._send(producer, kind, self._next("writer"))
                    await asyncio.sleep(rng.expovariate(1.0 / pause_s))
                    if self._over or self._writer is not producer:
                        break
            await self._leave(producer)
        await client.close()

    async def _leave(self, producer: Producer) -> None:
        """What was sent has its outcome."""
        with contextlib.suppress(MagnetarError):
            await self._cluster.call("flush", producer.flush())
        with contextlib.suppress(MagnetarError):
            await producer.close()

    def _send(self, producer: Producer, kind: Any, value: str) -> None:
        number = int(value.rpartition(":")[2])

        def answered(result: Result, message_id: MessageId) -> None:
            self._simulation.add_line(f"names: answer {value} {result.name} {message_id}")
            if result is Result.Ok:
                self._store(value, message_id)

        producer.send_nowait(kind(value=value, x=number, y=-1 - number), answered)
        self.lives.send(value)

    def _store(self, value: str, message_id: MessageId) -> None:
        self.lives.store(value, id_of(message_id))
        if message_id.ledger_id() >= 0:
            self._known.append(message_id)

    async def _tell(self) -> None:
        """A transaction is open for a while, and the topic may be another one when it ends."""
        client, rng, kind = self._client(), self._simulation.random_generator("names teller"), SCHEMAS[0]
        while not self._over:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            group = Group()
            self.lives.groups.append(group)
            producer: Producer | None = None
            try:
                producer = await client.create_producer(TOPIC, "teller", AvroSchema(kind), batching_enabled=False)
                txn = await client.transaction(timeout=20)
                for _ in range(rng.randint(1, 4)):
                    value = self._next("teller")
                    number = int(value.rpartition(":")[2])
                    group.values.append(value)
                    self.lives.send(value)
                    self._store(value, await producer.send(kind(value=value, x=number, y=-1 - number), txn=txn))
                    await asyncio.sleep(rng.choice((0.0, 0.5)))
                commits = rng.random() < 0.7
                await (txn.commit() if commits else txn.abort())
                group.outcome = commits
            except MagnetarError as error:
                self._simulation.add_line(f"names: {group.values} have no outcome: {error!r}"[:300])
            if producer is not None:
                await self._leave(producer)
        await client.close()

    # ------------------------------------------------------------------ consuming
    async def _consume(self) -> None:
        client, rng = self._client(), self._simulation.random_generator("names consumer")
        while True:
            stream = self.lives.opened(SUBSCRIPTION)
            try:
                consumer = await self._cluster.call("subscribe", client.subscribe(
                    TOPIC, SUBSCRIPTION, schema=AvroSchema(SCHEMAS[0]), initial_position=InitialPosition.Earliest,
                    receiver_queue_size=20, consumer_name="c",
                ))  # fmt: skip
                while rng.random() > 0.01:
                    message = await consumer.receive()
                    self._show(stream, message)
                    await consumer.acknowledge(message)
                await consumer.close()
            except (MagnetarError, GaveUp) as error:
                self._simulation.add_line(f"names: the consumer begins anew: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """A reader that stays."""
        await self._read(self._client(), MessageId.earliest, None)

    async def _look_back(self) -> None:
        client, rng = self._client(), self._simulation.random_generator("names readers")
        while True:
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            if self._known:
                old = rng.choice(self._known[:: rng.choice((1, 5))])
                await self._read(client, old, READS_S)

    async def _read(self, client: Client, start: MessageId, seconds: float | None) -> None:
        while True:
            stream = self.lives.opened(f"a reader from {start}")
            try:
                reader = await client.create_reader(
                    TOPIC, start, schema=AvroSchema(SCHEMAS[1]), receiver_queue_size=20
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        while True:
                            self._show(stream, await reader.read_next())
                await reader.close()
            except MagnetarError as error:
                self._simulation.add_line(f"names: {stream.name}: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)
            if seconds is not None:
                return

    async def _read_all(self) -> list[Spoken]:
        client = self._client()
        stream = self.lives.opened("the reader of the end")
        reader = await self._again("read", lambda: client.create_reader(
            TOPIC, MessageId.earliest, schema=AvroSchema(SCHEMAS[0])
        ))  # fmt: skip
        shown: dict[Id, str] = {}
        with contextlib.suppress(Timeout):
            while True:
                message = await reader.read_next(int(1000 * STILL_S))
                self._show(stream, message)
                shown[id_of(message.message_id())] = message.value().value
        await client.close()
        return [(value, id_) for id_, value in shown.items()]

    def _show(self, stream: Stream, message: Message) -> None:
        named, id_ = message.value(), id_of(message.message_id())
        number = int(named.value.rpartition(":")[2])
        self._simulation.add_line(f"names: {stream.name} shows {named.value} {message.message_id()}")
        self.lives.show(stream, named.value, id_, whole=(named.x, named.y) == (number, -1 - number))

    async def _again(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await self._cluster.call(what, work())
            except MagnetarError as error:
                self._simulation.add_line(f"names: cannot {what}: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)


async def _awaited(work: Awaitable[None]) -> None:
    await work


def _heard(done: asyncio.Future[None]) -> None:
    """A close that fails closes."""
    if not done.cancelled():
        done.exception()
