"""Choice of the genes of a vocabulary: a list of genes, protein-coding genes, or highly variable ones.

Highly variable genes follow two flavors of scanpy's `highly_variable_genes`, computed from sums over blocks of cells.
`seurat` (Satija et al. 2015) ranks genes by their dispersion (variance over mean of counts per 10,000), standardised
among genes of a similar mean. `seurat_v3` (Stuart et al. 2019) ranks by the variance of counts, standardised by a curve
of variance over mean, with large counts clipped: that takes a second pass over the cells.
"""

from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd

from cellmill.config.corpus import VocabularyConfig
from cellmill.data.genes.names import map_genes
from cellmill.data.genes.tables import gene_table, organism_of, read_lines
from cellmill.data.inputs.source import optional_package
from cellmill.errors import ConfigError, DataError


def allowed_genes(gene_ids: list[str], options: VocabularyConfig) -> np.ndarray:
    """Genes of `gene_ids` that the options allow, bool. Raises DataError if there are none."""
    allowed = np.ones(len(gene_ids), bool)
    if options.genes is not None:
        allowed &= _listed(gene_ids, Path(options.genes))
    if options.protein_coding:
        organisms = [organism_of(gene) for gene in gene_ids]
        if None in organisms:
            raise DataError(
                f"vocabulary.protein_coding requires Ensembl ids, got gene {gene_ids[organisms.index(None)]!r}; set "
                "preprocess.organism, or protein_coding to no"
            )
        coding = [gene in gene_table(str(organism)).protein_coding for gene, organism in zip(gene_ids, organisms)]
        if not any(coding):
            raise DataError(f"no gene is left for the vocabulary: none of {len(gene_ids):,} is protein coding")
        allowed &= coding
    if not allowed.any():
        raise DataError("no gene is left for the vocabulary: none in vocabulary.genes is protein coding")
    return allowed


def _listed(gene_ids: list[str], path: Path) -> np.ndarray:
    names = list(dict.fromkeys(name for line in read_lines(path) if (name := line.strip())))
    if not names:
        raise ConfigError(f"vocabulary.genes: {path}: empty; list one gene a line")
    organisms = sorted({organism for gene in gene_ids if (organism := organism_of(gene))})
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


_MEAN_BINS = 20
_NO_MEAN = 1e-12


class Moments:
    """Sums of values, and of their squares, of each gene over cells; float64."""

    def __init__(self, n_genes: int):
        self.n_cells = 0
        self.sums, self.squares = np.zeros(n_genes), np.zeros(n_genes)

    def add(self, genes: np.ndarray, values: np.ndarray, n_cells: int) -> None:
        """Add nonzero values, `(n,)`, each of the gene at the same position of `genes`, of `n_cells` more cells."""
        self.n_cells += n_cells
        self.sums += np.bincount(genes, values, minlength=len(self.sums))
        self.squares += np.bincount(genes, np.square(values, dtype=np.float64), minlength=len(self.sums))

    def at(self, genes: np.ndarray) -> Self:
        """The same of some genes."""
        chosen = type(self)(len(genes))
        chosen.n_cells, chosen.sums, chosen.squares = self.n_cells, self.sums[genes], self.squares[genes]
        return chosen

    @property
    def mean(self) -> np.ndarray:
        return self.sums / self.n_cells

    @property
    def variance(self) -> np.ndarray:
        """Unbiased variance over all cells, those without the gene included."""
        return (self.squares / self.n_cells - self.mean**2) * (self.n_cells / max(1, self.n_cells - 1))


def standardised_dispersion(per_10k: Moments) -> np.ndarray:
    """Score of flavor `seurat`, from moments of counts per 10,000; NaN for a gene without variance."""
    mean = np.where(per_10k.mean == 0, _NO_MEAN, per_10k.mean)
    dispersion = per_10k.variance / mean
    dispersion[dispersion <= 0] = np.nan
    table = pd.DataFrame({"dispersion": np.log(dispersion), "bin": pd.cut(np.log1p(mean), _MEAN_BINS)})
    groups = table.groupby("bin", observed=True)["dispersion"]
    centre, spread = groups.transform("mean"), groups.transform("std")
    alone = spread.isna()  # the only gene of its bin: its score is 1
    spread, centre = spread.where(~alone, centre), centre.where(~alone, 0.0)
    return ((table["dispersion"] - centre) / spread).to_numpy()


def expected_deviation(counts: Moments) -> np.ndarray:
    """Standard deviation that the mean of each gene predicts, of flavor `seurat_v3`, from moments of counts.

    The curve is a local regression of degree 2. Raises ConfigError without scikit-misc.
    """
    loess = optional_package("skmisc.loess", "hvg", "vocabulary.select seurat_v3").loess
    expected, varies = np.zeros(len(counts.sums)), counts.variance > 0
    model = loess(np.log10(counts.mean[varies]), np.log10(counts.variance[varies]), span=0.3, degree=2)
    model.fit()
    expected[varies] = model.outputs.fitted_values
    return np.sqrt(10**expected)


def standardised_variance(counts: Moments, clipped: Moments, deviation: np.ndarray) -> np.ndarray:
    """Score of flavor `seurat_v3`, from moments of counts, of clipped counts, and the expected deviations."""
    n, mean = counts.n_cells, counts.mean
    return (n * mean**2 + clipped.squares - 2 * clipped.sums * mean) / ((n - 1) * deviation**2)


def by_score(scores: np.ndarray) -> np.ndarray:
    """Genes by score, the highest first; of equal scores the first gene first, and NaN last."""
    return np.argsort(-np.nan_to_num(scores, nan=-np.inf, posinf=np.inf), kind="stable")
