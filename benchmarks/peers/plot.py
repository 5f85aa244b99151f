"""The picture of the ratios: a bar for each figure of each peer, how many times better ours is, and the range."""

from __future__ import annotations

from collections.abc import Sequence

from .table import Ratio

COLOURS = {"Pulsar": "#4477aa", "Kafka": "#ee6677", "Spark": "#ccbb44"}
"""By the first word of a peer's name."""


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
        axis.text(max(high, 1) * 1.06, at, f"{middle:.2g}×", va="center", fontsize=8)
    axis.set_yticks(range(len(ratios)), [f"{each.row}, {each.unit} | {each.peer}" for each in ratios], fontsize=8)
    axis.invert_yaxis()
    lowest = min((each.better[1] for each in ratios), default=1)
    highest = max((each.better[2] for each in ratios), default=1)
    axis.set_xscale("log")
    axis.set_xlim(min(lowest, 0.5) / 1.2, max(highest, 2) * 1.6)
    ticks = [2.0**power for power in range(-10, 11) if min(lowest, 0.5) <= 2.0**power <= max(highest, 2)]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.axvline(1, color="#000000", linewidth=0.8)
    axis.set_xlabel("times better than the peer: more messages, or less latency (logarithmic; 1 is equal)")
    axis.spines[["top", "right"]].set_visible(False)
    used = {_family(each): _colour(each) for each in ratios}
    shown = [Patch(color=colour, label=name) for name, colour in used.items()]
    axis.legend(handles=shown, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)


def _family(ratio: Ratio) -> str:
    return next(name for name in COLOURS if ratio.peer.startswith(name))


def _colour(ratio: Ratio) -> str:
    return COLOURS[_family(ratio)]
