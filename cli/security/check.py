"""`magnetar security check`: what a server lets a caller do who shows no credentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..common.output import Output

if TYPE_CHECKING:
    from ...client.admin import Admin

TOPIC = "persistent://public/default/security-check"
TIMEOUT_S = 10.0

Ask = Callable[["Admin"], object]
"""Asks for something that changes nothing; an empty answer shows nothing."""
QUESTIONS: tuple[tuple[str, Ask], ...] = (
    ("list tenants", lambda admin: admin.tenants()),
    ("list topics", lambda admin: admin.topics()),
    ("look up a topic", lambda admin: admin.owner(TOPIC)),
    ("read a topic's statistics", lambda admin: admin.topic_stats(TOPIC)),
    ("read a namespace's policies", lambda admin: admin.namespace_policies("public/default")),
    ("read its permissions", lambda admin: admin.namespace_permissions("public/default")),
    ("list brokers", lambda admin: admin.brokers()),
    ("list bookies", lambda admin: admin.bookies()),
)


@click.command()
@click.argument("url")
@click.option("--tls-ca", default="", metavar="FILE", help="Who signs its certificate.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def check(url: str, tls_ca: str, output: str) -> None:
    """What a server lets a caller do who shows no credentials. It asks, and changes nothing. Exit code 1: something.

    Example: magnetar security check magnetar+ssl://broker-1.example:7650 --tls-ca ./security/ca.pem
    """
    from ...client.admin import Admin
    from ..common.exits import Failure

    with Admin(url, timeout_s=TIMEOUT_S, tls_trust_certs_file_path=tls_ca) as admin:
        rows = [{"caller without credentials may": what, "answer": _answer(admin, ask)} for what, ask in QUESTIONS]
    out = Output(output)
    answer = "no: TLS" if url.split("://")[0].endswith("+ssl") else "yes: in clear"
    rows.append({"caller without credentials may": "read the traffic of others", "answer": answer})
    out.rows(rows, ("caller without credentials may", "answer"))
    found = [str(row["caller without credentials may"]) for row in rows if str(row["answer"]).startswith("yes")]
    if found:
        raise Failure(f"a caller without credentials may {', '.join(found)}")


def _answer(admin: Admin, ask: Ask) -> str:
    """Returns what a caller without credentials gets, as text. Raises other errors, which say that no server answered.
    """
    from ...proto.errors import NotFound, Unauthenticated, Unauthorized

    try:
        found = ask(admin)
    except (Unauthenticated, Unauthorized) as error:
        return f"no: {type(error).__name__}"
    except NotFound as error:
        return f"yes: {type(error).__name__}"
    return "yes" if found else "no: nothing is shown"
