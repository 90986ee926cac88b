"""Figures of the report: Vega-Lite specifications, which a browser draws live and vl-convert draws
as SVG.

Field names are ours; user text appears as values and titles alone, which Vega-Lite draws literally.
Ink is `currentColor`, so that figures follow the page's colours.
"""

import base64
import csv
import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import vl_convert
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from cellmill.errors import DataError
from cellmill.files import atomic_path, user_cache, write_text

PALETTE = (
    "#4e79a7", "#e08f45", "#5f9e6e", "#c85c5c", "#8a6fae", "#9c7a5b", "#d38bb4", "#7f8791", "#b3a63f", "#55a9b5",
    "#2f4b7c", "#f2b66d", "#a3c98f", "#e79a94", "#bba8d6", "#c9ad92", "#6b4f3a", "#b9bec5", "#dcd57f", "#9fd3da",
)  # fmt: skip
"""Twenty colours, distinguishable on light and dark background; they repeat from the twenty-first
class on.
"""
GREY = PALETTE[7]
MOST_CELLS = 4_000  # of a UMAP: more make the page slow and show no more
MOST_CELLS_BY_BATCH = 1_500  # of the same UMAP by batch
MOST_POINTS = 400  # of a curve
MOST_STILL_POINTS = 200  # of all curves of a static figure, which has lines alone above
TAILS_FRAC = 0.005  # of cells that a histogram does not draw, at both ends together
FORMULA = ("=", "+", "@", "\t")  # how a text begins that a spreadsheet computes
WIDTH = 500  # of a static figure, in pixels; a live one takes the width of its card

CONFIG: dict[str, Any] = {
    "background": None,
    "view": {"stroke": None},
    "font": "system-ui, sans-serif",
    "range": {"category": list(PALETTE)},
    "axis": {
        **dict.fromkeys(("labelColor", "titleColor", "domainColor", "gridColor"), "currentColor"),
        "gridOpacity": 0.14, "domainOpacity": 0.3, "ticks": False, "labelPadding": 5, "titleFontWeight": "normal",
        "labelFontSize": 11, "titleFontSize": 12, "labelLimit": 230, "labelSeparation": 8,
    },
    "legend": {
        **dict.fromkeys(("labelColor", "titleColor"), "currentColor"), "orient": "bottom", "title": None,
        "columns": 2, "labelFontSize": 11, "labelLimit": 220, "symbolLimit": 60,
    },
}  # fmt: skip
PICK = {"name": "pick", "select": {"type": "point", "fields": ["name"]}, "bind": "legend"}
ZOOM = {
    "name": "zoom",
    "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}
PICKED = {"condition": {"param": "pick", "value": 0.9}, "value": 0.08}


@dataclass(frozen=True)
class Figure:
    title: str  # what it shows, in words: its name to a screen reader, and of its files
    rows: list[dict[str, Any]]  # all that is drawn, as a table
    spec: dict[str, Any]  # Vega-Lite, without data
    canvas: bool = False  # thousands of marks: drawn as a bitmap

    @cached_property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row))

    @property
    def complete(self) -> dict[str, Any]:
        """The specification with what all figures share."""
        return self.spec | {"config": CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}


class Drawings:
    """Figures of one page in their order: a picture of each for print and without scripts, and its
    specification.
    """

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.pictures: list[str] = []  # of each, as a standalone SVG

    def draw(self, figure: Figure) -> Markup:
        """The `<figure>` element with the static picture; the same numbers give the same bytes."""
        number = len(self.figures)
        title = escape(figure.title)
        spec = figure.complete | {"data": {"values": figure.rows}, "width": WIDTH}
        # the figure has a label, and each mark's would be half of the bytes
        spec["config"] = CONFIG | {"aria": False}
        if len(figure.rows) > MOST_STILL_POINTS and "point" in spec.get("mark", {}):
            spec["mark"] = spec["mark"] | {"point": False}
        svg = vl_convert.vegalite_to_svg(spec)
        # ids of this figure alone, which do not depend on what the process drew before
        names = dict.fromkeys(re.findall(r'id="((?:clip|gradient)[\w-]*)"', svg))
        new = {name: f"f{number}-{order}" for order, name in enumerate(names)}
        svg = re.sub(r'(id="|url\(#|href="#)([\w-]+)', lambda m: m[1] + new.get(m[2], m[2]), svg)
        self.figures.append(figure)
        self.pictures.append(svg)
        if figure.canvas:  # thousands of circles as text are larger than as a bitmap
            png = base64.b64encode(compressed(vl_convert.vegalite_to_png(spec, scale=1.5))).decode()
            still = f'<img src="data:image/png;base64,{png}" alt="{title}">'
        else:
            inline = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
            still = inline.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
        return Markup(
            f'<figure class="chart" data-chart="{number}" aria-label="{title}">'
            f'<div class="still">{still}</div></figure>'
        )

    def save(self, folder: Path) -> None:
        """Each figure as SVG, its data as CSV; files of an earlier page are removed."""
        for old in [*folder.glob("*.svg"), *folder.glob("*.csv")]:
            old.unlink()
        for number, (figure, svg) in enumerate(zip(self.figures, self.pictures), start=1):
            name = f"{number:03}_{re.sub(r'[^A-Za-z0-9.-]+', '_', figure.title).strip('_.')[:100]}"
            write_text(folder / f"{name}.svg", svg.replace("currentColor", "#222222"))
            with (
                atomic_path(folder / f"{name}.csv") as path,
                open(path, "w", encoding="utf-8", newline="") as file,
            ):
                writer = csv.DictWriter(file, figure.keys, lineterminator="\n")
                writer.writeheader()
                for row in figure.rows:
                    writer.writerow(
                        row | {k: f"'{v}" for k, v in row.items() if str(v).startswith(FORMULA)}
                    )

    @property
    def data(self) -> Markup:
        """The figures as JSON for the page's script, safe inside a script element."""
        shown = [
            {"title": f.title, "canvas": f.canvas, "keys": f.keys, "spec": f.complete,
             "rows": [[row.get(key) for key in f.keys] for row in f.rows]}
            for f in self.figures
        ]  # fmt: skip
        return htmlsafe_json_dumps(
            shown, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )


def compressed(png: bytes) -> bytes:
    """The same picture in a third of the bytes: vl-convert compresses for speed."""
    begin = end = png.index(b"IDAT") - 4
    pixels = b""
    while png[end + 4 : end + 8] == b"IDAT":
        size = int.from_bytes(png[end : end + 4], "big")
        pixels = pixels + png[end + 8 : end + 8 + size]
        end = end + size + 12
    chunk = b"IDAT" + zlib.compress(zlib.decompress(pixels), 9)
    framed = (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    return png[:begin] + framed + png[end:]


@cache
def scripts() -> tuple[Markup, Markup]:
    """Vega with vega-embed, and the page's own script. The first takes two seconds to bundle, so it is kept for the
    user: in a folder of several users, each could put scripts into the pages of the others.
    """
    kept = user_cache() / f"vega-{version('vl-convert-python')}.js"
    try:
        bundle = kept.read_text(encoding="utf-8")
    except OSError:
        bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub asks for an optional one
        with suppress(OSError, DataError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, bundle)
    return Markup(bundle), Markup(text_of("page.js"))


def allowed() -> str:
    """`script-src` of the page: the hashes of its own scripts and nothing else."""
    digests = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts()
    )
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def text_of(name: str) -> str:
    return files("cellmill.report").joinpath(name).read_text(encoding="utf-8")


def curves(title: str, series: Mapping[str, Sequence[tuple[float, float]]], y: str) -> Figure:
    """(step, value) of each run, a colour each."""
    rows = [
        {"name": name, "step": step, "value": _short(v)}
        for name, of in series.items()
        for step, v in _thinned(of)
    ]
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
    dash["legend"] = {"orient": "top"}  # beside the runs below, a narrow page would cut it
    spec["encoding"]["color"].setdefault(
        "legend", {"values": [name for name, kinds in runs.items() if kinds]}
    )
    return Figure(
        title, rows, spec | {"height": 250, "encoding": spec["encoding"] | {"strokeDash": dash}}
    )


def histogram(
    title: str, edges: Sequence[float], before: Sequence[int], after: Sequence[int], name: str
) -> Figure:
    """Cells per bin before QC (grey) and after (blue); log axis for geometric edges.

    Only bins of the central 99.5 % of cells are drawn, or one outlier would squeeze them; the title
    counts the others.
    """
    below = np.cumsum(before)
    tail = TAILS_FRAC / 2 * sum(before)
    drawn = (below > tail) & (below - before < below[-1] - tail)
    rows = [
        {"from": _short(low), "to": _short(high), "before": int(was), "kept": int(kept)}
        for low, high, was, kept, inside in zip(edges[:-1], edges[1:], before, after, drawn)
        if inside
    ]
    beyond = int(sum(before) - sum(row["before"] for row in rows))
    if beyond:
        name += f" ({beyond:,} cells beyond)"
    scale = {"type": "log"} if edges[0] > 0 else {"zero": False}
    x = _number("from", scale=scale, title=name, axis={"grid": False})
    shared = {
        "x": x,
        "x2": {"field": "to"},
        "tooltip": [*map(_number, ("from", "to", "before", "kept"))],
    }
    layers = [
        {"mark": {"type": "rect", "color": tint, "opacity": opacity},
         "encoding": shared | {"y": _number(field, title="cells"), "y2": {"datum": 0}}}
        for field, tint, opacity in (("before", GREY, 0.45), ("kept", PALETTE[0], 0.9))
    ]  # fmt: skip
    return Figure(title, rows, {"height": 140, "layer": layers})


def sizes_curve(title: str, curve: Mapping[str, Any]) -> Figure:
    """Mean and sd by size, a line for each of `curve.lines`; the law dashed, the best baseline
    dotted.
    """
    rows: list[dict[str, Any]] = []
    lines = {str(line["name"] or "runs"): line for line in curve["lines"]}
    for name, line in lines.items():
        for point in line["points"]:
            sd = point["sd"] or 0.0
            rows.append({"name": name, "of": "runs", "size": point["size"], "value": _short(point["mean"]),
                         "low": _short(point["mean"] - sd), "high": _short(point["mean"] + sd)})  # fmt: skip
        law = line.get("law")
        if law is not None:
            sizes = [point["size"] for point in line["points"]]
            for x in np.geomspace(min(sizes), max(sizes), 40).tolist():
                y = law["floor"] + law["factor"] * x ** -law["exponent"]
                rows.append({"name": name, "of": "law", "size": _short(x), "value": _short(y)})
    if curve["baseline"] is not None:
        rows.append(
            {
                "name": curve["baseline"]["name"],
                "of": "baseline",
                "value": _short(curve["baseline"]["value"]),
            }
        )
    spec = _lines([*lines], "size", curve["metric"])
    scale = {"type": "log"} if all(row.get("size", 1) > 0 for row in rows) else {}
    x = _number("size", title=curve["quantity"].replace("_", " "), scale=scale)
    encoding = {key: value for key, value in spec["encoding"].items() if key != "opacity"} | {
        "x": x
    }
    bars = {
        "x": x,
        "y": encoding["y"] | {"field": "low"},
        "y2": {"field": "high"},
        "color": encoding["color"],
    }
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
    title: str,
    cells: Sequence[Mapping[str, str]],
    labels: Sequence[str],
    by: str = "label",
    most: int = MOST_CELLS,
) -> Figure:
    """Cells at UMAP coordinates, at most `most` of them, coloured by a column; held-out cells are
    circles.
    """
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
    tip = [
        {"field": "true"},
        {"field": "predicted"},
        {"field": "cells"},
        {"field": "share", "format": ".1%"},
    ]
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
    """(step, value) of the lines in which `key`, or the largest of its values over ranks, is a
    finite number.
    """
    values = (
        (line["step"], max(v) if isinstance(v := line.get(key), list) and v else v)
        for line in lines
    )
    return [
        (step, float(value))
        for step, value in values
        if isinstance(value, int | float) and np.isfinite(value)
    ]


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
    return [*of[:-1:every], *of[-1:]]


def _short(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")
