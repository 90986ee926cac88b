"""Classes of cells by their nearest neighbours."""

from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from sklearn.utils.extmath import row_norms

COMPARED = 512  # cells compared with all fitted cells at once


class NearestCells:
    """Predicts the most frequent class of the nearest fitted cells, by Euclidean distance; the
    first of equally frequent classes.
    """

    def __init__(self, neighbors: int) -> None:
        self.neighbors = neighbors

    def __repr__(self) -> str:
        return f"NearestCells({self.neighbors})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Keep `features`, `(cells, width)`, dense or sparse, and `labels`, `(cells,)`."""
        self.classes, class_of_cell = np.unique(labels, return_inverse=True)
        self._votes = np.eye(len(self.classes))[class_of_cell]  # (cells, classes)
        values = features.astype(np.float64)
        self._squares = row_norms(values, squared=True)
        self._transposed = values.T.tocsr() if sp.issparse(values) else values.T
        return self

    def predict(self, features: Any) -> np.ndarray:
        """The class of each cell, `(cells,)`, of features `(cells, width)`."""
        numbers = []
        for first in range(0, features.shape[0], COMPARED):
            block = features[first : first + COMPARED].astype(np.float64)
            products = block @ self._transposed  # (block, fitted cells)
            if sp.issparse(products):
                products = products.toarray()
            # squared distances without the cell's own square, which is the same for all
            distances = self._squares - 2 * products
            nearest = distances.argpartition(self.neighbors - 1, axis=1)[:, : self.neighbors]
            numbers.append(self._votes[nearest].sum(1).argmax(1))
        return self.classes[np.concatenate(numbers)]
