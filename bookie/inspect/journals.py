"""The journal's files, block by block and record by record (format/journal.py), behind damage too.

A block that does not parse is one of these (the rule of store/replay.py `JournalReader`):

    the end     nothing of this use of the file lies behind it: zeros, or what an earlier use left
    torn        later blocks are whole, but none was built when these bytes were known to be synced, and the next
                journal does not say so either: never acknowledged; the next start cuts from here
    Damage      a later block, or the next journal's header, says that these bytes were synced

Behind damage the walk goes on at the next whole block, behind a torn block it ends. Because a running bookie may write
the very block that was read half, it is read again once the proof is found, and the header as well: journals are
recycled under new names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...runtime.files import File
from ..format.framing import FileHeader
from ..format.journal import (
    ALIGNMENT,
    BLOCK_HEADER_BYTES,
    BLOCK_MAGIC,
    MAGIC,
    RECORD_HEADER_BYTES,
    BlockHeader,
    Record,
    decode_block_header,
    decode_records,
)
from ..store.boot import JOURNAL
from ..store.journal import FILLING, SPARE, SUFFIX, journal_name
from .snapshot import Damage, Gone, Snapshot, header_of, numbers, open_file, windows

_MAGIC = BLOCK_MAGIC.to_bytes(4, "big")


class Block(NamedTuple):
    journal: int
    offset: int
    header: BlockHeader
    records: list[Record]

    @property
    def end(self) -> int:
        return self.offset + self.header.padded_bytes

    def places(self) -> Iterator[tuple[int, Record]]:
        """Each record with its offset in the file."""
        offset = self.offset + BLOCK_HEADER_BYTES
        for record in self.records:
            yield offset, record
            offset += RECORD_HEADER_BYTES + len(record.payload)


class Torn(NamedTuple):
    """Bytes behind the last block that counts: never acknowledged, cut by the next start."""

    path: str
    offset: int


class Opened(NamedTuple):
    """First of a walk: the file and its header."""

    path: str
    bytes: int
    header: FileHeader


Found = Opened | Block | Torn | Damage | Gone


def journals(snapshot: Snapshot) -> list[int]:
    return numbers(snapshot, JOURNAL, (SUFFIX,))


def spares(snapshot: Snapshot) -> list[str]:
    """Recycled segments that wait for their next use, and one that is being zero-filled."""
    path = snapshot.path(JOURNAL)
    if not snapshot.files.exists(path):
        return []
    return [name for name in snapshot.files.list_directory(path) if name.startswith((SPARE, FILLING))]


def walk(snapshot: Snapshot, number: int, start: int = 0) -> Iterator[Found]:
    """The blocks of a journal from the first at or behind `start`."""
    path = snapshot.path(JOURNAL, journal_name(number))
    file = open_file(snapshot, path)
    if file is None:
        yield Gone(path)
        return
    try:
        header = header_of(snapshot, file, MAGIC, number)
        if isinstance(header, Damage):
            yield header if snapshot.files.exists(path) else Gone(path)
            return
        yield Opened(path, file.size(), header)
        yield from _walk(snapshot, file, header, max(-(-start // ALIGNMENT) * ALIGNMENT, ALIGNMENT))
    finally:
        file.close()


def _walk(snapshot: Snapshot, file: File, header: FileHeader, offset: int) -> Iterator[Found]:
    while offset < file.size():
        block = _block(file, header, offset)
        if block is not None:
            yield block
            offset = block.end
            continue
        verdict, following = _judge(snapshot, file, header, offset)
        if verdict is None and following == offset:
            continue  # it was written meanwhile
        if verdict is not None:
            yield verdict
        if not isinstance(verdict, Damage) or following is None:
            return
        offset = following


def _block(file: File, header: FileHeader, offset: int) -> Block | None:
    data = file.pread(ALIGNMENT, offset)
    found = decode_block_header(data, header.b, header.number)
    if found is None or offset + found.padded_bytes > file.size():
        return None
    if found.padded_bytes > ALIGNMENT:
        data += file.pread(found.padded_bytes - ALIGNMENT, offset + ALIGNMENT)
    records = decode_records(found, data[BLOCK_HEADER_BYTES:])
    return None if records is None else Block(header.number, offset, found, records)


def _judge(
    snapshot: Snapshot, file: File, header: FileHeader, bad: int
) -> tuple[Damage | Torn | Gone | None, int | None]:
    """What the bad block is, and where the next whole one lies; (None, bad): it is whole now."""
    following: int | None = None
    torn = False
    reason = _successor_says(snapshot, header.number, bad)
    for offset, later in _later_headers(file, header, bad + ALIGNMENT):
        torn = True
        if following is None and _block(file, header, offset) is not None:
            following = offset
        if reason is None and later.synced_upto > bad:
            reason = f"bad block, and a later one was built when it was synced up to {later.synced_upto}"
        if reason is not None and following is not None:
            break
    if reason is not None:
        if _block(file, header, bad) is not None:
            return None, bad
        if header_of(snapshot, file, MAGIC, header.number) != header:
            return Gone(file.path), None
        return Damage(file.path, bad, reason), following
    begun = file.pread(4, bad) == _MAGIC and decode_block_header(file.pread(ALIGNMENT, bad), header.b, header.number)
    return (Torn(file.path, bad) if torn or begun else None), None


def _successor_says(snapshot: Snapshot, number: int, bad: int) -> str | None:
    path = snapshot.path(JOURNAL, journal_name(number + 1))
    file = open_file(snapshot, path)
    if file is None:
        return None
    try:
        header = header_of(snapshot, file, MAGIC, number + 1)
    finally:
        file.close()
    if isinstance(header, Damage) or header.a <= bad:
        return None
    return f"bad block, and the journal was synced up to {header.a}"


def _later_headers(file: File, header: FileHeader, start: int) -> Iterator[tuple[int, BlockHeader]]:
    """Valid block headers of this use of the file, in order."""
    for base, data in windows(file, start, file.size()):
        at = data.find(_MAGIC)
        while at >= 0:
            if (base + at) % ALIGNMENT == 0:
                found = decode_block_header(data[at : at + BLOCK_HEADER_BYTES], header.b, header.number)
                if found is not None:
                    yield base + at, found
            at = data.find(_MAGIC, at + 1)
