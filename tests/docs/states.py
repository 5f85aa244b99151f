"""State pictures of the ledger protocol, found by playing with the cores: each arrow is a step that one of them took.

Nothing here knows the states: a core is driven by chance through all its intents and the answers to its effects, and
every change of its state is noted with what caused it. So a picture of docs/design/ledgers.md shows what the code does;
`python -m tests.docs.tables --check` fails when it is not any more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from magnetar.ledger import metadata_core as metadata
from magnetar.ledger.metadata_core import LedgerTransition, RecordToStore, Striping, make_ledger_record
from magnetar.ledger.reader_core import StoredCopy
from magnetar.ledger.recovery_core import (
    CloseRecoveredLedger,
    EntryFound,
    EntryMissing,
    FenceFailed,
    LedgerFencedAtBookie,
    LedgerRecordClosed,
    LedgerRecovery,
    ReadFailed,
    RecoveredCloseRefused,
    SendFence,
    SendRead,
)
from magnetar.ledger.writer_core import (
    AddAcked,
    AddFailed,
    AddRefused,
    ChangeEnsemble,
    CloseLedger,
    EnsembleChanged,
    EnsembleChangeRefused,
    EnsembleChangeUnknown,
    EntryOutcome,
    LedgerCloseRefused,
    LedgerCloseUnknown,
    LedgerEnded,
    NoReplacementFound,
    PendingAdd,
    QuorumTimedOut,
    SendAdd,
    WriterCore,
)
from magnetar.metadata.records import CLOSED, IN_RECOVERY, OPEN, Fragment, LedgerRecord

Step = tuple[str, str, str]
"""(state before, what happened, state after)"""

LIVES = 2_000
STEPS = 40
SHAPES = (Striping(3, 3, 2), Striping(2, 2, 2), Striping(3, 2, 2), Striping(1, 1, 1))


def diagram(steps: set[Step], *, first: str, last: tuple[str, ...]) -> str:
    """Mermaid's text: one arrow for each pair of states, with all its causes."""
    causes: dict[tuple[str, str], list[str]] = {}
    for before, cause, after in sorted(steps):
        causes.setdefault((before, after), []).append(cause)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {before} --> {after}: {', '.join(why)}" for (before, after), why in causes.items()]
    lines += [f"    {state} --> [*]" for state in last]
    return "\n".join([*lines, "```"])


# ---------------------------------------------------------------------------------- the writer
def writer_diagram() -> str:
    rng = random.Random(1)
    steps: set[Step] = set()
    for life in range(LIVES):
        _write(rng, SHAPES[life % len(SHAPES)], steps)
    return diagram(steps, first="OPEN", last=("CLOSED",))


def _write(rng: random.Random, shape: Striping, steps: set[Step]) -> None:
    core: WriterCore[PendingAdd] = WriterCore(shape, [f"b{slot}" for slot in range(shape.ensemble_size)], changes_max=2)
    waiting: list[Any] = []
    others = iter(range(100, 200))
    for _ in range(STEPS):
        before = core.state.name
        cause, effects = _move(rng, core, waiting, others)
        waiting += [effect for effect in effects if isinstance(effect, SendAdd | ChangeEnsemble | CloseLedger)]
        core.check()
        if core.state.name != before:
            steps.add((before, cause, core.state.name))


def _move(
    rng: random.Random, core: WriterCore[PendingAdd], waiting: list[Any], others: Iterator[int]
) -> tuple[str, Any]:
    """One intent or one answer, by chance; what it is called, and its effects."""
    chance = rng.random()
    if chance < 0.05:
        return "close()", core.close()
    if chance < 0.06:
        waiting[:] = [effect for effect in waiting if not isinstance(effect, CloseLedger)]  # the driver cancels it
        return "abandon()", core.abandon()
    if chance < 0.08:
        return "QuorumTimedOut", core.receive(QuorumTimedOut(core.adds.lac + 1))
    if chance < 0.09:
        return "AddRefused", core.receive(AddRefused(rng.choice((EntryOutcome.FENCED, EntryOutcome.UNAUTHORIZED))))
    if chance < 0.4 and core.accepts_appends:
        return "append()", core.append(PendingAdd(), 1)
    if not waiting:
        return "", ()
    fact = _writer_answer(rng, core, waiting.pop(rng.randrange(len(waiting))), others)
    return type(fact).__name__, core.receive(fact)


def _writer_answer(rng: random.Random, core: WriterCore[PendingAdd], effect: Any, others: Iterator[int]) -> Any:
    if isinstance(effect, SendAdd):
        kind = AddAcked if rng.random() < 0.8 else AddFailed
        return kind(effect.add.entry, effect.slot, effect.bookie)
    if isinstance(effect, ChangeEnsemble):
        ensemble = list(core.adds.ensemble)
        for slot, _ in effect.failed:
            ensemble[slot] = f"b{next(others)}"
        return rng.choice(
            (EnsembleChanged(tuple(ensemble)), NoReplacementFound(), EnsembleChangeRefused(), EnsembleChangeUnknown())
        )
    further = rng.randint(0, core.adds.lap - effect.last_entry)
    return rng.choice(
        (LedgerEnded(effect.last_entry + further, effect.length), LedgerCloseRefused(), LedgerCloseUnknown())
    )


# ---------------------------------------------------------------------------------- recovery
def recovery_diagram() -> str:
    rng = random.Random(2)
    steps: set[Step] = set()
    for life in range(LIVES // 2):
        _recover(rng, SHAPES[life % len(SHAPES)], steps)
    return diagram(steps, first="NEW", last=("DONE", "ABORTED"))


def _recover(rng: random.Random, shape: Striping, steps: set[Step]) -> None:
    record = _record(shape, IN_RECOVERY)
    core = LedgerRecovery(
        record, lambda exclude: rng.choice(("spare", None)) if "spare" not in exclude else None, batch=2
    )
    entries = rng.randint(0, 3)
    luck = rng.choice((0.0, 0.1, 0.5))

    def take(cause: str, act: Callable[[], Any]) -> None:
        before = core.state.name
        waiting.extend(act())
        core.check()
        if core.state.name != before:
            steps.add((before, cause, core.state.name))

    waiting: list[Any] = []
    take("start()", core.start)
    while waiting:
        fact = _recovery_answer(rng, core, waiting.pop(rng.randrange(len(waiting))), entries, luck)
        if fact is not None:
            take(type(fact).__name__, lambda fact=fact: core.receive(fact))  # type: ignore[misc]


def _recovery_answer(rng: random.Random, core: LedgerRecovery, effect: Any, entries: int, luck: float) -> Any:
    bad = rng.random() < luck
    if isinstance(effect, SendFence):
        return FenceFailed(effect.slot) if bad else LedgerFencedAtBookie(effect.slot, -1)
    if isinstance(effect, SendRead):
        if bad:
            return ReadFailed(effect.entry, effect.slot)
        if effect.entry >= entries:
            return EntryMissing(effect.entry, effect.slot)
        return EntryFound(effect.entry, effect.slot, StoredCopy(effect.entry, -1, effect.entry + 1, b"x"))
    if isinstance(effect, SendAdd):
        kind = AddFailed if bad else AddAcked
        return kind(effect.add.entry, effect.slot, effect.bookie)
    if isinstance(effect, CloseRecoveredLedger):
        return RecoveredCloseRefused() if bad else LedgerRecordClosed(core.snapshot)
    return None


# ---------------------------------------------------------------------------------- the record
def record_diagram() -> str:
    shape = Striping(3, 3, 2)
    steps: set[Step] = set()
    absent: LedgerRecord | None = None
    _note(steps, absent, "create", metadata.decide_ledger_creation(absent, _record(shape, OPEN)))
    for state in (OPEN, IN_RECOVERY, CLOSED):
        record = _record(shape, state)
        snapshot = record.fragments
        first, last = snapshot[0], Fragment(5, snapshot[0].bookies)
        changed = _with(record, fragments=(first, last))
        for cause, transition in (
            ("decide_close_by_writer", metadata.decide_close_by_writer(record, 4, 9)),
            ("decide_ensemble_change", metadata.decide_ensemble_change(record, 5, ((0, "b0"),), {0: "b9"})),
            ("decide_recovery_start", metadata.decide_recovery_start(record)),
            ("decide_close_by_recovery", metadata.decide_close_by_recovery(record, snapshot, snapshot, 4, 9)),
            ("decide_bookie_replacement", metadata.decide_bookie_replacement(changed, 0, "b0", "b9")),
        ):
            _note(steps, record, cause, transition)
    return diagram(steps, first="none", last=("CLOSED",))


def _note(steps: set[Step], before: LedgerRecord | None, cause: str, transition: LedgerTransition | None) -> None:
    if isinstance(transition, RecordToStore):
        steps.add((_name(before), cause, _name(transition.record)))


def _name(record: LedgerRecord | None) -> str:
    return "none" if record is None else record.state.upper().replace("-", "_")


def _record(shape: Striping, state: str) -> LedgerRecord:
    bookies = [f"b{slot}" for slot in range(shape.ensemble_size)]
    record = make_ledger_record(7, shape, bookies, key=b"k" * 20, token="t", created_ms=0, properties={})
    return _with(record, state=state, last_entry=4 if state == CLOSED else -1)


def _with(record: LedgerRecord, **changes: Any) -> LedgerRecord:
    return LedgerRecord(**{name: getattr(record, name) for name in record.__struct_fields__} | changes)
