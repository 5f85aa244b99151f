"""The tables of docs/design/refusals.md: one row for each member of an enum of refusals, and where the code uses it.

A place is named as `module` `Class.function`, found in the syntax tree: a module that moves is found where it is.
"""

import ast
import enum
from collections.abc import Iterator
from functools import cache

from magnetar.broker.common.refusals import AckRefusal, PublishRefusal, SubscribeRefusal, _Refusal
from tests import layout

OPERATIONS: dict[str, type[_Refusal]] = {
    "a publish": PublishRefusal,
    "a subscribe": SubscribeRefusal,
    "an acknowledgement": AckRefusal,
}


def refusals_table(kind: type[_Refusal]) -> str:
    """In the order of the enum, which is that of the judgement."""
    lines = ["| reason | the client gets | again? | stored | decided in |", "|---|---|---|---|---|"]
    for member in kind:
        again = "later" if member.kind.retryable else "no"
        places = ", ".join(places_of(member)) or "nowhere"
        said = f"`{member.kind.__name__}`: {member.value}"
        lines.append(f"| `{member.name}` | {said} | {again} | {member.kept} | {places} |")
    return "\n".join(lines)


@cache
def _uses() -> dict[str, tuple[str, ...]]:
    """`Enum.MEMBER` → where it is used, outside of the module that defines it."""
    names = {kind.__name__ for kind in OPERATIONS.values()}
    found: dict[str, list[str]] = {}
    for module in layout.modules("broker"):
        if module.path.endswith("/refusals.py"):
            continue
        for name, owner in _walk(module.tree, ""):
            if name.partition(".")[0] in names:
                place = f"`{module.path}` `{owner}`"
                if place not in found.setdefault(name, []):
                    found[name].append(place)
    return {name: tuple(places) for name, places in found.items()}


def _walk(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = owner
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{owner}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Assign) and not owner:  # a constant of the module
            inner = ast.unparse(child.targets[0])
        elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
            yield f"{child.value.id}.{child.attr}", owner
        yield from _walk(child, inner)


def places_of(member: enum.Enum) -> tuple[str, ...]:
    return _uses().get(f"{type(member).__name__}.{member.name}", ())
