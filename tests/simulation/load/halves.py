"""Load of half messages, beside that of transactions (load/transactions.py), in its topics.

Programs of one group prepare halves and store in their common database what is decided of each. They commit, roll back,
or leave it to the check-back; some end without a word, and their next life answers. Checks fail, hang, or cannot say.
Of some halves nothing is decided until they are parked: an operator decides them, and parks and revives others. Some
programs say the opposite of what the check says: then either may come true, once. After the faults every half must end
(verdict/halves.py).
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from magnetar.client.admin import AdminClient
from magnetar.client.client import Client, Output
from magnetar.client.common.errors import TransactionAborted
from magnetar.client.core.transaction import TransactionState
from magnetar.client.transactions.halves import Decision, HalfCheck
from magnetar.proto.errors import MagnetarError, TransactionEnded
from magnetar.proto.statistics import HalfState
from tests.simulation.cluster import ADMIN, Cluster, GaveUp
from tests.simulation.verdict.halves import HalfHistory, HalfSeen
from tests.simulation.verdict.transactions import PLAIN

GROUP = "shop"
MESSAGES_MAX = 3
FATES = {
    "commits": 0.35, "rolls back": 0.15, "leaves it decided": 0.25, "leaves it undecided": 0.1, "contradicts": 0.15,
}  # fmt: skip
"""What a program does after `prepare`, and how often."""
FAILS, HANGS = 0.1, 0.05
"""Of the checks."""
RETRY_S = 0.5
LIVES_S = 4.0
"""Mean life of a program while there are faults."""


class HalfLoad:
    def __init__(
        self, cluster: Cluster, topics: list[str], client: Callable[[], Client], encode: Callable[[str], bytes]
    ) -> None:
        self._cluster = cluster
        self._simulation = cluster.simulation
        self._topics = topics
        self._client = client
        self._encode = encode
        self._is_over = False  # nothing is prepared any more
        self._preparing = 0  # programs that may not have decided what they prepare
        self._ended = asyncio.Event()  # and nothing is asked
        self.history = HalfHistory()
        rng = self._simulation.random_generator("halves")
        self.programs = rng.choice((1, 2))
        self._pause_s = cluster.options.seconds / rng.choice((5, 15))

    @property
    def figures(self) -> dict[str, int]:
        halves = list(self.history.halves.values())
        return {
            "halves": len(halves), "halves_committed": sum(each.outcome is Decision.COMMIT for each in halves),
            "halves_asked": sum(each.asked for each in halves), "halves_parked": len(self.history.parked),
        }  # fmt: skip

    def over(self) -> None:
        self._is_over = True

    def end(self) -> None:
        self._ended.set()

    # ------------------------------------------------------------------ programs
    async def run(self, number: int) -> None:
        """One program after the other, until `end`."""
        rng = self._simulation.random_generator(f"program {number}")
        while not self._ended.is_set():
            client = self._client()
            client.on_check(GROUP)(partial(self._check, rng))
            try:
                lives_until = self._simulation.loop.time() + rng.expovariate(1.0 / LIVES_S)
                while not self._is_over and self._simulation.loop.time() < lives_until:
                    self._preparing += 1
                    try:
                        await self._prepare(client, rng)
                    finally:
                        self._preparing -= 1
                    await asyncio.sleep(rng.expovariate(1.0 / self._pause_s))
                if self._is_over:
                    await self._ended.wait()
            except (MagnetarError, GaveUp) as error:
                self._simulation.add_line(f"program {number}: {error!r}"[:300])
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(MagnetarError):
                    await client.close()

    async def _prepare(self, client: Client, rng: random.Random) -> None:
        number = len(self.history.halves)
        sent = {f"h{number}.{at}:0:{PLAIN}": rng.choice(self._topics) for at in range(rng.randint(1, MESSAGES_MAX))}
        fate = rng.choices(list(FATES), list(FATES.values()))[0]
        seen = self.history.begin(sent)
        try:
            producers = {
                topic: await self._cluster.call("producer", client.create_producer(topic))
                for topic in dict.fromkeys(sent.values())
            }
            outputs = [Output(self._encode(value), producer=producers[topic]) for value, topic in sent.items()]
            half = await self._cluster.call("prepare", client.half(outputs, group=GROUP, check_key=seen.key))
        except (MagnetarError, GaveUp):
            seen.decide(Decision.ROLLBACK)  # as its client does, and a check of a program without a row
            raise
        seen.id = half.id
        self._simulation.add_line(f"half {seen.key} is {half.id}: its program {fate}")
        for producer in producers.values():
            await self._cluster.call("close", producer.close())
        match fate:
            case "commits":
                await self._end(seen, Decision.COMMIT, half.commit())
            case "rolls back":
                await self._end(seen, Decision.ROLLBACK, half.rollback())
            case "leaves it decided":
                seen.row = rng.choice((Decision.COMMIT, Decision.ROLLBACK))
            case "contradicts":
                seen.row, says = rng.sample((Decision.COMMIT, Decision.ROLLBACK), 2)
                await asyncio.sleep(rng.uniform(0.0, 3.0))
                await self._end(seen, says, half.commit() if says is Decision.COMMIT else half.rollback())

    async def _end(self, seen: HalfSeen, decision: Decision, work: Any) -> None:
        seen.decide(decision)
        try:
            await self._cluster.call(f"end of half {seen.key}", work)
        except TransactionAborted:
            seen.told.add(Decision.ROLLBACK)
        except TransactionEnded:
            seen.told.add(Decision.COMMIT)
        else:
            seen.told.add(decision)
        self._simulation.add_line(f"half {seen.key} is told to be {sorted(each.name for each in seen.told)}")

    async def _check(self, rng: random.Random, half: HalfCheck) -> Decision:
        seen = self.history.halves[half.check_key]
        seen.asked += 1
        content = {(each.data or b"").split(b" ")[0].decode(): each.topic.rpartition("/")[2] for each in half.messages}
        wanted = {value: topic.rpartition("/")[2] for value, topic in seen.sent.items()}
        if content != wanted or seen.id not in (None, half.id):
            self.history.violations.append(f"98: {half} is asked about, and half {seen.key} {seen.id} is {wanted}")
        lot = rng.random()
        if lot < FAILS:
            raise RuntimeError("the database is not there")
        if lot < FAILS + HANGS:
            await asyncio.sleep(60.0)
        if seen.row is None:
            return Decision.UNKNOWN
        self._simulation.add_line(f"half {seen.key} is asked about: {seen.row.name}")
        seen.decide(seen.row)
        return seen.row

    # ------------------------------------------------------------------ operators
    async def operate(self) -> None:
        """Parks, revives and decides halves, until `over`."""
        rng = self._simulation.random_generator("halves operator")
        while not self._is_over:
            with contextlib.suppress(MagnetarError, GaveUp):
                await self._cluster.call("operator", self._operate(rng))
            await asyncio.sleep(rng.expovariate(0.25 / self._pause_s))

    async def _operate(self, rng: random.Random) -> None:
        async with self._admin() as admin:
            rows = [each for part in await admin.all_halves() for each in part.items]
            if not rows:
                return
            row = rng.choice(rows)
            if row.state is not HalfState.PARKED:
                await admin.park_half(row.half)
            elif rng.random() < 0.5:
                await admin.revive_half(row.half)
            else:
                await self._decide(admin, row.half, row.check_key, rng)

    async def settle(self) -> None:
        """Until every half has an outcome: what is parked is revived, or decided."""
        rng = self._simulation.random_generator("halves settled")
        while True:
            preparing = self._preparing  # one that is answered after the question is open, too
            if not await self._open(rng) and not preparing:
                return
            await asyncio.sleep(RETRY_S)

    async def _open(self, rng: random.Random) -> bool:
        try:
            async with self._admin() as admin:
                rows = [each for part in await admin.all_halves() for each in part.items]
                for row in rows:
                    if row.state is not HalfState.PARKED:
                        continue
                    self.history.parked.add(row.check_key)
                    if rng.random() < 0.3 and self.history.halves[row.check_key].row is not None:
                        await admin.revive_half(row.half)
                    else:
                        await self._decide(admin, row.half, row.check_key, rng)
                return bool(rows)
        except MagnetarError as error:
            self._simulation.add_line(f"halves: {error!r}"[:300])
            return True

    async def _decide(self, admin: AdminClient, half: Any, key: str, rng: random.Random) -> None:
        seen = self.history.halves[key]
        row = seen.row or (rng.choice((Decision.COMMIT, Decision.ROLLBACK)) if seen.id is not None else None)
        if row is None:
            return  # its program waits for `prepare`
        seen.decide(row)
        await (admin.commit_half(half) if row is Decision.COMMIT else admin.rollback_half(half))

    def _admin(self) -> AdminClient:
        return AdminClient(self._cluster.service_url, timeout_s=5.0, world=self._simulation.world(ADMIN))

    # ------------------------------------------------------------------ the end
    async def learn(self) -> None:
        """How each half that was prepared ended; nothing is open."""
        client = self._client()
        for seen in self.history.halves.values():
            while seen.id is not None and seen.outcome is None:
                try:
                    state = await client.transaction_status(seen.id)
                except MagnetarError as error:
                    self._simulation.add_line(f"status of half {seen.key}: {error!r}"[:300])
                    await asyncio.sleep(RETRY_S)
                    continue
                seen.outcome = {
                    TransactionState.COMMITTED: Decision.COMMIT, TransactionState.ABORTED: Decision.ROLLBACK,
                }.get(state)  # fmt: skip
                if seen.outcome is None:
                    self.history.violations.append(f"98: half {seen.key} {seen.id} is {state.name}, and none is open")
                    break
        await client.close()
