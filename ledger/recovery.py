"""The driver of one recovery (recovery_core.py states the guarantee): marks IN_RECOVERY, then carries out the core's
effects.

Order: the record becomes IN_RECOVERY and is read; *then* the last fragment is fenced, read and written back, and the
record is closed. A stop at any point leaves the ledger IN_RECOVERY: its writer cannot confirm any more, readers have
what was confirmed, and any client may finish. Bytes that are not the entry are reported (bookies.py).

With `joined` the caller closes the record, in one commit with other changes: it gets the `RecoveryResult.end` to put
into that commit. Until it is committed nothing is decided, and another recoverer may store another end.
Guards: tests/ledger/test_ledger.py, tests/ledger/test_with_bookies.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ..metadata import paths
from ..metadata.records import CLOSED, LedgerRecord, decode, encode
from ..metadata.store import MetadataStore, NodeUpdate, VersionedValue
from ..proto.errors import LedgerNotFound, MagnetarError, NotEnoughBookies, OutcomeUnknown, Unavailable
from ..runtime.files import Buffer
from . import metadata_core as transitions
from .bookies import Bookies, LedgerConfig
from .lost import store_record_transition
from .peer_format import (
    BookieAnswerHead,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    encode_add_request,
)
from .reader_core import StoredCopy, encode_header, verify_entry
from .recovery_core import (
    CloseRecoveredLedger,
    Effect,
    EntryFound,
    EntryMissing,
    Fact,
    FenceFailed,
    FinishRecovery,
    LedgerFencedAtBookie,
    LedgerRecordClosed,
    LedgerRecovery,
    ReadFailed,
    RecoveredCloseRefused,
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
    caller must call `recover` again."""


class RecoveryResult(NamedTuple):
    """The result of a recovery. `last`: the last entry of the ledger, if this recovery read it. `end`: the change of
    the metadata that closes the ledger, which the caller must commit (None: the ledger is closed already). `record`:
    the ledger's record, as it is after that change.

    Committing `end` raises ClosedByAnotherRecoverer, or Unavailable if the stored record does not allow the close."""

    record: LedgerRecord
    last: StoredCopy | None = None
    end: NodeUpdate | None = None


async def recover(
    ledger_id: int, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig, *, joined: bool = False
) -> RecoveryResult:
    """Recovers a ledger and closes it; does nothing if it is CLOSED already. Returns its closed record. With `joined`,
    leaves the close to the caller, who must commit `RecoveryResult.end`.

    Raises LedgerNotFound. Raises Unavailable or NotEnoughBookies if too few bookies answer, OutcomeUnknown if the
    metadata does not answer the close: then the caller may try again."""
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
        self._tasks: dict[asyncio.Task[Fact], None] = {}
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
            return self._bookies.choose(1, exclude)[0]
        except NotEnoughBookies:
            return None

    def _run(self, effects: Iterable[Effect]) -> None:
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

    def _start(self, work: Coroutine[None, None, Fact]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Fact]) -> None:
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

    async def _fence(self, effect: SendFence) -> Fact:
        found = await self._ask(effect.bookie, self._head(BookieOperation.READ_LAC, -1))
        if found is not None and found[0].status is Status.OK:
            return LedgerFencedAtBookie(effect.slot, found[0].lac, found[0].entry)
        if found is not None and found[0].status in _CERTAIN:
            return LedgerFencedAtBookie(effect.slot, -1, -1)
        return FenceFailed(effect.slot)

    async def _read(self, effect: SendRead) -> Fact:
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

    async def _write_back(self, effect: SendAdd[PendingAddWithPayload[StoredCopy]]) -> Fact:
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

    def _ending(self, effect: CloseRecoveredLedger) -> Callable[[LedgerRecord | None], transitions.Transition]:
        return partial(
            transitions.close_recovered_ledger, snapshot=self._record.fragments, fragments=effect.fragments,
            last_entry=effect.last_entry, length=effect.length,
        )  # fmt: skip

    def _to_be_closed(self, effect: CloseRecoveredLedger) -> RecoveryResult:
        decide, ledger_id = self._ending(effect), self._record.ledger_id
        path = paths.ledger(ledger_id)

        def transform(node: VersionedValue | None) -> bytes | None:
            answer = decide(decode(node.value, LedgerRecord, path) if node is not None else None)
            if isinstance(answer, transitions.RecordToStore):
                return encode(answer.record, path)
            if isinstance(answer, transitions.LedgerTransitionRefused):
                raise _error(ReportRecoveryFailure(RecoveryFailure.CLOSE_REFUSED, -1), ledger_id)
            if (answer.record.last_entry, answer.record.length) != (effect.last_entry, effect.length):
                raise ClosedByAnotherRecoverer(f"ledger {ledger_id} was closed by another recoverer", ledger=ledger_id)
            return None

        closed = decide(self._record)
        assert isinstance(closed, transitions.RecordToStore), "it is IN_RECOVERY, with the fragments that were read"
        return RecoveryResult(closed.record, self._last(closed.record), NodeUpdate(path, transform))

    async def _close(self, effect: CloseRecoveredLedger) -> Fact:
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
