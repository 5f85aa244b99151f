"""Schedules on real brokers, on a clock that the test moves: each fire is in the log once, whatever happens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.broker.server import Broker
from magnetar.broker.session import schedules as driver
from magnetar.broker.session.schedules import FIRE_STEPS, ScheduleCatalog, ScheduleRunner, producer_name_of_schedule
from magnetar.metadata import paths
from magnetar.metadata.records import Schedule, ScheduleProgressRecord, SchedulesRecord
from magnetar.metadata.store import NODE_ABSENT, get_record, put_record
from magnetar.proto.entry import decode_batch, parse_header, split_broker_part
from magnetar.proto.errors import (
    AlreadyExists,
    BadVersion,
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    TopicNotFound,
)
from magnetar.proto.names import TopicName
from magnetar.proto.policies import Policies
from tests.broker.topic.test_maintenance import TOPIC, Deployment, deployment

NAME = TopicName.parse(TOPIC)
MINUTE = 60_000


@pytest.fixture
async def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    monkeypatch.setattr(driver, "SCHEDULE_CHECK_INTERVAL_S", 3600.0)  # the test looks
    async with deployment(tmp_path) as at:
        await at.broker.topic_manager.catalog.create_topic(NAME, 0)
        yield at


def schedule(name: str = "s", **fields: Any) -> Schedule:
    form = {} if fields.keys() & {"cron", "at_ms"} else {"every_ms": MINUTE}
    return Schedule(name=name, id="", topic_ms=0, payload=b"fired", **{**form, **fields})


def catalog(at: Deployment) -> ScheduleCatalog:
    return ScheduleCatalog(at.broker.topic_manager)


async def look(broker: Broker) -> ScheduleRunner:
    runner = broker.schedules
    await runner._read_all()
    for each in runner._known.values():
        each.look_s = 0.0
    runner.check_due_schedules()
    await runner._tasks.drain()
    return runner


async def later(at: Deployment, seconds: float) -> None:
    at.clock.ahead_s += seconds
    await look(at.broker)


async def published(at: Deployment, topic: str = TOPIC) -> list[tuple[str, int, bytes]]:
    """What the log has: producer, sequence id and payload of each message."""
    loaded = await at.broker.topic_manager.load_topic(TopicName.parse(topic))
    shape, found = loaded.log.shape, []
    position = shape.position_at_or_after(shape.start_position)
    while shape.has_entry(position):
        for entry in await loaded.log.reader.read(position, 1 << 20):
            part = split_broker_part(entry.payload)[2]
            header = parse_header(part)
            found += [(header.producer_name, header.sequence_id, body) for _, body in decode_batch(header, part)]
            position = shape.position_after(entry.position)
        position = shape.position_at_or_after(position)
    return found


async def fire_times(at: Deployment, name: str = "s", topic: str = TOPIC) -> list[int]:
    return [number for producer, number, _ in await published(at, topic) if producer == producer_name_of_schedule(name)]


async def created_ms(at: Deployment, name: str = "s") -> int:
    return next(each.created_ms for each in await catalog(at).list_stats(NAME) if each.name == name)


async def progress_of(at: Deployment, name: str = "s") -> ScheduleProgressRecord:
    path = paths.schedule_progress(NAME.tenant, NAME.namespace, NAME.local, name)
    found = await get_record(at.broker.topic_manager.metadata, path, ScheduleProgressRecord)
    assert found is not None
    return found[0]


async def another_broker(at: Deployment) -> None:
    """The broker dies as if killed: nothing of it is closed, and another one serves its topics."""
    dead = at.broker
    session = at.running.sessions.pop(at.running.brokers.index(dead))
    at.running.brokers.remove(dead)
    await dead.topic_manager.abandon_all_topics(ConnectionLost("killed"))
    await session.close()
    await dead.close()
    at.broker = await at.running.add_broker()


async def test_a_schedule_fires_when_it_is_due_with_key_and_properties_and_the_time_as_sequence_id(
    at: Deployment,
) -> None:
    await catalog(at).create_schedule(NAME, schedule(key="k", properties={"a": "b"}))
    begin = await created_ms(at)
    await later(at, 59)
    assert await fire_times(at) == []
    await later(at, 2)
    await later(at, 60)
    assert await published(at) == [
        ("schedule/s", begin + MINUTE, b"fired"), ("schedule/s", begin + 2 * MINUTE, b"fired")
    ]  # fmt: skip
    consumer = await at.consumer()
    part = split_broker_part((await consumer.receive()).entry)[2]
    metadata = parse_header(part).metadata
    assert metadata.partition_key == "k"
    assert {each.key: each.value for each in metadata.properties} == {
        "a": "b", driver.SCHEDULE_PROPERTY: "s", driver.FIRE_TIME_PROPERTY: str(begin + MINUTE)
    }  # fmt: skip
    (stats,) = await catalog(at).list_stats(NAME)
    assert (stats.status, stats.fired, stats.last_ms, stats.next_ms) == (
        "waits", 2, begin + 2 * MINUTE, begin + 3 * MINUTE
    )  # fmt: skip


@pytest.mark.parametrize("deduplication", [False, True])
@pytest.mark.parametrize("step", [*FIRE_STEPS, "answer"])
async def test_a_broker_that_dies_at_any_step_leaves_a_fire_once(
    step: str, deduplication: bool, at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`answer`: after the last step, of which the answer was lost."""
    await at.lay_down(deduplication=deduplication)
    await catalog(at).create_schedule(NAME, schedule(missed="all"))
    begin, runner, write, publish = await created_ms(at), at.broker.schedules, ScheduleRunner._write, (
        ScheduleRunner._publish
    )
    await at.later(1)
    dies = ConnectionLost("the broker dies here")

    async def dying_write(self: Any, known: Any, progress: ScheduleProgressRecord, version: int) -> int:
        name = "intend" if progress.firing else "decide"
        if step == name:
            raise dies
        done = await write(self, known, progress, version)
        if step == "answer" and name == "decide":
            raise dies
        return done

    async def dying_publish(self: Any, topic: Any, known: Any, fires: Any) -> None:
        await publish(self, topic, known, fires)
        if step == "publish":
            raise dies

    async def note_nothing(*_: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(ScheduleRunner, "_write", dying_write)
        patch.setattr(ScheduleRunner, "_publish", dying_publish)
        patch.setattr(ScheduleRunner, "_note_problem", note_nothing)
        at.clock.ahead_s += 125
        await look(at.broker)
    assert runner.fired == (0 if step == "intend" else 2)
    await another_broker(at)
    await look(at.broker)
    await look(at.broker)
    assert await fire_times(at) == [begin + MINUTE, begin + 2 * MINUTE]
    progress = await progress_of(at)
    assert (progress.firing, progress.fired, progress.decided_ms) == ((), 2, begin + 2 * MINUTE)


async def test_a_part_of_what_was_intended_is_completed_by_the_next_broker(
    at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await catalog(at).create_schedule(NAME, schedule(missed="all"))
    begin, publish = await created_ms(at), ScheduleRunner._publish

    async def half(self: Any, topic: Any, known: Any, fires: Any) -> None:
        await publish(self, topic, known, fires[:1])
        raise ConnectionLost("the broker dies here")

    with monkeypatch.context() as patch:
        patch.setattr(ScheduleRunner, "_publish", half)
        await later(at, 185)
    producer = await at.producer()
    await producer.send(b"another")
    await another_broker(at)
    await look(at.broker)
    assert await fire_times(at) == [begin + number * MINUTE for number in (1, 2, 3)]


async def test_a_broker_that_has_lost_its_topic_between_intent_and_publish_publishes_nothing(
    at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for so long that another broker has fired, and goes on."""
    await catalog(at).create_schedule(NAME, schedule())
    begin, publish, stopped, goes_on = await created_ms(at), ScheduleRunner._publish, asyncio.Event(), asyncio.Event()

    async def slow(self: Any, topic: Any, known: Any, fires: Any) -> None:
        stopped.set()
        await goes_on.wait()
        await publish(self, topic, known, fires)

    with monkeypatch.context() as patch:
        patch.setattr(ScheduleRunner, "_publish", slow)
        at.clock.ahead_s += 61
        await at.broker.schedules._read_all()
        at.broker.schedules.check_due_schedules()
        await stopped.wait()
    first = at.broker
    at.broker = await at.running.add_broker()
    await first.topic_manager.drain_broker()
    await look(at.broker)
    assert await fire_times(at) == [begin + MINUTE]
    goes_on.set()
    await first.schedules._tasks.drain()
    assert first.schedules.fired == 0
    assert await fire_times(at) == [begin + MINUTE]
    assert (await progress_of(at)).fired == 1


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("last", 1), ("all", 4)])
async def test_what_no_broker_fired_in_time_is_dropped_or_made_up_for(
    missed: str, count: int, at: Deployment
) -> None:
    await catalog(at).create_schedule(NAME, schedule(every_ms=10 * MINUTE, missed=missed))
    begin = await created_ms(at)
    await later(at, 45 * 60)
    assert await fire_times(at) == [begin + number * 10 * MINUTE for number in (1, 2, 3, 4)][4 - count :]
    (stats,) = await catalog(at).list_stats(NAME)
    assert (stats.fired, stats.dropped, stats.next_ms) == (count, 4 - count, begin + 50 * MINUTE)


async def test_a_clock_that_jumps_ahead_and_back_fires_nothing_twice(at: Deployment) -> None:
    await catalog(at).create_schedule(NAME, schedule())
    begin = await created_ms(at)
    await later(at, 61)
    await later(at, 3600)
    wrong = await fire_times(at)
    await later(at, -3600)
    await later(at, 60)
    assert await fire_times(at) == wrong
    (stats,) = await catalog(at).list_stats(NAME)
    assert "clock was ahead" in stats.status
    await later(at, 3600)
    assert len(await fire_times(at)) == len(set(await fire_times(at))) > len(wrong)
    assert begin > 0


async def test_a_schedule_is_deleted_with_its_topic_and_one_made_anew_has_none(at: Deployment) -> None:
    await catalog(at).create_schedule(NAME, schedule())
    await later(at, 61)
    metadata = at.broker.topic_manager.metadata
    path = paths.schedules(NAME.tenant, NAME.namespace, NAME.local)
    stored = await get_record(metadata, path, SchedulesRecord)
    assert stored is not None
    await at.broker.topic_manager.delete_topic(NAME, force=True)
    assert await get_record(metadata, path, SchedulesRecord) is None
    assert await metadata.children(paths.schedule_progress_of_topic(NAME.tenant, NAME.namespace, NAME.local)) == []
    with pytest.raises(TopicNotFound):
        await catalog(at).list_stats(NAME)
    at.clock.ahead_s += 1
    await at.broker.topic_manager.catalog.create_topic(NAME, 0)
    await put_record(metadata, path, stored[0], NODE_ABSENT)  # as a broker leaves it that does not know schedules
    await later(at, 300)
    assert await fire_times(at) == []
    (stats,) = await catalog(at).list_stats(NAME)
    assert "made anew" in stats.status
    await catalog(at).create_schedule(NAME, schedule())
    assert [each.status for each in await catalog(at).list_stats(NAME)] == ["waits"]


@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "anew"])
async def test_a_broker_that_does_not_know_yet_that_a_schedule_is_gone_fires_nothing_again(
    at: Deployment, anew: bool
) -> None:
    await catalog(at).create_schedule(NAME, schedule(missed="all"))
    for _ in range(3):
        await later(at, 60)
    before = await fire_times(at)
    assert len(before) == 3
    runner = at.broker.schedules
    ((key, known),) = runner._known.items()
    await catalog(at).delete_schedule(NAME, "s")
    if anew:
        await catalog(at).create_schedule(NAME, schedule(every_ms=60 * MINUTE))
    at.clock.ahead_s += 60
    await runner._look(key, known)
    assert await fire_times(at) == before
    metadata = at.broker.topic_manager.metadata
    path = paths.schedule_progress("public", "default", NAME.local, "s")
    assert await get_record(metadata, path, ScheduleProgressRecord) is None


async def test_a_paused_schedule_does_not_fire_and_makes_up_for_nothing(at: Deployment) -> None:
    await catalog(at).create_schedule(NAME, schedule(missed="all"))
    begin = await created_ms(at)
    await catalog(at).pause_schedule(NAME, "s", paused=True)
    await later(at, 185)
    assert await fire_times(at) == []
    assert [each.status for each in await catalog(at).list_stats(NAME)] == ["paused"]
    await catalog(at).pause_schedule(NAME, "s", paused=False)
    await later(at, 1)
    await later(at, 60)
    assert await fire_times(at) == [begin + 4 * MINUTE]


async def test_run_now_publishes_once_and_disturbs_no_fire(at: Deployment) -> None:
    await at.lay_down(deduplication=True)
    await catalog(at).create_schedule(NAME, schedule())
    begin = await created_ms(at)
    at.clock.ahead_s += 70
    await catalog(at).run_schedule_now(NAME, "s")
    await look(at.broker)
    assert [producer for producer, _, _ in await published(at)] == ["schedule/s/now", "schedule/s"]
    assert await fire_times(at) == [begin + MINUTE]


async def test_a_schedule_that_cannot_fire_says_why_and_fires_when_it_can(at: Deployment) -> None:
    await catalog(at).create_schedule(NAME, schedule())
    begin, consumer = await created_ms(at), await at.consumer()
    await at.lay_down(backlog_quota_bytes=1, backlog_quota_policy="producer_exception")
    await (await at.producer()).send(b"fills the quota")
    await at.later(1)
    await later(at, 61)
    (stats,) = await catalog(at).list_stats(NAME)
    assert stats.status.startswith("cannot fire: ")
    assert await fire_times(at) == []
    await consumer.ack(await consumer.receive())
    await at.lay_down(backlog_quota_bytes=0)
    await at.later(1)
    await later(at, 10)
    assert await fire_times(at) == [begin + MINUTE]
    assert [each.status for each in await catalog(at).list_stats(NAME)] == ["waits"]


async def test_why_a_schedule_does_not_fire_is_logged_once_for_each_reason(
    at: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    await catalog(at).create_schedule(NAME, schedule())
    await at.consumer()
    await at.topic.log.terminate()
    for _ in range(3):
        await later(at, 61)
    logged = [each.getMessage() for each in caplog.records if "does not fire" in each.getMessage()]
    assert len(logged) == 1
    assert "terminated" in logged[0]


async def test_of_a_partitioned_topic_a_schedule_has_the_partition_of_its_key(at: Deployment) -> None:
    parted = TopicName.parse(f"{TOPIC}-parted")
    await at.broker.topic_manager.catalog.create_topic(parted, 3)
    await catalog(at).create_schedule(parted, schedule(key="k"))
    await later(at, 61)
    counts = [len(await fire_times(at, topic=parted.with_partition(number).full)) for number in range(3)]
    assert sorted(counts) == [0, 0, 1]
    with pytest.raises(NotAllowed):
        await catalog(at).create_schedule(parted.with_partition(0), schedule())


async def test_two_brokers_share_the_schedules_and_none_fires_twice(at: Deployment) -> None:
    other = await at.running.add_broker()
    names = [TopicName.parse(f"{TOPIC}-{number}") for number in range(6)]
    for each in names:
        await at.broker.topic_manager.catalog.create_topic(each, 0)
        await catalog(at).create_schedule(each, schedule())
    for _ in range(3):
        at.clock.ahead_s += 61
        await asyncio.gather(look(at.broker), look(other))
    assert at.broker.schedules.fired + other.schedules.fired == 18


async def test_wrong_schedules_are_refused_before_anything_is_stored(at: Deployment) -> None:
    here = catalog(at)
    for wrong in (
        schedule(name=""), schedule(name="a/b"), schedule(name="x" * 101), schedule(cron="0 0 30 2 *"),
        schedule(cron="* * * * *", zone="nowhere"), schedule(properties={"": "x"}),
        msgspec.structs.replace(schedule(), payload=bytes(driver.PAYLOAD_BYTES_MAX + 1)),
    ):  # fmt: skip
        with pytest.raises((InvalidRequest, MagnetarError)):
            await here.create_schedule(NAME, wrong)
    assert await here.list_stats(NAME) == []
    await here.create_schedule(NAME, schedule())
    with pytest.raises(AlreadyExists):
        await here.create_schedule(NAME, schedule())
    for act in (
        here.delete_schedule(NAME, "none"),
        here.pause_schedule(NAME, "none", paused=True),
        here.run_schedule_now(NAME, "none"),
    ):
        with pytest.raises(NotFound):
            await act
    await here.delete_schedule(NAME, "s")
    await later(at, 120)
    assert await fire_times(at) == []


async def test_a_namespace_has_a_bounded_number_of_schedules(
    at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "SCHEDULES_MAX", 3)
    other = TopicName.parse(f"{TOPIC}-other")
    await at.broker.topic_manager.catalog.create_topic(other, 0)
    for topic, name in ((NAME, "a"), (NAME, "b"), (other, "c")):
        await catalog(at).create_schedule(topic, schedule(name))
    for topic in (NAME, other):
        with pytest.raises(NotAllowed, match="3 schedules"):
            await catalog(at).create_schedule(topic, schedule("d"))


async def test_times_whose_part_of_the_log_was_trimmed_count_as_published(
    at: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await catalog(at).create_schedule(NAME, schedule())
    publish = ScheduleRunner._publish

    async def dying(self: Any, topic: Any, known: Any, fires: Any) -> None:
        await publish(self, topic, known, fires)
        raise ConnectionLost("the broker dies here")

    with monkeypatch.context() as patch:
        patch.setattr(ScheduleRunner, "_publish", dying)
        await later(at, 61)
    await at.broker.topic_manager.policies.change_policies(
        NAME.namespace_name, NAME, Policies(unsubscribed_minutes=0, unsubscribed_mib=0)
    )
    loaded = at.broker.topics[TOPIC]
    await loaded.truncate_topic()
    assert loaded.log.shape.first_index > 0
    known = next(iter(at.broker.schedules._known.values()))
    known.absent = None
    await look(at.broker)
    assert (await progress_of(at)).fired == 1
    assert await fire_times(at) == []


async def test_a_second_runner_with_an_old_version_of_the_record_does_nothing_more(at: Deployment) -> None:
    await catalog(at).create_schedule(NAME, schedule())
    runner = await look(at.broker)
    known = next(iter(runner._known.values()))
    progress, version, _ = await driver._read_progress(at.broker.topic_manager, NAME, known.schedule)
    await runner._write(known, progress, version)
    with pytest.raises(BadVersion):
        await runner._write(known, progress, version)
