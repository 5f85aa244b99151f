"""One end of a gRPC stream of items, the same for client and server: a queue each way and a task each way.

Out: `send_nowait` serialises the item and queues it. The flusher takes all queued items, up to COALESCE_BYTES, builds
the envelope `{repeated X items = 1}` by hand (tag, length, item), gives it to gRPC, and never waits for more.
An envelope of very many items is parsed in slices of ITEMS_AT_ONCE, with a turn of the loop between two slices: an item
may have two bytes, and a thousand items take a millisecond. At a server a slice also has at most PARSED_AT_ONCE bytes
besides entries. An envelope contains only items: anything else is WrongProtocol, and ends the stream.
In: the puller, started by the first `receive`, reads envelopes ahead, up to READ_AHEAD_BYTES, so that gRPC's next read
runs while the last items are processed; `receive` parses and returns all items that have arrived. A cancelled `receive`
loses nothing.

Two tasks per stream, none per message. Bounds: STREAM_QUEUE_BYTES out (`send` waits; `send_nowait` is for callers that
have a bound of their own), READ_AHEAD_BYTES plus one envelope in; above it gRPC's own window stops the sender.

The two ends differ only in how they read, write and cut (`read`, `write`, `cut`, given at construction).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ...proto.errors import ConnectionLost, MagnetarError, MessageTooLarge, WrongProtocol
from ...proto.varint import varint
from ..access import CallerMemory
from ..network import COALESCE_BYTES, MESSAGE_BYTES_MAX, STREAM_QUEUE_BYTES, EndOfStream
from .envelope import ITEMS_AT_ONCE, PARSED_AT_ONCE, PREFIXES, SHORT, are_long, item_at
from .errors import copy_of

READ_AHEAD_BYTES = 2 << 20
"""Two full envelopes: one that is processed, one that waits."""
CROWDED_BYTES = 64 << 10
"""What `send` queues at most while the memory of the process is tight."""


class GrpcStream:
    """One end of a stream. `read` returns the bytes of one envelope, or raises EndOfStream or a MagnetarError."""

    def __init__(
        self,
        envelope: type[Any],
        read: Callable[[], Awaitable[bytes]],
        write: Callable[[bytes], Awaitable[None]],
        cut: Callable[[MagnetarError], None],
        *, in_bytes_max: int = MESSAGE_BYTES_MAX, out_bytes_max: int = COALESCE_BYTES,
        copied: frozenset[int] | None = None, memory: CallerMemory | None = None,
    ) -> None:  # fmt: skip
        """`memory` has what is queued, and what came, with what `receive` gave last."""
        memory = memory or CallerMemory()
        self._requests, self._answers = memory.requests, memory.answers
        self._envelope = envelope
        self._read = read
        self._write = write
        self._cut = cut
        self._in_bytes_max = in_bytes_max
        self._copied = copied
        self._envelope_bytes = min(COALESCE_BYTES, out_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._broken: MagnetarError | None = None
        self._waiting: list[asyncio.Future[None]] = []
        # out
        self._pieces: deque[tuple[bytes, bytes]] = deque()
        self._queued = 0
        self._left = 0
        self._flusher: asyncio.Task[None] | None = None
        self._closing = False
        self._work: asyncio.Future[None] | None = None
        # in
        self._came: list[bytes] = []
        self._came_bytes = 0
        self._taken_bytes = 0  # of the envelopes of `receive`'s last items, and of `_rest`
        self._rest: deque[bytes] = deque()  # envelopes of very many items, received and not parsed yet
        self._rest_from = 0  # the end of what is parsed of the first
        self._end: EndOfStream | MagnetarError | None = None
        self._puller: asyncio.Task[None] | None = None
        self._reading = False

    # ------------------------------------------------------------------------------ out
    @property
    def queued_bytes(self) -> int:
        return self._queued

    def send_nowait(self, item: Message | bytes) -> None:
        """Queues an item, or the bytes of one."""
        if self._broken is not None:
            raise copy_of(self._broken)
        data = item if isinstance(item, bytes) else item.SerializeToString()
        size = len(data)
        prefix = PREFIXES[size] if size < SHORT else b"\x0a" + varint(size)
        self._pieces.append((prefix, data))
        size += len(prefix)
        self._queued += size
        self._answers.held += size
        if self._work is not None:
            if not self._work.done():
                self._work.set_result(None)
        elif self._flusher is None:
            self._flusher = self._loop.create_task(self._flush())

    async def send(self, item: Message | bytes) -> None:
        limit = STREAM_QUEUE_BYTES if self._answers.held <= self._answers.tight else CROWDED_BYTES
        if self._queued > limit:
            await self.drained(limit)
        self.send_nowait(item)

    async def drained(self, bytes_max: int = STREAM_QUEUE_BYTES) -> None:
        while self._queued > bytes_max and self._broken is None:
            await self._change()
        if self._broken is not None:
            raise copy_of(self._broken)

    @property
    def left_bytes(self) -> int:
        return self._left

    async def left(self, offset: int) -> None:
        while self._left < offset and self._broken is None:
            await self._change()
        if self._broken is not None:
            raise copy_of(self._broken)

    async def finish(self) -> None:
        """Returns when all queued items have been given to gRPC (or the stream is broken)."""
        self._closing = True
        if self._flusher is not None:
            if self._work is not None and not self._work.done():
                self._work.set_result(None)
            await asyncio.wait((self._flusher,))

    async def written(self, timeout_s: float) -> None:
        """After `fail` or `break_off`: returns when gRPC has sent its current write, or after `timeout_s`.

        gRPC takes no status during the first write: the reader would never learn of the end.
        """
        if self._flusher is not None and not self._flusher.done():
            await asyncio.wait((self._flusher,), timeout=timeout_s)

    async def _flush(self) -> None:
        try:
            while await self._more_to_send():
                size, envelope = self._next_envelope()
                await self._write(envelope)
                if self._queued:  # or the stream broke meanwhile
                    self._queued -= size
                    self._answers.held -= size
                self._left += size
                if self._waiting:
                    self._changed()
        except MagnetarError as error:
            self.fail(error)
        finally:
            if not self._closing:
                self.fail(ConnectionLost("the stream's sender ended"))

    async def _more_to_send(self) -> bool:
        while not self._pieces:
            if self._closing:
                return False
            self._work = self._loop.create_future()
            await self._work
            self._work = None
        return True

    def _next_envelope(self) -> tuple[int, bytes]:
        pieces = self._pieces
        parts: list[bytes] = []
        size = 0
        while pieces and (not size or size + len(pieces[0][1]) <= self._envelope_bytes):
            prefix, data = pieces.popleft()
            parts += (prefix, data)
            size += len(prefix) + len(data)
        return size, b"".join(parts)

    # ------------------------------------------------------------------------------ in
    async def receive(self) -> Sequence[Any]:
        assert not self._reading, "one reader of a stream at a time"
        self._reading = True
        try:
            self._start_pulling()
            if not self._rest:
                self._requests.held -= self._taken_bytes
                self._taken_bytes = 0
            while True:
                if self._rest:
                    await asyncio.sleep(0)  # other tasks run
                    if items := self._some():
                        return items
                    continue
                while not self._came:
                    if self._end is not None:
                        raise EndOfStream if isinstance(self._end, EndOfStream) else copy_of(self._end)
                    await self._change()
                if items := self._take():
                    return items
        finally:
            self._reading = False

    def _take(self) -> list[Any]:
        came, self._came = self._came, []
        if self._came_bytes > READ_AHEAD_BYTES:
            self._changed()  # the puller waits
        self._taken_bytes += self._came_bytes
        self._came_bytes = 0
        if sum(map(len, came)) > 4 * ITEMS_AT_ONCE:  # an item has at least two bytes
            try:
                is_long = are_long(came, self._copied)
            except MagnetarError as error:
                self.break_off(error)
                raise copy_of(error) from None
            if is_long:
                self._rest.extend(came)
                return self._some()
        return [item for data in came for item in self._parsed(data)]

    def _some(self) -> list[Any]:
        """The next of the received items: ITEMS_AT_ONCE, or PARSED_AT_ONCE bytes to parse."""
        data, offset, items, parsed = self._rest[0], self._rest_from, 0, 0
        end = len(data)
        try:
            while offset < end and items < ITEMS_AT_ONCE:
                after, size = item_at(data, offset, self._copied)
                if items and parsed + size > PARSED_AT_ONCE:
                    break
                offset, items, parsed = after, items + 1, parsed + size
        except MagnetarError as error:
            self.break_off(error)
            raise copy_of(error) from None
        part = data[self._rest_from : offset]
        if offset < end:
            self._rest_from = offset
        else:
            self._rest.popleft()
            self._rest_from = 0
        return list(self._parsed(part))

    def _parsed(self, data: bytes) -> Any:
        try:
            envelope = self._envelope.FromString(data)
            if len(UnknownFieldSet(envelope)):
                raise DecodeError("it has a field that is not known")
            return envelope.items
        except DecodeError as error:
            name = self._envelope.DESCRIPTOR.full_name
            broken = WrongProtocol(f"a message on the stream is no {name}: {error}")
            self.break_off(broken)
            raise copy_of(broken) from error

    def _start_pulling(self) -> asyncio.Task[None]:
        if self._puller is None:
            self._puller = self._loop.create_task(self._pull())
        return self._puller

    async def _pull(self) -> None:
        try:
            while True:
                if self._requests.held > self._requests.limit:
                    await self._requests.room()
                data = await self._read()
                if len(data) > self._in_bytes_max:
                    self.break_off(MessageTooLarge(
                        f"{len(data)} bytes of requests at once; at most {self._in_bytes_max} are taken",
                        size=len(data), limit=self._in_bytes_max,
                    ))  # fmt: skip
                    return
                self._came.append(data)
                self._came_bytes += len(data)
                self._requests.held += len(data)
                self._changed()
                while self._came_bytes > READ_AHEAD_BYTES and not (self._closing and not self._reading):
                    await self._change()
        except (EndOfStream, MagnetarError) as error:
            self._end = self._end or error
        finally:
            self._end = self._end or ConnectionLost("the stream is closed")
            self._changed()

    # ------------------------------------------------------------------------------ the end
    def fail(self, error: MagnetarError) -> None:
        """The stream is broken: nothing more is sent, and senders get the error. Items that arrived can be received."""
        if self._broken is not None:
            return
        self._broken = error
        self._pieces.clear()
        self._answers.held -= self._queued
        self._queued = 0
        self._closing = True
        if self._work is not None and not self._work.done():
            self._work.set_result(None)
        self._changed()

    def break_off(self, error: MagnetarError) -> None:
        """Ends both directions now, for `error`."""
        self.fail(error)
        self._uncount_received()
        self._came.clear()
        self._rest.clear()
        self._rest_from = 0
        self._end = error
        self._changed()
        self._cut(error)

    def _uncount_received(self) -> None:
        self._requests.held -= self._came_bytes + self._taken_bytes
        self._came_bytes = self._taken_bytes = 0

    def cancel(self) -> None:
        self.break_off(ConnectionLost("the stream was cancelled"))

    async def close(self) -> None:
        """Nothing at the server: its stream ends with its handler."""

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def release_soon(self) -> list[asyncio.Task[None]]:
        """After the end: cancels both tasks."""
        self.fail(ConnectionLost("the stream is closed"))
        self._uncount_received()
        tasks = [task for task in (self._flusher, self._puller) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def release(self) -> None:
        """After the end: returns when both tasks have ended."""
        if tasks := self.release_soon():
            await asyncio.wait(tasks)

    async def _change(self, timeout_s: float | None = None) -> None:
        """Waits until something of this stream has changed (room, arrival, end)."""
        change = self._loop.create_future()
        self._waiting.append(change)
        try:
            if timeout_s is None:
                await change
            else:
                await asyncio.wait((change,), timeout=timeout_s)
        finally:
            if change in self._waiting:  # it was cancelled, or the time is over
                self._waiting.remove(change)

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)
