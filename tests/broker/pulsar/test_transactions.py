"""Commands of transactions, one by one: coordinators are found, what is hidden is shown, and a wrong one is told."""

import pytest

from magnetar.broker.transaction.coordinators import ASSIGN_TOPIC
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import encode_batch, encode_client_part, encode_plain_items
from magnetar.proto.entry_pb2 import MessageIdData, MessageMetadata
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Raw, T, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

COORDINATOR = 5


async def begun(raw: Raw, request_id: int = 1, coordinator: int = COORDINATOR) -> dict[str, int]:
    """The id, as the fields of a command."""
    raw.send(new_txn=pulsar.CommandNewTxn(request_id=request_id, txn_ttl_millis=60_000, tc_id=coordinator))
    answer = await raw.next("new_txn_response")
    assert not answer.HasField("error"), answer
    return {"txnid_most_bits": answer.txnid_most_bits, "txnid_least_bits": answer.txnid_least_bits}


async def ended(
    raw: Raw, txn: dict[str, int], action: pulsar.TxnAction, request_id: int = 9
) -> pulsar.ServerError | None:
    raw.send(end_txn=pulsar.CommandEndTxn(request_id=request_id, txn_action=action, **txn))
    answer = await raw.next("end_txn_response")
    assert answer.request_id == request_id
    return answer.error if answer.HasField("error") else None


def publish(raw: Raw, txn: dict[str, int], sequence_id: int, *, in_metadata: bool = True) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1)
    if in_metadata:
        metadata.txnid_most_bits, metadata.txnid_least_bits = txn["txnid_most_bits"], txn["txnid_least_bits"]
    send = pulsar.CommandSend(producer_id=1, sequence_id=sequence_id, **txn)
    raw.send(encode_client_part(metadata, b"x"), send=send)


async def test_the_coordinators_are_the_partitions_of_a_topic_that_is_looked_up(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    asked = pulsar.CommandPartitionedTopicMetadata(topic=ASSIGN_TOPIC.full, request_id=1)
    raw.send(partitioned_metadata=asked)
    found = await raw.next("partitioned_metadata_response")
    assert found.partitions == 16
    topic = ASSIGN_TOPIC.with_partition(COORDINATOR).full
    raw.send(lookup=pulsar.CommandLookupTopic(topic=topic, request_id=2))
    assert (await raw.next("lookup_response")).response == pulsar.CommandLookupTopicResponse.Connect
    raw.send(tc_client_connect_request=pulsar.CommandTcClientConnectRequest(request_id=3, tc_id=COORDINATOR))
    assert not (await raw.next("tc_client_connect_response")).HasField("error")
    raw.send(tc_client_connect_request=pulsar.CommandTcClientConnectRequest(request_id=4, tc_id=16))
    assert (await raw.next("tc_client_connect_response")).error == pulsar.TransactionCoordinatorNotFound


async def test_a_message_and_an_acknowledgement_count_with_the_commit(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.subscribe()
    await raw.open_producer(producer_name="p")
    txn = await begun(raw)
    assert txn["txnid_most_bits"] == COORDINATOR
    raw.send(add_partition_to_txn=pulsar.CommandAddPartitionToTxn(request_id=2, partitions=[T], **txn))
    assert not (await raw.next("add_partition_to_txn_response")).HasField("error")
    publish(raw, txn, 1)
    await raw.next("send_receipt")
    raw.publish(2)
    await raw.next("send_receipt")
    raw.send(get_last_message_id=pulsar.CommandGetLastMessageId(consumer_id=1, request_id=3))
    last = await raw.next("get_last_message_id_response")
    assert last.last_message_id.entryId == (1 << 64) - 1, "all is hidden"
    assert await ended(raw, txn, pulsar.COMMIT) is None
    first, second = await raw.next("message"), await raw.next("message")
    assert (first.message_id.entryId, second.message_id.entryId) == (0, 1)

    txn, other = await begun(raw), await begun(raw, 2)
    added = pulsar.Subscription(topic=T, subscription="s")
    raw.send(
        add_subscription_to_txn=pulsar.CommandAddSubscriptionToTxn(request_id=5, subscription=[added], **txn)
    )
    assert not (await raw.next("add_subscription_to_txn_response")).HasField("error")
    place = MessageIdData(ledgerId=first.message_id.ledgerId, entryId=0)
    for number, each in enumerate((txn, other), 6):
        given = {"ack_type": pulsar.CommandAck.Individual, "message_id": [place], "request_id": number}
        raw.send(ack=pulsar.CommandAck(consumer_id=1, **given, **each))
        answer = await raw.next("ack_response")
        assert answer.txnid_least_bits == each["txnid_least_bits"]
        assert answer.HasField("error") is (each is other)
    assert answer.error == pulsar.TransactionConflict
    assert await ended(raw, other, pulsar.ABORT) is None
    assert await ended(raw, txn, pulsar.COMMIT) is None
    assert await ended(raw, txn, pulsar.COMMIT) is None, "a repeated commit has the same answer"
    assert await ended(raw, other, pulsar.COMMIT) == pulsar.InvalidTxnStatus


async def test_a_message_that_was_delivered_twice_is_a_conflict_in_one_transaction(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer(producer_name="p")
    for number in range(2):
        raw.publish(number)
        await raw.next("send_receipt")
    metadata = MessageMetadata(producer_name="p", sequence_id=2, publish_time=1)
    entry = encode_batch(metadata, encode_plain_items([b"a", b"b", b"c"]), 3)
    raw.send(entry, send=pulsar.CommandSend(producer_id=1, sequence_id=2, num_messages=3))
    await raw.next("send_receipt")
    await raw.subscribe()
    one, two, batch = [(await raw.next("message")).message_id for _ in range(3)]

    def place(of: MessageIdData, ack_set: int | None = None) -> MessageIdData:
        named = MessageIdData(ledgerId=of.ledgerId, entryId=of.entryId)
        if ack_set is not None:
            named.ack_set.append(ack_set)
            named.batch_size = 3
        return named

    async def acked(*places: MessageIdData) -> bool:
        given = {"ack_type": pulsar.CommandAck.Individual, "message_id": places, "request_id": 7}
        raw.send(ack=pulsar.CommandAck(consumer_id=1, **given, **txn))
        answer = await raw.next("ack_response")
        assert not answer.HasField("error") or answer.error == pulsar.TransactionConflict
        return not answer.HasField("error")

    txn = await begun(raw)
    assert await acked(place(one))
    assert not await acked(place(one))
    assert not await acked(place(two), place(one)), "all of a request, or none"
    assert not await acked(place(two), place(two))
    assert await acked(place(two))
    assert await acked(place(batch, 0b110), place(batch, 0b101))
    assert not await acked(place(batch, 0b100)), "the first two; one bit is a message that is left"
    assert not await acked(place(batch, 0b011), place(batch, 0b011))
    assert await acked(place(batch)), "what is left of it"
    assert not await acked(place(batch))
    assert await ended(raw, txn, pulsar.COMMIT) is None


async def test_each_message_of_a_batch_counts_in_a_transaction_also_after_an_abort_gave_a_part_of_it_back(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer(producer_name="p")
    metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    entry = encode_batch(metadata, encode_plain_items([b"a", b"b", b"c"]), 3)
    raw.send(entry, send=pulsar.CommandSend(producer_id=1, sequence_id=0, num_messages=3))
    await raw.next("send_receipt")
    await raw.subscribe(permits=3)  # what is given back waits for more
    batch = (await raw.next("message")).message_id

    async def acked(txn: dict[str, int], index: int) -> None:
        place = MessageIdData(ledgerId=batch.ledgerId, entryId=batch.entryId, batch_size=3)
        place.ack_set.append(0b111 & ~(1 << index))
        given = {"ack_type": pulsar.CommandAck.Individual, "message_id": [place], "request_id": 7}
        raw.send(ack=pulsar.CommandAck(consumer_id=1, **given, **txn))
        assert not (await raw.next("ack_response")).HasField("error")

    txn = await begun(raw)
    await acked(txn, 1)
    await acked(txn, 2)
    assert await ended(raw, txn, pulsar.ABORT) is None
    txn = await begun(raw, 2)
    for index in range(3):
        await acked(txn, index)
    assert await ended(raw, txn, pulsar.COMMIT) is None
    raw.send(close_consumer=pulsar.CommandCloseConsumer(consumer_id=1, request_id=8))
    await raw.next("success")
    await raw.subscribe(2)
    raw.publish(3)
    assert (await raw.next("message")).message_id.entryId != batch.entryId, "all of the batch is done"


async def test_an_aborted_message_is_never_shown_and_takes_no_part_in_what_follows(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.subscribe()
    await raw.open_producer(producer_name="p")
    txn = await begun(raw)
    publish(raw, txn, 1)
    await raw.next("send_receipt")
    assert await ended(raw, txn, pulsar.ABORT) is None
    raw.publish(2)
    assert (await raw.next("message")).message_id.entryId == 1
    publish(raw, txn, 3)
    refused = await raw.next("send_error")
    assert refused.sequence_id == 3
    assert refused.error == pulsar.NotAllowedError


async def test_an_end_that_contradicts_the_first_one_is_refused_and_the_same_one_is_answered_again(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    for first, other in ((pulsar.COMMIT, pulsar.ABORT), (pulsar.ABORT, pulsar.COMMIT)):
        txn = await begun(raw)
        assert await ended(raw, txn, first) is None
        assert await ended(raw, txn, other) == pulsar.InvalidTxnStatus
        assert await ended(raw, txn, first) is None


def test_a_send_whose_message_names_no_transaction_is_not_taken_for_a_plain_one() -> None:
    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        await raw.open_producer(producer_name="p")
        publish(raw, await begun(raw), 1, in_metadata=False)
        refused = await raw.next("send_error", "close_producer", "send_receipt")
        assert (refused.sequence_id, refused.error) == (1, pulsar.NotAllowedError)

    broker = simulate(scenario)
    assert all(topic.log.next_index == 0 for topic in broker.topics.values())


async def test_ids_that_cannot_be_and_too_many_topics_are_refused(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    wrong = {"txnid_most_bits": (1 << 64) - 1, "txnid_least_bits": 1}
    assert await ended(raw, wrong, pulsar.COMMIT) == pulsar.NotAllowedError
    txn = await begun(raw)
    never = txn | {"txnid_least_bits": txn["txnid_least_bits"] + 1_000_000}
    assert await ended(raw, never, pulsar.COMMIT) == pulsar.NotAllowedError
    raw.send(add_partition_to_txn=pulsar.CommandAddPartitionToTxn(request_id=2, partitions=[T] * 1001, **txn))
    assert (await raw.next("add_partition_to_txn_response")).error == pulsar.NotAllowedError
    raw.send(add_partition_to_txn=pulsar.CommandAddPartitionToTxn(request_id=2, partitions=["a//b"], **txn))
    assert (await raw.next("add_partition_to_txn_response")).error == pulsar.InvalidTopicName


async def test_an_error_names_the_coordinator_as_javas_client_finds_who_asked_by_it(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    raw.send(new_txn=pulsar.CommandNewTxn(request_id=1, txn_ttl_millis=60_000, tc_id=16))
    refused = await raw.next("new_txn_response")
    assert (refused.error, refused.request_id) == (pulsar.TransactionCoordinatorNotFound, 1)
    assert refused.txnid_most_bits == 16
    never = {"txnid_most_bits": COORDINATOR, "txnid_least_bits": 1 << 40}
    raw.send(end_txn=pulsar.CommandEndTxn(request_id=2, txn_action=pulsar.COMMIT, **never))
    raw.send(add_partition_to_txn=pulsar.CommandAddPartitionToTxn(request_id=3, partitions=[T], **never))
    added = [pulsar.Subscription(topic=T, subscription="s")]
    raw.send(add_subscription_to_txn=pulsar.CommandAddSubscriptionToTxn(request_id=4, subscription=added, **never))
    for kind in ("end_txn_response", "add_partition_to_txn_response", "add_subscription_to_txn_response"):
        answer = await raw.next(kind)
        assert answer.HasField("error")
        assert (answer.txnid_most_bits, answer.txnid_least_bits) == (COORDINATOR, 1 << 40), kind


def test_what_is_only_named_joins_nothing_and_makes_no_topic() -> None:
    """A client names topics beforehand; they may not exist, and nobody may have written there."""

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        txn = await begun(raw)
        ghosts = [f"persistent://public/default/ghost-{number}" for number in range(100)]
        raw.send(add_partition_to_txn=pulsar.CommandAddPartitionToTxn(request_id=2, partitions=ghosts, **txn))
        assert not (await raw.next("add_partition_to_txn_response")).HasField("error")
        added = [pulsar.Subscription(topic=each, subscription="s") for each in ghosts]
        raw.send(add_subscription_to_txn=pulsar.CommandAddSubscriptionToTxn(request_id=3, subscription=added, **txn))
        assert not (await raw.next("add_subscription_to_txn_response")).HasField("error")
        assert await ended(raw, txn, pulsar.COMMIT) is None
        raw.send(get_topics_of_namespace=pulsar.CommandGetTopicsOfNamespace(request_id=4, namespace="public/default"))
        assert not (await raw.next("get_topics_of_namespace_response")).topics

    broker = simulate(scenario)
    (coordinator,) = broker.topic_manager.transactions.loaded_coordinators
    assert coordinator.statistics()["settling_topics"] == 0
    assert not broker.topics


async def test_the_last_message_of_a_batch_that_the_consumer_does_not_hold_counts_or_is_refused(
    world: World, endpoint: Endpoint, /
) -> None:
    """As after a reconnect: a client still acknowledges what it was given before. Words of zeros are left out, so an
    acknowledgement of the last message alone is told by the size of the batch only."""
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer(producer_name="p")
    await raw.subscribe(permits=0)
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    entry = encode_batch(metadata, encode_plain_items([b"first", b"last"]), 2)
    raw.send(entry, send=pulsar.CommandSend(producer_id=1, sequence_id=1, num_messages=2))
    place = MessageIdData()
    place.CopyFrom((await raw.next("send_receipt")).message_id)
    place.ack_set.append(0b01)
    txn = await begun(raw)
    given = {"consumer_id": 1, "ack_type": pulsar.CommandAck.Individual, **txn}
    raw.send(ack=pulsar.CommandAck(message_id=[place], request_id=6, **given))
    assert (await raw.next("ack_response")).HasField("error"), "nobody says how many messages it has"
    place.batch_size = 2
    raw.send(ack=pulsar.CommandAck(message_id=[place], request_id=7, **given))
    assert not (await raw.next("ack_response")).HasField("error")
    assert await ended(raw, txn, pulsar.COMMIT) is None
    raw.send(flow=pulsar.CommandFlow(consumer_id=1, messagePermits=10))
    assert list((await raw.next("message")).ack_set) == [0b01], "the first one alone is left"
