"""The interface of the dispatcher and its policies: entries, consumers, and the reasons why no consumer gets anything.

A policy is made of `SubscriptionOptions`. It decides which consumer may join and which may get an entry, and stores the
waiting entries. The dispatcher (broker/subscription/core/dispatch.py) notifies it of what happens to each entry:
    choose_member → outstanding, or it waits     on_entries_released: done, or held back
    on_entry_returned: it waits (again)
    discard, discard_entries_of_ledger, discard_up_to: it no longer waits
`Blocked` has the reasons why no consumer gets the next message; `topics stats` shows them.

Also in this file: the runs of chunks of a message (`MessageChunk`, `MessageChunkRun`), and the filters that keep an
entry that was read from the policy, in this order. A new reason is a new filter.

| filter | catches |
|---|---|
| `_acknowledged` | what is acknowledged |
| `_pending` | what is acknowledged in an open transaction |
| `_held_back` | what waits for its back-off, or for the dead letters |
| `_delayed` | what is known to have a later delivery time |

After these filters, `Dispatcher.assign_entries` itself holds back entries with a later delivery time that was not known
yet. The dispatcher makes the filters once for each call of `assign_entries`: those that can catch any of its entries.
Guarding test: tests/broker/subscription/core/test_dispatch_walk.py.

Also in this file, below its heading: the limits of each key of a fair Shared subscription (key_limits).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import ClassVar, NamedTuple, Protocol

import msgspec
from pyroaring import BitMap

from ....proto.names import FAIR_BY_KEY, FAIR_IN_FLIGHT, FAIR_RATE, Position, parse_number
from ....proto.states import Blocked
from ...common.config import BrokerConfig
from ...common.refusals import SubscribeRefusal
from .cursor import Cursor
from .delays import DelayIndex
from .redelivery_backoff import BackoffQueue

CAUGHT_UP_REASONS = (Blocked.DELAYED, Blocked.HELD, Blocked.CAUGHT_UP)
"""Reasons which mean that there is no entry to read now. An acknowledgement does not change that; the next entry wakes
the subscription by itself."""


class DispatcherEntry(Protocol):
    """A stored entry, as the dispatcher and the policies see it. `StoredEntry` (broker/log/cache.py) implements it."""

    @property
    def position(self) -> Position:
        """The position of the entry in the log."""
        ...

    @property
    def count(self) -> int:
        """The number of messages in the entry."""
        ...

    @property
    def size(self) -> int:
        """The bytes of the entry."""
        ...

    @property
    def deliver_at_ms(self) -> int:
        """The delivery time of the entry (ms since the epoch), before which no consumer may get it. 0: the entry may be
        delivered at once."""
        ...

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots to which the keys of the entry's messages are hashed (proto/names.py `compute_key_slot`); the slot
        of the first message is first. Empty if no message has a key. Used if the policy is `by_keys`."""
        ...

    @property
    def chunk_of(self) -> str:
        """The uuid of the large message to which this chunk belongs; empty if the entry is not a chunk."""
        ...

    @property
    def has_more_chunks(self) -> bool:
        """True if the entry is a chunk of a large message, but not its last chunk."""
        ...


class WaitingEntries(Protocol):
    """The entries that wait for delivery with a policy. The policy implements it, and the dispatcher reads `entries`,
    their number. It is an attribute because it is read for each entry that is delivered."""

    @property
    def entries(self) -> int: ...


class PolicyOptions:
    """The options of a consumer that only one subscription type has. A policy that has such options defines a
    subclass."""

    __slots__ = ()

    @property
    def is_order_guaranteed(self) -> bool:
        """True if the consumer gets messages in the order that its subscription type guarantees by default; False if it
        allows delivery out of order."""
        return True

    def check(self) -> None:
        """Raises InvalidRequest if no subscription type supports this combination of options."""


NO_POLICY_OPTIONS = PolicyOptions()
HIDDEN_BATCHES_MAX = 1000
"""Most batches that were shown in part; when there are more, those up to the mark are dropped."""
DEFAULT_BROKER_CONFIG = BrokerConfig()


class SubscriptionOptions(msgspec.Struct, frozen=True):
    """The arguments from which a subscription type creates its policy: the full name of the topic and its partition,
    the options of the first consumer (`asked`), the settings of the broker, and the limits of keys."""

    topic: str = ""
    partition: int = -1  # -1: the topic has none
    asked: PolicyOptions = NO_POLICY_OPTIONS
    config: BrokerConfig = DEFAULT_BROKER_CONFIG
    key_limits: KeyLimits | None = None  # None: the keys do not take turns


class HiddenMessages(NamedTuple):
    """The messages of a batch that a consumer did not get. `bits`: which messages (bit i: message i); `size`: the
    number of messages in the batch."""

    bits: int
    size: int


NO_HIDDEN_MESSAGES = HiddenMessages(0, 0)


class Member(msgspec.Struct, eq=False):
    """The state of one consumer in the dispatcher of its subscription: its permits, its outstanding entries, and
    counters."""

    id: int
    name: str
    priority: int = 0
    many_topics: bool = False  # its subscription covers several topics
    options: PolicyOptions = NO_POLICY_OPTIONS
    ordered: bool = False  # what it gives back holds back what follows it
    acks_by_index: bool = True  # False: it acknowledges whole entries alone, and is shown whole ones
    permits: int = 0  # granted, less what was charged: `Dispatcher.check`
    granted: int = 0
    paused: bool = False  # its connection does not take more at the moment
    blocked: bool = False  # it holds as many messages as it may
    outstanding: dict[Position, int] = msgspec.field(default_factory=dict)  # position → messages, in order of delivery
    unacked: int = 0  # messages in `outstanding`
    unshown: dict[Position, HiddenMessages] = msgspec.field(default_factory=dict)  # batches that were pending in part
    must_restart: bool = False  # an abort freed entries before some that it got, and it has not asked for all again
    reordered: bool = False  # an entry in `outstanding` may be after a later one
    delivered_messages: int = 0
    delivered_bytes: int = 0
    redelivered_messages: int = 0

    @property
    def may_receive(self) -> bool:
        """True if the consumer can get an entry now: it has permits, and is neither paused nor blocked. (The policies
        check this for each entry, so they repeat the expression instead of calling this property.)"""
        return self.permits > 0 and not self.paused and not self.blocked

    def add_hidden_messages(self, position: Position, bits: int, size: int, mark: Position) -> None:
        """Stores that the consumer does not get the messages `bits` (bit i: message i) of a batch of `size` messages.
        If the consumer acknowledges the whole entry later, these messages are not acknowledged by that. If
        HIDDEN_BATCHES_MAX batches are stored, removes those up to `mark` first."""
        if len(self.unshown) >= HIDDEN_BATCHES_MAX:
            self.unshown = {each: kept for each, kept in self.unshown.items() if each > mark}
        self.unshown[position] = HiddenMessages(bits, size)

    def outstanding_entries_up_to(self, mark: Position) -> list[Position]:
        """Returns the positions of the entries up to and including `mark` that are outstanding at this consumer."""
        held: list[Position] = []
        for position in self.outstanding:
            if position <= mark:
                held.append(position)
            elif not self.reordered:
                break  # delivered in log order: all that follow are later
        return held


class SlotInHandover(NamedTuple):
    """A slot of keys that has a new owner, while entries are outstanding at the old owner. The entries that wait in the
    slot are delivered when these are done. `blocked_attempts`: how many entries came meanwhile and wait."""

    slot: int
    outstanding_entries: int
    blocked_attempts: int


class HeldSlot(NamedTuple):
    """A slot of keys in which other entries wait until its oldest outstanding entry is acknowledged. `holder`: the
    consumer at which that entry is outstanding."""

    slot: int
    holder: Member
    oldest: Position  # the first delivered of its outstanding entries
    since_s: float  # when it was first seen to be the oldest: at most one look after its delivery
    following_entries: int  # of the slot: outstanding at the holder after it, or not delivered yet


class SlotDistribution(NamedTuple):
    """How a Key_Shared subscription distributes the slots of keys over its consumers; part of its statistics. `mode`:
    AUTO_SPLIT or STICKY; `drained_total`: how many handovers of a slot have ended."""

    mode: str
    out_of_order: bool
    drained_total: int
    draining: list[SlotInHandover]
    ranges: list[tuple[int, int, Member]]  # (first slot, last slot, owner), in order


class PolicyStatistics(NamedTuple):
    """The statistics that only one subscription type has. `active`: the active consumer of Failover; `keys`: the
    distribution of keys of Key_Shared. None for other types."""

    active: Member | None = None
    keys: SlotDistribution | None = None


class ActiveConsumerChanged(NamedTuple):
    """The event that a consumer has become the active consumer of its subscription (`active`), or is no longer the
    active one."""

    member: Member
    active: bool


class DispatchPolicy(Protocol):
    """The rules of a subscription type. A policy decides which consumer may join, and which consumer gets an entry.
    Each subscription has a policy, which its dispatcher calls; subscription_types.py registers the policies by type.

    A policy also stores which entries wait: those that were given back, and those for which `choose_member` returned
    None.
    """

    individual: ClassVar[bool]
    """Whether entries are acknowledged one by one, and the limits of unacknowledged messages apply."""

    is_order_guaranteed: ClassVar[bool]
    """Whether entries are delivered in order: all of them, or those of each key."""

    by_keys: ClassVar[bool]
    """Whether `choose_member` asks for `DispatcherEntry.slots`: they are found before, outside the event loop when
    that is long."""

    busy: ClassVar[Blocked]
    """Why none of the entries that wait with the policy may go, when consumers have permits."""

    def __init__(self, options: SubscriptionOptions) -> None: ...
    def why_incompatible(self, newcomer: Member) -> str | None:
        """Returns why the options of the consumer `newcomer` contradict the options of the connected consumers; None if
        they do not."""
        ...

    def why_refused(self, newcomer: Member) -> str | None:
        """Returns why the consumer `newcomer` may not join the subscription; None if it may join."""
        ...

    def add_member(self, member: Member) -> Member | None:
        """Adds a consumer. Returns the former active consumer, if the new one takes its place: then the caller gives
        back the outstanding entries of the former one. Else returns None."""
        ...

    def remove_member(self, member: Member) -> None:
        """Removes a consumer that left. Its outstanding entries must have been given back before."""
        ...

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked | None:
        """Chooses the consumer that gets the entry, and returns it; the entry then counts as outstanding at this
        consumer. Returns None if the policy stores the entry as waiting, so that the caller may continue with the next
        entry. Otherwise returns the reason why no entry may be assigned now, and stores nothing. `waited`: the entry
        was waiting with the policy before."""
        ...

    def on_entries_released(self, positions: Sequence[Position]) -> None:
        """Called when entries are no longer outstanding, and do not wait for redelivery now: they are acknowledged, or
        wait for the end of a back-off."""
        ...

    def on_entry_returned(self, position: Position) -> None:
        """Called when an entry is no longer outstanding (or never was), and waits for delivery from now on."""
        ...

    def on_entry_failed(self, position: Position, outstanding: Collection[Position]) -> Sequence[Position]:
        """Called when an outstanding entry has failed and is about to be given back. Until `on_failed_entry_done` is
        called, no entry is assigned that follows this one in the order that the policy guarantees. Returns those of the
        `outstanding` entries that follow it."""
        ...

    def on_failed_entry_done(self, position: Position) -> None:
        """Called when a failed entry is acknowledged: it no longer holds back the entries that follow it."""
        ...

    def is_held_back_by_failure(self, position: Position) -> bool:
        """Returns True if neither the entry at `position` nor any entry after it may be assigned, because an earlier
        entry has failed."""
        ...

    def is_entry_waiting(self, entry: DispatcherEntry) -> bool:
        """Returns True if the entry waits in the policy for a consumer."""
        ...

    def next_ready_entries(self, count: int) -> Sequence[Position]:
        """Returns up to `count` of the waiting entries that could be delivered now, in log order."""
        ...

    def discard(self, position: Position) -> None:
        """Called when an entry is acknowledged, or is no longer in the log: removes it from the waiting entries."""
        ...

    def discard_entries_of_ledger(self, ledger_id: int, entries: BitMap) -> None:
        """Called when many entries of one ledger are acknowledged: removes them from the waiting entries."""
        ...

    def discard_up_to(self, mark: Position) -> None:
        """Called when all entries up to and including `mark` are acknowledged: removes them from the waiting
        entries."""
        ...

    def rebalance_slots(self, count: int) -> bool:
        """Checks up to `count` of the slots whose owner may have changed, because a consumer joined or left. Returns
        False if more slots must be checked; the next entry must not be assigned before that is done."""
        ...

    def clear(self) -> None:
        """Removes all entries from the policy. No entry waits or is outstanding after that."""
        ...

    @property
    def candidates(self) -> Collection[Member]:
        """The consumers to which the policy may give entries: the active consumer, or all consumers."""
        ...

    @property
    def is_full(self) -> bool:
        """True if the policy cannot store more waiting entries. Then no new entries are read."""
        ...

    @property
    def waiting(self) -> WaitingEntries:
        """The entries that wait with the policy."""
        ...

    @property
    def waiting_entries_to_read(self) -> int:
        """How many waiting entries must be read before it is known which consumer gets them."""
        ...

    @property
    def is_looking_ahead(self) -> bool:
        """True if new entries must be read and stored as waiting before a waiting entry is delivered."""
        ...

    @property
    def paced(self) -> bool:
        """True if waiting entries may become deliverable by the passing of time alone. The pump then calls
        `advance_clock`."""
        ...

    def advance_clock(self, now: float) -> None:
        """Sets the time to `now` (monotonic seconds). Called before entries are chosen, if the policy is `paced`."""
        ...

    def next_release_s(self) -> float:
        """Returns the seconds until waiting entries become deliverable by the passing of time alone; 0 if none will."""
        ...

    def on_entries_passed_over(self, count: int) -> None:
        """Called when `count` new entries were read that no consumer gets, because the filter of the subscription does
        not want them."""
        ...

    def take_active_changes(self) -> Sequence[ActiveConsumerChanged]:
        """Returns which consumers have become the active one since the last call, and which no longer are. The caller
        must notify these consumers."""
        ...

    def find_held_slots(self, now_s: float) -> Sequence[HeldSlot]:
        """Returns the slots of keys in which entries wait until the oldest outstanding one is acknowledged, the longest
        held first. `now_s`: monotonic seconds. The more often the method is called, the more exact is
        `HeldSlot.since_s`."""
        ...

    def statistics(self) -> PolicyStatistics:
        """Returns the statistics that only this subscription type has."""
        ...

    def check(self, outstanding: set[Position]) -> None:
        """Raises AssertionError if an invariant of the policy is broken. `outstanding`: the outstanding entries of all
        consumers."""
        ...


class EntrySkipReason(enum.Enum):
    """The reasons why an entry that was read is not delivered now."""

    PASSED = "it is outstanding, or done"
    NOT_ITS_TURN = "another entry comes first: it is read again"
    ACKNOWLEDGED = "it is acknowledged"
    PENDING = "it is acknowledged in an open transaction"
    HELD_BACK = "it comes when its back-off has passed, or goes to the dead letters"
    NOT_DUE = "it comes when it is due"


SkipEntryFilter = Callable[[DispatcherEntry, bool], EntrySkipReason | None]
"""(entry, whether it waited with the policy) → why the policy does not get it; None: it does."""


def make_delivery_filters(
    cursor: Cursor,
    policy: DispatchPolicy,
    held: BackoffQueue,
    delays: DelayIndex | None,
    first: Position,
    new: Position,
) -> list[SkipEntryFilter]:
    """Returns the filters that can reject an entry at or after the position `first`. A filter is a function that
    returns the reason why an entry must not be delivered now, or None. `new`: the read position; only entries before it
    can wait for redelivery. `delays`: None if the subscription type does not delay messages."""
    filters: list[SkipEntryFilter] = []
    if cursor.partial or first < new or first <= cursor.last_hole_position:
        filters.append(partial(_acknowledged, cursor, policy))
    if cursor.pending is not None:
        filters.append(partial(_pending, cursor, policy))
    if held.until:
        filters.append(partial(_held_back, held))
    if delays is not None and delays.count:
        filters.append(partial(_delayed, delays))
    return filters


def _acknowledged(
    cursor: Cursor, policy: DispatchPolicy, entry: DispatcherEntry, waited: bool
) -> EntrySkipReason | None:
    position = entry.position
    if cursor.partial:
        cursor.set_batch_size(position, entry.count)
    if position > cursor.mark and not (cursor.acked and cursor.is_acked(position)):
        return None
    if waited:
        policy.discard(position)
    return EntrySkipReason.ACKNOWLEDGED


def _pending(cursor: Cursor, policy: DispatchPolicy, entry: DispatcherEntry, waited: bool) -> EntrySkipReason | None:
    position = entry.position
    cursor.set_batch_size(position, entry.count)
    if not cursor.is_acked_or_pending(position):
        return None
    if waited:
        policy.discard(position)
    return EntrySkipReason.PENDING


def _held_back(held: BackoffQueue, entry: DispatcherEntry, waited: bool) -> EntrySkipReason | None:
    return EntrySkipReason.HELD_BACK if not waited and entry.position in held else None


def _delayed(delays: DelayIndex, entry: DispatcherEntry, waited: bool) -> EntrySkipReason | None:
    return EntrySkipReason.NOT_DUE if not waited and delays.is_delayed(entry.position) else None


# ---------------------------------------------------------------------------------------------------- chunk_runs
# The runs of a message's chunks in the log: which of them make it whole.
#
# All chunks of a message have its uuid. A producer publishes them in order, and without a receipt again, from any chunk
# on: 0 1 0 1 2. It may publish the whole message twice: 0 1 2 0 1 2. A *run* is what a consumer puts together: it
# begins at chunk 0, takes the next chunk when it comes, passes over one that it has, and ends with the last chunk. A
# chunk after a gap, and one without a beginning, is in no run that is whole. Guarding test:
# tests/broker/subscription/core/test_chunk_runs.py.


class MessageChunk(NamedTuple):
    """A chunk of a large message: its position in the log, its number (`number`, from 0), and the number of chunks of
    the message (`of`)."""

    position: Position
    number: int
    of: int


class MessageChunkRun(NamedTuple):
    """Consecutive chunks in the log from which a consumer makes one message. `chunks`: the positions of these chunks,
    in order; `places`: the same positions, and those of repeated chunks; `whole`: True if no chunk is missing."""

    chunks: Sequence[Position]
    places: Sequence[Position]
    whole: bool


def find_chunk_runs(found: Iterable[MessageChunk]) -> list[MessageChunkRun]:
    """Divides the chunks `found` into runs, each of which is one copy of the message, complete or not. Returns the runs
    in log order. `found`: all chunks with the same message uuid, in log order."""
    runs: list[MessageChunkRun] = []
    chunks: list[Position] = []
    places: list[Position] = []
    for position, number, of in found:
        if number > len(chunks) or number < 0:
            runs += [MessageChunkRun(tuple(chunks), tuple(places), False)] if places else []
            runs.append(MessageChunkRun((), (position,), False))
            chunks, places = [], []
            continue
        places.append(position)
        if number == len(chunks):
            chunks.append(position)
        if len(chunks) == of:
            runs.append(MessageChunkRun(tuple(chunks), tuple(places), True))
            chunks, places = [], []
    if places:
        runs.append(MessageChunkRun(tuple(chunks), tuple(places), False))
    return runs


def find_chunk_run_at(found: Iterable[MessageChunk], position: Position) -> tuple[MessageChunkRun, bool]:
    """Returns (the run of chunks that contains the entry at `position`, whether it is the last run). `found`: all
    chunks with the same message uuid, in log order; one of them must be at `position`."""
    runs = find_chunk_runs(found)
    at = next(number for number, run in enumerate(runs) if position in run.places)
    return runs[at], at == len(runs) - 1


# ----------------------------------------------------------------------------------------------------------- key_limits
# The limits of each key of a fair Shared subscription (core/fair_shared.py), as its properties name them.
#
# They are stored with the subscription, and set by `subscribe(fair_by_key=True, …)`, over REST or on the command line
# like all properties of a subscription. Guarding test: tests/broker/subscription/core/test_fair_shared.py.

KEY_LIMIT_MAX = 1_000_000_000
"""Largest limit of a key: more than any subscription delivers."""


class KeyLimits(msgspec.Struct, frozen=True):
    """The limits of each key of a fair subscription; 0: no limit. `max_in_flight`: unacknowledged messages; `rate`:
    messages per second."""

    max_in_flight: int = 0
    rate: float = 0.0


def parse_key_limits(properties: Mapping[str, str]) -> KeyLimits | None:
    """Returns the limits of keys in the properties of a subscription; None if the subscription is not fair by key. A
    value that does not parse counts as no limit; `check_fair_properties` refuses it before it is stored."""
    if properties.get(FAIR_BY_KEY) != "true":
        return None
    rate = 0.0
    with suppress(ValueError):
        rate = float(properties.get(FAIR_RATE, "0"))
    in_flight = parse_number(properties.get(FAIR_IN_FLIGHT, "0")) or 0
    return KeyLimits(min(in_flight, KEY_LIMIT_MAX), rate if 0 < rate <= KEY_LIMIT_MAX else 0.0)


def check_fair_properties(properties: Mapping[str, str]) -> None:
    """Raises InvalidRequest if the properties of a subscription name limits of keys that do not parse or are above
    KEY_LIMIT_MAX, or limits without fair.by-key."""
    refuse = SubscribeRefusal.PROPERTIES.error
    by_key = properties.get(FAIR_BY_KEY, "false")
    if by_key not in ("true", "false"):
        raise refuse(f"{FAIR_BY_KEY} is true or false, not {by_key[:40]!r}")
    in_flight, rate = properties.get(FAIR_IN_FLIGHT), properties.get(FAIR_RATE)
    if by_key == "false" and (in_flight is not None or rate is not None):
        raise refuse(f"{FAIR_IN_FLIGHT} and {FAIR_RATE} need {FAIR_BY_KEY}=true")
    if in_flight is not None and not 0 < (parse_number(in_flight) or 0) <= KEY_LIMIT_MAX:
        raise refuse(f"{FAIR_IN_FLIGHT} is a whole number from 1 to {KEY_LIMIT_MAX}, not {in_flight[:40]!r}")
    if rate is not None and not _is_rate(rate):
        raise refuse(f"{FAIR_RATE} is messages per second, above 0 and at most {KEY_LIMIT_MAX}, not {rate[:40]!r}")


def _is_rate(text: str) -> bool:
    try:
        rate = float(text)
    except ValueError:
        return False
    return isfinite(rate) and 0 < rate <= KEY_LIMIT_MAX
