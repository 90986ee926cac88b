"""Agreement of clusters with classes as means over cells, so that differences of two clusterings have intervals.

NMI and ARI are no means over cells: a cell's score here is the measure plus its derivative by the cell's weight, times
the number of cells (infinitesimal jackknife, Efron 1981), as for F1 in `evaluate.paired`. The mean is the measure
itself.
"""

import numpy as np

TINY = 1e-12


def nmi_scores(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Scores, float64 `(cells,)`, whose mean is 2 I / (H + H'), scikit-learn's `normalized_mutual_info_score`."""
    joint, a, b = _sizes(classes, clusters)
    n = len(classes)
    # derivatives by the weight of a cell, times n: -log p - H, and so on
    entropy_a, entropy_b = -np.log(a / n).mean(), -np.log(b / n).mean()
    information = np.log(joint * n / (a * b))
    shared, whole = information.mean(), entropy_a + entropy_b
    if whole < TINY:  # one class and one cluster
        return np.ones(n)
    nmi = 2 * shared / whole
    slope = 2 * (information - shared) / whole - nmi * (-np.log(a / n) - np.log(b / n) - whole) / whole
    return nmi + slope


def ari_scores(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Scores, float64 `(cells,)`, whose mean is scikit-learn's `adjusted_rand_score` (Hubert & Arabie 1985)."""
    joint, a, b = _sizes(classes, clusters)
    n = len(classes)
    pairs = n * (n - 1) / 2
    # pairs of cells that are together: in both, by class, by cluster; the sum over cells of sizes is that of squares
    both, same_a, same_b = ((sizes.sum() - n) / 2 for sizes in (joint, a, b))
    expected, largest = same_a * same_b / pairs, (same_a + same_b) / 2
    if largest - expected < TINY * pairs:  # all cells together, or each alone, in both
        return np.ones(n)
    ari = (both - expected) / (largest - expected)
    d_both, d_a, d_b = (sizes - 0.5 for sizes in (joint, a, b))
    d_expected = (d_a * same_b + same_a * d_b - expected * (n - 0.5)) / pairs
    slope = (d_both - d_expected - ari * ((d_a + d_b) / 2 - d_expected)) / (largest - expected)
    return ari + n * (slope - slope.mean())


def _sizes(classes: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each cell: cells that share both its class and its cluster, its class, its cluster; float64 `(cells,)`."""
    _, a = np.unique(classes, return_inverse=True)
    _, b = np.unique(clusters, return_inverse=True)
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1.0)
    return table[a, b], table.sum(1)[a], table.sum(0)[b]
