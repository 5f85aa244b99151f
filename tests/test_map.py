"""docs/design/map.md leads to what exists, and so does every name in backticks in comments and docstrings.

A line of the map names, in backticks: a file (`broker/subscription/core/cursor.py`), a symbol in it
(`tests/layout.py:Module.dotted`, or the symbol alone), and the guarding test (`tests/layout.py::modules`, or the test's
name alone). Anything with a blank in it is a command.
"""

import ast
import asyncio
import builtins
import keyword
import os
import re
import sys
from collections.abc import Sequence
from functools import cache

import pytest

from magnetar.client.admin import AdminClient
from tests import layout

MAP = layout.ROOT / "docs" / "design" / "map.md"
TICKED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)*\.(?:py|proto|md|toml|yml)$")
NAME = re.compile(r"^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?$")


@cache
def _symbols(path: str) -> frozenset[str]:
    tree = ast.parse((layout.ROOT / path).read_text(encoding="utf-8"))
    return frozenset(layout.symbols(tree))


def _known(symbol: str, path: str) -> bool:
    if not path.endswith(".py"):
        text = (layout.ROOT / path).read_text(encoding="utf-8")
        return all(re.search(rf"\b{re.escape(part)}\b", text) for part in symbol.split("."))
    return symbol in _symbols(path) or any(known.endswith(f".{symbol}") for known in _symbols(path))


def _stale(line: str) -> list[str]:
    """What a line of the map names and does not exist."""
    tokens = [token for token in TICKED.findall(line) if " " not in token]
    files = [re.split(r"::?", token)[0] for token in tokens if "/" in token]
    wrong = [path for path in files if not (layout.ROOT / path).exists()]
    here = [path for path in files if path not in wrong and FILE.match(path)]
    for token in tokens:
        path, _, symbol = re.sub("::", ":", token, count=1).partition(":")
        symbol = symbol.replace("::", ".").removesuffix("()")
        if "/" in token:
            found = path in wrong or not symbol or _known(symbol, path)
        elif token.startswith("test_"):
            found = token in layout.names("tests")
        elif NAME.match(token):
            found = _named_somewhere(token.removesuffix("()"), here)
        else:
            continue
        if not found:
            wrong.append(token)
    return wrong


def _named_somewhere(symbol: str, here: list[str]) -> bool:
    """In the files of the line, or (a term that the sentence uses) anywhere in the layout."""
    everywhere = layout.names()
    return (
        any(_known(symbol, path) for path in here)
        or symbol in everywhere
        or any(known.endswith(f".{symbol}") for known in everywhere)
    )


@pytest.mark.skipif(not MAP.is_file(), reason="docs/design/map.md is not written")
def test_every_file_symbol_and_test_of_the_map_exists() -> None:
    lines = MAP.read_text(encoding="utf-8").splitlines()
    wrong = [f"map.md:{n}: {token}" for n, line in enumerate(lines, 1) for token in _stale(line)]
    assert not wrong, "\n".join(wrong)


def test_a_stale_name_is_seen() -> None:
    assert _stale("| How? | `tests/test_map.py` `MAP` | `test_a_stale_name_is_seen` |") == []
    assert _stale("| `tests/test_map.py:MAP`, `tests/layout.py:Module.dotted` | `tests/test_map.py::FILE` |") == []
    assert _stale("| How? | `tests/test_map.py` `MAPP` | `test_which_is_gone` |") == ["MAPP", "test_which_is_gone"]
    assert _stale("| How? | `tests/no.py:MAP` |") == ["tests/no.py"]
    assert _stale("run `make test`") == []


FEATURES = layout.ROOT / "docs" / "features.md"
STATES = {"done", "other", "not yet", "not"}


def test_every_feature_has_one_row_a_state_and_a_reason_and_its_tests_exist() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in FEATURES.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [A-Z]+\d+ \|", line)
    ]
    families = {"T": 18, "PR": 15, "S": 19, "A": 19, "R": 6}
    wanted = {f"{family}{number}" for family, count in families.items() for number in range(1, count + 1)}
    ids = [row[0] for row in rows]
    assert len(ids) == len(set(ids))
    assert wanted <= set(ids)
    for id_, _, state, note in rows:
        assert state in STATES, id_
        assert note or state in ("done", "not yet"), f"{id_}: why?"
        named = [token for token in re.findall(r"`(test_\w+)`", note) if token not in layout.names("tests")]
        assert not named, f"{id_}: {named}"


# ------------------------------------------------------------------------------- comments and docstrings
@cache
def _vocabulary() -> frozenset[str]:
    """Every identifier that the repository, its protocol or the language uses; and words in strings (SQL, options)."""
    words = {*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names}
    words.update(dir(asyncio), dir(asyncio.AbstractEventLoop), dir(os))
    for path in [name for name in layout.tracked() if name.endswith((".py", ".proto", ".toml", "Makefile"))]:
        module = layout.module(path)
        words |= _identifiers(module.nodes) if path.endswith(".py") else set(re.findall(r"\w+", module.text))
    return frozenset(words)


def _identifiers(nodes: Sequence[ast.AST]) -> set[str]:
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    words: set[str] = set()
    for node in nodes:
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                words |= set(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words |= set(re.findall(r"\w+", node.value))
    return words


def test_names_in_backticks_in_comments_and_docstrings_exist() -> None:
    """Stale comments cost more than missing ones."""
    wrong = [
        f"{module.path}:{line}: `{token}`"
        for module in layout.modules()
        for line, text in module.prose
        for token in TICKED.findall(text)
        if not _exists(token, module.path)
    ]
    assert not wrong, "\n".join(wrong)


def _exists(token: str, path: str) -> bool:
    if FILE.match(token) and "/" in token:
        beside = (layout.ROOT / path).parent / token
        return (layout.ROOT / token).exists() or beside.exists()
    if NAME.match(token) and len(token) > 2:  # shorter ones are letters of an example
        return all(part in _vocabulary() for part in token.removesuffix("()").split("."))
    return True


# ------------------------------------------------------------------------- what prose names without backticks
GUARD = re.compile(r"(?<![\w./])((?:[a-z_]+/)*test_\w+\.py|(?:tests|benchmarks)/[\w/]+\.\w+)")


def test_tests_and_modules_that_docstrings_name_exist() -> None:
    """Also where no backticks stand around them (Guards: tests/broker/subscription/test_cursors.py,
    tests/ledger/test_sabotage.py)."""
    known = {*layout.tracked(), *(name.rpartition("/")[2] for name in layout.tracked() if name.startswith("tests/"))}
    wrong = [
        f"{module.path}:{line}: {named}"
        for module in layout.modules()
        for line, text in module.prose
        for named in GUARD.findall(text)
        if named not in known and f"tests/{module.path.split('/')[0]}/{named}" not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_members_in_backticks_belong_to_their_class() -> None:
    """`Store.seal_group`: a class of that name, where there is one, has that member, or its base has."""
    nodes = (node for module in layout.modules() for node in module.nodes)
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    wrong = [
        f"{module.path}:{line}: `{token}`"
        for module in layout.modules()
        for line, text in module.prose
        for token in TICKED.findall(text)
        if NAME.match(token) and token.count(".") == 1 and not _is_member(token.removesuffix("()"), classes)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_stale_member_and_a_stale_test_file_are_seen() -> None:
    (base, child) = ast.parse("class TickBase:\n    pass\nclass Tick(TickBase):\n    pass\n").body
    assert isinstance(base, ast.ClassDef)
    assert isinstance(child, ast.ClassDef)
    classes = {"TickBase": base, "Tick": child}
    assert not _is_member("Tick.gone", classes)
    assert _is_member("Other.gone", classes)
    assert _is_member("Store.seal_group", {**classes, "Store": child})
    assert GUARD.findall("Guards: tests/a/test_b.py, test_c.py; store/x.py") == ["tests/a/test_b.py", "test_c.py"]


def _is_member(token: str, classes: dict[str, ast.ClassDef]) -> bool:
    owner, _, member = token.partition(".")
    if owner not in classes or member == "py":
        return True
    if any(known == token or known.endswith(f".{token}") for known in layout.names()):
        return True
    if owner == "AdminClient":
        return hasattr(AdminClient, member)
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in classes[owner].bases]
    outside = [base for base in bases if base not in classes and base not in ("Protocol", "NamedTuple", "Generic")]
    return bool(outside) or any(_is_member(f"{base}.{member}", classes) for base in bases if base in classes)
