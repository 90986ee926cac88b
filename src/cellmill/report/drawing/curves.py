"""Charts of curves: metrics over the steps of a training, and scores over the sizes of a sweep."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from cellmill.report.drawing.chart import (
    Chart,
    ChartRow,
    Spec,
    colour_names,
    read_template,
    to_five_digits,
)
from cellmill.report.sweeps.scaling_law import Law
from cellmill.report.sweeps.scalings import Scaling, ScalingCurve
from cellmill.report.text import to_words

Points = list[tuple[float, float]]
"""(step, value) of a curve."""
MAX_POINTS = 400  # most points of a curve
MIN_POINTS = 50  # fewest points of a curve, however many curves a chart has
MAX_CHART_POINTS = 10_000  # most points of all curves of a chart, if each has more than MIN_POINTS
LAW_POINTS = 40  # points of the curve of a law
TITLE_WIDTH = 32  # characters in a line of the title of a y axis


def draw_curves(title: str, curves: Mapping[str, Points], y: str) -> Chart:
    """A line over steps for each run, or each method, in its colour. `curves` has (step, value) by
    name.
    """
    rows = []
    for name, points in curves.items():
        rows += _list_line_rows(points, len(curves), name=name)
    return Chart(title, rows, {"height": 210, **_make_lines([*curves], y, rows)})


def draw_losses(title: str, runs: Mapping[str, Mapping[str, Points]]) -> Chart:
    """Loss of training (dashed) and validation over steps, a colour for each run. `runs` has
    (step, value) by run, then by `training` and `validation`; both are absent for a run without a
    loss.
    """
    rows = []
    for name, kinds in runs.items():
        for kind, points in kinds.items():
            rows += _list_line_rows(points, 2 * len(runs), name=name, series=kind)
    with_loss = [name for name, kinds in runs.items() if kinds]
    spec = _make_lines([*runs], "loss", rows, with_loss)
    spec["encoding"] |= read_template("loss")
    # on a linear axis, the first steps would flatten the rest
    values = [row["value"] for row in rows]
    if values and min(values) > 0 and max(values) > 5 * min(values):
        spec["encoding"]["y"]["scale"] = {"type": "log"}
    return Chart(title, rows, {"height": 250, **spec})


def _list_line_rows(points: Points, n_curves: int, **columns: str) -> list[ChartRow]:
    """Rows of one of `n_curves` in a chart: `columns` and a point. Long curves lose points, never the
    last one.
    """
    max_points = min(MAX_POINTS, max(MIN_POINTS, MAX_CHART_POINTS // n_curves))
    stride = max(1, math.ceil(len(points) / max_points))
    thinned = [*points[:-1:stride], *points[-1:]]
    return [{**columns, "step": step, "value": to_five_digits(value)} for step, value in thinned]


def _make_lines(
    names: Sequence[str], y: str, rows: Sequence[ChartRow], in_legend: Sequence[str] | None = None
) -> Spec:
    """Specification of lines over steps, in a colour for each of `names`.

    The legend has `in_legend`, by default all names. The y axis has head-room above the highest
    value.
    """
    spec = read_template("lines")
    scale: Spec = {"zero": False, "nice": True}
    values = [row["value"] for row in rows]
    if values:
        head_room = (max(values) - min(values)) / 20
        scale["domainMax"] = to_five_digits(max(values) + head_room)
    title = textwrap.wrap(to_words(y), TITLE_WIDTH)  # lines of a title that would be cut
    spec["encoding"]["y"] |= {"title": title, "scale": scale}
    spec["encoding"]["color"] |= colour_names(names, in_legend)
    return spec


def draw_scaling(title: str, scaling: Scaling) -> Chart:
    """Mean and sd by size, a line for each curve. The law is dashed, the best baseline dotted."""
    names = [curve.name or "runs" for curve in scaling.curves]
    rows: list[ChartRow] = []
    for name, curve in zip(names, scaling.curves):
        rows += _list_curve_rows(name, curve)
    is_positive = all(row["size"] > 0 for row in rows)
    if scaling.baseline is not None:
        value = to_five_digits(scaling.baseline.value)
        rows.append({"name": scaling.baseline.name, "series": "baseline", "value": value})
    spec = read_template("scaling")
    *layers_over_sizes, _ = spec["layer"]  # the last layer is the baseline, equal at all sizes
    for layer in layers_over_sizes:
        layer["encoding"]["x"]["title"] = to_words(scaling.quantity)
        layer["encoding"]["x"]["scale"] = {"type": "log"} if is_positive else {}
        layer["encoding"]["y"]["title"] = to_words(scaling.measure.metric)
        layer["encoding"]["color"] |= colour_names(names)
    return Chart(title, rows, spec)


def _list_curve_rows(name: str, curve: ScalingCurve) -> list[ChartRow]:
    """The mean of each size, with the ends of a bar of one sd to both sides, and points of the law."""
    rows = []
    for point in curve.points:
        sd = point.sd or 0.0
        rows.append(
            {
                "name": name,
                "series": "runs",
                "size": point.size,
                "value": to_five_digits(point.mean),
                "low": to_five_digits(point.mean - sd),
                "high": to_five_digits(point.mean + sd),
            }
        )
    law = curve.law
    sizes = [point.size for point in curve.points]
    if isinstance(law, Law) and min(sizes) > 0:
        for size in np.geomspace(min(sizes), max(sizes), LAW_POINTS).tolist():
            value = law.floor + law.factor * size**-law.exponent
            rows.append(
                {
                    "name": name,
                    "series": "law",
                    "size": to_five_digits(size),
                    "value": to_five_digits(value),
                }
            )
    return rows
