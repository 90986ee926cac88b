"""Figures of the report as Vega-Lite specifications with their rows: curves, histograms, UMAPs and
confusion.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cellmill.report.drawing import PALETTE, Figure
from cellmill.report.tables import to_words

Spec = dict[str, Any]
"""Part of a Vega-Lite specification, or a row of its table."""
Points = list[tuple[float, float]]
"""(step, value) of a curve."""
GREY = PALETTE[7]
LIGHT_GREY = "#9aa0a6"
MAX_CELLS = 4_000  # cells in a UMAP: more make the page slow and show no more
MAX_CELLS_BY_BATCH = 1_500  # cells in the same UMAP by batch
MAX_POINTS = 400  # points of a curve
LAW_POINTS = 40  # points of the curve of a law
TAILS_FRAC = 0.005  # share of cells at both ends together that a histogram does not draw
PICK = {"name": "pick", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"}
ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}
# lines and points that are not picked in the legend are nearly transparent
PICKED = {"condition": {"param": "pick", "value": 0.9}, "value": 0.08}


def curves(title: str, series: Mapping[str, Sequence[tuple[float, float]]], y: str) -> Figure:
    """A line over steps for each run, in its colour."""
    rows = []
    values = []
    for name, points in series.items():
        values += [value for _, value in points]
        for step, value in _thin(points):
            rows.append({"name": name, "step": step, "value": _short(value)})
    return Figure(title, rows, {"height": 210} | _lines([*series], "step", y, values))


def losses(title: str, runs: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Figure:
    """Loss of training (thin) and validation (with points) over steps, a colour for each run."""
    rows = []
    values = []
    for name, kinds in runs.items():
        for kind, points in kinds.items():
            values += [value for _, value in points]
            for step, value in _thin(points):
                rows.append({"name": name, "of": kind, "step": step, "value": _short(value)})
    # on a linear axis, the first steps would flatten the rest
    is_log = bool(values) and min(values) > 0 and max(values) > 5 * min(values)
    spec = _lines([*runs], "step", "loss", values, is_log)
    with_loss = [name for name, kinds in runs.items() if kinds]
    spec["encoding"]["color"].setdefault("legend", {"values": with_loss})
    spec["encoding"]["strokeDash"] = {
        "field": "of",
        "sort": ["validation", "training"],
        "scale": {"range": [[1, 0], [3, 3]]},
        # next to the runs at the bottom, a narrow page would cut it
        "legend": {"orient": "top"},
    }
    return Figure(title, rows, spec | {"height": 250})


def histogram(
    title: str, edges: Sequence[float], before: Sequence[int], after: Sequence[int], name: str
) -> Figure:
    """Cells per bin before QC (grey) and after (blue); log axis for geometric edges.

    Only bins of the central 99.5 % of cells are drawn, or one outlier would squeeze them; the axis
    counts the other cells.
    """
    # cells in each bin and all bins to its left
    n_until_end = np.cumsum(before)
    n_until_start = n_until_end - before
    n_cells = n_until_end[-1]
    tail = TAILS_FRAC / 2 * n_cells
    is_drawn = (n_until_end > tail) & (n_until_start < n_cells - tail)
    rows = []
    for number in np.flatnonzero(is_drawn).tolist():
        row = {
            "from": _short(edges[number]),
            "to": _short(edges[number + 1]),
            "before": int(before[number]),
            "kept": int(after[number]),
        }
        rows.append(row)
    n_beyond = int(n_cells - sum(row["before"] for row in rows))
    if n_beyond:
        name += f" ({n_beyond:,} cells beyond)"
    scale = {"type": "log"} if edges[0] > 0 else {"zero": False}
    shared = {
        "x": _number("from", scale=scale, title=name, axis={"grid": False}),
        "x2": {"field": "to"},
        "tooltip": [*map(_number, ("from", "to", "before", "kept"))],
    }
    layers = []
    for field, tint, opacity in (("before", GREY, 0.45), ("kept", PALETTE[0], 0.9)):
        mark = {"type": "rect", "color": tint, "opacity": opacity}
        height = {"y": _number(field, title="cells"), "y2": {"datum": 0}}
        layers.append({"mark": mark, "encoding": shared | height})
    return Figure(title, rows, {"height": 140, "layer": layers})


def sizes_curve(title: str, curve: Mapping[str, Any]) -> Figure:
    """Mean and sd by size, a line for each of `curve["lines"]`.

    The law is dashed, the best baseline dotted.
    """
    lines = {str(line["name"] or "runs"): line for line in curve["lines"]}
    rows: list[Spec] = []
    for name, line in lines.items():
        rows += _line_rows(name, line)
    baseline = curve["baseline"]
    if baseline is not None:
        value = _short(baseline["value"])
        rows.append({"name": baseline["name"], "of": "baseline", "value": value})
    is_positive = all(row.get("size", 1) > 0 for row in rows)
    scale = {"type": "log"} if is_positive else {}
    encoding = _lines([*lines], "size", curve["metric"])["encoding"]
    del encoding["opacity"]
    encoding["x"] = _number("size", title=to_words(curve["quantity"]), scale=scale)
    bars = {
        "x": encoding["x"],
        "y": encoding["y"] | {"field": "low"},
        "y2": {"field": "high"},
        "color": encoding["color"],
    }
    constant = {"y": _number("value"), "tooltip": {"field": "name"}}
    dotted = {"type": "rule", "strokeDash": [2, 3], "color": GREY}
    layers = [
        _layer("runs", {"type": "line", "point": True}, encoding),
        _layer("law", {"type": "line", "strokeDash": [5, 4]}, encoding),
        _layer("runs", "rule", bars),
        _layer("baseline", dotted, constant),
    ]
    return Figure(title, rows, {"height": 230, "layer": layers})


def _line_rows(name: str, line: Spec) -> list[Spec]:
    """The mean of each size, with the ends of a bar of one sd to both sides, and points of the law."""
    rows = []
    for point in line["points"]:
        mean = point["mean"]
        sd = point["sd"] or 0.0
        row = {
            "name": name,
            "of": "runs",
            "size": point["size"],
            "value": _short(mean),
            "low": _short(mean - sd),
            "high": _short(mean + sd),
        }
        rows.append(row)
    law = line.get("law")
    if law is not None:
        sizes = [point["size"] for point in line["points"]]
        for size in np.geomspace(min(sizes), max(sizes), LAW_POINTS).tolist():
            value = law["floor"] + law["factor"] * size ** -law["exponent"]
            rows.append({"name": name, "of": "law", "size": _short(size), "value": _short(value)})
    return rows


def _layer(kind: str, mark: Any, encoding: Spec) -> Spec:
    """Marks of the rows of one kind."""
    rows_of_kind = [{"filter": f"datum.of == '{kind}'"}]
    return {"transform": rows_of_kind, "mark": mark, "encoding": encoding}


def umap(
    title: str,
    cells: Sequence[Mapping[str, str]],
    labels: Sequence[str],
    column: str = "label",
    max_cells: int = MAX_CELLS,
) -> Figure:
    """Cells at UMAP coordinates, at most `max_cells` of them, coloured by a column; held-out cells are
    circles.

    To keep the page small, rows have codes; the browser looks the texts up.
    """
    codes = {label: code for code, label in enumerate(labels)}
    # shuffle cells by a fixed seed, or the class drawn last would cover the others
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(cells))
    rows = [_umap_row(cells[index], column, codes) for index in order[:max_cells]]
    names_by_code = [{"c": code, "name": label} for label, code in codes.items()]
    names_by_code.append({"c": -1, "name": f"no {column}"})
    colours = {
        "domain": [*labels, f"no {column}"],
        "range": [*map(colour, range(len(labels))), LIGHT_GREY],
    }
    size = np.clip(9000 / max(len(rows), 1), 6, 30)  # fewer cells are drawn larger
    spec = {
        "height": 340,
        "transform": [
            {
                "lookup": "c",
                "from": {"data": {"values": names_by_code}, "key": "c", "fields": ["name"]},
            },
            {"calculate": "datum.h ? 'held out' : 'seen in training'", "as": "cells"},
        ],
        "params": [PICK, ZOOM],
        "mark": {"type": "point", "filled": True, "size": float(size)},
        "encoding": {
            "x": _umap_axis("x", "UMAP 1"),
            "y": _umap_axis("y", "UMAP 2"),
            "color": _category("name", scale=colours, legend={"labelColor": GREY}),
            "shape": {
                "field": "cells",
                "scale": {
                    "domain": ["held out", "seen in training"],
                    "range": ["circle", "triangle-up"],
                },
                "legend": {"labelColor": GREY},
            },
            "opacity": PICKED,
            "tooltip": [{"field": "name", "title": column}, {"field": "cells"}],
        },
    }
    return Figure(title, rows, spec, canvas=True)


def _umap_row(
    cell: Mapping[str, str], column: str, codes: Mapping[str, int]
) -> dict[str, float | int]:
    """A cell with the code `c` of its value, -1 for none, and `h`, 1 if it was held out."""
    return {
        "x": round(float(cell["x"]), 3),
        "y": round(float(cell["y"]), 3),
        "c": codes.get(cell[column], -1),
        "h": int(cell["heldout"] == "1"),
    }


def _umap_axis(field: str, title: str) -> Spec:
    """Encoding of a coordinate, whose values mean nothing: no grid, numbers or line."""
    axis = {"grid": False, "labels": False, "titleColor": GREY, "domain": False}
    return _number(field, title=title, axis=axis, scale={"zero": False})


def confusion(title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Share of the cells of each true class by predicted class; pairs without cells are left out."""
    rows = []
    for true, class_counts in zip(classes, counts):
        for predicted, n in zip(classes, class_counts):
            if n:
                share = _short(n / sum(class_counts))
                rows.append({"true": true, "predicted": predicted, "cells": n, "share": share})
    encoding: Spec = {}
    for axis, field in (("y", "true"), ("x", "predicted")):
        scale = {"domain": list(classes)}
        encoding[axis] = _category(field, sort=list(classes), title=field, scale=scale)
    opacities = {"domain": [0, 1], "range": [0.06, 1]}
    encoding["opacity"] = _number("share", scale=opacities, legend=None)
    encoding["tooltip"] = [
        {"field": "true"},
        {"field": "predicted"},
        {"field": "cells"},
        {"field": "share", "format": ".1%"},
    ]
    mark = {"type": "rect", "color": PALETTE[0]}
    return Figure(title, rows, {"height": {"step": 20}, "mark": mark, "encoding": encoding})


def colour(number: int) -> str:
    """Colour of class or run `number`."""
    return PALETTE[number % len(PALETTE)]


def points(lines: Sequence[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of lines of metrics.jsonl in which `key` is a finite number. From a list over
    ranks, the largest value counts.
    """
    finite = []
    for line in lines:
        value = line.get(key)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, int | float) and np.isfinite(value):
            finite.append((line["step"], float(value)))
    return finite


def _number(field: str, **options: Any) -> Spec:
    """Encoding of a field of numbers."""
    return {"field": field, "type": "quantitative", **options}


def _category(field: str, **options: Any) -> Spec:
    """Encoding of a field of texts."""
    return {"field": field, "type": "nominal", **options}


def _lines(
    names: Sequence[str], x: str, y: str, values: Sequence[float] = (), is_log: bool = False
) -> Spec:
    """Specification of lines over `x`, in a colour for each name.

    A linear y axis has head-room above the highest of `values`.
    """
    scale: Spec = {"type": "log"} if is_log else {"zero": False, "nice": True}
    if values and not is_log:
        head_room = (max(values) - min(values)) / 20
        scale["domainMax"] = _short(max(values) + head_room)
    colours = [*map(colour, range(len(names)))]
    tint = _category("name", scale={"domain": [*names], "range": colours})
    if len(names) < 2:
        tint["legend"] = None
    return {
        "params": [PICK, ZOOM],
        "mark": {"type": "line", "point": {"size": 14}, "strokeWidth": 1.5},
        "encoding": {
            "x": _number(x, title=x, axis={"format": ",d", "grid": False}),
            "y": _number("value", title=to_words(y), axis={"tickCount": 5}, scale=scale),
            "color": tint,
            "opacity": PICKED,
            "tooltip": [{"field": "name"}, _number(x), _number("value")],
        },
    }


def _thin(points: Sequence[tuple[float, float]]) -> Points:
    """Every n-th point, about MAX_POINTS of them, and the last one."""
    step = max(1, math.ceil(len(points) / MAX_POINTS))
    return [*points[:-1:step], *points[-1:]]


def _short(value: float) -> float:
    """Value with five significant digits."""
    return float(f"{value:.5g}")
