"""Actors as values. A local state is a number; `step(number, event)` gives the next one and what the actor wants done.

The real cores are mutable. So each distinct local state is kept once, pickled, with a canonical key of everything that
is in it; a step is played on a copy the first time that this state meets this event, and looked up ever after. That is
what makes the search fast: there are few local states, and very many combinations of them.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from magnetar.ledger import recovery_core as r
from magnetar.ledger import writer_core as w
from magnetar.ledger.reader_core import StoredCopy
from magnetar.ledger.writer_core import PendingAddWithPayload, SendAdd, Striping
from magnetar.metadata.records import LedgerRecord

Event = tuple[Any, ...]
Output = tuple[Any, ...]


def freeze(value: Any) -> Hashable:
    """Everything in a value, as a value that can be compared."""
    if value is None or isinstance(value, bool | int | str | bytes | float):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, set | frozenset):
        return "set", *sorted(map(freeze, value))  # type: ignore[type-var]
    if isinstance(value, dict):
        return "dict", *((freeze(key), freeze(each)) for key, each in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(map(freeze, value))
    if isinstance(value, LedgerRecord | Striping):
        return repr(value) if isinstance(value, LedgerRecord) else value.write_sets
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    names = sorted({*slots, *getattr(value, "__dict__", {})})
    return type(value).__name__, *((name, freeze(getattr(value, name))) for name in names if hasattr(value, name))


class Cast:
    """All local states of one kind of actor. `play(core, event)` changes the core and says what it wants done."""

    def __init__(self, play: Callable[[Any, Event], Sequence[Output]]) -> None:
        self._play = play
        self._numbers: dict[Hashable, int] = {}
        self._pickles: list[bytes] = []
        self.cores: list[Any] = []  # not to be changed
        self.origins: list[tuple[int, Event] | None] = []  # the state and the event that first led there
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Output, ...]]] = {}

    def number(self, core: Any, origin: tuple[int, Event] | None = None) -> int:
        key = freeze(core)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.cores)
            self._pickles.append(pickle.dumps(core))
            self.cores.append(core)
            self.origins.append(origin)
        return found

    def copy(self, number: int) -> Any:
        return pickle.loads(self._pickles[number])

    def step(self, number: int, event: Event) -> tuple[int, tuple[Output, ...]]:
        found = self._steps.get((number, event))
        if found is None:
            core = self.copy(number)
            outputs = tuple(self._play(core, event))
            core.check()
            found = self._steps[number, event] = self.number(core, (number, event)), outputs
        return found

    def __len__(self) -> int:
        return len(self.cores)


# ------------------------------------------------------------------------------------ the writer
def play_writer(core: w.WriterCore[PendingAddWithPayload[bytes]], event: Event) -> list[Output]:
    """Events: ("append", payload), ("close",), ("fact", fact)."""
    if event[0] == "append":
        return _wanted(core, core.append(PendingAddWithPayload(event[1]), len(event[1])))
    if event[0] == "close":
        return _wanted(core, core.close())
    return _wanted(core, core.receive(event[1]))


def _wanted(
    core: w.WriterCore[PendingAddWithPayload[bytes]], effects: Sequence[w.WriterEffect[PendingAddWithPayload[bytes]]]
) -> list[Output]:
    wanted: list[Output] = []
    for effect in effects:
        if isinstance(effect, SendAdd):
            stored = StoredCopy(effect.add.entry, effect.lac, effect.add.length, effect.add.payload)
            wanted.append(("add", effect.slot, effect.bookie, stored))
        elif isinstance(effect, w.ConfirmEntry):
            wanted.append(("confirm", effect.add.entry, core.state.name))
        elif isinstance(effect, w.FailEntry):
            wanted.append(("fail", effect.add.entry, effect.why.name))
        elif isinstance(effect, w.ChangeEnsemble):
            wanted.append(("change", effect.first_entry, effect.failed, core.adds.ensemble))
        else:
            wanted.append(("close", effect.last_entry, effect.length))
    return wanted


# ------------------------------------------------------------------------------------ a recoverer
class Spare:
    """The first bookie that is not among the given ones."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, exclude: Sequence[str]) -> str | None:
        return next((name for name in self.names if name not in exclude), None)


def play_recovery(core: r.LedgerRecovery, event: Event) -> list[Output]:
    """Events: ("start",), ("fact", fact)."""
    effects = core.start() if event[0] == "start" else core.receive(event[1])
    wanted: list[Output] = []
    for effect in effects:
        if isinstance(effect, r.SendFence):
            wanted.append(("fence", effect.slot, effect.bookie))
        elif isinstance(effect, r.SendRead):
            wanted.append(("read", effect.slot, effect.bookie, effect.entry))
        elif isinstance(effect, SendAdd):
            stored = effect.add.payload
            copy = StoredCopy(stored.entry, effect.lac, stored.length, stored.payload)
            wanted.append(("write", effect.slot, effect.bookie, copy))
        elif isinstance(effect, r.CloseRecoveredLedger):
            wanted.append(("end", effect.last_entry, effect.length, effect.fragments))
        elif isinstance(effect, r.FinishRecovery):
            wanted.append(("ended", effect.record.last_entry, effect.record.length))
        else:
            wanted.append(("gave up", effect.why.name))
    return wanted


# ------------------------------------------------------------------------------------ a bookie
class Bookie:
    """As tests/simulation/protocol/bookie.py, as a value. `waiting` are the requests whose sync is to come."""

    def __init__(self) -> None:
        self.entries: dict[int, StoredCopy] = {}
        self.synced: set[int] = set()
        self.fenced = False
        self.fence_synced = False
        self.waiting: list[Event] = []

    def check(self) -> None:
        assert self.synced <= set(self.entries), "what is synced is there"
        assert self.fenced or not self.fence_synced, "a fence that is synced holds"

    @property
    def lac(self) -> int:
        return max((stored.lac for stored in self.entries.values()), default=-1)


def play_bookie(core: Bookie, event: Event) -> list[Output]:
    """Events: ("ask", request, at_once), ("sync",), ("crash",). Outputs: (request, answer); None is a failure.

    A request is (client, op, slot, bookie, entry or stored entry). `at_once`: syncs take no time.
    """
    if event[0] == "ask":
        return _asked(core, event[1], event[2])
    waiting, core.waiting = core.waiting, []
    if event[0] == "sync":
        for request in waiting:
            _mark(core, request)
        return [(request, _answer(core, request)) for request in waiting]
    core.entries = {entry: core.entries[entry] for entry in sorted(core.synced)}
    core.fenced = core.fence_synced
    return [(request, None) for request in waiting]


def _asked(core: Bookie, request: Event, at_once: bool) -> list[Output]:
    op = request[1]
    if op in ("add", "write"):
        if core.fenced and op == "add":
            return [(request, "FENCED")]
        core.entries[request[4].entry] = request[4]
        core.entries = dict(sorted(core.entries.items()))
    elif op != "look":  # a read that does not fence
        core.fenced = True
        if core.fence_synced:
            return [(request, _answer(core, request))]
    else:
        return [(request, _answer(core, request))]
    if at_once:
        _mark(core, request)
        return [(request, _answer(core, request))]
    core.waiting.append(request)
    return []


def _mark(core: Bookie, request: Event) -> None:
    if request[1] in ("add", "write"):
        core.synced.add(request[4].entry)
    else:
        core.fence_synced = True


def _answer(core: Bookie, request: Event) -> Any:
    if request[1] in ("add", "write"):
        return "OK"
    if request[1] == "fence":
        return "LAC", core.lac
    stored = core.entries.get(request[4])
    return ("FOUND", stored) if stored is not None else "MISSING"
