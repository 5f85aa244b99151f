"""Work of the store that is cancelled at any operation of the disk, and orderly stops over it.

A *stop* is a short life: a store with some ledgers in its logs and some in memory begins the work of its kind while
clients add. At one operation of that work everything is cancelled, as bookie/server.py `Bookie.close` does, and the
store is closed; some of them serve on for a while before that, and in some the disk is full from then on. The
enumeration crashes every stop at each of its operations from the beginning of the work on, so that a kill or a power
loss follows the cancellation everywhere.

Of each kind and each life the place of the cancellation goes over all operations of the work, in strides, so that a few
stops are spread over all of it; in the moment in which the operation is done and who waits for it was not told, or a
little later. Stops are counted through; a name leads to the same one again:

    python -m tests.crashes --replay stop17/512/all
"""

import asyncio
import errno
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from magnetar.bookie.store import disk as store_disk
from magnetar.bookie.store.state_log import RecordedDirectoryState
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import DiskOperation, FileFault
from magnetar.runtime.sim.world import Simulation
from tests.bookie.stores import DATA, NODE, UUID
from tests.crashes import chapters
from tests.crashes.facts import Kind
from tests.crashes.image import MUTATING
from tests.crashes.limits import small_limits
from tests.crashes.workload import ALL, LEDGERS, TINY, Life, Recording, record

STOP = "stop"
LIVES = 4
"""Of each kind before its places are used up; half of them with direct writes."""
LATER_S = 0.0015
"""A cancellation that does not come at once comes within it: in this time one or two more calls of a worker begin."""
CLIENTS_S = 0.004
"""In which clients come: about as long as a checkpoint."""
STATES = 100
"""That are looked at of each."""
NEVER = 1 << 60
ROOMLESS = ("mark", ".lidx", ".log", ".idx", "")
"""Of what a disk that is full from the cancellation on has no room for."""

Work = Coroutine[Any, Any, None]


class Stop(NamedTuple):
    kind: str
    seed: int  # of the life
    place: int  # it is cancelled when so many operations of the work are done; NEVER: it is not


# ------------------------------------------------------------------------------------------ kinds of work
async def _some(life: Life) -> None:
    """Logs in which several ledgers are, one of them closed; and what is in memory alone."""
    await life.open()
    await life.turns(3)
    await _flush(life)
    await life.turns(3)
    await _flush(life)
    await life.turns(2)


async def _flush(life: Life) -> None:
    life.start(life._checkpoint())
    await life.settle()


async def _sparse(life: Life) -> None:
    """Logs of which a part is dead."""
    await life.open()
    await life.turns(4)
    await _flush(life)
    old, life.first = life.first, life.first + 3
    await life.turns(3)
    await _flush(life)
    await life._close_hot_log()
    for ledger in range(old, life.first):
        life.deleted[ledger] = None
        life.fact(Kind.DELETING, ledger)
    if await life.simulation.spawn(NODE, life.store.delete_ledgers(list(range(old, life.first)))):
        for ledger in range(old, life.first):
            life.fact(Kind.DELETED, ledger)
    await life.turns(1)


async def _limbo(life: Life) -> None:
    await life.open()
    await life.turns(3)
    await life.simulation.spawn(NODE, life.store.close())
    life.simulation.crash(NODE)
    upto = life.fenced_upto = life.first + 1
    life.fact(Kind.LIMBO_ENTERING, upto)

    async def known_upto() -> int:
        return upto

    await life.open(RecordedDirectoryState(losses=(chapters.LOSS,), upto=known_upto))
    life.fact(Kind.LIMBO_ENTERED, upto)
    await life.turns(2)


async def _killed(life: Life) -> None:
    await _some(life)
    life.simulation.crash(NODE)
    await life.settle()


def _dead(life: Life) -> list[int]:
    old, life.first = life.first, life.first + LEDGERS
    return list(range(old, life.first))


def _checkpoints(life: Life) -> list[Work]:
    return [life._checkpoint()]


def _compacts(life: Life) -> list[Work]:
    return [life._move(ALL, roll=False)]


def _rolls(life: Life) -> list[Work]:
    return [life._move(ALL, roll=True)]


def _collects(life: Life) -> list[Work]:
    return [life._delete(_dead(life))]


def _all_at_once(life: Life) -> list[Work]:
    return [life._move(ALL, roll=True), life._checkpoint(), life._delete(_dead(life))]


def _leaves_limbo(life: Life) -> list[Work]:
    return [chapters._leave(life, life.fenced_upto)]


def _closes(life: Life) -> list[Work]:
    return [life.store.close()]


def _opens(life: Life) -> list[Work]:
    async def open_again() -> None:
        world = life.simulation.world(NODE)
        journal = life.recording.journal(world.files)
        life.store = await Store.open(world, DATA, UUID, TINY, journal=journal)

    return [open_again()]


KINDS: dict[str, tuple[Callable[[Life], Awaitable[None]], Callable[[Life], list[Work]]]] = {
    "checkpoint": (_some, _checkpoints),
    "compaction": (_sparse, _compacts),
    "collection": (_some, _collects),
    "everything": (_sparse, _all_at_once),
    "roll": (_sparse, _rolls),
    "limbo": (_limbo, _leaves_limbo),
    "close": (_some, _closes),
    "start": (_killed, _opens),
}


# ------------------------------------------------------------------------------------------ which stop
def stop_of(number: int) -> Stop:
    """Kind after kind, life after life, place after place."""
    kinds = list(KINDS)
    turn, kind = divmod(number, len(kinds))
    return nth_of(kinds[kind], turn)


def nth_of(kind: str, turn: int) -> Stop:
    nth, seed = divmod(turn, LIVES)
    while nth >= len(places := places_of(kind, seed)):
        nth -= len(places)
        seed += LIVES
    return Stop(kind, seed, places[nth])


@lru_cache(1_000)
def places_of(kind: str, seed: int) -> tuple[int, ...]:
    """Each operation of the work when it is not cancelled: those that change something first, far from each other."""
    done = _lived(Stop(kind, seed, NEVER)).done
    changing = [place for place, what in enumerate(done, 1) if what in MUTATING]
    looking = [place for place, what in enumerate(done, 1) if what not in MUTATING]
    return (*_spread(changing), *_spread(looking))


def _spread(places: Sequence[int]) -> list[int]:
    """All of them, each far from the one before."""
    if not places:
        return []
    stride = max(1, round(len(places) * 0.618))
    while math.gcd(stride, len(places)) > 1:
        stride += 1
    return [places[at * stride % len(places)] for at in range(len(places))]


def record_named(name: str) -> Recording:
    """Of a workload by its seed, or of a stop by its number. Deterministic: the same name and code give the same."""
    number = name.removeprefix(STOP)
    return record(int(name)) if number == name else record_of(stop_of(int(number)), name)


def record_of(stop: Stop, name: str) -> Recording:
    recording = _lived(stop).life.recording
    recording.name = name
    return recording


# ------------------------------------------------------------------------------------------ living it
class Stopping:
    """One stop while it is lived."""

    def __init__(self, life: Life, stop: Stop) -> None:
        self.life = life
        self.done: list[str] = []  # the operations of the work, until it was cancelled or ended
        self._stop = stop
        self._rng = random.Random(f"{stop.kind}/{stop.seed}/{stop.place}")
        self._struck = asyncio.Event()
        self._counting = False

    def operated(self, operation: DiskOperation) -> None:
        """Called from the disk, before the operation takes effect; the loop runs when it has."""
        if not self._counting:
            return
        self.done.append(operation.kind)
        if len(self.done) == self._stop.place:
            loop = asyncio.get_running_loop()
            if self._rng.random() < 0.6:
                loop.call_soon(self._strike)
            else:
                loop.call_later(self._rng.random() * LATER_S, self._strike)

    def _strike(self) -> None:
        if self._rng.random() < 0.25:
            places = self._rng.choice(ROOMLESS)
            self.life.disk.faults = [FileFault("pwrite", places, errno.ENOSPC, times=self._rng.choice((1, 2, 50)))]
        self._struck.set()

    async def live(self) -> None:
        life = self.life
        prepare, work = KINDS[self._stop.kind]
        await prepare(life)
        life.recording.begin = len(life.recording.steps)
        await life.simulation.spawn(NODE, self._bookie(work(life)))
        life.disk.faults = []
        await life.settle()

    async def _bookie(self, works: Sequence[Work]) -> None:
        self._counting = True
        tasks = [asyncio.create_task(work) for work in works]
        stopped = asyncio.create_task(self._struck.wait())
        ended = asyncio.gather(*tasks, return_exceptions=True)
        if self._stop.kind not in ("close", "start"):
            self._clients(3)
        await asyncio.wait((stopped, ended), return_when=asyncio.FIRST_COMPLETED)
        self._counting = False
        stopped.cancel()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, store_disk.NoSpace):
                self.life.complain(f"the work failed: {result!r}")
        await self._end()

    async def _end(self) -> None:
        life = self.life
        if self._stop.kind == "start":
            await self._open()
        if self._stop.kind != "close" and self._rng.random() < 0.4:
            await self._serve_on()
        await life.store.close()

    async def _open(self) -> None:
        """Again, in the same process. If the disk fills meanwhile, the start is refused, and the next one succeeds."""
        for _ in range(2):
            self.life.disk.faults = []
            try:
                world = self.life.simulation.world(NODE)
                journal = self.life.recording.journal(world.files)
                self.life.store = await Store.open(world, DATA, UUID, TINY, journal=journal)
                return
            except store_disk.NoSpace as error:
                refused = error
        raise refused

    def _clients(self, count: int) -> None:
        """Adds that come meanwhile, also to a ledger that was not there, and perhaps a fence."""
        life = self.life
        for _ in range(count):
            ledger = self._rng.choice((life.ledger(), life.first + LEDGERS + self._rng.randrange(3)))
            entry = 1 + max(life.sent.get(ledger, {}), default=-1)
            life.sent.setdefault(ledger, {})[entry] = 0
            life.start(self._client(ledger, entry, self._rng.random() * CLIENTS_S, self._rng.random() < 0.2))

    async def _client(self, ledger: int, entry: int, after_s: float, fences: bool) -> None:
        await asyncio.sleep(after_s)
        if self.life.store._ending is not None:
            return
        if fences:
            await self.life._fence(ledger)
        else:
            await self.life.add(ledger, entry, False)

    async def _serve_on(self) -> None:
        """The bookie goes on: as if an operator's request had been cancelled and nothing else."""
        life = self.life
        self._clients(2)
        await asyncio.sleep(2 * CLIENTS_S)
        if self._rng.random() < 0.5:
            await life._checkpoint()
        if self._rng.random() < 0.5:
            await life._move(ALL, roll=self._rng.random() < 0.5)
        await self._look()
        life.store.check()

    async def _look(self) -> None:
        """Everything that was acknowledged is there, in the store that lives on."""
        life = self.life
        acked = [fact for fact in life.recording.facts if fact.kind is Kind.ACKED and fact.ledger not in life.deleted]
        for fact in acked:
            status = (await life.store.read_entries(fact.ledger, fact.entry)).status
            if status is not Status.OK:
                life.complain(f"acknowledged entry {fact.entry} of ledger {fact.ledger} is answered {status!r}")


def _lived(stop: Stop) -> Stopping:
    recording = Recording(stop.seed)
    simulation = Simulation(stop.seed)
    life = Life(simulation, recording, random.Random(f"{stop.kind}/{stop.seed}/life"))
    stopping = Stopping(life, stop)
    life.told = stopping.operated
    with small_limits():
        simulation.run(stopping.live())
    recording.complaints += simulation.complaints
    return stopping
