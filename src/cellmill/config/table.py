"""Rows of a tab-separated table, read so that no row can vanish, and names that options can refer to.

A row is one line: a quote that is not closed on its line, which the csv module would read on through the rows below, is
an error. The csv module and not pandas, which takes a second to import.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from cellmill.errors import ConfigError, did_you_mean
from cellmill.files import special_kind

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"  # name of a corpus, run or dataset, which is part of a path
MAX_NAME = 100  # characters; names of a corpus and a dataset are in one file name, whose limit is 255


def check_name(name: str) -> str:
    """Return the name of a corpus, run or dataset. Raises ValueError for one that no path or option can have."""
    if len(name) > MAX_NAME:
        raise ValueError(f"expected a name of at most {MAX_NAME} characters, got {len(name)}: {name[:20]}...")
    if not re.fullmatch(NAME, name):
        wrong = next((character for character in name if not re.fullmatch(r"[A-Za-z0-9_.-]", character)), name[:1])
        fault = "names a folder" if "/" in name or name in ("", ".", "..") else f"has {wrong!r}"
        where = " at its beginning" if wrong in ("_", ".", "-") and not fault.startswith("names") else ""
        raise ValueError(f"{name!r} {fault}{where}; use letters, digits, '_', '.' and '-'")
    if not isinstance(read := yaml.safe_load(name), str):
        read = "nothing" if read is None else f"{read}"
        raise ValueError(f"the name {name} is {read} in YAML, so no option could give it; add a letter to it")
    return name


def read_rows(
    table: Path, known: Sequence[str], what: str = "the table of datasets", required: Sequence[str] = ()
) -> list[tuple[int, dict[str, str]]]:
    """Line number and filled cells of each row. Raises ConfigError naming the line.

    Empty lines are skipped. `known` are the columns that a table may have, `required` those that it must have.
    """
    if (kind := special_kind(table)) is not None:  # opening a FIFO would wait without end
        raise ConfigError(f"{table}: expected {what}, got a {kind}")
    try:
        lines = table.read_text(encoding="utf-8-sig").split("\n")  # Excel writes a byte-order mark
    except OSError as error:
        raise ConfigError(f"{table}: {error.strerror}; expected {what}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{table}: not UTF-8 text; save it as tab-separated UTF-8") from None
    header, *rows = [_cells(table, number, line) for number, line in enumerate(lines, start=1)]
    while header and not header[-1].strip():  # spreadsheets save empty columns behind the others
        header.pop()
    if "" in map(str.strip, header):
        raise ConfigError(f"{table}: column {header.index('') + 1} of the header has no name; name or remove it")
    if unknown := [name for name in header if name not in known]:
        raise ConfigError(f"{table}: unknown column {unknown[0][:80]!r}; {did_you_mean(unknown[0], known)}")
    if twice := [name for name in header if header.count(name) > 1]:
        raise ConfigError(f"{table}: two columns are called {twice[0]!r}; remove one")
    if lacking := [name for name in required if name not in header]:
        raise ConfigError(f"{table}: expected the columns {', '.join(required)}, got no {lacking[0]!r}; add it")
    filled = []
    for number, cells in enumerate(rows, start=2):
        if any(cells[len(header) :]):
            raise ConfigError(f"{table}, line {number}: more fields than columns in the header")
        if row := {name: cell for name, cell in zip(header, cells) if cell}:
            filled.append((number, row))
    return filled


def _cells(table: Path, number: int, line: str) -> list[str]:
    if "\0" in line:
        raise ConfigError(f"{table}, line {number}: a NUL character; save the table as tab-separated UTF-8")
    try:
        return next(csv.reader([line.removesuffix("\r")], delimiter="\t", strict=True), [])
    except csv.Error as error:
        if "field limit" in str(error):
            reason = f"a cell of more than {csv.field_size_limit():,} characters; shorten it"
        else:
            reason = f'a cell begins with " and does not end with it ({error}); remove the quote, or close it'
        raise ConfigError(f"{table}, line {number}: {reason}") from None
