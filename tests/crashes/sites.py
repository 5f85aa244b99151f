"""Where the store asks for durability: every fdatasync and directory sync, by the place in the code that asks.

A *site* is named by the innermost function of the store that asks (functions of bookie/store/disk.py are looked
through, unless a worker calls them directly) with the line within it, the kind of sync, and the kind of file: for
example `EntryLogWriter.append+4 fdatasync .log`. Sites are found by running the workload, and the cases of what a
healthy store never does (tests/crashes/cases.py); `asking_functions` reads from the source which functions ask at all,
so that one which nothing reaches is noticed.

The negative control (tests/crashes/control.py, and the cases) makes the syncs of one site count for nothing, for each
in turn.
"""

import ast
import re
import sys
from pathlib import Path
from types import CodeType

import magnetar.bookie
from magnetar.runtime.sim.disk import DiskOperation

BOOKIE = Path(magnetar.bookie.__file__).parent
_OURS = str(BOOKIE)
_DISK = str(BOOKIE / "store" / "disk.py")
WRITE_BACK = "start_write_back"
"""The site of every sync on which nothing may rest (`disk.start_write_back`): it never makes anything durable here."""
SYNCS = ("fdatasync", "sync_directory")
_ASKING = re.compile(r"^(?:disk|files|.*[._]files)\.(sync|sync_directory|replace|make_directories)$")
"""How the store's code asks. `replace` is a sync of a file and of its folder; `make_directories` syncs parents."""

_ours: dict[CodeType, bool] = {}


def site_of(operation: DiskOperation) -> str:
    """The site of the sync that is being recorded now, called from `SimDisk.record`; empty: not one of the store's."""
    if operation.kind not in SYNCS:
        return ""
    frame = sys._getframe(1)
    through: CodeType | None = None
    line = 0
    while frame is not None:
        code = frame.f_code
        ours = _ours.get(code)
        if ours is None:
            ours = _ours[code] = code.co_filename.startswith(_OURS)
        if ours and code.co_filename != _DISK:
            return _name(code, frame.f_lineno, operation)
        if ours:
            if code.co_name == WRITE_BACK:
                return WRITE_BACK
            through, line = code, frame.f_lineno
        elif through is not None:  # called by a worker; or for the data directory, which is not the store's to make
            return "" if through.co_name == "make_directories" else _name(through, line, operation)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _name(code: CodeType, line: int, operation: DiskOperation) -> str:
    return f"{code.co_qualname}+{line - code.co_firstlineno} {operation.kind} {kind_of(operation.path)}"  # type: ignore[attr-defined]


def function_of(site: str) -> str:
    return site.partition("+")[0]


def kind_of(path: str) -> str:
    """`.log` of a numbered file, `spare-` of a named one, else its name without what differs from run to run."""
    name = path.rsplit("/", 1)[-1]
    stem, dot, suffix = name.partition(".")
    if stem.isdigit():
        return dot + suffix
    return re.sub(r"[0-9a-f]{12,}", "", name)


def asking_functions() -> dict[str, str]:
    """Every function of the store that asks for a sync: its qualified name, and the file it is in."""
    found: dict[str, str] = {}
    for path in sorted(BOOKIE.rglob("*.py")):
        if str(path) == _DISK or "ledger" in path.relative_to(BOOKIE).parts[:1]:
            continue
        for name in _asking(ast.parse(path.read_text()), ""):
            found[name] = str(path.relative_to(BOOKIE))
    return found


def _asking(node: ast.AST, where: str) -> list[str]:
    found: list[str] = []
    for child in ast.iter_child_nodes(node):
        inner = where
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{where}.{child.name}" if where else child.name
            if not isinstance(child, ast.ClassDef) and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{where}.<locals>.{child.name}"
        if isinstance(child, ast.Call) and _ASKING.match(ast.unparse(child.func)):
            found.append(where)
        if isinstance(child, ast.Attribute) and not (isinstance(node, ast.Call) and node.func is child):
            asked = _ASKING.match(ast.unparse(child))
            if asked:  # given to a worker
                found.append(asked[1])
        found += _asking(child, inner)
    return sorted(set(found))
