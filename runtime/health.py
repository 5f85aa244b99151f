"""The health of this process: the heartbeat of its event loop, the answers to probes, and the notifications to systemd.

    LOOP_HEARTBEAT.start()                       in the event loop, once: beats each BEAT_INTERVAL_S
    server = HealthServer.start(endpoint)        answers GET /livez, /startz and /readyz, in threads of its own
    PROCESS_HEALTH.readiness = why_not_ready     a coroutine function that returns reasons; no reasons: it is ready
    notify_systemd("READY=1")                    does nothing if systemd did not start the process

**/livez** is 200 while the last beat is younger than HUNG_AFTER_S, else 503. It asks neither another process nor the
event loop, because it must answer when the event loop hangs. **/startz** is 200 once the process has started, whatever
happens later. **/readyz** is 200 if `PROCESS_HEALTH.readiness` returns no reason, else 503 and a line for each reason
(with `Accept: application/json` an object). If the event loop does not answer within READINESS_TIMEOUT_S, that is a
reason too. Probes need no credentials, so the answers say nothing about stored data. At most CONNECTIONS_MAX
connections are open, each for REQUEST_TIMEOUT_S at most. If one more comes, the oldest is closed, so that idle
connections make no probe fail.
**systemd** gets a notification at the start (READY=1), at each beat if it asked for a watchdog (WATCHDOG=1), and at the
end (STOPPING=1): sd_notify(3). Guarding tests: tests/runtime/test_health.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ..proto.errors import Busy
from .clock import SystemClock
from .network import Endpoint

BEAT_INTERVAL_S = 1.0
"""Seconds between two beats: 5 µs each, so nothing of an idle process."""
HUNG_AFTER_S = 5.0
"""Age of the last beat from which the event loop counts as hanging; a long turn of a busy loop takes 0.1 s."""
READINESS_TIMEOUT_S = 2.0
"""Seconds for the reasons: a probe of Kubernetes waits as long, or longer."""
REQUEST_TIMEOUT_S = 2.0
CONNECTIONS_MAX = 16
HEAD_BYTES_MAX = 8192
ERROR_PAUSE_S = 0.1
"""Seconds after which the next probe is accepted if one failed: no descriptor or no thread is free, say."""
WINDOW_BEATS = 30
"""Beats of which the metrics show the longest lag, and the share of processor time. Two windows are kept, so that a
scrape each 30 s sees each lag."""

CheckReadiness = Callable[[], Awaitable[Sequence[str]]]
_now = SystemClock().monotonic
_LOG = logging.getLogger("magnetar.health")


# ----------------------------------------------------------------------------------------------------- heartbeat
class EventLoopHeartbeat:
    """A function that one event loop calls every BEAT_INTERVAL_S (a beat); the delay of the calls shows how busy the
    loop is. Other threads may read the results. `beat_at`: the time of the last beat, by the monotonic clock; None:
    there was none."""

    def __init__(self) -> None:
        self.beat_at: float | None = None  # by the monotonic clock; None: it has not begun
        self._lags: deque[float] = deque(maxlen=2 * WINDOW_BEATS)
        self._used: deque[tuple[float, float]] = deque(maxlen=WINDOW_BEATS)  # when; processor time of the thread
        self._watched = False

    def start(self) -> None:
        """Starts the beats in the running event loop. They end when that loop is closed."""
        self._watched = has_systemd_watchdog()
        self._beat(asyncio.get_running_loop(), _now())

    def _beat(self, loop: asyncio.AbstractEventLoop, planned: float) -> None:
        now = self.beat_at = _now()
        self._lags.append(max(0.0, now - planned))
        self._used.append((now, time.thread_time()))
        if self._watched:
            notify_systemd("WATCHDOG=1")
        loop.call_later(BEAT_INTERVAL_S, self._beat, loop, now + BEAT_INTERVAL_S)

    @property
    def lag_s(self) -> float:
        """Returns the longest delay of a beat in the last minute, in seconds; 0 if there was none."""
        late = 0.0 if self.beat_at is None else _now() - self.beat_at - BEAT_INTERVAL_S
        return max(late, *self._lags, 0.0)

    @property
    def busy_ratio(self) -> float:
        """Returns the share (0 to 1) of the last half minute during which the thread of the event loop used a
        processor; 0 if there were not two beats yet."""
        if len(self._used) < 2:
            return 0.0
        (began, before), (ended, after) = self._used[0], self._used[-1]
        return min(1.0, (after - before) / (ended - began))

    def why_hanging(self) -> str:
        """Returns a text that says that the event loop hangs, and for how many seconds; "" if it does not hang."""
        age_s = 0.0 if self.beat_at is None else _now() - self.beat_at
        return f"the event loop has not run for {age_s:.1f} s" if age_s > HUNG_AFTER_S else ""


LOOP_HEARTBEAT = EventLoopHeartbeat()


async def _starting() -> Sequence[str]:
    return ("it is starting",)


async def _stopping() -> Sequence[str]:
    return ("it is stopping",)


class Health:
    """Tells probes whether the process is ready to serve clients, and if not, why. `readiness`: a coroutine function
    that returns the reasons why it is not ready; it is called in the event loop. The process sets it when it has
    started. `endpoint`: where probes ask; None: nowhere."""

    def __init__(self) -> None:
        self.readiness: CheckReadiness = _starting
        self.endpoint: Endpoint | None = None  # where probes ask

    @property
    def has_started(self) -> bool:
        """Returns whether the process has started: it serves, or it is stopping."""
        return self.readiness is not _starting

    def on_process_stopping(self) -> None:
        """Called when the process begins to stop: it is not ready from now on. Notifies systemd."""
        self.readiness = _stopping
        notify_systemd("STOPPING=1")

    async def why_not_ready(self) -> Sequence[str]:
        """Returns the reasons why the process is not ready; empty if it is. Raises the errors of `readiness`."""
        return await self.readiness()


PROCESS_HEALTH = Health()


# -------------------------------------------------------------------------------------------------------- probes
class HealthServer:
    """Answers health probes over HTTP, with one thread for its listener and one for each connection. `start` creates
    it."""

    def __init__(self, listener: socket.socket, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self._listener = listener
        self._loop = loop
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closing = False
        self._has_logged = False
        self._thread = threading.Thread(target=self._accept, name="health", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, endpoint: Endpoint) -> HealthServer:
        """Starts to listen at `endpoint` (port 0: a free port), and returns the server. Must be called in the event
        loop whose state the probes report. Raises Busy if the port is taken, or the address does not belong to this
        machine."""
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        try:
            listener = socket.create_server((endpoint.host, endpoint.port), family=family, backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error
        return cls(listener, endpoint._replace(port=listener.getsockname()[1]), asyncio.get_running_loop())

    def close(self) -> None:
        """Closes the listener. The port is free when this method returns; answers in progress may still be sent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                self._accept_one()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started now
                if self._closing:
                    return
                if not self._has_logged:
                    self._has_logged = True
                    _LOG.warning("a health probe is not answered: %s; further ones are not logged", error)
                time.sleep(ERROR_PAUSE_S)

    def _accept_one(self) -> None:
        """Accepts a connection, and starts its thread. Raises OSError, or RuntimeError if no thread can be started."""
        connection, _ = self._listener.accept()
        try:
            with self._lock:
                if len(self._open) >= CONNECTIONS_MAX:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
                self._open[connection] = None
            threading.Thread(target=self._serve, args=(connection,), name="health-probe", daemon=True).start()
        except BaseException:
            with self._lock:
                self._open.pop(connection, None)
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            try:
                connection.settimeout(REQUEST_TIMEOUT_S)
                connection.sendall(self._answer(_read_head(connection)))
            finally:
                with self._lock:
                    self._open.pop(connection, None)

    def _answer(self, head: str) -> bytes:
        method, _, rest = head.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0].rstrip("/")
        if method not in ("GET", "HEAD"):
            return _response(method, "405 Method Not Allowed", "text/plain", "only GET\n")
        if path == "/livez":
            hanging = LOOP_HEARTBEAT.why_hanging()
            return _reasons_response(head, method, [hanging] if hanging else [], "not alive")
        if path == "/startz":
            return _reasons_response(
                head, method, [] if PROCESS_HEALTH.has_started else ["it is starting"], "not started"
            )
        if path == "/readyz":
            return _reasons_response(head, method, self._why_not_ready(), "not ready")
        return _response(method, "404 Not Found", "text/plain", "there are /livez, /startz and /readyz\n")

    def _why_not_ready(self) -> Sequence[str]:
        if hanging := LOOP_HEARTBEAT.why_hanging():
            return [hanging]
        try:
            asking = asyncio.run_coroutine_threadsafe(PROCESS_HEALTH.why_not_ready(), self._loop)
        except RuntimeError:  # the loop is closed
            return ["it is stopping"]
        try:
            return asking.result(READINESS_TIMEOUT_S)
        except TimeoutError:
            asking.cancel()
            return [f"no answer of the event loop within {READINESS_TIMEOUT_S:g} s"]
        except Exception as error:
            return [f"whether it is ready could not be found out: {error!r}"]


def _read_head(connection: socket.socket) -> str:
    """Returns the head of a request. Raises TimeoutError if it does not arrive within REQUEST_TIMEOUT_S."""
    head, deadline = b"", _now() + REQUEST_TIMEOUT_S
    while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES_MAX:
        connection.settimeout(max(0.01, deadline - _now()))
        received = connection.recv(HEAD_BYTES_MAX)
        if not received:
            break
        head += received
    return head.decode("latin-1")


def _reasons_response(head: str, method: str, reasons: Sequence[str], no: str) -> bytes:
    status = "503 Service Unavailable" if reasons else "200 OK"
    if "\r\naccept: application/json" in head.lower():
        body = json.dumps({"ok": not reasons, "reasons": list(reasons)}) + "\n"
        return _response(method, status, "application/json", body)
    return _response(method, status, "text/plain", "".join(f"{no}: {each}\n" for each in reasons) or "ok\n")


def _response(method: str, status: str, kind: str, text: str) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)


# ------------------------------------------------------------------------------------------------------- systemd
def has_systemd_watchdog() -> bool:
    """Returns whether systemd expects regular notifications from this process (WatchdogSec=)."""
    own = str(os.getpid())
    return bool(os.environ.get("WATCHDOG_USEC")) and os.environ.get("WATCHDOG_PID", own) == own


def notify_systemd(state: str) -> None:
    """Sends `state` to systemd if systemd started this process with Type=notify. Never waits and never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # a name without a file
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), address)
