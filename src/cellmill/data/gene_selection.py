"""Genes that a vocabulary may have: those of a list, and protein-coding ones."""

from pathlib import Path

import numpy as np
import pandas as pd

from cellmill.config.corpus import VocabularyConfig
from cellmill.data.gene_tables import ORGANISMS, gene_table, organism_of
from cellmill.data.genes import map_genes
from cellmill.errors import ConfigError, DataError
from cellmill.files import refuse_special


def allowed_genes(gene_ids: list[str], options: VocabularyConfig) -> np.ndarray:
    """Genes of `gene_ids` that the options allow, bool. Raises DataError if that is none."""
    allowed = np.ones(len(gene_ids), bool)
    if options.genes is not None:
        allowed &= _listed(gene_ids, Path(options.genes))
    if options.protein_coding:
        allowed &= _protein_coding(gene_ids)
    if not allowed.any():
        raise DataError("no gene is left for the vocabulary: none in vocabulary.genes is protein coding")
    return allowed


def _listed(gene_ids: list[str], path: Path) -> np.ndarray:
    names = _read(path)
    organisms = [organism for organism in ORGANISMS if any(organism_of(gene) == organism for gene in gene_ids)]
    tables = [map_genes(names, pd.DataFrame(index=names), organism).gene_ids for organism in organisms]
    wanted = {*names, *(gene for table in tables for gene in table if gene)}
    allowed = np.array([gene in wanted for gene in gene_ids])
    if not allowed.any():
        raise DataError(
            f"{path}: none of its {len(names):,} genes is in the corpus, the first is {names[0][:40]!r}; list Ensembl "
            "ids or current symbols, one a line (vocabulary.genes)"
        )
    known = {gene for gene, keep in zip(gene_ids, allowed) if keep}
    absent = [name for name, *ids in zip(names, *tables) if known.isdisjoint({name, *ids})]
    if absent:
        print(f"{path}: {len(absent):,} of {len(names):,} genes are not in the corpus, such as {', '.join(absent[:3])}")
    return allowed


def _read(path: Path) -> list[str]:
    refuse_special(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"vocabulary.genes: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"vocabulary.genes: {path}: not UTF-8 text") from None
    if names := list(dict.fromkeys(name for line in lines if (name := line.strip()))):
        return names
    raise ConfigError(f"vocabulary.genes: {path}: empty; list one gene a line")


def _protein_coding(gene_ids: list[str]) -> np.ndarray:
    organisms = [organism_of(gene) for gene in gene_ids]
    if None in organisms:
        other = gene_ids[organisms.index(None)]
        raise DataError(
            f"vocabulary.protein_coding requires Ensembl ids, got gene {other!r}; set preprocess.organism, or "
            "protein_coding to no"
        )
    allowed = [gene in gene_table(str(organism)).protein_coding for gene, organism in zip(gene_ids, organisms)]
    if not any(allowed):
        raise DataError(f"no gene is left for the vocabulary: none of {len(gene_ids):,} is protein coding")
    return np.array(allowed)
