"""Messages in chunks: cut, put together, acknowledged and given back as one; what is bounded; what is never lost."""

import asyncio
import random

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import InvalidConfiguration
from magnetar.client.core.batcher import OutgoingBatch, OutgoingMessage
from magnetar.client.core.chunking import (
    CHUNKED_BYTES_MAX,
    INCOMPLETE_EXPIRE_S,
    ChunkAssembler,
    PartialMessage,
    encode_chunks,
    encode_entries,
)
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import CompressionType, ConsumerType, InitialPosition
from magnetar.proto.compression import decompress
from magnetar.proto.entry import EntryEncoding, parse_header
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import CorruptEntry, MessageTooLarge
from magnetar.proto.names import Position
from tests.client.fake_broker import LEDGER, FakeBroker
from tests.client.simulated import simulate

FULL = "persistent://public/default/t"
SMALL_ENTRIES = 1000
BIG = bytes(random.Random(1).randbytes(5000))


def pieces(
    uuid: str = "u", count: int = 3, *, producer: str = "p", size: int = 300
) -> list[tuple[MessageMetadata, bytes]]:
    body = random.Random(uuid).randbytes(size)
    step = -(-size // count)
    return [
        (
            MessageMetadata(
                producer_name=producer, sequence_id=0, publish_time=1, uuid=uuid, num_chunks_from_msg=count,
                total_chunk_msg_size=size, chunk_id=number,
            ),
            body[number * step : (number + 1) * step],
        )
        for number in range(count)
    ]  # fmt: skip


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def whole(chunks: list[tuple[MessageMetadata, bytes]]) -> bytes:
    return b"".join(body for _, body in chunks)


# ------------------------------------------------------------------------------------------------ the core
@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.LZ4, CompressionType.ZSTD])
def test_what_is_cut_is_put_together_again(compression: CompressionType) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=7, publish_time=1, compression=int(compression))  # type: ignore[arg-type]
    entries = encode_chunks(metadata, BIG, SMALL_ENTRIES, "u")
    assert len(entries) > 4
    assert max(map(len, entries)) <= SMALL_ENTRIES
    chunks = ChunkAssembler(pending_max=10, auto_ack=False)
    found: PartialMessage | None = None
    for number, entry in enumerate(entries):
        header = parse_header(entry)
        assert (header.metadata.chunk_id, header.sequence_id) == (number, 7)
        assert found is None
        found = chunks.add(header.metadata, at(number), entry[header.payload_offset :], 0.0).complete
        chunks.check()
    assert found is not None
    assert len(found.payload) == found.metadata.total_chunk_msg_size
    assert list(found.places) == [at(number) for number in range(len(entries))]


def test_javas_and_gos_clients_take_the_chunks() -> None:
    """A payload is 10 KiB below an entry's limit, which is what a broker tells them; Go's needs the whole size."""
    metadata = MessageMetadata(producer_name="p", sequence_id=7, publish_time=1)
    for entry in encode_chunks(metadata, bytes(250_000), 110_000, "u"):
        header = parse_header(entry)
        assert len(entry) - header.payload_offset <= 110_000 - (10 << 10)
        assert header.metadata.uncompressed_size == 250_000


def test_what_fits_into_an_entry_is_no_chunk() -> None:
    (entry,) = encode_chunks(
        MessageMetadata(producer_name="p", sequence_id=7, publish_time=1), b"x", SMALL_ENTRIES, "u"
    )
    assert not parse_header(entry).metadata.HasField("uuid")


@pytest.mark.parametrize("compression", [1, 2, 3, 4])
def test_what_is_large_once_it_is_unfolded_is_in_chunks(compression: int) -> None:
    """A broker takes no entry that declares to unfold to more than an entry may have, unless it is a chunk."""
    payload = bytes(8 * SMALL_ENTRIES)
    metadata = MessageMetadata(producer_name="p", sequence_id=7, publish_time=1, compression=compression)  # type: ignore[arg-type]
    entries = encode_chunks(metadata, payload, SMALL_ENTRIES, "u")
    headers = [parse_header(entry) for entry in entries]
    assert len(headers) >= 2
    assert {header.uncompressed_size for header in headers} == {len(payload)}
    body = b"".join(entry[header.payload_offset :] for entry, header in zip(entries, headers, strict=True))
    assert decompress(compression, body, len(payload)) == payload


def test_without_chunks_what_is_large_once_it_is_unfolded_is_refused() -> None:
    for items in ([b"", bytes(SMALL_ENTRIES + 1)], [b"", bytes(SMALL_ENTRIES)] * 2):
        batch = OutgoingBatch(7)
        batch.items, batch.callbacks = items, [lambda *_: None] * (len(items) // 2)
        error = encode_entries(batch, "p", 1, EntryEncoding(3), SMALL_ENTRIES, chunks_of=None)
        assert isinstance(error, MessageTooLarge)
        if len(items) == 2:
            batch.message = OutgoingMessage(items[1])
            error = encode_entries(batch, "p", 1, EntryEncoding(3), SMALL_ENTRIES, chunks_of=None)
            assert isinstance(error, MessageTooLarge)


def test_messages_of_several_producers_between_each_other() -> None:
    chunks = ChunkAssembler(pending_max=10, auto_ack=False)
    one, two = pieces("one", producer="p"), pieces("two", producer="q")
    done = []
    for number, (metadata, body) in enumerate([one[0], two[0], two[1], one[1], one[2], two[2]]):
        outcome = chunks.add(metadata, at(number), body, 0.0)
        assert not outcome.dropped
        assert not outcome.given_back
        done += [outcome.complete.payload] if outcome.complete else []
    assert done == [whole(one), whole(two)]


def test_a_chunk_that_was_sent_again_is_acknowledged_with_the_others() -> None:
    chunks = ChunkAssembler(pending_max=10, auto_ack=False)
    one = pieces()
    for number, which in enumerate([0, 1, 0, 1]):
        chunks.add(*_order(one[which], number), 0.0)
    found = chunks.add(*_order(one[2], 4), 0.0).complete
    assert found is not None
    assert found.payload == whole(one)
    assert chunks.take_chunk_positions(at(4)) == tuple(at(number) for number in range(5))


def _order(piece: tuple[MessageMetadata, bytes], number: int) -> tuple[MessageMetadata, Position, bytes]:
    return piece[0], at(number), piece[1]


def test_one_begun_message_too_many_makes_the_oldest_go_where_that_was_asked_for() -> None:
    chunks = ChunkAssembler(pending_max=2, auto_ack=True)
    old = pieces("old", producer="a")
    chunks.add(*_order(old[0], 0), 0.0)
    chunks.add(*_order(pieces("b", producer="b")[0], 1), 0.0)
    outcome = chunks.add(*_order(pieces("c", producer="c")[0], 2), 0.0)
    assert (outcome.dropped, outcome.given_back) == ([at(0)], [])
    outcome = chunks.add(*_order(old[1], 3), 0.0)
    assert (outcome.dropped, outcome.given_back) == ([at(3)], [])


def test_one_begun_message_too_many_comes_again_when_there_is_room() -> None:
    chunks = ChunkAssembler(pending_max=2, auto_ack=False)
    one, two, new = (pieces(name, producer=name) for name in ("one", "two", "new"))
    chunks.add(*_order(one[0], 0), 0.0)
    chunks.add(*_order(two[0], 1), 0.0)
    outcome = chunks.add(*_order(new[0], 2), 0.0)
    assert (outcome.dropped, outcome.given_back) == ([], [at(2)])
    outcome = chunks.add(*_order(new[1], 3), 0.0)
    assert (outcome.dropped, outcome.given_back) == ([], [at(3)])
    chunks.add(*_order(one[1], 4), 0.0)
    outcome = chunks.add(*_order(one[2], 5), 0.0)
    assert outcome.complete is not None
    assert outcome.wanted == [at(2), at(3)], "there is room for the newcomer: as far as it came it is asked for"
    chunks.add(*_order(new[0], 2), 0.0)
    chunks.add(*_order(new[2], 6), 0.0)
    done = chunks.add(*_order(new[1], 3), 0.0).complete
    assert done is not None, "its chunks may come in another order"
    assert done.payload == whole(new)
    assert (list(done.places), done.last) == ([at(2), at(3), at(6)], at(6))


def test_a_message_that_made_room_makes_room_for_those_that_did_not() -> None:
    chunks = ChunkAssembler(pending_max=1, auto_ack=False)
    chunks.add(*_order(pieces("dead", producer="a")[0], 0), 0.0)
    assert chunks.expire(INCOMPLETE_EXPIRE_S).given_back == [at(0)]
    assert not chunks.add(*_order(pieces("dead", producer="a")[0], 0), 61.0).given_back
    outcome = chunks.add(*_order(pieces("b", producer="b")[0], 1), 62.0)
    assert outcome.given_back == [at(0)]
    assert chunks.add(*_order(pieces("dead", producer="a")[0], 0), 63.0).given_back == [at(0)]


def test_what_is_not_complete_after_a_minute_is_given_back() -> None:
    chunks = ChunkAssembler(pending_max=2, auto_ack=False)
    chunks.add(*_order(pieces()[0], 0), 10.0)
    assert chunks.expire(10.0 + INCOMPLETE_EXPIRE_S - 1).given_back == []
    assert chunks.expire(10.0 + INCOMPLETE_EXPIRE_S).given_back == [at(0)]
    assert len(chunks) == 0


def test_a_message_whose_producer_went_on_without_it_is_dropped_where_entries_come_in_order() -> None:
    for log_order in (True, False):
        chunks = ChunkAssembler(pending_max=2, auto_ack=False, log_order=log_order)
        one = pieces()
        chunks.add(*_order(one[0], 0), 0.0)
        chunks.add(*_order(one[1], 1), 0.0)
        assert chunks.on_unrelated_entry("somebody else", at(5)) == []
        assert chunks.on_unrelated_entry("p", at(5)) == ([at(0), at(1)] if log_order else [])


def test_a_chunk_without_its_beginning_is_dropped_in_order_and_given_back_without() -> None:
    later = pieces()[1]
    assert ChunkAssembler(pending_max=2, auto_ack=False).add(*_order(later, 5), 0.0).dropped == [at(5)]
    assert ChunkAssembler(pending_max=2, auto_ack=False, ordered=False).add(*_order(later, 5), 0.0).given_back == [
        at(5)
    ]


def test_sizes_are_checked_before_anything_is_kept() -> None:
    def refused(**changes: int | str) -> None:
        metadata, body = pieces()[0]
        for name, value in changes.items():
            setattr(metadata, name, value)
        chunks = ChunkAssembler(pending_max=2, auto_ack=False)
        with pytest.raises(CorruptEntry):
            chunks.add(metadata, at(0), body, 0.0)

    refused(total_chunk_msg_size=CHUNKED_BYTES_MAX + 1)
    refused(total_chunk_msg_size=50)
    refused(num_chunks_from_msg=1 << 30)
    refused(chunk_id=3)
    refused(chunk_id=-1)
    refused(uuid="")
    chunks = ChunkAssembler(pending_max=2, auto_ack=False)
    one = pieces()
    chunks.add(*_order(one[0], 0), 0.0)
    with pytest.raises(CorruptEntry):
        chunks.add(one[1][0], at(1), bytes(250), 0.0)


def test_a_cumulative_ack_stops_in_front_of_what_ends_behind_it() -> None:
    chunks = ChunkAssembler(pending_max=2, auto_ack=False)
    one = pieces()
    assert chunks.cumulative_ack_limit(at(9)) == at(9)
    chunks.add(*_order(one[0], 3), 0.0)
    assert chunks.cumulative_ack_limit(at(9)) == at(2)
    assert chunks.cumulative_ack_limit(at(2)) == at(2)
    chunks.add(*_order(one[1], 5), 0.0)
    chunks.add(*_order(one[2], 7), 0.0)
    assert chunks.cumulative_ack_limit(at(6)) == at(2)
    assert chunks.cumulative_ack_limit(at(7)) == at(7)
    chunks.take_chunk_positions(at(7))
    assert chunks.cumulative_ack_limit(at(6)) == at(6)


def test_the_id_of_a_message_in_chunks_survives_as_bytes() -> None:
    id_ = MessageId(2, 7, 9, _chunks=(Position(7, 4), Position(7, 6), Position(7, 9)))
    again = MessageId.deserialize(id_.serialize())
    assert again == id_
    assert again.first_chunk_message_id() == id_.first_chunk_message_id() == MessageId(2, 7, 4)
    assert MessageId(2, 7, 9).first_chunk_message_id() is None


# ------------------------------------------------------------------------------------------------ through the SDK
def small() -> FakeBroker:
    broker = FakeBroker()
    broker.max_message_size = SMALL_ENTRIES
    return broker


@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.ZLib])
def test_a_large_message_is_sent_received_and_acknowledged_as_one(compression: CompressionType) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
        producer = await client.create_producer(
            "t", batching_enabled=False, chunking_enabled=True, compression_type=compression
        )
        id_ = await producer.send(BIG, properties={"a": "b"}, partition_key="k")
        assert len(broker.topics[FULL].entries) == len(id_.chunks()) > 4
        assert id_.first_chunk_message_id() == MessageId(-1, LEDGER, 0)
        small_id = await producer.send(b"small")
        assert small_id.chunks() == ()
        message = await consumer.receive(5000)
        assert (message.data(), message.properties(), message.partition_key()) == (BIG, {"a": "b"}, "k")
        assert message.message_id() == id_
        assert (await consumer.receive(5000)).data() == b"small"
        await consumer.acknowledge(message)
        await asyncio.sleep(1)
        assert broker.topics[FULL].subscriptions["s"].done == {place.entry_id for place in id_.chunks()}

    simulate(body, small())


def test_chunks_without_a_receipt_go_again_and_the_message_comes_once() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
        producer = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
        broker.drop_after = [3]
        first, second = await asyncio.gather(producer.send(BIG), producer.send(BIG[::-1]))
        assert first < second
        assert (await consumer.receive(5000)).data() == BIG
        assert (await consumer.receive(5000)).data() == BIG[::-1]
        producer.check()

    simulate(body, small())


def test_a_message_in_chunks_that_is_given_back_comes_again_as_a_whole() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        for type_ in (ConsumerType.Exclusive, ConsumerType.Shared):
            consumer = await client.subscribe(
                "t", type_.name, type_, initial_position=InitialPosition.Earliest, negative_ack_redelivery_delay_ms=100,
                unacked_messages_timeout_ms=10_000,
            )  # fmt: skip
            if type_ is ConsumerType.Exclusive:
                producer = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
                await producer.send(BIG)
            message = await consumer.receive(5000)
            await consumer.negative_acknowledge(message)
            message = await consumer.receive(5000)
            assert message.data() == BIG
            message = await consumer.receive(30_000)  # its time to be acknowledged is over
            assert message.data() == BIG
            await consumer.acknowledge(message)
            await asyncio.sleep(1)
            assert len(broker.topics[FULL].subscriptions[type_.name].done) == len(broker.topics[FULL].entries)
            await consumer.close()

    simulate(body, small())


def test_what_waits_for_room_is_asked_for_when_a_message_is_complete_though_nothing_else_happens() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        await client.subscribe(
            "t", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest, max_pending_chunked_message=1,
        )  # fmt: skip

        def come(uuid: str, numbers: slice) -> None:
            metadata = MessageMetadata(producer_name=uuid, sequence_id=0, publish_time=1)
            for entry in encode_chunks(metadata, BIG, SMALL_ENTRIES, uuid)[numbers]:
                broker.store(broker.topics[FULL], entry, parse_header(entry))

        come("first", slice(1))
        come("second", slice(1))
        come("first", slice(1, -1))
        await asyncio.sleep(1)
        assert broker.redeliveries == 0
        come("first", slice(-1, None))
        await asyncio.sleep(1)
        assert broker.redeliveries == 1

    simulate(body, small())


def test_a_reader_reads_what_was_half_there_when_the_connection_broke() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        reader = await client.create_reader("t", MessageId.earliest)
        big = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
        other = await client.create_producer("t", batching_enabled=False)
        entries = encode_chunks(
            MessageMetadata(producer_name="x", sequence_id=0, publish_time=1), BIG, SMALL_ENTRIES, "u"
        )
        topic = broker.topics[FULL]
        for entry in entries[:2]:
            broker.store(topic, entry, parse_header(entry))
        await other.send(b"between")
        assert (await reader.read_next(5000)).data() == b"between"
        broker.cut()
        await asyncio.sleep(5)
        await other.send(b"more")
        for entry in entries[2:]:
            broker.store(topic, entry, parse_header(entry))
        assert (await reader.read_next(5000)).data() == b"more"
        message = await reader.read_next(5000)
        assert message.data() == BIG
        id_ = message.message_id()
        await big.send(b"end")
        again = await client.create_reader("t", id_, start_message_id_inclusive=True)
        assert {(await again.read_next(5000)).data() for _ in range(4)} == {BIG, b"between", b"more", b"end"}
        behind = await client.create_reader("t", id_)
        assert (await behind.read_next(5000)).data() == b"end"

    simulate(body, small())


@pytest.mark.run_by.with_args(simulate)
async def test_chunking_and_batching_exclude_each_other(client: Client, broker: FakeBroker, /) -> None:
    with pytest.raises(InvalidConfiguration, match="batching and chunking"):
        await client.create_producer("t", chunking_enabled=True, batching_enabled=True)
