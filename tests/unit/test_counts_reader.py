"""Reading and writing counts in row blocks: equal to anndata, canonical, in bounded memory, with
errors on damage.
"""

import os
import re
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
from limits import full_after, limited

from cellmill.cli import main
from cellmill.config.load import load_config
from cellmill.data.arrays import select_columns
from cellmill.data.inputs import h5_walk
from cellmill.data.inputs.anndata_files import open_memory
from cellmill.data.inputs.formats import declared_names, open_counts, open_dataset
from cellmill.data.inputs.h5 import count_dtype, write_cells
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.prepare.check import check_datasets
from cellmill.errors import DataError
from tests.unit.test_inputs import GENES, OBS, read, refusal
from tests.unit.test_named_files import write_config

Make = Callable[..., Path]


def test_raw_counts_are_read_with_their_genes(make_h5ad: Make, counts: sp.csr_matrix) -> None:
    part = ad.AnnData(np.log1p(counts[:, :20]), layers={"umi": counts[:, :20]})
    whole = ad.AnnData(counts)
    part.var_names = GENES[:20]
    whole.var_names = GENES
    part.raw = whole
    path = make_h5ad(counts).with_name("three.h5ad")
    part.write_h5ad(path)
    assert (read(path, "raw") != counts).nnz == 0
    assert (read(path, "umi") != counts[:, :20]).nnz == 0
    with open_counts(path, "raw") as reader:
        assert (reader.n_obs, reader.n_vars, reader.var_names[36]) == (230, 37, "gene_36")
    assert "is fractional: it looks log-transformed; raw counts may be in raw or umi" in refusal(
        path
    )
    assert "no matrix 'umis' (the dataset's `counts`); did you mean 'umi'?" in refusal(path, "umis")


def test_unsorted_entries_become_canonical(
    make_h5ad: Make,
) -> None:
    path = make_h5ad(sp.csr_matrix(np.ones((2, 4), np.uint32)))
    with h5py.File(path, "a") as file:
        file["X/indices"][:], file["X/data"][:] = [3, 1, 1, 0, 2, 1, 0, 3], [1, 2, 3, 0, 4, 0, 5, 6]
    got = read(path)
    assert got.toarray().tolist() == [[0, 5, 0, 1], [5, 0, 4, 6]]
    assert got.nnz == 5
    assert got.has_canonical_format
    with h5py.File(path, "a") as file:
        file["X/data"][1:3] = [2**32 - 1, 2]
    assert (
        "X: entries of one cell and gene sum to 4,294,967,297; the limit is 4,294,967,295"
        in refusal(path)
    )
    for form in (sp.csr_matrix, sp.csc_matrix):  # in the dtype of the file the sum would be 44
        path = make_h5ad(form(np.full((2, 2), 150, np.uint8)))
        with h5py.File(path, "a") as file:
            file["X/indices"][:2] = [1, 1]
        assert read(path).sum() == 600


def test_a_large_file_needs_the_memory_of_one_block(tmp_path: Path) -> None:
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
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    grown_kb = int(done.stdout)
    assert path.stat().st_size > 60e6
    assert grown_kb < 30_000, f"{grown_kb} kB for a file of {path.stat().st_size / 1e6:.0f} MB"


def test_written_cells_open_in_anndata(tmp_path: Path) -> None:
    matrix = sp.random(3000, 200, 0.3, "csr", random_state=1)
    matrix.data = np.arange(matrix.nnz) % 60_000 + 1.0
    obs = pd.DataFrame(
        {"label": pd.Categorical(["a", "b", "a"] * 1000)}, index=[f"c{i}" for i in range(3000)]
    )
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


def spoil(value: float, dtype: type = np.float32) -> np.ndarray:
    matrix = np.ones((3, 3), dtype)
    matrix[1, 2] = value
    return matrix


NO_OTHER = "the file has no other matrix; use a file with raw counts"
ESTIMATED = (
    "is fractional: it looks like estimated counts, as of RSEM, SoupX, CellBender or an EM algorithm; set counts_rule "
    "to stochastic or round, if they are counts"
)
ROUNDED = (
    "is fractional: it looks like counts with rounding errors, as of expm1(log1p(counts)); set counts_rule to "
    "stochastic or round, if they are counts"
)
AT = "(cell 'cell_1', gene 'gene_2')"


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (spoil(-1), f"-1 {AT} is negative: it looks scaled; {NO_OTHER}"),
        (spoil(2.5), f"2.5 {AT} {ESTIMATED}"),
        # a fraction is shown with all its digits
        (spoil(1.0000001), f"1.0000001 {AT} {ROUNDED}"),
        (spoil(1234567.5, np.float64), f"1234567.5 {AT} {ROUNDED}"),
        (
            # of cells that have one sum
            np.log1p([[3, 2, 1], [2, 2, 2], [1, 4, 1]]),
            f"1.38629 (cell 'cell_0', gene 'gene_0') is fractional: it looks log-transformed; {NO_OTHER}",
        ),
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
    assert refusal(path) == f"{path}: X does not hold counts: {text}"


def test_unreadable_files_are_named(tmp_path: Path, make_h5ad: Make, counts: sp.csr_matrix) -> None:
    assert refusal(tmp_path / "none.h5ad") == f"{tmp_path}/none.h5ad: no such file"
    assert refusal(tmp_path).startswith(
        f"{tmp_path}: no known format; there are: FASTA of proteins ("
    )
    for text, problem in {"": "empty: 0 bytes", "cell,gene\n1,2\n": "not an HDF5 file"}.items():
        (tmp_path / "text.h5ad").write_text(text)
        assert refusal(tmp_path / "text.h5ad").startswith(f"{tmp_path}/text.h5ad: {problem}")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = [1]
    assert refusal(tmp_path / "other.h5").startswith(
        f"{tmp_path}/other.h5: no known format; there are: "
    )
    assert refusal(make_h5ad(np.ones((0, 3), np.float32))).endswith("empty: 0 cells x 3 genes")
    assert refusal(make_h5ad(np.ones((3, 0), np.float32))).endswith("empty: 3 cells x 0 genes")
    whole = make_h5ad(counts).read_bytes()
    cut = tmp_path / "cut.h5ad"
    for frac in (0.01, 0.3, 0.6, 0.95, 0.999):
        cut.write_bytes(whole[: int(len(whole) * frac)])
        assert re.search(
            r"cut.h5ad: truncated: [\d,]+ of [\d,]+ bytes; copy it again$", refusal(cut)
        )


def test_cells_with_equal_names_are_kept_apart_by_row(
    make_h5ad: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.arange(15, dtype=np.float32).reshape(5, 3)
    path = make_h5ad(
        values, obs=pd.DataFrame({"kind": list("abcde")}, index=["x", "x", "z", "y", "y"])
    )
    with open_counts(path) as reader:
        assert reader.obs_names.tolist() == ["x:row1", "x:row2", "z", "y:row4", "y:row5"]
        assert reader.obs["kind"].tolist() == list("abcde")
        assert (next(reader.rows()).toarray() == values).all()
    assert capsys.readouterr().err == (
        f"{path}: 4 cells share 2 names ('x' occurs 2 times): they are kept apart by row, as 'x:row1'; no cell is "
        "joined by such a name\n"
    )


def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, simulated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.h5ad"
    out.write_text("the old file")
    words = [
        "preprocess",
        "--input",
        str(simulated),
        "--dataset",
        "full",
        "--options",
        '{"preprocess": {}}',
    ]
    with full_after(200_000):
        assert main([*words, "--report", str(tmp_path / "qc.json"), "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"cellmill preprocess: {out}: File too large\n"
    assert out.read_text() == "the old file"
    assert os.listdir(tmp_path) == ["out.h5ad"]


def test_a_disk_that_fills_at_any_byte_is_one_error(tmp_path: Path, counts: sp.csr_matrix) -> None:
    path = tmp_path / "cells.h5ad"
    var = pd.DataFrame(index=GENES)

    def write(nnz: int | None) -> None:
        write_cells(
            path, OBS, var, (counts[a : a + 50] for a in range(0, 230, 50)), nnz, count_dtype(9)
        )

    for nnz in (counts.nnz, None):
        write(nnz)
        size = path.stat().st_size
        path.unlink()
        for limit in np.linspace(0, size - 1, 60).astype(int).tolist():
            with full_after(limit), pytest.raises(OSError, match="File too large") as error:
                write(nnz)
            assert error.value.filename == str(path)
            assert os.listdir(tmp_path) == []


def test_a_layer_called_x_is_read_as_a_layer(make_h5ad: Make, counts: sp.csr_matrix) -> None:
    data = ad.AnnData(np.log1p(counts), layers={"X": counts})
    path = make_h5ad(data.X, layers=data.layers)
    assert (read(path, "layers/X") != counts).nnz == 0
    assert "raw counts may be in layers/X: set the dataset's `counts`" in refusal(path)
    with declared_names(path) as names:
        assert names is not None
        assert names.counts == ["X", "layers/X"]
    with CountsReader(open_memory(data, "layers/X", "d")) as reader:
        assert (next(reader.rows()) != counts).nnz == 0
    with (
        CountsReader(open_memory(data, "X", "d")) as reader,
        pytest.raises(DataError, match="is fractional"),
    ):
        next(reader.rows())


def a_file(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("X", data=np.zeros(4)).attrs["encoding-type"] = "csr_matrix"
    return path


def test_a_walk_has_more_time_for_further_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """scirpy writes a dataset for each of 30,000 clonotypes; links to what was seen are no progress."""
    monkeypatch.setattr(h5_walk, "_RENEWED", 10)
    path = tmp_path / "a.h5ad"
    with h5py.File(path, "w") as file:
        for number in range(35):
            group = file.create_group(f"uns/clone_id/{number:02d}")
        for number in range(100):
            group[f"link_{number}"] = file["uns"]
    renewed: list[None] = []
    h5_walk._walk(os.fsencode(path), lambda: renewed.append(None))
    assert len(renewed) == 3


@pytest.mark.parametrize("kind", ["csr", "dense"])
def test_empty_cells_at_the_start_hide_no_counts(kind: str, tmp_path: Path) -> None:
    """As bins in a corner of a slide are."""
    dense = np.zeros((400, 3), np.float32)
    dense[250:] = 2.5
    counts = dense.copy()
    counts[250:] = 7
    made = ad.AnnData(dense, layers={"counts": counts})
    if kind == "csr":
        made = ad.AnnData(sp.csr_matrix(dense), layers={"counts": sp.csr_matrix(counts)})
    made.write_h5ad(tmp_path / "a.h5ad")
    with open_counts(tmp_path / "a.h5ad") as reader:
        assert reader.find_counts() == "counts"
    with open_counts(tmp_path / "a.h5ad", "counts") as reader:
        assert reader.find_counts() == "counts"


def walker(folder: Path) -> Path:
    """A stand-in for the interpreter, whose walk of `slow.h5ad` burns CPU time, and whose walk of
    `dead.h5ad` is killed, as HDF5 was seen to do on damaged files.
    """
    script = folder / "python"
    code = """
        import os, signal, sys
        import h5py
        from cellmill.data.inputs import h5_walk
        sys.argv = ["h5_walk", sys.argv[-1]]
        open_file = h5py.File
        def open_slowly(path, mode):
            while path.endswith(b"slow.h5ad"):
                pass
            if path.endswith(b"dead.h5ad"):
                os.kill(os.getpid(), signal.SIGABRT)
            return open_file(path, mode)
        h5py.File = open_slowly
        h5_walk.main()
    """
    script.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
    script.chmod(0o755)
    return script


def test_an_endless_walk_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = a_file(tmp_path / "a.h5ad")
    slow = a_file(tmp_path / "slow.h5ad")
    text = tmp_path / "text.h5ad"
    monkeypatch.setattr(h5_walk.sys, "executable", str(walker(tmp_path)))
    message = re.escape(
        f"{slow}: damaged: HDF5 came to no further objects within 1 s of CPU time; copy it again"
    )
    with pytest.raises(DataError, match=f"^{message}"):
        h5_walk.check_walk([whole, slow], limit_s=1)
    monkeypatch.setattr(h5_walk.check_walk, "__defaults__", (1,))
    with pytest.raises(DataError, match="damaged: HDF5 came to no further objects"):
        open_dataset(slow)
    dead = a_file(tmp_path / "dead.h5ad")
    with pytest.raises(
        DataError, match=re.escape(f"{dead}: damaged: HDF5 crashes on it (SIGABRT); copy it again")
    ):
        h5_walk.check_walk([whole, dead])
    monkeypatch.chdir(tmp_path)
    with (
        limited(),
        pytest.raises(DataError, match=r"^slow\.h5ad: damaged: HDF5 came to no further objects"),
    ):
        check_datasets(load_config(write_config(Path(), one={"path": "slow.h5ad"})))
    h5_walk.check_walk([whole])
    monkeypatch.setattr(h5_walk.sys, "executable", "/no such interpreter")
    text.write_text("no HDF5")
    h5_walk.check_walk([whole, tmp_path / "absent.h5ad", tmp_path, text])


def test_counts_beyond_16_bits_are_written_in_32(tmp_path: Path) -> None:
    assert (count_dtype(65_535), count_dtype(65_536)) == (np.uint16, np.uint32)
    obs = pd.DataFrame(index=["c"])
    var = pd.DataFrame(index=["g", "h"])
    matrix = sp.csr_matrix(np.array([[70_000, 1]], np.uint32))
    write_cells(tmp_path / "wide.h5ad", obs, var, [matrix], 2, count_dtype(70_000))
    assert ad.read_h5ad(tmp_path / "wide.h5ad").X.toarray().tolist() == [[70_000, 1]]
    with pytest.raises(AssertionError, match="too large for uint16"):
        write_cells(tmp_path / "cut.h5ad", obs, var, [matrix], 2, count_dtype(1))
    assert os.listdir(tmp_path) == ["wide.h5ad"]
    block = sp.csr_matrix(np.array([[2**32 - 1, 1]], np.uint32))
    one_gene = np.zeros(2, np.int32)
    with pytest.raises(
        DataError, match="columns of one gene sum to 4,294,967,296; the limit is 4,294,967,295"
    ):
        select_columns(block, one_gene, 1)
    block.data[0] -= 1
    assert select_columns(block, one_gene, 1).toarray().tolist() == [[2**32 - 1]]
