"""Connections of HTTP/2 as targets: any bytes that a peer sends. What is raised, or logged as a fault, is a defect."""

import asyncio
import logging
from typing import Any

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost
from magnetar.runtime.access import OPEN_ACCESS
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc import client, server
from magnetar.runtime.grpc.messages import prefix
from magnetar.runtime.network import CallContext, EndOfStream, Endpoint, find_rpc
from magnetar.runtime.tcp import http2_frames as frames
from magnetar.runtime.tcp.http2_frames import encode_headers
from tests.support.wire import Wire, give

_LOG = logging.getLogger("magnetar.rpc")


def _head(path: str, *more: tuple[bytes, bytes]) -> bytes:
    named = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"))
    return encode_headers([*named, (b"te", b"trailers"), (b"content-type", b"application/grpc"), *more])


def _data(stream: int, message: bytes, flags: int = 0) -> bytes:
    framed = prefix(len(message)) + message
    return frames.encode_frame_header(len(framed), frames.DATA, flags, stream) + framed


def requests() -> list[bytes]:
    lookup, connect = "/magnetar.wire.Broker/Lookup", "/magnetar.wire.Broker/Connect"
    opened = frames.CONNECTION_PREFACE + frames.encode_settings({frames.Http2Setting.INITIAL_WINDOW_SIZE: 100})
    unary = frames.encode_header_block(1, _head(lookup), 0, 16_384) + _data(1, b"\x0a\x01t", frames.END_STREAM)
    items = wire.ClientFrames(items=[wire.ClientFrame(publish=b"abc")] * 3).SerializeToString()
    stream = frames.encode_header_block(3, _head(connect, (b"authorization", b"Bearer x")), 0, 50) + _data(3, items)
    rest = frames.encode_ping(bytes(8)) + frames.encode_window_update(0, 1000) + frames.encode_rst_stream(
        3, frames.Http2ErrorCode.CANCEL
    )
    indexed = frames.encode_frame_header(9, frames.HEADERS, 4, 5) + b"\x83\x86\x40\x01a\x01b\xbe\x84"
    padded = frames.encode_frame_header(12, frames.DATA, frames.FLAG_PADDED, 3) + b"\x02" + bytes(9) + b"\0\0"
    away = frames.encode_goaway(0, frames.Http2ErrorCode.NO_ERROR)
    return [opened + unary + stream + rest, opened + stream + padded + indexed, opened + away]


def answers() -> list[bytes]:
    head = encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
    trailers = encode_headers([(b"grpc-status", b"5"), (b"grpc-message", b"a%20b"), (b"magnetar-error-bin", b"CAE")])
    opened = frames.encode_settings({frames.Http2Setting.MAX_CONCURRENT_STREAMS: 100}) + frames.SETTINGS_ACK
    reply = frames.encode_header_block(1, head, 0, 16_384) + _data(1, b"\x0a\x01t")
    ended = frames.encode_header_block(1, trailers, frames.END_STREAM, 16_384)
    items = wire.ServerFrames(items=[wire.ServerFrame(credit=5)]).SerializeToString()
    stream = frames.encode_header_block(3, head, 0, 16_384) + _data(3, items) + frames.encode_rst_stream(
        3, frames.Http2ErrorCode.NO_ERROR
    )
    return [
        opened + reply + ended + stream,
        opened + stream + frames.encode_goaway(1, frames.Http2ErrorCode(0), "bye") + reply,
    ]


class _Broker:
    async def lookup(self, request: Any, context: CallContext) -> Any:
        return wire.LookupReply(owner=request.topic)

    async def connect(self, stream: Any, context: CallContext) -> None:
        try:
            while True:
                for item in await stream.receive():
                    stream.send_nowait(wire.ServerFrame(id=1, delivery=wire.Delivery(entry=item.publish)))
        except EndOfStream:
            return


class _Faults(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


def run_requests(data: bytes) -> None:
    _run(_serve(data))


def run_answers(data: bytes) -> None:
    _run(_ask(data))


def _run(coroutine: Any) -> None:
    faults = _Faults()
    _LOG.addHandler(faults)
    try:
        asyncio.run(coroutine)
    finally:
        _LOG.removeHandler(faults)
    if faults.found:
        raise AssertionError(faults.found[0].getMessage()) from (faults.found[0].exc_info or (None, None))[1]


async def _serve(data: bytes) -> None:
    listener = server._Listener([("Broker", _Broker())], OPEN_ACCESS, SystemClock())
    connection = server._ServerConnection(listener)
    connection.connection_made(Wire())
    give(connection, data)
    for _ in range(5):
        await asyncio.sleep(0)
    connection.close(ConnectionLost("the input is over"))
    if listener.handlers:
        async with asyncio.timeout(5):
            await asyncio.wait(list(listener.handlers))
    assert not connection.streams


async def _ask(data: bytes) -> None:
    here, connection = Endpoint("127.0.0.1", 1), client._ClientConnection()
    connection.connection_made(Wire())
    call = client._UnaryCall(here, prefix(3) + b"\x0a\x01t")
    stream = client._ClientStream(here, find_rpc("Broker", "Connect"))
    for each in (call, stream):
        connection.start(each, _head("/magnetar.wire.Broker/Lookup"))
    give(connection, data)
    await asyncio.sleep(0)
    connection.close(ConnectionLost("the input is over"))
    assert call.done.done(), "no call stays without an answer"
    assert stream.is_broken
