"""`python -m tests.chaos.limbo`: a real bookie of three gets an old copy of its directory, or an empty one.

Ledgers of three copies, two synced, before and after the copy is made. With the old copy, and while its peers are
away, the bookie is in limbo: it says so in the metadata, serves what it has, and answers "unknown" for what it lacks.
When the peers are back it fetches that and leaves limbo by itself; then every entry is read from it alone. The wiped
directory is refused, and the message says what to do. Last line: JSON.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from magnetar.cli.common.processes import Process, Processes, ProcessNotReady
from magnetar.ledger import LedgerClient
from magnetar.ledger.config import LedgerConfig
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.remote import RemoteStore, connect_metadata
from magnetar.metadata.store import get_record
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import real_world
from tests.bookie.entries import PeerCaller, payload_of

SETTINGS = """
[bookie]
limbo_pause_s = 0.3
upkeep_interval_s = 0.2
"""
CONFIG = LedgerConfig(ensemble_size=3, write_quorum=3, ack_quorum=2)
LEFT_S = 60.0


class ThreeBookies(Processes):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        file = directory / "magnetar.toml"
        file.write_text(SETTINGS)
        try:
            self.metadata = self.start("metadata", "metadata", "--listen", "127.0.0.1:0", "--data", "metadata")
            where = ("--metadata", self.metadata.address, "--session-timeout", "2", "--config", str(file))
            self.bookies = [
                self.start(name, "bookie", "--listen", "127.0.0.1:0", *where, "--data", name)
                for name in ("bookie-1", "bookie-2", "bookie-3")
            ]
            self.ids = [_id(bookie) for bookie in self.bookies]
        except BaseException:
            self.close()
            raise


def _id(bookie: Process) -> str:
    bookie.wait_ready()
    ready = next(line for line in bookie.lines if line.startswith("ready "))
    return next(word[len("id=") :] for word in ready.split() if word.startswith("id="))


async def run(folder: Path) -> dict[str, Any]:
    world = real_world()
    with ThreeBookies(folder) as three:
        tree = await connect_metadata(world, Endpoint.parse(three.metadata.address))
        client = LedgerClient(world, tree, CONFIG)
        try:
            return await _run(three, tree, client)
        finally:
            await client.close()
            await tree.close()


async def _run(three: ThreeBookies, tree: RemoteStore, client: LedgerClient) -> dict[str, Any]:
    loser, peers = three.bookies[0], three.bookies[1:]
    data, copy = three.directory / "bookie-1", three.directory / "copy"
    old = [await _ledger(client, 40, end=True) for _ in range(3)]
    loser.kill()
    await asyncio.to_thread(shutil.copytree, data, copy)
    loser.start()
    await asyncio.to_thread(loser.wait_ready)
    await client.close()  # its table of bookies says that the bookie is away
    again = LedgerClient(real_world(), tree, CONFIG)
    new = [await _ledger(again, 40, end=end) for end in (True, True, False)]
    await again.close()
    for process in three.bookies:
        process.kill()
    await asyncio.to_thread(shutil.rmtree, data)
    refused = await asyncio.to_thread(_refusal, loser)
    await asyncio.to_thread(shutil.rmtree, data, True)
    await asyncio.to_thread(shutil.copytree, copy, data)
    loser.start()
    await asyncio.to_thread(loser.wait_ready)
    began = time.monotonic()
    assert await _in_limbo(tree, three.ids[0])
    served, unknown = await _read_all(three, old + new)
    for process in peers:
        process.start()
    while await _in_limbo(tree, three.ids[0]):
        assert time.monotonic() - began < LEFT_S, loser.output()
        await asyncio.sleep(0.1)
    limbo_s = time.monotonic() - began
    for process in peers:
        process.kill()
    whole, still_unknown = await _read_all(three, old + new)
    return {
        "refused": refused, "in_limbo_served": served, "in_limbo_unknown": unknown, "served": whole,
        "unknown": still_unknown, "limbo_s": round(limbo_s, 1),
    }  # fmt: skip


Kept = tuple[int, int, bytes]
"""A ledger's id, how many entries it has, and its key."""


async def _ledger(client: LedgerClient, entries: int, *, end: bool) -> Kept:
    """One without an end is left by its writer."""
    writer = await client.create()
    for entry in range(entries):
        await writer.append(b"%d %d" % (writer.ledger_id, entry))
    await (writer.close() if end else writer.abandon())
    return writer.ledger_id, entries, writer.record.key


def _refusal(bookie: Process) -> str:
    """What a start in the empty directory says."""
    bookie.start()
    try:
        bookie.wait_ready()
    except ProcessNotReady as error:
        bookie.wait()
        return str(error)
    raise AssertionError("a bookie started in a directory that was wiped")


async def _in_limbo(tree: RemoteStore, bookie: str) -> bool:
    found = await get_record(tree, paths.bookie(bookie), records.BookieRecord)
    return found is None or found[0].limbo


async def _read_all(three: ThreeBookies, ledgers: list[Kept]) -> tuple[int, int]:
    """Of the first bookie alone: entries served with their bytes, entries that it does not know."""
    network = real_world().network
    caller = PeerCaller(network.peer(Endpoint.parse(three.bookies[0].address), UUID(three.ids[0]).bytes))
    served = unknown = 0
    try:
        for ledger, entries, key in ledgers:
            for entry in range(entries):
                answer, frames = await caller.read(ledger, entry, key=key)
                assert answer.status in (Status.OK, Status.UNKNOWN), f"entry {entry} of ledger {ledger}: {answer}"
                if answer.status is Status.OK:
                    assert payload_of(frames[0]) == b"%d %d" % (ledger, entry)
                    served += 1
                else:
                    unknown += 1
    finally:
        await caller.peer.close()
    return served, unknown


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="magnetar-limbo-"))
    try:
        print(json.dumps(asyncio.run(run(folder))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
