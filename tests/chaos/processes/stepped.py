"""`magnetar …` that kills itself, or another process, with `kill -9` at a step of a move of bundles.

    python -m tests.chaos.processes.stepped STEP NUMBER PID ARGUMENTS…

is `magnetar ARGUMENTS…` that kills PID (0: itself) when it comes to STEP (STEPS) for the NUMBERth time, and says so on
stderr. Steps of a drain count from the begin of the broker's first drain on, those of the next owner from its start on.
NUMBER 0: it comes to the step and no further.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from magnetar.broker.cluster.ownership import Ownership
from magnetar.broker.log.topic_log import TopicLog
from magnetar.broker.node.topic_manager import TopicManager
from magnetar.broker.subscription.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.broker.transaction.coordinators import TransactionCoordinators


class Step(NamedTuple):
    owner: type
    method: str
    is_after: bool = False
    """After the method; else before it."""
    drains: bool = True
    """It is one of the broker that gives its bundles away; else of the one that gets them."""


STEPS = {
    "it is registered as draining": Step(Ownership, "store_draining", is_after=True),
    "a topic takes nothing any more": Step(Topic, "_close"),
    "a ledger is closed": Step(TopicLog, "close", is_after=True),
    "clients are told": Step(Topic, "_close_subscriptions"),
    "a cursor is stored": Step(Subscription, "close", is_after=True),
    "a coordinator is closed": Step(TransactionCoordinators, "unload_coordinator", is_after=True),
    "the next owner is about to be named": Step(Ownership, "_write_owner"),
    "the next owner is named": Step(Ownership, "_write_owner", is_after=True),
    "the rest is released": Step(Ownership, "close"),
    "the next owner has taken it": Step(Ownership, "_write_owner", is_after=True, drains=False),
    "the next owner has opened it": Step(Topic, "open", is_after=True, drains=False),
}


def die_at(name: str, number: int, pid: int = 0) -> None:
    """Replaces the method of the step. `pid`: the process that dies; 0: this one."""
    step, came, drains = STEPS[name], 0, False
    drain: Any = TopicManager.drain_broker
    method: Callable[..., Awaitable[Any]] = getattr(step.owner, step.method)

    async def drain_and_note(self: Any, **options: Any) -> Any:
        nonlocal drains
        drains = True
        return await drain(self, **options)

    async def come() -> None:
        nonlocal came
        came += drains is step.drains
        if not number and came:
            await asyncio.Event().wait()
        if came == number:
            print(f"dies: {name}", file=sys.stderr, flush=True)
            os.kill(pid or os.getpid(), signal.SIGKILL)

    async def do(self: Any, *arguments: Any, **options: Any) -> Any:
        if not step.is_after:
            await come()
        try:
            return await method(self, *arguments, **options)
        finally:
            if step.is_after:
                await come()

    TopicManager.drain_broker = drain_and_note  # type: ignore[method-assign]
    setattr(step.owner, step.method, do)


if __name__ == "__main__":
    from magnetar.cli.main import main

    at, times, victim = sys.argv[1:4]
    del sys.argv[1:4]
    die_at(at, int(times), int(victim))
    sys.exit(main())
