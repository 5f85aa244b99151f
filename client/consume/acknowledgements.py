"""Acknowledgements and redelivery of one partition: gathered from the application, sent together.

Acknowledging is at least once: acks are grouped (100 ms, 1000), and those not sent when the stream breaks wait for the
next one. Negative acks and acknowledgement time-outs ask for an entry again when their time comes
(client/core/redelivery.py); what was given back does not time out as well. `acknowledge`, `negative_acknowledge` and
`taken` may be called from any thread: they append, and `wake` the event loop when something is due. All else belongs to
the event loop.
Guards: tests/client/consume/test_partition_consumer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from pyroaring import BitMap

from ...proto import wire_pb2 as wire
from ...proto.names import Position
from ..common.guard import Broke, run
from ..core.acks import GROUP_MESSAGES, GROUP_S, WHOLE, AckGroup, AckTracker
from ..core.redelivery import EntrySets, NackTracker, RedeliveryBackoff, RedeliveryTracker
from ..model.message import Message, ReceivedEntry
from ..model.message_id import MessageId
from ..model.settings import ConsumerSettings

_LOG = logging.getLogger("magnetar.client")

UNACKED_TICK_S = 1.0
DELAY_MS_MAX = 1 << 40
"""35 years: more than a timer of any event loop needs, and less than it takes."""
ACK_BYTES = 128 << 10
"""Of one request: a quarter of what a broker takes (runtime/network.py `REQUEST_BYTES_MAX`)."""
Pending = Message | MessageId


class Acknowledging:
    """`send` gives a request to the stream; `connected` says whether there is one."""

    def __init__(
        self, settings: ConsumerSettings, send: Callable[[wire.ConsumeRequest], None], connected: Callable[[], bool],
        broke: Broke, other_places: Callable[[Position], Iterable[Position]] = lambda _: (),
    ) -> None:  # fmt: skip
        self._other_places = other_places  # of a message in several entries
        self._send = send
        self._connected = connected
        self._broke = broke
        self._acks = AckTracker()
        self._settings = settings
        self._nacks = NackTracker()
        timeout_ms = settings.unacked_messages_timeout_ms
        self._unacked = RedeliveryTracker(timeout_ms / 1000, UNACKED_TICK_S) if timeout_ms else None
        self._acked_in: deque[Pending] = deque()
        self._nacked_in: deque[Pending] = deque()
        self._taken_in: deque[tuple[Position, int]] = deque()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._nack_timer: asyncio.TimerHandle | None = None
        self._nack_due_ms = 0  # when that comes
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------------------ from any thread
    @property
    def times_out(self) -> bool:
        """Whether messages that are taken have to be acknowledged in time: then `taken` wants to hear of each."""
        return self._unacked is not None

    def taken(self, message: Message) -> None:
        self._taken_in.append((message.entry.position, message.entry.redelivery_count))

    def acknowledge(self, which: Pending) -> bool:
        """Whether the event loop is to be woken."""
        self._acked_in.append(which)
        return self._ack_timer is None or len(self._acked_in) >= GROUP_MESSAGES

    def negative_acknowledge(self, which: Pending) -> None:
        self._nacked_in.append(which)

    # ------------------------------------------------------------------------------ in the loop
    def attend(self) -> None:
        """Takes all that the application left here; sends what is due and arms timers for the rest."""
        now = self._loop.time()
        if self._unacked is not None:
            longer = self._settings.ack_timeout_redelivery_backoff
            while self._taken_in:
                position, count = self._taken_in.popleft()
                self._unacked.watch(position, now, _delay_ms(longer, count, 0) / 1000)
        self.gather()
        while self._nacked_in:
            self._give_back(self._nacked_in.popleft(), now)
        if self._acks.pending >= GROUP_MESSAGES:
            self.send()
        elif self._acks.pending and self._ack_timer is None:
            self._ack_timer = self._loop.call_later(GROUP_S, run, self._ack_time, self._broke)
        self._arm_tick()
        self._arm_nacks()

    def _give_back(self, which: Pending, now: float) -> None:
        position = _place(which)[0]
        backoff = self._settings.negative_ack_redelivery_backoff
        delay_ms = self._settings.negative_ack_redelivery_delay_ms
        count = which.entry.redelivery_count if isinstance(which, Message) else 0
        self._nacks.watch(position, int(now * 1000) + 1, _delay_ms(backoff, count, delay_ms))
        if self._unacked is not None:
            self._unacked.forget(position)

    def gather(self) -> None:
        """The messages of one entry that follow each other are one step."""
        unacked, nacks = self._unacked, self._nacks
        take, acknowledge = self._acked_in.popleft, self._acks.acknowledge
        entry: ReceivedEntry | None = None
        bits = messages = 0
        for _ in range(len(self._acked_in)):
            which = take()
            if isinstance(which, Message) and which.batch_index >= 0:
                if which.entry is not entry:
                    if entry is not None:
                        self._gathered(entry, bits, messages)
                    entry, bits, messages = which.entry, 0, 0
                bits |= 1 << which.batch_index
                messages += 1
            else:
                position, index, size = _place(which)
                acknowledge(position, index, size)
                if unacked is not None:
                    unacked.forget(position)
                if nacks and (index < 0 or size == 1):
                    nacks.forget(position)
        if entry is not None:
            self._gathered(entry, bits, messages)

    def _gathered(self, entry: ReceivedEntry, bits: int, messages: int) -> None:
        self._acks.acknowledge_bits(entry.position, bits, messages, entry.size)
        if self._unacked is not None:
            self._unacked.forget(entry.position)
        if self._nacks and entry.size == 1:
            self._nacks.forget(entry.position)

    @property
    def pending(self) -> int:
        """Acknowledgements that were gathered and not sent."""
        return self._acks.pending

    def _ack_time(self) -> None:
        self._ack_timer = None
        self.gather()
        self.send()

    def send(self, request_id: int = 0) -> None:
        """Sends all that is gathered, when there is a stream. With a `request_id` the broker answers."""
        if not self._connected() or not self._acks.pending:
            return
        for ack in acks_of(self._acks.take(), request_id):
            self._send(wire.ConsumeRequest(ack=ack))

    def _arm_tick(self) -> None:
        if self._unacked and self._tick_timer is None:
            self._tick_timer = self._loop.call_later(UNACKED_TICK_S, run, self._tick, self._broke)

    def _tick(self) -> None:
        self._tick_timer = None
        if self._unacked is not None:
            due: dict[int, list[int]] = {}
            for place in self._unacked.take(self._loop.time()):
                for ledger_id, entry_id in (place, *self._other_places(place)):
                    due.setdefault(ledger_id, []).append(entry_id)
            self._ask_again({ledger_id: BitMap(entries) for ledger_id, entries in due.items()})
        self._arm_tick()

    def _arm_nacks(self) -> None:
        due_ms = self._nacks.next_ms()
        if due_ms is None or (self._nack_timer is not None and self._nack_due_ms <= due_ms):
            return
        if self._nack_timer is not None:
            self._nack_timer.cancel()
        self._nack_due_ms = due_ms
        self._nack_timer = self._loop.call_at(due_ms / 1000, run, self._nacks_due, self._broke)

    def _nacks_due(self) -> None:
        self._nack_timer = None
        self._ask_again(self._nacks.take(max(self._nack_due_ms, int(self._loop.time() * 1000))))
        self._arm_nacks()

    def _ask_again(self, due: EntrySets) -> None:
        """Without a stream there is nothing to ask for: all that is not acknowledged comes with the next one."""
        if due and self._connected():
            self.gather()
            self.send()
            self._send(wire.ConsumeRequest(redeliver=wire.Redeliver(ledgers=entry_sets(due))))

    def take_over(self, which: Iterable[Pending], *, cumulative: bool) -> AckGroup:
        """What acknowledges these, for somebody who sends it himself and waits for the answer."""
        self.gather()
        tracker = AckTracker()
        for each in which:
            position, index, size = _place(each)
            if cumulative:
                tracker.acknowledge_cumulative(position, index, size)
            else:
                tracker.acknowledge(position, index, size)
            if self._unacked is not None:
                self._unacked.forget(position)
        return tracker.take()

    def acknowledge_cumulative(self, which: Pending) -> None:
        self.gather()
        position, index, size = _place(which)
        self._acks.acknowledge_cumulative(position, index, size)
        if self._nacks and index < 0:
            self._nacks.forget_up_to(position)
        if self._unacked is not None:
            self._unacked.forget_up_to(position)

    def delivered_again(self) -> None:
        """All that was delivered and not acknowledged comes again: none of it is late."""
        if self._unacked is not None:
            self._unacked.clear()

    def forget(self) -> None:
        """The cursor was moved: what was acknowledged or given back before says nothing about what comes now."""
        self._acked_in.clear()
        self._acks.clear()
        self._nacks.clear()

    def forget_acknowledged(self) -> None:
        self._acked_in.clear()
        self._acks.clear()

    def stop(self) -> None:
        for timer in (self._ack_timer, self._tick_timer, self._nack_timer):
            if timer is not None:
                timer.cancel()
        self._ack_timer = self._tick_timer = self._nack_timer = None

    def check(self) -> None:
        self._acks.check()
        self._nacks.check()
        if self._unacked is not None:
            self._unacked.check()


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


def _delay_ms(backoff: RedeliveryBackoff | None, redelivery_count: int, otherwise: int) -> int:
    """The application's back-off may raise, or give anything: then it is as if there were none."""
    if backoff is None:
        return otherwise
    try:
        return min(max(0, int(backoff.next(redelivery_count))), DELAY_MS_MAX)
    except Exception:
        _LOG.exception("a redelivery back-off failed")
        return otherwise


def _place(which: Pending) -> tuple[Position, int, int]:
    if isinstance(which, Message):
        entry = which.entry
        return entry.position, which.batch_index, entry.size
    return which.position(), which.batch_index(), which.batch_size()

