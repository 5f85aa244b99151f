"""`magnetar security …`: makes the files of a secured broker, and tokens.

Also in this file, below its heading: `magnetar security check` (check).
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common.lazy import LazyCommand, LazyGroup
from .common.output import OUTPUT_OPTION, CommandOutput
from .common.units import FiniteNumber

if TYPE_CHECKING:
    from ..client.admin import Admin

security = LazyGroup(
    "security",
    {
        "init": LazyCommand(".security", "init", "Make an authority, certificates, keys and first tokens."),
        "certificate": LazyCommand(".security", "certificate", "Renew a broker's certificate."),
        "member": LazyCommand(".security", "member", "Renew or make the certificate of a process of the cluster."),
        "authority": LazyCommand(".security", "authority", "Replace the authority, in two steps."),
        "token": LazyCommand(".security", "token", "Tokens: create, show, validate."),
        "check": LazyCommand(".security", "check", "What a server lets a caller do who shows no credentials."),
    },
    help="Keys, certificates and tokens.\n\nExample: magnetar security init ./security --host broker-1",
)

token = LazyGroup(
    "token",
    {
        "create": LazyCommand(".security", "create", "Make a token for a role."),
        "key": LazyCommand(".security", "key", "Replace the key that signs tokens, in two steps."),
        "show": LazyCommand(".security", "show", "What a token says; its signature is not verified."),
        "validate": LazyCommand(".security", "validate", "Whether a broker with these settings takes a token."),
        "revoke": LazyCommand(".security", "revoke", "Refuse a token, or all of a role, from now on."),
    },
    help="Tokens (JWT).\n\nExample: magnetar security token create --folder ./security --role orders",
)

FOLDER_OPTION = click.option(
    "--folder", type=click.Path(file_okay=False), default="security", show_default=True, help="Of `security init`."
)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--host", "hosts", multiple=True, help="A name or address of the broker, as clients use it; repeatable.")
@click.option("--cluster", default="", help="Its name in the certificates of its members (default: a random one).")
@click.option("--keep", is_flag=True, help="Keep the files of a complete folder, and end without an error.")
@click.option(
    "--servers",
    type=click.Path(file_okay=False),
    default=None,
    metavar="FOLDER",
    help="Copy what servers read to this folder too: all but the keys that sign.",
)
def init(folder: str, hosts: tuple[str, ...], cluster: str, keep: bool, servers: str | None) -> None:
    """Create an authority, certificates, a key that signs tokens, and tokens for an operator and for the brokers.

    Example: magnetar security init ./security --host broker-1.example --host 10.0.0.7
    """
    from ..security.authority import copy_server_files, has_all_files

    if keep and has_all_files(Path(folder)):
        click.echo(f"{folder} is complete and kept", err=True)
    else:
        _initialize(folder, hosts, cluster)
    for name in copy_server_files(Path(folder), Path(servers)) if servers else ():
        click.echo(f"{Path(servers or '') / name}")


def _initialize(folder: str, hosts: tuple[str, ...], cluster: str) -> None:
    from ..security.authority import create_authority_files

    made = create_authority_files(Path(folder), [*hosts, "localhost", "127.0.0.1"], _now(), cluster)
    for name in made.files:
        click.echo(f"{made.folder / name}")
    click.echo(f"keep {made.folder / 'ca-key.pem'} and {made.folder / 'token-key.pem'} off the servers", err=True)
    click.echo(f"next: magnetar standalone --security {made.folder / 'security.toml'}", err=True)


@click.command()
@FOLDER_OPTION
@click.option("--host", "hosts", multiple=True, help="Repeatable (default: those of the one before).")
@click.option("--days", type=click.IntRange(1, 825), default=90, show_default=True)
def certificate(folder: str, hosts: tuple[str, ...], days: int) -> None:
    """Renew the certificate of a broker. A running broker uses the new one from the next connection on.

    Example: magnetar security certificate --folder ./security
    """
    from ..security.authority import issue_broker_certificate

    for name in issue_broker_certificate(Path(folder), list(hosts), _now(), days):
        click.echo(str(Path(folder) / name))


@click.command()
@FOLDER_OPTION
@click.option("--role", type=click.Choice(["metadata", "broker", "bookie", "operator"]), required=True)
@click.option("--name", required=True, help="Of the process or the person, in logs; such as a host's name.")
@click.option("--host", "hosts", multiple=True, help="Of the metadata service: as brokers and bookies reach it.")
@click.option("--days", type=click.IntRange(1, 825), default=90, show_default=True)
def member(folder: str, role: str, name: str, hosts: tuple[str, ...], days: int) -> None:
    """Create or renew the certificate of a process of the cluster, or of an operator: the file members/ROLE.pem and its
    key.

    Example: magnetar security member --folder ./security --role bookie --name bookie-3
    """
    from ..security.authority import issue_member_certificate

    if (role == "metadata") != bool(hosts):
        raise click.UsageError("--host is of --role metadata, which needs one: the others only call")
    for written in issue_member_certificate(Path(folder), role, name, list(hosts), _now(), days):
        click.echo(str(Path(folder) / written))


@click.command()
@FOLDER_OPTION
@click.option("--role", required=True, help="Who the token's holder is.")
@click.option("--days", type=FiniteNumber(0.0001, 36500), default=None, help="Of its life (default: no end).")
@click.option("--out", type=click.Path(dir_okay=False), default=None, help="A new file with mode 600 (default: print).")
@click.option("--replace", "over", is_flag=True, help="The file of --out may exist: the new token takes its place.")
def create(folder: str, role: str, days: float | None, out: str | None, over: bool) -> None:
    """Create a token for a role. With --out the token is written to a file with mode 600, because a file of secrets
    that others may read is refused later.

    \b
    Examples:
      magnetar security token create --folder ./security --role orders --days 30 --out orders.token
      magnetar security token create --folder ./security --role broker --days 90 --out security/broker.token --replace
    """
    from ..proto.names import check_role
    from ..runtime.clock import SystemClock
    from ..security.authority import write_secret
    from ..security.settings import Secret, read_private_file
    from ..security.token import create_token

    check_role(role)
    if over and out is None:
        raise click.UsageError("--replace goes with --out")
    key = Secret(read_private_file(str(Path(folder) / "token-key.pem")))
    token = create_token(key, "ES256", role, SystemClock().wall_ms(), None if days is None else days * 86_400)
    if out is None:
        click.echo(token)
    else:
        write_secret(Path(out), token.encode() + b"\n", over=over)
        click.echo(out)


DROP_OLD_OPTION = click.option("--drop-old", is_flag=True, help="The second step: those before the newest end.")


@click.command()
@FOLDER_OPTION
@DROP_OLD_OPTION
def authority(folder: str, drop_old: bool) -> None:
    """Create a new authority next to the old one. Then give ca.pem to all processes, renew all certificates, and drop
    the old authority with --drop-old.

    Example: magnetar security authority --folder ./security
    """
    from ..security.authority import add_authority

    _rotate(Path(folder), "ca.pem", drop_old, lambda: add_authority(Path(folder), _now()))


@click.command()
@FOLDER_OPTION
@DROP_OLD_OPTION
def key(folder: str, drop_old: bool) -> None:
    """Create a new key for signing tokens, next to the old one. Then give token-public.pem to all brokers, create all
    tokens again, give broker.token to the brokers, and drop the old key with --drop-old.

    --drop-old is refused while broker.token or admin.token there is of the old key: brokers would refuse it.

    Example: magnetar security token key --folder ./security
    """
    from ..proto.errors import InvalidConfiguration
    from ..security.authority import create_token_key, find_tokens_of_older_keys

    for role in find_tokens_of_older_keys(Path(folder)) if drop_old else ():
        raise InvalidConfiguration(
            f"{Path(folder) / role}.token is not of the newest key, and would be refused: make it anew, and give it to"
            f" who uses it: magnetar security token create --folder {folder} --role {role} --days 90"
            f" --out {Path(folder) / role}.token --replace"
        )
    _rotate(Path(folder), "token-public.pem", drop_old, lambda: create_token_key(Path(folder)))


def _rotate(folder: Path, public: str, drop_old: bool, renew: Callable[[], list[str]]) -> None:
    from ..proto.errors import InvalidConfiguration
    from ..security import authority as files

    if not (folder / public).is_file():
        raise InvalidConfiguration(f"{folder} has no {public}: it is no folder of `security init`")
    if drop_old:
        files.remove_older_signers(folder / public)
    for name in [public] if drop_old else renew():
        click.echo(str(folder / name))


@click.command()
@click.argument("source", default="-", metavar="[FILE|env:NAME|-]")
def show(source: str) -> None:
    """Show the content of a token. The signature of the token is not verified.

    Example: magnetar security token show orders.token
    """
    from ..security.token import format_unverified_token

    click.echo(format_unverified_token(_read(source)))


@click.command()
@click.argument("source", default="-", metavar="[FILE|env:NAME|-]")
@click.option("--security", "settings", type=click.Path(dir_okay=False), required=True, help="The broker's settings.")
def validate(source: str, settings: str) -> None:
    """Check whether a broker with these settings accepts a token, and show for which role.

    Example: magnetar security token validate orders.token --security ./security/security.toml
    """
    import asyncio

    from ..runtime.access import Caller
    from ..runtime.clock import SystemClock
    from ..security.authenticator import Authenticator
    from ..security.settings import SecuritySettings

    guard = Authenticator(SecuritySettings.load(settings), SystemClock())
    found = asyncio.run(guard.authenticate(Caller("", f"Bearer {_read(source)}")))
    until = datetime.datetime.fromtimestamp(found.expires_ms / 1000, datetime.UTC) if found.expires_ms else "for ever"
    click.echo(f"role {found.name}, valid until {until}" if found.expires_ms else f"role {found.name}, valid for ever")


@click.command()
@click.argument("source", default="", metavar="[FILE|env:NAME|-]")
@click.option("--security", "settings", type=click.Path(dir_okay=False), required=True, help="The broker's settings.")
@click.option("--id", "identity", default="", help="The id (jti) of a token, as the audit log shows it.")
@click.option("--role", default="", help="All tokens of this role.")
def revoke(source: str, settings: str, identity: str, role: str) -> None:
    """Refuse a token, or all tokens of a role, from now on. Connections with such a token end within seconds.

    The token or role is written to the file `revoked` of the section [token], which each broker must have. To allow it
    again, delete its line.

    Example: magnetar security token revoke orders.token --security ./security/security.toml
    """
    from ..proto.errors import InvalidConfiguration
    from ..security import token as revoked
    from ..security.settings import SecuritySettings

    if sum(map(bool, (source, identity, role))) != 1:
        raise click.UsageError("give one of a token, --id and --role")
    token = SecuritySettings.load(settings).token
    if token is None or not token.revoked:
        raise InvalidConfiguration(f'{settings}: [token] has no `revoked`, such as  revoked = "revoked.txt"')
    what = revoked.read_token_id(_read(source)) if source else identity or role
    revoked.add_revocation(token.revoked, what)
    click.echo(f"{what} is in {token.revoked}")


def _read(source: str) -> str:
    from .common.session import TOKEN_BYTES_MAX, read_token

    return sys.stdin.read(TOKEN_BYTES_MAX).strip() if source == "-" else read_token(source)


def _now() -> Any:
    return datetime.datetime.now(datetime.UTC)


# --------------------------------------------------------------------------------------------------------- check
# `magnetar security check`: what a server lets a caller do who shows no credentials.


CHECK_TOPIC = "persistent://public/default/security-check"
ADMIN_TIMEOUT_S = 10.0

AskAdmin = Callable[["Admin"], object]
"""Asks for something that changes nothing; an empty answer shows nothing."""
ACCESS_QUESTIONS: tuple[tuple[str, AskAdmin], ...] = (
    ("list tenants", lambda admin: admin.tenants()),
    ("list topics", lambda admin: admin.topics()),
    ("look up a topic", lambda admin: admin.owner(CHECK_TOPIC)),
    ("read a topic's statistics", lambda admin: admin.topic_stats(CHECK_TOPIC)),
    ("read a namespace's policies", lambda admin: admin.namespace_policies("public/default")),
    ("read its permissions", lambda admin: admin.namespace_permissions("public/default")),
    ("list brokers", lambda admin: admin.brokers()),
    ("list bookies", lambda admin: admin.bookies()),
)


@click.command()
@click.argument("url")
@click.option("--tls-ca", default="", metavar="FILE", help="Who signs its certificate.")
@OUTPUT_OPTION
def check(url: str, tls_ca: str, output: str) -> None:
    """Show which requests a server accepts from a caller without credentials. Nothing is changed. Exit code 1: the
    server accepts some.

    Example: magnetar security check magnetar+ssl://broker-1.example:7650 --tls-ca ./security/ca.pem
    """
    from ..client.admin import Admin
    from .common.exits import CommandFailure

    with Admin(url, timeout_s=ADMIN_TIMEOUT_S, tls_trust_certs_file_path=tls_ca) as admin:
        rows = [
            {"caller without credentials may": what, "answer": _answer(admin, ask)} for what, ask in ACCESS_QUESTIONS
        ]
    out = CommandOutput(output)
    answer = "no: TLS" if url.split("://")[0].endswith("+ssl") else "yes: in clear"
    rows.append({"caller without credentials may": "read the traffic of others", "answer": answer})
    out.print_rows(rows, ("caller without credentials may", "answer"))
    found = [str(row["caller without credentials may"]) for row in rows if str(row["answer"]).startswith("yes")]
    if found:
        raise CommandFailure(f"a caller without credentials may {', '.join(found)}")


def _answer(admin: Admin, ask: AskAdmin) -> str:
    """Asks as a caller without credentials; returns the answer as text, "yes…" or "no…". Raises errors which mean that
    no server answered."""
    from ..proto.errors import NotFound, Unauthenticated, Unauthorized

    try:
        found = ask(admin)
    except (Unauthenticated, Unauthorized) as error:
        return f"no: {type(error).__name__}"
    except NotFound as error:
        return f"yes: {type(error).__name__}"
    return "yes" if found else "no: nothing is shown"
