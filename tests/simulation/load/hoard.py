"""A program that holds messages while others of their batch come again, beside the load of transactions.

One topic of its own, in batches. The program takes messages and keeps what it is given, also twice. Now and then it
acknowledges a part of what it holds in a transaction that it aborts: the broker gives that part back, and the program
gets it again while it holds the rest. Then it processes each delivery that it holds, in one transaction. A transaction
that would acknowledge two deliveries of a message is refused, and aborted, and the program drops what it holds. Where
the seed has clients of Pulsar's protocol (`Options.pulsar`) the program may be one.

What must hold (80): committed transactions process each message once, and in the end all of them.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from magnetar.client.client import Client
from magnetar.client.common.errors import Timeout
from magnetar.client.core.transaction import TransactionState
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto.errors import MagnetarError, TransactionForgotten
from magnetar.proto.states import TxnId
from tests.simulation.cluster import CLIENT, Cluster, GaveUp
from tests.simulation.load.pulsar import PulsarClient
from tests.simulation.verdict.history import Id, id_of

TOPIC, SUBSCRIPTION = "persistent://public/default/hoarded", "s"
BATCHES, BATCH = 4, 5
HELD_MAX = 8
RETRY_S = 0.5


@dataclass(slots=True)
class Processing:
    """Deliveries that are processed in one transaction; `committed` None: not told."""

    txn: TxnId
    ids: list[Id] = field(default_factory=list)
    committed: bool | None = None


class HoardLoad:
    def __init__(self, cluster: Cluster, client: Callable[[], Client]) -> None:
        self._cluster = cluster
        self._simulation = cluster.simulation
        self._client = client
        self._rng: random.Random = cluster.simulation.random_generator("hoard")
        self._work: list[Processing] = []
        self._fed: list[Id] = []
        self._again = 0  # deliveries of what was in hand
        self._pulsar = self._rng.random() < cluster.options.pulsar

    @property
    def figures(self) -> dict[str, int]:
        return {"hoarded": sum(len(each.ids) for each in self._work if each.committed), "held_twice": self._again}

    async def feed(self) -> None:
        """Nothing fails yet."""
        client = self._client()
        await (await self._subscribe(client, batch_index_ack_enabled=True)).close()
        producer = await client.create_producer(TOPIC, batching_max_messages=BATCH, batching_max_publish_delay_ms=50)
        for _ in range(BATCHES):
            sent = await asyncio.gather(*(producer.send(b"%d" % number) for number in range(BATCH)))
            self._fed += map(id_of, sent)
        await client.close()

    async def _subscribe(self, client: Any, **more: Any) -> Any:
        return await client.subscribe(
            TOPIC, SUBSCRIPTION, consumer_type=ConsumerType.Shared, initial_position=InitialPosition.Earliest,
            receiver_queue_size=10, negative_ack_redelivery_delay_ms=300, **more,
        )  # fmt: skip

    def _new_client(self) -> Any:
        """The SDK's, or that of Pulsar's protocol: they have the same faces."""
        if not self._pulsar:
            return self._client()
        world, endpoints = self._simulation.world(CLIENT), self._cluster.pulsar_endpoints
        return PulsarClient(world, endpoints, None, self._rng)

    async def run(self) -> None:
        """Until each message is processed in a committed transaction, as far as is known."""
        more = {} if self._pulsar else {"batch_index_ack_enabled": True}
        while self._left():
            client = self._new_client()
            try:
                consumer = await self._cluster.call("subscribe", self._subscribe(client, **more))
                while self._left():
                    await self._process(client, consumer)
            except (MagnetarError, GaveUp) as error:
                self._simulation.add_line(f"hoard: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(MagnetarError):
                    await client.close()
            await self._simulation.spawn(CLIENT, self._learn())

    def _left(self) -> int:
        return len({*self._fed} - {id_ for each in self._work if each.committed for id_ in each.ids})

    async def _process(self, client: Any, consumer: Any) -> None:
        hand: list[Any] = []
        await self._take(consumer, hand)
        if self._rng.random() < 0.6 and len(hand) > 1:
            part = self._rng.sample(hand, self._rng.randint(1, len(hand) - 1))
            await self._in_transaction(client, consumer, part, commits=False)
            await self._take(consumer, hand)
        try:
            await self._in_transaction(client, consumer, hand, commits=True)
        except (MagnetarError, GaveUp) as error:
            self._simulation.add_line(f"hoard: {len(hand)} deliveries are dropped: {error!r}"[:300])
            for message in hand:
                await consumer.negative_acknowledge(message)
            await self._simulation.spawn(CLIENT, self._learn())

    async def _take(self, consumer: Any, hand: list[Any]) -> None:
        with contextlib.suppress(Timeout):
            while len(hand) < HELD_MAX:
                message = await consumer.receive(400)
                self._again += id_of(message.message_id()) in [id_of(each.message_id()) for each in hand]
                hand.append(message)

    async def _in_transaction(self, client: Any, consumer: Any, part: list[Any], *, commits: bool) -> None:
        if not part:
            return
        txn = await client.transaction(10.0)
        done = Processing(txn.id)
        if commits:
            self._work.append(done)
        try:
            for message in part:
                done.ids.append(id_of(message.message_id()))
                await consumer.acknowledge(message, txn=txn)
            await (self._cluster.call("commit", txn.commit()) if commits else txn.abort(wait="visible"))
        finally:
            if txn.state is TransactionState.OPEN:
                with contextlib.suppress(MagnetarError):
                    await txn.abort(wait="visible")
            outcomes = {TransactionState.COMMITTED: True, TransactionState.ABORTED: False}
            done.committed = outcomes.get(txn.state)

    async def _learn(self) -> None:
        """What was not told: before anything else is processed, so that what is left is known."""
        client = self._client()
        for each in self._work:
            while each.committed is None:
                try:
                    state = await self._cluster.call("status", client.transaction_status(each.txn))
                except TransactionForgotten:
                    each.committed = False
                    continue
                except MagnetarError as error:
                    self._simulation.add_line(f"hoard: {error!r}"[:200])
                    await asyncio.sleep(RETRY_S)
                    continue
                if state in (TransactionState.COMMITTED, TransactionState.ABORTED):
                    each.committed = state is TransactionState.COMMITTED
                else:
                    await asyncio.sleep(RETRY_S)
        await client.close()

    def check(self) -> list[str]:
        times: Counter[Any] = Counter(id_ for each in self._work if each.committed for id_ in each.ids)
        return [
            f"80: {id_} of {TOPIC} is processed {count} times in committed transactions"
            for id_, count in times.items() if count > 1
        ]  # fmt: skip
