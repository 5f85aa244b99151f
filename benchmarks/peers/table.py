"""Results as JSON and as a table: the ratio of ours to a peer's in each round, and the median of those.

A record is what one row told:

    {"row", "title", "when", "commit", "machine", "options",
     "sides": {name: [{"figures": {name: value}, "stolen_percent", "busy_percent"}]},
     "missing": {side: reason}, "failed": {side: reason}}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from magnetar.proto.versions import build_kind

from ..harness import commit, machine
from ..tables import number
from .rows import ROWS, Plan
from .turns import Turns

Record = dict[str, Any]


@dataclass(frozen=True)
class Ratio:
    row: str
    title: str
    unit: str
    less_is_better: bool
    peer: str
    ours: float
    theirs: float
    """Medians of the rounds."""
    ratio: float
    low: float
    high: float
    """The median, the lowest and the highest of the ratios of single rounds, ours / theirs."""
    stolen: tuple[float, float]
    """Per cent of the machine's time during our turns and theirs: medians."""
    rounds: int

    @property
    def better(self) -> tuple[float, float, float]:
        """How many times better ours is: median, lowest, highest."""
        if self.less_is_better:
            return 1 / self.ratio, 1 / self.high, 1 / self.low
        return self.ratio, self.low, self.high


def record(name: str, plan: Plan, turns: Turns, missing: dict[str, str]) -> Record:
    return {
        "row": name,
        "title": ROWS[name].title,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "build": build_kind(),
        "machine": machine(),
        "options": asdict(plan),
        "sides": {side: [asdict(each) for each in taken] for side, taken in turns.taken.items()},
        "missing": missing,
        "failed": turns.failed,
    }


def ratios(records: Sequence[Record]) -> Iterator[Ratio]:
    """In the order of ROWS. A peer that is missing, or has no round, has none."""
    by_row = {each["row"]: each for each in records}
    for name, row in ROWS.items():
        sides = by_row[name]["sides"] if name in by_row else {}
        ours = sides.get(row.sides[0].name, [])
        for figure in row.figures:
            for peer in row.sides[1:]:
                both = list(zip(ours, sides.get(peer.name, []), strict=False))  # a side that failed has fewer rounds
                if not both:
                    continue
                values = [(one["figures"][figure.name], other["figures"][figure.name]) for one, other in both]
                found = [one / other for one, other in values]
                stolen = [median(turn["stolen_percent"] for turn in side) for side in zip(*both, strict=True)]
                yield Ratio(
                    name, row.title, figure.unit, figure.less_is_better, peer.name,
                    median(one for one, _ in values), median(other for _, other in values),
                    median(found), min(found), max(found), (stolen[0], stolen[1]), len(both),
                )  # fmt: skip


def as_table(records: Sequence[Record]) -> str:
    """Markdown; under it the machine, and what was missing or failed."""
    lines = [
        "| row | load | peer | ours | peer's | | ours / peer's | of single rounds | stolen, ours and peer's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.row} | {each.title} | {each.peer} | {number(each.ours)} | {number(each.theirs)} | {each.unit} "
        f"| **{_ratio(each.ratio)}** | {_ratio(each.low)} – {_ratio(each.high)} ({each.rounds}) "
        f"| {each.stolen[0]:.1f} %, {each.stolen[1]:.1f} % |"
        for each in ratios(records)
    ]
    return "\n".join([*lines, "", *_where(records), *_busy(records), *_absent(records)])


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _where(records: Sequence[Record]) -> list[str]:
    """The machines and commits, each once."""
    told = [
        f"{_share(each)}{each['machine']['cores']} cores, {each['machine']['memory_gib']} GiB, "
        f"{each['machine']['system']}, Python {each['machine']['python']}; commit {each['commit']}"
        f"{', ' + each['build'] if 'build' in each else ''}; {each['options']['rounds']} rounds of "
        f"{each['options']['seconds']:g} s, {each['options']['pause_s']:g} s of pause"
        for each in records
    ]
    return [f"Measured on {each}." for each in dict.fromkeys(told)]


def _share(each: Record) -> str:
    """Files of earlier versions say nothing of it."""
    cores = each["options"].get("cores")
    return "" if cores is None else f"the time of {cores:g} of "


def _busy(records: Sequence[Record]) -> list[str]:
    """A machine on which something else runs is seen by it."""
    found = [turn["busy_percent"] for each in records for turns in each["sides"].values() for turn in turns]
    if not found:
        return []
    told = f"{median(found):.0f} % of the time, at most {max(found):.0f} %"
    return [f"In the pauses before the turns the processors were busy for {told}."]


def _absent(records: Sequence[Record]) -> list[str]:
    return [
        f"- {each['row']}, {side} {what}: {_line(reason)}"
        for each in records
        for what, reasons in (("is missing", each["missing"]), ("failed", each["failed"]))
        for side, reason in reasons.items()
    ]


def _line(reason: str) -> str:
    """A traceback's last line says what it was."""
    return reason.strip().splitlines()[-1]


def stored(path: Path) -> list[Record]:
    """The records of a file; none when there is no file. ValueError: it is something else."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if found.get("benchmark") != "peers":
        raise ValueError(f"{path} is not a result of benchmarks.peers")
    records: list[Record] = found["rows"]
    return records


def merged(before: Sequence[Record], now: Sequence[Record]) -> list[Record]:
    """The newer record of each row, in the order of ROWS."""
    by_row = {each["row"]: each for each in (*before, *now)}
    return [by_row[name] for name in ROWS if name in by_row]


def as_json(records: Sequence[Record]) -> str:
    told = [asdict(each) for each in ratios(records)]
    return json.dumps({"benchmark": "peers", "ratios": told, "rows": list(records)}, indent=1) + "\n"
