"""Results as a table, a picture and a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _name(result: dict[str, Any]) -> str:
    options = result["options"]
    return f"{result['benchmark']} {options['size']} B" + (
        f", {options['bookies']} bookies" if options["bookies"] > 1 else ""
    )


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def as_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: benchmark, median, range, latencies, what it cost, of which commit and build."""
    lines = [
        "| benchmark | median | range | latency p50 / p99 ms | CPU s (peak MB) | commit |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for result in results:
        latencies = result["latencies_ms"]
        cost = ", ".join(
            f"{name} {used['cpu_s']:.1f} ({used['peak_rss_mb']:.0f})" for name, used in result["processes"].items()
        )
        lines.append(
            f"| {_name(result)} | {number(result['value'])} {result['unit']} "
            f"| {number(result['min'])} – {number(result['max'])} | "
            + (f"{latencies['p50']:.2f} / {latencies['p99']:.2f}" if latencies else "–")
            + f" | {cost or '–'} | {result['commit'][:7]}{', ' + result['build'] if 'build' in result else ''} |"
        )
    return "\n".join(lines)


def as_plot(results: Sequence[dict[str, Any]], path: str) -> None:
    """One small bar chart per unit: the median with the range of the runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    units: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        units.setdefault(result["unit"], []).append(result)
    figure, axes = pyplot.subplots(len(units), 1, figsize=(8, 1.2 * len(units) + 0.5 * len(results)), squeeze=False)
    for axis, (unit, group) in zip(axes[:, 0], units.items(), strict=True):
        values = [r["value"] for r in group]
        spread = [[r["value"] - r["min"] for r in group], [r["max"] - r["value"] for r in group]]
        axis.barh([_name(r) for r in group], values, xerr=spread, color="#4477aa", capsize=3)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def compared(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The ratio of two results of one benchmark. Different machines or options are named, not hidden."""
    if now["benchmark"] != before["benchmark"]:
        raise SystemExit(f"--compare: a result of {before['benchmark']}, not of {now['benchmark']}")
    differs = [key for key in ("machine", "options") if now[key] != before[key]]
    if "build" in before and now["build"] != before["build"]:  # older results do not say
        differs.append("build")
    return {
        "with": before["commit"],
        "before": before["value"],
        "ratio": now["value"] / before["value"],
        "differs": differs,
    }


def ratio_line(result: dict[str, Any]) -> list[str]:
    """What `--compare` says to a person; nothing without it."""
    if "compared" not in result:
        return []
    found = result["compared"]
    differs = f"; not the same: {', '.join(found['differs'])}" if found["differs"] else ""
    return ["", f"{found['ratio']:.2f} × the {number(found['before'])} {result['unit']} of {found['with']}{differs}"]
