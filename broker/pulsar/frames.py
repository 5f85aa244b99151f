"""Frames of Pulsar's binary protocol.

    [total u32][size u32][BaseCommand]                              total and size count what follows them
    [total u32][size u32][BaseCommand][entry]                       SEND and MESSAGE
    entry = [0x0e01][crc32c u32][size u32][MessageMetadata][payload]

The entry of a frame is stored as it is (proto/entry.py). Old clients leave the checksum out: then it is added in front.
Guarding tests: tests/broker/pulsar/test_frames.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message

from ...proto import pulsar_pb2 as pulsar
from ...proto.checksum import crc32c, encode_varint
from ...proto.entry import Buffer
from ...proto.errors import CorruptEntry, InvalidRequest

_U32 = struct.Struct(">I")
_CHECKSUM = b"\x0e\x01"
COMMAND_BYTES_MAX = 1 << 20
"""Most bytes of one BaseCommand: parsing the smallest parts of a larger one would hold the event loop
(runtime/network.py)."""
FRAME_EXTRA_BYTES = 64 << 10
"""Bytes that a frame may have besides the largest payload: clients check only the payload against the limit, and send
command and metadata with it."""
SHARED_BUFFER_BYTES = 64 << 10
"""Bytes of one read, except for the rest of a larger frame."""
SMALL_FRAME_BYTES = 16 << 10
"""If less than this is left in a buffer, in bytes, it is not read into any more."""
SPARE_BUFFER_BYTES_MAX = 2 << 20
_NOTHING = memoryview(b"")

NO_REQUEST_ID = (1 << 64) - 1
"""The request id of a command that answers no request."""


_WITHOUT_TEXT = {
    pulsar.BaseCommand.SEND, pulsar.BaseCommand.FLOW, pulsar.BaseCommand.ACK, pulsar.BaseCommand.PING,
    pulsar.BaseCommand.PONG, pulsar.BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES,
}  # fmt: skip
"""Commands without texts that need to be checked; among them those that come with every message."""

COMMAND_FIELD_NAMES: dict[int, Any] = {number: name.lower() for name, number in pulsar.BaseCommand.Type.items()}
"""Name of the field of a BaseCommand, by its type."""


class SharedReceiveBuffer:
    """A receive buffer that all connections share. One connection at a time uses it, for a short time. So the buffer
    stays in the processor's cache, and no read needs to allocate and zero memory."""

    def __init__(self) -> None:
        self._buffer = _NOTHING

    def reserve_buffer(self) -> memoryview:
        """Returns the shared buffer, for exclusive use until `release`. Returns an empty buffer if there is none yet,
        or another connection is using it; the caller then allocates one."""
        buffer, self._buffer = self._buffer, _NOTHING
        return buffer

    def release(self, buffer: memoryview) -> None:
        """Gives a buffer back, so that other connections can use it. The largest buffer of at most
        SPARE_BUFFER_BYTES_MAX bytes is kept. The caller must not use the buffer afterwards."""
        if len(self._buffer) < len(buffer) <= SPARE_BUFFER_BYTES_MAX:
            self._buffer = buffer


class PulsarFrameSplitter:
    """Splits a stream of bytes into frames, in linear time. Stores at most one incomplete frame, whose size is checked
    as soon as its first four bytes have arrived. `bytes_max`: the most bytes of a frame, without its first size field.

        size = await stream.read_into(frames.get_free_buffer, frames.on_bytes_received)
        for each in frames.take_complete_frames(): …

    Many small frames share a buffer of SHARED_BUFFER_BYTES. A larger frame gets a buffer of its size at once, if the
    connection has received a frame of that size before; else its buffer grows as bytes arrive. A buffer that contains
    no part of a frame is given to `spare`.
    """

    def __init__(self, bytes_max: int, spare: SharedReceiveBuffer | None = None) -> None:
        self.bytes_max = bytes_max
        self._spare = spare
        self._buffer = _NOTHING
        self._begin = self._end = 0  # the part of the buffer that is received and not cut yet
        self._largest = SHARED_BUFFER_BYTES  # size of the largest complete frame so far

    @property
    def held_bytes(self) -> int:
        """Returns the size in bytes of the buffer that this object has now; 0 if it has none. It is at most the largest
        of four sizes: SHARED_BUFFER_BYTES, the shared buffer, twice the received bytes of the incomplete frame, and
        twice the largest frame so far."""
        return len(self._buffer)

    @property
    def incomplete_frame_bytes(self) -> int:
        """The size in bytes of the frame that has not arrived completely; 0 if there is no such frame, or its size is
        not known yet."""
        return self._frame_bytes() if self._end - self._begin >= 4 else 0

    def get_free_buffer(self) -> memoryview:
        """Returns the free part of the buffer, into which the next bytes of the stream must be read."""
        if not self._buffer and self._spare is not None:
            self._buffer = self._spare.reserve_buffer()
        here, left = self._end - self._begin, len(self._buffer) - self._end
        if here >= 4 and self._begin + (wanted := self._frame_bytes()) > len(self._buffer) and wanted <= self._largest:
            self._make_room(wanted)
        elif left == 0 or (left < SMALL_FRAME_BYTES and here < SMALL_FRAME_BYTES):
            self._make_room(max(SHARED_BUFFER_BYTES, 2 * here))
        return self._buffer[self._end :]

    def on_bytes_received(self, size: int) -> bool:
        """Called when `size` bytes were read into the buffer of `get_free_buffer`. Returns True if
        `take_complete_frames` will now yield a frame, or raise an error."""
        self._end += size
        here = self._end - self._begin
        return here >= 4 and (here >= (wanted := self._frame_bytes()) or not 8 <= wanted <= self.bytes_max + 4)

    def receive_frames(self, size: int) -> Iterator[memoryview]:
        """Counts `size` bytes as received (`on_bytes_received`), and returns an iterator over the frames that are
        complete now (`take_complete_frames`). The iterator raises InvalidRequest as `take_complete_frames` does."""
        self.on_bytes_received(size)
        return self.take_complete_frames()

    def take_complete_frames(self) -> Iterator[memoryview]:
        """Yields the complete frames, each without its first size field, and removes them. A yielded frame is valid
        until the next one is requested. Raises InvalidRequest if the size field of a frame is below 4 or above
        `bytes_max`."""
        while self._end - self._begin >= 4:
            wanted, begin = self._frame_bytes(), self._begin
            if not 8 <= wanted <= self.bytes_max + 4:
                raise InvalidRequest(f"a frame of {wanted - 4} bytes; it has 4 to {self.bytes_max}")
            if self._end - begin < wanted:
                return
            self._begin += wanted
            self._largest = max(self._largest, wanted)
            yield self._buffer[begin + 4 : begin + wanted]
        if self._end == self._begin:
            if self._spare is not None:
                self._spare.release(self._buffer)
            self._buffer, self._begin, self._end = _NOTHING, 0, 0

    def _frame_bytes(self) -> int:
        """Returns the size of the frame that begins at `_begin`, including its first size field."""
        return 4 + int(_U32.unpack_from(self._buffer, self._begin)[0])

    def _make_room(self, size: int) -> None:
        """Moves the received bytes to the front of a buffer of at least `size` bytes."""
        here, kept = self._end - self._begin, self._buffer[self._begin : self._end]
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(size))
        self._buffer[:here] = kept
        self._begin, self._end = 0, here


def parse_frame(frame: memoryview) -> tuple[pulsar.BaseCommand, memoryview]:
    """Returns (the command that a frame contains, the bytes of the frame after the command). `frame`: without its first
    size field. Raises InvalidRequest if the command is longer than COMMAND_BYTES_MAX or the frame, does not parse, or
    contains a text that is not UTF-8."""
    size = _U32.unpack_from(frame)[0]
    if size > len(frame) - 4 or size > COMMAND_BYTES_MAX:
        raise InvalidRequest(f"a command of {size} bytes in a frame of {len(frame)}")
    try:
        command = pulsar.BaseCommand.FromString(bytes(frame[4 : 4 + size]))
    except DecodeError as error:
        raise InvalidRequest("a command that does not parse") from error
    name = COMMAND_FIELD_NAMES[command.type]
    if not command.HasField(name):
        raise InvalidRequest(f"a command {name} without its fields")
    if command.type not in _WITHOUT_TEXT:
        _check_text(getattr(command, name), name)
    return command, frame[4 + size :]


def _check_text(message: Message, name: str) -> None:
    """Raises InvalidRequest if a text is not UTF-8: protobuf returns it as bytes then."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.message_type is not None:
            for each in values:
                _check_text(each, name)
        elif field.type == field.TYPE_STRING and not all(isinstance(each, str) for each in values):
            raise InvalidRequest(f"the field {field.name} of a command {name} is not UTF-8")


def parse_sent_entry(rest: memoryview) -> Buffer:
    """Returns the entry in a SEND command, with its checksum. `rest`: the bytes after the command. If the client sent a
    checksum, the result is `rest` itself, else a copy with a checksum added. Raises CorruptEntry if `rest` is too short
    for an entry."""
    if len(rest) < 6:
        raise CorruptEntry("a publish without an entry")
    if rest[:2] == _CHECKSUM:
        return rest
    body = bytes(rest)
    return b"".join((_CHECKSUM, _U32.pack(crc32c(body)), body))


def encode_frame(**commands: object) -> bytes:
    """Returns the encoded frame of one command. The name of the argument is the field of the command:
    `encode_frame(success=CommandSuccess(…))`."""
    [name] = commands
    body = pulsar.BaseCommand(type=pulsar.BaseCommand.Type.Value(name.upper()), **commands).SerializeToString()  # type: ignore[arg-type]
    return _U32.pack(len(body) + 4) + _U32.pack(len(body)) + body


_RECEIPT = b"\x08\x07\x3a"  # type SEND_RECEIPT; tag of the field `send_receipt` (7)


def encode_receipt(producer_id: int, sequence_id: int, highest: int, ledger_id: int, entry_id: int) -> bytes:
    """Returns the encoded frame of a SEND_RECEIPT command, which confirms the entry that a producer has published under
    `sequence_id`. `highest`: the highest sequence id of a batch; left out if it is 0."""
    place = b"".join((b"\x08", encode_varint(ledger_id), b"\x10", encode_varint(entry_id)))
    parts = [
        b"\x08",
        encode_varint(producer_id),
        b"\x10",
        encode_varint(sequence_id),
        b"\x1a",
        encode_varint(len(place)),
        place,
    ]
    if highest:
        parts += (b"\x20", encode_varint(highest))
    receipt = b"".join(parts)
    body = b"".join((_RECEIPT, encode_varint(len(receipt)), receipt))
    return b"".join((_U32.pack(len(body) + 4), _U32.pack(len(body)), body))


_MESSAGE = b"\x08\x09\x4a"  # type MESSAGE; tag of the field `message` (9)


def encode_message_head(message: bytes, entry_bytes: int) -> bytes:
    """Returns the encoded beginning of a MESSAGE frame. The caller must send an entry of exactly `entry_bytes` bytes
    directly after it. `message`: the encoded CommandMessage."""
    body = b"".join((_MESSAGE, encode_varint(len(message)), message))
    return b"".join((_U32.pack(len(body) + 4 + entry_bytes), _U32.pack(len(body)), body))
