"""Figures in the page: a picture of each for print and without scripts, and its specification for a browser."""

import base64
import csv
import hashlib
import io
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from markupsafe import Markup

from cellmill.files import write_text
from cellmill.report.figures import CONFIG, WIDTH, Figure


class Drawings:
    """Figures of one page, in their order."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.pictures: list[str] = []  # of each, as a standalone SVG

    def draw(self, figure: Figure) -> Markup:
        """The `<figure>` element with the static picture; the same numbers give the same bytes."""
        number = len(self.figures)
        spec = complete(figure) | {"data": {"values": figure.rows}, "width": WIDTH}
        svg = _renumbered(vl_convert.vegalite_to_svg(spec), number)
        self.figures.append(figure)
        self.pictures.append(svg)
        title = escape(figure.title)
        if figure.canvas:  # thousands of circles as text are larger than as a bitmap
            png = base64.b64encode(vl_convert.vegalite_to_png(spec, scale=1.5)).decode()
            still = f'<img src="data:image/png;base64,{png}" alt="{title}">'
        else:
            still = _inline(svg).replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
        return Markup(
            f'<figure class="chart" data-chart="{number}" aria-label="{title}">'
            f'<div class="still">{still}</div></figure>'
        )

    def save(self, folder: Path) -> None:
        """Each figure as SVG, its data as CSV; files of an earlier page are removed."""
        if folder.is_dir():
            for old in (path for path in folder.iterdir() if path.suffix in (".svg", ".csv")):
                old.unlink()
        for number, (figure, svg) in enumerate(zip(self.figures, self.pictures), start=1):
            name = f"{number:03}_{re.sub(r'[^A-Za-z0-9.-]+', '_', figure.title).strip('_.')[:100]}"
            write_text(folder / f"{name}.svg", svg.replace("currentColor", "#222222"))
            write_text(folder / f"{name}.csv", _csv(figure.rows))

    @property
    def data(self) -> Markup:
        """The figures as JSON for the page's script, safe inside a script element."""
        shown = [
            {"title": f.title, "canvas": f.canvas, "keys": [*(k := _keys(f.rows))], "spec": complete(f),
             "rows": [[row.get(key) for key in k] for row in f.rows]}
            for f in self.figures
        ]  # fmt: skip
        return Markup(in_script(shown))


def complete(figure: Figure) -> dict[str, Any]:
    """The specification with what all figures share."""
    return figure.spec | {"config": CONFIG, "autosize": {"type": "fit-x", "contains": "padding"}}


def in_script(value: Any) -> str:
    """JSON that cannot end the script element which holds it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def scripts() -> tuple[Markup, Markup]:
    """Vega with vega-embed, and the page's own script."""
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub asks for an optional one
    return Markup(bundle), Markup(text_of("page.js"))


def text_of(name: str) -> str:
    return files("cellmill.report").joinpath(name).read_text(encoding="utf-8")


def allowed() -> str:
    """`script-src` of the page: the hashes of its own scripts and nothing else."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts())
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _keys(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _keys(rows), lineterminator="\n")
    writer.writeheader()
    for row in rows:  # a leading =, + or @ would be a formula in a spreadsheet
        writer.writerow(
            {k: f"'{v}" if isinstance(v, str) and v[:1] in ("=", "+", "@", "\t") else v for k, v in row.items()}
        )
    return text.getvalue()


def _renumbered(svg: str, number: int) -> str:
    """Ids of clip paths of this figure alone, which do not depend on what the process drew before."""
    names = dict.fromkeys(re.findall(r'id="((?:clip|gradient)[\w-]*)"', svg))
    new = {name: f"f{number}-{order}" for order, name in enumerate(names)}
    return re.sub(r'(id="|url\(#|href="#)([\w-]+)', lambda m: m[1] + new.get(m[2], m[2]), svg)


def _inline(svg: str) -> str:
    """The SVG element without namespace URLs and fixed size."""
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"|<!--.*?-->', "", svg, flags=re.DOTALL)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    return svg
