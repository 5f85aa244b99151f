"""Registers format("magnetar"). Spark imports every package whose name begins with `pyspark_` when a session starts.

The package imports little, because every Spark session pays for this import."""

from magnetar.spark_connector.datasource import MagnetarDataSource as DefaultSource

__all__ = ["DefaultSource"]
