"""The interface of the dispatcher and its policies: entries, consumers, and the reasons why no consumer gets anything.

A policy is made of `SubscriptionOptions`. It decides which consumer may join and which may get an entry, and keeps what
waits. The dispatcher (broker/subscription/core/dispatch.py) notifies it of each entry's fate, as it happens:
    pick → outstanding, or it waits     on_released: done, or held back     on_returned: it waits (again)
    discard, discard_set, discard_up_to: it waits no more
`Blocked` is the list of reasons why no consumer gets the next message: what `topics stats` shows.

The filters that keep an entry that was read from the policy, in this order; and the runs of chunks of a message
(`Chunk`, `ChunkRun`). A new reason is a new filter.

| filter | catches |
|---|---|
| `_acknowledged` | what is acknowledged |
| `_pending` | what is acknowledged in an open transaction |
| `_held_back` | what waits for its back-off, or for the dead letters |
| `_delayed` | what is known to have a later delivery time |

What has a later delivery time that is not known yet `assign` holds itself, after all of these. The dispatcher asks for
the filters once for each `assign`: those that can catch anything in it.
Guarding test: tests/broker/subscription/core/test_dispatch_walk.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import msgspec
from pyroaring import BitMap

from ....proto.names import Position
from ....proto.states import Blocked
from ...common.config import BrokerConfig
from .cursor import Cursor
from .delays import DelayIndex
from .redelivery_backoff import BackoffQueue

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


class SkipReason(enum.Enum):
    """The reason why the policy does not get an entry that was read."""

    PASSED = "it is outstanding, or done"
    NOT_ITS_TURN = "another entry comes first: it is read again"
    ACKNOWLEDGED = "it is acknowledged"
    PENDING = "it is acknowledged in an open transaction"
    HELD_BACK = "it comes when its back-off has passed, or goes to the dead letters"
    NOT_DUE = "it comes when it is due"


Filter = Callable[[Entry, bool], SkipReason | None]
"""(entry, whether it waited with the policy) → why the policy does not get it; None: it does."""


def filters_of(
    cursor: Cursor, policy: Policy, held: BackoffQueue, delays: DelayIndex | None, first: Position, new: Position
) -> list[Filter]:
    """Returns the filters for entries from position `first` on. `new`: the read position; entries from there on cannot
    wait for redelivery. `delays`: None if the subscription type does not delay."""
    filters: list[Filter] = []
    if cursor.partial or first < new or first <= cursor.last_hole:
        filters.append(partial(_acknowledged, cursor, policy))
    if cursor.pending is not None:
        filters.append(partial(_pending, cursor, policy))
    if held.until:
        filters.append(partial(_held_back, held))
    if delays is not None and delays.count:
        filters.append(partial(_delayed, delays))
    return filters


def _acknowledged(cursor: Cursor, policy: Policy, entry: Entry, waited: bool) -> SkipReason | None:
    position = entry.position
    if cursor.partial:
        cursor.set_batch_size_if_unknown(position, entry.count)
    if position > cursor.mark and not (cursor.acked and cursor.is_acked(position)):
        return None
    if waited:
        policy.discard(position)
    return SkipReason.ACKNOWLEDGED


def _pending(cursor: Cursor, policy: Policy, entry: Entry, waited: bool) -> SkipReason | None:
    position = entry.position
    cursor.set_batch_size_if_unknown(position, entry.count)
    if not cursor.is_done(position):
        return None
    if waited:
        policy.discard(position)
    return SkipReason.PENDING


def _held_back(held: BackoffQueue, entry: Entry, waited: bool) -> SkipReason | None:
    return SkipReason.HELD_BACK if not waited and entry.position in held else None


def _delayed(delays: DelayIndex, entry: Entry, waited: bool) -> SkipReason | None:
    return SkipReason.NOT_DUE if not waited and delays.is_delayed(entry.position) else None


# ---------------------------------------------------------------------------------------------------- chunk_runs
# The runs of a message's chunks in the log: which of them make it whole.
#
# All chunks of a message have its uuid. A producer publishes them in order, and without a receipt again, from any chunk
# on: 0 1 0 1 2. It may publish the whole message twice: 0 1 2 0 1 2. A *run* is what a consumer puts together: it
# begins at chunk 0, takes the next chunk when it comes, passes over one that it has, and ends with the last chunk. A
# chunk after a gap, and one without a beginning, is in no run that is whole. Guarding test:
# tests/broker/subscription/core/test_chunk_runs.py.


class Chunk(NamedTuple):
    """A chunk in the log: its position, its number, and the number of chunks of its message (`of`)."""

    position: Position
    number: int
    of: int


class ChunkRun(NamedTuple):
    """A run of chunks. `chunks`: the position of each chunk, in order; `places`: those, and the entries that repeat a
    chunk; `whole`: no chunk is missing."""

    chunks: Sequence[Position]
    places: Sequence[Position]
    whole: bool


def chunk_runs_of(found: Iterable[Chunk]) -> list[ChunkRun]:
    """Returns the runs, in order; `found` must be all entries with one uuid, in log order."""
    runs: list[ChunkRun] = []
    chunks: list[Position] = []
    places: list[Position] = []
    for position, number, of in found:
        if number > len(chunks) or number < 0:
            runs += [ChunkRun(tuple(chunks), tuple(places), False)] if places else []
            runs.append(ChunkRun((), (position,), False))
            chunks, places = [], []
            continue
        places.append(position)
        if number == len(chunks):
            chunks.append(position)
        if len(chunks) == of:
            runs.append(ChunkRun(tuple(chunks), tuple(places), True))
            chunks, places = [], []
    if places:
        runs.append(ChunkRun(tuple(chunks), tuple(places), False))
    return runs


def chunk_run_at(found: Iterable[Chunk], position: Position) -> tuple[ChunkRun, bool]:
    """Returns the run that contains the entry at `position`, and whether that is the last run. `found` must be as for
    `chunk_runs_of`."""
    runs = chunk_runs_of(found)
    at = next(number for number, run in enumerate(runs) if position in run.places)
    return runs[at], at == len(runs) - 1
