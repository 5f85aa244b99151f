"""The Connect stream with frames by hand: producers and consumers as ids, and what a stranger may send."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from magnetar.broker.grpc import connection, handlers
from magnetar.broker.session.consumer import ConsumerSession
from magnetar.broker.subscription.pump import PUMPED_ENTRIES_MAX
from magnetar.broker.topic.dedup_core import DedupCore
from magnetar.ledger.sender import AddSender
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    BackPressure,
    ConnectionLost,
    InternalError,
    InvalidName,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotOwner,
    from_wire,
)
from magnetar.proto.names import TopicName
from magnetar.proto.states import ENTRY_COST_BYTES, BacklogQuotaState
from magnetar.runtime import alarm as turns
from magnetar.runtime.budget import MemoryBudget
from magnetar.runtime.network import find_rpc
from tests.compiled import replaces_code
from tests.support.cluster import Cluster, client_part, cluster, payloads_of

T = "persistent://public/default/t"


class Raw:
    """A Connect stream; what came is kept per id."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.channel = running.world.network.connect(running.brokers[0].endpoint)
        self.stream = self.channel.stream(find_rpc("Broker", "Connect"))
        self.came: dict[int, deque[wire.ServerFrame]] = {}
        self.order: list[tuple[int, str]] = []

    def send(self, id_: int, **frame: Any) -> None:
        self.stream.send_nowait(wire.ClientFrame(id=id_, **frame))

    async def next(self, id_: int, timeout_s: float = 10.0) -> wire.ServerFrame:
        async with asyncio.timeout(timeout_s):
            while not self.came.get(id_):
                for frame in await self.stream.receive():
                    self.came.setdefault(frame.id, deque()).append(frame)
                    self.order.append((frame.id, frame.WhichOneof("kind")))
        return self.came[id_].popleft()

    async def kind(self, id_: int, kind: str) -> Any:
        frame = await self.next(id_)
        assert frame.WhichOneof("kind") == kind, frame
        return getattr(frame, kind)

    async def error(self, id_: int) -> MagnetarError:
        return from_wire(await self.kind(id_, "closed"))

    async def producer(self, id_: int, topic: str = T, name: str = "", **options: Any) -> wire.ProducerOpened:
        opening = wire.OpenProducer(topic=topic, producer_name=name or f"p{id_}", **options)
        self.send(id_, open_producer=opening)
        opened: wire.ProducerOpened = await self.kind(id_, "producer_opened")
        return opened

    def publish(self, id_: int, sequence_id: int, payload: bytes = b"x", name: str = "") -> None:
        self.send(id_, publish=client_part(name or f"p{id_}", sequence_id, payload))

    async def consumer(self, id_: int, topic: str = T, permits: int = 1000, **options: Any) -> None:
        options = {"subscription": "s", "durable": True, "initial_position": wire.Subscribe.EARLIEST, **options}
        self.send(id_, subscribe=wire.Subscribe(topic=topic, **options))
        if permits:
            self.send(id_, permits=permits)
        await self.kind(id_, "subscribed")

    async def deliveries(self, id_: int, count: int) -> list[tuple[int, int, bytes]]:
        found: list[tuple[int, int, bytes]] = []
        while len(found) < count:
            frame = await self.next(id_)
            if frame.HasField("deliveries"):
                several = frame.deliveries
                for entry_id, entry in zip(several.entry_ids, several.entries, strict=True):
                    found += [(several.ledger_id, entry_id, payload) for payload in payloads_of(entry)]
            else:
                one = frame.delivery
                found += [(one.ledger_id, one.entry_id, payload) for payload in payloads_of(one.entry)]
        return found

    async def close(self) -> None:
        self.stream.cancel()
        await self.channel.close()


@pytest.fixture
async def raw(tmp_path: Path) -> AsyncIterator[Raw]:
    async with cluster(tmp_path, connection_ids=100) as running:
        client = Raw(running)
        yield client
        await client.close()


async def settled(running: Cluster, topics: list[str]) -> None:
    """Nothing is connected to these topics."""
    async with asyncio.timeout(10):
        here = running.brokers[0].topics
        while any(here[topic].connected_client_count for topic in topics if topic in here):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------------ the way of a message
async def test_many_producers_and_consumers_share_a_stream_and_each_keeps_its_order(raw: Raw) -> None:
    for id_ in range(1, 11):
        await raw.producer(id_, f"{T}{id_}")
    for number in range(20):
        for id_ in range(1, 11):
            raw.publish(id_, number, b"%d" % number)
    for id_ in range(1, 11):
        receipts = [await raw.kind(id_, "receipt") for _ in range(20)]
        assert [each.sequence_id for each in receipts] == list(range(20))
        assert [each.index for each in receipts] == list(range(20))
    for id_ in range(1, 11):
        await raw.consumer(100 + id_, f"{T}{id_}")
    for id_ in range(1, 11):
        found = await raw.deliveries(100 + id_, 20)
        assert [payload for _, _, payload in found] == [b"%d" % number for number in range(20)]


async def test_acks_seek_last_id_and_unsubscribe_are_answered(raw: Raw) -> None:
    await raw.producer(1)
    for number in range(10):
        raw.publish(1, number, b"%d" % number)
    await raw.consumer(2)
    found = await raw.deliveries(2, 10)
    entries = [wire.AckedEntry(ledger_id=ledger, entry_id=entry) for ledger, entry, _ in found[:4]]
    raw.send(2, ack=wire.Ack(entries=entries, request_id=7))
    done = await raw.kind(2, "done")
    assert done.request_id == 7
    assert not done.HasField("error")
    raw.send(2, last_message_id=8)
    last = await raw.kind(2, "last")
    assert (last.request_id, last.index, last.mark_delete.entry_id) == (8, 9, found[3][1])
    raw.send(2, seek=wire.Seek(request_id=9, index=8))
    assert (await raw.kind(2, "done")).request_id == 9
    assert [payload for _, _, payload in await raw.deliveries(2, 2)] == [b"8", b"9"]
    raw.send(2, redeliver=wire.Redeliver())
    assert [payload for _, _, payload in await raw.deliveries(2, 2)] == [b"8", b"9"]
    raw.send(2, unsubscribe=10)
    assert not (await raw.kind(2, "done")).HasField("error")
    assert "s" not in raw.running.brokers[0].topics[T].subscriptions
    raw.send(2, close=11)
    assert (await raw.kind(2, "done")).request_id == 11


async def test_what_a_closed_id_acknowledged_is_durable_and_another_consumer_goes_on(raw: Raw) -> None:
    await raw.producer(1)
    for number in range(4):
        raw.publish(1, number, b"%d" % number)
    await raw.consumer(2)
    found = await raw.deliveries(2, 4)
    entries = [wire.AckedEntry(ledger_id=ledger, entry_id=entry) for ledger, entry, _ in found[:2]]
    raw.send(2, ack=wire.Ack(entries=entries))
    raw.send(2, close=5)
    assert (await raw.kind(2, "done")).request_id == 5
    await raw.consumer(3)
    assert [payload for _, _, payload in await raw.deliveries(3, 2)] == [b"2", b"3"]


# ------------------------------------------------------------------------------------------------ credit
async def test_credit_comes_back_as_entries_are_confirmed_and_the_sum_is_what_was_spent(tmp_path: Path) -> None:
    async with cluster(tmp_path, pending_bytes=100_000) as running:
        raw = Raw(running)
        opened = await raw.producer(1)
        left = opened.credit
        assert left == 100_000
        size, sent, receipts = len(client_part("p1", 0, bytes(9000))), 0, 0
        while receipts < 200:
            while left > 0 and sent < 200:
                raw.publish(1, sent, bytes(9000))
                sent, left = sent + 1, left - size - ENTRY_COST_BYTES
            frame = await raw.next(1)
            if frame.WhichOneof("kind") == "credit":
                left += frame.credit
                assert left <= 100_000, "no more than was granted"
            else:
                assert frame.receipt.sequence_id == receipts
                receipts += 1
        await raw.close()


async def test_a_publish_without_credit_closes_its_id_and_no_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, pending_bytes=50_000) as running:
        raw = Raw(running)
        await raw.producer(1, T + "1")
        await raw.producer(2, T + "2")
        for number in range(10):
            raw.publish(1, number, bytes(20_000))
        frames = [await raw.next(1)]
        while frames[-1].WhichOneof("kind") != "closed":
            frames.append(await raw.next(1))
        assert isinstance(from_wire(frames[-1].closed), BackPressure)
        raw.publish(2, 0)
        assert (await raw.kind(2, "receipt")).index == 0
        assert running.brokers[0].topics[T + "1"].connected_client_count == 0
        await raw.close()


async def test_a_producer_that_its_quota_holds_waits_alone_and_loses_nothing(raw: Raw) -> None:
    await raw.producer(1, T + "1")
    await raw.producer(2, T + "2")
    topic = raw.running.brokers[0].topics[T + "1"]
    topic.maintenance.quota = BacklogQuotaState.HOLD
    for number in range(5):
        raw.publish(1, number)
    for number in range(5):
        raw.publish(2, number)
    assert [(await raw.kind(2, "receipt")).index for _ in range(5)] == list(range(5))
    assert topic.log.next_index == 0, "what comes while the gate is closed is not published"
    assert not raw.came.get(1)
    topic.maintenance.quota = None
    topic.gate.resume_queued_publishes()
    assert [(await raw.kind(1, "receipt")).sequence_id for _ in range(5)] == list(range(5))


async def test_who_opens_while_the_quota_holds_gets_its_credit_afterwards(raw: Raw) -> None:
    await raw.producer(1)
    topic = raw.running.brokers[0].topics[T]
    topic.maintenance.quota = BacklogQuotaState.HOLD
    assert (await raw.producer(2)).credit == 0
    topic.maintenance.quota = None
    topic.gate.resume_queued_publishes()
    assert await raw.kind(2, "credit") == raw.running.brokers[0].topic_manager.config.pending_bytes


async def test_a_held_producer_keeps_nothing_here_while_memory_is_tight(raw: Raw) -> None:
    """It is closed, opens again without credit, and publishes again when the quota lets it: nothing is lost."""
    await raw.producer(1)
    broker = raw.running.brokers[0]
    topic, memory = broker.topics[T], broker.topic_manager.memory.requests
    topic.maintenance.quota = BacklogQuotaState.HOLD
    for number in range(3):
        raw.publish(1, number, bytes(10_000))
    async with asyncio.timeout(10):
        while memory.held < 30_000:  # noqa: ASYNC110 (nothing is answered)
            await asyncio.sleep(0.01)
    memory.tight = 5_000
    raw.publish(1, 3)
    error = await raw.error(1)
    assert isinstance(error, BackPressure)
    assert error.retryable
    assert memory.held < 1_000, "what waited is forgotten"
    assert (await raw.producer(2, name="p1")).credit == 0
    topic.maintenance.quota = None
    topic.gate.resume_queued_publishes()
    await raw.kind(2, "credit")
    for number in range(4):
        raw.publish(2, number, name="p1")
    assert [(await raw.kind(2, "receipt")).index for _ in range(4)] == [0, 1, 2, 3]


async def test_while_memory_is_tight_a_consumer_is_full_with_little(raw: Raw) -> None:
    await raw.consumer(1, permits=0)
    (connected,), memory = raw.running.brokers[0].topics[T].subscriptions["s"].consumers.values(), MemoryBudget(1000)
    outlet = connected.outlet._port
    raw.running.brokers[0].topic_manager.memory.answers = memory
    outlet.queued_bytes, outlet.sent = (
        connection.CROWDED_CONSUMER_BYTES_MAX + 1,
        deque([(1 << 40, connection.CROWDED_CONSUMER_BYTES_MAX + 1)]),
    )
    assert not outlet.deliver(())
    memory.held = 501
    assert outlet.deliver(())
    outlet.queued_bytes, outlet.sent = 1, deque([(1 << 40, 1)])
    assert not outlet.deliver(())
    memory.held = 1001
    assert outlet.deliver(())
    outlet.queued_bytes, outlet.sent = 0, None
    assert outlet.deliver(()), "nothing is delivered"
    waiting = asyncio.create_task(outlet.wait_drained())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    memory.held = 0
    async with asyncio.timeout(30):
        await waiting


@replaces_code
@pytest.mark.parametrize(("frames", "ahead"), [(60, True), (connection.SPLIT_BATCH_FRAMES_MIN - 1, False)])
async def test_the_first_half_of_many_frames_is_on_its_way_before_the_rest_is_taken(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, frames: int, ahead: bool
) -> None:
    await raw.producer(1)
    await raw.producer(2, T + "2")
    monkeypatch.setattr(turns, "LOOP_SLICE_S", 60.0)
    taken, asked = 0, list[int]()
    take, flush = handlers.ProducerHandler.on_frame, AddSender._flush

    def counted(self: handlers.ProducerHandler, *frame: Any) -> None:
        nonlocal taken
        taken += 1
        take(self, *frame)

    def asking(self: AddSender) -> None:
        asked.append(taken)
        flush(self)

    raw.publish(1, 0)
    raw.publish(2, 0)
    for id_ in (1, 2):  # each topic has a ledger
        await raw.kind(id_, "receipt")
    monkeypatch.setattr(handlers.ProducerHandler, "on_frame", counted)
    monkeypatch.setattr(AddSender, "_flush", asking)
    for number in range(frames):
        raw.publish(1 + number % 2, 1 + number // 2)
    for id_ in (1, 2):
        indexes = [(await raw.kind(id_, "receipt")).index for _ in range(len(range(id_ - 1, frames, 2)))]
        assert indexes == list(range(1, 1 + len(indexes)))
    assert asked[0] == (frames // 2 if ahead else frames)
    assert asked[-1] == frames


# ------------------------------------------------------------------------------------------------ who holds up whom
async def test_an_opening_that_waits_holds_up_no_other_id(raw: Raw) -> None:
    await raw.producer(1, access_mode=wire.OpenProducer.EXCLUSIVE)
    waiting = wire.OpenProducer(topic=T, producer_name="w", access_mode=wire.OpenProducer.WAIT_FOR_EXCLUSIVE)
    raw.send(2, open_producer=waiting)
    await raw.producer(3, T + "3")
    raw.publish(3, 0)
    await raw.kind(3, "receipt")
    raw.send(1, close=1)
    assert (await raw.kind(1, "done")).request_id == 1
    await raw.kind(2, "producer_opened")
    raw.publish(2, 0, name="w")
    assert (await raw.kind(2, "receipt")).index == 0


async def test_a_waiting_producer_that_is_closed_leaves_nothing(raw: Raw) -> None:
    await raw.producer(1, access_mode=wire.OpenProducer.EXCLUSIVE)
    waiting = wire.OpenProducer(topic=T, producer_name="w", access_mode=wire.OpenProducer.WAIT_FOR_EXCLUSIVE)
    raw.send(2, open_producer=waiting)
    raw.send(2, close=4)
    assert (await raw.kind(2, "done")).request_id == 4
    assert [each.name for each in raw.running.brokers[0].topics[T].producers] == ["p1"]


async def test_a_consumer_that_is_not_read_holds_up_no_other(
    raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued for one consumer is bounded by itself; the other one of the subscription gets the rest."""
    monkeypatch.setattr(connection, "CONSUMER_UNSENT_BYTES_MAX", 10_000)
    await raw.producer(1)
    await raw.consumer(2, subscription="a")
    (topic,) = [raw.running.brokers[0].topics[T]]
    (consumer,) = topic.subscriptions["a"].consumers.values()
    handler: Any = consumer.outlet._port  # type: ignore[attr-defined]
    stream = handler._connection.stream
    stream.connection.pause_writing()  # as a transport that is full
    for number in range(200):
        raw.publish(1, number, bytes(1000))
    async with asyncio.timeout(10):
        while topic.log.shape.end_index < 200 or not consumer.member.paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert 10_000 < handler.queued_bytes < 10_000 + PUMPED_ENTRIES_MAX * 1200
    assert len(topic.producers) == 1
    stream.connection.resume_writing()
    assert len(await raw.deliveries(2, 200)) == 200
    assert [(await raw.kind(1, "receipt")).index for _ in range(200)] == list(range(200))


async def test_a_client_that_does_not_read_is_not_read_either() -> None:
    class Unread:
        queued_bytes, sent_bytes = connection.UNSENT_ANSWERS_BYTES_MAX + 1, 0
        gone = asyncio.Event()

        async def wait_sent(self, offset: int) -> None:
            await self.gone.wait()

    nothing: Any = None
    stream: Any = Unread()
    reading = asyncio.create_task(connection.ConnectStream(nothing, stream, "here").wait_room())
    await asyncio.sleep(0)
    assert not reading.done(), "what is answered and does not leave is bounded"
    stream.gone.set()
    await reading


# ------------------------------------------------------------------------------------------------ strangers
async def test_ids_that_were_never_opened_or_are_used_twice_are_answered_for_themselves(raw: Raw) -> None:
    raw.publish(1, 0)
    assert isinstance(await raw.error(1), InvalidRequest)
    raw.send(0, permits=3)
    assert isinstance(await raw.error(0), InvalidRequest)
    raw.send(0, open_producer=wire.OpenProducer(topic=T))
    assert isinstance(await raw.error(0), InvalidRequest)
    await raw.producer(5)
    raw.send(5, open_producer=wire.OpenProducer(topic=T))
    assert isinstance(await raw.error(5), InvalidRequest)
    raw.send(5, open_producer=wire.OpenProducer(topic=T))
    assert isinstance(await raw.error(5), InvalidRequest)
    raw.send(4, open_producer=wire.OpenProducer(topic=T))
    assert isinstance(await raw.error(4), InvalidRequest)
    await raw.producer(6, name="p5")
    assert raw.running.brokers[0].topics[T].connected_client_count == 1, "the first holder of id 5 has left"


async def test_frames_before_and_after_the_life_of_an_id(raw: Raw) -> None:
    raw.send(1, open_producer=wire.OpenProducer(topic=T, producer_name="p1"))
    raw.publish(1, 0)
    assert isinstance(await raw.error(1), InvalidRequest)
    await raw.producer(2)
    raw.send(2, close=1)
    await raw.kind(2, "done")
    for number in range(5):
        raw.publish(2, number)
    assert isinstance(await raw.error(2), ConnectionLost)
    await raw.producer(3)
    assert not raw.came.get(2), "once for all of them"


@pytest.mark.parametrize("frame", [
    {"permits": 3}, {"ack": wire.Ack()}, {"redeliver": wire.Redeliver()}, {"seek": wire.Seek()}, {"unsubscribe": 1},
    {"last_message_id": 1}, {},
])  # fmt: skip
async def test_a_producer_takes_nothing_that_a_consumer_does(raw: Raw, frame: dict[str, Any]) -> None:
    await raw.producer(1)
    await raw.producer(2)
    raw.send(1, **frame)
    assert isinstance(await raw.error(1), InvalidRequest)
    raw.publish(2, 0)
    await raw.kind(2, "receipt")
    assert [each.name for each in raw.running.brokers[0].topics[T].producers] == ["p2"]


@pytest.mark.parametrize("frame", [{"publish": b"x"}, {}, {"permits": (1 << 32) - 1}])
async def test_a_consumer_takes_no_publish_and_no_senseless_permits(raw: Raw, frame: dict[str, Any]) -> None:
    await raw.consumer(1, permits=1)
    raw.send(1, **frame)
    assert isinstance(await raw.error(1), InvalidRequest)
    assert not raw.running.brokers[0].topics[T].subscriptions["s"].consumers


async def test_zero_permits_are_nothing(raw: Raw) -> None:
    await raw.consumer(1, permits=0)
    raw.send(1, permits=0)
    raw.send(1, last_message_id=1)
    assert (await raw.kind(1, "last")).index == -1


@pytest.mark.parametrize("opening", [
    {"open_producer": wire.OpenProducer(topic="a//b")},
    {"open_producer": wire.OpenProducer(topic=T, producer_name="p" * 300)},
    {"open_producer": wire.OpenProducer(topic=T, access_mode=9)},  # type: ignore[arg-type]
    {"subscribe": wire.Subscribe(topic="a//b", subscription="s")},
    {"subscribe": wire.Subscribe(topic=T, subscription="")},
    {"subscribe": wire.Subscribe(topic=T, subscription="s", type=9)},  # type: ignore[arg-type]
])  # fmt: skip
async def test_senseless_openings_are_refused_with_a_type(raw: Raw, opening: dict[str, Any]) -> None:
    raw.send(1, **opening)
    assert isinstance(await raw.error(1), InvalidName | InvalidRequest | NotAllowed)
    await raw.producer(2)


async def test_an_unknown_ack_is_refused_and_the_consumer_goes_on(raw: Raw) -> None:
    await raw.consumer(1)
    far = wire.AckedEntry(ledger_id=1 << 40, entry_id=7)
    raw.send(1, ack=wire.Ack(entries=[far], request_id=1))
    assert isinstance(from_wire((await raw.kind(1, "done")).error), InvalidRequest)
    raw.send(1, ack=wire.Ack(kind=7, request_id=2))  # type: ignore[arg-type]
    assert isinstance(from_wire((await raw.kind(1, "done")).error), InvalidRequest)
    raw.send(1, redeliver=wire.Redeliver(ledgers=[wire.EntrySet(ledger_id=1, entries=b"no set")]))
    assert isinstance(await raw.error(1), InvalidRequest)


async def test_a_connection_carries_so_many_ids_and_no_more(raw: Raw) -> None:
    for id_ in range(1, 103):
        raw.send(id_, open_producer=wire.OpenProducer(topic=T, producer_name=f"p{id_}"))
    kinds = [(await raw.next(id_)).WhichOneof("kind") for id_ in range(1, 103)]
    assert kinds == ["producer_opened"] * 100 + ["closed"] * 2
    raw.send(1, close=1)
    await raw.kind(1, "done")
    await raw.producer(103)


async def test_too_many_frames_before_an_opening_is_answered_end_it(raw: Raw) -> None:
    raw.send(1, subscribe=wire.Subscribe(topic=T, subscription="s", durable=True))
    for _ in range(200):
        raw.send(1, permits=1)
    assert isinstance(await raw.error(1), BackPressure | ConnectionLost)
    await settled(raw.running, [T])


async def test_a_request_that_fails_unforeseen_is_answered_and_logged(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(session: ConsumerSession) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(ConsumerSession, "find_last_message", fails)
    await raw.consumer(1)
    raw.send(1, last_message_id=7)
    done = await raw.kind(1, "done")
    assert done.request_id == 7
    assert isinstance(from_wire(done.error), InternalError)
    assert "ValueError" in caplog.text


@replaces_code
async def test_an_opening_that_fails_unforeseen_is_answered_and_leaves_nothing(
    raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DedupCore, "last_sequence_id", lambda *_: 1 // 0)
    raw.send(1, open_producer=wire.OpenProducer(topic=T, producer_name="p1"))
    assert isinstance(await raw.error(1), InternalError)
    monkeypatch.undo()
    assert not raw.running.brokers[0].topics[T].connected_client_count
    await raw.producer(2, name="p1")


async def test_requests_under_way_are_bounded(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "RUNNING_REQUESTS_MAX", 10)
    waiting: list[Callable[[MagnetarError | None], None]] = []
    monkeypatch.setattr(ConsumerSession, "call_when_durable", lambda session, tell: waiting.append(tell))
    await raw.consumer(1)
    for number in range(1, 16):
        raw.send(1, ack=wire.Ack(request_id=number))
    refused = [await raw.kind(1, "done") for _ in range(5)]
    assert [each.request_id for each in refused] == list(range(11, 16))
    assert {type(from_wire(each.error)) for each in refused} == {BackPressure}
    for tell in waiting:
        tell(None)
    assert sorted([(await raw.kind(1, "done")).request_id for _ in range(10)]) == list(range(1, 11))


async def test_a_long_acknowledgement_goes_in_slices_and_later_frames_of_its_id_wait_for_it(
    raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another id is served in between; its own frames keep their order."""
    monkeypatch.setattr(turns, "LOOP_SLICE_S", -1.0)  # each step ends a slice
    await raw.producer(1)
    for number in range(1000):
        raw.publish(1, number)
    await raw.consumer(2, permits=2000)
    found = await raw.deliveries(2, 1000)
    entries = [wire.AckedEntry(ledger_id=ledger, entry_id=entry) for ledger, entry, _ in found]
    raw.send(2, ack=wire.Ack(entries=entries))
    raw.send(2, redeliver=wire.Redeliver())
    raw.send(2, last_message_id=1)
    raw.publish(1, 1000)
    frames = [await raw.next(2)]
    while not all(any(frame.HasField(kind) for frame in frames) for kind in ("last", "delivery")):
        frames.append(await raw.next(2))
    delivered = {frame.delivery.entry_id for frame in frames if frame.HasField("delivery")}
    assert delivered == {found[-1][1] + 1}, "the redelivery came after: it has nothing that was acknowledged"
    assert next(frame.last.mark_delete.entry_id for frame in frames if frame.HasField("last")) == found[-1][1]
    raw.send(2, close=2)
    while (frame := await raw.next(2)).HasField("delivery"):
        pass  # of the one that was not acknowledged, again
    assert frame.done.request_id == 2


# ------------------------------------------------------------------------------------------------ ends
async def test_a_cancelled_stream_leaves_nothing(raw: Raw) -> None:
    for id_ in range(1, 6):
        await raw.producer(id_)
    await raw.consumer(10, type=wire.Subscribe.SHARED)
    await raw.consumer(11, type=wire.Subscribe.SHARED)
    await raw.consumer(12, subscription="reader", durable=False)
    waiting = wire.OpenProducer(topic=T, producer_name="w", access_mode=wire.OpenProducer.WAIT_FOR_EXCLUSIVE)
    raw.send(20, open_producer=waiting)
    await raw.producer(21, T + "2")
    topic = raw.running.brokers[0].topics[T]
    raw.stream.cancel()
    await settled(raw.running, [T, T + "2"])
    assert len(topic.producers) == 0
    async with asyncio.timeout(10):
        while "reader" in topic.subscriptions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_topic_that_goes_tells_each_id_and_the_stream_stays(raw: Raw) -> None:
    for id_ in (1, 2):
        await raw.producer(id_)
    await raw.consumer(3)
    await raw.producer(4, T + "2")
    await raw.running.brokers[0].topic_manager.unload_topic(TopicName.parse(T))
    for id_ in (1, 2, 3):
        assert isinstance(await raw.error(id_), NotOwner)
    raw.publish(4, 0)
    await raw.kind(4, "receipt")
    await raw.producer(5)


async def test_a_broker_that_closes_tells_each_id(raw: Raw) -> None:
    await raw.producer(1)
    await raw.consumer(2)
    closing = asyncio.create_task(raw.running.brokers[0].close())
    for id_ in (1, 2):
        assert isinstance(await raw.error(id_), NotOwner)
    await closing


async def test_a_half_closed_stream_gets_the_answers_that_no_task_waits_for(
    raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acknowledgement that is asked for is answered when it is durable, also after the client's orderly end."""
    waiting: list[Callable[[MagnetarError | None], None]] = []
    monkeypatch.setattr(ConsumerSession, "call_when_durable", lambda session, tell: waiting.append(tell))
    await raw.consumer(1)
    raw.send(1, ack=wire.Ack(request_id=7))
    raw.send(1, last_message_id=8)
    await raw.kind(1, "last")
    closing = asyncio.create_task(raw.stream.close())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not closing.done(), "the server has an answer to give"
    (tell,) = waiting
    tell(None)
    assert (await raw.kind(1, "done")).request_id == 7
    await closing


async def test_a_half_closed_stream_gets_its_receipts_before_it_ends(raw: Raw) -> None:
    await raw.producer(1)
    for number in range(100):
        raw.publish(1, number)
    closing = asyncio.create_task(raw.stream.close())
    assert [(await raw.kind(1, "receipt")).sequence_id for _ in range(100)] == list(range(100))
    await closing
    await settled(raw.running, [T])


class Slow(handlers.Handler):
    """Its opening ends when `may_open` does."""

    left = 0

    async def _open(self, frame: wire.ClientFrame) -> wire.ServerFrame:
        self.may_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self.may_open
        return wire.ServerFrame(id=self.number, subscribed=wire.Subscribed())

    async def _leave(self) -> None:
        self.left += 1


@replaces_code
@pytest.mark.parametrize("ends", [
    lambda slow: slow.close_with_error(BackPressure("enough")),
    lambda slow: slow.on_frame(wire.ClientFrame(id=1, close=7), None),
    lambda slow: slow.on_frame(wire.ClientFrame(id=1, subscribe=wire.Subscribe()), None),
])  # fmt: skip
async def test_an_opening_that_ends_after_its_id_was_given_up_says_nothing_more(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, ends: Callable[[Slow], None]
) -> None:
    """In the turn between the end of an id and what it left: nothing comes after the last frame of an id."""
    stream = connection.ConnectStream(cast(Any, raw.running.brokers[0]), cast(Any, raw.stream), cast(Any, None))
    sent: list[str | None] = []
    monkeypatch.setattr(stream, "send", lambda frame: sent.append(frame.WhichOneof("kind")))
    slow = Slow(stream, 1)
    slow.start_opening(wire.ClientFrame(id=1, subscribe=wire.Subscribe()))
    slow.on_frame(wire.ClientFrame(id=1, permits=3), None)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    slow.may_open.set_result(None)  # it goes on in the next turn, before the leaving
    ends(slow)
    await stream._leaving.drain()
    assert sent in (["closed"], ["done"])
    assert not slow.opened
    assert slow.left == 1
