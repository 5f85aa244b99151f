"""One bookie as the protocol needs it. This is the specification of the service (ledger protocol §1.5, §1.7, §2.7):

- An add is checked against fence and tombstone, put into memory and into the journal's queue in *one* step.
- The journal syncs its queue in groups. A reply to an add comes after the sync of its group.
- A fence holds in memory at once. *Every* reply to a request with FENCE, also a negative one, comes after the sync of
  the fence; what the request reads it reads then, so it sees every add that was admitted before the fence.
- A crash loses memory and what was not synced. A restart has what was synced: entries, fences, tombstones.
- "No such entry" and "no such ledger" mean that this bookie never acknowledged the entry and never will (unless it is a
  recovery's). What was lost or is damaged is UNKNOWN. In limbo (data was lost, the name kept) every older ledger is
  fenced, and every miss is UNKNOWN, as is the LAC.
- A tombstone is durable before anything of the ledger goes; afterwards adds are FENCED, also those of a recovery.

`Rules` are what of this may be broken on purpose: each must cost something, or the rule were not needed
(tests/simulation/protocol/test_protocol.py).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magnetar.ledger.peer_format import Status
from magnetar.ledger.reader_core import StoredCopy

from .scheduler import Scheduler

OK, MISS, NO_LEDGER, UNKNOWN = Status.OK, Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER, Status.UNKNOWN

Found = tuple[Status, int, list[StoredCopy | None]]
"""(status, LAC, entries); None is a damaged one."""
AddReply = Callable[[Sequence[Status]], None]
LacReply = Callable[[tuple[Status, int]], None]
ReadReply = Callable[[Found], None]


@dataclass
class Rules:
    negative_fence_waits: bool = True  # M08
    fence_is_durable: bool = True  # M07c
    fence_is_obeyed: bool = True
    memory_before_journal: bool = True  # M15
    add_waits_for_sync: bool = True
    misses_after_a_loss_are_unknown: bool = True  # M09
    damage_is_unknown: bool = True  # M06
    name_is_checked: bool = True  # M16 (network.py)
    tombstones_stay: bool = True  # M17
    reads_fence: bool = True


@dataclass(slots=True)
class Shelf:
    """One ledger. `synced` are the entries that a crash leaves."""

    entries: dict[int, StoredCopy]
    synced: dict[int, None]  # a set in order
    damaged: set[int]
    hidden: set[int]  # not yet where readers look (a broken rule)
    lac: int = -1
    fenced: bool = False
    fence_synced: bool = False


class Bookie:
    def __init__(
        self, name: str, scheduler: Scheduler, rng: random.Random, sync_s: Callable[[], float], rules: Rules
    ) -> None:
        self.name = name
        self.rules = rules
        self._scheduler = scheduler
        self._rng = rng
        self._sync_s = sync_s
        self.shelves: dict[int, Shelf] = {}
        self.tombstones: dict[int, bool] = {}  # → synced
        self.lost: dict[int, set[int]] = {}  # entries that were synced and are gone
        self.answered: set[int] = set()  # ledgers of which a fence was answered, once
        self.up = True
        self.read_only = False
        self.limbo_upto = -1  # ledgers up to here were there when data was lost
        self.life = 0
        self.stalled_until = 0.0
        self.slowness = 1
        self._queue: list[tuple[Callable[[], None] | None, Callable[[], None] | None]] = []  # (mark, then)
        self._in_sync: list[tuple[Callable[[], None] | None, Callable[[], None] | None]] = []
        self.on_store: Callable[[Bookie, int, StoredCopy, bool], None] = lambda *_: None
        self.on_promise: Callable[[str], None] = lambda text: None

    # ------------------------------------------------------------------------------ requests
    def add(self, ledger: int, entries: Sequence[StoredCopy], recovery: bool, reply: AddReply) -> None:
        if ledger in self.tombstones and self.rules.tombstones_stay:
            reply([Status.FENCED] * len(entries))
            return
        shelf = self.shelves.get(ledger)
        if not recovery:
            if (shelf is not None and shelf.fenced and self.rules.fence_is_obeyed) or ledger <= self.limbo_upto:
                reply([Status.FENCED] * len(entries))
                return
            if self.read_only:
                reply([Status.READ_ONLY] * len(entries))
                return
            if ledger in self.answered:
                self.on_promise(f"16: {self.name} takes an add to ledger {ledger} after it answered to a fence")
        if shelf is None:
            shelf = self._shelf(ledger)
        self._insert(ledger, shelf, entries, recovery)
        at = shelf

        def mark() -> None:
            if not self.rules.memory_before_journal:
                self._scheduler.after(self._sync_s(), self._show, at, entries)
            for stored in entries:
                at.synced[stored.entry] = None
                at.damaged.discard(stored.entry)

        if self.rules.add_waits_for_sync:
            self._journal(mark, lambda: reply([OK] * len(entries)))
        else:
            reply([OK] * len(entries))
            self._journal(mark, None)

    def _insert(self, ledger: int, shelf: Shelf, entries: Sequence[StoredCopy], recovery: bool) -> None:
        for stored in entries:
            if not self.rules.memory_before_journal and stored.entry not in shelf.entries:
                shelf.hidden.add(stored.entry)
            shelf.entries[stored.entry] = stored
            shelf.lac = max(shelf.lac, stored.lac)
            self.on_store(self, ledger, stored, recovery)

    def _show(self, shelf: Shelf, entries: Sequence[StoredCopy]) -> None:
        shelf.hidden.difference_update(stored.entry for stored in entries)

    def read_lac(self, ledger: int, fence: bool, reply: LacReply) -> None:
        if fence:
            self._fence(ledger, lambda: reply(self._lac(ledger)), missing=ledger not in self.shelves)
        else:
            reply(self._lac(ledger))

    def read(self, ledger: int, entry: int, count: int, fence: bool, reply: ReadReply) -> None:
        if fence and self.rules.reads_fence:
            shelf = self.shelves.get(ledger)
            missing = shelf is None or entry not in shelf.entries
            self._fence(ledger, lambda: reply(self._read(ledger, entry, count)), missing=missing)
        else:
            reply(self._read(ledger, entry, count))

    def _fence(self, ledger: int, then: Callable[[], None], *, missing: bool) -> None:
        if ledger in self.tombstones:
            then()
            return
        shelf = self.shelves.get(ledger) or self._shelf(ledger)
        shelf.fenced = True

        def answer() -> None:
            self.answered.add(ledger)
            then()

        if shelf.fence_synced or (missing and not self.rules.negative_fence_waits):
            if not shelf.fence_synced:
                self._journal(lambda: self._mark_fence(shelf), None)
            answer()
        else:
            self._journal(lambda: self._mark_fence(shelf), answer)

    def _mark_fence(self, shelf: Shelf) -> None:
        shelf.fence_synced = self.rules.fence_is_durable

    def _lac(self, ledger: int) -> tuple[Status, int]:
        if ledger <= self.limbo_upto:
            return UNKNOWN, -1
        shelf = self.shelves.get(ledger)
        return (NO_LEDGER, -1) if shelf is None else (OK, shelf.lac)

    def _read(self, ledger: int, entry: int, count: int) -> Found:
        shelf = self.shelves.get(ledger)
        if shelf is None:
            return self._missed(ledger, entry, NO_LEDGER, -1)
        if entry not in shelf.entries or entry in shelf.hidden:
            return self._missed(ledger, entry, MISS, shelf.lac)
        if entry in shelf.damaged and not self.rules.damage_is_unknown:
            return MISS, shelf.lac, []
        found: list[StoredCopy | None] = []
        while len(found) < count and (stored := shelf.entries.get(entry + len(found))) is not None:
            found.append(None if stored.entry in shelf.damaged else stored)
        return OK, shelf.lac, found

    def _missed(self, ledger: int, entry: int, status: Status, lac: int) -> Found:
        if ledger <= self.limbo_upto:
            return UNKNOWN, lac, []
        if entry in self.lost.get(ledger, ()) and ledger not in self.tombstones:
            self.on_promise(f"17: {self.name} says that it never had entry {entry} of ledger {ledger}")
        return status, lac, []

    def delete(self, ledger: int) -> None:
        """The tombstone is durable before the data goes."""

        def gone() -> None:
            self.tombstones[ledger] = True
            self.shelves.pop(ledger, None)
            self.lost.pop(ledger, None)

        if ledger not in self.tombstones:
            self.tombstones[ledger] = False
            self._journal(gone, None)

    def _shelf(self, ledger: int) -> Shelf:
        shelf = self.shelves[ledger] = Shelf({}, {}, set(), set())
        return shelf

    # ------------------------------------------------------------------------------ the journal
    def _journal(self, mark: Callable[[], None] | None, then: Callable[[], None] | None) -> None:
        self._queue.append((mark, then))
        if not self._in_sync and len(self._queue) == 1:
            self._scheduler.after(0.0, self._begin_sync, self.life)

    def _begin_sync(self, life: int) -> None:
        if life != self.life or self._in_sync or not self._queue:
            return
        self._in_sync, self._queue = self._queue, []
        self._scheduler.after(self._sync_s() * self.slowness, self._synced, life)

    def _synced(self, life: int) -> None:
        if life != self.life:
            return
        if self._scheduler.now < self.stalled_until:
            self._scheduler.at(self.stalled_until, self._synced, life)
            return
        group, self._in_sync = self._in_sync, []
        for mark, _ in group:
            if mark is not None:
                mark()
        for _, then in group:
            if then is not None:
                then()
        self._begin_sync(life)

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._in_sync)

    # ------------------------------------------------------------------------------ life and death
    def crash(self, *, power: bool) -> None:
        """Down. Without power the operating system writes what it was handed: a part of the queue, in order."""
        waiting = self._in_sync + self._queue
        self.life += 1
        self._in_sync, self._queue = [], []
        self.up = False
        kept = self._rng.randint(0, len(waiting)) if not power else 0
        for mark, _ in waiting[:kept]:
            if mark is not None:
                mark()

    def restart(self) -> None:
        self.up = True
        self.life += 1
        self.stalled_until = 0.0
        self.slowness = 1
        for ledger in list(self.shelves):
            shelf = self.shelves[ledger]
            shelf.entries = {entry: shelf.entries[entry] for entry in shelf.synced}
            shelf.lac = max((stored.lac for stored in shelf.entries.values()), default=-1)
            shelf.fenced = shelf.fence_synced
            if not shelf.entries and not shelf.fence_synced:
                del self.shelves[ledger]
        self.tombstones = {ledger: True for ledger, synced in self.tombstones.items() if synced}

    def wipe(self, ledger_upto: int) -> None:
        """The disk is empty. Under the same name that is limbo; under a new one it is another bookie (nemesis.py)."""
        for ledger, shelf in self.shelves.items():
            self.lost.setdefault(ledger, set()).update(shelf.synced)
        self.shelves = {}
        self.life += 1
        self._in_sync, self._queue = [], []
        if self.rules.misses_after_a_loss_are_unknown:
            self.limbo_upto = ledger_upto

    def damage(self, share: float) -> int:
        """Some entries do not match their checksums any more."""
        count = 0
        for shelf in self.shelves.values():
            for entry in shelf.synced:
                if self._rng.random() < share:
                    shelf.damaged.add(entry)
                    count += 1
        return count

    # ------------------------------------------------------------------------------ for the judge
    def ever_synced(self, ledger: int, entry: int) -> bool:
        """Synced here once: still, or lost since."""
        shelf = self.shelves.get(ledger)
        return (shelf is not None and entry in shelf.synced) or entry in self.lost.get(ledger, ())

    def is_fenced(self, ledger: int) -> bool:
        """No writer's add is taken, also after a crash."""
        shelf = self.shelves.get(ledger)
        return (shelf is not None and shelf.fence_synced) or ledger <= self.limbo_upto or ledger in self.tombstones
