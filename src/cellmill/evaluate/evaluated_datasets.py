"""Datasets under evaluation: their files, and the contents of an open dataset."""

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
    labels: list[str]  # obs columns of labels
    external: Sequence[Path] = ()  # files of embeddings by models of other packages


def is_label(role: str) -> bool:
    """True for the roles of labels: `label`, `label 2`, and so on."""
    return role.partition(" ")[0] == "label"


class OpenDataset(NamedTuple):
    """A dataset with an open file. `task.Context` describes the fields, which it has too."""

    reader: CountsReader
    vectors: np.ndarray
    roles: dict[str, pd.Series]


@dataclass(frozen=True)
class EvaluatedDatasets:
    """Datasets by name. Their embeddings must come from the evaluated model."""

    files: Mapping[str, DatasetFiles]  # by name of the dataset
    digest: str  # SHA-256 of the model's weights
    width: int  # width of the model's vectors
    embedder: str | None = None  # `digest_embedder` of the model

    @contextmanager
    def open(self, name: str) -> Iterator[OpenDataset]:
        """Open the dataset `name`.

        The roles of a dataset are its label columns, and each obs column that stage preprocess has named
        after a role. Raises DataError for a damaged file, or for an embedding by another model.
        """
        files = self.files[name]
        with open_dataset(files.cells) as reader:
            names = reader.obs_names
            vectors = read_embedding(files.embedding, names, self.digest, self.width, self.embedder)
            roles = {}
            for number, column in enumerate(files.labels, start=1):
                role = "label" if number == 1 else f"label {number}"
                roles[role] = reader.obs_column(column, "--labels")
            for role, values in reader.read_obs((*ROLES, IS_CONTROL)).items():
                roles[str(role)] = values
            yield OpenDataset(reader, vectors, roles)
