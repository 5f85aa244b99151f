"""Load without a broker: ledgers written, read, recovered by rivals while bookies die. What brokers rest on, alone.

A writer process appends to a ledger after the other, as a topic does: when a handle ends, it goes on in a new ledger,
and what failed certainly (LedgerClosed) is appended again. Rivals recover ledgers, open ones included, at any time.
A reader elsewhere follows ledgers while they are written. In the end every ledger is recovered and read, and must hold
exactly what was acknowledged, nothing that was not appended at that place, and whatever the reader was given.
"""

import asyncio
import random

from msgspec.structs import replace

from magnetar.ledger.bookies import LedgerConfig
from magnetar.ledger.client import LedgerClient
from magnetar.ledger.handle import LedgerWriter
from magnetar.proto.errors import LedgerNotFound, MagnetarError
from magnetar.runtime.network import World
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.simulation.cluster import Cluster
from tests.simulation.options import Options
from tests.simulation.strikes.nemesis import Nemesis
from tests.simulation.verdict.rest import LIVENESS_S, at_rest

CONFIG = LedgerConfig(
    add_timeout_s=2.0, quorum_timeout_s=8.0, read_timeout_s=2.0, fence_timeout_s=2.0, quarantine_s=3.0
)  # fmt: skip


class LedgerLoad:
    """Everything that was appended, by (ledger, entry); `violations` are sentences."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._simulation: Simulation = cluster.simulation
        self._options: Options = cluster.options
        self._rng: random.Random = self._simulation.random_generator("load")
        self.appended: dict[int, list[bytes]] = {}
        self.confirmed: dict[tuple[int, int], bytes] = {}
        self.figures: dict[str, int] = {"recovered": 0, "followed": 0}
        self._followed: dict[int, int] = {}  # ledger -> how many entries a reader was given while it was written
        self.violations: list[str] = []
        self._over = False

    async def run(self) -> None:
        nemesis = asyncio.ensure_future(Nemesis(self._cluster).run())
        writer = asyncio.ensure_future(self._keep("writer", self._write))
        rival = asyncio.ensure_future(self._keep("rival", self._recover_some))
        tail = asyncio.ensure_future(self._keep("tail", self._follow_some))
        await nemesis
        self._over = True
        await self._cluster.heal()
        for name in ("writer", "rival", "tail"):
            self._simulation.crash(name)
        await asyncio.gather(writer, rival, tail)
        async with asyncio.timeout(LIVENESS_S):
            await self._simulation.spawn("judge", self._audit(self._simulation.world("judge")))
        if not self.violations:
            self.violations += await at_rest(self._cluster)

    async def _keep(self, node: str, program: object) -> None:
        """Runs the program in a process of the node, again when it dies or fails, until the load is over."""
        while not self._over:
            try:
                await self._simulation.spawn(node, program(self._simulation.world(node)))  # type: ignore[operator]
            except (NodeCrashed, MagnetarError) as error:
                self._simulation.add_line(f"{node} begins again: {error!r}")
                self._simulation.crash(node)
                await asyncio.sleep(0.3)

    # ------------------------------------------------------------------ programs
    async def _write(self, world: World) -> None:
        pending = 8 if self._options.tight else CONFIG.pending_entries_max
        config = replace(CONFIG, close_timeout_s=self._options.patience_s, pending_entries_max=pending)
        client = LedgerClient(await self._cluster.joined(world), await self._cluster.session(world), config)
        ensemble, write, ack = self._options.quorum
        while not self._over:
            create = client.create(ensemble_size=ensemble, write_quorum=write, ack_quorum=ack)
            await self._write_ledger(await self._cluster.call("create a ledger", create))

    async def _write_ledger(self, writer: LedgerWriter) -> None:
        log = self.appended.setdefault(writer.ledger_id, [])
        for number in range(self._rng.randint(1, 2 * self._options.ledger_entries_max)):
            await writer.wait_room()
            if not writer.is_writable:
                break
            payload = b"%d:%d:" % (writer.ledger_id, number) + self._rng.randbytes(
                self._rng.randint(0, self._options.message_bytes_max)
            )
            log.append(payload)
            writer.append(payload).add_done_callback(lambda done: done.cancelled() or done.exception())
            while writer.pending_entries > 20:  # noqa: ASYNC110 - the writer has no event for it
                await asyncio.sleep(0.01)
            if self._rng.random() < 0.5:
                await asyncio.sleep(self._rng.expovariate(1.0 / self._options.pause_s))
        try:
            end = await self._cluster.call("close a ledger", writer.close())
            self._cluster.observer.ended(writer.ledger_id, end.last_entry, "the writer")
        except MagnetarError as error:
            self._simulation.add_line(f"writer of {writer.ledger_id} ends without an end: {error!r}")

    async def _recover_some(self, world: World) -> None:
        client = LedgerClient(await self._cluster.joined(world), await self._cluster.session(world), CONFIG)
        while not self._over:
            await asyncio.sleep(self._rng.expovariate(1.0 / 3.0))
            if not self.appended:
                continue
            ledger = self._rng.choice(list(self.appended)[-3:])
            try:
                reader = await self._cluster.call("recover a ledger", client.recover(ledger))
                self._cluster.observer.ended(ledger, reader.last_entry, "a rival")
                self.figures["recovered"] += 1
            except MagnetarError as error:
                self._simulation.add_line(f"rival gave {ledger} up: {error!r}")

    async def _follow_some(self, world: World) -> None:
        rng = self._simulation.random_generator("tail")
        client = LedgerClient(await self._cluster.joined(world), await self._cluster.session(world), CONFIG)
        while not self._over:
            await asyncio.sleep(rng.expovariate(1.0))
            if self.appended:
                ledger = rng.choice(list(self.appended)[-2:])
                try:
                    await self._follow(client, ledger, rng.randint(1, 20))
                except MagnetarError as error:
                    self._simulation.add_line(f"the reader gave {ledger} up: {error!r}")

    async def _follow(self, client: LedgerClient, ledger: int, looks: int) -> None:
        """As a tailing reader: what it is told is confirmed stays, and is what was appended there."""
        reader = await self._cluster.call("open a ledger to read", client.open(ledger))
        at = 0
        for _ in range(looks):
            if reader.last_entry < at and await self._cluster.call("look for more", reader.refresh_last_entry()) < at:
                if reader.is_closed:
                    break
                await asyncio.sleep(0.5)
                continue
            for entry in await self._cluster.call("read", reader.read(at, reader.last_entry)):
                if bytes(entry.payload) != self.appended[ledger][at]:
                    self.violations.append(f"10: a reader is given another entry {at} of ledger {ledger}")
                at += 1
            self._followed[ledger] = max(at, self._followed.get(ledger, 0))
            self.figures["followed"] += 1

    # ------------------------------------------------------------------ the end
    async def _audit(self, world: World) -> None:
        """Closes every ledger and reads it whole: what was confirmed is there, at its place, unchanged.

        And a writer makes progress again.
        """
        client = LedgerClient(await self._cluster.joined(world), await self._cluster.session(world), CONFIG)
        await self._probe(client)
        for ledger, appended in self.appended.items():
            if ledger in self._cluster.observer.deleted:
                continue
            found = await self._read_all(client, ledger)
            acked = len(self._cluster.observer.acked.get(ledger, ()))
            if len(found) < acked:
                self.violations.append(f"lost: ledger {ledger} has {len(found)} of {acked} acknowledged entries")
            if len(found) < self._followed.get(ledger, 0):
                given = self._followed[ledger]
                self.violations.append(f"6: ledger {ledger} ends after {len(found)} entries, a reader had {given}")
            if found != appended[: len(found)]:
                wrong = next(i for i, entry in enumerate(found) if i >= len(appended) or entry != appended[i])
                self.violations.append(f"10: entry {wrong} of ledger {ledger} is not what was appended there")

    async def _probe(self, client: LedgerClient) -> None:
        ensemble, write, ack = self._options.quorum
        while True:
            try:
                writer = await client.create(ensemble_size=ensemble, write_quorum=write, ack_quorum=ack)
                self.appended[writer.ledger_id] = [b"probe"]
                await writer.append(b"probe")
                await writer.close()
                return
            except MagnetarError as error:
                self._simulation.add_line(f"nothing can be written yet: {error!r}")
                await asyncio.sleep(1.0)

    async def _read_all(self, client: LedgerClient, ledger: int) -> list[bytes]:
        while True:
            try:
                reader = await client.recover(ledger)
                found: list[bytes] = []
                while len(found) <= reader.last_entry:
                    found += [bytes(entry.payload) for entry in await reader.read(len(found), reader.last_entry)]
                return found
            except LedgerNotFound:
                return []
            except MagnetarError as error:
                self._simulation.add_line(f"auditor tries {ledger} again: {error!r}")
                await asyncio.sleep(1.0)
