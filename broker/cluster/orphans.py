"""Ledgers that no record names, and topics that name ledgers that do not exist (ledger protocol §3.6; complaint 29).

A crash between "create a ledger" and "put it into the list", or between "remove it from the list" and "delete it",
leaves a ledger over. Every ledger that a broker creates names its owner in its properties: a topic's log has `topic`
(and `index`), a ledger with other state of a topic also has its kind (`TOPIC_LEDGER_PROPERTY_SETS`). Both directions
are checked:

- **orphan**: a ledger of one of these kinds, created `age_s` ago or longer, that no record of any topic or
  subscription mentions. That alone proves nothing: damaged or restored metadata lacks records too. The sweep deletes it
  only if a record explains it: the metadata says that it was deleted (ledger/client.py), or its owner's record (of the
  topic, or of the subscription) exists, is older than the ledger, and does not name it. First it is fenced and closed,
  so that no writer can confirm anything in it any more; then its topic's records are read once more.
- **unexplained**: an orphan whose owner has no record, or a younger one (it was created again). It is reported, and
  stays until an operator deletes it (`magnetar ledgers orphans --delete --unexplained`).
- **missing**: a ledger that a topic lists and that does not exist. That is lost data: an alarm, and nothing is changed.

A search keeps some bits of each ledger in memory, and reads the names of ledgers and topics in pages.

Safety. Ledgers are listed before the records are read, so a ledger that is created or listed meanwhile is no orphan.
Any read that fails ends the search, and nothing is deleted. A number anywhere in a record counts as
a reference (snapshots, buckets and compacted ledgers included), and a ledger with other properties is never touched, so
that unknown kinds of ledgers are safe. `age_s` is far longer than a broker that created a ledger needs to list it or
lose its session. As that is measured by two clocks, the sweep of a broker deletes only what it saw as an orphan `age_s`
before, too (`TopicManager.delete_orphans_if_first_broker`). Guarding tests: tests/broker/cluster/test_orphans.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec
from pyroaring import BitMap64

from ...ledger import LedgerClient
from ...ledger import client as deletions
from ...metadata import paths
from ...metadata.records import CoordinatorRecord, CursorRecord, LedgerRecord, MetadataRecord, TopicRecord
from ...metadata.store import MetadataStore, get_record, iterate_nodes, read_ledger_ids
from ...proto.errors import LedgerNotFound
from ...proto.names import TopicName, parse_number

_LOG = logging.getLogger("magnetar.broker")

LEDGERS_READ_AT_ONCE = 50
TOPICS_READ_AT_ONCE = 50
LEDGER_IDS_END = 1 << 63
"""Ledger ids are smaller."""
TOPIC_LEDGER_PROPERTY_SETS = (
    {"topic"},
    {"topic", "index"},
    *({"topic", kind} for kind in ("cursor", "delays", "dedup", "compacted", "transactions", "key_index")),
)
"""The sets of properties of the ledgers that this module knows; the values of `cursor` and `delays` are the
subscription, that of `index` is the index of the first message of a ledger of the log."""
LOG_LEDGER_PROPERTIES = {"index", "durability"}
"""Properties that a ledger of a topic's log may have besides, and that say nothing of its owner."""


class Orphan(NamedTuple):
    """A ledger that exists although no record in the metadata names it. `ledger_id`: its id; `topic`: the full name of
    the topic in its properties; `created_ms`: when it was created (ms since the epoch)."""

    ledger_id: int
    topic: str
    subscription: str  # the subscription, if it is the ledger of a cursor or of delayed messages; else empty
    created_ms: int
    unexplained: bool = False  # whether no record proves that it may be deleted


class MissingLedger(NamedTuple):
    """A ledger that does not exist although a record in the metadata names it. `ledger_id`: its id; `topic`: the full
    name of the topic whose record names it."""

    ledger_id: int
    topic: str


class OrphanSearchResult(NamedTuple):
    """The result of a search for orphans: the orphan ledgers and the missing ledgers that were found. Both lists may be
    empty."""

    orphans: list[Orphan]
    missing: list[MissingLedger]


async def find_orphans(metadata: MetadataStore, now_ms: int, age_s: float) -> OrphanSearchResult:
    """Searches the metadata for orphaned ledgers that are at least `age_s` seconds old, and for missing ledgers.
    `now_ms`: the wall clock. Changes nothing. Raises the errors of the metadata; then nothing is known."""
    there = await read_ledger_ids(metadata)
    unreferred, suspects = there.copy(), list[MissingLedger]()
    for tenant, namespace in await _namespaces(metadata):
        async for names in iterate_nodes(metadata, paths.topics(tenant, namespace), limit=TOPICS_READ_AT_ONCE):
            reads = (_of_topic(metadata, tenant, namespace, paths.decode_segment(each), there) for each in names)
            for referred, absent in await asyncio.gather(*reads):
                unreferred -= referred
                suspects += absent
    unreferred -= await _of_coordinators(metadata)
    missing = [each for each in suspects if await _is_missing(metadata, each)]
    orphans, candidates = [], iter(unreferred)
    while some := list(islice(candidates, LEDGERS_READ_AT_ONCE)):
        records = await asyncio.gather(*[get_record(metadata, paths.ledger(each), LedgerRecord) for each in some])
        orphans += [orphan for found in records if found and (orphan := _orphan(found[0], now_ms, age_s))]
    noted = await deletions.find_deleted_ledgers(metadata, [each.ledger_id for each in orphans])
    explained = [each.ledger_id in noted or await _is_replaced(metadata, each) for each in orphans]
    return OrphanSearchResult(
        [o._replace(unexplained=not known) for o, known in zip(orphans, explained, strict=True)], missing
    )


async def _of_topic(
    metadata: MetadataStore, tenant: str, namespace: str, local: str, there: BitMap64
) -> tuple[BitMap64, list[MissingLedger]]:
    """Returns the numbers in the records of a topic and of its subscriptions, and which of the topic's ledgers are not
    among `there`."""
    referred = await _of_cursors(metadata, tenant, namespace, local)
    found = await get_record(metadata, paths.topic(tenant, namespace, local), TopicRecord)
    if found is None:
        return referred, []
    name = TopicName.parse(f"persistent://{tenant}/{namespace}/{local}").full
    ids = (each.ledger_id for each in found[0].ledgers)
    return referred | _possible_ids(found[0]), [MissingLedger(each, name) for each in ids if each not in there]


async def _is_replaced(metadata: MetadataStore, orphan: Orphan) -> bool:
    """Whether the record of the ledger's owner exists and is older than the ledger: that proves the ledger is
    unused."""
    name = TopicName.parse(orphan.topic)
    place = name.tenant, name.namespace, name.stored_local
    topic = await get_record(metadata, paths.topic(*place), TopicRecord)
    if topic is None or topic[0].created_ms > orphan.created_ms:
        return False
    if not orphan.subscription:
        return True
    cursor = await get_record(metadata, paths.cursor(*place, orphan.subscription), CursorRecord)
    return cursor is not None and cursor[0].created_ms <= orphan.created_ms


def _orphan(record: LedgerRecord, now_ms: int, age_s: float) -> Orphan | None:
    properties = record.properties
    owner = properties.keys() - LOG_LEDGER_PROPERTIES
    if owner not in TOPIC_LEDGER_PROPERTY_SETS or now_ms - record.created_ms < age_s * 1000:
        return None
    subscription = properties.get("cursor") or properties.get("delays", "")
    return Orphan(record.ledger_id, properties["topic"], subscription, record.created_ms)


def _numbers(record: MetadataRecord) -> Iterator[int]:
    """Yields every whole number in the record."""
    waiting: list[object] = [msgspec.to_builtins(record)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            yield value
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and (number := parse_number(value)) is not None:
            yield number


async def _namespaces(metadata: MetadataStore) -> list[tuple[str, str]]:
    found = []
    for tenant in await _children(metadata, paths.TENANTS):
        found += [(tenant, each) for each in await _children(metadata, paths.namespaces(tenant))]
    return found


async def _children(metadata: MetadataStore, path: str) -> list[str]:
    return [paths.decode_segment(each) for each in await metadata.children(path)]


def _possible_ids(record: MetadataRecord) -> BitMap64:
    """Returns every whole number in the record that may be the id of a ledger."""
    return BitMap64(number for number in _numbers(record) if 0 <= number < LEDGER_IDS_END)


async def _of_cursors(metadata: MetadataStore, tenant: str, namespace: str, local: str) -> BitMap64:
    names = await _children(metadata, paths.cursors(tenant, namespace, local))
    records = [await get_record(metadata, paths.cursor(tenant, namespace, local, each), CursorRecord) for each in names]
    return BitMap64().union(*(_possible_ids(found[0]) for found in records if found is not None))


async def _of_coordinators(metadata: MetadataStore) -> BitMap64:
    records = [
        await get_record(metadata, paths.coordinator(number), CoordinatorRecord)
        for number in paths.parse_coordinators(await metadata.children(paths.COORDINATORS))
    ]
    return BitMap64(found[0].ledger_id for found in records if found is not None and found[0].ledger_id >= 0)


async def _is_missing(metadata: MetadataStore, suspect: MissingLedger) -> bool:
    """Whether the topic still lists the ledger and it still does not exist: it may have been created, or trimmed,
    during the search.
    """
    if await metadata.get(paths.ledger(suspect.ledger_id)) is not None:
        return False
    name = TopicName.parse(suspect.topic)
    found = await get_record(metadata, paths.topic(name.tenant, name.namespace, name.stored_local), TopicRecord)
    return found is not None and any(each.ledger_id == suspect.ledger_id for each in found[0].ledgers)


async def delete_orphans(
    metadata: MetadataStore, ledgers: LedgerClient, orphans: Iterable[Orphan], *, unexplained: bool = False
) -> list[Orphan]:
    """Deletes orphan ledgers, and returns those that were deleted. Fences each ledger first. Skips a ledger that does
    not exist any more, a ledger that a record names by now, and, unless `unexplained` is True, an unexplained orphan.
    Raises the errors of `LedgerClient.recover` if a ledger cannot be fenced, and the errors of the metadata; the
    ledgers before it are deleted then."""
    deleted = []
    for orphan in orphans:
        if orphan.unexplained and not unexplained:
            continue
        name = TopicName.parse(orphan.topic)
        try:
            await ledgers.recover(orphan.ledger_id)
        except LedgerNotFound:
            continue
        found = await get_record(metadata, paths.topic(name.tenant, name.namespace, name.stored_local), TopicRecord)
        referred = _possible_ids(found[0]) if found is not None else BitMap64()
        referred |= await _of_cursors(metadata, name.tenant, name.namespace, name.stored_local)
        referred |= await _of_coordinators(metadata)
        if orphan.ledger_id not in referred:
            await ledgers.delete(orphan.ledger_id)
            _LOG.info("orphan ledger %d of %s is deleted", orphan.ledger_id, orphan.topic)
            deleted.append(orphan)
    return deleted
