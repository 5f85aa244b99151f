"""When a consumer that asks for a message is told that there is none: never before a message that was there."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.subscription.core.policy import Member
from magnetar.broker.subscription.pump import SHORT_BLOCK_REASONS, DeliveryProbe, judge_probe
from magnetar.proto.names import Position
from magnetar.proto.states import Blocked

HERE, LAST = Position(3, 7), Position(3, 9)


def asked(**state: Any) -> DeliveryProbe:
    member = Member(1, "a", permits=5)
    for name, value in state.items():
        setattr(member, name, value)
    return DeliveryProbe(member, 0, LAST, asyncio.Future(loop=asyncio.new_event_loop()))


def dispatcher(probe: DeliveryProbe, *, candidates: bool = True, read: Position = HERE, replay: int = 0) -> Any:
    policy = SimpleNamespace(candidates=[probe.member] if candidates else [])
    return SimpleNamespace(policy=policy, read_position=read, redelivery_entry_count=replay)


def test_while_the_pump_reads_or_moves_there_is_no_answer() -> None:
    probe = asked()
    for blocked in (None, *SHORT_BLOCK_REASONS):
        assert judge_probe(probe, dispatcher(probe), blocked) is None


@pytest.mark.parametrize("why", [each for each in Blocked.reasons() if each not in SHORT_BLOCK_REASONS])
def test_why_the_pump_stopped_is_the_answer(why: Blocked) -> None:
    probe = asked()
    assert judge_probe(probe, dispatcher(probe), why) is why


def test_who_got_something_is_told_that_before_all_else() -> None:
    for state in ({}, {"permits": 0}, {"blocked": True}):
        probe = asked(delivered_messages=1, **state)
        assert judge_probe(probe, dispatcher(probe, candidates=False), Blocked.CAUGHT_UP) is Blocked.NO


def test_who_cannot_get_anything_is_told_at_once_though_the_pump_works_for_others() -> None:
    for state, why in (
        ({"permits": 0}, Blocked.NO_PERMITS), ({"paused": True}, Blocked.NO_PERMITS),
        ({"blocked": True}, Blocked.TOO_MANY_UNACKED),
    ):  # fmt: skip
        probe = asked(**state)
        assert judge_probe(probe, dispatcher(probe), None) is why
    probe = asked()
    assert judge_probe(probe, dispatcher(probe, candidates=False), None) is Blocked.INACTIVE


def test_a_pump_that_never_rests_answers_when_all_that_was_there_went_to_others() -> None:
    probe = asked()
    after = Position(3, 10)
    assert judge_probe(probe, dispatcher(probe, read=LAST), None) is None
    assert judge_probe(probe, dispatcher(probe, read=after, replay=1), None) is None
    assert judge_probe(probe, dispatcher(probe, read=after), None) is Blocked.CAUGHT_UP
