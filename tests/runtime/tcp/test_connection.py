"""HTTP/2 without sockets: whatever the pieces that arrive and the windows, each message comes once, whole and in order;
what the RFC forbids ends the stream or the connection with its code, and nothing else."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost, Unavailable
from magnetar.runtime.access import OPEN_ACCESS
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc import client, server
from magnetar.runtime.network import CallContext, EndOfStream, Endpoint, find_rpc
from magnetar.runtime.tcp import http2 as http2
from magnetar.runtime.tcp import http2_frames as frames
from magnetar.runtime.tcp.http2_frames import (
    HeaderDecoder,
    Http2ErrorCode,
    Http2Setting,
    Http2Violation,
    encode_headers,
)
from tests.compiled import replaces_code
from tests.support.wire import Wire, give

HERE = Endpoint("127.0.0.1", 7650)
LOOKUP, CONNECT = find_rpc("Broker", "Lookup"), find_rpc("Broker", "Connect")
HEAD = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", CONNECT.path.encode()), (b":authority", b"x"),
    (b"te", b"trailers"), (b"content-type", b"application/grpc"),
)  # fmt: skip
OPENED = frames.CONNECTION_PREFACE + frames.encode_settings({})
HEADERS = frames.encode_header_block(1, encode_headers(HEAD), 0, frames.DEFAULT_FRAME_BYTES)


def in_pieces(item: Any) -> tuple[bytes, ...]:
    """The bytes of an item in three of them, as a long one is sent: short, long, and one that may be empty."""
    data = item.SerializeToString()
    return data[:3], data[3:70_000], data[70_000:]


class Broker:
    """Echoes the sizes of what is published."""

    def __init__(self) -> None:
        self.running = 0

    async def lookup(self, request: Any, context: CallContext) -> Any:
        return wire.LookupReply(owner=request.topic)

    async def connect(self, stream: Any, context: CallContext) -> None:
        self.running += 1
        try:
            while True:
                for item in await stream.receive():
                    delivery = wire.Delivery(entry=bytes(item.publish))
                    frame = wire.ServerFrame(id=len(item.publish), delivery=delivery)
                    await stream.send(in_pieces(frame) if item.id % 2 else frame)
        except EndOfStream:
            pass
        finally:
            self.running -= 1


class Pair:
    """A client and a server, and the wires between them."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.listener = server._Listener([("Broker", self.broker)], OPEN_ACCESS, SystemClock())
        self.client, self.server = client._ClientConnection(), server._ServerConnection(self.listener)
        self.up, self.down = Wire(), Wire()
        self.client.connection_made(self.up)
        self.server.connection_made(self.down)

    async def run(self, rng: random.Random, most: int) -> None:
        """Bytes arrive in pieces of up to `most`, until nothing moves any more."""
        quiet = 0
        while quiet < 5:
            moved = False
            for wire_, end in ((self.up, self.server), (self.down, self.client)):
                if wire_.written:
                    give(end, wire_.taken(rng.randint(1, most)))
                    moved = True
            await asyncio.sleep(0)
            quiet = 0 if moved else quiet + 1

    def stream(self) -> client._ClientStream:
        stream = client._ClientStream(HERE, CONNECT)
        self.client.start(stream, encode_headers(HEAD))
        return stream

    def call(self, topic: str) -> client._UnaryCall:
        data = wire.LookupRequest(topic=topic).SerializeToString()
        call = client._UnaryCall(HERE, client.prefix(len(data)) + data)
        head = [(b":path", LOOKUP.path.encode()) if name == b":path" else (name, value) for name, value in HEAD]
        self.client.start(call, encode_headers(head))
        return call

    async def close(self) -> None:
        self.client.close(ConnectionLost("the test is over"))
        self.server.close(ConnectionLost("the test is over"))
        if self.listener.handlers:
            await asyncio.wait(list(self.listener.handlers))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    await pair.close()


def setting(connection: Any, values: dict[Http2Setting, int]) -> None:
    """The other end of `connection` says so."""
    give(connection, frames.encode_settings(values))


# ---------------------------------------------------------------------------------- in pieces
@pytest.mark.parametrize("seed", range(12))
async def test_messages_come_whole_and_in_order_whatever_the_pieces_and_the_windows(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    most = rng.choice([7, 300, 20_000, 1 << 20])
    await pair.run(rng, 100)
    for end, other in ((pair.client, pair.server), (pair.server, pair.client)):
        other.stream_window = rng.choice([1 if other is pair.server else 100, 5000, 65_535])
        frame = rng.choice([16_384, 1 << 20])
        setting(end, {Http2Setting.INITIAL_WINDOW_SIZE: other.stream_window, Http2Setting.MAX_FRAME_SIZE: frame})
    streams = [pair.stream() for _ in range(3)]
    largest = rng.choice([10, 2000, 100_000] if most > 1000 else [10, 2000])
    sent = [[rng.randbytes(rng.randint(0, largest)) for _ in range(rng.randint(1, 8))] for _ in streams]
    sizes: list[list[bytes]] = [[] for _ in streams]

    async def read(number: int) -> None:
        while len(sizes[number]) < len(sent[number]):
            sizes[number] += [item.delivery.entry for item in await streams[number].receive()]

    readers = [asyncio.create_task(read(number)) for number in range(3)]
    for number, stream in enumerate(streams):
        for data in sent[number]:
            frame = wire.ClientFrame(id=rng.choice((0, 1, 2, 300)), publish=data)
            stream.send_nowait(in_pieces(frame) if rng.random() < 0.5 else frame)
            if rng.random() < 0.3:
                await pair.run(rng, most)
    calls = [pair.call("t" * size) for size in (0, 1, 70_000)]
    async with asyncio.timeout(60):
        while not all(each.done() for each in [*readers, *(call.done for call in calls)]):
            await pair.run(rng, most)
    assert sizes == sent
    assert [wire.LookupReply.FromString(call.done.result()).owner for call in calls] == ["", "t", "t" * 70_000]
    closing = [asyncio.create_task(stream.close()) for stream in streams]
    await pair.run(rng, most)
    await asyncio.gather(*closing)
    assert not pair.client.streams
    assert not pair.server.streams
    assert not pair.broker.running


async def test_a_call_that_is_over_does_not_stay_in_the_memory_of_its_connection(pair: Pair) -> None:
    rng = random.Random(2)
    await pair.run(rng, 1000)
    call = pair.call("t" * 1000)
    await pair.run(rng, 1000)
    assert call.done.done()
    assert pair.client._data_stream is pair.server._data_stream is None


async def test_a_stream_that_is_not_read_holds_a_window_and_no_more_and_the_others_go_on(pair: Pair) -> None:
    rng = random.Random(1)
    await pair.run(rng, 1000)
    unread, other = pair.stream(), pair.stream()
    for _ in range(8):
        unread.send_nowait(wire.ClientFrame(publish=bytes(1 << 20)))
    await pair.run(rng, 1 << 20)
    assert 0 < unread._came_bytes <= http2.STREAM_WINDOW_BYTES + (1 << 20) + 100, "a window, and one long message"
    other.send_nowait(wire.ClientFrame(publish=b"x"))
    await pair.run(rng, 1 << 20)
    assert [item.id for item in await other.receive()] == [1]
    got = 0
    async with asyncio.timeout(30):
        while got < 8:
            reading = asyncio.create_task(unread.receive())
            await pair.run(rng, 1 << 20)
            got += len(await reading)


@replaces_code
@pytest.mark.parametrize(("size", "turns"), [(900_000, 1), (1000, 0)])
async def test_the_credit_for_many_bytes_leaves_a_turn_before_they_are_worked_on(
    pair: Pair, size: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport sends what is written when the loop's turn ends."""
    rng, loop = random.Random(3), asyncio.get_running_loop()
    await pair.run(rng, 1000)
    stream = pair.stream()
    stream.send_nowait(wire.ClientFrame(publish=bytes(size)))
    while stream._came_bytes < size:
        await pair.run(rng, 1 << 20)
    passed, credited = 0, list[int]()

    def turn() -> None:
        nonlocal passed
        passed += 1
        loop.call_soon(turn)

    turn()
    honest = http2.ReceiveWindow.credit_stream

    def consumed(window: http2.ReceiveWindow, stream: http2.Http2Stream, size: int) -> None:
        if window is pair.client.window:
            credited.append(passed)
        else:
            honest(window, stream, size)

    monkeypatch.setattr(http2.ReceiveWindow, "credit_stream", consumed)
    (item,) = await stream.receive()
    assert (item.id, passed - credited[0]) == (size, turns)


async def test_a_message_longer_than_the_window_is_taken_when_its_stream_is_read(pair: Pair) -> None:
    rng = random.Random(2)
    await pair.run(rng, 1000)
    stream = pair.stream()
    for _ in range(2):
        stream.send_nowait(wire.ClientFrame(publish=bytes(5 << 20)))
    for _ in range(2):
        reading = asyncio.create_task(stream.receive())
        await pair.run(rng, 1 << 20)
        assert [item.id for item in await reading] == [5 << 20]


async def test_a_stranger_makes_a_server_keep_no_more_than_the_first_window(pair: Pair) -> None:
    """Before a handler reads: the call is being authenticated, or is none."""
    give(pair.server, OPENED + HEADERS)
    stream = pair.server.streams[1]
    assert (stream.receive_left, pair.server.window.left) == (65_535, 65_535)
    give(pair.server, frames.encode_frame_header(5, frames.DATA, 0, 1) + client.prefix(1 << 20))
    for _ in range(4):
        assert not pair.down.is_closed
        give(pair.server, data(16_383))
    assert pair.down.is_closed, "one byte above the window"


# ---------------------------------------------------------------------------------- against the rules
def data(size: int, stream: int = 1, flags: int = 0) -> bytes:
    return frames.encode_frame_header(size, frames.DATA, flags, stream) + bytes(size)


def raw(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    return frames.encode_frame_header(len(payload), kind, flags, stream) + payload


BROKEN = {
    "no settings": (frames.CONNECTION_PREFACE + frames.encode_ping(bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "data before settings": (frames.CONNECTION_PREFACE + data(1), Http2ErrorCode.PROTOCOL_ERROR),
    "an acknowledgement before settings": (frames.CONNECTION_PREFACE + frames.SETTINGS_ACK,
    Http2ErrorCode.PROTOCOL_ERROR),
    "settings of five bytes": (OPENED + raw(frames.SETTINGS, bytes(5)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "settings of a stream": (OPENED + raw(frames.SETTINGS, b"", stream=1), Http2ErrorCode.PROTOCOL_ERROR),
    "a window of 2^31": (OPENED + frames.encode_settings({Http2Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
    Http2ErrorCode.FLOW_CONTROL_ERROR),
    "frames of 2^24": (OPENED + frames.encode_settings({Http2Setting.MAX_FRAME_SIZE: 1 << 24}),
    Http2ErrorCode.PROTOCOL_ERROR),
    "frames of no byte": (OPENED + frames.encode_settings({Http2Setting.MAX_FRAME_SIZE: 0}),
    Http2ErrorCode.PROTOCOL_ERROR),
    "push of 2": (OPENED + frames.encode_settings({Http2Setting.ENABLE_PUSH: 2}), Http2ErrorCode.PROTOCOL_ERROR),
    "a ping of nine bytes": (OPENED + raw(frames.PING, bytes(9)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "a ping of a stream": (OPENED + raw(frames.PING, bytes(8), stream=3), Http2ErrorCode.PROTOCOL_ERROR),
    "data of no stream": (OPENED + data(1, 0), Http2ErrorCode.PROTOCOL_ERROR),
    "data of a stream that is not open": (OPENED + data(1, 5), Http2ErrorCode.PROTOCOL_ERROR),
    "data of an even stream": (OPENED + data(1, 2), Http2ErrorCode.PROTOCOL_ERROR),
    "an even stream": (OPENED + frames.encode_header_block(2, encode_headers(HEAD), 0, 16_384),
    Http2ErrorCode.PROTOCOL_ERROR),
    "headers of no stream": (OPENED + frames.encode_header_block(0, encode_headers(HEAD), 0, 16_384),
    Http2ErrorCode.PROTOCOL_ERROR),
    "a frame of 16 MiB": (
        OPENED + frames.encode_frame_header((1 << 24) - 1, frames.DATA, 0, 1), Http2ErrorCode.FRAME_SIZE_ERROR
    ),
    "headers of 1 MiB": (OPENED + frames.encode_frame_header(1 << 20, frames.HEADERS, 4, 1),
    Http2ErrorCode.FRAME_SIZE_ERROR),
    "an unknown frame of 1 MiB": (OPENED + frames.encode_frame_header(1 << 20, 77, 0, 0),
    Http2ErrorCode.FRAME_SIZE_ERROR),
    "headers that are none": (OPENED + raw(frames.HEADERS, b"\xff" * 40, 4, 1), Http2ErrorCode.COMPRESSION_ERROR),
    "an index that is not there": (OPENED + raw(frames.HEADERS, b"\xbe", 4, 1), Http2ErrorCode.COMPRESSION_ERROR),
    "more padding than payload": (OPENED + raw(frames.HEADERS, b"\x09abc", 4 | 8, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "padding of nothing": (OPENED + HEADERS + raw(frames.DATA, b"", 8, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "a priority without its bytes": (OPENED + raw(frames.HEADERS, b"abc", 4 | 0x20, 1),
        Http2ErrorCode.FRAME_SIZE_ERROR),
    "a priority of four bytes": (OPENED + raw(frames.PRIORITY, bytes(4), stream=1), Http2ErrorCode.FRAME_SIZE_ERROR),
    "a reset of a stream that is not open": (OPENED + frames.encode_rst_stream(9, Http2ErrorCode.CANCEL),
    Http2ErrorCode.PROTOCOL_ERROR),
    "a reset of five bytes": (OPENED + HEADERS + raw(frames.RST_STREAM, bytes(5), stream=1),
    Http2ErrorCode.FRAME_SIZE_ERROR),
    "a promise": (OPENED + raw(frames.PUSH_PROMISE, bytes(8), 4, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "a continuation of nothing": (OPENED + raw(frames.CONTINUATION, b"", 4, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "another frame in a header block": (
        OPENED + raw(frames.HEADERS, encode_headers(HEAD), 0, 1) + frames.encode_ping(bytes(8)),
        Http2ErrorCode.PROTOCOL_ERROR),
    "data in a header block": (OPENED + raw(frames.HEADERS, encode_headers(HEAD), 0, 1) + data(1),
    Http2ErrorCode.PROTOCOL_ERROR),
    "a continuation of another stream": (
        OPENED + raw(frames.HEADERS, b"", 0, 1) + raw(frames.CONTINUATION, b"", 4, 3), Http2ErrorCode.PROTOCOL_ERROR),
    "continuations without an end": (
        OPENED + raw(frames.HEADERS, b"", 0, 1) + raw(frames.CONTINUATION, b"", 0, 1) * 20,
        Http2ErrorCode.ENHANCE_YOUR_CALM),
    "a header block without an end": (
        OPENED + raw(frames.HEADERS, bytes(30_000), 0, 1) + raw(frames.CONTINUATION, bytes(30_000), 4, 1),
        Http2ErrorCode.ENHANCE_YOUR_CALM),
    "headers that unfold to a mebibyte": (
        OPENED + raw(frames.HEADERS, b"\x40\x01a\x7f\x81\x1e" + b"b" * 4000 + b"\xbe" * 300, 4, 1),
        Http2ErrorCode.ENHANCE_YOUR_CALM),
    "a window update by nothing": (OPENED + frames.encode_window_update(0, 0), Http2ErrorCode.PROTOCOL_ERROR),
    "a connection's window above its maximum": (
        OPENED + frames.encode_window_update(0, frames.WINDOW_BYTES_MAX), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "a window update of a stream that is not open": (OPENED + frames.encode_window_update(7, 1),
    Http2ErrorCode.PROTOCOL_ERROR),
    "a going away of four bytes": (OPENED + raw(frames.GOAWAY, bytes(4)), Http2ErrorCode.FRAME_SIZE_ERROR),
}  # fmt: skip


def ended_with(written: bytearray) -> list[tuple[int, int, int]]:
    """(kind, stream, code) of the GOAWAYs and resets in what an end wrote."""
    found, offset = [], 0
    while offset < len(written):
        high, low, kind, _, stream = frames.FRAME_HEADER_STRUCT.unpack_from(written, offset)
        length = high << 8 | low
        payload = bytes(written[offset + 9 : offset + 9 + length])
        if kind in (frames.GOAWAY, frames.RST_STREAM):
            found.append((kind, stream, struct.unpack(">I", payload[-4:] if kind == 3 else payload[4:8])[0]))
        offset += 9 + length
    return found


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("what", BROKEN)
async def test_what_breaks_the_rules_ends_the_connection_with_its_code(pair: Pair, what: str, in_pieces: bool) -> None:
    sent, code = BROKEN[what]
    if in_pieces:
        for each in range(len(sent)):
            give(pair.server, sent[each : each + 1])
    else:
        give(pair.server, sent)
    assert ended_with(pair.down.written)[-1:] == [(frames.GOAWAY, 0, code)]
    assert pair.down.is_closed
    assert pair.server.is_lost


OF_A_STREAM = {
    "a window update by nothing": (frames.encode_window_update(1, 0), Http2ErrorCode.PROTOCOL_ERROR),
    "a window above its maximum": (frames.encode_window_update(1, frames.WINDOW_BYTES_MAX),
        Http2ErrorCode.FLOW_CONTROL_ERROR),
    "data after its end": (data(5, 1, frames.END_STREAM) + data(5, 1), Http2ErrorCode.STREAM_CLOSED),
    "headers after its end": (
        data(5, 1, frames.END_STREAM) + frames.encode_header_block(1, encode_headers(HEAD), 0, 16_384),
        Http2ErrorCode.STREAM_CLOSED),
}  # fmt: skip


@pytest.mark.parametrize("what", OF_A_STREAM)
async def test_what_breaks_the_rules_of_a_stream_ends_that_stream_alone(pair: Pair, what: str) -> None:
    sent, code = OF_A_STREAM[what]
    give(pair.server, OPENED + HEADERS + sent)
    assert (frames.RST_STREAM, 1, code) in ended_with(pair.down.written)
    assert not pair.server.is_lost
    assert not pair.server.streams


async def test_frames_of_a_stream_that_is_over_and_of_a_later_kind_are_ignored(pair: Pair) -> None:
    give(pair.server, OPENED + HEADERS + frames.encode_rst_stream(1, Http2ErrorCode.CANCEL))
    give(
        pair.server,
        data(5) + frames.encode_window_update(1, 5) + frames.encode_rst_stream(1, Http2ErrorCode.CANCEL)
        + raw(77, b"x" * 9))
    give(pair.server, raw(frames.PRIORITY, bytes(5), stream=1) + frames.encode_goaway(0, Http2ErrorCode.NO_ERROR))
    give(pair.server, HEADERS)
    assert not pair.server.is_lost
    assert not pair.server.streams


async def test_padding_and_priorities_are_taken_off(pair: Pair) -> None:
    padded = raw(frames.HEADERS, b"\x03" + bytes(5) + encode_headers(HEAD) + bytes(3), 4 | 8 | 0x20, 1)
    frame = wire.ClientFrames(items=[wire.ClientFrame(publish=b"abc")]).SerializeToString()
    message = client.prefix(len(frame)) + frame
    give(pair.server, OPENED + padded + raw(frames.DATA, b"\x02" + message + b"\0\0", 8 | 1, 1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert b"abc" in pair.down.written
    assert not pair.server.is_lost


# ---------------------------------------------------------------------------------- the end
async def test_calls_above_what_the_server_takes_wait_their_turn_and_those_given_up_are_never_begun(pair: Pair) -> None:
    rng = random.Random(3)
    await pair.run(rng, 1000)
    setting(pair.client, {Http2Setting.MAX_CONCURRENT_STREAMS: 2})
    calls = [pair.call(f"t{number}") for number in range(6)]
    assert len(pair.client.streams) == 2
    calls[3].cancel()
    await pair.run(rng, 1000)
    answers = [None if call.done.cancelled() else call.done.result() for call in calls]
    owners = [each and wire.LookupReply.FromString(each).owner for each in answers]
    assert owners == ["t0", "t1", "t2", None, "t4", "t5"]
    assert pair.client._next == 11


async def test_a_server_that_goes_away_ends_the_calls_that_it_took_and_the_others_are_definite(pair: Pair) -> None:
    rng = random.Random(4)
    await pair.run(rng, 1000)
    taken = pair.stream()
    taken.send_nowait(wire.ClientFrame(publish=b"x"))
    await pair.run(rng, 1000)
    pair.server.go_away()
    late = pair.call("late")
    await pair.run(rng, 1000)
    with pytest.raises(Unavailable):
        await late.done
    assert not pair.client.is_open
    assert [item.id for item in await taken.receive()] == [1]
    closing = asyncio.create_task(taken.close())
    await pair.run(rng, 1000)
    await closing
    assert pair.client.is_lost, "it is closed after its last call"


async def test_a_connection_whose_ids_are_used_up_takes_no_more_calls(pair: Pair) -> None:
    rng = random.Random(5)
    await pair.run(rng, 1000)
    pair.client._next = frames.STREAM_MASK
    call = pair.call("the last one")
    assert not pair.client.is_open
    await pair.run(rng, 1000)
    assert wire.LookupReply.FromString(call.done.result()).owner == "the last one"


async def test_a_dead_peer_is_noticed_by_looks_and_one_that_answers_is_not(pair: Pair) -> None:
    rng = random.Random(6)
    call = pair.call("t")
    await pair.run(rng, 1000)
    assert call.done.done()
    for _ in range(20):
        for end in (pair.client, pair.server):
            end.liveness.check_alive()
            assert end.liveness.timer is not None
        await pair.run(rng, 1000)
    assert not pair.client.is_lost
    pair.client.liveness.check_alive()  # it heard something since the last one
    for number in range(1, http2.CHECKS_BEFORE_ABORT + 1):
        assert not pair.client.is_lost, number
        pair.client.liveness.check_alive()
    assert pair.client.is_lost
    assert bytes(pair.up.written).endswith(frames.encode_ping(b"magnetar"))


async def test_whether_the_other_end_answers_is_asked_by_a_ping_and_ends_nothing(pair: Pair) -> None:
    rng = random.Random(6)
    await pair.run(rng, 1000)
    asking = asyncio.ensure_future(pair.client.liveness.is_answering(60.0))
    await pair.run(rng, 1000)
    assert await asking
    assert not await pair.client.liveness.is_answering(0.0)
    later = asyncio.ensure_future(pair.client.liveness.is_answering(60.0))
    await pair.run(rng, 1000)
    assert await later, "the answer to the one before counts, too"
    await pair.run(rng, 1000)
    assert not pair.client.is_lost
    pair.client.abort(ConnectionLost("the test is over"))
    assert not await pair.client.liveness.is_answering(0.0)


async def test_a_connection_without_settings_is_given_up() -> None:
    pair = Pair()
    for _ in range(http2.HANDSHAKE_CHECKS):
        pair.server.liveness.check_alive()
    assert pair.server.is_lost
    pair.client.close(ConnectionLost("the test is over"))


async def test_an_idle_connection_is_closed_and_one_with_a_stream_is_not(pair: Pair) -> None:
    rng = random.Random(7)
    await pair.run(rng, 1000)
    pair.stream()
    await pair.run(rng, 1000)
    for _ in range(server._IDLE_LOOKS + 2):
        pair.server.liveness.received = True
        pair.server.liveness.check_alive()
    assert not pair.server.is_lost
    next(iter(pair.client.streams.values())).cancel()  # type: ignore[attr-defined]
    await pair.run(rng, 1000)
    for _ in range(server._IDLE_LOOKS + 2):
        pair.server.liveness.received = True
        if not pair.server.is_lost:
            pair.server.liveness.check_alive()
    assert pair.server.is_lost


def test_each_thread_reads_into_a_buffer_of_its_own() -> None:
    """The system fills a buffer while other threads run: what one thread works on, the read of another would change."""

    async def of_a_connection() -> memoryview:
        return http2.Http2Connection(HeaderDecoder(list, 1 << 20), b"", {}).get_buffer(-1)

    here, again = asyncio.run(of_a_connection()), asyncio.run(of_a_connection())
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(asyncio.run, of_a_connection()).result()
    assert again.obj is here.obj is not there.obj


# ---------------------------------------------------------------------------------- headers
@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 5000, 20_000])
def test_a_header_of_any_length_is_read_as_it_was_written(size: int) -> None:
    headers = [(b"a" * max(1, size), b"b" * size), (b":status", b"200"), (b"x", bytes(range(256)))]
    assert HeaderDecoder(list, 1 << 20).decode(encode_headers(headers)) == headers


def test_a_block_with_state_is_not_remembered() -> None:
    decoder: HeaderDecoder[Any] = HeaderDecoder(list, 1000)
    first = decoder.decode(b"\x40\x01a\x01b")  # from now on the table has it as 62
    assert first == decoder.decode(b"\xbe") == [(b"a", b"b")]
    assert decoder.decode(b"\x40\x01c\x01d") == [(b"c", b"d")]
    assert decoder.decode(b"\xbe") == [(b"c", b"d")]


def test_a_decoder_remembers_few_blocks() -> None:
    decoder: HeaderDecoder[Any] = HeaderDecoder(list, 1000)
    for number in range(1000):
        decoder.decode(encode_headers([(b"n", b"%d" % number)]))
    assert len(decoder._known) <= 32
    with pytest.raises(Http2Violation):
        decoder.decode(encode_headers([(b"n", b"x" * 2000)]))
