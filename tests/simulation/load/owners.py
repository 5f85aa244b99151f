"""Roles that know ids of others, beside the load of a secured cluster.

`owner` runs transactions, named ones, batches of a sink and halves, in a topic of its own tenant and in one that
`thief` may write and read, too. The thief knows every id as soon as the owner has it. It tries to publish, acknowledge,
commit, abort, prepare, learn and settle with these ids and with some near them, uses the owner's names of sinks and
transactions, and asks for what is in the other tenant.

Each try has a typed refusal, or no answer where something fails. What the thief does under a name of the owner is the
thief's own. Nothing of it ends, hides, or acknowledges anything of the owner's: verdict/owners.py, and `finish`, which
reads both topics and what the owner's subscription still has.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from magnetar.client.admin import AdminClient
from magnetar.client.client import Client, Output
from magnetar.client.common.errors import Timeout
from magnetar.client.core.transaction import TransactionState
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.transactions.coordinators import Batch, BatchOutcome
from magnetar.client.transactions.halves import Decision, HalfCheck
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import AlreadyExists, MagnetarError, from_wire
from magnetar.proto.policies import Policies
from magnetar.proto.states import TxnId
from tests.simulation.cluster import ADMIN, CLIENT, Cluster, GaveUp
from tests.simulation.load.transactions import outcome_of, value_of
from tests.simulation.security import ADMIN_ROLE, OWNER, THIEF, Security
from tests.simulation.verdict.owners import Owners

TENANT, OWN_NAMESPACE, SHARED_NAMESPACE = "others", "others/own", "public/shared"
OWN, SHARED = f"persistent://{OWN_NAMESPACE}/mine", f"persistent://{SHARED_NAMESPACE}/both"
NAME, SINK, QUERY, GROUP, SUBSCRIPTION = "app", "sales", "q", "shop", "s"
FAR = 1 << 40
"""A number of a batch after all that the owner writes."""
FED = 20
TIMEOUT_S = 10.0
RETRY_S = 0.5
STILL_S = 3.0
KEPT = Policies(retention_minutes=-1, retention_mib=-1)
KINDS = ("plain", "named", "batch", "half")
BOTH = ["produce", "consume"]
FORGED = "forged"
REFUSALS = ("InvalidRequest", "InvalidConfiguration", "Unauthorized", "AuthorizationError")
"""Of a broker and of the SDK."""
TELLING = (
    "UnknownError", "InternalError", "TransactionEnded", "TransactionFenced", "TransactionConflict", "SinkFenced",
    "HalfParked",
)  # fmt: skip
"""Without a type, or more than who has not begun it may know."""


@dataclass(slots=True)
class Deed:
    """What the owner does in one transaction."""

    label: str
    txn: TxnId | None = None
    outcome: bool | None = None  # committed, aborted; None: not told
    sent: list[tuple[str, str]] = field(default_factory=list)  # topic, value
    acknowledged: list[str] = field(default_factory=list)


class OwnersLoad:
    """`grant`, `begin` and `finish` frame the other load."""

    def __init__(self, cluster: Cluster, security: Security) -> None:
        self._cluster = cluster
        self._security = security
        self._simulation = cluster.simulation
        self.judge: Owners = cluster.owners
        self.violations: list[str] = []
        self.refused = 0
        self._deeds: list[Deed] = []
        self._batch, self._far = 0, FAR
        self._over = False
        self._owner: asyncio.Future[None]
        self._thief: asyncio.Future[None]

    # ------------------------------------------------------------------ the beginning
    async def begin(self) -> None:
        await self._simulation.spawn(ADMIN, self._grant())
        await self._simulation.spawn(CLIENT, self._feed())
        self._owner = self._simulation.spawn(CLIENT, self._own())
        self._thief = self._simulation.spawn(CLIENT, self._steal())

    async def _grant(self) -> None:
        own, world = self._security.of(ADMIN_ROLE), self._simulation.world(ADMIN)
        async with AdminClient(self._cluster.service_url, world=world, authentication=own) as admin:
            with contextlib.suppress(AlreadyExists):
                await admin.create_tenant(TENANT)
            for namespace, roles in ((OWN_NAMESPACE, (OWNER,)), (SHARED_NAMESPACE, (OWNER, THIEF))):
                with contextlib.suppress(AlreadyExists):
                    await admin.create_namespace(namespace)
                await admin.set_namespace_policies(namespace, KEPT)  # what is acknowledged is read in the end
                for role in roles:
                    await admin.grant_namespace_permission(namespace, role, BOTH)

    def _client(self, role: str, timeout_s: int) -> Client:
        world = self._simulation.world(CLIENT)
        return Client(self._cluster.service_url, self._security.of(role), timeout_s, world=world)

    async def _again(self, what: str, work: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await self._cluster.call(what, work())
            except MagnetarError as error:
                self._simulation.add_line(f"owners: cannot {what}: {error!r}"[:200])
                await asyncio.sleep(RETRY_S)

    async def _feed(self) -> None:
        """The subscriptions exist, and there is something to acknowledge in transactions."""
        client = self._client(OWNER, 15)
        for topic in (OWN, SHARED):
            await (await self._again("subscribe", lambda topic=topic: self._subscribe(client, topic))).close()
        producer = await self._again("open a producer", lambda: client.create_producer(OWN))
        for number in range(FED):
            await self._again("feed", lambda number=number: producer.send(b"feed:%d " % number))
        await client.close()

    async def _subscribe(self, client: Client, topic: str, name: str = SUBSCRIPTION) -> Any:
        return await client.subscribe(
            topic, name, consumer_type=ConsumerType.Shared, initial_position=InitialPosition.Earliest,
            receiver_queue_size=5, negative_ack_redelivery_delay_ms=300,
        )  # fmt: skip

    # ------------------------------------------------------------------ who began it
    async def _own(self) -> None:
        rng = self._simulation.random_generator("owner")
        while not self._over:
            client = self._client(OWNER, 5)
            client.on_check(GROUP)(_commits)
            try:
                consumer = await self._subscribe(client, OWN)
                producers = {topic: await client.create_producer(topic) for topic in (OWN, SHARED)}
                while not self._over:
                    kind = rng.choice(KINDS)
                    deed = Deed(f"{kind}-{len(self._deeds)}")
                    self._deeds.append(deed)
                    work = self._prepare(client, producers, deed, rng) if kind == "half" else self._transact(
                        client, producers, consumer, deed, kind, rng
                    )  # fmt: skip
                    await work
                    await asyncio.sleep(rng.uniform(0.0, 0.5))
            except (MagnetarError, GaveUp) as error:
                self._simulation.add_line(f"owners: the owner begins anew: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(MagnetarError):
                    await client.close()

    async def _transact(
        self, client: Client, producers: dict[str, Any], consumer: Any, deed: Deed, kind: str, rng: random.Random
    ) -> None:
        batch = Batch(SINK, QUERY, self._batch)
        if kind == "batch":
            txn = await client.batch_transaction(batch, TIMEOUT_S)
            if txn is None:  # an earlier try is committed, and was not told
                self._batch += 1
                return
        else:
            txn = await client.transaction(TIMEOUT_S, name=NAME if kind == "named" else None)
        deed.txn = txn.id
        try:
            for topic, producer in producers.items():
                deed.sent.append((topic, deed.label))
                await producer.send(f"{deed.label} ".encode(), txn=txn)
            with contextlib.suppress(Timeout):
                message = await consumer.receive(100)
                deed.acknowledged.append(value_of(message))
                await consumer.acknowledge(message, txn=txn)
            await asyncio.sleep(rng.uniform(0.1, 1.0))  # the thief knows its id
            if kind == "batch":
                await txn.prepare()
                outcome = await client.commit_batch(batch, [txn.id])
                if outcome is BatchOutcome.COMMITTED:  # else an earlier try is, perhaps of this very transaction
                    deed.outcome = True
                self._batch += 1
            else:
                await (txn.abort() if rng.random() < 0.2 else txn.commit())
        finally:
            if kind != "batch":
                deed.outcome = outcome_of(txn.state)
            if deed.outcome is not True:
                consumer.redeliver_unacknowledged_messages()

    async def _prepare(self, client: Client, producers: dict[str, Any], deed: Deed, rng: random.Random) -> None:
        outputs = [Output(f"{deed.label} ".encode(), producer=each) for each in producers.values()]
        half = await client.half(outputs, group=GROUP, check_key=deed.label)
        deed.txn, deed.sent = half.id, [(topic, deed.label) for topic in producers]
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        await half.commit()
        deed.outcome = True

    # ------------------------------------------------------------------ who knows of it
    async def _steal(self) -> None:
        rng = self._simulation.random_generator("thief")
        while not self._over:
            client = self._client(THIEF, 2)
            client.on_check(GROUP)(self._asked)
            try:
                producer, consumer = await client.create_producer(SHARED), await self._subscribe(client, SHARED, THIEF)
                while not self._over:
                    deed = next((each for each in reversed(self._deeds) if each.txn is not None), None)
                    if deed is not None and deed.txn is not None:
                        await self._try(client, producer, consumer, self._guess(deed.txn, rng), rng)
                    await asyncio.sleep(rng.uniform(0.05, 0.3))
            except (MagnetarError, GaveUp) as error:
                self._simulation.add_line(f"owners: the thief begins anew: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(MagnetarError):
                    await client.close()

    def _guess(self, txn: TxnId, rng: random.Random) -> TxnId:
        """One that it knows, or one near it that is not its own."""
        if rng.random() < 0.9:
            return txn
        near = TxnId(txn.most, txn.least + rng.choice((-2, -1, 1, 2)))
        return txn if self.judge.role_of(near) == THIEF else near

    async def _asked(self, half: HalfCheck) -> Decision:
        self.violations.append(f"97: {THIEF} is asked about the half {half.id} with {half.check_key}")
        return Decision.ROLLBACK

    async def _try(self, client: Client, producer: Any, consumer: Any, txn: TxnId, rng: random.Random) -> None:
        id_, ask = wire.TransactionId(most=txn.most, least=txn.least), client.transactions.coordinators.ask
        forged = client.transactions.make_open_transaction(txn, TIMEOUT_S)

        async def publish() -> Any:
            return await producer.send(f"{FORGED} {txn}".encode(), txn=forged)

        async def acknowledge() -> Any:
            await producer.send(b"plain")
            message = await consumer.receive(1000)
            await consumer.acknowledge(message, txn=forged)

        async def end(verb: Any) -> Any:
            reply = await ask(txn.most, "End", wire.EndRequest(items=[wire.EndItem(txn=id_, verb=verb)]))
            return _told(reply.items[0])

        async def status() -> Any:
            return _told((await ask(txn.most, "Status", wire.StatusRequest(txns=[id_]))).items[0])

        async def commit_batch() -> Any:
            self._far += 1  # later than what it has committed under that name itself
            sink = wire.SinkTag(sink_id=SINK, query_id=QUERY, batch=self._far)
            await ask(txn.most, "CommitBatch", wire.CommitBatchRequest(items=[wire.EndItem(txn=id_)], sink=sink))

        async def settle() -> Any:
            item = wire.Settlement(txn=id_, topic=SHARED, committed=rng.random() < 0.5)
            await ask(txn.most, "Settle", wire.SettleRequest(items=[item]))

        async def join() -> Any:
            await ask(txn.most, "Join", wire.JoinRequest(items=[wire.JoinItem(txn=id_, topic=SHARED, owner=OWNER)]))

        async def abort_open() -> Any:
            await ask(txn.most, "AbortOpen", wire.AbortOpenRequest(items=[wire.AbortOpenItem(txn=id_)]))

        tries: dict[str, Callable[[], Awaitable[Any]]] = {
            "publish": publish, "acknowledge": acknowledge, "status": status, "commit batch": commit_batch,
            "commit": lambda: end(wire.EndItem.COMMIT), "abort": lambda: end(wire.EndItem.ABORT),
            "prepare": lambda: end(wire.EndItem.PREPARE), "settle": settle, "join": join, "abort open": abort_open,
            "commit a half": lambda: client.commit_half(txn), "roll a half back": lambda: client.rollback_half(txn),
            "publish there": lambda: client.create_producer(OWN), "consume there": lambda: self._subscribe(client, OWN),
            "read there": lambda: client.create_reader(OWN, MessageId.earliest),
            "delete it": lambda: self._administrate("delete_topic", OWN, force=True),
            "skip": lambda: self._administrate("skip_messages", OWN, SUBSCRIPTION),
            "delete the subscription": lambda: self._administrate("delete_subscription", OWN, SUBSCRIPTION, force=True),
            "peek": lambda: self._administrate("peek_messages", OWN, SUBSCRIPTION),
        }  # fmt: skip
        its_own: dict[str, Callable[[], Awaitable[Any]]] = {
            "batch": lambda: client.commit_batch(Batch(SINK, QUERY, FAR), []),
            "name": lambda: client.transaction(TIMEOUT_S, name=NAME)._begin(),
        }
        if rng.random() < 0.1:
            await self._cluster.call("the same name", its_own[rng.choice(list(its_own))]())
            return
        what = rng.choice(list(tries))
        try:
            found = await self._cluster.call(what, tries[what]())
        except (MagnetarError, GaveUp) as error:
            self._refusal(what, txn, error)
        else:
            if found != "ABORTED":  # of an id that no table has any more
                self.violations.append(f"60: {THIEF} could {what} with {txn}, which {OWNER} began: {found}")

    def _refusal(self, what: str, txn: TxnId, error: MagnetarError) -> None:
        """As of an id that was never given, or for lack of rights; or there is no answer."""
        self._simulation.add_line(f"owners: {THIEF} cannot {what} with {txn}: {error!r}"[:200])
        kind = type(error).__name__
        self.refused += kind in REFUSALS
        if kind in TELLING:
            self.violations.append(f"60: {THIEF} cannot {what} with {txn}, and is told {error!r}")

    async def _administrate(self, method: str, *args: Any, **options: Any) -> Any:
        own, world = self._security.of(THIEF), self._simulation.world(CLIENT)
        async with AdminClient(self._cluster.service_url, timeout_s=2.0, world=world, authentication=own) as admin:
            return await getattr(admin, method)(*args, **options)

    # ------------------------------------------------------------------ the end
    async def finish(self) -> list[str]:
        """After healing; what was violated."""
        self._over = True
        await asyncio.gather(self._owner, self._thief)
        await self._simulation.spawn(CLIENT, self._look())
        return self.violations + self.judge.check(self._cluster.coordination.durable)

    async def _look(self) -> None:
        client = self._client(OWNER, 15)
        for deed in self._deeds:
            while deed.outcome is None and deed.txn is not None:
                state = await self._again("ask", lambda txn=deed.txn: client.transaction_status(txn))
                deed.outcome = outcome_of(state)
                if state is TransactionState.PREPARED:  # its batch was not committed, or that was not told
                    with contextlib.suppress(MagnetarError):
                        await client.abort_transaction(deed.txn)
                elif deed.outcome is None:
                    await asyncio.sleep(RETRY_S)
        shown: dict[str, list[str]] = {topic: await self._shown(client, topic) for topic in (OWN, SHARED)}
        for deed in self._deeds:
            for topic, value in deed.sent:
                times = shown[topic].count(value)
                if times != bool(deed.outcome):
                    self.violations.append(f"60: {value} {deed.txn} ({deed.outcome}) is shown {times} times")
        if any(FORGED in values for values in shown.values()):
            self.violations.append(f"60: what {THIEF} sent in a transaction of {OWNER} is shown")
        fed = {f"feed:{number}" for number in range(FED)}
        done = {value for deed in self._deeds if deed.outcome for value in deed.acknowledged} & fed
        left = {*await self._left(client, fed - done)} & fed
        if left & done or left | done != fed:
            self.violations.append(f"60: commits acknowledge {sorted(done)}, and {sorted(left)} are left")
        await client.close()

    async def _shown(self, client: Client, topic: str) -> list[str]:
        """All of it: what is committed comes when all before it has ended."""
        reader = await self._again("read", lambda: client.create_reader(topic, MessageId.earliest))
        found: dict[Any, str] = {}
        wanted = {value for deed in self._deeds if deed.outcome for where, value in deed.sent if where == topic}
        while True:
            try:
                message = await reader.read_next(int(1000 * STILL_S))
                found[str(message.message_id())] = value_of(message)
            except Timeout:
                if wanted <= {*found.values()}:
                    return list(found.values())

    async def _left(self, client: Client, wanted: set[str]) -> list[str]:
        consumer = await self._again("subscribe", lambda: self._subscribe(client, OWN))
        found: list[str] = []
        while True:
            try:
                message = await consumer.receive(int(1000 * STILL_S))
                found.append(value_of(message))
                await consumer.acknowledge(message)
            except Timeout:
                if wanted <= {*found}:
                    return found


async def _commits(half: HalfCheck) -> Decision:
    return Decision.COMMIT


def _told(item: wire.TransactionReply) -> str:
    if item.HasField("error"):
        raise from_wire(item.error)
    return wire.TransactionState.Name(item.state)
