"""Splits the entries that the broker delivers into the messages that the application receives (`DeliveredEntries`).

The application does not receive: messages that are acknowledged already, according to the broker; messages before a
reader's start; messages that compaction removed; messages that the filter does not want; chunks of an incomplete
message; messages that cannot be decrypted (`ConsumerCryptoFailureAction`); and dead letters. A chunked message is one
message for the application: its entry is that of the last chunk, and all its entries are acknowledged and redelivered
together (client/core/chunking.py).

An entry that cannot be read becomes a message for which `receive` raises ChecksumError: it is reported once, never
skipped. If its bytes are damaged the entry is not acknowledged, because another replica may be intact. If its bytes are
those that were published, no reader will ever be able to read it: it is *discarded*, as by Pulsar's clients. That is,
it is acknowledged, logged and counted (`Consumer.statistics`), so that it does not count as unacknowledged for ever.

A large entry is decompressed when the memory limit has room for it (client/common/rate_limits.py). Until then this
entry and all entries after it wait in compressed form (`_folded`), so that the order is kept. The core counts them as
in flight. Also the frames to send for a consumer's effects (`make_client_frames`)."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.compression import decompress
from ...proto.entry import (
    EncryptFunction,
    EntryHeader,
    EqualLengthPayloads,
    count_declared_messages,
    decode_message_columns_lazily,
    decode_payload,
    get_routing_key,
    has_valid_checksum,
    key_of_single_message,
    parse_broker_part,
    parse_checked_head,
)
from ...proto.entry_filter import passes_filter
from ...proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from ...proto.errors import CorruptEntry, InvalidRequest
from ...proto.filters import Filter, parse_filter
from ...proto.names import REDRIVEN_TO, Position, compute_key_slot, parse_redriven_to
from ...proto.states import Failure
from ..common.errors import CryptoError
from ..common.rate_limits import LARGE_ENTRY_BYTES, ReceiveMemoryLimit
from ..core.consumer import ConsumerCore
from ..core.effects import (
    ConsumerEffect,
    GrantPermits,
    ReaderPosition,
    RequestRedelivery,
    SeekIndex,
    SendAcks,
    SendSeekRequest,
)
from ..core.redelivery import WHOLE_ENTRY, AckGroup, EntrySets
from ..model.encryption import Decryptor
from ..model.message import CiphertextMessage, DamagedMessage, Message, ReceivedEntry, ReceivingConsumer
from ..model.message_id import MessageId
from ..model.options import ReaderStart, find_first_wanted_id
from ..model.settings import ConsumerCryptoFailureAction, ConsumerSettings, ConsumerType
from .dead_letters import DeadLetterProducer, is_dead_letter

_LOG = logging.getLogger("magnetar.client")
_tuple = tuple.__new__
"""Makes a Position for each entry in half the time of the constructor of the named tuple."""
ENTRY_SLOTS_MAX = 65_536
"""Most entries whose key slots are remembered. A failed entry whose keys are forgotten blocks no other entry in the
client; the broker still blocks its keys."""
DECRYPT_LOG_EVERY_S = 10.0
"""Seconds between two log lines that report entries of one partition that cannot be decrypted."""


SeekTarget = MessageId | SeekIndex | int
"""Where a consumer or reader is moved: a message, an index in its partition, or a time in ms since the epoch."""


class DecompressionDeferred(Exception):
    """Raised when the memory limit has no room for a decompressed entry. The entry stays compressed until there is
    room."""


class PayloadUndecryptable(Exception):
    """Raised when the payload of an entry cannot be decrypted: `received` is the entry, `cause` the reason."""

    def __init__(self, received: ReceivedEntry, cause: CryptoError) -> None:
        super().__init__(cause.message)
        self.received = received
        self.cause = cause


class DeliveredEntries:
    """The entries that the broker delivered to one partition's consumer. `split_deliveries` splits them into messages,
    which `take_received_messages` returns. Belongs to the event loop, but for `on_large_entry_dequeued`."""

    def __init__(
        self, consumer: ReceivingConsumer, settings: ConsumerSettings, core: ConsumerCore, clock: Callable[[], float],
        dead_letters: DeadLetterProducer | None, start: ReaderStart | None, longer_s: Callable[[int], float],
        memory: ReceiveMemoryLimit,
    ) -> None:  # fmt: skip
        """Makes the object without entries. `dead_letters`: moves messages that were redelivered too often; None: no
        message is moved. `start`: where a reader begins; None: the consumer has a durable subscription.
        `longer_s(redelivery_count)` returns the seconds that are added to the ack time-out of an entry."""
        self.start = start  # readers only: what is before it is left out; None: only the broker knows where it is
        self.discarded = 0  # entries that are malformed
        self.filtered = 0  # messages that came and are not wanted
        self._filter = parse_filter(settings.filter.strip()) if settings.filter is not None else None
        self.expired = 0  # messages that expired while they waited here
        self._came: list[Message] = []
        self._charged = self._hidden = self._bytes = 0
        self._consumer = consumer
        self._settings = settings
        self._core = core
        self._clock = clock
        self._dead_letters = dead_letters
        self._durable = start is None
        self._decryptor = Decryptor(settings.crypto_key_reader, clock)
        self._longer_s = longer_s
        self._crypto_said = -inf  # when the log was told last that something is not decrypted
        self._memory = memory
        # arguments of `split_entry`, in order
        self._folded: deque[tuple[bytes, Position, int, Sequence[int], float | None]] = deque()
        self._unfolded = 0  # bytes of large entries of ours that wait for the application, …
        self._taken: deque[int] = deque()  # … less these, which it took
        self._permits_of_each = (
            bool(settings.unacked_messages_timeout_ms or settings.debounce) or not settings.durable
        )
        in_order = settings.redelivery_order == "key"
        self._moved: OrderedDict[Position, int] | None = OrderedDict() if in_order else None
        """Entry → the messages of a batch, as bits, that were moved to the dead-letter topic, one after the other."""
        by_keys = in_order and settings.consumer_type == ConsumerType.KeyShared
        self.slots: OrderedDict[Position, frozenset[int]] | None = OrderedDict() if by_keys else None
        """Slots of the latest entries, where what failed holds back what follows it of its keys."""

    def split_deliveries(self, frames: Iterator[wire.ServerFrame]) -> wire.ServerFrame | None:
        """Reads frames from the iterator `frames` and splits the entries that they deliver into messages. Stops at the
        first frame of another kind and returns that frame; returns None if all frames are deliveries."""
        came, opened = self._came, self.split_entry
        for frame in frames:
            kind = frame.WhichOneof("kind")
            if kind == "deliveries":
                several = frame.deliveries
                ledger_id = several.ledger_id
                for entry_id, entry in zip(several.entry_ids, several.entries, strict=True):
                    came += opened(entry, _tuple(Position, (ledger_id, entry_id)))
            elif kind == "delivery":
                one = frame.delivery
                entry = one.entry  # protobuf makes a copy of it
                position = _tuple(Position, (one.ledger_id, one.entry_id))
                if one.HasField("failure"):
                    told = one.failure
                    failure = Failure(told.error, told.message, told.traceback, told.consumer)
                    self._consumer.remember_failure(position, failure)
                clock_ms = one.broker_ms - 1000 * self._clock() if one.broker_ms else None
                came += opened(entry, position, one.redelivery_count, one.acked_batch_indexes, clock_ms)
            else:
                return frame
        return None

    def take_received_messages(self) -> tuple[list[Message], int, int, int]:
        """Removes and returns what was delivered since the last call, as a tuple: the messages for the application; the
        permits of all entries; the permits of entries without a message for the application, except those that become
        dead letters, whose permits return when they are moved; the bytes of all entries, of each the larger of its
        stored and its decompressed size."""
        came = self._came, self._charged, self._hidden, self._bytes
        self._came = []
        self._charged = self._hidden = self._bytes = 0
        return came

    # ------------------------------------------------------------------------------ what waits folded
    def on_large_entry_dequeued(self, received: ReceivedEntry) -> None:
        """Fact: the application received a message of a large entry, so the memory that was counted for this entry is
        free. May be called from any thread; the event loop must call `decompress_waiting_entries` soon."""
        size, received.unfolded = received.unfolded, 0
        self._taken.append(size)

    def decompress_waiting_entries(self) -> bool:
        """Decompresses entries that wait for memory, as far as the memory limit has room; `take_received_messages` then
        returns their messages. Returns False if no entry waited."""
        if self._taken:
            self._free_taken()
        if not self._folded:
            return False
        waiting, self._folded = self._folded, deque()
        while waiting and not self._folded:
            self._came += self.split_entry(*waiting.popleft())
        self._folded += waiting
        return True

    def compressed_positions(self) -> list[Position]:
        """Returns the positions of the entries that wait in compressed form."""
        return [position for _, position, *_ in self._folded]

    def discard_waiting_entries(self) -> int:
        """Drops the entries that wait in compressed form, and releases the memory that was counted for large entries.
        Called when the broker will deliver these entries again, or they are not needed. Returns the permits of the
        dropped entries."""
        self._taken.clear()
        self._memory.decompressed_bytes -= self._unfolded
        self._unfolded = 0
        permits = sum(max(0, count_declared_messages(entry) - len(acked)) for entry, _, _, acked, _ in self._folded)
        self._folded.clear()
        return permits

    def _has_room(self, size: int) -> bool:
        self._free_taken()
        return not self._unfolded or self._memory.has_room(size)

    def _free_taken(self) -> None:
        while self._taken:
            freed = min(self._taken.popleft(), self._unfolded)
            self._unfolded -= freed
            self._memory.decompressed_bytes -= freed

    # ------------------------------------------------------------------------------ where a reader begins
    def make_copy_encryptor(self, metadata: MessageMetadata) -> EncryptFunction | None:
        """Returns a function that encrypts a copy of a received message, so that the readers of the message can read
        the copy. Returns None if the message was not encrypted. Raises CryptoError if the message cannot be
        decrypted."""
        return self._decryptor.make_copy_encryptor(metadata) if metadata.encryption_param else None

    def on_cursor_moved(self, to: SeekTarget) -> None:
        """Fact: the broker moved the cursor to `to`. Sets `start`, the start of a reader, to that position, or to None
        if only the broker knows the position. Clears the record of dead letters."""
        self.start = None
        self.clear_dead_lettered_messages()
        if not self._durable and isinstance(to, MessageId):
            everywhere = to in (MessageId.earliest, MessageId.latest)
            self.start = ReaderStart(to, self._settings.start_message_id_inclusive and not everywhere)

    def on_start_position_known(self, after: wire.MessageId) -> None:
        """Fact: the broker starts to deliver after the message `after`. A reader that starts at `latest` starts after
        this message from now on. So it does not miss messages that are published while it reconnects."""
        if self.start is not None and self.start.id == MessageId.latest:
            place = MessageId(self._consumer.topic.partition, after.ledger_id, after.entry_id, after.batch_index)
            self.start = ReaderStart(place, False)

    def make_reader_start(self, place: ReaderPosition) -> ReaderStart:
        """Returns the ReaderStart with which a reader subscribes again after a reconnect, so that it continues at
        `place`; the reader's own start if it has read nothing."""
        if place.taken is not None:
            self.start = ReaderStart(place.taken, False, place.begun)
        return self.start or ReaderStart(MessageId.latest, False)

    # ------------------------------------------------------------------------------ one entry
    def split_entry(
        self, entry: bytes, position: Position, redelivered: int = 0, acked: Sequence[int] = (),
        clock_ms: float | None = None,
    ) -> Sequence[Message]:
        """Splits the entry at `position` into messages. Returns the messages for the application; an empty sequence if
        there are none, or if the entry must wait in compressed form. `redelivered`: the redelivery count. `acked`: the
        batch indexes that are acknowledged already. `clock_ms`: by how many ms the broker's clock is ahead of this
        process's monotonic clock, if messages of the entry expire; else None."""
        core = self._core
        if self._folded:
            self._folded.append((entry, position, redelivered, acked, clock_ms))
            return ()
        try:
            received, wanted, body = decode_messages(
                self._consumer, entry, position, self.start, redelivered, acked, self._decryptor, self._has_room
            )
            if body is not None and core.has_withheld_entries:
                core.release_withheld(position)
            received.stream = core.permits.stream
            received.broker_clock_ms = clock_ms if self._durable else None
            if wanted is None:
                wanted = self._take_chunk(
                    received, bytes(entry[received.header.payload_offset :]) if body is None else body
                )
            elif core.chunks.incomplete:
                core.on_unchunked_entry(received.header.producer_name, position, self._clock())
        except DecompressionDeferred:
            self._folded.append((entry, position, redelivered, acked, clock_ms))
            return ()
        except CorruptEntry as error:
            self._bytes += len(entry)
            return [self._damaged(error, entry, position, acked)]
        except PayloadUndecryptable as error:
            return self._undecryptable(error.received, error.cause, entry)
        size = decompressed_bytes(received.header) if received.header.uncompressed_size else 0
        self._bytes += max(len(entry), size)
        self._charged += received.charged
        if self._settings.is_read_compacted:
            wanted = self._without_removed(received, wanted)
        if self._moved:
            wanted = self._without_moved(received, wanted, self._moved.get(position, 0))
        keyed = wanted
        if self._filter is not None:
            wanted = self._without_unwanted(self._filter, received, wanted)
        if not wanted:
            self._hidden += received.charged
            return ()
        wanted[-1].permits = received.charged  # free when the last message is taken
        if self._permits_of_each or wanted[0].entry.broker_clock_ms is not None:  # each is asked about when it is taken
            assign_permits_to_messages(received, wanted)
        if self.slots is not None:
            self._record_slots(self.slots, wanted[0].entry, keyed)
        first = wanted[0]
        if (
            self._dead_letters is not None
            and core.is_dead_letter(first.redelivery_count())
            and not is_dead_letter(first)
        ):
            dead = wanted
            if self._moved is not None:
                dead = wanted[:1]
                if first.batch_index >= 0:
                    self._record_moved(self._moved, first)
            self._dead_letters.start_moving_messages(dead)
            wanted = wanted[len(dead) :]
            if not wanted:
                return ()
            first = wanted[0]
        core.delivered += len(wanted)
        if size >= LARGE_ENTRY_BYTES:
            first.entry.unfolded = size
            self._unfolded += size
            self._memory.decompressed_bytes += size
        return wanted

    # ------------------------------------------------------------------------------ what fails, in order
    def clear_dead_lettered_messages(self) -> None:
        """Clears the record of messages that were moved to the dead-letter topic, because the subscription's cursor is
        moved and these messages are delivered again."""
        if self._moved:
            self._moved.clear()

    def _record_moved(self, moved: OrderedDict[Position, int], dead: Message) -> None:
        position, bit, moving = dead.entry.position, 1 << dead.batch_index, self._core.moving_bits
        moving[position] = moving.get(position, 0) | bit
        moved[position] = moved.pop(position, 0) | bit
        if len(moved) > ENTRY_SLOTS_MAX:
            moved.popitem(last=False)

    def _without_moved(self, received: ReceivedEntry, wanted: list[Message], moved: int) -> list[Message]:
        """Returns `wanted` without the messages whose dead letter is in flight or stored. (The broker delivers such an
        entry again if its acknowledgement was lost.)"""
        there = moved & ~self._core.moving_bits.get(received.position, 0)
        for message in wanted:
            if there >> message.batch_index & 1:
                self._consumer.acknowledge(message)
        return [message for message in wanted if not moved >> message.batch_index & 1]

    def _record_slots(
        self, slots: OrderedDict[Position, frozenset[int]], received: ReceivedEntry, messages: list[Message]
    ) -> None:
        """Records the key slots of an entry as the broker computes them: from each message of a batch that the broker
        can read, else from the metadata of the entry."""
        metadata = received.header.metadata
        if received.header.batched and not metadata.encryption_keys:
            keys = {get_routing_key(message.fields) for message in messages}
        else:
            keys = {key_of_single_message(metadata)}
        slots[received.position] = frozenset(compute_key_slot(key) for key in keys if key is not None)
        if len(slots) > ENTRY_SLOTS_MAX:
            slots.popitem(last=False)

    def make_blocked_filter(self, failed: Collection[Position]) -> Callable[[Message], bool]:
        """Returns a function that returns True for a message that must wait for one of the entries `failed`: the
        message belongs to such an entry, or comes after it. If the order is kept by key, of the later messages only
        those with a key of that entry must wait. The broker delivers exactly these messages again."""
        known = self.slots
        if known is None:
            first = min(failed)
            return lambda message: message.entry.position >= first
        some = [(place, known.get(place, frozenset())) for place in failed]

        def waits(message: Message) -> bool:
            place = message.entry.position
            own = known.get(place, frozenset())
            return any(place == each or (place > each and not own.isdisjoint(slots)) for each, slots in some)

        return waits

    def _damaged(self, error: CorruptEntry, entry: bytes, position: Position, acked: Sequence[int]) -> Message:
        malformed = has_valid_checksum(entry)
        what = "malformed, and discarded" if malformed else "damaged"
        _LOG.error("%s: entry %s is %s: %s", self._consumer.topic, position, what, error)
        damaged = DamagedMessage(self._consumer, position, error, max(1, count_declared_messages(entry) - len(acked)))
        damaged.entry.stream = self._core.permits.stream
        self._charged += damaged.permits
        if malformed:
            self.discarded += 1
            if self._durable:
                self._consumer.acknowledge(damaged)
        return damaged

    def _undecryptable(self, received: ReceivedEntry, error: CryptoError, entry: bytes) -> Sequence[Message]:
        """Handles an entry that cannot be decrypted as `crypto_failure_action` says. Returns the message for the
        application, if any. A chunk is handled like any other entry."""
        action, core, header = self._settings.crypto_failure_action, self._core, received.header
        now = self._clock()
        if now - self._crypto_said >= DECRYPT_LOG_EVERY_S:
            self._crypto_said = now
            _LOG.error(
                "%s: entry %s is not decrypted: %s; what becomes of such entries: %s",
                self._consumer.topic, received.position, error.message, action.name,
            )  # fmt: skip
        self._bytes += len(entry)
        received.stream = core.permits.stream
        self._charged += received.charged
        message = CiphertextMessage(received, header.metadata, bytes(entry[header.payload_offset :]), -1)
        if self.start is not None and self.start.is_before_start(received.position, header.num_messages - 1):
            self._hidden += received.charged
            return ()
        if action is ConsumerCryptoFailureAction.CONSUME:
            message.permits = received.charged
            core.delivered += 1
            return [message]
        if action is ConsumerCryptoFailureAction.DISCARD:
            self._consumer.acknowledge(message)
            self._hidden += received.charged
            return ()
        longer_s = self._longer_s(received.redelivery_count)
        core.withhold_entry(header.metadata, received.position, received.charged, now, longer_s)
        return ()

    def _take_chunk(self, received: ReceivedEntry, body: bytes) -> list[Message]:
        """Adds a chunk to its message. Returns that message if it is complete now, else an empty list. Raises
        CorruptEntry."""
        start, header = self.start, received.header
        if start is not None and not start.is_chunk_wanted(received.position):
            return []
        begun = self._core.add_chunk(header.metadata, received.position, body, self._clock(), received)
        if begun is None:
            return []
        received = begun.entry  # of the last chunk: another one may have completed the message
        received.chunks = tuple(begun.places)
        metadata, payload = begun.metadata, begun.payload
        begun.bodies.clear()
        if metadata.compression:
            try:
                payload = decompress(metadata.compression, payload, metadata.uncompressed_size)
            except CorruptEntry:
                if self._durable:
                    self._consumer.acknowledge(Message(received, metadata, b"", -1))
                raise
        if start is not None and start.is_before_start(received.position, 0):
            return []
        return [Message(received, metadata, payload, -1)]

    def on_broker_filter_known(self, text: str) -> None:
        """Fact: the broker filters by `text` for this subscription. Empty: it does not filter, because it is older or
        does not filter for this kind of subscription. A consumer without a filter of its own applies `text`, too, to
        messages that the broker delivers unfiltered. These are encrypted ones, and batches that the broker delivers
        whole because other consumers do not acknowledge by index."""
        if self._settings.filter is None:
            try:
                self._filter = parse_filter(text) if text else None
            except InvalidRequest as error:  # of a later version
                _LOG.warning("%s: the filter of the subscription is the broker's alone: %s",
                             self._consumer.topic, error)  # fmt: skip

    def _without_unwanted(self, wanted: Filter, received: ReceivedEntry, messages: list[Message]) -> list[Message]:
        """Returns those of `messages` that the filter wants, and acknowledges the others. A tombstone of the compacted
        form is always wanted."""
        metadata, compacted = received.header.metadata, self._settings.is_read_compacted
        sized = compacted or "message.size" in wanted.system_names
        found, others = list[Message](), list[Message]()
        for message in messages:
            size = len(message.payload) if sized else 0
            tombstone = compacted and (not size or message.fields.null_value)
            keep = tombstone or passes_filter(wanted, message.fields, size, metadata) or self._went_back(message)
            (found if keep else others).append(message)
        self.filtered += len(others)
        if self._durable and others:
            if not found and len(others) == received.header.num_messages:
                others = [Message(received, metadata, b"", -1)]  # the whole entry
            for message in others:
                self._consumer.acknowledge(message)
        return found

    def _went_back(self, message: Message) -> bool:
        """Returns whether the message went back for this subscription: it was wanted when it came first."""
        value = message.properties().get(REDRIVEN_TO, "")
        return bool(value) and parse_redriven_to(value, self._consumer.topic) == self._consumer.subscription

    def _without_removed(self, received: ReceivedEntry, messages: list[Message]) -> list[Message]:
        """Returns `messages` without those that compaction removed from the batch, and acknowledges the removed ones.
        """
        removed = find_removed_by_compaction(received, messages)
        if not removed:
            return messages
        if self._durable:
            for message in removed:
                self._consumer.acknowledge(message)
        gone = frozenset(message.batch_index for message in removed)
        return [message for message in messages if message.batch_index not in gone]


def decode_messages(
    consumer: ReceivingConsumer, entry: bytes, position: Position, start: ReaderStart | None, redelivered: int = 0,
    acked: Sequence[int] = (), decryptor: Decryptor | None = None, has_room: Callable[[int], bool] | None = None,
) -> tuple[ReceivedEntry, list[Message] | None, bytes | None]:  # fmt: skip
    """Decodes an entry. Returns a tuple: the entry; its messages for the application, or None if the entry is a chunk;
    the decrypted payload, or None if the entry was not encrypted. Messages before `start` and those in `acked` are left
    out. `redelivered`: the redelivery count. `has_room(size)` is asked before a large entry is decompressed; `size`:
    its bytes after that.

    Raises CorruptEntry if the entry cannot be read, PayloadUndecryptable if it cannot be decrypted,
    DecompressionDeferred if `has_room` returned False."""
    index, published_ms, start_at = parse_broker_part(entry)
    header = EntryHeader(*parse_checked_head(entry, start_at))
    if (
        has_room is not None
        and header.uncompressed_size >= LARGE_ENTRY_BYTES
        and not has_room(decompressed_bytes(header))
    ):
        raise DecompressionDeferred
    received = ReceivedEntry(consumer, header, position, index, redelivered)
    received.published_ms = published_ms
    if acked:
        received.charged -= len(acked)
    body: bytes | None = None
    if header.metadata.encryption_param:
        try:
            body = entry = (decryptor or _NO_KEYS)(header.metadata, bytes(entry[header.payload_offset :]))
        except CryptoError as error:
            raise PayloadUndecryptable(received, error) from error
        header = EntryHeader(header.metadata, 0)
    if header.metadata.num_chunks_from_msg > 1:
        return received, None, body
    if header.batched:
        fields, payloads = decode_message_columns_lazily(header, entry)
        if isinstance(payloads, EqualLengthPayloads):
            messages = [Message(received, single, payloads, at) for at, single in enumerate(fields)]
        else:
            messages = [Message(received, fields[at], payload, at) for at, payload in enumerate(payloads)]
    else:
        messages = [Message(received, header.metadata, decode_payload(header, entry), -1)]
    if acked:
        gone = frozenset(acked)
        messages = [message for message in messages if message.batch_index not in gone]
    if start is not None and position <= start.id.position():
        messages = [message for message in messages if not start.is_before_start(position, max(0, message.batch_index))]
    if messages:
        received.first_index = messages[0].batch_index
    return received, messages, body


def decompressed_bytes(header: EntryHeader) -> int:
    """Returns the size in bytes that the entry will have after decompression, as its header declares. Returns the size
    of the whole message for the last chunk of a chunked message, and 0 for each earlier chunk."""
    metadata = header.metadata
    if (
        header.uncompressed_size
        and metadata.num_chunks_from_msg > 1
        and metadata.chunk_id < metadata.num_chunks_from_msg - 1
    ):
        return 0
    return header.uncompressed_size


_NO_KEYS = Decryptor(None, lambda: 0.0)


def find_removed_by_compaction(received: ReceivedEntry, messages: Sequence[Message]) -> list[Message]:
    """Returns those of `messages`, which all belong to the entry `received`, that compaction removed while it kept
    other messages of the same batch."""
    kept = frozenset(received.header.metadata.compacted_batch_indexes)
    return [
        message for message in messages
        if (isinstance(message.fields, SingleMessageMetadata) and message.fields.compacted_out)
        or (kept and message.batch_index not in kept)
    ]  # fmt: skip


def assign_permits_to_messages(received: ReceivedEntry, wanted: list[Message]) -> None:
    """Divides the permits of an entry among its messages `wanted`; each message frees its part when the application
    receives it. Each message gets one permit, and the last message also gets those of the entry's other messages."""
    for message in wanted[:-1]:
        message.permits = 1
    wanted[-1].permits = 1 + received.charged - len(wanted)


# -------------------------------------------------------------------------------------------------------- frames
# The wire form of the effects of a consumer's core: the kinds of ClientFrames, in order.


ACK_REQUEST_BYTES_MAX = 128 << 10
"""Most bytes of one acknowledge request: a quarter of the broker's limit (runtime/network.py `REQUEST_BYTES_MAX`)."""


NO_FAILURES: Mapping[Position, Failure] = {}
FAILURES_BYTES_MAX = 64 << 10
"""Most bytes of the failures in one request; of the others the broker learns nothing."""


def make_client_frames(
    effect: ConsumerEffect, *, durable: bool, inclusive: bool, failures: Mapping[Position, Failure] = NO_FAILURES
) -> Iterator[dict[str, Any]]:
    """Yields the frames to send to the broker for an effect of the consumer's core, each as {kind of ClientFrame:
    value}; none for an effect that sends nothing. `durable` (False for a reader) and `inclusive` decide how a seek is
    encoded. `failures`: why entries are given back, by their positions."""
    match effect:
        case GrantPermits(messages):
            yield {"permits": messages}
        case SendAcks(group, request_id):
            for ack in make_ack_requests(group, request_id):
                yield {"ack": ack}
        case RequestRedelivery(entries, counted, request_id):
            sets = encode_entry_sets(entries) if entries is not None else ()
            asked = wire.Redeliver(ledgers=sets, uncounted=not counted, request_id=request_id)
            if failures and counted and entries is not None:
                asked.failures.extend(_find_failures(entries, failures))
            yield {"redeliver": asked}
        case SendSeekRequest(request_id, to):
            yield {"seek": _seek(request_id, to, exact=durable or inclusive, inclusive=inclusive)}


def _find_failures(entries: EntrySets, failures: Mapping[Position, Failure]) -> Iterator[wire.Failure]:
    """Yields why these entries are given back, the latest first, up to FAILURES_BYTES_MAX."""
    left = FAILURES_BYTES_MAX
    for (ledger_id, entry_id), failure in reversed(list(failures.items())):
        if ledger_id in entries and entry_id in entries[ledger_id]:
            told = wire.Failure(ledger_id=ledger_id, entry_id=entry_id, **failure._asdict())
            left -= told.ByteSize() + 8
            if left < 0:
                return
            yield told


def _seek(request_id: int, to: SeekTarget, *, exact: bool, inclusive: bool) -> wire.Seek:
    """Returns the seek request. With `exact`, for a durable subscription, the broker moves the cursor to exactly that
    message (`find_first_wanted_id`), and the client filters nothing, because others may move the cursor back at any
    time. A reader filters the messages before its own `ReaderStart`."""
    seek = wire.Seek(request_id=request_id)
    if isinstance(to, MessageId):
        seek.message_id.CopyFrom((find_first_wanted_id(to, inclusive=inclusive) if exact else to).to_wire())
    elif isinstance(to, SeekIndex):
        seek.index = to.index
    else:
        seek.publish_time_ms = to
    return seek


def make_ack_requests(group: AckGroup, request_id: int = 0) -> list[wire.Ack]:
    """Returns the acknowledge requests that send the acknowledgements of `group`, in order, each of about
    ACK_REQUEST_BYTES_MAX at most; none if the group is empty. Only the last has `request_id`, and is answered."""
    acks: list[wire.Ack] = []
    if group.cumulative is not None:
        (ledger_id, entry_id), last = group.cumulative
        entry = wire.AckedEntry(
            ledger_id=ledger_id, entry_id=entry_id, batch_indexes=() if last == WHOLE_ENTRY else (last,)
        )
        acks.append(wire.Ack(kind=wire.Ack.CUMULATIVE, entries=[entry]))
    if group.whole or group.parts:
        parts = [
            wire.AckedEntry(
                ledger_id=ledger_id, entry_id=entry_id, batch_bits=bits.to_bytes((bits.bit_length() + 7) // 8, "little")
            )
            for (ledger_id, entry_id), bits in group.parts.items()
        ]
        some = {ledger_id: each for ledger_id, each in group.whole.items() if len(each) > 1}
        parts += [
            wire.AckedEntry(ledger_id=ledger_id, entry_id=each.min())
            for ledger_id, each in group.whole.items() if len(each) == 1
        ]  # fmt: skip
        acks += _individual(parts, encode_entry_sets(some))
    if acks:
        acks[-1].request_id = request_id
    return acks


def _individual(parts: list[wire.AckedEntry], sets: list[wire.EntrySet]) -> Iterator[wire.Ack]:
    """Yields individual acknowledge requests, as many as needed: a broker refuses requests above REQUEST_BYTES_MAX."""
    ack, size = wire.Ack(kind=wire.Ack.INDIVIDUAL), 0
    every: list[wire.AckedEntry | wire.EntrySet] = [*parts, *sets]
    for each in every:
        more = each.ByteSize() + 8
        if size and size + more > ACK_REQUEST_BYTES_MAX:
            yield ack
            ack, size = wire.Ack(kind=wire.Ack.INDIVIDUAL), 0
        if isinstance(each, wire.AckedEntry):
            ack.entries.append(each)
        else:
            ack.ledgers.append(each)
        size += more
    yield ack


def encode_entry_sets(sets: EntrySets) -> list[wire.EntrySet]:
    """Returns the sets as wire messages, one for each ledger."""
    found = []
    for ledger_id, entries in sets.items():
        entries.run_optimize()
        found.append(wire.EntrySet(ledger_id=ledger_id, entries=entries.serialize()))
    return found
