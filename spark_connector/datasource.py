"""The entry point: what Spark calls for format("magnetar"). Checks the options before any work (options.py)."""

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
    """Topics as streaming and batch tables; columns in rows.py, options in docs/spark.md."""

    @classmethod
    def name(cls) -> str:
        return "magnetar"

    def _source(self, *, streaming: bool) -> SourceOptions:
        from .options import parse_source

        return parse_source(dict(self.options), streaming=streaming)

    def schema(self) -> StructType:
        """Spark does not say whether it wants a stream or a batch: an option that is wrong for both is refused here."""
        from ..proto.errors import InvalidConfiguration
        from .rows import columns

        try:
            return columns(self._source(streaming=True))
        except InvalidConfiguration as as_stream:
            try:
                return columns(self._source(streaming=False))
            except InvalidConfiguration as as_batch:
                raise (as_batch if "for a stream" in str(as_stream) else as_stream) from None

    def reader(self, schema: StructType) -> DataSourceReader:
        from .rows import check_columns
        from .source import MagnetarReader

        options = self._source(streaming=False)
        check_columns(schema, options)
        return MagnetarReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from .rows import check_columns
        from .source import MagnetarStreamReader

        options = self._source(streaming=True)
        check_columns(schema, options)
        return MagnetarStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from .sink import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from .sink import stream_writer

        return stream_writer(dict(self.options), schema)
