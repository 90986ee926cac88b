"""Tables beside a matrix give each cell and gene its own name and labels, or one line says which to name.

The truth has the same counts, names and labels in every folder, however its tables are sorted.
"""

import gzip
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from cellmill.data.arrays import text_values
from cellmill.data.inputs.fetch import origin_of, state_of
from cellmill.data.inputs.formats import open_counts
from cellmill.errors import DataError
from tests.unit.test_inputs import refusal
from tests.unit.test_matrix_market import (
    CELLS,
    GENES,
    SYMBOLS,
    TRUTH,
    read,
    write_mtx,
    write_names,
)

KINDS = [f"kind{number % 3}" for number in range(len(CELLS))]
SORTED = sorted(range(len(CELLS)), key=lambda row: (KINDS[row], CELLS[row]))


def write_sorted(path: Path, header: str = "cell,kind", kinds: list[str] = KINDS) -> None:
    """Labels of the cells in an order of their own."""
    cells = [CELLS[row] for row in SORTED]
    write_names(path, cells, [kinds[row] for row in SORTED], separator=",", header=header)


def meta(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_mtx(folder / "matrix.mtx")
        write_names(folder / "features.tsv", GENES, SYMBOLS)
        barcodes = "".join(f"{cell}\n" for cell in CELLS)
        (folder / "barcodes.tsv.gz").write_bytes(gzip.compress(barcodes.encode()))
        write_sorted(folder / name)

    return write


def prefixed(folder: Path) -> None:
    """The table of labels has the name of the matrix, and the list has not."""
    meta("GSM1_cells.csv")(folder)
    (folder / "matrix.mtx").rename(folder / "GSM1_matrix.mtx")


def same_order(folder: Path) -> None:
    """Two tables of cells, and no list."""
    meta("meta.csv")(folder)
    (folder / "barcodes.tsv.gz").unlink()
    write_names(folder / "meta.csv", CELLS, KINDS, separator=",", header="cell,kind")
    write_names(folder / "obs.csv", CELLS, separator=",", header="cell")


def without_names(folder: Path) -> None:
    meta("kinds_of_cells.csv")(folder)
    write_names(folder / "kinds_of_cells.csv", KINDS, header="kind")


def coordinates(folder: Path) -> None:
    """Fractions are no names, though each is there once."""
    meta("cells.csv")(folder)
    places = [f"{number}.25" for number in range(len(CELLS))]
    write_names(folder / "cells.csv", KINDS, places, separator=",", header="kind,x")


LABELLED = {
    **{name: meta(name) for name in ("meta.csv", "cells.csv", "obs.csv", "cell_metadata.csv")},
    "prefix": prefixed,
    "two tables in one order": same_order,
    "no names": without_names,
    "coordinates": coordinates,
}


@pytest.mark.parametrize("name", LABELLED)
def test_every_cell_has_its_own_name_and_labels(name: str, tmp_path: Path) -> None:
    LABELLED[name](tmp_path)
    assert read(tmp_path) == TRUTH
    with open_counts(tmp_path) as reader:
        assert reader.obs_names.tolist() == CELLS
        assert reader.obs["kind"].tolist() == KINDS


def test_a_table_of_genes_in_another_order_is_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta("meta.csv")(tmp_path)
    write_names(
        tmp_path / "var.csv", GENES[::-1], SYMBOLS[::-1], separator=",", header="gene,called"
    )
    assert read(tmp_path) == TRUTH
    said = capsys.readouterr().err
    for table, names in (("var.csv", "features.tsv"), ("meta.csv", "barcodes.tsv.gz")):
        assert f"{table} is joined by name: it has another order than {names}\n" in said
    with open_counts(tmp_path) as reader:
        assert reader.var["called"].tolist() == SYMBOLS


def test_a_list_of_symbols_is_in_the_order_of_the_matrix(tmp_path: Path) -> None:
    """kb-python writes the id of a gene without a symbol."""
    names = [GENES[0], *SYMBOLS[1:]]
    write_mtx(tmp_path / "cells_x_genes.mtx", by_cell=True)
    write_names(tmp_path / "cells_x_genes.barcodes.txt", CELLS)
    write_names(tmp_path / "cells_x_genes.genes.txt", GENES)
    write_names(tmp_path / "cells_x_genes.genes.names.txt", names)
    assert read(tmp_path) == TRUTH
    with open_counts(tmp_path) as reader:
        assert reader.var["symbol"].tolist() == names


def test_labels_of_other_cells_are_left_out_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta("meta.csv")(tmp_path)
    write_names(
        tmp_path / "meta.csv",
        [f"s1_{cell[::-1]}" for cell in CELLS],
        KINDS,
        separator=",",
        header="cell,kind",
    )
    assert read(tmp_path) == TRUTH
    said = "meta.csv is left out: it does not have the names of barcodes.tsv.gz"
    assert said in capsys.readouterr().err


def test_two_tables_in_two_orders_are_refused(tmp_path: Path) -> None:
    same_order(tmp_path)
    write_sorted(tmp_path / "obs.csv")
    assert refusal(tmp_path) == (
        f"{tmp_path}/matrix.mtx: meta.csv and obs.csv both have names for its cells, but not the same ones in one "
        "order; name the table in the order of the matrix barcodes.tsv (or .csv, .gz), or move the other one away"
    )
    (tmp_path / "meta.csv").rename(tmp_path / "barcodes.csv")
    assert read(tmp_path) == TRUTH
    with open_counts(tmp_path) as reader:
        assert reader.obs["kind"].tolist() == KINDS


SAMPLES = {
    "last letter": "{kind}_{sample}",
    "prefix and last letter": "GSE1_{kind}_{sample}",
    "numbers in two orders": "{kind}_{sample}",
    "in the middle": "GSE1_{kind}_{sample}_raw",
}


@pytest.mark.parametrize("layout", SAMPLES)
def test_samples_are_told_apart_by_any_word(layout: str, tmp_path: Path) -> None:
    first, second = ("1_2", "2_1") if "numbers" in layout else ("A", "B")
    genes = [f"ENSG{number:011d}" for number in range(101, 101 + len(GENES))]
    cells = [cell[::-1] for cell in CELLS]
    for sample, rows, columns in ((first, genes, cells), (second, GENES, CELLS)):
        names = {
            kind: tmp_path / SAMPLES[layout].format(kind=kind, sample=sample)
            for kind in ("matrix", "features", "barcodes")
        }
        write_mtx(names["matrix"].with_name(f"{names['matrix'].name}.mtx"))
        write_names(names["features"].with_name(f"{names['features'].name}.tsv"), rows)
        write_names(names["barcodes"].with_name(f"{names['barcodes'].name}.tsv"), columns)
    matrix = tmp_path / f"{SAMPLES[layout].format(kind='matrix', sample=second)}.mtx"
    assert read(matrix) == TRUTH
    barcodes = tmp_path / f"{SAMPLES[layout].format(kind='barcodes', sample=second)}.tsv"
    barcodes.unlink()
    assert "; expected it beside" in refusal(matrix)


def test_a_changed_table_beside_a_matrix_is_noticed(tmp_path: Path) -> None:
    meta("meta.csv")(tmp_path)
    for path in (tmp_path, tmp_path / "matrix.mtx"):
        before = state_of(path), origin_of(path)["sha256"]
        symbols = [f"{symbol}x" for symbol in SYMBOLS]
        write_names(tmp_path / "features.tsv", GENES, symbols)
        assert (state_of(path) != before[0], origin_of(path)["sha256"] != before[1]) == (True, True)
        write_names(tmp_path / "features.tsv", GENES, SYMBOLS)
        assert origin_of(path)["sha256"] == before[1]
    (tmp_path / "matrix.mtx").rename(tmp_path / "GSM1_matrix.mtx")
    first = state_of(tmp_path / "GSM1_matrix.mtx")
    write_mtx(tmp_path / "GSM2_matrix.mtx")
    write_names(tmp_path / "GSM2_features.tsv", GENES)
    (tmp_path / "log.txt").write_text("read")
    assert state_of(tmp_path / "GSM1_matrix.mtx") == first


def test_equal_lists_of_other_cells_are_refused(tmp_path: Path) -> None:
    write_mtx(tmp_path / "matrix.mtx")
    write_names(tmp_path / "features.tsv", GENES)
    write_names(tmp_path / "barcodes_A.tsv", CELLS)
    write_names(tmp_path / "barcodes_B.tsv", [cell[::-1] for cell in CELLS])
    assert "barcodes_A.tsv and barcodes_B.tsv both have names for its cells" in refusal(tmp_path)
    (tmp_path / "barcodes_A.tsv").rename(tmp_path / "barcodes.tsv")
    assert read(tmp_path) == TRUTH


@pytest.mark.parametrize("header", [None, "gene_id"])
def test_a_transgene_before_ids_is_no_header(header: str | None, tmp_path: Path) -> None:
    write_mtx(tmp_path / "matrix.mtx")
    names = ["EGFP", *GENES[1:]]
    write_names(tmp_path / "features.tsv", names, header=header)
    write_names(tmp_path / "barcodes.tsv", CELLS)
    with open_counts(tmp_path) as reader:
        assert reader.var_names == names
    write_names(tmp_path / "features.tsv", GENES[1:], header="gene_id")
    assert "features.tsv has 1 fewer" in refusal(tmp_path)


def test_any_words_above_names_with_digits_are_a_header(tmp_path: Path) -> None:
    write_mtx(tmp_path / "matrix.mtx")
    write_names(tmp_path / "features.tsv", GENES)
    wells = [f"P{number % 2}_A{number:02d}" for number in range(len(CELLS))]
    write_names(tmp_path / "metadata.csv", wells, KINDS, separator=",", header="well,cluster")
    with open_counts(tmp_path) as reader:
        assert reader.obs_names.tolist() == wells
        assert reader.obs["cluster"].tolist() == KINDS
    write_names(tmp_path / "metadata.csv", ["P9_A99", *wells])
    assert "metadata.csv has 1 more" in refusal(tmp_path)


@pytest.mark.parametrize("header", [None, "barcode|sample"])
def test_a_bar_divides_columns_below_a_header_only(header: str | None, tmp_path: Path) -> None:
    write_mtx(tmp_path / "matrix.mtx")
    write_names(tmp_path / "features.tsv", GENES)
    write_names(tmp_path / "barcodes.tsv", CELLS, KINDS, separator="|", header=header)
    with open_counts(tmp_path) as reader:
        if header:
            assert reader.obs_names.tolist() == CELLS
            assert reader.obs["sample"].tolist() == KINDS
        else:
            assert reader.obs_names.tolist() == list(map("|".join, zip(CELLS, KINDS)))


def test_na_and_empty_texts_of_cells_are_missing_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    donors = ["D1", "NA", "", "D2", "nan", "None", "D1", "D2", "NA"]
    wanted = ["" if donor in ("NA", "nan") else donor for donor in donors]
    write_mtx(tmp_path / "matrix.mtx")
    write_names(tmp_path / "features.tsv", GENES)
    write_names(tmp_path / "metadata.csv", CELLS, donors, separator=",", header="cell,donor")
    header = ["cell", "donor", *GENES]
    rows = [[cell, donor, *["1"] * len(GENES)] for cell, donor in zip(CELLS, donors)]
    table = tmp_path / "table.csv"
    table.write_text("".join(",".join(row) + "\n" for row in [header, *rows]))
    loom = tmp_path / "a.loom"
    with h5py.File(loom, "w") as file:
        file["matrix"] = np.ones((len(GENES), len(CELLS)), np.int32)
        file["row_attrs/Gene"] = np.array(GENES, object)
        file["col_attrs/CellID"] = np.array(CELLS, object)
        file["col_attrs/donor"] = np.array(donors, object)
    for path in (tmp_path / "matrix.mtx", table, loom):
        with open_counts(path) as reader:
            assert text_values(reader.obs["donor"]).tolist() == wanted
            with pytest.raises(DataError, match="4 cells have no 'donor'"):
                reader.split_values("donor")
        said = "texts of obs that are read as missing values (NA, nan or empty): donor 4\n"
        assert capsys.readouterr().err.endswith(said)
