"""The Spark connector: `spark.read/readStream/writeStream/write.format("magnetar")`.

session.py makes a session that has the format registered. Any other Spark imports the top-level package
`pyspark_magnetar`, which points here, where its workers can find it. Reading order:
options.py (the options) → offsets.py (what a trigger reads; pure) → ranges.py (calls to the broker) →
rows.py (entries to Arrow) → source.py, sink.py (Spark's interfaces) → datasource.py (the entry point).

Guarantees: the source is replayable and deterministic for a range of indexes; the sink of a stream counts each batch
once (sink.py). So a query from topic to topic is exactly once. Other sinks are at least once, never less (sink.py).
"""
