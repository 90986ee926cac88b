"""Task `imputation`: prediction of genes that are hidden from the model (docs/evaluation.md).

A hidden gene is treated as one that was not measured: its counts are removed before anything is
computed from a cell, and a model whose tokens include zeros (`tokens.zero_frac`) does not see it as
a zero. Scores are computed within one fold, so that differences between folds do not count as
correlation.

The model's decoder was fitted on the training cells, with the hidden genes as targets. So are the
regressions that it is compared with: on the same cells, the same visible genes and the same
targets. Regressions fitted on folds of the scored cells see other cells, mostly fewer; they are
rows of their own, in no verdict against the model.

Legend: C cells, F columns of the file, V genes of the vocabulary, M measured genes, G hidden genes, H hidden width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from scipy.stats import rankdata
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import KFold
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import ImputationConfig
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.arrays import TARGET_SUM, log_normalise, select_columns
from cellmill.data.genes.names import GeneColumns, rows_of_names
from cellmill.data.shards.reader import read_names
from cellmill.data.stream.batch import Batch, split_batch
from cellmill.errors import DataError
from cellmill.evaluate.components import COMPONENTS, pca
from cellmill.evaluate.evaluated import read_training_counts
from cellmill.evaluate.features import embed_counts, keep_columns, read_rows
from cellmill.evaluate.inference.embed import inference, tokens_of
from cellmill.evaluate.methods import EMBEDDING, KNN, UNTRAINED, add_note
from cellmill.evaluate.scores import ScoreColumn, divide, draw_cells, seeded, tabulate
from cellmill.evaluate.task import Context, Skipped, Task
from cellmill.evaluate.tasks.changes import ALPHAS, expected_log_expression
from cellmill.evaluate.tasks.classify import Split, splits_of
from cellmill.models.batch import PAD_TOKEN, add_tokens, to_tensors
from cellmill.models.family import Model
from cellmill.models.objectives.cell_decoding import CellDecoding
from cellmill.models.objectives.masked import MaskedBatch, MaskedValue
from cellmill.models.objectives.query_decoding import QueryDecoding
from cellmill.parallel.vocab_parallel import token_logits
from cellmill.runs.results import ScoredMethod, TaskResult

# decoded at once, by a profile or by queries
CELLS = 256
QUERIED_CELLS = 32
# hidden genes that masked_value predicts in one pass: about the share of a cell that training masks
WANTED = 64
WANTED_TOKENS = 16_384  # tokens of such a pass, without the wanted ones
METRICS: Mapping[str, str] = {  # headings, and names in words; of MSE alone, lower is better
    "Pearson by gene": "Pearson of a gene over cells",
    "Spearman by gene": "Spearman of a gene over cells",
    "Pearson by cell": "Pearson of a cell over genes",
    "Spearman by cell": "Spearman of a cell over genes",
    "MSE": "mean squared error",
}
# scored cells used at most: they are embedded again, and every gene is predicted in each fold
MAX_CELLS = 2_000
# training cells used at most; shards are shuffled, so the first ones are a random sample
MAX_FITTED = 20_000
FEWEST_CELLS = 4  # of a training or test fold, and of the training cells of one dataset
COMPONENTS_OF_VISIBLE = ScoredMethod(f"PCA{COMPONENTS} of visible genes")
GENE_MEANS = ScoredMethod("gene means")


@dataclass(frozen=True)
class HiddenGenes:
    """Counts of some cells, and the genes that are hidden in all of them."""

    context: Context
    counts: sp.csr_matrix  # (C, F)
    genes: np.ndarray  # (G,) int64: rows of the vocabulary, ascending
    # genes of the columns of `counts`; None: they are the dataset's
    known: GeneColumns | None = None

    @property
    def columns(self) -> GeneColumns:
        return self.context.columns if self.known is None else self.known

    @cached_property
    def visible(self) -> sp.csr_matrix:
        """(C, F): the counts without those of hidden genes."""
        return keep_columns(self.counts, ~np.isin(self.columns.target, self.genes))

    @cached_property
    def profiles(self) -> sp.csr_matrix:
        """(C, V) float32: log(1 + counts per 10,000) of the visible genes that the model knows."""
        return log_normalise(self.of_vocabulary(self.visible))

    def expression(self) -> np.ndarray:
        """(C, G) float32: log(1 + counts per 10,000) of the hidden genes, of all counts of the
        model's genes.
        """
        return np.asarray(log_normalise(self.of_vocabulary(self.counts))[:, self.genes].toarray())

    def tokens(self) -> Iterator[Batch]:
        """Tokens of the visible genes; cells without any are left out."""
        model = self.context.model
        for batch in tokens_of([self.visible], self.columns, model.vocabulary, model.tokens):
            # of zeros, hidden genes have tokens
            yield _keep(batch, ~np.isin(batch.genes, self.genes + len(SPECIAL)))

    def embedded(self, network: Model) -> np.ndarray:
        """(C, H) float32: vectors of the visible part of each cell; zeros for one without any."""
        return embed_counts(self.context, self.counts, network, self.tokens())

    def of_vocabulary(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        """(C, V): counts of the columns of the file, by row of the vocabulary."""
        return select_columns(counts, self.columns.target, self.context.model.vocabulary.n_genes)


def _keep(batch: Batch, kept: np.ndarray) -> Batch:
    """Tokens of mask `kept`, and the cells that have any."""
    ends = np.concatenate([[0], np.cumsum(kept)])[batch.cu_seqlens].astype(np.int32)
    filled = np.diff(ends) > 0
    chosen = {"token": kept, "cell": filled}
    return batch.map(
        lambda per, array: array[chosen[per.axis]],
        cu_seqlens=ends[np.concatenate([[True], filled])],
    )


def own_expression(hidden: HiddenGenes, vectors: np.ndarray) -> np.ndarray | None:
    """(C, G) float32: predicted log(1 + counts per 10,000) from vectors (C, H); None of a model
    that predicts none.
    """
    network: Any = hidden.context.model.network
    device = next(network.parameters()).device
    tokens = torch.from_numpy(hidden.genes + len(SPECIAL))
    with inference(device, hidden.context.options.precision):
        for part in network.objective.leaves().values():
            if isinstance(part, CellDecoding):
                visible = hidden.of_vocabulary(hidden.visible)
                known = hidden.context.measured_genes
                columns = np.searchsorted(known, hidden.genes)
                found = []
                measured = torch.from_numpy(known + len(SPECIAL)).to(device)
                for first in range(0, len(vectors), CELLS):
                    given = torch.from_numpy(vectors[first : first + CELLS]).to(device)
                    predicted = network.decoder(given)
                    logits = token_logits(
                        predicted, network.profile_genes.weight, network.profile_bias
                    )
                    shares = logits[:, measured].double().softmax(1).cpu().numpy()[:, columns]
                    found.append(
                        expression_of_shares(
                            shares, visible[first : first + CELLS], part.predicts_log_counts
                        )
                    )
                return np.concatenate(found).astype(np.float32)
            if isinstance(part, QueryDecoding):
                genes = tokens.to(device)
                found = []
                for given in torch.from_numpy(vectors).split(QUERIED_CELLS):
                    cell = torch.arange(len(given), device=device).repeat_interleave(len(genes))
                    answers = part.predict_queries(
                        network, given.to(device), cell, genes.repeat(len(given))
                    )
                    found.append(answers.view(len(given), len(genes)).cpu().numpy())
                return np.maximum(np.concatenate(found), 0)
        objective = network.objective  # alone: a sum may draw a view
        if not isinstance(objective, MaskedValue) or objective.tokens.value_kind != "scalar":
            return None
        values = np.zeros((hidden.counts.shape[0], len(hidden.genes)), np.float32)
        for batch in (
            part for block in hidden.tokens() for part in split_batch(block, WANTED_TOKENS)
        ):
            tensors = to_tensors(batch, device)
            for first in range(0, len(tokens), WANTED):
                wanted = tokens[first : first + WANTED].to(device)
                prepared = _with_masked(network, tensors, wanted)
                states = network.head(network.states(prepared)[prepared.targets])
                predicted = (
                    objective.predict(network, states, prepared)
                    .float()
                    .view(len(batch.cells), len(wanted))
                )
                values[batch.cells, first : first + WANTED] = predicted.cpu().numpy()
        return np.maximum(values, 0)


def expression_of_shares(shares: np.ndarray, visible: sp.csr_matrix, is_log: bool) -> np.ndarray:
    """(C, G) float64: expected log(1 + counts per 10,000) of hidden genes, of Poisson counts.

    `shares`, (C, G), are their shares in the cell's counts, or if `is_log` in the sum of its log(1
    + count); `visible`, (C, V), are counts of the other genes, which have the rest. The logarithm
    of an expectation would be far larger.
    """
    rest = np.maximum(1 - shares.sum(1), 1e-9)
    depth = np.asarray(visible.sum(axis=1, dtype=np.float64)).ravel()
    if is_log:
        log_depth = np.asarray(visible.astype(np.float64).log1p().sum(axis=1)).ravel()
        # the mean of counts whose expected logarithm is known; with this depth, counts per 10,000
        # are counts
        means = np.concatenate([[0.0], np.logspace(-6, 6, 1200)])
        logs = expected_log_expression(means[None] / TARGET_SUM, np.full(1, TARGET_SUM))[0]
        counts = np.interp(shares * (log_depth / rest)[:, None], logs, means)
    else:
        counts = shares * (depth / rest)[:, None]
    total = depth + counts.sum(1)
    return expected_log_expression(counts / np.maximum(total, 1e-9)[:, None], total)


def _with_masked(network: Model, batch: Batch, wanted: torch.Tensor) -> MaskedBatch:
    """The cells with the genes `wanted`, token ids that none has, behind their own tokens; their
    values are hidden.
    """
    more = add_tokens(batch, 0, len(wanted), PAD_TOKEN)
    ends = more.cu_seqlens[1:, None].long()
    index = (ends - len(wanted) + torch.arange(len(wanted), device=ends.device)).flatten()
    genes = more.genes.index_copy(0, index, wanted.repeat(len(batch.lengths)))
    view = network.view(replace(more, genes=genes), seed=0, step=0)  # with the family's own tokens
    hidden = torch.isin(view.genes, wanted)
    targets = hidden.nonzero().flatten()
    return MaskedBatch.prepared(
        view,
        value_hidden=hidden,
        targets=targets,
        answers=view.values[targets],
        n_targets=torch.tensor(len(targets)),
    )


def expression_scores(predicted: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Scores, (G,) or (C,) float64, of (C, G) each; a correlation with a constant is NaN."""
    predicted = predicted.astype(np.float64)
    seen = seen.astype(np.float64)
    return {
        "Pearson by gene": correlation(predicted, seen),
        "Spearman by gene": correlation(rankdata(predicted, axis=0), rankdata(seen, axis=0)),
        "Pearson by cell": correlation(predicted.T, seen.T),
        "Spearman by cell": correlation(rankdata(predicted, axis=1).T, rankdata(seen, axis=1).T),
        "MSE": np.square(predicted - seen).mean(1),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson of each column of two arrays, NaN where one is constant."""
    x = first - first.mean(0)
    y = second - second.mean(0)
    lengths = np.linalg.norm(x, axis=0), np.linalg.norm(y, axis=0)
    # columns of equal numbers have sums of rounding errors
    varies = (lengths[0] > 1e-9 * np.abs(first).max(0)) & (
        lengths[1] > 1e-9 * np.abs(second).max(0)
    )
    return divide((x * y).sum(0), np.where(varies, lengths[0] * lengths[1], 0))


@dataclass(frozen=True)
class Prediction:
    """Expression of test cells of one fold by one method."""

    method: ScoredMethod
    repetition: int
    n_repetitions: int
    cells: np.ndarray  # indices of the scored cells
    values: np.ndarray  # (cells, G)


@dataclass(frozen=True)
class TrainingCells:
    """Cells that the model was trained on, over the genes that the evaluated dataset measures."""

    hidden: HiddenGenes
    of_dataset: np.ndarray  # cells of the evaluated dataset, bool (C,)

    @classmethod
    def of(cls, hidden: HiddenGenes) -> Self | None:
        """The training cells of the model; None where they have no counts, or are too few."""
        context = hidden.context
        manifest = context.model.manifest
        n_genes = context.model.vocabulary.n_genes
        if manifest.ordered:
            return None
        counts = read_training_counts(manifest, MAX_FITTED)[:MAX_FITTED]
        if counts.shape[0] < FEWEST_CELLS:
            return None
        measured = np.isin(np.arange(n_genes), context.measured_genes)
        columns = GeneColumns(np.where(measured, np.arange(n_genes), -1).astype(np.int32), measured)
        names: list[str] = []
        for shard in manifest.splits["train"].shards:
            if len(names) < counts.shape[0]:
                names += read_names(manifest.shard_path(shard), "obs").tolist()
        own = [name.startswith(f"{context.dataset}:") for name in names[: counts.shape[0]]]
        return cls(HiddenGenes(context, counts, hidden.genes, columns), np.array(own, bool))

    def groups(self) -> dict[str, np.ndarray]:
        """Indices of the cells to fit on, by an ending of the rows' names: all cells and, if other
        datasets are among them, which may lack hidden genes, those of the evaluated dataset.
        """
        n_own = int(self.of_dataset.sum())
        found = {"": np.arange(len(self.of_dataset))}
        if FEWEST_CELLS <= n_own < len(self.of_dataset):
            found[", training cells of the dataset"] = np.flatnonzero(self.of_dataset)
        return found

    def predict(
        self, tested: HiddenGenes, vectors: Mapping[ScoredMethod, np.ndarray], neighbors: int
    ) -> dict[ScoredMethod, np.ndarray]:
        """(C, G) by method: expression of the `tested` cells, whose embeddings are `vectors`."""
        model = self.hidden.context.model
        expression = self.hidden.expression()
        embedded = {
            EMBEDDING: self.hidden.embedded(model.network),
            UNTRAINED: self.hidden.embedded(model.untrained),
        }
        predicted: dict[ScoredMethod, np.ndarray] = {}
        for note, cells in self.groups().items():
            profiles = self.hidden.profiles[cells]
            components = pca((len(cells), self.hidden.profiles.shape[1])).fit(profiles)
            fitted = {add_note(method, note): values[cells] for method, values in embedded.items()}
            given = {add_note(method, note): values for method, values in vectors.items()}
            of_visible = add_note(COMPONENTS_OF_VISIBLE, note)
            fitted[of_visible] = components.transform(profiles)
            given[of_visible] = components.transform(tested.profiles)
            predicted |= regressions(fitted, expression[cells], given, neighbors)
            means = np.tile(expression[cells].mean(0), (tested.counts.shape[0], 1))
            predicted[add_note(GENE_MEANS, note)] = means
        return predicted


def regressions(
    fitted: Mapping[ScoredMethod, np.ndarray],
    expression: np.ndarray,
    tested: Mapping[ScoredMethod, np.ndarray],
    neighbors: int,
) -> dict[ScoredMethod, np.ndarray]:
    """Expression (tested cells, G) by method, of regressions on `expression`, (fitted cells, G).

    `fitted` and `tested` are features, (cells, width). Both scalings: standardising raises the
    weight of small components, which helps or hurts depending on the number of cells.
    """
    n_neighbors = min(neighbors, len(expression))
    predicted: dict[ScoredMethod, np.ndarray] = {}
    for method, values in fitted.items():
        for ending, scaler in (("", StandardScaler()), (", unscaled", None)):
            ridge = make_pipeline(scaler, RidgeCV(ALPHAS)).fit(values, expression)
            nearest = make_pipeline(scaler, KNeighborsRegressor(n_neighbors)).fit(
                values, expression
            )
            for name, regression in ((f"ridge{ending}", ridge), (f"{KNN}{ending}", nearest)):
                predicted[replace(method, classifier=name)] = regression.predict(tested[method])
    return predicted


class Imputation(Task):
    config: ImputationConfig

    def run(self, context: Context) -> TaskResult:
        """Correlations by gene and by cell, and errors. Raises DataError if no listed gene can be
        hidden.
        """
        if context.reader.ordered:
            raise Skipped("sequences and ranks have no expression")
        cells = draw_cells(np.flatnonzero(context.scored), MAX_CELLS, context.options.seed, 9)
        role, folds = self._folds(context, cells)
        if not folds:
            raise Skipped(f"{len(cells)} scored cells make no two folds of {FEWEST_CELLS} or more")
        counts = read_rows(context.reader, cells)
        genes = self._hidden(context, counts)
        if not len(genes):
            wanted = f"hidden_frac {self.config.hidden_frac:g}, min_cells {self.config.min_cells}"
            raise Skipped(f"no gene can be hidden ({wanted}, {len(cells)} scored cells)")
        n_measured = len(context.measured_genes)
        numbers = {
            "n_cells": len(cells),
            "hidden_genes": len(genes),
            "measured_genes": n_measured,
            "folds_of": role,
            "folds": len(folds),
            "neighbors": self.config.neighbors,
        }
        hidden = HiddenGenes(context, counts, genes)
        trained = TrainingCells.of(hidden)
        if trained is not None:
            numbers["training_cells"] = len(trained.of_dataset)
            numbers["training_cells_of_dataset"] = int(trained.of_dataset.sum())
        line = f"{len(genes):,} of {n_measured:,} measured genes are hidden, {len(cells):,} cells, folds of {role}"
        n_fitted = (
            "no training cells with counts"
            if trained is None
            else f"{len(trained.of_dataset):,} training cells"
        )
        print(f"{context.dataset}: imputation: {line}; fitted on {n_fitted}", flush=True)
        columns = self._columns(hidden, self._predictions(hidden, trained, folds))
        judged = [
            column
            for column in columns
            if column.heading != "MSE" and column.of_kind("model") and column.of_kind("baseline")
        ]
        return tabulate(columns, numbers, judged)

    def _folds(self, context: Context, cells: np.ndarray) -> tuple[str, list[Split]]:
        """Role that is left out by value, or cells, and the folds."""
        for role in ("donor", "batch"):
            if role in context.roles:
                pairs = splits_of(context.roles[role].iloc[cells], self.config.most_folds)
                large = [pair for pair in pairs if min(map(len, pair)) >= FEWEST_CELLS]
                if large:
                    return role, [(number, *pair) for number, pair in enumerate(large)]
        options = context.options
        if len(cells) < FEWEST_CELLS * options.folds:
            return "cells", []
        seeds = range(self.config.seeds)
        folded = [
            KFold(options.folds, shuffle=True, random_state=options.seed + repetition)
            for repetition in seeds
        ]
        return "cells", [
            (number, *pair) for number, folds in enumerate(folded) for pair in folds.split(cells)
        ]

    def _hidden(self, context: Context, counts: Any) -> np.ndarray:
        """Rows of the vocabulary to hide, ascending."""
        vocabulary = context.model.vocabulary
        known_counts = select_columns(counts, context.columns.target, vocabulary.n_genes)
        expressed = (
            np.bincount(known_counts.indices, minlength=vocabulary.n_genes) >= self.config.min_cells
        )
        if self.config.genes is None:
            known = np.flatnonzero(expressed)
            n = min(
                round(self.config.hidden_frac * len(known)), self.config.max_genes, len(known) - 1
            )
            return np.sort(seeded(context.options.seed, 10).permutation(known)[: max(n, 0)])
        rows = rows_of_names(self.config.genes, vocabulary)
        known = np.unique([row for row in rows.values() if row >= 0 and expressed[row]]).astype(
            np.int64
        )
        if not 0 < len(known) < len(context.measured_genes):
            raise DataError(
                f"evaluate.tasks.imputation.genes: {len(known):,} of {len(rows):,} are genes of the model that "
                f"{self.config.min_cells} scored cells of {context.dataset} express (min_cells), expected one or more, "
                "and others that are seen; name genes by Ensembl id or current symbol"
            )
        left_out = sorted(name for name, row in rows.items() if row < 0 or not expressed[row])
        if left_out:
            print(
                f"{context.dataset}: imputation: not hidden, unknown or too rare: {', '.join(left_out)}",
                flush=True,
            )
        return known

    def _columns(self, hidden: HiddenGenes, predictions: Iterator[Prediction]) -> list[ScoreColumn]:
        """A column for each metric: means over the folds of a repetition, of the methods that have
        the metric.
        """
        seen = hidden.expression()
        n_units = {
            metric: seen.shape[1] if metric.endswith("by gene") else len(seen) for metric in METRICS
        }
        # sums and numbers of scores, (2, repetitions, units), by metric and method
        sums: dict[str, dict[ScoredMethod, np.ndarray]] = {metric: {} for metric in METRICS}
        for one in predictions:
            for metric, scores in expression_scores(one.values, seen[one.cells]).items():
                if one.method not in sums[metric]:
                    sums[metric][one.method] = np.zeros((2, one.n_repetitions, n_units[metric]))
                units = slice(None) if metric.endswith("by gene") else one.cells
                found = sums[metric][one.method][:, one.repetition]
                found[0, units] += np.nan_to_num(scores)
                found[1, units] += np.isfinite(scores)
        means = {
            metric: {name: divide(*of) for name, of in sums[metric].items() if of[1].any()}
            for metric in METRICS
        }
        return [
            ScoreColumn(metric, words, means[metric])
            for metric, words in METRICS.items()
            if means[metric]
        ]

    def _predictions(
        self, hidden: HiddenGenes, trained: TrainingCells | None, folds: list[Split]
    ) -> Iterator[Prediction]:
        """Predictions of the test cells of each fold: by the model and what is fitted on training
        cells, then by what is fitted on the other folds.
        """
        model = hidden.context.model
        n_repetitions = 1 + max(repetition for repetition, _, _ in folds)
        vectors = {
            EMBEDDING: hidden.embedded(model.network),
            UNTRAINED: hidden.embedded(model.untrained),
        }
        of_training_cells: dict[ScoredMethod, np.ndarray] = {}
        decoded = own_expression(hidden, vectors[EMBEDDING])
        if decoded is not None:
            of_training_cells[replace(EMBEDDING, classifier="decoder")] = decoded
        if trained is not None:
            of_training_cells |= trained.predict(hidden, vectors, self.config.neighbors)
        for repetition, _, test in folds:
            for method, values in of_training_cells.items():
                yield Prediction(method, repetition, n_repetitions, test, values[test])
        expression = hidden.expression()
        profiles = hidden.profiles
        for repetition, train, test in folds:
            components = pca((len(train), profiles.shape[1])).fit(profiles[train])
            features = vectors | {COMPONENTS_OF_VISIBLE: components.transform(profiles)}
            fitted = {fitted_in_folds(method): values[train] for method, values in features.items()}
            tested = {fitted_in_folds(method): values[test] for method, values in features.items()}
            predicted = regressions(fitted, expression[train], tested, self.config.neighbors)
            means = np.tile(expression[train].mean(0), (len(test), 1))
            predicted[fitted_in_folds(GENE_MEANS)] = means
            for method, values in predicted.items():
                yield Prediction(method, repetition, n_repetitions, test, values)


def fitted_in_folds(method: ScoredMethod) -> ScoredMethod:
    """The method fitted on other cells than the model: a row of its own, in no verdict."""
    return replace(add_note(method, ", folds of scored cells"), kind="variant")
