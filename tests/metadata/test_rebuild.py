"""All metadata of a loaded cluster is lost, and made again from its bookies: what was acknowledged is back, once."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import magnetar
from magnetar.admin import Admin
from magnetar.cli.common.processes import Process, Processes, find_free_port
from magnetar.proto.policies import Policies
from tests.support.processes import run_cli
from tests.support.secured import SecuredCluster

pytestmark = pytest.mark.processes

PARTITIONED, PLAIN, OTHER = "orders", "bills", "persistent://public/other/logs"

SETTINGS = """
[broker]
roll_entries = 40
cursor_flush_s = 0.1
trim_interval_s = 1.0
unsubscribed_minutes = 0
unsubscribed_mib = 0
"""
"""Short ledgers, and a broker that deletes at once what no policy keeps."""


class LostCluster(Processes):
    """Four bookies and two brokers, whose ledgers are short; their metadata can be lost."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.settings = directory / "settings.toml"
        self.settings.write_text(SETTINGS)
        self.ports = [find_free_port("127.0.0.1") for _ in range(5)]
        self.generation = 0
        self.bookies: list[Process] = []
        self.brokers: list[Process] = []

    @property
    def where(self) -> tuple[str, str]:
        return "--metadata", f"127.0.0.1:{self.ports[0]}"

    def folder(self, number: int) -> Path:
        return self.directory / f"bookie-{number}"

    def start_metadata(self) -> None:
        self.generation += 1
        listen = ("--listen", f"127.0.0.1:{self.ports[0]}", "--data", str(self.directory / "metadata"))
        self.metadata = self.start(f"metadata-{self.generation}", "metadata", *listen)
        self.metadata.wait_ready()

    def start_bookie(self, number: int) -> Process:
        listen = ("--listen", f"127.0.0.1:{self.ports[1 + number]}", "--data", str(self.folder(number)))
        return self.start(f"bookie-{number}-{self.generation}", "bookie", *listen, *self.where)

    def start_others(self) -> None:
        self.bookies = [self.start_bookie(number) for number in range(4)]
        for each in self.bookies:
            each.wait_ready()
        self.brokers = [
            self.start(f"broker-{number}-{self.generation}", "broker", "--listen", "127.0.0.1:0", *self.where,
                       "--config", str(self.settings))
            for number in range(2)
        ]  # fmt: skip
        for each in self.brokers:
            each.wait_ready()

    @property
    def url(self) -> str:
        return "magnetar://" + ",".join(each.address for each in self.brokers)

    def lose_metadata(self) -> None:
        for each in (*self.brokers, *self.bookies, self.metadata):
            each.kill()
        shutil.rmtree(self.directory / "metadata")


def send_next(producer: magnetar.Producer, topic: str, sent: list[bytes]) -> None:
    payload = b"%s-%d" % (topic.rpartition("/")[2].encode(), len(sent))
    producer.send(payload, partition_key=str(len(sent) % 7))
    sent.append(payload)


def load(cluster: LostCluster) -> dict[str, list[bytes]]:
    """Publishes to all topics, with a change of an ensemble in between, and transactions. Returns what was acknowledged
    and committed, in order."""
    sent: dict[str, list[bytes]] = {PARTITIONED: [], PLAIN: [], OTHER: []}
    with magnetar.Client(cluster.url) as client, Admin(cluster.url) as admin:
        admin.create_topic(PARTITIONED, partitions=3)
        admin.create_namespace("public/other")
        for namespace in ("public/default", "public/other"):
            admin.set_namespace_policies(namespace, Policies(retention_minutes=-1, retention_mib=-1,
                                                             unsubscribed_minutes=-1, unsubscribed_mib=-1))  # fmt: skip
        producers = {topic: client.create_producer(topic) for topic in sent}
        half = client.subscribe(PLAIN, "half", initial_position=magnetar.InitialPosition.Earliest)

        def publish(count: int) -> None:
            for _ in range(count):
                for topic, producer in producers.items():
                    send_next(producer, topic, sent[topic])

        publish(50)
        cluster.bookies[1].kill()  # ensembles change
        publish(30)
        cluster.bookies[1] = cluster.start_bookie(1)
        cluster.bookies[1].wait_ready()
        publish(20)
        with client.transaction() as txn:
            for number in range(5):
                producers[PLAIN].send(b"committed-%d" % number, txn=txn)
                sent[PLAIN].append(b"committed-%d" % number)
        aborted = client.transaction()
        producers[PLAIN].send(b"aborted", txn=aborted)
        aborted.abort()
        publish(10)
        for number in range(60):
            message = half.receive(timeout_millis=20_000)
            assert message.data() == sent[PLAIN][number]
            half.acknowledge(message)
        half.close()
    return sent


def read_all(client: magnetar.Client, topic: str, subscription: str, count: int) -> list[bytes]:
    consumer = client.subscribe(topic, subscription, initial_position=magnetar.InitialPosition.Earliest)
    found = []
    for _ in range(count):
        message = consumer.receive(timeout_millis=30_000)
        consumer.acknowledge(message)
        found.append(message.data())
    with pytest.raises(magnetar.Timeout):
        consumer.receive(timeout_millis=500)
    consumer.close()
    return found


def rebuild(cluster: LostCluster, *sources: Path, options: Sequence[str] = ()) -> dict[str, object]:
    done = run_cli("metadata", "rebuild", *map(str, sources), *cluster.where, "-o", "json", *options)
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def check_all(cluster: LostCluster, sent: dict[str, list[bytes]], subscription: str) -> None:
    with magnetar.Client(cluster.url) as client:
        for topic in (PLAIN, OTHER):
            assert read_all(client, topic, subscription, len(sent[topic])) == sent[topic]
        found = read_all(client, PARTITIONED, subscription, len(sent[PARTITIONED]))
        assert sorted(found) == sorted(sent[PARTITIONED])
        for key in range(7):
            own = [each for each in sent[PARTITIONED] if int(each.split(b"-")[1]) % 7 == key]
            assert [each for each in found if each in own] == own, "in the order of its key"


def test_all_metadata_of_a_loaded_cluster_is_lost_and_every_acknowledged_message_is_back_once(tmp_path: Path) -> None:
    with LostCluster(tmp_path) as cluster:
        cluster.start_metadata()
        cluster.start_others()
        sent = load(cluster)
        cluster.lose_metadata()

        cluster.start_metadata()
        folders = [cluster.folder(number) for number in range(4)]
        saved = tmp_path / "bookie-3.holdings"
        made = run_cli("metadata", "rebuild", str(folders[3]), "--save", str(saved))
        assert made.code == 0, made.err
        assert saved.stat().st_mode & 0o777 == 0o600, "the keys of ledgers are in it"
        refused = run_cli("metadata", "rebuild", *map(str, folders[:3]), *cluster.where)
        assert refused.code == 1
        assert "were not read" in refused.err
        shown = rebuild(cluster, *folders[:3], saved, options=("--dry-run",))
        found = rebuild(cluster, *folders[:3], saved)
        assert {**shown, "dryRun": False} == found
        topics = found["topics"]
        assert isinstance(topics, dict)
        parts = [f"persistent://public/default/orders-partition-{number}" for number in range(3)]
        bills = "persistent://public/default/bills"
        assert sorted(topics) == [bills, *parts, OTHER]
        assert topics[bills] >= 3, "of several ledgers"
        assert not found["silent"]
        again = run_cli("metadata", "rebuild", *map(str, folders), *cluster.where)
        assert again.code == 1
        assert "not empty" in again.err

        cluster.start_others()
        running = run_cli("metadata", "rebuild", str(folders[0]), *cluster.where)
        assert running.code == 5, "the directory is used by a bookie"
        with Admin(cluster.url) as admin:
            for topic in topics:
                admin.trim_topic(topic)
        check_all(cluster, sent, "all")
        with magnetar.Client(cluster.url) as client:
            rest = read_all(client, PLAIN, "half", len(sent[PLAIN]) - 60)
            assert rest == sent[PLAIN][60:], "the subscription goes on where it was"
            for topic, own in sent.items():
                producer = client.create_producer(topic)
                for _ in range(30):
                    send_next(producer, topic, own)
            with client.transaction() as txn:
                producer = client.create_producer(PLAIN)
                producer.send(b"later", txn=txn)
                sent[PLAIN].append(b"later")
        listed = json.loads(run_cli("bookies", "list", "--url", cluster.url, "-o", "json").out)
        assert [each["state"] for each in listed] == ["writable"] * 4, "none is in limbo"

        cluster.lose_metadata()  # once more: of what the rebuilt cluster wrote too
        cluster.start_metadata()
        rebuild(cluster, *folders)
        cluster.start_others()
        with magnetar.Client(cluster.url) as client:
            for topic in (PLAIN, OTHER):
                assert read_all(client, topic, "again", len(sent[topic])) == sent[topic]
            assert sorted(read_all(client, PARTITIONED, "again", len(sent[PARTITIONED]))) == sorted(sent[PARTITIONED])


def test_with_a_bookie_lost_too_each_message_of_which_another_has_a_copy_is_back(tmp_path: Path) -> None:
    with LostCluster(tmp_path) as cluster:
        cluster.start_metadata()
        cluster.start_others()
        sent = load(cluster)
        cluster.lose_metadata()
        shutil.rmtree(cluster.folder(2))
        cluster.start_metadata()
        folders = [cluster.folder(number) for number in (0, 1, 3)]
        refused = run_cli("metadata", "rebuild", *map(str, folders), *cluster.where)
        assert refused.code == 1
        silent = json.loads(run_cli("metadata", "rebuild", *map(str, folders), "-o", "json", "--dry-run").out)["silent"]
        (gone,) = silent
        assert gone in refused.err
        rebuild(cluster, *folders, options=("--without", gone))
        cluster.start_others()
        check_all(cluster, sent, "all")


def test_an_operator_rebuilds_a_secured_cluster(tmp_path: Path) -> None:
    """Its bookies know an operator by the metadata alone: their directories are read, and no bookie is asked."""
    with SecuredCluster(tmp_path) as secured:
        with secured.client() as client:
            producer = client.create_producer(PLAIN)
            sent = [b"%d" % number for number in range(50)]
            for payload in sent:
                producer.send(payload)
        for each in (*secured.brokers, *secured.bookies, secured.metadata):
            each.kill()
        shutil.rmtree(tmp_path / "metadata")
        listen = ("--listen", "127.0.0.1:0")
        secured.metadata = secured.start("again", "metadata", *listen, "--data", str(tmp_path / "metadata"))
        where = ("--metadata", secured.metadata.address)
        folders = [str(tmp_path / f"bookie-{number}") for number in range(3)]
        done = secured.cli("metadata", "rebuild", *folders)
        assert done.code == 0, done.err
        secured.bookies = [
            secured.start(f"bookie-again-{number}", "bookie", *listen, *where, "--data", folder)
            for number, folder in enumerate(folders)
        ]
        for each in secured.bookies:
            each.wait_ready()
        secured.brokers = [secured.start("broker-again", "broker", *listen, *where)]
        secured.brokers[0].wait_ready()
        with secured.client() as client:
            assert read_all(client, PLAIN, "s", len(sent)) == sent
