"""Load of transactions: coins move between topics, each move is consumed, sent and acknowledged in one transaction.

Each topic has COINS coins, sent before anything fails. Workers take what a subscription `bank` gives them, send each
coin to a topic of the seed's choice and acknowledge what they took, all in one transaction; they commit, abort, or
leave it to its time-out; where one worker has a topic alone it may acknowledge cumulatively. Some have a name, under
which two fence each other. Beside them plain messages are sent and acknowledged. Programs prepare half messages
(load/halves.py), and one holds what comes again (load/hoard.py). `audit` is there all the time and reads what is
committed. After the faults the cluster is healed: every transaction must end, and what topics hold and show is judged
(verdict/transactions.py).
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any, TypeVar

from magnetar.client.client import Client
from magnetar.client.common.errors import Timeout, TransactionFenced
from magnetar.client.consume.consumer import Consumer
from magnetar.client.core.transaction import TransactionState
from magnetar.client.model.message import Message
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.produce.producer import Producer
from magnetar.client.transactions.transaction import Transaction
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError, Unavailable
from magnetar.proto.names import TopicName
from tests.simulation.cluster import ADMIN, CLIENT, Cluster, GaveUp
from tests.simulation.load.halves import HalfLoad
from tests.simulation.load.hoard import HoardLoad
from tests.simulation.strikes.nemesis import Nemesis
from tests.simulation.strikes.operations import TOPIC
from tests.simulation.verdict.history import id_of
from tests.simulation.verdict.rest import LIVENESS_S, at_rest
from tests.simulation.verdict.transactions import MINT, PLAIN, Seen, Transfer, TransferHistory

T = TypeVar("T")

COINS = 4
"""Of each topic."""
TIMEOUTS_S = (3.0, 8.0, 30.0)
BANK, AUDIT, SHOWN, STORED = "bank", "audit", "shown", "stored"
TAKEN_MAX = 3
RETRY_S = 0.5
ENDS_S = 120.0
"""After healing and its time-out an open transaction is ended within that time: a topic that was down is told again."""
STILL_S = 3.0
"""What comes from a subscription in the end has come when it is silent for so long."""


class TransactionLoad:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._simulation = cluster.simulation
        self._options = cluster.options
        rng = self._simulation.random_generator("transactions")
        self._topics = [TOPIC, *(f"{TOPIC}-{number}" for number in range(1, rng.choice((2, 3))))]
        self._workers = rng.choice((1, 2))  # of each topic
        self._shared = self._workers > 1 or rng.random() < 0.3
        chance = self._simulation.random_generator("cumulative").random()
        self._cumulative = not self._shared and chance < 0.5  # a worker acknowledges the last that it took
        self._named = rng.random() < 0.3
        self._timeout_s = rng.choice(TIMEOUTS_S)
        self._ends = rng.choice(((0.9, 0.05), (0.6, 0.3), (0.5, 0.1)))  # committed, aborted; the rest is left
        self._pause_s = self._options.seconds / rng.choice((20, 60))
        self.history = TransferHistory(self._topics, COINS * len(self._topics))
        self.coordination = cluster.coordination
        self._halves = HalfLoad(cluster, self._topics, self._client, self._bytes)
        self._hoard = HoardLoad(cluster, self._client)
        self.violations: list[str] = []
        self._over = False
        self._number = 0
        self._plain = 0

    @property
    def figures(self) -> dict[str, int]:
        transfers = list(self.history.transfers.values())
        outcomes = [each.outcome for each in transfers]
        return {
            "transfers": len(transfers), "committed": outcomes.count(True), "aborted": outcomes.count(False),
            "shown": sum(map(len, self.history.shown.values())), "stored": sum(map(len, self.history.stored.values())),
            "take_overs": self.coordination.take_overs, **self._halves.figures, **self._hoard.figures,
        }  # fmt: skip

    def _in_client(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return self._simulation.spawn(CLIENT, coroutine)

    def _client(self) -> Client:
        return Client(self._cluster.service_url, world=self._simulation.world(CLIENT), operation_timeout_seconds=15)

    async def run(self) -> None:
        await self._in_client(self._mint())
        await self._in_client(self._hoard.feed())
        audits = [self._in_client(self._audit(topic)) for topic in self._topics]
        workers = [
            self._in_client(self._work(topic, number))
            for topic in self._topics for number in range(self._workers)
        ]  # fmt: skip
        workers.append(self._in_client(self._send_plain()))
        workers.append(self._in_client(self._hoard.run()))
        programs = [self._in_client(self._halves.run(number)) for number in range(self._halves.programs)]
        workers.append(self._simulation.spawn(ADMIN, self._halves.operate()))
        await Nemesis(self._cluster).run()
        await self._cluster.heal()
        self._over = True
        self._halves.over()
        what = "workers end"
        try:
            async with asyncio.timeout(LIVENESS_S) as limit:
                await asyncio.gather(*workers)
                what = "every transaction has an outcome"
                await self._in_client(self._learn())
                what = "every half has an outcome"
                await self._simulation.spawn(ADMIN, self._halves.settle())
                await self._in_client(self._halves.learn())
                self._halves.end()
                await asyncio.gather(*programs)
                what = "every topic is stable to its end"
                await self._until_stable()
                what = "topics are read"
                await self._in_client(self._read_all())
                what = "what is shown is delivered"
                while missing := self._undelivered():
                    what = f"what is shown is delivered: {missing[:3]} do not come"
                    _fail_fast(audits)
                    await asyncio.sleep(RETRY_S)
                what = "what is left in the bank comes"
                await self._in_client(self._empty_bank())
        except TimeoutError:
            if not limit.expired():
                raise
            self.violations.append(f"stuck: not within {LIVENESS_S} s after healing: {what}; {self._statistics}")
            self.violations += self.coordination.violations + self.history.violations
            self.violations += self._halves.history.violations
            return
        for audit in audits:
            audit.cancel()
        self.violations += self.history.check(self.coordination) + self._hoard.check()
        self.violations += self._halves.history.check(self.history.shown)
        if not self.violations:
            self.violations += await at_rest(self._cluster)

    async def _again(self, what: str, work: Any) -> Any:
        """Until it works."""
        while True:
            try:
                return await self._cluster.call(what, work())
            except MagnetarError as error:
                self._simulation.add_line(f"{what}: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)

    # ------------------------------------------------------------------ the beginning
    async def _mint(self) -> None:
        """Nothing fails yet."""
        client = self._client()
        for at, topic in enumerate(self._topics):
            for name in (AUDIT, BANK, SHOWN):
                await (await self._subscribe(client, topic, name)).close()
            producer = await client.create_producer(topic, batching_enabled=self._options.batching)
            sends = [producer.send(self._bytes(f"c{at * COINS + number}:0:{MINT}")) for number in range(COINS)]
            await asyncio.gather(*sends)
        await client.close()

    def _bytes(self, value: str) -> bytes:
        return f"{value} ".encode() + bytes(self._options.message_bytes_max // 2)

    async def _subscribe(self, client: Client, topic: str, name: str, isolation: str = "read_committed") -> Consumer:
        shared = name == BANK and self._shared
        subscribed: Consumer = await self._again(f"subscribe {name}", lambda: client.subscribe(
            topic, name, consumer_type=ConsumerType.Shared if shared else ConsumerType.Exclusive,
            initial_position=InitialPosition.Earliest, receiver_queue_size=10, isolation=isolation,
            negative_ack_redelivery_delay_ms=300, batch_index_ack_enabled=True,
        ))  # fmt: skip
        return subscribed

    # ------------------------------------------------------------------ plain traffic
    async def _send_plain(self) -> None:
        rng = self._simulation.random_generator("plain")
        client = self._client()
        while not self._over:
            topic = rng.choice(self._topics)
            value = f"{PLAIN}{self._plain}:0:{PLAIN}"
            self._plain += 1
            try:
                producer = await self._cluster.call("plain producer", client.create_producer(topic))
                await self._cluster.call("plain send", producer.send(self._bytes(value)))
                self.history.plain[value] = topic
                await self._cluster.call("plain close", producer.close())
            except MagnetarError as error:
                self._simulation.add_line(f"{value}: {error!r}"[:200])
            await asyncio.sleep(rng.expovariate(1.0 / (4 * self._pause_s)))
        await client.close()

    # ------------------------------------------------------------------ who is there all the time
    async def _audit(self, topic: str) -> None:
        client = self._client()
        consumer = await self._subscribe(client, topic, AUDIT)
        while True:
            try:
                message = await self._cluster.call("audit", consumer.receive())
                value = value_of(message)
                self._simulation.add_line(f"audit gets {value} {message.message_id()} of {topic}")
                self.history.deliver(topic, value, self.coordination, "audit")
                self.history.delivered[topic][value] = None
                await consumer.acknowledge(message)
            except GaveUp:
                continue
            except MagnetarError as error:
                self._simulation.add_line(f"audit: {error!r}"[:200])
                await asyncio.sleep(RETRY_S)
                consumer = await self._subscribe(client, topic, AUDIT)

    def _undelivered(self) -> list[str]:
        return [
            each.value for topic in self._topics for each in self.history.shown[topic]
            if each.value not in self.history.delivered[topic]
        ]  # fmt: skip

    # ------------------------------------------------------------------ workers
    async def _work(self, topic: str, number: int) -> None:
        rng = self._simulation.random_generator(f"worker {topic} {number}")
        name = f"mover-{number}" if self._named else None
        while not self._over:
            client = self._client()
            try:
                consumer = await self._subscribe(client, topic, BANK)
                producers: dict[str, Producer] = {}
                while not self._over:
                    taken = await self._take(consumer, topic, rng)
                    if taken:
                        await self._move(client, consumer, producers, taken, topic, name, rng)
                    await asyncio.sleep(rng.expovariate(1.0 / self._pause_s))
            except TransactionFenced as error:  # as a program that ends, and is started again
                self._simulation.add_line(f"worker {topic} {number} is fenced: {error!r}"[:200])
                await asyncio.sleep(rng.uniform(0.0, 2.0))
            except MagnetarError as error:
                self._simulation.add_line(f"worker {topic} {number}: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(MagnetarError):
                    await client.close()

    async def _take(self, consumer: Consumer, topic: str, rng: random.Random) -> list[Message]:
        taken: list[Message] = []
        wanted = rng.randint(1, TAKEN_MAX)
        with contextlib.suppress(Timeout):
            while len(taken) < wanted:
                message = await self._cluster.call("take", consumer.receive(500 if not taken else 50))
                value = value_of(message)
                self._simulation.add_line(f"bank gives {value} {message.message_id()} of {topic}")
                self.history.deliver(topic, value, self.coordination, "bank")
                if value.endswith(f":{PLAIN}"):
                    await consumer.acknowledge(message)
                elif message.message_id() not in [each.message_id() for each in taken]:  # it may come once more
                    taken.append(message)
        return taken

    async def _move(
        self, client: Client, consumer: Consumer, producers: dict[str, Producer], taken: list[Message], topic: str,
        name: str | None, rng: random.Random,
    ) -> None:  # fmt: skip
        transfer = self.history.begin(f"t{self._number}")
        self._number += 1
        try:
            txn = await client.transaction(self._timeout_s, name=name)
        except MagnetarError:
            if not self._cumulative:  # else its consumer is opened again
                for message in taken:
                    await consumer.negative_acknowledge(message)
            transfer.outcome = False
            raise
        transfer.txn = txn.id
        self._simulation.add_line(f"{transfer.label} is {txn.id}")
        lot = rng.random()
        try:
            await self._operate(client, consumer, producers, taken, topic, txn, transfer, rng)
            if lot < self._ends[0]:
                await self._cluster.call("commit", txn.commit("visible" if rng.random() < 0.3 else "durable"))
            elif lot < sum(self._ends):
                await self._cluster.call("abort", txn.abort())
        except (MagnetarError, GaveUp) as error:
            self._simulation.add_line(f"{transfer.label}: {error!r}"[:300])
            if txn.state is TransactionState.OPEN:
                with contextlib.suppress(MagnetarError, GaveUp):
                    await self._cluster.call("abort", txn.abort())
            if isinstance(error, TransactionFenced):
                raise
            if self._cumulative:
                raise Unavailable(f"{transfer.label}: its consumer is opened again") from error
        finally:
            transfer.outcome = outcome_of(txn.state)
            told = {True: "committed", False: "aborted", None: "open, or nobody knows"}[transfer.outcome]
            self._simulation.add_line(f"{transfer.label} is {told} ({txn.state.name})")
            if transfer.outcome is not True and not self._cumulative:
                for message in taken:
                    await consumer.negative_acknowledge(message)

    async def _operate(
        self, client: Client, consumer: Consumer, producers: dict[str, Producer], taken: list[Message], topic: str,
        txn: Transaction, transfer: Transfer, rng: random.Random,
    ) -> None:  # fmt: skip
        waits: list[Awaitable[Any]] = []
        for message in taken:
            target = rng.choice(self._topics)
            coin, hop, _ = value_of(message).split(":")
            value = f"{coin}:{int(hop) + 1}:{transfer.label}"
            if target not in producers:
                producers[target] = await self._cluster.call("producer", client.create_producer(
                    target, batching_enabled=self._options.batching, send_timeout_millis=10_000,
                ))  # fmt: skip
            transfer.sent[value] = target
            waits.append(producers[target].send(self._bytes(value), txn=txn))
            transfer.acknowledged.append((topic, id_of(message.message_id())))
            if not self._cumulative:
                waits.append(consumer.acknowledge(message, txn=txn))
        if self._cumulative:
            waits.append(consumer.acknowledge_cumulative(taken[-1], txn=txn))
        try:
            async with asyncio.timeout(20.0):
                failed = [
                    each for each in await asyncio.gather(*waits, return_exceptions=True)
                    if isinstance(each, BaseException)
                ]  # fmt: skip
        except TimeoutError:
            self._simulation.add_line(f"{transfer.label}: its operations have no outcome in 20 s")
            return  # the commit waits for them, or gives up
        for error in failed:
            producers.clear()
            raise error

    # ------------------------------------------------------------------ the end
    async def _learn(self) -> None:
        """Each transaction that nobody told of has an outcome, within its time-out and a bound (91)."""
        client = self._client()
        end = self._simulation.loop.time() + self._timeout_s + ENDS_S
        for transfer in self.history.transfers.values():
            while transfer.outcome is None and transfer.txn is not None:
                asked = partial(client.transaction_status, transfer.txn)
                state: TransactionState = await self._again("status", asked)
                transfer.outcome = outcome_of(state)
                if transfer.outcome is None:
                    if self._simulation.loop.time() > end:
                        self.violations.append(f"91: {transfer.label} {transfer.txn} is still {state.name}")
                        end += LIVENESS_S
                    await asyncio.sleep(RETRY_S)
                else:
                    self._simulation.add_line(f"{transfer.label} {transfer.txn} is {state.name}, says its status")
        await client.close()

    _statistics = ""

    async def _until_stable(self) -> None:
        for topic in self._topics:
            while not await self._simulation.spawn(ADMIN, self._is_stable(topic)):  # noqa: ASYNC110 - it is asked over the network
                await asyncio.sleep(RETRY_S)

    async def _is_stable(self, topic: str) -> bool:
        client = Client(self._cluster.service_url, world=self._simulation.world(ADMIN))
        try:
            name = TopicName.parse(topic)
            reply: wire.TopicStatsReply = await client.connections.ask_owner(
                name, "TopicStats", wire.Name(name=topic), service="Admin"
            )
            inside: wire.TopicInternalStatsReply = await client.connections.ask_owner(
                name, "TopicInternalStats", wire.Name(name=topic), service="Admin"
            )
        except MagnetarError as error:
            self._statistics = repr(error)
            return False
        finally:
            await client.close()
        stats = reply.transactions
        self._statistics = f"{topic}: " + " ".join(str(stats).split())
        return not reply.HasField("transactions") or (
            stats.open == 0 and stats.last_stable == inside.last_confirmed
        )

    async def _read_all(self) -> None:
        client = self._client()
        for topic in self._topics:
            self.history.shown[topic] = await self._read(client, topic, SHOWN, "read_committed")
            self.history.stored[topic] = await self._read(client, topic, STORED, "read_uncommitted")
        await client.close()

    async def _read(self, client: Client, topic: str, name: str, isolation: str) -> list[Seen]:
        """`shown` has held everything from the beginning, so `stored` starts there as well."""
        consumer = await self._subscribe(client, topic, name, isolation)
        found: dict[Any, Seen] = {}
        with contextlib.suppress(Timeout):
            while True:
                message = await consumer.receive(int(1000 * STILL_S))
                seen = Seen(value_of(message), id_of(message.message_id()), message.index())
                found[seen.id] = seen
        await consumer.close()
        return list(found.values())

    async def _empty_bank(self) -> None:
        client = self._client()
        for topic in self._topics:
            consumer = await self._subscribe(client, topic, BANK)
            again = self.history.again[topic]
            with contextlib.suppress(Timeout):
                while True:
                    message = await consumer.receive(int(1000 * STILL_S))
                    again[id_of(message.message_id())] = value_of(message)
        await client.close()


def value_of(message: Message) -> str:
    return message.data().split(b" ")[0].decode()


def outcome_of(state: TransactionState) -> bool | None:
    return {TransactionState.COMMITTED: True, TransactionState.ABORTED: False}.get(state)


def _fail_fast(loops: list[asyncio.Future[None]]) -> None:
    for loop in loops:
        if loop.done():
            loop.result()
