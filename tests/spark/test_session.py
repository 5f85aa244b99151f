"""A session of `magnetar.spark_session()` knows the format, however Python was started and Magnetar installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

JOB = """
import sys
from pyspark.sql import SparkSession
import magnetar

builder = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
)
if "before" in sys.argv:
    builder.getOrCreate()  # a session that did not know of us
spark = magnetar.spark_session(builder)
spark.sparkContext.setLogLevel("OFF")
rows = spark.createDataFrame([(b"one",), (b"two",)], ["value"])
url, topic = sys.argv[1:3]
rows.write.format("magnetar").option("service.url", url).option("topic", topic).mode("append").save()
read = spark.read.format("magnetar").option("service.url", url).option("topic", topic).load()
print(sorted(bytes(row.value) for row in read.collect()))
"""


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_a_job_of_an_environment_that_is_not_activated_finds_the_format(
    before: bool, url: str, tmp_path: Path
) -> None:
    """The first `python3` of the path is another one, without Magnetar; and nothing of ours is on the path."""
    python3 = tmp_path / "python3"
    python3.write_text("#!/bin/sh\necho the wrong interpreter >&2\nexit 1\n")
    python3.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "PYTHON"))}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    job = tmp_path / "job.py"
    job.write_text(JOB)
    done = subprocess.run(
        [sys.executable, str(job), url, f"job-{before}", *(["before"] if before else [])],
        capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[b'one', b'two']" in done.stdout
