"""The stream that all producers and consumers of a client share: by id, in fair order, and each is told of its end."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from magnetar.client.connect.broker_stream import IDLE_STREAM_S, QUEUE_BY_ID_BYTES, BrokerStream
from magnetar.client.connect.discovery import SilentBrokerTracker
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost, MagnetarError
from magnetar.proto.names import TopicName
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.world import Simulation


async def not_asked(asked: Endpoint, topic: TopicName) -> Endpoint:
    raise AssertionError("there is one broker")


class Owner:
    topic = TopicName.parse("t")

    def __init__(self, fault: Exception | None = None) -> None:
        self.credits: list[int] = []
        self.reads = 0
        self.ends: list[MagnetarError] = []
        self.faults: list[Exception] = []
        self._fault = fault

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None:
        self.reads += 1
        if self._fault is not None:
            raise self._fault
        self.credits += [frame.credit for frame in frames]

    def on_lost(self, error: MagnetarError) -> None:
        self.ends.append(error)

    def on_failure(self, error: Exception) -> None:
        self.faults.append(error)


class Broker:
    """Notes what comes, by envelope; answers a `permits` with so much credit."""

    def __init__(self) -> None:
        self.envelopes: list[list[tuple[int, int]]] = []  # (id, permits or bytes)
        self.stream: Any = None

    async def connect(self, stream: Any, context: Any) -> None:
        self.stream = stream
        while True:
            frames = await stream.receive()
            self.envelopes.append([(frame.id, frame.permits or len(frame.publish)) for frame in frames])
            for frame in frames:
                if frame.permits:
                    stream.send_nowait(wire.ServerFrame(id=frame.id, credit=frame.permits))


def simulate(body: Any) -> None:
    simulation = Simulation(1)

    async def main() -> None:
        broker = Broker()
        serving = await simulation.spawn(
            "broker", simulation.world("broker").network.serve(Endpoint("broker", 1), [("Broker", broker)])
        )
        assert serving is not None

        async def client() -> None:
            ended: list[bool] = []
            world = simulation.world("client")
            channel, now = world.network.connect(Endpoint("broker", 1)), world.clock.monotonic
            silence = SilentBrokerTracker(now, lambda: [channel.endpoint], not_asked)
            stream = BrokerStream(channel, now, lambda: ended.append(True), silence)
            await body(stream, broker, ended)
            await stream.close()
            assert ended == [True], "told once"

        await simulation.spawn("client", client())

    simulation.run(main())


pytestmark = pytest.mark.run_by.with_args(simulate)


def permits(id_: int, count: int) -> wire.ClientFrame:
    return wire.ClientFrame(id=id_, permits=count)


async def test_frames_of_one_turn_leave_together_and_reach_their_owners_by_id(
    stream: BrokerStream, broker: Broker, ended: list[bool], /
) -> None:
    owners = [Owner() for _ in range(50)]
    ids = [stream.attach(owner) for owner in owners]
    assert ids == list(range(1, 51)), "ids ascend from 1"
    for count in (1, 2):
        for id_ in ids:
            stream.send(id_, permits(id_, 100 * count + id_))
    await asyncio.sleep(1)
    assert len(broker.envelopes) == 1
    assert [owner.credits for owner in owners] == [[100 + id_, 200 + id_] for id_ in ids]
    assert {owner.reads for owner in owners} == {1}, "an owner gets all of its frames at once"


async def test_a_flood_of_one_id_does_not_hold_the_others_up(
    stream: BrokerStream, broker: Broker, ended: list[bool], /
) -> None:
    flood, other = stream.attach(Owner()), stream.attach(Owner())
    for _ in range(400):
        stream.send(flood, wire.ClientFrame(id=flood, publish=bytes(128 << 10)))
    for _ in range(3):
        stream.send(other, wire.ClientFrame(id=other, publish=b"x"))
    await asyncio.sleep(20)
    came = [each for envelope in broker.envelopes for each in envelope]
    assert [id_ for id_, _ in came].count(flood) == 400
    before = [at for at, (id_, _) in enumerate(came) if id_ == other]
    assert len(before) == 3
    assert before[-1] <= 2 * QUEUE_BY_ID_BYTES // (128 << 10), "they wait for what leaves at once, and no more"


async def test_when_the_stream_breaks_each_owner_is_told_once(
    stream: BrokerStream, broker: Broker, ended: list[bool], /
) -> None:
    owners = [Owner() for _ in range(5)]
    ids = [stream.attach(owner) for owner in owners]
    stream.detach(ids[0])
    stream.send(ids[1], permits(ids[1], 1))
    await asyncio.sleep(1)
    broker.stream.cancel()
    await asyncio.sleep(1)
    assert stream.has_ended
    assert not owners[0].ends
    assert [[type(each) for each in owner.ends] for owner in owners[1:]] == [[ConnectionLost]] * 4
    stream.send(ids[1], permits(ids[1], 1))  # nothing happens


async def test_an_owner_that_fails_does_not_end_the_stream_for_the_others(
    stream: BrokerStream, broker: Broker, ended: list[bool], /
) -> None:
    bad, good = Owner(RuntimeError("on purpose")), Owner()
    for owner in (bad, good):
        id_ = stream.attach(owner)
        stream.send(id_, permits(id_, 7))
    await asyncio.sleep(1)
    assert [str(each) for each in bad.faults] == ["on purpose"]
    assert good.credits == [7]
    assert not stream.has_ended


@pytest.mark.parametrize("again", [False, True])
async def test_a_stream_without_owners_closes_after_a_while(
    stream: BrokerStream, broker: Broker, ended: list[bool], /, again: bool
) -> None:
    stream.detach(stream.attach(Owner()))
    await asyncio.sleep(IDLE_STREAM_S - 1)
    if again:
        stream.attach(Owner())
    await asyncio.sleep(2)
    assert stream.has_ended is not again


