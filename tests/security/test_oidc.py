"""Tokens of OpenID Connect: an issuer on loopback, its keys, and every way it fails."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given, settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from magnetar.proto.errors import InvalidConfiguration, MagnetarError, Unauthenticated, Unavailable
from magnetar.runtime.access import Caller, PrincipalKind, TlsFiles
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.tasks import SystemWorkers
from magnetar.runtime.tcp import http_client
from magnetar.runtime.tcp.http_client import JsonClient
from magnetar.security.oidc import (
    DISCOVERY_PATH,
    FETCH_RETRY_S,
    KEYS_EXPIRE_S,
    KEYS_FETCH_INTERVAL_MIN_S,
    KEYS_PER_ISSUER_MAX,
    KEYS_REFRESH_S,
    OidcProvider,
    parse_issuer_keys,
)
from magnetar.security.settings import OidcSection
from tests.security.test_settings import GOOD, authenticator, bearer, load, private
from tests.security.test_token import NOW_S, SECRET, Clock
from tests.support.certificates import Authority
from tests.support.issuer import AUDIENCE, Issuer, issuing


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as found:
        yield found


def section(issuer: Issuer, **more: Any) -> OidcSection:
    return OidcSection(**{"issuers": (issuer.url,), "audiences": (AUDIENCE,), "require_https": False, **more})


def provider(issuer: Issuer, clock: Clock, **more: Any) -> OidcProvider:
    return OidcProvider(section(issuer, **more), clock, SystemWorkers())


def token(issuer: Issuer, role: str = "ada", kid: str = "one", clock: Clock | None = None, **more: Any) -> str:
    return issuer.token(role, kid, (clock.now_ms / 1000) if clock else NOW_S, **more)


# ---------------------------------------------------------------------------------- accepted
async def test_the_issuers_keys_say_who_calls_and_are_fetched_once(issuer: Issuer) -> None:
    ours = provider(issuer, Clock())
    found = await asyncio.gather(*(ours.verify_principal(token(issuer, f"role{n}", jti=f"t{n}")) for n in range(20)))
    assert [(each.name, each.credential_id) for each in found] == [(f"role{n}", f"t{n}") for n in range(20)]
    assert (found[0].kind, found[0].method, found[0].expires_ms) == (
        PrincipalKind.CLIENT, "token", (NOW_S + 60) * 1000
    )  # fmt: skip
    assert issuer.asked == [DISCOVERY_PATH, "/keys"]


async def test_another_claim_and_several_audiences(issuer: Issuer) -> None:
    ours = provider(issuer, Clock(), role_claim="roles", audiences=("other", AUDIENCE))
    assert (await ours.verify_principal(token(issuer, roles=["first", "second"], aud=["x", "other"]))).name == "first"


async def test_a_token_of_an_issuer_is_the_issuers_and_any_other_is_of_the_key(issuer: Issuer, tmp_path: Path) -> None:
    private(tmp_path / "secret.key", SECRET)
    private(tmp_path / "broker.token", b"x.y.z")
    extra = f'[oidc]\nissuers = ["{issuer.url}"]\naudiences = ["{AUDIENCE}"]\nrequire_https = false\n'
    guard = authenticator(tmp_path, GOOD + extra)
    assert (await guard.authenticate(Caller("p", "Bearer " + token(issuer)))).name == "ada"
    assert (await guard.authenticate(bearer("eve"))).name == "eve"
    forged = jwt.encode({"iss": issuer.url, "sub": "admin", "aud": AUDIENCE}, SECRET, "HS256", {"kid": "one"})
    foreign = jwt.encode({"iss": "http://x", "sub": "a"}, issuer.keys["one"], "ES256", {"kid": "one"})
    for wrong in (forged, foreign, "x", "a.b.c", ""):
        with pytest.raises(Unauthenticated):
            await guard.authenticate(Caller("p", f"Bearer {wrong}"))


# ---------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "other"}, {"aud": None}, {"aud": 7}, {"exp": None}, {"iat": None}, {"sub": None}, {"sub": ""},
        {"sub": "a\0"}, {"iss": None}, {"iss": "http://elsewhere"}, {"exp": NOW_S}, {"exp": "x"}, {"nbf": NOW_S + 9},
        {"iat": NOW_S + 9}, {"iat": True},
    ],
)  # fmt: skip
async def test_a_token_that_lacks_a_claim_or_is_for_others_is_refused(issuer: Issuer, claims: dict[str, Any]) -> None:
    ours = provider(issuer, Clock())
    with pytest.raises(Unauthenticated):
        await ours.verify_principal(token(issuer, **claims))
    assert (await ours.verify_principal(token(issuer))).name == "ada"


async def test_a_tokens_own_keys_and_addresses_are_not_followed(issuer: Issuer) -> None:
    own = ec.generate_private_key(ec.SECP256R1())
    ours, address = provider(issuer, Clock()), issuer.url + "/evil"
    claims = jwt.decode(token(issuer), options={"verify_signature": False})
    jwk = ECAlgorithm.to_jwk(own.public_key(), as_dict=True)
    for kid in ("one", "two", "../../one", "http://x/", "x" * 300):
        headers = {"kid": kid, "jku": address, "x5u": address, "jwk": jwk, "x5c": ["AA=="]}
        with pytest.raises(Unauthenticated):
            await ours.verify_principal(jwt.encode(claims, own, "ES256", headers))
    assert "/evil" not in issuer.asked


async def test_the_algorithm_of_a_key_is_that_of_the_token(issuer: Issuer) -> None:
    issuer.more = {"alg": "ES384"}
    with pytest.raises(Unavailable):
        await provider(issuer, Clock()).verify_principal(token(issuer))
    issuer.more = {"alg": "ES256"}
    ours = provider(issuer, Clock())
    assert (await ours.verify_principal(token(issuer))).name == "ada"
    claims = jwt.decode(token(issuer), options={"verify_signature": False})
    for algorithm in ("HS256", "none"):
        forged = jwt.encode(claims, SECRET if algorithm == "HS256" else None, algorithm, {"kid": "one"})
        with pytest.raises(Unauthenticated, match="algorithm"):
            await ours.verify_principal(forged)


# ---------------------------------------------------------------------------------- the cache
async def test_an_unknown_kid_fetches_the_keys_again_at_most_every_five_minutes(issuer: Issuer) -> None:
    clock = Clock()
    ours = provider(issuer, clock)
    await ours.verify_principal(token(issuer))
    issuer.add_key("two")
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await ours.verify_principal(token(issuer, kid="two"))
    clock.now_ms += int(KEYS_FETCH_INTERVAL_MIN_S * 1000)
    assert (await ours.verify_principal(token(issuer, kid="two", clock=clock))).name == "ada"
    issuer.add_key("three")
    with pytest.raises(Unauthenticated):
        await ours.verify_principal(token(issuer, kid="three", clock=clock))
    assert issuer.asked.count("/keys") == 2


async def test_a_removed_key_is_forgotten_with_what_it_verified(issuer: Issuer) -> None:
    clock = Clock()
    ours = provider(issuer, clock)
    lasting = token(issuer, exp=NOW_S + 10**6)
    await ours.verify_principal(lasting)
    issuer.add_key("two")
    del issuer.keys["one"]
    clock.now_ms += int(KEYS_FETCH_INTERVAL_MIN_S * 1000)
    await ours.verify_principal(token(issuer, kid="two", clock=clock))
    with pytest.raises(Unauthenticated):
        await ours.verify_principal(lasting)


async def test_keys_are_refreshed_after_18_hours_and_while_the_issuer_is_down_they_go_on_until_24(
    issuer: Issuer,
) -> None:
    clock = Clock()
    ours = provider(issuer, clock)
    await ours.verify_principal(token(issuer))
    clock.now_ms += int(KEYS_REFRESH_S * 1000)
    await ours.verify_principal(token(issuer, clock=clock))
    await _until(lambda: issuer.asked.count("/keys") == 2 and ours._issuers[issuer.url]._fetching is None)
    issuer.answers[DISCOVERY_PATH] = 503
    clock.now_ms += int((KEYS_EXPIRE_S - 1) * 1000)
    assert (await ours.verify_principal(token(issuer, clock=clock))).name == "ada"
    issuer.add_key("two")
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable, match="not known"):
        await ours.verify_principal(token(issuer, kid="two", clock=clock))
    clock.now_ms += 2000
    with pytest.raises(Unavailable):
        await ours.verify_principal(token(issuer, clock=clock))
    del issuer.answers[DISCOVERY_PATH]
    clock.now_ms += int(FETCH_RETRY_S * 1000)
    assert (await ours.verify_principal(token(issuer, kid="two", clock=clock))).name == "ada"


async def _until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (DISCOVERY_PATH, 500), (DISCOVERY_PATH, 302), (DISCOVERY_PATH, b"{"), (DISCOVERY_PATH, b"[]"),
        (DISCOVERY_PATH, b"x" * 300_000),
        (DISCOVERY_PATH, b"[" * 100_000), (DISCOVERY_PATH, b'{"issuer": "http://other", "jwks_uri": "http://127.0.0.1:1/"}'),
        ("/keys", 404), ("/keys", b"{}"), ("/keys", b'{"keys": [{"kty": "EC"}, 7]}'),
    ],
)  # fmt: skip
async def test_an_issuer_that_does_not_answer_well_is_unavailable_and_is_not_asked_at_once_again(
    issuer: Issuer, path: str, answer: Any
) -> None:
    clock = Clock()
    ours = provider(issuer, clock)
    issuer.answers[path] = answer
    for _ in range(3):
        with pytest.raises(Unavailable, match=issuer.url):
            await ours.verify_principal(token(issuer))
    assert issuer.asked.count(DISCOVERY_PATH) == 1
    issuer.answers.clear()
    clock.now_ms += int(FETCH_RETRY_S * 1000)
    assert (await ours.verify_principal(token(issuer))).name == "ada"


async def test_a_redirect_is_not_followed_and_a_document_of_another_issuer_not_believed(issuer: Issuer) -> None:
    issuer.answers["/keys"] = 302
    with pytest.raises(Unavailable, match="302"):
        await provider(issuer, Clock()).verify_principal(token(issuer))
    assert "/moved" not in issuer.asked
    del issuer.answers["/keys"]
    said = {"issuer": issuer.url + "/", "jwks_uri": issuer.url + "/keys"}
    issuer.answers[DISCOVERY_PATH] = json.dumps(said).encode()
    with pytest.raises(Unavailable, match="another issuer"):
        await provider(issuer, Clock()).verify_principal(token(issuer))


async def test_the_loop_does_not_wait_for_a_slow_issuer(issuer: Issuer) -> None:
    issuer.slow_s = 0.3
    ours = provider(issuer, Clock())
    waiting = asyncio.ensure_future(ours.verify_principal(token(issuer)))
    turns = 0
    while not waiting.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert (await waiting).name == "ada"
    assert turns > 10


async def test_an_issuer_that_is_not_there_is_unavailable() -> None:
    ours = OidcProvider(
        OidcSection(("http://127.0.0.1:1",), ("a",), require_https=False), Clock(), SystemWorkers()
    )  # fmt: skip
    with pytest.raises(Unavailable):
        await ours.verify_principal(jwt.encode({"iss": "http://127.0.0.1:1"}, SECRET, "HS256"))


HANDSHAKE = b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb"  # the begin of a long server hello
BEGUN = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n"


@pytest.mark.parametrize(
    ("scheme", "sent"),
    [("http", b""), ("http", BEGUN + b"X: "), ("http", BEGUN + b"\r\n"), ("https", HANDSHAKE)],
    ids=["silence", "headers", "body", "handshake"],
)  # fmt: skip
def test_one_deadline_bounds_an_answer_that_trickles(
    monkeypatch: pytest.MonkeyPatch, scheme: str, sent: bytes
) -> None:
    monkeypatch.setattr(http_client, "REQUEST_TIMEOUT_S", 0.3)
    over = threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(sent)
            while not over.wait(0.05) and sent:
                connection.sendall(b"0")
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=trickle, args=(listener,))
        server.start()
        rescue = threading.Timer(20, over.set)  # ends the exchange if no deadline does
        rescue.start()
        try:
            with pytest.raises(Unavailable):
                JsonClient(SystemClock(), require_https=False).request_json(
                    f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/"
                )
            assert not over.is_set(), "the client ended it"
        finally:
            over.set()
            rescue.cancel()
            server.join()


def test_an_answer_over_tls_is_read_and_a_server_of_another_authority_is_not_asked(
    issuer: Issuer, tmp_path: Path
) -> None:
    trusted, other = Authority.make(tmp_path / "trusted"), Authority.make(tmp_path / "other")
    files = trusted.issue("issuer")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    issuer.wrap(context)
    asked = issuer.url.replace("http:", "https:") + "/keys"
    assert set(JsonClient(SystemClock(), TlsFiles(ca=trusted.ca)).request_json(asked)) == {"keys"}
    with pytest.raises(Unavailable, match="URLError"):
        JsonClient(SystemClock(), TlsFiles(ca=other.ca)).request_json(asked)
    assert issuer.asked == ["/keys"]


# ---------------------------------------------------------------------------------- settings and addresses
@pytest.mark.parametrize(
    "text",
    [
        "[oidc]\n", "[oidc]\nissuers = ['https://x']\n", "[oidc]\naudiences = ['a']\nissuers = []\n",
        "[oidc]\naudiences = ['a']\nissuers = ['https://x']\nclock_skew_s = -1\n",
        "[oidc]\naudiences = ['a']\nissuers = 'https://x'\n",
        "[oidc]\naudiences = ['a']\nissuers = ['https://x']\nrequire_https = 0\n",
        "[oidc]\naudiences = ['a']\nissuers = ['1', '2', '3', '4', '5', '6']\n",
    ],
)  # fmt: skip
def test_the_section_is_checked(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"\[oidc\]"):
        load(tmp_path, GOOD + text)


@pytest.mark.parametrize(
    "url", ["http://x", "file:///etc/passwd", "ftp://x", "x", "https://", "https://u@x", "https://[", 7]
)
def test_only_https_is_asked(url: Any) -> None:
    https = JsonClient(SystemClock())
    assert not https.is_url_allowed(url)
    with pytest.raises(InvalidConfiguration, match="https"):
        OidcProvider(OidcSection((url,), ("a",)), Clock(), SystemWorkers(), https)
    assert https.is_url_allowed("https://issuer.example/x")
    in_clear = JsonClient(SystemClock(), require_https=False)
    asked = ["http://localhost:80", "http://[::1]/", "http://issuer.example", "http://127.0.0.1.example"]
    assert [in_clear.is_url_allowed(each) for each in asked] == [True, True, False, False]


# ---------------------------------------------------------------------------------- key sets
def test_keys_that_do_not_verify_are_left_out() -> None:
    good: dict[str, Any] = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True)
    private_key = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()), as_dict=True)
    weak = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True)
    strong: dict[str, Any] = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048).public_key(), as_dict=True)
    wrong: list[Any] = [
        {**good, "use": "enc"}, {**good, "alg": "HS256"}, {**good, "kid": 7}, {**good, "kid": "x" * 300}, private_key,
        weak, {**strong, "e": "A" * 40}, {**strong, "n": "x" * 10_000}, {"kty": "oct", "k": "AAAA"}, None,
        {**good, "y": good["x"]},
    ]  # fmt: skip
    assert parse_issuer_keys({"keys": wrong}) == ()
    found = parse_issuer_keys({"keys": [*wrong, {**good, "kid": "a"}, {**strong, "kid": "a"}, {**strong, "kid": "b"}]})
    assert [(each.kid, each.algorithms) for each in found] == [("a", ("ES256",)), ("b", ("RS256", "RS384", "RS512"))]
    assert parse_issuer_keys({"keys": [None] * KEYS_PER_ISSUER_MAX + [good]}) == ()


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=30), st.sampled_from(["RSA", "EC", "AQAB"])),
    lambda inner: st.lists(inner, max_size=3), max_leaves=4,
)  # fmt: skip
MEMBERS = st.sampled_from(["kty", "crv", "x", "y", "n", "e", "kid", "alg", "use", "d", "x5c"])


@settings(max_examples=400, deadline=None)
@given(st.one_of(VALUES, st.lists(st.dictionaries(MEMBERS, VALUES), max_size=3)))
def test_any_document_gives_keys_that_verify_or_none(keys: Any) -> None:
    for key in parse_issuer_keys(json.loads(json.dumps({"keys": keys}))):
        assert key.algorithms
        assert isinstance(key.kid, str)


async def test_any_text_is_refused_by_an_issuers_provider() -> None:
    ours = OidcProvider(OidcSection(("https://x",), ("a",)), Clock(), SystemWorkers())
    for text in ("", ".", "..", "a.b.c", "e30.e30.", "e30.W10.e30", "\0", "ä.ä.ä", "x" * 100_000):
        with pytest.raises(MagnetarError):
            await ours.verify_principal(text)
