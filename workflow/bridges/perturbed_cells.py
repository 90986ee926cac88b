"""Predicted and measured cells of held-out perturbations, from a file of stage `predict_changes`.

Bridges run in the interpreter of another package, so nothing of cellmill is imported. Measured cells are those of the
file, with the half of the controls that no prediction starts from. Predicted cells are as many for each perturbation,
and begin as controls of the other half, drawn from the batch (and donor) of the measured ones. A gene of theirs then
gets the predicted mean, that of these controls and the change, not below 0, by as many detected cells as that takes:
cells of a gene that goes down lose it, cells of one that goes up get a value that another of them has, and the rest is
a factor near 1. Adding the change to each cell instead would move zeros, which no measured cell does, and so make half
of all genes differ significantly from controls whatever is predicted.

There are two ways to draw them. `predicted` cells have the predicted mean exactly. A metric that takes sampling noise
off a prediction's mean would take off noise that is not there, most where it is least deserved. For such a metric
`sampled` cells are drawn one by one, so that their mean is the predicted one but for the noise of a sample.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

ABOUT, COLUMN = "cellmill_changes", "perturbation"  # in uns and obs
FEWEST_TO_RANK = 2  # perturbations: one alone is always the nearest to itself
LARGEST = float(np.log1p(1e4))  # of log(1 + counts per 10,000): all counts of a cell in one gene


@dataclass(frozen=True)
class PerturbedCells:
    """Legend: U perturbations, G genes."""

    control: str
    perturbations: list[str]  # (U,)
    kinds: dict[str, str]  # kind by method: model, baseline or probe
    changes: dict[str, np.ndarray]  # (U, G) by method
    measured: ad.AnnData  # with the controls that nothing starts from
    start: ad.AnnData  # controls that predictions start from
    seed: int
    model_digest: str

    def profiles(self, method: str) -> np.ndarray:
        """(U, G) float64: predicted mean of each perturbation's cells; may be below 0."""
        n_strata = 1 + max(int(cells.obs["stratum"].max()) for cells in (self.measured, self.start))
        means = np.zeros((n_strata, self.start.n_vars))
        for stratum in np.unique(self.start.obs["stratum"]):
            means[stratum] = self.start.X[self._starting(stratum)].mean(axis=0, dtype=np.float64)
        shares = np.stack(
            [np.bincount(self._strata(name), minlength=n_strata) for name in self.perturbations]
        )
        return shares / shares.sum(axis=1, keepdims=True) @ means + self.changes[method]

    def predicted(self, method: str) -> ad.AnnData:
        """Cells of all perturbations with exactly the predicted means, and the controls that they start from."""
        usual = _usual_values(self.start.X)
        blocks, names = [], []
        for number, (name, means) in enumerate(zip(self.perturbations, self.profiles(method))):
            generator = np.random.Generator(
                np.random.Philox(key=[self.seed, number])
            )  # the same for all methods
            drawn = np.concatenate([*self._draw(name, generator)])
            cells = self.start.X[drawn].toarray().astype(np.float64)
            blocks.append(
                sp.csr_matrix(with_means(cells, means, usual, generator).astype(np.float32))
            )
            names += [name] * len(drawn)
        return self._with_start(blocks, names)

    def sampled(self, method: str) -> ad.AnnData:
        """Cells of all perturbations, drawn one by one from the predicted expression, and the controls of the start.

        The draws are the same for all methods, so that their noise is, too.
        """
        blocks = []
        names = []
        for number, (name, means) in enumerate(zip(self.perturbations, self.profiles(method))):
            generator = np.random.Generator(np.random.Philox(key=[self.seed, number]))
            strata, sizes = np.unique(self._strata(name), return_counts=True)
            weights = np.zeros(
                self.start.n_obs
            )  # of each control: the share of its stratum, evenly divided
            for stratum, size in zip(strata, sizes):
                starting = self._starting(stratum)
                weights[starting] = size / sizes.sum() / len(starting)
            cells = sample_with_means(self.start.X, weights, means, int(sizes.sum()), generator)
            blocks.append(sp.csr_matrix(cells.astype(np.float32)))
            names += [name] * len(cells)
        return self._with_start(blocks, names)

    def _with_start(self, blocks: list[sp.csr_matrix], names: list[str]) -> ad.AnnData:
        """Cells of perturbations `names`, and the controls that they start from."""
        perturbation = names + [self.control] * self.start.n_obs
        obs = pd.DataFrame(
            {COLUMN: perturbation},
            index=[f"predicted {number}" for number in range(len(perturbation))],
        )
        return ad.AnnData(sp.csr_matrix(sp.vstack([*blocks, self.start.X])), obs, self.start.var)

    def _draw(self, name: str, generator: np.random.Generator) -> Iterator[np.ndarray]:
        """Controls for each stratum of a perturbation's cells, none oftener than another by more than one."""
        for stratum, n in zip(*np.unique(self._strata(name), return_counts=True)):
            yield np.resize(generator.permutation(self._starting(stratum)), n)

    def _strata(self, name: str) -> np.ndarray:
        return self.measured.obs.loc[self.measured.obs[COLUMN] == name, "stratum"].to_numpy()

    def _starting(self, stratum: int) -> np.ndarray:
        return np.flatnonzero(self.start.obs["stratum"] == stratum)


def read_arguments() -> argparse.Namespace:
    """Arguments of a bridge that reads such a file."""
    parser = argparse.ArgumentParser()
    for name, kind in {"changes": Path, "out": Path, "threads": int}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    return parser.parse_args()


def read_changes(path: Path) -> PerturbedCells:
    """The cells of a file of stage `predict_changes`. Genes have the names that perturbations are told by."""
    cells = ad.read_h5ad(path)
    about = cells.uns[ABOUT]
    perturbations = [str(name) for name in about["perturbations"]]
    methods = [str(name) for name in about["methods"]]
    cells.var_names = _gene_names(cells.var, perturbations)
    del cells.uns[ABOUT]
    starts = (cells.obs["group"] == "start control").to_numpy()
    cells.obs[COLUMN] = cells.obs[COLUMN].astype(str)
    return PerturbedCells(
        str(about["control"]),
        perturbations,
        dict(zip(methods, map(str, about["kinds"]))),
        dict(zip(methods, np.asarray(about["changes"], np.float64))),
        cells[~starts].copy(),
        cells[starts].copy(),
        int(about["seed"]),
        str(about["model_digest"]),
    )


def _gene_names(var: pd.DataFrame, perturbations: list[str]) -> list[str]:
    """The symbol of each gene; its id where a perturbation is called by that, or another gene has the symbol."""
    taken: set[str] = set()
    names = []
    for gene_id, symbol in zip(var.index.astype(str), var["symbol"].astype(str)):
        names.append(gene_id if gene_id in perturbations or symbol in taken else symbol)
        taken.add(symbol)
    return names


def _usual_values(expression: sp.csr_matrix) -> np.ndarray:
    """(G,) float64: mean of the nonzero values of each gene; of all genes where it has none."""
    n = np.diff(expression.tocsc().indptr)
    sums = np.asarray(expression.sum(axis=0), np.float64).ravel()
    return np.divide(sums, n, out=np.full(len(n), sums.sum() / max(n.sum(), 1) or 1.0), where=n > 0)


def with_means(
    cells: np.ndarray, means: np.ndarray, usual: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """`cells`, (n, G) float64, changed so that the mean of each gene is that of `means`, within 0 and LARGEST.

    `usual` (G,) is the value of a gene that none of them has.
    """
    made = cells.copy()
    for gene, total in enumerate(np.clip(means, 0, LARGEST) * len(cells)):
        column = made[:, gene]
        detected = np.flatnonzero(column)
        level = column[detected].mean() if len(detected) else usual[gene]
        n = min(max(round(total / level), 1), len(column)) if total > 0 else 0
        if n < len(detected):
            column[generator.choice(detected, len(detected) - n, replace=False)] = 0
        elif n > len(detected):
            silent = generator.choice(np.flatnonzero(column == 0), n - len(detected), replace=False)
            column[silent] = (
                generator.choice(column[detected], len(silent)) if len(detected) else level
            )
        if n:
            column *= total / column.sum()
            if column.max() > LARGEST:
                column[:] = total / len(column)
    return made


def sample_with_means(
    controls: sp.csr_matrix,
    weights: np.ndarray,
    means: np.ndarray,
    n: int,
    generator: np.random.Generator,
) -> np.ndarray:
    """`n` cells, `(n, G)` float64, drawn one by one, each with expected values `means`, within 0 and LARGEST.

    A cell begins as one of the `controls`, `(controls, G)`, drawn with `weights`, which sum to 1. Where a gene goes
    down it keeps it with a certain probability; where a gene goes up it may get the value of another control.
    """
    drawn = controls[generator.choice(controls.shape[0], n, p=weights)].toarray().astype(np.float64)
    chance = generator.random(drawn.shape)
    rank = generator.random(drawn.shape)
    by_gene = controls.tocsc()
    usual = _usual_values(controls)
    made = np.zeros_like(drawn)
    for gene, mean in enumerate(np.clip(means, 0, LARGEST)):
        if mean == 0:
            continue
        stored = slice(*by_gene.indptr[gene : gene + 2])
        values = by_gene.data[stored].astype(np.float64)
        weight = weights[by_gene.indices[stored]]
        before = weight.sum()  # share of cells that express the gene
        level = weight @ values / before if before else usual[gene]
        share = min(mean / level, 1.0)
        given = drawn[:, gene] > 0
        if share <= before:
            column = np.where(given & (chance[:, gene] * before < share), drawn[:, gene], 0)
        else:
            gains = ~given & (chance[:, gene] * (1 - before) < share - before)
            column = drawn[:, gene].copy()
            column[gains] = _quantiles(values, weight, rank[gains, gene], level)
        column *= mean / (share * level)  # 1, unless all cells express the gene
        made[:, gene] = mean if column.max(initial=0) > LARGEST else column
    return made


def _quantiles(
    values: np.ndarray, weights: np.ndarray, ranks: np.ndarray, level: float
) -> np.ndarray:
    """Weighted quantiles of `values` at `ranks`, between 0 and 1; `level` where there are no values."""
    if not weights.any():
        return np.full(len(ranks), level)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    position = np.searchsorted(reached, ranks * reached[-1], side="right")
    return np.asarray(values[order][np.minimum(position, len(values) - 1)])
