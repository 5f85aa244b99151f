"""`kill -9` at each step of a drain, of the broker that drains, of one that gets its bundles, or of the metadata: what
was acknowledged is there once and in its producer's order, a transaction counts whole or not at all, all is served
again by the broker that is left, and no mark of a drain stays but the operator's order. A drain goes on when the
metadata is back."""

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

RELEASED = "the rest is released"
TAKEN = "the next owner has taken it"  # also a coordinator without an owner, before any drain
ONCE = ("it is registered as draining", RELEASED)
METADATA_DIES = (("a topic takes nothing any more", False, 3.0), ("the next owner is named", True, 1.0))
"""The step, whether an operator orders the drain, and for how long the metadata is away: what each run tries."""

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

    def start_victim(self, step: str, number: int, *, dies: int = 0) -> None:
        """`dies`: the pid of the process that dies at the step; 0: the victim itself."""
        stepped = (step, str(number), str(dies))
        if self.victim is None:
            self.victim = self.start("victim", *stepped)
        else:
            self.victim.arguments[:3] = stepped
            self.victim.start()
        self.victim.wait_ready(PATIENCE_S)

    @property
    def url(self) -> str:
        assert self.victim is not None
        return f"magnetar://{self.stays.address},{self.victim.address}"

    def brokers(self) -> dict[str, Any]:
        return {each.name: each for each in self.admin.brokers()}

    def create_topics(self, tag: str) -> None:
        for kind in (*KINDS, "a", "b"):
            self.admin.create_topic(f"{tag}-{kind}")
            self.admin.set_topic_policies(f"{tag}-{kind}", Policies(deduplication=True))

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
        self.tag = tag
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


    def begin_transaction(self) -> magnetar.Transaction:
        """Returns a transaction with a message of each of two topics."""
        halves = [self.client.create_producer(f"{self.tag}-{each}") for each in ("a", "b")]
        txn = self.client.transaction(60)
        for half in halves:
            half.send(b"half", txn=txn)
        return txn

    def check_stored(self, url: str, txn: magnetar.Transaction) -> None:
        with magnetar.Client(url) as client:
            one, other = (read_all(client, f"{self.tag}-{each}") for each in ("a", "b"))
            assert one == other
            assert one in {"COMMITTED": ([b"half"],), "ABORTED": ([],)}.get(txn.state.name, ([], [b"half"]))
            for topic in self.topics:
                found = [int(each) for each in read_all(client, topic)]
                assert found == self.acknowledged[topic], "each once, in order"


def read_all(client: magnetar.Client, topic: str) -> list[bytes]:
    reader, found = client.create_reader(topic, magnetar.MessageId.earliest), list[bytes]()
    while reader.has_message_available():
        found.append(reader.read_next(timeout_millis=30_000).data())
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each third step, and two at which the metadata dies; with `--walks 2` or more every one."""
    every = metafunc.config.getoption("--walks") > 1
    if "away_s" in metafunc.fixturenames:
        rows = [
            (step, ordered, away_s)
            for number, (step, of) in enumerate(STEPS.items())
            for ordered, away_s in ((False, 1.0 + number % 2 * 2), (True, 3.0 - number % 2 * 2))
            if step != TAKEN and (of.drains or ordered) and not (ordered and step == RELEASED)
        ]
        rows = rows if every else [each for each in rows if each in METADATA_DIES]
        ids = [f"{step}-{'ordered' if ordered else 'stopped'}" for step, ordered, _ in rows]
        metafunc.parametrize(("step", "ordered", "away_s"), rows, ids=ids)
    elif "step" in metafunc.fixturenames:
        steps = [(step, bool(number % 2)) for number, step in enumerate(STEPS)]
        steps = steps if every else steps[::3]
        metafunc.parametrize(("step", "ordered"), steps, ids=[step for step, _ in steps])


def test_a_broker_that_dies_at_a_step_of_a_drain_loses_nothing_and_leaves_nothing_behind(
    step: str, ordered: bool, pair: Pair
) -> None:
    """`ordered`: by an operator; else SIGTERM drains."""
    tag, drains = f"t{list(STEPS).index(step)}", STEPS[step].drains
    ordered = ordered and step != RELEASED
    pair.start_victim(step, 1 if step in ONCE or not drains else 2)
    victim = pair.victim
    assert victim is not None
    pair.create_topics(tag)
    if drains:
        pair.drain("stays")  # all that there is goes to the victim
    programs = Programs(pair.url, tag)
    try:
        programs.wait_more()
        txn = programs.begin_transaction()
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
    programs.check_stored(f"magnetar://{pair.stays.address}", txn)


def test_metadata_that_dies_at_a_step_of_a_drain_loses_nothing_and_the_drain_goes_on(
    step: str, ordered: bool, away_s: float, pair: Pair
) -> None:
    """`away_s`: it is started again after so long, less than a session takes or more."""
    tag, drains = f"m{list(STEPS).index(step)}{ordered:d}", STEPS[step].drains
    metadata, number = pair.cluster.metadata, 1 if step in ONCE or not drains else 2
    if drains:
        pair.start_victim(step, number, dies=metadata.pid)
    pair.create_topics(tag)
    if drains:
        pair.drain("stays")
    programs = Programs(pair.url if drains else f"magnetar://{pair.stays.address}", tag)
    try:
        programs.wait_more()
        txn = programs.begin_transaction()
        if not drains:  # what it opens is what it is given
            pair.start_victim(step, number, dies=metadata.pid)
        victim, drained = pair.victim, "victim" if drains else "stays"
        assert victim is not None
        if ordered:
            pair.admin.drain_broker(drained)
        else:
            victim.send_signal(signal.SIGTERM)
        assert metadata.wait(PATIENCE_S) == -signal.SIGKILL
        time.sleep(away_s)
        metadata.start()
        metadata.wait_ready(PATIENCE_S)
        with contextlib.suppress(magnetar.PulsarException):
            txn.commit()
        if ordered:
            wait_for("it is drained", lambda: (found := pair.brokers().get(drained)) and not found.bundles)
        else:
            assert victim.wait(PATIENCE_S) == 0
            assert "did not stop within" not in victim.output()
        programs.wait_more()
        if ordered:
            pair.undrain(drained)
    finally:
        programs.close()
    programs.check()
    if ordered:  # both serve
        pair.drain("stays" if drains else "victim")
        victim.stop()
    assert {pair.admin.owner(topic) for topic in programs.topics} == {pair.stays.address}
    programs.check_stored(f"magnetar://{pair.stays.address}", txn)


def test_a_drain_that_takes_its_whole_time_releases_the_rest(pair: Pair) -> None:
    """The drain has longer than a part of a process has for its end, and gives nothing away."""
    slow = pair.start(
        "slow", "it is registered as draining", "0", "0", session_s=600.0, settings="drain_timeout_s = 11.0\n"
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

