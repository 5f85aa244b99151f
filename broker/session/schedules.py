"""Schedules: messages that are published at set times, by the broker that owns their topic.

    await ScheduleCatalog(broker).create_schedule(topic, schedule)    at any broker: records of the metadata
    ScheduleRunner(broker)                                            one for each broker: fires what is due

A schedule is in the record of its topic's schedules, and how far it has come in a record of its own. When it fires is
decided in schedules_core.py. **Each fire is in the log once**, with deduplication or without it, whatever dies:

    FIRE    intend    store the times that are due, and where the log ends; by compare-and-set
            publish   a message for each, in order, as the producer `schedule/NAME`; its sequence id is the time in ms
            decide    store that these times are done, by compare-and-set

- A fire is published through the loaded topic from which the end of the log was taken, and through no other. When
  another broker has the topic, that one's log is fenced: what its owner had on its way is in the log, or never will be.
- Who finds times that are intended and not decided reads the log from the stored end on, and publishes what is missing.
  If that part of the log was trimmed meanwhile, the times count as published.
- A compare-and-set that fails means that another broker runs the schedule: nothing more is done here.
- How far a schedule has come is first stored in a commit that fails if the schedule is gone: a broker that does not
  know yet that it was deleted, with the record of its progress, fires nothing again.
- A schedule belongs to one incarnation of its topic, and is deleted in the same commit as the topic's record.

Of a partitioned topic a schedule has one partition: that of its key, or of its name. A schedule that cannot fire is
tried again, and its record says why (`problem`); times that are missed meanwhile are dropped or made up for, as it
says. Each broker knows all schedules from a watch, and when one that is not its own is due it asks for the owner.
Guarding tests: tests/broker/session/test_schedules.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ...metadata import paths
from ...metadata.records import Schedule, ScheduleProgressRecord, SchedulesRecord
from ...metadata.store import (
    NODE_ABSENT,
    CheckNodeVersion,
    DeleteNode,
    WatchReset,
    get_readable_record,
    get_record,
    make_put_operation,
    update_record,
)
from ...proto.entry import encode_entry, parse_header, split_broker_part
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import (
    AlreadyExists,
    BadVersion,
    InvalidRequest,
    MagnetarError,
    NodeExists,
    NotAllowed,
    NotFound,
    NotOwner,
)
from ...proto.names import NamespaceName, Position, TopicName, check_producer_name, choose_partition_of_key
from ...proto.policies import check_properties
from ...runtime.network import CallContext
from ...runtime.tasks import Tasks
from .producer import ProducerOptions, ProducerSession
from .schedules_core import check_schedule, decide_fires, next_fire_ms

if TYPE_CHECKING:
    from ...proto.statistics import ScheduleStats
    from ..node.topic_manager import TopicManager
    from ..topic.topic import Topic

_LOG = logging.getLogger("magnetar.broker.schedules")

FIRE_STEPS = ("intend", "publish", "decide")
SCHEDULE_CHECK_INTERVAL_S = 0.5
"""Seconds between two looks at what is due: a fire is that late at most, if nothing is slow."""
SCHEDULE_RECHECK_S_MIN = 30.0
"""Seconds until a broker asks again whether a schedule has become its own, unless its topic is loaded here before."""
SCHEDULE_RECHECK_S_MAX = 3600.0
"""… and when its next fire is later than that: the time of day may jump."""
SCHEDULE_RETRY_S = 5.0
FIRES_AT_ONCE = 16
"""Most schedules that a broker handles at a time."""
SCHEDULES_MAX = 1000
"""Most schedules of a namespace: each is a record that is read and written when it fires."""
PAYLOAD_BYTES_MAX = 64 << 10
"""Largest payload of a schedule, in bytes."""
TOPIC_BYTES_MAX = 512 << 10
"""Most bytes of the payloads, keys and properties of a topic's schedules together: they are in one record."""
LOG_READ_BYTES = 1 << 20
SCHEDULE_PROPERTY, FIRE_TIME_PROPERTY = "magnetar.schedule", "magnetar.fire_time"
"""Properties of each message of a schedule: its name, and the time for which it was published (ms since the epoch)."""


def producer_name_of_schedule(name: str) -> str:
    """Returns the name of the producer that publishes the messages of the schedule `name`."""
    return f"schedule/{name}"


# ------------------------------------------------------------------------------------------------------- catalog


class ScheduleCatalog:
    """The schedules of topics, in the metadata. Any broker may change them. The brokers that fire them see each change
    by a watch (`ScheduleRunner.follow_schedules`). A method that reads or changes the metadata also raises the errors
    of the metadata."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def create_schedule(self, topic: TopicName, schedule: Schedule) -> None:
        """Creates a schedule of a topic; its id, its times and the incarnation of its topic are set here. Raises
        InvalidRequest if the schedule is invalid, would never fire, or is too large; TopicNotFound if the topic does
        not exist; AlreadyExists if the topic has a schedule of that name. Raises NotAllowed if the namespace has
        SCHEDULES_MAX schedules, those of the topic have more than TOPIC_BYTES_MAX bytes, or `topic` is a partition or
        is not persistent. Raises the errors of the metadata, too."""
        if not topic.persistent or topic.is_partition:
            raise NotAllowed(f"{topic} has no schedules: a persistent topic has, and no single partition")
        _check(schedule)
        now_ms = self._broker.world.clock.wall_ms()
        check_schedule(schedule, now_ms)
        made = msgspec.structs.replace(
            schedule, id=self._broker.world.rng.randbytes(8).hex(), topic_ms=await self._incarnation(topic),
            created_ms=now_ms, since_ms=now_ms,
        )  # fmt: skip
        others = await self._count(topic.namespace_name, topic)

        def changed(record: SchedulesRecord | None) -> SchedulesRecord | None:
            there = [each for each in (record.schedules if record else ()) if each.topic_ms == made.topic_ms]
            same = next((each for each in there if each.name == made.name), None)
            if same is not None:
                if same.id == made.id:
                    return None  # written by an attempt of which the outcome was unknown
                raise AlreadyExists(f"topic {topic} has a schedule {made.name!r} already", topic=topic)
            if others + len(there) >= SCHEDULES_MAX:
                raise NotAllowed(f"{topic.namespace_name} has {SCHEDULES_MAX} schedules, the most of a namespace")
            if sum(map(_size, there)) + _size(made) > TOPIC_BYTES_MAX:
                raise NotAllowed(f"the schedules of topic {topic} have {TOPIC_BYTES_MAX} bytes at most")
            return SchedulesRecord(schedules=(*there, made))

        await update_record(self._broker.metadata, _path(topic), SchedulesRecord, changed)

    async def delete_schedule(self, topic: TopicName, name: str) -> None:
        """Deletes a schedule and its progress. A fire that has begun may still be published. Raises NotFound if the
        topic has no such schedule. Raises the errors of the metadata, too."""

        def changed(record: SchedulesRecord | None) -> SchedulesRecord | None:
            _find(topic, record, name)
            assert record is not None
            return SchedulesRecord(schedules=tuple(each for each in record.schedules if each.name != name))

        await update_record(self._broker.metadata, _path(topic), SchedulesRecord, changed)
        await self._broker.metadata.commit([DeleteNode(_progress_path(topic, name))])

    async def pause_schedule(self, topic: TopicName, name: str, *, paused: bool) -> None:
        """Pauses a schedule, or ends its pause if `paused` is False. Fires that were due during the pause are dropped.
        Does nothing if the schedule is in that state. Raises NotFound if the topic has no such schedule. Raises the
        errors of the metadata, too."""
        now_ms = self._broker.world.clock.wall_ms()

        def changed(record: SchedulesRecord | None) -> SchedulesRecord | None:
            found = _find(topic, record, name)
            assert record is not None
            if found.is_paused == paused:
                return None
            since_ms = found.since_ms if paused else max(found.since_ms, now_ms)
            new = msgspec.structs.replace(found, is_paused=paused, since_ms=since_ms)
            return SchedulesRecord(schedules=tuple(new if each is found else each for each in record.schedules))

        await update_record(self._broker.metadata, _path(topic), SchedulesRecord, changed)

    async def run_schedule_now(self, topic: TopicName, name: str) -> None:
        """Publishes the message of a schedule once, now, even if the schedule is paused. Its regular fires are not
        changed. Raises NotFound if the topic has no such schedule, TopicNotFound if the topic does not exist, and the
        errors of `InternalProducer.publish_messages`. After such an error it is unknown whether the message was
        published."""
        record = await get_record(self._broker.metadata, _path(topic), SchedulesRecord)
        schedule = _find(topic, record[0] if record else None, name)
        partitions = await self._broker.catalog.count_existing_partitions(topic)
        target = choose_schedule_target(topic, schedule, partitions)
        now_ms, producer = self._broker.world.clock.wall_ms(), f"{producer_name_of_schedule(name)}/now"
        entry = make_scheduled_message(schedule, producer, now_ms, now_ms)
        await self._broker.internal_producer.publish_messages(target, producer, [entry], 0)

    async def list_stats(self, topic: TopicName) -> list[ScheduleStats]:
        """Returns the schedules of a topic, sorted by name, each with its progress and its state. Raises TopicNotFound
        if the topic does not exist. Raises the errors of the metadata, too."""
        found = await get_record(self._broker.metadata, _path(topic), SchedulesRecord)
        now_ms = self._broker.world.clock.wall_ms()
        made: list[ScheduleStats] = []
        incarnation = await self._incarnation(topic)
        for each in sorted(found[0].schedules if found else (), key=lambda one: one.name):
            progress = await _read_progress(self._broker, topic, each)
            made.append(_describe(each, progress[0], now_ms, stale=each.topic_ms != incarnation))
        return made

    async def _incarnation(self, topic: TopicName) -> int:
        """Returns when the topic was created. Raises TopicNotFound."""
        catalog = self._broker.catalog
        if await catalog.count_existing_partitions(topic):
            record = await catalog.get_partitioned_record(topic)
            return record.created_ms if record is not None else 0
        return await catalog.read_created_ms(topic)

    async def _count(self, namespace: NamespaceName, but: TopicName) -> int:
        """Returns how many schedules the topics of the namespace have, other than the topic `but`."""
        found, store = 0, self._broker.metadata
        for each in await store.children(paths.schedules_of_namespace(namespace.tenant, namespace.namespace)):
            name = paths.decode_segment(each)
            if name != but.local:
                path = paths.schedules(namespace.tenant, namespace.namespace, name)
                record = await get_readable_record(store, path, SchedulesRecord)
                found += len(record[0].schedules) if record is not None else 0
        return found


def _check(schedule: Schedule) -> None:
    """Raises InvalidRequest or InvalidName if the schedule has a wrong name, or is too large."""
    if not schedule.name or "/" in schedule.name or len(schedule.name) > 100:
        raise InvalidRequest(f"a schedule has a name of 1 to 100 characters without '/', not {schedule.name[:120]!r}")
    check_producer_name(producer_name_of_schedule(schedule.name))
    if len(schedule.payload) > PAYLOAD_BYTES_MAX:
        raise InvalidRequest(f"the payload of a schedule has {PAYLOAD_BYTES_MAX} bytes at most")
    check_properties(schedule.properties)


def _size(schedule: Schedule) -> int:
    texts = (schedule.key or "", *schedule.properties, *schedule.properties.values())
    return len(schedule.payload) + sum(len(each.encode()) for each in texts) + 200


def _find(topic: TopicName, record: SchedulesRecord | None, name: str) -> Schedule:
    found = next((each for each in (record.schedules if record else ()) if each.name == name), None)
    if found is None:
        raise NotFound(f"topic {topic} has no schedule {name[:120]!r}")
    return found


def _path(topic: TopicName) -> str:
    return paths.schedules(topic.tenant, topic.namespace, topic.local)


def _progress_path(topic: TopicName, name: str) -> str:
    return paths.schedule_progress(topic.tenant, topic.namespace, topic.local, name)


async def _read_progress(
    broker: TopicManager, topic: TopicName, schedule: Schedule
) -> tuple[ScheduleProgressRecord, int, bool]:
    """Returns how far the schedule has come, the version of the record at its path (NODE_ABSENT: there is none), and
    whether that is not its own record: none was stored yet, or it was deleted with the schedule."""
    found = await get_record(broker.metadata, _progress_path(topic, schedule.name), ScheduleProgressRecord)
    if found is not None and found[0].id == schedule.id:
        return *found, False
    fresh = ScheduleProgressRecord(id=schedule.id, decided_ms=schedule.since_ms)
    return fresh, NODE_ABSENT if found is None else found[1], True


def _describe(schedule: Schedule, progress: ScheduleProgressRecord, now_ms: int, *, stale: bool) -> ScheduleStats:
    from ...proto.statistics import ScheduleStats  # an operator asks, so it is loaded

    last_ms = max(progress.decided_ms, schedule.since_ms)
    next_ms = None if schedule.is_paused or stale else next_fire_ms(schedule, last_ms)
    if stale:
        status = "its topic was deleted and made anew: it does not fire"
    elif schedule.is_paused:
        status = "paused"
    elif progress.problem:
        status = f"cannot fire: {progress.problem}"
    elif next_ms is None:
        status = "done"
    elif progress.decided_ms > now_ms + 60_000:
        status = "waits: a broker's clock was ahead when it fired last"
    elif progress.firing or next_ms + 60_000 < now_ms:
        status = "due: no broker has fired it yet"
    else:
        status = "waits"
    return ScheduleStats(
        schedule.name, schedule.cron, schedule.every_ms, schedule.at_ms, schedule.zone, schedule.payload,
        schedule.key or "", dict(schedule.properties), schedule.missed, status, schedule.is_paused, schedule.created_ms,
        next_ms or 0, progress.decided_ms if progress.fired else 0, progress.fired, progress.dropped,
    )  # fmt: skip


def choose_schedule_target(topic: TopicName, schedule: Schedule, partitions: int) -> TopicName:
    """Returns the topic or partition to which the schedule publishes. `partitions`: the number of partitions of
    `topic`; 0: it is not partitioned."""
    if not partitions:
        return topic
    return topic.with_partition(choose_partition_of_key(schedule.key or schedule.name, partitions))


def make_scheduled_message(schedule: Schedule, producer: str, fire_ms: int, now_ms: int) -> bytes:
    """Returns the message of the schedule for the time `fire_ms`, as a client-part. `producer`: the name of its
    producer; the sequence id is `fire_ms`. `now_ms`: the publish time. Both times are ms since the epoch."""
    metadata = MessageMetadata(producer_name=producer, sequence_id=fire_ms, publish_time=now_ms)
    if schedule.key is not None:
        metadata.partition_key = schedule.key
    for key, value in {
        **schedule.properties,
        SCHEDULE_PROPERTY: schedule.name,
        FIRE_TIME_PROPERTY: str(fire_ms),
    }.items():
        metadata.properties.add(key=key, value=value)
    return encode_entry(metadata, schedule.payload)


# -------------------------------------------------------------------------------------------------------- runner


class _Publishing:
    """The port of the producer of one look: the outcome of the entry that was published last."""

    def __init__(self) -> None:
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_outcome(self) -> None:
        """Waits until the entry is stored; raises the error with which it failed."""
        await self._outcome
        self._outcome = asyncio.get_running_loop().create_future()

    def _end(self, error: MagnetarError | None) -> None:
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)
            self._outcome.exception()  # marks it as retrieved: it may be that nothing waits any more

    def send_receipt(self, sequence_id: int, position: Position, index: int) -> None:
        self._end(None)

    def send_provisional_receipt(self, sequence_id: int) -> None:
        """Does nothing: a schedule waits for the quorum."""

    def on_duplicate(self, sequence_id: int) -> None:
        self._end(None)

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        self._end(error)

    def on_closed(self, error: MagnetarError) -> None:
        self._end(error)

    def on_publish_waiting(self, error: MagnetarError) -> None: ...
    def grant_credit(self, size: int) -> None: ...


class _Known(msgspec.Struct, eq=False):
    """A schedule, as this broker knows it. `look_s`: when it is looked at next, on the monotonic clock; `mine`: whether
    this broker owned its topic at the last look; `seen`: the topic that was loaded here then; `problem`: why it does
    not fire, as it was logged last; `absent`: the loaded topic in whose log none of the intended times is, because it
    was searched, or a publish through it has failed for certain; `is_new`: no record of its progress is stored."""

    topic: TopicName
    schedule: Schedule
    look_s: float = 0.0
    mine: bool = False
    next_ms: int | None = None
    target: str = ""
    seen: Topic | None = None
    problem: str = ""
    absent: Topic | None = None
    is_new: bool = False


class ScheduleRunner:
    """Fires the schedules of those topics that this broker owns. A broker has one, and runs `run` and
    `follow_schedules` in two tasks for as long as it runs. `fired`: the messages that this broker has published."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._known: dict[tuple[str, str], _Known] = {}  # by path of the topic's schedules, and name
        self._busy: set[tuple[str, str]] = set()
        self._tasks = Tasks()
        self.fired = 0  # messages, by this broker

    # ------------------------------------------------------------------ which schedules there are
    async def follow_schedules(self) -> None:
        """Keeps the list of schedules current, by a watch of the metadata, until it is cancelled. While the metadata
        cannot be read, the list stays as it is; the error is logged, and the next attempt follows after a second."""
        while True:
            try:
                if self._broker.has_session:
                    store = self._broker.metadata
                    revision = await store.revision()
                    await self._read_all()
                    async for event in store.watch(paths.SCHEDULES, revision):
                        if isinstance(event, WatchReset):
                            await self._read_all()
                        else:
                            await self._read(event.path)
            except MagnetarError as error:
                _LOG.info("schedules are those that were known until they can be read: %s", error)
            await asyncio.sleep(1.0)

    async def _read_all(self) -> None:
        store, seen = self._broker.metadata, set[str]()
        for tenant in await store.children(paths.SCHEDULES):
            for namespace in await store.children(f"{paths.SCHEDULES}/{tenant}"):
                for topic in await store.children(f"{paths.SCHEDULES}/{tenant}/{namespace}"):
                    seen.add(f"{paths.SCHEDULES}/{tenant}/{namespace}/{topic}")
        for path in seen | {path for path, _ in self._known}:
            await self._read(path)

    async def _read(self, path: str) -> None:
        """Reads the schedules of a topic. Those that have not changed keep what is known of them."""
        parts = [paths.decode_segment(each) for each in path.removeprefix(paths.SCHEDULES).strip("/").split("/")]
        if len(parts) != 3:
            return
        found = await get_readable_record(self._broker.metadata, path, SchedulesRecord)
        now = {each.name: each for each in found[0].schedules} if found is not None else {}
        for key in [key for key in self._known if key[0] == path and key[1] not in now]:
            del self._known[key]
        for name, schedule in now.items():
            known = self._known.get((path, name))
            if known is None or known.schedule != schedule:
                self._known[path, name] = _Known(TopicName(parts[0], parts[1], parts[2]), schedule)

    # ------------------------------------------------------------------ looking
    async def run(self) -> None:
        """Calls `check_due_schedules` each SCHEDULE_CHECK_INTERVAL_S seconds, until it is cancelled. Then cancels the
        fires in progress."""
        try:
            while True:
                self.check_due_schedules()
                await asyncio.sleep(SCHEDULE_CHECK_INTERVAL_S)
        finally:
            await self._tasks.close()
            self._tasks = Tasks()

    def check_due_schedules(self) -> None:
        """Starts a task for each schedule that may be due at this broker, unless FIRES_AT_ONCE of these tasks run
        already. Does nothing while the broker has no metadata session."""
        if not self._broker.has_session:
            return
        now_s, now_ms = self._broker.world.clock.monotonic(), self._broker.world.clock.wall_ms()
        for key, known in self._known.items():
            if len(self._busy) >= FIRES_AT_ONCE:
                return
            loaded = self._broker.loaded.get(known.target)
            gained = not known.mine and loaded is not None and loaded is not known.seen
            due = known.mine and known.next_ms is not None and known.next_ms <= now_ms
            if key not in self._busy and ((known.look_s <= now_s and (due or not known.mine)) or gained):
                self._busy.add(key)
                self._tasks.spawn(self._look(key, known), f"schedule {known.schedule.name}")

    async def _look(self, key: tuple[str, str], known: _Known) -> None:
        try:
            await self._fire_due(known)
            known.problem = ""
        except BadVersion:
            known.look_s, known.mine = 0.0, False  # another broker runs it, or did until now
        except NotOwner:
            known.look_s, known.mine = self._in(SCHEDULE_RETRY_S), False
        except MagnetarError as error:
            known.look_s, known.mine = self._in(SCHEDULE_RETRY_S), False
            if known.problem != error.message:  # it is tried again each SCHEDULE_RETRY_S
                _LOG.warning("%s: schedule %r does not fire: %s", known.topic, known.schedule.name, error)
            known.problem = error.message
            with suppress(MagnetarError):
                await self._note_problem(known, error)
        finally:
            self._busy.discard(key)

    def _in(self, seconds: float) -> float:
        return self._broker.world.clock.monotonic() + seconds

    async def _note_problem(self, known: _Known, error: MagnetarError) -> None:
        progress, version, known.is_new = await _read_progress(self._broker, known.topic, known.schedule)
        if progress.problem != error.message:
            await self._write(known, msgspec.structs.replace(progress, problem=error.message), version)

    async def _write(self, known: _Known, progress: ScheduleProgressRecord, version: int) -> int:
        path = _progress_path(known.topic, known.schedule.name)
        put = make_put_operation(path, progress, version)
        checks = [await self._make_existence_check(known)] if known.is_new else []
        try:
            found = (await self._broker.metadata.commit([put, *checks]))[0]
        except NodeExists as error:
            raise BadVersion(f"schedule {known.schedule.name!r} is run by another broker") from error
        known.is_new = False
        return found

    async def _make_existence_check(self, known: _Known) -> CheckNodeVersion:
        """Returns the operation that lets a commit fail if the schedule does not exist any more. Raises BadVersion if
        it does not now."""
        path = _path(known.topic)
        found = await get_record(self._broker.metadata, path, SchedulesRecord)
        if found is None or all(each.id != known.schedule.id for each in found[0].schedules):
            raise BadVersion(f"schedule {known.schedule.name!r} was deleted")
        return CheckNodeVersion(path, found[1])

    # ------------------------------------------------------------------ firing
    async def _fire_due(self, known: _Known) -> None:
        """Fires what is due, if this broker owns the topic or partition."""
        broker, schedule = self._broker, known.schedule
        progress, version, known.is_new = await _read_progress(broker, known.topic, schedule)
        partitions = await broker.catalog.count_existing_partitions(known.topic)
        target = choose_schedule_target(known.topic, schedule, partitions)
        if progress.firing and progress.partition >= 0:
            target = known.topic.with_partition(progress.partition)
        known.target, known.seen, known.mine = target.full, broker.loaded.get(target.full), False
        known.look_s = self._in(self._recheck_s(schedule, progress))
        if schedule.is_paused and not progress.firing:
            return
        if (await broker.find_owner(target)).name != broker.name:
            return
        topic = known.seen = await broker.load_topic(target, create=False)
        if await self._is_stale(known, topic, partitioned=partitions > 0):
            return
        if not progress.firing:
            last_ms = max(progress.decided_ms, schedule.since_ms)
            due = decide_fires(schedule, last_ms, broker.world.clock.wall_ms())
            known.absent, dropped = None, progress.dropped + due.missed
            if not due.fires:
                if due.missed:
                    progress = msgspec.structs.replace(progress, decided_ms=due.decided_ms, dropped=dropped)
                    await self._write(known, progress, version)
                known.mine, known.next_ms, known.look_s = True, due.next_ms, 0.0
                return
            last = topic.log.shape.last_position
            progress = msgspec.structs.replace(
                progress, firing=due.fires, dropped=dropped, partition=target.partition, last_ledger=last[0],
                last_entry=last[1], log_end=topic.log.shape.end_index,
            )  # fmt: skip
            version = await self._write(known, progress, version)
            known.absent = topic  # nothing of it was given to the log
        missing = progress.firing
        if known.absent is not topic:
            missing = await self._find_missing(topic, known, progress)
            known.absent = topic
        if missing:
            await self._publish(topic, known, missing)
        decided = msgspec.structs.replace(
            progress, decided_ms=max(progress.decided_ms, progress.firing[-1]), firing=(),
            fired=progress.fired + len(progress.firing), problem="",
        )  # fmt: skip
        await self._write(known, decided, version)
        known.absent = None
        known.mine, known.next_ms, known.look_s = True, next_fire_ms(schedule, decided.decided_ms), 0.0

    def _recheck_s(self, schedule: Schedule, progress: ScheduleProgressRecord) -> float:
        """Returns the seconds after which a broker that does not run the schedule looks at it again: when its next fire
        is due, and then until it was fired."""
        next_ms = next_fire_ms(schedule, max(progress.decided_ms, schedule.since_ms))
        wait_ms = 0 if next_ms is None else next_ms - self._broker.world.clock.wall_ms()
        return min(SCHEDULE_RECHECK_S_MAX, max(SCHEDULE_RECHECK_S_MIN, wait_ms / 1000 + 1))

    async def _is_stale(self, known: _Known, topic: Topic, *, partitioned: bool) -> bool:
        """Returns True if the topic of the schedule was deleted, and another topic has its name now."""
        if not partitioned:
            return topic.incarnation != known.schedule.topic_ms
        record = await self._broker.catalog.get_partitioned_record(known.topic)
        return record is None or record.created_ms != known.schedule.topic_ms

    async def _find_missing(self, topic: Topic, known: _Known, progress: ScheduleProgressRecord) -> tuple[int, ...]:
        """Returns those of the intended times for which the log has no message."""
        shape = topic.log.shape
        if shape.first_index > progress.log_end:
            _LOG.warning("%s: schedule %r: its fires of %s count as published: the log was trimmed", topic.name,
                         known.schedule.name, progress.firing)  # fmt: skip
            return ()
        there, producer = set[int](), producer_name_of_schedule(known.schedule.name)
        position = shape.position_after(Position(progress.last_ledger, progress.last_entry))
        while shape.has_entry(position := shape.next_unskipped_position(shape.position_at_or_after(position))):
            for entry in await topic.log.reader.read(position, LOG_READ_BYTES):
                metadata = parse_header(split_broker_part(entry.payload)[2], verify=False).metadata
                if metadata.producer_name == producer:
                    there.add(metadata.sequence_id)
                position = shape.position_after(entry.position)
        return tuple(each for each in progress.firing if each not in there)

    async def _publish(self, topic: Topic, known: _Known, fires: Sequence[int]) -> None:
        """Publishes a message for each of the times, in order, through this loaded topic and no other."""
        schedule, name, clock = known.schedule, producer_name_of_schedule(known.schedule.name), self._broker.world.clock
        port = _Publishing()
        options = ProducerOptions(topic.name.full, name, instance=schedule.id)
        session = await ProducerSession.open(self._broker, options, port, CallContext(f"schedule {schedule.name}"))
        try:
            if session.topic is not topic:
                raise NotOwner(f"topic {topic.name} was loaded anew meanwhile")
            for fire_ms in fires:
                session.publish(make_scheduled_message(schedule, name, fire_ms, clock.wall_ms()))
                try:
                    await port.wait_outcome()
                except MagnetarError as error:
                    known.absent = topic if error.definite and fire_ms == fires[0] else None
                    raise
                known.absent = None  # one of them is in the log
                self.fired += 1
        finally:
            session.leave()
