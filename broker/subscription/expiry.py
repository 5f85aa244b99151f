"""Messages with an expiry time of their own (proto/expiry.py): those that have expired are acknowledged instead of
delivered.

    expired = MessageExpirer(subscription)
    expired.acknowledge_expired_messages(entries, now_ms)      before each `Dispatcher.assign_entries`

An entry is judged whenever it would be assigned: after a redelivery, a back-off, a seek or a wait for its key again,
because time has passed. The time is that of the broker's ServerClock (runtime/clock.py), so a clock that jumps for less
than five minutes expires nothing.

- What is outstanding, or held for a back-off or the dead letters, is not judged until it would be assigned again.
- Of a batch, the expired messages are acknowledged by their indexes if every consumer acknowledges by index; else the
  batch is delivered whole as long as one of its messages has neither expired nor is unwanted by the filter
  (filtering.py). The filter judges the batch again, unless the batch takes long to unfold. The SDK drops the others.
- A reader has no cursor on which to acknowledge, so it gets every stored message. So do subscriptions of non-persistent
  topics, whose consumers drop expired messages by themselves.
- **A tombstone does not expire for a subscription that reads the compacted form**: a table that does not get it would
  keep a deleted key. So an entry with expired messages is parsed there, unless that takes long: then its consumer gets
  it, and the SDK drops what has expired.
- Messages that are pending in a transaction are not acknowledged here.
- An expired message counts in the backlog until a consumer's permits let the pump reach it, and storage is freed by
  retention alone.

**A message that went back for another subscription** (`REDRIVEN_TO` in proto/names.py) is acknowledged in the same step
and counts as filtered: it takes no permit, waits for no key and blocks none. Only durable subscriptions drop it. One
that reads the compacted form gets it: it is the newest message of its key, and the older ones are gone. So do readers.

Guarding tests: tests/broker/subscription/test_expiry.py, tests/broker/subscription/test_redriven.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyroaring import BitMap

from ...proto.entry import parse_stored_head
from ...proto.entry_filter import EntryFilter
from ...proto.errors import CorruptEntry
from ...proto.filters import parse_filter
from ...proto.names import parse_redriven_to
from ..log.cache import StoredEntry
from ..log.unfolding import is_entry_slow_to_parse

if TYPE_CHECKING:
    from .subscription import Subscription


_NOTHING = parse_filter("message.size < 0")


class MessageExpirer:
    """Acknowledges the expired messages of one subscription, and those that were sent back for another subscription.
    `count`: the expired messages, and `redriven`: the entries of other subscriptions, since the subscription was
    loaded."""

    __slots__ = ("_subscription", "count", "redriven")

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self.count = 0
        self.redriven = 0

    def acknowledge_expired_messages(self, entries: Sequence[StoredEntry], now_ms: int) -> None:
        """Acknowledges those messages of `entries` that have expired at `now_ms` (ms since the epoch, of the broker's
        clock), or that were sent back for another subscription. Leaves out entries that are outstanding or held
        back."""
        whole, parts, acks = dict[int, list[int]](), 0, self._subscription.acks
        expired = self.count
        for entry in entries:
            if entry.redriven_to and is_of_other_subscription(entry, self._subscription):
                if self._find_free_bits(entry, 1)[0]:
                    whole.setdefault(entry.position[0], []).append(entry.position[1])
                    self.redriven += 1
                continue
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
                if unwanted and self._subscription.filtering is not None:
                    self._subscription.filtering.on_shown_unwanted_acked(unwanted.bit_count())
        if whole or parts:
            acks.ack_unwanted({ledger_id: BitMap(each) for ledger_id, each in whole.items()}, ())
            if self.count != expired:
                self._subscription.activity.expired_ms = now_ms
            self._subscription.skip_entries((), parts=True)

    def _find_expired_bits(self, entry: StoredEntry, now_ms: int) -> tuple[int, int]:
        """Returns the messages of the entry that must be acknowledged, as bits: those that have expired, and those that
        the filter does not want and has left to consumers that get batches whole."""
        assert entry.expiry is not None
        found, unwanted = self._find_free_bits(entry, entry.expiry.find_expired_bits(now_ms))
        if found and self._subscription.reads_compacted and (kept := _without_tombstones(entry, found)) != found:
            return self._find_free_bits(entry, kept)
        return found, unwanted

    def _find_free_bits(self, entry: StoredEntry, bits: int) -> tuple[int, int]:
        """Returns which of the messages `bits` of the entry may be acknowledged, as bits, and which others must be with
        them because the filter does not want them and the consumers get batches whole."""
        dispatcher, cursor = self._subscription.dispatcher, self._subscription.cursor
        if not bits or not dispatcher.tracks or entry.position in dispatcher.held:
            return 0, 0
        if entry.position < dispatcher.read_position and not dispatcher.policy.is_entry_waiting(entry):
            return 0, 0
        if cursor.is_acked_or_pending(entry.position):
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
        return rest

    def _covers_rest(self, entry: StoredEntry, bits: int) -> bool:
        """Returns True if no message of the entry is left when the messages `bits` are acknowledged."""
        return (1 << entry.count) - 1 & ~(bits | self._subscription.cursor.acked_or_pending_bits(entry.position)) == 0


def _without_tombstones(entry: StoredEntry, bits: int) -> int:
    """Returns those of the messages `bits` that have a value; 0 if the entry cannot be looked into at once."""
    data = entry.frames[-1]
    try:
        head = parse_stored_head(data)
    except CorruptEntry:
        return 0  # its consumer reports the damage
    if head.metadata.HasField("num_messages_in_batch") and is_entry_slow_to_parse(head.metadata):
        return 0
    return bits & EntryFilter(_NOTHING, keeps_tombstones=True).find_unwanted_bits(head, data)


def is_of_other_subscription(entry: StoredEntry, subscription: Subscription) -> bool:
    """Returns True if the entry was sent back for another subscription, so that `subscription` must not deliver it.
    Always False if `subscription` is not durable, or reads the compacted form."""
    if not subscription.is_durable or subscription.reads_compacted:
        return False
    return parse_redriven_to(entry.redriven_to, subscription.log.topic) not in ("", subscription.name)
