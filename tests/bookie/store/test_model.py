"""The store against a dictionary: whatever is done in whatever order, reads say what was admitted (Hypothesis).

`StoreAgainstDictionary` lives through adds and recovery adds to several ledgers, fences, LACs, wrong keys, reads,
deletions, checkpoints and compactions with adds beside them, full disks and freed ones, and ends of the process:
closed, killed, or with the plug pulled before any operation of the disk, which drops what was not synced in part or
whole. The invariants are looked at after each rule, and everything is read after each start and at the end.

What was answered OK is *certain*. What was admitted and not answered, because of a crash or since the disk was full,
is a *maybe*: the store may say it or not, with no other bytes. A deletion that found no room makes its ledger
*doubtful*: all that is known of it is a maybe, until it is deleted again or takes an add.

`test_the_model_notices` plants defects, each of which has been seen to fail here: a fence that no checkpoint makes
durable, a tombstone that a restart forgets, a mark captured after the swap of the memtables, entries that are
inserted after they are in the journal.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from magnetar.bookie.store.disk import NoSpace
from magnetar.bookie.store.entrylog.mover import CompactionPolicy
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import UNLIMITED_BYTES
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import KEY, OTHER_KEY, payload_of, stored_entry
from tests.bookie.stores import NODE, add, fence, open_store, payload
from tests.crashes.mutants import mutated

T = TypeVar("T")

LEDGERS = st.integers(1, 3)
ENTRIES = st.integers(0, 12)
ADDS = st.lists(st.tuples(LEDGERS, ENTRIES, st.booleans()), min_size=1, max_size=6)
ALL = CompactionPolicy(minor_share=1.1, major_share=1.1, small_bytes=1 << 30, bytes_per_s=1 << 30)
PAUSES_S = (0.0, 0.001, 0.004)
"""Between adds; a checkpoint takes some milliseconds."""
LONG = settings(
    max_examples=25, stateful_step_count=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
"""A life that fails is printed as it is: to see it shrunk, which takes minutes, leave out `phases`."""


@dataclass
class Ledger:
    entries: dict[int, bytes] = field(default_factory=dict)
    maybe: dict[int, bytes] = field(default_factory=dict)
    certain: bool = False  # something of it was answered OK
    fenced: bool = False
    maybe_fenced: bool = False
    lac: int = -1
    lac_maybe: int = -1
    doubtful: bool = False

    def doubt(self) -> None:
        self.maybe.update(self.entries)
        self.entries = {}
        self.lac = -1
        self.maybe_fenced, self.fenced, self.certain, self.doubtful = True, False, False, True


class StoreAgainstDictionary(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 16), direct=st.booleans())
    def begin(self, seed: int, direct: bool) -> None:
        self.simulation = Simulation(seed)
        self.disk = self.simulation.node(NODE).disk
        self.disk.takes_direct = direct
        self.ledgers: dict[int, Ledger] = {}
        self.deleted: dict[int, None] = {}
        self.ended = False
        self.turn = 0
        self.store: Store = self.live(open_store(self.simulation))

    def live(self, work: Coroutine[Any, Any, T]) -> T:
        return self.simulation.loop.run_until_complete(work)

    async def at_bookie(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.simulation.spawn(NODE, work)

    @property
    def full(self) -> bool:
        return self.disk.capacity_bytes < UNLIMITED_BYTES

    async def unless_full(self, work: Coroutine[Any, Any, object]) -> None:
        """NoSpace is an answer only while the disk is full."""
        try:
            await self.at_bookie(work)
        except NoSpace:
            assert self.full

    # ------------------------------------------------------------------------------------ adds
    async def add(self, ledger: int, entry: int, recovery: bool) -> None:
        """An entry's bytes never change. A crash may come before the answer."""
        data = payload(ledger, entry, (10, 400, 5000)[(ledger + entry) % 3])
        before = self.ledgers.get(ledger) or Ledger()
        refused = ledger in self.deleted or (before.fenced and not recovery)
        doubtful = before.maybe_fenced if not recovery else before.doubtful
        if not refused:
            self.ledgers.setdefault(ledger, before).maybe.setdefault(entry, data)
        status, had_room = await self.at_bookie(self.add_and_look(ledger, entry, data, recovery))
        if refused or status is Status.FENCED:
            assert status is Status.FENCED
            assert refused or doubtful
        elif status is Status.OK:
            before.entries[entry] = data
            before.certain = True
            before.doubtful = False
        elif not self.full:
            assert (status, had_room) == (Status.BUSY, False)
            await self.at_bookie(self.room_again())

    async def add_and_look(self, ledger: int, entry: int, data: bytes, recovery: bool) -> tuple[Status, bool]:
        """The answer, and whether there is room. BUSY is answered in the turn of the call: it had none."""
        status = await add(self.store, ledger, entry, data, recovery=recovery)
        return status, self.store.has_room

    async def room_again(self) -> None:
        """The tables hold a few dozen entries: a checkpoint that is under way makes room."""
        async with asyncio.timeout(10.0):
            while not self.store.has_room:  # noqa: ASYNC110 - of a simulated world, in which nobody tells
                await asyncio.sleep(0.01)

    async def adds(self, adds: list[tuple[int, int, bool]], *beside: Coroutine[Any, Any, None]) -> None:
        """All at once; with something beside them, one after the other, from its first moments on."""
        work = [asyncio.ensure_future(each) for each in beside]
        for at, each in enumerate(adds):
            if beside and not self.simulation.is_node_running(NODE):
                break
            work.append(asyncio.ensure_future(self.add(*each)))
            if beside:
                await asyncio.sleep(PAUSES_S[at % len(PAUSES_S)])
        for result in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, NodeCrashed):
                raise result

    @rule(adds=ADDS)
    def add_some(self, adds: list[tuple[int, int, bool]]) -> None:
        self.live(self.adds(adds))

    @rule(ledger=LEDGERS, first=ENTRIES, count=st.integers(1, 6))
    def add_a_run(self, ledger: int, first: int, count: int) -> None:
        self.live(self.adds([(ledger, entry, False) for entry in range(first, min(first + count, 13))]))

    @rule(ledger=LEDGERS)
    def fence(self, ledger: int) -> None:
        known = self.ledgers.setdefault(ledger, Ledger()) if ledger not in self.deleted else Ledger()
        known.maybe_fenced = True
        status = self.live(self.at_bookie(fence(self.store, ledger)))
        assert status is Status.OK or self.full
        if status is Status.OK and not known.doubtful:  # else it may be that of a deleted ledger
            known.fenced = known.certain = True

    @rule(ledger=LEDGERS, lac=ENTRIES)
    def write_lac(self, ledger: int, lac: int) -> None:
        status = self.store.write_lac(ledger, KEY, lac)
        known = self.ledgers.get(ledger) or Ledger()
        if ledger in self.deleted or (known.doubtful and status is not Status.OK):
            assert status is Status.FENCED
            return
        assert status is Status.OK
        self.ledgers[ledger] = known
        known.lac_maybe = max(known.lac_maybe, lac)
        if self.live(self.at_bookie(self.store.seal_group_and_wait())):
            known.lac = max(known.lac, lac)
            known.certain = True
            known.doubtful = False
        else:
            assert self.full

    @rule(ledger=LEDGERS, entry=ENTRIES)
    def intrude(self, ledger: int, entry: int) -> None:
        if ledger in self.ledgers and self.ledgers[ledger].certain:
            stored = stored_entry(ledger, entry, b"intruder")
            status = self.store.add_entry(ledger, entry, OTHER_KEY, (stored,), len(stored), -1, True)
            assert status is Status.UNAUTHORIZED
            assert self.store.fence(ledger, OTHER_KEY) is Status.UNAUTHORIZED

    # ------------------------------------------------------------------------------------ deletion and keeping
    @rule(ledger=st.sampled_from((1, 2, 3, 3)), compact=st.booleans())
    @precondition(lambda self: len(self.deleted) < 2)
    def delete(self, ledger: int, compact: bool) -> None:
        if self.live(self.at_bookie(self.store.delete_ledgers([ledger]))):
            self.ledgers.pop(ledger, None)
            self.deleted[ledger] = None
        else:
            assert self.full
            self.ledgers.setdefault(ledger, Ledger()).doubt()
        if compact:
            self.live(self.unless_full(self.store.compactor.run_compaction(None)))

    @rule(adds=st.one_of(st.just([]), ADDS))
    def checkpoint(self, adds: list[tuple[int, int, bool]]) -> None:
        self.live(self.adds(adds, self.unless_full(self.store.checkpoint())))

    @rule(adds=st.one_of(st.just([]), ADDS), major=st.booleans(), roll=st.booleans())
    def compact(self, adds: list[tuple[int, int, bool]], major: bool, roll: bool) -> None:
        self.live(self.adds(adds, self.unless_full(self.store.compactor.run_compaction(ALL, major=major, roll=roll))))

    @rule(kilobytes=st.integers(0, 40))
    def fill_the_disk(self, kilobytes: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes() + (kilobytes << 10)

    @rule()
    @precondition(lambda self: self.full)
    def free_the_disk(self) -> None:
        self.disk.capacity_bytes = UNLIMITED_BYTES
        self.live(self.at_bookie(self.store.room.ensure_room(0.0)))

    # ------------------------------------------------------------------------------------ the end of a process
    @rule(adds=ADDS, checkpoint=st.booleans(), operations=st.integers(1, 30), power_loss=st.booleans())
    def crash(self, adds: list[tuple[int, int, bool]], checkpoint: bool, operations: int, power_loss: bool) -> None:
        """Before some operation of the disk, with adds in flight; or when all is answered."""
        self.simulation.crash_at(NODE, operations, power_loss=power_loss)
        beside = [self.unless_full(self.store.checkpoint())] if checkpoint else []
        self.live(self.adds(adds, *beside))
        self.disk.cancel_crash()
        self.simulation.crash(NODE, power_loss=power_loss)
        self.start()

    @rule(power_loss=st.booleans())
    def die_idle(self, power_loss: bool) -> None:
        self.simulation.crash(NODE, power_loss=power_loss)
        self.start()

    @rule()
    def restart(self) -> None:
        full = self.full
        self.live(self.at_bookie(self.store.close()))
        self.simulation.crash(NODE)
        self.start()
        if not full:
            assert self.store.counters["replayed_records"] == 0

    def start(self) -> None:
        try:
            self.store = self.live(open_store(self.simulation))
        except NoSpace:
            assert self.full
            self.simulation.crash(NODE)
            self.disk.capacity_bytes = UNLIMITED_BYTES
            self.store = self.live(open_store(self.simulation))
        self.read_everything()

    # ------------------------------------------------------------------------------------ reads
    @rule(ledger=LEDGERS, entry=ENTRIES, count=st.integers(1, 8))
    def read(self, ledger: int, entry: int, count: int) -> None:
        self.live(self.at_bookie(self.look(ledger, entry, count)))

    async def look(self, ledger: int, entry: int, count: int) -> None:
        result = await self.store.read_entries(ledger, entry, count, 1 << 20)
        known = self.ledgers.get(ledger) or Ledger()
        if entry in known.entries:
            assert result.status is Status.OK
        elif result.status is Status.OK:
            assert entry in known.maybe
        else:
            assert result.status in (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)
            assert not known.certain or result.status is Status.NO_SUCH_ENTRY
            there = known.certain or known.maybe_fenced or known.maybe or known.lac_maybe >= 0
            assert there or result.status is Status.NO_SUCH_LEDGER
        assert len(result.entries) <= count
        for at, stored in enumerate(result.entries, entry):
            assert payload_of(stored) == {**known.maybe, **known.entries}[at]

    def read_everything(self) -> None:
        async def look() -> None:
            for ledger in (1, 2, 3):
                for entry in range(13):
                    await self.look(ledger, entry, 1)

        self.live(self.at_bookie(look()))

    # ------------------------------------------------------------------------------------ always
    @invariant()
    def it_is_whole(self) -> None:
        self.store.check()
        assert self.store.descriptors.limbo_upto < 0, self.store.limbo_losses
        assert self.store.descriptors.quarantined() == []
        assert self.simulation.complaints == []

    @invariant()
    def it_says_what_the_dictionary_says(self) -> None:
        """The ends of all ledgers, and some entries of one."""
        for ledger in (1, 2, 3):
            known = self.ledgers.get(ledger) or Ledger()
            said = self.store.read_lac(ledger)
            assert known.lac <= said.lac <= max(known.lac, known.lac_maybe)
            last = max(known.entries, default=-1)
            assert last <= said.last <= max(last, *known.maybe, -1)
        self.turn += 1
        self.read(1 + self.turn % 3, 5 * self.turn % 13, 4)

    def teardown(self) -> None:
        async def over() -> None:
            return

        if not hasattr(self, "simulation"):
            return
        try:
            if hasattr(self, "store"):
                self.read_everything()
        finally:
            self.simulation.run(over())


TestStore = StoreAgainstDictionary.TestCase
TestStore.settings = LONG


@pytest.mark.parametrize(
    "mutant",
    [
        "M07 the fence bit is not durable after a checkpoint",
        "M15 journal before memtable",
        "M17 a tombstone that a restart forgets",
        "M23 the mark is captured after the swap",
    ],
)
def test_the_model_notices(mutant: str) -> None:
    with mutated(mutant), pytest.raises(Exception):  # noqa: B017, PT011
        run_state_machine_as_test(StoreAgainstDictionary, settings=LONG)
