"""Foreign code raises anything: nobody waits for ever, and what else is told is told."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.common.loggers import is_cancelled
from magnetar.client.core.batcher import OutgoingBatch
from magnetar.client.core.effects import ReportOutcome
from magnetar.client.model.message import call_event_listener
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.schema import StringSchema
from magnetar.client.model.settings import InitialPosition
from magnetar.client.produce.partition_producer import end_waiting_flushes, report_to_callbacks
from magnetar.client.transactions.halves import HalfCheckWatch
from magnetar.client.transactions.process import make_loop_processor
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import TopicName
from tests.client.fake_broker import FakeBroker
from tests.client.model.keys import Keys
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)


class Odd(BaseException):
    """As those of test runners and other event loops."""


RAISES = [ValueError, asyncio.CancelledError, SystemExit, GeneratorExit, Odd]
each_of = pytest.mark.parametrize("kind", RAISES, ids=lambda kind: kind.__name__)


def fails(kind: type[BaseException]) -> Any:
    def callback(*_: object) -> None:
        raise kind("on purpose")

    return callback


@each_of
async def test_a_send_callback_ends_neither_other_callbacks_nor_a_flush(
    client: Client, broker: FakeBroker, /, kind: type[BaseException]
) -> None:
    producer = await client.create_producer("t", batching_max_messages=100)
    told: list[bool] = []
    for _ in range(3):
        producer.send_nowait(b"x", fails(kind))
        producer.send_nowait(b"y", lambda *_: told.append(True))
    async with asyncio.timeout(60):
        await producer.flush()
    assert told == [True] * 3
    broker.silent = True
    producer.send_nowait(b"x", fails(kind))
    producer.send_nowait(b"y", lambda *_: told.append(True))
    await asyncio.sleep(60)  # the time-out of a send
    assert told == [True] * 4, "failures are told as receipts are"
    broker.silent = False
    async with asyncio.timeout(60):
        await producer.send(b"z")


def test_ctrl_c_in_a_send_callback_ends_the_program_after_what_else_is_told() -> None:
    told: list[str] = []

    async def program() -> None:
        batch = OutgoingBatch(0)
        batch.callbacks += [fails(KeyboardInterrupt), lambda *_: told.append("the other callback")]
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        report_to_callbacks(ReportOutcome(batch, None, 1, 1), TopicName.parse("t"))
        end_waiting_flushes([reached])
        await reached
        told.append("the flush")
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(program())
    assert told == ["the other callback", "the flush"]


@each_of
def test_a_listener_or_a_schema_of_a_table_does_not_end_it(kind: type[BaseException]) -> None:
    class Failing(StringSchema):
        def decode(self, data: bytes) -> str:
            if data == b"bad":
                raise kind("on purpose")
            return super().decode(data)

    async def body(client: Client, broker: FakeBroker) -> None:
        view = await client.create_table_view("t", schema=Failing())
        heard: list[tuple[str, str]] = []
        await view.for_each_and_listen(fails(kind))

        async def later(key: str, value: str) -> None:
            await asyncio.sleep(0)
            raise kind("on purpose") if kind is not GeneratorExit else ValueError("that one closes a coroutine")

        await view.for_each_and_listen(later)
        await view.for_each_and_listen(lambda key, value: heard.append((key, value)))
        producer = await client.create_producer("t")
        for value in (b"1", b"bad", b"2"):
            await producer.send(value, partition_key="k")
        await asyncio.sleep(1)
        assert heard == [("k", "1"), ("k", "2")]
        assert view["k"] == "2"

    simulate(body)


@each_of
async def test_a_key_reader_ends_no_producer_and_no_consumer(
    client: Client, broker: FakeBroker, /, kind: type[BaseException]
) -> None:
    """A producer that cannot encrypt says so for each message, and goes on when it can; a consumer likewise."""
    keys = Keys("a")
    producer = await client.create_producer("t", crypto_key_reader=keys, encryption_key="a")
    await producer.send(b"1")
    keys.broken = kind("on purpose")  # type: ignore[assignment]
    with pytest.raises(magnetar.PulsarException):
        async with asyncio.timeout(60):
            await client.create_producer("t", crypto_key_reader=keys, encryption_key="a")
    consumer = await client.subscribe(
        "t", "s", crypto_key_reader=keys, initial_position=InitialPosition.Earliest,
        crypto_failure_action=magnetar.ConsumerCryptoFailureAction.FAIL, unacked_messages_timeout_ms=10_000,
    )  # fmt: skip
    with pytest.raises(magnetar.Timeout):
        await consumer.receive(1000)
    keys.broken = None
    assert (await consumer.receive(600_000)).data() == b"1"


@pytest.mark.parametrize(
    ("kind", "in_loop_"), [(kind, in_loop_) for kind in RAISES for in_loop_ in (False, True)
                           if not (in_loop_ and kind is GeneratorExit)]  # it is what closes a coroutine
)  # fmt: skip
async def test_a_check_that_raises_is_a_failed_answer(kind: type[BaseException], in_loop_: bool) -> None:
    answers: list[Any] = []

    async def end(id_: object, verb: Any, check: object, why: str) -> None:
        answers.append((verb, kind.__name__ in why))

    async def later(_: object) -> None:
        await asyncio.sleep(0)
        raise kind("on purpose")

    watch = HalfCheckWatch.__new__(HalfCheckWatch)
    watch.group, watch._function, watch._in_loop, watch._busy = "g", later if in_loop_ else fails(kind), in_loop_, 0
    watch._halves = SimpleNamespace(end_half=end)  # type: ignore[assignment]
    await watch._answer(wire.HalfCheck(answer_ms=10_000))
    assert answers == [(wire.EndHalfRequest.FAILED, True)]
    assert watch._busy == 0


@each_of
def test_an_event_listener_is_only_logged(kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    call_event_listener(SimpleNamespace(became_active=fails(kind), became_inactive=fails(kind)), None, 0, True)
    assert kind.__name__ in caplog.text


async def test_a_function_of_process_that_raises_cancelled_has_failed_and_a_cancelled_process_is_cancelled() -> None:
    message: Any = SimpleNamespace(message_id=MessageId)
    [applied] = await make_loop_processor(fails(asyncio.CancelledError))([message])
    assert isinstance(applied.error, RuntimeError)

    async def forever(_: object) -> None:
        await asyncio.get_running_loop().create_future()

    running = asyncio.ensure_future(make_loop_processor(forever)([message]))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_whose_cancellation_it_is() -> None:
    assert not is_cancelled(asyncio.CancelledError())
    assert is_cancelled(KeyboardInterrupt())
    assert not is_cancelled(SystemExit())


def test_a_message_listener_that_raises_does_not_end_its_thread(url: str) -> None:
    got: list[bytes] = []
    done = threading.Event()

    def listener(consumer: Any, message: Any) -> None:
        got.append(message.data())
        if len(got) == len(RAISES) + 1:
            done.set()
        else:
            raise RAISES[len(got) - 1]("on purpose")

    with magnetar.Client(url) as client:
        client.subscribe("foreign", "s", message_listener=listener)
        with client.create_producer("foreign") as producer:
            for number in range(len(RAISES) + 1):
                producer.send(b"%d" % number)
        assert done.wait(20), got
