"""Transactions of a Pulsar client: finding the coordinators, beginning, adding, ending.

A client asks for the partitions of `ASSIGN_TOPIC` (broker/transaction/coordinators.py), looks each up, and sends
TC_CLIENT_CONNECT_REQUEST with the number of the partition to its owner. From then on NEW_TXN and END_TXN go there. The
topics join a transaction by themselves when its first message or acknowledgement arrives (broker/topic/). So ADD
commands only check the client's permissions and begin the timeout of the transaction; a topic that is only named, and
may not exist, is no participant. A transaction belongs to the role that began it: another role gets the answer for an
id that was never given.

If the coordinator moved, or its answer is not known, the answer is TransactionCoordinatorNotFound: the client looks the
coordinator up and repeats the request; a repeated END_TXN gets the same answer. Guards:
tests/broker/pulsar/test_transactions.py, tests/interop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...proto import pulsar_pb2 as pulsar
from ...proto.errors import (
    InvalidRequest,
    MagnetarError,
    NotFound,
    OutcomeUnknown,
    TimedOut,
    TransactionAborted,
    TransactionEnded,
    Unavailable,
)
from ...proto.names import TopicName
from ...proto.operations import Permission
from ...proto.states import TxnId, TxnState
from ..common.transactions import convert_join_answer_to_state
from ..transaction.coordinators import ASSIGN_TOPIC
from ..transaction.intents_core import TransactionEndVerb
from .frames import encode_frame
from .translate import find_pulsar_error_number

if TYPE_CHECKING:
    from ..transaction.coordinator import RunningCoordinator
    from .connection import PulsarConnection

ADDED_MAX = 1000
"""Most topics or subscriptions in one ADD command."""
NEW_TXN = "new_txn_response"
_ELSEWHERE = (NotFound, OutcomeUnknown, TimedOut, Unavailable)
"""Errors after which the client looks the coordinator up and asks again."""


def has_txn(command: Any) -> bool:
    """Returns whether a SEND or ACK command belongs to a transaction: both fields of the transaction id are set, with
    any value."""
    return bool(command.HasField("txnid_most_bits") and command.HasField("txnid_least_bits"))


def transaction_id_of(command: Any) -> TxnId:
    """Returns the transaction id that a command contains as two numbers. Raises InvalidRequest if the numbers are not a
    valid id."""
    return TxnId.from_numbers(command.txnid_most_bits, command.txnid_least_bits)


def coordinator_of(topic: TopicName) -> int | None:
    """Returns the number of the transaction coordinator that a partition of the topic `ASSIGN_TOPIC` stands for; None
    if `topic` is not such a partition."""
    return topic.partition if topic.is_partition and topic.base == ASSIGN_TOPIC else None


# ------------------------------------------------------------------ commands
async def connect_coordinator(connection: PulsarConnection, asked: pulsar.CommandTcClientConnectRequest) -> bytes:
    await _here(connection, asked.tc_id)
    return encode_frame(tc_client_connect_response=pulsar.CommandTcClientConnectResponse(request_id=asked.request_id))


def make_connect_error_frame(asked: pulsar.CommandTcClientConnectRequest, error: MagnetarError) -> bytes:
    return encode_frame(tc_client_connect_response=pulsar.CommandTcClientConnectResponse(
        request_id=asked.request_id, error=_number(error), message=error.message
    ))  # fmt: skip


async def begin_transaction(connection: PulsarConnection, asked: pulsar.CommandNewTxn) -> bytes:
    coordinator = await _here(connection, asked.tc_id)
    begun = await coordinator.begin(
        connection.caller.principal.name, timeout_s=asked.txn_ttl_millis / 1000, address=connection.caller.peer
    )
    return encode_frame(new_txn_response=pulsar.TransactionResponse(
        request_id=asked.request_id, txnid_most_bits=coordinator.number, txnid_least_bits=begun.first
    ))  # fmt: skip


async def add_partitions(connection: PulsarConnection, asked: pulsar.CommandAddPartitionToTxn) -> bytes:
    txn, require = transaction_id_of(asked), connection.broker.access.check_permission
    for topic in _topics(asked.partitions):
        await require(connection.caller.principal, Permission.PRODUCE, topic=topic)
    await _begin_time(connection, txn)
    return encode_frame(add_partition_to_txn_response=_done(asked))


async def add_subscriptions_to_transaction(
    connection: PulsarConnection, asked: pulsar.CommandAddSubscriptionToTxn
) -> bytes:
    txn, require = transaction_id_of(asked), connection.broker.access.check_permission
    topics = _topics(each.topic for each in asked.subscription)
    for topic, each in zip(topics, asked.subscription, strict=True):
        await require(connection.caller.principal, Permission.CONSUME, topic=topic, subscription=each.subscription)
    await _begin_time(connection, txn)
    return encode_frame(add_subscription_to_txn_response=_done(asked))


async def end_transaction(connection: PulsarConnection, asked: pulsar.CommandEndTxn) -> bytes:
    txn = transaction_id_of(asked)
    verb = TransactionEndVerb.COMMIT if asked.txn_action == pulsar.COMMIT else TransactionEndVerb.ABORT
    coordinator = await _here(connection, txn.coordinator)
    state = await coordinator.end(txn, verb, connection.caller.principal.name)
    if verb is TransactionEndVerb.ABORT and state is TxnState.COMMITTED:
        raise TransactionEnded(f"transaction {txn} is committed: it cannot be aborted")
    return encode_frame(end_txn_response=_done(asked))


async def _here(connection: PulsarConnection, number: int) -> RunningCoordinator:
    return await connection.broker.transactions.load_owned_coordinator(number)


def _topics(names: Iterable[str]) -> list[TopicName]:
    """Parses names of topics. Raises InvalidName, or InvalidRequest if they are more than ADDED_MAX."""
    topics = [TopicName.parse(name) for name in names]
    if len(topics) > ADDED_MAX:
        raise InvalidRequest(f"{len(topics)} are added at once; {ADDED_MAX} at most")
    return topics


async def _begin_time(connection: PulsarConnection, txn: TxnId) -> None:
    """Begins the timeout of the transaction. Raises TransactionAborted if the transaction has ended, InvalidRequest if
    another role began it."""
    coordinator = await _here(connection, txn.coordinator)
    state = convert_join_answer_to_state(await coordinator.join(txn, "", connection.caller.principal.name))
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
        answer = pulsar.TransactionResponse(txnid_most_bits=asked.tc_id) if kind == NEW_TXN else _done(asked)
        answer.request_id, answer.error, answer.message = asked.request_id, _number(error), error.message
        return encode_frame(**{kind: answer})

    return make_failure_frame


def _number(error: MagnetarError) -> pulsar.ServerError:
    return pulsar.TransactionCoordinatorNotFound if isinstance(error, _ELSEWHERE) else find_pulsar_error_number(error)


Answer = tuple[Callable[["PulsarConnection", Any], Awaitable[bytes]], Callable[[Any, MagnetarError], bytes]]
ANSWERS: dict[str, Answer] = {
    "tc_client_connect_request": (connect_coordinator, make_connect_error_frame),
    "new_txn": (begin_transaction, _failed(NEW_TXN)),
    "add_partition_to_txn": (add_partitions, _failed("add_partition_to_txn_response")),
    "add_subscription_to_txn": (add_subscriptions_to_transaction, _failed("add_subscription_to_txn_response")),
    "end_txn": (end_transaction, _failed("end_txn_response")),
}
"""For each command of transactions the function that answers it, and the one that encodes an error as its answer."""
