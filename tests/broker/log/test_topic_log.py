"""The topic's log on real bookies, with sabotage: take-over, fencing, failing ledgers, rolling, trimming."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.common.config import BrokerConfig, LedgerReplication
from magnetar.broker.log import log_queue_core, topic_log
from magnetar.broker.log.appender import AGE_CHECK_INTERVAL_MS, Publish
from magnetar.broker.log.cache import TailCache
from magnetar.broker.log.log_queue_core import SequenceRange
from magnetar.broker.log.log_shape_core import find_ledger_age_share
from magnetar.broker.log.managed_ledger import TopicFenced, topic_path
from magnetar.broker.log.topic_log import TAKE_OVER_STEPS, TopicLog
from magnetar.ledger import LedgerClient, LedgerConfig
from magnetar.ledger.sender import PendingAppendWithFuture
from magnetar.metadata import paths
from magnetar.metadata.records import CLOSED, IN_RECOVERY, OPEN, LedgerRecord, TopicRecord, decode_record, encode_record
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import DataLost, MagnetarError, NotEnoughBookies, NotOwner, OutcomeUnknown, TopicTerminated
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import TopicState
from tests.compiled import replaces_code
from tests.metadata.stores import Forgetful
from tests.support.cluster import SMALL, Cluster, client_part, cluster, payloads_of

TOPIC = TopicName.parse("log")
LEDGER = LedgerConfig(1, 1, 1, add_timeout_s=10.0)


async def one_copy() -> LedgerReplication:
    return LedgerReplication(1, 1, 1)


class Recorder:
    """A publisher that notes every outcome."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[int, Position, int] | tuple[int, MagnetarError]] = []
        self.news = asyncio.Event()

    def on_confirmed(self, publish: Publish, position: Position, index: int) -> None:
        self.outcomes.append((publish.numbers.first, position, index))
        self.news.set()

    def on_failed(self, publish: Publish, error: MagnetarError) -> None:
        self.outcomes.append((publish.numbers.first, error))
        self.news.set()


class Owner:
    """One broker's hold on the topic: a log over its own ledger client."""

    def __init__(self, bench: Bench, ledger: LedgerConfig | None = None, **changes: object) -> None:
        config: BrokerConfig = replace(SMALL, reroute_timeout_s=10.0, **changes)  # type: ignore[arg-type]
        self.recorder = Recorder()
        self.sequence_id = 0
        self.lost: list[MagnetarError] = []
        self.owns = True
        self.ledgers = LedgerClient(bench.running.world, bench.store, ledger or LEDGER)
        self.log = TopicLog(
            bench.running.world, bench.store, self.ledgers, TailCache(config.cache_bytes), config, TOPIC,
            replication=one_copy, on_confirmed=lambda: None, on_delayed=lambda *_: None, on_lost=self.lost.append,
            owned=lambda: self.owns,
        )  # fmt: skip

    def publish_through(self, store: Any) -> None:
        """Its changes of the metadata go through that store."""
        self.ledgers._metadata = self.log._managed_ledger.listed._store = store

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            number = self.sequence_id
            part = client_part("p", number, b"%d" % number)
            self.log.publish(Publish(self.recorder, part, SequenceRange(number, number), count=1))
            self.sequence_id += 1

    async def settled(self, count: int) -> list[Any]:
        async with asyncio.timeout(20):
            while len(self.recorder.outcomes) < count:
                self.recorder.news.clear()
                await self.recorder.news.wait()
        return self.recorder.outcomes

    async def all(self) -> list[bytes]:
        """What the log holds, from the first entry to the last."""
        found: list[bytes] = []
        position = self.log.shape.position_after(self.log.shape.start_position)
        while self.log.shape.has_visible_entry(position):
            for entry in await self.log.reader.read(position, 1 << 20):
                found += payloads_of(entry.payload)
                position = self.log.shape.position_after(entry.position)
        return found


class Bench:
    def __init__(self, running: Cluster, store: MetadataStore) -> None:
        self.running = running
        self.store = store
        self.owners: list[Owner] = []

    async def owner(self, ledger: LedgerConfig | None = None, **changes: object) -> Owner:
        owner = Owner(self, ledger, **changes)
        self.owners.append(owner)
        await owner.log.open()
        return owner

    async def list(self) -> TopicRecord:
        node = await self.store.get(topic_path(TOPIC))
        assert node is not None
        return decode_record(node.value, TopicRecord, topic_path(TOPIC))

    async def ledger(self, ledger_id: int) -> LedgerRecord | None:
        node = await self.store.get(paths.ledger(ledger_id))
        return decode_record(node.value, LedgerRecord, paths.ledger(ledger_id)) if node is not None else None


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with cluster(tmp_path, brokers=0) as running:
        store = running.store.new_session()
        await store.put(topic_path(TOPIC), encode_record(TopicRecord(), topic_path(TOPIC)))
        bench = Bench(running, store)
        yield bench
        for owner in bench.owners:
            owner.log.abandon(NotOwner("the test is over"))
            await owner.log.close()
            await owner.ledgers.close()
        await store.close()


# ---------------------------------------------------------------------------------------------- take-over
Step = Callable[[TopicLog], Awaitable[None]]


def replaced(
    monkeypatch: pytest.MonkeyPatch, log: TopicLog, step: Step, then: Callable[[], Awaitable[None]]
) -> None:
    """Runs `then` in place of a step of the take-over of `log`."""

    async def run(other: TopicLog) -> None:
        await (then() if other is log else step(other))

    monkeypatch.setattr(topic_log, "TAKE_OVER_STEPS", tuple(run if each is step else each for each in TAKE_OVER_STEPS))


async def test_take_over_follows_its_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await bench.owner()
    first.publish(3)
    await first.settled(3)
    done: list[str] = []
    owner = Owner(bench)
    bench.owners.append(owner)

    def record(target: Any, name: str, what: str) -> None:
        original = getattr(target, name)

        async def called(*args: Any, **options: Any) -> Any:
            result = await original(*args, **options)
            done.append(what)
            return result

        monkeypatch.setattr(target, name, called)

    record(owner.log._managed_ledger.listed, "read_record", "read_ledger_list")
    record(owner.ledgers, "recover_without_close", "recover_ledgers")
    record(owner.log._managed_ledger.listed, "change_record", "claim_ledger_list")

    async def serve() -> None:
        await owner.log.serve()
        done.append("serve")

    replaced(monkeypatch, owner.log, TopicLog.serve, serve)
    await owner.log.open()
    assert done == [step.__name__ for step in TAKE_OVER_STEPS]


async def test_a_former_owner_is_fenced_and_confirms_nothing_more(bench: Bench) -> None:
    first = await bench.owner()
    first.publish(2)
    await first.settled(2)
    first.owns = False
    second = await bench.owner()
    first.publish(3)
    outcomes = (await first.settled(5))[2:]
    assert all(isinstance(outcome[1], OutcomeUnknown) for outcome in outcomes)
    assert first.log.state is TopicState.LOST
    assert isinstance(first.lost[0], TopicFenced)
    with pytest.raises(NotOwner):
        first.publish()
    assert await second.all() == [b"0", b"1"]
    assert len((await bench.list()).ledgers) == 1


async def test_a_former_owner_that_believes_in_itself_loses_at_the_list(bench: Bench) -> None:
    """The hint says that it is still the owner; the compare-and-set of the list decides."""
    first = await bench.owner()
    second = await bench.owner()
    first.publish(2)
    await first.settled(2)
    assert isinstance(first.lost[0], TopicFenced)
    second.publish()
    ((_, _, index),) = await second.settled(1)
    assert index == 0
    assert await second.all() == [b"0"]


async def test_a_list_that_changed_under_the_take_over_fences(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(bench)
    bench.owners.append(owner)

    async def late() -> None:
        await bench.owner()  # another broker goes through all of it
        await owner.log.claim_ledger_list()

    replaced(monkeypatch, owner.log, TopicLog.claim_ledger_list, late)
    with pytest.raises(TopicFenced):
        await owner.log.open()
    assert owner.log.state is TopicState.OPENING


async def test_a_ledger_that_was_added_under_the_take_over_keeps_the_list_from_being_claimed(bench: Bench) -> None:
    """Its writer was not fenced: what it confirms would be lost to whoever claimed the list that was read before."""
    first = await bench.owner()
    late = Owner(bench)
    bench.owners.append(late)
    await late.log.read_ledger_list()
    await late.log.recover_ledgers()
    first.publish()
    assert len((await first.settled(1))[0]) == 3, "it was confirmed"
    with pytest.raises(TopicFenced):
        await late.log.claim_ledger_list()
    second = await bench.owner()
    assert await second.all() == [b"0"]


async def test_two_owners_that_take_over_at_once_never_hold_the_topic_both(bench: Bench) -> None:
    """Both read the same list of a topic without ledgers: what they write differs by the claim alone."""
    both = [Owner(bench), Owner(bench)]
    bench.owners += both
    for owner in both:
        await owner.log.read_ledger_list()
        await owner.log.recover_ledgers()
    await both[0].log.claim_ledger_list()
    with pytest.raises(TopicFenced):
        await both[1].log.claim_ledger_list()
    await both[0].log.serve()
    both[0].publish()
    assert len((await both[0].settled(1))[0]) == 3


async def test_a_topic_without_publishes_is_taken_over_with_one_write_and_has_no_ledger(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, commit = [], bench.store.commit

    async def counted(operations: Any) -> list[int]:
        writes.append([each.path for each in operations])
        return await commit(operations)

    monkeypatch.setattr(bench.store, "commit", counted)
    for _ in range(2):
        owner = await bench.owner()
        await owner.log.close()
    assert writes == [[topic_path(TOPIC)], [topic_path(TOPIC)]]
    assert (await bench.list()).ledgers == ()
    assert await bench.store.children(paths.LEDGERS) == []


async def test_the_next_index_outlives_all_messages_and_an_owner_that_published_nothing(bench: Bench) -> None:
    first = await bench.owner()
    first.publish(3)
    await first.settled(3)
    gone = first.log.shape.tail_span.ledger_id
    await first.log.roll_ledger()
    assert await first.log.trim_ledgers(lambda: [gone]) == [gone]
    for _ in range(2):
        idle = await bench.owner()
        assert (idle.log.shape.end_index, idle.log.shape.last_position.entry_id) == (3, -1)
    idle.publish()
    ((_, _, index),) = await idle.settled(1)
    assert index == 3
    assert len((await bench.list()).ledgers) == 1, "the empty one has gone"


async def test_the_last_ledger_is_closed_in_the_commit_that_claims_the_list_and_the_next_made_in_that_which_names_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await bench.owner()
    first.publish(2)
    await first.settled(2)
    (listed,) = (await bench.list()).ledgers
    writes, commit = [], bench.store.commit

    async def counted(operations: Any) -> list[int]:
        writes.append([each.path for each in operations])
        return await commit(operations)

    monkeypatch.setattr(bench.store, "commit", counted)
    second = await bench.owner()
    second.publish(1)
    ((_, position, _),) = await second.settled(1)
    old, new = paths.ledger(listed.ledger_id), paths.ledger(position.ledger_id)
    writes = [each for each in writes if each != [paths.LEDGER_IDS]]
    assert writes == [[old], [old, topic_path(TOPIC)], [new, topic_path(TOPIC)]], (
        "in recovery, closed and claimed, made"
    )
    assert [each.entries for each in (await bench.list()).ledgers] == [2, -1]


@pytest.mark.parametrize("end", [2, 1])
async def test_an_end_that_another_recoverer_stored_before_the_claim_counts(bench: Bench, end: int) -> None:
    first = await bench.owner()
    first.publish(3)
    await first.settled(3)
    late = Owner(bench)
    bench.owners.append(late)
    await late.log.read_ledger_list()
    await late.log.recover_ledgers()
    ledger_id = first.log.shape.tail_span.ledger_id
    found = await bench.ledger(ledger_id)
    assert found is not None
    assert found.state == IN_RECOVERY, "the claim closes it"
    if end == 2:
        await first.ledgers.recover(ledger_id)
    else:  # of one that found a bookie less, before any of these entries was confirmed
        path = paths.ledger(ledger_id)
        await bench.store.put(path, encode_record(replace(found, state=CLOSED, last_entry=end, length=2), path))
    await late.log.claim_ledger_list()
    await late.log.serve()
    assert await late.all() == [b"0", b"1", b"2"][: end + 1]
    late.publish()
    ((_, _, index),) = await late.settled(1)
    assert index == end + 1
    assert [each.entries for each in (await bench.list()).ledgers] == [end + 1, -1]


async def test_whatever_answers_of_the_metadata_are_lost_a_take_over_ends_with_one_list_and_no_other_ledger(
    bench: Bench
) -> None:
    honest = bench.store
    for published, faults in enumerate(itertools.product(["applied", "dropped", "ok"], repeat=3)):
        owner = Owner(bench)
        owner.publish_through(Forgetful(honest, faults))
        bench.owners.append(owner)
        await owner.log.open()
        owner.publish()
        ((_, position, index),) = await owner.settled(1)
        assert index == published
        listed = (await bench.list()).ledgers
        assert listed[-1].ledger_id == position.ledger_id
        assert await honest.children(paths.LEDGERS) == [f"{each.ledger_id:020d}" for each in listed]
        for each in listed[:-1]:
            record = await bench.ledger(each.ledger_id)
            assert record is not None
            assert (record.state, record.last_entry + 1) == (CLOSED, each.entries)


@pytest.mark.parametrize("step", TAKE_OVER_STEPS, ids=lambda step: step.__name__)
async def test_a_crash_after_any_step_of_a_take_over_leaves_a_topic_that_opens(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    first = await bench.owner()
    first.publish(4)
    await first.settled(4)
    crashing = Owner(bench)
    bench.owners.append(crashing)

    async def crash() -> None:
        await step(crashing.log)
        raise ConnectionAbortedError(step.__name__)

    replaced(monkeypatch, crashing.log, step, crash)
    with pytest.raises(ConnectionAbortedError):
        await crashing.log.open()
    third = await bench.owner()
    third.publish()
    ((_, _, index),) = await third.settled(1)
    assert index == 4
    assert await third.all() == [b"0", b"1", b"2", b"3", b"0"]
    third.log.shape.check()


async def test_a_listed_ledger_that_does_not_exist_is_an_alarm(bench: Bench) -> None:
    first = await bench.owner()
    first.publish(1)
    await first.settled(1)
    await first.ledgers.delete(first.log.shape.tail_span.ledger_id)
    with pytest.raises(DataLost):
        await bench.owner()


async def test_a_list_that_was_read_before_another_owner_removed_a_ledger_is_no_alarm(bench: Bench) -> None:
    first = await bench.owner()
    first.publish()
    await first.settled(1)
    await first.log.roll_ledger()
    late = Owner(bench)
    bench.owners.append(late)
    await late.log.read_ledger_list()
    await bench.owner()  # closes the first one's empty ledger and removes it
    assert await bench.ledger(first.log.shape.tail_span.ledger_id) is None
    with pytest.raises(TopicFenced):
        await late.log.recover_ledgers()


async def test_ledger_ids_of_a_topic_increase_whoever_holds_which_block_of_ids(bench: Bench) -> None:
    early = Owner(bench)
    bench.owners.append(early)
    await (await early.ledgers.create(ensemble_size=1, write_quorum=1, ack_quorum=1)).close()  # holds the low block
    later = await bench.owner()
    later.publish()
    await later.settled(1)
    await early.log.open()
    early.publish()
    await early.settled(1)
    ids = [ledger.ledger_id for ledger in (await bench.list()).ledgers]
    assert ids == sorted(ids)
    assert len(ids) == 2


# ---------------------------------------------------------------------------------------- the next ledger
@pytest.mark.parametrize("replaced", [True, False])
async def test_a_failing_bookie_is_replaced_or_the_tail_moves_to_a_new_ledger_in_order(
    tmp_path: Path, replaced: bool
) -> None:
    async with cluster(tmp_path, bookies=2, brokers=0) as running:
        store = running.store.new_session()
        await store.put(topic_path(TOPIC), encode_record(TopicRecord(), topic_path(TOPIC)))
        bench = Bench(running, store)
        owner = await bench.owner(replace(LEDGER, ensemble_changes_max=int(replaced)))
        owner.publish(10)
        await owner.settled(10)
        tail = owner.log.shape.tail_span.ledger_id
        writing_to = owner.log.ensemble[tail][0]
        dead = next(bookie for bookie in running.bookies if bookie.id == writing_to)
        await dead.close()
        owner.publish(10)
        outcomes = await owner.settled(20)
        assert [outcome[0] for outcome in outcomes] == list(range(20))
        assert all(len(outcome) == 3 for outcome in outcomes), "every entry was confirmed"
        assert ({outcome[1].ledger_id for outcome in outcomes[10:]} == {tail}) is replaced
        assert [outcome[2] for outcome in outcomes] == list(range(20))
        assert writing_to not in owner.log.ensemble[owner.log.shape.tail_span.ledger_id]
        owner.log.abandon(NotOwner("the test is over"))
        await owner.log.close()
        await owner.ledgers.close()
        await store.close()


async def test_what_the_ledger_has_no_room_for_waits_and_follows_in_order(bench: Bench) -> None:
    owner = await bench.owner(replace(LEDGER, pending_entries_max=3), roll_entries=20)
    owner.publish()
    await owner.settled(1)
    owner.publish(49)
    writer = owner.log._appender.writer
    assert writer is not None
    assert (writer.pending_entries, owner.log.pending_entries) == (3, 49)
    outcomes = await owner.settled(50)
    assert [outcome[2] for outcome in outcomes] == list(range(50))
    assert await owner.all() == [b"%d" % number for number in range(50)]
    assert len(owner.log.shape.spans) == 3


async def test_a_ledger_that_ended_while_nothing_was_under_way_is_left_with_the_next_publish(bench: Bench) -> None:
    owner = await bench.owner()
    owner.publish(2)
    await owner.settled(2)
    writer = owner.log._appender.writer
    assert writer is not None
    await writer.close()
    owner.publish(2)
    outcomes = await owner.settled(4)
    assert [outcome[2] for outcome in outcomes] == list(range(4))
    assert len(owner.log.shape.spans) == 2


@replaces_code
async def test_a_ledger_that_is_short_of_a_bookie_ends_at_the_age_of_a_degraded_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await bench.owner(degraded_roll_s=0.001)
    owner.publish()
    await owner.settled(1)
    writer = owner.log._appender.writer
    assert writer is not None
    monkeypatch.setattr(type(writer), "is_short_of_bookies", property(lambda self: self is writer))
    owner.log._appender.timestamp_ms += 10 + AGE_CHECK_INTERVAL_MS
    owner.publish(1)
    await owner.settled(2)
    owner.publish(1)
    await owner.settled(3)
    assert len(owner.log.shape.spans) == 2


@replaces_code
async def test_an_end_that_covers_unconfirmed_entries_confirms_them_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers were lost and the entries are stored: the true end of the ledger tells, and nothing is doubled."""
    owner = await bench.owner()
    owner.publish(3)
    await owner.settled(3)
    writer = owner.log._appender.writer
    assert writer is not None

    push = writer.append_for_listener

    def unanswered(publish: Publish) -> None:
        push(PendingAppendWithFuture(publish.frames, publish.size, asyncio.get_running_loop().create_future()))
        owner.log._appender.on_append_failed(writer)

    monkeypatch.setattr(writer, "append_for_listener", unanswered)
    owner.publish(2)
    await asyncio.sleep(0)
    monkeypatch.undo()
    owner.publish(2)
    outcomes = await owner.settled(7)
    assert [(outcome[0], outcome[2]) for outcome in outcomes] == [(number, number) for number in range(7)]
    assert await owner.all() == [b"%d" % number for number in range(7)]
    assert len(owner.log.shape.spans) == 2
    assert owner.log.shape.spans[0].size == (await bench.list()).ledgers[0].size, "nothing is counted twice"


async def test_a_topic_that_finds_no_new_ledger_gives_up_with_unknown_outcomes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = await bench.owner(roll_entries=3)
    owner.log._config = replace(owner.log._config, reroute_timeout_s=0.5)
    owner.publish()
    await owner.settled(1)

    async def none_left(**_: object) -> None:
        raise NotEnoughBookies("none")

    monkeypatch.setattr(owner.ledgers, "draft_record", none_left)
    told: list[str] = []
    owner.log._managed_ledger.on_ledger_delayed = lambda error: told.append(error.message)
    owner.publish(4)
    outcomes = await owner.settled(5)
    assert [len(outcome) for outcome in outcomes] == [3, 3, 3, 2, 2]
    assert owner.log.state is TopicState.LOST
    assert told == ["none"], "those that wait learn it while they wait, and not at each try"
    assert [error.message for error in owner.lost] == [f"topic {TOPIC}: no new ledger within 0.5 s: none"]
    assert caplog.text.count("no new ledger yet") == 1, "one line for one reason"


async def test_a_fault_in_a_switch_gives_the_topic_up_instead_of_leaving_it_hanging(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await bench.owner(roll_entries=3)

    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(owner.log._managed_ledger, "add_ledger_with_retries", broken)
    owner.publish(5)
    outcomes = await owner.settled(5)
    assert isinstance(outcomes[-1][1], OutcomeUnknown)
    assert owner.log.state is TopicState.LOST
    await owner.log.close()


async def test_a_topic_that_is_lost_during_a_switch_changes_its_list_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await bench.owner(roll_entries=3)
    add, switching, go_on = owner.log._managed_ledger.add_ledger_with_retries, asyncio.Event(), asyncio.Event()

    async def slowly(*given: Any, **named: Any) -> Any:
        switching.set()
        await go_on.wait()
        return await add(*given, **named)

    monkeypatch.setattr(owner.log._managed_ledger, "add_ledger_with_retries", slowly)
    owner.publish(5)
    await switching.wait()
    before = await bench.list()
    owner.log.abandon(NotOwner("the session is lost"))
    go_on.set()
    await owner.log.close()
    assert await bench.list() == before
    assert len(await owner.settled(5)) == 5


@pytest.mark.parametrize("waits", ["turn", "end"])
async def test_a_topic_that_is_lost_while_it_ends_stays_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    owner = await bench.owner()
    owner.publish()
    await owner.settled(1)
    chain, waiting, go_on = owner.log._managed_ledger, asyncio.Event(), asyncio.Event()
    name = "commit_fields" if waits == "turn" else "end_ledger"
    do = getattr(chain, name)

    async def slowly(*given: Any, **named: Any) -> Any:
        waiting.set()
        await go_on.wait()
        return await do(*given, **named)

    monkeypatch.setattr(chain, name, slowly)
    noting = asyncio.ensure_future(owner.log.commit_fields()) if name == "commit_fields" else None
    closing = asyncio.ensure_future(owner.log.close())
    await waiting.wait()
    await asyncio.sleep(0.01)  # until the close waits for its turn
    before = await bench.list()
    owner.log.abandon(NotOwner("an append failed elsewhere"))
    go_on.set()
    with pytest.raises(NotOwner):
        await closing
    if noting is not None:
        await noting
        assert await bench.list() == before, "what is lost changes its list no more"
    assert owner.log.state is TopicState.LOST


async def test_no_switch_begins_while_the_topic_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = await bench.owner(roll_entries=2)
    add, began, go_on = owner.log._managed_ledger.add_ledger_with_retries, asyncio.Event(), asyncio.Event()
    made: list[int] = []

    async def slowly(*given: Any, **named: Any) -> Any:
        began.set()
        await go_on.wait()
        writer, empty = await add(*given, **named)
        made.append(writer.ledger_id)
        return writer, empty

    owner.publish(2)
    await owner.settled(2)
    monkeypatch.setattr(owner.log._managed_ledger, "add_ledger_with_retries", slowly)
    owner.publish(6)
    await began.wait()
    closing = asyncio.ensure_future(owner.log.close())
    await asyncio.sleep(0.01)
    with pytest.raises(NotOwner):
        owner.publish()
    go_on.set()
    await closing
    assert len(made) == 1, "of the entries that wait, the next owner gets what has no room"
    assert len(await owner.settled(8)) == 8
    assert [row.entries >= 0 for row in (await bench.list()).ledgers] == [True] * len((await bench.list()).ledgers)


async def test_closing_during_a_termination_waits_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = await bench.owner()
    owner.publish()
    await owner.settled(1)
    seal, sealing, go_on = owner.log._managed_ledger.commit_closed_last_ledger, asyncio.Event(), asyncio.Event()

    async def slowly(*given: Any, **named: Any) -> None:
        sealing.set()
        await go_on.wait()
        await seal(*given, **named)

    monkeypatch.setattr(owner.log._managed_ledger, "commit_closed_last_ledger", slowly)
    terminating = asyncio.ensure_future(owner.log.terminate())
    await sealing.wait()
    closing = asyncio.ensure_future(owner.log.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    go_on.set()
    assert (await terminating).entry_id == 0
    await closing
    assert owner.log.state is TopicState.CLOSED
    assert (await bench.list()).terminated


async def test_a_clock_that_jumped_ahead_and_back_makes_no_ledger_for_every_publish(bench: Bench) -> None:
    owner = await bench.owner(roll_minutes=60)
    owner.log._appender.timestamp_ms = bench.running.world.clock.wall_ms() + 5 * 3600_000  # where the clock was
    for number in range(1, 11):
        owner.publish()
        await owner.settled(number)
    assert len((await bench.list()).ledgers) <= 2


async def test_a_ledger_ends_at_its_own_share_of_the_age_with_the_next_publish(bench: Bench) -> None:
    owner = await bench.owner(roll_minutes=60)
    owner.publish()
    await owner.settled(1)
    (ledger,) = (await bench.list()).ledgers
    due_ms = ledger.created_ms + int(3600_000 * find_ledger_age_share(TOPIC, ledger.ledger_id))
    for before_ms, ledgers in ((AGE_CHECK_INTERVAL_MS, 1), (-AGE_CHECK_INTERVAL_MS, 2)):
        owner.log._appender.timestamp_ms = due_ms - before_ms
        owner.publish(2)
        await owner.settled(3 if ledgers == 1 else 5)
        assert len((await bench.list()).ledgers) == ledgers


async def test_a_list_that_is_full_grows_only_when_a_ledger_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.broker.log.managed_ledger.LEDGERS_PER_TOPIC_MAX", 3)
    owner = await bench.owner(roll_entries=2)
    owner.publish(20)
    await owner.settled(20)
    assert len((await bench.list()).ledgers) == 3
    assert await owner.all() == [b"%d" % number for number in range(20)]


# ------------------------------------------------------------------------------------ trimming and closing
async def test_trimming_changes_the_list_first_and_deletes_nothing_when_that_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await bench.owner(roll_entries=2)
    for number in range(3):
        owner.publish(2)
        await owner.settled(2 * number + 2)
        await asyncio.sleep(0.1)
    first, second, *_ = (ledger.ledger_id for ledger in (await bench.list()).ledgers)
    assert await owner.log.trim_ledgers(lambda: [first]) == [first]
    assert first not in [ledger.ledger_id for ledger in (await bench.list()).ledgers]
    assert await bench.ledger(first) is None
    assert owner.log.shape.first_index == 2

    async def unknown(*_: object, **__: object) -> None:
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(owner.log._managed_ledger.listed, "change_record", unknown)
    with pytest.raises(OutcomeUnknown):
        await owner.log.trim_ledgers(lambda: [second])
    assert await bench.ledger(second) is not None


async def test_a_fenced_owner_trims_nothing(bench: Bench) -> None:
    owner = await bench.owner(roll_entries=1)
    owner.publish(1)
    await owner.settled(1)
    await asyncio.sleep(0.1)
    (first, *_) = (ledger.ledger_id for ledger in (await bench.list()).ledgers)
    await bench.owner()
    assert await owner.log.trim_ledgers(lambda: [first]) == []
    assert await bench.ledger(first) is not None
    assert owner.log.state is TopicState.LOST


async def test_closing_leaves_closed_ledgers_and_the_next_owner_recovers_nothing(bench: Bench) -> None:
    first = await bench.owner()
    first.publish(3)
    await first.log.close()
    assert [outcome[0] for outcome in first.recorder.outcomes] == [0, 1, 2]
    second = await bench.owner()
    assert second.log._managed_ledger.recovered_ledgers == 0
    assert second.log.shape.end_index == 3
    await second.log.close()
    third = await bench.owner()
    assert third.log.shape.end_index == 3
    assert [span.last_entry for span in third.log.shape.spans] == [2], "empty ledgers do not pile up"


async def test_a_terminated_log_confirms_what_came_before_and_takes_nothing_after(bench: Bench) -> None:
    owner = await bench.owner()
    owner.publish(3)
    assert (await owner.log.terminate()).entry_id == 2
    with pytest.raises(TopicTerminated):
        owner.publish()
    again = await bench.owner()
    assert again.log.state is TopicState.TERMINATED
    assert await again.all() == [b"0", b"1", b"2"]


async def test_an_open_ledger_of_a_dead_owner_is_closed_by_the_take_over(bench: Bench) -> None:
    first = await bench.owner()
    first.publish(1)
    await first.settled(1)
    ledger_id = first.log.shape.tail_span.ledger_id
    before = await bench.ledger(ledger_id)
    assert before is not None
    assert before.state == OPEN
    await bench.owner()
    after = await bench.ledger(ledger_id)
    assert after is not None
    assert (after.state, after.last_entry) == (CLOSED, 0)


# ------------------------------------------------------------------------------------- a ledger that is not written
async def test_an_idle_ledger_ends_without_a_next_one_and_a_crash_then_leaves_nothing_to_recover(bench: Bench) -> None:
    owner = await bench.owner()
    owner.publish(3)
    await owner.settled(3)
    assert owner.log.has_idle_ledger
    await owner.log.close_idle_ledger()
    assert not owner.log.has_idle_ledger
    assert (owner.log._appender.writer, owner.log.ensemble) == (None, {})
    assert owner.log._appender.queue.pending is log_queue_core._NONE
    (row,) = (await bench.list()).ledgers
    assert (row.entries, row.end_index) == (3, 3)
    owner.publish()
    assert (await owner.settled(4))[-1][0] == 3
    await owner.log.close_idle_ledger()
    assert await owner.all() == [b"0", b"1", b"2", b"3"]
    later = await bench.owner()
    assert later.log._managed_ledger.recovered_ledgers == 0
    assert await later.all() == [b"0", b"1", b"2", b"3"]
    owner.publish()
    assert isinstance((await owner.settled(5))[-1][1], OutcomeUnknown), "the former owner finds out"


async def test_an_idle_ledger_without_entries_is_forgotten_when_the_next_one_begins(bench: Bench) -> None:
    owner = await bench.owner()
    owner.publish()
    await owner.settled(1)
    await owner.log.roll_ledger()
    await owner.log.close_idle_ledger()
    empty = (await bench.list()).ledgers[-1]
    assert empty.entries == 0
    owner.publish()
    await owner.settled(2)
    assert [row.entries for row in (await bench.list()).ledgers] == [1, -1]
    assert await bench.ledger(empty.ledger_id) is None
    assert await owner.all() == [b"0", b"1"]


@pytest.mark.parametrize("moment", ["before-the-list", "with-the-list", "after-the-list"])
async def test_a_publish_while_an_idle_ledger_ends_is_stored_in_the_next_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner = await bench.owner()
    owner.publish(2)
    await owner.settled(2)
    chain = owner.log._managed_ledger
    end, commit = chain.end_ledger, chain.commit_closed_last_ledger

    async def ending(*args: Any) -> tuple[int, int]:
        if moment == "before-the-list":
            owner.publish(2)
        return await end(*args)

    async def committing(*args: Any, **options: Any) -> None:
        if moment == "with-the-list":
            owner.publish(2)
        await commit(*args, **options)
        if moment == "after-the-list":
            owner.publish(2)

    monkeypatch.setattr(chain, "end_ledger", ending)
    monkeypatch.setattr(chain, "commit_closed_last_ledger", committing)
    await owner.log.close_idle_ledger()
    assert [outcome[0] for outcome in await owner.settled(4)] == [0, 1, 2, 3]
    assert [row.entries for row in (await bench.list()).ledgers] == [2, -1]
    assert await owner.all() == [b"0", b"1", b"2", b"3"]


async def test_an_idle_ledger_whose_end_is_not_certainly_listed_is_followed_by_the_next_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await bench.owner()
    owner.publish()
    await owner.settled(1)
    chain = owner.log._managed_ledger
    commit = chain.commit_closed_last_ledger

    async def committing(*args: Any, **options: Any) -> None:
        await commit(*args, **options)
        chain.listed.record = replace(
            chain.listed.record, ledgers=(replace(chain.listed.record.ledgers[-1], entries=-1),)
        )
        raise OutcomeUnknown("the answer was lost")

    monkeypatch.setattr(chain, "commit_closed_last_ledger", committing)
    await owner.log.close_idle_ledger()
    assert owner.log.state is TopicState.SERVING
    owner.publish()
    await owner.settled(2)
    assert [row.entries for row in (await bench.list()).ledgers] == [1, -1]
    assert await owner.all() == [b"0", b"1"]


async def test_a_topic_that_another_owner_has_is_lost_when_its_idle_ledger_ends(bench: Bench) -> None:
    first = await bench.owner()
    first.publish()
    await first.settled(1)
    second = await bench.owner()
    await first.log.close_idle_ledger()
    assert first.log.state is TopicState.LOST
    second.publish()
    await second.settled(1)
    assert len(await second.all()) == 2
