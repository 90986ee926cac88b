"""UMAPs: the chart, and its static picture.

vl-convert would draw thousands of cells slowly. It draws only the frame (titles of axes, legend),
once for all UMAPs with equal specifications. The cells are added here, behind the path of the
frame's background.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import vl_convert

from cellmill.report.collect import UmapCells
from cellmill.report.drawing.chart import Chart, ChartRow, Spec, colour, read_template
from cellmill.report.drawing.svg import drop_selections, minify

LIGHT_GREY = "#9aa0a6"
MAX_CELLS = 4_000  # per UMAP; more would slow the page and show nothing new
MIN_CELLS = 500  # per UMAP, however many UMAPs the page has
# all UMAPs by label of the page together; MIN_CELLS takes precedence
MAX_PAGE_CELLS = 60_000
MAX_CELLS_BY_BATCH = 1_500  # per UMAP by batch, which shows cells of the UMAP by label again
# areas in square pixels: all cells of a UMAP together, and the limits for one cell
TOTAL_CELL_AREA = 30_000
MIN_CELL_AREA = 14
MAX_CELL_AREA = 60
BACKGROUND = re.compile(r'<path d="M0,0h(\d+)v(\d+)h-\d+Z"/>')
"""Background of a chart's plot, with its width and height in pixels."""


def find_max_cells(n_umaps: int) -> int:
    """Largest number of cells in each of the page's `n_umaps` UMAPs by label.

    UMAPs by batch are extra: each has at most MAX_CELLS_BY_BATCH cells, and no more than the UMAP
    by label.
    """
    return min(MAX_CELLS, max(MIN_CELLS, MAX_PAGE_CELLS // max(n_umaps, 1)))


def list_categories(cells: UmapCells, column: str = "label") -> list[str]:
    """Distinct labels or batches of the cells of a UMAP, the most frequent first."""
    counts = Counter(cells.texts[column])
    del counts[""]
    return sorted(counts, key=lambda text: (-counts[text], text))


def make_umap_chart(
    title: str,
    cells: UmapCells,
    categories: Sequence[str],
    column: str = "label",
    max_cells: int = MAX_CELLS,
) -> Chart:
    """At most `max_cells` cells at their UMAP coordinates, coloured by `column` (label or batch).

    `categories` are the distinct texts of the column, from `list_categories`. Held-out cells are
    circles, others are triangles.

    To keep the page small, a row has the code of its category, and the browser looks up the text.
    Coordinates have two decimals, because more would not be visible.
    """
    if column == "batch":
        max_cells = min(max_cells, MAX_CELLS_BY_BATCH)
    codes = {category: code for code, category in enumerate(categories)}
    # shuffle cells by a fixed seed; otherwise the category drawn last would cover the others
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(cells.x))
    rows = []
    for index in order[:max_cells].tolist():
        rows.append(
            {
                "x": round(cells.x[index], 2),
                "y": round(cells.y[index], 2),
                # -1 for a cell without a category: the last name and colour of the legend
                column: codes.get(cells.texts[column][index], -1),
                "held_out": cells.is_held_out[index],
            }
        )
    absent = f"no {column}"
    while absent in categories:  # a batch may have this name; equal names would share a colour
        absent = f"({absent})"
    has_absent = any(row[column] == -1 for row in rows)
    legend_names = [*categories, absent]
    legend_colours = [*map(colour, range(len(categories))), LIGHT_GREY]
    spec = read_template("umap")
    lookup_rows = [{"code": code, "name": category} for category, code in codes.items()]
    lookup_rows.append({"code": -1, "name": absent})
    spec["transform"][0]["lookup"] = column
    spec["transform"][0]["from"]["data"]["values"] = lookup_rows
    # fewer cells are drawn larger
    size = TOTAL_CELL_AREA / max(len(rows), 1)
    spec["mark"]["size"] = float(np.clip(size, MIN_CELL_AREA, MAX_CELL_AREA))
    spec["encoding"]["color"]["scale"] = {"domain": legend_names, "range": legend_colours}
    if not has_absent:
        spec["encoding"]["color"]["legend"]["values"] = categories
    spec["encoding"]["tooltip"][0]["title"] = column
    return Chart(title, rows, spec, is_umap=True, texts_by_code={column: [*categories, ""]})


def draw_umap_svg(spec: Spec, rows: Sequence[ChartRow], decimals: int) -> str:
    """A chart of `make_umap_chart` as a standalone SVG, with coordinates in pixels to `decimals`.

    `spec` has no data.
    """
    frame = _draw_frame(json.dumps(drop_selections(spec)))
    background = BACKGROUND.search(frame)
    assert background is not None
    width, height = map(int, background.groups())
    # marks as Vega draws them: `size` is the square of their width
    radius = spec["mark"]["size"] ** 0.5 / 2
    x_pixels = _to_pixels([row["x"] for row in rows], radius, width - radius).round(decimals)
    y_pixels = _to_pixels([row["y"] for row in rows], height - radius, radius).round(decimals)
    half_height = radius * 3**0.5 / 2
    triangle = f"M0,{-half_height:.2f}L{-radius:.2f},{half_height:.2f}H{radius:.2f}Z"
    arc = f"A{radius:.2f},{radius:.2f},0,1,1"
    circle = f"M{radius:.2f},0{arc},{-radius:.2f},0{arc},{radius:.2f},0"
    colours = spec["encoding"]["color"]["scale"]["range"]
    column = spec["transform"][0]["lookup"]
    marks = []
    for row, x, y in zip(rows, x_pixels.tolist(), y_pixels.tolist()):
        shape = circle if row["held_out"] else triangle
        fill = colours[row[column]]
        marks.append(f'<path transform="translate({x:g},{y:g})" d="{shape}" fill="{fill}"/>')
    # with `opacity` on each mark instead, a bitmap takes twice as long to draw
    cells = f'<g fill-opacity="0.9">{"".join(marks)}</g>'
    return frame[: background.end()] + cells + frame[background.end() :]


@lru_cache(maxsize=100)
def _draw_frame(spec: str) -> str:
    """A chart without data as a standalone SVG. `spec` is JSON text."""
    return minify(vl_convert.vegalite_to_svg(spec))


def _to_pixels(values: Sequence[float], begin: float, end: float) -> np.ndarray:
    """Positions in pixels, (values,) float64: the lowest value at `begin`, the highest at `end`."""
    array = np.array(values, np.float64)
    position_frac = (array - array.min()) / (np.ptp(array) or 1)
    return begin + position_frac * (end - begin)
