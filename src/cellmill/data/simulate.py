"""Simulated cells with the difficulties of real ones, for tests and benchmarks.

Cell types are the leaves of a binary tree along which expression drifts, so siblings are similar; programmes of
co-expressed genes vary within a type; batches and donors shift genes; library sizes differ; every droplet has ambient
RNA of the whole pool; in perturbed cells one gene is knocked down and some others change. Counts are Poisson. Cell i
is a function of the seed and its block of 256 cells only, so any number of cells takes the memory of one block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.gene_tables import gene_symbols
from cellmill.errors import ConfigError

BLOCK = 256
PROGRAMMES = 12
DONORS_PER_BATCH = 2
LIBRARY, LIBRARY_SD = 4000.0, 0.35  # median counts of a cell, and sd of their logarithm
AMBIENT_FRAC = 0.05  # mean over cells
MITO_GENES = 13
_RNA = ("RN", *(f"T{letter}" for letter in "ACDEFGHIKLMNPQRSTVWY"))  # MT-RNR1, MT-TA ...: not protein-coding


@dataclass(frozen=True)
class Simulation:
    """Simulated cells: `obs` (cell_type, batch, donor, perturbation), `var` (index Ensembl id, symbol), counts."""

    obs: pd.DataFrame
    var: pd.DataFrame
    _seed: int
    _programmes: np.ndarray  # (programmes, genes) log fold change per unit of activity
    _effects: dict[str, np.ndarray]  # obs column -> (levels, genes) log expression or log fold change

    def blocks(self) -> Iterator[sp.csr_matrix]:
        """Counts of all cells in order, CSR `(cells, genes)` uint16, `BLOCK` cells at a time; may be called again."""
        pool = np.exp(self._effects["cell_type"]).mean(axis=0)
        ambient = (pool / pool.sum()).astype(np.float32)
        for number, first in enumerate(range(0, len(self.obs), BLOCK)):
            random = _random(self._seed, 1, number)
            rows = self.obs.iloc[first : first + BLOCK]
            activity = random.gamma(0.5, 1.0, (len(rows), len(self._programmes))).astype(np.float32)
            log = activity @ self._programmes
            for column, effect in self._effects.items():
                log += effect[rows[column].cat.codes.to_numpy()]
            rate = np.exp(log)
            rate /= rate.sum(axis=1, keepdims=True)
            frac = random.beta(2, 2 / AMBIENT_FRAC - 2, (len(rows), 1)).astype(np.float32)
            library = random.lognormal(np.log(LIBRARY), LIBRARY_SD, (len(rows), 1)).astype(np.float32)
            counts = random.poisson(library * ((1 - frac) * rate + frac * ambient))
            yield sp.csr_matrix(np.minimum(counts, np.iinfo(np.uint16).max).astype(np.uint16))


def simulate(
    cells: int, genes: int, types: int = 8, batches: int = 2, perturbations: int = 0, seed: int = 0
) -> Simulation:
    """Simulate cells with human genes, including the 13 mitochondrial ones.

    With `perturbations`, one of that number of genes is knocked down in half of the cells; the others are `control`.
    Raises ConfigError when a number is out of range.
    """
    first = {symbol: gene for gene, symbol in reversed(gene_symbols("human").items()) if symbol != gene}
    known = {gene: symbol for symbol, gene in first.items()}  # one gene for each symbol
    mito = sorted(gene for gene, symbol in known.items() if symbol.startswith("MT-") and symbol[3:5] not in _RNA)
    mito = mito[:MITO_GENES]
    for name, value, low, high in (
        ("cells", cells, 1, 2**31),
        ("genes", genes, 2 * MITO_GENES, len(known)),
        ("types", types, 1, 1000),
        ("batches", batches, 1, 1000),
        ("perturbations", perturbations, 0, genes - MITO_GENES),
        ("seed", seed, 0, 2**63),
    ):
        if not low <= value <= high:
            raise ConfigError(f"--{name}: expected {low:,} to {high:,}, got {value}")
    others = [gene for gene in sorted(known) if gene not in mito][: genes - MITO_GENES]
    ids = sorted([*others, *mito])
    var = pd.DataFrame({"symbol": [known[gene] for gene in ids]}, index=pd.Index(ids, name="gene_id"))
    random = _random(seed, 0, 0)
    base = random.normal(0, 1.5, genes).astype(np.float32)
    targets = np.sort(random.choice([ids.index(gene) for gene in others], perturbations, replace=False))
    donors = batches * DONORS_PER_BATCH
    donor = random.integers(donors, size=cells)
    perturbed = random.integers(-perturbations, perturbations, cells) if perturbations else np.full(cells, -1)
    obs = pd.DataFrame(
        {
            "cell_type": _named(random.integers(types, size=cells), [f"type_{k}" for k in range(types)]),
            "batch": _named(donor // DONORS_PER_BATCH, [f"batch_{k}" for k in range(batches)]),
            "donor": _named(donor, [f"donor_{k}" for k in range(donors)]),
            "perturbation": _named(np.maximum(perturbed + 1, 0), ["control", *var["symbol"].iloc[targets]]),
        },
        index=pd.Index([f"cell_{i}" for i in range(cells)], name="cell"),
    )
    effects = {
        "cell_type": base + _tree(random, types, genes),
        "batch": _sparse_normal(random, (batches, genes), 0.5, 0.3),
        "donor": _sparse_normal(random, (donors, genes), 0.2, 0.3),
    }
    perturbed_genes = _sparse_normal(random, (perturbations, genes), 0.05, 0.7)
    perturbed_genes[np.arange(perturbations), targets] = np.log(0.1)
    effects["perturbation"] = np.concatenate([np.zeros((1, genes), np.float32), perturbed_genes])
    programmes = np.abs(_sparse_normal(random, (PROGRAMMES, genes), 0.05, 0.8))
    return Simulation(obs, var, seed, programmes, effects)


def _random(seed: int, stream: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, 0, number]))


def _named(codes: np.ndarray, names: list[str]) -> Any:
    return pd.Categorical.from_codes(codes, pd.Index(names))


def _sparse_normal(random: np.random.Generator, shape: tuple[int, int], frac: float, sd: float) -> np.ndarray:
    return (random.normal(0, sd, shape) * (random.random(shape) < frac)).astype(np.float32)


def _tree(random: np.random.Generator, leaves: int, genes: int) -> np.ndarray:
    """Log fold changes of the leaves of a binary tree; a tenth of the genes drifts along each edge."""
    nodes = np.zeros((1, genes), np.float32)
    while len(nodes) < leaves:
        nodes = np.repeat(nodes, 2, axis=0)
        nodes += _sparse_normal(random, nodes.shape, 0.1, 1.0)
    return nodes[:leaves]
