"""`kill -9` of a broker at each step of a drain, its own or that of a broker which gives it bundles: what was
acknowledged is there once and in its producer's order, a transaction counts whole or not at all, everything is served
again by the broker that is left, and no mark of a drain stays but the operator's order."""

import contextlib
import operator
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.admin import Admin
from magnetar.cli.common.processes import Cluster, Process
from magnetar.proto.policies import Policies
from tests.chaos.processes.stepped import STEPS
from tests.layout import ROOT

SESSION_S = 2.0
PATIENCE_S = 120.0
"""Of a busy machine; what is waited for takes a session and some seconds."""
MORE = 5
"""Messages of each topic, sent and taken, before the kill and after it."""
KEYS = 3
CONFIG = "[broker]\nensemble_size = 1\nwrite_quorum = 1\nack_quorum = 1\ncursor_flush_s = 0.1\n"
KINDS = {
    "exclusive": magnetar.ConsumerType.Exclusive, "shared": magnetar.ConsumerType.Shared,
    "failover": magnetar.ConsumerType.Failover, "keys": magnetar.ConsumerType.KeyShared,
}  # fmt: skip

ONCE = ("it is registered as draining", "the rest is released")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


class Stepped(Process):
    module = "tests.chaos.processes.stepped"


def wait_for(what: str, is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.05)


class Pair:
    """A cluster with a broker that stays, and one, `victim`, that is started anew for each step."""

    def __init__(self, directory: Path) -> None:
        self.cluster = Cluster(directory, bookies=1, brokers=0)
        try:
            self.stays = self.start("stays")
            self.stays.wait_ready(PATIENCE_S)
        except BaseException:
            self.cluster.close()
            raise
        self.admin = Admin(f"magnetar://{self.stays.address}")
        self.victim: Process | None = None

    def start(self, name: str, *step: str, session_s: float = SESSION_S, settings: str = "") -> Process:
        config = self.cluster.directory / f"{name}.toml"
        config.write_text(f'{CONFIG}name = "{name}"\n{settings}')
        arguments = [
            *step, "broker", "--listen", "127.0.0.1:0", "--metadata", self.cluster.metadata.address,
            "--session-timeout", str(session_s), "--config", str(config),
        ]  # fmt: skip
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = (Stepped if step else Process)(name, arguments, self.cluster.directory, {"PYTHONPATH": path})
        self.cluster.started.append(process)
        return process

    def start_victim(self, step: str, number: int) -> None:
        if self.victim is None:
            self.victim = self.start("victim", step, str(number))
        else:
            self.victim.arguments[:2] = step, str(number)
            self.victim.start()
        self.victim.wait_ready(PATIENCE_S)

    @property
    def url(self) -> str:
        assert self.victim is not None
        return f"magnetar://{self.stays.address},{self.victim.address}"

    def brokers(self) -> dict[str, Any]:
        return {each.name: each for each in self.admin.brokers()}

    def drain(self, name: str) -> None:
        self.admin.drain_broker(name)
        wait_for(f"{name} owns nothing", lambda: (found := self.brokers()[name]).draining and not found.bundles)
        self.undrain(name)

    def undrain(self, name: str) -> None:
        self.admin.undrain_broker(name)
        wait_for(f"{name} drains no more", lambda: not self.brokers()[name].draining)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    running = Pair(tmp_path_factory.mktemp("pair"))
    try:
        yield running
    finally:
        running.admin.close()
        running.cluster.close()


class Programs:
    """For each kind of subscription a topic with a producer and a consumer; each is a thread. What was acknowledged,
    and what was taken, by topic, in order."""

    def __init__(self, url: str, tag: str) -> None:
        self.topics = {f"{tag}-{kind}": type_ for kind, type_ in KINDS.items()}
        self.acknowledged, self.taken = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        self.client, self.failures = magnetar.Client(url), list[str]()
        self._sending, self._taking = threading.Event(), threading.Event()
        self._producers = [threading.Thread(target=self._produce, args=(topic,)) for topic in self.topics]
        self._consumers = [threading.Thread(target=self._consume, args=each) for each in self.topics.items()]
        for thread in (*self._consumers, *self._producers):
            thread.start()

    def close(self) -> None:
        self._sending.set()
        for thread in self._producers:
            thread.join()
        with contextlib.suppress(AssertionError):  # the caller looks at what is missing
            wait_for("all is taken", lambda: all(set(self.acknowledged[t]) <= set(self.taken[t]) for t in self.topics))
        self._taking.set()
        for thread in self._consumers:
            thread.join()
        self.client.close()

    def wait_more(self) -> None:
        """Until each topic has taken and given MORE."""
        logs = [log[topic] for log in (self.acknowledged, self.taken) for topic in self.topics]
        goals = [len(each) + MORE for each in logs]
        wait_for("each topic goes on", lambda: all(map(operator.ge, map(len, logs), goals)))

    def _produce(self, topic: str) -> None:
        producer, number = self.client.create_producer(topic, f"p-{topic}"), 0
        while not self._sending.wait(0.05):
            try:
                producer.send(str(number).encode(), partition_key=str(number % KEYS), sequence_id=number)
            except magnetar.PulsarException as error:
                self.failures.append(f"{topic} {number}: {error!r}")
                continue
            self.acknowledged[topic].append(number)
            number += 1

    def _consume(self, topic: str, type_: Any) -> None:
        consumer = self.client.subscribe(
            topic, "s", consumer_type=type_, initial_position=magnetar.InitialPosition.Earliest
        )
        while not self._taking.is_set():
            with contextlib.suppress(magnetar.Timeout):
                message = consumer.receive(timeout_millis=200)
                self.taken[topic].append(int(message.data()))
                consumer.acknowledge(message)

    def check(self) -> None:
        assert self.failures == []
        for topic, sent in self.acknowledged.items():
            first = list(dict.fromkeys(self.taken[topic]))
            assert sorted(first) == sent, f"{topic}: each is taken"
            if self.topics[topic] in (magnetar.ConsumerType.Exclusive, magnetar.ConsumerType.Failover):
                assert first == sent, f"{topic}: in order"
            if self.topics[topic] is magnetar.ConsumerType.KeyShared:
                assert sorted(first, key=lambda each: each % KEYS) == sorted(sent, key=lambda each: each % KEYS), topic


def read_all(client: magnetar.Client, topic: str) -> list[bytes]:
    reader, found = client.create_reader(topic, magnetar.MessageId.earliest), list[bytes]()
    while reader.has_message_available():
        found.append(reader.read_next(timeout_millis=30_000).data())
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each third step; with `--walks 2` or more every one."""
    if "step" in metafunc.fixturenames:
        rows = [(step, bool(number % 2)) for number, step in enumerate(STEPS)]
        rows = rows if metafunc.config.getoption("--walks") > 1 else rows[::3]
        metafunc.parametrize(("step", "ordered"), rows, ids=[step for step, _ in rows])


def test_a_broker_that_dies_at_a_step_of_a_drain_loses_nothing_and_leaves_nothing_behind(
    step: str, ordered: bool, pair: Pair
) -> None:
    """`ordered`: by an operator; else SIGTERM drains."""
    tag, drains = f"t{list(STEPS).index(step)}", STEPS[step].drains
    ordered = ordered and step != "the rest is released"
    pair.start_victim(step, 1 if step in ONCE or not drains else 2)
    victim = pair.victim
    assert victim is not None
    for kind in (*KINDS, "a", "b"):
        pair.admin.create_topic(f"{tag}-{kind}")
        pair.admin.set_topic_policies(f"{tag}-{kind}", Policies(deduplication=True))
    if drains:
        pair.drain("stays")  # all that there is goes to the victim
    programs = Programs(pair.url, tag)
    try:
        programs.wait_more()
        client = programs.client
        halves = [client.create_producer(f"{tag}-{each}") for each in ("a", "b")]
        txn = client.transaction(60)
        for half in halves:
            half.send(b"half", txn=txn)
        if not drains:
            pair.admin.drain_broker("stays")
        elif ordered:
            pair.admin.drain_broker("victim")
        else:
            victim.send_signal(signal.SIGTERM)
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL
        assert f"dies: {step}" in victim.output()
        with contextlib.suppress(magnetar.PulsarException):
            txn.commit()
        wait_for("its session ends", lambda: "victim" not in pair.brokers())
        programs.wait_more()
        if not drains:
            pair.undrain("stays")
    finally:
        programs.close()
    programs.check()
    assert {pair.admin.owner(topic) for topic in programs.topics} == {pair.stays.address}
    assert not pair.brokers()["stays"].draining
    if ordered and drains:
        pair.start_victim(step, 1000)
        assert pair.brokers()["victim"].draining, "the order stands until it is taken back"
        pair.undrain("victim")
        victim.kill()
    with magnetar.Client(f"magnetar://{pair.stays.address}") as client:
        one, other = (read_all(client, f"{tag}-{each}") for each in ("a", "b"))
        assert one == other
        assert one in {"COMMITTED": ([b"half"],), "ABORTED": ([],)}.get(txn.state.name, ([], [b"half"]))
        for topic in programs.topics:
            found = [int(each) for each in read_all(client, topic)]
            assert found == programs.acknowledged[topic], "each once, in order"


def test_a_drain_that_takes_its_whole_time_releases_the_rest(pair: Pair) -> None:
    """The drain has longer than a part of a process has for its end, and gives nothing away."""
    slow = pair.start(
        "slow", "it is registered as draining", "0", session_s=600.0, settings="drain_timeout_s = 11.0\n"
    )
    slow.wait_ready(PATIENCE_S)
    with magnetar.Client(f"magnetar://{slow.address},{pair.stays.address}") as client:
        producer = client.create_producer("released")
        producer.send(b"1")
        pair.drain("stays")
        assert pair.admin.owner("released").endswith(slow.address)
        slow.send_signal(signal.SIGTERM)
        assert slow.wait(PATIENCE_S) == 0
        assert "the rest is released" in slow.output()
        assert "did not stop" not in slow.output()
        producer.send(b"2")
        assert read_all(client, "released") == [b"1", b"2"], "its session has 600 s"
