"""Matrix Market as other programs write it: each layout gives the counts of a truth, or a line that
says what to do.
"""

import gzip
import io
import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellmill.data.inputs import matrices
from cellmill.data.inputs.formats import open_counts
from cellmill.data.inputs.text import lines
from tests.unit.test_inputs import refusal

DRAW = random.Random(0)
GENES = [f"ENSG{number:011d}" for number in range(1, 14)]
SYMBOLS = [f"SYM{number}" for number in range(1, 14)]
CELLS = ["".join(DRAW.choices("ACGT", k=16)) for _ in range(9)]
Counts = dict[tuple[str, str], int]
TRUTH: Counts = {
    (cell, gene): DRAW.randint(1, 9)
    for cell, gene in product(CELLS, GENES)
    if DRAW.random() < 0.5 or gene == GENES[0]
}


def write_mtx(
    path: Path,
    counts: Counts = TRUTH,
    by_cell: bool = False,
    genes: list[str] | None = None,
    field: str = "integer",
) -> None:
    """Coordinates in order of genes if cells are in columns, and the other way round."""
    genes = genes or GENES
    cells = CELLS
    rows, columns = (cells, genes) if by_cell else (genes, cells)
    with open(path, "w") as file:
        file.write(
            f"%%MatrixMarket matrix coordinate {field} general\n%\n{len(rows)} {len(columns)} {len(counts)}\n"
        )
        for i, row in enumerate(rows, 1):
            for j, column in enumerate(columns, 1):
                key = (row, column) if by_cell else (column, row)
                if key in counts:
                    file.write(f"{i} {j} {counts[key]}\n")


def write_names(
    path: Path, *columns: list[str], separator: str = "\t", header: str | None = None
) -> None:
    body = [separator.join(row) for row in zip(*columns)]
    path.write_text("\n".join([*([header] if header is not None else []), *body]) + "\n")


def read(path: Path, counts: str = "X") -> Counts:
    """Counts by cell and gene, one entry at a time."""
    found: Counts = {}
    with open_counts(path, counts) as reader:
        first = 0
        for block in reader.rows(4):
            dense = block.toarray()
            for row in range(dense.shape[0]):
                for column, gene in enumerate(reader.var_names):
                    if dense[row, column]:
                        cell = reader.obs_names[first + row]
                        found[cell, gene] = int(dense[row, column])
            first += dense.shape[0]
    return found


def kb(folder: Path) -> None:
    write_mtx(folder / "cells_x_genes.mtx", by_cell=True, field="real")
    write_names(folder / "cells_x_genes.barcodes.txt", CELLS)
    write_names(folder / "cells_x_genes.genes.txt", GENES)
    write_names(folder / "cells_x_genes.genes.names.txt", SYMBOLS)


def parse(folder: Path) -> None:
    write_mtx(folder / "count_matrix.mtx", by_cell=True)
    names = ["" if number % 3 else symbol for number, symbol in enumerate(SYMBOLS)]
    genomes = ["hg38"] * len(GENES)
    write_names(
        folder / "all_genes.csv",
        GENES,
        names,
        genomes,
        separator=",",
        header="gene_id,gene_name,genome",
    )
    samples = ["s1"] * len(CELLS)
    write_names(
        folder / "cell_metadata.csv", CELLS, samples, separator=",", header="bc_wells,sample"
    )


def alevin(folder: Path) -> None:
    write_mtx(folder / "quants_mat.mtx", by_cell=True)
    (folder / "quants_mat.mtx.gz").write_bytes(
        gzip.compress((folder / "quants_mat.mtx").read_bytes())
    )
    (folder / "quants_mat.mtx").unlink()
    write_names(folder / "quants_mat_rows.txt", CELLS)
    write_names(folder / "quants_mat_cols.txt", GENES)
    numbers = [str(number) for number in range(len(CELLS))]
    write_names(folder / "featureDump.txt", CELLS, numbers, header="CB\tCorrectedReads")


def star(folder: Path) -> None:
    write_mtx(folder / "matrix.mtx")
    fractions = {key: value + 0.25 for key, value in TRUTH.items()}
    write_mtx(folder / "UniqueAndMult-EM.mtx", fractions, field="float")
    write_names(folder / "features.tsv", GENES, SYMBOLS, ["Gene Expression"] * 13)
    write_names(folder / "barcodes.tsv", CELLS)


def expression_atlas(folder: Path) -> None:
    """Rows are genes, though rows of alevin are cells."""
    matrix = "E-MTAB-1.aggregated_filtered_counts.mtx"
    write_mtx(folder / matrix)
    write_names(folder / f"{matrix}_rows", GENES, GENES)
    write_names(folder / f"{matrix}_cols", CELLS)


def rows_of_r(folder: Path) -> None:
    """Names of rows and columns, as R calls them, whose rows are genes."""
    write_mtx(folder / "matrix.mtx")
    write_names(folder / "rows.txt", GENES)
    write_names(folder / "cols.txt", CELLS)


def bcbio(folder: Path) -> None:
    write_mtx(folder / "tagcounts.mtx")
    write_names(folder / "tagcounts.mtx.rownames", GENES)
    write_names(folder / "tagcounts.mtx.colnames", CELLS)


def quoted(folder: Path) -> None:
    """As R's write.table writes names: quotes, row names, and a header that does not name them."""
    write_mtx(folder / "matrix.mtx")
    rows = [
        f'"{number}" "{gene}" "{symbol}"'
        for number, (gene, symbol) in enumerate(zip(GENES, SYMBOLS), 1)
    ]
    (folder / "genes.tsv").write_text("\n".join(['"V1" "V2"', *rows]) + "\n")
    (folder / "barcodes.tsv").write_text("".join(f'"{cell}"\n' for cell in CELLS))


def csv_barcodes(folder: Path) -> None:
    write_mtx(folder / "matrix.mtx")
    write_names(folder / "features.tsv", GENES)
    numbers = [f'"{n}"' for n in range(1, 10)]
    ident = ['"p"'] * 9
    texts = [f'"{cell}"' for cell in CELLS]
    write_names(
        folder / "barcodes.csv", numbers, texts, ident, separator=",", header='"","cell","ident"'
    )


def excel(folder: Path) -> None:
    write_mtx(folder / "matrix.mtx")
    write_names(folder / "features.csv", GENES, SYMBOLS, separator=";", header="Gene ID;Symbol")
    text = "\r\n".join(["Barcode", *CELLS]) + "\r\n\r\n"
    (folder / "barcodes.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())


def biotypes(folder: Path) -> None:
    write_mtx(folder / "matrix.mtx")
    write_names(folder / "features.tsv", GENES, SYMBOLS, ["protein_coding"] * 10 + ["lncRNA"] * 3)
    write_names(folder / "barcodes.tsv", CELLS)


def samples(folder: Path) -> None:
    """Two samples in one folder; the genes are shared."""
    write_mtx(folder / "GSM1_matrix.mtx")
    doubled = {key: 2 * value for key, value in TRUTH.items()}
    write_mtx(folder / "GSM2_matrix.mtx", doubled)
    write_names(folder / "GSM1_barcodes.tsv", CELLS)
    write_names(folder / "GSM2_barcodes.tsv", [f"{cell}-2" for cell in CELLS])
    write_names(folder / "genes.tsv", GENES, SYMBOLS)


def drop_seq(folder: Path) -> None:
    """Names in the header, as Drop-seq's MatrixMarketWriter writes them, some a line."""
    write_mtx(folder / "plain.mtx")
    first, _, *rest = (folder / "plain.mtx").read_text().splitlines(keepends=True)
    names = ["\t".join(["%%GENES", *GENES[:8]]), "\t".join(["%%GENES", *GENES[8:]])]
    names.append("\t".join(["%%CELL_BARCODES", *CELLS]))
    text = "".join([first, *(f"{line}\n" for line in names), *rest])
    (folder / "sparse.mtx").write_text(text)
    (folder / "raw.dge.txt.gz").write_bytes(gzip.compress(text.encode()))


def proseg(folder: Path) -> None:
    """`metadata` is in the name of both tables."""
    write_mtx(folder / "counts.mtx", by_cell=True, field="real")
    write_names(
        folder / "gene-metadata.csv", GENES, SYMBOLS, separator=",", header="gene,total_count"
    )
    places = [f"{number}.5" for number in range(len(CELLS))]
    write_names(
        folder / "cell-metadata.csv", CELLS, places, separator=",", header="cell,centroid_x"
    )


def features_metadata(folder: Path) -> None:
    """A word of genes and one of cells: the rows decide."""
    write_mtx(folder / "counts.mtx")
    write_names(folder / "features_v2_metadata.tsv", GENES, SYMBOLS)
    write_names(folder / "barcodes_v2_metadata.tsv", CELLS)


def htseq(folder: Path) -> None:
    """Of several .bam files with --counts-output-sparse."""
    write_mtx(folder / "counts.mtx", by_cell=True, field="real")
    write_names(folder / "counts_features.tsv", GENES, header="id")
    write_names(folder / "counts_samples.tsv", CELLS)


def cells_metadata(folder: Path) -> None:
    """`gene` is in the names of all files."""
    write_mtx(folder / "gene_expression_matrix.mtx")
    write_names(folder / "gene_expression_genes.tsv", GENES)
    write_names(folder / "gene_expression_metadata.csv", CELLS, separator=",", header="cell")


def metadata_of_genes_mtx(folder: Path) -> None:
    """The matrix gives `genes` to the table of cells."""
    write_mtx(folder / "sample_genes.mtx")
    write_names(folder / "sample_genes_features.tsv", GENES)
    write_names(folder / "sample_genes_metadata.csv", CELLS, separator=",", header="cell")


LAYOUTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "kb-python": (kb, ""),
    "kb-python's file": (kb, "cells_x_genes.mtx"),
    "Parse": (parse, ""),
    "alevin": (alevin, ""),
    "alevin's file": (alevin, "quants_mat.mtx.gz"),
    "STARsolo raw": (star, ""),
    "Expression Atlas": (expression_atlas, ""),
    "Expression Atlas's file": (expression_atlas, "E-MTAB-1.aggregated_filtered_counts.mtx"),
    "bcbio": (bcbio, ""),
    "rows and columns of R": (rows_of_r, ""),
    "quotes of R": (quoted, ""),
    "barcodes of write.csv": (csv_barcodes, ""),
    "tables of Excel": (excel, ""),
    "biotypes": (biotypes, ""),
    "Drop-seq": (drop_seq, "sparse.mtx"),
    "Drop-seq of DropViz": (drop_seq, "raw.dge.txt.gz"),
    "proseg": (proseg, ""),
    "features_metadata": (features_metadata, ""),
    "HTSeq": (htseq, "counts.mtx"),
    "metadata of cells": (cells_metadata, ""),
    "metadata of the cells of genes.mtx": (metadata_of_genes_mtx, ""),
    "one of two samples": (samples, "GSM1_matrix.mtx"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_matrix_market_has_the_true_counts(name: str, tmp_path: Path) -> None:
    write, file = LAYOUTS[name]
    write(tmp_path)
    assert read(tmp_path / file) == TRUTH


def test_a_comment_need_not_be_utf_8(tmp_path: Path) -> None:
    drop_seq(tmp_path)
    first, *rest = (tmp_path / "sparse.mtx").read_bytes().splitlines(keepends=True)
    comment = "%% créé\n".encode("latin-1")
    (tmp_path / "sparse.mtx").write_bytes(b"".join([first, comment, *rest]))
    assert read(tmp_path / "sparse.mtx") == TRUTH


def test_columns_of_text_tables_become_obs(tmp_path: Path) -> None:
    parse(tmp_path)
    with open_counts(tmp_path) as reader:
        assert reader.var["gene_name"].tolist()[:4] == ["SYM1", "", "", "SYM4"]
        assert reader.obs["sample"].tolist() == ["s1"] * 9
    (tmp_path / "kb").mkdir()
    kb(tmp_path / "kb")
    with open_counts(tmp_path / "kb") as reader:
        assert reader.var["symbol"].tolist() == SYMBOLS


def test_types_that_10x_does_not_have_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    biotypes(tmp_path)
    read(tmp_path)
    said = "its third column is no type of 10x ('protein_coding' 10, 'lncRNA' 3); all rows are read as genes"
    assert capsys.readouterr().err == f"{tmp_path}: features.tsv: {said}\n"


def test_nascent_molecules_are_added_to_mature_molecules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kb(tmp_path)
    (tmp_path / "cells_x_genes.mtx").unlink()
    parts: dict[str, Counts] = {"mature": {}, "nascent": {}, "ambiguous": {}}
    for key, value in TRUTH.items():
        for part in parts.values():
            part[key] = 0
        for _ in range(value):
            parts[DRAW.choice(sorted(parts))][key] += 1
    for part, counts in parts.items():
        write_mtx(tmp_path / f"cells_x_genes.{part}.mtx", counts, by_cell=True)
    assert read(tmp_path) == read(tmp_path, "total") == TRUTH
    assert (
        "X is mature + nascent + ambiguous; set the dataset's `counts` to another one: "
        in capsys.readouterr().err
    )
    for name, members in {"mature": ["mature"], "cell": ["mature", "ambiguous"]}.items():
        wanted = Counter[tuple[str, str]]()
        for member in members:
            wanted.update(parts[member])
        assert read(tmp_path, name) == +wanted  # without zeros


@pytest.mark.parametrize("mode", ["X", "S", "U", "A", "S+A", "S+U+A"])
def test_counts_of_alevin_fry_are_summed_over_splicing(mode: str, tmp_path: Path) -> None:
    ends = {"S": "", "U": "-U", "A": "-A"}
    split = {}
    for (cell, gene), end in product(TRUTH, ends.values()):
        split[cell, gene + end] = DRAW.randint(1, 9)
    columns = [gene + end for end, gene in product(ends.values(), GENES)]
    write_mtx(tmp_path / "quants_mat.mtx", split, by_cell=True, genes=columns)
    write_names(tmp_path / "quants_mat_rows.txt", CELLS)
    write_names(tmp_path / "quants_mat_cols.txt", columns)
    letters = "S+A" if mode == "X" else mode
    wanted: Counts = dict.fromkeys(TRUTH, 0)
    for letter in letters.split("+"):
        for cell, gene in TRUTH:
            wanted[cell, gene] += split[cell, gene + ends[letter]]
    assert read(tmp_path, mode) == wanted


def test_a_table_of_another_matrix_is_refused_with_three_numbers(tmp_path: Path) -> None:
    star(tmp_path)
    write_names(tmp_path / "barcodes.tsv", CELLS[:4])
    assert refusal(tmp_path) == (
        f"{tmp_path}/matrix.mtx: has 13 rows and 9 columns, features.tsv names 13 genes and barcodes.tsv 4 cells: "
        "barcodes.tsv has 5 fewer; is it from another matrix, such as the raw or the filtered one?"
    )
    write_names(tmp_path / "barcodes.tsv", [*CELLS, "AAAACCCCGGGGTTTT"])
    assert "barcodes.tsv has 1 more" in refusal(tmp_path)
    write_names(tmp_path / "barcodes.tsv", CELLS[1:], header="barcode")
    assert "barcodes.tsv has 1 fewer" in refusal(tmp_path)
    (tmp_path / "barcodes.tsv").write_text("\n")
    assert "barcodes.tsv 0 cells: barcodes.tsv has 9 fewer" in refusal(tmp_path)
    (tmp_path / "barcodes.tsv").unlink()
    assert refusal(tmp_path) == (
        f"{tmp_path}: no barcodes.tsv; expected it beside matrix.mtx, plain or as .gz, with 13 or 9 names; there is "
        "features.tsv with 13"
    )


def test_an_empty_table_is_not_taken(tmp_path: Path) -> None:
    star(tmp_path)
    (tmp_path / "barcodes_all.tsv").touch()
    read(tmp_path)


def test_tables_of_another_sample_are_not_taken(tmp_path: Path) -> None:
    samples(tmp_path)
    (tmp_path / "GSM1_barcodes.tsv").unlink()
    assert "no GSM1_barcodes.tsv; expected it beside GSM1_matrix.mtx" in refusal(
        tmp_path / "GSM1_matrix.mtx"
    )
    assert "has 2 matrices (GSM1_matrix.mtx, GSM2_matrix.mtx); name one of the files" in refusal(
        tmp_path
    )


def test_multi_mapper_fractions_point_to_the_count_matrix(tmp_path: Path) -> None:
    star(tmp_path)
    text = refusal(tmp_path / "UniqueAndMult-EM.mtx")
    assert "is fractional" in text
    assert text.endswith("raw counts may be in matrix.mtx: set the path to that file")
    assert "is fractional" in refusal(tmp_path, "UniqueAndMult-EM")


def test_a_matrix_without_names_says_which_file_is_missing(tmp_path: Path) -> None:
    bcbio(tmp_path)
    (tmp_path / "tagcounts.mtx.colnames").unlink()
    assert f"{tmp_path}: no tagcounts_barcodes.tsv; expected it beside tagcounts.mtx" in refusal(
        tmp_path
    )


def test_three_counts_a_line_are_refused(tmp_path: Path) -> None:
    """As the first STARsolo with Velocyto wrote spliced, unspliced and ambiguous molecules."""
    star(tmp_path)
    file = tmp_path / "matrix.mtx"
    header, comment, sizes, *rows = file.read_text().splitlines()
    file.write_text("\n".join([header, comment, sizes, *(f"{row} 0 1" for row in rows)]) + "\n")
    assert (
        refusal(tmp_path)
        == f"{file}: expected three numbers a line, got more, such as '{rows[0]} 0 1'"
    )


@pytest.mark.parametrize("text", ["1e308", "1.0e+308", "1E308"])
def test_missing_values_of_writemm_are_refused_by_name(text: str, tmp_path: Path) -> None:
    star(tmp_path)
    file = tmp_path / "matrix.mtx"
    rows = file.read_text().replace("integer", "real").splitlines()
    rows[-1] = rows[-1].rsplit(" ", 1)[0] + f" {text}"
    file.write_text("\n".join(rows) + "\n")
    assert (
        "has the value 1e308, which R's writeMM writes for NA, NaN and Inf; set these to 0"
        in refusal(tmp_path)
    )


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("coordinate pattern general", "no counts"),
        ("array integer general", "write it sparse (HTSeq: --counts-output-sparse; "),
        ("coordinate real symmetric", "no cells"),
    ],
)
def test_matrices_without_counts_of_cells_are_refused_by_kind(
    kind: str, remedy: str, tmp_path: Path
) -> None:
    star(tmp_path)
    file = tmp_path / "matrix.mtx"
    file.write_text(file.read_text().replace("coordinate integer general", kind))
    text = refusal(tmp_path)
    assert text.startswith(
        f"{file}: expected '%%MatrixMarket matrix coordinate integer general' (or real)"
    )
    assert remedy in text


def test_whole_numbers_without_a_sign_are_counts(tmp_path: Path) -> None:
    star(tmp_path)
    write_mtx(tmp_path / "matrix.mtx", field="unsigned-integer")
    assert read(tmp_path) == TRUTH


@pytest.mark.parametrize("field", ["integer", "real"])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_compiled_parsing_gives_the_numbers_that_python_reads(
    field: str, is_sorted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_MIN_COMPILED", 0)
    monkeypatch.setattr(lines, "_PIECE_BYTES", 200)
    monkeypatch.setattr(matrices, "_MIN_BUCKET_ROWS", 2)
    star(tmp_path)
    spellings: list[Callable[[int], str]] = [
        str,
        "{}.0".format,
        "{}e+00".format,
        "{}.000".format,
        " {}".format,
    ]
    rows = []
    for number, ((cell, gene), value) in enumerate(TRUTH.items()):
        spell = str if field == "integer" else spellings[number % len(spellings)]
        separator = "\t" if number % 3 else " "
        row = separator.join([str(GENES.index(gene) + 1), str(CELLS.index(cell) + 1), spell(value)])
        rows.append((CELLS.index(cell), row))
    rows.sort(key=lambda row: row[0] if is_sorted else DRAW.random())
    head = f"%%MatrixMarket matrix coordinate {field} general\n13 9 {len(rows)}\n"
    # no line feed at the end
    (tmp_path / "matrix.mtx").write_text(head + "\n".join(text for _, text in rows))
    assert read(tmp_path) == TRUTH


def read_compiled(text: str) -> list[float]:
    """Values that the compiled loop reads, as if of so many that compiling is worth its time."""
    content = io.BytesIO(text.encode())
    pieces = lines.read_triples(Path("a.mtx"), content, np.float64, (1, 1), n_values=1 << 30)
    [(_, _, values)] = pieces
    return values.tolist()  # type: ignore[no-any-return]


def test_decimals_are_parsed_to_the_nearest_double(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(lines.pd, "read_csv", None)
    texts = ["0.1", "123456.789", "1e-5", "3.3333333333", "9007199254740.25", "1.5E2", "12e-3"]
    values = read_compiled("".join(f"1 1 {text}\n" for text in texts))
    assert values == [float(text) for text in texts]


@pytest.mark.parametrize(
    "line", ["1 1 x", "1 1", "2 1 5", "0 1 5", "1 1 5 6", "1 1 1.5.2", "1  1", "-1 1 5"]
)
def test_the_compiled_loop_leaves_odd_lines_to_pandas(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PandasIsAsked(BaseException):
        """Not an Exception, which the reader would turn into a line."""

    def read_csv(*_: Any, **__: Any) -> None:
        raise PandasIsAsked

    monkeypatch.setattr(lines.pd, "read_csv", read_csv)
    with pytest.raises(PandasIsAsked):
        read_compiled(f"{line}\n")


def test_whole_numbers_of_more_than_31_bits_are_refused(tmp_path: Path) -> None:
    star(tmp_path)
    file = tmp_path / "matrix.mtx"
    rows = file.read_text().splitlines()
    rows[-1] = rows[-1].rsplit(" ", 1)[0] + " 2147483648"
    file.write_text("\n".join(rows) + "\n")
    assert "a value is too large: expected at most 2,147,483,647, got 2,147,483,648" in refusal(
        tmp_path
    )
