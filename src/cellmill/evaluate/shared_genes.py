"""Cells of several datasets as features over the genes that all of them have; nothing is fitted on tested cells."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.data.count_matrix import log_normalise, select_columns, summed
from cellmill.data.genes import match_columns
from cellmill.errors import DataError
from cellmill.evaluate.classifiers import read_rows
from cellmill.evaluate.features import Features
from cellmill.evaluate.score_table import EMBEDDING, UNTRAINED
from cellmill.evaluate.task import COMPONENTS, Context, EvaluatedModel

ALL_SHARED = "all shared genes"
OF_FITTED = f"PCA{COMPONENTS} of the fitted cells"


@dataclass(frozen=True)
class CellGroup:
    """Labelled cells of one dataset."""

    path: str
    names: list[str]  # of each gene: that of the model, where it knows the gene, else the file's; empty for no gene
    counts: sp.csr_matrix  # `(cells, genes)`
    labels: np.ndarray  # class of each cell; text
    embedding: np.ndarray
    untrained: np.ndarray

    @classmethod
    def of(cls, context: Context, cells: np.ndarray, labels: np.ndarray) -> Self:
        """Those with the indices `cells`, ascending."""
        reader, known = context.reader, context.model.vocabulary.gene_ids
        counts = read_rows(reader, np.isin(np.arange(reader.n_obs), cells))
        features, columns = Features(context), match_columns(reader, context.model.vocabulary)
        names = [
            known[row] if row >= 0 else name if measured else ""
            for row, name, measured in zip(columns.target, reader.var_names, columns.measured)
        ]
        untrained, profiles = features.untrained(counts), summed(counts) if columns.ordered else counts
        return cls(str(reader.path), names, profiles, labels, context.vectors[cells], untrained)

    def without(self, cells: np.ndarray) -> Self:
        """The group without those of mask `cells`."""
        kept = np.flatnonzero(~cells)
        return type(self)(
            self.path, self.names, self.counts[kept], self.labels[kept], self.embedding[kept], self.untrained[kept]
        )

    def over(self, genes: list[str]) -> sp.csr_matrix:
        """Counts of `genes`, each of which the group has: `(cells, genes)`."""
        place = {gene: at for at, gene in enumerate(genes)}
        target = np.array([place.get(name, -1) for name in self.names], np.int32)
        return select_columns(self.counts, target, len(genes))


def shared_genes(groups: list[CellGroup]) -> list[str]:
    """Genes that all groups have, sorted: the order of columns in the files does not matter."""
    of_groups = [{*group.names} - {""} for group in groups]
    shared = sorted(set.intersection(*of_groups))
    if not shared:
        raise DataError(
            f"{groups[-1].path}: no gene in common with {', '.join(group.path for group in groups[:-1])}: its first is "
            f"{groups[-1].names[0]!r}, theirs {groups[0].names[0]!r}; take one of them out of evaluate.tasks.transfer"
        )
    return shared


def copies(fitted: sp.csr_matrix, tested: sp.csr_matrix) -> np.ndarray:
    """Mask of the rows of `tested` that have counts, and the same ones as a row of `fitted`."""
    known = {*_rows(fitted)}
    return np.array([row in known and row != b"" for row in _rows(tested)], bool)


def _rows(counts: sp.csr_matrix) -> list[bytes]:
    genes, values = counts.indices.astype(np.int64), counts.data.astype(np.float64)
    bounds = zip(counts.indptr, counts.indptr[1:])
    return [genes[first:last].tobytes() + values[first:last].tobytes() for first, last in bounds]


def transfer_features(
    model: EvaluatedModel, genes: list[str], fitted: list[CellGroup], tested: CellGroup
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Features by name, `(cells, width)`, of the cells that classifiers are fitted on and of the tested ones.

    Baselines are made of the counts of `genes`; components and scales are fitted on `fitted`, or on training cells of
    the model.
    """
    counts = sp.vstack([group.over(genes) for group in fitted], format="csr"), tested.over(genes)
    profiles = log_normalise(counts[0]), log_normalise(counts[1])
    rows = model.vocabulary.rows_of(genes).astype(np.int32)
    known = [log_normalise(select_columns(part, rows, model.vocabulary.n_genes)) for part in counts]
    made: dict[str, Any] = {
        EMBEDDING: (np.concatenate([group.embedding for group in fitted]), tested.embedding),
        UNTRAINED: (np.concatenate([group.untrained for group in fitted]), tested.untrained),
        f"PCA{COMPONENTS} of the training cells": tuple(model.components.transform(part) for part in known),
    }
    if (n := min(COMPONENTS, counts[0].shape[0] - 1, len(genes) - 1)) > 0:
        plain = PCA(n, svd_solver="arpack", random_state=0).fit(profiles[0])
        made[OF_FITTED] = tuple(plain.transform(part) for part in profiles)
        scaled = make_pipeline(StandardScaler(with_mean=False), PCA(n, svd_solver="arpack", random_state=0))
        scaled.fit(profiles[0])
        made[f"{OF_FITTED}, scaled genes"] = tuple(scaled.transform(part) for part in profiles)
    made[ALL_SHARED] = profiles
    return {name: both[0] for name, both in made.items()}, {name: both[1] for name, both in made.items()}
