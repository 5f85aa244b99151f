"""Real processes: a bookie is killed for good, a fourth takes its copies, and any single one may then be missing."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Process, Processes
from magnetar.ledger import LedgerClient, LedgerConfig
from magnetar.metadata import paths
from magnetar.metadata.records import LedgerRecord
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.store import MetadataStore, get_record
from magnetar.runtime.network import Endpoint, World
from magnetar.runtime.process import make_system_world
from tests.support.processes import run_cli

pytestmark = pytest.mark.processes

SETTINGS = """
[bookie]
upkeep_interval_s = 0.3
[bookie.repair]
lost_bookie_grace_s = 1.0
audit_interval_s = 0.2
poll_interval_s = 0.5
retry_min_s = 0.2
"""
LEDGERS, ENTRIES, PATIENCE_S = 6, 50, 60.0
QUICK = LedgerConfig(add_timeout_s=5.0, read_timeout_s=5.0)


def _payload(ledger: int, entry: int) -> bytes:
    return (b"%d:%d:" % (ledger, entry)) * 500


async def _fill(client: LedgerClient) -> list[int]:
    ledgers = []
    for _ in range(LEDGERS):
        writer = await client.create()
        for entry in range(ENTRIES):
            await writer.append(_payload(writer.ledger_id, entry))
        await writer.close()
        ledgers.append(writer.ledger_id)
    return ledgers


async def _read_everything(client: LedgerClient, ledgers: list[int]) -> None:
    for ledger in ledgers:
        reader = await client.open(ledger)
        found: list[bytes] = []
        while len(found) <= reader.last_entry:
            found += [bytes(each.payload) for each in await reader.read(len(found), reader.last_entry)]
        assert found == [_payload(ledger, entry) for entry in range(ENTRIES)]


async def _names(metadata: MetadataStore, ledgers: list[int]) -> set[str]:
    found: set[str] = set()
    for ledger in ledgers:
        record = await get_record(metadata, paths.ledger(ledger), LedgerRecord)
        assert record is not None
        found |= {bookie for fragment in record[0].fragments for bookie in fragment.bookies}
    return found


async def _are_whole(metadata: MetadataStore, ledgers: list[int], dead: str) -> bool:
    return dead not in await _names(metadata, ledgers) and not await metadata.children(paths.UNDER_REPLICATED_LEDGERS)


def _id(process: Process) -> str:
    process.wait_ready()
    line = next(line for line in process.lines if line.startswith("ready "))
    return next(word for word in line.split() if word.startswith("id=")).partition("=")[2]


def test_a_bookie_is_killed_for_good_and_afterwards_any_single_other_one_may_be_missing(started: Processes) -> None:
    settings = Path(started.directory) / "settings.toml"
    settings.write_text(SETTINGS)
    tree = started.start("metadata", "metadata", "--listen", "127.0.0.1:0", "--data", "tree")

    def bookie(name: str) -> Process:
        where = ("--metadata", tree.address, "--session-timeout", "1", "--config", str(settings))
        return started.start(name, "bookie", "--listen", "127.0.0.1:0", *where, "--data", name)

    bookies = [bookie(f"b{number}") for number in range(3)]
    for each in bookies:
        each.wait_ready()
    broker = started.start("broker", "broker", "--listen", "127.0.0.1:0", "--metadata", tree.address)

    async def with_client(work: Callable[[World, MetadataStore, LedgerClient], Awaitable[None]]) -> None:
        world = make_system_world()
        metadata = await connect_metadata(world, Endpoint.parse(tree.address), 10.0)
        client = LedgerClient(world, metadata, QUICK)
        try:
            await work(world, metadata, client)
        finally:
            await client.close()
            await metadata.close()

    async def main(world: World, metadata: MetadataStore, client: LedgerClient) -> None:
        ledgers = await _fill(client)
        dead = _id(bookies[0])
        bookies[0].kill()
        living = [*bookies[1:], bookie("b3")]
        living[-1].wait_ready()
        async with asyncio.timeout(PATIENCE_S):
            while not await _are_whole(metadata, ledgers, dead):  # noqa: ASYNC110 - the processes do not tell
                await asyncio.sleep(0.1)
        assert await _names(metadata, ledgers) == {_id(each) for each in living}
        for missing in living:
            os.kill(missing.pid, signal.SIGSTOP)
            try:
                await _read_everything(client, ledgers)
            finally:
                os.kill(missing.pid, signal.SIGCONT)

    asyncio.run(with_client(main))
    shown = run_cli("repair", "status", "-o", "json", "--url", broker.wait_ready())
    assert shown.code == 0, shown.err
    status = json.loads(shown.out)
    assert (status["underReplicated"], status["enabled"]) == (0, True)
    listed = json.loads(run_cli("ledgers", "list", "-o", "json", "--url", broker.wait_ready()).out)
    assert len(listed) == LEDGERS
