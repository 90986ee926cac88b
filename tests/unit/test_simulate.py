"""Simulated cells: the same for a seed, structured as they say; the demo cells come back as whole
counts.
"""

from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from cellmill.data.prepare import demo
from cellmill.data.prepare.simulate import BLOCK, Simulation
from cellmill.errors import ConfigError, DataError
from cellmill.files import sha256_file
from cellmill.stages import data as stage


def test_cells_depend_only_on_the_seed() -> None:
    three, four = (Simulation(700, 100, seed=seed) for seed in (3, 4))
    blocks = list(three.blocks())
    assert [block.shape[0] for block in blocks] == [BLOCK, BLOCK, 700 - 2 * BLOCK]
    assert all((one != again).nnz == 0 for one, again in zip(blocks, three.blocks(), strict=True))
    assert (blocks[0] != next(four.blocks())).nnz > 0


def test_the_file_is_counts_under_real_ids_with_every_column(
    simulated: Path, tmp_path: Path
) -> None:
    data = ad.read_h5ad(simulated)
    assert data.shape == (600, 400)
    assert data.X.dtype == np.uint16
    assert list(data.obs) == ["cell_type", "batch", "donor", "perturbation"]
    assert [len(data.obs[c].cat.categories) for c in data.obs] == [4, 2, 4, 4]
    assert data.var_names.is_unique
    assert data.var_names.str.fullmatch(r"ENSG\d{11}").all()
    assert data.var["symbol"].str.startswith("MT-").sum() == 13
    assert data.obs.groupby("donor", observed=True)["batch"].nunique().eq(1).all()
    stage.simulate(
        out=tmp_path / "again.h5ad",
        cells=600,
        genes=400,
        types=4,
        batches=2,
        perturbations=3,
        seed=1,
    )
    assert sha256_file(tmp_path / "again.h5ad") == sha256_file(simulated)


def test_types_are_separable(simulated: Path) -> None:
    data = ad.read_h5ad(simulated)
    scaled = data.X.toarray() * (1e4 / data.X.sum(axis=1).A1[:, None])
    components = PCA(20, random_state=0).fit_transform(np.log1p(scaled))
    assert (
        cross_val_score(LogisticRegression(max_iter=500), components, data.obs["cell_type"]).mean()
        > 0.8
    )
    control = (data.obs["perturbation"] == "control").to_numpy()
    assert 0.4 < control.mean() < 0.6
    for symbol in data.obs["perturbation"].cat.categories.drop("control"):
        gene = scaled[:, data.var["symbol"] == symbol].ravel()
        assert (
            gene[(data.obs["perturbation"] == symbol).to_numpy()].mean()
            < 0.4 * gene[control].mean()
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cells": 0}, "--cells: expected 1 to 2,147,483,648, got 0"),
        ({"genes": 5}, "--genes: expected 26 to .* got 5"),
        ({"types": 0}, "--types: expected 1 to 1,000, got 0"),
        ({"perturbations": 500}, "--perturbations: expected 0 to 187, got 500"),
        ({"seed": -1}, "--seed: expected 0 to .* got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Simulation(**({"cells": 10, "genes": 200} | arguments))


def test_the_demo_is_700_cells_of_counts_with_labels(tmp_path: Path) -> None:
    pytest.importorskip("scanpy", reason="the cells come with scanpy, an extra")
    stage.demo(out=tmp_path / "pbmc68k.h5ad")
    data = ad.read_h5ad(tmp_path / "pbmc68k.h5ad")
    assert data.shape == (700, 765)
    assert list(data.obs) == ["bulk_labels", "n_counts", "percent_mito"]
    assert data.obs["bulk_labels"].nunique() == 10
    assert data.X.dtype == np.uint16
    assert (data.obs["n_counts"] >= data.X.sum(axis=1).A1).all()


def test_values_that_are_not_logarithms_are_refused() -> None:
    counts = sp.csr_matrix(np.random.default_rng(0).poisson(1, (40, 30)))
    totals = counts.sum(axis=1).A1 + 1000
    logs = (sp.diags(1e4 / totals) @ counts).log1p().astype(np.float32).tocsr()
    assert (demo.recover_counts(logs, totals, Path("x.h5ad")) != counts).nnz == 0
    fault = r"x.h5ad: cannot recover counts: expected whole numbers within 0.1, got one 0\.\d+ away"
    with pytest.raises(DataError, match=fault):
        demo.recover_counts(logs, totals * 1.3, Path("x.h5ad"))


def test_without_scanpy_the_error_names_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    fault = r"^the demo cells are part of the scanpy package: pip install 'cellmill\[demo\]'$"
    with pytest.raises(DataError, match=fault):
        demo.read_demo()
