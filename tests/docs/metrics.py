"""The list of all metrics in docs/metrics.md, made from a page of metrics: `python -m tests.docs.metrics URL`.

URL is that of a standalone server which has a topic, a subscription and an open transaction: metrics of such things are
there when their thing is. Guard: tests/cli/run/test_metrics.py compares the list with the page of such a server.
"""

import re
import sys
import urllib.request

from tests.docs.documents import ROOT, replaced

DOCUMENT = "docs/metrics.md"
NAME = "metrics"


def metrics_table(page: str) -> str:
    """One row per metric, in the order of their names. A text that says no more than the name is left out."""
    kinds = dict(re.findall(r"^# TYPE (magnetar_\w+) (\w+)$", page, re.M))
    texts = dict(re.findall(r"^# HELP (magnetar_\w+) (.*)$", page, re.M))
    lines = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for name in sorted(kinds):
        labels = ", ".join(f"`{label}`" for label in sorted(_labels(page, name) - {"le"}))
        lines.append(f"| `{name}` | {kinds[name]} | {labels} | {_told(name, texts.get(name, ''))} |")
    return "\n".join(lines)


def _labels(page: str, name: str) -> set[str]:
    series = re.findall(rf"^{name}(?:_bucket)?\{{([^}}]*)\}}", page, re.M)
    return {label for each in series for label in re.findall(r'(?:^|,)(\w+)="', each)}


def _told(name: str, text: str) -> str:
    what = text.partition(": ")[2] or text
    return "" if what.rstrip(".").replace(" ", "_") in name else what.rstrip(".").replace("|", "\\|")


def stale(page: str, *, write: bool) -> bool:
    path = ROOT / DOCUMENT
    before = path.read_text(encoding="utf-8")
    after = replaced(before, NAME, metrics_table(page))
    if write:
        path.write_text(after, encoding="utf-8")
    return after != before


if __name__ == "__main__":
    with urllib.request.urlopen(sys.argv[1], timeout=30) as reply:
        stale(reply.read().decode(), write=True)
