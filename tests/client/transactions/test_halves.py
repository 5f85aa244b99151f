"""Half messages of the SDK over a cluster in this process: what is shown, who is asked, what each misuse is told."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import magnetar
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.core.transaction import TransactionState
from magnetar.client.model.settings import InitialPosition
from magnetar.client.produce.producer import Half
from magnetar.client.transactions.halves import CHECKS_AT_ONCE, Decision, HalfCheck
from magnetar.client.transactions.process import Output
from tests.support.cluster import SMALL, Cluster, cluster

FAST = replace(
    SMALL, transaction_coordinators=2, transaction_half_check_after_s=0.1, transaction_half_pause_s=0.1,
    transaction_half_pause_s_max=0.2, transaction_half_answer_s=1.0, transaction_half_unknown_max=3,
)  # fmt: skip
PATIENT = replace(FAST, transaction_half_check_after_s=600.0)


@asynccontextmanager
async def running(folder: Path, config: Any = FAST) -> AsyncIterator[tuple[Cluster, Client]]:
    async with cluster(folder, brokers=0) as found:
        broker = await found.add_broker(config)
        async with Client(f"magnetar://{broker.endpoint}", operation_timeout_seconds=20) as client:
            yield found, client


async def shown(client: Client, *topics: str, count: int) -> list[bytes]:
    """All that is in the topics, up to a message that is sent now."""
    found: list[bytes] = []
    for topic in topics:
        reader = await client.create_reader(topic, magnetar.MessageId.earliest)
        producer = await client.create_producer(topic)
        await producer.send(b"last")
        while (data := (await reader.read_next()).data()) != b"last":
            found.append(data)
        await reader.close()
    assert len(found) == count, found
    return found


async def until(condition: Callable[[], Any]) -> Any:
    """What it returns, once that is true; it may be awaited."""
    for _ in range(1000):
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen in time")


async def until_is(client: Client, half: Half, state: TransactionState) -> None:
    async def reached() -> bool:
        return await client.transaction_status(half.id) is state

    await until(reached)


async def rows(admin: AdminClient) -> list[Any]:
    return [each for found in await admin.all_halves() for each in found.items]


async def until_parked(admin: AdminClient) -> Any:
    async def parked() -> list[Any]:
        return [each for each in await rows(admin) if each.state.name == "PARKED"]

    return (await until(parked))[0]


# ---------------------------------------------------------------------------------- prepare, commit, roll back
async def test_a_half_is_hidden_until_its_commit_and_holds_no_reader_back(tmp_path: Path) -> None:
    async with running(tmp_path, PATIENT) as (_, client):
        producer = await client.create_producer("orders")
        consumer = await client.subscribe("orders", "s", initial_position=InitialPosition.Earliest)
        half = await producer.prepare(b"half", {"who": "me"}, partition_key="k", group="g", check_key="17")
        assert half.state is TransactionState.PREPARED
        assert await client.transaction_status(half.id) is TransactionState.PREPARED
        await producer.send(b"plain")
        assert (await consumer.receive()).data() == b"plain", "it passes the half"
        await half.commit()
        await half.commit()
        message = await consumer.receive()
        assert (message.data(), message.properties(), message.partition_key()) == (b"half", {"who": "me"}, "k")
        assert half.state is await client.transaction_status(half.id) is TransactionState.COMMITTED
        with pytest.raises(magnetar.TransactionEnded):
            await half.rollback()
        assert len(await shown(client, "orders", count=2)) == 2


async def test_messages_of_one_half_go_to_several_topics_together_with_schemas_and_partitions(tmp_path: Path) -> None:
    async with running(tmp_path, PATIENT) as (found, client):
        async with AdminClient(f"magnetar://{found.brokers[0].endpoint}") as admin:
            await admin.create_topic("parts", partitions=3)
        plain = await client.create_producer("plain")
        parts = await client.create_producer("parts")
        typed = await client.create_producer("typed", schema=magnetar.schema.JsonSchema(Order))
        half = await client.half(
            [
                Output(b"p", producer=plain), Output(b"q", producer=plain),
                *(Output(b"%d" % n, partition_key=f"k{n}", producer=parts) for n in range(6)),
                Output(Order(number=7), producer=typed),
            ],
            group="g",
        )  # fmt: skip
        await half.commit()
        assert await shown(client, "plain", count=2) == [b"p", b"q"], "in their order"
        reader = await client.subscribe("parts", "s", initial_position=InitialPosition.Earliest)
        assert {(await reader.receive()).data() for _ in range(6)} == {b"%d" % n for n in range(6)}
        consumer = await client.subscribe(
            "typed", "s", schema=magnetar.schema.JsonSchema(Order), initial_position=InitialPosition.Earliest
        )
        message = await consumer.receive()
        assert message.value().number == 7
        assert message.schema_version(), "with the version of its schema"


class Order(magnetar.schema.Record):
    number = magnetar.schema.Integer()


async def test_what_its_topic_does_not_take_is_no_half(tmp_path: Path) -> None:
    """Prepared, it would be decided and then not be published, when the program can do nothing about it any more."""
    async with running(tmp_path, replace(PATIENT, max_message_bytes=20_000)) as (_, client):
        producer = await client.create_producer("orders")
        with pytest.raises(magnetar.MessageTooBig, match="20000"):
            await producer.prepare(b"x" * 20_001, group="g")
        with pytest.raises(magnetar.MessageTooBig):
            await client.half([Output(b"x" * 20_001, producer=producer)], group="g")
        half = await producer.prepare(b"x" * 19_000, group="g")
        await half.commit()
        assert await shown(client, "orders", count=1) == [b"x" * 19_000]


async def test_what_a_half_cannot_be_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    async with running(tmp_path, PATIENT) as (_, client):
        producer = await client.create_producer("orders")
        for options in (
            {"group": ""}, {"group": "g" * 513}, {"group": 7}, {"group": "g", "check_key": "k" * 513},
            {"group": "g", "check_after": -1}, {"group": "g", "check_after": "soon"},
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError)) as failed:
                await producer.prepare(b"x", **options)
            assert isinstance(failed.value, magnetar.PulsarException)
        with pytest.raises(magnetar.MessageTooBig):
            await producer.prepare(b"x" * (256 << 10), group="g")
        with pytest.raises(magnetar.InvalidMessage):
            await producer.prepare(object(), group="g")
        for outputs in ([], [Output(b"x", producer=producer)] * 101):
            with pytest.raises(ValueError, match="1 to 100 messages"):
                await client.half(outputs, group="g")
        for wrong in (b"x", Output(b"x")):
            with pytest.raises(TypeError):
                await client.half([wrong], group="g")  # type: ignore[list-item]
        await producer.close()
        with pytest.raises(magnetar.AlreadyClosed):
            await producer.prepare(b"x", group="g")


async def test_a_prepare_that_is_cancelled_is_rolled_back(tmp_path: Path) -> None:
    async with running(tmp_path, PATIENT) as (found, client):
        producer = await client.create_producer("orders")
        await (await producer.prepare(b"warm", group="g")).rollback()
        preparing = asyncio.ensure_future(producer.prepare(b"half", group="g"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
        coordinators = found.brokers[0].topic_manager.transactions
        await until(
            lambda: sum(each.half_message_counts()["rolled_back"] for each in coordinators.loaded_coordinators) == 2
        )
        assert not any(each.half_message_counts()["open"] for each in coordinators.loaded_coordinators)


async def test_a_commit_that_is_cancelled_goes_on_and_its_outcome_is_there_when_the_caller_is_told(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, PATIENT) as (_, client):
        producer = await client.create_producer("orders")
        half = await producer.prepare(b"half", group="g")
        committing = asyncio.ensure_future(half.commit())
        await asyncio.sleep(0)
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        assert half.state in (TransactionState.COMMITTED, TransactionState.PREPARED)
        await half.commit()
        assert await shown(client, "orders", count=1) == [b"half"]


async def test_any_program_ends_a_half_by_its_id(tmp_path: Path) -> None:
    async with running(tmp_path, PATIENT) as (found, client):
        producer = await client.create_producer("orders")
        yes, no = [await producer.prepare(data, group="g") for data in (b"yes", b"no")]
        async with Client(f"magnetar://{found.brokers[0].endpoint}") as other:
            await other.commit_half(str(yes.id))
            await other.rollback_half(no.id)
            with pytest.raises(magnetar.TransactionNotFound):
                await other.commit_half(yes.id._replace(least=yes.id.least + 5))
        assert await shown(client, "orders", count=1) == [b"yes"]


# ---------------------------------------------------------------------------------- checks
async def test_a_silent_half_is_decided_by_a_client_of_its_group(tmp_path: Path) -> None:
    async with running(tmp_path) as (found, client):
        producer = await client.create_producer("orders")
        yes = await producer.prepare(b"yes", {"a": "b"}, "key", group="g", check_key="yes")
        no = await producer.prepare(b"no", group="g", check_key="no")
        asked: list[HalfCheck] = []
        async with Client(f"magnetar://{found.brokers[0].endpoint}") as other:

            @other.on_check(group="g")
            async def check(half: HalfCheck) -> Decision:
                asked.append(half)
                return Decision.COMMIT if half.check_key == "yes" else Decision.ROLLBACK

            await until_is(client, yes, TransactionState.COMMITTED)
            await until_is(client, no, TransactionState.ABORTED)
        about = next(each for each in asked if each.check_key == "yes")
        content = about.messages[0]
        assert (about.id, about.group, about.unknown) == (yes.id, "g", 0)
        assert (content.data, content.properties, content.partition_key) == (b"yes", {"a": "b"}, "key")
        assert content.topic == "persistent://public/default/orders"
        with pytest.raises(magnetar.TransactionAborted):
            await no.commit()
        assert await shown(client, "orders", count=1) == [b"yes"]


async def test_a_function_that_blocks_runs_in_a_thread_and_what_is_no_answer_is_told_and_not_counted(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (found, client):
        producer = await client.create_producer("orders")
        half = await producer.prepare(b"half", group="g")
        turns: list[str] = []
        free = threading.Event()
        reasons: list[str] = []

        @client.on_check("g")
        def check(half: HalfCheck) -> Decision:
            assert threading.current_thread() is not threading.main_thread()
            turns.append(half.check_key)
            match len(turns):
                case 1:
                    raise LookupError("the database is away")
                case 2:
                    return "COMMIT"  # type: ignore[return-value]
                case 3:
                    return None  # type: ignore[return-value]
                case 4:
                    raise SystemExit(1)
                case 5:
                    free.wait(20)
            assert half.unknown == 0, "nothing was counted"
            return Decision.COMMIT

        async with AdminClient(f"magnetar://{found.brokers[0].endpoint}") as admin:

            async def committed() -> bool:
                reasons.extend(each.reason for each in await rows(admin) if each.reason not in ("", *reasons))
                return await client.transaction_status(half.id) is TransactionState.COMMITTED

            await until(committed)
        free.set()
        assert len(turns) == 6
        said = " | ".join(reasons)
        for text in ("LookupError: the database is away", "'COMMIT', which is no Decision", "within 1 s"):
            assert text in said
        assert await shown(client, "orders", count=1) == [b"half"]


async def test_checks_that_hang_take_their_places_and_no_more(tmp_path: Path) -> None:
    async with running(tmp_path, replace(FAST, transaction_half_answer_s=0.2)) as (found, client):
        producer = await client.create_producer("orders")
        free, began = threading.Event(), threading.Semaphore(0)

        @client.on_check("g")
        def check(half: HalfCheck) -> Decision:
            began.release()
            free.wait(20)
            return Decision.UNKNOWN

        for _ in range(CHECKS_AT_ONCE + 4):
            await producer.prepare(b"half", group="g")
        async with AdminClient(f"magnetar://{found.brokers[0].endpoint}") as admin:

            async def are_full() -> bool:
                return any("are under way, or hang" in each.reason for each in await rows(admin))

            await until(are_full)
        assert sum(began.acquire(blocking=False) for _ in range(100)) == CHECKS_AT_ONCE
        assert len([each for each in threading.enumerate() if each.name.startswith("check of")]) == CHECKS_AT_ONCE
        free.set()


async def test_a_group_has_one_function_in_a_client_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, client):
        for group in ("", 7, "g" * 513):
            with pytest.raises((ValueError, TypeError)):
                client.on_check(group)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            client.on_check("g")("no function")  # type: ignore[type-var]
        client.on_check("g")(lambda half: Decision.UNKNOWN)
        with pytest.raises(ValueError, match="one function"):
            client.on_check("g")(lambda half: Decision.UNKNOWN)


# ---------------------------------------------------------------------------------- parked
async def test_a_half_whose_topic_is_terminated_is_parked_and_its_program_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, PATIENT) as (found, client):
        producer, other = await client.create_producer("orders"), await client.create_producer("other")
        half = await client.half([Output(b"x", producer=producer), Output(b"y", producer=other)], group="g")
        async with AdminClient(f"magnetar://{found.brokers[0].endpoint}") as admin:
            await admin.terminate_topic("orders")
            with pytest.raises(magnetar.TopicTerminated):
                await half.commit()
            row = await until_parked(admin)
            assert "terminated" in row.reason
            with pytest.raises(magnetar.HalfParked):
                await half.commit()
        await shown(client, "other", count=0)


# ---------------------------------------------------------------------------------- brokers that go
async def test_a_half_survives_its_coordinators_broker_in_order_and_not(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as found:
        first = await found.add_broker(PATIENT)
        second = await found.add_broker(PATIENT)
        url = f"magnetar://{first.endpoint},{second.endpoint}"
        async with Client(url, operation_timeout_seconds=30) as client:
            producer = await client.create_producer("orders")
            halves = [await producer.prepare(b"%d" % n, group=f"g{n}") for n in range(6)]
            await first.close()
            for half in halves[:2]:
                await half.commit()
            third = await found.add_broker(PATIENT)
            assert third.endpoint != first.endpoint
            await halves[2].commit()
            await halves[3].rollback()
            await halves[4].commit()
            await halves[0].commit()
            assert sorted(await shown(client, "orders", count=4)) == [b"0", b"1", b"2", b"4"]
