"""Figures of the report as inline SVG.

Text stays text in the page's font; ink and grid take the page's colours, also in a dark scheme. The same numbers give
the same bytes. User text is drawn literally, never parsed as a formula.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

PALETTE = (
    "#4e79a7", "#e08f45", "#5f9e6e", "#c85c5c", "#8a6fae", "#9c7a5b", "#d38bb4", "#7f8791", "#b3a63f", "#55a9b5",
    "#2f4b7c", "#f2b66d", "#a3c98f", "#e79a94", "#bba8d6", "#c9ad92", "#6b4f3a", "#b9bec5", "#dcd57f", "#9fd3da",
)  # fmt: skip
"""Twenty colours, distinguishable on light and dark background; they repeat from the twenty-first class on."""

_INK, _GRID = "#010203", "#010204"  # placeholders for CSS colours, which matplotlib cannot express
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cellmill",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _GRID),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def loss_curve(lines: Sequence[Mapping[str, Any]]) -> Markup:
    """Training and validation loss over steps, from the lines of a metrics.jsonl."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.4, 2.9)
        train, val = _points(lines, "loss"), _points(lines, "val_loss")
        if train:
            axes.plot(*zip(*train), color=PALETTE[0], lw=1.2, alpha=0.75, label="train")
        if val:
            axes.plot(*zip(*val), color=PALETTE[1], lw=1.4, marker="o", ms=3.5, label="validation")
        axes.set(xlabel="step", ylabel="loss")
        _log_scale(axes, [value for _, value in train + val])
        if train or val:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
        return _svg(figure)


def compare_validation(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Markup:
    """Validation loss of several runs over steps; run i has colour i of PALETTE."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.4, 2.9)
        for number, lines in enumerate(runs.values()):
            if val := _points(lines, "val_loss"):
                axes.plot(*zip(*val), color=colour(number), lw=1.4, marker="o", ms=3)
        axes.set(xlabel="step", ylabel="validation loss")
        return _svg(figure)


def histogram(edges: Sequence[float], before: Sequence[int], after: Sequence[int], name: str) -> Markup:
    """Cells per bin before QC (grey) and after (blue); log axis for geometric edges."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(3.3, 2.1)
        axes.stairs(before, edges, fill=True, color=PALETTE[7], alpha=0.45)
        axes.stairs(after, edges, fill=True, color=PALETTE[0], alpha=0.9)
        if edges[0] > 0:
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        axes.set(xlabel=name, ylabel="cells")
        return _svg(figure)


def dots(points: Sequence[tuple[str, float, float, bool]], metric: str) -> Markup:
    """(name, value, sd, is a baseline) of each row of a table; baselines are drawn hollow."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.4, 0.75 + 0.27 * len(points))
        for position, (_, value, sd, baseline) in enumerate(reversed(points)):
            tint = PALETTE[7] if baseline else PALETTE[0]
            axes.errorbar(value, position, xerr=sd, fmt="o", ms=6, color=tint, lw=1.4, mfc="none" if baseline else tint)
        axes.set_yticks(range(len(points)), [name for name, *_ in reversed(points)])
        axes.set_ylim(-0.6, len(points) - 0.4)
        if all(0 <= value <= 1 for _, value, _, _ in points):
            axes.set_xlim(0, 1.02)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"{metric.replace('_', ' ')}, mean and sd" if any(sd for _, _, sd, _ in points) else metric)
        return _svg(figure)


def sizes_curve(curve: Mapping[str, Any]) -> Markup:
    """Mean and sd by size, a line for each of `curve.lines`; the law dashed, the best baseline dotted."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.4, 2.9)
        for number, line in enumerate(curve["lines"]):
            sizes, means = ([point[key] for point in line["points"]] for key in ("size", "mean"))
            spread = [point["sd"] or 0.0 for point in line["points"]]
            axes.errorbar(sizes, means, yerr=spread, color=colour(number), lw=1.4, marker="o", ms=4)
            if (law := line.get("law")) is not None:
                x = np.geomspace(min(sizes), max(sizes), 50)
                y = law["floor"] + law["factor"] * x ** -law["exponent"]
                axes.plot(x, y, color=colour(number), lw=1, ls="--")
        if curve["baseline"] is not None:
            axes.axhline(curve["baseline"]["value"], color=PALETTE[7], lw=1.2, ls=":")
        if all(point["size"] > 0 for line in curve["lines"] for point in line["points"]):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        axes.set(xlabel=curve["quantity"].replace("_", " "), ylabel=curve["metric"].replace("_", " "))
        return _svg(figure)


def scatter(x: np.ndarray, y: np.ndarray, classes: np.ndarray) -> Markup:
    """Cells at UMAP coordinates, as one bitmap; class i has colour i of PALETTE, -1 is no class."""
    with mpl.rc_context(_STYLE | {"axes.grid": False}):
        figure, axes = _axes(4.6, 4.2)
        tints = np.array([colour(int(number)) if number >= 0 else "#9aa0a6" for number in classes], dtype=object)
        # shuffled, with a fixed seed: the class drawn last would cover the others
        order = np.random.Generator(np.random.Philox(key=0)).permutation(len(x))
        size = float(np.clip(9000 / max(len(x), 1), 2, 22))
        axes.scatter(x[order], y[order], c=list(tints[order]), s=size, lw=0, alpha=0.85, rasterized=True)
        axes.spines["bottom"].set_visible(False)
        axes.set(xticks=[], yticks=[], xlabel="UMAP 1", ylabel="UMAP 2")
        return _svg(figure)


def colour(number: int) -> str:
    """Colour of class or run `number`."""
    return PALETTE[number % len(PALETTE)]


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _log_scale(axes: Axes, values: Sequence[float]) -> None:
    """Log axis where values span a wide range: the first steps would flatten the rest."""
    if values and min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def _svg(figure: Figure) -> Markup:
    """The `<svg>` element without prologue, metadata and namespace URLs."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", dpi=160, metadata=no_metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<metadata>.*?</metadata>|<!--.*?-->| xmlns(:\w+)?="[^"]*"', "", text, flags=re.DOTALL)
    for size in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    text = text.replace(_INK, "currentColor").replace(_GRID, "var(--rule)")
    width = round(figure.get_figwidth() * 96)
    return Markup(text.replace("<svg", f'<svg role="img" style="max-width:{width}px"', 1))


def _points(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of the lines in which `key` is a finite number."""
    values = ((line["step"], line.get(key)) for line in lines)
    return [(step, value) for step, value in values if isinstance(value, int | float) and np.isfinite(value)]
