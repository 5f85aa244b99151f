"""The queue of received messages that wait for the application: filled by the event loop, emptied from any one world.

A deque does the work: `put` and `take_nowait` need no lock. A waiter leaves a wake-up call; `put` makes as
many calls as there are messages. A wake-up is a hint: the waiter looks again, and waits again when another was faster.

**No wake-up is lost.** A waiter that stops for another reason (a time-out, a cancelled task, Ctrl-C) takes its call
back; if that was made already, it is made to the next who waits (`leave`). A task takes a message and returns it in one
step, so a cancelled one has taken none. Ctrl-C at any point of `take_nowait` leaves the message, and its permits, here.
Guards: tests/client/blocking/test_waking.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat, starmap

from ..common.errors import PulsarException, Timeout
from ..model.message import Message


class ReceiverQueue:
    """A queue of received messages."""

    def __init__(self) -> None:
        self._fill(deque())
        self._waiting: deque[Callable[[], object]] = deque()
        self._error: PulsarException | None = None
        self._at_end: list[Callable[[], object]] = []

    def _fill(self, messages: deque[Message]) -> None:
        self.messages = messages
        self._first = starmap(messages.popleft, repeat(()))  # never ends: an empty deque raises

    def __len__(self) -> int:
        return len(self.messages)

    def put(self, messages: Iterable[Message]) -> None:
        self.messages.extend(messages)
        waiting = self._waiting
        if waiting:
            try:
                for _ in range(min(len(waiting), len(self.messages))):
                    waiting.popleft()()
            except IndexError:
                return  # they left meanwhile

    def take_nowait(self) -> Message | None:
        try:
            for message in self._first:  # no call of `popleft`: Ctrl-C would fall between it and its result
                if not message.permits:
                    return message
                break
            else:
                return None
        except IndexError:
            return None
        try:
            message.entry.consumer.taken(message)
        except PulsarException:  # a damaged one
            raise
        except BaseException:
            message.entry.consumer.interrupted()
            message.permits = max(0, message.permits)  # what was given is not given again
            self.messages.appendleft(message)
            self.put(())
            raise
        return message

    def first(self) -> Message | None:
        """Returns the message that `take_nowait` would return, if no other receiver is faster."""
        try:
            return self.messages[0]
        except IndexError:
            return None

    def put_back(self, messages: Sequence[Message]) -> None:
        """Puts messages back, which were taken and not given to the application: they come first again. Their permits
        are given already."""
        for message in reversed(messages):
            message.permits = 0
            self.messages.appendleft(message)
        self.put(())

    def end(self, error: PulsarException) -> None:
        """Ends the queue: every receiver that waits, now or later, gets this error."""
        self._error = error
        for _ in range(len(self._waiting)):
            self._wake_one()
        at_end, self._at_end = self._at_end, []
        for call in at_end:
            call()

    @property
    def ended(self) -> bool:
        return self._error is not None

    def at_end(self, call: Callable[[], object]) -> None:
        """Calls `call` once, when it ends; now when it has."""
        if self._error is not None:
            call()
        else:
            self._at_end.append(call)

    def _wake_one(self) -> None:
        try:
            wake = self._waiting.popleft()
        except IndexError:
            return
        wake()

    def raise_if_ended(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message) from self._error

    async def take(self, timeout_s: float | None) -> Message:
        """Takes a message, in the event loop. Raises Timeout when nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self.raise_if_ended()
                    if (message := self.take_nowait()) is not None:
                        return message
                    await self._woken()
        except Timeout:  # the inbox ended with one
            raise
        except TimeoutError:
            raise Timeout(f"no message within {timeout_s:g} s") from None

    async def wait_filled(self, timeout_s: float | None) -> None:
        """Returns, in the event loop, when there is something to take. Raises Timeout when nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.messages:
                    self.raise_if_ended()
                    await self._woken()
        except Timeout:  # the inbox ended with one
            raise
        except TimeoutError:
            raise Timeout(f"no message within {timeout_s:g} s") from None

    async def _woken(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wake = _future_waker(ready)
        self._waiting.append(wake)
        try:
            await ready
        except BaseException:
            self.leave(wake)
            raise

    def wait(self, wake: Callable[[], object]) -> None:
        """Calls `wake` once, when there may be something to take. Look again after this: something may be there. Raises
        what ended it, also then: `leave`."""
        self._waiting.append(wake)
        if self._error is not None:
            self.raise_if_ended()

    def drop(self, unwanted: Callable[[Message], bool]) -> int:
        """Throws messages away and returns their permits; in the event loop. A taker sees each other message once."""
        old = self.messages
        self._fill(deque())
        dropped = 0
        while old:
            try:
                message = old.popleft()
            except IndexError:
                break
            if unwanted(message):
                dropped += message.permits
            else:
                self.messages.append(message)
        self.put(())
        return dropped

    def leave(self, wake: Callable[[], object]) -> None:
        """Waits no more; a wake-up that was already spent goes to the next who waits."""
        if not self._forget(wake) and self.messages:
            self._wake_one()

    def _forget(self, wake: Callable[[], object]) -> bool:
        try:
            self._waiting.remove(wake)
        except ValueError:
            return False
        return True


def _future_waker(ready: asyncio.Future[None]) -> Callable[[], None]:
    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    return wake
