"""Judges the messages of entries by a filter (filters.py): the broker for a subscription, the SDK for a consumer.

    wanted = find_filter({"filter": "region = 'eu'"})        from the properties of a subscription; None: no filter
    judge = EntryFilter(wanted)
    judge.find_unwanted_bits(entry, position)     of a stored entry, as bits: bit i is set if message i is not wanted
    passes_filter(wanted, fields, size, metadata)            of one message that was decoded

Rules
- The same message always has the same verdict, because only its own fields count.
- Messages that a broker cannot read count as wanted: those of an encrypted batch, and of a damaged entry. The
  properties of an encrypted message that is alone in its entry are not encrypted. The SDK, which can decrypt, drops the
  messages that are not wanted.
- A message in chunks has one verdict: that of its first chunk. All chunks have the properties of the message, so a
  later chunk whose first one was not seen is judged by its own properties.
- A reader of the compacted form gets each tombstone (a message without a value), so that it removes deleted keys
  (`keeps_tombstones`).
- **A message that went back for one subscription** (REDRIVEN_TO in proto/names.py) is wanted by this subscription,
  whatever its filter says. The filter wanted the message when it first came, and the copy has another producer and
  time. Every other durable subscription drops it (broker/subscription/expiry.py). The property counts only in the head
  of an entry: brokers do not look for it in a batch, nor in encrypted bytes.
- A batch is not read if its summary (summary.py) says that nothing in it is wanted (`excludes`), encrypted or not. A
  summary says nothing about tombstones.
- The verdicts of a batch are cached by the bytes of an item's head, as the messages of a producer have few different
  heads.

Guarding tests: tests/proto/test_entry_filter.py.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError

from .compression import decompress
from .entry import MANY_PROPERTIES, Buffer, StoredEntryHead, decode_text, get_chunk_uuid
from .entry_pb2 import MessageMetadata, SingleMessageMetadata
from .errors import CorruptEntry, InvalidRequest
from .filters import Filter, parse_filter
from .names import NAME_BYTES_MAX, REDRIVEN_TO, TEXT_MAX
from .schema import decode_version
from .summary import may_match, parse_summary

FILTER, TAGS = "filter", "filter.tags"
"""Properties of a subscription. `filter`: its filter. `filter.tags`: the short form of a filter by the property `tag`,
as RocketMQ writes it: `A || B`."""
JMS_SELECTOR, JMS_FILTERING = "jms.selector", "jms.filtering"
"""The properties by which Pulsar's client for JMS sets a selector. A selector that is no filter counts as none: that
client filters itself."""
TAG = "tag"
FILTER_PROPERTIES = (FILTER, TAGS, JMS_SELECTOR, JMS_FILTERING)
CACHED_VERDICTS_MAX = 8192
"""Heads of items whose verdicts are kept, about 2 MB at most for each filter."""
VERDICT_HEAD_BYTES_MAX = 260
CACHED_SUMMARIES_MAX = 1024
"""Summaries of entries whose verdicts are kept, 300 KB at most for each filter."""
CHUNKED_MESSAGES_MAX = 1000
"""Messages in chunks whose verdicts are kept until their last chunk."""

_REDRIVEN_TO = REDRIVEN_TO.encode()
_U32 = struct.Struct(">I")
_OF_ENTRY = frozenset(("message.producer", "message.publish_time", "message.schema_version"))
"""Names that all messages of an entry have in common."""


def find_filter(properties: Mapping[str, str]) -> Filter | None:
    """Returns the filter that the properties of a subscription define; None if they define none. Raises InvalidRequest
    if the text is not a filter, or if the properties define two. A JMS selector that is not a filter counts as none."""
    text, tags = properties.get(FILTER, "").strip(), properties.get(TAGS, "").strip()
    if text and tags:
        raise InvalidRequest(f"a subscription has a filter or tags: set one of the properties {FILTER!r} and {TAGS!r}")
    if text or tags:
        return parse_filter(text or make_tags_filter(tags))
    if properties.get(JMS_FILTERING) != "true" or not properties.get(JMS_SELECTOR, "").strip():
        return None
    try:
        return parse_filter(properties[JMS_SELECTOR].strip())
    except InvalidRequest:
        return None


def make_tags_filter(tags: str) -> str:
    """Returns the filter for which the tags `A || B` are the short form. Raises InvalidRequest if a tag is empty."""
    names = [each.strip() for each in tags.split("||")]
    if not all(names):
        raise InvalidRequest("tags are separated by '||', and none is empty: A || B")
    quoted = ", ".join("'" + each.replace("'", "''") + "'" for each in names)
    return f"{TAG} IN ({quoted})"


def find_redriven_to(metadata: MessageMetadata, entry: Buffer, payload_offset: int) -> str:
    """Returns the property REDRIVEN_TO of a message that is alone in its entry, or of a chunk. Returns "" if the entry
    is a batch, if the property is not among the first MANY_PROPERTIES ones, or if its value is longer than the names of
    a topic and a subscription may be. `metadata`: the metadata of the entry, which is encoded before `payload_offset`.
    A search in those bytes comes first, because it costs less than a look at each property."""
    if (
        not metadata.properties
        or metadata.HasField("num_messages_in_batch")
        or _REDRIVEN_TO not in bytes(entry[:payload_offset])
    ):
        return ""
    for pair in islice(metadata.properties, MANY_PROPERTIES):
        if pair.key == REDRIVEN_TO:
            value = decode_text(pair.value)
            return value if len(value) <= TEXT_MAX + NAME_BYTES_MAX else ""
    return ""


def read_field(fields: Any, size: int, metadata: MessageMetadata, name: str) -> str | int | None:
    """Returns the value of a name of `filters.SYSTEM_NAMES`; None if the message has none. `fields`: the metadata of
    the message; `size`: the bytes of its payload, uncompressed; `metadata`: that of its entry."""
    if name == "message.key":
        return _read_key(fields) if fields.HasField("partition_key") else None
    if name == "message.ordering_key":
        return bytes(fields.ordering_key).decode("utf-8", "replace") if fields.HasField("ordering_key") else None
    if name == "message.event_time":
        return fields.event_time or None
    if name == "message.producer":
        return decode_text(metadata.producer_name)
    if name == "message.publish_time":
        return metadata.publish_time
    return size if name == "message.size" else decode_version(metadata.schema_version)


def _read_key(fields: Any) -> str:
    """Returns the key as readers see it (entry.py): one that is not UTF-8 in base64."""
    key: str | bytes = fields.partition_key
    return key if isinstance(key, str) else base64.b64encode(key).decode()


def passes_filter(wanted: Filter, fields: Any, size: int, metadata: MessageMetadata) -> bool:
    """Returns whether the filter `wanted` wants a message. The other arguments are those of `read_field`."""
    found = dict[str, str]()
    _collect_properties(fields, wanted.names, found)
    if not wanted.system_names:
        return wanted.matches(found, _read_nothing)
    return wanted.matches(found, partial(read_field, fields, size, metadata))


def _collect_properties(fields: Any, names: Collection[str], found: dict[str, str]) -> None:
    """Adds the properties of a message that have one of the names to `found`. The last one of a name counts."""
    for pair in fields.properties[:]:  # half a microsecond each: what is not asked for is not decoded
        name = pair.key
        if name in names:
            found[name] = decode_text(pair.value)


def encode_names(names: Iterable[str]) -> dict[bytes, str]:
    """Returns the names by their UTF-8. A name that has no UTF-8 is left out, because no property can have it."""
    found = dict[bytes, str]()
    for name in names:
        with suppress(UnicodeEncodeError):
            found[name.encode()] = name
    return found


def read_leading_properties(head: bytes, at: int, names: Mapping[bytes, str], found: dict[str, str]) -> int:
    """Reads the properties at the beginning of an encoded SingleMessageMetadata, from the offset `at`, in half the time
    that protobuf takes. Stops at the first field that is no property, or that has 128 bytes or more. Adds the
    properties in `names` (UTF-8 → text) to `found`. Returns the offset where it stopped: the bytes from there on must
    be parsed, and may have more properties."""
    end = len(head) - 5
    while at < end and head[at] == 10 and head[at + 2] == 10:  # properties; its key
        size, key_size = head[at + 1], head[at + 3]
        key_end, following = at + 4 + key_size, at + 2 + size
        if size > 127 or following > end + 5 or key_size + 4 > size:
            break
        if head[key_end] != 18 or head[key_end + 1] != size - key_size - 4:  # its value, which is the rest
            break
        name = names.get(head[at + 4 : key_end])
        if name is not None:
            found[name] = head[key_end + 2 : following].decode("utf-8", "replace")
        at = following
    return at


def _read_nothing(name: str) -> None:
    """The fields of a message for a filter that names none."""


class EntryFilter:
    """Judges messages by a filter, and caches the verdicts. `keeps_tombstones`: each message without a value is wanted.
    `redriven_to`: the value of REDRIVEN_TO that messages which went back for the subscription have; they are wanted."""

    __slots__ = (
        "_chunks", "_encoded_names", "_of_entry", "_of_entry_names", "_summaries", "_verdicts", "filter",
        "keeps_tombstones", "redriven_to",
    )  # fmt: skip

    def __init__(self, wanted: Filter, *, keeps_tombstones: bool = False, redriven_to: str = "") -> None:
        self.filter = wanted
        self.keeps_tombstones = keeps_tombstones
        self.redriven_to = redriven_to
        self._verdicts: dict[bytes, tuple[bool, int]] = {}  # head of an item → (wanted, length of the item)
        self._encoded_names = encode_names(wanted.names)
        self._of_entry_names = tuple(sorted(wanted.system_names & _OF_ENTRY))
        self._of_entry: list[str | int | None] = []  # their values in the last batch: the verdicts hold for these
        self._chunks: dict[str, bool] = {}  # uuid → verdict
        self._summaries: dict[bytes, bool] = {}  # summary of an entry → nothing in it is wanted

    def excludes(self, metadata: MessageMetadata) -> bool:
        """Returns True if the summary of a batch says that no message in it is wanted; False if a message may be
        wanted, or if there is no summary. `metadata`: that of its entry."""
        summary: bytes = metadata.summary
        if not summary or self.keeps_tombstones or not metadata.HasField("num_messages_in_batch"):
            return False
        found = self._summaries.get(summary)
        if found is None:
            if len(self._summaries) >= CACHED_SUMMARIES_MAX:
                self._summaries.clear()
            found = self._summaries[summary] = not may_match(self.filter.root, parse_summary(summary))
        return found

    def find_unwanted_bits(self, head: StoredEntryHead, entry: Buffer) -> int:
        """Returns which messages of a stored entry are not wanted, as bits (bit i: message i). 0: all messages are
        wanted, or the entry cannot be read. Decompresses a batch, which may take long: the caller must ask
        `is_entry_slow_to_parse` before."""
        metadata, offset = head.metadata, head.payload_offset
        try:
            if metadata.HasField("num_messages_in_batch"):
                if self.excludes(metadata):
                    return (1 << metadata.num_messages_in_batch) - 1
                return 0 if metadata.encryption_keys else self._find_unwanted_of_batch(metadata, entry, offset)
            if self.redriven_to and find_redriven_to(metadata, entry, offset) == self.redriven_to:
                return 0
            if metadata.num_chunks_from_msg > 1:
                return not self._wants_chunk(metadata)
            size = metadata.uncompressed_size or len(entry) - offset
            return not self._wants(metadata, size, metadata)
        except (CorruptEntry, ValueError, OverflowError, DecodeError, struct.error):
            return 0  # its consumer reports the damage

    def _wants(self, fields: Any, size: int, metadata: MessageMetadata) -> bool:
        if self.keeps_tombstones and (fields.null_value or not size):
            return True
        return passes_filter(self.filter, fields, size, metadata)

    def _wants_item(self, fields: Any, size: int, metadata: MessageMetadata, found: dict[str, str]) -> bool:
        """Returns whether a message of a batch is wanted. `found`: those of its properties that the filter names."""
        if fields.compacted_out:
            return False
        if self.keeps_tombstones and (fields.null_value or not size):
            return True
        read = partial(read_field, fields, size, metadata) if self.filter.system_names else _read_nothing
        return self.filter.matches(found, read)

    def _wants_chunk(self, metadata: MessageMetadata) -> bool:
        uuid, last = get_chunk_uuid(metadata), metadata.num_chunks_from_msg - 1
        wanted = self._chunks.get(uuid) if metadata.chunk_id else None
        if wanted is None:
            wanted = self._wants(metadata, metadata.total_chunk_msg_size, metadata)
            while len(self._chunks) >= CHUNKED_MESSAGES_MAX:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[uuid] = wanted
        if metadata.chunk_id >= last:
            self._chunks.pop(uuid, None)
        return wanted

    def _find_unwanted_of_batch(self, metadata: MessageMetadata, entry: Buffer, offset: int) -> int:
        if self._of_entry_names:
            of_entry = [read_field(metadata, 0, metadata, name) for name in self._of_entry_names]
            if of_entry != self._of_entry:
                self._of_entry = of_entry
                self._verdicts.clear()
        items = bytes(entry)
        if metadata.compression:
            items, offset = decompress(metadata.compression, items[offset:], metadata.uncompressed_size), 0
        count, known, size_at, end, guess = (
            metadata.num_messages_in_batch, self._verdicts.get, _U32.unpack_from, len(items), 0
        )  # fmt: skip
        if count > end - offset:
            raise CorruptEntry(f"the entry declares {count} messages in {end - offset} bytes")
        bits, some = bytearray(b"0") * count, False  # the number in base 2: setting bits of an int is quadratic
        for at in range(1, count + 1):
            # Most heads are as long as the one before. A head begins with its length: equal bytes are all of it.
            head = items[offset : offset + guess]
            found = known(head)
            if found is None:
                size = 4 + size_at(items, offset)[0]
                if size != guess:
                    guess = size
                    head = items[offset : offset + guess]
                    found = known(head)
                if found is None:
                    found = self._judge_item(head, metadata)
            wanted, length = found
            offset += length
            if not wanted:
                bits[-at] = 49
                some = True
        if offset > end:
            raise CorruptEntry(f"the items end {offset - end} bytes after the payload")
        return int(bits, 2) if some else 0

    def _judge_item(self, head: bytes, metadata: MessageMetadata) -> tuple[bool, int]:
        """Judges the message of a batch with the head `head`. A message that compaction removed is not wanted."""
        found: dict[str, str] = {}
        rest = head[read_leading_properties(head, 4, self._encoded_names, found) :]
        fields = SingleMessageMetadata.FromString(rest)
        size = fields.payload_size
        if size < 0 or not fields.HasField("payload_size"):
            raise CorruptEntry(f"payload_size is {size} or missing")
        if 10 in rest:  # the tag of a property, or another byte
            _collect_properties(fields, self.filter.names, found)
        verdict = self._wants_item(fields, size, metadata, found), len(head) + size
        if len(head) <= VERDICT_HEAD_BYTES_MAX:
            if len(self._verdicts) >= CACHED_VERDICTS_MAX:
                self._verdicts.clear()
            self._verdicts[head] = verdict
        return verdict


