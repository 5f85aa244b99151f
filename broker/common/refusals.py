"""The reasons why a broker refuses a publish, a subscribe or an acknowledgement: one enum for each operation.

Each member has its sentence (`value`), the class of the error that the client gets (`kind`), and what is stored
nevertheless (`kept`). Code refuses with `raise SubscribeRefusal.RATE.error(text, **facts)`; without a text, the
sentence is the text. docs/design/refusals.md is generated from these enums and from where their members are used
(tests/docs/refusals.py). These enums do not contain the check at the beginning of every request that this broker owns
the topic (NotOwner, TopicNotFound), and not the outcomes of requests that were accepted (docs/design/refusals.md lists
both).

Also in this file, below its heading: the incarnation of a topic (incarnations).
"""

from __future__ import annotations

import enum
from collections import Counter

from ...proto.errors import (
    BacklogQuotaExceeded,
    BackPressure,
    ConsumerBusy,
    CorruptEntry,
    DuplicateInDoubt,
    InvalidRequest,
    MagnetarError,
    MessageTooLarge,
    NotAllowed,
    NotOwner,
    ProducerFenced,
    SubscriptionNotFound,
    TopicNotFound,
    TopicTerminated,
    TransactionConflict,
    Unavailable,
)
from ...proto.names import TopicName

NOTHING_KEPT = "nothing of it"
REFUSAL_COUNTS: Counter[enum.Enum] = Counter()
"""How often this process refused something, by reason."""


class _Refusal(enum.Enum):
    _value_: str
    kind: type[MagnetarError]
    kept: str

    def __new__(cls, value: str, kind: type[MagnetarError], kept: str = NOTHING_KEPT) -> _Refusal:
        member = object.__new__(cls)
        member._value_, member.kind, member.kept = value, kind, kept
        return member

    @property
    def operation(self) -> str:
        """Returns what is refused: "publish", "subscribe" or "ack"."""
        return type(self).__name__.removesuffix("Refusal").lower()

    def error(self, text: str = "", **facts: object) -> MagnetarError:
        REFUSAL_COUNTS[self] += 1
        return self.kind(text or self.value, **facts)


class PublishRefusal(_Refusal):
    """The reasons why a broker does not store a published entry, in the order in which the broker checks them."""

    QUOTA = "the backlog quota is reached, and its policy is to refuse publishes", BacklogQuotaExceeded
    STORAGE = (
        "the namespace or its tenant stores as many bytes as it may, and the policy is to refuse publishes",
        BacklogQuotaExceeded,
    )
    PRODUCER_FENCED = "the producer was closed, or a later exclusive producer took the topic over", ProducerFenced
    NOT_OWNER = "this broker does not own the topic any more, or the topic is closing", NotOwner
    TERMINATED = "the topic is terminated", TopicTerminated
    TOO_LARGE = "the entry is larger than the limit", MessageTooLarge
    CORRUPT = "the entry does not parse or does not match its checksum", CorruptEntry
    MEMORY = (
        "durability=memory may lose stored messages, which deduplication and transactions promise not to",
        NotAllowed,
    )
    WRONG_NAME = (
        "the entry names another producer, and publishes to this topic are deduplicated by that name",
        InvalidRequest,
    )
    NO_TRANSACTION = "the entry is in a transaction whose id no coordinator gives", InvalidRequest
    WIDE_IDS = "the sequence ids of an entry in a transaction span too many numbers, or are too large", InvalidRequest
    OVERLAP = (
        "a part of the batch is stored and a part is not: send the messages after the last stored one again",
        InvalidRequest,
        "the part that an earlier publish stored",
    )
    UNORDERED = (
        "the chunk before it is not stored and not on its way: send the whole message again",
        InvalidRequest,
        "the chunks of the message that an earlier publish stored",
    )
    IN_DOUBT = (
        "an earlier attempt with this sequence id is in flight: connect and send it again",
        DuplicateInDoubt,
        "perhaps the earlier attempt; the connection ends, and the next one learns the last stored id",
    )
    DELAY = "the delivery time is later than the topic's longest delay", NotAllowed


class SubscribeRefusal(_Refusal):
    """The reasons why a consumer may not subscribe, in the order in which the broker checks them."""

    COMPACTED_TYPE = "read_compacted needs an Exclusive or Failover subscription: keys have an order", NotAllowed
    COMPACTED_TOPIC = "read_compacted needs a persistent topic: nothing of others is kept", NotAllowed
    NO_ORDER = (
        "redelivery_order=key needs a durable subscription that keeps an order: Exclusive, Failover, or Key_Shared "
        "without out-of-order delivery",
        NotAllowed,
    )
    NOT_FAIR = "fair.by-key needs a durable Shared subscription of a persistent topic", NotAllowed
    RATE = "the consumer has subscribed as often as subscribe_rate allows", BackPressure
    NOT_MADE = "the subscription does not exist, and auto_subscription_creation is off", SubscriptionNotFound
    TOO_MANY_SUBSCRIPTIONS = "the topic has max_subscriptions subscriptions", NotAllowed
    PROPERTIES = (
        "the properties are too large, or the dead-letter policy, the filter or limits of keys in them do not parse",
        InvalidRequest,
    )
    OTHER_LIMITS = "the subscription has consumers, and other limits of keys than this one asks for", ConsumerBusy
    LASTS = "the subscription exists and is durable, and one that does not last was asked for", NotAllowed
    ENDED = "the subscription does not last, and its last consumer just left: subscribe again", Unavailable
    TYPE_NOT_ALLOWED = (
        "subscription_types does not name the type",
        NotAllowed,
        "the subscription, if it was made for this",
    )
    TOO_MANY_CONSUMERS = (
        "the topic has max_consumers, or the subscription max_consumers_per_subscription",
        ConsumerBusy,
        "the subscription, likewise",
    )
    TOO_MANY_OF_ADDRESS = (
        "as many consumers as may come from one address are connected to the topic",
        ConsumerBusy,
        "the subscription, likewise",
    )
    READS_OTHERWISE = "others of the subscription read compacted, and this one does not, or vice versa", ConsumerBusy
    OTHER_ISOLATION = (
        "others of the subscription read what is committed, and this one all that is stored, or vice versa",
        ConsumerBusy,
    )
    OTHER_FILTER = (
        "the subscription has another filter, or none, and the consumer asks for one: all consumers have one filter",
        ConsumerBusy,
    )
    OTHER_TYPE = "the subscription has consumers of another type", ConsumerBusy
    OTHER_MODE = (
        "the consumers are of another Key_Shared mode, or differ on out-of-order delivery or on redelivery_order",
        ConsumerBusy,
    )
    POLICY = (
        "the policy refuses: Exclusive has a consumer, or sticky Key_Shared ranges overlap or are wrong",
        ConsumerBusy,
    )


class AckRefusal(_Refusal):
    """The reasons why a broker refuses an acknowledgement. Entries before the refused entry in the same request are
    acknowledged nevertheless; but in a transaction, no entry of such a request is acknowledged."""

    UNKNOWN_KIND = "there is no such kind of acknowledgement", InvalidRequest
    TOO_MANY_INDEXES = "batch indexes of one request span more messages than an entry can hold", InvalidRequest
    CUMULATIVE = "several consumers share the subscription: acknowledge each message", NotAllowed
    NOT_A_SET = "the bytes are not a set of entries", InvalidRequest
    BEYOND_END = (
        "the entry is after the last one of the topic",
        InvalidRequest,
        "entries before it, also of the same set",
    )
    NO_SUCH_MESSAGES = "a batch index is larger than the ledger's number of messages", InvalidRequest
    PENDING = (
        "the message is acknowledged in a transaction that is open",
        TransactionConflict,
        "everything else of the request; of a cumulative one nothing",
    )
    NOT_KEPT = "transactions acknowledge on durable subscriptions of persistent topics, and on no others", NotAllowed
    CONFLICT = "the message is acknowledged already, or in another transaction that is open", TransactionConflict
    NO_INDEX = "the index of a commit is after the end of the topic", InvalidRequest
    LONG_NOTE = "the note of a commit is longer than 1024 bytes", InvalidRequest
    NOTE_NOT_KEPT = "a subscription that does not last keeps no note", NotAllowed
    INACTIVE = "another consumer is the active one: only that one commits", NotAllowed
    TOO_MANY_PENDING = (
        "open transactions of the subscription have acknowledged as much as they may: end some of them",
        BackPressure,
    )


# -------------------------------------------------------------------------------------------------- incarnations
# The incarnation of a topic: which of the topics that had a name is meant. It is when the topic was made, ms since the
# epoch. 0: unknown.


def are_different_incarnations(there: int, meant: int) -> bool:
    """Returns True if two incarnations of a topic are known to differ: `there`, that of the present topic, and `meant`,
    that which the caller means. Returns False if they are equal, or if one of them is 0 (unknown)."""
    return bool(meant and there and meant != there)


def check_incarnation(topic: TopicName, there: int, meant: int) -> None:
    """Raises TopicNotFound if the caller means an earlier topic of this name, which was deleted. `there`: the
    incarnation of the present topic; `meant`: the incarnation that the caller means; 0 means any incarnation."""
    if are_different_incarnations(there, meant):
        raise TopicNotFound(
            f"the topic {topic} that is meant was deleted and made anew since (at {there} ms, not {meant})", topic=topic
        )
