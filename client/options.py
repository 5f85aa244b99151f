"""Parameters as `pulsar-client` names them, made into our settings.

What Magnetar does not have is refused when a program asks for it (OperationNotSupported), never silently left out. What
names a choice that does not exist here, or that is always made, is accepted and without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import OperationNotSupported
from .settings import ClientSettings, ConsumerSettings, PartitionsRoutingMode, ProducerSettings

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


def given(parameters: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """The parameters of a method, from its `locals()` (so: in its first line), without those it handles itself."""
    return {name: value for name, value in parameters.items() if name != "self" and name not in without}


def client_settings(options: Mapping[str, Any]) -> ClientSettings:
    """Threads, statistics and loggers of `pulsar.Client` choose nothing here: one event loop, and `logging`."""
    for name in _TLS_CLIENT:
        if options.get(name):
            raise OperationNotSupported(f"{name}: TLS is not there yet")
    return ClientSettings(
        operation_timeout_s=options["operation_timeout_seconds"],
        connection_timeout_s=options["connection_timeout_ms"] / 1000,
    )


def producer_settings(options: Mapping[str, Any]) -> ProducerSettings:
    found = _without(options, _UNSUPPORTED_PRODUCER, _IGNORED_PRODUCER, "producer")
    mode = PartitionsRoutingMode(found["message_routing_mode"])
    if found["message_router"] is not None and mode is PartitionsRoutingMode.RoundRobinDistribution:
        mode = PartitionsRoutingMode.CustomPartition  # a router was given and no other mode was asked for
    return ProducerSettings(**{**found, "message_routing_mode": mode})


def consumer_settings(options: Mapping[str, Any]) -> ConsumerSettings:
    return ConsumerSettings(**_without(options, _UNSUPPORTED_CONSUMER, _IGNORED_CONSUMER, "consumer"))


def _without(options: Mapping[str, Any], unsupported: set[str], ignored: set[str], what: str) -> dict[str, Any]:
    for name in sorted(unsupported):
        if options.get(name):
            raise OperationNotSupported(f"{name} of a {what} is not there yet")
    found = {name: value for name, value in options.items() if name not in unsupported | ignored}
    return {name: value for name, value in found.items() if value is not None or name not in ("schema", "properties")}
