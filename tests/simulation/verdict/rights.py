"""Who used a right when: the judge of grants (docs/design/invariants.md, 46 and 47), in a cluster that is secured.

It hears of each change of the grants in the moment in which it is durable, and of each entry that a broker passes to a
topic's log, and each delivery, with the role that is connected. A use without the right is a violation

    HEARD_S after the broker has read the grants without it
    HEARD_S after the change, where nothing disturbs the metadata and the broker (UNDISTURBED kinds alone, or `calm`)
    REACH_S after the change in any case: a broker that hears no metadata for longer has given its topics up

and at once by a role that never had it. A broker that stood still is late by so long.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import Any
from unittest import mock

from magnetar.broker.subscription.core.dispatch import Delivery
from magnetar.broker.subscription.pump import SubscriptionDeliveryPump
from magnetar.broker.topic.producer import TopicProducer
from magnetar.metadata import paths
from magnetar.metadata.records import GrantsRecord, decode_record
from magnetar.metadata.store import MetadataStore, PutNode
from magnetar.runtime.access import Principal
from magnetar.runtime.sim.loop import CURRENT_PROCESS
from magnetar.runtime.sim.world import Simulation

HEARD_S = 1.0
REACH_S = 40.0
"""A session of 5 s, and `session_lost_grace_s` of 30 s."""
PATH = paths.grants("public", "default")

DISTURBING = frozenset({
    "reset", "delay", "metadata-slow", "cut", "half-open", "partition", "one-way", "isolate", "flap", "clog",
    "unplug-broker", "pause-broker", "blackout", "metadata-down", "unheard", "mute", "expire-broker", "cancel",
    "dead-task", "rolling-restart",
})  # fmt: skip
"""Kinds of faults that may come between the metadata and a broker."""

Key = tuple[str, str]
"""Role and action."""


class RightsJudge:
    """`subscriptions`: role → the one that it uses."""

    def __init__(self, simulation: Simulation, kinds: Collection[str], subscriptions: dict[str, str]) -> None:
        self._simulation = simulation
        self._subscriptions = subscriptions
        self.calm = not DISTURBING & set(kinds)
        self.violations: list[str] = []
        self._lost: dict[Key, float] = {
            (role, action): -inf for role in subscriptions for action in ("produce", "consume")
        }
        self._read: dict[tuple[str, Key], float] = {}  # by node: when it had read that the right is lost
        self._resumed: dict[str, float] = {}
        self.uses = self.changes = 0
        go_on = simulation.resume

        def resumed(name: str) -> None:
            go_on(name)
            self._resumed[name] = simulation.loop.elapsed_s

        simulation.resume = resumed  # type: ignore[method-assign]

    # ------------------------------------------------------------------ the grants
    def committed(self, operation: object) -> None:
        """Any operation of the metadata."""
        if getattr(operation, "path", "") != PATH:
            return
        record = (
            decode_record(operation.value, GrantsRecord, PATH) if isinstance(operation, PutNode) else GrantsRecord()
        )
        self.changes += 1
        for key in self._lost:
            if self._may(record, key):
                self._lost[key] = inf
                self._read = {each: at for each, at in self._read.items() if each[1] != key}
            elif self._lost[key] == inf:
                self._lost[key] = self._simulation.loop.elapsed_s
        self._simulation.add_line(f"grants: {record.roles} {record.subscriptions}")

    def _may(self, record: GrantsRecord, key: Key) -> bool:
        role, action = key
        listed = record.subscriptions.get(self._subscriptions[role]) if action == "consume" else None
        granted = any(action in given.get(role, ()) for given in (record.roles, *record.topics.values()))
        return granted and (not listed or role in listed)

    def listening(self, node: str, store: MetadataStore) -> MetadataStore:
        """The store of a broker, which reads the grants by it."""
        get = store.get

        async def seen(path: str) -> Any:
            found = await get(path)
            if path == PATH:
                record = GrantsRecord() if found is None else decode_record(found.value, GrantsRecord, PATH)
                for key, lost in self._lost.items():
                    if lost != inf and not self._may(record, key):
                        self._read.setdefault((node, key), self._simulation.loop.elapsed_s)
            return found

        store.get = seen  # type: ignore[method-assign]
        return store

    # ------------------------------------------------------------------ uses
    def used(self, number: int, principal: Principal, action: str) -> None:
        """46 and 47: an entry or a delivery, in the process that runs now."""
        key = principal.name, action
        process: Any = CURRENT_PROCESS.get()
        over_s = (process.world.clock.wall_ms() - principal.expires_ms) / 1000 if principal.expires_ms else 0.0
        if over_s > HEARD_S and self._simulation.loop.elapsed_s > self._resumed.get(process.node, -inf) + HEARD_S:
            self._violated(f"{number}: {process.node} lets {principal} {action} {over_s:.3f} s after its token's end")
        lost = self._lost.get(key)
        if lost is None:
            return
        self.uses += 1
        if lost == inf:
            return
        now, node = self._simulation.loop.elapsed_s, process.node
        late = self._resumed.get(node, -inf)
        read = self._read.get((node, key), inf)
        ends = lost + (HEARD_S if self.calm else REACH_S)
        if now > max(late + HEARD_S, min(ends, read + HEARD_S)):
            self._violated(f"{number}: {node} lets {principal} {action} {now - lost:.3f} s after that right was lost")

    def _violated(self, text: str) -> None:
        self._simulation.add_line(f"VIOLATION {text}")
        self.violations.append(text)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """As long as it lasts the judge sees what brokers store and deliver."""
        publish, deliver = TopicProducer.publish, SubscriptionDeliveryPump._deliver

        def published(producer: TopicProducer, client_part: bytes) -> bool:
            taken = publish(producer, client_part)
            if taken:
                self.used(46, producer.principal, "produce")
            return taken

        def delivered(pump: SubscriptionDeliveryPump, deliveries: Sequence[Delivery]) -> None:
            for id_ in dict.fromkeys(each.member.id for each in deliveries):
                self.used(47, pump._subscription.consumers[id_].principal, "consume")
            deliver(pump, deliveries)

        with (
            mock.patch.object(TopicProducer, "publish", published),
            mock.patch.object(SubscriptionDeliveryPump, "_deliver", delivered),
        ):
            yield
