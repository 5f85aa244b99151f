"""The messages of one topic on the page: shows and searches messages, shows the newest ones as they arrive, and
publishes one of them again.

    view_messages(call)         the messages with an id, at a time or of a backlog; or a search by key, property or text
    view_newest_messages(call)  the newest messages, for a view that the browser renews while it is open

The topic's owner searches (session/finding.py), backwards from the end of the topic, or from the place where the
previous search stopped. Its answer says how far it got, and the page has a link to continue.

The caller needs the permission to consume, which is checked before a message is read.
Guarding tests: tests/broker/rest/test_page_messages.py.

Also in this file, below its heading: publishing one message again (resending).
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from ....proto import operations as op
from ....proto.entry import (
    decode_properties,
    decode_text,
    encode_client_part,
    encode_entry,
    get_routing_key,
    parse_entry,
)
from ....proto.entry_pb2 import MessageMetadata
from ....proto.errors import InvalidName, InvalidRequest, MagnetarError, NotFound, Unauthorized
from ....proto.names import (
    REAL_SUBSCRIPTION,
    REAL_TOPIC,
    REDRIVEN_TO,
    TopicName,
    choose_partition_of_key,
    count_redrives,
    make_redriven_properties,
    make_redriven_to,
    parse_number,
    parse_redriven_to,
)
from ....proto.operations import Operation, Permission
from ....proto.statistics import FoundMessages
from ...session.finding import decode_messages, is_encrypted_or_chunked, is_too_large
from ...subscription.core.redelivery_backoff import copy_message_metadata
from ..call import HttpError, RestRequest
from ..subscriptions_routes import PayloadResponse

PEEKED_MESSAGES = 20
SHOWN_PAYLOAD_BYTES_MAX = 64 << 10
"""Bytes of the payloads on a page, together."""
JSON_NESTING_MAX = 50
"""Depth of a JSON document that is indented."""
PAYLOAD_FORMATS = ("", "text", "json", "hex")
OPEN_ONE_PARTITION = "open one of them"
RESEND_ACTION, REDRIVE_ACTION = "resend", "redrive"
"""What an operator does with a message: publishes it again, or sends a dead letter back."""

FOUND_MESSAGES_MAX = 50
"""Messages on one page of a search."""
TAIL_MESSAGES_MAX = 50
TAIL_READ_BYTES_MAX = 1 << 20
TAIL_PAYLOAD_BYTES_MAX = 16 << 10
"""Messages of the tail, bytes that are read for it each time, about, and bytes of the payloads that it shows."""

T = TypeVar("T")


async def ask_topic_owner(call: RestRequest, operation: Operation[T], **arguments: object) -> T:
    """Calls an operation at the owner of the topic in the path, and returns the answer. Raises the errors of
    `RestRequest.authorize` and `RestRequest.call_topic_owner`."""
    await call.authorize(operation, **{operation.rule.field: call.topic.full}, **arguments)
    return await call.call_topic_owner(operation, call.topic, **arguments)


def parse_form_time(text: str) -> int:
    """Returns the time that a user entered in a form (date and time in UTC), in milliseconds since the epoch; 0 for an
    earlier time. Raises HttpError (400) if the text is not a time."""
    try:
        return max(0, int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise HttpError("the time is like 2026-11-28T12:00, in UTC") from None


def indent_json(text: str) -> str:
    """Returns the JSON document `text`, indented over several lines. Raises ValueError if `text` is not JSON, or is
    nested deeper than JSON_NESTING_MAX."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > JSON_NESTING_MAX:
        raise ValueError(f"nested {deepest} deep")
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error


def format_payload_text(payload: bytes, way: str, most: int) -> tuple[str, str]:
    """Formats the first `most` bytes of a payload for the page. Returns the format that was used ("json", "text" or
    "hex") and the text. `way`: the wanted format; if it is "", or "json" for a payload that is not JSON, the first of
    the three formats that fits is used."""
    part, is_whole = payload[:most], len(payload) <= most
    try:
        text = getincrementaldecoder("utf-8")("replace" if way == "text" else "strict").decode(part, is_whole)
    except UnicodeDecodeError:
        return "hex", _hex_text(part)
    if way == "hex" or (way != "text" and "\0" in text):
        return "hex", _hex_text(part)
    try:
        return ("text", text) if way == "text" or not is_whole else ("json", indent_json(text)[: 2 * most])
    except ValueError:
        return "text", text


def _hex_text(payload: bytes) -> str:
    lines = list[str]()
    for at in range(0, len(payload), 16):
        part = payload[at : at + 16]
        plain = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{at:08x}  {part.hex(' '):<47}  {plain}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class MessageView:
    """A stored message as the page shows it. `index`: its index in the topic; `published_ms`: when it was published (ms
    since the epoch); `producer`: the name of its producer; `key`: its key, "" if it has none; `size`: the bytes of its
    payload; `way`: the format of the text `payload`. `cut`: whether `payload` is only the beginning of the message's
    payload. `acts`: what the caller may do with the message (RESEND_ACTION, REDRIVE_ACTION)."""

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
    acts: tuple[str, ...] = ()  # RESEND_ACTION, REDRIVE_ACTION


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """The progress of a search. `messages`, `bytes`: how much was searched; `before`: the index below which the next
    search must continue; 0 if everything was searched. `why`: the reason why the search stopped before that. `unread`:
    the number of messages that could not be searched, because they are encrypted, chunks, damaged or too large.
    `waiting`: the number of messages after the begin of an open transaction, which no consumer gets yet. `skipped`: the
    number of messages that the search did not read, because key indexes exclude them."""

    messages: int
    bytes: int
    before: int
    why: str
    unread: int
    waiting: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class MessagesView:
    """The content of the page with messages of a topic. The query selects messages by `id`, `time` or `subscription`;
    or by a search for `key`, `property`, `text` and `where`, published from `since` until `until`. `way`: the format of
    the payloads, as in `format_payload_text`. Without a selection, the content is the last message. `progress`: the
    progress of a search; None if the query is not a search."""

    topic: str
    id: str
    time: str
    subscription: str
    since: str
    until: str
    key: str
    property: str
    text: str
    where: str
    way: str
    messages: tuple[MessageView, ...]
    progress: SearchProgress | None = None


@dataclass(frozen=True, slots=True)
class NewestMessagesView:
    """The content of the page with the newest messages of a topic, the newest first. `end_index`: the index that the
    next message will get; it shows users how many messages have arrived since, also if they are not in `messages`."""

    topic: str
    end_index: int
    messages: tuple[MessageView, ...]


SEARCH_CRITERIA = ("since", "until", "key", "property", "text", "where")
FORM_FIELDS = ("id", "time", "subscription", *SEARCH_CRITERIA)


def is_search_query(call: RestRequest) -> bool:
    """Returns True if the query of the request is a search, which may read a large part of the topic."""
    return any(call.query.get(each) for each in SEARCH_CRITERIA)


async def view_messages(call: RestRequest) -> MessagesView | Response:
    """Returns the messages of the topic that the query selects. With the parameter `download`, returns a response with
    the payload of the single message that `id` names. Raises HttpError if the query is invalid; NotFound if the message
    does not exist; BackPressure if memory for answers is short; and the errors of `ask_topic_owner` and
    `decode_entry`."""
    await call.check_unpartitioned(op.GET_MESSAGE, OPEN_ONE_PARTITION)
    asked = {name: call.query.get(name, "") for name in FORM_FIELDS}
    asked |= {name: text.strip() for name, text in asked.items() if name not in ("key", "text", "where")}
    way = call.query.get("as", "")
    if way not in PAYLOAD_FORMATS:
        raise HttpError("a payload is shown as text, json or hex")
    progress: SearchProgress | None = None
    if is_search_query(call):
        if asked["id"] or asked["time"] or asked["subscription"]:
            raise HttpError("a search takes no id, no time of a message and no subscription")
        found, progress = await search_messages(call, asked)
    else:
        wanted = parse_entry_message_id(asked["id"]) if asked["id"] else None
        entries = await _find_entries(call, wanted, asked)
        found = [one for each in entries for one in await decode_entry(call, each, wanted)]
    if call.query.get("download"):
        if len(found) != 1 or progress is not None:
            raise HttpError("a download names one message by its id")
        name = found[0].id.replace(":", "-")
        headers = {"Content-Disposition": f'attachment; filename="{name}.bin"'}
        answer = PayloadResponse(call.broker.memory.answers, len(found[0].payload))
        answer.payload = memoryview(found[0].payload)
        answer.headers.update(headers)
        return answer
    return MessagesView(
        call.topic.full, **asked, way=way, messages=await make_message_views(call, found, way), progress=progress
    )


async def view_newest_messages(call: RestRequest) -> NewestMessagesView:
    """Returns the newest messages of the topic: at most TAIL_MESSAGES_MAX, and fewer if they are large. Stores nothing
    between two calls, so an open page costs the same for each call, and a closed page costs nothing. Raises HttpError
    (405) if the topic is partitioned, and the errors of `ask_topic_owner` and `decode_entry`."""
    await call.check_unpartitioned(op.GET_MESSAGE, OPEN_ONE_PARTITION)
    offsets = await ask_topic_owner(call, op.OFFSETS)
    end, count = offsets.end_index, offsets.end_index - offsets.earliest_index
    width = max(1, min(TAIL_MESSAGES_MAX, TAIL_READ_BYTES_MAX * count // max(1, offsets.bytes)))
    answer = await ask_topic_owner(call, op.FIND_MESSAGES, limit=width)
    found = await _decode_found(call, answer)
    most = TAIL_PAYLOAD_BYTES_MAX // max(1, len(found))
    return NewestMessagesView(call.topic.full, end, tuple(_message(each, "", most, ()) for each in found))


def find_dead_letter_source(message: DecodedMessage, here: TopicName) -> TopicName | None:
    """Returns the topic from which a dead letter came; None if the message is not a dead letter, or names no other
    persistent topic by its full name. `here`: the topic that contains the message."""
    told = decode_properties(message.metadata).get(REAL_TOPIC, "")
    try:
        found = TopicName.parse(told)
    except InvalidName:
        return None
    if found.full != told:
        return None  # a short name: no broker and no client writes it
    return None if found == here or not found.persistent else found


async def find_allowed_actions(call: RestRequest, messages: Sequence[DecodedMessage]) -> list[tuple[str, ...]]:
    """Returns, for each message, the actions that the caller may do with it: RESEND_ACTION (publish it again),
    REDRIVE_ACTION (send a dead letter back to the topic from which it came). Raises Unavailable, or another error of
    the metadata, if the caller's grants cannot be read."""
    may = dict[TopicName, bool]()
    for target in (call.topic, *(find_dead_letter_source(each, call.topic) for each in messages)):
        if target is not None and target not in may:
            may[target] = await _may_produce(call, target)
    found = list[tuple[str, ...]]()
    for each in messages:
        real = find_dead_letter_source(each, call.topic)
        acts = [(RESEND_ACTION, may[call.topic]), (REDRIVE_ACTION, real is not None and may[real])]
        found.append(tuple(act for act, allowed in acts if allowed))
    return found


async def _may_produce(call: RestRequest, topic: TopicName) -> bool:
    try:
        await check_produce_permission(call, topic, audited=False)
    except Unauthorized:
        return False
    return True


async def check_produce_permission(call: RestRequest, topic: TopicName, *, audited: bool = True) -> None:
    """Raises Unauthorized if the caller may not publish to the topic, Unavailable, or another error of the metadata, if
    its grants cannot be read. `audited`: whether a refusal is written to the audit log."""
    context = call.context
    await call.broker.access.check_permission(
        context.principal, Permission.PRODUCE, topic=topic, peer=context.peer, audited=audited
    )


async def make_message_views(call: RestRequest, found: list[DecodedMessage], way: str) -> tuple[MessageView, ...]:
    """Returns the messages `found` in the form in which the page shows them. Their payloads together have at most
    SHOWN_PAYLOAD_BYTES_MAX, in equal shares. `way`: the format of the payloads. Raises the errors of
    `find_allowed_actions`."""
    most = SHOWN_PAYLOAD_BYTES_MAX // max(1, len(found))
    acts = await find_allowed_actions(call, found)
    return tuple(_message(each, way, most, may) for each, may in zip(found, acts, strict=True))


def parse_entry_message_id(text: str) -> tuple[int, int, int]:
    """Returns (ledger id, entry id, batch index) of a message id LEDGER:ENTRY[:INDEX]. The batch index is -1 if it is
    missing: the id then means the whole entry. Raises HttpError if the text is not a message id."""
    parts = [parse_number(each) for each in text.split(":")]
    numbers = [each for each in parts if each is not None and 0 <= each < 1 << 63]
    if not 2 <= len(parts) <= 3 or len(numbers) != len(parts):
        raise HttpError("a message id is LEDGER:ENTRY or LEDGER:ENTRY:INDEX")
    return numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else -1


async def _find_entries(call: RestRequest, wanted: tuple[int, int, int] | None, asked: dict[str, str]) -> Any:
    """Returns the entries that are asked for, as `wire.Delivery`."""
    if asked["time"]:
        at = await ask_topic_owner(call, op.MESSAGE_ID_BY_TIME, publish_time_ms=parse_form_time(asked["time"]))
        wanted = at.ledger_id, at.entry_id, -1
    if wanted is not None:
        return await ask_topic_owner(call, op.GET_MESSAGE, ledger_id=wanted[0], entry_id=wanted[1])
    if asked["subscription"]:
        return await ask_topic_owner(call, op.PEEK_MESSAGES, name=asked["subscription"], messages=PEEKED_MESSAGES)
    try:
        return await ask_topic_owner(call, op.EXAMINE_MESSAGES, number=1, from_latest=True)
    except NotFound:
        return ()  # it has no message


@dataclass(slots=True)
class DecodedMessage:
    """A message that was decoded from an entry. `id`, `index`, `size`, `published_ms`: as in MessageView; `metadata`:
    the metadata of this message in a batch, or of its entry if the entry is not a batch; `payload`: of a message that a
    search found, only the part that is shown; `is_encoded`: True if the payload is encrypted, or a chunk."""

    id: str
    index: int
    metadata: Any
    payload: bytes  # of a message that a search found: not more of it than is shown
    size: int
    producer: str
    published_ms: int
    is_encoded: bool  # the payload is encrypted, or a chunk


async def decode_entry(call: RestRequest, found: Any, wanted: tuple[int, int, int] | None) -> list[DecodedMessage]:
    """Returns the messages of the entry `found` (a `wire.Delivery`), without those that are acknowledged. If `wanted`
    (ledger id, entry id, batch index) has a batch index, returns only the message with this index; [] if there is none.
    Raises HttpError (413) if the entry is too large for the page; CorruptEntry if it does not parse."""
    last_index, header = parse_entry(found.entry)
    if is_too_large(header):
        raise HttpError("this entry is too large for the page: read it with 'magnetar consume' or the SDK", 413)
    decoded = await decode_messages(call.broker.world, header, found.entry)
    messages, place = list[DecodedMessage](), f"{found.ledger_id}:{found.entry_id}"
    first_index, producer = last_index - header.num_messages + 1, decode_text(header.metadata.producer_name)
    for at, (about, payload) in enumerate(decoded):
        is_whole = about is header.metadata
        if (at in found.acked_batch_indexes and not is_whole) or (wanted is not None and wanted[2] not in (-1, at)):
            continue
        messages.append(DecodedMessage(
            place if is_whole else f"{place}:{at}", first_index + at, about, payload, len(payload), producer,
            header.publish_time, is_encrypted_or_chunked(header),
        ))  # fmt: skip
    return messages


def _message(found: DecodedMessage, way: str, most: int, acts: tuple[str, ...]) -> MessageView:
    way, text = format_payload_text(found.payload, way, most)
    about = found.metadata
    return MessageView(
        found.id, found.index, found.published_ms, found.producer, decode_text(about.partition_key),
        decode_properties(about), found.size, way, text, found.size > most, acts,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- search
async def search_messages(call: RestRequest, asked: dict[str, str]) -> tuple[list[DecodedMessage], SearchProgress]:
    """Searches the topic backwards for the messages that meet the criteria in `asked`. Returns at most
    FOUND_MESSAGES_MAX messages, the newest first, and the progress of the search. Raises HttpError (400) if a parameter
    is invalid, and the errors of `ask_topic_owner` and `decode_entry`."""
    times = {f"{each}_ms": parse_form_time(asked[each]) for each in ("since", "until") if asked[each]}
    before = parse_number(call.query.get("before", "") or "0")
    if before is None:
        raise HttpError("a search goes on before the index of a message")
    wanted = {each: asked[each] for each in ("key", "property", "text", "where")}
    try:
        answer = await ask_topic_owner(
            call, op.FIND_MESSAGES, **wanted, **times, before_index=before, limit=FOUND_MESSAGES_MAX
        )
    except InvalidRequest as error:
        raise HttpError(error.message) from error
    return await _decode_found(call, answer), SearchProgress(
        answer.messages, answer.bytes, answer.before_index, answer.why, answer.unread, answer.waiting, answer.skipped
    )


async def _decode_found(call: RestRequest, answer: FoundMessages) -> list[DecodedMessage]:
    """Returns the messages that a search has found, the newest first."""
    return [one for each in answer.entries for one in reversed(await decode_entry(call, each, None))]


# ------------------------------------------------------------------------------------------------------------ resending
# Publishes one message again from the page: to its own topic (`resend`), or a dead letter to the topic from which it
# came (`redrive`).
#
#     plan = await plan_resend(call, act, id, once)    the message and its target; raises if a copy cannot be correct
#     plan.preview                                     a text for the user: "This would …"
#     outcome = await resend_message(call, plan)       publishes and confirms it, and writes to the audit log
#
# The copy is what its consumers got: payload, key, ordering key, event time, properties and schema, at the end of the
# topic, in the partition where it was. It is a message of its own: a new id and time, no transaction, no delay. The
# original stays where it is, and nothing is acknowledged.
#
# | the message | what happens |
# |---|---|
# | a dead letter that goes back | loses what made it one, so it counts from the start; the copy names it |
# | … and names its subscription | only that one gets it, and readers (`REDRIVEN_TO` in proto/names.py) |
# | encrypted, alone in its entry | its ciphertext and keys are copied as they are |
# | encrypted, in a batch; a chunk | refused: the page cannot take it apart, or put it together |
# | its schema, in another topic | is registered there; refused where that topic refuses it |
# | of a transaction | only if committed: others are not read |
# | with a key, where the topic is compacted | becomes the newest of its key, which the preview says |
#
# The caller needs to consume the topic of the message, and to produce to the other. REAL_TOPIC is what some producer
# wrote: the preview names the topic, and the caller's own rights count there.
# Guarding tests: tests/broker/rest/test_page_messages.py.

@dataclass(frozen=True, slots=True)
class ResendPlan:
    """A message that would be published again, and the topic to which (`target`). `act`: RESEND_ACTION or
    REDRIVE_ACTION; `id`: the id of the original; `client_part`: the entry to publish; `schema_version`: that of the
    original; `once`: the text that identifies the plan; `preview`: a text for the user that says what publishing would
    do."""

    act: str
    id: str
    target: TopicName
    client_part: bytes
    schema_version: bytes
    once: str
    preview: str

    @property
    def producer_name(self) -> str:
        """Returns the name under which the message is published; it is different for each plan."""
        return f"page-{self.once}"


@dataclass(frozen=True, slots=True)
class ResendResult:
    """The result of publishing a message again: its topic and its new id; the id is "" if it is not known."""

    target: str
    id: str


async def plan_resend(call: RestRequest, act: str, id_: str, once: str) -> ResendPlan:
    """Prepares to publish the message `id_` again, and returns the plan; publishes nothing. `act`: RESEND_ACTION (to
    the same topic) or REDRIVE_ACTION (a dead letter back to the topic from which it came). `once`: a text that is
    different for each plan. Raises HttpError (409) if the page cannot make a correct copy of the message; NotFound if
    there is no such message; Unauthorized if the caller may not consume the one topic, or publish to the other; and the
    errors of `ask_topic_owner` and `decode_entry`."""
    if act not in (RESEND_ACTION, REDRIVE_ACTION):
        raise HttpError(f"an action is {RESEND_ACTION} or {REDRIVE_ACTION}")
    await call.check_unpartitioned(op.GET_MESSAGE, "open one of them")
    wanted = parse_entry_message_id(id_)
    (entry,) = await ask_topic_owner(call, op.GET_MESSAGE, ledger_id=wanted[0], entry_id=wanted[1])
    found = await decode_entry(call, entry, wanted)
    if len(found) != 1:
        raise HttpError("name one message of the batch, as LEDGER:ENTRY:INDEX")
    message, header = found[0], parse_entry(entry.entry)[1]
    if header.metadata.num_chunks_from_msg > 1:
        raise HttpError("it is a chunk of a large message: only its producer can publish that again, as a whole", 409)
    if message.is_encoded and header.num_messages > 1:
        raise HttpError(
            f"it is encrypted in one batch with {header.num_messages - 1} others, and only a consumer with the key can "
            "take that apart", 409,
        )  # fmt: skip
    real = call.topic if act == RESEND_ACTION else find_dead_letter_source(message, call.topic)
    if real is None:
        raise HttpError("it is no dead letter: it names no topic from where it came", 409)
    await check_produce_permission(call, real)
    metadata = copy_message_metadata(header, message.metadata, as_it_is=message.is_encoded)
    target = await _choose_partition(call, real, metadata, once)
    letter_id = f"({wanted[0]},{wanted[1]},{call.topic.partition},{wanted[2]})"
    times = _take_letter_off(metadata, letter_id, real) if act == REDRIVE_ACTION else 0
    metadata.producer_name, metadata.sequence_id = f"page-{once}", 0
    metadata.publish_time = call.broker.world.clock.wall_ms()
    metadata.ClearField("replicated_from")
    encode = encode_client_part if message.is_encoded else encode_entry
    preview = _preview(act, id_, target, metadata, times)
    return ResendPlan(act, id_, target, encode(metadata, message.payload), metadata.schema_version, once, preview)


async def _choose_partition(call: RestRequest, topic: TopicName, metadata: MessageMetadata, once: str) -> TopicName:
    """Returns the partition where a producer would publish the message. Raises TopicNotFound."""
    partitions = await call.broker.catalog.count_existing_partitions(topic)
    if not partitions:
        return topic
    by_key = MessageMetadata()
    by_key.CopyFrom(metadata)
    by_key.ClearField("ordering_key")
    key = get_routing_key(by_key)
    return topic.with_partition(choose_partition_of_key(once if key is None else key, partitions))


def _take_letter_off(metadata: MessageMetadata, letter_id: str, topic: TopicName) -> int:
    """Removes what made the message a dead letter, and names the subscription of `topic` that gets it. Returns how
    often it goes back, this time included."""
    letter = decode_properties(metadata)
    subscription = letter.get(REAL_SUBSCRIPTION, "")
    only_to = make_redriven_to(topic, subscription) if subscription else ""
    properties = make_redriven_properties(letter, letter_id, only_to=only_to)
    metadata.ClearField("properties")
    for key, value in properties.items():
        metadata.properties.add(key=key, value=value)
    return count_redrives(properties)


def _preview(act: str, id_: str, target: TopicName, metadata: MessageMetadata, times: int) -> str:
    only = parse_redriven_to(decode_properties(metadata).get(REDRIVEN_TO, ""), target)
    who = f"Only its subscription {only!r} gets it, and readers" if only else "Every subscription of that topic gets it"
    told = [
        f"This would publish the message {id_} once more, at the end of {target}: as a new message, outside any "
        "transaction and without a delay.",
        f"{who}. The original stays, and nothing is acknowledged.",
    ]
    if act == REDRIVE_ACTION:
        told.append(f"It would be the {times}. time that it goes back; what the dead letter added is taken off.")
    if metadata.HasField("partition_key"):
        value = "deletes" if metadata.null_value else "replaces"
        told.append(f"It becomes the newest of its key: where that topic is compacted, it {value} what came after it.")
    if metadata.encryption_keys:
        told.append("It is encrypted, and stays so.")
    return " ".join(told)


async def resend_message(call: RestRequest, plan: ResendPlan) -> ResendResult:
    """Publishes the message of the plan, writes this to the audit log, and returns when the message is confirmed.
    Raises IncompatibleSchema if the topic refuses its schema, and the other errors of
    `InternalProducer.publish_messages`. After TimedOut or ConnectionLost it is unknown whether the message was
    published."""
    broker, context, result, new = call.broker, call.context, "done", ""
    try:
        (place,) = await broker.internal_producer.publish_messages(
            plan.target, plan.producer_name, [plan.client_part], 0, schema_version=plan.schema_version,
            written_for=(call.topic, 0),
        )  # fmt: skip
        new = f"{place.ledger_id}:{place.entry_id}" if place is not None and place.entry_id >= 0 else ""
        return ResendResult(plan.target.full, new)
    except BaseException as error:
        result = type(error).__name__ if isinstance(error, MagnetarError) else "unknown"
        raise
    finally:
        broker.access.audit.log_operation(
            context.principal, context.peer, f"http.Page/{plan.act}", call.topic.full, result, id=plan.id,
            to=plan.target.full, new=new,
        )  # fmt: skip
