"""Makes the settings of clients, producers and consumers from the parameters of the SDK, which have the names of
`pulsar-client`. Also the position at which a reader starts (`ReaderStart`).

A parameter of a feature that Magnetar does not have is refused when a program passes it (OperationNotSupported:
client/connect/), never silently ignored. A parameter that only tunes a part that Magnetar does not have
(`IGNORED_OPTIONS`: threads, look-ups, intervals of polling) is accepted; a warning in the log names it if its value is
not the default. Guard: tests/client/model/test_parameters.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from ...proto.errors import InvalidRequest
from ...proto.filters import parse_filter
from ...proto.names import Position
from ..common import checks
from ..common.checks import (
    BOOLEAN_CHECK,
    CALLBACK_CHECK,
    DEBOUNCE_CHECK,
    FILTER_CHECK,
    INT64_MAX,
    ISOLATION,
    MS_CHECK,
    NAME_CHECK,
    PROPERTIES_CHECK,
    RATE_PER_SECOND_CHECK,
    REDELIVERY_ORDER,
    TEXT_OR_NONE,
    CheckTable,
    ParameterCheck,
    WrongValue,
    make_enum_check,
    make_instance_check,
    make_methods_check,
    make_whole_number_check,
    to_plain_text,
)
from ..common.loggers import check_logger
from ..core.levels import LEVELS_MAX, STRICT_WEIGHTS, WEIGHT_MAX
from .hooks import HOOKS_CHECK
from .message_id import MessageId
from .schema import Schema
from .settings import (
    BatchingType,
    ClientSettings,
    CompressionType,
    ConsumerCryptoFailureAction,
    ConsumerDeadLetterPolicy,
    ConsumerKeySharedPolicy,
    ConsumerSettings,
    ConsumerType,
    InitialPosition,
    PartitionsRoutingMode,
    ProducerAccessMode,
    ProducerSettings,
    RegexSubscriptionMode,
)
from .tracing import Tracing

_LOG = logging.getLogger("magnetar.client")
PLUGIN_TYPE_NUMBERS = range(64, 128)
"""Numbers of subscription types that packages bring to a broker (docs/design/extending.md)."""
_DONE_ELSEWHERE = {
    "batch_index_ack_enabled",  # always on
    "replicate_subscription_state_enabled",  # there is no other cluster
    "regex_subscription_mode", "pattern_auto_discovery_period",  # client/connect/topic_watch.py
}
IGNORED_OPTIONS = {
    "io_threads": (1, "one event loop does it"),
    "concurrent_lookup_requests": (50000, "look-ups have no limit"),
    "broker_consumer_stats_cache_time_ms": (30000, "nothing is cached"),
    "log_conf_file_path": (None, "logging is Python's"),
}
"""Parameters that are accepted without effect: name → its default, and the reason why it has no effect."""



def _is_name(name: object) -> bool:
    return NAME_CHECK.find_error_class(name) is None


def _are_texts(names: object) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)


_NAMES = ParameterCheck("a list or tuple of names of properties", (list, tuple), _are_texts)

_LEVELS = make_whole_number_check(2, LEVELS_MAX, optional=True)


def _are_weights(weights: object) -> bool:
    if isinstance(weights, str):
        return weights == STRICT_WEIGHTS
    return isinstance(weights, list | tuple) and bool(weights) and all(
        type(each) is int and 1 <= each <= WEIGHT_MAX for each in weights
    )  # fmt: skip


PRODUCER_CHECKS: CheckTable = {
    "producer_name": TEXT_OR_NONE,
    "schema": make_instance_check(Schema),
    "initial_sequence_id": make_whole_number_check(-1, INT64_MAX - 1, optional=True),
    "send_timeout_millis": MS_CHECK,
    "compression_type": make_enum_check(CompressionType),
    "max_pending_messages": make_whole_number_check(0),
    "max_pending_messages_across_partitions": make_whole_number_check(0),
    "block_if_queue_full": BOOLEAN_CHECK,
    "batching_enabled": BOOLEAN_CHECK,
    "batching_max_messages": make_whole_number_check(1),
    "batching_max_allowed_size_in_bytes": make_whole_number_check(1),
    "batching_max_publish_delay_ms": MS_CHECK,
    "chunking_enabled": BOOLEAN_CHECK,
    "message_routing_mode": make_enum_check(PartitionsRoutingMode),
    "lazy_start_partitioned_producers": BOOLEAN_CHECK,
    "properties": PROPERTIES_CHECK,
    "batching_type": make_enum_check(BatchingType),
    "access_mode": make_enum_check(ProducerAccessMode),
    "message_router": CALLBACK_CHECK,
    "initial_subscription_name": TEXT_OR_NONE,
    "encryption_key": NAME_CHECK._replace(allowed_text="a name, or None", optional=True),
    "encryption_keys": ParameterCheck(
        "a list of names, or None", (list, tuple), lambda names: all(map(_is_name, names)), True
    ),
    "crypto_key_reader": make_methods_check("get_public_key"),
    "filter_properties": _NAMES,
    "batch_by": _NAMES,
    "hooks": HOOKS_CHECK,
    "levels": _LEVELS,
    "acks": ParameterCheck("quorum, one or none", (str,), lambda acks: acks in ("quorum", "one", "none")),
}
CONSUMER_CHECKS: CheckTable = {
    "subscription_name": NAME_CHECK,
    "consumer_type": ParameterCheck(
        f"{make_enum_check(ConsumerType).allowed_text}, or the number of an installed type, 64 to 127", (int,),
        lambda value: isinstance(value, ConsumerType) or value in PLUGIN_TYPE_NUMBERS,
    ),
    "schema": make_instance_check(Schema),
    "message_listener": CALLBACK_CHECK,
    "receiver_queue_size": make_whole_number_check(0),
    "max_total_receiver_queue_size_across_partitions": make_whole_number_check(0),
    "consumer_name": TEXT_OR_NONE,
    "unacked_messages_timeout_ms": checks.TIMEOUT_MS,
    "broker_consumer_stats_cache_time_ms": MS_CHECK,
    "negative_ack_redelivery_delay_ms": MS_CHECK,
    "is_read_compacted": BOOLEAN_CHECK,
    "properties": PROPERTIES_CHECK,
    "pattern_auto_discovery_period": make_whole_number_check(0),
    "initial_position": make_enum_check(InitialPosition),
    "max_pending_chunked_message": make_whole_number_check(0),
    "auto_ack_oldest_chunked_message_on_queue_full": BOOLEAN_CHECK,
    "start_message_id_inclusive": BOOLEAN_CHECK,
    "key_shared_policy": make_instance_check(ConsumerKeySharedPolicy),
    "batch_index_ack_enabled": BOOLEAN_CHECK,
    "regex_subscription_mode": make_enum_check(RegexSubscriptionMode),
    "dead_letter_policy": make_instance_check(ConsumerDeadLetterPolicy),
    "crypto_key_reader": make_methods_check("get_private_key"),
    "crypto_failure_action": make_enum_check(ConsumerCryptoFailureAction),
    "is_pattern_topic": BOOLEAN_CHECK,
    "replicate_subscription_state_enabled": BOOLEAN_CHECK,
    "negative_ack_redelivery_backoff": make_methods_check("next"),
    "ack_timeout_redelivery_backoff": make_methods_check("next"),
    "unacked_messages_tick_ms": make_whole_number_check(100, checks.DURATION_MS_MAX),
    "ack_group_ms": MS_CHECK,
    "ack_receipt_enabled": BOOLEAN_CHECK,
    "enable_retry": BOOLEAN_CHECK,
    "priority_level": make_whole_number_check(0),
    "consumer_event_listener": make_methods_check("became_active", "became_inactive"),
    "isolation": ISOLATION,
    "redelivery_order": REDELIVERY_ORDER,
    "filter": FILTER_CHECK,
    "hooks": HOOKS_CHECK,
    "durable": BOOLEAN_CHECK._replace(allowed_text="True, False, or None", optional=True),
    "broadcast": BOOLEAN_CHECK,
    "start_message_id": make_instance_check(MessageId),
    "start_at": ParameterCheck(
        "a datetime with a time zone, after 1970, or None", (datetime,), checks.is_time_after_1970, True
    ),
    "partitions": ParameterCheck("a list of numbers, or None", (list, tuple, set, frozenset), optional=True),
    "error_traceback": BOOLEAN_CHECK,
    "debounce": DEBOUNCE_CHECK,
    "fair_by_key": BOOLEAN_CHECK,
    "max_in_flight_per_key": make_whole_number_check(1, 1_000_000_000, optional=True),
    "rate_per_key": RATE_PER_SECOND_CHECK,
    "levels": _LEVELS,
    "weights": ParameterCheck(
        f"strict, or a whole number from 1 to {WEIGHT_MAX} for each level, or None", (str, list, tuple), _are_weights,
        True,
    ),
}
START_PARAMETERS = ("broadcast", "start_message_id", "start_at", "partitions")
"""Parameters of `Client.subscribe` that say where a subscription begins; they are no settings of its consumers."""
READER_CHECKS: CheckTable = {
    **CONSUMER_CHECKS,
    "start_message_id": make_instance_check(MessageId, optional=False),
    "reader_listener": CALLBACK_CHECK,
    "reader_name": TEXT_OR_NONE,
    "subscription_role_prefix": TEXT_OR_NONE,
    "subscription_name": NAME_CHECK._replace(optional=True),
}


def copy_parameters(parameters: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Returns a copy of the parameters of the calling method without `self` and the names in `without`. `parameters`:
    the `locals()` of that method, in its first line. Subclasses of `str` are replaced by plain text
    (`to_plain_text`)."""
    return {name: to_plain_text(value) for name, value in parameters.items() if name != "self" and name not in without}


def make_client_settings(options: Mapping[str, Any]) -> ClientSettings:
    """Returns the settings for the parameters of `Client`. Raises InvalidConfiguration if a value is wrong; logs a
    warning for each parameter without effect."""
    checks.check_parameters(checks.CLIENT_CHECKS, options)
    check_logger(options.get("logger"))
    checks.check_parameter("tracing", make_instance_check(Tracing), options.get("tracing"))
    checks.check_parameter("hooks", HOOKS_CHECK, options.get("hooks"))
    warn_of_ignored_options(options)
    return ClientSettings(
        operation_timeout_s=options["operation_timeout_seconds"],
        connection_timeout_s=options["connection_timeout_ms"] / 1000,
        message_listener_threads=options["message_listener_threads"],
        stats_interval_in_seconds=options["stats_interval_in_seconds"],
        latency_statistics=options["latency_statistics"],
        memory_limit_bytes=options["memory_limit_bytes"],
        listener_name=options["listener_name"] or "",
        tracing=options.get("tracing"),
        hooks=(*(options.get("hooks") or ()), *([options["tracing"]] if options.get("tracing") else ())),
    )


def warn_of_ignored_options(options: Mapping[str, Any]) -> None:
    """Logs a warning for each parameter of `IGNORED_OPTIONS` whose value is not its default."""
    for name, (default, why) in IGNORED_OPTIONS.items():
        if options.get(name, default) != default:
            _LOG.warning("%s=%r has no effect: %s", name, options[name], why)


def make_producer_settings(options: Mapping[str, Any]) -> ProducerSettings:
    """Returns the settings for the parameters of `Client.create_producer`. Raises InvalidConfiguration if a value is
    wrong, or if two parameters contradict each other."""
    checks.check_parameters(PRODUCER_CHECKS, options)
    found = _without(options)
    key, keys = found.pop("encryption_key"), found.pop("encryption_keys")
    if key is not None and keys is not None:
        raise WrongValue("encryption_key and encryption_keys exclude each other")
    found["hooks"] = tuple(found.get("hooks") or ())
    found["encryption_keys"] = (key,) if key is not None else tuple(dict.fromkeys(keys or ()))
    for name in ("filter_properties", "batch_by"):
        found[name] = tuple(dict.fromkeys(found[name]))
    mode = PartitionsRoutingMode(found["message_routing_mode"])
    if found["message_router"] is not None and mode is PartitionsRoutingMode.RoundRobinDistribution:
        mode = PartitionsRoutingMode.CustomPartition  # a router was given and no other mode was asked for
    return ProducerSettings(**{**found, "message_routing_mode": mode})


def make_consumer_settings(options: Mapping[str, Any]) -> ConsumerSettings:
    """Returns the settings for the parameters of `Client.subscribe` or `Client.create_reader`. Raises
    InvalidConfiguration if a value is wrong, or if two parameters contradict each other."""
    checks.check_parameters(CONSUMER_CHECKS, options)
    warn_of_ignored_options(options)
    if options.get("filter") is not None:
        try:
            parse_filter(options["filter"].strip())
        except InvalidRequest as error:
            raise WrongValue(error.message) from error
    weights = options.get("weights")
    return ConsumerSettings(**{
        **_without(options), "hooks": tuple(options.get("hooks") or ()),
        "weights": None if weights is None else () if weights == STRICT_WEIGHTS else tuple(weights),
    })  # fmt: skip


def _without(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without those that other functions handle."""
    found = {
        name: value for name, value in options.items() if name not in _DONE_ELSEWHERE and name not in IGNORED_OPTIONS
    }
    return {name: value for name, value in found.items() if value is not None or name not in ("schema", "properties")}


# --------------------------------------------------------------------------------------------------------- start
# The place where delivery begins: at a message or after it, inside an entry too.
#
# A reader keeps its `ReaderStart` itself and leaves out what is before it. The cursor of a subscription that lasts
# belongs to the broker, and others may move it: a seek names the first message that is wanted (`find_first_wanted_id`),
# and what the broker then delivers is all shown.


class SubscriptionStart(NamedTuple):
    """The subscription that a call of `Client.subscribe` asks for, and the position at which it begins if it does not
    exist. `durable`: whether it exists without consumers. `name_suffix`: the text that is appended to its name.
    `start`: the message at which a subscription that is not durable begins; None: its initial position. `start_at_ms`:
    the time of the first message, in ms since the epoch; 0: none."""

    durable: bool
    name_suffix: str
    start: ReaderStart | None
    start_at_ms: int

    @classmethod
    def choose(
        cls, durable: bool | None, place: MessageId | None, at: datetime | None, consumer_name: str | None, *,
        broadcast: bool, inclusive: bool, make_name: Callable[[], str],
    ) -> SubscriptionStart:  # fmt: skip
        """Returns the subscription for these parameters of `Client.subscribe`: `durable`, `start_message_id` (`place`),
        `start_at` (`at`), `consumer_name`, `broadcast` and `start_message_id_inclusive` (`inclusive`). Raises
        WrongValue if they contradict each other. `make_name()` returns a random name, for a broadcast that is not
        durable."""
        lasts = not broadcast if durable is None else durable
        if lasts and place is not None:
            raise WrongValue("start_message_id is of a subscription that is not durable: seek, or give start_at")
        if place is not None and at is not None:
            raise WrongValue("start_message_id and start_at exclude each other")
        if broadcast and lasts and not consumer_name:
            raise WrongValue("a durable broadcast needs a consumer_name: its subscription is found again by it")
        suffix = f"-{consumer_name if lasts else make_name()}" if broadcast else ""
        start = None if place is None else ReaderStart(place, inclusive)
        return cls(lasts, suffix, start, 0 if at is None else max(1, int(at.timestamp() * 1000)))


BATCH_INDEX_MAX = 2**31 - 1
"""Largest batch index of a message id: Pulsar's is a 32-bit integer."""


class ReaderStart:
    """The position at which a reader starts to read. The position does not change when the reader reconnects."""

    __slots__ = ("begun", "id", "inclusive")

    def __init__(self, id: MessageId, inclusive: bool, begun: Position | None = None) -> None:
        """Makes a start at the message `id`: for a chunked message at its first chunk if `inclusive`, else after its
        last. `begun`: the first chunk of messages that the reader has read in part, if that is before `id`; chunks
        from there on are accepted."""
        self.id = (id.first_chunk_message_id() or id) if inclusive else id
        self.inclusive = inclusive
        self.begun = begun if begun is not None and begun < id.position() else None

    def is_chunk_wanted(self, position: Position) -> bool:
        """Returns whether the reader needs the chunk at `position`: the chunk is not before the start, or belongs to a
        message that the reader has read in part."""
        return not self.is_before_start(position, 0) or (self.begun is not None and position >= self.begun)

    def is_before_start(self, position: Position, index: int) -> bool:
        """Returns whether the message at that position and batch index is before the start, so that the reader must not
        return it. A start without a batch index means the whole entry."""
        start = self.id
        here = (position.ledger_id, position.entry_id)
        there = (start.ledger_id(), start.entry_id())
        if here != there:
            return here < there and start != MessageId.latest
        if start.batch_index() < 0:
            return not self.inclusive
        return index < start.batch_index() or (index == start.batch_index() and not self.inclusive)


def find_first_wanted_id(place: MessageId, *, inclusive: bool) -> MessageId:
    """Returns the id of the first message that a consumer or reader must get after it is moved to `place`. If
    `inclusive`, this is the message at `place`, or its first chunk; else the message after it. A `place` without a
    batch index means the whole entry."""
    if place in (MessageId.earliest, MessageId.latest):
        return place
    if inclusive:
        return place.first_chunk_message_id() or place
    following = place.batch_index() + 1
    if place.batch_index() < 0 or following == place.batch_size() or following > BATCH_INDEX_MAX:
        return MessageId(place.partition(), place.ledger_id(), place.entry_id() + 1)
    return MessageId(place.partition(), place.ledger_id(), place.entry_id(), following)
