"""Ridge regression that predicts hidden genes together with a model's decoder (`ridge.safetensors`).

Profiles are modelled by probabilistic PCA: the mean profile, plus loadings times the factors of a
cell, plus noise. The factors are a ridge regression of the visible genes on their loadings, so any
genes may be hidden. The largest eigenvalues of training cells are too large by the mean of the
others, which is subtracted. Source: Tipping & Bishop 1999, sections 3.2 and 3.3.

Legend: C cells, V genes of the vocabulary, G hidden genes, K factors.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.utils.sparsefuncs import mean_variance_axis

from cellmill.config.load import unusable
from cellmill.data.arrays import TARGET_SUM, log_normalise
from cellmill.data.rows import row_sums
from cellmill.evaluate.features.components import BLOCK, COMPONENTS, pca
from cellmill.files import sha256_file
from cellmill.models.export import RIDGE, WeightsFile, write_tensors

TENSORS = ("means", "shares", "loadings", "noise", "decoder_weight")


@dataclass(frozen=True)
class GeneRidge:
    """Fitted regression, as ridge.safetensors has it; see the module for the model."""

    means: np.ndarray  # (V,) float32: mean log(1 + counts per 10,000)
    shares: np.ndarray  # (V,) float32: mean share of a gene in the counts of a cell
    loadings: np.ndarray  # (K, V) float32, for factors of variance 1
    noise: np.ndarray  # (1,) float32: variance of the noise, the penalty of the regression
    # (1,) float32: weight of the decoder in the mean of both predictions
    decoder_weight: np.ndarray
    # mean over genes of the correlation between a hidden gene and its weighted prediction, over
    # validation cells; a fifth of the genes are hidden at a time, and only genes that vary count.
    # None if none varies, without validation cells, and in older exports
    validation_correlation: float | None = None

    @classmethod
    def fit(cls, counts: sp.csr_matrix) -> Self:
        """Fit to training cells, counts (C, V); C and V of at least 4."""
        profiles = log_normalise(counts)
        # summed in float64
        means, variances = mean_variance_axis(profiles, axis=0)
        rank = min(len(means), profiles.shape[0] - 1)
        components = pca(profiles.shape, min(COMPONENTS, rank // 2)).fit(profiles)
        eigenvalues = components.explained_variance_.astype(np.float64)
        residual = max(variances.sum(dtype=np.float64) - eigenvalues.sum(), 0.0)
        other_eigenvalues = residual / (rank - len(eigenvalues))
        lengths = np.sqrt(np.maximum(eigenvalues - other_eigenvalues, 0))
        n_varying = max(np.count_nonzero(variances), 1)
        return cls(
            means.astype(np.float32),
            _mean_shares(counts).astype(np.float32),
            (components.components_ * lengths[:, None]).astype(np.float32),
            np.array([max(residual / n_varying, 1e-6)], np.float32),
            np.array([0.5], np.float32),
        )

    def predict(
        self,
        visible_counts: sp.csr_matrix,
        visible_genes: np.ndarray,
        hidden_genes: np.ndarray,
        noises: Iterable[float] = (1.0,),
    ) -> list[np.ndarray]:
        """One (C, G) float32 array for each of `noises` (multiples of `self.noise`): log(1 + counts per
        10,000) of the hidden genes, predicted from the counts (C, V) of the visible genes.

        `visible_genes` and `hidden_genes` are rows of the vocabulary.
        """
        shares = self.shares.astype(np.float64)
        visible_share = shares[visible_genes].sum()
        hidden_share = shares[hidden_genes].sum()
        # counts per 10,000 are of visible and hidden genes: the hidden ones have their mean share
        visible_sum = TARGET_SUM * visible_share / max(visible_share + hidden_share, 1e-9)
        totals = visible_counts.sum(axis=1, dtype=np.float64)
        depth = np.maximum(np.asarray(totals), 1e-9)
        profiles = visible_counts.multiply(visible_sum / depth).tocsr().log1p()
        loadings = self.loadings.astype(np.float64)
        visible_loadings = loadings[:, visible_genes]
        # other genes have no counts
        products = profiles @ loadings.T
        products -= visible_loadings @ self.means[visible_genes]
        gram = visible_loadings @ visible_loadings.T
        predictions = []
        for noise in noises:
            penalty = self.noise * np.float32(noise) * np.eye(len(loadings))
            # (C, K)
            factors = np.linalg.solve(gram + penalty, products.T).T
            predicted = factors @ loadings[:, hidden_genes] + self.means[hidden_genes]
            predictions.append(predicted.astype(np.float32))
        return predictions

    def mix(self, decoded: np.ndarray, by_ridge: np.ndarray) -> np.ndarray:
        """(C, G): weighted mean of the predictions of the decoder and of this regression."""
        return self.decoder_weight * decoded + (1 - self.decoder_weight) * by_ridge

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the file to a model folder, and return its entry of config.json."""
        path = folder / RIDGE
        tensors = {name: torch.from_numpy(getattr(self, name)) for name in TENSORS}
        write_tensors(path, tensors)
        return {
            "noise": float(self.noise[0]),
            "decoder_weight": float(self.decoder_weight[0]),
            "validation_correlation": self.validation_correlation,
            "sha256": sha256_file(path),
        }

    @classmethod
    def read(cls, folder: Path, config: dict[str, Any]) -> Self | None:
        """Read the file that config.json names; None if it names none.

        Raises DataError for a damaged file.
        """
        entry = config.get("ridge")
        if entry is None:
            return None
        path = folder / RIDGE
        file = WeightsFile(path)
        if not isinstance(entry, dict) or sha256_file(path) != entry.get("sha256"):
            raise unusable(path, "its SHA-256 is not the one in config.json: damaged")
        correlation = entry.get("validation_correlation")
        is_number = isinstance(correlation, float) and math.isfinite(correlation)
        if correlation is not None and not is_number:
            raise unusable(
                folder / "config.json", "ridge.validation_correlation: expected a number"
            )
        tensors = {name: file.read(name, ()).numpy() for name in TENSORS}
        ridge = cls(**tensors, validation_correlation=correlation)
        shapes = [value.shape for value in tensors.values()]
        n_genes = config.get("n_genes")
        expected = [(n_genes,), (n_genes,), (len(ridge.loadings), n_genes), (1,), (1,)]
        if shapes != expected:
            raise unusable(path, f"expected tensors of shapes {expected}, got {shapes}")
        return ridge


def _mean_shares(counts: sp.csr_matrix) -> np.ndarray:
    """(V,) float64: mean share of each gene in the counts (C, V) of a cell."""
    n_cells, n_genes = counts.shape
    sums = np.zeros(n_genes)
    # in blocks, because scipy copies the counts that it multiplies as float64
    for start in range(0, n_cells, BLOCK):
        block = counts[start : start + BLOCK]
        depth = row_sums(block.data, block.indptr)
        sums += block.T @ (1 / np.maximum(depth, 1))
    return sums / n_cells
