"""`python -m tests.lines [FOLDER|FILE]…`: lines of code, without blanks, comments and docstrings; a line for each path.

A docstring is any statement that is a text alone. `ADMINISTRATION` is what is counted without arguments: the files that
say what an operation of administration is on one of its faces.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADMINISTRATION = (
    "proto/operations.py", "proto/states.py", "proto/statistics.py", "proto/translation.py",
    "proto/policies.py", "proto/pulsar_json.py", "client/admin",
    "broker/access/table_core.py",
    "broker/rest", "broker/grpc/admin.py", "broker/session/administration.py",
    "broker/session/summaries.py", "cli/admin", "cli/run/metrics.py",
)  # fmt: skip
NO_CODE = frozenset((tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
                     tokenize.ENCODING, tokenize.ENDMARKER))  # fmt: skip


def code_lines(text: str) -> int:
    """How many lines of a module have a token that is neither of a comment nor of a docstring."""
    prose = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - prose)


def of_path(path: Path) -> int:
    """The code lines of a module, or of all modules below a folder that are not generated; 0: there is none."""
    modules = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return sum(code_lines(each.read_text()) for each in modules if "_pb2" not in each.name)


def main(paths: list[str]) -> None:
    total = 0
    for path in paths or ADMINISTRATION:
        if (ROOT / path).exists():
            found = of_path(ROOT / path)
            total += found
            print(f"{found:6,}  {path}")
    print(f"{total:6,}  in all")


if __name__ == "__main__":
    main(sys.argv[1:])
