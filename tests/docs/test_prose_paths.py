"""A path that a comment or a docstring names is a file of the repository, and a class that it makes exists.

It begins at the root, or at a folder above the module that names it: a page of docs/, a module, a schema. A name
without a folder is that of some file. Names in backticks are checked by tests/test_map.py as well.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests import layout

PATH = re.compile(r"(?<![\w./:~{}$*<…-])((?:\.?[\w-]+/)*[\w-]+\.(?:pyi?|proto|md))(?![\w/*-]|\.\w)")
SUFFIX = re.compile(r"\.(?:pyi?|proto|md)\b")
"""No path is in a module without one: its comments need not be looked for."""
FOREIGN = {
    "a/b.py", "asyncio.py", "coverage.py", "doc/PROTOCOL-HTTP2.md", "job.py", "manage.py", "peers.md",
}  # fmt: skip
"""Files of other projects, of users, and of examples."""


def missing(module: layout.Module, known: frozenset[str], names: frozenset[str]) -> Iterator[str]:
    above = [f"{folder}/" for folder in PurePosixPath(module.path).parents if folder.name] + [""]
    for line, text in module.prose:
        for path in PATH.findall(text):
            here = any(f"{folder}{path}" in known for folder in above)
            if not here and path not in names and path not in FOREIGN:
                yield f"{module.path}:{line}: {path}"


def test_paths_in_comments_and_docstrings_are_files_of_the_repository() -> None:
    tracked = frozenset(layout.tracked())
    names = frozenset(path.rpartition("/")[2] for path in tracked)
    modules = layout.modules(*layout.PACKAGES, "", "tests", "benchmarks", "examples")
    wrong = [each for module in modules if SUFFIX.search(module.text) for each in missing(module, tracked, names)]
    assert not wrong, "\n".join(wrong)


CALLED = re.compile(r"(?<![\w.])([A-Z][a-z]+(?:[A-Z][a-z0-9]+)+)\(")
"""A class that an example of a docstring makes: `store = SqliteStore(world)`."""


def unknown_classes(module: layout.Module, known: frozenset[str]) -> Iterator[str]:
    imported = {alias.asname or alias.name for node in module.nodes
                if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
    for line, text in module.prose:
        for name in CALLED.findall(text):
            if name not in known and name not in imported:
                yield f"{module.path}:{line}: {name}"


def test_classes_that_examples_in_docstrings_make_exist() -> None:
    schemas = [layout.module(path).text for path in layout.tracked() if path.endswith(".proto")]
    messages = {name for text in schemas for name in re.findall(r"^\s*message (\w+)", text, re.M)}
    known = frozenset({name.rpartition(".")[2] for name in layout.names()} | messages | {*dir(builtins)})
    wrong = [each for module in layout.modules() for each in unknown_classes(module, known)]
    assert not wrong, "\n".join(wrong)


def test_a_class_that_is_gone_is_seen() -> None:
    module = layout.Module("broker/x.py", '"""feed = TopicFeed(store); x = TopicWatcher(store); Put(x)."""\n')
    assert list(unknown_classes(module, frozenset({"TopicWatcher"}))) == ["broker/x.py:1: TopicFeed"]


def test_a_path_that_is_gone_is_seen() -> None:
    text = '"""Of docs/gone.md, core/here.py, elsewhere/here.py (see here.py)."""\n# gone.py, magnetar.proto.errors\n'
    module = layout.Module("broker/topic/x.py", text)
    known = frozenset({"broker/core/here.py"})
    assert list(missing(module, known, frozenset({"here.py"}))) == [
        "broker/topic/x.py:1: docs/gone.md", "broker/topic/x.py:1: elsewhere/here.py", "broker/topic/x.py:2: gone.py",
    ]  # fmt: skip
