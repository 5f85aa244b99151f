"""The judge of half messages: what programs and operators said of each, what they were told, and what topics show.

A half has a row, as in the database of its program: what is decided of it, or nothing so far. Judged when all has ended
(docs/design/invariants.md; the topics are read by load/transactions.py):

| 95 | a half has one outcome, and it is the one that was told |
| 96 | each message of a half that is committed is shown once, in its topic; of any other half nothing is |
| 98 | a half ends as a program or an operator said, and one that was prepared never ends otherwise, or not at all |

A half whose `prepare` was not answered is never committed: no program has a row for it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from magnetar.client.transactions.halves import Decision
from magnetar.proto.states import TxnId
from tests.simulation.verdict.transactions import Seen


@dataclass(slots=True)
class HalfSeen:
    """One half of the load. `row`: what its program stored about it."""

    key: str
    sent: dict[str, str]  # value → topic
    id: TxnId | None = None  # None: `prepare` was not answered
    row: Decision | None = None
    said: set[Decision] = field(default_factory=set)  # by anyone, whether it arrived or not
    told: set[Decision] = field(default_factory=set)  # how it ended, in answers to its program
    outcome: Decision | None = None  # in the end
    asked: int = 0

    def decide(self, decision: Decision) -> None:
        """Stored, and then said: by the program, an answer to a check, or an operator."""
        self.row = self.row or decision
        self.said.add(decision)


class HalfHistory:
    def __init__(self) -> None:
        self.halves: dict[str, HalfSeen] = {}
        self.parked: set[str] = set()
        self.violations: list[str] = []

    def begin(self, sent: dict[str, str]) -> HalfSeen:
        key = f"h{len(self.halves)}"
        found = self.halves[key] = HalfSeen(key, sent)
        return found

    def check(self, shown: dict[str, list[Seen]]) -> list[str]:
        counts = {topic: Counter(each.value for each in seen) for topic, seen in shown.items()}
        found = list(self.violations)
        for half in self.halves.values():
            found += self._outcome(half)
            found += self._shown(half, counts)
        return found

    def _outcome(self, half: HalfSeen) -> list[str]:
        if half.id is None:
            return []
        name = f"half {half.key} {half.id}"
        if half.outcome is None:
            return [f"98: {name} was prepared, and has no outcome"]
        found = []
        if half.told - {half.outcome}:
            found.append(f"95: {name} was told to be {_names(half.told)}, and is {half.outcome.name}")
        if half.outcome not in half.said:
            found.append(f"98: {name} is {half.outcome.name}, and only {_names(half.said)} was said")
        return found

    def _shown(self, half: HalfSeen, counts: dict[str, Counter[str]]) -> list[str]:
        wanted = 1 if half.outcome is Decision.COMMIT else 0
        is_ = half.outcome.name if half.outcome is not None else "not prepared for its program"
        return [
            f"96: half {half.key} {half.id} is {is_}, and {value} is shown {count[value]} times in {topic}"
            for value, where in half.sent.items() for topic, count in counts.items()
            if count[value] != (wanted if topic == where else 0)
        ]  # fmt: skip


def _names(decisions: Iterable[Decision]) -> list[str]:
    return sorted(each.name for each in decisions)
