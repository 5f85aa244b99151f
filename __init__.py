"""Magnetar: a durable message broker with Pulsar's model and BookKeeper's storage, in Python.

This module has the public names of the SDK for programs without asyncio. With `import magnetar as pulsar`, programs for
Pulsar's Python client run unchanged. Each name is loaded when it is first used, so that importing the package takes a
few milliseconds and does not load gRPC.

    import magnetar

    with magnetar.Client("magnetar://localhost:7650") as client:
        producer = client.create_producer("flights")
        producer.send(b"UA 1545")

`magnetar.asyncio` has the same for asyncio, `magnetar.schema` the schemas, `magnetar.admin` the administration.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .proto import versions as _versions

__version__ = _versions.PRODUCT

if TYPE_CHECKING:
    from .client import admin, functions, streams
    from .client import aio as asyncio  # noqa: F401 - see __all__
    from .client.blocking import client as tableview
    from .client.blocking.client import (
        Client,
        Consumer,
        Producer,
        PullConsumer,
        Reader,
        TableView,
        Transaction,
        process,
    )
    from .client.blocking.consumer import Listening
    from .client.blocking.producer import Half
    from .client.common import errors as exceptions
    from .client.common.errors import (
        AlreadyClosed,
        AuthenticationError,
        AuthorizationError,
        BrokerMetadataError,
        BrokerPersistenceError,
        ChecksumError,
        ConnectError,
        ConsumerAssignError,
        ConsumerBusy,
        ConsumerNotFound,
        ConsumerNotInitialized,
        CryptoError,
        CumulativeAcknowledgementNotAllowedError,
        DataLost,
        Disconnected,
        ErrorGettingAuthenticationData,
        HalfParked,
        IncompatibleSchema,
        Interrupted,
        InvalidConfiguration,
        InvalidMessage,
        InvalidTopicName,
        InvalidTxnStatusError,
        InvalidUrl,
        LookupError,
        MagnetarError,
        MagnetarException,
        MemoryBufferIsFull,
        MessageTooBig,
        NoMessageAvailable,
        NotAllowedError,
        NotConnected,
        OperationNotSupported,
        OutcomeUnknown,
        ProducerBlockedQuotaExceededError,
        ProducerBlockedQuotaExceededException,
        ProducerBusy,
        ProducerFenced,
        ProducerNotInitialized,
        ProducerQueueIsFull,
        PulsarException,
        ReadError,
        Result,
        ServiceUnitNotReady,
        SinkFenced,
        SubscriptionNotFound,
        Timeout,
        TooManyLookupRequestException,
        TopicNotFound,
        TopicTerminated,
        TransactionAborted,
        TransactionConflict,
        TransactionCoordinatorNotFoundError,
        TransactionEnded,
        TransactionFenced,
        TransactionForgotten,
        TransactionNotFound,
        UnknownError,
        UnsupportedVersionError,
    )
    from .client.common.loggers import ConsoleLogger, FileLogger, LoggerLevel
    from .client.common.rate_limits import BreakerState, CircuitBreaker, CircuitOpen, RateLimiter
    from .client.connect.authentication import (
        Authentication,
        AuthenticationAthenz,
        AuthenticationBasic,
        AuthenticationOauth2,
        AuthenticationTLS,
        AuthenticationToken,
    )
    from .client.connect.service_info import AutoClusterFailover, ServiceInfo, ServiceInfoProvider
    from .client.consume.assignment_core import assign_range, assign_round_robin, assign_sticky
    from .client.consume.consumer import PartitionProgress
    from .client.consume.listening import ListenerStatistics
    from .client.consume.pull import (
        FileOffsetStore,
        MemoryOffsetStore,
        OffsetKey,
        OffsetStore,
        PullResult,
        PullStatus,
        SubscriptionOffsetStore,
    )
    from .client.consume.ranges import IndexedMessage, StoredEntry
    from .client.consume.receiver_queue import BatchReceivePolicy, ConsumerBatchReceivePolicy
    from .client.consume.requests import RequestFailed, RequestServerStatistics
    from .client.core.transaction import TransactionState
    from .client.functions import Context, Function, IdentitySerDe, PickleSerDe, SerDe
    from .client.model import schemas as schema
    from .client.model.encryption import CryptoKeyReader, EncryptionContext, EncryptionKey, EncryptionKeyInfo, KeyReader
    from .client.model.hooks import Hook, Sending, SendVetoed, Settlement
    from .client.model.message import Message, MessageBatch
    from .client.model.message_id import MessageId
    from .client.model.schema import BytesSchema
    from .client.model.settings import (
        BatchingType,
        CompressionType,
        ConsumerCryptoFailureAction,
        ConsumerDeadLetterPolicy,
        ConsumerKeySharedPolicy,
        ConsumerType,
        InitialPosition,
        KeySharedMode,
        MultiplierRedeliveryBackoff,
        PartitionsRoutingMode,
        ProducerAccessMode,
        RegexSubscriptionMode,
    )
    from .client.model.tracing import Tracing
    from .client.native import (
        ClientConfiguration,
        ConsumerConfiguration,
        DeadLetterPolicyBuilder,
        KeySharedPolicy,
        ProducerConfiguration,
        ReaderConfiguration,
        SchemaInfo,
        SchemaType,
    )
    from .client.transactions.halves import Decision, HalfCheck, HalfContent
    from .client.transactions.process import Output, ProcessStatistics
    from .proto.states import TxnId
    from .spark_connector.session import spark_session

__all__ = [  # without `asyncio`: `from magnetar import *` must not hide Python's
    "AlreadyClosed",
    "Authentication",
    "AuthenticationAthenz",
    "AuthenticationBasic",
    "AuthenticationError",
    "AuthenticationOauth2",
    "AuthenticationTLS",
    "AuthenticationToken",
    "AuthorizationError",
    "AutoClusterFailover",
    "BatchReceivePolicy",
    "BatchingType",
    "BreakerState",
    "BrokerMetadataError",
    "BrokerPersistenceError",
    "BytesSchema",
    "ChecksumError",
    "CircuitBreaker",
    "CircuitOpen",
    "Client",
    "ClientConfiguration",
    "CompressionType",
    "ConnectError",
    "ConsoleLogger",
    "Consumer",
    "ConsumerAssignError",
    "ConsumerBatchReceivePolicy",
    "ConsumerBusy",
    "ConsumerConfiguration",
    "ConsumerCryptoFailureAction",
    "ConsumerDeadLetterPolicy",
    "ConsumerKeySharedPolicy",
    "ConsumerNotFound",
    "ConsumerNotInitialized",
    "ConsumerType",
    "Context",
    "CryptoError",
    "CryptoKeyReader",
    "CumulativeAcknowledgementNotAllowedError",
    "DataLost",
    "DeadLetterPolicyBuilder",
    "Decision",
    "Disconnected",
    "EncryptionContext",
    "EncryptionKey",
    "EncryptionKeyInfo",
    "ErrorGettingAuthenticationData",
    "FileLogger",
    "FileOffsetStore",
    "Function",
    "Half",
    "HalfCheck",
    "HalfContent",
    "HalfParked",
    "Hook",
    "IdentitySerDe",
    "IncompatibleSchema",
    "IndexedMessage",
    "InitialPosition",
    "Interrupted",
    "InvalidConfiguration",
    "InvalidMessage",
    "InvalidTopicName",
    "InvalidTxnStatusError",
    "InvalidUrl",
    "KeyReader",
    "KeySharedMode",
    "KeySharedPolicy",
    "ListenerStatistics",
    "Listening",
    "LoggerLevel",
    "LookupError",
    "MagnetarError",
    "MagnetarException",
    "MemoryBufferIsFull",
    "MemoryOffsetStore",
    "Message",
    "MessageBatch",
    "MessageId",
    "MessageTooBig",
    "MultiplierRedeliveryBackoff",
    "NoMessageAvailable",
    "NotAllowedError",
    "NotConnected",
    "OffsetKey",
    "OffsetStore",
    "OperationNotSupported",
    "OutcomeUnknown",
    "Output",
    "PartitionProgress",
    "PartitionsRoutingMode",
    "PickleSerDe",
    "ProcessStatistics",
    "Producer",
    "ProducerAccessMode",
    "ProducerBlockedQuotaExceededError",
    "ProducerBlockedQuotaExceededException",
    "ProducerBusy",
    "ProducerConfiguration",
    "ProducerFenced",
    "ProducerNotInitialized",
    "ProducerQueueIsFull",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "PulsarException",
    "RateLimiter",
    "ReadError",
    "Reader",
    "ReaderConfiguration",
    "RegexSubscriptionMode",
    "RequestFailed",
    "RequestServerStatistics",
    "Result",
    "SchemaInfo",
    "SchemaType",
    "SendVetoed",
    "Sending",
    "SerDe",
    "ServiceInfo",
    "ServiceInfoProvider",
    "ServiceUnitNotReady",
    "Settlement",
    "SinkFenced",
    "StoredEntry",
    "SubscriptionNotFound",
    "SubscriptionOffsetStore",
    "TableView",
    "Timeout",
    "TooManyLookupRequestException",
    "TopicNotFound",
    "TopicTerminated",
    "Tracing",
    "Transaction",
    "TransactionAborted",
    "TransactionConflict",
    "TransactionCoordinatorNotFoundError",
    "TransactionEnded",
    "TransactionFenced",
    "TransactionForgotten",
    "TransactionNotFound",
    "TransactionState",
    "TxnId",
    "UnknownError",
    "UnsupportedVersionError",
    "admin",
    "assign_range",
    "assign_round_robin",
    "assign_sticky",
    "exceptions",
    "functions",
    "process",
    "schema",
    "spark_session",
    "streams",
    "tableview",
]

_PLACES = {
    "client.blocking.client": (
        "Client", "Producer", "Consumer", "PullConsumer", "Reader", "TableView", "Transaction",
        "process",
    ),
    "client.consume.assignment_core": ("assign_range", "assign_round_robin", "assign_sticky"),
    "client.consume.consumer": ("PartitionProgress",),
    "client.consume.pull": (
        "FileOffsetStore", "MemoryOffsetStore", "OffsetKey", "OffsetStore", "PullResult", "PullStatus",
        "SubscriptionOffsetStore",
    ),
    "client.core.transaction": ("TransactionState",),
    "client.transactions.halves": ("Decision", "HalfCheck", "HalfContent"),
    "client.transactions.process": ("Output", "ProcessStatistics"),
    "client.blocking.producer": ("Half",),
    "proto.states": ("TxnId",),
    "client.connect.service_info": ("AutoClusterFailover", "ServiceInfo", "ServiceInfoProvider"),
    "client.common.rate_limits": ("BreakerState", "CircuitBreaker", "CircuitOpen", "RateLimiter"),
    "client.blocking.consumer": ("Listening",),
    "client.consume.listening": ("ListenerStatistics",),
    "client.consume.ranges": ("IndexedMessage", "StoredEntry"),
    "client.model.encryption": (
        "EncryptionContext", "EncryptionKey", "CryptoKeyReader", "EncryptionKeyInfo", "KeyReader",
    ),
    "client.model.hooks": ("Hook", "SendVetoed", "Sending", "Settlement"),
    "client.model.message": ("Message", "MessageBatch"),
    "spark_connector.session": ("spark_session",),
    "client.model.message_id": ("MessageId",),
    "client.consume.receiver_queue": ("BatchReceivePolicy", "ConsumerBatchReceivePolicy"),
    "client.consume.requests": ("RequestFailed", "RequestServerStatistics"),
    "client.functions": ("Context", "Function", "IdentitySerDe", "PickleSerDe", "SerDe"),
    "client.native": (
        "DeadLetterPolicyBuilder", "KeySharedPolicy", "ClientConfiguration", "ConsumerConfiguration",
        "ProducerConfiguration", "ReaderConfiguration", "SchemaInfo", "SchemaType",
    ),
    "client.common.loggers": ("ConsoleLogger", "FileLogger", "LoggerLevel"),
    "client.model.schema": ("BytesSchema",),
    "client.model.tracing": ("Tracing",),
    "client.model.settings": (
        "MultiplierRedeliveryBackoff", "BatchingType", "CompressionType", "ConsumerCryptoFailureAction",
        "ConsumerDeadLetterPolicy", "ConsumerKeySharedPolicy", "ConsumerType", "InitialPosition", "KeySharedMode",
        "PartitionsRoutingMode", "ProducerAccessMode", "RegexSubscriptionMode",
    ),
    "client.connect.authentication": (
        "Authentication", "AuthenticationAthenz", "AuthenticationBasic", "AuthenticationOauth2", "AuthenticationTLS",
        "AuthenticationToken",
    ),
}  # fmt: skip
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}
_MODULES = {
    "_pulsar": "client.native",
    "asyncio": "client.aio",
    "schema": "client.model.schemas",
    "admin": "client.admin",
    "exceptions": "client.common.errors",
    "tableview": "client.blocking.table_view",
    "functions": "client.functions",
    "functions.context": "client.functions",
    "functions.function": "client.functions",
    "functions.serde": "client.functions",
    "streams": "client.streams",
    "inbox": "client.inbox",
    "outbox": "client.outbox",
    "outbox.django": "client.outbox.django",
    "outbox.django.apps": "client.outbox.django.apps",
    "inbox.django": "client.inbox.django",
    "inbox.django.apps": "client.inbox.django.apps",
    "schema.definition": "client.model.record",
    "schema.schema": "client.model.schema",
    "schema.schema_avro": "client.model.schema",
    "schema.schema_protobuf": "client.model.composite_schemas",
}
"""Modules under a second name: `import magnetar.asyncio` gives magnetar.client.aio."""


def __getattr__(name: str) -> Any:
    if name in _MODULES and "." not in name:
        value: Any = importlib.import_module(f"{__name__}.{name}")
    elif name in _PLACE_OF:
        value = getattr(importlib.import_module(f".{_PLACE_OF[name]}", __name__), name)
    else:
        errors = None if name.startswith("_") else importlib.import_module(".client.common.errors", __name__)
        value = getattr(errors, name, None) if errors is not None and name in errors.__all__ else None
        if value is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    errors = importlib.import_module(".client.common.errors", __name__)
    return sorted({*globals(), *_PLACE_OF, *(each for each in _MODULES if "." not in each), *errors.__all__})


class _SecondNames:
    """Finds `magnetar.asyncio` and the other second names, which have no files of their own, as their modules. After
    `sys.modules["pulsar"] = magnetar` it finds `pulsar.asyncio` too: programs for Pulsar run without a change."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        package, _, name = fullname.partition(".")
        if name not in _MODULES or sys.modules.get(package) is not sys.modules[__name__]:
            return None
        has_modules = any(each.startswith(f"{name}.") for each in _MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=has_modules)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        _, _, name = spec.name.partition(".")
        return importlib.import_module(f".{_MODULES[name]}", __name__)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module was executed under its own name."""


sys.meta_path.insert(0, _SecondNames())  # before the path is searched, which would load second copies
