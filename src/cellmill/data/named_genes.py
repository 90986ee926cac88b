"""Rows of a vocabulary for names that people write: Ensembl ids, symbols, and the earlier symbols and aliases."""

from collections.abc import Iterable

import pandas as pd

from cellmill.data.gene_tables import ORGANISMS, PREFIXES
from cellmill.data.genes import map_genes
from cellmill.data.vocabulary import Vocabulary


def rows_of_names(names: Iterable[str], vocabulary: Vocabulary) -> dict[str, int]:
    """Row of each name's gene; -1 for one that is not in the vocabulary.

    A name is looked up as an id, as a symbol of the vocabulary, then in the packaged tables of its organisms.
    """
    asked = sorted({*names})
    by_symbol = {symbol: row for row, symbol in enumerate(vocabulary.symbols)}
    organisms = [o for o in ORGANISMS if any(gene.startswith(PREFIXES[o]) for gene in vocabulary.gene_ids)]
    rows: dict[str, int] = dict(zip(asked, vocabulary.rows_of(asked).tolist()))
    for name in asked:
        if rows[name] < 0:
            rows[name] = by_symbol.get(name, -1)
    for organism in organisms:
        ids = map_genes(asked, pd.DataFrame(index=asked), organism).gene_ids
        for name, row in zip(asked, vocabulary.rows_of(ids).tolist()):
            rows[name] = row if rows[name] < 0 else rows[name]
    return rows
