"""Who owns a bundle when several ask at once, on a real metadata tree whose answers come late."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.cluster.ownership import Ownership
from magnetar.metadata import paths
from magnetar.metadata.records import CLUSTER_FORMAT, BrokerRecord, ClusterRecord, NamespaceRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import CheckNodeVersion, CommitOperation, put_record
from magnetar.proto.errors import NewerFormat
from magnetar.proto.names import TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.process import make_system_world

TOPIC = TopicName.parse("persistent://public/default/t")
POLICIES = NamespaceRecord(bundles=1)


def owns(broker: Ownership, topic: TopicName) -> bool:
    return broker.is_owned(broker.owner_record_path(topic, POLICIES))


class LateAnswers:
    """A session that takes bundles at once, and answers that when the test says so."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.answers = asyncio.Event()
        self.done: list[str] = []
        self.put_done = asyncio.Event()

    async def get(self, path: str) -> Any:
        return await self.session.get(path)

    async def read_nodes(self, folder: str, names: Any = None) -> Any:
        return await self.session.read_nodes(folder, names)

    async def delete(self, path: str, *more: Any) -> None:
        await self.session.delete(path, *more)
        self.done.append("delete")

    async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
        found: list[int] = await self.session.commit(operations)
        if isinstance(operations[0], CheckNodeVersion):  # a bundle is taken that had no owner
            self.done.append("put")
            self.put_done.set()
            await self.answers.wait()
        return found


def _ownership(store: Any, name: str) -> Ownership:
    me = BrokerRecord(name=name, endpoint=f"{name}:1")
    return Ownership(store, me, random.Random(1), SystemClock())


async def test_who_asks_while_the_bundle_is_being_taken_does_not_take_it_away(tmp_path: Path) -> None:
    tree = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    try:
        late = LateAnswers(tree.new_session())
        first, second = _ownership(late, "first"), _ownership(tree.new_session(), "second")
        for each in (first, second):
            await each.register_broker()
        asking = [asyncio.create_task(first.find_owner(TOPIC, POLICIES))]
        await late.put_done.wait()
        asking.append(asyncio.create_task(first.find_owner(TOPIC, POLICIES)))
        for _ in range(20):  # what the second one would ask is answered meanwhile
            await tree.new_session().get("/nothing")
        named = (await second.find_owner(TOPIC, POLICIES)).name
        late.answers.set()
        assert [(await each).name for each in asking] == ["first", "first"]
        assert (named, owns(first, TOPIC), owns(second, TOPIC)) == ("first", True, False)
        assert late.done == ["put"]
    finally:
        await tree.close()


async def test_a_broker_that_registers_after_a_later_format_was_put_in_force_is_told(tmp_path: Path) -> None:
    """Its session is older than that: the format was another one when it asked."""
    tree = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    try:
        broker = _ownership(tree.new_session(), "older")
        later = ClusterRecord(instance="c0ffee", format=CLUSTER_FORMAT + 1)
        await put_record(tree.new_session(), paths.CLUSTER, later)
        with pytest.raises(NewerFormat, match="upgrade this process"):
            await broker.register_broker()
    finally:
        await tree.close()


async def test_the_record_of_an_earlier_session_of_the_same_broker_is_replaced(tmp_path: Path) -> None:
    tree = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    try:
        before, now = _ownership(tree.new_session(), "first"), _ownership(tree.new_session(), "first")
        await before.register_broker()
        assert (await before.find_owner(TOPIC, POLICIES)).name == "first"
        late = LateAnswers(now._store)
        late.answers.set()
        now._store = late  # type: ignore[assignment]
        await now.register_broker()
        assert (await now.find_owner(TOPIC, POLICIES)).name == "first"
        assert late.done == ["delete", "put"]
    finally:
        await tree.close()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("taken", [False, True])
async def test_a_broker_that_cannot_unload_a_bundle_stays_its_owner_unless_another_has_it(
    tmp_path: Path, *, taken: bool, moves: bool
) -> None:
    tree = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    try:
        session = tree.new_session()
        first, second = _ownership(session, "first"), _ownership(tree.new_session(), "second")
        for each in (first, second):
            await each.register_broker()
        assert (await first.find_owner(TOPIC, POLICIES)).name == "first"
        path = first.owner_record_path(TOPIC, POLICIES)

        async def fail() -> None:
            assert not owns(first, TOPIC), "it loads no topic of the bundle meanwhile"
            if taken and not owns(second, TOPIC):
                await session.delete(path)
                await second.find_owner(TOPIC, POLICIES)
            raise RuntimeError("a topic is not closed")

        with pytest.raises(RuntimeError, match="not closed"):
            await (first.move_bundle(path, second.me, fail) if moves else first.release_bundle(path, fail))
        assert (owns(first, TOPIC), owns(second, TOPIC)) == (not taken, taken)
        assert (await first.find_owner(TOPIC, POLICIES)).name == ("second" if taken else "first")
        assert first.leaving == 0
    finally:
        await tree.close()
