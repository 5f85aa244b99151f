"""Chunked messages (Pulsar PR4): a message that is larger than an entry may be is sent as several entries, its
*chunks*, and the consumer joins them. Also the encoded entries of a producer that have no outcome yet
(`OutgoingEntryQueue`, `encode_entries`).

**Sending** (`encode_chunks`): the payload is compressed as a whole and cut; each chunk is encrypted alone. A chunk is
an entry with the message's metadata and sequence id, and `uuid`, `num_chunks_from_msg`, `total_chunk_msg_size`,
`chunk_id`. The producer publishes the chunks in order, with none of its other entries between them. After a reconnect
it publishes the chunks without a receipt again.

**Receiving** (`ChunkAssembler`, one per partition): the bodies of the chunks are kept until the last chunk of their
message arrives. To *drop* a chunk is to acknowledge it. To *give back* a chunk is to have the broker deliver it again
later. When an incomplete message *makes room*, its chunks are given back, or dropped with `auto_ack`.

| what arrives | what is done |
|---|---|
| the next chunk of a message | it is kept; the last chunk completes the message |
| a chunk that is kept already (sent again) | its entry is acknowledged with the others |
| a first chunk, while `pending_max` messages or INCOMPLETE_BYTES_MAX declared bytes are incomplete | it is given back |
| … and its message made room less often than an incomplete message | the incomplete message makes room |
| … with `auto_ack` | the oldest incomplete message makes room |
| a later chunk of an incomplete message, before the next one | it is kept if the next one comes again; else dropped |
| a chunk of an unknown message, not the first, on an ordered subscription | dropped: it begins before our start |
| … on a shared subscription, or of a message that was given back | given back: the first chunk comes again |
| in log order, another entry of the producer of an incomplete message | that message's chunks are dropped |
| no chunk of a message for INCOMPLETE_EXPIRE_S and the delay of a chunk that was given back | the message makes room |

A dropped message is not a lost one: no producer was ever told that such a message is stored. The exception is a message
that makes room with `auto_ack`, as in Pulsar: if only its producer was slow, the message is lost. Nothing is allocated
by the sizes that a header declares: sizes are checked first, and the bodies that arrived are counted.

**Progress.** An incomplete message stays until it is complete, because each missing chunk arrives or is delivered
again. A message that gets no chunk for the time above may have lost its producer. It makes room, and from then on it
makes room for every message that did so less often; so any number of messages that are never completed do not keep
other messages from completing. If instead each new message replaced an incomplete one, two groups of messages could
replace each other for ever.

The assembler remembers which messages it gave back (`_waiting`). When there is room it requests the first of them at
once, as far as that message arrived before, and the remembered chunks of a message that begins. Without room, a chunk
that was given back comes again after a delay that doubles each time, up to CHUNK_REDELIVERY_S_MAX. The delay is needed
because another consumer may have a part of the message, and because the broker delivers a chunk that was given back
before new entries, which the incomplete messages may need.

A cumulative ack never covers a message that is incomplete, or is not acknowledged and ends after the ack's position
(`cumulative_ack_limit`). Guarding tests: tests/client/produce/test_chunking.py, tests/client/core/test_chunks_walk.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...proto.compression import UNCOMPRESSED_BYTES_MAX
from ...proto.entry import (
    ENTRY_HEAD_BYTES,
    PLAIN,
    EntryEncoding,
    compress_payload,
    copy_with_schema_version,
    encode_client_part,
    parse_header,
)
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import CorruptEntry, MagnetarError, MessageTooLarge
from ...proto.names import Position
from ...proto.states import ENTRY_COST_BYTES
from ..common.errors import CryptoError
from .batcher import OutgoingBatch, SendCallback, encode_batch_entry, make_entry_metadata
from .effects import MessageNotEncodable
from .transaction import TransactionPort

CHUNKED_BYTES_MAX = 256 << 20
"""Largest chunked message on the wire, in bytes. Its uncompressed size has the limit of every payload
(proto/compression.py)."""
INCOMPLETE_BYTES_MAX = 2 * CHUNKED_BYTES_MAX
"""Most bytes that all incomplete messages of a partition may declare together."""
CHUNK_METADATA_BYTES = 10 << 10
"""Bytes of an entry that a chunk's payload leaves free. Pulsar's Java and Go clients silently drop larger chunks,
because a broker announces that limit to them (broker/pulsar/connection.py). Not used where an entry has less than ten
times that size."""
INCOMPLETE_EXPIRE_S = 60.0
"""Seconds without a chunk after which an incomplete message makes room (Pulsar's figure)."""
CHUNK_REDELIVERY_S_MIN, CHUNK_REDELIVERY_S_MAX = 0.25, 600.0
"""Shortest and longest delay, in seconds, until a chunk that was given back is delivered again."""
FIRST_CHUNK_DELAY_S_MAX = 1.0
"""Longest delay in seconds of a chunk's first redelivery; the delay of a negative ack replaces it if that is shorter.
The message did not fail: another consumer has its first chunk, and had no room for this chunk at that moment."""
REDELIVERED_CHUNKED_MAX = 10_000
"""Most messages that the assembler remembers as given back."""


def encode_chunks(
    metadata: MessageMetadata, payload: bytes, entry_bytes_max: int, uuid: str, encoding: EntryEncoding = PLAIN
) -> list[bytes]:
    """Encodes a message as one entry, or as several chunks if it is too large; no entry has more than `entry_bytes_max`
    bytes. Returns the client-parts of these entries (metadata and payload, as the client sends them), in order. Changes
    `metadata`. `uuid`: identifies the message. Raises MessageTooLarge if the message is above the limit of chunked
    messages, or its metadata alone fills an entry; CryptoError if it cannot be encrypted."""
    size, encrypt = len(payload), encoding.encrypt
    payload = compress_payload(metadata, payload)
    payload_bytes_max = entry_bytes_max - (CHUNK_METADATA_BYTES if entry_bytes_max >= 10 * CHUNK_METADATA_BYTES else 0)
    if len(payload) <= payload_bytes_max and size <= entry_bytes_max:
        if encrypt is not None:
            metadata.uncompressed_size = size
        whole = encode_client_part(metadata, payload if encrypt is None else encrypt(metadata, payload))
        if len(whole) <= entry_bytes_max:
            return [whole]
    if len(payload) > CHUNKED_BYTES_MAX or metadata.uncompressed_size > UNCOMPRESSED_BYTES_MAX:
        limit = UNCOMPRESSED_BYTES_MAX if metadata.compression else CHUNKED_BYTES_MAX
        raise MessageTooLarge(f"a chunked message of {len(payload)} bytes; the limit is {limit}", size=len(payload))
    metadata.uncompressed_size = size  # of chunks Go's client gives the last one alone where no size is told
    growth = 0 if encrypt is None else len(encrypt(metadata, b""))  # by its tag; the keys are in the metadata after it
    metadata.uuid, metadata.total_chunk_msg_size = uuid, len(payload)
    metadata.num_chunks_from_msg = metadata.chunk_id = (1 << 31) - 1  # the longest encoding: all have the same room
    room = min(entry_bytes_max - ENTRY_HEAD_BYTES - metadata.ByteSize(), payload_bytes_max) - growth
    if room <= 0:
        raise MessageTooLarge(f"the metadata of a message alone takes more than {entry_bytes_max} bytes")
    if len(payload) <= room:  # it is large once it is unfolded: that is for the readers of chunks, which count it
        room = max(1, -(-len(payload) // 2))
    metadata.num_chunks_from_msg = -(-len(payload) // room)
    entries = []
    for number in range(metadata.num_chunks_from_msg):
        metadata.chunk_id = number
        part = payload[number * room : (number + 1) * room]
        entries.append(encode_client_part(metadata, part if encrypt is None else encrypt(metadata, part)))
    return entries


class PartialMessage:
    """A chunked message of which some chunks, or all, have arrived. `bodies`: the chunks by their numbers. `places`:
    the positions of its entries. `last` and `entry`: the position of its last chunk, and the object that the caller of
    `ChunkAssembler.add` passed with that chunk."""

    __slots__ = ("bodies", "entry", "last", "metadata", "places", "since", "size")

    def __init__(self, metadata: MessageMetadata, since: float) -> None:
        self.metadata = metadata
        self.bodies: dict[int, bytes] = {}  # by the number of the chunk
        self.places: dict[Position, None] = {}  # of all its entries; when it is complete, in log order
        self.last: Position | None = None  # the place of the last chunk …
        self.entry: Any = None  # … and what the caller said of it
        self.size = 0
        self.since = since  # its latest chunk came

    @property
    def payload(self) -> bytes:
        """Returns the joined chunks: the payload as the producer sent it, still compressed if the producer compressed
        it. All chunks must have arrived."""
        return b"".join([self.bodies[number] for number in range(len(self.bodies))])


class ChunkAddResult(NamedTuple):
    """The result of adding an entry to the ChunkAssembler. `complete`: the message that the entry completes; None:
    there is none. The other fields are positions of entries: to acknowledge (`dropped`), to have redelivered later
    (`given_back`), and to request from the broker now (`wanted`)."""

    complete: PartialMessage | None
    dropped: list[Position]
    given_back: list[Position]
    wanted: Sequence[Position] = ()  # given back before, and to be asked for now


class ChunkAssembler:
    """Assembles the chunked messages of one partition from their chunks, and tracks the messages that are not complete
    or not acknowledged. Not safe from several threads. See the head of the module."""

    __slots__ = (
        "_given_back",
        "_made_room",
        "_waiting",
        "_whole",
        "auto_ack",
        "expire_s",
        "incomplete",
        "log_order",
        "ordered",
        "pending_max",
    )  # fmt: skip

    def __init__(
        self, *, pending_max: int, auto_ack: bool, ordered: bool = True, log_order: bool = True,
        expire_s: float = INCOMPLETE_EXPIRE_S,
    ) -> None:  # fmt: skip
        """Makes an empty assembler. `pending_max`: the most messages that may be incomplete. `auto_ack`: messages that
        make room are acknowledged. `ordered`: the chunks of a message arrive in order. `log_order`: all entries arrive
        in log order. `expire_s`: seconds without a chunk after which a message makes room."""
        self.pending_max = max(1, pending_max)
        self.auto_ack = auto_ack
        self.ordered = ordered
        self.log_order = log_order
        self.expire_s = expire_s
        self.incomplete: dict[str, PartialMessage] = {}  # by uuid, oldest first
        self._given_back: dict[str, int] = {}  # how often the beginnings of messages were
        self._made_room: dict[str, int] = {}  # how often messages did that were not complete in time
        self._waiting: dict[str, dict[Position, int]] = {}  # entries that are given back, and the numbers of the chunks
        # complete and not acknowledged, by the place of the last chunk
        self._whole: dict[Position, PartialMessage] = {}

    def __len__(self) -> int:
        return len(self.incomplete)

    # ------------------------------------------------------------------ facts
    def add(
        self, metadata: MessageMetadata, place: Position, body: bytes, now: float, entry: Any = None
    ) -> ChunkAddResult:
        """Adds the chunk in the entry at `place` to its message. `now`: seconds of a monotonic clock; `entry`: kept as
        `PartialMessage.entry` if the chunk is the last one. Returns what to do now: see ChunkAddResult. Raises
        CorruptEntry if the fields of the chunk contradict each other, or those of earlier chunks of the message."""
        _check(metadata, len(body))
        begun = self.incomplete.get(metadata.uuid)
        if begun is None:
            return self._start_chunked(metadata, place, body, now, entry)
        if metadata.chunk_id in begun.bodies:
            begun.places[place] = None
            return ChunkAddResult(None, [], [])
        if metadata.chunk_id > len(begun.bodies) and not self._is_redelivered(metadata.uuid):
            del self.incomplete[metadata.uuid]
            return ChunkAddResult(None, [*begun.places, place], [])
        return self._add_chunk(begun, metadata, place, body, now, entry)

    def on_unrelated_entry(self, producer: str, place: Position) -> list[Position]:
        """Fact: an entry of `producer` arrived that is not the next chunk of any incomplete message of this producer.
        If entries arrive in log order, drops these incomplete messages and returns the positions of their chunks. Else
        returns an empty list."""
        if not self.log_order:
            return []
        dropped: list[Position] = []
        for uuid, begun in list(self.incomplete.items()):
            if begun.metadata.producer_name == producer and uuid not in self._given_back and place > max(begun.places):
                del self.incomplete[uuid]
                dropped += begun.places
        return dropped

    def expire(self, now: float) -> ChunkAddResult:
        """Makes room of each message that got no chunk for `expire_s` seconds. Returns the entries to acknowledge, to
        have redelivered later and to request now; all lists are empty if no message is that late. `now`: seconds of a
        monotonic clock."""
        outcome, wanted = ChunkAddResult(None, [], []), list[Position]()
        for uuid, begun in list(self.incomplete.items()):
            if now - begun.since >= self.expire_s:
                self._remember(self._made_room, uuid, self._made_room.get(uuid, 0) + 1)
                wanted += self._next_waiting()
                self._make_room(uuid, outcome)
        return outcome._replace(wanted=wanted)

    def take_chunk_positions(self, last: Position) -> tuple[Position, ...]:
        """Returns the positions of all chunks of the complete message whose last chunk is at `last`, and stops tracking
        the message. The result is empty if no such message is tracked."""
        begun = self._whole.pop(last, None)
        return () if begun is None else tuple(begun.places)

    def on_acknowledged_up_to(self, place: Position) -> None:
        """Fact: all complete messages whose last chunk is at or before `place` are acknowledged. Stops tracking them.
        """
        for last in [each for each in self._whole if each <= place]:
            del self._whole[last]

    def on_redelivery_requested(self, last: Position) -> tuple[Position, ...]:
        """Fact: the complete message whose last chunk is at `last` will be delivered again. Stops tracking the message.
        Returns the positions of all its chunks, or an empty tuple if the message is not tracked."""
        begun = self._whole.get(last)
        if begun is None:
            return ()
        self.expect_redelivery(begun.metadata.uuid)
        return self.take_chunk_positions(last)

    def clear(self) -> None:
        """Removes all messages, complete or not, because the broker will deliver their chunks again, in order."""
        self.incomplete.clear()
        self._given_back.clear()
        self._made_room.clear()
        self._waiting.clear()
        self._whole.clear()

    # ------------------------------------------------------------------ questions
    def redelivery_request_count(self, uuid: str) -> int:
        """Returns how often chunks of the message with this uuid were given back to the broker for lack of room, or
        because the first chunk was missing."""
        return self._given_back.get(uuid, 0)

    def incomplete_chunk_positions(self) -> list[Position]:
        """Returns the positions of all chunks of incomplete messages."""
        return [place for begun in self.incomplete.values() for place in begun.places]

    def first_chunk_position(self) -> Position | None:
        """Returns the lowest position among the chunks of all messages that are incomplete or not acknowledged; None if
        there is no such message."""
        return min((min(begun.places) for begun in (*self.incomplete.values(), *self._whole.values())), default=None)

    def cumulative_ack_limit(self, place: Position) -> Position:
        """Returns the highest position that a cumulative acknowledgement at `place` may cover: `place` itself, or the
        position before the first chunk of a message that is incomplete or ends after `place`."""
        firsts = [min(begun.places) for begun in self.incomplete.values()]
        firsts += [min(begun.places) for last, begun in self._whole.items() if last > place]
        lowest = min((first for first in firsts if first <= place), default=None)
        return place if lowest is None else Position(lowest[0], lowest[1] - 1)

    # ------------------------------------------------------------------ how
    def _start_chunked(
        self, metadata: MessageMetadata, place: Position, body: bytes, now: float, entry: Any
    ) -> ChunkAddResult:
        outcome = ChunkAddResult(None, self.on_unrelated_entry(metadata.producer_name, place), [])
        if metadata.chunk_id > 0:
            if self._is_redelivered(metadata.uuid):
                if place == next(iter(self._waiting.get(metadata.uuid, ())), None):  # it came once more in vain
                    self._remember(self._given_back, metadata.uuid, self.redelivery_request_count(metadata.uuid) + 1)
                self._add_waiting(metadata.uuid, place, metadata.chunk_id)
                outcome.given_back.append(place)
            else:
                outcome.dropped.append(place)
            return outcome
        while not self._has_room(metadata.total_chunk_msg_size):
            uuid = self._choose_evicted(metadata.uuid)
            if uuid is None:
                self._remember(self._given_back, metadata.uuid, self.redelivery_request_count(metadata.uuid) + 1)
                self._add_waiting(metadata.uuid, place, 0)
                outcome.given_back.append(place)
                return outcome
            self._make_room(uuid, outcome)
        begun = self.incomplete[metadata.uuid] = PartialMessage(metadata, now)
        self._add_chunk(begun, metadata, place, body, now, entry)
        waiting = self._waiting.pop(metadata.uuid, {})
        return outcome._replace(wanted=[each for each in waiting if each != place])

    def _has_room(self, size: int) -> bool:
        declared = sum(begun.metadata.total_chunk_msg_size for begun in self.incomplete.values())
        return not self.incomplete or (
            len(self.incomplete) < self.pending_max and declared + size <= INCOMPLETE_BYTES_MAX
        )

    def _choose_evicted(self, newcomer: str) -> str | None:
        """Returns the uuid of the incomplete message that is dropped to make room for `newcomer`. Returns None if no
        message may be dropped for it."""
        if self.auto_ack:
            return next(iter(self.incomplete))
        times = self._made_room.get
        uuid = max(self.incomplete, key=lambda each: times(each, 0))
        return uuid if times(uuid, 0) > times(newcomer, 0) else None

    def _add_chunk(
        self, begun: PartialMessage, metadata: MessageMetadata, place: Position, body: bytes, now: float, entry: Any
    ) -> ChunkAddResult:
        total, of = begun.metadata.total_chunk_msg_size, begun.metadata.num_chunks_from_msg
        size, complete = begun.size + len(body), len(begun.bodies) + 1 == of
        if size > total or (complete and size != total) or metadata.num_chunks_from_msg != of:
            raise CorruptEntry(f"chunk {metadata.chunk_id} ends at {size} of {total} bytes")
        begun.bodies[metadata.chunk_id] = body
        begun.places[place] = None
        begun.size, begun.since = size, now
        if metadata.chunk_id == of - 1:
            begun.last, begun.entry = place, entry
        if not complete:
            return ChunkAddResult(None, [], [])
        assert begun.last is not None, "the last chunk is one of all"
        begun.places = dict.fromkeys(sorted(begun.places))
        del self.incomplete[metadata.uuid]
        self._given_back.pop(metadata.uuid, None)
        self._made_room.pop(metadata.uuid, None)
        self._whole[begun.last] = begun
        return ChunkAddResult(begun, [], [], self._next_waiting())

    def _add_waiting(self, uuid: str, place: Position, number: int) -> None:
        self._waiting.setdefault(uuid, {})[place] = number
        if len(self._waiting) > REDELIVERED_CHUNKED_MAX:
            del self._waiting[next(iter(self._waiting))]

    def _next_waiting(self) -> list[Position]:
        """Returns the given-back entries of the next message to ask for: of those whose first chunk is known, the one
        that made room least often."""
        times = self._made_room.get
        begins = [uuid for uuid, places in self._waiting.items() if 0 in places.values()]
        return [*self._waiting.pop(min(begins, key=lambda each: times(each, 0)))] if begins else []

    def _is_redelivered(self, uuid: str) -> bool:
        return not self.ordered or uuid in self._given_back

    def _make_room(self, uuid: str, outcome: ChunkAddResult) -> None:
        begun = self.incomplete.pop(uuid)
        if self.auto_ack:
            outcome.dropped.extend(begun.places)
            return
        outcome.given_back.extend(begun.places)
        for place in begun.places:
            self._add_waiting(uuid, place, 0)
        self.expect_redelivery(uuid)

    def expect_redelivery(self, uuid: str) -> None:
        """Records that a chunk of the message arrived and was not kept: the broker will deliver it again."""
        self._remember(self._given_back, uuid, self.redelivery_request_count(uuid))

    def _remember(self, of: dict[str, int], uuid: str, times: int) -> None:
        of[uuid] = times
        if len(of) > REDELIVERED_CHUNKED_MAX:
            del of[next(iter(of))]

    def check(self) -> None:
        """Raises AssertionError if too many messages are incomplete, or one of them has all its chunks or too many
        bytes."""
        assert len(self.incomplete) <= self.pending_max, "no more messages are begun than may be"
        for begun in self.incomplete.values():
            assert 0 < len(begun.bodies) < begun.metadata.num_chunks_from_msg, "what is begun is not complete"
            assert begun.size <= begun.metadata.total_chunk_msg_size, "no more bytes than were declared"


def _check(metadata: MessageMetadata, size: int) -> None:
    number, of, total = metadata.chunk_id, metadata.num_chunks_from_msg, metadata.total_chunk_msg_size
    if not metadata.uuid or not 0 <= number < of or not of <= total <= CHUNKED_BYTES_MAX or not 0 < size <= total:
        raise CorruptEntry(f"chunk {number} of {of} with {size} of {total} bytes: the limit is {CHUNKED_BYTES_MAX}")


# ------------------------------------------------------------------------------------------------------- pending
# Entries of one producer that have no outcome yet, oldest first: published over this connection, then not published.
#
# An entry is published while the credit is above zero, and costs its length and ENTRY_COST_BYTES. Answers come in the
# order of the publishes. A message in chunks is several entries that share its sequence id; the last one has the
# callback. Guards: tests/client/core/test_producer_walk.py.


class OutgoingEntryQueue:
    """The entries of one producer that have no outcome yet: `sent` (published over this connection, oldest first), and
    after them `unsent`. `credit`: the bytes that the broker allows the producer to send now; below zero by at most one
    entry."""

    __slots__ = ("credit", "sent", "unsent")

    def __init__(self) -> None:
        self.sent: deque[OutgoingBatch] = deque()
        self.unsent: deque[OutgoingBatch] = deque()
        self.credit = 0

    def __bool__(self) -> bool:
        return bool(self.sent or self.unsent)

    @property
    def oldest(self) -> OutgoingBatch | None:
        """Returns the entry that was added first; None if there is no entry."""
        return self.sent[0] if self.sent else self.unsent[0] if self.unsent else None

    @property
    def youngest(self) -> OutgoingBatch | None:
        """Returns the entry that was added last; None if there is no entry."""
        return self.unsent[-1] if self.unsent else self.sent[-1] if self.sent else None

    def add(self, batch: OutgoingBatch, entries: Sequence[bytes], now: float) -> None:
        """Adds the encoded entries of a batch as unsent. Several `entries` are the chunks of one message. `now`: the
        time from which the send time-out counts, in seconds."""
        batch.items = []
        places: list[Position] | None = [] if len(entries) > 1 else None
        for entry in entries[:-1]:
            chunk = OutgoingBatch(batch.sequence_id)
            chunk.message, chunk.entry, chunk.chunks, chunk.born = batch.message, entry, places, now
            chunk.txn = batch.txn
            self.unsent.append(chunk)
        batch.entry, batch.chunks, batch.born = entries[-1], places, now
        self.unsent.append(batch)

    def mark_next_sent(self) -> OutgoingBatch:
        """Marks the oldest unsent entry as sent, deducts its cost from the credit, and returns the entry. The caller
        must make sure that there is an unsent entry, and credit above zero."""
        batch = self.unsent.popleft()
        self.credit -= len(batch.entry) + ENTRY_COST_BYTES
        batch.connections += 1
        self.sent.append(batch)
        return batch

    def on_disconnected(self) -> None:
        """Fact: the connection is lost. Marks all entries as unsent: they are published again, in order, over the next
        connection."""
        self.credit = 0
        self.unsent.extendleft(reversed(self.sent))
        self.sent.clear()

    def replace_schema_version(self, before: bytes, now: bytes) -> None:
        """Replaces the schema version `before` in all entries by the version `now`. Used when the topic was deleted and
        created again, and has new version numbers. Must be called before anything is sent over the new connection."""
        assert not self.sent, "nothing was published over this connection"
        for batch in self.unsent:
            if parse_header(batch.entry, verify=False).metadata.schema_version == before:
                batch.entry = copy_with_schema_version(batch.entry, now)

    def take_oldest_message(self) -> list[OutgoingBatch]:
        """Removes and returns the entries of the oldest message or batch: one entry, or all chunks of the message that
        are left. The queue must not be empty."""
        popped: list[OutgoingBatch] = []
        while not popped or not popped[-1].callbacks:
            popped.append((self.sent or self.unsent).popleft())
        return popped

    def take_all(self) -> list[OutgoingBatch]:
        """Removes and returns all entries, sent ones first, the oldest first."""
        popped = [*self.sent, *self.unsent]
        self.sent.clear()
        self.unsent.clear()
        return popped

    def check(self) -> None:
        batches = [*self.sent, *self.unsent]
        sequence = [batch.sequence_id for batch in batches if batch.callbacks and not batch.goes_back]
        assert sequence == sorted(set(sequence)), "entries under way are in the order of their sequence ids"
        assert all(batch.connections for batch in self.sent), "what is sent was published"


def encode_entries(
    batch: OutgoingBatch, producer_name: str, wall_ms: int, encoding: EntryEncoding, bytes_max: int, *,
    chunks_of: str | None,
) -> list[bytes] | MagnetarError:  # fmt: skip
    """Returns the encoded entries of a batch, each of at most `bytes_max` bytes. Returns several entries (chunks) only
    if `chunks_of`, the uuid of the message, is given. `wall_ms`: the publish time in ms since the epoch. If the batch
    cannot be encoded, returns the error and does not raise it: MessageTooLarge, CryptoError or MessageNotEncodable."""
    if batch.entry:
        return [batch.entry]
    if batch.message is not None and batch.message.encrypt is not None:
        encoding = encoding._replace(encrypt=batch.message.encrypt)
    try:
        if chunks_of is not None and batch.message is not None:
            metadata = make_entry_metadata(batch, producer_name, wall_ms, encoding)
            return encode_chunks(metadata, batch.message.payload, bytes_max, chunks_of, encoding)
        entry = encode_batch_entry(batch, producer_name, wall_ms, encoding)
    except (MessageTooLarge, CryptoError) as error:
        return error
    except Exception as cause:
        return make_invalid_content_error(cause)
    size = len(entry)
    if encoding.compression:  # a broker refuses what decompresses to more than an entry may have: readers decompress it
        size = max(size, len(batch.message.payload) if batch.message is not None else sum(map(len, batch.items)))
    if size > bytes_max:
        return MessageTooLarge(f"an entry of {size} bytes; the limit is {bytes_max}", size=size, limit=bytes_max)
    return [entry]


# ------------------------------------------------------------------------------------ outcomes
def make_invalid_content_error(cause: Exception) -> MessageNotEncodable:
    """Returns the error of a message that cannot be encoded, with `cause` as its cause."""
    error = MessageNotEncodable(f"the message cannot be encoded: {cause}")
    error.__cause__ = cause
    return error


def make_indefinite_error(error: MagnetarError) -> MagnetarError:
    """Returns a copy of `error` with `definite` false, or `error` itself if it is not definite. Used for an entry that
    was published more than once: an earlier publish may have stored the entry although the last one failed."""
    if not error.definite:
        return error
    changed = type(error)(error.message)
    changed.fields = dict(error.fields)
    changed.definite = False  # type: ignore[misc]
    return changed


def make_single_message_batch(
    callback: SendCallback, txn: TransactionPort | None, payload_bytes: int = 0
) -> OutgoingBatch:
    """Returns a batch with the callback of one message that was never added to the batcher, so that the outcome of this
    message can be reported like any other. `payload_bytes`: the size of the payload."""
    batch = OutgoingBatch(-1)
    batch.payload_bytes = payload_bytes
    batch.txn = txn
    batch.callbacks.append(callback)
    return batch
