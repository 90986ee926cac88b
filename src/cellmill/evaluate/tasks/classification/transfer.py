"""Task `transfer`: classifiers of a label, fitted on some datasets and tested on another dataset.

The features of cells are computed from the shared genes, which all these datasets have. A tested cell has a
*known* label if a fitted cell has the same label, otherwise a *new* label. Accuracy and F1 are for cells
with known labels. If labels are ids of the Cell Ontology, cells with new labels are scored too, by how
near the predicted term is to the true term. docs/evaluation.md describes the task.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import TransferConfig
from cellmill.data.arrays import log_normalise, select_columns
from cellmill.data.genes.tables import RELEASE, cell_ontology, is_term_id
from cellmill.data.prepare.qc_lines import list_first
from cellmill.errors import DataError
from cellmill.evaluate.classifiers.ceiling import predict_ceiling_labels
from cellmill.evaluate.classifiers.class_predictions import ClassPredictions
from cellmill.evaluate.classifiers.fitted import (
    make_cached_classifiers,
    predict_all,
    predict_majority,
    without_overhead,
)
from cellmill.evaluate.evaluated_model import EvaluatedModel
from cellmill.evaluate.features.chosen_genes import RankScores
from cellmill.evaluate.features.components import COMPONENTS, pca
from cellmill.evaluate.hidden_genes.partly_hidden_cells import PartlyHiddenCells
from cellmill.evaluate.inference.label_counts import count_by_label
from cellmill.evaluate.labels import MAX_LABELLED_CELLS
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
from cellmill.evaluate.tasks.classification.transfer_cells import CellGroup, TransferCells
from cellmill.runs.results import ScoredMethod, TaskResult

# conditions of `ClassPredictions`: tested cells with a label that a fitted cell has, and all others
KNOWN = "known labels"
NEW = "new labels"
SHARED_GENES = ScoredMethod("all shared genes")
MAX_LISTED = 3  # a message lists at most this many labels of fitted and of tested cells
MIN_JUDGED = 10  # a column needs at least this many tested cells to get intervals and verdicts


class Transfer(Task):
    config: TransferConfig

    def run(self, context: Context) -> TaskResult:
        """Score each pair of features and classifier on the cells of the dataset.

        Raises Skipped if the dataset is not to be tested, or if there is no cell or label to score.
        """
        config = self.config
        if context.dataset in config.fit_on:
            raise Skipped("the classifiers are fitted on it")
        if config.test_on is not None and context.dataset not in config.test_on:
            raise Skipped("it is not in evaluate.tasks.transfer.test_on")
        if "label" not in context.roles:
            raise Skipped("the dataset has no label column")

        # read the cells, and find out whether they can be scored
        transfer_cells = TransferCells.read(context, config.fit_on)
        figures = transfer_cells.figures
        groups = [*transfer_cells.fitted, transfer_cells.tested]
        are_terms = config.ontology and _are_term_ids(groups)
        fitted_classes = count_by_label(transfer_cells.fitted_labels)
        if len(fitted_classes) < 2:
            n_labels = "one" if fitted_classes else "no"
            raise Skipped(f"the cells of {figures['fitted_on']} have {n_labels} label", figures)
        is_known = transfer_cells.is_known
        if not len(is_known):
            raise Skipped(
                f"no cell is left to test: of {int(context.scored.sum()):,} scored cells, {figures['n_copies']:,} "
                f"equal fitted cells and {figures['n_unlabelled']:,} have no label",
                figures,
            )
        if not (is_known.any() or are_terms):
            fitted_labels = list_first([*fitted_classes], MAX_LISTED)
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
        # the sizes of the fitted datasets are not known; each is taken to be as large as this dataset
        n = sizes.count_cells(MAX_LABELLED_CELLS)
        n_fitted = len(config.fit_on) * n
        features_s = sizes.features_s(n) + 2 * n_fitted * sizes.forward_s
        return features_s + sizes.halves_s(n) + 2 * sizes.folds_s(n_fitted, n_fitted, 1)

    def _predict(self, context: Context, transfer_cells: TransferCells) -> ClassPredictions:
        """Predict the classes of the tested cells, in the conditions KNOWN and NEW.

        A condition without cells is left out.
        """
        tested = transfer_cells.tested
        labels = transfer_cells.fitted_labels
        fitted_features, tested_features = compute_transfer_features(context.model, transfer_cells)
        with without_overhead():
            classifiers = make_cached_classifiers(
                fitted_features, labels, self.config.neighbors, context
            )
            predicted = predict_all(classifiers, tested_features)
        predicted[MAJORITY] = predict_majority(labels, len(tested.labels))
        ceiling_labels = predict_ceiling_labels(context)[tested.cells]

        # record the predictions for cells with known and for cells with new labels
        predictions = ClassPredictions(tested.labels, 1, tuple(np.unique(labels)), ceiling_labels)
        is_known = transfer_cells.is_known
        for condition, has_condition in ((KNOWN, is_known), (NEW, ~is_known)):
            cells = np.flatnonzero(has_condition)
            if len(cells):
                classes = {method: values[cells] for method, values in predicted.items()}
                predictions.record(condition, 0, cells, classes)
        return predictions


def _are_term_ids(groups: list[CellGroup]) -> bool:
    """True if the labels of the groups are ids of the Cell Ontology.

    False if no label is an id. Raises DataError if some labels are ids and another is not, or if the
    release of the ontology lacks an id.
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
    model: EvaluatedModel, transfer_cells: TransferCells
) -> tuple[Features, Features]:
    """Compute the features of fitted cells and of tested cells, from the counts of the shared genes.

    All other genes are hidden from the model. If a dataset measures a hidden gene, there is also FULL_PANEL:
    the vectors of cells with all genes of their dataset.
    """
    genes = transfer_cells.genes
    groups = [*transfer_cells.fitted, transfer_cells.tested]
    n_genes = model.vocabulary.n_genes
    # (genes,) int32: row of each gene in the vocabulary, -1 if the vocabulary lacks the gene
    rows = model.vocabulary.rows_of(genes)
    hidden = np.setdiff1d(np.arange(n_genes), rows)
    measured = np.concatenate([group.context.measured_genes for group in groups])
    hides_measured_genes = np.isin(hidden, measured).any()

    def compute_unfitted_features(group: CellGroup) -> Features:
        """Compute the features that are not fitted on cells of this task."""
        # vectors of the model; with hidden genes, they differ from the embedding that stage embed made
        context = group.context
        visible = PartlyHiddenCells.from_context(context, group.cells, group.counts, hidden)
        embedding = context.vectors[group.cells]
        features: Features = {EMBEDDING: embedding}
        if hides_measured_genes:
            features = {EMBEDDING: visible.embed(model.network), FULL_PANEL: embedding}
        features[UNTRAINED] = visible.embed(model.untrained)

        # profiles of the shared genes, and their components
        counts = group.select_genes(genes)
        in_vocabulary = log_normalise(select_columns(counts, rows, n_genes))
        features[TRAINING_COMPONENTS] = model.components.transform(in_vocabulary)
        features[SHARED_GENES] = log_normalise(counts)
        return features

    fitted_features = stack_cells(map(compute_unfitted_features, transfer_cells.fitted))
    tested_features = compute_unfitted_features(transfer_cells.tested)
    _add_fitted_features(fitted_features, tested_features, transfer_cells.fitted_labels)
    return fitted_features, tested_features


def _add_fitted_features(
    fitted_features: Features, tested_features: Features, labels: np.ndarray
) -> None:
    """Add features that are fitted on the fitted cells: principal components and ranked genes.

    They are computed from feature SHARED_GENES, and added to both `fitted_features` and `tested_features`.
    `labels`, `(fitted cells,)`, choose the ranked genes.
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

    # the ranks of a cell do not depend on other cells; only fitted cells choose the genes
    n_fitted = len(labels)
    ranks = RankScores(sp.vstack([profiles, tested_profiles], format="csr"))
    ranked = ranks.select(np.arange(n_fitted), labels)
    fitted_features[RANKED] = ranked[:n_fitted]
    tested_features[RANKED] = ranked[n_fitted:]


def _tabulate_predictions(
    predictions: ClassPredictions, figures: dict[str, Any], are_terms: bool
) -> TaskResult:
    """Make the result of the task from the predictions.

    `are_terms` is True if labels are ids of the Cell Ontology. Then there are columns of the nearness of
    terms. Rows also have the mean number of steps between terms, which gets no verdict.
    """
    columns: list[ScoreColumn] = []
    steps: list[ScoreColumn] = []
    confusion = None
    # accuracy and F1 of cells with known labels
    if KNOWN in predictions.by_condition:
        columns += predictions.metric_columns(KNOWN)
        confusion = predictions.confusion(KNOWN, columns[0].best_model())
    if are_terms:
        figures = figures | {"cell_ontology": RELEASE}
        ontology = cell_ontology()
        columns += _make_term_columns(predictions, "nearness", ontology.nearness)
        steps = _make_term_columns(predictions, "steps", ontology.steps)
    rows = table_rows(columns)
    for row in rows:
        row.numbers.update({column.heading: column.mean(row.method) for column in steps})
    # a column of few cells is shown without verdicts
    judged = [
        column for column in columns if np.isfinite(column.scores[MAJORITY]).sum() >= MIN_JUDGED
    ]
    return tabulate(columns, figures, judged, rows=rows, confusion=confusion)


def _make_term_columns(
    predictions: ClassPredictions, name: str, measure: Callable[[str, str], float]
) -> list[ScoreColumn]:
    """Make a column for each condition, KNOWN and NEW, with scores of predicted terms.

    The score of a cell is `measure` of its true and its predicted term. `name` is the name of the measure.
    """
    terms = predictions.class_names
    # (classes, classes): measure of each true class, in rows, and each predicted class, in columns
    pairs = product(map(str, terms), repeat=2)
    values = np.array([float(measure(true, predicted)) for true, predicted in pairs])
    table = values.reshape(len(terms), len(terms))
    columns = []
    for condition in predictions.by_condition:
        heading = name if condition == KNOWN else f"{name}, {condition}"
        scores = predictions.look_up(condition, table)
        columns.append(ScoreColumn(heading, f"{heading} in the Cell Ontology", scores))
    return columns
