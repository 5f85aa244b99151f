"""What is left when a program stops using a client: no noise, no thread, no consumer that goes on taking messages."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import magnetar as pulsar
from magnetar.admin import Admin
from magnetar.client.blocking.loop_thread import shared_loop_thread

DEADLINE_S = 20.0

LOOPS = """
import asyncio, magnetar, os, sys
url, close, alive = os.environ["MAGNETAR_URL"], "close" in sys.argv, "alive" in sys.argv
if alive:
    client = magnetar.Client(url)
    producer = client.create_producer("loops")
    kept = client.subscribe("loops", "kept")

async def main(number):
    client = magnetar.asyncio.Client(url)
    producer = await client.create_producer("loops")
    await asyncio.gather(*(producer.send(b"x") for _ in range(100)))
    reader = await client.create_reader("loops", magnetar.MessageId.earliest)
    await reader.read_next()
    await client.subscribe("loops", f"s{number}")
    if close:
        await client.close()

for number in range(10):
    asyncio.run(main(number))
    if alive:
        producer.send(b"between")
print("done")
"""


@pytest.mark.parametrize("how", ["close alive", "open alive", "close", "open"])
def test_an_event_loop_that_ends_before_its_clients_is_no_noise(how: str, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOPS, *how.split()],
        capture_output=True, text=True, timeout=120, env={**os.environ, "MAGNETAR_URL": url},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.05)


def _consumers(url: str, topic: str) -> int:
    with Admin(url) as admin:
        return sum(len(each.consumers) for each in admin.topic_stats(topic).subscriptions)


def test_an_asyncio_client_that_was_not_closed_leaves_with_its_event_loop(url: str) -> None:
    async def main() -> None:
        client = pulsar.asyncio.Client(url)
        await client.subscribe("left-open", "s")

    asyncio.run(main())
    _until(lambda: _consumers(url, "left-open") == 0, "the broker still has the consumer")


def _take(consumer: Any, count: int) -> set[bytes]:
    found = set()
    while len(found) < count:
        message = consumer.receive(int(DEADLINE_S * 1000))
        found.add(message.data())
        consumer.acknowledge(message)
    return found


ENDS = """
import magnetar, os, sys
client = magnetar.Client(os.environ["MAGNETAR_URL"])
producer = client.create_producer("ends", batching_enabled=True, batching_max_publish_delay_ms=60_000)
for number in range(5):
    producer.send_async(b"%d" % number, lambda result, id: None)
if "close" in sys.argv:
    client.close()
"""


@pytest.mark.parametrize("close", [False, True])
def test_a_program_that_ends_without_close_is_told_how_many_messages_have_no_outcome(close: bool, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *(["close"] if close else [])], env={**os.environ, "MAGNETAR_URL": url},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    said = done.stderr.splitlines()
    assert said == [] if close else [each for each in said if "without close: 5 messages have no outcome" in each]


@pytest.mark.parametrize("drop_client", [False, True], ids=["handle", "client"])
def test_a_consumer_that_is_dropped_takes_no_more_messages(drop_client: bool, url: str) -> None:
    topic = f"dropped-{drop_client}"
    client = pulsar.Client(url)
    dropped = client.subscribe(topic, "s", consumer_type=pulsar.ConsumerType.Shared)
    with pulsar.Client(url) as other:
        staying = other.subscribe(topic, "s", consumer_type=pulsar.ConsumerType.Shared)
        with other.create_producer(topic) as producer:
            for number in range(50):
                producer.send(b"%d" % number)
            del dropped
            if drop_client:
                del client
            gc.collect()
            for number in range(50, 100):
                producer.send(b"%d" % number)
        assert _take(staying, 100) == {b"%d" % number for number in range(100)}
    if not drop_client:
        client.close()


def test_what_a_dropped_producer_was_given_is_sent(url: str) -> None:
    with pulsar.Client(url) as client:
        consumer = client.subscribe("dropped-producer", "s")
        outcomes: list[Any] = []
        for number in range(20):
            client.create_producer("dropped-producer", batching_enabled=True).send_async(
                b"%d" % number, lambda result, _: outcomes.append(result)
            )
        gc.collect()
        assert _take(consumer, 20) == {b"%d" % number for number in range(20)}
        _until(lambda: outcomes == [pulsar.Result.Ok] * 20, f"outcomes: {outcomes}")


def test_a_listener_is_kept_alive_by_its_client_alone(url: str) -> None:
    got = threading.Event()
    with pulsar.Client(url) as client:
        client.subscribe("kept-listener", "s", message_listener=lambda *_: got.set())
        gc.collect()
        with client.create_producer("kept-listener") as producer:
            producer.send(b"x")
        assert got.wait(DEADLINE_S)


def test_the_listener_of_a_table_is_kept_alive_by_its_client_alone(url: str) -> None:
    got = threading.Event()
    with pulsar.Client(url) as client:
        client.create_table_view("kept-table").for_each_and_listen(lambda *_: got.set())
        gc.collect()
        with client.create_producer("kept-table") as producer:
            producer.send(b"x", partition_key="k")
        assert got.wait(DEADLINE_S)


# ---------------------------------------------------------------------------------- threads
def _ours() -> set[threading.Thread]:
    """But for the loop thread, of which a process has one, and gRPC's poller."""
    shared = ("magnetar-client", "(_poll_wrapper)", "server")
    return {each for each in threading.enumerate() if not any(name in each.name for name in shared)}


class _Listener:
    def became_active(self, consumer: Any, partition_id: int) -> None: ...
    def became_inactive(self, consumer: Any, partition_id: int) -> None: ...


def _listener(*_: Any) -> None: ...


def _send_and_receive(client: pulsar.Client) -> None:
    consumer = client.subscribe("threads", "plain")
    with client.create_producer("threads") as producer:
        producer.send(b"x")
    consumer.receive(30_000)


def _paused(client: pulsar.Client) -> pulsar.Consumer:
    """In its listener, so that the thread waits to go on."""
    told = threading.Event()

    def listener(consumer: Any, _: Any) -> None:
        consumer.pause_message_listener()
        told.set()

    consumer = client.subscribe("threads-paused", f"s{time.monotonic()}", message_listener=listener)
    with client.create_producer("threads-paused") as producer:
        producer.send(b"x")
    assert told.wait(DEADLINE_S)
    return consumer


def _paused_and_closed(client: pulsar.Client) -> None:
    _paused(client).close()


def _events(client: pulsar.Client) -> None:
    kind = pulsar.ConsumerType.Failover
    client.subscribe("threads", "events", kind, consumer_event_listener=_Listener())


def _events_closed(client: pulsar.Client) -> None:
    kind = pulsar.ConsumerType.Failover
    client.subscribe("threads", "events-closed", kind, consumer_event_listener=_Listener()).close()


def _unsubscribed(client: pulsar.Client) -> None:
    client.subscribe("threads", "gone", message_listener=_listener).unsubscribe()


def _reader(client: pulsar.Client) -> None:
    client.create_reader("threads", pulsar.MessageId.earliest, reader_listener=_listener)


def _table(client: pulsar.Client) -> None:
    client.create_table_view("threads").for_each_and_listen(_listener)


def _table_closed(client: pulsar.Client) -> None:
    view = client.create_table_view("threads")
    view.for_each_and_listen(_listener)
    view.close()


def _refused(client: pulsar.Client) -> None:
    kept = client.subscribe("threads", "taken", message_listener=_listener)
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe("threads", "taken", message_listener=_listener, consumer_event_listener=_Listener())
    kept.close()


USES = (
    _send_and_receive, _paused, _paused_and_closed, _events, _events_closed, _unsubscribed, _reader, _table,
    _table_closed, _refused,
)  # fmt: skip


@pytest.mark.parametrize("end", ["close", "shutdown", "drop"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.strip("_"))
def test_a_client_that_has_ended_leaves_no_thread(use: Callable[[pulsar.Client], object], end: str, url: str) -> None:
    before = _ours()
    client = pulsar.Client(url)
    use(client)
    if end == "close":
        client.close()
    elif end == "shutdown":
        client.shutdown()
    elif use in (_paused, _reader, _table):
        client.close()  # a listener is a use: nothing of it is dropped
    del client
    gc.collect()
    _until(lambda: _ours() <= before, f"left: {_ours() - before}")


def test_a_listener_that_raises_system_exit_is_said_and_goes_on(url: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bytes] = []
    second = threading.Event()

    def listener(consumer: Any, message: Any) -> None:
        seen.append(message.data())
        if len(seen) == 2:
            second.set()
        raise SystemExit("on purpose")

    with caplog.at_level(logging.ERROR, "magnetar.client"), pulsar.Client(url) as client:
        client.subscribe("exits", "s", message_listener=listener)
        with client.create_producer("exits") as producer:
            producer.send(b"one")
            producer.send(b"two")
        assert second.wait(DEADLINE_S), seen
    assert "a message listener failed" in caplog.text


def test_a_send_callback_that_raises_system_exit_does_not_end_the_loop_thread(url: str) -> None:
    outcomes: list[Any] = []

    def callback(result: Any, _: Any) -> None:
        outcomes.append(result)
        raise SystemExit("on purpose")

    with pulsar.Client(url) as client, client.create_producer("exits-too", batching_enabled=True) as producer:
        for _ in range(3):
            producer.send_async(b"x", callback)
        _until(lambda: len(outcomes) == 3, f"outcomes: {outcomes}")
        shared_loop_thread().loop.call_soon_threadsafe(sys.exit)  # of a callback that is not ours to guard
        assert producer.send(b"y")


def test_the_listener_of_a_consumer_that_the_broker_ended_stops(url: str, caplog: pytest.LogCaptureFixture) -> None:
    before = _ours()
    with caplog.at_level(logging.ERROR, "magnetar.client"), pulsar.Client(url) as client, Admin(url) as admin:
        client.subscribe("ended", "s", message_listener=_listener)
        admin.delete_subscription("ended", "s", force=True)
        _until(lambda: _ours() <= before, f"left: {_ours() - before}")
    assert len(caplog.records) <= 1, "it says so once"
