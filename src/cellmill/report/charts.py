"""Charts of the page: rows of their tables, in the Vega-Lite specifications of vega.json."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cellmill.report.collect import UmapCells
from cellmill.report.drawing import PALETTE, Chart, read_template
from cellmill.report.forms import LoggedLineForm
from cellmill.report.scaling_law import Law
from cellmill.report.sweep import CurveOfRuns, Scaling
from cellmill.report.tables import to_words

Spec = dict[str, Any]
"""Part of a Vega-Lite specification."""
ChartRow = dict[str, Any]
"""Row of a chart's table."""
Points = list[tuple[float, float]]
"""(step, value) of a curve."""
LIGHT_GREY = "#9aa0a6"
MAX_CELLS = 4_000  # cells in a UMAP: more make the page slow and show no more
MIN_CELLS = 500  # fewest cells in a UMAP, however many UMAPs a page has
CELLS_OF_PAGE = 60_000  # cells in all UMAPs of a page, if each has more than MIN_CELLS
MAX_CELLS_BY_BATCH = 1_500  # cells in the same UMAP by batch
# areas in square pixels: all cells of a UMAP together, and the limits of a single one
AREA_OF_CELLS = 30_000
MIN_CELL_AREA = 14
MAX_CELL_AREA = 60
MAX_POINTS = 400  # points of a curve
MIN_POINTS = 50  # fewest points of a curve, however many curves a chart has
POINTS_OF_CHART = 10_000  # points of all curves of a chart
LAW_POINTS = 40  # points of the curve of a law
TITLE_WIDTH = 32  # characters in a line of the title of a y axis
TAILS_FRAC = 0.005  # share of cells at both ends together that a histogram does not draw


def draw_curves(title: str, curves: Mapping[str, Points], y: str) -> Chart:
    """A line over steps for each run, or each method, in its colour. `curves` has (step, value) by
    name.
    """
    rows = []
    for name, points in curves.items():
        rows += _list_line_rows(points, len(curves), name=name)
    return Chart(title, rows, {"height": 210, **_make_lines([*curves], y, rows)})


def draw_losses(title: str, runs: Mapping[str, Mapping[str, Points]]) -> Chart:
    """Loss of training (dashed) and validation over steps, a colour for each run. `runs` has
    (step, value) by run, then by `training` and `validation`; both are absent for a run without a
    loss.
    """
    rows = []
    for name, kinds in runs.items():
        for kind, points in kinds.items():
            rows += _list_line_rows(points, 2 * len(runs), name=name, series=kind)
    with_loss = [name for name, kinds in runs.items() if kinds]
    spec = _make_lines([*runs], "loss", rows, with_loss)
    spec["encoding"] |= read_template("loss")
    # on a linear axis, the first steps would flatten the rest
    values = [row["value"] for row in rows]
    if values and min(values) > 0 and max(values) > 5 * min(values):
        spec["encoding"]["y"]["scale"] = {"type": "log"}
    return Chart(title, rows, {"height": 250, **spec})


def _list_line_rows(points: Points, n_curves: int, **columns: str) -> list[ChartRow]:
    """Rows of one of `n_curves`: every n-th point and the last one. Each row begins with `columns`."""
    max_points = min(MAX_POINTS, max(MIN_POINTS, POINTS_OF_CHART // n_curves))
    stride = max(1, math.ceil(len(points) / max_points))
    thinned = [*points[:-1:stride], *points[-1:]]
    return [{**columns, "step": step, "value": _round(value)} for step, value in thinned]


def _make_lines(
    names: Sequence[str], y: str, rows: Sequence[ChartRow], in_legend: Sequence[str] | None = None
) -> Spec:
    """Specification of lines over steps, in a colour for each of `names`.

    The legend has `in_legend`, by default all names. The y axis has head-room above the highest
    value.
    """
    spec = read_template("lines")
    scale: Spec = {"zero": False, "nice": True}
    values = [row["value"] for row in rows]
    if values:
        head_room = (max(values) - min(values)) / 20
        scale["domainMax"] = _round(max(values) + head_room)
    title = textwrap.wrap(to_words(y), TITLE_WIDTH)  # lines of a title that would be cut
    spec["encoding"]["y"] |= {"title": title, "scale": scale}
    spec["encoding"]["color"] |= _colour_names(names, in_legend)
    return spec


def _colour_names(names: Sequence[str], in_legend: Sequence[str] | None = None) -> Spec:
    """A colour for each name, and a legend of several names."""
    colours = [colour(number) for number in range(len(names))]
    colouring: Spec = {"scale": {"domain": [*names], "range": colours}}
    if len(names) < 2:
        colouring["legend"] = None
    elif in_legend is not None:
        colouring["legend"] = {"values": [*in_legend]}
    return colouring


def draw_histogram(
    title: str, edges: Sequence[float], before: Sequence[int], after: Sequence[int], name: str
) -> Chart:
    """Cells per bin before QC (grey) and after (blue); log axis for geometric edges.

    `before` and `after` are numbers of cells, (bins,); `edges` are (bins + 1,). Only bins of the
    central 99.5 % of cells are drawn, or one outlier would squeeze them; the axis counts the other
    cells.
    """
    # cells in each bin and all bins to its left
    n_until_end = np.cumsum(before)
    n_until_start = n_until_end - before
    n_cells = n_until_end[-1]
    tail = TAILS_FRAC / 2 * n_cells
    is_drawn = (n_until_end > tail) & (n_until_start < n_cells - tail)
    rows = []
    for number in np.flatnonzero(is_drawn).tolist():
        rows.append(
            {
                "from": _round(edges[number]),
                "to": _round(edges[number + 1]),
                "before": before[number],
                "kept": after[number],
            }
        )
    n_beyond = n_cells - sum(row["before"] for row in rows)
    if n_beyond:
        name += f" ({n_beyond:,} cells beyond)"
    spec = read_template("histogram")
    scale = {"type": "log"} if edges[0] > 0 else {"zero": False}
    spec["encoding"]["x"] |= {"scale": scale, "title": name}
    return Chart(title, rows, spec)


def draw_scaling(title: str, scaling: Scaling) -> Chart:
    """Mean and sd by size, a line for each curve. The law is dashed, the best baseline dotted."""
    names = [curve.name or "runs" for curve in scaling.curves]
    rows: list[ChartRow] = []
    for name, curve in zip(names, scaling.curves):
        rows += _list_curve_rows(name, curve)
    is_positive = all(row["size"] > 0 for row in rows)
    if scaling.baseline is not None:
        value = _round(scaling.baseline.value)
        rows.append({"name": scaling.baseline.name, "series": "baseline", "value": value})
    spec = read_template("scaling")
    *layers_over_sizes, _ = spec["layer"]  # the last layer is the baseline, equal at all sizes
    for layer in layers_over_sizes:
        layer["encoding"]["x"]["title"] = to_words(scaling.quantity)
        layer["encoding"]["x"]["scale"] = {"type": "log"} if is_positive else {}
        layer["encoding"]["y"]["title"] = to_words(scaling.measure.metric)
        layer["encoding"]["color"] |= _colour_names(names)
    return Chart(title, rows, spec)


def _list_curve_rows(name: str, curve: CurveOfRuns) -> list[ChartRow]:
    """The mean of each size, with the ends of a bar of one sd to both sides, and points of the law."""
    rows = []
    for point in curve.points:
        sd = point.sd or 0.0
        rows.append(
            {
                "name": name,
                "series": "runs",
                "size": point.size,
                "value": _round(point.mean),
                "low": _round(point.mean - sd),
                "high": _round(point.mean + sd),
            }
        )
    law = curve.law
    sizes = [point.size for point in curve.points]
    if isinstance(law, Law) and min(sizes) > 0:
        for size in np.geomspace(min(sizes), max(sizes), LAW_POINTS).tolist():
            value = law.floor + law.factor * size**-law.exponent
            rows.append(
                {"name": name, "series": "law", "size": _round(size), "value": _round(value)}
            )
    return rows


def limit_cells(n_umaps: int) -> int:
    """The most cells that each of `n_umaps` on a page draws."""
    return min(MAX_CELLS, max(MIN_CELLS, CELLS_OF_PAGE // max(n_umaps, 1)))


def draw_umap(
    title: str,
    cells: UmapCells,
    labels: Sequence[str],
    column: str = "label",
    max_cells: int = MAX_CELLS,
) -> Chart:
    """Cells at UMAP coordinates, at most `max_cells` of them, coloured by a column, whose values are
    `labels`; held-out cells are circles.

    To keep the page small, rows of the chart have codes, whose texts the browser looks up, and
    coordinates of two decimals, which a screen cannot tell from more.
    """
    codes = {label: code for code, label in enumerate(labels)}
    # shuffle cells by a fixed seed, or the class drawn last would cover the others
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(cells.x))
    rows = []
    for index in order[:max_cells].tolist():
        rows.append(
            {
                "x": round(cells.x[index], 2),
                "y": round(cells.y[index], 2),
                # -1 for a cell without a value: as an index, the last colour
                "c": codes.get(cells.texts[column][index], -1),
                "h": cells.is_held_out[index],
            }
        )
    names = [*labels, f"no {column}"]
    colours = [*map(colour, range(len(labels))), LIGHT_GREY]
    spec = read_template("umap")
    names_by_code = [{"c": code, "name": label} for label, code in codes.items()]
    names_by_code.append({"c": -1, "name": names[-1]})
    spec["transform"][0]["from"]["data"]["values"] = names_by_code
    # fewer cells are drawn larger
    size = AREA_OF_CELLS / max(len(rows), 1)
    spec["mark"]["size"] = float(np.clip(size, MIN_CELL_AREA, MAX_CELL_AREA))
    spec["encoding"]["color"]["scale"] = {"domain": names, "range": colours}
    spec["encoding"]["tooltip"][0]["title"] = column
    return Chart(title, rows, spec, is_umap=True)


def draw_confusion(title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Chart:
    """Share of the cells of each true class by predicted class; pairs without cells are left out.

    `counts` are numbers of cells, (true classes, predicted classes).
    """
    rows = []
    for true, class_counts in zip(classes, counts):
        for predicted, n in zip(classes, class_counts):
            if n:
                share = _round(n / sum(class_counts))
                rows.append({"true": true, "predicted": predicted, "cells": n, "share": share})
    spec = read_template("confusion")
    for axis in ("x", "y"):
        spec["encoding"][axis] |= {"sort": [*classes], "scale": {"domain": [*classes]}}
    return Chart(title, rows, spec)


def colour(number: int) -> str:
    """Colour of class or run `number`."""
    return PALETTE[number % len(PALETTE)]


def list_labels(cells: UmapCells, column: str = "label") -> list[str]:
    """Labels, or batches, of a UMAP, the most frequent first."""
    counts = Counter(cells.texts[column])
    del counts[""]
    return sorted(counts, key=lambda text: (-counts[text], text))


def list_points(lines: Sequence[LoggedLineForm], key: str) -> Points:
    """(step, value) of the lines in which `key` is a finite number. From a list over ranks, the
    largest value counts.
    """
    points: Points = []
    for line in lines:
        value = getattr(line, key)
        if isinstance(value, list):
            value = max(value, default=None)
        if value is not None and np.isfinite(value):
            points.append((line.step, value))
    return points


def _round(value: float) -> float:
    """The value with five significant digits."""
    return float(f"{value:.5g}")
