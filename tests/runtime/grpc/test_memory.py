"""The memory that all callers of a process hold together: each byte is counted once and forgotten; it has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost, MagnetarError, Unauthenticated
from magnetar.runtime.access import Caller, CallerAccess, CallerLimits, ListenerAccess, Principal
from magnetar.runtime.budget import WINDOW_BYTES_MIN, ArrivingMessagesMemory, CallerMemory, MemoryBudget
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.config import measure_machine_memory
from magnetar.runtime.grpc.client import connect
from magnetar.runtime.grpc.messages import MessageStream, prefix
from magnetar.runtime.grpc.server import serve
from magnetar.runtime.network import CallContext, Channel, EndOfStream, Endpoint, Stream, find_rpc
from tests.compiled import derives

LOOKUP, CONNECT = find_rpc("Broker", "Lookup"), find_rpc("Broker", "Connect")
MIB = 1 << 20


class Broker:
    """Takes frames one envelope at a time, when `go` is set; answers each frame with `answer` bytes."""

    def __init__(self) -> None:
        self.go, self.answer, self.taken, self.called = asyncio.Event(), 0, 0, 0
        self.stream: Stream[Any, Any] | None = None
        self.ended = asyncio.Event()
        self.go.set()

    async def lookup(self, request: Any, context: CallContext) -> wire.LookupReply:
        self.called += 1
        await self.go.wait()
        return wire.LookupReply(owner="here")

    async def connect(self, stream: Any, context: CallContext) -> None:
        self.stream = stream
        try:
            while True:
                await self.go.wait()
                for frame in await stream.receive():
                    self.taken += len(frame.publish)
                    if self.answer:
                        stream.send_nowait(wire.ServerFrame(id=1, delivery=wire.Delivery(entry=bytes(self.answer))))
        except EndOfStream:
            pass
        finally:
            self.ended.set()


class Stranger:
    async def authenticate(self, caller: Caller) -> Principal:
        raise Unauthenticated("nobody knows you")

    def authorize(self, principal: Principal, path: str) -> None:
        pass


class Place:
    def __init__(self, memory: CallerMemory) -> None:
        self.memory, self.broker, self.ends = memory, Broker(), list[Any]()
        self.requests, self.answers = memory.requests, memory.answers

    async def dial(self, limits: CallerLimits | None = None, guard: Any = None) -> Channel:
        access = ListenerAccess(guard, limits=limits or CallerLimits(), memory=self.memory)
        serving = await serve(Endpoint("127.0.0.1", 0), [("Broker", self.broker)], access, SystemClock())
        channel = connect(serving.endpoint, CallerAccess())
        self.ends += [serving, channel]
        return channel

    async def nothing_is_held(self) -> None:
        arrivals = self.memory.arrivals
        await until(lambda: not self.requests.held + self.answers.held + arrivals.long)
        arrivals.check()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place(CallerMemory(16 * MIB))
    yield place
    place.broker.go.set()
    for end in reversed(place.ends):
        await end.close()
    assert (place.requests.held, place.answers.held) == (0, 0)
    assert (place.memory.arrivals.long, place.memory.arrivals.windows) == (0, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (the sockets have no event for it)
            await asyncio.sleep(0.01)


def publish(size: int) -> wire.ClientFrame:
    return wire.ClientFrame(id=1, publish=bytes(size))


async def test_who_waits_for_room_gets_it_in_turn_and_not_all_at_once() -> None:
    memory, came = MemoryBudget(100), list[int]()

    async def wait(number: int) -> None:
        await memory.wait_room()
        came.append(number)
        memory.held += 1000

    memory.held = 200
    waiting = [asyncio.create_task(wait(number)) for number in range(4)]
    await asyncio.sleep(0.1)
    assert came == []
    waiting[1].cancel()
    for expected in ([0], [0, 2], [0, 2, 3]):
        memory.held = 50
        await until(lambda: len(came) >= len(expected))  # noqa: B023 (it is awaited here)
        await asyncio.sleep(0.05)
        assert came == expected
    assert not memory._waiting


async def test_what_came_is_counted_until_it_was_handled_and_no_longer(place: Place) -> None:
    place.broker.go.clear()
    stream = (await place.dial()).stream(CONNECT)
    for _ in range(3):
        stream.send_nowait(publish(MIB))
    place.broker.go.set()
    await until(lambda: place.broker.taken >= 3 * MIB)
    await place.nothing_is_held()
    await stream.close()


async def test_many_that_send_their_most_at_once_hold_what_one_bound_says_and_all_is_taken(place: Place) -> None:
    place.broker.go.clear()
    arrivals, streams = place.memory.arrivals, list[Any]()
    for _ in range(40):
        streams.append((await place.dial()).stream(CONNECT))
        for size in (3 * MIB, 100 << 10, MIB, 10):
            streams[-1].send_nowait(publish(size))
    await until(lambda: len(arrivals._waiting) >= 10)
    await asyncio.sleep(0.3)
    assert arrivals.windows < 2 * MIB + 40 * WINDOW_BYTES_MIN, "40 whole windows would be 80 MiB"
    assert arrivals.long <= 3 * MIB + 1024, "a lone one, which is longer than the bound"
    place.broker.go.set()
    await until(lambda: place.broker.taken == 40 * (4 * MIB + (100 << 10) + 10))
    await place.nothing_is_held()
    for stream in streams:
        await stream.close()


class Read(MessageStream):
    """A stream that is read, with the smallest window."""

    def __init__(self, arrivals: ArrivingMessagesMemory) -> None:
        super().__init__(MIB, arrivals)
        self.came: list[int] = []
        self.over = False
        self.is_read, self.connection = True, self  # type: ignore[assignment]
        self.window = self

    def credit_stream(self, stream: MessageStream, size: int) -> None:
        pass

    def on_message(self, data: bytes | bytearray, cost: int) -> None:
        self.came.append(len(data))

    def on_input_ended(self) -> None:
        self.over = not self.must_defer_input_end()

    def on_arrival_too_slow(self) -> None:
        raise AssertionError("nothing is slow")


@derives
async def test_what_comes_after_a_message_that_waits_is_kept_and_so_is_the_end() -> None:
    arrivals = ArrivingMessagesMemory(100)
    first, second = Read(arrivals), Read(arrivals)
    first.on_data(memoryview(prefix(60_000) + bytes(30_000)))
    second.on_data(memoryview(prefix(40_000) + bytes(30_000)))
    second.on_data(memoryview(bytes(10_000) + prefix(3) + b"abc"))
    second.on_input_ended()
    assert (second.came, second.over, second.has_partial_message) == ([], False, True)
    first.on_data(memoryview(bytes(30_000)))
    assert (first.came, second.came) == ([60_000], []), "it is not read yet"
    first.on_service_read(60_005)
    assert (second.came, second.over, second.has_partial_message) == ([40_000, 3], True, False)
    second.on_service_read(40_008)
    assert arrivals.long == 0


@derives
async def test_a_stream_that_ends_within_a_second_message_that_waits_ends_after_that_has_a_place() -> None:
    arrivals = ArrivingMessagesMemory(100)
    first, second = Read(arrivals), Read(arrivals)
    first.on_data(memoryview(prefix(60_000) + bytes(30_000)))
    second.on_data(memoryview(prefix(40_000) + bytes(30_000)))
    second.on_data(memoryview(bytes(10_000) + prefix(50_000) + b"torn"))
    second.on_input_ended()
    first.on_data(memoryview(bytes(30_000)))
    first.on_service_read(60_005)
    assert (second.came, second.over) == ([40_000], False), "there is no room for the rest"
    second.on_service_read(40_005)
    assert (second.came, second.over, second.has_partial_message) == ([40_000], True, True)


async def test_above_the_limit_no_stream_is_read_and_below_it_all_go_on(place: Place) -> None:
    channel = await place.dial()
    place.requests.held = elsewhere = 8 * MIB + 1
    stream = channel.stream(CONNECT)
    for _ in range(30):
        stream.send_nowait(publish(MIB))
    with pytest.raises(MagnetarError):
        await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=0.3)
    assert (place.broker.taken, place.broker.called) == (0, 0)
    assert place.requests.held == elsewhere
    assert stream.queued_bytes > 2 * MIB, "it waits with its sender, and in gRPC"
    place.requests.held -= elsewhere
    await until(lambda: place.broker.taken >= 30 * MIB)
    reply = await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=10)
    assert reply.owner == "here"
    await stream.close()
    await place.nothing_is_held()


async def test_what_a_caller_does_not_read_is_counted_until_it_goes(place: Place) -> None:
    place.broker.answer = 100_000
    stream = (await place.dial()).stream(CONNECT)
    for _ in range(300):  # gRPC and the kernel take some mebibytes
        stream.send_nowait(publish(1))
    await until(lambda: place.broker.taken >= 300)
    assert place.answers.held > MIB
    stream.cancel()
    await place.broker.ended.wait()
    await place.nothing_is_held()


async def test_while_memory_is_tight_who_takes_nothing_is_cut_early_and_who_waits_for_little_is_not(
    place: Place, caplog: Any
) -> None:
    place.answers.tight = 30 * MIB
    channel = await place.dial(CallerLimits(first_frame_s=1, unread_s=600))
    quiet = channel.stream(CONNECT)
    quiet.send_nowait(publish(1))
    place.broker.answer = 100_000
    greedy = (await place.dial(CallerLimits(first_frame_s=1, unread_s=600))).stream(CONNECT)
    for _ in range(300):
        greedy.send_nowait(publish(1))
    await until(lambda: place.broker.taken >= 301)
    await asyncio.sleep(1.2)
    assert not place.broker.ended.is_set(), "there is room"
    place.answers.tight = 2 * MIB
    async with asyncio.timeout(30):
        await place.broker.ended.wait()
    assert "and memory is short" in caplog.text
    quiet.send_nowait(publish(1))
    assert await quiet.receive()
    greedy.cancel()
    quiet.cancel()


async def test_a_sender_that_may_wait_keeps_little_while_memory_is_tight(place: Place) -> None:
    stream = (await place.dial()).stream(CONNECT)
    stream.send_nowait(publish(1))
    await until(lambda: place.broker.taken >= 1)
    place.answers.held = elsewhere = 5 * MIB
    server = place.broker.stream
    assert server is not None
    reply = wire.ServerFrame(id=1, delivery=wire.Delivery(entry=bytes(50_000)))
    sending = asyncio.create_task(_send(server, reply, 200))
    await asyncio.sleep(0.5)
    assert not sending.done()
    assert server.queued_bytes < 3 * MIB, "an envelope that is being written, and little more"
    place.answers.held -= elsewhere
    stream.cancel()
    with pytest.raises(ConnectionLost):
        await sending


async def _send(stream: Stream[Any, Any], item: Any, count: int) -> None:
    for _ in range(count):
        await stream.send(item)


async def test_a_unary_request_is_counted_while_it_is_handled(place: Place) -> None:
    place.broker.go.clear()
    channel = await place.dial()
    topic = "t" * 100_000
    calls = [asyncio.create_task(channel.call(LOOKUP, wire.LookupRequest(topic=topic), timeout_s=20)) for _ in range(5)]
    await until(lambda: place.broker.called >= 5)
    assert 500_000 < place.requests.held < 600_000
    place.broker.go.set()
    await asyncio.gather(*calls)
    await place.nothing_is_held()


async def test_a_unary_request_that_does_not_come_in_time_ends_its_call(place: Place) -> None:
    channel = await place.dial(CallerLimits(first_frame_s=0.2))
    async with grpc.aio.insecure_channel(str(channel.endpoint)) as reference:
        with pytest.raises(grpc.aio.AioRpcError, match="did not come within"):
            await reference.stream_unary(LOOKUP.path)()
    assert place.broker.called == 0


async def test_calls_that_are_reset_before_their_request_leave_nothing_and_log_no_fault(
    place: Place, caplog: Any
) -> None:
    channel = await place.dial()
    async with grpc.aio.insecure_channel(str(channel.endpoint)) as reference:
        make = reference.stream_unary(LOOKUP.path)
        for number in range(200):
            call = make()
            await asyncio.sleep(0.001 * (number % 3))
            call.cancel()
    assert (await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=10)).owner == "here"
    await place.nothing_is_held()
    assert place.broker.called == 1
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_stranger_is_refused_before_its_unary_request_is_there(place: Place) -> None:
    channel = await place.dial(guard=Stranger())
    async with grpc.aio.insecure_channel(str(channel.endpoint)) as reference:
        with pytest.raises(grpc.aio.AioRpcError, match="nobody knows you"):
            await reference.stream_unary(LOOKUP.path)()  # sends the header alone


def test_the_memory_of_this_machine_is_known() -> None:
    assert 64 * MIB < measure_machine_memory() < 1 << 50
