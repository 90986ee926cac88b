"""Charts of numbers of cells: histograms before and after quality control (QC), and confusion matrices."""

from collections.abc import Sequence

import numpy as np

from cellmill.report.drawing.chart import Chart, read_template, to_five_digits
from cellmill.report.text import with_noun

TAILS_FRAC = 0.005  # a histogram does not draw this fraction of cells, half of it at each end


def make_histogram_chart(
    title: str,
    edges: Sequence[float],
    before_qc: Sequence[int],
    after_qc: Sequence[int],
    x_title: str,
) -> Chart:
    """Make a chart of the number of cells per bin before QC (grey) and after QC (blue).

    `before_qc` and `after_qc` are numbers of cells, (bins,). `edges` are the edges of the bins,
    (bins + 1,), in ascending order. The x axis is logarithmic if all edges are positive.

    Only the bins of the central 99.5 % of cells are drawn, because a single outlier would squeeze
    the other bins. The title of the x axis says how many cells are not drawn.
    """
    # A bin is drawn if it has a cell that is in neither tail. Each tail has at most n_in_tail cells.
    n_up_to_bin = np.cumsum(before_qc)  # (bins,), cells in the bin and in all bins to its left
    n_below_bin = n_up_to_bin - before_qc  # (bins,), cells in all bins to its left
    n_cells = n_up_to_bin[-1]
    n_in_tail = TAILS_FRAC / 2 * n_cells
    is_drawn = (n_up_to_bin > n_in_tail) & (n_below_bin < n_cells - n_in_tail)

    rows = []
    for index in np.flatnonzero(is_drawn).tolist():
        rows.append(
            {
                "from": to_five_digits(edges[index]),
                "to": to_five_digits(edges[index + 1]),
                "before": before_qc[index],
                "kept": after_qc[index],  # cells after QC
            }
        )
    n_not_drawn = n_cells - sum(row["before"] for row in rows)
    if n_not_drawn:
        x_title += f" ({with_noun(n_not_drawn, 'cell')} beyond)"
    spec = read_template("histogram")
    scale = {"type": "log"} if edges[0] > 0 else {"zero": False}
    spec["encoding"]["x"] |= {"scale": scale, "title": x_title}
    return Chart(title, rows, spec)


def make_confusion_chart(
    title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]
) -> Chart:
    """Make a chart of a confusion matrix.

    The chart shows what share of the cells of each true class has each predicted class. `counts` are
    numbers of cells, (true classes, predicted classes). Pairs of classes without cells are left out.
    """
    rows = []
    for true_class, counts_of_class in zip(classes, counts):
        for predicted_class, n_cells in zip(classes, counts_of_class):
            if n_cells:
                rows.append(
                    {
                        "true": true_class,
                        "predicted": predicted_class,
                        "cells": n_cells,
                        "share": to_five_digits(n_cells / sum(counts_of_class)),
                    }
                )
    spec = read_template("confusion")
    for axis in ("x", "y"):
        spec["encoding"][axis] |= {"sort": [*classes], "scale": {"domain": [*classes]}}
    return Chart(title, rows, spec)
