"""gRPC's client on grpc.aio: the `connect` of `runtime/network.py`.

Streams: `runtime/grpc/stream.py`. Errors: `runtime/grpc/errors.py`. grpc itself is imported at its first use, so that a
process without gRPC does not pay for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from ...proto.errors import ConnectionLost, MagnetarError, WrongProtocol
from ..access import NOTHING, CallerAccess
from ..network import EndOfStream, Endpoint, Rpc
from .access import ChannelTls, check_clear, metadata_of
from .envelope import END_OF_ITEMS
from .errors import from_grpc, grpc_module, is_cancelled
from .loop import drop_late_events
from .options import CHANNEL_OPTIONS
from .stream import GrpcStream

if TYPE_CHECKING:
    import grpc.aio

CLOSE_TIMEOUT_S = 10.0
"""How long an orderly close of a stream waits for the other side before it cancels."""

_LOG = logging.getLogger("magnetar.rpc")

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)


class GrpcChannel:
    """A connection to one server. Belongs to the event loop in which it is first used."""

    def __init__(self, endpoint: Endpoint, access: CallerAccess) -> None:
        check_clear(endpoint, access)
        self._endpoint = endpoint
        self._access = access
        self._tls = ChannelTls(access.tls) if access.tls is not None else None
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._streams: dict[_ClientStream, Any] = {}  # each with its connection, which ends with the last of them
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def _opened(self) -> Any:
        if self._closed:
            raise ConnectionLost(f"the channel to {self._endpoint} is closed", endpoint=self._endpoint)
        if self._tls is not None and self._tls.changed():
            self._channel = None  # the next one brings the new certificate; streams keep the one they have
            self._methods.clear()
        if self._channel is None:
            drop_late_events(asyncio.get_running_loop())
            make, target = grpc_module().aio, str(self._endpoint)
            if self._tls is not None:
                self._channel = make.secure_channel(target, self._tls.credentials, options=CHANNEL_OPTIONS)
            else:
                self._channel = make.insecure_channel(target, options=CHANNEL_OPTIONS)
        return self._channel

    async def call(self, rpc: Rpc[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        channel = self._opened()
        method = self._methods.get(rpc.path)
        if method is None:
            serialize, parse = rpc.request.SerializeToString, rpc.reply.FromString
            method = self._methods[rpc.path] = channel.unary_unary(rpc.path, serialize, parse)
        try:
            reply: Rep = await method(request, timeout=timeout_s, metadata=metadata_of(self._access))
        except grpc_module().aio.AioRpcError as error:
            raise from_grpc(error, self._endpoint) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise ConnectionLost(f"the channel to {self._endpoint} was closed", endpoint=self._endpoint) from None
        return reply

    def stream(self, rpc: Rpc[Any, Any]) -> GrpcStream:
        channel = self._opened()
        method = self._methods.get(rpc.path)
        if method is None:
            method = self._methods[rpc.path] = channel.stream_stream(rpc.path)
        call = method(metadata=metadata_of(self._access))
        stream = _ClientStream(self._endpoint, rpc, call)
        self._streams[stream] = channel
        call.add_done_callback(lambda _: self._streams.pop(stream, None))
        return stream

    async def close(self) -> None:
        """Cancels the calls in progress."""
        self._closed = True
        for stream in list(self._streams):
            stream.cancel()
            await stream.release()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(0)


def connect(endpoint: Endpoint, access: CallerAccess = NOTHING) -> GrpcChannel:
    return GrpcChannel(endpoint, access)


class _ClientStream(GrpcStream):
    def __init__(self, endpoint: Endpoint, target: Rpc[Any, Any], call: Any) -> None:
        super().__init__(
            target.reply, self._read_call, self._write_call, lambda _: call.cancel(),
            out_bytes_max=target.request_bytes_max,
        )  # fmt: skip
        self._endpoint = endpoint
        self._call = call
        self._grpc_aio = grpc_module().aio

    def break_off(self, error: MagnetarError) -> None:
        """A call that never connected does not end a write that waits for it, even when cancelled: the writer fails."""
        super().break_off(error)
        if self._flusher is not None:
            self._flusher.cancel()

    async def _read_call(self) -> bytes:
        try:
            data = await self._call.read()
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            error: MagnetarError = ConnectionLost(f"{self._endpoint}: the stream was cancelled")
            self.fail(error)
            raise error from None
        except self._grpc_aio.AioRpcError as failure:
            error = from_grpc(failure, self._endpoint)
            self.fail(_broken_by(error))
            raise error from failure
        if data is self._grpc_aio.EOF:
            self.fail(ConnectionLost(f"{self._endpoint} ended the stream"))
            raise EndOfStream
        return bytes(data)

    async def _write_call(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise ConnectionLost(f"{self._endpoint}: the stream was cancelled") from None
        except self._grpc_aio.AioRpcError as failure:
            raise _broken_by(from_grpc(failure, self._endpoint)) from failure
        except (asyncio.InvalidStateError, self._grpc_aio.UsageError, self._grpc_aio.InternalError) as failure:
            raise ConnectionLost(f"{self._endpoint}: the stream is over") from failure

    async def close(self) -> None:
        """Half-closes after the queued items and waits for the server's end; a reader may receive the last items."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.finish()
                if self._broken is None:
                    await self._write(END_OF_ITEMS)
                    await self._call.done_writing()
                puller = self._start_pulling()
                self._changed()  # without a reader it reads on
                await asyncio.wait((puller,))
        except (TimeoutError, MagnetarError, asyncio.InvalidStateError) as error:
            _LOG.debug("the stream to %s did not end in order: %s", self._endpoint, error)
        finally:
            self._call.cancel()
            await self.release()


def _broken_by(error: MagnetarError) -> MagnetarError:
    """The error for senders when the stream broke with `error`: what they sent may have been done."""
    return error if isinstance(error, WrongProtocol) else ConnectionLost(error.message, **error.fields)
