"""Members of a group share partitions: one owner at a time, and what is committed is not read again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.aio import PullGroup
from magnetar.client.common.errors import AlreadyClosed, InvalidConfiguration, InvalidTopicName, NotAllowedError
from magnetar.proto.errors import Unavailable
from tests.client.consume.test_ranges import url_of
from tests.support.cluster import Cluster, cluster

PARTITIONS = 4


class Member:
    """A member in a client of its own, that pulls and commits what it has."""

    def __init__(self, url: str, name: str, **options: Any) -> None:
        self.client, self.name, self.options = aio.Client(url), name, options
        self.read: list[int] = []
        self.told: list[tuple[str, Any]] = []
        self.done: dict[int, int] = {}

    async def join(self) -> "Member":
        self.group = await PullGroup.open(
            self.client, "t", "g", member=self.name, interval=0.03, on_assigned=self.assigned, on_revoked=self.revoked,
            **self.options,
        )  # fmt: skip
        return self

    def assigned(self, partitions: dict[int, int]) -> None:
        self.told.append(("assigned", partitions))

    async def revoked(self, partitions: tuple[int, ...]) -> None:
        self.told.append(("revoked", partitions))
        done = {each: self.done.pop(each) for each in partitions if each in self.done}
        await asyncio.gather(*(self.group.commit(each, index) for each, index in done.items()))

    @property
    def has(self) -> set[int]:
        return set(self.group.assignment())

    async def pull_all(self, *, commit: bool = True) -> None:
        for partition in self.group.assignment():
            found = await self.group.pull(partition)
            self.read += [int(each.data()) for each in found.messages]
            self.done[partition] = found.next_index
        if commit:
            done, self.done = self.done, {}
            await asyncio.gather(*(self.group.commit(each, index) for each, index in done.items()))

    async def leave(self) -> None:
        await self.group.close()
        await self.client.close()


@asynccontextmanager
async def topic(folder: Path, partitions: int = PARTITIONS) -> AsyncIterator[tuple[Cluster, str]]:
    async with cluster(folder, cursor_flush_s=0.02) as running:
        url = url_of(running)
        async with AdminClient(url) as admin:
            await admin.create_topic("t", partitions=partitions)
        yield running, url


async def send(url: str, first: int, last: int) -> None:
    """Sends numbers, to all partitions in turns."""
    async with aio.Client(url) as client, await client.create_producer("t") as producer:
        await asyncio.gather(*(
            producer.send(b"%d" % number, partition_key=str(number)) for number in range(first, last)
        ))  # fmt: skip


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_members_share_the_partitions_and_what_is_committed_is_not_read_again(tmp_path: Path) -> None:
    async with topic(tmp_path) as (_, url):
        await send(url, 0, 20)
        first = await Member(url, "a").join()
        await until(lambda: len(first.has) == PARTITIONS)
        await first.pull_all()
        second = await Member(url, "b").join()
        await until(lambda: len(first.has) == len(second.has) == 2)
        assert first.has | second.has == set(range(PARTITIONS))
        await send(url, 20, 40)
        await first.pull_all()
        await second.pull_all()
        assert sorted(first.read + second.read) == list(range(40)), "each once"
        assert second.read, "it had a share"
        revoked = [each for kind, mine in first.told if kind == "revoked" for each in mine]
        assert sorted(revoked) == sorted(second.has), "a sticky group moves only what the new one gets"
        await second.leave()
        await until(lambda: len(first.has) == PARTITIONS)
        await send(url, 40, 50)
        await first.pull_all()
        assert sorted(first.read + second.read) == list(range(50))
        await first.leave()


async def test_a_member_that_is_revoked_commits_before_the_next_one_begins(tmp_path: Path) -> None:
    async with topic(tmp_path) as (_, url):
        await send(url, 0, 20)
        first = await Member(url, "a").join()
        await until(lambda: len(first.has) == PARTITIONS)
        await first.pull_all(commit=False)
        second = await Member(url, "b", strategy="sticky").join()
        await until(lambda: len(second.has) == 2)
        await second.pull_all()
        assert second.read == [], "the callback has committed it"
        await first.leave()
        await until(lambda: len(second.has) == PARTITIONS)
        await second.pull_all()
        assert (sorted(first.read), second.read) == (list(range(20)), [])
        await second.leave()


async def test_the_partitions_of_a_member_that_crashes_go_to_the_others_at_what_it_committed(tmp_path: Path) -> None:
    async with topic(tmp_path) as (_, url):
        await send(url, 0, 12)
        first, second = await Member(url, "a").join(), await Member(url, "b").join()
        await until(lambda: len(first.has) == len(second.has) == 2)
        await first.pull_all()
        await second.pull_all()
        committed = sorted(first.read + second.read)
        await send(url, 12, 24)
        await first.pull_all(commit=False)
        lost = [each for each in first.read if each >= 12]
        first.group._tasks.cancel()  # its process is killed: nothing of it says anything more
        await first.client.connections.close()
        await until(lambda: len(second.has) == PARTITIONS)
        await second.pull_all()
        assert committed == list(range(12))
        assert sorted(second.read + [each for each in first.read if each < 12]) == list(range(24))
        assert set(lost) <= set(second.read), "it was not committed"
        await second.leave()


async def test_a_partition_whose_connection_was_interrupted_is_taken_again_at_its_position(tmp_path: Path) -> None:
    """Another member may have had it meanwhile: until that is known, nothing is pulled or committed."""
    async with topic(tmp_path, partitions=0) as (running, url):
        await send(url, 0, 10)
        member = await Member(url, "a").join()
        await until(lambda: member.has == {0})
        found = await member.group.pull(0, 5)
        await member.group.commit(0, found.next_index - 2)
        subscription = running.brokers[0].topics["persistent://public/default/t"].find_subscription("g")
        (consumer,) = subscription.consumers.values()
        owned = member.group._owned[0]
        subscription.disconnect(consumer, Unavailable("for a moment"))
        async with asyncio.timeout(30):
            while not owned.is_lost:  # noqa: ASYNC110 - at each turn of the loop: it is soon taken again
                await asyncio.sleep(0)
        for call in (lambda: member.group.pull(0), lambda: member.group.commit(0, 5)):
            with pytest.raises(NotAllowedError, match="not this member's"):
                await call()
        await until(lambda: member.has == {0})
        assert member.group.assignment() == {0: 3}
        assert member.told == [("assigned", {0: 0}), ("revoked", (0,)), ("assigned", {0: 3})]
        await member.leave()


async def test_an_interruption_while_a_partition_is_taken_is_not_missed(tmp_path: Path) -> None:
    """Its position had been asked for, and another member may have committed since."""
    async with topic(tmp_path, partitions=0) as (running, url):
        await send(url, 0, 10)
        member, lost = Member(url, "a"), list[int]()
        open_pull = member.client.pull_consumer

        async def interrupt_once(*args: Any, **options: Any) -> Any:
            if not lost:
                lost.append(0)
                subscription = running.brokers[0].topics["persistent://public/default/t"].find_subscription("g")
                (consumer,) = subscription.consumers.values()
                subscription.disconnect(consumer, Unavailable("for a moment"))
                await until(lambda: bool(subscription.consumers))
            return await open_pull(*args, **options)

        member.client.pull_consumer = interrupt_once  # type: ignore[method-assign]
        await member.join()
        await until(lambda: len(member.told) == 3)
        assert member.told == [("assigned", {0: 0}), ("revoked", (0,)), ("assigned", {0: 0})]
        await member.leave()


async def test_wrong_values_and_calls_after_the_end_are_refused(tmp_path: Path) -> None:
    async with topic(tmp_path, partitions=0) as (_, url), aio.Client(url) as client:
        for wrong in ({"strategy": "fair"}, {"interval": 0}, {"on_revoked": 3}):
            with pytest.raises(InvalidConfiguration):
                await PullGroup.open(client, "t", "g", **wrong)  # type: ignore[arg-type]
        for name in ("a/b", " ", "x" * 250, "x" * 256):
            with pytest.raises(InvalidTopicName):
                await PullGroup.open(client, "t", name)
        for name in ("", "\ud800", 5):
            with pytest.raises(InvalidConfiguration):
                await PullGroup.open(client, "t", name)  # type: ignore[arg-type]
        group = await PullGroup.open(client, "t", "g", interval=0.03)
        await group.close()
        for call in (lambda: group.pull(0), lambda: group.commit(0, 1)):
            with pytest.raises(AlreadyClosed):
                await call()


async def test_an_error_of_a_callback_is_logged_and_ends_no_rebalance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("mine")

    async with topic(tmp_path, partitions=0) as (_, url), aio.Client(url) as client:
        group = await PullGroup.open(client, "t", "g", interval=0.03, on_assigned=fail, on_revoked=fail)
        await until(lambda: group.assignment() == {0: 0})
        assert "a callback of a group failed" in caplog.text
        await group.close()
        assert caplog.text.count("a callback of a group failed") == 2
