"""A connected producer: what comes from its stream goes into the log, and the receipts go back.

`publish` is called for each entry, in order; receipts leave in the same order, after the entry is stored on an ack
quorum. The answer to a refused entry, or to a duplicate, keeps its place among them; the entries behind it go on. With
deduplication (broker/topic/core/dedup.py) an entry that fails, or whose twin is on its way, ends this connection: the
client opens another one and sends again what has no answer, in its order. Back-pressure: `room` waits while more than
`pending_bytes` are not confirmed; the service does not read the stream meanwhile, so it fills up at the client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...proto import wire_pb2 as wire
from ...proto.entry import EntryHeader, parse_header
from ...proto.errors import (
    CorruptEntry,
    MagnetarError,
    to_wire,
)
from ...proto.names import Position, TopicName
from ..common.applied import Applied
from ..common.refusals import PublishRefusal
from ..log.publish import Publish
from ..log.topic_log import State, TopicLog
from .core.dedup import Verdict
from .core.publish import refusal
from .dedup import Deduplication, numbers_of
from .statistics import Traffic

ENTRY_BYTES = 1024
"""What an entry on its way costs beside its bytes: so many small ones are bounded too (16,000 with the default)."""


class Published(Protocol):
    """What a producer needs of its topic."""

    name: TopicName
    log: TopicLog
    dedup: Deduplication

    @property
    def applied(self) -> Applied: ...

    traffic: Traffic

    def check_delay(self, at_ms: int) -> None:
        """NotAllowed: an entry may not be delayed until then."""
        ...


class Producer:
    """`send` queues one reply on the producer's stream and never waits."""

    __slots__ = (
        "__dict__", "_dedup", "_logged", "_news", "_over", "_pending_bytes", "_pending_bytes_max", "_refused", "_send",
        "_settled", "_topic", "address", "bytes", "connection", "duplicates", "epoch", "id", "instance", "messages",
        "mode", "name", "seated", "size_max",
    )  # fmt: skip
    def __init__(
        self, id_: int, name: str, mode: int, topic: Published, send: Callable[[wire.ProduceReply], None], *,
        address: str, instance: str, size_max: int, pending_bytes_max: int, connection: int = 0, epoch: int = 0,
    ) -> None:  # fmt: skip
        self.id = id_
        self.name = name
        self.mode = mode
        self.instance = instance
        self.connection = connection
        self.epoch = epoch  # of the topic, when this producer has it for itself
        self.address = address
        self.messages = self.bytes = self.duplicates = 0
        self._dedup = topic.dedup
        self.seated: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._topic = topic
        self._send = send
        self.size_max = size_max
        self._pending_bytes = 0
        self._pending_bytes_max = pending_bytes_max
        self._news: asyncio.Event | None = None  # somebody waits for it: there is room, or the end
        self._over: MagnetarError | None = None
        self._logged = 0  # entries given to the log …
        self._settled = 0  # … and those of them with an outcome
        self._refused: deque[tuple[int, wire.ProduceReply]] | None = None  # (after how many outcomes, answer)

    @property
    def last_sequence_id(self) -> int:
        """The highest that is in the log; -1: none is known."""
        return self._dedup.core.last(self.name)

    # ------------------------------------------------------------------ in
    def publish(self, client_part: bytes) -> None:
        topic = self._topic
        state = topic.log.state
        why = refusal(
            size=len(client_part), size_max=self.size_max, terminated=state is State.TERMINATED,
            owned=state is not State.LOST, fenced=self._over is not None,
        )  # fmt: skip
        if why is not None:
            self._refuse(client_part, why)
            return
        try:
            header = parse_header(client_part)
        except CorruptEntry as error:
            self._refuse(client_part, PublishRefusal.CORRUPT, error)
            return
        self._dedup.want(topic.applied.deduplication)
        if self._dedup.enabled and header.producer_name != self.name:
            self._refuse(client_part, PublishRefusal.WRONG_NAME)
            return
        numbers = numbers_of(header)
        verdict = self._dedup.judge(self.name, numbers)
        if verdict is not Verdict.NEW:
            self._judged(client_part, header, verdict)
            return
        publish = Publish(
            self, client_part, count=header.num_messages, sequence_id=header.sequence_id,
            highest_sequence_id=header.highest_sequence_id, numbers=numbers,
            deliver_at_ms=header.metadata.deliver_at_time,
        )  # fmt: skip
        try:
            if publish.deliver_at_ms:
                topic.check_delay(publish.deliver_at_ms)
            topic.log.publish(publish)
        except MagnetarError as error:
            self._dedup.failed(self.name)
            self._reply_in_place(_failed(header.sequence_id, error))
            return
        self._logged += 1
        self._pending_bytes += publish.size + ENTRY_BYTES

    def _judged(self, client_part: bytes, header: EntryHeader, verdict: Verdict) -> None:
        if verdict is Verdict.DUPLICATE:
            receipt = wire.Receipt(
                sequence_id=header.sequence_id, ledger_id=-1, entry_id=-1, index=-1, duplicate=True
            )
            self.duplicates += 1
            self._reply_in_place(wire.ProduceReply(receipt=receipt))
        elif verdict is Verdict.OVERLAP:
            self._refuse(client_part, PublishRefusal.OVERLAP)
        else:
            self.close(
                PublishRefusal.IN_DOUBT.error(
                    f"entry {header.sequence_id} of producer {self.name!r} is on its way into topic {self._topic.name};"
                    " connect and send it again", topic=self._topic.name, sequence_id=header.sequence_id,
                )
            )  # fmt: skip

    def _refuse(self, client_part: bytes, why: PublishRefusal, cause: MagnetarError | None = None) -> None:
        error = self._over or why.error(
            f"topic {self._topic.name}: {cause or why.value}", size=len(client_part), limit=self.size_max
        )
        self.refuse(client_part, error)

    def refuse(self, client_part: bytes, error: MagnetarError) -> None:
        """The entry is not taken; the answer keeps its place among the others."""
        sequence_id = _sequence_of(client_part)
        if sequence_id is None:
            self.close(error)  # nobody knows which publish it was: the client has to start over
        else:
            self._reply_in_place(_failed(sequence_id, error))

    @property
    def pending(self) -> bool:
        """Something is on its way."""
        return self._pending_bytes > 0

    async def room(self) -> None:
        """Returns when more may be published."""
        while self._pending_bytes > self._pending_bytes_max and self._over is None:
            await self._next()

    async def _next(self) -> None:
        """Until there is room, or the producer is closed."""
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def settled(self) -> None:
        """Returns when every entry has its outcome."""
        while self._pending_bytes > 0:
            self._pending_bytes_max = 0
            await self._next()

    # ------------------------------------------------------------------ out
    def confirmed(self, publish: Publish, position: Position, index: int) -> None:
        self._release(publish)
        topic = self._topic
        self.messages += publish.count
        self.bytes += publish.size
        topic.traffic.came(publish.count, publish.size)
        self._dedup.confirmed(self.name, publish.numbers, position)
        if self._over is None:
            ledger_id, entry_id = position
            self._send(
                wire.ProduceReply(
                    receipt=wire.Receipt(
                        sequence_id=publish.sequence_id, ledger_id=ledger_id, entry_id=entry_id, index=index
                    )
                )
            )

        self._settle()

    def failed(self, publish: Publish, error: MagnetarError) -> None:
        self._release(publish)
        if self._over is None:
            self._send(_failed(publish.sequence_id, error))
        self._dedup.failed(self.name)
        if self._dedup.enabled:
            self.close(error)  # what comes behind it on this connection must not pass it
        self._settle()

    def _settle(self) -> None:
        """An entry has its outcome: answers to refused entries behind it may follow."""
        self._settled += 1
        while self._refused and self._refused[0][0] <= self._settled:
            answer = self._refused.popleft()[1]
            if self._over is None:
                self._send(answer)

    def _reply_in_place(self, answer: wire.ProduceReply) -> None:
        if self._over is not None:
            return
        if self._settled == self._logged:
            self._send(answer)
        else:
            if self._refused is None:
                self._refused = deque()
            self._refused.append((self._logged, answer))

    def _release(self, publish: Publish) -> None:
        self._pending_bytes -= publish.size + ENTRY_BYTES
        if self._news is not None and self._pending_bytes <= self._pending_bytes_max:
            self._tell()

    def close(self, error: MagnetarError) -> None:
        """The broker gives the producer up: it is told, and nothing more is answered."""
        if self._over is None:
            self._over = error
            self._send(wire.ProduceReply(closed=to_wire(error)))
        if not self.seated.done():
            self.seated.set_exception(error)
        self._tell()


def _failed(sequence_id: int, error: MagnetarError) -> wire.ProduceReply:
    return wire.ProduceReply(failed=wire.PublishFailed(sequence_id=sequence_id, error=to_wire(error)))


def _sequence_of(client_part: bytes) -> int | None:
    try:
        return parse_header(client_part, verify=False).sequence_id
    except CorruptEntry:
        return None
