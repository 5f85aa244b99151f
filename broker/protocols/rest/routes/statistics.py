"""Statistics of topics and partitions (stats.py has their form)."""

from __future__ import annotations

from typing import Any

from .....proto import operations as op
from .....proto.errors import MagnetarError, NotFound, NotOwner
from .....proto.names import TopicName
from .....proto.statistics import TopicStats
from ....cluster.core.bundles import bundle_of
from ....common.turns import Turns
from ....session import statistics
from ....session.other_brokers import ask
from ....topic.topic import Topic
from ..call import Call
from ..stats import internal_stats, merged, topic_stats
from ..table import TOPIC, route

Found = tuple[TopicStats, Topic | None]
"""The statistics of a topic, as statistics.of_topic returns them, and the topic where it is here."""


async def _loaded(call: Call, name: TopicName) -> Topic:
    """Returns a topic loaded here. TopicNotFound; NotFound: it has partitions. NotOwner."""
    if await call.broker.catalog.existing_partitions(name) and not name.is_partition:
        raise NotFound(f"topic {name} has partitions: GET …/partitioned-stats, or name one of them")
    return await call.broker.topic(name)


async def _stats(call: Call, name: TopicName) -> Found:
    topic = await _loaded(call, name)
    precise = call.flag("getPreciseBacklog") or call.flag("getEarliestTimeInBacklog")
    return await statistics.of_topic(topic, call.broker.endpoint, precise=precise), topic


def _shown(call: Call, found: Found) -> dict[str, Any]:
    publishers, consumers = not call.flag("excludePublishers"), not call.flag("excludeConsumers")
    return topic_stats(*found, call.meters, publishers=publishers, consumers=consumers)


@route("GET", TOPIC + "/stats", "Statistics of a topic without partitions, or of a partition.", answer="TopicStats")
async def stats(call: Call) -> object:
    await call.authorize(op.TOPIC_STATS, name=call.topic.full)
    return _shown(call, await _stats(call, call.topic))


@route("GET", TOPIC + "/partitioned-stats", "The sums of all partitions; `perPartition=true`: and each of them.",
       answer="PartitionedTopicStats")  # fmt: skip
async def partitioned_stats(call: Call) -> object:
    found = await _each(call)
    shown = {name.full: _shown(call, each) for name, each in found.items()}
    whole = merged(list(shown.values()))
    whole["averageMsgSize"] = whole["bytesInCounter"] / whole["msgInCounter"] if whole["msgInCounter"] else 0.0
    listed = shown if call.query.get("perPartition", "true").lower() != "false" else {}
    return {**whole, "metadata": {"partitions": await _count(call), "deleted": False}, "partitions": listed}


async def _count(call: Call) -> int:
    return await call.broker.catalog.existing_partitions(call.topic)


async def _each(call: Call) -> dict[TopicName, Found]:
    """A partition that cannot be asked now is left out."""
    await call.authorize(op.TOPIC_STATS, name=call.topic.full)
    partitions = await call.partitions()
    if not partitions:
        raise NotFound(f"topic {call.topic} has no partitions: GET …/stats")
    found: dict[TopicName, Found] = {}
    for name in partitions:
        try:
            found[name] = await _anywhere(call, name)
        except MagnetarError:
            continue
    if not found:
        await _anywhere(call, partitions[0])
    return found


async def _anywhere(call: Call, name: TopicName) -> Found:
    try:
        return await _stats(call, name)
    except NotOwner:
        owner = await call.broker.lookup(name)
        return await ask(call.broker.world, owner.endpoint, op.TOPIC_STATS, name=name.full), None


@route("GET", "/admin/v2/broker-stats/topics", "Statistics of the topics that are loaded in this broker, by bundle.",
       answer="{namespace: {bundle: {domain: {topic: TopicStats}}}}")  # fmt: skip
async def loaded_topics(call: Call) -> object:
    await call.authorize(op.LIST_BROKERS)
    found: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    turns = Turns(call.broker.world.clock)
    for topic in list(call.broker.loaded.values()):
        namespace = topic.name.namespace_name
        bundle = bundle_of(topic.name, (await call.broker.catalog.known_namespace(namespace)).bundles)
        domain = "persistent" if topic.name.persistent else "non-persistent"
        of_bundle = found.setdefault(str(namespace), {}).setdefault(bundle, {}).setdefault(domain, {})
        of_bundle[topic.name.full] = _shown(call, (await statistics.of_topic(topic, call.broker.endpoint), topic))
        if turns.over:
            await turns.next()
    return found


# ------------------------------------------------------------------ internals
@route("GET", TOPIC + "/internalStats", "The ledgers and cursors of a topic, or of a partition.",
       answer="PersistentTopicInternalStats")  # fmt: skip
async def internals(call: Call) -> object:
    await call.authorize(op.TOPIC_INTERNAL_STATS, name=call.topic.full)
    return await _internals(call, call.topic)


async def _internals(call: Call, name: TopicName) -> dict[str, Any]:
    topic = await _loaded(call, name)
    found = await statistics.of_topic(topic, call.broker.endpoint)
    return internal_stats(statistics.internals(topic, 0), found)


@route("GET", TOPIC + "/partitioned-internalStats", "The same of each partition.", answer="{metadata, partitions}")
async def partitioned_internals(call: Call) -> object:
    await call.authorize(op.TOPIC_INTERNAL_STATS, name=call.topic.full)
    found = {}
    for name in await call.partitions():
        try:
            found[name.full] = await _internals(call, name)
        except NotOwner:
            owner, world = (await call.broker.lookup(name)).endpoint, call.broker.world
            of_log = await ask(world, owner, op.TOPIC_INTERNAL_STATS, name=name.full)
            found[name.full] = internal_stats(of_log, await ask(world, owner, op.TOPIC_STATS, name=name.full))
    return {"metadata": {"partitions": len(found), "deleted": False, "properties": {}}, "partitions": found}


@route("GET", TOPIC + "/internal-info", "The ledgers as the metadata has them.", answer="ManagedLedgerInfo")
async def internal_info(call: Call) -> object:
    await call.authorize(op.TOPIC_INTERNAL_STATS, name=call.topic.full)
    found = await _internals(call, call.topic)
    ledgers = [
        {name: each[name] for name in ("ledgerId", "entries", "size", "timestamp")} | {"isOffloaded": False}
        for each in found["ledgers"]
    ]
    place = dict(zip(("ledgerId", "entryId"), map(int, found["lastConfirmedEntry"].split(":")), strict=True))
    cursors = {
        name: {"version": 0, "markDelete": each["markDeletePosition"], "cursorsLedgerId": -1}
        for name, each in found["cursors"].items()
    }
    return {
        "version": 0, "creationDate": None, "modificationDate": None, "ledgers": ledgers,
        "terminatedPosition": place if found["state"] == "Terminated" else None, "cursors": cursors,
    }  # fmt: skip
