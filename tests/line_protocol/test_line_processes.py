"""The line protocol over TCP between real processes: what a killed broker acknowledged is kept."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from magnetar.cli.common.processes import Process, Processes
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import real_world
from tests import layout
from tests.line_protocol.client import TIMEOUT_S, Lines

pytestmark = pytest.mark.processes
TOPIC = "persistent://public/default/lines"
MESSAGES = 10
ACKED = (0, 1, 4, 7)
"""A prefix and two holes."""


class LineBroker(Process):
    module = "tests.line_protocol"


def start(processes: Processes) -> LineBroker:
    """Starts metadata, a bookie and the broker, on loopback."""
    listen = ("--listen", "127.0.0.1:0")
    folder = processes.directory
    metadata = processes.start("metadata", "metadata", *listen, "--data", str(folder / "metadata"))
    where = ("--metadata", metadata.address)
    processes.start("bookie", "bookie", *listen, *where, "--data", str(folder / "bookie")).wait_ready()
    path = os.pathsep.join(filter(None, [str(layout.ROOT), os.environ.get("PYTHONPATH")]))
    broker = LineBroker("broker", [*listen, *where], folder, {"PYTHONPATH": path})
    processes.started.append(broker)
    broker.wait_ready()
    return broker


@asynccontextmanager
async def connection(broker: LineBroker) -> AsyncIterator[Lines]:
    lines = Lines(await real_world(1).network.connect_bytes(Endpoint.parse(broker.address)))
    try:
        yield lines
    finally:
        await lines.stream.close()


async def opened(lines: Lines, *words: object) -> None:
    """Asks until the topic opens: the session of a killed broker ends after its time-out."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            lines.send(*words)
            if (await lines.next("opened", "closed"))[0] == "opened":
                return
            await asyncio.sleep(0.1)  # the broker tells nothing when the topic can be opened


async def produce_and_acknowledge(broker: LineBroker) -> None:
    async with connection(broker) as lines:
        await opened(lines, "produce", "p", TOPIC, "one")
        for number in range(MESSAGES):
            lines.send("publish", "p", number, f"text-{number}")
        receipts = [await lines.next("receipt", "failed") for _ in range(MESSAGES)]
        assert [words[0] for words in receipts] == ["receipt"] * MESSAGES
        await opened(lines, "consume", "c", TOPIC, "s", "shared")
        lines.send("flow", "c", 100)
        found = await lines.messages(MESSAGES)
        assert [text for _, text in found] == [f"text-{number}" for number in range(MESSAGES)]
        for number in ACKED:
            lines.send("ack", "c", found[number][0])
        await lines.done("durable", "c")


async def consume_what_is_left_and_seek(broker: LineBroker) -> None:
    async with connection(broker) as lines:
        await opened(lines, "consume", "c", TOPIC, "s", "shared")
        lines.send("flow", "c", 100)
        left = [f"text-{number}" for number in range(MESSAGES) if number not in ACKED]
        assert [text for _, text in await lines.messages(len(left))] == left
        await opened(lines, "produce", "p", TOPIC, "one")
        lines.send("publish", "p", MESSAGES, "after-the-kill")
        assert (await lines.next("receipt", "failed"))[0] == "receipt"
        assert (await lines.messages(1))[0][1] == "after-the-kill", "no acknowledged message comes before it"
        await lines.done("seek", "c", 1)
        lines.send("flow", "c", 100)
        again = [*(f"text-{number}" for number in range(1, MESSAGES)), "after-the-kill"]
        assert [text for _, text in await lines.messages(len(again))] == again


async def test_a_killed_broker_keeps_what_was_acknowledged_over_lines(started: Processes) -> None:
    broker = start(started)
    await produce_and_acknowledge(broker)
    broker.kill()
    with pytest.raises((MagnetarError, OSError)):
        async with connection(broker):
            pass
    broker.start()
    broker.wait_ready()
    await consume_what_is_left_and_seek(broker)
