"""Charts of a page: static pictures, and the data from which the page's script draws them."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cellmill.files import read_json, write_json, write_text
from cellmill.report.drawing.chart import CONFIG, Chart, ChartRow, Spec
from cellmill.report.drawing.png import draw_png
from cellmill.report.drawing.svg import draw_svg
from cellmill.report.drawing.umap import draw_umap_svg

# a page of more runs stores its details compressed, for the script to insert, and has coarser
# bitmaps
MAX_RUNS_OF_SMALL_PAGE = 20
MAX_STATIC_POINTS = 200  # the static picture of a chart with more points has lines without dots
WIDTH = 500  # pixels of a static picture; a live chart has the width of its card
DECIMALS = 2  # decimals of coordinates in pixels, for the cells of a UMAP
BITMAP_SCALE = 1.5  # pixels of a bitmap for each pixel of the page
LIST = "charts.json"  # in the folder of the files: their names
MAX_NAME = 100  # characters of a chart's title in the names of its files
# a spreadsheet evaluates texts with these first characters; toCsvCell in page.js has the same
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

CSV_SPECIAL = re.compile(r'[",\r\n]')
"""Characters for which a cell of a CSV file is quoted."""
QUOTE = '"'


class PageCharts:
    """Charts of one page in their order, and the HTML of its deferred details.

    Each chart has a static picture for print and for browsers without scripts. The page's script
    replaces it with a live chart, and inserts the deferred details.
    """

    def __init__(self, n_runs: int = 1) -> None:
        self.is_large = n_runs > MAX_RUNS_OF_SMALL_PAGE
        self.charts: list[tuple[Chart, str]] = []  # with the picture, a standalone SVG
        self.deferred: list[str] = []  # HTML; empty on a small page

    def defer(self, caller: Callable[[], Markup]) -> Markup:
        """HTML of details, which `caller` renders, for `{% call page_charts.defer() %}`.

        On a large page it is a placeholder, which the page's script replaces with the details.
        """
        if not self.is_large:
            return caller()
        self.deferred.append(caller())
        number = len(self.deferred) - 1
        return Markup(
            f'<p class="dim" data-deferred="{number}">Allow scripts to see the details.</p>'
        )

    def add(self, chart: Chart) -> Markup:
        """Draw a chart and keep it. Return the `<figure>` element with the static picture.

        Equal charts at the same position on a page give the same bytes.
        """
        number = len(self.charts)
        # no ARIA labels on marks: the <figure> has one, and they would double the size
        spec = chart.full_spec | {"width": WIDTH, "config": CONFIG | {"aria": False}}
        title = escape(chart.title)
        if chart.is_umap:
            picture = draw_umap_svg(spec, chart.rows, DECIMALS)
            bitmap = self._draw_bitmap(spec, chart.rows, picture)
            element = f'<img src="data:image/png;base64,{bitmap}" alt="{title}">'
        else:
            if len(chart.rows) > MAX_STATIC_POINTS and "point" in spec.get("mark", {}):
                spec["mark"] = spec["mark"] | {"point": False}
            picture = draw_svg(spec | {"data": {"values": chart.rows}}, number)
            inline = re.sub(r' xmlns(:\w+)?="[^"]*"', "", picture)
            element = inline.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
        self.charts.append((chart, picture))
        return Markup(
            f'<figure class="chart" data-chart="{number}" aria-label="{title}">'
            f'<div class="static">{element}</div></figure>'
        )

    def _draw_bitmap(self, spec: Spec, rows: Sequence[ChartRow], picture: str) -> str:
        """PNG of a UMAP in base64, which is smaller than an SVG of thousands of marks.

        On a large page, coordinates are whole pixels. Equal marks then have equal pixels, and the
        bitmap is smaller by a sixth.
        """
        if self.is_large:
            png = draw_png(draw_umap_svg(spec, rows, decimals=0), scale=1)
        else:
            png = draw_png(picture, BITMAP_SCALE)
        return base64.b64encode(png).decode()

    def save(self, folder: Path) -> None:
        """Write each chart to `folder` as SVG and CSV. Remove files of an earlier page.

        LIST has the names of the page's files, because a user may keep others in the folder.
        """
        listed = folder / LIST
        names = read_json(listed) if listed.exists() else []
        for old in [*folder.glob("*.svg"), *folder.glob("*.csv")]:
            if old.name in names:
                old.unlink()
        texts = self._make_files()
        write_json(listed, [*texts])
        for name, text in texts.items():
            write_text(folder / name, text)

    def _make_files(self) -> dict[str, str]:
        """Text of the SVG and the CSV of each chart, by file name."""
        texts = {}
        for number, (chart, svg) in enumerate(self.charts, start=1):
            words = re.sub(r"[^A-Za-z0-9.-]+", "_", chart.title).strip("_.")[:MAX_NAME]
            name = f"{number:03}_{words}"
            texts[f"{name}.svg"] = svg.replace("currentColor", "#222222")
            columns = chart.csv_columns
            rows = [list(columns), *zip(*columns.values())]
            lines = [",".join(map(_to_csv_cell, row)) for row in rows]
            texts[f"{name}.csv"] = "\n".join(lines) + "\n"
        return texts

    @property
    def payload(self) -> str:
        """Charts and deferred details for the page's script: JSON, compressed by zlib, in base64.

        It has only what was added before, so the page reads it after all sections.
        """
        charts = []
        for chart, _ in self.charts:
            charts.append(
                {
                    "title": chart.title,
                    "canvas": chart.is_umap,
                    "spec": chart.full_spec,
                    "columns": chart.columns,
                    "textsByCode": chart.texts_by_code,
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
    """The value as a cell, with an apostrophe before a text that a spreadsheet would evaluate.

    The csv module of Python 3.11 does not quote a carriage return, which ends a row.
    """
    text = "" if value is None else str(value)
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        text = f"'{text}"
    return f'"{text.replace(QUOTE, QUOTE * 2)}"' if CSV_SPECIAL.search(text) else text
