"""Predicted and measured cells of held-out perturbations, from a file of stage `predict_changes`.

Bridges run in the interpreter of another package, so nothing of cellmill is imported. Measured cells are those of the
file, with the half of the controls that no prediction starts from. Predicted cells are as many for each perturbation,
and begin as controls of the other half, drawn from the batch (and donor) of the measured ones. A gene of theirs then
gets the predicted mean, that of these controls and the change, not below 0, by as many detected cells as that takes:
cells of a gene that goes down lose it, cells of one that goes up get a value that another of them has, and the rest is
a factor near 1. Adding the change to each cell instead would move zeros, which no measured cell does, and so make half
of all genes differ significantly from controls whatever is predicted.
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
LARGEST = float(np.log1p(1e4))  # of log(1 + counts per 10,000): all counts of a cell in one gene


@dataclass(frozen=True)
class PerturbedCells:
    """Legend: U perturbations, G genes."""

    control: str
    perturbations: list[str]  # (U,)
    kinds: dict[str, str]  # kind by method: model or baseline
    changes: dict[str, np.ndarray]  # (U, G) by method
    measured: ad.AnnData  # with the controls that nothing starts from
    start: ad.AnnData  # controls that predictions start from
    seed: int

    def profiles(self, method: str) -> np.ndarray:
        """(U, G) float64: predicted mean of each perturbation's cells; may be below 0."""
        n_strata = 1 + max(int(cells.obs["stratum"].max()) for cells in (self.measured, self.start))
        means = np.zeros((n_strata, self.start.n_vars))
        for stratum in np.unique(self.start.obs["stratum"]):
            means[stratum] = self.start.X[self._starting(stratum)].mean(axis=0, dtype=np.float64)
        shares = np.stack([np.bincount(self._strata(name), minlength=n_strata) for name in self.perturbations])
        return shares / shares.sum(axis=1, keepdims=True) @ means + self.changes[method]

    def predicted(self, method: str) -> ad.AnnData:
        """Predicted cells of all perturbations, and the controls that they start from."""
        usual = _usual_values(self.start.X)
        blocks, names = [], []
        for number, (name, means) in enumerate(zip(self.perturbations, self.profiles(method))):
            generator = np.random.Generator(np.random.Philox(key=[self.seed, number]))  # the same for all methods
            drawn = np.concatenate([*self._draw(name, generator)])
            cells = self.start.X[drawn].toarray().astype(np.float64)
            blocks.append(sp.csr_matrix(with_means(cells, means, usual, generator).astype(np.float32)))
            names += [name] * len(drawn)
        names += [self.control] * self.start.n_obs
        obs = pd.DataFrame({COLUMN: names}, index=[f"predicted {number}" for number in range(len(names))])
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


def with_means(cells: np.ndarray, means: np.ndarray, usual: np.ndarray, generator: np.random.Generator) -> np.ndarray:
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
            column[silent] = generator.choice(column[detected], len(silent)) if len(detected) else level
        if n:
            column *= total / column.sum()
            if column.max() > LARGEST:
                column[:] = total / len(column)
    return made
