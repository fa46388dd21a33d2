"""Draws the chart of the README from the numbers beside it: docs/images/speed.svg.

  pip install matplotlib && python -m tools.plot_readme

The numbers are those of docs/performance.md, which says how they were measured; a test compares
them. The drawing has no date and no random names, so that equal numbers give an equal file.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
_COLORS = ("#1565c0", "#ef6c00", "#9e9e9e")


def main() -> None:
    """Writes the chart."""
    numbers = json.loads((_FOLDER / "readme_numbers.json").read_text())
    matplotlib.rcParams |= {"svg.hashsalt": "sok_lite", "font.size": 9, "svg.fonttype": "none"}
    figure, all_axes = pyplot.subplots(1, 2, figsize=(7.2, 1.5), layout="constrained")
    for axes, (work, times) in zip(all_axes, numbers["milliseconds"].items(), strict=True):
        bars = axes.barh(list(times), list(times.values()), color=_COLORS)
        axes.bar_label(bars, [f" {time:g} ms" for time in times.values()])
        axes.invert_yaxis()
        axes.set_title(work, fontsize=9)
        axes.set_xlim(0, 1.25 * max(times.values()))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    all_axes[1].set_yticklabels([])
    figure.savefig(_FOLDER / "speed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
