"""gRPC calls and streams, over loopback, on both event loops: what `runtime/network.py` promises of a Channel."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.checksum import encode_varint
from magnetar.proto.errors import (
    BadVersion,
    Busy,
    ConnectionLost,
    InternalError,
    MagnetarError,
    MessageTooLarge,
    TimedOut,
    TopicNotFound,
    Unavailable,
    WrongProtocol,
)
from magnetar.runtime.access import OPEN_ACCESS, CallerAccess, ListenerAccess
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc import client
from magnetar.runtime.grpc.client import GrpcChannel, connect
from magnetar.runtime.grpc.server import RunningGrpcServer, serve
from magnetar.runtime.grpc.stream import GrpcStream
from magnetar.runtime.network import (
    COALESCE_BYTES,
    MESSAGE_BYTES_MAX,
    STREAM_QUEUE_BYTES,
    CallContext,
    EndOfStream,
    Endpoint,
    find_rpc,
)
from tests.compiled import replaces_code
from tests.support.certificates import Authority
from tests.support.steps import WorkTimer, measured, slowness

LOCAL = Endpoint("127.0.0.1", 0)
LOOKUP = find_rpc("Broker", "Lookup")
CONNECT = find_rpc("Broker", "Connect")
SOON_S = 30.0  # a bound for the test, not a time it measures

Lookup = Callable[[Any, CallContext], Awaitable[Any]]
Connect = Callable[[Any, CallContext], Awaitable[None]]


class Handler:
    """A Broker service with the two methods of a test."""

    def __init__(self, lookup: Lookup | None = None, connect: Connect | None = None) -> None:
        if lookup is not None:
            self.lookup = lookup
        if connect is not None:
            self.connect = connect


class Bench:
    def __init__(self) -> None:
        self.ends: list[GrpcChannel | RunningGrpcServer] = []

    async def serve(self, lookup: Lookup | None = None, connect: Connect | None = None) -> RunningGrpcServer:
        serving = await serve(LOCAL, [("Broker", Handler(lookup, connect))], OPEN_ACCESS, SystemClock())
        self.ends.append(serving)
        return serving

    def connect(self, endpoint: Endpoint) -> GrpcChannel:
        channel = connect(endpoint)
        self.ends.append(channel)
        return channel


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for end in reversed(bench.ends):
        await end.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 (the sockets have no event for it)
            await asyncio.sleep(0.001)


def publish(size: int) -> wire.ClientFrame:
    return wire.ClientFrame(publish=bytes(size))


def receipt(sequence_id: int) -> wire.ServerFrame:
    return wire.ServerFrame(receipt=wire.Receipt(sequence_id=sequence_id))


async def count_each(stream: Any, context: CallContext) -> None:
    """Answers each item with the size of its payload."""
    try:
        while True:
            for item in await stream.receive():
                stream.send_nowait(receipt(len(item.publish)))
    except EndOfStream:
        return


async def receive_items(stream: Any, count: int) -> list[Any]:
    items: list[Any] = []
    async with asyncio.timeout(SOON_S):
        while len(items) < count:
            items += await stream.receive()
    return items


# ---------------------------------------------------------------------------------- unary
async def test_a_call_is_answered_and_the_handler_knows_the_caller(bench: Bench) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        return wire.LookupReply(owner=f"{request.topic} for {context.peer}", here=True)

    serving = await bench.serve(lookup)
    reply = await bench.connect(serving.endpoint).call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=SOON_S)
    assert reply.here
    assert reply.owner.startswith("t for 127.0.0.1:")


@pytest.mark.parametrize("error", [TopicNotFound("gone", topic="t"), BadVersion("7 is there"), Unavailable("later")])
async def test_a_handlers_error_arrives_as_the_same_class_with_its_fields(bench: Bench, error: MagnetarError) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        raise error

    serving = await bench.serve(lookup)
    with pytest.raises(type(error)) as raised:
        await bench.connect(serving.endpoint).call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)
    assert type(raised.value) is type(error)
    assert (raised.value.message, raised.value.fields) == (error.message, error.fields)


async def test_a_bug_in_a_handler_is_an_internal_error_and_the_server_lives(bench: Bench) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        if request.topic == "bug":
            raise KeyError("oops")
        return wire.LookupReply()

    channel = bench.connect((await bench.serve(lookup)).endpoint)
    with pytest.raises(InternalError, match="KeyError: 'oops'"):
        await channel.call(LOOKUP, wire.LookupRequest(topic="bug"), timeout_s=SOON_S)
    await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)


async def test_no_answer_in_time_is_unknown(bench: Bench) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        await asyncio.Event().wait()

    channel = bench.connect((await bench.serve(lookup)).endpoint)
    with pytest.raises(TimedOut) as raised:
        await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=0.05)
    assert not raised.value.definite


async def test_a_call_whose_caller_is_gone_goes_on_to_its_end(bench: Bench) -> None:
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def lookup(request: Any, context: CallContext) -> Any:
        if request.topic == "slow":
            begun.set()
            await go_on.wait()
            ended.set()
        return wire.LookupReply()

    channel = bench.connect((await bench.serve(lookup)).endpoint)
    call = asyncio.create_task(channel.call(LOOKUP, wire.LookupRequest(topic="slow"), timeout_s=SOON_S))
    await begun.wait()
    call.cancel()
    for _ in range(10):  # the server has heard of it
        await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)
    go_on.set()
    async with asyncio.timeout(SOON_S):
        await ended.wait()


async def test_nobody_there_is_definite_and_the_channel_works_when_somebody_is(bench: Bench) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        return wire.LookupReply()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", probe.getsockname()[1])
    channel = bench.connect(endpoint)
    with pytest.raises(Unavailable) as raised:
        await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)
    assert raised.value.definite
    with pytest.raises(Unavailable):
        await channel.stream(CONNECT).receive()
    serving = await serve(endpoint, [("Broker", Handler(lookup))], OPEN_ACCESS, SystemClock())
    bench.ends.append(serving)
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)
                break
            except Unavailable:
                await asyncio.sleep(0.01)


async def test_a_server_that_goes_with_the_call_in_hand_is_unknown(bench: Bench) -> None:
    began = asyncio.Event()

    async def lookup(request: Any, context: CallContext) -> Any:
        began.set()
        await asyncio.Event().wait()

    serving = await bench.serve(lookup)
    call = asyncio.ensure_future(
        bench.connect(serving.endpoint).call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)
    )
    await began.wait()
    await serving.close()
    with pytest.raises(ConnectionLost):
        await call


async def test_what_the_server_does_not_offer_is_a_wrong_protocol(bench: Bench) -> None:
    channel = bench.connect((await bench.serve(connect=count_each)).endpoint)
    with pytest.raises(WrongProtocol):
        await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)


async def test_a_port_that_does_not_speak_grpc_fails_the_call_soon(bench: Bench) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    channel = bench.connect(Endpoint("127.0.0.1", other.sockets[0].getsockname()[1]))
    with pytest.raises(WrongProtocol):
        await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)
    other.close()


async def test_a_port_that_accepts_and_stays_silent_may_speak_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process, or a link that passes nothing: who tries again finds it."""
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        channel = bench.connect(Endpoint("127.0.0.1", silent.getsockname()[1]))
        with pytest.raises(Unavailable, match="sends nothing") as raised:
            await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)
        assert raised.value.fields["unreached"] == "silent"
        with pytest.raises(Unavailable, match="no answer"):
            await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=0.01)


async def test_however_many_calls_wait_for_a_connection_it_has_one_callback_for_them(bench: Bench) -> None:
    """Each call that gives up would look at all others: the 50,000 producers of a client never came back."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        channel = bench.connect(Endpoint("127.0.0.1", silent.getsockname()[1]))
        calls = [
            asyncio.ensure_future(channel.call(LOOKUP, wire.LookupRequest(), timeout_s=timeout_s))
            for timeout_s in (0.01, *[SOON_S] * 99)
        ]
        with pytest.raises(Unavailable, match="no answer"):
            await calls[0]
        assert channel._connecting is not None
        assert len(channel._connecting._callbacks) == 1  # type: ignore[attr-defined]
        assert len(channel._attempts[channel._connecting]) == 99
        calls[1].cancel()
        channel._connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        for each in calls[2:]:
            with pytest.raises(ConnectionLost):
                await each
        assert not channel._attempts


async def test_a_call_above_the_limit_is_too_large(bench: Bench) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        return wire.LookupReply()

    channel = bench.connect((await bench.serve(lookup)).endpoint)
    with pytest.raises(MessageTooLarge):
        await channel.call(LOOKUP, wire.LookupRequest(topic="x" * (MESSAGE_BYTES_MAX + 1)), timeout_s=SOON_S)
    await channel.call(LOOKUP, wire.LookupRequest(topic="x"), timeout_s=SOON_S)


async def test_a_taken_port_is_busy_and_named(bench: Bench) -> None:
    serving = await bench.serve()
    with pytest.raises(Busy, match=str(serving.endpoint)):
        await serve(serving.endpoint, [], OPEN_ACCESS, SystemClock())


async def test_garbage_on_the_port_harms_nobody(bench: Bench) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        return wire.LookupReply()

    serving = await bench.serve(lookup)
    channel = bench.connect(serving.endpoint)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100):
        _, writer = await asyncio.open_connection(*serving.endpoint)
        writer.write(garbage)
        await writer.drain()
        writer.close()
        await channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S)


# ---------------------------------------------------------------------------------- streams
async def test_a_stream_carries_items_both_ways_and_ends_in_order(bench: Bench) -> None:
    ended: list[str] = []

    async def connect(stream: Any, context: CallContext) -> None:
        await count_each(stream, context)
        stream.send_nowait(receipt(999))
        ended.append("server")

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    for size in (0, 1, 127, 128, 2047, 2048, 20_000, 5 << 20):
        stream.send_nowait(publish(size))
    items = await receive_items(stream, 8)
    assert [item.receipt.sequence_id for item in items] == [0, 1, 127, 128, 2047, 2048, 20_000, 5 << 20]
    await stream.close()
    assert ended == ["server"]
    with pytest.raises(ConnectionLost):
        stream.send_nowait(publish(1))


async def test_all_that_waits_leaves_as_one_message_and_none_is_much_above_the_limit(bench: Bench) -> None:
    sizes: list[int] = []

    async def connect(stream: Any, context: CallContext) -> None:
        try:
            while True:
                items = await stream.receive()
                sizes.append(len(items))
                stream.send_nowait(receipt(len(items)))
        except EndOfStream:
            return

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    for _ in range(500):
        stream.send_nowait(publish(10))
    await receive_items(stream, 1)
    assert sizes == [500]
    for _ in range(10):
        stream.send_nowait(publish(COALESCE_BYTES // 3))
    await until(lambda: sum(sizes) == 510)
    assert not any(size % 2 for size in sizes[1:]), "two items an envelope"
    await stream.close()


async def test_what_leaves_wakes_no_reader(bench: Bench) -> None:
    """A reader that waits for what comes goes on waiting for it while envelopes of its own end leave."""
    served: list[Any] = []

    async def hold(stream: Any, context: CallContext) -> None:
        served.append(stream)
        while True:
            await stream.receive()

    serving = await bench.serve(connect=hold)
    stream = bench.connect(serving.endpoint).stream(CONNECT)
    stream.send_nowait(publish(1))
    reading = asyncio.ensure_future(stream.receive())
    await until(lambda: bool(served) and stream._arrival is not None)
    waits = stream._arrival
    for size in (1, 2, 3):
        left = stream.sent_bytes
        stream.send_nowait(publish(size))
        await stream.wait_sent(left + 1)
    assert stream._arrival is waits
    assert not waits.done()
    stream.cancel()
    with pytest.raises(ConnectionLost):
        await reading


async def test_items_may_be_given_as_their_bytes(bench: Bench) -> None:
    stream = bench.connect((await bench.serve(connect=count_each)).endpoint).stream(CONNECT)
    stream.send_nowait(publish(77).SerializeToString())
    [item] = await receive_items(stream, 1)
    assert item.receipt.sequence_id == 77
    await stream.close()


async def test_a_reader_that_does_not_read_holds_the_sender_back(bench: Bench) -> None:
    go = asyncio.Event()

    async def connect(stream: Any, context: CallContext) -> None:
        await go.wait()
        await count_each(stream, context)

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    sent = 0

    async def send_all() -> None:
        nonlocal sent
        for _ in range(60):
            await stream.send(publish(1 << 20))
            sent += 1

    sending = asyncio.ensure_future(send_all())
    await until(lambda: stream.queued_bytes > STREAM_QUEUE_BYTES)
    for _ in range(50):
        await asyncio.sleep(0)
    assert sent < 40
    assert stream.queued_bytes <= STREAM_QUEUE_BYTES + (2 << 20)
    go.set()
    assert len(await receive_items(stream, 60)) == 60
    await sending
    await stream.wait_drained()
    await stream.close()


async def test_an_error_of_the_handler_reaches_the_reader_after_what_was_sent_before(bench: Bench) -> None:
    async def connect(stream: Any, context: CallContext) -> None:
        await stream.receive()
        stream.send_nowait(receipt(1))
        raise TopicNotFound("deleted", topic="t")

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    stream.send_nowait(publish(1))
    assert len(await receive_items(stream, 1)) == 1
    with pytest.raises(TopicNotFound) as raised:
        await stream.receive()
    assert raised.value.fields == {"topic": "t"}
    await stream.close()


async def test_the_server_ends_the_stream_when_the_handler_returns(bench: Bench) -> None:
    async def connect(stream: Any, context: CallContext) -> None:
        stream.send_nowait(receipt(1))

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    assert len(await receive_items(stream, 1)) == 1
    with pytest.raises(EndOfStream):
        await stream.receive()
    with pytest.raises(ConnectionLost):
        stream.send_nowait(publish(1))


async def test_cancel_ends_both_directions_at_both_ends(bench: Bench) -> None:
    at_server: list[BaseException] = []

    async def connect(stream: Any, context: CallContext) -> None:
        stream.send_nowait(receipt(1))
        try:
            await stream.receive()
        except ConnectionLost as error:
            at_server.append(error)
            with pytest.raises(ConnectionLost):
                stream.send_nowait(receipt(2))

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    await receive_items(stream, 1)
    reading = asyncio.ensure_future(stream.receive())
    await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(ConnectionLost):
        await reading
    with pytest.raises(ConnectionLost):
        await stream.receive()
    with pytest.raises(ConnectionLost):
        stream.send_nowait(publish(1))
    await until(lambda: len(at_server) == 1)


async def test_the_server_may_cancel_a_stream(bench: Bench) -> None:
    async def connect(stream: Any, context: CallContext) -> None:
        stream.cancel()
        with pytest.raises(ConnectionLost):
            await stream.receive()

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ConnectionLost):
            await stream.receive()


async def _read_on(stream: Any) -> None:
    while True:
        await stream.receive()


@pytest.mark.parametrize("turns", range(6))
async def test_a_stream_that_is_cut_while_its_first_item_leaves_ends_with_the_error(bench: Bench, turns: int) -> None:
    async def connect(stream: Any, context: CallContext) -> None:
        stream.send_nowait(receipt(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        stream.terminate_with_error(MessageTooLarge("too much"))
        await asyncio.sleep(SOON_S)

    channel = bench.connect((await bench.serve(connect=connect)).endpoint)
    for _ in range(20):
        stream = channel.stream(CONNECT)
        stream.send_nowait(publish(1))
        with pytest.raises((MessageTooLarge, ConnectionLost)):  # lost: the end meets the caller's own beginning
            await asyncio.wait_for(_read_on(stream), SOON_S)
        stream.cancel()


async def test_a_server_that_goes_breaks_its_streams_and_its_handlers_learn_it(bench: Bench) -> None:
    ends: list[BaseException] = []

    async def connect(stream: Any, context: CallContext) -> None:
        stream.send_nowait(receipt(1))
        try:
            await stream.receive()
        except ConnectionLost as error:
            ends.append(error)

    serving = await bench.serve(connect=connect)
    stream = bench.connect(serving.endpoint).stream(CONNECT)
    await receive_items(stream, 1)
    reading = asyncio.ensure_future(stream.receive())
    await serving.close()
    with pytest.raises(ConnectionLost):
        await reading
    assert len(ends) == 1
    await stream.close()


async def test_a_receive_that_is_cancelled_loses_nothing(bench: Bench) -> None:
    stream = bench.connect((await bench.serve(connect=count_each)).endpoint).stream(CONNECT)
    for size in range(20):
        reading = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        stream.send_nowait(publish(size))
        [item] = await receive_items(stream, 1)
        assert item.receipt.sequence_id == size
    async with asyncio.timeout(SOON_S):
        await stream.close()


async def test_what_comes_while_nobody_reads_is_read_ahead_and_given_at_once(bench: Bench) -> None:
    stream = bench.connect((await bench.serve(connect=count_each)).endpoint).stream(CONNECT)
    stream.send_nowait(publish(1))
    await receive_items(stream, 1)
    for size in range(1, 5):
        stream.send_nowait(publish(size))
        await until(lambda: stream.queued_bytes == 0)
    expected = wire.ServerFrames(items=[receipt(size) for size in range(1, 5)])
    await until(lambda: stream._came_bytes == expected.ByteSize())
    assert list(await stream.receive()) == list(expected.items)
    stream.cancel()


async def test_closing_a_channel_breaks_its_streams_and_refuses_new_calls(bench: Bench) -> None:
    channel = bench.connect((await bench.serve(connect=count_each)).endpoint)
    stream = channel.stream(CONNECT)
    stream.send_nowait(publish(1))
    await receive_items(stream, 1)
    reading = asyncio.ensure_future(stream.receive())
    await asyncio.sleep(0)
    await channel.close()
    with pytest.raises(ConnectionLost):
        await reading
    with pytest.raises(ConnectionLost):
        channel.stream(CONNECT)


async def test_an_envelope_that_does_not_parse_breaks_the_stream(bench: Bench) -> None:
    ends: list[BaseException] = []

    async def connect(stream: Any, context: CallContext) -> None:
        try:
            await stream.receive()
        except WrongProtocol as error:
            ends.append(error)
            raise

    stream = bench.connect((await bench.serve(connect=connect)).endpoint).stream(CONNECT)
    stream.send_nowait(b"\xff\xff\xff")
    with pytest.raises(MagnetarError):
        await stream.receive()
    await until(lambda: len(ends) == 1)


def item(content: bytes) -> bytes:
    return b"\x0a" + encode_varint(len(content)) + content


LARGE = MESSAGE_BYTES_MAX - 64
UNKNOWN = b"\xf8\x07\x01"  # field 127, a varint
HOSTILE = {
    "unknown fields": b"\x10\x01" * (LARGE // 2),
    "a field that is not known after its item": item(b"\x1a\x01x") + b"\x10\x01",
    "unknown fields after very many items": b"\x0a\x00" * 5000 + b"\x10\x01" * (LARGE // 4),
    "an item of unknown fields": item(UNKNOWN * (LARGE // 3)),
    "an entry with unknown fields": item(b"\x1a\x01x" + UNKNOWN * (LARGE // 3)),
    "an entry that a strange number hides": item(b"\xf8\x07\x1a" + encode_varint(LARGE) + UNKNOWN * (LARGE // 3)),
    "an entry again and again": item(b"\x1a\x00" * (LARGE // 2)),
    "a torn item": b"\x0a" + b"\xff" * (LARGE // 2),
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What a stream computes at once of what came, in seconds, as it happens."""
    seconds: list[float] = []
    timer = WorkTimer()
    for name in ("_take", "_some"):
        monkeypatch.setattr(GrpcStream, name, measured(getattr(GrpcStream, name), seconds, timer))
    yield seconds
    timer.close()


async def envelopes_sent(endpoint: Endpoint, *envelopes: bytes) -> tuple[int, grpc.StatusCode]:
    """(answers, the end) of a Connect stream."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(str(endpoint), options=options) as channel:
        call, answers = channel.stream_stream(CONNECT.path)(), 0
        try:
            for each in (*envelopes, b""):
                await call.write(each)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the server's end says why
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                answers += len(wire.ServerFrames.FromString(data).items)
        except grpc.aio.AioRpcError:
            pass
        return answers, await call.code()


@replaces_code
@pytest.mark.parametrize("what", HOSTILE)
async def test_an_envelope_has_items_and_nothing_else_and_is_refused_in_short_steps(
    bench: Bench, steps: list[float], what: str
) -> None:
    ends: list[MagnetarError] = []

    async def connect(stream: Any, context: CallContext) -> None:
        try:
            await count_each(stream, context)
        except MagnetarError as error:
            ends.append(error)
            raise

    endpoint = (await bench.serve(connect=connect)).endpoint
    await envelopes_sent(endpoint, item(b"\x1a\x01x"))  # grpc and protobuf are loaded
    longest = []
    for attempt in range(3):
        steps.clear()
        _, code = await envelopes_sent(endpoint, HOSTILE[what])
        assert code is not grpc.StatusCode.OK
        await until(lambda attempt=attempt: len(ends) == attempt + 1)
        assert isinstance(ends[-1], WrongProtocol | MessageTooLarge)
        longest.append(max(steps))
    assert min(longest) < 0.01 * slowness(), "twice the rule, in each of three: once may be the machine's"


@replaces_code
async def test_requests_that_protobuf_looks_into_are_parsed_in_slices_and_entries_at_once(
    bench: Bench, steps: list[float]
) -> None:
    """Fields that are not known are a later client's: of an item they are ignored."""
    received: list[int] = []

    async def connect(stream: Any, context: CallContext) -> None:
        try:
            while True:
                items = await stream.receive()
                received.append(len(items))
                for each in items:
                    stream.send_nowait(receipt(len(each.publish)))
        except EndOfStream:
            return

    endpoint = (await bench.serve(connect=connect)).endpoint
    await envelopes_sent(endpoint, item(b"\x1a\x01x"))
    received.clear()
    for id_ in (b"", b"\x08\x05", b"\x08\xac\x02"):
        entry = item(id_ + b"\x1a" + encode_varint(128 << 10) + bytes(128 << 10))
        assert await envelopes_sent(endpoint, entry * 100) == (100, grpc.StatusCode.OK)
        assert received == [100]
        received.clear()
    steps.clear()
    assert await envelopes_sent(endpoint, item(UNKNOWN * 1300) * 4000) == (4000, grpc.StatusCode.OK)
    assert sum(received) == 4000
    assert max(received) <= 512 // 3
    assert max(steps) < 0.02 * slowness()


async def test_a_stream_that_is_cancelled_before_it_connected_leaves_no_task_behind() -> None:
    """gRPC keeps a write waiting for ever when its call is cancelled before there was a connection."""
    with socket.socket() as taken:  # bound and not listening: nobody connects
        taken.bind(("127.0.0.1", 0))
        channel = connect(Endpoint("127.0.0.1", taken.getsockname()[1]))
        before = asyncio.all_tasks()
        stream = channel.stream(find_rpc("Broker", "Connect"))
        stream.send_nowait(wire.ClientFrame(publish=b"never leaves"))
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(ConnectionLost):
            await stream.receive()
        await channel.close()
        left = {task for task in asyncio.all_tasks() - before if not task.done()}
        if left:
            await asyncio.wait(left, timeout=60)  # it would be for ever
        assert all(task.done() for task in left)


async def test_streams_of_a_connection_that_takes_no_more_calls_end_with_the_channel(bench: Bench) -> None:
    channel = bench.connect((await bench.serve(connect=count_each)).endpoint)
    streams = [channel.stream(CONNECT)]
    streams[0].send_nowait(publish(1))
    await receive_items(streams[0], 1)
    channel._connection.on_goaway(1, 0, "")  # type: ignore[union-attr]
    streams.append(channel.stream(CONNECT))
    for stream in streams:
        stream.send_nowait(publish(1))
        await receive_items(stream, 1)
    await channel.close()
    for stream in streams:
        with pytest.raises(ConnectionLost):
            async with asyncio.timeout(SOON_S):
                await stream.receive()


async def test_calls_that_wait_for_a_connection_get_one_with_new_tls_files_and_the_channel_closes_it(
    tmp_path: Path,
) -> None:
    async def lookup(request: Any, context: CallContext) -> Any:
        return wire.LookupReply(here=True)

    authority = Authority.make(tmp_path)
    access = ListenerAccess(tls=authority.issue("broker"))
    serving = await serve(LOCAL, [("Broker", Handler(lookup, count_each))], access, SystemClock())
    caller = authority.issue("caller")
    channel = connect(serving.endpoint, CallerAccess(caller))
    try:
        streams = [channel.stream(CONNECT)]
        waiting = asyncio.create_task(channel.call(LOOKUP, wire.LookupRequest(), timeout_s=SOON_S))
        await asyncio.sleep(0)
        renewed = authority.issue("renewed")
        for new, old in ((renewed.certificate, caller.certificate), (renewed.key, caller.key)):
            os.replace(new, old)
        streams.append(channel.stream(CONNECT))
        for stream in streams:
            stream.send_nowait(publish(1))
            await receive_items(stream, 1)
        assert (await waiting).here
        await until(lambda: len(serving._listener.connections) == 1)
        await channel.close()
        for stream in streams:
            with pytest.raises(ConnectionLost):
                async with asyncio.timeout(SOON_S):
                    await stream.receive()
        await until(lambda: not serving._listener.connections)
    finally:
        await channel.close()
        await serving.close()
