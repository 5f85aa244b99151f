"""The house of docs (README "find your way"): who may import whom, what stays pure, what is packed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests import layout as house

MAY_IMPORT = {
    "proto": (),
    "runtime": ("proto",),
    "metadata": ("proto", "runtime"),
    "bookie": ("metadata", "proto", "runtime"),
    "broker": ("bookie.ledger", "metadata", "proto", "runtime"),
    "client": ("proto", "runtime"),
    "spark_connector": ("client", "proto"),
    "cli": house.HALLS,
    "": ("cli.main", "client", "proto", "spark_connector.session"),  # the public face, and `python -m magnetar`
}
"""Each hall may import itself and these. A new top-level folder needs a row."""

IMPURE = {"asyncio", "grpc", "zmq", "os", "time", "random", "logging", "threading", "socket", "subprocess", "uvloop"}
"""What a core/ or format/ must not know: it never waits, logs, or asks the time, and chance comes in as `rng`."""


def _inside(target: str, area: str) -> bool:
    return target == area or target.startswith(area + ".")


@pytest.mark.parametrize("hall", MAY_IMPORT, ids=lambda hall: hall or "root")
def test_a_hall_imports_only_what_its_row_allows(hall: str) -> None:
    allowed = (hall, *MAY_IMPORT[hall]) if hall else MAY_IMPORT[hall]
    wrong = [
        f"{module.path}:{found.line} imports {found.target or 'magnetar'}"
        for module in house.modules(hall)
        for found in house.imports(module)
        if found.ours and not any(_inside(found.target, area) for area in allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_the_root_has_a_row() -> None:
    folders = {name.split("/")[0] for name in house.tracked() if name.endswith(".py") and "/" in name}
    assert folders <= {*MAY_IMPORT, "tests", "benchmarks"}


def test_inside_the_package_imports_of_ours_are_relative() -> None:
    """`pyspark_magnetar` is the exception: it is a top-level package of its own, as Spark wants it."""
    wrong = [
        f"{module.path}:{node.lineno}"
        for module in house.modules()
        if not module.path.startswith("spark_connector/pyspark_magnetar/")
        for node in house.absolute_imports_of_ours(module)
    ]
    assert not wrong, "absolute imports of magnetar: " + ", ".join(wrong)


def test_cores_and_formats_are_pure() -> None:
    wrong = [
        f"{module.path}:{found.line} imports {found.target}"
        for module in house.modules()
        if {"core", "format"} & set(module.path.split("/")[:-1])
        for found in house.imports(module)
        if not found.ours and found.target.split(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module.dotted: sorted({f.target for f in house.imports(module) if f.ours and f.target != module.dotted})
        for module in house.modules()
    }
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
    settings = tomllib.loads((house.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    inside = {m.dotted for m in house.modules() if m.path.endswith("__init__.py")}
    folders = {f"magnetar.{dotted}".strip(".") for dotted in inside - {"spark_connector.pyspark_magnetar"}}
    assert sorted(settings["packages"]) == sorted({*folders, "pyspark_magnetar"})
    holders = {str((house.ROOT / m.path).parent) for m in house.modules()}
    assert all((house.ROOT / holder / "__init__.py").is_file() for holder in holders)


def test_nothing_in_the_root_shadows_the_standard_library() -> None:
    names = {name.split("/")[0].removesuffix(".py") for name in house.tracked() if name.endswith(".py")}
    assert not names & set(sys.stdlib_module_names)


MACHINE = re.compile(
    r"(?<![\w.~-])/(?:work|root|home)/\w"  # somebody's folders
    r"|(?:extra-)?index-url|trusted-host|find-links"
    r"|://[^\s\"'`]*/simple\b"  # a package registry
)


def test_no_tracked_file_names_this_machine() -> None:
    wrong = []
    for name in house.tracked():
        if name == "tests/test_layout.py":
            continue
        lines = (house.ROOT / name).read_bytes().decode("utf-8", "replace").splitlines()
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


def test_sizes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A hard look, not a verdict: modules over 400 lines, functions over 70."""
    everything = house.modules(*house.HALLS, "", "tests", "benchmarks")
    long = [f"{m.path}: {m.text.count(chr(10))} lines" for m in everything if m.text.count("\n") > 400]
    long += [f"{m.path}:{at}: {name} has {n} lines" for m in everything for name, at, n in house.functions(m) if n > 70]
    with capsys.disabled():
        print("\nworth a hard look:" if long else "", *long, sep="\n  ")
    assert all(m.text.endswith("\n") or not m.text for m in everything)
