"""`python -m tests.docs.tables [--check]`: writes what docs/ has from the code: tables, pictures, and paths of symbols.

Each table is between the lines `<!-- generated: NAME -->` and `<!-- end -->`. A path that is
followed by a symbol becomes that of the module that defines the symbol (tests/docs/paths.py).
"""

import enum
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from magnetar.bookie.maintenance.repair_worker import RepairConfig
from magnetar.bookie.server import BOOKIE_MEMORY_SHARES as OF_BOOKIE
from magnetar.bookie.server import BookieConfig
from magnetar.bookie.store.store import StoreConfig
from magnetar.broker.access.table_core import PERMISSION_RULES
from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.rest import application
from magnetar.broker.rest.call import NAMESPACE_PATH, REST_ROUTES, TOPIC_PATH, RestRoute
from magnetar.broker.server import BROKER_MEMORY_SHARES as OF_BROKER
from magnetar.cli.admin.doctor import CHECKS, OFFLINE_CHECKS
from magnetar.cli.admin.support_bundle import BUNDLED_FILES
from magnetar.cli.common.exits import find_exit_code
from magnetar.cli.main import ROOT_COMMANDS
from magnetar.cli.run.metrics import BOOKKEEPER_METRICS, PULSAR_TXN_METRICS
from magnetar.cli.run.metrics_pulsar import OMITTED_METRICS, PULSAR_METRICS
from magnetar.cli.run.servers import STANDALONE_MEMORY_BYTES
from magnetar.client.model.settings import ClientSettings, ConsumerSettings, ProducerSettings
from magnetar.ledger.bookies import LedgerConfig
from magnetar.metadata.server import METADATA_MEMORY_SHARES as OF_METADATA
from magnetar.proto import errors
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.config import (
    NO_LIMIT,
    REQUIRED_VALUE,
    ProcessConfig,
    list_setting_defaults,
    list_settings,
    plan_memory,
)
from magnetar.security.settings import SECURITY_SECTIONS as OF_SECURITY
from tests.docs import administration, complaints, defects, deletion, extending, recipes, states
from tests.docs.documents import DOCUMENTS, ROOT, replaced
from tests.docs.paths import corrected
from tests.docs.refusals import OPERATIONS, refusals_table

CONFIGURATIONS: dict[str, type] = {
    "process": ProcessConfig,
    "broker": BrokerConfig,
    "bookie": BookieConfig,
    "store": StoreConfig,
    "repair": RepairConfig,
    "ledger": LedgerConfig,
    "client": ClientSettings,
    "producer": ProducerSettings,
    "consumer": ConsumerSettings,
}
assert application.ROUTE_MODULES, "the routes are registered"
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Table(NamedTuple):
    document: str
    make: Callable[[], str]


def settings_table(kind: type) -> str:
    """One row per setting, in the order of the source: name with unit, default, meaning and cost."""
    lines = ["| setting | default | what it ends or bounds, and costs |", "|---|---|---|"]
    for setting, default in zip(list_settings(kind), list_setting_defaults(kind).values(), strict=True):
        text = setting.doc.replace("|", chr(92) + "|")
        lines.append(f"| `{setting.name}` | {_default(setting.name, default)} | {text} |")
    return "\n".join(lines)


def security_table() -> str:
    """One row per setting of security.toml, below that of its section."""
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    for section, kind in OF_SECURITY.items():
        lines.append(f"| **`[{section}]`** | | {' '.join((kind.__doc__ or '').split())} |")
        lines += settings_table(kind).splitlines()[2:]
    return "\n".join(lines)


def _default(name: str, value: object) -> str:
    if isinstance(value, RepairConfig | StoreConfig):
        return "below"
    if value is REQUIRED_VALUE:
        return "required"
    if isinstance(value, enum.Enum):
        return f"`{value.name}`"
    if value is None or value in ("", {}, ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in name:
        return _size(value)
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return f"`{value}`" if isinstance(value, str | tuple) else f"`{type(value).__name__}`"


def _size(value: int) -> str:
    for unit, name in _UNITS:
        if value and value % unit == 0:
            return f"{value // unit:,} {name}"
    return f"{value:,}"


def shares_table() -> str:
    """Who gets which part of memory_bytes: at least, in a standalone server with its default, and at most."""
    standalone = plan_memory(2 * STANDALONE_MEMORY_BYTES, (*OF_BROKER, *OF_BOOKIE), {}).limits
    lines = ["| share | what takes it | setting | at least | standalone | at most |", "|---|---|---|---|---|---|"]
    for share in (*OF_BROKER, *OF_BOOKIE, *OF_METADATA):
        name = share.setting.removeprefix("bookie.").removeprefix("broker.")
        setting = "–" if share.setting.startswith("metadata.") else f"`{name}`"
        if share.unit_bytes > 1 and setting != "–":
            times = f"{share.unit_bytes >> 20} MiB" if share.unit_bytes >= 1 << 20 else f"{share.unit_bytes} times"
            setting = f"{times} {setting}"
        most = "any" if share.most == NO_LIMIT else _size(share.most * share.unit_bytes)
        there = f"{standalone[share.name] >> 20} MiB" if share.name in standalone else "–"
        cells = (share.name, share.what, setting, _size(share.least * share.unit_bytes), there, most)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def error_classes(base: type[MagnetarError] = MagnetarError) -> Iterator[type[MagnetarError]]:
    """All classes of proto/errors.py, by number."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, base)]
    return iter(sorted(found, key=lambda kind: kind.code))


def errors_table() -> str:
    lines = ["| code | class | is a | definite | retryable | exit code | meaning |", "|---|---|---|---|---|---|---|"]
    for kind in error_classes():
        base = kind.__mro__[1]
        words = " ".join(kind.__doc__.split()) if kind.__dict__.get("__doc__") else ""
        if kind is MagnetarError:
            words = "Base of all; by itself: a code that this version does not know."
        family = "–" if base in (Exception, MagnetarError) else f"`{base.__name__}`"
        facts = " | ".join("yes" if fact else "–" for fact in (kind.definite, kind.retryable))
        lines.append(f"| {kind.code} | `{kind.__name__}` | {family} | {facts} | {find_exit_code(kind(''))} | {words} |")
    return "\n".join(lines)


def permissions_table() -> str:
    """One row per rpc, and per frame of a stream that opens something."""
    lines = ["| rpc | needs | of |", "|---|---|---|"]
    for path, rule in PERMISSION_RULES.items():
        of = f"{rule.on.value} in `{rule.field}`" if rule.field else rule.on.value
        named = f", subscription in `{rule.subscription}`" if rule.subscription else ""
        lines.append(f"| `{path}` | {rule.permission.value} | {of}{named} |")
    return "\n".join(lines)


def routes_table() -> str:
    """One row per path of REST, in the order of the handlers; the methods and what they take and answer."""
    lines = ["| route | takes → answers | |", "|---|---|---|"]
    for row in REST_ROUTES:
        answer = row.answer or "204"
        what = f"{row.body} → {answer}" if row.body else answer
        cells = (f"`{row.method} {shown_path(row)}`", what.replace("|", "\\|"), row.summary.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown_path(row: RestRoute) -> str:
    """With the short names that the page explains."""
    path = row.path.replace(TOPIC_PATH, "{T}").replace(NAMESPACE_PATH, "{N}").replace("/admin/v2", "")
    return path.replace("{domain:domain}", "{domain}")


def bookkeeper_table() -> str:
    """BookKeeper's names for a bookie's metrics, and ours."""
    lines = ["| BookKeeper's name | ours | note |", "|---|---|---|"]
    for second in BOOKKEEPER_METRICS:
        ours = ", ".join(f"`{name}`" for name in second.ours)
        lines.append(f"| `{second.name}` | {ours} | {second.note} |")
    return "\n".join(lines)


def pulsars_table() -> str:
    """Pulsar's names for metrics, and ours."""
    lines = ["| Pulsar's name | ours | note |", "|---|---|---|"]
    lines += [f"| `{name.name}` | `{name.ours}` | {name.note} |" for name in PULSAR_METRICS]
    for second in PULSAR_TXN_METRICS:
        ours = ", ".join(f"`{name}`" for name in second.ours)
        lines.append(f"| `{second.name}` | {ours} | {second.note} |")
    return "\n".join(lines)


def left_out_table() -> str:
    """Beginnings of Pulsar's names that are not shown, and why."""
    rows = (f"| `{beginning}…` | {why} |" for beginning, why in OMITTED_METRICS.items())
    return "\n".join(["| not shown | why |", "|---|---|", *rows])


def commands_table() -> str:
    """One row per command, or group of commands, of `magnetar`."""
    rows = (f"| `magnetar {name}` | {command.help} |" for name, command in ROOT_COMMANDS.items())
    return "\n".join(["| command | what for |", "|---|---|", *rows])


def checks_table() -> str:
    """One row per check of `magnetar doctor`, in the order in which it makes them."""
    lines = ["| code | what is looked at |", "|---|---|"]
    lines += [f"| `{each.code}` | {each.what} |" for each in CHECKS]
    lines += [f"| `{each.code}` | with `--offline DIR`: {each.what} |" for each in OFFLINE_CHECKS]
    return "\n".join(lines)


def bundle_table() -> str:
    """One row per kind of file of a support bundle."""
    lines = ["| file | what is in it |", "|---|---|"]
    return "\n".join([*lines, *(f"| {each.name} | {each.what} |" for each in BUNDLED_FILES)])


TABLES: dict[str, Table] = {
    **{
        f"settings of the {name}": Table("docs/settings.md", lambda kind=kind: settings_table(kind))  # type: ignore[misc]
        for name, kind in CONFIGURATIONS.items()
    },
    "settings of security": Table("docs/settings.md", security_table),
    "shares of memory": Table("docs/settings.md", shares_table),
    "states of a record": Table("docs/design/ledgers.md", states.record_diagram),
    "states of a writer": Table("docs/design/ledgers.md", states.writer_diagram),
    "states of a recovery": Table("docs/design/ledgers.md", states.recovery_diagram),
    **{
        f"refusals of {operation}": Table("docs/design/refusals.md", lambda kind=kind: refusals_table(kind))  # type: ignore[misc]
        for operation, kind in OPERATIONS.items()
    },
    "conditions of deletion": Table("docs/design/data-deletion.md", deletion.deletion_table),
    "modules that know a subscription type": Table("docs/design/extending.md", extending.types_table),
    **{
        name: Table("docs/design/recipes.md", make)
        for name, make in {
            "modules that know a kind of metadata store": recipes.stores_table,
            "tasks of a broker": recipes.tasks_table,
            "statistics that are shown": recipes.numbers_table,
            "records of the metadata": recipes.records_table,
            "rpcs and frames": recipes.rpcs_table,
        }.items()
    },
    "checks of doctor": Table("docs/operations.md", checks_table),
    "files of a support bundle": Table("docs/operations.md", bundle_table),
    "complaints": Table("docs/features.md", complaints.complaints_table),
    "defects": Table("docs/design/defects.md", defects.defects_table),
    "errors": Table("docs/errors.md", errors_table),
    "operations": Table("docs/administration.md", administration.operations_table),
    "commands": Table("docs/administration.md", commands_table),
    "routes": Table("docs/rest.md", routes_table),
    "permissions": Table("docs/security.md", permissions_table),
    "BookKeeper's names": Table("docs/metrics.md", bookkeeper_table),
    "Pulsar's names": Table("docs/metrics.md", pulsars_table),
    "Pulsar's names that are left out": Table("docs/metrics.md", left_out_table),
}


def stale(*, write: bool) -> list[str]:
    """The tables, and paths of symbols, that differ from the code; with `write` they are written."""
    found = []
    for document in DOCUMENTS:
        path = ROOT / document
        before = path.read_text(encoding="utf-8")
        after = corrected(before)
        if after != before:
            found.append(f"{document}: paths of symbols that are elsewhere")
            if write:
                path.write_text(after, encoding="utf-8")
    for name, (document, make) in TABLES.items():
        path = ROOT / document
        before = path.read_text(encoding="utf-8")
        after = replaced(before, name, make())
        if after != before:
            found.append(f"{document}: {name}")
            if write:
                path.write_text(after, encoding="utf-8")
    return found


if __name__ == "__main__":
    changed = stale(write="--check" not in sys.argv[1:])
    print(*changed, sep="\n")
    sys.exit(bool(changed) and "--check" in sys.argv[1:])
