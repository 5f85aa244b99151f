"""Strangers at every port of real servers, in clear and with TLS: those that say nothing, and those that say nonsense.

They keep no honest client out, and what they leave in the log is at most one line an address and minute, no traceback.
"""

import contextlib
import json
import socket
import ssl
import struct
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Cluster, Process, Processes
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.runtime.network import Endpoint
from tests.support.processes import run_here

pytestmark = pytest.mark.processes

FLOOD = 300
CONNECTIONS = 100
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CLIENT_HELLO = bytes.fromhex("16030100c0010000bc0303") + bytes(20)
SERVER_HELLO = bytes.fromhex("160303002a020000260303") + bytes(40)
WHOLE_HELLO = bytes.fromhex("1603010005010000010a")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""Of ZeroMQ; the name of its mechanism follows."""
HEAD = b"POST /admin/v2/tenants/x HTTP/1.1\r\nHost: a\r\n"

NONSENSE = {
    "nothing": b"",
    "a bad request line": b"GET\r\n\r\n",
    "a line that is none": b"\r\r\r\n\x00\x01\x02 /\xff\xfe HTTP/9.9\r\n\r\n",
    "a huge header": b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 5_000 + b"\r\n",
    "a bad header": b"GET / HTTP/1.1\r\nHost: a\r\n: nothing\r\n\x00bad: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "bad chunking": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a length that is none": HEAD + b"Content-Length: x\r\n\r\nabc",
    "an early close": HEAD + b"Content-Length: 1000\r\n\r\nabc",
    "an early close in a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\nabc",
    "TLS": CLIENT_HELLO,
    "a wrong TLS record": WHOLE_HELLO,
    "the wrong side of TLS": SERVER_HELLO,
    "HTTP/2 without settings": PREFACE + b"\xff" * 5_000,
    "HTTP/2 with a bad header block": PREFACE + bytes(3) + b"\4\0" + bytes(4) + b"\0\0\4\1\5\0\0\0\1\xff\xff\xff\xff",
    "a part of the preface": PREFACE[:10],
    "a Pulsar frame that is too long": struct.pack("!II", 0xFFFFFFFF, 0xFFFFFFFF) + b"x" * 1000,
    "a Pulsar frame that is no command": struct.pack("!II", 8, 4) + b"\xff" * 4,
    "a Pulsar frame that is cut": struct.pack("!II", 100, 90) + b"\x08",
    "a command before CONNECT": struct.pack("!II", 8, 4) + bytes((8, 18, 0x92, 1)),
    "a ZeroMQ greeting of another mechanism": GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32),
    "a ZeroMQ greeting and nonsense": GREETING + b"NULL".ljust(20, b"\0") + b"\xff" * 1000,
    "an old ZeroMQ": b"\x01\x00\xff\xff\xff",
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
}


@dataclass
class Server:
    process: Process
    url: str
    ports: dict[str, int]
    folder: Path | None  # of its security

    @property
    def context(self) -> ssl.SSLContext | None:
        return None if self.folder is None else ssl.create_default_context(cafile=self.folder / "ca.pem")

    @property
    def token(self) -> str:
        return "" if self.folder is None else (self.folder / "admin.token").read_text().strip()

    def is_served_at(self, port: str) -> None:
        getattr(self, f"_{port}")()

    def _grpc(self) -> None:
        more = {} if self.folder is None else {"tls_trust_certs_file_path": str(self.folder / "ca.pem")}
        with magnetar.Client(self.url, magnetar.AuthenticationToken(self.token) if more else None, **more) as client:
            client.create_producer("t").send(b"x")

    def _http(self) -> None:
        where = f"http{'s' if self.folder else ''}://127.0.0.1:{self.ports['http']}/admin/v2/clusters"
        asked = urllib.request.Request(where, headers={"Authorization": f"Bearer {self.token}"} if self.folder else {})
        with urllib.request.urlopen(asked, timeout=20, context=self.context) as answer:
            assert isinstance(json.loads(answer.read()), list)

    def _pulsar(self) -> None:
        command = pulsar.BaseCommand(type=pulsar.BaseCommand.CONNECT)
        command.connect.client_version = "test"
        command.connect.auth_method_name, command.connect.auth_data = "token", self.token.encode()
        body = command.SerializeToString()
        with socket.create_connection(("127.0.0.1", self.ports["pulsar"]), timeout=20) as plain:
            one = plain if self.context is None else self.context.wrap_socket(plain, server_hostname="127.0.0.1")
            one.sendall(struct.pack("!II", len(body) + 4, len(body)) + body)
            answer = one.recv(1000)
            assert pulsar.BaseCommand.FromString(answer[8:]).type == pulsar.BaseCommand.CONNECTED
            one.close()


@pytest.fixture(scope="module", params=["in clear", "TLS"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    where = tmp_path_factory.mktemp("strangers")
    folder = where / "security" if request.param == "TLS" else None
    environment = {"MAGNETAR_BROKER_MAX_CONNECTIONS": str(CONNECTIONS)}
    if folder is not None:
        assert run_here("security", "init", str(folder)).code == 0
        environment["MAGNETAR_SECURITY"] = str(folder / "security.toml")
    with Processes(where) as processes:
        process = processes.start(
            "server", "standalone", "--port", "0", "--data", str(where / "data"), "--log-level", "info",
            environment=environment,
        )  # fmt: skip
        url = process.wait_ready()
        [ready] = [each for each in process.lines if each.startswith("ready ")]
        facts = dict(each.split("=", 1) for each in ready.split() if "=" in each)
        ports = {name: int(facts[name].rpartition(":")[2]) for name in ("pulsar", "http")}
        yield Server(process, url, {"grpc": Endpoint.parse(process.address).port, **ports}, folder)


@contextlib.contextmanager
def flooded(port: int, says: bytes) -> Iterator[None]:
    opened = []
    try:
        for _ in range(FLOOD):
            opened.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            with contextlib.suppress(OSError):  # it may have been pushed out
                opened[-1].sendall(says)
        yield
    finally:
        for each in opened:
            each.close()


@pytest.mark.parametrize("says", [b"", CLIENT_HELLO], ids=["nothing", "a ClientHello"])
@pytest.mark.parametrize("port", ["grpc", "http", "pulsar"])
def test_three_times_as_many_silent_connections_as_a_port_may_have_keep_no_client_out(
    server: Server, port: str, says: bytes
) -> None:
    server.is_served_at(port)
    with flooded(server.ports[port], says):
        server.is_served_at(port)
        server.is_served_at(port)
    server.is_served_at(port)
    assert server.process.is_running


def talk(port: int, says: bytes, context: ssl.SSLContext | None) -> None:
    """Says it, reads what comes within a moment, and closes."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        one = plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")
        one.settimeout(0.05)
        one.sendall(says)
        with contextlib.suppress(OSError):
            while one.recv(1 << 16):
                pass
        one.close()


def said_since(process: Process, before: int) -> list[str]:
    """Without the audit log, which has bounds of its own (tests/runtime/test_audit.py)."""
    lines = process.stderr_path.read_bytes()[before:].decode("utf-8", "replace").splitlines()
    return [each for each in lines if not each.startswith('{"time"')]


@pytest.mark.parametrize("port", ["grpc", "http", "pulsar"])
def test_nonsense_leaves_a_line_an_address_and_minute_at_most_and_no_traceback(server: Server, port: str) -> None:
    """In clear; and, where the port has TLS, below it and above it. Denials of whole requests are in the audit log."""
    server.is_served_at(port)
    before = server.process.stderr_path.stat().st_size
    for _ in range(2):
        for says in NONSENSE.values():
            talk(server.ports[port], says, None)
            if server.folder is not None:
                talk(server.ports[port], says, server.context)
    server.is_served_at(port)
    lines = said_since(server.process, before)
    assert not [each for each in lines if "Traceback" in each or each.startswith("  ")]
    assert len(lines) <= 2, lines  # a minute may end meanwhile
    assert server.process.is_running


def test_strangers_at_the_port_of_a_bookie_keep_no_broker_out_and_fill_no_log(tmp_path: Path) -> None:
    """A broker that starts anew while the port of its only bookie is full of silent connections."""
    environment = {f"MAGNETAR_BROKER_{each}": "1" for each in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with Cluster(tmp_path, bookies=1, brokers=1) as cluster:
            [bookie] = cluster.bookies
            port = Endpoint.parse(bookie.address).port
            before = bookie.stderr_path.stat().st_size
            for _ in range(2):
                for says in NONSENSE.values():
                    talk(port, says, None)
            with flooded(port, b""):
                [broker] = cluster.brokers
                assert broker.stop() == 0
                broker.start()
                broker.wait_ready()
                with magnetar.Client(cluster.url) as client:
                    client.create_producer("t").send(b"x")
            lines = [each for each in said_since(bookie, before) if "127.0.0.1" in each or "Traceback" in each]
            assert len(lines) <= 2, lines
            assert not [each for each in lines if "Traceback" in each]
