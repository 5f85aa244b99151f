"""The function `magnetar.spark_session()`: returns a Spark session that has format("magnetar"), however Spark was
installed and started.

By itself Spark finds the format only if its Python workers find the package `pyspark_magnetar` on their path. In two
cases they do not. If the program was started as `venv/bin/python job.py` without activating the environment, Spark
starts the first `python3` of the PATH as worker. If Magnetar is an editable installation, its folder is not on the
path. In a session made here the workers run the interpreter of the program, and the format is registered by its class,
unless Spark has found it already: Spark logs a warning if a session replaces a format that it found.

Spark searches for a Python format in the session that is active in the calling thread of the JVM. A new Python thread
has no active session there, so that writing a data frame in it did not find the format (DATA_SOURCE_NOT_FOUND, Spark
4.3). Therefore `_write_in_its_session` makes the frame's own session active if none is.

On a cluster the driver's interpreter may not exist on the executors; there PYSPARK_PYTHON is left unchanged. Guard:
tests/spark/test_session.py."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def spark_session(builder: SparkSession.Builder | None = None) -> SparkSession:
    """Returns a Spark session with format("magnetar"): the session that `builder` makes (None: `SparkSession.builder`),
    or the one that is running.

        spark = magnetar.spark_session(SparkSession.builder.master("local[4]").appName("flights"))

    If everything runs on this machine and PYSPARK_PYTHON is not set, the Python workers run this interpreter. Makes all
    data frames of this process write in their own session. Raises ModuleNotFoundError if Spark is not installed.
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
    if context is None or not _has_format(session):
        session.dataSource.register(MagnetarDataSource)
    if context is not None:
        _write_in_its_session()
    return session


def _has_format(session: Any) -> bool:
    """Whether Spark knows the format: it found the format among its Python packages, or the format is registered."""
    from .datasource import MagnetarDataSource

    return bool(session._jsparkSession.sessionState().dataSourceManager().dataSourceExists(MagnetarDataSource.name()))


def _write_in_its_session() -> None:
    """Makes all frames of this process, except those of Spark Connect, write in their own session. Patches the class
    once."""
    from pyspark.sql.classic.dataframe import DataFrame

    for name in ("write", "writeStream"):
        found = vars(DataFrame)[name]
        if not getattr(found.fget, "in_its_session", False):
            setattr(DataFrame, name, property(_in_its_session(found.fget), doc=found.__doc__))


def _in_its_session(writer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(writer)
    def active(frame: Any) -> Any:
        session = frame.sparkSession
        sessions = session._jvm.org.apache.spark.sql.classic.SparkSession
        if not sessions.getActiveSession().isDefined():
            sessions.setActiveSession(session._jsparkSession)
        return writer(frame)

    active.in_its_session = True  # type: ignore[attr-defined]
    return active
