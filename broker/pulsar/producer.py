"""A producer of a Pulsar client, on a session of the broker (broker/session/producer.py).

Each SEND is answered once, in the order of the SENDs, with the sequence ids of its frame: by a receipt, or by an error
that is final for the message. A temporary error closes the producer instead (CLOSE_PRODUCER): the client opens it again
and sends all messages without an answer again, in their order. Entries for which the session has no credit wait here;
the connection bounds them (`PulsarConnection.count_waiting_bytes`).

Also in this file, below its heading: transactions of a Pulsar client (transactions).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...proto import pulsar_pb2 as pulsar
from ...proto.entry import parse_header
from ...proto.errors import (
    CorruptEntry,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    OutcomeUnknown,
    TimedOut,
    TopicTerminated,
    TransactionAborted,
    TransactionEnded,
    TransactionFenced,
    TransactionForgotten,
    Unavailable,
)
from ...proto.names import Position, TopicName
from ...proto.operations import Permission
from ...proto.schema import encode_version
from ...proto.states import AccessMode, TxnId, TxnState
from ...runtime.access import Principal
from ...runtime.files import Buffer
from ...runtime.network import find_caller_network
from ...runtime.tasks import run_and_clean_up
from ..common.config import BrokerConfig
from ..common.transactions import convert_join_answer_to_state
from ..session.producer import METADATA_BYTES_LIMIT, ProducerOptions, ProducerSession, compute_metadata_bytes_max
from ..transaction.coordinators import ASSIGN_TOPIC
from ..transaction.intents_core import TransactionEndVerb
from .frames import NO_REQUEST_ID, encode_frame, encode_receipt, parse_sent_entry
from .translate import ensure_magnetar_error, find_pulsar_error_number, parse_schema

if TYPE_CHECKING:
    from ..transaction.coordinator import RunningCoordinator
    from .connection import PulsarConnection

WAIT_NOTICE_DELAY_S = 0.05
"""Seconds after which a producer that waits for exclusive access gets a PRODUCER_SUCCESS that says so, which stops its
client's timeout."""
UNKNOWN_LEDGER_OR_ENTRY = (1 << 64) - 1
"""-1 as uint64: the ledger and entry id of a duplicate, whose position is not known."""
TRANSACTION_ERRORS = (TransactionAborted, TransactionEnded, TransactionFenced, TransactionForgotten)
"""Errors of a message whose transaction has ended: sent as NotAllowedError, because Java's client closes its connection
at other numbers in a SEND_ERROR."""
FINAL_PUBLISH_ERRORS = (CorruptEntry, InvalidRequest, NotAllowed, TopicTerminated, *TRANSACTION_ERRORS)
"""Errors that are final for a message: it would fail again."""
ENDED_BY_CHECKSUM = ("Pulsar-CPP", "Pulsar-Python", "pulsar-client-node")
"""Names of the C++ client and of those built on it. Only ChecksumError fails a message there: at any other number in a
SEND_ERROR they reconnect and send the message again, for ever."""
EMPTY_ENTRY = b""
"""Published instead of the entry of a SEND that is refused: the session refuses it, in the order of the SENDs."""


class PulsarProducerHandler:
    """Translates between the commands of one producer and its session, and is the port of this session
    (broker/session/producer.py `ProducerPort`). `network`: the network from which the client is connected; `instance`:
    the id by which a reconnecting client replaces this producer."""

    def __init__(self, connection: PulsarConnection, asked: pulsar.CommandProducer) -> None:
        self.id = asked.producer_id
        self.epoch = asked.epoch
        self.network = find_caller_network(connection.caller.peer)
        self.instance = ""
        self._connection = connection
        self._asked = asked
        self._session: ProducerSession | None = None
        self._opening: asyncio.Task[None] | None = None
        self._over = False
        # SENDs without an answer: first and highest sequence id, and why it is refused if that is known already
        self._sent: deque[tuple[int, int, MagnetarError | None]] = deque()
        self._waiting: deque[bytes] = deque()  # for credit

    @property
    def is_open(self) -> bool:
        """True if the session of the producer is open."""
        return self._session is not None

    # ------------------------------------------------------------------ opening
    def start_opening(self) -> None:
        """Starts a task that opens the producer, and sends the outcome to the client."""
        self._opening = self._connection.start_request(self._open())

    def answer_repeated_open(self, request_id: int) -> None:
        """Answers a client that opens this producer again: success if it is open, Unavailable while it is being
        opened."""
        if self._session is None:
            self._connection.send_error(request_id, Unavailable("the producer of this id is being opened"))
        else:
            self._succeeded(request_id, self._session.name, -1)

    def _options(self) -> ProducerOptions:
        asked, broker = self._asked, self._connection.broker
        name = (
            asked.producer_name or f"{broker.name}-{broker.world.rng.randbytes(4).hex()}-{broker.allocate_client_id()}"
        )
        known = self._connection.names.find_replaced_instance(asked.topic, name, self.network, self.epoch)
        self.instance = known or broker.world.rng.randbytes(8).hex()
        return ProducerOptions(
            asked.topic, name, AccessMode(asked.producer_access_mode),
            {each.key: each.value for each in asked.metadata}, self.instance, self.epoch,
            asked.initial_subscription_name, asked.topic_epoch,
            parse_schema(asked.schema) if asked.HasField("schema") else None, compute_metadata_bytes_max(broker.config),
        )  # fmt: skip

    async def _open(self) -> None:
        request_id, notice = self._asked.request_id, None
        try:
            options = self._options()
            if options.access_mode is AccessMode.WAIT_FOR_EXCLUSIVE:
                notice = asyncio.get_running_loop().call_later(WAIT_NOTICE_DELAY_S, self._waits, options.name)
            session = await ProducerSession.open(self._connection.broker, options, self, self._connection.caller)
        except Exception as error:
            self._connection.handlers.remove_producer(self)
            self._connection.send_error(request_id, ensure_magnetar_error(error))
            return
        finally:
            if notice is not None:
                notice.cancel()
        self._session = session
        if self._over:  # it was closed meanwhile: `leave` waits for this task, and ends the session
            return
        self.on_credentials_renewed(self._connection.caller.principal)
        self._connection.names.add(self._asked.topic, session.name, self)
        self._succeeded(request_id, session.name, session.last_sequence_id)

    def on_credentials_renewed(self, principal: Principal) -> None:
        """Called when the client has renewed its credentials. Passes `principal`, the caller with the new credentials,
        to the session."""
        if self._session is not None:
            self._session.producer.principal = principal

    def _waits(self, name: str) -> None:
        self._connection.send(encode_frame(producer_success=pulsar.CommandProducerSuccess(
            request_id=self._asked.request_id, producer_name=name, producer_ready=False, schema_version=b""
        )))  # fmt: skip

    def _succeeded(self, request_id: int, name: str, last_sequence_id: int) -> None:
        assert self._session is not None, "it is open"
        epoch = self._session.topic_epoch
        answer = pulsar.CommandProducerSuccess(
            request_id=request_id, producer_name=name, last_sequence_id=last_sequence_id,
            # empty: none. Java's client ends its connection when it is left out
            schema_version=encode_version(self._session.schema_version),
        )  # fmt: skip
        if epoch:
            answer.topic_epoch = epoch
        self._connection.send(encode_frame(producer_success=answer))

    # ------------------------------------------------------------------ publishing
    def publish(self, sent: pulsar.CommandSend, rest: memoryview) -> None:
        """Publishes the entry of a SEND command; it waits here while the session has no credit. `rest`: the bytes after
        the command, which are copied before this method returns. An invalid entry is refused in the order of the SENDs.
        Raises InvalidRequest if the producer is not open yet."""
        session = self._session
        if session is None:
            raise InvalidRequest("a producer publishes after it was opened")
        first, highest = sent.sequence_id, sent.highest_sequence_id
        why: MagnetarError | None = None
        entry: Buffer = EMPTY_ENTRY
        try:
            entry = parse_sent_entry(rest)
            if highest and highest < first:
                raise InvalidRequest(f"the highest sequence id {highest} is below the first, {first}")
            if has_txn(sent) and not _names_txn(entry):
                raise InvalidRequest("a SEND names a transaction, and the metadata of its message does not")
        except InvalidRequest as error:
            why, entry = error, EMPTY_ENTRY
        self._sent.append((first, highest, why))
        if self._waiting or session.credit <= 0:
            self._waiting.append(bytes(entry))
            self._connection.count_waiting_bytes(len(entry))
        else:
            session.publish(entry)

    def grant_credit(self, size: int) -> None:
        session = self._session
        assert session is not None, "credit comes after the opening"
        while self._waiting and session.credit > 0 and not self._over:
            entry = self._waiting.popleft()
            self._connection.count_waiting_bytes(-len(entry))
            session.publish(entry)

    # ------------------------------------------------------------------ outcomes
    def send_receipt(self, sequence_id: int, position: Position, index: int) -> None:
        self._receipt(*position)

    def on_duplicate(self, sequence_id: int) -> None:
        self._receipt(UNKNOWN_LEDGER_OR_ENTRY, UNKNOWN_LEDGER_OR_ENTRY)

    def _receipt(self, ledger_id: int, entry_id: int) -> None:
        first, highest, _ = self._sent.popleft()
        self._connection.send(encode_receipt(self.id, first, highest, ledger_id, entry_id))

    def on_publish_waiting(self, error: MagnetarError) -> None:
        """Does nothing, because Pulsar's protocol has no command that says why publishes wait for their outcome."""

    def send_provisional_receipt(self, sequence_id: int) -> None:
        """Does nothing: no producer of Pulsar's protocol has acks=one."""

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        if isinstance(error, FINAL_PUBLISH_ERRORS):
            self._send_error(error)
        else:
            self._end_with(error)

    def _send_error(self, error: MagnetarError) -> None:
        first, highest, why = self._sent.popleft()
        error = why or error
        number = pulsar.NotAllowedError if isinstance(error, TRANSACTION_ERRORS) else find_pulsar_error_number(error)
        if number == pulsar.NotAllowedError and self._connection.client.startswith(ENDED_BY_CHECKSUM):
            number = pulsar.ChecksumError
        self._connection.send(encode_frame(send_error=pulsar.CommandSendError(
            producer_id=self.id, sequence_id=max(first, highest), error=number, message=error.message
        )))  # fmt: skip

    def on_closed(self, error: MagnetarError) -> None:
        self._end_with(error)

    # ------------------------------------------------------------------ the end
    def _end_with(self, error: MagnetarError) -> None:
        """Closes the producer for a reason of the broker. The client then opens the producer again, and gets the error
        as the answer."""
        if not self._over:
            self._connection.send(
                encode_frame(close_producer=pulsar.CommandCloseProducer(
                    producer_id=self.id, request_id=NO_REQUEST_ID, **self._connection.make_next_owner_fields(error)
                ))
            )  # fmt: skip
            self.remove_and_leave()

    def remove_and_leave(self) -> None:
        """Removes the producer from the connection, and makes it leave the topic. Called when the broker has closed the
        producer, or the client uses its id for another producer."""
        self._over = True
        self._connection.handlers.remove_producer(self)
        self._connection.start_uncancelled_cleanup(self.leave())

    async def close(self, request_id: int) -> None:
        """Closes the producer as a CLOSE_PRODUCER command asks. Answers the command when every publish in flight is
        answered."""
        await run_and_clean_up(self._close(request_id), self.leave)

    async def _close(self, request_id: int) -> None:
        try:
            await self._stop_opening()
            if self._session is not None:
                await self._session.close()
        except Exception as error:
            self._connection.send_error(request_id, ensure_magnetar_error(error))
        else:
            self._connection.send_success(request_id)

    async def leave(self) -> None:
        """Ends the producer at once: cancels its opening if that is in progress, drops the entries that wait, and
        leaves the topic. Idempotent."""
        self._over = True
        self._connection.count_waiting_bytes(-sum(map(len, self._waiting)))
        self._waiting.clear()
        await self._stop_opening()
        if self._session is not None:
            self._connection.names.remove(self._asked.topic, self._session.name, self)
            self._session.leave()

    async def _stop_opening(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait((opening,))


def _names_txn(entry: Buffer) -> bool:
    """Whether the metadata of the entry contains a transaction id. True if the metadata does not parse: then the
    session refuses the entry."""
    try:
        return has_txn(parse_header(entry, verify=False).metadata)
    except CorruptEntry:
        return True


def compute_payload_bytes_max(config: BrokerConfig) -> int:
    """Returns the size limit for payloads that is sent to clients, in bytes: `max_message_bytes`, or less if a ledger
    entry would otherwise have too little room for the metadata of the message."""
    return max(1, config.max_message_bytes - METADATA_BYTES_LIMIT + compute_metadata_bytes_max(config))


# --------------------------------------------------------------------------------------------------------- transactions
# Transactions of a Pulsar client: finding the coordinators, beginning, adding, ending.
#
# A client asks for the partitions of `ASSIGN_TOPIC` (broker/transaction/coordinators.py), looks each up, and sends
# TC_CLIENT_CONNECT_REQUEST with the number of the partition to its owner. From then on NEW_TXN_RESPONSE and END_TXN go
# there. The topics join a transaction by themselves when its first message or acknowledgement arrives (broker/topic/).
# So ADD commands only check the client's permissions and begin the timeout of the transaction; a topic that is only
# named, and may not exist, is no participant. A transaction belongs to the role that began it: another role gets the
# answer for an id that was never given.
#
# If the coordinator moved, or its answer is not known, the answer is TransactionCoordinatorNotFound: the client looks
# the coordinator up and repeats the request; a repeated END_TXN gets the same answer. Guards:
# tests/broker/pulsar/test_transactions.py, tests/interop.

TOPICS_ADDED_MAX = 1000
"""Most topics or subscriptions in one ADD command."""
NEW_TXN_RESPONSE = "new_txn_response"
_ELSEWHERE = (NotFound, OutcomeUnknown, TimedOut, Unavailable)
"""Errors after which the client looks the coordinator up and asks again."""


def has_txn(command: Any) -> bool:
    """Returns True if a SEND or ACK command names a transaction: it has both fields of the transaction id, with any
    values."""
    return bool(command.HasField("txnid_most_bits") and command.HasField("txnid_least_bits"))


def transaction_id_of(command: Any) -> TxnId:
    """Returns the transaction id that a command contains as two numbers. Raises InvalidRequest if the numbers are not a
    valid id."""
    return TxnId.from_numbers(command.txnid_most_bits, command.txnid_least_bits)


def get_coordinator_number(topic: TopicName) -> int | None:
    """Returns the number of the transaction coordinator that a partition of the topic `ASSIGN_TOPIC` stands for; None
    if `topic` is not such a partition."""
    return topic.partition if topic.is_partition and topic.base == ASSIGN_TOPIC else None


# ------------------------------------------------------------------ commands
async def connect_coordinator(connection: PulsarConnection, asked: pulsar.CommandTcClientConnectRequest) -> bytes:
    """Loads the transaction coordinator that the client names, and returns the frame that answers the client. Raises
    the errors of `TransactionCoordinators.load_owned_coordinator`."""
    await _here(connection, asked.tc_id)
    return encode_frame(tc_client_connect_response=pulsar.CommandTcClientConnectResponse(request_id=asked.request_id))


def make_coordinator_refused_frame(asked: pulsar.CommandTcClientConnectRequest, error: MagnetarError) -> bytes:
    """Returns the frame that tells the client that it cannot connect to the coordinator, because of `error`."""
    return encode_frame(tc_client_connect_response=pulsar.CommandTcClientConnectResponse(
        request_id=asked.request_id, error=_number(error), message=error.message
    ))  # fmt: skip


async def begin_transaction(connection: PulsarConnection, asked: pulsar.CommandNewTxn) -> bytes:
    """Begins a transaction that belongs to the caller's role, and returns the frame that contains its id. Raises the
    errors of `TransactionCoordinators.load_owned_coordinator` and of `RunningCoordinator.begin_transactions`."""
    coordinator = await _here(connection, asked.tc_id)
    begun = await coordinator.begin_transactions(
        connection.caller.principal.name, timeout_s=asked.txn_ttl_millis / 1000, address=connection.caller.peer
    )
    return encode_frame(new_txn_response=pulsar.TransactionResponse(
        request_id=asked.request_id, txnid_most_bits=coordinator.number, txnid_least_bits=begun.first
    ))  # fmt: skip


async def add_partitions_to_transaction(connection: PulsarConnection, asked: pulsar.CommandAddPartitionToTxn) -> bytes:
    """Checks that the caller may produce to the topics, and begins the timeout of the transaction. Returns the frame of
    the answer. Stores no topics: a topic joins the transaction with the first message. Raises Unauthorized,
    InvalidRequest or InvalidName if a topic is refused; TransactionAborted if the transaction has ended,
    TransactionEnded if it is prepared; and the errors of `TransactionCoordinators.load_owned_coordinator`."""
    txn, require = transaction_id_of(asked), connection.broker.access.check_permission
    for topic in _topics(asked.partitions):
        await require(connection.caller.principal, Permission.PRODUCE, topic=topic)
    await _begin_time(connection, txn)
    return encode_frame(add_partition_to_txn_response=_done(asked))


async def add_subscriptions_to_transaction(
    connection: PulsarConnection, asked: pulsar.CommandAddSubscriptionToTxn
) -> bytes:
    """Checks that the caller may consume from the subscriptions, and begins the timeout of the transaction. Returns the
    frame of the answer. Stores no subscriptions. Raises the same errors as `add_partitions_to_transaction`."""
    txn, require = transaction_id_of(asked), connection.broker.access.check_permission
    topics = _topics(each.topic for each in asked.subscription)
    for topic, each in zip(topics, asked.subscription, strict=True):
        await require(connection.caller.principal, Permission.CONSUME, topic=topic, subscription=each.subscription)
    await _begin_time(connection, txn)
    return encode_frame(add_subscription_to_txn_response=_done(asked))


async def end_transaction(connection: PulsarConnection, asked: pulsar.CommandEndTxn) -> bytes:
    """Commits or aborts a transaction, as the client asks, and returns the frame of the answer. Raises TransactionEnded
    if the client aborts a transaction that is committed; InvalidRequest if the id is invalid; and the errors of
    `TransactionCoordinators.load_owned_coordinator` and of `RunningCoordinator.end_transaction`."""
    txn = transaction_id_of(asked)
    verb = TransactionEndVerb.COMMIT if asked.txn_action == pulsar.COMMIT else TransactionEndVerb.ABORT
    coordinator = await _here(connection, txn.coordinator)
    state = await coordinator.end_transaction(txn, verb, connection.caller.principal.name)
    if verb is TransactionEndVerb.ABORT and state is TxnState.COMMITTED:
        raise TransactionEnded(f"transaction {txn} is committed: it cannot be aborted")
    return encode_frame(end_txn_response=_done(asked))


async def _here(connection: PulsarConnection, number: int) -> RunningCoordinator:
    return await connection.broker.transactions.load_owned_coordinator(number)


def _topics(names: Iterable[str]) -> list[TopicName]:
    """Parses names of topics. Raises InvalidName, or InvalidRequest if they are more than TOPICS_ADDED_MAX."""
    topics = [TopicName.parse(name) for name in names]
    if len(topics) > TOPICS_ADDED_MAX:
        raise InvalidRequest(f"{len(topics)} are added at once; {TOPICS_ADDED_MAX} at most")
    return topics


async def _begin_time(connection: PulsarConnection, txn: TxnId) -> None:
    """Begins the timeout of the transaction. Raises TransactionAborted if the transaction has ended, InvalidRequest if
    another role began it."""
    coordinator = await _here(connection, txn.coordinator)
    state = convert_join_answer_to_state(await coordinator.join_transaction(txn, "", connection.caller.principal.name))
    if state not in (TxnState.OPEN, TxnState.PREPARED):
        raise TransactionAborted(f"transaction {txn} is {state.name.lower()}", txn=str(txn))


# ------------------------------------------------------------------ answers
def _done(asked: Any) -> pulsar.TransactionResponse:
    return pulsar.TransactionResponse(
        request_id=asked.request_id, txnid_most_bits=asked.txnid_most_bits, txnid_least_bits=asked.txnid_least_bits
    )


def _failed(kind: str) -> Callable[[Any, MagnetarError], bytes]:
    """Returns the function that encodes an error. Java's client finds who asked by `txnid_most_bits`, the number of
    the coordinator: an error without it goes to whoever asked coordinator 0, and the one who asked waits until its
    time-out."""

    def make_failure_frame(asked: Any, error: MagnetarError) -> bytes:
        answer = pulsar.TransactionResponse(txnid_most_bits=asked.tc_id) if kind == NEW_TXN_RESPONSE else _done(asked)
        answer.request_id, answer.error, answer.message = asked.request_id, _number(error), error.message
        return encode_frame(**{kind: answer})

    return make_failure_frame


def _number(error: MagnetarError) -> pulsar.ServerError:
    return pulsar.TransactionCoordinatorNotFound if isinstance(error, _ELSEWHERE) else find_pulsar_error_number(error)


CommandAnswer = tuple[Callable[["PulsarConnection", Any], Awaitable[bytes]], Callable[[Any, MagnetarError], bytes]]
TRANSACTION_COMMAND_ANSWERS: dict[str, CommandAnswer] = {
    "tc_client_connect_request": (connect_coordinator, make_coordinator_refused_frame),
    "new_txn": (begin_transaction, _failed(NEW_TXN_RESPONSE)),
    "add_partition_to_txn": (add_partitions_to_transaction, _failed("add_partition_to_txn_response")),
    "add_subscription_to_txn": (add_subscriptions_to_transaction, _failed("add_subscription_to_txn_response")),
    "end_txn": (end_transaction, _failed("end_txn_response")),
}
"""For each command of transactions the function that answers it, and the one that encodes an error as its answer."""
