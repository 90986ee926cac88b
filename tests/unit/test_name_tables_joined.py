"""Which of several tables names the cells and genes of a matrix, and what the others add to them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cellmill.data.inputs.fetch import state_of
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.text.companions import files_beside
from tests.unit.test_matrix_market import CELLS, GENES, SYMBOLS, write_mtx, write_names
from tests.unit.test_name_tables import KINDS, SORTED

N = len(CELLS)
SHORT = [f"s1_{cell[:5]}" for cell in CELLS]
CODES = [f"{100 + number}" for number in range(N)]
TOTALS = [f"{1000 + 37 * number}" for number in range(N)]
PLACES = [f"{number}.5" for number in range(N)]
MERGED = ["".join(["ACGTACGT", "AC"[n % 2] * 4, "ACGTA"[n // 2] * 4]) for n in range(N - 1)]
MERGED = [*MERGED, MERGED[0]]  # a barcode that two samples have


def write(
    folder: Path, matrix: str, cells: list[str], name: str, header: str, *columns: list[str]
) -> None:
    write_mtx(folder / matrix)
    write_names(folder / "features.tsv", GENES, SYMBOLS)
    write_names(folder / "barcodes.tsv", cells)
    write_names(folder / name, *columns, separator=",", header=header)


def shuffled(texts: list[str]) -> list[str]:
    return [texts[row] for row in SORTED]


# matrix, names in barcodes.tsv, another table with its header and columns; then columns of obs that it
# gives in the order of the matrix, and whether it is left out
TABLES: dict[str, tuple[str, list[str], str, str, list[list[str]], dict[str, list[str]], bool]] = {
    "repeated barcodes, sorted": (
        "matrix.mtx", CELLS, "metadata.csv", "barcode,kind",
        [shuffled(MERGED), shuffled(KINDS)], {}, True,
    ),
    "the same repeated barcodes, sorted": (
        "matrix.mtx", MERGED, "metadata.csv", "barcode,kind",
        [shuffled(MERGED), shuffled(KINDS)], {}, True,
    ),
    "the same repeated barcodes": (
        "matrix.mtx", MERGED, "metadata.csv", "barcode,kind", [MERGED, KINDS], {"kind": KINDS}, False,
    ),
    "some names again": (
        "matrix.mtx", SHORT, "metadata.csv", "sample,kind",
        [[*SHORT[:4], *SHORT[:5]], KINDS], {}, True,
    ),
    "words of the matrix, numbers": (
        "filtered_counts.mtx", CELLS, "cell_counts.csv", "total,cluster",
        [TOTALS, KINDS], {"total": TOTALS, "cluster": KINDS}, False,
    ),
    "the matrix's last word, fractions": (
        "raw_counts.mtx", CELLS, "tsne_counts_cells.csv", "x,y",
        [PLACES, PLACES[::-1]], {"x": PLACES, "y": PLACES[::-1]}, False,
    ),
    "words of the matrix, short names in another order": (
        "filtered_counts.mtx", SHORT, "cell_counts.csv", "cell,kind",
        [shuffled(SHORT), shuffled(KINDS)], {"kind": KINDS}, False,
    ),
    "the matrix's first word, numbers": (
        "GSM1_matrix.mtx", CELLS, "GSM1_cells.csv", "total,cluster",
        [TOTALS, KINDS], {"total": TOTALS, "cluster": KINDS}, False,
    ),
    "codes": (
        "matrix.mtx", CELLS, "cells.csv", "id,cluster",
        [CODES, KINDS], {"id": CODES, "cluster": KINDS}, False,
    ),
    "exponents, and one without a value": (
        "matrix.mtx", CELLS, "cells.csv", "x",
        [[*(f"{number}e+05" for number in range(N - 1)), "NA"]], {"x": None}, False,
    ),
    "codes of cells with codes": (
        "matrix.mtx", CODES, "cells.csv", "id,cluster", [TOTALS, KINDS], {}, True,
    ),
    "names in the same order": (
        "matrix.mtx", CELLS, "metadata.csv", "cell,kind", [CELLS, KINDS], {"kind": KINDS}, False,
    ),
    "names in another order": (
        "matrix.mtx", CELLS, "metadata.csv", "cell,kind",
        [shuffled(CELLS), shuffled(KINDS)], {"kind": KINDS}, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_a_list_names_cells_and_tables_label_them(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix, cells, name, header, columns, given, is_left_out = TABLES[case]
    write(tmp_path, matrix, cells, name, header, *columns)
    with open_counts(tmp_path) as reader:
        assert [name.partition(":row")[0] for name in reader.obs_names] == cells
        assert sorted(reader.obs) == sorted(given)
        for column, texts in given.items():
            assert texts is None or reader.obs[column].tolist() == texts
    said = f"{name} is left out: it does not have the names of barcodes.tsv"
    assert (said in capsys.readouterr().err) == is_left_out


LABELS = [f"kind{number % 3}" for number in range(N)]
# header and rows of a table; then labels of the cells
OTHER_SIZES: dict[str, tuple[str, list[list[str]], list[str | None]]] = {
    "some": ("barcode,kind", [CELLS[5:1:-1], LABELS[5:1:-1]], [None, None, *LABELS[2:6], *[None] * (N - 6)]),
    "all and others": ("barcode,kind", [[*MERGED[:3], *CELLS], ["x"] * 3 + LABELS], [*LABELS]),
    "a line of types": ("NAME,kind", [["TYPE", *CELLS], ["group", *LABELS]], [*LABELS]),
    "as R writes it": (
        '"","kind"', [[f'"{cell}"' for cell in CELLS[1:]], [f'"{kind}"' for kind in LABELS[1:]]],
        [None, *LABELS[1:]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_SIZES)
def test_a_table_of_other_cells_too_is_joined_by_name(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, columns, labels = OTHER_SIZES[case]
    write(tmp_path, "matrix.mtx", CELLS, "metadata.csv", header, *columns)
    with open_counts(tmp_path) as reader:
        assert reader.obs_names.tolist() == CELLS
        found = reader.obs["kind"].astype(object)
        assert found.where(found.notna(), None).tolist() == labels
    n_known = N - labels.count(None)
    said = f"metadata.csv is joined by name: it has {len(columns[0])} rows, with {n_known} of {N} cells"
    assert said in capsys.readouterr().err


UMIS = [f"{number % 4}" for number in range(N)]
# header of names without barcodes, first columns of the table before the labels
HEADERS: dict[str, tuple[str, list[list[str]]]] = {
    "pandas": (",n,kind", [SHORT, UMIS]),
    "R": ("n,kind", [SHORT, UMIS]),
    "a plate": ("well,n,kind", [SHORT, UMIS]),
    "numbers that are names of other cells": ("n,cell,kind", [[*CODES[1:7], *TOTALS[6:]], CODES]),
}


@pytest.mark.parametrize("case", HEADERS)
def test_some_cells_without_barcodes_get_their_labels(case: str, tmp_path: Path) -> None:
    header, first = HEADERS[case]
    cells = first[header.split(",").index("cell")] if "cell" in header else first[0]
    columns = [texts[:-2] for texts in (*first, LABELS)]
    write(tmp_path, "matrix.mtx", cells, "metadata.csv", header, *columns)
    with open_counts(tmp_path) as reader:
        assert reader.obs["kind"].astype(object).tolist()[:-2] == LABELS[:-2]
        assert reader.obs["kind"].isna().tolist() == [False] * (N - 2) + [True] * 2
        numbers = columns[1 - columns.index(cells[:-2])]
        assert reader.obs["n"].astype(str).tolist()[:-2] == numbers


# header and columns of a table of some cells; then why it is left out
UNCLEAR: dict[str, tuple[str, list[list[str]], str]] = {
    "no header": ("", [SHORT[:-2], LABELS[:-2]], "it has no header that names a column besides the cells"),
    "two orders": ("cell,other", [SHORT[:-2], SHORT[-3::-1]], f"it has {N - 2} rows for {N} cells"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCLEAR)
def test_an_unclear_table_of_some_cells_is_left_out(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, columns, fault = UNCLEAR[case]
    write(tmp_path, "matrix.mtx", SHORT, "metadata.csv", header, *columns)
    if not header:
        write_names(tmp_path / "metadata.csv", *columns, separator=",")
    with open_counts(tmp_path) as reader:
        assert not len(reader.obs.columns)
    assert f"metadata.csv is left out: {fault}\n" in capsys.readouterr().err


def test_a_table_of_cells_elsewhere_is_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "matrix.mtx", CELLS, "metadata.csv", "barcode,kind", MERGED[:5], LABELS[:5])
    with open_counts(tmp_path) as reader:
        assert not len(reader.obs.columns)
    assert f"metadata.csv is left out: it has 5 rows for {N} cells\n" in capsys.readouterr().err


def test_an_axis_without_ids_is_what_the_other_one_is_not(tmp_path: Path) -> None:
    """R's rows are genes, alevin's are cells."""
    plates = [f"P1_A{number:02}" for number in range(N)]
    for number, (genes, cells) in enumerate([(GENES, plates), (SYMBOLS, CELLS)]):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        write_mtx(folder / "matrix.mtx")
        write_names(folder / "rows.txt", genes)
        write_names(folder / "cols.txt", cells)
        with open_counts(folder) as reader:
            assert reader.obs_names.tolist() == cells
            assert list(reader.var_names) == genes


def plain_symbols(folder: Path) -> None:
    """The list has made a repeated symbol unique, and the table has it twice."""
    symbols = [*SYMBOLS[:-1], SYMBOLS[0]]
    write_names(folder / "x_genes.tsv", [*SYMBOLS[:-1], f"{SYMBOLS[0]}-1"])
    write_names(folder / "gene_table.csv", GENES, symbols, separator=",", header="id,name")


def lengths(folder: Path) -> None:
    """Lengths of genes are no names, though one is the number of another gene."""
    numbers = [f"{7 * number + 100}" for number in range(len(GENES))]
    write_names(folder / "x_genes.tsv", numbers)
    columns = (GENES, numbers[::-1][:-1] + numbers[-2:-1])
    write_names(folder / "gene_table.csv", *columns, separator=",", header="id,length")


@pytest.mark.parametrize("write_genes", [plain_symbols, lengths])
def test_a_table_of_genes_with_repeats_is_in_order(
    write_genes: Callable[[Path], None], tmp_path: Path
) -> None:
    write_mtx(tmp_path / "x.mtx")
    write_names(tmp_path / "x_barcodes.tsv", CELLS)
    write_genes(tmp_path)
    with open_counts(tmp_path) as reader:
        assert [*reader.var_names] == GENES


def test_tables_of_many_samples_go_to_their_own(tmp_path: Path) -> None:
    for number in range(12):
        for name in ("matrix.mtx", "features.tsv", "barcodes.tsv"):
            (tmp_path / f"GSM{number}_a{number % 3}_{name}").touch()
    for number in range(12):
        before = f"GSM{number}_a{number % 3}_"
        beside = files_beside(tmp_path / f"{before}matrix.mtx")
        assert {file.name for file in beside} == {f"{before}features.tsv", f"{before}barcodes.tsv"}


def test_outputs_beside_a_matrix_are_no_part_of_it(tmp_path: Path) -> None:
    write(tmp_path, "matrix.mtx", CELLS, "meta.csv", "cell,kind", CELLS, KINDS)
    (tmp_path / "embed.log").touch()
    before = state_of(tmp_path)
    for name in (".emb.h5ad.partial.0.npy", "emb.h5ad", "embed.log"):
        (tmp_path / name).write_text("embedded")
    assert state_of(tmp_path) == before
    write_names(tmp_path / "meta.csv", CELLS, KINDS[::-1], separator=",", header="cell,kind")
    assert state_of(tmp_path) != before
