"""The connector inside Spark: real sessions, a real server, `format("magnetar")` without any registration."""

import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import magnetar
from magnetar.cli.common.processes import Processes

pytestmark = pytest.mark.spark


def fill(client: Any, topic: str, values: Iterable[bytes], *, keep: bool = True, **producer: Any) -> None:
    """Sends, and keeps the messages by a subscription (without one a topic need not keep anything)."""
    if keep:
        client.subscribe(topic, "keep", initial_position=magnetar.InitialPosition.Earliest).close()
    with client.create_producer(topic, batching_enabled=True, block_if_queue_full=True, **producer) as sending:
        for value in values:
            sending.send_async(value, None)


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [str(i).encode() for i in range(start, start + count)]


def source(reader: Any, url: str, topic: str, **options: object) -> Any:
    reader = reader.format("magnetar").option("service.url", url).option("topic", topic)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def read_available(spark: Any, url: str, topic: str, into: Path, **options: object) -> list[int]:
    """Runs a query to the end of what is there; the rows of each batch. Values land in `into`/data."""
    rows = source(spark.readStream, url, topic, **options)
    query = (
        rows.selectExpr("cast(value as string) as value", "partition", "offset").writeStream.format("json")
        .option("path", str(into / "data")).option("checkpointLocation", str(into / "checkpoint"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def landed(spark: Any, into: Path) -> list[int]:
    return sorted(int(row.value) for row in spark.read.json(str(into / "data")).collect())


def test_a_batch_reads_every_message_once_and_in_order(spark: Any, url: str, client: Any) -> None:
    fill(client, "batch", numbers(2_500))
    rows = source(spark.read, url, "batch").select("offset", "value", "topic", "partition").collect()
    assert [(row.offset, bytes(row.value)) for row in rows] == list(enumerate(numbers(2_500)))
    assert {(row.topic, row.partition) for row in rows} == {("persistent://public/default/batch", 0)}


def test_ranges_of_a_batch_are_kafkas_json(spark: Any, url: str, client: Any) -> None:
    fill(client, "ranges", numbers(1_000))
    found = source(
        spark.read, url, "ranges", startingOffsets='{"ranges":{"0":10}}', endingOffsets='{"ranges":{"0":20}}'
    )
    assert [bytes(row.value) for row in found.select("value").collect()] == numbers(10, 10)


def test_times_choose_the_first_message_published_since(spark: Any, url: str, client: Any) -> None:
    fill(client, "times", numbers(10))
    middle = client.create_producer("times").send(b"a mark")
    reader = client.create_reader("times", middle, start_message_id_inclusive=True)
    at = reader.read_next(10_000).publish_timestamp()
    found = source(spark.read, url, "times", startingTimestamp=at).select("value").collect()
    assert bytes(found[-1].value) == b"a mark"
    assert len(found) <= 11


def test_minpartitions_splits_one_partition_into_tasks(spark: Any, url: str, client: Any) -> None:
    fill(client, "split", numbers(1_000))
    found = source(spark.read, url, "split", minPartitions=4)
    assert found.rdd.getNumPartitions() == 4
    assert sorted(row.offset for row in found.select("offset").collect()) == list(range(1_000))


def test_a_stream_is_limited_per_trigger_and_goes_on_from_its_checkpoint(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    fill(client, "stream", numbers(1_000))
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 300}
    assert read_available(spark, url, "stream", tmp_path, **options) == [300, 300, 300, 100]
    fill(client, "stream", numbers(50, 1_000), keep=False)
    assert read_available(spark, url, "stream", tmp_path, **options) == [50]
    assert landed(spark, tmp_path) == list(range(1_050))


def test_partitions_of_a_topic_share_the_limit_and_all_are_read(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    with magnetar.admin.Admin(url) as admin:
        admin.create_topic("parts", partitions=3)
    client.subscribe("parts", "keep", initial_position=magnetar.InitialPosition.Earliest).close()
    with client.create_producer("parts", batching_enabled=True, block_if_queue_full=True) as sending:
        for i in range(900):
            sending.send_async(str(i).encode(), None, partition_key=f"key-{i}")
    batches = read_available(spark, url, "parts", tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger=400)
    assert sum(batches) == 900
    assert max(batches) <= 400
    assert landed(spark, tmp_path) == list(range(900))


def test_a_durable_subscription_moves_with_sparks_commit(spark: Any, url: str, client: Any, tmp_path: Path) -> None:
    fill(client, "durable", numbers(500), batching_max_messages=10)
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 100, "subscription": "spark-job"}
    assert read_available(spark, url, "durable", tmp_path, **options) == [100] * 5
    with magnetar.admin.Admin(url) as admin:
        backlog = {each.name: each.backlog for each in admin.topic_stats("durable").subscriptions}
    assert backlog["keep"] == 500
    assert 0 <= backlog["spark-job"] <= 100  # the commit of the last batch comes when the next one is planned


def test_what_was_written_is_what_is_read(spark: Any, url: str, client: Any) -> None:
    client.subscribe("sink", "keep", initial_position=magnetar.InitialPosition.Earliest).close()
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    rows = [
        (b"a", bytearray(b"one"), {"p": "1"}, at),
        (b"\xff", bytearray(b"two"), None, None),
        (None, None, None, None),
    ]
    schema = "key binary, value binary, properties map<string,string>, eventTime timestamp"
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    frame.write.format("magnetar").option("service.url", url).option("topic", "sink").mode("append").save()
    found = source(spark.read, url, "sink").orderBy("offset").collect()
    assert [row.key and bytes(row.key) for row in found] == [b"a", b"\xff", None]
    assert [row.value and bytes(row.value) for row in found] == [b"one", b"two", None]
    assert [row.properties for row in found] == [{"p": "1"}, {}, {}]
    assert found[0].eventTime.timestamp() == at.timestamp()


def test_a_full_producer_makes_the_sink_wait(spark: Any, url: str, client: Any) -> None:
    client.subscribe("narrow", "keep", initial_position=magnetar.InitialPosition.Earliest).close()
    writer = spark.range(20_000).selectExpr("cast(id as string) value").coalesce(1).write.format("magnetar")
    narrow = writer.option("magnetar.producer.max_pending_messages", 1000)
    narrow.option("service.url", url).option("topic", "narrow").mode("append").save()
    assert source(spark.read, url, "narrow").count() == 20_000


def test_messages_that_are_gone_fail_the_query_unless_told_otherwise(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    fill(client, "gone", numbers(100))
    read_available(spark, url, "gone", tmp_path, startingOffsets="earliest")
    with magnetar.admin.Admin(url) as admin:
        admin.delete_topic("gone", force=True)
    fill(client, "gone", numbers(10, 200))
    with pytest.raises(Exception, match="made anew"):
        read_available(spark, url, "gone", tmp_path, startingOffsets="earliest")
    assert read_available(spark, url, "gone", tmp_path, startingOffsets="earliest", failOnDataLoss="false") == [10]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"maxOffsetPerTrigger": "5"}, "unknown option"), ({"startingOffsets": "sometimes"}, "startingoffsets")],
)
def test_a_wrong_option_reaches_the_user_with_its_reason(
    spark: Any, url: str, options: dict[str, str], says: str
) -> None:
    with pytest.raises(Exception, match=says):
        source(spark.readStream, url, "batch", **options)


def test_a_topic_that_does_not_exist_is_named(spark: Any, url: str) -> None:
    with pytest.raises(Exception, match="no-such-topic"):
        source(spark.read, url, "no-such-topic").count()


def test_the_sink_refuses_rows_without_value_and_overwriting(spark: Any, url: str) -> None:
    writer = spark.range(1).write.format("magnetar").option("service.url", url).option("topic", "x")
    with pytest.raises(Exception, match="needs a column 'value'"):
        writer.mode("append").save()
    values = spark.range(1).selectExpr("cast(id as string) value").write.format("magnetar")
    with pytest.raises(Exception, match="cannot be overwritten"):
        values.option("service.url", url).option("topic", "x").mode("overwrite").save()


def test_a_killed_server_that_comes_back_does_not_fail_the_query(
    spark: Any, started: Processes, tmp_path: Path
) -> None:
    """Reads go on behind the last entry that came, under the operation's deadline."""
    server = started.start("first", "standalone", "--port", "0", "--data", "data")
    url = server.wait_ready()
    with magnetar.Client(url) as client:
        fill(client, "survivor", numbers(2_000))
    port = int(url.rpartition(":")[2])
    server.kill()
    started.start("again", "standalone", "--port", str(port), "--data", "data").wait_ready()
    assert source(spark.read, url, "survivor").count() == 2_000


def test_a_streaming_query_holds_its_data_by_a_subscription_of_its_own(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    """Named after the id of its checkpoint, over restarts; it lags by one batch; `magnetar spark` lists and ends it."""
    topic = f"held-{uuid4().hex[:8]}"
    producer = client.create_producer(topic)

    def run(**options: str) -> str:
        rows = spark.readStream.format("magnetar").option("service.url", url).option("topic", topic).options(**options)
        query = (
            rows.option("startingOffsets", "earliest").option("minPartitions", "3").load()
            .writeStream.format("noop").option("checkpointLocation", str(tmp_path / "-".join(["at", *options])))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
        assert query.exception() is None
        return str(query.id)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "magnetar.cli.main", "--url", url, "-o", "json", "spark", *words]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    def listed() -> list[dict[str, Any]]:
        return [row for row in json.loads(command("queries").stdout) if row["topic"].endswith(topic)]

    for number in range(30):
        producer.send(b"%d" % number)
    run(durableCursor="false")
    assert listed() == []
    id_ = run()
    assert [(row["query"], row["lag"]) for row in listed()] == [(id_, 30)]
    for number in range(10):
        producer.send(b"%d" % number)
    assert run() == id_
    assert [(row["query"], row["lag"]) for row in listed()] == [(id_, 10)]
    assert command("forget", id_).returncode == 2, "it asks, and there is no terminal"
    assert command("forget", id_, "--yes").returncode == 0
    assert listed() == []
    assert command("forget", id_, "--yes").returncode == 4, "there is no such query any more"


def test_latest_is_fixed_by_the_first_trigger_and_stays_over_a_restart(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    """The first batch is empty, and is in the checkpoint: what comes later is read, by a restarted query too."""
    topic = f"from-latest-{uuid4().hex[:8]}"
    fill(client, topic, numbers(20))
    assert sum(read_available(spark, url, topic, tmp_path)) == 0
    fill(client, topic, numbers(7, 100), keep=False)
    assert sum(read_available(spark, url, topic, tmp_path)) == 7
    assert landed(spark, tmp_path) == list(range(100, 107))


def test_a_progress_has_the_description_of_its_source_and_how_far_it_lags(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    topic = f"progress-{uuid4().hex[:8]}"
    fill(client, topic, numbers(30))
    rows = source(spark.readStream, url, topic, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    query = (
        rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "at"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    found = [json.loads(each.json)["sources"][0] for each in query.recentProgress]
    full = f"persistent://public/default/{topic}"
    told = [each["latestOffset"]["source"] for each in found]
    assert [each["lag"] for each in told] == [20, 10, 0]
    assert [each["lagByTopic"] for each in told] == [{full: 20}, {full: 10}, {full: 0}]
    assert told[0]["lagBytes"] > told[1]["lagBytes"] > told[2]["lagBytes"] == 0
    assert told[0]["description"] == f"magnetar: {full}; 1 partitions"
    assert [each["endOffset"][full]["0"] for each in found] == [10, 20, 30]
    assert all(each["latestOffset"][full]["0"] == 30 and each["numInputRows"] == 10 for each in found)
