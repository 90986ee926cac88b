"""Charts of numbers of cells: histograms of quality control (QC), and confusion matrices."""

from collections.abc import Sequence

import numpy as np

from cellmill.report.drawing.chart import Chart, read_template, to_five_digits
from cellmill.report.text import with_noun

TAILS_FRAC = 0.005  # share of cells at both ends together that a histogram does not draw


def make_histogram_chart(
    title: str,
    edges: Sequence[float],
    before_qc: Sequence[int],
    after_qc: Sequence[int],
    x_title: str,
) -> Chart:
    """Cells per bin before QC (grey) and after (blue), on a log axis if all edges are positive.

    `before_qc` and `after_qc` are numbers of cells, (bins,); `edges` are (bins + 1,), ascending.
    Only bins of the central 99.5 % of cells are drawn, because one outlier would squeeze them. The
    title of the x axis says how many cells are beyond.
    """
    n_up_to_bin = np.cumsum(before_qc)  # (bins,), with the cells of the bin itself
    n_below_bin = n_up_to_bin - before_qc
    n_cells = n_up_to_bin[-1]
    tail = TAILS_FRAC / 2 * n_cells
    is_drawn = (n_up_to_bin > tail) & (n_below_bin < n_cells - tail)
    rows = []
    for index in np.flatnonzero(is_drawn).tolist():
        rows.append(
            {
                "from": to_five_digits(edges[index]),
                "to": to_five_digits(edges[index + 1]),
                "before": before_qc[index],
                "kept": after_qc[index],
            }
        )
    n_beyond = n_cells - sum(row["before"] for row in rows)
    if n_beyond:
        x_title += f" ({with_noun(n_beyond, 'cell')} beyond)"
    spec = read_template("histogram")
    scale = {"type": "log"} if edges[0] > 0 else {"zero": False}
    spec["encoding"]["x"] |= {"scale": scale, "title": x_title}
    return Chart(title, rows, spec)


def make_confusion_chart(
    title: str, classes: Sequence[str], counts: Sequence[Sequence[int]]
) -> Chart:
    """A confusion matrix: of the cells of each true class, the share with each predicted class.

    `counts` are numbers of cells, (true classes, predicted classes). Pairs of classes
    without cells are left out.
    """
    rows = []
    for true, class_counts in zip(classes, counts):
        for predicted, n in zip(classes, class_counts):
            if n:
                share = to_five_digits(n / sum(class_counts))
                rows.append({"true": true, "predicted": predicted, "cells": n, "share": share})
    spec = read_template("confusion")
    for axis in ("x", "y"):
        spec["encoding"][axis] |= {"sort": [*classes], "scale": {"domain": [*classes]}}
    return Chart(title, rows, spec)
