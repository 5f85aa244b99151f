"""The features whose pairs are met, a row each: what it changes of a scene, and what it promises.

`excludes`: another feature, and the sentence that says why no scene has both. `where`: in this process ("here"), with
real processes, or with Spark.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import magnetar
from magnetar.asyncio import BatchingType, CompressionType, ConsumerType
from magnetar.client.admin import CompactionState
from tests.pairs.clients import LaterBody, send_each, told
from tests.pairs.judge import Outcome, Sent
from tests.pairs.scene import (
    FAILS,
    KEYS,
    LATER,
    OVER_MS,
    WAVE,
    Compacted,
    Late,
    Listening,
    Query,
    Reading,
    Scene,
    Table,
    parts,
)

FILLER = 1000
"""The first number of those that fill a quota."""
FILLERS = 500
"""At most so many."""
OVER, UNWANTED = 0, (1, 7)
"""Of each wave: what has expired, and what a filter does not want."""
KEPT = {"retention_minutes": -1, "retention_mib": -1}
"""Policies of a topic that keeps what was acknowledged."""


@dataclass(frozen=True)
class Feature:
    name: str
    promise: str
    change: Callable[[Scene], None]
    excludes: Mapping[str, str] = field(default_factory=dict)
    where: str = "here"


# ------------------------------------------------------------------------------------ how messages are sent
def chunk(scene: Scene) -> None:
    scene.produce["chunking_enabled"] = True
    scene.large = (0, 4)


def batch(scene: Scene) -> None:
    scene.produce |= {"batching_enabled": True, "batching_max_publish_delay_ms": 5}


def compression(scene: Scene) -> None:
    scene.produce["compression_type"] = CompressionType.LZ4


def encryption(scene: Scene) -> None:
    scene.encrypted = True


def schema(scene: Scene) -> None:
    scene.typed = True
    scene.on(45, evolve)


async def evolve(scene: Scene) -> None:
    """The second wave is of the next version of the schema, which has its fields in another order."""
    await scene.close_producer()
    scene.body = LaterBody


def transaction(scene: Scene) -> None:
    scene.shapes.append("transaction")
    scene.acks_in_transactions = True
    scene.main.once = False  # an acknowledgement whose transaction ends otherwise


def half(scene: Scene) -> None:
    scene.shapes.append("half")


def delay(scene: Scene) -> None:
    scene.shared()
    scene.shapes.append("delay")


# ------------------------------------------------------------------------------------ what fails, and comes again
def dead_letter(scene: Scene) -> None:
    """The SDK's."""
    scene.shared()
    scene.consume["dead_letter_policy"] = magnetar.ConsumerDeadLetterPolicy(1, scene.dead_topic)
    for wave in range(2):
        for at in FAILS:
            scene.letters.add(wave * WAVE + at)
            scene.failures[wave * WAVE + at] = -1
    _comes_again(scene)


def retry_level(scene: Scene) -> None:
    """The server's, for every client: a pause before each delivery, and a dead letter after the last."""
    scene.shared()
    scene.policies |= {
        "dead_letter_max_redeliver_count": 2, "dead_letter_topic": scene.dead_topic,
        "dead_letter_backoff_s": (0.05, 0.1),
    }  # fmt: skip
    for wave in range(2):
        for number, times in ((wave * WAVE + FAILS[1], -1), (wave * WAVE + LATER, 1)):
            if times < 0:
                scene.letters.add(number)
            if scene.failures.get(number) != -1:
                scene.failures[number] = times
    _comes_again(scene)


def retry_topic(scene: Scene) -> None:
    scene.shared()
    scene.consume["enable_retry"] = True
    policy = magnetar.ConsumerDeadLetterPolicy(16, scene.dead_topic, retry_letter_topic=f"{scene.topic}-r")
    scene.consume.setdefault("dead_letter_policy", policy)
    scene.again |= {wave * WAVE + at for wave in range(2) for at in (LATER, 0)}
    _comes_again(scene)


def _comes_again(scene: Scene) -> None:
    scene.main.once = False


# ------------------------------------------------------------------------------------ what a topic keeps
def compaction(scene: Scene) -> None:
    scene.extra.append(Compacted())
    scene.on(40, compact)


async def compact(scene: Scene) -> None:
    for topic in await parts(scene):
        await scene.admin.compact(topic)
        status = await scene.admin.compaction_status(topic)
        for _ in range(3000):
            if status.state is not CompactionState.RUNNING:
                break
            await asyncio.sleep(0.01)
            status = await scene.admin.compaction_status(topic)
        if status.state is CompactionState.ERROR:
            scene.faults.append(f"lost: {topic} was not compacted: {status.error}")


def dedup(scene: Scene) -> None:
    scene.policies["deduplication"] = True
    scene.named = True
    scene.on(30, send_to_replacement)


async def send_to_replacement(scene: Scene) -> None:
    """The first wave by a producer of the same name, with the same sequence ids: it is there once."""
    await scene.close_producer()
    scene.producer = await scene.open_producer()
    known = [each for each in scene.sent if scene.shape(each) == "plain" and each.outcome is Outcome.STORED]
    copies = [Sent(each.number, each.text, each.key, each.properties) for each in known if each.number < WAVE]
    await send_each(
        scene.producer, copies, typed=scene.typed, batch=scene.produce["batching_enabled"], ids=True, body=scene.body
    )  # fmt: skip
    refused = [each for each in copies if each.outcome is not Outcome.STORED]
    scene.faults += [f"lost: {each.number} sent again: {each.why}" for each in refused]


def ttl(scene: Scene) -> None:
    scene.policies["message_ttl_s"] = 1
    late = Late("reads-when-old")
    assert late.view is not None, "it has one"
    late.view.lacks = {*range(WAVE), *range(FILLER, FILLER + FILLERS)}
    scene.main.lacks |= late.view.lacks
    scene.extra.append(late)
    scene.on(20, lambda scene: expire(scene, late))
    for number in range(WAVE):  # it may expire before the application gave it up
        scene.letters.discard(number)
        scene.failures.pop(number, None)


async def expire(scene: Scene, late: Late) -> None:
    """The first wave is too old for who did not read it; then nothing is."""
    await scene.until(lambda: not scene.missing_of_main(), "the first wave")
    for topic in await parts(scene):
        while True:
            stats = await scene.admin.topic_stats(topic)
            if all(not each.backlog for each in stats.subscriptions if each.name == late.subscription):
                break
            await asyncio.sleep(0.05)
    for topic in scene.topics:
        await scene.admin.remove_topic_policies(topic, "message_ttl_s")
    del scene.policies["message_ttl_s"]
    await late.start(scene)


def quota(scene: Scene) -> None:
    scene.policies |= {"backlog_quota_bytes": 300_000, "backlog_quota_policy": "producer_exception"}
    late = Late("reads-when-full", lacks=set(scene.main.lacks))
    scene.extra.append(late)
    scene.on(10, lambda scene: fill(scene, late))


async def fill(scene: Scene, late: Late) -> None:
    """The backlog of a subscription grows until a sender is refused; who was refused is not stored."""
    await scene.close_producer()
    for number in range(FILLER, FILLER + FILLERS):
        text = f"filler {number} " + random.Random(number).randbytes(12_000).hex()
        message = Sent(number, text, KEYS[number % 3], {"n": str(number)})
        scene.sent.append(message)
        try:
            producer = await scene.open_producer(named=False)
            await send_each(producer, [message], typed=scene.typed, batch=False, body=scene.body)
            scene.opened.remove(producer)
            await producer.close()
        except magnetar.ProducerBlockedQuotaExceededException as error:
            told(message, error)
        if message.outcome is Outcome.REFUSED:
            break
        await asyncio.sleep(0.01)
    else:
        scene.faults.append("refused: no sender was refused past the quota")
    for each in scene.extra:  # whoever has a backlog
        if isinstance(each, Late | Compacted):
            await each.start(scene)
    assert late.view is not None, "it has one"
    view = late.view
    await scene.until(lambda: not scene.wanted(view), "the backlog")
    for _ in range(1000):
        try:
            scene.producer = await scene.open_producer()
        except magnetar.ProducerBlockedQuotaExceededException:
            await asyncio.sleep(0.02)
            continue
        return
    scene.faults.append("lost: senders are refused although the backlog is gone")


# ------------------------------------------------------------------------------------ who receives
def key_shared(scene: Scene) -> None:
    scene.type, scene.consumers, scene.main.ordered = ConsumerType.KeyShared, 2, True
    if scene.produce["batching_enabled"]:
        scene.produce["batching_type"] = BatchingType.KeyBased


def levels(scene: Scene) -> None:
    """Of priority: three topics. A key has one level."""
    scene.levels = scene.produce["levels"] = 3


def fair(scene: Scene) -> None:
    scene.shared()
    scene.consume |= {"fair_by_key": True, "max_in_flight_per_key": 2, "rate_per_key": 100}


def wanted(scene: Scene) -> None:
    """A filter of the application's subscription."""
    unwanted = {wave * WAVE + at for wave in range(2) for at in UNWANTED}
    scene.consume["filter"] = f"n NOT IN ({', '.join(repr(str(each)) for each in sorted(unwanted))})"
    scene.main.lacks |= unwanted
    scene.main.never |= unwanted


def expiry(scene: Scene) -> None:
    """Of each wave one message has expired, and one has not. A batch of Pulsar's client is delivered with both."""
    for wave in range(2):
        scene.ends[wave * WAVE + OVER] = OVER_MS
        scene.ends[wave * WAVE + LATER] = int(time.time() * 1000) + 600_000
        scene.main.lacks.add(wave * WAVE + OVER)
    scene.main.never.add(OVER)


def reader(scene: Scene) -> None:
    scene.extra.append(Reading("reader"))


def table_view(scene: Scene) -> None:
    scene.extra.append(Table())


def pattern(scene: Scene) -> None:
    scene.pattern = True


def sdk(scene: Scene) -> None:
    """Its blocking face: the other features are met by the SDK for asyncio."""
    scene.second = "blocking" if scene.second == "sdk" else scene.second
    scene.extra.append(Listening("blocking"))


def pulsars_client(scene: Scene) -> None:
    scene.second = "pulsar" if scene.second in ("sdk", "blocking") else scene.second
    scene.extra.append(Listening("pulsar"))


def spark(scene: Scene) -> None:
    scene.policies |= KEPT  # a query holds nothing of a topic
    scene.limit_s = 500.0  # each step of a query starts a Python of its own
    scene.second = "spark" if scene.second != "outbox" else scene.second
    scene.extra.append(Query())


def outbox(scene: Scene) -> None:
    scene.policies["deduplication"] = True
    scene.second = "outbox"


# ------------------------------------------------------------------------------------ what happens to a topic
def seek(scene: Scene) -> None:
    scene.spaced = True
    scene.policies |= KEPT
    scene.on(50, back)
    scene.main.ordered = False  # the second times; first times stay in order, which readers beside it show
    scene.main.once = False


async def back(scene: Scene) -> None:
    """Everything comes again."""
    for each in scene.sent:
        if each.number not in scene.main.lacks:
            scene.main.comes_again(each.number)
    await scene.joined[0][0].seek(magnetar.MessageId.earliest)
    await scene.until(lambda: not scene.wanted(scene.main), "everything again")


def subscription_anew(scene: Scene) -> None:
    scene.spaced = True
    scene.policies |= KEPT
    scene.on(65, subscribe_anew)
    scene.main.ordered = False
    scene.main.once = False


async def subscribe_anew(scene: Scene) -> None:
    """One of the same name, at the beginning: it has nothing of the former one's place."""
    for each in scene.sent:
        if each.number not in scene.main.lacks:
            scene.main.comes_again(each.number)
    await scene.leave()
    for topic in await parts(scene):
        await scene.admin.delete_subscription(topic, "s", force=True)
        await scene.admin.create_subscription(topic, "s", magnetar.MessageId.earliest)
    await scene.join()
    await scene.until(lambda: not scene.wanted(scene.main), "everything anew")


def partition_growth(scene: Scene) -> None:
    scene.partitions = 2
    scene.spaced = scene.apart = True
    scene.on(60, grow)


async def grow(scene: Scene) -> None:
    """Pulsar's client looks for partitions once a minute: it subscribes anew."""
    for topic in scene.topics:
        await scene.admin.update_topic(topic, partitions=4)
    for each in scene.extra:
        if isinstance(each, Listening):
            await each.close()
            await each.open(scene)


def delete_and_create(scene: Scene) -> None:
    scene.spaced = True
    scene.on(70, again)


async def again(scene: Scene) -> None:
    """A topic of the same name: it has its own messages alone, and nothing goes on where the former one was."""
    await scene.end_of_life()
    await scene.close()
    for topic in scene.topics:
        await scene.admin.delete_topic(topic, force=True)
    await scene.make()
    await scene.open()


def unload(scene: Scene) -> None:
    scene.on(80, give_up, meanwhile=True)
    for_views(scene)


def for_views(scene: Scene) -> None:
    """Who takes over delivers again what was not acknowledged."""
    scene.disturbed = True


async def give_up(scene: Scene) -> None:
    for topic in await parts(scene):
        await scene.admin.unload_topic(topic)


def kill(scene: Scene) -> None:
    scene.on(89, together)
    scene.on(90, killed, meanwhile=True)
    for_views(scene)


async def together(scene: Scene) -> None:
    assert scene.server.gather is not None, "it runs in a process"
    await scene.server.gather()


async def killed(scene: Scene) -> None:
    assert scene.server.kill is not None, "it runs in a process"
    await scene.server.kill()


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("chunk", "a message of several entries is received as one", chunk),
        Feature("batch", "messages that share an entry are received each for itself", batch, {
            "chunk": "a producer that makes chunks makes no batches: InvalidConfiguration when it opens"}),
        Feature("compression", "what is received is what was sent", compression),
        Feature("encryption", "who has the key receives what was sent", encryption),
        Feature("transaction", "what is committed is received, what is aborted never", transaction),
        Feature("half", "what is committed is received, what is rolled back never", half),
        Feature("delay", "it is received in the end", delay),
        Feature("dead letter", "what fails too often is in the dead-letter topic", dead_letter),
        Feature("retry level", "what fails comes again, and is a dead letter after the last time", retry_level),
        Feature("retry topic", "what the application sends again later comes again", retry_topic),
        Feature("compaction", "of each key the newest message is received", compaction),
        Feature("dedup", "what is sent twice with one sequence id is received once", dedup),
        Feature("levels", "messages of all levels are received, each key in its order", levels, {
            name: f"{who} reads or writes one topic that is named, and has no option of levels: each level is a topic"
            for name, who in (
                ("compaction", "a reader of what compaction left"), ("table view", "a table view"),
                ("reader", "a reader"), ("pattern", "a pattern"), ("Pulsar's client", "Pulsar's client"),
                ("Spark", "a query"), ("outbox", "an outbox"),
            )}),
        Feature("Key_Shared", "one key is received in its order", key_shared),
        Feature("fair", "what waits for the limits of its key is received", fair, {
            "Key_Shared": "keys take turns on Shared subscriptions: fair_by_key needs a Shared consumer"}),
        Feature("filter", "what is wanted is received, and nothing else", wanted, {
            "subscription anew": "an operator makes it without a filter: ConsumerBusy for a consumer with one"}),
        Feature("expiry", "what has expired is not received, what has not is", expiry),
        Feature("seek", "from there on everything is received again", seek),
        Feature("TTL", "what is too old may be missing, nothing else", ttl),
        Feature("quota", "a sender is refused past it, and what was refused is not there", quota),
        Feature("schema", "values are received as they were sent", schema),
        Feature("table view", "it has the newest value of each key", table_view),
        Feature("reader", "it receives everything once", reader),
        Feature("pattern", "it receives all of its topics", pattern),
        Feature("partition growth", "messages of all partitions are received", partition_growth),
        Feature("delete and create", "a topic made anew has its own messages alone", delete_and_create),
        Feature("subscription anew", "one of the same name begins where it is made", subscription_anew),
        Feature("unload", "what is stored is received, once or more", unload),
        Feature("kill -9", "what is stored is received, once or more", kill, where="processes"),
        Feature("Pulsar's client", "as the SDK", pulsars_client),
        Feature("SDK", "its blocking face as that for asyncio", sdk),
        Feature("Spark", "a query has everything that is committed once", spark, where="spark"),
        Feature("outbox", "each row is received once", outbox),
    )
}  # fmt: skip
ORDER = [
    "batch", "partition growth", "delay", "dead letter", "retry level", "retry topic", "Key_Shared", "fair", "TTL",
    "outbox", "Spark", "Pulsar's client", "SDK",
]
"""Of these the earlier changes a scene first."""


def changed(scene: Scene, names: tuple[str, ...]) -> Scene:
    for name in sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
        FEATURES[name].change(scene)
    return scene


