"""txn-aborts: what 100,000 aborted transactions among 10,000,000 entries cost a topic that is loaded.

The outcomes of a topic are written to a real bookie by the broker's own code, and loaded again: the ledger is recovered
and read, and the state is made. `value` is the seconds of a load; `memory_mb` is what Python and its bitmaps keep
for it (the growth of RSS). The log itself is a shape: a load reads none of its entries before the stored position.
The aborted transactions are single entries at random places.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from types import SimpleNamespace
from typing import Any

from .harness import Options, Run
from .storage.bookies import in_directory

LEDGER_ENTRIES = 50_000
"""Of a ledger of the topic: `roll_entries`."""
ENTRIES, ABORTS = 10_000_000, 100_000


def txn_aborts(options: Options) -> Run:
    """Seconds to load the outcomes of 100,000 aborted transactions in 10,000,000 entries."""
    entries, aborts = ENTRIES, ABORTS

    async def main(directory: str) -> Run:
        from magnetar.bookie.server import Bookie, BookieConfig
        from magnetar.ledger.client import LedgerClient
        from magnetar.metadata.sqlite import SqliteStore
        from magnetar.runtime.process import make_system_world

        world = make_system_world()
        tree = await SqliteStore.open(world, os.path.join(directory, "metadata"))
        bookie = await Bookie.start(world, BookieConfig(data=os.path.join(directory, "bookie")), tree.new_session())
        client = LedgerClient(world, tree.new_session())
        try:
            log = _log(entries)
            stored_bytes, written_s = await _write(world, client, log, aborts, random.Random(options.seed))
            before, begin = _rss_bytes(), time.perf_counter()
            state = await _load(world, client, log)
            seconds = time.perf_counter() - begin
            detail = {
                "memory_mb": round((_rss_bytes() - before) / 1e6, 1), "aborted_entries": state.aborted_entries,
                "entries": entries, "stored_bytes": stored_bytes, "written_s": round(written_s, 3),
            }  # fmt: skip
            return Run(seconds, detail=detail)
        finally:
            await client.close()
            await bookie.close()
            await tree.close()

    return in_directory(main)


def _log(entries: int) -> Any:
    """A topic's log of which only shape and record are there."""
    from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
    from magnetar.metadata.records import TopicRecord
    from magnetar.proto.names import TopicName
    from magnetar.proto.states import TopicState

    shape = LogShape()
    for number, first in enumerate(range(0, entries, LEDGER_ENTRIES)):
        end = min(entries, first + LEDGER_ENTRIES)
        shape.add(LedgerSpan(number + 1, first, end - first - 1, end, 100))
    log = SimpleNamespace(
        topic=TopicName.parse("bench"), shape=shape, record=TopicRecord(), state=TopicState.SERVING
    )  # fmt: skip

    async def note(**fields: Any) -> None:
        log.record = TopicRecord(**fields)

    log.note = note
    return log


def _outcomes(world: Any, client: Any, log: Any) -> Any:
    from magnetar.broker.common.config import BrokerConfig, LedgerReplication
    from magnetar.broker.topic.outcomes import TransactionOutcomesLedger

    async def replication() -> LedgerReplication:
        return LedgerReplication(1, 1, 1)

    return TransactionOutcomesLedger(world, client, BrokerConfig(), log, replication)


async def _write(world: Any, client: Any, log: Any, aborts: int, rng: random.Random) -> tuple[int, float]:
    """Bytes that are stored, and seconds that the aborts and their writes took."""
    from magnetar.broker.common.transactions import Settlement
    from magnetar.broker.log.log_queue_core import SequenceRange
    from magnetar.broker.topic.transactions_core import TopicTransactionsCore, TxnSnapshot
    from magnetar.proto.names import Position
    from magnetar.proto.states import TxnId

    outcomes, begin = _outcomes(world, client, log), time.perf_counter()
    core = outcomes.core = TopicTransactionsCore(log.shape, TxnSnapshot(log.shape.start_position))
    for number, index in enumerate(sorted(rng.sample(range(log.shape.end_index), aborts))):
        txn = TxnId(0, number)
        core.register_unresolved_transaction(txn)
        core.on_transaction_joined(txn)
        core.judge_duplicate(txn, "bench", SequenceRange(number, number))
        position = Position(index // LEDGER_ENTRIES + 1, index % LEDGER_ENTRIES)
        core.on_publish_confirmed(txn, "bench", SequenceRange(number, number), position, index, 1, 100)
        core.settle(Settlement(txn, committed=False))
        outcomes.schedule_write()
        if number % 10_000 == 0:
            await asyncio.sleep(0)
    await outcomes.durable()
    seconds, stored = time.perf_counter() - begin, outcomes._bytes
    outcomes.stop()
    return stored, seconds


async def _load(world: Any, client: Any, log: Any) -> Any:
    from magnetar.broker.topic.transactions_core import TopicTransactionsCore

    return TopicTransactionsCore(log.shape, await _outcomes(world, client, log).recover(log.record.transactions))


def _rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
