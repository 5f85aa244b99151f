"""A single `magnetar bookie` and its metadata as real processes, and what it acknowledged on record.

`Records` is the model: what was sent, acknowledged, fenced, deleted. `Records.load` keeps adds on their way to many
ledgers and fences and deletes some; `Records.check` compares. Ledgers get records in the metadata, so that garbage
collection takes the deleted ones, and only those. Used by tests/chaos/kills.py and tests/chaos/full_disk.py.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from magnetar.cli.common.processes import Process, Processes
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths, records
from magnetar.metadata.remote import RemoteStore, connect_metadata
from magnetar.metadata.store import ABSENT
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import real_world
from tests.bookie.entries import KEY, PeerCaller, payload_of

ON_THEIR_WAY = 64
LEDGERS = 24
"""That are alive at a time."""


class OneBookie(Processes):
    """Metadata in `directory`, the bookie's data in `data`; `settings` is its TOML file."""

    def __init__(self, directory: Path, data: Path, settings: str) -> None:
        super().__init__(directory)
        file = directory / "magnetar.toml"
        file.write_text(settings)
        listen = ("--listen", "127.0.0.1:0")
        try:
            self.metadata = self.start("metadata", "metadata", *listen, "--data", str(directory / "metadata"))
            where = ("--metadata", self.metadata.address, "--config", str(file), "--data", str(data))
            self.bookie: Process = self.start("bookie", "bookie", *listen, *where)
            self.bookie.wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def uuid(self) -> UUID:
        ready = next(line for line in self.bookie.lines if line.startswith("ready "))
        return UUID(next(word[len("id=") :] for word in ready.split() if word.startswith("id=")))

    @contextlib.asynccontextmanager
    async def caller(self) -> AsyncIterator[PeerCaller]:
        await asyncio.to_thread(self.bookie.wait_ready)
        caller = PeerCaller(real_world().network.peer(Endpoint.parse(self.bookie.address), self.uuid.bytes))
        try:
            yield caller
        finally:
            await caller.peer.close()

    @contextlib.asynccontextmanager
    async def tree(self) -> AsyncIterator[RemoteStore]:
        store = await connect_metadata(real_world(), Endpoint.parse(self.metadata.address))
        try:
            yield store
        finally:
            await store.close()


@dataclass
class Ledger:
    number: int
    sizes: tuple[int, ...]
    next: int = 0
    acked: list[int] = field(default_factory=list)
    fencing: bool = False
    fenced: bool = False

    def payload(self, entry: int) -> bytes:
        rng = random.Random(self.number << 32 | entry)
        return rng.randbytes(rng.choice(self.sizes))


class Records:
    def __init__(self, rng: random.Random, bookie: str, sizes: tuple[int, ...] = (80, 1000, 9000)) -> None:
        self.rng = rng
        self.sizes = sizes
        self.bookie = bookie
        self.alive: dict[int, Ledger] = {}
        self.deleted: list[int] = []
        self.acked = 0
        self.checked = 0
        self.refused: dict[Status, int] = {}
        self._numbers = 0

    # ---------------------------------------------------------------------------------------- ledgers
    async def create(self, tree: RemoteStore) -> Ledger:
        self._numbers += 1
        ledger = Ledger(self._numbers, self.sizes)
        record = records.LedgerRecord(
            ledger_id=ledger.number, state=records.OPEN, ensemble_size=1, write_quorum=1, ack_quorum=1, key=KEY,
            token="", fragments=(records.Fragment(0, (self.bookie,)),),
        )  # fmt: skip
        await tree.put(paths.ledger(ledger.number), records.encode(record, paths.ledger(ledger.number)), ABSENT)
        self.alive[ledger.number] = ledger
        return ledger

    async def delete(self, tree: RemoteStore, ledger: Ledger) -> None:
        """From now on its entries may be there or not."""
        self.alive.pop(ledger.number)
        self.deleted.append(ledger.number)
        await deletions.delete_ledgers(tree, [ledger.number])

    # ---------------------------------------------------------------------------------------- load
    async def load(self, caller: PeerCaller, tree: RemoteStore, stop: asyncio.Event, *, churn: bool = True) -> None:
        """Until `stop`, or until the bookie is gone or refuses: adds, and with `churn` also fences and deletions."""
        while len(self.alive) < LEDGERS:
            await self.create(tree)
        work = [self._produce(caller, stop) for _ in range(ON_THEIR_WAY)]
        await asyncio.gather(*work, *([self._churn(caller, tree, stop)] if churn else []))

    async def _produce(self, caller: PeerCaller, stop: asyncio.Event) -> None:
        while not stop.is_set():
            ledger = self.rng.choice(list(self.alive.values()))
            if ledger.fencing:
                await asyncio.sleep(0.001)
                continue
            entry, ledger.next = ledger.next, ledger.next + 1
            try:
                status = (await caller.add(ledger.number, entry, ledger.payload(entry))).status
            except MagnetarError:
                return
            if status is Status.OK:
                ledger.acked.append(entry)
                self.acked += 1
            else:
                self.refused[status] = self.refused.get(status, 0) + 1
                if status is not Status.FENCED:
                    return

    async def _churn(self, caller: PeerCaller, tree: RemoteStore, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await asyncio.sleep(self.rng.uniform(0.01, 0.1))
            ledger = self.rng.choice(list(self.alive.values()))
            try:
                if self.rng.random() < 0.5:
                    ledger.fencing = True
                    head, _ = await caller.read(ledger.number, 0, fence=True)
                    ledger.fenced = ledger.fenced or head.status in (Status.OK, Status.NO_SUCH_ENTRY)
                await self.create(tree)
                await self.delete(tree, ledger)
                if self.rng.random() < 0.3:
                    await self.delete(tree, self.rng.choice(list(self.alive.values())))
            except MagnetarError:
                return

    # ---------------------------------------------------------------------------------------- checks
    async def check(self, caller: PeerCaller, sample: int | None = None) -> None:
        """AssertionError when something acknowledged is gone or other than it was, or a fence does not hold."""
        for ledger in self.alive.values():
            entries = ledger.acked
            if sample is not None and len(entries) > sample:
                older = entries[:-sample]
                entries = self.rng.sample(older, min(3, len(older))) + entries[-sample:]
            for start in range(0, len(entries), 100):
                await asyncio.gather(*[self._check(caller, ledger, entry) for entry in entries[start : start + 100]])
            if ledger.fenced:
                head = await caller.add(ledger.number, 1 << 40, b"late")
                refused = (Status.FENCED, Status.READ_ONLY)  # a full bookie refuses before it looks
                assert head.status in refused, f"ledger {ledger.number} is fenced, an add is {head.status!r}"
        for number in self.rng.sample(self.deleted, min(len(self.deleted), 20)):
            head, _ = await caller.read(number, 0)
            assert head.status in (Status.OK, Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER), (number, head)

    async def _check(self, caller: PeerCaller, ledger: Ledger, entry: int) -> None:
        head, entries = await caller.read(ledger.number, entry)
        what = f"acknowledged entry {entry} of ledger {ledger.number}"
        assert head.status is Status.OK, f"{what} is {head.status!r}"
        assert payload_of(entries[0]) == ledger.payload(entry), f"{what} is not what was sent"
        self.checked += 1
