"""Charts of curves: values over training steps, and values over the sizes of a sweep."""

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
"""Points (step, value) of a curve, in ascending order of steps."""
# A long curve over steps is drawn with fewer points.
MAX_POINTS = 400  # a curve has at most this many points
MAX_CHART_POINTS = 10_000  # all curves of a chart together have at most this many points
MIN_POINTS = 50  # a curve may always keep this many points, even beyond MAX_CHART_POINTS
LAW_POINTS = 40  # number of points that draw the curve of a power law
TITLE_WIDTH = 32  # a line of a y axis's title has at most this many characters
CURVES_HEIGHT = 210  # height in pixels of a chart of values over steps
LOSSES_HEIGHT = 250  # height in pixels of a chart of losses
HEADROOM_FRAC = 0.05  # space above the highest value, as a fraction of the range of values
# the y axis of losses is logarithmic if the highest loss is more than this times the lowest loss
LOG_RATIO = 5


def make_curves_chart(title: str, points_by_name: Mapping[str, StepValues], y_title: str) -> Chart:
    """Make a chart of values over steps. It has a line for each name, such as the name of a run."""
    n_curves = sum(map(bool, points_by_name.values()))
    rows = []
    for name, points in points_by_name.items():
        rows += _list_step_rows(points, n_curves, name=name)
    spec = _make_lines([*points_by_name], y_title, rows)
    return Chart(title, rows, {"height": CURVES_HEIGHT, **spec})


def make_loss_chart(title: str, losses_by_run: Mapping[str, Mapping[str, StepValues]]) -> Chart:
    """Make a chart of the losses of training (dashed) and validation over steps.

    Each run has a colour. `losses_by_run` has the points of each run by series, `training` and
    `validation`. A run may have none of them.
    """
    n_curves = 0
    for points_by_series in losses_by_run.values():
        n_curves += sum(map(bool, points_by_series.values()))
    rows = []
    for name, points_by_series in losses_by_run.items():
        for series, points in points_by_series.items():
            rows += _list_step_rows(points, n_curves, name=name, series=series)
    spec = _make_lines([*losses_by_run], "loss", rows)
    spec["encoding"] |= read_template("loss")
    drawn_series = sorted({row["series"] for row in rows}, reverse=True)  # validation first
    spec["encoding"]["strokeDash"]["legend"]["values"] = drawn_series
    # on a linear axis, high losses of the first steps would flatten the rest of the curves
    values = [row["value"] for row in rows]
    if values and min(values) > 0 and max(values) > LOG_RATIO * min(values):
        spec["encoding"]["y"]["scale"] = {"type": "log"}
    return Chart(title, rows, {"height": LOSSES_HEIGHT, **spec})


def _list_step_rows(points: StepValues, n_curves: int, **columns: str) -> list[ChartRow]:
    """List the rows of one curve over steps.

    A row has one point of the curve. `columns` are further values, which all rows get, such as the
    name of the run. A long curve keeps only every n-th point and its last point. The more curves the
    chart has, the fewer points each curve keeps. `n_curves` counts only the curves with points.
    """
    if not points:
        return []
    max_points = min(MAX_POINTS, max(MIN_POINTS, MAX_CHART_POINTS // n_curves))
    # with this stride, at most max_points - 1 points are kept before the last point
    stride = max(1, math.ceil((len(points) - 1) / (max_points - 1)))
    kept_points = [*points[:-1:stride], points[-1]]
    return [
        {**columns, "step": step, "value": to_five_digits(value)} for step, value in kept_points
    ]


def _make_lines(names: Sequence[str], y_title: str, rows: Sequence[ChartRow]) -> Spec:
    """Make the specification of lines over steps, with a colour for each of `names`.

    A name without rows is not in the legend. The name still takes a colour, so that a run has the
    same colour in all charts.
    """
    spec = read_template("lines")
    scale: Spec = {"zero": False, "nice": True}
    values = [row["value"] for row in rows]
    if values:
        headroom = (max(values) - min(values)) * HEADROOM_FRAC
        scale["domainMax"] = to_five_digits(max(values) + headroom)
    # Vega would cut off a longer line of the title
    title_lines = textwrap.wrap(to_words(y_title), TITLE_WIDTH)
    spec["encoding"]["y"] |= {"title": title_lines, "scale": scale}
    drawn_names = {row["name"] for row in rows}
    legend_names = [name for name in names if name in drawn_names]
    spec["encoding"]["color"] |= make_colour_channel(names, legend_names)
    return spec


def make_scaling_chart(title: str, scaling: Scaling) -> Chart:
    """Make a chart of means and standard deviations over sizes, with a line for each curve.

    Power laws are dashed lines. The best baseline is a dotted line.
    """
    # a sweep over a single option has one curve, without a name
    names = [curve.name or "runs" for curve in scaling.curves]
    rows: list[ChartRow] = []
    are_sizes_positive = True
    for name, curve in zip(names, scaling.curves):
        rows += _list_scaling_rows(name, curve)
        are_sizes_positive &= all(point.size > 0 for point in curve.points)
    if scaling.baseline is not None:
        value = to_five_digits(scaling.baseline.value)
        rows.append({"name": scaling.baseline.name, "series": "baseline", "value": value})
    spec = read_template("scaling")
    # the last layer draws the baseline, which has no size
    *layers_over_sizes, _ = spec["layer"]
    for layer in layers_over_sizes:
        layer["encoding"]["x"]["title"] = scaling.x_title
        layer["encoding"]["x"]["scale"] = {"type": "log"} if are_sizes_positive else {}
        layer["encoding"]["y"]["title"] = to_words(scaling.measure.metric)
        layer["encoding"]["color"] |= make_colour_channel(names, names)
    return Chart(title, rows, spec)


def _list_scaling_rows(name: str, curve: ScalingCurve) -> list[ChartRow]:
    """List the rows of one scaling curve, in two series.

    Series `runs` has a row for each size, with the mean over runs and an error bar. The error bar
    is one standard deviation to each side. Series `law` has points on the curve of the power law.
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

    # sizes with equal ratios are at equal distances on a logarithmic axis
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
