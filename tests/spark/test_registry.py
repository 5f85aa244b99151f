"""Typed columns in Spark, by the schemas that a real server has."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from magnetar.client.model.composite_schemas import PreEncodedSchema
from magnetar.proto.errors import InvalidConfiguration
from magnetar.proto.schema import SchemaInfo, SchemaType
from magnetar.proto.statistics import TopicSchema
from magnetar.schema import AvroSchema, Integer, JsonSchema, Record, String
from magnetar.spark_connector.shapes import (
    find_newest_schema,
    find_reader_schema,
    make_typed_schema,
    merge_schema_columns,
)

TOPIC = "persistent://public/default/t"


class First:
    """A schema is known by the name of its class."""

    class Row(Record):
        name = String(required=True)
        count = Integer()


class Row(Record):
    name = String(required=True)
    count = Integer()
    note = String(default="none", required_default=True)


Old, New = First.Row, Row


# ------------------------------------------------------------------ what a query reads with
def version(number: int, fields: str, type_: SchemaType = SchemaType.AVRO, **more: Any) -> TopicSchema:
    definition = f'{{"type":"record","name":"R","fields":[{fields}]}}'
    return TopicSchema(number, SchemaInfo(type=type_, data=definition.encode()), 0, "", **more)


A, B = '{"name":"a","type":"int"}', '{"name":"b","type":"string"}'


def test_a_frame_keeps_its_columns_and_reads_with_the_newest_schema_that_has_them() -> None:
    versions = [version(0, A), version(1, f"{A},{B}"), version(2, B), version(3, f"{A},{B}", deleted=True)]
    assert [each.name for each in find_newest_schema(TOPIC, versions).record.fields] == ["b"]
    wanted = StructType([StructField("a", IntegerType()), StructField("__offset", LongType())])
    assert find_reader_schema(TOPIC, versions, wanted).info == versions[1].schema
    assert find_reader_schema(TOPIC, versions, StructType([StructField("b", StringType())])).info == versions[2].schema
    for name, type_, says in (
        ("a", LongType(), "column 'a' does not exist: the schema of persistent://public/default/t has b"),
        ("b", LongType(), "column 'b' of persistent://public/default/t is string, not bigint"),
    ):
        with pytest.raises(InvalidConfiguration, match=says):
            find_reader_schema(TOPIC, versions, StructType([StructField(name, type_)]))


def test_a_topic_without_a_schema_says_what_to_do() -> None:
    with pytest.raises(InvalidConfiguration, match=r"has no schema.*magnetar schemas upload"):
        find_newest_schema(TOPIC, [version(0, A, deleted=True)])
    with pytest.raises(InvalidConfiguration, match="no topic matches"):
        merge_schema_columns({}, [])


REFUSED = {
    "a is a union of int, string": version(0, '{"name":"a","type":["int","string"]}'),
    r"field a\.next contains itself": version(
        0, '{"name":"a","type":{"type":"record","name":"N","fields":[{"name":"next","type":["null","N"]}]}}'
    ),
    "field a is always null": version(0, '{"name":"a","type":"null"}'),
    "fields 'a' and 'A'": version(0, '{"name":"a","type":"int"},{"name":"A","type":"int"}'),
    "has no fields": version(0, ""),
    "is no Avro": version(0, '{"name":"a","type":"nonsense"}'),
    "type PROTOBUF, which has no columns": version(0, A, SchemaType.PROTOBUF),
    "type KEY_VALUE, which has no columns": version(0, A, SchemaType.KEY_VALUE),
}


@pytest.mark.parametrize("says", REFUSED)
def test_schemas_without_columns_are_refused_with_the_field(says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        find_newest_schema(TOPIC, [REFUSED[says]])


def test_a_definition_that_doubles_with_each_level_is_refused_at_once() -> None:
    schema: Any = '{"type":"record","name":"R0","fields":[{"name":"x","type":"int"}]}'
    for level in range(1, 40):
        schema = (
            f'{{"type":"record","name":"R{level}","fields":[{{"name":"a","type":{schema}}},'
            f'{{"name":"b","type":"R{level - 1}"}}]}}'
        )
    with pytest.raises(InvalidConfiguration, match="more than 10000 types"):
        make_typed_schema(TOPIC, SchemaInfo(type=SchemaType.AVRO, data=schema.encode()))


def test_topics_of_a_query_have_the_same_columns_and_none_of_the_others_names() -> None:
    one, two = find_newest_schema("one", [version(0, A)]), find_newest_schema("two", [version(0, B)])
    with pytest.raises(InvalidConfiguration, match="topics one and two have different columns: a int; b string"):
        merge_schema_columns({"one": one, "two": two}, [])
    meta = find_newest_schema("m", [version(0, '{"name":"__key","type":"int"}')])
    with pytest.raises(InvalidConfiguration, match="a field '__key', which is the name of another column"):
        merge_schema_columns({"m": meta}, [StructField("__key", LongType())])


# ------------------------------------------------------------------ in Spark
def frame(spark: Any, url: str, topic: str, **options: str) -> Any:
    options = {"service.url": url, "topic": topic, "schema": "registry", **options}
    return spark.read.format("magnetar").options(**options)


def filled(client: Any, topic: str, schema: Any, *given: Any) -> None:
    producer = client.create_producer(topic, schema=schema)
    for each in given:
        producer.send(each, partition_key="k")
    producer.close()


@pytest.mark.spark
@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_a_topic_that_evolves_is_one_table(spark: Any, url: str, client: Any, kind: Any) -> None:
    topic = f"typed-{kind.__name__}"
    client.subscribe(topic, "keep").close()
    filled(client, topic, kind(Old), Old(name="a", count=1))
    older = frame(spark, url, topic).load()
    assert [each.name for each in older.schema if each.name[:2] != "__"] == ["name", "count"]
    filled(client, topic, kind(New), New(name="b", count=2, note="x"), New(name="c"))
    found = frame(spark, url, topic).load().orderBy("__offset")
    assert [tuple(row) for row in found.select("name", "count", "note", "__key").collect()] == [
        ("a", 1, "none", b"k"), ("b", 2, "x", b"k"), ("c", None, "none", b"k")
    ]  # fmt: skip
    assert older.orderBy("__offset").select("name", "count").collect()[2] == ("c", None)
    assert found.groupBy().sum("count").collect()[0][0] == 3


@pytest.mark.spark
def test_a_stream_reads_by_the_registry_and_a_stranger_is_null(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    topic = "typed-stream"
    client.subscribe(topic, "keep").close()
    filled(client, topic, JsonSchema(Old), Old(name="a", count=1))
    written = SchemaInfo(type=SchemaType.JSON, data=JsonSchema(Old).info().data, name="Row")
    filled(client, topic, PreEncodedSchema(written), b"junk")
    rows = (
        spark.readStream.format("magnetar").option("service.url", url).option("topic", topic)
        .option("schema", "registry").option("schemaErrors", "null").option("startingOffsets", "earliest").load()
    )  # fmt: skip
    query = (
        rows.writeStream.format("memory").queryName("typed").trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path)).start()
    )  # fmt: skip
    query.awaitTermination()
    assert query.exception() is None
    found = spark.sql("select name, count, __offset from typed order by __offset").collect()
    assert [tuple(row) for row in found] == [("a", 1, 0), (None, None, 1)]
    with pytest.raises(Exception, match=r"message 1 of .* is not of its schema"):
        frame(spark, url, topic).load().collect()


@pytest.mark.spark
def test_wrong_options_are_refused_before_a_query_starts(spark: Any, url: str, client: Any) -> None:
    client.subscribe("untyped", "keep").close()
    for topic, options, says in (
        ("untyped", {}, "has no schema"),
        ("t", {"schema": "avro"}, "'schema' must be one of registry"),
        ("t", {"valueFormat": "string"}, "'valueformat' has no meaning with schema=registry"),
        ("t", {"schemaErrors": "skip"}, "'schemaerrors' must be one of fail, null"),
    ):
        with pytest.raises(Exception, match=says):
            frame(spark, url, topic, **options).load()


@pytest.mark.spark
@pytest.mark.parametrize("kind", [AvroSchema, JsonSchema])
def test_rows_are_written_by_the_schema_and_name_its_version(spark: Any, url: str, client: Any, kind: Any) -> None:
    """What was read is written to another topic; a consumer of the class reads it; wrong columns are refused."""
    source, target = f"typed-from-{kind.__name__}", f"typed-to-{kind.__name__}"
    consumer = client.subscribe(target, "keep", schema=kind(Old))
    client.subscribe(source, "keep").close()
    filled(client, source, kind(New), New(name="a", count=1), New(name="b"))
    client.create_producer(target, schema=kind(New)).close()  # version 1; the consumer's is version 0
    rows = frame(spark, url, source).load()
    save = lambda given: given.write.format("magnetar").options(
        **{"service.url": url, "topic": target, "schema": "registry"}
    ).mode("append").save()  # fmt: skip
    save(rows.orderBy("__offset"))
    save(spark.createDataFrame([("c", 3)], "name string, count int"))
    found = [consumer.receive(timeout_millis=10_000) for _ in range(3)]
    assert sorted((m.value().name, m.value().count) for m in found) == [("a", 1), ("b", None), ("c", 3)]
    assert {m.partition_key() for m in found} == {"k", ""}
    assert {m.schema_version() for m in found} == {"\0" * 7 + "\1"}
    assert [row.note for row in frame(spark, url, target).load().orderBy("__offset").collect()] == ["none"] * 3
    for wrong, says in (
        (rows.selectExpr("name", "cast(count as bigint) count"), "column 'count' is bigint.*it is int: cast it"),
        (rows.select("count"), "column 'name' is missing"),
        (rows.selectExpr("name", "1 as other"), "column 'other' is no field"),
    ):
        with pytest.raises(Exception, match=says):
            save(wrong)
    with pytest.raises(Exception, match="column 'name' holds null"):
        save(spark.createDataFrame([(None, 3)], "name string, count int"))


@pytest.mark.spark
def test_a_stream_goes_on_while_the_schema_evolves_and_restarts(
    spark: Any, url: str, client: Any, tmp_path: Path
) -> None:
    """A version that is new in the middle of a stream, and a restart that reads by it; each row once, from topic to
    topic."""
    source, target = "typed-evolves", "typed-evolved"
    for topic in (source, target):
        client.subscribe(topic, "keep").close()
    client.create_producer(target, schema=JsonSchema(Old)).close()

    def run() -> None:
        rows = (
            spark.readStream.format("magnetar").option("service.url", url).option("topic", source)
            .option("schema", "registry").option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 1)
            .load().select("name", "count", "__key")
        )  # fmt: skip
        query = (
            rows.writeStream.format("magnetar").option("service.url", url).option("topic", target)
            .option("schema", "registry").option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
        assert query.exception() is None

    filled(client, source, AvroSchema(Old), Old(name="a", count=1), Old(name="b", count=2))
    filled(client, source, AvroSchema(New), New(name="c", count=3, note="x"))
    run()
    filled(client, source, AvroSchema(Old), Old(name="d", count=4))
    filled(client, source, AvroSchema(New), New(name="e", count=5, note="x"))
    run()
    found = frame(spark, url, target).load().orderBy("__offset").select("name", "count").collect()
    assert [tuple(row) for row in found] == [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)]
