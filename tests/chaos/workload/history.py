"""What clients saw of a cluster, one record after the other: the input of tests/chaos/workload/judge.py.

A `Recorder` is shared by all threads of a run; the place of a record in its list is its time. An intent is recorded
before it is sent, an outcome after it is known, so a record before another one happened before it.
`SendFailed` is only for what is definitely not stored; anything doubtful is `SendUnknown`. A message's value is
`value_of` its producer and number: no two sends share one.
"""

import threading
from enum import Enum
from typing import NamedTuple

Id = tuple[int, int, int]
"""Ledger, entry, place in the batch: grows along a topic's log."""


class Order(Enum):
    """What a subscription promises of its first deliveries. HELD: and nothing of a key comes before what was refused
    before it."""

    NONE = "shared"
    KEY = "key_shared"
    HELD = "key_shared, redelivery_order=key"
    ALL = "exclusive or failover"


class Send(NamedTuple):
    topic: str
    producer: str
    seq: int
    key: str
    value: str


class SendOk(NamedTuple):
    topic: str
    producer: str
    seq: int
    id: Id


class SendFailed(NamedTuple):
    topic: str
    producer: str
    seq: int


class SendUnknown(NamedTuple):
    topic: str
    producer: str
    seq: int


class Subscribed(NamedTuple):
    """The subscription exists, and sees the topic from its beginning. Before its first delivery."""

    topic: str
    subscription: str
    order: Order
    every: int = 1  # its filter wants each message whose number is a multiple of this one


class Connected(NamedTuple):
    """A new consumer: what it is given was dispatched after this. Recorded before it is opened."""

    topic: str
    subscription: str
    consumer: str


class Disturbed(NamedTuple):
    """Connections may have been lost: what was delivered and not acknowledged may come again."""

    noticed: bool = False
    """By a consumer: what it had fetched over that connection it takes after this."""


class Delivered(NamedTuple):
    topic: str
    subscription: str
    consumer: str
    id: Id
    value: str
    redelivery: int


class AckSent(NamedTuple):
    topic: str
    subscription: str
    id: Id


class Acked(NamedTuple):
    """`durable`: with a receipt, so that it is never delivered again; else it may be."""

    topic: str
    subscription: str
    id: Id
    durable: bool


class AckUnknown(NamedTuple):
    topic: str
    subscription: str
    id: Id


class Nacked(NamedTuple):
    topic: str
    subscription: str
    id: Id


class Sought(NamedTuple):
    """The subscription begins again at a place: everything from there is delivered again, and what is before is not."""

    topic: str
    subscription: str
    id: Id


class Drained(NamedTuple):
    """After the last send: the subscription gave until nothing more came. What it never gave was skipped."""

    topic: str
    subscription: str


class Read(NamedTuple):
    """The log as it is at the end, in its order, from a reader at its beginning. At least one for a topic."""

    topic: str
    id: Id
    value: str


class ReadToEnd(NamedTuple):
    """All that the topic holds has been `Read`; without it nothing can be called lost."""

    topic: str


OfSubscription = Connected | Delivered | AckSent | Acked | AckUnknown | Nacked | Sought | Drained
Record = Send | SendOk | SendFailed | SendUnknown | Subscribed | OfSubscription | Disturbed | Read | ReadToEnd


class Recorder:
    """Appends from many threads; the lock gives all of them one order."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._lock = threading.Lock()

    def __call__(self, record: Record) -> None:
        with self._lock:
            self.records.append(record)


def value_of(topic: str, producer: str, seq: int) -> str:
    """A payload of its own for each send, with filling that depends on all of it, so that mixed-up bytes are seen."""
    found = seq * 2654435761 & 0xFFFFFFFF
    for character in f"{topic}/{producer}":
        found = (found ^ ord(character)) * 16777619 & 0xFFFFFFFF
    return f"{topic}:{producer}:{seq}:" + f"{found:08x}" * 8
