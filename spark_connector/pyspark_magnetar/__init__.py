"""Spark imports packages named `pyspark_*` at the start of a session: this one registers format("magnetar").

Kept light: every Spark session pays for this import.
"""

from magnetar.spark_connector.datasource import MagnetarDataSource as DefaultSource

__all__ = ["DefaultSource"]
