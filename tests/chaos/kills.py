"""`python -m tests.chaos.kills --kills N [--seed S]`: one bookie on a real disk gets `kill -9` at random moments.

Under load: adds to many ledgers, fences, deleted ledgers; in a store so small that checkpoints, journal and log rolls,
garbage collection and compaction run all the time. After each start the newest acknowledged entries of each ledger and
all fences are checked, at the end everything. The seed gives moments and load; what the machine does in between is its
own. Last line: JSON.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from tests.chaos.one_bookie import OneBookie, Records

SETTINGS = """
[bookie]
gc_interval_s = 0.3
gc_grace_s = 0.2

[bookie.store]
memtable_bytes = 1048576
journal_bytes = 2097152
journal_segment_bytes = 1048576
journal_first_segment_bytes = 1048576
log_bytes_max = 16777216
log_allocate_bytes = 1048576
"""
SAMPLE = 40
"""Newest acknowledged entries of each ledger that are read after each start."""


async def run(folder: Path, kills: int, rng: random.Random, settings: str = SETTINGS) -> dict[str, Any]:
    with OneBookie(folder, folder / "bookie", settings) as one:
        model = Records(rng, str(one.uuid))
        async with one.tree() as tree:
            for turn in range(kills):
                async with one.caller() as caller:
                    await model.check(caller, SAMPLE)
                    stop = asyncio.Event()
                    load = asyncio.ensure_future(model.load(caller, tree, stop))
                    await asyncio.sleep(rng.uniform(0.02, 0.8))
                    one.bookie.kill()
                    stop.set()
                    await load
                one.bookie.start()
                facts = f"{model.acked:,} adds acknowledged, {len(model.deleted)} ledgers deleted"
                print(f"kill {turn + 1}: {facts}", flush=True)
            async with one.caller() as caller:
                await model.check(caller)
        return {"kills": kills, "acked": model.acked, "checked": model.checked, "deleted_ledgers": len(model.deleted)}


@click.command()
@click.option("--kills", type=click.IntRange(1), default=50, show_default=True)
@click.option("--seed", type=int, default=None, help="Of moments and load (default: a new one).")
def main(kills: int, seed: int | None) -> None:
    """Kill a bookie again and again, and look for what is lost.

    Example: python -m tests.chaos.kills --kills 50 --seed 1
    """
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    begin, failure, result = time.monotonic(), "", {}
    with tempfile.TemporaryDirectory(prefix="magnetar-kills-") as folder:
        try:
            result = asyncio.run(run(Path(folder), kills, random.Random(seed)))
        except AssertionError as error:
            failure = str(error)
            print(f"FAILED: {failure}\nreplay: python -m tests.chaos.kills --kills {kills} --seed {seed}")
    result |= {"failed": int(bool(failure)), "seed": seed, "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps(result))
    sys.exit(int(bool(failure)))


if __name__ == "__main__":
    main()
