"""Frames that come twice, or after the broker gave their id up, change nothing: also half a minute later.

A broker says `closed` for an id, and again when a frame of that id reaches it (broker/grpc/connection.py):
both may be in one read. Whatever follows `closed` in that read is of an id that is over.
"""

import asyncio
import itertools
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import InitialPosition
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost, NotOwner, Unavailable, to_wire
from tests.client.fake_broker import FakeBroker, FakeConsumer, FakeProducer
from tests.client.simulated import simulate

AFTER: dict[str, dict[str, Any]] = {
    "closed": {"closed": to_wire(ConnectionLost("id 1 is closed"))},
    "closed by another": {"closed": to_wire(NotOwner("it is elsewhere"))},
    "subscribed": {"subscribed": wire.Subscribed(consumer_name="again")},
    "producer_opened": {"producer_opened": wire.ProducerOpened(
        producer_name="again", last_sequence_id=99, max_message_size=10, credit=10
    )},
    "delivery": {"delivery": wire.Delivery(ledger_id=1, entry_id=1, entry=b"none")},
    "deliveries": {"deliveries": wire.Deliveries(ledger_id=1, entry_ids=[1], entries=[b"none"])},
    "receipt": {"receipt": wire.Receipt(sequence_id=99, ledger_id=1, entry_id=1)},
    "failed": {"failed": wire.PublishFailed(sequence_id=99, error=to_wire(Unavailable("late")))},
    "credit": {"credit": 1 << 40},
    "done": {"done": wire.Done(request_id=1)},
    "last": {"last": wire.LastMessageId(request_id=1)},
    "active": {"active": False},
    "end_of_topic": {"end_of_topic": wire.Empty()},
    "none": {},
}  # fmt: skip
EVERY = [*itertools.product(AFTER, repeat=1), *itertools.product(AFTER, repeat=2)]


class Repeating(FakeBroker):
    """`after`: what it says of each id in the turn in which it gave it up."""

    def __init__(self) -> None:
        super().__init__()
        self.after: tuple[str, ...] = ()
        self.owners: list[FakeProducer | FakeConsumer] = []

    def _open(self, stream: Any, frame: Any, owners: dict[int, FakeProducer | FakeConsumer]) -> None:
        super()._open(stream, frame, owners)
        self.owners += [owners[frame.id]] if frame.id in owners else []

    def unload(self) -> None:
        said, self.owners = self.owners, []
        self.give_up(NotOwner("the topic is unloaded"))
        for owner in said:
            for kind in self.after:
                owner.say(**AFTER[kind])


@pytest.mark.parametrize("some", [EVERY[at::8] for at in range(8)], ids=range(8))
def test_what_follows_the_end_of_an_id_in_one_read_ends_nothing(some: list[tuple[str, ...]]) -> None:
    """Each client of the SDK publishes and receives as before, after a virtual minute, through one connection each."""
    async def body(client: Client, broker: FakeBroker) -> None:
        assert isinstance(broker, Repeating)
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest, consumer_name="mine")
        reader = await client.create_reader("t", MessageId.earliest)
        producer = await client.create_producer("t", producer_name="p")
        for number, after in enumerate(some):
            broker.after = after
            broker.unload()
            await asyncio.sleep(60)
            data = b"%d" % number
            await producer.send(data)
            received = await consumer.receive(60_000)
            assert received.data() == data, after
            await consumer.acknowledge(received)
            assert (await reader.read_next(60_000)).data() == data, after
            assert producer.producer_name() == "p", after
            assert len(broker.owners) == 3, f"{after}: each opened once"
        consumer.check()

    simulate(body, Repeating())
