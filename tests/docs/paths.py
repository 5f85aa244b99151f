"""Paths in docs/ follow their symbols: `a/b.py` `Symbol` is corrected when another module defines the symbol.

Only where exactly one module of the product defines it, and the named file is gone, or is a neighbour of that module in
its folder: elsewhere a symbol of that name is another one, and the named one was renamed. That is for a reader to
decide; tests/test_map.py and tests/docs/test_names.py say what is wrong.
"""

import re
from functools import cache
from pathlib import Path

from tests import layout

PAIR = re.compile(r"`([\w./-]+\.py)` `([A-Za-z_][\w.]*)`")


@cache
def _defined() -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for module in layout.modules():
        for symbol in layout.symbols(module.tree):
            found.setdefault(symbol, []).append(module.path)
    return {symbol: tuple(paths) for symbol, paths in found.items()}


def corrected(text: str) -> str:
    """`text` with the paths of moved symbols replaced."""
    return PAIR.sub(_pair, text)


def _pair(match: re.Match[str]) -> str:
    path, symbol = match.groups()
    paths = _defined().get(symbol, ())
    if path in paths or len(paths) != 1 or path.startswith("tests/"):
        return match[0]
    if (layout.ROOT / path).exists() and Path(path).parent != Path(paths[0]).parent:
        return match[0]
    return f"`{paths[0]}` `{symbol}`"
