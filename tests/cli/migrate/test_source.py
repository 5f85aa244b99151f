"""The source as it is read by Pulsar's protocol: a broker in the simulator, and servers that answer wrongly."""

import asyncio
from typing import Any

import pytest

from magnetar.cli.migrate.source import (
    MigrationSource,
    PartitionReader,
    SourceBacklog,
    SourceEntry,
    find_matching_topics,
)
from magnetar.client.connect.connections import make_client_world
from magnetar.proto.entry import parse_header
from magnetar.proto.errors import MagnetarError, TopicNotFound, Unavailable, WrongProtocol
from magnetar.proto.names import Position, TopicName
from magnetar.runtime.access import NO_CREDENTIALS
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Raw, T, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

TOPIC = TopicName.parse(T)


def source_at(world: World, endpoint: Endpoint, timeout_s: float = 5.0) -> MigrationSource:
    return MigrationSource(f"pulsar://{endpoint}", NO_CREDENTIALS, timeout_s, world)


async def filled(world: World, endpoint: Endpoint, count: int) -> Raw:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    for number in range(count):
        raw.publish(number, b"%d" % number)
    for _ in range(count):
        await raw.next("send_receipt")
    return raw


async def entries(reader: PartitionReader, count: int) -> list[SourceEntry]:
    found: list[SourceEntry] = []
    while len(found) < count:
        event = await reader.next_event(5.0)
        if isinstance(event, SourceEntry):
            found.append(event)
    return found


async def test_a_reader_gives_the_entries_after_a_position_and_the_newest_one(
    world: World, endpoint: Endpoint, /
) -> None:
    await filled(world, endpoint, 5)
    source = source_at(world, endpoint)
    reader = await source.open_reader(TOPIC, None)
    last = await reader.newest_position()
    assert await reader.next_event(1.0) is None, "nothing comes before it is asked for"
    reader.grant_permits()
    found = await entries(reader, 5)
    assert [parse_header(each.data).sequence_id for each in found] == list(range(5))
    assert found[-1].position == last
    await reader.close()
    again = await source.open_reader(TOPIC, found[2].position)
    again.grant_permits()
    assert await entries(again, 2) == found[3:]
    again.acknowledge(last)
    again.request_backlog()
    assert await again.next_event(5.0) == SourceBacklog(0)


async def test_an_empty_topic_has_no_newest_entry(world: World, endpoint: Endpoint, /) -> None:
    await filled(world, endpoint, 0)
    reader = await source_at(world, endpoint).open_reader(TOPIC, None)
    assert (await reader.newest_position()).entry_id < 0


async def test_nothing_is_made_at_the_source(world: World, endpoint: Endpoint, /) -> None:
    source = source_at(world, endpoint)
    for asked in ("ghost", "public/default/gh*", "none/at-all/x"):
        with pytest.raises(TopicNotFound):
            await find_matching_topics(source, [asked])
    with pytest.raises(MagnetarError):
        await source.open_reader(TopicName.parse("ghost"), Position(1, 1))
    assert await source.list_topics("public/default") == []


# ------------------------------------------------------------------ servers that are none
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x08\x00\x00\x00\x04abcd", b""])
async def test_what_does_not_speak_pulsars_protocol_is_told(answer: bytes) -> None:
    async def serve(reader: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    source = source_at(make_client_world(), Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]))
    with pytest.raises(WrongProtocol):
        await source.list_topics("public/default")
    server.close()


async def test_a_server_that_does_not_answer_ends_the_wait() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    source = source_at(make_client_world(), Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]), 0.1)
    with pytest.raises(Unavailable, match="does not answer within"):
        await source.list_topics("public/default")
    server.close()

