"""Each callback and task of the client is broken in turn: who waits gets an error, and the log says what broke."""

import ast
import asyncio
import inspect
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

import magnetar.client
from magnetar.client.client import Client
from magnetar.client.common.errors import MagnetarError
from magnetar.client.connect.attachment import Attachment
from magnetar.client.connect.broker_stream import BrokerStream
from magnetar.client.connect.topic_watch import PartitionsWatcher
from magnetar.client.consume.acknowledgements import AckCollector
from magnetar.client.consume.deliveries import DeliveredEntries
from magnetar.client.consume.partition_consumer import PartitionConsumer
from magnetar.client.consume.table_view import TableView
from magnetar.client.core.consumer import ConsumerCore
from magnetar.client.core.producer import ProducerCore
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.produce.partition_producer import PartitionProducer
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate
from tests.compiled import COMPILED

SCHEDULERS = {"call_soon", "call_soon_threadsafe", "call_later", "call_at", "create_task", "ensure_future"}
BY_ITSELF = {
    ("loop_thread.py", "call_soon_threadsafe"),  # `loop.stop`, and tasks that have an owner
    ("loggers.py", "call_soon"),  # Ctrl-C, which is to end the loop
}
TARGETS = [
    (PartitionProducer, "_turn"), (PartitionProducer, "_time_passed"), (PartitionProducer, "on_frames"),
    (PartitionProducer, "on_opening_done"), (PartitionProducer, "_do"), (PartitionProducer, "on_lost"),
    (ProducerCore, "publish_closed_batches"), (ProducerCore, "_take_ready"), (ProducerCore, "_expire"), (ProducerCore,
    "take_confirmed"),
    (ProducerCore, "on_opened"), (PartitionConsumer, "_turn"), (PartitionConsumer, "_time_passed"),
    (PartitionConsumer, "on_frames"), (PartitionConsumer, "on_opening_done"), (PartitionConsumer, "_do"),
    (PartitionConsumer, "on_lost"), (ConsumerCore, "run_timers"), (ConsumerCore, "on_opened"), (ConsumerCore,
    "on_lost"),
    (AckCollector, "flush"), (DeliveredEntries, "split_entry"), (Attachment, "_open"), (Attachment, "_attempt"),
    (Attachment, "_reopen"), (Attachment, "send"), (BrokerStream, "_deliver_frames"), (BrokerStream, "send"),
    (BrokerStream, "_close_with"), (PartitionsWatcher, "_run"), (TableView, "_follow"), (TableView, "_on_message"),
]  # fmt: skip


def test_everything_that_the_loop_calls_goes_through_the_guard() -> None:
    found = []
    for path in sorted(Path(magnetar.client.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in SCHEDULERS or (path.name, node.func.attr) in BY_ITSELF:
                continue
            if not any(isinstance(each, ast.Name) and each.id == "run_logging_errors" for each in node.args):
                found.append(f"{path.name}:{node.lineno} {node.func.attr}")
    assert not found, "call it by client/common/loggers.py, spawn it by runtime/tasks.py"


async def ends(what: str, work: Awaitable[Any], hanging: list[str]) -> None:
    """With a result or a typed error, in time."""
    try:
        async with asyncio.timeout(600):
            await work
    except TimeoutError as error:
        if not isinstance(error, MagnetarError):
            hanging.append(what)
    except MagnetarError:
        pass


@pytest.mark.parametrize(("kind", "name"), TARGETS, ids=lambda each: getattr(each, "__name__", each))
def test_whatever_breaks_everybody_who_waits_gets_an_outcome(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if COMPILED and kind in (PartitionProducer, ProducerCore, ConsumerCore):
        pytest.skip("a compiled class calls its own methods without a look-up: none can be broken from outside")
    broken: list[str] = []
    hanging: list[str] = []
    real = getattr(kind, name)

    def break_it() -> None:
        if not broken:
            broken.append(name)
            raise RuntimeError("on purpose")

    def callback(self: Any, *given: Any, **named: Any) -> Any:
        break_it()
        return real(self, *given, **named)

    async def task(self: Any, *given: Any, **named: Any) -> Any:
        break_it()
        return await real(self, *given, **named)

    async def body(client: Client, broker: FakeBroker) -> None:
        helper = await client.create_producer("t")
        chunky = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
        monkeypatch.setattr(kind, name, task if inspect.iscoroutinefunction(real) else callback)

        async def produce() -> None:
            producer = await client.create_producer("t", send_timeout_millis=5000)
            producer.send_nowait(b"lone")
            await asyncio.sleep(1)
            waiting = [ends("send", producer.send(b"%d" % i), hanging) for i in range(20)]
            await asyncio.gather(*waiting, ends("flush", producer.flush(), hanging))
            broker.silent = True
            await ends("unanswered", producer.send(b"unanswered"), hanging)
            broker.silent = False
            await producer.close()

        async def consume() -> None:
            consumer = await client.subscribe(
                "t", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest,
                unacked_messages_timeout_ms=10_000, negative_ack_redelivery_delay_ms=1000,
            )  # fmt: skip
            for count in range(4):
                message = await consumer.receive()
                if count == 0:
                    await consumer.negative_acknowledge(message)
                elif count == 1:
                    await consumer.acknowledge(message)
            await asyncio.sleep(15)
            broker.cut()
            await asyncio.sleep(15)
            await ends("seek", consumer.seek(MessageId.earliest), hanging)
            await consumer.receive()
            await consumer.close()

        async def look() -> None:
            async with await client.create_table_view("t") as view:
                await asyncio.sleep(30)
                view.get("k")

        async def chunks() -> None:
            await chunky.send(b"x" * (11 << 20))
            await asyncio.sleep(70)

        async def feed() -> None:
            while True:
                await asyncio.sleep(1)
                await ends("helper", helper.send(b"more", partition_key="k"), [])

        feeding = asyncio.ensure_future(feed())
        works = {"produce": produce(), "consume": consume(), "look": look(), "chunks": chunks()}
        works["grow"] = client.create_producer("parts")
        await asyncio.gather(*(ends(what, work, hanging) for what, work in works.items()))
        feeding.cancel()
        await asyncio.sleep(70)
        broker.silent = False

    with caplog.at_level(logging.INFO, "magnetar.client"):
        simulate(body, FakeBroker({"parts": 3}))
    assert broken, "it was never called"
    assert not hanging
    assert "on purpose" in caplog.text, "its end is reported"
