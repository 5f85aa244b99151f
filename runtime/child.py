"""A process that a parent forked, and its link to that parent (parent.py).

    await child.attach(text)                        in its event loop; `text` returns the text of its own metrics
    child.report_ready(url=…, …)                    this process serves clients
    others = await child.ask_metrics_of_others()    the metrics of the other processes, for a page with all metrics
    await child.detach()

When the link ends, the parent has died, and this process ends at once, as by `kill -9`. So `kill -9` of the parent ends
all processes.

Also in this file, below its heading: the frames between a process and the parent that forked it, over a pair of sockets
(link).
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import NamedTuple, NoReturn

from .health import BEAT_S
from .tasks import Tasks

# ---------------------------------------------------------------------------------------------------------- link
# The frames between a process and the parent that forked it, over a pair of sockets.
#
#     frame = length u32 | kind u8 | number u32 | body          length: of all after it
#
# | kind | from | number | body |
# |---|---|---|---|
# | READY | the process | 0 | JSON: the facts of the ready line |
# | BEAT | the process | 0 | empty: its event loop runs; each BEAT_S from READY on, if systemd watches the parent |
# | ASK | the process | of its question | which metrics of the others: the query of a page |
# | FACTS | the parent | of that question | JSON: {"restarts": {name: count}, "asked": [names]} |
# | PAGE | the parent | of that question | one name of them, a line end, the text |
# | ASK | the parent | of its question | that query: your metrics |
# | PAGE | the process | of that question | the text |
#
# A question has one FACTS and then one PAGE of each that was asked and lived to answer; the asker has a deadline. The
# end of the stream is the other's death. Guards: tests/runtime/.


_HEAD = struct.Struct(">IBI")
_LENGTH = 5
"""Bytes of a frame that are no body, after its length."""
FRAME_BYTES_MAX = 256 << 20
"""Most bytes of a frame. A page has a kilobyte for each topic: more than 100,000 topics of one process."""


class Kind(enum.IntEnum):
    """The type of a frame on the link between a child process and its parent."""

    READY = 1
    ASK = 2
    FACTS = 3
    PAGE = 4
    BEAT = 5


class Frame(NamedTuple):
    """One message on the link between a child process and its parent."""

    kind: Kind
    number: int = 0
    body: bytes = b""


def encode_frame(frame: Frame) -> bytes:
    return _HEAD.pack(_LENGTH + len(frame.body), frame.kind, frame.number) + frame.body


class LinkFrameDecoder:
    """Splits the bytes that arrive on the link between a child and its parent into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Adds received bytes, and yields each frame that is now complete. Raises ValueError if the bytes are not a
        valid frame."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(self._bytes)
            if not _LENGTH <= length <= FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes")
            end = length + _HEAD.size - _LENGTH
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_HEAD.size : end])
            del self._bytes[:end]
            yield Frame(Kind(kind), number, body)


# --------------------------------------------------------------------------------------------------------- child


_LOG = logging.getLogger("magnetar.child")

OTHERS_S = 3.0
"""Seconds to wait for the pages of the others: less than a scraper and the page itself wait."""
READ_BYTES = 1 << 20

Text = Callable[[str], Awaitable[bytes]]
"""Returns the text of the metrics for the query of a page."""


class OtherProcessMetrics(NamedTuple):
    """The metrics of the other processes of this server. `pages`: the text of each process that answered in time, by
    the name of the process. `restarts`: how often each process was restarted, by its name."""

    pages: Mapping[str, bytes]
    restarts: Mapping[str, int]


class _Question:
    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.restarts: dict[str, int] = {}
        self.asked: list[str] | None = None
        self.answered = asyncio.Event()

    def check_answered(self) -> None:
        if self.asked is not None and self.pages.keys() >= set(self.asked):
            self.answered.set()


class ParentLink:
    """The connection ("link") of this process to the parent process that has forked it."""

    def __init__(self, name: str, link: socket.socket) -> None:
        self.name = name
        self._link = link
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = Tasks(on_failure=lambda error: self._exit())  # its own bug: it would not see the parent's end
        self._asking = asyncio.Lock()
        self._questions: dict[int, _Question] = {}
        self._last = 0

    async def attach(self, text: Text) -> None:
        """Connects to the parent process. `text` returns the metrics of this process as text; it is called when another
        process asks for them."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        self._tasks.spawn(self._read(reader, text), "child-link")

    async def detach(self) -> None:
        """Closes the link to the parent, at the end of this process. Afterwards the process does not notice when the
        parent ends."""
        await self._tasks.close()
        if self._writer is not None:
            self._writer.close()

    def report_ready(self, **facts: object) -> None:
        """Tells the parent process that this process is ready to serve clients. `facts`: values that the parent shows,
        by name, such as the URL."""
        shown = {name: str(value) for name, value in facts.items()}
        self._send(Frame(Kind.READY, 0, json.dumps(shown).encode()))
        if os.environ.get("WATCHDOG_USEC"):  # of the parent, which alone speaks to systemd
            self._beat(asyncio.get_running_loop())

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._send(Frame(Kind.BEAT))
            loop.call_later(BEAT_S, self._beat, loop)

    async def ask_metrics_of_others(self, query: str = "") -> OtherProcessMetrics:
        """Asks the other processes of the server for their metrics, and returns the answers that arrived within
        OTHERS_S. `query`: the query part of a metrics URL (`MetricsQuery` in runtime/metrics.py)."""
        async with self._asking:
            self._last += 1
            question = self._questions[self._last] = _Question()
            try:
                self._send(Frame(Kind.ASK, self._last, query.encode()))
                async with asyncio.timeout(OTHERS_S):
                    await question.answered.wait()
            except TimeoutError:
                _LOG.warning("not every process said its metrics within %g s", OTHERS_S)
            finally:
                del self._questions[self._last]
        return OtherProcessMetrics(question.pages, question.restarts)

    def _send(self, frame: Frame) -> None:
        assert self._writer is not None, "it is attached"
        self._writer.write(encode_frame(frame))

    async def _read(self, reader: asyncio.StreamReader, text: Text) -> None:
        frames = LinkFrameDecoder()
        while True:
            try:
                data = await reader.read(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                _LOG.error("the parent of this process is gone: it ends")
                self._exit()
            for frame in frames.feed(data):
                self._on_frame(frame, text)

    def _on_frame(self, frame: Frame, text: Text) -> None:
        if frame.kind is Kind.ASK:
            self._tasks.spawn(self._answer(frame, text), "child-page")
            return
        question = self._questions.get(frame.number)
        if question is None:
            return  # too late
        if frame.kind is Kind.FACTS:
            facts = json.loads(frame.body)
            question.restarts, question.asked = facts["restarts"], facts["asked"]
        else:
            name, _, page = frame.body.partition(b"\n")
            question.pages[name.decode()] = page
        question.check_answered()

    def _exit(self) -> NoReturn:
        logging.shutdown()
        os._exit(1)

    async def _answer(self, frame: Frame, text: Text) -> None:
        try:
            found = await text(frame.body.decode())
        except Exception:  # the page lacks this process, and says so
            _LOG.exception("the metrics of this process could not be read")
            return
        self._send(Frame(Kind.PAGE, frame.number, found))
