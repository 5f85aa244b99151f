"""What no crash of a healthy store passes: whose the directory is, and starts and scrubbers that find damage.

A *case* lives once, one step behind the other (tests/crashes/loop.py): `live` does what is done, and says what is
promised from then on. Then it is crashed as a workload is (tests/crashes/image.py), at every operation from `begin`
on: `check` starts on what is left, and what was said until the crash must hold. The same with each of the case's syncs
taken away, and there a state must fail. What the metadata held at a crash is what was written to it until then.

    python -m tests.crashes --replay loss/188/none
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, cast

from magnetar.bookie.maintenance.scrub import Scrubber
from magnetar.bookie.store import identity
from magnetar.bookie.store.replay import JournalPosition
from magnetar.bookie.store.state_log import RecordedDirectoryState
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.metadata.store import CommitOperation as MetadataOperation
from magnetar.metadata.store import MetadataStore, PutNode, VersionedValue
from magnetar.runtime.files import join_path
from magnetar.runtime.network import World
from magnetar.runtime.sim.disk import DiskOperation, SimDisk, SimFiles
from tests.bookie.entries import payload_of
from tests.bookie.stores import DATA, SMALL, UUID, add, payload
from tests.crashes.control import Found
from tests.crashes.enumerate import Failure
from tests.crashes.image import Image, State, Step, cut_named, cuts_of, points
from tests.crashes.limits import small_limits
from tests.crashes.loop import TinyLoop, tiny_world
from tests.crashes.sites import function_of, site_of
from tests.crashes.verify import Broken

ENTRIES = 6
LEDGERS = (1, 2)
PLACE = "here"
FIRST, LATER = 5, 9
"""The largest ledger id that was given out: when the life found the loss, and for whoever starts after a crash."""

Nodes = dict[str, VersionedValue]


class Metadata:
    """As much of a metadata store as an identity needs; every change is kept."""

    def __init__(self, nodes: Nodes, changed: Callable[[Nodes], None]) -> None:
        self._nodes = dict(nodes)
        self._changed = changed

    async def get(self, path: str) -> VersionedValue | None:
        return self._nodes.get(path)

    async def children(self, path: str) -> list[str]:
        return sorted(name.removeprefix(f"{path}/") for name in self._nodes if name.startswith(f"{path}/"))

    async def commit(self, operations: Sequence[MetadataOperation]) -> list[int]:
        versions = list[int]()
        for each in operations:
            assert isinstance(each, PutNode), "an identity deletes nothing, and puts what it changes"
            known = self._nodes.get(each.path)
            self._nodes[each.path] = VersionedValue(each.value, 0 if known is None else known.version + 1)
            versions.append(self._nodes[each.path].version)
        self._changed(dict(self._nodes))
        return versions

    async def put(self, path: str, value: bytes, expected: int = 0, *, ephemeral: bool = False) -> int:
        return (await self.commit([PutNode(path, value, expected, ephemeral)]))[0]


class Stage:
    """A disk with a process on it, which is recorded."""

    def __init__(self, disk: SimDisk, nodes: Nodes | None = None) -> None:
        self.steps: list[Step] = []
        self.said: list[tuple[int, str]] = []
        self.nodes: list[tuple[int, Nodes]] = [(-1, nodes or {})]
        self.begin = 0  # the first step before which it is crashed
        self._disk = disk
        disk.record = self._record
        self._loop = TinyLoop()
        self.world: World = tiny_world(self._loop, SimFiles(disk), disk.operations)
        self.metadata = cast("MetadataStore", Metadata(self.nodes[0][1], self._keep))

    def _keep(self, nodes: Nodes) -> None:
        self.nodes.append((self._disk.operations, nodes))

    def _record(self, operation: DiskOperation) -> None:
        self.steps.append(Step(operation, site_of(operation)))

    def say(self, what: str) -> None:
        self.said.append((self._disk.operations, what))

    def crash_from_here(self) -> None:
        self.begin = len(self.steps)

    def play(self, act: Awaitable[None]) -> None:
        async def run() -> None:
            await act

        try:
            with small_limits():
                self._loop.drive(run())
        finally:
            self._loop.abandon()

    async def open(self, upto: int) -> Store:
        async def known() -> int:
            return upto

        self.world.files.make_directories(DATA)
        return await Store.open(self.world, DATA, UUID, SMALL, RecordedDirectoryState(upto=known))

    def damage(self, suffix: str, offset: int) -> None:
        """A bit is flipped, in the first file of that name; a negative offset counts from the end."""
        file = self.world.files.open(next(path for path in self._disk.list_paths() if path.endswith(suffix)))
        at = offset % file.size()
        file.pwrite([bytes([file.pread(1, at)[0] ^ 1])], at)
        file.fdatasync()
        file.close()


class Case(NamedTuple):
    functions: tuple[str, ...]  # whose syncs are taken away
    live: Callable[[Stage], Awaitable[None]]
    check: Callable[[Stage, Sequence[str]], Awaitable[None]]


def hold(sentence: str, holds: bool) -> None:
    if not holds:
        raise Broken(sentence)


# ------------------------------------------------------------------------------------------ whose it is
async def _three_starts(stage: Stage) -> None:
    for _ in range(3):
        claimed = await identity.claim_directory(stage.world, stage.metadata, DATA, PLACE)
        stage.world.files.make_directories(join_path(DATA, "journal"))  # its store
        await identity.record_bookie_start(stage.world, stage.metadata, DATA, claimed, JournalPosition(1, 0))
        claimed.lock.close()
        stage.say(claimed.uuid_text)


async def _claim_again(stage: Stage, said: Sequence[str]) -> None:
    claimed = await identity.claim_directory(stage.world, stage.metadata, DATA, PLACE)
    hold(f"a crash is not a roll-back: {claimed.losses}", not claimed.losses)
    hold("it comes back as another bookie", not said or claimed.uuid_text == said[0])


# ------------------------------------------------------------------------------------------ damage
async def _two_ledgers(stage: Stage) -> None:
    """In one log, which is closed."""
    store = await stage.open(FIRST)
    for ledger in LEDGERS:
        for entry in range(ENTRIES):
            assert await add(store, ledger, entry, payload(ledger, entry)) is Status.OK
    await store.close()


async def _loss(stage: Stage) -> None:
    """An entry and the index that knew of it; limbo, until somebody says that it is over."""
    await _two_ledgers(stage)
    stage.damage(".log", 4096 + 400)
    stage.damage(".idx", 70)
    stage.crash_from_here()
    store = await stage.open(FIRST)
    stage.say("limbo")
    stage.say("leaving")
    await store.leave_limbo()
    stage.say("left")
    assert await add(store, 7, 0, b"after") is Status.OK


async def _start_after_loss(stage: Stage, said: Sequence[str]) -> None:
    store = await stage.open(LATER)
    upto = store.descriptors.limbo_upto
    if "left" in said:
        hold(f"limbo was left and is back, up to {upto}", upto == -1)
    elif "leaving" in said:
        hold(f"limbo was up to {FIRST} and is up to {upto}", upto in (-1, FIRST))
    elif "limbo" in said:
        hold(f"limbo was up to {FIRST} and is up to {upto}", upto == FIRST)
    else:
        hold("what a start found missing is forgotten", upto in (FIRST, LATER))


async def _nothing_to_lose(stage: Stage) -> None:
    """A mark is gone, and no ledger was ever given out: a first start that was cut short."""
    await (await stage.open(-1)).close()
    stage.world.files.remove(join_path(DATA, "mark"))
    stage.world.files.sync_directory(DATA)
    stage.crash_from_here()
    store = await stage.open(-1)
    stage.say("serving")
    for entry in range(2):
        assert await add(store, 1, entry, payload(1, entry)) is Status.OK


async def _start_without_loss(stage: Stage, said: Sequence[str]) -> None:
    store = await stage.open(LATER if said else -1)
    hold("nothing was lost, and the store is in limbo", store.descriptors.limbo_upto == -1)


async def _scrub(stage: Stage) -> None:
    """The table of an extent is damaged; the scrubber mends it, and does not look at it again for a week."""
    await _two_ledgers(stage)
    stage.damage(".idx", -20)
    stage.crash_from_here()
    store = await stage.open(FIRST)

    async def tell(ledger: int) -> None:
        raise Broken(f"an entry of ledger {ledger} is damaged")

    scrubber = Scrubber(stage.world, store, DATA, UUID, 60.0, tell)
    await scrubber.run_pass()
    assert scrubber.counters["scrub_tables_mended"] == 1
    stage.say("mended")


async def _read_all(stage: Stage, said: Sequence[str]) -> None:
    store = await stage.open(LATER)
    for ledger in LEDGERS:
        for entry in range(ENTRIES):
            found = await store.read_entries(ledger, entry)
            whole = found.status is Status.OK and payload_of(found.entries[0]) == payload(ledger, entry)
            hold(f"entry {entry} of ledger {ledger}: {found.status!r}", whole or not said)


CASES = {
    "owner": Case(("lock_directory", "_make_cookie", "record_bookie_start"), _three_starts, _claim_again),
    "loss": Case(("DataLossLog._write", "rebuild_index"), _loss, _start_after_loss),
    "nothing-to-lose": Case(("DataLossLog.delete_log",), _nothing_to_lose, _start_without_loss),
    "scrub": Case(("rewrite_table",), _scrub, _read_all),
}


# ------------------------------------------------------------------------------------------ crashing it
class Looked(NamedTuple):
    states: int
    failures: list[Failure]  # with every sync
    controls: list[Found]  # without each in turn


def look(name: str) -> Looked:
    case = CASES[name]
    life = _lived(case)
    sites = dict.fromkeys(step.site for step in life.steps[life.begin :] if function_of(step.site) in case.functions)
    failures: list[Failure] = []
    states = 0
    for failure in _states(name, case, life, ()):
        states += 1
        failures += [failure] if failure else []
    return Looked(states, failures, [_without(name, case, life, site) for site in sites])


def _lived(case: Case) -> Stage:
    stage = Stage(SimDisk())
    stage.play(case.live(stage))
    return stage


def _without(name: str, case: Case, life: Stage, site: str) -> Found:
    """With everything volatile lost first: that fails soonest."""
    states = 0
    for cuts_max in (1, None):
        for failure in _states(name, case, life, (site,), cuts_max):
            states += 1
            if failure is not None:
                return Found(site, failure, states)
    return Found(site, None, states)


def _states(
    name: str, case: Case, life: Stage, removed: tuple[str, ...], cuts_max: int | None = None
) -> Iterator[Failure | None]:
    """Each state of the first `cuts_max` cuts (None: of all): None, or how it fails. Equal ones, of which the same was
    said, once."""
    seen: set[object] = set()
    for at, image in _images(life, removed):
        said, nodes = _until(life, at)
        for cut in islice(cuts_of(image, f"{name}/{at}"), cuts_max):
            state = image.state(cut)
            key = state.key(), len(said), len(nodes), str(nodes)
            if key not in seen:
                seen.add(key)
                error = _checked(case, state, said, nodes)
                yield None if error is None else Failure(f"{name}/{at}/{cut.name}", f"{type(error).__name__}: {error}")


def _images(life: Stage, removed: tuple[str, ...]) -> Iterator[tuple[int, Image]]:
    image, done = Image(removed=removed), 0
    for at in points(life.steps):
        for step in life.steps[done:at]:
            image.follow(step)
        done = at
        if at >= life.begin:
            yield at, image


def _until(life: Stage, at: int) -> tuple[list[str], Nodes]:
    """What was said, and what the metadata held, before that step."""
    last = life.steps[at].operation.number - 1 if at < len(life.steps) else 1 << 60
    return [what for when, what in life.said if when <= last], [now for when, now in life.nodes if when <= last][-1]


def _checked(case: Case, state: State, said: list[str], nodes: Nodes) -> Exception | None:
    stage = Stage(state.disk(), nodes)
    try:
        stage.play(case.check(stage, said))
    except Exception as error:
        return error
    return None


def replay(name: str, without: str) -> tuple[list[Step], Exception | None]:
    """The steps before a crash by its name, and what is wrong after it."""
    case_name, where, cut = name.split("/")
    life = _lived(CASES[case_name])
    for at, image in _images(life, (without,) if without else ()):
        if at == int(where):
            state = image.state(cut_named(image, f"{case_name}/{at}", cut))
            return life.steps[:at], _checked(CASES[case_name], state, *_until(life, at))
    raise ValueError(f"case {case_name} has no crash point {where}")
