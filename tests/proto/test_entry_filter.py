"""The messages of an entry by a filter: the same verdicts as of each message alone, whatever form the entry has."""

import struct
from collections.abc import Sequence

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from magnetar.proto import entry_filter as under_test
from magnetar.proto.entry import (
    decode_batch,
    decode_text,
    encode_batch,
    encode_entry,
    encode_item_prefix,
    parse_header,
)
from magnetar.proto.entry import parse_stored_head as parse
from magnetar.proto.entry_filter import (
    EntryFilter,
    encode_names,
    find_filter,
    make_tags_filter,
    passes_filter,
)
from magnetar.proto.entry_pb2 import EncryptionKeys, KeyValue, MessageMetadata, SingleMessageMetadata
from magnetar.proto.errors import InvalidRequest
from magnetar.proto.filters import parse_filter
from magnetar.proto.summary import SummaryBuilder

WANTED = parse_filter("region = 'eu' AND price > 10")


def single(properties: dict[str, str], payload: bytes = b"x", **fields: object) -> bytes:
    pairs = [KeyValue(key=key, value=value) for key, value in properties.items()]
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=5, **fields)  # type: ignore[arg-type]
    metadata.properties.extend(pairs)
    return encode_entry(metadata, payload)


def batch(several: Sequence[dict[str, str]], payloads: Sequence[bytes] = (), **fields: object) -> bytes:
    items = []
    for number, properties in enumerate(several):
        payload = payloads[number] if payloads else b"x"
        about = SingleMessageMetadata(payload_size=len(payload), null_value=not payload)
        about.properties.extend(KeyValue(key=key, value=value) for key, value in properties.items())
        items.append(encode_item_prefix(about) + payload)
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=5, **fields)  # type: ignore[arg-type]
    return encode_batch(metadata, items, len(several))


def unwanted(judge: EntryFilter, entry: bytes) -> int:
    return judge.find_unwanted_bits(parse(entry), entry)


def test_a_message_alone_and_each_message_of_a_batch_are_judged_by_their_properties() -> None:
    judge = EntryFilter(WANTED)
    good, bad, poor = {"region": "eu", "price": "11"}, {"region": "us", "price": "11"}, {"region": "eu", "price": "10"}
    assert [unwanted(judge, single(each)) for each in (good, bad, poor, {})] == [0, 1, 1, 1]
    for _ in range(2):  # from the verdicts that are kept, too
        assert unwanted(judge, batch([good, bad, good, poor, {}])) == 0b11010
    for kind in (1, 2, 3, 4):
        assert unwanted(judge, batch([bad, good, bad], compression=kind)) == 0b101


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(["region", "price", "x"]), st.sampled_from(["eu", "us", "9", "12", ""])),
             min_size=1, max_size=30),
    st.sampled_from(["region = 'eu'", "price > 10", "region <> 'eu' OR price IN (9, 12)", "x IS NULL",
                     "message.size > 1", "message.publish_time = 5", "message.producer = 'p' AND region LIKE 'e%'",
                     "NOT (region = 'eu' AND x IS NOT NULL)", "message.key IS NULL"]),
)  # fmt: skip
def test_the_verdicts_of_a_batch_are_those_of_its_messages(several: list[dict[str, str]], text: str) -> None:
    wanted = parse_filter(text)
    judge, entry = EntryFilter(wanted), batch(several, [b"x" * (1 + at % 3) for at in range(len(several))])
    header = parse_header(entry)
    messages = decode_batch(header, entry)
    each = [passes_filter(wanted, about, len(payload), header.metadata) for about, payload in messages]
    expected = sum(1 << at for at, found in enumerate(each) if not found)
    assert unwanted(judge, entry) == expected == unwanted(judge, entry)


def field(tag: int, value: bytes, *, long: bool = False) -> bytes:
    """A field of bytes. `long`: its size takes a byte more than it needs."""
    size = len(value)
    digits = bytes((size,)) if size < 128 and not long else bytes((size & 127 | 128, size >> 7))
    return bytes((tag,)) + digits + value


_texts = st.one_of(st.sampled_from([b"a", b"b", b"\xc3\xa9", b"\xff", b"", b"\x0a\x01a\x12\x01b"]),
                   st.integers(0, 300).map(lambda size: b"v" * size))  # fmt: skip
_pairs = st.builds(
    lambda key, value, long, swapped, more: field(
        10, (field(18, value) + field(10, key) if swapped else field(10, key, long=long) + field(18, value)) + more,
        long=long,
    ),
    st.one_of(st.sampled_from([b"a", b"b"]), _texts), _texts, *[st.sampled_from([False, False, False, True])] * 2,
    st.sampled_from([b"", b"", b"\x18\x05"]),
)  # fmt: skip
_parts = st.one_of(_pairs, _pairs, st.sampled_from([b"\x18\x0a", b"\x28\x0a", field(18, b"k")]), st.binary(max_size=3))


@settings(deadline=None)
@example(field(10, field(10, b"a") + field(18, b"1")) + field(10, field(10, b"a") + field(18, b"2")) + b"\x18\x01")
@given(st.lists(_parts, max_size=5).map(b"".join))
def test_properties_that_are_read_without_protobuf_are_those_that_it_reads(head: bytes) -> None:
    found: dict[str, str] = {}
    names = encode_names(["a", "b", "é", "v" * 130, "\udcff"])
    rest = head[under_test.read_leading_properties(head, 0, names, found) :]
    try:
        whole = SingleMessageMetadata.FromString(head)
    except DecodeError:
        with pytest.raises(DecodeError):
            SingleMessageMetadata.FromString(rest)
        return
    for each in SingleMessageMetadata.FromString(rest).properties:
        found[decode_text(each.key)] = decode_text(each.value)
    expected = {decode_text(each.key): decode_text(each.value) for each in whole.properties}
    assert {name: expected.get(name) for name in names.values()} == {name: found.get(name) for name in names.values()}


def test_verdicts_that_depend_on_the_entry_are_not_kept_for_the_next_one() -> None:
    judge = EntryFilter(parse_filter("message.producer = 'p'"))
    items = [encode_item_prefix(SingleMessageMetadata(payload_size=1)) + b"x"] * 2
    mine, other = (
        encode_batch(MessageMetadata(producer_name=name, sequence_id=1, publish_time=5), items, 2) for name in "pq"
    )
    assert [unwanted(judge, each) for each in (mine, other, mine, other)] == [0, 0b11, 0, 0b11]


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_batch_whose_summary_says_that_nothing_is_wanted_is_not_looked_into(encrypted: bool) -> None:
    builder = SummaryBuilder(("region",))
    builder.add_message({"region": "us"})
    more = {"encryption_keys": [EncryptionKeys(key="k", value=b"v")]} if encrypted else {}
    entry = batch([{"region": "eu"}] * 3, summary=builder.encode(), **more)  # so it is seen what was asked
    for text, expected in (("region = 'eu'", 0b111), ("region = 'eu' OR x = 'y'", 0), ("region IN ('us', 'eu')", 0)):
        assert unwanted(EntryFilter(parse_filter(text)), entry) == expected
    assert unwanted(EntryFilter(parse_filter("region = 'eu'"), keeps_tombstones=True), entry) == 0
    damaged = batch([{"region": "eu"}] * 3, summary=b"\x01\x01\x02\x06region", **more)
    assert unwanted(EntryFilter(parse_filter("region = 'eu'")), damaged) == 0


def test_what_a_broker_cannot_read_is_wanted() -> None:
    judge, secret = EntryFilter(WANTED), [EncryptionKeys(key="k", value=b"v")]
    assert unwanted(judge, batch([{}, {}], encryption_keys=secret, encryption_param=b"p")) == 0
    assert unwanted(judge, single({}, encryption_keys=secret, encryption_param=b"p")) == 1, "its properties are clear"
    entry = batch([{}, {}, {}])
    for cut in range(parse(entry).payload_offset, len(entry)):
        assert unwanted(judge, entry[:cut]) == 0
    assert unwanted(judge, batch([{}] * 3, compression=3, uncompressed_size=9)[:-1] + b"!") == 0
    lying = MessageMetadata(producer_name="p", sequence_id=1, publish_time=5, num_messages_in_batch=(1 << 31) - 1)
    assert unwanted(judge, encode_entry(lying, b"x" * 100)) == 0, "not as many steps as it declares"


def test_a_message_in_chunks_has_the_verdict_of_its_first_chunk() -> None:
    judge = EntryFilter(parse_filter("a = '1' AND message.size = 30"))

    def chunk(number: int, value: str, uuid: str = "u") -> bytes:
        return single({"a": value}, b"x" * 10, uuid=uuid, chunk_id=number, num_chunks_from_msg=3,
                      total_chunk_msg_size=30)  # fmt: skip

    assert [unwanted(judge, chunk(at, value)) for at, value in enumerate("122")] == [0, 0, 0]
    assert [unwanted(judge, chunk(at, value)) for at, value in enumerate("211")] == [1, 1, 1]
    assert [unwanted(judge, chunk(at, "1", "v")) for at in (1, 2)] == [0, 0], "its first chunk was not seen"
    for number in range(5000):
        unwanted(judge, chunk(0, "1", f"u{number}"))
    assert len(judge._chunks) == 1000


def test_who_reads_the_compacted_form_gets_each_tombstone() -> None:
    entry = batch([{}, {"region": "eu", "price": "11"}, {}], [b"", b"x", b"x"])
    assert unwanted(EntryFilter(WANTED), entry) == 0b101
    assert unwanted(EntryFilter(WANTED, keeps_tombstones=True), entry) == 0b100
    assert unwanted(EntryFilter(WANTED, keeps_tombstones=True), single({}, b"")) == 0
    assert unwanted(EntryFilter(WANTED, keeps_tombstones=True), single({}, b"x", null_value=True)) == 0


def test_a_batch_of_very_many_messages_is_judged_in_linear_time() -> None:
    judge = EntryFilter(parse_filter(" OR ".join(f"p{at % 16} LIKE '%a%b%c%'" for at in range(40))))
    assert unwanted(judge, batch([{"p0": "ab" * 2000 + str(at)} for at in range(200)])).bit_count() == 200
    wide = encode_batch(MessageMetadata(producer_name="p", sequence_id=1, publish_time=5),
                        [struct.pack(">I", 2) + b"\x18\x00"] * 200_000, 200_000)  # fmt: skip
    assert unwanted(judge, wide).bit_count() == 200_000


def test_the_properties_of_a_subscription_say_its_filter() -> None:
    assert find_filter({}) is None
    assert find_filter({"filter": "  "}) is None
    assert str(find_filter({"filter": " a = 1 "})) == "Filter('a = 1')"
    tags = find_filter({"filter.tags": "A || it's"})
    assert tags is not None
    assert tags.text == make_tags_filter("A||it's") == "tag IN ('A', 'it''s')"
    assert tags.matches({"tag": "it's"}, lambda name: None)
    jms = {"jms.selector": "a = 1", "jms.filtering": "true"}
    assert str(find_filter(jms)) == "Filter('a = 1')"
    assert find_filter({**jms, "jms.filtering": "false"}) is None
    assert find_filter({**jms, "jms.selector": "a + 1 = 2"}) is None, "that client filters itself"
    for wrong in ({"filter": "a ="}, {"filter": "a = 1", "filter.tags": "A"}, {"filter.tags": "A || || B"}):
        with pytest.raises(InvalidRequest):
            find_filter(wrong)
