"""Dead letters go back where they came from: each once, whatever is killed, and with nothing of the failure left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.common.errors import ConsumerBusy, translate_error
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.settings import CompressionType, ConsumerType, InitialPosition
from magnetar.client.produce.producer import Producer
from magnetar.client.redrive import REDRIVE_SUBSCRIPTION, REDRIVES_MAX, Redrive, RedriveOptions, RedriveResult
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import Busy, TopicNotFound
from magnetar.schema import JsonSchema, Record, String
from tests.client.model.keys import Keys
from tests.support.cluster import Cluster, cluster
from tests.support.steps import take_until_quiet

TOPIC = "persistent://public/default/orders"
BILLING = f"{TOPIC}/billing"
LETTERS = f"{TOPIC}-billing-DLQ"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.client.redrive.BACKLOG_CHECK_IDLE_MS", 100)


opened = wire.ProducerOpened


class Order(Record):
    name = String()


class Shop:
    """A topic with a subscription, and its dead-letter topic."""

    def __init__(self, running: Cluster) -> None:
        self.url = f"magnetar://{running.brokers[0].endpoint}"
        self.client, self.admin = aio.Client(self.url), AdminClient(self.url)

    async def letters(
        self, *payloads: bytes, subscription: str = "billing", options: dict[str, Any] | None = None, **properties: str
    ) -> None:
        origin = {"REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": subscription, "ORIGIN_MESSAGE_ID": "1:2:-1:-1"}
        failures = {"RECONSUMETIMES": "3", "DEAD_LETTER_REASON": "boom"}
        async with await self.client.create_producer(LETTERS, **(options or {})) as producer:
            await asyncio.gather(*(
                producer.send(each, partition_key="k", event_timestamp=7, properties=origin | failures | properties)
                for each in payloads
            ))  # fmt: skip

    async def run(self, **options: Any) -> RedriveResult:
        redrive = Redrive(self.client, self.admin, LETTERS, RedriveOptions(**options))
        async for result in redrive.run():
            assert result is redrive.result
        return redrive.result

    async def received(self, topic: str = TOPIC, name: str = "billing", **options: Any) -> list[Any]:
        consumer = await self.client.subscribe(
            topic, name, consumer_type=ConsumerType.Shared, initial_position=InitialPosition.Earliest, **options
        )

        async def take(timeout_ms: int) -> Any:
            message = await consumer.receive(timeout_ms)
            await consumer.acknowledge(message)
            return message

        found = await take_until_quiet(take, 300)
        await consumer.close()
        return found


@asynccontextmanager
async def shop(folder: Path, **changes: Any) -> AsyncIterator[Shop]:
    async with cluster(folder, **changes) as running:
        made = Shop(running)
        await made.admin.create_topic(TOPIC)
        await made.admin.create_subscription(TOPIC, "billing")
        yield made
        await made.client.close()
        await made.admin.close()


async def test_letters_go_back_once_as_they_were_before_they_failed(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", b"2", b"3", mine="yes")
        assert (await made.run()).sent == {TOPIC: 3}
        found = await made.received()
        assert sorted(each.data() for each in found) == [b"1", b"2", b"3"]
        named = [each.properties() for each in found]
        assert len({each.pop("REDRIVEN_LETTER_ID") for each in named}) == 3
        assert named == [
            {"mine": "yes", "REDRIVEN": "1", "REDRIVEN_TO": BILLING, "REDRIVEN_ORIGIN_MESSAGE_ID": "1:2:-1:-1"}
        ] * 3
        assert {(each.partition_key(), each.event_timestamp()) for each in found} == {("k", 7)}
        again = await made.run()
        assert (again.sent, again.left) == ({}, {}), "each went once"


async def test_a_run_ends_where_the_letters_ended_when_it_began(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", b"2")

        async def fail_again() -> None:
            """A program that is not mended: each message becomes a letter again, at once."""
            consumer = await made.client.subscribe(TOPIC, "billing", consumer_type=ConsumerType.Shared)
            while True:
                message = await consumer.receive()
                origin = {"REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": "billing", "ORIGIN_MESSAGE_ID": "1:2:-1:-1"}
                async with await made.client.create_producer(LETTERS) as producer:
                    await producer.send(message.data(), properties=origin | message.properties())
                await consumer.acknowledge(message)

        failing = asyncio.create_task(fail_again())
        try:
            result = await made.run(rate=20.0)
            assert (result.sent, result.left, result.is_complete) == ({TOPIC: 2}, {}, True), "once, not three times"
        finally:
            failing.cancel()
            await asyncio.gather(failing, return_exceptions=True)


async def test_a_dry_run_whose_subscription_another_redrive_uses_leaves_it_to_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_self: Consumer) -> None:
        raise translate_error(Busy("other consumers are connected"))

    monkeypatch.setattr(Consumer, "unsubscribe", refused)
    async with shop(tmp_path) as made:
        await made.letters(b"1")
        assert (await made.run(dry_run=True)).sent == {TOPIC: 1}


async def test_only_what_is_asked_for_goes_and_the_rest_stays_for_later(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", b"2", region="eu")
        await made.letters(b"3", region="us")
        await made.admin.create_subscription(TOPIC, "audit")
        await made.letters(b"4", subscription="audit", region="eu")
        await made.letters(b"5", region="eu", REDRIVEN=str(REDRIVES_MAX))
        async with await made.client.create_producer(LETTERS) as producer:
            await producer.send(b"6")
        dry = await made.run(dry_run=True)
        assert dry.sent == {TOPIC: 4}
        assert REDRIVE_SUBSCRIPTION not in await made.admin.subscriptions(LETTERS), "a dry run leaves nothing behind"
        result = await made.run(where="region = 'eu' AND message.key = 'k'", subscription="billing")
        assert result.sent == {TOPIC: 2}
        assert result.left == {
            "not wanted by the filter": 1, "of another subscription": 1, f"went back {REDRIVES_MAX} times already": 1,
            "no dead letter: it has no property REAL_TOPIC": 1,
        }  # fmt: skip
        assert (await made.run(limit=1, force=True)).sent == {TOPIC: 1}
        assert (await made.run(force=True)).sent == {TOPIC: 2}
        assert sorted(each.data() for each in await made.received()) == [b"1", b"2", b"3", b"5"]
        assert [each.data() for each in await made.received(name="audit")] == [b"4"]


async def test_a_retry_topic_gets_the_letters_of_its_subscription(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        retries = f"{TOPIC}-billing-RETRY"
        await made.admin.create_topic(retries)
        await made.admin.create_subscription(TOPIC, "audit")
        await made.letters(b"0")
        result = await made.run()
        assert (result.sent, result.readers) == ({TOPIC: 1}, {TOPIC: ("billing",)}), "its subscription does not read it"
        await made.admin.create_subscription(retries, "billing")
        await made.letters(b"1")
        await made.letters(b"2", subscription="audit")
        assert (await made.run()).sent == {retries: 1, TOPIC: 1}
        (retried,) = await made.received(retries)
        letter = retried.properties().pop("REDRIVEN_LETTER_ID")
        assert retried.properties() == {
            "REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": "billing", "ORIGIN_MESSAGE_ID": "1:2:-1:-1", "REDRIVEN": "1",
            "REDRIVEN_ORIGIN_MESSAGE_ID": "1:2:-1:-1", "REDRIVEN_LETTER_ID": letter,
        }  # fmt: skip


async def test_a_letter_reaches_the_one_subscription_that_gave_it_up_and_readers(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.admin.create_subscription(TOPIC, "audit")
        await made.letters(b"1", b"2")
        await made.letters(b"3", subscription="audit")
        result = await made.run()
        assert (result.sent, result.readers) == ({TOPIC: 3}, {TOPIC: ("audit", "billing")})
        assert sorted(each.data() for each in await made.received()) == [b"1", b"2"]
        assert [each.data() for each in await made.received(name="audit")] == [b"3"]
        stats = {each.name: each for each in (await made.admin.topic_stats(TOPIC)).subscriptions}
        assert {name: (each.backlog, each.filtered) for name, each in stats.items()} == {
            "audit": (0, 2), "billing": (0, 1),
        }  # fmt: skip
        reader = await made.client.create_reader(TOPIC, aio.MessageId.earliest)
        assert sorted([(await reader.read_next(30_000)).data() for _ in range(3)]) == [b"1", b"2", b"3"]


async def test_with_to_all_every_subscription_gets_the_letters(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.admin.create_subscription(TOPIC, "audit")
        await made.letters(b"1")
        result = await made.run(to_all=True)
        assert (result.sent, result.readers) == ({TOPIC: 1}, {TOPIC: ("audit", "billing")})
        for name in ("audit", "billing"):
            (message,) = await made.received(name=name)
            assert "REDRIVEN_TO" not in message.properties()


async def test_letters_stay_if_only_all_subscriptions_or_none_could_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", subscription="")
        await made.letters(b"2", subscription="gone")
        await made.letters(b"3")
        monkeypatch.setattr(
            "magnetar.broker.grpc.translate.wire.ProducerOpened", lambda redrives_to_one, **rest: opened(**rest)
        )
        result = await made.run()
        assert (result.sent, result.left) == ({}, {
            "no subscription to go to: it has no property REAL_SUBSCRIPTION": 1,
            f"{TOPIC} has no subscription 'gone' (any more)": 1,
            f"the broker of {TOPIC} is older, and would give it to every subscription": 1,
        })  # fmt: skip
        assert await made.received() == []
        assert (await made.run(to_all=True)).sent == {TOPIC: 3}


async def test_in_partitions_too_a_letter_reaches_its_subscription_alone(tmp_path: Path) -> None:
    parted = "persistent://public/default/parted"
    async with shop(tmp_path) as made:
        await made.admin.create_topic(parted, partitions=3)
        for name in ("audit", "billing"):
            for part in await made.admin.parts(parted):
                await made.admin.create_subscription(part, name)
        for each in range(6):
            await made.letters(b"%d" % each, REAL_TOPIC=f"{parted}-partition-{each % 3}", mine=str(each))
        assert (await made.run()).sent == {parted: 6}
        assert sorted(each.data() for each in await made.received(parted)) == [b"%d" % each for each in range(6)]
        assert await made.received(parted, name="audit") == []


async def test_a_letter_that_went_back_and_fails_again_goes_back_again(tmp_path: Path) -> None:
    """Its address is of its topic: in the dead-letter topic it is for all, and the next copy has a new one."""
    async with shop(tmp_path) as made:
        await made.letters(b"1", REDRIVEN="1", REDRIVEN_TO=BILLING)
        assert (await made.run()).sent == {TOPIC: 1}
        (message,) = await made.received()
        assert (message.properties()["REDRIVEN"], message.properties()["REDRIVEN_TO"]) == ("2", BILLING)


async def test_a_redrive_that_ends_in_the_middle_sends_nothing_twice_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled after each of its steps in turn; the next one goes on."""
    async with shop(tmp_path) as made:
        await made.letters(*(b"%d" % each for each in range(40)))
        monkeypatch.setattr("magnetar.client.redrive.BATCH_MESSAGES", 3)
        for steps in range(1, 9):
            running = asyncio.ensure_future(made.run(limit=6))
            for _ in range(steps * 7):
                await asyncio.sleep(0.003)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await made.run()
        found = sorted(int(each.data()) for each in await made.received())
        assert found == [*range(40)]


async def test_what_a_killed_redrive_had_in_its_transaction_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is cut off when it has sent and acknowledged, and never says anything again."""
    monkeypatch.setattr("magnetar.client.redrive.TRANSACTION_TIMEOUT_S", 1.0)
    async with shop(tmp_path) as made:
        await made.letters(*(b"%d" % each for each in range(6)))
        killed = aio.Client(made.url)
        cut_off = Redrive(killed, made.admin, LETTERS, RedriveOptions(limit=3))
        honest, sent, never = cut_off._send_all, asyncio.Event(), asyncio.Event()

        async def send_and_die(*given: Any) -> None:
            await honest(*given)
            sent.set()
            await never.wait()

        monkeypatch.setattr(cut_off, "_send_all", send_and_die)
        dying = asyncio.ensure_future(anext(cut_off.run()))
        await sent.wait()
        await killed.connections.close()
        (stats,) = (await made.admin.topic_stats(LETTERS)).subscriptions
        assert stats.pending_entries > 0, "nothing has ended the transaction"
        result = await made.run()
        assert (result.sent, result.left, result.is_complete) == ({TOPIC: 6}, {}, True)
        assert sorted(int(each.data()) for each in await made.received()) == [*range(6)]
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)


async def test_an_aborted_transaction_is_tried_again_and_counts_no_letter_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.client.redrive.BATCH_MESSAGES", 4)
    async with shop(tmp_path) as made:
        for each in range(12):
            await made.letters(b"%d" % each, region="eu" if each % 2 else "us")
        redrive = Redrive(made.client, made.admin, LETTERS, RedriveOptions(where="region = 'eu'"))
        honest, failed = redrive._send_all, []

        async def abort_some(consumer: Any, chosen: Any, txn: Any) -> None:
            await honest(consumer, chosen, txn)
            if redrive.result.sent and len(failed) < 2:  # letters that stay were counted before
                failed.append(txn)
                await made.admin.abort_transaction(txn.id)

        monkeypatch.setattr(redrive, "_send_all", abort_some)
        async for _ in redrive.run():
            pass
        assert (redrive.result.sent, redrive.result.left) == ({TOPIC: 6}, {"not wanted by the filter": 6})
        assert sorted(int(each.data()) for each in await made.received()) == [1, 3, 5, 7, 9, 11]


async def test_a_batch_is_sent_and_acknowledged_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sends have begun before the first has ended, and there is one acknowledgement."""
    calls: list[str] = []
    send, acknowledge = Producer.send_copy, Consumer.acknowledge

    async def note_send(self: Producer, copy: Any) -> Any:
        calls.append("begun")
        found = await send(self, copy)
        calls.append("ended")
        return found

    async def note_ack(self: Consumer, *given: Any, **options: Any) -> None:
        calls.append("acknowledged")
        await acknowledge(self, *given, **options)

    async with shop(tmp_path) as made:
        await made.letters(*(b"%d" % each for each in range(20)))
        monkeypatch.setattr(Producer, "send_copy", note_send)
        monkeypatch.setattr(Consumer, "acknowledge", note_ack)
        assert (await made.run()).sent == {TOPIC: 20}
        assert calls == ["begun"] * 20 + ["acknowledged"] + ["ended"] * 20


async def test_letters_that_stay_do_not_stop_those_after_them(tmp_path: Path) -> None:
    async with shop(tmp_path, max_unacked_per_consumer=10, max_unacked_per_subscription=10) as made:
        await made.letters(*(b"%d" % each for each in range(40)), region="us")
        await made.letters(b"last", region="eu")
        result = await made.run(where="region = 'eu'")
        assert (result.sent, result.left) == ({TOPIC: 1}, {"not wanted by the filter": 40})
        assert result.is_complete


async def test_what_comes_after_the_limit_is_not_counted_and_the_result_says_so(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(*(b"%d" % each for each in range(5)))
        result = await made.run(limit=2)
        assert (result.sent, result.left, result.is_complete) == ({TOPIC: 2}, {}, False)
        result = await made.run()
        assert (result.sent, result.is_complete) == ({TOPIC: 3}, True)


async def test_letters_of_a_topic_that_takes_none_stay_and_no_topic_is_made(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        gone, ended = "persistent://public/default/gone", "persistent://public/default/ended"
        await made.letters(b"1", REAL_TOPIC=gone)
        await made.admin.create_topic(ended)
        await made.admin.create_subscription(ended, "billing")
        await made.admin.terminate_topic(ended)
        await made.letters(b"2", REAL_TOPIC=ended)
        await made.letters(b"3")
        result = await made.run()
        assert result.sent == {TOPIC: 1}
        assert result.left == {f"{gone} does not exist any more": 1, f"{ended} is terminated": 1}
        assert gone not in await made.admin.topics()
        with pytest.raises(TopicNotFound):
            await made.run(to=gone)


async def test_a_topic_that_is_deleted_while_its_letters_go_back_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.client.redrive.BATCH_MESSAGES", 2)
    async with shop(tmp_path) as made:
        await made.letters(*(b"%d" % each for each in range(6)))
        redrive = Redrive(made.client, made.admin, LETTERS, RedriveOptions())
        async for result in redrive.run():
            if not result.left:
                await made.admin.delete_topic(TOPIC, force=True)
        assert (result.sent, result.left) == ({TOPIC: 2}, {f"{TOPIC} does not exist any more": 4})
        assert TOPIC not in await made.admin.topics()


async def test_a_topic_that_is_named_gets_all_letters(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.admin.create_topic("aside")
        await made.letters(b"1")
        await made.letters(b"2", subscription="audit")
        result = await made.run(to="aside")
        full = "persistent://public/default/aside"
        assert (result.sent, result.readers) == ({full: 2}, {full: ()})
        assert [each.data() for each in await made.received(full)] == [b"1", b"2"]


async def test_letters_in_partitions_go_back_from_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnetar.client.redrive.BATCH_MESSAGES", 4)
    async with shop(tmp_path) as made:
        await made.admin.create_topic(LETTERS, partitions=3)
        for each in range(30):
            await made.letters(b"%d" % each, region="eu" if each % 3 else "us")
        result = await made.run(where="region = 'eu'")
        assert (result.sent, result.left) == ({TOPIC: 20}, {"not wanted by the filter": 10})
        assert result.is_complete
        assert sorted(int(each.data()) for each in await made.received()) == [n for n in range(30) if n % 3]


async def test_a_second_redrive_of_the_topic_is_refused(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1")
        consumer = await made.client.subscribe(LETTERS, REDRIVE_SUBSCRIPTION, initial_position=InitialPosition.Earliest)
        with pytest.raises(ConsumerBusy):
            await made.run()
        await consumer.close()
        assert (await made.run()).sent == {TOPIC: 1}


async def test_a_letter_in_chunks_goes_back_as_a_whole(tmp_path: Path) -> None:
    async with shop(tmp_path, max_message_bytes=64 << 10) as made:
        large = bytes(each * 7919 % 251 for each in range(300_000))
        await made.letters(large, options={"chunking_enabled": True, "batching_enabled": False})
        await made.letters(b"small")
        assert (await made.run()).sent == {TOPIC: 2}
        assert [each.data() for each in await made.received()] == [large, b"small"]
        assert (await made.run()).sent == {}


async def test_an_encrypted_letter_goes_back_unopened_unless_it_is_in_a_batch_or_in_chunks(tmp_path: Path) -> None:
    keys = {"crypto_key_reader": Keys("a"), "encryption_keys": ("a",)}
    async with shop(tmp_path, max_message_bytes=64 << 10) as made:
        for compression in (CompressionType.NONE, CompressionType.ZSTD):
            await made.letters(
                b"secret" * 20, options={"batching_enabled": False, "compression_type": compression, **keys}
            )
        await made.letters(b"1", b"2", options={"batching_enabled": True, **keys})
        await made.letters(bytes(100_000), options={"chunking_enabled": True, "batching_enabled": False, **keys})
        result = await made.run()
        assert result.sent == {TOPIC: 2}
        assert {why.partition(":")[0] for why in result.left} == {
            "no dead letter", "encrypted, and a chunk of a larger one"
        }, "the properties of an encrypted batch are in its ciphertext"  # fmt: skip
        found = await made.received(crypto_key_reader=Keys("a"))
        assert [each.data() for each in found] == [b"secret" * 20] * 2
        assert {each.properties()["REDRIVEN"] for each in found} == {"1"}


async def test_the_schema_of_a_letter_goes_with_it(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        origin = {"REAL_TOPIC": TOPIC, "REAL_SUBSCRIPTION": "billing"}
        async with await made.client.create_producer(LETTERS, schema=JsonSchema(Order)) as producer:
            await producer.send(Order(name="a"), properties=origin)
        assert (await made.run()).sent == {TOPIC: 1}
        consumer = await made.client.subscribe(
            TOPIC, "billing", schema=JsonSchema(Order), initial_position=InitialPosition.Earliest
        )
        message = await consumer.receive(30_000)
        assert (message.value().name, message.int_schema_version()) == ("a", 0)


async def test_a_letter_that_somebody_else_wrote_ends_no_redrive(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        await made.letters(b"1", REAL_TOPIC=LETTERS)  # it would come round for ever
        await made.letters(b"2", subscription="no/name")
        result = await asyncio.wait_for(made.run(force=True), 30)
        assert (result.sent, result.left) == ({}, {
            "no dead letter: it has no property REAL_TOPIC": 1, f"{TOPIC} has no subscription 'no/name' (any more)": 1,
        })  # fmt: skip
        assert (await made.run(to_all=True)).sent == {TOPIC: 1}


async def test_a_dead_letter_topic_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        with pytest.raises(TopicNotFound):
            await made.run()
        assert LETTERS not in await made.admin.topics()
