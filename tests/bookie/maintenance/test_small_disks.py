"""Real processes on really small disks (tmpfs): one disk of a bookie is full while another is empty; one bookie is full
while others are empty."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.cli.common.processes import Process, Processes
from magnetar.ledger import LedgerClient, LedgerConfig
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, LedgerRecord, find_ledgers_directory
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.store import MetadataStore, get_record
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world
from tests.chaos.processes.cluster import small_disk
from tests.support.processes import run_cli

pytestmark = pytest.mark.processes

SETTINGS = """
[bookie]
upkeep_interval_s = 0.3
gc_interval_s = 0.5
gc_grace_s = 0.5
gc_doubt_s = 0.5
gc_minor_interval_s = 0.5
free_bytes_min = 0
[bookie.store]
memtable_bytes = 1048576
journal_bytes = 1048576
journal_segment_bytes = 1048576
journal_first_segment_bytes = 65536
log_allocate_bytes = 1048576
log_bytes_max = 9961472
reserve_bytes = 262144
[bookie.repair]
lost_bookie_grace_s = 5.0
audit_interval_s = 0.2
poll_interval_s = 0.5
retry_min_s = 0.2
bytes_per_s = 0
"""
QUICK = LedgerConfig(add_timeout_s=5.0, read_timeout_s=5.0, quarantine_s=0.1)
ENTRY_BYTES = 20_000
PATIENCE_S = 60.0


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A disk of 32 MiB, and one of 512 MiB."""
    with contextlib.ExitStack() as mounted:
        found = []
        for name, mib in (("a", 32), ("b", 512)):
            (tmp_path / name).mkdir()
            try:
                found.append(mounted.enter_context(small_disk(tmp_path / name, mib)))
            except PermissionError as error:
                pytest.skip(str(error))
        yield found[0], found[1]


class Cluster:
    """A metadata service and bookies on the disk `place`, of which `b0` has the disks that are given."""

    def __init__(self, started: Processes, place: Path, *b0: str) -> None:
        settings = Path(started.directory) / "settings.toml"
        settings.write_text(SETTINGS)
        self.tree = started.start("metadata", "metadata", "--listen", "127.0.0.1:0", "--data", "tree")
        where = ("--metadata", self.tree.address, "--session-timeout", "2", "--config", str(settings))

        self.bookies: list[Process] = []

        def start_bookie(*options: str) -> None:
            options = options or ("--data", str(place / f"b{len(self.bookies)}"))
            name = f"b{len(self.bookies)}"
            self.bookies.append(started.start(name, "bookie", "--listen", "127.0.0.1:0", *where, *options))
            self.bookies[-1].wait_ready()

        self.start_bookie = start_bookie
        for options in (b0, (), ()):
            start_bookie(*options)
        self.broker = started.start("broker", "broker", "--listen", "127.0.0.1:0", "--metadata", self.tree.address)
        self.url = self.broker.wait_ready()

    def id(self, number: int) -> str:
        ready = next(line for line in self.bookies[number].lines if line.startswith("ready "))
        return next(word for word in ready.split() if word.startswith("id=")).partition("=")[2]

    async def ask(self, *arguments: str) -> Any:
        """The JSON that a command prints; in a thread, so that the metadata session lives meanwhile."""
        shown = await asyncio.to_thread(run_cli, *arguments, "-o", "json", "--url", self.url)
        assert shown.out, shown.err
        return json.loads(shown.out)

    def run(self, work: Callable[[MetadataStore, LedgerClient], Awaitable[None]]) -> None:
        async def main() -> None:
            world = make_system_world()
            metadata = await connect_metadata(world, Endpoint.parse(self.tree.address), 10.0)
            client = LedgerClient(world, metadata, QUICK)
            try:
                await work(metadata, client)
            finally:
                await client.close()
                await metadata.close()

        asyncio.run(main())


async def read_bookie(metadata: MetadataStore, bookie: str) -> BookieRecord:
    found = await get_record(metadata, paths.bookie(bookie), BookieRecord)
    assert found is not None
    return found[0]


async def until(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await what():  # noqa: ASYNC110 - the processes do not tell
            await asyncio.sleep(0.2)


def payload(ledger: int, entry: int) -> bytes:
    return (b"%d:%d:" % (ledger, entry)).ljust(ENTRY_BYTES, b".")


async def read_everything(client: LedgerClient, ledger: int) -> int:
    reader = await client.open(ledger)
    count = 0
    while count <= reader.last_entry:
        for each in await reader.read(count, reader.last_entry):
            assert bytes(each.payload) == payload(ledger, count)
            count += 1
    return count


def test_a_disk_that_is_full_beside_an_empty_one_takes_its_ledgers_and_not_the_bookie(
    started: Processes, disks: tuple[Path, Path]
) -> None:
    small, large = disks
    cluster = Cluster(
        started, large, "--data", str(large / "b0"), "--journal", str(large / "b0-journal"),
        "--ledgers", str(small), "--ledgers", str(large / "b0-ledgers"),
    )  # fmt: skip
    bookie = cluster.id(0)
    cluster.start_bookie()

    async def main(metadata: MetadataStore, client: LedgerClient) -> None:
        writers = [await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2) for _ in range(12)]
        record = await read_bookie(metadata, bookie)
        numbers = [find_ledgers_directory(record.ledgers, writer.ledger_id) for writer in writers]
        assert set(numbers) == {0, 1}

        async def append(first: int, count: int) -> None:
            for entry in range(first, first + count):
                await asyncio.gather(*[writer.append(payload(writer.ledger_id, entry)) for writer in writers])

        async def is_full() -> bool:
            return (await read_bookie(metadata, bookie)).unwritable == (0,)

        await append(0, 5)
        filler = small / "filler"
        filler.write_bytes(bytes(26 << 20))
        appended = 5
        while not await is_full():
            await append(appended, 5)
            appended += 5
            assert appended < 300, "the disk has 32 MiB"
        await append(appended, 5)
        appended += 5
        assert not (await read_bookie(metadata, bookie)).read_only
        for writer, number in zip(writers, numbers, strict=True):
            last, first = writer.record.fragments[-1].bookies, writer.record.fragments[0].bookies
            if bookie in first:
                assert (bookie in last) == (number == 1), "only ledgers of the full disk left the bookie"
        rows = await cluster.ask("bookies", "state")
        shown = {each["path"]: each["disk"] for each in rows if each["bookie"] == bookie}
        assert shown[str(small)] in ("full", "no room")
        assert shown[str(large / "b0-ledgers")] == "writable"
        assert str(small) in json.dumps(await cluster.ask("status")), "the alarm names the directory"
        filler.unlink()

        async def is_writable() -> bool:
            return (await read_bookie(metadata, bookie)).unwritable == ()

        await until(is_writable)
        await append(appended, 5)
        taken = 0
        for _ in range(30):  # new ledgers, until one of the small disk is there again
            writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
            await writer.append(payload(writer.ledger_id, 0))
            named = bookie in writer.record.fragments[-1].bookies
            taken += named and find_ledgers_directory(record.ledgers, writer.ledger_id) == 0
            await writer.close()
        assert taken
        for writer in writers:
            await writer.close()
            assert await read_everything(client, writer.ledger_id) == appended + 5

    cluster.run(main)


def test_ledgers_move_off_a_full_bookie_and_its_disk_becomes_free(
    started: Processes, disks: tuple[Path, Path]
) -> None:  # fmt: skip
    cluster = Cluster(started, disks[1], "--data", str(disks[0]))
    full = cluster.id(0)

    async def main(metadata: MetadataStore, client: LedgerClient) -> None:
        ledgers = []
        for _ in range(8):
            writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
            for first in range(0, 50, 10):
                entries = range(first, first + 10)
                await asyncio.gather(*[writer.append(payload(writer.ledger_id, entry)) for entry in entries])
            await writer.close()
            ledgers.append(writer.ledger_id)

        cluster.start_bookie()

        async def used() -> float:
            record = await read_bookie(metadata, full)
            return 1.0 - record.free_bytes / record.total_bytes

        async def names(bookie: str) -> int:
            found = [await get_record(metadata, paths.ledger(ledger), LedgerRecord) for ledger in ledgers]
            return sum(bookie in each[0].fragments[0].bookies for each in found if each is not None)

        async def is_used() -> bool:
            return await used() > 0.35

        await until(is_used)
        before, had = await used(), await names(full)
        share = str(round(before - 0.2, 3))  # most of its one log: it is compacted then
        plan = await cluster.ask("bookies", "rebalance", "--to-share", share, "--dry-run")
        assert plan["full"] == [full]
        assert plan["ledgers"] > 0
        done = await cluster.ask("bookies", "rebalance", "--to-share", share, "--yes", "--wait-s", str(PATIENCE_S))
        assert (done["running"], done["ledgers"]) == (False, plan["ledgers"])
        assert await names(full) == had - plan["ledgers"]

        most = await used()

        async def is_freed() -> bool:
            run_cli("bookies", "gc", "--now", "--roll", "--yes", "--url", cluster.url)
            return await used() < most - 0.05

        await until(is_freed)
        for ledger in ledgers:
            assert await read_everything(client, ledger) == 50

    cluster.run(main)
