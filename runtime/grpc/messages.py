"""gRPC's messages on an HTTP/2 stream, and the envelopes in them.

A gRPC message is a byte that is 0 (not compressed), four bytes of the length, and the content. `MessageStream` joins
received data to messages, and passes on each message that has arrived in full. For a longer message, memory is reserved
when its length is known, and the connection reads into that memory. A message longer than its receiver allows is
refused by its length.

Also in this file, below its heading: the items of an envelope (envelope). `measure_item_to_parse` splits an envelope
into its items, and `LongItem` reads an item with one long field without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...proto.checksum import encode_varint
from ...proto.errors import MessageTooLarge, WrongProtocol
from ..budget import ArrivingMessagesMemory
from ..network import REQUEST_BYTES_MAX
from ..tcp.http2 import DIRECT_READ_BYTES, Http2Stream
from ..tcp.http2_frames import REFUSED_CALL_CHARGE

PREFIX_STRUCT = struct.Struct("!BI")
PREFIX_BYTES = 5
MESSAGES_AT_ONCE = 256
"""Most messages of a stream before its connection looks at the clock; one takes about 1 µs."""


prefix: Callable[[int], bytes] = partial(PREFIX_STRUCT.pack, 0)
"""Returns the prefix of a message of so many bytes."""


class MessageStream(Http2Stream):
    """The receiving side of a gRPC stream: joins the data that arrives to messages of at most `in_bytes_max` bytes. A
    subclass overrides `on_message` and `on_message_refused`."""

    __slots__ = (
        "_arrivals", "_cost", "_early", "_ended_early", "_filled", "_has_waiting", "_message", "_place", "_prefix",
        "_size", "in_bytes_max",
    )  # fmt: skip

    def __init__(self, in_bytes_max: int, arrivals: ArrivingMessagesMemory | None = None) -> None:
        """Creates a stream. `arrivals` limits the memory of long messages; None: there is no limit."""
        super().__init__()
        self._arrivals = arrivals
        self._early: bytearray | None = None  # what came of a long message that has no place yet, and after it …
        self._size = 0  # … how long it is …
        self._ended_early = False  # … and whether the other end has sent all
        self.in_bytes_max = in_bytes_max
        self._prefix = b""  # torn
        self._message: bytearray | None = None
        self._place = memoryview(b"")
        self._filled = 0
        self._cost = 0  # bytes of the window that the message took so far
        self._has_waiting = False  # a message came and is not read

    def on_message(self, data: bytes | bytearray, cost: int) -> None:
        """Called with the bytes of a complete message. `cost` is the number of bytes of the receive window that the
        message used; the service must later pass it to `on_service_read`."""
        raise NotImplementedError

    def on_message_refused(self, size: int) -> None:
        """Called when a message is refused because it is too long (`size` is its length in bytes), or compressed
        (`size` is -1)."""
        raise NotImplementedError

    @property
    def has_partial_message(self) -> bool:
        """Returns whether a message has arrived only in part."""
        return self._message is not None or self._early is not None or bool(self._prefix)

    def on_data(self, data: memoryview) -> int:
        offset, end, whole = 0, len(data), 0
        size: int
        while offset < end and self.connection is not None:
            if whole == MESSAGES_AT_ONCE:
                return offset
            if self._message is not None:
                part = min(len(self._message) - self._filled, end - offset)
                self._place[self._filled : self._filled + part] = data[offset : offset + part]
                offset += part
                self._filled_by(part)
                continue
            if self._early is not None:
                self._early += data[offset:]
                return end
            if self._prefix or end - offset < PREFIX_BYTES:
                part = min(PREFIX_BYTES - len(self._prefix), end - offset)
                self._prefix += data[offset : offset + part]
                offset += part
                if len(self._prefix) < PREFIX_BYTES:
                    return end
                compressed, size = PREFIX_STRUCT.unpack(self._prefix)
                self._prefix = b""
            else:
                compressed, size = PREFIX_STRUCT.unpack_from(data, offset)
                offset += PREFIX_BYTES
            if compressed or size > self.in_bytes_max:
                self.connection.allowance.charge_frames(REFUSED_CALL_CHARGE)
                self.on_message_refused(-1 if compressed else size)
                return end
            if end - offset >= size:
                self._has_waiting = True
                self.on_message(bytes(data[offset : offset + size]), size + PREFIX_BYTES)
                offset += size
                whole += 1
            else:
                self._reserve(size)
        return end

    def _reserve(self, size: int) -> None:
        is_long = self._arrivals is not None and 2 * size > self._window
        if is_long and not (self.is_read and self._arrivals.admit(self, size)):  # type: ignore[union-attr]
            self._early, self._size = bytearray(), size
        else:
            self._make_place(size)

    def _make_place(self, size: int) -> None:
        self._early, self._message, self._filled, self._cost = None, bytearray(size), 0, PREFIX_BYTES
        self._place = memoryview(self._message)

    def on_reading_started(self) -> None:
        """Called when the service begins to read the stream. Reserves memory for a long message that began to arrive
        before."""
        if self._early is not None and self._arrivals is not None and self._arrivals.admit(self, self._size):
            self.on_memory_reserved()

    def on_memory_reserved(self) -> None:
        """Called when memory is reserved for a long message that had to wait for it. Copies the received part of the
        message into this memory, and continues to receive."""
        early = self._early
        assert early is not None, "it waits"
        self._make_place(self._size)
        first = min(len(early), self._size)
        came = memoryview(early)
        self._place[:first] = came[:first]
        self._filled_by(first)
        while first < len(early):
            first += self.on_data(came[first:])
        if self._ended_early and self._early is None:
            self.on_input_ended()

    def must_defer_input_end(self) -> bool:
        """Returns whether the input has ended while a message still waits for memory. If so, `on_input_ended` is called
        again after that message."""
        self._ended_early = self._early is not None
        return self._ended_early

    def on_arrival_too_slow(self) -> None:
        """Called when the long message arrives too slowly while others wait for its memory. The subclass must end the
        stream."""
        raise NotImplementedError

    def discard_message(self) -> None:
        """Drops the message that has arrived only in part, and releases its memory. Called when the stream has ended or
        is no longer read."""
        self._early = None
        if self._arrivals is not None:
            self._arrivals.discard(self)

    def direct_read_buffer(self) -> memoryview | None:
        if self._message is None or len(self._message) - self._filled < DIRECT_READ_BYTES:
            return None
        return self._place[self._filled :]

    def on_direct_read(self, size: int) -> None:
        self._filled_by(size)

    def _filled_by(self, size: int) -> None:
        message = self._message
        assert message is not None
        self._filled += size
        self._cost += size
        self._credit_long()
        if self._filled == len(message):
            self._message, self._place, self._has_waiting = None, memoryview(b""), True
            if self._arrivals is not None:
                self._arrivals.on_message_complete(self)
            self.on_message(message, self._cost)

    def on_service_read(self, cost: int) -> None:
        """Called when the service has read all messages that arrived. `cost` is the sum of their costs: the other end
        may now send that many bytes more."""
        self._has_waiting = False
        if self._arrivals is not None:
            self._arrivals.on_messages_read(self)
        if self.connection is not None:
            self.connection.window.credit_stream(self, cost)
            if self._message is not None:
                self._credit_long()

    def _credit_long(self) -> None:
        """Credits the window for a message that is longer than half of it, while it arrives and no other message waits
        to be read.
        """
        message, connection = self._message, self.connection
        if message is None or 2 * len(message) <= self._window or self._has_waiting or not self.is_read:
            return
        if connection is not None:
            connection.window.credit_stream(self, self._cost)
            self._cost = 0


# ------------------------------------------------------------------------------------------------------ envelope
# An envelope of a gRPC stream, `{repeated X items = 1}`, by its bytes: put together, and gone through item by item.
#
# Two bytes of an envelope are an item, so one of very many items is parsed in slices: ITEMS_AT_ONCE, or at a server
# PARSED_BYTES_AT_ONCE bytes. Protobuf copies a field of bytes twice, when it parses it and when it is read; a long one
# is left where it came (`LongItem`). Guards: tests/runtime/grpc/test_rpc.py, tests/runtime/grpc/test_envelope.py.


ITEMS_AT_ONCE = 2000
"""Items that are parsed in one step of the loop, when an envelope may have more: some hundred microseconds."""

PARSED_BYTES_AT_ONCE = REQUEST_BYTES_MAX
"""Bytes that protobuf parses in one step of the loop, at a server: so many of the smallest parts take 5 ms."""

SHORT_ITEM_BYTES = 2048

LONG_BYTES = 16 << 10
"""Bytes from which on an item is not parsed by protobuf: below, a few microseconds of Python cost more than two copies.
"""

VARINT_BYTES_MAX = 10
_TAG = 0x0A  # of field 1, length-delimited
ITEM_PREFIXES = [b"\x0a" + encode_varint(size) for size in range(SHORT_ITEM_BYTES)]
"""Tag of field 1, length-delimited, and the length: most items are short."""


def find_bytes_field_tags(envelope: type[Any]) -> frozenset[int]:
    """Returns the protobuf tags of the bytes fields that an item of `envelope` may have. Protobuf copies the content of
    such a field without parsing it."""
    fields = envelope.DESCRIPTOR.fields_by_name["items"].message_type.fields
    return frozenset(field.number << 3 | 2 for field in fields if field.type == field.TYPE_BYTES)


def find_field_bounds(data: bytes | bytearray, offset: int) -> tuple[int, int]:
    """Returns (begin, end) of the content of the bytes field whose tag is at `offset`. `end` is exclusive, and exceeds
    the length of `data` if the field is cut off."""
    offset, size, shift, end = offset + 1, 0, 0, len(data)
    while offset < end:
        byte = data[offset]
        offset, size, shift = offset + 1, size | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80 or shift > 63:
            break
    return offset, offset + size


def _after_number(data: bytes | bytearray, begin: int, end: int) -> int:
    """Returns the end of the field at `begin` if that field is a number; else `begin`. Reads at most the bytes that a
    number may have; protobuf refuses longer ones.
    """
    if begin < end and data[begin] < 0x80 and not data[begin] & 7:
        for after in range(begin + 1, min(end, begin + 1 + VARINT_BYTES_MAX)):
            if data[after] < 0x80:
                return after + 1
    return begin


def measure_item_to_parse(data: bytes | bytearray, offset: int, copied: frozenset[int] | None) -> tuple[int, int]:
    """Returns (the offset after the item that begins at `offset`, the number of its bytes that protobuf must parse).
    The number is 0 if the item consists of a field whose tag is in `copied`, or of an id and such a field. Raises
    WrongProtocol if there is no item at `offset`, MessageTooLarge if protobuf would have to parse more than
    PARSED_BYTES_AT_ONCE bytes.

    Reads only lengths, because most items are entries of some hundred KiB, and reading their bytes would cost more than
    all other work here. `copied` is None at a client: then the item is not checked, and the number is 0.
    """
    if data[offset] != _TAG:
        raise WrongProtocol(f"an envelope has something other than items at byte {offset} of {len(data)}")
    begin, end = find_field_bounds(data, offset)
    end = min(end, len(data))
    inner = _after_number(data, begin, end)
    if copied is None or inner >= end or (data[inner] in copied and find_field_bounds(data, inner)[1] == end):
        return end, 0
    if end - begin > PARSED_BYTES_AT_ONCE:
        raise MessageTooLarge(
            f"a request of {end - begin} bytes that is no entry; at most {PARSED_BYTES_AT_ONCE} are taken",
            size=end - begin, limit=PARSED_BYTES_AT_ONCE,
        )  # fmt: skip
    return end, end - begin


_HEADS = struct.Struct("9B")
"""An item that is one field, and that field, where both lengths have two bytes: an entry of 128 B to 16 KiB; or the
same with a number of one byte or two before it, its id."""
_NUMBER = 0x08  # tag of field 1, a number


def must_parse_in_slices(envelopes: Sequence[bytes | bytearray], copied: frozenset[int] | None) -> bool:
    """Returns whether the envelopes are too much to be parsed at once: more than 2 * ITEMS_AT_ONCE items, or more than
    PARSED_BYTES_AT_ONCE bytes. Raises the errors of `measure_item_to_parse`."""
    heads, many = _HEADS.unpack_from, 2 * ITEMS_AT_ONCE
    items = parsed = 0
    for data in envelopes:
        offset, end = 0, len(data)
        while offset < end:
            if items > many or parsed > PARSED_BYTES_AT_ONCE:
                return True
            if (
                offset + 9 <= end
            ):  # as `measure_item_to_parse`, in a third of the time, for most items of an honest envelope
                tag, low, high, inner_tag, inner_low, inner_high, after, after_low, after_high = heads(data, offset)
                if tag == _TAG and high < 0x80 <= low:
                    size, number = (high << 7) + low, 0
                    if inner_tag == _NUMBER:
                        if inner_low < 0x80:
                            inner_tag, inner_low, inner_high, number = inner_high, after, after_low, 2
                        elif inner_high < 0x80:
                            inner_tag, inner_low, inner_high, number = after, after_low, after_high, 3
                    if copied is None or (
                        inner_high < 0x80 <= inner_low and inner_tag in copied
                        and size == (inner_high << 7) + inner_low + 3 + number
                    ):  # fmt: skip
                        offset, items = offset + size - 0x80 + 3, items + 1
                        continue
            offset, size = measure_item_to_parse(data, offset, copied)
            items, parsed = items + 1, parsed + size
    return items > many or parsed > PARSED_BYTES_AT_ONCE


# ---------------------------------------------------------------------------------- long items
class LongItem:
    """An item of a stream that consists of an `id` and one long bytes field of a oneof. It has the attributes of the
    protobuf message, but the value of the field is a view of the envelope's bytes, so it keeps the envelope in memory.
    """

    __slots__ = ("_field", "_value", "id")

    def __init__(self, id_: int, field: str, value: memoryview) -> None:
        self.id = id_
        self._field, self._value = field, value

    def WhichOneof(self, _group: str) -> str:
        """Returns the name of the bytes field, as the method of the protobuf message does."""
        return self._field

    def __getattr__(self, name: str) -> memoryview:
        if name == self._field:
            return self._value
        raise AttributeError(name)


def find_long_item_fields(envelope: type[Any]) -> dict[int, str]:
    """Returns the names of the fields that a `LongItem` may have, by their tags: the bytes fields of the oneof. Returns
    {} if an item has other fields outside of the oneof than `id`."""
    fields = envelope.DESCRIPTOR.fields_by_name["items"].message_type.fields
    if [field.name for field in fields if field.containing_oneof is None] != ["id"]:
        return {}
    return {field.number << 3 | 2: field.name for field in fields if field.type == field.TYPE_BYTES}


def split_long_items(data: bytes | bytearray, fields: dict[int, str]) -> tuple[list[LongItem], int]:
    """Splits off the long items at the beginning of `data`. Returns them ([] if the first item is not long), and the
    offset of the remaining bytes, which protobuf must parse. `fields` is the result of `find_long_item_fields`."""
    items: list[LongItem] = []
    offset, whole, view = 0, len(data), memoryview(data)
    while offset < whole and data[offset] == _TAG:
        begin, end = find_field_bounds(data, offset)
        if end > whole or end - begin < LONG_BYTES or data[begin] != _NUMBER:
            break
        inner = _after_number(data, begin, end)
        field = fields.get(data[inner])
        if field is None:
            break
        value, value_end = find_field_bounds(data, inner)
        id_ = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(data[begin + 1 : inner]))
        if value_end != end or id_ >> 64:
            break
        items.append(LongItem(id_, field, view[value:end]))
        offset = end
    return items, offset
