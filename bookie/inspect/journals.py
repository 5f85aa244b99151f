"""The journal's files, block by block and record by record (format/journal.py), also after damage.

The rule is that of store/replay.py `JournalReader`. A block that is not whole is one of these:

    the end     nothing of this use of the file is after it: zeros, or what an earlier use left
    torn        a block was begun there, and nothing says that it was synced: not acknowledged, a start ignores it
    FileDamage  a later block of this file, or the next journal's header, says that these bytes were synced

After damage the walk continues at the next whole block. A running bookie may be writing the block that was read in
part. So the block is read again when the proof is found, and so is the header: journals are recycled under new names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..format.journal import (
    BLOCK_ALIGNMENT_BYTES,
    BLOCK_HEADER_BYTES,
    BLOCK_MAGIC,
    HEADER_COPY_OFFSET,
    JOURNAL_MAGIC,
    RECORD_HEADER_BYTES,
    BlockHeader,
    FileHeader,
    JournalRecord,
    decode_block_header_if_intact,
    decode_records_if_intact,
)
from ..store.boot import JOURNAL_FOLDER
from ..store.replay import FILLING_PREFIX, JOURNAL_SUFFIX, SPARE_PREFIX, journal_file_name
from .snapshot import (
    FileDamage,
    ReadableFile,
    RemovedFile,
    StoreSnapshot,
    list_file_numbers,
    open_file,
    read_file_in_parts,
    read_header_or_damage,
    snapshot_directory,
)

_MAGIC = BLOCK_MAGIC.to_bytes(4, "big")


class JournalBlock(NamedTuple):
    """A valid block of a journal: the journal's number, the block's offset in the file, its header and its records."""

    journal: int
    offset: int
    header: BlockHeader
    records: list[JournalRecord]

    @property
    def end_offset(self) -> int:
        return self.offset + self.header.padded_bytes

    def records_with_offsets(self) -> Iterator[tuple[int, JournalRecord]]:
        """Yields (offset in the journal file, record) for each record of the block."""
        offset = self.offset + BLOCK_HEADER_BYTES
        for record in self.records:
            yield offset, record
            offset += RECORD_HEADER_BYTES + len(record.payload)


class TornTail(NamedTuple):
    """The bytes of the journal file `path` from `offset` on, where an unfinished write left an incomplete block. No
    entry in these bytes was acknowledged, and the next start of the bookie ignores them."""

    path: str
    offset: int


class OpenedJournalFile(NamedTuple):
    """The opened journal file: its path, its size in bytes, and its header. `walk_journal` yields this item before the
    file's blocks."""

    path: str
    bytes: int
    header: FileHeader


JournalFinding = OpenedJournalFile | JournalBlock | TornTail | FileDamage | RemovedFile


def list_journal_numbers(snapshot: StoreSnapshot) -> list[int]:
    """Returns the numbers of all journal files in the directory, in ascending order. Raises OSError if the directory
    cannot be listed."""
    return list_file_numbers(snapshot, JOURNAL_FOLDER, (JOURNAL_SUFFIX,))


def list_spare_journal_names(snapshot: StoreSnapshot) -> list[str]:
    """Returns the names of the spare journal files: the files that wait to become the next journal, and a file that is
    still being filled with zeros. Returns [] if there is no journal folder. Raises OSError if the directory cannot be
    listed."""
    path = snapshot.path(JOURNAL_FOLDER)
    if not snapshot.files.exists(path):
        return []
    return [name for name in snapshot.files.list_directory(path) if name.startswith((SPARE_PREFIX, FILLING_PREFIX))]


def find_missing_journals(snapshot: StoreSnapshot) -> Iterator[FileDamage]:
    """Yields a FileDamage for each journal file that should exist and does not: the journal that the checkpoint mark
    names, and each later one up to the latest journal. Reads the mark again before it calls a journal missing; that
    raises the errors of `snapshot_directory`."""
    if snapshot.mark is None or not snapshot.mark.journal:
        return
    there = list_journal_numbers(snapshot)
    for number in range(snapshot.mark.journal, max(there, default=snapshot.mark.journal) + 1):
        if number not in there:
            mark = snapshot_directory(snapshot.files, snapshot.directory).mark
            if mark is None or mark.journal <= number:
                path = snapshot.path(JOURNAL_FOLDER, journal_file_name(number))
                yield FileDamage(path, 0, "this journal is missing, and the mark or its neighbours need it")


def walk_journal(snapshot: StoreSnapshot, number: int, start: int = 0) -> Iterator[JournalFinding]:
    """Yields the content of journal `number`: first an OpenedJournalFile, then the blocks, from the first block at or
    after the offset `start`. Yields a FileDamage for each damaged part, a TornTail if the last write was not finished,
    and a RemovedFile if the bookie has removed the file. Raises InvalidRequest if the file has a newer format than this
    Magnetar knows, OSError if the file cannot be read."""
    path = snapshot.path(JOURNAL_FOLDER, journal_file_name(number))
    file = open_file(snapshot, path)
    if file is None:
        yield RemovedFile(path)
        return
    try:
        header, damage = _header(snapshot, file, number)
        if damage is not None:
            yield damage if snapshot.files.exists(path) else RemovedFile(path)
        if header is None:
            return
        yield OpenedJournalFile(path, file.size(), header)
        mark = snapshot.mark
        if mark is not None and number == mark.journal and file.size() < mark.offset:
            yield FileDamage(path, file.size(), f"the file ends here, and it was synced up to {mark.offset}")
        yield from _walk(
            snapshot,
            file,
            header,
            max(-(-start // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES, BLOCK_ALIGNMENT_BYTES),
        )
    finally:
        file.close()


def _header(snapshot: StoreSnapshot, file: ReadableFile, number: int) -> tuple[FileHeader | None, FileDamage | None]:
    """Reads both copies of the journal's header. Returns the header from an undamaged copy (None if both are damaged),
    and the damage of the first damaged copy (None if both are undamaged)."""
    first, second = (
        read_header_or_damage(snapshot, file, JOURNAL_MAGIC, number, offset) for offset in (0, HEADER_COPY_OFFSET)
    )
    if isinstance(first, FileDamage):
        return None if isinstance(second, FileDamage) else second, first
    return first, second if isinstance(second, FileDamage) else None


def _walk(snapshot: StoreSnapshot, file: ReadableFile, header: FileHeader, offset: int) -> Iterator[JournalFinding]:
    while offset < file.size():
        block = _block(file, header, offset)
        if block is None:
            verdict, offset_ = _judge(snapshot, file, header, offset)
            if verdict is not None:
                yield verdict
            if offset_ is None:
                return
            offset = offset_
            continue
        yield block
        offset = block.end_offset


def _block_header(file: ReadableFile, header: FileHeader, offset: int) -> BlockHeader | None:
    return decode_block_header_if_intact(file.pread(BLOCK_HEADER_BYTES, offset), header.b, header.number, offset)


def _block(file: ReadableFile, header: FileHeader, offset: int) -> JournalBlock | None:
    found = _block_header(file, header, offset)
    if found is None or offset + found.padded_bytes > file.size():
        return None
    records = decode_records_if_intact(found, file.pread(found.padded_bytes, offset), BLOCK_HEADER_BYTES)
    return None if records is None else JournalBlock(header.number, offset, found, list(records.rows()))


def _judge(
    snapshot: StoreSnapshot, file: ReadableFile, header: FileHeader, bad: int
) -> tuple[FileDamage | TornTail | RemovedFile | None, int | None]:
    """Judges a bad block. Returns (what is wrong with the block, offset at which the walk over the journal continues).
    The offset is that of the next valid block; `bad` itself if the block has become valid meanwhile; None if the walk
    ends here."""
    begun = _block_header(file, header, bad)
    durable = _durable_end(snapshot, header.number)
    synced = durable is not None and durable > bad
    behind = bad + (begun.padded_bytes if begun is not None else BLOCK_ALIGNMENT_BYTES)
    following = _next_block(file, header, behind, -1 if synced else bad)
    if following is None and not synced:
        return TornTail(file.path, bad) if begun is not None else None, None
    if _block(file, header, bad) is not None:
        return None, bad
    if _header(snapshot, file, header.number)[0] != header or not snapshot.files.exists(file.path):
        return RemovedFile(file.path), None
    what = "the records of a block do not decode" if begun is not None else "no valid block"
    if following is not None:
        return FileDamage(file.path, bad, f"{what}; a later block was made when it was synced"), following
    return FileDamage(file.path, bad, f"{what}; the next journal was begun when it was synced up to {durable}"), None


def _durable_end(snapshot: StoreSnapshot, number: int) -> int | None:
    """Returns the offset up to which the journal was synced, as the header of the next journal says; None if that is
    unknown."""
    file = open_file(snapshot, snapshot.path(JOURNAL_FOLDER, journal_file_name(number + 1)))
    if file is None:
        return None
    try:
        header, _ = _header(snapshot, file, number + 1)
        return None if header is None else header.a
    finally:
        file.close()


def _next_block(file: ReadableFile, header: FileHeader, start: int, bad: int) -> int | None:
    """Returns the offset of the first valid block header at or after `start` whose block was made when the block at
    `bad` was already synced. Returns None if there is no such header. `bad` -1: any valid block header counts."""
    first: int | None = None
    for base, data in read_file_in_parts(file, start, file.size()):
        at = data.find(_MAGIC)
        while at >= 0:
            found = _block_header(file, header, base + at) if (base + at) % BLOCK_ALIGNMENT_BYTES == 0 else None
            if found is not None:
                first = base + at if first is None else first
                if found.synced_upto > bad:
                    return first
            at = data.find(_MAGIC, at + 1)
    return None
