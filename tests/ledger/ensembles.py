"""The writer's core against a metadata record and bookies that keep what they acknowledged: any interleaving.

A `Play` is driven by steps (a kind and a number that picks among what is possible). The metadata's side of a change is
two steps, the write and its answer, so that acks and failures fall between. Checked after each
(docs/design/invariants.md):

    2   the record's fragments: keys strictly increase, distinct bookies
    5   a confirmed entry is synced at Qa bookies of the fragment that the *metadata* names for it
    8   confirmations in entry order, each once; what failed was not confirmed
    9   nothing is confirmed from the moment an ensemble change is asked for until its outcome is told
    –   whoever stands at a live slot was sent every pending entry, or the ledger would hang
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from magnetar.ledger import metadata_core as m
from magnetar.ledger import writer_core as w
from magnetar.ledger.writer_core import AddFailed, AddsAcked, PayloadAdd, SendAdd, Striping
from magnetar.metadata.records import CLOSED, IN_RECOVERY, OPEN

Step = tuple[str, int]

KINDS = (
    "push", "push", "ack", "ack", "ack", "ack", "fail", "fail", "write", "answer", "none",
    "unknown", "recoverer", "fenced", "time out", "close", "abandon", "end", "late ack",
)  # fmt: skip
SHAPES = ((3, 3, 2), (3, 3, 2), (3, 2, 2), (2, 2, 2), (3, 3, 3), (3, 3, 1), (4, 3, 2), (1, 1, 1))
SPARES = 3
COMMON = frozenset(("push", "ack", "fail", "write", "answer", "late ack"))


class Play:
    def __init__(self, shape: tuple[int, int, int], *, changes_max: int = 20) -> None:
        self.striping = Striping(*shape)
        names = [f"b{number}" for number in range(shape[0] + SPARES)]
        self.names = names
        self.record = m.new_record(
            1, self.striping, names[: shape[0]], key=b"k" * 20, token="t", created_ms=0, properties={}
        )
        self.core: w.Writer[PayloadAdd[int]] = w.Writer(self.striping, names[: shape[0]], changes_max=changes_max)
        self.sent: list[tuple[int, int, str]] = []  # (entry, slot, bookie), each once
        self.synced: set[tuple[int, str]] = set()
        self.acked: list[int] = []
        self.failed: dict[int, w.EntryOutcome] = {}
        self.appended = 0
        self.change: w.ChangeEnsemble | None = None
        self.others: dict[int, str] = {}
        self.closing: w.CloseLedger | None = None

    def play(self, steps: Sequence[Step]) -> Play:
        for kind, number in steps:
            getattr(self, "_" + kind.replace(" ", "_"))(number)
            self._check()
        return self

    # ------------------------------------------------------------------------------ steps
    def _push(self, _: int) -> None:
        if self.core.accepts_appends:
            self.appended += 1
            self._do(self.core.append(PayloadAdd(self.appended), 1))

    def _ack(self, number: int) -> None:
        """One of what was sent and is not synced yet."""
        open_ = [each for each in self.sent if (each[0], each[2]) not in self.synced]
        if open_:
            self._tell_ack(*open_[number % len(open_)])

    def _late_ack(self, number: int) -> None:
        """Any that was ever sent, again or to a bookie that was replaced long ago."""
        if self.sent:
            self._tell_ack(*self.sent[number % len(self.sent)])

    def _tell_ack(self, entry: int, slot: int, bookie: str) -> None:
        if self.record.state == CLOSED and entry > self.record.last_entry and (entry, bookie) not in self.synced:
            self._tell(w.AddRefused(w.EntryOutcome.FENCED))  # whoever closed the ledger there had fenced it
            return
        self.synced.add((entry, bookie))
        self._tell(AddsAcked((entry,), slot, bookie))

    def _fail(self, number: int) -> None:
        """A bookie fails an entry that was sent, confirmed or not."""
        if self.sent:
            self._tell(AddFailed(*self.sent[number % len(self.sent)]))

    def _write(self, number: int) -> None:
        """The metadata takes the change, or finds that it has; nobody hears of it yet."""
        if self.change is None:
            return
        if not self.others:
            taken = [*self.record.fragments[-1].bookies, *(bookie for _, bookie in self.change.failed)]
            free = [name for name in self.names if name not in taken]
            for slot, _ in self.change.failed:
                if free:
                    self.others[slot] = free.pop(number % len(free))
        if self.others:
            answer = m.change_ensemble(self.record, self.change.first_entry, self.change.failed, self.others)
            if isinstance(answer, m.RecordWrite):
                self.record = answer.record

    def _answer(self, number: int) -> None:
        if self.change is None:
            return
        self._write(number)
        if self.record.state != OPEN:
            self._tell_change(w.EnsembleChangeRefused())
        elif self.others:
            self._tell_change(w.EnsembleChanged(self.record.fragments[-1].bookies))
        else:
            self._tell_change(w.NoReplacementFound())

    def _none(self, _: int) -> None:
        if self.change is not None and not self.others:
            self._tell_change(w.NoReplacementFound())

    def _unknown(self, _: int) -> None:
        if self.change is not None:
            self._tell_change(w.EnsembleChangeUnknown())

    def _tell_change(self, fact: w.ChangeFact) -> None:
        self.change, self.others = None, {}
        self._tell(fact)

    def _recoverer(self, number: int) -> None:
        """Another client begins to recover the ledger, or closes it: at what was confirmed, or may be, or later."""
        if self.record.state == OPEN:
            self.record = msgspec.structs.replace(self.record, state=IN_RECOVERY)
        elif self.record.state == IN_RECOVERY:
            lac = max(len(self.acked) - 1, self.record.fragments[-1].first_entry - 1)
            end = min(lac + number % 3, max(lac, self.core.adds.lap))
            while end < self.core.adds.lap and self._holders(end + 1) >= self.striping.ack_quorum:
                end += 1  # it finds them
            self.record = msgspec.structs.replace(self.record, state=CLOSED, last_entry=end, length=end + 1)

    def _fenced(self, _: int) -> None:
        if self.record.state != OPEN:
            self._tell(w.AddRefused(w.EntryOutcome.FENCED))

    def _time_out(self, number: int) -> None:
        self._tell(w.QuorumTimedOut(self.core.adds.lac + number % 2))

    def _close(self, _: int) -> None:
        self._do(self.core.close())

    def _abandon(self, number: int) -> None:
        if number % 8 == 0 and self.closing is None:
            self.change, self.others = None, {}
            self._do(self.core.abandon())

    def _end(self, number: int) -> None:
        if self.closing is None:
            return
        asked, self.closing = self.closing, None
        answer = m.close_by_writer(self.record, asked.last_entry, asked.length)
        if isinstance(answer, m.TransitionRefused):
            self._tell(w.LedgerCloseRefused())
            return
        self.record = answer.record
        if number % 5 == 0:
            self._tell(w.LedgerCloseUnknown())
        else:
            self._tell(w.LedgerEnded(self.record.last_entry, self.record.length))

    # ------------------------------------------------------------------------------ effects
    def _tell(self, fact: w.Fact) -> None:
        self._do(self.core.receive(fact))

    def _do(self, effects: Sequence[w.Effect[PayloadAdd[int]]]) -> None:
        frozen = self.change is not None
        for effect in effects:
            if isinstance(effect, SendAdd):
                assert effect.add.entry not in self.acked, "what is confirmed is not sent again"
                self.sent.append((effect.add.entry, effect.slot, effect.bookie))
            elif isinstance(effect, w.ConfirmEntries):
                ended = self.core.end is not None  # confirmed by the end that is stored, not by acks
                assert ended or not frozen, "nothing is confirmed while an ensemble change is in flight"
                self._confirmed(effect.add.entry, ended=ended)
            elif isinstance(effect, w.FailEntries):
                assert effect.add.entry not in self.acked, "an entry that failed was not confirmed"
                assert effect.add.entry not in self.failed, "an entry fails once"
                self.failed[effect.add.entry] = effect.why
            elif isinstance(effect, w.ChangeEnsemble):
                assert self.change is None, "one ensemble change at a time"
                assert effect.failed, "somebody failed"
                assert effect.first_entry == len(self.acked), "a new fragment begins at LAC + 1"
                self.change = effect
            else:
                assert effect.last_entry == len(self.acked) - 1, "a ledger ends at its LAC"
                self.closing = effect

    def _confirmed(self, entry: int, *, ended: bool) -> None:
        assert entry == len(self.acked), "confirmations are in entry order, each once"
        self.acked.append(entry)
        if self.record.state == CLOSED:
            assert entry <= self.record.last_entry, "no confirmed entry lies beyond the end"
        if ended:
            return
        assert self._holders(entry) >= self.striping.ack_quorum, "Qa bookies of the committed fragment have it"

    def _holders(self, entry: int) -> int:
        """How many of the bookies that the metadata names for it have synced it."""
        fragment, _ = m.find_fragment_of_entry(self.record, entry)
        return sum((entry, fragment.bookies[slot]) in self.synced for slot in self.striping.write_set(entry))

    def _check(self) -> None:
        self.core.check()
        m.check_record(self.record)
        if self.change is not None and self.core.state not in (w.WriterState.CHANGING, w.WriterState.SETTLING):
            self.change, self.others = None, {}  # the driver lets go of it; it may be written or not
        if self.core.state in (w.WriterState.OPEN, w.WriterState.DRAINING):
            sent = set(self.sent)
            for entry in range(len(self.acked), self.core.adds.lap + 1):
                for slot in self.striping.write_set(entry):
                    bookie = self.core.adds.ensemble[slot]
                    assert slot in self.core.adds.failed or (entry, slot, bookie) in sent, (
                        "who stands at a live slot is sent every pending entry"
                    )
            assert self.core.adds.ensemble == self.record.fragments[-1].bookies, "only a committed ensemble is used"


def random_steps(rng: random.Random, count: int) -> list[Step]:
    """Mostly what a life consists of; the rest now and then, or every play would be over at once."""
    kinds = [kind for kind in KINDS if kind in COMMON]
    return [
        (rng.choice(KINDS) if rng.random() < 0.04 else rng.choice(kinds), rng.randrange(1000)) for _ in range(count)
    ]


def play_seed(seed: int) -> Play:
    rng = random.Random(seed)
    return Play(rng.choice(SHAPES), changes_max=rng.choice((1, 3, 20))).play(random_steps(rng, rng.randrange(10, 120)))


def first_failure(seeds: int, play: Callable[[int], object] = play_seed) -> str | None:
    for seed in range(seeds):
        try:
            play(seed)
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return None
