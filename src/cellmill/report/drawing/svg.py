"""Static pictures of charts, as SVG, which vl-convert draws from Vega-Lite specifications."""

import re

import vl_convert

from cellmill.report.drawing.chart import Spec

# attributes without effect: for pointers and screen readers, or equal to the default
WITHOUT_EFFECT = re.compile(
    r' (?:aria-[a-z]+|role|class|pointer-events)="[^"]*"| opacity="1"| d=""'
)
LONG_NUMBER = re.compile(r"\d+\.\d{3,}(?:e-\d+)?")


def draw_svg(spec: Spec, number: int) -> str:
    """Chart `number` of a page as a standalone SVG. `spec` contains the data."""
    svg = vl_convert.vegalite_to_svg(drop_selections(spec))
    # number the ids within this chart: vl-convert counts them over the whole process
    old_ids = dict.fromkeys(re.findall(r'id="((?:clip|gradient)[\w-]*)"', svg))
    new_ids = {old: f"f{number}-{index}" for index, old in enumerate(old_ids)}
    renamed = re.sub(
        r'(id="|url\(#|href="#)([\w-]+)',
        lambda match: match[1] + new_ids.get(match[2], match[2]),
        svg,
    )
    return minify(renamed)


def drop_selections(spec: Spec) -> Spec:
    """The specification without what only a pointer uses."""
    static = {key: part for key, part in spec.items() if key != "params"}
    if "params" in spec:
        # as long as nothing is selected, all marks have the opacity of selected ones
        opacity = {"value": spec["encoding"]["opacity"]["condition"]["value"]}
        static["encoding"] = spec["encoding"] | {"opacity": opacity}
    return static


def minify(svg: str) -> str:
    """The SVG without attributes that change no pixel, and with two decimals in its numbers."""
    return re.sub(r"<[^>]*>", _minify_tag, svg)


def _minify_tag(match: re.Match[str]) -> str:
    tag = WITHOUT_EFFECT.sub("", match[0])
    return LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}", tag)
