"""Permits are conserved: the broker's dispatcher and the client's count in one walk; torn entries; redeliveries."""

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState, bits_of_indexes
from magnetar.broker.subscription.core.dispatch import Delivery, Dispatcher, PlannedRead
from magnetar.broker.subscription.core.policy import Member
from magnetar.client.client import Client
from magnetar.client.common.errors import ChecksumError
from magnetar.client.core.redelivery import ReceivePermits
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_batch, encode_plain_items
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.names import Position
from magnetar.proto.states import Blocked
from tests.broker.subscription.core.shapes import Item, policy_of
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate
from tests.support.cluster import TestProducer, cluster

TOPIC = "persistent://public/default/permits"
QUEUE = 10


def torn(sequence_id: int, declared: int) -> bytes:
    """A batch with a valid checksum that declares more messages than it has."""
    metadata = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1000)
    return encode_batch(metadata, encode_plain_items([b"x" * 6 * declared]), declared)


# ------------------------------------------------------------------------------------------------ both cores
class Walk:
    """One consumer and its broker; what is on its way between them waits in two queues."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.choice([1, 2, 10, 50])
        self.shape = LogShape()
        self.shape.add(LedgerSpan(1, 0, open=True))
        self.items: dict[Position, Item] = {}
        self.cursor = Cursor(self.shape, CursorState(self.shape.start_position))
        self.dispatcher = Dispatcher(self.shape, self.cursor, policy_of(wire.Subscribe.SHARED))
        self.down: deque[Delivery] = deque()
        self.up: deque[int] = deque()
        self.queue: list[tuple[Position, int]] = []  # (entry, permits that it gives back)
        self.taken: list[Position] = []
        self.permits = ReceivePermits(self.size, nullcontext())
        self.connect()

    def connect(self) -> None:
        """A new stream: what was on its way on the last one is gone, on both sides."""
        for member in list(self.dispatcher.members.values()):
            self.dispatcher.leave(member)
        self.member = Member(len(self.items) + self.rng.randrange(1 << 30), "c")
        self.dispatcher.join(self.member)
        self.down.clear()
        self.up.clear()
        self.queue.clear()
        self.taken.clear()
        self.up.append(self.permits.reset_for_new_stream())

    def run(self, steps: int) -> None:
        actions = [self.grow, self.pump, self.pump, self.receive, self.receive, self.take, self.take, self.granted,
                   self.ack, self.ack_part, self.nack, self.throw_away]  # fmt: skip
        for _ in range(steps):
            self.rng.choice(actions)() if self.rng.random() < 0.99 else self.connect()
            self.check()

    def check(self) -> None:
        self.permits.check()
        self.dispatcher.check()
        in_flight = sum(each.entry.count - len(each.acked_indexes) for each in self.down)
        assert self.permits.at_broker == self.member.permits + in_flight + sum(self.up), "the two sides differ"
        assert self.member.permits <= self.size, "the broker may send more than the queue holds"

    def grow(self) -> None:
        tail, count = self.shape.tail_span, self.rng.choice([1, 1, 3, 30])
        tail.last_entry, tail.end_index = tail.last_entry + 1, tail.end_index + count
        position = Position(1, tail.last_entry)
        self.items[position] = Item(position, count)

    def pump(self) -> None:
        want = self.dispatcher.choose_next_read()
        if not isinstance(want, Blocked):
            positions = [want.position] if isinstance(want, PlannedRead) else list(want.positions)
            self.down.extend(
                self.dispatcher.assign_entries([self.items[each] for each in positions if each in self.items])
            )

    def receive(self) -> None:
        if self.down:
            _, entry, _, acked = self.down.popleft()
            charged = entry.count - len(acked)
            self.permits.count_received(charged)
            if self.rng.random() < 0.2:
                self.give_back(charged)  # a filter, or a chunk: the application does not see it
            else:
                self.queue.append((entry.position, charged))

    def take(self) -> None:
        if self.queue:
            position, charged = self.queue.pop(0)
            self.taken.append(position)
            self.give_back(charged)

    def throw_away(self) -> None:
        """All of it comes again."""
        freed, self.queue = sum(charged for _, charged in self.queue), []
        self.give_back(freed)
        self.dispatcher.redeliver(self.member, None)

    def give_back(self, charged: int) -> None:
        self.permits.count_used_permits(charged, self.permits.stream)
        if granted := self.permits.grant():
            self.up.append(granted)

    def granted(self) -> None:
        if self.up:
            self.dispatcher.grant_permits(self.member, self.up.popleft())

    def some(self) -> Position | None:
        held = list(self.member.outstanding)
        return self.rng.choice(held) if held else None

    def ack(self) -> None:
        if (position := self.some()) and self.cursor.ack(position):
            self.dispatcher.on_acked(self.member, position)

    def ack_part(self) -> None:
        position = self.some()
        if position is not None and (count := self.items[position].count) > 1:
            before = self.cursor.acked_message_count(position)
            if self.cursor.ack_messages_of_batch(position, bits_of_indexes([self.rng.randrange(count)]), count):
                self.dispatcher.on_acked(self.member, position)
            else:
                self.dispatcher.on_messages_acked(
                    self.member, position, self.cursor.acked_message_count(position) - before
                )

    def nack(self) -> None:
        if position := self.some():
            self.dispatcher.redeliver(self.member, [position])


def test_permits_are_neither_lost_nor_made_whatever_happens(walks: Callable[[int], range]) -> None:
    for seed in walks(52):
        walk = Walk(seed)
        try:
            walk.run(400)
        except AssertionError as error:
            raise AssertionError(f"Walk({seed}).run(400): {error}") from error


# ------------------------------------------------------------------------------------------------ the client
@pytest.mark.run_by.with_args(simulate)
async def test_twenty_redeliveries_of_what_is_acknowledged_in_part_make_no_permits(
    client: Client, broker: FakeBroker, /
) -> None:
    consumer = await client.subscribe(
        "t", "s", initial_position=InitialPosition.Earliest, consumer_type=ConsumerType.Shared,
        receiver_queue_size=QUEUE, batch_index_ack_enabled=True,
    )  # fmt: skip
    producer = await client.create_producer("t", batching_max_messages=1000, batching_max_publish_delay_ms=50)
    pending = [producer.send_nowait(b"%d" % number) for number in range(1000)]
    await producer.flush()
    assert len(pending) == 1000
    messages = [await consumer.receive() for _ in range(1000)]
    for message in messages[:-1]:
        await consumer.acknowledge(message)
    for _ in range(20):
        redelivering: Any = consumer.redeliver_unacknowledged_messages()
        if redelivering is not None:
            await redelivering
        assert (await consumer.receive()).data() == b"999"
    (fake,) = broker.topics["persistent://public/default/t"].subscriptions["s"].consumers
    assert fake.permits <= QUEUE


# ------------------------------------------------------------------------------------------------ the whole
@pytest.mark.parametrize("type_", [ConsumerType.Exclusive, ConsumerType.Shared], ids=["exclusive", "shared"])
async def test_a_torn_batch_with_a_valid_checksum_stalls_nobody(tmp_path: Path, type_: ConsumerType) -> None:
    async with cluster(tmp_path) as running:
        producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
        producer.frame(publish=torn(0, 1000))
        await producer.next("receipt")
        producer.sequence_id = 1000
        for number in range(50):
            await producer.send(b"%d" % number)
        client = Client(f"magnetar://{running.brokers[0].endpoint}")
        try:
            consumer = await client.subscribe(
                TOPIC, "s", initial_position=InitialPosition.Earliest, consumer_type=type_, receiver_queue_size=QUEUE
            )
            with pytest.raises(ChecksumError):
                await consumer.receive(timeout_millis=10_000)
            for number in range(50):
                assert (await consumer.receive(timeout_millis=10_000)).data() == b"%d" % number
            (member,) = running.brokers[0].topics[TOPIC].find_subscription("s").dispatcher.members.values()
            assert member.permits <= QUEUE
        finally:
            await client.close()
