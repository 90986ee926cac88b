"""Datasets of one evaluation, opened by name: cells, embeddings, and obs columns by role."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL, ROLES
from cellmill.data.counts_reader import CountsReader
from cellmill.data.dataset_file import open_dataset
from cellmill.evaluate.embedding_file import read_embedding


@dataclass(frozen=True)
class DatasetFiles:
    cells: Path
    embedding: Path
    labels: list[str]  # obs columns


@dataclass(frozen=True)
class OpenDataset:
    reader: CountsReader
    vectors: np.ndarray  # embeddings of all cells, `(n_obs, hidden)` float32; NaN rows for cells without a known gene
    roles: dict[str, pd.Series]


@dataclass(frozen=True)
class EvaluatedDatasets:
    """By name; embeddings are those of the model whose weights have `digest`, `width` wide."""

    files: Mapping[str, DatasetFiles]
    digest: str
    width: int

    @contextmanager
    def open(self, name: str) -> Iterator[OpenDataset]:
        """The dataset `name`, one of `files`. Raises DataError for a file that is not as expected."""
        files = self.files[name]
        with open_dataset(files.cells) as reader:
            vectors = read_embedding(files.embedding, reader.obs.index, self.digest, self.width)
            yield OpenDataset(reader, vectors, read_roles(reader, named_roles(reader.obs, files.labels)))


def named_roles(obs: pd.DataFrame, labels: Sequence[str]) -> dict[str, str | None]:
    """obs column by role: the labels, and the roles that preprocessed cells have under their own names."""
    named = {"label" if number == 1 else f"label {number}": name for number, name in enumerate(labels, start=1)}
    return {**named, **{role: role for role in (*ROLES, IS_CONTROL) if role in obs}}


def read_roles(reader: CountsReader, columns: Mapping[str, str | None]) -> dict[str, pd.Series]:
    """obs columns by role; roles without a column are left out. Raises DataError for an unknown column."""
    given = {role: column for role, column in columns.items() if column is not None}
    return {role: reader.obs_column(column, f"the dataset's {role}") for role, column in given.items()}
