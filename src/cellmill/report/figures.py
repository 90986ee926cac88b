"""Figures of the report as Vega-Lite specifications, which a browser draws live and vl-convert draws as SVG.

Field names are ours; user text appears as values and titles alone, which Vega-Lite draws literally. Ink is
`currentColor`, so that figures follow the page's colours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

PALETTE = (
    "#4e79a7", "#e08f45", "#5f9e6e", "#c85c5c", "#8a6fae", "#9c7a5b", "#d38bb4", "#7f8791", "#b3a63f", "#55a9b5",
    "#2f4b7c", "#f2b66d", "#a3c98f", "#e79a94", "#bba8d6", "#c9ad92", "#6b4f3a", "#b9bec5", "#dcd57f", "#9fd3da",
)  # fmt: skip
"""Twenty colours, distinguishable on light and dark background; they repeat from the twenty-first class on."""
GREY = PALETTE[7]
MOST_CELLS = 4_000  # of a UMAP: more make the page slow and show no more
MOST_CELLS_BY_BATCH = 1_500  # of the same UMAP by batch
MOST_POINTS = 400  # of a curve
TAILS_FRAC = 0.005  # of cells that a histogram does not draw, at both ends together
WIDTH = 500  # of a static figure, in pixels; a live one takes the width of its card

CONFIG: dict[str, Any] = {
    "background": None,
    "view": {"stroke": None},
    "font": "system-ui, sans-serif",
    "range": {"category": list(PALETTE)},
    "axis": {
        **dict.fromkeys(("labelColor", "titleColor", "domainColor"), "currentColor"),
        "gridColor": "currentColor",
        "gridOpacity": 0.14,
        "domainOpacity": 0.3,
        "ticks": False,
        "labelPadding": 5,
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 12,
        "labelLimit": 230,
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "orient": "bottom",
        "title": None,
        "columns": 2,
        "labelFontSize": 11,
        "labelLimit": 220,
        "symbolLimit": 60,
    },
}
PICK = {"name": "pick", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"}
ZOOM = {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"}
PICKED = {"condition": {"param": "pick", "value": 0.9}, "value": 0.08}


@dataclass(frozen=True)
class Figure:
    title: str  # what it shows, in words: its name to a screen reader, and of its files
    rows: list[dict[str, Any]]  # all that is drawn, as a table
    spec: dict[str, Any]  # Vega-Lite, without data
    canvas: bool = False  # thousands of marks: drawn as a bitmap


def curves(title: str, series: Mapping[str, Sequence[tuple[float, float]]], y: str) -> Figure:
    """(step, value) of each run, a colour each."""
    rows = [{"name": name, "step": step, "value": _short(v)} for name, of in series.items() for step, v in _thinned(of)]
    values = [value for of in series.values() for _, value in of]
    return Figure(title, rows, {"height": 210} | _lines([*series], "step", y, values))


def losses(title: str, runs: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> Figure:
    """Loss of training (thin) and validation (with points) over steps, a colour for each run."""
    rows = [
        {"name": name, "of": of, "step": step, "value": _short(value)}
        for name, kinds in runs.items()
        for of, points in kinds.items()
        for step, value in _thinned(points)
    ]
    values = [value for kinds in runs.values() for points in kinds.values() for _, value in points]
    # on a linear axis, the first steps would flatten the rest
    log = bool(values) and min(values) > 0 and max(values) > 5 * min(values)
    spec = _lines([*runs], "step", "loss", values, log)
    dash = {"field": "of", "sort": ["validation", "training"], "scale": {"range": [[1, 0], [3, 3]]}}
    return Figure(title, rows, spec | {"height": 250, "encoding": spec["encoding"] | {"strokeDash": dash}})


def histogram(title: str, edges: Sequence[float], before: Sequence[int], after: Sequence[int], name: str) -> Figure:
    """Cells per bin before QC (grey) and after (blue); log axis for geometric edges.

    Only bins of the central 99.5 % of cells are drawn, or one outlier would squeeze them; the title counts the others.
    """
    below, tail = np.cumsum(before), TAILS_FRAC / 2 * sum(before)
    drawn = (below > tail) & (below - before < below[-1] - tail)
    rows = [
        {"from": _short(low), "to": _short(high), "before": int(was), "kept": int(kept)}
        for low, high, was, kept, inside in zip(edges[:-1], edges[1:], before, after, drawn)
        if inside
    ]
    if beyond := int(sum(before) - sum(row["before"] for row in rows)):
        name += f" ({beyond:,} cells beyond)"
    scale = {"type": "log"} if edges[0] > 0 else {"zero": False}
    x = _number("from", scale=scale, title=name, axis={"grid": False})
    shared = {"x": x, "x2": {"field": "to"}, "tooltip": [*map(_number, ("from", "to", "before", "kept"))]}
    layers = [
        {"mark": {"type": "rect", "color": tint, "opacity": opacity},
         "encoding": shared | {"y": _number(field, title="cells"), "y2": {"datum": 0}}}
        for field, tint, opacity in (("before", GREY, 0.45), ("kept", PALETTE[0], 0.9))
    ]  # fmt: skip
    return Figure(title, rows, {"height": 140, "layer": layers})


def sizes_curve(title: str, curve: Mapping[str, Any]) -> Figure:
    """Mean and sd by size, a line for each of `curve.lines`; the law dashed, the best baseline dotted."""
    rows: list[dict[str, Any]] = []
    lines = {str(line["name"] or "runs"): line for line in curve["lines"]}
    for name, line in lines.items():
        for point in line["points"]:
            sd = point["sd"] or 0.0
            rows.append({"name": name, "of": "runs", "size": point["size"], "value": _short(point["mean"]),
                         "low": _short(point["mean"] - sd), "high": _short(point["mean"] + sd)})  # fmt: skip
        if (law := line.get("law")) is not None:
            sizes = [point["size"] for point in line["points"]]
            for x in np.geomspace(min(sizes), max(sizes), 40).tolist():
                y = law["floor"] + law["factor"] * x ** -law["exponent"]
                rows.append({"name": name, "of": "law", "size": _short(x), "value": _short(y)})
    if curve["baseline"] is not None:
        rows.append({"name": curve["baseline"]["name"], "of": "baseline", "value": _short(curve["baseline"]["value"])})
    spec = _lines([*lines], "size", curve["metric"])
    scale = {"type": "log"} if all(row.get("size", 1) > 0 for row in rows) else {}
    x = _number("size", title=curve["quantity"].replace("_", " "), scale=scale)
    encoding = {key: value for key, value in spec["encoding"].items() if key != "opacity"} | {"x": x}
    bars = {"x": x, "y": encoding["y"] | {"field": "low"}, "y2": {"field": "high"}, "color": encoding["color"]}
    marks: list[tuple[str, Any, dict[str, Any]]] = [
        ("runs", {"type": "line", "point": True}, encoding),
        ("law", {"type": "line", "strokeDash": [5, 4]}, encoding),
        ("runs", "rule", bars),
        ("baseline", {"type": "rule", "strokeDash": [2, 3], "color": GREY},
         {"y": _number("value"), "tooltip": {"field": "name"}}),
    ]  # fmt: skip
    layers = [
        {"transform": [{"filter": f"datum.of == '{of}'"}], "mark": mark, "encoding": encoded}
        for of, mark, encoded in marks
    ]
    return Figure(title, rows, {"height": 230, "layer": layers})


def umap(
    title: str, cells: Sequence[Mapping[str, str]], labels: Sequence[str], by: str = "label", most: int = MOST_CELLS
) -> Figure:
    """Cells at UMAP coordinates, at most `most` of them, coloured by a column; held-out cells are circles."""
    # shuffled, with a fixed seed: the class drawn last would cover the others
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(cells))[:most]
    shown = [cells[index] for index in order]
    codes = {label: number for number, label in enumerate(labels)}
    rows = [
        {"x": round(float(cell["x"]), 3), "y": round(float(cell["y"]), 3), "c": codes.get(cell[by], -1),
         "h": int(cell["heldout"] == "1")}
        for cell in shown
    ]  # fmt: skip
    names = [*labels, f"no {by}"]
    coded = [{"c": code, "name": name} for code, name in zip([*codes.values(), -1], names)]
    ink: dict[str, Any] = {"grid": False, "labels": False, "titleColor": GREY, "domain": False}
    tint: dict[str, Any] = {
        "field": "name", "type": "nominal",
        "scale": {"domain": names, "range": [*(colour(i) for i in range(len(labels))), "#9aa0a6"]},
        "legend": {"labelColor": GREY},
    }  # fmt: skip
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
    rows = [
        {"true": true, "predicted": predicted, "cells": n, "share": _short(n / sum(of_class))}
        for true, of_class in zip(classes, counts)
        for predicted, n in zip(classes, of_class)
        if n
    ]
    axes = {
        axis: {"field": field, "type": "nominal", "sort": list(classes), "title": field,
               "scale": {"domain": list(classes)}}
        for axis, field in (("y", "true"), ("x", "predicted"))
    }  # fmt: skip
    tip = [{"field": "true"}, {"field": "predicted"}, {"field": "cells"}, {"field": "share", "format": ".1%"}]
    opacity = _number("share", scale={"domain": [0, 1], "range": [0.06, 1]}, legend=None)
    spec = {
        "height": {"step": 20},
        "mark": {"type": "rect", "color": PALETTE[0]},
        "encoding": axes | {"opacity": opacity, "tooltip": tip},
    }
    return Figure(title, rows, spec)


def colour(number: int) -> str:
    """Colour of class or run `number`."""
    return PALETTE[number % len(PALETTE)]


def points(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) of the lines in which `key`, or the largest of its values over ranks, is a finite number."""
    values = ((line["step"], max(v) if isinstance(v := line.get(key), list) and v else v) for line in lines)
    return [(step, float(value)) for step, value in values if isinstance(value, int | float) and np.isfinite(value)]


def _number(field: str, **options: Any) -> dict[str, Any]:
    """Encoding of a field of numbers."""
    return {"field": field, "type": "quantitative", **options}


def _lines(names: Sequence[str], x: str, y: str, values: Sequence[float] = (), log: bool = False) -> dict[str, Any]:
    """Lines over `x`, a colour each; a linear y axis has head-room above the highest of `values`."""
    scale: dict[str, Any] = {"type": "log"} if log else {"zero": False, "nice": True}
    if values and not log:
        scale["domainMax"] = _short(max(values) + (max(values) - min(values)) / 20)
    tint: dict[str, Any] = {
        "field": "name", "type": "nominal",
        "scale": {"domain": [*names], "range": [colour(i) for i in range(len(names))]},
    } | ({} if len(names) > 1 else {"legend": None})  # fmt: skip
    return {
        "params": [PICK, ZOOM],
        "mark": {"type": "line", "point": {"size": 14}, "strokeWidth": 1.5},
        "encoding": {
            "x": _number(x, title=x, axis={"format": ",d", "grid": False}),
            "y": _number("value", title=y.replace("_", " "), axis={"tickCount": 5}, scale=scale),
            "color": tint, "opacity": PICKED, "tooltip": [{"field": "name"}, _number(x), _number("value")],
        },
    }  # fmt: skip


def _thinned(of: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = max(1, -(-len(of) // MOST_POINTS))
    return [*chain(of[:-1:every], of[-1:])]


def _short(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")
