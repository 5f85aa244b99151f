"""What a client brings: credentials of each kind, TLS, and what it refuses before it connects."""

from __future__ import annotations

import base64
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.common.errors import (
    AuthenticationError,
    ConnectError,
    InvalidConfiguration,
    OperationNotSupported,
    Result,
    translate_error,
)
from magnetar.client.connect.authentication import (
    Authentication,
    AuthenticationAthenz,
    AuthenticationBasic,
    AuthenticationTLS,
    AuthenticationToken,
    make_caller_access,
)
from magnetar.client.connect.discovery import parse_service_url
from magnetar.proto.errors import CredentialsExpired, Unauthenticated
from magnetar.proto.errors import InvalidConfiguration as WireInvalidConfiguration
from magnetar.runtime.access import Caller, ListenerAccess, Principal, PrincipalKind, TlsFiles
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.world import Simulation
from tests.client.fake_broker import FakeBroker

HERE = "magnetar://localhost"


def header(authentication: Authentication) -> str:
    asked = make_caller_access(parse_service_url(HERE), authentication).authorization
    assert asked is not None
    return asked()


def test_a_token_is_a_bearer_and_a_function_is_asked_each_time() -> None:
    assert header(AuthenticationToken("abc.def.ghi")) == "Bearer abc.def.ghi"
    tokens = iter(["one\n", "two"])
    renewed = AuthenticationToken(lambda: next(tokens))
    assert [header(renewed), header(renewed)] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize("bad", [lambda: 7, lambda: "", lambda: " \n", lambda: "töken", lambda: 1 / 0, "", " "])
def test_a_token_that_is_none_is_said_without_its_text(bad: Any) -> None:
    with pytest.raises((WireInvalidConfiguration, Unauthenticated)) as found:
        header(AuthenticationToken(bad))
    assert "töken" not in str(found.value)


def test_a_user_and_a_password_are_basic_in_both_ways_of_pulsar() -> None:
    for each in (
        AuthenticationBasic("ada", "p:w"),
        AuthenticationBasic(auth_params_string='{"username": "ada", "password": "p:w"}'),
    ):
        assert base64.b64decode(header(each).removeprefix("Basic ")) == b"ada:p:w"


def test_what_the_function_of_a_token_says_when_it_fails_is_told_without_the_token() -> None:
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0"

    def fails() -> str:
        raise ValueError(f"the vault is sealed, {token!r} is of yesterday")

    with pytest.raises(Unauthenticated, match="ValueError: the vault is sealed, … is of yesterday") as found:
        header(AuthenticationToken(fails))
    assert token not in str(found.value)


def test_a_programs_own_authentication_derives_from_the_base_and_its_faults_are_errors_without_its_text() -> None:
    class Own(Authentication):
        auth_method_name = "ticket"

        def __init__(self, given: Any) -> None:
            self.given = given

        def authorization(self) -> str:
            if isinstance(self.given, Exception):
                raise self.given
            return self.given  # type: ignore[no-any-return]

    assert header(Own("Ticket abc")) == "Ticket abc"
    for bad in (7, "s3cret\nx: y", "s3cret\0", "s3crät", ValueError("s3cret")):
        with pytest.raises((WireInvalidConfiguration, Unauthenticated), match="ticket") as found:
            header(Own(bad))
        assert "s3cr" not in str(found.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AuthenticationToken(7),  # type: ignore[arg-type]
        lambda: AuthenticationBasic("ada"),
        lambda: AuthenticationBasic("a:da", "x"),
        lambda: AuthenticationBasic(auth_params_string="[1]"),
        lambda: AuthenticationBasic(auth_params_string="{"),
        lambda: AuthenticationTLS("", "key.pem"),
        lambda: AuthenticationTLS("certificate.pem", None),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_refused_when_it_is_made(make: Any) -> None:
    with pytest.raises(InvalidConfiguration):
        make()


def test_what_is_not_supported_says_what_to_use() -> None:
    with pytest.raises(OperationNotSupported, match="token"):
        AuthenticationAthenz("{}")
    with pytest.raises(OperationNotSupported, match="token"):
        Authentication("athenz", "{}")
    with pytest.raises(OperationNotSupported, match="ways verified"):
        Client("magnetar+ssl://a", tls_allow_insecure_connection=True)


@pytest.mark.parametrize("name", ["someoldjunk.so", "", "tls.so"])
def test_a_library_of_pulsars_client_is_an_object_and_what_is_opened_with_it_is_refused(
    name: str, fake: tuple[str, FakeBroker], caplog: pytest.LogCaptureFixture
) -> None:
    with magnetar.Client(fake[0], Authentication(name, "s3cret:b")) as client:
        assert "not loaded: derive from Authentication" in caplog.text
        for refused in (AuthenticationError, ConnectError):
            with pytest.raises(refused, match="not loaded") as found:
                client.subscribe("t", "s")
            assert found.value.error() is Result.AuthenticationError
            assert not found.value.retryable
        assert "s3cret" not in caplog.text + str(found.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AuthenticationBasic("ada", "s3cret", "ticket"),
        lambda: AuthenticationBasic("ada", "s3cret", method="ticket"),
        lambda: AuthenticationBasic(auth_params_string='{"username": "ada", "password": "s3cret", "method": "ticket"}'),
        lambda: Authentication("basic", '{"username": "ada", "password": "s3cret", "method": "ticket"}'),
    ],
)
def test_a_password_of_another_method_is_not_sent(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = make()
    assert made.auth_method_name == "ticket"
    assert header(made) == ""
    assert "ticket" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    "text", ["invalid auth params", "{}", "[]", '{"username": "a"}', '{"username": "a", "password": "b", "method": 5}']
)
def test_parameters_of_a_user_that_do_not_fit_are_a_runtime_error_as_pulsars(text: str) -> None:
    for wrong in (RuntimeError, ValueError, InvalidConfiguration):
        with pytest.raises(wrong):
            AuthenticationBasic(auth_params_string=text)
        with pytest.raises(wrong):
            Authentication("basic", text)
    for method in (5, None):
        with pytest.raises(ValueError, match="method"):
            AuthenticationBasic("a", "b", method)  # type: ignore[arg-type]


def test_credentials_that_a_server_refuses_are_both_errors_of_pulsars_client() -> None:
    for refused in (Unauthenticated("no"), CredentialsExpired("late")):
        found = translate_error(refused)
        assert isinstance(found, AuthenticationError)
        assert isinstance(found, ConnectError)
        assert found.error() is Result.AuthenticationError
        assert (found.definite, found.retryable) == (refused.definite, refused.retryable)


def test_no_credential_is_in_a_repr() -> None:
    for each in (AuthenticationToken("s3cret"), AuthenticationBasic("ada", "s3cret")):
        assert "s3cret" not in repr(each) + str(vars(Client(HERE, each)).get("settings"))


def test_tls_comes_with_the_url_or_use_tls_and_certificates_need_it() -> None:
    options = {"tls_trust_certs_file_path": "ca.pem"}
    expected = TlsFiles("c.pem", "k.pem", "ca.pem")
    certificate = AuthenticationTLS("c.pem", "k.pem")
    assert make_caller_access(parse_service_url("magnetar+ssl://a"), certificate, options).tls == expected
    assert (
        make_caller_access(parse_service_url("magnetar://a"), certificate, {**options, "use_tls": True}).tls == expected
    )
    assert make_caller_access(parse_service_url("magnetar://a"), None).tls is None
    for authentication, given in ((None, options), (certificate, {})):
        with pytest.raises(InvalidConfiguration, match=r"magnetar\+ssl"):
            make_caller_access(parse_service_url(HERE), authentication, given)


def test_credentials_are_not_sent_to_another_machine_in_clear() -> None:
    with pytest.raises(InvalidConfiguration, match="in clear"):
        Client("magnetar://localhost,broker.example", AuthenticationToken("x"))
    with pytest.raises(InvalidConfiguration, match="Authentication"):
        Client("magnetar://a", "token")
    Client("magnetar+ssl://broker.example", AuthenticationToken("x"))


# ---------------------------------------------------------------------------------- with a broker
class Guard:
    """Knows "Bearer good", for ten seconds each time."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.seen: list[str] = []

    async def authenticate(self, caller: Caller) -> Principal:
        self.seen.append(caller.authorization)
        if caller.authorization != "Bearer good":
            raise Unauthenticated("the token has expired")
        return Principal("ada", PrincipalKind.CLIENT, "token", self.clock.wall_ms() + 10_000)

    def authorize(self, principal: Principal, path: str) -> None:
        """Everything."""

    def why_lapsed(self, principal: Principal) -> str:
        return ""


def run(body: Any) -> None:
    simulation = Simulation(1)

    async def main() -> None:
        world = simulation.world("broker")
        guard, broker = Guard(world.clock), FakeBroker()
        services = [("Broker", broker)]
        await simulation.spawn(
            "broker", world.network.serve(Endpoint("localhost", 7650), services, ListenerAccess(guard))
        )
        await simulation.spawn("client", body(simulation.world("client"), guard, broker))

    simulation.run(main())
    assert not simulation.complaints


pytestmark = pytest.mark.run_by.with_args(run)


async def test_a_refused_client_is_told_at_once(world: Any, guard: Guard, broker: FakeBroker, /) -> None:
    async with Client(HERE, AuthenticationToken("bad"), world=world) as client:
        with pytest.raises(AuthenticationError, match="expired"):
            await client.create_producer("t")
    async with Client(HERE, world=world) as client:
        with pytest.raises(AuthenticationError):
            await client.subscribe("t", "s")


async def test_expired_credentials_are_renewed_and_no_message_is_lost(
    world: Any, guard: Guard, broker: FakeBroker, /
) -> None:
    import asyncio

    async with Client(HERE, AuthenticationToken(lambda: "good"), world=world) as client:
        producer = await client.create_producer("t")
        consumer = await client.subscribe("t", "s")
        for number in range(40):
            await producer.send(b"%d" % number)
            await asyncio.sleep(1)
        found = {(await consumer.receive()).data() for _ in range(40)}
        assert found == {b"%d" % number for number in range(40)}
    assert len(guard.seen) > 4
