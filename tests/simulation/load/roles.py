"""Roles beside the load of a secured cluster: one whose rights come and go, and callers that have none.

`changing` publishes and consumes all the while; strikes of the kind `revoke` take its rights (strikes/operations.py).
Its messages are of the history: what it was told is stored must come on every subscription (48), also on its own,
which it drains once its rights are back (49). `intruders` try what they may not do, with tokens without grants, of
another key, and expired: whatever works is a violation (46, 47).
In the end, when all is healed, the rights are taken and given back once more, and the judge is `calm`: HEARD_S counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from magnetar.broker.subscription.core.redelivery_backoff import TOPIC_PROPERTY as DEAD_LETTER_TOPIC
from magnetar.client.admin import AdminClient
from magnetar.client.client import Client
from magnetar.client.common.errors import ProducerQueueIsFull
from magnetar.client.connect.authentication import AuthenticationToken
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto.errors import MagnetarError
from tests.simulation.cluster import ADMIN, CLIENT, Cluster, GaveUp
from tests.simulation.security import ADMIN_ROLE, APP, CHANGING, OTHER_KEY, READING, STRANGER_ROLE, Security
from tests.simulation.strikes.operations import NAMESPACE, TOPIC, taken_and_given_back

if TYPE_CHECKING:
    from tests.simulation.load.topics import TopicLoad

PAUSE_S = 0.6
"""Mean, between two messages of `changing`."""
RETRY_S = 0.3
INTRUDE_S = 4.0
"""Mean, between two visits of a caller without rights."""
LETTERS = f"{TOPIC}-letters"
BOTH = ["produce", "consume"]


class Roles:
    """Of a TopicLoad, whose history and programs it shares."""

    def __init__(self, cluster: Cluster, security: Security, load: TopicLoad) -> None:
        self._cluster = cluster
        self._security = security
        self._load = load
        self._rng: random.Random = cluster.simulation.random_generator("roles")
        self._over = False
        self._number = 0

    # ------------------------------------------------------------------ the beginning
    async def grant(self) -> None:
        """Before the load begins."""

        async def grant() -> None:
            world = self._cluster.simulation.world(ADMIN)
            credentials = self._security.of(ADMIN_ROLE)
            async with AdminClient(self._cluster.service_url, world=world, authentication=credentials) as admin:
                for role in (APP, CHANGING):
                    await admin.grant_namespace_permission(NAMESPACE, role, BOTH)
                await admin.grant_namespace_permission(NAMESPACE, READING, ["consume"])

        await self._cluster.simulation.spawn(ADMIN, grant())

    async def begin(self) -> list[asyncio.Future[None]]:
        """Its subscription exists when this returns; the loops, which end with `finish`."""
        client = self._client(self._security.of(CHANGING))
        consumer = await self._load.in_client(self._subscribe(client))
        self._producing = self._load.in_client(self._produce(client))
        others = [self._consume(client, consumer), self._intrude()]
        return [self._producing, *map(self._load.in_client, others)]

    def _client(self, credentials: object) -> Client:
        world = self._cluster.simulation.world(CLIENT)
        return Client(self._cluster.service_url, credentials, 5, world=world)

    # ------------------------------------------------------------------ the role whose rights change
    async def _produce(self, client: Client) -> None:
        while not self._over:
            try:
                producer = await self._cluster.call("open a producer", client.create_producer(
                    TOPIC, batching_enabled=False, send_timeout_millis=20_000, max_pending_messages=20,
                ))  # fmt: skip
                while not self._over:
                    with contextlib.suppress(ProducerQueueIsFull):
                        self._load.send(producer, f"{CHANGING}:{self._number}")
                        self._number += 1
                    await asyncio.sleep(self._rng.expovariate(1.0 / PAUSE_S))
                await producer.flush()
                await producer.close()
            except MagnetarError as error:
                self._told("produce", error)
                await asyncio.sleep(RETRY_S)

    async def _subscribe(self, client: Client) -> Any:
        while True:
            try:
                return await self._cluster.call("subscribe", client.subscribe(
                    TOPIC, CHANGING, consumer_type=ConsumerType.Shared, initial_position=InitialPosition.Earliest,
                    receiver_queue_size=20,
                ))  # fmt: skip
            except MagnetarError as error:
                self._told("subscribe", error)
                await asyncio.sleep(RETRY_S)

    async def _consume(self, client: Client, consumer: Any) -> None:
        while True:
            try:
                message = await self._cluster.call("receive", consumer.receive())
                self._load.delivered(CHANGING, message)
                await consumer.acknowledge(message)
            except GaveUp:
                continue
            except MagnetarError as error:
                self._told("consume", error)
                await asyncio.sleep(RETRY_S)
                consumer = await self._subscribe(client)

    def _told(self, what: str, error: MagnetarError) -> None:
        self._cluster.simulation.add_line(f"{CHANGING} cannot {what}: {error!r}"[:200])

    # ------------------------------------------------------------------ who has no rights
    async def _intrude(self) -> None:
        security = self._security
        tokens: dict[str, Callable[[], str]] = {
            "without grants": lambda: security.token(STRANGER_ROLE),
            "of another key": lambda: security.token(APP, key=OTHER_KEY),
            "that is none": lambda: "none",
        }
        if security.clocks_agree:
            tokens["that has expired"] = lambda: security.token(APP, -5.0)
        while not self._over:
            await asyncio.sleep(self._rng.expovariate(1.0 / INTRUDE_S))
            which = self._rng.choice([*tokens, "of a reader"])
            token = security.token(READING) if which == "of a reader" else tokens[which]()
            await self._try(which, token)

    async def _try(self, which: str, token: str) -> None:
        url, world = self._cluster.service_url, self._cluster.simulation.world(CLIENT)
        credentials = AuthenticationToken(token)
        client = Client(url, credentials, 2, world=world)
        admin = AdminClient(url, timeout_s=2.0, world=world, authentication=credentials)
        acts = {
            "publish": client.create_producer(TOPIC),
            "name a topic that the broker writes to": admin.create_subscription(
                TOPIC, "letters", properties={DEAD_LETTER_TOPIC: LETTERS}
            ),
        }
        if which != "of a reader":
            acts["consume"] = client.subscribe(TOPIC, "intruder")
        for what, act in acts.items():
            try:
                await act
            except MagnetarError as error:
                self._cluster.simulation.add_line(f"a token {which} cannot {what}: {error!r}"[:200])
            else:
                self._load.violations.append(f"46: a caller with a token {which} could {what}")
        await admin.close()
        await client.close()

    # ------------------------------------------------------------------ the end
    async def finish(self) -> None:
        """All is healed: takes the rights once more, under the judge's strictest bound, and gives them back (49)."""
        self._cluster.rights.calm = True
        await taken_and_given_back(self._cluster, BOTH, 1.5)
        since = self._number
        while not self._stored(since):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        self._over = True
        await self._producing

    def _stored(self, since: int) -> bool:
        return any(f"{CHANGING}:{number}" in self._load.history.stored for number in range(since, self._number))
