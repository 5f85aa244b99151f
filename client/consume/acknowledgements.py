"""What the application acknowledges and gives back, gathered from any thread, and how that is said to the broker.

`acknowledge`, `negative_acknowledge` and `taken` append, from any thread; `gather` gives all of it to the consumer's
core (client/core/consumer.py), in the event loop. Guards: tests/client/consume/test_partition_consumer.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

from ...proto import wire_pb2 as wire
from ...proto.names import Position
from ..core.acks import (
    GROUP_MESSAGES,
    WHOLE,
    AckGroup,
    AckTracker,
)
from ..core.consumer import ConsumerCore
from ..core.redelivery import EntrySets, RedeliveryBackoff
from ..model.message import Message, ReceivedEntry
from ..model.message_id import MessageId
from ..model.settings import ConsumerSettings

_LOG = logging.getLogger("magnetar.client")

DELAY_MS_MAX = 1 << 40
"""35 years: more than a timer of any event loop needs, and less than it takes."""
ACK_BYTES = 128 << 10
"""Of one request: a quarter of what a broker takes (runtime/network.py `REQUEST_BYTES_MAX`)."""
Pending = Message | MessageId


class Acknowledging:
    def __init__(self, settings: ConsumerSettings, core: ConsumerCore) -> None:
        self.times_out = bool(settings.unacked_messages_timeout_ms)  # then `taken` is to be told of each message
        self._core = core
        self._longer_ms = partial(delay_ms, settings.ack_timeout_redelivery_backoff, otherwise=0)
        self._acked: deque[Pending] = deque()
        self._nacked: deque[Pending] = deque()
        self._taken: deque[tuple[Position, int]] = deque()

    # ------------------------------------------------------------------------------ from any thread
    def taken(self, message: Message) -> None:
        self._taken.append((message.entry.position, message.entry.redelivery_count))

    def acknowledge(self, which: Pending) -> bool:
        """Whether the event loop is to be woken."""
        self._acked.append(which)
        return self._core.wants_acks or len(self._acked) >= GROUP_MESSAGES

    def negative_acknowledge(self, which: Pending) -> None:
        self._nacked.append(which)

    # ------------------------------------------------------------------------------ in the loop
    def gather(self, now: float) -> None:
        core = self._core
        while self._taken:
            position, count = self._taken.popleft()
            core.watch(position, now, self._longer_ms(count) / 1000)
        if self._acked:
            self._gather_acks()
        while self._nacked:
            which = self._nacked.popleft()
            count = which.entry.redelivery_count if isinstance(which, Message) else 0
            core.give_back(place_of(which)[0], count, now)

    def _gather_acks(self) -> None:
        """The messages of one entry that follow each other are one step."""
        take, core = self._acked.popleft, self._core
        entry: ReceivedEntry | None = None
        bits = messages = 0
        for _ in range(len(self._acked)):
            which = take()
            if isinstance(which, Message) and which.batch_index >= 0:
                if which.entry is not entry:
                    if entry is not None:
                        core.acknowledge_bits(entry.position, bits, messages, entry.size)
                    entry, bits, messages = which.entry, 0, 0
                bits |= 1 << which.batch_index
                messages += 1
            else:
                core.acknowledge(*place_of(which))
        if entry is not None:
            core.acknowledge_bits(entry.position, bits, messages, entry.size)

    def take_over(self, which: Iterable[Pending], *, cumulative: bool) -> AckGroup:
        """What acknowledges these, to be sent by a request of its own."""
        tracker = AckTracker()
        for each in which:
            position, index, size = place_of(each)
            if cumulative:
                tracker.acknowledge_cumulative(position, index, size)
            else:
                tracker.acknowledge(position, index, size)
            self._core.taken_over(position)
        return tracker.take()

    def forget(self) -> None:
        """The cursor is moved: what was acknowledged before says nothing about what comes now."""
        self._acked.clear()


def acks_of(group: AckGroup, request_id: int = 0) -> list[wire.Ack]:
    """The requests, in order; the last of them is answered."""
    acks: list[wire.Ack] = []
    if group.cumulative is not None:
        (ledger_id, entry_id), last = group.cumulative
        entry = wire.AckedEntry(
            ledger_id=ledger_id, entry_id=entry_id, batch_indexes=() if last == WHOLE else (last,)
        )
        acks.append(wire.Ack(kind=wire.Ack.CUMULATIVE, entries=[entry]))
    if group.whole or group.parts:
        parts = [
            wire.AckedEntry(
                ledger_id=ledger_id, entry_id=entry_id, batch_bits=bits.to_bytes((bits.bit_length() + 7) // 8, "little")
            )
            for (ledger_id, entry_id), bits in group.parts.items()
        ]
        acks += _individual(parts, entry_sets(group.whole))
    if acks:
        acks[-1].request_id = request_id
    return acks


def _individual(parts: list[wire.AckedEntry], sets: list[wire.EntrySet]) -> Iterator[wire.Ack]:
    """As many as it takes: a broker refuses requests above REQUEST_BYTES_MAX."""
    ack, size = wire.Ack(kind=wire.Ack.INDIVIDUAL), 0
    every: list[wire.AckedEntry | wire.EntrySet] = [*parts, *sets]
    for each in every:
        more = each.ByteSize() + 8
        if size and size + more > ACK_BYTES:
            yield ack
            ack, size = wire.Ack(kind=wire.Ack.INDIVIDUAL), 0
        if isinstance(each, wire.AckedEntry):
            ack.entries.append(each)
        else:
            ack.ledgers.append(each)
        size += more
    yield ack


def entry_sets(sets: EntrySets) -> list[wire.EntrySet]:
    found = []
    for ledger_id, entries in sets.items():
        entries.run_optimize()
        found.append(wire.EntrySet(ledger_id=ledger_id, entries=entries.serialize()))
    return found


def delay_ms(backoff: RedeliveryBackoff | None, redelivery_count: int, *, otherwise: int) -> int:
    """The application's back-off may raise, or give anything: then it is as if there were none."""
    if backoff is None:
        return otherwise
    try:
        return min(max(0, int(backoff.next(redelivery_count))), DELAY_MS_MAX)
    except Exception:
        _LOG.exception("a redelivery back-off failed")
        return otherwise


def place_of(which: Pending) -> tuple[Position, int, int]:
    if isinstance(which, Message):
        entry = which.entry
        return entry.position, which.batch_index, entry.size
    return which.position(), which.batch_index(), which.batch_size()

