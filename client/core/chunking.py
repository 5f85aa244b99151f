"""Chunked messages (Pulsar PR4): one that is larger than an entry travels as several, and is put together again.

**Out** (`split`): the payload is compressed as a whole and cut; each chunk is encrypted alone. It is an entry with the
message's metadata and sequence id, and `uuid`, `num_chunks_from_msg`, `total_chunk_msg_size`, `chunk_id`. They are
published in order with nothing of that producer between them; after a reconnect those without a receipt go again.

**In** (`Chunks`, one per partition): bodies are kept until the last chunk is there.

| what comes | what is done |
|---|---|
| the next chunk of a message | kept; with the last one the message is complete |
| a chunk that is there already (sent again) | its entry is acknowledged with the others |
| a first chunk while `pending_max` messages are begun, or PENDING_BYTES_MAX declared | the oldest makes room |
| a chunk whose beginning is missing, on an ordered subscription | that is before our start: dropped |
| … on a shared one, or of a message that was given back | given back: its beginning comes again |
| an entry of a producer after its message that is not complete, in log order | that never will be: dropped |
| nothing, for EXPIRE_S | the message makes room |

*Dropped* is acknowledged: no producer was ever told that such a message is stored. What makes room is *given back*, and
comes again after the delay of a negative ack; with `auto_ack` it is dropped, as Pulsar does: then a message whose
producer was slow is lost. Nothing is allocated by what a header declares: sizes are checked first, and bodies counted.
A cumulative ack never covers a message that is begun or not acknowledged and ends after it (`floor`).
Guarding tests: tests/client/produce/test_chunking.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ...proto.compression import UNCOMPRESSED_BYTES_MAX, compress
from ...proto.entry import ENTRY_HEAD_BYTES, Encrypt, client_part
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import CorruptEntry, MessageTooLarge
from ...proto.names import Position

CHUNKED_BYTES_MAX = 256 << 20
"""Of a chunked message on the wire; uncompressed it has the limit of every payload (proto/compression.py)."""
PENDING_BYTES_MAX = 2 * CHUNKED_BYTES_MAX
"""Declared by all messages of a partition that are begun and not complete."""
METADATA_BYTES = 10 << 10
"""A chunk's payload is so much smaller than an entry: Pulsar's Java and Go clients drop larger ones unseen, as a broker
tells them that limit (broker/protocols/pulsar/connection.py). Not where an entry has less than ten times that."""
EXPIRE_S = 60.0
"""What is not complete after so long makes room (Pulsar's figure)."""
GIVEN_BACK_MAX = 10_000
"""Messages of which it is remembered that they were given back."""


def split(
    metadata: MessageMetadata, payload: bytes, entry_bytes_max: int, uuid: str, encrypt: Encrypt | None = None
) -> list[bytes]:
    """The client-parts: one when it fits, compressed and as it is; else its chunks in order. MessageTooLarge."""
    size = len(payload)
    if metadata.compression:
        metadata.uncompressed_size = size
        payload = compress(metadata.compression, payload)
    payload_bytes_max = entry_bytes_max - (METADATA_BYTES if entry_bytes_max >= 10 * METADATA_BYTES else 0)
    if len(payload) <= payload_bytes_max and size <= entry_bytes_max:
        if encrypt is not None:
            metadata.uncompressed_size = size
        whole = client_part(metadata, payload if encrypt is None else encrypt(metadata, payload))
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
        entries.append(client_part(metadata, part if encrypt is None else encrypt(metadata, part)))
    return entries


class Begun:
    """A message of which some chunks are here."""

    __slots__ = ("bodies", "metadata", "places", "since", "size")

    def __init__(self, metadata: MessageMetadata, since: float) -> None:
        self.metadata = metadata
        self.bodies: list[bytes] = []
        self.places: dict[Position, None] = {}  # of all its entries, as they came
        self.size = 0
        self.since = since

    @property
    def payload(self) -> bytes:
        """As it was sent: compressed, if it was."""
        return b"".join(self.bodies)


class ChunkOutcome(NamedTuple):
    complete: Begun | None
    dropped: list[Position]
    given_back: list[Position]


class Chunks:
    __slots__ = ("_begun", "_given_back", "_whole", "auto_ack", "log_order", "ordered", "pending_max")

    def __init__(self, *, pending_max: int, auto_ack: bool, ordered: bool = True, log_order: bool = True) -> None:
        """`ordered`: chunks of a message come in order; `log_order`: all entries do."""
        self.pending_max = max(1, pending_max)
        self.auto_ack = auto_ack
        self.ordered = ordered
        self.log_order = log_order
        self._begun: dict[str, Begun] = {}  # by uuid, oldest first
        self._given_back: dict[str, None] = {}
        self._whole: dict[Position, Begun] = {}  # complete and not acknowledged, by the last entry

    def __len__(self) -> int:
        return len(self._begun)

    # ------------------------------------------------------------------ facts
    def add(self, metadata: MessageMetadata, place: Position, body: bytes, now: float) -> ChunkOutcome:
        """A chunk came. CorruptEntry: it contradicts itself, or those before it."""
        _check(metadata, len(body))
        begun = self._begun.get(metadata.uuid)
        if begun is None:
            return self._begin(metadata, place, body, now)
        if metadata.chunk_id < len(begun.bodies):
            begun.places[place] = None
            return ChunkOutcome(None, [], [])
        if metadata.chunk_id > len(begun.bodies):
            if self._comes_again(metadata.uuid):
                return ChunkOutcome(None, [], [place])
            del self._begun[metadata.uuid]
            return ChunkOutcome(None, [*begun.places, place], [])
        return self._take(begun, metadata, place, body)

    def passed(self, producer: str, place: Position) -> list[Position]:
        """An entry of the producer came: what it has begun before and not ended is dropped."""
        if not self.log_order:
            return []
        dropped: list[Position] = []
        for uuid, begun in list(self._begun.items()):
            if begun.metadata.producer_name == producer and uuid not in self._given_back and place > max(begun.places):
                del self._begun[uuid]
                dropped += begun.places
        return dropped

    def expire(self, now: float) -> ChunkOutcome:
        outcome = ChunkOutcome(None, [], [])
        for uuid, begun in list(self._begun.items()):
            if now - begun.since >= EXPIRE_S:
                self._make_room(uuid, outcome)
        return outcome

    def acknowledged(self, last: Position) -> tuple[Position, ...]:
        """All entries of the complete message that ends there; none: it is not one."""
        begun = self._whole.pop(last, None)
        return () if begun is None else tuple(begun.places)

    def acknowledged_up_to(self, place: Position) -> None:
        for last in [each for each in self._whole if each <= place]:
            del self._whole[last]

    def given_back(self, last: Position) -> tuple[Position, ...]:
        """The complete message that ends there comes again; all its entries."""
        begun = self._whole.get(last)
        if begun is None:
            return ()
        self.expect_again(begun.metadata.uuid)
        return self.acknowledged(last)

    def clear(self) -> None:
        """All that is not acknowledged comes again, in order."""
        self._begun.clear()
        self._given_back.clear()
        self._whole.clear()

    # ------------------------------------------------------------------ questions
    def first(self) -> Position | None:
        """The first entry of all messages that are begun, or not acknowledged."""
        return min((min(begun.places) for begun in (*self._begun.values(), *self._whole.values())), default=None)

    def floor(self, place: Position) -> Position:
        """Up to here a cumulative ack at `place` may go: before each message that ends after it."""
        firsts = [min(begun.places) for begun in self._begun.values()]
        firsts += [min(begun.places) for last, begun in self._whole.items() if last > place]
        lowest = min((first for first in firsts if first <= place), default=None)
        return place if lowest is None else Position(lowest[0], lowest[1] - 1)

    # ------------------------------------------------------------------ how
    def _begin(self, metadata: MessageMetadata, place: Position, body: bytes, now: float) -> ChunkOutcome:
        outcome = ChunkOutcome(None, self.passed(metadata.producer_name, place), [])
        if metadata.chunk_id > 0:
            (outcome.given_back if self._comes_again(metadata.uuid) else outcome.dropped).append(place)
            return outcome
        declared = sum(begun.metadata.total_chunk_msg_size for begun in self._begun.values())
        while self._begun and (
            len(self._begun) >= self.pending_max or declared + metadata.total_chunk_msg_size > PENDING_BYTES_MAX
        ):
            uuid, oldest = next(iter(self._begun.items()))
            declared -= oldest.metadata.total_chunk_msg_size
            self._make_room(uuid, outcome)
        begun = self._begun[metadata.uuid] = Begun(metadata, now)
        self._take(begun, metadata, place, body)
        return outcome

    def _take(self, begun: Begun, metadata: MessageMetadata, place: Position, body: bytes) -> ChunkOutcome:
        total, of = begun.metadata.total_chunk_msg_size, begun.metadata.num_chunks_from_msg
        size, last = begun.size + len(body), metadata.chunk_id == of - 1
        if size > total or (last and size != total) or metadata.num_chunks_from_msg != of:
            raise CorruptEntry(f"chunk {metadata.chunk_id} ends at {size} of {total} bytes")
        begun.bodies.append(body)
        begun.places[place] = None
        begun.size = size
        if not last:
            return ChunkOutcome(None, [], [])
        del self._begun[metadata.uuid]
        self._given_back.pop(metadata.uuid, None)
        self._whole[place] = begun
        return ChunkOutcome(begun, [], [])

    def _comes_again(self, uuid: str) -> bool:
        return not self.ordered or uuid in self._given_back

    def _make_room(self, uuid: str, outcome: ChunkOutcome) -> None:
        begun = self._begun.pop(uuid)
        if self.auto_ack:
            outcome.dropped.extend(begun.places)
            return
        outcome.given_back.extend(begun.places)
        self.expect_again(uuid)

    def expect_again(self, uuid: str) -> None:
        """A chunk of the message came and is not kept, but delivered again later."""
        self._given_back[uuid] = None
        if len(self._given_back) > GIVEN_BACK_MAX:
            del self._given_back[next(iter(self._given_back))]

    def check(self) -> None:
        assert len(self._begun) <= self.pending_max, "no more messages are begun than may be"
        for begun in self._begun.values():
            assert 0 < len(begun.bodies) < begun.metadata.num_chunks_from_msg, "what is begun is not complete"
            assert begun.size <= begun.metadata.total_chunk_msg_size, "no more bytes than were declared"


def _check(metadata: MessageMetadata, size: int) -> None:
    number, of, total = metadata.chunk_id, metadata.num_chunks_from_msg, metadata.total_chunk_msg_size
    if not metadata.uuid or not 0 <= number < of or not of <= total <= CHUNKED_BYTES_MAX or not 0 < size <= total:
        raise CorruptEntry(f"chunk {number} of {of} with {size} of {total} bytes: the limit is {CHUNKED_BYTES_MAX}")
