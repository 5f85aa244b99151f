"""`python -m tests.chaos.full_disk [--mib 256] [--rounds N]`: a real bookie fills a small disk, and gets it back.

A tmpfs of 256 MiB (needs root) holds the bookie's data. Each round: adds until it refuses; what it acknowledged is
there, fences work, a recovery add is taken or refused by a clear answer; `kill -9` and a start while full; many ledgers
are deleted; garbage collection and compaction make room, and the bookie takes adds again by itself. Last line: JSON.
"""

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from magnetar.ledger.peer_format import Status
from magnetar.proto.errors import MagnetarError
from tests.bookie.entries import PeerCaller
from tests.chaos.one_bookie import OneBookie, Records

SETTINGS = """
[bookie]
gc_interval_s = 0.5
gc_grace_s = 0.2
upkeep_interval_s = 0.2

[bookie.store]
memtable_bytes = 4194304
journal_bytes = 4194304
journal_segment_bytes = 4194304
journal_first_segment_bytes = 1048576
journal_spares_max = 1
log_bytes_max = 16777216
log_allocate_bytes = 1048576
"""
FULL_S = 120.0
"""How long filling, and getting room again, may take."""
REFUSALS = (Status.READ_ONLY, Status.BUSY)


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A tmpfs of `mib` MiB. PermissionError: this user may not mount one."""
    place = folder / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        raise PermissionError(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def run(folder: Path, place: Path, rounds: int, rng: random.Random) -> dict[str, Any]:
    facts: dict[str, Any] = {"rounds": 0, "full_used": [], "freed_used": []}
    with OneBookie(folder, place / "bookie", SETTINGS) as one:
        model = Records(rng, str(one.uuid), (80, 1000, 60_000))
        async with one.tree() as tree:
            for turn in range(rounds):
                async with one.caller() as caller:
                    await _fill(model, caller, tree)
                    facts["full_used"].append(_used(place))
                    await model.check(caller)
                    await _fence_one(model, caller)
                one.bookie.kill()
                one.bookie.start()
                async with one.caller() as caller:
                    await model.check(caller)
                    for ledger in list(model.alive.values())[: len(model.alive) * 9 // 20]:
                        await model.delete(tree, ledger)
                        await model.create(tree)
                    await _until_writable(model, caller)
                    await model.check(caller)
                    facts["freed_used"].append(_used(place))
                facts["rounds"] = turn + 1
                print(f"round {turn + 1}: {facts}", flush=True)
        facts["acked"], facts["checked"] = model.acked, model.checked
        facts["refused"] = {status.name: count for status, count in model.refused.items()}
    return facts


def _used(place: Path) -> float:
    usage = shutil.disk_usage(place)
    return round(1 - usage.free / usage.total, 3)


async def _fill(model: Records, caller: PeerCaller, tree: Any) -> None:
    """Adds until each of the producers was refused: `Records.load` returns by itself then."""
    async with asyncio.timeout(FULL_S):
        await model.load(caller, tree, asyncio.Event(), churn=False)
    assert model.refused.keys() & set(REFUSALS), f"the disk is full and nothing was refused: {model.refused}"


async def _fence_one(model: Records, caller: PeerCaller) -> None:
    """A full bookie still fences, durably or not at all."""
    ledger = model.rng.choice([ledger for ledger in model.alive.values() if ledger.acked])
    head, _ = await caller.read(ledger.number, ledger.acked[0], fence=True)
    assert head.status in (Status.OK, Status.UNKNOWN), head
    ledger.fencing = True
    ledger.fenced = head.status is Status.OK


async def _until_writable(model: Records, caller: PeerCaller) -> None:
    async with asyncio.timeout(FULL_S):
        while True:
            ledger = next(each for each in model.alive.values() if not each.fencing)
            entry, ledger.next = ledger.next, ledger.next + 1
            with contextlib.suppress(MagnetarError):
                if (await caller.add(ledger.number, entry, ledger.payload(entry))).status is Status.OK:
                    ledger.acked.append(entry)
                    return
            await asyncio.sleep(0.1)


@click.command()
@click.option("--mib", type=click.IntRange(64), default=256, show_default=True, help="Size of the file system.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def main(mib: int, rounds: int, seed: int) -> None:
    """Fill the disk under a bookie, free it, and look for what is lost.

    Example: python -m tests.chaos.full_disk --mib 256 --rounds 3
    """
    begin, failure, result = time.monotonic(), "", {}
    with tempfile.TemporaryDirectory(prefix="magnetar-full-") as name:
        folder = Path(name)
        try:
            with small_disk(folder, mib) as place:
                result = asyncio.run(run(folder, place, rounds, random.Random(seed)))
        except (AssertionError, TimeoutError, PermissionError) as error:
            failure = f"{type(error).__name__}: {error}"
            print(f"FAILED: {failure}")
    result |= {"failed": int(bool(failure)), "seed": seed, "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps(result))
    sys.exit(int(bool(failure)))


if __name__ == "__main__":
    main()
