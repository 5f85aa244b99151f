"""The views of one topic: itself, its ledgers, its messages, a subscription.

A view has what its caller may see: who may look the topic up sees its statistics and ledgers; the cursor and the
buttons of a subscription, and payloads, need the permission to consume, as over REST.
Guarding tests: tests/broker/rest/test_page_views.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response

from ....proto import operations as op
from ....proto.entry import decode_as_stored, parse_entry, properties_of, text_of
from ....proto.errors import NotFound
from ....proto.names import parse_number
from ....proto.operations import Operation
from ....proto.statistics import CursorShape, KeptLedger, LedgerCopies, SubscriptionStats, TopicStats, WhyStuck
from ...log.unfolding import run_off_loop
from ..call import BadRequest, RestRequest
from .formats import parse_moment, payload_text

WHY_MAX = 50
"""Subscriptions of a topic that are explained: each is a request to its owner."""
BUCKETS = 200
"""Of the strip of a subscription: a few pixels for each."""
LEDGERS = 100
PEEKED = 20
PAYLOADS_BYTES = 64 << 10
"""Bytes of the payloads on a page, together."""
UNFOLDED_MAX = 8 << 20
MESSAGES_MAX = 1000
"""Uncompressed bytes and messages of an entry that the page decodes."""
WAYS = ("", "text", "json", "hex")
ONE = "open one of them"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExplainedSubscription:
    """A subscription, and why it does not get on. None: it was not asked for, or the caller may not."""

    stats: SubscriptionStats
    why: WhyStuck | None


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic without partitions or a partition: `stats` and what follows. A partitioned topic: `partitions`."""

    name: str
    partitions: tuple[str, ...] = ()
    stats: TopicStats | None = None
    subscriptions: tuple[ExplainedSubscription, ...] = ()
    may_peek: bool = False


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """One subscription of a topic. `may_operate`: the caller may change its backlog, and see its cursor."""

    topic: str
    explained: ExplainedSubscription
    cursor: CursorShape | None
    may_operate: bool


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A ledger, its copies, and the reason why it is kept. None instead of the reason: the ledger was trimmed in the
    meantime."""

    copies: LedgerCopies
    kept: KeptLedger | None

    @property
    def messages(self) -> int:
        return self.kept.messages if self.kept is not None else 0

    @property
    def sentence(self) -> str:
        return self.kept.sentence if self.kept is not None else "It was deleted just now."


@dataclass(frozen=True, slots=True)
class LedgersView:
    """A page of the ledgers of a topic, the oldest first. `next`: the next page is `after` it; 0: there is none."""

    topic: str
    ledgers: tuple[LedgerRow, ...]
    next: int
    may_peek: bool

    @property
    def sizes(self) -> list[int]:
        return [each.copies.bytes for each in self.ledgers]

    @property
    def shades(self) -> list[float]:
        """Returns of each ledger the share of its bookies that have their copies."""
        return [1 - len(each.copies.missing) / max(1, len(each.copies.bookies)) for each in self.ledgers]


@dataclass(frozen=True, slots=True)
class Message:
    """A stored message for the page. `way`: the format in which `payload` is shown. `cut`: whether only a part of the
    payload is shown."""

    id: str  # LEDGER:ENTRY, of a batch with :INDEX
    index: int
    published_ms: int
    producer: str
    key: str
    properties: dict[str, str]
    size: int
    way: str
    payload: str
    cut: bool


@dataclass(frozen=True, slots=True)
class MessagesView:
    """The messages that were asked for, by `id`, `time` or `subscription`; else the last one."""

    topic: str
    id: str
    time: str
    subscription: str
    way: str
    messages: tuple[Message, ...]


async def _ask(call: RestRequest, operation: Operation[T], **arguments: object) -> T:
    """Calls an operation at the owner of the topic, as the caller."""
    await call.authorize(operation, **{operation.rule.field: call.topic.full}, **arguments)
    return await call.call_owner(operation, call.topic, **arguments)


async def topic(call: RestRequest) -> TopicView:
    name = call.topic.full
    await call.authorize(op.TOPIC_STATS, name=name)
    if partitions := await call.list_partitions():
        return TopicView(name, partitions=tuple(each.full for each in partitions))
    stats = await _ask(call, op.TOPIC_STATS)
    explained = [
        ExplainedSubscription(each, await _why(call, each.name) if at < WHY_MAX else None)
        for at, each in enumerate(stats.subscriptions)
    ]
    return TopicView(
        name, stats=stats, subscriptions=tuple(explained), may_peek=await call.may_call(op.GET_MESSAGE, topic=name)
    )


async def _why(call: RestRequest, subscription: str) -> WhyStuck | None:
    if not await call.may_call(op.WHY_STUCK, topic=call.topic.full, name=subscription):
        return None
    return await call.call_owner(op.WHY_STUCK, call.topic, name=subscription)


async def subscription(call: RestRequest) -> SubscriptionView:
    name, full = call.names["subscription"], call.topic.full
    stats = await _ask(call, op.TOPIC_STATS)
    found = next((each for each in stats.subscriptions if each.name == name), None)
    if found is None:
        raise BadRequest("the topic has no such subscription", 404)
    may_operate = await call.may_call(op.SKIP_MESSAGES, topic=full, name=name)
    cursor: CursorShape | None = None
    if may_operate:
        cursor = await _ask(call, op.DESCRIBE_CURSOR, name=name, buckets=BUCKETS)
    return SubscriptionView(full, ExplainedSubscription(found, await _why(call, name)), cursor, may_operate)


async def ledgers(call: RestRequest) -> LedgersView:
    await call.check_unpartitioned(op.DESCRIBE_LEDGERS, ONE)
    after = parse_number(call.query.get("after", "0")) or 0
    found = await _ask(call, op.DESCRIBE_LEDGERS, after=after, limit=LEDGERS)
    kept = {each.ledger_id: each for each in (await _ask(call, op.WHY_KEPT)).ledgers}
    rows = tuple(LedgerRow(each, kept.get(each.ledger_id)) for each in found)
    after = rows[-1].copies.ledger_id if len(rows) == LEDGERS else 0
    return LedgersView(call.topic.full, rows, after, await call.may_call(op.GET_MESSAGE, topic=call.topic.full))


# --------------------------------------------------------------------------------------------------- messages
async def messages(call: RestRequest) -> MessagesView | Response:
    """Returns the messages that the query names; with `download`, the payload of the one that `id` names. Raises
    BadRequest, NotFound."""
    await call.check_unpartitioned(op.GET_MESSAGE, ONE)
    asked = {name: call.query.get(name, "").strip() for name in ("id", "time", "subscription")}
    way = call.query.get("as", "")
    if way not in WAYS:
        raise BadRequest("a payload is shown as text, json or hex")
    wanted = _parse_id(asked["id"]) if asked["id"] else None
    found = [one for each in await _find_entries(call, wanted, asked) for one in await _decode(call, each, wanted)]
    if call.query.get("download"):
        if len(found) != 1:
            raise BadRequest("a download names one message by its id")
        name = found[0][0].replace(":", "-")
        headers = {"Content-Disposition": f'attachment; filename="{name}.bin"'}
        return Response(found[0][3], media_type="application/octet-stream", headers=headers)
    most = PAYLOADS_BYTES // max(1, len(found))
    return MessagesView(call.topic.full, **asked, way=way, messages=tuple(_message(*each, way, most) for each in found))


def _parse_id(text: str) -> tuple[int, int, int]:
    """Returns ledger, entry and batch index of a message id; -1: the whole entry. Raises BadRequest."""
    parts = [parse_number(each) for each in text.split(":")]
    numbers = [each for each in parts if each is not None and 0 <= each < 1 << 63]
    if not 2 <= len(parts) <= 3 or len(numbers) != len(parts):
        raise BadRequest("a message id is LEDGER:ENTRY or LEDGER:ENTRY:INDEX")
    return numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else -1


async def _find_entries(call: RestRequest, wanted: tuple[int, int, int] | None, asked: dict[str, str]) -> Any:
    """Returns the entries that are asked for, as `wire.Delivery`."""
    if asked["time"]:
        at = await _ask(call, op.MESSAGE_ID_BY_TIME, publish_time_ms=parse_moment(asked["time"]))
        wanted = at.ledger_id, at.entry_id, -1
    if wanted is not None:
        return await _ask(call, op.GET_MESSAGE, ledger_id=wanted[0], entry_id=wanted[1])
    if asked["subscription"]:
        return await _ask(call, op.PEEK_MESSAGES, name=asked["subscription"], messages=PEEKED)
    try:
        return await _ask(call, op.EXAMINE_MESSAGES, number=1, from_latest=True)
    except NotFound:
        return ()  # it has no message


Found = tuple[str, int, Any, bytes, str, int]
"""Id, index, metadata, payload, producer and time of a message."""


async def _decode(call: RestRequest, found: Any, wanted: tuple[int, int, int] | None) -> list[Found]:
    """Returns the messages of an entry, but those that are acknowledged; the one that is wanted if its index is. Raises
    BadRequest if the entry is too large for the page."""
    last_index, header = parse_entry(found.entry)
    if header.uncompressed_size > UNFOLDED_MAX or header.num_messages > MESSAGES_MAX:
        raise BadRequest("this entry is too large for the page: read it with 'magnetar consume' or the SDK", 413)
    decoded = await run_off_loop(found.entry, call.broker.world, decode_as_stored, header, found.entry)
    messages, place = list[Found](), f"{found.ledger_id}:{found.entry_id}"
    first_index = last_index - header.num_messages + 1
    for at, (about, payload) in enumerate(decoded):
        is_whole = about is header.metadata
        if at in found.acked_batch_indexes or (wanted is not None and wanted[2] not in (-1, at)):
            continue
        messages.append((
            place if is_whole else f"{place}:{at}", first_index + at, about, payload,
            text_of(header.metadata.producer_name), header.publish_time,
        ))  # fmt: skip
    return messages


def _message(
    id_: str, index: int, about: Any, payload: bytes, producer: str, published_ms: int, way: str, most: int
) -> Message:
    shown, text = payload_text(payload, way, most)
    return Message(
        id_, index, published_ms, producer, text_of(about.partition_key), properties_of(about), len(payload), shown,
        text, len(payload) > most,
    )  # fmt: skip
