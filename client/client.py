"""The client for asyncio: it opens producers, consumers, readers and table views.

    async with Client("magnetar://localhost:7650") as client:
        producer = await client.create_producer("flights")

Names, parameters and defaults are those of `pulsar.asyncio`. The client connects when an operation first needs a
broker. All errors are exceptions of the SDK (client/common/errors.py), also for failures of lower layers."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, TypeVar
from weakref import WeakMethod, finalize

from ..proto.errors import MagnetarError
from ..proto.errors import TopicNotFound as WireTopicNotFound
from ..proto.names import TopicName, check_subscription_name
from ..proto.states import TxnId
from ..runtime.network import World
from .common.checks import (
    FUNCTION_CHECK,
    INT64_MAX,
    NAME_CHECK,
    TRANSACTION_CHECKS,
    ParameterCheck,
    WrongMessageType,
    WrongTopic,
    WrongTopicType,
    WrongValue,
    check_message_parameters,
    check_parameter,
    check_parameters,
    make_instance_check,
    make_whole_number_check,
    shorten_value,
    to_plain_text,
)
from .common.closing import ClosedAfterAsyncWith, close_all_parts, timeout_after_silence
from .common.errors import (
    AlreadyClosed,
    PulsarException,
    Timeout,
    TopicNotFound,
    run_translating_errors,
    translate_error,
)
from .common.loggers import StatisticsReporter, attach_logger
from .common.rate_limits import CircuitBreaker, SharedRateLimiter
from .connect.connections import Connections, make_client_world
from .connect.service_info import AutoClusterFailover, ClientCluster, ServiceInfo, ServiceInfoProvider
from .connect.topic_watch import TopicPattern, TopicPatternWatch
from .consume.consumer import Consumer
from .consume.listening import ListenOptions
from .consume.pull import OffsetStore, PullConsumer
from .consume.ranges import ClientRangeReader, Reader, StoredEntry
from .consume.receiver_queue import ConsumerBatchReceivePolicy
from .consume.requests import Requester, RequestServer
from .consume.table_view import TableView
from .core.transaction import TransactionState
from .model.encryption import KeyReader
from .model.hooks import Hook
from .model.message import ConsumerEventListener, Message
from .model.message_id import MessageId
from .model.options import (
    CONSUMER_CHECKS,
    READER_CHECKS,
    START_PARAMETERS,
    SubscriptionStart,
    copy_parameters,
    make_client_settings,
    make_consumer_settings,
    make_producer_settings,
)
from .model.schema import Schema
from .model.settings import (
    BatchingType,
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
    RedeliveryBackoff,
    RegexSubscriptionMode,
)
from .model.tracing import Tracing
from .produce.entry_writer import Extras
from .produce.partition_producer import PartitionProducer
from .produce.producer import Half, Producer
from .transactions import coordinators as batches
from .transactions.coordinators import Batch, BatchOutcome, SinkStatus
from .transactions.halves import HALF_CHECKS as HALF
from .transactions.halves import ClientHalfMessages, HalfCheckWatch
from .transactions.process import Output
from .transactions.transaction import Transaction, Transactions

T = TypeVar("T")
CheckFunction = TypeVar("CheckFunction", bound=Callable[..., Any])
Topics = str | Sequence[str] | re.Pattern[str]

_LOG = logging.getLogger("magnetar.client")
TXN_IDS_CHECK = ParameterCheck("a list of ids of transactions", (list, tuple, set, frozenset))

CLOSE_SILENCE_MAX_S = 5.0
"""Seconds for which `close` waits for brokers that send nothing: longer than a failed broker's topics need to get a new
owner."""
REQUEST_REDELIVERY_MS = 1000
"""After this time in ms a request that a server gave back is delivered again."""
PRUNE_ABOVE_OBJECTS = 16
"""Number of opened objects above which closed ones are removed from the client's list, so that not every opening scans
the list."""


class Client(ClosedAfterAsyncWith):
    """A connection to a Magnetar cluster, for asyncio; opens producers, consumers, readers and table views.

        async with magnetar.asyncio.Client("magnetar://localhost:7650") as client:
            producer = await client.create_producer("flights")
            await producer.send(b"UA 1545")

    Parameters and defaults are those of `pulsar.Client`; the unit of a time is in its name (`_seconds`, `_ms`). The
    client connects when it is first used, and belongs to the event loop that uses it first. `logger` gets the log
    messages of all clients of the process (client/common/loggers.py). `memory_limit_bytes` bounds the messages without
    an outcome of all producers and the messages in all receiver queues together (client/common/rate_limits.py); without
    it receiver queues have 64 MiB, and producers `max_pending_messages`. `tracing` records OpenTelemetry spans
    (docs/tracing.md); `hooks` are called for each message (docs/sdk.md). `world` is for tests. Errors are subclasses of
    PulsarException: InvalidUrl, InvalidConfiguration, OperationNotSupported for a wrong parameter; AlreadyClosed after
    `close`; ConnectError and Timeout when no broker answers within `operation_timeout_seconds`; and that of a broker
    that refuses a request, such as TopicNotFound or AuthorizationError."""

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
        latency_statistics: bool = False,
        tracing: Tracing | None = None,
        hooks: Sequence[Hook] | None = None,
        world: World | None = None,
    ) -> None:
        self.settings = make_client_settings(copy_parameters(locals()))
        self._service = ClientCluster(service_url, authentication, copy_parameters(locals()))
        self._world = world
        self._connections: Connections | None = None
        self._reports: StatisticsReporter | None = None
        self._open: dict[Producer | Consumer | PullConsumer | Reader | TableView, None] = {}
        self._detach = finalize(self, detach) if (detach := attach_logger(logger)) is not None else None
        self._looked_at = 0  # how many were open when closed ones were removed last
        self._closed = False
        self._requester: Requester | None = None  # made at the first request

    @property
    def connections(self) -> Connections:
        """Returns the client's connections to the brokers. Makes the object at the first use, in the event loop that
        uses it. Raises AlreadyClosed if the client is closed; InvalidConfiguration or OperationNotSupported if the
        credentials of the cluster are not valid."""
        if self._closed:
            raise AlreadyClosed("the client is closed")
        if self._connections is None:
            self._connections = self._service.connect(self._world or make_client_world(), self.settings)
            self._connections.make_halves = ClientHalfMessages.for_client
            self._reports = StatisticsReporter(self, self.settings.stats_interval_in_seconds)
            if self._world is None:
                self._connections.with_the_loop = WeakMethod(self.shutdown)
                self._connections.close_when_loop_ends()
        return self._connections

    def get_service_info(self) -> ServiceInfo:
        """Returns the service URL and credentials of the cluster to which the client connects now."""
        return self._service.info

    @property
    def transactions(self) -> Transactions:
        """Returns the object that begins and ends the client's transactions. Makes the object at the first use, in the
        event loop that uses it. Raises AlreadyClosed if the client is closed."""
        return Transactions.for_client(self.connections)

    def transaction(self, timeout: float = 60, *, name: str | None = None, id: str | None = None) -> Transaction:
        """Makes a transaction, which has not begun: its messages and acknowledgements count all together, or not at all
        (docs/transactions.md).

            async with client.transaction() as txn:
                await producer.send(b"…", txn=txn)
                await consumer.acknowledge(message, txn=txn)

        Without `async with`: `txn = await client.transaction()`, then `await txn.commit()` or `abort()`. The
        transaction is aborted `timeout` seconds after its first operation. `name` (or `id`, which means the same): when
        a later client begins a transaction with the same name, commits of this transaction raise TransactionFenced.
        Raises InvalidConfiguration for a wrong parameter, AlreadyClosed if the client is closed."""
        check_parameters(TRANSACTION_CHECKS, {"timeout": timeout, "name": name, "id": id})
        if name is not None and id is not None:
            raise WrongValue("name and id are the same: give one of them")
        return Transaction(self.transactions, timeout, name if name is not None else id)

    def transaction_now(self, timeout: float) -> Transaction | None:
        """Returns a transaction that has begun, with a transaction id that was leased in advance. Returns None if no
        leased id is left, or the client is closed or has no connection yet: the caller must use `transaction`.
        `timeout`: seconds, as for `transaction`. Raises InvalidConfiguration if it is wrong. May be called from any
        thread."""
        if self._closed or self._connections is None or self._connections.transactions is None:
            return None
        check_parameters(TRANSACTION_CHECKS, {"timeout": timeout})
        made = Transaction(Transactions.for_client(self._connections), timeout, None)
        return made if made.begin_now() else None

    async def batch_transaction(self, batch: Batch, timeout: float = 60) -> Transaction | None:
        """Begins a transaction that writes a part of a batch to a sink, and returns it. Returns None if the sink has
        committed the batch already: nothing must be written. `timeout`: seconds, as for `transaction`. The program must
        prepare the transaction; `commit_batch` then commits it (client/transactions/coordinators.py). Raises SinkFenced
        if another query writes to the sink; InvalidConfiguration for a wrong parameter; AlreadyClosed if the client is
        closed; Timeout or ConnectError if no coordinator answers."""
        check_parameters(TRANSACTION_CHECKS, {"timeout": timeout})
        check_parameter("batch", batches.BATCH_CHECK, batch)
        batch.check()
        transactions = self.transactions
        found = await run_translating_errors(
            batches.begin_sink_batch(transactions.coordinators, batch, max(1, round(timeout * 1000)))
        )
        return None if found is None else transactions.make_open_transaction(found, timeout)

    async def commit_batch(self, batch: Batch, txn_ids: Sequence[TxnId | str]) -> BatchOutcome:
        """Commits the prepared transactions of a batch together; each batch number of a sink is committed once. Returns
        COMMITTED, or ALREADY if the sink has committed the batch before. Raises TransactionAborted if one of the
        transactions is aborted: then none is committed. Raises SinkFenced if another query writes to the sink. Raises
        OutcomeUnknown if the commit got no answer in time: call `commit_batch` again, or ask `sink_status`. Raises
        InvalidConfiguration for a wrong parameter, AlreadyClosed if the client is closed, Timeout or ConnectError if no
        coordinator was reached."""
        check_parameter("batch", batches.BATCH_CHECK, batch)
        batch.check()
        check_parameter("txn_ids", TXN_IDS_CHECK, txn_ids)
        txns = [_txn_id(each) for each in txn_ids]
        return await run_translating_errors(batches.commit_batch(self.transactions.coordinators, batch, txns))

    async def sink_status(self, sink_id: str) -> SinkStatus | None:
        """Returns the number of the last batch that was committed to a sink, and the query that wrote it; None if no
        batch was committed. Raises InvalidConfiguration if `sink_id` is empty or no text; AlreadyClosed if the client
        is closed; Timeout or ConnectError if no coordinator answers."""
        check_parameter("sink_id", NAME_CHECK, sink_id)
        return await run_translating_errors(batches.get_sink_status(self.transactions.coordinators, sink_id))

    async def commit_transaction(self, txn_id: TxnId | str) -> None:
        """Commits a transaction that any program of this role prepared. May be called again. Raises TransactionAborted
        if it was aborted, TransactionForgotten if it ended too long ago, InvalidTxnStatusError if it is open: only the
        program that began it can commit it then. Raises InvalidConfiguration if `txn_id` is no id; AlreadyClosed if the
        client is closed; Timeout or ConnectError if no coordinator answers."""
        work = batches.end_prepared_transaction(self.transactions.coordinators, _txn_id(txn_id), is_commit=True)
        await run_translating_errors(work)

    async def abort_transaction(self, txn_id: TxnId | str) -> None:
        """Aborts a prepared or open transaction that any program of this role began. May be called again. Raises
        InvalidTxnStatusError if the transaction is committed, TransactionForgotten if it ended too long ago,
        InvalidConfiguration if `txn_id` is no id; AlreadyClosed if the client is closed; Timeout or ConnectError if no
        coordinator answers."""
        work = batches.end_prepared_transaction(self.transactions.coordinators, _txn_id(txn_id), is_commit=False)
        await run_translating_errors(work)

    async def half(
        self, outputs: Sequence[Output], *, group: str, check_key: str = "", check_after: float = 0
    ) -> Half:
        """Stores a half message of 1 to 100 messages to any topics, as `Producer.prepare` does for one message, and
        returns it. The messages are published all together or not at all. `outputs`: one `Output` for each message,
        with a producer of this client. `group`, `check_key`, `check_after` and the errors: as in `Producer.prepare`.
        Raises InvalidMessage if one of `outputs` is no Output, InvalidConfiguration if its producer is another
        client's."""
        check_parameter("outputs", ParameterCheck("a list of Output", (list, tuple)), outputs)
        messages = []
        for each in outputs:
            if not isinstance(each, Output) or not isinstance(each.producer, Producer):
                raise WrongMessageType(f"a message of a half is an Output with a producer, not {shorten_value(each)}")
            if each.producer.connections is not self.connections:
                raise WrongValue("the producer of an Output is another client's")
            extras = Extras(
                each.properties, each.partition_key, each.ordering_key, event_timestamp=each.event_timestamp,
                deliver_at=each.deliver_at, deliver_after=each.deliver_after, priority=each.priority,
            )  # fmt: skip
            messages.append(each.producer.encode_for_later(each.value, extras))
        return await ClientHalfMessages.for_client(self.connections).prepare(messages, group, check_key, check_after)

    def on_check(self, group: str) -> Callable[[CheckFunction], CheckFunction]:
        """Returns a decorator that registers a function of the group `group`. The cluster asks the function about half
        messages that their program has neither committed nor rolled back, as long as this client is open. The decorator
        must be called in the event loop; it raises InvalidConfiguration if the client has a function of the group, or
        its argument is no function, and AlreadyClosed if the client is closed. Raises InvalidConfiguration for a wrong
        `group`.

            @client.on_check(group="orders")
            async def check(half: HalfCheck) -> Decision:
                return Decision.COMMIT if await order_exists(half.check_key) else Decision.UNKNOWN

        A function that is no coroutine function runs in a thread of its own. The function must decide by data that the
        program stored elsewhere, such as a row of its database, because any program of the group may be asked. See
        docs/transactions.md."""
        check_parameters(HALF, {"group": group})

        def register(function: CheckFunction) -> CheckFunction:
            check_parameter("function", FUNCTION_CHECK, function)
            ClientHalfMessages.for_client(self.connections).watch_group(
                group, lambda halves: HalfCheckWatch(halves, group, function)
            )
            return function

        return register

    async def commit_half(self, half_id: TxnId | str) -> None:
        """Publishes a half message that any program of this role prepared; waits and raises as `Half.commit` does.
        `half_id`: its id, or the text of the id; raises InvalidConfiguration if it is neither."""
        await ClientHalfMessages.for_client(self.connections).commit(_txn_id(half_id))

    async def rollback_half(self, half_id: TxnId | str) -> None:
        """Drops a half message that any program of this role prepared; waits and raises as `Half.rollback` does.
        `half_id`: its id, or the text of the id; raises InvalidConfiguration if it is neither."""
        await ClientHalfMessages.for_client(self.connections).rollback(_txn_id(half_id))

    async def transaction_status(self, txn_id: TxnId | str) -> TransactionState:
        """Asks the coordinator for the state of a transaction: OPEN, PREPARED, COMMITTED or ABORTED. `txn_id`:
        `Transaction.id`, or its text; raises InvalidConfiguration if it is neither. Raises TransactionForgotten if the
        transaction ended too long ago; AlreadyClosed if the client is closed; Timeout or ConnectError if no coordinator
        answers."""
        state, refused = await run_translating_errors(self.transactions.coordinators.get_status(_txn_id(txn_id)))
        if refused is not None:
            raise translate_error(refused) from refused
        return TransactionState[state.name]

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns the counters of the open producers and consumers: a title with name and topic → name of the counter →
        number. The client also logs them every `stats_interval_in_seconds`, with their rates since the last time. With
        `latency_statistics` they include how long sends take, in microseconds."""
        open_ = [each for each in self._open if isinstance(each, Producer | Consumer) and not each.is_over]
        return {each.title(): each.statistics() for each in open_}

    async def create_producer(
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
        batching_enabled: bool = True,
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
        filter_properties: Sequence[str] = (),
        batch_by: Sequence[str] = (),
        hooks: Sequence[Hook] | None = None,
        levels: int | None = None,
        acks: str = "quorum",
    ) -> Producer:
        """Opens a producer of `topic`, and returns it when it is open at all partitions (with
        `lazy_start_partitioned_producers` at one). docs/settings.md describes the parameters and their costs. Batching
        is on by default for asyncio and off in the blocking client, as in `pulsar-client`.

        `filter_properties`: up to 16 names of properties. Each batch contains hashes of the values of these properties
        in its messages, so that a broker can skip batches that the filter of a subscription does not match. `batch_by`:
        names of properties by whose values messages are grouped into batches; order is kept within a group.

        `levels`: how many levels of priority the topic has; `send` takes the `priority` of a message, 0 for the most
        urgent one. Each level is a topic of its own, `<topic>-priority-0` and so on; consumers need the same number
        (docs/sdk.md).

        `acks`: what a send waits for. "quorum": the message is stored at as many bookies as the topic asks for. "one":
        one bookie has it. "none": it is written to the connection. **With "one" and "none" a message may be lost and no
        call fails**: if the program or its connection ends, or the broker refuses it; with "one", if the broker ends
        too, before the quorum has it (docs/sdk.md). A message id of such a send has no position, failures are in the
        log alone, and `flush` waits for the quorum. Not with transactions, nor for a topic with deduplication.

        Raises TopicNotFound if the topic does not exist and may not be created; ProducerBusy if another producer has
        the name or exclusive access, or the topic has its maximum of producers; ProducerFenced; IncompatibleSchema;
        AuthorizationError; CryptoError if messages cannot be encrypted; InvalidTopicName, InvalidConfiguration or
        OperationNotSupported for a wrong parameter; AlreadyClosed if the client is closed; Timeout or ConnectError if
        brokers do not answer."""
        settings = make_producer_settings(copy_parameters(locals(), "topic"))
        name = parse_topic(topic)
        _check_levels(settings.levels, [name])
        return await self._keep(lambda: Producer.open(self.connections, name, settings))

    async def subscribe(
        self,
        topic: Topics,
        subscription_name: str,
        consumer_type: ConsumerType | int = ConsumerType.Exclusive,
        schema: Schema | None = None,
        receiver_queue_size: int = 1000,
        max_total_receiver_queue_size_across_partitions: int = 50000,
        consumer_name: str | None = None,
        unacked_messages_timeout_ms: int | None = None,
        broker_consumer_stats_cache_time_ms: int = 30000,
        negative_ack_redelivery_delay_ms: int = 60000,
        is_read_compacted: bool = False,
        properties: dict[str, str] | None = None,
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
        is_pattern_topic: bool = False,
        *,
        negative_ack_redelivery_backoff: RedeliveryBackoff | None = None,
        ack_timeout_redelivery_backoff: RedeliveryBackoff | None = None,
        unacked_messages_tick_ms: int = 1000,
        ack_group_ms: int = 100,
        ack_receipt_enabled: bool = False,
        enable_retry: bool = False,
        priority_level: int = 0,
        consumer_event_listener: ConsumerEventListener | None = None,
        pattern_auto_discovery_period: int = 60,
        isolation: str = "read_committed",
        redelivery_order: str = "any",
        filter: str | None = None,
        hooks: Sequence[Hook] | None = None,
        durable: bool | None = None,
        broadcast: bool = False,
        start_message_id: MessageId | None = None,
        start_at: datetime | None = None,
        partitions: Sequence[int] | None = None,
        error_traceback: bool = True,
        debounce: float | None = None,
        fair_by_key: bool = False,
        max_in_flight_per_key: int | None = None,
        rate_per_key: float | None = None,
        levels: int | None = None,
        weights: Sequence[int] | str | None = None,
    ) -> Consumer:
        """Opens a consumer of a subscription, which is created if it does not exist, and returns the consumer when all
        its partitions are open. docs/settings.md describes the parameters and their costs. `topic`: a name, a list of
        names, or a compiled pattern.

        `isolation` applies to the whole subscription: with "read_uncommitted" it also gets the messages of transactions
        that are not committed yet, or were aborted. `redelivery_order` applies to the whole subscription, too. With
        "key" a message that failed (a negative acknowledgement, or none in time) blocks the messages after it: on
        KeyShared those of its key, on Exclusive and Failover those of the partition. It blocks them until it is
        acknowledged or becomes a dead letter; the broker's back-off decides when it is delivered again.

        `filter` is an expression over the properties of messages, as in "region = 'eu' AND price > 10". It applies to
        the whole subscription: the broker acknowledges the messages that do not match. ConsumerBusy is raised if the
        subscription exists with another filter, or without one. `priority_level` and
        `consumer_event_listener` are those of Pulsar's Java client. A pattern's new non-persistent topics are searched
        for every `pattern_auto_discovery_period` seconds; the broker reports persistent topics at once.

        `consumer_type` from 64 to 127 is a type that a package has brought to the brokers (docs/design/extending.md).
        `durable` False: the subscription keeps no messages, and ends with its last consumer; after a reconnect the
        consumer goes on after the last message that the program received. The subscription begins after
        `start_message_id`, or at `initial_position`. `broadcast`: the consumer has a subscription of its own, and so
        gets every message. That subscription is not durable; with `durable` True it is, and its name is made of
        `subscription_name` and `consumer_name`. `start_at`: a subscription that does not exist yet begins, in each
        partition, with the first message that a broker stored at that time or later. `partitions`: the numbers of the
        partitions to read, of a single topic (`Consumer.assign`).

        If a message is negatively acknowledged with an `error`, its dead letter contains the class, the text and the
        traceback of the error; without `error_traceback` only the class and the text.

        With `debounce`, in seconds, only the newest message of each key in a window of that length is received; older
        ones are acknowledged (client/core/debounce.py). Only on Exclusive, Failover and a KeyShared that keeps the
        order, and not with `redelivery_order` "key".

        With `fair_by_key` the keys of a Shared subscription are served in turn, so that a key with many messages does
        not delay the others. Each key has at most `max_in_flight_per_key` unacknowledged messages, and gets at most
        `rate_per_key` messages a second. The first consumer that connects sets these three for the subscription;
        ConsumerBusy is raised if other consumers are connected and their values differ.

        `levels`: how many levels of priority the topics have (`create_producer`). `weights`: how often each level is
        served, the most urgent level first; (8, 4, 1) is the default for three levels. With "strict" the consumer
        receives from the most urgent level that has a message.

        Raises ConsumerBusy if the subscription has an exclusive consumer, consumers of another type or with other
        settings, or the maximum of consumers; InvalidConfiguration if parameters contradict each other;
        InvalidTopicName or OperationNotSupported for another wrong parameter; TopicNotFound or SubscriptionNotFound if
        it does not exist and may not be created; IncompatibleSchema; AuthorizationError; AlreadyClosed if the client is
        closed; Timeout or ConnectError if brokers do not answer."""
        options = copy_parameters(locals(), "topic")
        check_parameters(CONSUMER_CHECKS, options)
        check_parameter("batch_receive_policy", make_instance_check(ConsumerBatchReceivePolicy), batch_receive_policy)
        subscription_name = parse_name_argument(check_subscription_name, options["subscription_name"])
        ours = SubscriptionStart.choose(
            durable, start_message_id, start_at, consumer_name, broadcast=broadcast,
            inclusive=start_message_id_inclusive, make_name=lambda: self.connections.world.rng.randbytes(5).hex(),
        )  # fmt: skip
        subscription_name += ours.name_suffix
        options |= {"durable": ours.durable, "start_at_ms": ours.start_at_ms}
        settings = make_consumer_settings(
            copy_parameters(
                options,
                "subscription_name",
                "batch_receive_policy",
                "is_pattern_topic",
                "pattern_auto_discovery_period",
                *START_PARAMETERS,
            )
        )
        if is_pattern_topic and isinstance(topic, str):
            topic = _pattern(topic)
        names = None if isinstance(topic, re.Pattern) else self._names(topic)
        mode = RegexSubscriptionMode(regex_subscription_mode)
        pattern = TopicPattern(topic, mode) if isinstance(topic, re.Pattern) else None

        if partitions is not None and (names is None or len(names) != 1 or levels is not None):
            raise WrongValue("partitions are those of one topic")
        _check_levels(settings.levels, names)

        async def subscribe() -> Consumer:
            if names is not None:
                return await Consumer.open(
                    self.connections, names, subscription_name, settings, batch_receive_policy,
                    start=ours.start, partitions=partitions,
                )
            assert pattern is not None, "names, or a pattern"
            watch = TopicPatternWatch(self.connections, pattern, pattern_auto_discovery_period)
            try:
                found = await watch.open()
                return await Consumer.open(
                    self.connections, found, subscription_name, settings, batch_receive_policy, watch,
                    start=ours.start,
                )
            except BaseException:
                await watch.close()
                raise

        return await self._keep(subscribe)

    # ------------------------------------------------------------------------------ requests
    async def request(
        self, topic: str, payload: bytes, timeout: float = 30, *, properties: dict[str, str] | None = None,
        partition_key: str | None = None,
    ) -> Message:  # fmt: skip
        """Sends a request to the topic, waits for the reply of a server (`serve`), and returns the reply. `properties`
        and `partition_key` are those of the message with the request.

            reply = await client.request("prices", b"ACME", timeout=2)  # in the blocking client without `await`
            print(reply.data())

        Raises Timeout if there is no reply within `timeout` seconds: the request may have been handled. Raises
        RequestFailed, with the class and text of the exception, if the handler raised one. Replies are not stored: use
        two topics for replies that must not be lost (docs/sdk.md). A reply that comes after the call has ended is
        dropped and counted (`late_replies`). Raises InvalidMessage, InvalidTopicName or InvalidConfiguration for a
        wrong parameter, and the errors of a producer of the topic and of a consumer of the replies."""
        check_parameters(TRANSACTION_CHECKS, {"timeout": timeout})
        if not isinstance(payload, bytes):
            raise WrongMessageType(f"the payload of a request is bytes, not {shorten_value(payload)}")
        check_message_parameters({"properties": properties, "partition_key": partition_key})
        name = parse_topic(topic)
        if self._requester is None:
            self._requester = Requester(self.connections.world, self._open_replies, self._open_requests)
        return await self._requester.request(name, payload, timeout, properties, partition_key)

    @property
    def late_replies(self) -> int:
        """Returns how many replies came after their request had ended, and were dropped."""
        return 0 if self._requester is None else self._requester.late_replies

    async def _open_replies(self, topic: TopicName) -> Consumer:
        settings = ConsumerSettings(initial_position=InitialPosition.Earliest)
        return await self._keep(lambda: Consumer.open(self.connections, [topic], "replies", settings))

    async def _open_requests(self, topic: TopicName) -> Producer:
        settings = ProducerSettings(block_if_queue_full=True)
        return await self._keep(lambda: Producer.open(self.connections, topic, settings))

    async def serve(
        self, topic: str, handler: Callable[[Message], Any], *, subscription_name: str = "serve", concurrency: int = 32,
        order: str = "none", threads: int | None = None, rate: float | SharedRateLimiter | None = None,
        breaker: CircuitBreaker | None = None, stop_timeout: float = 30,
    ) -> RequestServer:  # fmt: skip
        """Opens a server that answers the requests of a topic (`request`): it calls `handler(message)`, which returns
        the payload of the reply, bytes or None. Returns the server, which runs until its `stop`, or until the client is
        closed.

            async with await client.serve("prices", quote) as server:
                await server.wait()

        Servers of one `subscription_name` share the requests, on a Shared subscription. If the handler raises,
        `request` raises RequestFailed. A request whose deadline has passed is not handled. The other parameters are
        those of `Consumer.listen`. The server's role needs the right to produce to the topics
        `non-persistent://<namespace>/reply-…`. Without this right no request is handled, and a warning is logged.
        Raises the errors of `subscribe`, and InvalidConfiguration for a wrong parameter."""
        options = ListenOptions(concurrency, order, threads, rate, breaker, True, stop_timeout)
        options.check(handler)
        consumer = await self.subscribe(
            topic, subscription_name, ConsumerType.Shared, receiver_queue_size=concurrency,
            initial_position=InitialPosition.Earliest, negative_ack_redelivery_delay_ms=REQUEST_REDELIVERY_MS,
        )  # fmt: skip
        consumer.listening = server = RequestServer(consumer, handler, options, self._open_answers)
        return server

    async def _open_answers(self, topic: TopicName) -> Producer:
        settings = ProducerSettings(block_if_queue_full=True, send_timeout_millis=5000)
        return await self._keep(lambda: Producer.open(self.connections, topic, settings))

    async def create_reader(
        self,
        topic: str,
        start_message_id: MessageId,
        schema: Schema | None = None,
        receiver_queue_size: int = 1000,
        reader_name: str | None = None,
        subscription_role_prefix: str | None = None,
        is_read_compacted: bool = False,
        crypto_key_reader: KeyReader | None = None,
        start_message_id_inclusive: bool = False,
        crypto_failure_action: ConsumerCryptoFailureAction = ConsumerCryptoFailureAction.FAIL,
        *,
        isolation: str = "read_committed",
        filter: str | None = None,
    ) -> Reader:
        """Opens and returns a reader that starts after the message `start_message_id`, or at this message with
        `start_message_id_inclusive`. `isolation` and `filter` are those of `subscribe`; the broker sends a reader all
        messages, and the reader itself drops those that do not match the filter. docs/settings.md describes the other
        parameters.

        Raises TopicNotFound if the topic does not exist and may not be created; IncompatibleSchema; AuthorizationError;
        InvalidTopicName, InvalidConfiguration or OperationNotSupported for a wrong parameter; AlreadyClosed if the
        client is closed; Timeout or ConnectError if brokers do not answer."""
        options = copy_parameters(locals(), "topic")
        check_parameters(READER_CHECKS, options)
        options = copy_parameters(options, "start_message_id", "reader_name", "subscription_role_prefix")
        settings = make_consumer_settings({**options, "consumer_name": to_plain_text(reader_name)})
        name = f"{to_plain_text(subscription_role_prefix) or ''}reader-{self.connections.world.rng.randbytes(5).hex()}"
        start, inclusive = start_message_id, start_message_id_inclusive
        return await self._keep(
            lambda: Reader.open(self.connections, parse_topic(topic), start, settings, name=name, inclusive=inclusive)
        )

    async def create_table_view(
        self, topic: str, subscription_name: str | None = None, schema: Schema | None = None,
        *, crypto_key_reader: KeyReader | None = None,
    ) -> TableView:  # fmt: skip
        """Opens and returns a table view: a dictionary of the latest value of each key of a topic, which is kept up to
        date. When the call returns, the view contains everything that the topic had stored. `subscription_name`: the
        name of its reader at the broker; None: a random one. Raises CryptoError if a message cannot be decrypted, and
        the errors of `create_reader`."""
        options: dict[str, Any] = {"schema": schema, "is_read_compacted": True, "crypto_key_reader": crypto_key_reader}
        check_parameters(READER_CHECKS, {**options, "subscription_name": subscription_name})
        options["crypto_failure_action"] = ConsumerCryptoFailureAction.CONSUME  # so that the table learns of it
        settings = make_consumer_settings(options)
        name = to_plain_text(subscription_name) or f"table-{self.connections.world.rng.randbytes(5).hex()}"

        async def open_() -> TableView:
            reader = await Reader.open(
                self.connections, parse_topic(topic), MessageId.earliest, settings, name=name, inclusive=False
            )
            return await TableView.open(reader)

        return await self._keep(open_)

    async def pull_consumer(
        self, topic: str, *, offsets: OffsetStore | None = None, schema: Schema | None = None,
        receiver_queue_size: int = 1000, is_read_compacted: bool = False, crypto_key_reader: KeyReader | None = None,
        isolation: str = "read_committed",
    ) -> PullConsumer:  # fmt: skip
        """Opens and returns a pull consumer, which pulls messages of a topic by index, without a subscription.
        `offsets`: the OffsetStore in which the pull consumer stores the indexes at which it goes on (docs/sdk.md);
        None: it stores none. The other parameters are those of `create_reader`. A pull raises CryptoError for a message
        that cannot be decrypted. Raises OperationNotSupported for a topic that is not persistent, and the errors of
        `create_reader`."""
        options = copy_parameters(locals(), "topic", "offsets")
        check_parameters(READER_CHECKS, options)
        options["crypto_failure_action"] = ConsumerCryptoFailureAction.CONSUME  # so that the pull learns of it
        settings = make_consumer_settings(options)
        name, of = f"pull-{self.connections.world.rng.randbytes(5).hex()}", parse_topic(topic)
        return await self._keep(lambda: PullConsumer.open(self.connections, of, settings, offsets, name=name))

    async def get_topic_partitions(self, topic: str) -> list[str]:
        """Returns the full names of the topic's partitions; only the name of the topic itself if it is not partitioned
        or does not exist. Creates nothing. Raises TopicNotFound if the namespace or tenant does not exist;
        InvalidTopicName if `topic` is malformed; AlreadyClosed if the client is closed; Timeout or ConnectError if no
        broker answers."""
        name = parse_topic(topic)
        try:
            partitions = await run_translating_errors(self.connections.fetch_partition_count(name, create=False))
        except TopicNotFound as error:
            if not isinstance(error.__cause__, WireTopicNotFound):  # its namespace or tenant is missing
                raise
            partitions = 0
        return [name.with_partition(i).full for i in range(partitions)] or [name.full]

    async def read_range(
        self, topic: str, first_index: int, end_index: int, *, crypto_key_reader: KeyReader | None = None,
        incarnation: int = 0,
    ) -> AsyncGenerator[list[StoredEntry], None]:
        """Yields lists of the entries that contain the messages `first_index` … `end_index - 1` of one partition, in
        order, as they arrive.

            async for entries in client.read_range("flights-partition-0", 1000, 2000):
                for message in (each for entry in entries for each in entry.messages()):
                    ...

        There is no subscription: nothing is acknowledged, and nothing is retained for this reader. The first and the
        last entry may contain messages outside the range. The range ends early at the end of the topic; if
        `first_index` is below the oldest stored message, reading begins at that message (`AdminClient.offsets` returns
        both ends). An interrupted read is resumed for `operation_timeout_seconds`. For an entry that
        `crypto_key_reader` does not decrypt, `messages()` raises CryptoError. With the `incarnation` that
        `AdminClient.offsets` returned, raises TopicNotFound if the topic was deleted and created again in the meantime;
        without it (0) the messages of the new topic are read as those of the old one. Raises TopicNotFound if the topic
        does not exist; DataLost if stored entries are lost; InvalidTopicName or InvalidConfiguration for a wrong
        parameter; Timeout or ConnectError if no entry arrives in time."""
        check_parameters(READER_CHECKS, {"crypto_key_reader": crypto_key_reader})
        check_parameter("incarnation", make_whole_number_check(0, INT64_MAX), incarnation)
        check_parameter("first_index", make_whole_number_check(0, INT64_MAX), first_index)
        check_parameter("end_index", make_whole_number_check(0, INT64_MAX), end_index)
        reader = ClientRangeReader(self.connections, crypto_key_reader)
        async with aclosing(reader.read(parse_topic(topic), first_index, end_index, incarnation)) as found:
            try:
                async for entries in found:
                    yield entries
            except PulsarException:
                raise
            except MagnetarError as error:
                raise translate_error(error) from error

    def _names(self, topic: str | Sequence[str]) -> list[TopicName]:
        if isinstance(topic, str):
            return [parse_topic(topic)]
        if not isinstance(topic, Iterable) or isinstance(topic, bytes | bytearray | Mapping):
            raise WrongTopicType(f"topic is a name, a list of names or a compiled pattern, not {shorten_value(topic)}")
        names = list(dict.fromkeys(parse_topic(each) for each in topic))
        if not names:
            raise WrongValue("subscribe needs at least one topic")
        return names

    async def _keep(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Opens an object by `make()` and registers it, so that it is closed with the client. Drops closed objects
        when the number of registered ones has doubled."""
        made = await run_translating_errors(make())
        if len(self._open) > 2 * self._looked_at + PRUNE_ABOVE_OBJECTS:
            self._open = {each: None for each in self._open if not each.is_over}
            self._looked_at = len(self._open)
        assert isinstance(made, Producer | Consumer | PullConsumer | Reader | TableView)
        self._open[made] = None
        return made

    def shutdown(self) -> None:
        """Ends the client and everything that it opened at once, without waiting; the outcome of messages that are not
        acknowledged is unknown."""
        self._closed = True
        if self._connections is not None and self._connections.halves is not None:
            ClientHalfMessages.for_client(self._connections).stop()
        if self._connections is not None and self._connections.transactions is not None:
            Transactions.for_client(self._connections).shutdown()
        for each in self._open:
            each.abort()
        self._open.clear()
        self._stop_reports()

    def _stop_reports(self) -> None:
        reports, self._reports = self._reports, None
        if reports is not None:
            reports.stop()

    async def close(self, timeout: float | None = None) -> None:
        """Aborts open transactions, flushes and closes producers, closes consumers and readers, then the connections.

        Objects that are not closed after `timeout` seconds are ended at once. `timeout` None: CLOSE_SILENCE_MAX_S
        seconds after the last answer of a broker, and at most the operation time-out. Raises Timeout if messages have
        no outcome by then; each of these messages gets AlreadyClosed, and may be stored. Raises InvalidConfiguration
        for a wrong `timeout`. Does nothing if the client is closed."""
        if timeout is not None:
            check_parameters(TRANSACTION_CHECKS, {"timeout": timeout})
        if self._closed and self._connections is None:
            return
        self._stop_reports()
        if (connections := self._connections) is None:
            await self._close_in_order()
            return
        quiet_s = CLOSE_SILENCE_MAX_S if timeout is None else timeout
        longest_s = self.settings.operation_timeout_s if timeout is None else timeout
        unsettled = 0

        def received_at() -> float:
            nonlocal unsettled
            unsettled = count_unsettled_messages(self)
            return connections.received_at

        try:
            async with timeout_after_silence(quiet_s, received_at, connections.world.clock.monotonic, longest_s):
                await self._close_in_order()
        except TimeoutError as error:
            if isinstance(error, MagnetarError) or unsettled:
                why = f"{unsettled} messages have no outcome" if unsettled else str(error)
                raise Timeout(f"the client was closed, and its brokers did not answer: {why}") from error
            _LOG.info("the client was closed without the answers of its brokers")

    def _partition_producers(self) -> Iterator[PartitionProducer]:
        for each in self._open:
            if isinstance(each, Producer):
                yield from each.partitions

    async def _close_in_order(self) -> None:
        connections = self._connections
        try:
            if connections is not None and connections.halves is not None:
                await ClientHalfMessages.for_client(connections).close()
            if connections is not None and connections.transactions is not None:
                await Transactions.for_client(connections).close()
        finally:
            await self._close_rest()

    async def _close_rest(self) -> None:
        open_ = list(self._open)
        try:
            await close_all_parts(open_)
        finally:
            self._open = {}
            self._closed = True
            if self._detach is not None:
                self._detach()
            connections, self._connections = self._connections, None
            await close_all_parts([self._service] if connections is None else [self._service, connections])


def count_unsettled_messages(client: Client) -> int:
    """Returns the number of messages of the client's open producers that have no outcome."""
    return sum(part.core.pending for part in client._partition_producers())


def parse_topic(text: str) -> TopicName:
    """Parses the name of a topic. Raises InvalidTopicName if `text` is not text, or not a valid name."""
    if not isinstance(text, str):
        raise WrongTopicType(f"a topic name is text, not {shorten_value(text)}")
    found = parse_name_argument(TopicName.parse, text)
    parse_name_argument(lambda _: found.full.encode(), text)
    return found


def _check_levels(levels: int | None, topics: Sequence[TopicName] | None) -> None:
    if levels is None:
        return
    if topics is None:
        raise WrongValue("levels are of topics that are named: a pattern finds the topics of each level by itself")
    if any(each.partition >= 0 for each in topics):
        raise WrongValue("levels are of a whole topic: each level has partitions of its own")


def parse_name_argument(parse: Callable[[str], T], text: str) -> T:
    """Returns `parse(text)`. Raises InvalidTopicName in place of a MagnetarError or ValueError of `parse`."""
    try:
        return parse(text)
    except (MagnetarError, ValueError) as error:
        raise WrongTopic(getattr(error, "message", f"{shorten_value(text)} is no name: {error}")) from error


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise WrongTopic(f"{shorten_value(text)} is no regular expression: {error}") from error


def _txn_id(given: TxnId | str) -> TxnId:
    try:
        return TxnId.from_numbers(*given) if isinstance(given, TxnId) else TxnId.parse(given)
    except (MagnetarError, TypeError) as error:
        raise WrongValue(f"the id of a transaction is a TxnId or its text, not {shorten_value(given)}") from error
