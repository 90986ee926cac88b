"""Files of several AnnData, of other writers' data frames, and of logarithms: counts equal a truth,
or a line.
"""

import json
import warnings
from contextlib import nullcontext
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import sparse_dataset, write_elem

from cellmill.config.load import load_config
from cellmill.data.inputs import anndata_files
from cellmill.data.inputs.fetch import origin_of
from cellmill.data.inputs.formats import declared_names, open_counts
from cellmill.data.prepare.check import check_datasets
from cellmill.errors import DataError
from tests.unit.test_inputs import CELLS, GENES, OBS, h5ad, in_zarr, read, refusal


def rna_of(counts: sp.csr_matrix) -> ad.AnnData:
    return ad.AnnData(counts, OBS, pd.DataFrame(index=GENES), layers={"twice": counts * 2})


def adt_of(counts: sp.csr_matrix) -> ad.AnnData:
    """Antibodies of every second cell."""
    return ad.AnnData(counts[::2, :4], OBS[::2], pd.DataFrame(index=["CD3", "CD4", "CD8", "CD19"]))


def write_mudata(file: object, modalities: dict[str, ad.AnnData], donors: list[str]) -> None:
    """As MuData stores them; in the whole file cells come in the opposite order of the first
    modality's.
    """
    cells = CELLS[::-1]
    obs = pd.DataFrame({"donor": donors[::-1], "rna:kind": "a"}, index=cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_elem(file, "obs", obs)
        write_elem(
            file,
            "var",
            pd.DataFrame(index=[name for data in modalities.values() for name in data.var_names]),
        )
        for name, data in modalities.items():
            write_elem(file, f"mod/{name}", data)
            rows = {cell: row for row, cell in enumerate(data.obs_names, 1)}
            places = np.array([rows.get(cell, 0) for cell in cells], np.uint32)
            write_elem(file, f"obsmap/{name}", places)


DONORS = [f"d{number % 7}" for number in range(230)]


@pytest.fixture(params=["h5mu", "zarr"])
def mudata(request: pytest.FixtureRequest, counts: sp.csr_matrix, tmp_path: Path) -> Path:
    path = tmp_path / f"cells.{request.param}"
    modalities = {"rna": rna_of(counts), "prot": adt_of(counts)}
    if request.param == "h5mu":
        with h5py.File(path, "w") as file:
            write_mudata(file, modalities, DONORS)
    else:
        write_mudata(zarr.open_group(path, mode="w"), modalities, DONORS)
    return path


def test_the_only_rna_of_a_mudata_keeps_the_shared_columns(
    mudata: Path, counts: sp.csr_matrix, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (read(mudata) != counts).nnz == 0
    assert f"{mudata}#rna: mod/rna is read, of prot, rna\n" in capsys.readouterr().err
    with open_counts(mudata) as reader:
        assert reader.obs_names.tolist() == CELLS
        assert reader.obs["donor"].tolist() == DONORS
        assert list(reader.obs) == ["kind", "depth", "donor"]


@pytest.mark.parametrize("rows", [np.arange(1, 231), np.arange(230), np.zeros(230, int)])
def test_shared_columns_follow_names_if_obsmap_is_out_of_date(
    rows: np.ndarray, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = tmp_path / "cells.h5mu"
    with h5py.File(path, "w") as file:
        write_mudata(file, {"rna": rna_of(counts), "prot": adt_of(counts)}, DONORS)
        for part in ("rna", "prot"):
            file[f"obsmap/{part}"][:] = rows
    for part, donors in (("rna", DONORS), ("prot", DONORS[::2])):
        with open_counts(Path(f"{path}#{part}")) as reader:
            assert reader.obs["donor"].tolist() == donors


def test_shared_columns_are_joined_by_name_without_obsmap(
    counts: sp.csr_matrix, tmp_path: Path
) -> None:
    """As MuDataSeurat writes all columns of a Seurat object."""
    path = tmp_path / "cells.h5mu"
    with h5py.File(path, "w") as file:
        write_mudata(file, {"rna": rna_of(counts), "prot": adt_of(counts)}, DONORS)
        del file["obsmap"]
    with open_counts(Path(f"{path}#prot")) as reader:
        assert reader.obs["donor"].tolist() == DONORS[::2]


@pytest.mark.parametrize("end", ["h5ad", "zarr"])
def test_scaled_values_of_fewer_genes_do_not_hide_the_counts(
    end: str, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    """As MuDataSeurat writes an object with variable genes."""
    path = tmp_path / f"cells.{end}"
    data = ad.AnnData(counts, OBS, pd.DataFrame(index=GENES), layers={"counts": counts})
    with h5py.File(path, "w") if end == "h5ad" else nullcontext(zarr.open_group(path)) as file:
        write_elem(file, "/", data)
        del file["X"]
        write_elem(file, "X", np.ones((len(CELLS), 5)))
    with declared_names(path) as names:
        assert names is not None
        assert names.counts == ["counts"]
    assert refusal(path).endswith("got (230, 5); set the dataset's `counts` to counts")


def test_a_modality_with_repeated_names_is_joined_by_obsmap(
    counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = tmp_path / "cells.h5mu"
    with h5py.File(path, "w") as file:
        write_mudata(file, {"rna": rna_of(counts), "prot": adt_of(counts)}, DONORS)
        names = file["obs"][file["obs"].attrs["_index"]]
        names[:2] = CELLS[0]
        with open_counts(Path(f"{path}#prot")) as reader:
            assert reader.obs["donor"].tolist() == DONORS[::2]
        file["obsmap/prot"][:] = np.arange(230)
    assert "obsmap does not name every cell" in refusal(Path(f"{path}#prot"))


def test_a_modality_is_named_after_the_path(mudata: Path, counts: sp.csr_matrix) -> None:
    part = Path(f"{mudata}#prot")
    assert (read(part) != counts[::2, :4]).nnz == 0
    with open_counts(part) as reader:
        assert reader.obs["donor"].tolist() == DONORS[::2]
    assert (read(Path(f"{mudata}#rna"), "twice") != counts * 2).nnz == 0
    assert (read(mudata, "rna#twice") != counts * 2).nnz == 0
    assert "no modality or table 'atac'; there are: prot, rna" in refusal(Path(f"{mudata}#atac"))
    assert origin_of(part) == origin_of(mudata)


def test_modalities_are_listed_if_none_is_rna(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = tmp_path / "cells.h5mu"
    with h5py.File(path, "w") as file:
        write_mudata(file, {"one": rna_of(counts), "two": adt_of(counts)}, DONORS)
    assert (
        refusal(path) == f"{path}: holds one (230 x 37), two (115 x 4); name one, as in {path}#one"
    )


@pytest.mark.parametrize("end", ["h5ad", "h5mu"])
def test_attributes_of_fixed_length_are_read(
    end: str, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    """As Julia and rhdf5 write them: h5py has bytes for them."""
    path = tmp_path / f"cells.{end}"
    null = ad.AnnData(None, OBS, pd.DataFrame(index=GENES), layers={"counts": counts})
    with h5py.File(path, "w") as file:
        if end == "h5mu":
            write_mudata(file, {"one": rna_of(counts), "two": null}, DONORS)
            write_elem(file, "mod/two/X", None)
        else:
            write_elem(file, "/", rna_of(counts))

        def shorten(name: str, item: h5py.Group | h5py.Dataset) -> None:
            for key, value in [*item.attrs.items()]:
                if isinstance(value, str):
                    item.attrs[key] = np.bytes_(value)

        file.visititems(shorten)
    part = path if end == "h5ad" else Path(f"{path}#one")
    assert (read(part) != counts).nnz == 0
    with open_counts(part) as reader:
        assert reader.obs_names.tolist() == CELLS
    if end == "h5mu":
        assert refusal(path).endswith(
            f"holds one (230 x 37), two (230 x 37); name one, as in {path}#one"
        )
        assert refusal(Path(f"{path}#two")).endswith(
            "no matrix 'X' (the dataset's `counts`); there are: counts"
        )


def test_the_table_of_a_spatialdata_is_read(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = tmp_path / "spatial.zarr"
    root = zarr.open_group(path, mode="w")
    root.create_group("images")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_elem(root.create_group("tables"), "table", rna_of(counts))
        assert (read(path) != counts).nnz == 0
        write_elem(root["tables"], "bins", adt_of(counts))
        assert refusal(path).endswith(
            f"holds bins (115 x 4), table (230 x 37); name one, as in {path}#bins"
        )
        assert (read(Path(f"{path}#table")) != counts).nnz == 0


def test_a_table_of_datasets_may_name_a_modality(
    counts: sp.csr_matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.test_named_files import write_config  # needs the path that pytest sets

    monkeypatch.chdir(tmp_path)
    with h5py.File("cells.h5mu", "w") as file:
        write_mudata(file, {"rna": rna_of(counts), "prot": adt_of(counts)}, DONORS)
    config = load_config(write_config(Path(), one={"path": "cells.h5mu#prot"}))
    check_datasets(config)
    [name] = config.corpora
    row = config.datasets(name)["one"]
    assert (row.path, row.counts) == ("cells.h5mu", "prot#X")
    assert (read(Path(row.path), row.counts) != counts[::2, :4]).nnz == 0


def seurat(counts: sp.csr_matrix, path: Path, x: sp.csr_matrix, raw: sp.csr_matrix) -> Path:
    """As SeuratDisk converts: data frames without attributes of anndata, logarithms in raw."""
    obs = OBS.assign(n_counts=np.asarray(counts.sum(axis=1)).ravel())
    data = ad.AnnData(x, obs, pd.DataFrame(index=GENES))
    data.raw = ad.AnnData(raw, obs, pd.DataFrame(index=GENES))
    data.write_h5ad(path)
    with h5py.File(path, "a") as file:
        for name in ("var", "raw/var"):
            del file[name]
            file[f"{name}/features"] = np.array(GENES, h5py.string_dtype())
            file[f"{name}/vst.mean"] = np.arange(37.0)
    return path


def logs_of(counts: sp.csr_matrix, target: float) -> sp.csr_matrix:
    depth = np.asarray(counts.sum(axis=1)).ravel()
    return sp.csr_matrix(
        np.log1p(counts.toarray() / np.maximum(depth, 1)[:, None] * target).astype(np.float32)
    )


def test_data_frames_without_attributes_are_read(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = seurat(counts, tmp_path / "seurat.h5ad", counts, counts)
    for matrix in ("X", "raw"):
        with open_counts(path, matrix) as reader:
            assert reader.var_names == GENES
            assert reader.var["vst.mean"].tolist() == list(range(37))
        assert (read(path, matrix) != counts).nnz == 0


@pytest.mark.parametrize("has_attributes", [True, False])
def test_factors_of_seurat_are_read_as_texts(
    has_attributes: bool, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = seurat(counts, tmp_path / "seurat.h5ad", counts, counts)
    codes = np.arange(230) % 3
    with h5py.File(path, "a") as file:
        # TransferDF of SeuratDisk: codes from 0, NA is the smallest integer, texts beside them
        obs = file["obs"]
        obs["ct"] = np.where(codes == 2, np.iinfo(np.int32).min, codes).astype(np.int32)
        obs["__categories/ct"] = np.array(["B", "T"], h5py.string_dtype())
        obs["n"] = codes
        obs.attrs["column-order"] = ["ct", "n"]
        obs.attrs["encoding-version"] = "0.1.0"
        if not has_attributes:
            for name in [*obs.attrs]:
                del obs.attrs[name]
    with open_counts(path) as reader:
        labels = reader.obs["ct"]
        assert labels.isna().tolist() == (codes == 2).tolist()
        assert labels[codes < 2].tolist() == [["B", "T"][code] for code in codes[codes < 2]]
        assert reader.obs["n"].tolist() == codes.tolist()
        assert reader.obs_names.tolist() == OBS.index.tolist()
    with h5py.File(path, "a") as file:
        file["obs/ct"][0] = 2
    assert "/obs cannot be read: " in refusal(path)
    with h5py.File(path, "a") as file:
        # anndata 0.7, where numbers have replaced a column whose texts stayed
        file["obs/other"] = np.zeros(230, np.int8)
        file["obs/__categories/other"] = np.array(["A"], h5py.string_dtype())
        file["obs/other"].attrs["categories"] = file["obs/__categories/other"].ref
        if has_attributes:
            file["obs"].attrs["column-order"] = ["ct", "n", "other"]
        stored = file["obs/ct"][()].tolist()
    with open_counts(path) as reader:
        assert reader.obs["ct"].tolist() == stored


def test_a_file_without_counts_describes_each_matrix(counts: sp.csr_matrix, tmp_path: Path) -> None:
    logs = logs_of(counts, 1e4)
    scaled = sp.csr_matrix(logs.toarray() - 0.5)
    path = seurat(counts, tmp_path / "seurat.h5ad", scaled, logs)
    looks = "no matrix in this file holds counts (X looks scaled, raw looks log-transformed)"
    for matrix in ("X", "raw"):
        assert refusal(path, matrix).endswith(
            f"{looks}; set the dataset's `counts` to expm1(raw), or use a file with raw counts"
        )
    with h5py.File(path, "a") as file:
        file["layers/umi"] = counts.toarray()
    assert refusal(path).endswith("raw counts may be in umi: set the dataset's `counts`")


def test_zeros_and_ones_are_not_taken_for_counts(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = h5ad(logs_of(counts, 1e4), tmp_path / "cells.h5ad")
    with h5py.File(path, "a") as file:
        file["layers/detected"] = (counts > 0).toarray()
    looks = "no matrix in this file holds counts (X looks log-transformed, detected has only zeros"
    assert f"{looks} and ones)" in refusal(path)
    with open_counts(path) as reader, pytest.raises(DataError, match="X looks log-transformed"):
        reader.find_counts()


@pytest.mark.parametrize("target", [1e4, 1e6, 1e5, "median"])
def test_counts_are_recovered_exactly_from_logarithms(
    target: float | str, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    depths = np.asarray(counts.sum(axis=1)).ravel()
    scale = float(np.median(depths[depths > 0])) if target == "median" else float(target)
    path = seurat(counts, tmp_path / "seurat.h5ad", counts, logs_of(counts, scale))
    assert (read(path, "expm1(raw)") != counts).nnz == 0


@pytest.mark.parametrize("target", [2e4, 5e3, 1234.5])
def test_counts_are_not_recovered_with_another_scale(
    target: float, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = seurat(counts, tmp_path / "seurat.h5ad", counts, logs_of(counts, target))
    assert "expm1(raw) * n_counts / 10,000 gives no whole numbers, such as " in refusal(
        path, "expm1(raw)"
    )


def test_counts_are_not_recovered_without_depths(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = h5ad(logs_of(counts, 1e4), tmp_path / "logs.h5ad")
    assert (
        "expm1(X) needs the counts of each cell in an obs column; expected one of n_counts"
        in refusal(path, "expm1(X)")
    )


def test_a_null_raw_counts_as_missing_before_a_run(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = in_zarr(counts, tmp_path)
    (path / "raw").mkdir(exist_ok=True)
    (path / "raw" / "zarr.json").write_text(
        json.dumps(
            {
                "shape": [],
                "data_type": "bool",
                "node_type": "array",
                "attributes": {"encoding-type": "null"},
            }
        )
    )
    with declared_names(path) as names:
        assert names is not None
        assert names.counts == ["X"]


def test_a_zarr_of_tiny_files_is_named(
    counts: sp.csr_matrix,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = in_zarr(counts, tmp_path)
    assert (read(path) != counts).nnz == 0
    assert capsys.readouterr().err == ""
    for number in range(300):
        (path / "X" / f"more{number}").write_bytes(b"x" * 500)
    monkeypatch.setattr(anndata_files, "_MANY_FILES", 300)
    assert (read(path) != counts).nnz == 0
    said = capsys.readouterr().err
    assert (
        "bytes on average are read about 40 times slower than large ones; write it again with zarr 3.1.4"
        in said
    )


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_that_grew_after_it_was_listed_is_whole(
    version: int, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    """anndata writes consolidated metadata, and does not renew it for what is appended."""
    path = in_zarr(counts, tmp_path, version=version)
    group = zarr.open_group(path, mode="a", use_consolidated=False)
    sparse_dataset(group["X"]).append(counts[::-1])
    both = sp.vstack([counts, counts[::-1]], format="csr")
    write_elem(group, "obs", pd.DataFrame(index=[f"cell{row}" for row in range(both.shape[0])]))
    write_elem(group, "layers/twice", both * 2)
    assert (read(path) != both).nnz == 0
    assert (read(path, "twice") != both * 2).nnz == 0


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", ["data", "indices"])
def test_a_sparse_zarr_without_all_chunks_is_refused(
    name: str, version: int, counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = in_zarr(counts, tmp_path, version=version)
    group = zarr.open_group(path, mode="a", use_consolidated=False)
    values = group[f"X/{name}"][:]
    del group[f"X/{name}"]
    group.create_array(f"X/{name}", data=values, chunks=(1000,))
    zarr.consolidate_metadata(path)
    assert (read(path) != counts).nnz == 0
    (path / "X" / name / ("1" if version == 2 else "c/1")).unlink()
    line = f"X/{name}: 1 of {-(-len(values) // 1000)} chunks are not stored and read as zeros"
    assert refusal(path) == f"{path}: damaged: {line}; if it is a copy, copy it again"


def test_absent_chunks_of_a_dense_zarr_are_named(
    counts: sp.csr_matrix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = counts.copy()
    counts[:70, :5] = 0  # ten chunks of zeros, which zarr does not store
    counts.eliminate_zeros()
    path = in_zarr(counts, tmp_path, form=sp.csr_matrix.toarray)
    assert (read(path) != counts).nnz == 0
    assert (
        "X: 10 of 264 chunks are not stored and read as zeros; if it is a copy, copy it again"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(
    ("group", "remedy"),
    [
        (
            "GRCh38-rna/barcode_metadata",
            "it was written by Pegasus: write it as .h5ad (pegasusio.write_output",
        ),
        ("cell_features", "it is the matrix of Xenium: give cell_feature_matrix.h5"),
        ("cellData", "it was written by Scarf: write it as .h5ad (scarf.writers.to_h5ad("),
    ],
)
def test_a_zarr_of_another_program_is_named(group: str, remedy: str, tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "other.zarr", mode="w").create_group(group)
    assert remedy in refusal(tmp_path / "other.zarr")


def test_a_zarr_of_datasets_says_which_to_give(counts: sp.csr_matrix, tmp_path: Path) -> None:
    """As annbatch writes a collection: AnnData side by side."""
    path = tmp_path / "collection.zarr"
    root = zarr.open_group(path, mode="w")
    for name in ("dataset_1", "dataset_0"):
        write_elem(root, name, rna_of(counts))
    remedy = f"; it has dataset_0: give {path / 'dataset_0'}"
    assert refusal(path) == f"{path}: not an AnnData: no obs and var groups{remedy}"
    assert (read(path / "dataset_0") != counts).nnz == 0


def test_a_list_of_snapatac_files_is_named(counts: sp.csr_matrix, tmp_path: Path) -> None:
    path = tmp_path / "cells.h5ads"
    with h5py.File(path, "w") as file:
        write_elem(file, "obs", OBS)
        write_elem(file, "var", pd.DataFrame(index=GENES))
        write_elem(file, "uns/AnnDataSet", {"file_path": np.array(["a.h5ad", "b.h5ad"], object)})
    assert refusal(path) == (
        f"{path}: it lists files of snapatac2 and has no counts: give one of those, or write "
        "data.to_adata().write_h5ad('cells.h5ad')"
    )


def test_a_null_x_counts_as_missing(mudata: Path, counts: sp.csr_matrix) -> None:
    file = h5py.File(mudata, "a") if mudata.suffix == ".h5mu" else zarr.open_group(mudata)
    del file["mod/rna/X"]
    write_elem(file, "mod/rna/X", None)
    if isinstance(file, h5py.File):
        file.close()
    assert (
        refusal(mudata) == f"{mudata}#rna: no matrix 'X' (the dataset's `counts`); there are: twice"
    )
    assert (read(mudata, "rna#twice") != counts * 2).nnz == 0


def test_names_cut_by_pegasusio_are_reported(
    counts: sp.csr_matrix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    obs = OBS.rename_axis("barcodekey")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ad.AnnData(counts, obs, pd.DataFrame(index=GENES)).write_h5ad(tmp_path / "pegasus.h5ad")
    assert (read(tmp_path / "pegasus.h5ad") != counts).nnz == 0
    assert (
        "pegasusio wrote its names of cells, without the -1 of Cell Ranger"
        in capsys.readouterr().err
    )


def test_an_index_among_the_columns_is_no_column(counts: sp.csr_matrix, tmp_path: Path) -> None:
    # as scarf's to_h5ad writes it
    obs = pd.DataFrame({"names": CELLS}, index=CELLS)
    ad.AnnData(counts, obs, pd.DataFrame(index=GENES)).write_h5ad(tmp_path / "scarf.h5ad")
    with h5py.File(tmp_path / "scarf.h5ad", "a") as file:
        file["obs"].attrs["column-order"] = np.array(["_index", "names"], dtype=object)
    with open_counts(tmp_path / "scarf.h5ad") as reader:
        assert (list(reader.obs_columns), list(reader.obs_names)) == (["names"], CELLS)
