"""Spark reads a topic into nothing, and writes one, in local[2]: with our connector, or with Spark's Kafka connector.

Both read with a stream that ends with the topic (availableNow), of which the seconds of addBatch count, in two
partitions; both write a cached frame of two partitions, at least once.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from ..spark import WARM_UP_ROWS, session
from .kafka_server import make_topic
from .maven import HERE, Missing, jars
from .receives import keep
from .sends import connect
from .turns import Figures

PARTITIONS = 2
QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
KAFKA_WRITES = {"kafka.acks": "all", "kafka.batch.size": "131072", "kafka.linger.ms": "5"}
"""Kafka's default of 16 KiB a batch would have a sync for each; ours are of 128 KiB."""


def connector() -> str:
    """The jars of Spark's Kafka connector, in the version of PySpark or else of the pom; Missing."""
    import pyspark

    pom, own = HERE / "spark_jars" / "pom.xml", f"spark-kafka-{pyspark.__version__}"
    try:
        folder = jars(own, pom, f"-Dspark.version={pyspark.__version__}")
    except Missing:
        folder = jars("spark-kafka-4.2.0", pom)  # not every version is in every registry; this one runs with 4.3
    return ",".join(str(each) for each in sorted(Path(folder).glob("*.jar")))


class Ours:
    """How our connector is named and told where to go."""

    format = "magnetar"

    def __init__(self, url: str) -> None:
        self._url, self.jars = url, ""

    def make(self, topic: str) -> None:
        with connect("magnetar", self._url) as client:
            keep(client, topic)

    def reads(self, topic: str) -> dict[str, str]:
        return {"service.url": self._url, "topic": topic}

    def writes(self, topic: str) -> dict[str, str]:
        return {"service.url": self._url, "topic": topic, "deliveryGuarantee": "at-least-once"}


class Kafka:
    format = "kafka"

    def __init__(self, url: str, found: str) -> None:
        self._url, self.jars = url, found

    def make(self, topic: str) -> None:
        make_topic(self._url, topic, PARTITIONS)

    def reads(self, topic: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self._url, "subscribe": topic}

    def writes(self, topic: str) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self._url, "topic": topic, **KAFKA_WRITES}


class _Spark:
    def __init__(self, side: Ours | Kafka, size: int, rows: int) -> None:
        self._side, self._rows = side, rows
        self._spark = session(QUIET | ({"spark.jars": side.jars} if side.jars else {}))
        value = f"cast(repeat('x', {size}) as binary) as value"
        self._frame = self._spark.range(0, rows, 1, PARTITIONS).selectExpr(value).cache()
        self._frame.count()

    def _write(self, topic: str, frame: Any) -> float:
        self._side.make(topic)
        writer = frame.write.format(self._side.format).options(**self._side.writes(topic)).mode("append")
        begin = time.perf_counter()
        writer.save()
        return time.perf_counter() - begin

    def close(self) -> None:
        self._spark.stop()


class Write(_Spark):
    def __init__(self, side: Ours | Kafka, size: int, rows: int) -> None:
        super().__init__(side, size, rows)
        self._write("warm-up", self._frame.limit(WARM_UP_ROWS))

    def turn(self, number: int, seconds: float) -> Figures:
        return {"rows_s": self._rows / self._write(f"write-{number}", self._frame)}


class Read(_Spark):
    def __init__(self, side: Ours | Kafka, size: int, rows: int) -> None:
        super().__init__(side, size, rows)
        self._write("read", self._frame)
        self._write("warm-up", self._frame.limit(WARM_UP_ROWS))
        self._read("warm-up")

    def turn(self, number: int, seconds: float) -> Figures:
        rows, taken_s = self._read("read")
        if rows < self._rows:
            raise AssertionError(f"{rows} of {self._rows} rows were read")
        return {"rows_s": rows / taken_s}

    def _read(self, topic: str) -> tuple[int, float]:
        reads = self._spark.readStream.format(self._side.format).options(**self._side.reads(topic))
        rows = reads.option("startingOffsets", "earliest").option("minPartitions", str(PARTITIONS)).load()
        with tempfile.TemporaryDirectory(prefix="spark-peer-") as checkpoint:
            writer = rows.select("value").writeStream.format("noop").option("checkpointLocation", checkpoint)
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
            if query.exception() is not None:
                raise RuntimeError(str(query.exception()))
            batches = [each for each in query.recentProgress if each["numInputRows"]]
        return sum(b["numInputRows"] for b in batches), sum(b["durationMs"]["addBatch"] for b in batches) / 1000
