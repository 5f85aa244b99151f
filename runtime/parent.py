"""Several processes as one server: a parent that forks them, starts them again, and ends with them.

    parent = ParentProcess([[ProcessSpec("storage", run_storage)], [ProcessSpec("broker-1", run_broker)]], on_serve)
    code = parent.run()                     `run_storage(child)` runs in the process, and returns its exit code

The parent has imported all modules before it forks, so its processes share the memory of these modules. The parent has
no event loop and no thread, so that a process that is forked later begins in the same state as the first one. The
decisions of the parent are in runtime/schedule_core.py.

- *A signal*: SIGTERM and SIGINT end all processes in order, the last tier first; a second signal ends the parent at
  once. The processes ignore SIGINT, because a terminal sends it to them too. SIGTERM to one process ends this process
  in order, and the parent starts it again.
- *The parent dies*: its processes are killed with it (Linux: PR_SET_PDEATHSIG), or end themselves when their link to it
  ends (`ParentLink`). So `kill -9` of the parent is `kill -9` of all.
- *Systemd's watchdog*: each process that serves sends BEAT to the parent while its event loop runs, and the parent
  notifies systemd (WATCHDOG=1). If the loop of one process has not run for HUNG_AFTER_S, the parent sends no
  notification any more, and systemd restarts the whole server after its WatchdogSec.
- *Files and ports* that the parent holds (the lock of the folder, reserved ports) are held by its processes too: they
  are free when the last one has ended.

Guards: tests/runtime/.

Also in this file, each below its heading: the link of a forked process to its parent (child); the frames that they
exchange over a pair of sockets (link).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import gc
import json
import logging
import math
import os
import selectors
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from .clock import SystemClock
from .health import BEAT_INTERVAL_S, HUNG_AFTER_S, has_systemd_watchdog, notify_systemd
from .process import tune_glibc_heap
from .schedule_core import (
    CHILD_STOP_TIMEOUT_S,
    Exit,
    ForkProcess,
    KillProcess,
    ProcessEffect,
    ProcessSchedule,
    ReportServing,
    TerminateProcess,
)
from .tasks import Tasks

_LOG = logging.getLogger("magnetar.parent")

ProcessFacts = dict[str, dict[str, str]]
"""Name of a process → what it says of itself when it serves."""

LINK_READ_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


class ProcessSpec(NamedTuple):
    """The description of a process that a ParentProcess starts. `work` runs in the forked process, gets the link to the
    parent, and returns the exit code. `stop_s`: seconds that the process has for its end after SIGTERM, before it is
    killed."""

    name: str
    work: Callable[[ParentLink], int]
    stop_s: float = CHILD_STOP_TIMEOUT_S


class _Running:
    """A running process, as its parent sees it."""

    def __init__(self, name: str, pid: int, link: socket.socket) -> None:
        self.name, self.pid, self.link = name, pid, link
        self.frames = LinkFrameDecoder()
        self.unsent = bytearray()
        self.beat_at: float | None = None  # when its loop ran last; None: it does not say


class ParentProcess:
    """Starts the processes of one server, and restarts a process that ends. `tiers`: the processes of a tier are
    started when all those of the earlier tiers serve. Calls `on_serve` once, when all processes serve, with the facts
    that each of them reported (`ParentLink.report_ready`)."""

    def __init__(self, tiers: Sequence[Sequence[ProcessSpec]], on_serve: Callable[[ProcessFacts], None]) -> None:
        self._specs = {spec.name: spec for tier in tiers for spec in tier}
        self._schedule = ProcessSchedule(
            [[spec.name for spec in tier] for tier in tiers], {name: spec.stop_s for name, spec in self._specs.items()}
        )
        self._on_serve = on_serve
        self._running: dict[str, _Running] = {}
        self._facts: ProcessFacts = {}
        self._asked: dict[int, tuple[str, int]] = {}  # our question → who asked, its number
        self._questions = 0
        self._signals: list[int] = []
        self._code: int | None = None
        self._effects: deque[ProcessEffect] = deque()
        self._doing = False
        self._watched = has_systemd_watchdog()
        self._hanging = set[str]()
        self._now = SystemClock().monotonic

    def run(self) -> int:
        """Runs the processes until all have ended, and returns the exit code of the server. The code is 0 after
        SIGTERM, 130 after SIGINT, else the exit code of the process that could not start: 1 if it ended with 0, 128
        plus the number of the signal if one ended it. Replaces the handlers of these signals until then. A forked
        process never returns from this call."""
        tune_glibc_heap()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        for each in (self._wake, self._waker):
            each.setblocking(False)
        before = {each: signal.signal(each, self._heard) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
        signal.set_wakeup_fd(self._waker.fileno())
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        try:
            self._do(self._schedule.start(self._now()))
            while self._code is None:
                self._turn()
            return self._code
        finally:  # reached in the parent alone: a process leaves by os._exit
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for running in self._running.values():
                os.kill(running.pid, signal.SIGKILL)
            self._selector.close()
            self._wake.close()
            self._waker.close()

    # ------------------------------------------------------------------ facts
    def _heard(self, number: int, _frame: object) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)

    def _turn(self) -> None:
        at = self._schedule.next_timer_at
        if self._watched:
            if self._schedule.is_stopping or not self._find_hanging():
                notify_systemd("WATCHDOG=1")
            at = min(at or math.inf, self._now() + BEAT_INTERVAL_S)
        ready = self._selector.select(None if at is None else max(0.0, at - self._now()))
        for key, events in ready:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                continue
            running: _Running = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(running)
            if events & selectors.EVENT_READ:
                self._read(running)
        if self._signals:  # first: a signal to the whole group has ended processes too
            notify_systemd("STOPPING=1")
            code = 130 if self._signals.pop(0) == signal.SIGINT else 0
            self._do(self._schedule.stop(code, self._now()))
        self._reap()
        self._do(self._schedule.tick(self._now()))

    def _find_hanging(self) -> list[str]:
        """Returns the processes whose event loop hangs; logs each once."""
        late_s = self._now() - HUNG_AFTER_S
        found = [each.name for each in self._running.values() if each.beat_at is not None and each.beat_at < late_s]
        for name in set(found) - self._hanging:
            _LOG.error("the event loop of process %s has not run for %g s: systemd is not told", name, HUNG_AFTER_S)
        self._hanging = set(found)
        return found

    def _reap(self) -> None:
        for running in list(self._running.values()):
            pid, status = os.waitpid(running.pid, os.WNOHANG)
            if pid:
                self._read(running)  # what it said at last
                self._on_exit(running, os.waitstatus_to_exitcode(status))

    def _on_exit(self, running: _Running, code: int) -> None:
        del self._running[running.name]
        with contextlib.suppress(KeyError):
            self._selector.unregister(running.link)
        running.link.close()
        for question in [q for q, (asker, _) in self._asked.items() if asker == running.name]:
            del self._asked[question]
        now, stopping = self._now(), self._schedule.is_stopping
        effects = self._schedule.on_process_exited(running.name, 128 - code if code < 0 else code, now)
        if not stopping:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            pause_s = self._schedule.restart_wait_s(running.name, now)
            again = "all end" if self._schedule.is_stopping else f"it begins again in {pause_s or 0.0:g} s"
            _LOG.error("process %s (%d) ended with %s: %s", running.name, running.pid, how, again)
        self._do(effects)

    # ------------------------------------------------------------------ effects
    def _do(self, effects: list[ProcessEffect]) -> None:
        """Carries out effects in order; effects that result from them follow."""
        self._effects += effects
        while self._effects and not self._doing:
            self._doing = True
            try:
                self._carry_out(self._effects.popleft())
            finally:
                self._doing = False

    def _carry_out(self, effect: ProcessEffect) -> None:
        match effect:
            case ForkProcess(name):
                self._fork(self._specs[name])
            case TerminateProcess(name):
                self._signal(name, signal.SIGTERM)
            case KillProcess(name):
                _LOG.error("process %s did not end in time: it is killed", name)
                self._signal(name, signal.SIGKILL)
            case ReportServing():
                self._on_serve(self._facts)
            case Exit(code):
                self._code = code

    def _signal(self, name: str, number: int) -> None:
        """Sends a signal to the process, unless it has ended or could not be forked."""
        if name in self._running:
            os.kill(self._running[name].pid, number)

    def _fork(self, spec: ProcessSpec) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # a collection of a process would write into every page that it shares with the others
        parent = os.getpid()
        heard = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        try:
            pid = os.fork()
        except OSError as error:  # the system has no room for one more now
            _LOG.error("process %s could not be started: %s", spec.name, error)
            pid = -1
        if not pid:
            self._run_child(spec, parent, ours, theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        theirs.close()
        if pid < 0:
            ours.close()
            self._do(self._schedule.on_process_exited(spec.name, 1, self._now()))
            return
        ours.setblocking(False)
        running = self._running[spec.name] = _Running(spec.name, pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, running)

    def _run_child(self, spec: ProcessSpec, parent: int, ours: socket.socket, theirs: socket.socket) -> None:
        """Runs in the forked process, until it exits."""
        code = 1
        try:
            _die_with(parent)
            _set_process_name(spec.name)
            os.environ.pop("NOTIFY_SOCKET", None)  # the parent speaks for all
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ours.close()
            self._selector.close()
            self._wake.close()
            self._waker.close()
            for other in self._running.values():
                other.link.close()  # or that one would not see the parent's end while this one lives
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            code = spec.work(ParentLink(spec.name, theirs))
        except BaseException:
            logging.getLogger("magnetar").exception("process %s failed", spec.name)
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    # ------------------------------------------------------------------ the link
    def _read(self, running: _Running) -> None:
        while True:
            try:
                data = running.link.recv(LINK_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(running.link)
                return  # it has ended, or is just about to: `_reap`
            for frame in running.frames.decode_frames(data):
                self._on_frame(running, frame)

    def _on_frame(self, running: _Running, frame: LinkFrame) -> None:
        match frame.kind:
            case LinkFrameKind.READY:
                self._facts[running.name] = json.loads(frame.body)
                if self._watched:
                    running.beat_at = self._now()  # it beats from here on: also one that hangs first is found
                self._do(self._schedule.on_process_ready(running.name, self._now()))
            case LinkFrameKind.BEAT:
                running.beat_at = self._now()
            case LinkFrameKind.ASK:
                self._ask_others(running, frame)
            case LinkFrameKind.PAGE:
                self._hand_on(running, frame)
            case LinkFrameKind.FACTS:
                raise AssertionError("a process sends no FACTS")

    def _ask_others(self, asker: _Running, question: LinkFrame) -> None:
        self._asked = {ours: asked for ours, asked in self._asked.items() if asked[0] != asker.name}  # those are over
        others = [name for name in self._schedule.serving if name != asker.name]
        facts = {"restarts": self._schedule.restarts, "asked": others}
        self._send(asker, LinkFrame(LinkFrameKind.FACTS, question.number, json.dumps(facts).encode()))
        for name in others:
            self._questions += 1
            self._asked[self._questions] = asker.name, question.number
            self._send(self._running[name], LinkFrame(LinkFrameKind.ASK, self._questions, question.body))

    def _hand_on(self, running: _Running, frame: LinkFrame) -> None:
        asker, number = self._asked.pop(frame.number, ("", 0))
        if asker in self._running:
            body = f"{running.name}\n".encode() + frame.body
            self._send(self._running[asker], LinkFrame(LinkFrameKind.PAGE, number, body))

    def _send(self, running: _Running, frame: LinkFrame) -> None:
        running.unsent += encode_frame(frame)
        self._flush(running)

    def _flush(self, running: _Running) -> None:
        try:
            while running.unsent:
                del running.unsent[: running.link.send(running.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            running.unsent.clear()  # it has ended: `_reap`
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if running.unsent else 0)
        with contextlib.suppress(KeyError):
            self._selector.modify(running.link, wanted, running)


def _set_process_name(name: str) -> None:
    """Sets the name that `ps -o comm` and `top` show (Linux only), of at most 15 bytes."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _die_with(parent: int) -> None:
    """Makes the kernel send SIGKILL to this process when its parent ends (Linux only; elsewhere the end of the link
    says so).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# ---------------------------------------------------------------------------------------------------------------- child
# A process that a parent forked, and its link to that parent (parent.py).
#
#     await child.attach(text)                        in its event loop; `text` returns the text of its own metrics
#     child.report_ready(url=…, …)                    this process serves clients
#     others = await child.ask_metrics_of_others()    the metrics of the other processes, for a page with all metrics
#     await child.detach()
#
# When the link ends, the parent has died, and this process ends at once, as by `kill -9`. So `kill -9` of the parent
# ends all processes.

# ---------------------------------------------------------------------------------------------------------- link
# The frames between a process and the parent that forked it, over a pair of sockets.
#
#     frame = length u32 | kind u8 | number u32 | body          length: of all after it
#
# | kind | from | number | body |
# |---|---|---|---|
# | READY | the process | 0 | JSON: the facts of the ready line |
# | BEAT | the process | 0 | empty: its loop runs; each BEAT_INTERVAL_S from READY on, if systemd watches the parent |
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


class LinkFrameKind(enum.IntEnum):
    """The type of a frame on the link between a child process and its parent."""

    READY = 1
    ASK = 2
    FACTS = 3
    PAGE = 4
    BEAT = 5


class LinkFrame(NamedTuple):
    """One message on the link between a child process and its parent. The table above says what `number` and `body` of
    each kind are."""

    kind: LinkFrameKind
    number: int = 0
    body: bytes = b""


def encode_frame(frame: LinkFrame) -> bytes:
    """Returns the bytes of a frame on the link."""
    return _HEAD.pack(_LENGTH + len(frame.body), frame.kind, frame.number) + frame.body


class LinkFrameDecoder:
    """Splits the bytes that arrive on the link between a child and its parent into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def decode_frames(self, data: bytes) -> Iterator[LinkFrame]:
        """Adds received bytes, and yields each frame that is now complete. Raises ValueError if a frame is too long or
        has an unknown kind."""
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
            yield LinkFrame(LinkFrameKind(kind), number, body)


# --------------------------------------------------------------------------------------------------------- child


_CHILD_LOG = logging.getLogger("magnetar.child")

OTHERS_METRICS_WAIT_S = 3.0
"""Seconds to wait for the pages of the others: less than a scraper and the page itself wait."""

MetricsText = Callable[[str], Awaitable[bytes]]
"""Returns the text of the metrics for the query of a page."""


class OtherProcessMetrics(NamedTuple):
    """The metrics of the other processes of this server. `pages`: the text of each process that answered in time, by
    the name of the process. `restarts`: how often each process of the server was restarted, by its name; {} if the
    parent did not answer."""

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
    """The connection ("link") of this process to the parent process that has forked it. If the parent ends, this
    process exits at once with code 1."""

    def __init__(self, name: str, link: socket.socket) -> None:
        self.name = name
        self._link = link
        self._writer: asyncio.StreamWriter | None = None
        self._tasks = Tasks(on_failure=lambda error: self._exit())  # its own bug: it would not see the parent's end
        self._asking = asyncio.Lock()
        self._questions: dict[int, _Question] = {}
        self._last = 0

    async def attach(self, text: MetricsText) -> None:
        """Begins to use the link, in the running event loop. Must be called once, before all other methods. `text`
        returns the metrics of this process as text for a query; it is called when another process asks for them."""
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        self._tasks.spawn(self._read(reader, text), "child-link")

    async def detach(self) -> None:
        """Closes the link to the parent, at the end of this process, and cancels the answers that are being made for
        it. Afterwards the process does not notice when the parent ends."""
        await self._tasks.close()
        if self._writer is not None:
            self._writer.close()

    def report_ready(self, **facts: object) -> None:
        """Tells the parent process that this process is ready to serve clients. `facts`: values that the parent shows,
        by name, such as the URL. If systemd watches the parent, sends a beat every BEAT_INTERVAL_S from now on."""
        shown = {name: str(value) for name, value in facts.items()}
        self._send(LinkFrame(LinkFrameKind.READY, 0, json.dumps(shown).encode()))
        if os.environ.get("WATCHDOG_USEC"):  # of the parent, which alone speaks to systemd
            self._beat(asyncio.get_running_loop())

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._send(LinkFrame(LinkFrameKind.BEAT))
            loop.call_later(BEAT_INTERVAL_S, self._beat, loop)

    async def ask_metrics_of_others(self, query: str = "") -> OtherProcessMetrics:
        """Asks the other processes of the server for their metrics, waits for them at most OTHERS_METRICS_WAIT_S, and
        returns the answers that arrived. `query`: the query part of a metrics URL (`MetricsQuery` in
        runtime/metrics.py)."""
        async with self._asking:
            self._last += 1
            question = self._questions[self._last] = _Question()
            try:
                self._send(LinkFrame(LinkFrameKind.ASK, self._last, query.encode()))
                async with asyncio.timeout(OTHERS_METRICS_WAIT_S):
                    await question.answered.wait()
            except TimeoutError:
                _CHILD_LOG.warning("not every process said its metrics within %g s", OTHERS_METRICS_WAIT_S)
            finally:
                del self._questions[self._last]
        return OtherProcessMetrics(question.pages, question.restarts)

    def _send(self, frame: LinkFrame) -> None:
        assert self._writer is not None, "it is attached"
        self._writer.write(encode_frame(frame))

    async def _read(self, reader: asyncio.StreamReader, text: MetricsText) -> None:
        frames = LinkFrameDecoder()
        while True:
            try:
                data = await reader.read(LINK_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                _CHILD_LOG.error("the parent of this process is gone: it ends")
                self._exit()
            for frame in frames.decode_frames(data):
                self._on_frame(frame, text)

    def _on_frame(self, frame: LinkFrame, text: MetricsText) -> None:
        if frame.kind is LinkFrameKind.ASK:
            self._tasks.spawn(self._answer(frame, text), "child-page")
            return
        question = self._questions.get(frame.number)
        if question is None:
            return  # too late
        if frame.kind is LinkFrameKind.FACTS:
            facts = json.loads(frame.body)
            question.restarts, question.asked = facts["restarts"], facts["asked"]
        else:
            name, _, page = frame.body.partition(b"\n")
            question.pages[name.decode()] = page
        question.check_answered()

    def _exit(self) -> NoReturn:
        logging.shutdown()
        os._exit(1)

    async def _answer(self, frame: LinkFrame, text: MetricsText) -> None:
        try:
            found = await text(frame.body.decode())
        except Exception:  # the page lacks this process, and says so
            _CHILD_LOG.exception("the metrics of this process could not be read")
            return
        self._send(LinkFrame(LinkFrameKind.PAGE, frame.number, found))
