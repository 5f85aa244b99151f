"""Sends dead letters back to where they came from: `magnetar topics redrive`.

    redrive = Redrive(client, admin, "orders-billing-DLQ", RedriveOptions(where="error = 'timeout'"))
    async for result in redrive.run(): …                  the counts so far, after each transaction

A *letter* is a message of the dead-letter topic. Its copy has its payload, key, event time, schema and properties. The
copy is sent in one transaction with the acknowledgement of the letter on the subscription `redrive` of the dead-letter
topic. So a redrive that is killed at any step sends nothing twice and loses nothing: letters whose transaction did not
commit are redriven by the next run. The letters of a transaction are sent and acknowledged all at once, because later
messages of their topics are not delivered before the transaction ends.

| the letter | goes |
|---|---|
| `to` is given | there: every subscription of that topic gets it |
| its subscription has a retry-letter topic (`enable_retry`), and reads it | there: only that subscription gets it |
| any other | to its topic, at the end: of its durable subscriptions only that one gets it |
| any other, with `to_all` | there: every subscription of that topic gets it |
| it names no subscription, or one that its topic does not have (any more) | nowhere, without `to_all`: it stays |
| its broker, of an older version, would give it to every subscription | nowhere, without `to_all`: it stays |
| encrypted, alone in its entry, and this client has no key | there too, as it is: its bytes are not opened |
| encrypted, in a batch or a chunk, and this client has no key | nowhere: it stays |
| its topic does not exist any more, is terminated or refuses its schema | nowhere: it stays, and no topic is made |
| went back REDRIVES_MAX times already | nowhere, unless `force` |
| not asked for by `subscription` or `where`; or no dead letter | nowhere: it stays, and a later redrive may take it |

**Only one subscription gets it**: the copy is alone in its entry and has the property REDRIVEN_TO. Because of this
property the broker acknowledges the copy for every other durable subscription (broker/subscription/expiry.py). Readers
and table views see the copy, and so does a subscription that reads the compacted form: there it is the newest message
of its key.

The redelivery count of the copy begins anew: it lacks the properties that made the letter a dead letter. Its property
REDRIVEN counts how often the message went back, and two more properties name the letter and the first message
(`proto.names.make_redriven_properties`).

The subscription is Exclusive: one run at a time reads the letters, in the order of the log; any number of letters may
stay. Before it reads, a run waits for the end of the transaction of an earlier run that was killed. If the log is read
again (after an abort, or at another owner), letters at or before `_passed` were counted already and are skipped. The
subscription retains all letters from its first use on; delete it when no letter must go back any more.

A run redrives only letters that are stored when it begins; later letters stay for the next run. Otherwise a program
that always fails would get the same message three times from one command, and the command would not end.
Guarding tests: tests/client/test_redrive.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..proto.errors import InvalidName, MagnetarError
from ..proto.errors import TopicNotFound as WireTopicNotFound
from ..proto.filters import Filter, parse_filter
from ..proto.names import (
    REAL_SUBSCRIPTION,
    REAL_TOPIC,
    REDRIVEN_TO,
    RETRIES,
    Position,
    TopicName,
    count_redrives,
    make_letter_topic_name,
    make_redriven_properties,
    make_redriven_to,
    parse_redriven_to,
)
from ..proto.states import Blocked
from .common.errors import (
    ConsumerBusy,
    IncompatibleSchema,
    MessageTooBig,
    NotAllowedError,
    PulsarException,
    Timeout,
    TopicNotFound,
    TopicTerminated,
    TransactionAborted,
    TransactionConflict,
)
from .consume.dead_letters import copy_ciphertext, copy_message, fetch_schema_of_message
from .model.composite_schemas import PreEncodedSchema
from .model.message import CiphertextMessage, Message, read_filter_field
from .model.schema import BytesSchema
from .model.settings import ConsumerCryptoFailureAction, ConsumerType, InitialPosition, ProducerSettings
from .produce.producer import Producer

if TYPE_CHECKING:
    from ..proto.statistics import SubscriptionStats, TopicStats
    from .admin import AdminClient
    from .client import Client
    from .consume.consumer import Consumer
    from .transactions.transaction import Transaction

REDRIVE_SUBSCRIPTION = "redrive"
"""Subscription of a dead-letter topic whose acknowledgements record which letters went back."""
REDRIVES_MAX = 3
"""How often a letter goes back without `force`: if it fails each time, a person must decide."""
BATCH_MESSAGES = 100
BATCH_BYTES = 8 << 20
"""Most letters of one transaction, and the number of their bytes from which on no more are added."""
BACKLOG_CHECK_IDLE_MS = 500
"""Time in ms without a letter after which the run asks the brokers whether any letter is left."""
ABORTED_MAX = 5
COMMIT_EVERY_S = 0.5
"""With a rate, a transaction has the letters of at most that many seconds: later messages of their topics are not
delivered before it ends."""
TRANSACTION_TIMEOUT_S = 10.0
"""Time-out of a transaction in seconds: that long the topics wait for the transaction of a run that was killed."""
NO_LETTER_MAX_S = TRANSACTION_TIMEOUT_S + 5
"""Seconds without a letter after which letters that are not delivered stay; and seconds for which a run waits for the
transaction of a run that was killed."""
_AT_END = frozenset((Blocked.CAUGHT_UP, Blocked.OPEN_TRANSACTION))
_LASTING = (TopicNotFound, TopicTerminated, MessageTooBig)
"""Errors of a send that would come again."""


@dataclass(frozen=True, slots=True)
class RedriveOptions:
    """The options of a run: which letters go back, and to which topic. `subscription`: only letters that came from this
    subscription. `where`: only letters that match this filter. `limit`: at most that many letters (0: all). `rate`:
    letters per second (0: no limit). `dry_run`: nothing is sent or acknowledged. `force`: also letters that went back
    REDRIVES_MAX times. `to`: the letters go to this topic instead of their own, to all its subscriptions. `to_all`: the
    letters go to all subscriptions of their own topic."""

    subscription: str = ""
    where: str = ""
    limit: int = 0
    rate: float = 0.0
    dry_run: bool = False
    force: bool = False
    to: str = ""
    to_all: bool = False


@dataclass(slots=True)
class RedriveResult:
    """The result of a run. `sent`: topic → the number of letters that went back to it (with `dry_run`: would go).
    `left`: reason → the number of letters that stay for it. `readers`: topic of `sent` → the subscriptions that get the
    copies, or None if they are not known; retry-letter topics are left out. `is_complete`: whether the run has examined
    every letter that was stored when it began."""

    sent: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    readers: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    is_complete: bool = False


class _Target(NamedTuple):
    """Where letters go. `why_not`: why they stay; "" if they go."""

    topic: TopicName
    is_retry: bool = False
    why_not: str = ""
    only_to: str = ""  # the value of REDRIVEN_TO; "": every subscription of the topic gets them


class _Place(NamedTuple):
    """The place of a letter in its partition: that of its last chunk, and its index in a batch."""

    position: Position
    batch_index: int


class _ChosenLetter(NamedTuple):
    letter: Message
    target: TopicName
    properties: dict[str, str]  # of the copy
    producer: Producer | None  # None: of a dry run


class Redrive:
    """One run over the letters of a dead-letter topic `topic`. It uses the client and the admin client of the caller,
    and does not close them. `result`: the result so far. Raises InvalidName or InvalidRequest for a wrong topic or
    filter."""

    def __init__(self, client: Client, admin: AdminClient, topic: str, options: RedriveOptions) -> None:
        self.result = RedriveResult()
        self._client, self._admin = client, admin
        self._topic = TopicName.parse(topic)
        self._to = TopicName.parse(options.to) if options.to else None
        self._options = options
        self._now = client.connections.world.clock.monotonic
        self._where: Filter | None = parse_filter(options.where) if options.where else None
        self._aborted = 0  # transactions, one after the other
        self._passed: dict[str, _Place] = {}  # of each partition the last letter that was looked at
        self._ends: dict[str, Position] = {}  # of each partition the last letter when the run began
        self._seen: set[str] = set()  # partitions whose last letter, or a later one, came
        self._targets: dict[tuple[str, str], _Target] = {}
        self._too_big: set[tuple[str, _Place]] = set()
        self._producers: dict[tuple[TopicName, bool, Hashable], Producer] = {}

    async def run(self) -> AsyncIterator[RedriveResult]:
        """Sends the letters back, and yields the result so far after each transaction. Must be called once. Raises
        TopicNotFound or Unauthorized of a topic; ConsumerBusy if another redrive of the topic runs; TransactionAborted
        or TransactionConflict after several aborts in a row; the errors of a producer, of the admin client and of a
        commit, such as Unavailable or OutcomeUnknown. What was committed before such an error stays committed."""
        if self._to is not None:
            await self._client.connections.fetch_partition_count(self._to, create=False)
        parts = await self._admin.parts(self._topic.full)
        is_new = REDRIVE_SUBSCRIPTION not in await self._admin.subscriptions(parts[0])
        await self._note_ends(parts)
        consumer = await self._subscribe(parts, is_new=is_new)
        try:
            while not self._is_enough and (letters := await self._receive_letters(consumer, parts)):
                passed = self._pass_letters(letters)
                if await self._send_back(consumer, letters):
                    yield self.result
                    continue
                self._passed = passed
                await consumer.close()
                consumer = await self._subscribe(parts)
        finally:
            await self._close_producers()
            try:
                if self._options.dry_run and is_new:
                    with suppress(ConsumerBusy, NotAllowedError):  # another redrive uses it meanwhile
                        await consumer.unsubscribe()
            finally:
                await consumer.close()  # what stays is free again

    @property
    def _is_enough(self) -> bool:
        return 0 < self._options.limit <= self.result.sent.total()

    async def _close_producers(self) -> None:
        producers, self._producers = list(self._producers.values()), {}
        await asyncio.gather(*(each.close() for each in producers), return_exceptions=True)

    # ------------------------------------------------------------------ letters
    async def _subscribe(self, parts: Sequence[str], *, is_new: bool = False) -> Consumer:
        if not is_new:
            await self._wait_for_transactions(parts)
        return await self._client.subscribe(
            self._topic.full, REDRIVE_SUBSCRIPTION,
            consumer_type=ConsumerType.Exclusive, initial_position=InitialPosition.Earliest,
            crypto_failure_action=ConsumerCryptoFailureAction.CONSUME, receiver_queue_size=10 * BATCH_MESSAGES,
            batch_index_ack_enabled=True, schema=BytesSchema(),
        )  # fmt: skip

    async def _wait_for_transactions(self, parts: Sequence[str]) -> None:
        """Waits until no transaction has acknowledged letters: one of a run that was killed ends by its time-out. Its
        letters come again only then, and would come after those that follow them."""
        since_s = self._now()
        while pending := sum(each.pending_entries for each in _pick_subscriptions(await self._fetch_stats(parts))):
            if self._now() - since_s > NO_LETTER_MAX_S:
                self.result.left["acknowledged in an open transaction that is not of a redrive"] = pending
                return
            await asyncio.sleep(BACKLOG_CHECK_IDLE_MS / 1000)

    async def _fetch_stats(self, parts: Sequence[str]) -> list[TopicStats]:
        return await asyncio.gather(*(self._admin.topic_stats(part) for part in parts))

    async def _note_ends(self, parts: Sequence[str]) -> None:
        for part, last in zip(parts, await asyncio.gather(*map(self._admin.last_message_id, parts)), strict=True):
            self._ends[part] = Position(last.ledger_id(), last.entry_id())
            if last.entry_id() < 0:
                self._seen.add(part)

    def _is_later(self, letter: Message) -> bool:
        """Returns whether a letter came after the run began. Notes when its partition has no other one."""
        end, position = self._ends[letter.topic_name()], letter.entry.position
        if position > end:
            self._seen.add(letter.topic_name())
        return position > end

    async def _receive_letters(self, consumer: Consumer, parts: Sequence[str]) -> list[Message]:
        """Returns the next letters; none if all of them were received."""
        letters, size, since_s, ended = list[Message](), 0, self._now(), False
        wanted, heard_s = self._count_wanted(), self._now()
        while len(letters) < wanted and size < BATCH_BYTES and len(self._seen) < len(parts):
            try:
                letter = await consumer.receive(BACKLOG_CHECK_IDLE_MS)
                is_later = self._is_later(letter)
            except Timeout:
                is_later = True
            if is_later and (self._now() - heard_s) * 1000 < BACKLOG_CHECK_IDLE_MS:
                continue
            if is_later:  # and nothing else for so long
                found = None if letters else await self._has_ended(parts, since_s, ended=ended)
                if found is None:
                    break
                ended, heard_s = found, self._now()
                continue
            ended, heard_s = False, self._now()
            place = self._passed.get(letter.topic_name())
            if place is None or _find_place(letter) > place:
                letters.append(letter)
                size += len(letter.data())
        if not letters and len(self._seen) == len(parts):
            self._note_unseen(await self._fetch_stats(parts))
        return letters

    def _note_unseen(self, stats: Sequence[TopicStats]) -> None:
        """Notes how many letters no consumer can get, because of an open transaction."""
        unseen = sum(each.end_index - each.transactions.stable_index for each in stats if each.transactions)
        if unseen:
            self.result.left["in an open transaction, or after the begin of one"] = unseen
        self.result.is_complete = not unseen

    def _count_wanted(self) -> int:
        options, wanted = self._options, BATCH_MESSAGES
        if options.rate:
            wanted = min(wanted, max(1, int(options.rate * COMMIT_EVERY_S)))
        return min(wanted, options.limit - self.result.sent.total()) if options.limit else wanted

    async def _has_ended(self, parts: Sequence[str], since_s: float, *, ended: bool) -> bool | None:
        """Returns whether the brokers have delivered every letter; None: they had before, too, so none is under way.
        `ended`: what it returned last. Stops waiting for letters that are not delivered."""
        stats = await self._fetch_stats(parts)
        found = _pick_subscriptions(stats)
        waits = {each.blocked for each in found} - _AT_END
        if not waits and ended:
            self._note_unseen(stats)
            return None
        if waits and self._now() - since_s > NO_LETTER_MAX_S:
            undelivered = max(1, sum(each.backlog for each in found) - self.result.left.total())
            self.result.left[f"not delivered: {min(waits) or 'the broker is slow'}"] += undelivered
            return None
        return not waits

    def _pass_letters(self, letters: Sequence[Message]) -> dict[str, _Place]:
        """Notes that the letters are looked at. Returns what was noted before."""
        before = dict(self._passed)
        for letter in letters:
            self._passed[letter.topic_name()] = _find_place(letter)
        return before

    def _why_stays(self, letter: Message, properties: dict[str, str]) -> str:
        """Returns the reason why a letter does not go back; "" if it does."""
        real = properties.get(REAL_TOPIC, "")
        try:
            topic = TopicName.parse(real)
            is_letter = topic.full == real and topic.persistent and topic.base != self._topic.base
        except InvalidName:
            is_letter = False
        header = letter.entry.header
        if not is_letter:
            return f"no dead letter: it has no property {REAL_TOPIC}"
        if isinstance(letter, CiphertextMessage) and header.metadata.num_chunks_from_msg > 1:
            return "encrypted, and a chunk of a larger one: without a key it is not put together"
        if isinstance(letter, CiphertextMessage) and header.metadata.HasField("num_messages_in_batch"):
            return "encrypted, in a batch with others: without a key it is not taken apart"
        if self._options.subscription not in ("", properties.get(REAL_SUBSCRIPTION, "")):
            return "of another subscription"
        where = self._where
        if where is not None and not where.matches(properties, lambda name: read_filter_field(letter, name)):
            return "not wanted by the filter"
        if count_redrives(properties) >= REDRIVES_MAX and not self._options.force:
            return f"went back {REDRIVES_MAX} times already"
        if (letter.topic_name(), _find_place(letter)) in self._too_big:
            return "too large for its topic"
        return ""

    # ------------------------------------------------------------------ targets
    async def _find_target(self, properties: dict[str, str]) -> _Target:
        """Returns the retry-letter topic of the letter's subscription, if that reads it; else the letter's topic."""
        real, subscription = properties[REAL_TOPIC], properties.get(REAL_SUBSCRIPTION, "")
        found = self._targets.get((real, subscription))
        if found is None:
            topic = self._to or TopicName.parse(real).base
            found = None if self._to is not None else await self._find_retry_target(topic, subscription)
            if found is None and (self._to is not None or self._options.to_all):
                found = await self._find_plain_target(topic)
            elif found is None:
                found = await self._find_target_of_one(topic, subscription)
            self._targets[real, subscription] = found
        return found

    async def _find_retry_target(self, topic: TopicName, subscription: str) -> _Target | None:
        if subscription:
            with suppress(WireTopicNotFound, InvalidName):  # the letter says what some producer wrote
                retries = make_letter_topic_name(topic, subscription, RETRIES)
                parts = await self._admin.parts(retries.full)
                if subscription in await self._admin.subscriptions(parts[0]):
                    return _Target(retries, is_retry=True)
        return None

    async def _find_plain_target(self, topic: TopicName) -> _Target:
        try:
            parts = await self._admin.parts(topic.full)
            self.result.readers[topic.full] = tuple(sorted(await self._admin.subscriptions(parts[0])))
        except WireTopicNotFound:
            return _Target(topic, why_not=f"{topic} does not exist any more")
        except MagnetarError:  # who may produce there may not be one who may see its subscriptions
            self.result.readers[topic.full] = None
        return _Target(topic)

    async def _find_target_of_one(self, topic: TopicName, subscription: str) -> _Target:
        """Returns the topic for letters that this subscription of it alone gets. Without it, no consumer would."""
        if not subscription:
            return _Target(topic, why_not=f"no subscription to go to: it has no property {REAL_SUBSCRIPTION}")
        try:
            parts = await self._admin.parts(topic.full)
            known = subscription in await self._admin.subscriptions(parts[0])
        except WireTopicNotFound:
            return _Target(topic, why_not=f"{topic} does not exist any more")
        except MagnetarError as error:  # who may produce there may not be one who may see its subscriptions
            return _Target(topic, why_not=f"whether {topic} has subscription {subscription!r} is not known: {error}")
        if not known:
            return _Target(topic, why_not=f"{topic} has no subscription {subscription!r} (any more)")
        return _Target(topic, only_to=make_redriven_to(topic, subscription))

    def _give_up_target(self, topic: TopicName, error: PulsarException) -> None:
        """Leaves the letters of this topic where they are from now on, because it takes none of them."""
        why = "is terminated" if isinstance(error, TopicTerminated) else "does not exist any more"
        for key, each in self._targets.items():
            if each.topic == topic:
                self._targets[key] = each._replace(why_not=f"{topic} {why}")

    # ------------------------------------------------------------------ sending back
    async def _send_back(self, consumer: Consumer, letters: Sequence[Message]) -> bool:
        """Sends those of the letters back that go, and acknowledges them. Returns False if the transaction was aborted:
        nothing happened, and the letters come again."""
        chosen, left = list[_ChosenLetter](), Counter[str]()
        for letter in letters:
            found = await self._choose(letter)
            if isinstance(found, str):
                left[found] += 1
            else:
                chosen.append(found)
        begun_s = self._now()
        if chosen and not self._options.dry_run:
            try:
                async with self._client.transaction(TRANSACTION_TIMEOUT_S) as txn:
                    await self._send_all(consumer, chosen, txn)
            except (*_LASTING, TransactionAborted, TransactionConflict) as error:
                self._aborted += not isinstance(error, _LASTING)
                if self._aborted > ABORTED_MAX:
                    raise
                await self._close_producers()
                return False
            self._aborted = 0
            if self._options.rate:
                due_s = begun_s + len(chosen) / self._options.rate
                await asyncio.sleep(due_s - self._now())
        self._count_sent(chosen)
        self.result.left.update(left)
        return True

    def _count_sent(self, chosen: Sequence[_ChosenLetter]) -> None:
        self.result.sent.update(each.target.full for each in chosen)
        for each in chosen:
            if (to := each.properties.get(REDRIVEN_TO, "")) and (one := parse_redriven_to(to, each.target)):
                known = self.result.readers.get(each.target.full) or ()
                self.result.readers[each.target.full] = tuple(sorted({*known, one}))

    async def _choose(self, letter: Message) -> _ChosenLetter | str:
        """Returns where the letter goes, and what the copy is; or the reason why it stays."""
        properties = letter.properties()
        if why := self._why_stays(letter, properties):
            return why
        target = await self._find_target(properties)
        producer: Producer | None = None
        try:
            if not target.why_not and not self._options.dry_run:
                producer = await self._open_producer(target.topic, letter)
        except IncompatibleSchema:
            return f"{target.topic} refuses its schema"
        except (TopicNotFound, TopicTerminated) as error:
            self._give_up_target(target.topic, error)
            target = await self._find_target(properties)
        if target.why_not:
            return target.why_not
        if target.only_to and producer is not None and not all(each.redrives_to_one for each in producer.partitions):
            return f"the broker of {target.topic} is older, and would give it to every subscription"
        copied = make_redriven_properties(
            properties, str(letter.message_id()), is_retry=target.is_retry, only_to=target.only_to
        )
        return _ChosenLetter(letter, target.topic, copied, producer)

    async def _send_all(self, consumer: Consumer, chosen: Sequence[_ChosenLetter], txn: Transaction) -> None:
        """Sends the copies and acknowledges the letters, all at once. Raises the first error when each has its outcome.
        The letters of a topic that takes none, and those that are too large, stay from then on."""
        sends = list[Coroutine[None, None, object]]()
        for letter, _, properties, producer in chosen:
            assert producer is not None, "it was opened"
            if isinstance(letter, CiphertextMessage):
                copy = copy_ciphertext(letter, properties)
            else:
                copy = copy_message(letter, properties)
            copy.txn = txn
            sends.append(producer.send_copy(copy))
        acknowledges = consumer.acknowledge([each.letter for each in chosen], txn=txn)
        *outcomes, acknowledged = await asyncio.gather(*sends, acknowledges, return_exceptions=True)
        for each, outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, TopicNotFound | TopicTerminated):
                self._give_up_target(each.target, outcome)
            elif isinstance(outcome, MessageTooBig):
                self._too_big.add((each.letter.topic_name(), _find_place(each.letter)))
        errors = [each for each in (*outcomes, acknowledged) if isinstance(each, BaseException)]
        lasting = [each for each in errors if isinstance(each, _LASTING)]
        if errors:
            raise (lasting or errors)[0]

    async def _open_producer(self, topic: TopicName, letter: Message) -> Producer:
        """Returns a producer for copies of letters like this one. Each is alone in its entry: a broker finds
        REDRIVEN_TO there, also in what is encrypted."""
        is_ciphertext = isinstance(letter, CiphertextMessage)  # chunks of it could not be decrypted
        schema = await fetch_schema_of_message(letter)
        key = None if schema is None else (schema.type, schema.data, *sorted(schema.properties.items()))
        found = self._producers.get((topic, is_ciphertext, key))
        if found is None:
            kind = BytesSchema() if schema is None else PreEncodedSchema(schema)
            settings = ProducerSettings(
                schema=kind, chunking_enabled=not is_ciphertext, existing_only=True, batching_enabled=False
            )
            found = await Producer.open(self._client.connections, topic, settings)
            self._producers[topic, is_ciphertext, key] = found
        return found


def _pick_subscriptions(stats: Sequence[TopicStats]) -> list[SubscriptionStats]:
    return [each for found in stats for each in found.subscriptions if each.name == REDRIVE_SUBSCRIPTION]


def _find_place(letter: Message) -> _Place:
    return _Place(letter.entry.position, letter.batch_index)
