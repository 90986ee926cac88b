"""Genes that the options of a vocabulary allow: genes of a list, or protein-coding genes."""

from itertools import chain
from pathlib import Path

import numpy as np

from cellmill.config.corpus import VocabularyConfig
from cellmill.data.genes.names import map_names
from cellmill.data.genes.tables import gene_table, organism_of, read_lines
from cellmill.errors import ConfigError, DataError


def find_allowed(gene_ids: list[str], options: VocabularyConfig) -> np.ndarray:
    """Genes of `gene_ids` that the options allow, bool. Raises DataError if there are none."""
    allowed = np.ones(len(gene_ids), bool)
    if options.genes is not None:
        allowed &= _find_listed(gene_ids, Path(options.genes))
    if options.protein_coding:
        organisms = [organism_of(gene) for gene in gene_ids]
        if None in organisms:
            raise DataError(
                f"vocabulary.protein_coding requires Ensembl ids, got gene {gene_ids[organisms.index(None)]!r}; set "
                "preprocess.organism, or protein_coding to no"
            )
        tables = [gene_table(organism) for organism in {*map(str, organisms)}]
        is_coding = [any(gene in t.protein_coding for t in tables) for gene in gene_ids]
        if not any(is_coding):
            raise DataError(
                f"no gene is left for the vocabulary: none of {len(gene_ids):,} is protein coding"
            )
        allowed &= is_coding
    if not allowed.any():
        raise DataError(
            "no gene is left for the vocabulary: none in vocabulary.genes is protein coding"
        )
    return allowed


def _find_listed(gene_ids: list[str], path: Path) -> np.ndarray:
    """Mask of the genes that a file lists by id or name, one a line."""
    lines = map(str.strip, read_lines(path))
    names = list(dict.fromkeys(filter(None, lines)))
    if not names:
        raise ConfigError(f"vocabulary.genes: {path}: empty; list one gene a line")
    organisms = {*filter(None, map(organism_of, gene_ids))}
    tables = [map_names(names, organism).gene_ids for organism in sorted(organisms)]
    wanted = set(chain(names, *tables)) - {""}
    allowed = np.array([gene in wanted for gene in gene_ids])
    if not allowed.any():
        raise DataError(
            f"{path}: none of its {len(names):,} genes is in the corpus, the first is {names[0][:40]!r}; list Ensembl "
            "ids or current symbols, one a line (vocabulary.genes)"
        )
    present = wanted & {*gene_ids}
    absent = [name for name, *ids in zip(names, *tables) if present.isdisjoint({name, *ids})]
    if absent:
        print(
            f"{path}: {len(absent):,} of {len(names):,} genes are not in the corpus, such as {', '.join(absent[:3])}"
        )
    return allowed
