"""Task `integration`: mixing of batches and separation of labels (docs/evaluation.md).

Each measure is between 0 and 1, higher is better. It is returned as one number per cell, `(cells,)`
float64, whose mean is the measure, so that the difference of two embeddings has an interval
(`evaluate.scores`). A mean over labels of means over their cells becomes one over cells by the
infinitesimal jackknife (Efron 1981). Intervals take the neighbour graph as given; it holds exact
nearest neighbours. `labels` and `batches` are class numbers from 0, `(cells,)`.

    lisi                Korsunsky et al. 2019, Nat. Methods 16:1289 (Harmony): inverse Simpson index of the neighbours'
                        classes, weighted by a Gaussian kernel of given perplexity
    kbet                Büttner et al. 2019, Nat. Methods 16:43: chi-square test of the batches of a cell's neighbours
    graph_connectivity  Luecken et al. 2022, Nat. Methods 19:41 (scIB)
    bras                Rautenstrauch & Ohler 2025, Nat. Biotechnol.: silhouette of batches within labels, against all
                        cells of other batches; cosine distance
    silhouette          Rousseeuw 1987; ASW and isolated labels as in scIB, rescaled to 0 to 1
    batch_variance      Büttner et al. 2019: principal component regression with all components, whose variances times
                        R2 sum to the sum of squares between batches
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components
from scipy.stats import chi2
from sklearn.metrics import silhouette_samples
from sklearn.neighbors import NearestNeighbors

from cellmill.config.parts.tasks import IntegrationConfig
from cellmill.data.arrays import log_normalise, select_columns, summed, text_values
from cellmill.data.inputs.h5 import one_line
from cellmill.data.inputs.source import optional_package
from cellmill.evaluate.components import COMPONENTS, fit_own_components
from cellmill.evaluate.features import embed_counts, external_features, read_rows
from cellmill.evaluate.labels import labelled_cells
from cellmill.evaluate.methods import EMBEDDING, OF_TRAINING, UNTRAINED
from cellmill.evaluate.scores import ScoreColumn, seeded
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.runs.results import Row, ScoredMethod, TaskResult

CORRECTED = ScoredMethod(f"PCA{COMPONENTS}, Harmony")
PRINCIPAL = ScoredMethod(f"PCA{COMPONENTS}")
RANDOM = ScoredMethod("random")
# of the bandwidth that has the perplexity
SEARCH_STEPS = 60
TOLERANCE = 1e-6
ALPHA = 0.05  # level of kBET's test
# cells of a label in kBET, as in scIB; neighbours tested
FEWEST_OF_LABEL = 10
MOST_NEIGHBORS = 70
CONNECTED = 15  # neighbours in graph connectivity, as in scIB
BLOCK = 1024  # cells whose neighbours' classes are counted at once


class Integration(Task):
    config: IntegrationConfig

    def run(self, context: Context) -> TaskResult:
        """Batch and bio columns of every row; skipped without a label, or with cells of one batch."""
        if "batch" not in context.roles:
            raise Skipped("the dataset has no batch column")
        chosen = labelled_cells(
            context, "integration", self.config.min_cells, "evaluate.tasks.integration.min_cells"
        )
        given = context.roles["batch"].iloc[chosen.cells]
        known = given.notna().to_numpy()
        names, batches = np.unique(text_values(given[known]).astype(str), return_inverse=True)
        numbers = chosen.numbers | {"n_batches": len(names), "n_without_batch": int((~known).sum())}
        if len(names) < 2:
            raise Skipped(f"the labelled scored cells have {len(names)} batches, not 2", numbers)
        classes, labels = np.unique(chosen.labels[known], return_inverse=True)
        if not 2 <= len(classes) < len(labels):
            raise Skipped(
                f"the {len(labels)} scored cells with a batch have {len(classes)} labels", numbers
            )
        vectors = self.vectors(context, chosen.cells[known], batches)
        measures = {
            method: self.measure(values, vectors[PRINCIPAL], batches, labels)
            for method, values in vectors.items()
        }
        rows = []
        for method, by_heading in measures.items():
            means = {
                heading: None if values is None else float(np.mean(values)) + 0.0
                for heading, values in by_heading.items()
            }
            rows.append(Row(method, numbers=means))
        columns = []
        for heading, values in measures[EMBEDDING].items():
            # graph connectivity is no mean over cells: without interval and verdict
            if isinstance(values, np.ndarray):
                scores = {
                    method: by_heading[heading][None] for method, by_heading in measures.items()
                }
                columns.append(ScoreColumn(heading, heading, scores))
        against = CORRECTED if self.config.harmony else PRINCIPAL
        return TaskResult(
            rows,
            verdicts=[column.compare(EMBEDDING, against) for column in columns],
            figures=numbers,
            differences=[line for column in columns for line in column.differences()],
        )

    def vectors(
        self, context: Context, cells: np.ndarray, batches: np.ndarray
    ) -> dict[ScoredMethod, np.ndarray]:
        """Vectors of the cells by method, `(cells, width)`."""
        model = context.model
        columns = context.columns
        counts = read_rows(context.reader, cells)
        profiles = summed(counts) if columns.ordered else counts
        known = log_normalise(select_columns(profiles, columns.target, model.vocabulary.n_genes))
        vectors = {
            EMBEDDING: context.vectors[cells],
            UNTRAINED: embed_counts(context, counts, model.untrained),
            OF_TRAINING: model.components.transform(known),
            PRINCIPAL: fit_own_components(log_normalise(profiles)),
        }
        if self.config.harmony:
            vectors[CORRECTED] = harmonised(vectors[PRINCIPAL], batches, context.options.seed)
        vectors[RANDOM] = seeded(context.options.seed, 2).normal(size=vectors[EMBEDDING].shape)
        return vectors | external_features(context, cells)

    def measure(
        self, vectors: np.ndarray, principal: np.ndarray, batches: np.ndarray, labels: np.ndarray
    ) -> dict[str, Any]:
        """Numbers of the cells by column; a single number for graph connectivity, None for what
        does not apply.
        """
        graph = NeighborGraph.of(vectors, self.config.neighbors)
        perplexity = graph.indices.shape[1] / 3
        widths = silhouettes(vectors, labels)
        between = batch_variance(vectors, batches)
        before = batch_variance(principal, batches).mean()
        return {
            "batch: iLISI": (lisi(graph, batches, perplexity) - 1) / batches.max(),
            "batch: kBET": kbet(vectors, batches, labels),
            "batch: graph connectivity": graph_connectivity(graph, labels),
            "batch: BRAS": bras(vectors, batches, labels),
            "batch: PCR": 1 - between / before if before > 0 else None,
            "bio: cLISI": 1 - (lisi(graph, labels, perplexity) - 1) / labels.max(),
            "bio: isolated labels": isolated_labels(widths, batches, labels),
            "bio: label ASW": widths,
        }


def harmonised(vectors: np.ndarray, batches: np.ndarray, seed: int) -> np.ndarray:
    """`vectors`, (cells, width), corrected by Harmony with its own defaults (Korsunsky et al.
    2019).

    Raises Skipped where it cannot: harmonypy makes one cluster of 30 cells, none of 15 or fewer.
    """
    harmony = optional_package("harmonypy", "integrate", "evaluate.tasks.integration.harmony")
    frame = pd.DataFrame({"batch": batches.astype(str)})
    try:
        done = harmony.run_harmony(
            vectors, frame, "batch", verbose=False, random_state=seed, ncores=1
        )
        corrected = np.asarray(done.Z_corr, np.float64)
    except ValueError as error:
        raise Skipped(
            f"harmonypy refuses the {len(vectors):,} scored cells with a batch: {one_line(error)}; score more cells "
            "(shard.test_frac), or set harmony: false"
        ) from None
    return corrected if corrected.shape == vectors.shape else corrected.T


@dataclass(frozen=True)
class NeighborGraph:
    """The k nearest other cells of each cell by Euclidean distance, the nearest first."""

    indices: np.ndarray  # `(cells, k)` int32
    distances: np.ndarray  # `(cells, k)` float64

    @classmethod
    def of(cls, features: Any, k: int) -> Self:
        """Graph of `features` `(cells, width)`, dense or sparse; with fewer than k + 1 cells, of
        all other cells.
        """
        k = min(k, features.shape[0] - 1)
        distances, indices = (
            NearestNeighbors(n_neighbors=k, algorithm="brute").fit(features).kneighbors()
        )
        return cls(indices.astype(np.int32), distances.astype(np.float64))


def adjacency_of(indices: np.ndarray) -> sp.csr_matrix:
    """1 from each cell to its neighbours `(cells, k)`; `(cells, cells)` float64, not symmetric."""
    n, k = indices.shape
    return sp.csr_matrix(
        (np.ones(n * k), indices.ravel(), np.arange(0, n * k + 1, k)), shape=(n, n)
    )


def jaccard_weights(graph: NeighborGraph) -> sp.coo_matrix:
    """Undirected edges, upper triangle: share of common neighbours, cells included (Levine et al.
    2015, Cell 162).
    """
    n = len(graph.indices)
    adjacency = adjacency_of(graph.indices)
    edges = sp.triu(adjacency.maximum(adjacency.T), k=1).tocoo()
    closed = adjacency + sp.identity(n, format="csr")
    k = graph.indices.shape[1] + 1
    shared = np.asarray(closed[edges.row].multiply(closed[edges.col]).sum(axis=1)).ravel()
    return sp.coo_matrix((shared / (2 * k - shared), (edges.row, edges.col)), shape=(n, n))


def lisi(graph: NeighborGraph, classes: np.ndarray, perplexity: float) -> np.ndarray:
    """Effective number of classes among the neighbours of each cell, 1 to the number of classes."""
    weights = neighbor_weights(graph.distances, perplexity)
    index = np.empty(len(classes))
    n_classes = int(classes.max()) + 1
    for first in range(0, len(classes), BLOCK):
        part = slice(first, first + BLOCK)
        shares = _sums(classes[graph.indices[part]], weights[part], n_classes)
        index[part] = 1 / (shares**2).sum(1)
    return index


def neighbor_weights(distances: np.ndarray, perplexity: float) -> np.ndarray:
    """Normalised weights exp(-beta d) of neighbours; beta of each cell gives them the entropy
    log(perplexity).
    """
    shifted = distances - distances[:, :1]  # the same weights, and none underflows to a sum of 0
    low = np.zeros(len(distances))
    high = np.full(len(distances), np.inf)
    beta = np.ones(len(distances))
    for _ in range(SEARCH_STEPS):
        weights = np.exp(-beta[:, None] * shifted)
        total = weights.sum(1)
        entropy = np.log(total) + beta * (shifted * weights).sum(1) / total
        excess = entropy - np.log(perplexity)
        if (np.abs(excess) < TOLERANCE).all():
            break
        low = np.where(excess > 0, beta, low)
        high = np.where(excess > 0, high, beta)
        beta = np.where(np.isinf(high), 2 * beta, (low + np.where(np.isinf(high), 0, high)) / 2)
    return weights / total[:, None]


def kbet(vectors: np.ndarray, batches: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """1 where the batches of a cell and its neighbours do not differ from the label's at the level
    of 5 %, by label.

    Neighbours are of the label, a quarter of a batch's mean size, 10 to 70, as in scIB. Labels of
    one batch or below 10 cells are left out; None if all are.
    """
    accepted = np.full(len(labels), np.nan)
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        names, batch, sizes = np.unique(batches[cells], return_inverse=True, return_counts=True)
        n_batches = len(names)
        if n_batches < 2 or len(cells) < FEWEST_OF_LABEL:
            continue
        k = min(MOST_NEIGHBORS, max(10, len(cells) // n_batches // 4))
        graph = NeighborGraph.of(vectors[cells], k - 1)
        around = np.hstack([np.arange(len(cells), dtype=np.int32)[:, None], graph.indices])
        expected = sizes / len(cells) * around.shape[1]
        observed = _sums(batch[around], np.ones(around.shape), n_batches)
        statistic = ((observed - expected) ** 2 / expected).sum(1)
        accepted[cells] = chi2.sf(statistic, n_batches - 1) >= ALPHA
    return mean_of_labels(accepted, labels)


def graph_connectivity(graph: NeighborGraph, labels: np.ndarray) -> float:
    """Mean over labels of the share of cells in the largest connected component of their part of
    the graph.
    """
    adjacency = adjacency_of(graph.indices[:, :CONNECTED])
    shares = []
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        _, components = connected_components(adjacency[cells][:, cells], directed=False)
        shares.append(np.bincount(components).max() / len(cells))
    return float(np.mean(shares))


def bras(vectors: np.ndarray, batches: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """1 - |s|, mean over labels, with s the silhouette of batches within a label; None if no label
    has two batches.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float64)
    scores = np.full(len(labels), np.nan)
    for label in np.unique(labels):
        cells = np.flatnonzero(labels == label)
        names, batch = np.unique(batches[cells], return_inverse=True)
        if len(names) > 1:
            scores[cells] = 1 - np.abs(_cosine_silhouette(directions[cells], batch))
    return mean_of_labels(scores, labels)


def _cosine_silhouette(directions: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Silhouette by cosine distance against all cells of other batches; 0 for a batch of one cell.

    A mean cosine distance to cells is 1 minus the product with their mean direction: no pairs are
    needed.
    """
    n = len(batch)
    sizes = np.bincount(batch).astype(float)
    sums = np.stack([directions[batch == one].sum(0) for one in range(len(sizes))])
    own = sizes[batch]
    others = n - sizes[batch]
    to_own = (directions * sums[batch]).sum(1)
    to_all = directions @ directions.sum(0)
    itself = (directions * directions).sum(1)
    within = ((own - 1) - (to_own - itself)) / np.maximum(own - 1, 1)
    between = (others - (to_all - to_own)) / others
    larger = np.maximum(within, between)
    defined = (own > 1) & (larger > 0)
    return np.where(defined, (between - within) / np.where(defined, larger, 1), 0)


def silhouettes(vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Silhouette of the labels by Euclidean distance, rescaled from -1 to 1 to 0 to 1."""
    return (np.asarray(silhouette_samples(vectors, labels), np.float64) + 1) / 2


def isolated_labels(
    widths: np.ndarray, batches: np.ndarray, labels: np.ndarray
) -> np.ndarray | None:
    """`silhouettes` of the labels in the fewest batches, mean over these labels; None if all labels
    are in all.
    """
    spread = {label: len(np.unique(batches[labels == label])) for label in np.unique(labels)}
    fewest = min(spread.values())
    if fewest == len(np.unique(batches)):
        return None
    isolated = np.isin(labels, [label for label, n in spread.items() if n == fewest])
    return mean_of_labels(np.where(isolated, widths, np.nan), labels)


def batch_variance(vectors: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Share of the variance of `vectors` that lies between batches; derivatives of the means
    vanish.
    """
    values = np.asarray(vectors, np.float64)
    around_all = ((values - values.mean(0)) ** 2).sum(1)
    means = np.stack([values[batches == one].mean(0) for one in range(int(batches.max()) + 1)])
    around_batch = ((values - means[batches]) ** 2).sum(1)
    total = around_all.mean()
    if total == 0:
        return np.zeros(len(values))
    within = around_batch.mean() / total
    return 1 - within - (around_batch - within * around_all) / total


def mean_of_labels(values: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Numbers whose mean over all cells is the mean over labels of mean `values`; labels of NaN do
    not count.
    """
    known = np.isfinite(values)
    if not known.any():
        return None
    classes, of = np.unique(labels[known], return_inverse=True)
    sizes = np.bincount(of)
    means = np.bincount(of, values[known]) / sizes
    made = np.full(len(values), means.mean())
    made[known] += len(values) / (len(classes) * sizes[of]) * (values[known] - means[of])
    return made


def _sums(classes: np.ndarray, weights: np.ndarray, n_classes: int) -> np.ndarray:
    """Sum of the weights of each class in each row, `(rows, n_classes)`."""
    rows = np.arange(len(classes))[:, None] * n_classes
    sums = np.bincount(
        (rows + classes).ravel(), weights.ravel(), minlength=len(classes) * n_classes
    )
    return sums.reshape(len(classes), n_classes)
