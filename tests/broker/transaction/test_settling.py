"""Each outcome reaches its topic once it can, whatever failed before, and is reported once."""

import asyncio
from collections.abc import Sequence

import pytest

from magnetar.broker.common.transactions import Settlement
from magnetar.broker.transaction import peers as settling
from magnetar.broker.transaction.peers import SettlementSender
from magnetar.proto.errors import MagnetarError, Unavailable
from magnetar.proto.names import TopicName
from magnetar.proto.states import TxnId
from magnetar.runtime.process import make_system_world
from tests.broker.subscription.test_delays import until


class Topics:
    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.failing: list[object] = []

    async def settle(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        await asyncio.sleep(0)
        self.told.append([each.txn.least for each in settlements])
        failing = self.failing.pop(0) if self.failing else None
        if isinstance(failing, Exception):
            raise failing
        return [Unavailable("busy") if each.txn.least == failing else None for each in settlements]


@pytest.mark.parametrize("failing", [[], [2], [Unavailable("away")], [ValueError("a fault")], [1, Unavailable("x"), 1]])
async def test_what_failed_is_told_again_and_the_rest_is_not(
    failing: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "RETRY_PAUSE_S_MIN", 0.0)
    topics, settled, done = Topics(), list[int](), asyncio.Event()
    topics.failing = list(failing)

    def report(settlement: Settlement, topic: str) -> None:
        settled.append(settlement.txn.least)
        if len(settled) == 5:
            done.set()

    settler = SettlementSender(make_system_world(1), topics, report)
    for number in range(5):
        settler.add_settlement("persistent://public/default/t", Settlement(TxnId(0, number), True))
    async with asyncio.timeout(20):
        await done.wait()
    await settler.close()
    assert sorted(settled) == list(range(5)), "each is reported once"
    assert topics.told[0] == list(range(5)), "what waits travels together"
    if failing == [2]:
        assert topics.told[1:] == [[2]]


async def test_what_is_new_does_not_wait_for_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its topic cannot store, for an hour."""
    monkeypatch.setattr(settling, "RETRY_PAUSE_S_MIN", 3600.0)
    topics, settled, done = Topics(), list[int](), asyncio.Event()
    topics.failing = [0, None, None]

    def report(settlement: Settlement, topic: str) -> None:
        settled.append(settlement.txn.least)
        done.set()

    settler = SettlementSender(make_system_world(1), topics, report)
    async with asyncio.timeout(20):
        for number in range(3):
            settler.add_settlement("persistent://public/default/t", Settlement(TxnId(0, number), True))
            if number:
                await done.wait()
                done.clear()
            else:
                await until(lambda: settler.failures == 1)
    await settler.close()
    assert settled == [1, 2]
    assert topics.told == [[0], [1], [2]]
