"""The stored entry: the unit that a producer sends, a bookie stores, and a consumer splits into messages.

    entry       = broker-part? client-part
    broker-part = u16 0x0e02 | u32 size | BrokerEntryMetadata           the broker's timestamp (ms) and `index`
    client-part = u16 0x0e01 | u32 crc32c | u32 size | MessageMetadata | payload
    payload     = the message's bytes        where num_messages_in_batch is absent
                | compress( item* )          where it is present, even if it is 1
    item        = u32 size | SingleMessageMetadata | payload_size bytes

Big-endian; messages are proto2 (proto/entry.proto). The checksum is CRC32C over all that follows it. `index` is that of
the *last* message: an entry of n messages with index i has i-n+1 … i. These are Pulsar's bytes and must not change.

Example: the producer `p` sends `hi` and `you` as sequence ids 7 and 8 at publish time 1000; the broker stores it at
time 1001 as messages 0 and 1:

    0e02 00000005  08e907 1001                                      broker-part: timestamp 1001, index 1
    0e01 e78bb117  0000000d                                         client-part: checksum, 13 bytes of metadata
      0a0170 1007 18e807 5802 c00108                                p, 7, 1000, two messages, highest 8
      00000002 1802 6869                                            item: payload_size 2, "hi"
      00000002 1803 796f75                                          item: payload_size 3, "you"

**Text and bytes.** Protobuf calls keys, properties and names `string`, but Pulsar's clients put any bytes there. A key
that is not UTF-8 is a key of bytes: it is read as its base64, with a mark. Names and values of properties are text:
bytes in them that are not UTF-8 are read as U+FFFD (`decode_properties`), as Pulsar's Java client reads them. So a
reader has text everywhere, also in a compressed or encrypted batch, which a broker cannot check, and no value makes a
message unreadable. Names by which something is found again (the producer, the uuid of chunks, the keys of an
encryption) must be UTF-8: an entry with others is refused.

**Numbers.** A property may take six bytes of metadata, and some hundred compressed bytes decompress to a million
properties: they are not read until a program asks for them. An entry is encrypted for ENCRYPTION_KEYS_MAX keys at most.

A producer encodes (`encode_entry`, `encode_batch`), a broker reads only the header (`parse_header`) and adds its part
(`encode_broker_part`), a consumer splits (`split_broker_part`, `decode_batch`). An entry that does not parse, does not
match its checksum or contradicts itself is CorruptEntry, within these limits of memory. Guard:
tests/proto/test_entry.py.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from struct import Struct, iter_unpack
from struct import error as _U32_ERROR
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from .checksum import crc32c
from .compression import UNCOMPRESSED_BYTES_MAX, compress, decompress
from .entry_pb2 import BrokerEntryMetadata, MessageMetadata, SingleMessageMetadata
from .errors import CorruptEntry

Buffer = bytes | bytearray | memoryview
MessageFields = MessageMetadata | SingleMessageMetadata
"""The metadata of one message, alone or in a batch: key, properties, event time, null value. Messages may share one
object, so it must not be changed."""
EncryptFunction = Callable[[MessageMetadata, bytes], bytes]
"""A function that gets (metadata, payload) and returns the encrypted payload. It also writes to the metadata how the
payload is decrypted."""


class EntryEncoding(NamedTuple):
    """How a producer encodes its entries: the codec (a number of `Compression`), the encryption (None: none), and the
    version of its messages' schema (empty: none)."""

    compression: int = 0
    encrypt: EncryptFunction | None = None  # raises CryptoError, which is the outcome of the entry's messages
    schema_version: bytes = b""


PLAIN = EntryEncoding()
"""Without compression, encryption and schema."""

ENTRY_BYTES_MAX = 5 << 20
"""The largest client-part, in bytes, that a broker accepts: Pulsar's `max_message_size`."""

MANY_PROPERTIES = 1000
"""From this number of properties on, reading those of one message takes milliseconds."""
ENCRYPTION_KEYS_MAX = 1000
"""The largest number of keys for which an entry's payload may be encrypted, because all of them are read."""

METADATA_CACHE_SIZE = 4096
"""The largest number of items in each cache of metadata: of payload sizes when encoding, of metadata bytes when
decoding."""

MAGIC_CLIENT = b"\x0e\x01"
MAGIC_BROKER = b"\x0e\x02"
_U32 = Struct(">I")
_HEAD = Struct(">2sII")
_BROKER_HEAD = Struct(">2sI")
CHECKSUM_START = 6
"""The checksum of a client-part covers the bytes from this offset on, which follow the magic and the checksum."""
ENTRY_HEAD_BYTES = _HEAD.size
"""The number of bytes before the metadata in a client-part."""
_ITEM_BYTES_MIN = 6  # u32 size and a SingleMessageMetadata with only its payload_size
_BROKER_METADATA_BYTES_MAX = 1 << 16


class EntryHeader:
    """The header of an entry's client-part. `metadata` is its MessageMetadata. `payload_offset` is counted from the
    start of the entry. `checksum` is the one written in the entry, of all bytes from CHECKSUM_START on.
    `uncompressed_size` is the size of the payload after decompression, in bytes; 0: it is not compressed. `batched`:
    the payload is a batch, of `num_messages` messages."""

    __slots__ = ("batched", "checksum", "metadata", "num_messages", "payload_offset", "uncompressed_size")

    def __init__(self, metadata: MessageMetadata, payload_offset: int, checksum: int = 0, unfolded: int = 0) -> None:
        self.uncompressed_size = unfolded
        self.checksum = checksum
        self.metadata = metadata
        self.payload_offset = payload_offset
        self.batched: bool = metadata.HasField("num_messages_in_batch")
        self.num_messages: int = metadata.num_messages_in_batch if self.batched else 1

    @property
    def sequence_id(self) -> int:
        """The sequence id of the first message in the entry."""
        return self.metadata.sequence_id

    @property
    def highest_sequence_id(self) -> int:
        """The sequence id of the last message in the entry."""
        return max(self.metadata.sequence_id, self.metadata.highest_sequence_id)

    @property
    def producer_name(self) -> str:
        return self.metadata.producer_name

    @property
    def publish_time(self) -> int:
        """The time at which the producer sent the entry, in ms since the epoch, by the producer's clock."""
        return self.metadata.publish_time


# --------------------------------------------------------------------------------------------- encoding
class _PlainPrefixes(dict[int, bytes]):
    """The bytes before the payload of a batched message that has only a payload (`u32 size | SingleMessageMetadata`),
    by the size of the payload."""

    def __missing__(self, payload_size: int) -> bytes:
        encoded = SingleMessageMetadata(payload_size=payload_size).SerializeToString()
        prefix = _U32.pack(len(encoded)) + encoded
        if len(self) >= METADATA_CACHE_SIZE:
            self.clear()
        self[payload_size] = prefix
        return prefix


PLAIN_PREFIXES = _PlainPrefixes()
"""`PLAIN_PREFIXES[len(payload)]` is the prefix of a batched message that has only a payload: one look-up for each
message."""


def encode_item_prefix(metadata: SingleMessageMetadata) -> bytes:
    """Encodes the bytes before the payload of one message in a batch: the message's own `metadata` (key, properties,
    event time, …). Its `payload_size` must be set."""
    encoded = metadata.SerializeToString()
    return _U32.pack(len(encoded)) + encoded


def encode_plain_items(payloads: Iterable[bytes]) -> list[bytes]:
    """Encodes messages that have only a payload, as items of a batch: returns the prefix and the payload of each
    message, alternating, as `encode_batch` expects them."""
    prefixes = PLAIN_PREFIXES
    parts: list[bytes] = []
    append = parts.append
    for payload in payloads:
        append(prefixes[len(payload)])
        append(payload)
    return parts


def encode_batch(
    metadata: MessageMetadata, items: Sequence[bytes], count: int, encoding: EntryEncoding = PLAIN
) -> bytes:
    """Encodes the client-part of a batch of `count` messages and returns it. `items` are the prefix and the payload of
    each message, alternating. Compresses by `metadata.compression`, then encrypts. Each payload is copied once.

    The caller sets producer_name, sequence_id, publish_time and `compression` in `metadata`. This function sets the
    fields about the batch (num_messages_in_batch, uncompressed_size, and highest_sequence_id unless it is set). Raises
    the errors of `encoding.encrypt`."""
    assert count > 0, "a batch has at least one message"
    metadata.num_messages_in_batch = count
    if not metadata.highest_sequence_id:
        metadata.highest_sequence_id = metadata.sequence_id + count - 1
    if metadata.compression or encoding.encrypt is not None:
        return encode_entry(metadata, b"".join(items), encoding)
    encoded = metadata.SerializeToString()
    body = b"".join((_U32.pack(len(encoded)), encoded, *items))
    return b"".join((MAGIC_CLIENT, _U32.pack(crc32c(body)), body))


def encode_entry(metadata: MessageMetadata, payload: bytes, encoding: EntryEncoding = PLAIN) -> bytes:
    """Encodes the client-part of an entry and returns it: its metadata and its payload (one message, or the joined
    items of a batch). Compresses the payload by `metadata.compression`, then encrypts it. An encrypted entry always
    gets `uncompressed_size`, because Go's client needs this field even without compression. Raises the errors of
    `encoding.encrypt`."""
    if encoding.encrypt is not None:
        metadata.uncompressed_size = len(payload)
    payload = compress_payload(metadata, payload)
    if encoding.encrypt is not None:
        payload = encoding.encrypt(metadata, payload)
    return encode_client_part(metadata, payload)


def compress_payload(metadata: MessageMetadata, payload: bytes) -> bytes:
    """Returns the payload compressed by `metadata.compression`, and sets `uncompressed_size` in `metadata`; returns the
    payload itself if it is not to be compressed. Raises KeyError if there is no such codec."""
    if not metadata.compression:
        return payload
    metadata.uncompressed_size = len(payload)
    return compress(metadata.compression, payload)


def encode_client_part(metadata: MessageMetadata, payload: bytes) -> bytes:
    """Encodes the client-part of an entry and returns it. The payload must already be compressed and encrypted as
    `metadata` says."""
    return join_client_part(metadata.SerializeToString(), payload)


def join_client_part(metadata: bytes, payload: bytes) -> bytes:
    """Makes the client-part of an entry like `encode_client_part`, from metadata that is already encoded."""
    size = _U32.pack(len(metadata))
    checksum = crc32c(payload, crc32c(size + metadata))
    return b"".join((MAGIC_CLIENT, _U32.pack(checksum), size, metadata, payload))


def copy_with_schema_version(entry: bytes, version: bytes) -> bytes:
    """Returns a copy of the client-part `entry` with another schema version in its metadata: the 8 bytes `version`.
    Raises CorruptEntry if the header is malformed; does not verify the checksum."""
    header = parse_header(entry, verify=False)
    header.metadata.schema_version = version
    return encode_client_part(header.metadata, entry[header.payload_offset :])


def encode_broker_part(index: int, timestamp_ms: int) -> bytes:
    """Encodes the broker-part of an entry, which the broker puts before the client-part. `index` is the index of the
    entry's last message; `timestamp_ms` is the broker's time in ms since the epoch."""
    encoded = BrokerEntryMetadata(broker_timestamp=timestamp_ms, index=index).SerializeToString()
    return MAGIC_BROKER + _U32.pack(len(encoded)) + encoded


# --------------------------------------------------------------------------------------------- decoding
def split_broker_part(entry: Buffer) -> tuple[int, int, memoryview]:
    """Splits a stored entry into its two parts. Returns (index of its last message, the broker's time in ms,
    client-part). Returns (-1, 0, entry) if there is no broker-part; the index is also -1 if the broker-part has none.
    Raises CorruptEntry if the broker-part is malformed."""
    index, timestamp_ms, start = parse_broker_part(entry)
    return index, timestamp_ms, memoryview(entry)[start:]


def strip_broker_part(entry: Buffer) -> memoryview:
    """Returns the client-part of a stored entry, whether it has a broker-part or not. Raises CorruptEntry if the entry
    ends inside its broker-part; verifies nothing else."""
    if entry[:2] != MAGIC_BROKER:
        return memoryview(entry)
    start = 6 + _U32.unpack_from(entry, 2)[0] if len(entry) >= 6 else 6
    if start > len(entry):
        raise CorruptEntry(f"entry of {len(entry)} bytes ends inside its broker-part")
    return memoryview(entry)[start:]


def parse_broker_part(entry: Buffer) -> tuple[int, int, int]:
    """Parses the broker-part of a stored entry. Returns (index of its last message, the broker's time in ms, offset of
    the client-part); (-1, 0, 0) if there is no broker-part; the index is also -1 if the broker-part has none. Raises
    CorruptEntry if it is malformed."""
    if entry[:2] != MAGIC_BROKER:
        return -1, 0, 0
    if len(entry) < 6:
        raise CorruptEntry(f"entry of {len(entry)} bytes ends inside its broker-part")
    (size,) = _U32.unpack_from(entry, 2)
    if size > min(len(entry) - 6, _BROKER_METADATA_BYTES_MAX):
        raise CorruptEntry(f"broker-part declares {size} bytes in an entry of {len(entry)}")
    try:
        metadata = BrokerEntryMetadata.FromString(bytes(entry[6 : 6 + size]))
    except DecodeError as error:
        raise CorruptEntry("broker-part is not a BrokerEntryMetadata") from error
    return metadata.index if metadata.HasField("index") else -1, metadata.broker_timestamp, 6 + size


class StoredEntryHead(NamedTuple):
    """The fields that a broker needs from the head of a stored entry. `payload_offset` is counted from the start of the
    entry."""

    last_index: int  # -1: unknown
    timestamp_ms: int  # of the broker
    metadata: MessageMetadata
    payload_offset: int


def parse_stored_head(entry: Buffer) -> StoredEntryHead:
    """Parses the head of a stored entry and returns its fields. Raises CorruptEntry if the head is malformed. Does not
    verify the entry's checksum: that was done when the entry was published, and the ledger's own checksum has protected
    the bytes since."""
    index, timestamp_ms, start = -1, 0, 0
    try:
        magic, size = _BROKER_HEAD.unpack_from(entry)
        if magic == MAGIC_BROKER:
            start = 6 + size
            broker = BrokerEntryMetadata.FromString(bytes(entry[6:start]))
            index, timestamp_ms = broker.index if broker.HasField("index") else -1, broker.broker_timestamp
        magic, _checksum, size = _HEAD.unpack_from(entry, start)
        offset = start + _HEAD.size + size
        if magic != MAGIC_CLIENT or offset > len(entry):
            raise CorruptEntry(f"entry of {len(entry)} bytes has no client-part at {start}")
        metadata = MessageMetadata.FromString(bytes(entry[offset - size : offset]))
    except (DecodeError, _U32_ERROR) as error:
        raise CorruptEntry(f"the head of the entry does not parse: {error}") from error
    return StoredEntryHead(index, timestamp_ms, metadata, offset)


def count_declared_messages(entry: Buffer) -> int:
    """Returns the number of messages that the head of a stored entry declares, right or wrong; 1 if it declares none,
    or is malformed. The broker takes this number of permits from a consumer, which returns as many
    (client/core/redelivery.py), so both must read the same bytes."""
    try:
        metadata = parse_stored_head(entry).metadata
    except CorruptEntry:
        return 1
    return metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else 1


def has_valid_checksum(entry: Buffer) -> bool:
    """Returns whether the entry's checksum is right, so that its bytes are those that were published; False if it has
    no client-part. If an entry with a right checksum cannot be parsed, it was already wrong when it was published."""
    try:
        start = parse_broker_part(entry)[2]
        magic, checksum, _ = _HEAD.unpack_from(entry, start)
    except (CorruptEntry, _U32_ERROR):
        return False
    computed: int = crc32c(memoryview(entry)[start + CHECKSUM_START :])
    return bool(magic == MAGIC_CLIENT and computed == checksum)


def get_sequence_id(entry: Buffer) -> int | None:
    """Returns the sequence id of an entry for the answer that refuses it; so the rest of the entry may be invalid.
    Returns None if no sequence id can be read."""
    try:
        metadata = parse_stored_head(entry).metadata
    except CorruptEntry:
        return None
    return metadata.sequence_id if metadata.HasField("sequence_id") else None


def parse_entry(entry: Buffer) -> tuple[int, EntryHeader]:
    """Parses an entry and verifies its checksum. Returns (index of its last message, header). The index is -1 if the
    entry has no broker-part, or none in it. Raises CorruptEntry if the entry is malformed or its checksum is wrong."""
    index, _, start = parse_broker_part(entry)
    return index, EntryHeader(*parse_checked_head(entry, start))


def parse_header(entry: Buffer, *, verify: bool = True) -> EntryHeader:
    """Parses the header of an entry, with or without a broker-part, and returns it. `verify`: also verifies the
    checksum, which reads the whole entry. Raises CorruptEntry like `parse_checked_head`."""
    return EntryHeader(*parse_checked_head(entry, verify=verify))


def parse_checked_head(entry: Buffer, start: int = -1, *, verify: bool = True) -> tuple[MessageMetadata, int, int, int]:
    """Parses an entry's header like `parse_header`. `start`: the offset of the client-part; -1: it is found. Returns
    (metadata, offset of the payload, checksum, uncompressed size). Raises CorruptEntry if the header is malformed, if
    the checksum is wrong, if names are not text, or if there are more messages than the payload can contain.

    Strings that are not UTF-8 come out of protobuf as bytes: Any, because compiled code insists on the declared type.
    """
    metadata: Any
    if start < 0:
        start = parse_broker_part(entry)[2] if entry[:2] == MAGIC_BROKER else 0
    body = start + _HEAD.size
    if len(entry) < body:
        raise CorruptEntry(f"client-part of {len(entry) - start} bytes is shorter than its head")
    magic, checksum, size = _HEAD.unpack_from(entry, start)
    if magic != MAGIC_CLIENT:
        raise CorruptEntry(f"client-part begins with {magic.hex()}, not with {MAGIC_CLIENT.hex()}")
    payload_offset = body + size
    if payload_offset > len(entry):
        raise CorruptEntry(f"client-part declares {size} bytes of metadata and has {len(entry) - body}")
    if verify and crc32c(memoryview(entry)[start + CHECKSUM_START :]) != checksum:
        raise CorruptEntry("the checksum of the entry does not match its bytes")
    try:
        metadata = MessageMetadata.FromString(bytes(entry[body:payload_offset]))
    except DecodeError as error:
        raise CorruptEntry("the metadata of the entry is not a MessageMetadata") from error
    if not metadata.IsInitialized():
        raise CorruptEntry("the metadata of the entry lacks producer_name, sequence_id or publish_time")
    if not isinstance(metadata.producer_name, str):
        raise CorruptEntry("the producer name is not UTF-8")
    if not isinstance(metadata.uuid, str):
        raise CorruptEntry("the uuid of a message in chunks is not UTF-8")
    if metadata.encryption_keys:
        _check_keys(metadata)
    if not isinstance(metadata.partition_key, str):
        _read_key(metadata)
    unfolded: int = len(entry) - payload_offset
    if metadata.compression:
        unfolded = metadata.uncompressed_size
        if unfolded > UNCOMPRESSED_BYTES_MAX:
            raise CorruptEntry(f"entry of {unfolded} uncompressed bytes; the limit is {UNCOMPRESSED_BYTES_MAX}")
    if metadata.HasField("num_messages_in_batch"):
        count = metadata.num_messages_in_batch
        if count < 1 or count * _ITEM_BYTES_MIN > unfolded:
            raise CorruptEntry(f"the entry declares {count} messages in {unfolded} bytes")
    if metadata.highest_sequence_id and metadata.highest_sequence_id < metadata.sequence_id:
        raise CorruptEntry("the highest sequence id of the entry is below its first")
    return metadata, payload_offset, checksum, unfolded if metadata.compression else 0


def _check_keys(metadata: Any) -> None:
    if (count := len(metadata.encryption_keys)) > ENCRYPTION_KEYS_MAX:
        raise CorruptEntry(f"the entry is encrypted for {count} keys; the limit is {ENCRYPTION_KEYS_MAX}")
    for each in metadata.encryption_keys:
        told = [text for pair in each.metadata for text in (pair.key, pair.value)]
        if not all(isinstance(text, str) for text in (each.key, metadata.encryption_algo, *told)):
            raise CorruptEntry("the name of an encryption key is not UTF-8")


def _read_key(fields: Any) -> None:
    """Replaces a key that is not UTF-8 in `fields`, which were parsed just now, as the module's docstring says."""
    key = fields.partition_key
    if not isinstance(key, str):
        fields.partition_key, fields.partition_key_b64_encoded = base64.b64encode(key).decode(), True


def decode_properties(fields: Any) -> dict[str, str]:
    """Returns the properties of one message as text. If a name appears several times, its last value counts."""
    return {decode_text(pair.key): decode_text(pair.value) for pair in fields.properties}


def decode_text(value: Any) -> str:
    """Returns a string field of a message as text. Protobuf returns a field that is not UTF-8 as bytes; in these, each
    invalid byte becomes U+FFFD."""
    found: str = value if isinstance(value, str) else value.decode("utf-8", "replace")
    return found


def decode_payload(header: EntryHeader, entry: Buffer) -> bytes:
    """Decompresses the payload of an entry and returns it: the payload of its message, or all items of its batch, one
    after the other. Raises CorruptEntry if it cannot be decompressed to its declared size."""
    payload, kind = bytes(entry[header.payload_offset :]), header.metadata.compression
    return decompress(kind, payload, header.metadata.uncompressed_size) if kind else payload


def decode_batch(header: EntryHeader, entry: Buffer) -> list[tuple[MessageFields, bytes]]:
    """Decodes the messages of an entry, whether it is a batch or not. Returns (metadata, payload) of each message.
    Messages with equal metadata may share one object, which must not be changed. Raises CorruptEntry if the payload is
    malformed."""
    return list(zip(*decode_message_columns(header, entry), strict=True))


def decode_for_inspection(header: EntryHeader, entry: Buffer) -> list[tuple[MessageFields, bytes]]:
    """Decodes the messages of an entry for an inspection. Returns (metadata, payload) of each message. An encrypted
    entry is one message with its encrypted payload. A chunk is one message with its part of the payload, which stays
    compressed, because only the whole payload can be decompressed. Raises CorruptEntry if the payload of a batch is
    malformed."""
    if header.metadata.encryption_param or header.metadata.num_chunks_from_msg > 1:
        return [(header.metadata, bytes(entry[header.payload_offset :]))]
    return decode_batch(header, entry)


def decode_message_columns(header: EntryHeader, entry: Buffer) -> tuple[list[MessageFields], list[bytes]]:
    """Decodes the messages of an entry into two lists: the metadata of all messages, and their payloads. This saves the
    garbage collector an object for each message. Raises CorruptEntry if the payload is malformed."""
    fields, payloads = decode_message_columns_lazily(header, entry)
    return fields, payloads if isinstance(payloads, list) else payloads.copy_all()


def decode_message_columns_lazily(header: EntryHeader, entry: Buffer) -> tuple[
    list[MessageFields], list[bytes] | EqualLengthPayloads
]:
    """Decodes an entry like `decode_message_columns`. If all messages have equal metadata, returns their payloads as
    EqualLengthPayloads, which copies each payload only when it is read. Raises CorruptEntry if the payload is
    malformed."""
    if not header.batched:
        return [header.metadata], [decode_payload(header, entry)]
    if header.metadata.compression:
        items, offset = decode_payload(header, entry), 0
    else:
        items, offset = bytes(entry), header.payload_offset  # no copy
    fields: list[MessageFields] = []
    payloads: list[bytes] = []
    add_fields, add_payload, known, size_at = fields.append, payloads.append, _HEADS.get, _U32.unpack_from
    end, guess = len(items), 0
    try:
        if header.num_messages >= EQUAL_HEADS_FROM:
            single, alike = _alike(items, offset, header.num_messages)
            if alike is not None:
                return [single] * header.num_messages, alike
        for _ in range(header.num_messages):
            # Most heads are as long as the one before. A head begins with its length: bytes that are one are all of it.
            head = known(items[offset : offset + guess])
            if head is None:
                guess = 4 + size_at(items, offset)[0]
                head = _HEADS[items[offset : offset + guess]]
            single, size, length = head
            middle = offset + length
            offset = middle + size
            if offset > end:
                raise CorruptEntry(f"item {len(payloads)} ends {offset - end} bytes after the payload")
            add_fields(single)
            add_payload(items[middle:offset])
    except (ValueError, OverflowError, DecodeError, _U32_ERROR) as error:
        raise CorruptEntry(f"item {len(payloads)} of the batch is torn or malformed: {error}") from error
    if offset != end:
        raise CorruptEntry(f"{end - offset} bytes follow the last item of the batch")
    return fields, payloads


class EqualLengthPayloads:
    """The payloads of a batch whose messages have equal metadata, so that their payloads have the same length. Each
    payload is copied out of the entry when it is read."""

    __slots__ = ("_first", "_items", "_size", "_step")

    def __init__(self, items: bytes, first: int, size: int, step: int) -> None:
        self._items, self._first, self._size, self._step = items, first, size, step

    def __getitem__(self, at: int) -> bytes:
        """Returns a copy of one payload."""
        begin = self._first + at * self._step
        return self._items[begin : begin + self._size]

    def copy_all(self) -> list[bytes]:
        """Returns copies of all payloads, in order."""
        each = f"{self._size}s{self._step - self._size}x"
        whole = self._items[self._first :] + bytes(self._step - self._size)
        return [payload for (payload,) in iter_unpack(each, whole)]


def _alike(items: bytes, offset: int, count: int) -> tuple[SingleMessageMetadata, EqualLengthPayloads | None]:
    """Decodes `count` items whose heads are equal. Returns (their common metadata, their payloads); None in place of
    the payloads if the heads differ. Records of a fixed size cost a quarter this way. Raises errors that
    `decode_message_columns` turns into CorruptEntry."""
    head = items[offset : offset + 4 + _U32.unpack_from(items, offset)[0]]
    single, size, length = _HEADS[head]
    step = length + size
    if count * step != len(items) - offset:
        return single, None
    for at in range(length):  # by columns: no object for each item
        if items[offset + at :: step] != head[at : at + 1] * count:
            return single, None
    return single, EqualLengthPayloads(items, offset + length, size, step)


def find_distinct_keys(metadata: MessageMetadata, payload_offset: int, entry: Buffer) -> list[bytes]:
    """Returns the keys of the entry's messages, each key once, in the order of the messages. A message without a key
    adds none; the chunks of such a message have its uuid as their key. Raises CorruptEntry if a batch is malformed.

    The ordering key takes precedence over the key. In a batch the metadata of each message is read, because that of the
    batch describes only its first message. Payloads are copied only to decompress them."""
    if not metadata.HasField("num_messages_in_batch"):
        key = key_of_single_message(metadata)
        return [] if key is None else [key]
    payload, offset = bytes(entry), payload_offset
    if metadata.compression:
        payload, offset = decompress(metadata.compression, payload[offset:], metadata.uncompressed_size), 0
    found: dict[bytes, None] = {}
    collect_item_keys(payload, offset, metadata.num_messages_in_batch, found)
    return list(found)


def collect_item_keys(payload: bytes | mmap, offset: int, count: int, found: dict[bytes, None]) -> int:
    """Adds the keys of the next `count` items of a batch to `found`. The first item begins at `offset` of the payload.
    Returns the offset after these items. Raises CorruptEntry if an item is malformed."""
    heads, size_at, end = _HEADS, _U32.unpack_from, len(payload)
    try:
        for _ in range(count):
            middle = offset + 4 + size_at(payload, offset)[0]
            single, size, _ = heads[payload[offset:middle]]
            offset = middle + size
            if offset > end:
                raise CorruptEntry(f"an item ends at {offset}, after the payload's {end} bytes")
            key = get_routing_key(single)
            if key is not None:
                found[key] = None
    except (ValueError, OverflowError, DecodeError, _U32_ERROR) as error:
        raise CorruptEntry(f"an item of the batch is torn or malformed: {error}") from error
    return offset


def key_of_single_message(metadata: MessageMetadata) -> bytes | None:
    """Returns the key of an entry that is not a batch; None if its message has no key. The chunks of a message without
    a key have its uuid as their key."""
    key = get_routing_key(metadata)
    if key is None and metadata.num_chunks_from_msg > 1:
        key = get_chunk_uuid(metadata).encode()  # the chunks of a message belong together
    return key


def get_chunk_uuid(metadata: Any) -> str:
    """Returns the uuid of the chunked message to which a chunk belongs, as text. In an old entry it may not be UTF-8,
    because brokers once did not check it; then U+FFFD replaces each invalid byte."""
    return decode_text(metadata.uuid)


def get_routing_key(fields: Any) -> bytes | None:
    """Returns the key by which a Key_Shared subscription chooses the consumer of a message; None if the message has no
    key. The ordering key takes precedence over the key; a key in base64 is decoded. `fields` may contain text that was
    not checked (`parse_stored_head`)."""
    if fields.HasField("ordering_key"):
        ordering_key: bytes = fields.ordering_key
        return ordering_key
    if not fields.HasField("partition_key"):
        return None
    key: str | bytes = fields.partition_key
    if isinstance(key, bytes):
        return key
    if not fields.partition_key_b64_encoded:
        return key.encode()
    try:
        return base64.b64decode(key, validate=True)
    except ValueError:
        return key.encode()


class _Heads(dict[bytes, tuple[SingleMessageMetadata, int, int]]):
    """The parsed heads of batch items, by their bytes: (metadata, size of the payload, length of the head). Cached,
    because most messages of a producer have the same head."""

    def __missing__(self, head: bytes) -> tuple[SingleMessageMetadata, int, int]:
        metadata = SingleMessageMetadata.FromString(head[4:])
        if not metadata.HasField("payload_size") or metadata.payload_size < 0:
            raise ValueError(f"payload_size is {metadata.payload_size} or missing")
        _read_key(metadata)
        found = metadata, metadata.payload_size, len(head)
        if len(head) <= _CACHED_BYTES_MAX:
            if len(self) >= METADATA_CACHE_SIZE:
                self.clear()
            self[head] = found
        return found


EQUAL_HEADS_FROM = 8
"""From this number of messages on, a batch is tested for equal heads. For fewer messages that does not pay."""
_CACHED_BYTES_MAX = 260
_HEADS = _Heads()
