"""Bookies with auto-recovery, metadata and clients in one simulation; bookies die, come back empty, or for good."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from magnetar.bookie.maintenance.repair_core import list_final_fragments
from magnetar.bookie.maintenance.repair_worker import RepairConfig
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.ledger import LedgerClient, LedgerWriter
from magnetar.ledger.bookies import LedgerConfig
from magnetar.ledger.metadata_core import find_fragment_of_entry, get_striping_of_record
from magnetar.metadata import paths
from magnetar.metadata.records import LedgerRecord, UnderReplicatedRecord
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.server import MetadataService
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, get_record
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.world import Simulation
from tests.bookie.stores import SMALL, simulate

QUICK = LedgerConfig(add_timeout_s=1.0, read_timeout_s=1.0, fence_timeout_s=1.0, close_timeout_s=5.0, quarantine_s=2.0)
REPAIR = RepairConfig(
    lost_bookie_grace_s=10.0, open_ledger_grace_s=10.0, audit_interval_s=1.0, poll_interval_s=2.0, retry_min_s=1.0,
    retry_max_s=8.0, scan_interval_s=60.0, bytes_per_s=0, batch_bytes=4 << 10,
)  # fmt: skip
SESSION_S = 5.0
PATIENCE_S = 300.0


@dataclass
class Deployment:
    simulation: Simulation
    service: Endpoint  # of the metadata
    metadata: MetadataStore
    repair: RepairConfig
    bookies: dict[str, Bookie] = field(default_factory=dict)

    async def start(self, name: str, *, home: str | None = None, **changes: object) -> Bookie:
        """`home`: the directory, when it is not the node's own: another bookie at the same place."""
        config = BookieConfig(
            data=f"/{home or name}", host=name, store=replace(SMALL, journal_bytes=1 << 20), free_bytes_min=0,
            limbo_pause_s=5.0, upkeep_interval_s=1.0, repair=self.repair,
        )  # fmt: skip
        config = replace(config, **changes)  # type: ignore[arg-type]
        world = self.simulation.world(name)

        async def session() -> MetadataStore:
            return await connect_metadata(world, self.service, SESSION_S)

        async def started() -> Bookie:
            return await Bookie.start(world, config, await session(), session)

        self.bookies[name] = await self.simulation.spawn(name, started())
        return self.bookies[name]

    async def kill(self, name: str) -> str:
        """Power is cut; its id. The registration goes with the session."""
        self.simulation.crash(name, power_loss=True)
        return self.bookies[name].id

    def client(self) -> LedgerClient:
        return LedgerClient(self.simulation.world("client"), self.metadata, QUICK)

    def node_of(self, bookie: str) -> str:
        return next(name for name, each in self.bookies.items() if each.id == bookie)

    # ------------------------------------------------------------------ ledgers
    async def a_ledger(self, entries: int = 20, *, size: int = 300, closed: bool = True, **shape: int) -> LedgerWriter:
        client = self.client()
        writer = await client.create(**shape)  # type: ignore[arg-type]
        await asyncio.gather(*[writer.append(payload(writer.ledger_id, entry, size)) for entry in range(entries)])
        await asyncio.sleep(0.1)  # the third copies are there too
        if closed:
            await writer.close()
        else:
            await writer.abandon()  # nobody writes it any more
        return writer

    async def record(self, ledger: int) -> LedgerRecord:
        found = await get_record(self.metadata, paths.ledger(ledger), LedgerRecord)
        assert found is not None
        return found[0]

    async def mark(self, ledger: int) -> UnderReplicatedRecord | None:
        found = await get_record(self.metadata, paths.under_replicated(ledger), UnderReplicatedRecord)
        return None if found is None else found[0]

    async def until(self, what: Callable[[], Awaitable[object]], patience_s: float = PATIENCE_S) -> None:
        """Until `what` is true of the world; fails when it does not become so."""
        async with asyncio.timeout(patience_s):
            while not await what():  # noqa: ASYNC110 - of a simulated world, in which nobody tells
                await asyncio.sleep(0.5)

    async def until_marked(self, ledger: int) -> None:
        async def marked() -> bool:
            return await self.mark(ledger) is not None

        await self.until(marked)

    async def until_whole(self, ledger: int, gone: str = "") -> LedgerRecord:
        """Until it has no mark and does not name `gone`."""

        async def whole() -> bool:
            return await self.mark(ledger) is None and gone not in _named(await self.record(ledger))

        await self.until(whole)
        return await self.record(ledger)

    async def copies(self, ledger: int) -> dict[int, list[str]]:
        """Entry → nodes of living bookies that its record names for it and that hold it, for each settled entry."""
        record = await self.record(ledger)
        found: dict[int, list[str]] = {}
        alive = {each.id: name for name, each in self.bookies.items() if self.simulation.is_node_running(name)}
        for final in list_final_fragments(record):
            for entry in range(final.first, final.last + 1):
                fragment, _ = find_fragment_of_entry(record, entry)
                slots = get_striping_of_record(record).slots_of_entry(entry)
                names = [alive[fragment.bookies[slot]] for slot in slots if fragment.bookies[slot] in alive]
                found[entry] = [name for name in names if await self._holds(name, ledger, entry)]
        return found

    async def _holds(self, name: str, ledger: int, entry: int) -> bool:
        store = self.bookies[name].get_directory(ledger).store
        return bool((await store.read_entries(ledger, entry)).entries)

    async def check_whole(self, ledger: int, copies: int = 3) -> None:
        found = await self.copies(ledger)
        assert all(len(names) == copies for names in found.values()), found

    async def read_all(self, ledger: int) -> list[bytes]:
        client = self.client()
        try:
            reader = await client.open(ledger)
            found: list[bytes] = []
            while len(found) <= reader.last_entry:
                found += [bytes(each.payload) for each in await reader.read(len(found), reader.last_entry)]
            return found
        finally:
            await client.close()


def _named(record: LedgerRecord) -> list[str]:
    return [bookie for fragment in record.fragments for bookie in fragment.bookies]


def payload(ledger: int, entry: int, size: int = 300) -> bytes:
    return (b"%d:%d:" % (ledger, entry)).ljust(size, b".")


def with_deployment(
    test: Callable[[Deployment], Awaitable[None]], bookies: int = 4, *, repair: RepairConfig = REPAIR, seed: int = 1
) -> Simulation:
    async def main(simulation: Simulation) -> None:
        store = await simulation.spawn("meta", SqliteStore.open(simulation.world("meta"), ":memory:"))
        world = simulation.world("meta")
        serving = world.network.serve(Endpoint("127.0.0.1", 0), [("Metadata", MetadataService(store))])
        deployment = Deployment(
            simulation, (await simulation.spawn("meta", serving)).endpoint, store.new_session(), repair
        )
        for number in range(bookies):
            await deployment.start(f"b{number + 1}")

        async def run() -> None:
            await test(deployment)

        await simulation.spawn("client", run())

    return simulate(main, seed)


__all__ = ["QUICK", "REPAIR", "Deployment", "MagnetarError", "payload", "with_deployment"]
