"""Exactly once inside Spark: real sessions, a real server; queries that run again, lose a checkpoint, or fail."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import magnetar
from tests.spark.test_spark import fill, numbers, source

pytestmark = pytest.mark.spark


def landed(spark: Any, url: str, topic: str) -> list[int]:
    """What a reader of committed messages finds, sorted."""
    values = source(spark.read, url, topic).selectExpr("cast(value as string) value").collect()
    return sorted(int(row.value) for row in values)


def keep(client: Any, *topics: str) -> None:
    for topic in topics:
        client.subscribe(topic, "keep", initial_position=magnetar.InitialPosition.Earliest).close()


def sink(writer: Any, url: str, topic: str, **options: object) -> Any:
    writer = writer.format("magnetar").option("service.url", url).option("topic", topic)
    for name, value in ({"deliveryGuarantee": "exactly-once"} | options).items():
        writer = writer.option(name, value)
    return writer


def stream(spark: Any, url: str, topics: tuple[str, str], checkpoint: Path, tasks: int = 2, **options: object) -> None:
    """From topic to topic, to the end of what is there."""
    reading = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 500}
    rows = source(spark.readStream, url, topics[0], **reading).select("value").repartition(tasks)
    writer = sink(rows.writeStream, url, topics[1], **options)
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def forget_commit(checkpoint: Path) -> int:
    """As if the driver was killed after the sink's commit and before Spark noted it: the batch runs again."""
    last = max(int(each.name) for each in (checkpoint / "commits").iterdir() if each.name.isdigit())
    for each in (checkpoint / "commits").glob(f"*{last}*"):
        each.unlink()
    return last


def test_a_batch_that_runs_again_counts_once_with_other_tasks_too(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    fill(client, "eo-from", numbers(900))
    keep(client, "eo-to")
    stream(spark, url, ("eo-from", "eo-to"), tmp_path)
    forget_commit(tmp_path)
    stream(spark, url, ("eo-from", "eo-to"), tmp_path, 3)
    assert landed(spark, url, "eo-to") == list(range(900))
    fill(client, "eo-from", numbers(100, 900), keep=False)
    stream(spark, url, ("eo-from", "eo-to"), tmp_path)
    assert landed(spark, url, "eo-to") == list(range(1000))


def test_at_least_once_a_batch_that_runs_again_counts_twice(spark: Any, url: str, client: Any, tmp_path: Path) -> None:
    """The control: without transactions the same run doubles."""
    fill(client, "alo-from", numbers(300))
    keep(client, "alo-to")
    options = {"deliveryGuarantee": "at-least-once"}
    stream(spark, url, ("alo-from", "alo-to"), tmp_path, **options)
    forget_commit(tmp_path)
    stream(spark, url, ("alo-from", "alo-to"), tmp_path, **options)
    assert landed(spark, url, "alo-to") == sorted([*range(300), *range(300)])


def test_a_lost_checkpoint_under_a_fixed_sink_is_an_error_that_names_the_options(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    fill(client, "lost-from", numbers(100))
    keep(client, "lost-to")
    stream(spark, url, ("lost-from", "lost-to"), tmp_path / "one", sinkId="lost")
    with pytest.raises(Exception, match="onNewCheckpoint=adopt"):
        stream(spark, url, ("lost-from", "lost-to"), tmp_path / "two", sinkId="lost")
    assert landed(spark, url, "lost-to") == list(range(100))
    shutil.rmtree(tmp_path / "two")
    stream(spark, url, ("lost-from", "lost-to"), tmp_path / "two", sinkId="lost", onNewCheckpoint="adopt")
    assert landed(spark, url, "lost-to") == sorted([*range(100), *range(100)])


def test_foreachbatch_counts_once_by_its_number(spark: Any, url: str, client: Any, tmp_path: Path) -> None:
    fill(client, "each-from", numbers(500))
    keep(client, "each-to")

    def write(frame: Any, number: int) -> None:
        sink(frame.write, url, "each-to", txnAppId="each", txnVersion=number).mode("append").save()

    def run() -> None:
        rows = source(spark.readStream, url, "each-from", startingOffsets="earliest").select("value")
        query = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    forget_commit(tmp_path)
    run()
    assert landed(spark, url, "each-to") == list(range(500))


def failing(spark: Any, rows: int) -> Any:
    """The last row of one task cannot be written; the others have sent theirs."""
    values = spark.range(rows).selectExpr("cast(id as string) value", f"if(id = {rows - 1}, -1, null) partition")
    return values.repartition(2)


def test_a_batch_query_that_fails_leaves_nothing_and_one_with_a_number_counts_once(
    spark: Any, url: str, client: Any
) -> None:
    keep(client, "batch-to")
    with pytest.raises(Exception, match="partition -1"):
        sink(failing(spark, 200).write, url, "batch-to", sinkId="batch", batchId=1).mode("append").save()
    assert landed(spark, url, "batch-to") == []
    values = spark.range(200).selectExpr("cast(id as string) value").repartition(2)
    for _ in range(2):
        sink(values.write, url, "batch-to", sinkId="batch", batchId=1).mode("append").save()
    assert landed(spark, url, "batch-to") == list(range(200))
    with magnetar.admin.Admin(url) as admin:
        found = admin.topic_stats("batch-to").transactions
    assert found is not None
    assert found.open == 0, "the commit of the batch ends what earlier tries left"


def test_what_failed_has_no_rows_for_the_source_and_is_not_lost(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    """Indexes of aborted messages are in the ranges of a stream, and are skipped."""
    keep(client, "holes")
    with client.create_producer("holes") as producer:
        for count in (50, 60):
            for is_aborted in (True, False):
                txn = client.transaction()
                for number in range(count):
                    producer.send(b"%d" % number, txn=txn)
                (txn.abort if is_aborted else txn.commit)(wait="visible")
    with magnetar.admin.Admin(url) as admin:
        found = admin.offsets("holes", aborted_in=(0, 1000))
    assert (found.earliest_index, found.end_index, found.aborted) == (0, 220, 110), "aborted messages have indexes"
    keep(client, "holes-to")
    stream(spark, url, ("holes", "holes-to"), tmp_path)
    assert landed(spark, url, "holes") == sorted([*range(50), *range(60)])
    assert Counter(landed(spark, url, "holes-to")) == Counter([*range(50), *range(60)])


def test_the_guarantee_is_refused_where_it_cannot_hold(spark: Any, url: str, tmp_path: Path) -> None:
    values = spark.range(1).selectExpr("cast(id as string) value")
    with pytest.raises(Exception, match="go together"):
        sink(values.write, url, "x", sinkId="a").mode("append").save()
    with pytest.raises(Exception, match="cannot be overwritten"):
        sink(values.write, url, "x").mode("overwrite").save()
