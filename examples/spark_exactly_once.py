"""Spark from topic to topic, exactly once: a batch that runs again counts once.

    pip install 'magnetar[spark]'
    python examples/spark_exactly_once.py magnetar://localhost:7650
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import magnetar


def copy(spark: Any, service_url: str, source: str, sink: str, checkpoint: Path) -> None:
    """All that is there now."""
    rows = (
        spark.readStream.format("magnetar")
        .options(**{"service.url": service_url, "topic": source, "startingOffsets": "earliest"})
        .load()
    )
    query = (
        rows.selectExpr("key", "upper(cast(value as string)) as value")
        .writeStream.format("magnetar")
        .options(**{"service.url": service_url, "topic": sink, "deliveryGuarantee": "exactly-once", "sinkId": sink})
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    words, loud = f"spark-words-{run}", f"spark-loud-{run}"
    with magnetar.Client(service_url) as client, TemporaryDirectory() as folder:
        with client.create_producer(words) as producer:
            for word in ("one", "two", "three"):
                producer.send(word.encode())
        consumer = client.subscribe(loud, "reader")

        spark = magnetar.spark_session()
        copy(spark, service_url, words, loud, Path(folder))
        for note in Path(folder, "commits").iterdir():  # as if Spark was killed before it noted the batch
            note.unlink()
        copy(spark, service_url, words, loud, Path(folder))
        spark.stop()

        received = sorted(consumer.receive(timeout_millis=30_000).data() for _ in range(3))
        try:
            received.append(consumer.receive(timeout_millis=1_000).data())
        except magnetar.Timeout:
            print("each word once:", received)
        assert received == [b"ONE", b"THREE", b"TWO"]


if __name__ == "__main__":
    main(sys.argv[1])
