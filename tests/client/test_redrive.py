"""Dead letters go back where they came from: each once, whatever is killed, and with nothing of the failure left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.common.errors import Timeout
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.redrive import SUBSCRIPTION, TIMES_MAX, Redrive, RedriveOptions, RedriveResult
from magnetar.proto.errors import TopicNotFound
from magnetar.schema import JsonSchema, Record, String
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/orders"
LETTERS = f"{TOPIC}-billing-DLQ"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.client.redrive.IDLE_MS", 100)


class Order(Record):
    name = String()


class Shop:
    """A topic with a subscription, and its dead-letter topic."""

    def __init__(self, running: Cluster) -> None:
        url = f"magnetar://{running.brokers[0].endpoint}"
        self.client, self.admin = aio.Client(url), AdminClient(url)

    async def letters(self, *payloads: bytes, subscription: str = "billing", **properties: str) -> None:
        origin = {"REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": subscription, "ORIGIN_MESSAGE_ID": "1:2:-1:-1"}
        failures = {"RECONSUMETIMES": "3", "DEAD_LETTER_REASON": "boom"}
        async with await self.client.create_producer(LETTERS) as producer:
            await asyncio.gather(*(
                producer.send(each, partition_key="k", event_timestamp=7, properties=origin | failures | properties)
                for each in payloads
            ))  # fmt: skip

    async def run(self, **options: Any) -> RedriveResult:
        redrive = Redrive(self.client, self.admin, LETTERS, RedriveOptions(**options))
        async for result in redrive.run():
            assert result is redrive.result
        return redrive.result

    async def received(self, topic: str = TOPIC, name: str = "billing") -> list[Any]:
        consumer = await self.client.subscribe(
            topic, name, consumer_type=ConsumerType.Shared, initial_position=InitialPosition.Earliest
        )
        found = []
        try:
            while True:
                found.append(await consumer.receive(300))
                await consumer.acknowledge(found[-1])
        except Timeout:
            await consumer.close()
        return found


@asynccontextmanager
async def shop(folder: Path) -> AsyncIterator[Shop]:
    async with cluster(folder) as running:
        made = Shop(running)
        await made.admin.create_topic(TOPIC)
        yield made
        await made.client.close()
        await made.admin.close()


async def test_letters_go_back_once_as_they_were_before_they_failed(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", b"2", b"3", mine="yes")
        assert (await made.run()).sent == {TOPIC: 3}
        found = await made.received()
        assert sorted(each.data() for each in found) == [b"1", b"2", b"3"]
        assert {tuple(each.properties().items()) for each in found} == {(("mine", "yes"), ("REDRIVEN", "1"))}
        assert {(each.partition_key(), each.event_timestamp()) for each in found} == {("k", 7)}
        again = await made.run()
        assert (again.sent, again.left) == ({}, {}), "each went once"


async def test_only_what_is_asked_for_goes_and_the_rest_stays_for_later(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", b"2", region="eu")
        await made.letters(b"3", region="us")
        await made.letters(b"4", subscription="audit", region="eu")
        await made.letters(b"5", region="eu", REDRIVEN=str(TIMES_MAX))
        async with await made.client.create_producer(LETTERS) as producer:
            await producer.send(b"6")
        dry = await made.run(dry_run=True)
        assert dry.sent == {TOPIC: 4}
        assert SUBSCRIPTION not in await made.admin.subscriptions(LETTERS), "a dry run leaves nothing behind"
        result = await made.run(where="region = 'eu' AND message.key = 'k'", subscription="billing")
        assert result.sent == {TOPIC: 2}
        assert result.left == {
            "not wanted by the filter": 1, "of another subscription": 1, f"went back {TIMES_MAX} times already": 1,
            "no dead letter: it has no property REAL_TOPIC": 1,
        }  # fmt: skip
        assert (await made.run(limit=1, force=True)).sent == {TOPIC: 1}
        assert (await made.run(force=True)).sent == {TOPIC: 2}
        assert sorted(each.data() for each in await made.received()) == [b"1", b"2", b"3", b"4", b"5"]


async def test_a_retry_topic_gets_the_letters_of_its_subscription(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.admin.create_topic(f"{TOPIC}-billing-RETRY")
        await made.letters(b"1")
        await made.letters(b"2", subscription="audit")
        assert (await made.run()).sent == {f"{TOPIC}-billing-RETRY": 1, TOPIC: 1}
        (retried,) = await made.received(f"{TOPIC}-billing-RETRY")
        assert retried.properties() == {
            "REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": "billing", "ORIGIN_MESSAGE_ID": "1:2:-1:-1", "REDRIVEN": "1"
        }  # fmt: skip


async def test_a_redrive_that_ends_in_the_middle_sends_nothing_twice_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled after each of its steps in turn; the next one goes on."""
    async with shop(tmp_path) as made:
        await made.letters(*(b"%d" % each for each in range(40)))
        for steps in range(1, 9):
            monkeypatch.setattr("magnetar.client.redrive.BATCH_MESSAGES", 3)
            running = asyncio.ensure_future(made.run(limit=6))
            for _ in range(steps * 7):
                await asyncio.sleep(0.003)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await made.run()
        found = sorted(int(each.data()) for each in await made.received())
        assert found == [*range(40)]


async def test_the_schema_of_a_letter_goes_with_it(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        origin = {"REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": "billing"}
        async with await made.client.create_producer(LETTERS, schema=JsonSchema(Order)) as producer:
            await producer.send(Order(name="a"), properties=origin)
        assert (await made.run()).sent == {TOPIC: 1}
        consumer = await made.client.subscribe(
            TOPIC, "s", schema=JsonSchema(Order), initial_position=InitialPosition.Earliest
        )
        message = await consumer.receive(5000)
        assert (message.value().name, message.int_schema_version()) == ("a", 0)


async def test_a_letter_that_somebody_else_wrote_ends_no_redrive(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", REAL_TOPIC=LETTERS)  # it would come round for ever
        await made.letters(b"2", subscription="no/name")
        result = await asyncio.wait_for(made.run(force=True), 30)
        assert (result.sent, result.left) == ({TOPIC: 1}, {"no dead letter: it has no property REAL_TOPIC": 1})


async def test_a_dead_letter_topic_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        with pytest.raises(TopicNotFound):
            await made.run()
        assert LETTERS not in await made.admin.topics()
