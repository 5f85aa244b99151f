"""kill -9 of a step's process at random places: the totals are those of the model, and each output is there once."""

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

import magnetar
from magnetar.asyncio import Client
from magnetar.client.admin import AdminClient
from magnetar.streams import OWNER_KEY
from tests.support.cluster import cluster

pytestmark = pytest.mark.processes
MESSAGES, KEYS, KILLS = 600, 7, 6
PROGRAM = """
import sys
from magnetar import streams

app = streams.App("counting")

@app.step("orders", "bills", state="totals", timeout=1, messages_max=20)
def count(message, context):
    print("called", flush=True)
    key = message.partition_key()
    context.state[key] = total = context.state.get(key, 0) + int(message.data())
    return b"%d" % total

app.start(sys.argv[1], idle_timeout_ms=3000)
"""


async def run_killed(url: str, calls: int) -> bool:
    """Runs the step's process, and kills it after so many calls of the function. Returns False if it ended before."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        for _ in range(calls):
            if not await process.stdout.readline():
                assert await process.wait() == 0
                return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    return True


@pytest.mark.parametrize("seed", [1, 2])
async def test_whenever_a_step_is_killed_each_message_counts_once(tmp_path: Path, seed: int) -> None:
    rng, model = random.Random(seed), Counter[str]()
    async with cluster(tmp_path) as running:
        url = f"magnetar://{running.brokers[0].endpoint}"
        async with Client(url) as client, AdminClient(url) as admin:
            await admin.create_topic("orders", partitions=2)
            producer = await client.create_producer("orders")
            for number in range(MESSAGES):
                key = f"k{rng.randrange(KEYS)}"
                await producer.send(b"%d" % number, partition_key=key)
                model[key] += number
            kills = 0
            while await run_killed(url, rng.randrange(1, 150) if kills < KILLS else 1 << 30):
                kills += 1
                if rng.random() < 0.3:
                    for part in await admin.parts("totals"):
                        await admin.compact(part)
            assert kills > 2, "it was hardly killed"
            async with await client.create_table_view("totals") as view:
                assert {key: int(value) for key, value in view.items() if key != OWNER_KEY} == model
            reader = await client.create_reader("bills", magnetar.MessageId.earliest)
            bills = [await reader.read_next(10_000) for _ in range(MESSAGES)]
            assert not await reader.has_message_available(), "an output is there twice"
            last = {message.partition_key(): int(message.data()) for message in bills}
            assert last == model
