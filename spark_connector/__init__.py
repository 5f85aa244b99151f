"""The Spark connector: `spark.read/readStream/writeStream/write.format("magnetar")`.

session.py makes a session in which the format is registered. Any other Spark session imports the top-level package
`pyspark_magnetar`, which Spark's workers can find and which imports this package. Reading order: options.py (the
options) → offsets.py (what a trigger reads; no I/O) → ranges.py (calls to the broker) → rows.py (entries to Arrow) →
source.py, sink.py (Spark's interfaces) → datasource.py (the entry point).

Guarantees: the source can read a range of indexes again, and then gives the same rows. The sink of a stream writes each
batch exactly once by default (sink.py). So a streaming query from topic to topic is exactly once. All other sinks write
at least once, unless the option deliveryGuarantee=exactly-once is set."""
