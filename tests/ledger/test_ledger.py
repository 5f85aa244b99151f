"""Writer, reader and recovery over real sockets, against bookies in memory that misbehave on request."""

import asyncio

import pytest
from msgspec.structs import replace

from magnetar.ledger import LedgerClient, LedgerConfig, LedgerEnd
from magnetar.ledger import client as client_module
from magnetar.ledger.peer_format import BookieOperation, BookieRequestFlags, Status
from magnetar.ledger.placement_core import StripingReduction
from magnetar.metadata import paths
from magnetar.metadata.records import IN_RECOVERY, OPEN
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import (
    DataLost,
    InvalidConfiguration,
    InvalidRequest,
    LedgerClosed,
    LedgerFenced,
    LedgerNotFound,
    NotEnoughBookies,
    OutcomeUnknown,
    Unavailable,
)
from tests.ledger.conftest import QUICK, Cluster, until
from tests.ledger.fake_bookie import FakeBookie


async def test_an_append_after_close_fails_definitely_and_sends_nothing(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    await writer.close()
    with pytest.raises(LedgerClosed) as caught:
        await writer.append(b"late")
    assert caught.value.definite
    assert all(request.op is not BookieOperation.ADD for bookie in cluster.bookies for request in bookie.requests)


async def test_a_reader_beside_the_writer_reads_up_to_its_lac_and_no_further(cluster: Cluster) -> None:
    client = cluster.client()
    writer = await client.create()
    reader = client.make_local_reader(writer)
    assert (reader.last_entry, reader.is_closed) == (-1, False)
    await writer.append(b"one")
    assert [bytes(e.payload) for e in await reader.read(0, reader.last_entry)] == [b"one"]
    with pytest.raises(InvalidRequest, match="not within"):
        await reader.read(0, 1)


async def test_a_reader_of_an_open_ledger_is_bounded_by_the_largest_lac_told(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    for i in range(5):
        await writer.append(b"%d" % i)
    other = await cluster.client().open(writer.ledger_id)
    assert not other.is_closed
    assert 0 <= other.last_entry <= 4, "the piggybacked LAC may lag and never leads"
    with pytest.raises(InvalidRequest):
        await other.read(0, 5)
    await writer.close()
    assert await other.refresh_last_entry() == 4
    assert other.is_closed


async def test_a_reader_elsewhere_learns_the_last_entry_of_an_idle_writer(cluster: Cluster) -> None:
    writer = await cluster.client(replace(QUICK, add_timeout_s=0.2, quorum_timeout_s=0.3)).create()
    for i in range(3):
        await writer.append(b"%d" % i)
    other = await cluster.client().open(writer.ledger_id)
    async with asyncio.timeout(30):
        while await other.refresh_last_entry() < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [bytes(e.payload) for e in await other.read(2, 2)] == [b"2"]
    assert not other.is_closed


async def test_an_open_ledger_without_a_known_lac_is_not_called_closed_or_empty(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    await writer.append(b"only one; its own LAC is still -1")
    other = await cluster.client().open(writer.ledger_id)
    assert (other.last_entry, other.is_closed) == (-1, False)


async def test_a_silent_bookie_ends_the_ledger_and_everything_sent_is_confirmed_by_the_others(cluster: Cluster) -> None:
    client = cluster.client(replace(QUICK, add_timeout_s=5.0))
    writer = await client.create()
    await writer.append(b"before")
    cluster.bookie(writer.record.fragments[0].bookies[1]).silent.add(BookieOperation.ADD)
    assert await asyncio.gather(*(writer.append(b"x") for _ in range(20))) == list(range(1, 21))
    await writer.wait_finished()
    assert not writer.is_writable
    assert await writer.close() == LedgerEnd(20, 6 + 20)
    reader = await client.open(writer.ledger_id)
    assert len(await reader.read(0, 20)) == 21


async def test_a_fenced_writer_fails_its_appends_as_unknown_and_learns_the_stored_end(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    await writer.append(b"a")
    await writer.append(b"b")
    recovered = await cluster.client().recover(writer.ledger_id)
    assert recovered.is_closed
    assert recovered.last_entry == 1
    with pytest.raises(LedgerFenced) as caught:
        await writer.append(b"zombie")
    assert not caught.value.definite
    assert await writer.close() == LedgerEnd(1, 2)
    assert [bytes(e.payload) for e in await recovered.read(0, 1)] == [b"a", b"b"]


async def test_every_recovery_read_and_lac_question_fences(cluster: Cluster) -> None:
    """M01: a "no" of a bookie that was not fenced may turn into a yes."""
    client = cluster.client()
    writer = await client.create()
    await writer.append(b"a")
    for bookie in cluster.bookies:
        bookie.requests.clear()
    await client.recover(writer.ledger_id)
    heads = [head for bookie in cluster.bookies for head in bookie.requests]
    heads = [head for head in heads if head.op is not BookieOperation.WRITE_LAC]  # of the writer, when it is idle
    assert {head.op for head in heads} == {BookieOperation.ADD, BookieOperation.READ, BookieOperation.READ_LAC}
    for head in heads:
        assert head.flags == (
            BookieRequestFlags.RECOVERY if head.op is BookieOperation.ADD else BookieRequestFlags.FENCE
        )


async def test_recovery_without_enough_answers_gives_up_and_leaves_the_ledger_in_recovery(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    await asyncio.gather(*(writer.append(b"%d" % i) for i in range(10)))
    for bookie in cluster.bookies[:2]:
        bookie.silent |= {BookieOperation.READ, BookieOperation.READ_LAC}
    client = cluster.client(replace(QUICK, fence_timeout_s=1.0))
    with pytest.raises(Unavailable, match="stays in recovery"):
        await client.recover(writer.ledger_id)
    assert (await client.read_record(writer.ledger_id)).state == IN_RECOVERY
    for bookie in cluster.bookies[:2]:
        bookie.silent.clear()
    assert (await cluster.client().recover(writer.ledger_id)).last_entry == 9


@pytest.mark.parametrize("trouble", [Status.UNKNOWN, Status.UNAUTHORIZED, Status.BUSY, Status.BAD_REQUEST])
async def test_an_error_is_never_a_vote_that_an_entry_is_absent(cluster: Cluster, trouble: Status) -> None:
    """M06: two bookies that cannot say, and one that has nothing, prove nothing."""
    writer = await cluster.client().create()
    await writer.append(b"a")
    for bookie in cluster.bookies[:2]:
        bookie.status[BookieOperation.READ] = trouble
    third = cluster.bookies[2]
    await until(lambda: writer.ledger_id in third.shelves)  # its copy is not needed for the confirmation
    third.shelves[writer.ledger_id].entries.clear()
    client = cluster.client(replace(QUICK, close_timeout_s=5.0))
    with pytest.raises(Unavailable):
        await client.recover(writer.ledger_id)
    assert (await client.read_record(writer.ledger_id)).state == IN_RECOVERY


async def test_flipped_bytes_on_one_replica_are_read_from_another(cluster: Cluster) -> None:
    client = cluster.client()
    writer = await client.create()
    await asyncio.gather(*(writer.append(b"%d" % i) for i in range(10)))
    await writer.close()
    reader = await client.open(writer.ledger_id)
    asked_first = writer.record.fragments[0].bookies[:2]
    for bookie in cluster.bookies:
        if bookie.id in asked_first:
            bookie.flip |= set(range(10))
    got: list[bytes] = []
    while len(got) < 10:
        got += [bytes(e.payload) for e in await reader.read(len(got), 9)]
    assert got == [b"%d" % i for i in range(10)]
    assert reader.damaged_replies > 0


async def test_a_bookie_that_hangs_costs_a_read_the_wait_and_not_the_time_out(cluster: Cluster) -> None:
    """And who hung is asked last from then on."""
    writer = await cluster.client().create()
    await writer.append(b"there")
    await writer.close()
    client = cluster.client(replace(QUICK, read_timeout_s=20.0, speculative_read_s=0.5))
    reader = await client.open(writer.ledger_id)
    first = await _first_asked(cluster, client, writer.ledger_id)
    first.silent.add(BookieOperation.READ)
    assert [bytes(e.payload) for e in await reader.read(0, 0)] == [b"there"]
    assert reader.speculations >= 1
    asked = len(first.requests)
    for _ in range(5):
        await reader.read(0, 0)
    assert len(first.requests) == asked, "it is asked last"
    assert client.statistics()[first.id]["reads_slow"] == 1


async def _first_asked(cluster: Cluster, client: LedgerClient, ledger_id: int) -> FakeBookie:
    before = [len(bookie.requests) for bookie in cluster.bookies]
    await (await client.open(ledger_id)).read(0, 0)
    (asked,) = [
        bookie for bookie, count in zip(cluster.bookies, before, strict=True)
        if any(head.op is BookieOperation.READ for head in bookie.requests[count:])
    ]  # fmt: skip
    return asked


async def test_a_closed_ledger_whose_entry_nobody_has_is_an_alarm(cluster: Cluster) -> None:
    client = cluster.client()
    writer = await client.create()
    await writer.append(b"a")
    await writer.close()
    reader = await client.open(writer.ledger_id)
    for bookie in cluster.bookies:
        bookie.shelves[writer.ledger_id].entries.clear()
    with pytest.raises(DataLost):
        await reader.read(0, 0)
    cluster.bookies[0].status[BookieOperation.READ] = Status.UNKNOWN
    with pytest.raises(Unavailable):
        await reader.read(0, 0)


async def test_a_busy_bookie_is_asked_again_and_nothing_ends(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    for bookie in cluster.bookies:
        bookie.status[BookieOperation.ADD] = Status.BUSY
    pending = writer.append(b"a")
    await cluster.bookies[0].wait_requests(BookieOperation.ADD, 2)
    for bookie in cluster.bookies:
        bookie.status.clear()
    assert await pending == 0
    assert writer.is_writable


async def test_an_append_that_nobody_decides_in_time_is_unknown(cluster: Cluster) -> None:
    config = LedgerConfig(add_timeout_s=0.2, quorum_timeout_s=0.4, retry_s=0.02)
    writer = await cluster.client(config).create(ensemble_size=1, write_quorum=1, ack_quorum=1)
    for bookie in cluster.bookies:
        bookie.silent.add(BookieOperation.ADD)
    metadata = writer._metadata
    writer._metadata = _Hanging()  # type: ignore[assignment]
    with pytest.raises(OutcomeUnknown):
        await writer.append(b"a")
    writer._metadata = metadata


class _Hanging:
    async def get(self, path: str) -> None:
        await asyncio.Event().wait()


async def test_a_fault_ends_a_recovery_and_a_close_instead_of_leaving_them_hanging(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    client = cluster.client()
    writer, other = await client.create(), await client.create()
    await writer.append(b"a")
    monkeypatch.setattr("magnetar.ledger.recovery_core.LedgerRecovery._fence_answered", broken)
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="a bug"):
            await client.recover(writer.ledger_id)
    monkeypatch.setattr("magnetar.ledger.handle.decide_close_by_writer", broken)
    async with asyncio.timeout(60):
        with pytest.raises(OutcomeUnknown):
            await other.close()


async def test_create_refuses_impossible_shapes_and_says_how_many_bookies_are_missing(cluster: Cluster) -> None:
    client = cluster.client()
    with pytest.raises(InvalidConfiguration):
        await client.create(ensemble_size=2, write_quorum=3, ack_quorum=2)
    with pytest.raises(NotEnoughBookies) as caught:
        await client.create(ensemble_size=4, write_quorum=3, ack_quorum=2)
    assert caught.value.fields == {"wanted": "4", "available": "3"}


async def test_ledger_ids_are_never_used_twice_and_delete_forgets(cluster: Cluster) -> None:
    one, two = cluster.client(), cluster.client()
    writers = [await client.create(properties={"topic": "t"}) for client in (one, two, one, two)]
    assert len({writer.ledger_id for writer in writers}) == 4
    record = await two.read_record(writers[0].ledger_id)
    assert (record.state, record.properties, len(record.key)) == (OPEN, {"topic": "t"}, 20)
    await one.delete(writers[0].ledger_id)
    await one.delete(writers[0].ledger_id)
    for attempt in (one.read_record, one.open, one.recover):
        with pytest.raises(LedgerNotFound):
            await attempt(writers[0].ledger_id)


async def test_ids_are_taken_by_one_in_growing_blocks_and_are_above_what_is_asked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[range] = []
    take = client_module.allocate_ids

    async def noted(store: MetadataStore, count: int) -> range:
        blocks.append(await take(store, count))
        return blocks[-1]

    monkeypatch.setattr(client_module, "allocate_ids", noted)
    one, two = cluster.client(), cluster.client()
    writers = await asyncio.gather(*[one.create() for _ in range(40)])
    assert len({writer.ledger_id for writer in writers}) == 40
    assert [len(block) for block in blocks] == [16, 32], "those that are made at once share a block"
    above = (await two.create()).ledger_id
    assert above > one._ids[-1]
    assert (await one.create(above=above)).ledger_id > above, "what is left of its block is given up"
    assert len(blocks) == 4


async def test_a_failed_bookie_is_chosen_last_for_a_while(cluster: Cluster) -> None:
    client = cluster.client()
    writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1)
    failed = writer.record.fragments[0].bookies[0]
    cluster.bookie(failed).status[BookieOperation.ADD] = Status.READ_ONLY
    assert await writer.append(b"another bookie takes its place") == 0
    assert failed not in writer.record.fragments[-1].bookies
    for _ in range(10):
        another = await client.create(ensemble_size=2, write_quorum=2, ack_quorum=2)
        assert failed not in another.record.fragments[0].bookies
    assert len((await client.create()).record.fragments[0].bookies) == 3, "but it is taken when others do not suffice"


async def test_abandon_fails_pending_as_unknown_and_leaves_the_ledger_to_a_recoverer(cluster: Cluster) -> None:
    client = cluster.client()
    writer = await client.create()
    await writer.append(b"a")
    for bookie in cluster.bookies:
        bookie.silent.add(BookieOperation.ADD)
    pending = writer.append(b"b")
    await writer.abandon()
    with pytest.raises(OutcomeUnknown):
        await pending
    assert (await client.read_record(writer.ledger_id)).state == OPEN


async def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="quorum_timeout_s"):
        LedgerConfig(add_timeout_s=5, quorum_timeout_s=5)
    with pytest.raises(InvalidConfiguration, match="positive"):
        LedgerConfig(recovery_batch=0)
    with pytest.raises(InvalidConfiguration, match="pending_bytes_max"):
        LedgerConfig(pending_bytes_max=0)
    with pytest.raises(InvalidConfiguration, match="ensemble_changes_max"):
        LedgerConfig(ensemble_changes_max=-1)
    assert QUICK.write_quorum == 3


async def test_busy_bookies_are_asked_again_by_readers_and_recovery(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    await writer.append(b"a")
    client = cluster.client()
    for bookie in cluster.bookies:
        bookie.requests.clear()
        bookie.status[BookieOperation.READ_LAC] = Status.BUSY
    recovering = asyncio.ensure_future(client.recover(writer.ledger_id))
    await cluster.bookies[0].wait_requests(BookieOperation.READ_LAC, 2)
    for bookie in cluster.bookies:
        bookie.status = {BookieOperation.READ: Status.BUSY}
    await cluster.bookies[0].wait_requests(BookieOperation.READ, 2)
    for bookie in cluster.bookies:
        bookie.status = {}
    reader = await recovering
    assert [bytes(e.payload) for e in await reader.read(0, 0)] == [b"a"]
    assert not client._bookies.quarantined_bookies()


@pytest.mark.parametrize("op", [BookieOperation.READ_LAC, BookieOperation.READ])
async def test_a_recovery_waits_for_bookies_that_say_they_are_busy_and_does_not_start_over(
    cluster: Cluster, op: BookieOperation
) -> None:
    """They live, and have a queue: only one that is silent is given up after the time-out."""
    writer = await cluster.client().create()
    await writer.append(b"a")
    client = cluster.client(replace(QUICK, fence_timeout_s=4.0))
    for bookie in cluster.bookies:
        bookie.requests.clear()
        bookie.status[op] = Status.BUSY
    recovering = asyncio.ensure_future(client.recover(writer.ledger_id))
    # For longer than the time-out.
    asked = asyncio.gather(*(bookie.wait_requests(op, 10) for bookie in cluster.bookies))
    await asyncio.wait([recovering, asked], return_when=asyncio.FIRST_COMPLETED)
    for bookie in cluster.bookies:
        bookie.status.clear()
    assert (await recovering).last_entry == 0
    fences = [head for bookie in cluster.bookies for head in bookie.requests if head.op is BookieOperation.READ_LAC]
    assert op is BookieOperation.READ_LAC or len(fences) == 3, "it began once"


async def test_a_recovery_gives_up_when_bookies_are_busy_for_ever(cluster: Cluster) -> None:
    writer = await cluster.client().create()
    await writer.append(b"a")
    for bookie in cluster.bookies:
        bookie.status[BookieOperation.READ] = Status.BUSY
    with pytest.raises(Unavailable, match="neither found nor proven absent"):
        await cluster.client(replace(QUICK, close_timeout_s=5.0)).recover(writer.ledger_id)


async def test_a_degraded_ledger_is_made_on_the_bookies_that_are_well_and_never_below_the_ack_quorum(
    cluster: Cluster,
) -> None:
    client = cluster.client()
    await cluster.metadata.delete(paths.bookie(cluster.bookies[0].id))
    with pytest.raises(NotEnoughBookies):
        await client.create()
    writer = await client.create(shrink=StripingReduction.COPIES)
    record = writer.record
    assert (record.ensemble_size, record.write_quorum, record.ack_quorum) == (2, 2, 2)
    assert cluster.bookies[0].id not in record.fragments[0].bookies
    assert await writer.append(b"two copies, as many as confirm an entry of three") == 0
    await cluster.metadata.delete(paths.bookie(cluster.bookies[1].id))
    with pytest.raises(NotEnoughBookies):
        await client.create(shrink=StripingReduction.COPIES)


async def test_with_all_bookies_well_a_degraded_ledger_is_a_full_one(cluster: Cluster) -> None:
    record = (await cluster.client().create(shrink=StripingReduction.COPIES)).record
    assert (record.ensemble_size, record.write_quorum, record.ack_quorum) == (3, 3, 2)
