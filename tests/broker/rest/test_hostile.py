"""Requests that no client sends: each is answered with a status that says what was wrong, and the others are served."""

import asyncio
import json
import subprocess
import sys
from http import client as http_client
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.cluster.catalog import Catalog
from magnetar.broker.rest import connection as connection_module
from magnetar.broker.rest.application import BODY_BYTES_MAX
from tests.broker.rest.http import V2, Http, T, serving

NS = f"{V2}/namespaces/public/default"
Case = tuple[str, str, bytes, int]

CASES: list[Case] = [
    # paths
    ("GET", "/", b"", 404),
    ("GET", "//admin//v2//tenants", b"", 404),
    ("GET", f"{V2}/../metrics", b"", 404),
    ("GET", f"{V2}/tenants/..", b"", 412),
    ("GET", f"{V2}/tenants/%2e%2e", b"", 412),
    ("GET", f"{V2}/tenants/%00", b"", 412),
    ("GET", f"{V2}/tenants/%ff", b"", 412),
    ("GET", f"{V2}/tenants/%2fetc%2fpasswd", b"", 412),
    ("GET", f"{V2}/tenants/{'x' * 5000}", b"", 412),
    ("GET", f"{V2}/persistent/public/default/a%2Fb/stats", b"", 412),
    ("GET", f"{V2}/permanent/public/default/t/stats", b"", 404),
    ("GET", f"{V2}/persistent/public/default/none/stats", b"", 404),
    ("GET", f"{V2}/persistent/public/none/t/partitions?checkAllowAutoCreation=true", b"", 404),
    ("GET", f"{V2}/persistent/public/default/t-partition-01/stats", b"", 412),
    ("PATCH", f"{V2}/tenants", b"", 405),
    ("BREW", "/healthz", b"", 405),
    ("GET", f"{V2}/tenants?{'x' * 20000}", b"", 414),
    # bodies
    ("PUT", f"{T}9/partitions", b"", 400),
    ("PUT", f"{T}9/partitions", b"three", 400),
    ("PUT", f"{T}9/partitions", b"1.5", 400),
    ("PUT", f"{T}9/partitions", b'"three"', 400),
    ("PUT", f"{T}9/partitions", b"-1", 406),
    ("PUT", f"{T}9/partitions", b"99999999999999999999999", 412),
    ("PUT", f"{T}9/partitions", b"1000000", 412),
    ("PUT", f"{T}9/partitions", b'{"partitions":"x"}', 400),
    ("PUT", f"{T}9/partitions", b"\xff\xfe", 400),
    ("PUT", f"{NS}x", b"[1]", 400),
    ("PUT", f"{NS}x", b'{"bundles":7}', 400),
    ("PUT", f"{NS}x", b'{"bundles":{"numBundles":-1}}', 412),
    ("PUT", f"{NS}x", b'{"bundles":{"numBundles":100000000}}', 412),
    ("PUT", f"{NS}x", b'{"replication_clusters":["moon"]}', 412),
    ("PUT", f"{NS}x", b'{"auth_policies":{"namespace_auth":{"r":["fly"]}}}', 412),
    ("PUT", f"{NS}x", b'{"topicDispatchRate":[]}', 400),
    ("PUT", f"{NS}x", b'{"max_producers_per_topic":"three"}', 400),
    ("PUT", f"{NS}x", b"[" * 100_000, 400),
    ("PUT", f"{V2}/tenants/x", b'{"adminRoles":"me"}', 400),
    ("PUT", f"{V2}/tenants/x", b'{"adminRoles":[""]}', 412),
    ("POST", f"{NS}/permissions/r", b'"produce"', 400),
    ("POST", f"{NS}/permissions/r", b"[]", 412),
    ("POST", f"{NS}/subscriptionAuthMode", b'"x y z"', 412),
    ("POST", f"{NS}/subscriptionAuthMode", b'""', 412),
    ("POST", f"{NS}/subscriptionAuthMode", b"null", 400),
    ("POST", f"{NS}/messageTTL", b"", 400),
    ("POST", f"{NS}/backlogQuota?backlogQuotaType=other", b"{}", 412),
    ("POST", f"{NS}/backlogQuota", b'{"policy":"wish"}', 400),
    # numbers in paths
    ("POST", f"{T}/subscription/s/skip/x", b"", 400),
    ("POST", f"{T}/subscription/s/skip/-1", b"", 412),
    ("POST", f"{T}/subscription/s/skip/%D9%A1", b"", 400),
    ("POST", f"{T}/subscription/s/skip/1%0a", b"", 400),
    ("POST", f"{T}/subscription/s/skip/99999999999999999999", b"", 412),
    ("POST", f"{T}/subscription/s/resetcursor/-5", b"", 412),
    ("POST", f"{T}/subscription/s/expireMessages/0", b"", 412),
    ("POST", f"{T}/subscription/s/resetcursor", b'{"ledgerId":-7,"entryId":0}', 412),
    ("POST", f"{T}/subscription/s/resetcursor", b'{"ledgerId":1}', 400),
    ("PUT", f"{T}/subscription/s2", b'"middle"', 400),
    ("PUT", f"{T}/subscription/a%2Fb", b"", 412),
    ("GET", f"{T}/subscription/s/position/0", b"", 412),
    ("GET", f"{T}/subscription/s/position/5000", b"", 412),
    ("GET", f"{T}/ledger/9223372036854775807/entry/9223372036854775807", b"", 404),
    ("GET", f"{T}/ledger/9223372036854775808/entry/0", b"", 412),
    ("GET", f"{T}/examinemessage?initialPosition=middle", b"", 412),
    ("GET", f"{T}/stats?getPreciseBacklog=maybe", b"", 400),
    ("GET", f"{NS}/topics?mode=SOME", b"", 412),
]


async def test_each_hostile_request_is_answered_with_its_status_and_a_reason(http: Http) -> None:
    await http.done("PUT", T)
    await http.done("PUT", f"{T}/subscription/s", "earliest")
    wrong = []
    for method, path, body, status in CASES:
        found = await http.ask(method, path, raw=body)
        if found.status != status or not found.reason:
            wrong.append(f"{method} {path[:100]} {body[:60]!r}: {found.status} {found.body[:200]!r}, not {status}")
    assert not wrong, "\n".join(wrong)
    assert await http.get(f"{V2}/namespaces/public") == ["public/default"], "nothing half-made is left"


async def test_a_body_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _):
        found = await http.ask("POST", f"{V2}/tenants/x", raw=b"", Content_Length=str(BODY_BYTES_MAX + 1))
        assert (found.status, found.headers["connection"]) == (413, "close")
        chunks = b"".join(b"40000\r\n" + b"x" * 0x40000 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n"
        head = f"PUT {V2}/tenants/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        assert (await http.send(head + chunks)).status == 413
        assert broker.topic_manager.memory.requests.held == 0
        assert (await http.ask("GET", "/healthz")).status == 200


@pytest.mark.parametrize("size", [BODY_BYTES_MAX + 1, 24 << 20])
async def test_who_sends_a_long_body_before_it_reads_is_told_that_it_is_too_long(tmp_path: Path, size: int) -> None:
    """Python's http.client, as others, sends all first: a connection that is closed at once takes the answer along."""

    def send(url: str, body: object) -> tuple[int, str]:
        connection = http_client.HTTPConnection(url.partition("://")[2], timeout=20)
        try:
            connection.request("POST", f"{V2}/tenants/x", body=body)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())["reason"]
        finally:
            connection.close()

    async with serving(tmp_path) as (http, broker, _):
        pieces = [bytes(1 << 16)] * (size >> 16) + [b"x"]
        for body in (bytes(size), pieces):  # the second one in chunks
            for _ in range(3):
                status, reason = await asyncio.to_thread(send, broker.http_url, body)
                assert (status, reason) == (413, f"a body has at most {BODY_BYTES_MAX} bytes")
        assert (await http.ask("GET", "/healthz")).status == 200


async def test_who_goes_on_sending_after_the_answer_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "LINGER_BYTES_MAX", 1 << 20)
    async with serving(tmp_path) as (http, _, _):
        reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
        writer.write(f"PUT {V2}/tenants/x HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        assert b" 413 " in await reader.readuntil(b"\r\n")

        async def send() -> None:
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send(), 20)
        writer.transport.abort()


async def test_a_target_in_absolute_form_is_its_path(http: Http) -> None:
    for origin in (f"http://{http.endpoint}", "HTTP://other.example", "https://other.example:8443"):
        assert (await http.ask("GET", f"{origin}/healthz")).status == 200
        assert await http.get(f"{origin}{V2}/namespaces/public") == ["public/default"]
        await http.get(f"{origin}{V2}/persistent/public/default/none/partitions?checkAllowAutoCreation=false", 404)
        assert (await http.ask("GET", f"{origin}{V2}/tenants/..")).status == 412
    for nothing in ("http://", "http://x", "ftp://x/healthz", "http:/healthz", "healthz"):
        assert (await http.ask("GET", nothing)).status in (400, 404), nothing


async def test_a_body_of_single_bytes_is_handled_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand chunks of a byte come in one read: others have their turn between any few of them."""
    monkeypatch.setattr("magnetar.runtime.alarm.LOOP_SLICE_S", 0.0)
    fed = list[int]()
    honest = connection_module._Connection._feed

    async def feed(self: Any, data: bytes) -> bool:
        pieces = list(connection_module._pieces(data))
        assert b"".join(pieces) == data
        fed.extend(piece.count(b"\n") for piece in pieces)
        return await honest(self, data)

    monkeypatch.setattr(connection_module._Connection, "_feed", feed)
    async with serving(tmp_path) as (http, _, _):
        turns, begin = 0, asyncio.create_task(
            http.send(f"PUT {V2}/tenants/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
                      + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n"))  # fmt: skip
        while not begin.done():
            turns += 1
            await asyncio.sleep(0)
        assert begin.result().status == 400
        assert max(fed) == connection_module.HEAD_LINES_PER_TURN
        assert turns >= len(fed) > 20_000 // connection_module.HEAD_LINES_PER_TURN


async def test_a_head_of_very_many_lines_ends_its_connection(http: Http) -> None:
    other = Http(f"http://{http.endpoint}")
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await other.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 12_000 + b"\r\n")
    await other.close()
    assert (await http.ask("GET", "/healthz")).status == 200


async def test_what_is_no_http_is_answered_and_ends_its_connection_alone(http: Http) -> None:
    for data in (b"\x16\x03\x01\x02\x00", b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
                 b"GET /" + b"a" * 100_000):  # fmt: skip
        other = Http(f"http://{http.endpoint}")
        try:
            assert (await other.send(data + b"\r\n\r\n")).status == 400
        except (asyncio.IncompleteReadError, ConnectionError):
            continue  # it was closed while it sent
        finally:
            await other.close()
    assert (await http.ask("GET", "/healthz")).status == 200


async def test_slow_requests_and_idle_connections_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KEEP_ALIVE_S", 0.3)
    async with serving(tmp_path, first_frame_s=0.3) as (http, _, _):
        body = f"PUT {V2}/tenants/x HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12".encode()
        for begun in (b"", b"GET /healthz HT", body):
            reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
            writer.write(begun)
            async with asyncio.timeout(10):
                await reader.read()
            writer.close()
        await http.ask("GET", "/healthz")
        assert http._streams is not None
        async with asyncio.timeout(10):
            assert await http._streams[0].read() == b""


async def test_requests_that_come_together_are_answered_in_order(http: Http) -> None:
    one = f"GET {V2}/clusters HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    two = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    first = await http.send(one + two)
    second = await http.send(b"")
    assert (first.body, second.body) == (b'["magnetar"]', b"ok\n")
    assert (await http.ask("HEAD", f"{V2}/tenants")).body == b""


async def test_a_page_of_another_site_changes_nothing(http: Http) -> None:
    assert (await http.ask("PUT", T, Origin="https://elsewhere.example")).status == 403
    assert (await http.ask("PUT", T, Origin=f"http://{http.endpoint}")).status == 204


def test_a_server_that_was_not_asked_holds_no_http_server() -> None:
    code = "import sys, magnetar.broker.server; print(sorted({'starlette', 'uvicorn', 'h11'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


async def test_a_request_that_hangs_holds_up_the_end_of_the_broker_for_its_grace_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(self: Catalog) -> list[str]:
        await asyncio.sleep(3600)
        return []

    async with serving(tmp_path) as (http, broker, _):
        await http.ask("GET", "/healthz")
        monkeypatch.setattr(Catalog, "list_tenants", hangs)
        hanging = asyncio.ensure_future(http.ask("GET", f"{V2}/tenants"))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):  # the grace is a second, the request an hour
            await broker.close()
        assert (await asyncio.gather(hanging, return_exceptions=True))[0]
