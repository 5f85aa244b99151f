"""A part of a broker that fails as it closes keeps none of the other parts from closing."""

from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.model.settings import ConsumerType
from magnetar.proto.errors import Unavailable
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster

TOPIC = "persistent://public/default/t"


class Part:
    """A part of `owner` that notes when its method `ends` was called, and fails there if it is `broken`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, ends: str, called: list[str], broken: str
    ) -> None:
        self._part, self._called, self._name, self._is_broken = getattr(owner, name), called, name, name == broken
        setattr(self, ends, self._end)
        self._method = getattr(self._part, ends)
        monkeypatch.setattr(owner, name, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    async def _end(self) -> None:
        self._called.append(self._name)
        if self._is_broken:
            raise ZeroDivisionError(self._name)
        await self._method()


@pytest.mark.parametrize("broken", ["_writing", "_background", "_settler", "_halves", "log"])
async def test_a_coordinator_ends_whichever_of_its_parts_cannot_be_closed(
    running: Cluster, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions, called = running.brokers[0].topic_manager.transactions, list[str]()
    await transactions.load_owned_coordinator(0)
    (coordinator,) = [each for each in transactions.loaded_coordinators if each.number == 0]
    for name in ("_writing", "_background", "_settler", "_halves"):
        Part(monkeypatch, coordinator, name, "close", called, broken)
    Part(monkeypatch, coordinator, "log", "abandon", called, broken)
    with pytest.raises(ZeroDivisionError, match=broken):
        await coordinator.abandon_epoch(Unavailable("the end"))
    assert called == ["_writing", "_background", "_settler", "_halves", "log"]
    assert 0 not in [each.number for each in transactions.loaded_coordinators], "its owner knows that it has ended"


@pytest.mark.parametrize("broken", ["delayed", "pump", "filtering", "dead_letters", "store"])
async def test_a_subscription_stores_its_cursor_whichever_of_its_parts_cannot_be_closed(
    running: Cluster, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, called = running.brokers[0], list[str]()
    async with Client(f"magnetar://{broker.endpoint}") as client:
        await client.subscribe(TOPIC, "s", ConsumerType.Shared, filter="message.producer = 'old'")
        topic = await broker.topic_manager.load_topic(TopicName.parse(TOPIC))
        subscription = topic.find_subscription("s")
    stopped = dict.fromkeys(("pump", "filtering", "dead_letters"), "wait_stopped")
    ends = {"delayed": "close", **stopped, "store": "close"}
    for name, end in ends.items():
        Part(monkeypatch, subscription, name, end, called, broken)
    with pytest.raises(ZeroDivisionError, match=broken):
        await subscription.close()
    assert called == list(ends)
    monkeypatch.undo()
    assert subscription.pump._closed
