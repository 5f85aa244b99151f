"""Which messages survive compaction, against a dictionary; and what is left of their entries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from pyroaring import BitMap

from magnetar.broker.log.compaction_core import (
    DamagedCompactedLedger,
    SurvivingEntriesRow,
    SurvivingMessageSearch,
    compact_entry,
    decode_survivor,
    decode_survivor_table_piece,
    decode_survivor_table_rows,
    encode_survivor,
    encode_survivor_table,
    last_surviving_batch_index,
    parse_entry,
)
from magnetar.proto.entry import (
    decode_message_columns,
    encode_batch,
    encode_broker_part,
    encode_client_part,
    encode_entry,
    encode_item_prefix,
    parse_header,
    split_broker_part,
)
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.proto.names import Position


class M(NamedTuple):
    """A message: `key` None: it has none; `value` None: a null value."""

    key: str | None
    value: bytes | None


class Log:
    """A topic's entries in memory, each (first index, count, bytes)."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, bytes]] = []
        self.next = 0

    def _add(self, count: int, part: bytes) -> None:
        self.entries.append((self.next, count, encode_broker_part(self.next + count - 1, 1000) + part))
        self.next += count

    def batch(self, messages: Sequence[M], compression: int = 0) -> None:
        metadata = MessageMetadata(producer_name="p", sequence_id=self.next, publish_time=1, compression=compression)
        parts: list[bytes] = []
        for message in messages:
            of = SingleMessageMetadata(payload_size=len(message.value or b""))
            if message.key is not None:
                of.partition_key = message.key
            if message.value is None:
                of.null_value = True
            parts += (encode_item_prefix(of), message.value or b"")
        self._add(len(messages), encode_batch(metadata, parts, len(messages)))

    def single(self, message: M, **fields: object) -> None:
        metadata = MessageMetadata(producer_name="p", sequence_id=self.next, publish_time=1, **fields)
        if message.key is not None:
            metadata.partition_key = message.key
        if message.value is None:
            metadata.null_value = True
        self._add(1, encode_entry(metadata, message.value or b""))

    def raw(self, part: bytes, count: int = 1) -> None:
        self._add(count, part)

    def compacted(self, keys_max: int = 1000, **options: object) -> Log:
        survey = SurvivingMessageSearch(keys_max, salt=b"test", **options)  # type: ignore[arg-type]
        while not survey.is_done:
            for first, count, entry in self.entries:
                survey.add_entry(first, count, parse_entry(entry))
            survey.finish_reading_round()
        after = Log()
        after.next = self.next
        for first, count, entry in self.entries:
            kept = compact_entry(entry, first, count, survey.survivors)
            if kept is not None:
                after.entries.append((first, count, kept))
        after.rounds = survey.rounds  # type: ignore[attr-defined]
        return after

    def shown(self) -> list[tuple[int, str | None, bytes]]:
        """What a client shows: (index, key, payload)."""
        found: list[tuple[int, str | None, bytes]] = []
        for first, _, entry in self.entries:
            part = split_broker_part(entry)[2]
            header = parse_header(part)
            for at, (of, payload) in enumerate(zip(*decode_message_columns(header, part), strict=True)):
                if not (isinstance(of, SingleMessageMetadata) and of.compacted_out):
                    found.append((first + at, of.partition_key if of.HasField("partition_key") else None, payload))
        return found


def expected(messages: Sequence[M], retain_null_key: bool = False) -> list[tuple[int, str | None, bytes]]:
    latest: dict[str, int] = {}
    for index, (key, value) in enumerate(messages):
        if key is not None:
            latest.pop(key, None)
            if value:
                latest[key] = index
    kept = set(latest.values())
    kept |= {index for index, (key, _) in enumerate(messages) if key is None and retain_null_key}
    return [(index, messages[index].key, messages[index].value or b"") for index in sorted(kept)]


@pytest.mark.parametrize("seed", range(30))
def test_of_each_key_the_latest_message_survives_also_inside_batches(seed: int) -> None:
    rng = random.Random(seed)
    log, messages = Log(), list[M]()
    for _ in range(rng.randint(1, 60)):
        some = [
            M(rng.choice([None, *"abcdefghij"]), rng.choice([b"v%d" % rng.randint(0, 99), b"x" * 50, b"", None]))
            for _ in range(rng.randint(1, 6))
        ]
        if len(some) == 1 and rng.random() < 0.7:
            log.single(some[0])
        else:
            log.batch(some, rng.choice([0, 1, 3]))
        messages += some
    retain = rng.random() < 0.5
    after = log.compacted(keys_max=rng.choice([1, 3, 1000]), retain_null_key=retain)
    assert after.shown() == expected(messages, retain)
    assert after.compacted(retain_null_key=retain).shown() == after.shown(), "compacting again changes nothing"
    assert sum(len(entry) for *_, entry in after.entries) <= sum(len(entry) for *_, entry in log.entries)


def test_with_too_many_keys_it_reads_more_often_and_keeps_the_same() -> None:
    log = Log()
    messages = [M(f"key-{number % 500}", b"%d" % number) for number in range(1000)]
    for at in range(0, 1000, 10):
        log.batch(messages[at : at + 10])
    few = log.compacted(keys_max=100)
    assert few.shown() == expected(messages) == log.compacted().shown()
    assert few.rounds >= 5  # type: ignore[attr-defined]
    assert log.compacted().rounds == 1


def test_complaint_49_compaction_loses_no_message_and_keeps_no_tombstone_of_any_client() -> None:
    """A null value, an empty payload, batched or alone: each deletes its key; nothing else is lost with it."""
    log = Log()
    for number, tombstone in enumerate((None, b"")):
        log.single(M(f"s{number}", b"old"))
        log.batch([M(f"b{number}", b"old"), M(f"kept{number}", b"stays")])
        log.single(M(f"s{number}", tombstone))
        log.batch([M(f"b{number}", tombstone), M(f"other{number}", b"stays")])
    after = log.compacted()
    assert [key for _, key, _ in after.shown()] == ["kept0", "other0", "kept1", "other1"]
    log.single(M("s0", b"again"))
    assert ("s0", b"again") in [(key, value) for _, key, value in log.compacted().shown()]


@pytest.mark.parametrize("compression", [0, 1, 2])
def test_chunks_of_a_message_stay_or_go_together(compression: int) -> None:
    """Also those of a payload that was compressed before it was cut."""
    log = Log()

    def chunked(uuid: str, chunks: Sequence[int], key: str = "k") -> None:
        for number in chunks:
            metadata = MessageMetadata(
                producer_name="p", sequence_id=log.next, publish_time=1, partition_key=key, uuid=uuid,
                num_chunks_from_msg=3, total_chunk_msg_size=12, chunk_id=number, compression=compression,
                uncompressed_size=500,
            )  # fmt: skip
            log.raw(encode_client_part(metadata, b"part"))

    chunked("one", range(3))
    assert len(log.compacted().entries) == 3
    chunked("two", range(2))
    assert len(log.compacted().entries) == 5, "the last chunk of it may still come"
    chunked("two", [2])
    assert [index for index, *_ in log.compacted().entries] == [3, 4, 5]
    log.single(M("k", b"small"))
    assert [index for index, *_ in log.compacted(keys_max=1).entries] == [6]


def test_a_message_whose_chunks_lie_around_the_end_of_a_rounds_memory_is_decided_once() -> None:
    """Its first chunk is seen before the round gives its key up to a later one, the others after it."""
    log = Log()

    def chunk(number: int) -> None:
        for key in range(8):
            of_chunk = {"uuid": f"u{key}", "num_chunks_from_msg": 2, "total_chunk_msg_size": 8, "chunk_id": number}
            log.single(M(f"large-{key}", b"part"), **of_chunk)

    chunk(0)
    for number in range(100):
        log.single(M(f"small-{number}", b"stays"))
    chunk(1)
    kept = log.compacted().shown()
    assert log.compacted(keys_max=10).shown() == kept
    assert len(kept) == 116
    for key in range(8):
        log.single(M(f"large-{key}", b"" if key % 2 else b"small"))
    after = log.compacted(keys_max=10).shown()
    assert after == log.compacted().shown()
    assert len(after) == 104, "neither a chunk of what is overwritten nor of what is deleted is left"


def test_what_nobody_can_look_inside_stays_as_it_is() -> None:
    log = Log()
    log.single(M("k", b"1"))
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=2)
    log.raw(encode_entry(metadata, b"not two items"), count=2)
    encrypted = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=2)
    encrypted.encryption_keys.add(key="k", value=b"v")
    log.raw(encode_entry(encrypted, b"nobody knows this"), count=2)
    log.single(M("k", b"2"))
    after = log.compacted()
    assert [first for first, *_ in after.entries] == [1, 3, 5]
    assert after.entries[0] == log.entries[1]
    assert after.entries[1] == log.entries[2]


def test_batch_indexes_stay_and_the_last_message_that_is_shown_is_known() -> None:
    log = Log()
    log.batch([M("a", b"1"), M("b", b"2"), M("c", b"3")])
    log.batch([M("c", b"4"), M("c", b"5")])
    after = log.compacted()
    assert after.shown() == [(0, "a", b"1"), (1, "b", b"2"), (4, "c", b"5")]
    assert [last_surviving_batch_index(entry) for *_, entry in after.entries] == [1, 1]
    assert parse_header(after.entries[0][2]).num_messages == 3


# ------------------------------------------------------------------------------------------ bytes
def test_survivors_and_tables_come_back_and_damage_is_noticed() -> None:
    survivor = encode_survivor(Position(5, 7), b"hi")
    assert survivor.hex() == "4d4301017847c27a" + "0000000000000005" + "0000000000000007" + "6869"
    assert decode_survivor(survivor) == (Position(5, 7), b"hi")
    rows = [SurvivingEntriesRow(5, 10, 0, 20, 0, BitMap([1, 7])), SurvivingEntriesRow(9, 3, 20, 23, 2, BitMap([0]))]
    (table,) = encode_survivor_table(rows)
    assert decode_survivor_table_piece(table)[:2] == (0, 1)
    assert decode_survivor_table_rows(decode_survivor_table_piece(table)[2]) == rows
    assert decode_survivor_table_rows(decode_survivor_table_piece(encode_survivor_table([])[0])[2]) == []
    for data, decode in ((survivor, decode_survivor), (table, decode_survivor_table_piece)):
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1
            with pytest.raises(DamagedCompactedLedger):
                decode(bytes(damaged))
        with pytest.raises(DamagedCompactedLedger):
            decode(data[:6])
