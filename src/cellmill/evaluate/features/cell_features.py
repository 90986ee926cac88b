"""Features of cells that are made from their counts: the embedding, and baselines to compare it with."""

from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.arrays import gene_counts, log_normalise, select_columns
from cellmill.data.inputs.reader import CountsReader
from cellmill.evaluate.inference.embed import embed_batches, tokenize_blocks
from cellmill.evaluate.methods import (
    ALL_GENES,
    EMBEDDING,
    TRAINING_COMPONENTS,
    UNTRAINED,
    Features,
)
from cellmill.evaluate.task import Context
from cellmill.models.family import Model
from cellmill.runs.results import ScoredMethod

TOKEN_BUDGET = 16_384  # at most this many tokens in one pass of the model; changes only rounding
ROW_BLOCK = 4096  # at most this many cells are read at once
TOKENIZED_CELLS = 512  # at most this many cells are tokenized at once


def cell_features(context: Context, cells: np.ndarray) -> Features:
    """Compute the features of `cells` (indices, ascending), `(cells, width)` by method.

    Embeddings by models of other packages are among the methods. Consecutive tasks of a process that read
    the same cells share the arrays: do not change the arrays.
    """
    features = context.feature_cache.find(_sources(context), cells)
    if features is None:
        counts = read_rows(context.reader, cells)
        features = compute_features(context, cells, counts, context.vectors[cells])
        for name, vectors in context.external.items():
            features[ScoredMethod(f"external: {name}", kind="external")] = vectors[cells]
        context.feature_cache.keep(_sources(context), cells, features)
    return {**features}  # a copy, because a task may add methods


def compute_profiles(context: Context, cells: np.ndarray) -> sp.csr_matrix:
    """Log-normalised counts of `cells` (indices, ascending), `(cells, genes)`.

    The matrix is feature ALL_GENES of `cell_features`. The other features are not computed.
    """
    kept = context.feature_cache.find(_sources(context), cells)
    if kept is not None:
        return kept[ALL_GENES]
    counts = read_rows(context.reader, cells)
    return log_normalise(gene_counts(counts, context.gene_columns.ordered))


def _sources(context: Context) -> tuple[Any, ...]:
    """Everything that the features of cells are computed from."""
    return context.reader, context.vectors, context.model, context.external


def compute_features(
    context: Context,
    cells: np.ndarray,
    counts: sp.csr_matrix,
    embedding: np.ndarray | None = None,
) -> Features:
    """Compute the features of `cells` (indices) from their `counts`, `(cells, width)` by method.

    Only the feature ALL_GENES is sparse. The `embedding` is computed unless it is given.
    """
    model = context.model
    columns = context.gene_columns
    all_counts = gene_counts(counts, columns.ordered)
    known_counts = select_columns(all_counts, columns.target, model.vocabulary.n_genes)
    return {
        EMBEDDING: (
            embed_counts(context, cells, counts, model.network) if embedding is None else embedding
        ),
        UNTRAINED: embed_counts(context, cells, counts, model.untrained),
        TRAINING_COMPONENTS: model.components.transform(log_normalise(known_counts)),
        ALL_GENES: log_normalise(all_counts),
    }


def embed_counts(
    context: Context, cells: np.ndarray, counts: sp.csr_matrix, network: Model
) -> np.ndarray:
    """Compute the vectors of `cells` (indices) from their `counts`, `(cells, hidden)` float32.

    A cell without tokens has zeros.
    """
    model = context.model
    n_cells = counts.shape[0]
    starts = range(0, n_cells, TOKENIZED_CELLS)
    blocks = (counts[first : first + TOKENIZED_CELLS] for first in starts)
    per_cell = {"levels": context.levels[cells]}
    tokens = tokenize_blocks(
        blocks, context.gene_columns, model.vocabulary, model.tokens, per_cell=per_cell
    )
    vectors = embed_batches(tokens, network, n_cells, TOKEN_BUDGET, context.options.precision)
    return np.nan_to_num(vectors)


def keep_columns(counts: sp.csr_matrix, is_kept: np.ndarray) -> sp.csr_matrix:
    """Return the counts with 0 in all columns where `is_kept`, `(columns,)` bool, is False."""
    changed = counts.copy()
    changed.data = counts.data * is_kept[counts.indices].astype(counts.dtype)
    changed.eliminate_zeros()
    return changed


def read_rows(reader: CountsReader, cells: np.ndarray) -> sp.csr_matrix:
    """Read the counts of `cells` (indices), `(cells, columns)`, in the order of the file."""
    is_read = np.isin(np.arange(reader.n_obs), cells)
    blocks = []
    first = 0
    for block in reader.rows(ROW_BLOCK):
        blocks.append(block[np.flatnonzero(is_read[first : first + block.shape[0]])])
        first += block.shape[0]
    return sp.vstack(blocks, format="csr")
