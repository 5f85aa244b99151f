"""A group of processes that share the partitions of a topic; each process pulls from its own partitions: `PullGroup`.

    async with await PullGroup.open(client, "flights", "board", on_revoked=commit_all) as group:
        while True:
            for partition in group.assignment():
                found = await group.pull(partition, timeout=1)
                ...
                await group.commit(partition, found.next_index)

**One owner.** Each partition has an Exclusive subscription with the name of the group. The owner of the partition is
the consumer of this subscription: the broker accepts only one. That consumer requests no messages; its subscription has
the position of the group. `commit` moves this position, and the broker accepts a commit from the owner alone, also if a
former owner was suspended and goes on. An OffsetStore could not refuse that former owner, so a group uses none. A topic
with claims was the alternative to a subscription per partition; the subscription is fenced already, ends with the
connection, and needs no clock.

**Members.** Each member has a consumer on the subscription `<group>.members` of partition 0, which is not durable. That
consumer requests no messages; the statistics of the topic name the members. Each member asks for them every `interval`
seconds, and decides by the strategy which partitions it owns (consume/assignment_core.py `GroupMember`). Two members
may decide differently for a while: the broker then refuses one of them, which tries again.

**A rebalance.** REVOKE: the program gets `on_revoked(partitions)`, and may still commit; then the member leaves the
subscription. TAKE: the member joins the subscription, asks for its position, and the program gets
`on_assigned({partition: index})`. So the next owner begins at the index that was committed last. A partition whose
connection was interrupted is revoked as lost: a commit is refused, and a member that takes the partition again begins
at the position of the broker. Messages that a disconnected member pulls before it notices may also be pulled by another
member; they cannot be committed twice.

A callback may be a coroutine function. It runs in the task of the rebalance, which waits for it. An error of a callback
is logged, and the rebalance goes on. An error that is permanent, such as a missing right, ends the group: from then on
each call raises it.
Guards: tests/client/test_pull_group.py, tests/client/consume/test_group_walk.py."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..proto import wire_pb2 as wire
from ..proto.errors import MagnetarError
from ..proto.names import TopicName, check_subscription_name
from ..runtime.tasks import Tasks
from .client import Client, parse_name_argument, parse_topic
from .common.checks import NAME_CHECK, SECONDS_CHECK, TEXT_CHECK, ParameterCheck, check_parameter
from .common.closing import ClosedAfterAsyncWith, close_all_parts
from .common.errors import (
    AlreadyClosed,
    AuthenticationError,
    AuthorizationError,
    ConsumerBusy,
    InvalidConfiguration,
    NotAllowedError,
    PulsarException,
    TopicNotFound,
    run_translating_errors,
    translate_error,
)
from .common.loggers import is_cancelled, log_foreign_error
from .consume.assignment_core import STRATEGIES, GroupMember, GroupView, RevokePartition, TakePartition
from .consume.pull import PullConsumer, PullResult
from .model.settings import ConsumerType, InitialPosition

if TYPE_CHECKING:
    from .consume.consumer import Consumer
    from .consume.partition_consumer import PartitionConsumer

_LOG = logging.getLogger("magnetar.client")

MEMBERS_POLL_S = 1.0
"""Seconds between two requests for the names of the members. A rebalance takes three such intervals."""
STRATEGY_CHECK = ParameterCheck(f"one of {', '.join(STRATEGIES)}", (str,), lambda name: name in STRATEGIES)
CALLBACK_CHECK = ParameterCheck("a function, or None", (object,), callable, optional=True)
_PERMANENT = (AlreadyClosed, AuthenticationError, AuthorizationError, InvalidConfiguration, TopicNotFound)
"""Errors that trying again does not change."""

OnAssigned = Callable[[dict[int, int]], object]
"""Type of the callback `on_assigned`: it gets a dict of partition → the index at which the member goes on."""
OnRevoked = Callable[[tuple[int, ...]], object]


class _OwnedPartition:
    """A partition that a member has: its consumer on the subscription of the group, and what pulls from it. `index`:
    that of the next pull."""

    __slots__ = ("index", "is_leaving", "is_lost", "lock", "pull")

    pull: PullConsumer
    index: int

    def __init__(self, lock: Consumer, wake: Callable[[], None]) -> None:
        """Calls `wake` when the consumer `lock` was connected again: another member may have had the partition. The
        caller sets `pull` and `index` after that, so that they are not those of an earlier connection."""
        self.lock = lock
        self.is_leaving = self.is_lost = False

        def reconnected(_: PartitionConsumer) -> None:
            self.is_lost = True
            wake()

        (partition,) = lock.partitions
        partition.on_connected = reconnected

    @property
    def is_gone(self) -> bool:
        return self.is_lost or self.lock.is_over


class PullGroup(ClosedAfterAsyncWith):
    """A member of a group that shares the partitions of a topic, for asyncio. `PullGroup.open` makes it. `assignment`,
    `pull` and `commit` raise AlreadyClosed after `close`, or the error that ended the group."""

    def __init__(
        self, client: Client, topic: TopicName, group: str, member: str, strategy: str, interval_s: float,
        start: InitialPosition, on_assigned: OnAssigned | None, on_revoked: OnRevoked | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self._client, self._topic, self._group, self._member = client, topic, group, member
        self._core = GroupMember(member, strategy)
        self._interval_s, self._start, self._options = interval_s, start, options
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        self._owned: dict[int, _OwnedPartition] = {}
        self._presence: Consumer | None = None  # the consumer that says that the member is there
        self._woken = asyncio.Event()
        self._failure: PulsarException | None = None
        self._tasks = Tasks(self._on_failure)
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, client: Client, topic: str, group: str, *, member: str = "", strategy: str = "sticky",
        on_assigned: OnAssigned | None = None, on_revoked: OnRevoked | None = None,
        initial_position: InitialPosition = InitialPosition.Earliest, interval: float = MEMBERS_POLL_S, **options: Any,
    ) -> PullGroup:  # fmt: skip
        """Joins the group `group` of a topic, and returns the member. It has no partitions yet: it gets them in the
        background. `member`: the name of the member, which must be unique in the group; empty: a random one.
        `strategy`: "range", "round_robin" or "sticky", the same for all members. `on_assigned`: called with {partition:
        index} when the member gets partitions; `on_revoked`: called with a tuple of partitions before it loses them, or
        after it has lost them. `initial_position`: where a new group begins. `interval`: seconds between two requests
        for the names of the members. `options`: parameters of `Client.pull_consumer` except `offsets`.

        Raises InvalidConfiguration for a wrong value, InvalidTopicName for a wrong name of a group or topic, and the
        errors of `Client.subscribe`. `on_assigned` and `on_revoked` may be coroutine functions."""
        check_parameter("topic", NAME_CHECK, topic)
        check_parameter("group", NAME_CHECK, group)
        parse_name_argument(check_subscription_name, group)
        check_parameter("member", TEXT_CHECK, member)
        check_parameter("strategy", STRATEGY_CHECK, strategy)
        check_parameter("interval", SECONDS_CHECK, interval)
        check_parameter("on_assigned", CALLBACK_CHECK, on_assigned)
        check_parameter("on_revoked", CALLBACK_CHECK, on_revoked)
        name = parse_topic(topic)
        member = member or f"member-{client.connections.world.rng.randbytes(5).hex()}"
        self = cls(
            client, name, group, member, strategy, interval, initial_position, on_assigned, on_revoked, options
        )  # fmt: skip
        self._presence = await client.subscribe(
            self._name(0, await self._count_partitions()).full, f"{group}.members", ConsumerType.Shared,
            consumer_name=member, durable=False, receiver_queue_size=0,
        )  # fmt: skip
        self._watching = self._tasks.spawn(self._watch(), f"rebalances of {group} at {name}")
        return self

    # ------------------------------------------------------------------------------ facts
    @property
    def member(self) -> str:
        """Returns the name of this member."""
        return self._member

    def assignment(self) -> dict[int, int]:
        """Returns the partitions that this member has now: partition → index of its next pull. A topic without
        partitions counts as partition 0."""
        self._check()
        return {each: owned.index for each, owned in sorted(self._owned.items()) if self._is_usable(owned)}

    def _is_usable(self, owned: _OwnedPartition) -> bool:
        return not owned.is_leaving and not owned.is_gone

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._tasks.closed:
            raise AlreadyClosed("the member of the group is closed")

    def _find(self, partition: int, *, to_commit: bool = False) -> _OwnedPartition:
        self._check()
        owned = self._owned.get(partition)
        if owned is None or owned.is_gone or (owned.is_leaving and not to_commit):
            raise self._make_refusal(partition)
        return owned

    def _make_refusal(self, partition: int) -> NotAllowedError:
        return NotAllowedError(f"partition {partition} of {self._topic} is not this member's (any more)")

    # ------------------------------------------------------------------------------ pulling
    async def pull(
        self, partition: int, max_messages: int = 100, max_bytes: int = 1 << 20, timeout: float = 0,
        filter: str | None = None,
    ) -> PullResult:  # fmt: skip
        """Returns the next messages of a partition that this member has, as `PullConsumer.pull` does, with its errors;
        the next pull goes on after them. Raises NotAllowedError if the member does not have the partition, or has lost
        it during the pull; AlreadyClosed after `close`, or the error that ended the group."""
        owned = self._find(partition)
        try:
            found = await owned.pull.pull(owned.index, max_messages, max_bytes, timeout, filter)
        except AlreadyClosed:  # it was revoked
            self._find(partition)
            raise
        if self._find(partition) is not owned:
            raise self._make_refusal(partition)
        owned.index = found.next_index
        return found

    async def commit(self, partition: int, index: int, note: bytes | None = None) -> None:
        """Stores `index` as the position at which the group goes on in this partition, with the note `note`, as
        `Consumer.commit` does, with its errors. Returns when the position is durable. Raises NotAllowedError if this
        member does not have the partition (during `on_revoked` it still has it); AlreadyClosed after `close`, or the
        error that ended the group."""
        await self._find(partition, to_commit=True).lock.commit(index, note)

    # ------------------------------------------------------------------------------ the rebalances
    async def _watch(self) -> None:
        while True:
            try:
                await self._rebalance()
            except (MagnetarError, PulsarException) as error:
                told = error if isinstance(error, PulsarException) else translate_error(error)
                if isinstance(told, _PERMANENT):
                    raise told from error
                _LOG.warning("group %s of %s: the members are looked at again: %s", self._group, self._topic, told)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._woken.wait()
            self._woken.clear()

    def _on_failure(self, error: Exception) -> None:
        """Fact: the task of the rebalances has ended with an error."""
        self._failure = translate_error(error)

    async def _rebalance(self) -> None:
        await self._leave_lost()
        count = await self._count_partitions()
        members = await self._list_consumers(0, count, f"{self._group}.members")
        units = max(1, count)
        owners = await self._find_owners(count) if self._core.must_ask_owners(members, units) else None
        effects = self._core.on_group_view(GroupView(members, units, owners))
        await self._revoke([each.partition for each in effects if isinstance(each, RevokePartition)])
        await self._take([each.partition for each in effects if isinstance(each, TakePartition)], count)

    async def _count_partitions(self) -> int:
        return await run_translating_errors(self._client.connections.fetch_partition_count(self._topic))

    def _name(self, partition: int, count: int) -> TopicName:
        return self._topic.with_partition(partition) if count else self._topic

    async def _list_consumers(self, partition: int, count: int, subscription: str) -> list[str]:
        """Asks the owner of the partition for the names of the consumers of a subscription."""
        topic = self._name(partition, count)
        stats: wire.TopicStatsReply = await run_translating_errors(
            self._client.connections.ask_owner(topic, "TopicStats", wire.Name(name=topic.full), service="Admin")
        )
        return [each.name for found in stats.subscriptions if found.name == subscription for each in found.consumers]

    async def _find_owners(self, count: int) -> Mapping[str, Sequence[int]]:
        units = range(max(1, count))
        found: dict[str, list[int]] = {}
        asked = await asyncio.gather(*(self._list_consumers(each, count, self._group) for each in units))
        for partition, names in zip(units, asked, strict=True):
            for name in names:
                found.setdefault(name, []).append(partition)
        return found

    async def _take(self, partitions: Sequence[int], count: int) -> None:
        """Joins the subscriptions of the partitions, those of which no other member has."""
        taken, error = dict[int, int](), None
        for partition in partitions:
            try:
                if error is None:
                    taken[partition] = await self._take_one(partition, count)
                    self._core.on_partition_taken(partition)
            except ConsumerBusy:
                _LOG.debug("group %s: partition %d of %s is another member's", self._group, partition, self._topic)
            except (MagnetarError, PulsarException) as raised:
                error = raised
            finally:
                if partition not in taken:
                    self._core.on_partition_busy(partition)
        if taken:
            await self._call(self._on_assigned, taken)
        if error is not None:
            raise error

    async def _take_one(self, partition: int, count: int) -> int:
        """Joins the subscription of a partition, and returns the index at which the group goes on there."""
        name = self._name(partition, count).full
        lock = await self._client.subscribe(
            name, self._group, ConsumerType.Exclusive, consumer_name=self._member, receiver_queue_size=0,
            initial_position=self._start,
        )  # fmt: skip
        try:
            owned = _OwnedPartition(lock, self._woken.set)
            (place,) = (await lock.progress()).values()
            owned.pull = await self._client.pull_consumer(name, **self._options)
        except BaseException:
            await lock.close()
            raise
        owned.index = max(place.position, place.earliest)
        self._owned[partition] = owned
        return owned.index

    async def _revoke(self, partitions: Sequence[int]) -> None:
        """Lets the program commit, and leaves the subscriptions of the partitions."""
        if not partitions:
            return
        owned = [self._owned[each] for each in partitions]
        for each in owned:
            each.is_leaving = True
        try:
            await self._call(self._on_revoked, tuple(partitions))
        finally:
            for partition in partitions:
                del self._owned[partition]
                self._core.on_partition_revoked(partition)
            await self._close_partitions(owned)

    async def _leave_lost(self) -> None:
        """Gives the partitions up whose connection was interrupted."""
        lost = {each: owned for each, owned in sorted(self._owned.items()) if owned.is_gone}
        for partition in lost:
            del self._owned[partition]
            self._core.on_partition_lost(partition)
        if lost:
            _LOG.warning("group %s: the partitions %s of %s were lost", self._group, sorted(lost), self._topic)
            await self._close_partitions(list(lost.values()))
            await self._call(self._on_revoked, tuple(lost))

    async def _close_partitions(self, owned: Sequence[_OwnedPartition]) -> None:
        """Closes what pulls, and leaves the subscriptions after that."""
        for parts in ([each.pull for each in owned], [each.lock for each in owned]):
            try:
                await close_all_parts(parts)
            except PulsarException as error:  # its connection is closed, or will be
                _LOG.warning("group %s: a partition of %s was not closed: %s", self._group, self._topic, error)

    async def _call(self, function: Callable[[Any], object] | None, given: object) -> None:
        if function is None:
            return
        try:
            found = function(given)
            if inspect.isawaitable(found):
                await _wait(found)
        except BaseException as error:  # of the program: the rebalance goes on
            if is_cancelled(error):
                raise
            log_foreign_error(error, "a callback of a group")

    async def close(self) -> None:
        """Leaves the group: calls `on_revoked` with the member's partitions and waits for it, then gives the partitions
        to the other members. If the group has ended with an error, does not call `on_revoked`. Errors of the callback
        and of brokers are logged, not raised. May be called again."""
        if self._tasks.closed:
            return
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        partitions = sorted(each for each, owned in self._owned.items() if not owned.is_gone)
        for each in partitions:
            self._owned[each].is_leaving = True
        try:
            if partitions and self._failure is None:
                await self._call(self._on_revoked, tuple(partitions))
        finally:
            self._tasks.closed = True
            owned, self._owned = list(self._owned.values()), {}
            await self._close_partitions(owned)
            if self._presence is not None:
                await self._presence.close()


async def _wait(found: Awaitable[object]) -> None:
    await found
