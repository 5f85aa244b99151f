"""The compiled twin is tested where it is asked for; `make test-compiled`."""

import ast
import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import magnetar
from magnetar.bookie import adds
from magnetar.bookie.store import journal as journal
from magnetar.bookie.store import memtable
from magnetar.broker.log import appender
from magnetar.broker.session import producer as session
from magnetar.broker.topic import producer as publisher
from magnetar.client.core import batcher, producer
from magnetar.client.model import message_id
from magnetar.ledger import handle, sender
from magnetar.proto import entry, versions
from magnetar.runtime import metrics
from magnetar.runtime.peer import inside
from tests.compiled import COMPILED

ROOT = Path(__file__).parents[1]


def test_the_twin_that_is_asked_for_is_tested() -> None:
    wanted = os.environ.get("MAGNETAR_TEST_COMPILED") == "1"
    client, server = (batcher, producer, entry, message_id), (session, publisher, appender, handle, sender, inside)
    for each in (*client, *server, adds, memtable, journal, metrics):
        assert str(each.__file__).endswith(".py") is not wanted, f"{each.__file__} is tested"
    assert COMPILED is wanted
    assert versions.is_compiled() is wanted
    assert ("(compiled)" in versions.format_version_text()) is wanted


def test_an_id_is_copied_and_pickled() -> None:
    made = message_id.MessageId(1, 2, 3, 4)
    for each in (made, message_id.UncheckedMessageId(1, 2, 3, 4, 5, "topic")):
        assert copy.copy(each) == copy.deepcopy(each) == pickle.loads(pickle.dumps(each)) == made
        assert type(pickle.loads(pickle.dumps(each))) is type(each)
        assert pickle.loads(pickle.dumps(each)).batch_size() == each.batch_size()


@pytest.mark.skipif(not COMPILED, reason="there is one twin")
def test_whole_clusters_under_faults_take_the_same_steps_on_both_twins() -> None:
    sources = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "1:2", "--tier", "cluster"]
    began = [
        subprocess.Popen(command, cwd=ROOT, env=each, stdout=subprocess.PIPE, text=True)
        for each in (dict(os.environ), sources)
    ]
    said = [json.loads(each.communicate()[0].splitlines()[-1]) for each in began]
    assert [(each["seeds"], each["failed"]) for each in said] == [(2, 0), (2, 0)]
    assert len({each["trace_hash"] for each in said}) == 1


@pytest.mark.parametrize(("asked", "said"), [
    ("", "magnetar: not compiled: there is no C compiler (/no/compiler); the slower Python of the same modules is "
         "installed\n"),
    ("0", ""),
])  # fmt: skip
def test_an_installation_says_in_one_line_why_it_does_not_compile(tmp_path: Path, asked: str, said: str) -> None:
    env = {**os.environ, "CC": "/no/compiler", "MAGNETAR_COMPILE": asked, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "".join(line for line in done.stderr.splitlines(True) if line.startswith("magnetar: ")) == said
    assert (tmp_path / "magnetar" / "proto" / "entry.py").is_file()


# ---------------------------------------------------------------------------------- what mypyc makes another program of
def hot() -> list[str]:
    """HOT of setup.py, which is not imported because it installs."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    return next(
        ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and
        isinstance(node.targets[0], ast.Name) and node.targets[0].id == "HOT"
    )  # fmt: skip


IMMEDIATE = ("timeout(", ".seek_lock", "_memory.reserve(")
"""What `async with` leaves without a wait."""
PURE = {"bisect_left", "bisect_right", "len", "max", "min", "rank", "unpack_from"}


def waits(statements: list[ast.stmt]) -> Iterator[int]:
    kinds = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)
    for statement in statements:
        yield from (node.lineno for node in ast.walk(statement) if isinstance(node, kinds))


def pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for each, given in zip(target.elts, value.elts, strict=True):
            yield from pairs(each, given)
    else:
        yield target, value


def read_again(block: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Reads of an attribute after the block has set it to None, and before it gives it another value."""
    none: set[str] = set()
    for statement in block:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node) in none:
                yield node.lineno, f"{ast.unparse(node)} is None, whatever was called since: read it in a method"
        for assigned in (each for each in ast.walk(statement) if isinstance(each, ast.Assign)):
            for target, value in (pair for each in assigned.targets for pair in pairs(each, assigned.value)):
                if isinstance(value, ast.Constant) and value.value is None and assigned is statement:
                    none.add(ast.unparse(target))
                else:
                    none.discard(ast.unparse(target))


def wrong_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                yield from read_again(block)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            for call in (each for each in ast.walk(node.slice) if isinstance(each, ast.Call)):
                if ast.unparse(call.func).split(".")[-1] not in PURE:
                    yield call.lineno, "the bound of a slice is computed twice: give it a name first"
        if isinstance(node, ast.Try):
            for line in (*waits([each for handler in node.handlers for each in handler.body]), *waits(node.finalbody)):
                yield line, "it waits with everybody's exception: `run_and_clean_up`, `run_or_undo` (runtime/tasks.py)"
        if isinstance(node, ast.AsyncWith):
            for item in (ast.unparse(each.context_expr) for each in node.items):
                if not any(each in item for each in IMMEDIATE):
                    yield node.lineno, f"{item}: if its end waits, it does with everybody's exception"
        if isinstance(node, ast.ClassDef) and any(ast.unparse(each).split(".")[-1] == "local" for each in node.bases):
            yield node.lineno, "the attributes of the class are the same in all threads"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".__new__"):
            yield node.lineno, "`__new__` calls `__init__`"


@pytest.mark.skipif(COMPILED, reason="it reads the sources, which are those of the other twin")
@pytest.mark.parametrize("path", hot())
def test_no_compiled_module_says_what_the_compiler_understands_otherwise(path: str) -> None:
    assert list(wrong_of(ast.parse((ROOT / path).read_text()))) == []


@pytest.mark.parametrize("code", [
    "a = a[send(a):]",
    "async def f():\n try:\n  g()\n except E:\n  await h()",
    "async def f():\n try:\n  g()\n finally:\n  await h()",
    "async def f():\n async with open_connection():\n  g()",
    "class Buffers(threading.local):\n view: memoryview",
    "a = A.__new__(A)",
    "def f(self):\n a, self.a = self.a, None\n self.g()\n if a and self.a is None:\n  self.h()",
])  # fmt: skip
def test_each_such_thing_is_found(code: str) -> None:
    assert list(wrong_of(ast.parse(code)))


NARROWED = """[mypy]
explicit_package_bases = True
follow_imports = silent
ignore_missing_imports = True
warn_unreachable = True
strict_equality = True
strict_equality_for_none = True
enable_error_code = redundant-expr
[mypy-magnetar.client.model.message_id]
disable_error_code = redundant-expr
"""
"""Who compares an id compares it with anything, whatever the types say."""
CHANGED_MEANWHILE = """class A:
    def __init__(self) -> None:
        self.lost, self.end = False, 1 if id(self) % 2 else None
    def leave(self) -> None:
        self.lost, self.end = True, None
    def first(self) -> None:
        if self.lost:
            return
        self.leave()
        if self.lost:
            print()
    def second(self) -> None:
        if self.end is not None:
            self.leave()
            print(self.end is None)
    def third(self) -> None:
        self.end = None
        self.leave()
        if self.end is None and self.lost:
            print()
"""


@pytest.mark.skipif(COMPILED, reason="it reads the sources, which are those of the other twin")
def test_no_compiled_module_looks_again_at_what_was_narrowed(tmp_path: Path) -> None:
    """mypy takes an attribute for what it was when it was looked at, whatever was called or waited for since. What it
    holds for unreachable raises RuntimeError when mypyc compiles it, and None where it sees none TypeError."""
    (tmp_path / "magnetar").symlink_to(ROOT, target_is_directory=True)
    (tmp_path / "mypy.ini").write_text(NARROWED)
    (tmp_path / "wrong.py").write_text(CHANGED_MEANWHILE)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "--no-error-summary"]
    done = subprocess.run(
        [*command, "wrong.py", *(f"magnetar/{each}" for each in hot())],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": "."}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == [
        "wrong.py:11", "wrong.py:15", "wrong.py:19",
    ], done.stdout


def test_the_public_classes_keep_their_help() -> None:
    modules = {"magnetar." + each.removesuffix(".py").replace("/", ".") for each in hot()}
    public = {name: getattr(magnetar, name) for name in magnetar.__all__}
    compiled = {name for name, each in public.items() if getattr(each, "__module__", "") in modules}
    assert compiled == {"MessageId"}
