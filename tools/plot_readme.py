"""Draws the chart of the README from the numbers beside it: docs/images/speed.svg, speed-dark.svg.

  pip install matplotlib && python -m tools.plot_readme

The numbers are those of docs/performance.md, which says how they were measured; a test compares
them. A drawing has no ground, and no date or random names: equal numbers draw an equal file.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
# By file: of text and lines, then of the bars. Each is for a page of one ground.
_COLORS = {
    "speed.svg": ("#212121", "#1565c0", "#ef6c00", "#9e9e9e"),
    "speed-dark.svg": ("#e0e0e0", "#64b5f6", "#ffb74d", "#9e9e9e"),
}


def main() -> None:
    """Writes both charts."""
    numbers = json.loads((_FOLDER / "readme_numbers.json").read_text())
    for name, colors in _COLORS.items():
        _draw(numbers["milliseconds"], _FOLDER / name, *colors)


def _draw(milliseconds: dict[str, dict[str, float]], path: Path, ink: str, *bars: str) -> None:
    matplotlib.rcParams |= {"svg.hashsalt": "sok_lite", "font.size": 9, "svg.fonttype": "none"}
    matplotlib.rcParams |= dict.fromkeys(
        ["text.color", "axes.edgecolor", "axes.titlecolor", "ytick.color"], ink
    )
    # As narrow as a phone can show without text that is too small to read.
    figure, all_axes = pyplot.subplots(2, 1, figsize=(5, 2.6), layout="constrained")
    for axes, (work, times) in zip(all_axes, milliseconds.items(), strict=True):
        drawn = axes.barh(list(times), list(times.values()), color=bars)
        axes.bar_label(drawn, [f" {time:g} ms" for time in times.values()])
        axes.invert_yaxis()
        axes.set_title(work, fontsize=9)
        axes.set_xlim(0, 1.25 * max(times.values()))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, transparent=True)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
