"""A session of `magnetar.spark_session()` knows the format, however Python was started and Magnetar installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

JOB = """
import sys
import threading
from pyspark.sql import SparkSession
import magnetar

builder = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
)
if "before" in sys.argv:
    builder.getOrCreate()  # a session that did not know of us
spark = magnetar.spark_session(builder)
spark.sparkContext.setLogLevel("WARN")
rows = spark.createDataFrame([(b"one",), (b"two",)], ["value"])
url, topic = sys.argv[1:3]
rows.write.format("magnetar").option("service.url", url).option("topic", topic).mode("append").save()
read = spark.read.format("magnetar").option("service.url", url).option("topic", topic).load()
print(sorted(bytes(row.value) for row in read.collect()))

def elsewhere():
    rows.write.format("magnetar").option("service.url", url).option("topic", topic).mode("append").save()
    stream = spark.readStream.format("magnetar").option("service.url", url).option("topic", topic)
    copied = stream.option("startingOffsets", "earliest").load().select("value").writeStream.format("magnetar")
    copied = copied.option("service.url", url).option("topic", topic + "-copy")
    copied.option("checkpointLocation", "at").trigger(availableNow=True).start().awaitTermination()

if "thread" in sys.argv:
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    again = magnetar.spark_session(builder)
    copy = again.read.format("magnetar").option("service.url", url).option("topic", topic + "-copy").load()
    print("copied", copy.count())
"""
HIDE = """
import sys
sys.path[:] = [each for each in sys.path if not each.endswith(".venv/spark")]
"""


@pytest.mark.parametrize("hidden", [False, True], ids=["first", "later-editable"])
def test_a_job_of_an_environment_that_is_not_activated_finds_the_format(
    hidden: bool, url: str, tmp_path: Path
) -> None:
    """The first `python3` of the path is another one, without Magnetar. A thread writes too, and no session replaces
    what Spark found.

    `later-editable`: another session was there before, and Spark does not find the package `pyspark_magnetar`, as with
    an editable installation. A session takes seconds, so there are two, of which each has half of this.
    """
    python3 = tmp_path / "python3"
    python3.write_text("#!/bin/sh\necho the wrong interpreter >&2\nexit 1\n")
    python3.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "PYTHON"))}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    if hidden:
        (tmp_path / "sitecustomize.py").write_text(HIDE)
        environment["PYTHONPATH"] = str(tmp_path)
    job = tmp_path / "job.py"
    job.write_text(JOB)
    done = subprocess.run(
        [sys.executable, str(job), url, f"job-{hidden}", "thread", *(["before"] if hidden else [])],
        capture_output=True, text=True, timeout=400, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[b'one', b'two']" in done.stdout
    assert "copied 4" in done.stdout, done.stderr
    assert "WARN" in done.stderr, "warnings are shown"
    assert "replaced" not in done.stderr
