"""The replay of a load: one pass over the headers of the log, for deduplication and for transactions.

It begins at the older of the positions up to which the two know the log, and reads nothing where neither needs it.
Each entry is given to the transactions first: whether its numbers count for deduplication depends on what is known of
its transaction. Guarding tests: tests/broker/topic/test_dedup.py, tests/broker/topic/test_transactions.py.
"""

from __future__ import annotations

from ...proto.entry import parse_header, split_broker_part
from ..log.log import Log
from .dedup import Deduplication, numbers_of
from .transactions import TopicTransactions, txn_of

REPLAY_BYTES = 4 << 20
"""Bytes of one read of a replay."""


async def replay(log: Log, dedup: Deduplication, transactions: TopicTransactions) -> None:
    """Replays the log after both were opened, and before anything is published."""
    starts = [each for each in (dedup.replays_after, transactions.replays_after) if each is not None]
    if starts:
        shape = log.shape
        position = shape.after(min(starts))
        while shape.readable(position := shape.there(position)):
            for entry in await log.reader.read(position, REPLAY_BYTES):
                header = parse_header(split_broker_part(entry.payload)[2], verify=False)
                numbers, txn = numbers_of(header.metadata), txn_of(header.metadata)
                aborted = txn is not None and transactions.replay(txn, header, numbers, entry)
                hidden = txn is not None and transactions.is_hidden(txn, entry.position)
                dedup.replay(header.producer_name, numbers, entry.position, counts=not hidden, aborted=aborted)
                position = shape.after(entry.position)
    dedup.replay_done()
    transactions.replay_done()
