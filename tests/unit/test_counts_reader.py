"""Reading and writing counts in row blocks: equal to anndata, canonical, in bounded memory, with errors on damage."""

import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from limits import limited

from cellmill.config.load import load_config
from cellmill.data.arrays import select_columns
from cellmill.data.inputs import h5_walk, matrices
from cellmill.data.inputs.anndata_files import open_memory
from cellmill.data.inputs.formats import declared_names, open_counts, open_dataset
from cellmill.data.inputs.h5 import count_dtype, write_cells
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.check import check_datasets
from cellmill.errors import DataError
from tests.unit.test_inputs import GENES, OBS, read

Make = Callable[..., Path]


@pytest.mark.parametrize("form", [sp.csr_matrix, sp.csc_matrix, sp.csr_matrix.toarray])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int64])
@pytest.mark.parametrize("block", [1, 64, 1000])
def test_every_form_and_dtype_reads_as_the_same_counts(
    make_h5ad: Make, counts: sp.csr_matrix, form: Callable[..., object], dtype: type, block: int
) -> None:
    got = read(make_h5ad(form(counts.astype(dtype))), block=block)
    assert got.dtype == np.uint32
    assert (got != counts.astype(np.uint32)).nnz == 0
    assert got.has_canonical_format
    assert got.data.all()


def test_raw_and_layers_are_read_with_their_own_genes(make_h5ad: Make, counts: sp.csr_matrix) -> None:
    part = ad.AnnData(np.log1p(counts[:, :20]), layers={"umi": counts[:, :20]})
    part.var_names = [f"gene_{j}" for j in range(20)]
    whole = ad.AnnData(counts)
    whole.var_names = [f"gene_{j}" for j in range(37)]
    part.raw = whole
    path = make_h5ad(counts).with_name("three.h5ad")
    part.write_h5ad(path)
    assert (read(path, "raw") != counts).nnz == 0
    assert (read(path, "umi") != counts[:, :20]).nnz == 0
    with open_counts(path, "raw") as reader:
        assert (reader.n_obs, reader.n_vars, reader.var_names[36]) == (230, 37, "gene_36")
    with pytest.raises(
        DataError, match=r"X does not hold counts: .* looks log-transformed; raw counts may be in raw or umi"
    ):
        read(path, "X")
    with pytest.raises(DataError, match="no matrix 'umis' \\(the dataset's `counts`\\); did you mean 'umi'\\?"):
        open_counts(path, "umis")


def test_unsorted_repeated_and_zero_entries_become_canonical(make_h5ad: Make) -> None:
    path = make_h5ad(sp.csr_matrix(np.ones((2, 4), np.float32)))
    with h5py.File(path, "a") as file:
        file["X/indices"][:] = [3, 1, 1, 0, 2, 1, 0, 3]
        file["X/data"][:] = [1, 2, 3, 0, 4, 0, 5, 6]
    got = read(path)
    assert got.toarray().tolist() == [[0, 5, 0, 1], [5, 0, 4, 6]]
    assert got.nnz == 5
    assert got.has_canonical_format


def test_a_csc_matrix_is_transposed_in_pieces_and_only_once(
    make_h5ad: Make, counts: sp.csr_matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrices, "_PIECE", 100)
    monkeypatch.setattr(matrices, "_ROWS", 16)
    with open_counts(make_h5ad(sp.csc_matrix(counts))) as reader:
        assert (sp.vstack(list(reader.rows(7))) != counts).nnz == 0
        with h5py.File(reader.path) as file:
            chunk = file["X/data"].id.get_chunk_info(0)
        with open(reader.path, "r+b") as raw:
            raw.seek(chunk.byte_offset)
            raw.write(bytes(chunk.size))
        for block in (7, 100):
            assert (sp.vstack(list(reader.rows(block))) != counts).nnz == 0


def test_a_large_file_is_read_and_written_in_the_memory_of_a_block(tmp_path: Path) -> None:
    script = """
        import resource, sys, tracemalloc
        import numpy as np, pandas as pd, scipy.sparse as sp
        from cellmill.data.inputs.formats import open_counts
        from cellmill.data.inputs.h5 import write_cells
        path, n, block = sys.argv[1], 40_000, 500
        one = sp.random(block, 5_000, 0.05, "csr", random_state=0)
        one.data = np.rint(one.data * 9 + 1)
        one = one.astype(np.uint16)
        obs = pd.DataFrame(index=[str(i) for i in range(n)])
        var = pd.DataFrame(index=[str(j) for j in range(5_000)])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_cells(path, obs, var, (one for _ in range(n // block)), one.nnz * (n // block), np.dtype("<u2"))
        with open_counts(path) as reader:
            total = sum(int(b.sum()) for b in reader.rows(block))
        assert total == int(one.sum()) * (n // block)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    path = tmp_path / "large.h5ad"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)], capture_output=True, text=True, check=True
    )
    grown_kb = int(done.stdout)
    assert path.stat().st_size > 60e6
    assert grown_kb < 30_000, f"{grown_kb} kB for a file of {path.stat().st_size / 1e6:.0f} MB"


def test_written_cells_are_contiguous_aligned_and_open_in_anndata(tmp_path: Path) -> None:
    matrix = sp.random(3000, 200, 0.3, "csr", random_state=1)
    matrix.data = np.arange(matrix.nnz) % 60_000 + 1.0
    obs = pd.DataFrame({"label": pd.Categorical(["a", "b", "a"] * 1000)}, index=[f"c{i}" for i in range(3000)])
    var = pd.DataFrame({"symbol": "s"}, index=[f"g{j}" for j in range(200)])
    path = tmp_path / "cells.h5ad"
    blocks = [matrix[a : a + 700] for a in range(0, 3000, 700)]
    write_cells(path, obs, var, blocks, matrix.nnz, count_dtype(60_000))
    with h5py.File(path) as file:
        for name, dtype in (("data", "<u2"), ("indices", "<i4"), ("indptr", "<i8")):
            array = file["X"][name]
            assert (array.dtype.str, array.chunks, array.compression) == (dtype, None, None)
            assert array.id.get_offset() % 4096 == 0
        attributes = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": None}
        assert dict(file["X"].attrs) | {"shape": None} == attributes
    back = ad.read_h5ad(path)
    assert (matrix != back.X).nnz == 0
    pd.testing.assert_frame_equal(back.obs, obs)
    pd.testing.assert_frame_equal(back.var, var)
    assert (matrix[5:9] != ad.read_h5ad(path, backed="r")[5:9].to_memory().X).nnz == 0


def spoil(value: float) -> np.ndarray:
    matrix = np.ones((3, 3), np.float32)
    matrix[1, 2] = value
    return matrix


NO_OTHER = "the file has no other matrix; use a file with raw counts"


LOGS = f"is fractional: it looks log-transformed; {NO_OTHER}"
AT = "(cell 'cell_1', gene 'gene_2')"


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (spoil(-1), f"-1 {AT} is negative: it looks scaled; {NO_OTHER}"),
        (spoil(2.5), f"2.5 {AT} is fractional: it looks normalised; {NO_OTHER}"),
        (np.log1p(3 * np.eye(3)), f"1.38629 (cell 'cell_0', gene 'gene_0') {LOGS}"),
        (spoil(float("nan")), f"nan {AT} is not finite; counts are whole numbers from 0"),
        (spoil(float("inf")), f"inf {AT} is not finite; counts are whole numbers from 0"),
        (spoil(1e12), f"1e+12 {AT} is too large; the limit is 2^32 - 1"),
    ],
)
@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix, sp.csc_matrix])
def test_values_that_are_not_counts_are_refused(
    make_h5ad: Make, form: Callable[..., object], matrix: np.ndarray, text: str
) -> None:
    path = make_h5ad(form(matrix))
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value) == f"{path}: X does not hold counts: {text}"


def test_cells_whose_names_are_not_unique_are_refused(make_h5ad: Make) -> None:
    path = make_h5ad(np.ones((5, 3), np.float32), obs=pd.DataFrame(index=["x", "x", "x", "y", "y"]))
    with pytest.raises(DataError, match="obs names are not unique: 'x' occurs 3 times and 1 more repeat; call obs_"):
        open_counts(path)


def test_missing_foreign_and_empty_files_are_named(tmp_path: Path, make_h5ad: Make) -> None:
    def message(path: Path) -> str:
        with pytest.raises(DataError) as error:
            open_counts(path)
        return str(error.value)

    assert message(tmp_path / "none.h5ad") == f"{tmp_path}/none.h5ad: no such file"
    assert message(tmp_path).startswith(f"{tmp_path}: no known format; there are: FASTA of proteins (")
    for text in ("", "cell,gene\n1,2\n"):
        (tmp_path / "text.h5ad").write_text(text)
        assert message(tmp_path / "text.h5ad") == f"{tmp_path}/text.h5ad: not an HDF5 file"
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = [1]
    assert message(tmp_path / "other.h5").startswith(f"{tmp_path}/other.h5: no known format; there are: ")
    assert message(make_h5ad(np.ones((0, 3), np.float32))).endswith("empty: 0 cells x 3 genes")
    assert message(make_h5ad(np.ones((3, 0), np.float32))).endswith("empty: 3 cells x 0 genes")


def test_a_file_truncated_anywhere_is_refused(make_h5ad: Make, counts: sp.csr_matrix, tmp_path: Path) -> None:
    whole = make_h5ad(counts).read_bytes()
    cut = tmp_path / "cut.h5ad"
    for frac in (0.01, 0.3, 0.6, 0.95, 0.999):
        cut.write_bytes(whole[: int(len(whole) * frac)])
        with pytest.raises(DataError, match=r"cut.h5ad: truncated: [\d,]+ of [\d,]+ bytes; copy it again"):
            open_counts(cut)


@pytest.mark.parametrize(
    ("name", "at", "value"), [("indices", 3, 99), ("indices", 3, -1), ("indptr", 4, 10**6), ("indptr", -1, 1)]
)
@pytest.mark.parametrize("form", [sp.csr_matrix, sp.csc_matrix])
def test_a_matrix_with_inconsistent_arrays_is_refused(
    make_h5ad: Make, counts: sp.csr_matrix, form: Callable[..., object], name: str, at: int, value: int
) -> None:
    path = make_h5ad(form(counts))
    with h5py.File(path, "a") as file:
        array = file["X"][name][:]
        array[at] = value if value != 99 else 10_000
        file["X"][name][...] = array
    with pytest.raises(DataError, match="X is damaged"):
        read(path)


def test_a_full_disk_ends_in_one_line_and_leaves_the_old_file(tmp_path: Path, simulated: Path) -> None:
    out = tmp_path / "out.h5ad"
    out.write_text("the old file")
    command = [sys.executable, "-m", "cellmill.cli", "preprocess", "--input", str(simulated), "--dataset", "full"]
    command += ["--options", '{"preprocess": {"min_genes": 10}}', "--report", str(tmp_path / "qc.json")]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert done.returncode == 2
    assert done.stderr == f"cellmill preprocess: {out}: File too large\n"
    assert out.read_text() == "the old file"
    assert os.listdir(tmp_path) == ["out.h5ad"]


def test_a_disk_that_fills_up_at_any_byte_is_one_error_without_a_crash(tmp_path: Path, counts: sp.csr_matrix) -> None:
    path, var = tmp_path / "cells.h5ad", pd.DataFrame(index=GENES)

    def write(nnz: int | None) -> None:
        write_cells(path, OBS, var, (counts[a : a + 50] for a in range(0, 230, 50)), nnz, count_dtype(9))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for nnz in (counts.nnz, None):
        write(nnz)
        size = path.stat().st_size
        path.unlink()
        for limit in np.linspace(0, size - 1, 60).astype(int).tolist():
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(OSError, match="File too large") as error:
                    write(nnz)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert error.value.filename == str(path)
            assert os.listdir(tmp_path) == []


def test_a_layer_that_is_called_x_is_read_by_its_place(make_h5ad: Make, counts: sp.csr_matrix) -> None:
    data = ad.AnnData(np.log1p(counts), layers={"X": counts})
    path = make_h5ad(data.X, layers=data.layers)
    with open_counts(path, "layers/X") as reader:
        assert (next(reader.rows()) != counts).nnz == 0
    with (
        pytest.raises(DataError, match="raw counts may be in layers/X: set the dataset's `counts`"),
        open_counts(path) as x,
    ):
        next(x.rows())
    with declared_names(path) as names:
        assert names is not None
        assert names.counts == ["X", "layers/X"]
    with CountsReader(open_memory(data, "layers/X", "d")) as reader:
        assert (next(reader.rows()) != counts).nnz == 0
    with CountsReader(open_memory(data, "X", "d")) as reader, pytest.raises(DataError, match="is fractional"):
        next(reader.rows())


def a_file(path: Path) -> Path:
    """HDF5 with an attribute of text, which stands in a global heap."""
    with h5py.File(path, "w") as file:
        file.create_dataset("X", data=np.zeros(4)).attrs["encoding-type"] = "csr_matrix"
    return path


def zeroed(path: Path) -> Path:
    """The file, with zeros where the sizes of the objects in its global heap stand: reading the text then loops."""
    content = bytearray(a_file(path).read_bytes())
    heap = content.index(b"GCOL") + 16
    content[heap : heap + 512] = bytes(512)
    path.write_bytes(content)
    return path


def test_a_file_on_which_hdf5_loops_is_one_line_and_those_before_it_are_fine(tmp_path: Path) -> None:
    whole, damaged = a_file(tmp_path / "a.h5ad"), zeroed(tmp_path / "b.h5ad")
    message = re.escape(f"{damaged}: damaged: HDF5 was not through its structure after 1 s of CPU time; copy it again")
    with pytest.raises(DataError, match=f"^{message}"):
        h5_walk.check_walk([whole, damaged], limit_s=1)


def test_inputs_are_walked_once_before_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5_walk.check_walk, "__defaults__", (1,))
    with pytest.raises(DataError, match="damaged: HDF5 was not through"):
        open_dataset(zeroed(tmp_path / "b.h5ad"))
    monkeypatch.chdir(tmp_path)
    Path("t.tsv").write_text("dataset\tpath\none\tb.h5ad\n")
    Path("c.yaml").write_text("corpora: {c: {table: t.tsv}}\nruns: {r: {corpus: c}}\ntrain: {steps: 1}\n")
    with limited(), pytest.raises(DataError, match=r"^b\.h5ad: damaged: HDF5 was not through"):
        check_datasets(load_config(Path("c.yaml")))
    whole = a_file(tmp_path / "a.h5ad")
    h5_walk.check_walk([whole])
    monkeypatch.setattr(h5_walk.sys, "executable", "/no such interpreter")
    h5_walk.check_walk([whole, tmp_path / "absent.h5ad", tmp_path])
    text = tmp_path / "text.h5ad"
    text.write_text("no HDF5")
    h5_walk.check_walk([text])


def test_counts_beyond_16_bits_are_written_in_32_and_no_sum_wraps(tmp_path: Path) -> None:
    assert (count_dtype(65_535), count_dtype(65_536)) == (np.uint16, np.uint32)
    matrix, obs, var = (
        sp.csr_matrix(np.array([[70_000, 1]], np.uint32)),
        pd.DataFrame(index=["c"]),
        pd.DataFrame(index=["g", "h"]),
    )
    write_cells(tmp_path / "wide.h5ad", obs, var, [matrix], 2, count_dtype(70_000))
    assert ad.read_h5ad(tmp_path / "wide.h5ad").X.toarray().tolist() == [[70_000, 1]]
    with pytest.raises(AssertionError, match="too large for uint16"):
        write_cells(tmp_path / "cut.h5ad", obs, var, [matrix], 2, count_dtype(1))
    assert os.listdir(tmp_path) == ["wide.h5ad"]
    block, one_gene = sp.csr_matrix(np.array([[2**32 - 1, 1]], np.uint32)), np.zeros(2, np.int32)
    with pytest.raises(DataError, match="columns of one gene sum to 4,294,967,296; the limit is 4,294,967,295"):
        select_columns(block, one_gene, 1)
    block.data[0] -= 1
    assert select_columns(block, one_gene, 1).toarray().tolist() == [[2**32 - 1]]
