"""Features of cells made from their counts: the embedding and the baselines."""

from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.arrays import log_normalise, select_columns, summed
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

TOKEN_BUDGET = 16_384  # tokens in one forward pass of a task; results do not depend on it
ROW_BLOCK = 4096  # cells read at once
TOKENIZED = 512  # cells whose tokens are made at once


def cell_features(context: Context, cells: np.ndarray) -> Features:
    """Features of `cells` (indices, ascending), including embeddings by models of other packages.

    Consecutive tasks of one process that read the same cells share the arrays: do not change them.
    """
    features = context.last_cells.find(_sources(context), cells)
    if features is None:
        counts = read_rows(context.reader, cells)
        features = compute_features(context, counts, context.vectors[cells])
        for name, vectors in context.external.items():
            features[ScoredMethod(f"external: {name}", kind="external")] = vectors[cells]
        context.last_cells.keep(_sources(context), cells, features)
    return {**features}


def cell_genes(context: Context, cells: np.ndarray) -> sp.csr_matrix:
    """Log-normalised counts of `cells` (indices, ascending), which a task may have kept."""
    kept = context.last_cells.find(_sources(context), cells)
    if kept is not None:
        return kept[ALL_GENES]
    counts = read_rows(context.reader, cells)
    return log_normalise(summed(counts) if context.gene_columns.ordered else counts)


def _sources(context: Context) -> tuple[Any, ...]:
    """All that the features of cells are made from."""
    return context.reader, context.vectors, context.model, context.external


def compute_features(
    context: Context, counts: sp.csr_matrix, embedding: np.ndarray | None = None
) -> Features:
    """Features by method, `(cells, width)`; only the features of all genes are sparse. A known
    `embedding` is not computed again.
    """
    model = context.model
    columns = context.gene_columns
    profiles = summed(counts) if columns.ordered else counts
    counts_in_vocabulary = select_columns(profiles, columns.target, model.vocabulary.n_genes)
    in_vocabulary = log_normalise(counts_in_vocabulary)
    return {
        EMBEDDING: embed_counts(context, counts, model.network) if embedding is None else embedding,
        UNTRAINED: embed_counts(context, counts, model.untrained),
        TRAINING_COMPONENTS: model.components.transform(in_vocabulary),
        ALL_GENES: log_normalise(profiles),
    }


def embed_counts(context: Context, counts: sp.csr_matrix, network: Model) -> np.ndarray:
    """Vectors of the cells, `(cells, hidden)` float32; zeros for cells without tokens."""
    model = context.model
    n_cells = counts.shape[0]
    rows = (counts[first : first + TOKENIZED] for first in range(0, n_cells, TOKENIZED))
    tokens = tokenize_blocks(rows, context.gene_columns, model.vocabulary, model.tokens)
    vectors = embed_batches(tokens, network, n_cells, TOKEN_BUDGET, context.options.precision)
    return np.nan_to_num(vectors)


def keep_columns(counts: sp.csr_matrix, kept: np.ndarray) -> sp.csr_matrix:
    """Counts, set to 0 in the columns where `kept`, bool `(columns,)`, is False."""
    changed = counts.copy()
    changed.data = counts.data * kept[counts.indices].astype(counts.dtype)
    changed.eliminate_zeros()
    return changed


def read_rows(reader: CountsReader, cells: np.ndarray) -> sp.csr_matrix:
    """Counts of the cells with these indices, in the order of the file."""
    mask = np.isin(np.arange(reader.n_obs), cells)
    blocks = []
    first = 0
    for block in reader.rows(ROW_BLOCK):
        blocks.append(block[np.flatnonzero(mask[first : first + block.shape[0]])])
        first += block.shape[0]
    return sp.vstack(blocks, format="csr")
