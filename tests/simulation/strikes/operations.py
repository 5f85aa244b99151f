"""What happens to sessions, who comes and goes, and what operators do, while the load runs."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from magnetar.bookie.maintenance import marks
from magnetar.broker.cluster.ownership import cancel_broker_drain
from magnetar.client.admin import AdminClient
from magnetar.ledger import client as deletions
from magnetar.ledger.client import LedgerClient
from magnetar.metadata import paths
from magnetar.metadata.records import CLOSED, AuditorRecord, DepartingRecord, GrantsRecord
from magnetar.metadata.store import ANY_VERSION, MetadataStore, get_record, put_record, update_record
from magnetar.proto.errors import MagnetarError
from magnetar.proto.policies import Policies
from magnetar.runtime.access import LOCAL_PRINCIPAL
from magnetar.runtime.network import World
from magnetar.runtime.sim.world import NodeCrashed
from tests.simulation.cluster import METADATA, Cluster
from tests.simulation.security import ADMIN_ROLE, CHANGING

TOPIC = "persistent://public/default/simulated"
NAMESPACE = "public/default"
FEWEST = 3
"""Bookies that E of 3 needs."""


# ---------------------------------------------------------------------------------- sessions
def _expire(cluster: Cluster, node: str) -> None:
    sessions = cluster.service.sessions_of(node)
    cluster.simulation.add_line(f"fault: {len(sessions)} sessions of {node} end")

    async def end() -> None:
        for session in sessions:
            await cluster.service.end(session)

    cluster.simulation.spawn(METADATA, end())


def _expire_bookie(cluster: Cluster, rng: random.Random) -> None:
    _expire(cluster, rng.choice(cluster.bookie_names))


def _expire_broker(cluster: Cluster, rng: random.Random) -> None:
    _expire(cluster, cluster.owner() or rng.choice(cluster.broker_names))


def _expire_client(cluster: Cluster, rng: random.Random) -> None:
    _expire(cluster, "writer")


def _expire_auditor(cluster: Cluster, rng: random.Random) -> None:
    async def expire(world: World, store: MetadataStore) -> None:
        found = await get_record(store, paths.REPAIR_AUDITOR, AuditorRecord)
        if found is not None and found[0].name in cluster.observer.node_of:
            _expire(cluster, cluster.observer.node_of[found[0].name])

    _ask(cluster, "the auditor's session ends", expire)


# ---------------------------------------------------------------------------------- bookies come and go
def _joins(cluster: Cluster, rng: random.Random) -> None:
    cluster.background(cluster.up(cluster.add_bookie()))


def _leaves(cluster: Cluster, rng: random.Random) -> None:
    name = f"bookie-{cluster.options.loser + 1}"
    if name in cluster.bookies and name not in cluster.gone:
        cluster.simulation.add_line(f"fault: {name} goes for good")
        cluster.observer.disk_lost(name, cluster.bookies[name].id)
        cluster.go_away(name)
        _joins(cluster, rng)


def _decommission(cluster: Cluster, rng: random.Random) -> None:
    name = rng.choice(cluster.bookie_names)
    if name not in cluster.bookies:
        return
    bookie = cluster.bookies[name].id
    path = paths.departing_bookie(bookie)

    async def depart(world: World, store: MetadataStore) -> None:
        await put_record(store, path, DepartingRecord(bookie=bookie, since_ms=world.clock.wall_ms()), ANY_VERSION)

    async def stay(world: World, store: MetadataStore) -> None:
        if await store.get(path) is not None:
            await store.delete(path)

    _ask(cluster, f"decommission {name}", depart)
    if len(cluster.bookie_names) <= FEWEST or rng.random() < 0.5:
        cluster.on_heal.append(lambda: cluster.ask(f"{name} stays", stay))


# ---------------------------------------------------------------------------------- what operators do
def _ask(cluster: Cluster, what: str, work: Callable[[World, MetadataStore], Any]) -> None:
    async def ask() -> None:
        await cluster.ask(what, work)

    cluster.background(ask())


def _ask_broker(cluster: Cluster, what: str, work: Callable[[AdminClient], Any]) -> None:
    async def ask(world: World, store: MetadataStore) -> None:
        own = cluster.credentials(ADMIN_ROLE)
        async with AdminClient(cluster.service_url, timeout_s=5.0, world=world, authentication=own) as admin:
            await work(admin)

    _ask(cluster, what, ask)


def _drain(cluster: Cluster, rng: random.Random) -> None:
    """The owner of the topic, one that owns nothing, or all at once; again while it drains, and taken back half way.
    Some die while they move what they own."""
    if not cluster.broker_names:
        return
    one, other = cluster.owner() or cluster.broker_names[0], cluster.broker_names[-1]
    for name in rng.choice(([one], [other], list(cluster.broker_names))):
        for _ in range(rng.randint(1, 2)):
            cluster.background(_drain_now(cluster, name, waits=rng.random() < 0.5))
        if rng.random() < 0.3:
            cluster.later(rng.uniform(0.0, 0.3), cluster.simulation.crash, name)
        stay = partial(_undrain, name)
        if rng.random() < 0.7:
            cluster.later(rng.uniform(0.0, 4.0), _ask, cluster, f"undrain {name}", stay)
        cluster.on_heal.append(partial(cluster.ask, f"{name} drains no more", stay))


async def _drain_now(cluster: Cluster, name: str, *, waits: bool) -> None:
    """`waits`: for the broker's next look at its orders; else it looks at once."""

    async def order(world: World, store: MetadataStore) -> None:
        own = cluster.credentials(ADMIN_ROLE)
        async with AdminClient(cluster.service_url, timeout_s=5.0, world=world, authentication=own) as admin:
            await admin.drain_broker(name)

    ordered, broker = await cluster.ask(f"drain {name}", order), cluster.brokers.get(name)
    if waits or not ordered or broker is None or not cluster.simulation.is_node_running(name):
        return
    try:
        await cluster.simulation.spawn(name, broker.topic_manager.apply_drain_order())
    except (MagnetarError, NodeCrashed) as error:
        cluster.simulation.add_line(f"{name} does not drain: {error!r}"[:300])


async def _undrain(name: str, world: World, store: MetadataStore) -> None:
    await cancel_broker_drain(store, name)


def _unload(cluster: Cluster, rng: random.Random) -> None:
    _ask_broker(cluster, "unload the topic", lambda admin: admin.unload_topic(TOPIC))


def _set_persistence(cluster: Cluster, rng: random.Random) -> None:
    ensemble, write, ack = rng.choice(((3, 3, 2), (3, 2, 2), (2, 2, 2), (3, 3, 3)))

    async def change(admin: AdminClient) -> None:
        quorums = Policies(ensemble_size=ensemble, write_quorum=write, ack_quorum=ack)
        await admin.set_namespace_policies(NAMESPACE, quorums)

    _ask_broker(cluster, f"set-persistence {ensemble}/{write}/{ack}", change)


def _recover(cluster: Cluster, rng: random.Random) -> None:
    open_ = [ledger for ledger, record in cluster.observer.records.items() if record.state != CLOSED]
    if not open_:
        return
    ledger = rng.choice(open_)

    async def recover(world: World, store: MetadataStore) -> None:
        client = LedgerClient(await cluster.joined(world), store)
        try:
            reader = await client.recover(ledger)
            cluster.observer.ended(ledger, reader.last_entry, "a recoverer")
        finally:
            await client.close()

    _ask(cluster, f"recover {ledger}", recover)


def _delete_ledger(cluster: Cluster, rng: random.Random) -> None:
    closed = [ledger for ledger, record in cluster.observer.records.items() if record.state == CLOSED]
    if closed:
        ledger = rng.choice(closed)
        _ask(cluster, f"delete ledger {ledger}", lambda world, store: deletions.delete_ledgers(store, [ledger]))


def _repair_off(cluster: Cluster, rng: random.Random) -> None:
    def switch(on: bool) -> Callable[[World, MetadataStore], Any]:
        return lambda world, store: marks.set_repair_enabled(store, on)

    _ask(cluster, "repair is switched off", switch(False))
    cluster.on_heal.append(lambda: cluster.ask("repair is switched on", switch(True)))


def _compact(cluster: Cluster, rng: random.Random) -> None:
    name = rng.choice(cluster.bookie_names)
    if name not in cluster.bookies or not cluster.simulation.is_node_running(name):
        return
    bookie = cluster.bookies[name]

    async def compact() -> None:
        try:
            answer = await cluster.simulation.spawn(
                name, bookie._answer_admin(
                    b'{"verb": "gc-start", "major": true, "force": true, "roll": true}', LOCAL_PRINCIPAL, local=True
                ),
            )
        except NodeCrashed:
            return
        cluster.simulation.add_line(f"{name} compacts: {answer.decode()}")

    cluster.background(compact())


# ---------------------------------------------------------------------------------- grants
WAYS = (("produce",), ("consume",), ("produce", "consume"), ("the list",))
"""What `changing` loses; the list is that of its subscription."""


def _changed(cluster: Cluster, lost: Sequence[str]) -> Callable[[], Awaitable[bool]]:
    """An operator writes the grants: everything but what is lost. Whether it worked."""
    left = tuple(each for each in ("produce", "consume") if each not in lost)

    def change(found: GrantsRecord | None) -> GrantsRecord:
        assert found is not None, "the load has granted"
        others = {role: actions for role, actions in found.roles.items() if role != CHANGING}
        lists = {CHANGING: ("another",)} if "the list" in lost else {}
        return replace(found, roles={**others, CHANGING: left} if left else others, subscriptions=lists)

    async def ask(world: World, store: MetadataStore) -> None:
        await update_record(store, paths.grants("public", "default"), GrantsRecord, change)

    return lambda: cluster.ask(f"{CHANGING} loses {', '.join(lost) or 'nothing'}", ask)


async def taken_and_given_back(cluster: Cluster, lost: Sequence[str], seconds: float) -> None:
    """Returns when the rights are back."""
    for what, pause_s in ((lost, seconds), ((), 0.0)):
        change = _changed(cluster, what)
        while not await change():  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        await asyncio.sleep(pause_s)


def _revoke(cluster: Cluster, rng: random.Random) -> None:
    """By a broker, or by the metadata alone: then every broker hears of it from there."""
    lost, back = rng.choice(WAYS), _changed(cluster, ())

    async def revoke() -> None:
        if lost == ("produce", "consume") and rng.random() < 0.5:
            _ask_broker(
                cluster, f"revoke {CHANGING}", lambda admin: admin.revoke_namespace_permission(NAMESPACE, CHANGING)
            )
        else:
            await _changed(cluster, lost)()

    async def give_back() -> None:
        await back()

    cluster.background(revoke())
    cluster.later(rng.uniform(0.5, 6.0), lambda: cluster.background(give_back()))
    cluster.on_heal.append(back)


def _anew(cluster: Cluster, rng: random.Random) -> None:
    for load in cluster.on_anew:
        load(rng)


OPERATIONS: Mapping[str, Callable[[Cluster, random.Random], None]] = {
    "expire-bookie": _expire_bookie,
    "expire-broker": _expire_broker,
    "expire-auditor": _expire_auditor,
    "expire-client": _expire_client,
    "joins": _joins,
    "leaves": _leaves,
    "decommission": _decommission,
    "drain": _drain,
    "unload": _unload,
    "set-persistence": _set_persistence,
    "recover": _recover,
    "delete-ledger": _delete_ledger,
    "repair-off": _repair_off,
    "compact": _compact,
    "revoke": _revoke,
    "anew": _anew,
}
