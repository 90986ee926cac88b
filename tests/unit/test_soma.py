"""SOMA experiments, as CELLxGENE Census has them: the same cells as from an .h5ad, by query and in
chunks.
"""

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellmill.cli import main
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import DataError

pa = pytest.importorskip("pyarrow", reason="the extra soma is not installed")
soma = pytest.importorskip("tiledbsoma", reason="the extra soma is not installed")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    dense = np.random.default_rng(0).poisson(0.6, (23, 9)).astype(np.float32)
    dense[5:10] = 0  # a block without counts
    counts = sp.csr_matrix(dense)
    labels = pd.Categorical(["T", "B", None][number % 3] for number in range(23))
    obs = pd.DataFrame(
        {"cell_type": labels, "is_primary_data": np.arange(23) % 2 == 0}, index=map(str, range(23))
    )
    symbols = [f"SYMBOL{number}" for number in range(9)]
    var = pd.DataFrame(
        {"feature_id": [f"ENSG{n:011d}" for n in range(9)], "feature_name": symbols}, index=symbols
    )
    return ad.AnnData(counts, obs, var)


def written(path: Path, cells: ad.AnnData) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        io = pytest.importorskip("tiledbsoma.io")
        io.from_anndata(str(path), cells, "RNA", X_layer_name="raw")
    return path


@pytest.fixture(scope="module")
def experiment(cells: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("soma") / "experiment", cells)


def test_a_local_experiment_is_read_in_chunks(cells: ad.AnnData, experiment: Path) -> None:
    with open_counts(experiment) as reader:
        blocks = list(reader.rows(5))
        assert [block.shape[0] for block in blocks] == [5, 5, 5, 5, 3]
        assert (sp.vstack(blocks).toarray() == cells.X.toarray()).all()
        assert list(reader.obs_names) == list(cells.obs_names)
        assert reader.var_names == list(cells.var["feature_id"])
        assert list(reader.var["symbol"]) == list(cells.var["feature_name"])
        assert reader.obs["is_primary_data"].dtype == bool
        assert reader.obs["cell_type"].isna().sum() == 7


@pytest.mark.parametrize("name", ["my cells", "100%", "50%25", "naïve", "a+b#c"])
def test_a_path_of_any_characters_is_read(name: str, cells: ad.AnnData, tmp_path: Path) -> None:
    written(tmp_path / "plain", cells)
    (tmp_path / name).mkdir()
    path = (tmp_path / "plain").rename(tmp_path / name / "experiment")
    with open_counts(path) as reader:
        assert (sp.vstack(list(reader.rows(5))).toarray() == cells.X.toarray()).all()


def test_a_dense_array_is_refused_by_name(cells: ad.AnnData, tmp_path: Path) -> None:
    path = written(tmp_path / "dense", cells)
    with soma.open(str(path), "d") as experiment:
        del experiment.ms["RNA"].X["raw"]
    with soma.open(str(path), "w") as experiment:
        made = experiment.ms["RNA"].X.add_new_dense_ndarray(
            "counts", type=pa.float32(), shape=cells.shape
        )
        values = np.ascontiguousarray(cells.X.toarray())
        made.write((slice(None), slice(None)), pa.Tensor.from_numpy(values))
    with pytest.raises(DataError, match="expected a sparse array of counts, got a DenseNDArray; "):
        open_counts(path)


def test_cells_have_the_names_that_were_written(cells: ad.AnnData, tmp_path: Path) -> None:
    named = cells.copy()
    named.var = pd.DataFrame(index=pd.Index(cells.var_names, name="gene"))
    named.obs.index.name = "barcode"
    with open_counts(written(tmp_path / "experiment", named)) as reader:
        assert reader.var_names == list(cells.var_names)
        assert list(reader.obs_names) == list(cells.obs_names)


def test_a_query_reads_only_the_cells_of_its_filter(
    cells: ad.AnnData, experiment: Path, tmp_path: Path
) -> None:
    out = tmp_path / "T.h5ad"
    words = [
        "convert",
        "census",
        experiment.as_uri(),
        "--filter",
        "cell_type == 'T' and is_primary_data == True",
    ]
    assert main([*words, "--out", str(out)]) == 0
    wanted = cells[
        (cells.obs["cell_type"] == "T").to_numpy() & cells.obs["is_primary_data"].to_numpy()
    ]
    made = ad.read_h5ad(out)
    assert list(made.obs_names) == list(wanted.obs_names)
    assert (made.X.toarray() == wanted.X.toarray()).all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--filter", "cell_type == 'X'"], "no cell fulfils the filter \"cell_type == 'X'\""),
        (
            ["--filter", "cell_tpye == 'T'"],
            "filter \"cell_tpye == 'T'\": Column cell_tpye does not exist in schema",
        ),
        (["--counts", "rw"], "no layer 'rw'; did you mean 'raw'?"),
    ],
)
def test_an_empty_query_is_refused_in_one_line(
    more: list[str],
    message: str,
    experiment: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "cells.h5ad"
    assert main(["convert", "census", str(experiment), *more, "--out", str(out)]) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert not out.exists()


def test_an_experiment_whose_parts_are_elsewhere_is_refused(
    experiment: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    with soma.Experiment.create(other.as_uri()) as made, soma.open(experiment.as_uri()) as own:
        made.set("obs", own.obs)
        made.set("ms", own.ms)
    with pytest.raises(
        Exception,
        match=r"experiment/obs is elsewhere; expected an experiment that holds its own data",
    ):
        open_counts(other)


@pytest.fixture(scope="module")
def processed(cells: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As tiledbsoma.io writes an AnnData whose X has logarithms of some genes, and whose raw has
    the counts of all.
    """
    data = ad.AnnData(np.log1p(cells.X[:, :5]), cells.obs, cells.var.iloc[:5])
    data.raw = cells
    path = tmp_path_factory.mktemp("soma") / "processed"
    io = pytest.importorskip("tiledbsoma.io")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        io.from_anndata(str(path), data, "RNA")
    return path


def test_a_raw_measurement_is_read_with_its_genes(cells: ad.AnnData, processed: Path) -> None:
    with open_counts(processed, "raw") as reader:
        assert (sp.vstack(list(reader.rows(5))).toarray() == cells.X.toarray()).all()
        assert reader.n_vars == 9


def test_the_layer_that_was_read_is_not_offered(processed: Path) -> None:
    with open_counts(processed) as reader, pytest.raises(DataError) as error:
        next(reader.rows())
    assert str(error.value).endswith("raw counts may be in raw: set the dataset's `counts`")
    with pytest.raises(DataError, match=r"no layer 'rw'; did you mean 'raw'\?"):
        open_counts(processed, "rw")
