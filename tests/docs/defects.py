"""The table of docs/design/defects.md: the mutant bank (tests/mutants/bank.py), one row for each defect."""

import re
from functools import cache

from tests import layout
from tests.mutants.bank import BANK, CLUSTER, CRASHES, DIRECTED, FENCE, PROTOCOL, Mutant

MET_AS: dict[str, str] = {
    "M01": "#2614", "M02": "#2615", "M05": "#1067", "M06": "#2908", "M07": "#4843", "M09": "BP-46", "M10": "#4651",
    "M11": "#3005, #4097", "M12": "#1591", "M13": "#4459", "M14": "#4701", "M16": "#4812", "M17": "#4462",
    "M19": "#2273, #2281", "M20": "#4163", "M22": "#2612, #3917", "M23b": "#4843",
    "M24": "#1534", "M25": "#4607", "M26": "#870", "M27": "#2305", "M28": "P#5218", "M29": "P#19444, P#12015",
    "M30": "P#17736", "M31": "P#12570", "M32": "P#7106, P#12890",
}  # fmt: skip
"""Where users of BookKeeper (#) and Pulsar (P#) met it; of the others no report is known."""
_NAMED = re.compile(r"^test_((?:m\d\d[a-f]?_)+)")
_SEEDS = {PROTOCOL: "seeds of the protocol", CRASHES: "crash states"}


def defects_table() -> str:
    lines = ["| id | defect | met as | falls | killed by |", "|---|---|---|---|---|"]
    for id_, mutant in BANK.items():
        what = mutant.what.rstrip(".").replace("|", "/").removesuffix("(ours)").strip()
        lines.append(f"| {id_} | {what} | {MET_AS.get(id_, 'ours')} | {mutant.fells or '–'} | {_killed_by(mutant)} |")
    return "\n".join(lines)


def _killed_by(mutant: Mutant) -> str:
    named = [f"`{name}`" for name in named_tests().get(mutant.id, ())]
    if mutant.tier == DIRECTED:
        paths = [target for target in mutant.target.split() if "::" not in target]
        named += [f"`{target.partition('::')[2]}`" for target in mutant.target.split() if "::" in target]
        named += [f"`{path}`" for path in paths]
    else:
        kind = f"seeds of a cluster ({mutant.target})" if mutant.tier == CLUSTER else _SEEDS[mutant.tier]
        named.append(kind)
    named += [f"`{node.partition('::')[2]}`" for node in FENCE.get(mutant.id, ())]
    return ", ".join(dict.fromkeys(named))


@cache
def named_tests() -> dict[str, tuple[str, ...]]:
    """Id → tests that are named after it: `test_m09_m27_…` is of two."""
    found: dict[str, list[str]] = {}
    for module in layout.modules("tests"):
        for name in module.tests:
            if match := _NAMED.match(name):
                for id_ in match[1].strip("_").split("_"):
                    found.setdefault(f"M{id_[1:]}", []).append(name)
    return {id_: tuple(names) for id_, names in found.items()}
