"""The module `magnetar._pulsar`: the names of `_pulsar`, the module of Pulsar's C++ client. Most of them are names of
`magnetar`.

A program that imports `_pulsar` runs after `sys.modules["_pulsar"] = magnetar._pulsar`.

Defined here are the builders of policies (`DeadLetterPolicyBuilder`, `KeySharedPolicy`) and the configurations
(`ClientConfiguration`, …), with the names and methods that Pulsar's C++ client gives them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

from .common.checks import (
    BOOLEAN_CHECK,
    FUNCTION_CHECK,
    INT32_MAX,
    TEXT_CHECK,
    CheckTable,
    ParameterCheck,
    check_parameter,
    make_instance_check,
    make_whole_number_check,
)  # fmt: skip
from .common.loggers import ConsoleLogger, FileLogger, LoggerLevel, check_logger
from .connect.authentication import Authentication
from .consume.receiver_queue import BatchReceivePolicy, ConsumerBatchReceivePolicy
from .model import options
from .model.schema import SchemaDescription, SchemaTypeOfClient
from .model.schema import SchemaDescription as SchemaInfo
from .model.schema import SchemaTypeOfClient as SchemaType
from .model.settings import (
    BatchingType,
    CompressionType,
    ConsumerCryptoFailureAction,
    ConsumerDeadLetterPolicy,
    ConsumerKeySharedPolicy,
    ConsumerType,
    InitialPosition,
    KeySharedMode,
    PartitionsRoutingMode,
    ProducerAccessMode,
    RegexSubscriptionMode,
)
from .model.settings import ConsumerDeadLetterPolicy as DeadLetterPolicy

# ------------------------------------------------------------------------------------------------------ builders
# The policies under the names and methods that Pulsar's C++ client gives them.


class DeadLetterPolicyBuilder:
    """Builds a `ConsumerDeadLetterPolicy`; each method sets one of its parameters."""

    def __init__(self) -> None:
        self._count = INT32_MAX
        self._topic: str | None = None
        self._subscription: str | None = None

    def maxRedeliverCount(self, count: int) -> DeadLetterPolicyBuilder:
        """Sets how often a message may be redelivered before it is moved to the dead-letter topic, at least 1. Returns
        the builder."""
        self._count = count
        return self

    def deadLetterTopic(self, topic: str) -> DeadLetterPolicyBuilder:
        """Sets the name of the topic to which messages are moved. Returns the builder."""
        self._topic = topic
        return self

    def initialSubscriptionName(self, name: str) -> DeadLetterPolicyBuilder:
        """Sets the name of the subscription that is created together with the dead-letter topic. Returns the
        builder."""
        self._subscription = name
        return self

    def build(self) -> ConsumerDeadLetterPolicy:
        """Returns the ConsumerDeadLetterPolicy that was built. Raises InvalidConfiguration if a parameter is wrong.
        Without `maxRedeliverCount` a message is redelivered for ever."""
        return ConsumerDeadLetterPolicy(self._count, self._topic, self._subscription)


class KeySharedPolicy:
    """Builds a `ConsumerKeySharedPolicy` step by step; `policy` returns the finished policy."""

    def __init__(self) -> None:
        self._mode = KeySharedMode.AutoSplit
        self._out_of_order = False
        self._ranges: list[tuple[int, int]] = []

    def set_key_shared_mode(self, mode: KeySharedMode) -> KeySharedPolicy:
        """Sets the way in which the keys are divided among the consumers. Returns the builder."""
        self._mode = mode
        return self

    def get_key_shared_mode(self) -> KeySharedMode:
        """Returns the way in which the keys are divided among the consumers."""
        return self._mode

    def set_allow_out_of_order_delivery(self, allowed: bool) -> KeySharedPolicy:
        """Sets whether a key may move to another consumer before its delivered messages are acknowledged. Returns the
        builder."""
        self._out_of_order = allowed
        return self

    def is_allow_out_of_order_delivery(self) -> bool:
        """Returns whether a key may move to another consumer before its delivered messages are acknowledged."""
        return self._out_of_order

    def set_sticky_ranges(self, ranges: list[tuple[int, int]]) -> KeySharedPolicy:
        """Sets the hash ranges of this consumer as (first, last) pairs, both included; only with KeySharedMode.Sticky.
        Returns the builder."""
        self._ranges = ranges
        return self

    def get_sticky_ranges(self) -> list[tuple[int, int]]:
        """Returns the hash ranges of this consumer as (first, last) pairs, both included; an empty list if none was
        set."""
        return self._ranges

    def policy(self) -> ConsumerKeySharedPolicy:
        """Returns the ConsumerKeySharedPolicy that was built. Raises InvalidConfiguration if a parameter is wrong."""
        return ConsumerKeySharedPolicy(self._mode, self._out_of_order, self._ranges or None)


# ------------------------------------------------------------------------------------------------ configurations
# The configurations of Pulsar's C++ client, as its Python module `_pulsar` has them: each option is a method, which
# gives its value without an argument, and sets it with one.
#
#     options = magnetar.ProducerConfiguration().batching_enabled(True).producer_name("p")
#     producer = client.create_producer("flights", **options.parameters())
#
# Options, defaults and what a setter returns are Pulsar's. An option is checked when it is set, by the row of the
# parameter that it is (client/model/options.py): WrongType, WrongValue. Guard: tests/client/test_names_of_pulsar.py.


Self = TypeVar("Self", bound="Configuration")
_INFO = make_instance_check(SchemaDescription, optional=False)
_BYTES = SchemaDescription(SchemaTypeOfClient.BYTES, "BYTES", "")


class Option(NamedTuple):
    """One option of a configuration class. `check`: the check of its values; None: that of its parameter. `default`:
    the value of an option that was not set. `parameter`: the client's parameter that the option sets; empty: there is
    none. `chains`: whether the setter returns the configuration, as in Pulsar; otherwise it returns None. `reads`:
    whether the option has a getter."""

    check: ParameterCheck | None
    default: Any = None
    parameter: str = ""
    chains: bool = True
    reads: bool = True


def _method(name: str, option: Option) -> Callable[..., Any]:
    def method(self: Configuration, *value: Any) -> Any:
        return self._read(name, option) if not value else self._set(name, option, *value)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"The value of `{name}`; with an argument it is set."
    return method


class Configuration:
    """Base class of the configuration classes of Pulsar's C++ client. Each option of a subclass is a method: without an
    argument it returns the value, with one it sets the value and returns the configuration, or None as in Pulsar.
    Raises InvalidConfiguration for a wrong value, TypeError for several arguments, and if an option that is only set is
    read."""

    _options: ClassVar[dict[str, Option]] = {}

    def __init_subclass__(cls) -> None:
        for name, option in cls._options.items():
            setattr(cls, name, _method(name, option))

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def _read(self, name: str, option: Option) -> Any:
        if not option.reads:
            raise TypeError(f"{name} is set, and not read: it takes an argument")
        return self._values.get(name, option.default)

    def _set(self: Self, name: str, option: Option, value: Any, *more: Any) -> Self | None:
        if more:
            raise TypeError(f"{name} takes one argument")
        assert option.check is not None
        check_parameter(name, option.check, value)
        self._values[name] = value
        return self if option.chains else None

    def parameters(self) -> dict[str, Any]:
        """Returns a dict of the options that were set: the parameters for `magnetar.Client`, or for the method of the
        client that opens the configured object."""
        found = {
            option.parameter: self._values[name]
            for name, option in self._options.items() if name in self._values and option.parameter
        }  # fmt: skip
        if "properties" in self._values:
            found["properties"] = dict(self._values["properties"])
        return found


class _WithProperties(Configuration):
    def property(self: Self, name: str, value: str) -> Self:
        """Adds one property."""
        check_parameter("name", TEXT_CHECK, name)
        check_parameter("value", TEXT_CHECK, value)
        self._values.setdefault("properties", {})[name] = value
        return self


def _rows(table: CheckTable, **named: Option) -> dict[str, Option]:
    """Returns the options by name; one without a check gets that of its parameter."""
    return {
        name: each if each.check is not None else each._replace(check=table[each.parameter])
        for name, each in named.items()
    }


def _of(default: Any, parameter: str, *, chains: bool = True, reads: bool = True) -> Option:
    return Option(None, default, parameter, chains, reads)


class ProducerConfiguration(_WithProperties):
    """A configuration whose options are the parameters of `Client.create_producer`, as in Pulsar's C++ client. A method
    raises InvalidConfiguration for a wrong value, TypeError if an option that is only set is read."""

    _options = _rows(
        options.PRODUCER_CHECKS,
        access_mode=_of(ProducerAccessMode.Shared, "access_mode"),
        batching_enabled=_of(True, "batching_enabled"),
        batching_max_allowed_size_in_bytes=_of(131072, "batching_max_allowed_size_in_bytes"),
        batching_max_messages=_of(1000, "batching_max_messages"),
        batching_max_publish_delay_ms=_of(10, "batching_max_publish_delay_ms"),
        batching_type=_of(BatchingType.Default, "batching_type"),
        block_if_queue_full=_of(False, "block_if_queue_full"),
        chunking_enabled=_of(False, "chunking_enabled"),
        compression_type=_of(CompressionType.NONE, "compression_type"),
        crypto_key_reader=_of(None, "crypto_key_reader", reads=False),
        encryption_key=_of(None, "encryption_key", reads=False),
        initial_sequence_id=_of(-1, "initial_sequence_id"),
        lazy_start_partitioned_producers=_of(False, "lazy_start_partitioned_producers"),
        max_pending_messages=_of(1000, "max_pending_messages"),
        max_pending_messages_across_partitions=_of(50000, "max_pending_messages_across_partitions"),
        message_router=Option(FUNCTION_CHECK, None, "message_router", chains=False, reads=False),
        partitions_routing_mode=_of(PartitionsRoutingMode.RoundRobinDistribution, "message_routing_mode"),
        producer_name=_of("", "producer_name"),
        schema=Option(_INFO, _BYTES),
        send_timeout_millis=_of(30000, "send_timeout_millis"),
    )


class ConsumerConfiguration(_WithProperties):
    """A configuration whose options are the parameters of `Client.subscribe`, as in Pulsar's C++ client. A method
    raises InvalidConfiguration for a wrong value."""

    _options = _rows(
        options.CONSUMER_CHECKS,
        auto_ack_oldest_chunked_message_on_queue_full=_of(False, "auto_ack_oldest_chunked_message_on_queue_full"),
        batch_index_ack_enabled=_of(False, "batch_index_ack_enabled"),
        batch_receive_policy=Option(
            make_instance_check(ConsumerBatchReceivePolicy, optional=False), BatchReceivePolicy(),
            "batch_receive_policy",
            chains=False,
        ),
        broker_consumer_stats_cache_time_ms=_of(30000, "broker_consumer_stats_cache_time_ms", chains=False),
        consumer_name=_of("", "consumer_name", chains=False),
        consumer_type=_of(ConsumerType.Exclusive, "consumer_type"),
        crypto_failure_action=_of(ConsumerCryptoFailureAction.FAIL, "crypto_failure_action"),
        crypto_key_reader=_of(None, "crypto_key_reader", reads=False),
        dead_letter_policy=_of(DeadLetterPolicyBuilder().build(), "dead_letter_policy", chains=False),
        key_shared_policy=_of(ConsumerKeySharedPolicy(), "key_shared_policy"),
        max_pending_chunked_message=_of(10, "max_pending_chunked_message"),
        max_total_receiver_queue_size_across_partitions=_of(
            50000, "max_total_receiver_queue_size_across_partitions", chains=False
        ),
        message_listener=Option(FUNCTION_CHECK, None, "message_listener", reads=False),
        negative_ack_redelivery_delay_ms=_of(60000, "negative_ack_redelivery_delay_ms", chains=False),
        pattern_auto_discovery_period=_of(60, "pattern_auto_discovery_period", chains=False),
        read_compacted=_of(False, "is_read_compacted", chains=False),
        receiver_queue_size=_of(1000, "receiver_queue_size", chains=False),
        regex_subscription_mode=_of(RegexSubscriptionMode.PersistentOnly, "regex_subscription_mode"),
        replicate_subscription_state_enabled=_of(False, "replicate_subscription_state_enabled", chains=False),
        schema=Option(_INFO, _BYTES),
        start_message_id_inclusive=_of(False, "start_message_id_inclusive"),
        subscription_initial_position=_of(InitialPosition.Latest, "initial_position", chains=False),
        unacked_messages_timeout_ms=_of(0, "unacked_messages_timeout_ms", chains=False),
    )


class ReaderConfiguration(Configuration):
    """A configuration whose options are the parameters of `Client.create_reader`, as in Pulsar's C++ client. A method
    raises InvalidConfiguration for a wrong value."""

    _options = _rows(
        options.READER_CHECKS,
        crypto_failure_action=_of(ConsumerCryptoFailureAction.FAIL, "crypto_failure_action"),
        crypto_key_reader=_of(None, "crypto_key_reader", reads=False),
        read_compacted=_of(False, "is_read_compacted", chains=False),
        reader_listener=Option(FUNCTION_CHECK, None, "reader_listener", reads=False),
        reader_name=_of("", "reader_name", chains=False),
        receiver_queue_size=_of(1000, "receiver_queue_size", chains=False),
        schema=Option(_INFO, _BYTES),
        start_message_id_inclusive=_of(False, "start_message_id_inclusive"),
        subscription_role_prefix=_of("", "subscription_role_prefix", chains=False),
    )


class ClientConfiguration(Configuration):
    """A configuration whose options are the parameters of `Client`, as in Pulsar's C++ client. A method raises
    InvalidConfiguration for a wrong value."""

    _options: ClassVar[dict[str, Option]] = {
        "authentication": Option(make_instance_check(Authentication, optional=False), None, "authentication",
        reads=False),
        "concurrent_lookup_requests": Option(make_whole_number_check(1), 50000, "concurrent_lookup_requests"),
        "connection_timeout": Option(make_whole_number_check(1), 10000, "connection_timeout_ms"),
        "io_threads": Option(make_whole_number_check(1), 1, "io_threads"),
        "listener_name": Option(TEXT_CHECK, "", "listener_name", reads=False),
        "message_listener_threads": Option(make_whole_number_check(1), 1, "message_listener_threads"),
        "operation_timeout_seconds": Option(make_whole_number_check(1), 30, "operation_timeout_seconds"),
        "stats_interval_in_seconds": Option(make_whole_number_check(0), 600, "stats_interval_in_seconds"),
        "tls_allow_insecure_connection": Option(BOOLEAN_CHECK, False, "tls_allow_insecure_connection"),
        "tls_certificate_file_path": Option(TEXT_CHECK, "", "tls_certificate_file_path"),
        "tls_private_key_file_path": Option(TEXT_CHECK, "", "tls_private_key_file_path"),
        "tls_trust_certs_file_path": Option(TEXT_CHECK, "", "tls_trust_certs_file_path", reads=False),
        "tls_validate_hostname": Option(BOOLEAN_CHECK, False, "tls_validate_hostname", reads=False),
    }  # fmt: skip

    def set_logger(self, logger: object) -> ClientConfiguration:
        """Makes the client write its log lines to `logger`, a logger of Python's `logging`, a ConsoleLogger or a
        FileLogger. Returns the configuration. Raises InvalidConfiguration for any other object."""
        check_logger(logger)
        self._values["logger"] = logger
        return self

    def set_console_logger(self, level: LoggerLevel) -> ClientConfiguration:
        """Makes the client write log lines of the level `level` or above to standard output. Returns the
        configuration. Raises InvalidConfiguration if `level` is no LoggerLevel."""
        return self.set_logger(ConsoleLogger(level))

    def set_file_logger(self, level: LoggerLevel, file: str) -> ClientConfiguration:
        """Makes the client append log lines of the level `level` or above to the file with the path `file`. Returns the
        configuration. Raises InvalidConfiguration for an argument of a wrong type."""
        return self.set_logger(FileLogger(level, file))

    def parameters(self) -> dict[str, Any]:
        found = super().parameters()
        return {**found, "logger": self._values["logger"]} if "logger" in self._values else found


# --------------------------------------------------------------------------------------------------------- names


__all__ = [
    "ClientConfiguration", "ConsumerConfiguration", "DeadLetterPolicy", "ProducerConfiguration", "ReaderConfiguration",
    "SchemaInfo", "SchemaType",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(__name__.removesuffix(".client.native")), name)
