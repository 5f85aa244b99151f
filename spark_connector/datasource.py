"""The entry point of the connector: the class that Spark calls for format("magnetar"). It checks the options before any
work (options.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from .options import SourceOptions


class MagnetarDataSource(DataSource):
    """Spark's data source "magnetar", which makes streaming and batch tables of topics. The columns are described in
    rows.py, the options in docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        return "magnetar"

    def _source(self, *, streaming: bool) -> SourceOptions:
        from .options import parse_source_options

        return parse_source_options(dict(self.options), streaming=streaming)

    def schema(self) -> StructType:
        """Returns the columns of the table. Asks the brokers for the topics' schemas with schema=registry. Raises
        InvalidConfiguration only for options that are wrong for both streams and batches: Spark does not say which of
        them it plans. With schema=registry also raises InvalidConfiguration if the schemas cannot be represented as
        columns, and the errors of `QueryConnection`."""
        from ..proto.errors import InvalidConfiguration

        try:
            options = self._source(streaming=True)
        except InvalidConfiguration as as_stream:
            try:
                options = self._source(streaming=False)
            except InvalidConfiguration as as_batch:
                raise (as_batch if "for a stream" in str(as_stream) else as_stream) from None
        return _columns(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from .source import MagnetarReader

        options = self._source(streaming=False)
        _check_columns(schema, options)
        return MagnetarReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from .source import MagnetarStreamReader

        options = self._source(streaming=True)
        _check_columns(schema, options)
        return MagnetarStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from .sink import make_batch_writer

        return make_batch_writer(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from .sink import make_stream_writer

        return make_stream_writer(dict(self.options), schema, overwrite)


def _columns(options: SourceOptions) -> StructType:
    """Returns the columns of a query whose user gave no schema."""
    from . import rows

    if not options.by_registry:
        return rows.make_default_columns(options)
    from .ranges import get_query_connection
    from .shapes import merge_schema_columns

    return merge_schema_columns(
        get_query_connection(options).find_newest_schemas(), rows.list_metadata_columns(options)
    )


def _check_columns(schema: StructType, options: SourceOptions) -> None:
    """Checks the columns that the user of a query gave, before the query is planned. Raises InvalidConfiguration."""
    from . import rows

    if not options.by_registry:
        rows.check_source_columns(schema, options)
        return
    from .ranges import get_query_connection
    from .shapes import check_metadata_columns

    check_metadata_columns(schema, rows.list_metadata_columns(options))
    asked = get_query_connection(options)
    for topic in {topic for topic, _ in asked.list_partitions(anew=True)}:
        asked.find_schema_with_columns(topic, schema)
