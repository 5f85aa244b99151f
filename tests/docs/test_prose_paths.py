"""A path that a comment or a docstring names is a file of the repository.

It begins at the root, or at a folder above the module that names it: a page of docs/, a module, a schema. A name
without a folder is that of some file. Names in backticks are checked by tests/test_map.py as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests import layout

PATH = re.compile(r"(?<![\w./:~{}$*<…-])((?:\.?[\w-]+/)*[\w-]+\.(?:pyi?|proto|md))(?![\w/*-]|\.\w)")
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
    wrong = [each for module in modules for each in missing(module, tracked, names)]
    assert not wrong, "\n".join(wrong)


def test_a_path_that_is_gone_is_seen() -> None:
    text = '"""Of docs/gone.md, core/here.py, elsewhere/here.py (see here.py)."""\n# gone.py, magnetar.proto.errors\n'
    module = layout.Module("broker/topic/x.py", text)
    known = frozenset({"broker/core/here.py"})
    assert list(missing(module, known, frozenset({"here.py"}))) == [
        "broker/topic/x.py:1: docs/gone.md", "broker/topic/x.py:1: elsewhere/here.py", "broker/topic/x.py:2: gone.py",
    ]  # fmt: skip
