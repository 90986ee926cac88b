"""Task `transfer`: classifiers of a label that are fitted on some datasets and tested on another.

They are fitted on the labelled cells of `fit_on`, even if the model was trained on these, and tested on the scored
cells of each other dataset. Features are the embedding, the same architecture untrained, and baselines of the genes
that all these datasets have, matched by the names of the model's genes where it knows them: all shared genes, principal
components of the fitted cells (of log counts and of scaled ones), and of the model's training cells. Scales, components
and classifiers are fitted without the tested cells. A tested cell with the same counts as a fitted cell in all shared
genes is left out and counted.

Accuracy and F1 cover cells whose label is among the fitted ones. Cells of other labels are counted by name, because no
classifier can get them right.

Where labels are ids of the Cell Ontology, a predicted id is also compared with the true one in the ontology
(`cellmill.data.genes.tables`). Nearness, the superclasses common to both divided by those of either, is 1 for the same
id and falls with distance; steps are the is_a edges between them, lower is better. By these measures cells of other
labels have a score too (`nearness, new labels`): how near the predicted class is.

Columns of fewer than 10 tested cells have no verdict. Intervals of differences are over the tested cells
(`evaluate.scores`); they do not cover other fitted cells, donors or platforms.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from cellmill.config.parts.tasks import TransferConfig
from cellmill.data.arrays import log_normalise, select_columns, summed
from cellmill.data.genes.names import match_columns
from cellmill.data.genes.tables import RELEASE, CellOntology, cell_ontology, is_term_id
from cellmill.errors import ConfigError, DataError
from cellmill.evaluate.features import Features, fit_all, read_rows
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.scores import (
    EMBEDDING,
    NOT_TESTED,
    UNTRAINED,
    Predictions,
    ScoreColumn,
    against_best,
    differences,
    table_rows,
)
from cellmill.evaluate.task import COMPONENTS, Context, EvaluatedModel, TaskResult
from cellmill.evaluate.tasks.classify import MAJORITY, METRICS

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


KNOWN, NEW = "known labels", "new labels"
FEWEST_JUDGED = 10  # tested cells of a column with intervals and verdicts: those of one or two cells say nothing


class Transfer:
    def __init__(self, config: TransferConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Scores of the dataset's cells; skipped for datasets that are not tested, and without a label in common."""
        if skipped := self._not_tested(context):
            return TaskResult(skipped=skipped)
        label = context.roles["label"]
        fitted, columns = self._fitted(context)
        tested, left_out = _tested(context, label)
        genes = shared_genes([*fitted, tested])
        same = copies(sp.vstack([group.over(genes) for group in fitted], format="csr"), tested.over(genes))
        tested, labels = tested.without(same), np.concatenate([group.labels for group in fitted])
        known = np.isin(tested.labels, labels)
        figures: dict[str, Any] = left_out | {
            "fitted_on": ", ".join(self.config.fit_on),
            "n_fitted": len(labels),
            "fitted_classes": _tally(labels),
            "shared_genes": len(genes),
            "n_cells": int(known.sum()),
            "classes": _tally(tested.labels[known]),
            "new_classes": _tally(tested.labels[~known]),
            "n_new_classes": int((~known).sum()),
            "n_copies": int(same.sum()),
        }
        print(f"{context.dataset}: transfer: {len(labels):,} cells of {figures['fitted_on']} fitted", flush=True)
        if (~known).any():
            new = ", ".join(f"{name} {n:,}" for name, n in figures["new_classes"].items())
            print(f"{context.dataset}: transfer: labels without a fitted cell: {new}", flush=True)
        if len(figures["fitted_classes"]) < 2:
            return TaskResult(figures=figures, skipped=f"the cells of {figures['fitted_on']} have one label")
        ids = _are_ids([*fitted, tested], columns, label, self.config.ontology)
        if not (known.any() or (ids and len(known))):
            theirs, own = ", ".join([*figures["fitted_classes"]][:3]), ", ".join([*figures["new_classes"]][:3])
            return TaskResult(figures=figures, skipped=f"no label in common: fitted {theirs}, tested {own or 'none'}")
        predictions = self._predictions(context, fitted, tested, genes, known)
        return _result(predictions, figures, ids)

    def _not_tested(self, context: Context) -> str:
        if context.dataset in self.config.fit_on:
            return "the classifiers are fitted on it"
        if self.config.test_on is not None and context.dataset not in self.config.test_on:
            return "it is not in evaluate.tasks.transfer.test_on"
        return "" if "label" in context.roles else "the dataset has no label column"

    def _fitted(self, context: Context) -> tuple[list[CellGroup], list[pd.Series]]:
        """Labelled cells of each dataset of `fit_on`, and its label column."""
        groups, columns = [], []
        assert context.datasets is not None
        with ExitStack() as stack:
            for name in self.config.fit_on:
                opened = stack.enter_context(context.datasets.open(name))
                column = _label_of(opened.roles, context, name)
                embedded = np.flatnonzero(np.isfinite(opened.vectors).all(axis=1))
                chosen = choose_cells(column.iloc[embedded], 1, context.options.seed)
                other = replace(context, dataset=name, reader=opened.reader, vectors=opened.vectors, roles=opened.roles)
                groups.append(CellGroup.of(other, embedded[chosen.cells], chosen.labels))
                columns.append(column)
        return groups, columns

    def _predictions(
        self, context: Context, fitted: list[CellGroup], tested: CellGroup, genes: list[str], known: np.ndarray
    ) -> Predictions:
        """Of cells of known labels and of new ones, under these two conditions."""
        labels = np.concatenate([group.labels for group in fitted])
        seen, asked = transfer_features(context.model, genes, fitted, tested)
        predictions = Predictions(tested.labels, 1, tuple(np.unique(labels)))
        frequent = DummyClassifier(strategy="most_frequent").fit(labels, labels).predict(tested.labels)
        with threadpool_limits(1):  # small problems: threads cost more than they save
            predicted = {
                name: classifier.predict(asked[name.partition(" + ")[0]])
                for name, classifier in fit_all(seen, labels, self.config.neighbors, context.baselines).items()
            }
        for name, classes in (predicted | {MAJORITY: frequent}).items():
            for condition, cells in ((KNOWN, np.flatnonzero(known)), (NEW, np.flatnonzero(~known))):
                if len(cells):
                    predictions.record(condition, name, 0, cells, classes[cells])
        return predictions


def _tested(context: Context, label: pd.Series) -> tuple[CellGroup, dict[str, Any]]:
    """Labelled cells among the scored ones, and numbers of those left out."""
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(label.iloc[scored], 1, context.options.seed)
    left_out = {"n_unlabelled": chosen.n_unlabelled, "n_left_out": chosen.n_left_out}
    return CellGroup.of(context, scored[chosen.cells], chosen.labels), left_out


def _label_of(roles: dict[str, pd.Series], context: Context, dataset: str) -> pd.Series:
    """Label column of a fitted dataset: the one called as that of the tested dataset, else the one in its position."""
    name = context.roles["label"].name
    labels = {role: column for role, column in roles.items() if role.partition(" ")[0] == "label"}
    for column in labels.values():
        if column.name == name:
            return column
    positions = [r for r, c in context.roles.items() if r.startswith("label ") and c.name == name]
    position = (positions or ["label"])[0]
    if position not in labels:
        raise ConfigError(
            f"evaluate.tasks.transfer.fit_on: {dataset!r} has no label for {name!r} of {context.dataset!r}; name "
            "its obs column in the table of datasets, or take it out of fit_on"
        )
    return labels[position]


def _are_ids(groups: list[CellGroup], columns: list[pd.Series], label: pd.Series, wanted: bool) -> bool:
    """True where labels are ids of the Cell Ontology. Raises DataError where only some are, or one is unknown."""
    if not wanted or not any(is_term_id(name) for group in groups for name in group.labels):
        return False
    for group, column in zip(groups, [*columns, label]):
        for name in np.unique(group.labels):
            if name not in cell_ontology():
                raise DataError(
                    f"{group.path}: obs column {column.name!r} has {str(name)!r}, no term of the Cell Ontology of "
                    f"{RELEASE}; correct it, leave it empty, or set evaluate.tasks.transfer.ontology to false"
                )
    return True


def _result(predictions: Predictions, figures: dict[str, Any], ids: bool) -> TaskResult:
    columns: list[ScoreColumn] = []
    confusion = None
    if KNOWN in predictions.by_condition:
        columns += [predictions.column(KNOWN, metric, metric, words) for metric, words in METRICS.items()]
        confusion = predictions.confusion(KNOWN, columns[0].best(own=True))
    steps: list[ScoreColumn] = []
    if ids:
        figures = figures | {"cell_ontology": RELEASE}
        for condition in predictions.by_condition:
            ending = "" if condition == KNOWN else f", {condition}"
            columns.append(ontology_column(predictions, condition, f"nearness{ending}", CellOntology.nearness))
            steps.append(ontology_column(predictions, condition, f"steps{ending}", CellOntology.steps))
    rows = table_rows(columns)
    for row in rows:
        row |= {column.heading: column.mean(row["name"]) for column in steps}
    judged = [column for column in columns if np.isfinite(column.scores[MAJORITY]).sum() >= FEWEST_JUDGED]
    compared = differences(judged)
    return TaskResult(
        rows, columns[0].heading, against_best(judged), figures, differences=compared, confusion=confusion
    )


def ontology_column(predictions: Predictions, condition: str, heading: str, measure: Any) -> ScoreColumn:
    """`measure` (a method of CellOntology) of the true and the predicted id of each cell."""
    terms, ontology = predictions.classes, cell_ontology()
    table = np.array([[float(measure(ontology, str(a), str(b))) for b in terms] for a in terms])
    truth = np.searchsorted(terms, predictions.labels)
    scores = {
        name: np.where(classes == NOT_TESTED, np.nan, table[truth, classes])
        for name, classes in predictions.by_condition[condition].items()
    }
    return ScoreColumn(heading, f"{heading} in the Cell Ontology", scores)


def _tally(labels: np.ndarray) -> dict[str, int]:
    names, counts = np.unique(labels, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {str(names[at]): int(counts[at]) for at in order}
