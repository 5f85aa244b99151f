"""The interface of the dispatcher and its policies: entries, consumers, and the reasons why no consumer gets anything.

A policy is made of `SubscriptionOptions`. It decides which consumer may join and which may get an entry, and keeps what
waits. The dispatcher (broker/subscription/core/dispatch.py) notifies it of each entry's fate, as it happens:
    pick → outstanding, or it waits        released: done, or held back        returned: it waits (again)
    done, done_set, done_up_to, forget: it waits no more
`Blocked` is the list of reasons why no consumer gets the next message: what `topics stats` shows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple, Protocol

import msgspec
from pyroaring import BitMap

from ....proto.names import Position
from ....proto.states import Blocked
from ...common.config import BrokerConfig

AT_THE_END = (Blocked.DELAYED, Blocked.HELD, Blocked.CAUGHT_UP)
"""Reasons that nothing can be read now. An acknowledgement frees nothing: what comes next wakes the subscription by
itself."""


class Entry(Protocol):
    """An entry, as the dispatcher sees it."""

    @property
    def position(self) -> Position: ...
    @property
    def count(self) -> int:
        """Returns the number of messages in it."""
        ...

    @property
    def size(self) -> int: ...
    @property
    def deliver_at_ms(self) -> int:
        """Returns the time of day (ms since the epoch) before which no consumer gets it; 0: at once."""
        ...

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of its keys (proto/routing.py `sticky_slot`), that of the first message first. For Key_Shared."""
        ...

    @property
    def chunk_of(self) -> str:
        """The message that it is a chunk of; empty: it is none. For Shared."""
        ...

    @property
    def is_continued(self) -> bool:
        """Whether it is a chunk of a message, and not the last one."""
        ...


class Waiting(Protocol):
    """The entries that were returned and are to be handed out again. `entries`: how many; asked for each entry that is
    handed out."""

    @property
    def entries(self) -> int: ...


class PolicyOptions:
    """The options of a consumer for the policy, besides the type. A policy that has options reads a class of its own.
    """

    __slots__ = ()

    @property
    def keeps_order(self) -> bool:
        """Whether it leaves the order as the type keeps it."""
        return True

    def check(self) -> None:
        """Raises InvalidRequest if no policy could grant it."""


NO_OPTIONS = PolicyOptions()
UNSHOWN_MAX = 1000
"""Batches that were shown in part, from which on those up to the mark are forgotten."""
DEFAULT_CONFIG = BrokerConfig()


class SubscriptionOptions(msgspec.Struct, frozen=True):
    """The values that a policy is made of: the topic, what the first consumer asks for, and the broker's settings."""

    topic: str = ""
    partition: int = -1  # -1: the topic has none
    asked: PolicyOptions = NO_OPTIONS
    config: BrokerConfig = DEFAULT_CONFIG


class Unshown(NamedTuple):
    """Messages of a batch, as bits, and how many it has."""

    bits: int
    size: int


NONE_UNSHOWN = Unshown(0, 0)


class Member(msgspec.Struct, eq=False):
    """A consumer of the subscription, as the dispatcher sees it."""

    id: int
    name: str
    priority: int = 0
    many_topics: bool = False  # its subscription covers several topics
    options: PolicyOptions = NO_OPTIONS
    ordered: bool = False  # what it gives back holds back what follows it
    permits: int = 0  # granted, less what was charged: `Dispatcher.check`
    granted: int = 0
    paused: bool = False  # its connection does not take more at the moment
    blocked: bool = False  # it holds as many messages as it may
    outstanding: dict[Position, int] = msgspec.field(default_factory=dict)  # position → messages, in order of delivery
    unacked: int = 0  # messages in `outstanding`
    unshown: dict[Position, Unshown] = msgspec.field(default_factory=dict)  # batches that were pending in part
    reordered: bool = False  # an entry in `outstanding` may be after a later one
    delivered_messages: int = 0
    delivered_bytes: int = 0
    redelivered_messages: int = 0

    @property
    def able(self) -> bool:
        """Whether it can take an entry now. (The policies ask this for each entry, so they spell it out.)"""
        return self.permits > 0 and not self.paused and not self.blocked

    def note_unshown(self, position: Position, bits: int, size: int, mark: Position) -> None:
        """Notes messages of a batch that the consumer is not shown: its acknowledgement of the whole entry does not
        mean them."""
        if len(self.unshown) >= UNSHOWN_MAX:
            self.unshown = {each: kept for each, kept in self.unshown.items() if each > mark}
        self.unshown[position] = Unshown(bits, size)

    def held_up_to(self, mark: Position) -> list[Position]:
        held: list[Position] = []
        for position in self.outstanding:
            if position <= mark:
                held.append(position)
            elif not self.reordered:
                break  # delivered in log order: all that follow are later
        return held


class Draining(NamedTuple):
    """A slot whose owner has changed and which waits for its outstanding entries."""

    slot: int
    outstanding_entries: int
    blocked_attempts: int


class Keys(NamedTuple):
    """The spread of the slots of the keys over the consumers."""

    mode: str
    out_of_order: bool
    drained_total: int
    draining: list[Draining]
    ranges: list[tuple[int, int, Member]]  # (first slot, last slot, owner), in order


class Statistics(NamedTuple):
    """The part of a subscription's statistics that its policy adds."""

    active: Member | None = None
    keys: Keys | None = None


class ActiveChanged(NamedTuple):
    """The consumer became the one that gets the entries, or is it no longer."""

    member: Member
    active: bool


class Policy(Protocol):
    """The policy of a subscription type: which consumer may join and which may get an entry. One per subscription;
    registered by type (subscription_types.py).

    It keeps what waits: entries that were given back, and those that it let wait itself.
    """

    individual: ClassVar[bool]
    """Whether entries are acknowledged one by one, and the limits of unacknowledged messages apply."""

    keeps_order: ClassVar[bool]
    """Whether entries go out in an order, of all or of each key."""

    by_keys: ClassVar[bool]
    """Whether `pick` asks for `Entry.slots`: they are found before, outside the event loop when that is long."""

    def __init__(self, options: SubscriptionOptions) -> None: ...
    def differs(self, newcomer: Member) -> str | None:
        """Returns how the options of the consumer contradict those of the others; None: they agree."""
        ...

    def why_refused(self, newcomer: Member) -> str | None:
        """Returns why the consumer may not join; None: it may."""
        ...

    def add_member(self, member: Member) -> Member | None:
        """Returns the consumer that is deposed by that: what it holds goes back."""
        ...

    def remove_member(self, member: Member) -> None:
        """Removes a consumer that left. What it held went back before."""
        ...

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked | None:
        """Returns the consumer that gets the entry; it is outstanding there. None: it waits with the policy; the next
        one may go out."""
        ...

    def on_released(self, positions: Sequence[Position]) -> None:
        """Takes entries that are outstanding no more, and do not wait: they are done, or held back."""
        ...

    def on_returned(self, position: Position) -> None:
        """Takes an entry that is outstanding no more (or never was), and waits."""
        ...

    def on_entry_failed(self, position: Position, outstanding: Collection[Position]) -> Sequence[Position]:
        """Notes that an outstanding entry failed, and is about to be given back: until `on_recovered`, nothing that
        follows it, in the order that the policy keeps, goes out. Returns those outstanding that follow it."""
        ...

    def on_recovered(self, position: Position) -> None:
        """Notes that a failed entry is done."""
        ...

    def holds_back(self, position: Position) -> bool:
        """Whether everything from there on follows one that failed."""
        ...

    def is_waiting(self, entry: Entry) -> bool: ...
    def next_ready(self, count: int) -> Sequence[Position]:
        """Returns waiting entries that could go out now, in log order, so many at most."""
        ...

    def discard(self, position: Position) -> None:
        """Notes that an entry waits no more, if it did: it is acknowledged, or no longer in the log."""
        ...

    def done_set(self, ledger_id: int, entries: BitMap) -> None: ...
    def done_up_to(self, mark: Position) -> None: ...
    def rebalance(self, count: int) -> bool:
        """Does, after a join or a leave, some of the work that it causes. False: there is more, and it is done before
        the next entry goes out, all at once if need be."""
        ...

    def clear(self) -> None:
        """Forgets everything: nothing waits and nothing is outstanding any more."""
        ...

    @property
    def takers(self) -> Collection[Member]:
        """Returns the members of whom one may get the next entry."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether no more may wait: nothing new is read."""
        ...

    @property
    def waiting(self) -> Waiting: ...
    @property
    def unread_entries(self) -> int:
        """Returns how many of those that wait are to be read before it is known what they wait for."""
        ...

    def events(self) -> Sequence[ActiveChanged]:
        """Returns the events that consumers are to be notified of, since the last call."""
        ...

    def statistics(self) -> Statistics: ...
    def check(self, outstanding: set[Position]) -> None: ...
