"""Genes that perturbations are named after."""

from collections.abc import Sequence

import pandas as pd

from cellmill.data.gene_tables import ORGANISMS, PREFIXES
from cellmill.data.genes import map_genes
from cellmill.data.vocabulary import Vocabulary

SEPARATOR = "+"
"""Between the genes of one perturbation."""


def perturbed_genes(names: Sequence[str], vocabulary: Vocabulary) -> dict[str, list[int]]:
    """Rows of the vocabulary by perturbation; empty for one without a gene of the vocabulary.

    A gene is found by Ensembl id, symbol, or the earlier symbols and aliases of the packaged tables.
    """
    parts = sorted({part.strip() for name in names for part in name.split(SEPARATOR)})
    by_symbol = {symbol: row for row, symbol in enumerate(vocabulary.symbols)}
    organisms = [o for o in ORGANISMS if any(gene.startswith(PREFIXES[o]) for gene in vocabulary.gene_ids)]
    rows = dict(zip(parts, vocabulary.rows_of(parts).tolist()))
    for part in parts:
        if rows[part] < 0:
            rows[part] = by_symbol.get(part, -1)
    for organism in organisms:
        ids = map_genes(parts, pd.DataFrame(index=parts), organism).gene_ids
        for part, row in zip(parts, vocabulary.rows_of(ids).tolist()):
            rows[part] = row if rows[part] < 0 else rows[part]
    return {name: [rows[p] for part in name.split(SEPARATOR) if rows[p := part.strip()] >= 0] for name in names}
