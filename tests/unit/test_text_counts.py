"""Text tables of counts as people deposit them: every value equals a truth, or one line says what
is expected.
"""

import gzip
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.text import layout
from tests.unit.test_inputs import refusal
from tests.unit.test_matrix_market import CELLS, GENES, SYMBOLS, TRUTH, Counts, read

Table = list[list[str]]
NAMED_BY_SYMBOL = ["ACTB", "GAPDH", "MALAT1", *SYMBOLS[3:]]


def genes_in_rows(names: list[str] = GENES) -> Table:
    rows = [
        [name, *(str(TRUTH.get((cell, gene), 0)) for cell in CELLS)]
        for name, gene in zip(names, GENES)
    ]
    return [["", *CELLS], *rows]


def cells_in_rows(names: list[str] = GENES) -> Table:
    return [list(column) for column in zip(*genes_in_rows(names))]


def joined(table: Table, separator: str) -> str:
    return "".join(separator.join(row) + "\n" for row in table)


def write_table(separator: str, table: Table) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / ("table.tsv" if separator == "\t" else "table.csv")
        path.write_text(joined(table, separator))
        return path

    return write


def quoted(folder: Path) -> Path:
    """As R's write.table writes a matrix: quotes, spaces, and a header without the column of names."""
    header, *rows = genes_in_rows()
    lines = [" ".join(f'"{name}"' for name in header[1:])]
    lines += [" ".join([f'"{row[0]}"', *row[1:]]) for row in rows]
    (folder / "counts.txt").write_text("\n".join(lines))
    return folder / "counts.txt"


def excel(folder: Path) -> Path:
    text = joined(genes_in_rows(), ";").replace("\n", "\r\n")
    (folder / "table.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    return folder / "table.csv"


def packed(folder: Path) -> Path:
    path = folder / "GSM1_counts.tsv.gz"
    path.write_bytes(gzip.compress(joined(genes_in_rows(), "\t").encode()))
    return path


def feature_counts(folder: Path) -> Path:
    """With a line of the program, and six columns of which two have numbers only."""
    header, *rows = genes_in_rows()
    six = [["Geneid", "Chr", "Start", "End", "Strand", "Length"]]
    six += [[gene, "1;1", "100;200", "150;250", "+;+", "102"] for gene in GENES]
    table = [left + row[1:] for left, row in zip(six, [header, *rows])]
    (folder / "counts.txt").write_text(
        "# Program:featureCounts v2.0.3; Command:...\n" + joined(table, "\t")
    )
    return folder / "counts.txt"


def umi_tools(folder: Path) -> Path:
    lines = [f"{gene}\t{cell}\t{value}" for (cell, gene), value in TRUTH.items()]
    random.Random(0).shuffle(lines)
    path = folder / "counts.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(["gene\tcell\tcount", *lines, ""]).encode()))
    return path


def two_names(folder: Path) -> Path:
    header, *rows = genes_in_rows()
    table = [["gene_id", "gene_name", *header[1:]]]
    table += [[row[0], symbol, *row[1:]] for row, symbol in zip(rows, SYMBOLS)]
    return write_table("\t", table)(folder)


TABLES: dict[str, Callable[[Path], Path]] = {
    "genes in rows": write_table("\t", genes_in_rows()),
    "genes in rows, commas": write_table(",", genes_in_rows()),
    "cells in rows": write_table(",", cells_in_rows()),
    "cells in rows, tabs": write_table("\t", cells_in_rows()),
    "quotes of R": quoted,
    "semicolons of Excel": excel,
    "gzip": packed,
    "featureCounts": feature_counts,
    "umi_tools": umi_tools,
    "id and symbol": two_names,
}


@pytest.mark.parametrize("values", [1 << 20, 30])
@pytest.mark.parametrize("name", TABLES)
def test_every_text_table_has_the_counts_of_the_truth(
    name: str, values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_VALUES", values)
    assert read(TABLES[name](tmp_path)) == TRUTH


@pytest.mark.parametrize("rows", ["genes", "cells"])
def test_tables_of_symbols_are_turned_by_common_genes(rows: str, tmp_path: Path) -> None:
    table = genes_in_rows(NAMED_BY_SYMBOL) if rows == "genes" else cells_in_rows(NAMED_BY_SYMBOL)
    symbol_of = dict(zip(GENES, NAMED_BY_SYMBOL))
    wanted: Counts = {(cell, symbol_of[gene]): value for (cell, gene), value in TRUTH.items()}
    assert read(write_table(",", table)(tmp_path)) == wanted


@pytest.mark.parametrize("form", ["{} {}", "{} ({})", "{}/{}", "{}-{}"])
def test_symbols_with_an_id_are_genes_in_columns(form: str, tmp_path: Path) -> None:
    names = [form.format(symbol, gene) for symbol, gene in zip(SYMBOLS, GENES)]
    header, *rows = cells_in_rows(names)
    table = [header, *([f"cell{number}", *row[1:]] for number, row in enumerate(rows))]
    with open_counts(write_table(",", table)(tmp_path)) as reader:
        assert reader.var_names == names


@pytest.mark.parametrize("gene", ["GC", "Gc", "END"])
def test_a_gene_spelled_as_a_description_has_its_counts(gene: str, tmp_path: Path) -> None:
    """GC is the vitamin D binding protein, and a column of the share of G and C beside genes in rows."""
    names = [*NAMED_BY_SYMBOL[:5], gene, *NAMED_BY_SYMBOL[6:]]
    table = cells_in_rows(names)
    symbol_of = dict(zip(GENES, names))
    wanted: Counts = {(cell, symbol_of[name]): value for (cell, name), value in TRUTH.items()}
    with_depth = [[*row, "n_counts" if row is table[0] else "99"] for row in table]
    path = write_table(",", with_depth)(tmp_path)
    assert read(path) == wanted
    with open_counts(path) as reader:
        assert reader.obs_columns == ["n_counts"]
    header, *rows = genes_in_rows(NAMED_BY_SYMBOL)
    described = [[row[0], "0.41", *row[1:]] for row in rows]
    path = write_table(",", [[header[0], gene, *header[1:]], *described])(tmp_path)
    with open_counts(path) as reader:
        assert reader.obs_names.tolist() == CELLS
        assert reader.var[gene].tolist() == ["0.41"] * len(GENES)


@pytest.mark.parametrize("digits", [11, 19, 39])
def test_rows_named_by_long_numbers_are_cells(digits: int, tmp_path: Path) -> None:
    names = [str(10 ** (digits - 1) + number) for number in range(len(CELLS))]
    header, *rows = cells_in_rows(SYMBOLS)
    table = [["", *header[1:]], *([name, *row[1:]] for name, row in zip(names, rows))]
    path = write_table(",", table)(tmp_path)
    symbols = dict(zip(GENES, SYMBOLS))
    cells = dict(zip(CELLS, names))
    assert read(path) == {(cells[c], symbols[g]): count for (c, g), count in TRUTH.items()}


@pytest.mark.parametrize("form", ["cell_{}", "Cell {}", "spot.{}"])
def test_numbered_cells_of_a_panel_are_cells(form: str, tmp_path: Path) -> None:
    """Symbols of a panel are rarely among the common ones."""
    header, *rows = cells_in_rows(SYMBOLS)
    rows = [[form.format(number), *row[1:]] for number, row in enumerate(rows)]
    with open_counts(write_table(",", [header, *rows])(tmp_path)) as reader:
        assert reader.obs_names.tolist() == [row[0] for row in rows]
        assert [*reader.var_names] == SYMBOLS


def test_a_table_that_does_not_show_its_cells_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *rows = cells_in_rows(SYMBOLS)
    rows = [[f"s{number}x", *row[1:]] for number, row in enumerate(rows)]
    path = write_table(",", [header, *rows])(tmp_path)
    with open_counts(path) as reader:
        assert reader.obs_names.tolist() == SYMBOLS
    note = "genes are in rows, cells in columns; if it is the other way round, name the first column cell"
    assert capsys.readouterr().err == f"{path}: {note}\n"
    with open_counts(write_table(",", [["cell", *header[1:]], *rows])(tmp_path)) as reader:
        assert [*reader.var_names] == SYMBOLS


@pytest.mark.parametrize("start", [0, 1])
def test_rows_with_numbers_only_are_cells(start: int, tmp_path: Path) -> None:
    """Cells without names, and genes of a panel that none of the common ones is in."""
    header, *rows = cells_in_rows(SYMBOLS)
    numbered = [[str(number), *row[1:]] for number, row in enumerate(rows, start)]
    name_of = dict(zip(CELLS, map(str, range(start, start + len(CELLS)))))
    symbol_of = dict(zip(GENES, SYMBOLS))
    wanted: Counts = {(name_of[cell], symbol_of[gene]): n for (cell, gene), n in TRUTH.items()}
    assert read(write_table(",", [header, *numbered])(tmp_path)) == wanted
    # the genes of numbered rows are in a column of text
    table = [
        [str(number), *row] for number, row in enumerate(genes_in_rows(NAMED_BY_SYMBOL), start - 1)
    ]
    table[0][:2] = ["", "gene"]
    with open_counts(write_table(",", table)(tmp_path)) as reader:
        assert reader.var["gene"].tolist() == NAMED_BY_SYMBOL
        assert reader.obs_names.tolist() == CELLS


def test_cells_of_cosmx_keep_their_field_of_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *rows = cells_in_rows(SYMBOLS)
    table = [["fov", "cell_ID", *header[1:]]]
    table += [[str(1 + n // 5), str(n % 5), *row[1:]] for n, row in enumerate(rows)]
    with open_counts(write_table(",", table)(tmp_path)) as reader:
        assert reader.var_names == SYMBOLS
        assert reader.obs["fov"].tolist() == ["1"] * 5 + ["2"] * 4
        assert reader.obs["cell_ID"].tolist() == [str(n % 5) for n in range(9)]
        outside = '2 rows are what lies outside of cells: set filter to cell_ID != "0"'
        assert outside in capsys.readouterr().err
        assert sum(int(block.sum()) for block in reader.rows(4)) == sum(TRUTH.values())


@pytest.mark.parametrize(("encoding", "byte"), [("utf-16", "0xff"), ("latin-1", "0xe8")])
def test_text_in_another_encoding_is_refused(encoding: str, byte: str, tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    table = [["G\xe8ne", *CELLS], *genes_in_rows()[1:]]
    path.write_bytes(joined(table, "\t").encode(encoding))
    assert refusal(path) == f"{path}: expected UTF-8 text, got byte {byte}; save the file as UTF-8"


def test_decimal_commas_are_no_separators(tmp_path: Path) -> None:
    header, *rows = genes_in_rows()
    table = [header, *([row[0], *(f"{value},0" for value in row[1:])] for row in rows)]
    path = write_table(";", table)(tmp_path)
    assert refusal(path).startswith(f"{path}: expected columns of counts after the names of rows")


def test_the_chosen_orientation_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = feature_counts(tmp_path)
    read(path)
    said = "not counts but descriptions of rows: Chr, Start, End, Strand, Length"
    assert capsys.readouterr().err == f"{path}: genes are in rows, cells in columns; {said}\n"
    read(write_table(",", cells_in_rows())(tmp_path))
    assert "cells are in rows, genes in columns\n" in capsys.readouterr().err


def test_reads_without_a_gene_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "counts.tsv"
    path.write_text("gene\tcell\tcount\n-\tAAAC\t5\nENSG00000000001\tAAAC\t1\n")
    assert read(path) == {("AAAC", "-"): 5, ("AAAC", "ENSG00000000001"): 1}
    assert "gene '-' has the reads that STARsolo gave to no gene" in capsys.readouterr().err


# more than the layout is found by
MANY_ROWS = "".join(f"gene{number},1,2\n" for number in range(30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header and rows of counts, got 0 lines"),
        ("a,b\n", "expected a header and rows of counts, got 1 lines"),
        ("one\ntwo\nthree\n", "expected columns separated by tabs, commas or semicolons"),
        ("g,c1,c2\nACTB,x,y\nGAPDH,z,w\n", "expected columns of counts after the names of rows"),
        (
            "#gene,c1,c2\nACTB,1,2\nGAPDH,3,4\n",
            "got numbers in the first line; add one, or remove the # before it",
        ),
        (
            "ACTB,1,2\nGAPDH,3,4\n",
            "expected a header with names, got numbers in the first line; add one, or remove the # before it",
        ),
        (
            "g,c1,c2,c3,c4\nACTB,1,2\nGAPDH,3,4\n",
            "expected a header with as many columns as the rows, got 5 and 3",
        ),
        ("g,c1,c2\nACTB,1,2.5\nGAPDH,3,4\n", "2.5 (cell 'c2', gene 'ACTB') is fractional"),
        ("g,c1,c2\nACTB,1,-2\nGAPDH,3,4\n", "-2 (cell 'c2', gene 'ACTB') is negative"),
        ("g,c1,c2\nACTB,1,NA\nGAPDH,3,4\n", "nan (cell 'c2', gene 'ACTB') is not finite"),
        ("g,c1,c2\n" + MANY_ROWS + "GAPDH,3,many\n", "damaged: "),
        (
            "g,c1,c2\nACTB,1,2\nGAPDH,3,4\nB2M,5,x\n",
            "expected counts in column 'c2', got 'x' in row 'B2M'",
        ),
        ("g,c1,c2\n" + MANY_ROWS + "GAPDH,3,4,5\n", "damaged: "),
    ],
)
def test_a_table_without_counts_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    assert message in refusal(path)


def test_a_wide_table_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    n_cells = 2500
    n_genes = 5000
    row = ",".join(str(int(number % 20 == 0)) for number in range(n_cells))
    with open(path, "w") as file:
        file.write("," + ",".join(f"cell{number}" for number in range(n_cells)) + "\n")
        for number in range(n_genes):
            file.write(f"ENSG{number:011d},{row}\n")
    script = """
        import resource, sys
        from cellmill.data.inputs.formats import open_counts
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open_counts(sys.argv[1]) as reader:
            print(sum(int(block.sum()) for block in reader.rows(500)))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    words = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    total, grown_kb = map(int, done.stdout.split())
    assert total == n_genes * len(range(0, n_cells, 20))
    assert grown_kb < 70_000, f"{grown_kb} kB for a table that is 100 MB in 64 bits"
