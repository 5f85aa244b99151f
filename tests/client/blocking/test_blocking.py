"""The blocking face against a real broker: Pulsar's usual programs, and what threads may do."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import magnetar as pulsar
from magnetar.client.blocking.client import Client


def test_callbacks_come_in_order_with_ids(url: str) -> None:
    outcomes: list[tuple[Any, Any]] = []
    with Client(url) as client:
        producer = client.create_producer("callbacks", batching_enabled=True, block_if_queue_full=True)
        for i in range(5000):
            producer.send_async(b"%d" % i, lambda result, id_: outcomes.append((result, id_)))
        producer.flush()
        assert [result for result, _ in outcomes] == [pulsar.Result.Ok] * 5000
        ids = [id_ for _, id_ in outcomes]
        assert ids == sorted(set(ids))
        assert producer.last_sequence_id() == 4999
        reader = client.create_reader("callbacks", pulsar.MessageId.earliest)
        messages = [reader.read_next(30_000) for _ in range(5000)]
        assert [message.message_id() for message in messages] == ids
        assert [message.index() for message in messages] == list(range(5000))


def test_several_threads_send_and_receive_each_message_once(url: str) -> None:
    received: list[bytes] = []
    with Client(url) as client:
        settings = {"batching_enabled": True, "block_if_queue_full": True, "max_pending_messages": 100}
        producer = client.create_producer("threads", **settings)
        consumer = client.subscribe(
            "threads", "s", consumer_type=pulsar.ConsumerType.Shared, initial_position=pulsar.InitialPosition.Earliest
        )

        def send(number: int) -> None:
            for i in range(1000):
                producer.send_async(b"%d-%d" % (number, i), None)

        def receive() -> None:
            while True:
                try:
                    message = consumer.receive(30_000)
                except pulsar.Timeout:
                    return
                received.append(message.data())
                consumer.acknowledge(message)

        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        threads += [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(received) == sorted(b"%d-%d" % (n, i) for n in range(4) for i in range(1000))
        again = client.subscribe("threads", "s", consumer_type=pulsar.ConsumerType.Shared)
        consumer.close()
        with pytest.raises(pulsar.Timeout):
            again.receive(300)


def test_a_listener_gets_the_messages_and_can_be_paused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    third, later = threading.Event(), threading.Event()

    def listener(consumer: Any, message: Any) -> None:
        seen.append(message.data())
        consumer.acknowledge(message)
        if message.data() == b"bad":
            raise ValueError("on purpose")
        if len(seen) == 3:
            third.set()
        if message.data() == b"later":
            later.set()

    with Client(url) as client:
        consumer = client.subscribe("listener", "s", message_listener=listener)
        producer = client.create_producer("listener")
        for content in (b"bad", b"one", b"two"):
            producer.send(content)
        assert third.wait(5)
        assert seen == [b"bad", b"one", b"two"]
        with pytest.raises(pulsar.InvalidConfiguration):
            consumer.receive()
        inbox, running, is_idle = consumer.inner().inbox, consumer._running, threading.Event()

        def wait(wait: Callable[[], bool] = running.wait) -> bool:
            is_idle.set()
            return wait()

        while not inbox._waiting:  # the listener waits for the next message
            time.sleep(0.01)
        monkeypatch.setattr(running, "wait", wait)
        consumer.pause_message_listener()
        producer.send(b"later")
        assert is_idle.wait(20)
        assert seen == [b"bad", b"one", b"two"]
        assert [each.data() for each in inbox.waiting_messages()] == [b"later"]
        consumer.resume_message_listener()
        assert later.wait(5)


def test_a_reader_with_a_listener_that_is_opened_again_goes_on_after_its_last_message(url: str) -> None:
    heard, last, seen = threading.Event(), threading.Event(), list[bytes]()

    def listener(reader: Any, message: Any) -> None:
        seen.append(message.data())
        if message.data() == b"2":
            reader._running.clear()
            heard.set()
        elif message.data() == b"3":
            last.set()

    with Client(url) as client:
        producer = client.create_producer("again")
        for content in (b"1", b"2"):
            producer.send(content)
        reader = client.create_reader("again", pulsar.MessageId.earliest, reader_listener=listener)
        assert heard.wait(20)
        reader._epoch -= 1  # as in a forked process
        producer.send(b"3")
        reader._running.set()
        assert last.wait(20)
        assert seen == [b"1", b"2", b"3"]


def test_a_reader_with_a_listener_gives_no_message_to_another_call(url: str) -> None:
    with Client(url) as client:
        reader = client.create_reader("heard", pulsar.MessageId.earliest, reader_listener=lambda *_: None)
        with pytest.raises(pulsar.InvalidConfiguration, match="reader_listener"):
            reader.read_next(1)
        with pytest.raises(pulsar.InvalidConfiguration, match="reader_listener"):
            next(iter(reader))
        assert not reader.has_message_available()


def test_a_blocking_call_in_a_callback_is_refused_instead_of_waiting_for_itself(url: str) -> None:
    caught: list[BaseException] = []
    done = threading.Event()
    with Client(url) as client:
        producer = client.create_producer("callback")

        def callback(result: Any, id_: Any) -> None:
            try:
                producer.send(b"nested")
            except pulsar.Interrupted as error:
                caught.append(error)
            producer.send_async(b"fine", lambda *_: done.set())

        producer.send_async(b"x", callback)
        assert done.wait(5)
        assert len(caught) == 1


def test_iteration_and_context_managers(url: str) -> None:
    with Client(url) as client, client.subscribe("loop", "s") as consumer, client.create_producer("loop") as producer:
        ids = producer.send_many([b"a", b"b", b"c"])
        assert len(ids) == 3
        seen = []
        for message in consumer:
            seen.append(message.data())
            consumer.acknowledge(message)
            if len(seen) == 3:
                consumer.close()
        assert seen == [b"a", b"b", b"c"]
