"""Charts on the page: Vega-Lite specifications, which a browser draws live and vl-convert draws as
SVG.

Field names are ours; user text appears only as values and titles, which Vega-Lite draws literally.
Ink is `currentColor`, so that charts follow the page's colours.
"""

import base64
import csv
import hashlib
import json
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from importlib.metadata import version
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import vl_convert
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from cellmill.errors import DataError
from cellmill.files import atomic_path, user_cache, write_text

MAX_STATIC_POINTS = 200  # points in all curves of a static picture; with more, it has only lines
FORMULA = ("=", "+", "@", "\t")  # beginnings of a text that a spreadsheet computes
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
    canvas: bool = False  # True for thousands of marks, which are drawn as a bitmap

    @cached_property
    def keys(self) -> list[str]:
        """Columns of the table."""
        return list(dict.fromkeys(chain.from_iterable(self.rows)))

    @property
    def complete(self) -> dict[str, Any]:
        """The specification with the settings that all charts share."""
        return self.spec | {"config": CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}


class Drawings:
    """Charts of one page in their order: a static picture of each, for print and without scripts,
    and its specification.
    """

    def __init__(self) -> None:
        self.charts: list[Chart] = []
        self.pictures: list[str] = []  # a standalone SVG of each chart

    def draw(self, chart: Chart) -> Markup:
        """The `<figure>` element with the static picture; the same numbers give the same bytes."""
        number = len(self.charts)
        spec = chart.complete | {"data": {"values": chart.rows}, "width": WIDTH}
        # the element has a label; labels of single marks would be half of the bytes
        spec["config"] = CONFIG | {"aria": False}
        if len(chart.rows) > MAX_STATIC_POINTS and "point" in spec.get("mark", {}):
            spec["mark"] = spec["mark"] | {"point": False}
        svg = _render_svg(spec, number)
        self.charts.append(chart)
        self.pictures.append(svg)
        return Markup(
            f'<figure class="chart" data-chart="{number}" aria-label="{escape(chart.title)}">'
            f'<div class="static">{_static_element(chart, svg, spec)}</div></figure>'
        )

    def save(self, folder: Path) -> None:
        """Write each chart as SVG and its rows as CSV; remove files of an earlier page."""
        for old in [*folder.glob("*.svg"), *folder.glob("*.csv")]:
            old.unlink()
        for number, (chart, svg) in enumerate(zip(self.charts, self.pictures), start=1):
            words = re.sub(r"[^A-Za-z0-9.-]+", "_", chart.title).strip("_.")[:100]
            name = f"{number:03}_{words}"
            write_text(folder / f"{name}.svg", svg.replace("currentColor", "#222222"))
            with (
                atomic_path(folder / f"{name}.csv") as path,
                open(path, "w", encoding="utf-8", newline="") as file,
            ):
                writer = csv.DictWriter(file, chart.keys, lineterminator="\n")
                writer.writeheader()
                writer.writerows(_without_formulas(row) for row in chart.rows)

    @property
    def data(self) -> Markup:
        """The charts as JSON for the page's script, safe inside a script element."""
        charts = []
        for chart in self.charts:
            entry = {
                "title": chart.title,
                "canvas": chart.canvas,
                "keys": chart.keys,
                "spec": chart.complete,
                "rows": [list(map(row.get, chart.keys)) for row in chart.rows],
            }
            charts.append(entry)
        return htmlsafe_json_dumps(
            charts, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )


def _without_formulas(row: dict[str, Any]) -> dict[str, Any]:
    """The row for a spreadsheet: an apostrophe before a text that it would compute."""
    safe = {}
    for key, value in row.items():
        safe[key] = f"'{value}" if str(value).startswith(FORMULA) else value
    return safe


def _render_svg(spec: dict[str, Any], number: int) -> str:
    """The static picture of chart `number` as a standalone SVG."""
    svg = vl_convert.vegalite_to_svg(spec)
    # number the ids within this chart: vl-convert counts them over the whole process
    old_ids = dict.fromkeys(re.findall(r'id="((?:clip|gradient)[\w-]*)"', svg))
    new_ids = {old: f"f{number}-{order}" for order, old in enumerate(old_ids)}
    return re.sub(
        r'(id="|url\(#|href="#)([\w-]+)',
        lambda match: match[1] + new_ids.get(match[2], match[2]),
        svg,
    )


def _static_element(chart: Chart, svg: str, spec: dict[str, Any]) -> str:
    """The static picture inside the page."""
    title = escape(chart.title)
    if chart.canvas:  # thousands of circles as text are larger than as a bitmap
        bitmap = compress_png(vl_convert.vegalite_to_png(spec, scale=1.5))
        png = base64.b64encode(bitmap).decode()
        return f'<img src="data:image/png;base64,{png}" alt="{title}">'
    inline = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    return inline.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def compress_png(png: bytes) -> bytes:
    """The same picture in a third of the bytes: vl-convert compresses for speed."""
    # a chunk is the length of its data in 4 bytes, a type in 4, the data, and a checksum in 4
    begin = png.index(b"IDAT") - 4
    end = begin
    pixels = b""
    while png[end + 4 : end + 8] == b"IDAT":
        size = int.from_bytes(png[end : end + 4], "big")
        pixels = pixels + png[end + 8 : end + 8 + size]
        end = end + size + 12
    # one chunk in place of all that have pixels
    data = zlib.compress(zlib.decompress(pixels), 9)
    checksum = zlib.crc32(b"IDAT" + data)
    chunk = len(data).to_bytes(4, "big") + b"IDAT" + data + checksum.to_bytes(4, "big")
    return png[:begin] + chunk + png[end:]


@cache
def load_scripts() -> tuple[Markup, Markup]:
    """Vega with vega-embed, and the page's own script.

    The first takes two seconds to bundle, so each user has it in a cache. The cache is not shared:
    a user could put scripts into the pages of others.
    """
    cached = user_cache() / f"vega-{version('vl-convert-python')}.js"
    try:
        bundle = cached.read_text(encoding="utf-8")
    except OSError:
        bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub asks for an optional one
        with suppress(OSError, DataError):
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_text(cached, bundle)
    return Markup(bundle), Markup(read_asset("page.js"))


@cache
def hash_scripts() -> str:
    """`script-src` of the page: the hashes of its own scripts and nothing else."""
    digests = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in load_scripts()
    )
    return " ".join(f"'sha256-{digest}'" for digest in digests)
