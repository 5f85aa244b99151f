"""Settings of the SDK: one frozen dataclass each for client, producer and consumer, and the enums that they use.

Names and defaults are those of `pulsar-client`; if a default of ours differs, the comment says why. Types and ranges
are checked before a settings object is made (client/model/options.py); the settings object checks the relations between
its fields, and raises InvalidConfiguration.

Also in this file, under the heading "redelivery_backoff": the rules that choose the delay before a redelivery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...proto import states as model
from ...proto.compression import Compression
from ...proto.entry import ENTRY_BYTES_MAX
from ...proto.names import STICKY_SLOTS as HASHES_MAX
from ...proto.states import SUBSCRIPTION_TYPE_NUMBERS, sdk_type_name
from ...proto.summary import check_names
from ..common.checks import (
    BACKOFF_CHECKS,
    BOOLEAN_CHECK,
    DEAD_LETTER_CHECKS,
    KEY_RANGES_CHECK,
    WrongValue,
    check_parameter,
    check_parameters,
    make_enum_check,
)
from ..common.errors import ClientEnum
from ..core.failover import PartitionsRoutingMode
from .encryption import KeyReader
from .hooks import Hook
from .message import ConsumerEventListener
from .schema import BytesSchema, Schema
from .tracing import Tracing

# -------------------------------------------------------------------------------------------- redelivery_backoff
# How long an entry waits for its redelivery, by how often it came back.
#
# Applications derive from these and call them with anything: so they are not compiled (setup.py), where a wrong
# argument has another error, or none. Guarding tests: tests/client/core/test_cores.py,
# tests/client/model/test_wrong_arguments.py.


class RedeliveryBackoff(Protocol):
    """Base class of the rules that choose the delay before a redelivery. A program may derive a rule of its own; the
    consumer calls `next` for each entry that it redelivers. If `next` raises, the error is logged, and the default
    delay applies."""

    def next(self, redelivery_count: int) -> int:
        """Returns the delay in ms before an entry is delivered again that was redelivered `redelivery_count` times."""
        ...


@dataclass(frozen=True, slots=True)
class MultiplierRedeliveryBackoff:
    """A redelivery delay that grows exponentially, as in Pulsar: min_delay_ms, min_delay_ms × multiplier, … up to
    max_delay_ms. With the defaults: 1, 2, 4, … 60 s (A7 in docs/features.md). Raises InvalidConfiguration if a value is
    wrong, or min_delay_ms is above max_delay_ms."""

    min_delay_ms: int = 1000
    max_delay_ms: int = 60_000
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        check_parameters(BACKOFF_CHECKS, {name: getattr(self, name) for name in BACKOFF_CHECKS})
        if self.min_delay_ms > self.max_delay_ms:
            raise WrongValue(f"min_delay_ms is at most max_delay_ms, and {self.min_delay_ms} > {self.max_delay_ms}")

    def next(self, redelivery_count: int) -> int:
        """Returns the delay in ms before an entry is delivered again that was redelivered `redelivery_count` times."""
        if redelivery_count <= 0 or self.min_delay_ms <= 0:
            return self.min_delay_ms
        delay, times = float(self.min_delay_ms), redelivery_count
        while times and delay < self.max_delay_ms and self.multiplier > 1:
            delay *= self.multiplier
            times -= 1
        return int(min(self.max_delay_ms, delay))


# ------------------------------------------------------------------------------------------------------ settings


__all__ = ["BatchingType", "CompressionType", "ConsumerType", "InitialPosition", "PartitionsRoutingMode"]


class CompressionType(ClientEnum):
    """The algorithms by which a producer can compress its entries."""
    NONE = Compression.NONE
    LZ4 = Compression.LZ4
    ZLib = Compression.ZLIB
    ZSTD = Compression.ZSTD
    SNAPPY = Compression.SNAPPY


if TYPE_CHECKING:

    class ConsumerType(ClientEnum):  # for type checkers alone
        """The types of a subscription, which say which of its consumers get a message."""

        Exclusive = 0
        Shared = 1
        Failover = 2
        KeyShared = 3
else:
    ConsumerType = ClientEnum(
        "ConsumerType", {sdk_type_name(name): number for name, number in SUBSCRIPTION_TYPE_NUMBERS.items()}
    )
    ConsumerType.__doc__ = """Who gets the messages of a subscription.

    Exclusive: its only consumer. Failover: one of several, in order per partition. Shared: all, without an order.
    KeyShared: all, with the messages of one key in order at one of them.
    """

ORDERED_CONSUMER_TYPES = (ConsumerType.Exclusive, ConsumerType.Failover)
"""Subscription types whose consumer gets all messages in the order of the log. With the other types each message is
acknowledged by itself."""


class InitialPosition(ClientEnum):
    """The positions at which a new subscription can begin. Latest: after the last message of the topic. Earliest: at
    the first stored message."""
    Latest = model.InitialPosition.LATEST
    Earliest = model.InitialPosition.EARLIEST


class BatchingType(ClientEnum):
    """The rules by which a producer groups messages into batches. Default: consecutive messages. KeyBased: messages of
    the same key, as KeyShared subscriptions need them."""
    Default = 0
    KeyBased = 1


class ProducerAccessMode(ClientEnum):
    """The modes that say which other producers may publish to the topic.

    Shared: all. Exclusive: none; opening raises ProducerFenced if there is one. WaitForExclusive: waits, without a
    limit, until there is no other. ExclusiveWithFencing: takes the topic over; the other producers get ProducerFenced.
    """
    Shared = model.AccessMode.SHARED
    Exclusive = model.AccessMode.EXCLUSIVE
    WaitForExclusive = model.AccessMode.WAIT_FOR_EXCLUSIVE
    ExclusiveWithFencing = model.AccessMode.EXCLUSIVE_WITH_FENCING


class RegexSubscriptionMode(ClientEnum):
    """The kinds of topics that a topic pattern can match: persistent topics, non-persistent topics, or both.
    Non-persistent topics are found only while a broker has them open."""
    PersistentOnly = 0
    NonPersistentOnly = 1
    AllTopics = 2


class ConsumerCryptoFailureAction(ClientEnum):
    """The ways in which a consumer handles a message that it cannot decrypt.

    FAIL: the application does not receive the message; it is not acknowledged, and is redelivered after the ack
    time-out. DISCARD: the message is acknowledged and discarded. CONSUME: the application receives the ciphertext, a
    batch as one message, with `Message.encryption_context`."""
    FAIL = 0
    DISCARD = 1
    CONSUME = 2


class KeySharedMode(ClientEnum):
    """The ways in which the keys of a KeyShared subscription are divided among its consumers. AutoSplit: the broker
    divides them. Sticky: each consumer gets the keys whose hashes are in its `sticky_ranges`."""
    AutoSplit = model.KeySharedMode.AUTO_SPLIT
    Sticky = model.KeySharedMode.STICKY


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise WrongValue(text)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of a client, made from the parameters of `Client`. Names say the unit: `_s` seconds, `_bytes` bytes.
    Raises InvalidConfiguration if a value is wrong."""

    operation_timeout_s: float = 30.0  # what an operation may take with all its attempts
    connection_timeout_s: float = 10.0  # one request to one broker; and how long a first contact may take
    backoff_first_s: float = 0.1  # before the second attempt; each is a quarter longer from there
    backoff_last_s: float = 60.0  # the longest pause between attempts
    message_listener_threads: int = 1  # so many listeners of a blocking client are called at once; each keeps its order
    stats_interval_in_seconds: int = 600  # what producers and consumers did is logged so often; 0: never
    latency_statistics: bool = False  # ours: the send latency is in the statistics; costs 0.3 us for each entry
    memory_limit_bytes: int | None = None  # of pending messages and receiver queues; 0: none; None: 64 MiB of queues
    listener_name: str = ""  # the name by which it reaches brokers (pulsar_listeners); empty: as they are advertised
    tracing: Tracing | None = field(default=None, repr=False)  # ours: records OpenTelemetry spans, 60 us each; None: no
    hooks: tuple[Hook, ...] = field(default=(), repr=False)  # ours: called for each message of all that it opens

    def __post_init__(self) -> None:
        _require(self.operation_timeout_s > 0, "operation_timeout_seconds is above 0")
        _require(self.connection_timeout_s > 0, "connection_timeout_ms is above 0")
        _require(self.message_listener_threads >= 1, "message_listener_threads is 1 or more")
        _require(self.stats_interval_in_seconds >= 0, "stats_interval_in_seconds is 0 or more")


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """The settings of a producer, made from the parameters of `Client.create_producer`. Raises InvalidConfiguration if
    parameters contradict each other."""

    producer_name: str | None = None  # None: the broker gives one; needed to go on after a restart
    schema: Schema = field(default_factory=BytesSchema)  # turns objects into bytes
    initial_sequence_id: int | None = None  # the first message gets the next one
    send_timeout_millis: int = 30000  # 0: never; then Result.Timeout, which is unknown
    compression_type: CompressionType = CompressionType.NONE  # of each batch; the client pays, not the broker
    max_pending_messages: int = 1000  # of one partition, unconfirmed; 0: any; past it sends block or are refused
    max_pending_messages_across_partitions: int = 50000  # shared out evenly; 0: any; the smaller bound counts
    block_if_queue_full: bool = False  # wait for room; else ProducerQueueIsFull
    batching_enabled: bool = False  # many messages become one entry: the throughput costs the delay below
    batching_max_messages: int = 1000  # ends a batch
    batching_max_allowed_size_in_bytes: int = 131072  # ends a batch
    batching_max_publish_delay_ms: int = 10  # ends a batch: how long a single message waits
    chunking_enabled: bool = False  # a message may be larger than an entry; not with batching; costs consumers memory
    message_routing_mode: PartitionsRoutingMode = PartitionsRoutingMode.RoundRobinDistribution  # without a key
    lazy_start_partitioned_producers: bool = False  # a partition is connected to with its first message, but for one
    initial_subscription_name: str | None = None  # made with the topic, at its first message; holds data until it acks
    properties: dict[str, str] = field(default_factory=dict)  # free text, told to the broker
    batching_type: BatchingType = BatchingType.Default  # KeyBased: one batch is open per key
    access_mode: ProducerAccessMode = ProducerAccessMode.Shared  # who else may produce (docs/sdk.md, "Who may produce")
    message_router: Callable[[Any, int], int] | None = None  # goes with CustomPartition
    encryption_keys: tuple[str, ...] = ()  # readers to encrypt messages for; costs 2 us a KiB, 300 bytes an entry
    crypto_key_reader: KeyReader | None = field(default=None, repr=False)  # knows their public keys
    filter_properties: tuple[str, ...] = ()  # ours: hashes of their values are in the head of a batch, to skip it by
    batch_by: tuple[str, ...] = ()  # ours: one batch is open per combination of their values, at most 16
    existing_only: bool = False  # the topic is not made when it does not exist (any more)
    hooks: tuple[Hook, ...] = field(default=(), repr=False)  # ours: called for each message, after those of the client
    levels: int | None = None  # ours: of priority, each a topic: t-priority-0 is the most urgent of t; None: one topic
    acks: str = "quorum"  # ours: one, none: a send ends with the first copy, or once it is written; may be lost unseen

    def __post_init__(self) -> None:
        wrong = check_names(self.filter_properties + self.batch_by)
        _require(wrong is None, f"filter_properties and batch_by: {wrong}")
        if self.batching_max_allowed_size_in_bytes > ENTRY_BYTES_MAX - (64 << 10):
            raise WrongValue(
                f"batching_max_allowed_size_in_bytes is {self.batching_max_allowed_size_in_bytes};"
                f" an entry takes {ENTRY_BYTES_MAX - (64 << 10)}"
            )
        _require(
            not (self.chunking_enabled and self.batching_enabled), "batching and chunking cannot be enabled together"
        )
        custom = self.message_routing_mode is PartitionsRoutingMode.CustomPartition
        _require(custom == (self.message_router is not None), "CustomPartition and message_router go together")
        both = bool(self.encryption_keys) == (self.crypto_key_reader is not None)
        _require(both, "encryption_key and crypto_key_reader go together: nothing is encrypted without both")


class ConsumerKeySharedPolicy:
    """The policy by which the consumers of a KeyShared subscription divide the keys. All consumers must set the same
    policy, except for the ranges.

    `sticky_ranges`: (first, last) pairs of hashes in 0 … 65535, both included, for this consumer; required with Sticky,
    and not allowed otherwise. The ranges of all consumers must cover all hashes: a message whose hash is in no range
    waits. Raises InvalidConfiguration for a wrong value, and for ranges that overlap.
    """

    def __init__(
        self,
        key_shared_mode: KeySharedMode = KeySharedMode.AutoSplit,
        allow_out_of_order_delivery: bool = False,
        sticky_ranges: list[tuple[int, int]] | None = None,
    ) -> None:
        check_parameter("key_shared_mode", make_enum_check(KeySharedMode), key_shared_mode)
        check_parameter("allow_out_of_order_delivery", BOOLEAN_CHECK, allow_out_of_order_delivery)
        check_parameter("sticky_ranges", KEY_RANGES_CHECK, sticky_ranges)
        self._mode = key_shared_mode
        self._out_of_order = allow_out_of_order_delivery
        _require(sticky_ranges is None or len(sticky_ranges) > 0, "sticky_ranges has at least one range, or is None")
        self._ranges = [(first, last) for first, last in sticky_ranges or ()]
        sticky = self._mode is KeySharedMode.Sticky
        _require(sticky == bool(self._ranges), "sticky_ranges and KeySharedMode.Sticky go together")
        before = -1
        for first, last in sorted(self._ranges):
            _require(before < first <= last <= HASHES_MAX, f"{(first, last)} overlaps or is not in 0 … {HASHES_MAX}")
            before = last

    @property
    def key_shared_mode(self) -> KeySharedMode:
        """Returns the way in which the keys are divided among the consumers."""
        return self._mode

    @property
    def allow_out_of_order_delivery(self) -> bool:
        """Returns whether a key may move to another consumer before the first consumer has acknowledged the messages of
        this key."""
        return self._out_of_order

    def policy(self) -> ConsumerKeySharedPolicy:
        """Returns this policy object; exists because Pulsar's client has two such classes and converts between them."""
        return self

    @property
    def sticky_ranges(self) -> list[tuple[int, int]]:
        """Returns the hash ranges of this consumer as (first, last) pairs, both included; an empty list with
        AutoSplit."""
        return list(self._ranges)

    def get_key_shared_mode(self) -> KeySharedMode:
        """Returns the way in which the keys are divided: `key_shared_mode` under its name in Pulsar's C++ client."""
        return self._mode

    def is_allow_out_of_order_delivery(self) -> bool:
        """Returns whether a key may move early to another consumer: `allow_out_of_order_delivery` under its name in
        Pulsar's C++ client."""
        return self._out_of_order

    def get_sticky_ranges(self) -> list[tuple[int, int]]:
        """Returns the hash ranges of this consumer: `sticky_ranges` under its name in Pulsar's C++ client."""
        return self.sticky_ranges


@dataclass(frozen=True, slots=True)
class ConsumerDeadLetterPolicy:
    """The policy for messages that are redelivered too often. A message that is not acknowledged after its first
    delivery and `max_redeliver_count` redeliveries is moved to `dead_letter_topic` (client/consume/dead_letters.py).

    `retry_letter_topic`: the topic to which `reconsume_later` sends messages. By default the topics are called
    `<topic>-<subscription>-DLQ` and `-RETRY`, shortened if that is too long. The subscription
    `initial_subscription_name` is created with the dead-letter topic, so that the topic retains its
    messages. A text that is not given is "", as in Pulsar's client.
    Raises InvalidConfiguration for a wrong value."""

    max_redeliver_count: int
    dead_letter_topic: str | None = None
    initial_subscription_name: str | None = None
    retry_letter_topic: str | None = None

    def __post_init__(self) -> None:
        check_parameters(DEAD_LETTER_CHECKS, {name: getattr(self, name) for name in DEAD_LETTER_CHECKS})
        for name in ("dead_letter_topic", "initial_subscription_name", "retry_letter_topic"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, "")

    def policy(self) -> ConsumerDeadLetterPolicy:
        """Returns this policy object; exists because Pulsar's client has two such classes and converts between them."""
        return self

    def getMaxRedeliverCount(self) -> int:
        """Returns how often a message may be redelivered: `max_redeliver_count` under its name in Pulsar's C++
        client."""
        return self.max_redeliver_count

    def getDeadLetterTopic(self) -> str:
        """Returns the name of the dead-letter topic: `dead_letter_topic` under its name in Pulsar's C++ client; an
        empty text if the program gave none."""
        return self.dead_letter_topic or ""

    def getInitialSubscriptionName(self) -> str:
        """Returns the name of the subscription that is created with the dead-letter topic: `initial_subscription_name`
        under its name in Pulsar's C++ client; an empty text if the program gave none."""
        return self.initial_subscription_name or ""


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The settings of a consumer or reader, made from the parameters of `Client.subscribe` or `Client.create_reader`.
    Raises InvalidConfiguration if parameters contradict each other."""

    consumer_type: ConsumerType | int = ConsumerType.Exclusive  # who shares the subscription, and how
    schema: Schema = field(default_factory=BytesSchema)  # turns bytes into objects
    receiver_queue_size: int = 1000  # messages; 0 works like 1
    max_total_receiver_queue_size_across_partitions: int = 50000  # shared out evenly; the smaller bound holds
    consumer_name: str | None = None  # None: a random one
    unacked_messages_timeout_ms: int | None = None  # None: never
    negative_ack_redelivery_delay_ms: int = 60000  # from a negative ack to the next delivery, at least
    negative_ack_redelivery_backoff: RedeliveryBackoff | None = None  # … by how often it came back, instead
    ack_timeout_redelivery_backoff: RedeliveryBackoff | None = None  # … added to the time-out of what is unacknowledged
    dead_letter_policy: ConsumerDeadLetterPolicy | None = None  # of Shared and KeyShared; None: messages come for ever
    enable_retry: bool = False  # receive the retry-letter topic too, for reconsume_later; without a policy 16 times
    unacked_messages_tick_ms: int = 1000  # ours: how late that time-out may be; costs a look at what is due each
    ack_group_ms: int = 100  # ours: acks are sent so much later at most, 1000 at most together; 0: at once, each alone
    ack_receipt_enabled: bool = False  # acknowledging waits until it is durable: a round trip and a synced write each
    properties: dict[str, str] = field(default_factory=dict)  # free text, told to the broker
    max_pending_chunked_message: int = 10  # messages with some chunks received; costs their bytes
    auto_ack_oldest_chunked_message_on_queue_full: bool = False  # past it the oldest is lost; else it comes again
    initial_position: InitialPosition = InitialPosition.Latest  # of a subscription that does not exist yet
    key_shared_policy: ConsumerKeySharedPolicy | None = None  # of a KeyShared consumer; None: the defaults
    priority_level: int = 0  # ours: smaller ones are served first (Shared), or become active (Failover)
    consumer_event_listener: ConsumerEventListener | None = None  # ours: told when it becomes (in)active, on Failover
    many_topics: bool = False  # set when the consumer reads several topics: failover spreads them
    start_message_id_inclusive: bool = False  # of a reader, and of a seek
    is_read_compacted: bool = False  # of each key the latest message up to the last compaction; Exclusive and Failover
    existing_only: bool = False  # the topic is not made when it does not exist (any more)
    crypto_key_reader: KeyReader | None = field(default=None, repr=False)  # knows private keys; None: of nothing
    crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL  # of what is not decrypted
    isolation: str = "read_committed"  # ours: read_uncommitted shows open and aborted transactions as well
    durable: bool = True  # ours: False: the subscription ends with its last consumer, and keeps no messages
    start_at_ms: int = 0  # of a subscription that is made: it begins with what arrived then or later; 0: not so
    redelivery_order: str = "any"  # ours: key: what failed holds back what follows it of its key; else it goes on
    filter: str | None = None  # ours: which messages it gets, by their properties; one for all of the subscription
    hooks: tuple[Hook, ...] = field(default=(), repr=False)  # ours: called for each message, after those of the client
    error_traceback: bool = True  # ours: dead letters tell where the program failed, not only at what
    debounce: float | None = None  # ours: s; of a key only the newest message of each such window; not on Shared
    fair_by_key: bool = False  # ours, of Shared: keys take turns; costs the broker a look at each message's key
    max_in_flight_per_key: int | None = None  # … and each has so many unacknowledged messages; None: no limit
    levels: int | None = None  # ours: of priority, each a topic: t-priority-0 is the most urgent of t; None: one topic
    weights: tuple[int, ...] | None = None  # … how often each is served; None: 8, 4, 1 …; empty: strictly by urgency
    rate_per_key: float | None = None  # … and gets so many a second, at most one second's worth at once; None: any

    def __post_init__(self) -> None:
        timeout = self.unacked_messages_timeout_ms
        if timeout is not None and timeout != 0 and timeout < 10000:
            raise WrongValue("unacked_messages_timeout_ms is at least 10000, or None")
        ordered = self.consumer_type in (ConsumerType.Exclusive, ConsumerType.Failover)
        keyed = self.consumer_type == ConsumerType.KeyShared and (
            self.key_shared_policy is None or not self.key_shared_policy.allow_out_of_order_delivery
        )
        _require(
            self.redelivery_order == "any" or ordered or keyed,
            "redelivery_order='key' needs an Exclusive, a Failover or a KeyShared consumer, in order",
        )
        _require(
            self.durable
            or (self.redelivery_order == "any" and self.dead_letter_policy is None and not self.enable_retry),
            "durable=False keeps nothing: no dead_letter_policy, no enable_retry, no redelivery_order='key'",
        )
        _require(
            self.debounce is None or (self.redelivery_order == "any" and (ordered or keyed)),
            "debounce needs an Exclusive, a Failover or a KeyShared consumer, in order, without redelivery_order",
        )
        _require(
            not self.fair_by_key or self.consumer_type == ConsumerType.Shared, "fair_by_key needs a Shared consumer"
        )
        _require(
            self.fair_by_key or self.max_in_flight_per_key is self.rate_per_key is None,
            "max_in_flight_per_key and rate_per_key need fair_by_key",
        )
        _require(
            not self.weights or (self.levels is not None and len(self.weights) == self.levels),
            "weights are as many as levels",
        )
        _require(self.levels is not None or self.weights is None, "weights need levels")
        _require(ordered or not self.is_read_compacted, "is_read_compacted needs an Exclusive or Failover consumer")
