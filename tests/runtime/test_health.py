"""Probes are answered although the event loop hangs, and systemd hears what it waits for."""

import asyncio
import contextlib
import errno
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto.errors import Busy
from magnetar.runtime import health
from magnetar.runtime.health import EventLoopHeartbeat, Health, HealthServer, notify_systemd
from magnetar.runtime.network import Endpoint

ANY = Endpoint("127.0.0.1", 0)


def ask(server: HealthServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.endpoint.host, server.endpoint.port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HealthServer]:
    monkeypatch.setattr(health, "LOOP_HEARTBEAT", EventLoopHeartbeat())
    monkeypatch.setattr(health, "PROCESS_HEALTH", Health())
    health.LOOP_HEARTBEAT.start()
    server = HealthServer.start(ANY)
    yield server
    await asyncio.to_thread(server.close)


async def probe(server: HealthServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    return await asyncio.to_thread(lambda: ask(server, path, method, **headers))


async def test_readyz_has_a_line_for_each_reason_and_is_ok_without_one(server: HealthServer) -> None:
    assert await probe(server, "/readyz") == (503, "not ready: it is starting\n")
    assert await probe(server, "/startz") == (503, "not started: it is starting\n")
    reasons = ["no session", "no ledger"]

    async def why_not_ready() -> Sequence[str]:
        return reasons

    health.PROCESS_HEALTH.readiness = why_not_ready
    assert await probe(server, "/readyz?verbose") == (503, "not ready: no session\nnot ready: no ledger\n")
    assert await probe(server, "/startz") == (200, "ok\n"), "ready or not"
    status, text = await probe(server, "/readyz", accept="application/json")
    assert (status, json.loads(text)) == (503, {"ok": False, "reasons": reasons})
    reasons.clear()
    assert await probe(server, "/readyz/") == (200, "ok\n")
    assert await probe(server, "/readyz", "HEAD") == (200, "")
    health.PROCESS_HEALTH.on_process_stopping()
    assert await probe(server, "/readyz") == (503, "not ready: it is stopping\n")
    assert await probe(server, "/livez") == (200, "ok\n")
    assert (await probe(server, "/metrics"))[0] == 404
    assert (await probe(server, "/livez", "POST"))[0] == 405


async def test_livez_is_answered_although_the_loop_hangs(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(server, "/livez") == (200, "ok\n")  # this test blocks the loop while it asks
    monkeypatch.setattr(health, "HUNG_AFTER_S", 0.05)
    monkeypatch.setattr(health, "READINESS_TIMEOUT_S", 0.05)
    health.LOOP_HEARTBEAT.beat_at = time.monotonic()
    assert "no answer of the event loop within 0.05 s" in ask(server, "/readyz")[1]
    health.LOOP_HEARTBEAT.beat_at = time.monotonic() - 7
    for path in ("/livez", "/readyz"):
        status, text = ask(server, path)
        assert status == 503
        assert "the event loop has not run for 7." in text


async def test_an_error_of_the_reasons_is_a_reason(server: HealthServer) -> None:
    async def why_not_ready() -> Sequence[str]:
        raise ValueError("broken")

    health.PROCESS_HEALTH.readiness = why_not_ready
    status, text = await probe(server, "/readyz")
    assert (status, "broken" in text) == (503, True)


async def test_connections_that_send_nothing_keep_no_probe_out(server: HealthServer) -> None:
    where = (server.endpoint.host, server.endpoint.port)
    silent = [await asyncio.to_thread(socket.create_connection, where) for _ in range(health.CONNECTIONS_MAX + 4)]
    try:
        assert await probe(server, "/livez") == (200, "ok\n")
        assert len(server._open) <= health.CONNECTIONS_MAX
    finally:
        for each in silent:
            each.close()


@pytest.mark.parametrize("number", [errno.ENETDOWN, errno.ECONNABORTED, errno.EMFILE])
async def test_probes_are_answered_after_errors_of_accept(
    server: HealthServer, number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        """The listener, whose next calls of `accept` fail."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener, self.failures = listener, 3

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(number, os.strerror(number))
            return self.listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.listener, name)

    monkeypatch.setattr(health, "ERROR_PAUSE_S", 0.001)
    monkeypatch.setattr(server, "_listener", failing := Failing(server._listener))
    for _ in range(3):
        assert await probe(server, "/livez") == (200, "ok\n")
    assert failing.failures == 0
    assert [os.strerror(number) in each.message for each in caplog.records] == [True]


async def test_a_probe_for_which_no_thread_is_free_is_closed_and_later_ones_are_answered(
    server: HealthServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == "health-probe":
            monkeypatch.setattr(threading.Thread, "start", before)
            raise RuntimeError("can't start new thread")
        before(thread)

    before = threading.Thread.start
    await asyncio.to_thread(lambda: None)  # its thread is started
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        await probe(server, "/livez")
    assert not server._open
    assert await probe(server, "/livez") == (200, "ok\n")
    assert "can't start new thread" in caplog.text


async def test_a_port_that_is_taken_is_an_error_and_one_that_was_closed_is_free() -> None:
    first = HealthServer.start(ANY)
    with pytest.raises(Busy, match="the port is taken"):
        HealthServer.start(first.endpoint)
    first.close()
    HealthServer.start(first.endpoint).close()


async def test_a_loop_that_was_held_up_shows_its_lag_and_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "BEAT_INTERVAL_S", 0.01)
    heartbeat = EventLoopHeartbeat()
    assert (heartbeat.lag_s, heartbeat.busy_ratio, heartbeat.why_hanging()) == (0, 0, "")
    heartbeat.start()
    await asyncio.sleep(0.03)
    before = heartbeat.busy_ratio
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    await asyncio.sleep(0.03)
    assert 0.1 < heartbeat.lag_s < 10
    assert before < heartbeat.busy_ratio <= 1


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], socket.socket]:
    """Listens where systemd would, at the address that is returned to the process."""

    def listen(address: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind("\0" + address[1:] if address.startswith("@") else address)
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        return listener

    return listen


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_at_a_file_and_at_a_name_without_one(
    systemd: Callable[[str], socket.socket], tmp_path: Path, abstract: bool
) -> None:
    address = f"@magnetar-{tmp_path.name}-{time.monotonic_ns()}" if abstract else str(tmp_path / "n")
    with systemd(address) as listener:
        notify_systemd("READY=1")
        assert listener.recv(100) == b"READY=1"
    notify_systemd("READY=1")  # it is gone: no error


def test_without_systemd_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_systemd("READY=1")


async def test_each_beat_is_told_if_systemd_watches_this_process(
    systemd: Callable[[str], socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "BEAT_INTERVAL_S", 0.01)
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert not health.has_systemd_watchdog(), "it watches another process"
    monkeypatch.delenv("WATCHDOG_PID")
    with systemd(str(tmp_path / "n")) as listener:
        EventLoopHeartbeat().start()
        for _ in range(2):
            assert await asyncio.to_thread(listener.recv, 100) == b"WATCHDOG=1"
