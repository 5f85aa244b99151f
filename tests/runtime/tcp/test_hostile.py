"""A peer that means harm: its floods cost work in proportion to what it sends, and no more memory than the bounds. It
is answered as RFC 9113 and RFC 7541 say, and never by a fault in the log."""

import asyncio
import logging
import math
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from magnetar.proto import reflection_pb2
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.access import OPEN_ACCESS
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc import client, server
from magnetar.runtime.grpc.limits import CALLS_MAX
from magnetar.runtime.network import REFLECTION_SERVICES, CallContext, EndOfStream, Endpoint
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
OPENED = frames.CONNECTION_PREFACE + frames.encode_settings({})


def head(path: str) -> bytes:
    named = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"))
    return encode_headers([*named, (b"te", b"trailers"), (b"content-type", b"application/grpc")])


LOOKUP, CONNECT, NOWHERE = (head(f"/magnetar.wire.Broker/{name}") for name in ("Lookup", "Connect", "Nowhere"))
REFLECT = head(f"/{REFLECTION_SERVICES[0]}/ServerReflectionInfo")
Asked, Answered = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse


def begun(id_: int, path: bytes, flags: int = 0) -> bytes:
    return frames.encode_header_block(id_, path, flags, frames.DEFAULT_FRAME_BYTES)


def data(id_: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.encode_frame_header(len(payload), frames.DATA, flags, id_) + payload


def message(payload: bytes, compressed: int = 0) -> bytes:
    return struct.pack("!BI", compressed, len(payload)) + payload


ASKED = message(wire.LookupRequest(topic="t").SerializeToString())


def call(id_: int) -> bytes:
    return begun(id_, LOOKUP) + data(id_, ASKED, frames.END_STREAM)


class Unread(Wire):
    """Nothing of what is written leaves: the other end does not read."""

    protocol: Any = None

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def write(self, data: Any) -> None:
        super().write(data)
        if len(self.written) > http2.WRITE_BUFFER_BYTES and not self.protocol.out.is_paused:
            self.protocol.pause_writing()


class Server:
    """A server's end, and how many of its handlers ran."""

    def __init__(self, written: Wire) -> None:
        self.lookups = 0
        self.listener = server._Listener([("Broker", self), (REFLECTION_SERVICES[0], self)], OPEN_ACCESS, SystemClock())
        self.end, self.wire = server._ServerConnection(self.listener), written
        if isinstance(written, Unread):
            written.protocol = self.end
        self.end.connection_made(written)

    async def lookup(self, request: Any, context: CallContext) -> Any:
        self.lookups += 1
        return wire.LookupReply(owner=request.topic)

    async def connect(self, stream: Any, context: CallContext) -> None:
        try:
            while True:
                for item in await stream.receive():
                    stream.send_nowait(wire.ServerFrame(id=len(item.publish)))
        except EndOfStream:
            return

    async def server_reflection_info(self, stream: Any, context: CallContext) -> None:
        while True:
            await stream.send(Answered(valid_host=(await stream.receive()).host))

    async def turns(self, count: int = 6) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def answered(self) -> list[tuple[int, int, bytes]]:
        """(kind, stream, payload) of what was written."""
        found, offset, written = [], 0, self.wire.written
        while offset < len(written):
            high, low, kind, _, stream = frames.FRAME_HEADER_STRUCT.unpack_from(written, offset)
            end = offset + 9 + (high << 8 | low)
            found.append((kind, stream, bytes(written[offset + 9 : end])))
            offset = end
        return found

    async def close(self) -> None:
        self.end.close(ConnectionLost("the test is over"))
        if self.listener.handlers:
            await asyncio.wait(list(self.listener.handlers))


@pytest.fixture
async def made(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Callable[[Wire], Server]]:
    servers: list[Server] = []

    def make(written: Wire) -> Server:
        servers.append(Server(written))
        return servers[-1]

    yield make
    for each in servers:
        await each.close()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# ---------------------------------------------------------------------------------- who never reads
FLOODS: dict[str, Callable[[int], bytes]] = {
    "pings": lambda n: frames.encode_ping(n.to_bytes(8, "big")),
    "settings": lambda n: frames.encode_settings({Http2Setting.INITIAL_WINDOW_SIZE: n % 1000}),
    "calls": lambda n: call(2 * n + 1),
    "calls of no method": lambda n: begun(2 * n + 1, NOWHERE, frames.END_STREAM),
    "streams": lambda n: begun(2 * n + 1, CONNECT),
    "streams with no update of their window": lambda n: begun(2 * n + 1,
    CONNECT) + frames.encode_window_update(2 * n + 1, 0),
    "streams that end twice": lambda n: begun(2 * n + 1, CONNECT, frames.END_STREAM) + data(2 * n + 1, b"x"),
    "messages that are compressed": lambda n: begun(2 * n + 1, CONNECT) + data(2 * n + 1, message(b"x", 1)),
    "data of streams that are over": lambda n: (
        begun(1, CONNECT) + frames.encode_rst_stream(1, Http2ErrorCode.CANCEL) if not n else data(1, bytes(16_000))),
}  # fmt: skip


@pytest.mark.parametrize("what", FLOODS)
async def test_who_asks_and_does_not_read_is_cut_before_much_waits_for_it(
    made: Callable[[Wire], Server], what: str
) -> None:
    served = made(Unread())
    give(served.end, OPENED)
    number = most = 0
    while not served.end.is_lost and number < 1_000_000:
        flood = b"".join(FLOODS[what](number + each) for each in range(200))
        give(served.end, flood)
        number += 200
        most = max(most, len(served.wire.written))
        await served.turns(3)
        assert len(served.listener.handlers) <= CALLS_MAX
    assert served.end.is_lost
    assert served.wire.is_closed
    assert not served.end.streams
    assert most <= http2.UNSENT_BYTES_MAX + (256 << 10)


async def test_who_breaks_the_rules_and_does_not_read_is_aborted(made: Callable[[Wire], Server]) -> None:
    """What waits for it would never leave."""
    served = made(unread := Unread())
    aborted: list[bool] = []
    unread.abort = lambda: aborted.append(True)  # type: ignore[method-assign]
    served.end.allowance.set_allowance(math.inf, 0)
    give(served.end, OPENED + b"".join(frames.encode_ping(bytes(8)) for _ in range(70_000)))
    assert served.end.out.is_paused
    give(served.end, frames.encode_window_update(0, 0))
    assert aborted == [True]


async def test_what_was_written_has_some_seconds_to_leave(
    made: Callable[[Wire], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "LAST_WRITES_S", 0.0)
    served = made(unread := Unread())
    left = asyncio.get_running_loop().create_future()
    unread.abort = lambda: left.done() or left.set_result(True)  # type: ignore[assignment, method-assign]
    give(served.end, OPENED + frames.encode_window_update(0, 0))
    assert unread.is_closed
    async with asyncio.timeout(10):
        assert await left


# ---------------------------------------------------------------------------------- floods that are read
async def test_streams_that_are_reset_at_once_begin_no_more_handlers_than_calls_may_run(
    made: Callable[[Wire], Server],
) -> None:
    served = made(Wire())
    give(served.end, OPENED)
    served.end.allowance.set_allowance(math.inf, 0)
    for first in range(0, 20_000, 500):
        numbers = range(2 * first + 1, 2 * first + 1001, 2)
        give(
            served.end,
            b"".join(begun(id_, LOOKUP) + frames.encode_rst_stream(id_, Http2ErrorCode.CANCEL) for id_ in numbers))
        assert len(served.listener.handlers) <= CALLS_MAX
        assert not served.end.streams
        if first % 2000 == 0:
            await served.turns()
    await served.turns()
    assert served.lookups == 0, "who gave up before anything began is not served"
    give(served.end, call(40_001))
    await served.turns()
    assert served.lookups == 1
    assert any(kind == frames.DATA and stream == 40_001 for kind, stream, _ in served.answered())


@replaces_code
async def test_one_settings_that_changes_a_window_thousands_of_times_visits_each_stream_once(
    made: Callable[[Wire], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = made(Wire())
    served.end.allowance.set_allowance(math.inf, 0)
    give(served.end, OPENED + b"".join(begun(2 * n + 1, CONNECT) for n in range(CALLS_MAX)))
    visited: list[Any] = []
    monkeypatch.setattr(http2.Http2Output, "on_window_opened", lambda out, stream: visited.append(stream))
    payload = b"".join(struct.pack("!HI", Http2Setting.INITIAL_WINDOW_SIZE, n) for n in range(2_700))
    give(served.end, frames.encode_frame_header(len(payload), frames.SETTINGS, 0, 0) + payload)
    assert len(visited) == len(served.end.streams) == CALLS_MAX
    assert {stream.send_left for stream in served.end.streams.values()} == {2_699}


@replaces_code
async def test_a_window_that_opens_by_a_byte_at_a_time_wakes_one_stream_at_a_time(
    made: Callable[[Wire], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = made(Wire())
    calls = b"".join(call(2 * n + 1) for n in range(CALLS_MAX))
    served.end.out.send_left = 0
    give(served.end, OPENED + calls)
    await served.turns()
    assert len(served.end.out.blocked) == CALLS_MAX
    woken: list[int] = []
    honest = server._UnaryCall.on_writable

    def writable(self: server._UnaryCall) -> None:
        woken.append(self.id)
        honest(self)

    monkeypatch.setattr(server._UnaryCall, "on_writable", writable)
    give(served.end, frames.encode_window_update(0, 1) * 3000)
    assert len(woken) <= 3000
    assert len(set(woken)) == CALLS_MAX, "in turn"
    give(served.end, frames.encode_window_update(0, 1 << 20))
    await served.turns()
    assert not served.end.streams
    assert served.lookups == CALLS_MAX


async def test_a_stream_whose_own_window_is_shut_is_not_woken_by_that_of_the_connection(
    made: Callable[[Wire], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = made(Wire())
    give(
        served.end,
        frames.CONNECTION_PREFACE
        + frames.encode_settings({Http2Setting.INITIAL_WINDOW_SIZE: 0})
        + call(1)
        + call(3)
        + call(5),
    )
    await served.turns()
    assert not served.end.out.blocked
    give(served.end, frames.encode_window_update(0, 1000) + frames.encode_window_update(3, 1000))
    assert list(served.end.streams) == [1, 5]
    give(served.end, frames.encode_settings({Http2Setting.INITIAL_WINDOW_SIZE: 50}))
    assert not served.end.streams
    kinds = [(kind, stream) for kind, stream, _ in served.answered()]
    last_ack = max(at for at, (kind, stream) in enumerate(kinds) if kind == frames.SETTINGS)
    assert last_ack < kinds.index((frames.DATA, 1)), "the other end counts with the new window from its ACK on"


@replaces_code
async def test_a_stream_that_waits_with_much_is_woken_when_there_is_room_and_never_else(
    made: Callable[[Wire], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = made(Wire())
    frame = wire.ClientFrames(items=[wire.ClientFrame(publish=b"abc")]).SerializeToString()
    woken: list[int] = []
    honest = server._ServerStream.on_writable

    def writable(self: server._ServerStream) -> None:
        woken.append(self.id)
        honest(self)

    monkeypatch.setattr(server._ServerStream, "on_writable", writable)
    windows = frames.encode_settings({Http2Setting.INITIAL_WINDOW_SIZE: 0})
    give(served.end, frames.CONNECTION_PREFACE + windows + begun(1, CONNECT) + data(1, message(frame)))
    await served.turns()
    give(served.end, frames.encode_window_update(0, 1) * 500)
    assert woken == [], "its own window is shut"
    give(served.end, frames.encode_window_update(1, 3))
    give(served.end, frames.encode_window_update(1, 1000))
    assert woken == [1, 1]
    sent = b"".join(payload for kind, _, payload in served.answered() if kind == frames.DATA)
    assert [item.id for item in wire.ServerFrames.FromString(sent[5:]).items] == [3]


async def test_padded_data_above_the_window_is_refused_before_it_is_kept(made: Callable[[Wire], Server]) -> None:
    served = made(Wire())
    give(
        served.end,
        OPENED + begun(1, CONNECT) + frames.encode_frame_header(1 << 20, frames.DATA, frames.FLAG_PADDED, 1) + b"\xff",
    )
    assert served.answered()[-1][2][4:8] == Http2ErrorCode.FLOW_CONTROL_ERROR.to_bytes(4, "big")
    assert served.end.is_lost


# ---------------------------------------------------------------------------------- headers
async def test_headers_in_the_middle_of_a_request_end_its_stream_alone(made: Callable[[Wire], Server]) -> None:
    served = made(Wire())
    give(served.end, OPENED + begun(1, CONNECT) + begun(3, LOOKUP) + data(1, b"\0") + begun(1, CONNECT))
    assert (frames.RST_STREAM, 1, Http2ErrorCode.PROTOCOL_ERROR.to_bytes(4, "big")) in served.answered()
    give(served.end, data(3, ASKED) + begun(3, encode_headers([(b"x", b"y")]), frames.END_STREAM))  # trailers
    give(served.end, begun(3, encode_headers([(b"x", b"y")]), frames.END_STREAM))
    assert (frames.RST_STREAM, 3, Http2ErrorCode.STREAM_CLOSED.to_bytes(4, "big")) in served.answered()
    assert not served.end.is_lost
    assert not served.end.streams


@pytest.mark.parametrize("flag", [1, 2, 255])
@pytest.mark.parametrize("path", [LOOKUP, CONNECT], ids=["unary", "stream"])
async def test_a_compressed_message_is_refused_by_name(made: Callable[[Wire], Server], path: bytes, flag: int) -> None:
    served = made(Wire())
    give(served.end, OPENED + begun(1, path) + data(1, message(b"abc", flag)))
    await served.turns()
    assert any(b"compressed" in payload for kind, _, payload in served.answered() if kind == frames.HEADERS)
    assert not served.end.streams
    assert not served.end.is_lost


@pytest.mark.parametrize("rest", [b"\0", b"\0\0\0\0", message(b"abc")[:-1]], ids=["flag", "size", "message"])
@pytest.mark.parametrize("path", [CONNECT, REFLECT], ids=["enveloped", "plain"])
async def test_a_stream_that_ends_in_the_middle_of_a_message_is_answered_and_fails(
    made: Callable[[Wire], Server], path: bytes, rest: bytes
) -> None:
    served = made(Wire())
    whole = wire.ClientFrames(items=[wire.ClientFrame(publish=b"abc")]) if path == CONNECT else Asked(host="abc")
    give(served.end, OPENED + begun(1, path) + data(1, message(whole.SerializeToString()) + rest, frames.END_STREAM))
    await served.turns()
    assert [kind for kind, stream, _ in served.answered() if stream == 1][:3] == [
        frames.HEADERS, frames.DATA, frames.HEADERS
    ]  # fmt: skip
    assert b"in the middle of a message" in bytes(served.wire.written)
    assert not served.end.streams
    assert not served.end.is_lost


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_messages_that_are_split_anywhere_are_answered(made: Callable[[Wire], Server], size: int) -> None:
    served = made(Wire())
    frame = wire.ClientFrames(items=[wire.ClientFrame(publish=b"abc")]).SerializeToString()
    stream = message(frame) + message(frame)
    parts = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
    sent = OPENED + begun(1, CONNECT) + b"".join(data(1, part) + data(1, b"") for part in parts)
    for at in range(0, len(sent), size):
        give(served.end, sent[at : at + size])
    await served.turns()
    told = b"".join(payload for kind, _, payload in served.answered() if kind == frames.DATA)
    _, length = struct.unpack_from("!BI", told)
    assert [item.id for item in wire.ServerFrames.FromString(told[5 : 5 + length]).items] == [3, 3]


SIZE_0, SIZE_4096, SIZE_4097, FIELD = b"\x20", b"\x3f\xe1\x1f", b"\x3f\xe2\x1f", b"\x40\x01a\x01b"


@pytest.mark.parametrize("sent", [SIZE_0 * 3, (SIZE_0 + SIZE_4096) * 8000, SIZE_4097, FIELD + SIZE_0, b"\xff" * 30_000])
def test_a_table_has_few_sizes_in_a_block_and_none_above_its_maximum(sent: bytes) -> None:
    with pytest.raises(Http2Violation) as raised:
        HeaderDecoder(list, 32 << 10).decode(sent)
    assert raised.value.code is Http2ErrorCode.COMPRESSION_ERROR


def test_a_table_that_is_emptied_and_filled_again_is_followed() -> None:
    decoder: HeaderDecoder[Any] = HeaderDecoder(list, 32 << 10)
    assert decoder.decode(SIZE_0 + SIZE_4096 + FIELD + b"\xbe") == [(b"a", b"b")] * 2
    assert decoder.decode(SIZE_0) == []
    assert decoder.decode(FIELD) == [(b"a", b"b")], "of a table without room nothing is kept"
    assert decoder.decode(SIZE_4096) == []
    assert decoder.decode(FIELD) == [(b"a", b"b")], "the same bytes, and now it is kept"
    assert decoder.decode(b"\xbe") == [(b"a", b"b")]


def test_a_block_whose_entry_empties_the_table_empties_it_each_time() -> None:
    """An entry of 5,000 bytes does not fit in, and all others leave: 3,134 bytes on the wire by Huffman's code."""
    large = b"\x40\x01a\xff\xb6\x17" + b"\x18\xc6\x31\x8c\x63" * 625  # 5,000 times "a", of 5 bits
    decoder: HeaderDecoder[Any] = HeaderDecoder(list, 32 << 10)
    assert decoder.decode(large) == [(b"a", b"a" * 5000)]
    decoder.decode(FIELD)
    decoder.decode(large)
    with pytest.raises(Http2Violation):
        decoder.decode(b"\xbe")


def test_what_is_said_of_a_block_does_not_quote_it() -> None:
    """It may have a token in it."""
    with pytest.raises(Http2Violation) as raised:
        HeaderDecoder(list, 32 << 10).decode(b"\0\x01a" + b"\xff" * 9 + b"Bearer 1234")
    assert "1234" not in str(raised.value)
    assert raised.value.__cause__ is None


# ---------------------------------------------------------------------------------- a hostile server
def caller() -> tuple[client._ClientConnection, Wire]:
    end, written = client._ClientConnection(), Wire()
    end.connection_made(written)
    return end, written


async def test_calls_wait_while_a_server_takes_none_and_go_when_it_takes_some() -> None:
    end, _ = caller()
    give(end, frames.encode_settings({Http2Setting.MAX_CONCURRENT_STREAMS: 0}))
    calls = [client._UnaryCall(HERE, ASKED) for _ in range(3)]
    for each in calls:
        end.start(each, LOOKUP)
    assert not end.streams
    give(end, frames.encode_settings({Http2Setting.MAX_CONCURRENT_STREAMS: 2}))
    assert len(end.streams) == 2
    end.close(ConnectionLost("the test is over"))
    assert all(each.done.done() for each in calls)


async def test_an_answer_with_two_heads_ends_its_call_alone() -> None:
    end, written = caller()
    give(end, frames.encode_settings({}))
    first, second = client._UnaryCall(HERE, ASKED), client._UnaryCall(HERE, ASKED)
    for each in (first, second):
        end.start(each, LOOKUP)
    answer = begun(1, encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")]))
    give(end, answer + answer)
    assert isinstance(first.done.exception(), ConnectionLost)
    assert bytes(written.written).endswith(frames.encode_rst_stream(1, Http2ErrorCode.PROTOCOL_ERROR))
    assert not end.is_lost
    assert not second.done.done()
    end.close(ConnectionLost("the test is over"))
