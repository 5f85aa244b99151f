"""An end of a gRPC stream of items, the same for client and server. It has no task of its own.

**Out.** `send_nowait` serialises the item and queues it. Once in a turn of the loop all queued items, up to
COALESCE_BYTES, leave as one envelope `{repeated X items = 1}`. The envelope is built by hand (tag, length, item), and
no item waits for further ones. Long pieces (UNCOPIED_PIECE_BYTES) are given to the transport as they are, not joined.
Bytes that the windows of the other end or the transport do not accept stay queued until they do.
**In.** The connection passes each envelope to `on_message`; `receive` parses and returns all items that have arrived.
The bytes that it returned are credited to the other end's window, so a stream that is not read stores at most
STREAM_WINDOW_BYTES. Credit for many bytes (URGENT_CREDIT_BYTES) leaves a turn of the loop before the items are parsed,
so that the other end sends the next ones meanwhile. A cancelled `receive` loses nothing.
**Slices.** An envelope of very many items is parsed in slices of ITEMS_AT_ONCE, with a turn of the loop between two
slices, because a thousand items take a millisecond. At a server a slice also has at most PARSED_BYTES_AT_ONCE bytes
besides entries. An envelope contains only items: anything else is WrongProtocol, and ends the stream.

Bounds: STREAM_QUEUE_BYTES out (`send` waits; callers of `send_nowait` must have a bound of their own), a window and one
envelope in.

The two ends differ in how a stream begins and ends: `runtime/grpc/server.py`, `runtime/grpc/client.py`.

Also in this file, below its heading: translation between gRPC's statuses and errors (errors).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import urllib.parse
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ...proto import wire_pb2 as wire
from ...proto.checksum import encode_varint
from ...proto.errors import (
    ConnectionLost,
    CredentialsExpired,
    InternalError,
    InvalidRequest,
    MagnetarError,
    MessageTooLarge,
    NotFound,
    TimedOut,
    Unauthenticated,
    Unauthorized,
    Unavailable,
    WrongProtocol,
    from_wire,
    to_wire,
)
from ..budget import CallerMemory
from ..files import Buffer
from ..network import COALESCE_BYTES, MESSAGE_BYTES_MAX, STREAM_QUEUE_BYTES, EndOfStream, Endpoint, Pieces
from ..tcp.http2_frames import HeaderField
from .messages import (
    ITEM_PREFIXES,
    ITEMS_AT_ONCE,
    LONG_BYTES,
    PARSED_BYTES_AT_ONCE,
    PREFIX_BYTES,
    SHORT_ITEM_BYTES,
    MessageStream,
    find_long_item_fields,
    measure_item_to_parse,
    must_parse_in_slices,
    prefix,
    split_long_items,
)

PARSED_COPIES = 2
"""Copies of what is received: the envelope, and the items that are parsed from it."""
UNCOPIED_PIECE_BYTES = 16 << 10
"""Size of a piece of an item from which on it is not copied into the envelope: shorter ones cost less joined."""
URGENT_CREDIT_BYTES = 256 << 10
"""Bytes from which on credit leaves at once: to work on as many takes a millisecond, which the other end would wait for
its credit."""
TIGHT_MEMORY_QUEUE_BYTES = 64 << 10
"""Most bytes that `send` queues while the memory of the process is tight."""


class GrpcStream(MessageStream):
    """One end of a gRPC stream of items; implements `runtime.network.Stream`. The object exists before the stream is
    opened on a connection, and after the stream has ended."""

    def __init__(
        self,
        envelope: type[Any],
        *, in_bytes_max: int = MESSAGE_BYTES_MAX, out_bytes_max: int = COALESCE_BYTES,
        copied: frozenset[int] | None = None, memory: CallerMemory | None = None,
    ) -> None:  # fmt: skip
        """Creates a stream that is not open yet. `envelope`: the class of the messages that arrive. `in_bytes_max`,
        `out_bytes_max`: the largest envelope in each direction, in bytes. `copied`: the tags of the bytes fields that
        `find_bytes_field_tags` returns; None: received items are not checked. `memory` counts the queued bytes, and
        those that `receive` returned last."""
        super().__init__(in_bytes_max, memory.arrivals if memory is not None else None)
        memory = memory or CallerMemory()
        self._requests, self._answers = memory.requests, memory.answers
        self._envelope = envelope
        self._copied = copied
        self._long = find_long_item_fields(envelope) if copied is not None else {}
        self._envelope_bytes = min(COALESCE_BYTES, out_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._broken: MagnetarError | None = None
        self._waiting: list[asyncio.Future[None]] = []  # until there is room, or something has left
        self._arrival: asyncio.Future[None] | None = None  # what `receive` waits for
        # out
        self._items: deque[tuple[int, Pieces]] = deque()  # bytes, with the tag and the length
        self.queued_bytes = 0
        self.sent_bytes = 0
        self._leaving: deque[Buffer] = deque()  # the rest of the envelope that is being sent …
        self._leaving_bytes = 0  # … its bytes …
        self._leaving_size = 0  # … and how many queued bytes the whole has
        self._flushing = False  # in this turn
        self._has_answered = True  # a server has not, until the head of its answer left
        self._closing = False
        # in
        self.has_read = False
        self._came: list[bytes | bytearray] = []
        self._came_bytes = 0
        self._came_cost = 0  # of the window
        self._taken_bytes = 0  # of the envelopes of `receive`'s last items, and of `_rest`
        self._rest: deque[bytes | bytearray] = deque()  # envelopes of very many items, received and not parsed yet
        self._rest_from = 0  # the end of what is parsed of the first
        self._end: EndOfStream | MagnetarError | None = None
        self._reading = False

    # ------------------------------------------------------------------------------ out
    def send_nowait(self, item: Message | bytes | Pieces) -> None:
        """Adds an item, or the encoded bytes of an item, to the queue of this stream. Never waits. If the stream is
        broken, raises the error with which it broke."""
        if self._broken is not None:
            raise copy_error(self._broken)
        if isinstance(item, tuple):
            pieces, size = item, sum(map(len, item))
        else:
            data = item if isinstance(item, bytes) else item.SerializeToString()
            pieces, size = (data,), len(data)
        head = ITEM_PREFIXES[size] if size < SHORT_ITEM_BYTES else b"\x0a" + encode_varint(size)
        size += len(head)
        self._items.append((size, (head, *pieces)))
        self.queued_bytes += size
        self._answers.held += size
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def send(self, item: Message | bytes | Pieces) -> None:
        limit = STREAM_QUEUE_BYTES if self._answers.held <= self._answers.tight else TIGHT_MEMORY_QUEUE_BYTES
        if self.queued_bytes > limit:
            await self.wait_drained(limit)
        self.send_nowait(item)

    async def wait_drained(self, bytes_max: int = STREAM_QUEUE_BYTES) -> None:
        while self.queued_bytes > bytes_max and self._broken is None:
            await self._wait_change()
        if self._broken is not None:
            raise copy_error(self._broken)

    async def wait_sent(self, offset: int) -> None:
        while self.sent_bytes < offset and self._broken is None:
            await self._wait_change()
        if self._broken is not None:
            raise copy_error(self._broken)

    async def finish(self) -> None:
        """Waits until all queued items were passed to the connection, or the stream is broken. Does not raise for a
        broken stream."""
        while self.queued_bytes and self._broken is None:
            await self._wait_change()

    def on_writable(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Sends queued items as far as the windows and the transport allow."""
        self._flushing = False
        connection = self.connection
        if connection is None:
            return
        if not self._has_answered:
            self._has_answered = True
            self.send_answer_headers()
        while self._leaving_bytes or self._items:
            if not self._leaving_bytes:
                self._leaving_size, self._leaving = self._next_envelope()
                self._leaving_bytes = PREFIX_BYTES + self._leaving_size
            self._leaving_bytes -= connection.out.send_parts(self, self._leaving, self._leaving_bytes)
            if self._leaving_bytes or self._broken is not None:
                return  # there is no room, or the stream broke meanwhile
            self.queued_bytes -= self._leaving_size
            self._answers.held -= self._leaving_size
            self.sent_bytes += self._leaving_size
            if self._waiting:
                self._has_left()
        if self._closing:
            self.on_output_drained()

    def send_answer_headers(self) -> None:
        """At a server: sends the headers of the answer. Called once, before the first item. A client does not implement
        it."""
        raise NotImplementedError

    def on_output_drained(self) -> None:
        """Called when the stream is closing and all queued items were sent. The server's stream overrides it."""

    def _next_envelope(self) -> tuple[int, deque[Buffer]]:
        """Removes the items of the next envelope from the queue. Returns (their bytes, the parts of the gRPC message).
        """
        items, count, size = self._items, 0, 0
        for item_bytes, _ in items:
            if count and size + item_bytes > self._envelope_bytes:
                break
            count, size = count + 1, size + item_bytes
        parts: deque[Buffer] = deque()
        short: list[Buffer] = [prefix(size)]
        for _ in range(count):
            item_bytes, pieces = items.popleft()
            if item_bytes < UNCOPIED_PIECE_BYTES:
                short += pieces
                continue
            for piece in pieces:
                if len(piece) < UNCOPIED_PIECE_BYTES:
                    short.append(piece)
                    continue
                if short:
                    parts.append(b"".join(short))
                    short = []
                parts.append(piece)
        if short:
            parts.append(b"".join(short))
        return size, parts

    # ------------------------------------------------------------------------------ in
    def on_message(self, data: bytes | bytearray, cost: int) -> None:
        self.has_read = True
        if data:
            self._came.append(data)
            self._came_bytes += len(data)
        elif self.connection is not None:
            self.connection.allowance.charge_frames()
        self._came_cost += cost
        if not self._came or (self._closing and not self._reading):  # it is not read any more: the end has to come
            self._credit()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def on_message_refused(self, size: int) -> None:
        limit = self.in_bytes_max
        self.terminate_with_error(
            MessageTooLarge(f"{size} bytes of requests at once; at most {limit} are taken", size=size, limit=limit)
            if size >= 0
            else WrongProtocol("a message on the stream is compressed, and no compression was agreed on")
        )

    def _credit(self) -> None:
        cost, self._came_cost = self._came_cost, 0
        self.on_service_read(cost)

    async def receive(self) -> Sequence[Any]:
        assert not self._reading, "one reader of a stream at a time"
        self._reading = True
        try:
            if not self._rest:
                self._requests.held -= self._taken_bytes
                self._taken_bytes = 0
            credited = False
            while True:
                if self._rest:
                    await asyncio.sleep(0)  # other tasks run
                    if items := self._some():
                        return items
                elif not self._came:
                    if self._end is not None:
                        raise EndOfStream if isinstance(self._end, EndOfStream) else copy_error(self._end)
                    self._arrival = self._loop.create_future()
                    try:
                        await self._arrival
                    finally:
                        self._arrival = None
                elif self._requests.held > self._requests.limit:
                    await self._requests.wait_room()
                elif self._came_cost > URGENT_CREDIT_BYTES and not credited:
                    credited = True  # once: what comes meanwhile is credited when it is taken
                    self._credit()
                    await asyncio.sleep(0)
                elif items := self._take():
                    return items
        finally:
            self._reading = False

    def _take(self) -> list[Any]:
        came, self._came = self._came, []
        taken = PARSED_COPIES * self._came_bytes
        self._taken_bytes += taken
        self._requests.held += taken
        self._came_bytes = 0
        cost, self._came_cost = self._came_cost, 0
        self.on_service_read(cost)
        if sum(map(len, came)) > 4 * ITEMS_AT_ONCE:  # an item has at least two bytes
            try:
                is_long = must_parse_in_slices(came, self._copied)
            except MagnetarError as error:
                self.terminate_with_error(error)
                raise copy_error(error) from None
            if is_long:
                self._rest.extend(came)
                return self._some()
        items: list[Any] = []
        for data in came:
            items += self._parsed(data)
        return items

    def _some(self) -> list[Any]:
        """Returns the next received items: at most ITEMS_AT_ONCE, or about PARSED_BYTES_AT_ONCE bytes to parse."""
        data, offset, items, parsed = self._rest[0], self._rest_from, 0, 0
        end = len(data)
        try:
            while offset < end and items < ITEMS_AT_ONCE:
                after, size = measure_item_to_parse(data, offset, self._copied)
                if items and parsed + size > PARSED_BYTES_AT_ONCE:
                    break
                offset, items, parsed = after, items + 1, parsed + size
        except MagnetarError as error:
            self.terminate_with_error(error)
            raise copy_error(error) from None
        part = data[self._rest_from : offset]
        if offset < end:
            self._rest_from = offset
        else:
            self._rest.popleft()
            self._rest_from = 0
        return list(self._parsed(part))

    def _parsed(self, data: bytes | bytearray) -> Any:
        if self._long and len(data) >= LONG_BYTES:
            items, rest = split_long_items(data, self._long)
            if rest:
                return [*items, *self._parsed(data[rest:])] if rest < len(data) else items
        try:
            envelope = self._envelope.FromString(data)
            if len(UnknownFieldSet(envelope)):
                raise DecodeError("it has a field that is not known")
            return envelope.items
        except DecodeError as error:
            name = self._envelope.DESCRIPTOR.full_name
            broken = WrongProtocol(f"a message on the stream is no {name}: {error}")
            self.terminate_with_error(broken)
            raise copy_error(broken) from error

    # ------------------------------------------------------------------------------ the end
    def fail_sending(self, error: MagnetarError) -> None:
        """Ends the sending direction: drops the queued items, and makes senders raise `error`. Items that have arrived
        can still be received. Does nothing if the direction has ended before."""
        if self._broken is not None:
            return
        self._broken = error
        self._items.clear()
        self._leaving.clear()
        self._leaving_bytes = 0
        self._answers.held -= self.queued_bytes
        self.queued_bytes = 0
        self._closing = True
        self._wake_waiting()

    def end_receiving(self, how: EndOfStream | MagnetarError) -> None:
        """Ends the receiving direction: `receive` returns the items that have arrived, and then raises `how`. If the
        direction has ended before, the earlier reason stays."""
        self._end = self._end or how
        self._wake_waiting()

    def terminate_with_error(self, error: MagnetarError) -> None:
        """Ends both directions of the stream at once with `error`, also at the other end. Items that were not sent or
        received yet are dropped."""
        self.fail_sending(error)
        self._forget_received()
        self._end = error
        self._wake_waiting()
        self.reset_with_error(error)

    def reset_with_error(self, error: MagnetarError) -> None:
        """Resets the stream at the other end if it was opened; a server sends `error` with it. Called by
        `terminate_with_error`."""
        raise NotImplementedError

    def _forget_received(self) -> None:
        self._requests.held -= self._taken_bytes
        self._taken_bytes = self._came_bytes = self._rest_from = 0
        self._came.clear()
        self._rest.clear()
        self.discard_message()

    def on_arrival_too_slow(self) -> None:
        self.terminate_with_error(ConnectionLost("memory is short, and a long message came too slowly"))

    def cancel(self) -> None:
        self.terminate_with_error(ConnectionLost("the stream was cancelled"))

    async def close(self) -> None:
        """Does nothing at a server, because a server's stream ends when its handler returns."""

    @property
    def is_broken(self) -> bool:
        """Returns whether nothing more can be sent, because the stream has ended or failed."""
        return self._broken is not None

    async def _wait_change(self) -> None:
        """Waits until bytes of this stream were sent, or the stream has ended."""
        change = self._loop.create_future()
        self._waiting.append(change)
        try:
            await change
        finally:
            if change in self._waiting:  # it was cancelled
                self._waiting.remove(change)

    def _has_left(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)

    def _wake_waiting(self) -> None:
        """Wakes all waiters, because the stream has ended."""
        self._has_left()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


# --------------------------------------------------------------------------------------------------------------- errors
# Translation between gRPC's statuses and Magnetar's errors, in this module only.
#
# A handler's MagnetarError is sent as a status and the trailer `magnetar-error-bin`, and the caller raises the same
# class. Another exception of a handler becomes InternalError. What has no such trailer:
#
# | what happened | raised | definite |
# |---|---|---|
# | no connection, or nothing came on it | Unavailable, field `unreached`; UntrustedServer | yes: nothing was sent |
# | the other end does not speak gRPC, or TLS, or status UNIMPLEMENTED | WrongProtocol | yes |
# | the connection or the stream broke; status UNAVAILABLE, CANCELLED or ABORTED | ConnectionLost | no |
# | no answer in time, status DEADLINE_EXCEEDED | TimedOut | no |
# | status RESOURCE_EXHAUSTED | MessageTooLarge | yes |
# | another status | InternalError | no |
#
# Codes: https://grpc.github.io/grpc/core/md_doc_statuscodes.html, and doc/PROTOCOL-HTTP2.md of gRPC for the headers.

ERROR_TRAILER = b"magnetar-error-bin"

_DETAILS_MAX = 1024
"""Most characters of a status' text: it is for other tools, and headers are bounded; the trailer has the whole error.
"""

_UNESCAPED = "".join(chr(each) for each in range(0x20, 0x7F) if each != ord("%"))

_LOG = logging.getLogger("magnetar.rpc")


class Status(IntEnum):
    """The status code with which a gRPC call ends."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


def copy_error(error: MagnetarError) -> MagnetarError:
    """Returns a copy of the error that can be raised again: an exception object collects the traceback of each place
    that raises it."""
    copy = type(error)(error.message)
    copy.fields = dict(error.fields)
    return copy


def make_error_for_status(status: int, details: str, trailer: bytes, endpoint: Endpoint) -> MagnetarError:
    """Returns the MagnetarError for a call that ended with `status`, by the table above in this file. `trailer` is the
    value of the trailer `magnetar-error-bin`; b"" if the answer has none. With a trailer, returns the error in it, or
    WrongProtocol if it cannot be decoded."""
    if trailer:
        try:
            return from_wire(wire.Error.FromString(base64.b64decode(trailer + b"=" * (-len(trailer) % 4))))
        except (DecodeError, binascii.Error):
            return WrongProtocol(f"{endpoint} answered with an error that does not parse", endpoint=endpoint)
    text = f"{endpoint}: {details or get_grpc_status_name(status)}"
    match status:
        case Status.UNAVAILABLE | Status.CANCELLED | Status.ABORTED:
            return ConnectionLost(text, endpoint=endpoint)
        case Status.DEADLINE_EXCEEDED:
            return TimedOut(f"no answer from {endpoint} in time", endpoint=endpoint)
        case Status.UNIMPLEMENTED:
            return WrongProtocol(f"{endpoint} does not offer this: {details}", endpoint=endpoint)
        case Status.RESOURCE_EXHAUSTED:
            return MessageTooLarge(text, endpoint=endpoint, limit=MESSAGE_BYTES_MAX)
        case _:
            return InternalError(text, endpoint=endpoint)


def get_grpc_status_name(number: int) -> str:
    """Returns the name of a gRPC status, such as "UNAVAILABLE"; "status N" if the number is not known."""
    return Status(number).name if number in Status._value2member_map_ else f"status {number}"


def make_error_trailers(error: BaseException) -> list[HeaderField]:
    """Returns the trailers with which the server ends a failed call: the status, its text, and the whole error. An
    error that is not a MagnetarError is logged, because it is a bug, and becomes InternalError."""
    if not isinstance(error, MagnetarError):
        _LOG.error("a handler failed", exc_info=error)
    message = to_wire(error)
    packed = base64.b64encode(message.SerializeToString()).rstrip(b"=")
    return [*make_status_trailers(_status_of(from_wire(message)), message.message), (ERROR_TRAILER, packed)]


def make_status_trailers(status: Status, details: str = "") -> list[HeaderField]:
    """Returns the trailers `grpc-status` and, unless `details` is empty, `grpc-message`. Cuts the text to 1,024
    characters."""
    trailers = [(b"grpc-status", b"%d" % status)]
    if details:
        quoted = urllib.parse.quote(details[:_DETAILS_MAX], safe=_UNESCAPED)
        trailers.append((b"grpc-message", quoted.encode("ascii")))
    return trailers


def parse_grpc_message(value: bytes) -> str:
    """Returns the text of the header `grpc-message`, which is percent-encoded."""
    return urllib.parse.unquote(value.decode("latin-1"))


def _status_of(error: MagnetarError) -> Status:
    match error:
        case InvalidRequest():
            return Status.INVALID_ARGUMENT
        case NotFound():
            return Status.NOT_FOUND
        case Unauthorized():
            return Status.PERMISSION_DENIED
        case Unauthenticated() | CredentialsExpired():
            return Status.UNAUTHENTICATED
        case Unavailable():
            return Status.UNAVAILABLE
        case InternalError():
            return Status.INTERNAL
        case _:
            return Status.FAILED_PRECONDITION
