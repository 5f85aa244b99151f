"""The blocking client: `pulsar-client`'s classes over the asyncio ones, which run in one loop thread per process.

This module has the client; client/blocking/producer.py and client/blocking/consumer.py have what it opens. After a fork
every object is opened again where that can work, see client/common/closing.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from threading import Semaphore
from typing import Any, TypeVar
from weakref import finalize

from ...proto.states import TxnId
from .. import client as aio
from ..common.checks import TRANSACTION, check
from ..common.closing import EPOCH, ClosedAfterWith
from ..common.errors import AlreadyClosed, InvalidConfiguration
from ..connect.service_info import AutoClusterFailover, ServiceInfo, ServiceInfoProvider
from ..consume.ranges import StoredEntry
from ..consume.receiver_queue import ConsumerBatchReceivePolicy
from ..core.transaction import TransactionState
from ..model.encryption import KeyReader
from ..model.message import ConsumerEventListener, Message
from ..model.message_id import MessageId
from ..model.options import CONSUMER, READER, given
from ..model.schema import Schema
from ..model.settings import (
    BatchingType,
    CompressionType,
    ConsumerCryptoFailureAction,
    ConsumerDeadLetterPolicy,
    ConsumerKeySharedPolicy,
    ConsumerType,
    InitialPosition,
    PartitionsRoutingMode,
    ProducerAccessMode,
    RedeliveryBackoff,
    RegexSubscriptionMode,
)
from ..transactions.coordinators import SinkStatus
from ..transactions.process import Output
from .consumer import Consumer, ConsumerEvents, Reader
from .loop_thread import close_soon, loop_thread
from .process import inner_output
from .producer import Bodies, Half, Producer, Transaction, finish
from .table_view import TableView

CheckFunction = TypeVar("CheckFunction", bound=Callable[..., Any])

__all__ = ["Client", "Consumer", "Half", "Producer", "Reader", "TableView", "Transaction"]


class Client(ClosedAfterWith):
    """A connection to a Magnetar cluster; opens producers, consumers, readers and table views. Blocking.

        with magnetar.Client("magnetar://localhost:7650") as client:
            producer = client.create_producer("flights")
            consumer = client.subscribe("flights", "board")

    Parameters and defaults are those of `pulsar.Client`; the unit of a time is in its name (`_seconds`, `_ms`). The
    client connects when it is first used. `memory_limit_bytes` bounds the messages of all producers without an
    outcome and those in all receiver queues together (0: not at all); without it receiver queues have 64 MiB, and
    producers `max_pending_messages`.

    Threads: any thread may use a client and what it opens. The work is done in one event loop thread per process; a
    blocking call in a callback of that thread raises Interrupted. Errors are subclasses of `magnetar.PulsarException`:
    InvalidUrl, InvalidConfiguration and OperationNotSupported for a wrong parameter; AlreadyClosed after `close`;
    ConnectError and Timeout when no broker answers within `operation_timeout_seconds`.
    """

    def __init__(
        self,
        service_url: str | AutoClusterFailover | ServiceInfoProvider,
        authentication: object = None,
        operation_timeout_seconds: float = 30,
        io_threads: int = 1,
        message_listener_threads: int = 1,
        concurrent_lookup_requests: int = 50000,
        log_conf_file_path: str | None = None,
        stats_interval_in_seconds: int = 600,
        use_tls: bool = False,
        tls_trust_certs_file_path: str | None = None,
        tls_allow_insecure_connection: bool = False,
        tls_validate_hostname: bool = False,
        logger: object = None,
        connection_timeout_ms: int = 10000,
        listener_name: str | None = None,
        tls_private_key_file_path: str | None = None,
        tls_certificate_file_path: str | None = None,
        *,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self._arguments = given(locals())
        self._inner = aio.Client(**self._arguments)
        self._epoch = EPOCH[0]
        self._closed = False
        self._turns = Semaphore(self._inner.settings.message_listener_threads)
        self._dropped: finalize[..., Any] | None = None
        self._bodies = Bodies()

    def inner(self) -> aio.Client:
        """The asyncio client of this process; a new one after a fork."""
        if self._closed:
            raise AlreadyClosed("the client is closed")
        if self._epoch != EPOCH[0]:
            self._inner = aio.Client(**self._arguments)
            self._epoch = EPOCH[0]
            self._keep()
        if self._dropped is None:
            self._dropped = finalize(self, close_soon, loop_thread(), self._inner, self._epoch)
            self._dropped.atexit = False
        return self._inner

    def _keep(self) -> None:
        """Keeps the garbage collector from closing the client, which is closed or opened again."""
        if self._dropped is not None:
            self._dropped.detach()
            self._dropped = None

    def create_producer(
        self,
        topic: str,
        producer_name: str | None = None,
        schema: Schema | None = None,
        initial_sequence_id: int | None = None,
        send_timeout_millis: int = 30000,
        compression_type: CompressionType = CompressionType.NONE,
        max_pending_messages: int = 1000,
        max_pending_messages_across_partitions: int = 50000,
        block_if_queue_full: bool = False,
        batching_enabled: bool = False,
        batching_max_messages: int = 1000,
        batching_max_allowed_size_in_bytes: int = 131072,
        batching_max_publish_delay_ms: int = 10,
        chunking_enabled: bool = False,
        message_routing_mode: PartitionsRoutingMode = PartitionsRoutingMode.RoundRobinDistribution,
        lazy_start_partitioned_producers: bool = False,
        properties: dict[str, str] | None = None,
        batching_type: BatchingType = BatchingType.Default,
        encryption_key: str | None = None,
        crypto_key_reader: KeyReader | None = None,
        access_mode: ProducerAccessMode = ProducerAccessMode.Shared,
        message_router: Callable[[Any, int], int] | None = None,
        *,
        initial_subscription_name: str | None = None,
        encryption_keys: Sequence[str] | None = None,
    ) -> Producer:
        """Opens a producer of `topic`. docs/settings.md has the parameters and their costs. Batching is off by default,
        as in `pulsar-client`."""
        options = given(locals())
        epoch = EPOCH[0]

        def open_(client: aio.Client) -> Any:
            if EPOCH[0] != epoch:
                options["producer_name"] = None  # a forked child must not take its parent's
            return client.create_producer(**options)

        return Producer(self.inner, open_)

    def subscribe(
        self,
        topic: aio.Topics,
        subscription_name: str,
        consumer_type: ConsumerType = ConsumerType.Exclusive,
        schema: Schema | None = None,
        message_listener: Callable[[Consumer, Message], object] | None = None,
        receiver_queue_size: int = 1000,
        max_total_receiver_queue_size_across_partitions: int = 50000,
        consumer_name: str | None = None,
        unacked_messages_timeout_ms: int | None = None,
        broker_consumer_stats_cache_time_ms: int = 30000,
        negative_ack_redelivery_delay_ms: int = 60000,
        is_read_compacted: bool = False,
        properties: dict[str, str] | None = None,
        pattern_auto_discovery_period: int = 60,
        initial_position: InitialPosition = InitialPosition.Latest,
        crypto_key_reader: KeyReader | None = None,
        replicate_subscription_state_enabled: bool = False,
        max_pending_chunked_message: int = 10,
        auto_ack_oldest_chunked_message_on_queue_full: bool = False,
        start_message_id_inclusive: bool = False,
        batch_receive_policy: ConsumerBatchReceivePolicy | None = None,
        key_shared_policy: ConsumerKeySharedPolicy | None = None,
        batch_index_ack_enabled: bool = False,
        regex_subscription_mode: RegexSubscriptionMode = RegexSubscriptionMode.PersistentOnly,
        dead_letter_policy: ConsumerDeadLetterPolicy | None = None,
        crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL,
        *,
        negative_ack_redelivery_backoff: RedeliveryBackoff | None = None,
        ack_timeout_redelivery_backoff: RedeliveryBackoff | None = None,
        ack_receipt_enabled: bool = False,
        enable_retry: bool = False,
        priority_level: int = 0,
        consumer_event_listener: ConsumerEventListener | None = None,
        isolation: str = "read_committed",
        redelivery_order: str = "any",
    ) -> Consumer:
        """Opens a consumer of a subscription, which is created when it does not exist. docs/settings.md has the
        parameters and their costs. `topic`: a name, a list of names, or a compiled pattern.

        `message_listener(consumer, message)` is called in another thread, in order; at most `message_listener_threads`
        listeners of all consumers and readers of this client run at the same time.

        `isolation` is of the subscription: read_uncommitted shows what transactions wrote before they commit, and what
        they aborted. `redelivery_order` too: with "key" a message that failed (a negative acknowledgement, or none in
        time) holds back what follows it, of its key on KeyShared, of the partition on Exclusive and Failover, until it
        is acknowledged or a dead letter; the broker's back-off says when it comes again.
        `priority_level` and `consumer_event_listener` are those of Pulsar's Java client. The event listener has its own
        thread too.
        """
        options = given(locals(), "message_listener", "consumer_event_listener")
        check(CONSUMER, given(locals(), "options", "topic"))
        events = ConsumerEvents(consumer_event_listener) if consumer_event_listener is not None else None
        return Consumer(
            self.inner, lambda client: client.subscribe(**options, consumer_event_listener=events), message_listener,
            self._turns, events,
        )  # fmt: skip

    def create_reader(
        self,
        topic: str,
        start_message_id: MessageId,
        schema: Schema | None = None,
        reader_listener: Callable[[Reader, Message], object] | None = None,
        receiver_queue_size: int = 1000,
        reader_name: str | None = None,
        subscription_role_prefix: str | None = None,
        is_read_compacted: bool = False,
        crypto_key_reader: KeyReader | None = None,
        start_message_id_inclusive: bool = False,
        crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL,
        *,
        isolation: str = "read_committed",
    ) -> Reader:
        """Opens a reader that starts after `start_message_id` (at it, when `start_message_id_inclusive`).

        `reader_listener(reader, message)` is called in a thread of its own.
        """
        options = given(locals(), "reader_listener")
        check(READER, given(locals(), "options", "topic"))

        def open_(client: aio.Client, start: MessageId, inclusive: bool) -> Any:
            return client.create_reader(
                **{**options, "start_message_id": start, "start_message_id_inclusive": inclusive}
            )

        return Reader(self.inner, open_, start_message_id, start_message_id_inclusive, reader_listener, self._turns)

    def create_table_view(
        self, topic: str, subscription_name: str | None = None, schema: Schema | None = None,
        *, crypto_key_reader: KeyReader | None = None,
    ) -> TableView:  # fmt: skip
        """Opens a table of the latest value of each key, kept up to date. It contains all that is stored now.
        CryptoError: a message cannot be decrypted."""
        options = given(locals())
        return TableView(self.inner, lambda client: client.create_table_view(**options))

    def transaction(self, timeout: float = 60, *, name: str | None = None, id: str | None = None) -> Transaction:
        """Begins a transaction: what is sent and acknowledged in it counts together, or not at all.

            with client.transaction() as txn:
                producer.send(b"…", txn=txn)
                consumer.acknowledge(message, txn=txn)

        docs/transactions.md has the rules. It is aborted `timeout` seconds after its first operation. With a `name` (or
        `id`, the same) a later client that begins a transaction of that name fences this one.
        """
        return Transaction(self.inner(), timeout, name, id, self._bodies)

    def sink_status(self, sink_id: str) -> SinkStatus | None:
        """Returns the last batch that was committed for a sink, and its query; None: none was."""
        return loop_thread().run(self.inner().sink_status(sink_id))

    def commit_transaction(self, txn_id: TxnId | str) -> None:
        """Commits a transaction that any program prepared; once more is no harm. TransactionAborted,
        TransactionForgotten; InvalidTxnStatusError: it is open."""
        loop_thread().run(self.inner().commit_transaction(txn_id))

    def abort_transaction(self, txn_id: TxnId | str) -> None:
        """Aborts a transaction of any program of this role, prepared or open; once more is no harm.
        InvalidTxnStatusError: it is committed."""
        loop_thread().run(self.inner().abort_transaction(txn_id))

    def half(
        self, outputs: Sequence[Output], *, group: str, check_key: str = "", check_after: float = 0
    ) -> Half:
        """Prepares a half, like `Producer.prepare`, of up to 100 messages to any topics, which count together: each an
        `Output` with its producer, of this client."""
        inner = [inner_output(each) for each in outputs]
        work = self.inner().half(inner, group=group, check_key=check_key, check_after=check_after)
        return Half(loop_thread(), loop_thread().run(work))

    def on_check(self, group: str) -> Callable[[CheckFunction], CheckFunction]:
        """Registers a function that decides half messages of a group whose program does not say, as long as this client
        is open.

            @client.on_check(group="orders")
            def check(half: magnetar.HalfCheck) -> magnetar.Decision:
                return magnetar.Decision.COMMIT if order_exists(half.check_key) else magnetar.Decision.UNKNOWN

        It runs in a thread of its own, several at a time. It reads what the program stored elsewhere, such as a row of
        its database: any program of the group may be asked. docs/transactions.md.
        """

        def register(function: CheckFunction) -> CheckFunction:
            if inspect.iscoroutinefunction(function):
                raise InvalidConfiguration("a coroutine function needs magnetar.asyncio.Client")

            async def work() -> None:
                self.inner().on_check(group)(function)

            loop_thread().run(work())
            return function

        return register

    def commit_half(self, half_id: TxnId | str) -> None:
        """Commits, like `Half.commit`, a half that any program of this role prepared."""
        finish(loop_thread(), self.inner().commit_half(half_id))

    def rollback_half(self, half_id: TxnId | str) -> None:
        """Rolls back, like `Half.rollback`, a half that any program of this role prepared."""
        finish(loop_thread(), self.inner().rollback_half(half_id))

    def transaction_status(self, txn_id: TxnId | str) -> TransactionState:
        """Returns OPEN, PREPARED, COMMITTED or ABORTED, as its coordinator says; `txn_id`: `Transaction.id`, or its
        text. TransactionForgotten: it ended too long ago."""
        return loop_thread().run(self.inner().transaction_status(txn_id))

    def get_service_info(self) -> ServiceInfo:
        """Returns where the client connects now."""
        return self.inner().get_service_info()

    def get_topic_partitions(self, topic: str) -> list[str]:
        """Returns the full names of the partitions; the topic itself when it has none or does not exist. Creates
        nothing."""
        return loop_thread().run(self.inner().get_topic_partitions(topic))

    def read_range(
        self, topic: str, first_index: int, end_index: int, *, crypto_key_reader: KeyReader | None = None,
        incarnation: int = 0,
    ) -> Iterator[list[StoredEntry]]:
        """The entries with the messages `first_index` … `end_index - 1` of one partition, in order, as they arrive.

            for entries in client.read_range("flights-partition-0", 1000, 2000):
                for message in (each for entry in entries for each in entry.messages()):
                    ...

        As asyncio's `Client.read_range`. Close the iterator to end early.
        """
        entries = self.inner().read_range(
            topic, first_index, end_index, crypto_key_reader=crypto_key_reader, incarnation=incarnation
        )

        async def following() -> list[StoredEntry] | None:
            return await anext(entries, None)

        try:
            while (found := loop_thread().run(following())) is not None:
                yield found
        finally:
            loop_thread().run(entries.aclose())

    def shutdown(self) -> None:
        """Ends everything at once; messages that are not acknowledged yet have an unknown outcome."""
        self._keep()
        if not self._closed and self._epoch == EPOCH[0]:
            loop_thread().run(self._shutdown())
        self._closed = True

    async def _shutdown(self) -> None:
        self._inner.shutdown()
        await self._inner.close()

    def close(self, timeout: float | None = None) -> None:
        """Flushes and closes all producers, sends pending acks and closes consumers, readers and tables.

        What is not closed in order after `timeout` seconds ends at once; None: CLOSE_QUIET_S seconds after the last
        answer of a broker, and at most the operation time-out. Timeout: messages have no outcome by then, and may be
        stored. AlreadyClosed: the client is closed.
        """
        if timeout is not None:
            check(TRANSACTION, {"timeout": timeout})
        if self._closed:
            raise AlreadyClosed("the client is closed")
        self._closed = True
        self._keep()
        if self._epoch == EPOCH[0]:
            loop_thread().run(self._inner.close(timeout))
