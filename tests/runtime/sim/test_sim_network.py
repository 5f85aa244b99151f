"""The simulated network keeps the promises of runtime/network.py, and breaks what a network may break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from magnetar.proto import errors
from magnetar.proto import wire_pb2 as wire
from magnetar.runtime.network import ByteStream, CallContext, EndOfStream, Endpoint, PeerRequest, find_rpc
from magnetar.runtime.sim.wires import ConnectionEnd
from magnetar.runtime.sim.world import Simulation
from tests.support.byte_streams import read

ANY = Endpoint("127.0.0.1", 0)
SERVER_ID = bytes(range(16))
LOOKUP = find_rpc("Broker", "Lookup")
CONNECT = find_rpc("Broker", "Connect")


class EchoBroker:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def lookup(self, request: wire.LookupRequest, context: CallContext) -> wire.LookupReply:
        self.seen.append(request.topic)
        if request.topic == "missing":
            raise errors.TopicNotFound("no such topic", topic="missing")
        if request.topic == "slow":
            try:
                await asyncio.sleep(50)
                self.seen.append("to its end")
            except asyncio.CancelledError:
                self.seen.append("cancelled")
                raise
        return wire.LookupReply(owner=context.peer, here=True)

    async def connect(self, stream: Any, context: CallContext) -> None:
        while True:
            try:
                items = await stream.receive()
            except errors.ConnectionLost:
                self.seen.append("lost")
                raise
            self.seen.append(f"items {len(items)}")
            for item in items:
                if item.publish == b"fail":
                    raise errors.ProducerBusy("another one")
                stream.send_nowait(wire.ServerFrame(receipt=wire.Receipt(sequence_id=int(item.publish))))


async def start_broker(simulation: Simulation, broker: EchoBroker) -> Endpoint:
    async def start() -> Endpoint:
        return (await simulation.world("server").network.serve(ANY, [("Broker", broker)])).endpoint

    return await simulation.spawn("server", start())


async def start_peers(simulation: Simulation, service: Any) -> Endpoint:
    async def start() -> Endpoint:
        return (await simulation.world("server").network.serve_peers(ANY, SERVER_ID, service)).endpoint

    return await simulation.spawn("server", start())


def echo(requests: Sequence[PeerRequest]) -> None:
    for request in requests:
        request.reply(request.head, request.frames)


def publish(number: int) -> wire.ClientFrame:
    return wire.ClientFrame(publish=str(number).encode())


def test_calls_answer_translate_errors_and_keep_deadlines() -> None:
    simulation = Simulation(1)
    broker = EchoBroker()

    async def main() -> None:
        channel = simulation.world("client").network.connect(await start_broker(simulation, broker))
        reply = await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=5)
        assert reply.here
        with pytest.raises(errors.TopicNotFound) as caught:
            await channel.call(LOOKUP, wire.LookupRequest(topic="missing"), timeout_s=5)
        assert caught.value.fields == {"topic": "missing"}
        with pytest.raises(errors.TimedOut):
            await channel.call(LOOKUP, wire.LookupRequest(topic="slow"), timeout_s=5)
        await asyncio.sleep(50)
        assert broker.seen[-1] == "to its end"
        with pytest.raises(errors.WrongProtocol):
            await channel.call(find_rpc("Broker", "Offsets"), wire.OffsetsRequest(), timeout_s=5)
        await channel.close()
        nobody = simulation.world("client").network.connect(Endpoint("127.0.0.1", 1))
        with pytest.raises(errors.Unavailable):
            await nobody.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=5)

    simulation.run(main())
    assert simulation.complaints == []


def test_a_stream_coalesces_keeps_order_and_ends_in_order() -> None:
    simulation = Simulation(2)
    broker = EchoBroker()

    async def main() -> None:
        channel = simulation.world("client").network.connect(await start_broker(simulation, broker))
        stream = channel.stream(CONNECT)
        for number in range(1000):
            stream.send_nowait(publish(number))
        got: list[int] = []
        while len(got) < 1000:
            got += [item.receipt.sequence_id for item in await stream.receive()]
        assert got == list(range(1000))
        assert broker.seen == ["items 1000"]
        await stream.close()
        with pytest.raises(EndOfStream):
            await stream.receive()
        with pytest.raises(errors.ConnectionLost):
            stream.send_nowait(publish(1))

    simulation.run(main())
    assert simulation.complaints == []


def test_a_stream_waits_for_a_reader_that_does_not_read() -> None:
    simulation = Simulation(2)

    class Deaf:
        async def connect(self, stream: Any, context: CallContext) -> None:
            await asyncio.sleep(1e6)

    async def main() -> None:
        channel = simulation.world("client").network.connect(await start_broker(simulation, Deaf()))  # type: ignore[arg-type]
        stream = channel.stream(CONNECT)
        item = wire.ClientFrame(publish=bytes(1 << 20))

        async def flood() -> None:
            for _ in range(100):
                await stream.send(item)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(), timeout=100)
        assert 8 << 20 < stream.queued_bytes < 11 << 20

    simulation.run(main())


def test_a_crash_and_a_cut_break_streams_at_both_ends() -> None:
    simulation = Simulation(4)
    broker = EchoBroker()

    async def main() -> None:
        channel = simulation.world("client").network.connect(await start_broker(simulation, broker))
        stream = channel.stream(CONNECT)
        stream.send_nowait(publish(1))
        await stream.receive()
        assert simulation.wires.cut_connections("client", "server") == 1
        with pytest.raises(errors.ConnectionLost):
            await stream.receive()
        await asyncio.sleep(2)
        assert broker.seen[-1] == "lost"
        stream = channel.stream(CONNECT)  # remade
        stream.send_nowait(publish(2))
        await stream.receive()
        simulation.crash("server")
        with pytest.raises(errors.ConnectionLost):
            await stream.receive()
        with pytest.raises(errors.Unavailable):
            await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=5)

    simulation.run(main())
    assert simulation.complaints == []


def test_peers_answer_in_one_envelope_per_turn_and_check_identity() -> None:
    simulation = Simulation(5)
    turns: list[int] = []

    def service(requests: Sequence[PeerRequest]) -> None:
        turns.append(len(requests))
        echo(requests)

    async def main() -> None:
        endpoint = await start_peers(simulation, service)
        network = simulation.world("client").network
        peer = network.connect_peer(endpoint, SERVER_ID)
        big = bytes(10_000)
        replies = await asyncio.gather(
            *(peer.request(b"h%d" % number, [b"small", big], timeout_s=5) for number in range(50))
        )
        assert [bytes(reply.head) for reply in replies] == [b"h%d" % number for number in range(50)]
        assert [bytes(frame) for frame in replies[0].frames] == [b"small", big]
        assert turns == [50]
        with pytest.raises(errors.WrongIdentity):
            await network.connect_peer(endpoint, bytes(16)).request(b"", timeout_s=5)
        with pytest.raises(errors.ConnectionLost):
            await network.connect_peer(Endpoint("127.0.0.1", 1), SERVER_ID).request(b"", timeout_s=5)
        await peer.close()
        with pytest.raises(errors.ConnectionLost):
            await peer.request(b"", timeout_s=5)

    simulation.run(main())
    assert simulation.complaints == []


def test_a_lost_frame_is_a_timeout_and_a_dead_server_a_lost_connection() -> None:
    simulation = Simulation(6)

    async def main() -> None:
        endpoint = await start_peers(simulation, echo)
        peer = simulation.world("client").network.connect_peer(endpoint, SERVER_ID)
        await peer.request(b"1", timeout_s=1)
        simulation.wires.faults.drop_rate = 1.0
        with pytest.raises(errors.TimedOut):
            await peer.request(b"2", timeout_s=1)
        simulation.wires.faults.drop_rate = 0.0
        await peer.request(b"3", timeout_s=1)
        simulation.crash("server")
        with pytest.raises(errors.ConnectionLost):
            await peer.request(b"4", timeout_s=1)

    simulation.run(main())


def test_a_partition_holds_what_is_sent_until_it_heals() -> None:
    simulation = Simulation(7)
    broker = EchoBroker()

    async def main() -> None:
        channel = simulation.world("client").network.connect(await start_broker(simulation, broker))
        await channel.call(LOOKUP, wire.LookupRequest(topic="a"), timeout_s=1)
        simulation.wires.partition_nodes("server", "client", both=False)
        with pytest.raises(errors.TimedOut):
            await channel.call(LOOKUP, wire.LookupRequest(topic="b"), timeout_s=1)
        assert broker.seen[-1] == "b"  # it arrived: unknown is not failed
        simulation.wires.partition_nodes("server", "client")
        call = asyncio.create_task(channel.call(LOOKUP, wire.LookupRequest(topic="c"), timeout_s=10))
        await asyncio.sleep(5)
        assert broker.seen[-1] == "b"
        simulation.wires.heal_partition()
        assert (await call).here

    simulation.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_what_is_on_its_way_when_a_partition_heals_does_not_pass_what_waited(seed: int) -> None:
    simulation = Simulation(seed)

    async def main() -> list[int]:
        channel = simulation.world("client").network.connect(await start_broker(simulation, EchoBroker()))
        stream = channel.stream(CONNECT)
        await asyncio.sleep(1)
        simulation.wires.partition_nodes("server", "client")
        for number in range(40):
            stream.send_nowait(wire.ClientFrame(publish=b"%d" % number))
            await asyncio.sleep(0 if number % 4 else 0.0001)
        simulation.wires.heal_partition()
        answered: list[int] = []
        while len(answered) < 40:
            answered += [reply.receipt.sequence_id for reply in await stream.receive()]
        stream.cancel()
        return answered

    assert simulation.run(main()) == list(range(40))


def test_a_taken_port_is_busy_until_its_process_dies() -> None:
    simulation = Simulation(8)

    async def main() -> None:
        endpoint = await start_peers(simulation, echo)
        with pytest.raises(errors.Busy):
            await simulation.world("other").network.serve_peers(endpoint, SERVER_ID, echo)
        simulation.crash("server")
        await simulation.world("other").network.serve_peers(endpoint, SERVER_ID, echo)

    simulation.run(main())


def test_a_tcp_connection_that_arrives_while_its_listener_closes_is_closed() -> None:
    simulation = Simulation(9)

    async def serve(stream: ByteStream) -> None:
        await read(stream)

    async def main() -> None:
        server, client = simulation.world("server"), simulation.world("client")
        serving = await server.network.serve_bytes(Endpoint("server", 0), serve)
        accept = serving.accept  # type: ignore[attr-defined]

        def accept_late(end: ConnectionEnd) -> None:
            late.append(asyncio.create_task(serving.close()))
            late.append(asyncio.get_running_loop().call_later(0.001, accept, end))

        late: list[object] = []
        monkeypatch.setattr(serving, "accept", accept_late)
        stream = await client.network.connect_bytes(serving.endpoint)
        assert await read(stream) == b""

    with pytest.MonkeyPatch.context() as monkeypatch:
        simulation.run(main())
    assert not simulation.complaints


Fault = Callable[[Simulation], None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("fault", "is_end"),
    [
        (lambda simulation: simulation.wires.cut_connections("server", "client"), False),
        (lambda simulation: simulation.wires.make_half_open("server", "client", 3), False),
        (lambda simulation: simulation.crash("server", power_loss=True), False),
        (lambda simulation: simulation.crash("server"), True),
    ],
    ids=["cut", "half open", "power", "killed"],
)
def test_a_reader_of_bytes_tells_a_lost_connection_from_one_that_was_closed(
    seed: int, fault: Fault, is_end: bool
) -> None:
    simulation = Simulation(seed)

    async def serve(stream: ByteStream) -> None:
        stream.write_nowait(await read(stream))
        await asyncio.sleep(1e6)

    async def start() -> Endpoint:
        return (await simulation.world("server").network.serve_bytes(Endpoint("server", 0), serve)).endpoint

    async def main() -> None:
        stream = await simulation.world("client").network.connect_bytes(await simulation.spawn("server", start()))
        stream.write_nowait(b"first")
        assert await read(stream) == b"first"
        fault(simulation)
        for _ in range(2):
            if is_end:
                assert await read(stream) == b""
            else:
                with pytest.raises(errors.ConnectionLost):
                    await read(stream)

    simulation.run(main())


def test_an_end_before_which_bytes_were_lost_is_a_lost_connection() -> None:
    simulation = Simulation(4)

    async def serve(stream: ByteStream) -> None:
        await read(stream)
        stream.write_nowait(b"it does not arrive")

    async def start() -> Endpoint:
        return (await simulation.world("server").network.serve_bytes(Endpoint("server", 0), serve)).endpoint

    async def main() -> None:
        stream = await simulation.world("client").network.connect_bytes(await simulation.spawn("server", start()))
        simulation.wires.partition_nodes("server", "client", both=False)
        stream.write_nowait(b"?")
        with pytest.raises(errors.ConnectionLost):
            await read(stream)

    simulation.run(main())
