"""Acknowledgements and redelivery of one partition: gathered from the application, sent together.

Acknowledging is at least once: acks are grouped (100 ms, 1000), and those not sent when the stream breaks wait for the
next one. Negative acks and acknowledgement time-outs ask for an entry again when their time comes
(client/core/redelivery.py). `acknowledge`, `negative_acknowledge` and `taken` may be called from any thread: they
append, and `wake` the event loop when something is due. All else belongs to the event loop.
Guards: tests/client/test_partition_consumer.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ..proto import wire_pb2 as wire
from ..proto.names import Position
from .core.acks import GROUP_MESSAGES, GROUP_S, AckedEntry, AckTracker
from .core.redelivery import RedeliveryTracker
from .message import Message
from .message_id import MessageId
from .settings import ConsumerSettings

NACK_TICK_S = 0.25
UNACKED_TICK_S = 1.0
Pending = Message | MessageId


class Acknowledging:
    """`send` gives a request to the stream; `connected` says whether there is one."""

    def __init__(
        self, settings: ConsumerSettings, send: Callable[[wire.ConsumeRequest], None], connected: Callable[[], bool]
    ) -> None:
        self._send = send
        self._connected = connected
        self._acks = AckTracker()
        self._nacks = RedeliveryTracker(settings.negative_ack_redelivery_delay_ms / 1000, NACK_TICK_S)
        timeout_ms = settings.unacked_messages_timeout_ms
        self._unacked = RedeliveryTracker(timeout_ms / 1000, UNACKED_TICK_S) if timeout_ms else None
        self._acked_in: deque[Pending] = deque()
        self._nacked_in: deque[Pending] = deque()
        self._taken_in: deque[Position] = deque()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------------------ from any thread
    @property
    def times_out(self) -> bool:
        """Whether messages that are taken have to be acknowledged in time: then `taken` wants to hear of each."""
        return self._unacked is not None

    def taken(self, position: Position) -> None:
        self._taken_in.append(position)

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
            while self._taken_in:
                self._unacked.watch(self._taken_in.popleft(), now)
        self.gather()
        while self._nacked_in:
            self._nacks.watch(_place(self._nacked_in.popleft())[0], now)
        if self._acks.pending >= GROUP_MESSAGES:
            self.send()
        elif self._acks.pending and self._ack_timer is None:
            self._ack_timer = self._loop.call_later(GROUP_S, self._ack_time)
        self._arm_tick()

    def gather(self) -> None:
        acked, tracker, unacked, nacks = self._acked_in, self._acks, self._unacked, self._nacks
        for _ in range(len(acked)):
            position, index, size = _place(acked.popleft())
            tracker.acknowledge(position, index, size)
            if unacked is not None:
                unacked.forget(position)
            if nacks and index < 0:
                nacks.forget(position)

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
        group = self._acks.take()
        if group.cumulative is not None:
            self._send_ack(wire.Ack.CUMULATIVE, [group.cumulative], 0 if group.individual else request_id)
        if group.individual:
            self._send_ack(wire.Ack.INDIVIDUAL, group.individual, request_id)

    def _send_ack(self, kind: Any, entries: list[AckedEntry], request_id: int) -> None:
        ack = wire.Ack(kind=kind, request_id=request_id)
        for entry in entries:
            ack.entries.add(
                ledger_id=entry.position.ledger_id, entry_id=entry.position.entry_id, batch_indexes=entry.indexes
            )
        self._send(wire.ConsumeRequest(ack=ack))

    def _arm_tick(self) -> None:
        tick_s = NACK_TICK_S if self._nacks else UNACKED_TICK_S if self._unacked else 0.0
        if tick_s and self._tick_timer is None:
            self._tick_timer = self._loop.call_later(tick_s, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        now = self._loop.time()
        due = self._nacks.take(now)
        if self._unacked is not None:
            due += self._unacked.take(now)
        if due and self._connected():
            self.gather()
            self.send()
            request = wire.Redeliver()
            for position in due:
                request.entries.add(ledger_id=position.ledger_id, entry_id=position.entry_id)
            self._send(wire.ConsumeRequest(redeliver=request))
        self._arm_tick()

    def acknowledge_cumulative(self, which: Pending) -> None:
        self.gather()
        position, index, size = _place(which)
        self._acks.acknowledge_cumulative(position, index, size)
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
        for timer in (self._ack_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        self._ack_timer = self._tick_timer = None

    def check(self) -> None:
        self._acks.check()
        self._nacks.check()
        if self._unacked is not None:
            self._unacked.check()


def _place(which: Pending) -> tuple[Position, int, int]:
    if isinstance(which, Message):
        entry = which.entry
        return entry.position, which.batch_index, entry.size
    return which.position(), which.batch_index(), which.batch_size()

