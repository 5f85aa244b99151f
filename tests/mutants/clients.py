"""Defects of the SDK: where messages wait, what it tells of unknown outcomes, and what it leaves open."""

from __future__ import annotations

import asyncio
from typing import Any

from magnetar.client.blocking import client as blocking
from magnetar.client.blocking import handle as blocking_handle
from magnetar.client.common.errors import translate
from magnetar.client.consume.receiver_queue import Inbox
from magnetar.client.produce.partition_producer import PartitionProducer
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import from_wire
from tests.mutants.ledgers import Stack, put


def wake_up_dies_with_its_waiter(stack: Stack) -> None:
    """M41: a receive that is cancelled after it was woken keeps the wake-up call of another."""

    async def woken(self: Inbox) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._waiting.append(wake)
        try:
            await ready
        finally:
            self._forget(wake)

    put(stack, Inbox, "_woken", woken)


def refusal_of_one_settles_its_namesakes(stack: Stack) -> None:
    """M42: a refusal is told to every message under way of that sequence id, also to one that was not judged yet."""
    honest = PartitionProducer._publish_failed

    def publish_failed(self: PartitionProducer, failed: wire.PublishFailed) -> None:
        honest(self, failed)
        while self._in_flight and self._in_flight[0].sequence_id == failed.sequence_id:
            self._fail(self._in_flight.popleft(), translate(from_wire(failed.error)).result)

    put(stack, PartitionProducer, "_publish_failed", publish_failed)


def dropped_and_not_closed(stack: Stack) -> None:
    """M43: a handle that is dropped without close goes on taking messages, which nobody receives (ours)."""

    def close_soon(*_: Any) -> None:
        pass

    put(stack, blocking_handle, "close_soon", close_soon)
    put(stack, blocking, "close_soon", close_soon)
