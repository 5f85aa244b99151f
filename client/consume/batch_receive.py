"""How many messages `batch_receive` gives at once, and when (Pulsar S18).

It returns as soon as the first of three is reached: `max_num_message`, `max_num_bytes` (of payload), `timeout_ms` since
it was called; what came by then, in order, perhaps nothing. A number that is not above 0 is no limit; without messages
and bytes the bytes are DEFAULT_BYTES, so that a batch is never without bound. Neither number is exceeded: the message
that would is the first of the next batch, and only a message that is larger by itself comes alone. A batch may be
larger than `receiver_queue_size` (Pulsar cuts it there): what is taken makes room, so without a time-out it never
waits for what cannot come.

Nothing is lost between two batches: when it is cancelled, or a message raises (a damaged one, a consumer that was
closed), what was taken goes back to the front of the inbox. Guards: tests/client/consume/test_batch_receive.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..common.checks import BATCH_RECEIVE_POLICY, WrongValue, check
from ..common.errors import Timeout
from ..model.message import Message
from .receiver_queue import ReceiverQueue

DEFAULT_BYTES = 10 << 20
"""Pulsar's default of bytes in a batch."""


@dataclass(frozen=True, slots=True)
class ConsumerBatchReceivePolicy:
    """The policy of `batch_receive`, which returns when one of these is reached; 0 or -1: no such limit."""

    max_num_message: int = -1
    max_num_bytes: int = DEFAULT_BYTES
    timeout_ms: int = 100

    def __post_init__(self) -> None:
        check(BATCH_RECEIVE_POLICY, {name: getattr(self, name) for name in BATCH_RECEIVE_POLICY})
        if self.max_num_message <= 0 and self.max_num_bytes <= 0 and self.timeout_ms <= 0:
            raise WrongValue(
                "a batch receive policy needs at least one of max_num_message, max_num_bytes and timeout_ms above 0"
            )

    def policy(self) -> ConsumerBatchReceivePolicy:
        """Returns the policy itself: a method of Pulsar's client, which has two kinds."""
        return self

    def getMaxNumMessages(self) -> int:
        """Returns `max_num_message`."""
        return self.max_num_message

    def getMaxNumBytes(self) -> int:
        """Returns `max_num_bytes`."""
        return self.max_num_bytes

    def getTimeoutMs(self) -> int:
        """Returns `timeout_ms`."""
        return self.timeout_ms

    @property
    def bytes_max(self) -> int:
        """Returns the limit of bytes; 0: no limit."""
        if self.max_num_bytes > 0:
            return self.max_num_bytes
        return 0 if self.max_num_message > 0 else DEFAULT_BYTES


class BatchReceivePolicy(ConsumerBatchReceivePolicy):
    """Another name of ConsumerBatchReceivePolicy, from Pulsar's C++ client."""

    __slots__ = ()


async def receive_batch(
    inbox: ReceiverQueue, policy: ConsumerBatchReceivePolicy, now: Callable[[], float]
) -> list[Message]:
    """Receives a batch, in the event loop. `now`: a monotonic clock, in seconds."""
    deadline = now() + policy.timeout_ms / 1000 if policy.timeout_ms > 0 else None
    most, bytes_max = policy.max_num_message, policy.bytes_max
    messages: list[Message] = []
    size = 0
    try:
        while not (0 < most <= len(messages)) and not (0 < bytes_max <= size):
            following = inbox.first()
            if following is None:
                left = None if deadline is None else deadline - now()
                if left is not None and left <= 0:
                    break
                try:
                    await inbox.wait_filled(left)
                except Timeout:
                    break
                continue
            if messages and 0 < bytes_max < size + len(following.payload):
                break
            message = inbox.take_nowait()
            if message is not None:  # a thread that receives beside us may have been faster
                messages.append(message)
                size += len(message.payload)
    except BaseException:
        inbox.put_back(messages)
        raise
    return messages


async def decodable(inbox: ReceiverQueue, *messages: Message) -> None:
    """Finds the schemas with which they were written, so that `value` need not ask. When it fails, or is cancelled,
    they are received again."""
    try:
        for message in messages:
            await message.know_writer()
    except BaseException:
        inbox.put_back(messages)
        raise


class ReceivedBatch:
    """A batch for a caller in another thread, which may have ended (Ctrl-C) when it is full: then it is put back."""

    def __init__(self, inbox: ReceiverQueue, now: Callable[[], float]) -> None:
        self._now = now
        self._inbox = inbox
        self._messages: list[Message] = []
        self._unwanted = False

    async def receive(self, policy: ConsumerBatchReceivePolicy) -> list[Message]:
        self._messages = await receive_batch(self._inbox, policy, self._now)
        if self._unwanted:
            self.give_back()
        return self._messages

    def give_back(self) -> None:
        """Gives back, in the event loop, what it holds, now or later: others receive it."""
        self._unwanted = True
        messages, self._messages = self._messages, []
        if messages:
            self._inbox.put_back(messages)
