"""Measures of how well batches mix, and how well labels stay separate, in the vectors of cells.

These are the raw measures. `Integration.measure` rescales each of them so that 1 is best. LISI runs from 1
to the number of classes. A lower `batch_variance` is better.

Every measure except graph connectivity returns one number for each cell, `(cells,)` float64. The mean of
these numbers is the measure. So the difference of two embeddings is a mean of differences over cells, and
has an interval (`evaluate/intervals.py`). Some measures are means over labels of the means over their
cells. For these, the numbers of the cells are terms of a linear approximation (infinitesimal jackknife,
Efron 1981), which `compute_label_mean_terms` computes.

The neighbours of a cell are its exact nearest neighbours. The intervals take them as given.

In all functions, `vectors` are `(cells, width)`. `labels` and `batches` are class ids from 0, `(cells,)`.

    lisi                Korsunsky et al. 2019, Nat. Methods 16:1289 (Harmony): inverse Simpson index of the classes of
                        the neighbours. The weight of a neighbour at distance d is exp(-beta d), and beta gives a
                        wanted perplexity. As in the code of the authors, d is not squared.
    kbet                Büttner et al. 2019, Nat. Methods 16:43: chi-square test of the batches of a cell's neighbours
    graph_connectivity  Luecken et al. 2022, Nat. Methods 19:41 (scIB)
    bras                Rautenstrauch & Ohler 2025, Nat. Biotechnol.: silhouette of batches within a label by cosine
                        distance. A batch is compared with all cells of other batches together.
    silhouettes         Rousseeuw 1987. As in scIB, average silhouette width (ASW) and isolated labels are rescaled to
                        0 to 1.
    batch_variance      Büttner et al. 2019: principal component regression (PCR) on batches with all components. The
                        variances of the components, each times its R2, sum to the variance between batches.
"""

import numpy as np
import pandas as pd
from scipy.sparse.csgraph import connected_components
from scipy.stats import chi2

from cellmill.evaluate.features.neighbors import NeighborGraph, link_neighbors
from cellmill.evaluate.features.products import MAX_DOUBLE

MAX_SEARCH_STEPS = 60  # at most this many steps of the search for the weights of neighbours
ENTROPY_TOLERANCE = 1e-6  # largest error of the entropy, which is the logarithm of the perplexity
ALPHA = 0.05  # significance level of kBET's test
MIN_LABEL_CELLS = 10  # a label needs at least this many cells in kBET, as in scIB
# kBET tests this many cells for each cell, at least and at most: the cell itself and its neighbours
MIN_TESTED = 10
MAX_TESTED = 70
CONNECTED = 15  # graph connectivity links each cell with this many neighbours, as in scIB
BLOCK = 1024  # LISI counts the neighbours of at most this many cells at once
COMPARED = 256  # silhouettes compare at most this many cells with all cells at once


def measure_lisi(graph: NeighborGraph, classes: np.ndarray, perplexity: float) -> np.ndarray:
    """Measure the effective number of classes among the neighbours of each cell.

    This number is 1 if all neighbours are of one class, and at most the number of classes. `classes`,
    `(cells,)`, are the ids of labels or batches.
    """
    weights = compute_neighbor_weights(graph.distances, perplexity)
    n_classes = int(classes.max()) + 1
    effective = np.empty(len(classes))
    for block_start in range(0, len(classes), BLOCK):
        block = slice(block_start, block_start + BLOCK)
        classes_around = classes[graph.indices[block]]
        shares = _sum_by_class(classes_around, weights[block], n_classes)
        effective[block] = 1 / (shares**2).sum(1)
    return effective


def compute_neighbor_weights(distances: np.ndarray, perplexity: float) -> np.ndarray:
    """Compute the weights of the neighbours of each cell, `(cells, k)`; the weights of a cell sum to 1.

    The weight of a neighbour at distance d is proportional to exp(-beta d). The beta of a cell is chosen
    so that the entropy of the weights is log(perplexity). `distances` are `(cells, k)`, the nearest first.
    """
    # Subtract the distance of the nearest neighbour, so that its weight is not rounded to 0. The subtraction
    # changes all weights of a cell by the same factor.
    shifted = distances - distances[:, :1]
    # Search the beta of each cell, (cells,). It is doubled until an upper bound is known, then bisected.
    lower = np.zeros(len(distances))
    upper = np.full(len(distances), np.inf)
    beta = np.ones(len(distances))
    for _ in range(MAX_SEARCH_STEPS):
        weights = np.exp(-beta[:, None] * shifted)
        total = weights.sum(1)
        # the entropy of normalised weights is log(total) plus beta times the mean distance
        entropy = np.log(total) + beta * (shifted * weights).sum(1) / total
        excess = entropy - np.log(perplexity)
        if (np.abs(excess) < ENTROPY_TOLERANCE).all():
            break
        # a larger beta gives a smaller entropy
        lower = np.where(excess > 0, beta, lower)
        upper = np.where(excess > 0, upper, beta)
        is_unbounded = np.isinf(upper)
        middle = (lower + np.where(is_unbounded, 0, upper)) / 2
        beta = np.where(is_unbounded, 2 * beta, middle)
    return weights / total[:, None]


def measure_kbet(vectors: np.ndarray, batches: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Measure the share of cells with well mixed batches around them, by a chi-square test.

    A cell passes the test if the batches of its neighbours are distributed like the batches of all cells of
    its label, at level ALPHA. The share is a mean over labels, so each cell has a term of
    `compute_label_mean_terms`.

    Neighbours are cells of the same label. As in scIB, their number is a quarter of the mean number of
    cells in a batch, within MIN_TESTED and MAX_TESTED. A label with a single batch or fewer than
    MIN_LABEL_CELLS cells is left out. None if all labels are left out.
    """
    accepted = np.full(len(labels), np.nan)
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        batch_ids, batch, sizes = np.unique(batches[cells], return_inverse=True, return_counts=True)
        n_batches = len(batch_ids)
        if n_batches < 2 or len(cells) < MIN_LABEL_CELLS:
            continue

        # the tested cells of each cell, (cells, k): the cell itself and its neighbours
        mean_size = len(cells) // n_batches
        k = min(MAX_TESTED, max(MIN_TESTED, mean_size // 4))
        graph = NeighborGraph.build(vectors[cells], k - 1)
        itself = np.arange(len(cells), dtype=np.int32)
        tested = np.column_stack([itself, graph.indices])

        # compare the number of tested cells in each batch, (cells, batches), with the number expected from
        # the sizes of the batches, (batches,)
        expected = sizes / len(cells) * tested.shape[1]
        observed = _sum_by_class(batch[tested], np.ones(tested.shape), n_batches)
        statistic = ((observed - expected) ** 2 / expected).sum(1)
        p_value = chi2.sf(statistic, n_batches - 1)
        accepted[cells] = p_value >= ALPHA
    return compute_label_mean_terms(accepted, labels)


def measure_graph_connectivity(graph: NeighborGraph, labels: np.ndarray) -> float:
    """Measure whether neighbours connect the cells of a label.

    The measure of a label is the share of its cells in the largest connected component, in the graph of
    this label's cells only. Returns the mean over labels.
    """
    adjacency = link_neighbors(graph.indices[:, :CONNECTED])
    shares = []
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        _, components = connected_components(adjacency[cells][:, cells], directed=False)
        sizes = np.bincount(components)
        shares.append(sizes.max() / len(cells))
    return float(np.mean(shares))


def measure_bras(vectors: np.ndarray, batches: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Measure how little the batches within a label are separated.

    The measure of a cell is 1 - |s|, where s is the silhouette of the cell in its batch, by cosine distance
    to cells of the same label. The mean over cells is a mean over labels, so each cell has a term of
    `compute_label_mean_terms`. None if no label has two batches.
    """
    # scale the vectors to length 1, except vectors of zeros
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.where(lengths > 0, lengths, 1)
    directions = directions.astype(np.float64)
    scores = np.full(len(labels), np.nan)
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        batch_ids, batch = np.unique(batches[cells], return_inverse=True)
        if len(batch_ids) > 1:
            silhouettes = _compute_cosine_silhouettes(directions[cells], batch)
            scores[cells] = 1 - np.abs(silhouettes)
    return compute_label_mean_terms(scores, labels)


def _compute_cosine_silhouettes(directions: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Compute the silhouette of each cell in its batch by cosine distance, `(cells,)`, from -1 to 1.

    `directions`, `(cells, width)`, are vectors of length 1, and `batch`, `(cells,)`, are ids from 0. A cell
    is compared with all cells of other batches together.

    The mean cosine of a cell with other cells is the product of its direction with the mean direction of the
    other cells. So pairs of cells are not compared.
    """
    n_batches = batch.max() + 1
    # (batches, width): sum of the directions of each batch
    sums = np.stack([directions[batch == number].sum(0) for number in range(n_batches)])
    # (cells,): number of cells in the same batch, and in other batches
    n_in_batch = np.bincount(batch).astype(float)[batch]
    n_outside = len(batch) - n_in_batch
    # (cells,): sum of the cosines with the cells of the same batch, with all cells, and with the cell itself
    to_same = (directions * sums[batch]).sum(1)
    to_all = directions @ directions.sum(0)
    to_itself = (directions * directions).sum(1)
    # (cells,): mean distance to the other cells of the same batch, and to the cells of other batches. A mean
    # distance is 1 minus the mean cosine.
    n_others_in_batch = n_in_batch - 1
    within = (n_others_in_batch - (to_same - to_itself)) / np.maximum(n_others_in_batch, 1)
    between = (n_outside - (to_all - to_same)) / n_outside
    return _compute_silhouettes(within, between, n_others_in_batch)


def measure_silhouettes(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Measure the silhouette of each cell in its label by Euclidean distance, rescaled to 0 to 1.

    The only cell of a label has a silhouette of 0, which is rescaled to 0.5.
    """
    n_cells = len(labels)
    # centred vectors are smaller, and so are the rounding errors of their products
    values = np.asarray(vectors, np.float64)
    values = values - values.mean(0)
    if n_cells > MAX_DOUBLE:
        values = values.astype(np.float32)
    squares = np.einsum("ij,ij->i", values, values)
    is_label = np.eye(labels.max() + 1, dtype=values.dtype)[labels]  # (cells, labels)
    sizes = np.bincount(labels)
    widths = np.zeros(n_cells)  # silhouettes, which are also called silhouette widths
    for start in range(0, n_cells, COMPARED):
        stop = min(start + COMPARED, n_cells)
        rows = np.arange(stop - start)

        # Distances of the block's cells to all cells, (rows, cells). The squared distance of cells x and y
        # is -2 x·y + y·y + x·x. All steps work in place, because the array is large.
        distances = (-2 * values[start:stop]) @ values.T
        distances += squares
        distances += squares[start:stop, None]
        distances[rows, start + rows] = 0
        np.maximum(distances, 0, out=distances)
        np.sqrt(distances, out=distances)

        # mean distances to the other cells of the same label, and to the nearest other label
        sums = (distances @ is_label).astype(np.float64)  # (rows, labels)
        label = labels[start:stop]
        n_others_in_label = sizes[label] - 1
        within = sums[rows, label] / np.maximum(n_others_in_label, 1)
        means = sums / sizes
        means[rows, label] = np.inf
        between = means.min(1)
        widths[start:stop] = _compute_silhouettes(within, between, n_others_in_label)
    return (widths + 1) / 2


def _compute_silhouettes(
    within: np.ndarray, between: np.ndarray, n_others: np.ndarray
) -> np.ndarray:
    """Compute silhouettes from the mean distances of each cell, `(cells,)`, from -1 to 1.

    `within`, `(cells,)`, are the mean distances to the other cells of the same class. `n_others`, `(cells,)`,
    are the numbers of these other cells. `between`, `(cells,)`, are the mean distances to cells of other
    classes. The silhouette is 0 for a cell that is alone in its class, and if both distances are 0.
    """
    larger = np.maximum(within, between)
    is_defined = (n_others > 0) & (larger > 0)
    silhouettes = (between - within) / np.where(is_defined, larger, 1)
    return np.where(is_defined, silhouettes, 0)


def measure_isolated_labels(
    widths: np.ndarray,
    batches: np.ndarray,
    labels: np.ndarray,
) -> np.ndarray | None:
    """Measure the silhouettes of isolated labels, which are the labels in the fewest batches.

    `widths`, `(cells,)`, are the silhouettes of all cells. The mean over cells is a mean over isolated
    labels, so each cell has a term of `compute_label_mean_terms`. None if every label is in all batches.
    """
    n_batches_by_label = pd.Series(batches).groupby(labels).nunique()
    n_fewest = n_batches_by_label.min()
    if n_fewest == len(np.unique(batches)):
        return None
    isolated = n_batches_by_label.index[n_batches_by_label == n_fewest]
    is_isolated = np.isin(labels, isolated)
    isolated_widths = np.where(is_isolated, widths, np.nan)
    return compute_label_mean_terms(isolated_widths, labels)


def measure_batch_variance(vectors: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Measure the share of the variance of `vectors` that lies between batches.

    The number of each cell is a term of a linear approximation, made with the derivative of the share by the
    weight of the cell. The weight also shifts the means, but to first order this does not change variances.
    """
    values = np.asarray(vectors, np.float64)
    # (cells,): squared distance of each cell to the mean of all cells, and to the mean of its batch
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
    # (cells,): derivative of `within_frac` by the weight of each cell, times the number of cells
    derivatives = (to_batch_mean - within_frac * to_mean) / total
    return 1 - within_frac - derivatives


def compute_label_mean_terms(values: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Compute the linear terms of a mean over labels, `(cells,)` float64.

    Each label has a mean of `values`, `(cells,)`, over its cells. The mean over labels is the mean of these
    means. The terms of all cells have the same mean. Cells with NaN do not count. None if all cells have NaN.
    """
    is_counted = np.isfinite(values)
    if not is_counted.any():
        return None
    # label of each counted cell, (counted cells,), as an index; size and mean of each label, (labels,)
    _, label = np.unique(labels[is_counted], return_inverse=True)
    sizes = np.bincount(label)
    means = np.bincount(label, values[is_counted]) / sizes
    # the term of a cell is the mean over labels, plus the weighted deviation from the mean of its label
    terms = np.full(len(values), means.mean())
    weights = len(values) / (len(sizes) * sizes[label])
    terms[is_counted] += weights * (values[is_counted] - means[label])
    return terms


def _sum_by_class(
    classes: np.ndarray,
    weights: np.ndarray,
    n_classes: int,
) -> np.ndarray:
    """Sum the weights of each class in each row, `(rows, n_classes)`.

    `classes` are class ids, `(rows, k)`, and `weights` have the same shape.
    """
    n_rows = len(classes)
    # give each pair of a row and a class its own bin
    bins = np.arange(n_rows)[:, None] * n_classes + classes
    sums = np.bincount(bins.ravel(), weights.ravel(), minlength=n_rows * n_classes)
    return sums.reshape(n_rows, n_classes)
