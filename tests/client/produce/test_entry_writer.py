"""A writer of entries that are encoded already: whatever ends it, each call that waits ends with an error."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import AlreadyClosed
from magnetar.client.produce.entry_writer import PreEncodedEntryWriter, SentEntryDescription
from magnetar.proto.errors import ConnectionLost, MagnetarError
from magnetar.proto.names import Position, TopicName
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

TOPIC = TopicName.parse("persistent://public/default/t")
SENT = SentEntryDescription(0, Position(7, 0), 1, 5)


def make_writer(client: Client) -> PreEncodedEntryWriter:
    return PreEncodedEntryWriter(client.connections, TOPIC, "copies", lambda _: None)


async def end_of(call: Awaitable[None]) -> MagnetarError:
    """The error with which the call ends within a minute."""
    with pytest.raises(MagnetarError) as raised:
        async with asyncio.timeout(60):
            await call
    return raised.value


@pytest.mark.parametrize(("end", "expected"), [
    ("close", AlreadyClosed), ("failure", ConnectionLost),
])  # fmt: skip
async def test_an_opening_ends_with_its_writer(
    client: Client, broker: FakeBroker, /, end: str, expected: type[MagnetarError]
) -> None:
    broker.ignores = {"open_producer"}
    writer = make_writer(client)
    opening = asyncio.ensure_future(writer.open())
    await asyncio.sleep(1)
    assert not opening.done()
    if end == "close":
        await writer.close()
    else:
        writer.on_failure(ValueError("on purpose"))
    assert isinstance(await end_of(opening), expected)
    await writer.close()


WAITS: dict[str, Callable[[PreEncodedEntryWriter], Awaitable[None]]] = {
    "drain": lambda writer: writer.drain(),
    "send": lambda writer: writer.send(b"x" * 100, SENT._replace(sequence_id=1)),
}


@pytest.mark.parametrize("wait", WAITS)
async def test_what_waits_for_the_broker_ends_when_the_writer_is_closed(
    client: Client, broker: FakeBroker, /, wait: str
) -> None:
    broker.ignores = {"publish"}
    writer = make_writer(client)
    await writer.open()
    await writer.send(b"entry", SENT)
    writer._credit = 0
    waiting = asyncio.ensure_future(WAITS[wait](writer))
    await asyncio.sleep(1)
    assert not waiting.done()
    await writer.close()
    assert isinstance(await end_of(waiting), AlreadyClosed)
    assert isinstance(await end_of(WAITS[wait](writer)), AlreadyClosed)
