"""What the blocking classes have of the asyncio ones: each method waits for the other, or calls it.

`python -m tests.stubs` writes the classes from those of asyncio, by the table of tests/faces.py: signatures and
docstrings are changed there. A blocking class derives from its face, and has what is different. They are written, and
not made when they are imported: so type checkers and editors read them, and a call costs no more than one by hand.
Guards: tests/client/blocking/test_faces.py, tests/client/admin/test_stubs.py.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, KeysView, Sequence, ValuesView
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ...proto.states import TxnId
from .. import client as aio
from ..common.closing import ClosedAfterWith
from ..connect.service_info import AutoClusterFailover, ServiceInfo, ServiceInfoProvider
from ..consume.consumer import Consumer as AsyncConsumer
from ..consume.consumer import PartitionProgress
from ..consume.pull import OffsetStore, PullResult
from ..consume.pull import PullConsumer as AsyncPullConsumer
from ..consume.ranges import Reader as AsyncReader
from ..consume.receiver_queue import ConsumerBatchReceivePolicy
from ..consume.table_view import TableView as AsyncTableView
from ..core.transaction import TransactionState
from ..model.encryption import KeyReader
from ..model.hooks import Hook
from ..model.message import ConsumerEventListener, Message
from ..model.message_id import MessageId
from ..model.options import copy_parameters
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
from ..model.tracing import Tracing
from ..produce.producer import Half as AsyncHalf
from ..produce.producer import Producer as AsyncProducer
from ..transactions.coordinators import SinkStatus
from ..transactions.transaction import Transaction as AsyncTransaction
from ..transactions.transaction import Wait
from .loop_thread import BlockingFacade, ForkReopenedFacade, ProcessBoundFacade, asyncio_transaction_of

if TYPE_CHECKING:
    from .client import TableView
    from .consumer import Consumer, PullConsumer, Reader
    from .producer import Half, Producer, Transaction


# ------------------------------------------------------------------------------------------------------- written


class ClientFacade(BlockingFacade[aio.Client], ClosedAfterWith):
    """The methods of the blocking Client that only call or await those of the asyncio Client.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    _init: Callable[[dict[str, Any]], None]
    _create_producer: Callable[[dict[str, Any]], Producer]
    _subscribe: Callable[[dict[str, Any]], Consumer]
    _create_reader: Callable[[dict[str, Any]], Reader]
    _pull_consumer: Callable[[dict[str, Any]], PullConsumer]
    _create_table_view: Callable[[dict[str, Any]], TableView]

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
    ) -> None:
        self._init(copy_parameters(locals()))

    def get_service_info(self) -> ServiceInfo:
        """Returns the service URL and credentials of the cluster to which the client connects now."""
        return self._current().get_service_info()

    def sink_status(self, sink_id: str) -> SinkStatus | None:
        """Returns the number of the last batch that was committed to a sink, and the query that wrote it; None if no
        batch was committed. Raises InvalidConfiguration if `sink_id` is empty or no text; AlreadyClosed if the client
        is closed; Timeout or ConnectError if no coordinator answers.
        """
        return self._run(self._current().sink_status(sink_id))

    def commit_transaction(self, txn_id: TxnId | str) -> None:
        """Commits a transaction that any program of this role prepared. May be called again. Raises TransactionAborted
        if it was aborted, TransactionForgotten if it ended too long ago, InvalidTxnStatusError if it is open: only the
        program that began it can commit it then. Raises InvalidConfiguration if `txn_id` is no id; AlreadyClosed if the
        client is closed; Timeout or ConnectError if no coordinator answers.
        """
        self._run(self._current().commit_transaction(txn_id))

    def abort_transaction(self, txn_id: TxnId | str) -> None:
        """Aborts a prepared or open transaction that any program of this role began. May be called again. Raises
        InvalidTxnStatusError if the transaction is committed, TransactionForgotten if it ended too long ago,
        InvalidConfiguration if `txn_id` is no id; AlreadyClosed if the client is closed; Timeout or ConnectError if no
        coordinator answers.
        """
        self._run(self._current().abort_transaction(txn_id))

    def commit_half(self, half_id: TxnId | str) -> None:
        """Publishes a half message that any program of this role prepared; waits and raises as `Half.commit` does.
        `half_id`: its id, or the text of the id; raises InvalidConfiguration if it is neither.
        """
        self._finish(self._current().commit_half(half_id))

    def rollback_half(self, half_id: TxnId | str) -> None:
        """Drops a half message that any program of this role prepared; waits and raises as `Half.rollback` does.
        `half_id`: its id, or the text of the id; raises InvalidConfiguration if it is neither.
        """
        self._finish(self._current().rollback_half(half_id))

    def transaction_status(self, txn_id: TxnId | str) -> TransactionState:
        """Asks the coordinator for the state of a transaction: OPEN, PREPARED, COMMITTED or ABORTED. `txn_id`:
        `Transaction.id`, or its text; raises InvalidConfiguration if it is neither. Raises TransactionForgotten if the
        transaction ended too long ago; AlreadyClosed if the client is closed; Timeout or ConnectError if no coordinator
        answers.
        """
        return self._run(self._current().transaction_status(txn_id))

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
        brokers do not answer.
        """
        return self._create_producer(copy_parameters(locals()))

    def subscribe(
        self,
        topic: aio.Topics,
        subscription_name: str,
        consumer_type: ConsumerType | int = ConsumerType.Exclusive,
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
        unacked_messages_tick_ms: int = 1000,
        ack_group_ms: int = 100,
        ack_receipt_enabled: bool = False,
        enable_retry: bool = False,
        priority_level: int = 0,
        consumer_event_listener: ConsumerEventListener | None = None,
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
        closed; Timeout or ConnectError if brokers do not answer.

        `message_listener(consumer, message)` is called in another thread, in order; at most `message_listener_threads`
        listeners of all consumers and readers of this client run at the same time. The event listener has its own
        thread too.
        """
        return self._subscribe(copy_parameters(locals()))

    def request(
        self,
        topic: str,
        payload: bytes,
        timeout: float = 30,
        *,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
    ) -> Message:
        """Sends a request to the topic, waits for the reply of a server (`serve`), and returns the reply. `properties`
        and `partition_key` are those of the message with the request.

            reply = await client.request("prices", b"ACME", timeout=2)  # in the blocking client without `await`
            print(reply.data())

        Raises Timeout if there is no reply within `timeout` seconds: the request may have been handled. Raises
        RequestFailed, with the class and text of the exception, if the handler raised one. Replies are not stored: use
        two topics for replies that must not be lost (docs/sdk.md). A reply that comes after the call has ended is
        dropped and counted (`late_replies`). Raises InvalidMessage, InvalidTopicName or InvalidConfiguration for a
        wrong parameter, and the errors of a producer of the topic and of a consumer of the replies.
        """
        return self._run(self._current().request(**copy_parameters(locals())))

    @property
    def late_replies(self) -> int:
        """Returns how many replies came after their request had ended, and were dropped."""
        return self._current().late_replies

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
        filter: str | None = None,
    ) -> Reader:
        """Opens and returns a reader that starts after the message `start_message_id`, or at this message with
        `start_message_id_inclusive`. `isolation` and `filter` are those of `subscribe`; the broker sends a reader all
        messages, and the reader itself drops those that do not match the filter. docs/settings.md describes the other
        parameters.

        Raises TopicNotFound if the topic does not exist and may not be created; IncompatibleSchema; AuthorizationError;
        InvalidTopicName, InvalidConfiguration or OperationNotSupported for a wrong parameter; AlreadyClosed if the
        client is closed; Timeout or ConnectError if brokers do not answer.

        `reader_listener(reader, message)` is called in a thread of its own.
        """
        return self._create_reader(copy_parameters(locals()))

    def create_table_view(
        self,
        topic: str,
        subscription_name: str | None = None,
        schema: Schema | None = None,
        *,
        crypto_key_reader: KeyReader | None = None,
    ) -> TableView:
        """Opens and returns a table view: a dictionary of the latest value of each key of a topic, which is kept up to
        date. When the call returns, the view contains everything that the topic had stored. `subscription_name`: the
        name of its reader at the broker; None: a random one. Raises CryptoError if a message cannot be decrypted, and
        the errors of `create_reader`.
        """
        return self._create_table_view(copy_parameters(locals()))

    def pull_consumer(
        self,
        topic: str,
        *,
        offsets: OffsetStore | None = None,
        schema: Schema | None = None,
        receiver_queue_size: int = 1000,
        is_read_compacted: bool = False,
        crypto_key_reader: KeyReader | None = None,
        isolation: str = "read_committed",
    ) -> PullConsumer:
        """Opens and returns a pull consumer, which pulls messages of a topic by index, without a subscription.
        `offsets`: the OffsetStore in which the pull consumer stores the indexes at which it goes on (docs/sdk.md);
        None: it stores none. The other parameters are those of `create_reader`. A pull raises CryptoError for a message
        that cannot be decrypted. Raises OperationNotSupported for a topic that is not persistent, and the errors of
        `create_reader`.
        """
        return self._pull_consumer(copy_parameters(locals()))

    def get_topic_partitions(self, topic: str) -> list[str]:
        """Returns the full names of the topic's partitions; only the name of the topic itself if it is not partitioned
        or does not exist. Creates nothing. Raises TopicNotFound if the namespace or tenant does not exist;
        InvalidTopicName if `topic` is malformed; AlreadyClosed if the client is closed; Timeout or ConnectError if no
        broker answers.
        """
        return self._run(self._current().get_topic_partitions(topic))


class ProducerFacade(ForkReopenedFacade[AsyncProducer]):
    """The methods of the blocking Producer that only call or await those of the asyncio Producer.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    _half: Callable[[AsyncHalf], Half]

    def producer_name(self) -> str:
        """Returns the name of the producer, chosen by the program or by the broker."""
        return self._current().producer_name()

    def last_sequence_id(self) -> int:
        """Returns the highest sequence id of the messages that the broker acknowledged, over all partitions; -1 if it
        acknowledged none.
        """
        return self._current().last_sequence_id()

    def prepare(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        group: str,
        check_key: str = "",
        check_after: float = 0,
        priority: int | None = None,
    ) -> Half:
        """Stores a message as a half message: durably, without publishing it. Returns when it is stored. `Half.commit`
        publishes it, once; `Half.rollback` drops it. If neither was called within `check_after` seconds (0: the
        cluster's default), a program that answers for `group` (`Client.on_check`) is asked about `check_key`.
        docs/transactions.md has the rules.

        Raises ProducerBlockedQuotaExceededError if the group has too many undecided half messages; MessageTooBig;
        InvalidMessage or InvalidConfiguration for a wrong parameter; AlreadyClosed; ConnectError; or Timeout, after
        which the half message may be stored, and is then rolled back.
        """
        return self._half(self._run(self._current().prepare(**copy_parameters(locals()))))

    def send_many(
        self,
        contents: Iterable[Any],
        *,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        txn: Transaction | None = None,
        expires_at: datetime | int | None = None,
        expires_in: timedelta | float | None = None,
        priority: int | None = None,
    ) -> list[MessageId]:
        """Sends all messages and returns their ids in the order of `contents`, when all are durable. The other
        parameters apply to each message.

        If messages failed, raises the exception of the first failure, when all messages have outcomes. If a message is
        refused before it is sent, raises one of the errors of `send_nowait` at once: the messages before it are sent,
        those after it are not. Returns an empty list if `contents` is empty; raises InvalidConfiguration if it is not
        iterable.
        """
        return self._run(self._current().send_many(**{**copy_parameters(locals()), "txn": asyncio_transaction_of(txn)}))

    def cancel(self, message_id: MessageId, *, priority: int | None = None) -> list[str]:
        """Cancels a delayed message of this topic: no subscription gets it. Returns when that is durable, with the
        names of the subscriptions for which the message was still delayed. `priority`: that with which the message was
        sent, for a producer with `levels`. May be called again after an error.

        Raises NotAllowedError if the time of the message has come, or a subscription has got it; TopicNotFound if the
        topic has no such message, or its transaction has not committed; InvalidConfiguration if `message_id` is no
        MessageId; InvalidMessage for a `priority` that the topic does not have; Timeout or ConnectError if the broker
        does not answer. A subscription that is created later from an earlier position gets the message.
        """
        return self._run(self._current().cancel(message_id, priority=priority))

    def flush(self) -> None:
        """Waits until all messages that were sent before have outcomes and their callbacks were called. Does not raise
        for messages that failed. Raises AlreadyClosed if the producer is closed.
        """
        self._run(self._current().flush())


class HalfFacade(ProcessBoundFacade[AsyncHalf]):
    """The methods of the blocking Half that only call or await those of the asyncio Half.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    def commit(self) -> None:
        """Publishes the half message; returns when this is final. May be called again.

        Raises TransactionAborted if the half message was rolled back, and HalfParked if an operator must decide. If a
        topic refuses one of its messages (TopicTerminated, …), raises that error: none of them is published, and the
        half message is parked. Raises OutcomeUnknown if no coordinator answers in time: call `commit` again; if the
        program does not, a program of the group is asked. Raises AlreadyClosed after the close of the client.
        """
        self._finish(self._current().commit())

    def rollback(self) -> None:
        """Drops the half message without publishing it; returns when this is final. May be called again. Raises
        TransactionEnded if the half message was committed, HalfParked if an operator must decide. Raises OutcomeUnknown
        if no coordinator answers in time: call `rollback` again; if the program does not, a program of the group is
        asked. Raises AlreadyClosed after the close of the client.
        """
        self._finish(self._current().rollback())


class TransactionFacade(ProcessBoundFacade[AsyncTransaction]):
    """The methods of the blocking Transaction that only call or await those of the asyncio Transaction.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    @property
    def id(self) -> TxnId:
        """Returns the id of the transaction; its text is `(most,least)`, as Pulsar prints it. Raises
        InvalidTxnStatusError before the transaction has begun.
        """
        return self._inner.id

    @property
    def state(self) -> TransactionState:
        """Returns the state of the transaction: OPEN, PREPARING, PREPARED, COMMITTING, ABORTING, COMMITTED, ABORTED; or
        ERROR if the request to end it got no answer, and `commit` must be called again. Raises InvalidTxnStatusError
        before the transaction has begun.
        """
        return self._inner.state

    def commit(self, wait: Wait = "durable") -> None:
        """Commits the transaction. Returns when the commit is durable, or with `wait` "visible" when all consumers may
        see its messages. May be called again. If the caller is cancelled, the commit goes on.

        Raises TransactionAborted if nothing in the transaction counts, for example because an operation in it failed;
        TransactionFenced if a later program took its name over; TransactionEnded after `abort`. Raises Timeout if the
        commit is durable and not visible in time. Raises OutcomeUnknown if the coordinator did not answer, or the
        client was closed during the commit: call `commit` again, or ask
        `transaction_status`. Raises InvalidTxnStatusError before the transaction has begun, InvalidConfiguration for
        another `wait`.
        """
        self._finish(self._current().commit(wait))

    def prepare(self, until: float = 0) -> None:
        """Prepares the transaction: everything in it is durable when `prepare` returns, and nothing can be added any
        more. The transaction then waits for its end for `until` seconds (0: as long as the cluster allows), even if
        this client or the coordinator crashes. `commit` or `abort` ends it, also from another program by its id:
        `Client.commit_transaction`, `abort_transaction`, or asyncio's `commit_batch`. Until then readers wait for it.
        May be called again before the end. Raises the errors of `commit`; TransactionEnded after the end;
        InvalidConfiguration if `until` is not a number of seconds from 0 to ten years.
        """
        self._finish(self._current().prepare(until))

    def abort(self, wait: Wait = "durable") -> None:
        """Aborts the transaction: nothing in it counts, and messages that it acknowledged are delivered again. Returns
        when the abort is durable, with `wait` "visible" when it has taken effect at all topics, or when no coordinator
        answers: then the time-out aborts it. May be called again. Raises TransactionEnded if the transaction is
        committed, or may be; OutcomeUnknown if it was prepared, and its coordinator does not answer;
        InvalidTxnStatusError before the transaction has begun; InvalidConfiguration for another `wait`.
        """
        self._finish(self._current().abort(wait))


class ConsumerFacade(ForkReopenedFacade[AsyncConsumer]):
    """The methods of the blocking Consumer that only call or await those of the asyncio Consumer.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    def subscription_name(self) -> str:
        """Returns the name of the subscription."""
        return self._inner.subscription_name()

    def consumer_name(self) -> str:
        """Returns the name of the consumer, given by the program or by the broker. If the program gave none, it is
        empty until a broker has given one.
        """
        return self._inner.consumer_name()

    def record_error(self, which: Message | MessageId, error: BaseException) -> None:
        """Records the exception with which the program failed at the message: it is described in the dead letter, if
        the message becomes one. Does not acknowledge anything. Raises InvalidMessage if this consumer did not receive
        the message; OperationNotSupported or InvalidConfiguration for an id that names no partition or no message. May
        be called from any thread.
        """
        self._current().record_error(which, error)

    def acknowledge_cumulative(self, message: Message | MessageId, *, txn: Transaction | None = None) -> None:
        """Acknowledges this message and all messages before it in its partition; waits, and takes `txn`, as
        `acknowledge` does, and raises its errors. Raises CumulativeAcknowledgementNotAllowedError for Shared and
        KeyShared, and for a consumer with `debounce`. A call that waits raises OperationNotSupported if a message in
        chunks began before this message and is not acknowledged yet.
        """
        self._run(self._current().acknowledge_cumulative(message, txn=asyncio_transaction_of(txn)))

    @property
    def dead_letter_policy(self) -> ConsumerDeadLetterPolicy | None:
        """Returns the dead-letter policy that is in force: the policy that the program set, or the default policy of
        `enable_retry`. None: messages are redelivered until they are acknowledged.
        """
        return self._inner.dead_letter_policy

    def reconsume_later(
        self,
        message: Message,
        delay: timedelta,
        properties: dict[str, str] | None = None,
        *,
        error: BaseException | None = None,
    ) -> None:
        """Stores a copy of the message, which is delivered after `delay`, and then acknowledges the message itself. If
        the message was retried too often, the copy goes to the dead-letter topic instead. `error`: the exception with
        which the program failed; the copy, and its dead letter, describe it. `properties`: added to those of the copy.

        Raises OperationNotSupported if the consumer was opened without `enable_retry`, or the message is a dead letter
        itself; InvalidMessage if this consumer did not receive the message; InvalidConfiguration for a wrong parameter.
        If the copy cannot be stored, raises the error of its producer; the message is not acknowledged then.
        """
        self._run(self._current().reconsume_later(**copy_parameters(locals())))

    def seek(self, messageid: MessageId | int) -> None:
        """Moves the subscription to a message id, MessageId.earliest, MessageId.latest, or a time in ms since the
        epoch. The time is that at which a broker stored the message, not `publish_timestamp()`, which is the producer's
        clock. The id of a message moves only its partition; raises InvalidMessage if the consumer does not read that
        partition, OperationNotSupported if the id does not name it. Returns when the brokers have moved the
        subscription. Raises InvalidConfiguration for another argument; Timeout or ConnectError if a broker does not
        answer; AlreadyClosed if the consumer is closed.
        """
        self._run(self._current().seek(messageid))

    def seek_index(self, index: int, *, partition: int | str | None = None) -> None:
        """Moves the subscription in one partition to the message with this index, or to the first message after it that
        is kept. `partition`: its number, or the full name of its topic; needed if the consumer has several. Returns
        when the broker has moved the subscription. Raises InvalidConfiguration if the consumer has no such partition,
        or `index` is negative; InvalidTopicName if `partition` is no name of a topic; Timeout or ConnectError if the
        broker does not answer; AlreadyClosed if the consumer is closed.
        """
        self._run(self._current().seek_index(index, partition=partition))

    def commit(self, index: int, note: bytes | None = None, *, partition: int | str | None = None) -> None:
        """Acknowledges every message of a partition whose index is less than `index`; returns when this survives a
        crash. After message `m` was processed, and all before it: `commit(m.index() + 1)`. Never moves the subscription
        back. An index inside a chunked message counts as that of its first chunk.

        `note`: up to 1024 bytes, stored in the same write; `progress` returns them until the next commit replaces them,
        or a seek removes them. `partition`: as for `seek_index`.

        Raises InvalidConfiguration for an index after the end of the topic, or another wrong parameter;
        CumulativeAcknowledgementNotAllowedError for Shared, KeyShared and `debounce`; NotAllowedError for a Failover
        consumer that is not active, and for a note of a subscription that is not durable; ConnectError if the
        subscription is moved during the commit; Timeout or ConnectError if the broker does not answer; AlreadyClosed
        if the consumer is closed; OperationNotSupported if the broker is too old.
        """
        self._run(self._current().commit(index, note, partition=partition))

    def progress(self) -> dict[str, PartitionProgress]:
        """Asks the brokers for the position of the subscription in each partition, and returns it by the full name of
        the partition. What this consumer acknowledged before counts, though it may not survive a crash yet. Raises
        Timeout or ConnectError if a broker does not answer, AlreadyClosed if the consumer is closed,
        OperationNotSupported if a broker is too old. Returns an empty dict if the consumer reads no partition now.
        """
        return self._run(self._current().progress())

    def position(self) -> dict[str, int]:
        """Asks the brokers, and returns for each partition, by its full name, the index of the first message that is
        not acknowledged. Raises the errors of `progress`.
        """
        return self._run(self._current().position())

    def end(self) -> dict[str, int]:
        """Asks the brokers, and returns for each partition, by its full name, the index that follows that of the newest
        message that the subscription may get. Raises the errors of `progress`.
        """
        return self._run(self._current().end())

    def lag(self) -> dict[str, int]:
        """Asks the brokers, and returns for each partition, by its full name, how many messages follow the first
        unacknowledged one, itself included; 0 if all are acknowledged. Those that are acknowledged out of order count,
        too. Raises the errors of `progress`.
        """
        return self._run(self._current().lag())

    def assign(self, partitions: Iterable[int]) -> None:
        """Reads these partitions of the topic from now on, and no others. First leaves the other partitions: their
        acknowledgements are sent, and their messages that wait in the client are dropped.

        Only for an Exclusive or Failover consumer of one topic, without `enable_retry`; raises OperationNotSupported
        for others, and InvalidConfiguration if the topic has no such partition. On Exclusive a partition has one
        consumer. If another consumer still has a partition of `partitions`, raises ConsumerBusy, takes no new
        partition, and keeps those that this consumer has; call `assign` again when the other has left. So no two
        consumers commit for one partition at the same time. Raises InvalidConfiguration if `partitions` is no list of
        numbers; Timeout or ConnectError if a broker does not answer.
        """
        self._run(self._current().assign(partitions))

    def get_last_message_id(self) -> MessageId:
        """Asks the broker, and returns the id of the topic's last message that the subscription can receive; if there
        is none, its ledger id and entry id are -1. Raises OperationNotSupported unless the consumer reads exactly one
        partition; Timeout or ConnectError if the broker does not answer; AlreadyClosed if the consumer is closed.
        """
        return self._run(self._current().get_last_message_id())

    def unsubscribe(self) -> None:
        """Deletes the subscription and closes the consumer. Raises NotAllowedError if the subscription has other
        consumers; Timeout or ConnectError if a broker does not answer; AlreadyClosed if the consumer is closed. If it
        raises, the consumer stays open, and the subscription may be deleted at some of the partitions.
        """
        self._run(self._current().unsubscribe())


class PullConsumerFacade(ForkReopenedFacade[AsyncPullConsumer]):
    """The methods of the blocking PullConsumer that only call or await those of the asyncio PullConsumer.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    def list_partitions(self) -> list[int]:
        """Asks a broker, and returns the numbers of the topic's partitions; an empty list if the topic is not
        partitioned. Raises TopicNotFound if the topic does not exist and may not be created; Timeout or ConnectError if
        no broker answers.
        """
        return self._run(self._current().list_partitions())

    def pull(
        self,
        from_index: int,
        max_messages: int = 100,
        max_bytes: int = 1048576,
        timeout: float = 0,
        filter: str | None = None,
        *,
        partition: int | None = None,
    ) -> PullResult:
        """Returns messages from `from_index` on, in order: those that are there, at most `max_messages`, and
        `max_bytes` of payload; a single message may be larger. Waits up to `timeout` seconds for the first message; 0:
        returns what the broker has now. The result has the status FOUND, NO_NEW, NO_MATCH or OUT_OF_RANGE.

        `filter`: an expression of docs/features.md over properties. Messages that it does not want are left out, and
        `next_index` is after them. A pull returns after it has looked at 10,000 unwanted messages. `partition`: needed
        for a partitioned topic; see `list_partitions`. A cancelled pull may be repeated. Raises InvalidConfiguration
        for a wrong parameter or filter, CryptoError or ChecksumError for a message that cannot be read, and the other
        errors that the class lists.
        """
        return self._run(self._current().pull(**copy_parameters(locals())))

    def load_offset(self, *, partition: int | None = None) -> int:
        """Returns the index that was stored last for this partition; if there is none, the index of the oldest message.
        Raises InvalidConfiguration if the consumer was opened without `offsets`; the errors of the store; and those
        that the class lists, such as TopicNotFound if the topic was deleted and created again.
        """
        return self._run(self._current().load_offset(partition=partition))

    def store_offset(self, index: int, *, partition: int | None = None) -> None:
        """Stores the index at which this program goes on; returns when the store has it. Raises InvalidConfiguration if
        the consumer was opened without `offsets`; the errors of the store; and those that the class lists, such as
        TopicNotFound if the topic was deleted and created again.
        """
        self._run(self._current().store_offset(index, partition=partition))

    def progress(self, *, partition: int | None = None) -> PartitionProgress:
        """Asks the broker for the range of a partition, and returns it: `earliest` and `end` are the range; the other
        fields mean nothing to a pull consumer. Raises the errors that the class lists, such as InvalidConfiguration for
        a partition that the topic does not have.
        """
        return self._run(self._current().progress(partition=partition))


class ReaderFacade(ForkReopenedFacade[AsyncReader]):
    """The methods of the blocking Reader that only call or await those of the asyncio Reader.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    def seek(self, messageid: MessageId | int) -> None:
        """Moves the reader to a message id, MessageId.earliest, MessageId.latest, or a time in ms since the epoch. The
        time is that at which a broker stored the message, not `publish_timestamp()`, which is the producer's clock.
        Returns when the brokers have moved the reader.

        The id of a message moves only the partition of that message; the other partitions keep their positions. Raises
        InvalidMessage if the reader does not read that partition; OperationNotSupported if the id does not name its
        partition; InvalidConfiguration for another argument; Timeout or ConnectError if a broker does not answer;
        AlreadyClosed if the reader is closed.
        """
        self._run(self._current().seek(messageid))

    def seek_index(self, index: int, *, partition: int | str | None = None) -> None:
        """Moves the reader in one partition to the message with this index, or to the first message after it that is
        kept. `partition`: its number, or the full name of its topic; needed if the reader has several. Raises
        InvalidConfiguration if the reader has no such partition, or `index` is negative; InvalidTopicName if
        `partition` is no name of a topic; Timeout or ConnectError if the broker does not answer; AlreadyClosed if the
        reader is closed. Returns when the broker has moved the reader.
        """
        self._run(self._current().seek_index(index, partition=partition))


class TableViewFacade(ForkReopenedFacade[AsyncTableView]):
    """The methods of the blocking TableView that only call or await those of the asyncio TableView.
    They raise the same exceptions; those that wait also raise those of BlockingFacade."""

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the latest value of the key; `default` if the key has none."""
        return self._current().get(key, default)

    def keys(self) -> KeysView[str]:
        """Returns a copy of the keys that the table has now."""
        return self._current().keys()

    def values(self) -> ValuesView[Any]:
        """Returns a copy of the values that the table has now."""
        return self._current().values()

    def items(self) -> ItemsView[str, Any]:
        """Returns a copy of the keys with their values: later changes do not appear in it."""
        return self._current().items()
