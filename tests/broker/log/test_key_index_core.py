"""The index of a ledger: it never hides a message that a search could find, and it reads little."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from magnetar.broker.log import key_index_core as under_test
from magnetar.broker.log.key_index_core import (
    HIDDEN_BLOCK,
    OPAQUE_BLOCK,
    DamagedKeyIndex,
    KeyIndex,
    KeyIndexBuilder,
    decode_directory,
    decode_page,
    describe_entry,
    find_block_of_index,
)
from magnetar.broker.session.finding import SearchCriteria
from magnetar.client.core.batcher import Batcher, OutgoingMessage, encode_batch_entry
from magnetar.proto.entry import EntryEncoding, decode_for_inspection, encode_broker_part, parse_entry
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import CorruptEntry, NewerFormat
from magnetar.proto.filters import Filter, FilterNode, parse_filter
from magnetar.proto.names import REDRIVEN_TO
from tests.proto.test_summary import expressions

LEDGER = 7


def encode(
    messages: Sequence[OutgoingMessage], last_index: int, *, batching: bool = True, encrypted: bool = False
) -> bytes:
    batcher = Batcher(0, batching=batching)
    for message in messages:
        batcher.add_message(message, None)
    batcher.close_batches()
    (batch,) = batcher.ready

    def encrypt(metadata: MessageMetadata, payload: bytes) -> bytes:
        metadata.encryption_param = b"nonce"
        return bytes(each ^ 1 for each in payload)

    part = encode_batch_entry(batch, "p", 1000 + last_index, EntryEncoding(encrypt=encrypt if encrypted else None))
    return encode_broker_part(last_index, 2000 + last_index) + part


class Built:
    """An index that was built of entries, and its stored entries."""

    def __init__(self, entries: Sequence[bytes], *, with_properties: bool = True, size: int = 0) -> None:
        builder = KeyIndexBuilder(LEDGER, 0, size or sum(map(len, entries)), with_properties=with_properties)
        self.stored: list[bytes] = []
        for number, entry in enumerate(entries):
            builder.add(number, len(entry), describe_entry(entry, with_properties=with_properties))
            if builder.is_segment_full:
                self.stored += builder.take_segment()
        self.stored += builder.finish()
        self.index: KeyIndex = decode_directory(self.stored[-1], LEDGER)
        self.read: set[int] = set()

    def find(self, expression: FilterNode, *, hidden: bool = False) -> BitMap:
        postings: dict[int, BitMap] = {}
        for value in self.index.list_hashes(expression):
            pages = self.index.list_pages_of_hash(value)
            self.read.update(pages)
            postings[value] = BitMap.union(BitMap(), *(decode_page(self.stored[at], [value])[value] for at in pages))
        return self.index.find_candidates(expression, postings, hidden=hidden)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry is a block, and every few blocks are a segment of several pages."""
    monkeypatch.setattr(under_test, "BLOCK_BYTES_MIN", 1)
    monkeypatch.setattr(under_test, "POSTINGS_PER_SEGMENT_MAX", 5)
    monkeypatch.setattr(under_test, "POSTINGS_PER_PAGE", 1)


_texts = st.sampled_from(["", "x", "y", "1", "true", "\0", "é"])
_properties = st.dictionaries(st.sampled_from(["a", "b", "é", "c"]), _texts, max_size=3)
_messages = st.builds(
    lambda properties, key, event: OutgoingMessage(b"pay", properties, key, event_time=event),
    _properties, st.none() | st.sampled_from(["k", "x", ""]), st.sampled_from([0, 0, 3, 5]),
)  # fmt: skip
_entries = st.lists(
    st.tuples(st.lists(_messages, min_size=1, max_size=3), st.sampled_from(["batch", "alone", "encrypted", "broken"])),
    min_size=1, max_size=5,
)  # fmt: skip
_criteria = st.builds(
    SearchCriteria, st.sampled_from(["", "k", "x"]), st.sampled_from(["", "a", "b", "é"]), st.none() | _texts,
    st.sampled_from([b"", b"pay"]), st.none() | expressions.map(lambda root: Filter("", root, frozenset())),
)  # fmt: skip


def lay(entries: Sequence[tuple[list[OutgoingMessage], str]]) -> list[bytes]:
    stored, end = list[bytes](), 0
    for messages, kind in entries:
        some = messages[:1] if kind == "alone" else messages
        end += len(some)
        entry = encode(some, end - 1, batching=kind != "alone", encrypted=kind == "encrypted")
        stored.append(entry[:-1] + b"!" if kind == "broken" else entry)
    return stored


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mask", [0xFFFFFFFF, 3], ids=["hashes", "collisions"])
@pytest.mark.parametrize("with_properties", [True, False])
def test_a_block_without_a_candidate_has_no_message_that_a_search_finds(
    mask: int, with_properties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weaken(strong: Callable[..., int]) -> Callable[..., int]:
        return lambda *args: strong(*args) & mask

    for module, name in ((under_test, "hash_property"), (under_test, "hash_key"), (under_test, "hash_name")):
        monkeypatch.setattr(module, name, weaken(getattr(module, name)))

    @given(_entries, _criteria)
    def check(entries: list[tuple[list[OutgoingMessage], str]], criteria: SearchCriteria) -> None:
        expression = criteria.make_expression()
        if expression is None:
            return
        stored = lay(entries)
        found = Built(stored, with_properties=with_properties).find(expression)
        for number, entry in enumerate(stored):
            try:
                _, header = parse_entry(entry)
                fits = any(
                    criteria.matches_message(about, payload, header)
                    for about, payload in decode_for_inspection(header, entry)
                )
            except CorruptEntry:
                fits = True  # it may have had one
            assert number in found or not fits

    check()


@pytest.mark.usefixtures("small")
def test_what_an_index_finds() -> None:
    stored = [
        encode([OutgoingMessage(b"", {"a": f"v{each}"}, f"k{each % 10}", event_time=100 + each)], each)
        for each in range(50)
    ]
    built = Built(stored)
    for where, wanted in (
        ("message.key = 'k3'", {3, 13, 23, 33, 43}), ("a = 'v7'", {7}), ("a IN ('v7', 'v8', 'none')", {7, 8}),
        ("message.key = 'k3' AND a = 'v13'", {13}), ("message.key = 'k3' OR a = 'v0'", {0, 3, 13, 23, 33, 43}),
        ("message.key = 'none'", set()), ("b = 'v7'", set()), ("b > 3", set()), ("a > 3", set(range(50))),
        ("a IS NULL", set(range(50))), ("b IS NOT NULL", set()), ("a <> 'v7'", set(range(50))),
        ("message.event_time >= 148", {48, 49}), ("message.event_time BETWEEN 103 AND 104", {3, 4}),
        ("NOT message.event_time < 149", {49}), ("message.publish_time = 1007", {7}),
        ("message.size = 3", set(range(50))), ("a = 'v7' AND message.event_time > 120", set()),
    ):  # fmt: skip
        assert set(built.find(parse_filter(where).root)) == wanted, where
    assert [built.index.blocks[at].first_index for at in (0, 49)] == [0, 49]
    assert [find_block_of_index(built.index.blocks, at) for at in (0, 7, 49, 60)] == [0, 7, 49, 49]
    keys_alone = Built(stored, with_properties=False)
    assert set(keys_alone.find(parse_filter("a = 'v7'").root)) == set(range(50))
    assert set(keys_alone.find(parse_filter("message.key = 'k7' AND a = 'v7'").root)) == {7, 17, 27, 37, 47}


@pytest.mark.usefixtures("small")
def test_what_only_a_consumer_can_decrypt_is_hidden_and_what_does_not_parse_is_always_a_candidate() -> None:
    message = OutgoingMessage(b"", {"a": "x"}, "k")
    entries = lay([([message, message], kind) for kind in ("batch", "encrypted", "broken")])
    built = Built(entries)
    assert [each.flags for each in built.index.blocks] == [0, HIDDEN_BLOCK, OPAQUE_BLOCK]
    assert [(each.first_index, each.end_index) for each in built.index.blocks] == [(0, 2), (2, 4), (4, 4)]
    assert set(built.find(parse_filter("a = 'x'").root)) == {0, 2}
    assert set(built.find(parse_filter("a = 'x'").root, hidden=True)) == {0, 1, 2}
    assert set(built.find(parse_filter("message.key = 'k'").root)) == {0, 1, 2}, "the head of a batch has its first key"


def test_a_look_up_reads_one_page_of_each_segment_and_blocks_have_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "POSTINGS_PER_SEGMENT_MAX", 60_000)
    rng = random.Random(3)
    entries = [
        encode([OutgoingMessage(rng.randbytes(200), {}, f"k{each * 500 + at}") for at in range(500)], each * 500 + 499)
        for each in range(250)
    ]
    built = Built(entries)
    sizes = [each.bytes for each in built.index.blocks]
    assert all(under_test.BLOCK_BYTES_MIN <= each < under_test.BLOCK_BYTES_MIN + len(entries[0]) for each in sizes[:-1])
    assert sum(sizes) == sum(map(len, entries))
    in_vain = 0
    for number in range(0, 125_000, 397):
        built.read.clear()
        found = built.find(parse_filter(f"message.key = 'k{number}'").root)
        assert find_block_of_index(built.index.blocks, number) in found
        in_vain += len(found) - 1
        assert len(built.read) == len(built.index._segments) == 3
        assert sum(len(built.stored[at]) for at in built.read) < 3 * 2 * 6 * under_test.POSTINGS_PER_PAGE
    assert in_vain < 5
    assert sum(map(len, built.stored)) < 125_000 * 6.5


def test_a_block_of_too_many_values_is_always_a_candidate_and_a_large_ledger_has_larger_blocks(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "BLOCK_HASHES_MAX", 10)
    entries = [encode([OutgoingMessage(b"", {}, f"k{at}") for at in range(20)], 19)]
    assert set(Built(entries).find(parse_filter("message.key = 'none'").root)) == {0}
    entries = [encode([OutgoingMessage(bytes(1 << 20), {}, "k")], each) for each in range(4)]
    assert len(Built(entries).index.blocks) == 4
    assert len(Built(entries, size=2 * under_test.BLOCKS_MAX << 20).index.blocks) == 2


@pytest.mark.usefixtures("small")
def test_damage_another_ledger_and_a_later_version_are_noticed() -> None:
    built = Built(lay([([OutgoingMessage(b"", {"a": "x"}, "k")], "batch")]))
    for at, entry in enumerate(built.stored):
        for place in range(len(entry)):
            damaged = bytearray(entry)
            damaged[place] ^= 0x10
            is_directory = at == len(built.stored) - 1
            with pytest.raises((DamagedKeyIndex, NewerFormat)):
                decode_directory(bytes(damaged), LEDGER) if is_directory else decode_page(bytes(damaged), [1])
        with pytest.raises(DamagedKeyIndex):
            decode_page(entry[:5], [1])
    with pytest.raises(DamagedKeyIndex, match="not of 8"):
        decode_directory(built.stored[-1], LEDGER + 1)
    with pytest.raises(NewerFormat, match="key index"):
        decode_directory(bytes((*built.stored[-1][:2], 99, *built.stored[-1][3:])), LEDGER)


@pytest.mark.usefixtures("small")
def test_a_message_that_went_back_for_one_subscription_is_read_by_it_whatever_its_filter_says() -> None:
    gone_back = OutgoingMessage(b"", {"a": "x", REDRIVEN_TO: "t/s"}, "k")
    others = OutgoingMessage(b"", {"a": "x"}, "k")
    built = Built([encode([each], index, batching=False) for index, each in enumerate((others, gone_back))])
    assert [each.flags for each in built.index.blocks] == [0, HIDDEN_BLOCK]
    assert set(built.find(parse_filter("a = 'y'").root)) == set()
    assert set(built.find(parse_filter("a = 'y'").root, hidden=True)) == {1}
