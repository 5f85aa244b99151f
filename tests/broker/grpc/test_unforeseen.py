"""What fails unforeseen beside a consumer's stream is told to the consumer: it never waits for ever."""

import asyncio

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InternalError, MagnetarError
from tests.broker.node.test_giving_back import Deployment


async def _fails() -> None:
    raise ValueError("unforeseen")


async def test_a_consumer_whose_full_queue_fails_unforeseen_is_told_and_leaves() -> None:
    deployment = Deployment(wire.Subscribe.SHARED)
    consumer, outlet = deployment.join(1)
    told: list[MagnetarError] = []
    outlet.wait_drained, outlet.on_closed = _fails, told.append  # type: ignore[attr-defined]
    deployment.subscription.pump._pause(consumer)
    waiting = consumer.waiting
    assert waiting is not None
    await asyncio.wait((waiting,))
    assert [type(each) for each in told] == [InternalError]
    assert not deployment.subscription.consumers
