"""Task `integration`: mixing of batches and separation of labels, in two groups of columns that are never added up.

A total would hide its parts: random vectors mix batches perfectly and would get half of it. The rows are the embedding;
the same architecture untrained; 50 principal components of the scored cells; the same components corrected by Harmony,
if requested (harmonypy, extra `integrate`); and random vectors, which show the value of each column for features
without information. Columns and their sources are in `evaluate.tasks.mixing`; all neighbours come from one exact graph
(kBET's from within a label). LISI is a mean over cells where scIB takes the median, because the median of cLISI is 1
for nearly everything. PCR is 1 minus the share of variance between batches, relative to that share for the principal
components of the scored cells: 0 for the components themselves, 1 for no variance between batches, and negative for
more variance between batches than theirs.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import IntegrationConfig
from cellmill.data.arrays import log_normalise, summed, text_values
from cellmill.errors import ConfigError
from cellmill.evaluate.features import Features, own_components, read_rows, with_external
from cellmill.evaluate.labels import labelled_cells
from cellmill.evaluate.scores import EMBEDDING, UNTRAINED, ScoreColumn, differences, kind_of
from cellmill.evaluate.task import COMPONENTS, Context, TaskResult
from cellmill.evaluate.tasks import mixing
from cellmill.evaluate.tasks.mixing import NeighborGraph


def import_harmonypy() -> Any:
    """harmonypy. Raises ConfigError if the extra is not installed."""
    try:
        return importlib.import_module("harmonypy")
    except ImportError:
        raise ConfigError(
            "evaluate.tasks.integration.harmony requires harmonypy, which is missing: pip install 'cellmill[integrate]'"
        ) from None


def corrected(components: np.ndarray, batches: np.ndarray, seed: int) -> np.ndarray:
    """`components` `(cells, width)` after Harmony with its own defaults (Korsunsky et al. 2019), float64."""
    frame = pd.DataFrame({"batch": batches.astype(str)})
    done = import_harmonypy().run_harmony(components, frame, "batch", verbose=False, random_state=seed, ncores=1)
    made = np.asarray(done.Z_corr, np.float64)
    return made if made.shape == components.shape else made.T


CONNECTED = 15  # neighbours in graph connectivity, as in scIB
CORRECTED, PRINCIPAL, RANDOM = f"PCA{COMPONENTS}, Harmony", f"PCA{COMPONENTS}", "random"
ONLY_SHOWN = "batch: graph connectivity"  # no mean over cells: without interval and verdict


class Integration:
    def __init__(self, config: IntegrationConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Batch and bio columns of every row; skipped without a label, or with cells of one batch."""
        if "batch" not in context.roles:
            return TaskResult(skipped="the dataset has no batch column")
        if self.config.harmony:
            import_harmonypy()
        chosen = labelled_cells(context, "integration", self.config.min_cells, "evaluate.tasks.integration.min_cells")
        if isinstance(chosen, TaskResult):
            return chosen
        of_cells = context.roles["batch"].iloc[chosen.cells]
        known = of_cells.notna().to_numpy()
        names, batches = np.unique(text_values(of_cells[known]).astype(str), return_inverse=True)
        figures = chosen.figures | {"n_batches": len(names), "n_without_batch": int((~known).sum())}
        if len(names) < 2:
            return TaskResult(figures=figures, skipped=f"the labelled scored cells have {len(names)} batches, not 2")
        cells = chosen.cells[known]
        classes, labels = np.unique(chosen.labels[known], return_inverse=True)
        if len(classes) < 2:
            return TaskResult(figures=figures, skipped="the scored cells with a batch have one label")
        with threadpool_limits(1):  # sums in one order: the same numbers on any number of cores
            rows = self.rows(context, cells, batches)
            shown = {name: self.measure(vectors, rows[PRINCIPAL], batches, labels) for name, vectors in rows.items()}
        columns = [
            ScoreColumn(heading, heading, {name: of[heading][None] for name, of in shown.items()})
            for heading, values in shown[EMBEDDING].items()
            if isinstance(values, np.ndarray)
        ]
        against = CORRECTED if self.config.harmony else PRINCIPAL
        table = [_row(name, measures) for name, measures in shown.items()]
        verdicts = [column.compare(EMBEDDING, against) for column in columns]
        return TaskResult(table, None, verdicts, figures, differences=differences(columns))

    def rows(self, context: Context, cells: np.ndarray, batches: np.ndarray) -> dict[str, np.ndarray]:
        """Vectors of the cells by name, `(cells, width)`."""
        seed, features = context.options.seed, Features(context)
        counts = read_rows(context.reader, np.isin(np.arange(context.reader.n_obs), cells))
        profiles = summed(counts) if features.columns.ordered else counts
        embedding, principal = context.vectors[cells], own_components(log_normalise(profiles))
        made = {EMBEDDING: embedding, UNTRAINED: features.untrained(counts), PRINCIPAL: principal}
        if self.config.harmony:
            made[CORRECTED] = corrected(principal, batches, seed)
        generator = np.random.Generator(np.random.Philox(key=[seed, 2]))
        return with_external(made | {RANDOM: generator.normal(size=embedding.shape)}, context, cells)

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
            ONLY_SHOWN: mixing.graph_connectivity(graph.nearest(CONNECTED), labels),
            "batch: BRAS": mixing.bras(vectors, batches, labels),
            "batch: PCR": 1 - between / before if before > 0 else None,
            "bio: cLISI": mixing.clisi(graph, labels, perplexity),
            "bio: isolated labels": mixing.isolated_labels(widths, batches, labels),
            "bio: label ASW": widths,
        }


def _row(name: str, measures: Mapping[str, Any]) -> dict[str, Any]:
    means = {heading: None if values is None else float(np.mean(values)) + 0.0 for heading, values in measures.items()}
    return {"name": name, "kind": kind_of(name), **means}
