"""The interface of the dispatcher and its policies: entries, consumers, and the reasons why no consumer gets anything.

A policy is made of `SubscriptionOptions`. It decides which consumer may join and which may get an entry, and keeps what
waits. The dispatcher (broker/subscription/core/dispatch.py) notifies it of each entry's fate, as it happens:
    pick → outstanding, or it waits     on_released: done, or held back     on_returned: it waits (again)
    discard, discard_set, discard_up_to: it waits no more
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
        """Returns the number of messages in the entry."""
        ...

    @property
    def size(self) -> int: ...
    @property
    def deliver_at_ms(self) -> int:
        """Returns the delivery time (ms since the epoch). No consumer receives the entry before it. 0: the entry has no
        delivery time."""
        ...

    @property
    def slots(self) -> tuple[int, ...]:
        """Returns the slots of the keys of the entry's messages (proto/names.py `sticky_slot`), that of the first
        message first. For Key_Shared."""
        ...

    @property
    def chunk_of(self) -> str:
        """Returns the uuid of the message of which the entry is a chunk; empty if it is no chunk. For Shared."""
        ...

    @property
    def has_more_chunks(self) -> bool:
        """Returns True if the entry is a chunk of a message, and not its last one."""
        ...


class WaitingEntries(Protocol):
    """The entries that wait with a policy. `entries`: how many; it is read for each entry that is handed out."""

    @property
    def entries(self) -> int: ...


class PolicyOptions:
    """The options of a consumer that only its subscription type knows. A policy that has options defines a subclass."""

    __slots__ = ()

    @property
    def keeps_order(self) -> bool:
        """Returns True if messages are delivered in the order that the subscription type guarantees by default."""
        return True

    def check(self) -> None:
        """Raises InvalidRequest if no policy supports this combination of options."""


NO_OPTIONS = PolicyOptions()
UNSHOWN_MAX = 1000
"""Most batches that were shown in part; when there are more, those up to the mark are dropped."""
DEFAULT_CONFIG = BrokerConfig()


class SubscriptionOptions(msgspec.Struct, frozen=True):
    """The arguments of a policy: the topic, the options of the first consumer, and the broker's settings."""

    topic: str = ""
    partition: int = -1  # -1: the topic has none
    asked: PolicyOptions = NO_OPTIONS
    config: BrokerConfig = DEFAULT_CONFIG


class HiddenMessages(NamedTuple):
    """The messages of a batch that a consumer did not get, as bits, and the number of messages of the batch."""

    bits: int
    size: int


NONE_UNSHOWN = HiddenMessages(0, 0)


class Member(msgspec.Struct, eq=False):
    """A consumer of the subscription: its state in the dispatcher."""

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
    unshown: dict[Position, HiddenMessages] = msgspec.field(default_factory=dict)  # batches that were pending in part
    reordered: bool = False  # an entry in `outstanding` may be after a later one
    delivered_messages: int = 0
    delivered_bytes: int = 0
    redelivered_messages: int = 0

    @property
    def may_receive(self) -> bool:
        """Returns True if the consumer can get an entry now. (The policies check this for each entry, so they repeat
        its expression instead of calling it.)"""
        return self.permits > 0 and not self.paused and not self.blocked

    def add_hidden(self, position: Position, bits: int, size: int, mark: Position) -> None:
        """Records the messages of a batch that the consumer does not get. When it acknowledges the whole entry, these
        are left out."""
        if len(self.unshown) >= UNSHOWN_MAX:
            self.unshown = {each: kept for each, kept in self.unshown.items() if each > mark}
        self.unshown[position] = HiddenMessages(bits, size)

    def outstanding_up_to(self, mark: Position) -> list[Position]:
        """Returns the positions of the consumer's outstanding entries up to and with `mark`."""
        held: list[Position] = []
        for position in self.outstanding:
            if position <= mark:
                held.append(position)
            elif not self.reordered:
                break  # delivered in log order: all that follow are later
        return held


class SlotInHandover(NamedTuple):
    """A slot whose owner has changed, and whose entries wait until nothing is outstanding at the old owner."""

    slot: int
    outstanding_entries: int
    blocked_attempts: int


class SlotDistribution(NamedTuple):
    """How a Key_Shared subscription distributes the slots of keys over its consumers, for statistics."""

    mode: str
    out_of_order: bool
    drained_total: int
    draining: list[SlotInHandover]
    ranges: list[tuple[int, int, Member]]  # (first slot, last slot, owner), in order


class PolicyStatistics(NamedTuple):
    """The part of a subscription's statistics that its policy adds."""

    active: Member | None = None
    keys: SlotDistribution | None = None


class ActiveChanged(NamedTuple):
    """An event: `member` became the active consumer, or is no longer the active one."""

    member: Member
    active: bool


class Policy(Protocol):
    """The policy of a subscription type: decides which consumer may join, and which one gets an entry. One per
    subscription; registered by type (subscription_types.py).

    It stores the positions of the entries that wait: those that were given back, and those for which `pick` returned
    None."""

    individual: ClassVar[bool]
    """Whether entries are acknowledged one by one, and the limits of unacknowledged messages apply."""

    keeps_order: ClassVar[bool]
    """Whether entries go out in an order, of all or of each key."""

    by_keys: ClassVar[bool]
    """Whether `pick` asks for `Entry.slots`: they are found before, outside the event loop when that is long."""

    def __init__(self, options: SubscriptionOptions) -> None: ...
    def why_incompatible(self, newcomer: Member) -> str | None:
        """Returns why the options of `newcomer` contradict those of the connected consumers; None if they agree."""
        ...

    def why_refused(self, newcomer: Member) -> str | None:
        """Returns why the consumer may not join; None if it may."""
        ...

    def add_member(self, member: Member) -> Member | None:
        """Adds a consumer. Returns the consumer that was active before and is no longer, if any: the caller gives its
        outstanding entries back."""
        ...

    def remove_member(self, member: Member) -> None:
        """Removes a consumer that left. Its outstanding entries must have been given back before."""
        ...

    def pick(self, entry: Entry, waited: bool) -> Member | Blocked | None:
        """Chooses the consumer for the entry and returns it; the entry then counts as outstanding at that consumer.
        Returns None if the policy keeps the entry waiting, so that the caller may go on with the next entry. Else
        returns the reason why no entry may be assigned now. `waited`: whether the entry was waiting with the policy."""
        ...

    def on_released(self, positions: Sequence[Position]) -> None:
        """Called when entries are no longer outstanding and do not wait for redelivery: they are acknowledged, or held
        back."""
        ...

    def on_returned(self, position: Position) -> None:
        """Called when an entry is outstanding no more (or never was), and waits from now on."""
        ...

    def on_entry_failed(self, position: Position, outstanding: Collection[Position]) -> Sequence[Position]:
        """Called when an outstanding entry failed and is about to be given back: until `on_recovered`, no entry is
        assigned that follows it in the order that the policy guarantees. Returns the outstanding entries that follow
        it."""
        ...

    def on_recovered(self, position: Position) -> None:
        """Called when an entry that failed is done: it no longer holds back the entries that follow it."""
        ...

    def is_held_back(self, position: Position) -> bool:
        """Returns True if each entry from `position` on follows an entry that failed, and so may not be assigned."""
        ...

    def is_waiting(self, entry: Entry) -> bool: ...
    def next_ready(self, count: int) -> Sequence[Position]:
        """Returns waiting entries that could go out now, in log order, `count` at most."""
        ...

    def discard(self, position: Position) -> None:
        """Called when an entry is acknowledged, or no longer in the log: it waits no more."""
        ...

    def discard_set(self, ledger_id: int, entries: BitMap) -> None: ...
    def discard_up_to(self, mark: Position) -> None: ...
    def rebalance(self, count: int) -> bool:
        """Checks `count` slots whose owner a join or a leave may have changed. Returns False if there are more; all of
        them must be checked before the next entry is assigned."""
        ...

    def clear(self) -> None:
        """Drops everything: nothing waits and nothing is outstanding any more."""
        ...

    @property
    def candidates(self) -> Collection[Member]:
        """Returns the members that are candidates for the next entry."""
        ...

    @property
    def is_full(self) -> bool:
        """Returns True if no more entries may wait: nothing new is read then."""
        ...

    @property
    def waiting(self) -> WaitingEntries: ...
    @property
    def unread_entries(self) -> int:
        """Returns the number of waiting entries that must be read before their consumer is known."""
        ...

    def take_events(self) -> Sequence[ActiveChanged]:
        """Returns the changes of the active consumer since the last call, of which the caller notifies consumers."""
        ...

    def statistics(self) -> PolicyStatistics: ...
    def check(self, outstanding: set[Position]) -> None: ...
