"""Genes that perturbations are named after."""

from collections.abc import Sequence

from cellmill.data.named_genes import rows_of_names
from cellmill.data.vocabulary import Vocabulary

SEPARATOR = "+"
"""Between the genes of one perturbation."""


def perturbed_genes(names: Sequence[str], vocabulary: Vocabulary) -> dict[str, list[int]]:
    """Rows of the vocabulary by perturbation; empty for one without a gene of the vocabulary.

    A gene is found by Ensembl id, symbol, or the earlier symbols and aliases of the packaged tables.
    """
    rows = rows_of_names((part.strip() for name in names for part in name.split(SEPARATOR)), vocabulary)
    return {name: [rows[p] for part in name.split(SEPARATOR) if rows[p := part.strip()] >= 0] for name in names}
