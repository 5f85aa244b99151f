"""The events of a consumer: it became the active one of a Failover subscription, or is not any more.

Of each partition alone, when it connects and whenever that changes, in order. `became_active` and `became_inactive` are
those of Pulsar's Java `ConsumerEventListener`; partition -1: the topic has none. The asyncio face calls in the event
loop, the blocking one in a thread of its own (client/blocking/consumer.py).
Guard: tests/client/consume/test_failover_and_key_shared.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from ..common.guard import survived


class ConsumerEventListener(Protocol):
    """A listener that is told, per partition, whether this consumer of a Failover subscription gets its messages.

    `partition_id` -1: the topic is not partitioned. What it raises is logged.
    """

    def became_active(self, consumer: Any, partition_id: int) -> object:
        """Called when the consumer gets the messages of that partition from now on."""
        ...

    def became_inactive(self, consumer: Any, partition_id: int) -> object:
        """Called when another consumer gets them."""
        ...


class ActiveEvents:
    """Keeps events that arrive before the consumer exists, and passes them on then."""

    def __init__(self, listener: ConsumerEventListener) -> None:
        self._listener = listener
        self._consumer: Any = None
        self._told: deque[tuple[int, bool]] = deque()

    def tell(self, partition: int, active: bool) -> None:
        self._told.append((partition, active))
        if self._consumer is not None:
            self._call()

    def attach(self, consumer: Any) -> None:
        """Attaches the consumer, which exists from now on."""
        self._consumer = consumer
        self._call()

    def _call(self) -> None:
        while self._told:
            call(self._listener, self._consumer, *self._told.popleft())


def call(listener: ConsumerEventListener, consumer: Any, partition: int, active: bool) -> None:
    """Calls the listener; what the application raises is logged, and does not end the consumer."""
    try:
        if active:
            listener.became_active(consumer, partition)
        else:
            listener.became_inactive(consumer, partition)
    except BaseException as error:
        survived(error, "a consumer event listener")
