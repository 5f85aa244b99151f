"""The layout of docs/design/architecture.md: who may import whom, and what stays pure.

`MAY_IMPORT` has a row for each top-level package and for each domain of the large ones. A row that is not needed any
more is to be deleted: `test_no_row_allows_what_is_not_used` finds it.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from tests import layout

MAY_IMPORT = {
    "proto": (),
    "runtime": ("proto",),
    "security": ("proto", "runtime"),
    "metadata": ("proto", "runtime"),
    "ledger": ("metadata", "proto", "runtime"),
    "bookie": ("ledger", "metadata", "proto", "runtime"),
    "broker": ("client.core", "ledger", "metadata", "proto", "runtime"),  # a broker that publishes is a client
    "client": ("proto", "runtime"),
    "spark_connector": ("cli.common", "client", "proto", "runtime.clock"),  # a query has the profiles of commands
    "cli": ("bookie", "broker", "client", "ledger", "metadata", "proto", "runtime", "security"),
    "": ("cli.main", "client", "proto", "spark_connector.session"),  # the public face, and `python -m magnetar`
}
"""Each top-level package may import itself and these. A new one needs a row."""

DOMAINS = {
    "broker.common": (),
    "broker.cluster": ("common",),
    "broker.log": ("common",),
    "broker.transaction": ("cluster", "common", "log"),
    "broker.subscription": ("common", "log"),
    "broker.topic": ("common", "log", "subscription"),
    "broker.access": ("common", "topic"),
    "broker.node": ("access", "cluster", "common", "log", "topic", "transaction"),
    "broker.session": ("access", "cluster", "common", "log", "node", "subscription", "topic"),
    "broker.grpc": ("access", "cluster", "common", "log", "node", "session", "subscription", "topic", "transaction"),
    "broker.pulsar": ("cluster", "common", "log", "node", "session", "subscription", "transaction"),
    "broker.rest": ("access", "cluster", "grpc", "log", "node", "session", "subscription", "topic"),
    "client.common": (),
    "client.core": ("common",),
    "client.model": ("common", "core"),
    "client.connect": ("common", "core", "model"),
    "client.produce": ("common", "connect", "core", "model"),
    "client.consume": ("common", "connect", "core", "model", "produce"),
    "client.transactions": ("common", "connect", "consume", "core", "model", "produce"),
    "client.blocking": ("client", "common", "connect", "consume", "core", "model", "produce", "transactions"),
    "client.admin": ("blocking", "common", "connect", "model"),
    "client.outbox": ("admin", "blocking", "common", "core", "model", "produce", "transactions"),
    "client.inbox": ("common", "model"),
    "bookie.format": (),
    "bookie.store": ("format",),
    "bookie.maintenance": ("format", "store"),
    "bookie.inspect": ("format", "store"),
    "cli.common": (),
    "cli.run": ("common",),
    "cli.migrate": ("common",),
    "cli.storage": ("common", "run"),
    "cli.admin": ("common", "storage"),
}
"""Inside its package a domain may import itself and these; modules beside the domains compose them."""

ALONE = {
    "client.inbox": "it is the module `magnetar.inbox`; what Django needs is a folder below it",
    "client.inbox.django.migrations": "the folder of that name is Django's",
    "spark_connector.pyspark_magnetar": "Spark finds its data sources in packages of that name",
}
"""Packages with fewer than two modules, and why."""

DOTS_MAX = 4
"""Dots of a relative import: more of them lead up from a folder that is too deep."""

IMPURE = {"asyncio", "grpc", "zmq", "os", "time", "random", "logging", "threading", "socket", "subprocess", "uvloop"}
"""What a core or a format must not import: it never waits, logs or asks for the time, and chance comes in as `rng`."""


def _inside(target: str, area: str) -> bool:
    return target == area or target.startswith(area + ".")


@pytest.mark.parametrize("package", MAY_IMPORT, ids=lambda package: package or "root")
def test_a_package_imports_only_what_its_row_allows(package: str) -> None:
    allowed = (package, *MAY_IMPORT[package]) if package else MAY_IMPORT[package]
    wrong = [
        f"{module.path}:{found.line} imports {found.target or 'magnetar'}"
        for module in layout.modules(package)
        for found in layout.imports(module)
        if found.ours and not any(_inside(found.target, area) for area in allowed)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_domain_imports_only_what_its_row_allows(domain: str) -> None:
    package, _, own = domain.partition(".")
    allowed = {own, *DOMAINS[domain]}
    wrong = [
        f"{module.path}:{found.line} imports {found.target}"
        for module in layout.modules(package)
        if _inside(module.dotted, domain)
        for found in layout.imports(module)
        if found.ours and found.target.startswith(package + ".") and found.target.split(".")[1] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_no_row_allows_what_is_not_used() -> None:
    used = defaultdict(set)
    for module in layout.modules():
        for found in layout.imports(module):
            if found.ours and found.target:
                used[module.top] |= {found.target.split(".")[0], ".".join(found.target.split(".")[:2])}
                if module.path.count("/") > 1 and found.target.count("."):
                    used[".".join(module.path.split("/")[:2])].add(found.target.split(".")[1])
    rows = {**{package: MAY_IMPORT[package] for package in MAY_IMPORT if package}, **DOMAINS}
    assert {row: set(allowed) - used[row] for row, allowed in rows.items() if set(allowed) - used[row]} == {}


def test_the_table_for_contributors_is_the_table_of_this_test() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.*) \|$", (layout.ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    shown = {package: tuple(re.findall(r"`([\w.]+)`", allowed)) for package, allowed in rows}
    assert shown == {package: allowed for package, allowed in MAY_IMPORT.items() if package}


def test_the_table_for_contributors_has_every_domain() -> None:
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.*?) \|", (layout.ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M))
    told = {package: set(re.findall(r"\w+", contents)) for package, contents in rows.items()}
    assert not [domain for domain in DOMAINS if domain.split(".")[1] not in told[domain.split(".")[0]]]


def test_every_domain_has_a_row() -> None:
    large = {domain.split(".")[0] for domain in DOMAINS}
    folders = {".".join(m.path.split("/")[:2]) for m in layout.modules(*large) if m.path.count("/") > 1}
    assert folders == set(DOMAINS)


def test_a_package_has_several_modules_or_a_reason() -> None:
    inside = Counter(m.package for m in layout.modules() if not m.path.endswith("__init__.py"))
    packages = {m.package for m in layout.modules() if m.path.endswith("__init__.py")} - {"", *layout.PACKAGES}
    assert {each for each in packages if inside[each] < 2} == set(ALONE)


def test_no_import_has_five_dots() -> None:
    wrong = [
        f"{module.path}:{node.lineno}"
        for module in layout.modules()
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.level > DOTS_MAX
    ]
    assert not wrong, ", ".join(wrong)


def test_the_rows_have_no_circle() -> None:
    assert _circle({package: list(allowed) for package, allowed in MAY_IMPORT.items()}) is None
    graph = {domain: [f"{domain.split('.')[0]}.{other}" for other in allowed] for domain, allowed in DOMAINS.items()}
    assert _circle(graph) is None


PUBLIC = (
    "admin", "aio", "common.checks", "common.errors", "connect.authentication",
    "model.composite_schemas", "model.options", "model.settings",
)  # fmt: skip
"""Of client/: what the connector uses, as any program may, and the tables of settings."""


def test_the_connector_uses_the_public_client_and_no_message_of_the_wire() -> None:
    messages = ("entry", "entry_filter", "entry_pb2", "errors", "filters", "names", "schema")
    shared = {f"proto.{each}" for each in messages}
    allowed = {f"client.{each}" for each in PUBLIC} | shared
    wrong = [
        f"{module.path}:{found.line} imports {found.target}"
        for module in layout.modules("spark_connector")
        for found in layout.imports(module)
        if found.ours and found.target.split(".")[0] in ("client", "proto") and found.target not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_no_command_speaks_messages_of_the_wire() -> None:
    """All but the copies of the metadata, which no broker has a part in, goes through the admin client."""
    found = {
        module.path
        for module in layout.modules("cli")
        for each in layout.imports(module)
        if each.target == "proto.wire_pb2"
    }
    assert found == {"cli/storage/metadata_copies.py"}


def test_every_folder_of_the_root_has_a_row() -> None:
    folders = {name.split("/")[0] for name in layout.tracked() if name.endswith(".py") and "/" in name}
    assert folders <= {*MAY_IMPORT, "tests", "benchmarks", "examples"}


def test_inside_the_package_imports_of_ours_are_relative() -> None:
    """`pyspark_magnetar` is the exception: it is a top-level package of its own, as Spark wants it."""
    wrong = [
        f"{module.path}:{node.lineno}"
        for module in layout.modules()
        if not module.path.startswith("spark_connector/pyspark_magnetar/")
        for node in layout.absolute_imports_of_ours(module)
    ]
    assert not wrong, "absolute imports of magnetar: " + ", ".join(wrong)


def test_cores_and_formats_are_pure() -> None:
    wrong = [
        f"{module.path}:{found.line} imports {found.target}"
        for module in layout.modules()
        if {"core", "format"} & {*module.path.split("/")[:-1], module.dotted.rpartition("_")[2]}
        for found in layout.imports(module)
        if not found.ours and found.target.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """But for its types alone a module may name one of its own folder, as a part does the class that owns it."""
    graph: dict[str, list[str]] = {}
    for module in layout.modules():
        beside, typed = module.dotted.rpartition(".")[0], layout.for_types_alone(module)
        graph[module.dotted] = sorted({
            each.target for each in layout.imports(module)
            if each.ours and each.target != module.dotted
            and not (each.line in typed and each.target.startswith(f"{beside}."))
        })  # fmt: skip
    circle = _circle(graph)
    assert circle is None, " → ".join(circle or [])


def _circle(graph: dict[str, list[str]]) -> list[str] | None:
    done: set[str] = set()
    path: list[str] = []

    def walk(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for target in graph.get(node, ()):
            if (found := walk(target)) is not None:
                return found
        path.pop()
        done.add(node)
        return None

    for start in graph:
        if (found := walk(start)) is not None:
            return found
    return None


def test_a_circle_is_seen() -> None:
    assert _circle({"a": ["b"], "b": ["c"], "c": ["a"]}) == ["a", "b", "c", "a"]
    assert _circle({"a": ["b", "c"], "b": ["c"], "c": []}) is None


def test_the_packed_packages_are_the_folders() -> None:
    settings = tomllib.loads((layout.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    inside = {m.dotted for m in layout.modules() if m.path.endswith("__init__.py")}
    folders = {f"magnetar.{dotted}".strip(".") for dotted in inside - {"spark_connector.pyspark_magnetar"}}
    assert sorted(settings["packages"]) == sorted({*folders, "pyspark_magnetar"})
    holders = {str((layout.ROOT / m.path).parent) for m in layout.modules()}
    assert all((layout.ROOT / holder / "__init__.py").is_file() for holder in holders)


def test_nothing_in_the_root_shadows_the_standard_library() -> None:
    names = {name.split("/")[0].removesuffix(".py") for name in layout.tracked() if name.endswith(".py")}
    assert not names & set(sys.stdlib_module_names)


MACHINE = re.compile(
    r"(?<![\w.~-])/(?:work|root|home)/\w"  # somebody's folders
    r"|(?:extra-)?index-url|trusted-host|find-links"
    r"|://[^\s\"'`]*/simple\b"  # a package registry
)


def test_no_tracked_file_names_this_machine() -> None:
    wrong = []
    for name in layout.tracked():
        if name == "tests/test_layout.py":
            continue
        lines = (layout.ROOT / name).read_bytes().decode("utf-8", "replace").splitlines()
        wrong += [f"{name}:{n}: {line.strip()[:80]}" for n, line in enumerate(lines, 1) if MACHINE.search(line)]
    assert not wrong, "\n".join(wrong)


def test_the_package_is_its_own_code_only() -> None:
    """Importing the SDK loads no server: start-up time and memory of a client are features."""
    code = (
        "import sys, magnetar; "
        "print(*[m for m in sys.modules if m.startswith(('magnetar.bookie', 'magnetar.broker', 'magnetar.cli'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_no_generated_message_is_known_below_the_brokers_protocols() -> None:
    """But to what calls other brokers, as a client does."""
    wrong = [
        f"{module.path}:{found.line}"
        for module in layout.modules("broker")
        for found in layout.imports(module)
        if found.ours and found.target == "proto.wire_pb2"
        and not module.path.startswith(
            (
                "broker/grpc/", "broker/pulsar/", "broker/rest/", "broker/node/internal_producer.py",
                "broker/node/one_producer.py", "broker/transaction/peers.py",
            )
        )
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


OTHER_CLOCKS = {
    "runtime/tcp/share.py": "what strangers have of a loop, by the loop's time",
    "runtime/clock.py": "the clock",
    "runtime/tcp/": "a slice of the loop's turn, per frame, and patience: nothing there is simulated",
    "runtime/peer/server.py": "when the log was told last: nothing there is simulated",
    "setup.py": "how long the build took: no part of the package",
    "runtime/sim/": "its clock and its waits are made of the loop's virtual time",
}
"""Module or folder → why it reads the time from elsewhere than a `Clock`."""

_CLOCKS = {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"}


def _reads_a_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(each.name in _CLOCKS for each in node.names)
    if not isinstance(node, ast.Attribute):
        return False
    of = ast.unparse(node.value)
    return (of == "time" and node.attr in _CLOCKS) or (node.attr == "time" and of.endswith(("loop", "loop()")))


def _modules_with(found: Callable[[ast.AST], bool]) -> set[str]:
    return {module.path for module in layout.modules() if any(map(found, module.nodes))}


def test_there_is_one_clock() -> None:
    found = _modules_with(_reads_a_clock)
    assert {path for path in found if not path.startswith(tuple(OTHER_CLOCKS))} == set()
    assert all(any(path.startswith(row) for path in found) for row in OTHER_CLOCKS), "a row that is not needed any more"
