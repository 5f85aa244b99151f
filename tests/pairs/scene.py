"""A scene: one topic, who sends to it and who receives from it, and what happens between two waves of messages.

Features change a scene before it begins (tests/pairs/features.py). Then it is played:

1. the topic is made with its policies, producers and views are opened;
2. the first wave is sent, each message as one of `shapes` says: plainly, in a transaction, as a half message, delayed;
3. `events` happen: those that wait until the first wave was received, then those under which the second wave is sent;
4. the second wave is sent, perhaps by another client;
5. each view receives until it has what it must have, and a moment longer; then the judge looks at all of them.

A wave has a message of three chunks (where chunks are on), an empty one and one without a value; some fail in the
application and become dead letters, some are sent again later; a part of the transactions and halves is called off.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import magnetar
from magnetar.asyncio import Client, CompressionType, ConsumerType, InitialPosition
from magnetar.client.admin import AdminClient
from magnetar.proto.expiry import EXPIRES_AT_PROPERTY
from magnetar.proto.policies import Policies
from magnetar.schema import AvroSchema
from tests.pairs.clients import (
    Blocking,
    Body,
    got_of,
    priority_of,
    read_by_spark,
    send_by_outbox,
    send_by_spark,
    send_each,
    told,
    value_of,
)
from tests.pairs.judge import Got, Outcome, Sent, View, judge, stale

WAVE = 8
KEYS = ("a", "b", "ключ")
DEADLINE_S = 30.0
QUIET_S = 0.15
"""How long a view receives on when it has all: for what comes twice, or should not come at all."""
OVER_MS = 1
"""A time that is over, in ms since the epoch: a message that expires then is delivered to no subscription."""
LARGE = 70_000
ENTRY_BYTES = 32 << 10
"""What the servers of scenes take as one entry (max_message_bytes)."""
FAILS, LATER, CALLED_OFF = (3, 4), 5, (1, 7)
"""Of each wave: who fails in the application, who is sent again later, whose transaction or half message is dropped."""


@dataclass
class Server:
    """Where scenes are played. `gather` waits until all scenes that a kill is for are there; `kill` kills the server
    when all of them ask for it, and starts it."""

    url: str
    pulsar_url: str
    folder: Path
    keys: tuple[str, str]
    gather: Callable[[], Awaitable[None]] | None = None
    kill: Callable[[], Awaitable[None]] | None = None
    spark: Any = None


@dataclass(order=True)
class Event:
    """`meanwhile`: the second wave is sent while it happens."""

    order: int
    run: Callable[[Scene], Awaitable[None]] = field(compare=False)
    meanwhile: bool = field(default=False, compare=False)


class Scene:
    def __init__(self, name: str, number: int, server: Server) -> None:
        self.name = name
        self.server = server
        self.topic = f"persistent://public/default/{re.sub('[^a-z0-9]+', '-', name.lower())}-{number}"
        self.dead_topic = f"{self.topic}-dead"
        self.folder = server.folder / f"scene-{number}"
        self.partitions = 0
        self.levels = 0  # of priority, each a topic
        self.policies: dict[str, Any] = {}
        self.produce: dict[str, Any] = {"batching_enabled": False, "send_timeout_millis": 60_000}
        self.consume: dict[str, Any] = {}
        self.type = ConsumerType.Exclusive
        self.consumers = 1
        self.shapes = ["plain"]
        self.large: tuple[int, ...] = ()  # of each wave
        self.letters: set[int] = set()  # numbers that have to be dead letters
        self.again: set[int] = set()  # numbers that the application sends again later
        self.ends: dict[int, int] = {}  # numbers that expire, and when, in ms since the epoch
        self.failures: dict[int, int] = {}  # how often the application fails of a number; -1: always
        self.body: type[Body] = Body
        self.typed = self.encrypted = self.pattern = self.named = self.acks_in_transactions = False
        self.second = "sdk"  # who sends the second wave
        self.main = View("consumer")
        self.extra: list[Any] = []
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.sent: list[Sent] = []
        self.spaced = False  # the first wave is received before the second is sent
        self.apart = False  # no order between the waves
        self.limit_s = 4 * DEADLINE_S
        self.disturbed = False  # who serves it changes: what was received may come again

    # ------------------------------------------------------------------------------ what features say
    def on(self, order: int, run: Callable[[Scene], Awaitable[None]], meanwhile: bool = False) -> None:
        self.events.append(Event(order, run, meanwhile))

    @property
    def topics(self) -> list[str]:
        return self._by_level(self.topic) if self.levels else [self.topic]

    def _by_level(self, topic: str) -> list[str]:
        return [f"{topic}-priority-{level}" for level in range(self.levels)]

    def shared(self) -> None:
        if self.type is ConsumerType.Exclusive:
            self.type = ConsumerType.Shared
            self.main.ordered = False

    @property
    def keys(self) -> tuple[str, str] | None:
        return self.server.keys if self.encrypted else None

    def vary(self, rng: random.Random) -> None:
        """What no feature asks for: drawn for longer runs."""
        if self.type is ConsumerType.Exclusive:
            self.type = rng.choice((ConsumerType.Exclusive, ConsumerType.Failover))
        if self.type is ConsumerType.Shared:
            self.consumers = rng.choice((1, 2, 3))
        if "compression_type" in self.produce:
            codecs = [each for each in CompressionType if each is not CompressionType.NONE]
            self.produce["compression_type"] = rng.choice(codecs)
        self.consume["receiver_queue_size"] = rng.choice((1, 2, 5, 1000))
        self.consume["ack_receipt_enabled"] = rng.random() < 0.5

    # ------------------------------------------------------------------------------ opening and closing
    async def play(self) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        async with Client(self.server.url, operation_timeout_seconds=60) as self.client:  # noqa: SIM117
            async with AdminClient(self.server.url) as self.admin, asyncio.timeout(self.limit_s):
                await self.make()
                await self.open()
                try:
                    await self._play()
                finally:
                    await self.close()
        return self.faults

    async def make(self) -> None:
        for topic in self.topics:
            await self.admin.create_topic(topic, partitions=self.partitions)
            if self.policies:
                await self.admin.set_topic_policies(topic, Policies(**self.policies))

    async def open(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.opened: list[Any] = []
        self.producer = await self.open_producer()
        await self.join()
        self.dead: View | None = None
        if self.letters:
            self.dead = View("dead letters")
            topics = [self.dead_topic, *self._by_level(self.dead_topic)]  # of the server, and of the SDK
            consumer = await self.subscribe("dead", topic=topics, consumer_type=ConsumerType.Exclusive)
            self.tasks.append(asyncio.create_task(self._follow(consumer, self.dead)))
        for each in self.extra:
            if each.view is not None and each.is_durable:
                each.view.lacks |= {number for number, at_ms in self.ends.items() if at_ms == OVER_MS}
            await each.open(self)

    async def join(self) -> None:
        """The application's consumers."""
        self.joined: list[tuple[Any, asyncio.Task[None]]] = []
        for number in range(self.consumers):
            consumer = await self.subscribe("s", consumer_name=f"c{number}", **self.consume)
            self.joined.append((consumer, asyncio.create_task(self._receive(consumer))))
            self.tasks.append(self.joined[-1][1])

    async def leave(self) -> None:
        for consumer, task in self.joined:
            self.tasks.remove(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.opened.remove(consumer)
            await consumer.close()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for each in [*self.extra, *self.opened]:
            await each.close()

    def crypto(self) -> Any:
        return magnetar.CryptoKeyReader(*self.server.keys) if self.encrypted else None

    async def open_producer(self, named: bool = True) -> Any:
        options = dict(self.produce)
        if self.typed:
            options["schema"] = AvroSchema(self.body)
        if self.named and named:
            options["producer_name"] = f"p-{self.name}"
        if self.encrypted:
            options |= {"encryption_key": "a", "crypto_key_reader": self.crypto()}
        producer = await self.client.create_producer(self.topic, **options)
        self.opened.append(producer)
        return producer

    async def subscribe(self, name: str, topic: Any = None, **options: Any) -> Any:
        if topic is None:
            topic = re.compile(re.escape(self.topic)) if self.pattern else self.topic
        defaults: dict[str, Any] = {
            "consumer_type": self.type, "initial_position": InitialPosition.Earliest,
            "crypto_key_reader": self.crypto(), "negative_ack_redelivery_delay_ms": 30,
        }  # fmt: skip
        if self.typed:
            defaults["schema"] = AvroSchema(Body)
        if self.levels and topic == self.topic:
            defaults["levels"] = self.levels
        consumer = await self.client.subscribe(topic, name, **{**defaults, **options})
        self.opened.append(consumer)
        return consumer

    # ------------------------------------------------------------------------------ receiving
    async def _receive(self, consumer: Any) -> None:
        """The application: it takes, fails, and acknowledges. (It closes with the scene.)"""
        while True:
            message = await consumer.receive()
            try:
                got = got_of(message, self.typed)
            except magnetar.PulsarException as error:
                self.faults.append(f"torn: consumer cannot read a message: {type(error).__name__}: {error}")
                continue
            self.main.got.append(got)
            number = got.number
            left = self.failures.get(number, 0)
            if left:
                self.failures[number] = left - 1 if left > 0 else left
                await consumer.negative_acknowledge(message)
                if left > 0:
                    self.main.comes_again(number)
            elif number in self.again:
                self.again.discard(number)
                await consumer.reconsume_later(message, timedelta(milliseconds=50))
                self.main.comes_again(number)
            elif self.acks_in_transactions and number % 4 == 1:
                await self._acknowledge_in(consumer, message)
            else:
                await consumer.acknowledge(message)

    async def _acknowledge_in(self, consumer: Any, message: Any) -> None:
        try:
            async with self.client.transaction(timeout=30) as txn:
                await consumer.acknowledge(message, txn=txn)
        except (magnetar.PulsarException, magnetar.OutcomeUnknown):
            await consumer.negative_acknowledge(message)  # a kill or an unload ended it: the message comes again

    async def _follow(self, consumer: Any, view: View) -> None:
        while True:
            message = await consumer.receive()
            view.got.append(got_of(message, self.typed))
            await consumer.acknowledge(message)

    # ------------------------------------------------------------------------------ sending
    def wave(self, number: int) -> list[Sent]:
        first = number * WAVE
        made = []
        for at in range(WAVE):
            text: str | None = f"{self.name} {first + at}"
            text = "" if at == 2 else None if at == 6 else text
            if at in self.large and text:
                text += random.Random(first + at).randbytes(LARGE // 2).hex()
            properties = {"n": str(first + at), "größe": "ü", "empty": ""}
            if first + at in self.ends:
                properties[EXPIRES_AT_PROPERTY] = str(self.ends[first + at])
            made.append(Sent(first + at, text, KEYS[at % 3], properties))
        return made

    def shape(self, message: Sent) -> str:
        return self.shapes[(message.number + message.number // 4 + message.number // WAVE) % len(self.shapes)]

    async def send(self, messages: list[Sent], by: str) -> None:
        self.sent += messages
        if by != "sdk":
            await self.close_producer()
        if by in ("outbox", "spark"):  # their rows are entries: they refuse a larger one
            for each in messages:
                each.text = each.text[:LARGE // 10] if each.text else each.text
        own = [each for each in messages if by != "outbox" and self.shape(each) in ("transaction", "half")]
        if by == "sdk" or own:
            await self._send_own(messages if by == "sdk" else own)
        others = [each for each in messages if each not in own]
        if by == "sdk" or not others:
            return
        delayed = {each.number for each in others if self.shape(each) == "delay"}
        for each in others:
            each.free = each.number in delayed
        if own:  # two producers: no order between them
            for each in own:
                each.free = True
            await self.close_producer()
        await self._send_others(others, by, delayed)

    async def close_producer(self) -> None:
        if self.producer in self.opened:
            self.opened.remove(self.producer)
            await self.producer.close()

    async def _send_own(self, messages: list[Sent]) -> None:
        if self.producer not in self.opened:
            self.producer = await self.open_producer()
        options: dict[str, Any] = {
            "typed": self.typed, "batch": self.produce["batching_enabled"], "ids": self.named, "body": self.body,
        }  # fmt: skip
        in_transaction = [each for each in messages if self.shape(each) == "transaction"]
        dropped = [each for each in in_transaction if each.number % WAVE in CALLED_OFF]
        kept = [each for each in in_transaction if each not in dropped]
        plain = [each for each in messages if self.shape(each) in ("plain", "delay")]
        for each in messages:
            each.free = self.shape(each) in ("half", "delay")
        one = await self.client.transaction(timeout=60) if kept else None
        other = await self.client.transaction(timeout=60) if dropped else None
        groups: list[tuple[list[Sent], Any]] = [(plain, None), (kept, one), (dropped, other)]
        if not options["batch"]:  # in their order, one by one
            groups = [
                ([each], one if each in kept else other if each in dropped else None)
                for each in messages if self.shape(each) != "half"
            ]  # fmt: skip
        elif in_transaction:
            for each in in_transaction:
                each.free = True  # batches of transactions are sent beside the others
        for group, txn in groups:
            await send_each(self.producer, group, txn=txn, delayed=lambda each: self.shape(each) == "delay", **options)
        await self._end(one, kept, commit=True)
        await self._end(other, dropped, commit=False)
        for each in messages:
            if self.shape(each) == "half":
                await self._send_half(each)

    async def _end(self, txn: Any, messages: list[Sent], *, commit: bool) -> None:
        if txn is None:
            return
        try:
            await (txn.commit() if commit else txn.abort())
        except magnetar.PulsarException as error:
            for each in messages:
                if each.outcome is not Outcome.REFUSED:
                    told(each, error)
            return
        for each in messages:
            if not commit:
                each.outcome, each.why = Outcome.REFUSED, "aborted"
            elif each.outcome is Outcome.UNKNOWN:
                told(each, None)

    async def _send_half(self, message: Sent) -> None:
        try:
            half = await self.producer.prepare(
                value_of(message, self.typed, self.body), message.properties, message.key,
                event_timestamp=message.number + 1, group="pairs",
                priority=priority_of(message) if self.levels else None,
            )  # fmt: skip
            if message.number % WAVE in CALLED_OFF:
                await half.rollback()
                message.outcome, message.why = Outcome.REFUSED, "rolled back"
                return
            await half.commit()
        except magnetar.PulsarException as error:
            told(message, error)
        else:
            told(message, None)

    async def _send_others(self, messages: list[Sent], by: str, delayed: set[int]) -> None:
        if by == "outbox":
            await send_by_outbox(self.server.url, self.topic, messages, self.folder, self.typed, delayed)
        elif by == "spark":
            await send_by_spark(
                self.server.spark, self.server.url, self.topic, messages, self.keys, self.typed,
                tries=10 if self.disturbed else 1,
            )  # fmt: skip
        else:
            options = dict(self.produce)
            if self.encrypted:
                options["encryption_key"] = "a"
            hand = await self.hand(by)
            async with _closed(hand):
                await hand.send(self.topic, messages, options, delayed)

    async def hand(self, who: str) -> Blocking:
        if who == "pulsar":
            import pulsar

            return await asyncio.to_thread(Blocking, pulsar, self.server.pulsar_url, self.keys, self.typed)
        hand = await asyncio.to_thread(Blocking, magnetar, self.server.url, self.keys, self.typed)
        async with asyncio.timeout(60):  # a first contact gives up after a second; one that is killed is away longer
            while True:
                try:
                    await asyncio.to_thread(hand.client.get_topic_partitions, self.topic)
                    return hand
                except magnetar.ConnectError:
                    await asyncio.sleep(0.1)

    # ------------------------------------------------------------------------------ the play
    async def _play(self) -> None:
        await self.send(self.wave(0), "sdk")
        if self.spaced:
            await self.until(lambda: not self.wanted(self.main), "the first wave")
        events = sorted(self.events)
        for event in events:
            if not event.meanwhile:
                await event.run(self)
        second = asyncio.create_task(self.send(self.wave(1), self.second))
        try:
            for event in events:
                if event.meanwhile:
                    await event.run(self)
        finally:
            await second
        await self.until(lambda: not self.wanted(self.main), "all")
        if self.dead is not None:
            await self.until(lambda: not self.wanted_letters(), "dead letters")
        for each in self.extra:
            await each.finish(self)
        await asyncio.sleep(QUIET_S)
        self.judge(self.views())

    async def end_of_life(self) -> None:
        """Judges what a topic had that is going to be deleted, and forgets it: a later one has none of it."""
        await self.until(lambda: not self.wanted(self.main), "the first life")
        if self.dead is not None:
            await self.until(lambda: not self.wanted_letters(), "dead letters")
        live = [each for each in self.extra if not each.at_the_end]
        for each in live:
            await each.finish(self)
        self.judge([self.main, *(each.view for each in live if each.view is not None)])
        self.sent = []
        for view in self.views():
            view.got.clear()
            view.times.clear()

    def judge(self, views: list[View]) -> None:
        for view in views:
            view.ordered = view.ordered and not self.apart
            view.once = view.once and not self.disturbed
        letters = {each.number for each in self.sent} & self.letters
        shares = self.produce["batching_enabled"] or self.second == "outbox"  # an entry comes again as a whole
        self.faults += judge(self.sent, views, self.dead, letters, strict=not shares)

    def missing_of_main(self) -> set[int]:
        """Of what was sent, also where it may be missing in the end."""
        found = {each.number for each in self.main.got}
        return {each.number for each in self.sent if _stored(each)} - found - self.main.never

    def views(self) -> list[View]:
        return [self.main, *(each.view for each in self.extra if each.view is not None)]

    def wanted(self, view: View) -> set[int]:
        return view.missing(self.sent)

    def wanted_letters(self) -> set[int]:
        assert self.dead is not None, "there are some"
        there = {each.number for each in self.dead.got}
        return {each.number for each in self.sent if each.number in self.letters and _stored(each)} - there

    async def until(self, condition: Callable[[], bool], what: str) -> bool:
        """Without it in time the judge says what is missing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    for task in self.tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.01)
                return True
        return False


def _stored(message: Sent) -> bool:
    return message.outcome is Outcome.STORED


@contextlib.asynccontextmanager
async def _closed(hand: Blocking) -> Any:
    try:
        yield
    finally:
        await hand.close()


# ------------------------------------------------------------------------------------ more who receive
class Extra:
    """Another one who receives the topic, beside the application."""

    at_the_end = False  # it receives nothing before
    is_durable = True  # it is a subscription: what has expired does not come

    def __init__(self, name: str, **promise: Any) -> None:
        self.view: View | None = View(name, **promise)

    async def open(self, scene: Scene) -> None:
        return

    async def finish(self, scene: Scene) -> None:
        view = self.view
        assert view is not None, "it has one"
        await scene.until(lambda: not scene.wanted(view), view.name)

    async def close(self) -> None:
        return


class Reading(Extra):
    """A reader that is open all the time."""

    is_durable = False

    async def open(self, scene: Scene) -> None:
        self.reader = await scene.client.create_reader(
            scene.topic, magnetar.MessageId.earliest, crypto_key_reader=scene.crypto(),
            **({"schema": AvroSchema(Body)} if scene.typed else {}),
        )  # fmt: skip
        scene.tasks.append(asyncio.create_task(self._run(scene)))

    async def _run(self, scene: Scene) -> None:
        assert self.view is not None, "it has one"
        while True:
            self.view.got.append(got_of(await self.reader.read_next(), scene.typed))

    async def close(self) -> None:
        await self.reader.close()


class Table(Extra):
    """A table view that is open all the time."""

    def __init__(self) -> None:
        self.view = None

    async def open(self, scene: Scene) -> None:
        self.table = await scene.client.create_table_view(
            scene.topic, crypto_key_reader=scene.crypto(), **({"schema": AvroSchema(Body)} if scene.typed else {})
        )

    async def finish(self, scene: Scene) -> None:
        def items() -> dict[str, str]:
            found = dict(self.table.items())
            return {key: value.text if scene.typed else value.decode() for key, value in found.items()}

        await scene.until(lambda: not stale(scene.sent, "table", items()), "table")
        scene.faults += stale(scene.sent, "table", items())

    async def close(self) -> None:
        await self.table.close()


class Compacted(Extra):
    """A subscription that reads what compaction left: made before the first message, and read at the end; then a reader
    that never saw anything of the topic. Each has to have the newest of each key."""

    at_the_end = True

    def __init__(self) -> None:
        self.view = View("compacted subscription", once=False, newest=True)
        self.reader = View("compacted reader", newest=True)

    async def open(self, scene: Scene) -> None:
        self.open_again = lambda: scene.subscribe(
            "compacted", scene.topic, consumer_type=ConsumerType.Exclusive, is_read_compacted=True
        )
        consumer = await self.open_again()
        scene.opened.remove(consumer)
        await consumer.close()

        self.started = False

    async def start(self, scene: Scene) -> None:
        assert self.view is not None, "it has one"
        if not self.started:
            self.started = True
            scene.tasks.append(asyncio.create_task(scene._follow(await self.open_again(), self.view)))

    async def finish(self, scene: Scene) -> None:
        assert self.view is not None, "it has one"
        await self.start(scene)
        await super().finish(scene)
        reader = await scene.client.create_reader(
            scene.topic, magnetar.MessageId.earliest, is_read_compacted=True, crypto_key_reader=scene.crypto(),
            **({"schema": AvroSchema(Body)} if scene.typed else {}),
        )  # fmt: skip
        while await reader.has_message_available():
            self.reader.got.append(got_of(await reader.read_next(10_000), scene.typed))
        await reader.close()
        self.reader.lacks = self.view.lacks
        self.reader.ordered = self.view.ordered = not scene.apart
        self.reader.once = not scene.disturbed  # what had no answer is sent again, and may be there twice
        scene.faults += judge(scene.sent, [self.reader])


class Listening(Extra):
    """A subscription of the blocking SDK, or of Pulsar's client, that a listener serves."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who}'s consumer")
        self.who = who

    async def open(self, scene: Scene) -> None:
        assert self.view is not None, "it has one"
        self.blocking = await scene.hand(self.who)
        type_ = scene.type.name
        self.view.ordered = type_ != "Shared"
        options = {"levels": scene.levels} if scene.levels else {}
        await self.blocking.subscribe(scene.topic, f"of-{self.who}", self.view.got.append, type_, **options)

    async def finish(self, scene: Scene) -> None:
        assert self.view is not None, "it has one"
        if self.who == "pulsar" and scene.produce.get("compression_type") is CompressionType.ZLib:
            # its C++ client drops what is empty and compressed by zlib, also what it has sent itself
            self.view.lacks |= {each.number for each in scene.sent if not each.text}
        await super().finish(scene)

    async def close(self) -> None:
        await self.blocking.close()


class Late(Extra):
    """A subscription that is made with the topic and read at the end, or from `start` on."""

    at_the_end = True

    def __init__(self, name: str, **promise: Any) -> None:
        super().__init__(name, **promise)
        self.subscription = name
        self.started = False

    async def open(self, scene: Scene) -> None:
        for topic in await parts(scene):
            await scene.admin.create_subscription(topic, self.subscription, magnetar.MessageId.earliest)

    async def start(self, scene: Scene) -> None:
        assert self.view is not None, "it has one"
        if not self.started:
            self.started = True
            consumer = await scene.subscribe(self.subscription, scene.topic)
            self.view.ordered = scene.type is not ConsumerType.Shared and self.view.ordered
            scene.tasks.append(asyncio.create_task(scene._follow(consumer, self.view)))

    async def finish(self, scene: Scene) -> None:
        await self.start(scene)
        await super().finish(scene)

    async def close(self) -> None:
        self.started = False


class Query(Extra):
    """A batch query of Spark, at the end. What was sent in chunks makes no rows, and the query says so."""

    at_the_end = True

    def __init__(self) -> None:
        super().__init__("Spark's query")

    async def finish(self, scene: Scene) -> None:
        assert self.view is not None, "it has one"
        chunked = {each.number for each in scene.sent if each.text and len(each.text) > LARGE}
        if chunked:
            try:
                await self._read(scene)
                scene.faults.append("phantom: Spark read chunks without a word")
            except Exception as error:
                if "chunk" not in str(error):
                    raise
        self.view.lacks |= chunked
        self.view.got = await self._read(scene, skip=bool(chunked))

    async def _read(self, scene: Scene, skip: bool = False) -> list[Got]:
        server = scene.server
        return await read_by_spark(server.spark, server.url, scene.topic, scene.keys, scene.typed, skip)


async def parts(scene: Scene) -> list[str]:
    return [part for topic in scene.topics for part in await scene.admin.parts(topic)]
