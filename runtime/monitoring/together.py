"""The metrics of several processes as one page: each series gets the label `process`.

    pieces = together({"storage": text, "broker-1": text})     Prometheus' text, families in the order of their first

The format has the lines of one metric in one group, so groups of the same name are put together. Labels and not sums:
a gauge of one process (its queue, its memory) says nothing once it is added up, and `sum without (process)` adds up
what can be added. Guard: tests/runtime/monitoring/test_together.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .metrics import escaped

_HELP, _TYPE = "# HELP ", "# TYPE "


def together(texts: Mapping[str, bytes]) -> Iterator[bytes]:
    """A piece for each metric of each process."""
    heads: dict[str, list[str]] = {}
    groups: dict[str, list[tuple[str, list[str]]]] = {}  # metric → process, its lines
    for process, text in texts.items():
        name = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                if line.startswith(_HELP):
                    name = line.split(" ", 3)[2]
                    groups.setdefault(name, []).append((process, []))
                    heads.setdefault(name, [])
                if len(groups[name]) == 1:
                    heads[name].append(line)
            elif line:
                groups[name][-1][1].append(line)
    for name, parts in groups.items():
        yield "".join(f"{line}\n" for line in heads[name]).encode()
        for process, lines in parts:
            label = f'process="{escaped(process)}"'
            yield "".join(_labelled(line, label) for line in lines).encode()


def _labelled(line: str, label: str) -> str:
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}\n"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}\n"
