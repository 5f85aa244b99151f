"""The bytes of a peer envelope: what ZeroMQ peers send each other, many requests or replies in one multipart message.

All integers big-endian. Part 0 is the header, the parts after it are the large payload frames, in order:

    header = magic 4 ("MGTP") | version u8 (1) | kind u8 | identity 16 | count u32 | item × count
    item   = id u64 | head size u32 | frames u32 | frame size u32 × frames | head | short frames

A frame of more than INLINE_FRAME_BYTES_MAX is a part of its own (sent and received without a copy when it is large). A
smaller frame is in the header, after its item's head: a ZeroMQ part costs a few microseconds, whatever its size.
`identity`: in requests the server that is addressed, in replies the server that answers.

| kind | from | meaning |
|---|---|---|
| REQUESTS | client | do these; each is answered once |
| REPLIES | server | answers, by id |
| WRONG_IDENTITY | server | the server is `identity`, not the one addressed; the items have the ids, nothing was done |
| WRONG_PROTOCOL | server | the server does not speak this version; no items; nothing was done |
| UNAUTHORIZED | server | the requester is no member any more; the items have the ids, nothing was done |

`decode_envelope` takes the header alone and returns the sizes of the further parts. Every length is checked against the
bytes received; an envelope whose lengths do not add up exactly is `MalformedEnvelope`. This module uses no socket."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...proto.versions import PEER_ENVELOPE, describe_newer_format
from ..files import Buffer
from ..network import MESSAGE_BYTES_MAX

ENVELOPE_MAGIC = b"MGTP"
ENVELOPE_VERSION = PEER_ENVELOPE.version
IDENTITY_BYTES = 16

INLINE_FRAME_BYTES_MAX = 4096
"""Frames up to this travel inside the header: copying 4 KiB costs less than a ZeroMQ part (about 2 µs each side)."""

FRAMES_PER_ITEM_MAX = 65536
"""Frames of one item. More are malformed: they would not fit the largest message with any content."""

MULTIPART_BYTES_MAX = 2 * MESSAGE_BYTES_MAX
"""Most bytes of the header and the parts that it announces; a part has more than INLINE_FRAME_BYTES_MAX, so there are
8,192 at most. The largest request is an entry of 8 MiB; the largest answer the entries of a read, 4 MiB and one more
entry."""

_HEADER = struct.Struct(">4sBB16sI")
_ITEM = struct.Struct(">QII")
_SIZES = [struct.Struct(f">{n}I") for n in range(9)]


class EnvelopeKind(enum.IntEnum):
    """The type of an envelope, such as requests or replies. The table at the head of this module says what each type
    means."""

    REQUESTS = 1
    REPLIES = 2
    WRONG_IDENTITY = 3
    WRONG_PROTOCOL = 4
    UNAUTHORIZED = 5


_KINDS = {int(kind): kind for kind in EnvelopeKind}


class MalformedEnvelope(ValueError):
    """Raised when bytes are not a valid envelope: lengths are wrong, there are too many or too few parts, or more bytes
    are announced than a message may have."""


class WrongEnvelopeMagic(ValueError):
    """Raised when bytes belong to another protocol, or to a version of ours that this process does not support."""


@dataclass(slots=True)
class EnvelopeItem:
    """One request or reply in an envelope: its id, its head and its frames. In a decoded item, `frames` contains None
    for each part that was not received yet."""

    id: int
    head: bytes
    frames: list[Buffer | None]


@dataclass(slots=True)
class Envelope:
    """The decoded header of a message between peers, with its requests or replies (items). `identity`: of the server,
    16 bytes."""

    kind: EnvelopeKind
    identity: bytes
    items: list[EnvelopeItem]
    parts: list[tuple[EnvelopeItem, int, int]] = field(default_factory=list)
    """(item, index of the frame, size) of each part after the header, in order."""
    size: int = 0
    """Bytes of the header and of the parts after it."""


def encode_envelope(
    kind: EnvelopeKind, identity: bytes, items: Sequence[tuple[int, bytes, Sequence[Buffer]]]
) -> list[Buffer]:
    """Returns the parts of a ZeroMQ multipart message: the header, and then the large frames, which are not copied.
    Each of `items` is (id, head, frames)."""
    header: list[Buffer] = [_HEADER.pack(ENVELOPE_MAGIC, ENVELOPE_VERSION, kind, identity, len(items))]
    parts: list[Buffer] = [b""]
    for id_, head, frames in items:
        count = len(frames)
        header.append(_ITEM.pack(id_, len(head), count))
        if count:
            header.append(_sizes(count).pack(*map(len, frames)))
        header.append(head)
        for frame in frames:
            (header if len(frame) <= INLINE_FRAME_BYTES_MAX else parts).append(frame)
    parts[0] = b"".join(header)
    return parts


def encode_refusal_envelope(kind: EnvelopeKind, identity: bytes, ids: Iterable[int] = ()) -> bytes:
    """Returns the header of an envelope that refuses the requests `ids`; its kind is WRONG_IDENTITY, WRONG_PROTOCOL or
    UNAUTHORIZED."""
    return bytes(encode_envelope(kind, identity, [(id_, b"", ()) for id_ in ids])[0])


def decode_envelope(header: Buffer) -> Envelope:
    """Decodes the header of an envelope. The large frames are not part of the result (`Envelope.parts`). Raises
    WrongEnvelopeMagic if the bytes belong to another protocol or version, MalformedEnvelope if they are not a valid
    header."""
    if len(header) < 5 or bytes(header[:4]) != ENVELOPE_MAGIC:
        raise WrongEnvelopeMagic(f"a message that begins with {bytes(header[:8])!r} is not of Magnetar's peer protocol")
    if header[4] != ENVELOPE_VERSION:
        raise WrongEnvelopeMagic(describe_newer_format(PEER_ENVELOPE, header[4], "a peer"))
    try:
        return _decode(header)
    except struct.error as error:
        raise MalformedEnvelope(f"envelope header of {len(header)} bytes ends too early: {error}") from None


def _decode(header: Buffer) -> Envelope:
    _, _, kind, identity, count = _HEADER.unpack_from(header)
    if kind not in _KINDS:
        raise MalformedEnvelope(f"envelope of unknown kind {kind}")
    envelope = Envelope(_KINDS[kind], identity, [])
    end = len(header)
    at = _HEADER.size
    for _ in range(count):
        id_, head_bytes, frames = _ITEM.unpack_from(header, at)
        at += _ITEM.size
        if frames > FRAMES_PER_ITEM_MAX:
            raise MalformedEnvelope(f"an item with {frames} frames")
        sizes = _sizes(frames).unpack_from(header, at) if frames else ()
        at += 4 * frames
        item = EnvelopeItem(id_, bytes(header[at : at + head_bytes]), [])
        at += head_bytes
        for index, size in enumerate(sizes):
            if size > INLINE_FRAME_BYTES_MAX:
                item.frames.append(None)
                envelope.parts.append((item, index, size))
            else:
                item.frames.append(header[at : at + size])
                at += size
        if at > end:
            raise MalformedEnvelope(f"an item reaches {at - end} bytes beyond the end of its envelope")
        envelope.items.append(item)
    if at != end:
        raise MalformedEnvelope(f"{end - at} bytes after the last item")
    envelope.size = end + sum(size for _, _, size in envelope.parts)
    if envelope.size > MULTIPART_BYTES_MAX:
        raise MalformedEnvelope(f"{envelope.size} bytes are announced; at most {MULTIPART_BYTES_MAX} are taken")
    return envelope


def _sizes(count: int) -> struct.Struct:
    return _SIZES[count] if count < len(_SIZES) else struct.Struct(f">{count}I")
