"""Commands with guessed ids of others: of their producers, consumers and transactions. Each is refused or passed over.

The thieves: a role with the rights of the owner, a role without any, and the owner's own role on another connection.
"""

from typing import Any

from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry_pb2 import MessageIdData
from magnetar.runtime.network import Endpoint, World
from tests.broker.grpc.test_foreign_ids import GRANTS, Names
from tests.broker.pulsar.raw import Raw, T, simulate
from tests.broker.pulsar.test_transactions import COORDINATOR, begun, ended, publish

IDS = range(5)
REFUSED = {pulsar.NotAllowedError, pulsar.AuthorizationError}
SKIPPED = {None, pulsar.InvalidTxnStatus}
"""The answers to ABORT and COMMIT for a number that was passed over: nobody has it, and it counts as aborted."""


async def connected(world: World, endpoint: Endpoint, role: str) -> Raw:
    return await Raw.connected(world, endpoint, auth_method_name="token", auth_data=role.encode())


async def sentinel(raw: Raw, request_id: int = 9_999) -> None:
    """All that was sent before is taken, and the connection lives."""
    raw.send(ping=pulsar.CommandPing())
    await raw.next("pong")


async def attack_ids(raw: Raw, place: MessageIdData) -> None:
    """Guesses the numbers of producers and consumers of another connection; it has none of its own."""
    for id_ in IDS:
        for number in range(3):
            raw.publish(100 + number, b"stolen", id_)
        raw.send(flow=pulsar.CommandFlow(consumer_id=id_, messagePermits=1000))
        for kind in (pulsar.CommandAck.Individual, pulsar.CommandAck.Cumulative):
            raw.send(ack=pulsar.CommandAck(consumer_id=id_, ack_type=kind, message_id=[place], request_id=1))
        raw.send(redeliver_unacknowledged_messages=pulsar.CommandRedeliverUnacknowledgedMessages(consumer_id=id_))
        for asked in (
            {"seek": pulsar.CommandSeek(consumer_id=id_, request_id=50, message_publish_time=1)},
            {"unsubscribe": pulsar.CommandUnsubscribe(consumer_id=id_, request_id=50, force=True)},
            {"get_last_message_id": pulsar.CommandGetLastMessageId(consumer_id=id_, request_id=50)},
        ):
            raw.send(**asked)
            told = await raw.next("error", "success", "get_last_message_id_response")
            assert isinstance(told, pulsar.CommandError)
        raw.send(close_producer=pulsar.CommandCloseProducer(producer_id=id_, request_id=51))
        raw.send(close_consumer=pulsar.CommandCloseConsumer(consumer_id=id_, request_id=52))
        assert [(await raw.next("success")).request_id for _ in range(2)] == [51, 52]
    await sentinel(raw)


async def attack_txn(raw: Raw, txn: dict[str, int], place: MessageIdData, *, may: bool) -> None:
    """Ends, joins and writes in it by each command; `may`: it has a producer and a consumer beside the owner's."""
    told = {await ended(raw, txn, pulsar.ABORT), await ended(raw, txn, pulsar.COMMIT)}
    assert told <= REFUSED or told == SKIPPED
    raw.send(add_partition_to_txn=pulsar.CommandAddPartitionToTxn(request_id=2, partitions=[T], **txn))
    assert (await raw.next("add_partition_to_txn_response")).error in told | REFUSED
    added = pulsar.Subscription(topic=T, subscription="s")
    raw.send(add_subscription_to_txn=pulsar.CommandAddSubscriptionToTxn(request_id=5, subscription=[added], **txn))
    assert (await raw.next("add_subscription_to_txn_response")).error in told | REFUSED
    if may:
        for kind in (pulsar.CommandAck.Individual, pulsar.CommandAck.Cumulative):
            given: dict[str, Any] = {"ack_type": kind, "message_id": [place], "request_id": 6, **txn}
            raw.send(ack=pulsar.CommandAck(consumer_id=1, **given))
            answer = await raw.next("ack_response")
            assert answer.HasField("error"), answer
        publish(raw, txn, 50)
        assert isinstance(await raw.next("send_receipt", "send_error"), pulsar.CommandSendError)


async def scene(world: World, endpoint: Endpoint) -> None:
    root = await connected(world, endpoint, "root")
    await root.open_producer(producer_name="before")  # makes the topic
    owner, twin, thief, nobody = [await connected(world, endpoint, each) for each in ("ada", "ada", "eve", "mallory")]
    await owner.subscribe(subType=pulsar.CommandSubscribe.Shared)
    await owner.open_producer(producer_name="p")
    owner.publish(1, b"one")
    await owner.next("send_receipt")
    first = (await owner.next("message")).message_id
    place = MessageIdData(ledgerId=first.ledgerId, entryId=first.entryId)
    txn = await begun(owner)
    publish(owner, txn, 2)
    await owner.next("send_receipt")

    for raw in (twin, thief, nobody):
        await attack_ids(raw, place)
    guesses = [{**txn, "txnid_least_bits": txn["txnid_least_bits"] + by} for by in (0, 1, -1)]
    guesses += [{**txn, "txnid_most_bits": each} for each in range(COORDINATOR - 1, COORDINATOR + 2)]
    await thief.subscribe(permits=0)
    await thief.open_producer(producer_name="thief")
    for guess in guesses:
        await attack_txn(thief, guess, place, may=True)
        await attack_txn(nobody, guess, place, may=False)

    given = {"ack_type": pulsar.CommandAck.Individual, "message_id": [place], "request_id": 3, **txn}
    owner.send(ack=pulsar.CommandAck(consumer_id=1, **given))
    assert not (await owner.next("ack_response")).HasField("error")
    publish(owner, txn, 3)
    assert isinstance(await owner.next("send_receipt", "send_error"), pulsar.CommandSendReceipt)
    assert await ended(owner, txn, pulsar.COMMIT) is None
    came = [await owner.next_with_rest("message") for _ in range(2)]
    assert [each[0].redelivery_count for each in came] == [0, 0]
    owner.publish(4, b"last")
    assert (await owner.next("message")).message_id.entryId == came[-1][0].message_id.entryId + 1, "nothing else"
    for raw in (twin, thief, nobody):
        await sentinel(raw)


def test_no_guessed_id_of_another_connection_or_role_does_anything() -> None:
    simulate(scene, guard=Names(), grants=GRANTS)
