"""The tables that name rows and columns of a Matrix Market file.

They are files of its folder, chosen by prefix and by length.

    sample_matrix.mtx  sample_features.tsv.gz  sample_barcodes.tsv.gz            genes in rows: Cell Ranger, STARsolo
    cells_x_genes.mtx  cells_x_genes.barcodes.txt  cells_x_genes.genes.txt       cells in rows: kb-python
    quants_mat.mtx     quants_mat_rows.txt  quants_mat_cols.txt                  cells in rows: alevin-fry
    count_matrix.mtx   all_genes.csv  cell_metadata.csv                          cells in rows: Parse
    NAME.mtx  NAME.mtx_rows  NAME.mtx_cols                                       genes in rows: Expression Atlas
    NAME.mtx  NAME.mtx.rownames  NAME.mtx.colnames                               genes in rows: bcbio

Genes are in rows if the table of genes has as many names as the matrix has rows. A table belongs to
the matrix with which its name shares most words, the first ones before others, so that files of
several samples in one folder are not mixed.

One table gives the names, in the order of the matrix: a list such as `barcodes.tsv` before a table
such as `metadata.csv`, which may be sorted. Other tables are joined to it by name.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.data.inputs.text.tables import (
    AXES,
    BARCODE,
    CELLS,
    GENES,
    WORDS,
    TextTable,
    cell_frame,
    gene_frame,
    is_table,
    label_columns,
    name_words,
    peek,
    share,
)
from cellmill.errors import DataError

_MAX_TABLES = 40  # tables of one matrix
_LISTS = {  # words in the names of tables that have the order of their matrix
    GENES: {"gene", "genes", "feature", "features", *AXES},
    CELLS: {"barcode", "barcodes", *AXES},
}
_NUMBER = r"(?i)[-+]?\d*\.?\d*(e[-+]?\d+)?|na|nan|<na>|[-+]?inf"  # or no value
_USUAL = {GENES: "features.tsv", CELLS: "barcodes.tsv"}


class Companions(NamedTuple):
    """Names of a matrix, and whether its rows are cells."""

    genes: pd.DataFrame
    # further tables of the same genes, as kb-python writes their symbols
    more_genes: list[pd.DataFrame]
    obs: pd.DataFrame
    cells_in_rows: bool
    gene_file: Path
    notes: Sequence[str] = ()  # sentences for the user on tables that were joined or left out


class _Choice(NamedTuple):
    score: tuple[Any, ...]
    tables: dict[str, TextTable]  # by role
    cells_in_rows: bool


def is_matrix(path: Path) -> bool:
    """True for a file whose name ends as that of a Matrix Market file, plain or gzip."""
    return path.name.lower().removesuffix(".gz").endswith(".mtx") and not path.name.startswith(".")


def matrix_stem(path: Path) -> str:
    """Return the name of a Matrix Market file without its endings."""
    return path.name[: len(path.name.lower().removesuffix(".gz").removesuffix(".mtx"))]


def find_companions(matrix: Path, n_rows: int, n_columns: int) -> Companions:
    """Find tables of names for a matrix of `n_rows` x `n_columns`.

    Raises DataError, naming the table, if one is too short.
    """
    tables = list(_with_axes([*_tables_of(matrix, max(n_rows, n_columns))]))
    choices = list(_choices(matrix, tables, n_rows, n_columns))
    if not choices:
        raise DataError(_explain(matrix, tables, n_rows, n_columns))
    score = max(choice.score for choice in choices)
    choices = [choice for choice in choices if choice.score == score]
    cells_in_rows = choices[0].cells_in_rows
    n_genes, n_cells = (n_columns, n_rows) if cells_in_rows else (n_rows, n_columns)
    genes = _NamedRows(matrix, GENES, n_genes, choices, tables)
    cells = _NamedRows(matrix, CELLS, n_cells, choices, tables)
    obs = cell_frame(cells.frame)
    for other in cells.others:
        for name, labels in label_columns(other).items():
            if name not in obs:
                obs[name] = labels
    return Companions(
        genes.frame,
        genes.others,
        obs,
        cells_in_rows,
        genes.table.path,
        genes.notes + cells.notes,
    )


class _NamedRows:
    """Rows of a matrix as the likeliest table of a role names them.

    `others` are further tables of these rows, in the same order. Raises DataError if tables that are
    equally likely have other names, or the same ones in another order.
    """

    def __init__(
        self,
        matrix: Path,
        role: str,
        n: int,
        choices: Sequence[_Choice],
        tables: Sequence[TextTable],
    ) -> None:
        self.others: list[pd.DataFrame] = []
        self.notes: list[str] = []
        self._role = role
        equal = {choice.tables[role].path: choice.tables[role] for choice in choices}
        taken = {table.path for table in choices[0].tables.values()}
        self.table = choices[0].tables[role]
        frames = {self.table.path: self.table.read(n)}
        further = {}
        unfit = []
        for table in tables:
            is_named = table.role() == role or table.path in equal
            if table.path in taken or not is_named:
                continue
            if not table.fits(n):
                unfit.append(table)
                continue
            try:
                frames[table.path] = table.read(n)
                further[table.path] = table
            except DataError as error:
                self.notes.append(f"{table.path.name} is left out: {error}")
        names = self._names(frames[self.table.path])
        same = [
            table for path, table in further.items() if _find_rows(names, frames[path]) is not None
        ]
        plainest = max([self.table, *same], key=lambda table: _plainness(table, role, matrix))
        if plainest is not self.table:
            further = {self.table.path: self.table} | further
            del further[plainest.path]
            self.table = plainest
            names = self._names(frames[plainest.path])
            equal = {}
        self.frame = frames.pop(self.table.path)
        for path in further:
            if not self._join(path, frames[path], names) and path in equal:
                wanted = _prefix(matrix) + _USUAL[role]
                raise DataError(
                    f"{matrix}: {self.table.path.name} and {path.name} both have names for its {role}, but not the "
                    f"same ones in one order; name the table in the order of the matrix {wanted} (or .csv, .gz), or "
                    "move the other one away"
                )

        for table in unfit:
            self._join_some(table, names)

    def _join_some(self, table: TextTable, names: pd.Index) -> None:
        """Add a table that has some of the cells, or others too; cells that it lacks get no values."""
        n = table.n_rows()
        try:
            frame = table.read(n) if self._role == CELLS else pd.DataFrame()
            column = _names_in(frame, names)
            if column is not None and table.may_have_header and frame[column].iloc[0] not in names:
                n = table.n_lines - 1
                frame = table.read(n)
                column = _names_in(frame, names)
        except DataError as error:
            self.notes.append(f"{table.path.name} is left out: {error}")
            return
        if column is None:
            fault = f"it has {n:,} rows for {len(names):,} {self._role}"
        elif not any(isinstance(name, str) for name in frame if name != column):
            fault = "it has no header that names a column besides the cells"
        else:
            values = pd.Index(frame[column], dtype=object)
            self.others.append(frame.drop(columns=[column]).set_axis(values).reindex(names))
            self.notes.append(
                f"{table.path.name} is joined by name: it has {n:,} rows, with {names.isin(values).sum():,} of "
                f"{len(names):,} cells"
            )
            return
        self.notes.append(f"{table.path.name} is left out: {fault}")

    def _names(self, frame: pd.DataFrame) -> pd.Index:
        return cell_frame(frame).index if self._role == CELLS else gene_frame(frame)[0].index

    def _join(self, path: Path, frame: pd.DataFrame, names: pd.Index) -> bool:
        """Add a table of the same rows. False if it has another order or other names."""
        found = _find_rows(names, frame)
        if found is None:
            if _has_order(names, frame, self._role):
                self.others.append(frame)
                return True
            first = self.table.path.name
            self.notes.append(f"{path.name} is left out: it does not have the names of {first}")
            return False
        rows, column = found
        joined = frame.iloc[rows]
        self.others.append(joined.drop(columns=[column]) if self._role == CELLS else joined)
        is_same = (rows == np.arange(len(rows))).all()
        if not is_same:
            self.notes.append(
                f"{path.name} is joined by name: it has another order than {self.table.path.name}"
            )
        return bool(is_same)


def _names_in(frame: pd.DataFrame, names: pd.Index) -> Any:
    """The column that has most of some names, if more than half.

    None if columns with as many names have them in other rows.
    """
    found: list[Any] = []
    rows: list[np.ndarray] = []  # row of each name, by column of `found`
    n_best = min(len(frame), len(names)) // 2 + 1
    for column in frame:
        values = pd.Index(frame[column], dtype=object)
        n_known = int(names.isin(values).sum())
        if not values.is_unique or n_known < n_best:
            continue
        if n_known > n_best:
            found = []
            rows = []
        n_best = n_known
        found.append(column)
        rows.append(values.get_indexer(names))
    is_clear = found and all(np.array_equal(other, rows[0]) for other in rows)
    return found[0] if is_clear else None


def _find_rows(names: pd.Index, frame: pd.DataFrame) -> tuple[np.ndarray, Any] | None:
    """Row of each name in a table, and the first column that has all of them; None without one."""
    for column in frame:
        values = pd.Index(frame[column], dtype=object)
        if values.equals(names):
            return np.arange(len(names)), column
        if values.is_unique:
            rows = values.get_indexer(names)
            if (rows >= 0).all():
                return rows, column
    return None


def _has_order(names: pd.Index, frame: pd.DataFrame, role: str) -> bool:
    """True for a table without names of its rows, or with genes in the order of `names`."""
    for column in frame:
        values = frame[column]
        if values.str.fullmatch(_NUMBER).all() and not (
            values.is_unique and values.str.isdigit().all() and names.str.isdigit().all()
        ):
            continue
        known = values.isin(names)
        if role == GENES:
            # a list of symbols has no ids by which it could be joined, or a gene's id where it has no symbol
            own = values == names.to_numpy()
            if not values[known & ~own].isin(values[own]).all():  # a symbol may be there twice
                return False
        elif values.is_unique or known.any() or share(values.tolist(), BARCODE) > 0.5:
            return False
    return True


def files_beside(matrix: Path) -> list[Path]:
    """List the tables in the folder of a matrix that are like no other matrix by their names.

    The likeliest come first.
    """
    files = sorted(matrix.parent.iterdir())
    words = name_words(matrix)
    others: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)  # by their first words
    for file in files:
        if is_matrix(file) and file != matrix:
            other_words = name_words(file)
            for n in range(len(other_words) + 1):
                others[tuple(other_words[:n])].append(other_words)
    nearest = {}
    for file in files:
        if file == matrix or not is_table(file):
            continue
        own_words = name_words(file)
        likeness = _likeness(own_words, words)
        n_first = likeness[0]
        rivals = others.get(tuple(own_words[: n_first + 1])) or others.get(
            tuple(own_words[:n_first]), []
        )
        if all(_likeness(own_words, rival) <= likeness for rival in rivals) and file.is_file():
            nearest[file] = likeness
    return sorted(nearest, key=nearest.__getitem__, reverse=True)[:_MAX_TABLES]


def named_tables(matrix: Path) -> list[Path]:
    """List the tables beside a matrix whose names say that they have genes or cells."""
    words = WORDS[GENES] | WORDS[CELLS]
    return sorted(file for file in files_beside(matrix) if not words.isdisjoint(name_words(file)))


def _tables_of(matrix: Path, longest: int) -> Iterator[TextTable]:
    """Open the tables beside a matrix. Those that are longer hold something else."""
    for file in files_beside(matrix):
        table = peek(file, 2 * longest + 2)
        if table is not None:
            yield table


def _with_axes(tables: Sequence[TextTable]) -> Iterator[TextTable]:
    """Let rows.txt name what cols.txt does not, if only this one has ids or barcodes, and the other way round."""
    by_words = {tuple(name_words(table.path)): table for table in tables}
    swapped = dict(zip(AXES, AXES[::-1]))
    for table in tables:
        words = name_words(table.path)
        other = by_words.get(tuple(swapped.get(word, word) for word in words))
        content = None if other is None or other is table else other.content()
        yield replace(table, axis={GENES: CELLS, CELLS: GENES}.get(content or ""))


def _likeness(table: Sequence[str], matrix: Sequence[str]) -> tuple[int, int, int]:
    """Numbers of words that two names share: from the first on, anywhere, and up to the last."""
    n_shared = sum((Counter(table) & Counter(matrix)).values())
    return _n_first(table, matrix), n_shared, _n_first(table[::-1], matrix[::-1])


def _n_first(table: Sequence[str], matrix: Sequence[str]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(table, matrix))))


def _plainness(table: TextTable, role: str, matrix: Path) -> tuple[bool, ...]:
    """Signs that a table is a list in the order of its matrix, the strongest first."""
    own_words = Counter(name_words(table.path)) - Counter(name_words(matrix))
    is_list = not _LISTS[role].isdisjoint(own_words)
    return is_list, is_list and len(own_words) == 1, not table.has_header, not table.separator


def _has_names(table: TextTable, role: str, matrix: Path) -> bool:
    """True for a list, and for a table that has distinct texts, ids or barcodes in its first rows."""
    if _plainness(table, role, matrix)[0] or table.content():
        return True
    rows = table.first[1:] or table.first
    return any(
        len({*texts}) == len(texts) and not all(re.fullmatch(_NUMBER, text) for text in texts)
        for texts in zip(*rows)
    )


def _choices(
    matrix: Path, tables: Sequence[TextTable], n_rows: int, n_columns: int
) -> Iterator[_Choice]:
    words = name_words(matrix)
    for genes, cells in permutations(tables, 2):
        if genes.role() == CELLS or cells.role() == GENES:
            continue
        for cells_in_rows in (False, True):
            n_genes, n_cells = (n_columns, n_rows) if cells_in_rows else (n_rows, n_columns)
            if not (genes.fits(n_genes) and cells.fits(n_cells)):
                continue
            roles = (genes.role() == GENES) + (cells.role() == CELLS)
            contents = (genes.content() == GENES) + (cells.content() == CELLS)
            likeness = np.add(
                _likeness(name_words(genes.path), words), _likeness(name_words(cells.path), words)
            )
            is_named = words[:1] == ["cells"] or "rows" in name_words(cells.path)
            usual = int(cells_in_rows == is_named)  # as many cells as genes
            plain = (_plainness(genes, GENES, matrix), _plainness(cells, CELLS, matrix))
            lists = plain[0][0] + plain[1][0]
            named = _has_names(genes, GENES, matrix) + _has_names(cells, CELLS, matrix)
            first, *more = likeness.tolist()
            score = (roles, named, first, lists, contents, *more, usual, plain)
            yield _Choice(score, {GENES: genes, CELLS: cells}, cells_in_rows)


def _explain(matrix: Path, tables: Sequence[TextTable], n_rows: int, n_columns: int) -> str:
    """Say which table is missing, or how many names each has and which is short."""
    genes = _likeliest(matrix, tables, GENES)
    cells = _likeliest(matrix, tables, CELLS)
    if genes is None or cells is None:
        wanted = _prefix(matrix) + _USUAL[GENES if genes is None else CELLS]
        present = [f"{table.path.name} with {table.n_rows():,}" for table in tables[:4]]
        return (
            f"{matrix.parent}: no {wanted}; expected it beside {matrix.name}, plain or as .gz, with {n_rows:,} or "
            f"{n_columns:,} names; there is {', '.join(present) or 'no text table'}"
        )
    n_genes = n_rows
    n_cells = n_columns
    if genes.fits(n_columns) or cells.fits(n_rows):
        n_genes = n_columns
        n_cells = n_rows
    faults = []
    for table, n in ((genes, n_genes), (cells, n_cells)):
        difference = table.n_rows() - n
        if difference:
            faults.append(
                f"{table.path.name} has {abs(difference):,} {'more' if difference > 0 else 'fewer'}"
            )
    return (
        f"{matrix}: has {n_rows:,} rows and {n_columns:,} columns, {genes.path.name} names {genes.n_rows():,} genes "
        f"and {cells.path.name} {cells.n_rows():,} cells: {' and '.join(faults)}; is it from another matrix, such as "
        "the raw or the filtered one?"
    )


def _prefix(matrix: Path) -> str:
    """Beginning of the names of tables that belong to a matrix and no other."""
    stem = matrix_stem(matrix)
    return stem.removesuffix("matrix") if stem.endswith("matrix") else f"{stem}_"


def _likeliest(matrix: Path, tables: Sequence[TextTable], role: str) -> TextTable | None:
    """The table of a role whose name shares most words with the matrix's."""
    words = name_words(matrix)
    candidates = [table for table in tables if table.role() == role]
    return max(candidates, key=lambda table: _likeness(name_words(table.path), words), default=None)
