"""The charts of a page: their static pictures, and the data from which the page's script draws them."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cellmill.errors import DataError
from cellmill.files import read_json, write_json, write_text
from cellmill.report.drawing.chart import CONFIG, Chart, ChartRow, Spec
from cellmill.report.drawing.png import draw_png
from cellmill.report.drawing.svg import draw_svg
from cellmill.report.drawing.umap import draw_umap_svg

# A page with more runs than this is large. It stores its details compressed, for the script to
# insert, and draws coarser bitmaps.
MAX_RUNS_OF_SMALL_PAGE = 20
# In a static picture, curves over steps have no dots if all of them together have more points than
# this.
MAX_STATIC_POINTS = 200
WIDTH = 500  # width of a static picture in pixels; a live chart has the width of its card
DECIMALS = 2  # decimals of the coordinates of a UMAP's cells, in pixels
BITMAP_SCALE = 1.5  # pixels of a bitmap for each pixel of the page
FILE_LIST = "charts.json"  # lists the files that the last page wrote to the folder
MAX_TITLE_CHARS = 100  # a file name has at most this many characters of the chart's title
DARK_GREY = "#222222"  # colour of axes and texts in saved pictures

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""First characters of texts that a spreadsheet would evaluate. toCsvCell in page.js has the same."""
CSV_SPECIAL = re.compile(r'[",\r\n]')
"""A cell of a CSV file is quoted if it contains one of these characters."""
QUOTE = '"'  # a name, because an f-string of Python 3.11 cannot contain its own quote


class PageCharts:
    """The charts of one page in their order, and the HTML of details that the page defers.

    Each chart has a static picture, for print and for browsers without scripts. The page's script
    replaces the picture with a live chart. The script also inserts the deferred details.
    """

    def __init__(self, n_runs: int = 1) -> None:
        self.is_large = n_runs > MAX_RUNS_OF_SMALL_PAGE
        self.charts: list[tuple[Chart, str]] = []  # each chart with its picture, a standalone SVG
        self.deferred: list[str] = []  # HTML of the details; empty on a small page

    def defer(self, caller: Callable[[], Markup]) -> Markup:
        """Return the HTML of details. On a large page, return a placeholder for the details.

        A template surrounds details with `{% call page_charts.defer() %}`. `caller` then renders
        them. The page's script replaces a placeholder with its details.
        """
        if not self.is_large:
            return caller()
        self.deferred.append(caller())
        index = len(self.deferred) - 1
        return Markup(
            f'<p class="dim" data-deferred="{index}">Allow scripts to see the details.</p>'
        )

    def add(self, chart: Chart) -> Markup:
        """Draw a chart and keep it. Return the `<figure>` element with its static picture.

        Equal charts at the same position on a page give the same bytes.
        """
        index = len(self.charts)
        # The <figure> has an ARIA label. Further labels on all marks would double the size.
        spec = chart.full_spec | {"width": WIDTH, "config": CONFIG | {"aria": False}}
        title = escape(chart.title)
        if chart.is_umap:
            # the page shows a bitmap, which is smaller than the SVG of thousands of marks
            picture = draw_umap_svg(spec, chart.rows, DECIMALS)
            bitmap = self._draw_bitmap(spec, chart.rows, picture)
            element = f'<img src="data:image/png;base64,{bitmap}" alt="{title}">'
        else:
            if len(chart.rows) > MAX_STATIC_POINTS and "point" in spec.get("mark", {}):
                spec["mark"] = spec["mark"] | {"point": False}
            picture = draw_svg(spec | {"data": {"values": chart.rows}}, index)
            # an SVG inside HTML needs no namespaces
            inline = re.sub(r' xmlns(:\w+)?="[^"]*"', "", picture)
            element = inline.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
        self.charts.append((chart, picture))
        return Markup(
            f'<figure class="chart" data-chart="{index}" aria-label="{title}">'
            f'<div class="static">{element}</div></figure>'
        )

    def _draw_bitmap(self, spec: Spec, rows: Sequence[ChartRow], picture: str) -> str:
        """Draw a UMAP as a PNG, in base64. `picture` is its SVG.

        On a large page, coordinates are whole pixels. Equal marks then have equal pixels, and the
        bitmap is about 17 % smaller.
        """
        if self.is_large:
            png = draw_png(draw_umap_svg(spec, rows, decimals=0), scale=1)
        else:
            png = draw_png(picture, BITMAP_SCALE)
        return base64.b64encode(png).decode()

    def save(self, folder: Path) -> None:
        """Write each chart to `folder` as SVG and CSV. Remove the files of an earlier page.

        A user may keep other files in the folder. They stay as they are, because FILE_LIST has the
        names of all files that a page wrote. Raise DataError if FILE_LIST is not a list.
        """
        file_list = folder / FILE_LIST
        old_names = read_json(file_list) if file_list.exists() else []
        if not isinstance(old_names, list):
            raise DataError(
                f"{file_list}: expected a list of file names; delete it, and the .svg and .csv files of charts there"
            )
        taken_stems = set()
        for file in [*folder.glob("*.svg"), *folder.glob("*.csv")]:
            if file.name in old_names:
                file.unlink()
            else:
                taken_stems.add(file.stem)
        text_by_name = self._make_files(taken_stems)
        write_json(file_list, [*text_by_name])
        for name, text in text_by_name.items():
            write_text(folder / name, text)

    def _make_files(self, taken_stems: set[str]) -> dict[str, str]:
        """Make the text of the SVG and the CSV of each chart, by file name.

        `taken_stems` are the names of a user's SVG and CSV files in the folder, without suffixes. A file name that
        is taken gets an underscore at its end.
        """
        text_by_name = {}
        for number, (chart, svg) in enumerate(self.charts, start=1):
            words = re.sub(r"[^A-Za-z0-9.-]+", "_", chart.title).strip("_.")[:MAX_TITLE_CHARS]
            stem = f"{number:03}_{words}"
            while stem in taken_stems:
                stem += "_"
            # attributes are in quotes, so a text of a user that contains the word stays as it is
            text_by_name[f"{stem}.svg"] = svg.replace('"currentColor"', f'"{DARK_GREY}"')
            columns = chart.csv_columns
            rows = [list(columns), *zip(*columns.values())]
            lines = [",".join(map(_to_csv_cell, row)) for row in rows]
            text_by_name[f"{stem}.csv"] = "\n".join(lines) + "\n"
        return text_by_name

    @property
    def payload(self) -> str:
        """Charts and deferred details for the page's script, as JSON, compressed by zlib, in base64.

        The payload has only what was added before. So page.html reads it after all sections.
        """
        charts = []
        for chart, _ in self.charts:
            charts.append(
                {
                    "title": chart.title,
                    "canvas": chart.is_umap,
                    "spec": chart.full_spec,
                    "columns": chart.columns,
                    "textsByCode": chart.texts_by_column,
                }
            )
        text = json.dumps(
            {"charts": charts, "deferred": self.deferred},
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        )
        return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _to_csv_cell(value: Any) -> str:
    """The value as a cell of a CSV file.

    A text that a spreadsheet would evaluate gets an apostrophe before it. The csv module is not used
    here. In Python 3.11, it does not quote a carriage return, which then ends the row.
    """
    text = "" if value is None else str(value)
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        text = f"'{text}"
    return f'"{text.replace(QUOTE, QUOTE * 2)}"' if CSV_SPECIAL.search(text) else text
