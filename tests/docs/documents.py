"""What our documents tell a reader to type: fenced ```console and ```python blocks, and commands inside a sentence.

A command is a line of a console block, or text in backticks that begins as one (`make …`, `python -m …`, `magnetar …`).
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]

_FENCE = re.compile(r"^```(\w*)\s*$")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_BEGINS = re.compile(r"^(?:make|python3?|magnetar|pip|docker|pytest|git|curl|apt-get|\.ci/run|\.venv/bin/\S+)(?=\s|$)")
_WORDS_ALONE = {"magnetar", "make", "python", "pip", "git", "docker", "curl", "pytest"}  # names, not commands


class Block(NamedTuple):
    line: int
    language: str
    text: str


class Command(NamedTuple):
    line: int
    words: list[str]
    runs: bool
    """False: it stands inside a sentence, and is checked rather than run where running it takes a server."""

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(document: str, text: str | None = None) -> Iterator[Block]:
    """The fenced blocks, in order."""
    begin, language, inside = 0, "", []
    lines = (text if text is not None else (ROOT / document).read_text(encoding="utf-8")).splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence and not begin:
            begin, language, inside = number, fence[1], []
        elif fence:
            yield Block(begin, language, "\n".join(inside) + "\n")
            begin = 0
        elif begin:
            inside.append(line)
    assert not begin, f"{document}:{begin}: the block is not closed"


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block; what stands behind # is a comment."""
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if words := shlex.split(line, comments=True):
            yield Command(number, words, runs=True)


def replaced(text: str, name: str, table: str) -> str:
    """`text` with what stands between the marks of `name` replaced."""
    begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.S)
    assert len(pattern.findall(text)) == 1, f"the marks of {name!r} are not there, or twice"
    return pattern.sub(lambda _: begin + table + "\n" + end, text)


def spoken(document: str) -> Iterator[Command]:
    """The commands inside sentences and tables."""
    fenced = False
    for number, line in enumerate((ROOT / document).read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= bool(_FENCE.match(line))
        for span in () if fenced else _SPAN.findall(line):
            if _BEGINS.match(span) and span not in _WORDS_ALONE:
                yield Command(number, shlex.split(span), runs=False)
