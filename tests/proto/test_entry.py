
import contextlib
import re
from base64 import b64decode
from collections.abc import Callable
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.proto import entry
from magnetar.proto.checksum import crc32c
from magnetar.proto.compression import Compression
from magnetar.proto.entry import (
    ENCRYPTION_KEYS_MAX,
    EntryHeader,
    decode_batch,
    decode_message_columns_lazily,
    decode_properties,
    encode_batch,
    encode_broker_part,
    encode_client_part,
    encode_entry,
    encode_item_prefix,
    encode_plain_items,
    find_distinct_keys,
    get_sequence_id,
    parse_header,
    parse_stored_head,
    split_broker_part,
    strip_broker_part,
)
from magnetar.proto.entry_pb2 import BrokerEntryMetadata, MessageMetadata, SingleMessageMetadata
from magnetar.proto.errors import CorruptEntry
from tests.compiled import reads_docstring

KINDS = st.sampled_from(list(Compression))
KEYS = st.one_of(st.none(), st.text(max_size=20))


def metadata(compression: int = 0, sequence_id: int = 7) -> MessageMetadata:
    made = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1000)
    if compression:
        made.compression = compression  # type: ignore[assignment]
    return made


def batch(payloads: list[bytes], compression: int = 0) -> bytes:
    return encode_batch(metadata(compression), encode_plain_items(payloads), len(payloads))


EXAMPLE = bytes.fromhex(
    "0e020000000508e90710010e01e78bb1170000000d0a0170100718e8075802c0010800000002180268690000000218" + "03796f75"
)


@reads_docstring
def test_the_example_of_the_specification() -> None:
    made = encode_broker_part(1, 1001) + batch([b"hi", b"you"])
    assert made == EXAMPLE
    text = "".join((entry.__doc__ or "").split("Example:")[1].split("A producer encodes")[0].split())
    for piece in ("0e02", "08e907", "e78bb117", "0a0170", "c00108", "1803"):
        assert piece in text


def test_a_client_without_our_code_reads_what_we_write() -> None:
    """Parsed with the plain protobuf classes and nothing of proto/entry.py."""
    made = batch([b"hi", b"you"])
    assert made[:2] == b"\x0e\x01"
    assert int.from_bytes(made[2:6], "big") == crc32c(made[6:])
    size = int.from_bytes(made[6:10], "big")
    head = MessageMetadata.FromString(made[10 : 10 + size])
    assert (head.producer_name, head.sequence_id, head.highest_sequence_id) == ("p", 7, 8)
    assert (head.publish_time, head.num_messages_in_batch) == (1000, 2)
    at, found = 10 + size, []
    while at < len(made):
        single_size = int.from_bytes(made[at : at + 4], "big")
        single = SingleMessageMetadata.FromString(made[at + 4 : at + 4 + single_size])
        at += 4 + single_size
        found.append(made[at : at + single.payload_size])
        at += single.payload_size
    assert found == [b"hi", b"you"]


def test_an_entry_made_without_our_code_is_read() -> None:
    single = SingleMessageMetadata(payload_size=3, partition_key="k", event_time=5).SerializeToString()
    payload = pack(">I", len(single)) + single + b"abc"
    head = MessageMetadata(producer_name="java", sequence_id=1, publish_time=2, num_messages_in_batch=1)
    body = pack(">I", head.ByteSize()) + head.SerializeToString() + payload
    made = b"\x0e\x01" + pack(">I", crc32c(body)) + body
    broker = BrokerEntryMetadata(index=41, broker_timestamp=9).SerializeToString()
    stored = b"\x0e\x02" + pack(">I", len(broker)) + broker + made
    index, timestamp, client_part = split_broker_part(stored)
    assert (index, timestamp, bytes(client_part)) == (41, 9, made)
    header = parse_header(stored)
    assert (header.producer_name, header.num_messages, header.sequence_id) == ("java", 1, 1)
    [(fields, content)] = decode_batch(header, stored)
    assert (fields.partition_key, fields.event_time, content) == ("k", 5, b"abc")


@given(KINDS, st.lists(st.binary(max_size=200), min_size=1, max_size=30), st.booleans())
def test_a_batch_survives(kind: Compression, payloads: list[bytes], stored: bool) -> None:
    made = batch(payloads, kind)
    if stored:
        made = encode_broker_part(len(payloads) + 10, 5) + made
    header = parse_header(made)
    assert (header.num_messages, header.sequence_id) == (len(payloads), 7)
    assert header.highest_sequence_id == 7 + len(payloads) - 1
    assert [content for _, content in decode_batch(header, made)] == payloads
    assert [content for _, content in decode_batch(header, memoryview(made))] == payloads


@given(KINDS, st.binary(max_size=500), KEYS)
def test_a_single_message_survives(kind: Compression, payload: bytes, key: str | None) -> None:
    head = metadata(kind)
    if key is not None:
        head.partition_key = key
    made = encode_entry(head, payload)
    header = parse_header(made)
    assert (header.batched, header.num_messages, header.highest_sequence_id) == (False, 1, 7)
    [(fields, content)] = decode_batch(header, made)
    assert (content, fields.partition_key) == (payload, key or "")


@given(st.lists(st.tuples(st.binary(max_size=50), KEYS, st.dictionaries(st.text(), st.text(), max_size=3)), min_size=1))
def test_keys_and_properties_stand_with_their_message(messages: list[tuple[bytes, str | None, dict[str, str]]]) -> None:
    parts: list[bytes] = []
    for payload, key, properties in messages:
        single = SingleMessageMetadata(payload_size=len(payload), partition_key=key)
        for name, value in properties.items():
            single.properties.add(key=name, value=value)
        parts += (encode_item_prefix(single), payload)
    made = encode_batch(metadata(), parts, len(messages))
    found = decode_batch(parse_header(made), made)
    assert [(c, f.partition_key, {p.key: p.value for p in f.properties}) for f, c in found] == [
        (payload, key or "", properties) for payload, key, properties in messages
    ]


# ---------------------------------------------------------------------------------- damage
def read(made: bytes, *, verify: bool) -> None:
    split_broker_part(made)
    header = parse_header(made, verify=verify)
    for fields, content in decode_batch(header, made):
        assert isinstance(fields.partition_key, str)
        assert isinstance(content, bytes)


@pytest.mark.parametrize("kind", list(Compression))
def test_truncation_at_every_byte_is_noticed(kind: Compression) -> None:
    made = encode_broker_part(1, 1001) + batch([b"hi" * 20, b"you" * 30], kind)
    for size in range(len(made)):
        with pytest.raises(CorruptEntry):
            read(made[:size], verify=True)


@pytest.mark.parametrize("kind", list(Compression))
def test_every_flipped_bit_is_noticed_or_stands_in_the_broker_part(kind: Compression) -> None:
    prefix = encode_broker_part(1, 1001)
    made = prefix + batch([b"hi" * 20, b"you" * 30], kind)
    for at in range(len(made) * 8):
        flipped = bytearray(made)
        flipped[at // 8] ^= 1 << at % 8
        if at // 8 >= len(prefix):
            with pytest.raises(CorruptEntry):
                read(bytes(flipped), verify=True)
        else:
            with contextlib.suppress(CorruptEntry):
                read(bytes(flipped), verify=True)


@settings(max_examples=400)
@given(KINDS, st.data())
def test_damage_under_a_right_checksum_is_corrupt_or_harmless(kind: Compression, data: st.DataObject) -> None:
    """What a lying producer can do: every byte may be anything. No other exception, no endless loop."""
    made = bytearray(batch([b"hello", b"", b"x" * 40], kind))
    for _ in range(data.draw(st.integers(1, 4))):
        made[data.draw(st.integers(2, len(made) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(made[: data.draw(st.integers(10, len(made)))])
    body = cut[6:]
    for lie in (cut, cut[:2] + pack(">I", crc32c(body)) + body):
        for verify in (True, False):
            with contextlib.suppress(CorruptEntry):
                read(lie, verify=verify)


@given(st.binary(max_size=200))
def test_noise_is_corrupt(noise: bytes) -> None:
    with pytest.raises(CorruptEntry):
        read(noise, verify=True)


@pytest.mark.parametrize("count", [0, -1, 3, 1 << 30])
def test_a_count_that_the_payload_cannot_hold_is_refused(count: int) -> None:
    """A broker advances its index by the count: a lie there would be believed for ever."""
    head = metadata()
    head.num_messages_in_batch = count
    payload = b"".join(encode_plain_items([b"", b""]))
    with pytest.raises(CorruptEntry):
        parse_header(encode_entry(head, payload))


def test_items_behind_the_last_one_are_refused() -> None:
    made = encode_batch(metadata(), encode_plain_items([b"a", b"b"]), 1)
    with pytest.raises(CorruptEntry, match="follow the last item"):
        decode_batch(parse_header(made), made)


def test_a_bomb_is_refused_by_its_declared_size() -> None:
    head = metadata(Compression.ZSTD)
    made = encode_entry(head, b"x" * 1000)
    head.uncompressed_size = 1 << 31
    body = pack(">I", head.ByteSize()) + head.SerializeToString() + made[parse_header(made).payload_offset :]
    bomb = b"\x0e\x01" + pack(">I", crc32c(body)) + body
    with pytest.raises(CorruptEntry, match="limit"):
        parse_header(bomb)


@pytest.mark.parametrize("missing", ["producer_name", "sequence_id", "publish_time"])
def test_required_fields_are_required(missing: str) -> None:
    head = metadata()
    head.ClearField(missing)  # type: ignore[arg-type]
    encoded = head.SerializePartialToString()
    body = pack(">I", len(encoded)) + encoded + b"payload"
    with pytest.raises(CorruptEntry):
        parse_header(b"\x0e\x01" + pack(">I", crc32c(body)) + body)


def sealed(encoded: bytes, payload: bytes = b"") -> bytes:
    """The client-part of metadata that is encoded already, whatever it is."""
    body = pack(">I", len(encoded)) + encoded + payload
    return b"\x0e\x01" + pack(">I", crc32c(body)) + body


@pytest.mark.parametrize("name", ["producer_name", "uuid", "encryption_algo", "key", "meta"])
def test_names_that_are_not_utf8_are_refused(name: str) -> None:
    head = metadata()
    head.uuid, head.encryption_algo = "uuid", "encryption_algo"
    head.encryption_keys.add(key="key", value=b"v").metadata.add(key="meta", value="v")
    head.producer_name = "producer_name"
    encoded = head.SerializeToString().replace(name.encode(), b"\xff" * len(name), 1)
    assert encoded != head.SerializeToString()
    with pytest.raises(CorruptEntry, match="UTF-8"):
        parse_header(sealed(encoded))


def foreign(fields: MessageMetadata | SingleMessageMetadata, key: bytes, value: bytes) -> bytes:
    """The encoded metadata with these bytes as its key, as the name of a property and as the value of another."""
    mark = b"~" * len(key)
    fields.partition_key = mark.decode()
    fields.properties.add(key="}" * len(value), value="v")
    fields.properties.add(key="n", value="}" * len(value))
    marks = re.compile(mark + b"|" + b"}" * len(value))
    return marks.sub(lambda found: key if found.group() == mark else value, fields.SerializeToString())


FOREIGN = st.binary(min_size=1, max_size=12).filter(lambda each: not _is_text(each))


def _is_text(given: bytes) -> bool:
    try:
        given.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_foreign(fields: MessageMetadata | SingleMessageMetadata, key: bytes, value: bytes) -> None:
    assert fields.partition_key_b64_encoded
    assert b64decode(fields.partition_key, validate=True) == key
    text = value.decode("utf-8", "replace")
    assert decode_properties(fields) == {text: "v", "n": text}
    fields.SerializeToString().decode("latin-1")


BAD_PROPERTY = b"\x22\x05\x0a\x01\xff\x12\x00"
"""Of a MessageMetadata: a name that is no UTF-8, and an empty value."""


@pytest.mark.parametrize("where", ["entry", "item"])
def test_no_property_is_looked_at_before_it_is_asked_for(where: str) -> None:
    """A million of them, of six bytes each, would hold the event loop of broker and reader for seconds."""
    if where == "entry":
        fields = parse_header(sealed(metadata().SerializeToString() + BAD_PROPERTY * 3)).metadata
    else:
        encoded = SingleMessageMetadata(payload_size=1).SerializeToString() + b"\x0a" + BAD_PROPERTY[1:]
        [(fields, _)] = decode_batch(*batched(encoded))
    assert {type(pair.key) for pair in fields.properties} == {bytes}
    assert decode_properties(fields) == {"\ufffd": ""}


def batched(item: bytes) -> tuple[EntryHeader, bytes]:
    made = encode_batch(metadata(), [pack(">I", len(item)) + item, b"x"], 1)
    return parse_header(made), made


def test_an_entry_is_encrypted_for_so_many_keys_at_most() -> None:
    for count in (ENCRYPTION_KEYS_MAX, ENCRYPTION_KEYS_MAX + 1):
        head = metadata()
        for _ in range(count):
            head.encryption_keys.add(key="", value=b"")
        if count == ENCRYPTION_KEYS_MAX:
            parse_header(encode_client_part(head, b""))
        else:
            with pytest.raises(CorruptEntry, match=f"{count} keys; the limit is {ENCRYPTION_KEYS_MAX}"):
                parse_header(encode_client_part(head, b""))


@given(FOREIGN, FOREIGN)
def test_a_key_that_is_no_text_is_one_of_bytes_and_a_property_is_read_as_by_java(key: bytes, value: bytes) -> None:
    made = encode_broker_part(1, 5) + sealed(foreign(metadata(), key, value), b"payload")
    header = parse_header(made)
    [(fields, content)] = decode_batch(header, made)
    assert content == b"payload"
    check_foreign(fields, key, value)
    assert find_distinct_keys(parse_stored_head(made).metadata, parse_stored_head(made).payload_offset, made) == [key]


@given(KINDS, FOREIGN, FOREIGN, st.integers(0, 20))
def test_a_foreign_value_in_a_batch_costs_no_neighbour(
    kind: Compression, key: bytes, value: bytes, before: int
) -> None:
    """What is in a compressed batch no broker sees: it is for its readers."""
    encoded = foreign(SingleMessageMetadata(payload_size=1), key, value)
    other = SingleMessageMetadata(payload_size=2, partition_key="k")
    items = [encode_item_prefix(other), b"ab"] * before + [
        pack(">I", len(encoded)) + encoded,
        b"x",
        encode_item_prefix(other),
        b"cd",
    ]
    made = encode_batch(metadata(kind), items, before + 2)
    found = decode_batch(parse_header(made), made)
    assert [content for _, content in found] == [b"ab"] * before + [b"x", b"cd"]
    check_foreign(found[before][0], key, value)
    assert found[-1][0].partition_key == "k"
    head = parse_stored_head(made)
    assert set(find_distinct_keys(head.metadata, head.payload_offset, made)) == {key, b"k"}


def test_keys_of_other_bytes_stay_other_keys() -> None:
    first, second = (parse_header(sealed(foreign(metadata(), key, b"\xff"))).metadata for key in (b"\xff", b"\xfe"))
    assert first.partition_key != second.partition_key


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda made: made[:2] + b"nope" + made[6:], 7),  # the checksum
        (lambda made: made.replace(b"\x0a\x01p", b"\x0a\x01\xff"), 7),  # a producer name that is no text
        (lambda made: made[:10] + b"\xff" * 6 + made[16:], None),
        (lambda made: made[:9], None),
        (lambda made: b"", None),
    ],
)
def test_what_is_refused_is_named_by_its_sequence_id_where_it_has_one(
    damage: Callable[[bytes], bytes], found: int | None
) -> None:
    assert get_sequence_id(damage(encode_entry(metadata(), b"x"))) == found


def test_the_caches_stay_bounded() -> None:
    for size in range(entry.METADATA_CACHE_SIZE + 50):
        assert entry.PLAIN_PREFIXES[size]
    assert len(entry.PLAIN_PREFIXES) <= entry.METADATA_CACHE_SIZE
    for at in range(entry.METADATA_CACHE_SIZE + 50):
        single = SingleMessageMetadata(payload_size=0, partition_key=str(at))
        made = encode_batch(metadata(), [encode_item_prefix(single), b""], 1)
        decode_batch(parse_header(made), made)
    assert len(entry._HEADS) <= entry.METADATA_CACHE_SIZE


def test_heads_of_other_lengths_follow_each_other() -> None:
    """The second item is shorter than the head before it, and all of it is a head that is known."""
    plain, keyed = SingleMessageMetadata(payload_size=0), SingleMessageMetadata(payload_size=0, partition_key="k")
    for singles in ([plain], [keyed, plain], [plain, keyed, keyed, plain]):
        made = encode_batch(
            metadata(), [each for one in singles for each in (encode_item_prefix(one), b"")], len(singles)
        )
        assert [fields for fields, _ in decode_batch(parse_header(made), made)] == singles


ALIKE = [bytes([at]) * 10 for at in range(12)]


@pytest.mark.parametrize(
    ("payloads", "keys"),
    [
        (ALIKE, [""] * 12),
        ([b""] * 12, [""] * 12),
        (ALIKE[:7], [""] * 7),  # too few
        ([*ALIKE[:10], b"a" * 9, b"b" * 11], [""] * 12),  # as long together
        (ALIKE, ["a"] * 12),
        (ALIKE, [*"aaaaabaaaaaa"]),  # heads are as long, and not the same
        ([b"x", *ALIKE[1:]], [""] * 12),
    ],
)
def test_records_of_one_size_are_taken_apart_as_others_are(payloads: list[bytes], keys: list[str]) -> None:
    singles = [SingleMessageMetadata(payload_size=len(each)) for each in payloads]
    for single, key in zip(singles, keys, strict=True):
        if key:
            single.partition_key = key
    items = [
        part
        for single, payload in zip(singles, payloads, strict=True)
        for part in (encode_item_prefix(single), payload)
    ]
    made = encode_batch(metadata(), items, len(payloads))
    assert decode_batch(parse_header(made), made) == list(zip(singles, payloads, strict=True))
    fields, lazily = decode_message_columns_lazily(parse_header(made), made)
    assert fields == singles
    assert [lazily[at] for at in range(len(payloads))] == payloads


def test_the_keys_of_an_entry_are_those_of_its_messages_the_ordering_key_first() -> None:
    def single(**fields: str | bytes | bool) -> bytes:
        return encode_item_prefix(SingleMessageMetadata(payload_size=1, **fields))  # type: ignore[arg-type]

    items = [
        single(partition_key="b"), b"1", single(partition_key="a", ordering_key=b"o"), b"2", single(), b"3",
        single(partition_key="b"), b"4", single(partition_key="aGk=", partition_key_b64_encoded=True), b"5",
    ]  # fmt: skip
    for compression in (0, Compression.ZSTD):
        made = encode_batch(metadata(compression), items, 5)
        for stored in (made, encode_broker_part(7, 9) + made):
            head = parse_stored_head(stored)
            assert find_distinct_keys(head.metadata, head.payload_offset, stored) == [b"b", b"o", b"hi"]
    alone = encode_entry(MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, ordering_key=b"o"), b"x")
    head = parse_stored_head(alone)
    assert find_distinct_keys(head.metadata, head.payload_offset, alone) == [b"o"]
    plain = encode_entry(MessageMetadata(producer_name="p", sequence_id=1, publish_time=1), b"x")
    assert find_distinct_keys(parse_stored_head(plain).metadata, 0, plain) == []
    chunk = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, uuid="u", num_chunks_from_msg=2)
    assert find_distinct_keys(chunk, 0, plain) == [b"u"]


@given(st.binary(max_size=200))
def test_the_head_of_a_stored_entry_parses_or_is_corrupt(garbage: bytes) -> None:
    for stored in (garbage, b"\x0e\x01" + garbage, b"\x0e\x02" + garbage):
        with contextlib.suppress(CorruptEntry):
            parse_stored_head(stored)


def test_the_head_of_a_stored_entry_says_what_its_header_does() -> None:
    stored = encode_broker_part(41, 1001) + batch([b"hi", b"you"])
    head = parse_stored_head(stored)
    assert (head.last_index, head.timestamp_ms, head.payload_offset) == (41, 1001, parse_header(stored).payload_offset)
    assert head.metadata == parse_header(stored).metadata


def test_an_entry_that_ends_inside_its_broker_part_has_no_client_part() -> None:
    """At each byte at which it may be cut: a typed error, as of all that parse it."""
    client_part = batch([b"hi"])
    whole = encode_broker_part(1, 1001) + client_part
    head = len(whole) - len(client_part)
    for size in range(2, head):
        with pytest.raises(CorruptEntry, match="ends inside its broker-part"):
            strip_broker_part(whole[:size])
    assert bytes(strip_broker_part(whole[:head])) == b""
    assert bytes(strip_broker_part(whole)) == client_part
    assert bytes(strip_broker_part(client_part)) == client_part
