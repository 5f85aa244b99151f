"""The driver of half messages: connected members that answer checks, and tasks that publish committed half messages.

    work = HalfMessageDriver(publish, published, not_published)
    with work.join_member() as member: …                      `await member.next_check()` returns its next check
    work.put_check(AskHalf) | work.publish(PublishHalf)       effects of the core
    await work.close()                                        ends the members and cancels what is being published

Each half message is published by its own task, AT_ONCE at a time, within PUBLISH_S: then its transaction times out.
What is cancelled at the end of the epoch was published in a transaction that the next epoch aborts. Guards:
tests/client/transactions/test_halves.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ...proto.errors import InternalError, MagnetarError, NotOwner, TimedOut
from ...runtime.tasks import Tasks
from .halves_core import PUBLISH_S
from .intents_core import AskHalf, PublishHalf
from .records_core import HalfMessage, Participant

_LOG = logging.getLogger("magnetar.broker.transactions")

AT_ONCE = 64
"""Half messages that one coordinator publishes at a time."""


class HalfMessagePublisher(Protocol):
    """Publishes half messages in a transaction (broker/node/internal_producer.py)."""

    def __call__(self, txn: int, messages: Sequence[HalfMessage]) -> Awaitable[list[Participant]]:
        """Publishes the messages; returns each topic with its receipts. If it raises, some may be in their topics, and
        the transaction must not commit."""
        ...


class HalfGroupMember:
    """A connected process of a group, which answers checks of half messages."""

    def __init__(self) -> None:
        self._asked: deque[AskHalf] = deque()
        self._changed = asyncio.Event()
        self._over: MagnetarError | None = None

    def add_check(self, asked: AskHalf) -> None:
        self._asked.append(asked)
        self._changed.set()

    def close(self, error: MagnetarError) -> None:
        self._over = error
        self._changed.set()

    async def wait_check(self) -> AskHalf:
        """Waits for the next check and returns it. Raises NotOwner if the coordinator moves."""
        while not self._asked:
            if self._over is not None:
                raise self._over
            self._changed.clear()
            await self._changed.wait()
        return self._asked.popleft()


class HalfMessageDriver:
    """The connected members that answer checks, and the tasks that publish half messages, of one coordinator."""

    def __init__(
        self, publish: HalfMessagePublisher, published: Callable[[PublishHalf, list[Participant]], None],
        not_published: Callable[[PublishHalf, MagnetarError], None],
    ) -> None:  # fmt: skip
        self._publish = publish
        self._published = published
        self._not_published = not_published
        self._members: dict[HalfGroupMember, None] = {}  # in the order in which they came
        self._room = asyncio.Semaphore(AT_ONCE)
        self._tasks = Tasks()

    # ------------------------------------------------------------------ members
    @contextmanager
    def connect_member(self) -> Iterator[HalfGroupMember]:
        member = HalfGroupMember()
        self._members[member] = None
        try:
            yield member
        finally:
            self._members.pop(member, None)

    def send_check(self, effect: AskHalf) -> None:
        assert isinstance(effect.member, HalfGroupMember), "members are of this object"
        effect.member.add_check(effect)

    # ------------------------------------------------------------------ publishing
    def start_publishing(self, effect: PublishHalf) -> None:
        self._tasks.spawn(self._work(effect), f"publish of half {effect.half}")

    async def _work(self, effect: PublishHalf) -> None:
        try:
            async with asyncio.timeout(PUBLISH_S), self._room:
                listed = await self._publish(effect.txn, effect.messages)
        except TimeoutError as error:
            known = error if isinstance(error, MagnetarError) else TimedOut(f"not published within {PUBLISH_S:g} s")
            self._not_published(effect, known)
        except MagnetarError as error:
            self._not_published(effect, error)
        except Exception as error:  # a fault of ours must not leave the half without an end
            _LOG.exception("a half is not published")
            self._not_published(effect, InternalError(str(error)))
        else:
            self._published(effect, listed)

    async def close(self) -> None:
        for member in self._members:
            member.close(NotOwner("the coordinator moves; look it up again"))
        await self._tasks.close()
