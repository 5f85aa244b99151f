"""The verbs that an operator sends to a running bookie: the peer operation ADMIN (ledger/peer_format.py), in JSON.

    request = {"verb": VERB, …options}
    answer  = the verb's object, or {"error": class of proto/errors.py, "message": what was wrong and what to do}

| verb | options | answer |
|---|---|---|
| state | – | who it is, its disk, its logs in short, limbo, scrubber, garbage collection |
| report | – | its clock, version, limit of open files, how long a sync of the journal takes |
| gc-plan | major | what is refused, and per log: size, live share, who holds it, what would be done and why |
| gc-start | major, force, roll | {"started": true}; Busy when it is running already |
| gc-status | – | running, how far, what the last run did or why it failed |
| scrub-status | – | where the scrubber is and what it found |
| limbo-status | – | how much of its lost data the bookie has restored, and what it cannot restore |
| accept-loss | – | {"givenUp": {ledger: what it lacks}}: leaves limbo without that data, after one more pass |

A bookie with several ledgers directories answers for all of them together; `directories` has the answers of each
(`combine_answers`).

`readOnly` of `state` says that the bookie takes no adds of clients: it is departing, or its disk is full (`disk`). The
verbs about ledgers and their copies are below. No verb delays adds: each runs in a task of its own
(bookie/service.py), and its work runs in the store's workers. A run continues when the client that started it
disconnects. The topic of a ledger is in its properties in the metadata (metadata/records.py `LedgerRecord`). For the
ledgers in an answer it is read there, `LOOKUPS_AT_ONCE` at a time and at most `LOOKUPS_PER_ANSWER_MAX` in one answer. A
ledger without a record was deleted, and its grace period runs. An option of a wrong type or an unknown verb is
InvalidRequest; a request that is no JSON is BAD_REQUEST.

Who may ask: with keys (runtime/network.py `PeerServerKeys`) operators and brokers, from any machine, and no bookie.
Without keys every client that reaches the bookie's port; then a verb of `CHANGING_VERBS` (it starts work, gives data up
or moves copies) is Unauthorized from another machine. No verb shows a key or an entry. Guarded by
tests/bookie/test_admin.py.

The verbs about ledgers and their copies, which any bookie answers (`RepairAdmin`).

| verb | options | answer |
|---|---|---|
| ledgers | limit, after, bookie, state | {"ledgers": [in short], "more": whether there are more}, ascending by id |
| ledger | ledger | one in full: fragments, end, properties, its mark; never its key |
| under-replicated | limit | {"ledgers": [marks], "count"} |
| repair-status | – | enabled, auditor, marks by reason and by what delays them, workers, bytes left, seconds to go |
| repair-enable | on | {"enabled"} |
| bookies | – | all that are registered, have a cookie, depart or are named by a ledger; how many ledgers name each |
| depart | bookie, dead, forget, cancel | {"bookie", …}: everything moves off it; Busy: `dead`, and it is registered |
| departure | bookie | what is still on it: ledgers, how many of them are marked, about how many bytes |
| rebalance-plan | share, group | what a rebalancing would move, and how long it would take; changes nothing |
| rebalance | share, group | the same, ordered; Busy: another one is under way; NotAllowed: it cannot help |
| rebalance-stop | – | the order as it is then |
| rebalance-status | – | the latest order and how far it is; {} if there never was one |

Each answer is read from the metadata when it is asked for, with `READS_AT_ONCE` reads at a time. A list of a million
ledgers takes minutes, so the caller gives it a limit. A verb that changes something changes one record, which the
auditor follows.
Guards: tests/bookie/test_repair_verbs.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, TypeVar

import msgspec

from ..metadata import paths
from ..metadata.records import (
    CLOSED,
    AuditorRecord,
    CookieRecord,
    DepartingRecord,
    LedgerRecord,
    RacksRecord,
    RebalanceRecord,
    RepairWorkerRecord,
    UnderReplicatedRecord,
    encode_record,
    get_written_format,
)
from ..metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    MetadataStore,
    get_record,
    iterate_nodes,
    parse_ledger_ids,
    put_record,
    update_record,
)
from ..proto.errors import (
    BadVersion,
    Busy,
    InvalidRequest,
    LedgerNotFound,
    MagnetarError,
    NotAllowed,
    NotFound,
    Unauthorized,
    Unavailable,
)
from ..proto.versions import PRODUCT
from ..runtime.access import LOCAL_PRINCIPAL, Principal, PrincipalKind
from ..runtime.clock import Clock
from ..runtime.descriptors import PROCESS_DESCRIPTORS
from ..runtime.metrics import RecentQuantiles
from ..runtime.tasks import Tasks
from ..runtime.tcp.listening import PROCESS_CERTIFICATES
from .directory import LedgersDirectory
from .format.journal import DamagedFile
from .maintenance import marks
from .maintenance.garbage import GarbageCollector, GarbageProgress, GarbageResult
from .maintenance.rebalance import count_moves, make_plan, make_rebalance_order
from .maintenance.rebalance_core import RebalanceEnd, estimate_copy_bytes
from .maintenance.repair_core import REASONS_BOOKIE_GONE, list_bookies_of_ledger
from .maintenance.repair_worker import RepairConfig
from .registration import DiskState
from .store.disk import NoSpace
from .store.entrylog.mover import EntryLogPlan

_LOG = logging.getLogger("magnetar.bookie.admin")

LOOKUPS_AT_ONCE = 16
LOOKUPS_PER_ANSWER_MAX = 2000
SHOWN_LEDGERS_MAX = 1000
"""The largest number of ledgers in limbo that an answer names."""

CHANGING_VERBS = frozenset({"gc-start", "accept-loss", "repair-enable", "depart", "rebalance", "rebalance-stop"})
"""Verbs that change something. If no keys identify the callers, these verbs are Unauthorized from another machine."""

ADMINISTRATOR_ROLES = ("broker", "operator")
"""The roles of cluster members that may send admin requests."""

JsonObject = dict[str, object]
VerbOptions = Mapping[str, object]
AdminVerb = Callable[[VerbOptions], Awaitable[JsonObject]]


class BookieAdmin:
    """Answers the admin requests that operators send to a bookie. `BookieService` calls `answer_request` for each of
    them. Calling `metadata` returns the current metadata session."""

    def __init__(
        self, bookie_id: str, directories: Sequence[LedgersDirectory], metadata: Callable[[], MetadataStore],
        clock: Clock,
    ) -> None:  # fmt: skip
        self._each = [_DirectoryAdmin(bookie_id, each, metadata, clock) for each in directories]
        self._verbs: dict[str, AdminVerb] = {verb: partial(self._ask_each, verb) for verb in self._each[0].verbs}

    async def _ask_each(self, verb: str, options: VerbOptions) -> JsonObject:
        """Returns the answer of the only directory, or the answers of all directories combined."""
        asked = [each for each in self._each if each.is_concerned_by(verb)]
        answers = [await each.verbs[verb](options) for each in asked or self._each[:1]]
        return answers[0] if len(self._each) == 1 else combine_answers(verb, answers)

    def add_verbs(self, verbs: Mapping[str, AdminVerb]) -> None:
        """Adds admin verbs that another object answers, by the name of the verb. They replace verbs of the same
        name."""
        self._verbs |= verbs

    async def answer_request(self, request: bytes, sender: Principal = LOCAL_PRINCIPAL, local: bool = True) -> bytes:
        """Answers one admin request: returns the JSON of the verb's result, or of the MagnetarError that it raised.
        `sender`: who sent it; `local` True: the request was sent from this machine. Raises ValueError if the request is
        not a JSON object with a verb. An error of a verb that is no MagnetarError, such as NoSpace or OSError, is
        raised as it is."""
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
            elif verb in CHANGING_VERBS and not local:
                raise Unauthorized(f"{verb} is taken from this bookie's own machine only: run the command there")
            answer = await found(asked)
        except MagnetarError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        return msgspec.json.encode(answer)

    async def close(self) -> None:
        """Cancels the garbage collection that an operator started, if one is running. What it has not committed has no
        effect, as after a crash."""
        for each in self._each:
            await each.close()


def combine_answers(verb: str, answers: Sequence[JsonObject]) -> JsonObject:
    """Returns the answer to a verb from those of the ledgers directories, combined field by field. `directories` has
    the answers of all, except to verbs that concern the bookie as a whole."""
    whole = _combine(answers)
    return whole if verb in ("report", "gc-start") else whole | {"directories": list(answers)}


def _combine(answers: Sequence[JsonObject]) -> JsonObject:
    """Returns one object of several with the same fields: of each field the value that `ANSWER_FIELDS_COMBINED` makes
    of theirs; objects are combined field by field; of other fields the first value that is not None."""
    return {name: _combine_field(name, [each[name] for each in answers]) for name in answers[0]}


def _combine_field(name: str, values: list[Any]) -> object:
    known = [each for each in values if each is not None]
    if name in ANSWER_FIELDS_COMBINED and known:
        return ANSWER_FIELDS_COMBINED[name](known)
    if known and all(isinstance(each, dict) for each in known):
        return _combine(known) if len({each.keys() == known[0].keys() for each in known}) == 1 else known[0]
    return known[0] if known else None


def _joined(values: list[Any]) -> object:
    return {key: value for each in values for key, value in each.items()}


def _concatenated(values: list[Any]) -> object:
    return [one for each in values for one in each] if isinstance(values[0], list) else sum(values)


def _worst_disk(values: list[Any]) -> object:
    return max(values, key=[state.value for state in DiskState].index)


ANSWER_FIELDS_COMBINED: dict[str, Callable[[list[Any]], object]] = {
    "disk": _worst_disk, "readOnly": all, "running": any, "percent": min, "startedMs": min,
    **dict.fromkeys((
        "highestLedger", "limboUpto", "fencedUpto", "upto", "limbo_passes", "endedMs", "graceEndsMs", "syncP50Seconds",
        "syncP99Seconds",
    ), max),
    **dict.fromkeys((
        "totalBytes", "freeBytes", "ledgers", "quarantined", "blocked", "limbo_ledgers", "limbo_ledgers_done",
        "limbo_restored_entries", "limbo_restored_bytes", "limbo_recovered_ledgers", "syncs", "entries", "bytes",
        "damaged", "suspected", "ledgersDeleted", "bytesFreed", "bytesMoved", "badRecords",
    ), sum),
    **dict.fromkeys(("logs", "logsDeleted", "logsCompacted"), _concatenated),
    **dict.fromkeys(("givenUp", "why"), _joined),
}  # fmt: skip
"""How the fields of the answers of several ledgers directories become one."""


class _DirectoryAdmin:
    """Answers the verbs for one ledgers directory."""

    def __init__(
        self, bookie_id: str, directory: LedgersDirectory, metadata: Callable[[], MetadataStore], clock: Clock
    ) -> None:
        self._bookie_id = bookie_id
        self._directory = directory
        self._store = directory.store
        self._upkeep = directory.upkeep
        self._collector = directory.collector
        self._exit = directory.limbo
        self._scrubber = directory.scrubber
        self._metadata = metadata
        self._clock = clock
        self._runs = _ManualRuns(self._collector, clock)
        self.verbs: dict[str, AdminVerb] = {
            "state": self._state,
            "report": self._report,
            "gc-plan": self._gc_plan,
            "gc-start": self._gc_start,
            "gc-status": self._gc_status,
            "scrub-status": self._scrub_status,
            "limbo-status": self._limbo_status,
            "accept-loss": self._accept_loss,
        }

    def is_concerned_by(self, verb: str) -> bool:
        """Returns whether the verb shows or changes something of this directory, as it is now."""
        if verb == "accept-loss":
            return self._exit.limbo_upto >= 0
        return verb not in ("gc-start", "gc-plan") or self._store.failure is None

    async def close(self) -> None:
        await self._runs.close()

    # ------------------------------------------------------------------------------------ verbs
    async def _state(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        store = self._store
        total, free = self._upkeep.usage if store.failure is not None else await store.room.measure_disk()
        facts, refused = store.descriptors, self._collector.refusal
        return {
            "bookie": self._bookie_id,
            "version": PRODUCT,
            "clusterFormat": get_written_format(),
            "path": self._directory.path,
            "failure": store.failure,
            "disk": self._upkeep.state.value,
            "readOnly": self._upkeep.is_read_only,
            "totalBytes": total,
            "freeBytes": free,
            "logs": len(store.index.log_numbers()),
            "ledgers": len(facts),
            "highestLedger": max(facts.highest, max((last for _, last in facts.tombstones), default=-1)),
            "limboUpto": facts.limbo_upto,
            "fencedUpto": facts.fenced_upto,
            "quarantined": len(facts.quarantined()),
            "limbo": self._limbo(),
            "certificateEndsMs": PROCESS_CERTIFICATES.find_first_end_ms() or None,
            "gcRefused": None if refused is None else refused.describe(),
            "gc": self._runs.describe(),
            "scrub": self._scrub(),
        }

    async def _report(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        syncs, shares = self._store.histograms()["journal_sync_seconds"], (0.5, 0.99)
        took = [0.0, 0.0]
        if syncs.count:
            took = RecentQuantiles().compute_quantiles("sync", syncs, self._clock.monotonic(), shares)
        return {
            "bookie": self._bookie_id, "version": PRODUCT, "clockMs": self._clock.wall_ms(),
            "openFilesMax": PROCESS_DESCRIPTORS.limit, "syncs": syncs.count, "syncP50Seconds": took[0],
            "syncP99Seconds": took[1],
        }  # fmt: skip

    async def _gc_plan(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("major",))
        plans = await self._collector.plan_compaction(major=read_boolean_option(options, "major"))
        wanted = dict.fromkeys(holder.ledger for plan in plans for holder in plan.facts.holders)
        owners = await self._owners(list(wanted)[:LOOKUPS_PER_ANSWER_MAX])
        refused = self._collector.refusal
        why = None if refused is None else refused.describe()
        return {"refused": why, "logs": [_log(plan, owners) for plan in plans]}

    async def _gc_start(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("force", "major", "roll"))
        self._runs.start(
            force=read_boolean_option(options, "force"),
            major=read_boolean_option(options, "major"),
            roll=read_boolean_option(options, "roll"),
        )
        return {"started": True}

    async def _gc_status(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        return self._runs.describe()

    async def _scrub_status(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        return self._scrub()

    async def _limbo_status(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        return self._limbo()

    def _limbo(self) -> JsonObject:
        limbo = self._exit
        blocked = dict(list(limbo.blocked.items())[:SHOWN_LEDGERS_MAX])
        return {"upto": limbo.limbo_upto, "blocked": len(limbo.blocked), "why": blocked, **limbo.counters}

    async def _accept_loss(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        given_up = await self._exit.accept_data_loss()
        return {"givenUp": dict(list(given_up.items())[:SHOWN_LEDGERS_MAX]), "ledgers": len(given_up)}

    def _scrub(self) -> JsonObject:
        return self._scrubber.describe()

    async def _owners(self, ledgers: Sequence[int]) -> dict[int, JsonObject]:
        """Returns for each ledger the properties and the state of its record in the metadata, or `deleted` if it has no
        record."""
        metadata = self._metadata()

        async def owner(ledger: int) -> JsonObject:
            found = await get_record(metadata, paths.ledger(ledger), LedgerRecord)
            return {"deleted": True} if found is None else {**found[0].properties, "state": found[0].state}

        owners: dict[int, JsonObject] = {}
        for at in range(0, len(ledgers), LOOKUPS_AT_ONCE):
            some = ledgers[at : at + LOOKUPS_AT_ONCE]
            owners |= zip(some, await asyncio.gather(*map(owner, some)), strict=True)
        return owners


def check_option_names(options: VerbOptions, names: Sequence[str]) -> None:
    """Raises InvalidRequest if `options` has a name that is not in `names`."""
    strange = sorted(options.keys() - set(names))
    if strange:
        raise InvalidRequest(f"no option {', '.join(strange)}; there are {', '.join(names) or 'none'}")


def read_boolean_option(options: VerbOptions, name: str) -> bool:
    """Returns the value of a boolean option, False if it is missing. Raises InvalidRequest if it is not a boolean."""
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is true or false, not {value!r}")
    return value


def _log(plan: EntryLogPlan, owners: Mapping[int, JsonObject]) -> JsonObject:
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
    """Raises Unauthorized if `sender` is neither an operator nor a broker."""
    if sender.kind is not PrincipalKind.MEMBER or sender.name.partition("/")[0] not in ADMINISTRATOR_ROLES:
        raise Unauthorized(f"{sender} may not ask for {verb!r}: an operator or a broker may")


class _ManualRuns:
    """The garbage collections that operators start. Runs one at a time, and keeps the result of the last one."""

    def __init__(self, collector: GarbageCollector, clock: Clock) -> None:
        self._collector = collector
        self._clock = clock
        self._tasks = Tasks()
        self._progress: GarbageProgress | None = None
        self._last: JsonObject | None = None

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
        except (MagnetarError, ValueError, NoSpace, OSError, DamagedFile) as error:
            _LOG.warning("garbage collection started by hand failed: %s", error)
            self._last |= {"error": type(error).__name__, "message": str(error)}
        finally:
            self._last |= {"endedMs": self._clock.wall_ms()}
            self._progress = None

    def _hear(self, progress: GarbageProgress) -> None:
        self._progress = progress

    def describe(self) -> JsonObject:
        progress = None if self._progress is None else self._progress._asdict()
        return {"running": len(self._tasks) > 0, "progress": progress, "last": self._last}

    async def close(self) -> None:
        await self._tasks.close()


def _done(done: GarbageResult) -> JsonObject:
    return {
        "suspected": done.suspected,
        "graceEndsMs": done.grace_ends_ms,
        "refused": None if done.refused is None else done.refused.describe(),
        "ledgersDeleted": len(done.ledgers_deleted),
        "logsDeleted": done.logs_deleted,
        "logsCompacted": done.logs_compacted,
        "bytesFreed": done.bytes_freed,
        "bytesMoved": done.bytes_moved,
        "badRecords": done.bad_records,
        "surplus": done.surplus,
        "dropped": done.dropped,
    }


T = TypeVar("T")

READS_AT_ONCE = 32
LISTED_DEFAULT = 1000
LEDGERS_PER_PAGE = 256
"""Ledgers whose records are in memory at a time while the records of all are read."""
SAMPLED_MARKS_MAX = 500
"""The number of ledgers with a repair mark whose records are read to estimate the bytes that are left to copy."""
WORKER_RATE_FRESH_MS = 15_000
"""The age of a repair worker's progress record, in ms, above which the worker counts as idle or gone."""


class RepairWorkerAges:
    """Measures how old the progress records of repair workers are, although the clocks of two processes may differ or
    jump. When this process reads a record for the first time, its age is computed from the worker's time of day, and is
    at least 0. From then on it is measured by the monotonic clock of this process. The age of a record that has changed
    is at most the time since the previous call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[RepairWorkerRecord, float]] = {}  # worker → its record, when that was stored
        self._looked_s = float("-inf")

    def measure_ages(self, workers: Sequence[RepairWorkerRecord]) -> dict[str, float]:
        """Returns for each worker, by its name, how many ms ago its record was stored. `workers`: all records that
        there are now; what is known of other workers is dropped."""
        now_s, now_ms = self._clock.monotonic(), self._clock.wall_ms()
        seen = dict[str, tuple[RepairWorkerRecord, float]]()
        for each in workers:
            known = self._seen.get(each.name)
            if known is not None and known[0] == each:
                seen[each.name] = known
                continue
            age_s = max(0, now_ms - each.updated_ms) / 1000
            seen[each.name] = each, now_s - (age_s if known is None else min(age_s, now_s - self._looked_s))
        self._seen, self._looked_s = seen, now_s
        return {name: 1000 * (now_s - stored_s) for name, (_, stored_s) in seen.items()}


class RepairAdmin:
    """Answers the admin verbs about ledgers, their copies and their repair. `table` has the function that answers each
    verb, by the verb's name. Calling `metadata` returns the current metadata session."""

    def __init__(self, metadata: Callable[[], MetadataStore], clock: Clock) -> None:
        self._session = metadata
        self._clock = clock
        self._ages = RepairWorkerAges(clock)
        self.table: dict[str, AdminVerb] = {
            "ledgers": self._ledgers,
            "ledger": self._ledger,
            "under-replicated": self._under_replicated,
            "repair-status": self._status,
            "repair-enable": self._enable,
            "bookies": self._bookies,
            "depart": self._depart,
            "departure": self._departure,
            "rebalance-plan": self._rebalance_plan,
            "rebalance": self._rebalance,
            "rebalance-stop": self._rebalance_stop,
            "rebalance-status": self._rebalance_status,
        }

    # ------------------------------------------------------------------------------ ledgers
    async def _ledgers(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("limit", "after", "bookie", "state"))
        limit, after = _number(options, "limit", LISTED_DEFAULT), _number(options, "after", -1)
        bookie, state = _text(options, "bookie"), _text(options, "state")
        found: list[LedgerRecord] = []
        async for records in self._all_records(after):
            found += [
                record for record in records
                if state in ("", record.state) and (not bookie or bookie in list_bookies_of_ledger(record))
            ]  # fmt: skip
            if len(found) > limit:
                break
        return {"ledgers": [_short(record) for record in found[:limit]], "more": len(found) > limit}

    async def _ledger(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("ledger",))
        ledger = _number(options, "ledger", -1)
        record = await marks.read_ledger_record(self._session(), ledger)
        if record is None:
            raise LedgerNotFound(f"ledger {ledger} does not exist; 'magnetar ledgers list' shows them", ledger=ledger)
        mark = await marks.read_repair_mark(self._session(), ledger)
        return {
            **_short(record),
            "properties": dict(record.properties),
            "createdMs": record.created_ms,
            "ensembles": [
                {"firstEntry": each.first_entry, "bookies": list(each.bookies)} for each in record.fragments
            ],
            "underReplicated": None if mark is None else _mark(mark[0], self._clock.wall_ms()),
        }  # fmt: skip

    async def _under_replicated(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("limit",))
        ids = await self._unmoved(await marks.list_ledger_ids(self._session(), paths.UNDER_REPLICATED_LEDGERS))
        found = await self._marks(ids[: _number(options, "limit", LISTED_DEFAULT)])
        now_ms = self._clock.wall_ms()
        return {"ledgers": [_mark(each, now_ms) for each in found], "count": len(ids)}

    # ------------------------------------------------------------------------------ auto-recovery
    async def _status(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        store = self._session()
        auditor = await get_record(store, paths.REPAIR_AUDITOR, AuditorRecord)
        workers = await marks.list_records(store, paths.REPAIR_WORKERS, RepairWorkerRecord)
        ids = await self._unmoved(await marks.list_ledger_ids(store, paths.UNDER_REPLICATED_LEDGERS))
        found = await self._marks(ids[:SAMPLED_MARKS_MAX])
        left = await self._bytes_left(found) * max(len(ids), 1) // max(len(found), 1)
        ages_ms = self._ages.measure_ages(workers)
        rate = sum(each.bytes_per_s for each in workers if ages_ms[each.name] < WORKER_RATE_FRESH_MS)
        return {
            "enabled": await marks.is_repair_enabled(store),
            "auditor": None if auditor is None else auditor[0].name,
            "auditorSinceMs": None if auditor is None else auditor[0].since_ms,
            "underReplicated": len(ids),
            "reasons": dict(Counter(reason for each in found for reason in each.bookies.values())),
            "departing": sorted(await marks.list_departing_bookies(store)),
            "stuck": dict(Counter(each.stuck for each in found if each.stuck)),
            "bytesLeft": left,
            "bytesPerSecond": rate,
            "secondsToGo": None if not ids or not rate else round(left / rate),
            "workers": [_worker(each, ages_ms[each.name]) for each in workers],
        }

    async def _enable(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("on",))
        await marks.set_repair_enabled(self._session(), read_boolean_option(options, "on"))
        return {"enabled": read_boolean_option(options, "on")}

    # ------------------------------------------------------------------------------ bookies
    async def _bookies(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        store = self._session()
        available, departing = await marks.list_registered_bookies(store), await marks.list_departing_bookies(store)
        cookies = await store.children(paths.COOKIES)
        named: Counter[str] = Counter()
        async for records in self._all_records():
            for record in records:
                named.update(list(list_bookies_of_ledger(record)))
        rows: list[JsonObject] = []
        for bookie in sorted({*available, *departing, *cookies, *named}):
            record_, state = available.get(bookie), "writable"
            if record_ is None:
                state = "absent" if bookie in cookies else "forgotten"
            elif bookie in departing:
                state = "departing"
            elif record_.limbo:
                state = "limbo"
            elif record_.read_only:
                state = "read-only"
            rows.append({
                "id": bookie, "state": state, "departing": bookie in departing, "ledgers": named[bookie],
                "endpoint": None if record_ is None else record_.endpoint,
                "rack": None if record_ is None else record_.rack,
                "freeBytes": None if record_ is None else record_.free_bytes,
                "totalBytes": None if record_ is None else record_.total_bytes,
            })  # fmt: skip
        return {"bookies": rows}

    async def _depart(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("bookie", "dead", "forget", "cancel"))
        store, bookie = self._session(), _text(options, "bookie")
        registered = await store.get(paths.bookie(bookie)) is not None
        path = paths.departing_bookie(bookie)
        before = await get_record(store, path, DepartingRecord)
        if read_boolean_option(options, "cancel"):
            if before is not None:
                await store.delete(path, before[1])
            return {"bookie": bookie, "departing": False}
        cookie = await get_record(store, paths.cookie(bookie), CookieRecord)
        if not registered and cookie is None and not await self._records_on(bookie):
            raise NotFound(f"no bookie {bookie} is known; 'magnetar bookies list' shows them", bookie=bookie)
        if registered and read_boolean_option(options, "dead"):
            raise Busy(
                f"bookie {bookie} is registered: it lives. 'magnetar bookies decommission' empties a living one, "
                "'magnetar bookies list' shows it", bookie=bookie,
            )  # fmt: skip
        since_ms = self._clock.wall_ms() if before is None else before[0].since_ms
        record = DepartingRecord(bookie=bookie, since_ms=since_ms, forget=read_boolean_option(options, "forget"))
        await put_record(store, path, record, ANY_VERSION)
        return {"bookie": bookie, "departing": True, "registered": registered, "forget": record.forget}

    async def _departure(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ("bookie",))
        store, bookie = self._session(), _text(options, "bookie")
        on_it = await self._records_on(bookie)
        marked = {*await marks.list_ledger_ids(store, paths.UNDER_REPLICATED_LEDGERS)}
        still = [record for record in on_it if record.ledger_id in marked]
        stuck = [
            each for each in await self._marks([record.ledger_id for record in still][:SAMPLED_MARKS_MAX]) if each.stuck
        ]
        departing = await marks.list_departing_bookies(store)
        takers = {
            name for name, each in (await marks.list_registered_bookies(store)).items()
            if not each.read_only and not each.limbo and name not in departing and name != bookie
        }  # fmt: skip
        return {
            "bookie": bookie,
            "ledgers": len(on_it),
            "marked": len(still),
            "open": sum(record.state != CLOSED for record in on_it),
            "bytesLeft": sum(estimate_copy_bytes(record, {bookie}) for record in on_it),
            "takers": len(takers),
            "nowhere": sum(_lacks_taker(record, bookie, takers) for record in on_it),
            "stuck": dict(Counter(each.stuck for each in stuck)),
            "known": await store.get(paths.cookie(bookie)) is not None,
            "registered": await store.get(paths.bookie(bookie)) is not None,
        }

    # ------------------------------------------------------------------------------ rebalancing
    async def _rebalance_plan(self, options: VerbOptions) -> JsonObject:
        return (await self._plan_rebalance(options))[1]

    async def _plan_rebalance(self, options: VerbOptions) -> tuple[RebalanceRecord, JsonObject]:
        """Returns (a new order, what it would move). Raises InvalidRequest for a share that is none, NotFound if no
        bookie is of the group."""
        check_option_names(options, ("share", "group"))
        share, group = _share_option(options), _text(options, "group")
        store = self._session()
        there = await marks.list_registered_bookies(store)
        if group and all(each.group != group for each in there.values()):
            raise NotFound(f"no registered bookie is of the group {group!r}; 'magnetar bookies list' shows them")
        before = await get_record(store, paths.REBALANCE, RebalanceRecord)
        order = make_rebalance_order(share, group, there, None if before is None else before[0], self._clock.wall_ms())
        racks = await get_record(store, paths.RACKS, RacksRecord)
        assigned = {} if racks is None else racks[0].racks
        plan = await make_plan(store, order, lambda bookie: assigned.get(bookie) or there[bookie].rack)
        full, used = plan.full_bookies, {bookie: load.share for bookie, load in plan.loads.items()}
        ledgers, size, moves = await count_moves(store, plan)
        rate = RepairConfig().bytes_per_s * max(1, len(there))
        answer: JsonObject = {
            "share": share, "group": group, "full": full, "ledgers": ledgers, "bytes": size,
            "seconds": -(-size // rate), "reached": not plan.full_bookies,
            "bookies": [
                {
                    "id": bookie, "used": round(used[bookie], 4), "after": round(load.share, 4),
                    "bytesOut": sum(move.bytes for move in moves if move.source == bookie),
                    "bytesIn": sum(move.bytes for move in moves if move.target == bookie),
                }
                for bookie, load in sorted(plan.loads.items())
            ],
        }  # fmt: skip
        return msgspec.structs.replace(order, planned_ledgers=ledgers, planned_bytes=size), answer

    async def _rebalance(self, options: VerbOptions) -> JsonObject:
        store = self._session()
        before = await get_record(store, paths.REBALANCE, RebalanceRecord)
        if before is not None and not before[0].ended_ms:
            raise Busy(
                f"a rebalancing to {before[0].share:g} is under way; 'magnetar bookies rebalance --status' shows it, "
                "'--stop' ends it"
            )
        if not await marks.is_repair_enabled(store):
            raise NotAllowed("auto-recovery is off, which moves the copies: 'magnetar repair enable' first")
        order, answer = await self._plan_rebalance(options)
        if not answer["full"]:
            raise NotAllowed(f"no bookie uses more than {100 * order.share:g} % of its disk: nothing is to be moved")
        if not order.planned_ledgers:
            raise NotAllowed(
                "no copy can be moved: the bookies that take copies are too full themselves, have the same ledgers "
                "already, or are of other groups or racks; or what fills the disks is of open ledgers. Add a bookie"
            )
        version = NODE_ABSENT if before is None else before[1]
        try:
            await store.put(paths.REBALANCE, encode_record(order, paths.REBALANCE), version)
        except BadVersion:
            raise Busy("another rebalancing was ordered at the same moment") from None
        return answer

    async def _rebalance_stop(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        now_ms = self._clock.wall_ms()

        def stop(record: RebalanceRecord | None) -> RebalanceRecord:
            if record is None:
                raise NotFound("no rebalancing was ever ordered")
            if record.ended_ms:
                return record
            return msgspec.structs.replace(record, ended_ms=now_ms, end=RebalanceEnd.STOPPED.value)

        found = await update_record(self._session(), paths.REBALANCE, RebalanceRecord, stop)
        assert found is not None, "there is an order"
        return _rebalancing(found[0])

    async def _rebalance_status(self, options: VerbOptions) -> JsonObject:
        check_option_names(options, ())
        found = await get_record(self._session(), paths.REBALANCE, RebalanceRecord)
        return {} if found is None else _rebalancing(found[0])

    async def _unmoved(self, ledgers: Sequence[int]) -> list[int]:
        """Returns those of the marked `ledgers` of which copies are missing: not those whose copies only move."""
        found = await get_record(self._session(), paths.REBALANCE, RebalanceRecord)
        moving = set() if found is None else set(map(int, found[0].moves))
        return [ledger for ledger in ledgers if ledger not in moving]

    # ------------------------------------------------------------------------------ reading
    async def _records_on(self, bookie: str) -> list[LedgerRecord]:
        """Returns the records of all ledgers that have a fragment on the bookie."""
        return [
            record
            async for records in self._all_records() for record in records if bookie in list_bookies_of_ledger(record)
        ]  # fmt: skip

    async def _all_records(self, after: int = -1) -> AsyncIterator[list[LedgerRecord]]:
        """Yields the records of all ledgers with ids above `after`, ascending by id, in parts."""
        segment = "" if after < 0 else f"{after:020d}"
        async for names in iterate_nodes(self._session(), paths.LEDGERS, segment, LEDGERS_PER_PAGE):
            yield await self._records(parse_ledger_ids(paths.LEDGERS, names))

    async def _records(self, ledgers: Sequence[int]) -> list[LedgerRecord]:
        store = self._session()
        found = await _in_parts(ledgers, lambda ledger: marks.read_ledger_record(store, ledger))
        return [record for record in found if record is not None]

    async def _marks(self, ledgers: Sequence[int]) -> list[UnderReplicatedRecord]:
        store = self._session()
        found = await _in_parts(ledgers, lambda ledger: marks.read_repair_mark(store, ledger))
        return [each[0] for each in found if each is not None]

    async def _bytes_left(self, found: Sequence[UnderReplicatedRecord]) -> int:
        gone = {each.ledger_id: {b for b, why in each.bookies.items() if why in REASONS_BOOKIE_GONE} for each in found}
        return sum(estimate_copy_bytes(record, gone[record.ledger_id]) for record in await self._records(list(gone)))


async def _in_parts(ledgers: Sequence[int], read: Callable[[int], Awaitable[T]]) -> list[T]:
    """Calls `read(ledger)` for each ledger, `READS_AT_ONCE` at a time; returns the results in order."""
    found: list[T] = []
    for at in range(0, len(ledgers), READS_AT_ONCE):
        found += await asyncio.gather(*map(read, ledgers[at : at + READS_AT_ONCE]))
    return found


def _rebalancing(record: RebalanceRecord) -> JsonObject:
    return {
        "share": record.share, "group": record.group, "sinceMs": record.since_ms, "running": not record.ended_ms,
        "endedMs": record.ended_ms or None, "end": record.end, "plannedLedgers": record.planned_ledgers,
        "plannedBytes": record.planned_bytes, "ledgers": record.ledgers, "bytes": record.bytes,
        "skipped": record.skipped, "underWay": len(record.moves),
        "bookies": [
            {"id": bookie, "used": round(used / record.total[bookie], 4), "movedOff": record.moved_off.get(bookie, 0)}
            for bookie, used in sorted(record.used.items())
        ],
    }  # fmt: skip


def _share_option(options: VerbOptions) -> float:
    share = options.get("share")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
        raise InvalidRequest(f"share is a number between 0 and 1, such as 0.8, not {share!r}")
    return float(share)


def _short(record: LedgerRecord) -> JsonObject:
    closed = record.state == CLOSED
    return {
        "ledger": record.ledger_id,
        "state": record.state,
        "quorum": f"{record.ensemble_size}/{record.write_quorum}/{record.ack_quorum}",
        "entries": record.last_entry + 1 if closed else None,
        "bytes": record.length if closed else None,
        "fragments": len(record.fragments),
        "bookies": list(list_bookies_of_ledger(record)),
        "owner": record.properties.get("topic", ""),
    }


def _lacks_taker(record: LedgerRecord, bookie: str, takers: Set[str]) -> bool:
    """Returns whether a fragment of the ledger on `bookie` is on all of `takers` already: none of them can take its
    copy."""
    return any(bookie in each.bookies and takers <= set(each.bookies) for each in record.fragments)


def _mark(mark: UnderReplicatedRecord, now_ms: int) -> JsonObject:
    return {
        "ledger": mark.ledger_id,
        "missing": dict(mark.bookies),
        "inRecovery": mark.in_recovery,
        "sinceMs": mark.since_ms,
        "sinceSeconds": max(0, now_ms - mark.since_ms) // 1000,
        "reason": ", ".join(sorted({*mark.bookies.values()})) or "recovery did not end",
        "attempts": mark.attempts,
        "stuck": mark.stuck,
        "lastError": mark.last_error,
        "retrySeconds": max(0, mark.retry_ms - now_ms) // 1000,
    }


def _worker(worker: RepairWorkerRecord, age_ms: float) -> JsonObject:
    return {
        "name": worker.name,
        "ledgers": worker.ledgers,
        "entries": worker.entries,
        "bytes": worker.bytes,
        "failures": worker.failures,
        "bytesPerSecond": worker.bytes_per_s if age_ms < WORKER_RATE_FRESH_MS else 0,
        "limitBytesPerSecond": worker.limit_bytes_per_s or None,
        "workingOn": {ledger: list(each) for ledger, each in worker.working_on.items()},
    }


def _number(options: Mapping[str, object], name: str, default: int) -> int:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is a number, not {value!r}")
    return value


def _text(options: Mapping[str, object], name: str) -> str:
    value = options.get(name, "")
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is a text, not {value!r}")
    return value
