"""Secrets are compared in the same time wherever they differ, and a wrong answer costs what a right one does."""

import ast
import re

from tests import layout

SECRETS = re.compile(
    r"(?:^|_)(?:secret|digest|mac|password|passwd|hash|hashed|proof|signature|credentials|authorization)$"
    r"|(?:master|secret|private|data|curve)_key$"
)
KEYS = re.compile(r"(?:^|_)(?:key|token)$")
"""In these packages; elsewhere they are keys of dicts and tokens of writers."""
PUBLIC = {"public_key", "topics_hash"}
OF_SECRETS = (
    "security/", "client/model/", "client/connect/", "runtime/access.py", "runtime/peer/", "broker/access/",
    "bookie/adds.py", "bookie/service.py", "bookie/service.py", "bookie/store/",
)  # fmt: skip


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _compared(tree: ast.AST, *, keys: bool) -> set[str]:
    """Names of secrets that `==` or `!=` compares with anything but a constant."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(isinstance(each, ast.Eq | ast.NotEq) for each in node.ops):
            sides = [node.left, *node.comparators]
            if not any(isinstance(each, ast.Constant) for each in sides):
                names = {_name(each) for each in sides} - PUBLIC
                found |= {name for name in names if SECRETS.search(name) or (keys and KEYS.search(name))}
    return found


def test_secrets_are_compared_by_compare_digest_alone() -> None:
    found = {
        f"{module.path}: {name}"
        for module in layout.modules(*layout.PACKAGES)
        for name in _compared(module.tree, keys=module.path.startswith(OF_SECRETS))
    }
    assert not found


def test_a_comparison_that_stops_at_the_first_difference_is_found() -> None:
    text = "a.master_key == b; digest() != x; x == password; user == name; key == 'a'; hmac.compare_digest(key, b)"
    assert _compared(ast.parse(text), keys=False) == {"master_key", "digest", "password"}
    assert _compared(ast.parse("key == b or token != c"), keys=True) == {"key", "token"}
