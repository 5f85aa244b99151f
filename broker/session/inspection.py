"""Descriptions for operators: a subscription's cursor, the copies of a topic's ledgers, the metadata, repair, and
callers.

    await describe_cursor(topic, subscription, buckets)            from memory; reads the first entries of ten gaps
    await describe_ledgers(metadata, topic, after, limit)          the records of so many ledgers, and their marks
    await describe_metadata(metadata, path, after, limit)          one record, without what must stay secret
    await ask_bookies(bookies, names, "repair-status")             what any bookie answers an operator
    await describe_security(broker)                                who is connected, and who was denied something

None of these functions changes anything. What one call reads is bounded by its limit; only the list of the children of
a node has the size of the tree. Guarding tests: tests/broker/session/test_inspection.py.

Also in this file: what a subscription has acknowledged, in few numbers: buckets of entries, and the largest gaps.

    count_entries_in_buckets(shape, cursor, delayed, 600)     from mark-delete to the end, at most so many
    find_largest_gaps(shape, cursor, 10)                   the largest runs of entries that are not acknowledged

A *gap* is a run of entries of one ledger that are not acknowledged, before one that is. A cursor may have millions of
holes: both functions work on whole bitmaps, and look at single runs of at most twice as many as they return. An entry
that readers never see (of an aborted transaction) counts as acknowledged.
Guarding tests: tests/broker/session/test_cursor_shape.py.

Also in this file, below its heading: the description of this broker's process, and the settings of all brokers that
change while they run (settings).
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from heapq import nlargest
from types import CoroutineType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from pyroaring import BitMap

from ...ledger.bookies import Bookies
from ...ledger.peer_format import Status, encode_admin_request
from ...metadata import paths
from ...metadata.records import (
    DamagedEntriesRecord,
    DamagedRecord,
    LedgerRecord,
    PoliciesRecord,
    TopicLedger,
    UnderReplicatedRecord,
    decode_record_of_any_class,
)
from ...metadata.store import MetadataStore, get_readable_record
from ...proto.errors import InvalidRequest, MagnetarError, Unavailable
from ...proto.names import Position
from ...proto.policies import RETENTION_FIELD_PAIRS, Policies
from ...proto.states import LedgerState
from ...proto.statistics import (
    BrokerDescription,
    BrokerSetting,
    ConnectedRole,
    CursorBucket,
    CursorGap,
    CursorShape,
    LedgerCopies,
    MetadataNode,
    RefusedCaller,
    SecurityDescription,
)
from ...proto.versions import PRODUCT
from ...runtime import logs
from ...runtime.access import Principal
from ...runtime.alarm import EventLoopSlices
from ...runtime.config import find_source, list_setting_defaults
from ...runtime.descriptors import PROCESS_DESCRIPTORS
from ...runtime.metrics import MetricsPage
from ...runtime.metrics_server import format_metrics_page
from ...runtime.network import Endpoint
from ..common.config import (
    APPLIED_POLICY_NAMES,
    CHANGEABLE_POLICY_NAMES,
    RUNTIME_SETTING_NAMES,
    BrokerConfig,
    RuntimeSettings,
)
from ..log.log import ReadableLog
from ..log.log_shape_core import LedgerSpan, LogShape
from ..node.topic_manager import TopicManager
from ..subscription.core.cursor import Cursor
from ..subscription.core.cursor_state import count_contiguous_ranges, find_end_of_contiguous
from ..subscription.subscription import Subscription
from ..topic.topic import Topic

NO_ENTRIES = BitMap()


def ledgers_after_mark(shape: LogShape, mark: Position) -> Iterator[tuple[LedgerSpan, int]]:
    """Yields (the span of a ledger, the id of its first entry after `mark`) for each ledger that has entries after the
    position `mark`."""
    for span in shape.spans:
        first = mark.entry_id + 1 if span.ledger_id == mark.ledger_id else 0
        if span.ledger_id >= mark.ledger_id and first <= span.last_entry:
            yield span, first


def find_acked_or_hidden(shape: LogShape, cursor: Cursor, ledger_id: int) -> BitMap:
    """Returns the ids of the entries of a ledger that need not be delivered: entries after mark-delete that the cursor
    has acknowledged, and entries that readers never see (those of aborted transactions). Pending entries are not among
    them."""
    acked, hidden = cursor.acked.get(ledger_id, NO_ENTRIES), shape.hidden_entries_of_ledger(ledger_id)
    return acked if hidden is None else acked | hidden


def count_entries_in_buckets(
    shape: LogShape, cursor: Cursor, delayed: Mapping[int, BitMap], buckets: int
) -> tuple[CursorBucket, ...]:
    """Divides the entries after mark-delete into at most `buckets` ranges of equal size; the last one may be smaller.
    Returns for each range how many entries it contains, and how many of them are acknowledged, pending and delayed.
    `delayed`: the ids of the delayed entries, by ledger."""
    spans = [*ledgers_after_mark(shape, cursor.mark)]
    left = size = -(-sum(span.last_entry + 1 - first for span, first in spans) // buckets)
    found, pending = list[CursorBucket](), cursor.pending
    start, counts = Position(-1, -1), [0, 0, 0, 0]
    index = 0
    for span, first in spans:
        done, held = find_acked_or_hidden(shape, cursor, span.ledger_id), delayed.get(span.ledger_id, NO_ENTRIES)
        whole = pending.whole.get(span.ledger_id, NO_ENTRIES) if pending is not None else NO_ENTRIES
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
        open_ = BitMap(range(first, end)) - find_acked_or_hidden(shape, cursor, span.ledger_id)
        found += [(Position(span.ledger_id, at), size) for at, size in find_largest_runs(open_, count)]
    return nlargest(count, found, key=lambda each: (each[1], -each[0].ledger_id, -each[0].entry_id))


def find_largest_runs(entries: BitMap, count: int) -> list[tuple[int, int]]:
    """Returns the `count` largest runs of consecutive values in `entries`, each as (its first value, its length); all
    of them if there are fewer. If several are equally large, any of them may be left out."""
    # `starts` contains each value that begins `length` consecutive values; a run of n values has n - length + 1 of
    # them. `length` is doubled, and then refined, while enough runs remain.
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
            last = find_end_of_contiguous(among, first)
            if first not in known:
                found.append((first, last - first + length + more))
            at = last + 1
    return found


BUCKETS_DEFAULT, BUCKETS_MAX = 600, 1000
SHOWN_GAPS_MAX = 10
GAP_TIMES_TIMEOUT_S = 1.0
"""Seconds within which bookies must return the first entries of the gaps, to show when these entries arrived."""
LISTED_LEDGERS_DEFAULT, LISTED_LEDGERS_MAX = 100, 200
COPY_READS_AT_ONCE = 32
LISTED_CHILDREN_DEFAULT, LISTED_CHILDREN_MAX = 100, 1000
SECRET_FIELD_NAMES = ("key", "token")
"""Fields of records that are left out of answers: with a ledger's key anyone may read it, and a token proves who owns a
node."""
DAMAGED_STATE = "damaged"
SHOWN_ROLES_MAX = 200
BOOKIE_ANSWER_TIMEOUT_S = 5.0
"""Seconds for a bookie to answer before the next one is asked."""


def _limited(given: int, usual: int, most: int, what: str) -> int:
    if not 0 <= given <= most:
        raise InvalidRequest(f"{what} must be 1 to {most}, not {given}")
    return given or usual


# ----------------------------------------------------------------------------------------------------- cursor
async def describe_cursor(topic: Topic, subscription: Subscription, buckets: int) -> CursorShape:
    """Returns a description of what a subscription has acknowledged. It says how many entries after mark-delete are
    acknowledged, in each of at most `buckets` ranges (0: BUCKETS_DEFAULT). It lists the SHOWN_GAPS_MAX largest gaps,
    with the arrival time of their first entries if it can be read within GAP_TIMES_TIMEOUT_S. Raises InvalidRequest
    unless `buckets` is 0 to BUCKETS_MAX."""
    buckets = _limited(buckets, BUCKETS_DEFAULT, BUCKETS_MAX, "buckets")
    log, cursor = topic.readable_log(uncommitted=subscription.reads_uncommitted), subscription.cursor
    delays = subscription.dispatcher.delays
    found = count_entries_in_buckets(log.shape, cursor, delays.delayed_entries if delays is not None else {}, buckets)
    gaps = find_largest_gaps(log.shape, cursor, SHOWN_GAPS_MAX)
    published = await asyncio.gather(*(_published_ms(log, first) for first, _ in gaps))
    return CursorShape(
        cursor.mark, log.shape.last_position, found,
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
        async with asyncio.timeout(GAP_TIMES_TIMEOUT_S):
            return (log.reader.get(position) or await log.reader.read_entry(position)).timestamp_ms
    except (MagnetarError, TimeoutError):
        return 0  # which is told as not known


# ---------------------------------------------------------------------------------------------------- ledgers
async def describe_ledgers(metadata: MetadataStore, topic: Topic, after: int, limit: int) -> list[LedgerCopies]:
    """Returns descriptions of the topic's ledgers and their copies, the oldest first: at most `limit` ledgers (0:
    LISTED_LEDGERS_DEFAULT) with ids above `after` (0: from the first one). Raises InvalidRequest unless `limit` is 0 to
    LISTED_LEDGERS_MAX. Raises the errors of the metadata."""
    limit = _limited(limit, LISTED_LEDGERS_DEFAULT, LISTED_LEDGERS_MAX, "limit")
    listed = [each for each in topic.log.record.ledgers if not after or each.ledger_id > after][:limit]

    async def describe(each: TopicLedger) -> LedgerCopies:
        id_ = each.ledger_id
        found = await get_readable_record(metadata, paths.ledger(id_), LedgerRecord)
        mark = await get_readable_record(metadata, paths.under_replicated(id_), UnderReplicatedRecord)
        missing = dict(mark[0].bookies) if mark is not None else {}
        for bookie in await metadata.children(paths.damaged_copies(id_)):
            if await get_readable_record(metadata, paths.damaged_copies_of_bookie(id_, bookie), DamagedEntriesRecord):
                missing[bookie] = DAMAGED_STATE
        return _copies(topic, each, found[0] if found is not None else None, missing)

    copies = list[LedgerCopies]()
    for at in range(0, len(listed), COPY_READS_AT_ONCE):
        copies += await asyncio.gather(*map(describe, listed[at : at + COPY_READS_AT_ONCE]))
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
    """Returns a description of the metadata node at `path` ("" or "/": the root), with the names of at most `limit` (0:
    LISTED_CHILDREN_DEFAULT) of its children that sort after `after`. Secrets in the record are blanked; a record that
    does not decode is described by its damage. The version is -1 if there is no such node. Raises InvalidRequest if
    `path` does not begin with /, or `limit` is not 0 to LISTED_CHILDREN_MAX. Raises the errors of the metadata."""
    limit = _limited(limit, LISTED_CHILDREN_DEFAULT, LISTED_CHILDREN_MAX, "limit")
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
        return {name: "…" if name in SECRET_FIELD_NAMES and each else _blanked(each) for name, each in value.items()}
    return [*map(_blanked, value)] if isinstance(value, list | tuple) else value


# ----------------------------------------------------------------------------------------------------- repair
async def ask_bookies(bookies: Bookies, names: Iterable[str], verb: str, **options: object) -> dict[str, Any]:
    """Sends the admin request `verb`, with these options (bookie/admin.py), to the bookies `names`, one after another,
    until one of them answers without an error. Returns this answer. Waits at most BOOKIE_ANSWER_TIMEOUT_S seconds for
    each. The request has the rights of this broker, so the caller's own rights must be checked before. Raises
    Unavailable if no bookie answers, and the errors of the metadata."""
    await bookies.wait_bookies_listed()
    request = msgspec.json.encode({"verb": verb, **options})
    for name in names:
        answer = await bookies.ask(name, encode_admin_request(), (request,), timeout_s=BOOKIE_ANSWER_TIMEOUT_S)
        if answer is not None and answer[0].status is Status.OK and answer[1]:
            found = msgspec.json.decode(bytes(answer[1][0]), type=dict[str, Any])
            if "error" not in found:
                return found
    raise Unavailable(f"no bookie answers {verb!r}; 'magnetar bookies list' shows those that are registered")


# --------------------------------------------------------------------------------------------------- security
async def describe_security(broker: TopicManager) -> SecurityDescription:
    """Returns the roles that are connected to the loaded topics of this broker, and the callers to which this broker
    has denied an operation. Each of the two lists has at most SHOWN_ROLES_MAX rows."""
    turns, producers, consumers = EventLoopSlices(broker.world.clock), Counter[Principal](), Counter[Principal]()
    for topic in [*broker.loaded.values()]:
        producers.update(each.principal for each in topic.producers)
        for subscription in topic.subscriptions.values():
            consumers.update(each.principal for each in subscription.consumers.values())
        if turns.is_slice_used_up:
            await turns.begin_slice()
    refused = Counter(broker.access.audit.refusals).most_common(SHOWN_ROLES_MAX)
    roles = [
        ConnectedRole(
            each.name, each.kind.value, each.method, each.credential_id, each.expires_ms, producers[each],
            consumers[each],
        )
        for each, _ in (producers + consumers).most_common(SHOWN_ROLES_MAX)
    ]  # fmt: skip
    return SecurityDescription(broker.name, tuple(roles), tuple(RefusedCaller(*each) for each in refused))


# ------------------------------------------------------------------------------------------------------------- settings
# What a broker says of its own process, and the settings of all brokers that change while they run.
#
#     describe_broker(broker)                        its clock, limit of open files, settings with their sources
#     parse_setting_name("maxTopicsPerNamespace")    our name of it: `max_topics`
#     await change_setting(broker, name, text)       stored in the metadata; every broker applies it within a second or
# so
#     await remove_setting(broker, name)             each broker has its own value again
#
# Settings that change are the policies that namespaces inherit (`CHANGEABLE_POLICY_NAMES`), and those of
# `RuntimeSettings`; all brokers use them instead of those with which each was started. If Pulsar can change the same
# setting at run time, it is shown by Pulsar's name; both names are accepted. A value is text; items of a list are
# separated by commas. What is changed is in one record of the metadata (metadata/paths.py `BROKER_POLICIES`), which the
# watch of PolicyCache follows. Guarding tests: tests/broker/rest/test_configuration.py,
# tests/broker/session/test_settings.py.

PULSAR_SETTING_NAMES: dict[str, str] = {
    "auto_subscription_creation": "allowAutoSubscriptionCreation",
    "auto_topic_creation": "allowAutoTopicCreation",
    "dispatch_rate_bytes": "dispatchThrottlingRatePerTopicInByte",
    "dispatch_rate_messages": "dispatchThrottlingRatePerTopicInMsg",
    "inactive_mode": "brokerDeleteInactiveTopicsMode",
    "max_topics": "maxTopicsPerNamespace",
    "publish_rate_bytes": "maxPublishRatePerTopicInBytes",
    "publish_rate_messages": "maxPublishRatePerTopicInMessages",
    "schema_auto_update": "isAllowAutoUpdateSchemaEnabled",
    "subscribe_rate": "subscribeThrottlingRatePerConsumer",
    "subscribe_rate_period_s": "subscribeRatePeriodPerConsumerInSecond",
    "subscription_dispatch_rate_bytes": "dispatchThrottlingRatePerSubscriptionInByte",
    "subscription_dispatch_rate_messages": "dispatchThrottlingRatePerSubscriptionInMsg",
    "subscription_types": "subscriptionTypesEnabled",
}
"""Our name → Pulsar's name of a setting with the same meaning and unit."""
CHANGEABLE_NAMES = (*CHANGEABLE_POLICY_NAMES, *RUNTIME_SETTING_NAMES)
"""Our names of all settings that change while brokers run."""
_OURS = {theirs: ours for ours, theirs in PULSAR_SETTING_NAMES.items()} | {name: name for name in CHANGEABLE_NAMES}
_LISTS = ("dead_letter_backoff_s", "subscription_types")
UNIT_NAMES = {"s": "seconds", "minutes": "minutes", "mib": "MiB", "bytes": "bytes"}
"""The last word of a setting's name → the unit of its value."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
SHOWN_SETTING_NAMES = tuple(PULSAR_SETTING_NAMES.get(name, name) for name in CHANGEABLE_NAMES)
LISTED_BYTES_MAX = 4 << 20
"""Most bytes of metrics in an answer. The rest is left out, and a line says so."""
SHOWN_TASKS_MAX, FRAMES_PER_TASK_MAX = 2_000, 12
"""Most tasks that `describe_waiting_tasks` lists, and most calls of each task."""


# ----------------------------------------------------------------------------------------------------- changing
def parse_setting_name(name: str) -> str:
    """Returns Magnetar's name of a setting. `name`: Magnetar's or Pulsar's name of it. Raises InvalidRequest if the
    setting is unknown, or cannot be changed while brokers run."""
    if name not in _OURS:
        raise InvalidRequest(
            f"the setting {name[:100]!r} does not change while brokers run; those that do: "
            "magnetar brokers list-dynamic-config"
        )
    return _OURS[name]


def parse_setting_value(name: str, text: str) -> dict[str, Any]:
    """Parses the text `text` of the setting `name` (Magnetar's or Pulsar's name). Returns a mapping with one item: the
    field of Policies or RuntimeSettings that has the setting, and the value. Raises InvalidRequest if the setting is
    unknown or the value is invalid."""
    ours = parse_setting_name(name)
    kind: type[msgspec.Struct] = RuntimeSettings if ours in RUNTIME_SETTING_NAMES else Policies
    value = [each.strip() for each in text.split(",") if each.strip()] if ours in _LISTS else text
    try:
        found = msgspec.convert({ours: value}, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        hint, unit = get_type_hints(kind)[ours], UNIT_NAMES.get(ours.rpartition("_")[2], "")
        allowed = _describe_values(hint)
        if unit and _NUMBER.fullmatch(text) is None and ours not in _LISTS:
            allowed = f"a number of {unit}, such as 60"
        raise InvalidRequest(f"{name} is {allowed}, not {text[:100]!r}" if allowed else f"{name}: {error}") from error
    if getattr(found, ours) is None:
        raise InvalidRequest(f"{name} has no value: to remove it, magnetar brokers delete-dynamic-config --config …")
    return {ours: getattr(found, ours)}


def _describe_values(hint: Any) -> str:
    """Returns which values a type allows, in words; "" for a text or a list."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(each.value) for each in hint)}"
    kinds = {bool: "true or false", int: "a whole number", float: "a number"}
    return kinds.get(hint) or next(filter(None, map(_describe_values, get_args(hint))), "")


def find_settings_to_remove(name: str) -> tuple[str, ...]:
    """Returns the names of the settings that must be removed together with the setting `name`: that setting, and of a
    retention also the other one of its pair. Raises InvalidRequest if the setting is unknown."""
    ours = parse_setting_name(name)
    return next((pair for pair in RETENTION_FIELD_PAIRS if ours in pair), (ours,))


async def change_setting(broker: TopicManager, name: str, text: str) -> None:
    """Changes a setting of all brokers. This broker has applied the new value when this function returns. Raises
    InvalidRequest if the setting or the value is invalid, and the errors of the metadata."""
    ours, given = parse_setting_name(name), parse_setting_value(name, text)
    if ours in RUNTIME_SETTING_NAMES:
        await broker.policies.change_runtime_setting(ours, format_setting_value(given[ours]))
    else:
        await broker.policies.change_policies(None, None, Policies(**given))


async def remove_setting(broker: TopicManager, name: str) -> None:
    """Removes the value of a setting that was set for all brokers, so that each broker uses its own configuration
    again. Raises InvalidRequest if the setting is unknown, and the errors of the metadata."""
    ours = parse_setting_name(name)
    if ours in RUNTIME_SETTING_NAMES:
        await broker.policies.change_runtime_setting(ours, None)
    else:
        await broker.policies.change_policies(None, None, Policies(), find_settings_to_remove(name))


def list_changed_settings(record: PoliciesRecord) -> dict[str, str]:
    """Returns the settings that were changed for all brokers, with their values as text. A setting that Pulsar also has
    is listed under Pulsar's name."""
    values: list[tuple[str, object]] = [(name, getattr(record.policies, name)) for name in CHANGEABLE_POLICY_NAMES]
    values += [(name, record.properties.get(name)) for name in RUNTIME_SETTING_NAMES]
    return {
        PULSAR_SETTING_NAMES.get(name, name): format_setting_value(value) for name, value in values if value is not None
    }


def format_setting_value(value: object) -> str:
    """Returns a value of a setting as text, as Java writes it: `true` or `false`, and the items of a list with commas
    between."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and not isinstance(value, Endpoint):
        return ",".join(map(str, value))
    return str(value)


# --------------------------------------------------------------------------------------------------- describing
async def describe_broker(broker: TopicManager, *, tasks: bool = False, metrics: bool = False) -> BrokerDescription:
    """Returns a description of this broker, from the memory of its process; asks no other process. `tasks`: also
    describes what each task waits for; `metrics`: also includes the page of metrics, up to LISTED_BYTES_MAX bytes.
    Raises Unavailable if this broker has no ownership session."""
    settings = list_settings(broker)
    page = await _metrics_page(broker) if metrics else ""
    return BrokerDescription(
        broker.name, PRODUCT, broker.world.clock.wall_ms(), PROCESS_DESCRIPTORS.limit, settings,
        describe_waiting_tasks() if tasks else "", page
    )


def list_settings(broker: TopicManager) -> tuple[BrokerSetting, ...]:
    """Returns the settings that are in force at this broker, each with the source of its value. A setting that was
    changed at run time has the source `dynamic`. Raises Unavailable if this broker has no ownership session."""
    config, changed = broker.config, {_OURS[name] for name in list_changed_settings(broker.policies.all_brokers_record)}
    defaults, found = list_setting_defaults(BrokerConfig), list[BrokerSetting]()
    for name in config.__struct_fields__:
        value: object = getattr(config, name)
        if name in APPLIED_POLICY_NAMES:
            value = getattr(broker.policies.defaults, name)
        elif name in RUNTIME_SETTING_NAMES:
            value = getattr(broker, name)
        source = "dynamic" if name in changed else find_source("broker", name, is_default=value == defaults[name])
        found.append(BrokerSetting(name, format_setting_value(value), source, name in CHANGEABLE_NAMES))
    level = "dynamic" if "log_level" in changed else "option"
    return (*found, BrokerSetting("log_level", logs.get_log_level(), level, dynamic=True))


async def _metrics_page(broker: TopicManager) -> str:
    page, size, pieces = MetricsPage(), 0, list[bytes]()
    await broker.measure(page)
    for piece in format_metrics_page(page):
        size += len(piece)
        if size > LISTED_BYTES_MAX:
            pieces.append(b"# the rest is left out: metrics_topics makes the page smaller\n")
            break
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces).decode()


def describe_waiting_tasks() -> str:
    """Returns a text that shows where each task of this event loop waits now: its name, and the stack of its calls
    (file, line and function), the outermost first. Shows at most SHOWN_TASKS_MAX tasks and FRAMES_PER_TASK_MAX calls of
    each. Contains no values of variables."""
    lines = list[str]()
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    for task in tasks[:SHOWN_TASKS_MAX]:
        lines.append(task.get_name())
        call: Any = task.get_coro()
        for _ in range(FRAMES_PER_TASK_MAX):
            if not isinstance(call, CoroutineType) or call.cr_frame is None:
                break
            frame = call.cr_frame
            file = "/".join(frame.f_code.co_filename.replace("\\", "/").split("/")[-3:])
            lines.append(f"  {file}:{frame.f_lineno} {frame.f_code.co_name}")
            call = call.cr_await
    if len(tasks) > SHOWN_TASKS_MAX:
        lines.append(f"{len(tasks) - SHOWN_TASKS_MAX} more")
    return "\n".join(lines) + "\n"
