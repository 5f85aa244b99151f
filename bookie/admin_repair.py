"""Verbs of the peer operation ADMIN about ledgers and their copies, which any bookie answers (bookie/admin.py).

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

Each answer is read from the metadata when it is asked for, with `READS_AT_ONCE` reads at a time. A list of a million
ledgers takes minutes, so the caller gives it a limit. A verb that changes something changes one record, which the
auditor follows.
Guards: tests/bookie/test_repair_verbs.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from ..metadata import paths
from ..metadata.records import (
    CLOSED,
    AuditorRecord,
    CookieRecord,
    DepartingRecord,
    LedgerRecord,
    RepairWorkerRecord,
    UnderReplicatedRecord,
)
from ..metadata.store import ANY, MetadataStore, get_record, put_record
from ..proto.errors import Busy, InvalidRequest, LedgerNotFound, NotFound
from ..runtime.clock import Clock
from .admin import Json, Options, Verb, boolean_option, check_option_names
from .maintenance import marks
from .maintenance.copies_core import GONE, bookies_of_ledger

T = TypeVar("T")

READS_AT_ONCE = 32
LIMIT = 1000
SAMPLE = 500
"""Marked ledgers whose records are read for an estimate."""
FRESH_MS = 15_000
"""Age of a worker's progress, in ms, above which the worker is idle or gone."""


class RepairVerbs:
    """The verbs about ledgers and their copies. `metadata` returns the current metadata session."""

    def __init__(self, metadata: Callable[[], MetadataStore], clock: Clock) -> None:
        self._session = metadata
        self._clock = clock
        self.table: dict[str, Verb] = {
            "ledgers": self._ledgers,
            "ledger": self._ledger,
            "under-replicated": self._under_replicated,
            "repair-status": self._status,
            "repair-enable": self._enable,
            "bookies": self._bookies,
            "depart": self._depart,
            "departure": self._departure,
        }

    # ------------------------------------------------------------------------------ ledgers
    async def _ledgers(self, options: Options) -> Json:
        check_option_names(options, ("limit", "after", "bookie", "state"))
        limit, after = _number(options, "limit", LIMIT), _number(options, "after", -1)
        bookie, state = _text(options, "bookie"), _text(options, "state")
        ids = iter([each for each in await marks.list_ledgers(self._session(), paths.LEDGERS) if each > after])
        found: list[LedgerRecord] = []
        while len(found) <= limit and (some := list(islice(ids, 256))):
            found += [
                record for record in await self._records(some)
                if state in ("", record.state) and (not bookie or bookie in bookies_of_ledger(record))
            ]  # fmt: skip
        return {"ledgers": [_short(record) for record in found[:limit]], "more": len(found) > limit}

    async def _ledger(self, options: Options) -> Json:
        check_option_names(options, ("ledger",))
        ledger = _number(options, "ledger", -1)
        record = await marks.read_ledger(self._session(), ledger)
        if record is None:
            raise LedgerNotFound(f"ledger {ledger} does not exist; 'magnetar ledgers list' shows them", ledger=ledger)
        mark = await marks.read_mark(self._session(), ledger)
        return {
            **_short(record),
            "properties": dict(record.properties),
            "createdMs": record.created_ms,
            "ensembles": [
                {"firstEntry": each.first_entry, "bookies": list(each.bookies)} for each in record.fragments
            ],
            "underReplicated": None if mark is None else _mark(mark[0], self._clock.wall_ms()),
        }  # fmt: skip

    async def _under_replicated(self, options: Options) -> Json:
        check_option_names(options, ("limit",))
        ids = await marks.list_ledgers(self._session(), paths.UNDER_REPLICATED)
        found = await self._marks(ids[: _number(options, "limit", LIMIT)])
        now_ms = self._clock.wall_ms()
        return {"ledgers": [_mark(each, now_ms) for each in found], "count": len(ids)}

    # ------------------------------------------------------------------------------ auto-recovery
    async def _status(self, options: Options) -> Json:
        check_option_names(options, ())
        store, now_ms = self._session(), self._clock.wall_ms()
        auditor = await get_record(store, paths.REPAIR_AUDITOR, AuditorRecord)
        workers = await marks.list_records(store, paths.REPAIR_WORKERS, RepairWorkerRecord)
        ids = await marks.list_ledgers(store, paths.UNDER_REPLICATED)
        found = await self._marks(ids[:SAMPLE])
        left = await self._bytes_left(found) * max(len(ids), 1) // max(len(found), 1)
        rate = sum(each.bytes_per_s for each in workers if now_ms - each.updated_ms < FRESH_MS)
        return {
            "enabled": await marks.is_repair_enabled(store),
            "auditor": None if auditor is None else auditor[0].name,
            "auditorSinceMs": None if auditor is None else auditor[0].since_ms,
            "underReplicated": len(ids),
            "reasons": dict(Counter(reason for each in found for reason in each.bookies.values())),
            "stuck": dict(Counter(each.stuck for each in found if each.stuck)),
            "bytesLeft": left,
            "bytesPerSecond": rate,
            "secondsToGo": None if not ids or not rate else round(left / rate),
            "workers": [_worker(each, now_ms) for each in workers],
        }

    async def _enable(self, options: Options) -> Json:
        check_option_names(options, ("on",))
        await marks.set_repair_enabled(self._session(), boolean_option(options, "on"))
        return {"enabled": boolean_option(options, "on")}

    # ------------------------------------------------------------------------------ bookies
    async def _bookies(self, options: Options) -> Json:
        check_option_names(options, ())
        store = self._session()
        available, departing = await marks.list_registered(store), await marks.list_departing(store)
        cookies = await store.children(paths.COOKIES)
        named: Counter[str] = Counter()
        for record in await self._records(await marks.list_ledgers(store, paths.LEDGERS)):
            named.update(list(bookies_of_ledger(record)))
        rows: list[Json] = []
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

    async def _depart(self, options: Options) -> Json:
        check_option_names(options, ("bookie", "dead", "forget", "cancel"))
        store, bookie = self._session(), _text(options, "bookie")
        registered = await store.get(paths.bookie(bookie)) is not None
        path = paths.departing(bookie)
        before = await get_record(store, path, DepartingRecord)
        if boolean_option(options, "cancel"):
            if before is not None:
                await store.delete(path, before[1])
            return {"bookie": bookie, "departing": False}
        cookie = await get_record(store, paths.cookie(bookie), CookieRecord)
        if not registered and cookie is None and not await self._records_on(bookie):
            raise NotFound(f"no bookie {bookie} is known; 'magnetar bookies list' shows them", bookie=bookie)
        if registered and boolean_option(options, "dead"):
            raise Busy(
                f"bookie {bookie} is registered: it lives. 'magnetar bookies decommission' empties a living one, "
                "'magnetar bookies list' shows it", bookie=bookie,
            )  # fmt: skip
        since_ms = self._clock.wall_ms() if before is None else before[0].since_ms
        record = DepartingRecord(bookie=bookie, since_ms=since_ms, forget=boolean_option(options, "forget"))
        await put_record(store, path, record, ANY)
        return {"bookie": bookie, "departing": True, "registered": registered, "forget": record.forget}

    async def _departure(self, options: Options) -> Json:
        check_option_names(options, ("bookie",))
        store, bookie = self._session(), _text(options, "bookie")
        on_it = await self._records_on(bookie)
        marked = {*await marks.list_ledgers(store, paths.UNDER_REPLICATED)}
        still = [record for record in on_it if record.ledger_id in marked]
        stuck = [each for each in await self._marks([record.ledger_id for record in still][:SAMPLE]) if each.stuck]
        return {
            "bookie": bookie,
            "ledgers": len(on_it),
            "marked": len(still),
            "open": sum(record.state != CLOSED for record in on_it),
            "bytesLeft": sum(_share(record, {bookie}) for record in on_it),
            "stuck": dict(Counter(each.stuck for each in stuck)),
            "known": await store.get(paths.cookie(bookie)) is not None,
            "registered": await store.get(paths.bookie(bookie)) is not None,
        }

    # ------------------------------------------------------------------------------ reading
    async def _records_on(self, bookie: str) -> list[LedgerRecord]:
        """Returns the records of all ledgers that have a fragment on the bookie."""
        records = await self._records(await marks.list_ledgers(self._session(), paths.LEDGERS))
        return [record for record in records if bookie in bookies_of_ledger(record)]

    async def _records(self, ledgers: Sequence[int]) -> list[LedgerRecord]:
        store = self._session()
        found = await _in_parts(ledgers, lambda ledger: marks.read_ledger(store, ledger))
        return [record for record in found if record is not None]

    async def _marks(self, ledgers: Sequence[int]) -> list[UnderReplicatedRecord]:
        store = self._session()
        found = await _in_parts(ledgers, lambda ledger: marks.read_mark(store, ledger))
        return [each[0] for each in found if each is not None]

    async def _bytes_left(self, found: Sequence[UnderReplicatedRecord]) -> int:
        gone = {each.ledger_id: {b for b, why in each.bookies.items() if why in GONE} for each in found}
        return sum(_share(record, gone[record.ledger_id]) for record in await self._records(list(gone)))


async def _in_parts(ledgers: Sequence[int], read: Callable[[int], Awaitable[T]]) -> list[T]:
    """Returns `read(ledger)` of each ledger, with `READS_AT_ONCE` reads at a time."""
    found: list[T] = []
    for at in range(0, len(ledgers), READS_AT_ONCE):
        found += await asyncio.gather(*map(read, ledgers[at : at + READS_AT_ONCE]))
    return found


def _share(record: LedgerRecord, bookies: set[str]) -> int:
    """Returns about how many bytes of a closed ledger are on these bookies, assuming fragments of equal size."""
    slots = sum(bookie in bookies for fragment in record.fragments for bookie in fragment.bookies)
    copies = record.ensemble_size * len(record.fragments)
    return record.length * record.write_quorum * slots // copies


def _short(record: LedgerRecord) -> Json:
    closed = record.state == CLOSED
    return {
        "ledger": record.ledger_id,
        "state": record.state,
        "quorum": f"{record.ensemble_size}/{record.write_quorum}/{record.ack_quorum}",
        "entries": record.last_entry + 1 if closed else None,
        "bytes": record.length if closed else None,
        "fragments": len(record.fragments),
        "bookies": list(bookies_of_ledger(record)),
        "owner": record.properties.get("topic", ""),
    }


def _mark(mark: UnderReplicatedRecord, now_ms: int) -> Json:
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


def _worker(worker: RepairWorkerRecord, now_ms: int) -> Json:
    return {
        "name": worker.name,
        "ledgers": worker.ledgers,
        "entries": worker.entries,
        "bytes": worker.bytes,
        "failures": worker.failures,
        "bytesPerSecond": worker.bytes_per_s if now_ms - worker.updated_ms < FRESH_MS else 0,
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
