"""No secret leaks: each is marked, a secured server and its clients run at debug level, and all they say is searched.

Searched in plain, in hexadecimal and in base64 (at each of its three alignments, as the standard and as URLs write it).
"""

import base64
import json
import logging
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from cryptography.hazmat.primitives import serialization

import magnetar
from magnetar.cli.common.processes import Processes
from magnetar.proto.errors import InvalidConfiguration as WireInvalidConfiguration
from magnetar.runtime.access import Caller, CallerAccess, Principal, PrincipalKind
from magnetar.runtime.network import KeyPair
from magnetar.runtime.process import make_system_world
from magnetar.security.authenticator import SecuredNetwork
from magnetar.security.settings import BrokerSection, Secret, SecuritySettings, TokenSection
from magnetar.spark_connector.options import parse_sink_options, parse_source_options
from tests.cli.run.test_metrics import facts
from tests.client.model.keys import files, pair
from tests.security.test_settings import load, private
from tests.support.processes import run_cli, run_here

PASSWORD, WRONG = "canary-pass-5f21c07b", "canary-wrong-8be0a4d3"
OAUTH = "canary-oauth-c3391e7a"
PAYLOAD, HIDDEN, PROPERTY = b"canary-payload-1a6b7709", b"canary-hidden-e8d0712c", "canary-property-4c9f3b11"
TOPIC = "persistent://public/default/orders"
REASONS = {
    "the user or the password is wrong", "the token is not signed with a key of this server or its issuer",
    "that is no token", "the header `authorization` is too long",
}  # fmt: skip
SHOW_MESSAGES = {"peek-messages", "peek", "examine-messages", "get-message-by-id", "find"}


def forms(secret: bytes) -> Iterator[bytes]:
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    for offset in range(3):
        begin = -(-offset * 8 // 6)  # the first character that is of the secret alone
        body = base64.b64encode(bytes(offset) + secret)[begin : (offset + len(secret)) * 8 // 6]
        yield body
        yield body.translate(bytes.maketrans(b"+/", b"-_"))


def leaks(secrets: dict[str, bytes], said: bytes) -> set[str]:
    return {name for name, secret in secrets.items() if any(form in said for form in forms(secret))}


def scalar(path: Path) -> bytes:
    """The number that a private key of EC is."""
    key: Any = serialization.load_pem_private_key(path.read_bytes(), None)
    return int(key.private_numbers().private_value).to_bytes(32, "big")


def test_the_search_finds_a_secret_in_each_form() -> None:
    secret = bytes(range(100, 130))
    for said in (secret, secret.hex().encode(), *(base64.b64encode(b"x" * n + secret + b"yz") for n in range(4))):
        assert leaks({"it": secret}, b"some " + said + b" text") == {"it"}
    assert not leaks({"it": secret}, base64.b64encode(secret[1:]))


# ------------------------------------------------------------------------------------------------- a run
@pytest.mark.processes
def test_no_secret_is_in_a_log_an_output_an_error_a_metric_or_the_metadata(
    started: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "security"
    assert run_here("security", "init", str(folder)).code == 0
    hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
    private(folder / "users.htpasswd", f"admin:{hashed}\n".encode())
    with (folder / "security.toml").open("a") as file:
        file.write('\n[basic]\nfile = "users.htpasswd"\n[audit]\nfile = "audit.log"\n')
    server = started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--metrics", "0", "--log-level", "debug",
        "--security", str(folder / "security.toml"),
    )  # fmt: skip
    url, said = server.wait_ready(), dict[str, bytes]()
    tokens = {name: (folder / f"{name}.token").read_text().strip() for name in ("admin", "broker")}
    secrets = {f"{name} token": each.rpartition(".")[2].encode() for name, each in tokens.items()}
    secrets |= {str(path.name): scalar(path) for path in folder.rglob("*-key.pem")}
    secrets |= {"password": PASSWORD.encode(), "wrong": WRONG.encode(), "hash": hashed[-31:].encode()}
    secrets |= {"encryption key": pair("a").private[100:160], "hidden": HIDDEN, "Basic": f"admin:{PASSWORD}".encode()}
    content = {"payload": PAYLOAD, "property": PROPERTY.encode()}
    with caplog.at_level(logging.DEBUG):
        for authentication in (
            magnetar.AuthenticationToken(tokens["admin"]), magnetar.AuthenticationBasic("admin", PASSWORD)
        ):  # fmt: skip
            _talk(url, folder, authentication)
        said["errors"] = b"".join(_refused(url, folder, each) for each in _wrong(tokens["admin"]))
    said["client's log"] = caplog.text.encode()
    environment = {
        "MAGNETAR_URL": url, "MAGNETAR_TLS_CA": str(folder / "ca.pem"), "MAGNETAR_TOKEN": str(folder / "admin.token"),
    }  # fmt: skip
    shown = {}
    for command in _commands():
        done = run_here(*command, **environment)
        into = shown if SHOW_MESSAGES & set(command) else said
        into[" ".join(command)] = f"{done.out}\n{done.err}".encode()
        assert "Traceback" not in done.err, (command, done.err)
    with urllib.request.urlopen(f"http://{facts(server)['metrics'].removeprefix('http://')}") as answer:
        said["metrics"] = answer.read()
    assert PAYLOAD in shown[f"topics peek-messages {TOPIC} -s s"], "the search would find it"
    for path in (*started.directory.rglob("*.std*"), folder / "audit.log"):
        said[path.name] = path.read_bytes()
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file() and "metadata" in str(path.relative_to(tmp_path)):
            said[str(path)] = path.read_bytes()
    assert any("metadata" in name for name in said), list((tmp_path / "data").rglob("*"))
    denied = [json.loads(line) for line in said["audit.log"].splitlines() if b'"denied"' in line]
    assert len(denied) >= 3, "one for each wrong credential that reached the server"
    assert {each["why"].split(":")[0] for each in denied} == REASONS
    assert b"INFO" in b"".join(text for name, text in said.items() if name.endswith("stderr"))
    found = {name: leaks(secrets | content, text) for name, text in said.items()}
    found |= {name: leaks(secrets, text) for name, text in shown.items()}
    assert not {name: each for name, each in found.items() if each}


def _talk(url: str, folder: Path, authentication: magnetar.Authentication) -> None:
    """Plain and encrypted messages, with properties; a dead letter; errors."""
    keys = files(folder)
    with magnetar.Client(url, authentication, tls_trust_certs_file_path=str(folder / "ca.pem")) as client:
        producer = client.create_producer(TOPIC, properties={"of": "a producer"})
        producer.send(PAYLOAD, properties={"p": PROPERTY}, partition_key="k")
        sealed = client.create_producer(TOPIC, encryption_key="a", crypto_key_reader=keys)
        sealed.send(HIDDEN)
        first = magnetar.InitialPosition.Earliest
        consumer = client.subscribe(TOPIC, "s", crypto_key_reader=keys, initial_position=first)
        consumer.negative_acknowledge(consumer.receive(30_000))
        assert repr(client).find(PASSWORD) < 0


def _wrong(token: str) -> list[Callable[[], magnetar.Authentication]]:
    cut = token.rpartition(".")[2]
    return [
        lambda: magnetar.AuthenticationBasic("admin", WRONG),
        lambda: magnetar.AuthenticationToken(f"{token[: -len(cut)]}{'B' if cut[0] == 'A' else 'A'}{cut[1:]}"),
        lambda: magnetar.AuthenticationToken(lambda: "x." + token),
        lambda: magnetar.AuthenticationToken(lambda: token + "\n" + token),
        lambda: magnetar.AuthenticationToken(token + "x" * 17_000),
        lambda: magnetar.AuthenticationTLS("nowhere.pem", pair("a").private.decode()),
    ]


def _refused(url: str, folder: Path, make: Callable[[], magnetar.Authentication]) -> bytes:
    try:
        with magnetar.Client(url, make(), tls_trust_certs_file_path=str(folder / "ca.pem")) as client:
            client.create_producer(TOPIC)
    except magnetar.PulsarException as error:
        return "".join(traceback.format_exception_only(error)).encode()
    raise AssertionError("it was taken")


def _commands() -> Iterator[tuple[str, ...]]:
    """Commands of each group; those that show messages are among them."""
    for group, name in (("tenants", "public"), ("namespaces", "public/default")):
        yield group, "list", *(() if group == "tenants" else ("public",))
        yield group, "stats", name
    for verb in ("stats", "stats-internal", "lookup", "offsets", "subscriptions", "last-message-id", "permissions"):
        yield "topics", verb, TOPIC
    yield "topics", "peek-messages", TOPIC, "-s", "s"
    yield "topics", "examine-messages", TOPIC
    yield "topics", "analyze-backlog", TOPIC, "-s", "s"
    yield "topics", "stats", TOPIC, "-o", "json"
    yield "topics", "stats-internal", TOPIC, "-o", "json"
    yield "topics", "stats", "persistent://public/default/none"
    yield "topics", "grant-permission", TOPIC, "--role", "r", "--actions", "produce"
    yield "topics", "stats", TOPIC, "--url", f"magnetar+ssl://admin:{PASSWORD}@localhost"
    yield "topics", "stats", TOPIC, "--url", f"http://localhost?password={PASSWORD}"
    yield "namespaces", "policies", "public/default"
    yield "namespaces", "permissions", "public/default"
    yield "subscriptions", "list", TOPIC
    yield "subscriptions", "stats", TOPIC
    yield "brokers", "list"
    yield "bookies", "list"
    yield "ledgers", "list"
    yield "topics", "delete", TOPIC, "-y"


# ------------------------------------------------------------------------------------------------- what is shown
def test_no_settings_option_or_credential_shows_a_secret_in_its_repr_or_error(tmp_path: Path) -> None:
    mark, world = "canary-inline-93b00e5d", make_system_world(1)
    inline = "data:;base64," + base64.b64encode(mark.encode() * 2).decode()
    settings = SecuritySettings(token=TokenSection(secret_key=inline), broker=BrokerSection(token=inline))

    def secured(settings: SecuritySettings) -> SecuredNetwork:
        return SecuredNetwork(world.network, settings, world.clock, world.workers)

    network = secured(settings)
    pem = pair("a").private.decode()
    oauth = json.dumps({"issuer_url": "https://issuer.example", "client_id": "a", "client_secret": OAUTH})
    access = CallerAccess(authorization=lambda: f"Bearer {mark}")
    values = [
        settings, network, network._listener, network._caller, network._listener.guard, access, Secret(mark.encode()),
        Caller("p", f"Bearer {mark}"), KeyPair("00", mark.encode()),
        Principal("a", PrincipalKind.CLIENT, proof=mark.encode()),
        magnetar.AuthenticationToken(mark), magnetar.AuthenticationBasic("a", mark),
        magnetar.AuthenticationOauth2(oauth), files(tmp_path),
        magnetar.Client("magnetar://localhost", magnetar.AuthenticationToken(mark)),
    ]  # fmt: skip
    said = [text for each in values for text in (repr(each), str(each), f"{[each]}")]
    token = "eyJhbGciOiJFUzI1NiJ9." + mark
    for wrong in (
        lambda: magnetar.Client("magnetar://localhost", mark),
        lambda: magnetar.Client("magnetar://localhost", {"token": mark}),
        lambda: magnetar.Client(f"magnetar://ada:{mark}@localhost"),
        lambda: magnetar.Client(f"magnetar://localhost/?token={mark}"),
        lambda: magnetar.Client("magnetar+ssl://localhost", tls_private_key_file_path=pem),
        lambda: magnetar.AuthenticationTLS("a.pem", pem),
        lambda: magnetar.AuthenticationToken([mark]),  # type: ignore[arg-type]
        lambda: magnetar.AuthenticationOauth2(oauth[:-1]),
        lambda: magnetar.CryptoKeyReader("a.pem", pem),
        lambda: secured(load(tmp_path, _settings(inline, token))),
        lambda: secured(load(tmp_path, _settings(inline + mark + "!", "x"))),
        lambda: load(tmp_path, _settings(inline, "x").replace('"', "")),
        lambda: parse_source_options({"service.url": "magnetar://a", "topic": "t", "token": mark}, streaming=True),
        lambda: parse_sink_options({"service.url": f"magnetar://ada:{mark}@a", "topic": "t"}),
    ):
        with pytest.raises((magnetar.PulsarException, WireInvalidConfiguration)) as refused:
            wrong()
        said.append("".join(traceback.format_exception_only(refused.value)))
        context = refused.value.__cause__ or (None if refused.value.__suppress_context__ else refused.value.__context__)
        said.append(str(context))
    secrets = {"mark": mark.encode(), "oauth": OAUTH.encode(), "pem": pem.splitlines()[1].encode()}
    assert not {text for text in said if leaks(secrets, text.encode())}


def _settings(key: str, token: str) -> str:
    return f'[token]\nsecret_key = "{key}"\n[broker]\ntoken = "{token}"\n'


def test_spark_shows_no_secret_of_its_options() -> None:
    """Of a plan Spark redacts the options by their names: tests/spark/test_access.py."""
    basic = json.dumps({"username": "ada", "password": PASSWORD})
    for who in ({"token": PASSWORD}, {"auth.plugin": "basic", "auth.params": basic}):
        given = {"service.url": "magnetar+ssl://a", "topic": "t", **who}
        source = parse_source_options({**given, "crypto.private.key.file": "k.pem"}, streaming=True)
        assert "k.pem" in repr(source)
        for options in (source, parse_sink_options(given)):
            assert not leaks({"password": PASSWORD.encode()}, repr(options).encode())


def test_a_command_takes_no_secret_as_an_argument() -> None:
    found = run_cli("topics", "list", "--token", "eyJhbGciOiJFUzI1NiJ9.canary." + "x" * 100)
    assert found.code != 0
    assert "canary" not in found.out + found.err
