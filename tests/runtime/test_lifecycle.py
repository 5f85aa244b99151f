"""The parts of a process: order, deadlines, and no part that keeps another from stopping."""

import asyncio
import logging

import pytest

from magnetar.runtime.clock import SystemClock
from magnetar.runtime.process import ProcessParts, ProcessPartState


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    async def start(self, name: str) -> str:
        self.lines.append(f"start {name}")
        return name

    async def stop(self, name: str) -> None:
        self.lines.append(f"stop {name}")


async def test_parts_stop_in_the_reverse_order_of_their_start() -> None:
    log = Log()
    async with ProcessParts(SystemClock()) as parts:
        assert await parts.start("a", log.start("a"), log.stop) == "a"
        await parts.start("b", log.start("b"), log.stop)
        await parts.start("c", log.start("c"), log.stop)
    assert log.lines == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]
    assert [each.state for each in parts.statistics()] == [ProcessPartState.STOPPED] * 3
    await parts.close()
    assert len(log.lines) == 6


async def test_a_part_that_does_not_start_stops_those_before_it() -> None:
    log = Log()

    async def fail() -> str:
        raise OSError("no disk")

    async def start_both() -> None:
        async with ProcessParts(SystemClock()) as parts:
            await parts.start("a", log.start("a"), log.stop)
            await parts.start("b", fail(), log.stop)

    with pytest.raises(OSError, match="no disk"):
        await start_both()
    assert log.lines == ["start a", "stop a"]


async def test_a_part_that_fails_or_hangs_at_its_stop_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()

    async def hang(_: str) -> None:
        await asyncio.Event().wait()

    async def fail(_: str) -> None:
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR):
        async with ProcessParts(SystemClock()) as parts:
            await parts.start("a", log.start("a"), log.stop)
            await parts.start("b", log.start("b"), hang, stop_timeout_s=0.01)
            await parts.start("c", log.start("c"), fail)
    assert log.lines[-1] == "stop a"
    assert [each.state for each in parts.statistics()] == [
        ProcessPartState.STOPPED,
        ProcessPartState.FAILED,
        ProcessPartState.FAILED,
    ]
    assert [record.getMessage() for record in caplog.records] == ["c failed to stop", "b did not stop within 0.01 s"]
