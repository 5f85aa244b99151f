"""Who has how many copies, asked of the metadata itself: when a bookie may lose its data once more.

Entries are acknowledged by two bookies (ack quorum 2), so one of the copies may be lost at a time, and the next only
when those of the last are made again. That is so when no ledger names a bookie that is gone, and no ledger is marked
under-replicated (bookie/maintenance/). Then each entry lies on two bookies that are there: the missing ones' copies
were made again where the record says, before it said so.

A process of its own (`python -m tests.chaos.processes.copies METADATA BOOKIE…`) looks, without the proxy: a line each.
"""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping

from magnetar.bookie.maintenance import marks
from magnetar.bookie.maintenance.repair_core import list_bookies_of_ledger
from magnetar.cli.run.servers import make_member_world
from magnetar.metadata import paths
from magnetar.metadata.remote import connect_metadata_at
from magnetar.metadata.session import parse_address
from magnetar.metadata.store import MetadataStore
from magnetar.runtime.process import make_system_world

SESSION_S = 10.0
LOOK_S = 60.0
AT_ONCE = 32


def missing_copies(metadata: str, there: Collection[str], environment: Mapping[str, str]) -> list[str]:
    """Sentences; empty: every ledger has its copies, on these bookies. `environment`: of the cluster's security."""
    command = [sys.executable, "-m", "tests.chaos.processes.copies", metadata, *there]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=False,
                              env={**os.environ, **environment})  # fmt: skip
    except subprocess.TimeoutExpired:
        return ["the metadata does not say where copies are"]
    if done.returncode:
        return [f"nobody knows where copies are: {done.stderr[-500:]}"]
    return done.stdout.splitlines()


async def _look(metadata: str, there: Collection[str]) -> list[str]:
    world = make_member_world(make_system_world(), os.environ.get("MAGNETAR_SECURITY"), "operator")
    store = await connect_metadata_at(world, parse_address(metadata), SESSION_S)
    try:
        return await _marked(store) + await _named(store, there)
    finally:
        await store.close()


async def _marked(store: MetadataStore) -> list[str]:
    reasons: Counter[str] = Counter()
    for ledger in await marks.list_ledger_ids(store, paths.UNDER_REPLICATED_LEDGERS):
        found = await marks.read_repair_mark(store, ledger)
        if found is not None:
            mark = found[0]
            why = ", ".join(sorted(set(mark.bookies.values()))) or "in recovery"
            reasons[f"{why}; {mark.stuck or 'not tried yet'}"] += 1
    return [f"{count} ledgers are under-replicated: {why}" for why, count in sorted(reasons.items())]


async def _named(store: MetadataStore, there: Collection[str]) -> list[str]:
    gone: Counter[str] = Counter()
    ledgers = await marks.list_ledger_ids(store, paths.LEDGERS)
    for start in range(0, len(ledgers), AT_ONCE):
        some = ledgers[start : start + AT_ONCE]
        for record in await asyncio.gather(*[marks.read_ledger_record(store, each) for each in some]):
            if record is not None:
                gone.update(bookie for bookie in list_bookies_of_ledger(record) if bookie not in there)
    return [f"{count} ledgers name bookie {bookie}, which is gone" for bookie, count in sorted(gone.items())]


if __name__ == "__main__":
    print("\n".join(asyncio.run(_look(sys.argv[1], sys.argv[2:]))), end="")
