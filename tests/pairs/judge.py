"""What is promised to who sends and to who receives, judged from what both saw. Nothing here knows how a broker works.

A message has a number, and each *view* (a consumer, a reader, a table, a query) is a list of what it got:

| fault | what it means |
|---|---|
| lost | it was stored, and a view that had to get it did not, and it is no dead letter |
| torn | what came is not what was sent: other bytes, another key, other properties |
| phantom | it was never sent, or its sender was told that it is not stored |
| doubled | it came again where once is promised |
| shown | it came to a consumer that must not get it: its filter does not want it, or its time is over |
| disorder | of one key what was sent later came before what was sent earlier, each at its first time |
| not dead | it had to be a dead letter and is none; or it is one and should not be |
| stale | a table has another value of a key than its newest |

An outcome that nobody was told may be there or not. Guard: tests/pairs/test_judge.py.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """What the sender was told."""

    STORED = "stored"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Sent:
    number: int
    text: str | None  # None: a message without a value
    key: str
    properties: dict[str, str]
    outcome: Outcome = Outcome.UNKNOWN
    why: str = ""  # it was refused
    free: bool = False  # it has no place among those of its key: it was due later, or another one published it


@dataclass(frozen=True, slots=True)
class Got:
    text: str | None
    key: str
    properties: Mapping[str, str]

    @property
    def number(self) -> int:
        return int(self.properties.get("n", -1))


@dataclass(slots=True)
class View:
    """`times`: how often each number has to come at least (1, if it is not named). `lacks`: numbers that may be
    missing; `never`: that must not come. `newest`: the newest of each key has to be there, and others may."""

    name: str
    once: bool = True
    ordered: bool = True
    times: dict[int, int] = field(default_factory=dict)
    lacks: set[int] = field(default_factory=set)
    never: set[int] = field(default_factory=set)
    newest: bool = False
    got: list[Got] = field(default_factory=list)

    def comes_again(self, number: int) -> None:
        """It has to come once more than it had to."""
        self.times[number] = self.times.get(number, 1) + 1

    def missing(self, sent: Collection[Sent], dead: Collection[int] = ()) -> set[int]:
        """The numbers that have to come, and did not often enough."""
        found = Counter(each.number for each in self.got)
        stored = [each for each in sent if each.outcome is Outcome.STORED]
        if self.newest:
            last = {each.key: each.number for each in stored if not each.free}
            free = {each.key for each in stored if each.free}
            stored = [each for each in stored if last.get(each.key) == each.number and each.key not in free]
            stored = [each for each in stored if each.text is not None]
        return {
            each.number for each in stored
            if each.number not in self.lacks and found[each.number] < self.times.get(each.number, 1)
            and each.number not in dead
        }  # fmt: skip


def judge(
    sent: Sequence[Sent], views: Sequence[View], dead: View | None = None, letters: Collection[int] = (), *,
    strict: bool = True,
) -> list[str]:  # fmt: skip
    """The faults, in words. `dead`: the dead-letter topic as one saw it; `letters`: numbers that have to be there, and,
    where it is `strict`, no others."""
    known = {each.number: each for each in sent}
    faults = [fault for view in views for fault in _of_view(known, view, letters)]
    if dead is not None:
        faults += [fault for got in dead.got for fault in _whole(known, dead, got)]
        there = {each.number for each in dead.got}
        wanted = {number for number in letters if known[number].outcome is Outcome.STORED}
        faults += [f"not dead: {number} is no dead letter" for number in sorted(wanted - there)]
        if strict:
            faults += [f"not dead: {number} is a dead letter" for number in sorted(there - set(letters) - {-1})]
    return faults


def _of_view(known: Mapping[int, Sent], view: View, letters: Collection[int]) -> list[str]:
    faults = [f"lost: {view.name} lacks {each}" for each in sorted(view.missing(known.values()))]
    faults += [fault for got in view.got for fault in _whole(known, view, got)]
    faults += [f"shown: {view.name} got {each.number}, which it must not" for each in view.got
               if each.number in view.never]  # fmt: skip
    if view.once:
        often = Counter(each.number for each in view.got)
        faults += [
            f"doubled: {view.name} got {number} {times} times" for number, times in sorted(often.items())
            if times > view.times.get(number, 1) and number not in letters
        ]  # fmt: skip
    return faults + (_disorder(known, view) if view.ordered else [])


def _whole(known: Mapping[int, Sent], view: View, got: Got) -> list[str]:
    one = known.get(got.number)
    if one is None or one.outcome is Outcome.REFUSED:
        return [f"phantom: {view.name} got {got.number}, {'refused: ' + one.why if one else got}"]
    return [
        f"torn: {view.name} got {what} {short(there)} of {got.number}, not {short(sent)}"
        for what, there, sent in (("text", got.text, one.text), ("key", got.key, one.key))
        if there != sent
    ] + [
        f"torn: {view.name} got the property {name}={got.properties.get(name)!r} of {got.number}, not {value!r}"
        for name, value in one.properties.items()
        if got.properties.get(name) != value
    ]


def _disorder(known: Mapping[int, Sent], view: View) -> list[str]:
    faults, last, seen = [], dict[str, int](), set[int]()
    place = {number: at for at, number in enumerate(known)}
    for got in view.got:
        one = known.get(got.number)
        if one is None or one.free or got.number in seen or got.number in view.lacks:
            continue  # what may be missing may come back: an expiry that a crash forgot
        seen.add(got.number)
        before = last.get(one.key, -1)
        if place[got.number] < place.get(before, -1):
            faults.append(f"disorder: {view.name} got {got.number} of key {one.key!r} after {before}")
        else:
            last[one.key] = got.number
    return faults


def stale(sent: Sequence[Sent], name: str, items: Mapping[str, str]) -> list[str]:
    """Faults of a table: the newest of each key, or one of those whose place is not known."""
    faults = []
    stored = [each for each in sent if each.outcome is Outcome.STORED]
    for key in sorted({*items, *(each.key for each in sent)}):
        of_key = [each for each in stored if each.key == key]
        if not of_key and key in items:
            faults.append(f"phantom: {name} has {key!r}, which was not stored")
        if not of_key:
            continue
        last = next((each.number for each in reversed(of_key) if not each.free), -1)
        allowed = {each.text for each in of_key if each.number == last or each.free}
        allowed |= {each.text for each in sent if each.outcome is Outcome.UNKNOWN and each.key == key}
        if items.get(key) not in allowed:
            faults.append(f"stale: {name} has {short(items.get(key))} at {key!r}, not of {last}")
    return faults


def short(text: str | None) -> str:
    if text is None or len(text) < 40:
        return repr(text)
    return f"{text[:20]!r} and {len(text) - 20} more"
