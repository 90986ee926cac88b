"""Figures of the report as Vega-Lite specifications with their rows: curves, histograms, UMAPs and
confusion.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cellmill.report.drawing import PALETTE, Figure

GREY = PALETTE[7]
MOST_CELLS = 4_000  # cells in a UMAP: more make the page slow and show no more
MOST_CELLS_BY_BATCH = 1_500  # cells in the same UMAP by batch
MOST_POINTS = 400  # points of a curve
TAILS_FRAC = 0.005  # share of cells that a histogram does not draw, at both ends together
PICK = {"name": "pick", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"}
ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}
PICKED = {"condition": {"param": "pick", "value": 0.9}, "value": 0.08}


def curves(title: str, series: Mapping[str, Sequence[tuple[float, float]]], y: str) -> Figure:
    """(step, value) of each run, a colour each."""
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
    log = bool(values) and min(values) > 0 and max(values) > 5 * min(values)
    spec = _lines([*runs], "step", "loss", values, log)
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

    Only bins of the central 99.5 % of cells are drawn, or one outlier would squeeze them; the title
    counts the others.
    """
    n_until = np.cumsum(before)
    n_cells = n_until[-1]
    tail = TAILS_FRAC / 2 * n_cells
    is_drawn = (n_until > tail) & (n_until - before < n_cells - tail)
    rows = []
    for number in np.flatnonzero(is_drawn).tolist():
        rows.append(
            {
                "from": _short(edges[number]),
                "to": _short(edges[number + 1]),
                "before": int(before[number]),
                "kept": int(after[number]),
            }
        )
    beyond = int(n_cells - sum(row["before"] for row in rows))
    if beyond:
        name += f" ({beyond:,} cells beyond)"
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
    """Mean and sd by size, a line for each of `curve.lines`.

    The law is dashed, the best baseline dotted.
    """
    rows: list[dict[str, Any]] = []
    lines = {str(line["name"] or "runs"): line for line in curve["lines"]}
    for name, line in lines.items():
        for point in line["points"]:
            mean = point["mean"]
            sd = point["sd"] or 0.0
            rows.append(
                {
                    "name": name,
                    "of": "runs",
                    "size": point["size"],
                    "value": _short(mean),
                    "low": _short(mean - sd),
                    "high": _short(mean + sd),
                }
            )
        law = line.get("law")
        if law is not None:
            sizes = [point["size"] for point in line["points"]]
            for x in np.geomspace(min(sizes), max(sizes), 40).tolist():
                y = law["floor"] + law["factor"] * x ** -law["exponent"]
                rows.append({"name": name, "of": "law", "size": _short(x), "value": _short(y)})
    baseline = curve["baseline"]
    if baseline is not None:
        value = _short(baseline["value"])
        rows.append({"name": baseline["name"], "of": "baseline", "value": value})
    scale = {"type": "log"} if all(row.get("size", 1) > 0 for row in rows) else {}
    encoding = _lines([*lines], "size", curve["metric"])["encoding"]
    del encoding["opacity"]
    encoding["x"] = _number("size", title=curve["quantity"].replace("_", " "), scale=scale)
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


def _layer(kind: str, mark: Any, encoding: dict[str, Any]) -> dict[str, Any]:
    """Marks of the rows of one kind."""
    only = [{"filter": f"datum.of == '{kind}'"}]
    return {"transform": only, "mark": mark, "encoding": encoding}


def umap(
    title: str,
    cells: Sequence[Mapping[str, str]],
    labels: Sequence[str],
    by: str = "label",
    most: int = MOST_CELLS,
) -> Figure:
    """Cells at UMAP coordinates, at most `most` of them, coloured by a column; held-out cells are
    circles.
    """
    # shuffle cells by a fixed seed, or the class drawn last would cover the others
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(cells))[:most]
    codes = {label: number for number, label in enumerate(labels)}
    # short keys, repeated in every row: `c` is the code of the value, `h` 1 for held-out cells
    rows = []
    for cell in (cells[index] for index in order):
        row = {"x": round(float(cell["x"]), 3), "y": round(float(cell["y"]), 3)}
        row["c"] = codes.get(cell[by], -1)
        row["h"] = int(cell["heldout"] == "1")
        rows.append(row)
    names = [*labels, f"no {by}"]
    coded = [{"c": code, "name": name} for code, name in zip([*codes.values(), -1], names)]
    colours = [colour(number) for number in range(len(labels))]
    ink: dict[str, Any] = {"grid": False, "labels": False, "titleColor": GREY, "domain": False}
    tint: dict[str, Any] = {
        "field": "name",
        "type": "nominal",
        "scale": {"domain": names, "range": [*colours, "#9aa0a6"]},
        "legend": {"labelColor": GREY},
    }
    held = {"domain": ["held out", "seen in training"], "range": ["circle", "triangle-up"]}
    spec = {
        "height": 340,
        "transform": [
            {"lookup": "c", "from": {"data": {"values": coded}, "key": "c", "fields": ["name"]}},
            {"calculate": "datum.h ? 'held out' : 'seen in training'", "as": "cells"},
        ],
        "params": [PICK, ZOOM],
        "mark": {"type": "point", "filled": True, "size": float(np.clip(9000 / max(len(rows), 1), 6, 30))},
        "encoding": {
            "x": _number("x", title="UMAP 1", axis=ink, scale={"zero": False}),
            "y": _number("y", title="UMAP 2", axis=ink, scale={"zero": False}),
            "color": tint, "shape": {"field": "cells", "scale": held, "legend": {"labelColor": GREY}},
            "opacity": PICKED,
            "tooltip": [{"field": "name", "title": by}, {"field": "cells"}],
        },
    }  # fmt: skip
    return Figure(title, rows, spec, canvas=True)


def confusion(title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Share of the cells of each true class by predicted class; pairs without cells are left out."""
    rows = []
    for true, class_counts in zip(classes, counts):
        for predicted, n in zip(classes, class_counts):
            if n:
                share = _short(n / sum(class_counts))
                rows.append({"true": true, "predicted": predicted, "cells": n, "share": share})
    encoding: dict[str, Any] = {}
    for axis, field in (("y", "true"), ("x", "predicted")):
        encoding[axis] = {
            "field": field,
            "type": "nominal",
            "sort": list(classes),
            "title": field,
            "scale": {"domain": list(classes)},
        }
    scale = {"domain": [0, 1], "range": [0.06, 1]}
    encoding["opacity"] = _number("share", scale=scale, legend=None)
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


def points(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of the lines in which `key`, or the largest of its values over ranks, is a
    finite number.
    """
    found = []
    for line in lines:
        value = line.get(key)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, int | float) and np.isfinite(value):
            found.append((line["step"], float(value)))
    return found


def _number(field: str, **options: Any) -> dict[str, Any]:
    """Encoding of a field of numbers."""
    return {"field": field, "type": "quantitative", **options}


def _lines(
    names: Sequence[str], x: str, y: str, values: Sequence[float] = (), log: bool = False
) -> dict[str, Any]:
    """Lines over `x`, a colour each; a linear y axis has head-room above the highest of `values`."""
    scale: dict[str, Any] = {"type": "log"} if log else {"zero": False, "nice": True}
    if values and not log:
        scale["domainMax"] = _short(max(values) + (max(values) - min(values)) / 20)
    tint: dict[str, Any] = {
        "field": "name",
        "type": "nominal",
        "scale": {"domain": [*names], "range": [colour(number) for number in range(len(names))]},
    }
    if len(names) < 2:
        tint["legend"] = None
    title = y.replace("_", " ")
    return {
        "params": [PICK, ZOOM],
        "mark": {"type": "line", "point": {"size": 14}, "strokeWidth": 1.5},
        "encoding": {
            "x": _number(x, title=x, axis={"format": ",d", "grid": False}),
            "y": _number("value", title=title, axis={"tickCount": 5}, scale=scale),
            "color": tint,
            "opacity": PICKED,
            "tooltip": [{"field": "name"}, _number(x), _number("value")],
        },
    }


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about MOST_POINTS points, the last one among them."""
    step = max(1, -(-len(points) // MOST_POINTS))
    return [*points[:-1:step], *points[-1:]]


def _short(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")
