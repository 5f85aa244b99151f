"""The whole as a value: who is in which local state, what is on its way, what may still go wrong; and what must hold.

    state = (writer, recoverers, columns, on its way to the metadata and back, record, script, faults left)
    column = one bookie, the requests on their way to it, its answers on their way to the writer

**Turns.** Any message on its way may arrive next, in any order; the writer appends and closes when it likes; a
recoverer begins when it likes. Metadata answers a transition in one step (what a compare-and-set loop comes to).

**One fault** of the chosen kind may happen, once, at any point:

    none     no fault: delays and reordering alone
    late     somebody gives up waiting for a bookie's answer; the request still arrives, then or later, or never
    crash    a bookie loses what it has not synced, and starts again. (Then syncs are steps of their own.)
    cas      the metadata's answer to the writer is lost, after it was applied; the writer asks again
    unknown  … and the writer is told that nobody knows; the request may still be applied later

**Reductions** that lose nothing:
1. A bookie's answer to a recoverer is heard in the same step, or never. Within one of its phases (fence, one entry's
   votes, one entry's copies) the order of answers does not matter to a recoverer, and what it sends may be delayed as
   long as one likes: hearing later is the same as sending later, and an answer heard after its phase is over is the
   same as one not heard.
2. So it is with the answers to a writer that cannot change its ensemble (no spare bookie): `Columns` decides.
3. What can have no effect any more is dropped: answers to who has ended, reads of who has ended, adds that a synced
   fence refuses and nobody waits for; and recoverers with all they sent, once the record is CLOSED: they can only adopt
   it, and a fence or a copy more takes nothing back that could break a promise.
4. Which of two recoverers that have not begun begins is the same.
"""

from collections.abc import Iterator
from typing import Any

from magnetar.ledger import metadata_core as m
from magnetar.ledger import recovery_core as r
from magnetar.ledger import writer_core as w
from magnetar.ledger.peer_format import BookieOperation
from magnetar.ledger.writer_core import AddFailed, AddsAcked, PendingAddWithPayload, Striping
from magnetar.metadata.records import CLOSED, LedgerRecord
from tests.exhaustive.actors import Cast, Spare, play_recovery, play_writer
from tests.exhaustive.columns import Columns
from tests.exhaustive.values import (
    LEFT,
    NEW,
    NOBODY,
    OVER,
    RECORD,
    SCRIPT,
    WRITER,
    Broken,
    C,
    M,
    R,
    Shape,
    State,
    Table,
    Told,
    W,
    added,
    altered,
    event_of,
    fact_of,
    put,
)
from tests.simulation.protocol.recovering import _fences

CHANGE_STATES = ("CHANGING", "SETTLING")


class Space:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.names = tuple(f"b{number}" for number in range(shape.bookies))
        self.striping = Striping(*shape.quorum)
        self.writers, self.recoveries = Cast(play_writer), Cast(play_recovery)
        self.messages = Table()
        self.columns = Columns(shape, self.messages, spares=shape.bookies > self.striping.ensemble_size)
        self.stores = self.columns.stores
        self.records: list[LedgerRecord] = []
        self._record_numbers: dict[str, int] = {}
        self._phases: dict[int, Any] = {}
        self._closable: set[Any] = set()
        self.payloads = [b"%d" % number for number in range(shape.entries)]
        self.closings = 0
        first = m.make_ledger_record(1, self.striping, self.names[: self.striping.ensemble_size], key=b"k" * 20,
            token="t",
                             created_ms=0, properties={})  # fmt: skip
        self._read = "read" if _fences(first, BookieOperation.READ) else "look"
        writer = self.writers.number(
            w.WriterCore[PendingAddWithPayload[bytes]](self.striping, first.fragments[-1].bookies, changes_max=2)
        )
        column = self.columns.empty
        self.first: State = (
            writer, (NEW,) * shape.recoverers, (column,) * shape.bookies, (), self._record(first), 0,
            int(shape.fault != "none"),
        )  # fmt: skip

    def _record(self, record: LedgerRecord) -> int:
        key = repr(record)
        if key not in self._record_numbers:
            self._record_numbers[key] = len(self.records)
            self.records.append(record)
        return self._record_numbers[key]

    # ------------------------------------------------------------------------------ whose turn
    def turns(self, state: State) -> Iterator[tuple[str, State]]:
        """Every next state, with the words for it. Raises Broken."""
        writer, recoverers, columns, meta, _, script, left = state
        core = self.writers.cores[writer]
        if script < self.shape.entries and core.accepts_appends:
            appended = altered(state, SCRIPT, script + 1)
            yield f"w appends {script}", self._write(appended, ("append", self.payloads[script]))
        if script <= self.shape.entries and core.state.name in ("OPEN", "CHANGING"):
            yield "w closes", self._write(altered(state, SCRIPT, self.shape.entries + 1), ("close",))
        for at, recoverer in enumerate(recoverers):
            if recoverer == NEW and (at == 0 or recoverers[at - 1] != NEW):
                yield f"r{at} begins", self._begin(state, at)
        for at, column in enumerate(columns):
            for words, after, told, cost in self.columns.moves_of(column):
                if cost <= left:
                    moved = (writer, recoverers, put(columns, at, after), meta, state[RECORD], script, left - cost)
                    yield words, self._tidy(self._tell(moved, told))
        for place, number in enumerate(meta):
            if not place or meta[place - 1] != number:
                without = altered(state, M, meta[:place] + meta[place + 1 :])
                yield from self._at_metadata(without, self.messages.values[number])

    def at_rest(self, state: State) -> bool:
        """Nothing is on its way any more."""
        columns = [self.columns.values[column] for column in state[C]]
        return not state[M] and not any(requests or answers for _, requests, answers in columns)

    def _tidy(self, state: State) -> State:
        """Requests of recoverers that change nothing where they arrive, and whose answers change nothing either."""
        phases = tuple(self._phase(number) for number in state[R])
        left = state[LEFT] if self.shape.fault in ("late", "crash") else 0
        return altered(state, C, tuple(self.columns.tidied(column, phases, left) for column in state[C]))

    def _phase(self, recoverer: int) -> Any:
        """What a recoverer waits for: fences, votes on these entries, copies of entries behind this one."""
        found = self._phases.get(recoverer)
        if found is None:
            core = self.recoveries.cores[recoverer] if recoverer >= 0 else None
            found = core and (core.state is r.RecoveryState.FENCING, tuple(core._votes), core._adds.lac)
            self._phases[recoverer] = found
        return found

    # ------------------------------------------------------------------------------ who is told
    def _tell(self, state: State, told: tuple[Told, ...]) -> State:
        for request, answer in told:
            client, op, slot, name, what = request
            if client == WRITER:
                fact: Any = AddFailed(what.entry, slot, name)
                if answer == "OK":
                    fact = AddsAcked((what.entry,), slot, name)
                elif answer == "FENCED":
                    fact = w.AddRefused(w.EntryOutcome.FENCED)
                state = self._write(state, event_of(fact))
            elif state[R][int(client[1])] != OVER:
                state = self._recover(state, int(client[1]), event_of(fact_of(op, slot, name, what, answer)))
        return state

    # ------------------------------------------------------------------------------ metadata
    def _at_metadata(self, state: State, message: Any) -> Iterator[tuple[str, State]]:
        """The writer's transitions, and the answers to them; a transition whose sender has given up is NOBODY's."""
        client, op, *rest = message
        if op == "told":
            yield f"w hears {rest[0]}", self._write(state, event_of(rest[0]))
            return
        applied, fact = self._apply(state, op, rest)
        if client == NOBODY:
            yield f"a late {op} of w", applied
            return
        yield f"{op} of w: {fact}", self._answer(applied, fact)
        if state[LEFT] and self.shape.fault == "cas":
            again = altered(applied, LEFT, 0)
            yield f"!! the answer to {op} is lost", altered(again, M, added(again[M], self.messages.number(message)))
        if state[LEFT] and self.shape.fault == "unknown":
            unknown: Any = w.LedgerCloseUnknown() if op == "close" else w.EnsembleChangeUnknown()
            yield f"!! {op} is unknown, applied", self._answer(altered(applied, LEFT, 0), unknown)
            late = altered(state, M, added(state[M], self.messages.number((NOBODY, op, *rest))))
            yield f"!! {op} is unknown, not yet applied", self._answer(altered(late, LEFT, 0), unknown)

    def _answer(self, state: State, fact: Any) -> State:
        return altered(state, M, added(state[M], self.messages.number((WRITER, "told", fact, type(fact).__name__))))

    def _apply(self, state: State, op: str, rest: list[Any]) -> tuple[State, Any]:
        current = self.records[state[RECORD]]
        if op == "close":
            answer = m.decide_close_by_writer(current, *rest)
            refused: Any = w.LedgerCloseRefused()
        else:
            first, failed, others = rest
            answer = m.decide_ensemble_change(current, first, failed, dict(others))
            refused = w.EnsembleChangeRefused()
        if isinstance(answer, m.LedgerTransitionRefused):
            return state, refused
        record = answer.record
        state = self._stored(state, answer)
        if op == "close":
            return state, w.LedgerEnded(record.last_entry, record.length)
        return state, w.EnsembleChanged(record.fragments[-1].bookies)

    def _stored(self, state: State, answer: m.RecordToStore | m.RecordAlreadyStored) -> State:
        return self._store(state, answer.record) if isinstance(answer, m.RecordToStore) else state

    def _store(self, state: State, record: LedgerRecord) -> State:
        number = self._record(record)
        if number == state[RECORD]:
            return state
        if self.records[state[RECORD]].state == CLOSED:
            raise Broken("1: a closed record changes")
        m.check_ledger_record(record)
        state = altered(state, RECORD, number)
        if record.state == CLOSED:
            self.closings += 1
            acked = self.writers.cores[state[W]].adds.lac + 1
            if acked > record.last_entry + 1:
                raise Broken(f"4: the ledger is closed at {record.last_entry}, {acked} entries are confirmed")
            if record.last_entry >= min(state[SCRIPT], self.shape.entries):
                raise Broken("10: the ledger ends where nothing was appended")
            for entry in range(record.last_entry + 1):
                self._covered(state, record, entry, "7: entry {} has {} synced copies when the ledger is closed")
            state = self._without_recoverers(state)
        return state

    def _without_recoverers(self, state: State) -> State:
        """The end is stored: recoverers can only adopt it, and what they still send takes nothing back."""
        columns = tuple(self.columns.only_writer(column) for column in state[C])
        return altered(altered(state, C, columns), R, (OVER,) * len(state[R]))

    # ------------------------------------------------------------------------------ the writer
    def _write(self, state: State, event: Any) -> State:
        acked = self.writers.cores[state[W]].adds.lac + 1
        writer, outputs = self.writers.step(state[W], event)
        state = (writer, *state[1:])
        columns, meta = state[C], state[M]
        for output in outputs:
            if output[0] == "add":
                columns = self.columns.send(columns, (WRITER, *output))
            elif output[0] == "confirm":
                self._confirmed(state, output[1], output[2], acked)
                acked += 1
            elif output[0] == "fail":
                self._failed(state, output[1], output[2], acked)
            else:
                asked = output if output[0] == "close" else self._change(output)
                meta = added(meta, self.messages.number((WRITER, *asked)))
        if self.writers.cores[writer].state.name in ("CLOSED", "POISONED"):
            columns = self.columns.forget(columns, WRITER)
        return (writer, state[R], columns, meta, *state[4:])

    def _change(self, output: Any) -> Any:
        _, first, failed, ensemble = output
        others: dict[int, str] = {}
        for slot, _ in failed:
            found = Spare(self.names)((*ensemble, *(name for _, name in failed), *others.values()))
            if found is not None:
                others[slot] = found
        if others:
            return "change", first, failed, tuple(others.items())
        return "told", w.NoReplacementFound(), "NoReplacementFound"

    def _confirmed(self, state: State, entry: int, now: str, expected: int) -> None:
        record = self.records[state[RECORD]]
        if entry != expected:
            raise Broken(f"8: entry {entry} is confirmed after {expected - 1}")
        if now in CHANGE_STATES:
            raise Broken(f"9: entry {entry} is confirmed while the ensemble is being changed")
        if record.state == CLOSED and entry > record.last_entry:
            raise Broken(f"4: entry {entry} is confirmed, the ledger ends at {record.last_entry}")
        self._covered(state, record, entry, "5: entry {} is confirmed with {} synced copies")

    def _failed(self, state: State, entry: int, why: str, acked: int) -> None:
        record = self.records[state[RECORD]]
        if entry < acked:
            raise Broken(f"8: entry {entry} fails after it was confirmed")
        if why == "NOT_STORED" and not (record.state == CLOSED and record.last_entry < entry):
            raise Broken(f"8: entry {entry} is said to be not stored, and may be")

    def _covered(self, state: State, record: LedgerRecord, entry: int, text: str) -> None:
        fragment, _ = m.find_fragment_of_entry(record, entry)
        copies = 0
        for slot in self.striping.slots_of_entry(entry):
            column = self.columns.values[state[C][int(fragment.bookies[slot][1:])]]
            store = self.stores.cores[column[0]]
            if entry in store.synced:
                copies += 1
                if store.entries[entry].payload != self.payloads[entry]:
                    raise Broken(f"10: a copy of entry {entry} is another")
        if copies < record.ack_quorum:
            raise Broken(text.format(entry, copies))

    # ------------------------------------------------------------------------------ recoverers
    def _begin(self, state: State, at: int) -> State:
        answer = m.decide_recovery_start(self.records[state[RECORD]])
        assert not isinstance(answer, m.LedgerTransitionRefused)
        if answer.record.state == CLOSED:
            return altered(state, R, put(state[R], at, OVER))
        state = self._stored(state, answer)
        core = r.LedgerRecovery(answer.record, Spare(self.names), batch=self.shape.batch)
        return self._recover(altered(state, R, put(state[R], at, self.recoveries.number(core))), at, ("start",))

    def _recover(self, state: State, at: int, event: Any) -> State:
        recoverer, outputs = self.recoveries.step(state[R][at], event)
        columns, me = state[C], f"r{at}"
        for output in outputs:
            if output[0] == "fence":
                columns = self.columns.send(columns, (me, *output, None))
            elif output[0] == "read":
                columns = self.columns.send(columns, (me, self._read, *output[1:]))
            elif output[0] == "write":
                columns = self.columns.send(columns, (me, *output))
            else:
                state = altered(altered(state, C, columns), R, put(state[R], at, recoverer))
                return self._ended(state, at, output)
        return altered(altered(state, C, columns), R, put(state[R], at, recoverer))

    def _ended(self, state: State, at: int, output: Any) -> State:
        """CLOSED by it, or given up."""
        if output[0] == "end":
            _, last_entry, length, fragments = output
            core = self.recoveries.cores[state[R][at]]
            current = self.records[state[RECORD]]
            answer = m.decide_close_by_recovery(current, core.snapshot.fragments, fragments, last_entry, length)
            if isinstance(answer, m.RecordToStore):
                return self._stored(state, answer)
        state = altered(state, R, put(state[R], at, OVER))
        return altered(state, C, self.columns.forget(state[C], f"r{at}"))

    # ------------------------------------------------------------------------------ at rest
    def close_undisturbed(self, state: State) -> None:
        """Nothing is on its way. One more recovery ends the ledger, with all that was confirmed in it."""
        lac = self.writers.cores[state[W]].adds.lac
        stores = tuple(self.columns.values[column][0] for column in state[C])
        if (stores, state[RECORD], lac) in self._closable or self.records[state[RECORD]].state == CLOSED:
            return
        self._closable.add((stores, state[RECORD], lac))
        empty = tuple(self.columns.number((store, (), ())) for store in stores)
        state = self._begin((state[W], (NEW,), empty, (), state[RECORD], state[SCRIPT], 0), 0)
        while not self.at_rest(state):
            at = next(at for at, column in enumerate(state[C]) if self.columns.values[column][1])
            store, requests, _ = self.columns.values[state[C][at]]
            after, outputs = self.stores.step(store, ("ask", self.messages.values[requests[0]], True))
            column = self.columns.number((after, requests[1:], ()))
            told = tuple((request, answer) for request, answer in outputs if request[0] != NOBODY)
            state = self._tell(altered(state, C, put(state[C], at, column)), told)
        if self.records[state[RECORD]].state != CLOSED:
            raise Broken("13: an undisturbed recovery does not end the ledger")
