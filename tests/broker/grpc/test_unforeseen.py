"""What fails unforeseen beside a consumer's stream is told to the consumer: it never waits for ever."""

import asyncio

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InternalError, MagnetarError
from tests.broker.node.test_giving_back import ENTRIES, Deployment


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


async def test_what_fails_at_one_consumer_keeps_nothing_from_the_others_and_what_it_was_to_get_comes_to_them() -> None:
    deployment = Deployment(wire.Subscribe.SHARED)
    told: list[MagnetarError] = []

    def deliver(deliveries: object) -> bool:
        raise ValueError("unforeseen")

    _, failing = deployment.join(1, 500)
    failing.deliver, failing.on_closed = deliver, told.append  # type: ignore[method-assign, attr-defined]
    _, other = deployment.join(2)
    await deployment.quiet()
    await asyncio.sleep(0)
    await deployment.quiet()
    assert [type(each) for each in told] == [InternalError]
    assert sorted(other.came) == list(range(ENTRIES))
