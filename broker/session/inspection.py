"""Descriptions for operators: a subscription's cursor, the copies of a topic's ledgers, the metadata, repair.

    await describe_cursor(topic, subscription, buckets)            from memory; reads the first entries of ten gaps
    await describe_ledgers(metadata, topic, after, limit)          the records of so many ledgers, and their marks
    await describe_metadata(metadata, path, after, limit)          one record, without what must stay secret
    await ask_bookies(bookies, names, "repair-status")             what any bookie answers an operator
    await describe_security(broker)                                who is connected, and who was denied something

Nothing here changes anything. What one call reads is bounded by its limit; only the list of the children of a node has
the size of the tree. Guarding tests: tests/broker/session/test_inspection.py.

What a subscription has acknowledged, in few numbers: buckets of entries, and the largest gaps.

    count_entries_in_buckets(shape, cursor, delayed, 600)     from mark-delete to the end, at most so many
    find_largest_gaps(shape, cursor, 10)                   the largest runs of entries that are not acknowledged

A *gap* is a run of entries of one ledger that are not acknowledged, before one that is. A cursor may have millions of
holes: both functions work on whole bitmaps, and look at single runs of at most twice as many as they return. An entry
that readers never see (of an aborted transaction) counts as acknowledged.
Guarding tests: tests/broker/session/test_cursor_shape.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import nlargest
from typing import Any

import msgspec
from pyroaring import BitMap

from ...ledger.bookies import Bookies
from ...ledger.peer_format import Status, encode_admin_request
from ...metadata import paths
from ...metadata.records import (
    DamagedEntriesRecord,
    DamagedRecord,
    LedgerRecord,
    TopicLedger,
    UnderReplicatedRecord,
    decode_record_of_any_class,
)
from ...metadata.store import MetadataStore, get_readable_record
from ...proto.errors import InvalidRequest, MagnetarError, Unavailable
from ...proto.names import Position
from ...proto.states import LedgerState
from ...proto.statistics import (
    ConnectedRole,
    CursorBucket,
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
from ..log.log_shape_core import LogShape, Span
from ..node.topic_manager import TopicManager
from ..subscription.core.cursor import Cursor
from ..subscription.core.cursor_state import count_contiguous_ranges, run_end
from ..subscription.subscription import Subscription
from ..topic.topic import Topic

NONE = BitMap()


def ledgers_after_mark(shape: LogShape, mark: Position) -> Iterator[tuple[Span, int]]:
    """Yields each ledger that has entries after the position `mark`, together with the id of the first of these
    entries."""
    for span in shape.spans:
        first = mark.entry_id + 1 if span.ledger_id == mark.ledger_id else 0
        if span.ledger_id >= mark.ledger_id and first <= span.last_entry:
            yield span, first


def find_acked_or_pending(shape: LogShape, cursor: Cursor, ledger_id: int) -> BitMap:
    """Returns the ids of the entries of a ledger that need not be delivered: entries after mark-delete that are
    acknowledged, and entries that readers never see."""
    acked, hidden = cursor.acked.get(ledger_id, NONE), shape.hidden_entries_of_ledger(ledger_id)
    return acked if hidden is None else acked | hidden


def count_entries_in_buckets(
    shape: LogShape, cursor: Cursor, delayed: Mapping[int, BitMap], buckets: int
) -> tuple[CursorBucket, ...]:
    """Divides the entries after mark-delete into at most `buckets` ranges of equal size (the last one may be smaller).
    Returns for each range how many entries it contains, and how many of them are acknowledged, pending and delayed."""
    spans = [*ledgers_after_mark(shape, cursor.mark)]
    left = size = -(-sum(span.last_entry + 1 - first for span, first in spans) // buckets)
    found, pending = list[CursorBucket](), cursor.pending
    start, counts = Position(-1, -1), [0, 0, 0, 0]
    index = 0
    for span, first in spans:
        done, held = find_acked_or_pending(shape, cursor, span.ledger_id), delayed.get(span.ledger_id, NONE)
        whole = pending.whole.get(span.ledger_id, NONE) if pending is not None else NONE
        while first <= span.last_entry:
            end = min(first + left, span.last_entry + 1)
            if left == size:
                start, counts = Position(span.ledger_id, first), [0, 0, 0, 0]
                messages = span.end_index - span.first_index
                index = span.first_index + messages * first // (span.last_entry + 1)
            cumulative = 0 if pending is None else _entries_up_to(pending.up_to, span.ledger_id, first, end)
            waiting = max(cumulative, whole.range_cardinality(first, end))
            for at, number in enumerate((
                end - first, done.range_cardinality(first, end), waiting, held.range_cardinality(first, end),
            )):  # fmt: skip
                counts[at] += number
            left, first = left - (end - first), end
            if not left:
                found.append(CursorBucket(start, index, *counts))
                left = size
    return (*found, CursorBucket(start, index, *counts)) if left != size else tuple(found)


def _entries_up_to(mark: Position, ledger_id: int, first: int, end: int) -> int:
    """Returns how many of the entries `first` … `end - 1` of the ledger are at or before the position `mark`."""
    if mark.ledger_id != ledger_id:
        return end - first if ledger_id < mark.ledger_id else 0
    return min(max(mark.entry_id + 1 - first, 0), end - first)


def find_largest_gaps(shape: LogShape, cursor: Cursor, count: int) -> list[tuple[Position, int]]:
    """Returns the `count` largest gaps of a cursor, the largest first. A gap is a run of unacknowledged entries before
    an acknowledged one. Each is given by the position of its first entry and the number of its entries."""
    found, last = list[tuple[Position, int]](), cursor.last_hole_position
    for span, first in ledgers_after_mark(shape, cursor.mark):
        end = last.entry_id if span.ledger_id == last.ledger_id else span.last_entry + 1
        if span.ledger_id > last.ledger_id or first >= end:
            continue
        open_ = BitMap(range(first, end)) - find_acked_or_pending(shape, cursor, span.ledger_id)
        found += [(Position(span.ledger_id, at), size) for at, size in find_largest_runs(open_, count)]
    return nlargest(count, found, key=lambda each: (each[1], -each[0].ledger_id, -each[0].entry_id))


def find_largest_runs(entries: BitMap, count: int) -> list[tuple[int, int]]:
    """Returns the `count` largest runs of consecutive values in `entries`. If several are equally large, any of them
    may be left out. Each run is given by its first value and its length.

    `starts` contains each value that begins `length` consecutive values; a run of n values has n - length + 1 of them.
    `length` is doubled, and then refined, while enough runs remain.
    """
    starts, length = entries, 1
    while count_contiguous_ranges(longer := starts & starts.shift(-length)) >= count:
        starts, length = longer, 2 * length
    step = length // 2
    while step:
        longer = starts & starts.shift(-step)
        if count_contiguous_ranges(longer) >= count:
            starts, length = longer, length + step
        step //= 2
    found, longer = list[tuple[int, int]](), starts & starts.shift(-1)
    for among, more in ((longer, 1), (starts, 0)):  # those that are longer, then of `length`
        at, known = 0, {first for first, _ in found}
        while among and at <= among.max() and len(found) < count:
            first = among.next_set_bit(at)
            last = run_end(among, first)
            if first not in known:
                found.append((first, last - first + length + more))
            at = last + 1
    return found


BUCKETS, BUCKETS_MAX = 600, 1000
GAPS = 10
PUBLISHED_S = 1.0
"""Seconds within which bookies must return the first entries of the gaps, to show when these entries arrived."""
LEDGERS, LEDGERS_MAX = 100, 200
READS_AT_ONCE = 32
CHILDREN, CHILDREN_MAX = 100, 1000
SECRETS = ("key", "token")
"""Fields of records that are left out of answers: with a ledger's key anyone may read it, and a token proves who owns a
node."""
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
    """Returns a description of what a subscription has acknowledged: how many entries after mark-delete are
    acknowledged, in each of at most `buckets` ranges; and the largest gaps. Raises InvalidRequest if `buckets` is out
    of range."""
    buckets = _limited(buckets, BUCKETS, BUCKETS_MAX, "buckets")
    log, cursor = topic.readable_log(uncommitted=subscription.reads_uncommitted), subscription.cursor
    delays = subscription.dispatcher.delays
    found = count_entries_in_buckets(log.shape, cursor, delays.delayed_entries if delays is not None else {}, buckets)
    gaps = find_largest_gaps(log.shape, cursor, GAPS)
    published = await asyncio.gather(*(_published_ms(log, first) for first, _ in gaps))
    return CursorShape(
        cursor.mark, log.shape.last, found,
        tuple(
            CursorGap(first, entries, _holder(subscription, first), at_ms)
            for (first, entries), at_ms in zip(gaps, published, strict=True)
        ),
    )  # fmt: skip


def _holder(subscription: Subscription, position: Position) -> str:
    """Returns the name of the consumer at which the entry is outstanding; empty if it is outstanding at none."""
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
    """Returns descriptions of the topic's ledgers and their copies, the oldest first: at most `limit` ledgers with ids
    above `after` (0: from the first one). Raises InvalidRequest if `limit` is out of range."""
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
    span = topic.log.shape.find_span_of_ledger(listed.ledger_id)
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
    """Returns a description of the metadata node at `path`, with the names of at most `limit` of its children that sort
    after `after`. Raises InvalidRequest if an argument is invalid."""
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
            found = decode_record_of_any_class(node.value, path)
            kind, record = type(found).__name__, msgspec.json.encode(_blanked(msgspec.to_builtins(found))).decode()
        except DamagedRecord as error:
            damage = str(error)
    version = node.version if node is not None else -1
    return MetadataNode(path or "/", kind, version, record, damage, tuple(names[:limit]), more)


def _blanked(value: object) -> object:
    """Returns the record as plain values, without its secrets."""
    if isinstance(value, Mapping):
        return {name: "…" if name in SECRETS and each else _blanked(each) for name, each in value.items()}
    return [*map(_blanked, value)] if isinstance(value, list | tuple) else value


# ----------------------------------------------------------------------------------------------------- repair
async def ask_bookies(bookies: Bookies, names: Iterable[str], verb: str, **options: object) -> dict[str, Any]:
    """Sends an admin request (bookie/admin.py) to the bookies `names`, one after another, until one of them answers.
    Returns this answer. The request has the rights of this broker, so the caller's own rights must be checked before.
    Raises Unavailable if no bookie answers."""
    await bookies.wait_bookies_listed()
    request = msgspec.json.encode({"verb": verb, **options})
    for name in names:
        answer = await bookies.ask(name, encode_admin_request(), (request,), timeout_s=BOOKIE_S)
        if answer is not None and answer[0].status is Status.OK and answer[1]:
            found = msgspec.json.decode(bytes(answer[1][0]), type=dict[str, Any])
            if "error" not in found:
                return found
    raise Unavailable(f"no bookie answers {verb!r}; 'magnetar bookies list' shows those that are registered")


# --------------------------------------------------------------------------------------------------- security
async def describe_security(broker: TopicManager) -> SecurityDescription:
    """Returns the roles that are connected to the loaded topics of this broker, and the callers to which this broker
    has denied an operation. Each of the two lists has at most ROLES_MAX rows."""
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
