"""Entries that were given back and must not be delivered yet, or never again: the back-off ladder, and dead letters.
    policy.is_dead_letter(times)                 # must it go to the dead-letter topic?
    policy.backoff_ms(times)                     # for how long it waits before it is delivered again
    held.add(position, until_ms)                 # until_ms None: it becomes a dead letter
    held.take_due(now_ms)                        # these may be delivered again
A message is delivered 1 + max_redeliver_count times. The cursor has the count and the time and stores them, so that a
restart continues from them (`restore_backoffs`). An entry that is held back is neither outstanding nor waiting for
redelivery: the dispatcher skips it. Guarding tests: tests/broker/subscription/core/test_redelivery_backoff.py.

Also in this file, below its heading: the encoding of a dead letter (dead_letter).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
from sortedcontainers import SortedSet

from ....proto.applied import AppliedPolicies
from ....proto.entry import (
    Buffer,
    EntryHeader,
    MessageFields,
    decode_batch,
    encode_client_part,
    encode_entry,
    parse_header,
    split_broker_part,
)
from ....proto.entry_filter import find_filter
from ....proto.entry_pb2 import MessageMetadata
from ....proto.errors import CorruptEntry, InvalidRequest
from ....proto.expiry import EXPIRED_AT_PROPERTY, EXPIRES_AT_PROPERTY
from ....proto.names import (
    DEAD_LETTER_REASON,
    DEAD_LETTERS,
    NAME_BYTES_MAX,
    ORIGIN_MESSAGE_ID,
    REAL_SUBSCRIPTION,
    REAL_TOPIC,
    REDELIVERY_COUNT,
    Position,
    TopicName,
    make_letter_topic_name,
    parse_number,
    shorten_name,
)
from ....proto.states import Failure
from ...common.refusals import SubscribeRefusal
from .cursor_state import RedeliveryCount

MAX_COUNT_PROPERTY, TOPIC_PROPERTY, BACKOFF_STEPS_PROPERTY = (
    "dead-letter.max-redeliver-count",
    "dead-letter.topic",
    "dead-letter.backoff-s",
)
"""Properties of a subscription that set its own policy, over that of its topic and namespace."""
PROPERTIES_BYTES_MAX = 4 << 10
"""Bytes of all properties of a subscription: its record contains them, and is written with each roll of its
ledger.
"""


class DeadLetterPolicy(msgspec.Struct, frozen=True):
    """What happens to entries that consumers give back: how long each waits until it is delivered again (its back-off),
    and when it is moved to the dead-letter topic. `topic`: the name of that topic; "": its default name. `backoff_s`:
    the seconds of the first, second, … wait. The policy is false if it moves no entries."""

    max_redeliver_count: int  # 0: none
    topic: str
    backoff_s: tuple[float, ...]

    def __bool__(self) -> bool:
        return self.max_redeliver_count > 0

    def is_dead_letter(self, times: int) -> bool:
        """Returns True if an entry that was given back `times` times has been delivered as often as allowed, so that it
        must be moved to the dead-letter topic."""
        return times > self.max_redeliver_count

    def backoff_ms(self, times: int) -> int:
        """Returns for how many ms an entry waits before its next delivery, after it was given back `times` times (from
        1 on); 0 without a list of back-offs. After the last step of that list, this step is repeated."""
        if not self.backoff_s:
            return 0
        return int(1000 * self.backoff_s[min(times, len(self.backoff_s)) - 1])

    def resolve_for_subscription(self, topic: TopicName, subscription: str) -> DeadLetterPolicy:
        """Returns the policy that the subscription uses. If the topic is itself a dead-letter topic, this is a policy
        without back-offs that moves no entries, because they would circulate for ever. Raises InvalidName as
        `dead_letter_topic` does."""
        if not self:
            return self
        its_own = not self.topic and topic.local.endswith(DEAD_LETTERS)
        return NO_DEAD_LETTERS if its_own or self.dead_letter_topic(topic, subscription).base == topic.base else self

    def dead_letter_topic(self, topic: TopicName, subscription: str) -> TopicName:
        """Returns the name of the topic to which the dead letters of the subscription are published. Raises InvalidName
        if `topic` of the policy is no valid name."""
        return TopicName.parse(self.topic) if self.topic else make_letter_topic_name(topic, subscription, DEAD_LETTERS)


NO_DEAD_LETTERS = DeadLetterPolicy(0, "", ())


def merge_dead_letter_policy(applied: AppliedPolicies, properties: Mapping[str, str]) -> DeadLetterPolicy:
    """Returns the dead-letter policy of a subscription. Each value is taken from the properties of the subscription; if
    it is not set there or cannot be parsed, from the policies of the topic (`applied`)."""
    count, ladder = applied.dead_letter_max_redeliver_count, applied.dead_letter_backoff_s
    own_count, own_ladder = properties.get(MAX_COUNT_PROPERTY, ""), properties.get(BACKOFF_STEPS_PROPERTY, "")
    if (own := parse_number(own_count)) is not None:
        count = own
    if own_ladder:
        with suppress(ValueError):
            ladder = tuple(max(0.0, float(step)) for step in own_ladder.split(","))
    return DeadLetterPolicy(count, properties.get(TOPIC_PROPERTY, applied.dead_letter_topic), ladder)


_NONE: SortedSet[tuple[int, Position]] = SortedSet()
"""The empty dictionary. One for all subscriptions, because it costs 2 KB: never add to it."""


class BackoffQueue:
    """The entries of a subscription that are held back: they wait for the end of a back-off, or to be published to the
    dead-letter topic. `until`: for each of them the end of its back-off (ms since the epoch); None for a dead
    letter."""

    __slots__ = ("_due", "until")

    def __init__(self) -> None:
        self.until: dict[Position, int | None] = {}
        self._due: SortedSet[tuple[int, Position]] = _NONE

    def __contains__(self, position: object) -> bool:
        return position in self.until

    def __len__(self) -> int:
        return len(self.until)

    def __iter__(self) -> Iterator[Position]:
        return iter(self.until)

    def restore_backoffs(
        self, counts: Mapping[Position, RedeliveryCount], policy: DeadLetterPolicy, now_ms: int
    ) -> list[Position]:
        """Fills the queue after a restart from the stored redelivery counts. Returns the entries that must be published
        to the dead-letter topic. `now_ms`: ms since the epoch.

        An entry waits at most as long as the back-off of `policy`, counted from `now_ms`: its `until_ms` was set by the
        clock of another broker, which may be hours ahead.
        """
        dead = []
        for position, count in counts.items():
            if policy and policy.is_dead_letter(count.redeliveries):
                self.add(position, None)
                dead.append(position)
            elif count.until_ms > now_ms:
                self.add(position, min(count.until_ms, now_ms + policy.backoff_ms(count.redeliveries)))
        return dead

    def add(self, position: Position, until_ms: int | None) -> None:
        """Holds the entry back until `until_ms` (ms since the epoch). None: until it is published to the dead-letter
        topic."""
        self.discard(position)
        self.until[position] = until_ms
        if until_ms is not None:
            if self._due is _NONE:
                self._due = SortedSet()
            self._due.add((until_ms, position))

    def discard(self, position: Position) -> None:
        """Removes the entry from the queue. Does nothing if the queue does not contain it."""
        until_ms = self.until.pop(position, None)
        if until_ms is not None:
            self._due.discard((until_ms, position))

    def take_due(self, now_ms: int) -> list[Position]:
        """Removes the entries whose back-off has ended at `now_ms` (ms since the epoch), and returns them, the earliest
        first."""
        found: list[Position] = []
        while self._due and self._due[0][0] <= now_ms:
            position = self._due.pop(0)[1]
            del self.until[position]
            found.append(position)
        return found

    def discard_entries_in_backoff(self) -> None:
        """Removes the entries that wait for the end of a back-off. Entries that wait for the dead-letter topic stay."""
        for _, position in self._due:
            del self.until[position]
        self._due.clear()

    @property
    def next_due_ms(self) -> int | None:
        """The time (ms since the epoch) at which the next back-off ends; None if no entry waits for a back-off."""
        return int(self._due[0][0]) if self._due else None

    def clear(self) -> None:
        """Removes all entries from the queue."""
        self.until.clear()
        self._due.clear()

    def check(self) -> None:
        timed = {(until_ms, position) for position, until_ms in self.until.items() if until_ms is not None}
        assert timed == set(self._due), "what has a time is in its order"


def check_properties(properties: Mapping[str, str]) -> None:
    """Raises InvalidRequest if the properties of a subscription have more than PROPERTIES_BYTES_MAX bytes, or if the
    dead-letter policy or the filter in them is invalid. Raises InvalidName if the name of the dead-letter topic is
    invalid."""
    size = sum(len(text.encode("utf-8", "surrogatepass")) for pair in properties.items() for text in pair)
    if size > PROPERTIES_BYTES_MAX:
        raise SubscribeRefusal.PROPERTIES.error(f"properties of {size} bytes are more than {PROPERTIES_BYTES_MAX}")
    count, ladder = properties.get(MAX_COUNT_PROPERTY, "0"), properties.get(BACKOFF_STEPS_PROPERTY, "0")
    if parse_number(count) is None:
        raise SubscribeRefusal.PROPERTIES.error(f"{MAX_COUNT_PROPERTY} is a whole number, not {count[:40]!r}")
    try:
        steps = [float(step) for step in ladder.split(",")]
    except ValueError as error:
        raise SubscribeRefusal.PROPERTIES.error(
            f"{BACKOFF_STEPS_PROPERTY} is seconds with commas between, not {ladder!r}"
        ) from error
    if not all(0 <= step <= 1e9 for step in steps):
        raise SubscribeRefusal.PROPERTIES.error(f"{BACKOFF_STEPS_PROPERTY}: a step is 0 s or more, not {ladder!r}")
    if TOPIC_PROPERTY in properties:
        TopicName.parse(properties[TOPIC_PROPERTY])
    try:
        find_filter(properties)
    except InvalidRequest as error:
        raise SubscribeRefusal.PROPERTIES.error(error.message, **error.fields) from error


# --------------------------------------------------------------------------------------------------- dead_letter
# A dead letter's bytes: the messages of an entry that are not acknowledged, one entry each, with their origin.
#
# Each keeps its payload, key, ordering key, event time and properties, and gets REAL_TOPIC, REAL_SUBSCRIPTION,
# ORIGIN_MESSAGE_ID, REDELIVERY_COUNT and DEAD_LETTER_REASON. Producer name and sequence id identify the message, so
# that a second copy after a crash is dropped where deduplication is on: one name per source entry, the batch index as
# the sequence id. An entry that cannot be taken apart is sent unchanged, as the payload of one message. An encrypted
# one stays one entry with its ciphertext: a batch goes as a whole, with the messages in it that are acknowledged.
#
# A message in chunks is one message: each of its chunks is copied with its bytes (`make_chunk_dead_letter`), under one
# name, with the place of its last chunk as its origin and a uuid of the copy's own. A chunk of a message that is not
# whole is sent unchanged, as the payload of one message. Guarding tests:
# tests/broker/subscription/core/test_dead_letter.py.


_OF_ITS_TOPIC = ("deliver_at_time", "highest_sequence_id", "txnid_most_bits", "txnid_least_bits")
"""Fields that are not copied, because they have no meaning in another topic. (The internal producer, which publishes
the copy, sets a `schema_version` of that topic.)"""


class DeadLetterOrigin(NamedTuple):
    """The origin of a dead letter: the topic, the subscription and the position of the entry. `redeliveries`: its
    redelivery count; `max_redeliver_count`: the largest allowed count; `failure`: why it was given back last (None: not
    known)."""

    topic: TopicName
    subscription: str
    position: Position
    redeliveries: int
    max_redeliver_count: int
    failure: Failure | None = None

    @property
    def producer_name(self) -> str:
        """The producer name under which the dead letters of this entry are published. Each source entry has another
        name, so that deduplication recognises a repeated dead letter."""
        ending = f"{DEAD_LETTERS}-{self.position.ledger_id}-{self.position.entry_id}"
        origin = f"{self.topic.local}-{self.topic.partition}-{self.subscription}"
        return shorten_name(origin, NAME_BYTES_MAX - len(ending)) + ending

    @property
    def reason(self) -> str:
        """A text that tells users why the entry is a dead letter."""
        return f"given back {self.redeliveries} times, at most {self.max_redeliver_count} redeliveries are allowed"


def make_dead_letters(source: DeadLetterOrigin, entry: Buffer, done: frozenset[int], now_ms: int) -> list[bytes]:
    """Makes the dead letters of an entry, and returns them in order, as client-parts (the part of an entry that a
    producer sends): one for each message whose batch index is not in `done` (the acknowledged messages). `now_ms`:
    their publish time, in ms since the epoch. If the messages cannot be separated, because the entry is encrypted,
    damaged, or a chunk, returns one dead letter."""
    reason = source.reason
    try:
        body = split_broker_part(entry)[2]
        header = parse_header(body)
        if header.metadata.num_chunks_from_msg > 1:
            of, number = header.metadata.num_chunks_from_msg, header.metadata.chunk_id
            why = f"{reason}; it is chunk {number} of {of} of a message of which the rest is missing"
            return [encode_entry(_addressed(source, -1, MessageMetadata(), now_ms, why), bytes(entry))]
        if header.metadata.encryption_keys:
            return [_as_it_is(source, header, bytes(body[header.payload_offset :]), now_ms)]
        messages = decode_batch(header, body)
    except CorruptEntry as error:
        metadata = _addressed(source, -1, MessageMetadata(), now_ms, f"the entry is damaged: {error.message}")
        return [encode_entry(metadata, bytes(entry))]
    letters = []
    for index, (fields, payload) in enumerate(messages):
        if index not in done:
            copied = copy_message_metadata(header, fields)
            metadata = _addressed(source, index if header.batched else -1, copied, now_ms, reason)
            letters.append(encode_entry(metadata, payload))
    return letters


def make_chunk_dead_letter(source: DeadLetterOrigin, entry: Buffer, now_ms: int) -> bytes:
    """Returns the dead letter for one chunk of a large message, as a client-part (the part of an entry that a producer
    sends). `source.position` must be the position of the message's last chunk. `now_ms`: the publish time, in ms since
    the epoch. Raises CorruptEntry if the entry is damaged."""
    body = split_broker_part(entry)[2]
    header = parse_header(body)
    return _as_it_is(source, header, bytes(body[header.payload_offset :]), now_ms, uuid=f"{source.producer_name}-0")


def _as_it_is(source: DeadLetterOrigin, header: EntryHeader, payload: bytes, now_ms: int, *, uuid: str = "") -> bytes:
    """Returns a dead letter with the unchanged payload of its entry: encrypted bytes, or a chunk."""
    metadata = copy_message_metadata(header, header.metadata, as_it_is=True)
    if uuid:
        metadata.uuid = uuid
    return encode_client_part(_addressed(source, -1, metadata, now_ms, source.reason), payload)


def copy_message_metadata(header: EntryHeader, fields: MessageFields, *, as_it_is: bool = False) -> MessageMetadata:
    """Returns the metadata for a copy of a message in another topic. It keeps the schema version of its own topic,
    which `InternalProducer.publish_copies` (broker/node/internal_producer.py) later replaces. `header`: that of the
    entry; `fields`: the metadata of the message. `as_it_is`: the payload is copied unchanged (it is encrypted, or a
    chunk), so it stays compressed."""
    metadata = MessageMetadata()
    if isinstance(fields, MessageMetadata):
        metadata.CopyFrom(header.metadata)
        for name in (*_OF_ITS_TOPIC, *(() if as_it_is else ("compression", "uncompressed_size"))):
            metadata.ClearField(name)
        return metadata
    for name in (
        "partition_key", "partition_key_b64_encoded", "null_partition_key", "ordering_key", "event_time", "null_value",
    ):  # fmt: skip
        if fields.HasField(name):
            setattr(metadata, name, getattr(fields, name))
    if header.metadata.schema_version:
        metadata.schema_version = header.metadata.schema_version
    metadata.properties.extend(fields.properties)
    return metadata


def _addressed(
    source: DeadLetterOrigin, index: int, metadata: MessageMetadata, now_ms: int, reason: str
) -> MessageMetadata:
    """Returns the metadata with the producer name and the sequence id of the dead letter, and with properties that name
    its origin."""
    ledger_id, entry_id = source.position
    metadata.producer_name = source.producer_name
    metadata.sequence_id = max(0, index)
    metadata.publish_time = now_ms
    for pair in metadata.properties:
        if pair.key == EXPIRES_AT_PROPERTY:  # a letter is kept until somebody looks at it
            pair.key = EXPIRED_AT_PROPERTY
    metadata.ClearField("expiry_runs")
    there = {pair.key for pair in metadata.properties}
    told = {
        REAL_TOPIC: source.topic.full,
        REAL_SUBSCRIPTION: source.subscription,
        ORIGIN_MESSAGE_ID: f"({ledger_id},{entry_id},{source.topic.partition},{index})",
        REDELIVERY_COUNT: str(source.redeliveries),
        DEAD_LETTER_REASON: reason,
    }
    if source.failure is not None:
        told |= source.failure.to_properties(source.redeliveries)
    for key, value in told.items():
        if key not in there:
            metadata.properties.add(key=key, value=value)
    return metadata
