"""What the clients of a simulation did and saw, and whether a broker may behave like that. Linear time, no I/O.

A value is `producer:number`, unique, numbers rise in the order of sending. Events are appended as they happen:
`send` (before it leaves), `stored` (receipt), `refused` (a definite error: it must not be in the log), `doubtful` (any
other error: it may be), `deliver`, `acknowledge`. `Sub` names a durable subscription, there before the first send.

`check(history)` gives every violation as a sentence that begins with its class:

| class | rule (docs/design/invariants.md) |
|---|---|
| lost | a stored value is delivered on every subscription in the end (38) |
| phantom | nothing is delivered that was never sent |
| aborted | nothing is delivered that was definitely refused |
| identity | one message id, one value, on all subscriptions and receipts (30); a stored value comes under its id |
| order | on an exclusive subscription a producer's values first come in the order of sending (31, 40) |
| regress | receipts of one producer have rising message ids (30) |
| answer | a value is answered at most once |
| doubled | with deduplication a value stands in the log once: it comes under one id (32) |
| early | a value that is delayed does not come before its time on a shared subscription (Pulsar A12) |
| unwanted | nothing comes on a subscription with a filter that the filter does not want |
| reappeared | a value whose acknowledgement was confirmed durable is not delivered again (37) |
"""

from dataclasses import dataclass, field

from magnetar.client.model.message_id import MessageId

Id = tuple[int, int, int]
"""ledger, entry, batch index (-1: not in a batch)."""



def id_of(message_id: MessageId) -> Id:
    return message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()


SOMEWHERE: Id = (-1, -1, -1)
"""Of a value that was stored before, says the broker: by an entry whose receipt was lost."""


@dataclass(frozen=True, slots=True)
class Sub:
    name: str
    exclusive: bool
    filter: str = ""  # the region that it wants; empty: all


@dataclass(slots=True)
class History:
    subscriptions: list[Sub]
    sent: dict[str, int] = field(default_factory=dict)  # value -> position in the order of sending
    stored: dict[str, Id] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    deliveries: dict[str, list[tuple[str, Id, int]]] = field(default_factory=dict)
    regions: dict[str, str] = field(default_factory=dict)  # value -> its region, of those that have one
    due_ms: dict[str, int] = field(default_factory=dict)  # value -> when it may come, of those that are delayed
    acknowledged: dict[str, dict[str, int]] = field(default_factory=dict)  # sub -> value -> deliveries seen by then
    violations: list[str] = field(default_factory=list)
    deduplicated: bool = False

    def __post_init__(self) -> None:
        for subscription in self.subscriptions:
            self.deliveries[subscription.name] = []
            self.acknowledged[subscription.name] = {}

    # ------------------------------------------------------------------ events
    def send(self, value: str, due_ms: int = 0, region: str = "") -> None:
        assert value not in self.sent, f"{value} is sent twice by the test"
        if region:
            self.regions[value] = region
        if due_ms:
            self.due_ms[value] = due_ms
        self.sent[value] = len(self.sent)

    def store(self, value: str, id_: Id) -> None:
        self._answered_once(value)
        self.stored[value] = id_

    def refuse(self, value: str, why: str) -> None:
        self._answered_once(value)
        self.refused[value] = why

    def doubt(self, value: str, why: str) -> None:
        self._answered_once(value)
        self.doubtful[value] = why

    def deliver(
        self, subscription: str, value: str, id_: Id, redeliveries: int = 0, now_ms: int | None = None
    ) -> None:
        """None: nobody knows the time, clocks jump."""
        early_ms = self.due_ms.get(value, 0) - now_ms if now_ms is not None else 0
        wanted = next(each for each in self.subscriptions if each.name == subscription)
        if wanted.filter and self.regions.get(value) != wanted.filter:
            self.violations.append(f"unwanted: {subscription} got {value} at {id_}, of {self.regions.get(value)}")
        if early_ms > 0 and not wanted.exclusive:
            self.violations.append(f"early: {subscription} got {value} at {id_} {early_ms} ms before its time")
        self.deliveries[subscription].append((value, id_, redeliveries))

    def acknowledge_durably(self, subscription: str, value: str) -> None:
        """The broker confirmed that the acknowledgement is durable: from here on the value must not come back."""
        self.acknowledged[subscription].setdefault(value, len(self.deliveries[subscription]))

    def missing(self, subscription: str) -> list[str]:
        """Stored values that were not delivered yet, and that its filter wants, in the order of sending."""
        seen = {value for value, _, _ in self.deliveries[subscription]}
        region = next(each for each in self.subscriptions if each.name == subscription).filter
        return [
            value for value in self.stored
            if value not in seen and (not region or self.regions.get(value) == region)
        ]  # fmt: skip

    def _answered_once(self, value: str) -> None:
        if value in self.stored or value in self.refused or value in self.doubtful:
            self.violations.append(f"answer: {value} was answered twice")


def producer_of(value: str) -> str:
    return value.rpartition(":")[0]


def number_of(value: str) -> int:
    return int(value.rpartition(":")[2])


def check(history: History) -> list[str]:
    """Every violation; empty when the history is one that the broker may produce."""
    found = list(history.violations)
    found += _lost(history)
    found += _phantoms(history)
    found += _identity(history)
    found += _regress(history)
    for subscription in history.subscriptions:
        if subscription.exclusive:
            found += _order(history, subscription.name)
        found += _reappeared(history, subscription.name)
    return found


def _lost(history: History) -> list[str]:
    found = []
    for subscription in history.subscriptions:
        missing = history.missing(subscription.name)
        if missing:
            some = ", ".join(f"{value} {history.stored[value]}" for value in missing[:5])
            count = f"{len(missing)} of {len(history.stored)}"
            found.append(f"lost: {subscription.name} never got {count} stored: {some} …")
    return found


def _phantoms(history: History) -> list[str]:
    found = []
    for name, deliveries in history.deliveries.items():
        for value, id_, _ in deliveries:
            if value not in history.sent:
                found.append(f"phantom: {name} got {value!r} at {id_}, which nobody sent")
            elif value in history.refused:
                found.append(f"aborted: {name} got {value} at {id_}, which was refused: {history.refused[value]}")
    return found


def _identity(history: History) -> list[str]:
    found = []
    value_at: dict[Id, str] = {}
    ids_of: dict[str, set[Id]] = {}
    said = [(value, id_, "a receipt") for value, id_ in history.stored.items()]
    said += [(value, id_, name) for name, seen in history.deliveries.items() for value, id_, _ in seen]
    for value, id_, who in said:
        if id_ == SOMEWHERE:
            continue
        other = value_at.setdefault(id_, value)
        if other != value:
            found.append(f"identity: {id_} is {other} and, says {who}, {value}")
        if who != "a receipt":
            ids_of.setdefault(value, set()).add(id_)
    for value, id_ in history.stored.items():
        if value in ids_of and id_ not in ids_of[value] and id_ != SOMEWHERE:
            found.append(f"identity: {value} was stored at {id_} and came at {sorted(ids_of[value])}")
    if history.deduplicated:
        found += [f"doubled: {value} is in the log at {sorted(ids)}" for value, ids in ids_of.items() if len(ids) > 1]
    return found


def _regress(history: History) -> list[str]:
    found = []
    last: dict[str, tuple[Id, str]] = {}
    for value, id_ in sorted(history.stored.items(), key=lambda item: history.sent.get(item[0], -1)):
        if id_ == SOMEWHERE:
            continue
        before = last.get(producer_of(value))
        if before is not None and id_ <= before[0]:
            found.append(f"regress: {value} was stored at {id_}, after {before[1]} at {before[0]}")
        last[producer_of(value)] = (id_, value)
    return found


def _order(history: History, subscription: str) -> list[str]:
    found = []
    seen: set[str] = set()
    last: dict[str, int] = {}
    for value, id_, _ in history.deliveries[subscription]:
        if value in seen or value not in history.sent:
            continue
        seen.add(value)
        producer, number = producer_of(value), number_of(value)
        if number < last.get(producer, -1):
            found.append(f"order: {subscription} got {value} at {id_} first after {producer}:{last[producer]}")
        last[producer] = max(number, last.get(producer, -1))
    return found


def _reappeared(history: History, subscription: str) -> list[str]:
    found = []
    for position, (value, id_, _) in enumerate(history.deliveries[subscription]):
        confirmed = history.acknowledged[subscription].get(value)
        if confirmed is not None and position >= confirmed:
            found.append(f"reappeared: {subscription} got {value} at {id_} after its acknowledgement was durable")
    return found
