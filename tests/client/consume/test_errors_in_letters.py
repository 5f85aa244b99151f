"""The error with which a program failed is in the dead letter, whoever makes the letter and whoever failed last."""

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

import magnetar
from magnetar.asyncio import Client, Consumer, ConsumerType, InitialPosition, Message
from magnetar.broker.subscription import dead_letters as broker_letters
from magnetar.client.admin import AdminClient
from magnetar.client.consume.dead_letters import describe_error
from magnetar.client.consume.deliveries import FAILURES_BYTES_MAX, make_client_frames
from magnetar.client.core.effects import RequestRedelivery
from magnetar.proto.names import ERROR_PROPERTIES, Position, TopicName
from magnetar.proto.policies import Policies
from magnetar.proto.states import ERROR_TEXT_MAX, TRACEBACK_MAX, Failure
from tests.support.cluster import Cluster, cluster

TOPIC, DEAD = "persistent://public/default/invoices", "persistent://public/default/dead"
BOTH = ["sdk", "broker"]


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as running:
        yield running


def url_of(running: Cluster) -> str:
    return f"magnetar://{running.brokers[-1].endpoint}"


async def prepared(running: Cluster, by: str, times: int = 1) -> dict[str, Any]:
    """Who makes the letters: the options of a consumer for that."""
    if by == "sdk":
        return {"dead_letter_policy": magnetar.ConsumerDeadLetterPolicy(times, DEAD)}
    async with AdminClient(url_of(running)) as admin:
        await admin.create_topic(TOPIC)
        policies = Policies(dead_letter_max_redeliver_count=times, dead_letter_topic=DEAD)
        await admin.set_topic_policies(TOPIC, policies)
    return {}


async def subscribed(client: Client, topic: str = TOPIC, **options: Any) -> Consumer:
    return await client.subscribe(
        topic, "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest,
        negative_ack_redelivery_delay_ms=10, **options,
    )  # fmt: skip


def failed(text: str) -> Exception:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


async def sent(client: Client, *bodies: bytes) -> None:
    producer = await client.create_producer(TOPIC)
    for body in bodies:
        await producer.send(body, properties={"mine": "stays"})
    await producer.close()


@pytest.mark.parametrize("by", BOTH)
async def test_the_letter_has_the_error_of_the_last_attempt_and_who_failed_how_often(running: Cluster, by: str) -> None:
    options = await prepared(running, by)
    async with Client(url_of(running)) as client:
        mine = await subscribed(client, consumer_name="worker-7", **options)
        await sent(client, b"broken")
        for text in ("first", "last"):
            await mine.negative_acknowledge(await mine.receive(10_000), error=failed(text))
        letter = await (await subscribed(client, DEAD)).receive(20_000)
        told = letter.properties()
        assert (told["ERROR"], told["ERROR_MESSAGE"], told["ERROR_CONSUMER"]) == ("ValueError", "last", "worker-7")
        assert told["ERROR_ATTEMPTS"] == "2"
        assert "test_errors_in_letters.py" in told["ERROR_TRACEBACK"]
        assert told["mine"] == "stays"


@pytest.mark.parametrize("by", BOTH)
async def test_the_error_reaches_the_letter_when_another_consumer_gets_the_message_last(
    running: Cluster, by: str
) -> None:
    options = await prepared(running, by)
    async with Client(url_of(running)) as client, Client(url_of(running)) as other:
        mine = await subscribed(client, **options)
        await sent(client, b"broken")
        await mine.negative_acknowledge(await mine.receive(10_000), error=failed("told elsewhere"))
        await mine.receive(10_000)  # again: so the broker has it, and gives it to the next one
        await mine.close()
        theirs = await subscribed(other, **options)
        await theirs.negative_acknowledge(await theirs.receive(10_000))
        letter = await (await subscribed(client, DEAD)).receive(20_000)
        assert letter.properties().get("ERROR_MESSAGE") == "told elsewhere"


@pytest.mark.parametrize("by", BOTH)
async def test_without_an_error_or_its_traceback_the_letter_does_not_tell_it(running: Cluster, by: str) -> None:
    options = await prepared(running, by)
    async with Client(url_of(running)) as client:
        mine = await subscribed(client, error_traceback=False, **options)
        await sent(client, b"plain", b"told")
        dead = await subscribed(client, DEAD)
        letters = dict[bytes, Message]()
        while len(letters) < 2:
            receiving = [asyncio.create_task(each.receive(20_000)) for each in (mine, dead)]
            done, rest = await asyncio.wait(receiving, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for task in done:
                message = task.result()
                if task is receiving[1]:
                    letters[message.data()] = message
                elif message.data() == b"told":
                    await mine.negative_acknowledge(message, error=KeyError("x"))
                else:
                    await mine.negative_acknowledge(message)
        assert not set(ERROR_PROPERTIES) & letters[b"plain"].properties().keys()
        told = letters[b"told"].properties()
        assert told["ERROR"] == "KeyError"
        assert "ERROR_TRACEBACK" not in told


async def test_a_retry_carries_its_error_to_the_copy_and_to_the_letter(running: Cluster) -> None:
    policy = magnetar.ConsumerDeadLetterPolicy(1, DEAD)
    async with Client(url_of(running)) as client:
        mine = await subscribed(client, enable_retry=True, dead_letter_policy=policy)
        await sent(client, b"broken")
        await mine.reconsume_later(await mine.receive(10_000), timedelta(0), error=failed("one"))
        copy = await mine.receive(10_000)
        assert copy.properties()["ERROR_MESSAGE"] == "one"
        await mine.reconsume_later(copy, timedelta(0), error=TimeoutError("two"))
        told = (await (await subscribed(client, DEAD)).receive(10_000)).properties()
        assert (told["ERROR"], told["ERROR_MESSAGE"], told["ERROR_ATTEMPTS"]) == ("TimeoutError", "two", "2")


async def test_what_is_no_exception_is_refused(running: Cluster) -> None:
    async with Client(url_of(running)) as client:
        mine = await subscribed(client)
        await sent(client, b"broken")
        message = await mine.receive(10_000)
        with pytest.raises(TypeError, match="error is an exception"):
            await mine.negative_acknowledge(message, error="text")  # type: ignore[arg-type]


async def test_a_listener_that_raises_tells_its_error(running: Cluster) -> None:
    def blocking(url: str) -> dict[str, str]:
        over = threading.Event()

        def listener(consumer: magnetar.Consumer, message: magnetar.Message) -> None:
            if message.redelivery_count() == 1:
                over.set()
            consumer.negative_acknowledge(message)
            raise RuntimeError(f"attempt {message.redelivery_count()}")

        with magnetar.Client(url) as client:
            client.subscribe(
                TOPIC, "s", magnetar.ConsumerType.Shared, message_listener=listener,
                negative_ack_redelivery_delay_ms=200, dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(1, DEAD),
            )  # fmt: skip
            client.create_producer(TOPIC).send(b"broken")
            assert over.wait(20)
            dead = client.subscribe(DEAD, "s", initial_position=magnetar.InitialPosition.Earliest)
            return dead.receive(20_000).properties()

    told = await asyncio.to_thread(blocking, url_of(running))
    assert (told["ERROR"], told["ERROR_MESSAGE"]) == ("RuntimeError", "attempt 1")


async def test_a_broker_remembers_the_latest_failures_and_bounds_them(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_letters, "KEPT_FAILURES_MAX", 3)
    async with Client(url_of(running)) as client:
        await subscribed(client)
        topic = await running.brokers[0].topic_manager.load_topic(TopicName.parse(TOPIC))
        letters = topic.subscriptions["s"].dead_letters
        assert letters is not None
        for number in range(10):
            letters.record_failure_reasons({Position(1, number): Failure("E" * 9999, "x" * 9999, "t" * 9999 + "end")})
        assert list(letters.failures) == [Position(1, number) for number in (7, 8, 9)]
        (one, *_) = letters.failures.values()
        assert (len(one.message), len(one.traceback)) == (ERROR_TEXT_MAX, TRACEBACK_MAX)
        assert one.traceback.endswith("end"), "where it was raised is the end"


def test_one_request_takes_the_latest_failures_that_fit() -> None:
    failures = {Position(1, at): Failure("E", "", "t" * TRACEBACK_MAX) for at in range(100)}
    effect = RequestRedelivery({1: BitMap(range(100))})
    (frame,) = make_client_frames(effect, durable=True, inclusive=False, failures=failures)
    told = [each.entry_id for each in frame["redeliver"].failures]
    assert told == list(range(99, 99 - len(told), -1))
    assert FAILURES_BYTES_MAX // 2 < frame["redeliver"].ByteSize() < FAILURES_BYTES_MAX + 1000


def test_an_exception_that_cannot_be_printed_is_told_by_its_class() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    told = describe_error(Odd(), "c", traceback=False)
    assert told.error.endswith("Odd")
    assert "cannot be printed" in told.message
    assert describe_error(ValueError("\ud800"), "c", traceback=True).message == "\\ud800"
