"""Objects of a client whose event loop has ended say so, whatever they are asked."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.connect.connections import TopicSchemaCache
from magnetar.proto.names import TopicName

CALLS: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
    "send": lambda of: of["producer"].send(b"x"),
    "send_many": lambda of: of["producer"].send_many([b"x"]),
    "flush": lambda of: of["producer"].flush(),
    "receive": lambda of: of["consumer"].receive(1000),
    "acknowledge": lambda of: of["consumer"].acknowledge(of["message"]),
    "acknowledge an id": lambda of: of["consumer"].acknowledge(of["message"].message_id()),
    "acknowledge_cumulative": lambda of: of["consumer"].acknowledge_cumulative(of["message"]),
    "seek": lambda of: of["consumer"].seek(magnetar.MessageId.earliest),
    "get_last_message_id": lambda of: of["consumer"].get_last_message_id(),
    "read_next": lambda of: of["reader"].read_next(1000),
    "has_message_available": lambda of: of["reader"].has_message_available(),
    "create_producer": lambda of: of["client"].create_producer("other"),
    "transaction": lambda of: of["client"].transaction().__aenter__(),
}


def test_what_is_asked_after_the_loop_has_ended_is_answered_with_the_reason(url: str) -> None:
    of: dict[str, Any] = {}

    async def first() -> None:
        client = of["client"] = Client(url)
        of["producer"] = await client.create_producer("after-the-loop")
        of["consumer"] = await client.subscribe("after-the-loop", "s")
        of["reader"] = await client.create_reader("after-the-loop", magnetar.MessageId.latest)
        await of["producer"].send(b"1")
        of["message"] = await of["consumer"].receive(10_000)

    asyncio.run(first())

    async def second(call: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        async with asyncio.timeout(30):
            await call(of)

    for name, call in CALLS.items():
        with pytest.raises(magnetar.PulsarException) as raised:
            asyncio.run(second(call))
        assert isinstance(raised.value, magnetar.AlreadyClosed), f"{name}: {raised.value!r}"
    asyncio.run(of["client"].close())


@pytest.mark.parametrize("closed", [False, True])
def test_a_schema_that_is_asked_for_after_the_loop_has_ended_is_refused(url: str, *, closed: bool) -> None:
    loop = asyncio.new_event_loop()

    async def opened() -> tuple[Client, TopicSchemaCache]:
        client = Client(url)
        return client, TopicSchemaCache(client.connections, TopicName.parse("after-the-loop"))

    client, schemas = loop.run_until_complete(opened())
    if closed:
        loop.run_until_complete(client.close())
        loop.close()
    with pytest.raises(magnetar.AlreadyClosed):
        schemas.get_schema(b"\0" * 8)
    if not closed:
        loop.run_until_complete(client.close())
        loop.close()


def test_a_schema_that_is_awaited_when_the_loop_ends_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()

    async def opened() -> tuple[Client, TopicSchemaCache]:
        client = Client(url)
        return client, TopicSchemaCache(client.connections, TopicName.parse("after-the-loop"))

    client, schemas = loop.run_until_complete(opened())

    async def fetch(_: bytes) -> None:
        loop.stop()
        await loop.create_future()

    monkeypatch.setattr(schemas, "fetch_schema", fetch)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with pytest.raises(magnetar.AlreadyClosed):
        schemas.get_schema(b"\0" * 8)
    thread.join(20)
    loop.run_until_complete(client.close())
    loop.close()
