"""Writing an AnnData: every version's AnnData, with all its mappings, is read back as it was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.data.inputs.h5 import create_h5, write_anndata

MAPPINGS = ("layers", "obsm", "obsp", "varm", "varp", "uns")


def cells() -> ad.AnnData:
    """Three cells of two genes with something in every mapping."""
    counts = sp.csr_matrix(np.arange(6, dtype=np.float32).reshape(3, 2))
    return ad.AnnData(
        counts,
        obs=pd.DataFrame(index=["c1", "c2", "c3"]),
        var=pd.DataFrame(index=["g1", "g2"]),
        uns={"about": {"n": 1}},
        layers={"twice": 2 * counts},
        obsm={"x": np.ones((3, 4))},
        varm={"x": np.ones((2, 4))},
        obsp={"near": sp.identity(3, format="csr")},
        varp={"near": sp.identity(2, format="csr")},
    )


def parts(adata: Any, **changed: Any) -> SimpleNamespace:
    """The parts of an AnnData, some of them changed."""
    names = ("X", "obs", "var", *MAPPINGS)
    values = {name: getattr(adata, name) for name in names}
    return SimpleNamespace(**values | changed)


def written(adata: Any, path: Path) -> ad.AnnData:
    """What anndata reads of the file that `adata` is written to."""
    with create_h5(path) as file:
        write_anndata(file, adata)
    return ad.read_h5ad(path)


def named(mapping: Any) -> set[str]:
    """Names in a mapping; X, which anndata 0.13 lists in `layers` under None, has none."""
    return {name for name in mapping if name is not None}


def test_every_part_of_an_anndata_is_read_back(tmp_path: Path) -> None:
    given = cells()
    found = written(given, tmp_path / "cells.h5ad")
    np.testing.assert_array_equal(found.X.toarray(), given.X.toarray())
    for name in MAPPINGS:
        assert named(getattr(found, name)) == named(getattr(given, name))
    np.testing.assert_array_equal(found.layers["twice"].toarray(), 2 * given.X.toarray())
    assert found.uns["about"]["n"] == 1


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_an_entry_without_a_name_is_not_written(tmp_path: Path, mapping: str) -> None:
    given = cells()
    entries = dict(getattr(given, mapping))
    names = named(entries)
    entries[None] = given.X
    found = written(parts(given, **{mapping: entries}), tmp_path / "cells.h5ad")
    assert named(getattr(found, mapping)) == names
    np.testing.assert_array_equal(found.X.toarray(), given.X.toarray())


def test_an_anndata_without_x_is_written_without_x(tmp_path: Path) -> None:
    given = ad.AnnData(obs=pd.DataFrame(index=["c1", "c2"]))
    found = written(given, tmp_path / "cells.h5ad")
    assert found.X is None
