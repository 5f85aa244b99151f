"""Defects of the ledger library: patches of its cores and drivers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec

from magnetar.bookie.maintenance import repair_core as copies
from magnetar.ledger import handle, sender
from magnetar.ledger import metadata_core as metadata
from magnetar.ledger import recovery as recovery_driver
from magnetar.ledger.peer_format import BookieOperation, BookieRequestFlags, BookieRequestHead
from magnetar.ledger.reader_core import ReadableEntryBound
from magnetar.ledger.recovery_core import EntryVerdict, EntryVotes, LedgerRecovery
from magnetar.ledger.writer_core import (
    AddAcked,
    CloseLedger,
    NoReplacementFound,
    PendingAdd,
    PendingAdds,
    SendAdd,
    Striping,
    WriterCore,
    WriterState,
)
from magnetar.metadata.records import CLOSED, IN_RECOVERY

Stack = contextlib.ExitStack
Plant = Callable[[Stack], None]
"""Breaks something until the stack is closed."""


def put(stack: Stack, owner: Any, name: str, new: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, new))


# ------------------------------------------------------------------------------------ recovery
def reads_without_fence(stack: Stack) -> None:
    """M01: a recovery's reads do not fence."""
    honest = recovery_driver._Attempt._head

    def head(self: Any, op: BookieOperation, entry: int) -> bytes:
        if op is not BookieOperation.READ:
            return honest(self, op, entry)
        record = self._record
        return BookieRequestHead(
            op, BookieRequestFlags.NONE, record.ledger_id, entry, 1, (1 << 32) - 1, record.key
        ).encode()

    put(stack, recovery_driver._Attempt, "_head", head)


def lower_bound_forgets_fragments(stack: Stack) -> None:
    """M02: recovery begins at what bookies report, be it before the last fragment."""
    put(stack, LedgerRecovery, "_lower_bound", lambda self: max([*self._lacs, -1]))


def ensembles_persisted_early(stack: Stack) -> None:
    """M03: an ensemble that recovery changes is in the metadata at once."""
    from tests.simulation.protocol.run import current

    honest = LedgerRecovery._remember

    def remember(self: LedgerRecovery, ensemble: tuple[str, ...]) -> None:
        honest(self, ensemble)
        register, ledger = current().register, self.snapshot.ledger_id
        record = register.records.get(ledger)
        if record is not None and record.state == IN_RECOVERY:
            changed = msgspec.structs.replace(record, fragments=tuple(self.fragments))
            register.write(ledger, changed, register.versions[ledger], "recovery")

    put(stack, LedgerRecovery, "_remember", remember)
    # … and so the record that is closed in the end need not have the fragments that recovery began with.
    close = metadata.decide_close_by_recovery

    def decide_close_by_recovery(current: Any, snapshot: Any, fragments: Any, last_entry: int, length: int) -> Any:
        if current is not None and current.state == IN_RECOVERY:
            current = msgspec.structs.replace(current, fragments=tuple(snapshot))
        return close(current, snapshot, fragments, last_entry, length)

    put(stack, metadata, "decide_close_by_recovery", decide_close_by_recovery)


def reads_from_changed_ensemble(stack: Stack) -> None:
    """M04: recovery asks the bookies that it put in itself."""
    honest = LedgerRecovery._replica

    def changed(self: LedgerRecovery, entry: int, slot: int) -> str:
        return self._adds.ensemble[slot] if entry >= self._last.first_entry else honest(self, entry, slot)

    put(stack, LedgerRecovery, "_replica", changed)


def write_back_tells_its_own_lac(stack: Stack) -> None:
    """M33: what a recovery writes back carries its own progress as LAC, before it has closed the ledger (ours)."""
    put(stack, LedgerRecovery, "_sends", lambda self, sends: list(sends))


def one_miss_too_few(stack: Stack) -> None:
    """M05: the end on Qw-Qa misses."""
    put(
        stack, Striping, "misses_proving_absence",
        property(lambda self: max(1, self.write_quorum - self.ack_quorum)))


def silence_is_a_vote(stack: Stack) -> None:
    """M05b: errors and silence count as misses."""
    honest = EntryVotes.judge_unconfirmed_entry

    def careless(self: EntryVotes, misses_for_negative: int, **more: Any) -> Any:
        if self.found is None and len(self.answered) >= misses_for_negative:
            self.missing |= self.answered
        return honest(self, misses_for_negative, **more)

    put(stack, EntryVotes, "judge_unconfirmed_entry", careless)


def coverage_over_the_ensemble(stack: Stack) -> None:
    """M19: fenced enough when fewer than Qa … of the whole ensemble are unknown, wrongly counted by one."""
    put(stack, Striping, "is_fence_complete", lambda self, unknown: len(unknown) <= self.ack_quorum)


def coverage_needs_everybody(stack: Stack) -> None:
    """M19b: every bookie must answer to the fence."""
    put(stack, Striping, "is_fence_complete", lambda self, unknown: not unknown)


def last_fragment_of_an_open_ledger(stack: Stack) -> None:
    """M21: re-replication changes the last fragment of a ledger that is not closed."""
    replace, final = metadata.decide_bookie_replacement, copies.list_final_fragments

    def closed(record: Any) -> Any:
        end = max(record.last_entry, record.fragments[-1].first_entry)
        return msgspec.structs.replace(record, state=CLOSED, last_entry=end)

    def decide_bookie_replacement(current: Any, first_entry: int, old: str, new: str) -> Any:
        if current is None or current.state == CLOSED:
            return replace(current, first_entry, old, new)
        answer = replace(closed(current), first_entry, old, new)
        if not isinstance(answer, metadata.RecordToStore):
            return answer
        return metadata.RecordToStore(msgspec.structs.replace(current, fragments=answer.record.fragments))

    put(stack, metadata, "decide_bookie_replacement", decide_bookie_replacement)
    put(
        stack, copies, "list_final_fragments",
        lambda record: final(closed(record) if record.state != CLOSED else record))


def write_back_counts_when_sent(stack: Stack) -> None:
    """M45: what a recovery writes back counts when it is sent, and the end is stored before it (ours; the driver's)."""
    honest = recovery_driver._Attempt._write_back
    sent: dict[asyncio.Task[Any], None] = {}

    async def write_back(self: Any, effect: Any) -> Any:
        task = asyncio.get_running_loop().create_task(honest(self, effect))
        sent[task] = None
        task.add_done_callback(sent.pop)
        return AddAcked(effect.add.payload.entry, effect.slot, effect.bookie)

    put(stack, recovery_driver._Attempt, "_write_back", write_back)


# ------------------------------------------------------------------------------------ the writer
def acks_during_a_change(stack: Stack) -> None:
    """M10: acks confirm while the ensemble, or the end, is on its way to the metadata."""
    honest = PendingAdds.take_confirmed

    def thawed(self: PendingAdds[Any]) -> list[PendingAdd]:
        self.frozen, frozen = False, self.frozen
        try:
            return honest(self)
        finally:
            self.frozen = frozen

    put(stack, PendingAdds, "take_confirmed", thawed)


def drain_inside_the_loop(stack: Stack) -> None:
    """M11: each entry's acks are taken back, and what has its quorum then is confirmed before the next is examined."""

    def replace(self: PendingAdds[Any], ensemble: Any) -> list[SendAdd[Any]]:
        self.failed = {slot for slot in self.failed if ensemble[slot] == self.ensemble[slot]}
        self.ensemble = tuple(ensemble)
        sends = []
        early = self.__dict__.setdefault("early", [])
        frozen, self.frozen = self.frozen, False
        for add in list(self._adds.values()):
            for slot in self.striping.slots_of_entry(add.entry):
                if add.sent.get(slot) != ensemble[slot] and slot not in self.failed:
                    add.acks.discard(slot)
                    add.sent[slot] = ensemble[slot]
                    sends.append(SendAdd(add, slot, ensemble[slot], self.lac))
            early += honest(self)
        self.frozen = frozen
        return [send for send in sends if send.add.entry > self.lac]

    honest = PendingAdds.take_confirmed

    def drain(self: PendingAdds[Any]) -> list[PendingAdd]:
        early = self.__dict__.pop("early", [])
        return [*early, *honest(self)]

    put(stack, PendingAdds, "replace_ensemble", replace)
    put(stack, PendingAdds, "take_confirmed", drain)


def change_in_memory_only(stack: Stack) -> None:
    """M12: the new ensemble is used, and the metadata does not have it."""
    from magnetar.ledger.metadata_core import RecordAlreadyStored, RecordToStore

    honest = metadata.decide_ensemble_change

    def local(current: Any, first_entry: int, failed: Any, others: Any) -> Any:
        answer = honest(current, first_entry, failed, others)
        return RecordAlreadyStored(answer.record) if isinstance(answer, RecordToStore) else answer

    put(stack, metadata, "decide_ensemble_change", local)


def change_of_old_and_new(stack: Stack) -> None:
    """M13: what is sent again is found by comparing ensembles, not with whom each entry was sent to."""

    def replace(self: PendingAdds[Any], ensemble: Any) -> list[SendAdd[Any]]:
        self.failed = {slot for slot in self.failed if ensemble[slot] == self.ensemble[slot]}
        old, self.ensemble = self.ensemble, tuple(ensemble)
        sends = []
        for add in self._adds.values():
            for slot in self.striping.slots_of_entry(add.entry):
                if add.sent.get(slot) == old[slot] != ensemble[slot]:  # what was never sent there is forgotten
                    add.acks.discard(slot)
                    add.sent[slot] = ensemble[slot]
                    sends.append(SendAdd(add, slot, ensemble[slot], self.lac))
        return sends

    put(stack, PendingAdds, "replace_ensemble", replace)


def unknown_change_is_none(stack: Stack) -> None:
    """M44: an ensemble change of unknown outcome is taken for one that was not written (ours; in the driver alone)."""
    put(stack, handle, "EnsembleChangeUnknown", NoReplacementFound)


def late_answer_counts_in_the_next_ledger(stack: Stack) -> None:
    """M44b: a bookie's answer counts for an entry that went on to another ledger (ours; in the driver alone)."""
    honest = handle.LedgerWriter._acked

    def acked(self: handle.LedgerWriter, adds: Any, place: Any) -> None:
        self.adds.record_acks(adds, *place)
        honest(self, adds, place)

    put(stack, handle.LedgerWriter, "_acked", acked)


def leaves_after_its_ledger_ended(stack: Stack) -> None:
    """M44c: what has not left when its ledger ended leaves, with the header of its next ledger (ours)."""
    honest = sender.AddSender._flush

    def flush(self: sender.AddSender) -> None:
        closed, self._closed = self._closed, False
        honest(self)
        self._closed = closed

    put(stack, sender.AddSender, "_flush", flush)


def close_at_lap(stack: Stack) -> None:
    """M18: the ledger is closed where the last entry was sent."""

    def closing(self: WriterCore[Any]) -> list[CloseLedger]:
        self.state = WriterState.CLOSING
        self.adds.frozen = True
        return [CloseLedger(self.adds.lap, self.adds.length)]

    put(stack, WriterCore, "_closing", closing)


def acks_out_of_order(stack: Stack) -> None:
    """M18b: whatever has its quorum is confirmed."""

    def eager(self: PendingAdds[Any]) -> list[PendingAdd]:
        done = [] if self.frozen else [a for a in self._adds.values() if len(a.acks) >= self.striping.ack_quorum]
        for add in done:
            del self._adds[add.entry]
            self.lac, self.length_confirmed = max(self.lac, add.entry), add.length
        return done

    put(stack, PendingAdds, "take_confirmed", eager)


# ------------------------------------------------------------------------------------ the reader
def lac_is_the_end(stack: Stack) -> None:
    """M22: the LAC of an open ledger is taken for its end."""
    honest = ReadableEntryBound.advance_lac

    def final(self: ReadableEntryBound, lac: int) -> None:
        honest(self, lac)
        self.closed = True

    put(stack, ReadableEntryBound, "advance_lac", final)


# ------------------------------------------------------------------------------------ answered from memory
def one_bookie_that_lost_it_ends_the_ledger(stack: Stack) -> None:
    """M99t: a miss of a bookie that may have lost what it answered proves that an entry was never confirmed."""
    honest = EntryVotes.judge_unconfirmed_entry

    def hasty(self: EntryVotes, misses_for_negative: int, *, waits_for_all: bool = False) -> EntryVerdict:
        return honest(self, misses_for_negative)

    put(stack, EntryVotes, "judge_unconfirmed_entry", hasty)


def end_before_any_sync(stack: Stack) -> None:
    """M99u: the end of a ledger that is answered from memory is stored before any bookie has synced it."""

    async def at_once(self: handle.LedgerWriter) -> None:
        await asyncio.sleep(0)

    put(stack, handle.LedgerWriter, "_wait_synced", at_once)


# ------------------------------------------------------------------------------------------ the first copy
def first_copies_out_of_order(stack: Stack) -> None:
    """M99w: an entry is told to have a first copy although one before it has none."""

    def find(self: PendingAdds[Any], after: int) -> int:
        return max([after, self.lac, *(entry for entry, add in self._adds.items() if add.acks)])

    put(stack, PendingAdds, "find_first_copies", find)


def first_copy_confirms(stack: Stack) -> None:
    """M99x: an entry whose first copy is told counts as confirmed: readers see it."""
    honest = PendingAdds.find_first_copies

    def find(self: PendingAdds[Any], after: int) -> int:
        self.lac = max(self.lac, last := honest(self, after))
        return last

    put(stack, PendingAdds, "find_first_copies", find)
