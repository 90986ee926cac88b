"""Cells read from text are written as files that anndata opens, with the counts of the truth."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse as sp

from cellmill import open_cells
from cellmill.config.corpus import Preprocess
from cellmill.data.genes.tables import gene_table
from cellmill.data.inputs.formats import open_counts
from cellmill.data.prepare.preprocess import preprocess_cells
from cellmill.errors import DataError

N_CELLS = 30
N_GENES = 40
BARCODES = [
    f"{''.join('ACGT'[int(digit)] for digit in np.base_repr(4**9 + 7919 * i, 4))}-1"
    for i in range(N_CELLS)
]
"""Twelve and more letters, as of 10x."""


def truth() -> pd.DataFrame:
    """Counts of cells x genes, named by symbol."""
    symbols = [symbol for symbol in gene_table("human").symbols.values() if symbol.isalpha()][
        :N_GENES
    ]
    counts = np.random.default_rng(5).poisson(3.0, (N_CELLS, N_GENES))
    return pd.DataFrame(counts, index=BARCODES, columns=symbols)


def write_folder(folder: Path, barcodes_header: bool = False, **tables: pd.DataFrame) -> Path:
    """Matrix Market, genes in rows, with names as 10x writes them and further `tables`, as
    NAME.csv.
    """
    counts = truth()
    folder.mkdir()
    scipy.io.mmwrite(folder / "matrix.mtx", sp.csr_matrix(counts.to_numpy().T))
    ids = {symbol: gene for gene, symbol in gene_table("human").symbols.items()}
    lines = [f"{ids[symbol]}\t{symbol}\tGene Expression\n" for symbol in counts.columns]
    (folder / "features.tsv").write_text("".join(lines))
    header = "barcode\n" if barcodes_header else ""
    (folder / "barcodes.tsv").write_text(header + "".join(f"{name}\n" for name in counts.index))
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv")
    return folder


def write_table(table: pd.DataFrame, path: Path, **options: object) -> Path:
    table.to_csv(path, **options)
    return path


def with_text(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(cell_type=["B", "T"] * (N_CELLS // 2))


def written(path: Path, folder: Path) -> pd.DataFrame:
    """Counts that preprocess writes, as anndata reads them; genes by symbol."""
    out = folder / "out.h5ad"
    options = Preprocess(min_genes=1, min_cells=1, max_mito_frac=1.0)
    with open_counts(path) as reader:
        preprocess_cells(reader, options, out)
    cells = open_cells(out)
    return pd.DataFrame(
        cells.X.toarray(), index=cells.obs_names, columns=cells.var["symbol"].tolist()
    )


WRITERS: dict[str, Callable[[Path], Path]] = {
    "barcodes without a header": lambda folder: write_folder(folder / "mtx"),
    "barcodes with a header": lambda folder: write_folder(folder / "mtx", barcodes_header=True),
    "cells in rows": lambda folder: write_table(truth(), folder / "counts.csv"),
    "cells in rows, tabs": lambda folder: write_table(truth(), folder / "counts.tsv.gz", sep="\t"),
    "cells in rows, a column of text": lambda folder: write_table(
        with_text(truth()), folder / "counts.csv"
    ),
    "genes in rows": lambda folder: write_table(truth().T, folder / "counts.csv"),
    "genes in rows, names last": lambda folder: write_table(
        truth().T.assign(gene=truth().columns), folder / "counts.csv", index=False
    ),
    "cells in rows, names last": lambda folder: write_table(
        truth().assign(barcode=BARCODES), folder / "counts.csv", index=False
    ),
    "cells in rows, numbered": lambda folder: write_table(
        truth()
        .rename(columns="{}|NM_000000.1|PolyA_1".format)
        .reset_index(drop=True)
        .rename_axis("Cell_Index"),
        folder / "counts.csv",
    ),
    "genes in rows, totals": lambda folder: write_table(
        truth().T.assign(n_cells=3, total=truth().sum().to_numpy()), folder / "counts.csv"
    ),
    "commas at the end of lines": lambda folder: write_table(
        truth().T.assign(**{"": ""}), folder / "counts.csv"
    ),
    "gzip by content": lambda folder: write_table(
        truth().T, folder / "counts.csv", compression="gzip"
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_preprocessed_text_has_the_counts_of_the_truth(tmp_path: Path, kind: str) -> None:
    expected = truth()
    counts = written(WRITERS[kind](tmp_path), tmp_path)
    assert set(counts.columns) == set(expected.columns)
    if "numbered" not in kind:
        assert counts.index.tolist() == expected.index.tolist()
    assert (counts[expected.columns].to_numpy() == expected.to_numpy()).all()


def long_table() -> pd.DataFrame:
    """A line for each count above zero."""
    long = (
        truth().rename_axis("cell").reset_index().melt("cell", var_name="gene", value_name="count")
    )
    return long[long["count"] > 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda long: long,
        lambda long: long.assign(sample="s1"),
        lambda long: long.assign(gene_id=long["gene"].str.lower()).reset_index(),
        lambda long: long.rename(
            columns={"cell": "CellID", "gene": "geneID", "count": "MIDCount"}
        ).assign(x=1, y=2),
        lambda long: long.rename(columns={"count": "x"}).reset_index(names=""),
    ],
    ids=["three columns", "a column more", "row numbers and a second name", "Stereo-seq", "R"],
)
def test_a_table_with_a_count_a_line_is_read(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame]
) -> None:
    path = write_table(change(long_table()), tmp_path / "long.csv", index=False)
    expected = truth()
    counts = written(path, tmp_path)
    assert (counts.loc[expected.index, expected.columns].to_numpy() == expected.to_numpy()).all()


def refusal(path: Path, folder: Path) -> str:
    with pytest.raises(DataError) as error:
        written(path, folder)
    return str(error.value).removeprefix(f"{path}: ")


def test_a_long_table_without_a_header_is_refused(tmp_path: Path) -> None:
    path = write_table(long_table(), tmp_path / "long.csv", index=False, header=False)
    assert refusal(path, tmp_path).startswith("expected a header with names, got ")


def test_a_long_table_with_two_counts_is_refused(tmp_path: Path) -> None:
    long = long_table().assign(reads=7)
    path = write_table(long.rename(columns={"count": "umis"}), tmp_path / "long.csv", index=False)
    assert refusal(path, tmp_path) == (
        "it has a line for each gene in each cell, and 2 columns of counts: umis, reads; keep one of them"
    )


def test_a_number_of_another_name_is_no_count(tmp_path: Path) -> None:
    long = long_table().rename(columns={"count": "quality"})
    path = write_table(long, tmp_path / "long.csv", index=False)
    assert refusal(path, tmp_path).endswith(" named gene, cell and count")


def test_the_summary_of_r_without_names_is_refused(tmp_path: Path) -> None:
    summary = pd.DataFrame({"i": [1, 2, 3], "j": [1, 1, 2], "x": [4, 1, 7]})
    for index in (False, True):
        path = write_table(summary, tmp_path / "long.csv", index=index)
        assert refusal(path, tmp_path) == (
            "expected names of genes and cells, got their numbers, as in R's summary of a sparse matrix; write the "
            "names, in columns called gene, cell and count"
        )


def test_a_line_per_molecule_is_not_read_as_cells(tmp_path: Path) -> None:
    long = long_table().assign(x=1.5, y=2.5)
    path = write_table(long[["gene", "x", "y"]], tmp_path / "long.csv", index=False)
    assert refusal(path, tmp_path).startswith("its 40 names of rows are on ")


@pytest.mark.parametrize("has_numbers", [False, True])
def test_a_long_table_with_other_names_is_refused(has_numbers: bool, tmp_path: Path) -> None:
    # R's melt
    long = long_table().set_axis(["Var1", "Var2", "Freq"], axis=1)
    if has_numbers:
        long = long.reset_index(drop=True).reset_index(names="")
    path = write_table(long, tmp_path / "long.csv", index=False)
    assert "named gene, cell and count" in refusal(path, tmp_path)


@pytest.mark.parametrize("bad", ["-", "1,234", "0x10"])
def test_a_non_numeric_value_is_named(tmp_path: Path, bad: str) -> None:
    table = truth().T.astype(object)
    table.iloc[3, 5] = bad
    path = write_table(table, tmp_path / "counts.csv")
    assert refusal(path, tmp_path) == (
        f"expected counts in column {BARCODES[5]!r}, got {bad!r} in row {table.index[3]!r}"
    )


def test_a_row_of_another_length_is_named(tmp_path: Path) -> None:
    path = write_table(truth().T, tmp_path / "counts.csv")
    lines = path.read_text().splitlines()
    lines[4] = lines[4].rpartition(",")[0]
    path.write_text("\n".join(lines) + "\n")
    assert (
        refusal(path, tmp_path)
        == "expected 31 columns in line 5, as in most lines, got 30; is the file complete?"
    )


def test_names_of_cells_may_be_numbers(tmp_path: Path) -> None:
    table = truth().set_axis([f"{10**17 + number}" for number in range(N_CELLS)], axis=0)
    counts = written(write_table(table.T.rename_axis("gene"), tmp_path / "counts.csv"), tmp_path)
    assert counts.index.tolist() == table.index.tolist()
    assert (counts[table.columns].to_numpy() == table.to_numpy()).all()


def test_cells_without_names_are_numbered(tmp_path: Path) -> None:
    counts = written(write_table(truth(), tmp_path / "counts.csv", index=False), tmp_path)
    assert counts.index.tolist() == [f"row {number}" for number in range(1, N_CELLS + 1)]
    assert (counts[truth().columns].to_numpy() == truth().to_numpy()).all()
