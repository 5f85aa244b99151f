"""`magnetar support-bundle`: one file with what support asks for, and nothing that it must not see.

The table BUNDLED_FILES describes its content; --dry-run lists it. The bundle contains no payloads, keys or properties
of messages: no request of this module has them in its answer. Other parts that may contain a secret (settings, log
lines) are redacted twice before they are written: settings by their names (`redact_values`), and every text by patterns
of secrets (`redact_text`). A part that cannot be collected is named in README.txt with the reason; if no broker answers
there is no bundle. Guarding test: tests/cli/test_support_bundle.py, with planted secrets.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from ...runtime.access import CREDENTIAL_SCHEMES
from ...runtime.clock import SystemClock
from ..common.exits import CommandFailure
from ..common.session import CommandSession
from ..common.units import FiniteNumber
from ..storage.admin_port import ask_reachable_bookies, with_operator_options
from . import doctor
from .cluster import find_largest_topics

STATS_TOPICS_MAX = 50
LOG_BYTES_MAX = 1 << 20
"""The end of a log that is taken."""
REDACTED_TEXT = "<blanked>"
SECRET_NAMES = re.compile(
    r"(?i)secret|token|passw|passphrase|credential|private|api.?key|access.?key|(^|_)(keys?|pwd|pass)$|pgpass"
    r"|authorization|cookie"
)
"""Of settings whose values are blanked, with those below them."""
_SECRET_WORD = (
    r"(?=[\w-]{0,100}(?i:secret|token|passwo?r?d|passphrase|credential|(?:api|private|access)[_-]?key|pwd"
    r"|pgpass|(?<![a-z])pass(?![a-z])))[\w-]{1,200}"
)
_NAMED = rf"(?<![\w-]){_SECRET_WORD}"
"""A word that names a secret. It is looked for once a word, in its first letters: so the work is linear."""
SECRET_TEXTS = (
    re.compile(r"()-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
               re.DOTALL),
    re.compile(r"\A()[\w+/=\s]*-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----"),  # its beginning was cut off
    re.compile(r"()\beyJ[\w-]{4,}(?:\.[\w-]+){1,2}"),  # a JSON web token
    re.compile(r"()\bAKIA[A-Z0-9]{12,}"),
    re.compile(r"()data:[\w/+.-]{0,100};base64,[\w+/=-]+"),
    re.compile(r"(://)[^\s/\"'?#]{1,500}(?=@)"),
    re.compile(r"(://[^\s/\"'?#:]{0,200}:)[^\s\"'@]{1,300}(?=@)"),  # a password with a slash
    re.compile(r"(?i)(\b(?:authorization|cookie)[\"']?[ \t]{0,9}[:=][ \t]{0,9}[\"']?)[^\r\n\"']+"),
    re.compile(rf"(?i)(\b(?:{'|'.join(scheme.name for scheme in CREDENTIAL_SCHEMES)})\s{{1,9}})[\w+/=.~-]{{6,}}"),
    re.compile(rf'({_NAMED}["\']?\s{{0,9}}[:=]\s{{0,9}}")(?:[^"\\]|\\.)*'),
    re.compile(rf"({_NAMED}[\"']?\s{{0,9}}[:=]\s{{0,9}}')[^']*"),
    re.compile(rf'({_NAMED}(?:\\")?\s{{0,9}}[:=]\s{{0,9}}\\")(?:[^"\\]|\\{{2,9}}"?)*'),
    re.compile(rf"({_NAMED}[\"']?\s{{0,9}}[:=]\s{{0,9}})[^\s\"'{{}}\[\]\\]+"),
    re.compile(rf"((?<![\w-])--{_SECRET_WORD}\s{{1,9}})[^\s-]\S*"),
)
"""What secrets look like; the first group stays."""


class BundledFile(NamedTuple):
    """The description of one kind of file in the bundle, as --dry-run and README.txt list it: its name (words in
    capitals stand for names) and its content."""

    name: str
    what: str


BUNDLED_FILES = (
    BundledFile("README.txt", "when, by which version, and what could not be had"),
    BundledFile("status.json", "brokers, bookies and repair, as `magnetar status` shows them"),
    BundledFile("doctor.json", "the checks of `magnetar doctor` and what they found"),
    BundledFile(
        "topics.json", f"names and numbers of the {STATS_TOPICS_MAX} topics with the largest backlogs and most traffic"
    ),
    BundledFile("BROKER/settings.json", "settings in force and their sources; secrets are blanked"),
    BundledFile("BROKER/tasks.txt", "where each task waits: files, lines, functions"),
    BundledFile("BROKER/metrics-1.txt", "a page of metrics"),
    BundledFile("BROKER/metrics-2.txt", "… and another one, --apart seconds later"),
    BundledFile("bookies/BOOKIE.json", "its state and report, as `magnetar bookies state` and doctor ask them"),
    BundledFile("repair.json", "the state of each bookie that is known, and of repair"),
    BundledFile("metadata.json", "what the metadata has at its root, and the records of the cluster and of ledger ids"),
    BundledFile("config/NAME.json", "each --config FILE; secrets are blanked"),
    BundledFile(
        "logs/NAME", f"the last {LOG_BYTES_MAX >> 20} MiB of each --log FILE; what looks like a secret is blanked"
    ),
)
"""What is in a bundle. BROKER: for each broker; BOOKIE: for each bookie that answers this command."""
METADATA_NODES = "", "/cluster", "/ids/ledger"
BOOKIES_AND_METADATA = """
Not asked for: metrics, logs and settings of bookies and of the metadata service. Metrics are at their own --metrics
address alone: save the page of each process twice, 10 s apart (curl -o bookie-1.txt http://HOST:PORT/metrics), and
add the files with --log. Logs and settings are on their machines: --log FILE and --config FILE add them."""


def redact_text(text: str) -> str:
    """Returns the text with everything blanked that looks like a secret. The work is linear in the length of the text.
    """
    for pattern in SECRET_TEXTS:
        text = pattern.sub(rf"\g<1>{REDACTED_TEXT}", text)
    return text


def redact_values(value: Any, name: str = "") -> Any:
    """Returns the JSON document `value` with every value blanked whose name says that it is a secret. `name`: the name
    of `value` itself."""
    if name and SECRET_NAMES.search(name):
        return REDACTED_TEXT
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and "value" in value and SECRET_NAMES.search(value["name"]):
            return {**value, "value": REDACTED_TEXT}
        return {key: redact_values(each, key) for key, each in value.items()}
    return [redact_values(each) for each in value] if isinstance(value, list | tuple) else value


class SupportBundle:
    """The content of a support bundle: its files by name, and the parts that could not be collected."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.missing: list[str] = []

    def add_text(self, name: str, text: str) -> None:
        """Adds a file with this text, in which everything that looks like a secret is blanked."""
        self.files[name] = redact_text(text)

    def add_document(self, name: str, value: Any) -> None:
        """Adds a file with this value as JSON. Values whose names say that they are secrets are blanked, and then the
        text as in `add_text`."""
        self.add_text(name, json.dumps(redact_values(value), indent=1, default=str))

    def run_step(self, what: str, act: Callable[[], None]) -> None:
        """Calls `act`, which adds the part `what` to the bundle. If `act` fails with an error of a request or a file,
        adds the error to the list of missing parts, and returns."""
        from ...proto.errors import MagnetarError

        try:
            act()
        except (MagnetarError, CommandFailure, OSError, ValueError) as error:
            self.missing.append(f"{what}: {redact_text(str(error))}")

    def write(self, path: Path, now_ms: int) -> None:
        """Writes the bundle to the file `path`, which only its owner may read. Raises FileExistsError if the file
        exists. `now_ms`: the time of its files, in ms since the epoch."""
        with open(path, "xb", opener=_private) as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for name, text in sorted(self.files.items()):
                content = text.encode("utf-8", "backslashreplace")
                entry = tarfile.TarInfo(f"magnetar-support/{name}")
                entry.size, entry.mtime, entry.mode = len(content), now_ms // 1000, 0o600
                archive.addfile(entry, io.BytesIO(content))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def collect_bundle(
    session: CommandSession, logs: tuple[str, ...], configs: tuple[str, ...], apart_s: float
) -> SupportBundle:
    """Asks the servers of the cluster for all parts of the bundle, and returns the bundle. `logs` and `configs`: files
    to add; `apart_s`: seconds between the two pages of metrics, for which it waits. A part that cannot be collected is
    listed as missing. Raises the error of the first request if no broker can be reached. Raises also the errors of
    `gather_facts` (cli/admin/doctor.py)."""
    bundle = SupportBundle()
    summary = session.admin.broker_summaries()
    click.echo("asking brokers and bookies", err=True)
    facts = doctor.gather_facts(session, None)
    findings, states = doctor.run_checks(facts)
    status = {
        "brokers": facts.brokers, "silent": facts.silent, "bookies": facts.bookies, "repair": facts.repair,
        "reports": facts.reports, "unreachable": facts.unreachable, "racks": facts.racks,
    }  # fmt: skip
    bundle.add_document("status.json", status)
    bundle.add_document("doctor.json", {"checks": states, "findings": [each._asdict() for each in findings]})
    names = dict.fromkeys(
        row["name"] for by in ("backlog", "traffic") for row in find_largest_topics(summary, by, STATS_TOPICS_MAX // 2)
    )
    stats = list[Any]()
    for name in names:
        bundle.run_step(f"statistics of {name}", partial(_add_statistics, stats, session, name))
    bundle.add_document("topics.json", stats)
    endpoints = [each.endpoint for each in session.admin.brokers()]
    for number in (1, 2):
        for endpoint in endpoints:
            bundle.run_step(f"broker {endpoint}", partial(_add_broker, bundle, session, endpoint, number))
        if number == 1:
            click.echo(f"all but the second pages of metrics is there; they are asked for in {apart_s:g} s", err=True)
            time.sleep(apart_s)
    bundle.run_step("metadata", partial(_add_metadata, bundle, session))
    bundle.run_step("bookies", partial(_add_bookies, bundle, session))
    for path in map(Path, configs):
        bundle.run_step(str(path), partial(_add_config, bundle, path))
    for path in map(Path, logs):
        bundle.run_step(str(path), partial(_add_log, bundle, path))
    return bundle


def _add_statistics(stats: list[Any], session: CommandSession, name: str) -> None:
    stats.append(asdict(session.admin.topic_stats(name)))


def _add_broker(bundle: SupportBundle, session: CommandSession, endpoint: str, number: int) -> None:
    other = session.with_broker(endpoint)
    try:
        found = other.admin.describe_broker(tasks=number == 1, metrics=True)
    finally:
        other.close()
    folder = re.sub(r"[^\w.-]", "_", found.name)
    bundle.add_text(f"{folder}/metrics-{number}.txt", found.metrics)
    if number == 1:
        settings = [asdict(each) for each in found.settings]
        bundle.add_document(f"{folder}/settings.json", {"version": found.version, "settings": settings})
        bundle.add_text(f"{folder}/tasks.txt", found.tasks)


def _add_bookies(bundle: SupportBundle, session: CommandSession) -> None:
    """Adds what bookies answer to this command, and names those that do not. In a secured cluster they answer an
    operator."""
    from ..storage.ledgers import ask_any_bookie

    states, reports = (ask_reachable_bookies(session, verb) for verb in ("state", "report"))
    for id_, state in states.items():
        bundle.add_document(f"bookies/{id_}.json", {"state": state, "report": reports.get(id_)})
    helps = "" if session.operator.security else "; in a secured cluster give --security FILE --metadata HOST:PORT"
    for each in session.admin.bookies():
        if each.id not in states:
            bundle.missing.append(f"bookie {each.id} at {each.endpoint} does not answer this command{helps}")
    if states:
        verbs = "repair-status", "bookies"
        bundle.add_document("repair.json", {verb: ask_any_bookie(session, verb) for verb in verbs})


def _add_metadata(bundle: SupportBundle, session: CommandSession) -> None:
    found = [asdict(session.admin.describe_metadata(node=node)) for node in METADATA_NODES]
    bundle.add_document("metadata.json", found)


def _add_config(bundle: SupportBundle, path: Path) -> None:
    import tomllib

    bundle.add_document(f"config/{path.name}.json", tomllib.loads(path.read_text("utf-8")))


def _add_log(bundle: SupportBundle, path: Path) -> None:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - LOG_BYTES_MAX))
        bundle.add_text(f"logs/{path.name}", stream.read(LOG_BYTES_MAX).decode("utf-8", "replace"))


def _readme(bundle: SupportBundle, now: str) -> Iterator[str]:
    from ...proto.versions import format_version_text

    yield f"Made {now} by\n{format_version_text()}\n"
    yield "It has no payload, key or property of a message; what looked like a secret is blanked. Read it before"
    yield "you send it: names of tenants, topics, subscriptions, hosts and roles are in it.\n"
    yield from (f"{each.name}  {each.what}" for each in BUNDLED_FILES)
    yield "\nWhat could not be had:" if bundle.missing else "\nNothing is missing."
    yield from bundle.missing
    yield BOOKIES_AND_METADATA


@click.command()
@click.argument("file", default="", type=click.Path(dir_okay=False))
@click.option("--dry-run", is_flag=True, help="List what would be in it, and ask no server.")
@click.option("--log", "logs", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A server's log.")
@click.option(
    "--config", "configs", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A server's settings."
)
@click.option(
    "--apart", "apart_s", type=FiniteNumber(0, 600), default=10.0, show_default=True,
    help="Seconds between the two pages of metrics.",
)  # fmt: skip
@with_operator_options
def support_bundle(
    session: CommandSession, file: str, dry_run: bool, logs: tuple[str, ...], configs: tuple[str, ...], apart_s: float
) -> None:
    """Collect into one file what support asks for: status, doctor, settings, metrics, statistics, tasks, logs.

    No payload, key or property of a message is in it, and secrets are blanked. Names of topics, hosts and roles are: it
    is a file for you alone, which you may read before you send it. FILE: default magnetar-support-TIME.tar.gz.

    \b
    Examples:
      magnetar support-bundle --dry-run
      magnetar support-bundle --log /var/log/magnetar/broker.log --config magnetar.toml
    """
    if dry_run:
        session.out.print_rows([each._asdict() for each in BUNDLED_FILES], ("name", "what"))
        return
    now_ms = SystemClock().wall_ms()
    now = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(now_ms / 1000))
    path = Path(file or f"magnetar-support-{now}.tar.gz")
    if path.exists():
        raise CommandFailure(f"{path} exists already; give another name")
    bundle = collect_bundle(session, logs, configs, apart_s)
    bundle.add_text("README.txt", "\n".join(_readme(bundle, now)) + "\n")
    bundle.write(path, now_ms)
    for each in bundle.missing:
        click.echo(f"left out: {each}", err=True)
    session.out.print_result_text(f"{path} has {len(bundle.files)} files", file=str(path), files=sorted(bundle.files))
