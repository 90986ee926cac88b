"""Genes of a dataset: the Ensembl id of each row of var, and the refusal of unknown names."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cellmill.config.corpus import Preprocess
from cellmill.data.arrays import text_values
from cellmill.data.genes.families import describe_names
from cellmill.data.genes.names import (
    FITS_WELL,
    Coverage,
    MappedGenes,
    is_expression,
    map_genes,
    map_orthologs,
)
from cellmill.data.genes.tables import ORGANISMS
from cellmill.data.inputs.reader import CountsReader
from cellmill.errors import ConfigError, DataError

_TYPES = 5  # types of features that a message lists


@dataclass(frozen=True)
class Genes:
    """Genes of a dataset, one entry per Ensembl id."""

    gene_ids: list[str]
    symbols: list[str]
    is_mito: np.ndarray
    target: np.ndarray  # gene of each var row, as index into `gene_ids`, or -1; int32
    coverage: Coverage
    rows: np.ndarray  # var rows that are gene expression; int64
    unnamed: np.ndarray  # columns of these without an Ensembl id; int64
    summed: dict[str, list[str]]  # names of the var rows that share an id; their counts are summed
    names: np.ndarray  # name of each var row in the column that names it; object
    n_mito_names: int  # mitochondrial names, with or without an id
    own_ids: list[str]  # ids of the genes in the organism of the dataset


def find_organism(names: list[str], var: pd.DataFrame) -> Coverage:
    """Coverage of the organism to which most names of genes belong; `var` has a row for each."""
    coverages = [map_genes(names, var, organism).coverage for organism in ORGANISMS]
    return max(coverages, key=lambda coverage: coverage.frac)


def name_genes(reader: CountsReader, options: Preprocess) -> Genes:
    """Find the genes of a dataset, sorted by id as in every vocabulary.

    Later stages then need not sort the genes of a cell. Raises DataError below `min_coverage_frac` or
    without orthologs, ConfigError for options that require an organism.
    """
    for option in ("organism_column", "reference_organism"):
        if getattr(options, option) and options.organism is None:
            raise ConfigError(
                f"{reader.path}: preprocess.{option} requires the organism of each dataset; set preprocess.organism, "
                "or the dataset's organism"
            )
    rows = np.flatnonzero(is_expression(reader.var))
    names = [reader.var_names[row] for row in rows]
    var = reader.var.iloc[rows]
    if not names:
        raise DataError(f"{reader.path}: no genes: {_describe_types(reader.var)}")
    mapped = map_genes(names, var, options.organism)
    _check_coverage(reader.path, options, mapped, names, var)
    if mapped.conflict is not None:
        raise DataError(f"{reader.path}: {mapped.conflict}")
    unnamed = [row for row, gene in zip(rows, mapped.gene_ids) if not gene]
    own_ids = mapped.gene_ids
    n_mito_names = int(mapped.is_mito.sum())
    reference = options.reference_organism
    if reference is not None:
        table = None if options.orthologs is None else Path(options.orthologs)
        mapped = map_orthologs(mapped, reference, table)
        if not any(mapped.gene_ids):
            raise DataError(
                f"{reader.path}: none of {mapped.coverage.n_with_id:,} {options.organism} genes has a one-to-one "
                f"ortholog in {reference}; give a table that has them (preprocess.orthologs)"
            )
    carriers: dict[str, list[int]] = {}  # positions of the names of each id
    for i, gene in enumerate(mapped.gene_ids):
        if gene:
            carriers.setdefault(gene, []).append(i)
    gene_ids = sorted(carriers)
    target = np.full(reader.n_vars, -1, np.int32)
    numbers = {gene: number for number, gene in enumerate(gene_ids)}
    target[rows] = [numbers.get(gene, -1) for gene in mapped.gene_ids]
    first = [carriers[gene][0] for gene in gene_ids]
    summed = {}
    for gene, positions in carriers.items():
        if len(positions) > 1:
            summed[gene] = [mapped.names[i] for i in positions]
    shown = np.array(reader.var_names, dtype=object)
    shown[rows] = mapped.names
    return Genes(
        gene_ids=gene_ids,
        symbols=[mapped.symbols[i] for i in first],
        is_mito=mapped.is_mito[first],
        n_mito_names=n_mito_names,
        target=target,
        coverage=mapped.coverage,
        rows=rows,
        unnamed=np.array(unnamed, np.int64),
        summed=summed,
        names=shown,
        own_ids=[own_ids[i] for i in first],
    )


def _describe_types(var: pd.DataFrame) -> str:
    """The values of var['feature_types'], none of which is gene expression, with numbers of rows."""
    kinds = Counter(text_values(var["feature_types"]).tolist()).most_common(_TYPES)
    shown = ", ".join(f"{kind!r} {count:,}" for kind, count in kinds)
    return f"no var['feature_types'] is 'Gene Expression', its values are {shown}"


def _check_coverage(
    path: Path, options: Preprocess, mapped: MappedGenes, names: list[str], var: pd.DataFrame
) -> None:
    coverage = mapped.coverage
    organism = options.organism
    if organism is None or (coverage.frac >= options.min_coverage_frac and coverage.frac > 0):
        return
    text = (
        f"{path}: {coverage.n_with_id:,} of {coverage.n_genes:,} genes ({coverage.frac:.1%}) map to a "
        f"{organism} Ensembl id, preprocess.min_coverage_frac is {options.min_coverage_frac:g}"
    )
    other = find_organism(names, var)
    if other.frac > coverage.frac and other.frac >= max(options.min_coverage_frac, FITS_WELL):
        raise DataError(
            f"{text}; {other.frac:.1%} map as {other.organism}: set preprocess.organism to {other.organism}"
        )
    unknown = [name for name, gene in zip(mapped.names, mapped.gene_ids) if not gene]
    text += f"; unknown: {', '.join(map(repr, unknown[:3]))}"
    if coverage.by_column:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in coverage.by_column.items())
        text += f"; share of names that are genes, by column of var: {shares}"
    remedy = describe_names(unknown, organism)
    if remedy is None:
        remedy = "name genes by Ensembl id or symbol, or set a lower preprocess.min_coverage_frac in a configuration"
    if coverage.by_column:
        remedy += "; set the dataset's gene_column to take a certain column"
    raise DataError(f"{text}; {remedy}")
