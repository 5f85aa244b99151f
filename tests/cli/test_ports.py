"""The ports of a standalone server: gRPC on ours, Pulsar's protocol and HTTP on Pulsar's where those are free."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.cli.common.processes import find_free_port
from magnetar.cli.run import standalone
from magnetar.proto import wire_pb2 as wire
from magnetar.runtime.network import Endpoint, find_rpc
from magnetar.runtime.process import make_system_world
from tests.broker.pulsar.raw import Raw
from tests.broker.rest.http import Http


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Free ports in the place of 7650, 6650 and 8080."""
    with socket.socket() as one, socket.socket() as other, socket.socket() as third:
        for each in (one, other, third):
            each.bind(("127.0.0.1", 0))
        found = one.getsockname()[1], other.getsockname()[1], third.getsockname()[1]
    monkeypatch.setattr(standalone, "DEFAULT_PORT", found[0])
    monkeypatch.setattr(standalone, "PULSAR_PORTS", (found[1], 0))
    monkeypatch.setattr(standalone, "HTTP_PORTS", (found[2], 0))
    return found


@contextlib.asynccontextmanager
async def _serving(folder: Path, port: int | None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, object]]:
    """The facts of the ready line while it serves."""
    said: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(
        standalone, "announce_process_ready", lambda url, **facts: said.set_result({"url": url, **facts})
    )
    serving = asyncio.create_task(standalone.run_standalone(make_system_world(), _given(folder, port)))
    try:
        done, _ = await asyncio.wait({said, serving}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert said in done, serving
        yield said.result()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def _given(folder: Path, port: int | None) -> standalone.StandaloneOptions:
    pulsar = standalone._protocol_endpoint("127.0.0.1", port, None, standalone.PULSAR_PORTS[0], "Pulsar's protocol")
    http = standalone._protocol_endpoint("127.0.0.1", port, None, standalone.HTTP_PORTS[0], "HTTP")
    return standalone.StandaloneOptions(
        folder, Endpoint("127.0.0.1", standalone.DEFAULT_PORT if port is None else port), pulsar, http
    )


async def _tenants(port: int) -> list[str]:
    channel = make_system_world().network.connect(Endpoint("127.0.0.1", port))
    try:
        return list((await channel.call(find_rpc("Admin", "ListTenants"), wire.Empty(), timeout_s=10)).names)
    finally:
        await channel.close()


async def _speaks_pulsar(port: int) -> bool:
    raw = await Raw.connected(make_system_world(), Endpoint("127.0.0.1", port))
    await raw.stream.close()
    return True


async def _answers_http(url: object) -> bool:
    http = Http(str(url))
    try:
        return (await http.get("/admin/v2/clusters")) == ["standalone"]
    finally:
        await http.close()


async def test_all_default_ports_serve(
    ports: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _serving(tmp_path, None, monkeypatch) as facts:
        assert facts["url"] == f"magnetar://127.0.0.1:{ports[0]}"
        assert facts["pulsar"] == f"pulsar://127.0.0.1:{ports[1]}"
        assert await _tenants(ports[0]) == ["public"]
        assert await _speaks_pulsar(ports[1])
        assert facts["http"] == f"http://127.0.0.1:{ports[2]}"
        assert await _answers_http(facts["http"])


@pytest.mark.parametrize(("number", "fact"), [(1, "pulsar"), (2, "http")])
async def test_another_port_that_is_taken_is_said_and_ours_serves(
    ports: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    number: int, fact: str,
) -> None:  # fmt: skip
    with socket.create_server(("127.0.0.1", ports[number])):
        async with _serving(tmp_path, None, monkeypatch) as facts:
            assert fact not in facts
            assert await _tenants(ports[0]) == ["public"]
    assert f"port {ports[number]} is taken" in capsys.readouterr().err


async def test_with_an_explicit_port_the_others_are_free_ones(
    ports: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _serving(tmp_path, ports[0], monkeypatch) as facts:
        port = int(str(facts["pulsar"]).rpartition(":")[2])
        assert port not in (0, *ports)
        assert await _speaks_pulsar(port)
        assert await _answers_http(facts["http"])


def test_a_free_port_of_an_address_that_is_not_ours_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(OSError, match=r"no free port at 192\.0\.2\.1"):
        find_free_port("192.0.2.1")
