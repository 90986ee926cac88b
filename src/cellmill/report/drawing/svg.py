"""Static pictures of charts as SVG. vl-convert draws them from Vega-Lite specifications."""

import re

import vl_convert

from cellmill.report.drawing.chart import Spec

WITHOUT_EFFECT = re.compile(
    r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"| opacity="1"| d=""'
)
"""Attributes that change no pixel.

Only pointers and screen readers use these attributes, or the value is the default.
"""
LONG_NUMBER = re.compile(r"\d+\.\d{3,}(?:e-\d+)?")
"""A number with at least three decimals."""


def draw_svg(spec: Spec, chart_index: int) -> str:
    """Draw chart `chart_index` of a page as a standalone SVG. `spec` contains the data."""
    svg = vl_convert.vegalite_to_svg(drop_selections(spec))
    # vl-convert numbers the ids of all charts that a process draws. Number the ids of this chart
    # anew, so that equal charts give equal pictures. The index of the chart keeps ids unique on the
    # page.
    old_ids = dict.fromkeys(re.findall(r'id="((?:clip|gradient)[\w-]*)"', svg))
    new_ids = {old: f"f{chart_index}-{index}" for index, old in enumerate(old_ids)}
    # an id is defined by id="…", and used by url(#…) or href="#…"
    renamed = re.sub(
        r'(id="|url\(#|href="#)([\w-]+)',
        lambda match: match[1] + new_ids.get(match[2], match[2]),
        svg,
    )
    return minify(renamed)


def drop_selections(spec: Spec) -> Spec:
    """Return the specification without selections, which need a pointer."""
    static = {key: part for key, part in spec.items() if key != "params"}
    if "params" in spec:
        # while nothing is selected, all marks have the opacity of selected marks
        opacity = {"value": spec["encoding"]["opacity"]["condition"]["value"]}
        static["encoding"] = spec["encoding"] | {"opacity": opacity}
    return static


def minify(svg: str) -> str:
    """Return the SVG without attributes that change no pixel, and with two decimals in its numbers.

    Texts between tags stay as they are.
    """
    return re.sub(r"<[^>]*>", _minify_tag, svg)


def _minify_tag(match: re.Match[str]) -> str:
    """Return a matched tag without attributes that change no pixel, and with rounded numbers."""
    tag = WITHOUT_EFFECT.sub("", match[0])
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}", tag)
