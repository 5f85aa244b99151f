"""Transactions of the SDK over a broker in memory: what counts, what does not, and what each misuse is told."""

import asyncio
from contextlib import suppress

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.common.checks import WrongValue
from magnetar.client.core.transaction import TransactionState
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.transactions.coordinators import TransactionEndAnswer
from magnetar.client.transactions.transaction import Transactions
from magnetar.proto import errors as wire_errors
from magnetar.proto.states import TxnId, TxnState
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import TransactionalBroker
from tests.client.simulated import simulate

TOPIC = "persistent://public/default/t"


def run(body, broker: TransactionalBroker | None = None, **options) -> TransactionalBroker:  # type: ignore[no-untyped-def]
    serving = broker or TransactionalBroker({"parts": 3})
    simulate(body, serving, **options)
    return serving


pytestmark = pytest.mark.run_by.with_args(run)


async def test_what_is_sent_and_acknowledged_counts_when_it_commits(
    client: Client, broker: TransactionalBroker, /
) -> None:
    source = await client.create_producer("source")
    await source.send(b"in")
    producer = await client.create_producer("t")
    consumer = await client.subscribe("source", "s", initial_position=InitialPosition.Earliest)
    reader = await client.create_reader("t", magnetar.MessageId.earliest)
    async with client.transaction() as txn:
        message = await consumer.receive()
        await producer.send(b"out", txn=txn)
        await consumer.acknowledge(message, txn=txn)
        assert txn.state is TransactionState.OPEN
        assert broker.visible(TOPIC) == []
        with pytest.raises(magnetar.Timeout):
            await reader.read_next(1000)
    assert txn.state is TransactionState.COMMITTED
    assert (await reader.read_next(5000)).data() == b"out"
    assert await client.transaction_status(txn.id) is TransactionState.COMMITTED
    assert await client.transaction_status(str(txn.id)) is TransactionState.COMMITTED
    assert broker.topics["persistent://public/default/source"].subscriptions["s"].done == {0}
    [end] = broker.known[txn.id].ends
    told = {each.topic: (each.entries, each.last.entry_id) for each in end.participants}
    assert told == {TOPIC: (1, 0), "persistent://public/default/source": (0, 0)}


async def test_a_body_that_raises_aborts_and_what_it_acknowledged_comes_again(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    await producer.send(b"in")
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    txn = client.transaction()

    async def work() -> None:
        async with txn:
            await consumer.acknowledge(await consumer.receive(), txn=txn)
            await producer.send(b"out", txn=txn)
            raise KeyError("x")

    with pytest.raises(KeyError):
        await work()
    assert txn.state is TransactionState.ABORTED
    assert broker.state_of(txn.id) is TxnState.ABORTED
    again = await consumer.receive(5000)
    assert (again.data(), again.redelivery_count()) == (b"in", 1)
    with pytest.raises(magnetar.Timeout):
        await consumer.receive(1000)


async def test_a_cancelled_body_aborts(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    begun: list[TxnId] = []

    async def work() -> None:
        async with client.transaction() as txn:
            begun.append(txn.id)
            await producer.send(b"x", txn=txn)
            await asyncio.sleep(1000)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert broker.state_of(begun[0]) is TxnState.ABORTED


async def test_a_commit_that_is_cancelled_goes_on_and_its_outcome_is_awaited(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    await producer.send(b"x", txn=txn)
    broker.unavailable = True
    task = asyncio.ensure_future(txn.commit())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(1)
    assert not task.done()
    assert txn.state is TransactionState.COMMITTING
    broker.unavailable = False
    with pytest.raises(asyncio.CancelledError):
        await task
    assert txn.state is TransactionState.COMMITTED
    await txn.commit()  # the same answer


async def test_a_commit_waits_for_sends_that_nobody_awaits_and_sends_them_at_once(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t", batching_max_publish_delay_ms=60_000)
    async with client.transaction() as txn:
        for number in range(10):
            producer.send_nowait(b"%d" % number, txn=txn)
    assert len(broker.visible(TOPIC)) == 1
    assert broker.received == [(0, 10)]


async def test_an_entry_belongs_to_one_transaction_and_says_which(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t", batching_max_publish_delay_ms=60_000)
    one, two = await client.transaction(), await client.transaction()
    for txn in (None, None, one, one, two, one, None):
        producer.send_nowait(b"x", txn=txn)
    await asyncio.gather(one.commit(), two.commit())
    await producer.flush()
    headers = [each.metadata for each in broker.topics[TOPIC].headers]
    ids = [
        (each.txnid_most_bits, each.txnid_least_bits) if each.HasField("txnid_most_bits") else None
        for each in headers
    ]
    assert ids == [None, one.id, two.id, one.id, None]
    assert [count for _, count in broker.received] == [2, 2, 1, 1, 1]
    assert len(broker.known[one.id].ends) == len(broker.known[two.id].ends) == 1
    assert broker.known[one.id].ends[0].participants[0].entries == 2


async def test_chunks_of_a_message_belong_to_one_transaction_and_each_is_counted(
    client: Client, broker: TransactionalBroker, /
) -> None:
    broker.max_message_size = 50_000
    producer = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
    async with client.transaction() as txn:
        await producer.send(b"x" * 120_000, txn=txn)
    entries = broker.known[txn.id].entries[TOPIC]
    assert len(entries) >= 3
    [end] = broker.known[txn.id].ends
    assert (end.participants[0].entries, end.participants[0].last.entry_id) == (len(entries), entries[-1])


async def test_a_resend_over_a_new_connection_keeps_its_sequence_ids_and_its_transaction(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    broker.drop_after = [2]
    async with client.transaction() as txn:
        await asyncio.gather(*(producer.send(b"%d" % i, txn=txn) for i in range(3)))
    assert sorted({sequence for sequence, _ in broker.received}) == [0, 1, 2]
    assert len(broker.received) > 3
    assert {h.metadata.txnid_least_bits for h in broker.topics[TOPIC].headers} == {txn.id.least}


async def test_commit_after_a_failed_operation_aborts(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    broker.publish_errors = [wire_errors.InvalidRequest("refused")]
    with pytest.raises(magnetar.TransactionAborted) as caught:
        async with client.transaction() as txn:
            producer.send_nowait(b"x", txn=txn)
    assert caught.value.reason == "operation failed"
    assert caught.value.definite
    assert broker.state_of(txn.id) is TxnState.ABORTED
    assert txn.state is TransactionState.ABORTED
    with pytest.raises(magnetar.TransactionAborted):
        await txn.commit()


async def test_a_conflict_is_told_at_once_and_the_transaction_can_only_abort(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    await producer.send(b"in")
    consumer = await client.subscribe("t", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest)
    message = await consumer.receive()
    async with client.transaction() as first:
        await consumer.acknowledge(message, txn=first)
        await consumer.acknowledge(message, txn=first)  # again in the same: no conflict
        second = await client.transaction()
        with pytest.raises(magnetar.TransactionConflict):
            await consumer.acknowledge(message, txn=second)
        with pytest.raises(magnetar.TransactionAborted) as caught:
            await second.commit()
        assert caught.value.reason == "conflict"
    assert first.state is TransactionState.COMMITTED


async def test_lists_and_cumulative_acknowledgements_are_one_request_each(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    for number in range(20):
        await producer.send(b"%d" % number)
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    messages = [await consumer.receive() for _ in range(20)]
    async with client.transaction() as txn:
        await consumer.acknowledge(messages[:10], txn=txn)
        await consumer.acknowledge_cumulative(messages[15], txn=txn)
        assert broker.topics[TOPIC].subscriptions["s"].done == set()
    assert len(broker.ack_requests) == 2
    assert broker.topics[TOPIC].subscriptions["s"].done == set(range(16))
    await consumer.acknowledge(messages[16:])
    await asyncio.sleep(1)
    assert broker.topics[TOPIC].subscriptions["s"].done == set(range(20))


@pytest.mark.parametrize("ends", ["abort", "body", "commit"])
async def test_after_an_aborted_cumulative_acknowledgement_nothing_is_taken_before_what_comes_again(
    client: Client, broker: TransactionalBroker, /, ends: str
) -> None:
    """Else the next one would cover it: it would be acknowledged, and never have been seen again."""
    producer = await client.create_producer("t", batching_enabled=False)
    for number in range(6):
        await producer.send(b"%d" % number)
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    taken = [await consumer.receive() for _ in range(3)]
    topic = broker.topics[TOPIC]
    broker.before_again = lambda: topic.copy(-1)  # one that is delivered before those that come again
    txn = client.transaction()
    with suppress(KeyError, magnetar.TransactionAborted):
        async with txn:
            await consumer.acknowledge_cumulative(taken[-1], txn=txn)
            if ends == "abort":
                await txn.abort()
            elif ends == "body":
                raise KeyError
            else:
                broker.expire(txn.id)
    assert txn.state is TransactionState.ABORTED
    expected = [b"%d" % number for number in (*range(6), 5)]
    assert [(await consumer.receive(5000)).data() for _ in expected] == expected
    assert not broker.topics[TOPIC].subscriptions["s"].done


async def test_a_part_of_a_batch_is_acknowledged_in_a_transaction(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    await producer.send_many([b"0", b"1", b"2"])
    consumer = await client.subscribe("t", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest)
    messages = [await consumer.receive() for _ in range(3)]
    async with client.transaction() as one, asyncio.timeout(60):
        await consumer.acknowledge(messages[:1], txn=one)
        two = await client.transaction()
        await consumer.acknowledge(messages[1:], txn=two)
        await two.commit()
    assert broker.topics[TOPIC].subscriptions["s"].done == {0}


@pytest.mark.parametrize("again", ["asked for", "over a new connection"])
async def test_a_message_that_was_delivered_twice_does_not_count_twice_in_one_transaction(
    client: Client, broker: FakeBroker, /, again: str
) -> None:
    producer = await client.create_producer("t")
    await producer.send_many([b"0", b"1"])
    consumer = await client.subscribe("t", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest)
    first = [await consumer.receive() for _ in range(2)]
    if again == "asked for":
        consumer.redeliver_unacknowledged_messages()
    else:
        broker.cut()
    second = [await consumer.receive() for _ in range(2)]
    assert [each.message_id() for each in first] == [each.message_id() for each in second]
    txn = await client.transaction()
    for _ in range(2):
        await consumer.acknowledge(second[0], txn=txn)  # the same delivery
    with pytest.raises(magnetar.TransactionConflict, match="delivered twice"):
        await consumer.acknowledge([first[1], first[0]], txn=txn)
    with pytest.raises(magnetar.TransactionAborted):
        await txn.commit()
    async with client.transaction() as txn:
        await consumer.acknowledge([second[1]], txn=txn)


@pytest.mark.parametrize("batched", [False, True])
async def test_what_comes_again_over_a_new_connection_does_not_count_twice_under_cumulative_acknowledgements(
    client: Client, broker: FakeBroker, /, batched: bool
) -> None:
    """The acknowledgement of what follows a copy would cover it, and the broker cannot tell."""
    producer = await client.create_producer("t", batching_enabled=batched)
    await producer.send_many([b"%d" % number for number in range(6)])
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    async with client.transaction() as txn:
        taken = [await consumer.receive()]
        await consumer.acknowledge_cumulative(taken[-1], txn=txn)
    async with client.transaction() as txn:
        taken += [await consumer.receive() for _ in range(2)]
        broker.cut()
        await asyncio.sleep(1)  # all of it came again
        taken.append(await consumer.receive())
        await consumer.acknowledge_cumulative(taken[-1], txn=txn)
    broker.cut()
    async with client.transaction() as txn:
        taken += [await consumer.receive() for _ in range(2)]
        await consumer.acknowledge_cumulative(taken[-1], txn=txn)
    assert [each.data() for each in taken] == [b"%d" % number for number in range(6)]
    with pytest.raises(magnetar.Timeout):
        await consumer.receive(1000)
    assert broker.topics[TOPIC].subscriptions["s"].done == set(range(1 if batched else 6))


async def test_the_first_cumulative_acknowledgement_is_refused_when_copies_may_have_been_taken(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    await producer.send_many([b"0", b"1"])
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    await consumer.receive()
    broker.cut()
    await asyncio.sleep(1)
    copy = await consumer.receive()
    txn = await client.transaction()
    with pytest.raises(magnetar.TransactionConflict, match="delivered twice"):
        await consumer.acknowledge_cumulative(copy, txn=txn)
    with pytest.raises(magnetar.TransactionAborted):
        await txn.commit()
    async with client.transaction() as txn:
        taken = [await consumer.receive() for _ in range(2)]
        await consumer.acknowledge_cumulative(taken[-1], txn=txn)
    assert [each.data() for each in taken] == [b"0", b"1"]
    assert broker.topics[TOPIC].subscriptions["s"].done == {0, 1}


async def test_what_a_consumer_drops_when_it_is_not_active_any_more_comes_after_a_broken_connection(
    client: Client, broker: FakeBroker, /
) -> None:
    """The filter of repeats leaves out what the application has, and no more."""
    producer = await client.create_producer("t", batching_enabled=False)
    await producer.send_many([b"%d" % number for number in range(6)])
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    async with client.transaction() as txn:
        await consumer.acknowledge_cumulative(await consumer.receive(), txn=txn)
    await consumer.receive()
    [member] = broker.topics[TOPIC].subscriptions["s"].consumers
    member.say(active=False)
    await asyncio.sleep(1)
    assert not consumer.inbox
    broker.cut()
    assert [(await consumer.receive(5000)).data() for _ in range(4)] == [b"2", b"3", b"4", b"5"]
    consumer.check()


async def test_two_consumers_of_a_subscription_do_not_count_a_message_twice_in_one_transaction(
    client: Client, broker: FakeBroker, /
) -> None:
    await (await client.create_producer("t")).send(b"0")
    one = await client.subscribe(
        "t", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest, receiver_queue_size=0
    )
    first = await one.receive()
    two = await client.subscribe("t", "s", ConsumerType.Shared)
    one.redeliver_unacknowledged_messages()
    second = await two.receive()
    txn = await client.transaction()
    await one.acknowledge(first, txn=txn)
    with pytest.raises(magnetar.TransactionConflict, match="delivered twice"):
        await two.acknowledge(second, txn=txn)
    await txn.abort()


async def test_an_acknowledgement_is_sent_again_over_a_new_connection(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    await producer.send(b"in")
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    message = await consumer.receive()
    broker.ignores = {"ack"}
    async with client.transaction() as txn:
        waiting = asyncio.ensure_future(consumer.acknowledge(message, txn=txn))
        await asyncio.sleep(1)
        assert not waiting.done()
        broker.ignores = set()
        broker.cut()
        await waiting
    assert broker.topics[TOPIC].subscriptions["s"].done == {0}


async def test_after_its_end_everything_is_refused_before_anything_is_sent(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    await producer.send(b"in")
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    message = await consumer.receive()
    committed, undone = await client.transaction(), await client.transaction()
    await producer.send(b"x", txn=committed)
    await committed.commit()
    await undone.abort()
    await undone.abort()
    sent = len(broker.received)
    for txn in (committed, undone):
        with pytest.raises(magnetar.TransactionEnded):
            await producer.send(b"y", txn=txn)
        with pytest.raises(magnetar.TransactionEnded):
            producer.send_nowait(b"y", txn=txn, partition_key="k")
        with pytest.raises(magnetar.TransactionEnded):
            await consumer.acknowledge(message, txn=txn)
    with pytest.raises(magnetar.TransactionEnded):
        await committed.abort()
    with pytest.raises(magnetar.TransactionEnded):
        await undone.commit()
    with pytest.raises(magnetar.TransactionEnded):
        await committed
    assert len(broker.received) == sent
    assert broker.ack_requests == []


async def test_nesting_another_clients_and_wrong_values_are_refused(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    async with client.transaction() as txn:
        with pytest.raises(magnetar.TransactionEnded, match="nested"):
            async with txn:
                raise AssertionError
        with pytest.raises(magnetar.TransactionEnded, match="nested"):
            async with client.transaction():
                raise AssertionError
    async with client.transaction():
        pass
    other = Client("magnetar://broker:7650", world=client._world)
    foreign = await other.transaction()
    with pytest.raises(WrongValue, match="another client"):
        await producer.send(b"x", txn=foreign)
    for wrong in ("x", 5, client):
        with pytest.raises(magnetar.InvalidMessage):
            await producer.send(b"x", txn=wrong)  # type: ignore[arg-type]
    with pytest.raises(magnetar.InvalidTxnStatusError):
        await producer.send(b"x", txn=client.transaction())
    for options in ({"timeout": 0}, {"timeout": "x"}, {"name": ""}, {"name": "a", "id": "b"}, {"id": 5}):
        with pytest.raises(magnetar.InvalidConfiguration):
            client.transaction(**options)  # type: ignore[arg-type]
    with pytest.raises(magnetar.InvalidConfiguration):
        await foreign.commit("soon")  # type: ignore[arg-type]
    for wrong in ("x", 5, None, "(1,2,3)"):
        with pytest.raises(magnetar.InvalidConfiguration):
            await client.transaction_status(wrong)  # type: ignore[arg-type]
    await other.close()
    assert broker.received == []


def test_a_clients_close_aborts_its_open_transactions() -> None:
    ids: list[TxnId] = []

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        txn = await client.transaction()
        await producer.send(b"x", txn=txn)
        ids.append(txn.id)

    broker = run(body)
    assert broker.state_of(ids[0]) is TxnState.ABORTED


def test_a_transaction_of_1_000_001_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from magnetar.client.core import transaction

    monkeypatch.setattr(transaction, "TRANSACTION_MESSAGES_MAX", 3)

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        async with client.transaction() as txn:
            for _ in range(3):
                producer.send_nowait(b"x", txn=txn)
            with pytest.raises(magnetar.MessageTooBig, match="the limit is 3"):
                producer.send_nowait(b"x", txn=txn)
        assert txn.state is TransactionState.COMMITTED

    run(body)


async def test_a_refused_send_is_not_waited_for(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", max_pending_messages=2, batching_max_publish_delay_ms=60_000)
    async with client.transaction() as txn:
        producer.send_nowait(b"x", txn=txn)
        producer.send_nowait(b"x", txn=txn)
        for key in (None, "k"):
            with pytest.raises(magnetar.ProducerQueueIsFull):
                producer.send_nowait(b"x", txn=txn, partition_key=key)
        with pytest.raises(magnetar.MessageTooBig):
            producer.send_nowait(b"x" * (6 << 20), txn=txn)
        with pytest.raises(magnetar.InvalidMessage):
            producer.send_nowait("text", txn=txn)
    assert txn.state is TransactionState.COMMITTED


async def test_an_empty_transaction_makes_no_request(client: Client, broker: TransactionalBroker, /) -> None:
    async with client.transaction():
        pass
    txn = await client.transaction()
    await txn.abort()
    assert broker.end_requests == []


async def test_an_aborted_transaction_says_why_and_a_late_send_is_refused(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction(timeout=5)
    await producer.send(b"x", txn=txn)
    broker.expire(txn.id)
    with pytest.raises(magnetar.TransactionAborted) as caught:
        await txn.commit()
    assert caught.value.reason == "timeout"
    late = await client.transaction(timeout=5)
    await producer.send(b"x", txn=late)
    broker.expire(late.id)
    with pytest.raises(magnetar.TransactionEnded):
        await producer.send(b"y", txn=late)
    with pytest.raises(magnetar.TransactionAborted):
        await late.commit()


# ------------------------------------------------------------------------------ coordinators that fail
async def test_a_lost_end_request_is_sent_again_and_no_slot_leaks(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    for lost in ("lose_ends", "drop_ends", "moved"):
        for _ in range(12):
            setattr(broker, lost, 2)
            async with client.transaction() as txn:
                await producer.send(b"x", txn=txn)
            assert txn.state is TransactionState.COMMITTED
    assert len(broker.visible(TOPIC)) == 36
    assert all(known.state != 0 for known in broker.known.values() if known.entries)


async def test_a_commit_whose_outcome_nobody_tells_is_unknown_and_can_be_asked_for_later(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    await producer.send(b"x", txn=txn)
    broker.unavailable = True
    with pytest.raises(magnetar.OutcomeUnknown) as caught:
        await txn.commit()
    assert caught.value.txn == str(txn.id)
    assert not caught.value.definite
    assert txn.state is TransactionState.ERROR
    with pytest.raises(magnetar.TransactionEnded, match="unknown"):
        await producer.send(b"y", txn=txn)
    broker.unavailable = False
    await txn.commit()
    assert txn.state is TransactionState.COMMITTED


async def test_a_commit_that_gets_no_answer_asks_for_the_status_with_pauses_and_not_after_the_client(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    await producer.send(b"x", txn=txn)
    coordinators, asked = Transactions.for_client(client.connections).coordinators, 0

    async def refused(_: object) -> TransactionEndAnswer:
        nonlocal asked
        asked += 1
        if asked == 1000:
            raise AssertionError("it asks without a pause")
        raise wire_errors.Unauthorized("for the moment")

    async def lost(_: object) -> TransactionEndAnswer:
        raise wire_errors.TimedOut("no answer")

    coordinators.get_status, coordinators.end_transaction = refused, lost  # type: ignore[assignment,method-assign]
    with pytest.raises(magnetar.PulsarException):
        await txn.commit()
    assert 2 < asked < 30


async def test_an_answer_that_was_lost_is_found_by_the_status(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    await producer.send(b"x", txn=txn)
    broker.lose_ends = 1_000_000
    await txn.commit()
    assert txn.state is TransactionState.COMMITTED
    broker.forgets = True
    with pytest.raises(magnetar.TransactionForgotten):
        await client.transaction_status(txn.id)


async def test_a_status_is_asked_for_again_where_the_coordinator_moved_to(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    async with client.transaction() as txn:
        await producer.send(b"x", txn=txn)
    broker.moved_items, found = 2, broker.finds
    assert await client.transaction_status(txn.id) is TransactionState.COMMITTED
    assert broker.finds == found + 2, "it is looked for again"


async def test_a_coordinator_without_room_delays_no_begin(client: Client, broker: TransactionalBroker, /) -> None:
    broker.full = {0, 1, 2}
    for timeout_ms in range(1000, 9000, 1000):  # a block for each
        since = asyncio.get_running_loop().time()
        txn = await client.transaction(timeout_ms)
        assert txn.id.most == 3
        assert asyncio.get_running_loop().time() - since < 2.0


async def test_an_abort_that_nobody_answers_ends_all_the_same(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    await producer.send(b"x", txn=txn)
    broker.unavailable = True
    await txn.abort()
    assert txn.state is TransactionState.ABORTED
    broker.unavailable = False


async def test_plain_traffic_flows_while_every_coordinator_is_away(
    client: Client, broker: TransactionalBroker, /
) -> None:
    broker.unavailable = True
    producer = await client.create_producer("t")
    with pytest.raises(magnetar.PulsarException):
        await client.transaction()
    await producer.send(b"x")
    assert len(broker.visible(TOPIC)) == 1


async def test_ends_of_a_turn_travel_together(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    open_ = [await client.transaction() for _ in range(64)]
    await asyncio.gather(*(producer.send(b"x", txn=txn) for txn in open_))
    broker.end_requests.clear()
    await asyncio.gather(*(txn.commit() for txn in open_))
    assert sum(broker.end_requests) == 64
    assert len(broker.end_requests) <= 2 * len({txn.id.most for txn in open_})


async def test_ids_are_leased_ahead_and_none_is_used_after_its_lease(
    client: Client, broker: TransactionalBroker, /
) -> None:
    ids = []
    for _ in range(200):
        txn = await client.transaction()
        ids.append(txn.id)
        await txn.commit()
    assert len(set(ids)) == 200
    assert len(broker.begins) < 10
    before = len(broker.known)
    await asyncio.sleep(broker.lease_ms / 1000)
    later = await client.transaction()
    assert list(broker.known).index(later.id) >= before


async def test_no_id_of_a_coordinator_that_was_lost_is_used(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    first = await client.transaction()
    await producer.send(b"x", txn=first)
    for txn, known in broker.known.items():  # of its epoch, all ids are void
        known.state, known.reason = 3, "coordinator lost"
        assert txn.epoch == 1
    lost = len(broker.known)
    with pytest.raises(magnetar.TransactionAborted) as caught:
        await first.commit()
    assert caught.value.reason == "coordinator lost"
    for _ in range(10):
        async with client.transaction() as txn:
            await producer.send(b"x", txn=txn)
    assert len(broker.known) > lost
    assert len(broker.visible(TOPIC)) == 10


@pytest.mark.parametrize("acknowledges", [False, True])
async def test_no_id_of_a_coordinator_that_was_lost_is_used_by_a_program_that_drops_what_was_refused(
    client: Client, broker: TransactionalBroker, /, acknowledges: bool
) -> None:
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s")
    await producer.send(b"plain")
    message = await consumer.receive()
    first = await client.transaction()
    for known in broker.known.values():  # of its epoch, all ids are void
        known.state, known.reason = 3, "coordinator lost"
    work = consumer.acknowledge(message, txn=first) if acknowledges else producer.send(b"x", txn=first)
    with pytest.raises((magnetar.TransactionAborted, magnetar.TransactionEnded)):
        await work
    again = await client.transaction()
    await producer.send(b"y", txn=again)
    await again.commit()


async def test_a_later_holder_of_a_name_fences_the_one_before(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    async with client.transaction(id="app-3") as first:
        await producer.send(b"x", txn=first)
    zombie = await client.transaction(name="app-3")
    await producer.send(b"y", txn=zombie)
    other = Client("magnetar://broker:7650", world=client._world)
    async with other.transaction(name="app-3"):
        pass
    with pytest.raises(magnetar.TransactionFenced):
        await zombie.commit()
    with pytest.raises(magnetar.TransactionFenced):
        await client.transaction(name="app-3")
    assert {request.coordinator for request in broker.begins if request.name} == {broker.begins[0].coordinator}
    await other.close()


async def test_what_was_acknowledged_without_the_transaction_is_sent_before_it_commits(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    for content in (b"plain", b"in it"):
        await producer.send(content)
    consumer = await client.subscribe(
        "t", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest, ack_group_ms=3_600_000
    )
    async with client.transaction() as txn:
        await consumer.acknowledge(await consumer.receive())
        await consumer.acknowledge(await consumer.receive(), txn=txn)
        await asyncio.sleep(60)
        assert broker.topics[TOPIC].subscriptions["s"].done == set()
    await asyncio.sleep(0.01)
    assert broker.topics[TOPIC].subscriptions["s"].done == {0, 1}
