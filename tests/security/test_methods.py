"""Several ways to say who one is, at one listener: what a caller brings decides, and a wrong credential refuses it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InvalidConfiguration, Unauthenticated
from magnetar.runtime.access import Caller, CallerAccess, ListenerAccess, Principal, PrincipalKind
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc.client import connect
from magnetar.runtime.grpc.server import serve
from magnetar.runtime.network import Endpoint
from magnetar.security import settings
from magnetar.security.authenticator import Authenticator
from tests.runtime.grpc.test_access import HERE, LOOKUP, Broker
from tests.security.conftest import MakeCertificate
from tests.security.test_settings import GOOD, authenticator, bearer, load, private
from tests.security.test_token import NOW_S, SECRET, Clock
from tests.support.certificates import Authority

TLS = '[tls]\ncertificate = "c.pem"\nkey = "k.pem"\nca = "ca.pem"\n'
BOTH = GOOD + TLS + '[certificate]\ncluster = "prod"\n[authentication]\nanonymous_role = "guest"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private(tmp_path / "secret.key", SECRET)
    private(tmp_path / "broker.token", b"x.y.z\n")
    return tmp_path


async def test_a_certificate_says_who_calls(folder: Path, make_certificate: MakeCertificate) -> None:
    found = await authenticator(folder, BOTH).authenticate(Caller("p", certificate=make_certificate([["ada"]])))
    assert (found.name, found.kind, found.method, found.credential_id) == ("ada", PrincipalKind.CLIENT, "tls", "abc")


async def test_a_certificate_of_the_listeners_authority_says_who_calls_over_sockets(folder: Path) -> None:
    authority, access = Authority.make(folder / "authority"), []
    guard = Authenticator(load(folder, BOTH), SystemClock())
    serving = await serve(HERE, [("Broker", Broker())], ListenerAccess(guard, authority.issue("b")), SystemClock())
    access.append(CallerAccess(authority.issue("ada", hosts=())))
    access.append(CallerAccess(authority.issue("x", hosts=("magnetar://prod/role/orders", "a.example"))))
    roles = [await _role(serving.endpoint, each) for each in access]
    assert roles == ["client:ada", "client:orders"]
    with pytest.raises(Unauthenticated, match="another cluster"):
        await _role(serving.endpoint, CallerAccess(authority.issue("y", hosts=("magnetar://test/role/orders",))))
    await serving.close()


async def test_headers_of_a_caller_name_neither_a_principal_nor_an_address(folder: Path) -> None:
    guard = _Seen(Authenticator(load(folder, GOOD), SystemClock()))
    serving = await serve(HERE, [("Broker", Broker())], ListenerAccess(guard), SystemClock())
    header = bearer("ada").authorization
    async with grpc.aio.insecure_channel(str(serving.endpoint)) as channel:
        forged = [("x-magnetar-principal", "admin"), ("x-forwarded-for", "10.9.9.9"), ("forwarded", "for=10.9.9.9")]
        call = channel.unary_unary(LOOKUP.path, None, wire.LookupReply.FromString)
        reply = await call(b"", metadata=[*forged, ("authorization", header)])
        assert reply.owner == "client:ada"
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"", metadata=forged)
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"", metadata=[("authorization", header)] * 2)
    assert all(each.peer.startswith("127.0.0.1:") for each in guard.callers)
    await serving.close()


class _Seen:
    def __init__(self, inner: Authenticator) -> None:
        self.inner, self.callers = inner, list[Caller]()

    async def authenticate(self, caller: Caller) -> Principal:
        self.callers.append(caller)
        return await self.inner.authenticate(caller)

    def authorize(self, principal: Principal, path: str) -> None:
        self.inner.authorize(principal, path)

    def why_lapsed(self, principal: Principal) -> str:
        return self.inner.why_lapsed(principal)


async def _role(endpoint: Endpoint, access: CallerAccess) -> str:
    channel = connect(endpoint, access)
    try:
        return str((await channel.call(LOOKUP, wire.LookupRequest(topic="t"), timeout_s=5)).owner)
    finally:
        await channel.close()


async def test_a_header_beats_a_certificate_and_the_first_end_of_both_holds(
    folder: Path, make_certificate: MakeCertificate
) -> None:
    guard, pem = authenticator(folder, BOTH), make_certificate([["ada"]])
    lasting, short = bearer("eve"), bearer("eve", lifetime_s=60)
    found = await guard.authenticate(replace(lasting, certificate=pem))
    assert (found.name, found.method, found.expires_ms) == ("eve", "token", (NOW_S + 90 * 86_400) * 1000)
    assert (await guard.authenticate(replace(short, certificate=pem))).expires_ms == (NOW_S + 60) * 1000


async def test_a_wrong_credential_is_refused_although_another_would_do(
    folder: Path, make_certificate: MakeCertificate
) -> None:
    clock = Clock()
    guard, good = authenticator(folder, BOTH, clock), make_certificate([["ada"]])
    nameless, foreign = make_certificate(), make_certificate(uris=["magnetar://test/role/ada"])
    for wrong in (
        replace(bearer("ada", b"x" * 32), certificate=good),
        replace(bearer("ada", lifetime_s=-1), certificate=good),
        Caller("p", "Basic eDp5", good),
        Caller("p", "Bearer", good),
        Caller("p", "nonsense", good),
        replace(bearer("ada"), certificate=nameless),
        replace(bearer("ada"), certificate=foreign),
        Caller("p", certificate=nameless),
        Caller("p", certificate=b"no certificate"),
    ):
        with pytest.raises(Unauthenticated):
            await guard.authenticate(wrong)
    clock.now_ms += 91 * 86_400_000
    with pytest.raises(Unauthenticated, match="expired"):
        await guard.authenticate(replace(bearer("ada"), certificate=good))


async def test_without_the_section_a_certificate_names_no_one(folder: Path, make_certificate: MakeCertificate) -> None:
    guard = authenticator(folder)
    with pytest.raises(Unauthenticated, match="bring a token"):
        await guard.authenticate(Caller("p", certificate=make_certificate([["admin"]])))
    only = BOTH.replace('[token]\nsecret_key = "secret.key"\n', "")
    with pytest.raises(Unauthenticated, match="bring a client certificate"):
        await authenticator(folder, only).authenticate(replace(bearer("ada"), certificate=make_certificate([["a"]])))


@pytest.mark.parametrize(
    "text", ["[certificate]\n", GOOD + "[certificate]\n", GOOD + "[certificate]\ncommon_name = 1\n"]
)
def test_certificates_that_say_who_calls_need_an_authority(folder: Path, text: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"\[certificate\]"):
        load(folder, text)


def test_a_server_with_tokens_alone_imports_nothing_of_the_other_ways() -> None:
    """They cost 60 ms of a start; so do the libraries of keys, which are imported with the first key."""
    code = (
        "import sys, magnetar.security.authenticator\n"
        "heavy = ('urllib.request', 'cryptography', 'jwt', 'bcrypt', 'magnetar.security.oidc',\n"
        "         'magnetar.security.basic')\n"
        "print(*[name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_a_new_scheme_of_the_header_is_one_row() -> None:
    """A process that has one more row in the table uses it at each place where the schemes are named."""
    code = (
        "from magnetar.runtime import access\n"
        "access.CREDENTIAL_SCHEMES += (access.CredentialScheme('Seal', 'wax', is_base64=True),)\n"
        "from magnetar.broker.pulsar.connection import parse_caller_credentials\n"
        "from magnetar.broker.rest import call\n"
        "from magnetar.cli.admin.support_bundle import redact_text\n"
        "from magnetar.client.connect.discovery import parse_authorization\n"
        "header = parse_caller_credentials(access.Caller(''), 'wax', b'u:p').authorization\n"
        "secret = redact_text('Seal dTpwdTpw')\n"
        "print(header, parse_authorization(header), call.AUTHENTICATION_CHALLENGE, call._SECRETS['seal'], secret)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == (
        "Seal dTpw ('wax', b'u:p') Bearer, Basic, Seal {'type': 'http', 'scheme': 'seal'} Seal <blanked>"
    )


def test_a_new_way_to_authenticate_is_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(settings.AUTHENTICATION_SECTIONS) <= set(settings.SECURITY_SECTIONS)
    monkeypatch.setattr(settings, "AUTHENTICATION_SECTIONS", (*settings.AUTHENTICATION_SECTIONS, "members"))
    assert settings.SecuritySettings(members=settings.MembersSection()).authenticates_callers
    text = settings.list_sections(settings.AUTHENTICATION_SECTIONS)
    assert text == "[token], [oidc], [basic], [certificate] or [members]"
