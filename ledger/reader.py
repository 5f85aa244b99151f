"""LedgerReader: reads entries of one ledger up to what is certainly stored (reader_core.py).

The bound of an open ledger is a *lower* bound: entries up to it are stored for ever, more may exist, and -1 does not
mean "empty". Only a CLOSED ledger has an end. Replicas are asked one after the other; the next one also when none has
answered for `speculative_read_s`. The first good answer wins and the other requests are cancelled. Damaged bytes, or
those of another entry, count as no answer and are reported (bookies.py). When every replica fails, the record is read
again once (re-replication may have moved the fragment). If they fail again: DataLost when the ledger is closed and
every replica is certain that it does not have the entry (an alarm, never skipped), else Unavailable.
Guards: tests/ledger/test_ledger.py, tests/ledger/test_with_bookies.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from ..metadata.records import CLOSED, LedgerRecord
from ..metadata.store import MetadataStore
from ..proto.errors import DataLost, InvalidRequest, MagnetarError, Unavailable
from ..runtime.files import Buffer
from ..runtime.tasks import run_and_clean_up
from . import recovery as records
from .bookies import Bookies, LedgerConfig
from .peer_format import BookieOperation, BookieRequestFlags, BookieRequestHead, Status
from .placement_core import BookieFaultKind
from .reader_core import (
    EntriesRead,
    EntryMissing,
    EntryRangeRead,
    FailRead,
    FinishRead,
    ReadableEntryBound,
    ReadEffect,
    ReadFact,
    ReadFailed,
    ReadFailure,
    SendReadToBookie,
    SpeculativeReadDue,
    StoredCopy,
)
from .recovery import LostEntriesSearch

_LOG = logging.getLogger("magnetar.ledger")


class LedgerEntry(NamedTuple):
    """An entry of a ledger as it was appended: its id, and its payload in one piece."""

    entry_id: int
    payload: Buffer


class LedgerReader:
    """Reads the entries of one ledger. A `LedgerClient` makes readers. `confirmed` returns the last-add-confirmed of a
    writer in this process; None: there is none. `known`: the last entry, if a recovery has read it. A reader has no
    connections of its own and need not be closed."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig,
        confirmed: Callable[[], int] | None = None, known: StoredCopy | None = None,
    ) -> None:  # fmt: skip
        self._record = record
        self._bookies = bookies
        self._metadata = metadata
        self._config = config
        self._confirmed = confirmed  # LAC of the writer in this process; it never lags
        self._known = known  # the ledger's last entry, if a recovery has read it
        self._bound = ReadableEntryBound(record)
        self.speculations = 0  # times another replica was asked because none answered
        self.damaged_replies = 0  # answers that were not the entry: a disk or a bug

    @property
    def ledger_id(self) -> int:
        return self._record.ledger_id

    @property
    def record(self) -> LedgerRecord:
        """The ledger's record as this reader last read it or got it by `apply_record`."""
        return self._record

    @property
    def is_closed(self) -> bool:
        """True if the ledger is closed: its last entry is known and does not change any more."""
        return self._bound.closed

    @property
    def last_entry(self) -> int:
        """Returns the id of the last entry that may be read now: the last entry of a closed ledger, otherwise the
        largest entry that is known to be confirmed; -1 if there is none."""
        if self._confirmed is not None:
            self._bound.advance_lac(self._confirmed())
        return self._bound.last_entry

    async def read(self, first: int, last: int, bytes_max: int | None = None) -> list[LedgerEntry]:
        """Reads consecutive entries from `first` on and returns them in order: at least one, at most up to `last`
        (inclusive), and about `bytes_max` payload bytes (None: `read_bytes_max` of the configuration). The result ends
        early where the bookie that answered does not have the next entry.

        Raises InvalidRequest if the range is not within 0 … `last_entry`. Raises DataLost if the first entry is
        certainly lost, Unavailable if it cannot be read now from any bookie. Raises LedgerNotFound if the ledger was
        deleted, and the errors of the metadata."""
        entries = await self.read_stored(first, last, bytes_max)
        return [LedgerEntry(entry.entry, entry.payload) for entry in entries]

    async def read_stored(self, first: int, last: int, bytes_max: int | None = None) -> list[StoredCopy]:
        """Reads entries like `read`, with the same errors, and returns them with the fields of their stored headers, so
        that the caller can store the same entries at other bookies."""
        if not 0 <= first <= last <= self.last_entry:
            raise InvalidRequest(
                f"ledger {self.ledger_id}: entries {first} to {last} are not within 0 to {self.last_entry}",
                ledger=self.ledger_id, first=first, last=last, bound=self.last_entry,
            )  # fmt: skip
        if self._known is not None and first == self._known.entry:
            return [self._known]
        bytes_max = self._config.read_bytes_max if bytes_max is None else bytes_max
        answer = await self._read_once(first, last, bytes_max)
        if isinstance(answer, FailRead):
            await self._learn_record()
            answer = await self._read_once(first, last, bytes_max)
        if isinstance(answer, FailRead):
            if answer.why is ReadFailure.UNAVAILABLE and await self._is_lost(first):
                answer = answer._replace(why=ReadFailure.LOST)
            error = self._error(answer, first)
            _LOG.error("%s", error)
            raise error
        return answer.entries

    async def _is_lost(self, entry: int) -> bool:
        """Returns whether the entry is certainly lost: the bookies that do not answer were deleted by an operator, and
        the others lack the entry."""
        try:
            return await LostEntriesSearch(self._record, self._bookies, self._metadata, self._config).is_lost(entry)
        except MagnetarError:
            return False  # it is not known

    async def refresh_last_entry(self) -> int:
        """Reads the ledger's record again. If the ledger is not CLOSED, also asks its bookies for the largest
        last-add-confirmed (LAC). Returns the new `last_entry`. Never fences the ledger.

        Raises LedgerNotFound if the ledger was deleted, Unavailable if the ledger is not closed and no bookie of its
        last fragment answers, and the errors of the metadata."""
        if not self.is_closed:
            await self._learn_record()
        if not self.is_closed:
            asked = [self._ask_lac(bookie) for bookie in self._record.fragments[-1].bookies]
            lacs = [lac for lac in await asyncio.gather(*asked) if lac is not None]
            if not lacs:
                raise Unavailable(f"ledger {self.ledger_id}: none of its bookies answers", ledger=self.ledger_id)
            self._bound.advance_lac(max(lacs))
        return self.last_entry

    # ------------------------------------------------------------------------------ asking
    async def _read_once(self, first: int, last: int, bytes_max: int) -> FinishRead | FailRead:
        read = EntryRangeRead(
            self._record, first, last, bytes_max, self._bookies.fault_weights(), prefer=self.ledger_id
        )
        asked: dict[asyncio.Task[ReadFact], None] = {}  # in the order of asking
        return await run_and_clean_up(self._ask_on(read, asked), lambda: self._asked_enough(read, asked))

    async def _ask_on(self, read: EntryRangeRead, asked: dict[asyncio.Task[ReadFact], None]) -> FinishRead | FailRead:
        effect: ReadEffect | None = read.start()
        while not isinstance(effect, FinishRead | FailRead):
            if effect is not None and not asked and not read.has_bookie_to_ask:
                effect = read.receive(await self._ask(effect))  # no other to ask: no task, no wait for it
                continue
            if effect is not None:
                asked[asyncio.create_task(self._ask(effect), name="ledger-read")] = None
            effect = read.receive(await self._next_fact(asked, speculates=read.has_bookie_to_ask))
        return effect

    async def _asked_enough(self, read: EntryRangeRead, asked: dict[asyncio.Task[ReadFact], None]) -> None:
        await _cancel(asked)
        self._report_trouble(read)

    async def _next_fact(self, asked: dict[asyncio.Task[ReadFact], None], *, speculates: bool) -> ReadFact:
        patience_s = self._config.speculative_read_s if speculates else None
        await asyncio.wait(list(asked), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        task = next((task for task in asked if task.done()), None)
        if task is None:
            self.speculations += 1
            return SpeculativeReadDue()
        del asked[task]
        return task.result()

    def _report_trouble(self, read: EntryRangeRead) -> None:
        for bookie in read.slow:
            self._bookies.record_read_fault(bookie, BookieFaultKind.SLOW)
        for bookie, entry in read.damaged:
            self.damaged_replies += 1
            self._bookies.record_damage(bookie, self.ledger_id, entry)

    async def _ask(self, ask: SendReadToBookie) -> ReadFact:
        count = min(ask.count, (1 << 32) - 1)
        head = self._head(BookieOperation.READ, ask.entry, count, ask.bytes_max)
        found = await self._bookies.ask(ask.bookie, head, timeout_s=self._config.read_timeout_s)
        if found is None:
            self._bookies.record_failure(ask.bookie)
            return ReadFailed(ask.bookie)
        answer, frames = found
        if answer.status is Status.OK:
            self._bound.advance_lac(answer.lac)
            return EntriesRead(ask.bookie, frames)
        if answer.status in (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER):
            return EntryMissing(ask.bookie)
        return ReadFailed(ask.bookie)

    async def _ask_lac(self, bookie: str) -> int | None:
        """Returns the last-add-confirmed (LAC) that the bookie knows; -1 if it does not know the ledger; None if it did
        not answer."""
        found = await self._bookies.ask(
            bookie, self._head(BookieOperation.READ_LAC, -1), timeout_s=self._config.read_timeout_s
        )
        if found is None:
            return None
        status = found[0].status
        if status is Status.OK:
            return found[0].lac
        return -1 if status in (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER) else None

    def _head(self, op: BookieOperation, entry: int, count: int = 0, bytes_max: int = 0) -> bytes:
        return BookieRequestHead(
            op, BookieRequestFlags.NONE, self.ledger_id, entry, count, min(bytes_max, (1 << 32) - 1), self._record.key
        ).encode()

    async def _learn_record(self) -> None:
        self.apply_record(await records.read_record(self._metadata, self.ledger_id))

    def apply_record(self, record: LedgerRecord) -> None:
        """Makes the reader use a newer record of the ledger, which may have another ensemble or the ledger's end."""
        assert self._record.state != CLOSED or record.state == CLOSED, "a closed ledger stays closed"
        self._record = record
        self._bound.apply_record(record)

    def _error(self, failed: FailRead, entry: int) -> DataLost | Unavailable:
        cls = DataLost if failed.why is ReadFailure.LOST else Unavailable
        return cls(
            f"ledger {self.ledger_id}, entry {entry}: {failed.why.value} (asked {', '.join(failed.asked)})",
            ledger=self.ledger_id, entry=entry, asked=",".join(failed.asked),
        )  # fmt: skip


async def _cancel(asked: dict[asyncio.Task[ReadFact], None]) -> None:
    """Cancels the requests that have no answer yet, and waits until they have ended."""
    if asked:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
