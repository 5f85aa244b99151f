"""`--health` and `magnetar health`: what probes of a running server are answered; and what systemd is told of it."""

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.cli import check
from magnetar.cli.common.exits import CommandFailure
from magnetar.cli.common.processes import Process, Processes
from tests.support.processes import Result, run_cli, run_here

pytestmark = pytest.mark.processes


def facts(server: Process) -> dict[str, str]:
    server.wait_ready()
    return dict(word.split("=", 1) for word in server.lines[0].split()[2:])


def health(where: str, *options: str) -> Result:
    return run_cli("health", "--http", f"http://{where}", *options)


def test_a_command_waits_until_a_server_is_ready_and_not_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [CommandFailure("not reached"), (503, "it starts"), (200, "ok")]
    times = list[float]()

    def ask(*_: object) -> tuple[int, str]:
        answer = answers.pop(0)
        if isinstance(answer, CommandFailure):
            raise answer
        return answer

    monkeypatch.setattr(check, "_ask", ask)
    monkeypatch.setattr(check.time, "sleep", times.append)
    found = run_here("health", "--http", "http://127.0.0.1:1", "--wait", "60")
    assert (found.code, found.out.strip(), len(times)) == (0, "ok", 2)
    answers[:] = [(503, "it starts")]
    assert run_here("health", "--http", "http://127.0.0.1:1").code == 1


def wait_code(where: str, code: int, *options: str) -> Result:
    until = time.monotonic() + 30
    while (found := health(where, *options)).code != code:
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def test_a_broker_is_ready_when_bookies_are_there_and_each_role_says_whether_it_is(
    started: Processes, tmp_path: Path
) -> None:
    tree = started.start("m", "metadata", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "m"), "--health", "0")
    at = tree.address
    broker = started.start("b", "broker", "--listen", "127.0.0.1:0", "--metadata", at, "--health", "0")
    for each in (tree, broker):
        assert health(facts(each)["health"], "--live").out.strip() == "ok"
    assert health(facts(tree)["health"]).code == 0
    found = wait_code(facts(broker)["health"], 1)
    assert "no new ledger can be made" in found.err
    bookies = [
        started.start(
            f"k{each}", "bookie", "--listen", "127.0.0.1:0", "--metadata", at, "--data", str(tmp_path / f"k{each}"),
            "--health", "127.0.0.1:0",
        )
        for each in range(3)
    ]  # fmt: skip
    assert [health(facts(each)["health"]).out.strip() for each in bookies] == ["ok"] * 3
    wait_code(facts(broker)["health"], 0)
    tree.kill()
    broker.send_signal(signal.SIGSTOP)
    stopped = health(facts(broker)["health"], "--live", "--timeout", "0.5")
    broker.send_signal(signal.SIGCONT)
    assert (stopped.code, "does not answer" in stopped.err) == (1, True)
    assert health(facts(broker)["health"], "--live").code == 0, "no neighbour's health is in its own"
    found = wait_code(facts(bookies[0])["health"], 1)
    assert "is not registered in the metadata now" in found.err
    assert health(facts(bookies[0])["health"], "--live").code == 0


def test_the_command_says_what_is_wrong_with_its_address(started: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli("health", "--http", "ftp://here").code == 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{free.getsockname()[1]}"
        found = health(nowhere)
    assert (found.code, f"http://{nowhere} does not answer" in found.err) == (1, True)


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        yield listener


@pytest.mark.parametrize("processes", ["1", "2"])
def test_systemd_hears_that_it_serves_that_it_lives_and_that_it_ends(
    started: Processes, tmp_path: Path, systemd: socket.socket, processes: str
) -> None:
    given = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000", "MAGNETAR_HEALTH": "0"}
    server = started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--processes", processes, environment=given
    )
    assert health(facts(server)["health"]).code == 0
    heard = [systemd.recv(100).decode()]
    while heard[-1] != "READY=1":
        heard.append(systemd.recv(100).decode())
    assert set(heard[:-1]) <= {"WATCHDOG=1"}
    assert systemd.recv(100) == b"WATCHDOG=1"
    assert server.stop() == 0
    ended = []
    systemd.settimeout(0.5)
    while True:
        try:
            ended.append(systemd.recv(100).decode())
        except TimeoutError:
            break
    assert ended.count("STOPPING=1") == 1
    assert set(ended) == {"STOPPING=1", "WATCHDOG=1"} or ended == ["STOPPING=1"]
