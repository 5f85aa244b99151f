"""Publishes entries that are encoded already, such as copies from another cluster, to one partition that it has alone.

    writer = EntryWriter(connections, topic, name, done)
    await writer.open()                  exclusive: a second writer, or a program, is refused (Busy)
    await writer.send(entry, stored)     waits for credit; `done` is told when it is durable
    await writer.drain()

The bytes are stored as they are. A connection that is lost ends the writer: what had no answer may be stored or not,
and is never sent again. Another writer begins with what the topic has then. Guard: tests/cli/migrate/test_migrate.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...proto import wire_pb2 as wire
from ...proto.errors import Busy, ConnectionLost, MagnetarError, ProducerBusy, ProducerFenced, from_wire
from ...proto.model import ENTRY_COST_BYTES, AccessMode
from ...proto.names import Position, TopicName
from ..connect.attachment import Attachment
from ..connect.connections import Connections


class Stored(NamedTuple):
    """An entry as its writer sees it."""

    sequence_id: int
    position: Position  # where it comes from
    messages: int
    size: int  # bytes


Done = Callable[[Stored], None]


class EntryWriter:
    """Publishes encoded entries, and is its attachment's owner (client/connect/attachment.py). `done` is told what is
    stored."""

    def __init__(self, connections: Connections, topic: TopicName, name: str, done: Done) -> None:
        self.topic = topic
        self.waits = False
        self._name = name
        self._instance = connections.world.rng.randbytes(8).hex()
        self._attachment = Attachment(connections, self)
        self._done = done
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credit = 0
        self._sent: deque[Stored] = deque()  # … when they have their answer
        self._changed = asyncio.Event()
        self._error: MagnetarError | None = None

    async def open(self) -> None:
        """Opens the producer. Busy: another one is connected."""
        self._attachment.open()
        try:
            await self._opened
        except (ProducerBusy, ProducerFenced) as error:
            text = f"{self.topic} has another producer: another copy, or a program that shall wait until the end"
            raise Busy(f"{text} ({error.message})", topic=self.topic.full) from None

    async def send(self, entry: bytes, stored: Stored) -> None:
        """Raises why the writer ended."""
        while self._credit <= 0 and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        self._credit -= len(entry) + ENTRY_COST_BYTES
        self._sent.append(stored)
        self._attachment.publish(entry)

    def check(self) -> None:
        """Raises why the writer ended."""
        if self._error is not None:
            raise self._error

    async def drain(self) -> None:
        """Returns when all that was sent is stored."""
        while self._sent and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        await self._attachment.close()

    # ------------------------------------------------------------------------------ of the attachment
    def first_frame(self) -> dict[str, Any]:
        return {"open_producer": wire.OpenProducer(
            topic=self.topic.full, producer_name=self._name, instance=self._instance, connection=1, copies=True,
            access_mode=int(AccessMode.EXCLUSIVE),  # type: ignore[arg-type]
        )}  # fmt: skip

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None:
        for frame in frames:
            if not self._attachment.is_attached:
                break
            match frame.WhichOneof("kind"):
                case "receipt":
                    self._receipt(frame.receipt.sequence_id)
                case "credit":
                    self._credit += frame.credit
                case "producer_opened":
                    self._credit = frame.producer_opened.credit
                    self._attachment.opened()
                case "failed":
                    self._end(from_wire(frame.failed.error))
                case "done":
                    self._attachment.done()
                case "closed":
                    self._attachment.closed(from_wire(frame.closed))
                case kind:
                    self._end(ConnectionLost(f"the broker said {kind} out of turn"))
        self._changed.set()

    def _receipt(self, sequence_id: int) -> None:
        if not self._sent or self._sent[0].sequence_id != sequence_id:
            self._end(ConnectionLost(f"a receipt for {sequence_id} out of turn"))
            return
        self._done(self._sent.popleft())

    def _end(self, error: MagnetarError) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()

    def on_open(self, error: MagnetarError | None) -> None:
        if self._opened.done():
            return
        if error is None:
            self._opened.set_result(None)
        else:
            self._opened.set_exception(error)

    def on_lost(self, error: MagnetarError) -> None:
        self._end(error)

    def broke(self, error: Exception) -> None:
        self._end(ConnectionLost(f"the producer failed: {error}"))
