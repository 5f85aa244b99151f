"""Messages with a time of their own (proto/expiry.py): those that have expired are acknowledged, and not delivered.

    expired = ExpiredMessages(subscription);  expired.acknowledge(entries, now_ms)      before each `Dispatcher.assign`

An entry is judged whenever it would be assigned: after a redelivery, a back-off, a seek or a wait for its key again,
because time has passed. The time is that of the broker's ServerClock (runtime/clock.py), so a clock that jumps for less
than five minutes expires nothing.

- What is outstanding, or held for a back-off or the dead letters, is not judged until it would be assigned again.
- Of a batch, the expired messages are acknowledged by their indexes if every consumer acknowledges by index; else the
  batch is delivered whole as long as one of its messages has neither expired nor is unwanted by the filter
  (filtering.py), which is asked again; of a batch that takes long to unfold it is not. The SDK drops the others.
- A reader has no cursor to acknowledge on: it gets what is stored. So do subscriptions of non-persistent topics, whose
  consumers drop by themselves.
- Messages that are pending in a transaction are left to it.
- An expired message counts in the backlog until a consumer's permits let the pump reach it, and storage is freed by
  retention alone.

Guarding tests: tests/broker/subscription/test_expiry.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyroaring import BitMap

from ..log.cache import StoredEntry

if TYPE_CHECKING:
    from .subscription import Subscription


class ExpiredMessages:
    """Acknowledges the expired messages of one subscription. `count`: how many, since the subscription was loaded."""

    __slots__ = ("_subscription", "count")

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self.count = 0

    def acknowledge(self, entries: Sequence[StoredEntry], now_ms: int) -> None:
        """Acknowledges those messages of `entries` that have expired at `now_ms` (ms since the epoch, of the broker),
        if their entry is neither outstanding nor held back."""
        whole, parts, acks = dict[int, list[int]](), 0, self._subscription.acks
        for entry in entries:
            if entry.expiry is None:
                continue
            entry.expiry.told_ms = now_ms
            bits, unwanted = self._find_expired_bits(entry, now_ms)
            if bits:
                if (bits | unwanted).bit_count() == entry.count:
                    whole.setdefault(entry.position[0], []).append(entry.position[1])
                else:
                    acks.ack_messages(entry.position, bits | unwanted, entry.count)
                    parts += 1
                self.count += bits.bit_count()
        if whole or parts:
            acks.ack_unwanted({ledger_id: BitMap(each) for ledger_id, each in whole.items()}, ())
            self._subscription.activity.expired_ms = now_ms
            self._subscription.skip_entries((), parts=True)

    def _find_expired_bits(self, entry: StoredEntry, now_ms: int) -> tuple[int, int]:
        """Returns the messages of the entry that must be acknowledged, as bits: those that have expired, and those that
        the filter does not want and has left to consumers that get batches whole."""
        assert entry.expiry is not None
        bits, dispatcher, cursor = entry.expiry.find_expired_bits(now_ms), self._subscription.dispatcher, (
            self._subscription.cursor
        )
        if not bits or not dispatcher.tracks or entry.position in dispatcher.held:
            return 0, 0
        if entry.position < dispatcher.read_position and not dispatcher.policy.is_entry_waiting(entry):
            return 0, 0
        if cursor.is_done(entry.position):
            return 0, 0
        bits &= ~cursor.acked_or_pending_bits(entry.position)
        if self._covers_rest(entry, bits) or self._subscription.acknowledges_by_index:
            return bits, 0
        unwanted = self._find_unwanted_rest(entry, bits)
        return (bits, unwanted) if unwanted and bits else (0, 0)

    def _find_unwanted_rest(self, entry: StoredEntry, bits: int) -> int:
        """Returns what is left of the entry without the messages `bits`, as bits, if the filter wants none of it; else
        0."""
        filtering = self._subscription.filtering
        if filtering is None:
            return 0
        rest = (1 << entry.count) - 1 & ~(bits | self._subscription.cursor.acked_or_pending_bits(entry.position))
        if rest & ~filtering.find_unwanted_if_quick(entry):
            return 0
        filtering.on_shown_unwanted_acked(rest.bit_count())
        return rest

    def _covers_rest(self, entry: StoredEntry, bits: int) -> bool:
        """Returns True if no message of the entry is left when the messages `bits` are acknowledged."""
        return (1 << entry.count) - 1 & ~(bits | self._subscription.cursor.acked_or_pending_bits(entry.position)) == 0
