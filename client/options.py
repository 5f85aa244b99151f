"""Parameters as `pulsar-client` names them, made into our settings.

What Magnetar does not have is refused when a program asks for it (OperationNotSupported), never silently left out. What
names a choice that does not exist here, or that is always made, is accepted and without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import checks
from .checks import (
    CALLBACK,
    INT64_MAX,
    MS,
    NAME,
    PROPERTIES,
    TEXT_OR_NONE,
    YES_OR_NO,
    Table,
    enum,
    has,
    instance,
    whole,
)
from .errors import OperationNotSupported
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

_UNSUPPORTED_PRODUCER = {"encryption_key", "crypto_key_reader"}
_IGNORED_PRODUCER: set[str] = set()
_UNSUPPORTED_CONSUMER = {
    "crypto_key_reader", "replicate_subscription_state_enabled",
}  # fmt: skip
_IGNORED_CONSUMER = {
    # Named by Pulsar's programs; what they choose between does not exist here, or is always on.
    "batch_index_ack_enabled", "broker_consumer_stats_cache_time_ms", "crypto_failure_action",
    "pattern_auto_discovery_period",
    "regex_subscription_mode",
}  # fmt: skip
_TLS_CLIENT = (
    "use_tls", "tls_trust_certs_file_path", "tls_allow_insecure_connection", "tls_validate_hostname",
    "tls_private_key_file_path", "tls_certificate_file_path",
)  # fmt: skip

PRODUCER: Table = {
    "producer_name": TEXT_OR_NONE,
    "schema": instance(Schema),
    "initial_sequence_id": whole(-1, INT64_MAX - 1, optional=True),
    "send_timeout_millis": MS,
    "compression_type": enum(CompressionType),
    "max_pending_messages": whole(1),
    "max_pending_messages_across_partitions": whole(1),
    "block_if_queue_full": YES_OR_NO,
    "batching_enabled": YES_OR_NO,
    "batching_max_messages": whole(1),
    "batching_max_allowed_size_in_bytes": whole(1),
    "batching_max_publish_delay_ms": MS,
    "chunking_enabled": YES_OR_NO,
    "message_routing_mode": enum(PartitionsRoutingMode),
    "lazy_start_partitioned_producers": YES_OR_NO,
    "properties": PROPERTIES,
    "batching_type": enum(BatchingType),
    "access_mode": enum(ProducerAccessMode),
    "message_router": CALLBACK,
    "initial_subscription_name": TEXT_OR_NONE,
}
CONSUMER: Table = {
    "subscription_name": NAME,
    "consumer_type": enum(ConsumerType),
    "schema": instance(Schema),
    "message_listener": CALLBACK,
    "receiver_queue_size": whole(0),
    "max_total_receiver_queue_size_across_partitions": whole(0),
    "consumer_name": TEXT_OR_NONE,
    "unacked_messages_timeout_ms": checks.TIMEOUT_MS,
    "broker_consumer_stats_cache_time_ms": MS,
    "negative_ack_redelivery_delay_ms": MS,
    "is_read_compacted": YES_OR_NO,
    "properties": PROPERTIES,
    "pattern_auto_discovery_period": whole(0),
    "initial_position": enum(InitialPosition),
    "max_pending_chunked_message": whole(0),
    "auto_ack_oldest_chunked_message_on_queue_full": YES_OR_NO,
    "start_message_id_inclusive": YES_OR_NO,
    "key_shared_policy": instance(ConsumerKeySharedPolicy),
    "batch_index_ack_enabled": YES_OR_NO,
    "regex_subscription_mode": enum(RegexSubscriptionMode),
    "dead_letter_policy": instance(ConsumerDeadLetterPolicy),
    "crypto_failure_action": enum(ConsumerCryptoFailureAction),
    "is_pattern_topic": YES_OR_NO,
    "negative_ack_redelivery_backoff": has("next"),
    "ack_timeout_redelivery_backoff": has("next"),
    "ack_receipt_enabled": YES_OR_NO,
    "enable_retry": YES_OR_NO,
    "priority_level": whole(0),
    "consumer_event_listener": has("became_active", "became_inactive"),
}
READER: Table = {
    **CONSUMER,
    "start_message_id": instance(MessageId, optional=False),
    "reader_listener": CALLBACK,
    "reader_name": TEXT_OR_NONE,
    "subscription_role_prefix": TEXT_OR_NONE,
    "subscription_name": NAME._replace(optional=True),
}


def given(parameters: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """The parameters of a method, from its `locals()` (so: in its first line), without those it handles itself."""
    return {name: value for name, value in parameters.items() if name != "self" and name not in without}


def client_settings(options: Mapping[str, Any]) -> ClientSettings:
    """Threads, statistics and loggers of `pulsar.Client` choose nothing here: one event loop, and `logging`."""
    checks.check(checks.CLIENT, options)
    for name in _TLS_CLIENT:
        if options.get(name):
            raise OperationNotSupported(f"{name}: TLS is not there yet")
    return ClientSettings(
        operation_timeout_s=options["operation_timeout_seconds"],
        connection_timeout_s=options["connection_timeout_ms"] / 1000,
    )


def producer_settings(options: Mapping[str, Any]) -> ProducerSettings:
    checks.check(PRODUCER, options)
    found = _without(options, _UNSUPPORTED_PRODUCER, _IGNORED_PRODUCER, "producer")
    mode = found["message_routing_mode"]
    if found["message_router"] is not None and mode is PartitionsRoutingMode.RoundRobinDistribution:
        mode = PartitionsRoutingMode.CustomPartition  # a router was given and no other mode was asked for
    return ProducerSettings(**{**found, "message_routing_mode": mode})


def consumer_settings(options: Mapping[str, Any]) -> ConsumerSettings:
    checks.check(CONSUMER, options)
    return ConsumerSettings(**_without(options, _UNSUPPORTED_CONSUMER, _IGNORED_CONSUMER, "consumer"))


def _without(options: Mapping[str, Any], unsupported: set[str], ignored: set[str], what: str) -> dict[str, Any]:
    for name in sorted(unsupported):
        if options.get(name):
            raise OperationNotSupported(f"{name} of a {what} is not there yet")
    found = {name: value for name, value in options.items() if name not in unsupported | ignored}
    return {name: value for name, value in found.items() if value is not None or name not in ("schema", "properties")}
