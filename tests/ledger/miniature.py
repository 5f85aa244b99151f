"""A whole ledger in miniature: the cores, bookies that keep or lose messages, and one metadata record; from a seed.

`Miniature(seed).run()` plays one short schedule: a writer appends, bookies go away and come back, messages are lost,
late or out of order, recoverers start at any time, also several at once. Then the network heals, a last one closes
the ledger, and every promise is checked (docs/design/invariants.md: 1-13). A violation raises with the seed in its
text. The flags of `Sabotage` break the network's side of a rule; the cores' side is broken by monkeypatching them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from magnetar.ledger import metadata_core as m
from magnetar.ledger import recovery_core as r
from magnetar.ledger import writer_core as w
from magnetar.ledger.pending_core import AddAcked, AddFailed, AddsAcked, PayloadAdd, SendAdd, Striping
from magnetar.ledger.reader_core import StoredCopy
from magnetar.metadata.records import CLOSED, IN_RECOVERY, Fragment, LedgerRecord

SHAPES = [(3, 3, 2), (3, 3, 2), (1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 2, 2), (4, 3, 2), (5, 3, 2), (3, 3, 3), (3, 2, 1)]


@dataclass
class Sabotage:
    """What the network does wrong on purpose."""

    reads_without_fence: bool = False  # M01
    ensembles_persisted_early: bool = False  # M03
    errors_told_as_missing: bool = False  # M06


@dataclass
class FakeBookie:
    """Keeps what it acknowledged, for ever; `up` is whether it hears anything; `sick`: reads give UNKNOWN."""

    name: str
    entries: dict[int, StoredCopy] = field(default_factory=dict)
    lac: int = -1
    fenced: bool = False
    up: bool = True
    sick: bool = False

    def add(self, stored: StoredCopy, lac: int, *, recovery: bool) -> bool:
        if self.fenced and not recovery:
            return False
        self.entries[stored.entry] = stored
        self.lac = max(self.lac, lac)
        return True


class Miniature:
    def __init__(self, seed: int, sabotage: Sabotage | None = None, shape: tuple[int, int, int] | None = None) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.sabotage = sabotage or Sabotage()
        self.striping = Striping(*(shape or rng.choice(SHAPES)))
        size = self.striping.ensemble_size
        self.bookies = {name: FakeBookie(name) for name in (f"b{i}" for i in range(size + rng.randrange(3)))}
        self.record = self._first_record(size)
        self.messages: list[Callable[[], None]] = []
        self.payloads: dict[int, bytes] = {}
        self.acked: list[int] = []
        self.failed: dict[int, w.EntryOutcome] = {}
        self.ends: list[LedgerRecord] = []
        self.loss = rng.choice([0.0, 0.02, 0.1, 0.25])
        self.crashes = rng.choice([0.0, 0.005, 0.03])
        self.eagerness = rng.choice([0.002, 0.005, 0.02])  # of recoverers
        self.healed = False
        self.events = 0
        self.first_record = self.record
        self.writer: w.Writer[PayloadAdd[bytes]] | None = w.Writer(
            self.striping, self.record.fragments[-1].bookies, changes_max=rng.choice((0, 2, 20))
        )
        self.writer_changes = 0
        if len(self.record.fragments) > 1:
            start = self.writer.fragment_first = self.record.fragments[-1].first_entry
            self.writer.adds.lac = self.writer.adds.lap = start - 1
            self.writer.adds.length = self.writer.adds.length_confirmed = start

    def _first_record(self, size: int) -> LedgerRecord:
        """One fragment, or an earlier one as well whose entries are stored: as after an ensemble change."""
        names = list(self.bookies)
        self.rng.shuffle(names)
        record = m.new_record(1, self.striping, names[:size], key=b"k" * 20, token="t", created_ms=0, properties={})
        if len(names) == size or self.rng.random() < 0.5:
            return record
        start = self.rng.randrange(1, 4)
        for entry in range(start):
            for slot in self.striping.write_set(entry):
                self.bookies[names[slot]].add(StoredCopy(entry, -1, entry + 1, b"%d" % entry), -1, recovery=False)
        second = (*names[: size - 1], names[size])
        return msgspec.structs.replace(record, fragments=(*record.fragments, Fragment(start, second)))

    # ------------------------------------------------------------------------------ the schedule
    def run(self) -> None:
        try:
            self._disturbed()
            self._healing()
            self._judge()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}, shape {self.striping.write_sets}: {error}") from error

    def _disturbed(self) -> None:
        for _ in range(self.rng.randrange(20, 400)):
            chance = self.rng.random()
            if chance < 0.15 and len(self.payloads) < 40:
                self._append()
            elif chance < 0.15 + self.crashes:
                bookie = self.rng.choice(list(self.bookies.values()))
                bookie.up = not bookie.up
            elif chance < 0.15 + self.crashes + self.eagerness:
                self._recover()
            else:
                self._seldom()
            for _ in range(self.rng.randrange(4)):
                self._deliver()

    def _seldom(self) -> None:
        chance = self.rng.random()
        if chance < 0.005:
            self._close_writer()
        elif chance < 0.01:
            bookie = self.rng.choice(list(self.bookies.values()))
            bookie.sick = not bookie.sick
        elif chance < 0.011:
            self.writer = None  # its process died

    def _healing(self) -> None:
        """All works again, or all but one bookie where the shape bears that; a last recoverer closes the ledger."""
        self.healed = True
        for bookie in self.bookies.values():
            bookie.up, bookie.sick = True, False
        s = self.striping
        spare = len(self.bookies) > s.ensemble_size
        if s.ack_quorum >= 2 and (spare or s.write_quorum > s.ack_quorum) and self.rng.random() < 0.5:
            self.rng.choice(list(self.bookies.values())).up = False
        tries = 0
        while self.messages or self.record.state != CLOSED:
            if not self.messages:
                tries += 1
                assert tries < 20, "recovery of a ledger with a live quorum terminates"
                self._recover()
            self._deliver()
        if self.writer is not None:
            self._close_writer()
            while self.messages:
                self._deliver()
            assert self.writer.state is w.WriterState.CLOSED, "a writer learns the end of its ledger"

    def _deliver(self) -> None:
        if self.messages:
            at = self.rng.randrange(len(self.messages))
            self.messages[at], self.messages[-1] = self.messages[-1], self.messages[at]
            self.messages.pop()()
            self.events += 1

    def _call(self, bookie: FakeBookie, serve: Callable[[], object], answer: Callable[[object], None],
              fail: Callable[[], None]) -> None:  # fmt: skip
        """One request. It or its answer may be lost; its sender may give up while it is still on its way."""
        gave_up = False

        lag = self.rng.choice((0.0, 0.0, 0.5, 0.95))

        def arrive() -> None:
            nonlocal gave_up
            if not self.healed and self.rng.random() < lag:
                self.messages.append(arrive)
                return
            lost = not self.healed and self.rng.random() < self.loss
            if not bookie.up or lost:
                if not gave_up:
                    gave_up = True
                    self.messages.append(fail)
                return
            result = serve()
            if not self.healed and self.rng.random() < self.loss:
                self.messages.append(fail if not gave_up else lambda: None)
                gave_up = True
            elif not gave_up:
                self.messages.append(lambda: None if gave_up else answer(result))

        def time_out() -> None:
            nonlocal gave_up
            if not gave_up:
                gave_up = True
                fail()

        self.messages.append(arrive)
        if not self.healed and self.rng.random() < self.loss / 2:
            self.messages.append(time_out)

    # ------------------------------------------------------------------------------ the writer
    def _append(self) -> None:
        if self.writer is None or not self.writer.accepts_appends:
            return
        effects: list[w.Effect[PayloadAdd[bytes]]] = []
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):  # of one turn
            entry = self.writer.adds.lap + 1
            payload = self.payloads[entry] = b"%d" % entry
            effects += self.writer.append(PayloadAdd(payload), 1)
        self._write(effects)

    def _close_writer(self) -> None:
        if self.writer is not None:
            self._write(self.writer.close())

    def _tell_writer(self, fact: w.Fact) -> None:
        if self.writer is not None:
            self._write(self.writer.receive(fact))

    def _write(self, effects: Sequence[w.Effect[PayloadAdd[bytes]]]) -> None:
        assert self.writer is not None
        self.writer.check()
        sends: dict[tuple[int, str], list[SendAdd[PayloadAdd[bytes]]]] = {}
        for effect in effects:
            if isinstance(effect, SendAdd):
                sends.setdefault((effect.slot, effect.bookie), []).append(effect)
            elif isinstance(effect, w.ConfirmEntries):
                self._confirmed(effect.add.entry)
            elif isinstance(effect, w.FailEntries):
                assert effect.add.entry not in self.acked, "an entry that failed was not confirmed"
                self.failed[effect.add.entry] = effect.why
            elif isinstance(effect, w.ChangeEnsemble):
                self._change_by_writer(effect)
            else:
                self.messages.append(partial(self._close_by_writer, effect))
        for (slot, name), adds in sends.items():
            self._send_adds(slot, name, adds)

    def _send_adds(self, slot: int, name: str, sends: list[SendAdd[PayloadAdd[bytes]]]) -> None:
        """One request and one answer for the adds of a turn to a bookie; each entry is stored or refused for itself."""
        bookie = self.bookies[name]

        def serve() -> list[bool]:
            return [
                bookie.add(
                    StoredCopy(add.entry, lac, add.length, add.payload), lac, recovery=False
                ) for add, _, _, lac in sends
            ]  # fmt: skip

        def answer(stored: object) -> None:
            assert isinstance(stored, list)
            acked = [send.add.entry for send, ok in zip(sends, stored, strict=True) if ok]
            if acked:
                self._tell_writer(AddsAcked(acked, slot, name))
            if len(acked) < len(sends):
                self._tell_writer(w.AddRefused(w.EntryOutcome.FENCED))

        def fail() -> None:
            for send in sends:
                self._tell_writer(AddFailed(send.add.entry, slot, name))

        self._call(bookie, serve, answer, fail)

    def _confirmed(self, entry: int) -> None:
        first = self.first_record.fragments[-1].first_entry
        assert entry == (self.acked[-1] + 1 if self.acked else first), "confirmations are in entry order, each once"
        self.acked.append(entry)
        fragment, _ = m.find_fragment_of_entry(self.record, entry)
        holders = sum(entry in self.bookies[fragment.bookies[slot]].entries for slot in self.striping.write_set(entry))
        assert holders >= self.striping.ack_quorum, "a confirmed entry is on Qa bookies of its committed fragment"

    def _change_by_writer(self, effect: w.ChangeEnsemble) -> None:
        """Chooses once; tries until the record shows what came of it, or gives up not knowing."""
        taken = [*self.record.fragments[-1].bookies, *(bookie for _, bookie in effect.failed)]
        free = [name for name in self.bookies if name not in taken]
        self.rng.shuffle(free)
        others = dict(zip((slot for slot, _ in effect.failed), free, strict=False))
        if not others:
            self.messages.append(lambda: self._tell_writer(w.NoReplacement()))
            return
        decide = partial(m.change_ensemble, first_entry=effect.first_entry, failed=effect.failed, others=others)

        def attempt(version: LedgerRecord, left: int) -> None:
            lost = not self.healed and self.rng.random() < self.loss
            if not lost or self.rng.random() < 0.5:
                if self.record is not version:  # it was changed since it was read
                    self.messages.append(lambda: attempt(self.record, left))
                    return
                changed = self.record
                stored = self._apply(decide)
                self.writer_changes += self.record is not changed
                if not lost:
                    told = w.EnsembleRefused() if stored is None else w.EnsembleChanged(stored.fragments[-1].bookies)
                    self.messages.append(lambda: self._tell_writer(told))
                    return
            if left:
                self.messages.append(lambda: attempt(self.record, left - 1))
            else:
                self.messages.append(lambda: self._tell_writer(w.EnsembleUnknown()))

        read = self.record
        self.messages.append(lambda: attempt(read, 2))

    def _close_by_writer(self, effect: w.CloseLedger) -> None:
        if not self.healed and self.rng.random() < self.loss:
            self.messages.append(lambda: self._tell_writer(w.EndUnknown()))
            if self.rng.random() < 0.5:
                return
            self._apply(partial(m.close_by_writer, last_entry=effect.last_entry, length=effect.length))
            return
        outcome = self._apply(partial(m.close_by_writer, last_entry=effect.last_entry, length=effect.length))
        fact: w.Fact = w.EndRefused()
        if outcome is not None:
            fact = w.LedgerEnded(outcome.last_entry, outcome.length)
        self.messages.append(lambda: self._tell_writer(fact))

    # ------------------------------------------------------------------------------ metadata
    def _apply(self, decide: Callable[[LedgerRecord], m.Transition]) -> LedgerRecord | None:
        """One transition by compare-and-set; the stored record, None when refused."""
        before = self.record
        answer = decide(before)
        if isinstance(answer, m.TransitionRefused):
            return None
        if isinstance(answer, m.RecordWrite):
            assert before.state != CLOSED, "nothing leaves CLOSED: a ledger ends once"
            m.check_record(answer.record)
            self.record = answer.record
        return self.record

    # ------------------------------------------------------------------------------ recovery
    def _recover(self) -> None:
        def start() -> None:
            record = self._apply(m.start_recovery)
            assert record is not None
            if record.state == CLOSED:
                self.ends.append(record)
            else:
                self.messages.append(lambda: Recoverer(self, record).begin())

        self.messages.append(start)

    # ------------------------------------------------------------------------------ the verdict
    def _judge(self) -> None:
        end = self.record.last_entry
        m.check_record(self.record)
        for record in self.ends:
            assert (record.last_entry, record.length) == (end, self.record.length), (
                "every recoverer reports the same end"
            )
        assert not self.acked or self.acked[-1] <= end, "no confirmed entry lies beyond the end"
        for entry, why in self.failed.items():
            assert why is not w.EntryOutcome.NOT_STORED or entry > end, (
                "an entry said to be not stored is not in the ledger"
            )
        for entry in range(end + 1):
            fragment, _ = m.find_fragment_of_entry(self.record, entry)
            copies = [
                self.bookies[fragment.bookies[slot]].entries.get(entry) for slot in self.striping.write_set(entry)
            ]
            found = [copy for copy in copies if copy is not None]
            assert len(found) >= self.striping.ack_quorum, f"entry {entry} of the closed ledger has Qa copies"
            assert {bytes(copy.payload) for copy in found} == {b"%d" % entry}, "every copy is what was appended"
        if end >= 0:
            assert self.record.length == end + 1, "the ledger's length is that of its entries"


class Recoverer:
    """One recovery core in the miniature."""

    def __init__(self, mini: Miniature, record: LedgerRecord) -> None:
        assert record.state == IN_RECOVERY
        self.mini = mini
        self.core = r.Recovery(record, self._choose, batch=mini.rng.choice([1, 2, 8]))

    def begin(self) -> None:
        self._run(self.core.start())

    def _choose(self, exclude: Sequence[str]) -> str | None:
        names = [name for name in self.mini.bookies if name not in exclude]
        return self.mini.rng.choice(names) if names else None

    def _tell(self, fact: r.Fact) -> None:
        before = tuple(self.core.fragments)
        effects = self.core.receive(fact)
        if self.mini.sabotage.ensembles_persisted_early and tuple(self.core.fragments) != before:
            self._persist_early()
        self._run(effects)

    def _persist_early(self) -> None:
        if self.mini.record.state == IN_RECOVERY:
            self.mini.record = msgspec.structs.replace(self.mini.record, fragments=tuple(self.core.fragments))

    def _run(self, effects: Sequence[r.Effect]) -> None:
        self.core.check()
        for effect in effects:
            if isinstance(effect, r.SendFence):
                self._fence(effect)
            elif isinstance(effect, r.SendRead):
                self._read(effect)
            elif isinstance(effect, SendAdd):
                self._write_back(effect)
            elif isinstance(effect, r.CloseRecovered):
                self.mini.messages.append(partial(self._close, effect))
            elif isinstance(effect, r.FinishRecovery):
                self.mini.ends.append(effect.record)

    def _fence(self, send: r.SendFence) -> None:
        bookie = self.mini.bookies[send.bookie]

        def serve() -> tuple[int, int]:
            bookie.fenced = True
            return bookie.lac, max(bookie.entries, default=-1)

        self.mini._call(
            bookie,
            serve,
            lambda known: self._tell(r.Fenced(send.slot, *known)),  # type: ignore[misc]
            lambda: self._tell(r.FenceFailed(send.slot)),
        )

    def _read(self, send: r.SendRead) -> None:
        bookie = self.mini.bookies[send.bookie]

        def serve() -> r.Fact:
            if not self.mini.sabotage.reads_without_fence:
                bookie.fenced = True
            if bookie.sick:
                if self.mini.sabotage.errors_told_as_missing:
                    return r.EntryMissing(send.entry, send.slot)
                return r.ReadFailed(send.entry, send.slot)
            stored = bookie.entries.get(send.entry)
            if stored is None:
                return r.EntryMissing(send.entry, send.slot)
            return r.EntryFound(send.entry, send.slot, stored)

        self.mini._call(bookie, serve, self._tell, lambda: self._tell(r.ReadFailed(send.entry, send.slot)))  # type: ignore[arg-type]

    def _write_back(self, send: SendAdd[PayloadAdd[StoredCopy]]) -> None:
        bookie, stored = self.mini.bookies[send.bookie], send.add.payload
        self.mini._call(
            bookie,
            lambda: bookie.add(stored, send.lac, recovery=True),
            lambda _: self._tell(AddAcked(stored.entry, send.slot, send.bookie)),
            lambda: self._tell(AddFailed(stored.entry, send.slot, send.bookie)),
        )

    def _close(self, effect: r.CloseRecovered) -> None:
        stored = self.mini._apply(
            partial(
                m.close_recovered, snapshot=self.core.snapshot.fragments, fragments=effect.fragments,
                last_entry=effect.last_entry, length=effect.length,
            )
        )  # fmt: skip
        fact = r.CloseRefused() if stored is None else r.RecordClosed(stored)
        self.mini.messages.append(lambda: self._tell(fact))
