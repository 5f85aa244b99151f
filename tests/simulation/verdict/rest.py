"""The cluster at rest, after everything was healed: nothing is stuck, nothing missing (invariants 6, 7, 10, 13).

Within LIVENESS_S of virtual time

    no mark of auto-recovery, no report of damage is left, and no bookie is in limbo
    every ledger that somebody began to recover can be recovered (13)
    every CLOSED ledger has each of its entries at every bookie of its write set: as many copies as were asked for, by
    what the bookie says (HELD) and by what its disk has synced
    no broker counts a publish that has its outcome
    every task that is to live as long as its process runs, whatever befell it
    every CLOSED ledger is read to its end by a fresh reader (6), and what a writer was told is stored is there (10)
"""

import asyncio
import zlib

from magnetar.bookie.maintenance.repair_worker import EntryCopier, RepairConfig
from magnetar.ledger.client import LedgerClient
from magnetar.ledger.writer_core import Striping
from magnetar.metadata.records import CLOSED, IN_RECOVERY, LedgerRecord
from magnetar.proto.errors import LedgerNotFound, MagnetarError
from magnetar.runtime.access import LOCAL_PRINCIPAL
from magnetar.runtime.network import World
from tests.simulation.cluster import Cluster

LIVENESS_S = 1800.0
"""Within 30 virtual minutes after healing."""
FORCED_S = 300.0
"""A bookie does not delete most of its ledgers by itself (garbage.py), nor so ends a report of damage in one of them:
after so long an operator does as the log says."""


async def at_rest(cluster: Cluster) -> list[str]:
    """Violations; returns when the cluster is at rest, or has had its time."""
    rest = _Rest(cluster)
    begun = cluster.simulation.loop.time()
    try:
        async with asyncio.timeout(LIVENESS_S) as limit:
            await cluster.simulation.spawn("judge", rest.run(cluster.simulation.world("judge")))
    except TimeoutError:
        if not limit.expired():
            raise
        rest.violations.append(f"stuck: not at rest {LIVENESS_S} s after healing: {rest.waits_for}")
    cluster.simulation.add_line(f"at rest after {cluster.simulation.loop.time() - begun:.3f} s")
    return rest.violations


class _Rest:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._observer = cluster.observer
        self.violations: list[str] = []
        self.waits_for = ""

    async def run(self, world: World) -> None:
        client = LedgerClient(await self._cluster.joined(world), await self._cluster.session(world))
        copier = EntryCopier(client.bookies, world.clock, RepairConfig())
        await client.bookies.wait_bookies_listed()
        forced_at = world.clock.monotonic() + FORCED_S
        while True:
            waits_for = self._waits_for() or await self._unended(client) or await self._incomplete(copier)
            if waits_for != self.waits_for:
                self._cluster.simulation.add_line(f"judge: {f'waits for {waits_for}' if waits_for else 'all is whole'}")
            self.waits_for = waits_for
            if not waits_for:
                break
            if waits_for.startswith("damaged") and world.clock.monotonic() >= forced_at:
                forced_at = world.clock.monotonic() + FORCED_S
                await self._collect()
            await asyncio.sleep(1.0)
        await self._read_all(client)

    async def _collect(self) -> None:
        """What an operator does whom a bookie tells that it does not believe that so many of its ledgers are gone."""
        for name in self._cluster.bookie_names:
            verb = self._cluster.bookies[name]._answer_admin(
                b'{"verb": "gc-start", "force": true}', LOCAL_PRINCIPAL, local=True
            )
            answer = await self._cluster.simulation.spawn(name, verb)
            self._cluster.simulation.add_line(f"judge: {name} collects: {answer.decode()}")

    def _waits_for(self) -> str:
        observer, cluster = self._observer, self._cluster
        for ledger, mark in observer.marks.items():
            return f"ledger {ledger}, which is marked: {mark.bookies} {mark.stuck} {mark.last_error}"
        for report in observer.damaged:
            return f"damaged entries: {report}"
        for name in cluster.bookie_names:
            if cluster.bookies[name].limbo_restorer.limbo_upto >= 0:
                return f"{name}, which is in limbo: {cluster.bookies[name].limbo_restorer.blocked}"
        for process in (*(cluster.bookies[name] for name in cluster.bookie_names), *cluster.brokers.values()):
            for task, why in process.background.failure_reasons.items():
                return f"{task}, which does not run as it should: {why}"
        for name, network in cluster.inside.items():
            if late := network.late():
                return f"{late} requests within {name}, which have no outcome"
        for name, broker in cluster.brokers.items():
            if held := broker.topic_manager.memory.requests.held:
                return f"{name}, which counts {held} bytes of publishes as under way"
        return ""

    # ------------------------------------------------------------------ 13
    async def _unended(self, client: LedgerClient) -> str:
        for ledger, record in list(self._observer.records.items()):
            if record.state == IN_RECOVERY:
                try:
                    reader = await client.recover(ledger)
                    self._observer.ended(ledger, reader.last_entry, "the judge")
                except LedgerNotFound:
                    continue
                except MagnetarError as error:
                    return f"the recovery of ledger {ledger}: {error!r}"
        return ""

    # ------------------------------------------------------------------ 7
    async def _incomplete(self, copier: EntryCopier) -> str:
        for record in list(self._observer.records.values()):
            if record.state == CLOSED and record.last_entry >= 0:
                lack = await self._lack(copier, record)
                if lack and self._observer.records.get(record.ledger_id) == record:
                    return lack
        return ""

    async def _lack(self, copier: EntryCopier, record: LedgerRecord) -> str:
        striping = Striping(record.ensemble_size, record.write_quorum, record.ack_quorum)
        firsts = [each.first_entry for each in record.fragments]
        for fragment, after in zip(record.fragments, [*firsts[1:], record.last_entry + 1], strict=True):
            first, last = fragment.first_entry, min(after - 1, record.last_entry)
            if last < first:
                continue
            for slot, bookie in enumerate(fragment.bookies):
                wanted = [entry for entry in range(first, last + 1) if slot in striping.slots_of_entry(entry)]
                held = await copier.find_stored_entries(record, bookie, first, last) if wanted else None
                missing = [] if held is None else [
                    entry for entry in wanted
                    if entry not in held or not self._observer.is_durable(bookie, record.ledger_id, entry)
                ]  # fmt: skip
                if wanted and (held is None or missing):
                    node = self._observer.node_of.get(bookie, bookie)
                    what = "which does not answer" if held is None else f"which lacks {missing[:5]} of {first}…{last}"
                    return f"ledger {record.ledger_id} at {node}, {what}"
        return ""

    # ------------------------------------------------------------------ 6, 10
    async def _read_all(self, client: LedgerClient) -> None:
        for ledger, record in list(self._observer.records.items()):
            if record.state != CLOSED:
                continue
            try:
                await self._read(client, ledger, record.last_entry)
            except MagnetarError as error:
                if ledger in self._observer.records:  # else it was trimmed meanwhile
                    self.violations.append(f"6: ledger {ledger} cannot be read: {error!r}")

    async def _read(self, client: LedgerClient, ledger: int, last_entry: int) -> None:
        acked = self._observer.acked.get(ledger, [])
        reader = await client.open(ledger)
        entry = 0
        while entry <= last_entry:
            for each in await reader.read(entry, last_entry):
                if each.entry_id < len(acked) and zlib.crc32(each.payload) != acked[each.entry_id]:
                    self.violations.append(f"10: entry {each.entry_id} of ledger {ledger} has another content")
                entry = each.entry_id + 1
