"""Charts of curves: values over training steps, and measures over the sizes of a sweep."""

import math
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from cellmill.report.drawing.chart import (
    Chart,
    ChartRow,
    Spec,
    make_colour_channel,
    read_template,
    to_five_digits,
)
from cellmill.report.sweeps.scaling_law import Law
from cellmill.report.sweeps.scalings import Scaling, ScalingCurve
from cellmill.report.text import to_words

StepValues = list[tuple[float, float]]
"""Points (step, value) of a curve."""
MAX_POINTS = 400  # per curve
MIN_POINTS = 50  # per curve, however many curves the chart has
MAX_CHART_POINTS = 10_000  # all curves of a chart together, unless each has MIN_POINTS
LAW_POINTS = 40  # points on the curve of a power law
TITLE_WIDTH = 32  # characters in a line of the title of a y axis
CURVES_HEIGHT = 210  # pixels
LOSSES_HEIGHT = 250  # pixels
HEADROOM_FRAC = 0.05  # space above the highest value, as a fraction of the range of values
LOG_RATIO = 5  # the y axis is logarithmic if the highest loss is more than this times the lowest


def make_curves_chart(title: str, curves: Mapping[str, StepValues], y_title: str) -> Chart:
    """Values over steps: a line for each of `curves`, which are by name."""
    rows = []
    for name, points in curves.items():
        rows += _list_line_rows(points, len(curves), name=name)
    return Chart(title, rows, {"height": CURVES_HEIGHT, **_make_lines([*curves], y_title, rows)})


def make_loss_chart(title: str, losses_by_run: Mapping[str, Mapping[str, StepValues]]) -> Chart:
    """Losses of training (dashed) and validation over steps, in a colour for each run.

    `losses_by_run` has the series `training` and `validation` of each run.
    """
    n_curves = 2 * len(losses_by_run)
    rows = []
    for name, by_series in losses_by_run.items():
        for series, points in by_series.items():
            rows += _list_line_rows(points, n_curves, name=name, series=series)
    spec = _make_lines([*losses_by_run], "loss", rows)
    spec["encoding"] |= read_template("loss")
    drawn_series = sorted({row["series"] for row in rows}, reverse=True)  # validation first
    spec["encoding"]["strokeDash"]["legend"]["values"] = drawn_series
    # on a linear axis, the first steps would flatten the rest
    values = [row["value"] for row in rows]
    if values and min(values) > 0 and max(values) > LOG_RATIO * min(values):
        spec["encoding"]["y"]["scale"] = {"type": "log"}
    return Chart(title, rows, {"height": LOSSES_HEIGHT, **spec})


def _list_line_rows(points: StepValues, n_curves: int, **columns: str) -> list[ChartRow]:
    """Rows of one curve: a row per point, with the same `columns` in each.

    A long curve keeps every n-th point and its last one. The more curves the chart has, the fewer
    points each keeps.
    """
    max_points = min(MAX_POINTS, max(MIN_POINTS, MAX_CHART_POINTS // n_curves))
    # the last point is kept too, whatever the stride
    stride = max(1, math.ceil((len(points) - 1) / (max_points - 1)))
    thinned = [*points[:-1:stride], *points[-1:]]
    return [{**columns, "step": step, "value": to_five_digits(value)} for step, value in thinned]


def _make_lines(names: Sequence[str], y_title: str, rows: Sequence[ChartRow]) -> Spec:
    """Specification of lines over steps, in a colour for each of `names`.

    A name without rows is not in the legend. It still takes a colour, so that a run has the same
    colour in all charts.
    """
    spec = read_template("lines")
    scale: Spec = {"zero": False, "nice": True}
    values = [row["value"] for row in rows]
    if values:
        headroom = (max(values) - min(values)) * HEADROOM_FRAC
        scale["domainMax"] = to_five_digits(max(values) + headroom)
    # a longer line would be cut off
    title_lines = textwrap.wrap(to_words(y_title), TITLE_WIDTH)
    spec["encoding"]["y"] |= {"title": title_lines, "scale": scale}
    drawn = {row["name"] for row in rows}
    in_legend = [name for name in names if name in drawn]
    spec["encoding"]["color"] |= make_colour_channel(names, in_legend)
    return spec


def make_scaling_chart(title: str, scaling: Scaling) -> Chart:
    """Means and standard deviations over sizes, with a line for each curve of `scaling`.

    Power laws are dashed, the best baseline is dotted.
    """
    names = [curve.name or "runs" for curve in scaling.curves]
    rows: list[ChartRow] = []
    for name, curve in zip(names, scaling.curves):
        rows += _list_curve_rows(name, curve)
    is_positive = all(row["size"] > 0 for row in rows)
    # appended after the test of sizes, because a baseline has no size
    if scaling.baseline is not None:
        value = to_five_digits(scaling.baseline.value)
        rows.append({"name": scaling.baseline.name, "series": "baseline", "value": value})
    spec = read_template("scaling")
    *layers_over_sizes, _ = spec["layer"]  # the last layer is the baseline, which has no size
    for layer in layers_over_sizes:
        layer["encoding"]["x"]["title"] = scaling.x_title
        layer["encoding"]["x"]["scale"] = {"type": "log"} if is_positive else {}
        layer["encoding"]["y"]["title"] = to_words(scaling.measure.metric)
        layer["encoding"]["color"] |= make_colour_channel(names, names)
    return Chart(title, rows, spec)


def _list_curve_rows(name: str, curve: ScalingCurve) -> list[ChartRow]:
    """Rows of one curve: a mean and its error bar for each size, and points of the law.

    An error bar is one standard deviation to each side.
    """
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
