"""The Spark connector: `spark.read/readStream/writeStream/write.format("magnetar")`.

session.py makes a session in which the format is registered. Any other Spark session imports the top-level package
`pyspark_magnetar`, which Spark's workers can find and which imports this package. Reading order: options.py (the
options) → offsets.py (what a trigger reads; no I/O) → ranges.py (calls to the broker) → rows.py (entries to Arrow) →
source.py, sink.py (Spark's interfaces) → datasource.py (the entry point).

Guarantees: the source is replayable, and deterministic for a range of indexes; the sink of a stream counts each batch
once (sink.py). So a streaming query from topic to topic is exactly once. All other sinks are at least once
(sink.py)."""
