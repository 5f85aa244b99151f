"""Table views on a real broker: what they hold, when they change, and that no key outlives its tombstone."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import magnetar as pulsar
from magnetar.client.client import Client
from magnetar.client.common.errors import Timeout
from magnetar.client.connect.attachment import Attachment
from magnetar.client.consume.table_view import TableView
from magnetar.client.model.composite_schemas import AutoConsumeSchema
from magnetar.client.model.schema import SchemaType, StringSchema
from magnetar.proto import wire_pb2 as wire
from magnetar.runtime.network import find_rpc
from tests.client.consume.test_compaction import TOPIC, Bench, bench
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate


async def until(true: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            found: Any = true()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


async def is_text(on: Bench) -> None:
    """The topic has the schema STRING, also where producers send bytes."""
    channel = on.running.world.network.connect(on.running.brokers[0].endpoint)
    request = wire.SchemaRequest(topic=f"persistent://public/default/{TOPIC}", schema=wire.SchemaInfo(type=1))
    await channel.call(find_rpc("Admin", "PutSchema"), request, timeout_s=10)
    await channel.close()


async def test_a_table_holds_what_was_there_and_follows_every_change(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(("a", b"1"), ("b", b"1"), ("a", b"2"), (None, b"no key"))
        view = await on.client.create_table_view(TOPIC)
        assert dict(view.items()) == {"a": b"2", "b": b"1"}
        assert (len(view), "a" in view, "z" in view, sorted(view)) == (2, True, False, ["a", "b"])
        assert (view.get("a"), view.get("z"), view["b"]) == (b"2", None, b"1")
        heard: list[tuple[str, bytes]] = []
        await view.for_each_and_listen(lambda key, value: heard.append((key, value)))
        assert sorted(heard) == [("a", b"2"), ("b", b"1")]
        await on.send(("b", None), ("c", b"3"), ("a", b""), ("zz", None))
        await until(lambda: len(heard) == 5)
        assert heard[2:] == [("b", b""), ("c", b"3"), ("a", b"")]
        assert dict(view.items()) == {"c": b"3"}
        each: list[str] = []

        async def note(key: str, value: bytes) -> None:
            each.append(key)

        await view.for_each(note)
        assert each == ["c"]
        await view.close()


async def test_complaint_49_a_table_shows_what_compaction_kept_and_no_tombstone_of_any_client(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await on.send(("a", b"1"), ("b", b"1"), ("c", b"1"), ("d", b"1"))
        await on.send(("b", None), batch=False)
        await on.send(("c", b""), ("d", b"2"))
        await on.compact()
        await on.send(("e", b"1"), batch=False)
        view = await on.client.create_table_view(TOPIC)
        assert dict(view.items()) == {"a": b"1", "d": b"2", "e": b"1"}


async def test_no_key_outlives_its_tombstone_when_a_compaction_overtakes_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view is cut off; meanwhile keys are deleted, and compaction removes their tombstones."""
    async with bench(tmp_path) as on:
        await on.send(("a", b"1"), ("b", b"1"), ("c", b"1"))
        view = await on.client.create_table_view(TOPIC)
        heard: list[tuple[str, bytes]] = []
        await view.for_each_and_listen(lambda key, value: heard.append((key, value)))
        consumer = view.partitions[0]
        attempt = Attachment._attempt
        cut_off = asyncio.Event()

        async def later() -> None:
            await cut_off.wait()
            await attempt(consumer._attachment)

        mine = consumer._attachment
        monkeypatch.setattr(Attachment, "_attempt", lambda self: later() if self is mine else attempt(self))
        assert consumer._attachment._stream is not None
        consumer._attachment._stream.cancel()
        await until(lambda: consumer.core.state.name == "RECONNECTING")
        await on.send(("a", None), ("b", b"2"), ("d", b"1"))
        await on.send(("b", None), ("d", None))
        await on.compact()
        cut_off.set()
        await until(lambda: dict(view.items()) == {"c": b"1"})
        assert ("a", b"") in heard
        assert ("b", b"") in heard
        await on.send(("a", b"9"), batch=False)
        await until(lambda: view.get("a") == b"9")


async def test_a_partitioned_topic_is_one_table_and_new_partitions_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.client.connect.topic_watch.DISCOVER_EVERY_S", 0.05)
    async with bench(tmp_path) as on:
        channel = on.running.world.network.connect(on.running.brokers[0].endpoint)
        spec = wire.TopicSpec(name=f"persistent://public/default/{TOPIC}", partitions=2)
        await channel.call(find_rpc("Admin", "CreateTopic"), spec, timeout_s=10)
        await is_text(on)
        await on.send(*((f"k{number}", b"%d" % number) for number in range(20)))
        view: TableView = await on.client.create_table_view(TOPIC, schema=StringSchema())
        assert dict(view.items()) == {f"k{number}": str(number) for number in range(20)}
        spec.partitions = 5
        await channel.call(find_rpc("Admin", "UpdateTopic"), spec, timeout_s=10)
        await on.send(*((f"n{number}", b"x") for number in range(20)))
        await until(lambda: len(view) == 40)
        assert len(view.partitions) == 5
        await channel.close()


async def test_a_value_that_cannot_be_decoded_and_a_listener_that_fails_disturb_nobody(tmp_path: Path) -> None:
    async with bench(tmp_path) as on:
        await is_text(on)
        await on.send(("a", b"\xff\xfe"), ("b", b"fine"))
        view = await on.client.create_table_view(TOPIC, schema=StringSchema())
        assert dict(view.items()) == {"b": "fine"}

        def fails(key: str, value: object) -> None:
            if value == "boom":
                raise RuntimeError(key)

        await view.for_each_and_listen(fails)
        await on.send(("c", b"boom"), ("d", b"later"))
        await until(lambda: view.get("d") == "later")
        assert view.get("c") == "boom"


def test_the_blocking_face_is_a_dictionary_with_listeners_in_a_thread(url: str) -> None:
    with pulsar.Client(url) as client:
        producer = client.create_producer("blocking-table")
        for number in range(10):
            producer.send(b"%d" % number, partition_key=f"k{number % 3}")
        with client.create_table_view("blocking-table") as view:
            assert dict(view.items()) == {"k0": b"9", "k1": b"7", "k2": b"8"}
            assert isinstance(view, pulsar.TableView)
            assert (len(view), "k0" in view, sorted(view), view.get("none", b"-")) == (
                3, True, ["k0", "k1", "k2"], b"-",
            )  # fmt: skip
            shown: list[str] = []
            view.for_each(lambda key, value: shown.append(key))
            assert sorted(shown) == ["k0", "k1", "k2"]
            import queue

            heard: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

            def listener(key: str, value: bytes) -> None:
                assert view.get(key, b"") == value, "the client may be used here"
                heard.put((key, value))

            view.for_each_and_listen(listener)
            assert sorted(heard.get_nowait() for _ in range(3)) == [("k0", b"9"), ("k1", b"7"), ("k2", b"8")]
            producer.send(None, partition_key="k1")
            assert heard.get(timeout=10) == ("k1", b"")
            assert "k1" not in view


__all__ = ["Bench"]


class SchemaBroker(FakeBroker):
    """`is_mute`: the question for a schema gets no answer."""

    is_mute = True

    async def get_schema(self, request: Any, context: Any) -> wire.SchemaReply:
        while self.is_mute:  # noqa: ASYNC110 - it is virtual time
            await asyncio.sleep(1)
        return wire.SchemaReply(schema=wire.SchemaInfo(type=SchemaType.STRING.value))


def test_a_table_goes_on_when_a_schema_is_told_late() -> None:
    broker = SchemaBroker()

    async def body(client: Client, _: FakeBroker) -> None:
        view = await client.create_table_view("t", schema=AutoConsumeSchema())
        await (await client.create_producer("t")).send(b"1", partition_key="k")
        await asyncio.sleep(100)  # several operations time out
        assert len(view) == 0
        broker.is_mute = False
        await asyncio.sleep(60)
        assert dict(view.items()) == {"k": "1"}

    simulate(body, broker)


def test_a_table_whose_first_schema_is_not_told_is_not_opened() -> None:
    async def body(client: Client, _: FakeBroker) -> None:
        await (await client.create_producer("t")).send(b"1", partition_key="k")
        with pytest.raises(Timeout):
            await client.create_table_view("t", schema=AutoConsumeSchema())

    simulate(body, SchemaBroker())
