"""Batches of a sink, over a broker in memory: what was prepared waits for its end, and a batch commits once."""

import pytest

import magnetar
from magnetar.asyncio import Batch, BatchOutcome, SinkStatus
from magnetar.client.client import Client
from magnetar.client.common.checks import WrongValue
from magnetar.client.common.errors import InvalidTxnStatusError, OutcomeUnknown, SinkFenced, TransactionAborted
from magnetar.client.core.transaction import TransactionState
from magnetar.proto.errors import TopicTerminated
from magnetar.proto.states import TxnState
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import TransactionalBroker
from tests.client.simulated import simulate

TOPIC = "persistent://public/default/t"
BATCH = Batch("sink", "query", 0, "run")


def ends(broker: TransactionalBroker) -> list[bytes]:
    """The last byte of each payload that is shown."""
    return [entry[-1:] for entry in broker.visible(TOPIC)]


def run(body, **options) -> TransactionalBroker:  # type: ignore[no-untyped-def]
    serving = TransactionalBroker()
    simulate(body, serving, **options)
    return serving


pytestmark = pytest.mark.run_by.with_args(run)


def test_what_is_prepared_survives_its_client_and_is_ended_by_its_id() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        assert isinstance(broker, TransactionalBroker)
        producer = await client.create_producer("t")
        async with client.transaction() as one:
            producer.send_nowait(b"1", txn=one)
            await one.prepare(until=3600)
        assert one.state is TransactionState.PREPARED
        assert broker.known[one.id].ends[0].prepared_ms == 3_600_000
        assert await client.transaction_status(one.id) is TransactionState.PREPARED
        with pytest.raises(magnetar.TransactionEnded):
            await producer.send(b"more", txn=one)
        two = await client.transaction()
        await producer.send(b"two", txn=two)
        await two.prepare()
        await two.prepare()
        await client.close()
        assert {broker.state_of(each.id) for each in (one, two)} == {TxnState.PREPARED}

    broker = run(body)
    first, second = (txn for txn, known in broker.known.items() if known.ends)

    async def elsewhere(client: Client, _: FakeBroker) -> None:
        await client.commit_transaction(first)
        await client.commit_transaction(str(first))
        await client.abort_transaction(second)
        await client.abort_transaction(second)
        with pytest.raises(InvalidTxnStatusError):
            await client.abort_transaction(first)
        with pytest.raises(TransactionAborted):
            await client.commit_transaction(second)

    simulate(elsewhere, broker)
    assert ends(broker) == [b"1"]


async def test_an_open_transaction_is_not_committed_by_its_id(client: Client, broker: FakeBroker, /) -> None:
    txn = await client.transaction()
    await (await client.create_producer("t")).send(b"x", txn=txn)
    with pytest.raises(InvalidTxnStatusError, match="open"):
        await client.commit_transaction(txn.id)
    await txn.commit()


async def test_what_was_prepared_commits_and_aborts_by_its_object_too(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    for number in range(2):
        txn = await client.transaction()
        await producer.send(b"%d" % number, txn=txn)
        await txn.prepare()
        await (txn.commit() if number else txn.abort())
        assert txn.state is (TransactionState.COMMITTED if number else TransactionState.ABORTED)
    assert ends(broker) == [b"1"]


async def test_an_abort_of_what_another_program_committed_meanwhile_is_told(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    await producer.send(b"0", txn=txn)
    await txn.prepare()
    await client.commit_transaction(txn.id)
    for _ in range(2):
        with pytest.raises(magnetar.TransactionEnded, match="commit"):
            await txn.abort()
    assert txn.state is TransactionState.COMMITTED
    assert ends(broker) == [b"0"]


async def test_an_abort_of_what_was_prepared_is_unknown_without_an_answer(
    client: Client, broker: TransactionalBroker, /
) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    await producer.send(b"0", txn=txn)
    await txn.prepare()
    broker.unavailable = True
    with pytest.raises(OutcomeUnknown):
        await txn.abort()
    assert txn.state is TransactionState.ERROR
    broker.unavailable = False
    await client.commit_transaction(txn.id)
    assert ends(broker) == [b"0"]


async def test_a_transaction_whose_send_failed_is_not_prepared(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    txn = await client.transaction()
    broker.publish_errors.append(TopicTerminated("over"))
    producer.send_nowait(b"x", txn=txn)
    with pytest.raises(TransactionAborted, match="operation failed"):
        await txn.prepare()
    assert broker.state_of(txn.id) is TxnState.ABORTED


async def test_a_batch_commits_once_whatever_was_written_for_it(client: Client, broker: TransactionalBroker, /) -> None:
    producer = await client.create_producer("t")
    tries = []
    for number in range(3):
        txn = await client.batch_transaction(BATCH._replace(run=str(number)))
        assert txn is not None
        await producer.send(b"%d" % number, txn=txn)
        await txn.prepare()
        tries.append(txn)
    assert await client.sink_status("sink") is None
    assert await client.commit_batch(BATCH, [tries[0].id, str(tries[2].id)]) is BatchOutcome.COMMITTED
    assert await client.commit_batch(BATCH, [tries[1].id]) is BatchOutcome.ALREADY
    assert await client.sink_status("sink") == SinkStatus("query", 0)
    assert await client.batch_transaction(BATCH) is None
    assert broker.state_of(tries[1].id) is TxnState.ABORTED
    assert ends(broker) == [b"0", b"2"]
    assert await client.commit_batch(BATCH._replace(number=1), []) is BatchOutcome.COMMITTED


@pytest.mark.run_by(run, operation_timeout_seconds=3)
async def test_a_commit_without_an_answer_is_asked_for_again(client: Client, broker: TransactionalBroker, /) -> None:
    txn = await client.batch_transaction(BATCH)
    assert txn is not None
    broker.unavailable = True
    with pytest.raises(OutcomeUnknown, match="batch 0 of sink 'sink'"):
        await client.commit_batch(BATCH, [txn.id])
    broker.unavailable = False
    broker.moved = 2
    assert await client.commit_batch(BATCH, [txn.id]) is BatchOutcome.COMMITTED


async def test_another_query_is_told_and_may_adopt(client: Client, broker: FakeBroker, /) -> None:
    await client.commit_batch(BATCH._replace(number=7), [])
    other = Batch("sink", "another", 0)
    for question in (client.batch_transaction(other), client.commit_batch(other, [])):
        with pytest.raises(SinkFenced, match="adopt"):
            await question
    adopting = other._replace(adopt=True)
    assert await client.commit_batch(adopting, []) is BatchOutcome.COMMITTED
    assert await client.sink_status("sink") == SinkStatus("another", 0)


async def test_transactions_of_no_sink_commit_together(client: Client, broker: TransactionalBroker, /) -> None:
    batch = Batch("", "", 0, "job-1")
    producer = await client.create_producer("t")
    txns = [await client.batch_transaction(batch) for _ in range(3)]
    for txn in txns:
        assert txn is not None
        await producer.send(b"x", txn=txn)
        await txn.prepare()
    ids = [txn.id for txn in txns if txn is not None]
    assert await client.commit_batch(batch, ids) is BatchOutcome.COMMITTED
    assert await client.commit_batch(batch, ids) is BatchOutcome.COMMITTED
    assert ends(broker) == [b"x"] * 3
    assert await client.commit_batch(batch, []) is BatchOutcome.COMMITTED


@pytest.mark.parametrize("batch", [Batch("s", "q", -1), Batch("s", "q", 1 << 63), Batch("", "q", 0)])
async def test_a_wrong_batch_is_refused(client: Client, broker: FakeBroker, /, batch: Batch) -> None:
    with pytest.raises(WrongValue):
        await client.batch_transaction(batch)
    with pytest.raises(WrongValue):
        await client.transaction_status("no id")
    txn = await client.transaction()
    with pytest.raises(WrongValue):
        await txn.prepare(until=-1)
