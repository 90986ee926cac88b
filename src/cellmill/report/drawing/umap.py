"""UMAPs: the chart, and its static picture.

vl-convert would draw thousands of cells slowly. So it draws only the frame of a picture, with the
titles of axes and the legend. UMAPs with equal specifications share a frame. The cells are drawn
here. They are inserted into the SVG of the frame, after the path of its background.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import vl_convert

from cellmill.report.collect import UmapCells
from cellmill.report.drawing.chart import Chart, ChartRow, Spec, choose_colour, read_template
from cellmill.report.drawing.svg import drop_selections, minify

LIGHT_GREY = "#9aa0a6"  # colour of cells without a label or batch
# More cells than this would slow the page and show nothing new.
MAX_CELLS = 4_000  # a UMAP shows at most this many cells
MAX_PAGE_CELLS = 60_000  # all UMAPs by label of a page together show at most this many cells
MIN_CELLS = 500  # a UMAP by label may always show this many cells, even beyond MAX_PAGE_CELLS
# A UMAP by batch shows at most this many cells. The UMAP by label shows the same cells and more.
MAX_CELLS_BY_BATCH = 1_500
# Areas are in square pixels.
TOTAL_CELL_AREA = 30_000  # the cells of a UMAP share this area, within the next two limits
MIN_CELL_AREA = 14  # a cell has at least this area
MAX_CELL_AREA = 60  # a cell has at most this area
BACKGROUND = re.compile(r'<path d="M0,0h(\d+)v(\d+)h-\d+Z"/>')
"""Background of a picture's plot, with the width and height of the plot in pixels."""


def find_max_cells(n_umaps: int) -> int:
    """Find the largest number of cells in a UMAP by label, if the page has `n_umaps` of them.

    UMAPs by batch do not count here. Each has at most MAX_CELLS_BY_BATCH cells, and at most as many
    cells as the UMAP by label.
    """
    return min(MAX_CELLS, max(MIN_CELLS, MAX_PAGE_CELLS // max(n_umaps, 1)))


def list_categories(cells: UmapCells, column: str = "label") -> list[str]:
    """List the distinct labels or batches of the cells of a UMAP, the most frequent first.

    `column` is label or batch. Unknown labels or batches are left out.
    """
    counts = Counter(cells.texts_by_column[column])
    del counts[""]
    return sorted(counts, key=lambda text: (-counts[text], text))


def make_umap_chart(
    title: str,
    cells: UmapCells,
    categories: Sequence[str],
    column: str = "label",
    max_cells: int = MAX_CELLS,
) -> Chart:
    """Make a chart of cells at their UMAP coordinates, coloured by `column` (label or batch).

    `categories` are the distinct labels or batches, from `list_categories`. Held-out cells are
    circles, and all other cells are triangles. At most `max_cells` cells are shown, chosen at
    random. A UMAP by batch also shows at most MAX_CELLS_BY_BATCH cells.

    To keep the page small, a row has the code of its category, and the browser looks up the text.
    Coordinates have two decimals, because more would not be visible.
    """
    if column == "batch":
        max_cells = min(max_cells, MAX_CELLS_BY_BATCH)

    # Take cells in random order, with a fixed seed. Otherwise the category that is drawn last would
    # cover the other categories.
    code_by_category = {category: code for code, category in enumerate(categories)}
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(cells.x))
    rows = []
    for index in order[:max_cells].tolist():
        rows.append(
            {
                "x": round(cells.x[index], 2),
                "y": round(cells.y[index], 2),
                # a cell without a category has code -1, the last name and colour of the legend
                column: code_by_category.get(cells.texts_by_column[column][index], -1),
                "held_out": cells.is_held_out[index],
            }
        )

    # Name the cells without a category. A batch may have this name too, so parentheses are added:
    # equal names would share a colour.
    absent_name = f"no {column}"
    while absent_name in categories:
        absent_name = f"({absent_name})"

    # table in which the browser looks up the category of a code
    spec = read_template("umap")
    lookup_rows = [{"code": code, "name": category} for category, code in code_by_category.items()]
    lookup_rows.append({"code": -1, "name": absent_name})
    spec["transform"][0]["lookup"] = column
    spec["transform"][0]["from"]["data"]["values"] = lookup_rows

    # sizes: the fewer cells, the larger they are drawn
    area = TOTAL_CELL_AREA / max(len(rows), 1)
    spec["mark"]["size"] = float(np.clip(area, MIN_CELL_AREA, MAX_CELL_AREA))

    # colours and legend; the legend has the absent category only if a drawn cell lacks a category
    colours = [*map(choose_colour, range(len(categories))), LIGHT_GREY]
    spec["encoding"]["color"]["scale"] = {"domain": [*categories, absent_name], "range": colours}
    has_absent = any(row[column] == -1 for row in rows)
    if not has_absent:
        spec["encoding"]["color"]["legend"]["values"] = categories
    spec["encoding"]["tooltip"][0]["title"] = column
    return Chart(title, rows, spec, is_umap=True, texts_by_column={column: [*categories, ""]})


def draw_umap_svg(spec: Spec, rows: Sequence[ChartRow], decimals: int) -> str:
    """Draw a chart of `make_umap_chart` as a standalone SVG.

    `spec` is the specification of the chart, without data, and `rows` is its table. The coordinates
    of cells are in pixels and have `decimals` decimals.
    """
    frame = _draw_frame(json.dumps(drop_selections(spec)))
    background = BACKGROUND.search(frame)
    assert background is not None
    width, height = map(int, background.groups())

    # positions of the cells; y counts downwards in an SVG
    radius = spec["mark"]["size"] ** 0.5 / 2
    x_pixels = _to_pixels([row["x"] for row in rows], radius, width - radius).round(decimals)
    y_pixels = _to_pixels([row["y"] for row in rows], height - radius, radius).round(decimals)

    # paths of both shapes as Vega draws them: the size of a mark is the square of its width
    half_height = radius * 3**0.5 / 2
    triangle = f"M0,{-half_height:.2f}L{-radius:.2f},{half_height:.2f}H{radius:.2f}Z"
    arc = f"A{radius:.2f},{radius:.2f},0,1,1"
    circle = f"M{radius:.2f},0{arc},{-radius:.2f},0{arc},{radius:.2f},0"

    # a mark for each cell
    colours = spec["encoding"]["color"]["scale"]["range"]
    column = spec["transform"][0]["lookup"]
    marks = []
    for row, x, y in zip(rows, x_pixels.tolist(), y_pixels.tolist()):
        shape = circle if row["held_out"] else triangle
        # code -1 takes the last colour
        fill = colours[row[column]]
        marks.append(f'<path transform="translate({x:g},{y:g})" d="{shape}" fill="{fill}"/>')
    # with an opacity on each mark instead, a bitmap would take twice as long to draw
    cells = f'<g fill-opacity="0.9">{"".join(marks)}</g>'
    return frame[: background.end()] + cells + frame[background.end() :]


@lru_cache(maxsize=100)
def _draw_frame(spec: str) -> str:
    """Draw a chart without data as a standalone SVG. `spec` is JSON text, so that it can be cached."""
    return minify(vl_convert.vegalite_to_svg(spec))


def _to_pixels(values: Sequence[float], begin: float, end: float) -> np.ndarray:
    """Scale values linearly to positions in pixels, (values,) float64.

    The lowest value is at `begin`, and the highest value is at `end`.
    """
    array = np.array(values, np.float64)
    # position between the lowest value (0) and the highest value (1)
    fraction = (array - array.min()) / (np.ptp(array) or 1)
    return begin + fraction * (end - begin)
