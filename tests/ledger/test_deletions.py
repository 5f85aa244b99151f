"""What was deleted stays noted, by whomever and however often."""

import asyncio
import random
from pathlib import Path

import pytest
from pyroaring import BitMap64

from magnetar.ledger import LedgerClient, LedgerConfig
from magnetar.ledger import client as deletions
from magnetar.metadata import paths
from magnetar.metadata.records import DamagedRecord, DeletedLedgersRecord
from magnetar.metadata.store import get_record
from tests.support.cluster import cluster


async def test_any_deletions_by_several_processes_are_all_noted_and_only_they(tmp_path: Path) -> None:
    rng = random.Random(13)
    async with cluster(tmp_path) as running:
        sessions = [running.store.new_session() for _ in range(4)]
        wanted = [rng.sample(range(3 * deletions.LEDGER_IDS_PER_PAGE), 60) for _ in range(40)]

        async def work(number: int) -> None:
            for ids in wanted[number::4]:
                await deletions.record_deletions(sessions[number], ids)

        await asyncio.gather(*(work(number) for number in range(4)))
        everything = BitMap64(each for ids in wanted for each in ids)
        assert await deletions.find_deleted_ledgers(sessions[0], range(3 * deletions.LEDGER_IDS_PER_PAGE)) == everything
        assert await deletions.find_deleted_ledgers(
            sessions[0], [*wanted[0][:3], 4 * deletions.LEDGER_IDS_PER_PAGE]
        ) == BitMap64(wanted[0][:3])
        for session in sessions:
            await session.close()


async def test_ids_that_follow_each_other_are_one_range(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        session = running.store.new_session()
        for ids in ([5], [7], [6], [5], range(8, 100)):
            await deletions.record_deletions(session, ids)
        found = await get_record(session, paths.deleted_ledgers(0), DeletedLedgersRecord)
        assert found is not None
        assert found[0].ranges == ((5, 99),)
        await session.put(paths.deleted_ledgers(1), b"not a record")
        with pytest.raises(DamagedRecord):
            await deletions.find_deleted_ledgers(session, [deletions.LEDGER_IDS_PER_PAGE])
        await session.close()


async def test_a_client_deletes_ledgers_together_and_each_call_ends_when_its_own_are_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        session = running.store.new_session()
        client = LedgerClient(running.world, session, LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1))
        made = [(await client.create()).ledger_id for _ in range(30)]
        before = await session.revision()
        await asyncio.gather(*(client.delete(each) for each in made))
        assert await session.revision() - before < 10, "together, not one by one"
        listed = {paths.ledger_id(name) for name in await session.children(paths.LEDGERS)}
        assert listed.isdisjoint(made)
        assert await deletions.find_deleted_ledgers(session, made) == BitMap64(made)
        await client.delete(made[0])  # again
        await client.delete()
        await client.close()
        await session.close()
