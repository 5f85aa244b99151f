"""The repository as data: its modules, what each imports, and what each names. test_layout.py and test_map.py judge it.

A module is known by its path below the root ("bookie/store/journal.py"); its imports are resolved to modules of
the repository, relative ones too, wherever in the file they stand: an import inside a function has a direction like any
other.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "proto", "runtime", "security", "metadata", "ledger", "bookie", "broker", "client", "spark_connector", "cli"
)  # fmt: skip
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")


@dataclass(frozen=True)
class Import:
    """One imported module: `target` is dotted, without "magnetar." when it is ours."""

    target: str
    line: int
    ours: bool


@dataclass(frozen=True)
class Module:
    path: str  # "bookie/store/journal.py"
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, in the order of `ast.walk`, which takes most of the time of who asks."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def prose(self) -> tuple[tuple[int, str], ...]:
        """(line, text) of every docstring (also those below a constant) and comment."""
        found = list[tuple[int, str]]()
        for node in self.nodes:
            body = getattr(node, "body", None)  # a lambda's is no list
            for statement in body if isinstance(body, list) else ():
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.append((statement.lineno, value.value))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return *found, *((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)

    @property
    def tests(self) -> list[str]:
        """The names of its tests, read without parsing it: sorted."""
        return sorted(set(re.findall(r"^(?:async )?def (test_\w+)\(", self.text, re.M)))

    @property
    def dotted(self) -> str:
        """ "bookie.store.journal"; of a package its folder; of the root package ""."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return ".".join(self.path.split("/")[:-1])

    @property
    def top(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else ""


def tracked() -> list[str]:
    """Paths of the files that are, or are about to be, in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in set(listed) if (ROOT / name).is_file())


@cache
def modules(*tops: str) -> tuple[Module, ...]:
    """Our own Python modules in `tops` (default: all of the package, with the root's `__init__`)."""
    wanted = tops or (*PACKAGES, "")
    return tuple(module(name) for top in wanted for name in _python_files(top))


@cache
def module(name: str) -> Module:
    return Module(name, (ROOT / name).read_text(encoding="utf-8"))


def _python_files(top: str) -> list[str]:
    paths = (ROOT / top).rglob("*.py") if top else ROOT.glob("*.py")
    return sorted(str(path.relative_to(ROOT)) for path in paths if not GENERATED.search(path.name))


@cache
def tests() -> frozenset[str]:
    """The names of all tests."""
    return frozenset(name for module in modules("tests") for name in module.tests)


def module_exists(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(module: Module) -> Iterator[Import]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _absolute(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            yield from _from(module, node)


def for_types_alone(module: Module) -> set[int]:
    """Returns the lines of imports that run in no program: those within `if TYPE_CHECKING`."""
    return {
        line
        for node in module.nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in node.body
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }


def _absolute(name: str, line: int) -> Import:
    if name == "magnetar" or name.startswith("magnetar."):
        return Import(name.removeprefix("magnetar").removeprefix("."), line, True)
    return Import(name, line, False)


def _from(module: Module, node: ast.ImportFrom) -> Iterator[Import]:
    """`from a import b` is an import of a.b where that is a module, else of a."""
    if node.level:
        above = module.package.split(".") if module.package else []
        assert node.level - 1 <= len(above), f"{module.path}:{node.lineno}: relative import leaves the repository"
        above = above[: len(above) - (node.level - 1)]
        base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
        ours = True
    else:
        found = _absolute(node.module or "", node.lineno)
        base, ours = found.target, found.ours
    for alias in node.names:
        inner = f"{base}.{alias.name}".strip(".")
        yield Import(inner if ours and module_exists(inner) else base, node.lineno, ours)


def absolute_imports_of_ours(module: Module) -> Iterator[ast.stmt]:
    for node in module.nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if isinstance(node, ast.Import | ast.ImportFrom) and any(_absolute(name, 0).ours for name in names):
            yield node


def symbols(tree: ast.Module) -> set[str]:
    """What a module defines, dotted: "Journal", "Journal.append", "Journal.capacity", "LIMIT"."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found.add(owner + node.name)
                visit(node.body, f"{owner}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(owner + node.name)
                found.update(owner + name for name in _set_on_self(node))
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    named = target.elts if isinstance(target, ast.Tuple) else [target]
                    found.update(owner + name.id for name in named if isinstance(name, ast.Name))
            elif isinstance(node, ast.If | ast.Try | ast.With):
                visit(node.body, owner)

    visit(tree.body, "")
    return found


@cache
def names(*tops: str) -> frozenset[str]:
    """What all modules in `tops` define, as `symbols`."""
    return frozenset(name for module in modules(*tops) for name in symbols(module.tree))


def _set_on_self(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr
