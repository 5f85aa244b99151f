"""The picture of the ratios: a bar for each figure of each peer, how many times better ours is, and the range."""

from __future__ import annotations

from collections.abc import Sequence

from .table import Ratio

COLOURS = {"Pulsar": "#4477aa", "Kafka": "#ee6677", "Spark": "#ccbb44"}
"""By the first word of a peer's name."""
MOST = 16.0
"""Times better or worse: longer bars are cut, their number is told."""


def as_plot(ratios: Sequence[Ratio], path: str) -> None:
    """.svg or .png. The same ratios make the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    matplotlib.rcParams["svg.hashsalt"] = "peers"
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.3 * len(ratios)))
    for at, each in enumerate(ratios):
        middle, low, high = each.better
        axis.barh(at, middle - 1, left=1, color=_colour(each))  # to the right of 1: ours is better
        axis.errorbar(middle, at, xerr=[[middle - low], [high - middle]], color="#555555", capsize=2)
        shown = f"{middle:.2f}×" if middle < 10 else f"{middle:,.0f}×"
        axis.text(min(max(high, 1), MOST) * 1.06, at, shown, va="center", fontsize=8)
    axis.set_yticks(range(len(ratios)), [f"{each.row}, {each.unit} | {each.peer}" for each in ratios], fontsize=8)
    axis.invert_yaxis()
    lowest = max(min([0.5, *(each.better[1] for each in ratios)]), 1 / MOST)
    highest = min(max([2.0, *(each.better[2] for each in ratios)]), MOST)
    axis.set_xscale("log")
    axis.set_xlim(lowest / 1.2, highest * 1.6)
    ticks = [2.0**power for power in range(-10, 11) if lowest <= 2.0**power <= highest]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.axvline(1, color="#000000", linewidth=0.8)
    axis.set_xlabel("times better than the peer: more messages or rows, less latency (1 is equal)", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    used = {_family(each): _colour(each) for each in ratios}
    families = [Patch(color=colour, label=name) for name, colour in used.items()]
    axis.legend(handles=families, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)


def _family(ratio: Ratio) -> str:
    return next(name for name in COLOURS if ratio.peer.startswith(name))


def _colour(ratio: Ratio) -> str:
    return COLOURS[_family(ratio)]
