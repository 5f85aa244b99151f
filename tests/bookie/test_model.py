"""The store against a dictionary: whatever is done in whatever order, reads say what was admitted (Hypothesis)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.bookie.format.peer import Status
from magnetar.bookie.store.compaction_plan import Policy
from magnetar.bookie.store.store import Store
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import KEY, OTHER_KEY, payload_of, stored_entry
from tests.bookie.stores import NODE, add, fence, open_store, payload, simulate

LEDGERS = st.integers(1, 3)
ENTRIES = st.integers(0, 12)
EVERYTHING = Policy(1.1, 1.1)
"""Moves every closed log, whatever lives in it."""
COMMANDS = st.one_of(
    st.tuples(st.just("add"), LEDGERS, ENTRIES, st.booleans()),
    st.tuples(st.just("add"), LEDGERS, ENTRIES, st.booleans()),
    st.tuples(st.just("fence"), LEDGERS),
    st.tuples(st.just("lac"), LEDGERS, ENTRIES),
    st.tuples(st.just("wrong key"), LEDGERS, ENTRIES),
    st.tuples(st.just("read"), LEDGERS, ENTRIES, st.integers(1, 8)),
    st.tuples(st.just("bury"), LEDGERS),
    st.tuples(st.just("checkpoint")),
    st.tuples(st.just("compact")),
    st.tuples(st.just("close")),
    st.tuples(st.just("kill")),
    st.tuples(st.just("power loss")),
)


@dataclass
class Ledger:
    entries: dict[int, bytes] = field(default_factory=dict)
    fenced: bool = False
    lac: int = -1


class Model:
    """What the store should say; every command is waited for, so all of it is durable."""

    def __init__(self, simulation: Simulation, store: Store) -> None:
        self.simulation = simulation
        self.store = store
        self.ledgers: dict[int, Ledger] = {}
        self.buried: set[int] = set()

    async def do(self, name: str, *arguments: int) -> None:
        match name:
            case "close" | "kill" | "power loss":
                if name == "close":
                    await self.simulation.spawn(NODE, self.store.close())
                self.simulation.crash(NODE, power_loss=name == "power loss")
                self.store = await open_store(self.simulation)
                if name == "close":
                    assert self.store.counters["replayed_records"] == 0
            case "checkpoint":
                await self.simulation.spawn(NODE, self.store.checkpoint())
            case "compact":
                compacted = await self.simulation.spawn(NODE, self.store.compactor.run(EVERYTHING, roll=True))
                assert compacted.bad_records == 0
            case _:
                await getattr(self, "_" + name.replace(" ", "_"))(*arguments)
        self.store.check()

    async def _add(self, ledger: int, entry: int, recovery: bool) -> None:
        data = payload(ledger, entry, (10, 400, 5000)[(ledger + entry) % 3])  # an entry's bytes never change
        status = await self.simulation.spawn(NODE, add(self.store, ledger, entry, data, recovery=recovery))
        if ledger in self.buried or (self._fenced(ledger) and not recovery):
            assert status is Status.FENCED
        else:
            assert status is Status.OK
            self.ledgers.setdefault(ledger, Ledger()).entries[entry] = data

    async def _fence(self, ledger: int) -> None:
        assert await self.simulation.spawn(NODE, fence(self.store, ledger)) is Status.OK
        if ledger not in self.buried:
            self.ledgers.setdefault(ledger, Ledger()).fenced = True

    async def _lac(self, ledger: int, lac: int) -> None:
        status = self.store.write_lac(ledger, KEY, lac)
        assert status is (Status.FENCED if ledger in self.buried else Status.OK)
        if status is Status.OK:
            assert await self.simulation.spawn(NODE, self.store.sealed())
            known = self.ledgers.setdefault(ledger, Ledger())
            known.lac = max(known.lac, lac)

    async def _wrong_key(self, ledger: int, entry: int) -> None:
        if ledger in self.ledgers:
            stored = stored_entry(ledger, entry, b"intruder")
            status = self.store.add(ledger, entry, OTHER_KEY, (stored,), len(stored), -1, True)
            assert status is Status.UNAUTHORIZED
            assert self.store.fence(ledger, OTHER_KEY) is Status.UNAUTHORIZED

    async def _bury(self, ledger: int) -> None:
        assert await self.simulation.spawn(NODE, self.store.bury([ledger]))
        await self.simulation.spawn(NODE, self.store.compactor.run(None))
        self.ledgers.pop(ledger, None)
        self.buried.add(ledger)

    async def _read(self, ledger: int, entry: int, count: int) -> None:
        result = await self.simulation.spawn(NODE, self.store.read(ledger, entry, count, 1 << 20))
        known = self.ledgers.get(ledger)
        if known is None:
            assert result.status is Status.NO_SUCH_LEDGER
        elif entry not in known.entries:
            assert result.status is Status.NO_SUCH_ENTRY
        else:
            assert result.status is Status.OK
            assert 1 <= len(result.entries) <= count
            for i, stored in enumerate(result.entries):
                assert payload_of(stored) == known.entries[entry + i]
        lac = self.store.read_lac(ledger)
        assert lac.lac == (-1 if known is None else known.lac)
        assert lac.last == (-1 if known is None else max(known.entries, default=-1))

    async def read_everything(self) -> None:
        for ledger in (1, 2, 3):
            for entry in range(13):
                await self._read(ledger, entry, 1)

    def _fenced(self, ledger: int) -> bool:
        return ledger in self.ledgers and self.ledgers[ledger].fenced


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(COMMANDS, max_size=80))
def test_store_says_what_a_dictionary_would(commands: list[tuple[str, int]]) -> None:
    async def main(simulation: Simulation) -> None:
        model = Model(simulation, await open_store(simulation))
        for command in commands:
            await model.do(*command)
        await model.read_everything()

    simulate(main)
