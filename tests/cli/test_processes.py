"""`--processes N`: one address, log, page of metrics and end for several processes, and what it refuses."""

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

import magnetar
from magnetar.broker.common.config import BrokerConfig
from magnetar.cli.common.processes import Cluster, Process, Processes
from magnetar.cli.run import brokers
from magnetar.cli.run.standalone import assign_bookies_to_processes
from magnetar.cli.storage.bookie import decide_process_count
from magnetar.proto.errors import Busy, InvalidConfiguration
from magnetar.runtime.network import Endpoint
from tests.cli.run.test_metrics import Scrape
from tests.support.children import children, pids, wait_another, wait_gone
from tests.support.processes import run_cli, run_here

TOPICS = [f"t{number}" for number in range(12)]


def _standalone(started: Processes, folder: Path, count: int, *more: str) -> Process:
    arguments = ("--port", "0", "--data", str(folder / "data"), "--processes", str(count))
    return started.start("server", "standalone", *arguments, *more)


def _facts(server: Process) -> dict[str, str]:
    server.wait_ready()
    (line,) = server.lines
    return dict(word.split("=", 1) for word in line.split()[2:])


def _owners(url: str) -> dict[str, str]:
    """Topic → HOST:PORT of its broker, as one address answers."""
    with urllib.request.urlopen(f"{url}/admin/v2/brokers/standalone", timeout=30) as answer:
        assert len(json.loads(answer.read())) == 2
    found = {}
    for topic in TOPICS:
        where = f"{url}/lookup/v2/topic/persistent/public/default/{topic}"
        with urllib.request.urlopen(where, timeout=30) as answer:
            found[topic] = json.loads(answer.read())["brokerUrl"]
    return found


@pytest.mark.processes
def test_one_address_leads_to_all_brokers_and_every_topic_is_used_through_it(
    started: Processes, tmp_path: Path
) -> None:
    server = _standalone(started, tmp_path, 3)
    url, facts = server.wait_ready(), _facts(server)
    assert list(children(server)) == ["storage", "broker-1", "broker-2"]
    assert facts["processes"] == "3"
    owners = _owners(facts["http"])
    assert len(set(owners.values())) == 2, "look-ups share the topics"
    assert facts["pulsar"] in owners.values()
    with magnetar.Client(url) as client:
        for topic in TOPICS:  # over gRPC, some of them at the other broker
            consumer = client.subscribe(topic, "s")
            client.create_producer(topic).send(topic.encode())
            assert consumer.receive(10_000).data() == topic.encode()
    assert run_here("topics", "stats", TOPICS[0], "--url", url).code == 0
    assert _owners(facts["http"]) == owners
    assert server.stop() == 0
    assert "Traceback" not in server.output()


@pytest.mark.processes
def test_pulsars_client_is_led_to_the_owner(started: Processes, tmp_path: Path) -> None:
    pulsar = pytest.importorskip("pulsar")
    server = _standalone(started, tmp_path, 3)
    facts = _facts(server)
    assert len(set(_owners(facts["http"]).values())) == 2
    client = pulsar.Client(facts["pulsar"])
    try:
        for topic in TOPICS:
            consumer = client.subscribe(topic, "s")
            client.create_producer(topic).send(topic.encode())
            assert consumer.receive(10_000).data() == topic.encode()
    finally:
        client.close()


@pytest.mark.processes
def test_one_page_has_the_metrics_of_all_and_the_log_says_which_process_wrote_a_line(
    started: Processes, tmp_path: Path
) -> None:
    server = _standalone(started, tmp_path, 4, "--metrics", "0", "--log-level", "info", "--bookies", "2")
    url, facts = server.wait_ready(), _facts(server)
    with magnetar.Client(url) as client:
        for topic in TOPICS:
            client.create_producer(topic).send(b"x")
    for where in (facts["metrics"], facts["http"].removeprefix("http://")):
        page = Scrape(where)
        assert page.value("magnetar_broker_topics", process="broker-1") > 0
        assert page.value("magnetar_broker_topics", process="broker-2") > 0
        assert page.value("magnetar_broker_topics") == len(TOPICS)
        assert page.value("magnetar_bookie_disk_free_bytes", process="storage") > 0
        assert page.value("magnetar_bookie_disk_free_bytes", process="storage-2") > 0
        assert page.value("magnetar_metadata_sessions", process="storage") >= 2
        for name in ("storage", "storage-2", "broker-1", "broker-2"):
            assert page.value("magnetar_process_resident_memory_bytes", process=name) > 0
            assert page.value("magnetar_processes_shown", child=name) == 1
            assert page.value("magnetar_processes_restarts_total", child=name) == 0
    for name in ("broker-2", "broker-1"):
        killed = children(server)[name]
        os.kill(killed, signal.SIGKILL)
        wait_another(server, name, killed)
        assert _scraped(facts["metrics"]).value("magnetar_processes_restarts_total", child=name) == 1
    assert server.stop() == 0
    lines = [line for line in server.output().splitlines() if " magnetar" in line and not line.startswith("ready ")]
    assert lines
    named = tuple(f"[{name}] magnetar" for name in ("parent", "storage", "storage-2", "broker-1", "broker-2"))
    assert [line for line in lines if not any(name in line for name in named)] == []
    assert any("[parent]" in line and f"process broker-1 ({killed}) ended with signal 9" in line for line in lines)


def _scraped(where: str) -> Scrape:
    """Once the process that serves the page is there again."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return Scrape(where)
        except OSError:
            assert time.monotonic() < deadline, "there is no page"
        time.sleep(0.05)


@pytest.mark.processes
def test_a_killed_parent_ends_all_and_the_next_start_has_the_folder(started: Processes, tmp_path: Path) -> None:
    server = _standalone(started, tmp_path, 2)
    url = server.wait_ready()
    assert run_here("produce", "t", "-m", "kept", "--url", url).code == 0
    theirs = pids(server.pid)
    server.kill()
    server.start()
    assert server.wait_ready() == url, "at the same port"
    wait_gone(*theirs)
    assert run_here("consume", "t", "-s", "s", "-n", "1", "--url", url).out == "kept\n"


@pytest.mark.processes
def test_a_folder_has_one_server_also_while_its_storage_waits_for_its_next_start(
    started: Processes, tmp_path: Path
) -> None:
    server = _standalone(started, tmp_path, 2)
    server.wait_ready()
    other = ("standalone", "--port", "0", "--data", str(tmp_path / "data"))
    for _ in range(2):  # the second time it waits for half a second
        storage = children(server)["storage"]
        os.kill(storage, signal.SIGKILL)
        assert run_cli(*other).code == 5
        wait_another(server, "storage", storage)
    assert run_cli(*other, "--processes", "2").code == 5


@pytest.mark.processes
def test_brokers_of_a_cluster_share_one_address_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, bookies=3, brokers=0) as cluster:
        server = cluster.start(
            "brokers", "broker", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--processes", "2",
            "--name", "here", "--metadata", cluster.metadata.address,
        )  # fmt: skip
        url = server.wait_ready()
        shown = run_here("brokers", "list", "--url", url, "-o", "json")
        assert {each["name"] for each in json.loads(shown.out)} == {"here-1", "here-2"}
        with magnetar.Client(url) as client:
            for topic in TOPICS:
                client.create_producer(topic).send(b"x")
        for name, killed in children(server).items():
            os.kill(killed, signal.SIGKILL)
            wait_another(server, name, killed)
        with magnetar.Client(url) as client:
            for topic in TOPICS:
                client.create_producer(topic).send(b"x")
        assert server.stop() == 0


@pytest.mark.processes
def test_bookies_of_one_command_have_their_own_folders_and_ids_and_are_one_rack(tmp_path: Path) -> None:
    with Cluster(tmp_path, bookies=0, brokers=0) as cluster:
        metadata = ("--metadata", cluster.metadata.address, "--data", str(tmp_path / "bookies"))
        server = cluster.start("bookies", "bookie", "--listen", "127.0.0.1:0", *metadata, "--processes", "3")
        assert server.wait_ready().startswith("bookie://127.0.0.1:")
        ids = set(_facts(server)["id"].split(","))
        assert len(ids) == 3
        assert sorted(path.name for path in (tmp_path / "bookies").glob("bookie-*")) == [
            "bookie-1", "bookie-2", "bookie-3",
        ]  # fmt: skip
        broker = cluster.start("broker", "broker", "--listen", "127.0.0.1:0", *metadata[:2])
        url = broker.wait_ready()
        shown = json.loads(run_here("bookies", "list", "--url", url, "-o", "json").out)
        assert {each["id"]: each["rack"] for each in shown} == dict.fromkeys(ids, "/127.0.0.1")
        with magnetar.Client(url) as client:
            producer = client.create_producer("t")
            for name, killed in children(server).items():
                producer.send(name.encode())
                os.kill(killed, signal.SIGKILL)
                wait_another(server, name, killed)
                producer.send(name.encode())
        assert server.stop() == 0
        again = cluster.start("bookies-again", "bookie", "--listen", "127.0.0.1:0", *metadata)
        assert set(_facts(again)["id"].split(",")) == ids, "as many as there are, the same ones"
        assert again.stop() == 0
        fewer = run_cli("bookie", "--listen", "127.0.0.1:0", *metadata, "--processes", "2")
        assert (fewer.code, "3 bookies" in fewer.err) == (2, True)


@pytest.mark.processes
def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_cli("standalone", "--data", str(tmp_path / "data"), "--port", port, "--processes", "2")
    assert done.code == 5
    assert "stop what listens there, or choose another port" in done.err


@pytest.mark.processes
def test_a_start_that_fails_in_one_process_ends_the_command_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.sqlite").write_bytes(b"no database at all" * 100)
    done = run_cli("standalone", "--data", str(tmp_path / "data"), "--port", "0", "--processes", "2")
    alone = run_cli("standalone", "--data", str(tmp_path / "data"), "--port", "0")
    assert (done.code, alone.code) == (alone.code, done.code)
    assert alone.err.strip().splitlines()[-1] in done.err


@pytest.mark.parametrize("command", ["standalone", "broker", "bookie"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "65", "1.5", ""])
def test_a_wrong_number_is_refused(command: str, value: str) -> None:
    done = run_here(command, "--processes", value)
    assert done.code == 2
    assert "--processes" in done.err


@pytest.mark.parametrize("command", ["standalone", "broker", "bookie"])
def test_a_system_that_does_not_fork_is_told(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "fork")
    monkeypatch.chdir(tmp_path)
    done = run_here(command, "--processes", "2")
    assert (done.code, "needs a system that forks" in done.err) == (3, True)


def test_what_goes_with_one_broker_alone_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[broker]\npulsar_listeners = "internal:pulsar://b1:6650"\n')
    done = run_here("standalone", "--data", str(tmp_path), "--port", "0", "--config", str(config), "--processes", "2")
    assert (done.code, "pulsar_listeners" in done.err) == (2, True)


def test_security_needs_members_that_know_each_other(tmp_path: Path) -> None:
    assert run_here("security", "init", str(tmp_path / "security")).code == 0
    settings = tmp_path / "security" / "security.toml"
    settings.write_text(re.sub(r"\[members\][^\[]*", "", settings.read_text()))
    given = ("--port", "0", "--security", str(settings), "--processes", "2")
    done = run_here("standalone", "--data", str(tmp_path / "data"), *given)
    assert (done.code, "no section [members]" in done.err) == (2, True)


def test_other_processes_listen_at_free_ports_of_this_machine_or_at_the_next_ones() -> None:
    assert brokers.choose_process_address(Endpoint("127.0.0.1", 7650), 0) == Endpoint("127.0.0.1", 7650)
    assert brokers.choose_process_address(Endpoint("127.0.0.1", 7650), 2) == Endpoint("127.0.0.1", 0)
    assert brokers.choose_process_address(Endpoint("127.0.0.1", 7650), 2, forwarded=True) == Endpoint("127.0.0.1", 7652)
    assert brokers.choose_process_address(Endpoint("0.0.0.0", 7650), 2) == Endpoint("0.0.0.0", 7652)
    assert brokers.choose_process_address(Endpoint("0.0.0.0", 0), 2) == Endpoint("0.0.0.0", 0)
    with pytest.raises(InvalidConfiguration, match="65536"):
        brokers.choose_process_address(Endpoint("0.0.0.0", 65535), 1)


def test_each_broker_is_reached_at_the_advertised_host_at_ports_after_each_other() -> None:
    settings = BrokerConfig(advertised=Endpoint("b1.example", 9000))
    seen = [brokers.make_process_settings(settings, number, "b", {}) for number in range(2)]
    assert [each.advertised for each in seen] == [Endpoint("b1.example", 9000), Endpoint("b1.example", 9001)]
    assert [(each.name, each.share_group) for each in seen] == [("b-1", "b"), ("b-2", "b")]
    free = BrokerConfig(advertised=Endpoint("b1.example", 0), share_group="all")
    assert brokers.make_process_settings(free, 1, "b", {}).advertised == Endpoint("b1.example", 0)
    assert brokers.make_process_settings(free, 1, "b", {}).share_group == "all"
    assert brokers.make_process_settings(BrokerConfig(), 1, "b", {}).advertised is None


def test_brokers_of_a_cluster_share_unless_they_are_told_otherwise() -> None:
    assert brokers.add_share_group(BrokerConfig()).share_group == "magnetar"
    assert brokers.add_share_group(BrokerConfig(cluster="eu")).share_group == "eu"
    assert brokers.add_share_group(BrokerConfig(share_group="mine")).share_group == "mine"


def test_a_folder_that_is_given_back_in_a_moment_is_waited_for(tmp_path: Path) -> None:
    held = brokers.lock_folder(str(tmp_path))
    threading.Timer(0.2, held.close).start()
    brokers.lock_folder(str(tmp_path)).close()


def test_each_bookie_has_a_process_as_long_as_one_is_left_for_a_broker() -> None:
    assert assign_bookies_to_processes(1, 2) == assign_bookies_to_processes(1, 5) == [[1]]
    assert assign_bookies_to_processes(3, 2) == [[1, 2, 3]]
    assert assign_bookies_to_processes(3, 3) == [[1, 3], [2]]
    assert assign_bookies_to_processes(3, 4) == assign_bookies_to_processes(3, 9) == [[1], [2], [3]]


def test_a_reserved_port_is_one_where_the_server_alone_may_listen_again_and_again() -> None:
    ports = brokers.ReservedPorts()
    where = ports.reserve(Endpoint("127.0.0.1", 0))
    for _ in range(2):
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen()
            with pytest.raises(Busy):
                brokers.ReservedPorts().reserve(where)


def test_a_folder_that_is_a_bookie_itself_has_no_room_for_several(tmp_path: Path) -> None:
    assert decide_process_count(tmp_path, None) == 1
    assert decide_process_count(tmp_path, 4) == 4
    (tmp_path / "cookie").touch()
    assert decide_process_count(tmp_path, None) == 1
    with pytest.raises(InvalidConfiguration, match="the data of one bookie"):
        decide_process_count(tmp_path, 2)


@pytest.mark.processes
def test_processes_of_a_secured_server_know_each_other_and_ask_who_calls(started: Processes, tmp_path: Path) -> None:
    assert run_here("security", "init", str(tmp_path / "security")).code == 0
    settings = {"MAGNETAR_SECURITY": str(tmp_path / "security" / "security.toml")}
    server = started.start(
        "server", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--processes", "4", "--bookies", "2",
        environment=settings,
    )  # fmt: skip
    url = server.wait_ready()
    assert url.startswith("magnetar+ssl://")
    assert run_here("produce", "t", "-m", "x", "--url", url).code != 0
    own = {
        "MAGNETAR_TLS_CA": str(tmp_path / "security" / "ca.pem"),
        "MAGNETAR_TOKEN": str(tmp_path / "security" / "admin.token"),
    }
    for topic in TOPICS[:4]:
        assert run_here("produce", topic, "-m", topic, "--url", url, **own).code == 0
        assert run_here("consume", topic, "-s", "s", "-n", "1", "--url", url, **own).out == f"{topic}\n"
    for name in ("storage", "storage-2"):
        killed = children(server)[name]
        os.kill(killed, signal.SIGKILL)
        wait_another(server, name, killed)
        assert run_here("produce", "t0", "-m", "x", "--url", url, **own).code == 0
    assert server.stop() == 0


def test_several_brokers_without_a_name_have_the_same_one_after_a_restart() -> None:
    def name(listen: str, advertised: str = "") -> str:
        known = Endpoint.parse(advertised) if advertised else None
        return brokers.make_broker_name(BrokerConfig(listen=Endpoint.parse(listen), advertised=known))

    assert name("10.0.0.1:7650") == name("10.0.0.1:7650") == name("0.0.0.0:7650", "10.0.0.1:0")
    different = [name("10.0.0.1:7651"), name("10.0.0.1:7650", "b1:7650"), name("10.0.0.1:7650")]
    different += [name(where) for where in 2 * ("127.0.0.1:0", "0.0.0.0:7650", "[::]:7650")]
    assert len(set(different)) == len(different), "an address that others may have too, or another time, is no name"


@pytest.mark.processes
def test_labels_and_groups_of_the_command_line_decide_who_serves_a_namespace_and_who_stores_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, bookies=0, brokers=0) as cluster:
        at = ("--listen", "127.0.0.1:0", "--metadata", cluster.metadata.address)
        for name, group in (("fast", ["--group", "fast"]), ("slow", [])):
            cluster.start(name, "bookie", *at, "--data", str(tmp_path / name), *group).wait_ready()
        url = cluster.start("plain", "broker", *at, "--name", "plain").wait_ready()
        gold = cluster.start("gold", "broker", *at, "--name", "gold", "--labels", "zone=a,tier=gold")
        gold.wait_ready()
        to = ("--url", url, "-o", "json")
        listed = {each["name"]: each["labels"] for each in json.loads(run_here("brokers", "list", *to).out)}
        assert listed == {"plain": None, "gold": "tier=gold,zone=a"}
        bookies = {each["id"]: each["group"] for each in json.loads(run_here("bookies", "list", *to).out)}
        assert sorted(map(str, bookies.values())) == ["None", "fast"]
        for verb in (
            ("set-broker-isolation", "public/default", "--primary", "tier=gold"),
            ("set-bookie-affinity-group", "public/default", "-pg", "fast"),
            ("set-persistence", "public/default", "-e", "1", "-w", "1", "-a", "1"),
        ):
            assert run_here("namespaces", *verb, "--url", url).code == 0
        with magnetar.Client(url) as client:
            producers = [client.create_producer(topic) for topic in TOPICS]
            for each in producers:
                each.send(b"x")
            ledgers = json.loads(run_here("topics", "stats-internal", TOPICS[0], *to).out)["ledgers"]
            assert [bookies[each] for ledger in ledgers for each in ledger["bookies"]] == ["fast"]
            assert gold.stop() == 0
            refused = run_here("topics", "stats", TOPICS[0], "--url", url)
            assert (refused.code, "asks for brokers with labels tier=gold" in refused.err) == (1, True), refused
            cluster.start("again", "broker", *at, "--name", "again", "--labels", "tier=gold").wait_ready()
            for each in producers:
                each.send(b"y")
        wrong = run_cli("broker", *at, "--labels", "gold")
        assert (wrong.code, "a label is NAME=VALUE" in wrong.err) == (2, True), wrong
