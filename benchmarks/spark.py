"""spark-read and spark-write: the connector in local[2], against a server process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from .harness import Options, Run, measured, server
from .messaging import TOPIC, Sending, payloads

WARM_UP_ROWS = 20_000


def session(more: Mapping[str, str] | None = None) -> Any:
    """Spark in local[2]; `more`: settings that it takes at its start."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark's workers take the first python3 of PATH
    return (
        SparkSession.builder.master("local[2]").appName("magnetar-benchmark").config(map=dict(more or {}))
        .config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
    )  # fmt: skip


def stream_to_noop(spark: Any, url: str, topic: str, **more: str) -> tuple[int, float]:
    """(rows, seconds of addBatch) of one Trigger.AvailableNow run over the whole topic."""
    rows = spark.readStream.format("magnetar").option("service.url", url).option("topic", topic).options(**more)
    with tempfile.TemporaryDirectory(prefix="magnetar-bench-") as checkpoint:
        query = (
            rows.option("startingOffsets", "earliest").option("minPartitions", "2").load()
            .writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
        if query.exception() is not None:
            raise RuntimeError(str(query.exception()))
        batches = [p for p in query.recentProgress if p["numInputRows"]]
        return sum(p["numInputRows"] for p in batches), sum(p["durationMs"]["addBatch"] for p in batches) / 1000


def spark_read(options: Options) -> Run:
    import magnetar

    spark = session()
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        for topic, rows in (("warm-up", min(WARM_UP_ROWS, options.messages)), (TOPIC, options.messages)):
            client.subscribe(topic, "keep", initial_position=magnetar.InitialPosition.Earliest).close()
            producer = client.create_producer(
                topic, batching_enabled=True, block_if_queue_full=True, max_pending_messages=20_000
            )
            Sending(producer, payloads(options.size, options.seed)).run(messages=rows)
        stream_to_noop(spark, running.url, "warm-up")
        run = Run(0.0)
        with measured(run, tree=True, server=running.pid):
            rows, seconds = stream_to_noop(spark, running.url, TOPIC)
        assert rows == options.messages, f"{rows} rows were read, {options.messages} are there"
        run.value, run.detail = rows / seconds, {"rows": rows, "add_batch_s": seconds}
        return run


def spark_write(options: Options) -> Run:
    """With `exactly_once`, at least once is measured in the same run, before and after it; `ratio` compares the two."""
    import magnetar

    spark = session()
    once = bool(options.extra.get("exactly_once"))
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        for topic in ("warm-up", TOPIC, "before", "after"):
            client.subscribe(topic, "keep", initial_position=magnetar.InitialPosition.Earliest).close()
        value = f"cast(repeat('x', {options.size}) as binary) as value"
        rows = spark.range(0, options.messages, 1, 2).selectExpr(value).cache()
        rows.count()
        written = lambda frame, topic, once: _seconds_of_write(frame, running.url, topic, once)
        for each in {False, once}:
            written(rows.limit(WARM_UP_ROWS), "warm-up", each)
        others = [written(rows, "before", False)] if once else []
        run = Run(0.0)
        with measured(run, tree=True, server=running.pid):
            seconds = written(rows, TOPIC, once)
        others += [written(rows, "after", False)] if once else []
        end = spark.read.format("magnetar").option("service.url", running.url).option("topic", TOPIC).load().count()
        assert end == options.messages if once else end >= options.messages, f"{end} of {options.messages} rows"
        run.value, run.detail = options.messages / seconds, {"rows": options.messages, "seconds": seconds, "found": end}
        if once:
            run.detail |= {"at_least_once_s": others, "ratio": sum(others) / len(others) / seconds}
        return run


def _seconds_of_write(rows: Any, url: str, topic: str, once: bool) -> float:
    guarantee = "exactly-once" if once else "at-least-once"
    writer = rows.write.format("magnetar").option("service.url", url).option("topic", topic)
    begin = time.perf_counter()
    writer.option("deliveryGuarantee", guarantee).mode("append").save()
    return time.perf_counter() - begin
