"""Bad input: each ends with a code and one line that says what was wrong and what to do; nothing hangs."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Cluster, Processes
from magnetar.cli.run.servers import check_listeners
from magnetar.runtime.network import Endpoint
from tests.support.processes import Result, run_cli, run_here

pytestmark = pytest.mark.processes
Cli = Callable[..., Result]


def _expect_line(done: Result, code: int, *words: str) -> None:
    assert done.code == code, done.err
    lines = [line for line in done.err.splitlines() if line.startswith(("magnetar: ", "Error: "))]
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


@pytest.mark.parametrize(
    "topic", ["a/b", "persistent://a/b", "a/b/c/d", "", "http://a/b/c", "persistent://a b/c/d", "public/default/"]
)
def test_a_wrong_topic_name_is_refused_before_anything_is_sent(topic: str) -> None:
    _expect_line(run_here("topics", "create", topic, "--url", "magnetar://127.0.0.1:1"), 2)
    _expect_line(run_here("topics", "stats", topic, "--url", "magnetar://127.0.0.1:1"), 2)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "broker.example", "192.0.2.1"])
@pytest.mark.parametrize("server", ["metadata", "bookie", "broker", "standalone"])
def test_a_server_that_does_not_ask_who_calls_listens_on_this_machine_only(server: str, host: str) -> None:
    where = ("--host", host.strip("[]")) if server == "standalone" else ("--listen", f"{host}:0")
    _expect_line(run_cli(server, *where), 2, host, "--insecure", "127.0.0.1")


def test_metrics_count_as_a_listener_too() -> None:
    _expect_line(run_cli("standalone", "--metrics", "0.0.0.0:0"), 2, "--metrics", "--insecure")


def test_an_operator_may_take_the_risk_and_is_warned() -> None:
    everywhere, here = Endpoint("0.0.0.0", 7650), Endpoint("127.0.0.1", 7650)
    assert "may read, write and delete" in check_listeners(True, listen=everywhere, metrics=None)
    assert check_listeners(False, listen=here, metrics=Endpoint("::1", 9)) == ""
    assert check_listeners(True, listen=here) == ""


def test_an_unknown_tenant_namespace_topic_or_subscription_is_code_4(cli: Cli) -> None:
    _expect_line(cli("tenants", "get", "nobody", code=4), 4, "nobody", "tenants create")
    _expect_line(cli("topics", "create", "nobody/ns/t", code=4), 4, "nobody")
    _expect_line(cli("produce", "public/nowhere/t", "-m", "x", code=4), 4, "nowhere")
    _expect_line(cli("topics", "stats", "not-there", code=4), 4, "not-there")
    cli("topics", "create", "is-there")
    _expect_line(cli("topics", "skip", "is-there", "-s", "no-sub", "-n", "1", "-y", code=4), 4, "no-sub")


def test_a_wrong_subscription_name_is_a_usage_error(cli: Cli) -> None:
    cli("topics", "create", "named")
    _expect_line(cli("subscriptions", "create", "named", "-s", "a/b", code=2), 2)


def test_a_message_above_the_limit_is_refused_and_the_server_lives(cli: Cli, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"x" * ((5 << 20) + 1))
    _expect_line(cli("produce", "big", "-f", str(large), code=2), 2, "5242880")
    cli("produce", "big", "-m", "small")


def test_an_exclusive_subscription_in_use_is_code_5(cli: Cli, url: str) -> None:
    import magnetar

    with magnetar.Client(url) as client:
        consumer = client.subscribe("taken", "s")
        _expect_line(cli("consume", "taken", "-s", "s", code=5), 5)
        consumer.close()


def test_no_server_is_said_with_what_to_do() -> None:
    done = run_here("topics", "list", "--url", "magnetar://127.0.0.1:1")
    _expect_line(done, 1, "Connection refused", "magnetar standalone", "--url")


@pytest.mark.parametrize("url", ["127.0.0.1", "kafka://localhost", "magnetar://", "magnetar://host:port"])
def test_a_wrong_url_is_a_usage_error(url: str) -> None:
    _expect_line(run_here("topics", "list", "--url", url), 2)


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of a server that speaks something else."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # it goes away, or stays without a word
                    connection.settimeout(2)
                    connection.sendall(b"220 mail.example ESMTP\r\n")
                    while connection.recv(4096):
                        pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_a_port_that_speaks_something_else_is_said(stranger: int) -> None:
    for command in (("topics", "list"), ("produce", "t", "-m", "x"), ("consume", "t", "-s", "s")):
        done = run_here(*command, "--url", f"magnetar://127.0.0.1:{stranger}", "--timeout", "5")
        _expect_line(done, 1, f"127.0.0.1:{stranger}")
        assert "speak" in done.err


def test_a_metadata_port_that_is_no_metadata_is_said_by_bookie_and_broker(stranger: int, tmp_path: Path) -> None:
    where = ("--metadata", f"127.0.0.1:{stranger}", "--listen", "127.0.0.1:0", "--wait", "1")
    _expect_line(run_cli("bookie", *where, "--data", str(tmp_path / "b")), 1, str(stranger))
    _expect_line(run_cli("broker", *where), 1, str(stranger))


def test_a_port_in_use_is_code_5(url: str, tmp_path: Path) -> None:
    port = url.rpartition(":")[2]
    _expect_line(run_cli("standalone", "--port", port, "--data", str(tmp_path / "a")), 5, port, "another port")
    _expect_line(run_cli("metadata", "--listen", f"127.0.0.1:{port}", "--data", str(tmp_path / "b")), 5, port)


def test_a_data_directory_of_another_process_is_code_5(started: Processes, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    started.start("first", "standalone", "--port", "0", "--data", data).wait_ready()
    _expect_line(run_cli("standalone", "--port", "0", "--data", data), 5, data, "another process")
    tree = started.start("metadata", "metadata", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "m"))
    tree.wait_ready()
    second = run_cli("metadata", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "m"))
    _expect_line(second, 5, str(tmp_path / "m"), "another process")
    bookie = ("bookie", "--listen", "127.0.0.1:0", "--metadata", tree.address, "--data", str(tmp_path / "bookie"))
    started.start("bookie", *bookie).wait_ready()
    _expect_line(run_cli(*bookie), 5, str(tmp_path / "bookie"), "another process")


def test_fewer_bookies_than_have_data_is_refused(started: Processes, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    server = started.start("three", "standalone", "--port", "0", "--bookies", "3", "--data", data)
    server.wait_ready()
    server.stop()
    _expect_line(run_cli("standalone", "--port", "0", "--bookies", "1", "--data", data), 2, "--bookies 3")


def test_settings_that_do_not_exist_or_contradict_are_usage_errors(tmp_path: Path) -> None:
    file = tmp_path / "magnetar.toml"
    file.write_text("[broker]\nensemble = 3\n")
    arguments = ("standalone", "--port", "0", "--data", str(tmp_path / "data"))
    _expect_line(run_cli(*arguments, "--config", str(file)), 2, "ensemble", "did you mean")
    _expect_line(run_cli(*arguments, MAGNETAR_BROKER_ROLL_ENTRIES="none"), 2, "roll_entries")
    _expect_line(run_cli(*arguments, "--config", str(tmp_path / "none.toml")), 2, "none.toml")


def test_bookies_that_are_gone_are_said_and_the_broker_lives(tmp_path: Path) -> None:
    """To a topic that is open: it has a ledger, so the message was on its way. One that must be opened gets a ledger,
    or is told that bookies are missing: as fast as their sessions end."""
    with Cluster(tmp_path, bookies=3, brokers=1, session_timeout_s=1.0) as cluster:
        url = cluster.url
        for topic in ("t", "open"):
            assert run_here("produce", topic, "-m", "before", "--url", url).code == 0
        for bookie in cluster.bookies:
            bookie.kill()
        done = run_here("produce", "open", "-m", "x", "--url", url, "--timeout", "3")
        _expect_line(done, 1, "may be stored or not")
        for bookie in cluster.bookies:
            bookie.start()
            bookie.wait_ready()
        assert run_here("produce", "t", "-m", "after", "--url", url).code == 0
        assert run_here("consume", "t", "-s", "s", "-n", "2", "--url", url).out == "before\nafter\n"


def test_debug_shows_the_traceback() -> None:
    done = run_cli("topics", "list", "--url", "magnetar://127.0.0.1:1", MAGNETAR_DEBUG="1")
    assert done.code == 1
    assert "Traceback" in done.err
