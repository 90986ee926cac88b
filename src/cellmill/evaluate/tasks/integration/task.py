"""Task `integration`: how well batches mix, and how well labels stay separate, in the vectors of cells.

`measures.py` has the measures, and docs/evaluation.md describes the task.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.config.parts.tasks import IntegrationConfig
from cellmill.data.arrays import text_values
from cellmill.data.inputs.h5 import one_line
from cellmill.data.inputs.source import optional_package
from cellmill.evaluate import draws
from cellmill.evaluate.draws import seeded
from cellmill.evaluate.features.cell_features import cell_features
from cellmill.evaluate.features.components import COMPONENTS
from cellmill.evaluate.features.neighbors import NeighborGraph
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, labelled_cells
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING, ByMethod
from cellmill.evaluate.scores import ScoreColumn
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.integration.measures import (
    measure_batch_variance,
    measure_bras,
    measure_graph_connectivity,
    measure_isolated_labels,
    measure_kbet,
    measure_lisi,
    measure_silhouettes,
)
from cellmill.runs.results import Row, ScoredMethod, TaskResult

# principal components of the scored cells, and the same components after a correction by Harmony
PRINCIPAL = ScoredMethod(f"PCA{COMPONENTS}")
CORRECTED = ScoredMethod(f"PCA{COMPONENTS}, Harmony")
# vectors of normal random numbers
RANDOM = ScoredMethod("random")
# Seconds to measure the vectors of one method: METHOD_S in any case, NEIGHBOR_S for each neighbour of each
# cell, and PAIR_S for each pair of cells.
METHOD_S = 0.1
NEIGHBOR_S = 5e-7
PAIR_S = 1.5e-8
HARMONY_CELL_S = 5e-4  # seconds of Harmony for each cell


class CellsOfBatches(NamedTuple):
    """Scored cells with a label and a batch."""

    cells: np.ndarray  # (cells,) int64: indices in the dataset, ascending
    batches: np.ndarray  # (cells,) int64: ids of the batches, from 0
    labels: np.ndarray  # (cells,) int64: ids of the labels, from 0
    figures: dict[str, Any]  # numbers of cells, labels and batches, for metrics.json


class Integration(Task):
    config: IntegrationConfig

    def run(self, context: Context) -> TaskResult:
        """Measure the vectors of each method, which is a row. Each measure is a column.

        Columns `batch: ...` measure how well batches mix, and columns `bio: ...` how well labels stay
        separate. Verdicts compare the embedding with principal components, corrected by Harmony if option
        `harmony` is set.

        Raises Skipped if the dataset has no labels or no batches, or too few cells that have both.
        """
        chosen = self._choose_cells(context)
        try:
            vectors_by_method = self.collect_vectors(context, chosen.cells, chosen.batches)
        except Skipped as skipped:
            raise Skipped(str(skipped), chosen.figures) from None
        rows, columns = self._measure_methods(vectors_by_method, chosen.batches, chosen.labels)
        baseline = CORRECTED if self.config.harmony else PRINCIPAL
        differences = []
        for column in columns:
            differences += column.differences()
        return TaskResult(
            rows,
            verdicts=[column.verdict(EMBEDDING, baseline) for column in columns],
            figures=chosen.figures,
            differences=differences,
        )

    def estimate_s(self, sizes: DatasetSizes) -> float:
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        # `collect_vectors` returns five methods, one more with Harmony, and one for each external model
        n_methods = 5 + sizes.n_external + self.config.harmony
        harmony_s = HARMONY_CELL_S * n if self.config.harmony else 0.0
        measures_s = METHOD_S + NEIGHBOR_S * n * self.config.neighbors + PAIR_S * n**2
        return sizes.features_s(n) + sizes.components_s(n) + harmony_s + n_methods * measures_s

    def _choose_cells(self, context: Context) -> CellsOfBatches:
        """Choose the scored cells with a label and a batch.

        Raises Skipped in the cases of `labelled_cells`, and if these cells are of fewer than two batches.
        """
        if "batch" not in context.roles:
            raise Skipped("the dataset has no batch column")
        column = context.roles["batch"]
        has_batch = column.notna().to_numpy()
        option = "evaluate.tasks.integration.min_cells"
        labelled = labelled_cells(
            replace(context, scored=context.scored & has_batch),
            "integration",
            self.config.min_cells,
            option,
            reason=f"{option}, of cells with a batch",
        )
        batch_of_cell = text_values(column.iloc[labelled.cells]).astype(str)
        names, batches = np.unique(batch_of_cell, return_inverse=True)
        figures = labelled.figures | {
            "n_batches": len(names),
            "n_without_batch": int((context.scored & ~has_batch).sum()),
        }
        if len(names) < 2:
            raise Skipped(
                f"expected labelled scored cells of two batches or more, got {len(names)}", figures
            )
        _, labels = np.unique(labelled.labels, return_inverse=True)
        return CellsOfBatches(labelled.cells, batches, labels, figures)

    def _measure_methods(
        self, vectors_by_method: ByMethod, batches: np.ndarray, labels: np.ndarray
    ) -> tuple[list[Row], list[ScoreColumn]]:
        """Measure the vectors of each method.

        Returns a row for each method, with the values of all measures. Also returns a column for each
        measure that is a mean over cells. Verdicts are made from the columns.
        """
        rows = []
        # scores by heading and method, (1, cells): there is one repetition
        scores: dict[str, ByMethod] = {}
        for method, vectors in vectors_by_method.items():
            principal = vectors_by_method[PRINCIPAL]
            values_by_heading = self.measure(vectors, principal, batches, labels)
            row = Row(method)
            for heading, values in values_by_heading.items():
                # adding 0.0 turns -0.0 into 0.0
                row.numbers[heading] = None if values is None else float(np.mean(values)) + 0.0
                # graph connectivity is not a mean over cells, so it has no interval or verdict
                if isinstance(values, np.ndarray):
                    scores.setdefault(heading, {})[method] = values[None]
            rows.append(row)
        columns = [
            ScoreColumn(heading, heading, by_method) for heading, by_method in scores.items()
        ]
        return rows, columns

    def collect_vectors(self, context: Context, cells: np.ndarray, batches: np.ndarray) -> ByMethod:
        """Collect the vectors of the cells by method, `(cells, width)`.

        The methods are those of `cell_features` without ALL_GENES, and PRINCIPAL and RANDOM. With option
        `harmony`, CORRECTED is also a method.
        """
        vectors = cell_features(context, cells)
        principal = context.feature_cache.share(vectors.pop(ALL_GENES)).source.components
        vectors[PRINCIPAL] = principal
        seed = context.options.seed
        if self.config.harmony:
            vectors[CORRECTED] = run_harmony(principal, batches, seed, context.options.cells)
        vectors[RANDOM] = seeded(seed, draws.RANDOM_VECTORS).normal(size=vectors[EMBEDDING].shape)
        return vectors

    def measure(
        self, vectors: np.ndarray, principal: np.ndarray, batches: np.ndarray, labels: np.ndarray
    ) -> dict[str, np.ndarray | float | None]:
        """Compute all measures of `vectors`, `(cells, width)`, by the heading of the column.

        Most measures are an array, `(cells,)` float64, and the mean of the array is the value in the table.
        Graph connectivity is a single number. A measure that does not apply is None.

        `principal`, `(cells, components)`, are the vectors of PRINCIPAL: PCR compares their variance
        between batches with the variance of `vectors` between batches. `batches` and `labels`, `(cells,)`,
        are ids from 0.
        """
        graph = NeighborGraph.build(vectors, self.config.neighbors)
        perplexity = graph.indices.shape[1] / 3
        batches_around = measure_lisi(graph, batches, perplexity)
        labels_around = measure_lisi(graph, labels, perplexity)
        widths = measure_silhouettes(vectors, labels)
        batch_variance = measure_batch_variance(vectors, batches)
        uncorrected = measure_batch_variance(principal, batches).mean()
        # LISI runs from 1 to the number of classes. It is rescaled to 0 to 1; `max()` is the largest id,
        # which is the number of classes minus 1.
        return {
            "batch: iLISI": (batches_around - 1) / batches.max(),
            "batch: kBET": measure_kbet(vectors, batches, labels),
            "batch: graph connectivity": measure_graph_connectivity(graph, labels),
            "batch: BRAS": measure_bras(vectors, batches, labels),
            "batch: PCR": 1 - batch_variance / uncorrected if uncorrected > 0 else None,
            "bio: cLISI": 1 - (labels_around - 1) / labels.max(),
            "bio: isolated labels": measure_isolated_labels(widths, batches, labels),
            "bio: label ASW": widths,
        }


def run_harmony(vectors: np.ndarray, batches: np.ndarray, seed: int, scored: str) -> np.ndarray:
    """Correct `vectors`, `(cells, width)`, by Harmony with its default options (Korsunsky et al. 2019).

    `batches`, `(cells,)`, are the ids of the batches. `scored` is the value of option `evaluate.cells`, for
    the message.

    Raises Skipped if there are too few cells for harmonypy, which makes one cluster for each 30 cells, and
    no cluster of 15 or fewer cells. Raises ConfigError if harmonypy is not installed.
    """
    harmony = optional_package("harmonypy", "integrate", "evaluate.tasks.integration.harmony")
    obs = pd.DataFrame({"batch": batches.astype(str)})
    try:
        result = harmony.run_harmony(
            vectors, obs, "batch", verbose=False, random_state=seed, ncores=1
        )
        corrected = np.asarray(result.Z_corr, np.float64)
    except ValueError as error:
        more = "score more cells (shard.test_frac), or " if scored == "heldout" else ""
        raise Skipped(
            f"harmonypy refuses the {len(vectors):,} scored cells with a batch: {one_line(error)}; {more}"
            "set harmony: false"
        ) from None
    # versions of harmonypy differ in the order of the axes
    return corrected if corrected.shape == vectors.shape else corrected.T
