"""The blocking transaction and `magnetar.process`: with-blocks, threads, Ctrl-C, forks."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

import magnetar
from tests.client.blocking.test_fork import run as forking
from tests.client.conftest import served
from tests.client.fake_transactions import TransactionalBroker

TOPIC = "persistent://public/default/t"


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def broker() -> Iterator[tuple[str, TransactionalBroker]]:
    serving = TransactionalBroker()
    with served(serving) as address:
        yield address, serving


def test_with_commits_and_an_exception_aborts(broker: tuple[str, TransactionalBroker]) -> None:
    with magnetar.Client(broker[0]) as client:
        producer, source = client.create_producer("t"), client.create_producer("in")
        source.send(b"in")
        consumer = client.subscribe("in", "s", initial_position=magnetar.InitialPosition.Earliest)
        with client.transaction() as txn:
            producer.send(b"1", txn=txn)
            producer.send_async(b"2", None, txn=txn)
            producer.send_many([b"3"], txn=txn)
            consumer.acknowledge(consumer.receive(30_000), txn=txn)
            assert broker[1].visible(TOPIC) == []
        assert txn.state is magnetar.TransactionState.COMMITTED
        assert client.transaction_status(txn.id) is magnetar.TransactionState.COMMITTED
        assert len(broker[1].visible(TOPIC)) == 3
        failing = client.transaction()

        def work() -> None:
            with failing:
                producer.send(b"4", txn=failing)
                raise KeyError("x")

        with pytest.raises(KeyError):
            work()
        assert failing.state is magnetar.TransactionState.ABORTED
        assert len(broker[1].visible(TOPIC)) == 3
        with pytest.raises(magnetar.TransactionEnded):
            producer.send(b"5", txn=txn)
        with pytest.raises(magnetar.TransactionEnded):
            producer.send_async(b"5", None, partition_key="k", txn=failing)
        with pytest.raises(magnetar.TransactionEnded):
            consumer.acknowledge_cumulative(magnetar.MessageId(-1, 7, 0), txn=txn)
        for wrong in (5, "x", txn.inner()):
            with pytest.raises(magnetar.InvalidMessage):
                producer.send(b"5", txn=wrong)  # type: ignore[arg-type]


def test_by_hand_by_name_nested_and_over_cumulative_acknowledgements(broker: tuple[str, TransactionalBroker]) -> None:
    with magnetar.Client(broker[0]) as client:
        producer = client.create_producer("t")
        for number in range(5):
            producer.send(b"%d" % number)
        consumer = client.subscribe("t", "s", initial_position=magnetar.InitialPosition.Earliest)
        messages = [consumer.receive(30_000) for _ in range(5)]
        txn = client.transaction(name="app")
        consumer.acknowledge_cumulative(messages[3], txn=txn)
        with pytest.raises(magnetar.TransactionConflict):
            consumer.acknowledge(messages[0], txn=client.transaction())
        txn.commit("visible")
        txn.commit()
        assert broker[1].topics[TOPIC].subscriptions["s"].done == {0, 1, 2, 3}
        with client.transaction() as outer:
            with pytest.raises(magnetar.TransactionEnded, match="nested"), client.transaction():
                raise AssertionError
            outer.abort()
        assert outer.state is magnetar.TransactionState.ABORTED


def test_sixteen_threads_send_in_one_transaction_and_all_of_it_counts(broker: tuple[str, TransactionalBroker]) -> None:
    with magnetar.Client(broker[0]) as client:
        producer = client.create_producer("t", batching_enabled=True, block_if_queue_full=True)
        with client.transaction() as txn:

            def send() -> None:
                for _ in range(500):
                    producer.send_async(b"x", None, txn=txn)

            threads = [threading.Thread(target=send) for _ in range(16)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        assert sum(header.num_messages for header in broker[1].topics[TOPIC].headers) == 8000
        [end] = broker[1].known[txn.id].ends
        assert end.participants[0].entries == len(broker[1].topics[TOPIC].entries)


def test_ctrl_c_in_the_body_aborts(broker: tuple[str, TransactionalBroker]) -> None:
    with magnetar.Client(broker[0]) as client:
        producer = client.create_producer("t")
        txn = client.transaction()

        def work() -> None:
            with txn:
                producer.send(b"x", txn=txn)
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                client.subscribe("t", "s").receive()

        with pytest.raises(KeyboardInterrupt):
            work()
        assert txn.state is magnetar.TransactionState.ABORTED


def test_ctrl_c_while_it_commits_waits_for_the_outcome(broker: tuple[str, TransactionalBroker]) -> None:
    with magnetar.Client(broker[0]) as client:
        producer = client.create_producer("t")
        txn = client.transaction()
        producer.send(b"x", txn=txn)
        broker[1].unavailable = True
        interrupted = threading.Event()

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.set()
            threading.Timer(1.0, setattr, (broker[1], "unavailable", False)).start()

        threading.Timer(0.3, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            txn.commit()
        assert interrupted.is_set()
        assert txn.state is magnetar.TransactionState.COMMITTED


def test_the_blocking_process_calls_the_function_in_its_thread(broker: tuple[str, TransactionalBroker]) -> None:
    with magnetar.Client(broker[0]) as client:
        source = client.create_producer("t", batching_enabled=True)
        source.send_many([b"%d" % number for number in range(300)])
        consumer = client.subscribe("t", "s", initial_position=magnetar.InitialPosition.Earliest)
        producer, other = client.create_producer("out"), client.create_producer("other")
        threads = set()

        def function(message: magnetar.Message) -> object:
            threads.add(threading.current_thread())
            if int(message.data()) % 2:
                return magnetar.Output(message.data(), producer=other)
            return message.data()

        statistics = magnetar.process(consumer, producer, function, messages_max=50, idle_timeout_ms=500)
        assert (statistics.sent, statistics.acknowledged, statistics.aborted) == (300, 300, 0)
        assert threads == {threading.current_thread()}
        found: Counter[int] = Counter()
        for name in ("out", "other"):
            reader = client.create_reader(name, magnetar.MessageId.earliest)
            found.update(int(reader.read_next(30_000).data()) % 2 for _ in range(150))
        assert found == {0: 150, 1: 150}


def test_ctrl_c_ends_the_blocking_process_in_order(broker: tuple[str, TransactionalBroker]) -> None:
    with magnetar.Client(broker[0]) as client:
        source = client.create_producer("t", batching_enabled=True)
        source.send_many([b"%d" % number for number in range(1000)])
        consumer = client.subscribe("t", "s", magnetar.ConsumerType.Shared,
                                    initial_position=magnetar.InitialPosition.Earliest)  # fmt: skip
        producer = client.create_producer("out")
        statistics = magnetar.ProcessStatistics()
        calls = 0

        def function(message: magnetar.Message) -> bytes:
            nonlocal calls
            calls += 1
            if calls == 300:
                os.kill(os.getpid(), signal.SIGINT)
                time.monotonic()  # the handler runs
            return message.data()

        with pytest.raises(KeyboardInterrupt):
            magnetar.process(consumer, producer, function, messages_max=50, statistics=statistics)
        assert 0 < statistics.sent < 1000
        magnetar.process(consumer, producer, lambda message: message.data(), idle_timeout_ms=1000)
        reader = client.create_reader("out", magnetar.MessageId.earliest)
        found = Counter(reader.read_next(30_000).data() for _ in range(1000))
        assert set(found.values()) == {1}
        with pytest.raises(magnetar.Timeout):
            reader.read_next(100)

        async def coroutine(message: magnetar.Message) -> bytes:
            return message.data()

        with pytest.raises(magnetar.InvalidConfiguration, match="asyncio"):
            magnetar.process(consumer, producer, coroutine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks")
def test_a_transaction_stays_in_the_process_that_began_it(broker: tuple[str, TransactionalBroker]) -> None:
    printed = forking(
        broker[0],
        """
        producer = client.create_producer("t")
        with client.transaction() as txn:
            producer.send(b"x", txn=txn)
            print(in_child(txn.commit))
        print(txn.state.name)
        """,
    )
    assert printed == ["TransactionEnded", "1", "COMMITTED"]
