"""What a loop says that tries again and again."""

import asyncio

from magnetar.broker.common.retry import SAME_REASON_LOG_INTERVAL_S, LogThrottle
from magnetar.proto.errors import NotEnoughBookies, Unavailable
from magnetar.runtime.sim.world import Simulation


def test_a_reason_is_said_when_it_is_new_and_once_in_a_while() -> None:
    said: list[tuple[float, str]] = []

    simulation = Simulation(1)
    clock = simulation.world("broker").clock

    async def tries() -> None:
        throttle = LogThrottle(clock)
        for number in range(150):
            error = Unavailable("no answer") if number == 20 else NotEnoughBookies(f"{number}")
            if throttle.should_log(error):
                said.append((number / 5, type(error).__name__))
            await asyncio.sleep(0.2)

    simulation.run(tries())
    assert [reason for _, reason in said[:3]] == ["NotEnoughBookies", "Unavailable", "NotEnoughBookies"]
    assert len(said) == 5
    assert said[3][0] - said[2][0] >= SAME_REASON_LOG_INTERVAL_S - 0.2
