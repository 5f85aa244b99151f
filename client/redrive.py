"""Sends dead letters back to where they came from: `magnetar topics redrive`.

    redrive = Redrive(client, admin, "orders-billing-DLQ", RedriveOptions(where="error = 'timeout'"))
    async for result in redrive.run(): …                  the counts so far, after each transaction

A letter goes back with its payload, key, event time, schema and properties, in one transaction with the acknowledgement
of the letter on the subscription `redrive` of the dead-letter topic. So a redrive that is killed at any step sends
nothing twice and loses nothing: what is not committed comes again with the next one.

| the letter | goes |
|---|---|
| its subscription has a retry-letter topic (`enable_retry`) | there: only that subscription gets it |
| any other | to its topic, at the end: every subscription of it gets it |
| encrypted, and this client has no key for it | nowhere: it stays |
| went back TIMES_MAX times already | nowhere, unless `force` |
| not asked for by `subscription` or `where`; or no dead letter | nowhere: it stays, and a later redrive may take it |

The copy counts from the start: the properties that made it a dead letter are taken off, and REDRIVEN counts how often
it went back. The subscription `redrive` keeps all letters from its first use on; delete it when nothing is to go back.
Guarding tests: tests/client/test_redrive.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..proto.errors import InvalidName, TopicNotFound
from ..proto.filters import Filter, parse_filter
from ..proto.names import OF_FAILURES, OF_ORIGIN, REAL_SUBSCRIPTION, REAL_TOPIC, REDRIVEN, TopicName, parse_number
from .common.errors import ConsumerBusy, Timeout, TransactionAborted
from .consume.dead_letters import copy_message, fetch_schema_of_message, make_letter_topic_name
from .model.composite_schemas import PreEncodedSchema
from .model.message import CiphertextMessage, Message
from .model.schema import BytesSchema
from .model.settings import ConsumerCryptoFailureAction, ConsumerType, InitialPosition, ProducerSettings
from .produce.producer import Producer

if TYPE_CHECKING:
    from .admin import AdminClient
    from .client import Client
    from .consume.consumer import Consumer

SUBSCRIPTION = "redrive"
"""Subscription of a dead-letter topic that knows which letters went back."""
TIMES_MAX = 3
"""How often a letter goes back: one that fails again each time needs a person."""
BATCH_MESSAGES = 100
"""Letters in one transaction."""
IDLE_MS = 500
"""Silence after which it is asked whether any letter is left."""
ABORTED_MAX = 5
COMMITTED_EVERY_S = 0.5
"""With a rate a transaction has the letters of so many seconds: what follows it in its topic waits for its end."""
TIMEOUT_S = 10.0
"""Of a transaction: so long the topics wait for that of a run that was killed."""
HELD_MAX_S = TIMEOUT_S + 5
"""Silence after which letters that are left are taken to be with another run."""


@dataclass(frozen=True, slots=True)
class RedriveOptions:
    """Which letters go back, and how. `subscription`: only those that this subscription gave up; `where`: only those
    for which this filter holds; `limit`: at most so many (0: all); `rate`: letters per second (0: as fast as it goes);
    `dry_run`: nothing is sent and nothing acknowledged; `force`: also those that went back TIMES_MAX times."""

    subscription: str = ""
    where: str = ""
    limit: int = 0
    rate: float = 0.0
    dry_run: bool = False
    force: bool = False


@dataclass(slots=True)
class RedriveResult:
    """The letters that went back, by topic, and those that stay, by the reason."""

    sent: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)


class Redrive:
    """One run over the letters of a dead-letter topic. Uses the client and the admin client of the caller."""

    def __init__(self, client: Client, admin: AdminClient, topic: str, options: RedriveOptions) -> None:
        self.result = RedriveResult()
        self._client, self._admin = client, admin
        self._topic = TopicName.parse(topic)
        self._options = options
        self._now = client.connections.world.clock.monotonic
        self._where: Filter | None = parse_filter(options.where) if options.where else None
        self._aborted = 0  # transactions, one after the other
        self._targets: dict[tuple[str, str], tuple[TopicName, bool]] = {}
        self._producers: dict[tuple[TopicName, Hashable], Producer] = {}

    async def run(self) -> AsyncIterator[RedriveResult]:
        """Sends the letters back, and yields the result so far after each transaction. Raises TopicNotFound,
        Unauthorized, and the errors of a producer; what was committed before stays so."""
        parts = await self._admin.parts(self._topic.full)
        is_new = SUBSCRIPTION not in await self._admin.subscriptions(parts[0])
        consumer = await self._client.subscribe(
            self._topic.full, SUBSCRIPTION,
            consumer_type=ConsumerType.Shared, initial_position=InitialPosition.Earliest,
            crypto_failure_action=ConsumerCryptoFailureAction.CONSUME, receiver_queue_size=10 * BATCH_MESSAGES,
            batch_index_ack_enabled=True, schema=BytesSchema(),
        )  # fmt: skip
        try:
            while not self._is_enough and (letters := await self._receive_letters(consumer)):
                await self._send_back(consumer, letters)
                yield self.result
        finally:
            for producer in self._producers.values():
                await producer.close()
            if self._options.dry_run and is_new:
                with suppress(ConsumerBusy):  # another redrive uses it meanwhile
                    await consumer.unsubscribe()
            await consumer.close()  # what stays is free again

    @property
    def _held(self) -> int:
        """Returns how many letters this run has received and not acknowledged."""
        return self.result.left.total() + (self.result.sent.total() if self._options.dry_run else 0)

    @property
    def _is_enough(self) -> bool:
        return 0 < self._options.limit <= self.result.sent.total()

    # ------------------------------------------------------------------ letters
    async def _receive_letters(self, consumer: Consumer) -> list[Message]:
        """Returns the next letters; none if all of them were received."""
        letters, since_s, options = list[Message](), self._now(), self._options
        wanted = BATCH_MESSAGES
        if options.rate:
            wanted = min(wanted, max(1, int(options.rate * COMMITTED_EVERY_S)))
        if options.limit:
            wanted = min(wanted, options.limit - self.result.sent.total())
        while len(letters) < wanted:
            try:
                letters.append(await consumer.receive(IDLE_MS))
            except Timeout:
                if letters or (left := await self._count_backlog() - self._held) <= 0:
                    break
                if self._now() - since_s > HELD_MAX_S:
                    self.result.left["with another run"] += left
                    break
        return letters

    async def _count_backlog(self) -> int:
        """Returns how many letters the subscription has, those that stay included."""
        backlog = 0
        for part in await self._admin.parts(self._topic.full):
            stats = await self._admin.topic_stats(part, precise=True)
            backlog += sum(each.backlog for each in stats.subscriptions if each.name == SUBSCRIPTION)
        return backlog

    def _why_stays(self, letter: Message, properties: dict[str, str]) -> str:
        """Returns the reason why a letter does not go back; "" if it does."""
        real = properties.get(REAL_TOPIC, "")
        try:
            topic = TopicName.parse(real)
            is_letter = topic.full == real and topic.persistent and topic.base != self._topic.base
        except InvalidName:
            is_letter = False
        if not is_letter:
            return f"no dead letter: it has no property {REAL_TOPIC}"
        if isinstance(letter, CiphertextMessage):
            return "encrypted: this client has no key for it"
        if self._options.subscription not in ("", properties.get(REAL_SUBSCRIPTION, "")):
            return "of another subscription"
        if self._where is not None and not self._where.matches(properties, lambda name: _read_field(letter, name)):
            return "not wanted by the filter"
        if _count_redrives(properties) >= TIMES_MAX and not self._options.force:
            return f"went back {TIMES_MAX} times already"
        return ""

    async def _find_target(self, properties: dict[str, str]) -> tuple[TopicName, bool]:
        """Returns the retry-letter topic of the letter's subscription, and True, if there is one; else the letter's
        topic, and False."""
        real, subscription = properties[REAL_TOPIC], properties.get(REAL_SUBSCRIPTION, "")
        found = self._targets.get((real, subscription))
        if found is None:
            found = TopicName.parse(real).base, False
            if subscription:
                with suppress(TopicNotFound, InvalidName):  # the letter says what some producer wrote
                    retries = make_letter_topic_name(found[0], subscription, "RETRY")
                    await self._client.connections.fetch_partition_count(retries, create=False)
                    found = retries, True
            self._targets[real, subscription] = found
        return found

    # ------------------------------------------------------------------ sending back
    async def _send_back(self, consumer: Consumer, letters: Sequence[Message]) -> None:
        chosen: list[tuple[Message, TopicName, dict[str, str]]] = []  # with the properties of the copy
        for letter in letters:
            properties = letter.properties()
            if why := self._why_stays(letter, properties):
                self.result.left[why] += 1
                continue
            target, is_retries = await self._find_target(properties)
            chosen.append((letter, target, _clean(properties, is_retries=is_retries)))
        begun_s = self._now()
        if chosen and not self._options.dry_run:
            try:
                async with self._client.transaction(TIMEOUT_S) as txn:
                    for letter, target, properties in chosen:
                        copy = copy_message(letter, properties)
                        copy.txn = txn
                        producer = await self._open_producer(target, letter)
                        await producer.send_copy(copy)
                        await consumer.acknowledge(letter, txn=txn)
            except TransactionAborted:
                self._aborted += 1
                if self._aborted > ABORTED_MAX:
                    raise
                return  # the letters come again
            self._aborted = 0
            if self._options.rate:
                due_s = begun_s + len(chosen) / self._options.rate
                await asyncio.sleep(due_s - self._now())
        self.result.sent.update(target.full for _, target, _ in chosen)

    async def _open_producer(self, topic: TopicName, letter: Message) -> Producer:
        schema = await fetch_schema_of_message(letter)
        key = None if schema is None else (schema.type, schema.data, *sorted(schema.properties.items()))
        found = self._producers.get((topic, key))
        if found is None:
            kind = BytesSchema() if schema is None else PreEncodedSchema(schema)
            settings = ProducerSettings(schema=kind, chunking_enabled=True)
            found = await Producer.open(self._client.connections, topic, settings)
            self._producers[topic, key] = found
        return found


def _count_redrives(properties: dict[str, str]) -> int:
    told = properties.get(REDRIVEN, "")
    return (parse_number(told) or 0) if len(told) < 10 else 0


def _clean(properties: dict[str, str], *, is_retries: bool) -> dict[str, str]:
    """Returns the properties of the copy: a retry-letter topic needs to know where the letter came from."""
    gone = OF_FAILURES if is_retries else OF_FAILURES + OF_ORIGIN
    kept = {name: value for name, value in properties.items() if name not in gone}
    return {**kept, REDRIVEN: str(_count_redrives(properties) + 1)}


def _read_field(message: Message, name: str) -> str | int | None:
    """Returns the value of a name of `proto.filters.SYSTEM_NAMES`."""
    if name == "message.key":
        return message.partition_key() if message.fields.HasField("partition_key") else None
    if name == "message.ordering_key":
        return message.ordering_key() if message.fields.HasField("ordering_key") else None
    if name == "message.event_time":
        return message.event_timestamp() or None
    if name == "message.producer":
        return message.producer_name()
    if name == "message.publish_time":
        return message.publish_timestamp()
    if name == "message.size":
        return len(message.data())
    return message.int_schema_version() if message.writer_version else None
