"""Frames alone: cut anywhere, of every wrong length, and numbers that are signed elsewhere."""

import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.pulsar import translate
from magnetar.broker.pulsar.frames import (
    SHARED_BUFFER_BYTES,
    SPARE_BUFFER_BYTES_MAX,
    PulsarFrameSplitter,
    SharedReceiveBuffer,
    encode_frame,
    encode_message_head,
    encode_receipt,
    parse_frame,
    parse_sent_entry,
)
from magnetar.broker.pulsar.lookup import hash_topic_names
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import encode_client_part, parse_header
from magnetar.proto.entry_pb2 import KeyValue, MessageIdData, MessageMetadata
from magnetar.proto.errors import CorruptEntry, InvalidRequest
from magnetar.proto.names import Position
from magnetar.proto.states import AckedEntry
from tests.support.steps import slowness


def fed(frames: PulsarFrameSplitter, data: bytes) -> Iterator[bytes]:
    """The frames that the bytes complete, which come as a stream gives them."""
    while data:
        room = frames.get_free_buffer()
        size = min(len(room), len(data))
        room[:size], data = data[:size], data[size:]
        for each in frames.receive_frames(size):
            yield bytes(each)


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack(">II", 4 + len(each), len(each)) + each for each in bodies)
    frames, found, at = PulsarFrameSplitter(1000), [], 0
    while at < len(stream):
        cut = cuts[len(found) % len(cuts)]
        found += [each[4:] for each in fed(frames, stream[at : at + cut])]
        at += cut
    assert found == bodies


@pytest.mark.parametrize("size", [0, 1, 3, 1001, 1 << 31, (1 << 32) - 1])
def test_a_frame_of_a_wrong_size_is_refused_by_its_first_four_bytes(size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"a frame of {size} bytes"):
        list(fed(PulsarFrameSplitter(1000), struct.pack(">I", size)))


def test_a_large_frame_in_small_pieces_costs_linear_work() -> None:
    frames, body = PulsarFrameSplitter(1 << 25), bytes(1 << 24)
    stream = struct.pack(">II", 4 + len(body), len(body)) + body
    began = time.process_time()
    found = [each for at in range(0, len(stream), 1000) for each in fed(frames, stream[at : at + 1000])]
    assert len(found) == 1
    assert time.process_time() - began < 2 * slowness()


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=6), st.integers(1_000, 200_000))
def test_frames_of_all_sizes_come_whole_and_hold_double_of_what_came_at_most(sizes: list[int], cut: int) -> None:
    frames, stream = PulsarFrameSplitter(1 << 20), b"".join(
        struct.pack(">I", 4 + size) + bytes(4 + size) for size in sizes
    )
    found, before = [], 0
    for at in range(0, len(stream), cut):
        for each in fed(frames, stream[at : at + cut]):
            found.append(len(each) - 4)
            before = max(before, len(each))
        came = min(at + cut, len(stream)) - sum(8 + size for size in found)
        assert frames.held_bytes <= max(2 * came, 2 * (before + 4), SHARED_BUFFER_BYTES)
    assert found == sizes
    assert frames.held_bytes == 0


def test_a_reader_is_told_when_a_frame_is_whole_and_when_it_is_none() -> None:
    frames, stream = PulsarFrameSplitter(5 << 20), struct.pack(">II", 200_000, 20) + bytes(199_996)
    room = frames.get_free_buffer()
    pieces, at = [], 0
    while at < len(stream):
        size = min(len(room), len(stream) - at, 30_000)
        room[:size] = stream[at : at + size]
        pieces.append(frames.on_bytes_received(size))
        at, room = at + size, frames.get_free_buffer()
    assert pieces == [False] * (len(pieces) - 1) + [True]
    assert [len(each) for each in frames.take_complete_frames()] == [200_000]
    frames.get_free_buffer()[:4] = struct.pack(">I", 3)
    assert frames.on_bytes_received(4), "too short: an error waits"


def test_one_buffer_is_read_into_by_all_connections_in_turn() -> None:
    spare, body = SharedReceiveBuffer(), bytes(range(256)) * 400
    stream = struct.pack(">II", 4 + len(body), len(body)) + body
    one, two = PulsarFrameSplitter(1 << 20, spare), PulsarFrameSplitter(1 << 20, spare)
    assert list(fed(one, stream)) == [stream[4:]]
    assert one.held_bytes == 0, "who waits holds no buffer"
    assert not list(fed(two, stream[:10]))
    assert two.held_bytes >= len(stream), "the buffer of the other one, which is large enough"
    assert not list(fed(one, stream[:10]))
    assert one.held_bytes <= SHARED_BUFFER_BYTES, "that one is taken"
    assert list(fed(two, stream[10:])) == list(fed(one, stream[10:])) == [stream[4:]]


def test_a_very_large_buffer_does_not_stay() -> None:
    spare = SharedReceiveBuffer()
    frames, size = PulsarFrameSplitter(8 << 20, spare), SPARE_BUFFER_BYTES_MAX + 1
    assert len(list(fed(frames, struct.pack(">II", size, 1) + bytes(size - 4)))) == 1
    frames.get_free_buffer()
    assert frames.held_bytes <= SHARED_BUFFER_BYTES


def test_a_frame_that_is_only_announced_takes_no_memory() -> None:
    frames = PulsarFrameSplitter(5 << 20)
    assert not list(fed(frames, struct.pack(">II", 5 << 20, 20)))
    assert frames.held_bytes == SHARED_BUFFER_BYTES


def test_a_command_that_does_not_parse_is_refused() -> None:
    for body in (b"", b"\xff" * 10, b"\x08\x06", pulsar.BaseCommand(type=18).SerializePartialToString()[:1]):
        with pytest.raises(InvalidRequest):
            parse_frame(memoryview(struct.pack(">I", len(body)) + body + b"\xff"))
    with pytest.raises(InvalidRequest, match="a command of 100 bytes in a frame of 5"):
        parse_frame(memoryview(struct.pack(">I", 100) + b"x"))


def test_a_text_that_is_not_utf8_is_refused_wherever_it_is() -> None:
    body = encode_frame(subscribe=pulsar.CommandSubscribe(
        topic="t", subscription="s", subType=0, consumer_id=1, request_id=1, metadata=[KeyValue(key="KEY", value="v")]
    ))  # fmt: skip
    for text in (b"t", b"KEY"):
        at = body.index(b"\x0a" + bytes([len(text)]) + text) + 2
        broken = body[:at] + b"\xff" * len(text) + body[at + len(text) :]
        with pytest.raises(InvalidRequest, match="of a command subscribe is not UTF-8"):
            parse_frame(memoryview(broken[4:]))


def test_an_entry_without_a_checksum_gets_one() -> None:
    part = encode_client_part(MessageMetadata(producer_name="p", sequence_id=7, publish_time=1), b"payload")
    assert parse_sent_entry(memoryview(part)) == part
    assert parse_sent_entry(memoryview(part[6:])) == part
    assert parse_header(parse_sent_entry(memoryview(part[6:]))).sequence_id == 7
    with pytest.raises(CorruptEntry):
        parse_sent_entry(memoryview(b"\x0e\x01"))


def test_the_head_of_a_message_is_protobufs() -> None:
    message = pulsar.CommandMessage(consumer_id=3, message_id=MessageIdData(ledgerId=5, entryId=0))
    head = encode_message_head(message.SerializeToString(), 11)
    assert struct.unpack(">I", head[:4])[0] == len(head) - 4 + 11
    command, rest = parse_frame(memoryview(head[4:] + bytes(11)))
    assert (command.message, len(rest)) == (message, 11)
    assert encode_frame(message=message)[8:] == head[8:]


@given(*[st.integers(0, (1 << 64) - 1)] * 5)
def test_a_receipt_is_protobufs(producer: int, first: int, highest: int, ledger: int, entry: int) -> None:
    receipt = pulsar.CommandSendReceipt(
        producer_id=producer, sequence_id=first, message_id=MessageIdData(ledgerId=ledger, entryId=entry)
    )
    if highest:
        receipt.highest_sequence_id = highest
    assert encode_receipt(producer, first, highest, ledger, entry) == encode_frame(send_receipt=receipt)


# ------------------------------------------------------------------ numbers
@given(st.integers(1, 200), st.sets(st.integers(0, 199)))
def test_an_ack_set_says_which_messages_are_left(count: int, indexes: set[int]) -> None:
    acked = sorted(index for index in indexes if index < count)
    words = translate.encode_ack_set(acked, count)
    assert all(-(1 << 63) <= word < 1 << 63 for word in words)
    id_ = MessageIdData(ledgerId=1, entryId=2, ack_set=words)
    found = list(translate.parse_individual_acks([id_], lambda position: count))
    if len(acked) == count or not acked:
        assert found == ([AckedEntry(Position(1, 2))] if not words else [])
    else:
        assert found == [AckedEntry(Position(1, 2), sum(1 << index for index in acked))]


def test_a_cumulative_ack_may_name_nothing_an_entry_or_a_part_of_it() -> None:
    def of(entry: int, *words: int) -> list[AckedEntry]:
        return list(
            translate.parse_cumulative_ack(
                MessageIdData(ledgerId=4, entryId=translate.to_unsigned_long(entry), ack_set=words)
            )
        )

    assert of(-1) == []
    assert of(7) == [AckedEntry(Position(4, 7))]
    assert of(7, 0b1000) == [AckedEntry(Position(4, 7), 0b111)]
    assert of(7, 0b1) == [AckedEntry(Position(4, 6))]
    assert of(0, 0b1) == []
    assert of(7, 0, -1) == [AckedEntry(Position(4, 7), (1 << 64) - 1)]


def test_ids_are_javas_longs() -> None:
    earliest = MessageIdData(ledgerId=(1 << 64) - 1, entryId=(1 << 64) - 1)
    assert translate.parse_message_id(earliest).position == (-1, -1)
    assert translate.encode_message_id(Position(-1, -1), -1) == MessageIdData(
        ledgerId=(1 << 64) - 1, entryId=(1 << 64) - 1, partition=-1, batch_index=-1
    )
    assert translate.parse_message_id(MessageIdData(ledgerId=1, entryId=2, ack_set=[0b100])).batch_index == 2


def test_the_hash_of_topics_is_that_of_pulsars_clients() -> None:
    """Guava's text of CRC32C: its bytes from the lowest on. CRC32C of "123456789" is 0xe3069283."""
    assert hash_topic_names([]) == "00000000"
    assert hash_topic_names(["123456789"]) == "839206e3"
