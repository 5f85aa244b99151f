"""The outcome of an entry, told to the callbacks of its messages: in the event loop, all of one entry in a loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import count, repeat
from typing import Any

from ...proto.errors import MagnetarError
from ...proto.names import Position, TopicName
from ..common.errors import Result, translate
from ..common.guard import survived
from ..core.batcher import Batch, Callback
from ..core.effects import InvalidContent, Settle
from ..core.transaction import InTransaction, Part
from ..model.message_id import KnownId, MessageId

_LOG = logging.getLogger("magnetar.client")


def settle(outcome: Settle, topic: TopicName) -> None:
    batch, error, ledger_id, entry_id = outcome
    if error is None:
        confirm(batch, topic.partition, ledger_id, entry_id)
        return
    if isinstance(error, InvalidContent):
        _LOG.error("%s: %s", topic, error.message, exc_info=error.__cause__)
    result, missing = result_of(error), MessageId()
    for callback in batch.callbacks:
        _call(callback, result, missing)


def tell(txn: InTransaction, where: Part, outcome: Settle) -> None:
    """Tells the transaction that an entry belongs to, after the callbacks of its messages."""
    batch, error, ledger_id, entry_id = outcome
    if error is None:
        txn.stored(where, batch.count, Position(ledger_id, entry_id))
    else:
        txn.refused(batch.count, error)


def result_of(error: MagnetarError) -> Result:
    return Result.InvalidMessage if isinstance(error, InvalidContent) else translate(error).result


def confirm(batch: Batch, partition: int, ledger_id: int, entry_id: int) -> None:
    """Tells the callbacks of a batch that it is stored there."""
    ok, size = Result.Ok, len(batch.callbacks)
    indexes = count(0) if batch.message is None and entry_id >= 0 else repeat(-1)
    chunks = () if batch.chunks is None or entry_id < 0 or batch.chunks[0][1] < 0 else tuple(batch.chunks)
    for callback, index in zip(batch.callbacks, indexes, strict=False):
        if callback is not None:
            try:
                callback(ok, KnownId(partition, ledger_id, entry_id, index, size, _chunks=chunks))
            except BaseException as error:  # of the application: the other callbacks, and flushes, go on
                survived(error, "a send callback")


def _call(callback: Callback, *outcome: Any) -> None:
    if callback is not None:
        try:
            callback(*outcome)
        except BaseException as error:
            survived(error, "a send callback")


def wake(waiters: Sequence[asyncio.Future[None]]) -> None:
    """Wakes flushes that have reached their message."""
    for each in waiters:
        if not each.done():
            each.set_result(None)
