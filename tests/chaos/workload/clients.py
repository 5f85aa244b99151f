"""Producers, consumers and an auditor that write down all they see (tests/chaos/workload/history.py), whatever breaks.

For each topic: two producers with keys; an exclusive subscription and a shared one of two consumers that refuses some
messages; consumers are closed and opened again now and then. In a secured cluster one more producer and subscription
have a role of their own, which loses its rights and gets them again. With `keyed` there is one more subscription, of
two consumers of the SDK that share keys, refuse some messages, and get nothing more of a key before what they refused
(`redelivery_order="key"`); then a batch has one key. With `filtered` there is one more, of two consumers of the SDK,
whose filter wants a message of EVERY; the SDK's producers summarize it, and sealed ledgers get key indexes. Half of the
producers and consumers are those of Pulsar's own clients (libraries.py), by turns; what is read at the end the SDK
reads. On the shared subscription they acknowledge single messages of a batch, as the SDK does: else they never
acknowledge the rest of a batch after another consumer acknowledged a part (docs/pulsar.md). `wait_served` waits until
each producer and each subscription has gone on. At the end `settle` waits until everything has an outcome, reads each
topic from its beginning, lets every subscription catch up, and looks whether what was acknowledged and is durable by
then is given to new consumers.

The load is small, about a hundred messages a second: each is nine records of history, all of which stay in memory until
they are judged. Half an hour is 1.5 million records in less than a gigabyte; equal texts are kept once.
"""

import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import magnetar
from magnetar.proto.policies import Policies
from tests.chaos.processes.security import LOAD, VISITOR, Security
from tests.chaos.waiting import STUCK_S, wait_until
from tests.chaos.workload import history
from tests.chaos.workload.judge import Verdict, judge
from tests.chaos.workload.libraries import ENDED, ERRORS, OK, QUEUE_IS_FULL, TIMEOUTS, JavaClient, Reconnects, types_of

BURST = 6
PAUSE_S = 0.2
UNEVEN, TURN_S, QUIETER = 4, 45.0, 6
KEYS = 7
NACKED = 0.02
REOPENED_AFTER = 400
"""Messages that a consumer takes before it is opened again."""
DURABLE_S = 4.0
"""cursor_flush_s and the client's grouping, with room."""
SUBSCRIPTIONS = (("exclusive", history.Order.ALL, 1), ("shared", history.Order.NONE, 2))
KEYED = ("keyed", history.Order.HELD, 2)
FILTERED = ("filtered", history.Order.NONE, 2)
EVERY = 5
NAMESPACES = 8
"""Made at the end; each has bundles that no broker has, and of a group each broker gets about a half of them."""


def id_of(message_id: Any) -> history.Id:
    """Pulsar's clients say -1 of a message that is alone in its entry."""
    return message_id.ledger_id(), message_id.entry_id(), max(0, message_id.batch_index())


def read_to_end(client: Any, topic: str, note: history.Recorder) -> tuple[Any, set[history.Id]]:
    """Notes all that the topic has; the reader, which is at its end, and the ids."""
    reader, found = client.create_reader(topic, magnetar.MessageId.earliest, receiver_queue_size=10_000), set()
    while reader.has_message_available():
        message = reader.read_next(timeout_millis=30_000)
        id_ = id_of(message.message_id())
        note(history.Read(topic, id_, sys.intern(message.data().decode())))
        found.add(id_)
    note(history.ReadToEnd(topic))
    return reader, found


class Clients:
    def __init__(
        self, url: str, topics: tuple[str, ...], rng: random.Random, security: Security | None = None,
        others: Sequence[Callable[[Callable[[], None]], Any]] = (), keyed: bool = False, filtered: bool = False,
        uneven: bool = False,
    ) -> None:  # fmt: skip
        """`others` make clients of other libraries; each gets what to call when it has lost a connection. `keyed`,
        `filtered`: with the subscription of that name. `uneven`: not all topics have as much at the same time."""
        self.url, self.topics, self.rng, self._uneven = url, topics, rng, uneven
        self.note = history.Recorder()
        self.failures: list[str] = []
        self.acked: dict[tuple[str, str], set[history.Id]] = {}
        self.served: dict[str, int] = {}
        """By producer, what was acknowledged; by topic and subscription, what was taken."""
        self._reconnects = Reconnects("the consumer reconnects", self._lose_connection)
        logging.getLogger("magnetar.client").setLevel(logging.INFO)
        logging.getLogger("magnetar.client").addHandler(self._reconnects)
        self._security = security
        self._client = self._visitor = self._new_client(LOAD)
        self._keyed = keyed
        self._filtered = filtered
        self._subscriptions = (*SUBSCRIPTIONS, *[KEYED] * keyed, *[FILTERED] * filtered)
        self._producer_names = ("0", "1")
        if security is not None:
            for role in (LOAD, VISITOR):
                security.grant(url, role)
            self._visitor = self._new_client(VISITOR)
            self._subscriptions += ((VISITOR, history.Order.NONE, 1),)
            self._producer_names += (VISITOR,)
        self._others = [make(self._lose_connection) for make in others]
        self._sending, self._receiving = threading.Event(), threading.Event()
        self._producers: list[threading.Thread] = []
        self._consumers: list[threading.Thread] = []

    def disturbed(self) -> None:
        self.note(history.Disturbed())

    def _lose_connection(self) -> None:
        self.note(history.Disturbed(noticed=True))

    @property
    def kept(self) -> list[history.Record]:
        return self.note.records

    def verdict(self) -> Verdict:
        return judge(self.note.records)

    def figures(self, verdict: Verdict) -> dict[str, int]:
        """Of a run's last line."""
        return {
            "repeated": verdict.repeated, "delivered": verdict.delivered, "records": len(self.note.records)
        }

    @staticmethod
    def proves_nothing(_: Verdict) -> list[str]:
        return []

    def _library(self, topic: str, *, other: bool) -> Any:
        """The client of a producer or consumer."""
        return self._others[self.topics.index(topic) % len(self._others)] if other and self._others else self._client

    def _new_client(self, role: str) -> Any:
        return magnetar.Client(self.url) if self._security is None else self._security.client(self.url, role)

    def start(self) -> None:
        if self._filtered:
            with magnetar.admin.Admin(self.url) as admin:
                for namespace in sorted({each.rpartition("/")[0] or "public/default" for each in self.topics}):
                    admin.set_namespace_policies(namespace, Policies(key_index="keys+properties"))
        for topic in self.topics:
            self._subscribe(topic, "audit", history.Order.NONE).close()  # it never looks, so that nothing is trimmed
            for name, order, consumers in self._subscriptions:
                self.acked[topic, name], self.served[f"{topic} {name}"] = set(), 0
                self._subscribe(topic, name, order).close()
                self.note(history.Subscribed(topic, name, order, EVERY if name == FILTERED[0] else 1))
                for number in range(consumers):
                    self._consumers.append(self._thread(self._consume, topic, name, order, f"{name}-{number}"))
            for producer in (f"{topic}-{each}" for each in self._producer_names):
                self.served[producer] = 0
                self._producers.append(self._thread(self._produce, topic, producer))
        for thread in (*self._consumers, *self._producers):
            thread.start()

    def close(self) -> None:
        self._sending.set()
        self._receiving.set()
        for thread in (*self._producers, *self._consumers):
            if thread.is_alive():
                thread.join(STUCK_S)
        self._client.close()
        for each in self._others:
            each.close()
        if self._visitor is not self._client:
            self._visitor.close()
        logging.getLogger("magnetar.client").removeHandler(self._reconnects)

    @property
    def pids(self) -> set[int]:
        """Of processes beside this one that clients are in."""
        return {each.process.pid for each in self._others if isinstance(each, JavaClient)}

    @property
    def acknowledged(self) -> int:
        """Of all producers."""
        return sum(count for name, count in self.served.items() if " " not in name)

    def wait_served(self, more: int) -> list[str]:
        """Until each producer and each subscription has had so many messages more; those that have not."""
        goal = {name: count + more for name, count in self.served.items()}
        return wait_until(
            lambda: [f"{name} has made no progress" for name, count in self.served.items() if count < goal[name]]
        )

    # ---------------------------------------------------------------------------------------- the end
    def settle(self) -> list[str]:
        """What is stuck. Afterwards the history is whole."""
        self._sending.set()
        stuck = wait_until(lambda: [f"{each.name} has no outcome" for each in self._producers if each.is_alive()])
        try:
            logs = {topic: self._read(topic) for topic in self.topics}
        except magnetar.PulsarException as error:
            return [*stuck, f"the log cannot be read: {error!r}"]
        stuck += wait_until(lambda: self._behind(logs), look_s=0.5)
        time.sleep(DURABLE_S)
        self._receiving.set()
        for thread in self._consumers:
            thread.join(STUCK_S)
        for (topic, name), ids in sorted(self.acked.items()):
            for id_ in sorted(ids):
                self.note(history.Acked(topic, name, id_, True))
        looks = [(topic, name, order) for topic in self.topics for name, order, _ in self._subscriptions]
        with ThreadPoolExecutor(len(looks)) as threads:  # each waits until nothing more comes
            list(threads.map(lambda look: self._look_again(*look), looks))
        return stuck if self._security is not None else stuck + self._shared_out()

    def _shared_out(self) -> list[str]:
        """Of new namespaces the first broker is asked alone: each broker of the group has some, and serves them."""
        owners: dict[str, str] = {}  # of a topic of each
        with magnetar.admin.Admin(self.url.partition(",")[0]) as admin:
            for namespace in (f"public/shared-{number}" for number in range(NAMESPACES)):
                admin.create_namespace(namespace)
                for topic in (f"{namespace}/{number}" for number in range(4)):
                    owners.setdefault(admin.owner(topic), topic)
        for topic in owners.values():
            reader = self._client.create_reader(topic, magnetar.MessageId.earliest)
            self._client.create_producer(topic).send(b"served")
            if reader.read_next(timeout_millis=30_000).data() != b"served":
                return [f"{topic} gives something else than it took"]
        return [] if len(owners) > 1 else [f"of the group one broker alone has all topics: {owners}"]

    def _behind(self, logs: dict[str, set[history.Id]]) -> list[str]:
        wanted = {
            record.id for record in self.note.records
            if isinstance(record, history.Read) and int(record.value.split(":")[2]) % EVERY == 0
        }  # fmt: skip
        left = {
            (topic, name): (logs[topic] & wanted if name == FILTERED[0] else logs[topic]) - ids
            for (topic, name), ids in sorted(self.acked.items())
        }
        return [f"{topic} {name} lacks {len(ids)} messages" for (topic, name), ids in left.items() if ids]

    def _read(self, topic: str) -> set[history.Id]:
        with self._new_client(LOAD) as client:
            return read_to_end(client, topic, self.note)[1]

    def _look_again(self, topic: str, name: str, order: history.Order) -> None:
        self.note(history.Connected(topic, name, "after"))
        consumer = self._subscribe(topic, name, order)
        try:
            while True:
                self._taken(topic, name, "after", consumer.receive(timeout_millis=1500))
        except magnetar.Timeout:
            consumer.close()
        self.note(history.Drained(topic, name))

    # ---------------------------------------------------------------------------------------- threads
    def _thread(self, run: Callable[..., None], topic: str, name: str, *more: Any) -> threading.Thread:
        said = f"{topic} {more[-1] if more else name}"
        return threading.Thread(target=run, args=(topic, name, *more), name=said, daemon=True)

    def _retried(self, make: Callable[[], Any], stop: threading.Event) -> Any:
        while True:
            try:
                return make()
            except ERRORS as error:
                self.failures.append(repr(error))
                if stop.wait(0.2):
                    return None

    def _produce(self, topic: str, name: str) -> None:
        producer = self._retried(lambda: self._producer(topic, name), self._sending)
        seq = 0
        while producer is not None and not self._sending.wait(self._pause_s(topic)):
            finished = False
            for _ in range(BURST):
                finished |= not self._send(producer, topic, name, seq)
                seq += 1
            try:
                producer.flush()
            except ERRORS as error:
                self.failures.append(repr(error))
            if finished:
                producer = self._retried(lambda: self._producer(topic, name), self._sending)

    def _pause_s(self, topic: str) -> float:
        """With `uneven` one topic of UNEVEN is loud, which all are by turns: brokers are busy by turns."""
        turn = int(time.monotonic() / TURN_S) + self.topics.index(topic)
        return PAUSE_S * QUIETER if self._uneven and turn % UNEVEN else PAUSE_S

    def _producer(self, topic: str, name: str) -> Any:
        client = self._visitor if name.endswith(VISITOR) else self._library(topic, other=name.endswith("-1"))
        batching = types_of(client).BatchingType.KeyBased if self._keyed else types_of(client).BatchingType.Default
        return client.create_producer(
            topic, producer_name=name, batching_enabled=True, batching_max_messages=4, batching_type=batching,
            **({"filter_properties": ("wanted",)} if self._filtered and client is self._client else {}),
        )  # fmt: skip

    def _send(self, producer: Any, topic: str, name: str, seq: int) -> bool:
        """False: the producer is finished, because its rights were taken."""
        def outcome(result: magnetar.Result, message_id: Any) -> None:
            if result in OK:
                self.note(history.SendOk(topic, name, seq, id_of(message_id)))
                self.served[name] += 1
            else:
                self.note(history.SendUnknown(topic, name, seq))

        key, value = str(seq % KEYS), sys.intern(history.value_of(topic, name, seq))
        self.note(history.Send(topic, name, seq, key, value))
        try:
            more = {"properties": {"wanted": str(seq % EVERY == 0)}} if self._filtered else {}
            producer.send_async(value.encode(), outcome, partition_key=key, **more)
        except QUEUE_IS_FULL:
            self.note(history.SendFailed(topic, name, seq))
        except ENDED as error:
            self.failures.append(repr(error))
            self.note(history.SendFailed(topic, name, seq))
            return False
        return True

    def _subscribe(self, topic: str, name: str, order: history.Order, *, other: bool = False) -> Any:
        client = self._visitor if name == VISITOR else self._library(topic, other=other)
        types = types_of(client)
        kinds = {history.Order.ALL: types.ConsumerType.Exclusive, history.Order.NONE: types.ConsumerType.Shared}
        held: dict[str, Any] = {"redelivery_order": "key"} if order is history.Order.HELD else {}
        if name == FILTERED[0]:
            held = {"filter": "wanted"}
        return client.subscribe(
            topic, name, consumer_type=kinds.get(order, types.ConsumerType.KeyShared),
            initial_position=types.InitialPosition.Earliest, receiver_queue_size=100,
            negative_ack_redelivery_delay_ms=300, batch_index_ack_enabled=order is not history.Order.ALL, **held,
        )  # fmt: skip

    def _consume(self, topic: str, name: str, order: history.Order, consumer_name: str) -> None:
        rng = random.Random(f"{topic} {consumer_name}")
        alone = order is history.Order.ALL  # of one of the two topics, and one of two shared ones
        other = self.topics.index(topic) % 2 == 1 if alone else consumer_name == "shared-1"
        while not self._receiving.is_set():
            self.note(history.Connected(topic, name, consumer_name))
            consumer = self._retried(lambda: self._subscribe(topic, name, order, other=other), self._receiving)
            if consumer is None:
                return
            try:
                self._take_some(topic, name, consumer_name, consumer, None if alone else rng)
                consumer.close()
            except ERRORS as error:
                self.failures.append(f"{consumer_name}: {error!r}")

    def _take_some(
        self, topic: str, name: str, consumer_name: str, consumer: Any, refuses: random.Random | None
    ) -> None:
        taken = 0
        while taken < REOPENED_AFTER and not self._receiving.is_set():
            try:
                message = consumer.receive(timeout_millis=300)
            except TIMEOUTS:
                continue
            taken += 1
            id_ = self._taken(topic, name, consumer_name, message)
            if refuses is not None and refuses.random() < NACKED:
                self.note(history.Nacked(topic, name, id_))
                consumer.negative_acknowledge(message)
            else:
                consumer.acknowledge(message)
                self.note(history.Acked(topic, name, id_, False))
                self.acked[topic, name].add(id_)

    def _taken(self, topic: str, name: str, consumer_name: str, message: Any) -> history.Id:
        id_ = id_of(message.message_id())
        count = message.redelivery_count()
        if count:  # its connection was lost unseen, or it was refused
            self.note(history.Disturbed())
        self.note(history.Delivered(topic, name, consumer_name, id_, sys.intern(message.data().decode()), count))
        self.served[f"{topic} {name}"] += 1
        return id_
