"""Names that come back: which life of a topic a message is of, and what may be seen of it. No I/O.

A *life* of a topic begins when its record is durable and ends when that is deleted; the next one has the same name. The
judge learns both from the metadata's commits, and so knows of which life each ledger is. Streams (a consumer, a
reader) and values (`program:number`, unique) tell it what they see. Violations begin with their class:

| class | rule |
|---|---|
| unwanted | a topic, or its subscription, is deleted by a call that began in its life, or that is under way |
| stray | a message is of a ledger that some life of its topic has had |
| former | a stream shows no message of an earlier life after one of a later life, and none before that of its opening |
| unwritten | a value that is sent in a life is stored in none before |
| identity | one position, one value; a value that has a receipt comes from there |
| schema | a value of any life is decoded as it was written, or, when that life is over, not at all |
| lost | of the last life, in the end: each value that was stored in it is there, and came on the subscription |
| doubled | … and is there once (topics are deduplicated) |
| half | … and of a transaction all that was stored in it is there if it was committed, and nothing if it was aborted |
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from magnetar.metadata.records import TopicRecord
from tests.simulation.verdict.history import SOMEWHERE, Id

Spoken = tuple[str, Id]
"""A value, and the position that it came from."""


@dataclass(slots=True)
class Stream:
    """What a consumer or a reader shows, in its order."""

    name: str
    begun: int  # the life when it was opened; -1: there was none yet
    last: int = -1  # the latest life that it showed


@dataclass(slots=True)
class Group:
    """Values of a transaction."""

    values: list[str] = field(default_factory=list)
    outcome: bool | None = None  # committed, aborted; None: not known


class Wanted:
    """Whether the end of what there is now is asked for: by a call that began in its life, or is under way."""

    def __init__(self) -> None:
        self.exists = False
        self._asked = False
        self._under_way = 0

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        self._asked = True
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    def changed(self, exists: bool) -> bool:
        """It is there, or not, from now on. False: it ends, and that was not asked for."""
        begins, ends, self.exists = exists and not self.exists, self.exists and not exists, exists
        if begins:
            self._asked = False
        return not ends or self._asked or self._under_way > 0


class Lives:
    """Of one topic. `note` gets the story."""

    def __init__(self, path: str, note: Callable[[str], None], subscription_path: str = "") -> None:
        self.path = path
        self.wanted = {"topic": Wanted(), "subscription": Wanted()}
        self._paths = {path: "topic", subscription_path: "subscription"}
        self.violations: list[str] = []
        self.life = -1  # the latest; it may be over
        self.over = True
        self.entries: list[int] = []  # by life: values that have a receipt of it
        self._note = note
        self._life_of: dict[int, int] = {}  # by ledger
        self._sent_in: dict[str, int] = {}
        self._stored: dict[str, Id] = {}
        self._at: dict[Id, str] = {}
        self._came: dict[str, set[int]] = {}  # by life, on the subscription
        self.groups: list[Group] = []

    # ------------------------------------------------------------------ the metadata
    def recorded(self, path: str, *, exists: bool) -> None:
        """A record is written or deleted."""
        what = self._paths.get(path)
        if what is not None and not self.wanted[what].changed(exists):
            self._violated(f"unwanted: the {what} of life {self.life} is deleted, and no call asked for it")

    @contextlib.contextmanager
    def deleting(self, what: str) -> Iterator[None]:
        """As long as a call asks for it; a topic goes with its subscriptions."""
        with contextlib.ExitStack() as stack:
            for each in ("topic", "subscription") if what == "topic" else (what,):
                stack.enter_context(self.wanted[each].asked())
            yield

    def committed(self, path: str, record: TopicRecord | None) -> None:
        """A change of a topic's record is durable."""
        if path != self.path:
            return
        if record is None:
            self.over = True
            self._note(f"lives: life {self.life} of {path} ends")
            return
        if self.over:
            self.life += 1
            self.over = False
            self.entries.append(0)
            self._note(f"lives: life {self.life} of {path} begins")
        for each in record.ledgers:
            if self._life_of.setdefault(each.ledger_id, self.life) != self.life:
                self._violated(f"former: life {self.life} has ledger {each.ledger_id} of an earlier one")

    # ------------------------------------------------------------------ what programs say
    def send(self, value: str) -> None:
        self._sent_in[value] = self.life

    def store(self, value: str, id_: Id) -> None:
        """It has a receipt."""
        self._stored[value] = id_
        if id_ == SOMEWHERE:
            return
        life = self._of(id_, f"the receipt of {value}")
        self.entries[life] += 1
        self._is_at(id_, value, "its receipt")
        if life < self._sent_in[value]:
            self._violated(f"unwritten: {value} was sent in life {self._sent_in[value]} and stored in {life}")

    def opened(self, name: str) -> Stream:
        """Before it is asked for."""
        return Stream(name, self.life)

    def show(self, stream: Stream, value: str, id_: Id, *, whole: bool = True) -> None:
        """`whole`: it was decoded as it was written."""
        if value not in self._sent_in:
            self._violated(f"stray: {stream.name} shows {value!r} at {id_}, which was not sent here")
            return
        life = self._of(id_, f"{value} that {stream.name} shows")
        if life < max(stream.last, stream.begun):
            what = f"life {stream.last}" if stream.last >= stream.begun else f"it was opened in life {stream.begun}"
            self._violated(f"former: {stream.name} shows {value} at {id_} of life {life} after {what}")
        stream.last = max(life, stream.last)
        self._is_at(id_, value, stream.name)
        if not whole:
            self._violated(f"schema: {stream.name} decodes {value} at {id_} as something else")
        self._came.setdefault(value, set()).add(life)

    def missing(self) -> list[str]:
        """What was stored in the last life and did not come yet."""
        return [value for value in self._of_the_last() if self.life not in self._came.get(value, ())]

    def end(self, shown: Sequence[Spoken], on_subscription: Sequence[str]) -> None:
        """All that the topic has in the end, and what its subscription did not bring."""
        values = [value for value, _ in shown]
        for value in self._of_the_last():
            if value not in values and not self._may_be_hidden(value):
                self._violated(f"lost: {value}, stored at {self._stored[value]}, is not in life {self.life}")
        self.violations += [f"lost: the subscription did not bring {value}" for value in on_subscription]
        for value in sorted({value for value in values if values.count(value) > 1}):
            places = [id_ for each, id_ in shown if each == value]
            self._violated(f"doubled: {value} is in life {self.life} at {places}")
        for group in self.groups:
            here = [value for value in group.values if self._life_of_value(value) == self.life]
            found = [value for value in here if value in values]
            wanted = {True: (here,), False: ([],), None: (here, [])}[group.outcome]
            if found not in wanted:
                self._violated(f"half: of {here} of life {self.life} {found} are there: {group.outcome}")

    # ------------------------------------------------------------------ what follows
    def _of_the_last(self) -> list[str]:
        """Values that must be there: their receipt is of the last life, or only says so and they were sent in it."""
        return [
            value for value, id_ in self._stored.items()
            if (self._sent_in[value] == self.life if id_ == SOMEWHERE else self._life_of.get(id_[0]) == self.life)
            and not self._may_be_hidden(value)
        ]  # fmt: skip

    def _may_be_hidden(self, value: str) -> bool:
        return any(value in group.values and group.outcome is not True for group in self.groups)

    def _life_of_value(self, value: str) -> int:
        return self._life_of.get(self._stored.get(value, SOMEWHERE)[0], -1)

    def _of(self, id_: Id, what: str) -> int:
        life = self._life_of.get(id_[0])
        if life is None:
            self._violated(f"stray: {what} is of ledger {id_[0]}, which no life has had")
            return self.life
        return life

    def _is_at(self, id_: Id, value: str, who: str) -> None:
        other = self._at.setdefault(id_, value)
        if other != value:
            self._violated(f"identity: {id_} is {other} and, says {who}, {value}")
        known = self._stored.get(value, id_)
        if known not in (id_, SOMEWHERE) and self._life_of.get(known[0]) == self._life_of.get(id_[0]):
            self._violated(f"identity: {value} was stored at {known} and came from {id_}, says {who}")

    def _violated(self, text: str) -> None:
        self._note(f"VIOLATION {text}")
        self.violations.append(text)
