"""Publishes one message again from the page: to its own topic (`resend`), or a dead letter to the topic from which it
came (`redrive`).

    plan = await plan_resend(call, act, id, once)    the message and its target; raises if a copy cannot be correct
    plan.preview                                     a text for the user: "This would …"
    outcome = await publish_again(call, plan)        publishes and confirms it, and writes to the audit log

The copy is what its consumers got: payload, key, ordering key, event time, properties and schema, at the end of the
topic, in the partition where it was. It is a message of its own: a new id and time, no transaction, no delay. The
original stays where it is, and nothing is acknowledged.

| the message | what happens |
|---|---|
| a dead letter that goes back | loses what made it one, so it counts from the start; the copy names it |
| … and names its subscription | only that one gets it, and readers (`REDRIVEN_TO` in proto/names.py) |
| encrypted, alone in its entry | its ciphertext and keys are copied as they are |
| encrypted, in a batch; a chunk | refused: the page cannot take it apart, or put it together |
| its schema, in another topic | is registered there; refused where that topic refuses it |
| of a transaction | only if committed: others are not read |
| with a key, where the topic is compacted | becomes the newest of its key, which the preview says |

The caller needs to consume the topic of the message, and to produce to the other. REAL_TOPIC is what some producer
wrote: the preview names the topic, and the caller's own rights count there.
Guarding tests: tests/broker/rest/test_page_messages.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....proto import operations as op
from ....proto.entry import (
    decode_properties,
    encode_client_part,
    encode_entry,
    get_routing_key,
    parse_entry,
)
from ....proto.entry_pb2 import MessageMetadata
from ....proto.errors import MagnetarError
from ....proto.names import (
    REAL_SUBSCRIPTION,
    REDRIVEN_TO,
    TopicName,
    choose_partition_of_key,
    count_redrives,
    make_redriven_properties,
    make_redriven_to,
    parse_redriven_to,
)
from ...subscription.core.redelivery_backoff import copy_message_metadata
from ..call import HttpError, RestRequest
from .messages import (
    REDRIVE,
    RESEND,
    ask_owner,
    check_produce_permission,
    decode_entry,
    find_real_topic,
    parse_entry_message_id,
)


@dataclass(frozen=True, slots=True)
class ResendPlan:
    """A message that would be published again, and the topic to which. `preview`: a text for the user that says what
    this would do."""

    act: str
    id: str
    target: TopicName
    client_part: bytes
    schema_version: bytes
    once: str
    preview: str

    @property
    def producer_name(self) -> str:
        return f"page-{self.once}"


@dataclass(frozen=True, slots=True)
class ResendResult:
    """The result of publishing a message again: its topic and its new id; the id is "" if it is not known."""

    target: str
    id: str


async def plan_resend(call: RestRequest, act: str, id_: str, once: str) -> ResendPlan:
    """Prepares to publish the message `id_` again, and returns the plan; publishes nothing. `act`: RESEND (to the same
    topic) or REDRIVE (a dead letter back to the topic from which it came). `once`: a text that is different for each
    plan. Raises HttpError (409) if the page cannot make a correct copy of the message; NotFound, Unauthorized."""
    if act not in (RESEND, REDRIVE):
        raise HttpError(f"an action is {RESEND} or {REDRIVE}")
    await call.check_unpartitioned(op.GET_MESSAGE, "open one of them")
    wanted = parse_entry_message_id(id_)
    (entry,) = await ask_owner(call, op.GET_MESSAGE, ledger_id=wanted[0], entry_id=wanted[1])
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
    real = call.topic if act == RESEND else find_real_topic(message, call.topic)
    if real is None:
        raise HttpError("it is no dead letter: it names no topic from where it came", 409)
    await check_produce_permission(call, real)
    metadata = copy_message_metadata(header, message.metadata, as_it_is=message.is_encoded)
    target = await _choose_partition(call, real, metadata, once)
    letter_id = f"({wanted[0]},{wanted[1]},{call.topic.partition},{wanted[2]})"
    times = _take_letter_off(metadata, letter_id, real) if act == REDRIVE else 0
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
    if act == REDRIVE:
        told.append(f"It would be the {times}. time that it goes back; what the dead letter added is taken off.")
    if metadata.HasField("partition_key"):
        value = "deletes" if metadata.null_value else "replaces"
        told.append(f"It becomes the newest of its key: where that topic is compacted, it {value} what came after it.")
    if metadata.encryption_keys:
        told.append("It is encrypted, and stays so.")
    return " ".join(told)


async def publish_again(call: RestRequest, plan: ResendPlan) -> ResendResult:
    """Publishes the message of the plan, writes this to the audit log, and returns when the message is confirmed.
    Raises IncompatibleSchema and the errors of a producer. After TimedOut or ConnectionLost it is unknown whether the
    message was published."""
    broker, context, result, new = call.broker, call.context, "done", ""
    try:
        (place,) = await broker.internal_producer.publish(
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
