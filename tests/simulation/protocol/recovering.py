"""The driver of a recovery core: as recovery.py. It believes only OK with an undamaged entry, and a definite miss.

Whether its requests carry FENCE is asked of the real driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from magnetar.ledger import metadata_core as m
from magnetar.ledger import recovery as real
from magnetar.ledger import recovery_core as r
from magnetar.ledger.peer_format import BookieOperation, BookieRequestFlags, Status, decode_request
from magnetar.ledger.reader_core import StoredCopy
from magnetar.ledger.writer_core import AddAcked, AddFailed, PendingAddWithPayload, SendAdd
from magnetar.metadata.records import CLOSED, LedgerRecord

from .bookie import Bookie
from .network import Client
from .register import Change, Outcome

if TYPE_CHECKING:
    from .run import Simulation

ADD_TIMEOUT_S = 0.25
READ_TIMEOUT_S = 0.25
CERTAIN = (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)


class Recoverer:
    """One attempt to end a ledger; `done(closed record or None)` once, unless its process dies before."""

    def __init__(self, simulation: Simulation, client: Client, ledger: int, done: Any) -> None:
        self.simulation = simulation
        self.client = client
        self.ledger = ledger
        self.done = done
        self.core: r.LedgerRecovery | None = None
        self._misses: dict[int, dict[str, int]] = {}
        Change(simulation, client, ledger, m.decide_recovery_start, self._started)

    def _started(self, outcome: Outcome) -> None:
        if not isinstance(outcome, LedgerRecord):
            self.done(None if outcome is None else outcome)
        elif outcome.state == CLOSED:
            self.simulation.judge.ended(self.ledger, outcome.last_entry, outcome.length)
            self.done(outcome)
        else:
            self.simulation.story(f"{self.client.name} recovers ledger {self.ledger}")
            self.core = r.LedgerRecovery(outcome, self._choose, batch=self.simulation.options.batch)
            self._fence_reads = _fences(outcome, BookieOperation.READ)
            self._fence_lacs = _fences(outcome, BookieOperation.READ_LAC)
            self._run(self.core.start())

    def _choose(self, exclude: Sequence[str]) -> str | None:
        found = self.simulation.network.choose(1, tuple(exclude))
        return found[0] if found else None

    def _learn(self, fact: r.RecoveryFact) -> None:
        assert self.core is not None
        before = self.core.state
        effects = self.core.receive(fact)
        if before is r.RecoveryState.FENCING and self.core.state is r.RecoveryState.READING:
            self.simulation.judge.covered(self.core.snapshot)
        if effects:
            self._run(effects)

    def _run(self, effects: Sequence[r.RecoveryEffect]) -> None:
        assert self.core is not None
        self.core.check()
        for effect in effects:
            if isinstance(effect, r.SendFence):
                self._fence(effect)
            elif isinstance(effect, r.SendRead):
                self._read(effect)
            elif isinstance(effect, SendAdd):
                self._write_back(effect)
            elif isinstance(effect, r.CloseRecoveredLedger):
                self._close(effect)
            elif isinstance(effect, r.FinishRecovery):
                self.simulation.judge.ended(self.ledger, effect.record.last_entry, effect.record.length)
                self.done(effect.record)
            else:
                self.simulation.story(f"{self.client.name} gives ledger {self.ledger} up: {effect.why.name}")
                self.done(None)

    def _fence(self, send: r.SendFence) -> None:
        def answered(found: tuple[Status, int]) -> None:
            status, lac = found
            if status is Status.OK or status in CERTAIN:
                self._learn(r.LedgerFencedAtBookie(send.slot, lac if status is Status.OK else -1))
            else:
                self._learn(r.FenceFailed(send.slot))

        self.simulation.network.request(
            self.client, send.bookie, lambda bookie, reply: bookie.read_lac(self.ledger, self._fence_lacs, reply),
            answered, lambda: self._learn(r.FenceFailed(send.slot)), READ_TIMEOUT_S,
        )  # fmt: skip

    def _read(self, send: r.SendRead) -> None:
        entry, slot = send.entry, send.slot

        def answered(found: tuple[Status, int, list[StoredCopy | None]]) -> None:
            status, _, entries = found
            if status is Status.OK and entries[0] is not None:
                self._learn(r.EntryFound(entry, slot, entries[0]))
            elif status in CERTAIN:
                self._misses.setdefault(entry, {})[send.bookie] = 1
                self._learn(r.EntryMissing(entry, slot))
            else:
                self._learn(r.ReadFailed(entry, slot))

        def serve(bookie: Bookie, reply: Any) -> None:
            if self.simulation.faults.strikes("read-error", self.simulation.scheduler.now, bookie.name):
                reply((Status.UNKNOWN, -1, []))
            else:
                bookie.read(self.ledger, entry, 1, self._fence_reads, reply)

        self.simulation.network.request(
            self.client, send.bookie, serve, answered, lambda: self._learn(r.ReadFailed(entry, slot)), READ_TIMEOUT_S
        )

    def _write_back(self, send: SendAdd[PendingAddWithPayload[StoredCopy]]) -> None:
        found = send.add.payload
        stored = StoredCopy(found.entry, send.lac, found.length, found.payload)
        place = found.entry, send.slot, send.bookie

        def answered(statuses: Sequence[Status]) -> None:
            self._learn(AddAcked(*place) if statuses[0] is Status.OK else AddFailed(*place))

        self.simulation.network.request(
            self.client, send.bookie, lambda bookie, reply: bookie.add(self.ledger, (stored,), True, reply),
            answered, lambda: self._learn(AddFailed(*place)), ADD_TIMEOUT_S,
        )  # fmt: skip

    def _close(self, effect: r.CloseRecoveredLedger) -> None:
        assert self.core is not None
        self.simulation.story(f"{self.client.name} ends ledger {self.ledger} at {effect.last_entry}")
        self.simulation.judge.recovered(self.core.snapshot, effect.last_entry, self._misses)
        decide = partial(m.decide_close_by_recovery, snapshot=self.core.snapshot.fragments, fragments=effect.fragments,
                         last_entry=effect.last_entry, length=effect.length)  # fmt: skip
        Change(self.simulation, self.client, self.ledger, decide, self._closed)

    def _closed(self, outcome: Outcome) -> None:
        if isinstance(outcome, LedgerRecord):
            self._learn(r.LedgerRecordClosed(outcome))
        elif outcome is not None:
            self._learn(r.RecoveredCloseRefused())
        else:
            self.done(None)


def _fences(record: LedgerRecord, op: BookieOperation) -> bool:
    """Whether the real driver asks with FENCE."""
    attempt = cast(Any, SimpleNamespace(_record=record))
    return bool(decode_request(real._Attempt._head(attempt, op, 0)).flags & BookieRequestFlags.FENCE)
