"""Measures of mixed batches and separate labels in the vectors of cells.

These are the raw measures; `Integration.measure` turns each so that higher is better and 1 is best.
LISI is 1 to the number of classes, and a lower `batch_variance` is better. All but graph connectivity are
one number per cell, `(cells,)` float64, whose mean is the measure, so that the difference of two
embeddings has an interval (`evaluate.intervals`). A mean over labels of means over their cells
becomes one over cells by the infinitesimal jackknife (Efron 1981). Intervals take the neighbour
graph as given; it holds exact nearest neighbours. `labels` and `batches` are class ids from 0, `(cells,)`.

    lisi                Korsunsky et al. 2019, Nat. Methods 16:1289 (Harmony): inverse Simpson index of the neighbours'
                        classes with weights exp(-beta d) of a given perplexity: d is not squared, as in the authors'
                        code
    kbet                Büttner et al. 2019, Nat. Methods 16:43: chi-square test of the batches of a cell's neighbours
    graph_connectivity  Luecken et al. 2022, Nat. Methods 19:41 (scIB)
    bras                Rautenstrauch & Ohler 2025, Nat. Biotechnol.: silhouette of batches within labels, against all
                        cells of other batches; cosine distance
    silhouette          Rousseeuw 1987; ASW and isolated labels as in scIB, rescaled to 0 to 1
    batch_variance      Büttner et al. 2019: principal component regression with all components, whose variances times
                        R2 sum to the sum of squares between batches
"""

import numpy as np
import pandas as pd
from scipy.sparse.csgraph import connected_components
from scipy.stats import chi2

from cellmill.evaluate.features.neighbors import NeighborGraph, link_neighbors
from cellmill.evaluate.features.products import MAX_DOUBLE

MAX_SEARCH_STEPS = 60  # steps of the search for the bandwidth with the wanted perplexity
TOLERANCE = 1e-6  # largest error of the perplexity's logarithm
ALPHA = 0.05  # level of kBET's test
MIN_LABEL_CELLS = 10  # cells that a label needs in kBET, as in scIB
MAX_NEIGHBORS = 70  # neighbours that kBET tests
CONNECTED = 15  # neighbours in graph connectivity, as in scIB
BLOCK = 1024  # cells whose neighbours' classes are counted at once
COMPARED = 256  # cells compared with all others at once


def lisi(graph: NeighborGraph, classes: np.ndarray, perplexity: float) -> np.ndarray:
    """Effective number of classes among the neighbours of each cell, 1 to the number of classes."""
    weights = neighbor_weights(graph.distances, perplexity)
    n_classes = int(classes.max()) + 1
    effective = np.empty(len(classes))
    for block_start in range(0, len(classes), BLOCK):
        block = slice(block_start, block_start + BLOCK)
        classes_around = classes[graph.indices[block]]
        shares = _sum_by_class(classes_around, weights[block], n_classes)
        effective[block] = 1 / (shares**2).sum(1)
    return effective


def neighbor_weights(distances: np.ndarray, perplexity: float) -> np.ndarray:
    """Normalised weights exp(-beta d) of neighbours; beta of each cell gives them the entropy
    log(perplexity).
    """
    shifted = distances - distances[:, :1]  # the same weights, and none underflows to a sum of 0
    # bisect each cell's beta, (cells,), after doubling it until an upper bound is known
    low = np.zeros(len(distances))
    high = np.full(len(distances), np.inf)
    beta = np.ones(len(distances))
    for _ in range(MAX_SEARCH_STEPS):
        weights = np.exp(-beta[:, None] * shifted)
        total = weights.sum(1)
        entropy = np.log(total) + beta * (shifted * weights).sum(1) / total
        excess = entropy - np.log(perplexity)
        if (np.abs(excess) < TOLERANCE).all():
            break
        low = np.where(excess > 0, beta, low)
        high = np.where(excess > 0, high, beta)
        unbounded = np.isinf(high)
        middle = (low + np.where(unbounded, 0, high)) / 2
        beta = np.where(unbounded, 2 * beta, middle)
    return weights / total[:, None]


def kbet(vectors: np.ndarray, batches: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Share of cells whose neighbours pass a chi-square test (5 %) of having their label's batch
    composition; mean over labels, as one term per cell (`label_mean_terms`).

    Neighbours are cells of the same label, a quarter of a batch's mean size, 10 to 70, as in scIB.
    Labels of one batch or below 10 cells are left out; None if all are.
    """
    accepted = np.full(len(labels), np.nan)
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        names, batch, sizes = np.unique(batches[cells], return_inverse=True, return_counts=True)
        n_batches = len(names)
        if n_batches < 2 or len(cells) < MIN_LABEL_CELLS:
            continue
        mean_size = len(cells) // n_batches
        k = min(MAX_NEIGHBORS, max(10, mean_size // 4))
        graph = NeighborGraph.build(vectors[cells], k - 1)
        # (cells, k): each cell and its neighbours
        itself = np.arange(len(cells), dtype=np.int32)
        tested = np.column_stack([itself, graph.indices])
        # (batches,) and (cells, batches): cells of each batch among them
        expected = sizes / len(cells) * tested.shape[1]
        observed = _sum_by_class(batch[tested], np.ones(tested.shape), n_batches)
        statistic = ((observed - expected) ** 2 / expected).sum(1)
        p_value = chi2.sf(statistic, n_batches - 1)
        accepted[cells] = p_value >= ALPHA
    return label_mean_terms(accepted, labels)


def graph_connectivity(graph: NeighborGraph, labels: np.ndarray) -> float:
    """Share of a label's cells in the largest connected component of the graph of these cells; mean
    over labels.
    """
    adjacency = link_neighbors(graph.indices[:, :CONNECTED])
    shares = []
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        _, components = connected_components(adjacency[cells][:, cells], directed=False)
        sizes = np.bincount(components)
        shares.append(sizes.max() / len(cells))
    return float(np.mean(shares))


def bras(vectors: np.ndarray, batches: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Mean over labels of 1 - |s|, as one term per cell (`label_mean_terms`); s is the silhouette of
    batches within a label. None if no label has two batches.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.where(lengths > 0, lengths, 1)
    directions = directions.astype(np.float64)
    scores = np.full(len(labels), np.nan)
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        names, batch = np.unique(batches[cells], return_inverse=True)
        if len(names) > 1:
            silhouette = _cosine_silhouette(directions[cells], batch)
            scores[cells] = 1 - np.abs(silhouette)
    return label_mean_terms(scores, labels)


def _cosine_silhouette(directions: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Silhouette by cosine distance against all cells of other batches; 0 for a batch of one cell.

    The mean cosine distance to some cells is 1 minus the product with their mean direction, so no
    pairs of cells are needed.
    """
    n_batches = batch.max() + 1
    # (batches, width): sum of the directions of a batch
    sums = np.stack([directions[batch == number].sum(0) for number in range(n_batches)])
    # (cells,): cells of the same batch, and of other batches
    n_in_batch = np.bincount(batch).astype(float)[batch]
    n_outside = len(batch) - n_in_batch
    # (cells,): sums of cosines with the same batch, all cells, and itself
    to_same = (directions * sums[batch]).sum(1)
    to_all = directions @ directions.sum(0)
    to_itself = (directions * directions).sum(1)
    n_others_in_batch = n_in_batch - 1
    within = (n_others_in_batch - (to_same - to_itself)) / np.maximum(n_others_in_batch, 1)
    between = (n_outside - (to_all - to_same)) / n_outside
    larger = np.maximum(within, between)
    is_defined = (n_in_batch > 1) & (larger > 0)
    silhouette = (between - within) / np.where(is_defined, larger, 1)
    return np.where(is_defined, silhouette, 0)


def silhouettes(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Silhouette of each cell in its label by Euclidean distance, rescaled from -1..1 to 0..1; before,
    it is 0 for the only cell of a label.
    """
    n = len(labels)
    values = np.asarray(vectors, np.float64)
    values = values - values.mean(0)
    if n > MAX_DOUBLE:
        values = values.astype(np.float32)
    squares = np.einsum("ij,ij->i", values, values)
    is_label = np.eye(labels.max() + 1, dtype=values.dtype)[labels]  # (cells, labels)
    sizes = np.bincount(labels)
    widths = np.zeros(n)
    for start in range(0, n, COMPARED):
        stop = min(start + COMPARED, n)
        rows = np.arange(stop - start)
        # (rows, cells), squared and then not, in place
        distances = (-2 * values[start:stop]) @ values.T
        distances += squares
        distances += squares[start:stop, None]
        distances[rows, start + rows] = 0
        np.maximum(distances, 0, out=distances)
        np.sqrt(distances, out=distances)
        sums = (distances @ is_label).astype(np.float64)
        label = labels[start:stop]
        n_others_in_label = sizes[label] - 1
        within = sums[rows, label] / np.maximum(n_others_in_label, 1)
        means = sums / sizes
        means[rows, label] = np.inf
        between = means.min(1)
        larger = np.maximum(within, between)
        is_defined = (n_others_in_label > 0) & (larger > 0)
        differences = np.where(is_defined, between - within, 0)
        divisors = np.where(is_defined, larger, 1)
        widths[start:stop] = differences / divisors
    return (widths + 1) / 2


def isolated_labels(
    widths: np.ndarray,
    batches: np.ndarray,
    labels: np.ndarray,
) -> np.ndarray | None:
    """Mean silhouette of the labels that are in the fewest batches, mean over these labels, as one term
    per cell (`label_mean_terms`); None if every label is in all batches.

    `widths` are the silhouettes of all cells, `(cells,)`.
    """
    n_batches = pd.Series(batches).groupby(labels).nunique()  # for each label
    if n_batches.min() == len(np.unique(batches)):
        return None
    isolated = n_batches.index[n_batches == n_batches.min()]
    is_isolated = np.isin(labels, isolated)
    isolated_widths = np.where(is_isolated, widths, np.nan)
    return label_mean_terms(isolated_widths, labels)


def batch_variance(vectors: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Share of the variance of `vectors` that lies between batches, as one number per cell.

    A cell's weight also shifts the means, but to first order that does not change the variances.
    """
    values = np.asarray(vectors, np.float64)
    # (cells,): squared distance to the mean of all cells, and of the cell's batch
    centred = values - values.mean(0)
    to_mean = (centred**2).sum(1)
    n_batches = batches.max() + 1
    means = np.stack([values[batches == batch].mean(0) for batch in range(n_batches)])
    centred_in_batch = values - means[batches]
    to_batch_mean = (centred_in_batch**2).sum(1)
    total = to_mean.mean()
    if total == 0:
        return np.zeros(len(values))
    within_frac = to_batch_mean.mean() / total
    # derivative of `within_frac` by the weight of each cell
    derivatives = (to_batch_mean - within_frac * to_mean) / total
    return 1 - within_frac - derivatives


def label_mean_terms(values: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Linear terms of a mean over labels: one number per cell, whose mean over all cells is the mean
    over labels of each label's mean of `values`.

    Cells with NaN do not count; None if all have NaN.
    """
    counts = np.isfinite(values)
    if not counts.any():
        return None
    # for cells that count: number of the label, (cells,); size and mean of each label, (labels,)
    _, label = np.unique(labels[counts], return_inverse=True)
    sizes = np.bincount(label)
    means = np.bincount(label, values[counts]) / sizes
    # the mean over labels, plus each cell's linear term
    terms = np.full(len(values), means.mean())
    weights = len(values) / (len(sizes) * sizes[label])
    terms[counts] += weights * (values[counts] - means[label])
    return terms


def _sum_by_class(
    classes: np.ndarray,
    weights: np.ndarray,
    n_classes: int,
) -> np.ndarray:
    """Sum of the weights of each class in each row, `(rows, n_classes)`."""
    n_rows = len(classes)
    # one bin for each pair of row and class
    bins = np.arange(n_rows)[:, None] * n_classes + classes
    sums = np.bincount(bins.ravel(), weights.ravel(), minlength=n_rows * n_classes)
    return sums.reshape(n_rows, n_classes)
