"""Columns by the schema of a topic: `schema=registry` for the source and the sink (docs/spark.md).

shapes.py      a definition of Avro as types: Spark's, Arrow's, and that of its JSON
registry.py    which of a topic's schemas a query reads with, and the columns that gives
decoding.py    payloads of a batch to columns
columns.py     values decoded from JSON to Arrow
encoding.py    columns of a batch to payloads, and whether they are those of the schema
"""
