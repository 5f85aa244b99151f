"""A store on a simulated disk, with what it acknowledged on record: the model that crash tests compare with."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from magnetar.bookie.store.store import Store, StoreCallbacks, StoreConfig
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import KEY, payload_of, stored_entry

UUID = bytes(range(16))
DATA = "/data/bookie"
JOURNAL = "/journal/bookie"
"""Of a store whose journal is on a disk of its own."""
NODE = "bookie"
SMALL = StoreConfig(
    memtable_bytes=24 << 10,
    journal_bytes=96 << 10,
    journal_segment_bytes=64 << 10,
    journal_first_segment_bytes=16 << 10,
    journal_block_bytes_max=16 << 10,
    journal_queue_bytes_max=256 << 10,
    log_bytes_max=(8 << 20) + (64 << 10),
    log_allocate_bytes=32 << 10,
    read_cache_bytes=8 << 10,
    index_cache_bytes=1 << 10,
    read_ahead_bytes=2 << 10,
    read_chunk_bytes=2 << 10,
)
"""Every bound is reached after a few dozen entries."""


async def open_store(
    simulation: Simulation, config: StoreConfig = SMALL, node: str = NODE, ports: StoreCallbacks | None = None
) -> Store:
    world = simulation.world(node)

    async def start() -> Store:
        world.files.make_directories(DATA)
        return await Store.open(world, DATA, UUID, config, ports=ports)

    return await simulation.spawn(node, start())


async def add(
    store: Store, ledger: int, entry: int, payload: bytes, *, recovery: bool = False, lac: int = -1
) -> Status:
    """One add, waited for; OK: durable."""
    stored = stored_entry(ledger, entry, payload, lac)
    status = store.add_entry(ledger, entry, KEY, (stored,), len(stored), lac, recovery)
    if status is not Status.OK:
        return status
    return Status.OK if await store.seal_group_and_wait() else Status.READ_ONLY


async def fence(store: Store, ledger: int) -> Status:
    status = store.fence(ledger, KEY)
    return status if status is not Status.OK else (Status.OK if await store.seal_group_and_wait() else Status.UNKNOWN)


def payload(ledger: int, entry: int, size: int = 300) -> bytes:
    return random.Random(ledger << 32 | entry).randbytes(size)


@dataclass
class Model:
    """What was sent, what was acknowledged, what is fenced."""

    sent: dict[tuple[int, int], bytes] = field(default_factory=dict)
    acked: dict[tuple[int, int], None] = field(default_factory=dict)
    fenced: dict[int, None] = field(default_factory=dict)
    fencing: dict[int, None] = field(default_factory=dict)
    deleted: dict[int, None] = field(default_factory=dict)

    async def add(self, store: Store, ledger: int, entry: int, size: int) -> None:
        data = payload(ledger, entry, size)
        self.sent[ledger, entry] = data
        status = await add(store, ledger, entry, data)
        if ledger in self.fenced:
            assert status is Status.FENCED, f"ledger {ledger} is fenced and took entry {entry}: {status!r}"
        if status is Status.OK:
            self.acked[ledger, entry] = None
        else:
            assert status in (Status.FENCED, Status.BUSY), status

    async def fence(self, store: Store, ledger: int) -> None:
        self.fencing[ledger] = None
        assert await fence(store, ledger) is Status.OK
        self.fenced[ledger] = None

    async def delete(self, store: Store, ledger: int) -> None:
        """From now on its entries may be gone, and no add to it is admitted."""
        self.deleted[ledger] = None
        await store.delete_ledgers([ledger])

    async def check(self, store: Store) -> None:
        """Acked ⊆ present ⊆ sent, byte for byte; fenced ledgers refuse."""
        store.check()
        for (ledger, entry), data in self.sent.items():
            result = await store.read_entries(ledger, entry)
            if result.status is Status.OK:
                assert payload_of(result.entries[0]) == data
            else:
                assert result.status in (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER), result
                lost = (ledger, entry) in self.acked and ledger not in self.deleted
                assert not lost, f"acknowledged entry {entry} of ledger {ledger} is gone"
        for ledger in self.fenced:
            stored = stored_entry(ledger, 1 << 40, b"late")
            assert store.add_entry(ledger, 1 << 40, KEY, (stored,), len(stored), -1, False) is Status.FENCED


async def load(store: Store, model: Model, rng: random.Random, turns: int) -> None:
    """Adds to several ledgers in parallel, fences and checkpoints, as `rng` says."""
    for _ in range(turns):
        work: list[asyncio.Future[None]] = []
        for _ in range(rng.randint(1, 6)):
            ledger = rng.randint(1, 9)
            entry = 1 + max((e for at, e in model.sent if at == ledger), default=-1)
            work.append(asyncio.ensure_future(model.add(store, ledger, entry, rng.choice((20, 300, 3000)))))
            await asyncio.sleep(0)
        if rng.random() < 0.05:
            work.append(asyncio.ensure_future(model.fence(store, rng.randint(1, 12))))
        if rng.random() < 0.05:
            work.append(asyncio.ensure_future(store.checkpoint()))
        await asyncio.gather(*work)


def simulate(main: Callable[[Simulation], Awaitable[None]], seed: int = 1) -> Simulation:
    """Runs `main` and fails when any task of a living process failed unseen."""
    simulation = Simulation(seed)

    async def run() -> None:
        await main(simulation)

    simulation.run(run())
    assert simulation.complaints == []
    return simulation


__all__ = [
    "DATA",
    "NODE",
    "SMALL",
    "UUID",
    "Model",
    "NodeCrashed",
    "add",
    "fence",
    "load",
    "open_store",
    "payload",
    "simulate",
]
