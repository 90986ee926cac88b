"""Simulated cells, simulated protein families, and demo data of real cells, for examples, tests and
benchmarks.

Simulated cells have the difficulties of real ones. Cell types are the leaves of a binary tree along
which expression drifts; programmes of co-expressed genes vary within a type; batches and donors
shift genes; library sizes differ; every droplet has ambient RNA; in perturbed cells one gene is
knocked down and some others change. Counts are Poisson. Cell i depends only on the seed and its
block of 256 cells.

A protein family has a random ancestor; a member is the ancestor with substitutions, mostly inside a
class of similar residues, and a deletion. Frequencies are from Swiss-Prot (release statistics,
amino acid composition). A header has the mean hydropathy of the residues (Kyte & Doolittle 1982), a
number that a model can learn.

The demo data are the 700 peripheral blood cells shipped with scanpy: `10x_pbmc68k_reduced.h5ad`
(Zheng et al. 2017, doi:10.1038/ncomms14049; BSD-3-Clause) has log(1 + counts per 10,000) of 765
genes in `raw` and totals in `n_counts`, precise enough to recover the counts exactly.
"""

import gzip
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import read_h5ad

from cellmill.data.arrays import TARGET_SUM
from cellmill.data.genes.tables import gene_table
from cellmill.errors import ConfigError, DataError
from cellmill.files import atomic_path

BLOCK = 256
PROGRAMMES = 12
DONORS_PER_BATCH = 2
# median counts of a cell, and sd of their logarithm
LIBRARY = 4000.0
LIBRARY_SD = 0.35
AMBIENT_FRAC = 0.05  # mean over cells
MITO_GENES = 13
FREQUENCY = {
    "A": 8.25, "Q": 3.93, "L": 9.65, "S": 6.65, "R": 5.53, "E": 6.71, "K": 5.79, "T": 5.36, "N": 4.06, "G": 7.07,
    "M": 2.41, "W": 1.1, "D": 5.46, "H": 2.27, "F": 3.86, "Y": 2.92, "C": 1.38, "I": 5.9, "P": 4.74, "V": 6.85,
}  # fmt: skip
HYDROPATHY = {
    "A": 1.8, "R": -4.5, "N": -3.5, "D": -3.5, "C": 2.5, "Q": -3.5, "E": -3.5, "G": -0.4, "H": -3.2, "I": 4.5,
    "L": 3.8, "K": -3.9, "M": 1.9, "F": 2.8, "P": -1.6, "S": -0.8, "T": -0.7, "W": -0.9, "Y": -1.3, "V": 4.2,
}  # fmt: skip
SIMILAR = ("AGST", "ILMV", "FWY", "DENQ", "HKR", "C", "P")
LENGTH = (60, 120)  # residues of an ancestor
SUBSTITUTED_FRAC = 0.2
SIMILAR_FRAC = 0.7
LONGEST_DELETION = 10
FILE = "datasets/10x_pbmc68k_reduced.h5ad"
RESIDUAL = 0.1  # largest accepted distance from a whole number; 0.082 is the largest observed
OBS = ["bulk_labels", "n_counts", "percent_mito"]


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
        symbols, mito = _named_genes()
        for name, value, low, high in (
            ("cells", cells, 1, 2**31),
            ("genes", genes, 2 * MITO_GENES, len(symbols)),
            ("types", types, 1, 1000),
            ("batches", batches, 1, 1000),
            ("perturbations", perturbations, 0, genes - MITO_GENES),
            ("seed", seed, 0, 2**63),
        ):
            _require_between(name, value, low, high)
        others = [gene for gene in symbols if gene not in mito][: genes - MITO_GENES]
        ids = sorted([*others, *mito])
        self.var = pd.DataFrame(
            {"symbol": [symbols[gene] for gene in ids]}, index=pd.Index(ids, name="gene_id")
        )
        self._seed = seed
        random = _random(seed, 0, 0)
        base = random.normal(0, 1.5, genes).astype(np.float32)
        targets = np.sort(
            random.choice(self.var.index.get_indexer(others), perturbations, replace=False)
        )
        self.obs = _draw_cells(
            random, cells, types, batches, list(self.var["symbol"].iloc[targets])
        )
        # log expression, or log fold change, of the levels of each column
        self._effects = {
            "cell_type": base + _draw_tree(random, types, genes),
            "batch": _sparse_normal(random, (batches, genes), 0.5, 0.3),
            "donor": _sparse_normal(random, (batches * DONORS_PER_BATCH, genes), 0.2, 0.3),
        }
        changed = _sparse_normal(random, (perturbations, genes), 0.05, 0.7)
        changed[np.arange(perturbations), targets] = np.log(0.1)
        self._effects["perturbation"] = np.concatenate([np.zeros((1, genes), np.float32), changed])
        # log fold change per unit of activity
        self._programmes = np.abs(_sparse_normal(random, (PROGRAMMES, genes), 0.05, 0.8))

    def blocks(self) -> Iterator[sp.csr_matrix]:
        """Counts of all cells in order, CSR `(cells, genes)` uint16, `BLOCK` cells at a time; may
        be called again.
        """
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
            library = random.lognormal(np.log(LIBRARY), LIBRARY_SD, (len(rows), 1)).astype(
                np.float32
            )
            counts = random.poisson(library * ((1 - frac) * rate + frac * ambient))
            yield sp.csr_matrix(np.minimum(counts, np.iinfo(np.uint16).max).astype(np.uint16))


def _named_genes() -> tuple[dict[str, str], set[str]]:
    """Symbol of each human gene that has one, by ascending id, and the mitochondrial genes that
    code for proteins.
    """
    table = gene_table("human")
    first = {symbol: gene for gene, symbol in reversed(table.symbols.items()) if symbol != gene}
    # one gene for each symbol
    symbols = {gene: symbol for symbol, gene in sorted(first.items(), key=itemgetter(1))}
    return symbols, {
        gene for gene, symbol in symbols.items() if symbol.startswith("MT-")
    } & table.protein_coding


def _draw_cells(
    random: np.random.Generator, cells: int, types: int, batches: int, knocked_down: list[str]
) -> pd.DataFrame:
    donors = batches * DONORS_PER_BATCH
    donor = random.integers(donors, size=cells)
    n = len(knocked_down)
    perturbed = random.integers(-n, n, cells) if n else np.full(cells, -1)  # negative: control
    levels = {
        "cell_type": (random.integers(types, size=cells), [f"type_{k}" for k in range(types)]),
        "batch": (donor // DONORS_PER_BATCH, [f"batch_{k}" for k in range(batches)]),
        "donor": (donor, [f"donor_{k}" for k in range(donors)]),
        "perturbation": (np.maximum(perturbed + 1, 0), ["control", *knocked_down]),
    }
    columns = {
        name: pd.Categorical.from_codes(codes, pd.Index(names))
        for name, (codes, names) in levels.items()
    }
    return pd.DataFrame(columns, index=pd.Index([f"cell_{i}" for i in range(cells)], name="cell"))


def _draw_tree(random: np.random.Generator, types: int, genes: int) -> np.ndarray:
    """Drift of the leaves of a binary tree, `(types, genes)`: along each edge a tenth of the genes
    drifts.
    """
    tree = np.zeros((1, genes), np.float32)
    while len(tree) < types:
        tree = np.repeat(tree, 2, axis=0)
        tree += _sparse_normal(random, tree.shape, 0.1, 1.0)
    return tree[:types]


def _require_between(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{option}: expected {low:,} to {high:,}, got {value}")


def _random(seed: int, stream: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, 0, number]))


def _sparse_normal(
    random: np.random.Generator, shape: tuple[int, ...], frac: float, sd: float
) -> np.ndarray:
    return (random.normal(0, sd, shape) * (random.random(shape) < frac)).astype(np.float32)


def write_sequences(out: Path, sequences: int, families: int, seed: int) -> None:
    """Write a FASTA file, gzip if `out` ends in .gz; a header has its family and its hydropathy.
    Raises ConfigError.
    """
    _require_between("cells", sequences, 1, 10**7)
    _require_between("types", families, 1, 1000)
    _require_between("seed", seed, 0, 2**63)
    with atomic_path(out) as temporary:
        text = "".join(_records(sequences, families, seed)).encode()
        temporary.write_bytes(gzip.compress(text, mtime=0) if out.suffix == ".gz" else text)


def _records(sequences: int, families: int, seed: int) -> Iterator[str]:
    random = _random(seed, 0, 0)
    letters = np.array(list(FREQUENCY))
    weights = np.array(list(FREQUENCY.values()))
    frequency = weights / weights.sum()
    similar = {letter: list(group) for group in SIMILAR for letter in group}
    ancestors = [
        random.choice(letters, random.integers(*LENGTH), p=frequency) for _ in range(families)
    ]
    for number in range(sequences):
        family = int(random.integers(families))
        member = ancestors[family].copy()
        for at in np.flatnonzero(random.random(len(member)) < SUBSTITUTED_FRAC):
            near = random.random() < SIMILAR_FRAC
            member[at] = (
                random.choice(similar[str(member[at])])
                if near
                else random.choice(letters, p=frequency)
            )
        first = random.integers(len(member))
        n = random.integers(LONGEST_DELETION + 1)
        member = np.delete(member, slice(first, first + n))
        hydropathy = sum(HYDROPATHY[residue] for residue in member) / len(member)
        yield f">protein_{number} family=family_{family} hydropathy={hydropathy:.3f}\n{''.join(member)}\n"


def read_demo() -> tuple[pd.DataFrame, pd.DataFrame, sp.csr_matrix]:
    """obs, var (index gene symbol) and counts, CSR `(700, 765)` uint16, of the file in the scanpy
    package, which is not imported. Raises DataError when it is missing.
    """
    spec = find_spec("scanpy")
    if spec is None or spec.origin is None:
        raise DataError(
            "the demo cells are part of the scanpy package: pip install 'cellmill[demo]'"
        )
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; this scanpy does not ship the demo cells: pip install 'scanpy>=1.10'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anndata warns about the old format of each part
        shipped = read_h5ad(path)
    counts = recover_counts(shipped.raw.X.tocsr(), shipped.obs["n_counts"].to_numpy(), path)
    names = pd.Index(shipped.raw.var_names.astype(str), name="gene")
    return shipped.obs[OBS].copy(), pd.DataFrame(index=names), counts


def recover_counts(logs: sp.csr_matrix, totals: np.ndarray, path: Path) -> sp.csr_matrix:
    """Counts, uint16, from `logs` = log(1 + 10,000 counts / totals).

    Raises DataError when one is more than 0.1 away from a whole number.
    """
    total = np.repeat(totals.astype(np.float64), np.diff(logs.indptr))
    exact = np.expm1(logs.data.astype(np.float64)) * total / TARGET_SUM
    whole = np.rint(exact)
    residual = float(np.abs(exact - whole).max(initial=0))
    if residual > RESIDUAL:
        raise DataError(
            f"{path}: cannot recover counts: expected whole numbers within {RESIDUAL}, got one {residual:.3f} away"
        )
    counts = sp.csr_matrix((whole.astype(np.uint16), logs.indices, logs.indptr), shape=logs.shape)
    counts.sort_indices()
    counts.eliminate_zeros()
    return counts
