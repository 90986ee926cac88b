"""Charts on the page: Vega-Lite specifications for live charts in a browser, and static pictures of
them.

Field names are ours; user text appears only as values and titles, which Vega-Lite draws literally.
Ink is `currentColor`, so that charts follow the page's colours.
"""

import base64
import csv
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup

from cellmill.files import atomic_path, write_text
from cellmill.report.png import draw_png
from cellmill.report.svg import draw_svg, draw_umap_svg

MAX_STATIC_POINTS = 200  # with more points, curves of a static picture have no dots
# with more runs, a page's folded parts are packed as data, which its script unpacks
MAX_PLAIN_RUNS = 20
FORMULA = ("=", "+", "@", "\t")  # a spreadsheet evaluates texts that begin so
WIDTH = 500  # width of a static picture, in pixels; a live one takes the width of its card


def read_asset(name: str) -> str:
    """Text of a file next to this module."""
    return files("cellmill.report").joinpath(name).read_text(encoding="utf-8")


def read_template(name: str) -> Any:
    """A specification of vega.json, or the settings `config` that all charts share."""
    return json.loads(read_asset("vega.json"))[name]


CONFIG = read_template("config")
PALETTE: list[str] = CONFIG["range"]["category"]
"""Twenty colours, distinguishable on light and dark background. They repeat after the twentieth
class.
"""


@dataclass(frozen=True)
class Chart:
    """A table and the Vega-Lite specification that draws it."""

    title: str  # what it shows, in words: read by screen readers, and the name of its files
    rows: list[dict[str, Any]]  # all that is drawn
    spec: dict[str, Any]  # without the data
    is_umap: bool = False  # its thousands of marks are drawn as a bitmap

    @cached_property
    def column_names(self) -> list[str]:
        """Columns of the table."""
        return list(dict.fromkeys(chain.from_iterable(self.rows)))

    @property
    def full_spec(self) -> dict[str, Any]:
        """The specification with the settings that all charts share."""
        return self.spec | {"config": CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}


class PageCharts:
    """Charts of one page in their order, each with a static picture for print and for browsers
    without scripts. The page's script draws them anew and unpacks the `folded` HTML.
    """

    def __init__(self, n_runs: int = 1) -> None:
        self.is_large = n_runs > MAX_PLAIN_RUNS
        self.charts: list[tuple[Chart, str]] = []  # the picture is a standalone SVG
        self.folded: list[str] = []

    def fold(self, caller: Callable[[], Markup]) -> Markup:
        """HTML of a folded part; on a large page, a placeholder that the script replaces by it."""
        if not self.is_large:
            return caller()
        self.folded.append(caller())
        number = len(self.folded) - 1
        return Markup(f'<p class="dim" data-folded="{number}">Allow scripts to see this part.</p>')

    def add(self, chart: Chart) -> Markup:
        """Draw a chart and keep it. Returns the `<figure>` element with the static picture; the same
        numbers give the same bytes.
        """
        number = len(self.charts)
        # the element has a label; labels of single marks would be half of the bytes
        spec = chart.full_spec | {"width": WIDTH, "config": CONFIG | {"aria": False}}
        title = escape(chart.title)
        if chart.is_umap:
            picture = draw_umap_svg(spec, chart.rows, 2)
            element = self._draw_bitmap(spec, chart.rows, title)
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

    def _draw_bitmap(self, spec: dict[str, Any], rows: list[dict[str, Any]], title: str) -> str:
        """The `<img>` element of a UMAP: thousands of marks are larger as SVG than as a bitmap.

        On a large page, marks stand on whole pixels: equal marks are then equal bytes, and the
        bitmap is smaller by a sixth.
        """
        svg = draw_umap_svg(spec, rows, 0 if self.is_large else 2)
        png = base64.b64encode(draw_png(svg, 1 if self.is_large else 1.5)).decode()
        return f'<img src="data:image/png;base64,{png}" alt="{title}">'

    def save(self, folder: Path) -> None:
        """Write each chart as SVG and its rows as CSV; remove files of an earlier page."""
        for old in [*folder.glob("*.svg"), *folder.glob("*.csv")]:
            old.unlink()
        for number, (chart, svg) in enumerate(self.charts, start=1):
            words = re.sub(r"[^A-Za-z0-9.-]+", "_", chart.title).strip("_.")[:100]
            name = f"{number:03}_{words}"
            write_text(folder / f"{name}.svg", svg.replace("currentColor", "#222222"))
            with (
                atomic_path(folder / f"{name}.csv") as path,
                open(path, "w", encoding="utf-8", newline="") as file,
            ):
                writer = csv.DictWriter(file, chart.column_names, lineterminator="\n")
                writer.writeheader()
                writer.writerows(_without_formulas(row) for row in chart.rows)

    @property
    def packed(self) -> str:
        """Charts and folded parts for the page's script: JSON, compressed by zlib, in base64."""
        charts = []
        for chart, _ in self.charts:
            columns = {key: [row.get(key) for row in chart.rows] for key in chart.column_names}
            charts.append(
                {
                    "title": chart.title,
                    "canvas": chart.is_umap,
                    "spec": chart.full_spec,
                    "columns": columns,
                }
            )
        text = json.dumps(
            {"charts": charts, "folded": self.folded},
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        )
        return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _without_formulas(row: dict[str, Any]) -> dict[str, Any]:
    """The row with an apostrophe before each text that a spreadsheet would evaluate."""
    return {
        key: f"'{value}" if str(value).startswith(FORMULA) else value for key, value in row.items()
    }
