"""Ridge regression that predicts hidden genes together with a model's decoder (`ridge.safetensors`).

The regression is a probabilistic PCA. It models the profile of a cell as the mean profile, plus
loadings times the factors of the cell, plus noise. The factors of a cell are computed by a ridge
regression of its visible genes on the loadings of these genes. So any genes may be hidden.

The loadings come from the largest eigenvalues of the training cells, which are too large because of noise.
The noise is about the mean of the other eigenvalues, so this mean is subtracted. Source: Tipping & Bishop
1999, sections 3.2 and 3.3.

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

TENSORS = ("means", "shares", "loadings", "noise", "decoder_weight")  # tensors of ridge.safetensors
MIN_SHARE = 1e-9  # a share of genes that divides is at least this
MIN_DEPTH = 1e-9  # a depth that divides is at least this
MIN_NOISE = 1e-6  # variance of the noise, at least
FIRST_WEIGHT = 0.5  # weight of the decoder until `fit_ridge` has chosen another


@dataclass(frozen=True)
class GeneRidge:
    """Fitted regression. The docstring of this module describes its model."""

    means: np.ndarray  # (V,) float32: mean log(1 + counts per 10,000) of each gene
    shares: np.ndarray  # (V,) float32: mean share of each gene in the counts of a cell
    loadings: np.ndarray  # (K, V) float32, for factors with variance 1
    noise: np.ndarray  # (1,) float32: variance of the noise, and penalty of the regression
    # (1,) float32: weight of the decoder in the mean of the decoder and this regression
    decoder_weight: np.ndarray
    # Correlation over validation cells between a hidden gene and its weighted prediction, averaged
    # over the genes that vary. A fifth of the genes is hidden at a time. None if no gene varies, if
    # there are too few validation cells, and in older exports.
    validation_correlation: float | None = None

    @classmethod
    def fit(cls, counts: sp.csr_matrix) -> Self:
        """Fit to the counts of training cells, (C, V). C and V must be at least 4."""
        profiles = log_normalise(counts)
        # scikit-learn sums in float64
        means, variances = mean_variance_axis(profiles, axis=0)

        # the first K eigenvalues, and the mean of the other eigenvalues
        rank = min(len(means), profiles.shape[0] - 1)
        components = pca(profiles.shape, min(COMPONENTS, rank // 2)).fit(profiles)
        eigenvalues = components.explained_variance_.astype(np.float64)
        residual = max(variances.sum(dtype=np.float64) - eigenvalues.sum(), 0.0)
        mean_other_eigenvalue = residual / (rank - len(eigenvalues))

        # standard deviation of each component, without noise
        deviations = np.sqrt(np.maximum(eigenvalues - mean_other_eigenvalue, 0))
        n_varying_genes = max(np.count_nonzero(variances), 1)
        return cls(
            means=means.astype(np.float32),
            shares=_mean_shares(counts).astype(np.float32),
            loadings=(components.components_ * deviations[:, None]).astype(np.float32),
            noise=np.array([max(residual / n_varying_genes, MIN_NOISE)], np.float32),
            decoder_weight=np.array([FIRST_WEIGHT], np.float32),
        )

    def predict(
        self,
        visible_counts: sp.csr_matrix,
        visible_genes: np.ndarray,
        hidden_genes: np.ndarray,
        noises: Iterable[float] = (1.0,),
    ) -> list[np.ndarray]:
        """Predict the hidden genes from the counts of the visible genes, (C, V).

        Returns one array for each of `noises`, (C, G) float32, in log(1 + counts per 10,000). A noise is a
        multiple of `self.noise`. `visible_genes` and `hidden_genes` are rows of the vocabulary.
        """
        # The 10,000 counts of a cell are of visible and hidden genes together. How many of them are of
        # hidden genes is not known, so the mean share of these genes is taken.
        shares = self.shares.astype(np.float64)
        visible_share = shares[visible_genes].sum()
        hidden_share = shares[hidden_genes].sum()
        visible_sum = TARGET_SUM * visible_share / max(visible_share + hidden_share, MIN_SHARE)
        totals = visible_counts.sum(axis=1, dtype=np.float64)
        depth = np.maximum(np.asarray(totals), MIN_DEPTH)
        profiles = visible_counts.multiply(visible_sum / depth).tocsr().log1p()

        # products of the centred profiles with the loadings of the visible genes, (C, K); genes that
        # are not visible have no counts, and add nothing
        loadings = self.loadings.astype(np.float64)
        visible_loadings = loadings[:, visible_genes]
        products = profiles @ loadings.T
        products -= visible_loadings @ self.means[visible_genes]

        # products of the loadings with each other, over the visible genes, (K, K)
        gram = visible_loadings @ visible_loadings.T
        predictions = []
        for noise in noises:
            penalty = self.noise * np.float32(noise) * np.eye(len(loadings))
            # factors of the cells by ridge regression, (C, K)
            factors = np.linalg.solve(gram + penalty, products.T).T
            predicted = factors @ loadings[:, hidden_genes] + self.means[hidden_genes]
            predictions.append(predicted.astype(np.float32))
        return predictions

    def mix(self, decoded: np.ndarray, by_ridge: np.ndarray) -> np.ndarray:
        """Weighted mean of both predictions, (C, G), by the decoder and by this regression."""
        return self.decoder_weight * decoded + (1 - self.decoder_weight) * by_ridge

    def write(self, folder: Path) -> dict[str, Any]:
        """Write ridge.safetensors to a model folder, and return the entry `ridge` of config.json."""
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
        """Read ridge.safetensors of a model folder. `config` is the content of config.json.

        Returns None if `config` has no entry `ridge`. Raises DataError for a damaged file or entry.
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
    """Mean share of each gene in the counts of a cell, (V,) float64; `counts` are (C, V)."""
    n_cells, n_genes = counts.shape
    sums = np.zeros(n_genes)
    # in blocks, because scipy copies the counts that it multiplies as float64
    for start in range(0, n_cells, BLOCK):
        block = counts[start : start + BLOCK]
        depth = row_sums(block.data, block.indptr)
        sums += block.T @ (1 / np.maximum(depth, 1))
    return sums / n_cells
