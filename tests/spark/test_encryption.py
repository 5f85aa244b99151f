"""The connector's keys, with Spark and a real server: written encrypted, read in clear, refused without the key."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

from magnetar.client.common.errors import CryptoError
from magnetar.proto.errors import InvalidConfiguration
from magnetar.spark_connector.options import parse_sink_options, parse_source_options
from tests.client.model.keys import files

pytestmark = pytest.mark.spark


def test_the_options_of_encryption_go_together() -> None:
    url = {"service.url": "magnetar://localhost", "topic": "t"}
    sink = parse_sink_options({**url, "encryption.keys": "a, b,", "crypto.public.key.file": "x.pem"})
    assert (sink.encryption_keys, sink.public_key_file) == (("a", "b"), "x.pem")
    assert parse_source_options({**url, "Crypto.Private.Key.File": "y.pem"}, streaming=True).private_key_file == "y.pem"
    for wrong in ({"encryption.keys": "a"}, {"crypto.public.key.file": "x"}, {"crypto.private.key.file": "x"}):
        with pytest.raises(InvalidConfiguration):
            parse_sink_options({**url, **wrong})
    with pytest.raises(InvalidConfiguration):
        parse_source_options({**url, "encryption.keys": "a"}, streaming=False)


def test_a_query_writes_encrypted_messages_and_reads_them(spark: Any, url: str, client: Any, tmp_path: Path) -> None:
    files(tmp_path)
    options = {"service.url": url, "topic": "letters"}
    frame = spark.createDataFrame([(b"%d" % at,) for at in range(50)], "value binary")
    keys = {"encryption.keys": "a", "crypto.public.key.file": str(tmp_path / "a-public.pem")}
    frame.write.format("magnetar").mode("append").options(**options, **keys).save()
    with pytest.raises(CryptoError):
        next(iter(client.read_range("letters", 0, 1)))[0].messages()
    source = spark.read.format("magnetar").options(**options)
    private = str(tmp_path / "a-private.pem")
    found = source.option("crypto.private.key.file", private).load().select("value").collect()
    assert sorted(int(row.value) for row in found) == list(range(50))
    with pytest.raises(Exception, match=r"it is encrypted, and option 'crypto\.private\.key\.file'"):
        spark.read.format("magnetar").options(**options).load().collect()
