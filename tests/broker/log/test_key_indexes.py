"""Key indexes of sealed ledgers: whole or none, gone with their ledger, and used by searches alone."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.cluster.orphans import find_orphans
from magnetar.broker.log import key_index_core, key_indexes
from magnetar.broker.log.key_indexes import KeyIndexes
from magnetar.broker.log.reader import TopicLogReader
from magnetar.broker.session import finding
from magnetar.broker.topic.topic import Topic
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.model.settings import BatchingType, CompressionType
from magnetar.metadata import paths
from magnetar.metadata.store import parse_ledger_ids
from magnetar.proto.errors import BackPressure, Unavailable
from magnetar.proto.names import Position
from magnetar.proto.policies import Policies
from magnetar.proto.states import TopicState
from tests.client.model.keys import Keys
from tests.support.cluster import Cluster, cluster

NAME = "persistent://public/default/t"
ON = Policies(key_index="keys+properties")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some messages, and segments of some blocks."""
    monkeypatch.setattr(key_index_core, "BLOCK_BYTES_MIN", 500)
    monkeypatch.setattr(key_index_core, "POSTINGS_PER_SEGMENT_MAX", 50)
    monkeypatch.setattr(key_index_core, "POSTINGS_PER_PAGE", 10)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0)


class Scene:
    """A cluster with one topic whose ledgers are small, a client, and what an operator does."""

    def __init__(self, running: Cluster, client: aio.Client, admin: AdminClient, roll_entries: int) -> None:
        self.running, self.client, self.admin, self.roll_entries = running, client, admin, roll_entries

    @property
    def topic(self) -> Topic:
        for broker in self.running.brokers:
            found = broker.topic_manager.loaded.get(NAME)
            if found is not None:
                return found
        raise AssertionError("no broker has loaded the topic")

    async def index(self, policies: Policies | None = ON) -> Topic:
        """Sets the policy, and lets the upkeep build what is missing."""
        topic = (await self.admin.topic_stats("t")) and self.topic
        if policies is not None:
            await self.admin.set_topic_policies(NAME, policies)
            await until(lambda: self.topic.applied.key_index == policies.key_index)
        topic.key_indexes.run_due_work(topic.applied)
        await topic.key_indexes.wait_built()
        return topic

    async def send(self, *keys: str, **options: Any) -> None:
        async with await self.client.create_producer(NAME, batching_enabled=False, **options) as producer:
            await asyncio.gather(*(
                producer.send(f"{key} {number}".encode(), partition_key=key, properties={"tag": f"{key}-tag"})
                for number, key in enumerate(keys)
            ))  # fmt: skip
        log = self.topic.log  # a full ledger is sealed after its last entry was confirmed
        await until(lambda: log.state is TopicState.SERVING and log.shape.tail_span.last_entry + 1 < self.roll_entries)

    async def find(self, **wanted: Any) -> Any:
        return await self.admin.find_messages("t", **wanted)

    async def found(self, **wanted: Any) -> list[int]:
        return [each.index for each in (await self.find(**wanted)).messages]

    async def ledgers(self) -> set[int]:
        """All ledgers, without those in the list of the topic."""
        every = parse_ledger_ids(paths.LEDGERS, await self.running.store.new_session().children(paths.LEDGERS))
        return set(every) - {each.ledger_id for each in self.topic.log.record.ledgers}


@asynccontextmanager
async def scene(folder: Path, **changes: Any) -> AsyncIterator[Scene]:
    changes = {"roll_entries": 20, **changes}
    async with cluster(folder, **changes) as running:
        url = f"magnetar://{running.brokers[0].endpoint}"
        async with aio.Client(url) as client, AdminClient(url) as admin:
            await admin.create_topic("t")
            yield Scene(running, client, admin, changes["roll_entries"])


async def test_a_search_passes_over_what_cannot_match_and_says_what_it_looked_at(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each % 50}" for each in range(100)), "last")
        full, plan = await at.find(key="k7"), await at.find(key="k7", dry_run=True)
        assert (plan.messages, plan.looked_at, plan.bytes) == ([], 101, at.topic.log.shape.size)
        assert (full.looked_at, full.skipped, full.ledgers, full.unindexed_ledgers) == (101, 0, 0, 0)
        topic = await at.index()
        assert [each.key_index for each in (await at.admin.topic_internal_stats("t")).ledgers] == [
            "keys+properties"
        ] * 5 + [""]
        for wanted in (
            {"key": "k7"}, {"property": "tag=k7-tag"}, {"where": "tag = 'k7-tag' AND message.key LIKE 'k%'"},
            {"key": "k7", "text": "k7"}, {"property": "tag=k7-tag", "where": "message.key IN ('k7', 'k8')"},
        ):  # fmt: skip
            found = await at.find(**wanted)
            assert [each.index for each in found.messages] == [57, 7]
            assert found.looked_at + found.skipped == 101
            assert found.looked_at < 30, "two blocks, and the ledger that is written"
            assert (found.ledgers, found.unindexed_ledgers, found.before_index, found.unread) == (6, 0, 0, 0)
            assert found.bytes < full.bytes
        assert (await at.find(property="tag")).skipped == 0
        assert (await at.find(property="none")).skipped == 100
        assert await at.found(where="message.key = 'last'") == [100]
        nothing = await at.find(key="k7", dry_run=True)
        assert (nothing.messages, nothing.skipped) == ([], found.skipped)
        assert nothing.looked_at == found.looked_at
        assert topic.key_indexes.built == 5


async def test_a_search_reads_the_entries_of_its_blocks_and_none_to_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each % 50}" for each in range(101)))
        await at.index()
        reads, first_ids = list[tuple[Position, int]](), [span.ledger_id for span in at.topic.log.shape.spans]
        read, bisect = TopicLogReader.read, list[int]()

        async def note(self: TopicLogReader, position: Position, size: int, last: int = 1 << 62) -> Any:
            reads.append((position, last))
            return await read(self, position, size, last)

        async def note_bisection(self: TopicLogReader, index: int) -> Any:
            bisect.append(index)
            return await find_position(self, index)

        find_position = TopicLogReader.find_position_by_index
        monkeypatch.setattr(TopicLogReader, "read", note)
        monkeypatch.setattr(TopicLogReader, "read_cached", lambda *_: [])
        monkeypatch.setattr(TopicLogReader, "find_position_by_index", note_bisection)
        assert [each.index for each in (await at.find(key="k7", before_index=100)).messages] == [57, 7]
        assert reads == [(Position(first_ids[2], 12), 17), (Position(first_ids[0], 6), 11)]
        assert not bisect
        assert [each.index for each in (await at.find(key="k7", before_index=50)).messages] == [7]
        assert not bisect


async def test_searches_without_an_index_and_by_text_or_with_the_policy_off_read_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(60)))
        topic = await at.index(Policies(key_index="off"))
        assert topic.key_indexes.built == 0
        assert not topic.log.record.key_indexes
        await at.index()
        opened = list[int]()
        open_index = KeyIndexes.open_index

        async def note(self: KeyIndexes, ledger_id: int) -> Any:
            opened.append(ledger_id)
            return await open_index(self, ledger_id)

        monkeypatch.setattr(KeyIndexes, "open_index", note)
        assert await at.found(text="k7 ") == [7]
        assert await at.found(limit=1) == [59]
        assert not opened
        assert await at.found(key="k7") == [7]
        assert len(opened) == len(set(opened)) == 3
        first_ms = (await at.find(key="k7")).messages[0].publish_time_ms
        opened.clear()
        assert await at.found(key="k7", until_ms=first_ms - 1000) == []
        assert await at.found(key="k7", before_index=20) == [7]
        assert len(opened) == 1, "time and index choose the ledgers first"
        await at.index(Policies(key_index="off"))
        opened.clear()
        assert await at.found(key="k7") == [7]
        assert not opened


async def test_a_search_goes_on_over_ledgers_with_and_without_an_index(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.send(*("k", "other") * 50)
        topic = await at.index()
        await at.send(*("k", "other") * 30)
        wanted = [*range(158, -1, -2)]
        found, before, unindexed = list[int](), 0, 0
        while True:
            part = await at.find(key="k", limit=7, before_index=before)
            found += [each.index for each in part.messages]
            unindexed = max(unindexed, part.unindexed_ledgers)
            if not (before := part.before_index):
                break
            assert part.why == "it has 7 messages"
        assert found == wanted
        assert unindexed >= 1
        assert (await at.find(property="tag=none")).unindexed_ledgers == 3
        assert topic.key_indexes.count_unindexed_ledgers() == 3


@pytest.mark.parametrize("step", ["create", "pages", "close", "name"])
async def test_a_crash_at_any_step_leaves_no_index_or_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(60)))
        stopped = asyncio.Event()

        async def hang(*args: Any, **kwargs: Any) -> Any:
            stopped.set()
            await asyncio.Event().wait()

        topic = at.topic
        await at.admin.set_topic_policies(NAME, ON)
        await until(lambda: topic.applied.key_index != "off")
        with monkeypatch.context() as patch:
            match step:
                case "create":
                    patch.setattr(key_indexes.TopicStateLedgers, "create_ledger", hang)
                case "pages":
                    patch.setattr(key_indexes, "append_and_wait", hang)
                case "close":
                    patch.setattr("magnetar.ledger.handle.LedgerWriter.close", hang)
                case _:
                    patch.setattr(topic.log, "commit_fields", hang)
            topic.key_indexes.run_due_work(topic.applied)
            await stopped.wait()
            topic.key_indexes.stop()
            await topic.key_indexes.close()
        assert not topic.log.record.key_indexes
        await at.admin.unload_topic("t")
        assert await at.found(key="k7") == [7]
        now_ms = at.running.world.clock.wall_ms() + 10_000
        left = (await find_orphans(at.running.store.new_session(), now_ms, 0.0)).orphans
        assert len(left) == (step != "create")
        assert not any(each.unexplained for each in left), "the sweep deletes it"
        again = await at.index(None)
        assert len(again.log.record.key_indexes) == 3
        assert (await at.find(key="k7")).looked_at < 30


async def test_an_index_is_found_again_by_another_broker_and_after_a_change_of_owner_while_it_is_built(
    tmp_path: Path
) -> None:
    async with scene(tmp_path, brokers=2) as at:
        await at.send(*(f"k{each}" for each in range(60)))
        topic = await at.index()
        before = topic.log.record.key_indexes
        await at.admin.unload_topic("t")
        found = await at.find(key="k7")
        assert ([each.index for each in found.messages], found.unindexed_ledgers) == ([7], 0)
        assert at.topic.log.record.key_indexes == before
        await at.send(*(f"l{each}" for each in range(60)))
        other = at.topic
        other.key_indexes.run_due_work(other.applied)
        await until(lambda: other.key_indexes.building >= 0)
        await at.admin.unload_topic("t")
        assert await at.found(key="l7") == [67]
        again = await at.index(None)
        assert not again.key_indexes.count_unindexed_ledgers()
        assert set(before) <= set(again.log.record.key_indexes)
        assert await at.found(key="l7") == [67]
        assert (await at.find(key="none")).looked_at == 0


async def test_an_index_goes_with_its_ledger_and_a_topic_made_anew_has_nothing_of_the_old_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.admin.create_subscription("t", "s")
        await at.send(*(f"k{each}" for each in range(50)))
        topic = await at.index()
        indexes = {each.ledger_id: each.index_ledger_id for each in topic.log.record.key_indexes}
        assert set(indexes.values()) <= await at.ledgers()
        assert topic.key_indexes.list_own_ledgers() == list(indexes.values())
        await at.admin.skip_messages("t", "s", 25)
        await topic.find_subscription("s").wait_durable()
        gone = await topic.trim_ledgers(retained=False)
        assert len(gone) == 1
        assert {each.ledger_id for each in topic.log.record.key_indexes} == set(indexes) - set(gone)
        assert await at.found(key="k3") == []
        assert await at.found(key="k23") == [23]
        ledgers = await at.ledgers()
        assert indexes[gone[0]] not in ledgers
        await at.admin.delete_topic("t", force=True)
        await at.admin.create_topic("t")
        await at.send("new", "k23")
        assert not set(indexes.values()) & await at.ledgers()
        assert not at.topic.log.record.key_indexes
        assert await at.found(key="k23") == [1]
        assert await at.found(key="k24") == []


async def test_a_trim_during_a_build_and_leftovers_leave_no_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(50)))
        topic = at.topic
        before = await at.ledgers()
        name = KeyIndexes._name

        async def trim_first(self: KeyIndexes, new: Any) -> bool:
            monkeypatch.setattr(KeyIndexes, "_name", name)
            await topic.trim_ledgers(retained=False)
            return await name(self, new)

        monkeypatch.setattr(KeyIndexes, "_name", trim_first)
        await at.index()
        assert not topic.log.record.key_indexes
        assert await at.ledgers() == before, "what was built for a ledger that is gone is deleted"
        await at.send(*(f"k{each}" for each in range(50)))
        await at.index()
        left = topic.log.record.key_indexes
        assert left
        await topic.log.commit_fields(key_indexes=(*left, type(left[0])(1 << 40, left[0].index_ledger_id + (1 << 30))))
        await at.index(None)
        assert topic.log.record.key_indexes == left, "an index of a ledger that is not listed is dropped"


async def test_a_damaged_or_lost_index_is_as_none_and_is_built_anew(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(60)))
        topic = await at.index()
        first = topic.log.record.key_indexes
        swapped = tuple(
            type(each)(each.ledger_id, other.index_ledger_id, each.with_properties)
            for each, other in zip(first, first[1:] + first[:1], strict=True)
        )
        await topic.log.commit_fields(key_indexes=swapped)
        found = await at.find(key="k7")
        assert ([each.index for each in found.messages], found.unindexed_ledgers) == ([7], 3)
        await at.index(None)
        assert not topic.key_indexes.count_unindexed_ledgers()
        assert not {each.index_ledger_id for each in topic.log.record.key_indexes} & {
            each.index_ledger_id for each in first
        }
        found = await at.find(key="k7")
        assert ([each.index for each in found.messages], found.unindexed_ledgers) == ([7], 0)
        await topic.key_indexes._ledgers.delete(topic.log.record.key_indexes[0].index_ledger_id)
        assert await at.found(key="k7") == [7]
        await at.index(None)
        assert (await at.find(key="none")).looked_at == 0


async def test_a_wider_policy_replaces_indexes_and_a_build_ends_where_it_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(60)))
        topic = await at.index(Policies(key_index="keys"))
        ledgers = await at.ledgers()
        assert {each.key_index for each in (await at.admin.topic_internal_stats("t")).ledgers} == {"keys", ""}
        found = await at.find(property="tag=k7-tag")
        assert ([each.index for each in found.messages], found.skipped) == ([7], 0)
        assert (await at.find(property="tag=k7-tag", key="k7")).skipped > 30
        await at.index()
        assert topic.key_indexes.built == 6
        assert len(await at.ledgers()) == len(ledgers), "the former ones are deleted"
        await at.index(Policies(key_index="keys"))
        assert topic.key_indexes.built == 6
        await at.send(*(f"k{each}" for each in range(60)))
        ledgers = await at.ledgers()

        def switch_off(*args: Any, **kwargs: Any) -> Any:
            topic.applied = type(topic.applied)(key_index="off")
            return key_index_core.describe_entry(*args, **kwargs)

        monkeypatch.setattr(key_indexes, "describe_entry", switch_off)
        topic.key_indexes.run_due_work(topic.applied)
        await topic.key_indexes.wait_built()
        assert topic.key_indexes.built == 6
        assert await at.ledgers() == ledgers


async def test_bookies_that_do_not_answer_end_a_build_and_the_next_look_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(30)))
        ledgers = await at.ledgers()

        async def fail(*args: Any) -> None:
            raise Unavailable("bookies are busy")

        with monkeypatch.context() as patch:
            patch.setattr(key_indexes, "append_and_wait", fail)
            topic = await at.index()
            assert not topic.key_indexes.built
            assert await at.ledgers() == ledgers, "what was begun is deleted"
        await at.index(None)
        assert topic.key_indexes.built == 1


async def test_transactions_are_found_when_they_are_committed_and_never_when_they_are_not(tmp_path: Path) -> None:
    async with scene(tmp_path, roll_entries=5) as at:
        producer = await at.client.create_producer(NAME, batching_enabled=False)
        await producer.send(b"1", partition_key="k")
        aborted, committed = await at.client.transaction(), await at.client.transaction()
        await producer.send(b"2", partition_key="k", txn=aborted)
        await producer.send(b"3", partition_key="k", txn=committed)
        await aborted.abort("visible")
        for each in range(12):
            await producer.send(b"x", partition_key=f"other{each}")
        topic = await at.index()
        assert topic.key_indexes.built >= 2
        found = await at.find(key="k")
        assert [each.payload for each in found.messages] == [b"1"]
        assert found.waiting == 13
        await committed.commit("visible")
        found = await at.find(key="k")
        assert ([each.payload for each in found.messages], found.waiting) == ([b"3", b"1"], 0)
        assert found.skipped > 0


@pytest.mark.parametrize("options", [
    {}, {"compression_type": CompressionType.ZSTD}, {"batching_type": BatchingType.KeyBased},
    {"filter_properties": ("tag",), "batch_by": ("tag",)},
])  # fmt: skip
async def test_batches_of_any_producer_are_unfolded_once_at_the_seal(tmp_path: Path, options: dict[str, Any]) -> None:
    async with scene(tmp_path) as at:
        async with await at.client.create_producer(NAME, batching_max_messages=10, **options) as producer:
            await asyncio.gather(*(
                producer.send(b"%d" % each, partition_key=f"k{each % 150}", properties={"tag": f"t{each % 70}"})
                for each in range(500)
            ))  # fmt: skip
        await at.send(*("end",) * 30)
        topic = await at.index()
        assert topic.key_indexes.built >= 2
        for each in (0, 7, 149):
            found = await at.find(key=f"k{each}")
            assert sorted(int(one.payload) for one in found.messages) == list(range(each, 500, 150))
        for each in (0, 7, 69):
            found = await at.find(property=f"tag=t{each}")
            assert sorted(int(one.payload) for one in found.messages) == list(range(each, 500, 70))


async def test_chunks_and_encrypted_entries_are_found_by_what_their_heads_say(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        async with await at.client.create_producer(NAME, batching_enabled=False, chunking_enabled=True) as producer:
            await producer.send(zlib.crc32(b"x").to_bytes(4, "big") * 2_000_000, partition_key="large")
        secret = {"encryption_key": "k", "crypto_key_reader": Keys("k")}
        await at.send("secret", **secret)
        async with await at.client.create_producer(NAME, **secret) as producer:
            await asyncio.gather(*(producer.send(b"", partition_key=key) for key in ("head", "hidden")))
        await at.send(*("end",) * 40)
        full = {key: await at.found(key=key) for key in ("large", "secret", "head", "hidden", "none")}
        assert full["large"]
        assert full["secret"]
        await at.index()
        for key, wanted in full.items():
            assert await at.found(key=key) == wanted
        assert (await at.find(key="none")).looked_at < 25


async def test_a_compacted_topic_is_searched_by_the_indexes_of_its_log(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.send(*("a", "b") * 25, "c")
        await at.admin.compact("t")
        topic = await at.index()
        await topic.compaction.wait_finished()
        assert await at.found(key="a") == [*range(48, -1, -2)]
        assert (await at.find(key="c")).skipped == 40
        await topic.trim_ledgers(retained=False)
        await at.index(None)
        assert {each.ledger_id for each in topic.log.record.key_indexes} <= {
            each.ledger_id for each in topic.log.record.ledgers
        }
        assert await at.found(key="c") == [50]


async def test_a_search_finds_the_same_with_and_without_indexes_wherever_it_begins(tmp_path: Path) -> None:
    rng = random.Random(11)
    async with scene(tmp_path) as at:
        await at.send(*(f"k{rng.randrange(12)}" for _ in range(130)))
        async with await at.client.create_producer(NAME, batching_max_messages=7) as producer:
            await asyncio.gather(*(
                producer.send(b"", partition_key=f"k{rng.randrange(12)}", properties={"n": str(rng.randrange(9))})
                for _ in range(200)
            ))  # fmt: skip
        topic = await at.index()
        parts = [
            "message.key = 'k{0}'", "tag = 'k{0}-tag'", "n = '{0}'", "n = {0}", "NOT n = '{0}'", "n IS NULL",
            "tag LIKE 'k{0}%'", "message.key IN ('k{0}', 'k1')", "n IN ('{0}', '1')", "NOT tag IS NULL",
        ]  # fmt: skip
        skipped = 0
        for _ in range(25):
            where = f" {rng.choice(['AND', 'OR'])} ".join(
                rng.choice(parts).format(rng.randrange(12)) for _ in range(rng.randrange(1, 4))
            )
            wanted: dict[str, Any] = {
                "where": where, "before_index": rng.choice([0, 0, rng.randrange(1, 331)]),
                "limit": rng.choice([0, 1, 5]), "key": rng.choice(["", "", "k3"]),
            }
            by_index = await at.find(**wanted)
            topic.applied = type(topic.applied)(key_index="off")
            full = await at.find(**wanted)
            topic.applied = type(topic.applied)(key_index="keys+properties")
            assert [each.index for each in by_index.messages] == [each.index for each in full.messages], wanted
            assert by_index.looked_at + by_index.skipped >= full.looked_at or not full.before_index
            skipped += by_index.skipped
        assert skipped > 1000


async def test_statistics_and_explanations_say_which_ledgers_have_an_index(tmp_path: Path) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(50)))

        async def told() -> tuple[str, int, list[str]]:
            stats, why = await at.admin.topic_stats("t"), await at.admin.why_kept("t")
            sentences = [each.sentence for each in why.ledgers]
            return stats.key_index, stats.unindexed_ledgers, [
                next((part for part in each.split(". ") if "index" in part), "") for each in sentences
            ]

        assert await told() == ("off", 0, ["", "", ""])
        topic = await at.index(Policies(key_index="keys"))
        assert await told() == ("keys", 0, ["Its key index has keys.", "Its key index has keys.", ""])
        await at.admin.set_topic_policies(NAME, ON)
        await until(lambda: topic.applied.key_index == ON.key_index)
        assert (await told())[:2] == ("keys+properties", 2)
        await at.index(None)
        assert (await told())[2][0] == "Its key index has keys and properties."
        await topic.log.roll_ledger()
        assert (await told())[1:] == (
            1, ["Its key index has keys and properties."] * 2 + ["It has no key index yet.", ""]
        )  # fmt: skip


async def test_two_searches_of_a_topic_at_once_are_refused_also_by_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(40)))
        await at.index()
        entered, go_on = asyncio.Event(), asyncio.Event()
        find_candidates = key_indexes.KeyIndexSearch.find_candidates

        async def wait(self: Any, *args: Any) -> Any:
            entered.set()
            await go_on.wait()
            return await find_candidates(self, *args)

        monkeypatch.setattr(key_indexes.KeyIndexSearch, "find_candidates", wait)
        first = asyncio.create_task(at.find(key="k7"))
        await entered.wait()
        async with AdminClient(f"magnetar://{at.running.brokers[0].endpoint}", timeout_s=4.0) as other:
            with pytest.raises(BackPressure):
                await other.find_messages("t", key="k7")
        go_on.set()
        assert [each.index for each in (await first).messages] == [7]


async def test_a_search_by_indexes_alone_ends_in_time_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        await at.send(*(f"k{each}" for each in range(100)))
        await at.index()
        monkeypatch.setattr(finding, "SEARCH_S_MAX", 0.0)
        parts, before = 0, 0
        while True:
            part = await at.find(key="none", before_index=before)
            assert not part.messages
            parts += 1
            if not (before := part.before_index):
                break
            assert part.why == "it took 0 s"
        assert parts >= 5, "one ledger at a time"
