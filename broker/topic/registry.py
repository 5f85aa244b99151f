"""The producers of a topic: which ones join, wait, or are disconnected (publish_core.py decides).

A producer joins in this order: the topic is served here; its quota and its limits (admission_core.py) admit one more;
the producer was not fenced meanwhile; it is registered, which it may have to wait for; the epoch, if it grows, is
durable; what was published under its name before is known (dedup.py). Only then may it publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...proto.errors import MagnetarError, ProducerBusy, ProducerFenced, Unavailable
from ...proto.states import AccessMode
from .producer import Producer
from .publish_core import EpochChange, ProducerJoinDenied, ProducerRegistration, ProducerTable, judge_epoch, next_epoch

if TYPE_CHECKING:
    from .topic import Topic


class ProducerRegistry:
    """The producers of one topic: those that are registered, and those that wait for exclusive access. Iterating yields
    all of them."""

    __slots__ = ("_epochs", "_here", "_table", "_topic")

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._table = ProducerTable()
        self._here: dict[int, Producer] = {}
        self._epochs: asyncio.Lock | None = None  # one change at a time; None: there was none

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[Producer]:
        return iter(self._here.values())

    async def join(self, producer: Producer) -> None:
        """Registers the producer; first waits for exclusive access if its mode is WAIT_FOR_EXCLUSIVE. Raises
        ProducerBusy or ProducerFenced if it may not join; BacklogQuotaExceeded if publishes are refused; NotOwner if
        the topic has ended at this broker."""
        topic = self._topic
        topic.check_open()
        refusal = topic.maintenance.publish_refusal()
        if refusal is not None:
            raise refusal
        if producer.mode is not AccessMode.EXCLUSIVE:  # that is alone, or fenced, whatever may be here
            topic.admission.check_producer(topic.applied, producer, self._here.values())
        epoch, created_ms = topic.log.record.epoch, topic.log.record.created_ms
        if self._epochs is not None and self._epochs.locked():  # another one has the next epoch; it is not stored yet
            epoch = next_epoch(epoch, created_ms)
        change = judge_epoch(producer.mode, producer.epoch, epoch)
        if change is EpochChange.FENCED:
            raise ProducerFenced(f"topic {topic.name}, producer {producer.name!r}: {change.value}", topic=topic.name)
        registered = self._register(producer)
        topic.dedup.on_producer_joined(producer.name)
        if not registered:
            producer.turn = asyncio.get_running_loop().create_future()
            await producer.turn
        if change is EpochChange.GROWS:
            if self._epochs is None:
                self._epochs = asyncio.Lock()
            async with self._epochs:
                producer.epoch = next_epoch(topic.log.record.epoch, topic.log.record.created_ms)
                await topic.log.commit_fields(epoch=producer.epoch)
        await topic.dedup.wait_idle(producer.name)
        await topic.transactions.wait_idle(producer.name)
        topic.check_open()

    def _register(self, producer: Producer) -> bool:
        """Registers a producer. Returns False if it has to wait for exclusive access. Displaced producers are closed.
        Raises ProducerBusy or ProducerFenced if it is denied."""
        name = self._topic.name
        answer = self._table.join(ProducerRegistration(
            producer.id, producer.name, producer.mode, producer.instance, producer.connection, producer.writer
        ))  # fmt: skip
        if answer.denied is not None:
            # one that returns tries again
            first = answer.denied is ProducerJoinDenied.HAS_PRODUCERS and producer.epoch == 0
            text = f"topic {name}, producer {producer.name!r}: {answer.denied.value}"
            raise (ProducerFenced if first else ProducerBusy)(text, topic=name, producer=producer.name)
        for other in answer.replaced:
            self._displace(other, Unavailable(f"producer {other.name!r} has connected again"))
        for other in answer.fenced:
            self._displace(other, ProducerFenced(f"producer {producer.name!r} has taken topic {name} for itself"))
        self._here[producer.id] = producer
        return answer.registered

    def _displace(self, registration: ProducerRegistration, error: MagnetarError) -> None:
        producer = self._here.pop(registration.id, None)
        if producer is not None:
            self._topic.dedup.on_producer_left(producer.name)
            producer.close(error)

    def leave(self, producer: Producer) -> None:
        """Removes a producer whose stream has ended. Idempotent."""
        if self._here.pop(producer.id, None) is not None:
            self._topic.dedup.on_producer_left(producer.name)
        for successor in self._table.leave(producer.id):
            waiting = self._here.get(successor.id)
            if waiting is not None and waiting.turn is not None and not waiting.turn.done():
                waiting.turn.set_result(None)

    def close(self, error: MagnetarError) -> None:
        """Closes all producers with `error`, because the topic ends at this broker."""
        for producer in list(self._here.values()):
            producer.close(error)
        self._here.clear()
