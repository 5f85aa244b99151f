"""Routes of transactions: those of Pulsar's admin REST v3, and those for the commands of `magnetar transactions`.

The routes of half messages are at the end: Pulsar has none, and their paths follow the style of its v3. The JSON forms
are in broker/rest/stats.py and proto/pulsar_json.py.

For a coordinator or a participant at another broker, this broker asks the other broker. A request about one topic is
redirected to the topic's owner (307).

Also in this file: the routes that are generated from the `routes` of a row of proto/operations.py. Names in the path
and parameters of the query become the fields of the same names in the operation's request. An operation on a topic is
called for the topic, or for each of its partitions. The answer is empty (204); or the sorted names of all partitions
together; or a value as JSON in Pulsar's camel case, for several partitions a map by their names.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields, is_dataclass
from typing import Any

from ...proto import operations as op
from ...proto.errors import InvalidRequest, MagnetarError, NotAllowed, NotFound, TransactionEnded
from ...proto.names import Position, TopicName
from ...proto.operations import (
    OPERATIONS,
    AnsweringBroker,
    HttpRoute,
    Operation,
    PathPart,
    PermissionRule,
    PermissionScope,
)
from ...proto.pulsar_json import (
    coordinator_to_json,
    half_message_to_json,
    topic_transaction_to_json,
    transaction_to_json,
)
from ...proto.states import COORDINATORS_MAX, TxnId, TxnState
from ...proto.statistics import CoordinatorTransactions, SubscriptionStats, TransactionHere, TransactionStats
from ..grpc.checked import make_rpc_handler_name
from ..subscription.core.cursor import Cursor
from . import stats as forms
from .call import NAMESPACE_PATH, SUBSCRIPTION_PATH, TOPIC_PATH, RestHandler, RestRequest, register_route

TRANSACTIONS_PATH = "/admin/v3/transactions"
TOPIC_SUFFIX = "/{tenant}/{namespace}/{topic}"
SUBSCRIPTION_SUFFIX = TOPIC_SUFFIX + "/{subscription}"
TXN_ID_SUFFIX = "/{most}/{least}"
ASKED_TOPICS_MAX = 100
"""Participants of one transaction that are asked for details; of the others only the name is returned."""
SLOW_DETAILED_MAX = 100
"""Slow transactions per coordinator whose participants are asked for details."""
LISTED_TRANSACTIONS_DEFAULT = 1_000


# ------------------------------------------------------------------ what a request names
def parse_txn_id(call: RestRequest) -> TxnId:
    """Returns the id of the transaction or half message that the path of a request names by two numbers (`most`,
    `least`). Raises InvalidRequest if they are not a valid id; HttpError if they are not numbers."""
    return TxnId.from_numbers(
        *(call.parse_number(call.names[each], f"the half {each} of an id") for each in ("most", "least"))
    )


def _topic(call: RestRequest) -> TopicName:
    call.names = {"domain": "persistent", **call.names}
    return call.topic


def _coordinator(call: RestRequest, text: str) -> int:
    number = call.parse_number(text, "a coordinator")
    if number >= COORDINATORS_MAX:
        raise NotFound(f"there is no coordinator {number}")
    return number


async def parse_coordinator_numbers(call: RestRequest) -> list[int]:
    """Returns the coordinator number that the query contains, in a list; if the query contains none, the numbers of all
    coordinators. Raises HttpError if the query contains no number (400) or one out of range (412), NotFound for a
    number of no coordinator, and the errors of the metadata."""
    if asked := call.query.get("coordinatorId", ""):
        return [_coordinator(call, asked)]
    return list(range(await call.broker.transactions.read_coordinator_count()))


async def _listed(call: RestRequest, number: int, limit: int = 1) -> CoordinatorTransactions:
    return await call.call_coordinator(op.LIST_TRANSACTIONS, coordinator=number, limit=limit)


async def _found(call: RestRequest, txn: TxnId) -> TransactionStats:
    """Returns the statistics of a transaction. Raises NotFound if no such transaction has begun."""
    found = await call.call_coordinator(op.LIST_TRANSACTIONS, txn=txn, limit=1)
    if not found.items:
        raise NotFound(f"no transaction {txn} has begun")
    return found.items[0]


async def _at(call: RestRequest, found: TransactionStats) -> dict[str, TransactionHere | MagnetarError]:
    """Asks up to ASKED_TOPICS_MAX topics of a transaction; returns for each topic what it reports of the transaction,
    or its error."""

    async def ask(topic: str) -> TransactionHere | MagnetarError:
        try:
            return await call.call_topic_owner(op.TOPIC_TRANSACTION, TopicName.parse(topic), txn=found.txn)
        except MagnetarError as error:
            return error

    topics = found.topics[:ASKED_TOPICS_MAX]
    return dict(zip(topics, await asyncio.gather(*map(ask, topics)), strict=True))


async def _metadata(call: RestRequest, found: TransactionStats, *, asked: bool = True) -> dict[str, Any]:
    at: dict[str, TransactionHere | None] = dict.fromkeys(found.topics)
    if asked:
        at |= {
            topic: None if isinstance(here, MagnetarError) else here for topic, here in (await _at(call, found)).items()
        }
    return forms.make_transaction_metadata_json(found, at, call.broker.world.clock.wall_ms())


# ------------------------------------------------------------------ coordinators
@register_route("GET", TRANSACTIONS_PATH + "/coordinators",
    "The coordinators, and where the broker of each is, or the one that is asked.",
       answer="[TransactionCoordinatorInfo]")  # fmt: skip
async def coordinators(call: RestRequest) -> object:
    await call.authorize(op.LIST_TRANSACTIONS)
    urls = {
        each.name: next(iter(each.pulsar.get("", ())), f"magnetar://{each.endpoint}")
        for each in await call.broker.list_brokers()
    }
    here = urls.get(call.broker.name, "")  # it takes one that no broker has; Pulsar's tools need a URL
    owners = await call.broker.transactions.read_coordinator_owners()
    return [{"id": number, "brokerServiceUrl": urls.get(owner, here)} for number, owner in enumerate(owners)]


@register_route("GET", TRANSACTIONS_PATH + "/coordinatorStats",
    "Statistics of each coordinator, or of `coordinatorId`.",
       answer="{id: TransactionCoordinatorStats} | TransactionCoordinatorStats")  # fmt: skip
async def coordinator_stats(call: RestRequest) -> object:
    found = {
        number: forms.make_coordinator_stats_json(await _listed(call, number))
        for number in await parse_coordinator_numbers(call)
    }
    return next(iter(found.values())) if call.query.get("coordinatorId") else found


@register_route("GET", TRANSACTIONS_PATH + "/coordinatorInternalStats/{coordinator}", "The ledger of a coordinator.",
       answer="TransactionCoordinatorInternalStats")  # fmt: skip
async def coordinator_internals(call: RestRequest) -> object:
    number = _coordinator(call, call.names["coordinator"])
    return forms.make_coordinator_internals_json(number, await _listed(call, number))


@register_route(
    "POST",
    TRANSACTIONS_PATH + "/transactionCoordinator/replicas",
    "Takes the number that there is; it is fixed.",
    body="int",
)
async def coordinator_replicas(call: RestRequest) -> None:
    await call.authorize(op.ABORT_TRANSACTION)
    wanted, count = call.parse_body(int), await call.broker.transactions.read_coordinator_count()
    if wanted != count:
        raise NotAllowed(f"there are {count} coordinators: `transaction_coordinators`, fixed by the first transaction")


# ------------------------------------------------------------------ transactions
@register_route("GET", TRANSACTIONS_PATH + "/transactionMetadata" + TXN_ID_SUFFIX,
    "A transaction, and what each of its topics has of it.",
       answer="TransactionMetadata")  # fmt: skip
async def transaction_metadata(call: RestRequest) -> object:
    return await _metadata(call, await _found(call, parse_txn_id(call)))


@register_route("GET", TRANSACTIONS_PATH + "/slowTransactions/{timeout}",
    "Those that are open for so many ms; `coordinatorId`: of this one.",
       answer="{id: TransactionMetadata}")  # fmt: skip
async def slow_transactions(call: RestRequest) -> object:
    least_ms, slow = call.parse_number(call.names["timeout"], "a time in ms"), {}
    for number in await parse_coordinator_numbers(call):
        items = (await _listed(call, number, LISTED_TRANSACTIONS_DEFAULT)).items
        found = [each for each in items if each.age_ms >= least_ms and each.state in (TxnState.OPEN, TxnState.PREPARED)]
        for position, each in enumerate(found):
            slow[str(each.txn)] = await _metadata(call, each, asked=position < SLOW_DETAILED_MAX)
    return slow


@register_route(
    "POST",
    TRANSACTIONS_PATH + "/abortTransaction" + TXN_ID_SUFFIX,
    "Aborts one that is open or prepared. 409: it is committed.",
)
async def abort_transaction(call: RestRequest) -> None:
    txn = parse_txn_id(call)
    if await call.call_coordinator(op.ABORT_TRANSACTION, **txn._asdict()) is TxnState.COMMITTED:
        raise TransactionEnded(f"transaction {txn} is committed")


# ------------------------------------------------------------------ of one topic
async def _here(call: RestRequest) -> TransactionHere:
    return await call.call_local(op.TOPIC_TRANSACTION, topic=_topic(call).full, txn=parse_txn_id(call))


async def _outcome(call: RestRequest) -> TransactionStats | None:
    """Returns the statistics of a transaction; None if its coordinator does not answer, or refuses this caller."""
    try:
        return await _found(call, parse_txn_id(call))
    except MagnetarError:
        return None


@register_route("GET", TRANSACTIONS_PATH + "/transactionInBufferStats" + TOPIC_SUFFIX + TXN_ID_SUFFIX,
    "The first message of a transaction in a topic.",
       answer="TransactionInBufferStats")  # fmt: skip
async def transaction_in_buffer(call: RestRequest) -> object:
    return forms.make_buffer_stats_json(await _here(call), await _outcome(call))


@register_route("GET", TRANSACTIONS_PATH + "/transactionInPendingAckStats" + SUBSCRIPTION_SUFFIX + TXN_ID_SUFFIX,
       "What a transaction has acknowledged in a subscription.", answer="TransactionInPendingAckStats")  # fmt: skip
async def transaction_in_pending_acks(call: RestRequest) -> object:
    found = await _here(call)
    await _subscription(call)
    name = call.names["subscription"]
    return forms.make_pending_ack_json(next((each for each in found.subscriptions if each.name == name), None))


@register_route("GET", TRANSACTIONS_PATH + "/transactionBufferStats" + TOPIC_SUFFIX,
    "The last stable position, what is open and aborted.",
       answer="TransactionBufferStats")  # fmt: skip
async def buffer_stats(call: RestRequest) -> object:
    name = _topic(call).full
    stats, log = (
        await call.call_local(op.TOPIC_STATS, name=name),
        await call.call_local(op.TOPIC_INTERNAL_STATS, name=name),
    )
    return forms.make_transaction_buffer_stats_json(stats, log)


async def _subscription(call: RestRequest) -> SubscriptionStats:
    """Returns the statistics of a subscription. Raises NotFound."""
    stats = await call.call_local(op.TOPIC_STATS, name=_topic(call).full)
    wanted = call.names["subscription"]
    found = next((each for each in stats.subscriptions if each.name == wanted), None)
    if found is None:
        raise NotFound(f"topic {call.topic} has no subscription {wanted[:100]!r}")
    return found


@register_route("GET", TRANSACTIONS_PATH + "/pendingAckStats" + SUBSCRIPTION_SUFFIX,
    "What open transactions have acknowledged there.",
       answer="TransactionPendingAckStats")  # fmt: skip
async def pending_ack_stats(call: RestRequest) -> object:
    return forms.make_pending_ack_stats_json(await _subscription(call))


@register_route("GET", TRANSACTIONS_PATH + "/positionStatsInPendingAck" + SUBSCRIPTION_SUFFIX + "/{ledger}/{entry}",
       "Whether an entry (`batchIndex`: a message of it) is acknowledged, and in a transaction.",
       answer="{state}")  # fmt: skip
async def position_in_pending_acks(call: RestRequest) -> object:
    await _subscription(call)
    ledger, entry = (call.parse_number(call.names[each], f"the id of the {each}") for each in ("ledger", "entry"))
    index = call.query.get("batchIndex", "")
    bit = call.parse_number(index, "batchIndex", least=-1) if index else -1
    if bit >= call.broker.config.max_message_bytes:
        raise InvalidRequest(f"no batch has {bit} messages")
    topic = await call.broker.load_topic(call.topic)
    subscription = topic.subscriptions.get(call.names["subscription"])
    if subscription is None or ledger >= 1 << 62 or Position(ledger, entry) > topic.log.shape.last_confirmed:
        return {"state": "InvalidPosition"}
    return {"state": _state_of(subscription.cursor, Position(ledger, entry), bit)}


def _state_of(cursor: Cursor, position: Position, bit: int) -> str:
    if cursor.is_acked(position):
        return "MarkDelete"
    pending = cursor.pending
    bits, whole = (
        pending.message_bits_at(position), pending.is_entry_pending(position)
    ) if pending is not None else (0, False)
    if bit >= 0 and cursor.acked_or_pending_bits(position) & ~bits & (1 << bit):
        return "MarkDelete"
    return "PendingAck" if whole or (bits >> bit & 1 if bit >= 0 else bits) else "NotInPendingAck"


@register_route("GET", TRANSACTIONS_PATH + "/pendingAckInternalStats" + SUBSCRIPTION_SUFFIX,
    "Refused: pending ones are a part of the cursor.",
       answer="nothing: 405")  # fmt: skip
async def pending_ack_internals(call: RestRequest) -> object:
    await _subscription(call)
    raise NotAllowed("pending acknowledgements have no log of their own: they are stored with the cursor")


@register_route("GET", TRANSACTIONS_PATH + "/transactionBufferInternalStats" + TOPIC_SUFFIX,
    "Refused: outcomes have no topic of snapshots.",
       answer="nothing: 405")  # fmt: skip
async def buffer_internals(call: RestRequest) -> object:
    await call.call_local(op.TOPIC_STATS, name=_topic(call).full)
    raise NotAllowed("outcomes of transactions have no topic of snapshots: they are stored in a ledger beside the log")


# ------------------------------------------------------------------ as `magnetar transactions`
@register_route("GET", TRANSACTIONS_PATH,
    "Those that are not done, the oldest first; `coordinatorId`, `limit` (of each coordinator).",
       answer="[{txn, state, owner, address, …, topics}]")  # fmt: skip
async def list_transactions(call: RestRequest) -> object:
    limit = call.parse_number(call.query.get("limit", str(LISTED_TRANSACTIONS_DEFAULT)), "limit", least=1)
    asked = await parse_coordinator_numbers(call)
    found = [
        each
        for number in asked
        for each in (await _listed(call, number, min(limit, LISTED_TRANSACTIONS_DEFAULT))).items
    ]
    return [transaction_to_json(each) for each in sorted(found, key=lambda each: -each.age_ms)]


@register_route(
    "GET",
    TRANSACTIONS_PATH + "/status",
    "The coordinators: epochs and counts.",
    answer="[{coordinator, epoch, open, …}]",
)
async def status(call: RestRequest) -> object:
    return [
        coordinator_to_json(number, await _listed(call, number)) for number in await parse_coordinator_numbers(call)
    ]


@register_route("GET", TRANSACTIONS_PATH + "/id" + TXN_ID_SUFFIX,
    "Who began it, and for each topic what it has there and what waits for its end.",
       answer="{txn, state, owner, address, …, at}")  # fmt: skip
async def show(call: RestRequest) -> object:
    found = await _found(call, parse_txn_id(call))
    at = [
        {"topic": topic, "error": str(here)} if isinstance(here, MagnetarError)
        else {"topic": topic, **topic_transaction_to_json(here)}
        for topic, here in (await _at(call, found)).items()
    ]  # fmt: skip
    return {**transaction_to_json(found), "at": at}


@register_route(
    "POST",
    TRANSACTIONS_PATH + "/id" + TXN_ID_SUFFIX + "/abort",
    "As abortTransaction, with the state.",
    answer="{txn, state}",
)
async def abort(call: RestRequest) -> object:
    txn = parse_txn_id(call)
    state = await call.call_coordinator(op.ABORT_TRANSACTION, **txn._asdict())
    return {"txn": str(txn), "state": state.name}


@register_route(
    "POST",
    TRANSACTIONS_PATH + "/id" + TXN_ID_SUFFIX + "/detach",
    "Stops waiting for a topic that cannot store the outcome.",
    body="topic",
)
async def detach(call: RestRequest) -> None:
    topic = TopicName.parse(call.parse_body(str)).full
    await call.call_coordinator(op.DETACH_TRANSACTION, txn=parse_txn_id(call), topic=topic)


# ------------------------------------------------------------------ half messages, as `magnetar transactions halves`
HALVES_PATH = TRANSACTIONS_PATH + "/halves"


@register_route("GET", HALVES_PATH,
    "Half messages that are not decided, the oldest first; `coordinatorId`, `group`, `parked=true`, "
       "`limit` (of each coordinator).", answer="[{half, state, owner, group, …, reason}]")  # fmt: skip
async def list_halves(call: RestRequest) -> object:
    limit = min(
        call.parse_number(call.query.get("limit", str(LISTED_TRANSACTIONS_DEFAULT)), "limit", least=1),
        LISTED_TRANSACTIONS_DEFAULT,
    )
    group, parked, rows = call.query.get("group", ""), call.parse_flag("parked"), list[dict[str, Any]]()
    for number in await parse_coordinator_numbers(call):
        found = await call.call_coordinator(op.LIST_HALVES, coordinator=number, group=group, limit=limit)
        rows += map(half_message_to_json, found.items)
    return sorted((each for each in rows if each["state"] == "PARKED" or not parked), key=lambda each: -each["ageMs"])


@register_route("GET", HALVES_PATH + TXN_ID_SUFFIX, "A half message. 404: it is decided, or never was.",
       answer="{half, state, owner, group, …, reason}")  # fmt: skip
async def show_half_message(call: RestRequest) -> object:
    half = parse_txn_id(call)
    found = await call.call_coordinator(op.LIST_HALVES, half=half, limit=1)
    if not found.items:
        raise NotFound(f"no half {half} is open")
    return half_message_to_json(found.items[0])


show_half_message.__name__ = "show"  # in the document


PATH_PREFIX_BY_SCOPE = {
    PermissionScope.TOPIC: "{T}",
    PermissionScope.NAMESPACE: "{N}",
    PermissionScope.TENANT: "/admin/v2/tenants/{tenant}",
}
PATH_BY_PLACEHOLDER = {"{N}": NAMESPACE_PATH, "{T}": TOPIC_PATH, "{S}": SUBSCRIPTION_PATH}


def _handler(row: Operation[Any], http: HttpRoute) -> RestHandler:
    place = http.path[:3] if http.path[:3] in PATH_BY_PLACEHOLDER else PATH_PREFIX_BY_SCOPE.get(row.rule.on, "")

    async def handle(call: RestRequest) -> object:
        arguments = {each.name: _taken(call, each.name, each.kind) for each in row.takes} | dict(http.fixed)
        arguments |= {each.field: _part(call, each) for each in http.parts}
        if http.body[0]:
            arguments[http.body[0]] = call.parse_body(dict[str, str])
        if row.rule.subscription:
            arguments.setdefault(row.rule.subscription, call.names.get("subscription", ""))
        if row.asked_of is AnsweringBroker.COORDINATOR:
            return await call.call_coordinator(row, **arguments, half=parse_txn_id(call))
        if row.asked_of is not AnsweringBroker.OWNER:
            found = await call.call_local(row, **_place(call, row.rule, place), **arguments)
            return _shown(found) if http.answer else None
        answers = await call.call_each_partition(row, **arguments)
        if len(answers) == 1 or answers[0] is None:
            return _shown(answers[0]) if http.answer else None
        if all(map(_is_texts, answers)):
            return sorted({each for names in answers for each in names})
        parts = await call.list_partitions()
        return {part.full: _shown(each) for part, each in zip(parts, answers, strict=True)} if http.answer else None

    handle.__name__ = http.name or make_rpc_handler_name(row.name)
    return handle


def _part(call: RestRequest, part: PathPart) -> object:
    text = call.names[part.name]
    return call.parse_number(text, part.number, least=part.least) if part.number else text


def _taken(call: RestRequest, name: str, kind: type) -> object:
    """Returns a parameter of the query as a value of type `kind`. Raises HttpError if it cannot be converted."""
    if kind is bool:
        return call.parse_flag(name)
    text = call.query.get(name, "")
    return call.parse_number(text, f"the parameter {name}") if kind is int and text else kind(text or kind())


def _place(call: RestRequest, rule: PermissionRule, place: str) -> dict[str, str]:
    """Returns the field of the operation's request that names the tenant, namespace or topic, with the name from the
    path."""
    if rule.on is PermissionScope.TENANT:
        return {rule.field: call.names["tenant"]}
    if place == "{N}":
        return {rule.field or "namespace": str(call.namespace)}
    return (
        {rule.field or "topic": (call.topic.base if rule.on is PermissionScope.PLACE else call.topic).full}
        if place
        else {}
    )


def _shown(value: Any) -> object:
    if isinstance(value, Position):
        return str(value)
    if isinstance(value, list | tuple):
        return sorted(value) if _is_texts(value) else [*map(_shown, value)]
    if not is_dataclass(value):
        return value
    parts = ((_camel(each.name), getattr(value, each.name)) for each in fields(value))
    return {name: part if _is_texts(part) else _shown(part) for name, part in parts}


def _is_texts(value: object) -> bool:
    """Returns True for a list of texts, which has its order from the operation."""
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _register(row: Operation[Any], http: HttpRoute) -> None:
    path = http.path if http.path.startswith(("/admin/", "{")) else PATH_PREFIX_BY_SCOPE[row.rule.on] + http.path
    path = PATH_BY_PLACEHOLDER.get(path[:3], path[:3]) + path[3:]
    register_route(http.method, path, http.summary, body=http.body[1], answer=http.answer, busy=http.busy)(
        _handler(row, http)
    )


for _row in OPERATIONS.values():
    for _http in _row.routes:
        _register(_row, _http)
