"""The partitions that one producer publishes to: one PartitionProducer each, and which of them a message goes to.

    partitions = await PartitionProducers.open(connections, topic, settings)    all of them, or none when one refuses
    partitions.route(message)                   from any thread
    await partitions.close()

Partitions that are added to the topic are found by a PartitionsWatcher; keys are routed by the new number when all of
them are open. `all` stays the same list. Guards: tests/client/connect/test_partitions_watcher.py.
"""

from __future__ import annotations

import asyncio

from ...proto.names import TopicName
from ..common.checks import WrongValue, shown
from ..common.closing import close_all
from ..connect.connections import Connections
from ..connect.partitions_watcher import PartitionsWatcher
from ..core.batcher import OutgoingMessage
from ..core.router import PartitionsRoutingMode, Router
from ..crypto.encryptor import Encryptor
from ..model.settings import ProducerAccessMode, ProducerSettings
from .messages import MessageDraft
from .partition_producer import PartitionProducer

UNBOUNDED = 1 << 40
"""Messages: what 0 asks for."""


class PartitionProducers:
    """The partitions of one producer."""

    def __init__(self, connections: Connections, topic: TopicName, settings: ProducerSettings, count: int) -> None:
        """Makes the producers. `count` 0: the topic is not partitioned. CryptoError: the messages cannot be encrypted.
        """
        self.all: list[PartitionProducer] = []
        self.connections = connections
        self._settings = settings
        self._now = connections.world.clock.monotonic
        across = (settings.max_pending_messages_across_partitions or UNBOUNDED) // max(1, count)
        self._pending_max = min(settings.max_pending_messages or UNBOUNDED, max(1, across))
        self._topic = topic
        self._router = self._new_router(count) if count else None
        self._watcher: PartitionsWatcher | None = None
        reader = settings.crypto_key_reader
        self._encrypt = Encryptor(reader, settings.encryption_keys, self._now) if reader is not None else None

    def _new_router(self, count: int) -> Router:
        settings = self._settings
        return Router(
            count, PartitionsRoutingMode(settings.message_routing_mode), self.connections.world.rng,
            window_s=settings.batching_max_publish_delay_ms / 1000 if settings.batching_enabled else 0.0,
            messages_max=settings.batching_max_messages, bytes_max=settings.batching_max_allowed_size_in_bytes,
        )  # fmt: skip

    # ------------------------------------------------------------------------------ the beginning
    @classmethod
    async def open(
        cls, connections: Connections, topic: TopicName, settings: ProducerSettings, epoch: int = 0
    ) -> PartitionProducers:
        count = await connections.partitions(topic)
        partitions = cls(connections, topic, settings, count)
        await partitions._add([topic.with_partition(i) for i in range(count)] or [topic], epoch)
        partitions._watcher = PartitionsWatcher(connections, {topic: count}, partitions._grow)
        return partitions

    async def _grow(self, topic: TopicName, count: int) -> None:
        assert self._router is not None, "only a partitioned topic grows"
        await self._add([topic.with_partition(i) for i in range(len(self.all), count)])
        self._router.grow(len(self.all))  # last: other threads ask it

    async def _add(self, names: list[TopicName], epoch: int = 0) -> None:
        """Adds partitions. The broker names the first one; all carry that name. None is added when one cannot be
        opened."""
        new = [
            PartitionProducer(self.connections, name, self._settings, self._pending_max, self._encrypt)
            for name in names
        ]
        for each in new:
            each.core.epoch = epoch
        try:
            if not self.all:
                await new[0].open()
            first = (self.all or new)[0]
            later = [each for each in new if each is not first]
            for each in later:
                each.core.name = first.core.name
            if self._opens_late:
                for each in later:
                    each.core.wait_for_messages()
            else:
                await asyncio.gather(*(each.open() for each in later))
        except BaseException:
            await asyncio.gather(*(each.close() for each in new), return_exceptions=True)
            raise
        self.all.extend(new)

    @property
    def _opens_late(self) -> bool:
        """Whether each is opened with its first message: lazy, unless its opening has an effect that must come now:
        exclusive access, or an initial subscription."""
        settings = self._settings
        shared = settings.access_mode == ProducerAccessMode.Shared
        return settings.lazy_start_partitioned_producers and shared and not settings.initial_subscription_name

    # ------------------------------------------------------------------------------ which one
    @property
    def only(self) -> PartitionProducer | None:
        """Returns the only producer; None: messages are routed."""
        return self.all[0] if self._router is None else None

    def route(self, message: OutgoingMessage) -> PartitionProducer:
        """Raises WrongValue, and what the program's `message_router` raises."""
        if self._router is None:
            return self.all[0]
        choose = self._settings.message_router
        if choose is None:
            key = message.partition_key if message.partition_key is not None else message.ordering_key
            return self.all[self._router.route(key, len(message.payload), self._now())]
        number = choose(MessageDraft(message, self._settings.schema), self._router.partitions)
        if not isinstance(number, int) or not 0 <= number < len(self.all):
            raise WrongValue(f"message_router chose partition {shown(number)} of {len(self.all)}")
        return self.all[number]

    # ------------------------------------------------------------------------------ the end
    def abort(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        for each in self.all:
            each.abort()

    async def close(self) -> None:
        """Flushes and closes all; raises the first error of them."""
        try:
            if self._watcher is not None:
                await self._watcher.close()
            await close_all(self.all)
        except BaseException:  # the close was interrupted: they end at once
            self.abort()
            raise
