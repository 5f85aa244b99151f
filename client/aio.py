"""The module `magnetar.asyncio`: the SDK for asyncio, with the names of Pulsar's `pulsar.asyncio` and more.

    from magnetar.asyncio import Client

The package's `__init__` registers this module as `magnetar.asyncio` when it is first used. The file itself cannot have
that name: a file `asyncio.py` in the repository's root would shadow the standard library for every program that is
started there."""

from __future__ import annotations

import asyncio
from typing import Any

from ..proto.states import TxnId
from .client import Client
from .common.errors import PulsarException, Result, make_exception_for_result
from .common.loggers import ignore_error, run_logging_errors
from .common.rate_limits import AsyncRateLimiter as RateLimiter
from .common.rate_limits import BreakerState, CircuitBreaker, CircuitOpen
from .consume.consumer import Consumer, PartitionProgress
from .consume.listening import ListenerStatistics, Listening
from .consume.pull import (
    FileOffsetStore,
    MemoryOffsetStore,
    OffsetKey,
    OffsetStore,
    PullConsumer,
    PullResult,
    PullStatus,
    SubscriptionOffsetStore,
)
from .consume.ranges import IndexedMessage, Reader, StoredEntry
from .consume.receiver_queue import ConsumerBatchReceivePolicy
from .consume.requests import RequestFailed, RequestServer, RequestServerStatistics
from .consume.table_view import TableView
from .core.transaction import TransactionState
from .model.encryption import CryptoKeyReader, EncryptionContext, EncryptionKey, EncryptionKeyInfo, KeyReader
from .model.hooks import Hook, Sending, SendVetoed, Settlement
from .model.message import ConsumerEventListener, Message
from .model.message_id import MessageId
from .model.settings import (
    BatchingType,
    CompressionType,
    ConsumerCryptoFailureAction,
    ConsumerDeadLetterPolicy,
    ConsumerKeySharedPolicy,
    ConsumerType,
    InitialPosition,
    PartitionsRoutingMode,
    ProducerAccessMode,
    RegexSubscriptionMode,
)
from .produce.entry_writer import Extras
from .produce.producer import Half, Producer
from .pull_group import PullGroup
from .transactions.coordinators import Batch, BatchOutcome, SinkStatus
from .transactions.halves import Decision, HalfCheck, HalfContent
from .transactions.process import Output, ProcessStatistics, process
from .transactions.transaction import Transaction


def _set_future(future: asyncio.Future[Any], result: Result, value: Any) -> None:
    """Ends `future` from any thread: with `value`, or with the exception of `result`. Does nothing if it has ended.
    Programs that wait for callbacks of the blocking client import this function from pulsar.asyncio."""

    def end() -> None:
        if future.done():
            return
        if result is Result.Ok:
            future.set_result(value)
        else:
            future.set_exception(make_exception_for_result(result))

    future.get_loop().call_soon_threadsafe(run_logging_errors, end, ignore_error)


__all__ = [
    "Batch",
    "BatchOutcome",
    "BatchingType",
    "BreakerState",
    "CircuitBreaker",
    "CircuitOpen",
    "Client",
    "CompressionType",
    "Consumer",
    "ConsumerBatchReceivePolicy",
    "ConsumerCryptoFailureAction",
    "ConsumerDeadLetterPolicy",
    "ConsumerEventListener",
    "ConsumerKeySharedPolicy",
    "ConsumerType",
    "CryptoKeyReader",
    "Decision",
    "EncryptionContext",
    "EncryptionKey",
    "EncryptionKeyInfo",
    "Extras",
    "FileOffsetStore",
    "Half",
    "HalfCheck",
    "HalfContent",
    "Hook",
    "IndexedMessage",
    "InitialPosition",
    "KeyReader",
    "ListenerStatistics",
    "Listening",
    "MemoryOffsetStore",
    "Message",
    "MessageId",
    "OffsetKey",
    "OffsetStore",
    "Output",
    "PartitionProgress",
    "PartitionsRoutingMode",
    "ProcessStatistics",
    "Producer",
    "ProducerAccessMode",
    "PullConsumer",
    "PullGroup",
    "PullResult",
    "PullStatus",
    "PulsarException",
    "RateLimiter",
    "Reader",
    "RegexSubscriptionMode",
    "RequestFailed",
    "RequestServer",
    "RequestServerStatistics",
    "Result",
    "SendVetoed",
    "Sending",
    "Settlement",
    "SinkStatus",
    "StoredEntry",
    "SubscriptionOffsetStore",
    "TableView",
    "Transaction",
    "TransactionState",
    "TxnId",
    "process",
]
