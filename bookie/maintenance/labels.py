"""The labels of ledgers: what a bookie stores of each ledger's record beside the data, for the day on which all
metadata is lost. `magnetar metadata rebuild` makes the tree again from the labels and data of all bookies
(metadata/rebuild_core.py).

Rule. The label of a ledger is synced before the bookie answers the first add of the ledger: a bookie reads the record
of a ledger that is new to it anyway (bookie/service.py), and the first request waits until the label is stored too. So
no message needs a call more, no client sends a label, and the copies that auto-recovery makes on another bookie are
labelled like any add. A pass of the garbage collector labels what has none, from the metadata: ledgers of before, those
that limbo restored, those of a damaged file, or of a time when the disk was full. Then the label is missing, and the
request is done all the same. A pass also marks the labels of ledgers whose deletion the metadata records: a deleted
topic does not come back, although its data is still here.

    file    = file header (format/journal.py: magic "MGN-LABL", number 1) | record*, in the data directory as `labels`
    record  = crc32c u32 (of size and body) | size u16 | body, in MessagePack:
              [ledger, created_ms, ensemble size, write quorum, ack quorum, [[first entry, [bookie, …]], …],
               {property: value}, deleted]; a bookie is the 16 bytes of its uuid

A later record of a ledger replaces an earlier one. What begins with a damaged record is cut at the start, with a line
in the log, and labelled again by the next passes. A file of mostly outdated records is rewritten. An older Magnetar
ignores the file. Example: ledger 7 of one copy, a property `{"topic": "t"}`:
`<crc32c> 0026 98 07 00 01 01 01 91 92 00 91 c4 10 <uuid> 81 a5746f706963 a174 c2`.

Bounds: a label has LABEL_BYTES_MAX; a pass labels LABELS_PER_PASS ledgers; in memory is one bit a ledger and what is
being written. Guarded by tests/bookie/maintenance/test_labels.py.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from uuid import UUID

import msgspec
from pyroaring import BitMap64

from ...metadata import paths
from ...metadata.records import Fragment, LedgerLabel, LedgerRecord, make_ledger_label
from ...metadata.store import MetadataStore, get_readable_record
from ...proto import versions
from ...runtime.files import Files, join_path
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..format.journal import FILE_HEADER_BYTES, DamagedFile, FileHeader, crc32c, decode_file_header, encode_file_header
from ..store import disk

_LOG = logging.getLogger("magnetar.bookie.maintenance")

LABELS_FILE = "labels"
LABELS_MAGIC = versions.LABELS.magic
LABEL_BYTES_MAX = (1 << 16) - 1
LABELS_PER_PASS = 20_000
"""The largest number of ledgers that one pass labels: a read of the metadata for each, some seconds in all."""
REWRITTEN_BYTES_MIN = 64 << 10
"""A smaller file is not rewritten, however much of it is outdated."""
_READS_AT_ONCE = 64
_UUID_BYTES = 16
_HEAD = struct.Struct(">IH")
_SIZE = struct.Struct(">H")
_WINDOW_BYTES = 1 << 20
assert LABEL_BYTES_MAX + _HEAD.size < _WINDOW_BYTES, "a window has a whole record"


class _StoredFragment(msgspec.Struct, frozen=True, array_like=True):
    first_entry: int
    bookies: tuple[bytes, ...]


class _StoredLabel(msgspec.Struct, frozen=True, array_like=True):
    ledger_id: int
    created_ms: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    fragments: tuple[_StoredFragment, ...]
    properties: dict[str, str]
    deleted: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_StoredLabel)


def encode_label(label: LedgerLabel) -> bytes:
    """Encodes a label as a record of the file, and returns its bytes. A label that would be larger than LABEL_BYTES_MAX
    leaves out the properties, by which it says nothing but that the ledger exists."""
    fragments = tuple(_StoredFragment(each.first_entry, tuple(map(_pack, each.bookies))) for each in label.fragments)
    stored = _StoredLabel(
        label.ledger_id, label.created_ms, label.ensemble_size, label.write_quorum, label.ack_quorum, fragments,
        label.properties, label.deleted,
    )  # fmt: skip
    body = _ENCODER.encode(stored)
    if len(body) > LABEL_BYTES_MAX:
        body = _ENCODER.encode(msgspec.structs.replace(stored, properties={}))
    size = _SIZE.pack(len(body))
    return _HEAD.pack(crc32c(size, body), len(body)) + body


def _decode_stored(data: bytes, offset: int = 0) -> Iterator[tuple[_StoredLabel, int]]:
    """Yields each record of `data`, from `offset` on, with the offset after it. Ends before the first record that is
    damaged or cut off."""
    while len(data) - offset >= _HEAD.size:
        crc, size = _HEAD.unpack_from(data, offset)
        end = offset + _HEAD.size + size
        if end > len(data) or crc32c(data[offset + 4 : end]) != crc:
            return
        try:
            yield _DECODER.decode(data[offset + _HEAD.size : end]), end
        except msgspec.MsgspecError:
            return
        offset = end


def _label_of(stored: _StoredLabel) -> LedgerLabel:
    fragments = tuple(Fragment(each.first_entry, tuple(map(_unpack, each.bookies))) for each in stored.fragments)
    return LedgerLabel(
        ledger_id=stored.ledger_id, created_ms=stored.created_ms, ensemble_size=stored.ensemble_size,
        write_quorum=stored.write_quorum, ack_quorum=stored.ack_quorum, fragments=fragments,
        properties=stored.properties, deleted=stored.deleted,
    )  # fmt: skip


def _pack(bookie: str) -> bytes:
    try:
        packed = UUID(bookie)
    except ValueError:
        return bookie.encode()
    return packed.bytes


def _unpack(stored: bytes) -> str:
    return str(UUID(bytes=stored)) if len(stored) == _UUID_BYTES else stored.decode(errors="replace")


def _walk_file(files: Files, directory: str, uuid: bytes) -> Iterator[tuple[_StoredLabel, int, bytes]]:
    """Yields (record, offset after it, its bytes) of each record of the labels in a data directory; nothing if there is
    no file. Ends before the first record that is damaged. Raises DamagedFile, ForeignFile or NewerFormat if the header
    is not that of the bookie's labels, and OSError."""
    path = join_path(directory, LABELS_FILE)
    if not files.exists(path):
        return
    file = files.open(path, write=False)
    try:
        decode_file_header(file.pread(FILE_HEADER_BYTES, 0), LABELS_MAGIC, uuid, 1, path)
        base, size = FILE_HEADER_BYTES, file.size()
        while base < size:
            data, used = file.pread(_WINDOW_BYTES, base), 0
            for stored, end in _decode_stored(data):
                yield stored, base + end, data[used:end]
                used = end
            if not used:
                _LOG.warning("%s: what begins at offset %d is no label: ledgers are labelled again", path, base)
                return
            base += used
    finally:
        file.close()


def walk_labels(files: Files, directory: str, uuid: bytes) -> Iterator[LedgerLabel]:
    """Yields the labels in a bookie's data directory, in the order in which they were written: a later one of a ledger
    replaces an earlier one. Raises DamagedFile, ForeignFile or NewerFormat if the file has another header, and OSError.
    """
    return (_label_of(stored) for stored, _, _ in _walk_file(files, directory, uuid))


class LedgerLabels:
    """The labels of a bookie's ledgers, in the file `labels` of its data directory. `load` must be called first.
    Calling `metadata` returns the current metadata session. `labelled`: the ledgers that have a label."""

    def __init__(self, world: World, directory: str, uuid: bytes, metadata: Callable[[], MetadataStore]) -> None:
        self._files = world.files
        self._directory = directory
        self._path = join_path(directory, LABELS_FILE)
        self._uuid = uuid
        self._metadata = metadata
        self._worker = world.workers.start("bookie-labels")
        self.labelled = BitMap64()
        self._deleted = BitMap64()  # whose label says that they were deleted
        self._end = 0  # of what counts of the file; 0: there is none
        self._waiting: list[tuple[LedgerLabel, asyncio.Future[None]]] = []
        self._tasks = Tasks()
        self._writing: asyncio.Task[None] | None = None
        self.counters = {"labels_written": 0, "labels_failed": 0, "labels_missing": 0}

    async def load(self) -> None:
        """Reads which ledgers have a label. A file that cannot be read is made anew, and logged. Raises NewerFormat if
        a later Magnetar wrote it."""
        try:
            self.labelled, self._deleted, self._end = await self._worker.run(self._load)
        except (DamagedFile, OSError) as error:
            _LOG.error("the labels of ledgers cannot be read, they are made again from the metadata: %s", error)

    def _load(self) -> tuple[BitMap64, BitMap64, int]:
        labelled, deleted, end = BitMap64(), BitMap64(), 0
        for stored, end, _ in _walk_file(self._files, self._directory, self._uuid):  # noqa: B007  # the last one counts
            labelled.add(stored.ledger_id)
            if stored.deleted:
                deleted.add(stored.ledger_id)
        return labelled, deleted, end

    # ------------------------------------------------------------------------------------ one ledger
    async def add_label(self, record: LedgerRecord) -> None:
        """Stores the label of a ledger that is new to this bookie, and returns when it is synced. Labels that come
        while others are written are stored together. If the disk has no room, the ledger stays without a label, which
        is logged; a failed sync ends the process."""
        if record.ledger_id in self.labelled:
            return
        await self._store([make_ledger_label(record)])

    async def _store(self, labels: Sequence[LedgerLabel]) -> None:
        if not labels:
            return
        loop = asyncio.get_running_loop()
        stored: list[tuple[LedgerLabel, asyncio.Future[None]]] = [(label, loop.create_future()) for label in labels]
        self._waiting += stored
        if self._writing is None:
            self._writing = self._tasks.spawn(self._write_waiting(), "bookie-labels")
        await asyncio.wait([future for _, future in stored])

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting, []
                try:
                    await self._write([label for label, _ in some])
                finally:
                    for _, future in some:
                        future.set_result(None)
        finally:
            self._writing = None

    async def _write(self, labels: Sequence[LedgerLabel]) -> None:
        try:
            self._end = await self._worker.run(self._append, b"".join(map(encode_label, labels)), self._end)
        except (disk.NoSpace, OSError) as error:
            self.counters["labels_failed"] += len(labels)
            _LOG.error(
                "%d ledgers stay without a label, and could not be rebuilt without the metadata; the next pass of the "
                "garbage collector tries again: %s", len(labels), error,
            )  # fmt: skip
            return
        self.labelled.update(label.ledger_id for label in labels)
        self._deleted.update(label.ledger_id for label in labels if label.deleted)
        self.counters["labels_written"] += len(labels)

    def _append(self, data: bytes, end: int) -> int:
        """Appends encoded labels to the file and syncs it. `end`: where the file ends; 0: it is made. Returns the new
        end."""
        if not end:
            head = encode_file_header(FileHeader(LABELS_MAGIC, self._uuid, 1))
            disk.replace_file(self._files, self._directory, LABELS_FILE, head + data)
            return len(head) + len(data)
        file = disk.open_file(self._files, self._path)
        try:
            if file.size() > end:  # a torn tail, or what did not fit
                file.truncate(end)
            disk.write_buffers(self._files, file, [data], end)
            disk.sync_file(self._files, file)
        finally:
            file.close()
        return end + len(data)

    # ------------------------------------------------------------------------------------ a pass
    async def run_pass(self, local: BitMap64, deleted: BitMap64, tombstones: Iterable[tuple[int, int]]) -> None:
        """Brings the labels up to date, as a part of a pass of the garbage collector: labels ledgers of `local`, those
        that are here, which have none; marks those of `deleted`, whose deletion the metadata records; rewrites the file
        if most of its ledgers are in `tombstones`. Raises the errors of the metadata."""
        await self._label_missing(local - self.labelled - deleted)
        self.counters["labels_missing"] = len(local - self.labelled - deleted)
        await self._mark_deleted((deleted & self.labelled) - self._deleted)
        living = self.labelled.copy()
        for first, last in tombstones:
            living.remove_range(first, last + 1)
        if 2 * len(living) < len(self.labelled) and self._end >= REWRITTEN_BYTES_MIN:
            while self._writing is not None:
                await asyncio.wait([self._writing])
            self._writing = self._tasks.spawn(self._rewrite(self.labelled - living), "bookie-labels")
            await asyncio.wait([self._writing])

    async def _label_missing(self, missing: BitMap64) -> None:
        wanted = list(missing[:LABELS_PER_PASS])
        for at in range(0, len(wanted), _READS_AT_ONCE):
            some = [paths.ledger(each) for each in wanted[at : at + _READS_AT_ONCE]]
            found = await asyncio.gather(*(get_readable_record(self._metadata(), path, LedgerRecord) for path in some))
            await self._store([make_ledger_label(each[0]) for each in found if each is not None])

    async def _mark_deleted(self, ledgers: BitMap64) -> None:
        try:
            found = await self._worker.run(self._find, ledgers) if ledgers else {}
        except (DamagedFile, OSError) as error:
            _LOG.warning("the labels of %d deleted ledgers are not marked: %s", len(ledgers), error)
            return
        await self._store([msgspec.structs.replace(each, deleted=True) for each in found.values()])

    def _find(self, ledgers: BitMap64) -> dict[int, LedgerLabel]:
        walked = _walk_file(self._files, self._directory, self._uuid)
        return {stored.ledger_id: _label_of(stored) for stored, _, _ in walked if stored.ledger_id in ledgers}

    async def _rewrite(self, gone: BitMap64) -> None:
        """Writes the file anew without the ledgers `gone`, then what came meanwhile."""
        try:
            self._end = await self._worker.run(self._replace, gone)
            self.labelled -= gone
            self._deleted -= gone
        except (disk.NoSpace, DamagedFile, OSError) as error:
            _LOG.warning("the labels of ledgers are not rewritten: %s", error)
        await self._write_waiting()

    def _replace(self, gone: BitMap64) -> int:
        latest = {stored.ledger_id: end for stored, end, _ in _walk_file(self._files, self._directory, self._uuid)}

        def parts() -> Iterator[bytes]:
            yield encode_file_header(FileHeader(LABELS_MAGIC, self._uuid, 1))
            kept = bytearray()
            for stored, end, record in _walk_file(self._files, self._directory, self._uuid):
                if stored.ledger_id not in gone and latest[stored.ledger_id] == end:
                    kept += record
                if len(kept) >= _WINDOW_BYTES:
                    yield bytes(kept)
                    kept.clear()
            yield bytes(kept)

        return disk.replace_file_in_slices(self._files, self._directory, LABELS_FILE, parts())

    # ------------------------------------------------------------------------------------ ending
    async def close(self) -> None:
        """Waits until what is being written is on the disk, and ends the worker."""
        await self._tasks.drain()
        await self._worker.close()

    def statistics(self) -> dict[str, int]:
        return dict(self.counters)
