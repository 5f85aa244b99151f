"""The driver of one recovery (recovery_core.py states the guarantee): marks IN_RECOVERY, then carries out the core's
effects.

Order: the record becomes IN_RECOVERY and is read; *then* the last fragment is fenced, read and written back, and the
record is closed. A stop at any point leaves the ledger IN_RECOVERY: its writer cannot confirm any more, readers have
what was confirmed, and any client may finish. Bytes that are not the entry are reported (bookies.py).

With `joined` the caller closes the record, in one commit with other changes: it gets the `RecoveryResult.end` to put
into that commit. Until it is committed nothing is decided, and another recoverer may store another end.
Guards: tests/ledger/test_ledger.py, tests/ledger/test_with_bookies.py.

Also in this file, below its heading: the entries that are certainly lost (lost); ledger records in the metadata tree
(records).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..metadata import paths
from ..metadata.records import CLOSED, LedgerRecord, decode_record, encode_record
from ..metadata.store import MetadataStore, NodeUpdate, VersionedValue, get_record, update_node
from ..proto.errors import LedgerNotFound, MagnetarError, NotEnoughBookies, OutcomeUnknown, Unavailable
from ..runtime.files import Buffer
from . import metadata_core as transitions
from .bookies import Bookies, LedgerConfig
from .metadata_core import (
    LedgerTransition,
    LedgerTransitionRefusal,
    LedgerTransitionRefused,
    RecordAlreadyStored,
    RecordToStore,
    find_fragment_of_entry,
    get_striping_of_record,
)
from .peer_format import (
    ENTRIES_PER_ANSWER_MAX,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    decode_stored_runs,
    encode_add_request,
)
from .placement_core import decode_bookie_groups
from .reader_core import StoredCopy, encode_header, verify_entry
from .recovery_core import (
    CloseRecoveredLedger,
    EntryFound,
    EntryMissing,
    FenceFailed,
    FinishRecovery,
    LedgerFencedAtBookie,
    LedgerRecordClosed,
    LedgerRecovery,
    ReadFailed,
    RecoveredCloseRefused,
    RecoveryEffect,
    RecoveryFact,
    RecoveryFailure,
    ReportRecoveryFailure,
    SendFence,
    SendRead,
)
from .writer_core import AddAcked, AddFailed, PendingAddWithPayload, SendAdd

_CERTAIN = (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)
_ENTRY_BYTES_MAX = (1 << 32) - 1


class ClosedByAnotherRecoverer(Unavailable):
    """Raised when another client has recovered and closed the ledger, with another end. That end is the valid one: the
    caller must call `recover_ledger` again."""


class LedgerNotInRecovery(Unavailable):
    """Raised when a ledger cannot be closed without its lost entries, because its record is not IN_RECOVERY or has
    another last fragment by now. Nothing was closed: the caller must call `recover_ledger` first, which may succeed."""


class RecoveryResult(NamedTuple):
    """The result of a recovery. `last`: the last entry of the ledger, if this recovery read it. `end`: the change of
    the metadata that closes the ledger, which the caller must commit (None: the ledger is closed already). `record`:
    the ledger's record, as it is after that change.

    Committing `end` raises ClosedByAnotherRecoverer, Unavailable if the stored record does not allow the close, or the
    other errors of `update_nodes`."""

    record: LedgerRecord
    last: StoredCopy | None = None
    end: NodeUpdate | None = None


async def recover_ledger(
    ledger_id: int, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig, *, joined: bool = False
) -> RecoveryResult:
    """Recovers a ledger and closes it; does nothing if it is CLOSED already. Returns the result with the closed record.
    With `joined`, leaves the close to the caller, who must commit `RecoveryResult.end`.

    Raises LedgerNotFound. Raises Unavailable or NotEnoughBookies if too few bookies answer, OutcomeUnknown if the
    metadata does not answer the close: then the caller may try again. Raises the other errors of the metadata."""
    outcome = await store_record_transition(
        metadata, ledger_id, transitions.decide_recovery_start, timeout_s=config.close_timeout_s
    )
    if isinstance(outcome, transitions.LedgerTransitionRefused):
        raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger=ledger_id)
    if outcome.record.state == CLOSED:
        return RecoveryResult(outcome.record)
    return await _Attempt(outcome.record, bookies, metadata, config, joined=joined).run()


class _Attempt:
    """One attempt to recover a ledger: drives the core. Each effect is a task, and the task's result is the next
    fact."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig, *, joined: bool
    ) -> None:
        self._record = record
        self._joined = joined
        self._bookies = bookies
        self._metadata = metadata
        self._config = config
        self._core = LedgerRecovery(record, self._choose, batch=config.recovery_batch)
        self._tasks: dict[asyncio.Task[RecoveryFact], None] = {}
        self._result: asyncio.Future[RecoveryResult] = asyncio.get_running_loop().create_future()

    async def run(self) -> RecoveryResult:
        try:
            self._run(self._core.start())
            return await self._result
        finally:
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _choose(self, exclude: Sequence[str]) -> str | None:
        try:
            groups = decode_bookie_groups(self._record.properties)
            return self._bookies.choose_recovery_bookie(exclude, self._record.ledger_id, groups)
        except NotEnoughBookies:
            return None

    def _run(self, effects: Iterable[RecoveryEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendFence):
                self._start(self._fence(effect))
            elif isinstance(effect, SendRead):
                self._start(self._read(effect))
            elif isinstance(effect, SendAdd):
                self._start(self._write_back(effect))
            elif isinstance(effect, CloseRecoveredLedger):
                if self._joined:
                    self._result.set_result(self._to_be_closed(effect))
                else:
                    self._start(self._close(effect))
            elif isinstance(effect, FinishRecovery):
                self._result.set_result(RecoveryResult(effect.record, self._last(effect.record)))
            else:
                self._result.set_exception(_error(effect, self._record.ledger_id))

    def _start(self, work: Coroutine[None, None, RecoveryFact]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[RecoveryFact]) -> None:
        del self._tasks[task]
        if task.cancelled() or self._result.done():
            return
        error = task.exception()
        try:
            if error is not None:
                raise error
            self._run(self._core.receive(task.result()))
        except Exception as fault:  # of a task or of the core: only the result reports it
            self._result.set_exception(fault)

    # ------------------------------------------------------------------------------ effects, each to its fact
    def _head(self, op: BookieOperation, entry: int) -> bytes:
        return BookieRequestHead(
            op, BookieRequestFlags.FENCE, self._record.ledger_id, entry, 1, _ENTRY_BYTES_MAX, self._record.key
        ).encode()

    async def _ask(self, bookie: str, head: bytes) -> tuple[BookieAnswerHead, Sequence[Buffer]] | None:
        """Sends a request to a bookie and returns its answer, None if there is none. Waits long for a busy bookie, as
        when brokers take over the topics of another one: to start the recovery again would only send more requests."""
        config = self._config
        return await self._bookies.ask(bookie, head, timeout_s=config.fence_timeout_s, busy_s=config.close_timeout_s)

    async def _fence(self, effect: SendFence) -> RecoveryFact:
        found = await self._ask(effect.bookie, self._head(BookieOperation.READ_LAC, -1))
        if found is not None and found[0].status is Status.OK:
            return LedgerFencedAtBookie(effect.slot, found[0].lac, found[0].entry)
        if found is not None and found[0].status in _CERTAIN:
            return LedgerFencedAtBookie(effect.slot, -1, -1)
        return FenceFailed(effect.slot)

    async def _read(self, effect: SendRead) -> RecoveryFact:
        """Asks a bookie for an entry, as its vote. Only an undamaged copy is a vote for the entry, and only a certain
        miss is a vote against it (M05, M06)."""
        found = await self._ask(effect.bookie, self._head(BookieOperation.READ, effect.entry))
        if found is not None and found[0].status is Status.OK and found[1]:
            stored = verify_entry(found[1][0], self._record.ledger_id, effect.entry)
            if stored is not None:
                return EntryFound(effect.entry, effect.slot, stored)
            self._bookies.record_damage(effect.bookie, self._record.ledger_id, effect.entry)
        elif found is not None and found[0].status in _CERTAIN:
            return EntryMissing(effect.entry, effect.slot)
        return ReadFailed(effect.entry, effect.slot)

    async def _write_back(self, effect: SendAdd[PendingAddWithPayload[StoredCopy]]) -> RecoveryFact:
        stored, ledger = effect.add.payload, self._record.ledger_id
        frames = (encode_header(ledger, stored.entry, effect.lac, stored.length, (stored.payload,)), stored.payload)
        head = encode_add_request(ledger, stored.entry, self._record.key, BookieRequestFlags.RECOVERY)
        found = await self._bookies.ask(effect.bookie, head, frames, timeout_s=self._config.add_timeout_s)
        if found is not None and found[0].status is Status.OK:
            return AddAcked(stored.entry, effect.slot, effect.bookie)
        self._bookies.record_failure(effect.bookie)
        return AddFailed(stored.entry, effect.slot, effect.bookie)

    def _last(self, record: LedgerRecord) -> StoredCopy | None:
        """Returns the last entry of the closed ledger if this recovery has read it. Returns None otherwise, for example
        if another recoverer has closed the ledger with another end."""
        last = self._core.last_copy
        return last if last is not None and last.entry == record.last_entry else None

    def _ending(self, effect: CloseRecoveredLedger) -> Callable[[LedgerRecord | None], transitions.LedgerTransition]:
        return partial(
            transitions.decide_close_by_recovery, snapshot=self._record.fragments, fragments=effect.fragments,
            last_entry=effect.last_entry, length=effect.length,
        )  # fmt: skip

    def _to_be_closed(self, effect: CloseRecoveredLedger) -> RecoveryResult:
        decide, ledger_id = self._ending(effect), self._record.ledger_id
        path = paths.ledger(ledger_id)

        def transform(node: VersionedValue | None) -> bytes | None:
            answer = decide(decode_record(node.value, LedgerRecord, path) if node is not None else None)
            if isinstance(answer, transitions.RecordToStore):
                return encode_record(answer.record, path)
            if isinstance(answer, transitions.LedgerTransitionRefused):
                raise _error(ReportRecoveryFailure(RecoveryFailure.CLOSE_REFUSED, -1), ledger_id)
            if (answer.record.last_entry, answer.record.length) != (effect.last_entry, effect.length):
                raise ClosedByAnotherRecoverer(f"ledger {ledger_id} was closed by another recoverer", ledger=ledger_id)
            return None

        closed = decide(self._record)
        assert isinstance(closed, transitions.RecordToStore), "it is IN_RECOVERY, with the fragments that were read"
        return RecoveryResult(closed.record, self._last(closed.record), NodeUpdate(path, transform))

    async def _close(self, effect: CloseRecoveredLedger) -> RecoveryFact:
        try:
            outcome = await store_record_transition(
                self._metadata, self._record.ledger_id, self._ending(effect), timeout_s=self._config.close_timeout_s
            )
        except MagnetarError as error:
            raise OutcomeUnknown(
                f"ledger {self._record.ledger_id}: the metadata did not answer whether its end was stored; try again",
                ledger=self._record.ledger_id,
            ) from error
        return (
            RecoveredCloseRefused()
            if isinstance(outcome, transitions.LedgerTransitionRefused)
            else LedgerRecordClosed(outcome.record)
        )


def _error(effect: ReportRecoveryFailure, ledger_id: int) -> MagnetarError:
    where = f"ledger {ledger_id}" + (f", entry {effect.entry}" if effect.entry >= 0 else "")
    cls = NotEnoughBookies if effect.why is RecoveryFailure.NOT_STORED else Unavailable
    return cls(f"{where}: {effect.why.value}; it stays in recovery", ledger=ledger_id, entry=effect.entry,
               reason=effect.why.name)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- lost
# The entries of a ledger that are certainly lost; and the end of a ledger that recovery cannot end because of them.
#
# A replica is certain that it lacks an entry when it answers so, with all that it has in order (NO_SUCH_ENTRY,
# NO_SUCH_LEDGER), or when its bookie was *forgotten*: an operator deleted its cookie (`magnetar bookies forget`), and a
# bookie that starts there again is another one. An entry is **lost** when each replica of its write set is certain. No
# answer, limbo and damage are unknown, and unknown is not lost.
#
# `close_unrecoverable_ledger` is for a ledger whose last fragment recovery cannot fence (ledger/recovery_core.py):
# every bookie of the fragment was forgotten, or answers to the fence. The ledger ends after the last entry that one of
# these has; later ones are lost, and it is not known how many. With `force` bookies that do not answer count as
# forgotten: entries that only they have are given up, and a writer that still reaches them gets confirmations until it
# needs the metadata. Guards: tests/broker/log/test_skip_lost.py.

# ------------------------------------------------------------------------------------------------------- records
# Ledger records in the metadata tree: one transition at a time, decided by content (metadata_core.py).
#
# `store_record_transition` reads the record, asks the pure transition, and writes by compare-and-set until the answer
# is `RecordAlreadyStored` or `LedgerTransitionRefused`. After a write of unknown outcome it reads again, and the
# transition recognises its own write (metadata/store.py, which also bounds and paces the attempts).


DecideTransition = Callable[[LedgerRecord | None], LedgerTransition]


async def read_record(store: MetadataStore, ledger_id: int) -> LedgerRecord:
    """Reads the record of a ledger in the metadata and returns it. Raises LedgerNotFound, and the errors of the
    metadata."""
    found = await get_record(store, paths.ledger(ledger_id), LedgerRecord)
    if found is None:
        raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger=ledger_id)
    return found[0]


async def store_record_transition(
    store: MetadataStore, ledger_id: int, decide: DecideTransition, *, timeout_s: float
) -> RecordAlreadyStored | LedgerTransitionRefused:
    """Changes a ledger's record: calls `decide` with the stored record and stores the record that it returns; repeats
    that if another process changes the record meanwhile, for at most `timeout_s` seconds. Returns the outcome: the
    stored record, or why the change was refused. Raises the metadata's errors: then it is unknown whether the change
    was stored."""
    path = paths.ledger(ledger_id)
    answer: LedgerTransition | None = None  # of the last attempt: what it wrote, or found, is stored

    def transform(node: VersionedValue | None) -> bytes | None:
        nonlocal answer
        answer = decide(decode_record(node.value, LedgerRecord, path) if node is not None else None)
        return encode_record(answer.record, path) if isinstance(answer, RecordToStore) else None

    await update_node(store, path, transform, deadline_s=timeout_s)
    assert answer is not None, "an update that returns has asked"
    return answer if isinstance(answer, LedgerTransitionRefused) else RecordAlreadyStored(answer.record)


# ---------------------------------------------------------------------------------------------------------- lost


_LOST_CERTAIN = (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)
_AT_ONCE = 32
"""The number of entries that are requested at a time, each by a request of its own."""

EntryIdRange = tuple[int, int]
"""A run of entries: (first entry, last entry)."""


class LostEntriesReport(NamedTuple):
    """The entries of a closed ledger that no bookie is known to have. The entries in `lost` are certainly lost, those
    in `unknown` may still exist; both are runs (first, last) in ascending order. `silent` are the bookies that did not
    answer, or whose answer was not certain."""

    lost: list[EntryIdRange]
    unknown: list[EntryIdRange]
    silent: list[str]


class LostEntriesSearch:
    """Searches for the entries of one ledger that are certainly lost: every bookie that should have them lacks them, or
    was deleted by an operator (`magnetar bookies forget`). `force`: treats bookies that do not answer as deleted;
    `forced` then has the bookies that were treated so."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig, *,
        force: bool = False,
    ) -> None:  # fmt: skip
        self.record = record
        self.forced: set[str] = set()  # bookies that counted as forgotten because they did not answer
        self._bookies = bookies
        self._metadata = metadata
        self._config = config
        self._force = force
        self._forgotten: set[str] = set()
        self._silent: set[str] = set()
        self._empty: set[str] = set()  # bookies that have nothing of the ledger

    async def _learn(self, bookies: Iterable[str] = ()) -> None:
        """Reads from the metadata which of these bookies (none given: of all bookies of the ledger) were deleted by an
        operator."""
        await self._bookies.wait_bookies_listed()
        every = {each for fragment in self.record.fragments for each in fragment.bookies}
        for bookie in bookies or every:
            if await self._metadata.get(paths.cookie(bookie)) is None:
                self._forgotten.add(bookie)

    def _lacks(self, bookie: str) -> bool | None:
        """Decides about a bookie that does not answer: returns True if its copies count as lost, None if they may still
        exist."""
        if bookie in self._forgotten:
            return True
        if self._force:
            self.forced.add(bookie)
            return True
        self._silent.add(bookie)
        return None

    def _head(
        self, op: BookieOperation, entry: int, count: int, flags: BookieRequestFlags = BookieRequestFlags.NONE
    ) -> bytes:
        return BookieRequestHead(op, flags, self.record.ledger_id, entry, count, 1, self.record.key).encode()

    # ------------------------------------------------------------------------------ a closed one
    async def find_lost_entries(self) -> LostEntriesReport:
        """Asks the bookies for all entries of the ledger, which must be CLOSED, and returns the lost and the unknown
        ones. Bookies that do not answer cause no error: the report names them in `silent`. Raises the metadata's
        errors."""
        assert self.record.state == CLOSED, "entries of an open ledger are not lost"
        await self._learn()
        lost: list[EntryIdRange] = []
        unknown: list[EntryIdRange] = []
        for first in range(0, self.record.last_entry + 1, ENTRIES_PER_ANSWER_MAX):
            last = min(self.record.last_entry, first + ENTRIES_PER_ANSWER_MAX - 1)
            doubtful = await self._not_held(first, last)
            for at in range(0, len(doubtful), _AT_ONCE):
                some = doubtful[at : at + _AT_ONCE]
                for entry, verdict in zip(some, await asyncio.gather(*map(self._is_lost, some)), strict=True):
                    if verdict is not False:
                        _extend(lost if verdict else unknown, entry)
        return LostEntriesReport(lost, unknown, sorted(self._silent))

    async def is_lost(self, entry: int) -> bool:
        """Returns whether an entry that could not be read is certainly lost. Returns False if the ledger is not CLOSED,
        or if that is not certain. Raises the metadata's errors."""
        if self.record.state != CLOSED:
            return False
        fragment = find_fragment_of_entry(self.record, entry)[0]
        await self._learn(
            [fragment.bookies[slot] for slot in get_striping_of_record(self.record).slots_of_entry(entry)]
        )
        return bool(self._forgotten) and await self._is_lost(entry) is True

    async def _not_held(self, first: int, last: int) -> list[int]:
        """Returns those of the entries `first … last` that no bookie reports to have. They may still exist, so each of
        them must be requested."""
        left = set(range(first, last + 1))
        begins = {first, *(part.first_entry for part in self.record.fragments if first <= part.first_entry <= last)}
        bookies = {each for entry in begins for each in find_fragment_of_entry(self.record, entry)[0].bookies}
        for bookie in sorted(bookies):
            head = self._head(BookieOperation.HELD, first, last - first + 1)
            answer = await self._bookies.ask(bookie, head, timeout_s=self._config.read_timeout_s)
            if answer is not None:
                if answer[0].status is Status.NO_SUCH_LEDGER:
                    self._empty.add(bookie)
                elif answer[0].status is Status.OK:
                    with contextlib.suppress(ValueError):  # a malformed answer says nothing: each entry is requested
                        for low, high in decode_stored_runs(*answer, first, last):
                            left.difference_update(range(low, high + 1))
        return sorted(left)

    async def _is_lost(self, entry: int) -> bool | None:
        """Returns True if the entry is lost, False if a bookie has it, None if that cannot be decided."""
        fragment = find_fragment_of_entry(self.record, entry)[0]
        slots = get_striping_of_record(self.record).slots_of_entry(entry)
        verdicts = await asyncio.gather(*(self._lacks_entry(fragment.bookies[slot], entry) for slot in slots))
        if False in verdicts:
            return False
        return None if None in verdicts else True

    async def _lacks_entry(self, bookie: str, entry: int) -> bool | None:
        if bookie in self._empty:
            return True
        head = self._head(BookieOperation.READ, entry, 1)
        found = await self._bookies.ask(bookie, head, timeout_s=self._config.read_timeout_s)
        if found is None:
            return self._lacks(bookie)
        if found[0].status in _LOST_CERTAIN:
            return True
        if (
            found[0].status is Status.OK
            and found[1]
            and verify_entry(found[1][0], self.record.ledger_id, entry) is not None
        ):
            return False
        self._silent.add(bookie)  # it answers that it does not know: this stays unknown also with `force`
        return None

    # ------------------------------------------------------------------------------ one that cannot be recovered
    async def is_unrecoverable(self) -> bool:
        """Returns whether the ledger is not CLOSED and can never be recovered, because operators have deleted too many
        bookies of its last fragment to fence it. Raises the metadata's errors."""
        bookies = self.record.fragments[-1].bookies
        await self._learn(bookies)
        gone = {slot for slot, bookie in enumerate(bookies) if bookie in self._forgotten}
        return self.record.state != CLOSED and not get_striping_of_record(self.record).is_fence_complete(gone)

    async def close_unrecoverable_ledger(self) -> LedgerRecord:
        """Closes a ledger that is IN_RECOVERY and cannot be recovered. Fences it at the bookies of its last fragment
        and ends it after the last entry that one of them knows; the record's length becomes 0. Returns the ledger's
        record, also if another process has closed the ledger.

        Raises Unavailable if a bookie that does not answer may have more entries, LedgerNotInRecovery if the record
        does not allow the close, LedgerNotFound if it is missing, and the metadata's errors."""
        await self._learn()
        last_fragment = self.record.fragments[-1]
        known = last_fragment.first_entry - 1
        for bookie in dict.fromkeys(last_fragment.bookies):
            head = self._head(BookieOperation.READ_LAC, -1, 1, BookieRequestFlags.FENCE)
            found = await self._bookies.ask(bookie, head, timeout_s=self._config.fence_timeout_s)
            if found is not None and found[0].status is Status.OK:
                known = max(known, found[0].lac, found[0].entry)
            elif found is not None and found[0].status not in _LOST_CERTAIN:
                self._silent.add(bookie)  # in limbo: it lost data, and may get it back from others
            elif found is None:
                self._lacks(bookie)
        if self._silent:
            raise Unavailable(
                f"ledger {self.record.ledger_id}: {', '.join(sorted(self._silent))} may have what the others lost, and "
                "cannot say now. Start it; or, if it is gone for good, forget it (`magnetar bookies forget`)",
                ledger=self.record.ledger_id,
            )  # fmt: skip
        decide = partial(
            transitions.decide_close_by_recovery, snapshot=self.record.fragments, fragments=self.record.fragments,
            last_entry=known, length=0,
        )  # fmt: skip
        outcome = await store_record_transition(
            self._metadata, self.record.ledger_id, decide, timeout_s=self._config.close_timeout_s
        )
        if isinstance(outcome, transitions.LedgerTransitionRefused):
            ledger_id, reason = self.record.ledger_id, outcome.reason
            if reason is LedgerTransitionRefusal.DELETED:
                raise LedgerNotFound(f"ledger {ledger_id}: {reason.value}", ledger=ledger_id)
            raise LedgerNotInRecovery(f"ledger {ledger_id}: {reason.value}; try again", ledger=ledger_id)
        return outcome.record


def _extend(runs: list[EntryIdRange], entry: int) -> None:
    if runs and runs[-1][1] == entry - 1:
        runs[-1] = (runs[-1][0], entry)
    else:
        runs.append((entry, entry))
