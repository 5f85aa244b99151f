"""What spaces are made of: the shape of a search, states as tuples, and numbers for values."""

from typing import Any, NamedTuple

from magnetar.ledger import recovery_core as r
from magnetar.ledger.writer_core import AddAcked, AddFailed

FAULTS = ("none", "late", "crash", "cas", "unknown")
WRITER, NOBODY = "w", ""
NEW, OVER = -1, -2  # of a recoverer: has not begun; needs nothing any more
CHANGE_STATES = ("CHANGING", "SETTLING")


class Broken(AssertionError):
    """A promise was not kept; begins with the invariant's number (docs/design/invariants.md)."""


class Shape(NamedTuple):
    quorum: tuple[int, int, int] = (3, 3, 2)
    bookies: int = 3
    entries: int = 2
    recoverers: int = 2
    fault: str = "late"
    batch: int = 1


State = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, int]
"""(writer, recoverers, columns, metadata messages, record, script, faults)"""
W, R, C, M, RECORD, SCRIPT, LEFT = range(7)
Column = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(store, requests, answers to the writer)"""
Told = tuple[Any, Any]
"""(request, answer)"""
Move = tuple[str, int, tuple[Told, ...], int]
"""(words, column afterwards, who is told what, faults used)"""


class Table:
    """Values and their numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


def fact_of(op: str, slot: int, name: str, what: Any, answer: Any) -> Any:
    if op == "fence":
        return r.LedgerFencedAtBookie(slot, answer[1]) if answer is not None else r.FenceFailed(slot)
    if op == "write":
        return AddAcked(what.entry, slot, name) if answer == "OK" else AddFailed(what.entry, slot, name)
    if answer is None:
        return r.ReadFailed(what, slot)
    if answer == "MISSING":
        return r.EntryMissing(what, slot)
    return r.EntryFound(what, slot, answer[1])


def event_of(fact: Any) -> Any:
    """With its name: facts of different kinds may be equal as tuples."""
    return "fact", fact, type(fact).__name__


def altered(state: State, at: int, value: Any) -> State:
    return (*state[:at], value, *state[at + 1 :])  # type: ignore[return-value]


def put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def added(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(sorted((*numbers, number)))
