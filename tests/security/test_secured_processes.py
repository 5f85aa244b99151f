"""A secured broker as an operator sets it up: the commands of docs/security.md, in processes of their own."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import bcrypt
import pytest

import magnetar
from magnetar.cli.common.processes import Process, Processes
from magnetar.runtime.access import TlsFiles
from magnetar.runtime.clock import SystemClock
from magnetar.security.settings import Secret
from magnetar.security.token import create_token
from tests.security.test_settings import private
from tests.support.certificates import Authority
from tests.support.processes import Result, run_cli, run_here

pytestmark = pytest.mark.processes


class Secured:
    """Files of `security init`, and a broker that uses them."""

    def __init__(self, folder: Path, started: Processes) -> None:
        self.folder = folder / "security"
        done = run_here("security", "init", str(self.folder), "--host", "broker.example")
        assert done.code == 0, done.err
        self.started = started
        self.url = self.start("standalone").wait_ready()

    def start(self, name: str) -> Process:
        settings = str(self.folder / "security.toml")
        return self.started.start(name, "standalone", "--port", "0", "--data", name, "--security", settings)

    def token(self, role: str, *more: str) -> str:
        """The path of a token for the role."""
        done = run_here("security", "token", "create", "--folder", str(self.folder), "--role", role, *more)
        assert done.code == 0, done.err
        path = self.folder / f"{role}.made"
        path.write_text(done.out)
        path.chmod(0o600)
        return str(path)

    def cli(self, *arguments: str, token: str = "") -> Result:
        who = ("--token", token) if token else ()
        return run_here(*arguments, "--url", self.url, "--tls-ca", str(self.folder / "ca.pem"), *who)

    def grant(self, role: str) -> None:
        """Produce and consume in public/default."""
        verb = ("namespaces", "grant-permission", "public/default", "--role", role, "--actions", "produce,consume")
        done = self.cli(*verb, token=str(self.folder / "admin.token"))
        assert done.code == 0, done.err

    def client(self, token: str) -> magnetar.Client:
        return magnetar.Client(
            self.url, magnetar.AuthenticationToken(Path(token).read_text()),
            tls_trust_certs_file_path=str(self.folder / "ca.pem"),
        )  # fmt: skip


@pytest.fixture
def secured(tmp_path: Path, started: Processes) -> Secured:
    return Secured(tmp_path, started)


def test_a_role_sends_and_receives_a_super_user_administers_and_others_do_nothing(secured: Secured) -> None:
    assert secured.url.startswith("magnetar+ssl://")
    orders, admin = secured.token("orders"), str(secured.folder / "admin.token")
    ungranted = secured.cli("produce", "orders", "-m", "hello", token=orders)
    assert (ungranted.code, "client:orders may not look up" in ungranted.err) == (1, True), ungranted.err
    secured.grant("orders")
    assert secured.cli("produce", "orders", "-m", "hello", token=orders).code == 0
    assert "hello" in secured.cli("consume", "orders", "-s", "b", "-n", "1", token=orders).out
    denied = secured.cli("tenants", "create", "acme", token=orders)
    assert (denied.code, denied.out) == (1, "")
    assert "client:orders may not operate the cluster: it is no super user" in denied.err
    other = secured.token("other")
    assert "orders" in secured.cli("topics", "list", token=admin).out
    assert "orders" in secured.cli("topics", "list", token=orders).out
    assert "orders" not in secured.cli("topics", "list", token=other).out
    assert "produce, consume" in secured.cli("namespaces", "permissions", "public/default", token=admin).out
    for verb in (("topics", "list"), ("produce", "orders", "-m", "x")):
        refused = secured.cli(*verb)
        assert (refused.code, "bring a token" in refused.err) == (1, True), refused.err
    untrusted = run_here("topics", "list", "--url", secured.url, "--token", admin)
    assert (untrusted.code, "--tls-ca" in untrusted.err) == (1, True), untrusted.err
    clear = run_here("topics", "list", "--url", secured.url.replace("+ssl", ""))
    assert (clear.code, "magnetar+ssl" in clear.err) == (1, True), clear.err


def test_programs_bring_tokens_and_dead_letters_go_through_the_brokers_own(secured: Secured) -> None:
    """The internal producer of dead letters connects to the broker as any client does, with the broker's token."""
    secured.grant("orders")
    with secured.client(secured.token("orders")) as client:
        policy = magnetar.ConsumerDeadLetterPolicy(max_redeliver_count=1, initial_subscription_name="first")
        consumer = client.subscribe(
            "t", "s", consumer_type=magnetar.ConsumerType.Shared, dead_letter_policy=policy,
            negative_ack_redelivery_delay_ms=100,
        )  # fmt: skip
        client.create_producer("t").send(b"bad")
        for _ in range(2):
            consumer.negative_acknowledge(consumer.receive(20_000))
        dead = client.subscribe("t-s-DLQ", "first", consumer_type=magnetar.ConsumerType.Shared)
        assert dead.receive(20_000).data() == b"bad"


def test_tokens_are_shown_validated_and_refused_after_their_end(secured: Secured) -> None:
    settings = ("--security", str(secured.folder / "security.toml"))
    lasting, short = secured.token("ada"), secured.token("eve", "--days", "0.0001")
    assert '"sub": "ada"' in run_here("security", "token", "show", lasting).out
    assert "role ada, valid for ever" in run_here("security", "token", "validate", lasting, *settings).out
    assert run_here("security", "token", "validate", "-", *settings, stdin="a.b.c").code == 1
    time.sleep(9)
    done = secured.cli("produce", "t", "-m", "x", token=short)
    assert (done.code, "expired" in done.err) == (1, True), done.err


def test_a_producer_and_a_consumer_go_on_while_their_tokens_of_two_seconds_expire(secured: Secured) -> None:
    secured.grant("orders")
    key = Secret((secured.folder / "token-key.pem").read_bytes())
    made: list[str] = []

    def fresh() -> str:
        made.append(create_token(key, "ES256", "orders", SystemClock().wall_ms(), 2))
        return made[-1]

    trust = str(secured.folder / "ca.pem")
    with magnetar.Client(
        secured.url, magnetar.AuthenticationToken(fresh), tls_trust_certs_file_path=trust
    ) as client:  # fmt: skip
        producer, consumer, seen = client.create_producer("t"), client.subscribe("t", "s"), set[bytes]()
        for number in range(70):
            producer.send(b"%d" % number)
            time.sleep(0.1)
        while len(seen) < 70:  # what is not acknowledged comes again after each reconnection
            message = consumer.receive(20_000)
            seen.add(message.data())
            consumer.acknowledge(message)
    assert len(set(made)) >= 4


def test_no_secret_is_readable_for_others_or_in_a_log(secured: Secured) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in secured.folder.iterdir()}
    secret = {"ca-key.pem", "broker-key.pem", "token-key.pem", "admin.token", "broker.token"}
    assert {name for name, mode in modes.items() if mode == 0o600} == secret
    assert run_here("security", "init", str(secured.folder)).code == 1
    said = secured.cli("topics", "list", token=str(secured.folder / "admin.token"))
    token = (secured.folder / "admin.token").read_text().strip()
    logs = [path.read_text() for path in secured.started.directory.rglob("*.std*")]
    assert logs
    assert not any(token[-40:] in text for text in (*logs, said.out, said.err))
    (secured.folder / "token-key.pem").chmod(0o644)
    open_key = run_here("security", "token", "create", "--folder", str(secured.folder), "--role", "x")
    assert (open_key.code, "chmod 600" in open_key.err) == (2, True), open_key.err


def test_a_renewed_certificate_is_used_without_a_restart(secured: Secured) -> None:
    admin = str(secured.folder / "admin.token")
    renew = ("security", "certificate", "--folder", str(secured.folder))
    assert run_here(*renew, "--host", "elsewhere.example").code == 0
    moved = secured.cli("topics", "list", token=admin)
    assert (moved.code, "host name" in moved.err) == (1, True), moved.err
    assert run_here(*renew, "--host", "127.0.0.1").code == 0
    assert secured.cli("topics", "list", token=admin).code == 0
    assert run_here(*renew).code == 0, "the hosts of the one before"
    assert secured.cli("topics", "list", token=admin).code == 0


def test_settings_that_cannot_be_used_are_refused_at_the_start(secured: Secured) -> None:
    (secured.folder / "broker.pem").write_text("no certificate")
    done = run_cli("standalone", "--port", "0", "--data", str(secured.folder / "d"), "--security",
                   str(secured.folder / "security.toml"))  # fmt: skip
    assert (done.code, "broker.pem" in done.err) == (2, True), done.err


# ---------------------------------------------------------------------------------- certificates and passwords
BY_CERTIFICATE = """
[tls]
certificate = "broker.pem"
key = "broker-key.pem"
ca = "ca.pem"
[certificate]
cluster = "prod"
[basic]
file = "users.htpasswd"
[authorization]
super_users = ["admin", "broker"]
[broker]
ca = "ca.pem"
"""


def test_certificates_and_passwords_say_who_calls_and_brokers_know_each_other_by_their_certificate(
    tmp_path: Path, started: Processes
) -> None:
    authority = Authority.make(tmp_path / "security")
    authority.issue("broker")
    admin, orders = authority.issue("admin", hosts=()), authority.issue("x", hosts=("magnetar://prod/role/orders",))
    private(authority.folder / "users.htpasswd", b"ada:" + bcrypt.hashpw(b"s3cret", bcrypt.gensalt(4)) + b"\n")
    settings = private(authority.folder / "security.toml", BY_CERTIFICATE.encode())
    broker = started.start(
        "broker", "standalone", "--port", "0", "--data", "d", "--security", str(settings), "--log-level", "debug"
    )
    url = broker.wait_ready()

    def cli(*arguments: str, by: TlsFiles) -> Result:
        who = ("--tls-cert", by.certificate, "--tls-key", by.key, "--tls-ca", by.ca)
        return run_here(*arguments, "--url", url, *who)

    for role in ("orders", "ada"):
        grant = ("--role", role, "--actions", "produce,consume")
        assert cli("namespaces", "grant-permission", "public/default", *grant, by=admin).code == 0
    with magnetar.Client(
        url, magnetar.AuthenticationTLS(orders.certificate, orders.key), tls_trust_certs_file_path=authority.ca
    ) as client:
        policy = magnetar.ConsumerDeadLetterPolicy(max_redeliver_count=1, initial_subscription_name="first")
        shared = magnetar.ConsumerType.Shared
        consumer = client.subscribe(
            "t", "s", consumer_type=shared, dead_letter_policy=policy, negative_ack_redelivery_delay_ms=100
        )  # fmt: skip
        client.create_producer("t").send(b"bad")
        for _ in range(2):
            consumer.negative_acknowledge(consumer.receive(20_000))
        assert client.subscribe("t-s-DLQ", "first", consumer_type=shared).receive(20_000).data() == b"bad"
    assert "t" in cli("topics", "list", by=admin).out
    denied = cli("brokers", "list", by=orders)
    assert (denied.code, "it is no super user" in denied.err) == (1, True), denied.err
    files = {
        "tls_trust_certs_file_path": authority.ca, "tls_certificate_file_path": orders.certificate,
        "tls_private_key_file_path": orders.key,
    }  # fmt: skip
    with magnetar.Client(url, magnetar.AuthenticationBasic("ada", "s3cret"), **files) as client:
        client.create_producer("t").send(b"by password")
    with (
        magnetar.Client(url, magnetar.AuthenticationBasic("ada", "wr0ng"), **files) as client,
        pytest.raises(magnetar.AuthenticationError, match="the user or the password is wrong"),
    ):
        client.create_producer("t")
    logs = "".join(path.read_text() for path in started.directory.rglob("*.std*"))
    assert "s3cret" not in logs
    assert "wr0ng" not in logs


def test_acts_and_denials_are_in_the_audit_log_whatever_the_log_level(secured: Secured) -> None:
    """On stderr as lines of JSON, or in a file of its own that others may not read."""
    secured.grant("orders")
    stranger = secured.token("stranger")
    assert secured.cli("topics", "delete", "t", "-y", token=stranger).code == 1

    def lines(text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    (running,) = secured.started.started
    found = lines(running.stderr_path.read_text())
    act = next(line for line in found if line["act"] == "Admin.ChangePermissions")
    assert (act["principal"], act["on"], act["result"]) == ("client:admin", "public/default", "done")
    assert act["method"] == "token"
    assert any(line["principal"] == "client:stranger" and line["result"] == "denied" for line in found)
    with (secured.folder / "security.toml").open("a") as file:
        file.write('\n[audit]\nfile = "audit.log"\n')
    secured.url = secured.start("second").wait_ready()
    secured.grant("orders")
    assert [line["act"] for line in lines((secured.folder / "audit.log").read_text())] == ["Admin.ChangePermissions"]
    assert stat.S_IMODE((secured.folder / "audit.log").stat().st_mode) == 0o600


def test_check_says_what_a_caller_without_credentials_may(secured: Secured) -> None:
    closed = run_here("security", "check", secured.url, "--tls-ca", str(secured.folder / "ca.pem"))
    assert (closed.code, closed.err) == (0, ""), closed.err
    assert closed.out.count("no: Unauthenticated") == 8
    open_one = secured.started.start("open", "standalone", "--port", "0", "--data", "open").wait_ready()
    found = run_here("security", "check", open_one, "-o", "json")
    assert found.code == 1
    assert "may list tenants, look up a topic" in found.err
    assert "read the traffic of others" in found.err
