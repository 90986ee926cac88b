"""Writing an AnnData: every version's AnnData, with all its mappings, is read back as it was."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.cli import main
from cellmill.data.inputs.h5 import create_h5, write_anndata
from cellmill.evaluate.atlas.mapping import AtlasMapping
from cellmill.evaluate.inference.files import write_prediction
from cellmill.evaluate.inference.predict import Predictions
from tests.unit.limits import full_after

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


@pytest.mark.parametrize("how", ["append", "obs alone", "in memory"])
def test_a_prediction_leaves_nothing_of_an_earlier_one(tmp_path: Path, how: str) -> None:
    names = ["first", "second"]
    adata = ad.AnnData(np.ones((2, 1), np.float32), obs=pd.DataFrame(index=names))
    label = pd.Categorical(["T cell", None])
    rejected = np.array([False, True])
    with_two_heads = Predictions(
        {
            "cellmill_label": label,
            "cellmill_probability": np.array([0.9, 0.2]),
            "cellmill_rejected": rejected,
            "cellmill_rejected_tissue": rejected,
            "cellmill_seen_in_training": rejected,
        },
        {"cellmill_probabilities_tissue": np.ones((2, 2), np.float32)},
        {"label_column": "cell_type", "label_column_tissue": "tissue"},
    )
    with_two_heads.add_to(adata)
    adata.obs["cellmill_label_old"] = label  # the user's own copy
    adata.write_h5ad(tmp_path / "cells.h5ad")

    later = Predictions({"cellmill_value": np.array([1.0, 2.0])}, {}, {"value_column": "age"})
    if how == "in memory":
        later.add_to(adata)
    else:
        source = tmp_path / "cells.h5ad" if how == "append" else None
        write_prediction(tmp_path / "out.h5ad", adata.obs, later, source)
        adata = ad.read_h5ad(tmp_path / "out.h5ad")
    suffixed = ["cellmill_rejected_tissue"] if how == "obs alone" else []
    assert sorted(adata.obs) == sorted(["cellmill_label_old", *suffixed, "cellmill_value"])
    assert list(adata.obsm) == []


@pytest.mark.parametrize("how", ["append", "in memory"])
@pytest.mark.parametrize("map_first", [True, False])
def test_a_map_and_a_prediction_replace_each_other(
    tmp_path: Path, how: str, map_first: bool
) -> None:
    label = pd.Categorical(["T cell", None])
    mapping = AtlasMapping(
        {"cellmill_label": label, "cellmill_distance": np.ones(2)},
        {"cellmill_neighbors": np.ones((2, 3), np.int32)},
        {"neighbors": 3},
        [],
    )
    prediction = Predictions(
        {"cellmill_label": label},
        {"cellmill_probabilities": np.ones((2, 2), np.float32)},
        {"label_column": "cell_type"},
    )
    earlier, later = (mapping, prediction) if map_first else (prediction, mapping)
    adata = ad.AnnData(np.ones((2, 1), np.float32), obs=pd.DataFrame(index=["first", "second"]))
    earlier.add_to(adata)
    if how == "append":
        adata.write_h5ad(tmp_path / "cells.h5ad")
        write_prediction(tmp_path / "out.h5ad", adata.obs, later, tmp_path / "cells.h5ad")
        adata = ad.read_h5ad(tmp_path / "out.h5ad")
    else:
        later.add_to(adata)
    assert sorted(adata.obs) == sorted(later.obs)
    assert list(adata.obsm) == list(later.obsm)
    assert list(adata.uns) == [later.key]


@pytest.mark.parametrize(
    ("source_mode", "earlier_mode", "expected"),
    [(0o600, None, 0o600), (0o640, None, 0o640), (0o666, None, 0o644), (0o640, 0o604, 0o604)],
)
def test_a_changed_copy_has_no_new_readers(
    tmp_path: Path, source_mode: int, earlier_mode: int | None, expected: int
) -> None:
    source = tmp_path / "cells.h5ad"
    ad.AnnData(np.ones((2, 1), np.float32)).write_h5ad(source)
    source.chmod(source_mode)
    out = tmp_path / "out.h5ad"
    if earlier_mode is not None:
        out.touch()
        out.chmod(earlier_mode)
    umask = os.umask(0o022)
    try:
        with create_h5(out, copy_of=source):
            [temporary] = tmp_path.glob(".out.*")
            assert temporary.stat().st_mode & 0o077 == expected & 0o077
        with create_h5(source, copy_of=source):
            pass
    finally:
        os.umask(umask)
    assert out.stat().st_mode & 0o777 == expected
    assert source.stat().st_mode & 0o777 == source_mode


def test_a_full_disk_is_that_of_the_copy(tmp_path: Path) -> None:
    source = tmp_path / "cells.h5ad"
    ad.AnnData(np.ones((200, 9), np.float32)).write_h5ad(source)
    before = source.read_bytes()
    out = tmp_path / "out.h5ad"
    with (
        full_after(100),
        pytest.raises(OSError, match="File too large") as error,
        create_h5(out, copy_of=source),
    ):
        pass
    assert error.value.filename == str(out)
    assert [path.name for path in tmp_path.iterdir()] == ["cells.h5ad"]
    assert source.read_bytes() == before


def test_an_output_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.h5ad"
    out.mkdir()
    given = tmp_path / "cells.h5ad"
    ad.AnnData(np.ones((2, 1), np.float32)).write_h5ad(given)
    words = ["--model", str(tmp_path / "none"), "--input", str(given), "--out", str(out)]
    for stage in ("embed", "predict", "impute", "perturb"):
        assert main([stage, *words]) == 2
        message = f"cellmill {stage}: --out {out}: Is a directory; name another file\n"
        assert capsys.readouterr().err == message
