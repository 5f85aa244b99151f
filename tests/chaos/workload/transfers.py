"""Clients that run transactions, whatever breaks: transfers between accounts, and moves from accounts to a statement.

Each account is a topic. Tellers send transfers (accounts.py says what these are), and commit most of them; others they
abort, leave in the middle of their block, or forget, so that their time-out ends them. Movers take what a subscription
gives them, send it to the statement and acknowledge it, all in one transaction: from the first account two that share
it, one by one; from the second one alone, by a cumulative acknowledgement; from the third `magnetar.process`. A reader
of each topic is there all the time. One teller and one mover use Pulsar's own client for Java (libraries.py).

`wait_served` waits until all of these have gone on, and until every reader who was shown a part of a transfer was shown
all of it. `settle` ends everything: each transaction gets an outcome, the coordinators have nothing left to do, all
that is shown in the accounts is in the statement; then every topic is read once more, and the books are judged.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import magnetar
from magnetar.admin import Admin
from tests.chaos.waiting import wait_until
from tests.chaos.workload.accounts import Books, Transaction, Verdict, entry_of, halves, judge, leg_of
from tests.chaos.workload.clients import id_of
from tests.chaos.workload.libraries import ERRORS, TIMEOUTS, JavaClient, Maker, types_of

ACCOUNTS = ("ada", "bob", "cy")
STATEMENT = "statement"
AUDIT, MOVERS = "audit", "movers"
TELLERS = 3
PAIRS_MAX = 3
PAUSE_S = 0.1
TIMEOUT_S = 20.0
SHORT_S = 2.0
"""Of a transaction that nobody ends."""
ENDS = {"commit": 0.8, "abort": 0.1, "leave": 0.08, "forget": 0.02}
TAKEN_MAX = 8
REOPENED_AFTER = 300
"""Messages that a mover moves before its consumer is opened again."""
ASKED_AGAIN = 200
"""Outcomes that were told, and that the coordinator is asked for once more in the end."""
LEAST = 3
"""Of each in a run that proves something: transactions committed and aborted, and messages that stay hidden."""


class LeaveBlock(Exception):
    """Raised in the block of a transaction."""


class Transfers:
    """In the place of workload/clients.py `Clients`."""

    def __init__(self, url: str, rng: random.Random, others: Sequence[Maker] = ()) -> None:
        self.url, self.rng, self.topics = url, rng, (*ACCOUNTS, STATEMENT)
        self.books = Books(ACCOUNTS, STATEMENT)
        self.failures: list[str] = []
        self.served: dict[str, int] = {}
        """By teller and mover, messages of transactions that were told to be committed; by reader, what it saw."""
        self._client = magnetar.Client(url)
        self._others = [make(self.disturbed) for make in others]
        self._lock = threading.Lock()
        self._settled = False
        self._sending, self._moving, self._reading = threading.Event(), threading.Event(), threading.Event()
        self._tellers: list[threading.Thread] = []
        self._movers: list[threading.Thread] = []
        self._readers: list[threading.Thread] = []

    # ---------------------------------------------------------------------------------------- what a run asks
    def disturbed(self) -> None:
        """Nothing here depends on it."""

    @property
    def kept(self) -> Books:
        return self.books

    @property
    def pids(self) -> set[int]:
        """Of processes beside this one that clients are in."""
        return {each.process.pid for each in self._others if isinstance(each, JavaClient)}

    @property
    def acknowledged(self) -> int:
        """Messages of committed transactions."""
        return sum(count for name, count in self.served.items() if not name.startswith("reader"))

    def start(self) -> None:
        for topic in self.topics:
            self._client.subscribe(topic, AUDIT, initial_position=magnetar.InitialPosition.Earliest).close()
            self._readers.append(self._thread(f"reader of {topic}", self._read, topic))
        other = self._others[0] if self._others else self._client
        for number in range(TELLERS):
            name = f"teller-{number}"
            self._tellers.append(self._thread(name, self._tell, name, other if number == 0 else self._client))
        first, second, third = ACCOUNTS
        for name, account, client in (
            ("mover-0", first, self._client), ("mover-1", first, other), ("mover-2", second, self._client),
        ):  # fmt: skip
            self._movers.append(self._thread(name, self._move, name, account, client, account == second))
        self._movers.append(self._thread("mover-3", self._process, third))
        for account in ACCOUNTS:
            self._subscribe(self._client, account).close()
        for thread in (*self._readers, *self._movers, *self._tellers):
            thread.start()

    def wait_served(self, more: int) -> list[str]:
        goal = {name: count + more for name, count in self.served.items()}
        return wait_until(
            lambda: [f"{name} has made no progress" for name, count in self.served.items() if count < goal[name]]
        ) or wait_until(self._missing_since(), look_s=0.5)

    def _missing_since(self) -> Callable[[], list[str]]:
        """What was half shown now, and is not whole yet."""
        now = set(halves(self.books))

        def missing() -> list[str]:
            now.intersection_update(halves(self.books))
            return sorted(now)

        return missing

    def settle(self) -> list[str]:
        self._sending.set()
        stuck = wait_until(lambda: [f"{each.name} does not end" for each in self._tellers if each.is_alive()])
        stuck += wait_until(lambda: self._unsettled(self._tellers_transactions()), look_s=0.5)
        for account in ACCOUNTS:
            self.books.shown[account] = [value for _, value in self._read_all(account)]
        stuck += wait_until(self._not_entered, look_s=0.5)
        self._moving.set()
        stuck += wait_until(lambda: [f"{each.name} does not end" for each in self._movers if each.is_alive()])
        stuck += wait_until(lambda: self._unsettled(list(self.books.transactions.values())), look_s=0.5)
        self._ask_again()
        for topic in self.topics:
            self.books.shown[topic] = [value for _, value in self._read_all(topic)]
            self.books.stored[topic] = [value for _, value in self._read_all(topic, "read_uncommitted")]
        stuck += wait_until(self._unseen, look_s=0.5)
        self._settled = True
        self._reading.set()
        for thread in self._readers:
            thread.join()
        for account in ACCOUNTS:
            self.books.again[account] = list(self._left(account))
        return stuck

    def verdict(self) -> Verdict:
        """Of a run that came to its end; of what is stuck before it nothing is known."""
        return judge(self.books) if self._settled else Verdict()

    @staticmethod
    def figures(verdict: Verdict) -> dict[str, int]:
        return {
            "transactions": verdict.committed + verdict.aborted, "committed": verdict.committed,
            "aborted": verdict.aborted, "untold": verdict.untold, "hidden": verdict.hidden,
            "delivered": verdict.delivered, "repeated": 0,
        }  # fmt: skip

    @staticmethod
    def proves_nothing(verdict: Verdict) -> list[str]:
        """What a run has to have had."""
        counts = {
            "committed": verdict.committed, "aborted": verdict.aborted, "messages that stay hidden": verdict.hidden
        }
        return [f"only {count} {name}" for name, count in counts.items() if count < LEAST]

    def close(self) -> None:
        for event in (self._sending, self._moving, self._reading):
            event.set()
        for thread in (*self._tellers, *self._movers, *self._readers):
            if thread.is_alive():
                thread.join(2 * TIMEOUT_S)
        self._client.close()
        for each in self._others:
            each.close()

    # ---------------------------------------------------------------------------------------- threads
    def _thread(self, name: str, run: Callable[..., None], *given: Any) -> threading.Thread:
        self.served[name] = 0
        return threading.Thread(target=run, args=given, name=name, daemon=True)

    def _begin(self, name: str, number: int) -> Transaction:
        with self._lock:
            found = self.books.begin(f"{name}/{number}")
        found.begun = time.time()
        return found

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            self.failures.append(f"{name}: {error!r}")

    def _read(self, topic: str) -> None:
        after, name = magnetar.MessageId.earliest, f"reader of {topic}"
        while not self._reading.wait(PAUSE_S):
            with self._noted(name):
                reader = self._client.create_reader(topic, after)
                while not self._reading.is_set():
                    try:
                        message = reader.read_next(timeout_millis=300)
                    except TIMEOUTS:
                        continue
                    after = message.message_id()
                    self.books.seen[topic].append(message.data().decode())
                    self.served[name] += 1
                reader.close()

    def _tell(self, name: str, client: Any) -> None:
        rng, number = random.Random(f"{name} {self.rng.random()}"), 0
        producers: dict[str, Any] = {}
        while not self._sending.wait(PAUSE_S):
            end = rng.choices(list(ENDS), list(ENDS.values()))[0]
            each = self._begin(name, number)
            number += 1
            with self._noted(name):
                txn = client.transaction(SHORT_S if end == "forget" else TIMEOUT_S)
                each.id = str(txn.id)
                try:
                    self._transfer(client, producers, each, txn, end, rng)
                finally:
                    each.told, each.ended = told(txn), time.time()
                self.served[name] += len(each.sent) if each.told else 0

    def _transfer(
        self, client: Any, producers: dict[str, Any], each: Transaction, txn: Any, end: str, rng: random.Random
    ) -> None:
        legs: list[tuple[int, str]] = []
        for _ in range(rng.randint(1, PAIRS_MAX)):
            amount = rng.randrange(1, 100)
            payer, payee = rng.sample(ACCOUNTS, 2)
            legs += [(-amount, payer), (amount, payee)]
        if end == "forget":
            self._send(client, producers, each, legs, txn)
            return
        with contextlib.suppress(LeaveBlock), txn:
            self._send(client, producers, each, legs[: 1 if end == "leave" else None], txn)
            if end == "leave":
                raise LeaveBlock
            if end == "abort":
                txn.abort()

    def _send(
        self, client: Any, producers: dict[str, Any], each: Transaction, legs: list[tuple[int, str]], txn: Any
    ) -> None:
        for at, (amount, account) in enumerate(legs):
            if account not in producers:
                name = f"{each.label.partition('/')[0]}-{account}"
                producers[account] = client.create_producer(
                    account, producer_name=name, batching_enabled=True, batching_max_messages=4
                )
            value = leg_of(amount, f"{each.label}#{at}")
            each.sent[value] = account
            producers[account].send_async(value.encode(), unheard, partition_key=str(at), txn=txn)

    def _move(self, name: str, account: str, client: Any, cumulative: bool) -> None:
        rng, number = random.Random(f"{name} {self.rng.random()}"), 0
        producer = None
        while not self._moving.wait(PAUSE_S):
            with self._noted(name):
                producer = producer or client.create_producer(STATEMENT, producer_name=name, batching_enabled=True)
                consumer = self._subscribe(client, account)
                try:
                    moved = 0
                    while moved < REOPENED_AFTER and not self._moving.is_set():
                        if messages := self._take(account, consumer, 1 if rng.random() < 0.2 else TAKEN_MAX):
                            each = self._begin(name, number)
                            number += 1
                            self._move_these(client, account, consumer, producer, messages, each, cumulative, rng)
                            self.served[name] += len(messages) if each.told else 0
                            moved += len(messages)
                finally:
                    with self._noted(name):
                        consumer.close()

    def _take(self, account: str, consumer: Any, most: int) -> list[Any]:
        messages: list[Any] = []
        with contextlib.suppress(*TIMEOUTS):
            while len(messages) < most:
                messages.append(consumer.receive(timeout_millis=20 if messages else 300))
                self.books.taken[account].append(messages[-1].data().decode())
        return messages

    def _move_these(
        self, client: Any, account: str, consumer: Any, producer: Any, messages: list[Any], each: Transaction,
        cumulative: bool, rng: random.Random,
    ) -> None:  # fmt: skip
        changes_his_mind = rng.random() < ENDS["abort"]
        txn = client.transaction(TIMEOUT_S)
        each.id = str(txn.id)
        try:
            with txn:
                for at, message in enumerate(messages):
                    value = entry_of(account, message.data().decode(), f"{each.label}#{at}")
                    each.sent[value] = STATEMENT
                    producer.send_async(value.encode(), unheard, partition_key=account, txn=txn)
                each.acknowledged = [(account, id_of(message.message_id())) for message in messages]
                if cumulative:
                    consumer.acknowledge_cumulative(messages[-1], txn=txn)
                else:
                    consumer.acknowledge(messages, txn=txn)
                if changes_his_mind:
                    txn.abort()
        except ERRORS:
            if not cumulative:  # else its consumer is opened again
                for message in messages:
                    consumer.negative_acknowledge(message)
            raise
        finally:
            each.told, each.ended = told(txn), time.time()

    def _process(self, account: str) -> None:
        name, consumer = "mover-3", None
        producer: Any = None

        def enter(message: Any) -> bytes:
            value = message.data().decode()
            self.books.taken[account].append(value)
            entry = entry_of(account, value, f"{name}/")
            self.books.processed.add(entry)
            return entry.encode()

        statistics = magnetar.ProcessStatistics()
        while not self._moving.wait(PAUSE_S):
            with self._noted(name):
                client = self._client
                producer = producer or client.create_producer(STATEMENT, producer_name=name, batching_enabled=True)
                consumer = consumer or self._subscribe(client, account)
                before = statistics.sent
                try:
                    magnetar.process(
                        consumer, producer, enter, messages_max=TAKEN_MAX, idle_timeout_ms=300, timeout=TIMEOUT_S,
                        statistics=statistics,
                    )  # fmt: skip
                except ERRORS:
                    with self._noted(name):
                        consumer.close()
                    consumer = None
                    raise
                finally:
                    self.served[name] += statistics.sent - before

    def _subscribe(self, client: Any, account: str) -> Any:
        types = types_of(client)
        shared = account != ACCOUNTS[1]
        return client.subscribe(
            account, MOVERS,
            consumer_type=types.ConsumerType.Shared if shared else types.ConsumerType.Exclusive,
            initial_position=types.InitialPosition.Earliest, receiver_queue_size=100,
            negative_ack_redelivery_delay_ms=300, batch_index_ack_enabled=True,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------- the end
    def _tellers_transactions(self) -> list[Transaction]:
        return [each for label, each in list(self.books.transactions.items()) if label.startswith("teller")]

    def _unsettled(self, transactions: list[Transaction]) -> list[str]:
        """Those that nobody knows the outcome of yet, and topics that wait for one."""
        found = []
        for each in transactions:
            if each.id and each.outcome is None:
                try:
                    each.status = self._status(each)
                except ERRORS as error:
                    found.append(f"{each.label} {each.id} has no outcome: {error!r}")
                else:
                    if each.status is None:
                        found.append(f"{each.label} {each.id} is open")
        if not found:
            with self._noted("admin"), Admin(self.url) as admin:
                for coordinator in admin.all_transactions():
                    found += [f"{each.txn} is {each.state.name} at {each.topics}" for each in coordinator.items]
                for topic in self.topics:
                    stats = admin.topic_stats(topic).transactions
                    found += [f"{topic} has {stats.open} open transactions"] if stats is not None and stats.open else []
                return found
            found.append("the administration does not answer")
        return found

    def _status(self, each: Transaction) -> bool | None:
        state = self._client.transaction_status(each.id)
        return {magnetar.TransactionState.COMMITTED: True, magnetar.TransactionState.ABORTED: False}.get(state)

    def _ask_again(self) -> None:
        told_ones = [each for each in self.books.transactions.values() if each.told is not None and each.sent]
        for each in self.rng.sample(told_ones, min(ASKED_AGAIN, len(told_ones))):
            with self._noted("status"):
                each.status = self._status(each)

    def _read_all(self, topic: str, isolation: str = "read_committed") -> list[tuple[Any, str]]:
        found = []
        with magnetar.Client(self.url) as client:
            reader = client.create_reader(
                topic, magnetar.MessageId.earliest, receiver_queue_size=10_000, isolation=isolation
            )
            while reader.has_message_available():
                message = reader.read_next(timeout_millis=30_000)
                found.append((id_of(message.message_id()), message.data().decode()))
        return found

    def _not_entered(self) -> list[str]:
        entered = {tuple(value.split("|")[:2]) for value in list(self.books.seen[STATEMENT])}
        return [
            f"{value} of {account} is not in the statement"
            for account in ACCOUNTS for value in self.books.shown[account] if (account, value) not in entered
        ][:20]  # fmt: skip

    def _unseen(self) -> list[str]:
        return [
            f"the reader of {topic} saw {len(self.books.seen[topic])} of {len(self.books.shown[topic])}"
            for topic in self.topics if len(self.books.seen[topic]) < len(self.books.shown[topic])
        ]  # fmt: skip

    def _left(self, account: str) -> Iterator[tuple[Any, str]]:
        """What the movers' subscription still gives."""
        consumer = self._subscribe(self._client, account)
        with contextlib.suppress(*TIMEOUTS):
            while True:
                message = consumer.receive(timeout_millis=1500)
                yield id_of(message.message_id()), message.data().decode()
        consumer.close()


def told(txn: Any) -> bool | None:
    return {"COMMITTED": True, "ABORTED": False}.get(txn.state.name)


def unheard(*_: Any) -> None:
    """What becomes of a message of a transaction its commit says."""
