"""Messages in chunks of one partition, put together: the driver of client/core/chunking.py.

An assembled message is one message to the application: its entry is that of the last chunk, its id knows all of them,
and all of them are acknowledged, given back and delivered again together. The permit of a chunk is free when it comes,
but the last one's, which is the message's.

After a reconnect chunks come again with all that is not acknowledged. A reader starts again at the first chunk of what
it has not read, and leaves out what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from ...proto.compression import decompress
from ...proto.entry import Buffer
from ...proto.names import Position
from ..common.guard import Broke, run
from ..core.chunking import EXPIRE_S, Chunks, Outcome
from ..model.message import Message, ReceivedEntry
from ..model.message_id import MessageId
from ..model.settings import ConsumerSettings, ConsumerType


class Assembling:
    """`drop` and `give_back` acknowledge an entry and ask for it again, from the event loop."""

    def __init__(
        self, settings: ConsumerSettings, drop: Callable[[MessageId], None], give_back: Callable[[MessageId], None],
        broke: Broke,
    ) -> None:  # fmt: skip
        self.chunks = Chunks(
            pending_max=settings.max_pending_chunked_message,
            auto_ack=settings.auto_ack_oldest_chunked_message_on_queue_full,
            ordered=settings.consumer_type is not ConsumerType.Shared,
            log_order=settings.consumer_type in (ConsumerType.Exclusive, ConsumerType.Failover),
        )
        self._drop = drop
        self._give_back = give_back
        self._broke = broke
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------------------ in the loop
    def take(self, received: ReceivedEntry, entry: Buffer) -> Message | None:
        """A chunk came; the message, when it is complete. Raises CorruptEntry."""
        header = received.header
        body = bytes(entry[header.payload_offset :])
        outcome = self.chunks.add(header.metadata, received.position, body, self._loop.time())
        self._settle(outcome)
        if outcome.complete is None:
            self._arm()
            return None
        begun, metadata = outcome.complete, outcome.complete.metadata
        received.chunks = tuple(begun.places)
        payload = begun.payload
        begun.bodies.clear()
        if metadata.compression:
            payload = decompress(metadata.compression, payload, metadata.uncompressed_size)
        return Message(received, metadata, payload, -1)

    def passed(self, received: ReceivedEntry) -> None:
        """An entry that is no chunk came."""
        if len(self.chunks):
            self._settle(Outcome(None, self.chunks.passed(received.header.producer_name, received.position), []))

    def _settle(self, outcome: Outcome) -> None:
        for place in outcome.dropped:
            self._drop(MessageId(-1, *place))
        for place in outcome.given_back:
            self._give_back(MessageId(-1, *place))

    def _arm(self) -> None:
        if self._timer is None and len(self.chunks):
            self._timer = self._loop.call_later(EXPIRE_S / 4, run, self._tick, self._broke)

    def _tick(self) -> None:
        self._timer = None
        self._settle(self.chunks.expire(self._loop.time()))
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------------------ from any thread
    def with_chunks(self, which: Message | MessageId, *, again: bool = False) -> Iterable[Message | MessageId]:
        """Itself and the other entries of its message; it is acknowledged, or given back (`again`)."""
        if isinstance(which, Message):
            known, place = which.entry.chunks, which.entry.position
            if not known:
                return (which,)
        else:
            known, place = which.chunks(), which.position()
        found = self.chunks.given_back(place) if again else self.chunks.acknowledged(place)
        return (which, *(MessageId(-1, *each) for each in found or known if each != place))

    def other_places(self, place: Position) -> tuple[Position, ...]:
        """Of a message that comes again: of its other entries."""
        return tuple(each for each in self.chunks.given_back(place) if each != place)
