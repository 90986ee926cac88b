"""Task `integration`: mixing of batches and separation of labels, in two groups of columns that are never added up.

A total would hide its parts: random vectors mix batches perfectly and would get half of it. The rows are the embedding;
the same architecture untrained; 50 principal components of the scored cells, and corrected by Harmony if requested
(harmonypy, extra `integrate`); and random vectors. Columns and their sources are in `evaluate.tasks.mixing`. LISI is a
mean over cells where scIB takes the median, because the median of cLISI is 1 for nearly everything. PCR is 1 minus the
share of variance between batches, relative to that share for the principal components.
"""

from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import IntegrationConfig
from cellmill.data.arrays import log_normalise, summed, text_values
from cellmill.data.inputs.source import optional_package
from cellmill.evaluate.features import embed_counts, labelled_cells, own_components, read_rows, with_external
from cellmill.evaluate.scores import EMBEDDING, UNTRAINED, ScoreColumn, differences, kind_of
from cellmill.evaluate.task import COMPONENTS, Context, Task, TaskResult
from cellmill.evaluate.tasks import mixing
from cellmill.evaluate.tasks.mixing import NeighborGraph

CONNECTED = 15  # neighbours in graph connectivity, as in scIB
CORRECTED, PRINCIPAL, RANDOM = f"PCA{COMPONENTS}, Harmony", f"PCA{COMPONENTS}", "random"


class Integration(Task):
    config: IntegrationConfig

    def run(self, context: Context) -> TaskResult:
        """Batch and bio columns of every row; skipped without a label, or with cells of one batch."""
        if "batch" not in context.roles:
            return TaskResult(skipped="the dataset has no batch column")
        chosen = labelled_cells(context, "integration", self.config.min_cells, "evaluate.tasks.integration.min_cells")
        if isinstance(chosen, TaskResult):
            return chosen
        given = context.roles["batch"].iloc[chosen.cells]
        known = given.notna().to_numpy()
        names, batches = np.unique(text_values(given[known]).astype(str), return_inverse=True)
        numbers = chosen.numbers | {"n_batches": len(names), "n_without_batch": int((~known).sum())}
        if len(names) < 2:
            return TaskResult(figures=numbers, skipped=f"the labelled scored cells have {len(names)} batches, not 2")
        classes, labels = np.unique(chosen.labels[known], return_inverse=True)
        if len(classes) < 2:
            return TaskResult(figures=numbers, skipped="the scored cells with a batch have one label")
        with threadpool_limits(1):  # sums in one order: the same numbers on any number of cores
            vectors = self.vectors(context, chosen.cells[known], batches)
            shown = {name: self.measure(of, vectors[PRINCIPAL], batches, labels) for name, of in vectors.items()}
        rows = [
            {"name": name, "kind": kind_of(name)}
            | {key: None if of is None else float(np.mean(of)) + 0.0 for key, of in measures.items()}
            for name, measures in shown.items()
        ]
        columns = [  # graph connectivity is no mean over cells: without interval and verdict
            ScoreColumn(heading, heading, {name: of[heading][None] for name, of in shown.items()})
            for heading, values in shown[EMBEDDING].items()
            if isinstance(values, np.ndarray)
        ]
        against = CORRECTED if self.config.harmony else PRINCIPAL
        verdicts = [column.compare(EMBEDDING, against) for column in columns]
        return TaskResult(rows, None, verdicts, numbers, differences=differences(columns))

    def vectors(self, context: Context, cells: np.ndarray, batches: np.ndarray) -> dict[str, np.ndarray]:
        """Vectors of the cells by name, `(cells, width)`."""
        seed, counts = context.options.seed, read_rows(context.reader, cells)
        principal = own_components(log_normalise(summed(counts) if context.columns.ordered else counts))
        untrained = embed_counts(context, counts, context.model.untrained)
        found = {EMBEDDING: context.vectors[cells], UNTRAINED: untrained, PRINCIPAL: principal}
        if self.config.harmony:  # with its own defaults (Korsunsky et al. 2019)
            harmony = optional_package("harmonypy", "integrate", "evaluate.tasks.integration.harmony")
            frame = pd.DataFrame({"batch": batches.astype(str)})
            done = harmony.run_harmony(principal, frame, "batch", verbose=False, random_state=seed, ncores=1)
            corrected = np.asarray(done.Z_corr, np.float64)
            found[CORRECTED] = corrected if corrected.shape == principal.shape else corrected.T
        generator = np.random.Generator(np.random.Philox(key=[seed, 2]))
        found[RANDOM] = generator.normal(size=found[EMBEDDING].shape)
        return with_external(found, context, cells)

    def measure(
        self, vectors: np.ndarray, principal: np.ndarray, batches: np.ndarray, labels: np.ndarray
    ) -> dict[str, Any]:
        """Numbers of the cells by column; a single number for graph connectivity, None for what does not apply."""
        graph = NeighborGraph.of(vectors, self.config.neighbors)
        perplexity = graph.indices.shape[1] / 3
        widths, before = mixing.silhouettes(vectors, labels), mixing.batch_variance(principal, batches).mean()
        between = mixing.batch_variance(vectors, batches)
        return {
            "batch: iLISI": mixing.ilisi(graph, batches, perplexity),
            "batch: kBET": mixing.kbet_of_labels(vectors, batches, labels),
            "batch: graph connectivity": mixing.graph_connectivity(graph.nearest(CONNECTED), labels),
            "batch: BRAS": mixing.bras(vectors, batches, labels),
            "batch: PCR": 1 - between / before if before > 0 else None,
            "bio: cLISI": mixing.clisi(graph, labels, perplexity),
            "bio: isolated labels": mixing.isolated_labels(widths, batches, labels),
            "bio: label ASW": widths,
        }
