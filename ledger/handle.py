"""LedgerWriter: the driver of one writer core (writer_core.py states the guarantee).

`append` never waits: at the end of the loop's turn, everything appended in it is sent to each replica in one request
(sender.py). The caller must never change the frames: when the future is done, the request to the slowest replica may
still be in flight. The future resolves to the entry id, strictly in entry order, or fails with

| error | the entry is | then |
|---|---|---|
| LedgerClosed | certainly not stored | append it to a new ledger: no duplicate |
| LedgerFenced | unknown; another client has the ledger | stop; the owner reads its end |
| OutcomeUnknown | unknown (no answer in time, key refused, `abandon`) | close the handle; the end decides |
| BackPressure | not accepted: too much is pending | `await wait_room()`, append it again |

`append_for_listener` is `append` without a future per entry: the `listener` gets the outcomes.

An append to a handle that is not `is_writable` fails at once with LedgerClosed (nothing was sent). A bookie fails when
its connection breaks, or when it does not answer within `add_timeout_s`. It is quarantined, and another bookie takes
its slot from LAC + 1 on (§1.4). The replacement is chosen before the compare-and-set and stays the same in each
attempt, so that an attempt of unknown outcome can only write what the next one writes too. Without a replacement the
handle closes itself, and its owner continues in a new ledger. An entry that is undecided after `quorum_timeout_s`
poisons the handle.

`tell_first_copies`, if it is set, is told up to which entry each has its first copy, in order, before its quorum has
it. That is for receipts that promise no more (acks=one of a producer): it is told only while the ledger is OPEN, not
while its ensemble changes, and an entry that it was told of may still end in each of the ways above.
Guard: tests/ledger/test_first_copies.py.

**A ledger that is answered from memory** (`UNSYNCED_PROPERTIES`; only a topic's log may be one): its bookies answer an
add before the journal's sync. An entry counts as confirmed by the same rules, and is lost if all bookies that have it
are killed before their syncs, some milliseconds later: then the ledger's recovery, which fences with a sync, finds an
earlier end. So that what is lost is the end of a ledger that was open, and never a part of a closed one:
- each bookie gets each entry, in order (ensemble size = write quorum), and no bookie is replaced: the ledger ends
  instead, so each copy is the beginning of the ledger;
- before its end is stored the writer fences it, and waits for one bookie's answer, which comes after the sync of all
  that this bookie has. If none answers in `add_timeout_s` the end is stored all the same, and a line of the log says
  so: what these bookies then lack is DataLost.
Guard: tests/ledger/test_unsynced_ledgers.py.

An idle handle (checked every quarter of that time) sends its LAC to its bookies: an entry carries
only the LAC before it, and a reader in another process could not read the last entry (§1.10).

**Bounds**: at most `pending_entries_max` entries and, except for the last one, `pending_bytes_max` bytes are pending.
At most `unanswered_bytes_max` bytes are at bookies that have not answered, entries that others confirmed included;
of all ledgers together `memory_bytes_max` (`AppendMemoryBudget`): above that `has_room` is false, but `append` does not
refuse.
Guards: tests/ledger/test_ledger.py, tests/ledger/test_ensembles.py, tests/ledger/test_with_bookies.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ..metadata.records import LedgerRecord
from ..metadata.store import MetadataStore
from ..proto.errors import (
    BackPressure,
    InternalError,
    LedgerClosed,
    LedgerFenced,
    MagnetarError,
    MessageTooLarge,
    OutcomeUnknown,
)
from ..runtime.files import Buffer
from ..runtime.tasks import Tasks
from .bookies import Bookies, LedgerConfig
from .metadata_core import (
    LedgerTransitionRefused,
    decide_close_by_writer,
    decide_ensemble_change,
    get_striping_of_record,
    is_answered_from_memory,
)
from .peer_format import BookieOperation, BookieRequestFlags, BookieRequestHead, Status
from .placement_core import decode_bookie_groups
from .reader_core import PayloadTailChecksum, PendingAppend
from .recovery import store_record_transition
from .sender import AddSender, LateBookieAnswer, PendingAppendWithFuture
from .writer_core import (
    AddsAcked,
    ChangeEnsemble,
    ChangeFact,
    CloseLedger,
    ConfirmEntry,
    EnsembleChanged,
    EnsembleChangeRefused,
    EnsembleChangeUnknown,
    EntryOutcome,
    FailEntry,
    LedgerCloseRefused,
    LedgerCloseUnknown,
    LedgerEnded,
    NoReplacementFound,
    QuorumTimedOut,
    SendAdd,
    WriterCore,
    WriterEffect,
    WriterFact,
    WriterState,
)

_LOG = logging.getLogger("magnetar.ledger")

ENTRY_BYTES_MAX = (5 << 20) + (64 << 10)
"""The largest payload of an entry, in bytes: a message of 5 MiB, with the headers of client and broker. Bookies accept
a little more."""

_OPEN = WriterState.OPEN
"""`WriterState.OPEN` as a name of the module: reading a member of an enum costs as much as a call, for each answer."""
_WATCH_TICKS = 4
"""The number of checks in `quorum_timeout_s`. An append that gets no quorum ends at most a quarter later than that
time."""


class LedgerEnd(NamedTuple):
    """The end of a closed ledger: the id of its last entry (-1: the ledger is empty), and its length in payload
    bytes."""

    last_entry: int
    length: int


class AppendListener(Protocol):
    """The interface of an object that is told the outcomes of the entries that were appended with
    `LedgerWriter.append_for_listener`. The appender of a topic's log (broker/log/appender.py) implements it.
    `LedgerWriter` calls its methods in the event loop; they must not raise errors."""

    def on_appended(self, writer: LedgerWriter, last_entry: int) -> None:
        """Called when all entries up to `last_entry` are confirmed. The calls come in the order of the entries; entries
        that are confirmed at the same moment cause one call."""
        ...

    def on_append_failed(self, writer: LedgerWriter) -> None:
        """Called when an entry that was appended with `append_for_listener` will not be confirmed. It may be stored:
        the end that `LedgerWriter.close` returns says whether it is."""
        ...


class LedgerWriter:
    """Appends entries to an OPEN ledger; a ledger has one writer. Made by `LedgerClient.create` or `make_writer`. Must
    be used in the event loop in which it was made. `listener` is told the outcomes of the entries that were appended
    with `append_for_listener`; `on_closed` is called with the ledger's id when the ledger is closed."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig
    ) -> None:
        self._record = record
        self._bookies = bookies
        self._metadata = metadata
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._core: WriterCore[PendingAppend] = WriterCore(
            get_striping_of_record(record), record.fragments[-1].bookies, changes_max=config.ensemble_changes_max
        )
        self.adds = self._core.adds  # must only be read
        self._sender = AddSender(record, bookies, config, self._acked, self._learn, self._bookie_failed)
        self._bytes = 0
        self.listener: AppendListener | None = None
        self.tell_first_copies: Callable[[int], None] | None = None  # up to which entry; must not raise
        self._first_copies = -1
        self.on_closed: Callable[[int], None] | None = None
        self._finished = asyncio.Event()
        self._entries_max, self._bytes_max = config.pending_entries_max, config.pending_bytes_max
        self._unanswered_max = config.unanswered_bytes_max
        self._room: asyncio.Event | None = None  # a caller waits for it
        self._room_waiters = 0
        self._on_changed: list[Callable[[LedgerRecord], None]] = []
        self._tasks = Tasks()
        self._change_task: asyncio.Task[None] | None = None
        self._end_task: asyncio.Task[None] | None = None
        self._end_error: MagnetarError | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._watched = (-1, 0)  # first pending entry at the last check, and for how many checks

    @property
    def ledger_id(self) -> int:
        return self._record.ledger_id

    @property
    def record(self) -> LedgerRecord:
        """Returns the ledger's record with the ensembles that are stored in the metadata, but without the ledger's
        end."""
        return self._record

    @property
    def last_confirmed(self) -> int:
        """The id of the last entry that is confirmed, with every entry before it; -1: none."""
        return self.adds.lac

    @property
    def pending_entries(self) -> int:
        """The number of entries that were appended and are not confirmed yet."""
        return len(self.adds)

    @property
    def pending_bytes(self) -> int:
        """The size in bytes of the entries that were appended and are not confirmed yet."""
        return self._bytes

    @property
    def is_writable(self) -> bool:
        """Returns whether the writer accepts appends. It does not while the ledger is being closed, and after a failure
        that ended the writer (state POISONED): then every append fails at once."""
        return self._core.state is WriterState.OPEN or self._core.accepts_appends

    @property
    def has_room(self) -> bool:
        """Returns whether the next append is within the bounds of this ledger and within the memory bound of all
        ledgers together."""
        adds = self.adds
        return (
            self._bookies.memory.has_room
            and self._bytes < self._bytes_max
            and self._sender.unanswered_bytes < self._unanswered_max
            and adds.lap - adds.lac < self._entries_max
        )

    @property
    def is_short_of_bookies(self) -> bool:
        """Returns whether a bookie of the ensemble has failed and is not replaced, or not yet. New entries are then
        sent to fewer bookies."""
        return bool(self.adds.failed)

    @property
    def state(self) -> WriterState:
        return self._core.state

    def append(self, *frames: Buffer, tail: PayloadTailChecksum | None = None) -> asyncio.Future[int]:
        """Appends the frames, one after the other, as one entry. Returns a future of the entry's id. Raises no error
        itself: the future fails with MessageTooLarge, BackPressure or LedgerClosed if the entry is certainly not
        stored, with LedgerFenced or OutcomeUnknown if that is unknown. `tail`: the known checksum of the end of a
        payload that is in one frame."""
        future: asyncio.Future[int] = self._loop.create_future()
        try:
            self.append_for_listener(PendingAppendWithFuture(frames, sum(map(len, frames)), future, tail))
        except MagnetarError as error:
            future.set_exception(error)
        return future

    def append_for_listener(self, payload: PendingAppend) -> None:
        """Appends the entry `payload` like `append`, but returns no future: the `listener`, which must be set, is told
        the outcome. Raises MessageTooLarge, LedgerClosed, or BackPressure; then nothing was appended. BackPressure: the
        bounds of this ledger or the memory bound of all ledgers leave no room. The memory bound does not apply to
        `append`."""
        assert self.listener is not None or isinstance(payload, PendingAppendWithFuture), (
            "the listener is told the outcome"
        )
        memory, adds, size = self._bookies.memory, self.adds, payload.size
        if memory.held >= memory.limit and not isinstance(payload, PendingAppendWithFuture):
            raise BackPressure(f"{memory.held} bytes of all ledgers are not answered; wait for `wait_room`")
        if size > ENTRY_BYTES_MAX:
            raise MessageTooLarge(f"an entry of {size} bytes", size=size, limit=ENTRY_BYTES_MAX)
        if self._core.state is not WriterState.OPEN and not self._core.accepts_appends:
            raise self._closed_error()
        if (
            self._bytes >= self._bytes_max
            or self._sender.unanswered_bytes >= self._unanswered_max
            or adds.lap - adds.lac >= self._entries_max
        ):
            raise BackPressure(
                f"ledger {self.ledger_id}: {self.pending_entries} entries of {self._bytes} bytes are not confirmed, "
                f"{self._sender.unanswered_bytes} bytes not answered; wait for `wait_room`", ledger=self.ledger_id,
            )  # fmt: skip
        self._bytes += size
        adds.add(payload, size)
        self._sender.send(payload, adds.lac)
        if self._watchdog is None:
            self._watch()

    def late_bookie_answers(self) -> Sequence[LateBookieAnswer]:
        """Returns the latest answers of bookies that took longer than the setting `late_s` (in seconds), at most 64;
        none if `late_s` is 0."""
        return self._sender.late or ()

    async def wait_room(self) -> None:
        """Waits until there is room for an append (`has_room`), or until the writer accepts no appends any more; then
        the next append fails."""
        self._room_waiters += 1
        try:
            while self.is_writable and not self.has_room:
                room = self._room = self._room or asyncio.Event()
                self._wake_if_room()
                await room.wait()
        finally:
            self._room_waiters -= 1
            if not self._room_waiters:
                self._room = None
                self._bookies.memory.remove_waiter(self._wake_if_room)

    def _wake_if_room(self) -> None:
        """Wakes the callers of `wait_room` if there is room. Else, if the memory of all ledgers has no room, registers
        this function there: the answers to this ledger's entries may all have come when that memory is released."""
        if self._room is None:
            return
        if self.has_room or not self.is_writable:
            self._room.set()
            self._room = None
        elif not self._bookies.memory.has_room:
            self._bookies.memory.add_waiter(self._wake_if_room)

    def add_ensemble_change_listener(self, tell: Callable[[LedgerRecord], None]) -> None:
        """Registers the function `tell`, which must not raise. It is called with the ledger's new record after each
        change of the ensemble, before any entry is confirmed by the new ensemble."""
        self._on_changed.append(tell)

    async def close(self) -> LedgerEnd:
        """Waits for the pending entries, closes the ledger, and returns its end. May be called again. Takes at most
        about `add_timeout_s` + `close_timeout_s`.

        Raises LedgerFenced if another client is recovering the ledger or the ledger was deleted (the caller may call
        `close` again later), OutcomeUnknown if the metadata did not answer, a bookie refused the ledger's key, or a
        pending entry was undecided for `quorum_timeout_s`. If another client has closed the ledger, returns the end
        that is stored."""
        self._run(self._core.close())
        await self._finished.wait()
        if self._core.end is None:
            assert self._core.why is not None, "a writer that did not end says why"
            raise _error(self._core.why, self.ledger_id) from self._end_error
        return LedgerEnd(self._core.end.last_entry, self._core.end.length)

    async def abandon(self) -> None:
        """Stops the writer at once and sends nothing more. Pending entries fail with OutcomeUnknown. The ledger stays
        OPEN until another client recovers it. Does nothing if the writer has ended."""
        running = [task for task in (self._change_task, self._end_task) if task is not None and not task.done()]
        for task in running:
            task.cancel()
        try:
            await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:  # `append`, `wait_room` and `close` wait for the outcome
            self._abandon()
            raise
        self._abandon()

    def _abandon(self) -> None:
        self._run(self._core.abandon())
        self._stop_watching()

    async def wait_finished(self) -> None:
        """Waits until the writer has ended for any reason: the ledger is closed, or a failure has ended the writer. The
        caller must then call `close`."""
        await self._finished.wait()

    # ------------------------------------------------------------------------------ effects
    def _acked(self, adds: Sequence[PendingAppend], place: tuple[int, str]) -> None:
        """Handles an answer: the bookie in this (slot, bookie) has stored these entries. Confirms the entries that have
        their ack quorum now."""
        if self._core.state is not _OPEN:
            self._learn(AddsAcked([add.entry for add in adds], *place))
            return
        stored = -1
        for add in self.adds.record_acks(adds, place[0], place[1]):
            self._bytes -= add.size
            if not isinstance(add, PendingAppendWithFuture):
                stored = add.entry
            elif not add.future.done():  # else its owner cancelled it
                add.future.set_result(add.entry)
        if self._room is not None:
            self._wake_if_room()
        if stored >= 0 and self.listener is not None:
            self.listener.on_appended(self, stored)
        if self.tell_first_copies is not None:
            before, self._first_copies = self._first_copies, self.adds.find_first_copies(self._first_copies)
            if self._first_copies > max(before, self.adds.lac):
                self.tell_first_copies(self._first_copies)

    def _run(self, effects: Iterable[WriterEffect[PendingAppend]]) -> None:
        stored, failed = -1, False  # of what was pushed
        for effect in effects:
            if isinstance(effect, ConfirmEntry):
                future, entry = self._take_future(effect.add), effect.add.entry
                if future is not None:
                    future.set_result(entry)
                else:
                    stored = entry
            elif isinstance(effect, FailEntry):
                future = self._take_future(effect.add)
                if future is not None:
                    future.set_exception(_error(effect.why, self.ledger_id, effect.add.entry))
                else:
                    failed = True
            elif isinstance(effect, SendAdd):
                self._sender.send_to_replacement(effect)
            elif isinstance(effect, ChangeEnsemble):
                self._change_task = self._tasks.spawn(self._change_ensemble(effect), "ledger-change")
            else:
                self._finished.clear()
                self._end_task = self._tasks.spawn(self._store_end(effect), "ledger-end")
        if self._core.state in (WriterState.CLOSED, WriterState.POISONED):
            self._sender.close()
            self._stop_watching()
            if self._change_task is not None and self._change_task is not asyncio.current_task():
                self._change_task.cancel()  # its outcome is not needed any more; it may be written or not
            self._finished.set()
            if self.on_closed is not None and self._core.state is WriterState.CLOSED:
                self.on_closed(self.ledger_id)
        if self._room is not None:
            self._wake_if_room()
        if self.listener is not None:
            if stored >= 0:
                self.listener.on_appended(self, stored)
            if failed:
                self.listener.on_append_failed(self)

    def _take_future(self, add: PendingAppend) -> asyncio.Future[int] | None:
        """Returns the future that gets the outcome of the entry; None if the listener is told the outcome. Must be
        called once for each entry, because it also counts the entry as done."""
        self._bytes -= add.size
        if not isinstance(add, PendingAppendWithFuture):
            return None
        future = add.future
        if future.done():  # its owner cancelled it: the outcome is not read
            future = self._loop.create_future()
            future.add_done_callback(asyncio.Future.exception)
        return future

    def _learn(self, fact: WriterFact) -> None:
        effects = self._core.receive(fact)
        if effects or self._room is not None or self._core.state is WriterState.POISONED:
            self._run(effects)  # a core that is poisoned while idle has no effects

    def _bookie_failed(self, bookie: str, why: object) -> None:
        self._bookies.record_failure(bookie)
        if self._core.state is WriterState.OPEN:
            _LOG.warning("ledger %d: bookie %s failed: %s", self.ledger_id, bookie, why)

    # ------------------------------------------------------------------------------ the ensemble
    async def _change_ensemble(self, change: ChangeEnsemble) -> None:
        """Replaces failed bookies of the ensemble in the metadata, and gives the outcome to the core as a fact."""
        fact: ChangeFact = EnsembleChangeUnknown()
        try:
            others = await self._others(change)
            fact = await self._commit(change, others) if others else NoReplacementFound()
        except MagnetarError as error:
            _LOG.warning("ledger %d: it is unknown whether its ensemble has changed: %s", self.ledger_id, error)
        except Exception:  # a bug, or a damaged record: the handle must not stay frozen for ever
            _LOG.exception("ledger %d: its ensemble cannot be changed", self.ledger_id)
        self._learn(fact)

    async def _commit(self, change: ChangeEnsemble, others: dict[int, str]) -> ChangeFact:
        decide = partial(decide_ensemble_change, first_entry=change.first_entry, failed=change.failed, others=others)
        outcome = await store_record_transition(
            self._metadata, self.ledger_id, decide, timeout_s=self._config.close_timeout_s
        )
        if isinstance(outcome, LedgerTransitionRefused):
            _LOG.warning("ledger %d: its ensemble cannot change: %s", self.ledger_id, outcome.reason.value)
            return EnsembleChangeRefused()
        self._record = outcome.record
        for tell in self._on_changed:
            tell(outcome.record)
        last = outcome.record.fragments[-1]
        bookies = ", ".join(last.bookies)
        _LOG.warning("ledger %d: entries from %d on go to %s", self.ledger_id, last.first_entry, bookies)
        return EnsembleChanged(last.bookies)

    async def _others(self, change: ChangeEnsemble) -> dict[int, str]:
        """Chooses a replacement for each failed slot. Returns slot → bookie; for fewer slots, or none, if there are too
        few healthy bookies."""
        if is_answered_from_memory(self._record):
            _LOG.warning("ledger %d: no bookie is replaced in a ledger that is answered from memory", self.ledger_id)
            return {}
        others = self._choose(change)
        if len(others) < len(change.failed):
            try:
                async with asyncio.timeout(self._config.add_timeout_s):
                    await self._bookies.refresh_bookie_list()
            except (TimeoutError, MagnetarError) as error:
                _LOG.warning("ledger %d: the bookies cannot be listed: %s", self.ledger_id, error)
            others = self._choose(change)
        if not others:
            _LOG.warning("ledger %d ends: no other bookie can replace the one that failed", self.ledger_id)
        return others

    def _choose(self, change: ChangeEnsemble) -> dict[int, str]:
        ensemble = self._record.fragments[-1].bookies
        return self._bookies.choose_replacements(
            ensemble, [slot for slot, _ in change.failed], self._record.write_quorum,
            self.ledger_id, decode_bookie_groups(self._record.properties),
        )  # fmt: skip

    # ------------------------------------------------------------------------------ the end
    async def _store_end(self, close: CloseLedger) -> None:
        """Stores the ledger's end in the metadata, or reads the end that is stored already, and gives the outcome to
        the core as a fact."""
        fact: WriterFact = LedgerCloseUnknown()
        try:
            if close.last_entry >= 0 and is_answered_from_memory(self._record):
                await self._wait_synced()
            outcome = await store_record_transition(
                self._metadata, self.ledger_id,
                partial(decide_close_by_writer, last_entry=close.last_entry, length=close.length),
                timeout_s=self._config.close_timeout_s,
            )  # fmt: skip
        except MagnetarError as error:
            _LOG.warning("ledger %d: it is unknown whether its end was stored: %s", self.ledger_id, error)
            self._end_error = error
        except Exception as error:  # a bug, or a damaged record: `close` must still return
            _LOG.exception("ledger %d: its end cannot be stored", self.ledger_id)
            self._end_error = InternalError(f"ledger {self.ledger_id}: its end cannot be stored: {error!r}")
        else:
            if isinstance(outcome, LedgerTransitionRefused):
                fact = LedgerCloseRefused()
            else:
                fact = LedgerEnded(outcome.record.last_entry, outcome.record.length)
        try:
            self._run(self._core.receive(fact))
        finally:
            self._finished.set()

    async def _wait_synced(self) -> None:
        """Fences the ledger, and waits until one of its bookies has answered, and so has synced what it has of it; at
        most `add_timeout_s`."""
        flags = BookieRequestFlags.FENCE
        head = BookieRequestHead(BookieOperation.READ_LAC, flags, self.ledger_id, -1, 0, 0, self._record.key).encode()
        asked = {
            asyncio.ensure_future(self._bookies.ask(bookie, head, timeout_s=self._config.add_timeout_s))
            for bookie in self.adds.ensemble
        }
        waiting = asked
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for answer in [each.result() for each in done]:
                    if answer is not None and answer[0].status is Status.OK:
                        return
        finally:
            for each in waiting:
                each.cancel()
        _LOG.error("ledger %d, which is answered from memory, ends at %d, and no bookie has said that it is synced: if "
                   "they lose it, entries are lost", self.ledger_id, self.adds.lac)  # fmt: skip

    # ------------------------------------------------------------------------------ time
    def _watch(self) -> None:
        """Checks at intervals whether the oldest pending entry is still the same. If it is for longer than
        `quorum_timeout_s`, the writer ends (state POISONED). One timer serves all entries."""
        self._watchdog = None
        if not len(self.adds):
            self._watched = (-1, 0)
            self._send_lac()
            return
        first, looks = self.adds.lac + 1, self._watched[1] + 1
        self._watched = (first, looks if first == self._watched[0] else 0)
        if self._watched[1] >= _WATCH_TICKS:
            self._run(self._core.receive(QuorumTimedOut(first)))
            return
        self._watchdog = self._loop.call_later(self._config.quorum_timeout_s / _WATCH_TICKS, self._watch)

    def _stop_watching(self) -> None:
        """Cancels the timer of `_watch`, which would keep this object in memory."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _send_lac(self) -> None:
        """Sends the last-add-confirmed (LAC) to the bookies by WRITE_LAC. They know only the LAC in the header of the
        last entry, which is smaller, and readers in other processes could not read the last entry."""
        if self._core.state is WriterState.OPEN:
            head = BookieRequestHead(
                BookieOperation.WRITE_LAC,
                BookieRequestFlags.NONE,
                self.ledger_id,
                self.adds.lac,
                0,
                0,
                self._record.key,
            )
            for bookie in self.adds.ensemble:
                told = self._bookies.request(bookie, head.encode(), timeout_s=self._config.add_timeout_s)
                told.add_done_callback(asyncio.Future.exception)  # a lower bound: a bookie that lacks it gets it later

    def _closed_error(self) -> MagnetarError:
        why = self._core.why
        reason = why.value if why is not None else "it is closed or about to be"
        return LedgerClosed(f"ledger {self.ledger_id} takes no more entries: {reason}", ledger=self.ledger_id)


def _error(why: EntryOutcome, ledger_id: int, entry: int = -1) -> MagnetarError:
    where = f"ledger {ledger_id}" + (f", entry {entry}" if entry >= 0 else "")
    cls: type[MagnetarError] = {
        EntryOutcome.NOT_STORED: LedgerClosed,
        EntryOutcome.FENCED: LedgerFenced,
        EntryOutcome.UNAUTHORIZED: OutcomeUnknown,  # the other replicas may have it
        EntryOutcome.UNKNOWN: OutcomeUnknown,
    }[why]
    return cls(f"{where}: {why.value}", ledger=ledger_id, entry=entry)
