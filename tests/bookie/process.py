"""A bookie as a process of its own, with its metadata beside it: `python -m tests.bookie.process DIRECTORY`.

Prints `ready UUID HOST:PORT REPLAYED` when it serves, and serves until it is killed.
"""

import asyncio
import sys

from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store.store import StoreConfig
from magnetar.metadata.sqlite import SqliteStore
from magnetar.runtime.process import make_system_world, run_process

STORE = StoreConfig(
    memtable_bytes=2 << 20, journal_bytes=2 << 20, journal_segment_bytes=2 << 20, journal_first_segment_bytes=1 << 20
)
"""Small, so that checkpoints, rolls and recycling happen within a second of load."""


async def main() -> int:
    directory = sys.argv[1]
    world = make_system_world()
    metadata = await SqliteStore.open(world, f"{directory}/metadata/tree.sqlite")
    bookie = await Bookie.start(world, BookieConfig(data=f"{directory}/bookie", store=STORE), metadata.new_session())
    print("ready", bookie.id, bookie.endpoint, bookie.statistics()["replayed_records"], flush=True)
    await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
