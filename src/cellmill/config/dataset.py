"""Table of datasets: one row per `.h5ad`, read with the csv module (pandas would cost a second per parse)."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from pydantic import Field, ValidationError

from cellmill.config.section import Section, explain
from cellmill.errors import ConfigError, did_you_mean

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


class Dataset(Section):
    """One row of the table; an empty cell is null."""

    dataset: str = Field(pattern=f"^{NAME}$", description="Name of the dataset, used in file names.")
    path: str = Field(
        pattern=r"^[^{}<>\r\n]+$",  # Snakemake reads braces and angles in an input as wildcards
        description="The .h5ad file, absolute or relative to where Snakemake runs; without braces and < >.",
    )
    counts: str = Field("X", description="Matrix of the raw counts: X, raw, or the name of a layer.")
    label: str | None = Field(
        None, description="obs column that the probes predict; empty leaves the dataset out of them."
    )
    source: str | None = Field(None, description="Origin of the data, for the report.")
    licence: str | None = Field(None, description="Licence of the data, for the report.")


def read_datasets(table: Path) -> dict[str, Dataset]:
    """Rows of a tab-separated table by name, in its order. Raises ConfigError naming the line."""
    try:
        with open(table, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, delimiter="\t")
            header, rows = reader.fieldnames or [], [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(f"{table}: {error.strerror}; expected the table of datasets") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{table}: not UTF-8 text; save it as tab-separated UTF-8") from None
    known = list(Dataset.model_fields)
    if unknown := [name for name in header if name not in known]:
        raise ConfigError(f"{table}: unknown column {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    datasets: dict[str, Dataset] = {}
    for line, row in rows:
        if None in row:
            raise ConfigError(f"{table}, line {line}: more cells than columns in the header")
        try:
            dataset = Dataset(**{key: value for key, value in row.items() if value})
        except ValidationError as error:
            where, message = explain(error, Dataset)
            raise ConfigError(f"{table}, line {line}: {'.'.join(where)}: {message}") from None
        if dataset.dataset in datasets:
            raise ConfigError(f"{table}, line {line}: dataset {dataset.dataset!r} is listed twice")
        datasets[dataset.dataset] = dataset
    if not datasets:
        raise ConfigError(f"{table}: no datasets; add a row for each .h5ad file")
    return datasets


def is_name(text: str) -> bool:
    """True if `text` can name a corpus, run or dataset: it becomes part of a path."""
    return re.fullmatch(NAME, text) is not None
