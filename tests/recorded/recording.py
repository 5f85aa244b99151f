"""What the faces of administration answer and need, in files, byte for byte: `rest.txt`, `cli.txt`, `help.txt`, …

    python -m pytest tests/recorded                       compares what is answered with the files
    MAGNETAR_RECORD=1 python -m pytest tests/recorded     writes the files, for a change that is meant

The scene is the same each time: one broker with a name, clocks that stand still, seeded chance, requests in one order.
What differs all the same is masked (`MASKS`): ports, ids of bookies and ledgers, rates, ages, the size of the disk.
"""

import difflib
import json
import os
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from magnetar.broker.server import Broker
from magnetar.client.client import Client
from magnetar.client.connect.connections import make_client_world
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.runtime import config, logs
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.network import World
from tests.broker.rest.http import Http, serving
from tests.support import cluster as support

HERE = Path(__file__).resolve().parent
WALL_MS = 1_760_000_000_000
MASKS: tuple[tuple[str, str], ...] = (
    (r"127\.0\.0\.1:\d+", "HOST:PORT"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r'("[mM]sg(?:Rate|Throughput)\w*": ?)-?[0-9.e-]+', r"\1RATE"),
    (r'("messageAckRate": ?)-?[0-9.e-]+', r"\1RATE"),
    (r'("(?:ageMs|openTimestamp|oldestMs|remainingMs|recoverStartTime|recoverEndTime|age_s|remaining_s)": ?)-?[0-9.]+',
     r"\1AGE"),
    (r'("(?:rateIn|rateOut|throughputIn|throughputOut)": ?)-?[0-9.e-]+', r"\1RATE"),
    (r'("(?:freeBytes|totalBytes)": ?)\d+', r"\1DISK"),
    (r'("(?:ledgerId|producerId|leastSigBits|lowWaterMark)": ?)\d+', r"\1NUMBER"),
    (r"\b\d{1,3}:(\d+)\b", r"LEDGER:\1"),
    (r"has \d+ producers", "has SOME producers"),  # which connect again after the topic was unloaded
)  # fmt: skip


class StillClock(SystemClock):
    """The time of day stands still; what is waited for passes as ever."""

    def wall_ms(self) -> int:
        return WALL_MS


class Recording:
    """The entries of one file, in their order."""

    def __init__(self, name: str, folder: Path) -> None:
        self._file = HERE / name
        self._folder = str(folder)
        self._entries: list[str] = []

    def add(self, title: str, text: str) -> None:
        self._entries.append(f"### {title}\n{self.masked(text)}\n")

    def masked(self, text: str) -> str:
        text = text.replace(self._folder, "FOLDER")
        for pattern, mask in MASKS:
            text = re.sub(pattern, mask, text)
        return text

    def check(self) -> None:
        """Fails with the first differences from the file, or writes it where that is asked for."""
        found = "\n".join(self._entries)
        if os.environ.get("MAGNETAR_RECORD"):
            self._file.write_bytes(found.encode())
            return
        before = self._file.read_bytes().decode()
        if found != before:
            both = before.splitlines(), found.splitlines()
            lines = difflib.unified_diff(*both, "recorded", "answered", n=2, lineterm="")
            (Path(self._folder) / self._file.name).write_bytes(found.encode())
            pytest.fail(f"{self._file.name} is not what is answered now:\n" + "\n".join([*lines][:120]))


@dataclass
class Scene:
    """A broker with two topics that have messages, a subscription, a consumer, a transaction and a half message.

    `names` are what calls name by words in braces: the ids of the transaction and of the half message.
    """

    http: Http
    broker: Broker
    client: Client
    names: dict[str, str]


def still(world: World) -> World:
    return replace(world, clock=StillClock(), rng=random.Random(7))


@asynccontextmanager
async def scene(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    real: Callable[..., World] = support.make_system_world
    monkeypatch.setattr(support, "make_system_world", lambda seed: still(real(seed)))
    monkeypatch.setattr(config, "_SOURCES", {})  # of what other tests of this process loaded
    monkeypatch.setattr(logs, "get_log_level", lambda: "info")
    async with (
        serving(folder, cluster="standalone", name="broker-1") as (http, broker, _),
        Client(f"magnetar://{broker.endpoint}", world=still(make_client_world())) as client,
    ):
        yield Scene(http, broker, client, await _filled(client))


async def _filled(client: Client) -> dict[str, str]:
    orders = await client.create_producer("orders", producer_name="till", properties={"shop": "1"})
    bills = await client.create_producer("bills", producer_name="desk")
    consumer = await client.subscribe(
        "orders", "billing", ConsumerType.Shared, consumer_name="clerk", initial_position=InitialPosition.Earliest,
        properties={"room": "2"},
    )  # fmt: skip
    await client.subscribe("bills", "audit", consumer_name="auditor", initial_position=InitialPosition.Earliest)
    for number in range(5):
        sent = await orders.send(b"order %d" % number, properties={"n": str(number)}, partition_key="k")
    await bills.send(b"bill")
    for _ in range(2):
        await consumer.acknowledge(await consumer.receive())
    txn = await client.transaction(timeout=900)
    await bills.send(b"hidden", txn=txn)
    await consumer.acknowledge(await consumer.receive(), txn=txn)
    half = await orders.prepare(b"maybe", group="shop", check_key="17")
    other = await orders.prepare(b"or not", group="shop", check_key="18")
    return {
        "txn": f"{txn.id.most}/{txn.id.least}", "half": f"{half.id.most}/{half.id.least}",
        "other": f"{other.id.most}/{other.id.least}", "coordinator": str(txn.id.most),
        "ledger": str(sent.position().ledger_id),
    }  # fmt: skip


def sorted_json(text: bytes) -> str:
    """Of a document whose order means nothing; of that of OpenAPI a line for each route."""
    found = json.loads(text)
    routes = [(method, path, row) for path, of in found.pop("paths", {}).items() for method, row in of.items()]
    lines = [f"{method} {path}: {_line(row)}" for method, path, row in routes]
    return "\n".join([_line(found), *sorted(lines)])


def _line(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def calls(text: str) -> list[tuple[str, ...]]:
    """(method, path, body) of each line: `METHOD PATH BODY`; a line that begins with # is none."""
    lines = (line.strip() for line in text.splitlines())
    return [tuple(line.split(" ", 2)) for line in lines if line and not line.startswith("#")]
