"""The demo cells come back as whole counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellmill.data.prepare import simulate
from cellmill.errors import DataError
from cellmill.stages import data as stage


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        simulate.shipped_file()
    except DataError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("demo") / "pbmc68k.h5ad"
    stage.demo(out=path)
    return path


def test_the_demo_is_700_cells_of_counts_with_labels(written: Path) -> None:
    data = ad.read_h5ad(written)
    assert data.shape == (700, 765)
    assert list(data.obs) == ["bulk_labels", "n_counts", "percent_mito"]
    assert data.obs["bulk_labels"].nunique() == 10
    assert data.X.dtype == np.uint16
    assert (data.obs["n_counts"] >= data.X.sum(axis=1).A1).all()


def test_the_demo_equals_the_counts_recovered_elsewhere(written: Path, shared: Callable[[str], Path]) -> None:
    data, other = ad.read_h5ad(written), ad.read_h5ad(shared("pbmc68k.h5ad"))
    assert (data.X != other.X).nnz == 0
    assert list(data.obs_names) == list(other.obs_names)
    assert list(data.var_names) == list(other.var_names)


def test_counts_are_recovered_from_rounded_logarithms_and_other_values_are_refused() -> None:
    random = np.random.default_rng(0)
    counts = sp.csr_matrix(random.poisson(1, (40, 30)))
    totals = counts.sum(axis=1).A1 + random.integers(1, 5000, 40)
    scaled = sp.diags(1e4 / totals) @ counts
    logs = scaled.log1p().astype(np.float32).tocsr()
    assert (simulate.recover_counts(logs, totals, Path("x.h5ad")) != counts).nnz == 0
    with pytest.raises(
        DataError, match=r"x.h5ad: cannot recover counts: expected whole numbers within 0.1, got one 0\.\d+ away"
    ):
        simulate.recover_counts(logs, totals * 1.3, Path("x.h5ad"))


def test_without_scanpy_the_error_names_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "find_spec", lambda name: None)
    with pytest.raises(DataError) as error:
        simulate.shipped_file()
    assert str(error.value) == "the demo cells are part of the scanpy package: pip install 'cellmill[demo]'"
