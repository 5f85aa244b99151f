"""The demo's Spark program: `python -m magnetar.cli.demo_query URL SOURCE SINK CHECKPOINT`, in a process of its
own.

A streaming query that reads the flights topic, aggregates delays per carrier and origin, and writes the table to the
sink topic after each micro-batch; Trigger.AvailableNow ends it after the messages that were stored at its start. The
sink is at least once: of the rows of a key the last one counts. On stdout a line of JSON per micro-batch:
`{"batch": 0, "rows": 9}`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ROWS_PER_BATCH = 120_000
"""Rows of a micro-batch, three of them for 336,776 rows: the state is used twice, and the whole takes seconds."""

FLIGHT_SCHEMA = "carrier string, origin string, dep_delay long, arr_delay long"


def start_spark_session(directory: str) -> Any:
    """Returns a Spark session that uses the processors of this machine, logs little, and writes all its files below
    `directory`."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": directory,
        "spark.sql.warehouse.dir": os.path.join(directory, "warehouse"),
        "spark.sql.shuffle.partitions": "2",
    }
    builder = SparkSession.builder.master("local[*]").appName("magnetar demo")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def aggregate_delays(flights: Any) -> Any:
    """Returns a Spark data frame with the columns key and value, and one row for each carrier and origin. The value is
    the JSON of their aggregated delays (`FlightDelays`)."""
    from pyspark.sql import functions as F

    parsed = flights.select(F.from_json(F.col("value").cast("string"), FLIGHT_SCHEMA).alias("flight")).select(
        "flight.*"
    )
    sums = parsed.groupBy("carrier", "origin").agg(
        F.count(F.lit(1)).alias("flights"),
        F.count("dep_delay").alias("departed"),
        F.coalesce(F.sum("dep_delay"), F.lit(0)).alias("dep_delay"),
        F.count("arr_delay").alias("arrived"),
        F.coalesce(F.sum("arr_delay"), F.lit(0)).alias("arr_delay"),
    )
    key = F.concat_ws("-", "carrier", "origin").cast("binary")
    return sums.select(key.alias("key"), F.to_json(F.struct(*sums.columns)).cast("binary").alias("value"))


def run_query(url: str, source: str, sink: str, directory: str) -> None:
    """Runs the query to its end, which is after the messages that the topic `source` had at the start, and reports each
    micro-batch on stdout. `url`: the service URL; `directory`: the folder of the checkpoint and of Spark's files.
    Raises Spark's exception if the query fails."""
    spark = start_spark_session(directory)
    flights = (
        spark.readStream.format("magnetar")
        .option("service.url", url)
        .option("topic", source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(ROWS_PER_BATCH))
        .load()
    )
    query = (
        aggregate_delays(flights)
        .writeStream.format("magnetar")
        .option("service.url", url)
        .option("topic", sink)
        .option("checkpointLocation", os.path.join(directory, "checkpoint"))
        .outputMode("complete")
        .trigger(availableNow=True)
        .start()
    )
    reported = -1
    while not query.awaitTermination(0.2):
        reported = _report(query, reported)
    _report(query, reported)
    spark.stop()


def _report(query: Any, reported: int) -> int:
    """Prints the micro-batches after number `reported`; returns the last number printed."""
    for progress in query.recentProgress:
        if progress["batchId"] > reported and progress["numInputRows"]:
            reported = progress["batchId"]
            print(json.dumps({"batch": reported, "rows": progress["numInputRows"]}), flush=True)
    return reported


if __name__ == "__main__":
    run_query(*sys.argv[1:5])
