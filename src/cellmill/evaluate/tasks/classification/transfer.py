"""Task `transfer`: classifiers of a label, fitted on some datasets and tested on another
(docs/evaluation.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import TransferConfig
from cellmill.data.arrays import gene_counts, log_normalise, select_columns
from cellmill.data.genes.tables import RELEASE, cell_ontology, is_term_id
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.classifiers.ceiling import predict_ceiling_labels
from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.classifiers.fitted import (
    make_cached_classifiers,
    predict_all,
    predict_majority,
    without_overhead,
)
from cellmill.evaluate.evaluated_datasets import is_label
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.cell_features import read_rows
from cellmill.evaluate.features.chosen_genes import RankScores
from cellmill.evaluate.features.components import COMPONENTS, pca
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.inference.label_counts import count_by_label
from cellmill.evaluate.labels import MAX_LABELLED_CELLS, choose_cells
from cellmill.evaluate.methods import (
    EMBEDDING,
    FULL_PANEL,
    MAJORITY,
    RANKED,
    TRAINING_COMPONENTS,
    UNTRAINED,
    Features,
    add_note,
    stack_cells,
)
from cellmill.evaluate.scores import ScoreColumn, table_rows, tabulate
from cellmill.evaluate.seconds.sizes import DatasetSizes
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.runs.results import ScoredMethod, TaskResult

KNOWN = "known labels"
NEW = "new labels"
SHARED_GENES = ScoredMethod("all shared genes")
MAX_LISTED = 3  # labels of each side in a message
MIN_JUDGED = 10  # fewest tested cells for a column to get intervals and verdicts


@dataclass(frozen=True)
class CellGroup:
    """Labelled cells of one dataset."""

    column: str  # obs column of the labels
    context: Context  # context of the dataset, whose file may be closed
    # name of each column: the model's, else the file's; empty if it is not a gene
    gene_names: list[str]
    left_out: dict[str, int]  # cells that are left out, by reason
    cells: np.ndarray  # indices of the cells in the dataset, ascending
    counts: sp.csr_matrix  # `(cells, genes of the file)`
    labels: np.ndarray  # class of each cell; text

    @classmethod
    def read(cls, context: Context, label: pd.Series, candidates: np.ndarray) -> Self:
        """The labelled cells among the indices `candidates`, ascending."""
        chosen = choose_cells(label.iloc[candidates], 1, context.options.seed)
        reader = context.reader
        gene_ids = context.model.vocabulary.gene_ids
        _ = context.levels  # read while the file is open; cells are embedded later
        cells = candidates[chosen.cells]
        gene_names = []
        columns = zip(context.gene_columns.target, reader.var_names, context.gene_columns.measured)
        for row, name, is_measured in columns:
            file_name = name if is_measured else ""
            gene_names.append(gene_ids[row] if row >= 0 else file_name)
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
        """Counts of `genes`, each of which the group has: `(cells, genes)`."""
        position = {gene: index for index, gene in enumerate(genes)}
        target = np.array([position.get(name, -1) for name in self.gene_names], np.int32)
        counts = gene_counts(self.counts, self.context.gene_columns.ordered)
        return select_columns(counts, target, len(genes))


@dataclass(frozen=True)
class TransferCells:
    """Cells to fit on and to test."""

    fitted: list[CellGroup]
    tested: CellGroup
    genes: list[str]  # genes that all groups have
    n_copies: int  # tested cells that are left out, because they equal a fitted cell

    @cached_property
    def fitted_labels(self) -> np.ndarray:
        """Class of each fitted cell; text."""
        return np.concatenate([group.labels for group in self.fitted])

    @cached_property
    def is_known(self) -> np.ndarray:
        """Mask of the tested cells that have a fitted label."""
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


class Transfer(Task):
    config: TransferConfig

    def run(self, context: Context) -> TaskResult:
        """Scores of the dataset's cells; skipped for datasets that are not tested, and without a
        label in common.
        """
        config = self.config
        if context.dataset in config.fit_on:
            raise Skipped("the classifiers are fitted on it")
        if config.test_on is not None and context.dataset not in config.test_on:
            raise Skipped("it is not in evaluate.tasks.transfer.test_on")
        if "label" not in context.roles:
            raise Skipped("the dataset has no label column")
        transfer_cells = self._read_cells(context)
        figures = transfer_cells.figures
        are_terms = config.ontology and _are_term_ids(
            [*transfer_cells.fitted, transfer_cells.tested]
        )
        fitted_names = count_by_label(transfer_cells.fitted_labels)
        if len(fitted_names) < 2:
            n_labels = "one" if fitted_names else "no"
            raise Skipped(f"the cells of {figures['fitted_on']} have {n_labels} label", figures)
        is_known = transfer_cells.is_known
        if not len(is_known):
            raise Skipped(
                f"no cell is left to test: of {int(context.scored.sum()):,} scored cells, {figures['n_copies']:,} "
                f"equal fitted cells and {figures['n_unlabelled']:,} have no label",
                figures,
            )
        if not (is_known.any() or are_terms):
            fitted_labels = list_first([*fitted_names], MAX_LISTED)
            tested_labels = list_first([*figures["new_classes"]], MAX_LISTED)
            reason = f"no label in common: fitted {fitted_labels}, tested {tested_labels}"
            raise Skipped(reason, figures)
        predictions = self._predict(context, transfer_cells)
        return _tabulate_predictions(predictions, figures, are_terms)

    def estimate_s(self, sizes: DatasetSizes) -> float:
        config = self.config
        is_left_out = config.test_on is not None and sizes.dataset not in config.test_on
        if sizes.dataset in config.fit_on or is_left_out:
            return 0.0  # skipped
        # the sizes of the fitted datasets are not known: as large as this one
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        n_fitted = len(config.fit_on) * n
        features_s = sizes.features_s(n) + 2 * n_fitted * sizes.forward_s
        return features_s + sizes.halves_s(n) + 2 * sizes.folds_s(n_fitted, n_fitted, 1)

    def _read_cells(self, context: Context) -> TransferCells:
        """Fitted cells, and tested cells without copies of them."""
        assert context.datasets is not None
        fitted = []
        for name in self.config.fit_on:
            with context.datasets.open(name) as (reader, vectors, roles):
                is_embedded = np.isfinite(vectors).all(axis=1)
                other = replace(
                    context,
                    dataset=name,
                    reader=reader,
                    scored=is_embedded,
                    vectors=vectors,
                    roles=roles,
                    embedding_cost={},
                    external={},
                )
                label = _find_label(roles, context, name)
                fitted.append(CellGroup.read(other, label, np.flatnonzero(is_embedded)))
        scored = np.flatnonzero(context.scored)
        tested = CellGroup.read(context, context.roles["label"], scored)
        genes = find_shared_genes([*fitted, tested])
        fitted_counts = sp.vstack([group.select_genes(genes) for group in fitted], format="csr")
        is_copy = find_copies(fitted_counts, tested.select_genes(genes))
        kept = np.flatnonzero(~is_copy)
        tested = replace(
            tested,
            cells=tested.cells[kept],
            counts=tested.counts[kept],
            labels=tested.labels[kept],
        )
        return TransferCells(fitted, tested, genes, int(is_copy.sum()))

    def _predict(self, context: Context, transfer_cells: TransferCells) -> ClassPredictions:
        """Predicted classes of the tested cells, of fitted and of new labels."""
        tested = transfer_cells.tested
        labels = transfer_cells.fitted_labels
        fitted_features, tested_features = compute_transfer_features(
            context.model, transfer_cells.genes, transfer_cells.fitted, tested
        )
        with without_overhead():
            classifiers = make_cached_classifiers(
                fitted_features, labels, self.config.neighbors, context
            )
            predicted = predict_all(classifiers, tested_features)
        predicted[MAJORITY] = predict_majority(labels, len(tested.labels))
        ceiling_labels = predict_ceiling_labels(context)[tested.cells]
        predictions = ClassPredictions(tested.labels, 1, tuple(np.unique(labels)), ceiling_labels)
        for condition, is_chosen in (
            (KNOWN, transfer_cells.is_known),
            (NEW, ~transfer_cells.is_known),
        ):
            cells = np.flatnonzero(is_chosen)
            if len(cells):
                classes = {method: values[cells] for method, values in predicted.items()}
                predictions.record(condition, 0, cells, classes)
        return predictions


def _find_label(roles: dict[str, pd.Series], context: Context, dataset: str) -> pd.Series:
    """Label column of a fitted dataset: the one named like the tested dataset's label, else the one
    with the same role.
    """
    name = context.roles["label"].name
    same_role = "label"
    # in the run for a further label, "label" is a copy of that role's column, such as "label 2"
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


def find_shared_genes(groups: list[CellGroup]) -> list[str]:
    """Genes that all groups have, sorted: the order of columns in the files does not matter."""
    shared = sorted(set.intersection(*({*group.gene_names} - {""} for group in groups)))
    if not shared:
        *others, path = [str(group.context.reader.path) for group in groups]
        theirs, *_, its = [next(filter(None, group.gene_names), None) for group in groups]
        raise DataError(
            f"{path}: no gene in common with {', '.join(others)}: its first is {its!r}, theirs {theirs!r}; take one of "
            "them out of evaluate.tasks.transfer"
        )
    return shared


def find_copies(fitted: sp.csr_matrix, tested: sp.csr_matrix) -> np.ndarray:
    """Mask of the rows of `tested` that equal a row of `fitted`; empty rows equal none."""

    def rows(counts: sp.csr_matrix) -> list[bytes]:
        genes = counts.indices.astype(np.int64)
        values = counts.data.astype(np.float64)
        bounds = zip(counts.indptr, counts.indptr[1:])
        return [
            genes[first:last].tobytes() + values[first:last].tobytes() for first, last in bounds
        ]

    fitted_rows = {*rows(fitted)} - {b""}
    return np.array([row in fitted_rows for row in rows(tested)], bool)


def _are_term_ids(groups: list[CellGroup]) -> bool:
    """True if labels are ids of the Cell Ontology. Raises DataError if only some are, or one is
    unknown.
    """
    labels = np.concatenate([group.labels for group in groups])
    if not any(map(is_term_id, labels)):
        return False
    for group in groups:
        for name in np.unique(group.labels):
            if name not in cell_ontology():
                raise DataError(
                    f"{group.context.reader.path}: obs column {group.column!r} has {str(name)!r}, no term of the Cell "
                    f"Ontology of {RELEASE}; correct it, leave it empty, or set evaluate.tasks.transfer.ontology to "
                    "false"
                )
    return True


def compute_transfer_features(
    model: EvaluatedModel, genes: list[str], fitted: list[CellGroup], tested: CellGroup
) -> tuple[Features, Features]:
    """Features of fitted and of tested cells, from the counts of `genes`."""
    n_genes = model.vocabulary.n_genes
    rows = model.vocabulary.rows_of(genes).astype(np.int32)
    hidden = np.setdiff1d(np.arange(n_genes), rows)
    groups = [*fitted, tested]
    measured = np.concatenate([group.context.measured_genes for group in groups])
    hides_genes = np.isin(hidden, measured).any()

    def read_features(group: CellGroup) -> Features:
        """Features of a group that are not fitted on other cells."""
        counts = group.select_genes(genes)
        partly_hidden = PartlyHiddenCells.from_context(
            group.context, group.cells, group.counts, hidden
        )
        embedding = group.context.vectors[group.cells]
        features: Features = {EMBEDDING: embedding}
        if hides_genes:
            features = {EMBEDDING: partly_hidden.embed(model.network), FULL_PANEL: embedding}
        features[UNTRAINED] = partly_hidden.embed(model.untrained)
        in_vocabulary = log_normalise(select_columns(counts, rows, n_genes))
        features[TRAINING_COMPONENTS] = model.components.transform(in_vocabulary)
        features[SHARED_GENES] = log_normalise(counts)
        return features

    fitted_features = stack_cells(map(read_features, fitted))
    tested_features = read_features(tested)
    labels = np.concatenate([group.labels for group in fitted])
    _add_fitted_features(fitted_features, tested_features, labels)
    return fitted_features, tested_features


def _add_fitted_features(
    fitted_features: Features, tested_features: Features, labels: np.ndarray
) -> None:
    """Add features that are fitted on the profiles and `labels` of the fitted cells: principal components
    and ranked genes.
    """
    profiles = fitted_features[SHARED_GENES]
    tested_profiles = tested_features[SHARED_GENES]
    if min(profiles.shape) > 1:
        components = ScoredMethod(f"PCA{COMPONENTS} of the fitted cells")
        scaler = StandardScaler(with_mean=False)
        for method, projection in (
            (components, pca(profiles.shape)),
            (add_note(components, ", scaled genes"), make_pipeline(scaler, pca(profiles.shape))),
        ):
            projection.fit(profiles)
            fitted_features[method] = projection.transform(profiles)
            tested_features[method] = projection.transform(tested_profiles)
    n_fitted = len(labels)
    ranks = RankScores(sp.vstack([profiles, tested_profiles], format="csr"))
    ranked = ranks.select(np.arange(n_fitted), labels)
    fitted_features[RANKED] = ranked[:n_fitted]
    tested_features[RANKED] = ranked[n_fitted:]


def _tabulate_predictions(
    predictions: ClassPredictions, figures: dict[str, Any], are_terms: bool
) -> TaskResult:
    """Table of the predictions; `are_terms` is True if labels are ids of the Cell Ontology."""
    columns: list[ScoreColumn] = []
    steps: list[ScoreColumn] = []
    confusion = None
    if KNOWN in predictions.by_condition:
        columns += predictions.metric_columns(KNOWN)
        confusion = predictions.confusion(KNOWN, columns[0].best_model())
    if are_terms:
        figures = figures | {"cell_ontology": RELEASE}
        ontology = cell_ontology()
        columns += _compare_terms(predictions, "nearness", ontology.nearness)
        steps = _compare_terms(predictions, "steps", ontology.steps)
    rows = table_rows(columns)
    for row in rows:
        row.numbers.update({column.heading: column.mean(row.method) for column in steps})
    judged = [
        column for column in columns if np.isfinite(column.scores[MAJORITY]).sum() >= MIN_JUDGED
    ]
    return tabulate(columns, figures, judged, rows=rows, confusion=confusion)


def _compare_terms(
    predictions: ClassPredictions, name: str, measure: Callable[[str, str], float]
) -> list[ScoreColumn]:
    """A column for each condition: `measure` of the true and the predicted term of each cell."""
    terms = predictions.class_names
    # (classes, classes): measure of each true and each predicted class
    pairs = product(map(str, terms), repeat=2)
    table = np.array([float(measure(true, predicted)) for true, predicted in pairs])
    table = table.reshape(len(terms), len(terms))
    columns = []
    for condition in predictions.by_condition:
        heading = name if condition == KNOWN else f"{name}, {condition}"
        scores = predictions.look_up(condition, table)
        columns.append(ScoreColumn(heading, f"{heading} in the Cell Ontology", scores))
    return columns
