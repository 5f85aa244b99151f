"""A new subscription type is a policy and its registration: one that only this test knows, through a real broker."""

import ast
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from magnetar.broker.subscription.core.in_log_order import LogOrderPolicy
from magnetar.broker.subscription.core.policy import (
    ActiveConsumerChanged,
    DispatcherEntry,
    DispatchPolicy,
    Member,
    PolicyStatistics,
    SubscriptionOptions,
)
from magnetar.broker.subscription.core.subscription_types import SUBSCRIPTION_TYPE_ROWS, SubscriptionTypeRow
from magnetar.cli import produce as consume
from magnetar.client.model import settings
from magnetar.proto import states
from magnetar.proto import states as subscription_types
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConsumerBusy, InvalidRequest, NotAllowed
from magnetar.proto.states import Blocked
from magnetar.runtime.network import find_rpc
from tests.support.cluster import TestConsumer, TestProducer, cluster, payloads_of

TOPIC = "persistent://public/default/numbered"


class Numbered(LogOrderPolicy):
    """Entry n goes to consumer n modulo their number; the last one that joined is notified that it is active."""

    individual: ClassVar = True

    def __init__(self, options: SubscriptionOptions) -> None:
        super().__init__(options)
        self.candidates: list[Member] = []
        self.joined_last: list[ActiveConsumerChanged] = []

    def why_refused(self, newcomer: Member) -> str | None:
        return "two consumers are enough" if len(self.candidates) == 2 else None

    def add_member(self, member: Member) -> Member | None:
        self.candidates.append(member)
        self.joined_last = [ActiveConsumerChanged(member, True)]
        return None

    def remove_member(self, member: Member) -> None:
        self.candidates.remove(member)

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked:
        member = self.candidates[entry.position.entry_id % len(self.candidates)]
        if not member.may_receive:
            return Blocked.NO_PERMITS
        self._goes_out(entry.position, waited)
        return member

    def take_active_changes(self) -> Sequence[ActiveConsumerChanged]:
        events, self.joined_last = self.joined_last, []
        return events

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics(self.candidates[-1] if self.candidates else None)


NUMBERED = SubscriptionTypeRow(77, "NUMBERED", Numbered)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUBSCRIPTION_TYPE_ROWS, NUMBERED.number, NUMBERED)


@pytest.mark.usefixtures("registered")
async def test_a_registered_type_delivers_acknowledges_and_shows_its_statistics(tmp_path: Path) -> None:
    async with cluster(tmp_path, subscription_types=("Shared", "Numbered")) as running:
        broker = running.brokers[0]

        async def consumer(name: str, type_: int = NUMBERED.number) -> TestConsumer:
            consumer = TestConsumer(running.world, broker, TOPIC, type=type_, consumer_name=name)
            return await consumer.ready()

        consumers = [await consumer(name) for name in "ab"]
        with pytest.raises(ConsumerBusy, match="two consumers are enough"):
            await consumer("c")
        with pytest.raises(ConsumerBusy, match="is Numbered while its consumers are connected, and cannot be Shared"):
            await consumer("d", wire.Subscribe.SHARED)
        with pytest.raises(NotAllowed, match="not Failover"):
            await consumer("e", wire.Subscribe.FAILOVER)
        for each in consumers:
            assert await each.next("active")
        producer = await TestProducer(running.world, broker, TOPIC).opened()
        for number in range(10):
            await producer.send(b"%d" % number)
        taken = [[await each.receive() for _ in range(5)] for each in consumers]
        payloads = [[payload for each in some for payload in payloads_of(each.entry)] for some in taken]
        assert sorted(payloads) == [[b"%d" % number for number in range(first, 10, 2)] for first in (0, 1)]
        for each, some in zip(consumers, taken, strict=True):
            await each.ack(*some)
        await producer.close()
        channel = running.world.network.connect(broker.endpoint)
        stats = await channel.call(find_rpc("Admin", "TopicStats"), wire.Name(name=TOPIC), timeout_s=20.0)
        await channel.close()
        (subscription,) = stats.subscriptions
        assert (subscription.type, subscription.active_consumer, subscription.backlog) == ("NUMBERED", "b", 0)


async def test_a_type_that_is_not_registered_is_an_invalid_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        with pytest.raises(InvalidRequest, match="no subscription type 77; there are EXCLUSIVE, SHARED"):
            await TestConsumer(running.world, running.brokers[0], TOPIC, type=NUMBERED.number).ready()


# ------------------------------------------------------------------------------------------------ one table
def test_the_registered_types_are_those_of_the_wire() -> None:
    assert {
        each.name: each.number for each in SUBSCRIPTION_TYPE_ROWS.values()
    } == subscription_types.SUBSCRIPTION_TYPE_NUMBERS
    assert all(number == each.number for number, each in SUBSCRIPTION_TYPE_ROWS.items())


@pytest.mark.parametrize("type_", SUBSCRIPTION_TYPE_ROWS.values(), ids=lambda each: each.name)
def test_each_type_has_its_names_everywhere(type_: SubscriptionTypeRow) -> None:
    name = type_.name
    policy: DispatchPolicy = type_.policy(SubscriptionOptions())
    assert settings.ConsumerType(type_.number).name == subscription_types.sdk_type_name(name)
    assert (settings.ConsumerType(type_.number) in settings.ORDERED_CONSUMER_TYPES) is not policy.individual
    assert states.SubscriptionType(name).name == name
    assert consume.SUBSCRIPTION_TYPES[name.lower()] == type_.number
    assert type_.title in subscription_types.PULSAR_TYPE_NAMES


@pytest.mark.parametrize(("module", "enum"), [(settings, "ConsumerType"), (states, "SubscriptionType")])
def test_type_checkers_see_the_types_of_the_wire(module: Any, enum: str) -> None:
    (written,) = [
        node for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ClassDef) and node.name == enum
    ]  # fmt: skip
    seen = {
        each.targets[0].id: ast.literal_eval(each.value)
        for each in written.body if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
    }  # fmt: skip
    assert seen == {each.name: each.value for each in getattr(module, enum)}
