"""What operators look into: a subscription's cursor, the copies of a topic's ledgers, the metadata, repair.

    await describe_cursor(topic, subscription, buckets)            from memory; reads the first entries of ten gaps
    await describe_ledgers(metadata, topic, after, limit)          the records of so many ledgers, and their marks
    await describe_metadata(metadata, path, after, limit)          one record, without what must stay secret
    await ask_bookies(bookies, names, "repair-status")             what any bookie answers an operator
    await describe_security(broker)                                who is connected, and who was denied something

Nothing here changes anything. What one call reads is bounded by its limit; only the list of the children of a node has
the size of the tree. Guarding tests: tests/broker/session/test_inspection.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ...ledger.bookies import Bookies
from ...ledger.peer_format import Status, encode_admin
from ...metadata import paths
from ...metadata.records import (
    DamagedEntriesRecord,
    DamagedRecord,
    LedgerRecord,
    TopicLedger,
    UnderReplicatedRecord,
    decode_any,
)
from ...metadata.store import MetadataStore, get_readable_record
from ...proto.errors import InvalidRequest, MagnetarError, Unavailable
from ...proto.names import Position
from ...proto.states import LedgerState
from ...proto.statistics import (
    ConnectedRole,
    CursorGap,
    CursorShape,
    LedgerCopies,
    MetadataNode,
    RefusedCaller,
    SecurityDescription,
)
from ...runtime.access import Principal
from ..common.token_bucket import EventLoopSlices
from ..log.log import ReadableLog
from ..node.topic_manager import TopicManager
from ..subscription.subscription import Subscription
from ..topic.topic import Topic
from .cursor_shape_core import count_buckets, find_gaps

BUCKETS, BUCKETS_MAX = 600, 1000
GAPS = 10
PUBLISHED_S = 1.0
"""Seconds that bookies have to say when the first entries of the gaps arrived."""
LEDGERS, LEDGERS_MAX = 100, 200
READS_AT_ONCE = 32
CHILDREN, CHILDREN_MAX = 100, 1000
SECRETS = ("key", "token")
"""Fields of records that no answer has: a ledger's key opens it, and a token says whose a node is."""
DAMAGED = "damaged"
ROLES_MAX = 200
BOOKIE_S = 5.0
"""Seconds for a bookie to answer before the next one is asked."""


def _limited(given: int, usual: int, most: int, what: str) -> int:
    if not 0 <= given <= most:
        raise InvalidRequest(f"{what} must be 1 to {most}, not {given}")
    return given or usual


# ----------------------------------------------------------------------------------------------------- cursor
async def describe_cursor(topic: Topic, subscription: Subscription, buckets: int) -> CursorShape:
    """Returns what the subscription has acknowledged after mark-delete. Raises InvalidRequest."""
    buckets = _limited(buckets, BUCKETS, BUCKETS_MAX, "buckets")
    log, cursor = topic.readable_log(uncommitted=subscription.reads_uncommitted), subscription.cursor
    delays = subscription.dispatcher.delays
    found = count_buckets(log.shape, cursor, delays.held_entries if delays is not None else {}, buckets)
    gaps = find_gaps(log.shape, cursor, GAPS)
    published = await asyncio.gather(*(_published_ms(log, first) for first, _ in gaps))
    return CursorShape(
        cursor.mark, log.shape.last, found,
        tuple(
            CursorGap(first, entries, _holder(subscription, first), at_ms)
            for (first, entries), at_ms in zip(gaps, published, strict=True)
        ),
    )  # fmt: skip


def _holder(subscription: Subscription, position: Position) -> str:
    """Returns the name of the consumer at which the entry is outstanding; empty if there is none."""
    members = (each.member for each in subscription.consumers.values())
    return next((each.name for each in members if position in each.outstanding), "")


async def _published_ms(log: ReadableLog, position: Position) -> int:
    try:
        async with asyncio.timeout(PUBLISHED_S):
            return (log.reader.get(position) or await log.reader.read_entry(position)).timestamp_ms
    except (MagnetarError, TimeoutError):
        return 0  # which is told as not known


# ---------------------------------------------------------------------------------------------------- ledgers
async def describe_ledgers(metadata: MetadataStore, topic: Topic, after: int, limit: int) -> list[LedgerCopies]:
    """Returns the topic's ledgers with ids above `after` (0: all), the oldest first. Raises InvalidRequest."""
    limit = _limited(limit, LEDGERS, LEDGERS_MAX, "limit")
    listed = [each for each in topic.log.record.ledgers if not after or each.ledger_id > after][:limit]

    async def describe(each: TopicLedger) -> LedgerCopies:
        id_ = each.ledger_id
        found = await get_readable_record(metadata, paths.ledger(id_), LedgerRecord)
        mark = await get_readable_record(metadata, paths.under_replicated(id_), UnderReplicatedRecord)
        missing = dict(mark[0].bookies) if mark is not None else {}
        for bookie in await metadata.children(paths.damaged_copies(id_)):
            if await get_readable_record(metadata, paths.damaged_copies_of_bookie(id_, bookie), DamagedEntriesRecord):
                missing[bookie] = DAMAGED
        return _copies(topic, each, found[0] if found is not None else None, missing)

    copies = list[LedgerCopies]()
    for at in range(0, len(listed), READS_AT_ONCE):
        copies += await asyncio.gather(*map(describe, listed[at : at + READS_AT_ONCE]))
    return copies


def _copies(topic: Topic, listed: TopicLedger, record: LedgerRecord | None, missing: dict[str, str]) -> LedgerCopies:
    span = topic.log.shape.find_span(listed.ledger_id)
    entries, size = (span.last_entry + 1, span.size) if span is not None else (max(listed.entries, 0), listed.size)
    state = LedgerState.UNKNOWN
    if record is not None:
        state = LedgerState.OPEN if span is not None and span.open else LedgerState.CLOSED
    quorum = f"{record.ensemble_size}/{record.write_quorum}/{record.ack_quorum}" if record is not None else ""
    named = [each for fragment in record.fragments for each in fragment.bookies] if record is not None else []
    return LedgerCopies(
        listed.ledger_id, state, quorum, entries, size, listed.created_ms, listed.closed_ms,
        tuple(dict.fromkeys([*named, *missing])), missing,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- metadata
async def describe_metadata(metadata: MetadataStore, path: str, after: str, limit: int) -> MetadataNode:
    """Returns the node at `path`, and the names below it that are above `after`. Raises InvalidRequest."""
    limit = _limited(limit, CHILDREN, CHILDREN_MAX, "limit")
    path = path.rstrip("/")
    if path and not path.startswith("/"):
        raise InvalidRequest(f"a path of the metadata begins with /, not {path!r:.100}")
    node = await metadata.get(path) if path else None
    names = [each for each in await metadata.children(path or "/") if each > after]
    more = names[limit - 1] if len(names) > limit else ""
    kind = record = damage = ""
    if node is not None:
        try:
            found = decode_any(node.value, path)
            kind, record = type(found).__name__, msgspec.json.encode(_blanked(msgspec.to_builtins(found))).decode()
        except DamagedRecord as error:
            damage = str(error)
    version = node.version if node is not None else -1
    return MetadataNode(path or "/", kind, version, record, damage, tuple(names[:limit]), more)


def _blanked(value: object) -> object:
    """Returns the plain value of a record without its secrets."""
    if isinstance(value, Mapping):
        return {name: "…" if name in SECRETS and each else _blanked(each) for name, each in value.items()}
    return [*map(_blanked, value)] if isinstance(value, list | tuple) else value


# ----------------------------------------------------------------------------------------------------- repair
async def ask_bookies(bookies: Bookies, names: Iterable[str], verb: str, **options: object) -> dict[str, Any]:
    """Returns the answer of the first of these bookies that answers an admin request (bookie/admin.py), as this broker;
    the caller's rights must be checked before. Raises Unavailable if none does."""
    await bookies.wait_bookies_listed()
    request = msgspec.json.encode({"verb": verb, **options})
    for name in names:
        answer = await bookies.ask(name, encode_admin(), (request,), timeout_s=BOOKIE_S)
        if answer is not None and answer[0].status is Status.OK and answer[1]:
            found = msgspec.json.decode(bytes(answer[1][0]), type=dict[str, Any])
            if "error" not in found:
                return found
    raise Unavailable(f"no bookie answers {verb!r}; 'magnetar bookies list' shows those that are registered")


# --------------------------------------------------------------------------------------------------- security
async def describe_security(broker: TopicManager) -> SecurityDescription:
    """Returns the roles that are connected to the loaded topics of this broker, and the callers to whom this broker
    denied an operation. Each list has at most ROLES_MAX rows."""
    turns, producers, consumers = EventLoopSlices(broker.world.clock), Counter[Principal](), Counter[Principal]()
    for topic in [*broker.loaded.values()]:
        producers.update(each.principal for each in topic.producers)
        for subscription in topic.subscriptions.values():
            consumers.update(each.principal for each in subscription.consumers.values())
        if turns.is_slice_used_up:
            await turns.begin_slice()
    refused = Counter(broker.access.audit.refusals).most_common(ROLES_MAX)
    roles = [
        ConnectedRole(
            each.name, each.kind.value, each.method, each.credential_id, each.expires_ms, producers[each],
            consumers[each],
        )
        for each, _ in (producers + consumers).most_common(ROLES_MAX)
    ]  # fmt: skip
    return SecurityDescription(broker.name, tuple(roles), tuple(RefusedCaller(*each) for each in refused))
