"""Pictures of cells: neighbours stay neighbours, and the same cells give the same picture."""

import sys

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from cellmill.evaluate.umap import project


def test_cells_of_a_cluster_stay_together_in_the_same_picture_each_time() -> None:
    random = np.random.default_rng(0)
    of_cell = np.arange(180) % 3
    vectors = (8 * random.normal(size=(3, 16))[of_cell] + random.normal(size=(180, 16))).astype(np.float32)
    picture = project(vectors, seed=1)
    nearest = NearestNeighbors(n_neighbors=6).fit(picture).kneighbors(return_distance=False)
    assert (of_cell[nearest] == of_cell[:, None]).all()
    np.testing.assert_array_equal(project(vectors, seed=1), picture)
    assert not np.array_equal(project(vectors, seed=2), picture)
    assert "umap" in sys.modules
    assert hasattr(sys.modules.get("pynndescent", np), "__file__"), "no stand-in is left for other packages"


@pytest.mark.parametrize("n", [1, 3, 4, 5, 17])
def test_few_or_equal_cells_have_a_picture_too(n: int) -> None:
    for vectors in (np.random.default_rng(n).normal(size=(n, 4)), np.ones((n, 4))):
        picture = project(vectors.astype(np.float32), seed=0)
        assert picture.shape == (n, 2)
        assert np.isfinite(picture).all()
