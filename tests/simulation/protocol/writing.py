"""The driver of a writer core: as handle.py and sender.py. The adds of a turn travel in one request per bookie.

FENCED is told as such and never a reason for another ensemble; BUSY is asked again; all else that is not OK is a bookie
that failed. What is certainly not stored is appended to the next ledger, as a topic does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from magnetar.ledger import metadata_core as m
from magnetar.ledger import writer_core as w
from magnetar.ledger.peer_format import Status
from magnetar.ledger.reader_core import StoredCopy
from magnetar.ledger.writer_core import AddFailed, AddsAcked, PendingAddWithPayload, SendAdd, Striping
from magnetar.metadata.records import LedgerRecord

from .bookie import Bookie
from .network import Client
from .register import Change, Outcome

_Add = PendingAddWithPayload[bytes]

if TYPE_CHECKING:
    from .run import Simulation

ADD_TIMEOUT_S = 0.25
QUORUM_TIMEOUT_S = 1.5
CHANGE_DEADLINE_S = 1.0
RETRY_S = 0.02
CHANGES_MAX = 10
LEDGERS_MAX = 4
PENDING_MAX = 60
KEY = b"k" * 20


class WriterClient:
    """Writes `entries` entries, to further ledgers when one ends early, as a topic does."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.client = Client(name)
        self.left = simulation.options.entries
        self.number = 0
        self.ledgers: list[int] = []
        self.core: w.WriterCore[_Add] | None = None
        self.ledger = -1
        self.stored: tuple[str, ...] = ()  # the ensemble that the metadata has, as far as we know
        self.over = False
        self.closes = 0
        self._again: list[bytes] = []
        self._ending = False
        self._watched = (-1, 0.0)

    # ------------------------------------------------------------------------------ ledgers
    def begin(self) -> None:
        simulation = self.simulation
        striping = Striping(*simulation.options.shape)
        ensemble = simulation.network.choose(striping.ensemble_size)
        if len(self.ledgers) >= LEDGERS_MAX or simulation.healed or ensemble is None:
            self.over = True
            return
        ledger = simulation.register.next_id
        simulation.register.next_id += 1
        mine = m.make_ledger_record(ledger, striping, ensemble, key=KEY, token=f"{self.client.name} {ledger}",
            created_ms=0,
                            properties={})  # fmt: skip
        self.core, self.closes = None, 0
        Change(
            simulation,
            self.client,
            ledger,
            partial(m.decide_ledger_creation, mine=mine),
            partial(self._created, ledger, striping),
        )

    def _created(self, ledger: int, striping: Striping, outcome: Outcome) -> None:
        if not isinstance(outcome, LedgerRecord):
            self.simulation.scheduler.after(RETRY_S, self.client.take, self.begin)
            return
        self.ledger = ledger
        self.ledgers.append(ledger)
        self.stored = outcome.fragments[-1].bookies
        self.core = w.WriterCore(striping, outcome.fragments[-1].bookies, changes_max=CHANGES_MAX)
        self._watched = (-1, 0.0)
        self._turn(self.core)
        self.simulation.scheduler.after(QUORUM_TIMEOUT_S / 4, self.client.take, self._watch, self.core)

    def _turn(self, core: w.WriterCore[_Add]) -> None:
        simulation, options = self.simulation, self.simulation.options
        if core is not self.core or self._ending:
            return
        if not core.accepts_appends or simulation.healed:
            self._close()
            return
        if not self.left and not self._again:
            self._close()
            return
        effects: list[w.WriterEffect[_Add]] = []
        for _ in range(simulation.rng.randint(1, options.burst)):
            if len(core.adds) >= PENDING_MAX or not (self.left or self._again):
                break
            if self._again:
                payload = self._again.pop(0)
            else:
                self.left -= 1
                self.number += 1
                payload = b"%s %d" % (self.client.name.encode(), self.number)
            simulation.judge.appended(self.ledger, payload)
            effects += core.append(PendingAddWithPayload(payload), len(payload))
        self._run(effects)
        simulation.scheduler.after(simulation.around(options.pause_s), self.client.take, self._turn, core)

    def _close(self) -> None:
        if self.core is not None and not self._ending:
            self._ending = True
            self._run(self.core.close())

    def finish(self) -> None:
        """When all is healed: ends the ledger, or learns how it ended."""
        self.over = True
        if self.core is not None and self.core.state is not w.WriterState.CLOSED and self.client.alive:
            self._ending = True
            self.closes = 0
            self._run(self.core.close())

    def _ended(self, core: w.WriterCore[_Add]) -> None:
        """CLOSED, or POISONED: then the end is asked for once more; else a recoverer finds it."""
        if core.state is w.WriterState.CLOSED and core.end is not None:
            self.simulation.judge.ended(self.ledger, *core.end)
        elif self.closes < 3:
            self.closes += 1
            self.simulation.scheduler.after(RETRY_S, self.client.take, self._ask_end, core)
            return
        elif self.simulation.healed:
            return
        self._ending = False
        if not self.over:
            self.begin()

    def _ask_end(self, core: w.WriterCore[_Add]) -> None:
        if core is self.core and core.state is w.WriterState.POISONED:
            self._run(core.close())

    def _watch(self, core: w.WriterCore[_Add]) -> None:
        if core is not self.core or core.state in (w.WriterState.CLOSED, w.WriterState.POISONED):
            return
        now, first = self.simulation.scheduler.now, core.adds.lac + 1
        if not len(core.adds):
            self._watched = (-1, now)
        elif first != self._watched[0]:
            self._watched = (first, now)
        elif now - self._watched[1] >= QUORUM_TIMEOUT_S:
            self._learn(core, w.QuorumTimedOut(first))
        self.simulation.scheduler.after(QUORUM_TIMEOUT_S / 4, self.client.take, self._watch, core)

    # ------------------------------------------------------------------------------ effects
    def _learn(self, core: w.WriterCore[_Add], fact: w.WriterFact) -> None:
        if core is not self.core:
            return
        before = core.state
        effects = core.receive(fact)
        if effects:
            self._run(effects)
        if core.state is not before and core.state in (w.WriterState.CLOSED, w.WriterState.POISONED):
            self._ended(core)

    def _run(self, effects: Sequence[w.WriterEffect[_Add]]) -> None:
        core, simulation = self.core, self.simulation
        assert core is not None
        core.check()
        sends: dict[tuple[int, str], list[SendAdd[_Add]]] = {}
        for effect in effects:
            if isinstance(effect, SendAdd):
                sends.setdefault((effect.slot, effect.bookie), []).append(effect)
            elif isinstance(effect, w.ConfirmEntry):
                if simulation.tracing:
                    simulation.story(f"{self.client.name} confirms entry {effect.add.entry} of ledger {self.ledger}")
                simulation.judge.confirmed(self.ledger, effect.add.entry, core)
            elif isinstance(effect, w.FailEntry):
                self._failed(effect)
            elif isinstance(effect, w.ChangeEnsemble):
                self._change(core, effect)
            else:
                self._end(core, effect)
        for (slot, name), adds in sends.items():
            self._send(core, slot, name, adds, 0)

    def _failed(self, effect: w.FailEntry[bytes]) -> None:
        entry, why = effect.add.entry, effect.why.name
        self.simulation.story(f"{self.client.name}: entry {entry} of ledger {self.ledger} ends {why}")
        self.simulation.judge.failed(self.ledger, entry, effect.why)
        if effect.why is w.EntryOutcome.NOT_STORED:
            self._again.append(effect.add.payload)

    def _send(self, core: w.WriterCore[_Add], slot: int, name: str, sends: list[SendAdd[_Add]], tries: int) -> None:
        if core is not self.core:
            return
        ledger = self.ledger
        entries = [StoredCopy(add.entry, lac, add.length, add.payload) for add, _, _, lac in sends]

        def answered(statuses: Sequence[Status]) -> None:
            self._answered(core, slot, name, sends, tries, statuses)

        def failed() -> None:
            for send in sends:
                self._learn(core, AddFailed(send.add.entry, slot, name))

        self.simulation.network.request(
            self.client, name, partial(self._serve_add, ledger, entries), answered, failed, ADD_TIMEOUT_S
        )

    def _serve_add(self, ledger: int, entries: list[StoredCopy], bookie: Bookie, reply: Any) -> None:
        faults, now = self.simulation.faults, self.simulation.scheduler.now
        if faults.strikes("busy", now, bookie.name):
            reply([Status.BUSY] * len(entries))
        else:
            bookie.add(ledger, entries, False, reply)

    def _answered(self, core: w.WriterCore[_Add], slot: int, name: str, sends: list[SendAdd[_Add]], tries: int,
                  statuses: Sequence[Status]) -> None:  # fmt: skip
        first = statuses[0]  # a bookie of ours takes a request as a whole
        if first is Status.OK:
            self._learn(core, AddsAcked([send.add.entry for send in sends], slot, name))
        elif first is Status.FENCED:
            self._learn(core, w.AddRefused(w.EntryOutcome.FENCED))
        elif first is Status.BUSY and tries * RETRY_S <= ADD_TIMEOUT_S:
            again = partial(self._send, core, slot, name, sends, tries + 1)
            self.simulation.scheduler.after(RETRY_S, self.client.take, again)
        else:
            for send in sends:
                self._learn(core, AddFailed(send.add.entry, slot, name))

    def _change(self, core: w.WriterCore[_Add], effect: w.ChangeEnsemble) -> None:
        others = self._others(core, effect)
        names = ", ".join(name for _, name in effect.failed)
        self.simulation.story(f"{self.client.name} replaces {names} from entry {effect.first_entry} on by {others}")
        if not others:
            self.simulation.scheduler.after(0.0, self.client.take, self._learn, core, w.NoReplacementFound())
            return
        Change(
            self.simulation, self.client, self.ledger,
            partial(m.decide_ensemble_change, first_entry=effect.first_entry, failed=effect.failed, others=others),
            partial(self._changed, core), deadline_s=CHANGE_DEADLINE_S,
        )  # fmt: skip

    def _others(self, core: w.WriterCore[_Add], effect: w.ChangeEnsemble) -> dict[int, str]:
        others: dict[int, str] = {}
        for slot, _ in effect.failed:
            taken = (*self.stored, *(name for _, name in effect.failed), *others.values())
            found = self.simulation.network.choose(1, taken)
            if found:
                others[slot] = found[0]
        return others

    def _changed(self, core: w.WriterCore[_Add], outcome: Outcome) -> None:
        fact: w.WriterFact = w.EnsembleChangeUnknown()
        if isinstance(outcome, LedgerRecord):
            self.stored = outcome.fragments[-1].bookies
            fact = w.EnsembleChanged(self.stored)
        elif outcome is not None:
            fact = w.EnsembleChangeRefused()
        self._learn(core, fact)

    def _end(self, core: w.WriterCore[_Add], effect: w.CloseLedger) -> None:
        self._ending = True
        self.simulation.story(f"{self.client.name} closes ledger {self.ledger} at {effect.last_entry}")
        decide = partial(m.decide_close_by_writer, last_entry=effect.last_entry, length=effect.length)
        Change(self.simulation, self.client, self.ledger, decide, partial(self._closed, core))

    def _closed(self, core: w.WriterCore[_Add], outcome: Outcome) -> None:
        fact: w.WriterFact = w.LedgerCloseUnknown()
        if isinstance(outcome, LedgerRecord):
            fact = w.LedgerEnded(outcome.last_entry, outcome.length)
        elif outcome is not None:
            fact = w.LedgerCloseRefused()
        self._learn(core, fact)
