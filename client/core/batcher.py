"""The batcher: collects the messages of a producer for one partition into batches. It is a core without I/O; its driver
guards it with a lock.

A batch is closed, and moves to `ready`, in three cases: it has `messages_max` messages; the next message would make it
larger than `bytes_max`; the driver calls `close_batches` (after the batch delay, or at a flush). A delayed message has
a batch of its own: the open batch is closed first, so that the order is kept. The open batch is also closed when a
message of another transaction, or of none, follows: all messages of an entry belong to the same transaction.

**Sequence ids** are assigned when a message is added, in order, each once. A message may name its own id. The broker
may know ids of an earlier run of the producer (`set_first_sequence_id`). A batch never has ids on both sides of the
last of them, because the broker judges a batch as a whole to be stored already or new.

A message that names an id not above all assigned ids *goes back* (`OutgoingBatch.goes_back`). It is alone in its entry
and changes no other message's id; where publishes are deduplicated the broker drops it. After a time-out
`allow_sequence_id_reuse` lets the program name the same ids again as if they were new, because their outcome is
unknown.

Messages that expire (proto/expiry.py) share batches with others. The head of the entry says which of them expire, in
EXPIRY_RUNS_MAX runs of neighbours at most. A message that would need a further run begins the next batch.

With `key_based` (Pulsar PR3) there is one open batch per key; the ordering key counts before the partition key, and
messages without a key share a batch. With `batch_by` there is one open batch per combination of the values of these
properties, so that a filter by them wants all messages of an entry or none. A property that a message lacks is a value
of its own. With both, a group has the same key and the same values.

The messages of such a batch get their ids when the batch is closed, so that the ids of each entry are consecutive, and
the broker can detect a duplicate. A message that names its own id closes all batches but its own. With `batch_by` at
most OPEN_GROUPS_MAX batches are open: the one that was opened first is closed before the next is opened.

With `summarized` each batch has a summary of these properties (proto/summary.py).

    add(payload, callback)          a message with a payload and nothing else: the fast path
    add_message(message, callback)  a message with key, properties, times, …
    close_batches()                 moves the open batches to `ready`

`add` and `add_message` return whether `ready` contains a batch. `encode_batch_entry` encodes a batch in the format of
proto/entry.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...proto.entry import (
    PLAIN,
    PLAIN_PREFIXES,
    EncryptFunction,
    EntryEncoding,
    encode_batch,
    encode_entry,
    encode_item_prefix,
    join_client_part,
)
from ...proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from ...proto.expiry import (
    EXPIRES_AT_PROPERTY,
    EXPIRY_RUNS_MAX,
    ExpiryRun,
    add_expiry_run,
    extends_last_run,
    parse_expires_at,
)
from ...proto.names import Position
from ...proto.summary import SummaryBuilder
from .transaction import TransactionPort

SendCallback = Callable[[Any, Any], object] | None
"""Called with the Result and the MessageId of a message once its outcome is known; None: no callback."""

ITEM_PREFIX_BYTES = 8
"""Bytes counted for the prefix of a plain item (4 of size, 2 to 5 of metadata)."""
OPEN_GROUPS_MAX = 16
"""Batches that are open at a time with `batch_by`: a property with many values makes no more small entries than that
in one batch delay."""

GroupKey = bytes | tuple[bytes | str | None, ...]
"""What the messages of an open batch have in common: their key, and the values of the properties of `batch_by`."""


@dataclass(slots=True)
class OutgoingMessage:
    """A message for a producer to send: the payload, and the other fields that the program may set. `event_time` (0:
    none) and `deliver_at` (None: at once) are in ms since the epoch. `sequence_id` None: the batcher gives it one.
    `null_value`: the message has no value."""

    payload: bytes
    properties: dict[str, str] = field(default_factory=dict)
    partition_key: str | None = None
    ordering_key: bytes | None = None
    event_time: int = 0
    sequence_id: int | None = None
    deliver_at: int | None = None
    replicate_to: tuple[str, ...] = ()  # clusters that may get it, of the namespace's replication clusters; (): all
    null_value: bool = False
    null_key: bool = False  # the key of the (key, value) pair is None
    key_is_base64: bool = False  # the key is bytes, and partition_key their base64
    encrypt: EncryptFunction | None = None  # replaces the producer's, for a copy (client/consume/dead_letters.py)
    txn: TransactionPort | None = None  # the message counts when this transaction commits
    plain: bool = False  # only the payload is set

    @property
    def needs_own_entry(self) -> bool:
        """Returns whether the message cannot share an entry with others, because it sets fields that apply to a whole
        entry."""
        return self.deliver_at is not None or bool(self.replicate_to)


class OutgoingBatch:
    """Messages that become one entry, with their callbacks. The batch exists until the messages have their outcome.

    `items` alternate prefix and payload. `message` is set when the message is sent unbatched. The other fields are set
    after the batch is closed: `entry` (the encoded entry), `born` (the time of the encoding, in s), `connections` (over
    how many connections the entry was published), `waiters` (for its outcome) and `chunks`.

    A message in chunks has one `OutgoingBatch` per chunk. The last of them has the callback, and all share the list
    `chunks` of the positions at which chunks are stored."""

    __slots__ = (
        "born", "callbacks", "chunks", "connections", "dense", "entry", "expiring", "goes_back", "highest", "items",
        "key", "message", "ordering_key", "payload_bytes", "sequence_id", "size", "summary", "txn", "waiters",
    )  # fmt: skip

    def __init__(self, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self.highest = sequence_id - 1
        self.items: list[bytes] = []
        self.callbacks: list[SendCallback] = []
        self.goes_back = False  # its message names a sequence id that is not above all earlier ids
        self.dense = True  # each id follows the one before it
        self.size = 0
        self.payload_bytes = 0
        self.key: str | None = None
        self.ordering_key: bytes | None = None
        self.message: OutgoingMessage | None = None
        self.entry = b""
        self.born = 0.0
        self.connections = 0
        self.chunks: list[Position] | None = None
        self.waiters: list[Any] | None = None
        self.txn: TransactionPort | None = None
        self.summary: SummaryBuilder | None = None
        self.expiring: list[ExpiryRun] | None = None  # of its messages, those that expire

    @property
    def message_count(self) -> int:
        """Returns the number of messages in the batch; 0 for a chunk that is not the last of its message."""
        return len(self.callbacks)


class Batcher:
    """Collects the messages for one partition into batches, of which each becomes one entry. See the head of the
    module."""

    def __init__(
        self, next_sequence_id: int, *, messages_max: int = 1000, bytes_max: int = 131072,
        batching: bool = True, key_based: bool = False, batch_by: Sequence[str] = (), summarized: Sequence[str] = (),
    ) -> None:  # fmt: skip
        assert min(messages_max, bytes_max) > 0, "a batch has room for something"
        self.next_sequence_id = next_sequence_id
        self.ready: deque[OutgoingBatch] = deque()
        self._given = next_sequence_id - 1  # the highest id
        self._known = -1  # the highest id of an earlier life that the broker knows
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._batching = batching
        self._key_based = key_based
        self._batch_by = batch_by
        self._summarized = summarized
        self._is_grouped = key_based or bool(batch_by)
        self._open: OutgoingBatch | None = None
        self._groups: dict[GroupKey, OutgoingBatch] = {}
        self._named = False  # what is open in groups has ids that its messages named
        self._txn: TransactionPort | None = None  # of what is open

    def set_first_sequence_id(self, last: int, next_sequence_id: int) -> None:
        """Sets the sequence id of the next message to `next_sequence_id`. `last`: the highest id that the broker knows
        of this producer. Must be called before any message is added."""
        self._known = last
        self.next_sequence_id = next_sequence_id

    def allow_sequence_id_reuse(self, first: int) -> None:
        """Allows messages to use the sequence ids from `first` on a second time, because the outcome of the earlier
        messages with these ids is unknown. Does nothing while messages wait in the batcher."""
        if not self.ready and not self.open_message_count:
            self._given = min(self._given, first - 1)

    def add(self, payload: bytes, callback: SendCallback, txn: TransactionPort | None = None) -> bool:
        """Adds a message that has a payload and no other field, in the transaction `txn` (None: in none). Returns
        whether `ready` contains a batch."""
        if self._is_grouped or self._summarized:
            return self.add_message(OutgoingMessage(payload, txn=txn), callback)
        if txn is not self._txn:
            self._switch_txn(txn)
        size = len(payload)
        if not self._batching:
            alone = OutgoingBatch(self.next_sequence_id)
            alone.message = OutgoingMessage(payload, txn=txn, plain=True)
            alone.txn = txn
            alone.items, alone.callbacks = [b"", payload], [callback]
            alone.size = alone.payload_bytes = size
            alone.highest = self._given = self.next_sequence_id
            self.next_sequence_id += 1
            self.ready.append(alone)
            return True
        batch = self._open
        if batch is None or batch.size + size > self._bytes_max or not batch.dense:
            if batch is not None:
                self.ready.append(batch)
            batch = self._open = OutgoingBatch(self.next_sequence_id)
            batch.txn = txn
        batch.items += (PLAIN_PREFIXES[size], payload)
        batch.callbacks.append(callback)
        batch.size += size + ITEM_PREFIX_BYTES
        batch.payload_bytes += size
        batch.highest = self._given = self.next_sequence_id
        self.next_sequence_id += 1
        if batch.size >= self._bytes_max or len(batch.callbacks) >= self._messages_max:
            self.ready.append(batch)
            self._open = None
            return True
        return len(self.ready) > 0

    def _switch_txn(self, txn: TransactionPort | None) -> None:
        self.close_batches()
        self._txn = txn

    def add_message(self, message: OutgoingMessage, callback: SendCallback) -> bool:
        """Adds a message with any fields. Returns whether `ready` contains a batch. Raises TypeError, ValueError or
        OverflowError if a field of a message that joins a batch cannot be encoded: the message is not added then, and
        the next one gets its sequence id. A message that is alone in its entry is encoded later."""
        if message.txn is not self._txn:
            self._switch_txn(message.txn)
        goes_back = message.sequence_id is not None and message.sequence_id <= self._given
        if message.needs_own_entry or goes_back or not self._batching:
            self.close_batches()
            sequence_id = self._take_sequence_id(message)
            batch = OutgoingBatch(sequence_id)
            batch.goes_back = goes_back
            batch.message = message
            self._add_to_batch(batch, message, b"", sequence_id, callback)
            self.ready.append(batch)
            return True
        if self._is_grouped and message.sequence_id is None:
            return self._add_to_group(message, callback)
        if self._is_grouped and not (self._named and self._find_group(message) in self._groups):
            self.close_batches()
            self._named = True
        before = self._given, self.next_sequence_id
        sequence_id = self._take_sequence_id(message)
        try:
            fitting = self._find_fitting_batch(message, sequence_id)
            derived = fitting is None or (fitting.dense and sequence_id == fitting.highest + 1)
            prefix = encode_item_prefix(_single_metadata(message, None if derived else sequence_id))
        except BaseException:
            self._given, self.next_sequence_id = before
            raise
        batch = self._batch_for(fitting, message, len(prefix) + len(message.payload), sequence_id)
        batch.dense = batch.dense and (not batch.callbacks or sequence_id == batch.highest + 1)
        self._add_to_batch(batch, message, prefix, sequence_id, callback)
        if batch.size >= self._bytes_max or batch.message_count >= self._messages_max:
            self.close_batches()
        return len(self.ready) > 0

    def _add_to_group(self, message: OutgoingMessage, callback: SendCallback) -> bool:
        """Adds a message to the batch of its group. The message gets its sequence id when that batch is closed."""
        if self._named:
            self.close_batches()
        prefix = encode_item_prefix(_single_metadata(message, None))
        batch = self._batch_for(self._open_batch_of(message), message, len(prefix) + len(message.payload), -1)
        self._add_to_batch(batch, message, prefix, -1, callback)
        if batch.size >= self._bytes_max or batch.message_count >= self._messages_max:
            self.close_batches()
        return len(self.ready) > 0

    def close_batches(self) -> bool:
        """Closes all open batches: moves them to `ready`, in the order of their first messages. Returns whether `ready`
        contains a batch."""
        if self._open is not None:
            self.ready.append(self._open)
            self._open = None
        while self._groups:
            self._close_oldest_group()
        self._named = False
        return len(self.ready) > 0

    def _close_oldest_group(self) -> None:
        batch = self._groups.pop(next(iter(self._groups)))
        if batch.sequence_id < 0:
            batch.sequence_id = self.next_sequence_id
            batch.highest = self._given = batch.sequence_id + batch.message_count - 1
            self.next_sequence_id = batch.highest + 1
        self.ready.append(batch)

    @property
    def is_open(self) -> bool:
        """Returns whether a batch with messages is open."""
        return self._open is not None or bool(self._groups)

    @property
    def open_message_count(self) -> int:
        return (self._open.message_count if self._open else 0) + sum(
            batch.message_count for batch in self._groups.values()
        )

    def _take_sequence_id(self, message: OutgoingMessage) -> int:
        sequence_id = self.next_sequence_id if message.sequence_id is None else message.sequence_id
        self._given = max(self._given, sequence_id)
        self.next_sequence_id = max(self.next_sequence_id, sequence_id + 1)
        return sequence_id

    def _find_group(self, message: OutgoingMessage) -> GroupKey:
        key = (message.ordering_key or (message.partition_key or "").encode()) if self._key_based else b""
        return (key, *map(message.properties.get, self._batch_by)) if self._batch_by else key

    def _open_batch_of(self, message: OutgoingMessage) -> OutgoingBatch | None:
        return self._groups.get(self._find_group(message)) if self._is_grouped else self._open

    def _find_fitting_batch(self, message: OutgoingMessage, sequence_id: int) -> OutgoingBatch | None:
        """Returns the open batch to which the message may be added, or None if there is none. If the ids of the batch
        would then span the last id that the broker knows, closes the batch first and returns None."""
        batch = self._open_batch_of(message)
        if batch is not None and batch.sequence_id <= self._known < sequence_id:
            named = self._named
            self.close_batches()
            self._named = named
            return None
        return batch

    def _batch_for(
        self, batch: OutgoingBatch | None, message: OutgoingMessage, size: int, sequence_id: int
    ) -> OutgoingBatch:
        if batch is not None and (batch.size + size > self._bytes_max or _has_too_many_runs(batch, message)):
            named = self._named
            self.close_batches()
            batch, self._named = None, named
        if batch is None:
            batch = OutgoingBatch(sequence_id)
            if self._is_grouped:
                if self._batch_by and len(self._groups) >= OPEN_GROUPS_MAX:
                    self._close_oldest_group()
                self._groups[self._find_group(message)] = batch
            else:
                self._open = batch
        return batch

    def _add_to_batch(
        self, batch: OutgoingBatch, message: OutgoingMessage, prefix: bytes, sequence_id: int, callback: SendCallback
    ) -> None:
        if not batch.callbacks:
            batch.key, batch.ordering_key = message.partition_key, message.ordering_key
            batch.txn = message.txn
            if self._summarized and batch.message is None:
                batch.summary = SummaryBuilder(self._summarized)
        if batch.summary is not None:
            batch.summary.add_message(message.properties)
        if EXPIRES_AT_PROPERTY in message.properties and (
            at_ms := parse_expires_at(message.properties[EXPIRES_AT_PROPERTY])
        ):
            if batch.expiring is None:
                batch.expiring = []
            add_expiry_run(batch.expiring, batch.message_count, at_ms)
        batch.items += (prefix, message.payload)
        batch.callbacks.append(callback)
        batch.size += len(prefix) + len(message.payload)
        batch.payload_bytes += len(message.payload)
        batch.highest = sequence_id

    def check(self) -> None:
        """Raises AssertionError unless the sequence ids of waiting batches rise, no batch is empty or above its bounds,
        and no id exceeds the next one to assign."""
        last = -1 << 63
        for batch in [*self.ready, *([self._open] if self._open else [])]:
            assert batch.message_count > 0, "no batch is empty"
            assert batch.message_count <= self._messages_max
            assert len(batch.items) == 2 * batch.message_count
            assert batch.highest >= batch.sequence_id
            assert batch.highest < self.next_sequence_id
            if batch.goes_back:
                assert batch.message is not None, "what goes back is alone"
                continue
            assert batch.sequence_id > last, "batches are in the order of their sequence ids"
            last = batch.highest


def _has_too_many_runs(batch: OutgoingBatch, message: OutgoingMessage) -> bool:
    """Returns whether the message would need a further run of messages that expire together, and the batch has no room
    for one."""
    runs = batch.expiring
    if (
        runs is None
        or len(runs) < EXPIRY_RUNS_MAX
        or not (at_ms := parse_expires_at(message.properties.get(EXPIRES_AT_PROPERTY)))
    ):
        return False
    return not extends_last_run(runs, batch.message_count, at_ms)


def _single_metadata(message: OutgoingMessage, sequence_id: int | None) -> SingleMessageMetadata:
    metadata = SingleMessageMetadata(payload_size=len(message.payload))
    _describe(metadata, message)
    if sequence_id is not None:
        metadata.sequence_id = sequence_id
    return metadata


def _describe(metadata: SingleMessageMetadata | MessageMetadata, message: OutgoingMessage) -> None:
    if message.partition_key is not None:
        metadata.partition_key = message.partition_key
        if message.key_is_base64:
            metadata.partition_key_b64_encoded = True
    if message.null_key:
        metadata.null_partition_key = True
    if message.ordering_key is not None:
        metadata.ordering_key = message.ordering_key
    if message.event_time:
        metadata.event_time = message.event_time
    if message.null_value:
        metadata.null_value = True
    for key, value in message.properties.items():
        metadata.properties.add(key=key, value=value)


def make_entry_metadata(
    batch: OutgoingBatch, producer_name: str, publish_time_ms: int, encoding: EntryEncoding
) -> MessageMetadata:
    """Returns the metadata of the entry that a batch becomes. If the batch is a single message that is sent unbatched,
    the metadata contains all fields of that message. `publish_time_ms`: ms since the epoch."""
    metadata = MessageMetadata(
        producer_name=producer_name, sequence_id=batch.sequence_id, publish_time=publish_time_ms
    )
    if encoding.compression:
        metadata.compression = encoding.compression  # type: ignore[assignment]
    if encoding.schema_version:
        metadata.schema_version = encoding.schema_version
    if batch.txn is not None:
        metadata.txnid_most_bits, metadata.txnid_least_bits = batch.txn.id
    message = batch.message
    if message is not None and not message.plain:
        _describe(metadata, message)
        if message.deliver_at is not None:
            metadata.deliver_at_time = message.deliver_at
        metadata.replicate_to.extend(message.replicate_to)
    return metadata


def encode_batch_entry(
    batch: OutgoingBatch, producer_name: str, publish_time_ms: int, encoding: EntryEncoding = PLAIN
) -> bytes:
    """Encodes a batch as an entry. Returns the client-part of the entry: its metadata and payload, as the client sends
    them. The parameters are those of `make_entry_metadata`. Raises CryptoError if `encoding.encrypt` cannot encrypt the
    payload; TypeError, ValueError or OverflowError if a field cannot be encoded."""
    metadata = make_entry_metadata(batch, producer_name, publish_time_ms, encoding)
    if batch.message is not None:
        if encoding.compression or encoding.encrypt is not None:
            return encode_entry(metadata, batch.message.payload, encoding)
        return join_client_part(metadata.SerializeToString(), batch.message.payload)
    metadata.highest_sequence_id = batch.highest
    if batch.summary is not None and (summary := batch.summary.encode()):
        metadata.summary = summary
    if batch.key is not None:
        metadata.partition_key = batch.key
    if batch.ordering_key is not None:
        metadata.ordering_key = batch.ordering_key
    if batch.expiring is not None:
        metadata.expiry_runs.extend(number for run in batch.expiring for number in run)
    return encode_batch(metadata, batch.items, batch.message_count, encoding)
