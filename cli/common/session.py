"""The session of every administering command: a server's address, an output, and the admin client.

`--url` (or `MAGNETAR_URL`) is a service URL as in the SDK (client/connect/discovery.py). The caller authenticates with
`--token` or `--tls-cert`, which name files; a secret itself is never an argument, because other users of the machine
could see it. Options that are not given come from a context (profiles.py).

Also finds names of objects at the server: for the completion of a shell, and the most similar name for an error.

Both requests have the rights of the caller, so they show only names that the caller may list. They wait for at most
NAMES_TIMEOUT_S, and failures are ignored, so that they disturb neither the command line nor the error text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .output import OUTPUT_OPTION, CommandOutput, print_repeatedly
from .profiles import PROGRAM_KEYS, complete_context_name, load_context
from .units import FiniteNumber, Interval

if TYPE_CHECKING:
    from ...client.admin import Admin, AdminClient
    from ...client.blocking.client import Client
    from ...client.client import Client as AsyncClient
    from ...client.connect.authentication import Authentication


NAMES_TIMEOUT_S = 0.8
"""Seconds for a list of names: with the start of the command, a person waits for a second."""
DEFAULT_NAMESPACE = "public/default"


# ---------------------------------------------------------------------------------------------------- completion
def _tenants(admin: Admin, _: str, __: Mapping[str, Any]) -> Iterable[str]:
    return admin.tenants()


def _namespaces(admin: Admin, incomplete: str, _: Mapping[str, Any]) -> Iterable[str]:
    tenant, slash, _name = incomplete.partition("/")
    return admin.namespaces(tenant) if slash else (f"{each}/" for each in admin.tenants())


def _topics(admin: Admin, incomplete: str, _: Mapping[str, Any]) -> Iterable[str]:
    """Topics in the spelling that was begun: `orders`, `acme/shop/orders`, or with the domain in front."""
    scheme, mark, rest = incomplete.rpartition("://")
    parts = rest.split("/")
    if len(parts) == 2 or (mark and len(parts) < 3):
        return (f"{scheme}{mark}{each}/" for each in _namespaces(admin, rest, {}))
    if len(parts) > 3:
        return ()
    full = admin.topics("/".join(parts[:2]) if len(parts) == 3 else DEFAULT_NAMESPACE)
    if mark:
        return full
    short = (each.partition("://")[2] for each in full if each.startswith("persistent://"))
    if len(parts) == 3:
        return short
    local = [each.rpartition("/")[2] for each in short]
    return local if any(each.startswith(incomplete) for each in local) else _namespaces(admin, incomplete, {})


def _subscriptions(admin: Admin, _: str, given: Mapping[str, Any]) -> Iterable[str]:
    return admin.subscriptions(admin.parts(given["topic"])[0])


ListNames = Callable[["Admin", str, Mapping[str, Any]], Iterable[str]]
NAME_LISTERS: Mapping[str, ListNames] = {
    "topic": _topics, "namespace": _namespaces, "tenant": _tenants, "subscription": _subscriptions,
}  # fmt: skip
"""Of a parameter by its name: asks for the names that may come, among others. It gets what is typed of it, and the
parameters before it."""


# ---------------------------------------------------------------------------------------------------- near names
def add_name_suggestion(session: CommandSession, error: Exception, given: Mapping[str, Any]) -> None:
    """If `error` says that an object was not found, adds a note to the error with the most similar name that exists.
    `given`: the arguments of the command. Asks the server for at most NAMES_TIMEOUT_S seconds for each request, and
    ignores failures."""
    from .exits import find_magnetar_error

    found = find_magnetar_error(error)
    near = _NEAR.get(type(found).__name__)
    if found is None or near is None:
        return
    brief = session.with_timeout(NAMES_TIMEOUT_S)
    try:
        name, names = near(brief.admin, given)
    except Exception:  # as the caller, who may not be allowed to list
        return
    finally:
        brief.close()
    from difflib import get_close_matches

    before, mark, last = name.rpartition("/")  # what is before the last part is right: it would make all names near
    others = {each.rpartition("/")[2] for each in names} - {last}
    if nearest := get_close_matches(last, others, n=1):
        found.add_note(f"did you mean {before + mark + nearest[0]!r}?")


Near = tuple[str, Iterable[str]]
"""The name that was given, and those that there are."""


def _near_topic(admin: Admin, given: Mapping[str, Any]) -> Near:
    from ...proto.names import TopicName

    return str(given["topic"]), admin.topics(str(TopicName.parse(given["topic"]).namespace_name))


def _namespace(given: Mapping[str, Any]) -> str:
    from ...proto.names import TopicName

    found = given.get("namespace")
    return str(found) if found else str(TopicName.parse(given["topic"]).namespace_name)


def _near_namespace(admin: Admin, given: Mapping[str, Any]) -> Near:
    name = _namespace(given)
    return name, admin.namespaces(name.partition("/")[0])


def _near_tenant(admin: Admin, given: Mapping[str, Any]) -> Near:
    return str(given.get("tenant") or _namespace(given).partition("/")[0]), admin.tenants()


def _near_subscription(admin: Admin, given: Mapping[str, Any]) -> Near:
    return str(given["subscription"]), _subscriptions(admin, "", given)


_NEAR: Mapping[str, Callable[[Admin, Mapping[str, Any]], Near]] = {
    "TopicNotFound": _near_topic, "NamespaceNotFound": _near_namespace, "TenantNotFound": _near_tenant,
    "SubscriptionNotFound": _near_subscription,
}  # fmt: skip
"""By the class of an error: those of a server and those that the SDK raises have the same names."""


# ------------------------------------------------------------------------------------------------------- session


DEFAULT_URL = "magnetar://127.0.0.1:7650"


class CommandSession:
    """The server, the credentials and the output of one command. `admin` is an admin client that connects when it is
    first used; `close` ends its connection. `context`: the name of the context from which the server and the
    credentials come; "" if there is none. The constructor sends nothing; it raises InvalidUrl if the URL is invalid,
    UsageError if the credentials contradict each other, InvalidConfiguration if a file cannot be used. Errors of its
    clients are not caught: `run_reporting_errors` prints them and ends the command."""

    context = ""

    def __init__(
        self, url: str, out: CommandOutput, timeout_s: float, token: str = "", trust: str = "", certificate: str = "",
        key: str = "",
    ) -> None:  # fmt: skip
        from ...client.connect.authentication import make_caller_access
        from ...client.connect.discovery import parse_service_url

        self.url, self.out, self.timeout_s = url, out, timeout_s
        self._trust = trust
        self._authentication = _authentication(token, certificate, key)
        # raises before any request
        make_caller_access(parse_service_url(url), self._authentication, {"tls_trust_certs_file_path": trust})
        self._admin: Admin | None = None
        self.operator: Any = None  # who asks the bookies (cli/storage/admin_port.py)

    @property
    def admin(self) -> Admin:
        """Returns the admin client of the session, which is made when it is first used."""
        if self._admin is None:
            from ...client.admin import Admin

            self._admin = Admin(
                self.url, timeout_s=self.timeout_s, authentication=self._authentication,
                tls_trust_certs_file_path=self._trust,
            )  # fmt: skip
        return self._admin

    def client(self) -> Client:
        """Returns a blocking client for messages, which the caller must close."""
        from ...client.blocking.client import Client

        return Client(
            self.url, self._authentication, operation_timeout_seconds=max(1, int(self.timeout_s)),
            tls_trust_certs_file_path=self._trust or None,
        )  # fmt: skip

    def asyncio_client(self) -> AsyncClient:
        """Returns an asyncio client for messages, which the caller must close."""
        from ...client.client import Client

        return Client(
            self.url, self._authentication, operation_timeout_seconds=max(1, int(self.timeout_s)),
            tls_trust_certs_file_path=self._trust or None,
        )  # fmt: skip

    def make_asyncio_admin(self) -> AdminClient:
        """Returns an asyncio admin client, which the caller must close."""
        from ...client.admin import AdminClient

        return AdminClient(
            self.url, timeout_s=self.timeout_s, authentication=self._authentication,
            tls_trust_certs_file_path=self._trust,
        )  # fmt: skip

    def with_timeout(self, timeout_s: float) -> CommandSession:
        """Returns a copy of this session whose requests wait at most `timeout_s` seconds, with an admin client of its
        own. The caller must close the copy."""
        found = copy(self)
        found._admin, found.timeout_s = None, timeout_s
        return found

    def with_broker(self, endpoint: str) -> CommandSession:
        """Returns a session with the same credentials at another broker, `endpoint` (HOST:PORT). The caller must close
        the session."""
        found = copy(self)
        found._admin, found.url = None, f"{self.url.partition('://')[0]}://{endpoint}"
        return found

    @property
    def describe_server(self) -> str:
        """Returns a text for users that names the server on which the command acts: its URL and the context."""
        return f"{self.url} (context {self.context})" if self.context else self.url

    def close(self) -> None:
        """Ends the connection of the admin client, if that was made."""
        if self._admin is not None:
            self._admin.close()


def _authentication(token: str, certificate: str, key: str) -> Authentication | None:
    """Returns the credentials; None: there are none. Raises UsageError if the options contradict each other. A token
    is read again for each connection."""
    from ...client.connect.authentication import AuthenticationTLS, AuthenticationToken

    if token and (certificate or key):
        raise click.UsageError("--token and --tls-cert are two ways to say who you are: give one")
    if bool(certificate) != bool(key):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both")
    if token:
        return AuthenticationToken(lambda: read_token(token))
    if not certificate:
        return None
    from ...security.settings import read_private_file

    read_private_file(key)  # others may not read it
    return AuthenticationTLS(certificate, key)


def read_token(source: str) -> str:
    """Returns the token that `source` names: `env:NAME` for an environment variable, or the path of a file that other
    users may not read, with or without `file:`. Raises InvalidConfiguration if the token cannot be read, or if `source`
    contains the token itself."""
    from ...proto.errors import InvalidConfiguration
    from ...security.settings import describe_secret_source, read_secret

    if source.startswith("data:"):
        raise InvalidConfiguration("--token names a file or env:NAME, and is never the token itself")
    try:
        return read_secret(source).reveal_bytes()[:TOKEN_BYTES_MAX].decode("ascii").strip()
    except UnicodeDecodeError:
        raise InvalidConfiguration(f"--token {describe_secret_source(source)} is no token") from None


TOKEN_BYTES_MAX = 16 << 10
"""Characters of a token that are read."""

# ---------------------------------------------------------------------------------------------------- completion
CompleteWord = Callable[[click.Context, click.Parameter, str], list[str]]


def _completed(names: ListNames) -> CompleteWord:
    """Returns the completion function of a parameter. It returns the names that begin with the typed text, or no names
    if it fails."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        try:
            given = dict(context.params)
            if given.get("topic") is None and context.args:  # of a line that ends with -s nothing else is parsed
                given["topic"] = context.args[0]
            with context.scope(cleanup=False):
                session = make_session(dict(context.params), CommandOutput("name"), NAMES_TIMEOUT_S)
            try:
                return sorted({name for name in names(session.admin, incomplete, given) if name.startswith(incomplete)})
            finally:
                session.close()
        except Exception:
            return []

    return complete


NAME_COMPLETIONS: Mapping[str, CompleteWord] = {name: _completed(names) for name, names in NAME_LISTERS.items()}
"""Completions of parameters, by their names."""

YES_OPTION = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
SUBSCRIPTION_OPTION = click.option(
    "-s",
    "--subscription",
    required=True,
    help="Name of the subscription.",
    shell_complete=NAME_COMPLETIONS["subscription"],
)
PLACE_KEY = "magnetar.place"
"""In a click context: where the command acts, for the question of `confirm_deletion`."""


def confirm_deletion(what: str, yes: bool, count: Callable[[], str] = str) -> None:
    """Asks the user for confirmation before the command deletes data for good. If the user answers no, the command ends
    with code 130. Without a terminal, raises UsageError (code 2). If `yes` is set, does not ask. `count` is called only
    before a user is asked, and returns what the question adds about the amount of data, such as " (5 messages)"."""
    if yes:
        return
    has_terminal = sys.stdin.isatty()
    what += count() if has_terminal else ""
    current = click.get_current_context(silent=True)
    if current is not None and PLACE_KEY in current.meta:
        what = f"{what}, at {current.meta[PLACE_KEY]}"
    if not has_terminal:
        raise click.UsageError(f"{what}? There is no terminal to ask at: give --yes")
    click.confirm(f"{what}?", abort=True, err=True)


def make_session(options: dict[str, Any], out: CommandOutput, timeout_s: float) -> CommandSession:
    """Returns the CommandSession for the options that `with_session` adds, and removes these options from `options`.
    Raises InvalidConfiguration if the context is missing or invalid, UsageError if the credentials contradict each
    other."""
    context = click.get_current_context()
    named = options.pop("profile")
    said = {name: options.pop(name) for name in PROGRAM_KEYS}
    typed = {
        name for name in (*PROGRAM_KEYS, "profile") if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if "profile" in typed:
        said = {name: value if name in typed else "" for name, value in said.items()}
    name, values = load_context(named)
    session = CommandSession(out=out, timeout_s=timeout_s, **_with_profile(said, values))
    session.context = name if session.url == values.get("url", DEFAULT_URL) else ""
    context.meta[PLACE_KEY] = session.describe_server
    return session


def _with_profile(said: Mapping[str, str], profile: Mapping[str, str]) -> dict[str, str]:
    """Returns the arguments of a CommandSession. If options give any credentials, those of the profile are not used."""
    left = dict(profile)
    if said["token"] or said["tls_cert"] or said["tls_key"]:
        left = {name: left[name] for name in ("url", "tls_ca") if name in left}
    found = {name: said[name] or left.get(name, "") for name in PROGRAM_KEYS}
    return {
        "url": found["url"] or DEFAULT_URL, "token": found["token"], "trust": found["tls_ca"],
        "certificate": found["tls_cert"], "key": found["tls_key"],
    }  # fmt: skip


def with_session(function: Callable[..., None], *watched: str) -> Callable[..., None]:
    """Decorates a command: adds --url, -o, --timeout, --token, --tls-… and --context, and passes the CommandSession for
    them as the first argument; it is closed when the command ends. `watched`: the flags of the option with which the
    command repeats its answer; empty for a command that changes something."""

    @click.option("--url", envvar="MAGNETAR_URL", default="", help=f"The server (default: {DEFAULT_URL}).")
    @OUTPUT_OPTION
    @click.option("--timeout", type=FiniteNumber(0.1), default=30.0, show_default=True, help="Seconds.")
    @click.option("--token", envvar="MAGNETAR_TOKEN", default="", metavar="FILE|env:NAME", help="Where your token is.")
    @click.option("--tls-ca", envvar="MAGNETAR_TLS_CA", default="", metavar="FILE", help="Who signs its certificate.")
    @click.option("--tls-cert", envvar="MAGNETAR_TLS_CERT", default="", metavar="FILE", help="Your certificate.")
    @click.option("--tls-key", envvar="MAGNETAR_TLS_KEY", default="", metavar="FILE", help="Its private key.")
    @click.option(
        "--context", "--profile", "profile", envvar=["MAGNETAR_CONTEXT", "MAGNETAR_PROFILE"], default="",
        is_eager=True, metavar="NAME", help="Of client.toml ('magnetar context').",
        shell_complete=complete_context_name,
    )  # fmt: skip
    @wraps(function)
    def command(*args: Any, **options: Any) -> None:
        watch_s = options.pop("watch_s", None)
        output, timeout_s = CommandOutput(options.pop("output")), options.pop("timeout")
        session = make_session(options, output, timeout_s)
        try:
            if watch_s is None:
                function(session, *args, **options)
            else:
                print_repeatedly(output, watch_s, lambda: function(session, *args, **options))
        except Exception as error:
            add_name_suggestion(session, error, options)
            raise
        finally:
            session.close()

    if watched:
        what = "Answer again after so long, until Ctrl-C: 2s."
        command = click.option(*watched, "watch_s", type=Interval(), default=None, metavar="TIME", help=what)(command)
    return command


WATCH_FLAGS = ("-w", "--watch")


def session_command(
    *options: Callable[[Any], Any], name: str = "", watched: bool = False
) -> Callable[[Callable[..., None]], click.Command]:
    """Decorates a function: makes a command of it that gets a CommandSession as its first argument. The command has the
    name of the function unless `name` is given.

    A parameter for which `options` has no option becomes an argument, with the parameter's default; `yes` becomes the
    option --yes. `watched`: the command only reads, and gets --watch."""

    def make(function: Callable[..., None]) -> click.Command:
        parameters = _parameters(options)
        given, taken = {each.name for each in parameters}, {flag for each in parameters for flag in each.opts}
        command = with_session(function, *(flag for flag in WATCH_FLAGS if watched and flag not in taken))
        code, defaults = function.__code__, function.__defaults__ or ()  # inspect takes 0.1 ms, for each verb
        own = [each for each in code.co_varnames[1 : code.co_argcount] if each not in given]
        if "yes" in own:
            own.remove("yes")
            command = YES_OPTION(command)
        for option in reversed(options):
            command = option(command)
        last = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
        for each in reversed(own):
            settings = {"default": last[each]} if each in last else {}
            command = click.argument(each, shell_complete=NAME_COMPLETIONS.get(each), **settings)(command)
        return click.command(name or function.__name__.rstrip("_").replace("_", "-"))(command)

    return make


def _parameters(options: Sequence[Callable[[Any], Any]]) -> list[click.Parameter]:
    def probe() -> None: ...

    for option in options:
        option(probe)
    return getattr(probe, "__click_params__", [])
