"""The driver of `python -m tests.spark.kills`, a process of its own that is killed with its JVM.

    python -m tests.spark.kill_driver URL CHECKPOINT GUARANTEE
    ready → "run TASKS" → started → done | failed REASON → "run TASKS" → …

A run reads all that is in the topic `in`, through a shuffle into so many tasks, and writes it to `out`.
"""

import os
import sys
from pathlib import Path
from typing import Any

SINK = "kills"
BATCH_ROWS = 8000


def query(spark: Any, url: str, checkpoint: Path, guarantee: str, tasks: int) -> Any:
    rows = (
        spark.readStream.format("magnetar").option("service.url", url).option("topic", "in")
        .option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", BATCH_ROWS)
        .option("subscription", "query").load().select("value").repartition(tasks)
    )  # fmt: skip
    writer = (
        rows.writeStream.format("magnetar").option("service.url", url).option("topic", "out")
        .option("deliveryGuarantee", guarantee).option("checkpointLocation", str(checkpoint))
        .option("magnetar.producer.batching_max_messages", 20)
    )  # fmt: skip
    if guarantee == "exactly-once":
        writer = writer.option("sinkId", SINK).option("sendAtEnd", "false")
    return writer.trigger(availableNow=True).start()


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    url, checkpoint, guarantee = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    spark = (
        SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2").config("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
        .getOrCreate()
    )  # fmt: skip
    spark.sparkContext.setLogLevel("OFF")
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            running = query(spark, url, checkpoint, guarantee, int(line.split()[1]))
            print("started", flush=True)
            running.awaitTermination()
        except Exception as error:
            print("failed", " ".join(str(error).split())[:2000], flush=True)
        else:
            print("done", flush=True)


if __name__ == "__main__":
    main()
