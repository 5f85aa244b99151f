"""The verbs that an operator sends to a running bookie: the peer operation ADMIN (ledger/peer_format.py), in JSON.

    request = {"verb": VERB, …options}
    answer  = the verb's object, or {"error": class of proto/errors.py, "message": what was wrong and what to do}

| verb | options | answer |
|---|---|---|
| state | – | who it is, its disk, its logs in short, limbo, scrubber, garbage collection |
| report | – | its clock, version, limit of open files, how long a sync of the journal takes |
| gc-plan | major | per log: size, live share, who holds it (ledgers and their topics), what would be done and why |
| gc-start | major, force, roll | {"started": true}; Busy when it is running already |
| gc-status | – | running, how far, what the last run did or why it failed |
| scrub-status | – | where the scrubber is and what it found |
| limbo-status | – | how much of its lost data the bookie has restored, and what it cannot restore |
| accept-loss | – | {"givenUp": {ledger: what it lacks}}: leaves limbo without that data, after one more pass |

Verbs about ledgers and their copies: admin_repair.py. No verb delays adds: each runs in a task of its own
(bookie/service.py), and its work runs in the store's workers. A run continues when the client that started it
disconnects. The topic of a ledger is in its properties in the metadata (metadata/records.py `LedgerRecord`). For the
ledgers in an answer it is read there, `LOOKUPS_AT_ONCE` at a time and at most `LOOKUPS_MAX` in one answer. A ledger
without a record was deleted, and its grace period runs. An option of a wrong type or an unknown verb is
InvalidRequest; a request that is no JSON is BAD_REQUEST.

Who may ask: with keys (runtime/peer/keys.py `PeerServerKeys`) operators and brokers, from any machine, and no bookie.
Without keys every client that reaches the bookie's port; then a verb of `CHANGES` (it starts work, gives data up or
moves copies) is Unauthorized from another machine. No verb shows a key or an entry.
Guarded by tests/bookie/test_admin.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from ..metadata import paths
from ..metadata.records import LedgerRecord, written_format
from ..metadata.store import MetadataStore, get_record
from ..proto.errors import Busy, InvalidRequest, MagnetarError, Unauthorized, Unavailable
from ..proto.versions import PRODUCT
from ..runtime.access import LOCAL, Principal, PrincipalKind
from ..runtime.clock import Clock
from ..runtime.descriptors import PROCESS
from ..runtime.metrics import RecentQuantiles
from ..runtime.tasks import Tasks
from .disk_monitor import DiskMonitor
from .maintenance.garbage import GarbageCollector, GarbageProgress, GarbageResult
from .maintenance.limbo import LimboRestorer
from .maintenance.scrub import Scrubber
from .store.disk import NoSpace
from .store.entrylog.mover import LogPlan
from .store.store import Store

_LOG = logging.getLogger("magnetar.bookie.admin")

LOOKUPS_AT_ONCE = 16
LOOKUPS_MAX = 2000
BLOCKED_MAX = 1000
"""Ledgers in limbo that are named in an answer."""

CHANGES = frozenset({"gc-start", "accept-loss", "repair-enable", "depart"})
"""Verbs that are Unauthorized from another machine where no keys say who asks."""

ADMINISTRATORS = ("broker", "operator")
"""Roles of members that may ask."""

Json = dict[str, object]
Options = Mapping[str, object]
Verb = Callable[[Options], Awaitable[Json]]


class BookieAdmin:
    """Answers the admin requests that operators send to a bookie. `BookieService` calls `answer` (its `on_admin`).
    `metadata` returns the current metadata session.
    """

    def __init__(
        self, bookie_id: str, store: Store, upkeep: DiskMonitor, collector: GarbageCollector, limbo: LimboRestorer,
        scrubber: Scrubber, metadata: Callable[[], MetadataStore], clock: Clock,
    ) -> None:  # fmt: skip
        self._bookie_id = bookie_id
        self._store = store
        self._upkeep = upkeep
        self._collector = collector
        self._exit = limbo
        self._scrubber = scrubber
        self._metadata = metadata
        self._clock = clock
        self._runs = _ManualRuns(collector, clock)
        self._verbs: dict[str, Verb] = {
            "state": self._state,
            "report": self._report,
            "gc-plan": self._gc_plan,
            "gc-start": self._gc_start,
            "gc-status": self._gc_status,
            "scrub-status": self._scrub_status,
            "limbo-status": self._limbo_status,
            "accept-loss": self._accept_loss,
        }

    def add(self, verbs: Mapping[str, Verb]) -> None:
        """Adds verbs that another part of the bookie answers."""
        self._verbs |= verbs

    async def answer(self, request: bytes, sender: Principal = LOCAL, local: bool = True) -> bytes:
        """Answers one request. `local`: the request was sent from this machine. Raises ValueError if the request is not
        a JSON object with a verb.
        """
        try:
            asked = msgspec.json.decode(request, type=dict[str, object])
            verb = asked.pop("verb")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
            raise ValueError(f"an admin request is a JSON object with a verb: {error}") from error
        try:
            found = self._verbs.get(verb) if isinstance(verb, str) else None
            if found is None:
                raise InvalidRequest(f"no verb {verb!r}; there are {', '.join(self._verbs)}")
            if sender.kind is not PrincipalKind.LOCAL:
                _check_administers(sender, verb)
            elif verb in CHANGES and not local:
                raise Unauthorized(f"{verb} is taken from this bookie's own machine only: run the command there")
            answer = await found(asked)
        except MagnetarError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        return msgspec.json.encode(answer)

    async def close(self) -> None:
        """Cancels a garbage collection that an operator started. Work that is not committed is left as after a crash.
        """
        await self._runs.close()

    # ------------------------------------------------------------------------------------ verbs
    async def _state(self, options: Options) -> Json:
        check_option_names(options, ())
        store = self._store
        total, free = await store.room.usage()
        facts, refused = store.descriptors, self._collector.refused
        return {
            "bookie": self._bookie_id,
            "version": PRODUCT,
            "clusterFormat": written_format(),
            "disk": self._upkeep.state.value,
            "readOnly": self._upkeep.state.is_read_only,
            "totalBytes": total,
            "freeBytes": free,
            "logs": len(store.index.logs()),
            "ledgers": len(facts),
            "highestLedger": max(facts.highest, max((last for _, last in facts.tombstones), default=-1)),
            "limboUpto": facts.limbo_upto,
            "fencedUpto": facts.fenced_upto,
            "quarantined": len(facts.quarantined()),
            "limbo": self._limbo(),
            "gcRefused": None if refused is None else refused.value,
            "gc": self._runs.describe(),
            "scrub": self._scrub(),
        }

    async def _report(self, options: Options) -> Json:
        check_option_names(options, ())
        syncs, shares = self._store.histograms()["journal_sync_seconds"], (0.5, 0.99)
        took = [0.0, 0.0]
        if syncs.count:
            took = RecentQuantiles().compute_quantiles("sync", syncs, self._clock.monotonic(), shares)
        return {
            "bookie": self._bookie_id, "version": PRODUCT, "clockMs": self._clock.wall_ms(),
            "openFilesMax": PROCESS.limit, "syncs": syncs.count, "syncP50Seconds": took[0], "syncP99Seconds": took[1],
        }  # fmt: skip

    async def _gc_plan(self, options: Options) -> Json:
        check_option_names(options, ("major",))
        plans = await self._collector.plan(major=boolean_option(options, "major"))
        wanted = dict.fromkeys(holder.ledger for plan in plans for holder in plan.facts.holders)
        owners = await self._owners(list(wanted)[:LOOKUPS_MAX])
        return {"logs": [_log(plan, owners) for plan in plans]}

    async def _gc_start(self, options: Options) -> Json:
        check_option_names(options, ("force", "major", "roll"))
        self._runs.start(
            force=boolean_option(options, "force"),
            major=boolean_option(options, "major"),
            roll=boolean_option(options, "roll"),
        )
        return {"started": True}

    async def _gc_status(self, options: Options) -> Json:
        check_option_names(options, ())
        return self._runs.describe()

    async def _scrub_status(self, options: Options) -> Json:
        check_option_names(options, ())
        return self._scrub()

    async def _limbo_status(self, options: Options) -> Json:
        check_option_names(options, ())
        return self._limbo()

    def _limbo(self) -> Json:
        limbo = self._exit
        blocked = dict(list(limbo.blocked.items())[:BLOCKED_MAX])
        return {"upto": limbo.limbo_upto, "blocked": len(limbo.blocked), "why": blocked, **limbo.counters}

    async def _accept_loss(self, options: Options) -> Json:
        check_option_names(options, ())
        given_up = await self._exit.accept_loss()
        return {"givenUp": dict(list(given_up.items())[:BLOCKED_MAX]), "ledgers": len(given_up)}

    def _scrub(self) -> Json:
        return self._scrubber.describe()

    async def _owners(self, ledgers: Sequence[int]) -> dict[int, Json]:
        """Returns for each ledger its properties in the metadata, or that its record does not exist any more."""
        metadata = self._metadata()

        async def owner(ledger: int) -> Json:
            found = await get_record(metadata, paths.ledger(ledger), LedgerRecord)
            return {"deleted": True} if found is None else {**found[0].properties, "state": found[0].state}

        owners: dict[int, Json] = {}
        for at in range(0, len(ledgers), LOOKUPS_AT_ONCE):
            some = ledgers[at : at + LOOKUPS_AT_ONCE]
            owners |= zip(some, await asyncio.gather(*map(owner, some)), strict=True)
        return owners


def check_option_names(options: Options, names: Sequence[str]) -> None:
    """Raises InvalidRequest if `options` has a name that is not in `names`."""
    strange = sorted(options.keys() - set(names))
    if strange:
        raise InvalidRequest(f"no option {', '.join(strange)}; there are {', '.join(names) or 'none'}")


def boolean_option(options: Options, name: str) -> bool:
    """Returns the value of a boolean option, False if it is missing. Raises InvalidRequest if it is not a boolean."""
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is true or false, not {value!r}")
    return value


def _log(plan: LogPlan, owners: Mapping[int, Json]) -> Json:
    facts = plan.facts
    return {
        "log": facts.log,
        "state": facts.state.value,
        "bytes": facts.bytes,
        "dataBytes": facts.data_bytes,
        "liveBytes": facts.live_bytes,
        "livePercent": round(100 * facts.live_share, 1),
        "ledgers": facts.ledgers,
        "holders": [
            {"ledger": each.ledger, "liveBytes": each.live_bytes, **owners.get(each.ledger, {})}
            for each in facts.holders
        ],
        "action": plan.action.value,
        "reason": plan.reason.value,
    }


def _check_administers(sender: Principal, verb: object) -> None:
    """Raises Unauthorized if `sender` may not use this verb."""
    if sender.kind is not PrincipalKind.MEMBER or sender.name.partition("/")[0] not in ADMINISTRATORS:
        raise Unauthorized(f"{sender} may not ask for {verb!r}: an operator or a broker may")


class _ManualRuns:
    """The garbage collections that operators start, one at a time, and the result of the last one."""

    def __init__(self, collector: GarbageCollector, clock: Clock) -> None:
        self._collector = collector
        self._clock = clock
        self._tasks = Tasks()
        self._progress: GarbageProgress | None = None
        self._last: Json | None = None

    def start(self, *, force: bool, major: bool, roll: bool) -> None:
        if self._tasks.closed:
            raise Unavailable("the bookie is closing: ask it when it runs again")
        if len(self._tasks):
            raise Busy("garbage collection is running already; gc-status says how far it is")
        self._progress = None
        self._tasks.spawn(self._run(force, major, roll), "bookie-gc-by-hand")

    async def _run(self, force: bool, major: bool, roll: bool) -> None:
        began = self._clock.wall_ms()
        self._last = {"startedMs": began, "endedMs": None, "error": None, "message": None}
        try:
            done = await self._collector.run_pass(
                force=force, minor=True, major=major, roll=roll, on_progress=self._hear
            )
            self._last |= _done(done)
        except (MagnetarError, ValueError, NoSpace, OSError) as error:
            _LOG.warning("garbage collection started by hand failed: %s", error)
            self._last |= {"error": type(error).__name__, "message": str(error)}
        finally:
            self._last |= {"endedMs": self._clock.wall_ms()}
            self._progress = None

    def _hear(self, progress: GarbageProgress) -> None:
        self._progress = progress

    def describe(self) -> Json:
        progress = None if self._progress is None else self._progress._asdict()
        return {"running": len(self._tasks) > 0, "progress": progress, "last": self._last}

    async def close(self) -> None:
        await self._tasks.close()


def _done(done: GarbageResult) -> Json:
    return {
        "suspected": done.suspected,
        "refused": None if done.refused is None else done.refused.value,
        "ledgersDeleted": len(done.ledgers_deleted),
        "logsDeleted": done.logs_deleted,
        "logsCompacted": done.logs_compacted,
        "bytesFreed": done.bytes_freed,
        "bytesMoved": done.bytes_moved,
        "badRecords": done.bad_records,
    }
