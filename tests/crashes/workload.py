"""The workload: some hundred operations on a real store in the full simulator, recorded operation by operation.

`record(seed)` lives through the chapters below in an order drawn from the seed, with adds of several ledgers always in
flight, and gives the log of disk operations (`Step`s, each sync with its site) and the facts (tests/crashes/facts.py).
No power is lost here: a restart is a clean one or `kill -9`, after which the system's cache still holds what was
written; what a power loss leaves of every moment is built afterwards from the log (tests/crashes/image.py).

The store is configured so small that every bound is reached: a block fills a journal in three turns, a memtable after
five entries, a log after two flushes.
"""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import force_setattr, replace

from magnetar.bookie.store import disk as store_disk
from magnetar.bookie.store.boot import JournalPlace
from magnetar.bookie.store.entrylog.mover import CompactionPolicy
from magnetar.bookie.store.state_log import RecordedDirectoryState
from magnetar.bookie.store.store import Store, StoreConfig
from magnetar.ledger.peer_format import Status
from magnetar.runtime.files import Files
from magnetar.runtime.sim.disk import UNLIMITED_BYTES, DiskOperation, FileFault, SimDisk
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import KEY
from tests.bookie.stores import DATA, JOURNAL, NODE, SMALL, UUID
from tests.crashes import chapters
from tests.crashes.facts import Fact, Kind, stored_bytes
from tests.crashes.image import Step
from tests.crashes.limits import small_limits
from tests.crashes.sites import site_of

LEDGERS = 5
PLACES = ("mark", ".idx", ".lidx", ".log", ".jnl", "filling-", "")
"""Of what the disk has no room for."""
SIZES = (20, 300, 20, 1500)


def tiny() -> StoreConfig:
    config = replace(
        SMALL,
        memtable_bytes=4 << 10,
        journal_bytes=36 << 10,
        journal_segment_bytes=20 << 10,
        journal_first_segment_bytes=12 << 10,
        journal_block_bytes_max=4 << 10,
        journal_spares_max=2,
        log_allocate_bytes=4 << 10,
    )
    # Below the least that a configuration may say: a log is full after two flushes. A flush that is larger still fits.
    force_setattr(config, "log_bytes_max", 14 << 10)
    return config


TINY = tiny()
SLOW_BYTES_PER_S = 100 << 10
"""Of a move beside which a flush begins and ends: 40 ms for a slice."""
ALL = CompactionPolicy(minor_share=0.9, major_share=0.9, small_bytes=1 << 20, bytes_per_s=1 << 30)
"""Moves what it can."""


@dataclass
class Recording:
    seed: int
    steps: list[Step] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # what went wrong while it ran: every one is a failure
    begin: int = 0  # the first step before which it is crashed
    name: str = ""  # by which it is lived again
    beside: int = 0  # how often a flush had ended beside a move that went on

    def __post_init__(self) -> None:
        self.name = self.name or str(self.seed)

    def journal(self, files: Files) -> JournalPlace:
        """Half of the stores have their journal on a disk of its own."""
        return JournalPlace(JOURNAL, files) if self.seed // 2 % 2 else JournalPlace.inside(DATA, files)


class Life:
    """One workload while it runs."""

    def __init__(self, simulation: Simulation, recording: Recording, rng: random.Random) -> None:
        self.simulation = simulation
        self.recording = recording
        self.rng = rng
        self.disk: SimDisk = simulation.node(NODE).disk
        self.disk.record = self._record
        self.disk.takes_direct = recording.seed % 2 == 1
        self.store: Store
        self.sent: dict[int, dict[int, int]] = {}
        self.fenced: dict[int, dict[int, None]] = {}  # ledger: the entries that were there when its fence was answered
        self.fencing: dict[int, None] = {}
        self.deleted: dict[int, None] = {}
        self.fenced_upto = -1  # by limbo
        self.first = 1  # ledgers first .. first + LEDGERS - 1 are in use
        self.told: Callable[[DiskOperation], None] = lambda operation: None  # of each operation, before it takes effect
        self._work: list[asyncio.Future[None]] = []

    def _record(self, operation: DiskOperation) -> None:
        self.recording.steps.append(Step(operation, site_of(operation)))
        self.told(operation)

    def fact(self, kind: Kind, ledger: int, entry: int = -1, size: int = 0) -> None:
        self.recording.facts.append(Fact(self.disk.operations, kind, ledger, entry, size))

    def complain(self, text: str) -> None:
        self.recording.complaints.append(text)

    # ------------------------------------------------------------------------------------ life
    async def open(self, known: RecordedDirectoryState | None = None) -> None:
        world = self.simulation.world(NODE)

        async def start() -> Store:
            world.files.make_directories(DATA)
            return await Store.open(world, DATA, UUID, TINY, known, journal=self.recording.journal(world.files))

        self.store = await self.simulation.spawn(NODE, start())

    async def settle(self) -> None:
        work, self._work = self._work, []
        for error in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, NodeCrashed):
                self.complain(f"{error!r}")

    def start(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        self._work.append(self.simulation.spawn(NODE, run()))

    # ------------------------------------------------------------------------------------ what is done to the store
    def ledger(self) -> int:
        return self.first + self.rng.randrange(LEDGERS)

    def add_something(self) -> None:
        ledger = self.ledger()
        entries = self.sent.setdefault(ledger, {})
        entry = max(entries, default=-1) + self.rng.choice((1, 1, 1, 1, 2))
        recovery = (ledger in self.fencing or ledger <= self.fenced_upto) and self.rng.random() < 0.7
        self.start(self.add(ledger, entry, recovery))

    async def add(self, ledger: int, entry: int, recovery: bool) -> None:
        await add(self, ledger, entry, recovery)

    async def _fence(self, ledger: int) -> None:
        self.fencing[ledger] = None
        self.fact(Kind.FENCING, ledger)
        status = self.store.fence(ledger, KEY)
        if status is not Status.OK:
            self.complain(f"the fence of ledger {ledger} was answered {status!r}")
        elif await self.store.seal_group_and_wait():
            self.fact(Kind.FENCED, ledger)
            self.fenced.setdefault(ledger, dict.fromkeys(await self._present(ledger)))

    async def _present(self, ledger: int) -> list[int]:
        """What a recovery would see: asked at once, without an await before the look at memory."""
        entries = sorted(self.sent.get(ledger, {}))
        answers = await asyncio.gather(*(self.store.read_entries(ledger, entry) for entry in entries))
        return [entry for entry, answer in zip(entries, answers, strict=True) if answer.status is Status.OK]

    async def _lac(self, ledger: int) -> None:
        lac = self.rng.randrange(max(self.sent.get(ledger, {}), default=0) + 1)
        self.fact(Kind.LAC_SENT, ledger, lac)
        if self.store.write_lac(ledger, KEY, lac) is Status.OK and await self.store.seal_group_and_wait():
            self.fact(Kind.LAC_ACKED, ledger, lac)

    async def _checkpoint(self) -> None:
        try:
            await self.store.checkpoint()
        except store_disk.NoSpace:
            return
        self.fact(Kind.MARKED, *self.store._checkpoint.mark.position)

    async def _delete(self, ledgers: list[int]) -> None:
        for ledger in ledgers:
            self.deleted[ledger] = None
            self.fact(Kind.DELETING, ledger)
        if await self.store.delete_ledgers(ledgers):
            for ledger in ledgers:
                self.fact(Kind.DELETED, ledger)
        await self._compact(None)

    async def _compact(self, policy: CompactionPolicy | None) -> None:
        try:
            await self.store.compactor.run_compaction(
                policy, major=self.rng.random() < 0.7, roll=self.rng.random() < 0.7
            )
        except store_disk.NoSpace:
            return

    async def _read(self, ledger: int) -> None:
        for entry, size in sorted(self.sent.get(ledger, {}).items()):
            result = await self.store.read_entries(ledger, entry, self.rng.randint(1, 4), 1 << 20)
            if result.status is Status.OK and bytes(result.entries[0]) != stored_bytes(ledger, entry, size):
                self.complain(f"entry {entry} of ledger {ledger} has other bytes than were added")

    # ------------------------------------------------------------------------------------ chapters
    async def turns(self, count: int) -> None:
        """Adds, and now and then everything else, several at once."""
        for _ in range(count):
            for _ in range(self.rng.randint(1, 3)):
                self.add_something()
                await asyncio.sleep(0)
            chance = self.rng.random()
            if chance < 0.10:
                self.start(self._fence(self.ledger()))
            elif chance < 0.20:
                self.start(self._lac(self.ledger()))
            elif chance < 0.28:
                self.start(self._checkpoint())
            elif chance < 0.34:
                self.start(self._read(self.ledger()))
            if self.rng.random() < 0.8:
                await self.settle()
        await self.settle()

    async def fences(self) -> None:
        """A fence races with adds; then recovery writes."""
        ledger = self.ledger()
        for _ in range(2):
            self.add_something()
        self.start(add(self, ledger, 1 + max(self.sent.get(ledger, {}), default=-1), False))
        self.start(self._fence(ledger))
        self.start(add(self, ledger, 2 + max(self.sent.get(ledger, {}), default=-1), False))
        await self.settle()
        self.start(self._fence(self.first + LEDGERS + 1))  # a ledger that was never written
        self.start(add(self, ledger, 1 + max(self.sent.get(ledger, {}), default=-1), True))
        self.start(self._lac(ledger))
        await self.settle()
        if self.rng.random() < 0.5:
            self.start(self._checkpoint())  # without any entry that is new
            await self.settle()

    async def killed(self) -> None:
        """`kill -9` with adds in flight; the cache survives."""
        for _ in range(self.rng.randint(0, 4)):
            self.add_something()
        if self.rng.random() < 0.5:
            self.start(self._checkpoint())
        if self.rng.random() < 0.5:
            self.start(self._compact(ALL))
        await asyncio.sleep(self.rng.random() * 0.01)
        self.simulation.crash(NODE)
        await self.settle()
        await self.open()

    async def restarted(self) -> None:
        await self.simulation.spawn(NODE, self.store.close())
        self.simulation.crash(NODE)
        await self.open()

    async def deletion(self) -> None:
        """Old ledgers go, and the logs that only they are in; new ones are written meanwhile. Perhaps without room."""
        old, self.first = self.first, self.first + self.rng.choice((3, LEDGERS, LEDGERS))
        self.start(self._checkpoint())
        await self.settle()
        for _ in range(4):
            self.add_something()
        self.start(self._checkpoint())
        await self.settle()
        self.add_something()
        if self.rng.random() < 0.5:
            self.disk.faults = [FileFault("pwrite", "mark", errno.ENOSPC, times=self.rng.choice((1, 2, 2, 3)))]
        self.start(self._delete(list(range(old, self.first))))
        await self.settle()
        self.disk.faults = []

    async def compaction(self) -> None:
        """What lives beside deleted ledgers is moved, with adds and reads meanwhile."""
        old, self.first = self.first, self.first + self.rng.choice((2, 3))
        await self.turns(2)
        self.start(self._checkpoint())
        self.start(self._delete(list(range(old, self.first))))
        await self.settle()
        if self.rng.random() < 0.7:
            await self._compaction_without_room()
        for _ in range(self.rng.randint(1, 2)):
            self.start(self._compact(ALL))
            for _ in range(3):
                self.add_something()
            self.start(self._read(self.ledger()))
            if self.rng.random() < 0.5:
                self.start(self._checkpoint())
            await self.settle()

    async def _look_for_room(self) -> None:
        await self.store.room.ensure_room(0.0)

    async def _compaction_without_room(self) -> None:
        """No room for the mark of a move: its logs are moved one by one, or not; what was copied is cut off."""
        self.disk.faults = [FileFault("pwrite", "mark", errno.ENOSPC, times=self.rng.choice((1, 2, 20)))]
        self.start(self._compact(ALL))
        await self.settle()
        self.disk.faults = []
        self.start(self._checkpoint())
        await self.settle()

    async def cold_log_is_closed(self) -> None:
        """A move finds no room behind what the cold log holds, and the log is closed: what was cut must not come back.

        From then on no mark says where it ends.
        """
        await self._close_hot_log()
        self.start(self._move(ALL, roll=False))
        await self.settle()
        short_lived = self.first + LEDGERS + 2
        for entry in range(4):
            self.sent.setdefault(short_lived, {})
            self.start(add(self, short_lived, entry, False))
            self.add_something()
        await self.settle()
        await self._close_hot_log()
        self.deleted[short_lived] = None
        self.fact(Kind.DELETING, short_lived)
        if await self.simulation.spawn(NODE, self.store.delete_ledgers([short_lived])):
            self.fact(Kind.DELETED, short_lived)
        self.disk.faults = [FileFault("pwrite", "mark", errno.ENOSPC, times=20)]
        self.start(self._move(ALL._replace(small_bytes=0), roll=False))
        await self.settle()
        self.disk.faults = []
        self.start(self._move(None, roll=True))
        await self.settle()
        self.start(self._checkpoint())
        await self.settle()

    async def flush_beside_a_move(self) -> None:
        """A move so slow that flushes begin and end while it copies: its mark names a hot log that has grown.

        The first of them names a cold log that has begun and is empty: what is moved first is small.
        """
        ledger = self.first + LEDGERS + 4  # no fence and no limbo concerns it
        for _ in range(2):
            self.start(self.add(0, 2 + max(self.sent.setdefault(0, {}), default=-2), True))  # 20 bytes, see SIZES
            self._add_next(ledger)
            self.add_something()
            await self.settle()
            await self._close_hot_log()
        await self.simulation.spawn(
            NODE, self.store._checkpoint.run_between_checkpoints(self.store._cold.close_unless_empty)
        )
        flushes = self.store._checkpoint.counters["flushed_entries"]
        self.start(self._move(ALL._replace(bytes_per_s=SLOW_BYTES_PER_S), roll=False))
        for _ in range(200):
            await asyncio.sleep(0.0005 if self.store._cold._open is None else 0.0)
        for _ in range(2):
            self._add_next(ledger)
            self.start(self._checkpoint())
            await asyncio.sleep(0.01)
        moving = self.store.compactor._lock.locked()
        self.recording.beside += moving and self.store._checkpoint.counters["flushed_entries"] > flushes
        await self.settle()
        self.start(self._checkpoint())
        await self.settle()

    async def blocks_of_which_one_finds_no_room(self) -> None:
        """Several blocks are on their way, and the journal has no room for one of them: those after it do not count."""
        for skip in (0, 1, 0):
            self.disk.faults = [FileFault("pwrite", ".jnl", errno.ENOSPC, skip=skip, times=1)]
            for at in range(4):
                self._add_next(self.first + LEDGERS + 4 + at % 3)
                await asyncio.sleep(0.0001)
            await self.settle()
            self.disk.faults = []
            self.add_something()
            await self.settle()

    async def flush_of_which_one_write_finds_no_room(self) -> None:
        """A disk that refuses one write in the middle of a flush, and no other: what was not written is not flushed."""
        for skip in (0, 1, 2, 3):
            for at in range(8):
                self._add_next(self.first + LEDGERS + 8 + at % 3)
            await self.settle()
            self.disk.faults = [FileFault("pwrite", ".log", errno.ENOSPC, skip=skip, times=1)]
            self.start(self._checkpoint())
            await self.settle()
            self.disk.faults = []
            self.add_something()
            self.start(self._checkpoint())
            await self.settle()

    def _add_next(self, ledger: int) -> None:
        self.start(self.add(ledger, 1 + max(self.sent.setdefault(ledger, {}), default=-1), False))

    async def tombstones_of_which_one_finds_no_room(self) -> None:
        """And the journal has room for the next one: the tombstones of both must be durable before their logs go."""
        old, self.first = self.first, self.first + LEDGERS
        await self._close_hot_log()
        for ledgers in ([old, old + 1], [old + 2, old + 3, old + 4]):
            for ledger in ledgers:
                self.deleted[ledger] = None
                self.fact(Kind.DELETING, ledger)
            self.disk.faults = [FileFault("pwrite", ".jnl", errno.ENOSPC, times=int(old in ledgers))]
            if await self.simulation.spawn(NODE, self.store.delete_ledgers(ledgers)):
                for ledger in ledgers:
                    self.fact(Kind.DELETED, ledger)
            self.disk.faults = []
        await self.simulation.spawn(NODE, self._collect(list(range(old, self.first))))

    async def _collect(self, ledgers: list[int]) -> None:
        """When this is done, nothing may be left of what was deleted: its data is gone."""
        await self._compact(None)
        for ledger in ledgers:
            self.fact(Kind.DELETED, ledger)

    async def _close_hot_log(self) -> None:
        self.start(self._checkpoint())
        await self.settle()
        await self.simulation.spawn(NODE, self.store._checkpoint.run_between_checkpoints(self.store._log.close))

    async def _move(self, policy: CompactionPolicy | None, *, roll: bool) -> None:
        try:
            await self.store.compactor.run_compaction(policy, major=True, roll=roll)
        except store_disk.NoSpace:
            return

    async def full(self) -> None:
        """The disk is full for a while."""
        if self.rng.random() < 0.5:
            self.disk.capacity_bytes = self.disk.used_bytes() + self.rng.randrange(8 << 10)
        else:  # there is room now and then
            kind, where = self.rng.choice(("pwrite", "allocate", "create")), self.rng.choice(PLACES)
            self.disk.faults = [FileFault(kind, where, errno.ENOSPC, times=self.rng.randint(1, 3))]
        for _ in range(4):
            self.add_something()
            if self.rng.random() < 0.3:
                self.start(self._fence(self.ledger()))
            if self.rng.random() < 0.3:
                self.start(self._checkpoint())
            await self.settle()
        if self.rng.random() < 0.5:
            self.start(self._compact(None))
            await self.settle()
        self.disk.capacity_bytes = UNLIMITED_BYTES
        self.disk.faults = []
        self.start(self._look_for_room())
        await self.settle()
        self.start(self._checkpoint())
        await self.settle()

    async def fill_disk_and_die(self) -> None:
        """Killed while the disk is full; there is room again for the start."""
        self.disk.capacity_bytes = self.disk.used_bytes() + self.rng.randrange(4 << 10)
        for _ in range(3):
            self.add_something()
        await asyncio.sleep(self.rng.random() * 0.005)
        self.simulation.crash(NODE)
        await self.settle()
        self.disk.capacity_bytes = UNLIMITED_BYTES
        await self.open()

    async def live(self) -> None:
        """The chapters of this seed, each at least once over any few seeds, with turns between them."""
        await self.open()
        await self.turns(6)
        order: list[Callable[[], Awaitable[None]]] = [
            self.fences, self.killed, self.deletion, self.restarted, self.full, self.fill_disk_and_die, self.compaction,
            self.cold_log_is_closed, self.flush_beside_a_move, self.tombstones_of_which_one_finds_no_room,
            self.blocks_of_which_one_finds_no_room, self.flush_of_which_one_write_finds_no_room,
            partial(chapters.limbo, self), partial(chapters.quarantine, self),
        ]  # fmt: skip
        self.rng.shuffle(order)
        for chapter in order:
            await chapter()
            await self.turns(4)
        await self.simulation.spawn(NODE, self.store.close())


async def add(life: Life, ledger: int, entry: int, recovery: bool) -> None:
    """One add through the store's door, as bookie/service.py does it. Mutants replace this function."""
    await settle_add(life, ledger, entry, recovery, admit(life, ledger, entry, recovery))


def admit(life: Life, ledger: int, entry: int, recovery: bool) -> Status:
    size = SIZES[(5 * ledger + 3 * entry) % len(SIZES)]
    life.sent.setdefault(ledger, {})[entry] = size
    life.fact(Kind.SENT, ledger, entry, size)
    stored = stored_bytes(ledger, entry, size)
    return life.store.add_entry(ledger, entry, KEY, (stored,), len(stored), -1, recovery)


async def settle_add(life: Life, ledger: int, entry: int, recovery: bool, status: Status) -> None:
    fenced = life.fenced.get(ledger)
    if ledger in life.deleted:
        if status is Status.OK:
            life.complain(f"ledger {ledger} is deleted and took entry {entry}")
    elif status is Status.OK and (fenced is not None or ledger <= life.fenced_upto) and not recovery:
        life.complain(f"ledger {ledger} is fenced and took entry {entry}")
    elif status is Status.FENCED and ledger not in life.fencing and ledger > life.fenced_upto:
        life.complain(f"ledger {ledger} was never fenced and refused entry {entry}")
    if status is not Status.OK or not await life.store.seal_group_and_wait():
        return
    life.fact(Kind.ACKED, ledger, entry)
    fenced = life.fenced.get(ledger)
    if fenced is not None and entry not in fenced and not recovery:
        life.complain(f"entry {entry} of ledger {ledger} was acknowledged, and the fence did not see it")


def record(seed: int) -> Recording:
    """Deterministic: the same seed and code give the same recording."""
    recording = Recording(seed)
    simulation = Simulation(seed)
    life = Life(simulation, recording, random.Random(f"{seed}/workload"))
    with small_limits():
        simulation.run(life.live())
    recording.complaints += simulation.complaints
    return recording
