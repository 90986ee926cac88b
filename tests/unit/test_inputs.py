"""Input formats: the same cells from every format, filters, links, sizes, damage; and rounded
values.
"""

import gzip
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp
import zarr
from anndata.experimental import concat_on_disk

from cellmill.config import plugin
from cellmill.data.genes.names import is_expression
from cellmill.data.inputs import matrices
from cellmill.data.inputs.formats import declared_names, open_counts
from cellmill.data.inputs.source import DeclaredNames
from cellmill.data.inputs.text import lines
from cellmill.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Path]
CELLS = [f"cell_{i}" for i in range(230)]
GENES = [f"gene_{j}" for j in range(37)]
FORMS = (sp.csr_matrix, sp.csc_matrix, sp.csr_matrix.toarray)
OBS = pd.DataFrame({"kind": pd.Categorical(["a", "b"] * 115), "depth": np.arange(230.0)}, CELLS)


def read(path: Path, matrix: str = "X", block: int = 50) -> sp.csr_matrix:
    with open_counts(path, matrix) as reader:
        return sp.vstack(list(reader.rows(block)), format="csr")


def refusal(path: Path, matrix: str = "X") -> str:
    with pytest.raises(DataError) as error:
        read(path, matrix)
    text = str(error.value)
    assert "\n" not in text
    return text


def h5ad(matrix: Any, path: Path) -> Path:
    ad.AnnData(matrix, OBS, pd.DataFrame(index=GENES)).write_h5ad(path)
    return path


def in_zarr(
    counts: sp.csr_matrix, folder: Path, form: Any = sp.csr_matrix, version: int = 3
) -> Path:
    cells = ad.AnnData(form(counts), OBS, pd.DataFrame(index=GENES))
    with warnings.catch_warnings(), ad.settings.override(zarr_write_format=version):
        warnings.simplefilter("ignore")
        cells.write_zarr(
            folder / "cells.zarr", chunks=(7, 5) if form is sp.csr_matrix.toarray else None
        )
    return folder / "cells.zarr"


def zarr_zip(counts: sp.csr_matrix, folder: Path) -> Path:
    stored = in_zarr(counts, folder)
    shutil.make_archive(str(stored), "zip", stored)
    shutil.rmtree(stored)
    return folder / "cells.zarr.zip"


def with_filter(counts: sp.csr_matrix, folder: Path, **filters: Any) -> Path:
    """Filters for the arrays of X only."""
    path = h5ad(counts, folder / "filtered.h5ad")
    with h5py.File(path, "a") as file:
        for name in ("data", "indices", "indptr"):
            values = file["X"][name][:]
            del file["X"][name]
            file["X"].create_dataset(name, data=values, chunks=(100,), **filters)
    return path


def of_dtype(counts: sp.csr_matrix, folder: Path, dtype: str) -> Path:
    return h5ad(counts.astype(dtype), folder / "counts.h5ad")


def big_endian(counts: sp.csr_matrix, folder: Path, form: Any) -> Path:
    path = h5ad(form(counts), folder / "big.h5ad")
    with h5py.File(path, "a") as file:
        for name in (
            ["X"]
            if isinstance(file["X"], h5py.Dataset)
            else [f"X/{n}" for n in ("data", "indices", "indptr")]
        ):
            values = file[name][()]
            attributes = dict(file[name].attrs)
            del file[name]
            file.create_dataset(
                name, data=values.astype(values.dtype.newbyteorder(">"))
            ).attrs.update(attributes)
    return path


def write_arrays(group: h5py.Group, counts: sp.csr_matrix) -> None:
    for name in ("data", "indices", "indptr"):
        group[name] = getattr(counts, name)


def legacy(counts: sp.csr_matrix, folder: Path) -> Path:
    """As anndata 0.6 wrote it."""
    path = folder / "old.h5ad"
    with h5py.File(path, "w") as file:
        write_arrays(file.create_group("X"), counts)
        file["X"].attrs.update({"h5sparse_format": b"csr", "h5sparse_shape": counts.shape})
        for name, names in (("obs", CELLS), ("var", GENES)):
            codes = np.arange(len(names), dtype="i1") % 2
            file[name] = np.array(list(zip(names, codes)), [("index", "S8"), ("half", "i1")])
        file["uns/half_categories"] = np.array([b"even", b"odd"])
    return path


def tenx_v3(counts: sp.csr_matrix, folder: Path) -> Path:
    with h5py.File(folder / "filtered_feature_bc_matrix.h5", "w") as file:
        write_arrays(file.create_group("matrix"), counts.astype(np.int32))
        file["matrix/shape"] = counts.shape[::-1]
        file["matrix/barcodes"] = np.array(CELLS, "S")
        kinds = ["Gene Expression", "gene expression", "GENE EXPRESSION", ""] * 9 + [
            "Antibody Capture"
        ]
        columns = {
            "id": GENES,
            "name": [f"S{j}" for j in range(37)],
            "feature_type": kinds,
            "genome": ["GRCh38"] * 37,
        }
        for name, column in columns.items():
            file[f"matrix/features/{name}"] = np.array(column, "S")
    return folder / "filtered_feature_bc_matrix.h5"


def tenx_v2(counts: sp.csr_matrix, folder: Path, genome: str = "GRCh38") -> Path:
    with h5py.File(folder / "filtered_gene_bc_matrices.h5", "a") as file:
        write_arrays(file.create_group(genome), counts.astype(np.int32))
        file[f"{genome}/shape"] = counts.shape[::-1]
        file[f"{genome}/barcodes"] = np.array(CELLS, "S")
        file[f"{genome}/genes"] = np.array(GENES, "S")
        file[f"{genome}/gene_names"] = np.array(GENES, "S")
    return folder / "filtered_gene_bc_matrices.h5"


def matrix_market(
    counts: sp.csr_matrix,
    folder: Path,
    end: str = "",
    genes: str = "features",
    field: str = "integer",
) -> Path:
    """Sorted by cell if counts are integers, else by gene."""
    stored = (
        counts.T.tocsc().tocoo().astype(int)
        if field == "integer"
        else counts.T.tocoo().astype(float)
    )
    scipy.io.mmwrite(folder / "sample_matrix.mtx", stored, field=field, comment="from a test")
    (folder / f"sample_{genes}.tsv").write_text(
        "".join(f"{g}\t{g}\tGene Expression\n" for g in GENES)
    )
    (folder / "sample_barcodes.tsv").write_text("".join(f"{cell}\n" for cell in CELLS))
    for file in list(folder.glob("sample_*")) if end else []:
        with gzip.open(f"{file}{end}", "wb") as packed:
            packed.write(file.read_bytes())
        file.unlink()
    return folder


def loom(counts: sp.csr_matrix, folder: Path, chunks: Any = None) -> Path:
    with h5py.File(folder / "cells.loom", "w") as file:
        file.create_dataset(
            "matrix", data=counts.toarray().T, chunks=chunks, compression=chunks and "gzip"
        )
        file["layers/spliced"] = counts.toarray().T + 1
        file["row_attrs/Gene"], file["row_attrs/Accession"] = (
            np.array(["G"] * 37, "S"),
            np.array(GENES, "S"),
        )
        file["col_attrs/CellID"], file["col_attrs/depth"] = np.array(CELLS, "S"), np.arange(230.0)
        file.create_group("row_graphs")
    return folder / "cells.loom"


def plugin_filter(counts: sp.csr_matrix, folder: Path, name: str) -> Path:
    hdf5plugin = pytest.importorskip("hdf5plugin", reason="the extra hdf5plugin is not installed")
    return with_filter(counts, folder, **getattr(hdf5plugin, name)())


FORMATS: dict[str, Callable[[sp.csr_matrix, Path], Path]] = {
    "gzip": partial(with_filter, compression="gzip", shuffle=True),
    "lzf": partial(with_filter, compression="lzf"),
    "zstd": partial(plugin_filter, name="Zstd"),
    "blosc": partial(plugin_filter, name="Blosc"),
    **{kind: partial(of_dtype, dtype=kind) for kind in ("f8", "i8", "u1")},
    "anndata 0.6": legacy,
    **{f"big-endian {form.__name__}": partial(big_endian, form=form) for form in FORMS},
    **{
        f"zarr {v} {form.__name__}": partial(in_zarr, form=form, version=v)
        for v in (2, 3)
        for form in FORMS
    },
    "zarr zip": zarr_zip,
    "10x v3": tenx_v3,
    "10x v2": tenx_v2,
    "mtx": partial(matrix_market, genes="genes"),
    "mtx.gz": partial(matrix_market, end=".gz", field="real"),
    "loom": partial(loom, chunks=(8, 8)),
    "loom of wide chunks": partial(loom, chunks=(1, 230)),
    "loom without chunks": loom,
}


BUCKETS = matrices.RowBuckets


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_cells_are_the_same_blocks_in_every_format(
    name: str, counts: sp.csr_matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FORMATS[name](counts, tmp_path)
    # several slabs, and transposition where chunks are wide
    monkeypatch.setattr(matrices, "_SLAB_BYTES", 3000)
    monkeypatch.setattr(matrices, "_MIN_BUCKET_ROWS", 16)
    monkeypatch.setattr(matrices, "_PIECE_VALUES", 100)
    monkeypatch.setattr(lines, "_PIECE_BYTES", 1000)
    wanted = counts.astype(np.uint32)
    with open_counts(path) as reader:
        assert (reader.var_names, reader.obs_names.tolist()) == (GENES, CELLS)
        if "zarr" in name:
            pd.testing.assert_frame_equal(reader.obs, OBS)
        for block in (50, 1, 1000):
            for number, got in enumerate(reader.rows(block)):
                same = wanted[number * block : (number + 1) * block]
                for part in ("data", "indices", "indptr"):
                    assert getattr(got, part).dtype == (np.uint32 if part == "data" else np.int32)
                    assert getattr(got, part).tolist() == getattr(same, part).tolist()
            assert (number + 1) * block >= len(CELLS)
            # what was transposed is not transposed again
            monkeypatch.setattr(matrices, "RowBuckets", None)
    for first in (50, 200, len(CELLS)):
        with open_counts(path) as reader, monkeypatch.context() as restored:
            restored.setattr(matrices, "RowBuckets", BUCKETS)
            rest = [block.toarray() for block in reader.rows(50, first)]
        assert (
            np.concatenate([np.zeros((0, len(GENES))), *rest]).tolist()
            == wanted[first:].toarray().tolist()
        )


def test_a_package_adds_a_format(
    counts: sp.csr_matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"toy": "tests.plugin.cellmill_toy.input:FORMAT"}
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [EntryPoint(*one, group) for one in points.items()]
    )
    path = tmp_path / "cells.counts.csv"
    pd.DataFrame(counts.toarray(), CELLS, GENES).to_csv(path)
    assert (read(path) != counts).nnz == 0
    with declared_names(path) as names:
        assert names == DeclaredNames([], ["X"])
    points["broken"] = "json:loads"
    with pytest.raises(
        ConfigError, match=r"^input 'broken' is not a cellmill.data.inputs.source.Format; repair or"
    ):
        read(tmp_path / "cells.tsv")


def test_a_matrix_without_parts_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="defines parts, parts_from or pieces"):
        matrices.StoredMatrix().some(1)


def test_names_and_categories_are_read(counts: sp.csr_matrix, tmp_path: Path) -> None:
    with open_counts(tenx_v3(counts, tmp_path)) as reader:
        assert reader.var.symbol.tolist() == [f"S{j}" for j in range(37)]
        assert is_expression(reader.var).tolist() == [True] * 36 + [False]
    with open_counts(legacy(counts, tmp_path)) as reader:
        assert reader.obs.half.tolist()[:3] == ["even", "odd", "even"]
        assert reader.var.half.dtype == "category"
    path = loom(counts, tmp_path)
    assert (read(path, "spliced") != (counts + np.ones(counts.shape)).astype(np.uint32)).sum() == 0
    with open_counts(path) as reader:
        assert reader.obs["depth"].tolist()[:2] == [0.0, 1.0]
        assert reader.var["symbol"].tolist() == ["G"] * 37
    assert "no matrix 'splcied' (the dataset's `counts`); did you mean 'spliced'?" in refusal(
        path, "splcied"
    )


def test_a_10x_file_of_several_genomes_is_read_by_genome(
    counts: sp.csr_matrix, tmp_path: Path
) -> None:
    path = tenx_v3(counts, tmp_path)
    genomes = ["GRCh38", "mm10"] * 18 + ["GRCh38"]
    with h5py.File(path, "a") as file:
        for name, column in {
            "genome": genomes,
            "id": [f"{g}_{n}" for g, n in zip(genomes, GENES)],
        }.items():
            del file[f"matrix/features/{name}"]
            file[f"matrix/features/{name}"] = np.array(column, "S")
    assert (read(path) != counts).nnz == 0
    assert (read(path, "mm10") != counts[:, 1::2]).nnz == 0
    with open_counts(path, "GRCh38") as reader:
        assert reader.var_names == GENES[::2]
    assert refusal(path, "GRCh37").endswith(
        "no matrix 'GRCh37' (the dataset's `counts`); did you mean 'GRCh38'?"
    )
    old = tenx_v2(counts, tmp_path)
    tenx_v2(counts * 2, tmp_path, "mm10")
    assert (read(old, "mm10") != counts * 2).nnz == 0
    assert refusal(old) == f"{old}: has 2 genomes; set the dataset's `counts` to GRCh38 or mm10"


def test_a_damaged_matrix_market_folder_fails_in_one_line(
    counts: sp.csr_matrix, tmp_path: Path
) -> None:
    file = matrix_market(counts, tmp_path) / "sample_matrix.mtx"
    whole = file.read_text()
    first = whole.splitlines()[3]
    cases = {
        whole.replace(first, "1 2"): "damaged: ",
        whole.replace(first, "38 1 5"): "damaged: an index is outside 1 to 37",
        whole.replace(first, "0 1 5"): "damaged: an index is outside 1 to 37",
        whole.replace(first, "1 1 5.5"): "damaged: ",
        whole.replace(
            first, "1 1 5 7"
        ): "expected three numbers a line, got more, such as '1 1 5 7'",
        whole[:-20]: "damaged: ",
        "\n".join(
            whole.splitlines()[:-3]
        ): f"truncated or damaged: {counts.nnz - 3:,} values of {counts.nnz:,}; copy",
        whole.replace(
            f"37 230 {counts.nnz}", f"37 230 {10**12}"
        ): f"{counts.nnz:,} values of 1,000,000,000,000",
        whole.replace("37 230", "230 37"): "damaged: an index is outside 1 to 37",
        whole.replace(
            "integer", "complex"
        ): "expected '%%MatrixMarket matrix coordinate integer general' (or real)",
        whole.replace("37 230", "37"): "expected a line of rows, columns and values",
    }
    for text, message in cases.items():
        file.write_text(text)
        assert message in refusal(tmp_path)
    file.write_text(whole)
    (tmp_path / "sample_barcodes.tsv").unlink()
    assert "no sample_barcodes.tsv; expected it beside sample_matrix.mtx" in refusal(file)
    shutil.copy(file, tmp_path / "other_matrix.mtx")
    assert "has 2 matrices (other_matrix.mtx, sample_matrix.mtx)" in refusal(tmp_path)


def test_bytes_of_unrelated_files_are_never_read_as_counts(
    counts: sp.csr_matrix, tmp_path: Path
) -> None:
    other = h5ad(counts, tmp_path / "other.h5ad")
    path = tmp_path / "linked.h5ad"
    link = h5py.ExternalLink(str(other), "/X/data")
    stored = [(str(other), 0, counts.nnz * 4)]
    layout = h5py.VirtualLayout((counts.nnz,), "f4")
    layout[:] = h5py.VirtualSource(str(other), "X/data", (counts.nnz,))
    elsewhere = "X/data is stored in another file"
    cases: list[tuple[Callable[[h5py.Group], object], str]] = [
        (lambda x: x.__setitem__("data", link), f"X/data is a link into {str(other)!r}"),
        (lambda x: x.create_dataset("data", (counts.nnz,), "f4", external=stored), elsewhere),
        (lambda x: x.create_virtual_dataset("data", layout), elsewhere),
    ]
    for make, fault in cases:
        with h5py.File(h5ad(counts, path), "a") as file:
            del file["X/data"]
            make(file["X"])
        assert refusal(path) == f"{path}: {fault}; expected a file that holds its own data"


def test_malformed_arrays_are_refused_in_one_line(counts: sp.csr_matrix, tmp_path: Path) -> None:
    def spoiled(**values: Any) -> str:
        """The refusal of a file with other arrays, or another `shape`; None removes one."""
        path = h5ad(counts, tmp_path / "odd.h5ad")
        with h5py.File(path, "a") as file:
            for name, value in values.items():
                owner = file["X"].attrs if name == "shape" else file if name == "obs" else file["X"]
                del owner[name]
                if isinstance(value, dict):
                    owner.create_dataset(name, **value)
                elif value is not None:
                    owner[name] = file["/"] if isinstance(value, str) and value == "loop" else value
        return refusal(path).removeprefix(f"{path}: ")

    for value in (None, 5, [1, 2, 3], "wide", [2.5, 1.0], [[1, 2], [3, 4]]):
        assert spoiled(shape=value).startswith(
            "X is damaged: expected a shape of two whole numbers, got "
        )
    assert "is outside 0 to" in spoiled(shape=[-1, 37])
    assert spoiled(shape=[10**12, 37]).startswith(
        "X is damaged: shape (1000000000000, 37) is outside 0 to"
    )
    for name in ("data", "indices", "indptr"):
        assert spoiled(**{name: 3}).startswith(
            f"X/{name} is damaged: expected 1 dimensions, got shape ()"
        )
        assert "expected 1 dimensions" in spoiled(**{name: counts.toarray()})
        assert f"X/{name} expected " in spoiled(**{name: np.array([b"text"] * 3)})
        assert spoiled(**{name: None}) == f"X/{name} is missing"
        assert spoiled(**{name: h5py.SoftLink(f"/X/{name}")}).startswith("damaged: ")
    for name, at, value in (
        ("indices", 3, 10_000),
        ("indices", 3, -1),
        ("indptr", 4, 10**6),
        ("indptr", -1, 1),
    ):
        array = getattr(counts, name).copy()
        array[at] = value
        assert spoiled(**{name: array}).startswith("X is damaged: ")
    assert spoiled(indptr=np.arange(5.0)) == "X/indptr expected whole numbers, got float64"
    huge = {
        name: {"shape": (10**12,), "dtype": "i4", "chunks": (1 << 16,)}
        for name in ("data", "indices")
    }
    declared = (
        "is damaged: it declares 4,000,000,000,000 bytes in shape (1000000000000,) and stores 0"
    )
    assert declared in spoiled(**huge, indptr=np.array([0] + [10**12] * 230))
    assert "cannot be read" in spoiled(obs="loop")


def test_special_files_are_refused(counts: sp.csr_matrix, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5ad")
    assert refusal(tmp_path / "pipe.h5ad") == f"{tmp_path}/pipe.h5ad: expected a file, got a FIFO"
    assert refusal(Path("/dev/zero")) == "/dev/zero: expected a file, got a device"
    stored = in_zarr(counts, tmp_path)
    os.mkfifo(stored / "pipe")
    assert "no regular file" in refusal(stored)
    (stored / "pipe").unlink()
    (stored / "link").symlink_to("/etc/hostname")
    assert "a link; expected regular files alone" in refusal(stored)
    folder = tmp_path / "mtx"
    folder.mkdir()
    os.mkfifo(folder / "matrix.mtx")
    (folder / "features.tsv").write_text("a\n")
    (folder / "barcodes.tsv").write_text("b\n")
    assert refusal(folder) == f"{folder}/matrix.mtx: expected a file, got a FIFO"


def test_a_zarr_of_pickles_or_of_declared_size_is_refused(
    counts: sp.csr_matrix, tmp_path: Path
) -> None:
    stored = in_zarr(counts, tmp_path, version=2)
    group = zarr.open_group(stored, mode="a", use_consolidated=False)
    del group["X/data"]
    group.create_array("X/data", shape=(10**12,), chunks=(1 << 16,), dtype="f4")
    assert "X/data is damaged: it declares 4,000,000,000,000 bytes in shape" in refusal(stored)
    shutil.rmtree(stored / "X" / "data")
    group.create_array("X/data", data=counts.data)
    for name, key, value in (
        ("indptr", "compressor", {"id": "pickle"}),
        ("indices", "filters", [{"id": "pickle"}]),
    ):
        metadata = stored / "X" / name / ".zarray"
        whole = metadata.read_text()
        metadata.write_text(json.dumps(json.loads(whole) | {key: value}))
        assert "pickle" in refusal(stored)
        metadata.write_text(whole)


def test_a_missing_filter_is_named_with_the_extra(counts: sp.csr_matrix, tmp_path: Path) -> None:
    if importlib.util.find_spec("hdf5plugin") is not None:
        pytest.skip("hdf5plugin is installed, so no filter is missing")
    path = h5ad(counts, tmp_path / "zstd.h5ad")
    with h5py.File(path, "a") as file:
        del file["X/data"]
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((100,))
        properties.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((counts.nnz,))
        h5py.h5d.create(file["X"].id, b"data", h5py.h5t.IEEE_F32LE, space, properties)
    assert refusal(path) == (
        f"{path}: X/data is compressed with filter zstd, which is not installed: pip install 'cellmill[hdf5plugin]', "
        "or write the file with compression='gzip'"
    )


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        (lambda c: c, None),
        (lambda c: c[:10], None),
        (
            lambda c: np.rint(c / c.sum(1, keepdims=True) * 1e4),
            "of cells have no gene with a count of 1",
        ),
        (
            lambda c: np.rint(c / c.sum(1, keepdims=True) * np.median(c.sum(1))),
            "the sums of 90% of cells lie between",
        ),
        (lambda c: np.rint(np.log1p(np.tile(c, (1, 5)))), "no count above 10, as in logarithms"),
        (lambda c: 2 * c, "100% of cells have no gene with a count of 1"),
    ],
)
def test_normalised_values_that_were_rounded_are_warned_of(
    change: Callable[[np.ndarray], np.ndarray],
    sign: str | None,
    make_h5ad: Make,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = np.random.default_rng(0)
    cells = draw.poisson(draw.gamma(0.3, 1, (1, 400)) * draw.lognormal(0, 0.5, (100, 1)) * 3)
    path = make_h5ad(sp.csr_matrix(change(cells).astype(np.float32)))
    with open_counts(path) as reader:
        assert sum(block.shape[0] for block in reader.rows()) <= 100
        reader.warn_of_values()
    lines = capsys.readouterr().err.splitlines()
    if sign is None:
        assert lines == []
    else:
        [line] = lines
        assert line.startswith(f"warning: {path}: X may hold normalised values that were rounded: ")
        assert sign in line


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, bool])
def test_zeros_and_ones_are_warned_of(
    dtype: Any, make_h5ad: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `binarize` of episcanpy leaves X, a cell of 80 genes here."""
    draw = np.random.default_rng(0)
    cells = draw.random((100, 400)) < 0.2
    path = make_h5ad(sp.csr_matrix(cells.astype(dtype)))
    assert read_warnings(path, capsys) == [
        f"warning: {path}: X may hold zeros and ones instead of counts: no value is above 1; "
        "the file has no other matrix; use a file with raw counts"
    ]


def read_warnings(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on stderr after all counts of a file were read."""
    with open_counts(path) as reader:
        for _ in reader.rows(7):
            pass
        reader.warn_of_values()
    return capsys.readouterr().err.splitlines()


def test_counts_cut_off_by_concat_on_disk_are_warned_of(
    make_h5ad: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    shallow = draw.poisson(1, (20, 60)).astype(np.uint8)
    deep = draw.poisson(draw.lognormal(2, 2, (20, 60))).astype(np.float32)
    first = make_h5ad(sp.csr_matrix(shallow), "first.h5ad")
    second = make_h5ad(sp.csr_matrix(deep), "second.h5ad")
    joined = tmp_path / "joined.h5ad"
    concat_on_disk({"a": first, "b": second}, joined, index_unique="-")
    assert read_warnings(first, capsys) == []
    assert read_warnings(second, capsys) == []
    n_cut = int((deep >= 255).sum())
    assert read_warnings(joined, capsys) == [
        f"warning: {joined}: X may hold counts that were cut off: {n_cut} values are 255, the largest uint8; "
        "write the file again with a larger type, from the files that it was made of"
    ]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16])
def test_counts_that_just_fit_their_type_are_not_warned_of(
    dtype: type, make_h5ad: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    largest = np.iinfo(dtype).max
    counts = np.random.default_rng(0).poisson(np.full((20, 60), 3)).astype(dtype)
    counts[::2] *= 2  # sums that are not equal, as of normalised cells
    counts[3, 5] = largest
    assert read_warnings(make_h5ad(sp.csr_matrix(counts)), capsys) == []
    counts[5, 5] = largest
    counts[7:11:2, 5] = largest - 1
    assert read_warnings(make_h5ad(sp.csr_matrix(counts)), capsys) == []


@pytest.mark.parametrize(
    ("files", "seed"),
    [
        (40, 1),
        pytest.param(
            500, random.SystemRandom().randrange(10**9), id="random seed", marks=pytest.mark.full
        ),
    ],
)
def test_mutated_inputs_are_read_or_refused_in_one_line(files: int, seed: int) -> None:
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.unit.fuzzed_inputs",
        str(files),
        str(seed),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert done.stdout == f"{files} of {files} are read or refused in one line\n"
