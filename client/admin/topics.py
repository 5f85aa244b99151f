"""The methods of AdminClient that are written by hand, as functions: for topics, messages, schemas, transactions, half
messages, subscriptions, tenants, namespaces, policies, properties, brokers and permissions.

`add_operation_methods` (client/admin/client.py) makes each public coroutine function a method. A topic parameter may be
a short name. A function raises InvalidName before anything is sent if a name is malformed, and else the errors that
AdminClient lists."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ...proto import operations as op
from ...proto import statistics as values
from ...proto.errors import (
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotFound,
    TimedOut,
    TopicNotFound,
    Unavailable,
)
from ...proto.names import TopicName, check_resource_group_name, check_subscription_name, check_tenant_name
from ...proto.policies import Policies, decode_policies, encode_policies
from ...proto.schema import SchemaInfo, encode_version
from ...proto.states import COORDINATORS_MAX, TxnId, TxnState
from ..model.message_id import MessageId
from .grpc_transport import (
    FindResult,
    OperationCaller,
    StoredMessage,
    decode_stored_messages,
    make_subscription_arguments,
    to_full_namespace_name,
    to_full_topic_name,
)

TOPICS_PER_PAGE = 20_000
"""Names of topics in one answer of a broker: at most 15 MiB, where an answer has room for 16 MiB."""


async def topics(self: OperationCaller, namespace: str = "public/default", *, partitions: bool = False) -> list[str]:
    """Returns the full names of a namespace's topics, sorted. If `partitions` is true, the list has the name of
    each partition in place of the name of its topic.

    Non-persistent topics are included if they have partitions or are in use. Raises TenantNotFound or
    NamespaceNotFound if there is no such namespace; a caller who does not administer the tenant gets an empty list
    then. Asks in pages of TOPICS_PER_PAGE names, so the list may change between two of them."""
    asked = {"namespace": to_full_namespace_name(namespace), "partitions": partitions, "limit": TOPICS_PER_PAGE}
    found: list[str] = []
    while True:
        page = await self._all(op.LIST_TOPICS, **asked, after=found[-1] if found else "")
        if found:  # a broker of an older release answers all names each time
            page = page[bisect_right(page, found[-1]) :]
        found += page
        if len(page) != TOPICS_PER_PAGE:
            return found


async def update_topic(self: OperationCaller, topic: str, *, partitions: int) -> None:
    """Increases the number of partitions of a partitioned topic to `partitions`. Raises TopicNotFound if there is
    no such topic; InvalidRequest if it is not partitioned, has more partitions already, or `partitions` is too
    large; NotAllowed if the namespace has its maximum of topics."""
    await self._call(op.UPDATE_TOPIC, topic=to_full_topic_name(topic), partitions=partitions)


async def delete_topic(self: OperationCaller, topic: str, *, force: bool = False) -> None:
    """Deletes a topic with all its partitions. Raises Busy if the topic has producers or subscriptions, unless
    `force` is true; TransactionsOpen if prepared transactions have messages there, or open ones and `force` is
    false; TopicNotFound if there is no such topic. A topic of the same name that another program creates in the
    meantime is not deleted."""
    name = to_full_topic_name(topic)
    meant = await self._call(op.CHECK_DELETE, topic=name, force=force)
    await self._call(op.DELETE_TOPIC, topic=name, force=force, incarnation=meant)


async def partitions(self: OperationCaller, topic: str) -> int:
    """Returns the number of partitions of a topic; 0: the topic is not partitioned, or is itself a partition.
    Raises TopicNotFound if the topic does not exist; does not create it."""
    name = TopicName.parse(topic)
    return 0 if name.is_partition else await self._call(op.PARTITIONS, topic=name.full)


async def parts(self: OperationCaller, topic: str) -> list[str]:
    """Returns the full names of a topic's partitions. For a topic without partitions, or for a single partition,
    returns only its own name. Raises TopicNotFound if the topic does not exist."""
    name = TopicName.parse(topic)
    return [name.with_partition(i).full for i in range(await partitions(self, topic))] or [name.full]


async def create_schedule(
    self: OperationCaller, topic: str, name: str, *, cron: str = "", every_s: float = 0, at_ms: int = 0,
    zone: str = "UTC", payload: bytes = b"", key: str = "", properties: Mapping[str, str] | None = None,
    missed: str = "skip",
) -> None:  # fmt: skip
    """Creates a schedule: at set times the owner of the topic publishes a message with `payload`, `key` and
    `properties`, once for each time.

    Exactly one parameter says when: `cron`, five fields in the time zone `zone`; `every_s`, an interval of one
    second or more; or `at_ms`, a single time in ms since the epoch. `missed` says what happens to times at which no
    broker could publish: "skip" drops them, "last" makes up for the latest, "all" for the latest 100.

    Raises AlreadyExists if the topic has a schedule of that name; InvalidRequest if a value is wrong, or the
    schedule would never fire; NotAllowed if the topic is not persistent or is a single partition, or the namespace
    has its maximum of schedules; TopicNotFound if there is no such topic."""
    await self._call(
        op.CREATE_SCHEDULE, topic=to_full_topic_name(topic), name=name, cron=cron, every_ms=round(1000 * every_s),
        at_ms=at_ms, zone=zone, payload=payload, key=key, properties=dict(properties or {}), missed=missed,
    )  # fmt: skip


async def schedules(self: OperationCaller, topic: str) -> list[values.ScheduleStats]:
    """Returns the schedules of a topic, sorted by name. Each says when it fires next, what it has fired and, if it
    cannot fire, why. Raises TopicNotFound if there is no such topic."""
    return await self._all(op.LIST_SCHEDULES, topic=to_full_topic_name(topic))


async def owner(self: OperationCaller, topic: str) -> str:
    """Returns HOST:PORT of the broker that owns the topic. `topic`: a partition, or a topic without partitions.
    Raises the errors that AdminClient lists, such as Unavailable if no broker can own the topic now."""
    return await self._call(op.LOOKUP_TOPIC, topic=to_full_topic_name(topic))


async def offsets(
    self: OperationCaller, topic: str, *, publish_times_ms: Sequence[int] = (), subscription: str = "",
    aborted_in: tuple[int, int] = (0, 0), incarnation: int = 0,
) -> values.TopicOffsets:  # fmt: skip
    """Returns the range of message indexes of one partition, its size in bytes and its incarnation.

    `publish_times_ms`: times in ms since the epoch; for each the answer has the index of the first message that was
    stored then or later. `subscription`: the answer has the index of its first unacknowledged message; a
    subscription that does not exist is created at the earliest message. `aborted_in`: a range of indexes (first,
    end), without `end`, in which the answer counts messages of aborted transactions.

    `incarnation`: a number of the topic, which is another one after the topic was deleted and created again: that
    of an earlier answer, or 0 for any. Raises TopicNotFound if the topic does not exist, or was created again since
    that answer, because its indexes mean other messages then."""
    return await self._call(
        op.OFFSETS, topic=to_full_topic_name(topic), publish_times_ms=tuple(publish_times_ms),
        subscription=subscription,
        aborted_first=aborted_in[0], aborted_end=aborted_in[1], incarnation=incarnation,
    )  # fmt: skip


async def topic_stats(self: OperationCaller, topic: str, *, precise: bool = False) -> values.TopicStats:
    """Returns the statistics of one partition, or of a topic without partitions. Backlogs are counted in messages
    if `precise` is true, else in entries. Raises TopicNotFound if there is no such topic."""
    return await self._call(op.TOPIC_STATS, topic=to_full_topic_name(topic), precise_backlog=precise)


async def namespace_stats(self: OperationCaller, namespace: str) -> list[values.TopicStats]:
    """Returns the statistics of all topics of a namespace, sorted by name: one value for each partition and each
    topic without partitions. The field `oldest_ms` is not set. Sends one request to each broker, more if there are
    many topics, and one for each topic that no broker reported. Raises TenantNotFound or NamespaceNotFound if there
    is no such namespace."""
    found = await _ask_owners(self, namespace, brief=False)
    return [each for each in found if isinstance(each, values.TopicStats)]


async def brief_namespace_stats(self: OperationCaller, namespace: str) -> list[values.BriefTopicStats]:
    """Returns a few figures of each topic that `namespace_stats` returns, in the same order, and raises its errors.
    Sends as many requests, but takes a third of the time."""
    found = await _ask_owners(self, namespace, brief=True)
    return [_shorten_stats(each) if isinstance(each, values.TopicStats) else each for each in found]


def _shorten_stats(found: values.TopicStats) -> values.BriefTopicStats:
    backlogs = {each.name: each.backlog for each in found.subscriptions}
    return values.BriefTopicStats(
        found.name, found.messages_in, found.messages_out, found.storage_bytes, found.rate_in, found.rate_out,
        found.throughput_in, found.throughput_out, backlogs,
    )  # fmt: skip


async def _ask_owners(
    self: OperationCaller, namespace: str, *, brief: bool
) -> list[values.TopicStats | values.BriefTopicStats]:
    """Asks each broker for the statistics of its topics of a namespace, and returns them, sorted by name. If
    `brief`, those of an older broker, and of a topic that is asked for alone, are TopicStats nevertheless."""
    found = dict[str, values.TopicStats | values.BriefTopicStats]()
    asked = {"namespace": to_full_namespace_name(namespace), "brief": brief}
    page, names = await asyncio.gather(
        self._call(op.NAMESPACE_STATS, **asked, after=""), topics(self, namespace, partitions=True)
    )
    others = [each for each in page.brokers if each != page.here]
    await asyncio.gather(
        _pages(self, asked, page.here, page, found), *(_pages(self, asked, each, None, found) for each in others)
    )
    for topic in names:
        if topic not in found:
            try:
                found[topic] = await topic_stats(self, topic)
            except TopicNotFound:
                continue  # it was deleted meanwhile
    return [found[topic] for topic in sorted(found)]


async def _pages(
    self: OperationCaller,
    asked: Mapping[str, object],
    broker: str,
    page: values.NamespaceStats | None,
    found: dict[str, values.TopicStats | values.BriefTopicStats],
) -> None:
    """Adds the topics that `broker` serves to `found`. `asked`: the request but for where its page begins; `page`:
    the first page, if it is there already. Topics that fail are left to single requests."""
    after = ""
    while True:
        if page is None:
            try:
                page = await self._transport.call(op.NAMESPACE_STATS, {**asked, "after": after}, at=broker)
            except (Unavailable, ConnectionLost, TimedOut):
                return
        found.update((each.name, each) for each in page.topics)
        found.update((each.name, each) for each in page.brief_topics)
        if not page.next:
            return
        after, page = page.next, None


async def skip_lost(
    self: OperationCaller, topic: str, *, ledger_id: int | None = None, force: bool = False, forgotten: str = ""
) -> values.SkippedLost:
    """Skips, for all readers of one partition, the entries that every replica certainly lost: in all ledgers, or
    only in the ledger `ledger_id`. Returns the ranges that are skipped now, and the subscriptions concerned.
    Unloads the topic.

    Raises NotAllowed if a replica that does not answer may have the entries, unless `force` is true; InvalidRequest
    if the topic is not persistent, or `forgotten` is another text; TopicNotFound if there is no such topic. Skipped
    entries stay skipped, even if such a replica comes back.

    The field `forgotten` of the result names the transactions whose outcomes are lost, which hold back all later
    messages. The parameter `forgotten` decides about them: "commit" shows their messages, "abort" hides them for
    ever. Then no entry is skipped."""
    decision = {"forgotten": forgotten} if forgotten else {}
    if forgotten:
        ledger_id = op.NO_LEDGER
    ledger = {} if ledger_id is None else {"ledger_id": ledger_id}
    return await self._call(op.SKIP_LOST, topic=to_full_topic_name(topic), force=force, **ledger, **decision)


# ------------------------------------------------------------------------------------ messages
async def terminate_topic(self: OperationCaller, topic: str) -> MessageId:
    """Terminates a topic: its messages can still be read, and new messages are refused. Returns the id of its last
    entry; the entry id is -1 if the topic never had one. May be called again. Raises TopicNotFound if there is no
    such topic."""
    found: MessageId = await self._call(op.TERMINATE_TOPIC, topic=to_full_topic_name(topic))
    return found


async def last_message_id(self: OperationCaller, topic: str) -> MessageId:
    """Returns the id of the last message of a topic that consumers may get. If there is none, returns the topic's
    last position, whose entry id is -1 before the first message. Raises TopicNotFound if there is no such topic."""
    found: MessageId = await self._call(op.LAST_MESSAGE_ID, topic=to_full_topic_name(topic))
    return found


async def message_id_by_time(self: OperationCaller, topic: str, publish_time_ms: int) -> MessageId:
    """Returns the id of the first message that a broker stored at `publish_time_ms`, in ms since the epoch by its
    clock, or later; if there is none, the position that the next published message will have. Raises TopicNotFound
    if there is no such topic."""
    place = {"topic": to_full_topic_name(topic), "publish_time_ms": publish_time_ms}
    found: MessageId = await self._call(op.MESSAGE_ID_BY_TIME, **place)
    return found


async def backlog_size(self: OperationCaller, topic: str, position: MessageId) -> int:
    """Returns the approximate number of bytes that are stored in a topic after the message with the id `position`.
    Raises TopicNotFound if there is no such topic."""
    return await self._call(op.BACKLOG_SIZE, topic=to_full_topic_name(topic), position=position)


async def messages(self: OperationCaller, topic: str, ledger_id: int, entry_id: int) -> list[StoredMessage]:
    """Returns the messages of the stored entry `entry_id` of the ledger `ledger_id`. Raises NotFound if the topic
    has no such entry, TopicNotFound if there is no such topic, CorruptEntry if the entry is damaged."""
    return await self._all(op.GET_MESSAGE, topic=to_full_topic_name(topic), ledger_id=ledger_id, entry_id=entry_id)


async def nth_message(self: OperationCaller, topic: str, number: int, *, from_latest: bool = False) -> StoredMessage:
    """Returns the n-th message of a topic, counted from 1: from the oldest stored message, or from the newest if
    `from_latest` is true. Raises InvalidRequest if `number` is below 1, NotFound if the topic has fewer messages,
    TopicNotFound if there is no such topic, CorruptEntry if the entry is damaged."""
    if number < 1:
        raise InvalidRequest(f"messages are counted from 1, not from {number}")
    place = {"topic": to_full_topic_name(topic), "from_latest": from_latest, "number": number}
    found: tuple[StoredMessage, ...] = await self._call(op.EXAMINE_MESSAGES, **place)
    return found[0]


async def find_messages(
    self: OperationCaller, topic: str, *, key: str = "", property: str = "", text: str = "", where: str = "",
    since_ms: int = 0, until_ms: int = 0, before_index: int = 0, limit: int = 0, dry_run: bool = False,
    acked_by: str = "",
) -> FindResult:  # fmt: skip
    """Searches one partition, or a topic without partitions, for messages, from its end backwards. A message is
    found if it fits every condition that is given: the key `key`; the property `property` (NAME or NAME=VALUE); a
    payload that contains `text`; the filter expression `where`. `since_ms`, `until_ms`: only messages that a broker
    stored in this time (ms since the epoch).

    The broker stops after `limit` found messages (0: 100), after it has looked at 100,000 messages or 64 MiB, or
    after 10 s. To continue, search again with the `before_index` of the result.

    With `dry_run` the broker reads only key indexes: `looked_at` and `bytes` then say what a search would look at.
    `acked_by`: a subscription; `is_acknowledged` of each message says whether that subscription has acknowledged
    it, and is None if the broker is older or has no such subscription. Raises InvalidRequest for a wrong filter
    (its field `position` says where the filter is wrong) or another wrong value; TopicNotFound if there is no such
    topic; BackPressure if another search of this topic, or too many searches, run at its broker."""
    wanted = {
        "key": key, "property": property, "text": text, "where": where, "since_ms": since_ms, "until_ms": until_ms,
        "before_index": before_index, "limit": limit, "dry_run": dry_run,
        "acknowledged_by": acked_by,
    }  # fmt: skip
    name = to_full_topic_name(topic)
    found = await self._call(op.FIND_MESSAGES, topic=name, **wanted)
    told = found.tells_acknowledged
    messages = [
        message for entry in found.entries
        for message in reversed(decode_stored_messages([entry], name, set(entry.acknowledged) if told else None))
    ]  # fmt: skip
    return FindResult(
        messages, found.before_index, found.messages, found.bytes, found.unread, found.why, found.waiting,
        found.skipped, found.ledgers, found.unindexed_ledgers,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ schemas
async def schema(self: OperationCaller, topic: str, version: int | None = None) -> values.TopicSchema:
    """Returns the newest schema of a topic; if `version` is given, the schema with that version, even if it is
    deleted. Raises SchemaNotFound if there is no such schema, InvalidRequest if `version` is negative,
    TopicNotFound if there is no such topic."""
    if version is not None and version < 0:
        raise InvalidRequest(f"versions of schemas are counted from 0, not {version}")
    return await self._call(op.GET_SCHEMA, topic=to_full_topic_name(topic), version=encode_version(version))


async def put_schema(self: OperationCaller, topic: str, schema: SchemaInfo) -> int:
    """Registers a schema for a topic and returns its version. If the topic has an equal schema already, registers
    nothing and returns the version of that one. Raises IncompatibleSchema if the compatibility rule of the topic
    refuses the schema, InvalidSchema if its definition is malformed, NotAllowed if the topic has its maximum of
    schemas, TopicNotFound if there is no such topic, OutcomeUnknown if it may be registered."""
    return await self._call(op.PUT_SCHEMA, topic=to_full_topic_name(topic), schema=schema)


async def schema_version(self: OperationCaller, topic: str, schema: SchemaInfo) -> int:
    """Returns the version under which a schema equal to `schema` is registered for the topic. Raises SchemaNotFound
    if there is none, TopicNotFound if there is no such topic."""
    return await self._call(op.FIND_SCHEMA, topic=to_full_topic_name(topic), schema=schema)


async def test_schema(self: OperationCaller, topic: str, schema: SchemaInfo) -> values.SchemaTest:
    """Tests a schema against those of a topic without registering it. Returns the reason why the schema would be
    refused (empty: it could be registered), and the compatibility rule that was applied. Raises InvalidSchema if
    the definition is malformed, TopicNotFound if there is no such topic."""
    return await self._call(op.TEST_SCHEMA, topic=to_full_topic_name(topic), schema=schema)


async def delete_schemas(self: OperationCaller, topic: str, *, force: bool = False) -> int | None:
    """Deletes the schemas of a topic. Returns the newest version that was deleted; None: the topic had no schema.
    Messages written with these schemas can still be decoded, unless `force` is true: then the definitions are
    deleted, too. Raises TopicNotFound if there is no such topic, OutcomeUnknown if the schemas may be deleted."""
    return await self._call(op.DELETE_SCHEMA, topic=to_full_topic_name(topic), force=force)


# -------------------------------------------------------------------------------------------------- transactions
# Methods of AdminClient: which transactions and half messages are open, and how an operator ends them.


async def transactions(self: OperationCaller, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
    """Returns the transactions of one coordinator that have not ended yet, the oldest first; at most `limit`.
    Raises NotFound if there is no such coordinator."""
    return await self._call(op.LIST_TRANSACTIONS, coordinator=coordinator, limit=limit)


async def all_transactions(self: OperationCaller, limit: int = 1000) -> list[values.CoordinatorTransactions]:
    """Returns the transactions of every coordinator that have not ended yet, ordered by the coordinator's number;
    at most `limit` of each coordinator. Raises Unavailable or TimedOut if a coordinator does not answer."""
    found: list[values.CoordinatorTransactions] = []
    with contextlib.suppress(NotFound):
        while len(found) < COORDINATORS_MAX:
            found.append(await transactions(self, len(found), limit))
    return found


async def transaction(self: OperationCaller, txn: TxnId | str) -> values.TransactionStats:
    """Returns the state and the participants of one transaction. Raises NotFound if the coordinator never issued
    this id, or there is no such coordinator; InvalidRequest if `txn` is no id of a transaction."""
    found = await self._call(op.LIST_TRANSACTIONS, txn=_fields(txn), limit=1)
    if not found.items:
        raise NotFound(f"no transaction {txn} has begun")
    return found.items[0]


async def transaction_at(self: OperationCaller, txn: TxnId | str, topic: str) -> values.TransactionHere:
    """Returns the part of a transaction at one topic (a partition, or a topic without partitions), and the
    operations that wait at this topic for the transaction's end. Loads the topic if it is not loaded. Raises
    TopicNotFound if it does not exist and may not be created, InvalidRequest if `txn` is no id of a transaction."""
    return await self._call(op.TOPIC_TRANSACTION, topic=TopicName.parse(topic).full, txn=_fields(txn))


async def abort_transaction(self: OperationCaller, txn: TxnId | str) -> TxnState:
    """Aborts an open or prepared transaction, also one that another role began. Returns the state of the
    transaction; a transaction that has ended stays as it was. Raises NotFound if there is no such coordinator,
    InvalidRequest if `txn` is no id of a transaction or has not begun, TransactionForgotten if it ended too long
    ago."""
    return await self._call(op.ABORT_TRANSACTION, **_fields(txn))


async def detach_transaction(self: OperationCaller, txn: TxnId | str, topic: str) -> None:
    """Removes a topic from the participants of a transaction: the transaction no longer waits until this topic
    stores its outcome. Use it for a topic that cannot store the outcome any more. Raises NotFound if there is no
    such transaction, or it does not wait for this topic; InvalidRequest if `txn` is no id of a transaction."""
    await self._call(op.DETACH_TRANSACTION, txn=_fields(txn), topic=TopicName.parse(topic).full)


# ------------------------------------------------------------------------------------ half messages
async def halves(
    self: OperationCaller, coordinator: int, *, group: str = "", limit: int = 1000
) -> values.CoordinatorHalves:
    """Returns the half messages of one coordinator that are neither committed nor rolled back, the oldest first, at
    most `limit` (5,000 at most; 0: 1,000). `group`: lists only those of this group; empty: those of all. `open`,
    `parked` and `bytes` always count all of the coordinator. Raises NotFound if there is no such coordinator."""
    return await self._call(op.LIST_HALVES, coordinator=coordinator, group=group, limit=limit)


async def all_halves(self: OperationCaller, *, group: str = "", limit: int = 1000) -> list[values.CoordinatorHalves]:
    """Returns the undecided half messages of every coordinator, ordered by the coordinator's number; at most
    `limit` of each coordinator. `group`: only those of this group; empty: those of all groups. Raises Unavailable
    or TimedOut if a coordinator does not answer."""
    found: list[values.CoordinatorHalves] = []
    with contextlib.suppress(NotFound):
        while len(found) < COORDINATORS_MAX:
            found.append(await halves(self, len(found), group=group, limit=limit))
    return found


async def half(self: OperationCaller, half: TxnId | str) -> values.HalfStats:
    """Returns the record of one undecided half message. Raises NotFound if the half message is decided, or never
    existed; InvalidRequest if `half` is no id."""
    found = await self._call(op.LIST_HALVES, half=_fields(half), limit=1)
    if not found.items:
        raise NotFound(f"no half {half} is open")
    return found.items[0]


async def commit_half(self: OperationCaller, half: TxnId | str) -> None:
    """Publishes a half message, also a parked one, without asking its group. Raises NotFound if there is no such
    half message, TransactionEnded if it was rolled back already, InvalidRequest if `half` is no id, or the error
    with which publishing failed."""
    await _change_half(self, half, values.HalfDecision.COMMIT)


async def rollback_half(self: OperationCaller, half: TxnId | str) -> None:
    """Drops a half message, also a parked one, without publishing it. Raises NotFound if there is no such half
    message, TransactionEnded if it was committed already, InvalidRequest if `half` is no id."""
    await _change_half(self, half, values.HalfDecision.ROLLBACK)


async def park_half(self: OperationCaller, half: TxnId | str) -> None:
    """Parks a half message: its group is not asked about it any more, and an operator must decide. Raises NotFound
    if there is no such half message, TransactionEnded if it is decided, InvalidRequest if `half` is no id."""
    await _change_half(self, half, values.HalfDecision.PARK)


async def revive_half(self: OperationCaller, half: TxnId | str) -> None:
    """Revives a parked half message: its group is asked about it again at once, and the count of the group's
    answers starts again at 0. Raises NotFound if there is no such half message, TransactionEnded if it is decided,
    InvalidRequest if `half` is no id."""
    await _change_half(self, half, values.HalfDecision.REVIVE)


async def _change_half(self: OperationCaller, half: TxnId | str, verb: values.HalfDecision) -> None:
    await self._call(op.CHANGE_HALF, half=_fields(half), verb=verb)


def _fields(txn: TxnId | str) -> dict[str, int]:
    """Returns the fields of a transaction id. Raises InvalidRequest if the text is not one."""
    found = TxnId.parse(txn) if isinstance(txn, str) else txn
    return {"most": found.most, "least": found.least}


# ------------------------------------------------------------------------------------------------- subscriptions
# Methods of AdminClient: subscriptions of one partition, or of a topic without partitions.


async def create_subscription(
    self: OperationCaller,
    topic: str,
    name: str,
    position: MessageId | None = None,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Creates a durable subscription. `position`: the first message that the subscription delivers; None: it begins
    after the last message. `properties`: its properties; None: it has none. Raises AlreadyExists if the topic has a
    subscription of that name, NotAllowed if it has its maximum of subscriptions, TopicNotFound if there is no such
    topic."""
    await self._call(
        op.CREATE_SUBSCRIPTION, **make_subscription_arguments(topic, name), position=position or MessageId.latest,
        properties=dict(properties or {}),
    )  # fmt: skip


async def set_subscription_properties(
    self: OperationCaller, topic: str, name: str, properties: Mapping[str, str]
) -> None:
    """Replaces all properties of a subscription by `properties`. Raises NotAllowed if the topic is not persistent,
    TopicNotFound or SubscriptionNotFound if it does not exist."""
    await self._call(
        op.SET_SUBSCRIPTION_PROPERTIES, **make_subscription_arguments(topic, name), properties=dict(properties)
    )


async def reset_subscription(
    self: OperationCaller, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False
) -> None:
    """Moves a subscription to the position `to`: a message id, or a time in ms since the epoch. The time is that at
    which a broker stored the message (not `publish_timestamp()`, which is the producer's clock). Delivery begins at
    the message of the id, or after it if `exclusive` is true. Raises TopicNotFound or SubscriptionNotFound if it
    does not exist."""
    place = {"message_id": to, "exclude": exclusive} if isinstance(to, MessageId) else {"publish_time_ms": to}
    await self._call(op.RESET_SUBSCRIPTION, **make_subscription_arguments(topic, name), **place)


async def advance_subscription(
    self: OperationCaller, topic: str, name: str, index: int, *, incarnation: int = 0
) -> None:
    """Acknowledges durably, for the subscription `name`, every message of the partition `topic` whose index is less
    than `index`. Never moves the subscription back. `incarnation`: the topic's incarnation, from an answer of
    `offsets`; 0: any. Raises TopicNotFound if the topic does not exist, or was deleted and created again since that
    answer; SubscriptionNotFound if it has no such subscription."""
    await self._call(
        op.ADVANCE_SUBSCRIPTION, **make_subscription_arguments(topic, name), index=index, incarnation=incarnation
    )


async def expire_messages(self: OperationCaller, topic: str, name: str, older_than: float | MessageId) -> int:
    """Acknowledges old messages for the subscription `name`, or for every durable subscription if `name` is empty:
    those older than `older_than` seconds, or, if `older_than` is a message id, all up to and including that
    message. Returns the number of entries that were acknowledged. Raises InvalidRequest if the seconds are not
    above 0, TopicNotFound or SubscriptionNotFound if it does not exist."""
    limit = {"message_id" if isinstance(older_than, MessageId) else "older_than_s": older_than}
    return await self._call(op.EXPIRE_MESSAGES, topic=to_full_topic_name(topic), subscription=name, **limit)


async def skip_messages(self: OperationCaller, topic: str, name: str, messages: int = -1) -> None:
    """Acknowledges the next `messages` messages of a subscription without delivering them; -1: all messages. If
    `name` is empty, does so for every durable subscription. Raises InvalidRequest if `messages` is below -1,
    TopicNotFound or SubscriptionNotFound if it does not exist."""
    await self._call(
        op.SKIP_MESSAGES, topic=to_full_topic_name(topic), subscription=name and check_subscription_name(name),
        messages=messages,
    )  # fmt: skip


async def peek_messages(self: OperationCaller, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
    """Returns the next messages that a subscription will deliver, at most `messages`; does not move the
    subscription. Returns an empty list if there is none. Raises InvalidRequest if `messages` is too large,
    TopicNotFound or SubscriptionNotFound if it does not exist, CorruptEntry if an entry is damaged."""
    found = await self._all(op.PEEK_MESSAGES, **make_subscription_arguments(topic, name), messages=messages)
    return found[:messages]


NAMESPACE_TOPICS_AT_ONCE = 16
"""Topics of a namespace on which an operation is done at the same time."""
BROKER_ASK_S = 5.0
"""Seconds that one broker may take to report how many topics it has loaded."""


async def create_tenant(
    self: OperationCaller, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
) -> None:
    """Creates a tenant. The roles `admin_roles` may administer the tenant. If `allowed_clusters` is not empty, the
    tenant may have namespaces only in those clusters. Raises InvalidName if the name is malformed, AlreadyExists if
    there is such a tenant."""
    await self._call(op.CREATE_TENANT, **_tenant(name, admin_roles, allowed_clusters))


async def update_tenant(
    self: OperationCaller, name: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] = ()
) -> None:
    """Replaces the admin roles and the allowed clusters of a tenant; a list that is left out becomes empty. Raises
    TenantNotFound if there is no such tenant."""
    await self._call(op.UPDATE_TENANT, **_tenant(name, admin_roles, allowed_clusters))


async def delete_tenant(self: OperationCaller, name: str) -> None:
    """Deletes a tenant. Raises TenantNotFound if there is no such tenant, Busy if it has namespaces."""
    await self._call(op.DELETE_TENANT, tenant=check_tenant_name(name))


# ------------------------------------------------------------------------------------ resource groups
async def resource_group(self: OperationCaller, name: str) -> values.ResourceGroup:
    """Returns the rates of a resource group. Raises NotFound if there is no such group."""
    return await self._call(op.GET_RESOURCE_GROUP, name=check_resource_group_name(name))


async def set_resource_group(
    self: OperationCaller,
    name: str,
    *,
    publish_rate_messages: int | None = None,
    publish_rate_bytes: int | None = None,
    dispatch_rate_messages: int | None = None,
    dispatch_rate_bytes: int | None = None,
) -> None:
    """Makes a resource group, or changes one: rates per second that all its namespaces share, in sum over brokers.
    0: no limit; None: the rate stays as it is, in a new group without limit. A namespace gets into the group by its
    policy `resource_group`. Raises InvalidName if the name is malformed, InvalidRequest for a wrong rate."""
    rates = {
        "publish_rate_messages": publish_rate_messages, "publish_rate_bytes": publish_rate_bytes,
        "dispatch_rate_messages": dispatch_rate_messages, "dispatch_rate_bytes": dispatch_rate_bytes,
    }  # fmt: skip
    given = {rate: value for rate, value in rates.items() if value is not None}
    await self._call(op.SET_RESOURCE_GROUP, name=check_resource_group_name(name), **given)


async def delete_resource_group(self: OperationCaller, name: str) -> None:
    """Deletes a resource group. Raises NotFound if there is no such group, Busy if a namespace has it."""
    await self._call(op.DELETE_RESOURCE_GROUP, name=check_resource_group_name(name))


# ------------------------------------------------------------------------------------ namespaces
async def namespaces(self: OperationCaller, tenant: str) -> list[str]:
    """Returns the names of a tenant's namespaces, each as TENANT/NAMESPACE, sorted. Raises TenantNotFound if there
    is no such tenant."""
    return await self._all(op.LIST_NAMESPACES, tenant=check_tenant_name(tenant))


async def create_namespace(
    self: OperationCaller, name: str, *, bundles: int = 0, auto_topic_creation: bool = True, default_partitions: int = 0
) -> None:
    """Creates a namespace with `bundles` bundles (0: the cluster's default). `auto_topic_creation`: whether its
    topics are created when they are first used. `default_partitions`: the number of partitions of such a topic; 0:
    it is not partitioned. Raises AlreadyExists if there is such a namespace, TenantNotFound if its tenant does not
    exist, InvalidRequest if a number is out of bounds, NotAllowed if the tenant may not have it."""
    await self._call(
        op.CREATE_NAMESPACE, namespace=to_full_namespace_name(name), bundles=bundles,
        auto_topic_creation=auto_topic_creation, default_partitions=default_partitions,
    )  # fmt: skip


async def update_namespace(
    self: OperationCaller, name: str, *, bundles: int | None = None, auto_topic_creation: bool | None = None,
    default_partitions: int | None = None, is_creation_set: bool | None = None,
) -> None:  # fmt: skip
    """Changes settings of a namespace; a setting that is None stays as it is. `is_creation_set`: whether the
    namespace has its own rules for creating topics (the two settings before it); None: true as soon as one of them
    was ever set. Raises NamespaceNotFound if there is no such namespace; InvalidRequest if a number is out of
    bounds, or `bundles` is not the number with which the namespace was created."""
    old = await self._call(op.GET_NAMESPACE, namespace=to_full_namespace_name(name))
    if is_creation_set is None:
        is_creation_set = old.is_creation_set or not (auto_topic_creation is None and default_partitions is None)
    await self._call(
        op.UPDATE_NAMESPACE, namespace=old.name, bundles=old.bundles if bundles is None else bundles,
        auto_topic_creation=old.auto_topic_creation if auto_topic_creation is None else auto_topic_creation,
        default_partitions=old.default_partitions if default_partitions is None else default_partitions,
        is_creation_set=is_creation_set,
    )  # fmt: skip


async def unload_namespace(
    self: OperationCaller, name: str, bundle: str = "", *, destination: str = ""
) -> values.Unloaded:
    """Unloads all bundles of a namespace from their brokers, or only the bundle `bundle`. Returns how many topics
    and bundles were unloaded. At the next look-up other brokers own the topics; if `destination` is given, the
    broker with that name or address does. A broker of an older release ignores `destination`. Raises
    NamespaceNotFound if there is no such namespace, NotFound if no broker has that name or address, NotAllowed if
    that broker gets no bundles."""
    asked = {"namespace": to_full_namespace_name(name), "bundle": bundle, "destination": destination}
    return await self._call(op.UNLOAD_NAMESPACE, **asked)


async def clear_namespace_backlog(self: OperationCaller, name: str, subscription: str = "") -> int:
    """Acknowledges all messages of all persistent topics of a namespace for `subscription`, or for every
    subscription if none is given. Returns the number of topics and partitions that were cleared; those without the
    subscription do not count. A failure at one topic does not stop the others; the first such error is raised at
    the end. Raises NamespaceNotFound if there is no such namespace."""
    return await _each_part(self, name, lambda topic: skip_messages(self, topic, subscription), persistent_only=True)


async def unsubscribe_namespace(self: OperationCaller, name: str, subscription: str, *, force: bool = False) -> int:
    """Deletes `subscription` from every topic of the namespace that has it. Returns the number of topics and
    partitions from which it was deleted. `force`: also while consumers are connected; otherwise Busy is raised for
    them. A failure at one topic does not stop the others; the first such error is raised at the end. Raises
    NamespaceNotFound if there is no such namespace."""
    asked = {"subscription": check_subscription_name(subscription), "force": force}
    return await _each_part(self, name, lambda topic: self._call(op.DELETE_SUBSCRIPTION, topic=topic, **asked))


async def _each_part(
    self: OperationCaller,
    namespace: str,
    act: Callable[[str], Coroutine[Any, Any, None]],
    *,
    persistent_only: bool = False,
) -> int:
    """Calls `act` for all topics, also after a failure; then raises the first failure. Returns for how many it
    succeeded; a topic for which it raises NotFound is not counted."""
    found = await topics(self, namespace, partitions=True)
    if persistent_only:
        found = [topic for topic in found if TopicName.parse(topic).persistent]
    done, failed = 0, list[tuple[str, MagnetarError]]()

    async def one(topic: str) -> None:
        nonlocal done
        try:
            await act(topic)
            done += 1
        except NotFound:
            pass
        except MagnetarError as error:
            failed.append((topic, error))

    for start in range(0, len(found), NAMESPACE_TOPICS_AT_ONCE):
        await asyncio.gather(*map(one, found[start : start + NAMESPACE_TOPICS_AT_ONCE]))
    if failed:
        topic, error = failed[0]
        text = f"{done} topics are done and {len(failed)} are not, the first {topic}: {error.message}"
        raise type(error)(text, **error.fields) from error
    return done


# ------------------------------------------------------------------------------------ policies and properties
async def namespace_policies(self: OperationCaller, name: str, *, applied: bool = False) -> Policies:
    """Returns the policies that are set for the namespace (None: not set); if `applied` is true, returns every
    policy, with the values that are inherited from the broker. Raises NamespaceNotFound if there is no such
    namespace."""
    return decode_policies(await self._call(op.GET_POLICIES, namespace=to_full_namespace_name(name), applied=applied))


async def set_namespace_policies(self: OperationCaller, name: str, policies: Policies) -> None:
    """Sets policies of a namespace: each field of `policies` that is not None replaces the present value; the other
    policies stay as they are. Raises NamespaceNotFound if there is no such namespace, InvalidRequest for a wrong
    value."""
    await self._call(op.CHANGE_POLICIES, namespace=to_full_namespace_name(name), set=encode_policies(policies))


async def remove_namespace_policies(self: OperationCaller, name: str, *fields: str) -> None:
    """Removes the named fields from the policies of a namespace: the namespace then inherits these policies from
    the broker again. Raises NamespaceNotFound if there is no such namespace, InvalidRequest if there is no such
    policy."""
    await self._call(op.CHANGE_POLICIES, namespace=to_full_namespace_name(name), remove=fields)


async def tenant_policies(self: OperationCaller, name: str, *, applied: bool = False) -> Policies:
    """Returns the policies that are set for the tenant (None: not set); if `applied` is true, returns every policy,
    with the values that are inherited from the broker. Raises TenantNotFound if there is no such tenant."""
    return decode_policies(await self._call(op.GET_TENANT_POLICIES, name=check_tenant_name(name), applied=applied))


async def set_tenant_policies(self: OperationCaller, name: str, policies: Policies) -> None:
    """Sets policies of a tenant: each field of `policies` that is not None replaces the present value; the other
    policies stay as they are. Raises TenantNotFound if there is no such tenant, InvalidRequest for a wrong value
    or a policy that tenants do not have."""
    await self._call(op.CHANGE_TENANT_POLICIES, name=check_tenant_name(name), set=encode_policies(policies))


async def remove_tenant_policies(self: OperationCaller, name: str, *fields: str) -> None:
    """Removes the named fields from the policies of a tenant. Raises TenantNotFound if there is no such tenant,
    InvalidRequest if there is no such policy."""
    await self._call(op.CHANGE_TENANT_POLICIES, name=check_tenant_name(name), remove=fields)


async def topic_policies(self: OperationCaller, topic: str, *, applied: bool = False) -> Policies:
    """Returns the policies that are set for a topic (None: not set); if `applied` is true, returns every policy,
    with the values that the topic inherits from its namespace, then from the broker. Raises TopicNotFound if there
    is no such topic."""
    return decode_policies(await self._call(op.GET_POLICIES, topic=to_full_topic_name(topic), applied=applied))


async def set_topic_policies(self: OperationCaller, topic: str, policies: Policies) -> None:
    """Sets policies of a topic: each field of `policies` that is not None replaces the present value; the other
    policies stay as they are. Raises TopicNotFound if there is no such topic, InvalidRequest for a wrong value or a
    policy that only namespaces have."""
    await self._call(op.CHANGE_POLICIES, topic=to_full_topic_name(topic), set=encode_policies(policies))


async def remove_topic_policies(self: OperationCaller, topic: str, *fields: str) -> None:
    """Removes the named fields from the policies of a topic: the topic then inherits these policies from its
    namespace again. Raises TopicNotFound if there is no such topic, InvalidRequest if there is no such policy."""
    await self._call(op.CHANGE_POLICIES, topic=to_full_topic_name(topic), remove=fields)


async def namespace_properties(self: OperationCaller, name: str) -> dict[str, str]:
    """Returns the properties that are set for a namespace. A namespace inherits no properties. Raises
    NamespaceNotFound if there is no such namespace."""
    return await self._call(op.GET_PROPERTIES, namespace=to_full_namespace_name(name))


async def set_namespace_properties(self: OperationCaller, name: str, properties: Mapping[str, str]) -> None:
    """Sets properties of a namespace; its other properties stay. Raises InvalidRequest if they are too many or too
    long (proto/policies.py), NamespaceNotFound if there is no such namespace."""
    await self._call(op.CHANGE_PROPERTIES, namespace=to_full_namespace_name(name), set=properties)


async def remove_namespace_properties(self: OperationCaller, name: str, *keys: str) -> None:
    """Removes the properties `keys` of a namespace; removes all of its properties if no key is given. A key that
    the namespace lacks is ignored. Raises NamespaceNotFound if there is no such namespace."""
    await self._call(op.CHANGE_PROPERTIES, namespace=to_full_namespace_name(name), remove=keys, clear=not keys)


async def topic_properties(self: OperationCaller, topic: str) -> dict[str, str]:
    """Returns the properties of a topic; for a partition, those of its partitioned topic. Properties of the
    namespace are not included. Raises TopicNotFound if there is no such topic."""
    return await self._call(op.GET_PROPERTIES, topic=to_full_topic_name(topic))


async def set_topic_properties(self: OperationCaller, topic: str, properties: Mapping[str, str]) -> None:
    """Sets properties of a topic; its other properties stay. Raises InvalidRequest if the properties are too many
    or too long (proto/policies.py), TopicNotFound if there is no such topic."""
    await self._call(op.CHANGE_PROPERTIES, topic=to_full_topic_name(topic), set=properties)


async def remove_topic_properties(self: OperationCaller, topic: str, *keys: str) -> None:
    """Removes the properties `keys` of a topic; removes all of its properties if no key is given. A key that the
    topic lacks is ignored. Raises TopicNotFound if there is no such topic."""
    await self._call(op.CHANGE_PROPERTIES, topic=to_full_topic_name(topic), remove=keys, clear=not keys)


# ------------------------------------------------------------------------------------ the cluster
async def brokers(self: OperationCaller) -> list[values.BrokerInfo]:
    """Returns a list of the registered brokers, each with the number of topics that it has loaded and the number of
    bundles and transaction coordinators that it owns. These numbers are None if the broker did not answer within 5
    s. Raises Unavailable or TimedOut if no broker answers."""
    return await asyncio.gather(*map(partial(_broker, self), await self._all(op.LIST_BROKERS)))


async def _broker(self: OperationCaller, listed: values.BrokerInfo) -> values.BrokerInfo:
    try:
        async with asyncio.timeout(min(BROKER_ASK_S, self._timeout_s)):
            found = await self._transport.call(op.LIST_BROKERS, {}, at=listed.endpoint)
    except (MagnetarError, TimeoutError):
        found = ()
    own = next((each for each in found if each.endpoint == listed.endpoint), None)
    return own or msgspec.structs.replace(listed, topics=None, bundles=None)


async def drain_broker(self: OperationCaller, name: str) -> None:
    """Drains a broker: the broker gives its bundles to the other brokers of its group. The broker gets no new
    bundles until `undrain_broker` is called, also after a restart. Draining begins within some seconds; `brokers()`
    returns how many bundles are left.

    Raises NotFound if there is no such broker. Raises NotAllowed if this broker, or each broker that could get its
    bundles, is of a release that cannot drain."""
    await self._call(op.DRAIN_BROKER, name=name)


async def undrain_broker(self: OperationCaller, name: str) -> None:
    """Ends the draining of a broker: the broker may own bundles again. Bundles that it gave away do not return by
    themselves. Raises NotFound if there is no such broker."""
    await self._call(op.UNDRAIN_BROKER, name=name)


async def forget_broker(self: OperationCaller, name: str) -> None:
    """Removes the record of a broker that died and will not come back: `broker_summaries()` does not name the
    broker any more. Raises NotFound if no broker of that name has died; NotAllowed if it is registered; BadVersion
    if its record changes at the same moment."""
    await self._call(op.FORGET_BROKER, name=name)


async def find_orphans(self: OperationCaller, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
    """Returns the orphaned ledgers: those to which no topic and no cursor refers. If `remove` is true, these
    ledgers are fenced and deleted now, as brokers do every hour. Ledgers whose owner has no record are returned,
    too. They are deleted only if `unexplained` is true as well, and never by a broker on its own. Raises
    Unavailable or TimedOut if no broker answers."""
    return await self._call(op.FIND_ORPHANS, remove=remove, unexplained=unexplained)


def _tenant(name: str, admin_roles: Sequence[str], allowed_clusters: Sequence[str]) -> dict[str, object]:
    return {"tenant": check_tenant_name(name), "admin_roles": admin_roles, "allowed_clusters": allowed_clusters}


# --------------------------------------------------------------------------------------------------- permissions
# Methods of AdminClient: grants of roles, and the lists of subscriptions.
#
# The rules are broker/access/table_core.py's, the verbs pulsar-admin's. A grant replaces what the role had there.


async def namespace_permissions(self: OperationCaller, name: str) -> values.Permissions:
    """Returns the permissions of roles in the namespace, and the roles of its restricted subscriptions. Permissions
    for single topics are not included. Raises NamespaceNotFound if there is no such namespace."""
    return await self._call(op.GET_PERMISSIONS, namespace=to_full_namespace_name(name))


async def topic_permissions(self: OperationCaller, topic: str) -> values.Permissions:
    """Returns the permissions that were granted for this topic with all its partitions. Permissions of its
    namespace are not included. Raises TopicNotFound if there is no such topic."""
    return await self._call(op.GET_PERMISSIONS, topic=to_full_topic_name(topic))


async def grant_namespace_permission(self: OperationCaller, name: str, role: str, actions: Sequence[str]) -> None:
    """Grants the role `role` the actions `actions` ("produce", "consume", …) at a namespace; these actions replace
    the actions that the role had there. Raises InvalidRequest if an action is unknown or there is none,
    NamespaceNotFound if there is no such namespace."""
    await _change(self, namespace=to_full_namespace_name(name), grant={"role": role, "actions": actions})


async def revoke_namespace_permission(self: OperationCaller, name: str, role: str) -> None:
    """Revokes all permissions of `role` at the namespace; does nothing if it has none. Connected clients of that
    role are disconnected within a second. Raises NamespaceNotFound if there is no such namespace."""
    await _change(self, namespace=to_full_namespace_name(name), revoke=role)


async def grant_topic_permission(self: OperationCaller, topic: str, role: str, actions: Sequence[str]) -> None:
    """Grants the role `role` the actions `actions` ("produce", "consume", …) at one topic with its partitions;
    these actions replace the actions that the role had there. Raises InvalidRequest if an action is unknown or
    there is none, TopicNotFound if there is no such topic."""
    await _change(self, topic=to_full_topic_name(topic), grant={"role": role, "actions": actions})


async def revoke_topic_permission(self: OperationCaller, topic: str, role: str) -> None:
    """Revokes all permissions that the role `role` has at the topic itself; does nothing if it has none.
    Permissions at the namespace of the topic stay. Raises TopicNotFound if there is no such topic."""
    await _change(self, topic=to_full_topic_name(topic), revoke=role)


async def grant_subscription_permission(
    self: OperationCaller, name: str, subscription: str, roles: Sequence[str]
) -> None:
    """Restricts every subscription with the name `subscription` in the namespace: only the roles `roles` may use
    it, and they need the permission `consume`, too. The roles replace those of an earlier call. Raises
    InvalidRequest if there is no role, NamespaceNotFound if there is no such namespace."""
    change = {"subscription": check_subscription_name(subscription), "roles": roles}
    await _change(self, namespace=to_full_namespace_name(name), grant_subscription=change)


async def revoke_subscription_permission(self: OperationCaller, name: str, subscription: str, role: str) -> None:
    """Removes `role` from the roles that may use a restricted subscription. When no role is left, every role with
    the permission `consume` may use the subscription again. Raises NamespaceNotFound if there is no such namespace.
    """
    change = {"subscription": check_subscription_name(subscription), "roles": [role]}
    await _change(self, namespace=to_full_namespace_name(name), revoke_subscription=change)


async def set_subscription_prefix_mode(self: OperationCaller, name: str, on: bool) -> None:
    """Switches the subscription prefix mode of a namespace on or off. While it is on, the name of a subscription
    must be the role of its consumer, or begin with the role and `-`. Raises NamespaceNotFound if there is no such
    namespace."""
    await _change(self, namespace=to_full_namespace_name(name), prefix_mode=on)


async def _change(self: OperationCaller, **change: object) -> None:
    await self._call(op.CHANGE_PERMISSIONS, **change)
