"""Found by Spark at the start of a session (packages named `pyspark_*`): registers format("magnetar").

Kept light: every Spark session pays for this import.
"""

from magnetar.spark_connector.datasource import MagnetarDataSource as DefaultSource

__all__ = ["DefaultSource"]
