"""Defects of subscriptions: patches of the dispatcher, the cursor and the index of delays."""

import asyncio
from collections.abc import Iterable

from pyroaring import BitMap

from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.delays import DelayIndex
from magnetar.broker.subscription.core.dispatch import Dispatcher
from magnetar.broker.subscription.subscription import Subscription
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import Position
from tests.mutants.ledgers import Stack, put


def freed_twice(stack: Stack) -> None:
    """M66: what an abort gives back waits for the next consumer although one has it already."""

    def freed(self: Dispatcher, positions: Iterable[Position]) -> None:
        self.add_released_entries([each for each in positions if each not in self.held])

    put(stack, Dispatcher, "add_entries_of_aborted_acks", freed)


def persisted_mark_is_safe(stack: Stack) -> None:
    """M69: after a seek backwards, and before it is stored, what it wants again is trimmed."""
    put(stack, Cursor, "durable_trim_mark", property(lambda self: self.persisted_mark))


def acknowledged_is_due_again(stack: Stack) -> None:
    """M99: after a restart what was delayed and is acknowledged beyond the mark is held again, and comes again."""

    def add(self: DelayIndex, ledger_id: int, entries: BitMap) -> bool:
        acked, self.cursor.acked = self.cursor.acked, {}
        try:
            return honest(self, ledger_id, entries)
        finally:
            self.cursor.acked = acked

    honest = DelayIndex._add
    put(stack, DelayIndex, "_add", add)


def last_acks_do_not_count(stack: Stack) -> None:
    """M39b: what a consumer acknowledged before it learned that its topic moves counts only if it came before."""
    honest = Subscription.stop_delivery_for_move

    def begin(self: Subscription, error: MagnetarError) -> list[asyncio.Future[None]]:
        honest(self, error)
        return []

    put(stack, Subscription, "stop_delivery_for_move", begin)
