"""AuthenticationOauth2: an issuer on loopback gives tokens for client credentials, and a broker takes them."""

import base64
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import AuthenticationError, ConnectError, InvalidConfiguration, translate_error
from magnetar.client.connect.authentication import TOKEN_RETRY_S, AuthenticationOauth2
from magnetar.proto.errors import MagnetarError, Unauthenticated, Unavailable
from magnetar.runtime.access import ListenerAccess
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc.server import serve
from magnetar.runtime.network import Endpoint
from magnetar.security.authenticator import Authenticator
from magnetar.security.settings import OidcSection, SecuritySettings
from tests.client.fake_broker import FakeBroker
from tests.security.test_token import Clock
from tests.support.issuer import AUDIENCE, Issuer, issuing
from tests.support.steps import stopwatch


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as found:
        yield found


def oauth2(issuer: Issuer, clock: Any = None, **more: Any) -> AuthenticationOauth2:
    said = {"issuer_url": issuer.url, "client_id": "ada", "client_secret": "s3cret", **more}
    return AuthenticationOauth2(json.dumps({name: value for name, value in said.items() if value}), clock=clock)


def asked(authentication: AuthenticationOauth2) -> str:
    """The header, when there is one."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            return authentication.authorization()
        except Unavailable:
            time.sleep(0.01)
    raise AssertionError("no token")


def test_a_token_is_fetched_with_the_parameters_of_pulsar_and_kept(issuer: Issuer) -> None:
    ours = oauth2(issuer, audience=AUDIENCE, scope="a b")
    with stopwatch() as seconds, pytest.raises(Unavailable, match="asked for a token"):
        ours.authorization()
    assert seconds() < 5
    first = asked(ours)
    assert first.startswith("Bearer ")
    assert [asked(ours) for _ in range(3)] == [first] * 3
    assert issuer.forms == [
        {"grant_type": "client_credentials", "audience": AUDIENCE, "scope": "a b", "client_id": "ada",
         "client_secret": "s3cret"}
    ]  # fmt: skip


def test_the_credentials_come_from_a_file_that_is_read_at_each_fetch(issuer: Issuer, tmp_path: Path) -> None:
    path, clock = tmp_path / "key.json", Clock()
    path.write_text(json.dumps({"client_id": "file", "client_secret": "s3cret"}))
    data = "data:application/json;base64," + base64.b64encode(path.read_bytes()).decode()
    for source in (str(path), f"file:{path}", f"file://{path}", data):
        asked(oauth2(issuer, client_id=None, client_secret=None, private_key=source))
    ours = oauth2(issuer, clock, client_id=None, client_secret=None, private_key=str(path))
    asked(ours)
    path.write_text(json.dumps({"client_id": "renewed", "client_secret": "s3cret"}))
    clock.now_ms += 120_000
    asked(ours)
    assert [each["client_id"] for each in issuer.forms] == ["file"] * 5 + ["renewed"]


def test_a_token_is_renewed_before_its_end_and_not_used_near_it(issuer: Issuer) -> None:
    clock = Clock()
    ours = oauth2(issuer, clock)
    first = asked(ours)
    clock.now_ms += 44_000
    assert ours.authorization() == first
    clock.now_ms += 2_000
    assert ours.authorization() == first, "it is used while the next is fetched"
    end = time.monotonic() + 10
    while ours.authorization() == first:
        assert time.monotonic() < end
        time.sleep(0.01)
    clock.now_ms += 55_000
    with pytest.raises(Unavailable):
        ours.authorization()


def test_a_secret_that_the_issuer_refuses_is_an_error_for_good_and_an_issuer_that_is_down_is_asked_again(
    issuer: Issuer,
) -> None:
    clock = Clock()
    wrong = oauth2(issuer, clock, client_secret="wr0ng")
    with pytest.raises(Unauthenticated, match="refuses") as found:
        asked(wrong)
    assert "wr0ng" not in str(found.value)
    for answer in (500, 302, b"{", b'{"access_token": 7}', b'{"access_token": "t\xc3\xb6k"}', b"x" * 300_000):
        issuer.answers["/token"] = answer
        ours = oauth2(issuer, clock)
        failure = _failure(ours)
        assert isinstance(failure, Unavailable)
        assert "s3cret" not in str(failure)
        del issuer.answers["/token"]
        clock.now_ms += int(TOKEN_RETRY_S * 1000)
        assert asked(ours)
    assert "/moved" not in issuer.asked


def test_an_issuer_that_does_not_answer_is_an_error_of_authentication_and_says_its_last_failure(issuer: Issuer) -> None:
    issuer.answers["/token"] = 500
    clock = Clock()
    ours = oauth2(issuer, clock)
    failed = _failure(ours)
    clock.now_ms += int(TOKEN_RETRY_S * 1000)
    issuer.answers["/token"] = 503
    with pytest.raises(Unavailable, match=f"is asked for a token; the last time: .*{failed.message[-3:]}") as again:
        ours.authorization()
    for each in (failed, again.value):
        found = translate_error(each)
        assert type(found) is AuthenticationError, "as Pulsar's client, and not the broker's fault"
        assert found.retryable
    assert type(translate_error(Unavailable("a broker"))) is ConnectError


def _failure(ours: AuthenticationOauth2) -> MagnetarError:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            ours.authorization()
        except MagnetarError as error:
            if "asked for a token" not in str(error):
                return error
        time.sleep(0.01)
    raise AssertionError("no failure")


@pytest.mark.parametrize(
    "parameters",
    [
        {}, {"issuer_url": "http://issuer.example", "client_id": "a", "client_secret": "b"},
        {"issuer_url": "https://x"}, {"issuer_url": "https://x", "client_id": "a"},
        {"issuer_url": "https://x", "private_key": "/nowhere"}, {"issuer_url": "https://x", "private_key": "data:,{}"},
        {"issuer_url": "https://x", "client_id": "a", "tokenEndpointAuthMethod": "tls_client_auth"},
        {"issuer_url": "https://x", "client_id": "a", "client_secret": "b", "tokenEndpointAuthMethod": "other"},
        {"issuer_url": "https://x", "client_id": "a", "client_secret": "b", "tls_cert_file": "/nowhere"},
        {"issuer_url": 7, "client_id": "a", "client_secret": "b"}, [], "x",
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_are_refused_when_it_is_made(parameters: Any) -> None:
    with pytest.raises(InvalidConfiguration):
        AuthenticationOauth2(json.dumps(parameters))


def test_the_secret_and_the_token_are_in_no_repr_log_or_error(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ours = oauth2(issuer)
    token = asked(ours).removeprefix("Bearer ")
    with pytest.raises(InvalidConfiguration) as found:
        AuthenticationOauth2('{"issuer_url": "http://x", "client_secret": "s3cret"}')
    shown = repr(ours) + repr(ours._tokens) + caplog.text + str(found.value)
    assert "s3cret" not in shown
    assert token[-40:] not in shown


# ---------------------------------------------------------------------------------- with a broker
async def _listen(issuer: Issuer, broker: FakeBroker) -> Any:
    settings = SecuritySettings(oidc=OidcSection((issuer.url,), (AUDIENCE,), require_https=False))
    access = ListenerAccess(Authenticator(settings, SystemClock()))
    return await serve(Endpoint("127.0.0.1", 0), [("Broker", broker)], access, SystemClock())


async def test_a_client_whose_secret_is_refused_is_told_at_once(issuer: Issuer) -> None:
    serving = await _listen(issuer, FakeBroker())
    async with Client(f"magnetar://{serving.endpoint}", oauth2(issuer, client_secret="wrong")) as client:
        with pytest.raises(AuthenticationError, match="refuses the client's credentials"):
            await client.create_producer("t")
    await serving.close()
