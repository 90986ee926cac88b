"""Datasets under evaluation: their files, and what an open dataset has."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from cellmill.config.corpus import IS_CONTROL, ROLES
from cellmill.data.inputs.formats import open_dataset
from cellmill.data.inputs.reader import CountsReader
from cellmill.evaluate.inference.files import read_embedding


@dataclass(frozen=True)
class DatasetFiles:
    """Files of a dataset under evaluation, and its label columns."""

    cells: Path
    embedding: Path
    labels: list[str]  # obs columns
    external: Sequence[Path] = ()  # embeddings by models of other packages


def is_label(role: str) -> bool:
    """True for `label`, `label 2` and so on."""
    return role.partition(" ")[0] == "label"


class OpenDataset(NamedTuple):
    """A dataset whose file is open; the fields are those that `task.Context` describes."""

    reader: CountsReader
    vectors: np.ndarray
    roles: dict[str, pd.Series]


@dataclass(frozen=True)
class EvaluatedDatasets:
    """Datasets by name. Embeddings must come from the model with weights `digest` and be `width`
    wide.
    """

    files: Mapping[str, DatasetFiles]
    digest: str
    width: int

    @contextmanager
    def open(self, name: str) -> Iterator[OpenDataset]:
        """Open the dataset `name`. Raises DataError for a damaged file.

        Its roles are the labels, and the columns of preprocessed cells that are named like a role.
        """
        files = self.files[name]
        with open_dataset(files.cells) as reader:
            vectors = read_embedding(files.embedding, reader.obs_names, self.digest, self.width)
            roles = {}
            for number, column in enumerate(files.labels, start=1):
                role = "label" if number == 1 else f"label {number}"
                roles[role] = reader.obs_column(column, "--labels")
            for role, values in reader.read_obs((*ROLES, IS_CONTROL)).items():
                roles[str(role)] = values
            yield OpenDataset(reader, vectors, roles)
