"""Simulated cells for examples, tests and benchmarks, with the difficulties of real ones.

Cell types are the leaves of a binary tree along which expression drifts; programmes of co-expressed
genes vary within a type; batches and donors shift genes; library sizes differ; every droplet has
ambient RNA; in perturbed cells one gene is knocked down and some others change. Counts are Poisson.
Cell i depends only on the seed and its block of 256 cells.
"""

from collections.abc import Iterator
from operator import itemgetter

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.genes.tables import gene_table
from cellmill.errors import ConfigError

BLOCK = 256
PROGRAMMES = 12
DONORS_PER_BATCH = 2
# counts of a cell: median, and sd of their logarithm
LIBRARY = 4000.0
LIBRARY_SD = 0.35
AMBIENT_FRAC = 0.05  # mean over cells
MITO_GENES = 13
MAX_TYPES = 1000
MAX_SEED = 2**63
# streams of random numbers
LEVELS = 0
COUNTS = 1


def seeded(seed: int, stream: int, number: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, 0, number]))


def require_between(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{option}: expected {low:,} to {high:,}, got {value}")


class Simulation:
    """Simulated cells with human genes, including the 13 mitochondrial ones.

    Half of the cells have one of `perturbations` genes knocked down; the others are `control`.
    `obs` has cell_type, batch, donor and perturbation, `var` the symbol of each Ensembl id. Raises
    ConfigError when a number is out of range.
    """

    def __init__(
        self,
        cells: int,
        genes: int,
        types: int = 8,
        batches: int = 2,
        perturbations: int = 0,
        seed: int = 0,
    ) -> None:
        symbols = _named_genes()
        require_between("cells", cells, 1, 2**31)
        require_between("genes", genes, 2 * MITO_GENES, len(symbols))
        require_between("types", types, 1, MAX_TYPES)
        require_between("batches", batches, 1, 1000)
        require_between("perturbations", perturbations, 0, genes - MITO_GENES)
        require_between("seed", seed, 0, MAX_SEED)
        coding = gene_table("human").protein_coding
        mito: list[str] = []
        nuclear: list[str] = []
        for gene, symbol in symbols.items():
            if symbol.startswith("MT-") and gene in coding:
                mito.append(gene)
            else:
                nuclear.append(gene)
        del nuclear[genes - MITO_GENES :]
        ids = pd.Index(sorted([*nuclear, *mito]), name="gene_id")
        self.var = pd.DataFrame({"symbol": [symbols[gene] for gene in ids]}, index=ids)
        self._seed = seed
        random = seeded(seed, LEVELS)
        base = random.normal(0, 1.5, genes).astype(np.float32)
        nuclear_columns = ids.get_indexer(nuclear)
        targets = np.sort(random.choice(nuclear_columns, perturbations, replace=False))
        knocked_down = self.var["symbol"].iloc[targets].tolist()
        self.obs = _draw_cells(random, cells, types, batches, knocked_down)
        # log expression, or log fold change, of the levels of each column, (levels, genes)
        self._effects = {
            "cell_type": base + _draw_tree(random, types, genes),
            "batch": _sparse_normal(random, (batches, genes), 0.5, 0.3),
            "donor": _sparse_normal(random, (batches * DONORS_PER_BATCH, genes), 0.2, 0.3),
        }
        changes = _sparse_normal(random, (perturbations, genes), 0.05, 0.7)
        changes[np.arange(perturbations), targets] = np.log(0.1)
        control = np.zeros((1, genes), np.float32)
        self._effects["perturbation"] = np.concatenate([control, changes])
        # log fold change per unit of activity
        self._programmes = np.abs(_sparse_normal(random, (PROGRAMMES, genes), 0.05, 0.8))

    def blocks(self) -> Iterator[sp.csr_matrix]:
        """Yield the counts of all cells in order, CSR `(cells, genes)` uint16, `BLOCK` cells at a time.

        It may be called again.
        """
        pool = np.exp(self._effects["cell_type"]).mean(axis=0)
        ambient = (pool / pool.sum()).astype(np.float32)
        for number, first in enumerate(range(0, len(self.obs), BLOCK)):
            random = seeded(self._seed, COUNTS, number)
            obs = self.obs.iloc[first : first + BLOCK]
            per_cell = (len(obs), 1)
            # share of each gene among the counts of a cell, (cells, genes)
            activity = random.gamma(0.5, 1.0, (len(obs), PROGRAMMES)).astype(np.float32)
            logs = activity @ self._programmes
            for column, effect in self._effects.items():
                logs += effect[obs[column].cat.codes.to_numpy()]
            shares = np.exp(logs)
            shares /= shares.sum(axis=1, keepdims=True)
            # Poisson counts of the cell and of ambient RNA
            frac = random.beta(2, 2 / AMBIENT_FRAC - 2, per_cell).astype(np.float32)
            library = random.lognormal(np.log(LIBRARY), LIBRARY_SD, per_cell).astype(np.float32)
            shares_of_cell = (1 - frac) * shares
            counts = random.poisson(library * (shares_of_cell + frac * ambient))
            counts = np.minimum(counts, np.iinfo(np.uint16).max)
            yield sp.csr_matrix(counts.astype(np.uint16))


def _named_genes() -> dict[str, str]:
    """Symbol of each human gene that has one, by symbol; of genes that share one, the first."""
    genes: dict[str, str] = {}
    for gene, symbol in gene_table("human").symbols.items():
        if symbol != gene:
            genes.setdefault(symbol, gene)
    return {gene: symbol for symbol, gene in sorted(genes.items(), key=itemgetter(1))}


def _draw_cells(
    random: np.random.Generator, cells: int, types: int, batches: int, knocked_down: list[str]
) -> pd.DataFrame:
    """obs of the cells, with categories in all columns."""
    n_donors = batches * DONORS_PER_BATCH
    donor = random.integers(n_donors, size=cells)
    n = len(knocked_down)
    target = random.integers(-n, n, cells) if n else np.full(cells, -1)  # negative: control
    cell_type = random.integers(types, size=cells)
    levels = {
        "cell_type": (cell_type, _number("type", types)),
        "batch": (donor // DONORS_PER_BATCH, _number("batch", batches)),
        "donor": (donor, _number("donor", n_donors)),
        "perturbation": (np.maximum(target + 1, 0), ["control", *knocked_down]),
    }
    columns = {}
    for name, (codes, names) in levels.items():
        columns[name] = pd.Categorical.from_codes(codes, pd.Index(names))
    return pd.DataFrame(columns, index=pd.Index(_number("cell", cells), name="cell"))


def _number(word: str, n: int) -> list[str]:
    return [f"{word}_{i}" for i in range(n)]


def _draw_tree(random: np.random.Generator, types: int, genes: int) -> np.ndarray:
    """Draw the drift of the leaves of a binary tree, `(types, genes)`.

    Along each edge a tenth of the genes drifts.
    """
    leaves = np.zeros((1, genes), np.float32)
    while len(leaves) < types:
        leaves = np.repeat(leaves, 2, axis=0)
        leaves += _sparse_normal(random, leaves.shape, 0.1, 1.0)
    return leaves[:types]


def _sparse_normal(
    random: np.random.Generator, shape: tuple[int, ...], frac: float, sd: float
) -> np.ndarray:
    """Normal values at a fraction `frac` of the positions, zeros elsewhere."""
    values = random.normal(0, sd, shape)
    is_drawn = random.random(shape) < frac
    return (values * is_drawn).astype(np.float32)
