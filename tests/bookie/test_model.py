"""The store against a dictionary: whatever is done in whatever order, reads say what was admitted (Hypothesis).

Every command is waited for. While the disk is full an add, a fence or a LAC may be refused after it was admitted: then
it is a *maybe*, for ever, and the store may say it or not; everything that was answered OK is certain.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.bookie.format.peer import Status
from magnetar.bookie.store.compaction_plan import Policy
from magnetar.bookie.store.disk import NoSpace
from magnetar.bookie.store.store import Store
from magnetar.runtime.sim.disk import UNLIMITED_BYTES
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import KEY, OTHER_KEY, payload_of, stored_entry
from tests.bookie.stores import NODE, add, fence, open_store, payload, simulate

LEDGERS = st.integers(1, 3)
ENTRIES = st.integers(0, 12)
COMMANDS = st.one_of(
    st.tuples(st.just("add"), LEDGERS, ENTRIES, st.booleans()),
    st.tuples(st.just("add"), LEDGERS, ENTRIES, st.booleans()),
    st.tuples(st.just("fence"), LEDGERS),
    st.tuples(st.just("lac"), LEDGERS, ENTRIES),
    st.tuples(st.just("wrong key"), LEDGERS, ENTRIES),
    st.tuples(st.just("read"), LEDGERS, ENTRIES, st.integers(1, 8)),
    st.tuples(st.just("bury"), LEDGERS),
    st.tuples(st.just("compact"), st.booleans()),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("close")),
    st.tuples(st.just("kill")),
    st.tuples(st.just("power loss")),
    st.tuples(st.just("full"), st.integers(0, 60)),
    st.tuples(st.just("room")),
)
ALL = Policy(minor_share=1.1, major_share=1.1, small_bytes=1 << 30, bytes_per_s=1 << 30)


@dataclass
class Ledger:
    entries: dict[int, bytes] = field(default_factory=dict)
    maybe: dict[int, bytes] = field(default_factory=dict)
    certain: bool = False  # something of it was answered OK
    fenced: bool = False
    maybe_fenced: bool = False
    lac: int = -1
    lac_maybe: int = -1


class Model:
    """What the store should say."""

    def __init__(self, simulation: Simulation, store: Store) -> None:
        self.simulation = simulation
        self.disk = simulation.node(NODE).disk
        self.store = store
        self.ledgers: dict[int, Ledger] = {}
        self.buried: dict[int, None] = {}

    @property
    def full(self) -> bool:
        return self.disk.capacity_bytes < UNLIMITED_BYTES

    async def do(self, name: str, *arguments: int) -> None:
        match name:
            case "close" | "kill" | "power loss":
                await self._end(name)
            case "checkpoint":
                await self._try(self.store.checkpoint())
            case _:
                await getattr(self, "_" + name.replace(" ", "_"))(*arguments)
        self.store.check()

    async def _try(self, work: object) -> None:
        """NoSpace is an answer only while the disk is full."""
        try:
            await self.simulation.spawn(NODE, work)  # type: ignore[arg-type]
        except NoSpace:
            assert self.full

    async def _end(self, name: str) -> None:
        full = self.full
        if name == "close":
            await self.simulation.spawn(NODE, self.store.close())
        self.simulation.crash(NODE, power_loss=name == "power loss")
        try:
            self.store = await open_store(self.simulation)
        except NoSpace:
            assert self.full
            self.simulation.crash(NODE)
            self.disk.capacity_bytes = UNLIMITED_BYTES
            self.store = await open_store(self.simulation)
        if name == "close" and not full:
            assert self.store.counters["replayed_records"] == 0
        assert self.store.descriptors.limbo_upto < 0

    async def _full(self, kilobytes: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes() + (kilobytes << 10)

    async def _add(self, ledger: int, entry: int, recovery: bool) -> None:
        data = payload(ledger, entry, (10, 400, 5000)[(ledger + entry) % 3])  # an entry's bytes never change
        status = await self.simulation.spawn(NODE, add(self.store, ledger, entry, data, recovery=recovery))
        known = self.ledgers.get(ledger) or Ledger()
        if ledger in self.buried or (known.fenced and not recovery):
            assert status is Status.FENCED
        elif status is Status.FENCED:
            assert known.maybe_fenced
            assert not recovery
        elif status is not Status.BUSY:
            self.ledgers[ledger] = known
            assert status is Status.OK or self.full
            if status is Status.OK:
                known.certain = True
                known.entries[entry] = data
            else:
                known.maybe[entry] = data
        else:
            assert self.full

    async def _fence(self, ledger: int) -> None:
        status = await self.simulation.spawn(NODE, fence(self.store, ledger))
        assert status is Status.OK or self.full
        if ledger not in self.buried:
            known = self.ledgers.setdefault(ledger, Ledger())
            known.maybe_fenced = True
            known.fenced = known.fenced or status is Status.OK
            known.certain = known.certain or status is Status.OK

    async def _lac(self, ledger: int, lac: int) -> None:
        status = self.store.write_lac(ledger, KEY, lac)
        assert status is (Status.FENCED if ledger in self.buried else Status.OK)
        if status is Status.OK:
            known = self.ledgers.setdefault(ledger, Ledger())
            known.lac_maybe = max(known.lac_maybe, lac)
            if await self.simulation.spawn(NODE, self.store.sealed()):
                known.lac = max(known.lac, lac)
                known.certain = True
            else:
                assert self.full

    async def _wrong_key(self, ledger: int, entry: int) -> None:
        if ledger in self.ledgers and self.ledgers[ledger].certain:
            stored = stored_entry(ledger, entry, b"intruder")
            status = self.store.add(ledger, entry, OTHER_KEY, (stored,), len(stored), -1, True)
            assert status is Status.UNAUTHORIZED
            assert self.store.fence(ledger, OTHER_KEY) is Status.UNAUTHORIZED

    async def _bury(self, ledger: int) -> None:
        if self.full:
            return
        assert await self.simulation.spawn(NODE, self.store.bury([ledger]))
        await self.simulation.spawn(NODE, self.store.compactor.run(None))
        self.ledgers.pop(ledger, None)
        self.buried[ledger] = None

    async def _compact(self, roll: bool) -> None:
        await self._try(self.store.compactor.run(ALL, major=True, roll=roll))

    async def _read(self, ledger: int, entry: int, count: int) -> None:
        result = await self.simulation.spawn(NODE, self.store.read(ledger, entry, count, 1 << 20))
        known = self.ledgers.get(ledger) or Ledger()
        if entry in known.entries:
            assert result.status is Status.OK
        elif result.status is Status.OK:
            assert entry in known.maybe
        elif known.certain:
            assert result.status is Status.NO_SUCH_ENTRY
        else:
            assert result.status in (Status.NO_SUCH_LEDGER, Status.NO_SUCH_ENTRY if known.maybe_fenced
                                     or known.maybe or known.lac_maybe >= 0 else Status.NO_SUCH_LEDGER)  # fmt: skip
        assert len(result.entries) <= count
        for i, stored in enumerate(result.entries):
            assert payload_of(stored) == {**known.maybe, **known.entries}[entry + i]
        lac = self.store.read_lac(ledger)
        assert known.lac <= lac.lac <= max(known.lac, known.lac_maybe)
        last = max(known.entries, default=-1)
        assert last <= lac.last <= max(last, *known.maybe, -1)

    async def _room(self) -> None:
        self.disk.capacity_bytes = UNLIMITED_BYTES
        await self.simulation.spawn(NODE, self.store.room.keep(0.0))

    async def read_everything(self) -> None:
        for ledger in (1, 2, 3):
            for entry in range(13):
                await self._read(ledger, entry, 1)


async def live(simulation: Simulation, commands: list[tuple[Any, ...]]) -> None:
    model = Model(simulation, await open_store(simulation))
    for command in commands:
        await model.do(*command)
        await model._read(1, 0, 4)  # after each step, whatever it was
    await model.read_everything()


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(COMMANDS, max_size=80))
def test_store_says_what_a_dictionary_would(commands: list[tuple[Any, ...]]) -> None:
    simulate(lambda simulation: live(simulation, commands))


def long_life(seed: int) -> list[tuple[Any, ...]]:
    rng = random.Random(seed)
    found: list[tuple[Any, ...]] = []
    for _ in range(120):
        ledger, entry = rng.randint(1, 3), rng.randint(0, 12)
        rare = rng.choice(
            (("lac", ledger, entry), ("read", ledger, entry, 8), ("compact", True), ("compact", True), ("checkpoint",),
             ("checkpoint",), ("kill",), ("power loss",), ("power loss",), ("close",), ("full", rng.randint(0, 8)),
             ("full", 0), ("room",), ("room",), ("fence", 3), ("bury", 3), ("wrong key", ledger, entry))
        )  # fmt: skip
        found.append(("add", ledger, entry, rng.random() < 0.5) if rng.random() < 0.6 else rare)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_store_says_what_a_dictionary_would_over_a_long_life(seed: int) -> None:
    """Hypothesis finds the small example; these reach full disks and compactions of what several lives left."""
    simulate(lambda simulation: live(simulation, long_life(seed)))
