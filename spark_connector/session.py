"""`magnetar.spark_session()`: a Spark session that has format("magnetar"), however Spark was installed and started.

By itself Spark finds the format where its Python workers find the package `pyspark_magnetar` on their path. They do not
when the program was started as `venv/bin/python job.py` without activating the environment (workers are the first
`python3` of the PATH), nor when Magnetar is an editable installation (there is no such folder on the path). Here the
workers run the interpreter of the program, and the format is registered by its class.

On a cluster the driver's interpreter may not exist at the executors: there PYSPARK_PYTHON is unchanged.
Guard: tests/spark/test_session.py.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def spark_session(builder: SparkSession.Builder | None = None) -> SparkSession:
    """The session that `builder` makes (default: `SparkSession.builder`), or the one that runs, with the format.

        spark = magnetar.spark_session(SparkSession.builder.master("local[4]").appName("flights"))

    Where everything runs on this machine and PYSPARK_PYTHON is not set, the Python workers are this interpreter.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Spark is not installed: pip install 'magnetar[spark]'", name=error.name) from error
    from .datasource import MagnetarDataSource

    chosen = "PYSPARK_PYTHON" in os.environ
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # before the JVM starts: it passes it to the workers
    session = (builder or SparkSession.builder).getOrCreate()
    context = getattr(session, "_sc", None)  # None: a remote session (Spark Connect), whose workers are not ours
    here = context is not None and context.master.partition("[")[0] == "local"
    if not chosen and context is not None:
        context.pythonExec = sys.executable if here else "python3"  # of a running session; Spark's own default
    if not chosen and not here:
        del os.environ["PYSPARK_PYTHON"]
    session.dataSource.register(MagnetarDataSource)
    return session
