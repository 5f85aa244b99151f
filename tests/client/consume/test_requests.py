"""Requests and replies through a real broker: what a requester learns, and what a server does not do."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import magnetar
from magnetar.asyncio import Client
from magnetar.client.admin import AdminClient
from magnetar.client.blocking.client import Client as BlockingClient
from magnetar.client.common.errors import (
    AlreadyClosed,
    AuthorizationError,
    ConnectError,
    InvalidConfiguration,
    InvalidMessage,
    InvalidTopicName,
    Timeout,
)
from magnetar.client.consume import requests as module
from magnetar.client.consume.requests import REPLY_TO_PROPERTY, ReceivedRequest, RequestFailed
from magnetar.client.model.message import Message
from magnetar.proto.names import TopicName
from tests.broker.access.roles import roles
from tests.support.cluster import Cluster, cluster

TOPIC = "persistent://public/default/prices"


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, limit_s=60) as running:
        yield running


@pytest.fixture
async def client(running: Cluster) -> AsyncIterator[Client]:
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the cluster has a limit
        await asyncio.sleep(0.01)


async def quote(message: Message) -> bytes:
    await asyncio.sleep(0)
    return b"price of " + message.data()


async def test_a_request_gets_the_reply_of_its_own_handler_whoever_else_asks(client: Client) -> None:
    async with await client.serve(TOPIC, quote) as one, await client.serve(TOPIC, quote) as two:
        replies = await asyncio.gather(*(client.request("prices", b"%d" % n, 20) for n in range(60)))
        assert [each.data() for each in replies] == [b"price of %d" % n for n in range(60)]
        await until(lambda: one.statistics().answered + two.statistics().answered == 60)
        assert min(one.statistics().answered, two.statistics().answered) > 0, "servers share them"
        assert client.late_replies == 0
        consumers = {each.topic() for each in client._open if isinstance(each, magnetar.asyncio.Consumer)}
        assert len([each for each in consumers if each.startswith("non-persistent")]) == 1, "one topic for all replies"
    assert one.is_over


async def test_what_a_handler_raises_is_raised_by_the_request_and_its_request_is_done(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(message: Message) -> object:
        if message.data() == b"raise":
            raise KeyError("ACME")
        return {b"text": "no bytes", b"huge": bytes(6 << 20), b"nothing": None}[message.data()]

    async with await client.serve(TOPIC, handler) as server:
        with pytest.raises(RequestFailed, match="KeyError: 'ACME'") as raised:
            await client.request(TOPIC, b"raise", 20)
        assert (raised.value.error_class, raised.value.error_message) == ("KeyError", "'ACME'")
        with pytest.raises(RequestFailed, match="returns bytes or None, not 'no bytes'"):
            await client.request(TOPIC, b"text", 20)
        with pytest.raises(RequestFailed, match="MessageTooBig"):
            await client.request(TOPIC, b"huge", 20)
        assert (await client.request(TOPIC, b"nothing", 20)).data() == b""
        await until(lambda: server.statistics().handled == 4)
        assert (server.statistics().raised, server.statistics().failed) == (3, 0)
    assert "the handler of" in caplog.text


async def test_without_a_server_it_times_out_and_what_came_too_late_is_not_handled(client: Client) -> None:
    with pytest.raises(Timeout, match="no reply of"):
        await client.request(TOPIC, b"early", 0.2)
    seen = list[bytes]()

    async def handler(message: Message) -> None:
        seen.append(message.data())

    consumer = await client.subscribe(TOPIC, "look", initial_position=magnetar.InitialPosition.Earliest)
    producer = await client.create_producer(TOPIC)
    async with await client.serve(TOPIC, handler) as server:
        reply_to = "non-persistent://public/default/reply-x"
        await producer.send(b"over", {"reply_to": reply_to, "correlation_id": "1", "deadline": "5"})
        await client.request(TOPIC, b"last", 20)
        await until(lambda: server.statistics().expired == 1)
    assert seen == [b"last"], "of the first one the broker says nothing"
    assert [(await consumer.receive(10_000)).data() for _ in range(2)] == [b"over", b"last"]


async def test_a_late_reply_and_that_of_a_cancelled_request_are_dropped_and_counted(client: Client) -> None:
    go, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def handler(message: Message) -> bytes:
        begun.release()
        await go.wait()
        return message.data()

    async with await client.serve(TOPIC, handler) as server:
        cancelled = asyncio.create_task(client.request(TOPIC, b"cancelled", 20))
        late = asyncio.create_task(client.request(TOPIC, b"late", 0.5))
        for _ in range(2):
            await begun.acquire()
        cancelled.cancel()
        outcomes = await asyncio.gather(cancelled, late, return_exceptions=True)
        assert [type(each) for each in outcomes] == [asyncio.CancelledError, Timeout]
        go.set()
        assert (await client.request(TOPIC, b"next", 20)).data() == b"next"
        await until(lambda: client.late_replies == 2)
        assert server.statistics().answered == 3


async def test_when_the_client_is_closed_its_requests_end_with_that(running: Cluster, client: Client) -> None:
    async with Client(f"magnetar://{running.brokers[0].endpoint}") as other:
        asked = [asyncio.create_task(other.request(TOPIC, b"%d" % n, 30)) for n in range(3)]
        await until(lambda: any(name.startswith("non-persistent") for name in running.brokers[0].topics))
        await until(lambda: other._requester is not None and any(
            len(each._waiting) == 3 for each in other._requester._replies.values()
        ))  # fmt: skip
        await other.close()
        assert {type(each) for each in await asyncio.gather(*asked, return_exceptions=True)} == {AlreadyClosed}
        with pytest.raises(AlreadyClosed):
            await other.request(TOPIC, b"", 1)


async def test_requests_go_on_after_their_topics_have_moved(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=2, limit_s=60) as running:
        url = f"magnetar://{running.brokers[0].endpoint}"
        async with Client(url) as client, AdminClient(url) as admin, await client.serve(TOPIC, quote):
            first = await client.request(TOPIC, b"1", 20)
            for topic in (TOPIC, first.topic_name()):
                await admin.unload_topic(topic)
            for number in range(5):
                for left in (2, 1, 0):  # a reply that comes before its topic is opened again is lost
                    try:
                        reply = await client.request(TOPIC, b"%d" % number, 4)
                        break
                    except Timeout:
                        assert left
                assert (reply.data(), reply.topic_name()) == (b"price of %d" % number, first.topic_name())


async def test_a_server_whose_role_may_not_reply_does_no_work_says_why_and_another_one_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = "persistent://acme/orders/prices"
    async with roles(tmp_path) as acme:
        await acme.grant("web", "produce", "consume", namespace="acme/orders")
        await acme.grant("mute", "consume", namespace="acme/orders")
        url = f"magnetar://{acme.broker.endpoint}"
        web = Client(url, world=acme.world("web"))
        mute = Client(url, world=acme.world("mute"))
        seen = list[bytes]()
        async with web, mute:
            async with await mute.serve(topic, lambda message: seen.append(message.data()), threads=1) as server:
                asked = asyncio.create_task(web.request(topic, b"x", 30))
                await until(lambda: server.statistics().failed == 1)
                async with await web.serve(topic, quote):
                    await server.stop()
                    assert (await asked).data() == b"price of x"
            with pytest.raises(AuthorizationError):
                await mute.request(topic, b"x", 30)
    assert seen == []
    assert "grant its role the right to produce in the namespace acme/orders" in caplog.text


async def test_a_server_answers_only_topics_of_its_namespace_that_are_for_replies(client: Client) -> None:
    topic = TopicName.parse(TOPIC)
    good = {"reply_to": "non-persistent://public/default/reply-1", "correlation_id": "a", "deadline": "7"}
    found = ReceivedRequest.parse(good, topic)
    assert found == (TopicName.parse(good[REPLY_TO_PROPERTY]), "a", 7)
    wrong = (
        {"reply_to": "non-persistent://public/other/reply-1"}, {"reply_to": "persistent://public/default/reply-1"},
        {"reply_to": "non-persistent://public/default/orders"}, {"reply_to": "a/b/c/d/e"}, {"correlation_id": ""},
        {"deadline": "soon"}, {"deadline": "9" * 30}, {"reply_to": ""},
    )  # fmt: skip
    assert [ReceivedRequest.parse({**good, **each}, topic) for each in wrong] == [None] * len(wrong)
    async with await client.serve(TOPIC, quote) as server:
        producer = await client.create_producer(TOPIC)
        await producer.send(b"no request")
        assert (await client.request(TOPIC, b"1", 20)).data() == b"price of 1"
        await until(lambda: server.statistics().handled == 2)
        assert (server.statistics().malformed, server.statistics().answered) == (1, 1)


async def test_a_reply_topic_that_is_not_reached_costs_no_work_and_holds_up_no_other_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLY_TOPIC_WAIT_S", 0.1)
    monkeypatch.setattr(module, "REPLY_RETRY_S", 0.02)
    tries = 0

    async def open_(topic: TopicName) -> object:
        nonlocal tries
        if topic.local == "reply-away":
            tries += 1
            raise ConnectError("away")
        return await client._open_answers(topic)

    seen = list[bytes]()

    async def handler(message: Message) -> None:
        seen.append(message.data())

    async with await client.serve(TOPIC, handler) as server:
        server._open_producer = open_
        producer = await client.create_producer(TOPIC)
        away = "non-persistent://public/default/reply-away"
        await producer.send(b"x", {"reply_to": away, "correlation_id": "1", "deadline": str(1 << 60)})
        await client.request(TOPIC, b"y", 20)
        await until(lambda: server.statistics().handled == 2)
        assert (server.statistics().unanswered, server.statistics().answered) == (1, 1)
    assert tries > 1
    assert seen == [b"y"]


async def test_a_request_whose_topic_is_not_reached_holds_up_no_request_of_another_topic(client: Client) -> None:
    async with await client.serve(TOPIC, quote):
        await client.request(TOPIC, b"first", 20)
        requester, begun = client._requester, asyncio.Event()
        assert requester is not None
        open_producer = requester._open_producer

        async def open_when_back(topic: TopicName) -> object:
            if topic.local == "away":
                begun.set()
                await asyncio.Event().wait()
            return await open_producer(topic)

        requester._open_producer = open_when_back
        held = asyncio.create_task(client.request("away", b"", 60))
        await begun.wait()
        assert (await client.request(TOPIC, b"second", 10)).data() == b"price of second"
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_a_reply_to_a_client_that_was_closed_is_dropped_and_its_server_goes_on(
    running: Cluster, client: Client
) -> None:
    go = asyncio.Event()

    async def handler(message: Message) -> None:
        await (go.wait() if message.data() == b"x" else asyncio.sleep(0))

    async with await client.serve(TOPIC, handler) as server:
        other = Client(f"magnetar://{running.brokers[0].endpoint}")
        asked = asyncio.create_task(other.request(TOPIC, b"x", 20))
        await until(lambda: server.statistics().running == 1)
        await other.close()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], AlreadyClosed)
        go.set()
        await client.request(TOPIC, b"y", 20)
        await until(lambda: server.statistics().answered == 2)


async def test_a_server_keeps_the_producers_of_the_latest_requesters_alone(
    running: Cluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLY_TOPICS_MAX", 1)
    async with await client.serve(TOPIC, quote) as server, Client(f"magnetar://{running.brokers[0].endpoint}") as other:
        for each in (client, other, client):
            assert (await each.request(TOPIC, b"1", 20)).data() == b"price of 1"
            assert len(server._producers) == 1


async def test_what_cannot_be_asked_is_refused_before_anything_is_sent(running: Cluster, client: Client) -> None:
    for error, arguments in (
        (InvalidMessage, (TOPIC, "text")), (InvalidConfiguration, (TOPIC, b"", 0)), (InvalidTopicName, ("a/b", b"")),
    ):  # fmt: skip
        with pytest.raises(error):
            await client.request(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfiguration):
        await client.serve(TOPIC, quote, threads=2)
    assert TOPIC not in running.brokers[0].topics


async def test_blocking_programs_ask_and_serve_in_threads(running: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    def handler(message: Message) -> bytes:
        if not message.data():
            raise ValueError("empty")
        return message.data().upper()

    def program() -> None:
        with BlockingClient(f"magnetar://{running.brokers[0].endpoint}") as client:
            with client.serve(TOPIC, handler, threads=2) as server:
                assert client.request(TOPIC, b"abc", 20, properties={"p": "1"}).data() == b"ABC"
                with pytest.raises(RequestFailed, match="ValueError: empty"):
                    client.request(TOPIC, b"", 20)
            assert server.is_over
            with pytest.raises(Timeout):
                client.request(TOPIC, b"abc", 0.1)
            assert client.late_replies == 0
            with pytest.raises(InvalidConfiguration, match="coroutine"):
                client.serve(TOPIC, quote)

    await asyncio.to_thread(program)
