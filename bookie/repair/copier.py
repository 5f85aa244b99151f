"""Copies entries of a ledger to a bookie: many at a time, at a bounded rate, with RECOVERY (M20).

    copier.held(record, bookie, first, last)    which entries the bookie holds (ledger/format/held.py); None: no answer
    copier.copy(reader, target, runs, ...)      the entries of `runs` are synced at `target` when this returns

Every entry is read from any bookie that has it, its checksum and ids compared (ledger/reader.py), and added as it is,
also to a ledger that is fenced there or unknown. So an entry that the target has damaged is mended by it.
`batches_at_once` batches are under way, each with one read and one ADD_MANY of about `batch_bytes`; runs of a striped
ledger are short, so a batch then has many reads. A failure ends the copy: `CopyFailed`; what was added stays.
**Memory**: `ledgers_at_once` x `batches_at_once` x (`batch_bytes` + one entry), once as read and once on its way: with
the defaults 24 MiB, twice. Adds are synced at the target before they are answered, many at a time and in any order;
the record changes after the last answer, so no add waits for the one before.
Guards: tests/bookie/repair/test_repair.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from ...ledger.bookies import Bookies
from ...ledger.core.stored import StoredCopy, seal
from ...ledger.format.adds import ADDS_MAX, decode_statuses, encode_adds
from ...ledger.format.held import ENTRIES_MAX, decode_held
from ...ledger.format.peer import ENTRY_HEADER, Flags, Op, RequestHead, Status, encode_add_many
from ...ledger.reader import LedgerReader
from ...metadata.records import LedgerRecord
from ...proto.errors import DataLost, MagnetarError
from ...runtime.clock import Clock
from ...runtime.tasks import together
from ..store.intervals import Intervals
from .config import RepairConfig
from .core.marks import Stuck
from .core.pace import Pace

READS_AT_ONCE = 16
"""Reads of one batch at the same time: the runs of a striped ledger."""
BATCHES_PER_S = 64
"""Batches a second, at least, when there is a limit: many small ones disturb producers less."""
ASK_TIMEOUT_S = 10.0
"""Seconds that a request may take: a bookie that takes longer is neither copied from nor copied to, for a while."""
BUSY_PAUSE_S = 0.05
BUSY_MAX = 200
_FIRST_GUESS_BYTES = 16 << 10

Run = tuple[int, int]


class CopyFailed(Exception):
    """A copy failed. `entry`: the one that could not be read; -1: it was not about reading."""

    def __init__(self, stuck: Stuck, text: str, entry: int = -1) -> None:
        super().__init__(text)
        self.stuck = stuck
        self.entry = entry


class Copier:
    """Copies the entries that one worker copies: all copies share the pace. `counters` go up over its whole life."""

    def __init__(self, bookies: Bookies, clock: Clock, config: RepairConfig) -> None:
        self._bookies = bookies
        self._clock = clock
        self._config = config
        self._pace = Pace(config.bytes_per_s)
        limit = config.bytes_per_s or config.batch_bytes * BATCHES_PER_S
        self._batch_bytes = max(1, min(config.batch_bytes, limit // BATCHES_PER_S))
        self.counters = {"repair_entries": 0, "repair_bytes": 0}

    # ------------------------------------------------------------------------------ asking
    async def held(self, record: LedgerRecord, bookie: str, first: int, last: int) -> Intervals | None:
        """Returns which of the entries `first … last` the bookie holds; None if it does not answer."""
        found = Intervals()
        for at in range(first, last + 1, ENTRIES_MAX):
            end = min(last, at + ENTRIES_MAX - 1)
            head = RequestHead(Op.HELD, Flags.NONE, record.ledger_id, at, end - at + 1, 0, record.key).encode()
            answer = await self._bookies.ask(bookie, head, timeout_s=ASK_TIMEOUT_S)
            if answer is None:
                return None
            try:
                for run in decode_held(*answer, at, end):
                    found.add(*run)
            except ValueError:
                return None
        return found

    # ------------------------------------------------------------------------------ copying
    async def copy(self, reader: LedgerReader, target: str, runs: Sequence[Run], copied: Callable[[int], None]) -> None:
        """Copies runs of entries to a bookie. `copied` is called with the number of bytes as they arrive. Raises
        CopyFailed; the metadata's errors."""
        work = _Batches(runs, _guess(reader.record), self._batch_bytes)

        async def keep() -> None:
            for batch in work:
                size = await self._copy_batch(reader, target, batch, copied)
                work.learn(sum(last - first + 1 for first, last in batch), size)

        await together((keep() for _ in range(self._config.batches_at_once)), "repair-copy")

    async def _copy_batch(
        self, reader: LedgerReader, target: str, batch: list[Run], copied: Callable[[int], None]
    ) -> int:
        total = 0
        while batch:
            some, batch = batch[:READS_AT_ONCE], batch[READS_AT_ONCE:]
            bytes_max = max(1, self._batch_bytes // len(some))
            read = await asyncio.gather(*[self._read(reader, first, last, bytes_max) for first, last in some])
            rest = [(got[-1].entry + 1, last) for got, (_, last) in zip(read, some, strict=True)]
            batch = [(first, last) for first, last in rest if first <= last] + batch
            entries = [entry for got in read for entry in got]
            size = sum(len(entry.payload) + ENTRY_HEADER.size for entry in entries)
            wait_s = self._pace.take(self._clock.monotonic(), size)
            if wait_s:
                await asyncio.sleep(wait_s)
            for at in range(0, len(entries), ADDS_MAX):
                await self._add(reader.record, target, entries[at : at + ADDS_MAX])
            self.counters["repair_entries"] += len(entries)
            self.counters["repair_bytes"] += size
            copied(size)
            total += size
        return total

    async def _read(self, reader: LedgerReader, first: int, last: int, bytes_max: int) -> list[StoredCopy]:
        try:
            return await reader.read_stored(first, last, bytes_max)
        except DataLost as error:
            raise CopyFailed(Stuck.LOST, str(error), first) from error
        except MagnetarError as error:
            raise CopyFailed(Stuck.UNREACHABLE, str(error), first) from error

    async def _add(self, record: LedgerRecord, target: str, entries: list[StoredCopy]) -> None:
        ledger = record.ledger_id
        for tries in range(BUSY_MAX):
            if tries:
                await asyncio.sleep(BUSY_PAUSE_S)
            sealed = [
                (seal(ledger, each.entry, each.lac, each.length, (each.payload,)), (each.payload,), len(each.payload))
                for each in entries
            ]
            head = encode_add_many(ledger, entries[0].entry, len(entries), record.key, Flags.RECOVERY)
            answer = await self._bookies.ask(target, head, encode_adds(sealed), timeout_s=ASK_TIMEOUT_S)
            if answer is None:
                self._bookies.failed(target)
                raise CopyFailed(Stuck.UNREACHABLE, f"bookie {target} does not answer")
            try:
                statuses = decode_statuses(*answer, len(entries))
            except ValueError as error:
                raise CopyFailed(Stuck.FAILED, f"bookie {target}: {error}") from error
            refused = next((status for status in statuses if status not in (Status.OK, Status.BUSY)), None)
            if refused is not None:
                raise CopyFailed(Stuck.FAILED, f"bookie {target} refuses a copy: {refused.name}")
            entries = [entry for entry, status in zip(entries, statuses, strict=True) if status is Status.BUSY]
            if not entries:
                return
        raise CopyFailed(Stuck.FAILED, f"bookie {target} is busy")


class _Batches:
    """Takes runs apart into batches of about `batch_bytes`, by the size of the entries seen so far."""

    def __init__(self, runs: Sequence[Run], entry_bytes: float, batch_bytes: int) -> None:
        self._runs = iter(runs)
        self._rest: Run | None = None
        self._entry_bytes = max(1.0, entry_bytes)
        self._batch_bytes = batch_bytes

    def learn(self, entries: int, size: int) -> None:
        self._entry_bytes = max(1.0, size / entries)

    def __iter__(self) -> Iterator[list[Run]]:
        return self

    def __next__(self) -> list[Run]:
        left = min(ADDS_MAX, max(1, int(self._batch_bytes / self._entry_bytes)))
        batch: list[Run] = []
        while left > 0:
            run = self._rest or next(self._runs, None)
            self._rest = None
            if run is None:
                break
            first, last = run
            end = min(last, first + left - 1)
            batch.append((first, end))
            left -= end - first + 1
            if end < last:
                self._rest = (end + 1, last)
        if not batch:
            raise StopIteration
        return batch


def _guess(record: LedgerRecord) -> float:
    """Bytes of an entry, before one was seen."""
    if record.last_entry < 0:
        return _FIRST_GUESS_BYTES
    return record.length / (record.last_entry + 1) + ENTRY_HEADER.size
