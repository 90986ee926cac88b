"""Columns of a file as rows of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cellmill.data.counts_reader import CountsReader
from cellmill.data.genes import ORGANISMS, is_expression, map_genes
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import DataError

_PREFIX = {"human": "ENSG", "mouse": "ENSMUSG"}


@dataclass(frozen=True)
class GeneColumns:
    """Rows of the vocabulary by column of a file."""

    target: np.ndarray
    """Row of the vocabulary for each column, -1 for none; int32."""
    measured: np.ndarray
    """Columns of gene expression, not of antibodies or guides; bool."""


def match_columns(reader: CountsReader, vocabulary: Vocabulary) -> GeneColumns:
    """Match columns of `reader` to genes of `vocabulary`, by name or through a table of symbols.

    Takes the reading that matches most genes. Raises DataError when none matches any.
    """
    measured = is_expression(reader.var)
    organisms = [o for o in ORGANISMS if any(gene.startswith(_PREFIX[o]) for gene in vocabulary.gene_ids)]
    best = np.full(reader.n_vars, -1, np.int32)
    for organism in (None, *organisms):
        ids = map_genes(reader.var_names, reader.var, organism).gene_ids
        target = np.where(measured, vocabulary.rows_of(ids), -1).astype(np.int32)
        if _n_matched(target) > _n_matched(best):
            best = target
        if (best[measured] >= 0).all():
            break  # no table can match more
    if _n_matched(best) == 0:
        raise DataError(
            f"{reader.path}: no genes in common with the model: its first is {reader.var_names[0]!r}, the model's "
            f"{vocabulary.gene_ids[0]!r} ({vocabulary.symbols[0]}); name genes by Ensembl id or current symbol"
        )
    return GeneColumns(best, measured)


def _n_matched(target: np.ndarray) -> int:
    return len(np.unique(target[target >= 0]))
