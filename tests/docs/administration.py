"""The table of docs/administration.md: each operation, and how it is reached on each face.

What a row of proto/operations.py says of a face is read there; what is a function is found by what the function names:
`op.TRIM_TOPIC` in a method of AdminClient or in a handler of a route, `admin.trim_topic` in a verb of the command line.
"""

import ast
import importlib
import inspect
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import click

from magnetar.broker.rest import application
from magnetar.broker.rest.call import NAMESPACE_PATH, REST_ROUTES, TOPIC_PATH
from magnetar.cli.common.lazy import LazyGroup
from magnetar.cli.main import root
from magnetar.client.admin import AdminClient
from magnetar.proto import operations
from magnetar.proto.operations import OPERATIONS, Operation

GROUPS = (
    "tenants", "resourcegroups", "namespaces", "topics", "subscriptions", "transactions", "schemas", "spark", "brokers",
    "bookies", "ledgers",
)  # fmt: skip
assert application.ROUTE_MODULES, "the routes are registered"
VARIABLES = {each.name: variable for variable, each in vars(operations).items() if isinstance(each, Operation)}


def operations_table() -> str:
    """One row per operation, in the order of the table."""
    methods, paths, verbs = _methods(), _routes(), dict(_verbs())
    lines = ["| operation | answered by | needs | AdminClient | REST | command line |", "|---|---|---|---|---|---|"]
    for row in OPERATIONS.values():
        named = methods[row.name]
        own = row.cli.words if row.cli is not None else ""
        said = [verb for verb, calls in verbs.items() if verb == own or calls & {*named} - {"parts"}]
        of = f", {row.rule.on.value}" if row.rule.field else ""
        cells = (
            f"`{row.name}`", row.asked_of.name.lower(), f"{row.rule.permission.name.lower()}{of}",
            _shown([f"{name}()" for name in named]), _shown(paths[row.name]), _shown(said),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names)) or "–"


def _methods() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, method in inspect.getmembers(AdminClient, inspect.iscoroutinefunction):
        names = _named(inspect.unwrap(method))
        for row in OPERATIONS.values():
            if not name.startswith("_") and (row.method == name or VARIABLES.get(row.name, "") in names):
                found[row.name].append(name)
    return found


def _routes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for route in REST_ROUTES:
        path = route.path.replace(TOPIC_PATH, "{T}").replace(NAMESPACE_PATH, "{N}").replace("/admin/v2", "")
        if route.path.endswith("/offload"):  # does nothing, with the rights of a compaction
            continue
        names = _named(route.handler)
        row = _row_of(route.handler)
        for each in OPERATIONS.values():
            if each is row or VARIABLES.get(each.name, "") in names:
                found[each.name].append(f"{route.method} {path.replace('{domain:domain}', '{domain}')}")
    return found


def _row_of(handler: Callable[..., Any]) -> object:
    """The row that a handler of broker/rest/transactions_routes.py has in its closure."""
    cells = (each.cell_contents for each in getattr(handler, "__closure__", None) or ())
    return next((each for each in cells if isinstance(each, Operation)), None)


def _verbs() -> Iterator[tuple[str, set[str]]]:
    """(words, names that the verb uses); policies and properties have tables of their own."""
    for group in GROUPS:
        command = root.get_command(click.Context(root), group)
        assert isinstance(command, LazyGroup)
        yield from _verbs_of(group, command)


def _verbs_of(words: str, group: LazyGroup) -> Iterator[tuple[str, set[str]]]:
    for name in [each for each in group.list_commands(click.Context(group)) if each not in group.policies]:
        verb = group.get_command(click.Context(group), name)
        if isinstance(verb, LazyGroup):
            yield from _verbs_of(f"{words} {name}", verb)
        elif verb is not None and verb.callback is not None:
            yield f"{words} {name}", _named(inspect.unwrap(verb.callback))


def _named(function: Callable[..., Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """Returns what a function uses of `op` and of `admin`, itself and by the functions that it calls."""
    if not isinstance(function, types.FunctionType) or function.__qualname__ in seen:
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    attributes = [(_last(each.value), each.attr) for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    found = {name for of, name in attributes if of in ("op", "admin")}
    seen |= {function.__qualname__}
    called = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    for name in {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}:
        is_method = name in called and ".client.admin." in function.__module__
        if name.startswith("_") or function.__module__.endswith(".stats") or is_method:
            found |= _named(function.__globals__.get(name), seen)  # type: ignore[arg-type]
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and each.level == 1:  # what a verb imports when it runs
            package = importlib.import_module(f".{each.module or ''}", function.__globals__["__package__"])
            for alias in each.names:
                taken = getattr(package, alias.name, None)
                names = [name for of, name in attributes if of == alias.asname and not each.module]
                for function_of in [*(getattr(taken, name) for name in names), taken]:
                    found |= _named(function_of, seen)
    return found


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
