"""Stored entries and peer requests for tests of the bookie."""

import asyncio
from collections.abc import Sequence

from magnetar.bookie.format import index
from magnetar.bookie.format.entry_log import encode_records
from magnetar.bookie.format.journal import crc32c
from magnetar.ledger.peer_format import (
    ENTRY_HEADER_STRUCT,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    decode_add_statuses,
    decode_answer,
    encode_add_many_request,
    encode_adds,
)
from magnetar.metadata import paths, records
from magnetar.runtime.network import Peer

KEY = b"k" * 20
OTHER_KEY = b"x" * 20


def stored_entry(ledger: int, entry: int, payload: bytes, lac: int = -1) -> bytes:
    length = len(payload)
    head = ENTRY_HEADER_STRUCT.pack(ledger, entry, lac, length, 0)[:-4]
    return head + crc32c(head, payload).to_bytes(4, "big") + payload


def a_record(ledger: int, *bookies: str) -> bytes:
    """What the metadata says of the ledger, with KEY: open, one copy of each entry."""
    return records.encode_record(
        records.LedgerRecord(
            ledger_id=ledger, state=records.OPEN, ensemble_size=1, write_quorum=1, ack_quorum=1, key=KEY, token="t",
            fragments=(records.Fragment(0, bookies or ("a bookie",)),),
        ),
        paths.ledger(ledger),
    )


def log_record(*stored: bytes) -> bytes:
    """As it stands in an entry log: a stored entry that comes in these pieces."""
    _, records = encode_records([stored])
    return b"".join(next(records))


def rows(stored: Sequence[bytes]) -> list[tuple[bytes, tuple[bytes], int]]:
    """What `encode_adds` takes."""
    cut = ENTRY_HEADER_STRUCT.size
    return [(each[:cut], (each[cut:],), len(each) - cut) for each in stored]


def payload_of(stored: object) -> bytes:
    return bytes(stored)[ENTRY_HEADER_STRUCT.size :]  # type: ignore[call-overload, no-any-return]


class PeerCaller:
    """A peer connection with one method per operation."""

    def __init__(self, peer: Peer, local: Peer | None = None) -> None:
        self.peer = peer
        self.local = local or peer  # from the bookie's own machine

    def send(
        self, op: BookieOperation, ledger: int, entry: int = -1, *,
        flags: BookieRequestFlags = BookieRequestFlags.NONE, count: int = 1,
        bytes_max: int = 1 << 20, key: bytes = KEY, frames: tuple[bytes, ...] = (),
    ) -> asyncio.Future[tuple[BookieAnswerHead, list[bytes]]]:  # fmt: skip
        async def ask() -> tuple[BookieAnswerHead, list[bytes]]:
            head = BookieRequestHead(op, flags, ledger, entry, count, bytes_max, key).encode()
            reply = await self.peer.request(head, frames, timeout_s=10)
            return decode_answer(reply.head), [bytes(frame) for frame in reply.frames]

        return asyncio.ensure_future(ask())

    async def add(
        self, ledger: int, entry: int, payload: bytes, *, recovery: bool = False, key: bytes = KEY, lac: int = -1
    ) -> BookieAnswerHead:
        stored = stored_entry(ledger, entry, payload, lac)
        flags = BookieRequestFlags.RECOVERY if recovery else BookieRequestFlags.NONE
        return (await self.send(BookieOperation.ADD, ledger, entry, flags=flags, key=key, frames=(stored,)))[0]

    async def add_many(
        self, ledger: int, entries: dict[int, bytes], *, recovery: bool = False, key: bytes = KEY
    ) -> list[Status]:
        """What became of each; LAC -1."""
        flags = BookieRequestFlags.RECOVERY if recovery else BookieRequestFlags.NONE
        stored = [stored_entry(ledger, entry, payload) for entry, payload in entries.items()]
        head = encode_add_many_request(ledger, next(iter(entries)), len(entries), key, flags)
        reply = await self.peer.request(head, encode_adds(rows(stored)), timeout_s=10)
        return decode_add_statuses(decode_answer(reply.head), reply.frames, len(entries))

    async def read(
        self,
        ledger: int,
        entry: int,
        *,
        fence: bool = False,
        count: int = 1,
        bytes_max: int = 1 << 20,
        key: bytes = KEY,
    ) -> tuple[BookieAnswerHead, list[bytes]]:
        flags = BookieRequestFlags.FENCE if fence else BookieRequestFlags.NONE
        return await self.send(
            BookieOperation.READ, ledger, entry, flags=flags, count=count, bytes_max=bytes_max, key=key
        )


def decode_extents(header: index.IndexGroupHeader, data: bytes) -> list[index.Extent] | None:
    """The extents of a group, from the bytes of its header and its heads; None: they are not what was written."""
    heads = data[index.GROUP_HEADER_BYTES : index.GROUP_HEADER_BYTES + header.extent_heads_bytes]
    if len(heads) != header.extent_heads_bytes or crc32c(data[: index.GROUP_HEADER_BYTES - 4], heads) != header.crc:
        return None
    extents = list(index.decode_extent_heads(heads))
    return extents if sum(extent.table_bytes for extent in extents) == header.tables_bytes else None
