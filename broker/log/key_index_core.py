"""The key index of one sealed ledger: finds the blocks of the ledger that may have a message with a given key or
property.

    builder = KeyIndexBuilder(ledger_id, first_index, size, with_properties=True)
    builder.add(entry_id, size, describe_entry(payload, with_properties=True))       each entry, in order
    if builder.is_segment_full: store(builder.take_segment())                        entries to store, in order
    store(builder.finish())                                                          the last ones

    index = decode_directory(entry, ledger_id)
    hashes = index.list_hashes(expression)                the hashes to look up
    index.find_candidates(expression, {hash: blocks, …})     the blocks that may match

A *block* is about BLOCK_BYTES_MIN of consecutive entries. A *posting* is a pair (32-bit hash, number of a block): a
message in the block has this key (`hash_key`), this value of a property (`hash_property` of proto/summary.py) or a
property of this name (`hash_name`). A *segment* has the postings of consecutive blocks, at most
POSTINGS_PER_SEGMENT_MAX of them and those of one more block, sorted by hash and cut into 2^bits pages by the first bits
of the hash.

So a look-up reads one page of each segment: about 200 KB for a ledger of 2 GiB with 2 million keys. The alternative, a
Bloom filter of 10 bits a key for each block, needs 2.5 MB of reading, and one block of a hundred is read in vain (20 of
such a ledger). Here a hash that no message has is found with the probability postings / 2^32: one block is read in vain
in 2,000 look-ups. The price is 6 bytes on disk in place of 1.25 for each distinct key of a block.

    ledger    = page* directory
    entry     = magic "MK" | version u8 | kind u8 | crc32c u32 | body
    page      (kind 0) count u32 | u32 hash * count, ascending | u16 block * count
    directory (kind 1) MessagePack: `_Directory`

Numbers are big-endian; the checksum covers the body. The directory names its ledger: decoding it for another ledger
raises DamagedKeyIndex.

Rule: an index never hides a message that a search could find. The index covers what a search sees (proto/entry.py
`decode_for_inspection`): an encrypted batch is one message with the fields of its head, and so is a chunk. A block with
an entry that cannot be parsed is always a candidate (OPAQUE_BLOCK). A block is HIDDEN_BLOCK if a message in it may
match although a search at the broker cannot see that: the message is in an encrypted batch, or was sent back to one
subscription (`REDRIVEN_TO`). `find_candidates` with `hidden=True` returns such blocks, too. It then also ignores
conditions on the publish time: a message in chunks has the time of its first chunk, which may be in another block.
Guarding tests: tests/broker/log/test_key_index_core.py.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

import mmh3
import msgspec
from pyroaring import BitMap

from ...proto.checksum import crc32c
from ...proto.entry import (
    EntryHeader,
    MessageFields,
    decode_message_columns_lazily,
    decode_properties,
    decode_text,
    parse_entry,
)
from ...proto.errors import CorruptEntry
from ...proto.filters import VALUE_CHARACTERS_MAX, FilterNode, Name
from ...proto.names import REDRIVEN_TO
from ...proto.summary import find_candidates, hash_property
from ...proto.versions import KEY_INDEX, check_format
from ...runtime.files import Buffer

BLOCK_BYTES_MIN = 1 << 20
"""Bytes of a block: a search reads so much for each message that it finds, and 2,000 blocks are a ledger of 2 GiB."""
BLOCKS_MAX = 32_768
"""Blocks of a ledger, about; a posting has room for twice as many. Those of a ledger above 32 GiB are larger."""
POSTINGS_PER_SEGMENT_MAX = 1 << 19
"""Postings that are in memory while an index is built: 4 MiB of them, and 3 MiB while they are written. Together with
those of one more block they fit into one page, also when somebody chooses keys by their hashes."""
POSTINGS_PER_PAGE = 8192
"""Postings of a page, on average: it has 48 KiB, and sorting it takes a millisecond."""
BLOCK_HASHES_MAX = 100_000
"""Distinct hashes of a block. A block with more, of messages that compress to some bytes each, is OPAQUE_BLOCK."""
OPAQUE_BLOCK, HIDDEN_BLOCK = 1, 2
PAGE_KIND, DIRECTORY_KIND = 0, 1
KEY_INDEX_MAGIC = b"MK"
_HEAD = Struct(">2sBBI")
_U32 = Struct(">I")
_BUCKETS = 256  # of postings, by the first bits of their hash, while a segment grows
_KEY_SEED, _NAME_SEED = 1, 2


class DamagedKeyIndex(ValueError):
    """Raised if an entry of an index is damaged, or belongs to another ledger."""


def hash_key(key: str) -> int:
    """Returns the 32-bit hash by which an index finds a message's key."""
    found: int = mmh3.hash(key.encode("utf-8", "surrogatepass"), _KEY_SEED, False)
    return found


def hash_name(name: str) -> int:
    """Returns the 32-bit hash by which an index finds the messages that have a property of this name."""
    found: int = mmh3.hash(name.encode("utf-8", "surrogatepass"), _NAME_SEED, False)
    return found


# ----------------------------------------------------------------------------------------------------- one entry
class EntryDescription(NamedTuple):
    """The facts of one entry that the index stores. `end_index`: the index after its last message; -1: the entry cannot
    be parsed. `publish_ms`: its publish time. Times are in ms since the epoch; `event_low` above `event_high`: no
    message has an event time. `hashes`: of the keys, and of the properties if they are indexed; `flags`: OPAQUE_BLOCK
    and HIDDEN_BLOCK, or-ed."""

    end_index: int
    publish_ms: int
    event_low: int
    event_high: int
    hashes: frozenset[int]
    flags: int


NO_EVENT_LOW = 1 << 62
_UNREADABLE = EntryDescription(-1, 0, NO_EVENT_LOW, -1, frozenset(), OPAQUE_BLOCK)


def describe_entry(entry: Buffer, *, with_properties: bool) -> EntryDescription:
    """Returns the facts of a stored entry that the index stores; its flag is OPAQUE_BLOCK if the entry does not parse.
    `with_properties`: also hashes the properties; a value of more than VALUE_CHARACTERS_MAX characters is left out. May
    take long: see `run_in_thread_if_slow`."""
    try:
        last_index, header = parse_entry(entry)
        fields, is_whole = _list_fields(header, entry)
    except CorruptEntry:
        return _UNREADABLE
    hashes, low, high = set[int](), NO_EVENT_LOW, -1
    for about in {id(each): each for each in fields}.values():  # messages with equal heads share an object
        if about.HasField("partition_key"):
            hashes.add(hash_key(decode_text(about.partition_key)))
        if about.event_time:
            low, high = min(low, about.event_time), max(high, about.event_time)
        if with_properties and about.properties:
            for name, value in decode_properties(about).items():
                hashes.add(hash_name(name))
                if len(value) <= VALUE_CHARACTERS_MAX:
                    hashes.add(hash_property(name, value))
    return EntryDescription(
        last_index + 1, header.publish_time, low, high, frozenset(hashes), 0 if is_whole else HIDDEN_BLOCK
    )


def _list_fields(header: EntryHeader, entry: Buffer) -> tuple[Sequence[MessageFields], bool]:
    """Returns the fields that a search sees of the messages of an entry, and whether these decide what a filter wants:
    not of what is encrypted, nor of a message that went back for one subscription, which wants it in any case."""
    metadata = header.metadata
    if not header.batched or metadata.num_chunks_from_msg > 1:
        return [metadata], not any(each.key == REDRIVEN_TO for each in metadata.properties)
    if metadata.encryption_param:
        return [metadata], False
    return decode_message_columns_lazily(header, entry)[0], True


# ------------------------------------------------------------------------------------------------------ building
class EntryRun(msgspec.Struct, array_like=True):
    """Consecutive entries of a ledger. `first_entry`: the id of the first entry; `first_index`: the index of its first
    message; `end_index`: the index after the last message of the last entry. `publish_…`, `event_…`: the bounds of the
    times of the messages (ms since the epoch); `flags`: OPAQUE_BLOCK and HIDDEN_BLOCK, or-ed; `bytes`: the size of the
    entries."""

    first_entry: int
    first_index: int
    end_index: int
    publish_low: int
    publish_high: int
    event_low: int
    event_high: int
    bytes: int
    flags: int


class _Directory(msgspec.Struct, array_like=True):
    ledger_id: int
    with_properties: bool
    segments: list[tuple[int, int]]  # of each: its first page, and the bits of a hash that choose one of its pages
    blocks: list[EntryRun]


class KeyIndexBuilder:
    """Builds the index of a ledger from its entries, in order. `first_index`: the index of the ledger's first message;
    `size`: the bytes of the ledger. The caller stores the entries that `take_segment` yields, in order, whenever
    `is_segment_full`, and at last those that `finish` yields."""

    def __init__(self, ledger_id: int, first_index: int, size: int, *, with_properties: bool) -> None:
        self.with_properties = with_properties
        self._directory = _Directory(ledger_id, with_properties, [], [])
        self._block_bytes = max(BLOCK_BYTES_MIN, size // BLOCKS_MAX)
        self._block: EntryRun | None = None
        self._hashes: set[int] = set()  # of the block
        self._next_index = first_index
        self._buckets = [array("Q") for _ in range(_BUCKETS)]
        self._postings = 0  # of the segment
        self._pages = 0  # that were taken

    @property
    def is_segment_full(self) -> bool:
        """Returns True if the caller must call `take_segment` before it adds another entry."""
        return self._postings >= POSTINGS_PER_SEGMENT_MAX

    def add(self, entry_id: int, size: int, entry: EntryDescription) -> None:
        """Adds the next entry of the ledger, which has the id `entry_id`. `size`: its bytes; `entry`: its description.
        A block with more than BLOCK_HASHES_MAX hashes is marked OPAQUE_BLOCK, so that every search reads it."""
        block = self._block
        if block is None:
            block = self._block = EntryRun(
                entry_id, self._next_index, self._next_index, entry.publish_ms, entry.publish_ms, NO_EVENT_LOW, -1, 0, 0
            )
        block.end_index = self._next_index = max(block.end_index, entry.end_index)
        block.publish_low = min(block.publish_low, entry.publish_ms)
        block.publish_high = max(block.publish_high, entry.publish_ms)
        block.event_low = min(block.event_low, entry.event_low)
        block.event_high = max(block.event_high, entry.event_high)
        block.bytes += size
        block.flags |= entry.flags
        if not block.flags & OPAQUE_BLOCK:
            self._hashes |= entry.hashes
        if len(self._hashes) > BLOCK_HASHES_MAX:
            block.flags |= OPAQUE_BLOCK
            self._hashes.clear()
        if block.bytes >= self._block_bytes:
            self._end_block(block)

    def _end_block(self, block: EntryRun) -> None:
        number, buckets = len(self._directory.blocks), self._buckets
        assert number <= 0xFFFF, "a block is at least as large as its share of the ledger"
        self._directory.blocks.append(block)
        for value in self._hashes:
            buckets[value >> 24].append(value << 16 | number)
        self._postings += len(self._hashes)
        self._block, self._hashes = None, set()

    def take_segment(self) -> Iterable[bytes]:
        """Ends the segment. Yields its pages, encoded; each takes about a millisecond. The caller must iterate to the
        end before the next call of `add`."""
        bits = min(8, max(0, (self._postings // POSTINGS_PER_PAGE).bit_length()))
        self._directory.segments.append((self._pages, bits))
        width = _BUCKETS >> bits
        buckets, self._buckets, self._postings = self._buckets, [array("Q") for _ in range(_BUCKETS)], 0
        self._pages += 1 << bits
        for first in range(0, _BUCKETS, width):
            yield _encode_page([each for bucket in buckets[first : first + width] for each in sorted(bucket)])
            buckets[first : first + width] = [array("Q")] * width

    def finish(self) -> Iterable[bytes]:
        """Ends the last block and segment. Yields the remaining entries of the index; the directory is the last one. No
        entry may be added after it."""
        if self._block is not None:
            self._end_block(self._block)
        if self._postings:
            yield from self.take_segment()
        yield _encode(DIRECTORY_KIND, msgspec.msgpack.encode(self._directory))


def _encode(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(KEY_INDEX_MAGIC, KEY_INDEX.version, kind, crc32c(body)) + body


def _encode_page(postings: Sequence[int]) -> bytes:
    hashes, blocks = array("I", [each >> 16 for each in postings]), array("H", [each & 0xFFFF for each in postings])
    if sys.byteorder == "little":
        hashes.byteswap()
        blocks.byteswap()
    return _encode(PAGE_KIND, b"".join((_U32.pack(len(postings)), hashes.tobytes(), blocks.tobytes())))


# ------------------------------------------------------------------------------------------------------- reading
def _decode(entry: Buffer, kind: int, where: str) -> bytes:
    body = bytes(entry[_HEAD.size :])
    if len(entry) < _HEAD.size:
        raise DamagedKeyIndex(f"{where} has {len(entry)} bytes")
    magic, version, found, checksum = _HEAD.unpack_from(entry)
    if magic == KEY_INDEX_MAGIC:
        check_format(KEY_INDEX, version, where)
    if magic != KEY_INDEX_MAGIC or found != kind or checksum != crc32c(body):
        raise DamagedKeyIndex(f"{where} is damaged")
    return body


def decode_page(entry: Buffer, hashes: Iterable[int]) -> dict[int, BitMap]:
    """Returns, for each of the `hashes`, the numbers of the blocks that the page has for it; an empty set if it has
    none. Raises DamagedKeyIndex if the page is damaged; NewerFormat if a later version of Magnetar wrote it."""
    body = _decode(entry, PAGE_KIND, "a page of a key index")
    count = _U32.unpack_from(body)[0] if len(body) >= 4 else -1
    if len(body) != 4 + 6 * count:
        raise DamagedKeyIndex(f"a page of a key index has {len(body)} bytes for {count} postings")
    known, blocks = array("I", body[4 : 4 + 4 * count]), array("H", body[4 + 4 * count :])
    if sys.byteorder == "little":
        known.byteswap()
        blocks.byteswap()
    found = {each: (bisect_left(known, each), bisect_right(known, each)) for each in hashes}
    return {each: BitMap(blocks[first:end].tolist()) for each, (first, end) in found.items()}


def decode_directory(entry: Buffer, ledger_id: int) -> KeyIndex:
    """Decodes the last entry of the index of the ledger `ledger_id`, and returns the index without its postings. Raises
    DamagedKeyIndex if the entry is damaged, or is the directory of another ledger; NewerFormat if a later version of
    Magnetar wrote it."""
    try:
        found = msgspec.msgpack.decode(_decode(entry, DIRECTORY_KIND, "the directory of a key index"), type=_Directory)
    except msgspec.DecodeError as error:
        raise DamagedKeyIndex(f"the directory of a key index does not parse: {error}") from error
    if found.ledger_id != ledger_id:
        raise DamagedKeyIndex(f"the key index is that of ledger {found.ledger_id}, not of {ledger_id}")
    return KeyIndex(found)


def find_block_of_index(blocks: Sequence[EntryRun], index: int) -> int:
    """Returns the number of the block that has the message with this index: the last block that begins at or before it;
    0 if none does."""
    return max(0, bisect_right(blocks, index, key=lambda each: each.first_index) - 1)


class KeyIndex:
    """The key index of a ledger without its postings: its blocks, and the pages that have the postings of a hash.
    `with_properties`: True if properties are indexed, and not only keys."""

    def __init__(self, directory: _Directory) -> None:
        self.blocks = directory.blocks
        self.with_properties = directory.with_properties
        self._segments = directory.segments
        self._opaque, self._hidden = (
            BitMap(number for number, each in enumerate(self.blocks) if each.flags & flag)
            for flag in (OPAQUE_BLOCK, HIDDEN_BLOCK)
        )

    def list_pages_of_hash(self, value: int) -> list[int]:
        """Returns the entry ids of the pages that may have postings of the hash `value`, one page of each segment."""
        return [first + (value >> 32 - bits) for first, bits in self._segments]

    def list_hashes(self, expression: FilterNode) -> set[int]:
        """Returns the hashes whose postings `find_candidates` needs for `expression`."""
        asked = set[int]()

        def note(value: int) -> BitMap:
            asked.add(value)
            return BitMap()

        find_candidates(expression, _BlockEvidence(self, note))
        return asked

    def find_candidates(
        self, expression: FilterNode, postings: Mapping[int, BitMap], *, hidden: bool = False
    ) -> BitMap:
        """Returns the numbers of the blocks in which the expression may be TRUE for a message. `postings`: the blocks
        of each hash of `list_hashes`; a hash that is missing has none. `hidden`: also returns blocks in which a message
        may match by facts that are not in the block, because only a consumer can decrypt it, or because its first chunk
        is in another block."""
        look_up = lambda value: postings.get(value, BitMap())
        found = find_candidates(expression, _BlockEvidence(self, look_up, publish_times=not hidden))
        found = found | self._opaque
        return found | self._hidden if hidden else found


class _BlockEvidence:
    """What an index knows of its blocks: the evidence of `find_candidates`, of type BitMap."""

    def __init__(
        self, index: KeyIndex, look_up: Callable[[int], BitMap], *, publish_times: bool = True
    ) -> None:
        self._index = index
        self._publish_times = publish_times
        self._look_up = look_up
        self.everything, self.nothing = BitMap(range(len(index.blocks))), BitMap()

    def may_equal(self, name: Name, text: str) -> BitMap:
        if name.is_system:
            return self._look_up(hash_key(text)) if name.name == "message.key" else self.everything
        return self._look_up(hash_property(name.name, text)) if self._index.with_properties else self.everything

    def may_exist(self, name: Name) -> BitMap:
        if name.is_system or not self._index.with_properties:
            return self.everything
        return self._look_up(hash_name(name.name))

    def may_lack(self, name: Name) -> BitMap:
        return self.everything

    def may_be_between(self, name: Name, low: float, high: float) -> BitMap:
        if name.name == "message.publish_time" and self._publish_times:
            bounds = [(each.publish_low, each.publish_high) for each in self._index.blocks]
        elif name.name == "message.event_time":
            bounds = [(each.event_low, each.event_high) for each in self._index.blocks]
        else:
            return self.everything
        return BitMap(number for number, (least, most) in enumerate(bounds) if least <= high and most >= low)
