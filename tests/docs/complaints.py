"""The table of complaints in docs/features.md: what Pulsar's users met, by the numbers that code and tests cite.

The tests are those named after the complaint: `test_complaint_13_…`.
"""

import re
from functools import cache

from tests import layout

COMPLAINTS: dict[int, tuple[str, str]] = {
    1: ("partitions get stuck when consumers join Key_Shared", "#8115"),
    2: ("a rolling restart of Key_Shared consumers stalls", "#10284"),
    3: ("a consumer that leaves with unacknowledged messages blocks its keys", "#10167"),
    4: ("a key is stuck until every older message of the subscription is acknowledged", "#14902"),
    5: ("one hot key stalls all keys", "#23999"),
    6: ("permits become negative and the consumer gets nothing more", "#24418"),
    7: ("Shared on many partitions stops, with negative permits", "#10813"),
    8: ("there are backlog and permits, and nothing is dispatched", "#14082"),
    9: ("permits of messages that are delivered again unread are lost", "#100"),
    10: ("above 10,000 holes the rest of the acknowledgements is dropped silently", "#25540"),
    11: ("one unacknowledged message makes a huge replay", "#742, #180"),
    12: ("the record of acknowledgements is too large to be stored", "#19966"),
    13: ("redelivery counts are in memory only, so the dead-letter topic is never reached", "#25533"),
    14: ("a crash of the consumer does not count, so a bad message kills every consumer", "#23944, #5881"),
    15: ("a message becomes a dead letter before the application saw it", "#3077"),
    16: ("a dead-letter policy with a limit that the operator did not set", "#14867"),
    17: ("negative acknowledgements take 118 bytes each", "PR #23600"),
    18: ("the index of delayed messages is bound to memory and takes hours to rebuild", "#16763"),
    19: ("the delay tracker in buckets is slow under load", "#24603"),
    20: ("delayed messages are read again when all consumers have left", "#23912"),
    21: ("long delays need another broker", "#15146"),
    22: ("delayed messages keep ledgers from deletion and fill the backlog quota", "pulsar-site#764"),
    23: ("memory leaks at ledger rollover", "#10738, #10136"),
    24: ("automatic compaction leaks", "#6482"),
    25: ("asking for the last message id again and again leaks", "#7304"),
    26: ("retention never frees the open ledger of a quiet topic", "#6935, #9057"),
    27: ("size retention deletes too much", "#11241"),
    28: ("storage is not freed after consuming; a full cluster locks up", "#12942, #15332"),
    29: ("ledgers that nothing refers to are never deleted", "#23599"),
    49: ("compaction loses messages or keeps tombstones of other clients", "PR #20980, #25817"),
    59: ("many negative acknowledgements stop the Python consumer", "#15052"),
}
_NAMED = re.compile(r"^test_complaint_(\d+)_")


def complaints_table() -> str:
    lines = ["| no | complaint | apache/pulsar | guarded by |", "|---|---|---|---|"]
    for number, (what, issue) in COMPLAINTS.items():
        guards = ", ".join(f"`{name}`" for name in named_tests().get(number, ()))
        lines.append(f"| {number} | {what} | {issue} | {guards} |")
    return "\n".join(lines)


@cache
def named_tests() -> dict[int, tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for module in layout.modules("tests"):
        for name in module.tests:
            if match := _NAMED.match(name):
                found.setdefault(int(match[1]), []).append(name)
    return {number: tuple(names) for number, names in found.items()}
