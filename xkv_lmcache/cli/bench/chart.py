"""A picture of the figures of `xkv bench l2`, for documents: SVG, PNG, whatever matplotlib writes."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

MIB = 1 << 20

PANELS = {
    "again": "load, GB/s",
    "durable": "store until durable, GB/s",
    "cpu": "load, CPU-s/GB",
    "p50": "one load, median, us",
}
"""Keys of the figures, with what the axis says."""


def missing() -> str | None:
    """What has to be installed to draw; None when nothing is missing."""
    return None if importlib.util.find_spec("matplotlib") else "matplotlib"


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture with a row for each case and a panel for each of `PANELS`: a bar for every adapter, its height the
    median over the rounds, its line from the least to the greatest.

    Args:
        cases: what `--json` holds: `folder`, `object_bytes`, `batch`, and `rounds` of figures by adapter.
    """
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text: small, and to be searched.
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    size = (3.2 * len(PANELS), 2.6 * len(cases))
    figure, axes = pyplot.subplots(len(cases), len(PANELS), figsize=size, layout="constrained", squeeze=False)
    for case, row in zip(cases, axes, strict=True):
        for (key, label), plot in zip(PANELS.items(), row, strict=True):
            values = {
                name: [round_[name][key] for round_ in case["rounds"] if key in round_[name]]
                for name in sorted(case["rounds"][0], key=lambda name: not name.startswith("xkv"))
                if not name.startswith(("floor", "memcpy"))
            }
            bars = {name: each for name, each in values.items() if each}
            middle = [statistics.median(each) for each in bars.values()]
            down = [median - min(each) for median, each in zip(middle, bars.values(), strict=True)]
            up = [max(each) - median for median, each in zip(middle, bars.values(), strict=True)]
            colours = ["tab:blue" if name.startswith("xkv") else "tab:gray" for name in bars]
            plot.bar(list(bars), middle, yerr=[down, up], color=colours, ecolor="black", capsize=2)
            plot.set_ylabel(label, fontsize=8)
            plot.tick_params(labelsize=7)
            plot.tick_params(axis="x", rotation=40)
            plot.grid(axis="y", alpha=0.3)
        row[0].set_title(
            f"{case['folder']}: {case['object_bytes'] / MIB:g} MiB, batches of {case['batch']}",
            fontsize=9,
            loc="left",
        )
    figure.savefig(path)
    pyplot.close(figure)
