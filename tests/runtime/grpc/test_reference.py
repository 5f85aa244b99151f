"""Our gRPC against grpcio, the reference, on both ends: our client with its server, and its client with our server."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost, InternalError, MagnetarError, TimedOut, TopicNotFound, WrongProtocol
from magnetar.runtime.access import CallerAccess, ListenerAccess, TlsFiles
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc.client import GrpcChannel, connect
from magnetar.runtime.grpc.server import RunningGrpcServer, serve
from magnetar.runtime.network import CallContext, EndOfStream, Endpoint, find_rpc
from tests.support.certificates import Authority

HERE = Endpoint("127.0.0.1", 0)
LOOKUP, CONNECT = find_rpc("Broker", "Lookup"), find_rpc("Broker", "Connect")
SIZES = [0, 1, 5, 16_383, 16_384, 16_385, 65_535, 65_536, 200_000, 1 << 20, 5 << 20]


class Echo:
    """Our handler: what came goes back; a topic named after an error raises it."""

    async def lookup(self, request: Any, context: CallContext) -> Any:
        if request.topic == "gone":
            raise TopicNotFound("it is gone: 100 % ü", topic="gone")
        return wire.LookupReply(owner=request.topic)

    async def connect(self, stream: Any, context: CallContext) -> None:
        try:
            while True:
                for item in await stream.receive():
                    await stream.send(wire.ServerFrame(id=1, delivery=wire.Delivery(entry=item.publish)))
        except EndOfStream:
            return


@pytest.fixture
async def ours() -> AsyncIterator[RunningGrpcServer]:
    serving = await serve(HERE, [("Broker", Echo())], ListenerAccess(), SystemClock())
    yield serving
    await serving.close()


@pytest.fixture
async def reference() -> AsyncIterator[Endpoint]:
    """A server of grpcio with the same service."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])

    async def lookup(request: Any, context: Any) -> Any:
        if request.topic == "gone":
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is gone: 100 % ü")
        if request.topic == "slow":
            await asyncio.sleep(60)
        return wire.LookupReply(owner=request.topic)

    async def stream(frames: Any, context: Any) -> AsyncIterator[Any]:
        async for each in frames:
            for item in each.items:
                answer = wire.ServerFrame(id=1, delivery=wire.Delivery(entry=item.publish))
                yield wire.ServerFrames(items=[answer])

    methods = {
        "Lookup": grpc.unary_unary_rpc_method_handler(
            lookup, wire.LookupRequest.FromString, wire.LookupReply.SerializeToString
        ),
        "Connect": grpc.stream_stream_rpc_method_handler(
            stream, wire.ClientFrames.FromString, wire.ServerFrames.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("magnetar.wire.Broker", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Endpoint("127.0.0.1", port)
    await server.stop(0)


def dial(endpoint: Endpoint, **options: Any) -> grpc.aio.Channel:
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), *options.items()]
    return grpc.aio.insecure_channel(str(endpoint), options=limits)


# ---------------------------------------------------------------------------------- its client, our server
async def test_its_calls_are_answered_by_our_server(ours: RunningGrpcServer) -> None:
    async with dial(ours.endpoint) as channel:
        call = channel.unary_unary(LOOKUP.path, None, wire.LookupReply.FromString)
        for size in (0, 1, 5000, 400_000):
            request = wire.LookupRequest(topic="t" * size).SerializeToString()
            for _ in range(3):  # its header table has them from the second on
                trace = (("x-trace", "1" * min(size, 3000)),)
                assert (await call(request, timeout=20, metadata=trace)).owner == "t" * size
        many = await asyncio.gather(*[call(wire.LookupRequest(topic=f"{n}").SerializeToString()) for n in range(300)])
        assert [each.owner for each in many] == [str(n) for n in range(300)]


async def test_its_client_gets_our_statuses_and_our_errors(ours: RunningGrpcServer) -> None:
    async with dial(ours.endpoint) as channel:
        call = channel.unary_unary(LOOKUP.path)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(wire.LookupRequest(topic="gone").SerializeToString())
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "it is gone: 100 % ü")
        trailers = dict(raised.value.trailing_metadata() or ())
        assert wire.Error.FromString(trailers["magnetar-error-bin"]).message == "it is gone: 100 % ü"  # type: ignore[arg-type]
        for path in ("/magnetar.wire.Broker/Nothing", "/nothing"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(path)(b"")
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"\xff\xff")
        assert "no magnetar.wire.LookupRequest" in (raised.value.details() or "")


@pytest.mark.parametrize("frame", [16_384, 1 << 20])
async def test_its_stream_carries_messages_of_any_size_both_ways(ours: RunningGrpcServer, frame: int) -> None:
    async with dial(ours.endpoint, **{"grpc.http2.max_frame_size": frame}) as channel:
        call = channel.stream_stream(CONNECT.path)()
        for size in SIZES:
            payload = os.urandom(size)
            frames = wire.ClientFrames(items=[wire.ClientFrame(publish=payload)])
            await call.write(frames.SerializeToString())
            answer = wire.ServerFrames.FromString(await call.read())
            assert answer.items[0].delivery.entry == payload
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_its_client_that_cancels_or_goes_is_noticed(ours: RunningGrpcServer) -> None:
    channel = dial(ours.endpoint)
    calls = [channel.stream_stream(CONNECT.path)() for _ in range(3)]
    for call in calls:
        await call.write(wire.ClientFrames(items=[wire.ClientFrame(publish=b"x")]).SerializeToString())
        await call.read()
    listener: Any = ours._listener
    assert len(listener.handlers) == 3
    calls[0].cancel()
    await _until(lambda: len(listener.handlers) == 2)
    await channel.close(0)
    await _until(lambda: not listener.handlers)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (the sockets have no event for it)
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------- our client, its server
@pytest.fixture
async def channel(reference: Endpoint) -> AsyncIterator[GrpcChannel]:
    channel = connect(reference)
    yield channel
    await channel.close()


async def test_our_calls_are_answered_by_its_server(channel: GrpcChannel) -> None:
    for size in SIZES:
        reply = await channel.call(LOOKUP, wire.LookupRequest(topic="t" * size), timeout_s=20)
        assert reply.owner == "t" * size
    calls = [channel.call(LOOKUP, wire.LookupRequest(topic=f"{n}"), timeout_s=20) for n in range(300)]
    assert [each.owner for each in await asyncio.gather(*calls)] == [str(n) for n in range(300)]


async def test_our_client_understands_its_statuses(channel: GrpcChannel) -> None:
    with pytest.raises(InternalError, match="it is gone: 100 % ü"):  # NOT_FOUND without our trailer
        await channel.call(LOOKUP, wire.LookupRequest(topic="gone"), timeout_s=20)
    with pytest.raises(WrongProtocol, match="does not offer"):
        await channel.call(find_rpc("Metadata", "Get"), find_rpc("Metadata", "Get").request(), timeout_s=20)
    with pytest.raises(TimedOut):
        await channel.call(LOOKUP, wire.LookupRequest(topic="slow"), timeout_s=0.1)
    assert (await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=20)).owner == "t"


async def test_our_stream_goes_both_ways_with_its_server_and_ends_in_order(channel: GrpcChannel) -> None:
    stream = channel.stream(CONNECT)
    payloads = [os.urandom(size) for size in SIZES]
    for payload in payloads:
        await stream.send(wire.ClientFrame(publish=payload))
    got: list[bytes] = []
    async with asyncio.timeout(30):
        while len(got) < len(payloads):
            got += [item.delivery.entry for item in await stream.receive()]
    assert got == payloads
    await stream.close()
    with pytest.raises(MagnetarError):
        stream.send_nowait(wire.ClientFrame())


async def test_its_server_that_goes_with_a_stream_open_is_a_lost_connection() -> None:
    server = grpc.aio.server()

    async def stream(frames: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in frames:
            yield b"\x0a\x02\x08\x01"

    methods = {"Connect": grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("magnetar.wire.Broker", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(Endpoint("127.0.0.1", port))
    open_one = channel.stream(CONNECT)
    open_one.send_nowait(wire.ClientFrame(id=1))
    assert await open_one.receive()
    await server.stop(0)
    with pytest.raises(ConnectionLost):
        await open_one.receive()
    await channel.close()


# ---------------------------------------------------------------------------------- TLS
def _read(*paths: str) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


async def test_its_client_and_our_server_agree_on_http2_over_tls(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "authority")
    mine = authority.issue("broker")
    serving = await serve(HERE, [("Broker", Echo())], ListenerAccess(tls=mine), SystemClock())
    ada = authority.issue("ada")
    pem = _read(authority.ca, ada.key, ada.certificate)
    async with grpc.aio.secure_channel(str(serving.endpoint), grpc.ssl_channel_credentials(*pem)) as channel:
        call = channel.unary_unary(LOOKUP.path, None, wire.LookupReply.FromString)
        for size in (1, 300_000):
            assert (await call(wire.LookupRequest(topic="t" * size).SerializeToString())).owner == "t" * size
    await serving.close()


async def test_our_client_and_its_server_agree_on_http2_over_tls(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "authority")
    mine = authority.issue("broker")
    key, certificate = _read(mine.key, mine.certificate)
    server = grpc.aio.server()

    async def lookup(request: bytes, context: Any) -> bytes:
        return wire.LookupReply(owner=wire.LookupRequest.FromString(request).topic).SerializeToString()

    methods = {"Lookup": grpc.unary_unary_rpc_method_handler(lookup)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("magnetar.wire.Broker", methods),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    channel = connect(Endpoint("127.0.0.1", port), CallerAccess(TlsFiles(ca=authority.ca)))
    for size in (1, 300_000):
        reply = await channel.call(LOOKUP, wire.LookupRequest(topic="t" * size), timeout_s=20)
        assert reply.owner == "t" * size
    await channel.close()
    await server.stop(0)
