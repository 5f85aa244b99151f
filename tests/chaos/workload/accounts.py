"""Judges transfers between accounts: what clients did in transactions, and what every reader of committed data saw.

An account is a topic. A *transfer* sends `-5` to one account and `+5` to another in one transaction, or several such
pairs. A *move* takes messages of an account, sends each to the statement and acknowledges it, in one transaction.

| class | what is wrong |
|---|---|
| LOST | a message of a committed transaction is not shown in the end |
| HALF | of one transaction some messages are shown and others are not |
| ABORTED_SHOWN | a message of an aborted transaction was shown to anybody, at any time |
| DOUBLED | a message is shown twice |
| UNSTABLE | what a reader was shown from the beginning is not what its topic shows in the end, in its order |
| PHANTOM | what nobody sent to this topic is stored or shown |
| CONTRADICTED | a client was told one outcome, and the coordinator tells another |
| SUM | the amounts that are shown do not add up to nothing |
| UNPROCESSED, PROCESSED_TWICE | a message of an account is not in the statement, or more than once |
| GIVEN_AGAIN | the subscription still gives what a committed transaction acknowledged |
| STUCK | a transaction has no outcome |

Of a transaction whose client was told nothing, the coordinator's answer counts. Guarded by test_accounts.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from tests.chaos.workload.history import Id

KEPT_MAX = 20
"""Sentences of one class that are kept; all are counted."""


class Wrong(Enum):
    LOST = "lost"
    HALF = "half"
    ABORTED_SHOWN = "aborted and shown"
    DOUBLED = "doubled"
    UNSTABLE = "unstable"
    PHANTOM = "phantom"
    CONTRADICTED = "contradicted"
    SUM = "sum"
    UNPROCESSED = "unprocessed"
    PROCESSED_TWICE = "processed twice"
    GIVEN_AGAIN = "given again"
    STUCK = "stuck"


@dataclass(slots=True)
class Transaction:
    """`told`: its client was told that it is committed or aborted; None: nothing. `status`: what the coordinator said
    in the end, when it was asked."""

    label: str
    id: str = ""
    told: bool | None = None
    status: bool | None = None
    sent: dict[str, str] = field(default_factory=dict)  # value → topic
    acknowledged: list[tuple[str, Id]] = field(default_factory=list)
    begun: float = 0.0  # wall clock, for who looks for a reason in the logs
    ended: float = 0.0

    @property
    def outcome(self) -> bool | None:
        return self.told if self.told is not None else self.status


@dataclass(slots=True)
class Books:
    """All of a run. A value ends with the label of its transaction."""

    accounts: tuple[str, ...]
    statement: str
    transactions: dict[str, Transaction] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)  # by who was there all the time, in its order
    taken: dict[str, list[str]] = field(default_factory=dict)  # deliveries to movers
    shown: dict[str, list[str]] = field(default_factory=dict)  # in the end, to who reads committed
    stored: dict[str, list[str]] = field(default_factory=dict)  # in the end, to who reads uncommitted
    again: dict[str, list[tuple[Id, str]]] = field(default_factory=dict)  # what the movers' subscription still gives
    processed: set[str] = field(default_factory=set)  # sent to the statement in transactions whose ids nobody knows

    def __post_init__(self) -> None:
        for topic in self.topics:
            for each in (self.seen, self.taken, self.shown, self.stored, self.again):
                each[topic] = []

    @property
    def topics(self) -> tuple[str, ...]:
        return (*self.accounts, self.statement)

    def begin(self, label: str) -> Transaction:
        found = self.transactions[label] = Transaction(label)
        return found


def leg_of(amount: int, label: str) -> str:
    """The value of a message of an account; `label` is unique of its message."""
    return f"{amount:+d} {label}"


def entry_of(account: str, value: str, label: str) -> str:
    """The value of a message of the statement."""
    return f"{account}|{value}|{label}"


def label_of(value: str) -> str:
    """Of the transaction: `teller-0/17`, of which each message has a number after a `#`."""
    return value.replace("|", " ").rpartition(" ")[2].partition("#")[0]


class Verdict:
    def __init__(self) -> None:
        self.counts: Counter[Wrong] = Counter()
        self.sentences: dict[Wrong, list[str]] = defaultdict(list)
        self.acknowledged = 0  # messages of committed transactions
        self.committed = self.aborted = self.untold = 0
        self.delivered = 0
        self.hidden = 0  # that are stored, and never shown

    def add(self, wrong: Wrong, sentence: str) -> None:
        self.counts[wrong] += 1
        if len(self.sentences[wrong]) < KEPT_MAX:
            self.sentences[wrong].append(f"{wrong.value}: {sentence}")

    @property
    def lost(self) -> int:
        return self.counts[Wrong.LOST] + self.counts[Wrong.UNPROCESSED]

    @property
    def duplicated(self) -> int:
        return self.counts[Wrong.DOUBLED] + self.counts[Wrong.PROCESSED_TWICE]

    def __str__(self) -> str:
        return "\n".join(line for lines in self.sentences.values() for line in lines)


def judge(books: Books) -> Verdict:
    verdict = Verdict()
    shown = {topic: Counter(values) for topic, values in books.shown.items()}
    for each in books.transactions.values():
        _of_transaction(each, shown, verdict)
    for topic in books.topics:
        _of_topic(books, topic, verdict)
    total = sum(int(value.partition(" ")[0]) for account in books.accounts for value in books.shown[account])
    if total:
        verdict.add(Wrong.SUM, f"all that is shown adds up to {total}")
    _of_statement(books, verdict)
    for sentence in _given_again(books):
        verdict.add(Wrong.GIVEN_AGAIN, sentence)
    return verdict


def halves(books: Books) -> list[str]:
    """Transfers of which a reader was shown some messages, and not all yet."""
    seen = {(topic, value) for account in books.accounts for topic, value in _with(account, books.seen[account])}
    labels = {label_of(value) for _, value in seen}
    return [
        f"{label}: {value} of {topic} is not shown, and others of it are"
        for label in sorted(labels)
        if (each := books.transactions.get(label)) is not None
        for value, topic in list(each.sent.items())
        if (topic, value) not in seen
    ]


def _with(topic: str, values: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((topic, value) for value in list(values))


def _of_transaction(each: Transaction, shown: dict[str, Counter[str]], verdict: Verdict) -> None:
    name = f"{each.label} {each.id}"
    there = [value for value, topic in each.sent.items() if value in shown[topic]]
    missing = [value for value in each.sent if value not in there]
    if each.told is not None and each.status is not None and each.told is not each.status:
        words = {True: "committed", False: "aborted"}
        verdict.add(Wrong.CONTRADICTED, f"{name} was told to be {words[each.told]}, and is {words[each.status]}")
    if there and missing:
        verdict.add(Wrong.HALF, f"{name}: {there[:3]} are shown, {missing[:3]} are not")
    if each.outcome is True:
        for value in missing:
            verdict.add(Wrong.LOST, f"{name}: {value} of {each.sent[value]} is not shown")
    elif each.outcome is None and each.id:
        verdict.add(Wrong.STUCK, f"{name} has no outcome")
    verdict.acknowledged += len(each.sent) if each.outcome else 0
    verdict.committed += each.outcome is True
    verdict.aborted += each.outcome is False
    verdict.untold += each.told is None


def _of_topic(books: Books, topic: str, verdict: Verdict) -> None:
    end = books.shown[topic]
    for name, values in (
        ("its reader", books.seen[topic]), ("a mover", books.taken[topic]), ("the last reader", end),
        ("who reads uncommitted", books.stored[topic]),
    ):  # fmt: skip
        for value in values:
            each = books.transactions.get(label_of(value))
            if each is None and topic == books.statement and value in books.processed:
                continue
            if each is None or each.sent.get(value) != topic:
                verdict.add(Wrong.PHANTOM, f"{name} got {value} of {topic}, where it was not sent to")
            elif each.outcome is False and name != "who reads uncommitted":
                verdict.add(Wrong.ABORTED_SHOWN, f"{name} got {value} of {topic}, and {each.id} is aborted")
    for value, times in Counter(end).items():
        if times > 1:
            verdict.add(Wrong.DOUBLED, f"{value} is shown {times} times in {topic}")
    seen = books.seen[topic]
    if seen != end:
        at = next((at for at, pair in enumerate(zip(seen, end, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(seen), len(end)) if at is None else at
        verdict.add(
            Wrong.UNSTABLE,
            f"{topic}: its reader saw {seen[at:at + 3]} at {at} of {len(seen)}, in the end there are"
            f" {end[at:at + 3]} of {len(end)}",
        )  # fmt: skip
    verdict.delivered += len(seen) + len(books.taken[topic])
    verdict.hidden += len(books.stored[topic]) - len(end)


def _of_statement(books: Books, verdict: Verdict) -> None:
    entered = Counter(tuple(value.split("|")[:2]) for value in books.shown[books.statement])
    for account in books.accounts:
        for value in books.shown[account]:
            times = entered[account, value]
            if times == 0:
                verdict.add(Wrong.UNPROCESSED, f"{value} of {account} is not in the statement")
            elif times > 1:
                by = [books.transactions.get(label_of(each)) for each in books.shown[books.statement]
                      if each.split("|")[:2] == [account, value]]  # fmt: skip
                verdict.add(Wrong.PROCESSED_TWICE, f"{value} of {account} is {times} times in the statement, by {by}")


def _given_again(books: Books) -> Iterator[str]:
    spent = {where: each for each in books.transactions.values() if each.outcome for where in each.acknowledged}
    for account in books.accounts:
        for id_, value in books.again[account]:
            if (by := spent.get((account, id_))) is not None:
                yield f"{value} at {id_} of {account} comes again, and {by.label} has acknowledged it"
