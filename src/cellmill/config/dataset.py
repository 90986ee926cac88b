"""The table of datasets: one row per `.h5ad`, read with the csv module (importing pandas takes a second)."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from pydantic import Field, ValidationError

from cellmill.config.section import Section, explain
from cellmill.errors import ConfigError, did_you_mean

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


class Dataset(Section):
    """One row of the table; an empty field is null."""

    dataset: str = Field(pattern=f"^{NAME}$", description="Name, used in file names.")
    path: str = Field(
        pattern=r"^[^{}<>\r\n]+$",  # Snakemake reads braces and angles in an input as wildcards
        description="The .h5ad file, absolute or relative to Snakemake's working directory; without braces and < >.",
    )
    counts: str = Field("X", description="Matrix with raw counts: X, raw, or the name of a layer.")
    label: str | None = Field(None, description="obs column that the probes predict; empty for no probes.")
    source: str | None = Field(None, description="Source of the data, for the report.")
    licence: str | None = Field(None, description="Licence of the data, for the report.")


def read_datasets(table: Path) -> dict[str, Dataset]:
    """Rows of a tab-separated table by name, in order. Raises ConfigError naming the line."""
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
            raise ConfigError(f"{table}, line {line}: more fields than columns in the header")
        try:
            dataset = Dataset(**{key: value for key, value in row.items() if value})
        except ValidationError as error:
            key, message = explain(error, Dataset)
            raise ConfigError(f"{table}, line {line}: {'.'.join(key)}: {message}") from None
        if dataset.dataset in datasets:
            raise ConfigError(f"{table}, line {line}: dataset {dataset.dataset!r} is a duplicate; rename it")
        datasets[dataset.dataset] = dataset
    if not datasets:
        raise ConfigError(f"{table}: no datasets; add a row per .h5ad file")
    return datasets


def is_name(text: str) -> bool:
    """True if `text` can name a corpus, run or dataset, which is part of a path."""
    return re.fullmatch(NAME, text) is not None
