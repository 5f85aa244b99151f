"""Metrics over HTTP: looked at in the event loop, within a time, and the port is given back."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request

import pytest

from magnetar.proto.errors import Busy
from magnetar.runtime import metrics_server
from magnetar.runtime.metrics import MetricsPage, MetricsQuery
from magnetar.runtime.metrics_server import MetricsServer
from magnetar.runtime.network import Endpoint

ANY = Endpoint("127.0.0.1", 0)


async def scrape(server: MetricsServer, query: str = "") -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{server.endpoint}/metrics{query}", timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def test_a_page_is_made_in_the_event_loop_when_it_is_asked_for() -> None:
    asked: list[threading.Thread] = []

    async def measure(page: MetricsPage) -> None:
        asked.append(threading.current_thread())
        page.add_gauge("magnetar_asked", "Times.", len(asked))

    server = await MetricsServer.start(ANY, measure)
    try:
        assert not asked
        for times in (1, 2):
            status, text = await scrape(server)
            assert status == 200
            assert f"magnetar_asked {times}.0\n" in text
        assert asked == [threading.current_thread()] * 2
        with pytest.raises(Busy, match="the port is taken"):
            await MetricsServer.start(server.endpoint, measure)
    finally:
        await server.close()
    again = await MetricsServer.start(server.endpoint, measure)
    await again.close()


async def test_a_page_knows_what_its_request_asks_for_and_a_wrong_word_is_refused() -> None:
    asked: list[MetricsQuery] = []

    async def measure(page: MetricsPage) -> None:
        asked.append(page.query)

    server = await MetricsServer.start(ANY, measure)
    try:
        for query in ("", "?level=topic", "?level=none&namespace=a%2Fb"):
            assert (await scrape(server, query))[0] == 200
        assert asked == [MetricsQuery(), MetricsQuery("topic"), MetricsQuery("none", "a/b")]
        assert [MetricsQuery.parse(str(each)) for each in asked] == asked
        for query, why in (
            ("?level=topics", "level must be topic, namespace, none, not 'topics'"),
            ("?namespace=a", "namespace 'a' is not TENANT/NAMESPACE"),
            ("?levle=topic", "a page of metrics takes level and namespace, not 'levle'"),
            ("?" + "&".join(["level=none"] * 9), "Max number of fields exceeded"),
        ):
            assert await scrape(server, query) == (400, f"{why}\n")
        assert len(asked) == 3
    finally:
        await server.close()


async def test_numbers_that_do_not_come_in_time_are_an_error_and_their_question_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "MEASURE_TIMEOUT_S", 0.02)
    cancelled = asyncio.Event()

    async def measure(page: MetricsPage) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await MetricsServer.start(ANY, measure)
    try:
        assert (await scrape(server))[0] == 500
        async with asyncio.timeout(10):
            await cancelled.wait()
    finally:
        await server.close()


async def test_connections_without_a_request_and_garbage_keep_no_scraper_out(capfd: pytest.CaptureFixture[str]) -> None:
    async def measure(page: MetricsPage) -> None:
        page.add_gauge("magnetar_asked", "Times.", 1)

    server = await MetricsServer.start(ANY, measure)
    held = [socket.create_connection(server.endpoint) for _ in range(3 * metrics_server.CONNECTIONS_MAX)]
    try:
        for number, each in enumerate(held):
            each.sendall((b"", b"GET /met", b"\xff\xfe\0" * 5000, b"GET / HTTP/1.1\r\nX: ", b"\r\n")[number % 5])
        assert (await scrape(server))[0] == 200
        threads = [each for each in threading.enumerate() if "process_request" in each.name]
        assert len(threads) <= metrics_server.CONNECTIONS_MAX + 1
    finally:
        for each in held:
            each.close()
        await server.close()
    assert capfd.readouterr().err == ""


async def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(page: MetricsPage) -> None:
        pass

    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.1)
    server = await MetricsServer.start(ANY, measure)
    reader, writer = await asyncio.open_connection(*server.endpoint)
    try:
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    finally:
        writer.close()
        await server.close()
