"""Cells of task `transfer`: groups of labelled cells of several datasets, and the genes that they share."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.data.arrays import gene_counts, select_columns
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.evaluated_datasets import is_label
from cellmill.evaluate.features.cell_features import read_rows
from cellmill.evaluate.inference.label_counts import count_by_label
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.task import Context


@dataclass(frozen=True)
class CellGroup:
    """Labelled cells of one dataset."""

    column: str  # obs column of the labels
    context: Context  # context of the dataset; the file of its reader may be closed
    # Name of the gene of each column of `counts`. It is the name in the model's vocabulary. A gene that
    # the vocabulary lacks has its name in the file. A column that is no gene has "".
    gene_names: list[str]
    left_out: dict[str, int]  # number of cells that are left out, by reason
    cells: np.ndarray  # (cells,) int64: indices in the dataset, ascending
    counts: sp.csr_matrix  # (cells, columns of the file)
    labels: np.ndarray  # (cells,) text: class of each cell

    @classmethod
    def read(cls, context: Context, label: pd.Series, candidates: np.ndarray) -> Self:
        """Read the cells with a `label` among `candidates` (indices, ascending).

        `label` is an obs column. At most MAX_LABELLED_CELLS cells are drawn (`evaluate/labels.py`).
        """
        chosen = choose_cells(label.iloc[candidates], 1, context.options.seed)
        reader = context.reader
        gene_ids = context.model.vocabulary.gene_ids
        _ = context.levels  # read now, because the file may be closed when cells are embedded
        cells = candidates[chosen.cells]
        gene_names = []
        columns = zip(context.gene_columns.target, reader.var_names, context.gene_columns.measured)
        for vocabulary_row, file_name, is_gene in columns:
            unknown_name = file_name if is_gene else ""
            gene_names.append(gene_ids[vocabulary_row] if vocabulary_row >= 0 else unknown_name)
        return cls(
            column=str(label.name),
            context=context,
            gene_names=gene_names,
            left_out={"n_unlabelled": chosen.n_unlabelled, "n_left_out": chosen.n_left_out},
            cells=cells,
            counts=read_rows(reader, cells),
            labels=chosen.labels,
        )

    def select_genes(self, genes: list[str]) -> sp.csr_matrix:
        """Take the counts of `genes` (names), `(cells, genes)`. The group must have all of these genes."""
        position = {gene: index for index, gene in enumerate(genes)}
        target = np.array([position.get(name, -1) for name in self.gene_names], np.int32)
        counts = gene_counts(self.counts, self.context.gene_columns.ordered)
        return select_columns(counts, target, len(genes))


@dataclass(frozen=True)
class TransferCells:
    """Cells that classifiers are fitted on, and cells that they are tested on."""

    fitted: list[CellGroup]  # one group for each fitted dataset
    tested: CellGroup
    genes: list[str]  # names of the genes that all groups have
    n_copies: int  # number of tested cells that are left out, because they equal a fitted cell

    @classmethod
    def read(cls, context: Context, fit_on: list[str]) -> Self:
        """Read the cells of the datasets `fit_on`, and the scored cells of the dataset of `context`.

        All cells with an embedding are fitted, also those that the model was trained on. A tested cell is
        left out if a fitted cell has the same counts of all shared genes.
        """
        assert context.datasets is not None
        fitted = []
        for name in fit_on:
            with context.datasets.open(name) as (reader, vectors, roles):
                is_embedded = np.isfinite(vectors).all(axis=1)
                fitted_context = replace(
                    context,
                    dataset=name,
                    reader=reader,
                    roles=roles,
                    scored=is_embedded,
                    vectors=vectors,
                    embedding_cost={},
                    external={},
                )
                label = _find_labels(roles, context, name)
                candidates = np.flatnonzero(is_embedded)
                fitted.append(CellGroup.read(fitted_context, label, candidates))
        scored = np.flatnonzero(context.scored)
        tested = CellGroup.read(context, context.roles["label"], scored)

        # leave out copies of fitted cells
        genes = find_shared_genes([*fitted, tested])
        fitted_counts = sp.vstack([group.select_genes(genes) for group in fitted], format="csr")
        is_copy = find_copies(fitted_counts, tested.select_genes(genes))
        kept = np.flatnonzero(~is_copy)
        tested = replace(
            tested, cells=tested.cells[kept], counts=tested.counts[kept], labels=tested.labels[kept]
        )
        return cls(fitted, tested, genes, int(is_copy.sum()))

    @cached_property
    def fitted_labels(self) -> np.ndarray:
        """Class of each fitted cell, `(fitted cells,)` text. Groups follow each other."""
        return np.concatenate([group.labels for group in self.fitted])

    @cached_property
    def is_known(self) -> np.ndarray:
        """True for tested cells with a label that a fitted cell has, `(tested cells,)` bool."""
        return np.isin(self.tested.labels, self.fitted_labels)

    @property
    def figures(self) -> dict[str, Any]:
        """Numbers of cells, for metrics.json."""
        is_known = self.is_known
        tested_labels = self.tested.labels
        return self.tested.left_out | {
            "fitted_on": ", ".join(group.context.dataset for group in self.fitted),
            "n_fitted": len(self.fitted_labels),
            "fitted_classes": count_by_label(self.fitted_labels),
            "shared_genes": len(self.genes),
            "n_cells": int(is_known.sum()),
            "classes": count_by_label(tested_labels[is_known]),
            "new_classes": count_by_label(tested_labels[~is_known]),
            "n_cells_of_new_classes": int((~is_known).sum()),
            "n_copies": self.n_copies,
        }


def find_shared_genes(groups: list[CellGroup]) -> list[str]:
    """List the names of the genes that all groups have, sorted.

    The result does not depend on the order of the columns in the files. Raises DataError if there is no
    such gene. The last group is the tested one.
    """
    shared = sorted(set.intersection(*({*group.gene_names} - {""} for group in groups)))
    if not shared:
        *fitted, tested = [str(group.context.reader.path) for group in groups]
        # the first gene of the first fitted group and of the tested group; None without any gene
        theirs, *_, its = [next(filter(None, group.gene_names), None) for group in groups]
        raise DataError(
            f"{tested}: no gene in common with {', '.join(fitted)}: its first is {its!r}, theirs {theirs!r}; take one "
            "of them out of evaluate.tasks.transfer"
        )
    return shared


def find_copies(fitted: sp.csr_matrix, tested: sp.csr_matrix) -> np.ndarray:
    """Find the rows of `tested` that equal a row of `fitted`, `(rows of tested,)` bool.

    A row without counts equals no other row.
    """

    def convert_rows(counts: sp.csr_matrix) -> list[bytes]:
        # rows are equal if the bytes of their genes and values are equal
        genes = counts.indices.astype(np.int64)
        values = counts.data.astype(np.float64)
        bounds = zip(counts.indptr, counts.indptr[1:])
        return [
            genes[first:last].tobytes() + values[first:last].tobytes() for first, last in bounds
        ]

    fitted_rows = {*convert_rows(fitted)} - {b""}
    return np.array([row in fitted_rows for row in convert_rows(tested)], bool)


def _find_labels(roles: dict[str, pd.Series], context: Context, dataset: str) -> pd.Series:
    """Find the label column of a fitted dataset among its `roles`.

    It is the label column with the name of the tested dataset's label column, which `context` has. If
    there is none, it is the column with the same role. Raises ConfigError if the role is missing too.
    `dataset` is the name of the fitted dataset, for the message.
    """
    name = context.roles["label"].name
    # The same role is "label". But in a run for a further label, such as "label 2", the column of "label 2"
    # is also in role "label". Then the same role is "label 2".
    same_role = "label"
    for role, column in context.roles.items():
        if is_label(role) and column.name == name:
            same_role = role
    for role, column in roles.items():
        if is_label(role) and column.name == name:
            return column
    label = roles.get(same_role)
    if label is None:
        raise ConfigError(
            f"evaluate.tasks.transfer.fit_on: {dataset!r} has no label for {name!r} of {context.dataset!r}; name "
            "its obs column in the table of datasets, or take it out of fit_on"
        )
    return label
