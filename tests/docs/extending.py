"""The table of docs/design/extending.md: the modules of the product that name a subscription type."""

import ast
import re

from tests import layout

_WORDS = re.compile(r"^(Exclusive|Failover|Shared|KeyShared|KeySharedOptions)$")
_MEMBER = re.compile(r"^ConsumerType\.(Exclusive|Failover|Shared|KeyShared)$")


def types_table() -> str:
    lines = ["| module | names |", "|---|---|"]
    known = ((module.path, sorted(_names(module.tree))) for module in layout.modules())
    return "\n".join([*lines, *(f"| `{path}` | `{'`, `'.join(names)}` |" for path, names in known if names)])


def _names(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and _WORDS.match(node.id):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and _MEMBER.match(dotted := ast.unparse(node)):
            found.add(dotted)
        elif isinstance(node, ast.ImportFrom):
            found |= {each.name for each in node.names if each.name == "EXCLUSIVE"}
    return found
