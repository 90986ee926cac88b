"""Static pictures of charts, as SVG.

vl-convert draws them from Vega-Lite specifications. Of a UMAP, which has thousands of marks, it
draws only the frame (axis titles and legend), once for all UMAPs with the same labels; the cells
are added here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import vl_convert

# attributes without effect: for pointers and screen readers, or equal to the default
SILENT = re.compile(r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"| opacity="1"| d=""')
LONG_NUMBER = re.compile(r"\d+\.\d{3,}(?:e-\d+)?")
BACKGROUND = re.compile(r'<path d="M0,0h(\d+)v(\d+)h-\d+Z"/>')
"""Background of a chart's plot, with its width and height in pixels."""


def draw_svg(spec: Mapping[str, Any], number: int) -> str:
    """Chart `number` of a page as a standalone SVG. `spec` contains the data."""
    svg = vl_convert.vegalite_to_svg(_without_selections(spec))
    # number the ids within this chart: vl-convert counts them over the whole process
    old_ids = dict.fromkeys(re.findall(r'id="((?:clip|gradient)[\w-]*)"', svg))
    new_ids = {old: f"f{number}-{order}" for order, old in enumerate(old_ids)}
    renamed = re.sub(
        r'(id="|url\(#|href="#)([\w-]+)',
        lambda match: match[1] + new_ids.get(match[2], match[2]),
        svg,
    )
    return _shorten(renamed)


def draw_umap_svg(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], digits: int) -> str:
    """A UMAP as a standalone SVG, its coordinates rounded to `digits` decimals of a pixel.

    `spec` has no data. A cell of `rows` has coordinates `x` and `y`, the index `c` of its colour,
    and `h`, 1 for a held-out cell.
    """
    frame = _draw_frame(json.dumps(_without_selections(spec)))
    background = BACKGROUND.search(frame)
    assert background is not None
    width, height = map(int, background.groups())
    radius = spec["mark"]["size"] ** 0.5 / 2
    left = _scale([row["x"] for row in rows], radius, width - radius)
    top = _scale([row["y"] for row in rows], height - radius, radius)
    rise = radius * 3**0.5 / 2
    triangle = f"M0,{-rise:.2f}L{-radius:.2f},{rise:.2f}H{radius:.2f}Z"
    arc = f"A{radius:.2f},{radius:.2f},0,1,1"
    circle = f"M{radius:.2f},0{arc},{-radius:.2f},0{arc},{radius:.2f},0"
    colours = spec["encoding"]["color"]["scale"]["range"]
    marks = []
    for row, x, y in zip(rows, left.round(digits).tolist(), top.round(digits).tolist()):
        shape = circle if row["h"] else triangle
        marks.append(
            f'<path transform="translate({x:g},{y:g})" d="{shape}" fill="{colours[row["c"]]}"/>'
        )
    # opacity of the fill: opacity of each mark would take twice the time to draw as a bitmap
    cells = f'<g fill-opacity="0.9">{"".join(marks)}</g>'
    return frame[: background.end()] + cells + frame[background.end() :]


@lru_cache(maxsize=100)
def _draw_frame(spec: str) -> str:
    """A chart without data as a standalone SVG. `spec` is JSON text."""
    return _shorten(vl_convert.vegalite_to_svg(spec))


def _scale(values: Sequence[float], begin: float, end: float) -> np.ndarray:
    """`values` in pixels, (values,) float64: the lowest becomes `begin`, the highest `end`."""
    array = np.array(values, np.float64)
    share = (array - array.min()) / (np.ptp(array) or 1)
    return begin + share * (end - begin)


def _without_selections(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The specification without what only a pointer uses."""
    static = {key: part for key, part in spec.items() if key != "params"}
    if "params" in spec:
        opacity = {"value": spec["encoding"]["opacity"]["condition"]["value"]}
        static["encoding"] = spec["encoding"] | {"opacity": opacity}
    return static


def _shorten(svg: str) -> str:
    """The SVG without attributes that change no pixel, and with two decimals in its numbers."""
    return re.sub(r"<[^>]*>", _shorten_tag, svg)


def _shorten_tag(match: re.Match[str]) -> str:
    tag = SILENT.sub("", match[0])
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}", tag)
