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
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from importlib.metadata import version
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import vl_convert
from markupsafe import Markup

from cellmill.errors import DataError
from cellmill.files import atomic_path, user_cache, write_text

MAX_STATIC_POINTS = 200  # points in all curves of a static picture; with more, it has only lines
# runs of a page whose folded parts are plain HTML; of more, scripts unpack them
MAX_PLAIN_RUNS = 20
# of a PNG: its most colours, and its numbers for colours by a palette and for lines as differences
MAX_COLOURS = 256
BY_PALETTE = 3
DIFFERENCES = 1
# attributes of an SVG that say nothing where nobody can point at a mark, or repeat the default
SILENT = re.compile(r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"| opacity="1"| d=""')
LONG_NUMBER = re.compile(r"\d+\.\d{3,}(?:e-\d+)?")
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
    and its specification. The page's script also unpacks `folded` HTML.
    """

    def __init__(self, n_runs: int = 1) -> None:
        self.is_large = n_runs > MAX_PLAIN_RUNS
        self.charts: list[Chart] = []
        self.pictures: list[str] = []  # a standalone SVG of each chart
        self.folded: list[str] = []

    def fold(self, caller: Callable[[], Markup]) -> Markup:
        """A part that the page shows folded. On a large page it is packed, and this is its place."""
        if not self.is_large:
            return caller()
        self.folded.append(caller())
        number = len(self.folded) - 1
        return Markup(f'<p class="dim" data-folded="{number}">Allow scripts to see this part.</p>')

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
            f'<div class="static">{self._static_element(chart, svg)}</div></figure>'
        )

    def _static_element(self, chart: Chart, svg: str) -> str:
        """The static picture inside the page."""
        title = escape(chart.title)
        if chart.canvas:  # thousands of circles as text are larger than as a bitmap
            scale = 1 if self.is_large else 1.5
            bitmap = shrink_png(vl_convert.svg_to_png(svg, scale=scale))
            png = base64.b64encode(bitmap).decode()
            return f'<img src="data:image/png;base64,{png}" alt="{title}">'
        inline = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
        return inline.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)

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
    def data(self) -> str:
        """The charts and what is folded as JSON for the page's script, by zlib and in base64."""
        charts = []
        for chart in self.charts:
            entry = {
                "title": chart.title,
                "canvas": chart.canvas,
                "spec": chart.complete,
                "columns": {key: [row.get(key) for row in chart.rows] for key in chart.keys},
            }
            charts.append(entry)
        text = json.dumps(
            {"charts": charts, "folded": self.folded},
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        )
        return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


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
    named = re.sub(
        r'(id="|url\(#|href="#)([\w-]+)',
        lambda match: match[1] + new_ids.get(match[2], match[2]),
        svg,
    )
    return re.sub(r"<[^>]*>", _shorten_tag, named)


def _shorten_tag(match: re.Match[str]) -> str:
    """The tag without attributes that change no pixel, and numbers of two decimals."""
    tag = SILENT.sub("", match[0])
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}", tag)


def shrink_png(png: bytes) -> bytes:
    """A picture of 32-bit pixels in a sixth of the bytes, with at most MAX_COLOURS colours of 4 bits
    a channel. It stays as it is if its lines are filtered by more than differences of neighbours.
    """
    width, height = struct.unpack(">II", png[16:24])
    packed = b"".join(data for kind, data in _list_chunks(png) if kind == b"IDAT")
    # a line is the number of its filter and 4 bytes a pixel
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + 4 * width)
    if not (lines[:, 0] == DIFFERENCES).all():
        return png
    pixels = lines[:, 1:].reshape(height, width, 4).cumsum(axis=1, dtype=np.uint8)
    channels = (pixels >> 4).astype(np.uint16)
    codes = channels @ np.array([1 << 12, 1 << 8, 1 << 4, 1], np.uint16)
    codes[channels[..., 3] == 0] = 0  # transparent, whatever its colour
    counts = np.bincount(codes.ravel(), minlength=1 << 16)
    used = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    colours = used[:, None] >> np.array([12, 8, 4, 0]) & 15  # (colours, 4), the most frequent first
    palette = colours[:MAX_COLOURS]
    distances = np.square(colours[:, None] - palette).sum(axis=2)
    index_by_code = np.zeros(1 << 16, np.uint8)
    index_by_code[used] = distances.argmin(axis=1)
    indices = np.insert(index_by_code[codes], 0, 0, axis=1)  # each line without a filter
    colour_bytes = (17 * palette).astype(np.uint8)  # 15 becomes 255
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, BY_PALETTE, 0, 0, 0),
        b"PLTE": colour_bytes[:, :3].tobytes(),
        b"tRNS": colour_bytes[:, 3].tobytes(),
        b"IDAT": zlib.compress(indices.tobytes(), 9),
        b"IEND": b"",
    }
    parts = [png[:8]]
    for kind, data in chunks.items():
        checksum = zlib.crc32(kind + data)
        parts += [struct.pack(">I", len(data)), kind, data, struct.pack(">I", checksum)]
    return b"".join(parts)


def _list_chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, data) of each chunk of a PNG: 4 bytes of length, 4 of kind, the data, a checksum of 4."""
    begin = 8
    while begin < len(png):
        end = begin + 8 + int.from_bytes(png[begin : begin + 4], "big")
        yield png[begin + 4 : begin + 8], png[begin + 8 : end]
        begin = end + 4


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
