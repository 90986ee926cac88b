"""Datasets that many unit tests read."""

from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.evaluate.task import Context
from cellmill.stages import data as simulate
from tests.unit.evaluated import make_context, make_evaluated

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 simulated cells x 400 genes of 4 types, 2 batches and 3 perturbations, as raw counts
    under Ensembl ids.
    """
    path = tmp_path_factory.mktemp("simulated") / "simulated.h5ad"
    simulate.simulate(out=path, cells=600, genes=400, types=4, batches=2, perturbations=3, seed=1)
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> dict[str, Path]:
    """Paths of a corpus of `simulated`, of a `model` of random weights and of its `embedding`; no
    test changes them.
    """
    return make_evaluated(tmp_path_factory.mktemp("corpus"), simulated)


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Context:
    """The cells of `corpus` under evaluation (`make_context`); no test changes it."""
    return make_context(tmp_path_factory.mktemp("context"), corpus)


@pytest.fixture
def make_h5ad(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes an .h5ad of a matrix (dense or sparse) and gives its path."""

    def make(
        matrix: object, name: str = "raw.h5ad", *, genes: list[str] | None = None, **parts: object
    ) -> Path:
        n_obs, n_vars = matrix.shape  # type: ignore[attr-defined]
        obs = parts.pop("obs", None)
        if obs is None:
            obs = pd.DataFrame(index=[f"cell_{i}" for i in range(n_obs)])
        var = parts.pop("var", None)
        if var is None:
            var = pd.DataFrame(index=genes or [f"gene_{j}" for j in range(n_vars)])
        path = tmp_path / name
        ad.AnnData(X=matrix, obs=obs, var=var, **parts).write_h5ad(path)
        return path

    return make


@pytest.fixture
def counts() -> sp.csr_matrix:
    """Counts of 230 cells x 37 genes, a third of them zero, one cell and one gene without any."""
    random = np.random.default_rng(0)
    dense = random.poisson(random.gamma(0.5, 4, (230, 37)))
    dense[5], dense[:, 7] = 0, 0
    return sp.csr_matrix(dense.astype(np.float32))


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """A function that gives the path of a real dataset, or skips the test with the reason where it
    is absent.
    """

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.is_file():
            pytest.skip(f"the real dataset {name} is not there: {SHARED} is absent")
        return path

    return find
