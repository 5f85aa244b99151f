"""Frames of Pulsar's binary protocol.

    [total u32][size u32][BaseCommand]                              total and size count what follows them
    [total u32][size u32][BaseCommand][entry]                       SEND and MESSAGE
    entry = [0x0e01][crc32c u32][size u32][MessageMetadata][payload]

The entry of a frame is what is stored (proto/entry.py), so it passes through. Old clients leave the checksum out: it is
put in front. Guarding tests: tests/broker/pulsar/test_frames.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import DecodeError, Message

from ...proto import pulsar_pb2 as pulsar
from ...proto.checksum import crc32c, varint
from ...proto.entry import Buffer
from ...proto.errors import CorruptEntry, InvalidRequest

_U32 = struct.Struct(">I")
_CHECKSUM = b"\x0e\x01"
COMMAND_BYTES_MAX = 1 << 20
"""Most bytes of one BaseCommand: parsing the smallest parts of a larger one would hold the event loop
(runtime/network.py)."""
FRAME_EXTRA_BYTES = 64 << 10
"""Bytes of a frame besides the largest payload: clients check the payload alone, and send command and metadata with it.
"""
CHUNK_BYTES = 64 << 10
"""Bytes of one read, except for the rest of a larger frame."""
SMALL_BYTES = 16 << 10
"""Rest of a buffer, in bytes, that is not worth a read."""
SPARE_BYTES_MAX = 2 << 20
_NOTHING = memoryview(b"")

NO_REQUEST = (1 << 64) - 1
"""The request id of what a client did not ask for."""


_WITHOUT_TEXT = {
    pulsar.BaseCommand.SEND, pulsar.BaseCommand.FLOW, pulsar.BaseCommand.ACK, pulsar.BaseCommand.PING,
    pulsar.BaseCommand.PONG, pulsar.BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES,
}  # fmt: skip
"""Commands of which no text is read; those that come with every message are among them."""

FIELDS: dict[int, Any] = {number: name.lower() for name, number in pulsar.BaseCommand.Type.items()}
"""Name of the field of a BaseCommand, by its type."""


class Spare:
    """A buffer that all connections use in turn, one at a time: what is read often is then in the processor's cache,
    and no memory is made and zeroed for it."""

    def __init__(self) -> None:
        self._buffer = _NOTHING

    def acquire(self) -> memoryview:
        """Takes the spare buffer. Empty: another connection has it."""
        buffer, self._buffer = self._buffer, _NOTHING
        return buffer

    def give(self, buffer: memoryview) -> None:
        """Gives the buffer back: nothing in it is read any more."""
        if len(self._buffer) < len(buffer) <= SPARE_BYTES_MAX:
            self._buffer = buffer


class Frames:
    """Cuts a stream of bytes into frames. Costs linear work, and holds one frame at most, whose size is checked when
    its first four bytes are here.

        size = await stream.read_into(frames.room, frames.came)
        for each in frames.whole(): …

    Small frames come many at a time into a buffer of CHUNK_BYTES; a larger one gets a buffer of its size, once one like
    it came whole. A buffer without a frame goes to `spare`."""

    def __init__(self, bytes_max: int, spare: Spare | None = None) -> None:
        self.bytes_max = bytes_max
        self._spare = spare
        self._buffer = _NOTHING
        self._begin = self._end = 0  # bytes of it that are here and not cut
        self._largest = CHUNK_BYTES  # of the frames that came whole

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for the frame that is not complete: at most twice what came of it, or the largest before; or
        the spare buffer."""
        return len(self._buffer)

    @property
    def coming(self) -> int:
        """Bytes of the frame that is not complete; 0: that is not known yet, or there is none."""
        return self._frame_bytes() if self._end - self._begin >= 4 else 0

    def room(self) -> memoryview:
        if not self._buffer and self._spare is not None:
            self._buffer = self._spare.acquire()
        here, left = self._end - self._begin, len(self._buffer) - self._end
        if here >= 4 and self._begin + (wanted := self._frame_bytes()) > len(self._buffer) and wanted <= self._largest:
            self._make_room(wanted)
        elif left == 0 or (left < SMALL_BYTES and here < SMALL_BYTES):
            self._make_room(max(CHUNK_BYTES, 2 * here))
        return self._buffer[self._end :]

    def on_bytes(self, size: int) -> bool:
        """Notes that so many bytes are in the room. Returns whether `whole` has a frame, or an error."""
        self._end += size
        here = self._end - self._begin
        return here >= 4 and (here >= (wanted := self._frame_bytes()) or not 8 <= wanted <= self.bytes_max + 4)

    def took(self, size: int) -> Iterator[memoryview]:
        """Does `on_bytes`, then `whole`."""
        self.on_bytes(size)
        return self.whole()

    def whole(self) -> Iterator[memoryview]:
        """The frames that are complete, without their first size. Each is valid until the next one is asked for, and
        the last one until the end. InvalidRequest: one is too large, or too short."""
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
                self._spare.give(self._buffer)
            self._buffer, self._begin, self._end = _NOTHING, 0, 0

    def _frame_bytes(self) -> int:
        """Bytes of the frame that begins here, with its first size."""
        return 4 + int(_U32.unpack_from(self._buffer, self._begin)[0])

    def _make_room(self, size: int) -> None:
        """Moves the received bytes to the front of a buffer of at least `size` bytes."""
        here, kept = self._end - self._begin, self._buffer[self._begin : self._end]
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(size))
        self._buffer[:here] = kept
        self._begin, self._end = 0, here


def parse(frame: memoryview) -> tuple[pulsar.BaseCommand, memoryview]:
    """The command, and what follows it. InvalidRequest."""
    size = _U32.unpack_from(frame)[0]
    if size > len(frame) - 4 or size > COMMAND_BYTES_MAX:
        raise InvalidRequest(f"a command of {size} bytes in a frame of {len(frame)}")
    try:
        command = pulsar.BaseCommand.FromString(bytes(frame[4 : 4 + size]))
    except DecodeError as error:
        raise InvalidRequest("a command that does not parse") from error
    name = FIELDS[command.type]
    if not command.HasField(name):
        raise InvalidRequest(f"a command {name} without its fields")
    if command.type not in _WITHOUT_TEXT:
        _check_text(getattr(command, name), name)
    return command, frame[4 + size :]


def _check_text(message: Message, name: str) -> None:
    """Raises InvalidRequest for texts that are not UTF-8: they come out of protobuf as bytes."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.message_type is not None:
            for each in values:
                _check_text(each, name)
        elif field.type == field.TYPE_STRING and not all(isinstance(each, str) for each in values):
            raise InvalidRequest(f"the field {field.name} of a command {name} is not UTF-8")


def entry_of(rest: memoryview) -> Buffer:
    """The entry that a SEND carries, with a checksum; a view of the frame if it can be. CorruptEntry: there is none."""
    if len(rest) < 6:
        raise CorruptEntry("a publish without an entry")
    if rest[:2] == _CHECKSUM:
        return rest
    body = bytes(rest)
    return b"".join((_CHECKSUM, _U32.pack(crc32c(body)), body))


def frame(**commands: object) -> bytes:
    """The frame of one command: `frame(success=CommandSuccess(…))`."""
    [name] = commands
    body = pulsar.BaseCommand(type=pulsar.BaseCommand.Type.Value(name.upper()), **commands).SerializeToString()  # type: ignore[arg-type]
    return _U32.pack(len(body) + 4) + _U32.pack(len(body)) + body


_RECEIPT = b"\x08\x07\x3a"  # type SEND_RECEIPT; tag of the field `send_receipt` (7)


def receipt_frame(producer_id: int, sequence_id: int, highest: int, ledger_id: int, entry_id: int) -> bytes:
    """A SEND_RECEIPT; there is one for each entry. `highest` 0: left out."""
    place = b"".join((b"\x08", varint(ledger_id), b"\x10", varint(entry_id)))
    parts = [b"\x08", varint(producer_id), b"\x10", varint(sequence_id), b"\x1a", varint(len(place)), place]
    if highest:
        parts += (b"\x20", varint(highest))
    receipt = b"".join(parts)
    body = b"".join((_RECEIPT, varint(len(receipt)), receipt))
    return b"".join((_U32.pack(len(body) + 4), _U32.pack(len(body)), body))


_MESSAGE = b"\x08\x09\x4a"  # type MESSAGE; tag of the field `message` (9)


def message_frame(message: bytes, entry_bytes: int) -> bytes:
    """The head of a MESSAGE: `message` are the bytes of its CommandMessage; the entry of that size follows it."""
    body = b"".join((_MESSAGE, varint(len(message)), message))
    return b"".join((_U32.pack(len(body) + 4 + entry_bytes), _U32.pack(len(body)), body))
