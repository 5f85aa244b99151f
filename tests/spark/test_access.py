"""Who a query is: every credential of the SDK reaches the broker, and none is shown or written."""

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

from magnetar.cli.common.processes import Processes
from magnetar.client.common.errors import PulsarException
from magnetar.proto.errors import InvalidConfiguration, MagnetarError
from magnetar.spark_connector.datasource import MagnetarDataSource
from magnetar.spark_connector.options import QueryAccess, parse_sink_options, parse_source_options
from tests.security.test_secured_processes import Secured
from tests.security.test_settings import private
from tests.spark.test_identity import Stream, batch, numbered, send

TLS = {"service.url": "magnetar+ssl://broker:7651", "topic": "t"}
HERE = {"service.url": "magnetar://localhost:7650", "topic": "t"}
SECRET = "canary-5d0c1f9e"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [each for each in os.environ if each.startswith("MAGNETAR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def access(**options: str) -> QueryAccess:
    said = {name.replace("_", "."): value for name, value in options.items()}
    return parse_source_options({**TLS, **said}, streaming=True).access


def header(found: QueryAccess) -> str:
    who = found.authentication()
    assert who is not None
    return who.authorization()


# ------------------------------------------------------------------------------ without a server
def test_a_token_is_itself_or_in_a_file_or_in_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    monkeypatch.setenv("TICKET", "of the day")
    assert header(access(token="abc")) == "Bearer abc"
    assert header(access(token="env:TICKET")) == "Bearer of the day"
    for place in ({"token": f"file:{file}"}, {"token.file": str(file)}, {"tokenFile": str(file)},
                  {"auth.plugin": "token", "auth.params": f"file://{file}"}):  # fmt: skip
        found = parse_sink_options({**TLS, **place}).access
        file.write_text("one\n")
        assert header(found) == "Bearer one"
        file.write_text("two\n")
        assert header(found) == "Bearer two", "it is renewed in its place"
    file.unlink()
    with pytest.raises(InvalidConfiguration, match="every Python process"):
        header(access(token=f"file:{file}"))


def test_pulsars_parameters_are_any_credential_of_the_sdk(tmp_path: Path) -> None:
    basic = json.dumps({"username": "ada", "password": "lovelace"})
    wanted = "Basic " + base64.b64encode(b"ada:lovelace").decode()
    (tmp_path / "basic.json").write_text(basic)
    for params in (basic, f"file:{tmp_path / 'basic.json'}"):
        assert header(access(auth_plugin="basic", auth_params=params)) == wanted
        java = {"authPluginClassName": "org.apache.pulsar.client.impl.auth.AuthenticationBasic", "authParams": params}
        assert header(parse_source_options({**TLS, **java}, streaming=False).access) == wanted
    token = {"pulsar.client.authPluginClassName": "AuthenticationToken", "pulsar.client.authParams": "token:abc"}
    assert header(parse_sink_options({**TLS, **token}).access) == "Bearer abc"
    tls = access(auth_plugin="tls", auth_params="tlsCertFile:/c.pem,tlsKeyFile:/k.pem").authentication()
    assert tls is not None
    assert (tls.certificate_path, tls.private_key_path) == ("/c.pem", "/k.pem")
    for wrong in ("athenz", "libmine.so"):
        with pytest.raises((InvalidConfiguration, PulsarException)):
            access(auth_plugin=wrong, auth_params="{}")
    with pytest.raises(InvalidConfiguration, match="begins with token:"):
        access(auth_plugin="token", auth_params=SECRET)


def test_a_certificate_is_two_files() -> None:
    who = access(tls_cert="/c.pem", tls_key="/k.pem").authentication()
    assert who is not None
    assert (who.certificate_path, who.private_key_path) == ("/c.pem", "/k.pem")
    sdk = {"magnetar.client.tls_certificate_file_path": "/c.pem", "magnetar.client.tls_private_key_file_path": "/k.pem",
           "magnetar.client.tls_trust_certs_file_path": "/ca.pem"}  # fmt: skip
    found = parse_source_options({**TLS, **sdk}, streaming=True).access
    assert (found.certificate, found.key, found.trust) == ("/c.pem", "/k.pem", "/ca.pem")
    with pytest.raises(InvalidConfiguration, match="go together"):
        access(tls_cert="/c.pem")


def test_the_environment_beats_the_profile_and_an_option_beats_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "config" / "magnetar"
    folder.mkdir(parents=True)
    private(
        folder / "client.toml",
        b'[default]\nurl = "magnetar+ssl://one"\ntoken = "one.token"\ntls_ca = "ca.pem"\n'
        b'[other]\nurl = "magnetar+ssl://two"\ntls_cert = "c.pem"\ntls_key = "k.pem"\n',
    )
    said = parse_source_options({"topic": "t"}, streaming=True).access
    assert (said.url, said.token, said.trust) == ("magnetar+ssl://one", f"file:{folder}/one.token", f"{folder}/ca.pem")
    other = parse_source_options({"topic": "t", "profile": "other"}, streaming=True).access
    assert (other.url, other.token, other.certificate) == ("magnetar+ssl://two", "", f"{folder}/c.pem")
    monkeypatch.setenv("MAGNETAR_PROFILE", "other")
    assert parse_sink_options({"topic": "t"}).access == other
    monkeypatch.setenv("MAGNETAR_TOKEN", "env:TICKET")
    monkeypatch.setenv("MAGNETAR_URL", "magnetar+ssl://three")
    found = parse_sink_options({"topic": "t"}).access
    assert (found.url, found.token, found.certificate) == ("magnetar+ssl://three", "env:TICKET", "")
    option = parse_sink_options({"topic": "t", "token": "abc", "service.url": "magnetar+ssl://four"}).access
    assert (option.url, option.token, option.certificate) == ("magnetar+ssl://four", "abc", "")
    with pytest.raises(InvalidConfiguration, match="no profile"):
        parse_sink_options({"topic": "t", "profile": "missing"})


def test_a_token_where_its_place_belongs_is_used_or_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = "eyJhbGciOiJFUzI1NiJ9." + SECRET
    monkeypatch.setenv("MAGNETAR_TOKEN", token)
    found = parse_source_options({**TLS}, streaming=True)
    assert header(found.access) == f"Bearer {token}"
    assert SECRET.encode() not in pickle.dumps(found)
    monkeypatch.delenv("MAGNETAR_TOKEN")
    folder = tmp_path / "config" / "magnetar"
    folder.mkdir(parents=True)
    private(folder / "client.toml", f'[default]\ntoken = "{token}"\n'.encode())
    for given in ({}, {"token": f"file:{token}"}, {"token": f"env:{token}"}, {"token.file": token}):
        with pytest.raises(InvalidConfiguration, match="every Python process") as caught:
            header(parse_source_options({**TLS, **given}, streaming=True).access)
        assert SECRET not in str(caught.value)


def test_credentials_are_not_sent_in_clear() -> None:
    with pytest.raises(InvalidConfiguration, match=r"magnetar\+ssl"):
        parse_source_options({"service.url": "magnetar://broker:7650", "topic": "t", "token": SECRET}, streaming=True)
    assert header(parse_source_options({**HERE, "token": SECRET}, streaming=True).access) == f"Bearer {SECRET}"


def test_no_repr_and_no_error_has_a_credential() -> None:
    said: list[str] = []
    for given in (
        {"token": SECRET},
        {"auth.plugin": "basic", "auth.params": f'{{"username":"a","password":"{SECRET}"}}'},
    ):
        for options in (parse_source_options({**TLS, **given}, streaming=True), parse_sink_options({**TLS, **given})):
            said += [repr(options), str(options), repr(options.access), repr(options.access.authentication())]
            assert pickle.loads(pickle.dumps(options)).access == options.access
    for wrong in (
        {"token": SECRET, "TOKEN.FILE": SECRET}, {"token": SECRET, "nope": "1"}, {"auth.plugin": SECRET},
        {"auth.plugin": "basic", "auth.params": f'{{"password":"{SECRET}"}}'}, {"token": f"/{SECRET}"},
        {"auth.plugin": "oauth2", "auth.params": f'{{"issuer_url":"x","client_secret":"{SECRET}"}}'},
        {"tls.private.key.file": f"-----BEGIN PRIVATE KEY-----\n{SECRET}"},
        {"tls.trust.certs.file": f"-----BEGIN PRIVATE KEY-----\n{SECRET}"},
        {"crypto.private.key.file": f"-----BEGIN PRIVATE KEY-----\n{SECRET}"},
    ):  # fmt: skip
        with pytest.raises((InvalidConfiguration, PulsarException)) as caught:
            parse_source_options({**TLS, **wrong}, streaming=True)
        said += [str(caught.value), str(caught.value.__cause__), repr(caught.value.__context__)]
    assert not [text for text in said if SECRET in text]


def test_a_place_is_all_that_a_task_has_of_a_credential(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    monkeypatch.setenv("TICKET", SECRET)
    for place in (f"file:{tmp_path / 'token'}", "env:TICKET"):
        source = MagnetarDataSource({**HERE, "token": place})
        reader = source.streamReader(source.schema())
        assert SECRET.encode() not in pickle.dumps((source, reader))
        assert header(pickle.loads(pickle.dumps(reader)).options.access) == f"Bearer {SECRET}"


# ------------------------------------------------------------------------------ a secured server
@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    with Processes(folder) as processes:
        found = Secured(folder, processes)
        found.token("orders")
        found.token("stranger")
        found.grant("orders")
        yield found


def tls(secured: Secured, **more: str) -> dict[str, str]:
    return {"tls.trust.certs.file": str(secured.folder / "ca.pem"), **more}


def token_file(secured: Secured, role: str) -> str:
    return str(secured.folder / f"{role}.made")


@pytest.mark.spark
def test_a_secured_topic_is_read_by_every_way_to_say_who_one_is(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = token_file(secured, "orders")
    with secured.client(mine) as client:
        send(client, "by-role", numbered(5))
    monkeypatch.setenv("TICKET", Path(mine).read_text().strip())
    folder = tmp_path / "config" / "magnetar"
    folder.mkdir(parents=True)
    private(folder / "client.toml", f'[mine]\ntoken = "{mine}"\ntls_ca = "{secured.folder}/ca.pem"\n'.encode())
    for who in (
        {"token": Path(mine).read_text().strip()}, {"token": "env:TICKET"}, {"token.file": mine},
        {"auth.plugin": "token", "auth.params": f"file://{mine}"}, {"profile": "mine"},
    ):  # fmt: skip
        assert batch(secured.url, "by-role", "value", **tls(secured, **who)) == numbered(5)
    monkeypatch.setenv("MAGNETAR_TOKEN", mine)
    monkeypatch.setenv("MAGNETAR_TLS_CA", str(secured.folder / "ca.pem"))
    monkeypatch.setenv("MAGNETAR_URL", secured.url)
    source = MagnetarDataSource({"topic": "by-role"})
    assert len(source.reader(source.schema()).partitions()) == 1


@pytest.mark.spark
def test_a_query_of_another_role_has_nothing_of_the_first(secured: Secured) -> None:
    mine, other = token_file(secured, "orders"), token_file(secured, "stranger")
    with secured.client(mine) as client:
        send(client, "of-a-role", numbered(3))
    here = str(secured.folder / "changing.token")
    for source, reads in ((mine, True), (other, False), (mine, True)):
        private(Path(here), Path(source).read_bytes())
        for who in ({"token.file": source}, {"token.file": here}):
            if reads:
                assert batch(secured.url, "of-a-role", "value", **tls(secured, **who)) == numbered(3)
                continue
            with pytest.raises((MagnetarError, PulsarException), match="client:stranger"):
                batch(secured.url, "of-a-role", "value", **tls(secured, **who))


@pytest.mark.spark
def test_a_token_that_is_renewed_in_its_file_is_used_by_a_stream_that_runs(secured: Secured) -> None:
    mine = Path(token_file(secured, "orders")).read_bytes()
    here = private(secured.folder / "renewed.token", mine)
    with secured.client(token_file(secured, "orders")) as client:
        send(client, "renewed", numbered(3))
        stream = Stream(secured.url, "renewed", **tls(secured, **{"token.file": str(here)}))
        assert stream.trigger() == numbered(3)
        send(client, "renewed", [b"more"])
        private(here, b"expired")
        with pytest.raises((MagnetarError, PulsarException), match="token"):
            stream.trigger()
        private(here, mine)
        assert stream.trigger() == [b"more"]


def test_an_issuers_tokens_are_fetched_for_a_query() -> None:
    """OAuth 2.0 is the SDK's own: a query waits for its first token as a client does."""
    params = {"issuer_url": "http://127.0.0.1:1", "client_id": "spark", "client_secret": SECRET}
    who = access(auth_plugin="oauth2token", auth_params=json.dumps(params)).authentication()
    assert who is not None
    with pytest.raises(MagnetarError, match="is asked for a token"):
        who.authorization()


JOB = """
import os, sys
from pathlib import Path
from pyspark.sql import SparkSession
import magnetar

url, folder, tls = sys.argv[1:4]
token = Path(sys.argv[4]).read_text().strip()
os.environ["SPARK_LOCAL_DIRS"] = folder + "/local"
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
builder = builder.config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", folder + "/events")
builder = builder.config("spark.sql.ui.explainMode", "extended").config("spark.local.dir", folder + "/local")
spark = magnetar.spark_session(builder)
spark.sparkContext.setLogLevel("INFO")
basic = '{"username":"ada","password":"' + sys.argv[5] + '"}'
for who in ({"token": token}, {"auth.plugin": "token", "auth.params": "token:" + token}):
    options = {"service.url": url, "topic": "jvm", "tls.trust.certs.file": tls, **who}
    read = spark.read.format("magnetar").options(**options).load()
    read.explain(True)
    print(read._jdf.queryExecution().toString())
    print("rows", read.count())
    stream = spark.readStream.format("magnetar").options(**options).option("startingOffsets", "earliest").load()
    stream.explain(True)
    at = folder + "/at-" + "-".join(who)
    copy = {**options, "topic": "jvm-copy"}
    writer = stream.selectExpr("key", "value").writeStream.format("magnetar").options(**copy)
    query = writer.option("checkpointLocation", at).trigger(availableNow=True).start()
    query.awaitTermination()
    query.explain(True)
    print(query.lastProgress.json, query)
    read.select("key", "value").write.format("magnetar").mode("append").options(**copy).save()
    try:
        spark.read.format("magnetar").options(**{**options, "topic": "absent"}).load().count()
    except Exception as error:
        print("refused", error)
try:
    wrong = {"service.url": url, "topic": "jvm", "tls.trust.certs.file": tls, "auth.plugin": "basic"}
    found = spark.read.format("magnetar").options(**wrong, **{"auth.params": basic}).load()
    found.explain(True)
    found.count()
except Exception as error:
    print("refused", error)
print("copied", spark.read.format("magnetar").options(**{**options, "topic": "jvm-copy"}).load().count())
spark.stop()
"""


@pytest.mark.spark
def test_spark_shows_and_stores_no_credential(secured: Secured, tmp_path: Path) -> None:
    """Plans, progress, errors and logs at INFO; the event log, checkpoints, and what Spark spills."""
    mine, password = token_file(secured, "orders"), SECRET
    with secured.client(mine) as client:
        send(client, "jvm", numbered(20))
        client.create_producer("jvm-copy").close()
    for name in ("events", "local"):
        (tmp_path / name).mkdir()
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = [sys.executable, str(job), secured.url, str(tmp_path), str(secured.folder / "ca.pem"), mine, password]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "copied 80" in done.stdout
    assert done.stdout.count("refused") == 3
    token = Path(mine).read_text().strip()
    texts = {"stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    texts |= {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("events" in name for name in texts)
    shown = {
        name: text[at - 200 : at + 80]
        for name, text in texts.items() for secret in (token.encode(), password.encode())
        if (at := text.find(secret)) >= 0
    }  # fmt: skip
    assert shown == {}
