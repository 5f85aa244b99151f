"""Each client receives what each other one sends, by feature; each goes on over a killed broker; each runs the examples
of its documentation. Real processes and packages: `make interop`. What is absent on a machine is skipped, and said.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from magnetar.cli.common.processes import Process, Processes
from tests.interop.drivers import BUILDS, Driver, Unavailable
from tests.interop.features import DELAY_MS, Feature, features
from tests.interop.test_pulsar_python import url_of

pytestmark = pytest.mark.interop
SHOWN = ["listener", "multi-topics", "pattern", "producer and consumer", "reader", "table view"]

UNREADABLE = {("python", "go"): {"chunks", "encryption"}}
"""(sender, receiver): Go's client takes what was decrypted or put together only where the size is told, and the C++
client does not tell it without compression; so it is with each broker."""

Clients = dict[str, Driver]


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str] | Unavailable]:
    """The command of each client's driver, or why there is none."""
    found: dict[str, list[str] | Unavailable] = {}
    for name, build in BUILDS.items():
        try:
            found[name] = build(tmp_path_factory.mktemp(name))
        except Unavailable as why:
            found[name] = why
    return found


def url_for(name: str, server: Process) -> str:
    return server.wait_ready() if name == "sdk" else url_of(server)


@pytest.fixture(scope="module")
def start(
    commands: dict[str, list[str] | Unavailable], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Process], Clients]]:
    """Starts a driver of each client that can run here, against a server; they end with the module."""
    folder = tmp_path_factory.mktemp("drivers")
    running: list[Driver] = []

    def started(server: Process) -> Clients:
        found = {
            name: Driver(name, [*command, url_for(name, server)], folder)
            for name, command in commands.items()
            if not isinstance(command, Unavailable)
        }
        running.extend(found.values())
        return found

    yield started
    for each in running:
        each.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with Processes(tmp_path_factory.mktemp("server")) as processes:
        yield processes.start("standalone", "standalone", "--port", "0", "--data", "data")


@pytest.fixture(scope="module")
def clients(start: Callable[[Process], Clients], server: Process) -> Clients:
    return start(server)


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Feature]:
    folder = tmp_path_factory.mktemp("keys")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "private.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    (folder / "public.pem").write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return features([str(folder / "public.pem"), str(folder / "private.pem")])


@pytest.mark.parametrize("name", BUILDS)
def test_each_client_is_here(commands: dict[str, list[str] | Unavailable], name: str) -> None:
    if isinstance(why := commands[name], Unavailable):
        pytest.skip(str(why))


def all_at_once(clients: Clients, do: str, of: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same command of every client at the same time; `of` gives what differs by client."""
    for name, each in clients.items():
        each.ask(do, **of(name))
    answers = {name: each.answer() for name, each in clients.items()}
    failed = {name: str(answer["error"]) for name, answer in answers.items() if "error" in answer}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    return answers


@pytest.mark.parametrize("name", list(features(["public", "private"])))
def test_each_client_receives_what_each_other_sends(clients: Clients, by_name: dict[str, Feature], name: str) -> None:
    feature, topic = by_name[name], f"matrix-{name.replace(' ', '-').replace(',', '')}"
    sent = {"messages": feature.messages, **feature.produce}
    all_at_once(clients, "produce", lambda of: {"topic": f"{topic}-{of}", **sent})
    names = list(clients)
    for shift in range(len(names)):  # each client receives from another one
        sender_of = {each: names[(at + shift) % len(names)] for at, each in enumerate(names)}
        able = {each: clients[each] for each in names if name not in UNREADABLE.get((sender_of[each], each), ())}
        answers = all_at_once(
            able, "consume",
            lambda of, sender_of=sender_of: {
                "topic": f"{topic}-{sender_of[of]}", "subscription": f"s-{of}", "type": feature.type,
                "count": len(feature.messages), **feature.consume,
            },
        )  # fmt: skip
        for receiver, answer in answers.items():
            check_received(feature, answer["messages"], f"{receiver} from {sender_of[receiver]}")


def check_received(feature: Feature, found: list[dict[str, Any]], who: str) -> None:
    ages, indexes = [each.pop("age_ms") for each in found], [each.pop("batch_index") for each in found]
    assert found == feature.expected(), who
    if feature.produce.get("batching"):
        assert max(indexes) > 0, f"{who}: no batch"
    if any("deliver_after_ms" in message for message in feature.messages):
        assert min(ages) >= DELAY_MS, who


def shown_subscription(server: Process, topic: str) -> dict[str, Any]:
    """What REST shows of the subscription `s` of a topic."""
    with urllib.request.urlopen(f"{url_of(server, 'http')}/admin/v2/persistent/public/default/{topic}/stats") as answer:
        found: dict[str, Any] = json.load(answer)["subscriptions"]["s"]
    return found


def test_a_batch_that_the_sdk_acknowledged_in_part_ends_with_each_client(clients: Clients, server: Process) -> None:
    sent = [f"{number}" for number in range(20)]
    for name, client in clients.items():
        topic = f"in-part-{name}"
        clients["sdk"].run("produce", topic=topic, messages=[{"text": each} for each in sent], batching=True)
        begun = {"topic": topic, "subscription": "s", "type": "Shared"}
        clients["sdk"].run("consume", **begun, count=20, left=list(range(10, 20)))
        client.run("open", **begun)
        client.run("receive", texts=sent[10:])
        deadline = time.monotonic() + 20
        while (shown := shown_subscription(server, topic))["msgBacklog"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (name, shown["msgBacklog"]) == (name, 0)
        assert [each["availablePermits"] <= 1000 for each in shown["consumers"]] == [True], name


@pytest.mark.parametrize("by_index", [False, True], ids=["whole", "by_index"])
def test_each_client_gets_what_a_subscription_wants_and_its_backlog_ends(
    clients: Clients, server: Process, by_index: bool
) -> None:
    """Batches in which each fourth message is wanted, and batches in which none is."""
    rounds, wanted = 8, [number for number in range(20) if number % 4 == 3]
    for name, client in clients.items():
        topic = f"wanted-{name}-{by_index}".lower()
        at = f"{url_of(server, 'http')}/admin/v2/persistent/public/default/{topic}"
        asked = [(at, "{}"), (f"{at}/subscription/s", '"earliest"'), (f"{at}/subscription/s/filter?filter=vip", "")]
        for url, body in asked:
            request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"}, method="PUT")
            with urllib.request.urlopen(request) as answer:
                assert answer.status == 204
        for turn in range(rounds):
            for kinds in (wanted, []):
                clients["sdk"].run("produce", topic=topic, batching=True, messages=[
                    {"text": f"{turn}-{number}", "properties": {"vip": "true" if number in kinds else "false"}}
                    for number in range(20)
                ])  # fmt: skip
        client.run("open", topic=topic, subscription="s", type="Shared", **({"by_index": True} if by_index else {}))
        texts = [f"{turn}-{number}" for turn in range(rounds) for number in wanted]
        came = client.run("receive", texts=texts)["came"]
        if by_index or name == "sdk":
            assert came == texts, name
        else:
            assert set(texts) <= set(came), name
            assert len(came) == 20 * rounds, f"{name}: the batches in which nothing is wanted do not come"
        deadline = time.monotonic() + 20
        while (shown := shown_subscription(server, topic))["msgBacklog"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (name, shown["msgBacklog"], shown["filterProcessedMsgCount"]) == (name, 0, 40 * rounds)
        assert [each["availablePermits"] <= 1000 for each in shown["consumers"]] == [True], name


def test_what_is_encrypted_is_not_stored_in_clear(clients: Clients, by_name: dict[str, Feature]) -> None:
    feature = by_name["encryption"]
    for sender in clients.values():
        topic = f"clear-{sender.name}"
        sender.run("produce", topic=topic, messages=feature.messages, **feature.produce)
        answer = clients["sdk"].run(
            "consume", topic=topic, subscription="s", type="Exclusive", count=len(feature.messages), undecrypted=True
        )
        assert not {message["text"] for message in answer["messages"]} & {"secret", "other"}, sender.name


def test_each_client_reads_the_dead_letters_of_each_other(clients: Clients) -> None:
    sent = {"a", "b", "c"}
    messages = [{"text": text, "key": "k", "properties": {"from": text}} for text in sorted(sent)]
    all_at_once(clients, "produce", lambda of: {"topic": f"letters-{of}", "messages": messages})
    answers = all_at_once(clients, "dead_letter", lambda of: {
        "topic": f"letters-{of}", "subscription": "s", "type": "Shared", "letters": f"dead-{of}", "count": len(sent),
    })  # fmt: skip
    assert {name: set(answer["letters"]) for name, answer in answers.items()} == dict.fromkeys(clients, sent)
    for owner in clients:
        found = all_at_once(clients, "consume", lambda of, owner=owner: {
            "topic": f"dead-{owner}", "subscription": f"s-{of}", "type": "Exclusive", "count": len(sent),
        })  # fmt: skip
        for name, answer in found.items():
            assert {message["text"] for message in answer["messages"]} == sent, (name, owner)
            for message in answer["messages"]:
                assert message["properties"]["from"] == message["text"], (name, owner)


def test_each_client_runs_the_examples_of_its_documentation(clients: Clients) -> None:
    answers = all_at_once(clients, "examples", lambda of: {"topic": f"shown-{of}"})
    assert {name: answer["ran"] for name, answer in answers.items()} == dict.fromkeys(clients, SHOWN)


def test_gos_admin_client_makes_what_it_then_sees(clients: Clients, server: Process) -> None:
    if "go" not in clients:
        pytest.skip("Go's client is not here")
    [line] = [each for each in server.lines if each.startswith("ready ")]
    [url] = [word.removeprefix("http=") for word in line.split() if word.startswith("http=")]
    answer = clients["go"].run("administer", url=url)
    policies, seen = {"ttl_s": 3600, "retention_minutes": 10}, {"stored": True, "with_stats": 2}
    assert answer == {**policies, **seen, "partitions": 2, "topics": 2}


def test_each_client_goes_on_after_the_broker_was_killed(start: Callable[[Process], Clients], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("server", "standalone", "--port", "0", "--data", "data")
        clients, port = start(server), url_of(server).rpartition(":")[2]
        all_at_once(clients, "open", lambda of: {"topic": f"kept-{of}", "subscription": "s", "type": "Failover"})
        before, after = [[f"{number}" for number in range(first, first + 20)] for first in (0, 20)]
        all_at_once(clients, "send", lambda of: {"texts": before})
        all_at_once(clients, "receive", lambda of: {"texts": before[:10]})
        server.kill()
        server.arguments += ["--pulsar-port", port]
        for each in clients.values():
            each.ask("send", texts=after)
        server.start()
        for each in clients.values():
            each.answer()
        all_at_once(clients, "receive", lambda of: {"texts": before[10:] + after})
